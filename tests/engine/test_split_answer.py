"""A request's outputs, part by part."""

import numpy as np
import pytest

from backends.base import Tensors
from gateway.engine.split_answer import SplitAnswer

NUMBERS = np.arange(15, dtype=np.float32).reshape(5, 3)


def texts(*elements: object) -> np.ndarray:
    made = np.empty((len(elements), 1), object)
    made[:, 0] = elements
    return made


def test_parts_come_in_any_order_and_the_last_one_gives_all() -> None:
    answer = SplitAnswer(5)
    words = texts(b"a", "b", b"c", b"d", b"e")
    assert answer.add(3, 2, {"y": NUMBERS[3:], "s": words[3:]})
    assert answer.add(1, 2, {"y": NUMBERS[1:3], "s": words[1:3]})
    assert answer.whole() is None
    assert answer.add(0, 1, {"s": words[:1], "y": NUMBERS[:1]})
    whole = answer.whole()
    assert whole is not None
    np.testing.assert_array_equal(whole["y"], NUMBERS)
    np.testing.assert_array_equal(whole["s"], words)


def test_texts_of_fixed_length_keep_their_ends() -> None:
    answer = SplitAnswer(2)
    answer.add(0, 1, {"s": np.array([["a"]])})
    answer.add(1, 1, {"s": np.array([["longer"]])})
    whole = answer.whole()
    assert whole is not None
    assert whole["s"].tolist() == [["a"], ["longer"]]


@pytest.mark.parametrize("shape", [(7, 3, 1 << 17), (2, 5 << 18), (1 << 21, 2)])
def test_long_outputs_are_copied_little_at_a_time(shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    answer, calls = SplitAnswer(shape[0]), 1
    while not answer.add(0, shape[0], {"y": numbers}):
        calls += 1
    assert numbers.nbytes >> 18 <= calls <= 2 * (numbers.nbytes >> 18) + 1
    whole = answer.whole()
    assert whole is not None
    np.testing.assert_array_equal(whole["y"], numbers)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"y": np.ones((1, 1), np.float32)}, r"rows of float32 \[1\] of one part, float32 \[3\] of another"),
        ({"y": np.ones((1, 3), np.int64)}, "rows of int64"),
        ({}, r"outputs \[\] of one part, \['y'\] of another"),
        ({"y": NUMBERS[:1], "z": NUMBERS[:1]}, r"outputs \['y', 'z'\]"),
    ],
)
def test_parts_that_differ_make_no_answer(other: Tensors, said: str) -> None:
    answer = SplitAnswer(2)
    answer.add(0, 1, {"y": NUMBERS[:1]})
    with pytest.raises(ValueError, match=said):
        answer.add(1, 1, other)
