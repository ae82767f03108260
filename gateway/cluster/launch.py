"""`gateway serve` on Ray: joins a cluster or starts one, deploys, waits for a signal, and takes down what it started."""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

# Of this process and of the Ray processes it starts. ray reads them when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray makes its workers yield to everything else by default: 15

import ray
from ray import serve
from ray._private.services import canonicalize_bootstrap_address
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

from gateway.cluster.deployments import QUIET, application
from gateway.config import Config
from gateway.config import Ray as RayConfig
from gateway.errors import BackendUnreachable, InternalError

# Batches travel by value, in calls: Ray's shared object store holds next to nothing.
_OBJECT_STORE_BYTES: Final = 128 << 20
_PORTS_S: Final = 30.0
_CONNECT_S: Final = 3.0

log = logging.getLogger(__name__)

Announce = Callable[[Config, int | None, int | None], None]


class _Stopped(BaseException):
    """A signal asked to stop. No error: nothing but `run_on_ray` may catch it."""


def run_on_ray(config: Config, announce: Announce) -> int:
    """Serve until SIGINT or SIGTERM. Call on the main thread.

    announce: called once with the ports of HTTP and gRPC when requests are answered. Raises: GatewayError.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    app = application(config)
    _handle_signals()
    try:
        with _cluster(config.ray), _serve_instance(), _deployed(app, config.ray.application) as ingress:
            announce(config, *ingress.ports.remote().result(timeout_s=_PORTS_S))
            while True:
                signal.pause()
    except _Stopped:
        return 0


@contextlib.contextmanager
def _cluster(options: RayConfig) -> Iterator[None]:
    """Join the cluster at `address`, or start one for as long as this lasts.

    None joins one of this node if there is one; "local" never joins.
    """
    settings: dict[str, Any] = {"logging_level": "WARNING", "namespace": SERVE_NAMESPACE}
    try:
        if not _joined(options.address, settings):
            ray.init(
                address="local",
                include_dashboard=options.dashboard,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **settings,
            )
        _handle_signals()  # again: ray.init sets a handler of its own
        yield
    finally:
        ray.shutdown()  # ends the processes of a cluster that was started here, and only these


def _joined(address: str | None, settings: dict[str, Any]) -> bool:
    if address == "local":
        return False
    found = canonicalize_bootstrap_address(address or "auto")
    # A cluster that ended without cleaning up leaves its address behind, and ray.init would try it for minutes.
    if found is None or not _answers(found):
        if address is None:
            return False
        raise BackendUnreachable(f"ray.address: {address!r}: no Ray cluster answers there")
    ray.init(address=found, **settings)
    return True


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


def _handle_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # draining is bounded in time
    raise _Stopped


@contextlib.contextmanager
def _serve_instance() -> Iterator[None]:
    """Use the cluster's Serve, or start it for as long as this lasts, without its proxy: the ingresses listen themselves."""
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        pass
    else:
        yield
        return
    serve.start(proxy_location="Disabled", logging_config=QUIET)
    try:
        yield
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]  # ray's


@contextlib.contextmanager
def _deployed(app: serve.Application, name: str) -> Iterator[DeploymentHandle[Any]]:
    """Run the application under this name, in place of what ran under it, and delete it at the end."""
    try:
        try:
            yield serve.run(app, name=name, route_prefix=None)
        except RuntimeError as exc:  # Serve's, with the reason in the status
            deployments = serve.status().applications[name].deployments
            faults = [
                f"{key}: {_last_line(deployment.message)}" for key, deployment in deployments.items() if deployment.message
            ]
            raise InternalError("\n".join(["the application did not start", *faults])) from exc
    finally:
        try:
            serve.delete(name)
        except TimeoutError:
            log.error("the application %s is still being deleted", name)


def _last_line(message: str) -> str:
    """What went wrong, of a message that may end in a traceback."""
    return message.strip().rpartition("\n")[2]
