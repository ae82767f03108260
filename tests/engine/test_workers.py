"""The worker pool: on real threads and processes with the synthetic backend's faults, and with sessions that do as told."""

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from backends.base import BackendError, ExecutionFailed, LoadFailed, Model, RunCancelled, SessionLost, SpecMismatch, Tensors
from gateway.batching.batch import Batch, Part
from gateway.config import Python, Synthetic
from gateway.engine.runner import Execution
from gateway.engine.workers import WorkerPool
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, ConfigError, InvalidArgument
from gateway.process import large_pages
from tests.engine.pools import (
    PATIENCE_S,
    CancellableFake,
    FakeModel,
    FakeSession,
    ManualClock,
    MortalFake,
    batch_of,
    children,
    open_pool,
    pool_for,
    run,
    start,
    until,
    until_free,
    until_true,
)
from tests.simulation import SimulatedClock, run_simulated

HEAVY = """
import mmap


class Heavy:
    inputs = (("INPUT0", "FP32", (-1, 16)),)
    outputs = (("OUTPUT0", "FP32", (-1, 16)),)

    def __init__(self):
        self.weights = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # numpy would ask by itself
        self.weights.write(b"1" * (64 << 20))

    def predict(self, inputs):
        return {"OUTPUT0": inputs["INPUT0"]}
"""
FAULTS = {"fail": 101.0, "lose": 102.0, "hang": 103.0, "exit": 104.0, "short": 105.0}


def pool_of(**options: object) -> AbstractAsyncContextManager[WorkerPool]:
    return open_pool(Synthetic.model_validate({"kind": "synthetic", "fixed_ms": 0, "row_ms": 0, "faults": FAULTS, **options}))


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_a_batch_comes_back(isolation: str) -> None:
    async def main() -> None:
        async with pool_of(isolation=isolation) as pool:
            execution = await run(pool, batch_of(3.0, rows=2))
            assert execution.error is None
            assert execution.outputs is not None
            assert execution.outputs["OUTPUT0"].tolist() == [[3.0] * 16] * 2
            assert execution.finished_ns >= execution.started_ns

    asyncio.run(main())


def test_sessions_run_in_parallel() -> None:
    async def main() -> None:
        async with pool_of(sessions=4, fixed_ms=50) as pool:
            ends = await asyncio.gather(*(run(pool, batch_of(1.0)) for _ in range(4)))
            assert max(end.started_ns for end in ends) < min(end.finished_ns for end in ends)

    asyncio.run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_a_failing_batch_leaves_its_session_usable(isolation: str) -> None:
    async def main() -> None:
        async with pool_of(isolation=isolation) as pool:
            execution = await run(pool, batch_of(FAULTS["fail"]))
            assert isinstance(execution.error, BackendFailed)
            assert not execution.session_lost
            assert pool.free_slots == 1
            assert (await run(pool, batch_of(1.0))).error is None

    asyncio.run(main())


@pytest.mark.parametrize(("isolation", "fault"), [("thread", "lose"), ("process", "lose"), ("process", "exit")])
@pytest.mark.slow
def test_a_lost_session_is_rebuilt(isolation: str, fault: str) -> None:
    async def main() -> None:
        async with pool_of(isolation=isolation) as pool:
            execution = await run(pool, batch_of(FAULTS[fault]))
            assert isinstance(execution.error, BackendFailed if fault == "exit" else BackendUnreachable)
            assert (execution.session_lost, execution.self_inflicted) == (True, fault == "exit")
            assert pool.free_slots == 0
            assert pool.available
            await until_free(pool, 1)
            assert (await run(pool, batch_of(1.0))).error is None

    asyncio.run(main())


@pytest.mark.slow
def test_a_killed_process_is_noticed_by_its_batch() -> None:
    async def main() -> None:
        async with pool_of(isolation="process", fixed_ms=5000) as pool:
            running = asyncio.ensure_future(run(pool, batch_of(1.0)))
            await asyncio.sleep(0.05)
            (child,) = children()
            child.kill()
            execution = await running
            assert execution.session_lost
            assert "status -9" in str(execution.error)

    asyncio.run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_a_run_past_the_limit_is_abandoned_and_its_session_rebuilt(isolation: str) -> None:
    async def main() -> None:
        async with pool_of(isolation=isolation, hang_timeout_s=0.2) as pool:
            execution = await run(pool, batch_of(FAULTS["hang"]))
            assert execution.session_lost
            assert "hang_timeout_s 0.2" in str(execution.error)
            await until_free(pool, 1)
            assert (await run(pool, batch_of(1.0))).error is None

    asyncio.run(main())


FRAGILE = """
from pathlib import Path

from backends.base import SessionLost

class Fragile:
    inputs = outputs = [("INPUT0", "FP32", (-1, 16))]

    def __init__(self, broken):
        self.broken = Path(broken)

    def load(self):
        if self.broken.exists():
            raise RuntimeError("broken")

    def predict(self, inputs):
        if self.broken.exists():
            raise SessionLost("broken")
        return inputs
"""


@pytest.mark.slow
def test_a_pool_whose_sessions_cannot_be_rebuilt_says_so_and_recovers(tmp_path: Path) -> None:
    source, broken = tmp_path / "fragile.py", tmp_path / "broken"
    source.write_text(FRAGILE)
    backend = Python(kind="python", model=f"{source}:Fragile", class_options={"broken": str(broken)})

    async def main() -> None:
        async with open_pool(backend) as pool:
            changed = asyncio.Event()
            pool.on_change = changed.set
            broken.touch()
            assert (await run(pool, batch_of(1.0))).session_lost
            while pool.available:
                changed.clear()
                await asyncio.wait_for(changed.wait(), 10)
            broken.unlink()
            await until_free(pool, 1)
            assert pool.available
            assert (await run(pool, batch_of(1.0))).error is None

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_fails_open_with_its_own_words() -> None:
    async def main() -> None:
        with pytest.raises(BackendFailed, match=r"m:1/synthetic: failed to load: .*fail_opens"):
            async with pool_of(fail_opens=1):
                pass

    asyncio.run(main())


def test_too_few_rows_are_a_failure_of_the_model() -> None:
    async def main() -> None:
        async with pool_of() as pool:
            assert isinstance((await run(pool, batch_of(FAULTS["short"], rows=2))).error, BackendFailed)

    asyncio.run(main())


TELLING = """
import numpy as np

class Telling:
    inputs = [("INPUT0", "FP32", (-1, 16))]
    outputs = [("DEADLINE", "INT64", (-1, 1))]

    def predict(self, inputs, parameters):
        deadline = parameters.deadline_ns or 0
        return {"DEADLINE": np.full((len(inputs["INPUT0"]), 1), deadline, np.int64)}
"""


def test_the_model_is_told_until_when_anyone_waits(tmp_path: Path) -> None:
    source = tmp_path / "telling.py"
    source.write_text(TELLING)

    async def main() -> None:
        async with open_pool(Python(kind="python", model=f"{source}:Telling")) as pool:
            for deadlines_ns, told in (((5, 7), 7), ((5, None), 0), ((None, None), 0)):
                parts = [Part(batch_of(1.0).parts[0].request, 0, 1) for _ in deadlines_ns]
                for part, deadline_ns in zip(parts, deadlines_ns, strict=True):
                    part.request.deadline_ns = deadline_ns
                batch = Batch(parts=parts, rows=2, padded_rows=2, reason="full", closed_ns=time.monotonic_ns())
                execution = await run(pool, batch)
                assert execution.outputs is not None
                assert execution.outputs["DEADLINE"].tolist() == [[told]] * 2

    asyncio.run(main())


def test_a_model_that_is_not_as_declared_is_a_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> Model:
        raise SpecMismatch("input 'X': the model has none of that name")

    async def main() -> None:
        monkeypatch.setattr("gateway.engine.workers.backends.load", load)
        with pytest.raises(ConfigError, match="none of that name"):
            async with pool_of():
                pass

    asyncio.run(main())


# with sessions that do as the test says


def use(monkeypatch: pytest.MonkeyPatch, model: FakeModel, **options: object) -> Synthetic:
    """A backend whose model this is."""
    monkeypatch.setattr("gateway.engine.workers.backends.load", lambda *_: model)
    return Synthetic.model_validate({"kind": "synthetic", **options})


def wait_for_thread_of(session: FakeSession) -> None:
    """Hold the loop until a worker's thread has ended, so that simulated time cannot run ahead of it."""
    session.thread.join(PATIENCE_S)
    assert not session.thread.is_alive()


class Failing:
    """How one error of a model ends its batch."""

    def __init__(
        self,
        fault: BaseException,
        error: type[Exception],
        words: str,
        *,
        lost: bool = False,
        own: bool = False,
        begun: bool = True,
    ) -> None:
        self.fault = fault
        self.error = error
        self.words = words
        self.lost = lost
        self.own = own
        self.begun = begun


FAILING = [
    Failing(ExecutionFailed("no"), BackendFailed, "m:1/synthetic: no"),
    Failing(RunCancelled("told to"), Cancelled, "m:1/synthetic: told to"),
    Failing(InvalidArgument("bad"), InvalidArgument, "bad"),
    Failing(ValueError("odd"), BackendFailed, "m:1/synthetic: ValueError: odd"),
    Failing(SessionLost("gone"), BackendUnreachable, "m:1/synthetic: gone", lost=True),
    Failing(SessionLost("gone", begun=False), BackendUnreachable, "m:1/synthetic: gone", lost=True, begun=False),
    Failing(SessionLost("broke it", self_inflicted=True), BackendFailed, "m:1/synthetic: broke it", lost=True, own=True),
    Failing(MemoryError("full"), BackendFailed, "m:1/synthetic: MemoryError: full", lost=True, own=True),
    Failing(
        SystemExit(1),
        BackendFailed,
        "m:1/synthetic: the model raised SystemExit: 1, which ends its session",
        lost=True,
        own=True,
    ),
]


@pytest.mark.parametrize("failing", FAILING, ids=[type(failing.fault).__name__ for failing in FAILING])
def test_what_a_run_raises_ends_its_batch(monkeypatch: pytest.MonkeyPatch, failing: Failing) -> None:
    async def main() -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model)) as pool:
            model.sessions[0].end(failing.fault)
            execution = await run(pool, batch_of(1.0))
            assert type(execution.error) is failing.error
            assert getattr(execution.error, "message", None) == failing.words
            assert (execution.outputs, execution.session_lost, execution.self_inflicted) == (None, failing.lost, failing.own)
            assert execution.begun == failing.begun
            await until_free(pool, 1)
            assert len(model.sessions) == 1 + failing.lost
            model.sessions[-1].end()
            assert (await run(pool, batch_of(1.0))).error is None
        assert ("Traceback" in execution.trace) == (not isinstance(failing.fault, BackendError))

    asyncio.run(main())


def test_a_pool_says_how_many_sessions_it_has_free_and_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model, sessions=3)) as pool:
            assert (pool.slots, pool.free_slots, pool.busy, pool.available) == (3, 3, 0, True)
            assert (pool.cold, pool.cold_start_ns) == (False, None)
            assert sorted(model.openings) == [0, 1, 2]
            runs = [start(pool, batch_of(1.0)) for _ in range(3)]
            assert (pool.slots, pool.free_slots, pool.busy, pool.available) == (3, 0, 3, True)
            assert repr(pool) == "<WorkerPool m:1/synthetic: 0 idle, 3 busy, 0 rebuilding>"
            for session in model.sessions:
                session.end()
            await asyncio.gather(*runs)
            assert (pool.free_slots, pool.busy) == (3, 0)

    asyncio.run(main())


def test_an_execution_tells_when_the_model_began_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model, clock = FakeModel(), ManualClock()
        async with open_pool(use(monkeypatch, model), clock) as pool:
            for fault in (None, ExecutionFailed("no")):
                began_ns = clock.now_ns()
                ended = start(pool, batch_of(1.0))
                await model.sessions[0].until_running()
                clock.advance(2.0)
                model.sessions[0].end(fault)
                execution = await ended
                assert (execution.started_ns, execution.finished_ns) == (began_ns, began_ns + 2_000_000_000)

    asyncio.run(main())


def test_a_callback_that_raises_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(batch: Batch, execution: Execution) -> None:
        raise RuntimeError("a callback's own fault")

    async def main() -> None:
        seen: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
        model, clock = FakeModel(), ManualClock()
        async with open_pool(use(monkeypatch, model, sessions=2, hang_timeout_s=10), clock) as pool:
            for session in model.sessions:
                session.end()
                pool.start(batch_of(1.0), raising)
            await until_true(lambda: not pool.busy)
            assert pool.free_slots == 2
            # One that hangs, beside another that does.
            pool.start(batch_of(1.0), raising)
            ended = start(pool, batch_of(1.0))
            clock.advance(10)
            assert (await ended).session_lost
            await until_free(pool, 2)
        assert [str(context["exception"]) for context in seen] == ["a callback's own fault"] * 3

    asyncio.run(main())


# cancelling


@pytest.mark.parametrize("deaf", [0, 3], ids=["running", "not yet running"])
def test_a_cancelled_batch_frees_its_session(monkeypatch: pytest.MonkeyPatch, deaf: int) -> None:
    async def main() -> None:
        model = FakeModel(cancellable=True)
        async with open_pool(use(monkeypatch, model)) as pool:
            (session,) = model.sessions
            assert isinstance(session, CancellableFake)
            session.deaf = deaf
            batch = batch_of(1.0)
            ended = start(pool, batch)
            pool.cancel(batch)
            execution = await asyncio.wait_for(ended, PATIENCE_S)
            assert isinstance(execution.error, Cancelled)
            assert (execution.session_lost, pool.free_slots) == (False, 1)
            assert session.cancels > deaf  # it is asked again until it ends, which takes a moment

    asyncio.run(main())


def test_a_run_that_does_not_end_is_told_again_every_20_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel(cancellable=True)
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            (session,) = model.sessions
            assert isinstance(session, CancellableFake)
            session.deaf = 1000
            batch = batch_of(1.0)
            ended = start(pool, batch)
            pool.cancel(batch)
            told = []
            for _ in range(4):
                told.append(session.cancels)
                await asyncio.sleep(0.0201)
            assert told == [1, 2, 3, 4]
            session.end()
            await ended

    run_simulated(main)


def test_cancelling_a_batch_that_has_ended_leaves_the_next_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel(cancellable=True)
        async with open_pool(use(monkeypatch, model)) as pool:
            (session,) = model.sessions
            assert isinstance(session, CancellableFake)
            first, second = batch_of(1.0), batch_of(2.0)
            ended = start(pool, first)
            pool.cancel(first)  # and again 20 ms later, were it still there
            assert isinstance((await ended).error, Cancelled)
            ended = start(pool, second)
            pool.cancel(first)
            await asyncio.sleep(0.05)
            assert (session.cancels, ended.done()) == (1, False)
            session.end()
            assert (await ended).error is None

    asyncio.run(main())


class HeldBatch(Batch, kw_only=True, eq=False):
    """Its inputs are put together when the test lets them."""

    let: threading.Semaphore

    def concat(self, *, kept: bool = True) -> Tensors:
        assert self.let.acquire(timeout=PATIENCE_S)
        return super().concat(kept=kept)


def test_a_pool_tells_when_what_was_started_last_needs_the_interpreter_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model)) as pool:
            begun = asyncio.Event()
            assert not pool.try_await_begin(begun.set)  # nothing was started
            plain = batch_of(1.0)
            let = threading.Semaphore(0)
            batch = HeldBatch(parts=plain.parts, rows=1, padded_rows=1, reason="full", closed_ns=plain.closed_ns, let=let)
            ended = start(pool, batch)
            assert pool.try_await_begin(begun.set)
            await asyncio.sleep(0)
            assert not begun.is_set()
            let.release()
            await asyncio.wait_for(begun.wait(), PATIENCE_S)
            assert not ended.done()
            assert not pool.try_await_begin(begun.set)  # it has begun
            model.sessions[0].end()
            assert (await ended).error is None
            assert not pool.try_await_begin(begun.set)

    asyncio.run(main())


def test_cancelling_strikes_the_session_that_runs_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel(cancellable=True)
        async with open_pool(use(monkeypatch, model, sessions=3)) as pool:
            batches = [batch_of(float(number)) for number in range(3)]
            runs = [start(pool, batch) for batch in batches]
            for session in model.sessions:
                await session.until_running()
            pool.cancel(batches[1])
            assert isinstance((await runs[1]).error, Cancelled)
            for session in model.sessions:
                assert isinstance(session, CancellableFake)
                ((inputs, _),) = session.runs
                assert session.cancels == int(inputs["INPUT0"][0, 0] == 1.0)
            assert [ended.done() for ended in runs] == [False, True, False]
            pool.cancel(batch_of(1.0))  # nobody's
            for session in model.sessions:
                session.end()
            assert [(await ended).error for ended in (runs[0], runs[2])] == [None, None]

    asyncio.run(main())


def test_a_session_that_cannot_cancel_is_asked_once_and_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(FakeSession):
        times = 0

        @property
        def cancel(self) -> object:
            Asked.times += 1
            raise AttributeError("cancel")

    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        model.next_session = Asked
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            batch = batch_of(1.0)
            ended = start(pool, batch)
            pool.cancel(batch)
            await asyncio.sleep(1.0)
            assert Asked.times == 1
            model.sessions[0].end()
            assert (await ended).error is None

    run_simulated(main)


# runs past the limit


def test_each_run_is_abandoned_when_it_alone_has_run_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model, clock = FakeModel(mortal=True), ManualClock()
        async with open_pool(use(monkeypatch, model, sessions=3, hang_timeout_s=10), clock) as pool:
            began_ns = clock.now_ns()
            runs = []
            for _ in range(3):
                runs.append(start(pool, batch_of(1.0)))
                clock.advance(3)
            assert len(clock.timers) == 1  # for the pool, not for each
            clock.advance(0.999)
            await asyncio.sleep(0)
            assert [ended.done() for ended in runs] == [False] * 3
            clock.advance(0.001)
            execution = await runs[0]
            assert (execution.session_lost, execution.self_inflicted, type(execution.error)) == (True, True, BackendFailed)
            assert str(execution.error) == "m:1/synthetic: the model did not return within hang_timeout_s 10"
            assert (execution.started_ns, execution.finished_ns) == (began_ns, began_ns + 10_000_000_000)
            assert [ended.done() for ended in runs] == [True, False, False]
            await until_free(pool, 1)
            hung = [session for session in model.sessions if isinstance(session, MortalFake) and session.kills]
            assert len(hung) == 1
            clock.advance(3)
            assert (await runs[1]).self_inflicted
            assert not runs[2].done()
            for session in model.sessions:
                session.end()
            assert (await runs[2]).error is None
            await until_free(pool, 3)
            clock.advance(10)  # nothing is left that could be over the limit
            assert (clock.timers, pool.free_slots) == ([], 3)
            ended = start(pool, batch_of(1.0))
            clock.advance(10)
            assert (await ended).session_lost  # but the next may be

    asyncio.run(main())


def test_what_an_abandoned_run_returns_late_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model, clock = FakeModel(), ManualClock()
        async with open_pool(use(monkeypatch, model, hang_timeout_s=10), clock) as pool:
            ended = start(pool, batch_of(1.0))
            await model.sessions[0].until_running()
            clock.advance(10)
            assert (await ended).session_lost
            await until_free(pool, 1)
            model.sessions[0].end()
            await until_true(lambda: model.sessions[0].closed)
            assert (pool.free_slots, pool.busy) == (1, 0)
            ended = start(pool, batch_of(2.0))
            model.sessions[1].end()
            assert (await ended).error is None

    asyncio.run(main())


# rebuilding


def lose_once(pool: WorkerPool, model: FakeModel, fault: BaseException) -> "asyncio.Future[Execution]":
    model.sessions[-1].end(fault)
    return start(pool, batch_of(1.0))


def test_a_session_that_had_worked_is_rebuilt_at_once_when_the_lost_one_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        opened_ns: list[int] = []
        model.on_open = lambda: opened_ns.append(clock.now_ns())
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            began_ns = clock.now_ns()
            model.sessions[0].end()
            assert (await start(pool, batch_of(1.0))).error is None
            for fault in (SessionLost("gone"), SessionLost("broke it", self_inflicted=True), SystemExit(1)):
                assert (await lose_once(pool, model, fault)).session_lost
                assert pool.free_slots == 0
                wait_for_thread_of(model.sessions[-1])
                await until_free(pool, 1)
                model.sessions[-1].end()
                assert (await start(pool, batch_of(1.0))).error is None
            assert opened_ns == [began_ns] * 4
            assert [session.closed for session in model.sessions] == [1, 1, 1, 0]

    run_simulated(main)


def test_one_that_the_run_itself_ended_is_rebuilt_at_once_though_it_never_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            began_ns = clock.now_ns()
            for _ in range(3):
                assert (await lose_once(pool, model, KeyboardInterrupt())).self_inflicted
                wait_for_thread_of(model.sessions[-1])
                await until_free(pool, 1)
            assert clock.now_ns() == began_ns

    run_simulated(main)


def test_sessions_that_are_lost_before_they_ever_worked_are_rebuilt_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            waited_s = []
            for _ in range(8):
                lost_ns = clock.now_ns()
                assert (await lose_once(pool, model, SessionLost("gone"))).session_lost
                wait_for_thread_of(model.sessions[-1])
                await until_free(pool, 1)
                waited_s.append(round((clock.now_ns() - lost_ns) / 1e9, 3))
            assert waited_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
            model.sessions[-1].end()
            assert (await start(pool, batch_of(1.0))).error is None
            lost_ns = clock.now_ns()
            await lose_once(pool, model, SessionLost("gone"))
            wait_for_thread_of(model.sessions[-1])
            await until_free(pool, 1)
            assert clock.now_ns() == lost_ns

    run_simulated(main)


def test_rebuilding_waits_for_the_lost_session_to_close_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        closing = threading.Event()
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            model.sessions[0].end()
            await start(pool, batch_of(1.0))
            monkeypatch.setattr(model.sessions[0], "close", lambda: closing.wait(PATIENCE_S))
            lost_ns = clock.now_ns()
            await lose_once(pool, model, SessionLost("gone"))
            await until_free(pool, 1)
            assert clock.now_ns() - lost_ns == pytest.approx(0.1e9, abs=1e3)
            closing.set()

    run_simulated(main)


def test_after_three_rebuilds_that_failed_the_pool_is_unavailable_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        tried_ns: list[int] = []
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            for _ in range(2):  # the second time as the first: what failed before is forgotten
                model.sessions[-1].end()
                await start(pool, batch_of(1.0))
                tried_ns.clear()
                model.on_open = lambda: tried_ns.append(clock.now_ns())
                model.open_faults = [LoadFailed("not yet"), ValueError("nor now")] * 4
                available = []
                told = asyncio.Event()
                pool.on_change = told.set
                await lose_once(pool, model, SessionLost("gone"))
                wait_for_thread_of(model.sessions[-1])
                while not pool.free_slots:
                    told.clear()
                    await told.wait()
                    available.append(pool.available)
                assert available == [True, True, False, False, False, False, False, False, True]
                waited_s = [round((after - before) / 1e9, 3) for before, after in pairwise(tried_ns)]
                assert waited_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]

    run_simulated(main)


def _open_when(opening: threading.Event, opened: threading.Event) -> None:
    opening.set()
    opened.wait(PATIENCE_S)


def test_a_pool_whose_next_session_opens_for_longer_than_a_run_may_take_is_unavailable_until_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        model, clock = FakeModel(), ManualClock()
        opening, opened = threading.Event(), threading.Event()
        async with open_pool(use(monkeypatch, model, hang_timeout_s=10), clock) as pool:
            changed = asyncio.Event()
            pool.on_change = changed.set
            model.on_open = partial(_open_when, opening, opened)
            assert (await lose_once(pool, model, SessionLost("gone", self_inflicted=True))).session_lost
            await until_true(opening.is_set)
            clock.advance(9)
            assert pool.available
            clock.advance(1)
            await asyncio.wait_for(changed.wait(), PATIENCE_S)
            assert not pool.available
            opened.set()
            await until_free(pool, 1)
            assert pool.available

    asyncio.run(main())


def test_a_pool_that_took_long_to_open_may_take_as_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model, clock = FakeModel(), ManualClock()
        opening, opened = threading.Event(), threading.Event()
        model.on_open = lambda: clock.advance(30)
        async with open_pool(use(monkeypatch, model, hang_timeout_s=10), clock) as pool:
            model.on_open = partial(_open_when, opening, opened)
            await lose_once(pool, model, SessionLost("gone", self_inflicted=True))
            await until_true(opening.is_set)
            clock.advance(59)
            assert pool.available
            clock.advance(1)
            assert not pool.available
            opened.set()

    asyncio.run(main())


def test_a_fresh_pool_is_unavailable_after_three_rebuilds_that_failed_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            model.open_faults = [LoadFailed("not yet")] * 5
            await lose_once(pool, model, SessionLost("gone"))
            await until(pool, lambda: not pool.available)
            assert len(model.openings) == 1 + 3
            await until_free(pool, 1)

    run_simulated(main)


def test_a_pool_with_one_live_session_stays_available_however_often_another_cannot_be_rebuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model, sessions=2), ManualClock()) as pool:
            model.open_faults = [LoadFailed("not yet")] * 5
            opening = threading.Event()  # held back, as simulated time would not wait for the runs

            def wait() -> None:
                assert opening.wait(PATIENCE_S)

            model.on_open = wait
            for session in model.sessions:
                session.end(SessionLost("gone") if session is model.sessions[0] else None)
            ends = [await ended for ended in (start(pool, batch_of(1.0)), start(pool, batch_of(1.0)))]
            assert sorted(end.session_lost for end in ends) == [False, True]
            assert (pool.free_slots, pool.available) == (1, True)
            changes: list[bool] = []
            changed = asyncio.Event()

            def on_change() -> None:
                changes.append(pool.available)
                changed.set()

            async def until_changed(times: int) -> None:
                while len(changes) < times:
                    changed.clear()
                    await changed.wait()

            pool.on_change = on_change
            opening.set()
            await until_changed(6)
            assert (changes, pool.free_slots) == ([True] * 6, 2)
            # Busy counts as alive as well.
            opening.clear()
            model.open_faults = [LoadFailed("not yet")] * 5
            both = [start(pool, batch_of(1.0)) for _ in range(2)]
            model.sessions[1].end(SessionLost("gone"))
            await both[0] if both[0].done() else await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            changes.clear()
            opening.set()
            await until_changed(5)
            assert (changes, pool.free_slots, pool.busy) == ([True] * 5, 0, 1)
            model.sessions[2].end()
            await asyncio.gather(*both)

    run_simulated(main)


def test_every_lost_session_is_rebuilt_with_its_own_index(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model, sessions=3)) as pool:
            runs = [start(pool, batch_of(1.0)) for _ in range(3)]
            for session in model.sessions[:3]:
                session.end(SessionLost("gone") if session.index != 1 else None)
            await asyncio.gather(*runs)
            await until_free(pool, 3)
            assert sorted(model.openings) == [0, 0, 1, 2, 2]
            assert {session.index: session.closed for session in model.sessions[:3]} == {0: 1, 1: 0, 2: 1}

    asyncio.run(main())


def test_a_change_that_nobody_can_bear_does_not_end_the_rebuilding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            model.open_faults = [LoadFailed("not yet")] * 2

            rebuilt = asyncio.Event()

            def raising() -> None:
                if pool.free_slots:
                    rebuilt.set()
                raise RuntimeError("a listener's own fault")

            pool.on_change = raising
            await lose_once(pool, model, SessionLost("gone"))
            await rebuilt.wait()

    run_simulated(main)


# sessions that die by themselves


def mortal(session: FakeSession) -> MortalFake:
    assert isinstance(session, MortalFake)
    return session


def test_an_idle_session_that_dies_is_rebuilt_before_anyone_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel(mortal=True)
        async with open_pool(use(monkeypatch, model, sessions=2)) as pool:
            free = []
            changed = asyncio.Event()

            def on_change() -> None:
                free.append(pool.free_slots)
                changed.set()

            pool.on_change = on_change
            await asyncio.to_thread(mortal(model.sessions[1]).died, "process 7 ended with status -9")
            while len(free) < 2:
                changed.clear()
                await asyncio.wait_for(changed.wait(), PATIENCE_S)
            assert free == [1, 2]
            assert model.openings == [0, 1, 1]
            assert (model.sessions[0].closed, mortal(model.sessions[1]).kills) == (0, 1)

    asyncio.run(main())


def test_a_session_that_dies_with_its_answer_given_runs_no_other_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel(mortal=True)
        async with open_pool(use(monkeypatch, model)) as pool:
            ended = start(pool, batch_of(1.0))
            await model.sessions[0].until_running()
            mortal(model.sessions[0]).died("process 7 ended with status 1")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not ended.done()  # its run tells how it ended
            model.sessions[0].end()
            execution = await ended
            assert (execution.error, execution.session_lost) == (None, False)
            assert pool.free_slots == 0
            await until_free(pool, 1)
            assert len(model.sessions) == 2

    asyncio.run(main())


def test_a_session_that_is_dead_on_arrival_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stillborn(MortalFake):
        def watch(self, died: Callable[[str], None]) -> None:
            died("process 7 ended with status 1")

    async def main() -> None:
        model = FakeModel(mortal=True)
        model.next_session = Stillborn
        pool = pool_for(use(monkeypatch, model))
        model.on_open = lambda: setattr(model, "next_session", Stillborn if len(model.openings) < 2 else MortalFake)
        await pool.open()
        assert pool.free_slots == 0
        await until_free(pool, 1)
        assert len(model.sessions) == 2
        await pool.close()

    asyncio.run(main())


@pytest.mark.slow
def test_an_idle_process_that_is_killed_is_rebuilt_before_a_request_meets_it() -> None:
    async def main() -> None:
        async with pool_of(isolation="process", sessions=2) as pool:
            victim, survivor = children()
            victim.kill()
            await until(pool, lambda: pool.free_slots == 1)
            await until_free(pool, 2)
            assert survivor in children()
            assert victim not in children()
            ends = await asyncio.gather(*(run(pool, batch_of(1.0)) for _ in range(2)))
            assert [end.error for end in ends] == [None, None]

    asyncio.run(main())


# opening, closing, giving up


def test_sessions_that_were_opened_are_closed_when_a_later_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        model.open_faults = [None, None, LoadFailed("no third one")]
        pool = pool_for(use(monkeypatch, model, sessions=3))
        with pytest.raises(BackendFailed, match=r"^m:1/synthetic: failed to load: no third one$"):
            await pool.open()
        assert [session.closed for session in model.sessions] == [1, 1]
        assert model.closed == 1

    asyncio.run(main())


def test_closing_waits_for_what_runs_and_then_frees_sessions_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model, clock = FakeModel(), ManualClock()
        pool = pool_for(use(monkeypatch, model, sessions=3), clock)
        await pool.open()
        runs = [start(pool, batch_of(1.0)) for _ in range(2)]
        for session in model.sessions[1:]:
            await session.until_running()
        closing = asyncio.ensure_future(pool.close())
        for session in model.sessions[1:]:
            await asyncio.sleep(0.01)
            assert not closing.done()
            assert [session.closed for session in model.sessions] + [model.closed] == [0, 0, 0, 0]
            session.end()
            await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
            runs = [ended for ended in runs if not ended.done()]
        await closing
        assert [session.closed for session in model.sessions] == [1, 1, 1]
        assert (model.closed, clock.timers) == (1, [])

    asyncio.run(main())


def test_a_session_that_is_lost_while_closing_is_not_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        pool = pool_for(use(monkeypatch, model))
        await pool.open()
        ended = start(pool, batch_of(1.0))
        closing = asyncio.ensure_future(pool.close())
        await asyncio.sleep(0)
        model.sessions[0].end(SessionLost("gone"))
        assert (await ended).session_lost
        await closing
        assert len(model.openings) == 1

    asyncio.run(main())


def test_closing_ends_a_rebuild_and_what_it_opens_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        pool = pool_for(use(monkeypatch, model))
        await pool.open()
        opening, opened = threading.Event(), threading.Event()

        def hold() -> None:
            opening.set()
            assert opened.wait(PATIENCE_S)

        model.on_open = hold
        await lose_once(pool, model, SystemExit(1))
        assert await asyncio.to_thread(opening.wait, PATIENCE_S)
        await pool.close()
        assert model.closed == 1
        opened.set()
        await until_true(lambda: len(model.sessions) == 2 and model.sessions[1].closed)
        assert pool.free_slots == 0

    asyncio.run(main())


def test_a_pool_closes_though_its_sessions_and_its_model_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    async def main(clock: SimulatedClock) -> None:
        for abort, within_s in ((False, 14.0), (True, 1.0)):
            model = FakeModel()
            pool = pool_for(use(monkeypatch, model), ManualClock())
            await pool.open()
            monkeypatch.setattr(model.sessions[0], "close", lambda: never.wait(PATIENCE_S))
            monkeypatch.setattr(model, "close", lambda: never.wait(PATIENCE_S))
            began_ns = clock.now_ns()
            if abort:
                pool.abort()
            await pool.close()
            assert (clock.now_ns() - began_ns) / 1e9 == pytest.approx(within_s)

    run_simulated(main)
    never.set()


def test_a_model_that_closes_badly_is_said_and_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        model = FakeModel()
        model.close_fault = SystemExit(2)
        async with open_pool(use(monkeypatch, model)):
            pass
        assert model.closed == 1

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["m:1/synthetic: the model did not close well: SystemExit: 2"]


def test_giving_up_ends_what_runs_and_nothing_is_run_or_rebuilt_after(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel(mortal=True)
        pool = pool_for(use(monkeypatch, model, sessions=3))
        await pool.open()
        runs = [start(pool, batch_of(1.0)) for _ in range(2)]
        pool.abort()
        assert (pool.available, pool.free_slots, pool.busy) == (False, 0, 0)
        assert not any(ended.done() for ended in runs)  # never from within
        for ended in runs:
            execution = await ended
            assert isinstance(execution.error, BackendUnreachable)
            assert str(execution.error.message) == "m:1/synthetic: the gateway ends before the model has returned"
            assert (execution.session_lost, execution.self_inflicted) == (True, False)
        assert sorted(mortal(session).kills for session in model.sessions) == [0, 1, 1]
        await pool.close()
        assert (model.openings, model.closed) == ([0, 1, 2], 1)
        for session in model.sessions:
            session.end()

    asyncio.run(main())


def test_giving_up_a_rebuild_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        pool = pool_for(use(monkeypatch, model), ManualClock())
        await pool.open()
        model.open_faults = [LoadFailed("not yet")] * 99
        await lose_once(pool, model, SessionLost("gone"))
        await asyncio.sleep(1.0)
        pool.abort()
        tried = len(model.openings)
        await asyncio.sleep(60.0)
        assert len(model.openings) == tried > 1
        await pool.close()

    run_simulated(main)


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_a_close_that_is_cancelled_frees_everything_at_once(isolation: str) -> None:
    async def main() -> None:
        backend = Synthetic.model_validate({"kind": "synthetic", "faults": FAULTS, "isolation": isolation, "sessions": 2})
        pool = pool_for(backend)
        await pool.open()
        ended = start(pool, batch_of(FAULTS["hang"]))
        assert len(children()) == (2 if isolation == "process" else 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.close(), 0.1)
        assert isinstance((await ended).error, BackendUnreachable)
        await until_true(lambda: not children())

    asyncio.run(main())


HANGING = """
import time
from functools import partial
class Hanging:
    inputs = outputs = [("INPUT0", "FP32", (-1, 16))]
    def load(self):
        time.sleep(600)
    def predict(self, inputs):
        return inputs
"""


@pytest.mark.slow
def test_giving_up_ends_a_process_that_hangs_while_it_loads(tmp_path: Path) -> None:
    source = tmp_path / "hanging.py"
    source.write_text(HANGING)

    async def main() -> None:
        pool = pool_for(Python.model_validate({"kind": "python", "model": f"{source}:Hanging", "isolation": "process"}))
        opening = asyncio.ensure_future(pool.open())
        await until_true(children)
        pool.abort()
        with pytest.raises(BackendFailed, match="ended with status -9 while it loaded the model"):
            await asyncio.wait_for(opening, PATIENCE_S)
        assert not children()

    asyncio.run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_an_opening_that_hangs_can_be_given_up(isolation: str, tmp_path: Path) -> None:
    source = tmp_path / "hanging.py"
    source.write_text(HANGING)

    async def main() -> None:
        pool = pool_for(Python.model_validate({"kind": "python", "model": f"{source}:Hanging", "isolation": isolation}))
        opening = asyncio.ensure_future(pool.open())
        await until_true(lambda: isolation == "thread" or children())
        await asyncio.sleep(0.05)
        assert len(children()) == (isolation == "process")
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(opening, PATIENCE_S)
        await until_true(lambda: not children())

    asyncio.run(main())


@pytest.mark.slow
def test_giving_up_ends_a_process_that_hangs_while_it_opens(tmp_path: Path) -> None:
    source = tmp_path / "hanging.py"
    source.write_text(HANGING)

    async def main() -> None:
        pool = pool_for(Python.model_validate({"kind": "python", "model": f"{source}:Hanging", "isolation": "process"}))
        opening = asyncio.ensure_future(pool.open())
        await until_true(children)
        pool.abort()
        with pytest.raises(BackendFailed):
            await asyncio.wait_for(opening, PATIENCE_S)
        assert not children()

    asyncio.run(main())


def test_a_model_that_is_loaded_after_nobody_waits_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        loading, loaded = threading.Event(), threading.Event()

        def load(*_: object) -> Model:
            loading.set()
            assert loaded.wait(PATIENCE_S)
            return model

        backend = use(monkeypatch, model)
        monkeypatch.setattr("gateway.engine.workers.backends.load", load)
        opening = asyncio.ensure_future(pool_for(backend).open())
        assert await asyncio.to_thread(loading.wait, PATIENCE_S)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert model.closed == 0
        loaded.set()
        await until_true(lambda: model.closed)

    asyncio.run(main())


@pytest.mark.parametrize("failing", [1, 2], ids=["of the load", "of a session"])
def test_a_thread_that_cannot_be_started_is_a_failed_load(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    class Thread(threading.Thread):
        made = 0

        def start(self) -> None:
            Thread.made += 1
            if Thread.made == failing:
                raise RuntimeError("can't start new thread")
            super().start()

    async def main() -> None:
        backend = use(monkeypatch, FakeModel())
        monkeypatch.setattr("gateway.engine.threads.threading.Thread", Thread)
        with pytest.raises(BackendFailed, match="failed to load: RuntimeError: can't start new thread"):
            await asyncio.wait_for(pool_for(backend).open(), PATIENCE_S)

    asyncio.run(main())


@pytest.mark.parametrize("where", ["load", "open", "run"])
def test_the_copy_of_a_process_that_a_model_forked_ends(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    copies: list[int] = []

    def fork() -> None:
        copies.append(os.fork())

    class Forking(FakeSession):
        def run(self, *arguments: Any) -> Any:
            if where == "run":
                fork()
            self.end()
            return super().run(*arguments)

    async def main() -> None:
        model = FakeModel()
        model.next_session = Forking
        backend = use(monkeypatch, model)

        def load(*_: object) -> Model:
            if where == "load":
                fork()
            return model

        monkeypatch.setattr("gateway.engine.workers.backends.load", load)
        if where == "open":
            model.on_open = fork
        async with open_pool(backend) as pool:
            assert (await run(pool, batch_of(1.0))).error is None
            (copy,) = copies
            _, status = await asyncio.to_thread(os.waitpid, copy, 0)
            assert os.waitstatus_to_exitcode(status) == 1  # or a gateway that took itself for a copy would seem to end well

    asyncio.run(main())


def test_what_ends_after_the_loop_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()

    async def main() -> None:
        pool = pool_for(use(monkeypatch, model))
        await pool.open()
        start(pool, batch_of(1.0))
        await model.sessions[0].until_running()

    asyncio.run(main())
    thread = model.sessions[0].thread
    model.sessions[0].end()
    thread.join(0.1)
    assert thread.is_alive()  # it waits for the next batch, having told nobody of this one


@pytest.mark.skipif(not large_pages.asked(), reason="this Linux gives large pages to all or to nobody")
@pytest.mark.slow
def test_what_a_model_has_loaded_lies_in_large_pages_once_it_has_settled(tmp_path: Path) -> None:
    source = tmp_path / "heavy.py"
    source.write_text(HEAVY)

    def large_kb() -> int:
        return int(re.findall(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[0])

    async def main() -> None:
        async with open_pool(Python(kind="python", model=f"{source}:Heavy")) as pool:
            before_kb = large_kb()
            await pool.settle()
            assert large_kb() >= before_kb + (32 << 10)  # of 64 MiB: a machine short of memory may not have all
            await pool.settle()  # and no more is asked of it
            assert (await run(pool, batch_of(3.0))).error is None

    asyncio.run(main())
