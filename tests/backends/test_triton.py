"""What the Triton backend does beyond the contract, against a real server."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.base import (
    DEADLINE_NS,
    ExecutionFailed,
    InputRefused,
    LoadFailed,
    Model,
    ModelSpec,
    OutputsRefused,
    RunCancelled,
    SessionLost,
    Tensors,
    TensorSpec,
)
from backends.early_failure import EarlyFailure
from gateway.clock import LoopClock
from gateway.config import Backend
from gateway.config import ModelSection as Config
from gateway.engine.lane_opener import LaneOpener
from gateway.engine.metrics import Metrics
from gateway.engine.workers import WorkerPool
from gateway.errors import Cancelled
from gateway.types import InferRequest
from tests.backends.conftest import write_linear
from tests.backends.contract import SPEC, expected
from tests.triton_server import TritonServer, require_triton, triton_server

pytestmark = [pytest.mark.slow, pytest.mark.triton]

UNSTATED = ModelSpec("", (), (), 32)


@pytest.fixture(autouse=True)
def _installed() -> None:
    require_triton()


@pytest.fixture
def model(triton: TritonServer) -> Iterator[Model]:
    model = load(triton)
    yield model
    model.close()


def load(triton: TritonServer, spec: ModelSpec = SPEC, **options: Any) -> Model:
    return backends.load("triton", {"url": triton.grpc_url, "model": "linear", **options}, spec)


def rows(first: float = 1.0, count: int = 2) -> Tensors:
    array = np.ones((count, 16), np.float32)
    array[0, 0] = first
    return {"INPUT0": array}


def test_the_spec_is_read_from_the_server(triton: TritonServer) -> None:
    spec = load(triton, UNSTATED).spec
    assert (spec.inputs, spec.outputs) == (SPEC.inputs, SPEC.outputs)
    assert spec.max_rows == 8  # the server's max_batch_size, less than the 32 declared
    assert spec.platform == "triton_python"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec("", (TensorSpec("INPUT0", "FP64", (-1, 16)),), (), 8), r"'INPUT0': the model has FP32 \[-1, 16\], .* FP64"),
        (ModelSpec("", (TensorSpec("INPUT0", "FP32", (-1, 15)),), (), 8), r"the configuration says FP32 \[-1, 15\]"),
        (ModelSpec("", (), (TensorSpec("y", "FP32", (-1, 4)),), 8), r"output 'y': the model has none .*OUTPUT0"),
    ],
)
def test_what_the_server_has_is_held_against_what_was_declared(triton: TritonServer, spec: ModelSpec, message: str) -> None:
    with pytest.raises(LoadFailed, match=message):
        load(triton, spec)


def test_an_unknown_model_does_not_load(triton: TritonServer) -> None:
    with pytest.raises(LoadFailed, match="'nothing' is not ready"):
        load(triton, model="nothing")


def test_an_error_of_the_model_costs_the_batch_only(model: Model) -> None:
    session = model.open_session(0)
    with pytest.raises(ExecutionFailed, match="a bad row"):
        session.run(rows(-400), {})
    np.testing.assert_allclose(session.run(rows(), {})["OUTPUT0"], expected(rows()["INPUT0"]), rtol=1e-5, atol=1e-5)


def test_a_refusal_of_the_model_has_its_code(triton: TritonServer, model: Model) -> None:
    session = model.open_session(0)
    with pytest.raises(InputRefused, match="no such row") as refused:
        session.run(rows(-404), {})
    assert refused.value.code == "not_found"
    np.testing.assert_allclose(session.run(rows(), {})["OUTPUT0"], expected(rows()["INPUT0"]), rtol=1e-5, atol=1e-5)


def test_a_model_that_was_loaded_anew_with_another_shape_loses_its_session_and_no_longer_opens_one(
    triton: TritonServer,
) -> None:
    from tritonclient.grpc import InferenceServerClient

    wide = load(triton, UNSTATED, model="wide")
    session = wide.open_session(0)
    with InferenceServerClient(triton.grpc_url) as client:
        config = client.get_model_config("wide", as_json=True)["config"]
        config["input"][0]["dims"] = [16]
        try:
            client.load_model("wide", config=json.dumps(config))
            with pytest.raises(
                SessionLost, match=r"wide is not what was loaded here, load it again: input 'INPUT0' is FP32 \[-1, 16\]"
            ):
                session.run({"INPUT0": np.zeros((1, 262144), np.float32)}, {})
            with pytest.raises(LoadFailed, match="load it again"):
                wide.open_session(0)
        finally:
            client.unload_model("wide")  # else it keeps that configuration
            client.load_model("wide")
    wide.open_session(0).close()
    session.close()


def test_errors_among_the_parts_and_clients_that_leave_there_keep_the_server_alive(triton: TritonServer, model: Model) -> None:
    lookup: Any = load(triton, ModelSpec("", (), (), 0), model="lookup").open_session(0)
    for call in range(200):
        key = np.full(1, call % 2, np.float32)
        parts = lookup.stream({"KEY": key}, {})
        assert next(parts)["FOUND"] == key
        assert isinstance(next(parts), EarlyFailure)
        with pytest.raises(ExecutionFailed, match="no such key") as failed:
            next(parts)
        assert not isinstance(failed.value, InputRefused)  # Triton tells no code here
        left = lookup.stream({"KEY": key}, {})
        next(left)
        lookup.cancel()
        left.close()
    lookup.close()
    model.open_session(0).run(rows(), {})


def test_parameters_reach_the_model_as_what_they_are(model: Model) -> None:
    session = model.open_session(0)
    soon = {DEADLINE_NS: time.monotonic_ns() + 9_500_000_000}
    with pytest.raises(ExecutionFailed) as failed:
        session.run(rows(-401), {"flag": True, "count": 3, "word": "3", "share": 0.5, "priority": 2, **soon})
    session.close()
    told = json.loads(str(failed.value).partition("asked with ")[2])
    left_us = told.pop("left_us")
    assert told == {"flag": True, "count": 3, "word": "3", "share": 0.5}
    assert 0 < left_us <= 9_500_000


def test_a_model_whose_process_died_is_repaired_by_opening_a_session(model: Model) -> None:
    session, other = model.open_session(0), model.open_session(1)
    with pytest.raises(SessionLost, match="not healthy"):
        session.run(rows(-666), {})
    session.close()
    started = time.monotonic()
    repaired = model.open_session(0)
    np.testing.assert_allclose(repaired.run(rows(), {})["OUTPUT0"], expected(rows()["INPUT0"]), rtol=1e-5, atol=1e-5)
    assert time.monotonic() - started < 10
    other.run(rows(), {})  # a session that was idle meanwhile


def test_a_deadline_is_handed_on(model: Model) -> None:
    session = model.open_session(0)
    started = time.monotonic_ns()
    with pytest.raises(ExecutionFailed, match="DEADLINE_EXCEEDED"):
        session.run(rows(-1000), {DEADLINE_NS: started + 200_000_000})
    assert time.monotonic_ns() - started < 900_000_000  # the model sleeps for 1 s
    with pytest.raises(ExecutionFailed, match="before the call"):
        session.run(rows(), {DEADLINE_NS: started})


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_cancelled_call_ends_at_once_and_the_session_goes_on(triton: TritonServer, shared_memory: bool) -> None:
    session: Any = load(triton, UNSTATED, model="wide", shared_memory=shared_memory).open_session(0)
    timer = threading.Timer(0.2, session.cancel)
    timer.start()
    started = time.monotonic()
    with pytest.raises(RunCancelled):
        session.run({"INPUT0": np.full((1, 262144), -2000, np.float32)}, {})  # sleeps for 2 s
    assert time.monotonic() - started < 1.5
    session.cancel()  # nothing runs
    fresh = np.ones((1, 262144), np.float32)
    np.testing.assert_array_equal(session.run({"INPUT0": fresh}, {})["OUTPUT0"], fresh)
    session.close()


def test_a_batch_whose_clients_are_gone_frees_its_session(triton: TritonServer) -> None:
    async def main() -> None:
        metrics = Metrics()
        clock = LoopClock(asyncio.get_running_loop())

        def open_runner(model: Config, backend: Backend, declared: ModelSpec) -> WorkerPool:
            return WorkerPool(backend, declared, name="linear", clock=clock)

        config = {"name": "linear", "max_rows": 8, "batching": {"probe_s": 0, "policy": "greedy"}}
        backend = {"kind": "triton", "url": triton.grpc_url, "model": "wide"}
        opener = LaneOpener(open_runner, metrics=metrics, clock=clock)
        ((lane,), _) = await opener.open(Config.model_validate({**config, "backends": [backend]}))
        outcomes: list[object] = []
        inputs = {"INPUT0": np.full((1, 262144), -2000, np.float32)}
        request = InferRequest("linear", "1", "", inputs, 1, time.monotonic_ns())
        lane.submit(request, outcomes.append)
        await asyncio.sleep(0.2)
        assert lane.runner.free_slots == 0
        lane.cancel(request)
        assert [type(outcome) for outcome in outcomes] == [Cancelled]
        started = time.monotonic()
        await lane.close()  # waits for what runs
        assert time.monotonic() - started < 1.5

    asyncio.run(main())


def test_a_server_that_hangs_loses_the_session(triton: TritonServer) -> None:
    session = load(triton, timeout_s=0.2).open_session(0)
    with pytest.raises(SessionLost, match=r"timeout_s 0\.2"):
        session.run(rows(-1000), {})


def test_a_session_opens_on_the_next_url_when_its_own_is_down(triton: TritonServer) -> None:
    model = load(triton, url=["127.0.0.1:1", triton.grpc_url])
    for index in (0, 1):
        session = model.open_session(index)
        session.run(rows(), {})
        session.close()


def test_a_session_moves_to_another_server_when_its_own_is_killed(triton: TritonServer, tmp_path: Path) -> None:
    write_linear(tmp_path)
    with triton_server(tmp_path) as killed:
        model = load(triton, url=[killed.grpc_url, triton.grpc_url])
        session = model.open_session(0)
        session.run(rows(), {})
    with pytest.raises(SessionLost, match=killed.grpc_url):
        session.run(rows(), {})
    session.close()
    moved = model.open_session(0)
    np.testing.assert_allclose(moved.run(rows(), {})["OUTPUT0"], expected(rows()["INPUT0"]), rtol=1e-5, atol=1e-5)


def test_every_url_that_is_down_is_named() -> None:
    with pytest.raises(LoadFailed, match=r"(?s)127\.0\.0\.1:1.*UNAVAILABLE.*127\.0\.0\.1:2"):
        backends.load("triton", {"url": ["127.0.0.1:1", "127.0.0.1:2"], "model": "m"}, SPEC)


@pytest.mark.parametrize("shared_memory", [False, True])
def test_large_tensors_pass(triton: TritonServer, shared_memory: bool) -> None:
    model = load(triton, UNSTATED, model="wide", shared_memory=shared_memory)
    session = model.open_session(0)
    for count in (2, 5, 1):  # 5 rows make the region grow
        array = np.random.default_rng(count).random((count, 262144), np.float32)
        first = session.run({"INPUT0": array}, {})["OUTPUT0"]
        session.run({"INPUT0": array + 1}, {})
        np.testing.assert_array_equal(first, array)
    outputs = session.run({"INPUT0": np.full((1, 262144), 16, np.float32)}, {})  # of which it makes float16
    assert (outputs["OUTPUT0"] == 16).all()
    assert outputs["FIRST"].tolist() == [[16]]
    session.close()
    model.close()


def test_an_output_that_is_larger_than_declared_does_not_pass_through_shared_memory(triton: TritonServer) -> None:
    session = load(triton, UNSTATED, model="wide", shared_memory=True).open_session(0)
    with pytest.raises(OutputsRefused, match=r"output 'OUTPUT0' .* the model gives more than FP32 \[-1, 262144\]: have it"):
        session.run({"INPUT0": np.full((1, 262144), 64, np.float32)}, {})  # of which it makes float64
    session.close()


def test_no_region_stays_behind(triton: TritonServer) -> None:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    before = set(Path("/dev/shm").glob(f"gateway-{os.getpid()}-*"))
    with InferenceServerClient(triton.grpc_url) as client:
        registered = len(client.get_system_shared_memory_status().regions)
    session = load(triton, UNSTATED, model="wide", shared_memory=True).open_session(0)
    with pytest.raises(InputRefused):
        session.run({"INPUT0": np.full((1, 262144), -404, np.float32)}, {})
    session.run({"INPUT0": np.zeros((1, 262144), np.float32)}, {})
    with InferenceServerClient(triton.grpc_url) as client:
        assert len(client.get_system_shared_memory_status().regions) == registered + 1
        while client.get_system_shared_memory_status().regions:
            with suppress(InferenceServerException):  # in use: Triton holds a region for some ms behind the answer
                client.unregister_system_shared_memory()  # of everybody
        assert (session.run({"INPUT0": np.ones((1, 262144), np.float32)}, {})["OUTPUT0"] == 1).all()
        assert len(client.get_system_shared_memory_status().regions) == 1
        session.close()
        assert not client.get_system_shared_memory_status().regions
    assert set(Path("/dev/shm").glob(f"gateway-{os.getpid()}-*")) == before


def test_a_region_is_not_used_again_while_a_call_that_timed_out_may_write_to_it(triton: TritonServer) -> None:
    session = load(triton, UNSTATED, model="wide", shared_memory=True).open_session(0)
    late = np.full((1, 262144), -1000, np.float32)  # sleeps for 1 s, then echoes
    with pytest.raises(ExecutionFailed):
        session.run({"INPUT0": late}, {DEADLINE_NS: time.monotonic_ns() + 100_000_000})
    fresh = np.ones((1, 262144), np.float32)
    np.testing.assert_array_equal(session.run({"INPUT0": fresh}, {})["OUTPUT0"], fresh)
    session.close()


def test_sessions_call_at_the_same_time(model: Model) -> None:
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            session = model.open_session(index)
            for i in range(50):
                inputs = rows(float(i + 100 * index))
                np.testing.assert_allclose(session.run(inputs, {})["OUTPUT0"], expected(inputs["INPUT0"]), rtol=1e-4, atol=1e-4)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
