import threading
import time

import numpy as np
import pytest

import backends
from backends.base import ExecutionFailed, LoadFailed, ModelSpec, SessionLost, TensorSpec


def row(*values: float) -> dict[str, np.ndarray]:
    array = np.zeros((len(values), 16), np.float32)
    array[:, 0] = values
    return {"INPUT0": array}


def test_echo_returns_a_copy_of_its_inputs() -> None:
    session = backends.load("synthetic", {"fixed_ms": 0, "row_ms": 0}).open_session(0)
    inputs = row(1, 2)
    outputs = session.run(inputs, {})
    np.testing.assert_array_equal(outputs["OUTPUT0"], inputs["INPUT0"])
    assert outputs["OUTPUT0"].base is None


def test_a_run_costs_fixed_and_per_row_time() -> None:
    session = backends.load("synthetic", {"fixed_ms": 5, "row_ms": 2}).open_session(0)
    started = time.monotonic_ns()
    session.run(row(1, 2, 3), {})
    assert time.monotonic_ns() - started >= 11_000_000  # 5 + 3 · 2 ms


def test_sum_fills_declared_outputs_with_row_sums() -> None:
    spec = ModelSpec(
        "", (TensorSpec("a", "INT32", (-1, 2)), TensorSpec("b", "FP32", (-1, -1))), (TensorSpec("s", "INT64", (-1, 2)),), 8
    )
    session = backends.load("synthetic", {"fixed_ms": 0, "row_ms": 0, "output": "sum"}, spec).open_session(0)
    outputs = session.run({"a": np.array([[1, 2], [3, 4]], np.int32), "b": np.ones((2, 3), np.float32)}, {})
    np.testing.assert_array_equal(outputs["s"], [[6, 6], [10, 10]])
    assert outputs["s"].dtype == np.int64


def test_sum_fills_an_output_without_dimensions() -> None:
    spec = ModelSpec("", (TensorSpec("a", "FP32", ()),), (TensorSpec("s", "FP32", ()), TensorSpec("t", "FP32", (2,))), 0)
    session = backends.load("synthetic", {"fixed_ms": 0, "row_ms": 0, "output": "sum"}, spec).open_session(0)
    outputs = session.run({"a": np.array(3, np.float32)}, {})
    assert isinstance(outputs["s"], np.ndarray)
    np.testing.assert_array_equal(outputs["s"], 3)
    np.testing.assert_array_equal(outputs["t"], [3, 3])


@pytest.mark.parametrize(("fault", "error"), [("fail", ExecutionFailed), ("lose", SessionLost), ("short", ExecutionFailed)])
def test_an_input_brings_a_fault_about(fault: str, error: type[Exception]) -> None:
    session = backends.load("synthetic", {"fixed_ms": 0, "row_ms": 0, "faults": {fault: -7}}).open_session(0)
    session.run(row(1, 2), {})
    with pytest.raises(error):
        session.run(row(1, -7), {})


def test_a_hung_run_ends_when_its_session_is_closed() -> None:
    session = backends.load("synthetic", {"faults": {"hang": -7}}).open_session(0)
    ended: list[BaseException] = []

    def hang() -> None:
        try:
            session.run(row(-7), {})
        except SessionLost as exc:
            ended.append(exc)

    thread = threading.Thread(target=hang)
    thread.start()
    session.close()
    thread.join(5)
    assert ended


def test_openings_fail_as_often_as_told() -> None:
    model = backends.load("synthetic", {"fail_opens": 1})
    with pytest.raises(LoadFailed):
        model.open_session(0)
    model.open_session(0)


def test_an_unknown_option_is_a_failed_load() -> None:
    with pytest.raises(LoadFailed, match="speed"):
        backends.load("synthetic", {"speed": 1})


def test_an_unknown_kind_names_those_that_exist() -> None:
    with pytest.raises(LoadFailed, match="synthetic, torch"):
        backends.load("torchh", {})
