"""One gRPC call on an HTTP/2 stream: messages cut from its bytes, its deadline, its answer or its error.

Source: gRPC over HTTP2 (grpc/doc/PROTOCOL-HTTP2.md).
"""

import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol
from urllib.parse import quote_from_bytes

from google.protobuf.message import EncodeError, Message

from gateway.edges.long_turns import run_beside
from gateway.errors import DeadlineExceeded, GatewayError, InternalError, InvalidArgument, Overloaded, TooLarge, shutting_down
from gateway.protocols.grpc import STATUS, trailers
from gateway.wire.compression import Outcome, inflate, outcome_of
from gateway.wire.http2_headers import Headers, header_block
from gateway.wire.http2_receiver import Receiver
from gateway.wire.long_message import LongMessage
from gateway.wire.memory import NO_MEMORY
from gateway.wire.request_ids import NAME as REQUEST_ID
from gateway.wire.request_ids import request_id
from gateway.wire.tensors import Buffer

ENCODINGS: Final = (b"identity", b"gzip", b"deflate")
_MOST_INFLATED: Final = 1032  # times its length, by deflate's best
# So a message of 4 KiB inflates to 4 MiB at most: some milliseconds. More is done off the loop.
_INFLATE_INLINE_BYTES: Final = 4 << 10
_MOST_BYTES: Final = 1 << 31  # of a message
_LONG_BYTES: Final = 64 << 10  # once so much is here of a message, there is memory for the whole
_LONGEST_TEXT: Final = 6 << 10  # of an error, quoted: clients refuse metadata of more than 8 KiB
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_ALWAYS: Final = ((b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"identity,deflate,gzip"))
_HEAD: Final = header_block(*_ALWAYS, status=200)
_OK: Final = header_block((b"grpc-status", b"0"))

log = logging.getLogger(__name__)


class CallStream(Protocol):
    """What a call needs of the stream it runs on: `wire.http2_sending.Stream`, or one in memory."""

    headers: Headers
    receiver: Receiver

    @property
    def backlog(self) -> bool:
        """Whether something that was sent still waits for the client."""

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        """Send a header block. end: it is the whole answer."""

    def send_data(self, data: bytes) -> None:
        """Send bytes of the answer's body."""

    def try_send_whole(self, block: bytes, data: bytes, trailers: bytes) -> bool:
        """Send a whole answer: header block, body and trailers, if it can leave at once; else nothing."""

    def send_parts(self, parts: list[Buffer]) -> None:
        """Likewise, of one message, in parts that do not change any more."""

    def finish(self, trailers: bytes) -> None:
        """End the answer with a header block, once its body has left."""

    def end(self) -> None:
        """Likewise, without one."""

    def credit(self, size: int) -> None:
        """Let the client send so many bytes more."""

    def end_turn(self) -> None:
        """Let others have their turn before what the client has sent behind this."""

    def reserve(self, size: int, again: Callable[[], None]) -> bool:
        """Hold so many bytes beyond those that came. False: not yet; again is called when to ask once more."""

    def settle(self, reserved: int, size: int) -> bool:
        """Of what was reserved, so much is held. False: all connections together have no memory for it."""

    def give_back(self, size: int) -> None:
        """Hold so many less of those reserved."""


class CallHandler(Protocol):
    """What a call tells whoever answers it."""

    def message(self, data: Buffer, size: int) -> None:
        """The next message; size: the bytes that it took of the client's window."""

    def end(self) -> None:
        """There are no more messages."""

    def cancel(self) -> None:
        """The client went away or took the call back. Nothing comes after it."""

    def drained(self) -> None:
        """More can be sent: what was sent before has left, after it had to wait for the client."""

    def leave(self, error: GatewayError) -> None:
        """End the call with an error, once what is whole has been answered."""

    def refused(self, error: GatewayError) -> None:
        """The call ends with an error, for what was to be a message. `cancel` comes next."""


class OneMessage(ABC):
    """A handler for calls that take one message, which `start` gets; another number of them fails the call."""

    def __init__(self, call: "GrpcCall") -> None:
        self._call = call
        self._data: Buffer | None = None

    @abstractmethod
    def start(self, data: Buffer) -> None:
        """Begin to serve the one message."""

    def message(self, data: Buffer, size: int) -> None:
        if self._data is not None:
            raise InvalidArgument("a unary call takes one message, got more")
        self._data = data

    def end(self) -> None:
        data = self._data
        if data is None:
            raise InvalidArgument("a unary call takes one message, got none")
        self.start(data)

    def cancel(self) -> None: ...  # noqa: B027  # what is over with `start` has nothing to give up

    def drained(self) -> None: ...  # noqa: B027  # nor anything left to send

    def leave(self, error: GatewayError) -> None:
        self._call.end_with(error)

    def refused(self, error: GatewayError) -> None: ...  # noqa: B027  # that counts where it is an inference


class GrpcCall:
    """One RPC. over: answered or cancelled; nothing more is sent. key, ran: as `Caller` has them."""

    __slots__ = (
        "_begun", "_buffer", "_ended", "_gathered", "_handler", "_held", "_inflating", "_long", "_most_bytes", "_request_id",
        "_timeout_s", "_told", "arrival_ns", "key", "over", "ran", "stream",
    )  # fmt: skip

    key: Any

    def __init__(self, stream: CallStream, most_bytes: int) -> None:
        """most_bytes: the longest message, compressed or not."""
        self.arrival_ns = time.monotonic_ns()
        self.stream = stream
        self.over = self.ran = False
        self._begun = False
        self._most_bytes = most_bytes
        self._buffer: bytearray | None = None  # most messages come whole
        self._long: LongMessage | None = None  # the one that is coming, if it is long
        self._gathered = 0  # messages that came in pieces; and the times that one might go on again
        self._held = self._inflating = False  # while it inflates, it is held
        self._ended = False  # by the client, while held
        self._timeout_s: float | None = None
        self._handler: CallHandler | None = None
        self._request_id = b""
        self._told: dict[bytes, bytes] = {}

    def listen(self, handler: CallHandler) -> None:
        """Have messages, their end and a cancellation told. What a handler raises ends the call."""
        self._handler = handler
        self.stream.receiver = self

    def hold(self) -> None:
        """Tell no further message until `go_on`: their bytes stay as they came, and keep the client's window closed."""
        self._held = True

    def go_on(self) -> None:
        """Tell messages again, those that came meanwhile first."""
        if self._held and not self._inflating:
            self._held = False
            self._gathered += 1
            self.take(b"", self._ended)

    def deafen(self) -> None:
        """Tell what has come, and nothing that comes from now on."""
        self.stream.receiver = _Deaf(self)

    def set_timeout(self, text: bytes) -> None:
        """text: of the header grpc-timeout. Raises: InvalidArgument; DeadlineExceeded, for none at all."""
        match = _TIMEOUT.fullmatch(text)
        if match is None:
            raise InvalidArgument(f"grpc-timeout {text.decode(errors='replace')!r}: expected up to 8 digits and one of HMSmun")
        self._timeout_s = int(match[1]) * _UNIT_S[match[2]]
        if not self._timeout_s:
            raise DeadlineExceeded(f"the deadline of the call had passed when it came: grpc-timeout {text.decode()}")

    def remaining_s(self, now_ns: int) -> float | None:
        """Until the call's deadline; None if it has none."""
        timeout_s = self._timeout_s
        return None if timeout_s is None else timeout_s - (now_ns - self.arrival_ns) * 1e-9

    @property
    def headers(self) -> Headers:
        """The call's metadata."""
        return self.stream.headers

    @property
    def request_id(self) -> bytes:
        """By which it is known in its answer and in the log: the client's own, if that is fit for it."""
        if not self._request_id:
            self._request_id = request_id(self.stream.headers.get(REQUEST_ID))
        return self._request_id

    def tell(self, name: bytes, value: bytes) -> None:
        """Give the answer metadata, unless it is begun: of the requests of a stream, the last before then tells it."""
        if not self._begun:
            self._told[name] = value

    def reply(self, message: Message | bytes) -> None:
        """Answer a unary call. message: bytes: it is written already. Raises: as `send`."""
        if not self.over:
            data = framed(message)
            if self._begun or not self.stream.try_send_whole(self._head(), data, _OK):
                self.begin()
                self.stream.send_data(data)
                self.finish()
            self.over, self._handler = True, None

    def begin(self) -> None:
        """Send the headers of an answer, before the first of its messages."""
        if not self._begun:
            self._begun = True
            self.stream.send_headers(self._head())

    def _head(self) -> bytes:
        # Nobody asks for the id of an answer that went well, if its client gave none: to write one, and to read it, would
        # cost both sides more than the rest of the head.
        asked = self._request_id or self._told or REQUEST_ID in self.stream.headers
        return _HEAD + header_block(*self._own_fields()) if asked else _HEAD

    def send(self, message: Message) -> None:
        """Send one message of a streaming call. Raises: InternalError, for one that is too long; then nothing is sent."""
        if not self.over:
            data = framed(message)
            self.begin()
            self.stream.send_data(data)

    def send_long(self, parts: list[Buffer]) -> None:
        """Send a message that is long, in parts that do not change any more. Raises: as `send`."""
        if not self.over:
            size = sum(map(len, parts))
            if size >= _MOST_BYTES:
                raise _too_long()
            self.begin()
            self.stream.send_parts([b"\0" + size.to_bytes(4), *parts])

    def finish(self) -> None:
        """End the answer with success."""
        if not self.over:
            self.begin()
            self.over = True
            self._handler = None
            self.stream.finish(_OK)

    def fail(self, error: GatewayError) -> None:
        """End the call with an error, in its place if nothing was sent before, else behind it."""
        if self.over:
            return
        self.over = True
        self._handler = None
        fields = [(b"grpc-status", b"%d" % STATUS[error.code]), (b"grpc-message", _quoted(error.words))]
        fields += [(name.encode(), value.encode()) for name, value in trailers(error)]
        fields += self._own_fields()
        if self._begun:
            self.stream.finish(header_block(*fields))
        else:
            self.stream.send_headers(header_block(*_ALWAYS, *fields, status=200), end=True)

    def _own_fields(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((REQUEST_ID, self.request_id), *self._told.items())

    # the stream's receiver

    @property
    def unfinished(self) -> int:
        return self._gathered + 1 if self._in_part and not self._held else 0

    def take(self, data: bytes, ended: bool) -> None:
        """Cut length-prefixed messages."""
        try:
            self._cut(data)
            if not ended:
                return
            if self._held:
                self._ended = True
            elif self._handler is not None:
                if self._in_part:
                    raise InvalidArgument(f"the call ends within a message, {self._in_part} bytes after its begin")
                self._handler.end()
        except GatewayError as exc:
            self.end_with(exc)
        except BaseException:
            self.failed()

    def failed(self) -> None:
        """End the call for a fault of ours (from an except clause): it costs this call, not the connection and every other."""
        log.exception("a gRPC call failed")
        self.end_with(InternalError("internal error"))

    def late(self) -> None:
        if not self._held and (self._in_part or isinstance(self._handler, OneMessage)):
            self.end_with(DeadlineExceeded("the message did not end in time (server.limits.body_timeout_s)"))

    def cut_off(self) -> None:
        self.end_with(shutting_down(ran=self.ran))

    def crowded(self) -> None:
        if self._handler is not None:
            try:
                self._handler.leave(Overloaded(NO_MEMORY, retry_after_s=1.0))
            except BaseException:
                self.failed()

    def end_with(self, error: GatewayError) -> None:
        """Fail, whoever is still at an answer: nobody waits for that."""
        handler = self._handler
        self.fail(error)
        if handler is not None:
            handler.refused(error)
            self._give_up(handler)

    def reset(self) -> None:
        handler, self._handler = self._handler, None
        self.over = True
        if handler is not None:
            self._give_up(handler)

    def _give_up(self, handler: CallHandler) -> None:
        try:
            handler.cancel()
        except BaseException:
            log.exception("a gRPC call could not be given up")

    def drained(self) -> None:
        if self._handler is not None:
            try:
                self._handler.drained()
            except BaseException:
                self.failed()

    @property
    def _in_part(self) -> int:
        """How many bytes are here of a message that is not whole, or is not told yet."""
        return len(self._buffer or b"") + (0 if self._long is None else 5 + self._long.bytes_here)

    def _cut(self, data: bytes) -> None:
        handler = self._handler
        if handler is None:
            return
        if (
            not self._buffer
            and not self._held
            and self._long is None
            and len(data) >= 5
            and int.from_bytes(data[1:5]) == len(data) - 5 <= self._most_bytes
        ):  # one whole message, as most are
            self._message(data[0], data[5:])
            return
        if self._long is not None:
            data = self._long.fill(data)
            if not self._long.whole:
                return
            long, self._long = self._long, None
            self._gathered += 1
            self._message(long.flag, long.data)
        if self._buffer is None:
            self._buffer = bytearray()
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 5 and not self._held and not self.over:
            size = int.from_bytes(buffer[1:5])
            if size > self._most_bytes:
                raise TooLarge(f"a message of {size} bytes, expected at most {self._most_bytes} (server.limits.body_bytes)")
            flag = buffer[0]
            if len(buffer) < size + 5:
                if len(buffer) > _LONG_BYTES:
                    self._long = LongMessage(flag, size)
                    self._long.fill(bytes(buffer[5:]))
                    buffer.clear()
                return
            message = bytes(memoryview(buffer)[5 : size + 5])
            del buffer[: size + 5]
            self._gathered += 1
            self._message(flag, message)

    def _message(self, flag: int, message: Buffer) -> None:
        """Tell a whole message."""
        assert self._handler is not None
        if flag:
            self._inflate(flag, message)
        else:
            self._handler.message(message, len(message) + 5)

    def _inflate(self, flag: int, message: Buffer) -> None:
        """Tell a compressed message, and hold the call until then: long work is done off the loop, what is much may wait."""
        encoding = self.stream.headers.get(b"grpc-encoding", b"identity")
        if flag != 1:
            raise InvalidArgument(f"a message with the flag {flag}, expected 0 or 1")
        if encoding == b"identity":  # grpc/doc/compression.md
            raise InternalError("a message is flagged as compressed, but its call has no grpc-encoding")
        self._held = self._inflating = True
        self._begin_inflating(encoding, message)

    def _begin_inflating(self, encoding: bytes, message: Buffer) -> None:
        most = min(self._most_bytes, _MOST_INFLATED * (len(message) + 1))
        if not self.stream.reserve(most, partial(self._begin_inflating, encoding, message)):
            return
        size = len(message) + 5
        work = partial(inflate, encoding, message, self._most_bytes, lambda: not self.over)
        if len(message) <= _INFLATE_INLINE_BYTES:
            self._inflated(size, most, outcome_of(work))
        else:
            run_beside(work, partial(self._inflated, size, most))

    def _inflated(self, size: int, reserved: int, outcome: Outcome) -> None:
        handler = self._handler
        if handler is None:  # the call is over
            return
        if isinstance(outcome, GatewayError):
            self.end_with(outcome)
            return
        try:
            self._held = self._inflating = False
            if not self.stream.settle(reserved, len(outcome)):
                self.stream.give_back(len(outcome))
                self.crowded()
                return
            handler.message(outcome, size)
            if not self._held:
                self.take(b"", self._ended)
        except GatewayError as exc:
            self.end_with(exc)
        except BaseException:
            self.failed()


class _Deaf:
    """Receives for a call that is told nothing new, but that there is nothing."""

    __slots__ = ("_call", "_deaf_to_some")

    unfinished = 0

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self._deaf_to_some = False

    def take(self, data: bytes, ended: bool) -> None:
        self._deaf_to_some |= bool(data)
        if ended and not self._deaf_to_some:
            self._call.take(b"", True)

    def reset(self) -> None:
        self._call.reset()

    def drained(self) -> None:
        self._call.drained()

    def late(self) -> None: ...

    def cut_off(self) -> None:
        self._call.cut_off()

    def crowded(self) -> None: ...  # what came before it is all that is held


def _quoted(text: str) -> bytes:
    """PROTOCOL-HTTP2, Status-Message: percent-encoded; cut where it is too long."""
    quoted = quote_from_bytes(text.encode(), safe=_PRINTABLE)
    while len(quoted) > _LONGEST_TEXT:
        text = text[: len(text) * _LONGEST_TEXT // len(quoted)]
        quoted = quote_from_bytes(text.encode(), safe=_PRINTABLE)
    return quoted.encode()


def framed(message: Message | bytes) -> bytes:
    """A message behind its flag and length. Raises: InternalError, if it is too long."""
    try:
        data = message if isinstance(message, bytes) else message.SerializeToString()
    except (EncodeError, ValueError):
        raise _too_long() from None
    return b"\0" + len(data).to_bytes(4) + data


def _too_long() -> InternalError:
    return InternalError("the answer is of 2 GiB or more, which a gRPC message cannot hold")
