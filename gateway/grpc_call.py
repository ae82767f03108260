"""One gRPC call on an HTTP/2 stream: messages cut from its bytes, its deadline, its answer or its error.

Source: gRPC over HTTP2 (grpc/doc/PROTOCOL-HTTP2.md).
"""

import logging
import re
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import quote_from_bytes

from google.protobuf.message import Message

from gateway.errors import GatewayError, InternalError, InvalidArgument, TooLarge
from gateway.http2 import Http2Stream, header_block
from gateway.http_server import inflate
from gateway.protocols.grpc import STATUS, trailers

ENCODINGS: Final = (b"identity", b"gzip", b"deflate")
_LONGEST_TEXT: Final = 4096  # of an error: clients refuse metadata of more than 8 KiB
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_HEAD: Final = header_block((b"content-type", b"application/grpc"), status=200)
_OK: Final = header_block((b"grpc-status", b"0"))

log = logging.getLogger(__name__)


class GrpcCall:
    """One RPC: its messages in and out of a stream. on_cancel: the client went away or took it back."""

    __slots__ = (
        "_begun",
        "_buffer",
        "_most_bytes",
        "_on_end",
        "_on_message",
        "_one",
        "arrival_ns",
        "on_cancel",
        "over",
        "stream",
    )

    def __init__(self, stream: Http2Stream, most_bytes: int) -> None:
        self.arrival_ns = time.monotonic_ns()
        self.over = False  # answered or cancelled: nothing more is sent
        self.on_cancel: Callable[[], object] = lambda: None
        self.stream = stream
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self._begun = False
        self._one: bytes | None = None
        self._on_message: Callable[[bytes, int], None]
        self._on_end: Callable[[], None]
        stream.on_reset = self._cancelled

    def remaining_s(self, now_ns: int) -> float | None:
        """Until the call's deadline; None if it has none. Raises: InvalidArgument."""
        text = self.stream.headers.get(b"grpc-timeout")
        if text is None:
            return None
        match = _TIMEOUT.fullmatch(text)
        if match is None:
            raise InvalidArgument(f"grpc-timeout {text.decode(errors='replace')!r}: expected up to 8 digits and one of HMSmun")
        return int(match[1]) * _UNIT_S[match[2]] - (now_ns - self.arrival_ns) * 1e-9

    def listen(self, on_message: Callable[[bytes, int], None], on_end: Callable[[], None]) -> None:
        """Have each message given to on_message, with the bytes it took, and the end of them told."""
        self._on_message, self._on_end = on_message, on_end
        self.stream.on_data = self._take

    def listen_for_one(self, start: Callable[[bytes], None]) -> None:
        """Have the only message of a unary call given to `start`; another number of them fails the call."""

        def keep(message: bytes, size: int) -> None:
            if self._one is not None:
                self.fail(InvalidArgument("a unary call takes one message, got more"))
            self._one = message

        def end() -> None:
            if self._one is None:
                self.fail(InvalidArgument("a unary call takes one message, got none"))
            else:
                start(self._one)

        self.listen(keep, end)

    def reply(self, message: Message) -> None:
        """Answer a unary call."""
        self.send(message)
        self.finish()

    def begin(self) -> None:
        """Send the headers of an answer, before the first of its messages."""
        if not self._begun:
            self._begun = True
            self.stream.send_headers(_HEAD)

    def send(self, message: Message) -> None:
        """Send one message of a streaming call."""
        if not self.over:
            self.begin()
            self.stream.send_data(framed(message))

    def finish(self) -> None:
        """End the answer with success."""
        if not self.over:
            self.begin()
            self.over = True
            self.stream.finish(_OK)

    def fail(self, error: GatewayError) -> None:
        """End the call with an error, in its place if nothing was sent before, else behind it."""
        if self.over:
            return
        self.over = True
        text = quote_from_bytes(error.message.encode()[:_LONGEST_TEXT], safe=_PRINTABLE)
        fields = [(b"grpc-status", b"%d" % STATUS[error.code].value[0]), (b"grpc-message", text.encode())]
        fields += [(name.encode(), value.encode()) for name, value in trailers(error)]
        if self._begun:
            self.stream.finish(header_block(*fields))
        else:
            self.stream.send_headers(header_block((b"content-type", b"application/grpc"), *fields, status=200), end=True)

    def _take(self, data: bytes, ended: bool) -> None:
        """Cut length-prefixed messages. Source: gRPC over HTTP2, "Length-Prefixed-Message"."""
        if self.over:
            return
        try:
            self._cut(data)
            if ended and not self.over:
                if self._buffer:
                    raise InvalidArgument(f"the call ends within a message, {len(self._buffer)} bytes after its begin")
                self._on_end()
        except GatewayError as exc:
            self.fail(exc)
        except Exception:  # a fault of ours must cost this call only, not the connection and every other call on it
            log.exception("a gRPC call failed")
            self.fail(InternalError("internal error"))

    def _cut(self, data: bytes) -> None:
        buffer = self._buffer
        if not buffer and len(data) >= 5 and int.from_bytes(data[1:5]) == len(data) - 5 <= self._most_bytes:
            self._on_message(self._inflated(data[0], data[5:]), len(data))  # one whole message, as most are
            return
        buffer += data
        while len(buffer) >= 5 and not self.over:
            size = int.from_bytes(buffer[1:5])
            if size > self._most_bytes:
                raise TooLarge(f"a message of {size} bytes, expected at most {self._most_bytes} (server.limits.body_bytes)")
            if len(buffer) < size + 5:
                return
            message = bytes(memoryview(buffer)[5 : size + 5])
            flag = buffer[0]
            del buffer[: size + 5]
            self._on_message(self._inflated(flag, message), size + 5)

    def _inflated(self, flag: int, message: bytes) -> bytes:
        if flag == 0:
            return message
        encoding = self.stream.headers.get(b"grpc-encoding", b"identity")
        if flag != 1 or encoding == b"identity":
            raise InvalidArgument(f"a message with the flag {flag} and grpc-encoding {encoding.decode()}")
        return inflate(encoding, message, self._most_bytes)

    def _cancelled(self) -> None:
        if not self.over:
            self.over = True
            self.on_cancel()


def framed(message: Message) -> bytes:
    """A message behind its flag and length."""
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4) + data
