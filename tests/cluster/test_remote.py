"""Batches to a real replica, from a runner in this process: each has one end, and its slot comes back."""

import asyncio
import functools
import gc
import os
import signal
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from ray.cluster_utils import Cluster
from ray.serve._private.common import DeploymentTargetInfo
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from backends.base import Tensors
from backends.early_failure import EarlyFailure
from gateway.batching.batch import Batch
from gateway.clock import LoopClock
from gateway.cluster.deployments import _content, _deployment_names, _key  # how an ingress names what it calls
from gateway.cluster.remote import Link, RemoteRunner, _execution, _Run
from gateway.cluster.run_dirs import _session_dir
from gateway.config import Config, ModelSection
from gateway.engine.runner import PARTS_AHEAD, Execution
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled
from gateway.wire.frames import encode_frame
from tests import waiting
from tests.cluster.conftest import APPLICATION, NODE, Gateway, config
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


STREAMING = {"kind": "python", "model": f"{Path(__file__).parent / 'streaming.py'}:Model", "placement": "replicas"}


@functools.cache
def streaming() -> Config:
    """What several tests deploy one after the other, which changes nothing then."""
    own = {"inputs": [], "outputs": [], "batching": {"probe_s": 0.001}}
    return config(model={**own, "backends": [{**STREAMING, "sessions": 10, "replicas": 2}]})


def misbehaving(isolation: str, **backend: Any) -> Config:
    own = {"inputs": [], "outputs": [], "batching": {"probe_s": 0.001}}
    return config(model={**own, "backends": [{**MISBEHAVING, "placement": "replicas", "isolation": isolation, **backend}]})


@asynccontextmanager
async def open_runner(config: Config, index: int = 0) -> AsyncIterator[RemoteRunner]:
    model = config.models[index]
    backend = model.backends[0]
    runner = RemoteRunner(
        backend,
        _deployment_names(config)[_key(model, backend)],
        APPLICATION,
        content=_content(model, backend),
        name=f"{model.name}:1/python",
        clock=LoopClock(asyncio.get_running_loop()),
        ending=lambda: True,
    )
    await asyncio.wait_for(runner.open(), 30)
    await has_slots(runner)
    try:
        yield runner
    finally:
        await runner.close()


async def has_slots(runner: RemoteRunner) -> None:
    """Wait until every replica has a slot for us, which the gateway's own ingress, that has nothing to do, has else."""

    def ready() -> bool:
        runner.want()
        return all(link.slots for link in runner._links.values())

    await until_true(ready)


async def run(runner: RemoteRunner, act: str, **parameters: int) -> Execution:
    batch = batch_of(value_of(act), **parameters)
    return await asyncio.wait_for(start(runner, batch), PATIENCE_S)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_whatever_a_batch_meets_it_has_one_end_and_its_slot_comes_back(cluster: Cluster, isolation: str) -> None:
    document = misbehaving(isolation)
    gateway = Gateway(document)

    async def main() -> None:
        async with open_runner(document) as runner:
            await until_true(lambda: "by unix" in repr(runner))
            for value in (10**30, -(1 << 64), 1 << 64):  # more of them than there are slots
                execution = await run(runner, "good", huge=value)
                assert isinstance(execution.error, BackendFailed)
                assert (execution.session_lost, runner.free_slots) == (False, runner.slots)
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
            await until(runner, lambda: runner.free_slots == runner.slots > 0)
            gc.collect()
            gc.disable()  # an answer is freed with whoever reads it last: large ones are memory of the replica's
            try:
                execution = await run(runner, "good")
                assert execution.outputs is not None
                output = weakref.ref(next(iter(execution.outputs.values())))
                del execution
                await asyncio.sleep(0.05)
                assert output() is None
            finally:
                gc.enable()

    asyncio.run(main())
    answer = gateway.infer("m", [[value_of("raises")] * 16])
    assert answer == (500, {"error": "m:1/python: ValueError: a bad value"})
    said = ("model m version 1, request id '", 'misbehaving.py", line ')
    waiting.until(lambda: all(each in logged() for each in said), every_s=0.05)


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


def in_parts(**backend: Any) -> ModelSection:
    return config(model={"name": "parts", "inputs": [], "outputs": [], "backends": [{**STREAMING, **backend}]}).models[0]


class Stream:
    """A batch that is answered in parts. Fails where it ends twice, or a part comes behind its end."""

    def __init__(self, runner: RemoteRunner, value: float = 0.0, *, takes: bool = True, **parameters: Any) -> None:
        """takes: each part at once."""
        self.runner = runner
        self.batch = batch_of(value, **parameters)
        self.parts: list[float] = []
        self.first_ns = 0
        self.ended: asyncio.Future[Execution] = asyncio.get_running_loop().create_future()
        self._takes = takes
        runner.start(self.batch, self._ended, self._part)

    def _part(self, batch: Batch, outputs: Tensors) -> None:
        assert batch is self.batch
        assert not self.ended.done()
        self.first_ns = self.first_ns or time.monotonic_ns()
        self.parts.append(float(outputs["OUTPUT0"][0, 0]))
        if self._takes:
            self.runner.taken(batch)

    def _ended(self, batch: Batch, execution: Execution) -> None:
        assert batch is self.batch
        self.ended.set_result(execution)

    async def end(self) -> Execution:
        return await asyncio.wait_for(self.ended, PATIENCE_S)


def test_a_runner_gets_the_parts_of_an_answer_in_order_and_no_more_than_its_client_takes(cluster: Cluster) -> None:
    document = streaming()
    Gateway(document)

    async def main() -> None:
        async with open_runner(document) as runner:
            await until_true(lambda: repr(runner).count("by unix") == 2)
            assert runner._spec is not None
            assert runner._spec.decoupled
            streams = [Stream(runner, 100.0 * number, parts=30) for number in range(8)]
            for number, stream in enumerate(streams):
                execution = await stream.end()
                assert (execution.error, execution.outputs) == (None, None)
                assert stream.parts == [100.0 * number + index for index in range(30)]
            stream = Stream(runner, parts=PARTS_AHEAD + 2, takes=False)
            await until_true(lambda: len(stream.parts) == PARTS_AHEAD)
            await asyncio.sleep(0.1)
            assert len(stream.parts) == PARTS_AHEAD
            for _ in range(3):  # the last of them for the end
                runner.taken(stream.batch)
            execution = await stream.end()
            assert len(stream.parts) == PARTS_AHEAD + 2
            assert execution.first_part_ns is not None
            assert execution.started_ns < execution.first_part_ns <= stream.first_ns
            assert execution.finished_ns - execution.first_part_ns > 100_000_000
            runner.taken(stream.batch)  # too late
            failed = Stream(runner, parts=2, then="raises")
            execution = await failed.end()
            assert isinstance(execution.error, BackendFailed)
            assert (len(failed.parts), execution.session_lost) == (2, False)
            for when in ("before it is sent", "while it waits for its client"):
                stream = Stream(runner, parts=10**6, takes=False)
                if when == "while it waits for its client":
                    await until_true(lambda stream=stream: len(stream.parts) == PARTS_AHEAD)
                runner.cancel(stream.batch)
                assert isinstance((await stream.end()).error, Cancelled), when
            for link in runner._links.values():
                assert link._channel is not None
                link._channel.abort()  # while nothing runs there
            await until(runner, lambda: runner.free_slots == 0)
            await until(runner, lambda: repr(runner).count(": up, ") == 2)
            assert repr(runner).count("by unix") == 2
            await has_slots(runner)
            streams = [Stream(runner, parts=60, pause_ms=5) for _ in range(4)]
            await until_true(lambda: all(stream.parts for stream in streams))
            *others, leaving = runner._links.values()
            assert leaving.busy  # Serve means to end that one, and lists it no more
            runner._targets_changed(DeploymentTargetInfo(is_available=True, running_replicas=[link.replica for link in others]))
            assert leaving not in runner._links.values()
            for stream in streams:
                assert ((await stream.end()).error, len(stream.parts)) == (None, 60)
            assert runner.free_slots == runner.slots  # which follow what each ingress does

    asyncio.run(main())


class Client:
    """Streams of a gateway's, over gRPC."""

    def __init__(self, port: int) -> None:
        # It takes no more ahead of its reader the faster its connection is: how much the sockets hold is the same everywhere.
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.http2.bdp_probe", 0)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    def stream(self, value: float = 0.0, **parameters: int | str) -> Any:
        """The call, whose one request is sent."""
        message = pb.ModelInferRequest(model_name="m", raw_input_contents=[np.full((1, 16), value, np.float32).tobytes()])
        message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
        for name, given in parameters.items():
            choice = "string_param" if isinstance(given, str) else "int64_param"
            setattr(message.parameters[name], choice, given)
        return self._stub.ModelStreamInfer(iter([message]))


def value_in(reply: pb.ModelStreamInferResponse, output: int = 0) -> Any:
    assert not reply.error_message
    datatype = np.int64 if output else np.float32
    return np.frombuffer(reply.infer_response.raw_output_contents[output], datatype)[0].item()


async def values(call: Any) -> list[float]:
    return [value_in(reply) async for reply in call]


def test_streams_through_replicas_are_each_ones_own_and_a_client_that_leaves_or_is_slow_holds_little(
    cluster: Cluster, tmp_path: Path
) -> None:
    port = Gateway(streaming()).grpc_port

    async def main() -> None:
        async with Client(port) as client:
            calls = [client.stream(1000.0 * number, parts=20, pause_ms=5) for number in range(16)]
            for number, found in enumerate(await asyncio.gather(*map(values, calls))):
                assert found == [1000.0 * number + index for index in range(20)]

            left = tmp_path / "left"
            call = client.stream(parts=10**6, pause_ms=20, marks=str(left))
            await call.read()
            call.cancel()
            await until_true(lambda: left.read_bytes().endswith(b"|"))

            slow = tmp_path / "slow"
            call = client.stream(parts=10**6, rows=1 << 14, marks=str(slow))  # of 1 MB
            await call.read()
            await until_true(lambda: len(slow.read_bytes()) >= PARTS_AHEAD)
            await asyncio.sleep(0.5)
            assert len(slow.read_bytes()) < PARTS_AHEAD + 8  # those that sockets hold are taken
            for _ in range(20):
                value_in(await call.read())
            call.cancel()
            await until_true(lambda: slow.read_bytes().endswith(b"|"))

    asyncio.run(main())


def test_a_replica_that_is_killed_ends_each_of_its_streams_with_one_error_and_no_other(cluster: Cluster) -> None:
    port = Gateway(streaming()).grpc_port

    async def main() -> None:
        async with Client(port) as client:
            calls = [client.stream(parts=10**6, pause_ms=20) for _ in range(8)]
            pids = [value_in(await call.read(), 1) for call in calls]
            assert len(set(pids)) == 2
            os.kill(pids[0], signal.SIGKILL)
            for call, pid in zip(calls, pids, strict=True):
                if pid != pids[0]:
                    before = value_in(await call.read())
                    assert value_in(await call.read()) == before + 1
                    call.cancel()
                    continue
                replies = []
                while (reply := await call.read()) is not grpc.aio.EOF:
                    replies.append(reply)
                errors = [reply.error_message for reply in replies if reply.error_message]
                assert errors == [replies[-1].error_message]
                assert "m:1/python: replica" in errors[0]
            assert await values(client.stream(parts=4)) == [0, 1, 2, 3]

    asyncio.run(main())


def test_batches_to_another_node_go_by_tcp_and_by_calls_of_serves_where_that_cannot_be(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_node(num_cpus=4, **NODE, resources={"far": 4.0})
    far = misbehaving("thread", resources={"far": 1.0}, hang_timeout_s=300.0)
    far = far.model_copy(update={"models": (*far.models, in_parts(resources={"far": 1.0}))})

    async def main(document: Config, by: str, pid: int) -> None:
        async with open_runner(document, 1) as runner:
            stream = Stream(runner)
            error = (await stream.end()).error
            if by == "by tcp":
                assert (error, stream.parts) == (None, [0, 1, 2])
            else:
                assert isinstance(error, BackendUnreachable)
                assert "its model answers in parts, which need a channel to it, and none can be opened: " in error.message
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


def test_the_first_part_is_never_told_to_be_made_after_it_was_here() -> None:
    # The way back took 9 ms, and the way there 1.
    about = {"waited_ns": 0, "computed_ns": 20_000_000, "first_part_ns": 0, "last": True}
    run = _Run(batch_of(1.0), print, print, Link, sent_ns=0, first_part_ns=3_000_000)  # type: ignore[arg-type]
    execution = _execution(run, b"".join(encode_frame({}, about)), 30_000_000)
    assert (execution.started_ns, execution.finished_ns) == (3_000_000, 23_000_000)
    assert execution.first_part_ns == 3_000_000


def test_a_failure_that_is_told_early_is_no_part_of_the_answer() -> None:
    told: list[Tensors] = []
    run = _Run(batch_of(1.0), print, lambda batch, outputs: told.append(outputs), Link, sent_ns=0)  # type: ignore[arg-type]
    for outputs in (early := EarlyFailure(Cancelled("no"))), {}, (late := EarlyFailure(Cancelled("no"))):
        run.part(outputs, 5_000_000)
    assert (early.first_part_ns, late.first_part_ns, run.first_part_ns) == (None, 5_000_000, 5_000_000)
    assert len(told) == 3
