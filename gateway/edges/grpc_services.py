"""What a gRPC server offers beside inference: its state and repository, shared memory, health and reflection."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from gateway.edges.grpc_call import GrpcCall, OneMessage
from gateway.edges.reflection import Reflection
from gateway.engine.repository import Repository
from gateway.errors import GatewayError, InvalidArgument, NotFound, NotReady, Unsupported
from gateway.protocols.messages import pb
from gateway.wire.tensors import Buffer

Reply = TypeVar("Reply", bound=Message)


def parser(message_class: Any) -> Callable[[Buffer], Any]:
    """Reads messages of a class. What it gives raises InvalidArgument for bytes that are none."""
    parse = message_class.FromString
    name = message_class.DESCRIPTOR.full_name

    def parse_or_refuse(data: Buffer) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise InvalidArgument(f"the request is no {name}") from None

    return parse_or_refuse


_parse_reflection: Final = parser(reflection_pb2.ServerReflectionRequest)
_TOLD_AT_ONCE: Final = 64  # answers of reflection, before others have their turn


class HealthWatch(OneMessage):
    """Health/Watch: the state of a service now, and then each change, until the client leaves.

    Source: grpc/doc/health-checking.md, by which an unknown service is a state here, and no error.
    """

    def __init__(
        self,
        call: GrpcCall,
        parse: Callable[[Buffer], Any],
        begin: "Callable[[HealthWatch], None]",
        end: "Callable[[HealthWatch], None]",
    ) -> None:
        """begin: tells it the state of its service, now and at each change, until end."""
        super().__init__(call)
        self._parse = parse
        self._begin = begin
        self._end = end
        self._told: int | None = None
        self.service = ""

    def start(self, data: Buffer) -> None:
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


class ReflectionCall:
    """ServerReflectionInfo: an answer for each request, as soon as those before have left."""

    def __init__(self, call: GrpcCall, reflection: Reflection) -> None:
        self._call = call
        self._reflection = reflection
        self._told = 0

    def message(self, data: Buffer, size: int) -> None:
        self._call.stream.credit(size)
        if len(data) + 5 != size:  # it came compressed
            self._call.stream.give_back(len(data))
        request = _parse_reflection(data)
        self._call.send(self._reflection.reply(request))
        self._told += 1
        if self._call.stream.backlog:
            self._call.hold()
        elif not self._told % _TOLD_AT_ONCE:
            self._call.hold()
            asyncio.get_running_loop().call_soon(self._call.go_on)

    def end(self) -> None:
        self._call.finish()

    def leave(self, error: GatewayError) -> None:
        self._call.fail(error)

    def refused(self, error: GatewayError) -> None: ...

    def cancel(self) -> None: ...

    def drained(self) -> None:
        self._call.go_on()


class InferenceServicer:
    """The RPCs of `inference.GRPCInferenceService` that take one message; each answers or raises GatewayError.

    What is not offered says so with UNIMPLEMENTED. The two that infer are `grpc_inference.InferCall` and `InferStream`.
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
