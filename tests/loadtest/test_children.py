"""Processes beside a measurement leave nothing open on the event loop, whenever who has begun them is cancelled."""

import asyncio
import contextlib
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import uvloop

from loadtest.lab.generating import LoadJob
from loadtest.lab.jobs import Order
from loadtest.lab.launchers.aws.agent import Agent
from loadtest.lab.launchers.aws.door import Aws, AwsRefused
from loadtest.lab.launchers.aws.packing import packed
from loadtest.lab.launchers.aws.post import Post
from loadtest.lab.launchers.launcher import StartFailed
from loadtest.lab.launchers.local import Local
from loadtest.measuring import children
from loadtest.measuring.generator_limit import _null_server_beside
from loadtest.measuring.looks import Looker
from loadtest.measuring.machine import Meter
from loadtest.measuring.reference import ReferenceKernel
from loadtest.prices.catalogue import load_catalogue
from loadtest.results import LoadSpec
from tests.loadtest.examples import example_spec

pytestmark = pytest.mark.slow


@asynccontextmanager
async def kernel() -> AsyncIterator[None]:
    kernel = ReferenceKernel()
    try:
        await kernel.time_ms(())
        yield
    finally:
        await kernel.close()


@asynccontextmanager
async def candidate() -> AsyncIterator[None]:
    ready = "import signal; print('gateway ready http=127.0.0.1:1', flush=True); signal.pause()"
    launcher = Local(start_timeout_s=20, gateway=(sys.executable, "-c", ready))
    running = await launcher.start(example_spec(load_catalogue()).candidates[0])
    try:
        yield
    finally:
        await running.stop()


@asynccontextmanager
async def packing() -> AsyncIterator[None]:
    with TemporaryDirectory() as folder, contextlib.suppress(StartFailed):
        await packed({"models": []}, Path(folder), "bucket", ())
    yield


def empty(service: str, operation: str, parameters: object) -> dict[str, Any]:
    """A bucket with nothing in it."""
    raise AwsRefused("not there", "NoSuchKey")


@asynccontextmanager
async def job() -> AsyncIterator[None]:
    agent = Agent(Aws("", asked=empty), Post("bucket", "base"), command=(sys.executable, "-c", "input()"))
    await agent._done(1, Order(LoadJob(LoadSpec("http://127.0.0.1:1")), 20, {}))
    yield


# What is begun, and is up; or has ended by then.
BESIDE: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
    "candidate": candidate,
    "job": job,
    "kernel": kernel,
    "looker": lambda: Looker(-1, -1),
    "meter": lambda: Meter("127.0.0.1", 1),
    "null server": _null_server_beside,
    "packing": packing,
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


def test_what_a_process_started_and_left_is_killed_with_it() -> None:
    async def scenario() -> None:
        process = await children.begin("sh", "-c", "sleep 60 & echo left", stdin=asyncio.subprocess.DEVNULL)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"left\n"
        await process.wait()
        async with asyncio.timeout(20):
            await children.end(process)
        assert process.stdout.at_eof()  # nobody holds it

    assert left_open(scenario) == []


def test_what_a_process_started_and_left_is_killed_also_where_it_holds_no_output() -> None:
    leaves = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL).pid, flush=True); input()"

    async def scenario() -> None:
        process = await children.begin(sys.executable, "-c", leaves)
        assert process.stdout is not None
        left = psutil.Process(int(await process.stdout.readline()))
        await children.end(process, within_s=20)
        assert process.returncode == 1  # by itself, at the end of its input
        left.wait(20)

    assert left_open(scenario) == []


def test_a_process_that_cannot_begin_is_told() -> None:
    with pytest.raises(FileNotFoundError):
        uvloop.run(children.begin("/nowhere/at/all"))
