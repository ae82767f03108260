"""A thin HTTP/1.1 client for one endpoint: whole requests as prepared bytes, a pool that grows to a cap.

A request takes the connection that became free last; if there is none, it waits in order of arrival while a new connection is
opened, up to the cap. A connection that could not be opened fails the request at the head of the queue. Nothing is retried:
what a user would see is what counts.

Everything that the event loop calls here ends in a request that is done or failed, or in `on_fault`: what we did wrong ends the
run, and is never counted as the server's doing.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Final

import httptools

from loadtest.load.dialler import Dialler
from loadtest.load.request_log import MALFORMED, OK, REFUSED, RESET, RequestLog, status_name

_SAMPLE_BYTES: Final = 300
CLOSE_S: Final = 1.0  # for connections to end: they have been aborted, and nothing depends on it
CLOSED: Final = "the connection was closed before the answer"


class HttpClient:
    """Life: open, then `send` any number of times, then close. All on one event loop."""

    def __init__(
        self,
        dialler: Dialler,
        *,
        requests: Sequence[bytes],
        connections: int,
        log: RequestLog,
        on_done: Callable[[int, int], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        """on_done: gets the index and its status, once per `send`, never inside it. on_fault: gets what went wrong in here."""
        self._dialler = dialler
        self._cap = connections
        self.requests = requests
        self.log = log
        self.on_done = on_done
        self.on_fault = on_fault
        self.error_samples: dict[str, str] = {}
        self.start_ns = 0  # of the run; set before the first send
        self._idle: list[_HttpConnection] = []
        self._connections: set[_HttpConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[int] = deque()
        self._closed = False
        self._all_lost = asyncio.Event()  # after close
        self.most_connections = 0

    def __repr__(self) -> str:
        return (
            f"<HttpClient {len(self._connections)} open ({len(self._idle)} idle), {len(self._connecting)} opening, "
            f"{len(self._waiting)} waiting>"
        )

    async def open(self, connections: int) -> None:
        """Open some connections ahead. A target that is down is no error yet."""
        for _ in range(min(connections, self._cap)):
            self._connect()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def send(self, index: int) -> None:
        while self._idle:
            if self._idle.pop().try_send(index):  # else nothing was sent: to take the next is no second try
                return
        self._waiting.append(index)
        self._connect()

    def expire(self, indices: Container[int]) -> None:
        """Take back the oldest requests, which their caller has given up; `on_done` is not called for them."""
        for connection in [connection for connection in self._connections if connection.index in indices]:
            connection.index = -1
            connection.abort()
        while self._waiting and self._waiting[0] in indices:
            self._waiting.popleft()

    async def close(self) -> None:
        """Abort everything; takes CLOSE_S at most."""
        self._closed = True
        for task in self._connecting:
            task.cancel()
        for connection in self._connections:
            connection.index = -1
            connection.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._connecting:
                    await asyncio.wait(self._connecting)
                if self._connections:
                    await self._all_lost.wait()

    def _connect(self) -> None:
        if not self._closed and len(self._connections) + len(self._connecting) < self._cap:
            task = asyncio.ensure_future(self._open_one())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _open_one(self) -> None:
        try:
            try:
                connection = await self._dialler.dial(lambda: _HttpConnection(self))
            except OSError as exc:
                self._fail_next(REFUSED, str(exc) or "no connection within the timeout")
            else:
                if connection.is_closing:  # opened, and closed at once: its end may have been told before we had it
                    self._fail_next(RESET, CLOSED)
                else:
                    self._connections.add(connection)
                    self.most_connections = max(self.most_connections, len(self._connections))
                    self.free(connection)
        except Exception as exc:  # of a task nobody would see it
            self.on_fault(exc)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._connect)  # after this task has left the count

    def _fail_next(self, status: int, message: str) -> None:
        if self._waiting:
            self.fail(self._waiting.popleft(), status, message)

    # What connections report.

    def free(self, connection: "_HttpConnection") -> None:
        if not self._waiting:
            self._idle.append(connection)
        elif connection.try_send(self._waiting[0]):
            self._waiting.popleft()

    def lost(self, connection: "_HttpConnection") -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._closed and not self._connections:
            self._all_lost.set()
        elif self._waiting:
            self._connect()

    def fail(self, index: int, status: int, message: str) -> None:
        self.error_samples.setdefault(status_name(status), message[:_SAMPLE_BYTES])
        self.on_done(index, status)


class _HttpConnection(asyncio.Protocol):
    """One connection. index: of the request that it waits for; -1 if there is none."""

    __slots__ = ("_body", "_client", "_parser", "_transport", "index")

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self.index = -1

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._transport = transport

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def try_send(self, index: int) -> bool:
        """Whether it was sent: not on a connection that ended, as its protocol may be told later, or never."""
        if self._transport.is_closing():
            return False
        client = self._client
        log = client.log
        self.index = index
        log.sent[index] = time.monotonic_ns() - client.start_ns
        self._transport.write(client.requests[log.payload[index]])
        return True

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:  # raised by what the parser called, not by what it read
            self._client.on_fault(exc.__context__ or exc)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self.abort()
            self._end(MALFORMED, str(exc))

    # What httptools calls while it parses.

    def on_body(self, body: bytes) -> None:
        if not self._body and self._parser.get_status_code() >= 300:
            self._body = body

    def on_message_complete(self) -> None:
        index = self.index
        if index < 0:
            self.abort()  # an answer to nothing, or to a request that was given up
            return
        status = self._parser.get_status_code()
        if status < 200:
            return  # an interim response: the real one follows
        self.index = -1
        client = self._client
        if not self._parser.should_keep_alive():
            self._transport.close()
        else:
            client.free(self)
        if status < 300:
            client.on_done(index, OK)
        else:
            body, self._body = self._body, b""
            client.fail(index, status, body.decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(RESET, str(exc or CLOSED))

    def _end(self, status: int, message: str) -> None:
        index, self.index = self.index, -1
        try:
            self._client.lost(self)
            if index >= 0:
                self._client.fail(index, status, message)
        except Exception as fault:
            self._client.on_fault(fault)
