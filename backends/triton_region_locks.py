"""Whose regions a Triton has: beside each is a file with the server's url, which its process keeps locked.

Who can lock it knows, in any container with this /dev/shm, that the process is gone. An empty one is about to be locked: the
url is written then. A fork would hold the lock for as long as it lives, and lets go of it at once.
"""

import fcntl
import os
import re
import threading
from contextlib import suppress
from typing import Final

_PLACE: Final = "/dev/shm"
_LOCK_FILE: Final = re.compile(r"(gateway-\d+-[0-9a-f]{12})\.lock")
_held: Final[dict[str, int]] = {}  # of this process's regions, by name: the descriptors that hold the locks
_opening: Final = threading.Lock()  # a descriptor that is not yet among them


def hold(region: str, url: str) -> None:
    """Tell others that the process of a region lives. On failure, too, `remove` comes. Raises: OSError."""
    with _opening:
        descriptor = _held[region] = os.open(_path(region), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, url.encode())


def leave(region: str) -> None:
    """To whoever looks next, as if this process were gone."""
    if region in _held:
        os.close(_held.pop(region))


def remove(region: str) -> None:
    """The file of a region that is registered no more, of whatever process."""
    with suppress(OSError):
        os.unlink(_path(region))
    leave(region)


def left() -> dict[str, str]:
    """The regions whose process is gone for certain, and the urls of their servers."""
    regions = (found[1] for name in os.listdir(_PLACE) if (found := _LOCK_FILE.fullmatch(name)))
    return {region: url for region in regions if (url := _url_if_left(region))}


def _path(region: str) -> str:
    return f"{_PLACE}/{region}.lock"


def _url_if_left(region: str) -> str:
    """Empty: its process lives, as far as one can see."""
    try:
        descriptor = os.open(_path(region), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # the latter: another user's FIFO
    except OSError:  # another user's, or it was removed
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.read(descriptor, 4096).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _let_go() -> None:
    """In a fork."""
    for region in [*_held]:
        leave(region)
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_let_go)
