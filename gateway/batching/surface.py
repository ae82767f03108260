"""What batches of one model's lengths have in common: t(rows, length), and how fast the backend is at the moment.

t = a + b·rows + c·cells + d·cells^1.5 at level 1, with cells = rows·length and none of a to d below zero, is fitted to all
batches of all lengths: so a length that never ran is predicted from those that did, and many lengths need no more batches than
few. The last term is what a cell costs more once they are too many for the caches, and attention. It is a least-squares fit of
relative errors, as batches scatter by a share of their time, with forgetting. A term that explains next to nothing is left out.
Where rows are padded in steps inside the model, all this is of what they are padded to: `steps`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, Final

from gateway.batching.speed import Speed
from gateway.batching.steps import TILES, Point, Steps

_FORGET: Final = 0.995
# Of (1, rows, cells, cells^1.5), the likelier first.
_TERMS: Final = ((0, 2, 3), (2, 3), (0, 2), (2,), (0,), (0, 1, 2, 3), (0, 1, 2), (0, 1), (1,))
_BETTER: Final = 0.95  # of the squared errors: what a later choice of terms must fall below
_EXACT: Final = 1e-9
_MOVED: Final = 0.02
_FAR: Final = (
    1.5  # times what one of the first batches took: what was known of it counts as no more, or as no less than its part
)
_OFTEN: Final = 32  # batches until when it is fitted after each; then after so many
_FEW: Final = 8


class Surface:
    """Shared by the curves of one model's lengths; the curve of what has no length has one of its own.

    version: raised when the fit has moved. steps: in which rows are padded inside the model; None: in none, as far as is known.
    restored: it knows from before what curves that are restored could teach it.
    """

    __slots__ = ("_count", "_sums", "_terms", "restored", "speed", "steps", "version")

    def __init__(self) -> None:
        self.speed = Speed()
        self.steps: Steps | None = None
        self.version = 0
        self.restored = False
        self._terms: tuple[float, ...] = (0.0,) * 4
        # weighted sums of the products of each two of the terms, from 1·1 on, and of 1·t, r·t, c·t, c^1.5·t, t·t
        self._sums: tuple[float, ...] = (0.0,) * 15
        self._count = 0

    @property
    def ready(self) -> bool:
        return self.version > 0

    @property
    def tells(self) -> bool:
        """Whether it has seen enough for its errors to say how batches scatter."""
        return self._count >= _FEW

    @property
    def settled(self) -> bool:
        """Whether it has seen enough for a batch that it did not expect to say that the backend is faster or slower now."""
        return self._count >= _OFTEN

    def line_ns(self, length: int) -> tuple[float, float]:
        """(a, b) of t = a + b·rows at level 1, for few rows."""
        fixed = self._terms[0]
        return fixed, _at(self._terms, 1, length) - fixed

    def times(self, length: int, delay_ns: float = 0.0, level: float = 1.0) -> Callable[[int], float]:
        """t of rows, until it learns: for who asks for many. delay_ns: as each has, at level 1. level: times that."""
        fixed, row, cell, more = self._terms
        steps = self.steps

        def time_ns(rows: int) -> float:
            if steps is not None:
                rows = steps.padded(rows)
            cells = rows * length
            return (fixed + row * rows + cell * cells + more * cells * sqrt(cells) + delay_ns) * level

        return time_ns

    def time_ns(self, rows: int, length: int) -> float:
        """t at level 1."""
        return _at(self._terms, rows if self.steps is None else self.steps.padded(rows), length)

    def begin(self, steps: Steps | None, points: Sequence[Point], length: int) -> None:
        """Believe in these steps, and learn anew, from what one length has seen: the sums of other steps say nothing."""
        self.steps = steps
        self.version += 1  # the same fit tells something else now
        self._sums = (0.0,) * 15
        self._count = 0
        for rows, time_ns, count in points:
            self.learn(rows, length, time_ns, time_ns, count)

    def to_dict(self) -> dict[str, Any]:
        """The fit as JSON can hold it; the speed is kept with each curve."""
        steps = None if self.steps is None else list(self.steps)
        return {"count": self._count, "sums": list(self._sums), "terms": list(self._terms), "steps": steps}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave. Raises: ValueError, if it is something else; then nothing has changed."""
        try:
            count, sums = int(kept["count"]), tuple([float(value) for value in kept["sums"]])
            fixed, row, cell, more = (float(value) for value in kept["terms"])
            steps = None if kept.get("steps") is None else Steps(*kept["steps"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"not a service surface: {exc!r}") from exc
        known = steps is None or (steps.tile in (0, *TILES) and isinstance(steps.lone, bool))
        if len(sums) != len(self._sums) or min(fixed, row, cell, more) < 0 or fixed + row + cell + more <= 0 or not known:
            raise ValueError("not a service surface: its numbers are out of range")
        self._count, self._sums, self._terms, self.steps = count, sums, (fixed, row, cell, more), steps
        self.version += 1
        self.restored = True

    def learn(self, rows: int, length: int, time_ns: float, about_ns: float, weight: float = 1.0) -> None:
        """From a batch, its time at level 1. about_ns: what such a batch takes, as far as is known: errors are shares of it."""
        if self.steps is not None:
            rows = self.steps.padded(rows)
        if self._count == 1:  # of the first size alone it is known that all others take as long, or in proportion
            about_ns = min(max(about_ns, time_ns / _FAR), time_ns * _FAR)
        per, cells = 1.0 / about_ns, rows * length
        one, rows_, cells_, more, time = per, rows * per, cells * per, cells * sqrt(cells) * per, time_ns * per
        products = (
            one * one, one * rows_, one * cells_, one * more, rows_ * rows_, rows_ * cells_, rows_ * more,
            cells_ * cells_, cells_ * more, more * more,
            one * time, rows_ * time, cells_ * time, more * time, time * time,
        )  # fmt: skip
        forget = 1.0 - min(weight, 1.0) * (1.0 - _FORGET)
        self._sums = tuple([forget * old + weight * new for old, new in zip(self._sums, products, strict=True)])
        self._count += 1
        if self._count < _OFTEN or not self._count % _OFTEN:
            self._fit(rows, length)

    def _fit(self, rows: int, length: int) -> None:
        """rows, length: of a batch by which to tell whether it has moved."""
        sums = self._sums
        matrix = (
            (sums[0], sums[1], sums[2], sums[3]),
            (sums[1], sums[4], sums[5], sums[6]),
            (sums[2], sums[5], sums[7], sums[8]),
            (sums[3], sums[6], sums[8], sums[9]),
        )
        right, least, found = sums[10:14], 0.0, None
        for terms in _TERMS:
            solved = _solved([[matrix[i][j] for j in terms] for i in terms], [right[i] for i in terms])
            if solved is None or min(solved) < 0:
                continue
            errors = max(0.0, sums[14] - sum(value * right[i] for value, i in zip(solved, terms, strict=True)))
            if found is None or errors < _BETTER * least - _EXACT * sums[14]:
                least, found = errors, dict(zip(terms, solved, strict=True))
        if found is None:
            return
        new = tuple([found.get(term, 0.0) for term in range(4)])
        old = self._terms
        if self.version and all(
            abs(_at(new, *each) - _at(old, *each)) <= _MOVED * _at(old, *each)
            for each in ((1, length), (rows, 1), (rows, length))
        ):
            return
        self._terms = new
        self.version += 1


def _at(terms: tuple[float, ...], rows: int, length: int) -> float:
    cells = rows * length
    return terms[0] + terms[1] * rows + terms[2] * cells + terms[3] * cells * sqrt(cells)


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
