"""How far two answers to the same request agree: 1 is no difference, 0 and below is none in common.

Outputs are compared row by row. A request's agreement is that of its worst row in its worst output, so that an average hides
nothing; a candidate's is the 1st percentile over many requests, so that one odd request in a hundred does not decide. Pure:
what is sent and answered is `loadtest.lab.answers`'.

Defined for every pair of arrays of one shape:

    NaN, infinity   where both have the same one, they agree there and it is left out; where not, that row agrees at 0
    zero vectors    two of them agree at 1, one of them at 0
    no elements     agree at 1
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from backends.base import LoadFailed, Tensors
from backends.datatypes import datatype_of
from backends.source import is_source, load_object
from loadtest.errors import UsageError

LEAST_INPUTS: Final = 300  # different real ones: three of them are the worst hundredth
_PERCENTILE: Final = 1
FLOATS: Final = frozenset({"FP16", "BF16", "FP32", "FP64"})

Compare = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Reference and candidate, of one shape (rows, …) -> agreement of each row (rows,)."""


def cosine(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """Of the angle between the two, each row taken as one vector. Blind to its length."""
    a, b, broken = _finite(reference, candidate)
    a, b = _scaled(a), _scaled(b)  # else squares of large doubles overflow
    lengths = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.clip((a * b).sum(axis=1) / lengths, -1.0, 1.0)
    found = np.where(lengths > 0, found, (~a.any(axis=1) & ~b.any(axis=1)).astype(np.float64))
    return np.where(broken, 0.0, found)


def equality(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """The share of elements that are equal."""
    a, b = _flat(reference), _flat(candidate)
    if not a.size:
        return np.ones(len(a))
    same: np.ndarray = np.asarray(a == b, dtype=bool)
    if datatype_of(reference) in FLOATS:
        same |= np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    return np.asarray(same.mean(axis=1))


def top_1(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """The share of places whose largest value along the last axis has the same index (of equal ones the first, as in
    `classification` of the protocol). What has fewer than two values there has no largest: equality.
    """
    if reference.ndim < 2 or reference.shape[-1] < 2:
        return equality(reference, candidate)
    a, b, broken = _finite(reference, candidate)
    best = [_flat(flat.reshape(reference.shape).argmax(axis=-1)) for flat in (a, b)]
    return np.where(broken, 0.0, equality(*best))


def relative_error(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """1 less the largest difference, as a share of the reference's largest magnitude in that row; at least 0."""
    a, b, broken = _finite(reference, candidate)
    error, scale = np.abs(a - b).max(axis=1, initial=0.0), np.abs(a).max(axis=1, initial=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.where(scale > 0, np.maximum(0.0, 1 - error / scale), (error == 0).astype(np.float64))
    return np.where(broken, 0.0, found)


STATISTICS: Final[dict[str, Compare]] = {
    "cosine": cosine,
    "equality": equality,
    "top-1": top_1,
    "relative-error": relative_error,
}


def statistic_of(array: np.ndarray) -> str:
    """The one to use where none is asked for.

    Floats by cosine, but by relative error where a row is a single number, whose cosine is only its sign; all else by equality.
    """
    if datatype_of(array) not in FLOATS:
        return "equality"
    return "cosine" if _flat(array).shape[1] > 1 else "relative-error"


def compare_of(name: str) -> Compare:
    """One of STATISTICS, or the user's own function `path/to/file.py:function`. Raises: UsageError."""
    if name in STATISTICS:
        return STATISTICS[name]
    place, _, _ = name.rpartition(":")
    if not is_source(name) or not place.endswith(".py"):
        raise UsageError(f"{name!r}: expected {', '.join(STATISTICS)}, or a function of your own as path/to/file.py:function")
    if not Path(place).is_file():
        raise UsageError(f"{name!r}: no file {place!r}; paths count from the spec's folder")
    try:
        function = load_object(name)
    except LoadFailed as exc:
        raise UsageError(str(exc)) from exc
    if not callable(function):
        raise UsageError(f"{name!r}: expected a function of two arrays (rows, …), got {type(function).__name__}")

    def own(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
        try:
            found = np.asarray(function(reference, candidate), dtype=np.float64)
        except Exception as exc:  # whatever the user's code raises
            raise UsageError(f"{name!r} failed: {type(exc).__name__}: {exc}") from exc
        if found.shape not in ((), (len(reference),)):
            raise UsageError(f"{name!r}: expected {len(reference)} agreements, one a row, got shape {list(found.shape)}")
        # 1 is the most there is, and what is no number agrees with nothing.
        return np.where(np.isfinite(found), np.minimum(found, 1.0), 0.0) * np.ones(len(reference))

    return own


def difference(reference: Tensors, candidate: Tensors) -> str:
    """In what the outputs differ that have to be the same to be compared: name, datatype, shape; "" if in nothing."""
    if set(reference) != set(candidate):
        ours, theirs = (", ".join(sorted(outputs)) or "none" for outputs in (candidate, reference))
        return f"its outputs are {ours}, the reference's {theirs}"
    for name, array in reference.items():
        ours, theirs = _described(candidate[name]), _described(array)
        if ours != theirs:
            return f"its output {name} is {ours}, the reference's {theirs}"
    return ""


def agreement(reference: Tensors, candidate: Tensors, *, rows: int | None, statistics: Mapping[str, str]) -> float:
    """Of one request, its outputs alike by `difference`: its worst row in its worst output.

    rows: of the request; None, or another number than an output has: that output is one row. statistics: output -> name of one
    of STATISTICS or of the user's own function; "" -> of outputs that are not named; else `statistic_of`.
    """
    worst = 1.0
    for name, array in reference.items():
        whole = rows is None or not array.ndim or array.shape[0] != rows
        a, b = (array[None], candidate[name][None]) if whole else (array, candidate[name])
        wanted = statistics.get(name) or statistics.get("") or statistic_of(a)
        worst = min(worst, float(compare_of(wanted)(a, b).min(initial=1.0)))
    return worst


def of_all(agreements: Sequence[float]) -> float:
    """A candidate's agreement: the 1st percentile of its requests', never between two of them."""
    return float(np.percentile(agreements, _PERCENTILE, method="lower"))


def described(outputs: Tensors, statistics: Mapping[str, str], *, batched: bool) -> str:
    """In words, how these outputs are compared."""
    names = {
        name: statistics.get(name) or statistics.get("") or statistic_of(array if batched and array.ndim else array[None])
        for name, array in outputs.items()
    }
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{name}: {statistic}" for name, statistic in names.items())


def _flat(array: np.ndarray) -> np.ndarray:
    """(rows, values of a row)."""
    return array.reshape(len(array), int(np.prod(array.shape[1:])))


def _finite(reference: np.ndarray, candidate: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both as (rows, values) in double precision, 0 where one is not finite, and (rows,) which rows differ in that."""
    a, b = _flat(reference).astype(np.float64), _flat(candidate).astype(np.float64)
    odd = ~np.isfinite(a) | ~np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(odd, 0.0, a), np.where(odd, 0.0, b), (odd & ~same).any(axis=1)


def _scaled(rows: np.ndarray) -> np.ndarray:
    largest = np.abs(rows).max(axis=1, initial=0.0, keepdims=True)
    return rows / np.where(largest > 0, largest, 1.0)


def _described(array: np.ndarray) -> str:
    return f"{datatype_of(array)} {list(array.shape)}"
