"""What a client can make one HTTP/2 connection of a server hold: bodies, what they inflate to, answers, long headers.

Bodies are bounded by the connection's window: it is as wide as may be held, and opens when that is let go. Beside these bounds
the connection has a part in the memory of the process (`wire.memory`). Section numbers are those of RFC 9113.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from gateway.errors import GatewayError, Overloaded
from gateway.wire.http2 import FRAME_BYTES, Connection
from gateway.wire.http2_frames import ENHANCE_YOUR_CALM, MOST_WINDOW, PREFACE, window_update
from gateway.wire.http2_sending import Stream
from gateway.wire.memory import Memory

# Of a connection, in messages of the longest kind: bodies of open requests, and as much of answers that wait for the client.
MESSAGES_HELD: Final = 2
_AT_ONCE: Final = 4 << 20  # bytes of answers given to the transport before it has a say
_COPIES: Final = 3  # of a message while it is served: as it came, as protobuf holds it, and its tensors
_LOOK_EACH: Final = 64 << 10  # received until the process is asked whether more may be held


OnFault = Callable[[Stream, GatewayError], None]
"""Told of what is answered with an error, or reset, and no handler gets."""


class Bounds(Protocol):
    """What one client may ask for."""

    @property
    def header_bytes(self) -> int:
        """Of a request."""

    @property
    def body_bytes(self) -> int:
        """Of a message; a stream's window is as wide."""

    @property
    def header_timeout_s(self) -> float:
        """Until the connection is HTTP/2."""

    @property
    def body_timeout_s(self) -> float:
        """For the next part of a body, or until a client takes something of what it asked for."""

    @property
    def idle_timeout_s(self) -> float:
        """Without a request; and until a client with requests that says nothing is asked whether it is there."""


class _Reservation(NamedTuple):
    """What a stream waits for. again: called when to ask once more."""

    size: int
    again: Callable[[], None]


class BoundedHttp2Connection(Connection):
    """A server's side, as far as it is about what is held."""

    def __init__(self, bounds: Bounds, wake: Callable[[], None], memory: Memory | None, on_fault: OnFault) -> None:
        """memory: of the process."""
        super().__init__(wake, expected=PREFACE, header_bytes=bounds.header_bytes)
        self._account = (memory or Memory()).open(self)
        self._bounds = bounds
        self._on_fault = on_fault
        self._streams: dict[int, Stream] = {}
        # A whole message of the longest kind fits into a stream's window: unary calls need no credit.
        self._receive_window = min(MOST_WINDOW, bounds.body_bytes + FRAME_BYTES)
        held = min(MOST_WINDOW, MESSAGES_HELD * self._receive_window)
        self._most_received = self._receive_left = held
        self._released = 0
        self._credit_after = held // 4
        self._look_below = held - _LOOK_EACH  # bytes of the window, and the process is asked again
        # beyond that, of what came compressed, and of long messages of streams
        self._reserved = 0
        self._reserved_for: dict[Stream, int] = {}
        self._kept = 0  # of that, what is not only reserved, and long headers
        self._kept_for: dict[Stream, int] = {}
        self._most_reserved = held
        self._reserving: dict[Stream, _Reservation] = {}  # who waits for it, in order
        self._calling = False
        # of answers
        self.room = self.room_each = _AT_ONCE
        self.most_unsent = held
        self._unread = 0  # with the shell

    def lost(self) -> None:
        self._account.close()
        self._reserving.clear()
        self._reserved_for.clear()
        self._kept_for.clear()
        super().lost()

    def _give_up(self, stream: Stream, code: int) -> None:
        receiver = stream.receiver
        stream.reset(code)
        receiver.reset()

    # bodies

    def release(self, size: int) -> None:
        self._released += size
        if self._released >= self._credit_after or (self._receive_left < FRAME_BYTES and self._released):
            self.write(window_update(0, self._released))
            self._receive_left += self._released
            self._released = 0
            self._look_below = max(FRAME_BYTES, self._receive_left - _LOOK_EACH)

    def _look_at_room(self, stream: Stream) -> None:
        """Each time that so much has come: whether it may be held. If not, this stream's request goes, unless it is whole."""
        if self._receive_left < FRAME_BYTES:
            self._make_room()
        if not self._account.ask(self.held()) and not stream.ended and stream.number in self._streams:
            self._refuse(stream)
        self._look_below = max(FRAME_BYTES, self._receive_left - _LOOK_EACH)

    def _make_room(self) -> None:
        """The window is as good as closed. If no request in it is whole, none ever could be: the youngest goes."""
        self.release(0)
        holding = [stream for stream in self._streams.values() if stream.receive_window < self._receive_window]
        if self._receive_left < FRAME_BYTES and holding and not any(stream.ended for stream in holding):
            self._give_up(holding[-1], ENHANCE_YOUR_CALM)
            self._on_fault(holding[-1], Overloaded(f"{len(holding)} bodies fill their connection's window, and none is whole"))

    # what is held besides

    def reserve(self, stream: Stream, size: int, again: Callable[[], None]) -> bool:
        if self._reserved and self._reserved + size > self._most_reserved:
            self._reserving[stream] = _Reservation(size, again)
            return False
        self._reserved += size
        self._reserved_for[stream] = self._reserved_for.get(stream, 0) + size
        return True

    def settle(self, stream: Stream, reserved: int, size: int) -> bool:
        self._unreserve(stream, reserved - size)
        self._keep(stream, size)
        return self._account.ask(self.held())

    def give_back(self, stream: Stream, size: int) -> None:
        if kept := self._kept_for.pop(stream, 0):
            left = max(0, kept - size)
            self._kept -= kept - left
            if left:
                self._kept_for[stream] = left
        self._unreserve(stream, size)

    def _hold_headers(self, stream: Stream, size: int) -> None:
        """Of a new request, which has long ones."""
        self._reserved += size
        self._reserved_for[stream] = size
        self._keep(stream, size)
        self._account.ask(self.held())  # in vain, too: they are within the bounds of a connection

    def _unhold(self, stream: Stream) -> None:
        """It is over."""
        self._reserving.pop(stream, None)
        if stream in self._reserved_for:
            self.give_back(stream, self._reserved_for[stream])

    def _keep(self, stream: Stream, size: int) -> None:
        self._kept += size
        self._kept_for[stream] = self._kept_for.get(stream, 0) + size

    def _unreserve(self, stream: Stream, size: int) -> None:
        has = self._reserved_for.get(stream, 0)
        size = min(size, has)  # it may be over
        if size < has:
            self._reserved_for[stream] = has - size
        else:
            self._reserved_for.pop(stream, None)
        self._reserved -= size
        if self._calling:  # from within what is called here
            return
        self._calling = True
        try:
            while self._reserving:
                waiting, wanted = next(iter(self._reserving.items()))
                if self._reserved and self._reserved + wanted.size > self._most_reserved:
                    break
                del self._reserving[waiting]
                wanted.again()
        finally:
            self._calling = False

    # answers

    def blocked(self, stream: Stream, *, moved: bool, by_itself: bool) -> None:
        super().blocked(stream, moved=moved, by_itself=by_itself)
        self._account.owe(self._received() + self.unsent + self._unread)

    def unblocked(self, stream: Stream) -> None:
        super().unblocked(stream)
        if not self.unsent and not self._unread:
            self._account.paid()

    def overflowed(self, stream: Stream) -> None:
        self._give_up(stream, ENHANCE_YOUR_CALM)

    def pause(self, unread: int = 0) -> None:
        super().pause()
        self._unread = unread
        self._account.owe(self.held())

    def resume(self) -> None:
        self._unread = 0
        if not self.unsent:
            self._account.paid()
        super().resume()

    # of the process's memory

    def held(self) -> int:
        """Bytes that the client makes this connection hold; of headers, the long ones."""
        return self._received() + self.unread()

    def unread(self) -> int:
        waiting = self.unsent and sum(stream.held_to_send for stream in self._blocked)
        return waiting + self._unread

    def _received(self) -> int:
        return _COPIES * (self._most_received - self._receive_left - self._released + self._kept)

    def unfinished(self) -> int:
        return sum(self._receive_window - stream.receive_window for stream in self._streams.values() if not stream.ended)

    def give_way(self) -> None:
        reading = [stream for stream in self._streams.values() if not stream.ended]
        if reading:
            self._refuse(min(reading, key=lambda stream: stream.receive_window))

    def _refuse(self, stream: Stream) -> None:
        """There is no memory for the rest of a request."""
        stream.receiver.crowded()

    def cut(self) -> None:
        self.aborted = True
        self.write(b"")  # the shell is to look
