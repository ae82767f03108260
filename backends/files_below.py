"""All files below a folder, those behind links to folders too, which `Path.rglob` leaves out."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_MOST_LINKS: Final = 4  # on the way to a file: folders that all link to each other are reached in every order of them


def files_below(folder: Path, passes: Callable[[Path], bool] = lambda path: True) -> Iterator[Path]:
    """In an order that their names alone decide; none, if there is no such folder. passes: whether a file or folder counts.

    A link to a folder that holds the link is left out. Raises: OSError, if links lead to ever more links.
    """
    unread = [(folder, frozenset({os.path.realpath(folder)}), 0)] if folder.is_dir() else []
    while unread:
        place, around, links = unread.pop()
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, f"behind more than {_MOST_LINKS} links to folders", str(place))
        entries: list[Path] = []
        with contextlib.suppress(PermissionError):
            entries = sorted(place.iterdir())
        for each in filter(passes, entries):
            if each.is_file():
                yield each
            elif each.is_dir() and (real := os.path.realpath(each)) not in around:
                unread.append((each, around | {real}, links + each.is_symlink()))
