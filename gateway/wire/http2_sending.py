"""What is sent on an HTTP/2 connection: bodies as the other side's windows let them, and what waits for that.

Section numbers are those of RFC 9113.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.wire.http2_frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_HEAD,
    GOAWAY,
    HEADERS,
    MOST_WINDOW,
    WORD,
    Broken,
    frame_head,
    reset,
    window_update,
)
from gateway.wire.http2_headers import Headers
from gateway.wire.http2_receiver import NOBODY, Receiver
from gateway.wire.tensors import Buffer

UNLIMITED: Final = 1 << 62


class Stream:
    """One request and its answer. The handler sets the receiver when it gets the stream. headers: names in lower case."""

    __slots__ = (
        "_connection", "_granted", "_outbox", "_trailers", "ended", "headers", "number", "receive_window", "receiver",
    )  # fmt: skip

    def __init__(self, connection: "Sender", number: int, headers: Headers, receive_window: int) -> None:
        self._connection = connection
        self._granted = 0  # by the other side, beyond its initial window
        self._outbox: deque[memoryview] | None = None  # most bodies never wait
        self._trailers: bytes | None = None  # behind what waits; empty: nothing but the end
        self.number = number
        self.receive_window = receive_window
        self.ended = False  # by the other side
        self.headers = headers
        self.receiver: Receiver = NOBODY

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        return sum(map(len, self._outbox or ()))

    @property
    def held_to_send(self) -> int:
        """Bytes that are held for those: a message is, until all of it has left."""
        return sum(memoryview(part.obj).nbytes for part in self._outbox or ())

    @property
    def backlog(self) -> bool:
        """Whether something that was sent still waits for the other side. Who finds that is told when it has left."""
        if self._outbox:
            return True
        connection = self._connection
        if connection.write_paused:
            connection.told_when_drained[self] = None
            return True
        return False

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Send a header block. end: it is the whole answer. A block is sent in one frame: keep it below 16 KiB."""
        flags = END_HEADERS | END_STREAM if end else END_HEADERS
        connection = self._connection
        if connection.block_prefix:
            block = connection.block_prefix + block
            connection.block_prefix = b""
        connection.write(frame_head(len(block), HEADERS, flags, self.number) + block)
        if end:
            connection.sent_all(self)

    def send_data(self, data: bytes) -> None:
        """Send bytes of a body, as the other side's windows let them."""
        size = len(data)
        connection = self._connection
        if self._try_take_room(size):
            connection.write(frame_head(size, DATA, 0, self.number))
            connection.write(data)
        elif connection.unsent and connection.unsent + size > connection.most_unsent:
            connection.overflowed(self)
        else:
            if self._outbox is None:
                self._outbox = deque()
            self._outbox.append(memoryview(data))
            connection.unsent += size
            self.pump()

    def _try_take_room(self, size: int) -> bool:
        """Whether so many bytes may leave in one frame now, before which nothing waits; then they are to."""
        connection = self._connection
        if (
            self._outbox
            or size > connection.send_window
            or size > connection.peer_frame_bytes
            or size > connection.initial_window + self._granted
            or size > connection.room
        ):
            return False
        self._granted -= size
        connection.send_window -= size
        connection.room -= size
        return True

    def try_send_whole(self, block: bytes, data: bytes, trailers: bytes) -> bool:
        """Send a whole answer: header block, body and trailers, if it can leave at once; else nothing."""
        connection, number, size = self._connection, self.number, len(data)
        if connection.block_prefix or not self._try_take_room(size):
            return False
        pack = FRAME_HEAD.pack
        connection.write(
            b"".join(
                (
                    pack(len(block) >> 8, len(block) & 0xFF, HEADERS, END_HEADERS, number), block,
                    pack(size >> 8, size & 0xFF, DATA, 0, number), data,
                    pack(len(trailers) >> 8, len(trailers) & 0xFF, HEADERS, END_HEADERS | END_STREAM, number), trailers,
                )
            )
        )  # fmt: skip
        connection.sent_all(self)
        return True

    def send_parts(self, parts: list[Buffer]) -> None:
        """Send bytes of a body that belong together and do not change any more; they are not copied before they can leave."""
        size = sum(map(len, parts))
        connection = self._connection
        if connection.unsent and connection.unsent + size > connection.most_unsent:
            connection.overflowed(self)
            return
        if self._outbox is None:
            self._outbox = deque()
        self._outbox.extend(memoryview(part) for part in parts if len(part))
        connection.unsent += size
        self.pump()

    def finish(self, trailers: bytes) -> None:
        """End the body with a header block, once it has left."""
        if self._outbox:
            self._trailers = trailers
        else:
            self.send_headers(trailers, end=True)

    def end(self) -> None:
        """End the body without trailers, once it has left."""
        self._trailers = b""
        if not self._outbox:
            self.pump()

    def widen(self, size: int) -> bool:
        """Take a WINDOW_UPDATE; returns whether something waits for it. Raises: Broken."""
        self._granted += size
        if self._connection.initial_window + self._granted > MOST_WINDOW:
            raise Broken(FLOW_CONTROL_ERROR, f"the window of stream {self.number} is too large")
        return bool(self._outbox)

    def pump(self) -> None:
        """Send on, when a window may have opened (called by the connection)."""
        connection = self._connection
        outbox = self._outbox
        moved = False
        while outbox:
            head = outbox[0]
            own = connection.initial_window + self._granted
            size = min(len(head), own, connection.send_window, connection.peer_frame_bytes, connection.room)
            if size <= 0 and len(head):
                connection.blocked(self, moved=moved, by_itself=own <= 0)
                return
            moved = True
            self._granted -= size
            connection.send_window -= size
            connection.room -= size
            connection.unsent -= size
            connection.write(frame_head(size, DATA, 0, self.number))
            connection.write(bytes(head[:size]))
            if size == len(head):
                outbox.popleft()
            else:
                outbox[0] = head[size:]
        connection.unblocked(self)
        if self._trailers is None:
            self.receiver.drained()
        elif self._trailers:
            self.send_headers(self._trailers, end=True)
        else:
            connection.write(frame_head(0, DATA, END_STREAM, self.number))
            connection.sent_all(self)

    def credit(self, size: int) -> None:
        """Let the other side send so many bytes more on this stream."""
        self.receive_window += size
        self._connection.release(size)
        if not self.ended and size:
            self._connection.write(window_update(self.number, size))

    def reserve(self, size: int, again: Callable[[], None]) -> bool:
        """Hold so many bytes for this request beyond those that came. False: not yet; again is called when to ask once more."""
        return self._connection.reserve(self, size, again)

    def settle(self, reserved: int, size: int) -> bool:
        """Of what was reserved, so much is held. False: all connections together have no memory for it."""
        return self._connection.settle(self, reserved, size)

    def give_back(self, size: int) -> None:
        """Hold so many less of those reserved."""
        self._connection.give_back(self, size)

    def end_turn(self) -> None:
        """What this request asks for takes long: let others have their turn before what came behind it."""
        self._connection.end_turn()

    def reset(self, code: int) -> None:
        """End the stream on our side."""
        self._connection.write(reset(self.number, code))
        self._connection.forget(self)


class Sender(ABC):
    """The sending side of a connection. ready: streams that can send on once `out` has left; see `send_on`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called once when there is something to take that was written outside of a read."""
        self._wake = wake
        self._woken = False
        self.out: list[bytes] = []
        self._reading = False
        self.write_paused = False
        self.room = UNLIMITED  # bytes of bodies that may be put into `out` before it is taken
        self.room_each = UNLIMITED
        self.unsent = 0  # bytes of bodies that wait for windows or room
        self.most_unsent = UNLIMITED
        self.told_when_drained: dict[Stream, None] = {}
        self.send_window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.peer_frame_bytes = DEFAULT_FRAME_BYTES
        self.block_prefix = b""  # the next header block sent begins with it
        self._table_empty = False  # the other side has been told that our blocks need no table
        self._blocked: dict[Stream, None] = {}  # have something to send, which no window takes
        self._postponed = False  # there is more to begin when something has left
        self.ready: dict[Stream, None] = {}  # of these, those whose own window is open

    def write(self, data: bytes) -> None:
        """Send bytes with what else leaves now."""
        self.out.append(data)
        if not self._reading and not self._woken:
            self._woken = True
            self._wake()

    def take(self) -> list[bytes]:
        """What is to be sent. It is the caller's to send."""
        self._woken = False
        if not self.write_paused:
            self.room = self.room_each
        out, self.out = self.out, []
        return out

    def go_away(self, code: int, text: str, last_stream: int) -> None:
        """6.8."""
        payload = WORD.pack(last_stream) + WORD.pack(code) + text.encode()
        self.write(frame_head(len(payload), GOAWAY, 0, 0) + payload)

    def let_go(self) -> None:
        """There is nobody to send to any more."""
        self._blocked.clear()
        self.ready.clear()
        self.told_when_drained.clear()
        self._wake = lambda: None  # or the shell and this would hold each other until the cyclic collector comes

    def pause(self, unread: int = 0) -> None:
        """The shell can send no more for now. unread: bytes that it holds."""
        self.write_paused = True
        self.room = 0

    def resume(self) -> None:
        """The shell can send again."""
        self.write_paused = False
        self.room = self.room_each
        self.send_on()
        told, self.told_when_drained = self.told_when_drained, {}
        for stream in told:
            stream.receiver.drained()

    def send_on(self) -> None:
        """Send on with the streams that can, each in its turn."""
        ready = self.ready
        while ready and self.send_window > 0 and self.room > 0:
            stream = next(iter(ready))
            del ready[stream]
            stream.pump()

    # called by streams

    def blocked(self, stream: Stream, *, moved: bool, by_itself: bool) -> None:
        """Something waits to be sent. moved: some of it was, before. by_itself: for its own window, not the connection's."""
        self._blocked[stream] = None
        if not by_itself:
            self.ready[stream] = None

    def unblocked(self, stream: Stream) -> None:
        """All it had to send has left, or nobody waits for that."""
        self._blocked.pop(stream, None)
        self.ready.pop(stream, None)
        self.told_when_drained.pop(stream, None)
        self.unsent -= stream.unsent
        stream._outbox = None

    # How much may be held is a server's to say; a client holds what it asked for.

    def overflowed(self, stream: Stream) -> None: ...  # noqa: B027  # more would wait to be sent than may

    def release(self, size: int) -> None: ...  # noqa: B027  # so many bytes that were received are held no longer

    def reserve(self, stream: Stream, size: int, again: Callable[[], None]) -> bool:
        """Of a stream's."""
        return True

    def settle(self, stream: Stream, reserved: int, size: int) -> bool:
        """Likewise."""
        return True

    def give_back(self, stream: Stream, size: int) -> None: ...  # noqa: B027  # likewise

    @abstractmethod
    def end_turn(self) -> None:
        """Let others have their turn before what came next."""

    @abstractmethod
    def sent_all(self, stream: Stream) -> None:
        """Our side of a stream has ended."""

    @abstractmethod
    def forget(self, stream: Stream) -> None:
        """A stream is over on our side."""
