"""Loads and unloads over gRPC, whose clients go away or meet what nobody expected."""

import asyncio
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.engine.metric_blocks import Key
from tests.grpc_server.serving import Breaks, Served, failure, infer_request, on_loop, serving
from tests.waiting import until_async

pytestmark = pytest.mark.slow

SLOW = """
server: {model_control: true, state_dir: STATE}
models:
  - name: m
    load_at_start: false
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}]
    backends: [{kind: synthetic, fixed_ms: 400, load_ms: 400}]
    batching: {probe_s: 0}
"""


def load(served: Served, **options: float) -> grpc.aio.Call:
    return served.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), **options)


def unload(served: Served, **options: float) -> grpc.aio.Call:
    return served.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m"), **options)


def state(served: Served) -> str:
    return str(served.repository.index()[0]["state"])


async def until(served: Served, wanted: str) -> None:
    await until_async(lambda: state(served) == wanted)


@on_loop
async def test_a_load_or_unload_goes_on_without_its_client() -> None:
    async with serving(SLOW.replace(", state_dir: STATE", "")) as served:
        late = await failure(load(served, timeout=0.1))
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(served, "READY")
        answer = served.stub.ModelInfer(infer_request("m"))
        await until_async(lambda: served.repository.pending)
        call = unload(served)
        await until(served, "UNLOADING")
        call.cancel()
        await answer
        await until(served, "UNAVAILABLE")
        await load(served)
        assert state(served) == "READY"


@on_loop
async def test_abandoned_loads_are_one_load() -> None:
    async with serving(SLOW.replace(", state_dir: STATE", "")) as served:
        generation = served.repository.generation
        calls = [load(served) for _ in range(20)]
        await until(served, "LOADING")
        for call in calls:
            call.cancel()
        await until(served, "READY")
        await unload(served)
        assert served.repository.generation == generation + 2


@pytest.mark.parametrize("fault", [RuntimeError, OSError, asyncio.CancelledError])
def test_whatever_a_change_raises_is_one_answer(fault: type[BaseException]) -> None:
    @on_loop
    async def run() -> None:
        async with serving(SLOW.replace(", state_dir: STATE", ""), control=Breaks(fault)) as served:
            for call in (load(served, timeout=5), unload(served, timeout=5)):
                told = await failure(call)
                assert told.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)

    run()


@on_loop
async def test_an_unload_that_cannot_keep_what_was_learned_succeeds(tmp_path: Path) -> None:
    async with serving(SLOW.replace("STATE", str(tmp_path / "state"))) as served:
        await load(served)
        (tmp_path / "state").rmdir()
        await unload(served, timeout=5)
        assert state(served) == "UNAVAILABLE"


@on_loop
async def test_a_request_that_repeats_is_no_longer_known_when_its_model_is_unloaded_or_loaded_anew() -> None:
    async with serving(SLOW.replace(", state_dir: STATE", "").replace("fixed_ms: 400, load_ms: 400", "fixed_ms: 0")) as served:
        await load(served)
        for _ in range(3):
            await served.stub.ModelInfer(infer_request("m"))
        await unload(served)
        gone = await failure(served.stub.ModelInfer(infer_request("m")))
        assert gone.code() is grpc.StatusCode.UNAVAILABLE
        await load(served)
        for _ in range(3):
            answer = await served.stub.ModelInfer(infer_request("m"))
            assert answer.raw_output_contents


@on_loop
async def test_what_a_model_that_is_not_ready_refuses_is_counted_under_its_name() -> None:
    async with serving() as served:
        assert (await failure(served.stub.ModelInfer(infer_request("later")))).code() is grpc.StatusCode.UNAVAILABLE
        (answer,) = [each async for each in served.stub.ModelStreamInfer(iter([infer_request("later")]))]
        assert "no available versions" in answer.error_message
        states = await served.repository.metrics.counted()
        assert states[Key("edge", ("later", "1", "grpc"))][0]["not_ready"] == 2
        assert not any(states[Key("edge", ("", "", "grpc"))][0].values())
