"""The gRPC listener: tritonclient's servicer on grpc.aio, with the standard health and reflection services.

Per request: decode (protocols.grpc), hand to the repository, await the answer, encode. Everything on the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from time import monotonic_ns
from typing import Any, Final, NoReturn, TypeVar

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from gateway.config import Limits
from gateway.errors import Code, GatewayError, InvalidArgument, NotFound, NotReady, Unsupported
from gateway.metrics import EndpointMetrics
from gateway.protocols.grpc import STATUS, decode, encode, trailers
from gateway.repository import Repository, ServedModel
from gateway.types import InferRequest, InferResponse

# grpc.aio's abstract context is generic in messages that the servicer's untyped base does not know.
Context = Any
Reply = TypeVar("Reply", bound=Message)

_PROTOCOL: Final = "grpc"
_SERVICE: Final = "inference.GRPCInferenceService"
_STREAM_IN_FLIGHT: Final = 128  # requests of one stream that wait for their answer to be written; then it is read no further

log = logging.getLogger(__name__)


class GrpcServer:
    """Life: start -> drain. On the event loop it was made on."""

    def __init__(self, repository: Repository, limits: Limits) -> None:
        """limits: body_bytes is the longest message received, header_bytes the most metadata of a call, header_timeout_s how
        long a connection may take to become HTTP/2."""
        self._repository = repository
        self._limits = limits
        self._inference = InferenceServicer(repository)
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen; returns the port, which is a free one for 0. Raises: OSError, if the port is taken."""
        limits = self._limits
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", int(reuse_port)),
                ("grpc.max_receive_message_length", limits.body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", limits.header_bytes),
                ("grpc.absolute_max_metadata_size", limits.header_bytes),
                ("grpc.server_handshake_timeout_ms", round(limits.header_timeout_s * 1000)),
            ]
        )
        handlers = _handlers(self._inference)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(_HealthServicer(self._repository), server)
        names = (_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as exc:
            raise OSError(f"gRPC cannot listen on {host}:{port}: {exc}") from exc
        await server.start()
        self._server = server
        return bound

    async def drain(self, timeout_s: float) -> None:
        """Refuse new calls (GOAWAY), answer what is in flight, end the streams; after timeout_s cancel what is left."""
        if self._server is not None:
            self._inference.end_streams()
            await self._server.stop(timeout_s)
            self._server = None


class _Call:
    """One inference on its way. answer: the outcome, once it is known."""

    __slots__ = ("answer", "arrival_ns", "decoded_ns", "endpoint", "id", "request", "served")

    def __init__(self, arrival_ns: int, request_id: str, answer: "asyncio.Future[InferResponse | GatewayError]") -> None:
        self.arrival_ns = arrival_ns
        self.decoded_ns = arrival_ns
        self.id = request_id
        self.answer = answer
        self.endpoint: EndpointMetrics | None = None
        self.served: ServedModel | None = None
        self.request: InferRequest | None = None

    def done(self, outcome: InferResponse | GatewayError) -> None:
        """Take the outcome, unless the client has gone."""
        if not self.answer.done():
            self.answer.set_result(outcome)


class _Stream:
    """What a stream's reader and writer share. calls: to be answered, in order. arrived: one per call, and one at the end."""

    __slots__ = ("arrived", "calls", "room")

    def __init__(self) -> None:
        self.calls: deque[_Call] = deque()
        self.arrived = asyncio.Semaphore(0)
        self.room = asyncio.Semaphore(_STREAM_IN_FLIGHT)


class InferenceServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # untyped in tritonclient
    """The 20 RPCs of `inference.GRPCInferenceService`; what is not offered says so with UNIMPLEMENTED."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._loop = asyncio.get_running_loop()
        self._readers: set[asyncio.Task[None]] = set()  # of the open streams
        self._draining = False

    # inference

    async def ModelInfer(self, message: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        call = self._start(message, context)
        try:
            outcome = await call.answer
        except asyncio.CancelledError:
            self._cancel(call)
            raise
        reply = self._finish(call, outcome)
        return await _abort(context, reply) if isinstance(reply, GatewayError) else reply

    async def ModelStreamInfer(self, messages: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """One answer per request, in the order of the requests, which run concurrently. An error does not end the stream."""
        stream = _Stream()
        reader = asyncio.create_task(self._read_stream(messages, context, stream))
        self._readers.add(reader)
        try:
            await stream.arrived.acquire()
            while stream.calls:
                call = stream.calls[0]
                reply = self._finish(call, await call.answer)
                stream.calls.popleft()
                await context.write(_stream_reply(call, reply))
                stream.room.release()
                await stream.arrived.acquire()
        finally:
            self._readers.discard(reader)
            reader.cancel()
            for call in stream.calls:
                self._cancel(call)
        if self._draining:
            await _abort(context, NotReady("the server is shutting down", retry_after_s=1.0))
        try:
            await reader
        except InvalidArgument as exc:
            await _abort(context, exc)

    async def _read_stream(
        self, messages: AsyncIterator[pb.ModelInferRequest | InvalidArgument], context: Context, stream: "_Stream"
    ) -> None:
        try:
            async for message in messages:
                if isinstance(message, InvalidArgument):
                    raise message
                stream.calls.append(self._start(message, context))
                stream.arrived.release()
                await stream.room.acquire()
        finally:
            stream.arrived.release()

    def end_streams(self) -> None:
        """Read no more from any stream; each ends with UNAVAILABLE once what it asked is answered."""
        self._draining = True
        for reader in self._readers:
            reader.cancel()

    def _start(self, message: pb.ModelInferRequest, context: Context) -> _Call:
        """Decode and submit; an error is the call's answer."""
        repository = self._repository
        arrival_ns = monotonic_ns()
        call = _Call(arrival_ns, message.id, self._loop.create_future())
        try:
            served = call.served = repository.model(message.model_name, message.model_version)
            call.endpoint = repository.metrics.endpoint(served.name, served.version, _PROTOCOL)
            request = decode(
                message,
                model=served.name,
                version=served.version,
                spec=served.spec,
                ragged=served.ragged,
                arrival_ns=arrival_ns,
                remaining_s=context.time_remaining(),
                read_region=repository.regions.read,
            )
            call.decoded_ns = monotonic_ns()
            repository.infer(request, call.done)
            call.request = request
        except GatewayError as exc:
            call.done(exc)
        return call

    def _finish(self, call: _Call, outcome: InferResponse | GatewayError) -> pb.ModelInferResponse | GatewayError:
        """Encode an answer, and count it."""
        encoding_ns = monotonic_ns()
        if isinstance(outcome, InferResponse):
            assert call.request is not None
            assert call.served is not None
            assert call.endpoint is not None
            try:
                reply = encode(outcome, call.request, call.served.spec, self._repository.regions.write)
            except GatewayError as exc:
                outcome = exc
            else:
                call.endpoint.done(call.arrival_ns, call.decoded_ns, encoding_ns, monotonic_ns())
                return reply
        self._count_failure(call, outcome.code, encoding_ns)
        return outcome

    def _cancel(self, call: _Call) -> None:
        """Nobody waits for this call any more: take it out of the queue."""
        if call.request is not None:
            self._repository.cancel(call.request)
        self._count_failure(call, Code.CANCELLED, monotonic_ns())

    def _count_failure(self, call: _Call, code: Code, now_ns: int) -> None:
        endpoint = call.endpoint or self._repository.metrics.endpoint("", "", _PROTOCOL)
        endpoint.failed(code, call.arrival_ns, now_ns)

    # state

    async def ServerLive(self, message: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._repository.live())

    async def ServerReady(self, message: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._repository.ready())

    async def ModelReady(self, message: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        try:
            ready = self._repository.model_ready(message.name, message.version)
        except NotFound:
            ready = False  # as in Triton: an unknown model is not ready
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, message: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return await _reply(context, pb.ServerMetadataResponse(), self._repository.server_metadata)

    async def ModelMetadata(self, message: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        return await _reply(
            context, pb.ModelMetadataResponse(), lambda: self._repository.model_metadata(message.name, message.version)
        )

    async def ModelConfig(self, message: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        return await _reply(
            context,
            pb.ModelConfigResponse(),
            lambda: {"config": self._repository.model_config(message.name, message.version)},
        )

    async def ModelStatistics(self, message: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        return await _reply(
            context, pb.ModelStatisticsResponse(), lambda: self._repository.statistics(message.name, message.version)
        )

    # repository

    async def RepositoryIndex(self, message: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        def index() -> dict[str, Any]:
            _refuse_repository_name(message.repository_name)
            return {"models": self._repository.index(message.ready)}

        return await _reply(context, pb.RepositoryIndexResponse(), index)

    async def RepositoryModelLoad(
        self, message: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        async def load() -> None:
            _refuse_repository_name(message.repository_name)
            await self._repository.load(message.model_name, _choices(message.parameters))

        return await _after(context, load, pb.RepositoryModelLoadResponse())

    async def RepositoryModelUnload(
        self, message: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        async def unload() -> None:
            _refuse_repository_name(message.repository_name)
            dependents = _choices(message.parameters).get("unload_dependents", False)
            if not isinstance(dependents, bool):
                raise InvalidArgument("invalid value type for 'unload_dependents' parameter, expected bool_param")
            await self._repository.unload(message.model_name, dependents)

        return await _after(context, unload, pb.RepositoryModelUnloadResponse())

    # shared memory

    async def SystemSharedMemoryStatus(
        self, message: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        def status() -> dict[str, Any]:
            return {"regions": {region["name"]: region for region in self._repository.regions.status(message.name)}}

        return await _reply(context, pb.SystemSharedMemoryStatusResponse(), status)

    async def SystemSharedMemoryRegister(
        self, message: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        async def register() -> None:
            self._repository.regions.register(message.name, message.key, message.offset, message.byte_size)

        return await _after(context, register, pb.SystemSharedMemoryRegisterResponse())

    async def SystemSharedMemoryUnregister(
        self, message: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        async def unregister() -> None:
            self._repository.regions.unregister(message.name)

        return await _after(context, unregister, pb.SystemSharedMemoryUnregisterResponse())

    # not offered

    async def CudaSharedMemoryStatus(self, message: Message, context: Context) -> NoReturn:
        await _abort(context, Unsupported(_NO_CUDA))

    async def CudaSharedMemoryRegister(self, message: Message, context: Context) -> NoReturn:
        await _abort(context, Unsupported(_NO_CUDA))

    async def CudaSharedMemoryUnregister(self, message: Message, context: Context) -> NoReturn:
        await _abort(context, Unsupported(_NO_CUDA))

    async def TraceSetting(self, message: Message, context: Context) -> NoReturn:
        await _abort(context, Unsupported("tracing is not offered: see /metrics, and batching.trace of a model"))

    async def LogSettings(self, message: Message, context: Context) -> NoReturn:
        await _abort(context, Unsupported("log settings cannot be changed by clients"))


_NO_CUDA: Final = "CUDA shared memory is not offered; system shared memory is"


class _HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped in grpcio-health-checking
    """grpc.health.v1: SERVING while every model that should be is ready. Watch is not offered, as in Triton."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def Check(self, message: Any, context: Context) -> Any:
        if message.service not in ("", _SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {message.service!r}, expected '' or '{_SERVICE}'")
        status = (
            health_pb2.HealthCheckResponse.SERVING if self._repository.ready() else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, message: Any, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch is not offered: use Check")


def _stream_reply(call: _Call, reply: pb.ModelInferResponse | GatewayError) -> pb.ModelStreamInferResponse:
    if isinstance(reply, GatewayError):
        return pb.ModelStreamInferResponse(error_message=reply.message, infer_response=pb.ModelInferResponse(id=call.id))
    # One answer per request: each is the final one of its request, and says so as Triton's does.
    reply.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=reply)


def _handlers(servicer: InferenceServicer) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
    """The table tritonclient's own registration makes, but for bytes that are no message.

    There a deserializer that raises ends the call with UNKNOWN and a traceback in the log for each; here it is the client's
    INVALID_ARGUMENT.
    """
    handlers = {}
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        make = grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        act = getattr(servicer, method.name)
        handlers[method.name] = make(
            act if method.server_streaming else _refusing(act),
            request_deserializer=_parser(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return handlers


def _parser(message_class: Any) -> Callable[[bytes], Message | InvalidArgument]:
    parse = message_class.FromString
    name = message_class.DESCRIPTOR.full_name

    def try_parse(data: bytes) -> Message | InvalidArgument:
        try:
            message: Message = parse(data)
        except DecodeError:
            return InvalidArgument(f"the request is no {name}")
        return message

    return try_parse


def _refusing(act: Callable[[Any, Context], Awaitable[Message]]) -> Callable[[Any, Context], Awaitable[Message]]:
    async def handle(message: Message | InvalidArgument, context: Context) -> Message:
        return await _abort(context, message) if isinstance(message, InvalidArgument) else await act(message, context)

    return handle


async def _abort(context: Context, error: GatewayError) -> NoReturn:
    await context.abort(STATUS[error.code], error.message, trailers(error))
    raise AssertionError("abort returned")  # it always raises; its type does not say so


async def _reply(context: Context, reply: Reply, describe: Callable[[], Mapping[str, Any]]) -> Reply:
    """Fill a message from the JSON form of the same thing."""
    try:
        return ParseDict(dict(describe()), reply)
    except GatewayError as exc:
        return await _abort(context, exc)


async def _after(context: Context, act: Callable[[], Awaitable[None]], reply: Reply) -> Reply:
    try:
        await act()
    except GatewayError as exc:
        await _abort(context, exc)
    return reply


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
