"""The outputs of a request whose rows ran in several batches."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from backends.base import Tensors

_AT_ONCE_BYTES: Final = 1 << 18  # a millisecond or two where memory is touched for the first time


class SplitAnswer:
    """Takes the outputs of each part when it is done. Numbers are copied then: all at the end would hold the loop for long."""

    __slots__ = ("_copying", "_others", "_rows", "_rows_left", "_whole")

    def __init__(self, rows: int) -> None:
        self._rows = self._rows_left = rows
        self._whole: Tensors = {}
        self._others: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._copying: Iterator[None] | None = None

    def add(self, start: int, rows: int, outputs: Tensors) -> bool:
        """Copy some of a part's outputs, or all; whether that was the end of them. If not, it is to be called again with these.

        start: of its rows, in the request. Shapes: (rows of the part, *per_row) each. Raises: ValueError, where a part has
        others than those before.
        """
        if self._copying is None:
            self._copying = self._copies(start, rows, outputs)
        for _ in self._copying:
            return False
        self._copying = None
        self._rows_left -= rows
        return True

    def whole(self) -> Tensors | None:
        """The outputs, once all rows are here. Shapes: (rows, *per_row) each."""
        if self._rows_left:
            return None
        for name, pieces in self._others.items():
            pieces.sort(key=lambda piece: piece[0])
            self._whole[name] = np.concatenate([array for _, array in pieces])
        return self._whole

    def _copies(self, start: int, rows: int, outputs: Tensors) -> Iterator[None]:
        if self._rows_left < self._rows and outputs.keys() != {**self._whole, **self._others}.keys():
            raise ValueError(f"outputs {sorted(outputs)} of one part, {sorted({**self._whole, **self._others})} of another")
        for name, array in outputs.items():
            if array.dtype.kind in "OSU":
                self._others.setdefault(name, []).append((start, array))
                continue
            whole = self._whole.get(name)
            if whole is None:
                whole = self._whole[name] = np.empty((self._rows, *array.shape[1:]), array.dtype)
            if (whole.shape[1:], whole.dtype) != (array.shape[1:], array.dtype):
                found = f"{array.dtype} {list(array.shape[1:])} of one part, {whole.dtype} {list(whole.shape[1:])} of another"
                raise ValueError(f"output '{name}' has rows of {found}")
            copied = 0
            for to, given in _pieces(whole[start : start + rows], array):
                if copied and copied + given.nbytes > _AT_ONCE_BYTES:
                    yield
                    copied = 0
                to[...] = given
                copied += given.nbytes


def _pieces(to: np.ndarray, given: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both, cut alike."""
    if given.nbytes <= _AT_ONCE_BYTES or not given.ndim:
        yield to, given
    elif len(given) == 1:
        yield from _pieces(to[0], given[0])
    else:
        half = len(given) // 2
        yield from _pieces(to[:half], given[:half])
        yield from _pieces(to[half:], given[half:])
