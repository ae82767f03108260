"""The HTTP/1.1 listener: bytes in, `Exchange`s to a handler, bytes out. It knows nothing of models.

Theory of operation
-------------------
A connection is in one phase at a time: between messages (IDLE), within a head (HEAD), within a body whose bytes go through
the parser (BODY), within a body of known length that the kernel writes straight to where it stays (FILLING), or past its
last message (DEAF: what still comes is read and dropped). httptools (llhttp) parses heads, chunked bodies, and bodies that
came whole with their head.

Every message becomes an `Exchange`. At most `limits.pipelined_requests` of a connection are with the handler at once,
what was parsed beyond them waits in a backlog (at most one read of 256 KiB), and reading pauses meanwhile. Answers may
come in any order; they are written in the order of the requests. A fault in the stream (bad syntax, a limit, a timeout)
becomes one last exchange with its error, so that the requests before it still get their answers; then the connection is
closed.

An answer may come in pieces (`Exchange.begin`): each is written when it is there, as a chunk; HTTP/1.0 knows none, there the
end of the connection ends the answer. Until its turn comes, what was written is held. Meanwhile, and while the transport holds
a byte of it, `Exchange.backlog` is true: the writer waits for `on_drained`. So that the transport tells of every byte, its
write limits are zero while such an answer is being written; and the kernel takes few bytes beyond those on their way, not the
megabytes of its socket buffer, which would also hide for long that a slow client takes some.

Closing is done as RFC 9112, section 9.6, asks: end our side, go on reading for a moment, then close, so that bytes the
client has sent meanwhile do not reset the connection before it has read its answer.

The end of the client's stream counts as the client's going away: nothing tells a half-close from a close, and a caller
that gave up is common where half-closing ones are rare (nginx and Go decide alike). Its waiting exchanges are told by
`on_disconnect`.
"""

import asyncio
import contextlib
import logging
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

import httptools
import numpy as np

from gateway.config import Limits
from gateway.errors import GatewayError, InvalidArgument, TooLarge
from gateway.protocols.rest import STATUS, error_body
from gateway.protocols.tensors import Buffer

log = logging.getLogger(__name__)

JSON: Final = b"application/json"

_REASONS: Final = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 408: b"Request Timeout", 413: b"Content Too Large", 417: b"Expectation Failed",
    431: b"Request Header Fields Too Large", 499: b"Client Closed Request", 500: b"Internal Server Error",
    501: b"Not Implemented", 503: b"Service Unavailable", 504: b"Gateway Timeout",
}  # fmt: skip
_UPGRADE_FIELDS: Final = frozenset((b"upgrade", b"connection", b"http2-settings"))
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_READ_BYTES: Final = 256 << 10
_WRITE_HIGH_BYTES: Final = 1 << 20  # above asyncio's 64 KiB, so that one usual tensor does not stop the reading
_KERNEL_UNSENT_BYTES: Final = 16 << 10  # of an answer in pieces: 36 KB are then taken at a time, not 1.4 MB (2026-11-22)
_JOIN_BYTES: Final = 64 << 10  # up to here one copy is cheaper than one more write
_LINGER_S: Final = 1.0
_REFUSED_AT_ONCE: Final = 256  # connections above the limit that are being told so
_DRAIN_IDLE_S: Final = 1.0
_LAST_WORDS_S: Final = 0.5
# A body of 4 KiB inflates to 4 MiB at most (deflate's best is 1032:1): some milliseconds. More is done off the loop.
_INFLATE_INLINE_BYTES: Final = 4 << 10
_DEFLATE_INLINE_BYTES: Final = 16 << 10
_DEFLATE_FROM_BYTES: Final = 1 << 10  # below it, the time costs more than the bytes
_DEFLATE_LEVEL: Final = 1
_WINDOW_BITS: Final = {b"gzip": 31, b"deflate": 15}


# The phases of a connection. Plain constants: a member of an Enum takes 13 times as long to look up on Python 3.11, and there
# are ten of them on the way of a request (0.9 against 0.07 µs each, 2 busy cores, 2026-11-21).
_PHASES: Final = ("IDLE", "HEAD", "BODY", "FILLING", "DEAF")
_IDLE, _HEAD, _BODY, _FILLING, _DEAF = range(len(_PHASES))


_ONE_BUFFER: Final = (bytes, bytearray, memoryview)

# What was answered and waits for its turn: status, content type, more headers, the body's parts, its length.
_Answer = tuple[int, bytes, bytes, Sequence[Buffer], int]


class _InPieces:
    """An answer in pieces that has begun. held: pieces whose turn has not come. written: its head is. last: and it said so."""

    __slots__ = ("content_type", "headers", "held", "last", "status", "written")

    def __init__(self, status: int, content_type: bytes, headers: bytes) -> None:
        self.status = status
        self.content_type = content_type
        self.headers = headers
        self.held: list[Buffer] = []
        self.written = False
        self.last = False


class Exchange:
    """One request and the place for its one answer: all at once by `respond`, or in pieces: `begin`, `write` …, `finish`.

    method, path, query, headers: as bytes; path is still percent-quoted, header names are lower case.
    body: decompressed; the handler's to keep. arrival_ns: `time.monotonic_ns` when the message was complete.
    on_disconnect: set by the handler that waits; called once if the client goes away first. Then `respond` does nothing.
    compress: whether the answer may be, if the client accepts it; the handler may say no. One in pieces never is.
    on_drained: set by a handler that writes pieces; called each time that `backlog` has become false.
    """

    __slots__ = (
        "_answer", "_compressing", "_connection", "_fault", "_http_1_0", "_keep_alive", "_pieces",
        "arrival_ns", "body", "compress", "headers", "method", "on_disconnect", "on_drained", "path", "query",
    )  # fmt: skip

    def __init__(
        self, connection: "HttpConnection", method: bytes, target: bytes, headers: dict[bytes, bytes], keep_alive: bool
    ) -> None:
        self._connection: HttpConnection | None = connection
        self._keep_alive = keep_alive
        self._answer: _Answer | None = None
        self._compressing = False  # there is an answer, to be compressed
        self._fault: tuple[int, str] | None = None  # no request, but what was wrong with the stream here
        self._http_1_0 = False
        self._pieces: _InPieces | None = None  # until they are all there
        self.method = method
        self.path, _, self.query = target.partition(b"?")
        self.headers = headers
        self.body: Buffer = b""
        self.arrival_ns = 0
        self.compress = True
        self.on_disconnect: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Exchange {self.method!r} {self.path!r}, {'answered' if self._answer is not None else 'open'}>"

    def respond(
        self, status: int, body: Buffer | Sequence[Buffer] = b"", content_type: bytes = JSON, headers: bytes = b""
    ) -> None:
        """Answer, exactly once. headers: more of them, whole lines with their CRLF.

        The buffers of the body must not change any more.
        """
        if self._connection is not None:
            self._connection.take(self, status, body, content_type, headers)

    def begin(self, status: int, content_type: bytes, headers: bytes = b"") -> None:
        """Begin an answer in pieces. Its head leaves with the first of them."""
        if self._connection is not None:
            if self._answer is not None or self._compressing or self._pieces is not None:
                raise RuntimeError(f"{self!r} was answered before")
            self._pieces = _InPieces(status, content_type, headers)

    def write(self, piece: Buffer) -> None:
        """Send a piece, which must not change any more, at once or when its turn comes."""
        if self._connection is not None and len(piece):
            self._connection.take_piece(self, piece)

    def finish(self) -> None:
        """There are no more pieces."""
        if self._connection is not None:
            self._connection.finish(self)

    @property
    def encoding(self) -> bytes:
        """How a long answer is compressed: gzip or deflate, by what the client accepts; b"" for not at all."""
        return choose_encoding(self.headers.get(b"accept-encoding", b"")) if self.compress else b""

    def failed(self) -> None:
        """Give up an answer that cannot go on, from an except clause: it ends with the connection, if some of it has left."""
        if self._connection is not None:
            self._connection.handler_failed(self)

    @property
    def backlog(self) -> bool:
        """Whether a byte of what was written still waits here for the client."""
        pieces = self._pieces
        return self._connection is not None and pieces is not None and (bool(pieces.held) or self._connection.unsent > 0)


Handler = Callable[[Exchange], None]


def last_words_s(timeout_s: float) -> float:
    """How much of a drain's time is for telling those who could not be answered."""
    return min(_LAST_WORDS_S, timeout_s / 4)


class HttpServer:
    """A listener and its connections. Life: start -> drain. Everything on one event loop."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        """handler: called on the loop with each whole request; it answers through the exchange, at once or later."""
        self.handler = handler
        self.limits = limits
        self.draining = False
        self.connections: set[HttpConnection] = set()
        # Reads of all connections land here, one at a time, and are parsed before the next.
        self.scratch = memoryview(bytearray(_READ_BYTES))
        self._listener: asyncio.Server | None = None
        self._all_closed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<HttpServer: {len(self.connections)} connections{', draining' if self.draining else ''}>"

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen. Returns the port: 0 asks for any that is free. reuse_port: others listen there, too. Raises: OSError."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: HttpConnection(self, loop), host, port, backlog=2048, reuse_port=reuse_port, start_serving=True
        )
        return int(self._listener.sockets[0].getsockname()[1])

    async def drain(self, timeout_s: float, give_up: Callable[[], None] = lambda: None) -> None:
        """Stop accepting, answer what comes on open connections with `Connection: close`, then close them.

        A connection without a request in flight is closed after one second: until then, a request that is on its way still
        gets its answer. Shortly before timeout_s, give_up is called, to have what the handler has answered now; what then is
        in flight or on its way gets a 503. What does not take its answer until timeout_s is cut off.
        """
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        if self.connections:
            self._all_closed.clear()
            await self._closed_within(min(_DRAIN_IDLE_S, timeout_s))
            for connection in list(self.connections):
                connection.close_if_idle()
            await self._closed_within(end - last_words_s(timeout_s) - loop.time())
        if self.connections:
            give_up()
            for connection in list(self.connections):
                connection.cut_off()
            await self._closed_within(end - loop.time())
            for connection in list(self.connections):
                connection.abort()

    async def _closed_within(self, seconds: float) -> None:
        if not self.connections:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._all_closed.wait()
        except TimeoutError:
            return

    def closed(self, connection: "HttpConnection") -> None:
        """A connection is gone (called by it)."""
        self.connections.discard(connection)
        if not self.connections:
            self._all_closed.set()


class HttpConnection(asyncio.BufferedProtocol):
    """One connection: see the module's theory of operation."""

    __slots__ = (
        "_added_bytes", "_answered_requests", "_backlog", "_body", "_body_bytes", "_buffer", "_chunked", "_content_bytes",
        "_continue_due", "_deadline", "_exchange", "_exchanges", "_feeding", "_filled", "_head_fed", "_head_is_new",
        "_header_bytes", "_header_count", "_headers", "_idle_timer", "_last_arrival_ns", "_limits", "_loop", "_parser",
        "_phase", "_pumping", "_reading", "_refusal", "_server", "_stall_timer", "_timed_phase", "_transport", "_upgrading",
        "_url", "_write_paused",
    )  # fmt: skip

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        # per connection
        self._server = server
        self._limits = server.limits
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._phase = _IDLE
        self._exchanges: deque[Exchange] = deque()  # with the handler, or answered behind one that is not
        self._backlog: deque[Exchange] = deque()  # parsed, and not yet given to the handler
        self._feeding = False  # in the parser: small answers wait until the whole read is parsed, then leave in one write
        self._pumping = False
        self._reading = True
        self._write_paused = False
        self._added_bytes = 0  # to those that already waited for the client when its writing was looked at
        self._answered_requests = 0
        self._last_arrival_ns = time.monotonic_ns()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        # per request
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_count = 0
        self._header_bytes = 0
        self._head_fed = 0
        self._head_is_new = True
        self._exchange: Exchange | None = None
        self._content_bytes = 0
        self._chunked = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._buffer = memoryview(b"")
        self._filled = 0
        self._continue_due = False
        self._upgrading = False
        self._refusal: tuple[int, str] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._timed_phase = _IDLE

    def __repr__(self) -> str:
        return f"<HttpConnection {_PHASES[self._phase]}: {len(self._exchanges)} open, {len(self._backlog)} waiting>"

    # the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Both loops give one that reads and writes; uvloop's is no subclass of asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        server = self._server
        server.connections.add(self)
        excess = len(server.connections) - self._limits.connections
        if excess > _REFUSED_AT_ONCE:
            transport.abort()
        elif excess > 0:
            self._refuse(503, f"the server has its {self._limits.connections} connections already (server.limits.connections)")
        else:
            self._idle_timer = self._loop.call_later(self._limits.idle_timeout_s, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = _DEAF
        for timer in (self._deadline, self._idle_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._deadline = self._idle_timer = self._stall_timer = None
        self._exchange = None
        del self._parser  # it refers to this connection: free both now, not when the collector comes by
        self._server.closed(self)
        self._leave()

    def _leave(self) -> None:
        """Tell those who answer that nobody waits any more."""
        waiting = [exchange for exchange in self._exchanges if exchange._answer is None]
        for exchange in (*self._exchanges, *self._backlog):
            exchange._connection = None
        self._exchanges.clear()
        self._backlog.clear()
        for exchange in waiting:
            _give_up(exchange)

    def eof_received(self) -> None:
        """The client is gone: returning None makes the transport write what it holds and close."""

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._phase == _FILLING:
            return self._buffer[self._filled :]
        return self._server.scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._phase == _FILLING:
            self._filled += nbytes
            if self._filled == self._content_bytes:
                self._complete(self._buffer)
        elif self._phase != _DEAF:
            self._feed(self._server.scratch[:nbytes])

    def pause_writing(self) -> None:
        self._write_paused = True
        self._update_reading()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        self._drained()
        self._pump()
        self._update_reading()

    # reading

    def _feed(self, data: memoryview) -> None:
        self._feeding = True
        last_arrival_ns = self._last_arrival_ns
        try:
            while True:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as exc:
                    data = data[exc.args[0] :]
                    self._decline_upgrade()
        except httptools.HttpParserCallbackError as exc:
            if self._refusal is None:
                log.error("the parser's callbacks failed", exc_info=exc)
                self._refusal = 500, "internal error"
            self._refuse(*self._refusal)
        except httptools.HttpParserError as exc:
            self._refuse(400, f"malformed HTTP request: {exc}")
        self._feeding = False
        phase = self._phase
        if phase == _HEAD:
            if not self._head_is_new:
                self._head_fed += len(data)
            elif self._last_arrival_ns == last_arrival_ns:
                self._head_fed = len(data)
            else:  # behind the end of another message: how much of this read is the head's is not known
                self._head_fed = 0
            self._head_is_new = False
            head_bytes = max(self._head_fed, self._header_bytes + len(self._url))
            if head_bytes > self._limits.header_bytes or self._header_count > self._limits.header_count:
                self._refuse(431, self._head_fault(head_bytes))
            else:
                self._arm(phase, self._limits.header_timeout_s)
        elif phase == _BODY:
            if not self._chunked:
                self._fill()
            self._arm(phase, self._limits.body_timeout_s)
        if self._exchanges:
            if self._exchanges[0]._answer is not None or self._exchanges[0]._pieces is not None:
                self._flush()
            if self._backlog or len(self._exchanges) >= self._limits.pipelined_requests:
                self._update_reading()

    def _fill(self) -> None:
        """Have the rest of the body read to where it stays: no parsing, no copy."""
        # numpy, since bytearray would write the zeros first.
        self._buffer = memoryview(np.empty(self._content_bytes, np.uint8))  # type: ignore[arg-type]  # an ndarray is a buffer
        self._filled = 0
        for piece in self._body:
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
        self._body = []
        self._parser = httptools.HttpRequestParser(self)  # the old one waits for this body
        self._phase = _FILLING

    def _decline_upgrade(self) -> None:
        """Parse the head again as if it had not offered another protocol (RFC 9110, section 7.8); its body comes next."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        lines = [exchange.method + b" " + self._url + b" HTTP/1.1"]
        lines += (name + b": " + value for name, value in exchange.headers.items() if name not in _UPGRADE_FIELDS)
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    # the parser's calls

    def on_message_begin(self) -> None:
        if self._phase == _DEAF:
            return
        self._phase = _HEAD
        self._url = b""
        self._headers = {}
        self._header_count = self._header_bytes = 0
        self._head_is_new = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        self._header_bytes += len(name) + len(value)
        if self._phase != _HEAD:  # a trailer: counted, and nothing here has a use for it
            if self._header_count > self._limits.header_count or self._header_bytes > self._limits.header_bytes:
                self._stop(431, "the trailers of the request are too large")
            return
        name = name.lower()
        value = value.rstrip()  # llhttp leaves it (RFC 9112, section 5: it is no part of the value)
        headers = self._headers
        headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        if self._phase == _DEAF:
            return
        limits, headers = self._limits, self._headers
        if self._header_count > limits.header_count or self._header_bytes + len(self._url) > limits.header_bytes:
            self._stop(431, self._head_fault(self._header_bytes + len(self._url)))
        parser = self._parser
        method = parser.get_method()
        if method == b"CONNECT":
            self._stop(501, "CONNECT is not offered: this is no proxy")
        target = self._url
        if not target.startswith(b"/"):
            target = _origin_form(target)
        keep_alive = parser.should_keep_alive()
        exchange = self._exchange = Exchange(self, method, target, headers, keep_alive)
        if (b"connection" in headers or not keep_alive) and parser.get_http_version() == "1.0":
            exchange._http_1_0 = True
        self._phase = _BODY
        self._body = []
        self._body_bytes = 0
        self._chunked = b"transfer-encoding" in headers
        length = headers.get(b"content-length")
        self._content_bytes = 0 if length is None else int(length)
        if self._content_bytes > limits.body_bytes:
            self._stop(413, self._body_fault(self._content_bytes))
        if b"upgrade" in headers and parser.should_upgrade():
            self._upgrading = True
        elif b"expect" in headers:
            self._expect(headers[b"expect"])
        if self._deadline is not None:
            self._disarm()  # the head's time is over, the body's begins with the next read

    def _expect(self, expectation: bytes) -> None:
        if expectation.lower() != b"100-continue":
            self._stop(417, f"expectation {expectation.decode('latin-1')!r} cannot be met, only 100-continue")
        if self._content_bytes or self._chunked:
            if self._exchanges or self._backlog:
                self._continue_due = True  # it must not come before the answers to earlier requests
            else:
                self._transport.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            self._stop(413, self._body_fault(self._body_bytes))
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._phase == _DEAF:
            return
        if self._upgrading:
            self._upgrading = False  # its body is still to come: see _decline_upgrade
            return
        pieces = self._body
        self._complete(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _stop(self, status: int, message: str) -> None:
        """Leave the parser from within one of its callbacks."""
        self._refusal = status, message
        raise _Stopped

    def _complete(self, body: Buffer) -> None:
        exchange = self._exchange
        assert exchange is not None
        if self._deadline is not None:
            self._disarm()
        exchange.body = body
        exchange.arrival_ns = self._last_arrival_ns = time.monotonic_ns()
        self._exchange = None
        self._body = []
        self._buffer = memoryview(b"")
        self._continue_due = False
        self._phase = _IDLE
        if not exchange._keep_alive:
            self._phase = _DEAF  # its last, by its own word
        if self._backlog or self._write_paused or len(self._exchanges) >= self._limits.pipelined_requests:
            self._backlog.append(exchange)
        else:
            self._exchanges.append(exchange)
            self._handle(exchange)

    # handling

    def _handle(self, exchange: Exchange) -> None:
        if b"content-encoding" in exchange.headers and exchange.headers[b"content-encoding"] != b"identity":
            self._inflate(exchange)
            return
        try:
            self._server.handler(exchange)
        except BaseException:
            self.handler_failed(exchange)

    def handler_failed(self, exchange: Exchange) -> None:
        """The handler broke its contract: the client still gets its one answer, the operator the trace."""
        log.exception("%s %s failed", exchange.method, exchange.path)
        if exchange._pieces is not None and exchange._pieces.written:
            self._cut_short()
            return
        exchange._pieces = None  # of which nothing has left
        if exchange._answer is None and not exchange._compressing:
            exchange.respond(500, error_body("internal error"))

    def _inflate(self, exchange: Exchange) -> None:
        encoding = exchange.headers[b"content-encoding"].strip().lower().removeprefix(b"x-")
        if encoding not in _WINDOW_BITS:
            message = f"unsupported Content-Encoding {encoding.decode('latin-1')!r}, expected gzip or deflate"
            exchange.respond(501, error_body(message), headers=b"Accept-Encoding: gzip, deflate\r\n")
            return
        work = partial(inflate, encoding, exchange.body, self._limits.body_bytes)
        if len(exchange.body) <= _INFLATE_INLINE_BYTES:
            self._inflated(exchange, work)
        else:
            self._loop.run_in_executor(None, work).add_done_callback(lambda done: self._inflated(exchange, done.result))

    def _inflated(self, exchange: Exchange, result: Callable[[], bytes]) -> None:
        try:
            exchange.body = result()
        except GatewayError as exc:
            exchange.respond(STATUS[exc.code], error_body(exc.message))
            return
        except BaseException:  # no memory for it, say
            self.handler_failed(exchange)
            return
        if exchange._connection is not None:
            del exchange.headers[b"content-encoding"]
            self._handle(exchange)

    def _pump(self) -> None:
        """Give the handler what waits in the backlog, as far as it may."""
        if self._pumping:
            return  # an answer within a handler's call: the loop below goes on after it
        self._pumping = True
        backlog, exchanges = self._backlog, self._exchanges
        while backlog and not self._write_paused and len(exchanges) < self._limits.pipelined_requests:
            exchange = backlog.popleft()
            exchanges.append(exchange)
            if exchange._fault is None:
                self._handle(exchange)
            else:
                status, message = exchange._fault
                exchange.respond(status, error_body(message))
        self._pumping = False

    # answering

    def take(
        self, exchange: Exchange, status: int, body: Buffer | Sequence[Buffer], content_type: bytes, headers: bytes
    ) -> None:
        """Take the one answer to an exchange (called by it)."""
        if exchange._answer is not None or exchange._compressing or exchange._pieces is not None:
            raise RuntimeError(f"{exchange!r} was answered before")
        if isinstance(body, _ONE_BUFFER):
            parts: Sequence[Buffer] = (body,)
            length = len(body)
        else:
            parts = body
            length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        if length >= _DEFLATE_FROM_BYTES and status == 200:
            encoding = exchange.encoding
            if encoding:
                headers += b"Content-Encoding: " + encoding + b"\r\n"
                work = partial(deflate, encoding, parts)
                exchange._compressing = True
                if length > _DEFLATE_INLINE_BYTES:
                    self._loop.run_in_executor(None, work).add_done_callback(
                        lambda done: self._deflated(exchange, status, content_type, headers, done.result)
                    )
                else:
                    self._deflated(exchange, status, content_type, headers, work)
                return
        exchange._answer = status, content_type, headers, parts, length
        if self._exchanges[0] is exchange and (not self._feeding or length > _JOIN_BYTES):
            self._flush()

    def _deflated(
        self, exchange: Exchange, status: int, content_type: bytes, headers: bytes, result: Callable[[], bytes]
    ) -> None:
        try:
            body = result()
        except BaseException:
            log.exception("the answer to %s %s could not be compressed", exchange.method, exchange.path)
            status, content_type, headers, body = 500, JSON, b"", error_body("internal error")
        exchange._compressing = False
        exchange._answer = status, content_type, headers, (body,), len(body)
        if exchange._connection is not None and self._exchanges[0] is exchange and not self._feeding:
            self._flush()

    def _flush(self) -> None:
        """Write the answers whose turn it is."""
        exchanges = self._exchanges
        limit = self._limits.requests_per_connection
        out: list[Buffer] = []
        last = False
        while not last and exchanges and (answer := exchanges[0]._answer) is not None:
            exchange = exchanges.popleft()
            status, content_type, headers, parts, length = answer
            self._answered_requests += 1
            last = not exchange._keep_alive
            # Of what is on its way already nothing is dropped: the connection ends with the last answer to it.
            if (self._server.draining or limit) and self._ends_soon() and self._is_last():
                last = True
            if last:
                headers += b"Connection: close\r\n"
            elif exchange._http_1_0:  # such a client keeps the connection only if it is told so
                headers += b"Connection: keep-alive\r\n"
            head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
                status, _REASONS.get(status, b""), content_type, length, headers,
            )  # fmt: skip
            out.append(head)
            if exchange.method != b"HEAD":
                out += parts
            if length > _JOIN_BYTES:
                self._write(out)
                out = []
        if out:
            self._write(out)
        if last:
            self._end()
            return
        if self._backlog:
            self._pump()
        if not self._reading:
            self._update_reading()
        if self._continue_due and not exchanges and not self._backlog:
            self._continue_due = False
            self._transport.write(_CONTINUE)
        if exchanges and (pieces := exchanges[0]._pieces) is not None and pieces.held:
            held, pieces.held = pieces.held, []
            self._write_pieces(exchanges[0], pieces, held)
            if not self.unsent:
                self._drained()

    @property
    def unsent(self) -> int:
        """Bytes that the transport holds for the client."""
        return self._transport.get_write_buffer_size()

    def take_piece(self, exchange: Exchange, piece: Buffer) -> None:
        """Take a piece of an answer (called by its exchange)."""
        pieces = exchange._pieces
        if pieces is None:
            raise RuntimeError(f"{exchange!r} has no answer in pieces that goes on")
        if self._exchanges[0] is exchange and not self._feeding and not pieces.held:
            self._write_pieces(exchange, pieces, [piece])
        else:
            pieces.held.append(piece)

    def finish(self, exchange: Exchange) -> None:
        """Take the end of an answer in pieces (called by its exchange)."""
        pieces, exchange._pieces = exchange._pieces, None
        if pieces is None:
            raise RuntimeError(f"{exchange!r} has no answer in pieces that goes on")
        if not pieces.written:  # all of it is here: an answer like others, of known length
            exchange._answer = pieces.status, pieces.content_type, pieces.headers, pieces.held, sum(map(len, pieces.held))
            if self._exchanges[0] is exchange and not self._feeding:
                self._flush()
            return
        exchange._answer = pieces.status, pieces.content_type, pieces.headers, (), 0
        self._write_pieces(exchange, pieces, pieces.held, end=True)
        self._exchanges.popleft()
        self._hold_unsent(_WRITE_HIGH_BYTES, 0)
        if pieces.last or (self._ends_soon() and self._is_last()):
            self._leave()  # what an old client has asked for behind an answer that ends with the connection
            self._end()
        else:
            self._flush()

    def _write_pieces(self, exchange: Exchange, pieces: _InPieces, more: list[Buffer], *, end: bool = False) -> None:
        """Write pieces whose turn it is, behind the head if it is not written; end: they are the last."""
        chunked = not exchange._http_1_0
        out: list[Buffer] = []
        if not pieces.written:
            pieces.written = True
            self._hold_unsent(0, _KERNEL_UNSENT_BYTES)
            self._answered_requests += 1
            pieces.last = not exchange._keep_alive or not chunked or (self._ends_soon() and self._is_last(besides=1))
            headers = pieces.headers
            if chunked:
                headers += b"Transfer-Encoding: chunked\r\n"
            if pieces.last:
                headers += b"Connection: close\r\n"
                self._phase = _DEAF
                self._disarm()
            head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\n%b\r\n" % (
                pieces.status, _REASONS.get(pieces.status, b""), pieces.content_type, headers,
            )  # fmt: skip
            out.append(head)
        if exchange.method != b"HEAD":
            for piece in more:
                out += (b"%x\r\n" % len(piece), piece, b"\r\n") if chunked else (piece,)
            if end and chunked:
                out.append(_LAST_CHUNK)
        if out:
            self._write(out)

    def _hold_unsent(self, here_bytes: int, kernel_bytes: int) -> None:
        """How many bytes wait for the client before the writing pauses: here, and, not yet on their way, in the kernel (0: its
        socket buffer)."""
        transport = self._transport
        if transport.is_closing():
            return
        transport.set_write_buffer_limits(high=here_bytes)
        if (sock := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):  # it has just ended
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, kernel_bytes)

    def _drained(self) -> None:
        """Tell who writes an answer in pieces, if it is such a one's turn, that all of it has left."""
        exchange = self._exchanges[0] if self._exchanges else None
        if exchange is None or exchange._pieces is None or not exchange._pieces.written or exchange.on_drained is None:
            return
        try:
            exchange.on_drained()
        except BaseException:
            self.handler_failed(exchange)

    def _cut_short(self) -> None:
        """End an answer that has begun, and the connection: without the last chunk, which tells the client."""
        self._phase = _DEAF
        self._disarm()
        self._transport.close()
        self._leave()

    def _write(self, out: list[Buffer]) -> None:
        if self._write_paused:
            self._added_bytes += sum(map(len, out))
        if len(out) == 2 and len(out[1]) <= _JOIN_BYTES:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(_coalesce(out))

    def _ends_soon(self) -> bool:
        """Whether the connection is to end with its last answer."""
        limit = self._limits.requests_per_connection
        return self._server.draining or 0 < limit <= self._answered_requests

    def _is_last(self, besides: int = 0) -> bool:
        """Whether no request, besides so many, is in flight or, as far as is known, on its way."""
        return not self._feeding and len(self._exchanges) == besides and not self._backlog and self._phase in (_IDLE, _DEAF)

    # ending

    def _body_fault(self, body_bytes: int) -> str:
        most = self._limits.body_bytes
        return f"request body of {body_bytes} bytes or more: expected at most {most} bytes (server.limits.body_bytes)"

    def _head_fault(self, head_bytes: int) -> str:
        limits = self._limits
        return (
            f"request head of {self._header_count} fields and {head_bytes} bytes: expected at most {limits.header_count} "
            f"fields (server.limits.header_count) and {limits.header_bytes} bytes (server.limits.header_bytes)"
        )

    def _refuse(self, status: int, message: str) -> None:
        """Answer a fault of the stream after all that came before it, and read no more."""
        if self._phase == _DEAF:
            return
        self._disarm()
        self._phase = _DEAF
        self._exchange = None
        self._buffer = memoryview(b"")
        fault = Exchange(self, b"", b"", {}, keep_alive=False)
        fault._fault = status, message
        self._backlog.append(fault)
        self._pump()

    def _end(self) -> None:
        """Close after the last answer: stop talking, listen a moment, close."""
        self._phase = _DEAF
        self._disarm()
        if not self._transport.is_closing():
            self._transport.write_eof()
            self._update_reading()
            self._deadline = self._loop.call_later(_LINGER_S, self._transport.close)

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""
        if self._is_last():
            self._transport.close()

    def cut_off(self) -> None:
        """Answer what is in flight, what waits and what is being read with an error, then close."""
        if self._is_last():
            self._transport.close()
            return
        fault = 503, "the server is shutting down"
        for exchange in self._backlog:
            exchange._fault = exchange._fault or fault
        if self._phase in (_HEAD, _BODY, _FILLING):
            self._refuse(*fault)
        else:
            self._phase = _DEAF
        if self._exchanges and (pieces := self._exchanges[0]._pieces) is not None and pieces.written:
            self._cut_short()
            return
        open_ = [exchange for exchange in self._exchanges if exchange._answer is None and not exchange._compressing]
        for exchange in open_:
            exchange._pieces = None  # of which nothing has left, nor may, when the answers before it do
        for exchange in open_:
            exchange.respond(fault[0], error_body(fault[1]))
            exchange._connection = None  # an answer that comes yet finds nobody
            _give_up(exchange)

    def abort(self) -> None:
        """Cut the connection off."""
        self._transport.abort()

    def _update_reading(self) -> None:
        wanted = not self._write_paused and not self._backlog and len(self._exchanges) < self._limits.pipelined_requests
        if wanted is not self._reading and not self._transport.is_closing():
            self._reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # time

    def _watch_writing(self, unsent_bytes: int | None = None) -> None:
        """Cut off a client that has taken nothing of its answers for body_timeout_s."""
        now_unsent = self.unsent
        if unsent_bytes is not None and now_unsent >= unsent_bytes + self._added_bytes:
            self.abort()
        else:
            self._added_bytes = 0
            self._stall_timer = self._loop.call_later(self._limits.body_timeout_s, self._watch_writing, now_unsent)

    def _arm(self, phase: int, timeout_s: float) -> None:
        """Bound the time of a head, or of a body, from now; a second call within the same changes nothing."""
        if self._deadline is None or self._timed_phase != phase:
            self._disarm()
            self._timed_phase = phase
            self._deadline = self._loop.call_later(timeout_s, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if not self._reading:  # we were the slow ones
            self._arm(self._timed_phase, self._limits.body_timeout_s)
            return
        what, limit, key = (
            ("head", self._limits.header_timeout_s, "header_timeout_s")
            if self._timed_phase == _HEAD
            else ("body", self._limits.body_timeout_s, "body_timeout_s")
        )
        self._refuse(408, f"the {what} of the request did not arrive within {limit:g} s (server.limits.{key})")

    def _check_idle(self) -> None:
        """Close if nothing happened for idle_timeout_s, else look again when that may be so. (No timer per request.)"""
        wait_s = self._limits.idle_timeout_s
        if self._phase == _IDLE and not self._exchanges and not self._backlog:
            wait_s -= (time.monotonic_ns() - self._last_arrival_ns) / 1e9
            if wait_s <= 0.001:  # uvloop's timers have whole milliseconds
                self._transport.close()
                return
            wait_s = max(wait_s, 0.001)
        self._idle_timer = self._loop.call_later(wait_s, self._check_idle)


def _give_up(exchange: Exchange) -> None:
    """Tell who answers it that nobody waits any more; others must hear of it whatever that raises."""
    if exchange.on_disconnect is not None:
        try:
            exchange.on_disconnect()
        except BaseException:
            log.exception("%s %s could not be given up", exchange.method, exchange.path)


class _Stopped(Exception):
    """Leaves the parser; the reason stands in the connection."""


def _origin_form(target: bytes) -> bytes:
    """The path of an absolute-form target (RFC 9112, section 3.2.2)."""
    _, separator, rest = target.partition(b"://")
    if not separator:
        return target
    slash = rest.find(b"/")
    return rest[slash:] if slash >= 0 else b"/"


def choose_encoding(accepted: bytes) -> bytes:
    """The best of gzip and deflate by an Accept-Encoding header; b"" for neither. gzip wins a tie."""
    if accepted == b"gzip" or accepted == b"deflate":
        return accepted
    weights: dict[bytes, float] = {}
    for item in accepted.lower().split(b","):
        name, *parameters = item.split(b";")
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition(b"=")
            if key.strip() == b"q":
                try:
                    weight = float(value)
                except ValueError:
                    weight = 0.0
        weights[name.strip()] = weight
    anything = weights.get(b"*", 0.0)
    best, best_weight = b"", 0.0
    for encoding in (b"gzip", b"deflate"):
        weight = weights.get(encoding, anything)
        if weight > best_weight:
            best, best_weight = encoding, weight
    return best if best_weight >= weights.get(b"identity", 0.0) else b""


def inflate(encoding: bytes, body: Buffer, most_bytes: int) -> bytes:
    """Decompress at most most_bytes. deflate: with zlib's header, as the standard says, or without, as some clients do.

    Raises: TooLarge, InvalidArgument.
    """
    name = encoding.decode()
    bits = _WINDOW_BITS[encoding]
    if encoding == b"deflate" and not _has_zlib_header(body):
        bits = -15
    out: list[bytes] = []
    left = most_bytes + 1
    rest: Buffer = body
    try:
        while True:
            member = zlib.decompressobj(bits)
            piece = member.decompress(rest, left)
            out.append(piece)
            left -= len(piece)
            if left <= 0:
                raise TooLarge(f"decompressed request body: expected at most {most_bytes} bytes (server.limits.body_bytes)")
            if not member.eof:
                raise InvalidArgument(f"the request body ends within its {name} data")
            rest = member.unused_data
            if not rest:
                return out[0] if len(out) == 1 else b"".join(out)
            if encoding != b"gzip":  # only gzip may have several members
                raise InvalidArgument(f"{len(rest)} bytes follow the {name} data of the request body")
    except zlib.error as exc:
        raise InvalidArgument(f"the request body is no valid {name} data: {exc}") from exc


def _has_zlib_header(body: Buffer) -> bool:
    """RFC 1950, section 2.2: method 8, and the first two bytes are a multiple of 31."""
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def deflate(encoding: bytes, parts: Sequence[Buffer]) -> bytes:
    """Compress a body for the wire: speed over ratio."""
    compressor = zlib.compressobj(_DEFLATE_LEVEL, wbits=_WINDOW_BITS[encoding])
    return b"".join([*(compressor.compress(part) for part in parts), compressor.flush()])


def _coalesce(parts: Sequence[Buffer]) -> list[Buffer]:
    """Join neighbours that are small, so that large ones are written without a copy and small ones in few writes."""
    out: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) <= _JOIN_BYTES:
            small.append(part)
        else:
            out += (b"".join(small), part)
            small = []
    if small:
        out.append(b"".join(small))
    return out
