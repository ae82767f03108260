"""Where the processes of an application share files on a node: nothing there outlives the application.

Each life of an application, from its first deploy until it is deleted, has a name of its own, in the cluster's key-value store.
So who is deployed under the name of one that is gone has none of its regions and counts, however that has ended.
"""

import logging
import os
import uuid
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gateway.process.run_dir import forget_regions, remove_shared_run_dir, shared_run_dir

# Of the 3 s within which all ends after the drain; a task that needs a new process takes longer on a machine of two busy cores.
_CLEARED_S: Final = 2.0
_CLEARED_AT_MOST_S: Final = 5.0

log = logging.getLogger(__name__)


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


def clear_run_dirs(name: str, own: str | None, *, unused_s: float) -> None:
    """Have those of an application that is gone removed on all nodes; of one's own, what clients have registered.

    unused_s: how much sooner than promised it has drained. Raises: RayError.

    Here that is done at once, unless the application's processes were another user's: a task, which is theirs too, may have
    to wait for a new process.
    """
    nodes = {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()  # type: ignore[no-untyped-call]  # ray's
        if node["Alive"]
    }
    here = Path(own or shared_run_dir(name))
    if here.exists() and here.stat().st_uid == os.geteuid():
        _clear(name, own)
        nodes.pop(ray.get_runtime_context().get_node_id(), None)
    clear = ray.remote(_clear)
    tasks = {
        clear.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(name, own): where
        for node, where in nodes.items()
    }
    if tasks:
        within_s = min(_CLEARED_S + max(0.0, unused_s), _CLEARED_AT_MOST_S)
        done, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=within_s)
        for task in done:
            try:
                ray.get(task)
            except RayError:  # as of a node that has died
                late.append(task)
        if late:
            those = ", ".join(sorted(tasks[task] for task in late))
            log.warning("%s may be left on nodes that did not clear it within %.1f s: %s", here, within_s, those)


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
