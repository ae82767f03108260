"""Which batches are recorded, and that nothing else is done meanwhile. Where a GPU is, the contract tests what is recorded."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends import cuda_graphs
from backends.cuda_graphs import MOST_GRAPHS, recorded_rows, recording, running
from backends.onnxruntime_cuda import GraphRuns, PlainRuns


@pytest.fixture(autouse=True)
def in_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is at the moment, nobody gives up a recording by that."""
    monkeypatch.setattr(cuda_graphs, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(cuda_graphs, "_not_before_s", 0.0)


def test_few_sizes_hold_every_batch_and_pad_it_by_less_than_as_much_again() -> None:
    for max_rows in range(1, 513):
        sizes = recorded_rows(max_rows)
        assert sizes[-1] == max_rows
        assert len(sizes) * 8 <= MOST_GRAPHS  # with eight lengths
        for rows in range(1, max_rows + 1):
            padded = next(size for size in sizes if size >= rows)
            assert padded < (1.5 * rows if rows > 16 else 2 * rows) or rows == 1


def test_a_model_without_batches_pads_none() -> None:
    assert recorded_rows(0) == ()


class Driver:
    """In place of CUDA and an ONNX Runtime session on it: what is done by another thread meanwhile spoils a recording."""

    def __init__(self) -> None:
        self.works, self.records, self.spoiled, self.recorded = 0, 0, 0, 0
        self._counting = threading.Lock()

    def run(self, names: list[str], feeds: dict[str, np.ndarray], options: object = None) -> list[np.ndarray]:
        with self._counting:
            self.works += 1
            self.spoiled += self.records
        time.sleep(1e-4)
        with self._counting:
            self.works -= 1
        return [feeds["x"]]

    def record(self) -> None:
        with self._counting:
            self.records += 1
            self.spoiled += self.works + self.records - 1
        time.sleep(1e-3)
        with self._counting:
            self.recorded += 1
            self.spoiled += self.works
            self.records -= 1


class Session:
    """As GraphRuns asks it. A run that is bound records the first time."""

    def __init__(self, driver: Driver) -> None:
        self.run = driver.run
        self._driver = driver
        self._known: set[object] = set()

    def run_with_iobinding(self, graph: Any, options: object) -> None:
        if graph in self._known:
            self._driver.run([], {"x": np.zeros(1)})
        else:
            self._known.add(graph)
            self._driver.record()


def test_nothing_runs_while_a_session_records(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()

    class Value:
        def update_inplace(self, array: np.ndarray) -> None:
            driver.run([], {"x": array})

        def numpy(self) -> np.ndarray:
            return np.zeros(1)

    class Graph:
        def __init__(self) -> None:
            self.inputs, self.outputs, self.binding, self.options = {"x": Value()}, [Value()], object(), None

    monkeypatch.setattr(GraphRuns, "_bind", lambda runs, feeds, results: Graph())
    monkeypatch.setattr("backends.onnxruntime_cuda._options", lambda graph: None)

    def serve(runs: GraphRuns | PlainRuns, seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(60):
            runs.run({"x": np.zeros((int(random.integers(1, 12)), 2), np.float32)})

    sessions = [GraphRuns(Session(driver), ["y"]) for _ in range(3)] + [PlainRuns(Session(driver), ["y"])]
    threads = [threading.Thread(target=serve, args=(each, seed)) for seed, each in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert (driver.spoiled, driver.works, driver.records) == (0, 0, 0)
    assert driver.recorded == 33


def test_a_recording_that_fails_costs_no_answer_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA failure 900: capture")

    session = Session(Driver())
    session.run_with_iobinding = fails  # type: ignore[method-assign]  # the session is the test's to spoil
    monkeypatch.setattr(GraphRuns, "_bind", lambda *_: SimpleNamespace(binding=None, options=None))
    monkeypatch.setattr("backends.onnxruntime_cuda._options", lambda graph: None)
    runs = GraphRuns(session, ["y"])
    for _ in range(2):
        (answer,) = runs.run({"x": np.ones((2, 3), np.float32)})
        assert answer.shape == (2, 3)
    told = "batches of {'x': [2, 3]} stay unrecorded, and are slower: RuntimeError: CUDA failure 900: capture"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_who_records_is_not_kept_out_by_runs_that_follow_each_other() -> None:
    begun, ended = threading.Event(), threading.Event()

    def record() -> None:
        begun.set()
        with recording():
            ended.set()

    with running():
        thread = threading.Thread(target=record)
        thread.start()
        begun.wait(10)
        while not thread_waits():
            time.sleep(1e-3)
        later = threading.Thread(target=enter_and_leave)
        later.start()
        later.join(0.05)
        assert later.is_alive()  # it came later
        assert not ended.is_set()
    later.join(10)
    thread.join(10)
    assert ended.is_set()


def thread_waits() -> bool:
    return cuda_graphs._to_record > 0


def enter_and_leave() -> None:
    with running():
        pass


def test_who_would_record_beside_work_that_hangs_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_PATIENCE_S", 0.05)
    given: list[bool] = []

    def record() -> None:
        with recording() as alone:
            given.append(alone)

    with running():  # and does not end
        for _ in range(2):
            thread = threading.Thread(target=record)
            thread.start()
            thread.join(10)
        began_s = time.monotonic()
        later = threading.Thread(target=enter_and_leave)
        later.start()
        later.join(10)
        assert not later.is_alive()
    record()  # not yet again
    assert given == [False, False, False]
    assert time.monotonic() - began_s < cuda_graphs._PAUSE_S
    monkeypatch.setattr(cuda_graphs, "_not_before_s", 0.0)
    record()
    assert given[3:] == [True]


def test_work_within_work_waits_for_nobody() -> None:
    with running():
        thread = threading.Thread(target=record_once)
        thread.start()
        while not thread_waits():
            time.sleep(1e-3)
        with running():
            pass
    thread.join(10)
    assert not thread.is_alive()


def record_once() -> None:
    with recording():
        pass


def test_a_recording_that_fails_lets_others_go_on() -> None:
    with pytest.raises(ValueError, match="spoiled"), recording():
        raise ValueError("spoiled")
    with running():
        pass
