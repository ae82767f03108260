"""Inferences asked for over REST: `infer`, and the generate extension."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol
from urllib.parse import quote

from gateway.engine.inference import C, Endpoint, Endpoints, Inference, Reply, StreamedInference
from gateway.errors import Code, GatewayError, InvalidArgument, Unavailable
from gateway.protocols.generate import GenerateCodec
from gateway.protocols.long_answer import Slices
from gateway.protocols.rest import RestCodec, header_length
from gateway.protocols.tensors import LONG_JSON_BYTES, ParsesLong, ReadRegion, TakesLong
from gateway.types import InferRequest
from gateway.wire.exchange import JSON, Exchange
from gateway.wire.http_errors import STATUS, error_body
from gateway.wire.tensors import Buffer

_BINARY: Final = b"application/octet-stream"
_EVENTS: Final = b"text/event-stream; charset=utf-8"
_LONG_EVENT: Final = 64 << 10  # to join its pieces costs more than to write each
_WRITING_NS: Final = 1_000_000  # of a long answer, at a time
_REST_S: Final = 0.001
_NOT_KEPT: Final = b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"  # nor by proxies: nginx would gather the events


class AskedModel(Protocol):
    """What a path says of the model."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Empty: the highest that is ready."""


class OfExchange(Inference[C, Reply]):
    """What inferences that an exchange asks for have in common. They have the slots `_asked` and `_exchange`."""

    __slots__ = ()  # else it could not stand beside StreamedInference, which has some

    _asked: AskedModel
    _exchange: Exchange

    def __init__(self, endpoints: Endpoints[C], exchange: Exchange, asked: AskedModel) -> None:
        super().__init__(endpoints, exchange, exchange.arrival_ns)
        self._exchange = exchange  # type: ignore[misc]  # a slot of the class below
        self._asked = asked  # type: ignore[misc]  # likewise

    def about(self, code: Code | None) -> tuple[str, int]:
        """Of the semantic conventions for HTTP what the span's name does not say: each costs a microsecond."""
        return "http.response.status_code", 200 if code is None else STATUS[code]

    def find(self, endpoints: Endpoints[C]) -> Endpoint[C]:
        return endpoints.find(self._asked.name, self._asked.version, self._exchange)

    def refuse(self, error: GatewayError) -> None:
        respond_error(self._ended(), error)

    def _ended(self) -> Exchange:
        """The exchange, which need not tell this any more."""
        self._exchange.on_disconnect = self._exchange.on_drained = None
        return self._exchange


class RestInference(OfExchange[RestCodec, tuple[list[Buffer] | Slices, int | None]]):
    """An inference that an exchange asks for."""

    operation = "POST /v2/models/{model}/infer"

    __slots__ = ("_asked", "_exchange")

    def decode(self, codec: RestCodec, read_region: ReadRegion) -> InferRequest | Callable[[], None]:
        exchange = self._exchange
        body = exchange.body
        header_bytes = header_length(exchange.headers.get(b"inference-header-content-length"), len(body))
        if len(body) <= LONG_JSON_BYTES or (header_bytes is not None and header_bytes <= LONG_JSON_BYTES):
            try:
                return codec.decode(body, header_bytes, exchange.arrival_ns, read_region)
            except TakesLong:
                decode = partial(codec.at_leisure().decode, body, header_bytes, exchange.arrival_ns)
                return self._endpoints.repository.long_bodies.on_thread(lambda regions: decode(regions.read), self.decoded)
            except ParsesLong:
                pass
        return self._endpoints.repository.long_bodies.infer(codec, body, header_bytes, exchange.arrival_ns, self.decoded)

    def answer(self, reply: tuple[list[Buffer] | Slices, int | None]) -> None:
        parts, json_bytes = reply
        exchange = self._exchange
        exchange.on_disconnect = None
        if not isinstance(parts, list):
            if exchange.encoding:
                self._respond_whole(parts)
            else:
                _SliceWriter(exchange, parts).write()
            return
        if json_bytes is None:
            exchange.respond(200, parts)
        else:
            exchange.respond(200, parts, _BINARY, b"Inference-Header-Content-Length: %d\r\n" % json_bytes)

    def _respond_whole(self, slices: Slices) -> None:
        """Answer with all slices at once, as they are to be compressed."""
        exchange = self._exchange

        def made(outcome: list[bytes] | GatewayError) -> None:
            exchange.on_disconnect = None
            if isinstance(outcome, GatewayError):
                respond_error(exchange, outcome)
            else:
                exchange.respond(200, outcome)

        exchange.on_disconnect = self._endpoints.repository.long_bodies.on_thread(lambda regions: list(slices), made)


class _SliceWriter:
    """Writes a long answer some slices at a time, when those before have left: it holds neither the loop nor memory for all.

    In between the loop rests: where it went on in its next turn, sessions began their batches up to 100 ms late.
    """

    def __init__(self, exchange: Exchange, slices: Slices) -> None:
        self._exchange = exchange
        self._slices: Iterator[bytes] = iter(slices)
        exchange.begin(200, JSON, held_behind=slices.held_bytes)
        exchange.on_drained = self._go_on
        exchange.on_disconnect = self._leave

    def write(self) -> None:
        exchange = self._exchange
        pieces: list[bytes] = []
        until_ns = time.monotonic_ns() + _WRITING_NS
        try:
            while time.monotonic_ns() < until_ns:
                pieces.append(next(self._slices))
        except StopIteration:
            exchange.on_drained = exchange.on_disconnect = None
            if pieces:
                exchange.write(b"".join(pieces))
            exchange.finish()
            return
        except BaseException:
            exchange.failed()
            return
        exchange.write(b"".join(pieces))
        if not exchange.backlog:
            self._go_on()

    def _go_on(self) -> None:
        asyncio.get_running_loop().call_later(_REST_S, self.write)

    def _leave(self) -> None:
        self._slices = iter(())


class _Generating(OfExchange[GenerateCodec, list[bytes]], StreamedInference[GenerateCodec, list[bytes]]):
    """An inference by the generate extension that an exchange asks for."""

    __slots__ = ("_asked", "_exchange")

    def decode(self, codec: GenerateCodec, read_region: ReadRegion) -> InferRequest | Callable[[], None]:
        exchange = self._exchange
        if len(exchange.body) <= LONG_JSON_BYTES:
            with contextlib.suppress(ParsesLong):
                return codec.decode(exchange.body, exchange.arrival_ns)
        return self._endpoints.repository.long_bodies.generate(codec, exchange.body, exchange.arrival_ns, self.decoded)


class Generate(_Generating):
    """One JSON object; of a decoupled model that of its one part."""

    operation = "POST /v2/models/{model}/generate"

    __slots__ = ("_reply",)

    def __init__(self, endpoints: Endpoints[GenerateCodec], exchange: Exchange, asked: AskedModel) -> None:
        super().__init__(endpoints, exchange, asked)
        self._reply: list[bytes] | None = None

    def answer(self, reply: list[bytes]) -> None:
        self._ended().respond(200, reply)

    def part(self, reply: list[bytes]) -> bool:
        if self._reply is not None:
            raise self._not_one("more than one")
        self._reply = reply
        return True

    def finish(self) -> None:
        if self._reply is None:
            raise self._not_one("none")
        self.answer(self._reply)

    def _not_one(self, parts: str) -> InvalidArgument:
        return InvalidArgument(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
            f"of responses: model '{self._asked.name}' gave {parts}; ask by POST "
            f"/v2/models/{quote(self._asked.name, safe='')}/generate_stream"
        )


class OfEvents(OfExchange[C, Reply]):
    """What those have in common that may be answered by server-sent events. They have the slot `_begun`, at first False."""

    __slots__ = ()

    _begun: bool

    def about(self, code: Code | None) -> tuple[str, int]:
        return super().about(None if self._begun else code)  # the status leaves with the first part

    def refuse(self, error: GatewayError) -> None:
        """Send the error behind the parts that are sent, as the last event."""
        if self._begun:
            exchange = self._ended()
            write_event(exchange, (error_body(error.words),))
            exchange.finish()
        else:
            super().refuse(error)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True  # type: ignore[misc]  # a slot of the class below
            self._exchange.begin(200, _EVENTS, _NOT_KEPT)


class GenerateStream(OfEvents[GenerateCodec, list[bytes]], _Generating):
    """A server-sent event for each part, and for an error behind them; one for the answer of a model that gives it whole."""

    operation = "POST /v2/models/{model}/generate_stream"

    __slots__ = ("_begun",)

    def __init__(self, endpoints: Endpoints[GenerateCodec], exchange: Exchange, asked: AskedModel) -> None:
        super().__init__(endpoints, exchange, asked)
        self._begun = False

    def answer(self, reply: list[bytes]) -> None:
        respond_event(self._ended(), reply)

    def part(self, reply: list[bytes]) -> bool:
        self._begin()
        write_event(self._exchange, reply)
        return not self._exchange.backlog

    def finish(self) -> None:
        self._begin()
        self._ended().finish()


def respond_event(exchange: Exchange, pieces: Sequence[Buffer]) -> None:
    """Answer with one server-sent event. pieces: of JSON without line ends."""
    exchange.compress = False  # as where there are more of them
    exchange.respond(200, (b"data: ", *pieces, b"\n\n"), _EVENTS, _NOT_KEPT)


def write_event(exchange: Exchange, pieces: Sequence[Buffer]) -> None:
    """Send a server-sent event behind others. pieces: of JSON without line ends."""
    if sum(map(len, pieces)) <= _LONG_EVENT:
        exchange.write(b"data: %b\n\n" % b"".join(pieces))
    else:
        for piece in (b"data: ", *pieces, b"\n\n"):
            exchange.write(piece)


def respond_error(exchange: Exchange, error: GatewayError, status: int | None = None) -> None:
    """Answer with an error; one that is safe to retry says when. status: None: the usual one."""
    headers = b""
    if error.code is Code.UNAUTHENTICATED:
        headers = b"WWW-Authenticate: Bearer\r\n"
    elif isinstance(error, Unavailable):
        headers = b"Retry-After: %d\r\n" % max(1, math.ceil(error.retry_s))
    exchange.respond(status or STATUS[error.code], error_body(error.words), JSON, headers)
