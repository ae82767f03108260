"""A load or unload of a model runs to its end and is answered once, whatever breaks and whoever goes away; simulated time."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from backends.base import ModelSpec
from gateway.config import Backend, ModelSection, parse_config
from gateway.engine.lane_opener import LaneOpener
from gateway.engine.metrics import Metrics
from gateway.engine.repository import Repository
from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.errors import BackendFailed, Cancelled, GatewayError, NotReady
from gateway.types import InferRequest, InferResponse
from tests.engine.simulated_runner import SPEC, SimulatedRunner
from tests.simulation import SimulatedClock, run_simulated

ONE = """
server: {model_control: true, state_dir: STATE}
models: [{name: m, load_at_start: false, backends: [{kind: synthetic}]}]
"""
TWO = ONE.replace("[{kind: synthetic}]", "[{kind: synthetic, name: a}, {kind: synthetic, name: b}]")
VERSIONS = """
server: {model_control: true}
models:
  - {name: m, version: "1", load_at_start: false, backends: [{kind: synthetic, name: a}]}
  - {name: m, version: "2", load_at_start: false, backends: [{kind: synthetic, name: b}]}
"""
LOAD_S = 10.0
CLOSE_S = 5.0


class Lab:
    """A repository whose backends take LOAD_S to open and CLOSE_S to close. faults: "open a", "close b" … -> what is raised."""

    def __init__(self, clock: SimulatedClock, tmp_path: Path, text: str) -> None:
        self.clock = clock
        self.faults: dict[str, BaseException] = {}
        self.runners: list[SlowRunner] = []
        self.state = tmp_path / "state"
        metrics = Metrics()
        config = parse_config(yaml.safe_load(text.replace("STATE", str(self.state))), source="x.yaml")
        opener = LaneOpener(self._open_runner, metrics=metrics, clock=clock, state_dir=config.server.state_dir)
        regions = SharedMemoryRegions(tmp_path / "regions")
        self.repository = Repository(config, opener=opener, metrics=metrics, clock=clock, regions=regions)

    def _open_runner(self, model: ModelSection, backend: Backend, declared: ModelSpec) -> "SlowRunner":
        self.runners.append(SlowRunner(self, backend.label))
        return self.runners[-1]

    @property
    def open(self) -> list[str]:
        """Backends whose sessions are there."""
        return [runner.label for runner in self.runners if runner.opened and not runner.closed]

    def states(self) -> list[str]:
        return [row["state"] for row in self.repository.index()]

    def load(self) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self.repository.load("m", {}))

    def unload(self) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self.repository.unload("m"))


class SlowRunner(SimulatedRunner):
    def __init__(self, lab: Lab, label: str) -> None:
        super().__init__(lab.clock)
        self.lab = lab
        self.label = label
        self.opened = False

    async def open(self) -> ModelSpec:
        await asyncio.sleep(LOAD_S)
        fault = self.lab.faults.get(f"open {self.label}")
        self.opened = not isinstance(fault, (GatewayError, asyncio.CancelledError))  # else in part: it did not expect this
        if fault is not None:
            raise fault
        return SPEC

    def abort(self) -> None: ...

    async def close(self) -> None:
        try:
            await asyncio.sleep(CLOSE_S)
        finally:  # also where that is broken off
            self.closed = True
        if f"close {self.label}" in self.lab.faults:
            raise self.lab.faults[f"close {self.label}"]


def simulated(tmp_path: Path, main: Callable[[Lab], Coroutine[Any, Any, None]], text: str = ONE) -> None:
    async def run(clock: SimulatedClock) -> None:
        lab = Lab(clock, tmp_path, text)
        await lab.repository.start()
        try:
            await main(lab)
        finally:
            await lab.repository.close()
            assert lab.open == []
            assert not {"LOADING", "UNLOADING"} & set(lab.states())

    run_simulated(run)


async def outcome(change: "asyncio.Task[None]") -> BaseException | None:
    (end,) = await asyncio.gather(change, return_exceptions=True)
    return end


def test_a_load_whose_client_is_gone_runs_to_its_end(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        loading = lab.load()
        await asyncio.sleep(LOAD_S / 2)
        assert lab.states() == ["LOADING"]
        loading.cancel()
        await asyncio.sleep(LOAD_S)
        assert (lab.states(), lab.open) == (["READY"], ["synthetic"])

    simulated(tmp_path, main)


def test_an_unload_whose_client_is_gone_runs_to_its_end(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        await lab.load()
        unloading = lab.unload()
        await asyncio.sleep(CLOSE_S / 2)
        assert lab.states() == ["UNLOADING"]
        unloading.cancel()
        await asyncio.sleep(CLOSE_S)
        assert (lab.states(), lab.open) == (["UNAVAILABLE"], [])

    simulated(tmp_path, main)


def test_further_loads_join_the_one_under_way_and_get_its_end(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        abandoned = [lab.load() for _ in range(20)]
        await asyncio.sleep(LOAD_S / 2)
        for loading in abandoned:
            loading.cancel()
        patient = [lab.load(), lab.load()]
        assert await asyncio.gather(*patient) == [None, None]
        assert len(lab.runners) == 1
        await lab.load()  # one that comes later loads anew
        assert (len(lab.runners), len(lab.open)) == (2, 1)

    simulated(tmp_path, main)


def test_all_who_joined_a_load_that_fails_are_told_so(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.faults["open synthetic"] = BackendFailed("told to fail")
        for end in await asyncio.gather(lab.load(), lab.load(), return_exceptions=True):
            assert isinstance(end, BackendFailed)
            assert end.message == "failed to load 'm' version 1: told to fail"
        assert (lab.states(), len(lab.runners)) == (["UNAVAILABLE"], 1)

    simulated(tmp_path, main)


def test_further_unloads_join_the_one_under_way(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        await lab.load()
        began_ns = lab.clock.now_ns()
        await asyncio.gather(*(lab.unload() for _ in range(20)))
        assert lab.clock.now_ns() - began_ns == CLOSE_S * 1e9
        assert lab.states() == ["UNAVAILABLE"]

    simulated(tmp_path, main)


@pytest.mark.parametrize("before", ["an unload", "a load that failed"])
def test_a_model_that_is_being_loaded_again_tells_no_reason_of_before(tmp_path: Path, before: str) -> None:
    async def main(lab: Lab) -> None:
        if before == "an unload":
            await lab.load()
            await lab.unload()
        else:
            lab.faults["open synthetic"] = BackendFailed("no memory")
            assert await outcome(lab.load())
        (row,) = lab.repository.index()
        assert row["reason"]
        loading = lab.load()
        await asyncio.sleep(LOAD_S / 2)
        (row,) = lab.repository.index()
        assert (row["state"], row["reason"]) == ("LOADING", "")
        with pytest.raises(NotReady, match=r"\(loading\)$"):
            lab.repository.model("m")
        lab.faults.clear()
        await loading

    simulated(tmp_path, main)


def test_a_change_to_another_state_follows_the_one_under_way(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        await lab.load()
        unloading = lab.unload()
        await asyncio.sleep(CLOSE_S / 2)
        loading = lab.load()
        await unloading
        assert (lab.states(), lab.open) == (["LOADING"], [])
        await asyncio.sleep(LOAD_S / 2)
        unloading = lab.unload()
        await loading
        await unloading
        assert (lab.states(), lab.open) == (["UNAVAILABLE"], [])
        assert len(lab.runners) == 2

    simulated(tmp_path, main)


def test_a_load_under_way_is_ended_when_the_server_ends_and_its_client_told(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        loading, queued = lab.load(), asyncio.ensure_future(lab.repository.load("later", {}))
        await asyncio.sleep(1.5 * LOAD_S)  # `a` is open, `b` is being opened
        began_ns = lab.clock.now_ns()
        await lab.repository.close()
        assert lab.clock.now_ns() - began_ns == CLOSE_S * 1e9
        for change in (loading, queued, lab.load()):
            end = await outcome(change)
            assert isinstance(end, NotReady)
            assert end.message == "the server is shutting down"
        assert lab.states() == ["UNAVAILABLE", "UNAVAILABLE"]
        assert lab.repository.index()[0]["reason"] == "unloaded"

    later = "  - {name: later, load_at_start: false, backends: [{kind: synthetic}]}\n"
    simulated(tmp_path, main, TWO.replace("models: [", "models:\n  - ").replace("}]\n", "}\n") + later)


def test_a_server_that_ends_its_loads_serves_what_is_there(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        await lab.load()
        loading = lab.load()
        await asyncio.sleep(LOAD_S / 2)
        lab.repository.end_loads()
        assert isinstance(await outcome(loading), NotReady)
        assert isinstance(await outcome(lab.load()), NotReady)
        assert (lab.states(), lab.open) == (["READY"], ["synthetic"])
        assert lab.repository.model_ready("m")
        await lab.unload()

    simulated(tmp_path, main)


def test_an_unload_under_way_is_waited_for_when_the_server_ends(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        await lab.load()
        unloading = lab.unload()
        await asyncio.sleep(CLOSE_S / 2)
        await lab.repository.close()
        assert lab.open == []
        assert await outcome(unloading) is None

    simulated(tmp_path, main, TWO)


@pytest.mark.parametrize("verb", ["unload", "load"])
def test_a_request_can_be_cancelled_while_its_lane_leaves(tmp_path: Path, verb: str) -> None:
    async def main(lab: Lab) -> None:
        await lab.load()
        change = lab.unload() if verb == "unload" else lab.load()
        # The new lane is there within half a millisecond of the requests, of which four take one.
        await asyncio.sleep(0 if verb == "unload" else LOAD_S - 0.0005)
        outcomes: list[InferResponse | GatewayError] = []
        requests = [InferRequest("m", "1", "", {"X": np.zeros((1, 1), np.float32)}, 1, lab.clock.now_ns()) for _ in range(20)]
        places = [lab.repository.infer(lab.repository.model("m"), request, outcomes.append) for request in requests]
        await asyncio.sleep(0.0015)
        assert lab.states() == ["UNLOADING" if verb == "unload" else "READY"]
        answered = len(outcomes)
        assert lab.repository.pending == 20 - answered > 1
        places[-1].cancel()
        assert [type(outcome) for outcome in outcomes[answered:]] == [Cancelled]
        assert await outcome(change) is None
        assert len(outcomes) == 20

    simulated(tmp_path, main, ONE.replace("load_at_start: false", "load_at_start: false, batching: {probe_s: 0}"))


def test_a_backend_answers_for_the_one_before_it_while_its_model_is_unloaded(tmp_path: Path) -> None:
    outcomes: list[InferResponse | GatewayError | None] = []

    async def main(lab: Lab) -> None:
        await lab.load()
        lab.runners[0].faults = ["killed"]
        request = InferRequest("m", "1", "", {"X": np.zeros((1, 1), np.float32)}, 1, lab.clock.now_ns())
        lab.repository.infer(lab.repository.model("m"), request, outcomes.append)
        await lab.unload()
        assert [type(outcome) for outcome in outcomes] == [InferResponse]

    simulated(tmp_path, main, TWO.replace("load_at_start: false", "load_at_start: false, batching: {probe_s: 0}"))


def test_a_start_that_is_broken_off_leaves_nothing_open(tmp_path: Path) -> None:
    async def run(clock: SimulatedClock) -> None:
        lab = Lab(clock, tmp_path, TWO.replace("load_at_start: false, ", ""))
        starting = asyncio.ensure_future(lab.repository.start())
        await asyncio.sleep(1.5 * LOAD_S)
        assert lab.open == ["a"]
        starting.cancel()
        assert isinstance(await outcome(starting), asyncio.CancelledError)
        assert (lab.open, lab.states()) == ([], ["UNAVAILABLE"])

    run_simulated(run)


@pytest.mark.parametrize("fault", [RuntimeError("can't start new thread"), OSError("too many files"), asyncio.CancelledError()])
def test_whatever_a_backend_raises_when_it_opens_is_a_failed_load(tmp_path: Path, fault: BaseException) -> None:
    async def main(lab: Lab) -> None:
        lab.faults["open b"] = fault
        await lab.load()
        assert lab.open == ["a"]
        assert set(lab.repository.missing("m")) == {"b"}
        await lab.unload()
        lab.faults["open a"] = fault
        end = await outcome(lab.load())
        assert isinstance(end, BackendFailed)
        assert type(fault).__name__ in end.message
        assert (lab.states(), lab.open) == (["UNAVAILABLE"], [])
        lab.faults.clear()
        await lab.load()
        assert (lab.states(), lab.open) == (["READY"], ["a", "b"])

    simulated(tmp_path, main, TWO)


@pytest.mark.parametrize("fault", [RuntimeError("stuck"), BackendFailed("stuck")])
def test_a_backend_that_cannot_be_closed_keeps_no_other_open(tmp_path: Path, fault: Exception) -> None:
    async def main(lab: Lab) -> None:
        await lab.load()
        lab.faults["close a"] = fault
        end = await outcome(lab.unload())
        assert isinstance(end, BackendFailed)
        assert end.message == "failed to unload 'm' version 1: m:1/a: stuck"
        assert (lab.states(), lab.open) == (["UNAVAILABLE"], [])
        await lab.load()
        await lab.load()  # anew: what it closes is no matter of its caller
        assert (lab.states(), lab.open) == (["READY"], ["a", "b"])
        await lab.repository.close()
        assert lab.open == []

    simulated(tmp_path, main, TWO)


def test_a_close_that_is_broken_off_leaves_no_backend_open(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        await lab.load()
        closing = asyncio.ensure_future(lab.repository.close())
        await asyncio.sleep(CLOSE_S / 2)
        closing.cancel()
        await outcome(closing)
        assert lab.open == []

    simulated(tmp_path, main, TWO)


def test_every_version_is_loaded_also_if_one_fails(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.faults["open a"] = BackendFailed("told to fail")
        end = await outcome(lab.load())
        assert isinstance(end, GatewayError)
        assert "version 1: told to fail" in end.message
        assert lab.states() == ["UNAVAILABLE", "READY"]

    simulated(tmp_path, main, VERSIONS)


def test_who_unloads_a_model_misses_no_version_of_it_and_learns_still_why_one_failed(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.faults["open b"] = BackendFailed("told to fail")
        await outcome(lab.load())
        assert not lab.repository.ready()
        unloading = lab.unload()
        await asyncio.sleep(CLOSE_S / 2)  # `a` is being closed
        assert lab.repository.ready()
        await unloading
        assert [row["reason"] for row in lab.repository.index()] == ["unloaded", "failed to load 'm' version 2: told to fail"]

    simulated(tmp_path, main, VERSIONS)


def test_an_unload_that_cannot_keep_what_was_learned_warns_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(lab: Lab) -> None:
        await lab.load()
        lab.state.rmdir()
        lab.state.write_text("no directory any more")
        with caplog.at_level(logging.WARNING):
            await lab.unload()
        assert lab.states() == ["UNAVAILABLE"]
        (warning,) = caplog.messages
        assert warning.startswith("m:1/synthetic: what was learned of its speed is not kept (server.state_dir): ")

    simulated(tmp_path, main)
