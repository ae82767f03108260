"""Folders that are made of packages and stay for the next start: in use until all who took one let it go, or have ended.

A process that uses one has it open, and shares its lock, which the kernel lets go however the process ends. What nobody uses is
removed when the next is made: after a week, or at once where it is of an archive that is another one by now, or disk is scarce.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SCARCE_BYTES: Final = 1 << 30  # of disk that is free
_KEPT_S: Final = 7 * 86_400
_MAKING_S: Final = 86_400  # what is not whole by then nobody is making
_MAKING: Final = "making-"
_WITHIN: Final = re.compile(r"/.*?/[0-9a-f]{16}-[0-9a-f]{16}(?=/|$)")  # at the start of a path in one, by what it is called


@dataclass(slots=True)
class _Use:
    """Of a folder, by so many in this process. opened: it, locked."""

    opened: int
    takers: int = 1


_in_use: Final[dict[Path, _Use]] = {}
_changing: Final = threading.Lock()  # that: several models may be loaded at once
_noted: Final[ContextVar[list[Path] | None]] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting(taken: list[Path]) -> Iterator[None]:
    """Add to a list what this thread takes meanwhile, each to be let go once."""
    before = _noted.set(taken)
    try:
        yield
    finally:
        _noted.reset(before)


def let_go(folder: Path) -> None:
    """Of those who took it one needs it no more."""
    with _changing:
        use = _in_use[folder]
        use.takers -= 1
        if not use.takers:
            del _in_use[folder]
            os.close(use.opened)


def take_named(options: object) -> list[Path]:
    """The kept folders that a backend's options lead into, wherever their paths stand: each taken, to be let go once.

    So whoever runs what a configuration names holds it as the process does that made it. What is not there is left to whoever
    looks for it.
    """
    found = dict.fromkeys(Path(named[0]) for text in _texts(options) if (named := _WITHIN.match(text)))
    taken = []
    for folder in found:
        with contextlib.suppress(OSError), noting([]):  # a file system without locks, or somebody else's folder
            if take(folder):
                taken.append(folder)
    return taken


def let_all_go(taken: list[Path]) -> None:
    """And empty the list."""
    while taken:
        let_go(taken.pop())


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def take(folder: Path) -> bool:
    """Keep a folder from being removed, until it is let go or this process ends. False: there is none. Raises: OSError."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    if not _locked(opened, fcntl.LOCK_SH) or not _is_at(folder, opened):
        os.close(opened)
        return False
    if folder not in _in_use:
        os.utime(folder)
    _note(folder, opened)
    return True


def _note(folder: Path, opened: int) -> None:
    with _changing:
        use = _in_use.get(folder)
        if use is None:
            _in_use[folder] = _Use(opened)
        else:  # which may have been another folder of this name
            os.close(use.opened)
            use.opened = opened
            use.takers += 1
    noted = _noted.get()
    if noted is not None:
        noted.append(folder)


@contextlib.contextmanager
def making(kept: Path) -> Iterator[Path]:
    """An empty folder in `kept`, for `put_in_place`; else it is removed. Raises: OSError."""
    if shutil.disk_usage(kept).free < _SCARCE_BYTES:
        _sweep(kept)
    with _making(kept) as made:
        yield made


@contextlib.contextmanager
def _making(kept: Path) -> Iterator[Path]:
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
        _note(folder, opened)
    _sweep(folder.parent, folder.name.rpartition("-")[0] + "-")


def _sweep(kept: Path, replaced: str = "") -> None:
    """Remove what nobody uses, if it is old, or its name begins so."""
    for each in kept.iterdir():
        if each not in _in_use and not each.is_symlink():
            with contextlib.suppress(OSError):  # another process has been faster
                unused_s = time.time() - each.stat().st_mtime
                made = not each.name.startswith(_MAKING)
                if unused_s > (_KEPT_S if made else _MAKING_S) or (made and each.name.startswith(replaced)):
                    _remove_unused(each)


def _remove_unused(folder: Path) -> None:
    """Raises: OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _locked(opened, fcntl.LOCK_EX) and _is_at(folder, opened):
            with _making(folder.parent) as going:
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
