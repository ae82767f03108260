"""The server's side of an HTTP/2 connection, as far as gRPC uses it: no push, no priorities, requests with bodies both ways.

Bytes are cut into frames, header blocks decoded, flow control kept; what a stream carries is its handler's. Everything is
synchronous on the event loop: a read calls handlers, handlers write, and what was written in one turn of the loop leaves in one
piece. A connection whose peer does not read is itself read no further, so that nothing piles up that it could make us answer.

Why this is no library's: docs/decisions/grpc-listener.md.
Section numbers are those of RFC 9113. Header blocks are hpack's (RFC 7541); those sent are literals that need no table.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

import hpack
from hpack.table import HeaderTable

from gateway.config import Limits

Headers = dict[bytes, bytes]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # 3.4
_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_END_STREAM: Final = 0x1
_ACK: Final = 0x1
_END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_WITH_PRIORITY: Final = 0x20

# 7, error codes
NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
INTERNAL_ERROR: Final = 0x2
FLOW_CONTROL_ERROR: Final = 0x3
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

_MOST_WINDOW: Final = (1 << 31) - 1
_DEFAULT_WINDOW: Final = 65_535
_DEFAULT_FRAME_BYTES: Final = 16_384
_FRAME_BYTES: Final = 65_536  # the longest frame taken: a longer one costs copies while it arrives, a shorter one loops
_CREDIT_AFTER: Final = 1 << 29  # received bytes after which the connection's window is opened again
_MOST_STREAMS: Final = 1024  # open at once, of one connection
_BLOCKS_REMEMBERED: Final = 256
# What is longer than the limit is decoded, to keep the table, and refused; what is so much longer ends the connection.
_HEADER_TOLERANCE: Final = 4
_WRITE_PIECE: Final = 1 << 16  # longer bodies are handed to the transport as they are, not joined

_FRAME_HEAD: Final = struct.Struct(">HBBBI")  # length in two parts, kind, flags, stream
_SETTING: Final = struct.Struct(">HI")
_WORD: Final = struct.Struct(">I")


def frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """4.1: the nine bytes before a frame's payload."""
    return _FRAME_HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def header_block(*headers: tuple[bytes, bytes], status: int | None = None) -> bytes:
    """RFC 7541 6.2.2: fields as literals that enter no table. status: the pseudo-header that begins a response."""
    parts = []
    if status == 200:
        parts.append(b"\x88")  # RFC 7541 appendix A, entry 8
    elif status is not None:
        parts.append(b"\x08\x03%d" % status)
    for name, value in headers:
        parts += (b"\x00", _string_length(len(name)), name, _string_length(len(value)), value)
    return b"".join(parts)


def _string_length(length: int) -> bytes:
    """RFC 7541 5.1, with a prefix of 7 bits and no Huffman coding."""
    if length < 127:
        return bytes((length,))
    out = bytearray((127,))
    length -= 127
    while length >= 128:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out)


_TOO_LARGE: Final = header_block(status=431)


class Receiver(Protocol):
    """What a stream tells its handler."""

    def take(self, data: bytes, ended: bool) -> None:
        """The body's next bytes, and whether these are its last."""

    def reset(self) -> None:
        """The client went away or took the request back. Nothing comes after it."""

    def drained(self) -> None:
        """More can be sent: what was sent before has left, after it had to wait for the client."""

    def cut_off(self) -> None:
        """The server ends: answer now."""


class _Nobody:
    """Receives for streams that are over, so that these and their handlers are freed without the cyclic collector."""

    def take(self, data: bytes, ended: bool) -> None: ...

    def reset(self) -> None: ...

    def drained(self) -> None: ...

    def cut_off(self) -> None: ...


NOBODY: Final[Receiver] = _Nobody()


class Http2Stream:
    """One request and its answer. The handler sets the receiver when it gets the stream. headers: names in lower case."""

    __slots__ = (
        "_connection", "_ended", "_id", "_outbox", "_receive_window", "_send_window", "_stalled", "_trailers", "headers",
        "receiver",
    )  # fmt: skip

    def __init__(self, connection: "Http2Connection", number: int, headers: Headers, send_window: int) -> None:
        self._connection = connection
        self._id = number
        self._send_window = send_window
        self._receive_window = connection.receive_window
        self._ended = False  # by the client
        self._outbox: deque[memoryview] | None = None  # most answers never wait
        self._trailers: bytes | None = None
        self._stalled: asyncio.TimerHandle | None = None  # runs while the client's windows take nothing of what it asked for
        self.headers = headers
        self.receiver: Receiver = NOBODY

    @property
    def backlog(self) -> bool:
        """Whether something that was sent still waits for the client."""
        return bool(self._outbox) or self._connection.write_paused

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Send a header block. end: it is the whole answer. A block is sent in one frame: keep it below 16 KiB."""
        flags = _END_HEADERS | _END_STREAM if end else _END_HEADERS
        self._connection.write(frame_head(len(block), _HEADERS, flags, self._id) + block)
        if end:
            self._connection.answered(self)

    def send_data(self, data: bytes) -> None:
        """Send bytes of the answer's body, as the client's windows let them."""
        size = len(data)
        connection = self._connection
        if not self._outbox and size <= self._send_window and size <= connection.sendable:
            self._send_window -= size
            connection.send_window -= size
            connection.write(frame_head(size, _DATA, 0, self._id))
            connection.write(data)
        else:
            if self._outbox is None:
                self._outbox = deque()
            self._outbox.append(memoryview(data))
            self.pump()

    def finish(self, trailers: bytes) -> None:
        """End the answer with a header block, once its body has left."""
        if self._outbox:
            self._trailers = trailers
        else:
            self.send_headers(trailers, end=True)

    def pump(self) -> None:
        """Send on, when a window may have opened (called by the connection)."""
        connection = self._connection
        outbox = self._outbox
        moved = False
        while outbox:
            head = outbox[0]
            size = min(len(head), self._send_window, connection.sendable)
            if size <= 0 and len(head):
                if moved or self._stalled is None:
                    self.unwatch()
                    self._stalled = connection.after_stall(self._give_up)
                return
            moved = True
            self._send_window -= size
            connection.send_window -= size
            connection.write(frame_head(size, _DATA, 0, self._id))
            connection.write(bytes(head[:size]))
            if size == len(head):
                outbox.popleft()
            else:
                outbox[0] = head[size:]
        self.unwatch()
        if self._trailers is not None:
            self.send_headers(self._trailers, end=True)
        else:
            self.receiver.drained()

    def credit(self, size: int) -> None:
        """Let the client send so many bytes more on this stream."""
        self._receive_window += size
        if not self._ended and size:
            self._connection.write(frame_head(4, _WINDOW_UPDATE, 0, self._id) + _WORD.pack(size))

    def _give_up(self) -> None:
        receiver = self.receiver
        self.reset(CANCEL)
        receiver.reset()

    def unwatch(self) -> None:
        """The client takes what it asked for, or nobody waits for that."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def reset(self, code: int) -> None:
        """End the stream on our side without an answer."""
        self._connection.write(frame_head(4, _RST_STREAM, 0, self._id) + _WORD.pack(code))
        self._connection.forget(self)


class _Table(HeaderTable):
    """hpack's table, which also tells that it changed."""

    changed = False

    def add(self, name: bytes, value: bytes) -> None:
        self.changed = True
        super().add(name, value)


class _Broken(Exception):
    """5.4.1: the connection cannot go on. code, text: for the GOAWAY."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class Http2Connection(asyncio.Protocol):
    """One connection. on_stream gets each new request; on_closed is called once, at the end."""

    def __init__(
        self,
        limits: Limits,
        on_stream: Callable[[Http2Stream], None],
        on_closed: "Callable[[Http2Connection], None]",
        *,
        refused: bool = False,
    ) -> None:
        """refused: there are too many; it is cut as soon as it is made."""
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._on_stream = on_stream
        self._on_closed = on_closed
        self._refused = refused
        # A whole message of the longest kind fits into a stream's window: unary calls need no credit.
        self.receive_window = min(_MOST_WINDOW, limits.body_bytes + _FRAME_BYTES)
        # of the connection
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, Http2Stream] = {}
        self._last_stream = 0
        self._draining = False
        self._preface_timer: asyncio.TimerHandle | None = None
        self._frame_timer: asyncio.TimerHandle | None = None  # runs while a frame or header block is here in part
        self._write_timer: asyncio.TimerHandle | None = None  # runs while the client takes nothing of what it asked for
        # reading
        self._rest = b""
        self._reading = False
        self._received = 0
        self._decoder = hpack.Decoder(max_header_list_size=limits.header_bytes * _HEADER_TOLERANCE)
        self._table = self._decoder.header_table = _Table()
        self._blocks: dict[bytes, Headers] = {}  # decoded before, with the table as it is
        self._block: bytearray | None = None  # a header block whose end is still to come
        self._block_stream = 0
        self._block_ends = False
        # writing
        self._out: list[bytes] = []
        self._flush_due = False
        self.write_paused = False
        self.send_window = _DEFAULT_WINDOW
        self._initial_window = _DEFAULT_WINDOW
        self._peer_frame_bytes = _DEFAULT_FRAME_BYTES

    def __repr__(self) -> str:
        return f"<Http2Connection: {len(self._streams)} streams, last {self._last_stream}>"

    @property
    def sendable(self) -> int:
        """The longest DATA frame the peer takes now, on any stream."""
        return min(self.send_window, self._peer_frame_bytes)

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        if self._refused:
            transport.abort()
            return
        self._preface_timer = self._loop.call_later(self._limits.header_timeout_s, self.abort)
        settings = ((0x3, _MOST_STREAMS), (0x4, self.receive_window), (0x5, _FRAME_BYTES), (0x6, self._limits.header_bytes))
        payload = b"".join(_SETTING.pack(*setting) for setting in settings)  # 6.5.2
        self.write(frame_head(len(payload), _SETTINGS, 0, 0) + payload)
        self.write(frame_head(4, _WINDOW_UPDATE, 0, 0) + _WORD.pack(_MOST_WINDOW - _DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in (self._preface_timer, self._frame_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        streams = list(self._streams.values())
        self._streams.clear()
        try:
            for stream in streams:
                stream.unwatch()
                receiver, stream.receiver = stream.receiver, NOBODY
                receiver.reset()
        finally:
            self._on_closed(self)

    def after_stall(self, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back after so long as a client may take nothing of an answer."""
        return self._loop.call_later(self._limits.body_timeout_s, callback)

    def pause_writing(self) -> None:
        self.write_paused = True
        self._write_timer = self._loop.call_later(self._limits.body_timeout_s, self.abort)
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._transport is not None:
            self._transport.resume_reading()
        for stream in list(self._streams.values()):
            stream.receiver.drained()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        self._reading = True
        try:
            self._rest = data[self._read(data) :]
        except _Broken as exc:
            self._rest = b""
            self._break(exc.code, exc.text)
        finally:
            self._reading = False
        if not self._rest and self._block is None:
            if self._frame_timer is not None:
                self._frame_timer.cancel()
                self._frame_timer = None
        elif self._frame_timer is None and self._transport is not None:
            self._frame_timer = self._loop.call_later(self._limits.body_timeout_s, self.abort)
        self._flush()

    # writing

    def write(self, data: bytes) -> None:
        """Send bytes with this turn of the loop."""
        self._out.append(data)
        if not self._reading and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        out, self._out = self._out, []
        if self._transport is None or not out:
            return
        if any(len(piece) > _WRITE_PIECE for piece in out):
            self._transport.writelines(out)
        else:
            self._transport.write(b"".join(out))

    def announce_drain(self) -> None:
        """6.8: ask for no new streams; those already under way are still taken."""
        self._go_away(NO_ERROR, "the server is shutting down", _MOST_WINDOW)

    def drain(self) -> None:
        """6.8: take no new streams; close once those that are open have ended."""
        if not self._draining:
            self._draining = True
            self._go_away(NO_ERROR, "the server is shutting down", self._last_stream)
            self._close_if_done()

    def cut_off(self) -> None:
        """End every stream with an answer now, whatever it waits for."""
        for stream in list(self._streams.values()):
            stream.receiver.cut_off()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def answered(self, stream: Http2Stream) -> None:
        """The answer to a stream has ended (called by it)."""
        if not stream._ended:
            # 8.1: the whole answer is there; the client need not send on.
            self.write(frame_head(4, _RST_STREAM, 0, stream._id) + _WORD.pack(NO_ERROR))
        self.forget(stream)

    def forget(self, stream: Http2Stream) -> None:
        """The stream is over on our side (called by it)."""
        self._streams.pop(stream._id, None)
        stream.unwatch()
        stream.receiver = NOBODY
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._draining and not self._streams and self._transport is not None:
            self._flush()
            self._transport.close()

    def _break(self, code: int, text: str) -> None:
        self._go_away(code, text, self._last_stream)
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _go_away(self, code: int, text: str, last_stream: int) -> None:
        payload = _WORD.pack(last_stream) + _WORD.pack(code) + text.encode()
        self.write(frame_head(len(payload), _GOAWAY, 0, 0) + payload)

    # reading

    def _read(self, data: bytes) -> int:
        """Handle every whole frame; returns how many bytes they took."""
        at, end = 0, len(data)
        if self._preface_timer is not None:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                self._out.clear()
                self.abort()
                return end
            if end < len(PREFACE):
                return 0
            at = len(PREFACE)
            self._preface_timer.cancel()
            self._preface_timer = None
        while end - at >= 9:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if length > _FRAME_BYTES:
                raise _Broken(FRAME_SIZE_ERROR, f"a frame of {length} bytes, expected at most {_FRAME_BYTES}")
            start = at + 9
            after = start + length
            if after > end:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : start]) & _MOST_WINDOW
            if self._block is not None and (kind != _CONTINUATION or stream != self._block_stream):
                raise _Broken(PROTOCOL_ERROR, "a header block was not continued")  # 6.10
            self._frame(kind, flags, stream, data[start:after])
            at = after
            if self._transport is None or self._transport.is_closing():
                return end
        return at

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == _DATA:
            self._data(flags, number, payload)
        elif kind == _HEADERS:
            self._headers(flags, number, payload)
        elif kind == _WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == _RST_STREAM:
            _expect_size(payload, 4)
            stream = self._streams.pop(number, None)
            if stream is not None:
                stream.unwatch()
                receiver, stream.receiver = stream.receiver, NOBODY
                receiver.reset()
                self._close_if_done()
            elif number == 0 or number > self._last_stream:
                raise _Broken(PROTOCOL_ERROR, f"reset of stream {number}, which is not open")
        elif kind == _PING:
            _expect_size(payload, 8)
            if not flags & _ACK:
                self.write(frame_head(8, _PING, _ACK, 0) + payload)
        elif kind == _SETTINGS:
            self._settings(flags, number, payload)
        elif kind == _CONTINUATION:
            if self._block is None:
                raise _Broken(PROTOCOL_ERROR, "a continuation of no header block")
            self._block += payload
            self._block_part(flags)
        elif kind == _PUSH_PROMISE:
            raise _Broken(PROTOCOL_ERROR, "clients do not push")
        # PRIORITY and GOAWAY ask nothing of a server, and unknown kinds are to be ignored (4.1).

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received >= _CREDIT_AFTER:
            self.write(frame_head(4, _WINDOW_UPDATE, 0, 0) + _WORD.pack(self._received))
            self._received = 0
        stream = self._streams.get(number)
        if stream is None:
            if number == 0 or number > self._last_stream:
                raise _Broken(PROTOCOL_ERROR, f"data for stream {number}, which is not open")
            return  # we have answered or reset it; what was under way is dropped
        if stream._ended:
            raise _Broken(PROTOCOL_ERROR, f"data for stream {number} after its end")
        stream._receive_window -= size
        if stream._receive_window < 0:
            raise _Broken(FLOW_CONTROL_ERROR, f"more data for stream {number} than its window")
        if flags & _PADDED:
            payload = _unpadded(payload)
        stream._ended = ended = bool(flags & _END_STREAM)
        stream.receiver.take(payload, ended)

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flags & _WITH_PRIORITY:
            if len(payload) < 5:
                raise _Broken(FRAME_SIZE_ERROR, "a header frame that ends within its priority")
            payload = payload[5:]
        self._block_stream = number
        self._block_ends = bool(flags & _END_STREAM)
        if flags & _END_HEADERS:
            self._request(payload)
        else:
            self._block = bytearray(payload)
            self._block_part(flags)

    def _block_part(self, flags: int) -> None:
        block = self._block
        assert block is not None
        if len(block) > self._limits.header_bytes * _HEADER_TOLERANCE:
            raise _Broken(ENHANCE_YOUR_CALM, f"a header block of {len(block)} bytes (server.limits.header_bytes)")
        if flags & _END_HEADERS:
            self._block = None
            self._request(bytes(block))

    def _request(self, block: bytes) -> None:
        headers = self._decode(block)
        number, ended = self._block_stream, self._block_ends
        stream = self._streams.get(number)
        if stream is not None:  # trailers, of which gRPC clients have none to say
            if stream._ended or not ended:
                raise _Broken(PROTOCOL_ERROR, f"a second header block in stream {number} that is not its end")
            stream._ended = True
            stream.receiver.take(b"", True)
            return
        if number % 2 == 0:
            raise _Broken(PROTOCOL_ERROR, f"stream {number} is not a client's")
        if number <= self._last_stream:
            return  # trailers of a stream that we have answered or reset
        if self._draining:
            return  # 6.8: beyond the GOAWAY; the client tries it elsewhere
        self._last_stream = number
        if len(self._streams) >= _MOST_STREAMS:
            self.write(frame_head(4, _RST_STREAM, 0, number) + _WORD.pack(REFUSED_STREAM))
            return
        stream = self._streams[number] = Http2Stream(self, number, headers or {}, self._initial_window)
        stream._ended = ended
        if headers is None:
            stream.send_headers(_TOO_LARGE, end=True)
            return
        self._on_stream(stream)
        if ended and number in self._streams:
            stream.receiver.take(b"", True)

    def _decode(self, block: bytes) -> Headers | None:
        """None: more than the limit."""
        # A client's calls differ in little: most blocks are ones that this table has decoded before.
        headers = self._blocks.get(block)
        if headers is not None:
            return headers
        table = self._table
        table.changed = False
        size_before = table.maxsize
        try:
            fields = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError as exc:
            raise _Broken(ENHANCE_YOUR_CALM, "far too many headers (server.limits.header_bytes)") from exc
        except (hpack.HPACKError, UnicodeDecodeError, IndexError, ValueError) as exc:
            raise _Broken(COMPRESSION_ERROR, "a header block that cannot be decoded") from exc
        if table.changed or table.maxsize != size_before or len(self._blocks) >= _BLOCKS_REMEMBERED:
            self._blocks.clear()
        if sum(len(name) + len(value) + 32 for name, value in fields) > self._limits.header_bytes:  # 6.5.2
            return None
        headers = dict(fields)
        if not table.changed:
            self._blocks[block] = headers
        return headers

    def _window_update(self, number: int, payload: bytes) -> None:
        _expect_size(payload, 4)
        increment = int.from_bytes(payload) & _MOST_WINDOW
        if increment == 0:
            raise _Broken(PROTOCOL_ERROR, "a window update of 0")
        if number == 0:
            self.send_window += increment
            if self.send_window > _MOST_WINDOW:
                raise _Broken(FLOW_CONTROL_ERROR, "the connection's window is too large")
            for waiting in [stream for stream in self._streams.values() if stream._outbox]:
                waiting.pump()
        elif (stream := self._streams.get(number)) is not None:
            stream._send_window += increment
            if stream._send_window > _MOST_WINDOW:
                raise _Broken(FLOW_CONTROL_ERROR, f"the window of stream {number} is too large")
            if stream._outbox:
                stream.pump()
        elif number > self._last_stream:
            raise _Broken(PROTOCOL_ERROR, f"a window update for stream {number}, which is not open")

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % 6:
            raise _Broken(FRAME_SIZE_ERROR, "settings that are none")
        if flags & _ACK:
            return
        for key, value in _SETTING.iter_unpack(payload):
            if key == 0x4:  # SETTINGS_INITIAL_WINDOW_SIZE, also of the streams that are open (6.9.2)
                if value > _MOST_WINDOW:
                    raise _Broken(FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
                for stream in self._streams.values():
                    stream._send_window += value - self._initial_window
                self._initial_window = value
            elif key == 0x5:  # SETTINGS_MAX_FRAME_SIZE
                if not _DEFAULT_FRAME_BYTES <= value < 1 << 24:
                    raise _Broken(PROTOCOL_ERROR, f"a largest frame of {value} bytes")
                self._peer_frame_bytes = value
        self.write(frame_head(0, _SETTINGS, _ACK, 0))
        for waiting in [stream for stream in self._streams.values() if stream._outbox]:
            waiting.pump()


def _expect_size(payload: bytes, size: int) -> None:
    if len(payload) != size:
        raise _Broken(FRAME_SIZE_ERROR, f"a frame of {len(payload)} bytes, expected {size}")


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise _Broken(PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
