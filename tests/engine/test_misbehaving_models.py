"""The user's door for models: whatever a class does there, each batch has one clear end, and the pool serves on."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from gateway.batching.batch import Batch
from gateway.config import Python
from gateway.engine.runner import Execution
from gateway.engine.workers import WorkerPool
from gateway.errors import BackendFailed, BackendUnreachable
from tests.engine.misbehaving import value_of
from tests.engine.pools import PATIENCE_S, batch_of, children, open_pool, pool_for, run, until, until_free

MODEL = f"{Path(__file__).parent / 'misbehaving.py'}:Model"


def backend(isolation: str, *, hang_timeout_s: float = 60.0, sessions: int = 1, **class_options: str) -> Python:
    return Python.model_validate(
        {
            "kind": "python",
            "model": MODEL,
            "isolation": isolation,
            "sessions": sessions,
            "hang_timeout_s": hang_timeout_s,
            "class_options": class_options,
        }
    )


def told_to(act: str, rows: int = 2) -> Batch:
    return batch_of(value_of(act), rows)


async def is_well(pool: WorkerPool) -> None:
    await until_free(pool, 1)
    execution = await run(pool, told_to("good"))
    assert execution.error is None, execution.error


BATCH_TO_BLAME = {
    "raises": "ValueError: a bad value",
    "stops iteration": "StopIteration: enough",
    "raises without words": "Unprintable: (its __str__ raised ValueError)",
    "raises 5 MB": "(cut, of 5000012 characters)",
    "raises a surrogate": "ValueError: lone \\ud800 surrogate",
    "returns None": "predict returned None",
    "returns a list": "predict: expected a dict of arrays by output name, got list",
    "misses an output": "output 'TEXT' is missing, the model gave ['OUTPUT0']",
    "gives another output": "the model gave ['EXTRA'] beside its outputs ['OUTPUT0', 'TEXT']",
    "gives another datatype": "output 'OUTPUT0': expected FP32, the model gave int64: return it with .astype(",
    "gives a list": "output 'OUTPUT0': expected an array, the model gave list",
    "gives None": "output 'OUTPUT0': expected an array, the model gave NoneType",
    "gives a row less": "output 'OUTPUT0': expected shape [-1, 16] with 2 rows, the model gave shape [1, 16]",
    "gives a row more": "output 'OUTPUT0': expected shape [-1, 16] with 2 rows, the model gave shape [4, 16]",
    "gives a scalar": "output 'OUTPUT0': expected shape [-1, 16] with 2 rows, the model gave shape []",
    "gives another width": "output 'OUTPUT0': expected shape [-1, 16] with 2 rows, the model gave shape [2, 15]",
    "gives another dimension": "output 'OUTPUT0': expected shape [-1, 16] with 2 rows, the model gave shape [2, 16, 1]",
    "gives ints as text": "output 'TEXT': expected bytes or str in BYTES, the model gave int",
    "gives None as text": "output 'TEXT': expected bytes or str in BYTES, the model gave NoneType",
    "gives a list as text": "output 'TEXT': expected bytes or str in BYTES, the model gave list",
    "gives a surrogate as text": "output 'TEXT': an element is text that has no UTF-8",
}


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_what_a_batch_is_to_blame_for_is_said_and_costs_no_session(isolation: str) -> None:
    async def main() -> None:
        async with open_pool(backend(isolation)) as pool:
            for act, words in BATCH_TO_BLAME.items():
                execution = await run(pool, told_to(act))
                assert isinstance(execution.error, BackendFailed), act
                assert words in execution.error.message, act
                assert len(execution.error.message) < 2500, act
                assert (execution.session_lost, execution.self_inflicted, pool.free_slots) == (False, False, 1), act
                raised = act.startswith("raises") or act == "stops iteration"
                assert ("misbehaving.py" in execution.trace) == raised, act
                assert execution.refused == (not raised and act != "gives a surrogate as text"), act
                await is_well(pool)

    asyncio.run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_what_only_looks_bad_is_served(isolation: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with open_pool(backend(isolation)) as pool:
            for act in (
                "gives text as str",
                "gives float64",
                "prints 10 MB",
                *(["forks", "leaves a child"] if isolation == "process" else []),
            ):
                execution = await run(pool, told_to(act))
                assert execution.error is None, act
                assert execution.outputs is not None
                assert execution.outputs["OUTPUT0"].tolist() == [[value_of(act)] * 16] * 2
                await is_well(pool)

    asyncio.run(main())
    printed = capfd.readouterr()
    if isolation == "process":  # standard output is the gateway's own, for programs that read it
        assert (len(printed.out), len(printed.err)) == (0, 10 << 20)


class Lost(NamedTuple):
    words: str
    own: bool = True


SESSION_LOST = {
    "exits": Lost("SystemExit: 3"),
    "is interrupted": Lost("KeyboardInterrupt"),
    "is cancelled": Lost("CancelledError"),
    "ends a generator": Lost("GeneratorExit: over"),
    "runs out of memory": Lost("MemoryError: no more"),
}
PROCESS_LOST = {
    "exits at once": Lost("ended with status 4"),
    "leaves a child and crashes": Lost("ended with status 5"),
    "eats memory": Lost("Memory"),
    "crashes": Lost("ended with status -11"),
    "closes all files": Lost("of the session"),
    "answers a size of nothing": Lost("answered no frame"),
    "answers garbage": Lost("answered no frame"),
    "is killed": Lost("ended with status -9", own=False),
    "is terminated": Lost("ended with status -15", own=False),
}


def check_lost(execution: Execution, act: str, expected: Lost) -> None:
    assert execution.session_lost, act
    assert (execution.self_inflicted, execution.begun) == (expected.own, True), act
    assert isinstance(execution.error, BackendFailed if expected.own else BackendUnreachable), act
    assert expected.words in execution.error.message, act


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_what_ends_a_session_is_said_and_the_session_is_rebuilt(isolation: str) -> None:
    async def main() -> None:
        async with open_pool(backend(isolation)) as pool:
            for act, expected in (SESSION_LOST | (PROCESS_LOST if isolation == "process" else {})).items():
                execution = await run(pool, told_to(act))
                check_lost(execution, act, expected)
                await is_well(pool)

    asyncio.run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_a_hang_ends_its_session_and_no_other(isolation: str) -> None:
    async def main() -> None:
        async with open_pool(backend(isolation, hang_timeout_s=1.0, sessions=2)) as pool:
            hanging = asyncio.ensure_future(run(pool, told_to("hangs")))
            await asyncio.sleep(0)
            while not hanging.done():
                assert (await run(pool, told_to("good"))).error is None
            execution = await hanging
            assert (execution.session_lost, execution.self_inflicted) == (True, True)
            assert "hang_timeout_s 1" in str(execution.error)
            await until_free(pool, 2)

    asyncio.run(main())


AT_LOAD = {
    "raises": "ValueError: a bad value",
    "raises 5 MB": "(cut, of 5000012 characters)",
    "raises without words": "Unprintable: (its __str__ raised ValueError)",
    "stops iteration": "StopIteration: enough",
    "exits": "SystemExit: 3",
    "is interrupted": "KeyboardInterrupt",
    "is cancelled": "CancelledError",
    "ends a generator": "GeneratorExit: over",
    "runs out of memory": "MemoryError: no more",
}
AT_LOAD_OF_A_PROCESS = {
    "exits at once": "ended with status 4 while it loaded the model",
    "crashes": "ended with status -11 while it loaded the model",
}


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_whatever_ends_a_load_fails_it_with_its_words(isolation: str) -> None:
    async def main() -> None:
        for act, words in (AT_LOAD | (AT_LOAD_OF_A_PROCESS if isolation == "process" else {})).items():
            pool = pool_for(backend(isolation, at_load=act))
            with pytest.raises(BackendFailed) as failed:
                await asyncio.wait_for(pool.open(), PATIENCE_S)
            assert failed.value.message.startswith("m:1/python: failed to load: "), act
            assert words in failed.value.message, act
            assert len(failed.value.message) < 2500, act
            assert not children(), act

    asyncio.run(main())


MODULE_THAT_EXITS = "import sys\nsys.exit('not today')\n"


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.slow
def test_a_file_that_exits_when_it_is_imported_is_a_failed_load(isolation: str, tmp_path: Path) -> None:
    file = tmp_path / "exits.py"
    file.write_text(MODULE_THAT_EXITS)

    async def main() -> None:
        pool = pool_for(Python.model_validate({"kind": "python", "model": f"{file}:Model", "isolation": isolation}))
        with pytest.raises(BackendFailed, match="SystemExit: not today"):
            await asyncio.wait_for(pool.open(), PATIENCE_S)

    asyncio.run(main())


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("act", ["raises", "exits", "stops iteration"])
@pytest.mark.slow
def test_a_session_that_closes_badly_is_closed_all_the_same(isolation: str, act: str) -> None:
    async def main() -> None:
        async with open_pool(backend(isolation, at_close=act)) as pool:
            await is_well(pool)
        assert not children()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.slow
def test_integers_that_no_frame_holds_fail_their_batch_alone() -> None:
    async def main() -> None:
        async with open_pool(backend("process")) as pool:
            for value in (1 << 64, -(1 << 64), 10**30):
                execution = await run(pool, batch_of(value_of("good"), 1, huge=value))
                assert isinstance(execution.error, BackendFailed)
                assert not execution.session_lost
                await is_well(pool)

    asyncio.run(main())


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all end soon. A zombie has ended: nobody here reaps what the model started."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        if all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
def test_what_the_model_started_ends_with_its_session() -> None:
    async def main() -> None:
        async with open_pool(backend("process")) as pool:
            for act in ("leaves a child", "leaves a child and crashes"):
                await is_well(pool)
                (child,) = children()
                await run(pool, told_to("leaves a child"))
                started = descendants(child.pid)
                assert len(started) == 1
                if act != "leaves a child":
                    await run(pool, told_to(act))
                if act == "leaves a child":
                    os.kill(child.pid, signal.SIGKILL)
                    await until(pool, lambda: pool.free_slots == 0)
                assert gone(started), act
                await is_well(pool)
            (child,) = children()
            await run(pool, told_to("leaves a child"))
            started = descendants(child.pid)
        assert gone([child, *started])

    asyncio.run(main())
