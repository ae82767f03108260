"""A stand-in for a full disk that needs no rights: no file of this process may grow past a length."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """A write past so many bytes of any file is an OSError meanwhile. Sockets are not meant."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
