"""A request and the place for its one answer: what a handler of an HTTP/1.1 connection gets."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from gateway.protocols.tensors import Buffer
from gateway.wire.compression import choose_encoding

JSON: Final = b"application/json"
REASONS: Final = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 408: b"Request Timeout", 413: b"Content Too Large", 417: b"Expectation Failed",
    431: b"Request Header Fields Too Large", 499: b"Client Closed Request", 500: b"Internal Server Error",
    501: b"Not Implemented", 503: b"Service Unavailable", 504: b"Gateway Timeout",
}  # fmt: skip


class Answering(Protocol):
    """What takes the answer to an exchange: its connection."""

    @property
    def unsent(self) -> int:
        """Bytes that were written and wait for the client."""

    def take(
        self, exchange: "Exchange", status: int, body: Buffer | Sequence[Buffer], content_type: bytes, headers: bytes
    ) -> None:
        """Take the one answer."""

    def take_piece(self, exchange: "Exchange", piece: Buffer) -> None:
        """Take a piece of it."""

    def finish(self, exchange: "Exchange") -> None:
        """There are no more pieces."""

    def failed(self, exchange: "Exchange") -> None:
        """There will be no answer, from an except clause."""


class Pieces:
    """An answer in pieces that has begun. held: pieces whose turn has not come. written: its head is. last: and it said so."""

    __slots__ = ("head", "held", "last", "written")

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.held: list[Buffer] = []
        self.written = False
        self.last = False


class Exchange:
    """One request and the place for its one answer: all at once by `respond`, or in pieces: `begin`, `write` …, `finish`.

    method, path, query, headers: as bytes; path is still percent-quoted, header names are lower case.
    body: decompressed; the handler's to keep; gone here once it is answered.
    arrival_ns: `time.monotonic_ns` when the message was complete.
    on_disconnect: set by the handler that waits; called once if the client goes away first. Then `respond` does nothing.
    compress: whether the answer may be, if the client accepts it; the handler may say no. One in pieces never is.
    on_drained: set by a handler that writes pieces; called each time that `backlog` has become false.

    The connection's alone: connection (None, once nobody waits), keep_alive, http_1_0; fault: no request, but what was wrong
    with the stream here; head (without its last line; None, until it is answered), parts and length: the answer; pieces: until
    they are all there; compressing: there is an answer, to be compressed; held_bytes: what it makes the connection hold.
    """

    __slots__ = (
        "arrival_ns", "body", "compress", "compressing", "connection", "fault", "head", "headers", "held_bytes", "http_1_0",
        "keep_alive", "length", "method", "on_disconnect", "on_drained", "parts", "path", "pieces", "query",
    )  # fmt: skip

    def __init__(
        self, connection: Answering, method: bytes, target: bytes, headers: dict[bytes, bytes], body: Buffer, keep_alive: bool
    ) -> None:
        self.connection: Answering | None = connection
        self.keep_alive = keep_alive
        self.http_1_0 = False
        self.fault: tuple[int, str] | None = None
        self.head: bytes | None = None
        self.parts: Sequence[Buffer] = ()
        self.length = 0
        self.compressing = False
        self.held_bytes = 0
        self.pieces: Pieces | None = None
        self.method = method
        self.path, _, self.query = target.partition(b"?")
        self.headers = headers
        self.body = body
        self.arrival_ns = 0
        self.compress = True
        self.on_disconnect: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Exchange {self.method!r} {self.path!r}, {'answered' if self.head is not None else 'open'}>"

    def respond(
        self, status: int, body: Buffer | Sequence[Buffer] = b"", content_type: bytes = JSON, headers: bytes = b""
    ) -> None:
        """Answer, exactly once. headers: more of them, whole lines with their CRLF.

        The buffers of the body must not change any more.
        """
        if self.connection is not None:
            self.connection.take(self, status, body, content_type, headers)

    def begin(self, status: int, content_type: bytes, headers: bytes = b"") -> None:
        """Begin an answer in pieces. Its head leaves with the first of them."""
        if self.connection is not None:
            self.check_open()
            reason = REASONS.get(status, b"")
            self.pieces = Pieces(b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\n%b" % (status, reason, content_type, headers))

    def write(self, piece: Buffer) -> None:
        """Send a piece, which must not change any more, at once or when its turn comes."""
        if self.connection is not None and len(piece):
            self.connection.take_piece(self, piece)

    def finish(self) -> None:
        """There are no more pieces."""
        if self.connection is not None:
            self.connection.finish(self)

    def failed(self) -> None:
        """Give up an answer that cannot go on, from an except clause: it ends with the connection, if some of it has left."""
        if self.connection is not None:
            self.connection.failed(self)

    def check_open(self) -> None:
        """Raises: RuntimeError, if there is an answer, or the beginning of one."""
        if self.head is not None or self.compressing or self.pieces is not None:
            raise RuntimeError(f"{self!r} was answered before")

    @property
    def encoding(self) -> bytes:
        """How a long answer is compressed: gzip or deflate, by what the client accepts; b"" for not at all."""
        return choose_encoding(self.headers.get(b"accept-encoding", b"")) if self.compress else b""

    @property
    def backlog(self) -> bool:
        """Whether a byte of what was written still waits here for the client."""
        pieces = self.pieces
        return self.connection is not None and pieces is not None and (bool(pieces.held) or self.connection.unsent > 0)


Handler = Callable[[Exchange], None]
