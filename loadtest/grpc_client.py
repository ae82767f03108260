"""A thin gRPC client for unary calls of one method: prepared messages over a few HTTP/2 connections.

grpc.aio costs about 240 µs of processor time per call (measured 2026-11, 4 000 calls/s fill a core); this one about a tenth,
which is also its send lag. It keeps flow control, settings, pings and GOAWAY, and leaves everything else of gRPC out: no
retries, no compression, no streaming, no reading of the answer's message. What the event loop calls here ends as it does in
`loadtest.http_client`: in a request that is done or failed, or in `on_fault`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Final
from urllib.parse import unquote

from loadtest import http2
from loadtest.dialler import Dialler
from loadtest.http_client import CLOSE_S, CLOSED
from loadtest.recorder import GRPC, MALFORMED, OK, REFUSED, RESET, RequestLog, status_name

SERVICE: Final = "inference.GRPCInferenceService"
METHOD: Final = "ModelInfer"
_SAMPLE_CHARACTERS: Final = 300
_CREDIT_AFTER: Final = 1 << 30  # of received bytes; the window is twice that
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
        """requests: messages. on_done: gets the row and its status, once per `send`, never inside it.

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
        self.headers = http2.encode_headers(headers)
        # A gRPC message on the wire: not compressed, its length, itself.
        self.messages = [b"\0" + len(message).to_bytes(4, "big") + message for message in requests]
        self.log = log
        self.on_done = on_done
        self.on_fault = on_fault
        self.error_samples: dict[str, str] = {}
        self.start_ns = 0  # of the run; set before the first send
        self._connections: list[_Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._waiting: deque[int] = deque()
        self._turn = 0
        self._closed = False
        self._all_lost = asyncio.Event()  # after close
        self.most_connections = 0

    def __repr__(self) -> str:
        calls = sum(len(connection.rows) for connection in self._connections)
        return f"<GrpcClient {len(self._connections)} open, {calls} calls, {len(self._waiting)} waiting>"

    async def open(self, connections: int) -> None:
        """Open all connections ahead. A target that is down is no error yet."""
        for _ in range(self._most):
            self._connect()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def send(self, row: int) -> None:
        count = len(self._connections)
        for _ in range(count):
            self._turn = (self._turn + 1) % count
            connection = self._connections[self._turn]
            if connection.has_room:
                connection.send(row)
                return
        self._waiting.append(row)
        self._connect()

    def expire(self, rows: Container[int]) -> None:
        """Take back the oldest requests, which their caller has given up; `on_done` is not called for them."""
        for connection in self._connections:
            connection.cancel(rows)
        while self._waiting and self._waiting[0] in rows:
            self._waiting.popleft()

    async def close(self) -> None:
        """Abort everything; takes CLOSE_S at most."""
        self._closed = True
        for task in self._connecting:
            task.cancel()
        for connection in self._connections:
            connection.rows.clear()
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
                connection = await self._dialler.dial(lambda: _Connection(self))
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
        for row in waiting:
            self.fail(row, status, message)

    # What connections report.

    def room(self, connection: "_Connection") -> None:
        while self._waiting and connection.has_room:
            connection.send(self._waiting.popleft())

    def lost(self, connection: "_Connection") -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if self._closed and not self._connections:
            self._all_lost.set()
        elif self._waiting:
            self._connect()

    def fail(self, row: int, status: int, message: str) -> None:
        self.error_samples.setdefault(status_name(status), message[:_SAMPLE_CHARACTERS])
        self.on_done(row, status)


class _Connection(asyncio.Protocol):
    """One HTTP/2 connection. rows: the request that each open stream carries."""

    def __init__(self, client: GrpcClient) -> None:
        self._client = client
        self._reader = http2.FrameReader()
        self._next_stream = 1
        self.rows: dict[int, int] = {}
        # per connection, the peer's limits
        self._most_streams = 1 << 31
        self._frame_size = http2.DEFAULT_FRAME_SIZE
        self._stream_window = http2.DEFAULT_WINDOW
        self._window = http2.DEFAULT_WINDOW
        self._going_away = False
        # per message that did not fit into the windows: stream -> (what is left, its stream's window), in order
        self._unsent: dict[int, tuple[bytes, int]] = {}
        # per header block that continues in the next frame
        self._block = b""
        self._block_flags = 0
        self._uncredited = 0

    @property
    def has_room(self) -> bool:
        """Not on a connection that ended, either: its protocol may be told later."""
        return len(self.rows) < self._most_streams and not self._going_away and not self._transport.is_closing()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._transport = transport
        transport.write(http2.PREFACE + http2.opening({http2.ENABLE_PUSH: 0}))

    def abort(self) -> None:
        self._transport.abort()

    def send(self, row: int) -> None:
        client, log = self._client, self._client.log
        stream = self._next_stream
        self._next_stream += 2
        self.rows[stream] = row
        message = client.messages[log.payload[row]]
        size = len(message)
        log.sent[row] = time.monotonic_ns() - client.start_ns
        head = http2.frame(http2.HEADERS, http2.END_HEADERS, stream, client.headers)
        if size <= self._window and size <= self._stream_window and size <= self._frame_size and not self._unsent:
            self._window -= size
            self._transport.write(head + http2.frame(http2.DATA, http2.END_STREAM, stream, message))
        else:
            self._transport.write(head)
            self._unsent[stream] = message, self._stream_window
            self._send_rest()

    def _send_rest(self) -> None:
        """Send of the waiting messages what the windows let through, oldest first."""
        for stream, (rest, window) in list(self._unsent.items()):
            while rest and (size := min(len(rest), window, self._window, self._frame_size)) > 0:
                chunk, rest = rest[:size], rest[size:]
                self._window -= size
                window -= size
                self._transport.write(http2.frame(http2.DATA, 0 if rest else http2.END_STREAM, stream, chunk))
            if rest:
                self._unsent[stream] = rest, window
            else:
                del self._unsent[stream]

    def cancel(self, rows: Container[int]) -> None:
        # Streams are in the order of their requests, the oldest first: all of them at each sweep would be too many.
        for stream in [stream for stream, _ in takewhile(lambda each: each[1] in rows, self.rows.items())]:
            self._transport.write(http2.frame(http2.RST_STREAM, 0, stream, http2.CANCEL.to_bytes(4, "big")))
            self._forget(stream)
        self._client.room(self)

    def _forget(self, stream: int) -> int | None:
        self._unsent.pop(stream, None)
        row = self.rows.pop(stream, None)
        if self._going_away and not self.rows:
            self._transport.close()
        return row

    def data_received(self, data: bytes) -> None:
        try:
            for kind, flags, stream, payload in self._reader.feed(data):
                self._handle(kind, flags, stream, payload)
        except (ValueError, IndexError) as exc:
            self.abort()
            self._end(MALFORMED, str(exc))
        except Exception as exc:
            self._client.on_fault(exc)

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == http2.DATA:
            self._uncredited += len(payload)
            if self._uncredited > _CREDIT_AFTER:
                self._transport.write(http2.frame(http2.WINDOW_UPDATE, 0, 0, self._uncredited.to_bytes(4, "big")))
                self._uncredited = 0
            if flags & http2.END_STREAM:
                self._failed(stream, MALFORMED, "the answer ended without a gRPC status")
        elif kind == http2.HEADERS:
            block = http2.unpadded(flags, payload)
            if flags & http2.END_HEADERS:
                self._headers(stream, block, ended=bool(flags & http2.END_STREAM))
            else:
                self._block, self._block_flags = block, flags
        elif kind == http2.CONTINUATION:
            self._block += payload
            if flags & http2.END_HEADERS:
                self._headers(stream, self._block, ended=bool(self._block_flags & http2.END_STREAM))
        elif kind == http2.RST_STREAM:
            self._failed(stream, RESET, f"the server reset the stream, HTTP/2 error {int.from_bytes(payload, 'big')}")
        elif kind == http2.WINDOW_UPDATE:
            self._widen(stream, int.from_bytes(payload, "big"))
        elif kind == http2.SETTINGS and not flags & http2.ACK:
            self._settle(payload)
        elif kind == http2.PING and not flags & http2.ACK:
            self._transport.write(http2.frame(http2.PING, http2.ACK, 0, payload))
        elif kind == http2.GOAWAY:
            self._go_away(int.from_bytes(payload[:4], "big"))

    def _headers(self, stream: int, block: bytes, *, ended: bool) -> None:
        headers = http2.decode_headers(block)
        if not ended:
            status = headers.get(":status", "200")
            if status != "200":
                self._failed(stream, _http_status(status), "not a gRPC answer")
            return
        code = headers.get("grpc-status")
        if code == "0":
            row = self._forget(stream)
            if row is not None:
                self._client.room(self)
                self._client.on_done(row, OK)
        elif code is None:
            status = headers.get(":status", "200")
            self._failed(stream, _http_status(status) if status != "200" else MALFORMED, "no gRPC status")
        else:
            number = int(code) if 0 < int(code) <= _LAST_CODE else _UNKNOWN
            self._failed(stream, GRPC + number, unquote(headers.get("grpc-message", "")))

    def _failed(self, stream: int, status: int, message: str) -> None:
        row = self._forget(stream)
        if row is not None:
            self._client.room(self)
            self._client.fail(row, status, message)

    def _widen(self, stream: int, size: int) -> None:
        if stream == 0:
            self._window += size
        elif stream in self._unsent:
            rest, window = self._unsent[stream]
            self._unsent[stream] = rest, window + size
        if self._unsent:
            self._send_rest()

    def _settle(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            key, value = int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
            if key == http2.MAX_CONCURRENT_STREAMS:
                self._most_streams = value
            elif key == http2.MAX_FRAME_SIZE:
                self._frame_size = value
            elif key == http2.INITIAL_WINDOW_SIZE:
                # RFC 9113, 6.9.2: it changes the windows of open streams too.
                change, self._stream_window = value - self._stream_window, value
                self._unsent = {stream: (rest, window + change) for stream, (rest, window) in self._unsent.items()}
        self._transport.write(http2.frame(http2.SETTINGS, http2.ACK, 0))
        self._send_rest()
        self._client.room(self)

    def _go_away(self, last_stream: int) -> None:
        self._going_away = True
        for stream in [stream for stream in self.rows if stream > last_stream]:
            self._failed(stream, RESET, "the server is going away")
        if not self.rows:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(RESET, str(exc or CLOSED))

    def _end(self, status: int, message: str) -> None:
        rows, self.rows = self.rows, {}
        try:
            self._client.lost(self)
            for row in rows.values():
                self._client.fail(row, status, message)
        except Exception as fault:
            self._client.on_fault(fault)


def _http_status(text: str) -> int:
    status = int(text)
    return status if 100 <= status <= 999 else MALFORMED
