"""What the clients of both protocols share: their connections, and the requests that wait for one.

Nothing is retried: what a user would see is what counts. Everything that the event loop calls here ends in a request that is
done or failed, or in `on_fault`: what we did wrong ends the run, and is never counted as the server's doing.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Final, Generic, TypeVar

from gateway.process.console import printable
from loadtest.load.dialler import Dialler
from loadtest.load.request_log import GRPC, REFUSED, RESET, RequestLog, status_name

_SAMPLE_CHARACTERS: Final = 300
_LOCKED: Final = {401: 401, 403: 403, GRPC + 16: 401, GRPC + 7: 403}
_CLOSE_S: Final = 1.0  # for connections to end: they have been aborted, and nothing depends on it
CLOSED: Final = "the connection was closed before the answer"


class Dialled(asyncio.Protocol, ABC):
    """One of a client's connections."""

    __slots__ = ("_transport",)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._transport = transport

    @property
    def is_closing(self) -> bool:
        """Also before this protocol is told."""
        return self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    @abstractmethod
    def give_up(self) -> None:
        """Abort it, and forget the requests that it carries: nothing is reported of them."""


C = TypeVar("C", bound=Dialled)


class Client(ABC, Generic[C]):
    """Life: open, then `send` any number of times, then close. All on one event loop."""

    def __init__(
        self,
        dialler: Dialler,
        *,
        connections: int,
        log: RequestLog,
        on_done: Callable[[int, int], None],
        on_fault: Callable[[BaseException], None],
        on_locked: Callable[[int, str], None],
    ) -> None:
        """connections: the most at once that take requests. on_done: gets the index and its status, once per `send`, never
        inside it.

        on_fault: gets what went wrong in here. on_locked: why the server does not let us in, whatever we send: 401 or 403 with
        its words, or 0 with what TLS failed of.
        """
        self._dialler = dialler
        self._cap = connections
        self.log = log
        self.on_done = on_done
        self.on_fault = on_fault
        self.on_locked = on_locked
        self.error_samples: dict[str, str] = {}
        self.start_ns = 0  # of the run; set before the first send
        self.connections: dict[C, None] = {}  # a set in the order in which they were opened
        self.leaving: set[C] = set()  # those that take no more requests, and end with the answers that they owe
        self.most_connections = 0
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[int] = deque()
        self._closed = False
        self._all_lost = asyncio.Event()  # after close

    async def open(self, connections: int) -> None:
        """Open some connections ahead. A target that is down is no error yet."""
        for _ in range(min(connections, self._cap)):
            self._connect()
        if self._connecting:
            await asyncio.wait(self._connecting)

    @abstractmethod
    def send(self, index: int) -> None:
        """Send that request of the log, or have it wait for a connection."""

    def expire(self, indices: Container[int]) -> None:
        """Take back the oldest requests, which their caller has given up; `on_done` is not called for them."""
        while self._waiting and self._waiting[0] in indices:
            self._waiting.popleft()

    async def close(self) -> None:
        """Abort everything; takes a second at most."""
        self._closed = True
        for task in self._connecting:
            task.cancel()
        for connection in self.connections:
            connection.give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                if self._connecting:
                    await asyncio.wait(self._connecting)
                if self.connections:
                    await self._all_lost.wait()

    # Connecting.

    @abstractmethod
    def _connection(self) -> C:
        """A new one, not connected yet."""

    @abstractmethod
    def _joined(self, connection: C) -> None:
        """It is open."""

    @abstractmethod
    def _not_joined(self, status: int, message: str) -> None:
        """One could not be opened."""

    def _connect(self) -> None:
        if not self._closed and self._staying + len(self._connecting) < self._cap:
            task = asyncio.ensure_future(self._open_one())
            self._connecting.add(task)
            task.add_done_callback(self._attempted)

    @property
    def _staying(self) -> int:
        return len(self.connections) - len(self.leaving)

    def _attempted(self, attempt: "asyncio.Task[None]") -> None:
        self._connecting.discard(attempt)

    async def _open_one(self) -> None:
        try:
            try:
                connection = await self._dialler.dial(self._connection)
            except OSError as exc:
                self.ended(exc)
                self._not_joined(REFUSED, str(exc) or "no connection within the timeout")
                return
            if connection.is_closing:  # opened, and closed at once: its end may have been told before we had it
                self._not_joined(RESET, CLOSED)
                return
            self.connections[connection] = None
            self.most_connections = max(self.most_connections, self._staying)
            self._joined(connection)
        except Exception as exc:  # of a task nobody would see it
            self.on_fault(exc)

    # What connections report.

    def lost(self, connection: C) -> None:
        self.connections.pop(connection, None)
        self.leaving.discard(connection)
        if self._closed and not self.connections:
            self._all_lost.set()
        elif self._waiting:
            self._connect()

    def ended(self, exc: BaseException | None) -> None:
        """A connection was, or could not be made."""
        if words := self._dialler.failed(exc):
            self.on_locked(0, words)

    def fail(self, index: int, status: int, message: str) -> None:
        if status in _LOCKED:
            self.on_locked(_LOCKED[status], message)
        if (kind := status_name(status)) not in self.error_samples:
            self.error_samples[kind] = printable(" ".join(message[:_SAMPLE_CHARACTERS].split()))
        self.on_done(index, status)
