"""The HTTP/1.1 listener: sockets and clock for `wire.http1`. It knows nothing of models.

Closing is done as RFC 9112, section 9.6, asks: end our side, go on reading for a moment, then close, so that bytes the
client has sent meanwhile do not reset the connection before it has read its answer.

The end of the client's stream counts as the client's going away: nothing tells a half-close from a close, and a caller
that gave up is common where half-closing ones are rare (nginx and Go decide alike). Its waiting exchanges are told by
`on_disconnect`.

While an answer in pieces is being written, the transport's write limits are zero, so that it tells of every byte; and the
kernel takes few bytes beyond those on their way, not the megabytes of its socket buffer, which would also hide for long that a
slow client takes some.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, cast

from gateway.config import Limits
from gateway.edges.long_turns import SHORT_READ_BYTES, LongTurns, is_gone, run_beside
from gateway.process import ports
from gateway.process.forks import descriptor_of, end_for_forks, keep_from_forks
from gateway.process.machine import files
from gateway.wire.compression import Outcome, Work
from gateway.wire.exchange import Handler, OnFault
from gateway.wire.http1 import Http1Connection
from gateway.wire.known_heads import KnownHeads
from gateway.wire.memory import Memory
from gateway.wire.origins import Origins
from gateway.wire.requests import DEAF, HEAD, IDLE
from gateway.wire.tensors import Buffer

if TYPE_CHECKING:
    from gateway.process.certificates import Certificates

BACKLOG: Final = 2048
_READ_BYTES: Final = 256 << 10
_READ_BODY_BYTES: Final = 1 << 20  # at once, of a body that goes to its place as it is read: a millisecond's worth
_WRITE_HIGH_BYTES: Final = 1 << 20  # above asyncio's 64 KiB, so that one usual tensor does not stop the reading
_KERNEL_UNSENT_BYTES: Final = 16 << 10  # of an answer in pieces: 36 KB are then taken at a time, not 1.4 MB (2026-11-22)
_JOIN_BYTES: Final = 64 << 10  # up to here one copy is cheaper than one more write
_LINGER_S: Final = 1.0
_REFUSED_AT_ONCE: Final = 256  # connections above the limit that are being told so
_KEPT_FILES: Final = 64
_DRAIN_IDLE_S: Final = 1.0
_LAST_WORDS_S: Final = 0.5
_STALL_LOOKS: Final = 4  # in body_timeout_s: whoever stops reading is cut off after that and at most a quarter


def last_words_s(timeout_s: float) -> float:
    """How much of a drain's time is for telling those who could not be answered."""
    return min(_LAST_WORDS_S, timeout_s / 4)


async def listen(
    connect: Callable[[], asyncio.BaseProtocol], host: str, port: int, *, reuse_port: bool, bound: Sequence[socket.socket]
) -> list[asyncio.Server]:
    """Take connections: of these sockets, if there are any, else of the host's. At least one. Raises: OSError.

    uvloop would look up the host in a thread of libuv's pool, and a fork of a process that has that pool crashes as it ends.
    """
    loop = asyncio.get_running_loop()
    sockets = bound or ports.bind(host, port, shared=reuse_port)
    servers: list[asyncio.Server] = []
    try:
        for each in sockets:
            servers.append(await loop.create_server(connect, sock=each, backlog=BACKLOG))
    except OSError:
        for server in servers:
            server.close()
        for each in sockets[len(servers) :]:
            each.close()
        raise
    return servers


def no_room(limits: Limits, connections: int, descriptor: int) -> str:
    """Why a new connection is to be refused; empty: it is not. connections: others of the listener.

    Where no more files can be opened, the event loop closes what it accepts, and tells nobody.
    """
    if connections >= limits.connections:
        return f"the server has its {limits.connections} connections already (server.limits.connections)"
    most = files()
    if descriptor >= most - _kept(most):
        return f"the server has nearly as many files open as it may, which are {most} (ulimit -n)"
    return ""


def _kept(most: int) -> int:
    """Of so many files that may be open, those that are for what is no connection, and for refusals."""
    return min(_KEPT_FILES, most // 4)


def listened_on(listeners: Iterable[asyncio.Server]) -> list[int]:
    return [each.fileno() for listener in listeners for each in listener.sockets]


class HttpServer:
    """A listener and its connections. Life: start -> drain. Everything on one event loop."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        memory: Memory | None = None,
        turns: LongTurns | None = None,
        on_fault: OnFault = lambda exchange, error: None,
        origins: Origins | None = None,
    ) -> None:
        """handler: called on the loop with each whole request; it answers through the exchange, at once or later.

        memory: what bounds it beside other listeners of this process. turns: that it shares with them. on_fault: told of each
        answer that is an error and not the handler's. origins: which web pages may ask.
        """
        self.handler = handler
        self.limits = limits
        self.memory = memory or Memory()
        self.turns = turns or LongTurns()
        self.on_fault = on_fault
        self.draining = False
        self.origins = origins or Origins()
        self.heads = KnownHeads()  # that origins lets pass
        self.connections: set[HttpConnection] = set()
        # Reads of all connections land here, one at a time, and are parsed before the next.
        self.scratch = memoryview(bytearray(_READ_BYTES))
        self._listeners: list[asyncio.Server] = []
        self._all_closed = asyncio.Event()
        keep_from_forks(self)

    def descriptors(self) -> list[int]:
        return listened_on(self._listeners) + [connection.descriptor for connection in self.connections]

    def __repr__(self) -> str:
        return f"<HttpServer: {len(self.connections)} connections{', draining' if self.draining else ''}>"

    async def start(
        self,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        certificates: "Certificates | None" = None,
        bound: Sequence[socket.socket] = (),
    ) -> int:
        """Listen. Returns the port: 0 asks for any that is free. reuse_port: others listen there, too. certificates: of TLS;
        None: without. bound: where to listen, in place of host and port. Raises: OSError.
        """
        connect: Callable[[], asyncio.BaseProtocol] = self._connect
        if certificates is not None:
            from gateway.edges.tls import Tls, within
            from gateway.process.certificates import HTTP

            connect = within(Tls(certificates, HTTP, self.limits.header_timeout_s), self._connect, asyncio.get_running_loop())
        self._listeners = await listen(connect, host, port, reuse_port=reuse_port, bound=bound)
        return int(self._listeners[0].sockets[0].getsockname()[1])

    def _connect(self) -> "HttpConnection":
        return HttpConnection(self, asyncio.get_running_loop())

    @property
    def open_connections(self) -> "Collection[HttpConnection]":
        return self.connections

    async def drain(self, timeout_s: float, give_up: Callable[[], None] = lambda: None) -> None:
        """Stop accepting, answer what comes on open connections with `Connection: close`, then close them.

        A connection without a request in flight is closed after one second: until then, a request that is on its way still
        gets its answer. Shortly before timeout_s, give_up is called, to have what the handler has answered now; what then is
        in flight or on its way gets a 503, or a 504 if it may have run. What does not take that until timeout_s is cut off.
        """
        self.draining = True
        for connection in self.connections:
            connection.http.draining = True
        for listener in self._listeners:
            listener.close()
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
    """The socket and the clock of one connection. http: what is said on it."""

    __slots__ = (
        "_deadline", "_idle_timer", "_limits", "_loop", "_lost", "_reader", "_resting", "_server", "_stall_timer", "_timed",
        "_transport", "_written_bytes", "http",
    )  # fmt: skip

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.http = Http1Connection(
            server.handler, server.limits, self, memory=server.memory, heads=server.heads, origins=server.origins,
            on_fault=server.on_fault,
        )  # fmt: skip
        self._reader = self.http.reader
        self._server = server
        self._limits = server.limits
        self._loop = loop
        self._transport: asyncio.Transport
        self._written_bytes = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._lost = False
        self._resting = False  # reads nothing until its turn
        self._timed = (0, False)  # which head or body the deadline is of

    def __repr__(self) -> str:
        return f"<HttpConnection {self.http!r}>"

    # the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Both loops give one that reads and writes; uvloop's is no subclass of asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        server = self._server
        self.http.draining = server.draining
        server.connections.add(self)
        if why := no_room(self._limits, len(server.connections) - 1, self.descriptor):
            self.http.refuse(503, why)
            excess = len(server.connections) - self._limits.connections
            if excess > _REFUSED_AT_ONCE or (most := files()) - self.descriptor <= _kept(most) // 4:
                transport.abort()
        else:
            self._idle_timer = self._loop.call_later(self._limits.idle_timeout_s, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        end_for_forks(self._transport)
        for handle in (self._deadline, self._idle_timer, self._stall_timer):
            if handle is not None:
                handle.cancel()
        self._deadline = self._idle_timer = self._stall_timer = None
        self._lost = True
        self._server.closed(self)
        self.http.lost()

    def eof_received(self) -> None:
        """The client is gone: returning None makes the transport write what it holds and close."""

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._reader.buffer
        return self._server.scratch if buffer is None else buffer[:_READ_BODY_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        http = self.http
        reader = http.reader
        if nbytes <= SHORT_READ_BYTES and reader.buffer is None:
            filled = False
            http.receive(self._server.scratch[:nbytes])
        else:
            filled = self._take_long(nbytes)
        if filled:
            self._rest()
        if reader.phase != IDLE or self._deadline is not None:
            self._time_request()

    def _take_long(self, nbytes: int) -> bool:
        """Take what may cost much of this turn's time. Whether more is likely to be there."""
        http, turns = self.http, self._server.turns
        buffer, spent_ns = http.reader.buffer, turns.spent_ns
        turns.begin()
        try:
            if buffer is None:
                http.receive(self._server.scratch[:nbytes], spent_ns)
                return nbytes == _READ_BYTES
            http.filled(nbytes)
            return nbytes == min(len(buffer), _READ_BODY_BYTES)
        finally:
            turns.end()

    def _rest(self) -> None:
        """Let others have their turn: a transport that finds its buffer filled reads on at once, uvloop 32 times."""
        if not self._resting:
            self.pause_reading()
            self._resting = True
            self._server.turns.wait(self._rested)

    def _rested(self) -> None:
        self._resting = False
        if not self._lost and is_gone(self._transport):  # what it asked for nobody waits for
            self._transport.abort()
        elif self.http.reading:
            self.resume_reading()

    def pause_writing(self) -> None:
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self.http.resume_writing()

    @property
    def descriptor(self) -> int:
        return descriptor_of(self._transport)

    # the connection's calls

    @property
    def unsent(self) -> int:
        """Bytes that the transport holds for the client."""
        return self._transport.get_write_buffer_size()

    def write(self, parts: list[Buffer]) -> None:
        if len(parts) == 2 and len(parts[1]) <= _JOIN_BYTES:
            self.write_short(b"".join(parts))
            return
        self._written_bytes += sum(map(len, parts))
        self._transport.writelines(_coalesce(parts))
        if self._stall_timer is None:
            self._watch_writing()

    def write_short(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self._transport.write(data)
        if self._stall_timer is None:
            self._watch_writing()

    def tell_of_every_byte(self, wanted: bool) -> None:
        transport = self._transport
        if transport.is_closing():
            return
        transport.set_write_buffer_limits(high=0 if wanted else _WRITE_HIGH_BYTES)
        if (sock := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):  # it has just ended
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _KERNEL_UNSENT_BYTES if wanted else 0)

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._resting and not self._transport.is_closing():
            self._transport.resume_reading()

    def may_take_long(self) -> bool:
        return self._server.turns.may_begin()

    def call_again(self) -> None:
        self._server.turns.wait(self._go_on)

    def _go_on(self) -> None:
        if self._lost:
            return
        if is_gone(self._transport):
            self._transport.abort()
            return
        self.http.go_on()
        self._time_request()

    def end(self) -> None:
        """Stop talking, listen a moment, close."""
        self._disarm()
        if not self._transport.is_closing():
            self._transport.write_eof()
            self._deadline = self._loop.call_later(_LINGER_S, self._transport.close)

    def close(self) -> None:
        self._disarm()
        self._transport.close()

    def run(self, work: Work, done: Callable[[Outcome], None]) -> None:
        run_beside(work, done)

    def abort(self) -> None:
        """Cut the connection off."""
        self._transport.abort()

    # the server's calls

    def close_if_idle(self) -> None:
        """Close unless a request is being read or answered."""
        if self.http.idle:
            self._transport.close()

    def cut_off(self) -> None:
        """Answer what is in flight, what waits and what is being read with an error, then close."""
        self.http.cut_off()

    def asked(self, since_s: float) -> bool:
        http = self.http
        return http.last_arrival_ns >= since_s * 1e9 or not http.idle

    def leave(self) -> None:
        self.http.draining = True  # with its next answer, or the one that is on its way

    # time

    def _time_request(self) -> None:
        """Bound the time of the head, or of the body, that is being read, from its first bytes on."""
        reader = self.http.reader
        phase = reader.phase
        if phase == DEAF:
            return  # the deadline is the end's
        timed = reader.requests, phase == HEAD
        if self._deadline is not None:
            if timed == self._timed and phase != IDLE:
                return
            self._disarm()
        if phase != IDLE:
            self._timed = timed
            self._arm(self._limits.header_timeout_s if phase == HEAD else self._limits.body_timeout_s)

    def _arm(self, timeout_s: float) -> None:
        self._deadline = self._loop.call_later(timeout_s, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        http, limits = self.http, self._limits
        phase = http.reader.phase
        if phase in (IDLE, DEAF):
            return
        if not http.reading:  # we were the slow ones
            self._arm(limits.body_timeout_s)
            return
        what, limit, key = (
            ("head", limits.header_timeout_s, "header_timeout_s")
            if phase == HEAD
            else ("body", limits.body_timeout_s, "body_timeout_s")
        )
        http.refuse(408, f"the {what} of the request did not arrive within {limit:g} s (server.limits.{key})")

    def _watch_writing(self, looks: int = _STALL_LOOKS) -> None:
        """Look whether the client takes any of its answers. (No timer per answer.) looks: so many that see nothing are left."""
        taken_bytes = self._written_bytes - self.unsent
        after_s = self._limits.body_timeout_s / _STALL_LOOKS
        self._stall_timer = self._loop.call_later(after_s, self._check_writing, taken_bytes, looks)

    def _check_writing(self, taken_bytes: int, looks: int) -> None:
        """Cut off a client that has taken nothing for body_timeout_s of what waits for it."""
        self._stall_timer = None
        if unsent := self.unsent:
            looks = looks - 1 if self._written_bytes - unsent == taken_bytes else _STALL_LOOKS
            if looks:
                self._watch_writing(looks)
            else:
                self.abort()

    def _check_idle(self) -> None:
        """Close if nothing happened for idle_timeout_s, else look again when that may be so. (No timer per request.)"""
        wait_s = self._limits.idle_timeout_s
        if self.http.between_requests:
            wait_s -= (time.monotonic_ns() - self.http.last_arrival_ns) / 1e9
            if wait_s <= 0.001:  # uvloop's timers have whole milliseconds
                self._transport.close()
                return
            wait_s = max(wait_s, 0.001)
        self._idle_timer = self._loop.call_later(wait_s, self._check_idle)


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
