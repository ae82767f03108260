"""Open what a package, a configuration or a command names as a file: whoever opened a named pipe would wait without end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

_KINDS: Final = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def opened_file(path: str | Path) -> BinaryIO:
    """Open it for reading. Raises: OSError, also for what is no file, in words that say what it is."""
    if kind := _KINDS.get(stat.S_IFMT(os.stat(path).st_mode)):
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    return open(path, "rb")


def file_bytes(path: str | Path) -> bytes:
    """All of it. Raises: likewise."""
    with opened_file(path) as file:
        return file.read()
