"""Whether rows of one batch change each other's answers: seen by running three rows in two batches, and one of them alone.

Both batches hold the same rows, in another order and another one twice. So what follows from their range only, as the scales of
an int8 model do, is the same in both. A mean, a sum, attention or a state over the rows is not. What order and number leave as
it is, such as a maximum over the rows, shows in a row that is run alone. So the three must differ by more than a factor, which
a normalisation takes out again, and the first must have the smallest numbers.
"""

import re
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np

from backends.base import BackendError, ExecutionFailed, Tensors, TensorSpec
from backends.datatypes import NUMPY

Run = Callable[[Tensors], Tensors]

MOST_ROWS: Final = 32  # of one execution, where nothing says otherwise: the configuration's default
ROWS: Final = 8  # that are run, where one row's answer is known; four more where answers differ
_MOST_S_BEFORE_SIGNS: Final = 1.0


class Why(NamedTuple):
    """what: how rows change each other's answers; empty: not, as far as is seen. way: on, with {rows} for the most of them."""

    what: str = ""
    way: str = ""


FAIL: Final = Why("several rows at once fail, where one runs")

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
    same numbers with both signs are tried too.
    """
    before = spent()[0]
    why = _told(run, rows, alone, quantises)
    if why == Why() and spent()[0] - before <= _MOST_S_BEFORE_SIGNS:
        return _told_of_signs(run, rows, quantises)
    return why


def tried(run: Run, rows: Tensors, chosen: list[int]) -> Tensors | None:
    """None: it fails."""
    try:
        return run({name: array[chosen] for name, array in rows.items()})
    except BackendError:
        return None


def without_nan(run: Run) -> Run:
    """A run that fails where it gives NaN, which nothing can be told by."""

    def run_without_nan(arrays: Tensors) -> Tensors:
        answers = run(arrays)
        if has_nan(answers):
            raise ExecutionFailed("it gives NaN")
        return answers

    return run_without_nan


def has_nan(arrays: Tensors) -> bool:
    return any(of_floats(array) and bool(np.isnan(array.astype(float)).any()) for array in arrays.values())


def _told(run: Run, rows: Tensors, answer_alone: Callable[[], Tensors | None], quantises: Callable[[], bool]) -> Why | None:
    if (batch := tried(run, rows, [0, 1, 2, 2])) is None or (other := tried(run, rows, [2, 1, 1, 0])) is None:
        return None
    alone = answer_alone()
    if any(answers.keys() != batch.keys() for answers in (other, alone or other)):
        return Why("its outputs are others for other rows")
    for name, answers in batch.items():
        of_one = alone[name].shape if alone else (1, *answers.shape[1:])
        if answers.shape != other[name].shape or answers.shape[:1] != (4,) or of_one != (1, *answers.shape[1:]):
            one = "" if alone is None else f", and {list(alone[name].shape)} of one"
            return Why(f"output {name!r} is {list(answers.shape)} of four rows{one}")
    apart = [name for name, answers in batch.items() if not _near(answers[:3], other[name][[3, 1, 0]], _SAME_SIZE)]
    if not apart and alone is not None:
        apart = [name for name, answers in batch.items() if not _near(answers[:1], alone[name], _OTHER_SIZE)]
        if apart and quantises():
            apart = [name for name in apart if not _near(batch[name][:1], alone[name], _OTHER_RANGE)]
    if not apart:
        return Why()
    again = tried(run, rows, [0, 1, 2, 2]) or {}
    if not all(name in again and _near(answers, again[name], _SAME_SIZE) for name, answers in batch.items()):
        return Why(
            "it answers otherwise each time for the same request",
            "if it was exported in train mode, call .eval() before; if it draws for each row by itself, set max_rows: {rows}",
        )
    return Why(
        f"the other rows of a batch change a row's answer in {', '.join(map(repr, apart))}",
        "if you know that its rows are independent, set max_rows: {rows}",
    )


def _told_of_signs(run: Run, rows: Tensors, quantises: Callable[[], bool]) -> Why:
    """As `_told`, of the floats with signs that are others in the second row than in the first.

    A model that refuses them, or makes NaN of them, may be one of positive numbers only.
    """
    if not any(map(of_floats, rows.values())):
        return Why()
    signed = {name: _signed(array) if of_floats(array) else array for name, array in rows.items()}
    run = without_nan(run)
    alone = tried(run, signed, [0])
    return Why() if alone is None else _told(run, signed, lambda: alone, quantises) or Why()


def _signed(rows: np.ndarray) -> np.ndarray:
    signs = np.random.default_rng(0).choice([-1, 1], rows.shape)
    signs[1] = -signs[0]
    signed: np.ndarray = rows * signs.astype(rows.dtype)
    return signed


def of_floats(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or array.dtype == NUMPY["BF16"]


def _near(one: np.ndarray, two: np.ndarray, share: float) -> bool:
    """Whether floats are no further apart than this share of those that differ at all, and all else is equal.

    What is equal says nothing of the rest, as a mask's -1e9 beside scores: it counts for the rounding of small numbers only.
    Of what each batch quantises by its own range only floats can be told: a label may be another.
    """
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not of_floats(one):
        alike = share == _OTHER_RANGE or bool(np.array_equal(one, two))
        return alike or (share == _OTHER_SIZE and one.dtype.kind == "O" and _near_in_texts(one, two))
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
    allowed = share * np.maximum(sizes, usual) + of_rounding * min(largest, _MOST_ROUNDED)
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


def drawn(datatype: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Floats from 0 to 1; UINT8 as of images; else 0 and 1, which all vocabularies and masks have."""
    return _in(datatype, _numbers(datatype, shape, random))


def drawn_rows(inputs: Iterable[TensorSpec], sizes_of_row: Callable[[TensorSpec], tuple[int, ...]]) -> Tensors:
    """Three rows of these inputs, the same at each call."""
    random = np.random.default_rng(0)
    rows: Tensors = {}
    for tensor in inputs:
        array = _numbers(tensor.datatype, (3, *sizes_of_row(tensor)), random)
        if array.dtype.kind == "f":
            array[0] /= 4  # so that a scale taken from the whole batch shows
        elif tensor.datatype != "UINT8":
            array[1] = 1 - array[0]  # each where the first has the other
        rows[tensor.name] = _in(tensor.datatype, array)
    return rows


def _numbers(datatype: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if datatype in ("FP16", "BF16", "FP32", "FP64"):
        return random.random(shape)
    return random.integers(0, 256 if datatype == "UINT8" else 2, shape)


def _in(datatype: str, array: np.ndarray) -> np.ndarray:
    if datatype == "BYTES":
        array = np.array([b"%d" % number for number in array.flat], object).reshape(array.shape)
    return array.astype(NUMPY[datatype])


def rows_of(example: Tensors) -> Tensors:
    """Three rows of the example's own, its first one last."""
    return {name: array[np.arange(2, -1, -1) % len(array)] for name, array in example.items()}


def rows_like(own: Tensors) -> list[Tensors]:
    """Three rows each, made of three of an example: first those that show most."""
    kinds: list[Tensors] = []
    for integers, texts in ((_mixed, _longer), (_lessened, np.copy)):
        random = np.random.default_rng(0)
        rows: Tensors = {}
        for name, array in own.items():
            if array.dtype.kind == "O":
                rows[name] = texts(array)
            else:
                rows[name] = _scaled(array, random) if of_floats(array) else integers(array, random)
        kinds.append(rows)
    return [rows for rows in kinds if any(map(_differ, rows.values()))]


def rows_taken(run: Run, own: Tensors, kinds: Iterable[Tensors], in_time: Callable[[], bool]) -> Tensors:
    """The example's rows, with as many inputs of these kinds as the model takes: texts, then the rest by halves, while in time.

    Those that it takes in rows that run alone, and not at once, say enough.
    """
    rows = own
    for kind in kinds:
        names = [name for name in own if rows[name] is own[name] and _differ(kind[name])]
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


def _differ(rows: np.ndarray) -> bool:
    return any(not np.array_equal(rows[0], other) for other in rows[1:])


def each_runs(run: Run, rows: Tensors) -> bool:
    """Whether each of the three runs alone."""
    return all(tried(run, rows, [row]) is not None for row in range(3))


def _scaled(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each number times one from 0 to 1, in the first row to a quarter; the third as it is. Of zeros, these themselves."""
    factors = random.random(rows.shape)
    factors[0] /= 4
    if not rows.any():
        return factors.astype(rows.dtype)
    factors[2] = 1
    scaled: np.ndarray = rows * factors.astype(rows.dtype)
    return scaled


def _mixed(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Numbers of the example, which are in its vocabulary; the third row as it is."""
    mixed = random.choice(rows.ravel(), rows.shape)
    mixed[2] = rows[2]
    return mixed


def _lessened(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Numbers from 0 to those of the example, or to 1 where all are 0: in the second row high where the first has low ones."""
    most = rows.astype(float) if rows.any() else np.ones(rows.shape)
    factors = random.random(rows.shape)
    factors[1] = 1 - factors[0]
    lessened: np.ndarray = np.sign(most) * np.floor(factors * (np.abs(most) + 1))
    return lessened.astype(rows.dtype)


def _longer(rows: np.ndarray) -> np.ndarray:
    """The second row's texts twice, the third's three times."""
    longer = rows.copy()
    for times in (2, 3):
        row = rows[times - 1 : times]
        texts = [(b" " if isinstance(text, bytes) else " ").join([text] * times) for text in row.flat]
        longer[times - 1 : times] = np.array(texts, object).reshape(row.shape)
    return longer
