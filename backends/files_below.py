"""All files below a folder, those behind links to folders too, which `Path.rglob` leaves out."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_MOST_LINKED: Final = 10_000  # folders behind links: those that link to each other are reached in every order of them


def files_below(folder: Path, passes: Callable[[Path], bool] = lambda path: True) -> Iterator[Path]:
    """In an order that their names alone decide; none, if there is no such folder. passes: whether a file or folder counts.

    A link to a folder that holds the link is left out. Raises: OSError, if links lead to ever more folders.
    """
    unread = [(folder, frozenset({os.path.realpath(folder)}), False)] if folder.is_dir() else []
    linked = 0
    while unread:
        place, around, behind = unread.pop()
        linked += behind
        if linked > _MOST_LINKED:
            raise OSError(errno.ELOOP, f"its links lead to more than {_MOST_LINKED} folders", str(folder))
        entries: list[Path] = []
        with contextlib.suppress(PermissionError):
            entries = sorted(place.iterdir())
        for each in filter(passes, entries):
            if each.is_file():
                yield each
            elif each.is_dir() and (real := os.path.realpath(each)) not in around:
                unread.append((each, around | {real}, behind or each.is_symlink()))
