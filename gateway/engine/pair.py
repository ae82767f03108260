"""Compares what a shadow answers with what the caller got."""

from collections.abc import Callable
from typing import Final

import numpy as np

from gateway.errors import GatewayError
from gateway.types import InferResponse

_COMPARED_BYTES: Final = 1 << 20  # a comparison runs on the event loop: of larger outputs only as much


class Pair:
    """The caller's answer and the shadow's, compared once both are here; then counted as match or differs, or as unpaired."""

    __slots__ = ("_copy", "_count", "_mine", "_tolerance")

    def __init__(self, count: Callable[[str], None], tolerance: float) -> None:
        self._count = count
        self._tolerance = tolerance
        self._mine: InferResponse | GatewayError | None = None
        self._copy: InferResponse | None = None

    def of_caller(self, outcome: InferResponse | GatewayError) -> None:
        self._mine = outcome
        self._compare()

    def of_copy(self, outcome: InferResponse | GatewayError) -> None:
        if isinstance(outcome, InferResponse):
            self._copy = outcome
            self._compare()

    def _compare(self) -> None:
        mine, copy = self._mine, self._copy
        if mine is None or copy is None:
            return
        if not isinstance(mine, InferResponse):
            self._count("unpaired")
        else:
            same = mine.outputs.keys() == copy.outputs.keys() and all(
                _alike(array, copy.outputs[name], self._tolerance) for name, array in mine.outputs.items()
            )
            self._count("match" if same else "differs")


def _alike(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    most = max(1, _COMPARED_BYTES // max(1, one.dtype.itemsize))
    one, other = one.reshape(-1)[:most], other.reshape(-1)[:most]
    if one.dtype.kind in "fcV":  # V: bfloat16
        return bool(
            np.allclose(one.astype(np.float64), other.astype(np.float64), rtol=tolerance, atol=tolerance, equal_nan=True)
        )
    return bool(np.array_equal(one, other))
