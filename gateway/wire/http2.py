"""What both sides of an HTTP/2 connection do, without I/O: bytes are handed in, what is to be sent lies in `out`.

Bytes are cut into frames, header blocks put together, windows kept; what a frame means to a server or a client is told by the
methods that begin with `_on_`. Nothing here knows sockets or timers: a shell hands in what came, sends what lies there, and
looks at `closing` and `aborted` when it has. Section numbers are those of RFC 9113.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.wire.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MOST_WINDOW,
    PADDED,
    PING,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    WORD,
    Broken,
    expect_size,
    frame_head,
    reset,
    unpadded,
    window_update,
)
from gateway.wire.http2_headers import DEFAULT_TABLE_BYTES, SIZE_UPDATE, TOLERANCE, Headers
from gateway.wire.http2_receiver import NOBODY, Receiver

_UNLIMITED: Final = 1 << 62
FRAME_BYTES: Final = 65_536  # the longest frame taken: a longer one costs copies while it arrives, a shorter one loops


class Stream:
    """One request and its answer. The handler sets the receiver when it gets the stream. headers: names in lower case."""

    __slots__ = (
        "_connection", "_ends", "_granted", "_outbox", "_trailers",
        "ended", "headers", "number", "receive_window", "receiver", "reserved", "unsent", "window_seen",
    )  # fmt: skip

    def __init__(self, connection: "Connection", number: int, headers: Headers, receive_window: int) -> None:
        self._connection = connection
        self._granted = 0  # by the other side, beyond its initial window
        self._outbox: deque[memoryview] | None = None  # most bodies never wait
        self._ends = False  # behind what waits
        self._trailers: bytes | None = None  # likewise
        self.number = number
        self.receive_window = receive_window
        self.unsent = 0  # bytes in the outbox
        self.reserved = 0  # bytes held beyond those that came
        self.window_seen = -1  # of what is received, at the last look
        self.ended = False  # by the other side
        self.headers = headers
        self.receiver: Receiver = NOBODY

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
        if (
            not self._outbox
            and size <= connection.send_window
            and size <= connection.peer_frame_bytes
            and size <= connection.initial_window + self._granted
            and size <= connection.room
        ):
            self._granted -= size
            connection.send_window -= size
            connection.room -= size
            connection.write(frame_head(size, DATA, 0, self.number))
            connection.write(data)
        elif connection.unsent and connection.unsent + size > connection.most_unsent:
            connection.overflowed(self)
        else:
            if self._outbox is None:
                self._outbox = deque()
            self._outbox.append(memoryview(data))
            self.unsent += size
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
        self._ends = True
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
            self.unsent -= size
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
        if self._trailers is not None:
            self.send_headers(self._trailers, end=True)
        elif self._ends:
            connection.write(frame_head(0, DATA, END_STREAM, self.number))
            connection.sent_all(self)
        else:
            self.receiver.drained()

    def credit(self, size: int) -> None:
        """Let the other side send so many bytes more on this stream."""
        self.receive_window += size
        self._connection.release(size)
        if not self.ended and size:
            self._connection.write(window_update(self.number, size))

    def reserve(self, size: int, again: Callable[[], None]) -> bool:
        """Hold so many bytes for this request beyond those that came. False: not yet; again is called when to ask once more."""
        return self._connection.reserve(self, size, again)

    def give_back(self, size: int) -> None:
        """Hold so many less of those reserved."""
        self._connection.give_back(self, size)

    def reset(self, code: int) -> None:
        """End the stream on our side."""
        self._connection.write(reset(self.number, code))
        self._connection.forget(self)


class Connection(ABC):
    """Life: receive and take, until `closing` or `aborted`, then lost.

    out: to be sent, in order. closing: to be closed once that has left. aborted: to be cut at once. more: frames have come that
    wait for their turn: receive nothing on. ready: bodies wait for what is in `out` to leave: send on then.
    """

    def __init__(self, wake: Callable[[], None], *, expected: bytes, header_bytes: int, frame_bytes: int = FRAME_BYTES) -> None:
        """wake: called once when there is something to take that was written outside of `receive`.

        expected: what the other side sends before its frames. header_bytes: of a header block, of which four times as much
        ends the connection. frame_bytes: the longest frame taken.
        """
        self._wake = wake
        self._woken = False
        self.out: list[bytes] = []
        self.closing = self.aborted = False
        # reading
        self._expected = expected
        self._rest = b""
        self._reading = False
        self._work_each = _UNLIMITED  # frames handled in one go; what is left waits for the next `receive`
        self._work = 0  # left of that
        self.more = False
        self._frame_bytes = frame_bytes
        self._most_block_bytes = header_bytes * TOLERANCE
        self._block: bytearray | None = None  # a header block whose end is still to come
        self._block_stream = 0
        self._block_ends = False
        # sending
        self.write_paused = False
        self.room = _UNLIMITED  # bytes of bodies that may be put into `out` before it is taken
        self.room_each = _UNLIMITED
        self.unsent = 0  # bytes of bodies that wait for windows or room
        self.most_unsent = _UNLIMITED
        self.told_when_drained: dict[Stream, None] = {}
        self.send_window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.peer_frame_bytes = DEFAULT_FRAME_BYTES
        self.block_prefix = b""  # the next header block sent begins with it
        self._table_empty = False  # the other side has been told that our blocks need no table
        self._blocked: dict[Stream, None] = {}  # have something to send, which no window takes
        self.ready: dict[Stream, None] = {}  # of these, those whose own window is open

    # what comes

    def receive(self, data: bytes) -> None:
        """Take bytes as they come, in any pieces."""
        self.more = False
        if self.closing or self.aborted:
            return
        if self._rest:
            data = self._rest + data
        self._reading = True
        self._work = self._work_each
        try:
            self._rest = data[self._read(data) :]
            if self.ready:
                self.send_on()
        except Broken as exc:
            self._rest = b""
            self._on_broken(exc)
        finally:
            self._reading = False

    def _read(self, data: bytes) -> int:
        """Handle every whole frame; returns how many bytes they took."""
        at, end = 0, len(data)
        if self._expected:
            if not self._expected.startswith(data[: len(self._expected)]):
                self.out.clear()
                self.aborted = True
                return end
            if end < len(self._expected):
                return 0
            at = len(self._expected)
            self._expected = b""
        while end - at >= 9:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if length > self._frame_bytes:
                raise Broken(FRAME_SIZE_ERROR, f"a frame of {length} bytes, expected at most {self._frame_bytes}")
            start = at + 9
            after = start + length
            if after > end:
                break
            kind = data[at + 3]
            number = int.from_bytes(data[at + 5 : start]) & MOST_WINDOW
            if self._block is not None and (kind != CONTINUATION or number != self._block_stream):
                raise Broken(PROTOCOL_ERROR, "a header block was not continued")  # 6.10
            self._frame(kind, data[at + 4], number, data[start:after])
            at = after
            if self.closing or self.aborted:
                return end
            self._work -= 1
            if self._work <= 0:
                self.more = end - at >= 9
                break
        return at

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == DATA:
            self._on_data(flags, number, payload)
        elif kind == HEADERS:
            self._headers(flags, number, payload)
        elif kind == WINDOW_UPDATE:
            expect_size(payload, 4)
            increment = int.from_bytes(payload) & MOST_WINDOW
            if increment == 0:
                raise Broken(PROTOCOL_ERROR, "a window update of 0")
            if number == 0:
                self.send_window += increment
                if self.send_window > MOST_WINDOW:
                    raise Broken(FLOW_CONTROL_ERROR, "the connection's window is too large")
            else:
                self._on_window_update(number, increment)
        elif kind == RST_STREAM:
            expect_size(payload, 4)
            self._on_reset(number, int.from_bytes(payload))
        elif kind == PING:
            expect_size(payload, 8)
            if number:
                raise Broken(PROTOCOL_ERROR, f"a ping of stream {number}, expected 0")
            if not flags & ACK:
                self.write(frame_head(8, PING, ACK, 0) + payload)
        elif kind == SETTINGS:
            self._settings(flags, number, payload)
        elif kind == CONTINUATION:
            if self._block is None:
                raise Broken(PROTOCOL_ERROR, "a continuation of no header block")
            self._block += payload
            self._block_part(flags)
        elif kind == GOAWAY:
            self._on_go_away(int.from_bytes(payload[:4]) & MOST_WINDOW)
        elif kind == PUSH_PROMISE:
            raise Broken(PROTOCOL_ERROR, "a push, which nobody asked for")
        # PRIORITY asks nothing of us, and unknown kinds are to be ignored (4.1).

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & WITH_PRIORITY:
            if len(payload) < 5:
                raise Broken(FRAME_SIZE_ERROR, "a header frame that ends within its priority")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._on_block(number, payload, bool(flags & END_STREAM))
        else:
            self._block_stream = number
            self._block_ends = bool(flags & END_STREAM)
            self._block = bytearray(payload)
            self._block_part(flags)

    def _block_part(self, flags: int) -> None:
        block = self._block
        assert block is not None
        if len(block) > self._most_block_bytes:
            raise Broken(ENHANCE_YOUR_CALM, f"a header block of {len(block)} bytes (server.limits.header_bytes)")
        if flags & END_HEADERS:
            self._block = None
            self._on_block(self._block_stream, bytes(block), self._block_ends)

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise Broken(PROTOCOL_ERROR, f"settings of stream {number}, expected 0")
        if len(payload) % 6 or (flags & ACK and payload):
            raise Broken(FRAME_SIZE_ERROR, "settings that are none")
        if flags & ACK:
            return
        for key, value in SETTING.iter_unpack(payload):
            if key == INITIAL_WINDOW_SIZE:
                if value > MOST_WINDOW:
                    raise Broken(FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
                self.initial_window = value  # also of the streams that are open (6.9.2)
            elif key == MAX_FRAME_SIZE:
                if not DEFAULT_FRAME_BYTES <= value < 1 << 24:
                    raise Broken(PROTOCOL_ERROR, f"a largest frame of {value} bytes")
                self.peer_frame_bytes = value
            elif key == HEADER_TABLE_SIZE:
                # RFC 7541 4.2: a smaller table must be answered; an empty one, which ours is anyway, fits all that may follow.
                if value < DEFAULT_TABLE_BYTES and not self._table_empty:
                    self._table_empty = True
                    self.block_prefix = SIZE_UPDATE
            elif key == ENABLE_PUSH:
                if value > 1:
                    raise Broken(PROTOCOL_ERROR, f"ENABLE_PUSH of {value}, expected 0 or 1")
            else:
                self._on_setting(key, value)
        self.write(frame_head(0, SETTINGS, ACK, 0))
        self.ready |= self._blocked

    @abstractmethod
    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        """A DATA frame, its padding still in it."""

    @abstractmethod
    def _on_block(self, number: int, block: bytes, ended: bool) -> None:
        """A whole header block."""

    def _on_window_update(self, number: int, size: int) -> None:  # noqa: B027  # not all care
        """More may be sent on a stream."""

    def _on_reset(self, number: int, code: int) -> None:  # noqa: B027  # not all care
        """The other side has ended a stream."""

    def _on_go_away(self, last_stream: int) -> None:  # noqa: B027  # not all care
        """The other side takes no more streams."""

    def _on_setting(self, key: int, value: int) -> None:  # noqa: B027  # not all care
        """Another setting than those of windows and frames."""

    @abstractmethod
    def _on_broken(self, fault: Broken) -> None:
        """The other side has broken the protocol."""

    # what leaves

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

    def lost(self) -> None:
        """There is nobody to send to any more."""
        self.aborted = True
        self._blocked.clear()
        self.ready.clear()
        self.told_when_drained.clear()
        self._wake = lambda: None  # or the shell and this would hold each other until the cyclic collector comes

    def pause(self) -> None:
        """The shell can send no more for now."""
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
        stream.unsent = 0

    # How much may be held is a server's to say; a client holds what it asked for.

    def overflowed(self, stream: Stream) -> None: ...  # noqa: B027  # more would wait to be sent than may

    def release(self, size: int) -> None: ...  # noqa: B027  # so many bytes that were received are held no longer

    def reserve(self, stream: Stream, size: int, again: Callable[[], None]) -> bool:
        """Of a stream's."""
        return True

    def give_back(self, stream: Stream, size: int) -> None: ...  # noqa: B027  # likewise

    @abstractmethod
    def sent_all(self, stream: Stream) -> None:
        """Our side of a stream has ended."""

    @abstractmethod
    def forget(self, stream: Stream) -> None:
        """A stream is over on our side."""
