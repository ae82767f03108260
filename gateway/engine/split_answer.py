"""The outputs of a request whose rows ran in several batches."""

import numpy as np

from backends.base import Tensors


class SplitAnswer:
    """Takes the outputs of each part when it is done. Numbers are copied then: all at the end would hold the loop for long."""

    __slots__ = ("_others", "_rows", "_rows_left", "_whole")

    def __init__(self, rows: int) -> None:
        self._rows = self._rows_left = rows
        self._whole: Tensors = {}
        self._others: dict[str, list[tuple[int, np.ndarray]]] = {}

    def add(self, start: int, rows: int, outputs: Tensors) -> Tensors | None:
        """start: of its rows, in the request. Shapes: (rows of the part, *per_row) each -> (rows, *per_row).

        Returns: the outputs of all rows, once they are here. Raises: ValueError, where a part has others than those before.
        """
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
            whole[start : start + rows] = array
        self._rows_left -= rows
        if self._rows_left:
            return None
        for name, pieces in self._others.items():
            pieces.sort(key=lambda piece: piece[0])
            self._whole[name] = np.concatenate([array for _, array in pieces])
        return {name: self._whole[name] for name in outputs}
