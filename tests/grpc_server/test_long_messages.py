"""Messages that take long to parse, decoded in a process of their own."""

import asyncio

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.grpc_server.serving import Served, on_loop, serving
from tests.varint import varint

pytestmark = pytest.mark.slow

MODELS = """
models:
  - name: wide
    max_rows: 0
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
  - name: words
    max_rows: 0
    inputs: [{name: INPUT0, datatype: BYTES, shape: [-1]}]
    outputs: [{name: OUTPUT0, datatype: BYTES, shape: [-1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
  - name: ints
    max_rows: 0
    inputs: [{name: INPUT0, datatype: INT32, shape: [-1]}]
    outputs: [{name: OUTPUT0, datatype: INT32, shape: [-1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
"""
MANY = 200_000


def wide(count: int = MANY, declared: int | None = None) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="wide", id="seven")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[count if declared is None else declared])
    tensor.contents.fp32_contents.extend(range(count))
    return request


def words(count: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="words", raw_input_contents=[b"\1\0\0\0x" * count])
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[count])
    return request


async def failure(served: Served, data: bytes) -> grpc.aio.AioRpcError:
    """data: a message as it goes on the wire."""
    call = served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(data, timeout=20)
    return caught.value


@on_loop
async def test_long_typed_contents_are_answered() -> None:
    async with serving(MODELS) as served:
        response = await served.stub.ModelInfer(wide(), timeout=20)
        assert response.id == "seven"
        np.testing.assert_array_equal(np.frombuffer(response.raw_output_contents[0], np.float32), np.arange(MANY))

        async def requests() -> object:
            yield wide()
            yield wide(4)

        ids = [reply.infer_response.id async for reply in served.stub.ModelStreamInfer(requests(), timeout=20)]
        assert ids == ["seven", "seven"]


@on_loop
async def test_many_elements_of_text_are_answered_up_to_a_limit() -> None:
    async with serving(MODELS) as served:
        response = await served.stub.ModelInfer(words(MANY), timeout=20)
        assert response.raw_output_contents[0] == b"\1\0\0\0x" * MANY
        refused = await failure(served, words((1 << 18) + 1).SerializeToString())
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.details() == "input 'INPUT0': 262145 BYTES elements, expected at most 262144 in one tensor"


@on_loop
async def test_a_long_message_is_refused_in_the_words_of_a_short_one() -> None:
    async with serving(MODELS) as served:
        refused = await failure(served, wide(declared=7).SerializeToString())
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.details() == f"input 'INPUT0': got {MANY} elements, expected 7 for FP32 [7]"
        cut = await failure(served, wide().SerializeToString()[:-1])
        assert cut.details() == "the request is no inference.ModelInferRequest"


@pytest.mark.parametrize(
    ("bomb", "words"),
    [
        (b"\x0a\x04wide" + b"\x2a\x00" * 4_000_000, "more than 4096"),
        (b"\x0a\x04wide" + b"\x3a\x00" * 4_000_000, "more than 4096"),
        (b"\x0a\x04wide" + b"\x22\x00" * 4_000_000, "more than 4096"),
        (b"\x1a\x80\x80\x80\x02" + b"a" * (4 << 20), "4194309 bytes beside the tensors"),
        (b"\x08\x01" * 4_000_000, "more than 4096"),
        (b"\xff" * 4_000_000, "is no inference.ModelInferRequest"),
    ],
    ids=["inputs", "raw", "parameters", "id", "numbers", "noise"],
)
@on_loop
async def test_a_message_of_millions_of_fields_is_refused_before_it_is_parsed(bomb: bytes, words: str) -> None:
    async with serving(MODELS) as served:
        refused = await failure(served, bomb)
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in str(refused.details())


@on_loop
async def test_others_are_answered_while_a_long_message_is_decoded() -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="INT32", shape=[1])
    contents = b"\x12" + varint(16_000_000) + b"\1" * 16_000_000  # int_contents, packed
    inner = tensor.SerializeToString() + b"\x2a" + varint(len(contents)) + contents
    bomb = b"\x0a\x04ints\x2a" + varint(len(inner)) + inner
    async with serving(MODELS) as served:
        had = set(psutil.Process().children())
        bombing = asyncio.ensure_future(failure(served, bomb))
        while not (decoding := set(psutil.Process().children()) - had):
            assert not bombing.done()
            await asyncio.sleep(0.01)
        for child in decoding:
            child.suspend()
        try:
            await served.stub.ModelInfer(wide(4), timeout=20)
        finally:
            for child in decoding:
                child.resume()
        assert (await bombing).details() == "input 'INPUT0': got 16000000 elements, expected 1 for INT32 [1]"
