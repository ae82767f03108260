"""REST without sockets: a request's bytes go through a real connection of the HTTP listener, and its answer's are kept."""

import asyncio
import io
import json
import socket
from collections.abc import Iterable, Mapping
from email.message import Message
from http.client import HTTPResponse
from typing import Any, Final, cast
from urllib.parse import quote

from gateway.edges.http_server import HttpConnection, HttpServer
from gateway.wire.tensors import Buffer

_AS_IT_IS: Final = "/:?#[]@!$&'()*+,;=%-._~"  # in a path; the rest is quoted


class Response:
    """An answer. content: its body, as it came. headers: found in any case."""

    def __init__(self, method: str, answer: bytes) -> None:
        parsed = HTTPResponse(cast(socket.socket, _Read(answer)), method=method)
        parsed.begin()
        self.status_code: int = parsed.status
        self.headers: Message = parsed.headers
        self.content: bytes = parsed.read()

    def __repr__(self) -> str:
        return f"<Response {self.status_code}: {len(self.content)} bytes>"

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self) -> Any:
        """The body, parsed; NaN and Infinity, which outputs may hold, are numbers. Raises: ValueError, if it is no JSON."""
        return json.loads(self.content)


class _Read:
    """What http.client reads from in place of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def request_bytes(method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A request as a client would send it. Raises: ValueError, for a header that would be more than one."""
    given = {name.lower() for name in headers}
    ours = {"Host": "in-memory", "Content-Length": str(len(body))}
    fields = {name: value for name, value in ours.items() if name.lower() not in given} | {**headers, "Connection": "close"}
    lines = [f"{method} {quote(path, safe=_AS_IT_IS)} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if any(char in line for line in lines for char in "\r\n\0"):
        raise ValueError("a header, or the method, holds the end of a line")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def exchange(server: HttpServer, request: bytes) -> bytes:
    """Give a connection one request, and its whole answer. On the server's loop."""
    loop = asyncio.get_running_loop()
    connection = HttpConnection(server, loop)
    transport = _Transport(loop)
    connection.connection_made(transport)
    try:
        rest = memoryview(request)
        while rest and not transport.is_closing():
            room = connection.get_buffer(-1)
            size = min(len(room), len(rest))
            room[:size] = rest[:size]
            connection.buffer_updated(size)
            rest = rest[size:]
        await transport.ended
    finally:
        connection.connection_lost(None)  # if it has not answered, its client is gone
    return bytes(transport.written)


class _Transport(asyncio.Transport):
    """Keeps what is written. ended: done once nothing comes any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.written = bytearray()
        self.ended = loop.create_future()
        self._closing = False

    def write(self, data: Buffer) -> None:
        self.written += data

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        for data in list_of_data:
            self.written += data

    def write_eof(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        self._closing = True
        self.write_eof()

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...
