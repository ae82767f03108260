"""Open what a package or a configuration names as a file: whoever opened a named pipe would wait for a writer without end."""

import contextlib
import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Final

_ABSENT: Final = "no such file"
_KINDS: Final = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def opened_file(path: str | Path) -> BufferedReader:
    """Open it for reading. Raises: OSError, also for what is no file, in words that say what it is."""
    if what := special(path):
        raise OSError(errno.EINVAL, what, str(path))
    return open(path, "rb")


def file_bytes(path: str | Path) -> bytes:
    """All of it. Raises: likewise."""
    with opened_file(path) as file:
        return file.read()


def special(path: str | Path) -> str:
    """What it is that nothing may be read from; empty, if it is a file, a folder, or nothing."""
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except (OSError, ValueError):  # such as a name that no path can have
        return ""
    return f"it is {kind}, not a file" if kind else ""


def absent(path: str | Path) -> str:
    """What is told of a path at which there is no file that can be read."""
    with contextlib.suppress(OSError, ValueError):  # it is no link, or no name that a path can have
        if not os.path.exists(path):
            return f"a link to {os.readlink(path)}, which is not there"
    return special(path) or _ABSENT
