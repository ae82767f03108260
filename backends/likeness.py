"""How near an artifact's outputs are to those of the module that it came from."""

from collections.abc import Iterable
from typing import Final

import numpy as np

TOLERANCE: Final = 1e-4  # between the module and what was made of it at full precision, element by element
_NO_LESS: Final = 1e-4  # than this an element of an output that is to be all 0 may be


class Likeness:
    """Over all that is added, each output for itself.

    NaN and infinities agree where both have the same, and count as infinitely far apart where one has another value.
    """

    def __init__(self, outputs: Iterable[str]) -> None:
        self.difference = 0.0  # the greatest between two elements
        self._sums = {name: np.zeros(4) for name in outputs}  # want · got, want · want, got · got, the distance's square

    def add(self, name: str, want: np.ndarray, got: np.ndarray) -> None:
        """Both of one shape."""
        want, got = want.astype(np.float64).ravel(), got.astype(np.float64).ravel()
        same = (want == got) | (np.isnan(want) & np.isnan(got))
        finite = np.isfinite(want) & np.isfinite(got)
        if not np.all(same | finite):
            self.difference = np.inf
            self._sums[name][3] = np.inf
        want, got = want[finite], got[finite]
        apart = want - got
        self.difference = max(self.difference, float(np.abs(apart).max(initial=0.0)))
        self._sums[name] += (want @ got, want @ want, got @ got, apart @ apart)

    @property
    def cosine(self) -> float:
        """The least of an output, all that it gave taken as one vector."""
        return min(
            float(both / np.sqrt(one * other)) if one and other else float(not (one or np.sqrt(distance) > _NO_LESS))
            for both, one, other, distance in self._sums.values()
        )

    @property
    def relative(self) -> tuple[float, str]:
        """The greatest distance of an output in parts of its own length, and of which output."""
        return max((_relative(one, distance), name) for name, (_, one, _, distance) in self._sums.items())


def _relative(one: float, distance: float) -> float:
    if one or distance == np.inf:
        return float(np.sqrt(distance / max(one, 1e-300)))
    return float(np.sqrt(distance) > _NO_LESS)
