"""What both sides of an HTTP/2 connection do, without I/O: bytes are handed in, what is to be sent lies in `out`.

Bytes are cut into frames, header blocks put together, windows kept; what a frame means to a server or a client is told by the
methods that begin with `_on_`. Nothing here knows sockets or timers: a shell hands in what came, sends what lies there, and
looks at `closing` and `aborted` when it has. Section numbers are those of RFC 9113.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Final

from gateway.wire.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_BYTES,
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
    Broken,
    expect_size,
    frame_head,
    unpadded,
)
from gateway.wire.http2_headers import DEFAULT_TABLE_BYTES, SIZE_UPDATE, TOLERANCE
from gateway.wire.http2_sending import UNLIMITED, Sender

BYTES_A_FRAME: Final = 64  # of a new header block or of settings: so many take as long as a frame does otherwise
_MOST_CONTINUATIONS: Final = 4096  # of a header block: empty ones would have no end
FRAME_BYTES: Final = 65_536  # the longest frame taken: a longer one costs copies while it arrives, a shorter one loops


class Connection(Sender):
    """Life: receive and take, until `closing` or `aborted`, then lost.

    out: to be sent, in order. closing: to be closed once that has left. aborted: to be cut at once. more: frames have come that
    wait for their turn: receive nothing on. ready: bodies wait for what is in `out` to leave: send on then.
    """

    def __init__(self, wake: Callable[[], None], *, expected: bytes, header_bytes: int, frame_bytes: int = FRAME_BYTES) -> None:
        """wake: called once when there is something to take that was written outside of `receive`.

        expected: what the other side sends before its frames. header_bytes: of a header block, of which four times as much
        ends the connection. frame_bytes: the longest frame taken.
        """
        super().__init__(wake)
        self.closing = self.aborted = False
        # reading
        self._expected = expected
        self._rest = b""
        self._work_each = UNLIMITED  # frames handled in one go; what is left waits for the next `receive`
        self._spent = 0  # of that, on new header blocks and on settings; all of it, where a turn is to end
        self.heard = False  # anything; for whoever sets it back
        self._last_stream = 0  # that the other side has opened
        self._read_from = 0  # the same, before this read
        self.more = False
        self._frame_bytes = frame_bytes
        self._most_block_bytes = header_bytes * TOLERANCE
        self._waits_for_rest = False  # of a frame or header block
        self._block: bytearray | None = None  # a header block whose end is still to come
        self._block_stream = 0
        self._block_ends = False
        self._block_frames = 0  # those behind its first

    def lost(self) -> None:
        """There is nobody to talk to any more."""
        self.aborted = True
        self.let_go()

    # what comes

    def receive(self, data: bytes) -> None:
        """Take bytes as they come, in any pieces."""
        self.more = False
        if self.closing or self.aborted:
            return
        if self._rest:
            data = self._rest + data
        self._reading = True
        self._spent = 0
        self.heard = True
        self._read_from = self._last_stream
        try:
            taken = self._read(data)
            self._rest = data[taken:]
            if self._rest or self._waits_for_rest:
                self._on_rest(taken)
            if self.ready or self._postponed:
                self.send_on()
        except Broken as exc:
            self._rest = b""
            self._on_broken(exc)
        finally:
            self._reading = False

    def end_turn(self) -> None:
        self._spent = self._work_each

    def _read(self, data: bytes) -> int:
        """Handle every whole frame; returns how many bytes they took."""
        at, end, work = 0, len(data), self._work_each
        if self._expected:
            if not self._expected.startswith(data[: len(self._expected)]):
                self._on_stranger(data)
                return end
            at = len(self._expected)
            if end < at + 9:
                return 0
            if data[at + 3] != SETTINGS:
                raise Broken(PROTOCOL_ERROR, f"a first frame of kind {data[at + 3]}, expected SETTINGS")  # 3.4
            self._expected = b""
            self._on_expected()
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
            work -= 1
            if work <= self._spent:
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
            self._block_frames += 1
            if self._block_frames > _MOST_CONTINUATIONS:
                raise Broken(ENHANCE_YOUR_CALM, f"a header block of more than {_MOST_CONTINUATIONS} continuations")
            self._block += payload
            self._block_part(flags)
        elif kind == GOAWAY:
            if number or len(payload) < 8:
                raise Broken(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "a GOAWAY that is none")
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
            self._block_frames = 0
            self._block_ends = bool(flags & END_STREAM)
            self._waits_for_rest = True
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
        self._spent += len(payload) // BYTES_A_FRAME
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

    def _on_expected(self) -> None:  # not all care
        """What was expected before the frames is there."""

    def _on_stranger(self, data: bytes) -> None:
        """Who talks does not speak HTTP/2. data: its first."""
        self.aborted = True

    @abstractmethod
    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        """A DATA frame, its padding still in it."""

    @abstractmethod
    def _on_block(self, number: int, block: bytes, ended: bool) -> None:
        """A whole header block."""

    def _on_rest(self, taken: int) -> None:  # not all care
        """A frame is here in part, or was before this read, which has taken so many bytes."""

    def _on_window_update(self, number: int, size: int) -> None:  # not all care
        """More may be sent on a stream."""

    def _on_reset(self, number: int, code: int) -> None:  # not all care
        """The other side has ended a stream."""

    def _on_go_away(self, last_stream: int) -> None:  # not all care
        """The other side takes no more streams."""

    def _on_setting(self, key: int, value: int) -> None:  # not all care
        """Another setting than those of windows and frames."""

    @abstractmethod
    def _on_broken(self, fault: Broken) -> None:
        """The other side has broken the protocol."""
