"""An `HttpServer` on a loop in a thread of its own, and a blocking client that shows every byte."""

import asyncio
import hashlib
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop

from gateway.config import Limits
from gateway.edges.http_server import HttpServer
from gateway.process.certificates import Certificates
from gateway.wire.exchange import Exchange, Handler
from tests.running_loop import running_loop

TIMEOUT_S = 10.0


@dataclass
class Answer:
    """One response as it came over the wire; headers: names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """A connection that sends raw bytes and reads whole responses."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None, session: ssl.SSLSession | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        if tls is not None:  # an end without a word of TLS is an error
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost", suppress_ragged_eofs=False, session=session)
        self._read = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, *, head: bool = False) -> Answer:
        """The next response; head: it answers a HEAD request and has no body."""
        line = self._read.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers = {}
        while (field := self._read.readline()) not in (b"\r\n", b""):
            name, _, value = field.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        length = 0 if head else int(headers.get("content-length", 0))
        return Answer(int(line.split()[1]), headers, self._read.read(length))

    def read(self, size: int) -> bytes:
        """So many bytes; fewer at the end of the connection."""
        return self._read.read(size)

    def receive_head(self) -> bytes:
        """Up to the empty line, with it."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self._read.readline()
            assert line, head
            head += line
        return head

    def receive_chunk(self) -> bytes | None:
        """The next chunk of an answer in pieces, b"" for the last; None if the connection ended instead."""
        line = self._read.readline()
        if not line:
            return None
        chunk = self._read.read(int(line, 16))
        assert self._read.read(2) == b"\r\n"
        return chunk

    def ask(self, data: bytes) -> Answer:
        self.send(data)
        return self.receive()

    def at_end(self) -> bool:
        """Wait for the server to close; whether it did so without sending more."""
        try:
            return self._read.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._read.close()
        self.socket.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class Served:
    """A running server."""

    server: HttpServer
    port: int
    loop: asyncio.AbstractEventLoop
    clients: list[Client] = field(default_factory=list)

    def connect(self, tls: ssl.SSLContext | None = None, session: ssl.SSLSession | None = None) -> Client:
        """session: that the client takes up again."""
        client = Client(self.port, tls, session)
        self.clients.append(client)
        return client

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the server's loop and wait for it."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(TIMEOUT_S)

    def drain(self, timeout_s: float) -> None:
        asyncio.run_coroutine_threadsafe(self.server.drain(timeout_s), self.loop).result(timeout_s + TIMEOUT_S)

    def connections(self) -> int:
        return int(self.call(lambda: len(self.server.connections)))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until a condition holds on the loop."""

        async def wait() -> None:
            async with asyncio.timeout(TIMEOUT_S):
                while not condition():  # noqa: ASYNC110  # what is waited for is bytes from another process's socket, no event
                    await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(TIMEOUT_S + 1)


@contextmanager
def serving(
    handler: Handler,
    *,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    certificates: Certificates | None = None,
    **limits: Any,
) -> Iterator[Served]:
    with running_loop(new_loop) as loop:
        server = HttpServer(handler, Limits(**limits))
        port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0, certificates=certificates), loop).result(TIMEOUT_S)
        served = Served(server, port, loop)
        try:
            yield served
        finally:
            for client in served.clients:
                client.close()
            served.drain(2.0)
            assert served.connections() == 0


def echo(exchange: Exchange) -> None:
    """Answer with what was understood of the request."""
    exchange.respond(200, json.dumps(understood(exchange)).encode())


def understood(exchange: Exchange) -> dict[str, Any]:
    body = bytes(exchange.body)
    return {
        "method": exchange.method.decode(),
        "path": exchange.path.decode("latin-1"),
        "query": exchange.query.decode("latin-1"),
        "headers": {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers.items()},
        "length": len(body),
        "digest": hashlib.sha256(body).hexdigest(),
    }


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class Holder:
    """A handler that keeps exchanges until a test answers them."""

    def __init__(self) -> None:
        self.held: list[Exchange] = []
        self.gone: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        exchange.on_disconnect = lambda: self.gone.append(exchange)
        self.held.append(exchange)


def post(body: bytes, *fields: str, path: str = "/x") -> bytes:
    """A request with a body of known length."""
    lines = [f"POST {path} HTTP/1.1", "Host: t", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def get(path: str = "/x", *fields: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: t", *fields, "", ""]).encode("latin-1")
