"""What is known to be as declared at a glance is what the whole check would let pass as it is."""

import numpy as np
import pytest

from backends.base import BackendError, LastPart, ModelSpec, Tensors, TensorSpec, are_exact, checked_outputs, exact_outputs

SPEC = ModelSpec(
    "", (TensorSpec("x", "FP32", (-1, 3)),), (TensorSpec("y", "FP32", (-1, 4)), TensorSpec("z", "INT64", (-1,))), 8
)
INPUTS: Tensors = {"x": np.zeros((2, 3), np.float32)}
RIGHT: Tensors = {"y": np.zeros((2, 4), np.float32), "z": np.zeros(2, np.int64)}
OTHERS: dict[str, Tensors] = {
    "too few rows": RIGHT | {"y": np.zeros((1, 4), np.float32)},
    "too many columns": RIGHT | {"y": np.zeros((2, 5), np.float32)},
    "another rank": RIGHT | {"z": np.zeros((2, 1), np.int64)},
    "another datatype": RIGHT | {"y": np.zeros((2, 4))},
    "of another byte order": RIGHT | {"y": np.zeros((2, 4), ">f4")},
    "one that is missing": {"y": RIGHT["y"]},
    "one more": RIGHT | {"w": RIGHT["z"]},
    "another name": {"y": RIGHT["y"], "w": RIGHT["z"]},
    "a list": RIGHT | {"z": [1, 2]},  # type: ignore[dict-item]
    "another order": {"z": RIGHT["z"], "y": RIGHT["y"]},
    "a part": LastPart(RIGHT),
}


def test_outputs_that_are_exact_pass_the_check_as_they_are() -> None:
    exact = exact_outputs(SPEC)
    assert exact is not None
    assert are_exact(exact, INPUTS, RIGHT)
    assert checked_outputs(SPEC, INPUTS, RIGHT) is RIGHT
    assert not are_exact(exact, {}, RIGHT)


@pytest.mark.parametrize("outputs", OTHERS.values(), ids=OTHERS)
def test_others_are_not_exact(outputs: Tensors) -> None:
    exact = exact_outputs(SPEC)
    assert exact is not None
    assert not are_exact(exact, INPUTS, outputs)
    try:
        checked = checked_outputs(SPEC, INPUTS, outputs)
    except BackendError:
        return
    assert checked is not outputs or isinstance(outputs, LastPart) or outputs["y"].dtype != np.float32


@pytest.mark.parametrize("kind", [dict, LastPart])
@pytest.mark.parametrize("y", [RIGHT["y"], RIGHT["y"].astype(np.float64)], ids=["as declared", "cast"])
def test_outputs_come_in_the_order_of_the_spec(y: np.ndarray, kind: type[Tensors]) -> None:
    checked = checked_outputs(SPEC, INPUTS, kind({"z": RIGHT["z"], "y": y}))
    assert list(checked) == ["y", "z"]
    assert type(checked) is kind
    assert checked["z"] is RIGHT["z"]


@pytest.mark.parametrize(
    ("output", "max_rows", "decoupled"),
    [
        (TensorSpec("y", "FP32", (-1, -1)), 8, False),
        (TensorSpec("y", "BYTES", (-1, 1)), 8, False),
        (TensorSpec("y", "FP32", (4,)), 0, False),
        (TensorSpec("y", "FP32", (-1, 4)), 8, True),
    ],
)
def test_where_more_is_to_be_checked_nothing_is_exact(output: TensorSpec, max_rows: int, decoupled: bool) -> None:
    assert exact_outputs(ModelSpec("", (), (output,), max_rows, decoupled=decoupled)) is None
