"""The server's side of an HTTP/1.1 connection, without I/O: bytes in; requests to a handler, and bytes, out.

Theory of operation
-------------------
A `RequestReader` makes requests of the bytes that come; each becomes an `Exchange`. The handler gets as many at once as
`_has_room` says; what was read beyond them waits in a backlog, and reading pauses meanwhile. What takes long is done in turns
of some milliseconds (`go_on`), so that other connections are served in between. Answers may come in any order; they are written
in the order of the requests. A fault in the stream (bad syntax, a limit, a timeout) becomes one last exchange with its error,
so that the requests before it still get their answers; then the connection is ended.

An answer may come in pieces (`Exchange.begin`): each is written when it is there, as a chunk; HTTP/1.0 knows none, there the
end of the connection ends the answer. Until its turn comes, what was written is held. Meanwhile, and while the outlet holds a
byte of it, `Exchange.backlog` is true: the writer waits for `on_drained`. The outlet is asked to tell of every byte
(`Outlet.tell_of_every_byte`) while such an answer is being written.

Whoever owns the socket feeds `receive` and `filled`, writes what the `Outlet` gets, and keeps the time: what a client may take
for a head or a body is told by `reader.phase`, and ended by `refuse`.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from gateway.config import Limits
from gateway.errors import NotReady, shutting_down
from gateway.wire.coding import inflate_body, is_coded
from gateway.wire.exchange import Exchange, Handler, OnFault, Pieces, Run
from gateway.wire.http1_bounds import SHORT_BODY_BYTES, BoundedHttp1Connection, Outlet
from gateway.wire.http_errors import FAULTS, STATUS, error_body
from gateway.wire.known_heads import KnownHeads
from gateway.wire.memory import FREE_BYTES, NO_MEMORY, Memory
from gateway.wire.origins import Origins
from gateway.wire.requests import BODY, DEAF, FILLING, HEAD, IDLE, PHASES, RequestReader
from gateway.wire.tensors import Buffer

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_WRITE_NOW_BYTES: Final = 64 << 10  # an answer of more does not wait for those of the same read
_TURN_NS: Final = 1_000_000  # and the request that it is used up with
_SHUTTING_DOWN: Final = "the server is shutting down"
_AGAIN: Final = b"Retry-After: 1\r\n"

log = logging.getLogger(__name__)


class Http1Connection(BoundedHttp1Connection):
    """One connection: see the module's theory of operation.

    draining: set when the server is to end: the last answer closes the connection. last_arrival_ns: of a request, by `clock`.
    """

    __slots__ = (
        "_answered_requests", "_clock", "_continue_due", "_gathering", "_handler", "_on_fault", "_path", "_query", "_recycled",
        "_target", "_turn_began_ns", "draining", "last_arrival_ns",
    )  # fmt: skip

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        outlet: Outlet,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        memory: Memory | None = None,
        heads: KnownHeads | None = None,
        origins: Origins | None = None,
        on_fault: OnFault = lambda exchange, error: None,
    ) -> None:
        """handler: called with each whole request; it answers through the exchange, at once or later. heads, origins: of the
        listener. memory: of the process. on_fault: told of each answer that is an error of the stream's."""
        super().__init__(limits, outlet, memory)
        self.reader = RequestReader(self, limits, heads, origins)
        self.draining = False
        self.last_arrival_ns = clock()
        self._handler = handler
        self._on_fault = on_fault
        self._clock = clock
        self._gathering = False  # small answers wait until all that came is read, then leave in one write
        self._turn_began_ns = 0  # 0: with the first request that is read
        self._continue_due = False
        self._answered_requests = 0
        self._recycled = limits.requests_per_connection > 0
        self._target = self._path = self._query = b""  # of the last request

    def __repr__(self) -> str:
        return f"<Http1Connection {PHASES[self.reader.phase]}: {len(self._exchanges)} open, {len(self._backlog)} waiting>"

    @property
    def idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self._is_last()

    @property
    def between_requests(self) -> bool:
        """Whether the client is to send the next request."""
        return self.reader.phase == IDLE and not self._exchanges and not self._backlog and not self._unread

    # what comes

    def receive(self, data: memoryview, spent_ns: int = 0) -> None:
        """Take bytes that the client sent; they are the caller's again when this returns.

        spent_ns: of this turn, by others: but for its first, their requests wait for another where it is used up.
        """
        if self._unread:  # although reading is paused
            self._unread += data
            return
        if spent_ns:
            self._turn_began_ns = self._clock() - spent_ns
        self._gathering = True
        feed = self.reader.feed
        at = feed(data)
        while at < len(data):
            if self._backlog or self._turn_is_over():
                self._unread += data[at:]
                break
            at += feed(data[at:])
        self._gathering = False
        exchanges = self._exchanges
        if exchanges and (exchanges[0].head is not None or exchanges[0].pieces is not None):
            self._flush()
        much = len(exchanges) > 1 or self.held_bytes > self._little_bytes or self._congested
        if self._backlog or self._unread or (much and not self._has_room()):
            self._settle()
        self._turn_began_ns = 0

    def filled(self, size: int) -> None:
        """So many bytes that the client sent were written to `reader.buffer`."""
        self.reader.filled(size)
        if self._backlog or (self._exchanges and not self._has_room()):
            self._settle()
        self._turn_began_ns = 0

    def go_on(self) -> None:
        """Take another turn, which was asked for by `Outlet.call_again`."""
        self._called = False
        self._turn_began_ns = self._clock()
        backlog = self._backlog
        while backlog and self._has_room() and not self._turn_is_over():
            self._gathering = True
            while backlog and self._has_room() and not self._turn_is_over():
                self._begin(backlog.popleft())
            self._gathering = False
            self._flush()
        if self._unread and not backlog and self._has_room() and not self._turn_is_over():
            data, self._unread = self._unread, bytearray()
            self.receive(memoryview(data))
        self._settle()
        self._turn_began_ns = 0

    def resume_writing(self) -> None:
        """Little does any more; or nothing, where every byte is to be told of."""
        self._congested = False
        self._account.paid()
        self._drained()
        self._settle()

    def refuse(self, status: int, message: str) -> None:
        """Answer a fault of the stream after all that came before it, and read no more."""
        self.reader.refuse(status, message)

    def cut_off(self) -> None:
        """Answer what is in flight, what waits and what is being read with an error, then close."""
        if self._is_last():
            self._outlet.close()
            return
        fault = 503, _SHUTTING_DOWN
        for exchange in self._backlog:
            exchange.fault = exchange.fault or fault
        if self._unread or self.reader.phase in (HEAD, BODY, FILLING):
            self.refuse(*fault)
        else:
            self.reader.stop()
        if self._exchanges and (pieces := self._exchanges[0].pieces) is not None and pieces.written:
            self._cut_short()
            return
        open_ = [exchange for exchange in self._exchanges if not exchange.answered]
        for exchange in open_:
            exchange.pieces = None  # of which nothing has left, nor may, when the answers before it do
        for exchange in open_:
            if is_coded(exchange):  # and is being inflated: no handler has it
                self._refuse(exchange, *fault)
            else:
                _answer_left(exchange)
            exchange.connection = None  # an answer that comes yet finds nobody
            _give_up(exchange)

    def lost(self) -> None:
        """The client is gone, or was cut off. Nothing may be called any more."""
        self._account.close()
        self.reader.close()
        self._leave()
        del self._outlet  # it refers to this connection: free both now, not when the collector comes by

    # the reader's calls

    def arrived(
        self, method: bytes, target: bytes, headers: Mapping[bytes, bytes], body: Buffer, keep_alive: bool, http_1_0: bool
    ) -> None:
        self.last_arrival_ns = now_ns = self._clock()
        if target is not self._target:  # which the reader gives again while it is the same
            self._target = target
            self._path, _, self._query = target.partition(b"?")
        size = len(body)
        exchange = Exchange(
            self, method, self._path, self._query, headers, body, keep_alive=keep_alive, arrival_ns=now_ns, http_1_0=http_1_0,
            held_bytes=size,
        )  # fmt: skip
        self._continue_due = False
        if not self._turn_began_ns:
            self._turn_began_ns = now_ns
        exchanges = self._exchanges
        long = size > SHORT_BODY_BYTES or b"content-encoding" in headers
        # Alone and short, as most are, it costs no look at what is bounded.
        if (
            self._backlog
            or ((exchanges or self._congested) and (now_ns - self._turn_began_ns >= _TURN_NS or not self._has_room()))
            or (long and not self._outlet.may_take_long())
        ):
            self._backlog.append(exchange)
        elif long:
            self._begin(exchange)
        else:
            exchanges.append(exchange)
            self.held_bytes += size
            try:
                self._handler(exchange)
            except BaseException:
                self.failed(exchange)

    def continue_expected(self) -> None:
        if self._exchanges or self._backlog:
            self._continue_due = True  # it must not come before the answers to earlier requests
        else:
            self._outlet.write([_CONTINUE])

    def refused(self, status: int, message: str, headers: Mapping[bytes, bytes]) -> None:
        fault = Exchange(self, b"", b"", b"", headers, b"", keep_alive=False, arrival_ns=self._clock(), fault=(status, message))
        self._unread.clear()
        if self._backlog or not self._has_room():
            self._backlog.append(fault)
        else:
            self._begin(fault)

    # handling

    def _begin(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)
        exchange.held_bytes = size = len(exchange.body)
        self.held_bytes += size
        if exchange.fault is not None:
            self._refuse(exchange, *exchange.fault)
        elif b"content-encoding" in exchange.headers and is_coded(exchange):
            self._hold(exchange, self._limits.body_bytes)  # so much it may become
            inflate_body(exchange, self._limits.body_bytes, self._outlet.run, self._inflated, self._refuse)
        else:
            self._handle(exchange)

    def _inflated(self, exchange: Exchange) -> None:
        self._hold(exchange, len(exchange.body))
        if self._account.ask(self.held()):
            self._handle(exchange)
        else:
            self._refuse(exchange, 503, NO_MEMORY)

    def _refuse(self, exchange: Exchange, status: int, message: str, headers: bytes = b"") -> None:
        """Answer what the handler does not get."""
        if exchange.connection is not None:
            exchange.respond(status, error_body(message), headers=_AGAIN if status == 503 else headers)
            self._on_fault(exchange, NotReady(message) if message == _SHUTTING_DOWN else FAULTS[status](message))

    def _handle(self, exchange: Exchange) -> None:
        try:
            self._handler(exchange)
        except BaseException:
            self.failed(exchange)

    def failed(self, exchange: Exchange) -> None:
        """The handler broke its contract: the client still gets its one answer, the operator the trace."""
        log.exception("%s %s failed", exchange.method, exchange.path)
        if exchange.pieces is not None and exchange.pieces.written:
            self._cut_short()
            return
        exchange.pieces = None  # of which nothing has left
        if not exchange.answered:
            self._refuse(exchange, 500, "internal error")

    # answering

    @property
    def run(self) -> Run:
        return self._outlet.run

    @property
    def unsent(self) -> int:
        return self._outlet.unsent

    def answered(self, exchange: Exchange) -> None:
        exchanges = self._exchanges
        if exchanges[0] is exchange and (not self._gathering or exchange.length > _WRITE_NOW_BYTES):
            if len(exchanges) > 1 or exchange.length > _WRITE_NOW_BYTES or not self._write_alone(exchange):
                self._flush()
        else:
            exchange.body = b""  # what it has asked is over, though its answer waits
            self._hold(exchange, exchange.length)
            if exchange.length > FREE_BYTES:
                self._account.owe(self.held())

    def _write_alone(self, exchange: Exchange) -> bool:
        """Write a short answer with none behind it: as `_flush` does, at a third of the price. False: it is not so simple."""
        plain = exchange.keep_alive and not exchange.http_1_0 and exchange.method != b"HEAD"
        if not plain or self.draining or self._recycled or self._continue_due or exchange.head is None:
            return False
        self._exchanges.popleft()
        self.held_bytes -= exchange.held_bytes
        self._answered_requests += 1
        self._outlet.write_short(b"".join((exchange.head, b"\r\n", *exchange.parts)))
        if not self._reading:
            self._settle()
        return True

    def _flush(self) -> None:
        """Write the answers whose turn it is."""
        exchanges = self._exchanges
        limit = self._limits.requests_per_connection
        out: list[Buffer] = []
        last = False
        while not last and exchanges and (head := exchanges[0].head) is not None:
            exchange = exchanges.popleft()
            self.held_bytes -= exchange.held_bytes
            self._answered_requests += 1
            last = not exchange.keep_alive
            # Of what is on its way already nothing is dropped: the connection ends with the last answer to it.
            if (self.draining or limit) and self._ends_soon() and self._is_last():
                last = True
            if last:
                head += b"Connection: close\r\n"
            elif exchange.http_1_0:  # such a client keeps the connection only if it is told so
                head += b"Connection: keep-alive\r\n"
            out.append(head + b"\r\n")
            if exchange.method != b"HEAD":
                out += exchange.parts
            if exchange.length > _WRITE_NOW_BYTES:
                self._write_large(out, exchange.length)
                out = []
        if out:
            self._outlet.write(out)
        if last:
            self._end()
            return
        if not self._reading:
            self._settle()
        if self._continue_due and not exchanges and not self._backlog:
            self._continue_due = False
            self._outlet.write([_CONTINUE])
        if exchanges and (pieces := exchanges[0].pieces) is not None and pieces.held:
            self._write_pieces(exchanges[0], pieces)
            if not self.unsent:
                self._drained()

    def piece_added(self, exchange: Exchange, pieces: Pieces) -> None:
        if self._exchanges[0] is exchange and not self._gathering:
            self._write_pieces(exchange, pieces)
        else:
            self._hold(exchange, exchange.held_bytes + len(pieces.held[-1]))

    def last_piece_added(self, exchange: Exchange, pieces: Pieces) -> None:
        self._write_pieces(exchange, pieces, end=True)
        self._exchanges.popleft()
        self.held_bytes -= exchange.held_bytes
        self._outlet.tell_of_every_byte(False)
        if pieces.last or (self._ends_soon() and self._is_last()):
            self._leave()  # what an old client has asked for behind an answer that ends with the connection
            self._end()
        else:
            self._flush()

    def _write_pieces(self, exchange: Exchange, pieces: Pieces, *, end: bool = False) -> None:
        """Write what there is of an answer in pieces, whose turn it is. end: nothing comes behind it."""
        if not pieces.written:
            self._outlet.tell_of_every_byte(True)
            self._answered_requests += 1
            pieces.last = not exchange.keep_alive or exchange.http_1_0 or (self._ends_soon() and self._is_last(besides=1))
            if pieces.last:
                self.reader.stop()
        if out := pieces.take(end=end):
            self._outlet.write(out)
        if exchange.held_bytes != len(exchange.body):  # pieces that waited for their turn
            self._hold(exchange, len(exchange.body))

    def _drained(self) -> None:
        """Tell who writes an answer in pieces, if it is such a one's turn, that all of it has left."""
        exchange = self._exchanges[0] if self._exchanges else None
        if exchange is None or exchange.pieces is None or not exchange.pieces.written or exchange.on_drained is None:
            return
        try:
            exchange.on_drained()
        except BaseException:
            self.failed(exchange)

    # ending

    def _cut_short(self) -> None:
        """End an answer that has begun, and the connection: without the last chunk, which tells the client."""
        self.reader.stop()
        self._outlet.close()
        self._leave()

    def _end(self) -> None:
        """The last answer is written."""
        self.reader.stop()
        self._unread.clear()
        self._outlet.end()
        self._settle()

    def _leave(self) -> None:
        """Tell those who answer that nobody waits any more."""
        waiting = [exchange for exchange in self._exchanges if exchange.head is None]
        for exchange in (*self._exchanges, *self._backlog):
            exchange.connection = None
        self._exchanges.clear()
        self._backlog.clear()
        self._unread.clear()
        self.held_bytes = 0
        for exchange in waiting:
            _give_up(exchange)

    def _ends_soon(self) -> bool:
        """Whether the connection is to end with its last answer."""
        limit = self._limits.requests_per_connection
        return self.draining or 0 < limit <= self._answered_requests

    def _is_last(self, besides: int = 0) -> bool:
        """Whether no request, besides so many, is in flight or, as far as is known, on its way."""
        busy = self._gathering or self._backlog or self._unread or len(self._exchanges) != besides
        return not busy and self.reader.phase in (IDLE, DEAF)

    # turns

    def _turn_is_over(self) -> bool:
        """Whether others must be let in between: no connection holds the loop for long."""
        now_ns = self._clock()
        if not self._turn_began_ns:
            self._turn_began_ns = now_ns
        return now_ns - self._turn_began_ns >= _TURN_NS


def _answer_left(exchange: Exchange) -> None:
    error = shutting_down(ran=exchange.ran)
    exchange.respond(STATUS[error.code], error_body(error.words), headers=b"" if exchange.ran else _AGAIN)


def _give_up(exchange: Exchange) -> None:
    """Tell who answers it that nobody waits any more; others must hear of it whatever that raises."""
    if exchange.on_disconnect is not None:
        try:
            exchange.on_disconnect()
        except BaseException:
            log.exception("%s %s could not be given up", exchange.method, exchange.path)
