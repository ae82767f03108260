"""A thin gRPC client for unary calls of one method: prepared messages over a few HTTP/2 connections.

grpc.aio costs about 240 µs of processor time per call (measured 2026-11, 4 000 calls/s fill a core); this one about a tenth,
which is also its send lag. It keeps flow control, settings, pings and GOAWAY, and leaves everything else of gRPC out: no
retries, no compression, no streaming, no reading of the answer's message. What the event loop calls here ends as it does in
`loadtest.load.http_client`: in a request that is done or failed, or in `on_fault`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Final
from urllib.parse import unquote

from gateway.wire.http2_client import ClientConnection
from gateway.wire.http2_frames import CANCEL
from gateway.wire.http2_headers import Headers, header_block
from loadtest.load.dialler import Dialler
from loadtest.load.http_client import CLOSE_S, CLOSED
from loadtest.load.request_log import GRPC, MALFORMED, OK, REFUSED, RESET, RequestLog, status_name

SERVICE: Final = "inference.GRPCInferenceService"
METHOD: Final = "ModelInfer"
_SAMPLE_CHARACTERS: Final = 300
_UNKNOWN: Final = 2  # the gRPC code for codes that nobody knows
_LAST_CODE: Final = 16


class GrpcClient:
    """Life: open, then `send` any number of times, then close. All on one event loop."""

    def __init__(
        self,
        dialler: Dialler,
        *,
        authority: str,
        tls: bool,
        requests: Sequence[bytes],
        metadata: Sequence[tuple[str, str]],
        connections: int,
        log: RequestLog,
        on_done: Callable[[int, int], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        """requests: messages. on_done: gets the index and its status, once per `send`, never inside it.

        on_fault: gets what went wrong in here.
        """
        self._dialler = dialler
        self._most = connections
        headers = [
            (":method", "POST"),
            (":scheme", "https" if tls else "http"),
            (":path", f"/{SERVICE}/{METHOD}"),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            ("user-agent", "loadtest"),
            *metadata,
        ]
        self.headers = header_block(*((name.encode(), value.encode()) for name, value in headers))
        # A gRPC message on the wire: not compressed, its length, itself.
        self.messages = [b"\0" + len(message).to_bytes(4, "big") + message for message in requests]
        self.log = log
        self.on_done = on_done
        self.on_fault = on_fault
        self.error_samples: dict[str, str] = {}
        self.start_ns = 0  # of the run; set before the first send
        self._connections: list[_GrpcConnection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[int] = deque()
        self._turn = 0
        self._closed = False
        self._all_lost = asyncio.Event()  # after close
        self.most_connections = 0

    def __repr__(self) -> str:
        calls = sum(len(connection.indices) for connection in self._connections)
        return f"<GrpcClient {len(self._connections)} open, {calls} calls, {len(self._waiting)} waiting>"

    async def open(self, connections: int) -> None:
        """Open all connections ahead. A target that is down is no error yet."""
        for _ in range(self._most):
            self._connect()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def send(self, index: int) -> None:
        count = len(self._connections)
        for _ in range(count):
            self._turn = (self._turn + 1) % count
            connection = self._connections[self._turn]
            if connection.has_room:
                connection.send(index)
                return
        self._waiting.append(index)
        self._connect()

    def expire(self, indices: Container[int]) -> None:
        """Take back the oldest requests, which their caller has given up; `on_done` is not called for them."""
        for connection in self._connections:
            connection.cancel(indices)
        while self._waiting and self._waiting[0] in indices:
            self._waiting.popleft()

    async def close(self) -> None:
        """Abort everything; takes CLOSE_S at most."""
        self._closed = True
        for task in self._connecting:
            task.cancel()
        for connection in self._connections:
            connection.indices.clear()
            connection.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._connecting:
                    await asyncio.wait(self._connecting)
                if self._connections:
                    await self._all_lost.wait()

    def _connect(self) -> None:
        if not self._closed and len(self._connections) + len(self._connecting) < self._most:
            task = asyncio.ensure_future(self._open_one())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _open_one(self) -> None:
        try:
            try:
                connection = await self._dialler.dial(lambda: _GrpcConnection(self))
            except OSError as exc:
                if not self._connections:
                    self._fail_waiting(REFUSED, str(exc) or "no connection within the timeout")
                return
            if connection.is_closing:  # opened, and closed at once
                self._fail_waiting(RESET, CLOSED)
                return
            self._connections.append(connection)
            self.most_connections = max(self.most_connections, len(self._connections))
            self.room(connection)
        except Exception as exc:  # of a task nobody would see it
            self.on_fault(exc)

    def _fail_waiting(self, status: int, message: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for index in waiting:
            self.fail(index, status, message)

    # What connections report.

    def room(self, connection: "_GrpcConnection") -> None:
        while self._waiting and connection.has_room:
            connection.send(self._waiting.popleft())

    def lost(self, connection: "_GrpcConnection") -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if self._closed and not self._connections:
            self._all_lost.set()
        elif self._waiting:
            self._connect()

    def fail(self, index: int, status: int, message: str) -> None:
        self.error_samples.setdefault(status_name(status), message[:_SAMPLE_CHARACTERS])
        self.on_done(index, status)


class _GrpcConnection(asyncio.Protocol):
    """One HTTP/2 connection: the transport, and what its answers mean. indices: stream -> the request that it carries."""

    def __init__(self, client: GrpcClient) -> None:
        self._client = client
        self._core = ClientConnection(self, self._flush)
        self.indices: dict[int, int] = {}
        self._going_away = False

    @property
    def has_room(self) -> bool:
        """Not on a connection that ended, either: its protocol may be told later."""
        return len(self.indices) < self._core.most_streams and not self._going_away and not self._transport.is_closing()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._transport = transport
        self._flush()

    def abort(self) -> None:
        self._transport.abort()

    def send(self, index: int) -> None:
        client, log = self._client, self._client.log
        message = client.messages[log.payload[index]]
        log.sent[index] = time.monotonic_ns() - client.start_ns
        self.indices[self._core.ask(client.headers, message)] = index

    def cancel(self, indices: Container[int]) -> None:
        # Streams are in the order of their requests, the oldest first: all of them at each sweep would be too many.
        for stream in [stream for stream, _ in takewhile(lambda each: each[1] in indices, self.indices.items())]:
            self._core.cancel(stream, CANCEL)
            self._forget(stream)
        self._client.room(self)

    def _flush(self) -> None:
        """At once: a request has been sent when that is stamped."""
        self._transport.write(b"".join(self._core.take()))

    def _forget(self, stream: int) -> int | None:
        self._core.drop(stream)
        index = self.indices.pop(stream, None)
        if self._going_away and not self.indices:
            self._transport.close()
        return index

    def data_received(self, data: bytes) -> None:
        core = self._core
        try:
            core.receive(data)
            if core.aborted:
                raise ValueError(core.fault)
            if core.out:
                self._flush()
        except (ValueError, IndexError) as exc:
            self.abort()
            self._end(MALFORMED, str(exc))
        except Exception as exc:
            self._client.on_fault(exc)

    # what the answers are

    def headers(self, stream: int, headers: Headers, ended: bool) -> None:
        if not ended:
            status = headers.get(b":status", b"200")
            if status != b"200":
                self._failed(stream, _http_status(status), "not a gRPC answer")
            return
        code = headers.get(b"grpc-status")
        if code == b"0":
            index = self._forget(stream)
            if index is not None:
                self._client.room(self)
                self._client.on_done(index, OK)
        elif code is None:
            status = headers.get(b":status", b"200")
            self._failed(stream, _http_status(status) if status != b"200" else MALFORMED, "no gRPC status")
        else:
            number = int(code) if 0 < int(code) <= _LAST_CODE else _UNKNOWN
            self._failed(stream, GRPC + number, unquote(headers.get(b"grpc-message", b"").decode()))

    def data_ended(self, stream: int) -> None:
        self._failed(stream, MALFORMED, "the answer ended without a gRPC status")

    def reset(self, stream: int, code: int) -> None:
        self._failed(stream, RESET, f"the server reset the stream, HTTP/2 error {code}")

    def going_away(self, last: int) -> None:
        self._going_away = True
        for stream in [stream for stream in self.indices if stream > last]:
            self._failed(stream, RESET, "the server is going away")
        if not self.indices:
            self._transport.close()

    def room(self) -> None:
        self._client.room(self)

    def _failed(self, stream: int, status: int, message: str) -> None:
        index = self._forget(stream)
        if index is not None:
            self._client.room(self)
            self._client.fail(index, status, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._core.lost()
        self._end(RESET, str(exc or CLOSED))

    def _end(self, status: int, message: str) -> None:
        indices, self.indices = self.indices, {}
        try:
            self._client.lost(self)
            for index in indices.values():
                self._client.fail(index, status, message)
        except Exception as fault:
            self._client.on_fault(fault)


def _http_status(text: bytes) -> int:
    status = int(text)
    return status if 100 <= status <= 999 else MALFORMED
