"""Answers in parts from the worker pool: real threads and processes, whose generators go on when the test lets them."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest

from backends.base import Device, ExecutionFailed, Model, OutputsRefused, SessionLost, Tensors
from backends.early_failure import EarlyFailure
from gateway.batching.batch import Batch
from gateway.config import Python, Synthetic
from gateway.engine.runner import PARTS_AHEAD, Execution
from gateway.engine.workers import WorkerPool
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, GatewayError
from tests.engine.pools import (
    PATIENCE_S,
    FakeModel,
    FakeSession,
    ManualClock,
    batch_of,
    children,
    open_pool,
    pool_for,
    until_free,
    until_true,
)


class Run:
    """One batch, its parts and its one end. reads: each part is taken at once."""

    def __init__(self, pool: WorkerPool, batch: Batch | None = None, *, reads: bool = True) -> None:
        self.batch = batch or batch_of(1.0)
        self.parts: list[float] = []
        self.reads = reads
        self._pool = pool
        self._ended: asyncio.Future[Execution] = asyncio.get_running_loop().create_future()
        self.failed: asyncio.Future[EarlyFailure] = asyncio.get_running_loop().create_future()  # before the end
        self._more = asyncio.Event()
        pool.start(self.batch, lambda batch, execution: self._ended.set_result(execution), self._part)

    def _part(self, batch: Batch, outputs: Tensors) -> None:
        assert batch is self.batch
        assert not self._ended.done()
        if isinstance(outputs, EarlyFailure):
            self.failed.set_result(outputs)
            return
        self.parts.append(float(outputs["OUTPUT0"][0, 0]))
        self._more.set()
        if self.reads:
            self.take()

    def take(self) -> None:
        self._pool.taken(self.batch)

    async def until_parts(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.parts) < count:
                self._more.clear()
                await self._more.wait()

    async def end(self) -> Execution:
        return await asyncio.wait_for(self._ended, PATIENCE_S)

    @property
    def ended(self) -> bool:
        return self._ended.done()


def part(value: float) -> Tensors:
    return {"OUTPUT0": np.full((1, 16), value, np.float32)}


class Scripted(FakeSession):
    """Its stream does what the test puts into `script`: a value is a part, an exception is raised, None ends it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.script: queue.SimpleQueue[float | BaseException | EarlyFailure | None] = queue.SimpleQueue()
        self.asked = 0
        self.closers: list[threading.Thread] = []
        self.at_close: Callable[[], None] = lambda: None

    def stream(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:
        try:
            while True:
                self.asked += 1
                step = self.script.get()
                if step is None:
                    return
                if isinstance(step, BaseException):
                    raise step
                yield step if isinstance(step, EarlyFailure) else part(step)
        finally:
            self.closers.append(threading.current_thread())
            self.at_close()

    def put(self, *steps: float | BaseException | EarlyFailure | None) -> None:
        for step in steps:
            self.script.put(step)


class ScriptedModel(FakeModel):
    def __init__(self) -> None:
        super().__init__()
        self.next_session = Scripted

    @property
    def session(self) -> Scripted:
        session = self.sessions[-1]
        assert isinstance(session, Scripted)
        return session


class ScriptedPool(WorkerPool):
    """Over a model of the test's."""

    def __init__(self, model: Model, clock: ManualClock, **options: float) -> None:
        super().__init__(Synthetic.model_validate({"kind": "synthetic", **options}), model.spec, name="m:1/s", clock=clock)
        self._scripted = model

    async def _load(self) -> Model:
        return self._scripted


class Opened:
    def __init__(self, **options: float) -> None:
        self.model = ScriptedModel()
        self.clock = ManualClock()
        self.pool = ScriptedPool(self.model, self.clock, **options)

    async def __aenter__(self) -> "Opened":
        await self.pool.open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        for session in self.model.sessions:
            assert isinstance(session, Scripted)
            session.put(None, None)
        await self.pool.close()

    @property
    def session(self) -> Scripted:
        return self.model.session


def test_parts_come_when_they_are_there_and_the_session_takes_the_next_request() -> None:
    async def main() -> None:
        async with Opened() as opened:
            run = Run(opened.pool)
            opened.session.put(1.0)
            await run.until_parts(1)
            assert not run.ended
            opened.session.put(2.0, None)
            execution = await run.end()
            assert run.parts == [1, 2]
            assert (execution.error, execution.outputs, execution.session_lost) == (None, None, False)
            again = Run(opened.pool)
            opened.session.put(None)
            assert (await again.end()).first_part_ns is None
            assert again.parts == []

    asyncio.run(main())


def test_a_session_makes_some_parts_ahead_of_its_client_and_then_waits() -> None:
    async def main() -> None:
        async with Opened() as opened:
            run = Run(opened.pool, reads=False)
            opened.session.put(*range(PARTS_AHEAD + 3), None)
            await run.until_parts(PARTS_AHEAD)
            await asyncio.sleep(0.05)
            assert opened.session.asked == PARTS_AHEAD  # it has not even begun the next
            run.take()
            await run.until_parts(PARTS_AHEAD + 1)
            await asyncio.sleep(0.05)
            assert opened.session.asked == PARTS_AHEAD + 1
            for _ in range(3):
                run.take()
            assert (await run.end()).error is None
            assert run.parts == list(range(PARTS_AHEAD + 3))
            run.take()  # of no run any more

    asyncio.run(main())


@pytest.mark.parametrize("waits", [False, True], ids=["between parts", "while it waits for its client"])
def test_a_cancelled_run_closes_its_generator_on_the_sessions_thread_and_frees_the_session(waits: bool) -> None:
    async def main() -> None:
        async with Opened() as opened:
            run = Run(opened.pool, reads=not waits)
            opened.session.put(*range(PARTS_AHEAD))
            await run.until_parts(PARTS_AHEAD)
            await until_true(lambda: opened.session.asked == PARTS_AHEAD + (not waits))
            opened.pool.cancel(run.batch)
            opened.session.put(99.0)  # the part that is on its way is the last that is made
            execution = await run.end()
            assert isinstance(execution.error, Cancelled)
            assert not execution.session_lost
            assert execution.first_part_ns is not None
            assert opened.session.closers == [opened.session.thread]
            if waits:
                opened.session.script.get()
            after = Run(opened.pool)
            opened.session.put(7.0, None)
            assert (await after.end()).error is None
            assert after.parts == [7]
            assert len(opened.model.sessions) == 1

    asyncio.run(main())


@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize(
    ("fault", "kind", "lost"),
    [
        (ExecutionFailed("no"), BackendFailed, False),
        (OutputsRefused("not as declared"), BackendFailed, False),
        (ValueError("no"), BackendFailed, False),
        (SessionLost("gone"), BackendUnreachable, True),
        (MemoryError("no more"), BackendFailed, True),
        (SystemExit(3), BackendFailed, True),
    ],
)
def test_a_stream_that_fails_ends_once_behind_its_parts(
    parts: int, fault: BaseException, kind: type[GatewayError], lost: bool
) -> None:
    async def main() -> None:
        async with Opened() as opened:
            first = opened.session
            run = Run(opened.pool)
            first.put(*range(parts), fault)
            execution = await run.end()
            assert run.parts == list(range(parts))
            assert isinstance(execution.error, kind)
            assert execution.session_lost is lost
            assert (execution.first_part_ns is not None) is (parts > 0)
            await until_free(opened.pool, 1)
            assert (opened.session is not first) is lost
            after = Run(opened.pool)
            opened.session.put(7.0, None)
            assert (await after.end()).error is None

    asyncio.run(main())


@pytest.mark.parametrize("parts", [0, PARTS_AHEAD - 1])
def test_a_failure_is_told_at_once_and_the_session_is_taken_until_the_model_has_ended(parts: int) -> None:
    async def main() -> None:
        async with Opened() as opened:
            run = Run(opened.pool, reads=False)
            fault = ExecutionFailed("no luck")
            opened.session.put(*range(parts), EarlyFailure(fault))
            told = await asyncio.wait_for(run.failed, PATIENCE_S)
            error = told.error
            assert isinstance(error, BackendFailed)
            assert "no luck" in error.message
            await until_true(lambda: opened.session.asked == parts + 2)  # whether the client takes its parts or not
            assert opened.pool.free_slots == 0
            opened.session.put(fault)
            execution = await run.end()
            assert execution.error is not None
            assert execution.error.message == error.message
            assert execution.first_part_ns == told.first_part_ns
            assert (execution.first_part_ns is not None) is (parts > 0)
            assert not execution.session_lost
            assert opened.pool.free_slots == 1

    asyncio.run(main())


def test_a_generator_that_fails_as_it_is_closed_ends_its_run_and_not_its_session() -> None:
    async def main() -> None:
        async with Opened() as opened:
            run = Run(opened.pool)

            def fail() -> None:
                raise ExecutionFailed("cannot end")

            opened.session.at_close = fail
            opened.session.put(1.0)
            await run.until_parts(1)
            opened.pool.cancel(run.batch)
            opened.session.put(2.0)
            assert isinstance((await run.end()).error, BackendFailed)
            assert opened.pool.free_slots == 1
            opened.session.at_close = lambda: None

    asyncio.run(main())


def test_the_hang_limit_counts_the_gap_between_parts() -> None:
    async def main() -> None:
        async with Opened(hang_timeout_s=10) as opened:
            run = Run(opened.pool)
            for value in range(3):
                opened.clock.advance(9)
                opened.session.put(value)
                await run.until_parts(value + 1)
            opened.clock.advance(9)
            assert not run.ended
            opened.clock.advance(1)
            execution = await run.end()
            assert "hang_timeout_s 10" in str(execution.error)
            assert execution.session_lost
            assert execution.self_inflicted
            assert execution.first_part_ns is not None
            first = opened.session
            first.put(4.0)  # after all: nobody is told
            await until_free(opened.pool, 1)
            assert opened.session is not first
            assert run.parts == [0, 1, 2]

    asyncio.run(main())


def test_the_hang_limit_does_not_count_the_wait_for_a_client() -> None:
    async def main() -> None:
        async with Opened(hang_timeout_s=10) as opened:
            run = Run(opened.pool, reads=False)
            opened.session.put(*range(PARTS_AHEAD))
            await run.until_parts(PARTS_AHEAD)
            await asyncio.sleep(0.05)  # the worker has come to its wait
            for _ in range(3):
                opened.clock.advance(60)
            run.take()
            await until_true(lambda: opened.session.asked == PARTS_AHEAD + 1)
            opened.clock.advance(9)
            assert not run.ended
            opened.clock.advance(1)
            assert "hang_timeout_s 10" in str((await run.end()).error)

    asyncio.run(main())


def test_a_cancelled_run_has_the_whole_hang_limit_to_end() -> None:
    async def main() -> None:
        async with Opened(hang_timeout_s=10) as opened:
            run = Run(opened.pool, reads=False)
            goes_on = threading.Event()
            opened.session.at_close = lambda: bool(goes_on.wait(PATIENCE_S)) and None
            opened.session.put(*range(PARTS_AHEAD))
            await run.until_parts(PARTS_AHEAD)
            await asyncio.sleep(0.05)
            opened.clock.advance(60)
            opened.clock.advance(9)
            opened.pool.cancel(run.batch)
            await until_true(lambda: opened.session.closers)
            opened.clock.advance(9)
            await asyncio.sleep(0.01)
            assert not run.ended
            goes_on.set()
            assert isinstance((await run.end()).error, Cancelled)
            assert len(opened.model.sessions) == 1

    asyncio.run(main())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_generator_whose_close_hangs_costs_its_session_and_elsewhere_its_inputs_are_not_to_blame(elsewhere: bool) -> None:
    async def main() -> None:
        async with Opened(hang_timeout_s=10) as opened:
            opened.model.device = Device("remote" if elsewhere else "cpu")
            run = Run(opened.pool, reads=False)
            goes_on = threading.Event()
            opened.session.at_close = lambda: bool(goes_on.wait(PATIENCE_S)) and None
            opened.session.put(*range(PARTS_AHEAD))
            await run.until_parts(PARTS_AHEAD)
            opened.pool.cancel(run.batch)
            await until_true(lambda: opened.session.closers)
            opened.clock.advance(11)
            execution = await run.end()
            assert (execution.session_lost, execution.self_inflicted) == (True, not elsewhere)
            await until_free(opened.pool, 1)
            goes_on.set()

    asyncio.run(main())


@pytest.mark.parametrize("reads", [True, False])
def test_aborting_ends_streams_and_closing_is_prompt_then(reads: bool) -> None:
    async def main() -> None:
        opened = Opened()
        await opened.pool.open()
        run = Run(opened.pool, reads=reads)
        opened.session.put(*range(PARTS_AHEAD))
        await run.until_parts(PARTS_AHEAD)
        await until_true(lambda: opened.session.asked == PARTS_AHEAD + reads)
        opened.pool.abort()
        opened.session.put(99.0)
        assert isinstance((await run.end()).error, BackendUnreachable)
        await asyncio.wait_for(opened.pool.close(), PATIENCE_S)
        await until_true(lambda: opened.session.closers)
        assert run.parts == list(range(PARTS_AHEAD))

    asyncio.run(main())


def test_closing_waits_for_a_stream() -> None:
    async def main() -> None:
        opened = Opened()
        await opened.pool.open()
        run = Run(opened.pool)
        opened.session.put(1.0)
        await run.until_parts(1)
        closing = asyncio.ensure_future(opened.pool.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        opened.session.put(2.0, None)
        await asyncio.wait_for(closing, PATIENCE_S)
        assert run.parts == [1, 2]
        assert (await run.end()).error is None

    asyncio.run(main())


@pytest.mark.parametrize("failed", [False, True], ids=["left", "failed"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_closing_waits_only_a_while_for_a_stream_elsewhere_that_nobody_reads(elsewhere: bool, failed: bool) -> None:
    async def main() -> None:
        opened = Opened()
        opened.model.device = Device("remote" if elsewhere else "cpu")
        await opened.pool.open()
        run = Run(opened.pool)
        await until_true(lambda: opened.session.asked)
        if failed:
            opened.session.put(EarlyFailure(ExecutionFailed("no luck")))
            await asyncio.wait_for(run.failed, PATIENCE_S)
        else:
            opened.pool.cancel(run.batch)
        closing = asyncio.ensure_future(opened.pool.close())
        await asyncio.sleep(0)
        opened.clock.advance(7)
        if elsewhere:
            execution = await run.end()
            assert isinstance(execution.error, Cancelled)
            await asyncio.wait_for(closing, PATIENCE_S)
            assert not opened.session.closers  # it goes on
        opened.session.put(None)
        await asyncio.wait_for(closing, PATIENCE_S)
        await until_true(lambda: opened.session.closed)

    asyncio.run(main())


# in processes

COUNTS = """
import os
import sys
import time
from pathlib import Path

import numpy as np

class Counts:
    inputs = outputs = [("INPUT0", "FP32", (-1, 16))]
    outputs = [("OUTPUT0", "FP32", (-1, 16))]

    def __init__(self, log):
        self.log = Path(log)

    def predict(self, inputs, parameters):
        try:
            for number in range(int(inputs["INPUT0"][0, 0])):
                if number == parameters.get("fails_after"):
                    raise ValueError("a bad part")
                if number == parameters.get("exits_after"):
                    os._exit(4)
                if number == parameters.get("odd_after"):
                    yield {"OUTPUT0": np.zeros((1, 3), np.float32)}
                with self.log.open("a") as log:
                    print(number, file=log)
                yield {"OUTPUT0": np.full((1, 16), number, np.float32)}
        finally:
            with self.log.open("a") as log:
                print("closed", file=log)
            if "close_s" in parameters:
                time.sleep(parameters["close_s"])
            if "close_raises" in parameters:
                raise {"value": ValueError("no end"), "exit": SystemExit(3)}[parameters["close_raises"]]
"""
ENDLESS = 1e6


class Counting:
    """A pool of one session of `Counts`, thread or process, and what it logged."""

    def __init__(self, folder: Path, isolation: str, **options: float) -> None:
        (folder / "counts.py").write_text(COUNTS)
        self._log = folder / "log"
        self.backend = Python.model_validate(
            {
                "kind": "python",
                "model": f"{folder}/counts.py:Counts",
                "isolation": isolation,
                "class_options": {"log": str(self._log)},
                **options,
            }
        )

    def logged(self) -> list[str]:
        return self._log.read_text().split() if self._log.exists() else []


BOTH = pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])


@BOTH
def test_a_generators_parts_errors_and_waits_are_the_same_in_a_process(tmp_path: Path, isolation: str) -> None:
    async def main() -> None:
        counting = Counting(tmp_path, isolation)
        async with open_pool(counting.backend) as pool:
            run = Run(pool, batch_of(5.0))
            assert (await run.end()).error is None
            assert run.parts == [0, 1, 2, 3, 4]

            failing = Run(pool, batch_of(5.0, fails_after=2))
            execution = await failing.end()
            assert failing.parts == [0, 1]
            assert "ValueError: a bad part" in str(execution.error)
            assert "counts.py" in execution.trace
            assert not execution.session_lost

            odd = Run(pool, batch_of(5.0, odd_after=2))
            execution = await odd.end()
            assert odd.parts == [0, 1]
            assert execution.refused
            assert "the model gave shape [1, 3]" in str(execution.error)
            assert counting.logged()[-1] == "closed"

            slow = Run(pool, batch_of(ENDLESS), reads=False)
            await slow.until_parts(PARTS_AHEAD)
            await asyncio.sleep(0.05)
            assert counting.logged()[-1] == str(PARTS_AHEAD - 1)
            pool.cancel(slow.batch)
            assert isinstance((await slow.end()).error, Cancelled)
            assert counting.logged()[-1] == "closed"

            refusing = Run(pool, batch_of(ENDLESS, close_raises="value"), reads=False)
            await refusing.until_parts(PARTS_AHEAD)
            pool.cancel(refusing.batch)
            execution = await refusing.end()
            assert "no end" in str(execution.error)
            assert not execution.session_lost

            leaving = Run(pool, batch_of(ENDLESS, close_raises="exit"), reads=False)
            await leaving.until_parts(PARTS_AHEAD)
            pool.cancel(leaving.batch)
            assert (await leaving.end()).session_lost
            await until_free(pool, 1)
            assert (await Run(pool, batch_of(1.0)).end()).error is None

    asyncio.run(main())


@pytest.mark.parametrize("reads", [True, False], ids=["that reads", "that does not"])
@pytest.mark.slow
def test_a_process_killed_in_mid_stream_is_one_error_to_a_client(tmp_path: Path, reads: bool) -> None:
    async def main() -> None:
        async with open_pool(Counting(tmp_path, "process").backend) as pool:
            run = Run(pool, batch_of(ENDLESS), reads=reads)
            await run.until_parts(PARTS_AHEAD)
            (child,) = children()
            child.kill()
            execution = await run.end()
            assert isinstance(execution.error, BackendUnreachable)
            assert execution.session_lost
            assert not execution.self_inflicted
            await until_free(pool, 1)
            after = Run(pool, batch_of(2.0))
            assert (await after.end()).error is None
            assert after.parts == [0, 1]

    asyncio.run(main())


@pytest.mark.slow
def test_a_process_that_exits_in_mid_stream_or_hangs_in_its_close_is_rebuilt(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_pool(Counting(tmp_path, "process", hang_timeout_s=0.5).backend) as pool:
            exiting = Run(pool, batch_of(5.0, exits_after=2))
            execution = await exiting.end()
            assert exiting.parts == [0, 1]
            assert execution.self_inflicted
            await until_free(pool, 1)

            hanging = Run(pool, batch_of(ENDLESS, close_s=600), reads=False)
            await hanging.until_parts(PARTS_AHEAD)
            (child,) = children()
            pool.cancel(hanging.batch)
            assert "hang_timeout_s 0.5" in str((await hanging.end()).error)
            await until_true(lambda: not psutil.pid_exists(child.pid))
            await until_free(pool, 1)

    asyncio.run(main())


@pytest.mark.slow
def test_a_pool_that_is_aborted_kills_processes_in_mid_stream(tmp_path: Path) -> None:
    async def main() -> None:
        pool = pool_for(Counting(tmp_path, "process").backend)
        await pool.open()
        run = Run(pool, batch_of(ENDLESS), reads=False)
        await run.until_parts(PARTS_AHEAD)
        pool.abort()
        assert isinstance((await run.end()).error, BackendUnreachable)
        began_s = time.monotonic()
        await pool.close()
        assert time.monotonic() - began_s < 5
        await until_true(lambda: not children())

    asyncio.run(main())
