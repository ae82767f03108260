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


class NotWritten(UsageError):
    """There is a result, and some of what was to be written of it could not be."""


def check_outputs(args: argparse.Namespace, *options: str, others: Iterable[tuple[str, Path | str | None]] = ()) -> bool:
    """Open each file that was asked for, and leave it as it is. Gives whether something goes to standard output.

    others: what else the command reads or writes, by the name that messages give it. Raises: UsageError, with the options.
    """
    given = {f"--{option}": getattr(args, option) for option in options}
    printed = [option for option, path in given.items() if path in (True, STDOUT)]
    if len(printed) > 1:
        raise UsageError(f"{' and '.join(printed)}: standard output takes one of them; name a FILE for the others")
    taken = {os.path.realpath(path): name for name, path in others if path is not None}
    for option, path in given.items():
        if path in (None, False) or option in printed:
            continue
        try:
            _open(path)
        except OSError as exc:
            raise UsageError(f"{option} {path}: cannot be written: {exc.strerror}") from exc
        if path.exists() and not path.is_file():
            continue  # such as /dev/null, which takes any number
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option:
            raise UsageError(f"{other} and {option}: both are {path}: name another file for one of them")
    return bool(printed)


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
