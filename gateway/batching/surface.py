"""What batches of one model's lengths have in common: t(rows, length), how busy workers slow it, and how it scatters.

t = a + b·rows + c·rows·length at level 1, none of them below zero, is fitted to all batches of all lengths: so a length that
never ran is predicted from those that did, and many lengths need no more batches than few. It is a least-squares fit of
relative errors, as batches scatter by a share of their time, with forgetting. A term that explains next to nothing is left out.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

_FORGET: Final = 0.995
_TERMS: Final = ((0, 2), (2,), (0,), (0, 1, 2), (0, 1), (1,))  # of (1, rows, rows·length), the likelier first
_BETTER: Final = 0.95  # of the squared errors: what a later choice of terms must fall below
_EXACT: Final = 1e-9
_MOVED: Final = 0.02
_OFTEN: Final = 32  # batches until when it is fitted after each; then after so many
_FEW: Final = 8
_RATIOS: Final = 128


class Surface:
    """Shared by the curves of one model's lengths; the curve of what has no length has one of its own.

    levels: by busy workers. ratios: actual to predicted, of the last batches, which spread and luck are of; run: of those
    that a drift begins with.
    version: raised when the fit has moved.
    restored: it knows from before what curves that are restored could teach it.
    """

    __slots__ = (
        "_count",
        "_sums",
        "_terms",
        "levels",
        "luck",
        "ratios",
        "restored",
        "run",
        "spread",
        "until_ranked",
        "version",
    )

    def __init__(self) -> None:
        self.levels: dict[int, float] = {}
        self.ratios: deque[float] = deque(maxlen=_RATIOS)
        self.run: list[float] = []
        self.spread = 1.0
        self.luck: tuple[float, ...] = (1.0,) * 9
        self.until_ranked = 0
        self.version = 0
        self.restored = False
        self._terms = (0.0, 0.0, 0.0)
        # weighted sums of 1·1, 1·r, 1·rl, r·r, r·rl, rl·rl, and of 1·t, r·t, rl·t, t·t
        self._sums: tuple[float, ...] = (0.0,) * 10
        self._count = 0

    @property
    def ready(self) -> bool:
        return self.version > 0

    @property
    def tells(self) -> bool:
        """Whether it has seen enough for its errors to say how batches scatter."""
        return self._count >= _FEW

    def line_ns(self, length: int) -> tuple[float, float]:
        """(a, b) of t = a + b·rows at level 1."""
        fixed, row, cell = self._terms
        return fixed, row + cell * length

    def to_dict(self) -> dict[str, Any]:
        """The fit as JSON can hold it; levels and ratios are kept with each curve."""
        return {"count": self._count, "sums": list(self._sums), "terms": list(self._terms)}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave. Raises: ValueError, if it is something else; then nothing has changed."""
        try:
            count, sums = int(kept["count"]), tuple([float(value) for value in kept["sums"]])
            fixed, row, cell = (float(value) for value in kept["terms"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"not a service surface: {exc!r}") from exc
        if len(sums) != len(self._sums) or min(fixed, row, cell) < 0 or fixed + row + cell <= 0:
            raise ValueError("not a service surface: its numbers are out of range")
        self._count, self._sums, self._terms = count, sums, (fixed, row, cell)
        self.version += 1
        self.restored = True

    def learn(self, rows: int, length: int, time_ns: float, about_ns: float, weight: float = 1.0) -> None:
        """From a batch, its time at level 1. about_ns: what such a batch takes, as far as is known: errors are shares of it."""
        per = 1.0 / about_ns
        one, rows_, cells, time = per, rows * per, rows * length * per, time_ns * per
        products = (
            one * one, one * rows_, one * cells, rows_ * rows_, rows_ * cells, cells * cells,
            one * time, rows_ * time, cells * time, time * time,
        )  # fmt: skip
        self._sums = tuple([_FORGET * old + weight * new for old, new in zip(self._sums, products, strict=True)])
        self._count += 1
        if self._count < _OFTEN or not self._count % _OFTEN:
            self._fit(rows, length)

    def _fit(self, rows: int, length: int) -> None:
        """rows, length: of a batch by which to tell whether it has moved."""
        sums = self._sums
        matrix = ((sums[0], sums[1], sums[2]), (sums[1], sums[3], sums[4]), (sums[2], sums[4], sums[5]))
        right, least, found = sums[6:9], 0.0, None
        for terms in _TERMS:
            solved = _solved([[matrix[i][j] for j in terms] for i in terms], [right[i] for i in terms])
            if solved is None or min(solved) < 0:
                continue
            errors = max(0.0, sums[9] - sum(value * right[i] for value, i in zip(solved, terms, strict=True)))
            if found is None or errors < _BETTER * least - _EXACT * sums[9]:
                least, found = errors, dict(zip(terms, solved, strict=True))
        if found is None:
            return
        new = found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0)
        old = self._terms
        if self.version and all(
            abs(_at(new, *each) - _at(old, *each)) <= _MOVED * _at(old, *each)
            for each in ((1, length), (rows, 1), (rows, length))
        ):
            return
        self._terms = new
        self.version += 1


def _at(terms: tuple[float, float, float], rows: int, length: int) -> float:
    return terms[0] + terms[1] * rows + terms[2] * rows * length


def _solved(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """By elimination; None, if what was seen does not tell the terms apart."""
    size = len(right)
    for at in range(size):
        whole = matrix[at][at]
        for above in range(at):
            factor = matrix[at][above] / matrix[above][above]
            matrix[at] = [value - factor * other for value, other in zip(matrix[at], matrix[above], strict=True)]
            right[at] -= factor * right[above]
        if matrix[at][at] <= 1e-6 * whole or whole <= 0:
            return None
    for at in reversed(range(size)):
        right[at] = (right[at] - sum(matrix[at][k] * right[k] for k in range(at + 1, size))) / matrix[at][at]
    return right
