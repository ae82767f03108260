"""An HTTP/2 connection of the gRPC listener: the shell that has transport and clock; `wire.http2_server` does the rest.

Everything is synchronous on the event loop: a read calls handlers, handlers write, and what was written in one turn of the loop
leaves in one piece. A connection whose peer does not read is itself read no further, so that nothing piles up that it could
make us answer.
"""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final, cast

from gateway.config import Limits
from gateway.edges.long_turns import SHORT_READ_BYTES, LongTurns, is_gone
from gateway.errors import Overloaded
from gateway.process.forks import descriptor_of, end_for_forks
from gateway.wire.http2_bounds import OnFault
from gateway.wire.http2_sending import Stream
from gateway.wire.http2_server import ServerConnection
from gateway.wire.memory import Memory

_WRITE_PIECE: Final = 1 << 16  # longer bodies are handed to the transport as they are, not joined
_STALL_LOOKS: Final = 4  # in body_timeout_s: whoever stops reading is cut off after that and at most a quarter
_FULL_READ_BYTES: Final = 128 << 10  # there is more behind it, and uvloop would read 32 times before others have their turn


class Http2Connection(asyncio.Protocol):
    """One connection. on_stream gets each new request; on_closed is called once, at the end."""

    def __init__(
        self,
        limits: Limits,
        on_stream: Callable[[Stream], None],
        on_closed: "Callable[[Http2Connection], None]",
        *,
        no_room: Callable[[int], str] = lambda descriptor: "",
        memory: Memory | None = None,
        turns: LongTurns | None = None,
        on_fault: OnFault = lambda stream, error: None,
    ) -> None:
        """no_room: gets its descriptor: why it is cut as soon as it is made; empty: it is not. memory: of the process.

        turns: of all. on_fault: see the core.
        """
        self._loop = asyncio.get_running_loop()
        self._body_timeout_s = limits.body_timeout_s
        self._on_closed = on_closed
        self._no_room = no_room
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = inf  # when it is due
        self._write_timer: asyncio.TimerHandle | None = None  # runs while the client takes nothing of what it asked for
        self._turns = turns or LongTurns()
        self._held = b""  # came, and waits for its turn
        self._begun = 0  # the last stream, when that was asked last
        self._core = ServerConnection(limits, on_stream, self._wake, self._loop.time, memory, on_fault)

    def __repr__(self) -> str:
        return f"<Http2Connection: {self._core!r}>"

    @property
    def descriptor(self) -> int:
        return descriptor_of(self._transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        if why := self._no_room(self.descriptor):
            self._core.refuse(Overloaded(why))
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            end_for_forks(transport)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        try:
            self._core.lost()
        finally:
            self._on_closed(self)

    def data_received(self, data: bytes) -> None:
        core, turns = self._core, self._turns
        if len(data) <= SHORT_READ_BYTES:
            core.receive(data)
            self._flush()
        elif turns.may_begin():
            turns.begin()
            try:
                core.receive(data)
                self._flush()
            finally:
                turns.end()
        else:
            self._held += data
        more = core.more or self._held or len(data) >= _FULL_READ_BYTES
        if more and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            turns.wait(self._read_on)

    def _read_on(self) -> None:
        core, transport = self._core, self._transport
        if transport is None or core.write_paused:
            return
        if is_gone(transport):  # what it asked for nobody waits for
            transport.abort()
        elif core.more or self._held:
            data, self._held = self._held, b""
            core.receive(data)
            self._flush()
            self._turns.wait(self._read_on)
        elif not transport.is_closing():
            transport.resume_reading()

    def pause_writing(self) -> None:
        if self._transport is not None:
            unread = self._transport.get_write_buffer_size()
            self._core.pause(unread)
            self._transport.pause_reading()
            self._watch_writing(unread + 1)

    def _watch_writing(self, unread_before: int, looks: int = _STALL_LOOKS) -> None:
        """Cut the connection when its client has taken nothing for as long as it may. looks: so many that see it are left."""
        if self._transport is None:
            return
        unread = self._transport.get_write_buffer_size()
        looks = looks - 1 if unread >= unread_before else _STALL_LOOKS
        if looks:
            after_s = self._body_timeout_s / _STALL_LOOKS
            self._write_timer = self._loop.call_later(after_s, self._watch_writing, unread, looks)
        else:
            self._transport.abort()

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._core.resume()
        self._read_on()

    # of the server

    def announce_drain(self) -> None:
        """Ask for no new streams; those already under way are still taken."""
        self._core.announce_drain()

    def drain(self) -> None:
        """Take no new streams; close once those that are open have ended."""
        self._core.drain()

    def cut_off(self) -> None:
        """End every stream with an answer now, whatever it waits for."""
        self._core.cut_off()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def asked(self, since_s: float) -> bool:
        """Since it was called last."""
        begun, self._begun = self._begun, self._core.last_stream
        return begun != self._begun or self._core.busy

    def leave(self) -> None:
        self._core.leave()

    # of the core

    def _wake(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        core, transport = self._core, self._transport
        if transport is None:
            return
        out = core.take()
        if out:
            if max(map(len, out)) > _WRITE_PIECE:
                transport.writelines(out)
            else:
                transport.write(b"".join(out))
        if core.ready and core.room:
            core.send_on()
        if core.aborted:
            transport.abort()
        elif core.closing and not core.out:
            transport.close()
        elif core.next_due < self._timer_s:
            self._arm(core.next_due)

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = self._loop.call_at(due_s, self._expire)

    def _expire(self) -> None:
        self._timer_s = inf
        self._core.expire()
        self._flush()
