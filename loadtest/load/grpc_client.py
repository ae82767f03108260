"""A thin gRPC client for unary calls of one method: prepared messages over a few HTTP/2 connections.

grpc.aio costs about 240 µs of processor time per call (measured 2026-11, 4 000 calls/s fill a core); this one about a tenth,
which is also its send lag. It keeps flow control, settings, pings and GOAWAY, and leaves everything else of gRPC out: no
retries, no compression, no streaming, no reading of the answer's message.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from itertools import takewhile
from typing import Final
from urllib.parse import unquote

from gateway.wire.http2_client import ClientConnection
from gateway.wire.http2_frames import CANCEL
from gateway.wire.http2_headers import Headers, header_block
from loadtest.load.client import CLOSED, Client, Dialled
from loadtest.load.dialler import Dialler
from loadtest.load.request_log import GRPC, MALFORMED, OK, RESET, RequestLog

SERVICE: Final = "inference.GRPCInferenceService"
METHOD: Final = "ModelInfer"
_UNKNOWN: Final = 2  # the gRPC code for codes that nobody knows
_LAST_CODE: Final = 16
_NO_HTTP2: Final = (b"HTTP/", b"\x15\x03")  # an answer of HTTP/1, such as a port of TLS may give, and an alert of TLS
_PAUSE_NS: Final = 100_000_000  # after a connection that came to nothing, while others take requests; then twice as long
_MOST_PAUSE_NS: Final = 64 * _PAUSE_NS


class GrpcClient(Client["_GrpcConnection"]):
    """Life: as of `Client`. Requests take its connections in turn, and have those that ended replaced.

    One that is opened beside others is in turn once the server has said something over it: a server that lets no more in may
    say so only by closing what it accepted.
    """

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
        on_locked: Callable[[int, str], None],
    ) -> None:
        """requests: messages. connections: all of them are opened ahead."""
        super().__init__(dialler, connections=connections, log=log, on_done=on_done, on_fault=on_fault, on_locked=on_locked)
        headers = {
            ":method": "POST",
            ":scheme": "https" if tls else "http",
            ":path": f"/{SERVICE}/{METHOD}",
            ":authority": authority,
            "content-type": "application/grpc",
            "te": "trailers",
            "user-agent": "loadtest",
        }
        own = headers.keys() - {name for name, _ in metadata}
        fields = *((name, value) for name, value in headers.items() if name in own), *metadata
        self.headers = header_block(*((name.encode(), value.encode()) for name, value in fields))
        # A gRPC message on the wire: not compressed, its length, itself.
        self.messages = [b"\0" + len(message).to_bytes(4, "big") + message for message in requests]
        self.no_http2 = f"it speaks no HTTP/2{'' if tls else '; if it speaks TLS, write grpcs://'}"
        self._in_turn: list[_GrpcConnection] = []
        self._turn = 0
        self._opened = False
        self._pause_ns = _PAUSE_NS
        self._paused_until_ns = 0

    def __repr__(self) -> str:
        calls = sum(len(connection.indices) for connection in self.connections)
        return f"<GrpcClient {len(self.connections)} open, {calls} calls, {len(self._waiting)} waiting>"

    async def open(self, connections: int) -> None:
        await super().open(self._cap)
        self._opened = True

    def send(self, index: int) -> None:
        count = len(self._in_turn)
        if count < self._cap:
            self._connect()  # for a target that restarted, say, or wants connections to be young
        for _ in range(count):
            self._turn = (self._turn + 1) % count
            connection = self._in_turn[self._turn]
            if connection.has_room:
                connection.send(index)
                return
        self._waiting.append(index)
        self._connect()

    def expire(self, indices: Container[int]) -> None:
        for connection in list(self.connections):
            connection.cancel(indices)
        super().expire(indices)

    def _connection(self) -> "_GrpcConnection":
        return _GrpcConnection(self)

    def _connect(self) -> None:
        """While others take requests, one at a time, and after a pause where the last came to nothing."""
        if self._in_turn:
            under_way = self._connecting or self._staying > len(self._in_turn)
            if under_way or time.monotonic_ns() < self._paused_until_ns:
                return
        super()._connect()

    def _joined(self, connection: "_GrpcConnection") -> None:
        if connection.greeted or not self._opened or not self._in_turn:
            self._in_turn.append(connection)
            self.room(connection)

    def _not_joined(self, status: int, message: str) -> None:
        self._came_to_nothing()
        if self._staying:
            return  # they will have room
        waiting, self._waiting = self._waiting, deque()
        for index in waiting:
            self.fail(index, status, message)

    def _came_to_nothing(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._paused_until_ns:  # several at once count as one
            self._paused_until_ns = now_ns + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, _MOST_PAUSE_NS)

    # What connections report.

    def room(self, connection: "_GrpcConnection") -> None:
        while self._waiting and connection.has_room:
            connection.send(self._waiting.popleft())

    def greeted(self, connection: "_GrpcConnection") -> None:
        """The server has let it in."""
        if connection in self.connections and connection not in self._in_turn:  # else its dialling has not returned
            self._in_turn.append(connection)
            self.room(connection)

    def answered(self) -> None:
        """The first answer of a connection came."""
        self._pause_ns, self._paused_until_ns = _PAUSE_NS, 0

    def leaves(self, connection: "_GrpcConnection") -> None:
        """It takes no more requests; another may be opened in its place, as the server wants it."""
        if connection in self._in_turn:
            self._in_turn.remove(connection)
        if connection in self.connections:
            self.leaving.add(connection)
        if self._waiting:
            self._connect()

    def lost(self, connection: "_GrpcConnection") -> None:
        if connection in self._in_turn:
            self._in_turn.remove(connection)
        if connection in self.connections and not connection.answered:
            self._came_to_nothing()
        super().lost(connection)


class _GrpcConnection(Dialled):
    """One HTTP/2 connection: the transport, and what its answers mean.

    indices: stream -> the request that it carries. greeted: the server has said something. answered: also to a request.
    """

    def __init__(self, client: GrpcClient) -> None:
        self._client = client
        self._core = ClientConnection(self, self._flush)
        self.indices: dict[int, int] = {}
        self.greeted = self.answered = False
        self._going_away = False

    @property
    def has_room(self) -> bool:
        """Not on a connection that ended, either: its protocol may be told later."""
        return len(self.indices) < self._core.most_streams and not self._going_away and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        super().connection_made(transport)
        self._flush()

    def give_up(self) -> None:
        self.indices.clear()
        self.abort()

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
            if not self.greeted:
                self.greeted = True
                if not self._going_away:
                    self._client.greeted(self)
        except (ValueError, IndexError) as exc:
            self.abort()
            self._end(MALFORMED, self._client.no_http2 if data.startswith(_NO_HTTP2) else str(exc))
        except Exception as exc:
            self._client.on_fault(exc)

    # what the answers are

    def headers(self, stream: int, headers: Headers, ended: bool) -> None:
        if not self.answered:
            self.answered = True
            self._client.answered()
        if not ended:
            status = headers.get(b":status", b"200")
            if status != b"200" and not 100 <= (number := _http_status(status)) < 200:  # an interim one
                self._failed(stream, number, "not a gRPC answer")
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
            message = headers.get(b"grpc-message", b"").decode(errors="replace")
            self._failed(stream, GRPC + _number(code, 1, _LAST_CODE, _UNKNOWN), unquote(message))

    def data_ended(self, stream: int) -> None:
        self._failed(stream, MALFORMED, "the answer ended without a gRPC status")

    def reset(self, stream: int, code: int) -> None:
        self._failed(stream, RESET, f"the server reset the stream, HTTP/2 error {code}")

    def going_away(self, last: int) -> None:
        self._going_away = True
        self._client.leaves(self)
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
        self._client.ended(exc)
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
    return _number(text, 100, 999, MALFORMED)


def _number(text: bytes, least: int, most: int, otherwise: int) -> int:
    """Also where it is none, which is a fault of one answer, and not of the connection."""
    number = int(text) if text.isdigit() and len(text) <= 3 else -1
    return number if least <= number <= most else otherwise
