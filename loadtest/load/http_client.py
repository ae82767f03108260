"""A thin HTTP/1.1 client for one endpoint: whole requests as prepared bytes, a pool that grows to a cap.

A request takes the connection that became free last; if there is none, it waits in order of arrival while a new connection is
opened, up to the cap. A connection that could not be opened fails the request at the head of the queue.
"""

import asyncio
import re
import time
from collections.abc import Callable, Container, Sequence
from typing import Final

import httptools
import orjson

from loadtest.load.client import CLOSED, Client, Dialled
from loadtest.load.dialler import Dialler
from loadtest.load.request_log import ERROR_EVENT, MALFORMED, OK, RESET, RequestLog

_MOST_HEAD_BYTES: Final = 1 << 20  # as of an answer over HTTP/2
_EVENTS: Final = b"text/event-stream"
_BRACE: Final = ord("{")  # begins most answers and no events: the heads of the others are searched
_BEGINNING: Final = 256  # bytes of a body that show whether it begins so, and what else it is
_MOST_EVENT_BYTES: Final = 16 << 10  # of an event that tells of an error
_EVENT_BEGINNING: Final = 256  # bytes that are kept of a longer one, beside its end
_ERROR_BEGINS: Final = re.compile(rb'\s*\{\s*"error"\s*:\s*(?:"[^"]|\{\s*[^\s}])')
# JSON, with a byte order mark perhaps, which tensors may follow.
_V2_BEGINS: Final = re.compile(rb"(?:\xef\xbb\xbf)?(?!%b)\s*\{" % _ERROR_BEGINS.pattern)
_DONE: Final = b"[DONE]"  # ends the streams of OpenAI's API, whatever became of them


class HttpClient(Client["_HttpConnection"]):
    """Life: as of `Client`. v2: a successful answer is a response of the v2 protocol, not compressed, or none."""

    def __init__(
        self,
        dialler: Dialler,
        *,
        requests: Sequence[bytes],
        v2: bool = False,
        connections: int,
        log: RequestLog,
        on_done: Callable[[int, int], None],
        on_fault: Callable[[BaseException], None],
        on_locked: Callable[[int, str], None],
    ) -> None:
        super().__init__(dialler, connections=connections, log=log, on_done=on_done, on_fault=on_fault, on_locked=on_locked)
        self.requests = requests
        self.v2 = v2
        self._idle: list[_HttpConnection] = []

    def __repr__(self) -> str:
        return (
            f"<HttpClient {len(self.connections)} open ({len(self._idle)} idle), {len(self._connecting)} opening, "
            f"{len(self._waiting)} waiting>"
        )

    def send(self, index: int) -> None:
        while self._idle:
            if self._idle.pop().try_send(index):  # else nothing was sent: to take the next is no second try
                return
        self._waiting.append(index)
        self._connect()

    def expire(self, indices: Container[int]) -> None:
        for connection in [connection for connection in self.connections if connection.index in indices]:
            connection.give_up()
        super().expire(indices)

    def _connection(self) -> "_HttpConnection":
        return _HttpConnection(self)

    def _joined(self, connection: "_HttpConnection") -> None:
        self.free(connection)

    def _not_joined(self, status: int, message: str) -> None:
        if self._waiting:
            self.fail(self._waiting.popleft(), status, message)

    def _attempted(self, attempt: "asyncio.Task[None]") -> None:
        super()._attempted(attempt)
        if self._waiting:
            self._connect()

    # What connections report.

    def free(self, connection: "_HttpConnection") -> None:
        if not self._waiting:
            self._idle.append(connection)
        elif connection.try_send(self._waiting[0]):
            self._waiting.popleft()

    def lost(self, connection: "_HttpConnection") -> None:
        if connection in self._idle:
            self._idle.remove(connection)
        super().lost(connection)


class _HttpConnection(Dialled):
    """One connection. index: of the request that it waits for; -1 if there is none."""

    __slots__ = ("_body", "_client", "_head", "_in_events", "_in_head", "_parser", "index")

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""  # what is kept of it: of events the end, of a refusal and for v2 the beginning
        # of the answer that comes, as far as its body: in case it ends with the connection. To note its headers as they are
        # parsed would double what an answer costs here
        self._head = b""
        self._in_head = True
        self._in_events = False
        self.index = -1

    def try_send(self, index: int) -> bool:
        """Whether it was sent: not on a connection that ended, as its protocol may be told later, or never."""
        if self._transport.is_closing():
            return False
        client = self._client
        log = client.log
        self.index = index
        request = client.requests[log.payload[index]]  # it may be signed here, which is send lag
        log.sent[index] = time.monotonic_ns() - client.start_ns
        self._transport.write(request)
        return True

    def give_up(self) -> None:
        self.index = -1
        self.abort()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:  # raised by what the parser called, not by what it read
            self._client.on_fault(exc.__context__ or exc)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._broken(str(exc))
        else:
            if self._in_head and len(self._head) > _MOST_HEAD_BYTES:
                self._broken(f"its headers are longer than {_MOST_HEAD_BYTES >> 20} MiB")

    def _broken(self, message: str) -> None:
        self.abort()
        self._end(lambda index: self._client.fail(index, MALFORMED, message))

    # What httptools calls while it parses.

    def on_body(self, body: bytes) -> None:
        if self._in_head:
            self._in_head = False
            self._in_events = body[0] != _BRACE and _EVENTS in self._head[: len(self._head) - len(body)].lower()
        if self._in_events:
            self._body += body
            if len(self._body) > _MOST_EVENT_BYTES + _EVENT_BEGINNING:
                self._body = _end_of(self._body)
        elif len(self._body) < _BEGINNING and (self._client.v2 or self._parser.get_status_code() >= 300):
            self._body += body

    def on_message_complete(self) -> None:
        index = self.index
        if index < 0:
            self.abort()  # an answer to nothing, or to a request that was given up
            return
        if self._parser.get_status_code() < 200:
            return  # an interim response: the real one follows
        self.index, self._head, self._in_head = -1, b"", True
        if not self._parser.should_keep_alive():
            self._transport.close()
        else:
            self._client.free(self)
        self._answered(index)

    def _answered(self, index: int) -> None:
        status = self._parser.get_status_code()
        body, self._body = self._body, b""
        if status >= 300:
            self._client.fail(index, status, body.decode(errors="replace"))
        elif _V2_BEGINS.match(body) if self._client.v2 else not body:
            self._client.on_done(index, OK)
        elif self._client.v2:
            words = body[:_BEGINNING].decode(errors="replace") or "an empty body"
            self._client.fail(index, MALFORMED, f"no v2 response: {words}")
        elif (error := _last_error(body)) is not None:
            self._client.fail(index, ERROR_EVENT, error)
        else:
            self._client.on_done(index, OK)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.ended(exc)
        if self.index >= 0 and exc is None and _Framing(self._head).ends_with_connection:
            self._end(self._answered)
        else:
            self._end(lambda index: self._client.fail(index, RESET, str(exc or CLOSED)))

    def _end(self, tell: Callable[[int], None]) -> None:
        """tell: what became of the request that it carries."""
        index, self.index = self.index, -1
        try:
            self._client.lost(self)
            if index >= 0:
                tell(index)
        except Exception as fault:
            self._client.on_fault(fault)


class _Framing:
    """How an answer ends of which `came` is the head, at least (RFC 9112, 6.3)."""

    def __init__(self, came: bytes) -> None:
        self.ends_with_connection = self._told = False
        httptools.HttpResponseParser(self).feed_data(came)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._told |= name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())

    def on_headers_complete(self) -> None:
        self.ends_with_connection, self._told = not self._told, False

    def on_message_complete(self) -> None:  # of an interim response: the real one follows
        self.ends_with_connection = False


def _end_of(events: bytes) -> bytes:
    """The end of a stream, behind the beginning of the event within which that begins."""
    at = len(events) - _MOST_EVENT_BYTES
    begun = max(events.rfind(b"\n\n", 0, at + 1), events.rfind(b"\n\r\n", 0, at + 2)) + 1  # or where that begins
    return events[begun : min(at, begun + _EVENT_BEGINNING)] + events[at:]


def _last_error(events: bytes) -> str | None:
    """What the last event tells of an error; None if it tells of none. events: the end of a stream (HTML, 9.2.6).

    It is an object that has nothing but an `error`, as the gateway and Triton write it, or one that is text or an object, and
    not empty, as Text Generation Inference does. A [DONE] behind it, as of vLLM, is none.
    """
    data: list[bytes] = []
    for line in reversed(events.splitlines()):
        if line.startswith(b"data:"):
            data.insert(0, line.removeprefix(b"data:"))
        elif data and not line:
            if b"".join(data).strip() != _DONE:
                break
            data = []
    last = b"\n".join(data)
    try:
        told = orjson.loads(last)
    except orjson.JSONDecodeError:  # as where the middle of it was not kept
        return last[:_EVENT_BEGINNING].decode(errors="replace") if _ERROR_BEGINS.match(last) else None
    error = told.get("error") if isinstance(told, dict) else None
    if error is None or not (len(told) == 1 or (error and isinstance(error, str | dict))):
        return None
    return error if isinstance(error, str) else orjson.dumps(error).decode()
