"""A request and the place for its one answer: what a handler of an HTTP/1.1 connection gets."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from gateway.errors import GatewayError
from gateway.wire.compression import Outcome, Work, choose_encoding, deflate, outcome_of
from gateway.wire.date import date_line
from gateway.wire.request_ids import MADE, numbers, request_id
from gateway.wire.request_ids import NAME as REQUEST_ID
from gateway.wire.tensors import Buffer

JSON: Final = b"application/json"
REASONS: Final = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 406: b"Not Acceptable", 408: b"Request Timeout", 409: b"Conflict", 413: b"Content Too Large",
    415: b"Unsupported Media Type", 417: b"Expectation Failed", 421: b"Misdirected Request", 429: b"Too Many Requests",
    431: b"Request Header Fields Too Large", 499: b"Client Closed Request", 500: b"Internal Server Error",
    501: b"Not Implemented", 503: b"Service Unavailable", 504: b"Gateway Timeout", 505: b"HTTP Version Not Supported",
    507: b"Insufficient Storage",
}  # fmt: skip
_ONE_BUFFER: Final = (bytes, bytearray, memoryview)
_DEFLATE_FROM_BYTES: Final = 1 << 10  # below it, the time costs more than the bytes
_DEFLATE_INLINE_BYTES: Final = 16 << 10
_LAST_CHUNK: Final = b"0\r\n\r\n"
_ID: Final = b"X-Request-Id: "
_MADE_ID: Final = _ID + MADE + b"\r\n"
_JSON_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b" + _MADE_ID

Run = Callable[[Work, Callable[[Outcome], None]], None]
"""Does work that takes long where it holds nobody up, then gives the other its outcome."""


class Answering(Protocol):
    """What takes the answer to an exchange: its connection."""

    @property
    def run(self) -> Run:
        """For what takes long."""

    @property
    def unsent(self) -> int:
        """Bytes that were written and wait for the client."""

    def answered(self, exchange: "Exchange") -> None:
        """The answer is here."""

    def piece_added(self, exchange: "Exchange", pieces: "Pieces") -> None:
        """A piece of it is."""

    def last_piece_added(self, exchange: "Exchange", pieces: "Pieces") -> None:
        """All of them are, and some have left."""

    def failed(self, exchange: "Exchange") -> None:
        """There will be no answer, from an except clause."""


class Pieces:
    """An answer in pieces that has begun.

    held: pieces whose turn has not come. held_behind: bytes of what further pieces are made of. written: its head is. last: and
    it said so.
    """

    __slots__ = ("_chunked", "_head_alone", "head", "held", "held_behind", "last", "written")

    def __init__(self, head: bytes, *, chunked: bool, head_alone: bool) -> None:
        """head: without its last line. chunked: else the end of the connection ends the answer."""
        self.head = head
        self.held: list[Buffer] = []
        self.held_behind = 0
        self.written = False
        self.last = False
        self._chunked = chunked
        self._head_alone = head_alone

    def take(self, *, end: bool = False) -> list[Buffer]:
        """What is to be written of them now. end: nothing comes behind it."""
        out: list[Buffer] = []
        if not self.written:
            self.written = True
            framing = b"Transfer-Encoding: chunked\r\n" if self._chunked else b""
            out.append(self.head + framing + (b"Connection: close\r\n\r\n" if self.last else b"\r\n"))
        held, self.held = self.held, []
        if self._head_alone:
            return out
        for piece in held:
            out += (b"%x\r\n" % len(piece), piece, b"\r\n") if self._chunked else (piece,)
        if end and self._chunked:
            out.append(_LAST_CHUNK)
        return out


class _ExchangeHead(msgspec.Struct, eq=False):
    """What may be given by position."""

    connection: Answering | None
    method: bytes
    path: bytes
    query: bytes
    headers: Mapping[bytes, bytes]
    body: Buffer


class Exchange(_ExchangeHead, kw_only=True, eq=False):
    """One request and the place for its one answer: all at once by `respond`, or in pieces: `begin`, `write` …, `finish`.

    method, path, query, headers: as bytes; path is still percent-quoted, header names are lower case. The headers never change:
    other requests may have the same ones.
    body: decompressed; the handler's to keep; gone here once it is answered.
    arrival_ns: `time.monotonic_ns` when the message was complete.
    on_disconnect: set by the handler that waits; called once if the client goes away first. Then `respond` does nothing.
    compress: whether the answer may be, if the client accepts it; the handler may say no. One in pieces never is.
    key: whose request it is, by the `access` rules; set by the handler, and there only where keys are asked for.
    ran: whether a model may have run for it; set by the handler.
    on_drained: set by a handler that writes pieces; called each time that `backlog` has become false.

    The connection's alone: connection (None, once nobody waits), keep_alive, http_1_0; fault: no request, but what was wrong
    with the stream here; head (without its last line; None, until it is answered), parts and length: the answer; pieces: until
    they are all there; compressing: there is an answer, to be compressed; held_bytes: what it makes the connection hold.
    """

    keep_alive: bool
    arrival_ns: int = 0
    http_1_0: bool = False
    fault: tuple[int, str] | None = None
    key: Any = None
    ran: bool = False
    compress: bool = True
    on_disconnect: Callable[[], None] | None = None
    on_drained: Callable[[], None] | None = None
    head: bytes | None = None
    parts: Sequence[Buffer] = ()
    length: int = 0
    pieces: Pieces | None = None
    compressing: bool = False
    held_bytes: int = 0
    _own: bytes = b""  # headers of the answer, as lines, of which the first is its id; empty: not yet made
    _number: int = 0  # of an id that was made, and is in the head alone

    def __repr__(self) -> str:
        return f"<Exchange {self.method!r} {self.path!r}, {'answered' if self.answered else 'open'}>"

    @property
    def answered(self) -> bool:
        """Whether there is an answer, though it may still have to be compressed, or wait for its turn."""
        return self.head is not None or self.compressing

    @property
    def request_id(self) -> bytes:
        """By which it is known in its answer and in the log: the client's own, if that is fit for it."""
        own = self._own or self._own_headers()
        return own[len(_ID) : own.index(b"\r")]

    @property
    def encoding(self) -> bytes:
        """How a long answer is compressed: gzip or deflate, by what the client accepts; b"" for not at all."""
        return choose_encoding(self.headers.get(b"accept-encoding", b"")) if self.compress else b""

    @property
    def backlog(self) -> bool:
        """Whether a byte of what was written still waits here for the client."""
        pieces = self.pieces
        return self.connection is not None and pieces is not None and (bool(pieces.held) or self.connection.unsent > 0)

    def _own_headers(self) -> bytes:
        if not self._own:
            given = self.headers.get(REQUEST_ID)
            self._own = _MADE_ID % (self._number or next(numbers)) if given is None else _ID + request_id(given) + b"\r\n"
        return self._own

    def tell(self, name: bytes, value: bytes) -> None:
        """Give the answer a header, before it is begun."""
        self._own = self._own_headers() + b"%b: %b\r\n" % (name, value)

    def respond(
        self, status: int, body: Buffer | Sequence[Buffer] = b"", content_type: bytes = JSON, headers: bytes = b""
    ) -> None:
        """Answer, exactly once. headers: more of them, whole lines with their CRLF.

        The buffers of the body must not change any more.
        """
        connection = self.connection
        if connection is None:
            return
        if self.head is not None or self.compressing or self.pieces is not None:
            raise RuntimeError(f"{self!r} was answered before")
        parts: Sequence[Buffer]
        if type(body) is list or not isinstance(body, _ONE_BUFFER):
            parts = body
            length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        else:
            parts = (body,)
            length = len(body)
        if length >= _DEFLATE_FROM_BYTES and status == 200 and (encoding := self.encoding):
            self.compressing = True
            work = partial(deflate, encoding, parts)
            done = partial(self._deflated, content_type, headers, encoding, parts)
            if length > _DEFLATE_INLINE_BYTES:
                connection.run(work, done)
            else:
                done(outcome_of(work))
            return
        if status == 200 and content_type is JSON and not (headers or self._own or REQUEST_ID in self.headers):  # as mostly
            self._number = number = next(numbers)
            self.head = _JSON_HEAD % (length, date_line(), number)
        else:
            self.head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b%b%b" % (
                status, REASONS.get(status, b""), content_type, length, date_line(), self._own or self._own_headers(), headers,
            )  # fmt: skip
        self.parts = parts
        self.length = length
        connection.answered(self)

    def _deflated(
        self, content_type: bytes, headers: bytes, encoding: bytes, parts: Sequence[Buffer], outcome: Outcome
    ) -> None:
        self.compressing = self.compress = False
        if isinstance(outcome, GatewayError):  # there is no memory, say: it goes as it is
            self.respond(200, parts, content_type, headers)
        else:
            self.respond(200, outcome, content_type, b"%bContent-Encoding: %b\r\n" % (headers, encoding))

    def begin(self, status: int, content_type: bytes, headers: bytes = b"", *, held_behind: int = 0) -> None:
        """Begin an answer in pieces. Its head leaves with the first of them. held_behind: bytes of what they are made of."""
        if self.connection is None:
            return
        if self.answered or self.pieces is not None:
            raise RuntimeError(f"{self!r} was answered before")
        head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\n%b%b%b" % (
            status, REASONS.get(status, b""), content_type, date_line(), self._own_headers(), headers,
        )  # fmt: skip
        self.pieces = Pieces(head, chunked=not self.http_1_0, head_alone=self.method == b"HEAD")
        self.pieces.held_behind = held_behind

    def write(self, piece: Buffer) -> None:
        """Send a piece, which must not change any more, at once or when its turn comes."""
        if self.connection is None or not len(piece):
            return
        pieces = self._begun()
        pieces.held.append(piece)
        self.connection.piece_added(self, pieces)

    def finish(self) -> None:
        """There are no more pieces."""
        if self.connection is None:
            return
        pieces = self._begun()
        self.pieces = None
        if pieces.written:
            self.head = pieces.head
            self.connection.last_piece_added(self, pieces)
        else:  # all of it is here: an answer like others, of known length
            self.parts = pieces.held
            self.length = sum(map(len, pieces.held))
            self.head = pieces.head + b"Content-Length: %d\r\n" % self.length
            self.connection.answered(self)

    def failed(self) -> None:
        """Give up an answer that cannot go on, from an except clause: it ends with the connection, if some of it has left."""
        if self.connection is not None:
            self.connection.failed(self)

    def _begun(self) -> Pieces:
        """Raises: RuntimeError, if no answer in pieces has begun, or it is over."""
        if self.pieces is None:
            raise RuntimeError(f"{self!r} has no answer in pieces that goes on")
        return self.pieces


Handler = Callable[[Exchange], None]
OnFault = Callable[[Exchange, GatewayError], None]
"""Told of what is answered with an error and no handler gets."""
