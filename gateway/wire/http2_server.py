"""The server's side of an HTTP/2 connection, as far as gRPC uses it: no push, no priorities, requests with bodies both ways.

Why this is no library's: docs/decisions/grpc-listener.md. Section numbers are those of RFC 9113.
"""

import re
from collections.abc import Callable
from math import inf
from typing import Final

from gateway.errors import GatewayError, InvalidArgument, Overloaded, TooLarge
from gateway.wire.date import date_line
from gateway.wire.grpc_headers import INTERNAL, RESOURCE_EXHAUSTED, fault, refusal
from gateway.wire.http2 import BYTES_A_FRAME, FRAME_BYTES
from gateway.wire.http2_bounds import BoundedHttp2Connection, Bounds, OnFault
from gateway.wire.http2_frames import (
    CANCEL,
    DEFAULT_WINDOW,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MOST_WINDOW,
    NO_ERROR,
    PADDED,
    PING,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    Broken,
    frame,
    reset,
    settings,
    unpadded,
    window_update,
)
from gateway.wire.http2_headers import LONGEST_REMEMBERED, HeaderReader, Headers
from gateway.wire.http2_receiver import NOBODY
from gateway.wire.http2_sending import Stream
from gateway.wire.http_errors import NO_TLS, begins_tls
from gateway.wire.memory import NO_MEMORY, Memory
from gateway.wire.request_ids import NAME as REQUEST_ID
from gateway.wire.request_ids import request_id

MOST_STREAMS: Final = 1024  # open at once, of one connection
_MOST_ABANDONED: Final = 1000  # requests taken back in the read that brought them, beyond those answered
_WORK_EACH: Final = 128  # frames handled before others get their turn; new header blocks and settings count by their length
_LEAVE_S: Final = 1.0  # from the word that an idle connection is to be closed until it is
_CLOCK_STEP_S: Final = 0.001  # of an event loop's clock: its timers may be early by so much
_HTTP_1: Final = re.compile(rb"[A-Z]+( |$)")  # as a request of it begins
_TOLD: Final = b"this port speaks gRPC (HTTP/2 with prior knowledge); REST is at server.http_port\n"
_OF_GRPC: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n%bConnection: close\r\n\r\n%b"


class ServerConnection(BoundedHttp2Connection):
    """Life: as of `Connection`; `expire` is to be called at `next_due`."""

    def __init__(
        self,
        bounds: Bounds,
        on_stream: Callable[[Stream], None],
        wake: Callable[[], None],
        now: Callable[[], float],
        memory: Memory | None = None,
        on_fault: OnFault = lambda stream, error: None,
    ) -> None:
        """on_stream: gets each new request. now: in seconds. memory: of the process. on_fault: told of those refused here."""
        super().__init__(bounds, wake, memory, on_fault)
        self._on_stream = on_stream
        self._now = now
        self._headers_of = HeaderReader(bounds.header_bytes)
        self._work_each = _WORK_EACH
        self._draining = False
        self._abandoned = 0
        self._delay_from = self.most_unsent // 8
        self._delayed: dict[Stream, _Kept] = {}  # not begun, since so much of answers waits
        # what is waited for, until when
        self.next_due = inf  # no later than any of these
        self._preface_due = self._due_in(bounds.header_timeout_s)
        self._frame_due = inf  # while a frame or header block is here in part
        self._idle_look_due = self._due_in(bounds.body_timeout_s)
        self._leave_due = inf  # after it was said
        self._quiet_since = self._now()
        self._asked = False  # whether the client is there
        self._seen: dict[int, tuple[int, int]] = {}  # of open bodies, at the last look: the window, and what is unfinished
        self._stalled: dict[Stream, float] = {}  # while the client's windows take nothing of an answer; the first are due first
        opening = {
            MAX_CONCURRENT_STREAMS: MOST_STREAMS,
            INITIAL_WINDOW_SIZE: self._receive_window,
            MAX_FRAME_SIZE: FRAME_BYTES,
            MAX_HEADER_LIST_SIZE: bounds.header_bytes,
        }
        self._opening = settings(opening) + window_update(0, self._receive_left - DEFAULT_WINDOW)

    def __repr__(self) -> str:
        return f"<ServerConnection: {len(self._streams)} streams, last {self._last_stream}>"

    def _on_expected(self) -> None:
        if self._opening:
            self.write(self._opening)
            self._opening = b""

    def _on_stranger(self, data: bytes) -> None:
        if _HTTP_1.match(data):
            self.write(_OF_GRPC % (len(_TOLD), date_line(), _TOLD))
            self.closing = True
        else:
            if begins_tls(data):
                self._on_fault(Stream(self, 0, {}, 0), InvalidArgument(NO_TLS))
            super()._on_stranger(data)

    def _on_rest(self, taken: int) -> None:
        self._waits_for_rest = bool(self._rest) or self._block is not None
        if self.more or not self._waits_for_rest:
            self._frame_due = inf
        elif self._frame_due == inf or (self._block is None and taken):  # another frame has begun
            self._frame_due = self._due_in(self._bounds.body_timeout_s)

    # time

    def _due_in(self, seconds: float) -> float:
        due = self._now() + seconds
        self.next_due = min(self.next_due, due)
        return due

    def expire(self) -> None:
        """End what has been waited for too long; next_due is when to call this again."""
        now = self._now() + _CLOCK_STEP_S
        if self.write_paused:  # nobody is read meanwhile: what is waited for cannot come
            later = now + self._bounds.body_timeout_s
            self._frame_due = later if self._frame_due < inf else inf
            self._stalled = dict.fromkeys(self._stalled, later)
        if (self._expected and now >= self._preface_due) or now >= self._frame_due:
            self.aborted = True
            self.next_due = inf
            return
        for stream, due in list(self._stalled.items()):
            if now < due:
                break
            self._give_up(stream, CANCEL)
        if now >= self._idle_look_due:
            self._idle_look_due = now + self._bounds.body_timeout_s
            self._end_idle(now)
        if now >= self._leave_due:
            self._leave_due = inf
            self.drain()
        if self._delayed:
            self._begin_delayed()
        self.next_due = min(
            self._preface_due if self._expected else inf,
            self._frame_due,
            next(iter(self._stalled.values()), inf),
            self._idle_look_due,
            self._leave_due,
        )

    def _end_idle(self, now: float) -> None:
        """See who has not stirred since the last look, or not ended a message that was here in part."""
        if self.write_paused or self.unsent:  # what waits to be sent has a time of its own, and nobody is read meanwhile
            self.heard = True
        seen, self._seen = self._seen, {}
        for stream in list(self._streams.values()):
            if stream.ended or self.write_paused or self._receive_left < FRAME_BYTES:  # the last two: it may not go on
                continue
            window, message = self._seen[stream.number] = stream.receive_window, stream.receiver.unfinished
            before = seen.get(stream.number)
            if before is not None and (before[0] == window or 0 != before[1] == message):
                stream.receiver.late()
        if self.heard:
            self.heard = self._asked = False
            self._quiet_since = now
        elif self._asked:
            self.aborted = True
        elif now - self._quiet_since >= self._bounds.idle_timeout_s:
            if self._streams:
                self._asked = True
                self.write(frame(PING, 0, 0, bytes(8)))
            elif not self._draining and self._leave_due == inf:
                self.go_away(NO_ERROR, "nothing was asked for long (server.limits.idle_timeout_s)", MOST_WINDOW)
                self._leave_due = now + _LEAVE_S

    # the end

    def refuse(self, error: GatewayError) -> None:
        """There is no place for another connection: cut it."""
        self._on_fault(Stream(self, 0, {}, 0), error)
        self.aborted = True

    def lost(self) -> None:
        """Tell every handler that its client is gone."""
        streams = list(self._streams.values())
        self._streams.clear()
        self._stalled.clear()
        self._delayed.clear()
        super().lost()
        for stream in streams:
            receiver, stream.receiver = stream.receiver, NOBODY
            receiver.reset()

    def go_away(self, code: int, text: str, last_stream: int) -> None:
        self._on_expected()  # 3.4: our settings are the first of our frames
        super().go_away(code, text, last_stream)

    def announce_drain(self) -> None:
        """6.8: ask for no new streams; those already under way are still taken."""
        self.go_away(NO_ERROR, "the server is shutting down", MOST_WINDOW)

    @property
    def last_stream(self) -> int:
        """The number of the last that was begun."""
        return self._last_stream

    @property
    def busy(self) -> bool:
        """Whether anything is being asked or answered."""
        return bool(self._streams)

    def leave(self) -> None:
        """6.8: have the client open another connection for what comes next; what is under way is still taken, and answered."""
        if not self._draining and self._leave_due == inf:
            self.go_away(NO_ERROR, "open another connection (server.limits.connection_age_s)", MOST_WINDOW)
            self._leave_due = self._due_in(_LEAVE_S)

    def drain(self) -> None:
        """6.8: take no new streams; close once those that are open have ended."""
        if not self._draining:
            self._draining = True
            self.go_away(NO_ERROR, "the server is shutting down", self._last_stream)
            self._close_if_done()

    def cut_off(self) -> None:
        """End every stream with an answer now, whatever it waits for."""
        self._delay_from = self.most_unsent
        self._begin_delayed()
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

    def _make_room(self) -> None:
        super()._make_room()
        self._seen.clear()  # nobody may go on meanwhile

    def send_on(self) -> None:
        super().send_on()
        if self._delayed:
            self._begin_delayed()

    def _begin_delayed(self) -> None:
        while self._delayed and self.unsent <= self._delay_from:
            stream, kept = next(iter(self._delayed.items()))
            del self._delayed[stream]
            stream.receiver = NOBODY
            self._on_stream(stream)
            if stream.number in self._streams and (kept.body or stream.ended):
                stream.receiver.take(bytes(kept.body), stream.ended)
        self._postponed = bool(self._delayed)

    def blocked(self, stream: Stream, *, moved: bool, by_itself: bool) -> None:
        super().blocked(stream, moved=moved, by_itself=by_itself)
        if not by_itself and self.send_window > 0:  # it is the transport that takes nothing
            self._stalled.pop(stream, None)
        elif moved or stream not in self._stalled:
            self._stalled.pop(stream, None)
            self._stalled[stream] = self._due_in(self._bounds.body_timeout_s)

    def unblocked(self, stream: Stream) -> None:
        super().unblocked(stream)
        self._stalled.pop(stream, None)

    def _refuse(self, stream: Stream) -> None:
        if stream in self._delayed:
            self._give_up(stream, REFUSED_STREAM)
            self._on_fault(stream, Overloaded(NO_MEMORY))
        else:
            super()._refuse(stream)

    def sent_all(self, stream: Stream) -> None:
        if self._abandoned:
            self._abandoned -= 1
        if not stream.ended:
            # 8.1: the whole answer is there; the client need not send on.
            self.write(reset(stream.number, NO_ERROR))
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        if self._streams.pop(stream.number, None) is None:
            return
        self._released += self._receive_window - stream.receive_window
        if self._released >= self._credit_after or self._receive_left < FRAME_BYTES:
            self.release(0)
        stream.receiver = NOBODY
        if self._blocked or self.told_when_drained or self._delayed or self._reserved or self._draining:
            self._let_go(stream)

    def _let_go(self, stream: Stream) -> None:
        """Of what most streams have no part in."""
        self.unblocked(stream)
        self._delayed.pop(stream, None)
        if self._draining:
            self._close_if_done()
        self._unhold(stream)

    # what comes

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._receive_left -= size
        if self._receive_left < 0:
            raise Broken(FLOW_CONTROL_ERROR, "more data than the connection's window")
        stream = self._streams.get(number)
        if stream is None:
            if self._is_idle(number):
                raise Broken(PROTOCOL_ERROR, f"data for stream {number}, which is not open")
            self.release(size)
            return  # we have answered or reset it; what was under way is dropped
        if stream.ended:
            raise Broken(PROTOCOL_ERROR, f"data for stream {number} after its end")
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise Broken(FLOW_CONTROL_ERROR, f"more data for stream {number} than its window")
        stream.ended = ended = bool(flags & END_STREAM)
        if flags & PADDED:
            payload = unpadded(payload)
            stream.credit(size - len(payload))  # 6.1: the window is of padding, too, which nobody holds
        stream.receiver.take(payload, ended)
        if self._receive_left < self._look_below:
            self._look_at_room(stream)

    def _on_block(self, number: int, block: bytes, ended: bool) -> None:
        headers = self._headers_of.known.get(block) or self._headers_of.alike(block)
        long, refused = False, None
        if headers is None:
            long = len(block) > LONGEST_REMEMBERED
            self._spent += len(block) // BYTES_A_FRAME
            headers = self._headers_of.read(block)
            refused = self._refusal_of(headers)
            if refused is not None:
                self._headers_of.forget(block)
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
            # 5.1.1: a request, which trailers are not (8.1); None: too large to tell
            if headers is None or any(name.startswith(b":") for name in headers):
                raise Broken(PROTOCOL_ERROR, f"a request in stream {number}, expected one above {self._last_stream}")
            return  # trailers of a stream that we have answered or reset
        if self._draining:
            return  # 6.8: beyond the GOAWAY; the client tries it elsewhere
        self._last_stream = number
        if len(self._streams) >= MOST_STREAMS:
            self.write(reset(number, REFUSED_STREAM))
            return
        if refused is not None:
            headers = {REQUEST_ID: request_id(None if headers is None else headers.get(REQUEST_ID))}  # of which the log tells
        stream = self._streams[number] = Stream(self, number, headers or {}, self._receive_window)
        stream.ended = ended
        if refused is not None:
            status, error = refused
            stream.send_headers(refusal(status, error.message, stream.headers[REQUEST_ID]), end=True)
            self._on_fault(stream, error)
            return
        if long:
            self._hold_headers(stream, len(block))
        if self.unsent > self._delay_from:
            stream.receiver = self._delayed[stream] = _Kept()
            self._postponed = True
            return
        self._on_stream(stream)
        if ended and number in self._streams:
            stream.receiver.take(b"", True)

    def _refusal_of(self, headers: Headers | None) -> tuple[int, GatewayError] | None:
        """The status of a call of which nothing more is asked, and what it counts as; None: it may begin."""
        if headers is None:
            most = self._bounds.header_bytes
            return RESOURCE_EXHAUSTED, TooLarge(f"metadata of more than {most} bytes (server.limits.header_bytes)")
        text = fault(headers)
        return (INTERNAL, InvalidArgument(text)) if text else None

    def _on_reset(self, number: int, code: int) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            receiver = stream.receiver
            self.forget(stream)
            receiver.reset()
            if number > self._read_from:
                self._abandoned += 1
                if self._abandoned > _MOST_ABANDONED:
                    raise Broken(ENHANCE_YOUR_CALM, f"{self._abandoned} requests taken back at once")
        elif self._is_idle(number):
            raise Broken(PROTOCOL_ERROR, f"reset of stream {number}, which is not open")

    def _on_window_update(self, number: int, size: int) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            try:
                if stream.widen(size):
                    self.ready[stream] = None
            except Broken:  # 6.9.1: which concerns no other
                self._give_up(stream, FLOW_CONTROL_ERROR)
        elif self._is_idle(number):
            raise Broken(PROTOCOL_ERROR, f"a window update for stream {number}, which is not open")

    def _is_idle(self, number: int) -> bool:
        """Whether the client has not opened a stream. Those that it has opened beyond our last GOAWAY are not known (6.8)."""
        return number == 0 or (number > self._last_stream and not self._draining)


class _Kept:
    """Receives for a request that is not begun."""

    __slots__ = ("body",)

    unfinished = 0

    def __init__(self) -> None:
        self.body = bytearray()

    def take(self, data: bytes, ended: bool) -> None:
        self.body += data

    def reset(self) -> None: ...

    def drained(self) -> None: ...

    def late(self) -> None: ...

    def cut_off(self) -> None: ...

    def crowded(self) -> None: ...
