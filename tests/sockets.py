"""Sockets in a state that a test needs."""

import contextlib
import socket
import struct
from collections.abc import Iterator

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


def free_port() -> int:
    """A port of 127.0.0.1 for a server that is told which. Until this process ends, the kernel gives it to nobody else.

    One that was only looked up is anybody's until the server listens: tests beside and Ray's processes take some at any moment.
    This one is kept bound and not listened on: clients are refused until a server listens, with SO_REUSEADDR as all do.
    """
    kept = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        kept.setsockopt(socket.SOL_SOCKET, option, 1)
    kept.bind(("127.0.0.1", 0))
    port: int = kept.getsockname()[1]
    kept.detach()  # open until the process ends
    return port


@contextlib.contextmanager
def reset() -> Iterator[socket.socket]:
    """The server's end of a connection that its client has reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        served, _ = listener.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        client.close()
        with served:
            yield served
