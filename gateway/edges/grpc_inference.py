"""Inferences asked for over gRPC: the one of a call, and those of a stream."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from gateway.edges.grpc_call import GrpcCall, OneMessage
from gateway.engine.inference import Endpoint, Endpoints, Inference, StreamedInference
from gateway.engine.repository import Repository
from gateway.errors import Code, GatewayError, NotReady
from gateway.protocols.grpc import STATUS, GrpcCodec, LongReply, Parts, ShortReply, parse, parts_of
from gateway.protocols.messages import pb
from gateway.protocols.repeated_messages import KnownMessage, RepeatedMessages
from gateway.protocols.tensors import LONG_BYTES, ReadRegion, TakesLong
from gateway.types import InferRequest
from gateway.wire.tensors import Buffer

if TYPE_CHECKING:
    from gateway.access.doors import Doors

# Of Triton's: told with each answer of a stream; and asked for where an answer in parts is to end with an empty one.
_FINAL: Final = "triton_final_response"
_WANTS_FINAL: Final = "triton_enable_empty_final_response"
_LONG_MESSAGE: Final = 64 << 10  # its bytes are counted until it is answered
Reply: TypeAlias = pb.ModelInferResponse | ShortReply | LongReply
_STREAM_IN_FLIGHT: Final = 128  # inferences of one stream at a time; the rest of what came waits
# Of one stream, before others have their turn: a request that is refused at once is none in flight.
_BEGUN_AT_ONCE: Final = 128
_TURN_NS: Final = 1_000_000


class GrpcEndpoints(Endpoints[GrpcCodec]):
    """Those of the listener. repeated: what it remembers of messages."""

    def __init__(self, repository: Repository, protocol: str, doors: "Doors | None") -> None:
        super().__init__(
            repository,
            protocol,
            lambda served: GrpcCodec(served.name, served.version, served.spec, served.ragged, in_haste=True),
            doors,
        )
        self.repeated = RepeatedMessages()


class _OfMessage:
    """What inferences that a message of a call asks for have in common."""

    __slots__ = ()

    call: GrpcCall
    _arrival_ns: int
    _data: Buffer
    _endpoints: Endpoints[GrpcCodec]
    _known: KnownMessage | None
    _repeated: RepeatedMessages
    _message: pb.ModelInferRequest | None
    _parts_of_data: Parts | None
    decoded: Callable[[InferRequest | GatewayError], None]
    operation: ClassVar[str]

    def about(self, code: Code | None) -> tuple[str, int]:
        return "rpc.grpc.status_code", 0 if code is None else int(STATUS[code])

    @property
    def id(self) -> str:
        """The request's own; empty where its message could not be read."""
        return "" if self._message is None else str(self._message.id)

    def find(self, endpoints: Endpoints[GrpcCodec]) -> Endpoint[GrpcCodec]:
        data = self._data
        known = self._repeated.find(data)
        if known is not None:
            endpoint = endpoints.find(known.message.model_name, known.message.model_version, self.call)
            if endpoint.codec is known.codec:
                self._known, self._message, self._parts_of_data = known, known.message, None  # type: ignore[misc]  # as below
                return endpoint
        self._known = None  # type: ignore[misc]  # as below
        parts = parts_of(data) if len(data) > LONG_BYTES else None
        self._parts_of_data = parts  # type: ignore[misc]  # among the slots of those that inherit
        message = self._message = parse(data if parts is None else parts.head)  # type: ignore[misc]  # likewise
        return endpoints.find(message.model_name, message.model_version, self.call)

    def decode(self, codec: GrpcCodec, read_region: ReadRegion) -> InferRequest | Callable[[], None]:
        arrival_ns = self._arrival_ns
        remaining_s = self.call.remaining_s(arrival_ns)
        if self._known is not None:
            return self._known.request(self._data, arrival_ns, remaining_s)
        long_bodies = self._endpoints.repository.long_bodies
        parts = self._parts_of_data
        if parts is not None and parts.long:
            return long_bodies.message(codec, self._data, arrival_ns, remaining_s, self.decoded)
        try:
            request = codec.decode(self._message, arrival_ns, remaining_s, read_region, None if parts is None else parts.raw)
            if parts is None:
                self._repeated.remember(self._data, self._message, codec, request)
            return request
        except TakesLong:
            message, raw = self._message, None if parts is None else parts.raw
            decode = codec.at_leisure().decode
            return long_bodies.on_thread(
                lambda regions: decode(message, arrival_ns, remaining_s, regions.read, raw), self.decoded
            )


class _GrpcInference(_OfMessage, Inference[GrpcCodec, Reply]):
    """The one of a call."""

    operation = "inference.GRPCInferenceService/ModelInfer"

    __slots__ = ("_data", "_known", "_message", "_parts_of_data", "_repeated", "call")

    def __init__(self, endpoints: GrpcEndpoints, call: GrpcCall, data: Buffer) -> None:
        super().__init__(endpoints, call, time.monotonic_ns())
        self.call = call
        self._data = data
        self._message = None
        self._repeated = endpoints.repeated

    def answer(self, reply: Reply) -> None:
        if isinstance(reply, ShortReply):
            self.call.reply(reply.data)
        elif isinstance(reply, LongReply):
            self.call.send_long(reply.parts())
            self.call.finish()
        else:
            self.call.reply(reply)

    def refuse(self, error: GatewayError) -> None:
        self.call.fail(error)


class InferCall(OneMessage):
    """ModelInfer."""

    def __init__(self, call: GrpcCall, endpoints: GrpcEndpoints) -> None:
        super().__init__(call)
        self._endpoints = endpoints
        self._inference: _GrpcInference | None = None

    def start(self, data: Buffer) -> None:
        self._inference = _GrpcInference(self._endpoints, self._call, data)
        self._inference.start()

    def refused(self, error: GatewayError) -> None:
        if self._inference is None:
            self._endpoints.refused(error, self._call, self._call.arrival_ns)

    def cancel(self) -> None:
        if self._inference is not None:
            self._inference.cancel()


class _Turn(_OfMessage, StreamedInference[GrpcCodec, Reply]):
    """One inference of a stream, which sends its replies when it is their turn; parts are sent when they are there."""

    operation = "inference.GRPCInferenceService/ModelStreamInfer"

    __slots__ = (
        "_data",
        "_final",
        "_known",
        "_message",
        "_on_reply",
        "_parts_of_data",
        "_repeated",
        "call",
        "replies",
        "reserved",
    )

    def __init__(self, endpoints: GrpcEndpoints, call: GrpcCall, data: Buffer, on_reply: Callable[[], None]) -> None:
        super().__init__(endpoints, call, time.monotonic_ns())
        self.call = call
        self._data = data
        self._message = None
        self._repeated = endpoints.repeated
        self._on_reply = on_reply
        self.reserved = 0  # bytes of its message, if that is long or came compressed
        self._final = False  # it has been sent
        self.replies: tuple[Reply | GatewayError, ...] | None = None  # what is left to send; None: not known

    def part(self, reply: Reply) -> bool:
        self.send(reply, last=self._last)
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

    def send(self, reply: Reply, *, last: bool) -> None:
        """Send a part of an answer, or the whole. Raises: InternalError, if it is too long."""
        if isinstance(reply, LongReply):
            reply.message.parameters[_FINAL].bool_param = last
            self.call.send_long(reply.streamed())
        else:
            message = reply.message() if isinstance(reply, ShortReply) else reply
            message.parameters[_FINAL].bool_param = last
            self.call.send(pb.ModelStreamInferResponse(infer_response=message))

    def answer(self, reply: Reply) -> None:
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

    def _replied(self, *replies: Reply | GatewayError) -> None:
        self.replies = replies
        on_reply = self._on_reply
        del self._on_reply  # or this and the stream would hold each other until the cyclic collector comes
        on_reply()


class InferStream:
    """ModelStreamInfer: one answer per request, in the order of the requests, which run concurrently.

    Requests of decoupled models are in no order with others: each part of an answer, and what follows the last, is sent when it
    is there, as Triton does. An error does not end the stream. Requests beyond `_STREAM_IN_FLIGHT`, or to a client that does
    not read its answers, wait undecoded, and their bytes keep the client's window closed.
    """

    def __init__(self, call: GrpcCall, endpoints: GrpcEndpoints, open_streams: "set[InferStream]") -> None:
        """open_streams: of the server, which shuts them down."""
        self._call = call
        self._endpoints = endpoints
        self._waiting: Buffer | None = None  # the next message; those behind it are the call's to keep
        self._waiting_size = 0  # of the window
        self._next_turn: asyncio.Handle | None = None
        self._running: deque[_Turn] = deque()  # in their order
        self._in_parts: list[_Turn] = []
        self._sending = False
        self._ended = False
        self._farewell: GatewayError | None = None
        self._open_streams = open_streams
        open_streams.add(self)

    def shut_down(self) -> None:
        """Answer what came, then end."""
        self._end_behind(NotReady("the server is shutting down", retry_after_s=1.0))

    def leave(self, error: GatewayError) -> None:
        self.refused(error)
        self._end_behind(error)

    def refused(self, error: GatewayError) -> None:
        self._endpoints.refused(error, self._call, time.monotonic_ns())  # of the call's age no message is

    def _end_behind(self, error: GatewayError) -> None:
        self._farewell = error
        self._call.deafen()
        self.drained()

    def message(self, data: Buffer, size: int) -> None:
        self._waiting, self._waiting_size = data, size
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
        begun, began_ns = 0, time.monotonic_ns()
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
            over = begun and (begun == _BEGUN_AT_ONCE or time.monotonic_ns() - began_ns >= _TURN_NS)
            if over and self._next_turn is None:
                self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)
            if self._next_turn is not None:
                return
            data, size = self._waiting, self._waiting_size
            reserved = len(data) if len(data) + 5 != size else 0  # when it was inflated
            long = not reserved and len(data) > _LONG_MESSAGE
            if long and not call.stream.reserve(len(data), self.drained):
                break
            self._waiting = None
            begun += 1
            call.stream.credit(size)
            if long:
                reserved = len(data)
                if not call.stream.settle(reserved, reserved):
                    call.stream.give_back(reserved)
                    call.crowded()
                    continue
            inference = _Turn(self._endpoints, call, data, self.drained)
            inference.reserved = reserved
            running.append(inference)
            inference.start()
            if inference.in_parts:
                in_parts.append(running.pop())
        if not running and not in_parts and self._waiting is None and not call.over:
            if self._ended:
                call.finish()
            elif self._farewell is not None:
                call.fail(self._farewell)

    def _take_turn(self) -> None:
        self._next_turn = None
        self.drained()

    def _send(self, inference: _Turn) -> None:
        replies, inference.replies = inference.replies or (), None  # an error may hold frames that hold the inference
        if inference.reserved:
            self._call.stream.give_back(inference.reserved)
        for reply in replies:
            if not isinstance(reply, GatewayError):
                try:
                    inference.send(reply, last=True)
                    continue
                except GatewayError as exc:
                    reply = exc.without_frames()
            self._call.send(pb.ModelStreamInferResponse(error_message=reply.words, infer_response=inference.failed()))
