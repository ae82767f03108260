import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from loadtest.errors import UsageError
from loadtest.verdict.agreement import (
    STATISTICS,
    agreement,
    compare_of,
    cosine,
    described,
    difference,
    equality,
    of_all,
    relative_error,
    statistic_of,
    top_1,
)

NAN, INF = math.nan, math.inf


def row(*values: float, dtype: str = "float32") -> np.ndarray:
    return np.array([values], dtype=dtype)


def words(*values: bytes) -> np.ndarray:
    array = np.empty((1, len(values)), dtype=object)
    array[0] = values
    return array


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (row(1, 2, 3), row(1, 2, 3), 1.0),
        (row(1, 2, 3), row(2, 4, 6), 1.0),  # blind to length
        (row(1, 0), row(0, 1), 0.0),
        (row(1, 0), row(-1, 0), -1.0),
        (row(1, 0), row(1, 1), 1 / math.sqrt(2)),
        (row(0, 0), row(0, 0), 1.0),
        (row(0, 0), row(0, 1), 0.0),
        (row(1, 0), row(0, 0), 0.0),
        (row(1, NAN), row(1, NAN), 1.0),
        (row(1, NAN), row(1, 0), 0.0),
        (row(1, 0), row(1, INF), 0.0),
        (row(1, INF), row(1, INF), 1.0),
        (row(1, INF), row(1, -INF), 0.0),
        (row(NAN, NAN), row(NAN, NAN), 1.0),
        (row(), row(), 1.0),
        (row(1e300, 1e300, dtype="float64"), row(1e300, 1e300, dtype="float64"), 1.0),
        (row(1e-300, 0, dtype="float64"), row(0, 1e-300, dtype="float64"), 0.0),
        (row(1, 2, dtype="float16"), row(1, 2, dtype="float16"), 1.0),
    ],
)
def test_cosine_is_defined_for_every_pair(reference: np.ndarray, candidate: np.ndarray, expected: float) -> None:
    assert cosine(reference, candidate) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (row(1, 2, 3, 4, dtype="int64"), row(1, 2, 3, 5, dtype="int64"), 0.75),
        (row(2**62 + 1, dtype="int64"), row(2**62, dtype="int64"), 0.0),  # the same as doubles
        (words(b"a", b"b"), words(b"a", b"c"), 0.5),
        (words(), words(), 1.0),
        (row(True, False, dtype="bool"), row(True, True, dtype="bool"), 0.5),
        (row(1, NAN), row(1, NAN), 1.0),
        (row(1, NAN), row(1, 0), 0.5),
        (row(1, 0), row(1, NAN), 0.5),
    ],
)
def test_equality_is_the_share_of_equal_elements(reference: np.ndarray, candidate: np.ndarray, expected: float) -> None:
    assert equality(reference, candidate) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (row(0.1, 0.9), row(0.4, 0.6), 1.0),
        (row(0.1, 0.9), row(0.6, 0.4), 0.0),
        (row(0.1, 0.9), row(0.0, 0.0), 0.0),  # a constant agrees with nobody by chance of ties
        (np.array([[[0, 1], [0, 1]]]), np.array([[[0, 1], [1, 0]]]), 0.5),  # (rows, places, classes)
        (row(0.1, 0.9), row(0.1, NAN), 0.0),
        (row(3), row(4), 0.0),  # a single number has no largest
        (row(3), row(3), 1.0),
        (np.zeros((1, 0, 4)), np.zeros((1, 0, 4)), 1.0),
    ],
)
def test_top_1_asks_for_the_same_best_class(reference: np.ndarray, candidate: np.ndarray, expected: float) -> None:
    assert top_1(reference, candidate) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (row(10, 0), row(10, 1), 0.9),
        (row(10, 0), row(-10, 1), 0.0),
        (row(0, 0), row(0, 0), 1.0),
        (row(0, 0), row(0, 1e-9), 0.0),
        (row(10, NAN), row(10, NAN), 1.0),
        (row(10, NAN), row(10, 5), 0.0),
        (row(), row(), 1.0),
    ],
)
def test_relative_error_is_of_the_rows_largest(reference: np.ndarray, candidate: np.ndarray, expected: float) -> None:
    assert relative_error(reference, candidate) == pytest.approx([expected])


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_statistic_gives_one_agreement_a_row_and_1_for_the_same(name: str, rows: int) -> None:
    values = np.random.default_rng(0).standard_normal((rows, 2, 4))
    assert compare_of(name)(values, values) == pytest.approx(np.ones(rows))


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((2, 384), np.float32), "cosine"),
        (np.zeros((2, 384), ml_dtypes.bfloat16), "cosine"),
        (np.zeros((2, 1), np.float32), "relative-error"),  # the cosine of a number is its sign
        (np.zeros(2, np.float64), "relative-error"),
        (np.zeros((2, 3), np.int64), "equality"),
        (np.zeros((2, 3), np.bool_), "equality"),
        (words(b"a"), "equality"),
    ],
)
def test_the_datatype_chooses_the_statistic(array: np.ndarray, expected: str) -> None:
    assert statistic_of(array) == expected


def test_a_request_agrees_as_its_worst_row_in_its_worst_output() -> None:
    reference = {"y": np.array([[1.0, 0.0], [1.0, 0.0]]), "label": np.array([1, 2])}
    turned = {"y": np.array([[1.0, 0.0], [1.0, 1.0]]), "label": np.array([1, 2])}
    assert agreement(reference, turned, rows=2, statistics={}) == pytest.approx(1 / math.sqrt(2))
    wrong = {"y": reference["y"], "label": np.array([1, 3])}
    assert agreement(reference, wrong, rows=2, statistics={}) == 0.0
    assert agreement(reference, wrong, rows=None, statistics={}) == 0.5  # all of it is one row
    assert agreement(reference, reference, rows=2, statistics={}) == 1.0
    assert agreement({}, {}, rows=2, statistics={}) == 1.0


def test_a_statistic_can_be_asked_for_by_output_or_for_all() -> None:
    reference, candidate = {"y": np.array([[0.2, 0.8]])}, {"y": np.array([[0.45, 0.55]])}
    assert agreement(reference, candidate, rows=1, statistics={}) < 0.99
    assert agreement(reference, candidate, rows=1, statistics={"": "top-1"}) == 1.0
    assert agreement(reference, candidate, rows=1, statistics={"y": "relative-error", "": "top-1"}) == pytest.approx(0.6875)
    assert described(reference, {}, batched=True) == "cosine"
    assert described({**reference, "n": np.array([1])}, {"y": "top-1"}, batched=True) == "y: top-1, n: equality"


def test_a_function_of_the_users_own_is_called_on_the_arrays(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import numpy as np\n"
        "def close(a, b): return np.isclose(a, b).mean(axis=1)\n"
        "def bad(a, b): return [1, 2, 3]\n"
        "def odd(a, b): return [np.nan, np.inf, 7, -3]\n"
        "def one(a, b): return 0.25\n"
        "def raises(a, b): return 1 / 0\n"
        "x = 1\n"
    )
    found = compare_of(f"{own}:close")(np.array([[1.0, 2.0]]), np.array([[1.0, 3.0]]))
    assert found == pytest.approx([0.5])
    rows = np.ones((4, 1))
    assert compare_of(f"{own}:odd")(rows, rows).tolist() == [0.0, 0.0, 1.0, -3.0]
    assert compare_of(f"{own}:one")(rows, rows).tolist() == [0.25] * 4
    with pytest.raises(UsageError, match=r"own\.py:raises' failed: ZeroDivisionError"):
        compare_of(f"{own}:raises")(rows, rows)
    with pytest.raises(UsageError, match=r"expected 1 agreements, one a row, got shape \[3\]"):
        compare_of(f"{own}:bad")(np.ones((1, 2)), np.ones((1, 2)))
    for name, message in (
        (f"{own}:x", "expected a function of two arrays"),
        (f"{own}:none", "has no 'none'"),
        (f"{tmp_path}/none.py:f", "no file"),
        ("os:system", "expected cosine, equality, top-1, relative-error, or a function of your own"),
        ("cosin", "expected cosine"),
    ):
        with pytest.raises(UsageError, match=message):
            compare_of(name)


def test_outputs_that_differ_in_name_datatype_or_shape_are_told() -> None:
    y = {"y": np.zeros((1, 4), np.float32)}
    assert difference(y, y) == ""
    assert difference(y, {"z": y["y"]}) == "its outputs are z, the reference's y"
    assert difference(y, {}) == "its outputs are none, the reference's y"
    assert difference(y, {"y": np.zeros((1, 3), np.float32)}) == "its output y is FP32 [1, 3], the reference's FP32 [1, 4]"
    assert difference(y, {"y": np.zeros((1, 4), np.float16)}) == "its output y is FP16 [1, 4], the reference's FP32 [1, 4]"


def test_a_candidates_agreement_is_its_first_percentile_and_one_it_has() -> None:
    assert of_all([0.5] * 3 + [1.0] * 297) == 0.5
    assert of_all([0.5] * 2 + [0.9] + [1.0] * 297) == 0.9
    assert of_all([0.5] * 2 + [1.0] * 298) == 1.0


def test_nothing_agrees_with_itself_by_more_than_1() -> None:
    rows = np.random.default_rng(0).normal(size=(1000, 7))
    assert cosine(rows, rows).max() <= 1.0
    assert cosine(rows, -rows).min() >= -1.0
