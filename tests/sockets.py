"""Sockets in a state that a test needs."""

import contextlib
import socket
import struct
from collections.abc import Iterator

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


@contextlib.contextmanager
def reset() -> Iterator[socket.socket]:
    """The server's end of a connection that its client has reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        served, _ = listener.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        client.close()
        with served:
            yield served
