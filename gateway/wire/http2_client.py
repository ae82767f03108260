"""The client's side of an HTTP/2 connection without I/O: whole requests, whose answers are told as they come."""

from collections.abc import Callable
from typing import Final, Protocol

from gateway.wire.http2 import Connection
from gateway.wire.http2_frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MOST_WINDOW,
    PREFACE,
    Broken,
    frame_head,
    reset,
    settings,
    window_update,
)
from gateway.wire.http2_headers import HeaderReader, Headers
from gateway.wire.http2_sending import Stream

_CREDIT_AFTER: Final = 1 << 30  # of received bytes; the window is twice that
_HEADER_BYTES: Final = 1 << 20
_OPENING: Final = (
    PREFACE
    # No table: equal header blocks mean equal headers, and each distinct one is decoded once.
    + settings({HEADER_TABLE_SIZE: 0, ENABLE_PUSH: 0, INITIAL_WINDOW_SIZE: MOST_WINDOW})
    + window_update(0, MOST_WINDOW - DEFAULT_WINDOW)
)


class Answers(Protocol):
    """What a connection tells of the answers. Numbers are those that `ask` gave."""

    def headers(self, number: int, headers: Headers, ended: bool) -> None:
        """A header block of an answer; ended: its last."""

    def data_ended(self, number: int) -> None:
        """An answer ended with its body, without trailers."""

    def reset(self, number: int, code: int) -> None:
        """The server gave the request up."""

    def going_away(self, last: int) -> None:
        """The server takes no more requests, and will not answer those above the last."""

    def room(self) -> None:
        """The server may take more requests at once than before."""


class ClientConnection(Connection):
    """Life: as of `Connection`. most_streams: that the server takes at once. fault: why it was aborted, if the server broke
    the protocol."""

    def __init__(self, answers: Answers, wake: Callable[[], None]) -> None:
        super().__init__(wake, expected=b"", header_bytes=_HEADER_BYTES, frame_bytes=DEFAULT_FRAME_BYTES)
        self._answers: Answers = answers
        self._headers_of = HeaderReader(_HEADER_BYTES)
        self._next = 1
        self._received = 0
        self._unsent: dict[int, Stream] = {}  # whose bodies did not fit into the windows
        self.most_streams = 1 << 31
        self.fault = ""
        self.out.append(_OPENING)

    def ask(self, block: bytes, body: bytes) -> int:
        """Send a request, its body as the server's windows let it; returns its number."""
        number = self._next
        self._next += 2
        size = len(body)
        if (
            size <= self.send_window
            and size <= self.initial_window
            and size <= self.peer_frame_bytes
            and not self._unsent
        ):  # fmt: skip
            self.send_window -= size
            if self.block_prefix:
                block = self.block_prefix + block
                self.block_prefix = b""
            head = frame_head(len(block), HEADERS, END_HEADERS, number)
            self.write(head + block + frame_head(size, DATA, END_STREAM, number) + body)
        else:
            stream = self._unsent[number] = Stream(self, number, {}, 0)
            stream.send_headers(block)
            stream.send_data(body)
            stream.end()
        return number

    def cancel(self, number: int, code: int) -> None:
        """Take a request back."""
        self.write(reset(number, code))
        self.drop(number)

    def drop(self, number: int) -> None:
        """Send no more of a request, which has its answer."""
        if self._unsent and (stream := self._unsent.pop(number, None)) is not None:
            self.unblocked(stream)

    # called by streams

    def sent_all(self, stream: Stream) -> None:
        del self._unsent[stream.number]

    def forget(self, stream: Stream) -> None:
        self.drop(stream.number)

    # what comes

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        self._received += len(payload)
        if self._received > _CREDIT_AFTER:
            self.write(window_update(0, self._received))
            self._received = 0
        if flags & END_STREAM:
            self._answers.data_ended(number)

    def _on_block(self, number: int, block: bytes, ended: bool) -> None:
        headers = self._headers_of.known.get(block) or self._headers_of.read(block)
        self._answers.headers(number, headers or {}, ended)

    def _on_reset(self, number: int, code: int) -> None:
        self.drop(number)
        self._answers.reset(number, code)

    def _on_window_update(self, number: int, size: int) -> None:
        stream = self._unsent.get(number)
        if stream is not None and stream.widen(size):
            self.ready[stream] = None

    def _on_go_away(self, last_stream: int) -> None:
        self._answers.going_away(last_stream)

    def _on_setting(self, key: int, value: int) -> None:
        if key == MAX_CONCURRENT_STREAMS:
            self.most_streams = value
            self._answers.room()

    def _on_broken(self, fault: Broken) -> None:
        self.fault = fault.text
        self.aborted = True
