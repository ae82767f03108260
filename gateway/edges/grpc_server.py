"""The gRPC listener: the v2 inference service, health and reflection on HTTP/2 connections of our own (http2).

An inference begins when the last byte of its message is there. The other calls run as tasks.
"""

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from gateway.access.rules import ADMIN, INFER, MODELS, OPEN
from gateway.config import Limits
from gateway.edges.grpc_call import ENCODINGS, CallStream, GrpcCall, OneMessage
from gateway.edges.grpc_inference import GrpcEndpoints, InferCall, InferStream
from gateway.edges.grpc_services import HealthWatch, InferenceServicer, ReflectionCall, parser
from gateway.edges.http2 import Http2Connection
from gateway.edges.http_server import last_words_s, listen, listened_on, no_room
from gateway.edges.long_turns import LongTurns
from gateway.edges.reflection import SERVICES as REFLECTED
from gateway.edges.reflection import Reflection
from gateway.engine.repository import Repository
from gateway.errors import Code, GatewayError, NotFound, NotReady, Unsupported
from gateway.process.forks import keep_from_forks
from gateway.protocols.messages import pb
from gateway.wire.http2_headers import header_block
from gateway.wire.memory import Memory
from gateway.wire.tensors import Buffer

if TYPE_CHECKING:
    from gateway.access.doors import Doors
    from gateway.process.certificates import Certificates

_PROTOCOL: Final = "grpc"
_SERVICE: Final = "inference.GRPCInferenceService"
_INFER: Final = f"/{_SERVICE}/ModelInfer".encode()
_STREAM: Final = f"/{_SERVICE}/ModelStreamInfer".encode()
_INFERENCES: Final = frozenset((_INFER, _STREAM))
_HEALTH: Final = "grpc.health.v1.Health"
_WATCH_S: Final = 0.25  # how late a watcher of the health is told, at most
_DRAIN_IDLE_S: Final = 1.0

# Of keys, where they are asked for; what is not listed needs ADMIN.
_NEEDS: Final = {
    "ServerLive": OPEN, "ServerReady": OPEN, "ServerMetadata": INFER, "ModelReady": INFER, "ModelMetadata": INFER,
    "ModelConfig": INFER, "ModelStatistics": INFER, "RepositoryIndex": MODELS,
}  # fmt: skip

_GRPC: Final = re.compile(rb"application/grpc($|[+; ])", re.IGNORECASE)  # and not gRPC-Web, whose answers have another form
_NOT_GRPC: Final = header_block((b"content-type", b"text/plain"), status=415)
_WANTED: Final = b"expected a POST of application/grpc: this port speaks gRPC; REST is at server.http_port\n"


class GrpcServer:
    """Life: start -> drain. On the event loop it was made on."""

    def __init__(
        self,
        repository: Repository,
        limits: Limits,
        memory: Memory | None = None,
        doors: "Doors | None" = None,
        turns: LongTurns | None = None,
    ) -> None:
        """limits: body_bytes is the longest message, header_bytes the most metadata of a call, header_timeout_s how long a
        connection may take to become HTTP/2. memory: what bounds it beside other listeners of this process. doors: who asks for
        keys; None: nobody. turns: that it shares with other listeners."""
        self._limits = limits
        self._doors = doors
        self._memory = memory or Memory()
        self._turns = turns or LongTurns()
        self._repository = repository
        self._connections: set[Http2Connection] = set()
        self._alone: set[CallStream] = set()
        self._all_closed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[InferStream] = set()
        self._watches: set[HealthWatch] = set()
        self._next_look: asyncio.TimerHandle | None = None
        self._ready = False  # as watchers were told
        self._listeners: list[asyncio.Server] = []
        self._needs: dict[bytes, str] = {f"/{_HEALTH}/{method}".encode(): OPEN for method in ("Check", "Watch")}
        self._calls = self._table()
        keep_from_forks(self)

    def descriptors(self) -> list[int]:
        return listened_on(self._listeners) + [connection.descriptor for connection in self._connections]

    async def start(
        self,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        certificates: "Certificates | None" = None,
        bound: Sequence[socket.socket] = (),
    ) -> int:
        """Listen; returns the port, which is a free one for 0. certificates: of TLS; None: without. bound: where to listen, in
        place of host and port. Raises: OSError, if the port is taken.
        """
        loop = asyncio.get_running_loop()
        connect: Callable[[], asyncio.BaseProtocol] = self._connect
        if certificates is not None:
            from gateway.edges.tls import Tls, within
            from gateway.process.certificates import HTTP2

            connect = within(Tls(certificates, HTTP2, self._limits.header_timeout_s), self._connect, loop)
        self._listeners = await listen(connect, host, port, reuse_port=reuse_port, bound=bound)
        return int(self._listeners[0].sockets[0].getsockname()[1])

    @property
    def open_connections(self) -> Collection[Http2Connection]:
        return self._connections

    async def drain(self, timeout_s: float, give_up: Callable[[], None] = lambda: None) -> None:
        """Refuse new calls (GOAWAY), answer what is in flight, end the streams, then close.

        For the first second, calls that were under way when the client heard of it are still answered. Shortly before
        timeout_s, give_up is called, to have the inferences answered now; other calls then fail as UNAVAILABLE, as
        DEADLINE_EXCEEDED if a model may have run. Who does not take that until timeout_s is cut off.
        """
        end = time.monotonic() + timeout_s
        for listener in self._listeners:
            listener.close()
        for stream in list(self._streams):
            stream.shut_down()
        self._end_watches()
        for connection in list(self._connections):
            connection.announce_drain()
        await self._closed_within(min(_DRAIN_IDLE_S, timeout_s))
        self._end_watches()  # those that came meanwhile
        for connection in list(self._connections):
            connection.drain()
        await self._closed_within(end - last_words_s(timeout_s) - time.monotonic())
        if self._in_use:
            give_up()
            for connection in list(self._connections):
                connection.cut_off()
            for alone in list(self._alone):
                alone.receiver.cut_off()
            await self._closed_within(end - time.monotonic())
            for connection in list(self._connections):
                connection.abort()

    @property
    def _in_use(self) -> bool:
        return bool(self._connections or self._alone)

    async def _closed_within(self, seconds: float) -> None:
        if self._in_use:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), seconds)

    def _connect(self) -> Http2Connection:
        room = partial(no_room, self._limits, len(self._connections))
        connection = Http2Connection(
            self._limits, self.open, self._closed, no_room=room, memory=self._memory, turns=self._turns, on_fault=self._fault
        )
        self._connections.add(connection)
        self._all_closed.clear()
        return connection

    def _closed(self, connection: Http2Connection) -> None:
        self._connections.discard(connection)
        if not self._in_use:
            self._all_closed.set()

    def open_alone(self, stream: CallStream) -> None:
        """Serve a call that is on no connection; until it is `left`, a drain waits for it."""
        self._alone.add(stream)
        self._all_closed.clear()
        self.open(stream)

    def left(self, stream: CallStream) -> None:
        """It is over."""
        self._alone.discard(stream)
        if not self._in_use:
            self._all_closed.set()

    def _table(self) -> dict[bytes, Callable[[GrpcCall], None]]:
        """What to do with a new call, by path."""
        repository = self._repository
        servicer = InferenceServicer(repository)
        calls: dict[bytes, Callable[[GrpcCall], None]] = {}
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            if method.name in ("ModelInfer", "ModelStreamInfer") or not hasattr(servicer, method.name):
                continue
            path = f"/{_SERVICE}/{method.name}".encode()
            parse = parser(GetMessageClass(method.input_type))
            calls[path] = self._unary(parse, getattr(servicer, method.name), _NEEDS.get(method.name, ADMIN))
            self._needs[path] = _NEEDS.get(method.name, ADMIN)
        endpoints = GrpcEndpoints(repository, _PROTOCOL, self._doors)
        self._endpoints = endpoints
        calls[_INFER] = lambda call: call.listen(InferCall(call, endpoints))
        calls[_STREAM] = lambda call: call.listen(InferStream(call, endpoints, self._streams))

        async def check(message: Any) -> Message:
            if message.service not in ("", _SERVICE):
                raise NotFound(f"unknown service {message.service!r}, expected '' or '{_SERVICE}'")
            reply: Message = self._health(message.service)
            return reply

        parse_check = parser(health_pb2.HealthCheckRequest)
        calls[f"/{_HEALTH}/Check".encode()] = self._unary(parse_check, check, OPEN)
        calls[f"/{_HEALTH}/Watch".encode()] = lambda call: call.listen(
            HealthWatch(call, parse_check, self._begin_watch, self._watches.discard)
        )
        reflection = Reflection((_SERVICE, _HEALTH, *REFLECTED))
        for service in REFLECTED:
            calls[f"/{service}/ServerReflectionInfo".encode()] = lambda call: call.listen(ReflectionCall(call, reflection))
        return calls

    def _health(self, service: str) -> Any:
        states = health_pb2.HealthCheckResponse
        if service not in ("", _SERVICE):
            return states(status=states.SERVICE_UNKNOWN)
        return states(status=states.SERVING if self._repository.ready() else states.NOT_SERVING)

    def _begin_watch(self, watch: HealthWatch) -> None:
        watch.tell(self._health(watch.service))
        self._watches.add(watch)
        self._tell_watches()
        if self._next_look is None:
            self._follow_health()

    def _follow_health(self) -> None:
        """See what has changed. On a timer while there are watchers: sessions come and go without a word to listeners."""
        self._next_look = None
        self._tell_watches()
        if self._watches:
            self._next_look = asyncio.get_running_loop().call_later(_WATCH_S, self._follow_health)

    def _tell_watches(self) -> None:
        ready = self._repository.ready()
        if ready != self._ready:
            self._ready = ready
            for watch in list(self._watches):
                watch.tell(self._health(watch.service))

    def _end_watches(self) -> None:
        while self._watches:
            self._watches.pop().shut_down()

    def open(self, stream: CallStream) -> None:
        """Begin to serve a call, whose headers are here."""
        headers = stream.headers
        kind = headers.get(b"content-type", b"")
        if (kind != b"application/grpc" and _GRPC.match(kind) is None) or headers.get(b":method") != b"POST":
            self._refuse_stranger(stream)
            return
        call = GrpcCall(stream, self._limits.body_bytes)
        path = headers.get(b":path", b"")
        begin = self._calls.get(path)
        if begin is None:
            call.fail(Unsupported(f"unknown method {path.decode(errors='replace')}"))
        elif headers.get(b"grpc-encoding", b"identity") not in ENCODINGS:
            self._refuse(call, path, Unsupported("unknown grpc-encoding, expected identity, gzip or deflate"))
        else:
            timeout = headers.get(b"grpc-timeout")
            try:
                if timeout is not None:
                    call.set_timeout(timeout)
                if self._doors is not None:  # before its messages come
                    self._doors.meet(call)
                    self._doors.check(call, self._needs.get(path, INFER))
            except GatewayError as exc:
                self._refuse(call, path, exc)
                return
            begin(call)

    def _refuse(self, call: GrpcCall, path: bytes, error: GatewayError) -> None:
        call.fail(error)
        if path in _INFERENCES or error.code in (Code.UNAUTHENTICATED, Code.FORBIDDEN):
            self._endpoints.refused(error, call, call.arrival_ns)

    def _fault(self, stream: CallStream, error: GatewayError) -> None:
        """What its connection has refused is counted, and the log tells of some."""
        call = GrpcCall(stream, self._limits.body_bytes)
        self._endpoints.refused(error, call, call.arrival_ns)

    def _unary(
        self, parse: Callable[[Buffer], Any], act: Callable[[Any], Awaitable[Message]], needs: str
    ) -> Callable[[GrpcCall], None]:
        return lambda call: call.listen(_TaskCall(call, parse, self._guarded(call, act, needs), self._tasks))

    def _guarded(
        self, call: GrpcCall, act: Callable[[Any], Awaitable[Message]], needs: str
    ) -> Callable[[Any], Awaitable[Message]]:
        """The same, for whose key allows it."""
        doors = self._doors
        if doors is None:
            return act

        async def guarded(message: Any) -> Message:
            name = getattr(message, "name", None)  # of a model, where it needs INFER; empty for all of them
            doors.check(call, MODELS if needs == INFER and name == "" else needs, name or "")
            try:
                return await act(message)
            except NotFound as exc:
                raise doors.veiled(call, exc) from None

        return guarded

    def _refuse_stranger(self, stream: CallStream) -> None:
        """Say in HTTP that this is no call, to whom reads that."""
        if stream.headers.get(b":method") == b"HEAD":
            stream.send_headers(_NOT_GRPC, end=True)
            return
        stream.send_headers(_NOT_GRPC)
        stream.send_data(_WANTED)
        stream.end()


class _TaskCall(OneMessage):
    """A call that a coroutine answers, as a task."""

    def __init__(
        self,
        call: GrpcCall,
        parse: Callable[[Buffer], Any],
        act: Callable[[Any], Awaitable[Message]],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """tasks: of the server, which keeps them from being collected."""
        super().__init__(call)
        self._parse = parse
        self._act = act
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None

    def start(self, data: Buffer) -> None:
        self._call.stream.end_turn()  # statistics of 200 models take 30 ms
        self._task = asyncio.ensure_future(self._run(data))
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, data: Buffer) -> None:
        try:
            self._call.reply(await self._act(self._parse(data)))
        except GatewayError as exc:
            self._call.fail(exc)
        except asyncio.CancelledError:  # what it waited for was, if not the call itself: then this says nothing
            self._call.fail(NotReady("the server is shutting down", retry_after_s=1.0))
        except BaseException:
            self._call.failed()
