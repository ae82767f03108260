"""A file that is written whole or not at all: half of one, of a disk that is full, would be taken for all of it later."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.errors import ConfigError

_NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
_FILE: Final = "a file, new or not, in a folder that may be written to"
_NO_FILES: Final = ("/dev/", "/proc/")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, or replace it. Raises: OSError, with its name; where there is no room, it is as before."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if str(path).startswith(_NO_FILES) or (path.exists() and not path.is_file()):
            path.write_bytes(data)
        else:
            _replace(path, data)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


@contextlib.contextmanager
def asked_by(option: str, *, folder: bool = False) -> Iterator[None]:
    """Say which option has asked for what cannot be written. folder: it names one, for several files.

    Raises: ConfigError; OSError, where there is no room, or it names no file.
    """
    try:
        yield
    except OSError as exc:
        if exc.filename is None or exc.errno in _NO_ROOM or isinstance(exc, BrokenPipeError):
            raise
        where, why = Path(exc.filename).absolute(), exc.strerror
        expected = "a folder, new or not, whose files may be written" if folder else _FILE
        raise ConfigError(f"{option}: {where}: cannot be written: {why}: expected {expected}") from exc


def _replace(path: Path, data: bytes) -> None:
    real = Path(os.path.realpath(path))
    draft = real.with_name(f"{real.name}.{os.getpid()}.partial")
    try:
        draft.write_bytes(data)
        if real.exists():
            draft.chmod(real.stat().st_mode & 0o7777)
        draft.replace(real)
    except OSError as exc:
        with contextlib.suppress(OSError):
            draft.unlink()
        if exc.errno in _NO_ROOM:
            raise
        path.write_bytes(data)  # a folder that is not ours, or a file that is a mount of its own: in place then
