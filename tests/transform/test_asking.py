"""What is asked again, and for how long. In simulated time."""

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from backends.base import ModelSpec, TensorSpec
from gateway.errors import NotReady, Overloaded
from gateway.transform.asking import Answer, Asker
from gateway.transform.rows import Chunk
from tests.simulation import SimulatedClock, run_simulated

SPEC = ModelSpec("", (TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),), 4)
CHUNK = Chunk(0, 0, [{"x": [float(number), 1.0]} for number in range(10)], 0)


def test_a_model_that_is_busy_is_asked_again() -> None:
    asked = most = 0

    async def ask(inputs: Any) -> dict[str, npt.NDArray[Any]]:
        nonlocal asked, most
        if asyncio.get_running_loop().time() < until_s:
            raise Overloaded("full")
        asked += len(inputs["x"])
        most = max(most, asked)
        await asyncio.sleep(1)
        asked -= len(inputs["x"])
        return {"y": 2 * np.asarray(inputs["x"], np.float32)}

    async def main(clock: SimulatedClock) -> list[Answer | str]:
        nonlocal until_s
        until_s = asyncio.get_running_loop().time() + 50
        return await Asker(SPEC, ask, from_text=False, request_rows=4, in_flight=8).answers(CHUNK)

    until_s = 0.0
    answers = run_simulated(main)
    assert [answer["y"][0] for answer in answers if not isinstance(answer, str)] == [2 * number for number in range(10)]
    assert most == 8


def test_one_that_never_answers_ends_the_run() -> None:
    async def ask(inputs: Any) -> dict[str, npt.NDArray[Any]]:
        raise NotReady("no session")

    async def main(clock: SimulatedClock) -> None:
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(NotReady, match="no session"):
            await Asker(SPEC, ask, from_text=False, request_rows=4, in_flight=8).answers(CHUNK)
        assert 60 < asyncio.get_running_loop().time() - begun_s < 61

    run_simulated(main)
