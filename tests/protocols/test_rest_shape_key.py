"""Which requests may share a batch."""

import numpy as np
import pytest

from backends.base import ModelSpec, TensorSpec
from gateway.config import Ragged
from gateway.protocols.tensors import shape_key
from gateway.types import ALONE, ParameterValue


def _spec(*inputs: TensorSpec, max_rows: int = 8) -> ModelSpec:
    return ModelSpec("test", inputs, (TensorSpec("OUT", "FP32", (-1, 1)),), max_rows)


def test_fixed_rows_always_fit_each_other() -> None:
    spec = _spec(TensorSpec("A", "FP32", (-1, 4)))
    assert shape_key(spec, None, {"A": np.zeros((3, 4))}) is None


def test_rows_of_different_shape_do_not_share_a_batch() -> None:
    spec = _spec(TensorSpec("A", "FP32", (-1, -1)))
    short, long = ({"A": np.zeros((1, n))} for n in (4, 5))
    assert shape_key(spec, None, short) != shape_key(spec, None, long)
    assert shape_key(spec, None, short) == shape_key(spec, None, {"A": np.zeros((7, 4))})


def test_a_padded_axis_may_differ() -> None:
    spec = _spec(TensorSpec("A", "FP32", (-1, -1, 3)), TensorSpec("B", "FP32", (-1, -1)))
    ragged = Ragged(pad={"A": 0.0})
    first = {"A": np.zeros((1, 4, 3)), "B": np.zeros((1, 2))}
    longer_a = {"A": np.zeros((1, 9, 3)), "B": np.zeros((1, 2))}
    longer_b = {"A": np.zeros((1, 4, 3)), "B": np.zeros((1, 3))}
    assert shape_key(spec, ragged, first) == shape_key(spec, ragged, longer_a)
    assert shape_key(spec, ragged, first) != shape_key(spec, ragged, longer_b)


def test_an_absent_optional_input_keeps_requests_apart() -> None:
    spec = _spec(TensorSpec("A", "FP32", (-1, 4)), TensorSpec("B", "FP32", (-1, 1), optional=True))
    alone = {"A": np.zeros((1, 4))}
    both = {"A": np.zeros((1, 4)), "B": np.zeros((1, 1))}
    assert shape_key(spec, None, alone) != shape_key(spec, None, both)


def test_a_model_without_batch_dimension_needs_no_key() -> None:
    spec = _spec(TensorSpec("A", "FP32", (-1, -1)), max_rows=0)
    assert shape_key(spec, None, {"A": np.zeros((3, 4))}) is None


@pytest.mark.parametrize("max_rows", [0, 8])
def test_requests_that_say_other_things_to_the_model_do_not_share_a_batch(max_rows: int) -> None:
    spec = _spec(TensorSpec("A", "FP32", (-1, 4)), max_rows=max_rows)
    said: list[dict[str, ParameterValue]] = [
        {},
        {"k": 1},
        {"k": True},
        {"k": 1.0},
        {"k": "1"},
        {"k": 0.0},
        {"k": -0.0},
        {"j": 1},
    ]
    keys = [shape_key(spec, None, {"A": np.zeros((1, 4))}, parameters) for parameters in said]
    assert len(set(keys)) == len(said)
    two, turned = (dict.fromkeys(names, 1) for names in ("jk", "kj"))
    assert shape_key(spec, None, {}, two) == shape_key(spec, None, {}, turned)


@pytest.mark.parametrize(
    ("told", "alone"),
    [
        ({"sequence_id": 5}, True),
        ({"sequence_id": "five"}, True),
        ({"sequence_start": True}, True),
        ({"sequence_end": True}, True),
        ({"sequence_id": 0, "sequence_start": False, "sequence_end": False}, False),
        ({"sequence_id": ""}, False),
        ({"sequence": 5}, False),
    ],
)
def test_a_request_of_a_sequence_shares_no_batch(told: dict[str, ParameterValue], alone: bool) -> None:
    spec = _spec(TensorSpec("A", "FP32", (-1, -1)), max_rows=8)
    key = shape_key(spec, None, {"A": np.zeros((1, 4))}, told)
    assert isinstance(key, tuple)
    assert (ALONE in key) is alone
