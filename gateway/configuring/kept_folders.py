"""Folders that are made of packages and stay for the next start: in use for as long as a process that took one lives.

A process that uses one has it open, and shares its lock, which the kernel lets go however the process ends. What nobody uses is
removed when the next is made: after a week, or at once where it is of an archive that is another one by now.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_KEPT_S: Final = 7 * 86_400
_MAKING_S: Final = 86_400  # what is not whole by then nobody is making
_MAKING: Final = "making-"

_in_use: Final[dict[Path, int]] = {}


def take(folder: Path) -> bool:
    """Keep a folder from being removed, for as long as this process lives. False: there is none. Raises: OSError."""
    if folder in _in_use and folder.is_dir():
        return True
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    if not _locked(opened, fcntl.LOCK_SH) or not _is_at(folder, opened):
        os.close(opened)
        return False
    os.utime(folder)
    _in_use[folder] = opened
    return True


@contextlib.contextmanager
def making(kept: Path) -> Iterator[Path]:
    """An empty folder in `kept`, for `put_in_place`; else it is removed. Raises: OSError."""
    made = Path(tempfile.mkdtemp(prefix=_MAKING, dir=kept))
    try:
        yield made
    finally:  # of which nothing is left, if it was put in place
        shutil.rmtree(made, ignore_errors=True)


def put_in_place(made: Path, folder: Path) -> None:
    """Give a folder its name at once, unless another process has been faster, and take it.

    Others whose names begin as its own, up to a hyphen, are what it replaces. Raises: OSError.
    """
    opened = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(opened, fcntl.LOCK_SH)
    try:
        os.rename(made, folder)
    except OSError:
        os.close(opened)
        if not take(folder):
            raise
    else:
        _in_use[folder] = opened
    _sweep(folder)


def _sweep(newest: Path) -> None:
    """Remove what nobody uses."""
    replaced = newest.name.rpartition("-")[0] + "-"
    for each in newest.parent.iterdir():
        if each not in _in_use and not each.is_symlink():
            with contextlib.suppress(OSError):  # another process has been faster
                unused_s = time.time() - each.stat().st_mtime
                old = unused_s > (_MAKING_S if each.name.startswith(_MAKING) else _KEPT_S)
                if old or each.name.startswith(replaced):
                    _remove_unused(each)


def _remove_unused(folder: Path) -> None:
    """Raises: OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _locked(opened, fcntl.LOCK_EX) and _is_at(folder, opened):
            with making(folder.parent) as going:
                os.rename(folder, going / "gone")  # nobody is to take what is removed by half
    finally:
        os.close(opened)


def _locked(opened: int, how: int) -> bool:
    try:
        fcntl.flock(opened, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(folder: Path, opened: int) -> bool:
    """Whether it has not been replaced or removed."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(opened))
    except FileNotFoundError:
        return False
