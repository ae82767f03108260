"""The attacks of another module over TLS: what it opens connections by is another thing, and speaks it."""

import contextlib
import http.client
import socket
import ssl
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.certificates import Authority


class _Socket(ssl.SSLSocket):
    """One that raises what a plain one does."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        with _as_plain():
            return super().recv(buflen, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        with _as_plain():
            return super().send(data, flags)


@contextlib.contextmanager
def _as_plain() -> Iterator[None]:
    try:
        yield
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise BlockingIOError from None
    except ssl.SSLError as exc:
        raise ConnectionResetError(str(exc)) from exc


class Sockets:
    """In place of the module `socket`: its connections speak TLS, and nobody's certificate but the server's is shown.

    What is sent at once leaves as several records: without TCP_NODELAY the last waits for the 40 ms of a delayed ACK.
    """

    def __init__(self, trusted: ssl.SSLContext) -> None:
        trusted.sslsocket_class = _Socket
        self._trusted = trusted

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def create_connection(self, address: Any, timeout: float | None = None) -> ssl.SSLSocket:
        connected = socket.create_connection(address, timeout)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._trusted.wrap_socket(connected, server_hostname="localhost")

    def socket(self) -> ssl.SSLSocket:
        return self._trusted.wrap_socket(socket.socket(), server_hostname="localhost")


class _Grpc:
    """In place of the module `grpc`, likewise."""

    def __init__(self, authority: Authority) -> None:
        self._credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())

    def __getattr__(self, name: str) -> Any:
        return getattr(grpc, name)

    def insecure_channel(self, target: str, options: Any = None) -> grpc.Channel:
        return grpc.secure_channel(target, self._credentials, options)


@contextlib.contextmanager
def speaking(module: ModuleType, authority: Authority) -> Iterator[None]:
    """Have a module speak TLS."""

    def connection(host: str, port: int, timeout: float) -> http.client.HTTPConnection:
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=authority.trusted())

    stands_for = {
        "socket": Sockets(authority.trusted()),
        "http": SimpleNamespace(client=SimpleNamespace(HTTPConnection=connection)),
        "grpc": _Grpc(authority),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in stands_for.items():
            if hasattr(module, name):
                patch.setattr(module, name, stand_in)
        yield
