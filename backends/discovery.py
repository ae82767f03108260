"""What a model takes and gives, where nobody states it: told from the shapes of its artifact, or by running it on an example.

A first dimension counts as rows only where that cannot be wrong: it is fixed at 1 in every tensor; or open in every tensor,
and a few drawn rows (`_tried_rows`), where the model takes them and one of them takes little, are answered alike in any
company; or rows made of the example that a model was run on are. Else a request runs alone and whole, which is right for every
model. Where one row takes too long to be tried, a note tells that its rows are taken to be independent.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from backends.base import BackendError, LoadFailed, ModelSpec, Tensors, TensorSpec, example_inputs
from backends.company import (
    FAIL,
    MOST_ROWS,
    NOT_SEEN,
    ROWS,
    UNSTEADY,
    Run,
    Why,
    each_runs,
    has_nan,
    rows_taken,
    since,
    spent,
    told,
    told_of_whole,
    tried,
    without_nan,
)
from backends.datatypes import NUMPY, as_requested, datatype_of, integer_shown, normalised
from backends.signatures import ANY_OUTPUT, Hint, widened
from backends.trial_rows import differ, drawn_rows, rows_like, rows_of, show

# Of drawn rows: the open sizes that are tried, least first, as networks for images fail on small ones.
_LENGTHS: Final = (8, 64, 224)
_MOST_ELEMENTS: Final = 1 << 21  # of one row of a tensor; an image of 640 x 640 has 1.2 million
_MOST_S: Final = 2.0  # for these, and for finding rows made of an example that a model takes
_MOST_CLOCK_S: Final = 5.0  # for the former, by the clock alone, of a model that waits for others
_MOST_ALIKE: Final = 3  # kinds of rows that get one answer
_MOST_GROWN_BYTES: Final = 512 << 20  # of a batch of four
_IN_TRAIN_MODE: Final = "if it was exported in train mode, call .eval() before"
_WITH_ANSWER: Final = "give an `example` that has an answer, or state `outputs`"
_OTHER_NUMBERS: Final = Why("it fails on other numbers of rows than the example's")


def _sizes_are_those(of: str) -> str:
    return f"sizes are those {of}: write -1 for those that may differ between requests"


@dataclass(frozen=True, slots=True)
class Found:
    """inputs, outputs: with open rows, where max_rows is not 0. notes: what was taken for granted, one sentence each."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int
    notes: tuple[str, ...] = ()


def from_shapes(
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    run: Run | None = None,
    *,
    stated_rows: int = 0,
    network: bool = True,
    quantises: Callable[[], bool] = lambda: False,
    spent: Callable[[], tuple[float, float, int]] = spent,
) -> Found:
    """Of a model whose tensors are known: whether their first dimension is rows.

    run: the model, to be tried on drawn rows; None: it is not tried. stated_rows: the most that one request may have, by who
    says nothing of batches of several; 0: nobody does. network: whether it may be in train mode, and loads nothing when it
    first runs. quantises: whether it takes scales from the range of each batch; asked only where answers differ.
    """
    if not inputs:
        return Found(inputs, outputs, 0, ("it has no inputs, so each request runs alone",))
    notes: list[str] = []
    if run is not None and (seen := _seen_with_rows(run, inputs, outputs)):
        outputs = tuple(replace(tensor, shape=(-1, *tensor.shape[1:])) if tensor.name in seen else tensor for tensor in outputs)
        named = ", ".join(map(repr, seen))
        notes.append(f"the file says that the first dimension of {named} is 1, but it is seen to be that of the inputs")
    firsts = {tensor.shape[0] if tensor.shape else 0 for tensor in (*inputs, *outputs)}
    if firsts == {-1}:
        max_rows, note = MOST_ROWS, ""
        if run is not None:
            max_rows, note = _tried_rows(run, inputs, outputs, stated_rows, network, quantises, spent)
        return Found(inputs, outputs, max_rows, (*notes, note) if note else tuple(notes))
    if firsts == {1}:
        note = "its first dimension is fixed at 1, so every row runs alone: export it with an open one to have batches"
        return Found(_open(inputs), _open(outputs), 1, (note,))
    shapes = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in (*inputs, *outputs))
    if len(firsts) == 1 and (rows := max(firsts)):
        note = (
            f"its first dimension is fixed at {rows} ({shapes}), so each request runs alone and has exactly that; if these are "
            "rows, export it with an open dimension to have batches"
        )
    else:
        note = f"it has no first dimension that is open in every tensor ({shapes}), so each request runs alone, without batches"
    return Found(inputs, outputs, 0, (*notes, note))


def from_example(
    run: Run,
    example: Tensors,
    *,
    of_lists: Mapping[str, Hint] | None = None,
    stated: tuple[TensorSpec, ...] | None = None,
    outputs_stated: tuple[TensorSpec, ...] = (),
    sizes_of: str = "of the example",
    network: bool = False,
    quantises: Callable[[], bool] = lambda: False,
    spent: Callable[[], tuple[float, float, int]] = spent,
) -> Found:
    """Of a model that can be run: its tensors as in the example, and whether their first dimension is rows.

    of_lists: as of `from_ones`. stated: the inputs, where they are known: outputs have the sizes open that change with theirs,
    as far as that can be tried in little time. outputs_stated: where they are known as well, and only its rows are tried.
    sizes_of: whose sizes the example has, for a note. network: whether it may be in train mode. quantises: as of `from_shapes`.
    Raises: what `run` raises for the example; LoadFailed, for an array that has no datatype of the protocol.
    """
    given = as_requested(example)

    def again(arrays: Tensors) -> Tensors:
        return normalised(run(arrays))

    def found(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], max_rows: int, *notes: str) -> Found:
        if stated and outputs_stated:
            return Found(stated, outputs_stated, max_rows, tuple(note for note in notes if note != sizes))
        shown = Found(inputs, outputs, max_rows, notes)
        if stated is None:
            return shown
        seconds, _ = since(before, after)
        return _with_stated(shown, stated, again, given, of_lists, (seconds, after[0] - before[0], grown))

    before = spent()
    once = again(given)
    after = spent()
    _, grown = since(before, after)
    inputs, outputs = _specs(given), _seen(once, "the example", of_lists)
    firsts = {tensor.shape[0] if tensor.shape else 0 for tensor in (*inputs, *outputs)}
    rows = max(firsts) if len(firsts) == 1 and min(firsts) > 0 else 0
    sizes = _sizes_are_those(sizes_of)
    tried_again = rows if stated is None else 1
    if tried_again and _takes_long(before, after, tried_again) and after[0] - before[0] <= _MOST_CLOCK_S:
        with suppress(BackendError):
            again(given)  # the first run may have imported and loaded what it needs
        before, after = after, spent()
    if nothing := [tensor.name for tensor in outputs if -1 in tensor.shape]:
        note = _told_of_nothing(outputs, nothing, "the example")
        if len(firsts) == 1:
            inputs, outputs = _open(inputs), _open(outputs)
        return found(inputs, outputs, 0, note, sizes)
    if not rows:
        note = "its outputs have no row for each row of the example, so each request runs alone"
        return found(inputs, outputs, 0, note, sizes)
    if _takes_long(before, after, rows):
        note = untried(f"as one takes {(after[0] - before[0]) / rows:.1f} s")
        return found(_open(inputs), _open(outputs), MOST_ROWS, note, sizes)
    trial = again if has_nan(once) else without_nan(again)
    varied: set[str] = set()
    why = _told_of_example(trial, given, quantises, spent, varied)
    if not why.what and rows > 3 and after[0] - before[0] <= _MOST_S / 2:
        whole = told_of_whole(trial, given, once, quantises)
        why = whole if whole.what else why
    if not why.what:
        only_rows = all(len(tensor.shape) == 1 for tensor in (*inputs, *outputs))
        same = ", ".join(repr(name) for name, array in given.items() if name not in varied and not differ(array))
        of_same = f"all rows tried have the same {same}: if that of one row changes the answer to another, set max_rows: 0"
        notes = filter(None, (why.way, of_same if same else "", "" if only_rows else sizes))
        return found(_open(inputs), _open(outputs), MOST_ROWS, *notes)
    if rows == 1 and (stated is None or why == FAIL):  # stated as open, rows are what one request may have several of
        return found(_open(inputs), _open(outputs), 1, _note(why, "so every row runs alone", network=network), sizes)
    return found(inputs, outputs, 0, _note(why, network=network), sizes)


def _with_stated(
    found: Found,
    stated: tuple[TensorSpec, ...],
    run: Run,
    example: Tensors,
    of_lists: Mapping[str, Hint] | None,
    took: tuple[float, float, int],
) -> Found:
    """What an example has shown, with the inputs as they are stated: outputs have the sizes open that change with open ones.

    Seen by running the example twice as large, without more rows where these are open; with only its rows twice, where that
    fails. took: by one run of it, in seconds, by the clock alone and in bytes: neither is tried where it would take long.
    """
    seconds, by_clock, grown = took
    for last in (None, 1):
        shapes = {each.name: (0, *each.shape[1:last]) if found.max_rows else each.shape[:last] for each in stated}
        larger = {name: _twice(example[name], shape) for name, shape in shapes.items() if name in example}
        growth = max((array.size / max(1, example[name].size) for name, array in larger.items()), default=1)
        takes_long = seconds * growth > _MOST_S or by_clock * growth > _MOST_CLOCK_S or grown * growth > _MOST_GROWN_BYTES
        if growth <= 1 or takes_long:
            continue
        with suppress(BackendError):  # it does not take these
            seen = _seen(run(larger), "the example", of_lists)
            return replace(found, inputs=stated, outputs=_common(found.outputs, seen))
    return replace(found, inputs=stated)


def _twice(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Along each open dimension of the shape."""
    for axis, size in enumerate(shape[: array.ndim]):
        array = np.concatenate((array, array), axis) if size < 0 else array
    return array


def _takes_long(before: tuple[float, float, int], after: tuple[float, float, int], rows: int) -> bool:
    """Whether trying rows of an example would, by one run of as many."""
    seconds, _ = since(before, after)
    return seconds * ROWS > _MOST_S * rows or (after[0] - before[0]) * ROWS > _MOST_CLOCK_S * rows


def _told_of_example(
    run: Run,
    example: Tensors,
    quantises: Callable[[], bool],
    spent: Callable[[], tuple[float, float, int]],
    varied: set[str],
) -> Why:
    """varied: gets the names of the inputs that differ between rows of a batch that ran."""
    until = spent()[0] + _MOST_S

    def in_time() -> bool:
        return spent()[0] <= until

    def told_of(rows: Tensors) -> Why | None:
        if (why := told(run, rows, lambda: tried(run, rows, [0]), quantises, spent)) is not None:
            varied.update(name for name, array in rows.items() if differ(array))
        return why

    own, own_fails = rows_of(example), None
    kinds: list[Tensors] = []
    alike: list[Tensors] = []  # those that get one answer
    for rows in rows_like(own):
        if not in_time() or len(alike) == _MOST_ALIKE:
            break
        kinds.append(rows)
        if (why := told_of(rows)) is not None:
            if why.what or not why.alike:
                return why
            seen = why
            alike.append(rows)
        elif not alike:
            if own_fails is None:
                own_fails = tried(run, own, [0, 1, 2, 2]) is None
            if own_fails:
                one_runs = all(len(array) == 1 for array in example.values()) or tried(run, own, [0]) is not None
                return FAIL if one_runs else _OTHER_NUMBERS
            if each_runs(run, rows):
                return FAIL
    if not alike:
        rows = rows_taken(run, own, kinds, in_time)
        seen = told_of(rows) or (FAIL if each_runs(run, rows) else _OTHER_NUMBERS)
        if seen.what or not seen.alike:
            return seen
        alike.append(rows)
    return seen if any(show(rows, own) for rows in alike) else NOT_SEEN


def _note(why: Why, so: str = "so each request runs alone and whole", *, rows: int = MOST_ROWS, network: bool) -> str:
    in_train_mode = _IN_TRAIN_MODE if network and why == UNSTEADY else ""
    return "; ".join(filter(None, (f"{why.what}, {so}", in_train_mode, why.way.format(rows=rows))))


def outputs_of_ones(run: Run, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """As `from_ones`, with larger ones where it fails on small ones. Raises: LoadFailed, as on the first."""
    failed: LoadFailed | None = None
    for lengths in ((3, 5), *((length, length + length // 2) for length in _LENGTHS)):
        if failed and max(_elements_of_row(tensor, max(lengths)) for tensor in inputs) > _MOST_ELEMENTS:
            break
        try:
            return from_ones(run, inputs, lengths=lengths).outputs
        except LoadFailed as exc:
            failed = failed or exc
    assert failed is not None
    raise failed


def from_ones(
    run: Run,
    inputs: tuple[TensorSpec, ...],
    *,
    lengths: tuple[int, int] = (3, 5),
    max_rows: int = MOST_ROWS,
    of_lists: Mapping[str, Hint] | None = None,
) -> Found:
    """Of a model whose inputs are known: its outputs, by running it on ones of two sizes, and on other content.

    lengths: the open sizes behind the first one. max_rows: the most that it takes; 1: it is run on one row only.
    of_lists: what type hints say of outputs such as lists, of whose elements numpy knows no more than that they are none, or
    whole numbers; None: what arrays say is so.
    Sizes that the content changes are open, and then each request runs alone: rows of different sizes make no array.
    Raises: LoadFailed, if it fails on the ones, or gives nothing.
    """
    batched = bool(inputs) and all(tensor.shape and tensor.shape[0] < 0 for tensor in inputs)
    spec = ModelSpec("", inputs, (), max_rows if batched else 0)
    results: list[tuple[TensorSpec, ...]] = []
    for rows, length in ((1, lengths[0]),) if max_rows == 1 else zip((2, 3), lengths, strict=True):
        arrays = example_inputs(spec, rows, length)
        try:
            given = normalised(run(arrays))
        except BackendError as exc:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise LoadFailed(
                f"what it gives is not stated, and it fails on ones ({shapes}): {exc}; state its return type or `outputs`, "
                "or give an `example`"
            ) from exc
        results.append(_seen(given, "ones", of_lists))
        if batched and any(not tensor.shape or tensor.shape[0] != rows for tensor in results[-1]):
            batched = False
    outputs = _common(results[0], results[-1])
    if batched:
        outputs = _open(outputs)
    notes: tuple[str, ...] = ()
    ones = other = results[-1]
    try:
        other = _seen(normalised(run({name: _other_content(array) for name, array in arrays.items()})), "ones", of_lists)
    except BackendError:  # it takes not just anything
        if any(size >= 0 for tensor in outputs for size in tensor.shape[batched:]):
            notes = (_sizes_are_those("of ones"),)
    seen = _common(ones, other)
    outputs = _common(outputs, seen)
    if nothing := [tensor.name for each in (*results, other) for tensor in each if -1 in tensor.shape]:
        note = _told_of_nothing(outputs, nothing, "ones")
    elif seen == ones:
        return Found(inputs, outputs, max_rows if batched else 0, notes)
    else:
        note = "the sizes of its outputs change with the content of its inputs, so each request runs alone"
    return Found(inputs, outputs, 1 if max_rows == 1 else 0, (note,))


def _common(first: tuple[TensorSpec, ...], second: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The first, with the sizes open that are others in the second; of which one has no datatype, the other's, all open.

    Raises: LoadFailed, if they differ in more than sizes.
    """
    names, by_name = [tensor.name for tensor in first], {tensor.name: tensor for tensor in second}
    change = f"outputs {names}, then {[*by_name]}" if set(names) != by_name.keys() else ""
    found = []
    for one in () if change else first:
        two = by_name[one.name]
        if not (one.datatype and two.datatype):
            known = one if one.datatype else two
            found.append(replace(known, shape=(-1,) * len(known.shape)))
            continue
        if (one.datatype, len(one.shape)) != (two.datatype, len(two.shape)):
            change = f"output {one.name!r}: {one.datatype} {list(one.shape)}, then {two.datatype} {list(two.shape)}"
        shape = tuple(size if size == other else -1 for size, other in zip(one.shape, two.shape, strict=False))
        found.append(replace(one, shape=shape))
    if change:
        raise LoadFailed(
            f"what it gives changes with its inputs ({change}): state `outputs`, or a return type with datatype and shape"
        )
    return tuple(found)


def _other_content(array: np.ndarray) -> np.ndarray:
    """As many elements: longer texts, twice the numbers."""
    if array.dtype.kind == "O":
        longer = [text + (b" " if isinstance(text, bytes) else " ") + text for text in array.flat]
        return np.array(longer, object).reshape(array.shape)
    return array if array.dtype.kind == "b" else array * array.dtype.type(2)


def _seen_with_rows(run: Run, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> list[str]:
    """The outputs of one row, as it is stated, that have two where open inputs have.

    So converters state what they do not follow (onnxmltools 1.16: the labels of a classifier of LightGBM).
    """
    stated = [tensor.name for tensor in outputs if tensor.shape[:1] == (1,)]
    if not stated or any(tensor.shape[:1] != (-1,) for tensor in inputs):
        return []
    for length in _LENGTHS:
        if max(_elements_of_row(tensor, length) for tensor in (*inputs, *outputs)) > _MOST_ELEMENTS:
            break
        if (seen := tried(run, _drawn(inputs, length)[-1], [0, 1])) is not None:
            return [name for name in stated if seen[name].shape[:1] == (2,)]
    return []


def _tried_rows(
    run: Run,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    stated_rows: int,
    network: bool,
    quantises: Callable[[], bool],
    spent: Callable[[], tuple[float, float, int]],
) -> tuple[int, str]:
    """max_rows, and how drawn rows of one batch change each other's answers, or why they were not tried, as a note."""
    most = stated_rows or MOST_ROWS
    if most < 4:
        return most, untried(f"as it takes {most} at once, and four are tried")
    for length in _LENGTHS:
        if (elements := max(_elements_of_row(tensor, length) for tensor in (*inputs, *outputs))) > _MOST_ELEMENTS:
            return most, untried(f"as one has {elements:,} elements")
        kinds = _drawn(inputs, length)
        for rows in kinds:
            before = spent()
            alone = tried(run, rows, [0])
            after = spent()
            if not network and _takes_long(before, after, 1) and after[0] - before[0] <= _MOST_CLOCK_S:
                alone = tried(run, rows, [0])  # the first run may have imported and loaded what it needs
                before, after = after, spent()
            seconds, grown = since(before, after)
            waits = not network and _takes_long(before, after, 1)
            if waits or seconds * ROWS > _MOST_S or grown * 4 > _MOST_GROWN_BYTES:
                by_clock = after[0] - before[0]
                return most, untried(f"as one takes {by_clock if waits else seconds:.1f} s and {grown >> 20} MiB")
            trial = run if rows is kinds[-1] else without_nan(run, but_of_one=True)
            why = told(trial, rows, lambda: alone, quantises, spent)  # noqa: B023, called at once
            if why is None and alone is not None and rows is kinds[-1] and each_runs(run, rows):
                why = FAIL
            if why is not None:
                return (0, _note(why, rows=most, network=network)) if why.what else (most, why.way)
    return most, untried("as it fails on drawn ones")


def untried(why: str, way: str = "set max_rows: 0") -> str:
    """A note on rows that are batched all the same."""
    return f"its rows are taken to be independent, and not tried, {why}; if they change each other's answers, {way}"


def _sizes_of_row(tensor: TensorSpec, length: int) -> tuple[int, ...]:
    return tuple(length if size < 0 else size for size in tensor.shape[1:])


def _elements_of_row(tensor: TensorSpec, length: int) -> int:
    return math.prod(_sizes_of_row(tensor, length))


def _drawn(inputs: tuple[TensorSpec, ...], length: int) -> list[Tensors]:
    return drawn_rows(inputs, lambda tensor: _sizes_of_row(tensor, length))


def _seen(outputs: Tensors, on: str, of_lists: Mapping[str, Hint] | None) -> tuple[TensorSpec, ...]:
    """Outputs, of which a size of 0 is open; without a datatype, where nothing says it. Raises: LoadFailed, for none."""
    if not outputs:
        raise LoadFailed(f"it gave no outputs on {on}: {_WITH_ANSWER}")
    found = []
    for tensor in _specs(outputs):
        hint = (of_lists.get(tensor.name) or of_lists.get(ANY_OUTPUT)) if of_lists is not None else None
        tensor = replace(tensor, datatype=widened(NUMPY[tensor.datatype].kind, hint) or tensor.datatype)
        if 0 in tensor.shape:
            tensor = replace(tensor, shape=tuple(size or -1 for size in tensor.shape))
            if of_lists is not None and tensor.datatype == "FP64":
                shape = max(tensor.shape, (hint and hint.shape) or (), key=len)
                tensor = replace(tensor, datatype=(hint and hint.datatype) or "", shape=shape)
        found.append(tensor)
    return tuple(found)


def _told_of_nothing(outputs: tuple[TensorSpec, ...], nothing: list[str], on: str) -> str:
    """A note. nothing: the outputs that had no elements. Raises: LoadFailed, where nobody says of what these are."""
    if unknown := [tensor.name for tensor in outputs if not tensor.datatype]:
        raise LoadFailed(
            f"output {', '.join(map(repr, unknown))} is empty on {on}, and no return type such as `list[str]` says of what: "
            f"{_WITH_ANSWER}"
        )
    names = ", ".join(map(repr, dict.fromkeys(nothing)))
    return f"output {names} is empty on {on}, so its sizes are taken to be open, and each request runs alone"


def _specs(arrays: Tensors) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, _datatype(name, array), array.shape) for name, array in arrays.items())


def _datatype(name: str, array: np.ndarray) -> str:
    """Raises: LoadFailed."""
    others = [type(each).__name__ for each in array.flat if not isinstance(each, str | bytes)] if array.dtype.hasobject else []
    if others:
        if others == ["int"] * array.size:
            largest = integer_shown(max(array.flat, key=abs))
            raise LoadFailed(f"{name!r} is of integers such as {largest}, which no datatype holds: give floats or texts")
        kinds = f"texts and {others[0]}" if len(others) < array.size else others[0]
        raise LoadFailed(
            f"{name!r} is of {kinds}, which the protocol cannot carry: expected numbers or texts; of several outputs make "
            "a tuple, a dict or a TypedDict"
        )
    try:
        return datatype_of(array)
    except KeyError as exc:
        raise LoadFailed(f"{name!r} is {array.dtype}, which the protocol cannot carry") from exc


def _open(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(replace(tensor, shape=(-1, *tensor.shape[1:])) for tensor in tensors)
