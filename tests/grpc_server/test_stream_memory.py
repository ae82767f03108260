"""Long messages of a stream: they count until they are answered, and wait, or end the stream, where too much is held."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from gateway.config import Limits
from gateway.edges.grpc_server import GrpcServer
from gateway.wire.memory import Memory
from tests.grpc_server.serving import on_loop, serving

MODELS = """
models:
  - name: slow
    max_rows: 0
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1]}]
    backends: [{kind: synthetic, fixed_ms: 20, row_ms: 0}]
  - name: slower
    max_rows: 0
    batching: {probe_s: 0}
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1]}]
    backends: [{kind: synthetic, fixed_ms: 200, row_ms: 0}]
"""
COUNT = 50_000  # elements: 200 kB


@asynccontextmanager
async def listening(memory: Memory) -> AsyncIterator[str]:
    """The address of a listener that has so much memory, and takes messages of 1 MiB."""
    async with serving(MODELS) as served:
        server = GrpcServer(served.repository, Limits(body_bytes=1 << 20), memory)
        port = await server.start("127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.drain(0.1)


def messages(model: str, count: int, elements: int = COUNT) -> Iterator[pb.ModelInferRequest]:
    for number in range(count):
        request = pb.ModelInferRequest(model_name=model, id=str(number), raw_input_contents=[bytes(4 * elements)])
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[elements])
        yield request


@on_loop
async def test_they_wait_for_those_that_run() -> None:
    memory = Memory()
    async with listening(memory) as address, grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        ids, most_bytes = [], 0
        async for reply in stub.ModelStreamInfer(messages("slow", 30), timeout=20):
            ids.append(reply.infer_response.id)
            most_bytes = max(most_bytes, memory.granted_bytes)
        assert ids == [str(number) for number in range(30)]
        # Of 6 MB, three times each: at most the window of the stream, and as much as two messages that run.
        assert most_bytes < 3 * 4 << 20


@on_loop
async def test_what_is_whole_is_answered_before_a_stream_that_holds_too_much_ends() -> None:
    ids: list[str] = []

    def ask(address: str) -> grpc.RpcError:
        # Not by grpc.aio: where the stream ends while it sends, it may tell that it could not send, and not why.
        with grpc.insecure_channel(address) as channel:
            replies = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(messages("slower", 30), timeout=20)
            with pytest.raises(grpc.RpcError) as caught:
                ids.extend(reply.infer_response.id for reply in replies)
        return caught.value

    async with listening(Memory(1 << 20)) as address:
        told = await asyncio.to_thread(ask, address)
    assert told.code() is grpc.StatusCode.UNAVAILABLE
    assert "server.limits.memory_bytes" in str(told.details())
    assert ("retry-after", "1") in [tuple(pair) for pair in told.trailing_metadata() or ()]
    assert ids == [str(number) for number in range(len(ids))]
    assert 0 < len(ids) < 30


@on_loop
async def test_a_long_message_that_finds_no_memory_is_refused_and_a_short_one_taken() -> None:
    async with listening(Memory(512 << 10)) as address, grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (long,) = messages("slow", 1, 200_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(long, timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        short = pb.ModelInferRequest(model_name="slow", id="x", raw_input_contents=[bytes(16)])
        short.inputs.add(name="INPUT0", datatype="FP32", shape=[4])
        assert (await stub.ModelInfer(short, timeout=20)).id == "x"
