"""The worker pool where two things meet: what ends late, is told to nobody, or was to be freed. On real threads."""

import asyncio
import logging
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from backends.base import DEADLINE_NS, ExecutionFailed, LoadFailed, Model, SessionLost, SpecMismatch, Tensors
from gateway.errors import BackendFailed, BackendUnreachable, ConfigError
from tests.engine.pools import (
    PATIENCE_S,
    FakeModel,
    FakeSession,
    ManualClock,
    MortalFake,
    batch_of,
    open_pool,
    pool_for,
    run,
    start,
    until_free,
    until_true,
)
from tests.engine.test_workers import lose_once, mortal, use, wait_for_thread_of
from tests.simulation import SimulatedClock, run_simulated


def threads_of_models() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("m:1/")}


# opening


@pytest.mark.parametrize(
    ("fault", "error"),
    [(SpecMismatch("no input 'X'"), ConfigError), (LoadFailed("none left"), BackendFailed), (SystemExit(3), BackendFailed)],
    ids=["mismatch", "failure", "exit"],
)
def test_a_pool_that_cannot_be_opened_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, fault: BaseException, error: type[Exception]
) -> None:
    async def main() -> None:
        model = FakeModel()
        model.open_faults = [None, fault]
        pool = pool_for(use(monkeypatch, model, sessions=3))
        with pytest.raises(error) as failed:
            await pool.open()
        words = {SystemExit: "m:1/synthetic: failed to load: SystemExit: 3", SpecMismatch: "m:1/synthetic: no input 'X'"}
        assert str(failed.value) == words.get(type(fault), "m:1/synthetic: failed to load: none left")
        assert ([session.closed for session in model.sessions], model.closed) == ([1], 1)
        assert (pool.free_slots, model.openings) == (0, [0, 1])

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True], ids=["opens", "fails"])
def test_an_opening_that_is_given_up_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    async def main() -> None:
        before = threads_of_models()
        model = FakeModel()
        opening, opened = threading.Event(), threading.Event()

        def hold() -> None:
            if len(model.openings) == 2:
                opening.set()
                assert opened.wait(PATIENCE_S)

        model.on_open = hold
        model.open_faults = [None, LoadFailed("late")] if fails else []
        pool = pool_for(use(monkeypatch, model, sessions=2))
        task = asyncio.ensure_future(pool.open())
        assert await asyncio.to_thread(opening.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (model.sessions[0].closed, model.closed) == (1, 1)
        opened.set()
        if not fails:
            await until_true(lambda: len(model.sessions) == 2 and model.sessions[1].closed)
        await until_true(lambda: not threads_of_models() - before)
        await asyncio.sleep(0.01)
        assert pool.free_slots == 0

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == []  # not of futures that nobody waits for


@pytest.mark.parametrize("fault", [None, LoadFailed("late"), SystemExit(2)], ids=["loads", "fails", "exits"])
def test_a_load_that_is_given_up_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: BaseException | None
) -> None:
    async def main() -> None:
        before = threads_of_models()
        model = FakeModel()
        loading, loaded = threading.Event(), threading.Event()

        def load(*_: object) -> Model:
            loading.set()
            assert loaded.wait(PATIENCE_S)
            if fault is not None:
                raise fault
            return model

        backend = use(monkeypatch, model)
        monkeypatch.setattr("gateway.engine.workers.backends.load", load)
        task = asyncio.ensure_future(pool_for(backend).open())
        assert await asyncio.to_thread(loading.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loaded.set()
        await until_true(lambda: model.closed or fault)
        await until_true(lambda: not threads_of_models() - before)
        await asyncio.sleep(0.01)
        assert (model.closed, model.openings) == (int(fault is None), [])

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (ExecutionFailed("not now"), "not now"),
        (StopIteration("odd"), "StopIteration: odd"),
        (KeyboardInterrupt("^C"), "KeyboardInterrupt: ^C"),
        (asyncio.CancelledError("no"), "CancelledError: no"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_a_load_raises_is_a_failed_load(monkeypatch: pytest.MonkeyPatch, fault: BaseException, words: str) -> None:
    def load(*_: object) -> Model:
        raise fault

    async def main() -> None:
        backend = use(monkeypatch, FakeModel())
        monkeypatch.setattr("gateway.engine.workers.backends.load", load)
        with pytest.raises(BackendFailed) as failed:
            await pool_for(backend).open()
        assert str(failed.value) == f"m:1/synthetic: failed to load: {words}"

    asyncio.run(main())


def test_no_thread_of_a_model_keeps_the_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        threads: list[threading.Thread] = []
        backend = use(monkeypatch, model)

        def load(*_: object) -> Model:
            threads.append(threading.current_thread())
            return model

        monkeypatch.setattr("gateway.engine.workers.backends.load", load)
        monkeypatch.setattr(model, "close", lambda: threads.append(threading.current_thread()))
        async with open_pool(backend):
            threads.append(model.sessions[0].thread)
        assert [thread.daemon for thread in threads] == [True] * 3
        assert [thread.name for thread in threads] == ["m:1/synthetic load", "m:1/synthetic-0", "m:1/synthetic close"]

    asyncio.run(main())


# running


def test_a_model_is_told_the_parameters_and_the_last_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model)) as pool:
            for deadline_ns, told in ((None, {}), (7, {DEADLINE_NS: 7})):
                batch = batch_of(1.0, depth=3)
                batch.parts[0].request.deadline_ns = deadline_ns
                model.sessions[0].end()
                await run(pool, batch)
                assert model.sessions[0].runs[-1][1] == {"depth": 3} | told
                assert batch.parts[0].request.parameters == {"depth": 3}

    asyncio.run(main())


def test_nothing_of_a_batch_is_held_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[weakref.ref[np.ndarray]] = []

    class Forgetting(FakeSession):
        def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
            outputs = {"OUTPUT0": inputs["INPUT0"].copy()}
            given.extend(weakref.ref(array) for array in (inputs["INPUT0"], outputs["OUTPUT0"]))
            return outputs

    async def main() -> None:
        model = FakeModel()
        model.next_session = Forgetting
        async with open_pool(use(monkeypatch, model)) as pool:
            assert (await run(pool, batch_of(1.0))).error is None
            await until_true(lambda: len(given) == 2 and not any(array() is not None for array in given))
            assert pool.free_slots == 1

    asyncio.run(main())


def test_of_a_fault_so_much_is_given_to_the_log_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model)) as pool:
            model.sessions[0].end(ValueError("x" * 100_000))
            trace = (await run(pool, batch_of(1.0))).trace
            assert trace.startswith("Traceback (most recent call last):\n")
            assert 'pools.py", line ' in trace
            assert trace.endswith("x\n")
            assert len(trace) < 16_100

    asyncio.run(main())


def test_the_watchdog_is_set_for_the_oldest_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        model, clock = FakeModel(), ManualClock()
        async with open_pool(use(monkeypatch, model, sessions=3, hang_timeout_s=10), clock) as pool:
            began_ns = clock.now_ns()
            runs = []
            for _ in range(3):
                runs.append(start(pool, batch_of(1.0)))
                assert [timer.when_ns for timer in clock.timers] == [began_ns + 10_000_000_000]
                clock.advance(2)
            clock.advance(4)
            assert [timer.when_ns for timer in clock.timers] == [began_ns + 12_000_000_000]
            assert (await runs[0]).session_lost
            assert pool.busy == 2
            for session in model.sessions[:3]:
                session.end()
            assert [(await ended).error for ended in runs[1:]] == [None, None]
            await until_free(pool, 3)
            clock.advance(10)
            assert clock.timers == []

    asyncio.run(main())
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert warned == ["m:1/synthetic: session 2 ran for over 10 s and is abandoned"]


# losing and rebuilding


def test_what_becomes_of_a_session_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.engine.workers")

    async def main(clock: SimulatedClock) -> None:
        model = FakeModel(mortal=True)
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            model.open_faults = [LoadFailed("not yet"), LoadFailed("nor now")]
            changes: list[tuple[int, bool]] = []
            changed = asyncio.Event()

            def on_change() -> None:
                changes.append((pool.free_slots, pool.available))
                changed.set()

            pool.on_change = on_change
            mortal(model.sessions[0]).died("process 7 ended with status -9")
            while len(changes) < 4:
                changed.clear()
                await changed.wait()
            assert changes == [(0, True)] * 3 + [(1, True)]
            assert "0 rebuilding" in repr(pool) or "1 rebuilding" in repr(pool)

    run_simulated(main)
    assert [record.getMessage() for record in caplog.records] == [
        "m:1/synthetic: session 0 is lost while idle: process 7 ended with status -9",
        "m:1/synthetic: session 0 could not be rebuilt, next try in 0.2 s: not yet",
        "m:1/synthetic: session 0 could not be rebuilt, next try in 0.4 s: nor now",
        "m:1/synthetic: session 0 is rebuilt",
    ]


def test_three_rebuilds_that_fail_are_too_many_also_of_a_session_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel(mortal=True)
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            model.open_faults = [LoadFailed("not yet")] * 3
            available: list[bool] = []
            changed = asyncio.Event()

            def on_change() -> None:
                available.append(pool.available)
                changed.set()

            pool.on_change = on_change
            mortal(model.sessions[0]).died("process 7 ended with status -9")
            while len(available) < 5:
                changed.clear()
                await changed.wait()
            assert available == [True, True, True, False, True]  # when it is lost, after each try, and when one succeeds

    run_simulated(main)


def test_a_pool_counts_what_it_rebuilds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            await lose_once(pool, model, SessionLost("gone"))
            assert repr(pool) == "<WorkerPool m:1/synthetic: 0 idle, 0 busy, 1 rebuilding>"
            await until_free(pool, 1)
            await asyncio.sleep(0)
            assert repr(pool) == "<WorkerPool m:1/synthetic: 1 idle, 0 busy, 0 rebuilding>"

    run_simulated(main)


def test_one_run_that_succeeds_forgives_what_could_not_be_rebuilt_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model, sessions=2), ManualClock()) as pool:
            model.open_faults = [LoadFailed("not yet")] * 9
            allowed = threading.Semaphore(2)  # openings; the third waits, as simulated time would not wait for the runs here

            def wait() -> None:
                assert allowed.acquire(timeout=PATIENCE_S)

            model.on_open = wait
            told = asyncio.Event()
            available: list[bool] = []

            def on_change() -> None:
                available.append(pool.available)
                told.set()

            async def until_told(times: int) -> None:
                while len(available) < times:
                    told.clear()
                    await told.wait()

            pool.on_change = on_change
            # The one is lost and twice fails to come back, while the other still works.
            for session in model.sessions:
                session.end(SessionLost("gone") if session.index == 0 else None)
            await asyncio.gather(start(pool, batch_of(1.0)), start(pool, batch_of(1.0)))
            await until_told(2)
            other = model.sessions[1]
            other.end()
            assert (await start(pool, batch_of(1.0))).error is None
            # Then the other is lost as well: three more failures until nothing is hoped for.
            other.end(SessionLost("gone"))
            assert (await start(pool, batch_of(1.0))).session_lost
            available.clear()
            for tries in (1, 2, 3):
                allowed.release()
                await until_told(tries)
            assert available == [True, True, False]
            allowed.release(9)

    run_simulated(main)


def test_a_session_that_finished_runs_before_is_rebuilt_at_once_though_it_was_lost_to_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(clock: SimulatedClock) -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model), ManualClock()) as pool:
            for fault in (ExecutionFailed("no"), None):
                model.sessions[-1].end(fault)
                await start(pool, batch_of(1.0))
                began_ns = clock.now_ns()
                assert (await lose_once(pool, model, SessionLost("gone"))).session_lost
                wait_for_thread_of(model.sessions[-1])
                await until_free(pool, 1)
                assert clock.now_ns() == began_ns

    run_simulated(main)


# closing


def test_closing_waits_for_every_session_and_then_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        pool = pool_for(use(monkeypatch, model, sessions=2))
        await pool.open()
        closed: list[str] = []
        let = threading.Event()

        def close_slowly() -> None:
            assert let.wait(PATIENCE_S)
            closed.append("session")

        monkeypatch.setattr(model.sessions[0], "close", close_slowly)
        monkeypatch.setattr(model.sessions[1], "close", lambda: closed.append("session"))
        monkeypatch.setattr(model, "close", lambda: closed.append("model"))
        closing = asyncio.ensure_future(pool.close())
        await until_true(lambda: closed)
        await asyncio.sleep(0.02)
        assert (closed, closing.done(), pool.free_slots) == (["session"], False, 0)
        let.set()
        await closing
        assert closed == ["session", "session", "model"]

    asyncio.run(main())


def test_a_session_that_closes_badly_is_said_and_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def close() -> None:
        raise SystemExit(4)

    async def main() -> None:
        model = FakeModel()
        async with open_pool(use(monkeypatch, model)):
            monkeypatch.setattr(model.sessions[0], "close", close)
        assert model.closed == 1

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "m:1/synthetic-0: its session did not close well: SystemExit: 4"
    ]


def test_a_close_that_is_cancelled_ends_what_runs_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model, clock = FakeModel(mortal=True), ManualClock()
        pool = pool_for(use(monkeypatch, model, sessions=2), clock)
        await pool.open()
        ended = start(pool, batch_of(1.0))
        closing = asyncio.ensure_future(pool.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        execution = await ended
        assert isinstance(execution.error, BackendUnreachable)
        assert (pool.available, pool.free_slots, pool.busy) == (False, 0, 0)
        killed = [session for session in model.sessions if isinstance(session, MortalFake) and session.kills]
        assert len(killed) == 1
        for session in model.sessions:
            session.end()
        await until_true(lambda: [session.closed for session in model.sessions] == [1, 1])
        assert model.openings == [0, 1]

    asyncio.run(main())


def test_what_hangs_while_closing_is_abandoned_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model, clock = FakeModel(mortal=True), ManualClock()
        pool = pool_for(use(monkeypatch, model, hang_timeout_s=10), clock)
        await pool.open()
        ended = start(pool, batch_of(1.0))
        closing = asyncio.ensure_future(pool.close())
        await asyncio.sleep(0)
        clock.advance(10)
        assert (await ended).session_lost
        await closing
        assert (model.openings, model.closed, clock.timers) == ([0], 1, [])
        assert mortal(model.sessions[0]).kills == 1
        model.sessions[0].end()

    asyncio.run(main())


def test_closing_takes_the_watchdog_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model, clock = FakeModel(), ManualClock()
        async with open_pool(use(monkeypatch, model), clock) as pool:
            model.sessions[0].end()
            await run(pool, batch_of(1.0))
            assert len(clock.timers) == 1
        assert clock.timers == []

    asyncio.run(main())


def test_giving_up_twice_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model: Any = FakeModel(mortal=True)
        pool = pool_for(use(monkeypatch, model))
        await pool.open()
        ended = start(pool, batch_of(1.0))
        pool.abort()
        pool.abort()
        assert isinstance((await ended).error, BackendUnreachable)
        await pool.close()
        await pool.close()
        assert model.sessions[0].kills == 1
        model.sessions[0].end()

    asyncio.run(main())
