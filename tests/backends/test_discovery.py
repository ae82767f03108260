"""Rows are found only where a batch gives every row its own answer; everything else runs alone and whole."""

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

from backends.base import ExecutionFailed, LoadFailed, Tensors, TensorSpec
from backends.datatypes import NUMPY
from backends.discovery import from_example, from_ones, from_shapes
from backends.signatures import Hint
from backends.trial_rows import drawn_rows, rows_like, rows_of


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "FP32", shape)


@pytest.mark.parametrize(
    ("inputs", "outputs", "max_rows", "told"),
    [
        ((-1, 4), (-1, 2), 32, None),
        ((1, 3, 8, 8), (1, 10), 1, "fixed at 1, so every row runs alone"),
        ((4, 16), (4, 2), 0, r"fixed at 4 \(x \[4, 16\], y \[4, 2\]\), so each request runs alone and has exactly that"),
        ((3, 224), (1000,), 0, "no first dimension that is open in every tensor"),
        ((-1, 16), (1, 2), 0, "no first dimension that is open"),
        ((), (-1,), 0, "no first dimension that is open"),
    ],
)
def test_the_first_dimension_is_rows_where_that_cannot_be_wrong(inputs: Any, outputs: Any, max_rows: int, told: str) -> None:
    found = from_shapes((spec("x", *inputs),), (spec("y", *outputs),))
    assert found.max_rows == max_rows
    if told:
        assert re.search(told, found.notes[0])
    if max_rows:
        assert {tensor.shape[0] for tensor in (*found.inputs, *found.outputs)} == {-1}
    else:
        assert found.inputs[0].shape == inputs


def run_of(function: Any) -> Any:
    def run(arrays: Tensors) -> Tensors:
        try:
            return {"y": function(arrays["x"])}
        except (ValueError, KeyError) as exc:
            raise ExecutionFailed(str(exc)) from exc

    return run


def only_one(x: np.ndarray) -> np.ndarray:
    return x.reshape(1, 4)


def dice(x: np.ndarray) -> np.ndarray:
    return np.random.default_rng().random(x.shape)


def by_range(x: np.ndarray) -> np.ndarray:
    """As an int8 model: the whole batch is rounded by the range of its values."""
    scale = max(float(x.max()), 1e-9) / 4
    return (np.rint(x / scale) * scale).astype(np.float32)


def only_positive(x: np.ndarray) -> int:
    if (x < 0).any():
        raise ValueError("below 0")
    return 0


def only_small(x: np.ndarray) -> np.ndarray:
    if (x > 0.5).any():
        raise ValueError("at most 0.5")
    return x


def attended(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x @ x.T)
    return x + 0.1 * (weights / weights.sum(1, keepdims=True)) @ x


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: x.sum(axis=1, keepdims=True), None),
        (lambda x: np.where(x > 0.5, np.nan, x), None),  # NaN is as good as a number
        (lambda x: x.astype(np.float16) * np.float16(3), None),
        (lambda x: x.cumsum(0), "the other rows of a batch change a row's answer in 'y'"),  # the first row is as it was
        (lambda x: x[::-1].cumsum(0)[::-1], "the other rows of a batch change"),
        (lambda x: x - x.mean(0), "the other rows of a batch change"),
        (lambda x: x / x.max(), "the other rows of a batch change"),
        (lambda x: x + 0.1 * x.max(0), "the other rows of a batch change"),
        (lambda x: (x == x.max(0)).all(1), "the other rows of a batch change"),
        (attended, "if you know that its rows are independent, set max_rows: 32"),
        (lambda x: x @ x.T, r"'y' is \[4, 4\] of four rows, and \[1, 1\] of one, so each request runs alone and whole"),
        (lambda x: np.argwhere(x), r"'y' is \[16, 2\] of four rows, and \[4, 2\] of one"),
        (lambda x: x.reshape(1, 4), "several rows at once fail, where one runs, so each request runs alone and whole"),
        (lambda x: x.reshape(-1, 5), "its rows are taken to be independent, and not tried, as it fails on drawn ones"),
        (only_small, "its rows are taken to be independent, and not tried, as it fails on drawn ones"),
        (dice, "it answers otherwise each time for the same request, so each .* whole; if it was exported in train mode, "),
        (lambda x: x + np.minimum(x, 0).sum(0), "the other rows of a batch change"),  # only where there are negative numbers
        (lambda x: x[x[:, 0] > 0], r"'y' is \[\d, 4\] of four rows, and \[\d, 4\] of one"),
        (lambda x: np.hstack([x - x.mean(0), x * 50_000]), "the other rows of a batch change"),  # large numbers hide nothing
        (lambda x: np.where(x > 0.1, np.finfo(x.dtype).min, x - x.mean(0)), "the other rows of a batch change"),
        (lambda x: x - x.mean(0) - [1e4, 0, 1e4, 0], "the other rows of a batch change"),
        (lambda x: x + 1e-6 * len(x), None),  # kernels for other sizes round otherwise
        (lambda x: np.hstack([x * 0 - 16, x * 0 - 1e-6 * len(x)]), None),  # and what is near zero, as what it is taken from
        (lambda x: np.where(x < 0, np.nan, x + (x < 0).any()), None),  # made for positive numbers
        (lambda x: x + only_positive(x), None),
    ],
)  # fmt: skip
def test_an_open_first_dimension_is_rows_unless_they_change_each_others_answer(function: Any, told: str | None) -> None:
    inputs, outputs = (spec("x", -1, 4),), (spec("y", -1, -1),)
    found = from_shapes(inputs, outputs, run_of(function))
    assert (found.inputs, found.outputs) == (inputs, outputs)
    assert found.max_rows == (0 if told and not told.startswith("its rows are taken") else 32)
    assert bool(found.notes) == bool(told)
    if told:
        assert re.search(told, found.notes[0])


@pytest.mark.parametrize(
    ("function", "rows", "max_rows"),
    [
        (lambda x: x * 2, -1, 32),
        (lambda x: x.cumsum(0), -1, 0),
        (lambda x: x.sum(0, keepdims=True), 1, 0),
        (lambda x: x.reshape(-1, 5), 1, 0),  # it cannot be run
    ],
)
def test_an_output_of_one_row_that_has_those_of_the_inputs_is_stated_so(function: Any, rows: int, max_rows: int) -> None:
    found = from_shapes((spec("x", -1, 4),), (spec("y", 1, 4),), run_of(function))
    assert (found.outputs, found.max_rows) == ((spec("y", rows, 4),), max_rows)
    assert ("the first dimension of 'y' is 1, but" in found.notes[0]) == (rows == -1)


@pytest.mark.parametrize(("function", "max_rows"), [(by_range, 32), (lambda x: by_range(x).cumsum(0), 0)])
def test_rounding_by_the_range_of_a_batch_is_told_from_rows_that_change_each_other(function: Any, max_rows: int) -> None:
    shapes = (spec("x", -1, 4),), (spec("y", -1, 4),)
    assert from_shapes(*shapes, run_of(function), quantises=lambda: True).max_rows == max_rows
    assert from_shapes(*shapes, run_of(function)).max_rows == 0


def test_rows_are_drawn_of_every_datatype_and_of_the_least_size_that_a_model_takes() -> None:
    seen = []

    def run(arrays: Tensors) -> Tensors:
        seen.append(arrays["x"].shape)
        if arrays["x"].shape[1] < 64:
            raise ExecutionFailed("smaller than the kernel")
        return {"y": arrays["x"][:, 0]}

    for datatype in NUMPY:
        seen.clear()
        found = from_shapes((TensorSpec("x", datatype, (-1, -1)),), (TensorSpec("y", datatype, (-1,)),), run)
        tried = [(1, 64), (4, 64), (4, 64), (1, 64), (1, 64)]
        signed = tried if datatype in ("FP16", "BF16", "FP32", "FP64") else []
        kinds = 1 if signed or datatype == "UINT8" else 3 if datatype == "BYTES" else 2
        assert (found.max_rows, seen) == (32, [(1, 8), (4, 8)] * kinds + tried + signed)


@pytest.mark.parametrize("datatype", NUMPY)
@pytest.mark.parametrize("shape", [(1,), (1, 0), (1, 5), (4, 2, 3)])
@pytest.mark.filterwarnings("error")
def test_rows_are_made_of_whatever_an_example_holds(datatype: str, shape: tuple[int, ...]) -> None:
    largest = {"BOOL": 1, "FP16": 6e4, "UINT64": 2**64 - 1, "INT64": 2**63 - 1}.get(datatype, 127)
    for fill in (b"", b"\xff\x00 07", b"9" * 5000) if datatype == "BYTES" else (0, 1, largest):
        own = rows_of({"x": np.full(shape, fill, NUMPY[datatype])})
        for rows in rows_like(own):
            assert (rows["x"].dtype, rows["x"].shape) == (own["x"].dtype, own["x"].shape)
    for rows in drawn_rows((TensorSpec("x", datatype, (-1, *shape)),), lambda tensor: tensor.shape[1:]):
        assert rows["x"].shape == (3, *shape)


SIZES = "sizes are those of the example: write -1 for those that may differ between requests"
NOT_TRIED = "its rows are taken to be independent, and not tried, as one "


@pytest.mark.parametrize("sizes", [((-1, 1 << 22), (-1,)), ((-1, 4), (-1, 64, 1024, 1024))])
def test_rows_that_are_too_large_to_be_tried_are_told(sizes: Any) -> None:
    found = from_shapes((spec("x", *sizes[0]),), (spec("y", *sizes[1]),), lambda arrays: pytest.fail("it was run"))
    assert found.max_rows == 32
    assert re.match(NOT_TRIED + r"has (4,194,304|67,108,864) elements; if they change", found.notes[0])


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        ((0.5, 0.5, 0), "takes 0.5 s and 0 MiB"),
        ((0.1, 0.1, 200 << 20), "takes 0.1 s and 200 MiB"),
        ((0.5, 0.1, 0), ""),  # others kept the machine busy
        ((0.1, 0.5, 0), ""),  # several threads ran
        ((0.1, 0.1, 100 << 20), ""),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_more_rows_than_one_are_tried_only_where_that_takes_little(
    cost: tuple[float, float, int], told: str, fails: bool
) -> None:
    seconds, cpu_seconds, held = 0.0, 0.0, 0
    rows: list[int] = []

    def run(arrays: Tensors) -> Tensors:
        nonlocal seconds, cpu_seconds, held
        rows.append(len(arrays["x"]))
        seconds, cpu_seconds, held = seconds + cost[0], cpu_seconds + cost[1], held + cost[2]
        if fails:
            raise ExecutionFailed("late")
        return {"y": arrays["x"].cumsum(0)}

    found = from_shapes((spec("x", -1, 4),), (spec("y", -1, 4),), run, spent=lambda: (seconds, cpu_seconds, held))
    if told:
        assert (rows, found.max_rows) == ([1], 32)
        assert found.notes[0].startswith(NOT_TRIED + told)
    else:
        assert (rows[:2], found.max_rows) == ([1, 4], 32 if fails else 0)


@pytest.mark.parametrize(("clock_s", "tried"), [(0.2, [1, 4, 4, 1, 1] * 2), (0.3, [1, 4, 4, 1, 1])])
def test_numbers_below_0_are_tried_where_the_others_took_less_than_a_second_by_the_clock(
    clock_s: float, tried: list[int]
) -> None:
    rows: list[int] = []

    def run(arrays: Tensors) -> Tensors:
        rows.append(len(arrays["x"]))
        return {"y": arrays["x"] * 2}

    from_shapes((spec("x", -1, 1),), (spec("y", -1, 1),), run, spent=lambda: (clock_s * len(rows), 0.1 * len(rows), 0))
    assert rows == tried


@pytest.mark.parametrize(
    ("first_s", "each_s", "rows", "told"),
    [(6, 6, [1], "takes 6.0 s"), (1, 1, [1, 1], "takes 1.0 s"), (1, 0.1, [1, 1, 4], "")],
)
def test_code_that_waits_is_run_once_more_as_it_may_load_first(first_s: int, each_s: float, rows: list[int], told: str) -> None:
    ran: list[int] = []

    def run(arrays: Tensors) -> Tensors:
        ran.append(len(arrays["x"]))
        return {"y": arrays["x"].cumsum(0)}

    def spent() -> tuple[float, float, int]:
        return (first_s + each_s * (len(ran) - 1) if ran else 0, 0, 0)

    found = from_shapes((spec("x", -1, 4),), (spec("y", -1, 4),), run, network=False, spent=spent)
    assert (ran[:3], found.max_rows) == (rows, 32 if told else 0)
    assert told in found.notes[0]


def test_a_model_without_inputs_has_no_rows() -> None:
    found = from_shapes((), (spec("y", 1, 2),))
    assert (found.outputs[0].shape, found.max_rows, found.notes) == (
        (1, 2), 0, ("it has no inputs, so each request runs alone",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("function", "max_rows", "shape"),
    [
        (lambda x: x * 2, 32, (-1, 4)),
        (lambda x: (x[:, :1] > 1).astype(np.int64), 32, (-1, 1)),
        (lambda x: x - x.mean(0), 1, (-1, 4)),  # every row changes the others' answer
        (lambda x: x.cumsum(0), 1, (-1, 4)),  # or that of the rows behind it
        (only_one, 1, (-1, 4)),  # and here a second one fails
        (lambda x: x.sum(0), 0, (4,)),
        (lambda x: float(x.sum()), 0, ()),
        (dice, 1, (-1, 4)),
        (lambda x: np.array([["a"]] * len(x)), 32, (-1, 1)),
        (lambda x: texts('{"score": %r, "id": 7}', x[:, 0] * (1 + 1e-7 * len(x))), 32, (-1,)),  # other kernels, other roundings
        (lambda x: texts("[0.5, %r]", x[:, 0] * 0 + 1e-7 * (len(x) - 1)), 32, (-1,)),  # 0.0 and 3e-07
        (lambda x: texts("%r", x[:, 0] + 0.1 * x[:, 0].max()), 1, (-1,)),
        (lambda x: texts("%r", -300 - (x[:, 0] == x[:, 0].max()).astype(int)), 1, (-1,)),
    ],
)
def test_an_example_is_run_alone_and_with_others_made_of_it(function: Any, max_rows: int, shape: tuple[int, ...]) -> None:
    found = from_example(run_of(function), {"x": np.array([[1, 2, 3, 5]], np.float32)})
    assert (found.max_rows, found.outputs[0].shape) == (max_rows, shape)
    assert found.inputs[0].shape == (-1 if max_rows else 1, 4)


@pytest.mark.parametrize("network", [True, False])
def test_train_mode_is_named_only_of_a_network_that_answers_otherwise_each_time(network: bool) -> None:
    note, *_ = from_example(run_of(dice), {"x": np.ones((1, 4))}, network=network).notes
    assert note.startswith("it answers otherwise each time for the same request, so every row runs alone; if it ")
    assert note.endswith("; if it draws for each row by itself, set max_rows: 32")
    assert ("train mode" in note) == network


def texts(template: str, numbers: np.ndarray) -> np.ndarray:
    return np.array([template % number for number in numbers.astype(np.float64 if numbers.dtype.kind == "f" else int).tolist()])


def normalised_rows(x: np.ndarray) -> np.ndarray:
    apart = x - x.mean(1, keepdims=True)
    return apart / np.sqrt((apart**2).mean(1, keepdims=True) + 1e-9)


COUPLED = {
    "mean": lambda x: x - x.mean(0),
    "batch norm": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-9),
    "largest": lambda x: x + 0.1 * x.max(0),
    "least": lambda x: x - x.min(0),
    "attention": lambda x: attended(x / (np.abs(x).max() + 1)),
    "attention behind a layer norm": lambda x: attended(normalised_rows(x) / 2),
    "which is largest": lambda x: x == x.max(0),
    "which was there before": lambda x: np.array([(x[:row] == x[row]).all(1).any() for row in range(len(x))]),
}


@pytest.mark.parametrize("coupled", COUPLED)
@pytest.mark.parametrize(
    "example",
    [
        np.ones((1, 4), np.float32),
        np.zeros((1, 4), np.float32),
        np.array([[1, -2, 3, 5]], np.float64),
        np.array([[7, 3, 9, 41]], np.int64),
        np.array([[1, 5], [3, 2]], np.int64),
        np.ones((1, 8), np.int64),
        np.zeros((1, 8), np.int64),
        np.array([[0, 255, 7, 9]], np.uint8),
        np.ones((2, 8), bool),
    ],
    ids=lambda example: f"{example.dtype} {example.tolist()}",
)
def test_rows_that_change_each_other_are_seen_with_any_example(coupled: str, example: np.ndarray) -> None:
    found = from_example(run_of(lambda x: COUPLED[coupled](x.astype(np.float64))), {"x": example})
    assert found.max_rows == (1 if len(example) == 1 else 0)
    assert found.notes[0].startswith("the other rows of a batch change a row's answer in 'y', so e")


def takes(allowed: list[int]) -> Any:
    """Looks each number up, as of a vocabulary."""

    def function(x: np.ndarray) -> np.ndarray:
        if not np.isin(x, allowed).all():
            raise ValueError("no such token")
        return x * 2

    return function


@pytest.mark.parametrize(
    "function",
    [lambda x: x * 2, takes([3, 7]), takes([0, 1, 2, 3, 4, 5, 6, 7]), lambda x: x[:, 0] > 900, lambda x: x[::-1][::-1]],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_that_leave_each_other_share_a_batch_whatever_they_may_hold(function: Any, dtype: Any, rows: int) -> None:
    assert from_example(run_of(function), {"x": np.array([[3, 7]] * rows, dtype)}).max_rows == 32


def of_sum(function: Any) -> Any:
    def with_sum_1(x: np.ndarray) -> np.ndarray:
        if not np.allclose(x.sum(1), 1):
            raise ValueError("expected a sum of 1")
        return function(x)

    return with_sum_1


def one_hot(x: np.ndarray) -> np.ndarray:
    if not np.isin(x, [0, 1]).all():
        raise ValueError("expected 0 and 1")
    return x.argmax(1)


def permuted(x: np.ndarray) -> np.ndarray:
    if (np.sort(x) != np.arange(x.shape[1])).any():
        raise ValueError("expected a permutation")
    return x[:, ::-1]


def short(x: np.ndarray) -> np.ndarray:
    if any(len(text) > 20 for text in x):
        raise ValueError("expected 20 bytes or less")
    return x


SHARES = np.array([[0.2, 0.5, 0.3]], np.float32)
URL = np.array(["https://example.com"])


@pytest.mark.parametrize(
    ("function", "example", "max_rows"),
    [
        (of_sum(lambda x: x * 2), SHARES, 32),
        (of_sum(lambda x: x / x.max()), SHARES, 1),
        (of_sum(one_hot), np.array([[0, 1, 0, 0]], np.float32), 32),
        (of_sum(one_hot), np.array([[0, 1, 0, 0]]), 32),
        (of_sum(lambda x: x - x.mean(0)), np.array([[0, 1, 0, 0]]), 1),
        (permuted, np.array([[2, 0, 1, 3]]), 32),
        (lambda x: permuted(x).cumsum(0), np.array([[2, 0, 1, 3]]), 1),
        (lambda x: np.array([len(text) for text in short(x)]), URL, 32),
        (lambda x: np.array([len(text) / max(map(len, x)) for text in short(x)]), URL, 1),
    ],
)
def test_rows_of_what_checks_a_sum_an_order_or_a_length_are_made_of_the_same_numbers(
    function: Any, example: np.ndarray, max_rows: int
) -> None:
    assert from_example(run_of(function), {"x": example}).max_rows == max_rows


def drawn(**kinds: tuple[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, datatype, (-1, *shape)) for name, (datatype, shape) in kinds.items())


def up_to(longest: Any) -> Any:
    """The mean of what is left of `x` where it is cut to the longest row of the batch."""
    return lambda arrays: arrays["x"][:, : longest(arrays)].mean(1)


def of_lengths(arrays: Tensors) -> int:
    if (arrays["n"] < 1).any():
        raise ExecutionFailed("expected lengths of 1 or more")
    return int(arrays["n"].max())


def share_of_longest(arrays: Tensors) -> np.ndarray:
    """NaN for a row without anything, as of a mean."""
    with np.errstate(all="ignore"):
        return (arrays["x"] * arrays["n"]).sum(1) / np.maximum(arrays["n"].sum(1).max(), 0)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (up_to(lambda arrays: int(arrays["n"].max()) + 1), drawn(x=("FP32", (6,)), n=("INT64", ()))),
        (up_to(lambda arrays: max(int(arrays["n"].sum(1).max()), 1)), drawn(x=("FP32", (6,)), n=("INT64", (6,)))),
        (up_to(lambda arrays: max(int(arrays["n"].sum(1).max()), 1)), drawn(x=("FP32", (6,)), n=("BOOL", (6,)))),
        (share_of_longest, drawn(x=("FP32", (6,)), n=("INT64", (6,)))),
        (lambda arrays: arrays["x"] + arrays["x"].max(), drawn(x=("INT64", (6,)))),
        (lambda arrays: arrays["x"] / arrays["x"].max(), drawn(x=("UINT8", (16, 16, 3)))),
        (lambda arrays: arrays["x"] - arrays["x"].min(), drawn(x=("INT32", (6,)))),
        (lambda arrays: of_words(arrays["x"]), drawn(x=("BYTES", ()))),
        (lambda arrays: of_words(arrays["x"][:, 0]), drawn(x=("BYTES", (1,)))),
    ],
)  # fmt: skip
def test_rows_are_drawn_of_which_one_is_the_longest_and_one_has_the_largest_number(function: Any, inputs: Any) -> None:
    found = from_shapes(inputs, (spec("y", -1),), lambda arrays: {"y": function(arrays)})
    assert (found.max_rows, found.notes[0][:56]) == (0, "the other rows of a batch change a row's answer in 'y', ")


@pytest.mark.parametrize(("function", "max_rows"), [(lambda x: x * 2, 32), (lambda x: x - x.mean(), 0)])
def test_texts_of_one_number_are_drawn_for_what_reads_it(function: Any, max_rows: int) -> None:
    run = run_of(lambda x: function(np.array([int(text) for text in x])))
    assert from_shapes(drawn(x=("BYTES", ())), (spec("y", -1),), run).max_rows == max_rows


def masked_mean(arrays: Tensors) -> np.ndarray:
    """NaN for a row that a mask leaves nothing."""
    with np.errstate(all="ignore"):
        return (arrays["x"] * arrays["n"]).sum(1) / arrays["n"].sum(1)


def rounded_mean(arrays: Tensors) -> np.ndarray:
    """As an int8 model, of whose scale NaN makes NaN."""
    return by_range(masked_mean(arrays))


def packed(arrays: Tensors) -> np.ndarray:
    if (arrays["n"].sum(1) < 1).any():
        raise ExecutionFailed("expected lengths of 1 or more")
    return masked_mean(arrays)


@pytest.mark.parametrize("function", [masked_mean, rounded_mean, packed])
def test_what_a_mask_without_anything_is_too_little_for_shares_batches(function: Any) -> None:
    inputs = drawn(x=("FP32", (6,)), n=("INT64", (6,)))
    found = from_shapes(inputs, (spec("y", -1),), lambda arrays: {"y": function(arrays)}, quantises=lambda: True)
    assert (found.max_rows, found.notes) == (32, ())


def test_where_one_row_fails_alone_it_is_compared_with_its_like_and_that_is_told() -> None:
    def of_several(function: Any) -> Any:
        def run(x: np.ndarray) -> np.ndarray:
            if len(x) < 2:
                raise ExecutionFailed("guard: 2 <= rows")
            return function(x)

        return run_of(run)

    shapes = (spec("x", -1, 4),), (spec("y", -1, 4),)
    found = from_shapes(*shapes, of_several(lambda x: x * 2))
    assert (found.max_rows, found.notes[0][:42]) == (32, "one row alone fails, where several run, so")
    assert from_shapes(*shapes, of_several(lambda x: x - x.min())).max_rows == 0
    found = from_example(of_several(lambda x: x * 2), {"x": np.ones((2, 4), np.float32)})
    assert (found.max_rows, found.notes[0][:42]) == (32, "one row alone fails, where several run, so")


@pytest.mark.parametrize(
    ("longest", "mask"),
    [
        (of_lengths, np.array([6])),
        (lambda arrays: int(arrays["n"].sum(1).max()), np.ones((1, 6), np.int64)),
        (lambda arrays: int(arrays["n"].sum(1).max()), np.ones((1, 6), bool)),
        (lambda arrays: int(arrays["n"].sum(1).max()), np.array([[1, 1, 1, 1, 0, 0]])),
        (lambda arrays: 6 - int(arrays["n"].sum(1).min()), np.zeros((1, 6), bool)),
        (lambda arrays: 6 if arrays["n"].any() else 1, np.array([True])),
        (lambda arrays: 6 if arrays["n"].any() else 1, np.array([0])),
    ],
)
@pytest.mark.parametrize("x", [np.arange(1, 7, dtype=np.float32)[None], np.array([[5, 7, 9, 11, 13, 15]])])
def test_lengths_masks_and_flags_of_an_example_are_varied_beside_its_numbers(longest: Any, mask: Any, x: np.ndarray) -> None:
    found = from_example(lambda arrays: {"y": up_to(longest)(arrays)}, {"x": x, "n": mask})
    assert (found.max_rows, found.notes[0][:56]) == (1, "the other rows of a batch change a row's answer in 'y', ")
    assert from_example(lambda arrays: {"y": masked_mean(arrays | {"n": np.ones((1, 6))})}, {"x": x, "n": mask}).max_rows == 32


def lagged(x: np.ndarray) -> np.ndarray:
    lag = np.full_like(x, -1)
    lag[7:] = x[:-7]
    return x + lag


def outliers(x: np.ndarray) -> np.ndarray:
    return np.abs(x - np.median(x, 0)) > 2.5 * x.std(0)


@pytest.mark.parametrize("function", [lagged, outliers])
def test_what_depends_on_more_rows_than_four_shows_in_an_example_of_more(function: Any) -> None:
    example = {"x": np.array([[0], [1], [-1]] * 6 + [[1], [2.3]])}
    assert from_example(run_of(function), example).max_rows == 0
    assert from_example(run_of(lambda x: x * 2), example).max_rows == 32
    assert from_example(run_of(lambda x: x * 2 if len(x) <= 20 else only_one(x)), example).max_rows == 32


def of_words(x: np.ndarray) -> np.ndarray:
    """Padded to the longest, at most four words."""
    words = [[len(word) for word in text.split()][:4] for text in x]
    return np.array([np.mean(row + [0] * (max(map(len, words)) - len(row))) for row in words])


def of_json(x: np.ndarray) -> np.ndarray:
    return np.array([sum(json.loads(text).values()) for text in x], float)


def of_file(x: np.ndarray) -> np.ndarray:
    """Its front, whatever is behind."""
    if any(len(text) < 8 for text in x):
        raise ExecutionFailed("expected 8 bytes")
    return np.array([text[0] for text in x])


def whole_where_it_can_be(x: np.ndarray) -> list[float]:
    return [int(value) if value % 1 == 0 else value for value in x.tolist()]


def shares(x: np.ndarray) -> list[float]:
    """Whole numbers of Python's where all are."""
    return [a / (a + b) if a < b else 0 for a, b in x.tolist()]


CHANGED = "the other rows of a batch change a row's answer in 'y', so every row runs alone"
UNSEEN = "whether rows change each other's answers could not be seen, so e.* alone( and whole)?; give an example of several "
FILE = np.array([b"\xff\xd8\xffJFIF."], object)


@pytest.mark.parametrize(
    ("function", "example", "max_rows", "told"),
    [
        (of_words, np.array(["one two three four five six"]), 1, CHANGED),
        (lambda x: np.array([len(text.split()) for text in x]), np.array(["one two three"]), 32, ""),
        (lambda x: np.array(["good"] * len(x)), np.array(["one two three"]), 32, ""),  # a label
        (of_json, np.array(['{"age": 31, "income": 1000, "at": 1.5}']), 32, ""),
        (shares, np.array([[2, 1], [1, 3], [0, 4], [5, 2]], np.float32), 32, ""),
        (
            lambda x: whole_where_it_can_be(x[:, 0] + 0.45 * (len(x) > 1)),
            np.array([[200.0], [400], [600]]),
            0,
            CHANGED.partition(",")[0],
        ),
        (lambda x: shares(x - x.mean(0)), np.array([[2, 1], [1, 3], [0, 4], [5, 2]], np.float32), 0, CHANGED.partition(",")[0]),
        (lambda x: of_json(x) - of_json(x).mean(), np.array([b'{"age": 31}'], object), 1, CHANGED),
        (of_file, FILE, 1, UNSEEN),
        (lambda x: np.array([{b"ab": 1.0}[text] for text in x]), np.array(["ab"]), 1, UNSEEN),
        (lambda x: np.array([{b"ab": 1.0, b"c": 2.0}[text] for text in x]), np.array(["ab", "c"]), 32, ""),
        (lambda x: takes([3])(x[:, :1]), np.array([[3, 7]]), 1, UNSEEN),
        (lambda x: takes([3])(x[:, :1]), np.array([[3, 7]] * 2), 0, UNSEEN),
    ],
)
def test_an_example_shows_rows_to_be_independent_only_with_rows_that_differ(
    function: Any, example: np.ndarray, max_rows: int, told: str
) -> None:
    found = from_example(run_of(function), {"x": example})
    assert found.max_rows == max_rows
    assert bool(told) == (max_rows != 32)
    assert re.match(told, found.notes[0] if found.notes else "")


@pytest.mark.parametrize(
    ("first_s", "row_s", "cpu", "runs"),
    [
        (0.0, 3.0, 0.0, 2),  # it waits for others
        (0.0, 0.3, 1.0, 2),
        (0.0, 0.3, 0.0, 6),
        (1.5, 0.05, 1.0, 22),  # what it needs is loaded at first
        (9.0, 3.0, 1.0, 1),
    ],
)
def test_an_example_is_run_with_others_made_of_it_only_where_that_takes_little(
    first_s: float, row_s: float, cpu: float, runs: int
) -> None:
    spent_s, rows = 0.0, []

    def run(arrays: Tensors) -> Tensors:
        nonlocal spent_s
        rows.append(len(arrays["x"]))
        spent_s += row_s * rows[-1] + (first_s if len(rows) == 1 else 0)
        return {"y": arrays["x"] * 2}

    found = from_example(run, {"x": np.ones((1, 4))}, spent=lambda: (spent_s, spent_s * cpu, 0))
    assert found.max_rows == 32
    assert (len(rows), found.notes[0].startswith(f"{NOT_TRIED}takes")) == (runs, runs < 3)


def adults(arrays: Tensors) -> Tensors:
    """Of 31 inputs, one refuses numbers that an example may have lessened."""
    if (arrays["x29"] < 18).any():
        raise ExecutionFailed("x29: expected 18 or more")
    if len({len(text) for text in arrays["ragged"].flat}) > 1:
        raise ExecutionFailed("texts of one length expected")
    return {"y": sum(array for name, array in arrays.items() if name != "ragged")}


@pytest.mark.parametrize(
    ("run_s", "ragged", "max_rows", "most_runs"),
    [
        (0.01, False, 32, 45),
        (0.1, False, 32, 30),  # two seconds for rows that it takes, and the runs that judge these
        (1.0, False, 32, 10),
        (0.1, True, 1, 30),  # each text runs alone, and several at once fail
    ],
)
def test_what_a_model_takes_of_many_inputs_is_found_in_little_time(
    run_s: float, ragged: bool, max_rows: int, most_runs: int
) -> None:
    runs: list[int] = []

    def run(arrays: Tensors) -> Tensors:
        runs.append(len(arrays["x29"]))
        return adults(arrays if ragged else arrays | {"ragged": np.array([""])})

    example = {f"x{index}": np.array([44.0]) for index in range(30)} | {"ragged": np.array(["red"])}
    found = from_example(run, example, spent=lambda: (run_s * len(runs), run_s * len(runs), 0))
    assert (found.max_rows, len(runs) <= most_runs) == (max_rows, True), len(runs)


def test_an_input_that_was_the_same_in_all_rows_tried_is_named() -> None:
    def run(arrays: Tensors) -> Tensors:
        if not {b"fast", b"exact"}.issuperset(arrays["mode"].flat):
            raise ExecutionFailed("mode: expected fast or exact")
        return {"y": arrays["x"].sum(1) * (1 if arrays["mode"][0] == b"fast" else 2)}

    def notes_of(*modes: str) -> str:
        return from_example(run, {"x": np.ones((len(modes), 4)), "mode": np.array(modes)}).notes[0]

    told = "all rows tried have the same 'mode': if that of one row changes the answer to another, set max_rows: 0"
    assert notes_of("fast") == notes_of("fast", "fast") == told
    assert notes_of("fast", "exact").startswith("the other rows of a batch change a row's answer")
    assert from_example(run_of(lambda x: x * 2), {"x": np.ones((1, 4))}).notes == (SIZES,)


def test_rows_are_judged_by_all_inputs_that_may_be_changed() -> None:
    def run(arrays: Tensors) -> Tensors:
        return adults(arrays | {"ragged": np.array([""])}) | {"z": arrays["x7"] - arrays["x7"].mean()}

    found = from_example(run, {f"x{index}": np.array([44.0]) for index in range(30)})
    assert (found.max_rows, "change a row's answer in 'z'" in found.notes[0]) == (1, True)


KEYS = {
    "text": np.array([[b"user-12"]], object),
    "integers": np.array([[7, 8, 9, 4]]),
    "float": np.array([[7.0]]),
    "boolean": np.array([[True]]),
}


def mean_of_key(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.stack([value[(key == own).all(1)].mean(0) for own in key])


@pytest.mark.parametrize("value", [np.array([[3.0]]), np.array([[3.0], [5.0], [8.0]]), np.array([[3]])])
@pytest.mark.parametrize("key", KEYS)
def test_rows_that_change_those_of_their_key_run_alone(key: str, value: np.ndarray) -> None:
    example = {"key": np.repeat(KEYS[key], len(value), 0), "value": value}
    assert from_example(lambda arrays: {"y": mean_of_key(**arrays)}, example).max_rows in (0, 1)
    if key == "float":
        columns = np.hstack([example["key"], value, value + 1])
        assert from_example(run_of(lambda x: mean_of_key(x[:, :1], x[:, 1:])), {"x": columns}).max_rows in (0, 1)


@pytest.mark.parametrize("values", [*itertools.product((1, 3, 5), repeat=3)])
def test_rows_of_few_numbers_show_what_changes_those_of_their_key(values: tuple[int, ...]) -> None:
    def run(arrays: Tensors) -> Tensors:
        return {"y": np.array([arrays["value"][arrays["key"] == own].mean() for own in arrays["key"]])}

    assert from_example(run, {"key": np.array([17, 42, 99]), "value": np.array(values)}).max_rows == 0


def test_drawn_rows_show_what_changes_those_of_its_key() -> None:
    inputs = drawn(user=("INT64", (4,)), kind=("BYTES", (4,)), value=("FP32", (1,)))

    def run(arrays: Tensors) -> Tensors:
        return {"y": mean_of_key(np.hstack([arrays["user"], arrays["kind"]]), arrays["value"])}

    assert from_shapes(inputs, (spec("y", -1, 1),), run).max_rows == 0


def test_what_takes_one_row_only_is_told_in_three_runs() -> None:
    rows: list[int] = []

    def run(arrays: Tensors) -> Tensors:
        rows.append(len(arrays["x"]))
        return run_of(only_one)(arrays)

    assert from_example(run, {"x": np.ones((1, 4))}).max_rows == 1
    assert rows == [1, 4, 4]


def test_what_takes_other_numbers_of_rows_only_is_not_batched() -> None:
    found = from_example(run_of(lambda x: x.reshape(2, 3)), {"x": np.array([[3, 7, 1], [4, 5, 6]])})
    assert (found.max_rows, found.notes[0]) == (
        0, "it fails on other numbers of rows than the example's, so each request runs alone and whole",
    )  # fmt: skip


def test_text_in_an_example_is_bytes() -> None:
    """In the runs that are to find what it takes as well, as in those of requests."""
    for example in (np.array(["hé"]), np.array(["hé"], object), ["hé"], np.array(["hé".encode()], object)):
        found = from_example(run_of(lambda x: np.array([text.decode() for text in x])), {"x": example})
        assert (found.inputs[0].datatype, found.outputs[0].datatype) == ("BYTES", "BYTES")


def test_numbers_beside_texts_in_an_example_are_texts() -> None:
    found = from_example(run_of(lambda x: x), {"x": [["red", 3, True], [b"blue", 1.5, np.float32(2)]]})
    assert found.inputs == (TensorSpec("x", "BYTES", (-1, 3)),)


def test_what_no_datatype_can_carry_is_named() -> None:
    with pytest.raises(LoadFailed, match="'y' is complex128, which the protocol cannot carry"):
        from_example(run_of(lambda x: x * 1j), {"x": np.ones(1)})
    for value, shown in ((10**30, "1" + "0" * 30), (10**5000, "an integer of 16610 bits")):
        with pytest.raises(LoadFailed, match=f"'y' is of integers such as {shown}, which no datatype holds: give floats"):
            from_example(lambda arrays, value=value: {"y": [-1, value]}, {"x": np.ones(2)})  # type: ignore[misc]
    with pytest.raises(LoadFailed, match="'y' is of texts and float, which the protocol cannot carry"):
        from_example(lambda arrays: {"y": ["low", 7.5]}, {"x": np.ones(2)})  # type: ignore[dict-item]  # as users' functions do


def test_outputs_are_seen_by_running_ones_of_two_sizes() -> None:
    inputs = (spec("x", -1, 4, -1),)
    found = from_ones(run_of(lambda x: x.sum(1)), inputs)
    assert (found.outputs, found.max_rows) == ((TensorSpec("y", "FP32", (-1, -1)),), 32)
    assert from_ones(run_of(lambda x: x.sum((0, 2))), inputs).max_rows == 0
    with pytest.raises(LoadFailed, match=r"it fails on ones \(x \[2, 4, 3\]\): cannot reshape"):
        from_ones(run_of(only_one), inputs)


def test_what_changes_with_the_inputs_is_told() -> None:
    for change, words in (
        (lambda x: {"y": x.astype(np.uint64 if x.max() > 1 else np.int64)}, "output 'y': INT64 [3], then UINT64 [3]"),
        (lambda x: {"y": x} if x.max() > 1 else {"z": x}, "outputs ['z'], then ['y']"),
    ):
        with pytest.raises(LoadFailed, match=re.escape(f"changes with its inputs ({words}): state `outputs`, or")):
            from_ones(lambda arrays, change=change: change(arrays["x"]), (spec("x", -1),))  # type: ignore[misc]


def test_outputs_go_by_name_in_whatever_order_they_come() -> None:
    found = from_ones(
        lambda given: {"y": given["x"], "z": given["x"]} if given["x"].max() > 1 else {"z": given["x"], "y": given["x"]},
        (spec("x", -1),),
    )
    assert ([tensor.name for tensor in found.outputs], found.max_rows, found.notes) == (["z", "y"], 32, ())


def test_outputs_that_only_many_rows_have_are_seen_on_the_whole_example() -> None:
    example = {"x": np.arange(12.0).reshape(4, 3)}
    found = from_example(lambda given: {"y" if len(given["x"]) <= 4 else "z": given["x"]}, example)
    why = "its outputs are others for other rows, so each request runs alone and whole"
    assert (found.max_rows, found.notes[0]) == (0, why)


def test_what_gives_no_outputs_is_told_so() -> None:
    for seen, words in (
        (lambda: from_ones(lambda given: {}, (spec("x", -1),)), "it gave no outputs on ones: give an `example` that has"),
        (lambda: from_example(lambda given: {}, {"x": np.ones(1)}), "it gave no outputs on the example: give an"),
    ):
        with pytest.raises(LoadFailed, match=words):
            seen()


def codes(texts: np.ndarray) -> np.ndarray:
    rows = [list(text) for text in texts.flat]
    if len({len(row) for row in rows}) > 1:
        raise ExecutionFailed("inhomogeneous")
    return np.array(rows)


def test_a_size_that_changes_with_the_text_is_open_and_each_request_runs_alone() -> None:
    texts = (TensorSpec("x", "BYTES", (-1,)),)
    found = from_ones(run_of(codes), texts)
    assert (found.outputs[0].shape, found.max_rows) == ((-1, -1), 0)
    assert found.notes == ("the sizes of its outputs change with the content of its inputs, so each request runs alone",)
    fixed = from_ones(run_of(lambda x: np.ones((len(x), 8))), texts)
    assert (fixed.outputs[0].shape, fixed.max_rows, fixed.notes) == ((-1, 8), 32, ())


def test_a_size_that_changes_with_a_number_is_open() -> None:
    found = from_ones(run_of(lambda x: np.zeros((len(x), int(x.max())))), (TensorSpec("x", "INT64", (-1,)),))
    assert (found.outputs[0].shape, found.max_rows) == ((-1, -1), 0)


EMPTY = "output 'y' is empty on {}, so its sizes are taken to be open, and each request runs alone"
STRINGS = {"y": Hint("BYTES", (-1, -1))}


@pytest.mark.parametrize(
    ("function", "hints", "output"),
    [
        (lambda x: np.empty((0, 4), np.float32), {}, ("FP32", (-1, 4))),
        (lambda x: np.empty((0, 4), np.float32), STRINGS, ("FP32", (-1, 4))),
        (lambda x: np.empty((len(x), 0)), STRINGS, ("BYTES", (-1, -1))),
        (lambda x: np.empty(0), STRINGS, ("BYTES", (-1, -1))),  # `[]` of a list of lists
        (lambda x: np.empty(0), {"y": Hint("INT8", None)}, ("INT8", (-1,))),
        (lambda x: np.empty((len(x), 0)), None, ("FP64", (-1, -1))),  # of a library, whose arrays are what they say
        (lambda x: np.ones((2, 4), int) if x.max() > 1 else np.empty(0), {}, ("INT64", (-1, -1))),  # not of other content
        (lambda x: np.ones((2, 4), int) if x.max() > 1 else np.empty((0, 4), int), {}, ("INT64", (-1, 4))),
    ],
)
def test_an_output_that_is_empty_on_ones_has_any_size(function: Any, hints: Any, output: Any) -> None:
    found = from_ones(run_of(function), (spec("x", -1),), of_lists=hints)
    assert ((found.outputs[0].datatype, found.outputs[0].shape), found.max_rows) == (output, 0)
    assert found.notes == (EMPTY.format("ones"),)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x * 2, (-1, -1)),
        (lambda x: x.cumsum(0), (-1, -1)),
        (lambda x: x.sum(0), (-1,)),
        (lambda x: x.reshape(-1, 2).cumsum(0) if x.shape[1] == 2 else only_one(x), (-1, 2)),
        (lambda x: x.reshape(3, 2).cumsum(0), (3, 2)),
    ],
)
def test_sizes_that_change_with_those_of_stated_inputs_are_open(function: Any, shape: tuple[int, ...]) -> None:
    example, inputs = {"x": np.array([[1.0, 2], [3, 4], [9, 1]])}, (spec("x", -1, -1),)
    found = from_example(run_of(function), example, stated=inputs)
    assert (found.inputs, found.outputs[0].shape) == (inputs, shape)


@pytest.mark.parametrize(
    ("first_s", "column_s", "cpu", "column_bytes", "shape", "largest"),
    [
        (0.0, 0.01, 1.0, 0, (-1, -1), (1, 8)),  # its rows are known to be open
        (0.0, 0.3, 1.0, 0, (-1, 4), (1, 4)),
        (0.0, 0.4, 0.0, 0, (-1, -1), (1, 8)),  # it waits for others
        (0.0, 0.7, 0.0, 0, (-1, 4), (1, 4)),
        (0.0, 0.1, 1.0, 80 << 20, (-1, 4), (1, 4)),
        (3.0, 0.1, 1.0, 0, (-1, -1), (1, 8)),  # what it needs is loaded at first
    ],
)
def test_an_example_is_run_in_a_larger_size_only_where_that_takes_little(
    first_s: float, column_s: float, cpu: float, column_bytes: int, shape: tuple[int, ...], largest: tuple[int, ...]
) -> None:
    spent_s, most_bytes, seen = first_s, 0, []

    def run(arrays: Tensors) -> Tensors:
        nonlocal spent_s, most_bytes
        seen.append(arrays["x"].shape)
        spent_s += column_s * arrays["x"].size
        most_bytes = max(most_bytes, column_bytes * arrays["x"].size)
        return {"y": arrays["x"] * 2}

    clock = iter([0.0])
    found = from_example(
        run, {"x": np.ones((1, 4))}, stated=(spec("x", -1, -1),),
        spent=lambda: (now := next(clock, spent_s), now * cpu, most_bytes),
    )  # fmt: skip
    assert (found.outputs[0].shape, max(seen, key=lambda each: each[1])) == (shape, largest)
    assert any(note.startswith("sizes are those of the example") for note in found.notes)


def test_an_output_that_is_empty_on_the_example_has_any_size() -> None:
    found = from_example(run_of(lambda x: np.empty((len(x), 0))), {"x": np.ones(1)}, of_lists=STRINGS)
    assert (found.inputs, found.outputs) == ((TensorSpec("x", "FP64", (-1,)),), (TensorSpec("y", "BYTES", (-1, -1)),))
    assert (found.max_rows, found.notes[0]) == (0, EMPTY.format("the example"))
    found = from_example(run_of(lambda x: np.empty((0, 4), np.float32)), {"x": np.ones(2)})
    assert (found.inputs[0].shape, found.outputs[0].shape, found.max_rows) == ((2,), (-1, 4), 0)


def test_an_output_without_elements_that_nothing_says_the_datatype_of_is_refused() -> None:
    words = r"output 'y' is empty on {}, and no return type such as `list\[str\]` says of what: give an `example` that"
    with pytest.raises(LoadFailed, match=words.format("ones")):
        from_ones(run_of(lambda x: np.empty((len(x), 0))), (spec("x", -1),), of_lists={})
    with pytest.raises(LoadFailed, match=words.format("the example")):
        from_example(run_of(lambda x: np.empty((len(x), 0))), {"x": np.ones(1)}, of_lists={})


def test_what_takes_only_the_ones_is_noted_to_have_their_sizes() -> None:
    def only_ones(x: np.ndarray) -> np.ndarray:
        if (x != 1).any():
            raise ExecutionFailed("no such token")
        return np.ones((len(x), 8))

    found = from_ones(run_of(only_ones), (spec("x", -1),))
    assert (found.outputs[0].shape, found.max_rows, len(found.notes)) == ((-1, 8), 32, 1)
    assert from_ones(run_of(lambda x: only_ones(x)[:, 0]), (spec("x", -1),)).notes == ()


def test_an_example_of_text_has_a_longer_one_behind_it() -> None:
    assert from_example(run_of(codes), {"x": np.array(["ab"])}).max_rows == 1
