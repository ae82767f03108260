"""What one HTTP/1.1 connection may make the gateway hold: the half of it that decides about room.

Beside its own bounds it has a part in the memory of the process (`wire.memory`).
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from gateway.config import Limits
from gateway.wire.compression import Outcome, Work
from gateway.wire.exchange import Exchange
from gateway.wire.memory import NO_MEMORY, Memory
from gateway.wire.requests import RequestReader
from gateway.wire.tensors import Buffer

SHORT_BODY_BYTES: Final = 16 << 10  # a body of no more is handled at once, whoever else waits


class Outlet(Protocol):
    """Where a connection's bytes go, and what it asks of who owns the socket."""

    @property
    def unsent(self) -> int:
        """Bytes that were written and wait for the client."""

    def write(self, parts: list[Buffer]) -> None:
        """Send bytes; the buffers do not change any more."""

    def write_short(self, data: bytes) -> None:
        """As `write`, of what is short."""

    def tell_of_every_byte(self, wanted: bool) -> None:
        """Call `resume_writing` each time that nothing waits for the client any more; or only behind much that did."""

    def pause_reading(self) -> None:
        """Give no more bytes until `resume_reading`."""

    def resume_reading(self) -> None:
        """Give bytes again."""

    def may_take_long(self) -> bool:
        """Whether what may take milliseconds can be done now; if not, `call_again`."""

    def call_again(self) -> None:
        """Call `go_on` soon, once others had their turn."""

    def end(self) -> None:
        """Nothing more is written: let the client read its answers, then close."""

    def close(self) -> None:
        """Close once what was written has left."""

    def abort(self) -> None:
        """Close at once, whatever waits to be sent."""

    def run(self, work: Work, done: Callable[[Outcome], None]) -> None:
        """Do work that takes long where it holds nobody up, then give done its outcome."""


class BoundedHttp1Connection(ABC):
    """reader: of its requests. held_bytes: of the requests that the handler has, and of answers that wait for their turn."""

    __slots__ = (
        "_account", "_backlog", "_called", "_congested", "_exchanges", "_large_bytes", "_limits", "_little_bytes", "_outlet",
        "_reading", "_unread", "held_bytes", "reader",
    )  # fmt: skip

    reader: RequestReader

    def __init__(self, limits: Limits, outlet: Outlet, memory: Memory | None) -> None:
        """memory: of the process."""
        self._account = (memory or Memory()).open(self)
        self._limits = limits
        self._outlet = outlet
        self._exchanges: deque[Exchange] = deque()  # with the handler, or answered behind one that is not
        self._backlog: deque[Exchange] = deque()  # read, and not yet given to the handler
        self._unread = bytearray()  # what came and is not yet read
        self._reading = True
        self._called = False
        self._congested = False
        self.held_bytes = 0  # see _hold
        # One request of no more bytes leaves room for another; negative: none does.
        self._little_bytes = min(SHORT_BODY_BYTES, limits.body_bytes - 1) if limits.pipelined_requests > 1 else -1
        self._large_bytes = 0  # of long answers that were written since nothing waited for the client

    @property
    def reading(self) -> bool:
        """Whether more bytes are wanted now."""
        return self._reading

    def _has_room(self) -> bool:
        """Whether the handler may get one request more: all that a connection may make us hold is decided here."""
        if not self._exchanges:
            return not self._congested
        limits = self._limits
        few = len(self._exchanges) < limits.pipelined_requests and self.held_bytes < limits.body_bytes
        return few and not self._congested and (self.held_bytes <= self._account.granted or self._account.ask(self.held()))

    def pause_writing(self) -> None:
        """Much waits for the client."""
        self._congested = True
        self._account.owe(self.held())
        self._settle()

    def _hold(self, exchange: Exchange, size: int) -> None:
        """Count what an exchange makes us hold: its body, or its answer that waits."""
        more = size - exchange.held_bytes
        self.held_bytes += more
        exchange.held_bytes = size
        if more < 0 and not self._reading:
            self._settle()

    def _write_large(self, parts: list[Buffer], size: int) -> None:
        """Write buffers that are held until their last byte has left."""
        outlet = self._outlet
        if not outlet.unsent:
            self._large_bytes = 0
        outlet.write(parts)
        self._large_bytes += size
        if outlet.unsent:
            self._account.owe(self.held())

    def _settle(self) -> None:
        """Go on with what waits, in another turn; or read on; or wait for an answer, or for the client to take some."""
        waiting = bool(self._backlog or self._unread)
        room = self._has_room()
        if waiting and room and not self._called:
            self._called = True
            self._outlet.call_again()
        wanted = room and not waiting
        if wanted is not self._reading:
            self._reading = wanted
            if wanted:
                self._outlet.resume_reading()
            else:
                self._outlet.pause_reading()

    @abstractmethod
    def refuse(self, status: int, message: str) -> None:
        """Answer a fault of the stream after all that came before it, and read no more."""

    # of the process's memory

    def may_hold(self, body_bytes: int) -> bool:
        """Whether there is memory for so much of the body that is being read."""
        return self._account.ask(self._held_besides() + body_bytes)

    def held(self) -> int:
        """Bytes that clients make this connection hold; heads, which are short, are not counted."""
        return self._held_besides() + self.reader.body_bytes

    def unfinished(self) -> int:
        return self.reader.body_bytes

    def unread(self) -> int:
        unsent = self._outlet.unsent
        return max(unsent, self._large_bytes) if unsent else 0

    def give_way(self) -> None:
        self.refuse(503, NO_MEMORY)

    def cut(self) -> None:
        self._outlet.abort()

    def _held_besides(self) -> int:
        """Without the body that is being read."""
        in_pieces = sum(exchange.pieces.held_behind for exchange in self._exchanges if exchange.pieces is not None)
        return self.held_bytes + in_pieces + len(self._unread) + self.unread()
