"""What has ended a session is remembered by its content: no more of them than a bound, and no longer than a minute."""

import numpy as np

from gateway.engine.killers import Killers
from gateway.types import InferRequest, ParameterValue

MINUTE_NS = 60_000_000_000


def request_of(*values: float, name: str = "X", **parameters: ParameterValue) -> InferRequest:
    inputs = {name: np.array(values, np.float32).reshape(1, -1)}
    return InferRequest("m", "1", "", inputs, 1, 0, parameters=parameters)


def test_it_is_remembered_for_a_minute_and_no_longer() -> None:
    killers = Killers()
    killers.add(request_of(1.0), 7)
    assert killers.has(request_of(1.0), 7 + MINUTE_NS - 1)
    assert not killers.has(request_of(1.0), 7 + MINUTE_NS)
    assert len(killers) == 0


def test_each_has_a_minute_of_its_own() -> None:
    killers = Killers()
    killers.add(request_of(1.0), 0)
    killers.add(request_of(2.0), 10)
    assert [killers.has(request_of(value), MINUTE_NS + 9) for value in (1.0, 2.0)] == [False, True]
    assert len(killers) == 1


def test_one_that_kills_again_is_remembered_for_a_minute_from_then_and_the_others_no_longer_for_it() -> None:
    killers = Killers()
    killers.add(request_of(1.0), 0)
    killers.add(request_of(2.0), 10)
    killers.add(request_of(1.0), 20)  # it stood in line already when it killed for the first time
    assert [killers.has(request_of(value), MINUTE_NS + 10) for value in (2.0, 1.0)] == [False, True]
    assert killers.has(request_of(1.0), MINUTE_NS + 19)
    assert not killers.has(request_of(1.0), MINUTE_NS + 20)


def test_the_latest_64_are_remembered() -> None:
    killers = Killers()
    for value in range(64):
        killers.add(request_of(value), value)
    assert len(killers) == 64
    assert all(killers.has(request_of(value), 64) for value in range(64))
    killers.add(request_of(0), 64)  # the latest of all, from now on
    assert len(killers) == 64
    killers.add(request_of(64), 65)
    assert len(killers) == 64
    assert [value for value in range(65) if not killers.has(request_of(value), 65)] == [1]


def test_only_what_is_the_same_in_all_that_the_model_sees_is_taken_for_one() -> None:
    killers = Killers()
    killers.add(request_of(1.0, 2.0, depth=1, mode="fast"), 0)
    assert killers.has(request_of(1.0, 2.0, mode="fast", depth=1), 1)  # in whatever order
    for other in (
        request_of(1.0, 3.0, depth=1, mode="fast"),
        request_of(1.0, 2.0, 0.0, depth=1, mode="fast"),
        request_of(1.0, 2.0, depth=2, mode="fast"),
        request_of(1.0, 2.0, depth=True, mode="fast"),
        request_of(1.0, 2.0, mode="fast"),
        request_of(1.0, 2.0),
        request_of(1.0, 2.0, name="Z", depth=1, mode="fast"),
    ):
        assert not killers.has(other, 1)


def test_the_same_bytes_in_another_shape_or_type_are_something_else() -> None:
    def of(array: np.ndarray) -> InferRequest:
        return InferRequest("m", "1", "", {"X": array}, len(array), 0)

    row, column = np.array([[1.0, 2.0]], np.float32), np.array([[1.0], [2.0]], np.float32)
    killers = Killers()
    killers.add(of(row), 0)
    for shape in (column, row.view(np.int32)):
        killers.add(of(shape + 1), 0)  # so that its look is known
        assert not killers.has(of(shape), 1)
    assert killers.has(of(row), 1)


def test_inputs_count_by_their_names_not_by_their_order() -> None:
    one, two = np.ones((1, 1), np.float32), np.full((1, 1), 2, np.float32)
    killers = Killers()
    killers.add(InferRequest("m", "1", "", {"A": one, "B": two}, 1, 0), 0)
    assert killers.has(InferRequest("m", "1", "", {"B": two, "A": one}, 1, 0), 1)
    assert not killers.has(InferRequest("m", "1", "", {"B": one, "A": two}, 1, 0), 1)
    assert not killers.has(InferRequest("m", "1", "", {"A": one}, 1, 0), 1)


def test_a_parameter_that_no_encoding_has_is_remembered_like_any_other() -> None:
    killers = Killers()
    killers.add(request_of(1.0, word="\ud800"), 0)
    assert killers.has(request_of(1.0, word="\ud800"), 1)
    assert not killers.has(request_of(1.0, word="\ud801"), 1)
