"""Forks of the tests' own process."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def a_fork() -> Iterator[None]:
    """One that does nothing, and lives until this is left."""
    waits, ends = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(ends)
            os.read(waits, 1)
        finally:
            os._exit(0)
    os.close(waits)
    try:
        yield
    finally:
        os.close(ends)
        os.waitpid(child, 0)


@contextmanager
def a_copy_of_the_other_end(client: socket.socket) -> Iterator[None]:
    """Which is in this process; as a fork has one that came just as the connection was accepted."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            found = socket.socket(fileno=os.dup(number))
        except OSError:  # no socket, or closed by now
            continue
        with found:
            try:
                same = found.getpeername() == client.getsockname()
            except OSError:  # one that listens
                continue
            if same:
                yield
                return
    raise AssertionError("the other end is not in this process")
