"""Forks of the tests' own process."""

import os
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
