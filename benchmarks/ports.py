"""Ports for servers that are told theirs, of benchmarks and of tests."""

import socket


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


def ray_port() -> int:
    """One for Ray's head, which is looked up only: Ray refuses a port that it cannot bind without SO_REUSEADDR."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
