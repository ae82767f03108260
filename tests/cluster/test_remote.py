"""Batches to a real replica, from a runner in this process: each has one end, and its slot comes back."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from gateway.clock import LoopClock
from gateway.cluster.deployments import _content, _deployment_name, _session_dir  # how an ingress names what it calls
from gateway.cluster.remote import RemoteRunner
from gateway.config import Config
from gateway.errors import BackendFailed, BackendUnreachable
from gateway.runner import Execution
from tests.cluster.conftest import APPLICATION, LOOPBACK, Gateway, config
from tests.engine.misbehaving import value_of
from tests.engine.pools import PATIENCE_S, batch_of, start, until, until_true

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .metrics_interval_s. field"),  # deployments._scale
]

MISBEHAVING = {
    "kind": "python",
    "model": f"{Path(__file__).parent.parent / 'engine' / 'misbehaving.py'}:Model",
    "sessions": 2,
    "hang_timeout_s": 1.0,
}


def misbehaving(isolation: str, **backend: Any) -> Config:
    own = {"inputs": [], "outputs": [], "batching": {"probe_s": 0.001}}
    return config(model={**own, "backends": [{**MISBEHAVING, "placement": "replicas", "isolation": isolation, **backend}]})


@asynccontextmanager
async def open_runner(config: Config) -> AsyncIterator[RemoteRunner]:
    model = config.models[0]
    backend = model.backends[0]
    runner = RemoteRunner(
        backend,
        _deployment_name(model, backend),
        APPLICATION,
        content=_content(model, backend),
        name="m:1/python",
        clock=LoopClock(asyncio.get_running_loop()),
        ending=lambda: True,
    )
    await asyncio.wait_for(runner.open(), 30)
    try:
        yield runner
    finally:
        await runner.close()


async def run(runner: RemoteRunner, act: str, **parameters: int) -> Execution:
    batch = batch_of(value_of(act), **parameters)
    return await asyncio.wait_for(start(runner, batch), PATIENCE_S)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_whatever_a_batch_meets_it_has_one_end_and_its_slot_comes_back(cluster: Cluster, isolation: str) -> None:
    document = misbehaving(isolation)
    gateway = Gateway(document)

    async def main() -> None:
        async with open_runner(document) as runner:
            slots = runner.slots
            assert slots >= 1
            await until_true(lambda: "by unix" in repr(runner))
            for value in (10**30, -(1 << 64), 1 << 64):  # more of them than there are slots
                execution = await run(runner, "good", huge=value)
                assert isinstance(execution.error, BackendFailed)
                assert (execution.session_lost, runner.free_slots) == (False, slots)
            for act, words in (("gives another output", "EXTRA"), ("raises 5 MB", "(cut, of")):
                execution = await run(runner, act)
                assert isinstance(execution.error, BackendFailed), act
                assert words in execution.error.message, act
                assert len(execution.error.message) < 3000, act
                assert not execution.session_lost, act
                assert execution.refused == (act == "gives another output")
                assert ("misbehaving.py" in execution.trace) == (act == "raises 5 MB")
            for act, words in (("exits", "SystemExit: 3"), ("hangs", "hang_timeout_s 1")):
                execution = await run(runner, act)
                assert isinstance(execution.error, BackendFailed), act
                assert words in execution.error.message, act
                assert (execution.session_lost, execution.self_inflicted) == (True, True), act
            if isolation == "process":
                execution = await run(runner, "is killed")
                assert isinstance(execution.error, BackendUnreachable)
                assert (execution.session_lost, execution.self_inflicted) == (True, False)
            await until(runner, lambda: runner.free_slots == slots)
            assert (await run(runner, "good")).error is None

    asyncio.run(main())
    answer = gateway.infer("m", [[value_of("raises")] * 16])
    assert answer == (500, {"error": "m:1/python: ValueError: a bad value"})
    until_s = time.monotonic() + PATIENCE_S
    while not ("model m version 1, request id ''" in (text := logged()) and 'misbehaving.py", line ' in text):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def logged() -> str:
    """What Serve's replicas have written to standard error since Ray began."""
    return "".join(path.read_text() for path in (_session_dir() / "logs").glob("worker-*.err"))


def test_giving_up_ends_what_runs_on_replicas_at_once(cluster: Cluster) -> None:
    document = misbehaving("thread")
    Gateway(document)

    async def main() -> None:
        async with open_runner(document) as runner:
            running = start(runner, batch_of(value_of("hangs")))
            await asyncio.sleep(0.1)
            runner.abort()
            execution = await asyncio.wait_for(running, 0.5)
            assert isinstance(execution.error, BackendUnreachable)
            assert not runner.available
        async with open_runner(document) as runner:
            new = start(runner, batch_of(value_of("hangs")))
            runner.abort()  # before the call has begun
            assert isinstance((await asyncio.wait_for(new, 0.5)).error, BackendUnreachable)
        async with open_runner(document) as runner:
            running = start(runner, batch_of(value_of("hangs")))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(runner.close(), 0.1)
            assert isinstance((await asyncio.wait_for(running, 0.5)).error, BackendUnreachable)

    asyncio.run(main())


def test_batches_to_another_node_go_by_tcp_and_by_calls_of_serves_where_that_cannot_be(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20, node_ip_address=LOOPBACK, resources={"far": 2.0})
    far = misbehaving("thread", resources={"far": 1.0}, hang_timeout_s=300.0)

    async def main(document: Config, by: str, pid: int) -> None:
        async with open_runner(document) as runner:
            await until_true(lambda: by in f"{runner!r}{caplog.text}")
            assert (await run(runner, "good")).error is None
            assert isinstance((await run(runner, "gives another output")).error, BackendFailed)
            if by == "by tcp":
                running = start(runner, batch_of(value_of("hangs")))
                await asyncio.sleep(0.05)
                os.kill(pid, signal.SIGKILL)
                execution = await asyncio.wait_for(running, PATIENCE_S)  # long before it would be found to hang
                assert (type(execution.error), execution.session_lost) == (BackendUnreachable, True)

    nowhere = far.model_copy(update={"ray": far.ray.model_copy(update={"channel_host": "192.0.2.1"})})
    for document, by in ((nowhere, "go by Serve's gRPC server"), (far, "by tcp")):
        (pid,) = Gateway(document).pids("m-1-python")
        asyncio.run(main(document, by, pid))
