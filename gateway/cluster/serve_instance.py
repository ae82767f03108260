"""Ray Serve on the cluster: started where there is none, and ended by the last `gateway serve` there, unless others started it.

Whoever is about to end it says so first, then looks whether it is used: by an application, or by another `gateway serve`, which
may be about to deploy. Whoever joins is seen first, by its `JOB`, then looks whether Serve is being ended, and waits for that.
So one of the two sees the other, and nothing is deployed on a Serve that is ending, which ignores it.
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
from ray.exceptions import ActorAlreadyExistsError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_exists, _internal_kv_get, _internal_kv_put
from ray.job_config import JobConfig
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from gateway.cluster.deployments import QUIET
from gateway.cluster.head import Head
from gateway.process.console import step
from gateway.process.supervisor import LEFT

_GATEWAY: Final = "gateway serve"

JOB: Final = JobConfig(metadata={_GATEWAY: ""})
"""For the `ray.init` of who uses `serve_instance`."""

# Keys of the cluster's key-value store, whose values name the controller.
_STARTED: Final = "gateway: has started Ray Serve"
_ENDING: Final = "gateway: is ending Ray Serve"
# With a job's id behind it.
_DONE: Final = "gateway: is done with Ray Serve: "

_ENDED_S: Final = 30.0  # as long as serve.shutdown waits
_LOOK_S: Final = 0.1


@contextlib.contextmanager
def serve_instance(head: Head, tell: Callable[[str], None], *, own: bool) -> Iterator[None]:
    """Use the cluster's Serve, or start it, without its proxy: the ingresses listen themselves.

    tell: as in `run_on_ray`. own: the cluster was started here, and ends after this, with its Serve.
    """
    with step("waiting for Ray Serve to end"):
        _wait_while_ending()
    if _controller() is None:
        if not own:
            tell(f"{LEFT}Ray Serve is left on the Ray cluster")
        with step("starting Ray Serve"), contextlib.suppress(ActorAlreadyExistsError):  # another has just done so
            serve.start(proxy_location="Disabled", logging_config=QUIET)
            _internal_kv_put(_STARTED, _controller() or b"")
    try:
        yield
    finally:
        if not (head.lost or own):
            _end_unused()


def _wait_while_ending() -> None:
    until = time.monotonic() + _ENDED_S
    while (ending := _internal_kv_get(_ENDING)) and ending == _controller():
        if time.monotonic() > until:  # who was to end it was killed
            _internal_kv_del(_ENDING)
        time.sleep(_LOOK_S)


def _end_unused() -> None:
    controller = _controller()
    if controller is None or _internal_kv_get(_STARTED) != controller:
        return
    _internal_kv_put(_DONE + ray.get_runtime_context().get_job_id(), b"")
    _internal_kv_put(_ENDING, controller)
    if serve.status().applications or _joined():
        _internal_kv_del(_ENDING)
        return
    # Where Ray itself prints: that it will try for ever to reach the controller which is being ended.
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # until `apart` ends
    serve.shutdown()  # type: ignore[no-untyped-call]  # ray's


def _controller() -> bytes | None:
    """The name of this one alone; None: Serve does not run."""
    try:
        return str(ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)).encode()
    except ValueError:
        return None


def _joined() -> bool:
    """Whether a `gateway serve` is connected to the cluster that is not done."""
    worker: Any = global_worker
    jobs = worker.gcs_client.get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
    alive = [key.hex() for key, job in jobs.items() if _GATEWAY in job.config.metadata and not job.is_dead]
    return any(not _internal_kv_exists(_DONE + job) for job in alive)
