"""Inferences that containers are asked for: by SageMaker's /invocations, and by KServe v1's :predict."""

from collections.abc import Callable
from functools import partial
from typing import Final

from gateway.edges.rest_inference import (
    AskedModel,
    OfEvents,
    OfExchange,
    RestInference,
    respond_error,
    respond_event,
    write_event,
)
from gateway.engine.inference import C, Endpoints, Reply, StreamedInference
from gateway.errors import Code, GatewayError, InvalidArgument
from gateway.protocols.invocations import FormCodec, FormReply, binary_headers, check_event
from gateway.protocols.long_answer import Slices
from gateway.protocols.media import Form
from gateway.protocols.raw_body import RawCodec
from gateway.protocols.rest import RestCodec
from gateway.protocols.tensors import ParsesLong, ReadRegion, TakesLong
from gateway.types import InferRequest
from gateway.wire.exchange import JSON, Exchange
from gateway.wire.http_errors import error_body
from gateway.wire.tensors import Buffer

_TOO_LATE: Final = 503  # not 504: who calls containers tries these again


def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Answer with an error."""
    if error.code is Code.DEADLINE_EXCEEDED:
        exchange.respond(_TOO_LATE, error_body(error.words), JSON, b"Retry-After: 1\r\n")
    else:
        respond_error(exchange, error)


class _OfContainer(OfExchange[C, Reply]):
    """What these inferences have in common."""

    __slots__ = ()

    def about(self, code: Code | None) -> tuple[str, int]:
        name, status = super().about(code)
        return name, _TOO_LATE if code is Code.DEADLINE_EXCEEDED else status

    def refuse(self, error: GatewayError) -> None:
        refuse(self._ended(), error)


class BinaryInvocation(_OfContainer[RestCodec, tuple[list[Buffer] | Slices, int | None]], RestInference):
    """One whose body is v2 with binary tensors: as `infer`, but for how the answer says so."""

    operation = "POST /invocations"

    __slots__ = ()

    def answer(self, reply: tuple[list[Buffer] | Slices, int | None]) -> None:
        parts, json_bytes = reply
        if json_bytes is None or not isinstance(parts, list):
            super().answer(reply)
            return
        self._ended().respond(200, parts, *binary_headers(json_bytes))


class RawInvocation(_OfContainer[RawCodec, tuple[bytes, str]]):
    """One of a raw model: the body goes in as it came, and what the model gives is the answer's."""

    operation = "POST /invocations"

    __slots__ = ("_asked", "_exchange")

    def decode(self, codec: RawCodec, read_region: ReadRegion) -> InferRequest:
        return codec.decode(self._exchange.body, self._exchange.headers, self._arrival_ns)

    def answer(self, reply: tuple[bytes, str]) -> None:
        body, content_type = reply
        self._ended().respond(200, body, content_type.encode())


class Invocation(OfEvents[FormCodec, FormReply], _OfContainer[FormCodec, FormReply], StreamedInference[FormCodec, FormReply]):
    """One of any other form. Answered in parts, by server-sent events, where the client asks for these."""

    operation = "POST /invocations"

    __slots__ = ("_answer", "_asked", "_begun", "_exchange", "_form", "_reply")

    def __init__(self, endpoints: Endpoints[FormCodec], exchange: Exchange, asked: AskedModel, form: Form, answer: str) -> None:
        """form: of the body. answer: as `FormCodec.decode` takes it."""
        StreamedInference.__init__(self, endpoints, exchange, exchange.arrival_ns)  # a call less than by OfExchange's
        self._exchange = exchange
        self._asked = asked
        self._form = form
        self._answer = answer
        self._begun = False
        self._reply: FormReply | None = None  # the one part of a decoupled model

    def decode(self, codec: FormCodec, read_region: ReadRegion) -> InferRequest | Callable[[], None]:
        exchange, form, answer = self._exchange, self._form, self._answer
        body, arrival_ns, long_bodies = exchange.body, exchange.arrival_ns, self._endpoints.repository.long_bodies
        if codec.parses_long(body, form):
            return long_bodies.form(codec, body, form, answer, arrival_ns, self.decoded)
        try:
            return codec.decode(body, form, answer, arrival_ns, read_region)
        except ParsesLong:
            return long_bodies.form(codec, body, form, answer, arrival_ns, self.decoded)
        except TakesLong:
            decode = partial(codec.at_leisure().decode, body, form, answer, arrival_ns)
            return long_bodies.on_thread(lambda regions: decode(regions.read), self.decoded)

    def answer(self, reply: FormReply) -> None:
        if self._answer == "events":
            check_event(reply)
            respond_event(self._ended(), reply.parts)
        else:
            self._ended().respond(200, reply.parts, reply.content_type, reply.headers)

    def part(self, reply: FormReply) -> bool:
        if self._answer == "events":
            check_event(reply)
            self._begin()
            write_event(self._exchange, reply.parts)
            return not self._exchange.backlog
        if self._reply is not None:
            raise self._not_one("more than one")
        self._reply = reply
        return True

    def finish(self) -> None:
        if self._answer == "events":
            self._begin()
            self._ended().finish()
        elif self._reply is None:
            raise self._not_one("no")
        else:
            self.answer(self._reply)

    def _not_one(self, parts: str) -> InvalidArgument:
        return InvalidArgument(
            f"model '{self._asked.name}' gave {parts} part of an answer: to have any number of them, ask with the header "
            "Accept: text/event-stream"
        )


class Prediction(Invocation):
    """One of KServe v1."""

    operation = "POST /v1/models/{model}:predict"

    __slots__ = ()
