"""Three rows to try a model on, drawn or made of an example.

They must differ in range, in length and by more than a factor, which a normalisation takes out again. Of floats and pixels one
row has a quarter of the others; of a mask one has least, of lengths one is short, of ids one has low ones. Drawn rows have
these by themselves. Those made of an example are of several kinds, as a model may refuse the first: what its numbers and texts
may be is not known. Three rows that get one answer show little: then the other kinds are tried too, which are further from the
example.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from backends.base import Tensors, TensorSpec
from backends.datatypes import NUMPY, of_floats

_DIGITS: Final = re.compile("[0-9]{1,9}")
_MOST_COLUMNS: Final = 16  # of an only input, that are each a field


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
        (_blended, _rolled, _first_halved),  # shares, an order, texts that may not be longer
        (_rolled, _kept, np.copy),  # a 1 among zeros
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


def with_fields_in_common(rows: Tensors) -> Iterator[Tensors]:
    """The first row, another one, and between them one with some fields of either, for models that compare rows by a key.

    The other is the third row, and the second in each field in which the third is as the first. Fields are the inputs, or the
    columns of one that is narrow. Of any two, some rows share the one and not the other.
    """
    places: list[tuple[int, ...]] = [()]
    if len(rows) == 1 and (first := next(iter(rows.values()))).ndim == 2 and first.shape[1] <= _MOST_COLUMNS:
        places = [(column,) for column in range(first.shape[1])]
    last = {name: array[2:].copy() for name, array in rows.items()}
    fields = []
    for name, array in rows.items():
        for at in places:
            if np.array_equal(array[0, *at], array[2, *at]):  # of few numbers, which are often equal
                last[name][0, *at] = array[1, *at]
            if not np.array_equal(array[0, *at], last[name][0, *at]):
                fields.append((name, at))
    parts = [[field for index, field in enumerate(fields) if index >> bit & 1] for bit in range(len(fields).bit_length())]
    others = [field for field in fields if of_floats(rows[field[0]]) != of_floats(rows[fields[0][0]])]  # keys of several fields
    for part in parts if others in parts else (others, *parts):
        if part:
            mixed = {name: np.concatenate([array[:1], last[name], last[name]]) for name, array in rows.items()}
            for name, at in part:
                mixed[name][1, *at] = rows[name][0, *at]
            yield mixed


def show(rows: Tensors, own: Tensors) -> bool:
    """Whether rows made of these are others to a model, though it may answer them alike.

    Of a text it may read the front only, as of an image in a file, unless it takes the front alone.
    """

    def shorter(name: str) -> bool:
        return any(len(one) < len(its_own) for one, its_own in zip(rows[name][:1].flat, own[name][:1].flat, strict=True))

    return any(
        differ(own[name]) or (shorter(name) if array.dtype.kind == "O" else differ(array)) for name, array in rows.items()
    )


def differ(rows: np.ndarray) -> bool:
    return any(not np.array_equal(rows[0], other) for other in rows[1:])


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


def _rolled(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The numbers of each of the first two rows in other places along the last axis."""
    rolled = rows.copy()
    for row in (0, 1) if rows.ndim > 1 else ():
        rolled[row] = np.roll(rows[row], row + 1, axis=-1)
    return rolled


def _blended(rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """As `_rolled`, with half of the first row as it was: its sum is the same, its maximum another."""
    blended = _rolled(rows, random)
    blended[0] = blended[0] / 2 + rows[0] / 2
    return blended


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


def _first_halved(rows: np.ndarray) -> np.ndarray:
    return _rewritten(rows, _half)


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
