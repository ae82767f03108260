"""The server's side of an HTTP/2 connection, as far as gRPC uses it: no push, no priorities, requests with bodies both ways.

Why this is no library's: docs/decisions/grpc-listener.md. Section numbers are those of RFC 9113.
"""

from collections.abc import Callable
from math import inf
from typing import Final, Protocol

from gateway.wire.http2 import FRAME_BYTES, NOBODY, Connection, Stream
from gateway.wire.http2_frames import (
    CANCEL,
    DEFAULT_WINDOW,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MOST_WINDOW,
    NO_ERROR,
    PADDED,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    Broken,
    reset,
    settings,
    unpadded,
    window_update,
)
from gateway.wire.http2_headers import HeaderReader, header_block

MOST_STREAMS: Final = 1024  # open at once, of one connection
_CREDIT_AFTER: Final = 1 << 29  # received bytes after which the connection's window is opened again
_CLOCK_STEP_S: Final = 0.001  # of an event loop's clock: its timers may be early by so much
_TOO_LARGE: Final = header_block(status=431)


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
        """For the rest of a frame, or until a client takes something of what it asked for."""


class ServerConnection(Connection):
    """Life: as of `Connection`; `expire` is to be called at `next_due`."""

    def __init__(
        self, bounds: Bounds, on_stream: Callable[[Stream], None], wake: Callable[[], None], now: Callable[[], float]
    ) -> None:
        """on_stream: gets each new request. now: in seconds."""
        super().__init__(wake, expected=PREFACE, header_bytes=bounds.header_bytes)
        self._bounds = bounds
        self._on_stream = on_stream
        self._now = now
        # A whole message of the longest kind fits into a stream's window: unary calls need no credit.
        self._receive_window = min(MOST_WINDOW, bounds.body_bytes + FRAME_BYTES)
        self._headers_of = HeaderReader(bounds.header_bytes)
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._draining = False
        self._received = 0
        # what is waited for, until when
        self.next_due = inf  # no later than any of these
        self._preface_due = self._due_in(bounds.header_timeout_s)
        self._frame_due = inf  # while a frame or header block is here in part
        self._stalled: dict[Stream, float] = {}  # while the client's windows take nothing of an answer; the first are due first
        opening = {
            MAX_CONCURRENT_STREAMS: MOST_STREAMS,
            INITIAL_WINDOW_SIZE: self._receive_window,
            MAX_FRAME_SIZE: FRAME_BYTES,
            MAX_HEADER_LIST_SIZE: bounds.header_bytes,
        }
        self.out += (settings(opening), window_update(0, MOST_WINDOW - DEFAULT_WINDOW))

    def __repr__(self) -> str:
        return f"<ServerConnection: {len(self._streams)} streams, last {self._last_stream}>"

    def receive(self, data: bytes) -> None:
        super().receive(data)
        if not self._rest and self._block is None:
            self._frame_due = inf
        elif self._frame_due == inf:
            self._frame_due = self._due_in(self._bounds.body_timeout_s)

    # time

    def _due_in(self, seconds: float) -> float:
        due = self._now() + seconds
        self.next_due = min(self.next_due, due)
        return due

    def expire(self) -> None:
        """End what has been waited for too long; next_due is when to call this again."""
        now = self._now() + _CLOCK_STEP_S
        if (self._expected and now >= self._preface_due) or now >= self._frame_due:
            self.aborted = True
            self.next_due = inf
            return
        for stream, due in list(self._stalled.items()):
            if now < due:
                break
            receiver = stream.receiver
            stream.reset(CANCEL)
            receiver.reset()
        self.next_due = min(
            self._preface_due if self._expected else inf, self._frame_due, next(iter(self._stalled.values()), inf)
        )

    # the end

    def lost(self) -> None:
        """Tell every handler that its client is gone."""
        streams = list(self._streams.values())
        self._streams.clear()
        self._stalled.clear()
        super().lost()
        for stream in streams:
            receiver, stream.receiver = stream.receiver, NOBODY
            receiver.reset()

    def drained(self) -> None:
        """The shell can send again: tell every handler."""
        for stream in list(self._streams.values()):
            stream.receiver.drained()

    def announce_drain(self) -> None:
        """6.8: ask for no new streams; those already under way are still taken."""
        self.go_away(NO_ERROR, "the server is shutting down", MOST_WINDOW)

    def drain(self) -> None:
        """6.8: take no new streams; close once those that are open have ended."""
        if not self._draining:
            self._draining = True
            self.go_away(NO_ERROR, "the server is shutting down", self._last_stream)
            self._close_if_done()

    def cut_off(self) -> None:
        """End every stream with an answer now, whatever it waits for."""
        for stream in list(self._streams.values()):
            stream.receiver.cut_off()

    def _close_if_done(self) -> None:
        if self._draining and not self._streams:
            self.closing = True
            self.write(b"")  # the shell is to look

    def _on_broken(self, fault: Broken) -> None:
        self.go_away(fault.code, fault.text, self._last_stream)
        self.closing = True

    # streams

    def blocked(self, stream: Stream, *, moved: bool, by_connection: bool) -> None:
        super().blocked(stream, moved=moved, by_connection=by_connection)
        if moved or stream not in self._stalled:
            self._stalled.pop(stream, None)
            self._stalled[stream] = self._due_in(self._bounds.body_timeout_s)

    def unblocked(self, stream: Stream) -> None:
        super().unblocked(stream)
        self._stalled.pop(stream, None)

    def sent_all(self, stream: Stream) -> None:
        if not stream.ended:
            # 8.1: the whole answer is there; the client need not send on.
            self.write(reset(stream.number, NO_ERROR))
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)
        if self._blocked:
            self.unblocked(stream)
        stream.receiver = NOBODY
        if self._draining:
            self._close_if_done()

    # what comes

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received >= _CREDIT_AFTER:
            self.write(window_update(0, self._received))
            self._received = 0
        stream = self._streams.get(number)
        if stream is None:
            if number == 0 or number > self._last_stream:
                raise Broken(PROTOCOL_ERROR, f"data for stream {number}, which is not open")
            return  # we have answered or reset it; what was under way is dropped
        if stream.ended:
            raise Broken(PROTOCOL_ERROR, f"data for stream {number} after its end")
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise Broken(FLOW_CONTROL_ERROR, f"more data for stream {number} than its window")
        if flags & PADDED:
            payload = unpadded(payload)
        stream.ended = ended = bool(flags & END_STREAM)
        stream.receiver.take(payload, ended)

    def _on_block(self, number: int, block: bytes, ended: bool) -> None:
        headers = self._headers_of.known(block) or self._headers_of.read(block)
        stream = self._streams.get(number)
        if stream is not None:  # trailers, of which gRPC clients have none to say
            if stream.ended or not ended:
                raise Broken(PROTOCOL_ERROR, f"a second header block in stream {number} that is not its end")
            stream.ended = True
            stream.receiver.take(b"", True)
            return
        if number % 2 == 0:
            raise Broken(PROTOCOL_ERROR, f"stream {number} is not a client's")
        if number <= self._last_stream:
            return  # trailers of a stream that we have answered or reset
        if self._draining:
            return  # 6.8: beyond the GOAWAY; the client tries it elsewhere
        self._last_stream = number
        if len(self._streams) >= MOST_STREAMS:
            self.write(reset(number, REFUSED_STREAM))
            return
        stream = self._streams[number] = Stream(self, number, headers or {}, self._receive_window)
        stream.ended = ended
        if headers is None:
            stream.send_headers(_TOO_LARGE, end=True)
            return
        self._on_stream(stream)
        if ended and number in self._streams:
            stream.receiver.take(b"", True)

    def _on_reset(self, number: int, code: int) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            receiver = stream.receiver
            self.forget(stream)
            receiver.reset()
        elif number == 0 or number > self._last_stream:
            raise Broken(PROTOCOL_ERROR, f"reset of stream {number}, which is not open")

    def _on_window_update(self, number: int, size: int) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            if stream.widen(size):
                self._ready[stream] = None
        elif number > self._last_stream:
            raise Broken(PROTOCOL_ERROR, f"a window update for stream {number}, which is not open")
