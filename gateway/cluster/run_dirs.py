"""Where the processes of an application share files on a node: nothing there outlives the application.

Each life of an application, from its first deploy until it is deleted, has a name of its own, in the cluster's key-value store.
So who is deployed under the name of one that is gone has none of its regions and counts, however that has ended.
"""

import os
import uuid
from pathlib import Path
from typing import Any, Final

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gateway.process.run_dir import forget_regions, remove_shared_run_dir, shared_run_dir

_REMOVED_S: Final = 15.0


def begin_life(application: str, own: str | None) -> str:
    """To be called before an application is deployed where there is none of its name. Returns what `run_dir_name` does then.

    own: `server.run_dir`, of which nothing is removed but regions that were registered with a server that is gone.
    """
    if own is not None:
        forget_regions(Path(own))
    _internal_kv_put(_key(application), uuid.uuid4().hex[:8].encode())
    return run_dir_name(application)


def run_dir_name(application: str) -> str:
    """For `shared_run_dir`. One that no `gateway serve` has deployed has one life."""
    life = _internal_kv_get(_key(application)) or b""
    return "-".join(filter(None, (_session_dir().name, application, life.decode())))


def run_dir_of(application: str, own: str | None) -> Path:
    """Of this node. own: `server.run_dir`. Raises: ConfigError."""
    # Not in Ray's session directory, to which everyone can write: they could put another in the place of ours.
    return Path(own or shared_run_dir(run_dir_name(application)))


def clear_run_dirs(name: str, own: str | None) -> None:
    """Have those of an application that is gone removed on all nodes; of one's own, what clients have registered.

    Raises: RayError.

    Here that is done at once, unless the application's processes were another user's: a task, which is theirs too, may have
    to wait for a new process.
    """
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]  # ray's
    here = Path(own or shared_run_dir(name))
    if here.exists() and here.stat().st_uid == os.geteuid():
        _clear(name, own)
        nodes.discard(ray.get_runtime_context().get_node_id())
    clear = ray.remote(_clear)
    tasks = [
        clear.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(name, own)
        for node in nodes
    ]
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=_REMOVED_S)


def _clear(name: str, own: str | None) -> None:
    if own is None:
        remove_shared_run_dir(name)
    else:
        forget_regions(Path(own))


def _session_dir() -> Path:
    node: Any = ray._private.worker._global_node  # set in every process of Ray
    return Path(node.get_session_dir_path())


def _key(application: str) -> str:
    return f"gateway: life of {application}"
