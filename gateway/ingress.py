"""One ingress process: its models, its two listeners, and the order in which they come and go."""

import asyncio
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from backends.base import ModelSpec
from gateway.clock import LoopClock
from gateway.config import Backend, Config, Limits, ModelSection
from gateway.config.server import BODIES_OF_ONE_REQUEST
from gateway.edges.grpc_server import GrpcServer
from gateway.edges.http_server import HttpServer
from gateway.edges.long_turns import LongTurns
from gateway.edges.recycling import Recycler
from gateway.edges.rest_routes import RestRoutes
from gateway.engine.lane import Lane
from gateway.engine.lane_opener import LaneOpener, OpenRunner
from gateway.engine.loop_runs import LoopRuns
from gateway.engine.metric_files import NodeFiles
from gateway.engine.metrics import Metrics
from gateway.engine.repository import Repository, RepositoryControl
from gateway.engine.runner import BatchRunner
from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.engine.workers import WorkerPool
from gateway.errors import ConfigError
from gateway.process.announcement import ReadyModel
from gateway.process.child import living_pids
from gateway.process.kept_folders import let_all_go, take_named
from gateway.process.machine import allow_files, memory_bytes
from gateway.process.ports import PortClaims
from gateway.process.run_dir import make_run_dir, private_directory
from gateway.tracing.tracer import open_tracer
from gateway.wire.memory import Memory
from gateway.wire.origins import Origins

if TYPE_CHECKING:  # what most gateways start without
    from gateway.access.doors import Doors
    from gateway.engine.multi_model import MultiModel
    from gateway.process.certificates import Certificates

_OTHER_FILES: Final = 256  # that are open beside connections: models, sessions, the listeners
_FREEING_S: Final = 0.5
_FREEING_LEAST_S: Final = 0.1
_TRACES_SENT_S: Final = 2.0  # at most, that the end waits for spans to be sent

log = logging.getLogger(__name__)


class Ports(NamedTuple):
    """Where the listeners are; None: there is none."""

    http: int | None
    grpc: int | None


class _How(TypedDict):
    """How both listeners listen."""

    reuse_port: bool
    certificates: "Certificates | None"


class Ingress:
    """Life: start -> drain. On one event loop.

    pools: of the sessions in this process.
    """

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        open_remote: OpenRunner | None = None,
        control: RepositoryControl | None = None,
        owner: str | None = None,
        bound: Mapping[str, Sequence[socket.socket]] = MappingProxyType({}),
        probe_every_length: bool = True,
        on_leave: Callable[[], None] = lambda: None,
        multi_model: "Callable[[Repository], MultiModel] | None" = None,
    ) -> None:
        """run_dir: of this node, shared by its ingress processes. open_remote: opens the runners of backends that are placed in
        replicas; None: there are none. probe_every_length: see `probe`.

        on_leave: called when a client has unloaded a model or loaded it again, or that failed. owner: all who name the same one
        may listen on the same ports, side by side; None: it listens alone. bound: sockets to listen on, by protocol: ports that
        who started this process has made sure of. multi_model: makes what SageMaker loads and unloads by; None: it does not.
        """
        self._config = config
        self._run_dir = run_dir
        self.pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
        self._open_remote = open_remote
        self._doors: Doors | None = None
        self._clock = LoopClock(asyncio.get_running_loop())
        self._loop_runs = LoopRuns(asyncio.get_running_loop(), self._clock)
        self.metrics = Metrics(
            config.models,
            directory=make_run_dir(run_dir) if owner is not None else None,
            enabled=config.metrics.enabled,
            triton_names=config.metrics.triton_names,
            instance_type=config.server.instance_type or "",
            session_pids=living_pids,
        )
        self.repository = Repository(
            config,
            opener=LaneOpener(
                self._open_runner,
                metrics=self.metrics,
                clock=self._clock,
                state_dir=config.server.state_dir,
                shared_workers=config.server.shared_workers,
                probe_every_length=probe_every_length,
                call_soon=self._loop_runs.call_soon,
                processes=config.server.ingresses,
            ),
            metrics=self.metrics,
            clock=self._clock,
            regions=SharedMemoryRegions(run_dir / "regions", enabled=config.server.system_shared_memory),
            control=control,
            on_leave=on_leave,
        )
        # Of all models, those that are loaded later as well.
        self._kept = take_named([backend.options() for model in config.models for backend in model.backends])
        self._multi_model = multi_model(self.repository) if multi_model is not None else None
        self.metrics.watch_models(self._readiness)
        self._tracer = self.repository.tracer = open_tracer(config.tracing, os.environ)
        if self._tracer is not None:
            self.metrics.watch_spans(self._tracer.spans)
        self._claims = PortClaims(config.server, owner=owner)
        self._reuse_port = owner is not None
        self._bound = bound
        self._memory = Memory(_memory_bytes(config.server.limits))
        self._turns = LongTurns()
        self._http: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        self._beside: list[asyncio.Task[None]] = []  # run until the end

    async def start(self) -> Ports:
        """Load the models, then listen. Raises: OSError, if a port is taken, which is tested first; GatewayError."""
        server = self._config.server
        how: _How = {"reuse_port": self._reuse_port, "certificates": None}
        listeners = [port for port in (server.http_port, server.grpc_port) if port is not None]
        if listeners:  # what is wrong here is told before models are loaded
            if server.tls is not None:
                from gateway.process.certificates import Certificates

                how["certificates"] = certificates = Certificates(server.tls)
                self.metrics.watch_certificates(certificates.expiry_s)
            self._asked_keys()
            self._make_room(len(listeners))
        if not self._bound:
            self._claims.claim()
        await self.repository.start()
        self.metrics.started()
        self._beside.append(asyncio.create_task(self.metrics.keep_publishing()))
        http = grpc = None
        if server.http_port is not None:
            try:
                http = await self.rest_listener().start(server.host, server.http_port, bound=self._bound.get("http", ()), **how)
            except OSError as exc:
                raise self._claims.cannot_listen("http", exc) from exc
        if server.grpc_port is not None:
            try:
                grpc = await self.grpc_listener().start(server.host, server.grpc_port, bound=self._bound.get("grpc", ()), **how)
            except OSError as exc:
                raise self._claims.cannot_listen("grpc", exc) from exc
        self._recycle_connections()
        return Ports(http, grpc)

    def _make_room(self, listeners: int) -> None:
        connections = self._config.server.limits.connections
        most = allow_files(listeners * connections + _OTHER_FILES)
        if most < connections + _OTHER_FILES:
            log.warning(
                "this process may have %d files open (ulimit -Hn), too few for server.limits.connections %d: of more "
                "connections than fit some are refused: raise the one, or lower the other", most, connections,
            )  # fmt: skip

    def rest_listener(self) -> HttpServer:
        """Make what answers REST; it listens once it is started, and is drained with the rest. Once, if `start` has not."""
        server = self._config.server
        scrape = self.metrics.scrape if self.metrics.enabled else None
        routes = RestRoutes(
            self.repository,
            server.limits,
            scrape=scrape,
            status_page=server.shows_page,
            doors=self._asked_keys(),
            multi_model=self._multi_model,
        )
        origins = Origins(
            server.allowed_hosts, server.host if server.http_port is not None and server.trusts_all_here else None
        )
        self._http = HttpServer(routes.__call__, server.limits, self._memory, self._turns, routes.on_fault, origins)
        return self._http

    def grpc_listener(self) -> GrpcServer:
        """Likewise for gRPC."""
        self._grpc = GrpcServer(self.repository, self._config.server.limits, self._memory, self._asked_keys(), self._turns)
        return self._grpc

    def _recycle_connections(self) -> None:
        """Have connections spread over the processes that share the ports, and none grow older than it may."""
        named = {"http": self._http, "grpc": self._grpc}
        listeners = {name: listener for name, listener in named.items() if listener is not None}
        age_s = self._config.server.limits.connection_age_s
        files = None
        if self._reuse_port and self._config.server.ingresses > 1:
            try:
                files = NodeFiles(private_directory(self._run_dir / "connections"))
                files.forget_ended()
            except (OSError, ConfigError) as exc:
                log.warning("connections stay with the process that took them: server.run_dir: %s", exc)
        if listeners and (age_s or files is not None):
            recycler = Recycler(listeners, age_s=age_s, files=files)
            self._beside.append(asyncio.create_task(recycler.keep_looking()))

    def _asked_keys(self) -> "Doors | None":
        """Who asks for keys, the same for both listeners; None: nobody. Raises: ConfigError."""
        access = self._config.server.access
        if access is not None and self._doors is None:
            from gateway.access.doors import Doors
            from gateway.access.usage import SharedUsage

            usage = None
            if self._reuse_port:  # others listen beside it
                directory = private_directory(self._run_dir / "keys")
                try:
                    usage = SharedUsage(directory, self._config.server.ingresses)
                except OSError as exc:
                    raise ConfigError(f"server.run_dir: '{directory}': what keys ask cannot be kept: {exc.strerror}") from exc
            self._doors = Doors(access, os.environ, usage)
            if access.keys is not None:
                self._beside.append(asyncio.create_task(self._doors.keep_looking()))
        return self._doors

    async def drain(self, *, late: bool = False) -> None:
        """Stop accepting, answer what is in flight within drain_timeout_s, then close everything.

        late: who asks without a listener has waited for as long already. A second call does nothing.
        """
        try:
            await self._answer_and_close(late=late)
        finally:  # also where that is broken off
            for task in self._beside:
                task.cancel()
            await asyncio.gather(*self._beside, return_exceptions=True)
            self._beside.clear()
            let_all_go(self._kept)
        self.metrics.flush()

    async def _answer_and_close(self, *, late: bool) -> None:
        if self._multi_model is not None:
            self._multi_model.end_loads()
        self.repository.end_loads()  # nobody gains by their end, and their callers would hold the listeners up
        timeout_s = self._config.server.drain_timeout_s
        end_s = time.monotonic() + timeout_s
        listeners = [listener for listener in (self._http, self._grpc) if listener is not None]
        self._http = self._grpc = None
        # The models need some of the time to end what they run for nobody.
        answering_s = max(0.0, timeout_s - min(_FREEING_S, timeout_s / 4))
        answered_by_s = time.monotonic() + answering_s
        draining = asyncio.gather(*(listener.drain(answering_s, self._give_up) for listener in listeners))
        asyncio.get_running_loop().call_soon(self._claims.release)  # after the drains' first steps, which close the listeners
        await draining
        self._give_up(late=late or time.monotonic() >= answered_by_s)
        try:
            # Of no time at all it would not even be begun, and nothing learned be kept.
            await asyncio.wait_for(self.repository.close(), max(_FREEING_LEAST_S, end_s - time.monotonic()))
        except TimeoutError:
            log.error("models still ran after drain_timeout_s %g, and are left", timeout_s)
        if self._tracer is not None:
            sent_s = min(_TRACES_SENT_S, max(_FREEING_LEAST_S, end_s - time.monotonic()))
            await asyncio.get_running_loop().run_in_executor(None, self._tracer.close, sent_s)

    def _give_up(self, *, late: bool = True) -> None:
        """late: the time for answers is over; else nobody waits for those that are left."""
        pending = self.repository.pending
        if pending:
            if late:
                timeout_s = self._config.server.drain_timeout_s
                log.error("%d requests are answered with an error: drain_timeout_s %g is over", pending, timeout_s)
            self.repository.give_up()

    def ready_models(self) -> tuple[ReadyModel, ...]:
        """What is served now, in the order of the configuration."""
        rows = self.repository.index(ready_only=True)
        served = [self.repository.model(row["name"], row["version"]) for row in rows]
        return tuple(ReadyModel(model.name, model.version, model.spec, _probed(model.lanes)) for model in served)

    def _open_runner(self, model: ModelSection, backend: Backend, declared: ModelSpec) -> BatchRunner:
        if self._open_remote is not None and backend.placement == "replicas":
            return self._open_remote(model, backend, declared)
        name = f"{model.name}:{model.version}/{backend.label}"
        pool = WorkerPool(backend, declared, name=name, clock=self._clock, loop_runs=self._loop_runs)
        self.pools.add(pool)
        return pool

    def _readiness(self) -> Iterable[tuple[str, str, bool]]:
        return [(row["name"], row["version"], row["state"] == "READY") for row in self.repository.index()]


def _memory_bytes(limits: Limits) -> int:
    """What all connections together may hold."""
    return limits.memory_bytes or max(memory_bytes() // 4, BODIES_OF_ONE_REQUEST * limits.body_bytes)


def _probed(lanes: Iterable[Lane]) -> bool:
    return any(curve.ready for lane in lanes for curve in lane.batcher.service.curves.values())
