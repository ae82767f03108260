"""A model is served by the backends that could be loaded, in simulated time; those that could not join when they can."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml

from backends.base import ModelSpec, TensorSpec
from gateway.commands.explain import render
from gateway.config import Backend, ModelSection, parse_config
from gateway.engine.lane_opener import LaneOpener
from gateway.engine.metrics import Metrics
from gateway.engine.repository import Repository
from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.engine.status import Status
from gateway.errors import BackendFailed, ConfigError, GatewayError
from gateway.types import InferRequest, InferResponse
from tests.engine.simulated_runner import SPEC, SimulatedRunner
from tests.simulation import SimulatedClock, run_simulated

TWO = """
server: {model_control: true}
models:
  - name: m
    backends:
      - {kind: synthetic, name: cheap, usd_per_hour: 0.1}
      - {kind: synthetic, name: dear, usd_per_hour: 1.0}
"""
DOWN = BackendFailed("told to be down")


class Lab:
    """A repository whose backends open or fail as told, by name. opened: every try, in order."""

    def __init__(self, clock: SimulatedClock, tmp_path: Path, text: str, faults: dict[str, GatewayError]) -> None:
        self.clock = clock
        self.faults = faults
        self.specs: dict[str, ModelSpec] = {}
        self.tries: list[str] = []
        self.runners: list[_Runner] = []
        config = parse_config(yaml.safe_load(text), source="x.yaml")
        metrics = Metrics()
        self.repository = Repository(
            config,
            opener=LaneOpener(self._open_runner, metrics=metrics, clock=clock),
            metrics=metrics,
            clock=clock,
            regions=SharedMemoryRegions(tmp_path / "regions"),
        )

    def _open_runner(self, model: ModelSection, backend: Backend, declared: ModelSpec) -> "_Runner":
        self.runners.append(_Runner(self, backend.label))
        return self.runners[-1]

    async def ask(self) -> str:
        """The backend that served a request."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        before = {runner: len(runner.batches) for runner in self.runners}
        inputs = {"X": np.zeros((1, 1), np.float32)}
        self.repository.infer(
            self.repository.model("m"), InferRequest("m", "1", "", inputs, 1, self.clock.now_ns()), answer.set_result
        )
        assert isinstance(await answer, InferResponse)
        return next(runner.label for runner in self.runners if len(runner.batches) > before[runner])

    def index(self) -> dict[str, Any]:
        (row,) = self.repository.index()
        return row

    def missing(self) -> dict[str, str]:
        return self.repository.missing("m")


class _Runner(SimulatedRunner):
    def __init__(self, lab: Lab, label: str) -> None:
        super().__init__(lab.clock)
        self.lab = lab
        self.label = label

    async def open(self) -> ModelSpec:
        self.lab.tries.append(self.label)
        if self.label in self.lab.faults:
            raise self.lab.faults[self.label]
        return self.lab.specs.get(self.label, SPEC)


def simulated(
    tmp_path: Path, main: Callable[[Lab], Coroutine[Any, Any, None]], text: str = TWO, **faults: GatewayError
) -> None:
    async def run(clock: SimulatedClock) -> None:
        lab = Lab(clock, tmp_path, text, faults)
        try:
            await lab.repository.start()
            await main(lab)
        finally:
            await lab.repository.close()

    run_simulated(run)


async def not_reached(lab: Lab) -> None:
    raise AssertionError("started")


@pytest.mark.parametrize(("down", "up"), [("cheap", "dear"), ("dear", "cheap")])
def test_a_model_is_served_while_a_backend_is_missing_which_joins_when_it_is_there(tmp_path: Path, down: str, up: str) -> None:
    async def main(lab: Lab) -> None:
        assert lab.repository.ready()
        assert lab.missing() == {down: "told to be down"}
        told = lab.repository.explain("m")
        assert [lane["backend"] for lane in told["lanes"]] == [up]
        assert f"{down} is missing: told to be down" in render(told)
        assert await lab.ask() == up
        lab.faults[down] = BackendFailed("down for another reason")
        await asyncio.sleep(60)
        assert 12 < lab.tries.count(down) < 20  # after 0.1, 0.2, 0.4 … and then every 5 s
        assert lab.missing() == {down: "down for another reason"}
        generation = lab.repository.generation
        lab.faults.clear()
        await asyncio.sleep(5)
        assert lab.missing() == {}
        assert lab.repository.generation > generation
        assert {lane["backend"] for lane in lab.repository.explain("m")["lanes"]} == {"cheap", "dear"}
        assert await lab.ask() == "cheap"
        tries = len(lab.tries)
        await asyncio.sleep(30)
        assert len(lab.tries) == tries

    simulated(tmp_path, main, **{down: DOWN})


def test_no_request_is_lost_when_a_backend_joins(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.faults.clear()
        for _ in range(500):
            await lab.ask()
        assert lab.missing() == {}

    simulated(tmp_path, main, cheap=DOWN)


def test_a_model_of_which_no_backend_can_be_loaded_fails_with_the_reason_of_each(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match=r"failed to load 'm' version 1: told to be down; the second$"):
        simulated(tmp_path, not_reached, cheap=DOWN, dear=BackendFailed("the second"))


def test_a_shadow_alone_does_not_serve_a_model(tmp_path: Path) -> None:
    text = TWO.replace("usd_per_hour: 1.0", "shadow_share: 0.5")
    with pytest.raises(BackendFailed, match="told to be down"):
        simulated(tmp_path, not_reached, text, cheap=DOWN)


def test_what_is_not_as_declared_fails_although_another_backend_is_there(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match="input 'X' is FP64"):
        simulated(tmp_path, not_reached, dear=ConfigError("input 'X' is FP64"))


UNLIKE: dict[str, tuple[ModelSpec, str]] = {
    "inputs": (
        ModelSpec("other", (TensorSpec("Z", "FP32", (-1, 1)),), SPEC.outputs, 4),
        "backend dear is unlike m:1/cheap: input Z is FP32 [-1, 1] here, missing there; input X is missing here, FP32 [-1, 1] "
        "there: all backends of",
    ),
    "rows": (
        replace(SPEC, max_rows=0),
        "backend dear has no batch dimension, and m:1/cheap has one: set max_rows of the model",
    ),
}


@pytest.mark.parametrize("differs", UNLIKE)
def test_a_late_backend_unlike_the_others_stays_missing(tmp_path: Path, differs: str) -> None:
    async def main(lab: Lab) -> None:
        lab.specs["dear"], told = UNLIKE[differs]
        lab.faults.clear()
        await asyncio.sleep(60)
        assert lab.tries.count("dear") == 2
        assert told in lab.missing()["dear"]
        assert lab.runners[-1].closed
        assert await lab.ask() == "cheap"

    simulated(tmp_path, main, dear=DOWN)


def test_an_unload_or_reload_ends_the_tries(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        await lab.repository.unload("m")
        tries = len(lab.tries)
        await asyncio.sleep(60)
        assert len(lab.tries) == tries
        await lab.repository.load("m", {})
        lab.faults.clear()
        await lab.repository.load("m", {})
        tries = len(lab.tries)
        await asyncio.sleep(60)
        assert len(lab.tries) == tries
        assert lab.missing() == {}

    simulated(tmp_path, main, dear=DOWN)


@pytest.mark.parametrize(("cold", "detail"), [(False, "no live session"), (True, "no replica has come")])
def test_a_model_that_refuses_every_request_is_nowhere_told_to_be_ready(tmp_path: Path, cold: bool, detail: str) -> None:
    async def main(lab: Lab) -> None:
        for runner in lab.runners:
            runner.cold = cold
        assert lab.index()["state"] == "READY"
        for runner in lab.runners:
            runner.available = False
        assert lab.index() == {
            "name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "no backend has a live session"
        }  # fmt: skip
        assert not lab.repository.model_ready("m")
        (model,) = orjson.loads(await Status(lab.repository).json())["models"]
        assert [backend["state"] for backend in model["backends"]] == ["down", "down"]
        assert all(detail in backend["detail"] for backend in model["backends"])

    simulated(tmp_path, main)
