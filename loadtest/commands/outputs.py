"""What a command was asked to write.

That it can be written is seen before the command begins; at its end each is written, whatever became of the others.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from gateway.documents.whole_file import write_whole
from loadtest.errors import UsageError

STDOUT: Final = Path("-")
_PRINTED: Final = Path("/dev/stdout")  # a link to what it goes to, which may be a file


class NotWritten(UsageError):
    """There is a result, and some of what was to be written of it could not be."""


_KEYS: Final = ("ca", "cert", "key", "api_key_file")  # of `add_credentials`

Named = Iterable[tuple[str, Path | str | None]]


def check_outputs(args: argparse.Namespace, *options: str, reads: Named = (), writes: Named = ()) -> bool:
    """Open each file that was asked for, and leave it as it is. Gives whether something goes to standard output.

    reads: files, and folders of them, that the command reads; writes: files that it also writes; by the name that messages give
    each. Raises: UsageError, with the options.
    """
    from loadtest.load.live_log import SUFFIX

    given = {f"--{option}": getattr(args, option) for option in options}
    printed = [option for option, path in given.items() if path in (True, STDOUT)]
    if len(printed) > 1:
        raise UsageError(f"{' and '.join(printed)}: standard output takes one of them; name a FILE for the others")
    keys = ((f"--{key.replace('_', '-')}", getattr(args, key, None)) for key in _KEYS)
    taken = {os.path.realpath(path): name for name, path in (*reads, *keys) if path is not None}
    for option, path in given.items():
        if path in (None, False):
            continue
        if option in printed:
            _take(taken, option, _PRINTED)
            continue
        if os.path.realpath(path).endswith(SUFFIX):
            raise UsageError(f"{option} {path}: a run that writes FILE keeps a FILE{SUFFIX}: name another file")
        try:
            _open(path)
        except OSError as exc:
            raise UsageError(f"{option} {path}: cannot be written: {exc.strerror}") from exc
        _take(taken, option, path)
    for name, written in writes:
        if written is not None:
            _take(taken, name, Path(written))
    return bool(printed)


def _take(taken: dict[str, str], name: str, path: Path) -> None:
    """taken: names by their real paths. Raises: UsageError."""
    if path.exists() and not path.is_file():
        return  # such as /dev/null, which takes any number
    real = os.path.realpath(path)
    if folder := taken.get(os.path.dirname(real)):
        raise UsageError(f"{folder} and {name}: {path} is in the folder that is read: name another file")
    other = taken.setdefault(real, name)
    if other != name:
        raise UsageError(f"{other} and {name}: both are {path}: name another file for one of them")


def _open(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        return  # a pipe's reader would see its end
    real = Path(os.path.realpath(path))  # a link may lead to what is not there yet
    is_new = not real.exists()
    with real.open("ab"):
        pass
    if is_new:
        real.unlink()


def give(show: Callable[[], None], writes: Iterable[Callable[[], None]]) -> None:
    """Show the result, then write it. Each is done, whatever becomes of the others, also where whoever reads has gone.

    Raises: NotWritten, once all were tried; what `show` raises.
    """
    failures: list[str] = []
    unread: OSError | None = None
    try:
        show()
    finally:
        for write_one in writes:
            try:
                write_one()
            except UsageError as exc:
                failures.append(str(exc))
            except OSError as exc:  # of standard output
                unread = exc
        if failures:
            raise NotWritten("; ".join(failures))
    if unread is not None:
        raise unread


def write(path: Path, text: str) -> None:
    """Write a file, or to standard output for "-". Raises: UsageError."""
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        write_whole(path, text)
    except OSError as exc:
        raise UsageError(f"{path}: cannot be written: {exc}") from exc
