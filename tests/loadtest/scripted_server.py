"""A v2 REST server with faults on request, on the test's own event loop and real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "scripted",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}],
}

ANSWER = {"model_name": "m", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}]}


class ScriptedServer:
    """Answers infer after `delay_s` with `status`. Set the fields at any time.

    stalled_until: loop time before which no inference is answered. silent: never answer. garbage: bytes to answer in place of a
    response; empty: none.
    close_each: end the connection after each answer.
    at_inference: what to do when the n-th inference comes. bodies, heads: those of the inferences.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.status = 200
        self.stalled_until = 0.0
        self.silent = self.close_each = False
        self.garbage = b""
        self.inferences = 0
        self.at_inference: dict[int, Callable[[], None]] = {}
        self.bodies: list[bytes] = []
        self.heads: list[bytes] = []
        self.port = 0
        self._server: asyncio.Server
        self._transports: set[asyncio.Transport] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def disappear(self) -> None:
        """Close the listener and reset every connection, as a killed process does."""
        self._server.close()
        for transport in list(self._transports):
            transport.abort()

    def opened(self, transport: asyncio.Transport) -> None:
        self._transports.add(transport)

    def closed(self, transport: asyncio.Transport) -> None:
        self._transports.discard(transport)

    def answer(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET /v2/models/m HTTP"):
            transport.write(response(200, METADATA))
        elif head.startswith(b"GET /v2/models/m/stats"):
            count, ns = self.inferences, self.inferences * 1_000_000
            spent = {name: {"count": count, "ns": ns * 2} for name in ("queue", "compute_infer")}
            stats = {"success": {"count": count, "ns": 5 * ns}, **spent}
            model = {"name": "m", "inference_count": 4 * count, "execution_count": count, "inference_stats": stats}
            transport.write(response(200, {"model_stats": [model]}))
        elif head.startswith(b"POST /v2/repository/index"):
            transport.write(response(200, [{"name": "m", "version": "1", "state": "READY"}]))
        else:
            self.inferences += 1
            self.heads.append(head)
            self.bodies.append(body)
            if action := self.at_inference.get(self.inferences):
                action()
            self._infer(transport)

    def _infer(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        if self.silent:
            return
        delay_s = max(self.delay_s, self.stalled_until - loop.time())
        answer = self.garbage or response(self.status, ANSWER if self.status == 200 else {"error": "as scripted"})
        if delay_s > 0:
            loop.call_later(delay_s, self._write, transport, answer)
        else:
            self._write(transport, answer)

    def _write(self, transport: asyncio.Transport, answer: bytes) -> None:
        if not transport.is_closing():
            transport.write(answer)
            if self.close_each:
                transport.close()


def response(status: int, document: object) -> bytes:
    body = json.dumps(document).encode()
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


class _Connection(asyncio.Protocol):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._server.opened(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.closed(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            self._server.answer(self._transport, head, rest[:length])


@asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    await server.start()
    try:
        yield server
    finally:
        server.disappear()
        await asyncio.sleep(0)
