"""Parts of ModelStreamInfer that take long to encode: they come in their order, and hold up nobody but those behind them."""

from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.protocols.grpc import GrpcCodec
from gateway.wire.tensors import tensor_from_bytes
from tests.grpc_server.serving import Served, infer_request, on_loop, serving
from tests.long_parts import LONG, HeldEncoder
from tests.waiting import until_async

pytestmark = pytest.mark.slow

MODELS = """
models:
  - {name: mixed, max_rows: 0, backends: [{kind: python, model: "tests.long_parts:Mixed", sessions: 2}]}
  - name: echo
    max_rows: 8
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}]
    backends: [{kind: synthetic, fixed_ms: 0.1, row_ms: 0}]
"""


def asked(counts: list[int], request_id: str = "", **parameters: int) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="counts", datatype="INT32", shape=[len(counts)])
    request = pb.ModelInferRequest(
        model_name="mixed",
        id=request_id,
        inputs=[tensor],
        raw_input_contents=[np.array(counts, np.int32).tobytes()],
        parameters={key: pb.InferParameter(int64_param=given) for key, given in parameters.items()},
    )
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def told(message: pb.ModelStreamInferResponse) -> str:
    """Id, number and length of a part; "end" and "!" in their place."""
    answer = message.infer_response
    if message.error_message:
        return f"{answer.id}!"
    if not answer.outputs:
        return f"{answer.id} end"
    (output,), (raw,) = answer.outputs, answer.raw_output_contents
    texts = tensor_from_bytes(output.name, output.datatype, tuple(output.shape), raw)
    return f"{answer.id} {int(texts[0])} {len(texts)}"


async def read(call: Any, count: int) -> list[str]:
    return [told(await call.read()) for _ in range(count)]


def busy(served: Served) -> int:
    (lane,) = served.repository.model("mixed").lanes
    return lane.runner.slots - lane.runner.free_slots


@on_loop
async def test_long_and_short_parts_come_in_their_order_and_an_error_behind_them() -> None:
    async with serving(MODELS) as served:
        call = served.stub.ModelStreamInfer()
        counts = [1, LONG, 2, LONG, LONG, 1]
        await call.write(asked(counts, "a"))
        await call.write(asked(counts, "b", fails=1))
        came = await read(call, 2 * len(counts) + 2)
        parts = [f"{number} {count}" for number, count in enumerate(counts)]
        assert [each for each in came if each[0] == "a"] == [*(f"a {part}" for part in parts), "a end"]
        assert [each for each in came if each[0] == "b"] == [*(f"b {part}" for part in parts), "b!"]
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


def test_a_part_that_takes_long_holds_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldEncoder(monkeypatch, GrpcCodec)

    @on_loop
    async def main() -> None:
        async with serving(MODELS) as served:
            call = served.stub.ModelStreamInfer()
            await call.write(asked([1, LONG, 1], "a"))
            assert await read(call, 1) == ["a 0 1"]
            await until_async(held.begun.is_set)
            await until_async(lambda: not busy(served))  # its end is known, too
            await served.stub.ModelInfer(infer_request("echo"), timeout=20)
            await call.write(asked([1], "b"))  # of the same stream
            assert await read(call, 2) == ["b 0 1", "b end"]
            assert not held.waited
            held.goes_on.set()
            assert await read(call, 3) == [f"a 1 {LONG}", "a 2 1", "a end"]
            assert held.waited == [True]
            call.cancel()

    main()


@pytest.mark.parametrize("parts", [1, 100])
def test_a_client_that_leaves_while_a_part_is_encoded_frees_the_session(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldEncoder(monkeypatch, GrpcCodec)

    @on_loop
    async def main() -> None:
        async with serving(MODELS) as served:
            call = served.stub.ModelStreamInfer()
            await call.write(asked([LONG] * parts))
            await until_async(held.begun.is_set)
            if parts == 1:
                await until_async(lambda: not busy(served))  # the model has ended before
            call.cancel()
            await until_async(lambda: not busy(served) and not served.server._streams)
            held.goes_on.set()
            call = served.stub.ModelStreamInfer()
            await call.write(asked([1, LONG]))
            assert await read(call, 3) == [" 0 1", f" 1 {LONG}", " end"]
            call.cancel()

    main()
