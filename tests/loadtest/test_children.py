"""Processes beside a measurement leave nothing open on the event loop, whenever who has begun them is cancelled."""

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import psutil
import pytest
import uvloop

from loadtest.measuring import children
from loadtest.measuring.generator_limit import _null_server_beside
from loadtest.measuring.looks import Looker
from loadtest.measuring.machine import Meter
from loadtest.measuring.reference import ReferenceKernel

pytestmark = pytest.mark.slow


@asynccontextmanager
async def kernel() -> AsyncIterator[None]:
    kernel = ReferenceKernel()
    try:
        await kernel.time_ms(())
        yield
    finally:
        await kernel.close()


BESIDE: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
    "kernel": kernel,
    "looker": lambda: Looker(-1, -1),
    "meter": lambda: Meter("127.0.0.1", 1),
    "null server": _null_server_beside,
}
STEPS = (*range(10), 1_000_000)  # of the event loop; past the last, it is up


def left_open(scenario: Callable[[], Any]) -> list[str]:
    """What it leaves on an event loop that is closed the moment it has ended."""
    loop = uvloop.new_event_loop()
    loop.run_until_complete(scenario())
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always", ResourceWarning)
        loop.close()
    return [str(each.message) for each in left]


@pytest.mark.parametrize("name", BESIDE)
def test_it_leaves_nothing_though_cancelled_at_any_step_of_its_beginning_and_again_at_its_end(name: str) -> None:
    async def scenario(steps: int) -> None:
        up = asyncio.Event()

        async def run() -> None:
            async with BESIDE[name]():
                up.set()
                await asyncio.Event().wait()

        running = asyncio.create_task(run())
        for _ in range(steps):
            if up.is_set():
                break
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    before = psutil.Process().children()
    assert {steps: left_open(lambda steps=steps: scenario(steps)) for steps in STEPS} == {steps: [] for steps in STEPS}
    assert psutil.Process().children() == before


def test_a_process_that_does_not_end_by_itself_in_time_is_killed() -> None:
    async def scenario() -> None:
        process = await children.begin("sleep", "60")
        await children.end(process, within_s=0.05)
        assert process.returncode == -9

    assert left_open(scenario) == []


def test_a_process_that_cannot_begin_is_told() -> None:
    with pytest.raises(FileNotFoundError):
        uvloop.run(children.begin("/nowhere/at/all"))
