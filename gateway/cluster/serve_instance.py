"""Ray Serve on the cluster: started where there is none, and ended by the last `gateway serve` there, unless others started it.

Whoever is about to end it says so first, then looks whether it is used: by an application, or by another `gateway serve`, which
may be about to deploy. Whoever joins says so first, then looks whether Serve is being ended, and waits for that. So one of the
two sees the other, and nothing is deployed on a Serve that is ending, which ignores it.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve
from ray._private.worker import global_worker
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from gateway.cluster.deployments import QUIET
from gateway.cluster.head import Head
from gateway.cluster.stopping import Stop
from gateway.process.console import step
from gateway.process.supervisor import LEFT

# Keys of the cluster's key-value store. The value names the controller.
_STARTED: Final = "gateway: has started Ray Serve"
# With a job's id behind it.
_JOINED: Final = "gateway: has joined Ray Serve: "
# With the controller's name and a job's id behind it.
_ENDING: Final = "gateway: is ending Ray Serve: "

_ENDED_S: Final = 30.0  # as long as serve.shutdown waits
_LOOK_S: Final = 0.1


@contextlib.contextmanager
def serve_instance(head: Head, tell: Callable[[str], None], stop: Stop, *, own: bool) -> Iterator[None]:
    """Use the cluster's Serve, or start it, without its proxy: the ingresses listen themselves.

    tell: as in `run_on_ray`. own: the cluster was started here, and ends after this, with its Serve. Raises: StopAsked.
    """
    job = ray.get_runtime_context().get_job_id()
    controller = _controller()
    if not own and (controller is None or _started(controller)):
        tell(f"{LEFT}Ray Serve may be left on the Ray cluster")  # before others leave its end to this one
    _internal_kv_put(_JOINED + job, b"")
    try:
        with step("waiting for Ray Serve to end"):
            stop.wait_for(_wait_while_ending)
        if _controller() is None:
            with step("starting Ray Serve"):
                _start()
        yield
    finally:
        if not (head.lost or own):
            _end_unused(job)


def _start() -> None:
    others = False
    try:
        serve.start(proxy_location="Disabled", logging_config=QUIET)
    except ActorAlreadyExistsError:  # another has just done so
        others = True
    finally:  # also where it fails: its controller may run
        if not others:
            _internal_kv_put(_STARTED, _controller() or "")


def _started(controller: str) -> bool:
    """Whether a `gateway serve` has."""
    return bool(_internal_kv_get(_STARTED) == controller.encode())


def _wait_while_ending() -> None:
    until = time.monotonic() + _ENDED_S
    while (controller := _controller()) and (marks := _jobs(f"{_ENDING}{controller} ")):
        if time.monotonic() > until:
            for killed in marks - _alive():
                _internal_kv_del(f"{_ENDING}{controller} {killed}")
            return
        time.sleep(_LOOK_S)


def _end_unused(job: str) -> None:
    _internal_kv_del(_JOINED + job)
    controller = _controller()
    if controller is None or not _started(controller):
        return
    mark = f"{_ENDING}{controller} {job}"
    _internal_kv_put(mark, b"")
    used = True
    try:
        used = bool(serve.status().applications or _jobs(_JOINED) & _alive())
    except ActorDiedError:  # another has ended it
        return
    finally:
        if used:
            _internal_kv_del(mark)
    if not used:
        # Where Ray itself prints: that it will try for ever to reach the controller which is being ended.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # until `apart` ends
        serve.shutdown()  # type: ignore[no-untyped-call]  # ray's


def _controller() -> str | None:
    """The name of this one alone; None: Serve does not run."""
    try:
        return str(ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE))
    except ValueError:
        return None


def _jobs(prefix: str) -> set[str]:
    """Those whose ids there are behind it, as keys."""
    return {key.decode().removeprefix(prefix) for key in _internal_kv_list(prefix)}


def _alive() -> set[str]:
    """The jobs whose processes are connected to the cluster."""
    worker: Any = global_worker
    jobs = worker.gcs_client.get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
    return {key.hex() for key, job in jobs.items() if not job.is_dead}
