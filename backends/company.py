"""Whether rows of one batch change each other's answers: seen by running three rows in two batches, and each of them alone.

Both batches hold the same rows, in another order and another one twice. So what follows from their range only, as the scales of
an int8 model do, is the same in both. A mean, a sum, attention or a state over the rows is not. What order and number leave as
it is, such as a maximum or the longest of the rows, shows in a row that is run alone; where no lone row runs, in one beside its
like. So the three must differ (`backends.trial_rows`); and then those with the same key must be seen that differ in the rest.
What depends on more rows than four shows, if at all, in the whole example in other company (`told_of_whole`).
"""

import re
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np

from backends.base import BackendError, ExecutionFailed, Tensors
from backends.datatypes import of_floats
from backends.trial_rows import differ, with_fields_in_common

Run = Callable[[Tensors], Tensors]

MOST_ROWS: Final = 32  # of one execution, where nothing says otherwise: the configuration's default
ROWS: Final = 10  # that are run, where one row's answer is known; four more where answers differ
_MOST_S_BEFORE_SIGNS: Final = 1.0
_MOST_S_BEFORE_FIELDS: Final = 2.0


class Why(NamedTuple):
    """what: how rows change each other's answers; empty: not, as far as is seen. way: on, with {rows} for the most of them.

    alike: the three have one answer.
    """

    what: str = ""
    way: str = ""
    alike: bool = False


FAIL: Final = Why("several rows at once fail, where one runs")
NOT_SEEN: Final = Why(
    "whether rows change each other's answers could not be seen",
    f"give an example of several different rows, or, if you know that they are independent, set max_rows: {MOST_ROWS}",
)
UNSTEADY: Final = Why(
    "it answers otherwise each time for the same request", "if it draws for each row by itself, set max_rows: {rows}"
)
ONE_FAILS: Final = (
    "one row alone fails, where several run, so a request of one row fails unless it shares a batch: export it with a first "
    "dimension that may be 1"
)

# How far answers to one row may be apart, in parts of their size: in batches of one size, whose kernels are the same; in a
# batch and alone; and where each batch is quantised by its own range (all-MiniLM-L6-v2, int8: 0.18 of short rows, 2026-11-29).
_SAME_SIZE: Final = 1e-3
_OTHER_SIZE: Final = 1e-2
_OTHER_RANGE: Final = 0.5
_NUMBER: Final = re.compile(r"(-?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)")
# What the rounding of numbers near zero is of at most, as that of a softmax's logarithm is of the logits.
_MOST_ROUNDED: Final = 16


def spent() -> tuple[float, float, int]:
    """By the clock and of this process's CPU, in seconds, and the bytes that it has held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return time.perf_counter(), time.process_time(), peak if sys.platform == "darwin" else peak << 10


def since(before: tuple[float, float, int], now: tuple[float, float, int]) -> tuple[float, int]:
    """Seconds and bytes. The clock counts a busy machine's others, the CPU each of several threads: the lesser holds."""
    by_clock, of_cpu, grown = (one - other for one, other in zip(now, before, strict=True))
    return min(by_clock, of_cpu), int(grown)


def told(
    run: Run,
    rows: Tensors,
    alone: Callable[[], Tensors | None],
    quantises: Callable[[], bool],
    spent: Callable[[], tuple[float, float, int]] = spent,
) -> Why | None:
    """How these three rows change each other's answers. None: a batch of them fails.

    alone: gives the answer to the first one; None: it fails. Asked only where a batch runs. quantises: whether the model takes
    scales from the range of each batch; asked only where answers differ. Where all is well and took little by the clock, the
    same numbers with both signs are tried too, and rows that have some fields in common.
    """
    before = spent()[0]
    why = _told(run, rows, alone, quantises)
    if why is not None and not why.what and spent()[0] - before <= _MOST_S_BEFORE_SIGNS:
        of_signs = _told_of_signs(run, rows, quantises)
        why = of_signs if of_signs.what else Why(way=why.way, alike=why.alike and of_signs.alike)
    if why is None or why.what or why.alike:
        return why
    for mixed in with_fields_in_common(rows):
        if spent()[0] - before > _MOST_S_BEFORE_FIELDS:
            break
        if (in_common := _told(run, mixed, alone, quantises)) is not None and in_common.what:
            return in_common
    return why


def told_of_whole(run: Run, example: Tensors, answers: Tensors, quantises: Callable[[], bool]) -> Why:
    """How the rows of an example, in reverse and before as many of its first one, change what they were answered."""
    rows = len(next(iter(example.values())))
    order = [*range(rows - 1, -1, -1), *[0] * rows]
    if (other := tried(run, example, order)) is None:
        return Why()  # it takes no more rows than these
    shapes = {name: (2 * rows, *of_one.shape[1:]) for name, of_one in answers.items()}
    if {name: array.shape for name, array in other.items()} != shapes:
        return Why("its outputs are others for other rows")
    apart = _apart(other, {name: of_one[order] for name, of_one in answers.items()}, quantises)
    return _changed(apart) if apart else Why()


def tried(run: Run, rows: Tensors, chosen: list[int]) -> Tensors | None:
    """None: it fails."""
    try:
        return run({name: array[chosen] for name, array in rows.items()})
    except BackendError:
        return None


def without_nan(run: Run, *, but_of_one: bool = False) -> Run:
    """A run that fails where it gives NaN, which nothing can be told by; or, of several rows only."""

    def run_without_nan(arrays: Tensors) -> Tensors:
        answers = run(arrays)
        if has_nan(answers) and not (but_of_one and all(len(array) == 1 for array in arrays.values())):
            raise ExecutionFailed("it gives NaN")
        return answers

    return run_without_nan


def has_nan(arrays: Tensors) -> bool:
    return any(of_floats(array) and bool(np.isnan(array.astype(float)).any()) for array in arrays.values())


def _told(run: Run, rows: Tensors, answer_alone: Callable[[], Tensors | None], quantises: Callable[[], bool]) -> Why | None:
    if (batch := tried(run, rows, [0, 1, 2, 2])) is None or (other := tried(run, rows, [2, 1, 1, 0])) is None:
        return None
    lone = [answer_alone(), tried(run, rows, [1]), tried(run, rows, [2])]
    if one_fails := all(answers is None for answers in lone):
        lone = [tried(run, rows, [row, row]) for row in range(3)]
    alone = {row: answers for row, answers in enumerate(lone) if answers is not None}
    if any(answers.keys() != batch.keys() for answers in (other, *alone.values())):
        return Why("its outputs are others for other rows")
    rows_alone = 2 if one_fails else 1
    for name, answers in batch.items():
        ones = [each[name].shape for each in alone.values()]
        of_row = answers.shape[1:]
        if (
            answers.shape != other[name].shape
            or answers.shape[:1] != (4,)
            or any(shape != (rows_alone, *of_row) for shape in ones)
        ):
            one = f", and {list(ones[0])} of {'two' if one_fails else 'one'}" if ones else ""
            return Why(f"output {name!r} is {list(answers.shape)} of four rows{one}")
    # Each answer with all of the same row, for a model may tell a row from those that repeat it.
    of_one, of_other = [0, 1, 2, 3, 1], [3, 1, 0, 0, 2]
    apart = [name for name, answers in batch.items() if not _near(answers[of_one], other[name][of_other], _SAME_SIZE)]
    for row, by_itself in alone.items():
        apart = apart or _apart(_row(batch, row), _row(by_itself, 0), quantises)
    if not apart:
        alike = not any(differ(answers[:3]) for answers in batch.values())
        return Why(way=ONE_FAILS if one_fails else "", alike=alike)
    again = tried(run, rows, [0, 1, 2, 2]) or {}
    if not all(name in again and _near(answers, again[name], _SAME_SIZE) for name, answers in batch.items()):
        return UNSTEADY
    return _changed(apart)


def _row(answers: Tensors, row: int) -> Tensors:
    return {name: array[row : row + 1] for name, array in answers.items()}


def _apart(one: Tensors, other: Tensors, quantises: Callable[[], bool]) -> list[str]:
    """The outputs in which answers to the same rows, of batches of other sizes, are not near."""
    apart = [name for name, answers in other.items() if not _near(one[name], answers, _OTHER_SIZE)]
    if apart and quantises():
        apart = [name for name in apart if not _near(one[name], other[name], _OTHER_RANGE)]
    return apart


def _changed(apart: list[str]) -> Why:
    return Why(
        f"the other rows of a batch change a row's answer in {', '.join(map(repr, apart))}",
        "if you know that its rows are independent, set max_rows: {rows}",
    )


def _told_of_signs(run: Run, rows: Tensors, quantises: Callable[[], bool]) -> Why:
    """As `_told`, of the floats with signs that are others in the second row than in the first.

    A model that refuses them, or makes NaN of them, may be one of positive numbers only.
    """
    if not any(map(of_floats, rows.values())):
        return Why(alike=True)
    signed = {name: _signed(array) if of_floats(array) else array for name, array in rows.items()}
    run = without_nan(run)
    alone = tried(run, signed, [0])
    why = None if alone is None else _told(run, signed, lambda: alone, quantises)
    return Why(alike=True) if why is None else why


def _signed(rows: np.ndarray) -> np.ndarray:
    signs = np.random.default_rng(0).choice([-1, 1], rows.shape)
    signs[1] = -signs[0]
    signed: np.ndarray = rows * signs.astype(rows.dtype)
    return signed


def _near(one: np.ndarray, two: np.ndarray, share: float) -> bool:
    """Whether floats are no further apart than this share of those that differ at all, and all else is equal.

    Numbers count by their value: a list of Python's is of integers where all are whole. Fractions are near those only as far as
    rounding goes.
    What is equal says nothing of the rest, as a mask's -1e9 beside scores: it counts for the rounding of small numbers only.
    Of what each batch quantises by its own range only floats can be told: a label may be another.
    """
    if one.shape != two.shape or one.dtype.hasobject != two.dtype.hasobject:
        return False
    if not (of_floats(one) or of_floats(two)):
        alike = share == _OTHER_RANGE or bool(np.array_equal(one, two))
        return alike or (share == _OTHER_SIZE and one.dtype.kind == "O" and _near_in_texts(one, two))
    whole = of_floats(one) != of_floats(two)
    of_rounding = share if one.itemsize == 2 else share / 1000
    one, two = one.astype(float), two.astype(float)
    apart = ~((one == two) | (np.isnan(one) & np.isnan(two)))
    if not apart.any():
        return True
    sizes = np.maximum(np.abs(one[apart]), np.abs(two[apart]))
    if not np.isfinite(sizes).all():
        return False
    largest = np.max(np.abs(one), where=np.isfinite(one), initial=0)
    # Batches of one size give most numbers alike, bit by bit. So there the smaller of those that differ are the measure.
    usual = np.quantile(sizes, 0.25) if share == _SAME_SIZE else sizes.max()
    allowed = (0 if whole else share) * np.maximum(sizes, usual) + of_rounding * min(largest, _MOST_ROUNDED)
    return bool((np.abs(one[apart] - two[apart]) <= allowed).all())


def _near_in_texts(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether fractions in texts, as of JSON, are as near as the floats of other sizes are, and all else is equal."""
    numbers: list[tuple[float, float]] = []
    for text, other in zip(one.flat, two.flat, strict=True):
        parts, others = (
            _NUMBER.split(each.decode("latin-1") if isinstance(each, bytes) else str(each)) for each in (text, other)
        )
        if len(parts) != len(others):
            return False
        for index, (part, of_other) in enumerate(zip(parts, others, strict=True)):
            if index % 2 and not (part.lstrip("-").isdigit() and of_other.lstrip("-").isdigit()):
                numbers.append((float(part), float(of_other)))
            elif part != of_other:
                return False
    of_one, of_two = np.array(numbers, float).reshape(-1, 2).T
    return _near(of_one, of_two, _OTHER_SIZE)


def rows_taken(run: Run, own: Tensors, kinds: Iterable[Tensors], in_time: Callable[[], bool]) -> Tensors:
    """The example's rows, with as many inputs of these kinds as the model takes: texts, then the rest by halves, while in time.

    Those that it takes in rows that run alone, and not at once, say enough.
    """
    rows = own
    for kind in kinds:
        names = [name for name in own if rows[name] is own[name] and differ(kind[name])]
        texts = [name for name in names if own[name].dtype.kind == "O"]
        waiting = [part for part in ([name for name in names if name not in texts], texts) if part]
        while waiting and in_time():
            names = waiting.pop()
            changed = rows | {name: kind[name] for name in names}
            if tried(run, changed, [0, 1, 2]) is not None:
                rows = changed
            elif each_runs(run, changed):
                return changed
            elif len(names) > 1:
                waiting += [names[len(names) // 2 :], names[: len(names) // 2]]
    return rows


def each_runs(run: Run, rows: Tensors) -> bool:
    """Whether each of the three runs alone."""
    return all(tried(run, rows, [row]) is not None for row in range(3))
