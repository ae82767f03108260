"""`gateway serve` on Ray: joins a cluster or starts one, deploys, waits for a signal, and takes back what it deployed.

In a process whose parent is `gateway.process.supervisor`: that ends what is left, also the processes of a Ray that was started
here.
"""

import contextlib
import logging
import math
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

# Of this process and of the Ray processes it starts. ray reads them when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray makes its workers yield to everything else by default: 15
# Our only calls by handles wait for seconds anyway: on a busy machine a late answer is nothing to warn of.
os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "5")
os.environ.setdefault("RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "5")

import grpc
import ray
from ray import serve
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray._private.services import canonicalize_bootstrap_address
from ray.core.generated import gcs_service_pb2 as messages
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_exists, _internal_kv_put
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.api import RunTarget
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from gateway.cluster.control import end_control
from gateway.cluster.deployments import INGRESS, application, check_room, deployer, port_owner, waiting
from gateway.cluster.head import CONNECT_S, Head
from gateway.cluster.leaving import end_closing, end_silent, end_unplaced, replicas_of
from gateway.cluster.run_dirs import begin_life, clear_run_dirs, run_dir_name
from gateway.cluster.serve_instance import serve_instance
from gateway.cluster.stopping import Stop, StopAsked
from gateway.config import Config, ServerSection
from gateway.errors import BackendUnreachable, InternalError
from gateway.process.announcement import Announce, named
from gateway.process.console import Speech, step
from gateway.process.ports import check_ports
from gateway.process.supervisor import ENDING, LEFT, LOST, RUN_DIR, SERVING, UNANSWERED_S, hear_signals

# Batches travel by value, in calls: Ray's shared object store holds next to nothing.
_OBJECT_STORE_BYTES: Final = 128 << 20
_PORTS_S: Final = 30.0
_DELETED_S: Final = 60.0
# Until Serve replaces no replica of an application that it is to delete.
_TOLD_S: Final = 0.5
# After the drain: the ends of replicas that answer.
_ENDED_S: Final = 0.5
_SILENT_S: Final = 1.5
_CLOSED_S: Final = 1.0  # of those whose models take longer to close than the drain has left them
# After the drain: what a cluster whose processes are gone gets for answering, instead of UNANSWERED_S.
_LOST_S: Final = 1.0
# Who gives up waits so long for whom it was to replace to deploy again.
_TAKEN_BACK_S: Final = 10.0
_LISTED_S: Final = 10.0
_LOOK_S: Final = 0.1
_WATCH_S: Final = 1.0
_WAITS_S: Final = 30.0  # for a node, until that is told
_REPLACED: Final = "was replaced by another that somebody has deployed under its name"

log = logging.getLogger(__name__)


def run_on_ray(config: Config, announce: Announce, speech: Speech, tell: Callable[[str], None]) -> int:
    """Serve until a signal ends it, the Ray that was started for it or runs on its node is lost, or its application is gone or
    another's.

    On the main thread, its signals `blocked`.

    announce: called when requests are answered. speech: of the processes on Ray; this one has its own. tell: what the
    supervisor is to know. Returns the exit code. Raises: GatewayError.
    """
    for name in ("ray", "ray.serve"):  # in one format with ours
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    watch = _ApplicationWatch(config.ray.application, tell)
    app = application(config, speech, watch.token)
    with step("looking for a Ray cluster"):
        found = _find(config.ray.address)
    if found is None:
        check_room(config, 1)
        check_ports(config.server, owner=None)
    elif found.nodes == 1:  # else the ingresses may well come to others, where the ports are free
        check_ports(config.server, owner=port_owner(found.id, config.ray.application))
    own = found is None
    head, stop = Head(tell), Stop()
    try:
        with _cluster(config, found, head, stop), serve_instance(head, tell, stop, own=own):
            if own:
                tell(f"{RUN_DIR}{begin_life(config.ray.application, config.server.run_dir)}")
            with _deployed(app, config, head, watch, tell, stop, own=own) as ingress:
                http, grpc_port = stop.wait_for(lambda: ingress.ports.remote().result(timeout_s=_PORTS_S))
                tell(SERVING)
                ready = stop.wait_for(lambda: ingress.ready_models.remote().result(timeout_s=_PORTS_S))
                announce(http, grpc_port, ready)
                watch.start(app)
                stop.wait()
    except StopAsked:
        if head.left:
            return 1
        return LOST if head.lost or watch.lost else 0


class _Found(NamedTuple):
    """A cluster that can be joined. id: in hexadecimal. nodes: that live."""

    address: str
    id: str
    nodes: int


def _find(wanted: str | None) -> _Found | None:
    """The cluster to join; None: start one.

    wanted: "local" starts one, "auto" joins whichever runs on this machine, host:port that one. None: what RAY_ADDRESS says;
    without that, the cluster that `ray start` started on this machine, if it lives, else start one.
    """
    key, asked = ("ray.address", wanted) if wanted else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"))
    if asked == "local":
        return None
    try:
        address = canonicalize_bootstrap_address(asked or None)  # type: ignore[arg-type]  # None is allowed
    except ConnectionError:
        raise BackendUnreachable(f"{key}: {asked!r}: no Ray cluster runs on this machine") from None
    if address is None:
        return None
    try:
        try:
            return _ask(address)
        except grpc.RpcError as exc:
            # The user's token is for clusters that want one; in others it would be in the way.
            if exc.code() is not grpc.StatusCode.UNAUTHENTICATED or not maybe_enable_token_auth_if_token_available(False):
                raise
            return _ask(address)
    except grpc.RpcError as exc:
        refused = exc.code() is grpc.StatusCode.UNAUTHENTICATED
        fault = "the Ray cluster there wants another token, see docs/deploy.md" if refused else "no Ray cluster answers there"
        if asked:
            raise BackendUnreachable(f"{key}: {asked!r}: {fault}") from exc
        # One that ended without cleaning up leaves its address behind, and ray.init would try it for minutes.
        log.warning("the cluster of the last `ray start`, %s: %s; starting another cluster", address, fault)
        return None


def _ask(address: str) -> _Found:
    """Ask a cluster's head what those who join it ask first. Raises: grpc.RpcError."""
    with init_grpc_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        head = NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]  # made by protoc, as all it takes and gives
        cluster_id = head.GetClusterId(messages.GetClusterIdRequest(), timeout=CONNECT_S).cluster_id  # type: ignore[attr-defined]
        nodes = head.GetAllNodeInfo(messages.GetAllNodeInfoRequest(), timeout=CONNECT_S).node_info_list  # type: ignore[attr-defined]
    return _Found(address, cluster_id.hex(), sum(node.state == node.ALIVE for node in nodes))


class _ApplicationWatch:
    """Over the application: others on the cluster may delete it, or deploy theirs in its place.

    Another `gateway serve` whose application does not come to serve says so in the cluster's key-value store. The one that it
    was to replace, as long as it lives, deploys its own again then.
    """

    def __init__(self, application: str, tell: Callable[[str], None]) -> None:
        """tell: as in `run_on_ray`."""
        self.token = uuid.uuid4().hex  # of what this process deploys
        self.deployed = False  # by this process, or about to be
        self.lost = False
        self._application = application
        self._tell = tell
        self._over = threading.Event()
        self._deploying = threading.Lock()
        self._app: serve.Application

    def run(self, app: serve.Application) -> DeploymentHandle[Any]:
        """Deploy it; gives its handle once it runs.

        Raises: InternalError, if it fails; StopAsked, after `forget`, or as `start` ends this process.
        """
        with self._deploying:
            if self._over.is_set():
                raise StopAsked
            ingress = self._deploy(app)
        tell_at = time.monotonic() + _WAITS_S
        while not self._runs():
            if time.monotonic() > tell_at:
                tell_at = math.inf
                for line in waiting(self.details() or {"deployments": {}}):
                    log.warning("%s", line)
            if self._over.wait(_WATCH_S):
                raise StopAsked
        return ingress

    def start(self, app: serve.Application) -> None:
        """End as by a signal, once what runs under the name is not what this process has deployed: app."""
        self._app = app
        threading.Thread(target=self._look_on, name="watch the application", daemon=True).start()

    def forget(self) -> None:
        """What becomes of it from now on is meant to."""
        self._over.set()

    def wait_idle(self) -> None:
        """After `forget`, until nothing is deployed any more."""
        with self._deploying:
            pass

    def deployer(self) -> str | None:
        """Who has deployed it last; empty: no `gateway serve`. None: there is no application, or it is being deleted."""
        details = self._details()
        return None if details is None else deployer(details) or ""

    def give_up(self) -> bool:
        """Say that what this process has deployed will not serve. Gives whether another's is in its place, as it is soon."""
        _internal_kv_put(_given_up(self.token), b"")
        until = time.monotonic() + _TAKEN_BACK_S
        while (by := self.deployer()) == self.token and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if by in (self.token, None):
            _internal_kv_del(_given_up(self.token))
            return False
        return True

    def _take_back(self, token: str) -> None:
        with self._deploying:
            if not self._over.is_set():
                self._deploy(self._app)
                _internal_kv_del(_given_up(token))
                log.warning("the application %s was to be replaced, in vain: deployed again", self._application)

    def _deploy(self, app: serve.Application) -> DeploymentHandle[Any]:
        """Returns once Serve tells whose it is, at the next turn of its controller: who asks before is told of the last one."""
        self.deployed = True
        target = RunTarget(target=app, name=self._application, route_prefix=None)
        (ingress,) = serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        until = time.monotonic() + _LISTED_S
        while self._details() is not None and not self.ours() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return ingress

    def _runs(self) -> bool:
        details = self.details()
        if details is not None and details["status"] in ("RUNNING", "DEPLOY_FAILED") and deployer(details) != self.token:
            self._lose(_REPLACED)
            raise StopAsked
        if details is None or details["status"] == "DEPLOY_FAILED":  # None: somebody has just deleted it
            deployments = {} if details is None else details["deployments"]
            faults = [f"{key}: {_failure(each['message'])}" for key, each in deployments.items() if each["message"]]
            raise InternalError("\n".join(["the application did not start", *faults]))
        return bool(details["status"] == "RUNNING")

    def details(self) -> dict[str, Any] | None:
        """As Serve's controller tells them. None: there is no such application."""
        client: Any = _get_global_client()
        details: dict[str, Any] | None = client.get_serve_details()["applications"].get(self._application)
        return details

    def ours(self) -> bool:
        """Whether this process has deployed what runs: also where another's, that was to replace it, has failed."""
        details = self._details()
        return details is not None and (deployer(details) == self.token or details["status"] == "DEPLOY_FAILED")

    def serves(self) -> bool:
        details = self._details()
        return details is not None and details["status"] == "RUNNING"

    def _details(self) -> dict[str, Any] | None:
        """None: there is no such application, or it is being deleted."""
        details = self.details()
        return None if details is None or details["status"] == "DELETING" else details

    def _look_on(self) -> None:
        while not (fate := self._fate()):
            if self._over.wait(_WATCH_S):
                return
        if self._over.is_set():
            return
        self._lose(fate)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _lose(self, fate: str) -> None:
        self.lost = True
        log.error("the application %s %s: ending", self._application, fate)
        self._tell(ENDING)

    def _fate(self) -> str:
        """Why this process has nothing left to do; empty: it has."""
        try:
            details = self._details()
            by = None if details is None else deployer(details)
            if by and by != self.token and _internal_kv_exists(_given_up(by)):
                self._take_back(by)
                return ""
        except Exception as exc:  # of a cluster that is lost, as `Head` tells, or whose Serve is restarted
            log.debug("the application %s could not be looked at: %s", self._application, exc)
            return ""
        if details is None:
            return "was deleted by somebody else"
        return _REPLACED if by != self.token and details["status"] == "RUNNING" else ""


def _given_up(token: str) -> str:
    return f"gateway: {token} has given up"


@contextlib.contextmanager
def _cluster(config: Config, found: _Found | None, head: Head, stop: Stop) -> Iterator[None]:
    """Join this cluster, and leave it after this; or start one, which ends with this process and with its parent."""
    settings: dict[str, Any] = {"logging_level": "WARNING", "namespace": SERVE_NAMESPACE}
    try:
        if found is None:
            try:
                with step("starting Ray"):  # whose processes inherit that signals are blocked
                    ray.init(
                        address="local",
                        include_dashboard=config.ray.dashboard,
                        object_store_memory=_OBJECT_STORE_BYTES,
                        _node_ip_address="127.0.0.1",
                        **settings,
                    )
            except OSError:
                raise
            except Exception as exc:  # that is the class which Ray raises where its node is not up within 30 s
                raise BackendUnreachable(f"Ray did not start on this machine, which may be too busy: {exc}") from exc
        else:
            try:
                with step(f"joining Ray at {found.address}"):
                    ray.init(address=found.address, **settings)
            except (ConnectionError, RuntimeError, ValueError) as exc:
                raise BackendUnreachable(f"cannot join the Ray cluster at {found.address}: {exc}") from exc
        context = ray.get_runtime_context()
        node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())  # type: ignore[no-untyped-call]  # ray's
        ending = "answering what is in flight, then ending" if found is None else "ending"
        # Of a cluster that was joined the head may come back; a raylet that does is another node.
        head.watch("head process (GCS)", context.gcs_address, instead=ending if found is None else "")
        head.watch("raylet", f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", instead=ending)
        hear_signals(stop.hear)  # not before: ray.init sets a handler of its own
        yield
    finally:
        head.forget()
        if found is not None and not head.lost and stop.idle:
            ray.shutdown()


@contextlib.contextmanager
def _deployed(
    app: serve.Application,
    config: Config,
    head: Head,
    watch: _ApplicationWatch,
    tell: Callable[[str], None],
    stop: Stop,
    *,
    own: bool,
) -> Iterator[DeploymentHandle[Any]]:
    """Run the application under its name, in place of what ran under it, and delete it at the end, unless it is another's then.

    own: as in `serve_instance`; what did not come to serve is left to that end. Where it was to replace another's that still
    answers, that is left, unless it was another `gateway serve` that has ended meanwhile.
    """
    name = config.ray.application
    ingress: DeploymentHandle[Any] | None = None
    replaces = stop.wait_for(watch.deployer)
    run_dir = None
    if not own:
        begun = replaces is not None
        run_dir = stop.wait_for(lambda: run_dir_name(name) if begun else begin_life(name, config.server.run_dir))
        tell(f"{LEFT}the application {name} may be left on the Ray cluster")
    try:
        with step(f"loading {named(model.name for model in config.models)} on Ray"):
            ingress = stop.wait_for(lambda: watch.run(app))
        yield ingress
    finally:
        watch.forget()
        if ingress is None:
            # What Serve says of a replica that is ended while it starts: a traceback.
            global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
        if ingress is not None or not own:
            left = replaces if ingress is None else None
            deleting = threading.Thread(target=_delete, args=(config, head, watch, run_dir, left), name="delete", daemon=True)
            deleting.start()
            if own:
                while deleting.is_alive() and not head.lost:
                    deleting.join(_LOOK_S)
            elif not _deleted(deleting, head, config.server):
                head.left = True
                log.error("the application %s may be left on the Ray cluster: %s", name, head.fault)
        if own and head.lost and ingress is not None:
            _drain(ingress, config.server)


def _deleted(deleting: threading.Thread, head: Head, server: ServerSection) -> bool:
    """Wait for the end of `_delete`: while Ray is lost as long as a drain may take. Gives whether it has come."""
    lost, until = False, time.monotonic() + server.drain_timeout_s + UNANSWERED_S
    while deleting.is_alive() and time.monotonic() < until:
        if head.lost != lost:
            lost = not lost
            until = time.monotonic() + server.drain_timeout_s + (_LOST_S if lost else UNANSWERED_S)
        deleting.join(_LOOK_S)
    return not (deleting.is_alive() or head.left)


def _delete(config: Config, head: Head, watch: _ApplicationWatch, run_dir: str | None, replaces: str | None) -> None:
    """Return when it has drained and is gone, cannot be deleted, or is another's. Serve's own waiting looks once a second.

    run_dir: the name of its directory; None: the supervisor removes that. replaces: who has deployed what it was to replace and
    has not, as `deployer` gives it, or None.
    """
    application = config.ray.application
    fault = "could not be deleted"
    try:
        watch.wait_idle()
        while run_dir is not None and head.may_return:
            time.sleep(_LOOK_S)
        if watch.lost and watch.deployer() is not None:
            return
        if replaces == "" and watch.ours() and not watch.serves():
            log.warning(
                "the application %s is left on the Ray cluster: what it was to replace answers; deploy that again", application
            )
            return
        if replaces is not None and (watch.give_up() if replaces else watch.deployer() not in (None, watch.token)):
            log.warning("the application %s is left on the Ray cluster: what ran there before goes on answering", application)
            return
        before: dict[str, Any] = {"deployments": {}}
        by: str | None = watch.token
        replicas = seen = replicas_of(application)
        if watch.ours():
            before = watch.details() or before
            by = deployer(before)
            serve.delete(application, _blocking=False)
        elif watch.deployer() is not None or not watch.deployed:  # else somebody else has deleted it
            return
        # Serve tells of the deletion a little later, and of no replicas from then on.
        told = time.monotonic() + _TOLD_S
        drained = told + config.server.drain_timeout_s + _ENDED_S
        until = drained + _DELETED_S
        while (details := watch.details()) is not None:
            now = time.monotonic()
            followed = details["status"] != "DELETING" and deployer(details) != by  # by another's, while it drains
            replicas = replicas & seen if followed else seen  # this one's
            if followed and (not replicas or now > drained + _SILENT_S):
                break
            if now > until:
                log.error("the application %s is still being deleted", application)
                return
            if now > drained:
                answering = end_silent(replicas, _SILENT_S)
                if now > drained + _CLOSED_S and not followed:
                    end_closing(answering, application, but=INGRESS)
            elif now > told and not followed:
                end_unplaced(before)
            seen = replicas_of(application)  # this one's, unless the next look finds another
            time.sleep(_LOOK_S)
        fault = "is deleted, but may have left files on its nodes"
        if details is None:
            end_control(application)
        if run_dir is not None and (details is None or not (replicas or run_dir == run_dir_name(application))):
            clear_run_dirs(run_dir, config.server.run_dir, unused_s=drained - time.monotonic())
    except Exception:  # of a cluster that is ending too
        if head.lost and run_dir is not None:
            head.left = True
            log.debug("the application %s %s", application, fault, exc_info=True)
        else:
            log.exception("the application %s %s", application, fault)


def _drain(ingress: DeploymentHandle[Any], server: ServerSection) -> None:
    """Have the ingress replicas answer what is in flight, without Serve's controller, which can do nothing any more."""
    # Each call goes to whichever replica has fewer.
    calls = [ingress.close.remote() for _ in range(server.ingresses)]
    for call in calls:
        with contextlib.suppress(RayError, TimeoutError):
            call.result(timeout_s=2 * server.drain_timeout_s)


def _failure(message: str) -> str:
    """What went wrong, of a message that may end in a traceback: an error of ours with all its lines, else the last line."""
    ours = list(re.finditer(r"^gateway\.[\w.]+: ", message, re.MULTILINE))
    return message[ours[-1].end() :].strip() if ours else message.strip().rpartition("\n")[2]
