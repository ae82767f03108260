"""The gRPC listener: the v2 inference service, health and reflection on HTTP/2 connections of our own (http2).

An inference begins when the last byte of its message is there. The other calls run as tasks.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from gateway.config import Limits
from gateway.errors import GatewayError, InvalidArgument, NotFound, NotReady, Unsupported
from gateway.grpc_call import ENCODINGS, GrpcCall, OneMessage, Stream
from gateway.http2 import Http2Connection
from gateway.http_server import last_words_s
from gateway.inference import Endpoint, Endpoints, Inference, StreamedInference
from gateway.lane import OnPart
from gateway.protocols.grpc import ModelCodec, ReadRegion, head_of, parse
from gateway.protocols.tensors import LONG_BYTES, TakesLong
from gateway.repository import Repository
from gateway.types import InferRequest
from gateway.wire.http2_headers import header_block

Reply = TypeVar("Reply", bound=Message)

_PROTOCOL: Final = "grpc"
_SERVICE: Final = "inference.GRPCInferenceService"
_HEALTH: Final = "grpc.health.v1.Health"
_WATCH_S: Final = 0.25  # how late a watcher of the health is told, at most
_DRAIN_IDLE_S: Final = 1.0
# Of Triton's: told with each answer of a stream; and asked for where an answer in parts is to end with an empty one.
_FINAL: Final = "triton_final_response"
_WANTS_FINAL: Final = "triton_enable_empty_final_response"
_STREAM_IN_FLIGHT: Final = 128  # inferences of one stream at a time; the rest of what came waits

# Their messages are the same, field by field.
_REFLECTION: Final = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")

_NOT_GRPC: Final = header_block(status=415)

log = logging.getLogger(__name__)


class GrpcServer:
    """Life: start -> drain. On the event loop it was made on."""

    def __init__(self, repository: Repository, limits: Limits) -> None:
        """limits: body_bytes is the longest message, header_bytes the most metadata of a call, header_timeout_s how long a
        connection may take to become HTTP/2."""
        self._limits = limits
        self._repository = repository
        self._connections: set[Http2Connection] = set()
        self._all_closed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[_InferStream] = set()
        self._watches: set[_HealthWatch] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._ready = False  # as watchers were told
        self._listener: asyncio.Server | None = None
        self._calls = self._table()

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen; returns the port, which is a free one for 0. Raises: OSError, if the port is taken."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connect, host, port, backlog=2048, reuse_port=reuse_port)
        return int(self._listener.sockets[0].getsockname()[1])

    async def drain(self, timeout_s: float, give_up: Callable[[], None] = lambda: None) -> None:
        """Refuse new calls (GOAWAY), answer what is in flight, end the streams, then close.

        For the first second, calls that were under way when the client heard of it are still answered. Shortly before
        timeout_s, give_up is called, to have the inferences answered now; other calls then fail as UNAVAILABLE. Who does not
        take that until timeout_s is cut off.
        """
        end = time.monotonic() + timeout_s
        if self._listener is not None:
            self._listener.close()
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
        if self._connections:
            give_up()
            for connection in list(self._connections):
                connection.cut_off()
            await self._closed_within(end - time.monotonic())
            for connection in list(self._connections):
                connection.abort()

    async def _closed_within(self, seconds: float) -> None:
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), seconds)

    def _connect(self) -> Http2Connection:
        refused = len(self._connections) >= self._limits.connections
        connection = Http2Connection(self._limits, self.open, self._closed, refused=refused)
        self._connections.add(connection)
        self._all_closed.clear()
        return connection

    def _closed(self, connection: Http2Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()

    def _table(self) -> dict[bytes, Callable[[GrpcCall], None]]:
        """What to do with a new call, by path."""
        repository = self._repository
        servicer = InferenceServicer(repository)
        calls: dict[bytes, Callable[[GrpcCall], None]] = {}
        # tritonclient's servicer and messages: no generated stubs of our own, and no second `inference` package in the process.
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            if method.name in ("ModelInfer", "ModelStreamInfer"):
                continue
            path = f"/{_SERVICE}/{method.name}".encode()
            parse = _parser(GetMessageClass(method.input_type))
            calls[path] = self._unary(parse, getattr(servicer, method.name))
        endpoints = Endpoints(
            repository, _PROTOCOL, lambda served: ModelCodec(served.name, served.version, served.spec, served.ragged)
        )
        calls[f"/{_SERVICE}/ModelInfer".encode()] = lambda call: call.listen(_InferCall(call, endpoints))
        calls[f"/{_SERVICE}/ModelStreamInfer".encode()] = lambda call: call.listen(_InferStream(call, endpoints, self._streams))

        async def check(message: Any) -> Message:
            if message.service not in ("", _SERVICE):
                raise NotFound(f"unknown service {message.service!r}, expected '' or '{_SERVICE}'")
            reply: Message = self._health(message.service)
            return reply

        parse_check = _parser(health_pb2.HealthCheckRequest)
        calls[f"/{_HEALTH}/Check".encode()] = self._unary(parse_check, check)
        calls[f"/{_HEALTH}/Watch".encode()] = lambda call: call.listen(
            _HealthWatch(call, parse_check, self._watch, self._watches.discard)
        )
        services = reflection.ReflectionServicer((_SERVICE, _HEALTH, *_REFLECTION))
        for service in _REFLECTION:
            calls[f"/{service}/ServerReflectionInfo".encode()] = lambda call: call.listen(_ReflectionCall(call, services))
        return calls

    def _health(self, service: str) -> Any:
        states = health_pb2.HealthCheckResponse
        if service not in ("", _SERVICE):
            return states(status=states.SERVICE_UNKNOWN)
        return states(status=states.SERVING if self._repository.ready() else states.NOT_SERVING)

    def _watch(self, watch: "_HealthWatch") -> None:
        watch.tell(self._health(watch.service))
        self._watches.add(watch)
        self._tell_watches()
        if self._looking is None:
            self._look()

    def _look(self) -> None:
        """See what has changed. On a timer while there are watchers: sessions come and go without a word to listeners."""
        self._looking = None
        self._tell_watches()
        if self._watches:
            self._looking = asyncio.get_running_loop().call_later(_WATCH_S, self._look)

    def _tell_watches(self) -> None:
        ready = self._repository.ready()
        if ready != self._ready:
            self._ready = ready
            for watch in list(self._watches):
                watch.tell(self._health(watch.service))

    def _end_watches(self) -> None:
        while self._watches:
            self._watches.pop().shut_down()

    def open(self, stream: Stream) -> None:
        """Begin to serve a call, whose headers are here."""
        headers = stream.headers
        if not headers.get(b"content-type", b"").startswith(b"application/grpc") or headers.get(b":method") != b"POST":
            stream.send_headers(_NOT_GRPC, end=True)
            return
        call = GrpcCall(stream, self._limits.body_bytes)
        path = headers.get(b":path", b"")
        begin = self._calls.get(path)
        if begin is None:
            call.fail(Unsupported(f"unknown method {path.decode(errors='replace')}"))
        elif headers.get(b"grpc-encoding", b"identity") not in ENCODINGS:
            call.fail(Unsupported("unknown grpc-encoding, expected identity, gzip or deflate"))
        else:
            timeout = headers.get(b"grpc-timeout")
            if timeout is not None:
                try:
                    call.set_timeout(timeout)
                except InvalidArgument as exc:
                    call.fail(exc)
                    return
            begin(call)

    def _unary(self, parse: Callable[[bytes], Any], act: Callable[[Any], Awaitable[Message]]) -> Callable[[GrpcCall], None]:
        return lambda call: call.listen(_TaskCall(call, parse, act, self._tasks))


class _TaskCall(OneMessage):
    """A call that a coroutine answers, as a task."""

    def __init__(
        self,
        call: GrpcCall,
        parse: Callable[[bytes], Any],
        act: Callable[[Any], Awaitable[Message]],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """tasks: of the server, which keeps them from being collected."""
        super().__init__(call)
        self._parse = parse
        self._act = act
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None

    def start(self, data: bytes) -> None:
        self._task = asyncio.ensure_future(self._run(data))
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, data: bytes) -> None:
        try:
            self._call.reply(await self._act(self._parse(data)))
        except GatewayError as exc:
            self._call.fail(exc)
        except asyncio.CancelledError:  # what it waited for was, if not the call itself: then this says nothing
            self._call.fail(NotReady("the server is shutting down", retry_after_s=1.0))
        except BaseException:
            self._call.failed()


class _OfMessage:
    """What inferences that a message of a call asks for have in common."""

    __slots__ = ()

    call: GrpcCall
    _arrival_ns: int
    _data: bytes
    _endpoints: Endpoints[ModelCodec]
    _message: pb.ModelInferRequest | None
    _takes_long: bool
    decoded: Callable[[InferRequest | GatewayError], None]

    @property
    def id(self) -> str:
        """The request's own; empty where its message could not be read."""
        return "" if self._message is None else str(self._message.id)

    def find(self, endpoints: Endpoints[ModelCodec]) -> Endpoint[ModelCodec]:
        data = self._data
        head = head_of(data) if len(data) > LONG_BYTES else None
        self._takes_long = head is not None  # type: ignore[misc]  # among the slots of those that inherit
        message = self._message = parse(data if head is None else head)  # type: ignore[misc]  # likewise
        return endpoints.find(message.model_name, message.model_version)

    def decode(self, codec: ModelCodec, read_region: ReadRegion) -> InferRequest | Callable[[], None]:
        arrival_ns = self._arrival_ns
        remaining_s = self.call.remaining_s(arrival_ns)
        if not self._takes_long:
            try:
                return codec.decode(self._message, arrival_ns, remaining_s, read_region)
            except TakesLong:
                pass  # as that which is long by itself
        return self._endpoints.repository.long_bodies.message(codec, self._data, arrival_ns, remaining_s, self.decoded)


class _GrpcInference(_OfMessage, Inference[ModelCodec, pb.ModelInferResponse]):
    """The one of a call."""

    __slots__ = ("_data", "_message", "_takes_long", "call")

    def __init__(self, endpoints: Endpoints[ModelCodec], call: GrpcCall, data: bytes) -> None:
        super().__init__(endpoints, time.monotonic_ns())
        self.call = call
        self._data = data
        self._message = None

    def answer(self, reply: pb.ModelInferResponse) -> None:
        self.call.reply(reply)

    def refuse(self, error: GatewayError) -> None:
        self.call.fail(error)


class _InferCall(OneMessage):
    """ModelInfer."""

    def __init__(self, call: GrpcCall, endpoints: Endpoints[ModelCodec]) -> None:
        super().__init__(call)
        self._endpoints = endpoints
        self._inference: _GrpcInference | None = None

    def start(self, data: bytes) -> None:
        self._inference = _GrpcInference(self._endpoints, self._call, data)
        self._inference.start()

    def cancel(self) -> None:
        if self._inference is not None:
            self._inference.cancel()


class _Turn(_OfMessage, StreamedInference[ModelCodec, pb.ModelInferResponse]):
    """One inference of a stream, which sends its replies when it is their turn; parts are sent when they are there."""

    __slots__ = ("_data", "_final", "_message", "_on_reply", "_takes_long", "call", "in_parts", "replies")

    def __init__(self, endpoints: Endpoints[ModelCodec], call: GrpcCall, data: bytes, on_reply: Callable[[], None]) -> None:
        super().__init__(endpoints, time.monotonic_ns())
        self.call = call
        self._data = data
        self._message = None
        self._on_reply = on_reply
        self.in_parts = False
        self._final = False  # it has been sent
        self.replies: tuple[pb.ModelInferResponse | GatewayError, ...] | None = None  # what is left to send; None: not known

    def _parts(self, endpoint: Endpoint[ModelCodec]) -> OnPart:
        self.in_parts = True
        return super()._parts(endpoint)

    def part(self, reply: pb.ModelInferResponse) -> bool:
        reply.parameters[_FINAL].bool_param = self._last
        self.call.send(pb.ModelStreamInferResponse(infer_response=reply))
        self._final = self._last
        return not self.call.stream.backlog

    def finish(self) -> None:
        message, endpoint = self._message, self._endpoint
        assert message is not None
        assert endpoint is not None
        wanted = _WANTS_FINAL in message.parameters and message.parameters[_WANTS_FINAL].bool_param
        if wanted and not self._final:
            self._replied(pb.ModelInferResponse(model_name=endpoint.served.name, id=message.id))
        else:
            self._replied()

    def answer(self, reply: pb.ModelInferResponse) -> None:
        self._replied(reply)

    def refuse(self, error: GatewayError) -> None:
        if self._final:  # nothing was left to fail for the client
            self._replied()
        else:
            self._replied(error)

    def failed(self) -> pb.ModelInferResponse:
        """What is beside the message of an error: of a request that could be run, that nothing follows."""
        reply = pb.ModelInferResponse(id=self.id)
        if self._request is not None:
            reply.model_name = self._request.model
            reply.parameters[_FINAL].bool_param = True
        return reply

    def _replied(self, *replies: pb.ModelInferResponse | GatewayError) -> None:
        self.replies = replies
        on_reply = self._on_reply
        del self._on_reply  # or this and the stream would hold each other until the cyclic collector comes
        on_reply()


class _InferStream:
    """ModelStreamInfer: one answer per request, in the order of the requests, which run concurrently.

    Requests of decoupled models are in no order with others: each part of an answer, and what follows the last, is sent when it
    is there, as Triton does. An error does not end the stream. Requests beyond `_STREAM_IN_FLIGHT`, or to a client that does
    not read its answers, wait undecoded, and their bytes keep the client's window closed.
    """

    def __init__(self, call: GrpcCall, endpoints: Endpoints[ModelCodec], open_streams: "set[_InferStream]") -> None:
        """open_streams: of the server, which shuts them down."""
        self._call = call
        self._endpoints = endpoints
        self._waiting: tuple[bytes, int] | None = None  # the next message; those behind it are the call's to keep
        self._running: deque[_Turn] = deque()  # in their order
        self._in_parts: list[_Turn] = []
        self._sending = False
        self._ended = False
        self._farewell: GatewayError | None = None
        self._open_streams = open_streams
        open_streams.add(self)

    def shut_down(self) -> None:
        """Answer what came, then end."""
        self._farewell = NotReady("the server is shutting down", retry_after_s=1.0)
        self._call.deafen()
        self.drained()

    def message(self, data: bytes, size: int) -> None:
        self._waiting = data, size
        self._call.hold()
        self.drained()

    def end(self) -> None:
        self._ended = True
        self.drained()

    def cancel(self) -> None:
        self._open_streams.discard(self)
        self._waiting = None
        for inference in (*self._running, *self._in_parts):
            inference.cancel()

    def drained(self) -> None:
        """Send the answers whose turn it is, then start what there is room for; at the end, end.

        Sending and starting call this again, as often as there are answers: the loop that runs then goes on after it.
        """
        if self._sending:
            return
        self._sending = True
        try:
            if not self._call.stream.backlog:
                for inference in list(self._in_parts):
                    inference.drained()
            self._advance()
        except BaseException:
            self._call.failed()
        finally:
            self._sending = False
        if self._call.over:
            self._open_streams.discard(self)

    def _advance(self) -> None:
        call, running, in_parts = self._call, self._running, self._in_parts
        while not call.over:
            while running and running[0].replies is not None:
                self._send(running.popleft())
            for inference in [inference for inference in in_parts if inference.replies is not None]:
                in_parts.remove(inference)
                self._send(inference)
            if len(running) + len(in_parts) >= _STREAM_IN_FLIGHT or call.stream.backlog:
                break
            if self._waiting is None:
                call.go_on()
            if self._waiting is None:
                break
            (data, size), self._waiting = self._waiting, None
            call.stream.credit(size)
            inference = _Turn(self._endpoints, call, data, self.drained)
            running.append(inference)
            inference.start()
            if inference.in_parts:
                in_parts.append(running.pop())
        if not running and not in_parts and not self._waiting and not call.over:
            if self._ended:
                call.finish()
            elif self._farewell is not None:
                call.fail(self._farewell)

    def _send(self, inference: _Turn) -> None:
        replies, inference.replies = inference.replies or (), None  # an error may hold frames that hold the inference
        for reply in replies:
            if isinstance(reply, pb.ModelInferResponse):
                reply.parameters[_FINAL].bool_param = True
                try:
                    self._call.send(pb.ModelStreamInferResponse(infer_response=reply))
                    continue
                except GatewayError as exc:
                    reply = exc
            self._call.send(pb.ModelStreamInferResponse(error_message=reply.words, infer_response=inference.failed()))


class _HealthWatch(OneMessage):
    """Health/Watch: the state of a service now, and then each change, until the client leaves.

    Source: grpc/doc/health-checking.md, by which an unknown service is a state here, and no error.
    """

    def __init__(
        self,
        call: GrpcCall,
        parse: Callable[[bytes], Any],
        begin: "Callable[[_HealthWatch], None]",
        end: "Callable[[_HealthWatch], None]",
    ) -> None:
        """begin: tells it the state of its service, now and at each change, until end."""
        super().__init__(call)
        self._parse = parse
        self._begin = begin
        self._end = end
        self._told: int | None = None
        self.service = ""

    def start(self, data: bytes) -> None:
        self.service = self._parse(data).service
        self._begin(self)

    def cancel(self) -> None:
        self._end(self)

    def shut_down(self) -> None:
        self.tell(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING))
        self._call.fail(NotReady("the server is shutting down", retry_after_s=1.0))

    def tell(self, state: Any) -> None:
        """Send a HealthCheckResponse, if it is not what was sent last."""
        if state.status != self._told:
            self._told = state.status
            self._call.send(state)


class _ReflectionCall:
    """ServerReflectionInfo: an answer for each request, as soon as those before have left."""

    def __init__(self, call: GrpcCall, services: Any) -> None:
        """services: a ReflectionServicer, whose stubs know nothing of what it yields."""
        self._call = call
        self._services = services

    def message(self, data: bytes, size: int) -> None:
        self._call.stream.credit(size)
        request = _parser(reflection_pb2.ServerReflectionRequest)(data)
        for reply in self._services.ServerReflectionInfo(iter([request]), None):
            self._call.send(reply)
        if self._call.stream.backlog:
            self._call.hold()

    def end(self) -> None:
        self._call.finish()

    def cancel(self) -> None: ...

    def drained(self) -> None:
        self._call.go_on()


class InferenceServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # untyped in tritonclient
    """The RPCs of `inference.GRPCInferenceService` that take one message; each answers or raises GatewayError.

    What is not offered says so with UNIMPLEMENTED. The two that infer are `_InferCall` and `_InferStream`.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    # state

    async def ServerLive(self, message: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._repository.live())

    async def ServerReady(self, message: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._repository.ready())

    async def ModelReady(self, message: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        try:
            ready = self._repository.model_ready(message.name, message.version)
        except NotFound:
            ready = False  # as in Triton: an unknown model is not ready
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, message: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        metadata = self._repository.server_metadata()
        metadata.pop("instance_type", None)  # ours; the message has no field for it
        return _fill(pb.ServerMetadataResponse(), metadata)

    async def ModelMetadata(self, message: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        return _fill(pb.ModelMetadataResponse(), self._repository.model_metadata(message.name, message.version))

    async def ModelConfig(self, message: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        return _fill(pb.ModelConfigResponse(), {"config": self._repository.model_config(message.name, message.version)})

    async def ModelStatistics(self, message: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        return _fill(pb.ModelStatisticsResponse(), self._repository.statistics(message.name, message.version))

    # repository

    async def RepositoryIndex(self, message: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        _refuse_repository_name(message.repository_name)
        return _fill(pb.RepositoryIndexResponse(), {"models": self._repository.index(message.ready)})

    async def RepositoryModelLoad(self, message: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        _refuse_repository_name(message.repository_name)
        await self._repository.load(message.model_name, _choices(message.parameters))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, message: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        _refuse_repository_name(message.repository_name)
        dependents = _choices(message.parameters).get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("invalid value type for 'unload_dependents' parameter, expected bool_param")
        await self._repository.unload(message.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()

    # shared memory

    async def SystemSharedMemoryStatus(self, message: pb.SystemSharedMemoryStatusRequest) -> Any:
        regions = {region["name"]: region for region in self._repository.regions.status(message.name)}
        return _fill(pb.SystemSharedMemoryStatusResponse(), {"regions": regions})

    async def SystemSharedMemoryRegister(self, message: pb.SystemSharedMemoryRegisterRequest) -> Any:
        self._repository.regions.register(message.name, message.key, message.offset, message.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, message: pb.SystemSharedMemoryUnregisterRequest) -> Any:
        self._repository.regions.unregister(message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, message: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        if message.name:
            raise NotFound(f"Unable to find cuda shared memory region: '{message.name}'")
        return pb.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryUnregister(self, message: Message) -> pb.CudaSharedMemoryUnregisterResponse:
        return pb.CudaSharedMemoryUnregisterResponse()  # there can be none

    # not offered

    async def CudaSharedMemoryRegister(self, message: pb.CudaSharedMemoryRegisterRequest) -> NoReturn:
        raise Unsupported(f"cuda shared memory region '{message.name}': only system shared memory is offered by this server")

    async def TraceSetting(self, message: Message) -> NoReturn:
        raise Unsupported("tracing is not offered: see /metrics, and batching.trace of a model")

    async def LogSettings(self, message: Message) -> NoReturn:
        raise Unsupported("log settings cannot be changed by clients")


def _parser(message_class: Any) -> Callable[[bytes], Any]:
    parse = message_class.FromString
    name = message_class.DESCRIPTOR.full_name

    def parse_or_refuse(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise InvalidArgument(f"the request is no {name}") from None

    return parse_or_refuse


def _fill(reply: Reply, described: Mapping[str, Any]) -> Reply:
    """Fill a message from the JSON form of the same thing."""
    return ParseDict(dict(described), reply)


def _choices(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """ModelRepositoryParameters as plain values. Raises: InvalidArgument."""
    values = {}
    for key, choice in parameters.items():
        kind = choice.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidArgument(f"parameter '{key}' has no value")
        values[key] = getattr(choice, kind)
    return values


def _refuse_repository_name(name: str) -> None:
    if name:
        raise Unsupported("'repository_name' specification is not supported")
