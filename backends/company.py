"""Whether rows of one batch change each other's answers: seen by running three rows in two batches, and each of them alone.

Both batches hold the same rows, in another order and another one twice. So what follows from their range only, as the scales of
an int8 model do, is the same in both. A mean, a sum, attention or a state over the rows is not. What order and number leave as
it is, such as a maximum or the longest of the rows, shows in a row that is run alone; where no lone row runs, in one beside its
like.

So the three must differ in range, in length and by more than a factor, which a normalisation takes out again. Of floats and
pixels one row has a quarter of the others; of a mask one has least, of lengths one is short, of ids one has low ones. Drawn
rows have these by themselves. Those made of an example are of several kinds, as a model may refuse the first: what its numbers
and texts may be is not known. Three rows that get one answer show little: then the other kinds are tried too, which are further
from the example. What depends on more rows than four shows, if at all, in the whole example in other company (`told_of_whole`).
"""

import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from backends.base import BackendError, ExecutionFailed, Tensors, TensorSpec
from backends.datatypes import NUMPY

Run = Callable[[Tensors], Tensors]

MOST_ROWS: Final = 32  # of one execution, where nothing says otherwise: the configuration's default
ROWS: Final = 10  # that are run, where one row's answer is known; four more where answers differ
_MOST_S_BEFORE_SIGNS: Final = 1.0


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
_DIGITS: Final = re.compile("[0-9]{1,9}")
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
    if why is not None and not why.what and spent()[0] - before <= _MOST_S_BEFORE_SIGNS:
        of_signs = _told_of_signs(run, rows, quantises)
        return of_signs if of_signs.what else Why(way=why.way, alike=why.alike and of_signs.alike)
    return why


def told_of_whole(run: Run, example: Tensors, answers: Tensors, quantises: Callable[[], bool]) -> Why:
    """How the rows of an example, in reverse and before as many of its first one, change what they were answered."""
    rows = len(next(iter(example.values())))
    order = [*range(rows - 1, -1, -1), *[0] * rows]
    if (other := tried(run, example, order)) is None:
        return Why()  # it takes no more rows than these
    if any(other[name].shape[1:] != of_one.shape[1:] or len(other[name]) != 2 * rows for name, of_one in answers.items()):
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


def drawn_rows(inputs: Iterable[TensorSpec], sizes_of_row: Callable[[TensorSpec], tuple[int, ...]]) -> list[Tensors]:
    """Three rows each, the same at each call, the first with the smallest numbers: first those that show most.

    There whole numbers of the first row are all 0 and those of the third all 1, and texts are these numbers once, twice and
    four times. Then texts have one, for models that read it. Then each row begins with 1 and ends with 0, for models to which
    a mask must leave something.
    """
    random = np.random.default_rng(0)
    rows, masked = {}, {}
    for tensor in inputs:
        array = _numbers(tensor.datatype, (3, *sizes_of_row(tensor)), random)
        if array.dtype.kind == "f" or tensor.datatype == "UINT8":
            array[0] = array[0] / 4  # so that a scale taken from the whole batch shows
            rows[tensor.name] = masked[tensor.name] = _in(tensor.datatype, array)
            continue
        array[0], array[2] = 0, 1
        rows[tensor.name] = _in(tensor.datatype, array)
        numbers = array.reshape(3, -1)
        numbers[:, -1:], numbers[:, :1] = 0, 1
        masked[tensor.name] = _in(tensor.datatype, array)
    repeated = {name: _repeated(array) if array.dtype.kind == "O" else array for name, array in rows.items()}
    return [kind for kind in (repeated, rows, masked) if kind is rows or any(kind[name] is not rows[name] for name in rows)]


def _repeated(texts: np.ndarray) -> np.ndarray:
    more = np.array([0, 1, 3], object).reshape(3, *[1] * (texts.ndim - 1))
    repeated: np.ndarray = texts + (b" " + texts) * more
    return repeated


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


def rows_like(own: Tensors) -> Iterator[Tensors]:
    """Three rows each, made of three of an example, the third as it is: first those that show most."""
    for floats, integers, texts in (
        (_scaled, _mixed, _halved),
        (_grown, _lessened, _renumbered),
        (_mixed, _kept, np.copy),  # floats that are codes
    ):
        random = np.random.default_rng(0)
        rows: Tensors = {}
        with np.errstate(all="ignore"):  # of the largest numbers of a datatype
            for name, array in own.items():
                if array.dtype.kind == "O":
                    rows[name] = texts(array)
                else:
                    rows[name] = (floats if of_floats(array) else integers)(array, random)
        if any(map(differ, rows.values())):
            yield rows


def show(rows: Tensors, own: Tensors) -> bool:
    """Whether rows made of these are others to a model, though it may answer them alike.

    Of a text it may read the front only, as of an image in a file, unless it takes the front alone.
    """

    def shorter(name: str) -> bool:
        return any(len(one) < len(its_own) for one, its_own in zip(rows[name][:1].flat, own[name][:1].flat, strict=True))

    return any(
        differ(own[name]) or (shorter(name) if array.dtype.kind == "O" else differ(array)) for name, array in rows.items()
    )


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


def differ(rows: np.ndarray) -> bool:
    return any(not np.array_equal(rows[0], other) for other in rows[1:])


def each_runs(run: Run, rows: Tensors) -> bool:
    """Whether each of the three runs alone."""
    return all(tried(run, rows, [row]) is not None for row in range(3))


def _scaled(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each number times one from 0 to 1, in the first row to a quarter. Of zeros, these themselves."""
    factors = random.random(rows.shape)
    factors[0] /= 4
    return _times(rows, factors)


def _grown(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each number times one from 1 to 10. Of zeros, these themselves."""
    return _times(rows, 1 + 9 * random.random(rows.shape))


def _times(rows: np.ndarray, factors: np.ndarray) -> np.ndarray:
    if not rows.any():
        return factors.astype(rows.dtype)
    factors[2] = 1
    scaled: np.ndarray = rows * factors.astype(rows.dtype)
    return scaled


def _mixed(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Numbers of the example, which are in its vocabulary: low ones in the first row, high ones in the second.

    Where there is but one number beside 0, as of a mask, a flag or a length, less of it.
    """
    numbers = np.unique(rows)
    if np.count_nonzero(numbers) <= 1 and differ(fewer := _fewer(rows)):
        return fewer
    half = (len(numbers) + 1) // 2
    mixed = rows.copy()
    mixed[0] = random.choice(numbers[:half], rows.shape[1:])
    mixed[1] = random.choice(numbers[-half:], rows.shape[1:])
    return mixed


def _kept(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return rows


def _fewer(rows: np.ndarray) -> np.ndarray:
    """A quarter of what is not 0 in the first row, half in the second, as much smaller; but something. Of zeros, some are 1."""
    fewer = rows.copy()
    if rows.size == 3 and np.abs(rows.astype(float)).max() <= 1:  # a flag
        fewer[0] = not fewer[0]
        return fewer
    for row, parts in ((0, 4), (1, 2)):
        numbers = fewer[row : row + 1].reshape(-1)  # a view
        kept = np.flatnonzero(numbers) if rows.any() else np.arange(len(numbers))
        rest = kept[-(-len(kept) // parts) :]
        if rows.any():
            sizes = np.abs(numbers.astype(float))
            numbers[:] = np.sign(numbers.astype(float)) * np.minimum(sizes, np.maximum(1, sizes // parts))
            numbers[rest] = 0
        else:
            numbers[rest] = 1
    return fewer


def _lessened(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Numbers from 1 to those of the example, high ones in the second row where the first has low ones; of zeros, some 1."""
    factors = random.random(rows.shape)
    factors[1] = 1 - factors[0]
    if not rows.any():
        return (factors > 0.5).astype(rows.dtype)
    factors[2] = 1
    most = rows.astype(float)
    lessened: np.ndarray = np.sign(most) * np.maximum(1, np.floor(factors * np.abs(most)))
    return lessened.astype(rows.dtype)


def _halved(rows: np.ndarray) -> np.ndarray:
    """The first half of the first row's texts, the second's twice."""
    return _rewritten(rows, _half, _twice)


def _renumbered(rows: np.ndarray) -> np.ndarray:
    """Numbers in the texts lessened, as of JSON, which is neither halved nor doubled; where there are none, longer texts."""
    if any(_DIGITS.search(_text(text)) for text in rows.flat):
        return _rewritten(rows, lambda text: _with_numbers(text, 0.5), lambda text: _with_numbers(text, 0.75))
    return _rewritten(rows, lambda text: _twice(_twice(text)), _twice)


def _rewritten(rows: np.ndarray, *ways: Callable[[str], str]) -> np.ndarray:
    """The texts of the first rows, of each in another way."""
    rewritten = rows.copy()
    for row, way in enumerate(ways):
        for (_, *index), text in np.ndenumerate(rows[row : row + 1]):
            changed = way(_text(text))
            rewritten[row, *index] = changed.encode(errors="surrogateescape") if isinstance(text, bytes) else changed
    return rewritten


def _text(text: str | bytes) -> str:
    return text.decode(errors="surrogateescape") if isinstance(text, bytes) else text


def _half(text: str) -> str:
    words = text.split()
    return " ".join(words[: (len(words) + 1) // 2]) if len(words) > 1 else text[: (len(text) + 1) // 2]


def _twice(text: str) -> str:
    return f"{text} {text}"


def _with_numbers(text: str, share: float) -> str:
    """Each number in it lessened to this share, with as many digits, and not to 0."""

    def lessened(found: re.Match[str]) -> str:
        digits = found[0]
        least = 10 ** (len(digits) - 1) if digits[0] != "0" else min(1, int(digits))
        return str(max(least, int(int(digits) * share))).zfill(len(digits))

    return _DIGITS.sub(lessened, text)
