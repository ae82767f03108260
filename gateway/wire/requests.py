"""Bytes in, HTTP/1.1 requests out: the half of a connection that reads.

Theory of operation
-------------------
A reader is in one phase at a time: between messages (IDLE), within a head (HEAD), within a body whose bytes go through the
parser (BODY), within a body of known length that is written straight to where it stays (FILLING), or past its last message
(DEAF: what still comes is dropped). httptools (llhttp) parses heads, chunked bodies, and bodies that came whole with their
head.

Clients send the same head again and again. That of a plain request, which came in one read that held nothing else, is
remembered for all connections of the listener (`known_heads`); a read that begins with the same bytes, but for the number in
Content-Length and the ids of requests and traces, and holds one whole request, means the same and is not parsed.

A fault in the stream (bad syntax, a limit) is told once, as `RequestSink.refused`; the reader is deaf from then on.
"""

import logging
import re
from collections.abc import Mapping
from typing import Final, NoReturn, Protocol

import httptools
import numpy as np

from gateway.config import Limits
from gateway.errors import shortened
from gateway.wire.http_errors import NO_TLS, begins_tls
from gateway.wire.known_heads import KnownHead, KnownHeads, fields_of
from gateway.wire.memory import FREE_BYTES, NO_MEMORY, STEP_BYTES
from gateway.wire.origins import Origins
from gateway.wire.request_ids import NAME as REQUEST_ID
from gateway.wire.tensors import Buffer

# The phases. Plain constants: a member of an Enum takes 13 times as long to look up on Python 3.11, and there are ten of them
# on the way of a request (0.9 against 0.07 µs each, 2 busy cores, 2026-11-21).
PHASES: Final = ("IDLE", "HEAD", "BODY", "FILLING", "DEAF")
IDLE, HEAD, BODY, FILLING, DEAF = range(len(PHASES))

_SLICE_BYTES: Final = 32 << 10  # 1300 of the shortest requests, 6 ms
_UPGRADE_FIELDS: Final = frozenset((b"upgrade", b"http2-settings"))
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+;=%:\[\]-]*")  # RFC 3986, section 3.2.2; a comma would join two of them
_URL: Final = re.compile(rb"https?://([^/?]+)(.*)", re.IGNORECASE)
_OTHER_VERSION: Final = "this port speaks HTTP/1.1; gRPC, over HTTP/2, is at server.grpc_port"
_LINE_BYTES: Final = len(b"POST  HTTP/1.1\r\n\r\n")
_PADDING_BYTES: Final = 256  # that a head may have besides: white space, which the parser drops
_NOTHING: Final = memoryview(b"")
_KNOWN_READ_BYTES: Final = 16 << 10  # of a read that may be a request with a head that is known
_TRIES: Final = 8  # heads in a row that are remembered in vain, and no more are
_UNLIKE_OTHERS: Final = frozenset((b"transfer-encoding", b"upgrade", b"expect"))

log = logging.getLogger(__name__)


class RequestSink(Protocol):
    """What a reader tells of what it reads."""

    def arrived(
        self, method: bytes, target: bytes, headers: Mapping[bytes, bytes], body: Buffer, keep_alive: bool, http_1_0: bool
    ) -> None:
        """A request is whole. target: in origin form. http_1_0: and the connection's fate must be told in its answer.

        headers: which other requests may have as well.
        """

    def continue_expected(self) -> None:
        """The client sends the body of its request once it has read `100 Continue`."""

    def may_hold(self, body_bytes: int) -> bool:
        """Whether there is memory for so much of the body that is being read."""

    def refused(self, status: int, message: str, headers: Mapping[bytes, bytes]) -> None:
        """The stream is at fault, or there is no memory for it; nothing more is read. headers: the request's id, if it told."""


class RequestReader:
    """See the module's theory of operation.

    phase: one of the constants. requests: how many were read. buffer: where the next bytes of the stream are to be written, if
    it is not None; `filled` then tells of them.
    """

    __slots__ = (
        "_body", "_body_bytes", "_chunked", "_content", "_content_bytes", "_filled", "_granted", "_head_fed", "_head_is_new",
        "_header_bytes", "_header_count", "_headers", "_heads", "_host", "_http_1_0", "_keep_alive", "_known", "_limits",
        "_method", "_origins", "_parser", "_refusal", "_sink", "_target", "_tries", "_upgrading", "_url", "buffer", "phase",
        "requests",
    )  # fmt: skip

    def __init__(
        self, sink: RequestSink, limits: Limits, heads: KnownHeads | None = None, origins: Origins | None = None
    ) -> None:
        """heads: that it shares with others of the same limits and origins. origins: which web pages may ask."""
        self.phase = IDLE
        self.requests = 0
        self.buffer: memoryview | None = None
        self._sink = sink
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_count = 0
        self._header_bytes = 0
        self._head_fed = 0
        self._head_is_new = True
        self._host = b" "  # the last that was looked at; this is none
        self._method = b""
        self._target = b""
        self._keep_alive = True
        self._http_1_0 = False
        self._content_bytes = 0
        self._chunked = False
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._content = _NOTHING
        self._filled = 0
        self._granted = min(limits.body_bytes, FREE_BYTES)  # of a body
        self._upgrading = False
        self._refusal: tuple[int, str] | None = None
        self._heads = heads or KnownHeads()
        self._origins = origins or Origins()
        self._known: KnownHead | None = None  # the last
        self._tries = _TRIES

    def feed(self, data: memoryview) -> int:
        """Read some bytes of the stream: how many of these. They are the caller's again when this returns.

        What takes the parser long is read in slices, so that the caller may do something else in between.
        """
        idle = self.phase == IDLE and len(data) <= _KNOWN_READ_BYTES
        if idle and self._is_known(whole := bytes(data)):
            return len(data)
        if self.phase == DEAF:
            return len(data)
        requests = self.requests
        part = data if len(data) <= _SLICE_BYTES else data[:_SLICE_BYTES]
        size = len(part)
        try:
            while True:
                try:
                    self._parser.feed_data(part)
                    break
                except httptools.HttpParserUpgrade as exc:
                    part = part[exc.args[0] :]
                    self._decline_upgrade()
        except httptools.HttpParserCallbackError as exc:
            if self._refusal is None:
                log.error("the parser's callbacks failed", exc_info=exc)
                self._refusal = 500, "internal error"
            self.refuse(*self._refusal)
        except httptools.HttpParserError as exc:
            if self._parser.get_method() == b"PRI":  # how HTTP/2 begins
                self.refuse(505, _OTHER_VERSION)
            elif not requests and begins_tls(data):
                self.refuse(400, NO_TLS)
            else:
                self.refuse(400, f"malformed HTTP request: {exc}")
        phase = self.phase
        if phase == HEAD:
            if not self._head_is_new:
                self._head_fed += size
            elif self.requests == requests:
                self._head_fed = size
            else:  # behind the end of another message: how much of this read is the head's is not known
                self._head_fed = 0
            self._head_is_new = False
            head_bytes = max(self._head_fed - _PADDING_BYTES, self._header_bytes + len(self._url))
            if head_bytes > self._limits.header_bytes or self._header_count > self._limits.header_count:
                self.refuse(431, self._head_fault(head_bytes))
        elif phase == BODY and not self._chunked:
            return size + self._fill(data[size:])
        elif idle and self._tries and self.requests == requests + 1:
            self._remember(whole)
        return size

    def _is_known(self, data: bytes) -> bool:
        """Whether this is one request with a head that is known; then it has arrived."""
        known = self._known
        if known is not None and data.startswith(known.head) and len(data) == known.length:  # as mostly: without another call
            body: bytes | None = data[len(known.head) :]
        else:
            end = data.find(b"\r\n\r\n") + 4
            head = data[:end]
            same = self._heads.by_head.get(head)
            if same is not None and len(data) == same.length and same.head == head:  # as where many models are asked in turn
                known, body = same, data[end:]
            else:
                body = None if known is None else known.body(data, self._limits.body_bytes)
                if body is None:
                    known = self._heads.find(data)
                    body = None if known is None else known.body(data, self._limits.body_bytes)
        if body is None or known is None:
            return False
        self._known = known
        self._tries = _TRIES
        self.requests += 1
        self._sink.arrived(known.method, known.target, known.headers, body, True, False)
        return True

    def _remember(self, data: bytes) -> None:
        """Remember the head of the request that was just read, if it was all of the data."""
        head = data[: data.find(b"\r\n\r\n") + 4]
        self._known = None
        self._tries -= 1
        length = self._headers.get(b"content-length")
        if (
            length is not None
            and len(head) + int(length) == len(data)
            and head.count(b"\r\n") == head.count(b"\n") == self._header_count + 2  # each is a field's, with its own meaning
            and (found := fields_of(head, self._headers)) is not None
            and _UNLIKE_OTHERS.isdisjoint(self._headers)
            and not self._http_1_0
            and self.phase == IDLE
        ):
            self._known = KnownHead(*found, self._method, self._target, head, len(data), self._headers)
            self._heads.add(self._known)

    def filled(self, size: int) -> None:
        """So many bytes of the stream were written to `buffer`."""
        self._filled += size
        if self._filled == self._content_bytes:
            self._complete(self._content)
        elif self._filled < self._granted or self._may_hold_more(self._filled):
            self.buffer = self._content[self._filled : self._granted]
        else:
            self.refuse(503, NO_MEMORY)

    @property
    def body_bytes(self) -> int:
        """What is held of a body that is not whole, or may be without another question."""
        if self.phase == FILLING:
            return min(self._granted, self._content_bytes)
        return self._body_bytes if self.phase == BODY else 0

    def refuse(self, status: int, message: str) -> None:
        """Read no more, and tell why, unless that is so already."""
        if self.phase != DEAF:
            told = self.phase != IDLE and REQUEST_ID in self._headers
            self.stop()
            self._sink.refused(status, message, {REQUEST_ID: self._headers[REQUEST_ID]} if told else {})

    def stop(self) -> None:
        """Read no more."""
        self.phase = DEAF
        self.buffer = None
        self._content = _NOTHING
        self._body = b""

    def close(self) -> None:
        """Let go of what refers to this: it is freed now, not when the collector comes by. Nothing may be called any more."""
        self.stop()
        del self._parser, self._sink

    def _fill(self, more: memoryview) -> int:
        """Have the rest of the body written to where it stays, without parsing. Returns how much there is of it in more."""
        try:  # numpy, since bytearray would write the zeros first
            content = np.empty(self._content_bytes, np.uint8)
        except MemoryError:
            self.refuse(503, f"there is no memory for a request body of {self._content_bytes} bytes")
            return len(more)
        self._content = memoryview(content)  # type: ignore[arg-type]  # an ndarray is a buffer
        self._filled = len(self._body)
        self._content[: self._filled] = self._body
        self._body = b""
        self._parser = httptools.HttpRequestParser(self)  # the old one waits for this body
        self.phase = FILLING
        self._granted = FREE_BYTES
        size = min(len(more), self._content_bytes - self._filled)
        self._content[self._filled : self._filled + size] = more[:size]
        self.filled(size)
        return size

    def _decline_upgrade(self) -> None:
        """Parse the head again as if it had not offered another protocol (RFC 9110, section 7.8); its body comes next."""
        if self.phase != BODY:
            return
        version = self._parser.get_http_version().encode()
        lines = [self._method + b" " + self._url + b" HTTP/" + version]
        for name, value in self._headers.items():
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                lines.append(b"Connection: " + b", ".join(option for option in options if option.lower() != b"upgrade"))
            elif name not in _UPGRADE_FIELDS:
                lines.append(name + b": " + value)
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    # the parser's calls

    def on_message_begin(self) -> None:
        if self.phase == DEAF:
            return
        self.phase = HEAD
        self._url = b""
        self._headers = {}
        self._header_count = 0
        self._header_bytes = _LINE_BYTES
        self._head_is_new = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        self._header_bytes += len(name) + len(value) + 4  # with ": " and the end of the line
        if self.phase != HEAD:  # a trailer: counted, and nothing here has a use for it
            if self._header_count > self._limits.header_count or self._header_bytes > self._limits.header_bytes:
                self._stop(431, "the trailers of the request are too large")
            return
        name = name.lower()
        value = value.rstrip()  # llhttp leaves it (RFC 9112, section 5: it is no part of the value)
        headers = self._headers
        headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        if self.phase == DEAF:
            return
        limits, headers = self._limits, self._headers
        if self._header_count > limits.header_count or self._header_bytes + len(self._url) > limits.header_bytes:
            self._stop(431, self._head_fault(self._header_bytes + len(self._url)))
        parser = self._parser
        self._method = method = parser.get_method()
        if method == b"CONNECT":
            self._stop(501, "CONNECT is not offered: this is no proxy")
        self._target = target = self._url
        self._keep_alive = keep_alive = parser.should_keep_alive()
        self._http_1_0 = (b"connection" in headers or not keep_alive) and self._is_old()  # else it is HTTP/1.1
        self.phase = BODY
        self._body = b""
        self._body_bytes = 0
        self._chunked = b"transfer-encoding" in headers
        if self._chunked:
            self._granted = min(limits.body_bytes, FREE_BYTES)
            self._check_coding(headers[b"transfer-encoding"])
        length = headers.get(b"content-length")
        self._content_bytes = 0 if length is None else int(length)
        if self._content_bytes > limits.body_bytes:
            self._stop(413, self._body_fault(self._content_bytes))
        host = headers.get(b"host")
        if host != self._host or not target.startswith(b"/"):
            self._check_host(host)
        if why := self._origins.foreign(method, headers):
            self._stop(403, why)
        if b"upgrade" in headers and parser.should_upgrade():
            self._upgrading = True
        elif b"expect" in headers:
            self._expect(headers[b"expect"])

    def _is_old(self) -> bool:
        """Whether this is HTTP/1.0, and not 1.1."""
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):  # 0.9 and 2.0, which the parser takes as well
            self._stop(505, f"HTTP/{version}: {_OTHER_VERSION}")
        return version == "1.0"

    def _check_coding(self, codings: bytes) -> None:
        """RFC 9112, section 6.1."""
        if self._parser.get_http_version() == "1.0":
            self._stop(400, "a request of HTTP/1.0 has no Transfer-Encoding: send a Content-Length")
        *others, last = codings.lower().split(b",")
        if others and last.strip() == b"chunked":  # where it is not the last, the parser knows no end
            self._stop(501, f"Transfer-Encoding {codings.decode('latin-1')!r}: expected chunked alone")

    def _check_host(self, host: bytes | None) -> None:
        """RFC 9112, section 3.2."""
        if host is None and self._parser.get_http_version() != "1.0":
            self._stop(400, "the request has no Host header: expected one")
        if host is not None and _HOST.fullmatch(host) is None:
            self._stop(400, f"Host header: got {host.decode('latin-1')!r}, expected one host, or host:port")
        if not self._url.startswith((b"/", b"*")):
            host = self._headers[b"host"] = self._host_of_url()  # 3.2.2: whatever Host says
        if host is None:
            return
        if why := self._origins.misdirected(host):
            self._stop(421, why)  # RFC 9110, section 7.4
        self._host = host

    def _host_of_url(self) -> bytes:
        """Of a target in absolute form, which is its path from now on."""
        found = _URL.fullmatch(self._url)
        if found is None or _HOST.fullmatch(found[1]) is None:
            shown = shortened(self._url.decode("latin-1"))
            self._stop(400, f"target {shown!r}: expected a path, or http:// or https:// and one host before it")
        self._target = found[2] if found[2].startswith(b"/") else b"/" + found[2]
        return found[1]

    def _expect(self, expectation: bytes) -> None:
        if expectation.lower() != b"100-continue":
            self._stop(417, f"expectation {expectation.decode('latin-1')!r} cannot be met, only 100-continue")
        if (self._content_bytes or self._chunked) and not self._http_1_0:  # RFC 9110, section 10.1.1
            self._sink.continue_expected()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._granted:
            self._check_body()
        if not self._body:
            self._body = body
            return
        if isinstance(self._body, bytes):  # not a list: a chunk of two bytes would take 48
            self._body = bytearray(self._body)
        self._body += body

    def _check_body(self) -> None:
        """Of a body of unknown length, each time that it has grown by a step."""
        if self._body_bytes > self._limits.body_bytes:
            self._stop(413, self._body_fault(self._body_bytes))
        if not self._may_hold_more(self._body_bytes):
            self._stop(503, NO_MEMORY)

    def _may_hold_more(self, size: int) -> bool:
        """Whether more of a body may be held than these bytes."""
        more = min(size + STEP_BYTES, self._limits.body_bytes)
        if self._sink.may_hold(more):
            self._granted = more
            return True
        return False

    def on_message_complete(self) -> None:
        if self.phase == DEAF:
            return
        if self._upgrading:
            self._upgrading = False  # its body is still to come: see _decline_upgrade
            return
        self._complete(self._body)

    def _stop(self, status: int, message: str) -> NoReturn:
        """Leave the parser from within one of its callbacks."""
        self._refusal = status, message
        raise _Stopped

    def _complete(self, body: Buffer) -> None:
        self.requests += 1
        self._body = b""
        self.buffer = None
        self._content = _NOTHING
        keep_alive = self._keep_alive
        self.phase = IDLE if keep_alive else DEAF  # its last, by its own word
        self._sink.arrived(self._method, self._target, self._headers, body, keep_alive, self._http_1_0)

    def _body_fault(self, body_bytes: int) -> str:
        most = self._limits.body_bytes
        return f"request body of {body_bytes} bytes or more: expected at most {most} bytes (server.limits.body_bytes)"

    def _head_fault(self, head_bytes: int) -> str:
        limits = self._limits
        return (
            f"request head of {self._header_count} fields and {head_bytes} bytes: expected at most {limits.header_count} "
            f"fields (server.limits.header_count) and {limits.header_bytes} bytes (server.limits.header_bytes)"
        )


class _Stopped(Exception):
    """Leaves the parser; the reason stands in the reader."""
