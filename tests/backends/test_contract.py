"""What every backend does, whatever library it is on."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import backends
from backends.base import ExecutionFailed, LoadFailed, Model, ModelSpec, Tensors
from backends.check import checked
from backends.mistakes import Wanted
from tests.backends.contract import CASES, MAX_ROWS, SPEC, Case, expected


def here(name: str) -> bool:
    return CASES[name].skip() is None


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[pytest.mark.slow] if CASES[n].slow else []) for n in CASES if here(n)]
)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def model(case: Case, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Model]:
    model = backends.load(case.kind, case.options(tmp_path_factory.mktemp("artifacts"), request), SPEC)
    yield model
    model.close()


@pytest.fixture
def session(model: Model) -> Iterator[backends.Session]:
    session = model.open_session(0)
    yield session
    session.close()


def rows(count: int, seed: int = 0) -> Tensors:
    return {"INPUT0": np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)}


def check(case: Case, inputs: Tensors, outputs: Tensors) -> None:
    want = expected(inputs["INPUT0"]) if case.kind != "synthetic" else inputs["INPUT0"].sum(1, keepdims=True).repeat(4, 1)
    np.testing.assert_allclose(outputs["OUTPUT0"], want, rtol=case.tolerance, atol=3 * case.tolerance)


def test_every_kind_of_backend_is_under_the_contract() -> None:
    assert {case.kind for case in CASES.values()} == set(backends.BACKENDS)


@pytest.mark.parametrize("name", CASES)
def test_a_backend_is_tested_or_its_absence_told(name: str) -> None:
    why = CASES[name].skip()
    if why:
        pytest.skip(f"not under the contract here: {name}: {why}")


def test_it_tells_what_it_takes_and_gives(model: Model) -> None:
    assert (model.spec.inputs, model.spec.outputs, model.spec.max_rows) == (SPEC.inputs, SPEC.outputs, MAX_ROWS)
    assert model.spec.platform
    assert model.device.kind in ("cpu", "cuda", "neuron", "remote")
    assert model.memory_bytes >= 0


@pytest.mark.parametrize("count", [1, 3, MAX_ROWS])
def test_as_many_rows_come_out_as_went_in(case: Case, model: Model, session: backends.Session, count: int) -> None:
    count = next(size for size in model.spec.row_sizes or (count,) if size >= count)
    inputs = rows(count)
    outputs = session.run(inputs, {})
    assert outputs["OUTPUT0"].shape == (count, 4)
    assert outputs["OUTPUT0"].dtype == np.float32
    check(case, inputs, outputs)


def test_a_row_does_not_feel_the_others(case: Case, session: backends.Session) -> None:
    together = session.run(rows(MAX_ROWS), {})["OUTPUT0"]
    for i in range(MAX_ROWS):
        alone = session.run({"INPUT0": rows(MAX_ROWS)["INPUT0"][i : i + 1]}, {})["OUTPUT0"]
        # int8 scales activations by the range of the whole batch
        np.testing.assert_allclose(together[i : i + 1], alone, rtol=case.tolerance, atol=3 * case.tolerance)


def test_inputs_may_be_views_on_read_only_bytes(case: Case, session: backends.Session) -> None:
    inputs = rows(2)
    padded = b"x" + inputs["INPUT0"].tobytes()  # one byte in front: as a tensor lies in a request's body, not aligned
    view = np.frombuffer(padded, np.float32, offset=1).reshape(2, 16)
    check(case, inputs, session.run({"INPUT0": view}, {}))
    check(case, inputs, session.run({"INPUT0": np.asfortranarray(inputs["INPUT0"])}, {}))


def test_outputs_survive_the_next_run(case: Case, session: backends.Session) -> None:
    first = session.run(rows(2, seed=1), {})
    kept = first["OUTPUT0"].copy()
    session.run(rows(2, seed=2), {})
    np.testing.assert_array_equal(first["OUTPUT0"], kept)


def test_sessions_run_in_parallel(case: Case, model: Model) -> None:
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            session = model.open_session(index)
            for i in range(20):
                counts = model.spec.row_sizes or range(1, MAX_ROWS + 1)
                inputs = rows(counts[i % len(counts)], seed=100 * index + i)
                check(case, inputs, session.run(inputs, {}))
            session.close()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_bad_batch_leaves_the_session_good(case: Case, session: backends.Session) -> None:
    with pytest.raises(ExecutionFailed):
        session.run(case.bad, {})
    check(case, rows(2), session.run(rows(2), {}))


def test_a_session_can_be_closed_twice(model: Model) -> None:
    session = model.open_session(1)
    session.close()
    session.close()


def test_an_unknown_option_is_a_failed_load(case: Case) -> None:
    with pytest.raises(LoadFailed, match="unheard_of"):
        backends.load(case.kind, {"unheard_of": 1}, SPEC)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("python", {"model": "absent.py:Model"}),
        ("onnxruntime", {"model": "absent.onnx"}),
        ("torch", {"model": "absent.pt"}),
        ("torch", {"model": "absent.py:factory"}),
        ("neuron", {"model": "absent"}),
        ("tensorrt", {"model": "absent.onnx"}),
        ("triton", {"model": "m", "url": "absent.invalid:1"}),
    ],
)
def test_what_cannot_be_found_is_named(kind: str, options: dict[str, str]) -> None:
    with pytest.raises(LoadFailed, match="absent"):
        backends.load(kind, options, SPEC)


def test_outputs_of_another_datatype_than_declared_are_refused() -> None:
    spec = ModelSpec("", SPEC.inputs, (backends.base.TensorSpec("OUTPUT0", "INT32", (-1, 4)),), MAX_ROWS)
    model = backends.load("python", {"model": f"{Path(__file__).with_name('contract.py')}:Linear"}, spec)
    with pytest.raises(ExecutionFailed, match=r"INT32.*float32"):
        model.open_session(0).run(rows(2), {})


def test_a_kind_needs_no_checks_of_its_own() -> None:
    backends.BACKENDS["bare"] = backends.Kind("backends.bare")
    try:
        assert checked(Wanted("bare", {}, here=True, thorough=True)) == []
    finally:
        del backends.BACKENDS["bare"]
