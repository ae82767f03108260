"""The worker pool on real threads and processes, with the synthetic backend's faults."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from backends.base import Model, ModelSpec, RunCancelled, SpecMismatch, Tensors
from gateway.batching.batch import Batch, Part
from gateway.clock import LoopClock
from gateway.config import Backend, Python, Synthetic
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, ConfigError
from gateway.runner import Execution
from gateway.types import InferRequest
from gateway.workers import WorkerPool

FAULTS = {"fail": 101.0, "lose": 102.0, "hang": 103.0, "exit": 104.0, "short": 105.0}


def batch_of(value: float, rows: int = 1) -> Batch:
    inputs = {"INPUT0": np.full((rows, 16), value, np.float32)}
    request = InferRequest("m", "1", "", inputs, rows, time.monotonic_ns())
    part = Part(request, 0, rows)
    return Batch([part], rows=rows, padded_rows=rows, reason="full", closed_ns=time.monotonic_ns(), oldest_ns=0)


def pool_of(**options: object) -> AbstractAsyncContextManager[WorkerPool]:
    return open_pool(Synthetic.model_validate({"kind": "synthetic", "fixed_ms": 0, "row_ms": 0, "faults": FAULTS, **options}))


@asynccontextmanager
async def open_pool(backend: Backend) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(
        backend, ModelSpec("", (), (), 8), name=f"m:1/{backend.label}", clock=LoopClock(asyncio.get_running_loop())
    )
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


async def run(pool: WorkerPool, batch: Batch) -> Execution:
    done: asyncio.Future[Execution] = asyncio.get_running_loop().create_future()
    pool.start(batch, lambda _, execution: done.set_result(execution))
    return await asyncio.wait_for(done, 10)


async def until_free(pool: WorkerPool, slots: int) -> None:
    changed = asyncio.Event()
    pool.on_change = changed.set
    while pool.free_slots < slots:
        changed.clear()
        await asyncio.wait_for(changed.wait(), 10)


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
            assert isinstance(execution.error, BackendUnreachable)
            assert execution.session_lost
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
            (child,) = [child for child in psutil.Process().children() if "gateway.session_process" in child.cmdline()]
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
        deadline = parameters.get("gateway.deadline_ns", 0)
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
                batch = Batch(parts, rows=2, padded_rows=2, reason="full", closed_ns=time.monotonic_ns(), oldest_ns=0)
                execution = await run(pool, batch)
                assert execution.outputs is not None
                assert execution.outputs["DEADLINE"].tolist() == [[told]] * 2

    asyncio.run(main())


class _CancellableModel:
    """One session, whose run only ends when it is cancelled, the second time if `late`."""

    spec = ModelSpec("", (), (), 8)

    def __init__(self, *, late: bool) -> None:
        self._ignored = int(late)
        self._ended = threading.Event()

    def open_session(self, index: int) -> "_CancellableModel":
        return self

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        assert self._ended.wait(10)
        self._ended.clear()
        raise RunCancelled("cancelled")

    def cancel(self) -> None:
        if self._ignored:
            self._ignored -= 1
        else:
            self._ended.set()

    def close(self) -> None: ...


@pytest.mark.parametrize("late", [False, True], ids=["running", "not yet running"])
def test_a_cancelled_batch_frees_its_session(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    async def main() -> None:
        monkeypatch.setattr("gateway.workers.backends.load", lambda *_: _CancellableModel(late=late))
        async with pool_of() as pool:
            for _ in range(2):
                batch = batch_of(1.0)
                run_it = asyncio.ensure_future(run(pool, batch))
                await asyncio.sleep(0)
                pool.cancel(batch)
                execution = await run_it
                assert isinstance(execution.error, Cancelled)
                assert not execution.session_lost
                assert pool.free_slots == 1
                pool.cancel(batch)  # it has ended: the next is left alone

    asyncio.run(main())


def test_a_model_that_is_not_as_declared_is_a_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> Model:
        raise SpecMismatch("input 'X': the model has none of that name")

    async def main() -> None:
        monkeypatch.setattr("gateway.workers.backends.load", load)
        with pytest.raises(ConfigError, match="none of that name"):
            async with pool_of():
                pass

    asyncio.run(main())


def test_a_session_that_cannot_cancel_finishes() -> None:
    async def main() -> None:
        async with pool_of(fixed_ms=20) as pool:
            batch = batch_of(1.0)
            run_it = asyncio.ensure_future(run(pool, batch))
            await asyncio.sleep(0)
            pool.cancel(batch)
            assert (await run_it).error is None

    asyncio.run(main())
