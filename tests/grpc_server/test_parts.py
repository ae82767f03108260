"""ModelStreamInfer of models that answer in parts, over real sockets."""

import asyncio
import contextlib
import functools
import re
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import hpack
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2 as pb

from gateway.engine.runner import PARTS_AHEAD
from gateway.errors import NotReady
from tests.grpc_server.counting import ENDLESS, WIDTH, closed, goes_on, made
from tests.grpc_server.serving import Served, infer_request, on_loop, serving
from tests.waiting import until_async

pytestmark = pytest.mark.slow

MODELS = """
models:
  - {name: counts, max_rows: 8, backends: [{kind: python, model: "tests.grpc_server.counting:Counts", sessions: 3}]}
  - name: echo
    max_rows: 8
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}]
    backends: [{kind: synthetic, fixed_ms: 0.1, row_ms: 0}]
"""
APART = """
models:
  - name: apart
    max_rows: 8
    backends:
      - kind: python
        model: "tests.grpc_server.counting:Counts"
        isolation: process
        sessions: 1
"""


def asked(key: int) -> None:
    made[key] = 0
    closed[key] = threading.Event()
    goes_on[key] = threading.Event()


def parts_of(
    count: float, key: int = 0, *, model: str = "counts", request_id: str = "", final: bool = False, **parameters: int
) -> pb.ModelInferRequest:
    """final: whether to end with an empty answer."""
    request = infer_request(model, count, request_id=request_id, key=key, **parameters)
    if final:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def told(message: pb.ModelStreamInferResponse) -> str:
    """A part as "id:number", the empty last one as "id:end", an error as "id!"; with a star if it is said to be final."""
    answer = message.infer_response
    if message.error_message:
        return f"{answer.id}!"
    star = "*" if answer.parameters["triton_final_response"].bool_param else ""
    if not answer.raw_output_contents:
        return f"{answer.id}:end{star}"
    return f"{answer.id}:{np.frombuffer(answer.raw_output_contents[0], np.float32)[0]:g}{star}"


async def rest_of(call: Any) -> list[str]:
    """What comes until the call ends, well or not."""
    messages = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(told(message))
    return messages


def busy(served: Served, model: str = "counts") -> int:
    (lane,) = served.repository.model(model).lanes
    return lane.runner.slots - lane.runner.free_slots


def counted(served: Served, name: str, **labels: str) -> float:
    served.repository.metrics.flush()
    _, text = served.repository.metrics.expose()
    found = re.findall(rf"^{name}{{(.*)}} (\S+)$", text.decode(), re.MULTILINE)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(value) for own, value in found if all(want in own for want in wanted))


EACH = pytest.mark.parametrize(("model", "text"), [("counts", MODELS), ("apart", APART)], ids=["threads", "processes"])


@EACH
@on_loop
async def test_parts_have_the_id_come_in_order_and_only_the_empty_last_is_final(model: str, text: str) -> None:
    async with serving(text) as served:
        call = served.stub.ModelStreamInfer()
        await call.write(parts_of(3, model=model, request_id="a", final=True))
        assert [told(await call.read()) for _ in range(4)] == ["a:0", "a:1", "a:2", "a:end*"]
        await call.write(parts_of(2, model=model, request_id="b"))
        await call.write(parts_of(0, model=model, request_id="c", final=True))
        await call.done_writing()
        last = await rest_of(call)
        assert last in (["b:0", "b:1", "c:end*"], ["b:0", "c:end*", "b:1"], ["c:end*", "b:0", "b:1"])
        assert await call.code() is grpc.StatusCode.OK
        assert counted(served, "gateway_requests_total", model=model, code="ok") == 3
        assert counted(served, "gateway_request_duration_seconds_count", model=model) == 3
        assert counted(served, "gateway_part_gap_seconds_count", model=model, protocol="grpc") == 3
        assert counted(served, "gateway_dropped_outputs_total", model=model) == 0


@EACH
@on_loop
async def test_a_last_part_that_says_so_is_final_and_nothing_follows_it(model: str, text: str) -> None:
    async with serving(text) as served:
        call = served.stub.ModelStreamInfer()
        for final in (False, True):
            await call.write(parts_of(3, model=model, request_id="a", final=final, says_last=1))
            assert [told(await call.read()) for _ in range(3)] == ["a:0", "a:1", "a:2*"]
        await call.done_writing()
        assert await rest_of(call) == []


@on_loop
async def test_what_ends_a_request_is_told_as_by_triton() -> None:
    """Its empty end has no version; an error of a request that ran names the model, and says that nothing follows."""
    async with serving(MODELS) as served:
        call = served.stub.ModelStreamInfer()
        await call.write(parts_of(0, request_id="a", final=True))
        end = (await call.read()).infer_response
        assert (end.model_name, end.model_version, end.id) == ("counts", "", "a")
        await call.write(parts_of(3, request_id="b", fails_after=0))
        error = (await call.read()).infer_response
        assert (error.model_name, error.id, error.parameters["triton_final_response"].bool_param) == ("counts", "b", True)
        await call.write(parts_of(3, model="nobody", request_id="c"))
        error = (await call.read()).infer_response
        assert (error.model_name, error.id, len(error.parameters)) == ("", "c", 0)
        await call.done_writing()
        assert await rest_of(call) == []


@on_loop
async def test_requests_of_one_stream_hold_up_each_other_in_nothing() -> None:
    """A stream that waits: neither another's parts, nor its end, nor the answer of a model that gives one."""
    async with serving(MODELS) as served:
        asked(1)
        call = served.stub.ModelStreamInfer()
        await call.write(parts_of(2, 1, request_id="a", final=True, waits=1))
        assert told(await call.read()) == "a:0"
        await call.write(parts_of(3, request_id="b", final=True))
        assert [told(await call.read()) for _ in range(4)] == ["b:0", "b:1", "b:2", "b:end*"]
        await call.write(parts_of(3, request_id="c", fails_after=1))
        assert [told(await call.read()) for _ in range(2)] == ["c:0", "c!"]
        for value in range(3):
            await call.write(infer_request("echo", value, request_id=f"e{value}"))
        assert [told(await call.read()) for _ in range(3)] == ["e0:0*", "e1:1*", "e2:2*"]
        await call.write(infer_request("nobody", request_id="n"))
        assert told(await call.read()) == "n!"
        goes_on[1].set()
        assert [told(await call.read()) for _ in range(2)] == ["a:1", "a:end*"]
        await call.done_writing()
        assert await rest_of(call) == []


@EACH
@on_loop
async def test_an_error_after_parts_is_one_message_and_the_stream_and_the_session_go_on(model: str, text: str) -> None:
    async with serving(text) as served:
        call = served.stub.ModelStreamInfer()
        await call.write(parts_of(5, model=model, request_id="a", final=True, fails_after=2))
        assert [told(await call.read()) for _ in range(2)] == ["a:0", "a:1"]
        error = await call.read()
        assert error.error_message == f"{model}:1/python: ValueError: a bad part"
        assert error.infer_response.id == "a"
        await call.write(parts_of(1, model=model, request_id="b", final=True))
        assert [told(await call.read()) for _ in range(2)] == ["b:0", "b:end*"]
        call.cancel()
        assert counted(served, "gateway_requests_total", model=model, code="backend_failed") == 1


@on_loop
async def test_a_unary_call_of_a_decoupled_model_says_what_to_call() -> None:
    async with serving(MODELS) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.ModelInfer(parts_of(1))
        assert "model 'counts' is decoupled: it answers in parts; ask it by ModelStreamInfer" in str(caught.value.details())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("reads", [True, False], ids=["one that reads", "one that does not"])
@on_loop
async def test_a_client_that_leaves_frees_the_session(reads: bool) -> None:
    async with serving(MODELS) as served:
        asked(2)
        call = served.stub.ModelStreamInfer()
        await call.write(parts_of(ENDLESS, 2))
        for _ in range(100 if reads else 1):
            await call.read()
        call.cancel()
        await until_async(lambda: not busy(served))
        assert closed[2].is_set()
        assert counted(served, "gateway_requests_total", model="counts", code="cancelled") == 1


@on_loop
async def test_the_deadline_of_a_call_ends_its_stream() -> None:
    async with serving(MODELS) as served:
        call = served.stub.ModelStreamInfer(timeout=0.3)
        await call.write(parts_of(ENDLESS))
        assert set(await rest_of(call)) > {":0", ":1"}
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_async(lambda: not busy(served))


@on_loop
async def test_a_call_that_breaks_the_protocol_gives_up_what_it_asked_for() -> None:
    async with serving("server: {limits: {body_bytes: 65536}}\n" + MODELS) as served:
        asked(3)
        call = served.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(parts_of(ENDLESS, 3, waits=1).SerializeToString())
        await call.read()
        await call.write(bytes(100_000))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        goes_on[3].set()
        await until_async(lambda: not busy(served))


@on_loop
async def test_a_slow_reader_holds_a_bounded_number_of_parts_and_the_session_waits() -> None:
    """What HTTP/2's window takes, what the socket takes, and PARTS_AHEAD."""
    async with serving(MODELS) as served:
        asked(4)
        writer = await raw_call(served, parts_of(ENDLESS, 4))
        await until_async(lambda: made[4] > PARTS_AHEAD)
        seen = -1
        while made[4] != seen:
            seen = made[4]
            await asyncio.sleep(0.2)
        window = 65_535 // (4 * WIDTH)
        assert PARTS_AHEAD <= seen <= PARTS_AHEAD + window + 2
        assert busy(served) == 1
        writer.close()
        await until_async(lambda: not busy(served))
        assert closed[4].is_set()


@on_loop
async def test_a_client_that_takes_nothing_for_too_long_gives_its_session_back() -> None:
    async with serving("server: {limits: {body_timeout_s: 0.2}}\n" + MODELS) as served:
        asked(6)
        writer = await raw_call(served, parts_of(ENDLESS, 6))
        await until_async(lambda: closed[6].is_set() and not busy(served))
        writer.close()


async def raw_call(served: Served, message: pb.ModelInferRequest) -> asyncio.StreamWriter:
    """A ModelStreamInfer whose client gives no window but the first."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload

    host, port = served.url.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", served.url),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    data = message.SerializeToString()
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    writer.write(frame(1, 4, 1, hpack.Encoder().encode(headers)) + frame(0, 0, 1, b"\0" + len(data).to_bytes(4) + data))
    await writer.drain()
    return writer


@pytest.mark.parametrize("endless", [False, True])
@on_loop
async def test_a_drain_lets_a_stream_finish_or_ends_it_with_one_error_in_time(endless: bool) -> None:
    async with serving(MODELS) as served:
        asked(5)
        call = served.stub.ModelStreamInfer()
        await call.write(parts_of(ENDLESS if endless else 3, 5, request_id="a", final=True, waits=1))
        assert told(await call.read()) == "a:0"

        def give_up() -> None:
            served.repository.give_up(NotReady("the server is shutting down"))

        began_s = time.monotonic()
        draining = asyncio.ensure_future(served.server.drain(1.5 if endless else 20, give_up))
        await asyncio.sleep(0.05)
        goes_on[5].set()
        messages = await rest_of(call)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await draining
        assert time.monotonic() - began_s < 15
        errors = [message for message in messages if message.endswith("!")]
        if endless:
            assert len(errors) == 1
        else:
            assert messages == ["a:1", "a:2", "a:end*"]
        await until_async(lambda: not busy(served))


@pytest.mark.parametrize("enable_final", [False, True])
def test_tritonclients_decoupled_streams_are_given_as_by_triton(enable_final: bool) -> None:
    """Both its clients, as its own examples of repeat_int32 use them."""

    def inputs() -> list[triton.InferInput]:
        tensor = triton.InferInput("INPUT0", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.full((1, 4), 3, np.float32))
        return [tensor]

    def value(result: Any) -> str:
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        array = result.as_numpy("OUTPUT0")
        return f"{'end' if array is None else f'{array[0, 0]:g}'}{'*' if final else ''}"

    def with_threads(url: str) -> list[str]:
        got: list[str] = []
        last = threading.Event()

        def came(result: Any, error: Exception | None) -> None:
            assert error is None, error
            got.append(value(result))
            if len(got) == 3 + enable_final:
                last.set()

        with triton.InferenceServerClient(url) as client:
            client.start_stream(callback=functools.partial(came))
            client.async_stream_infer("counts", inputs(), enable_empty_final_response=enable_final)
            assert last.wait(20)
            client.stop_stream()
        return got

    async def with_aio(url: str) -> list[str]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "counts", "inputs": inputs()}

        got = []
        async with triton_aio.InferenceServerClient(url) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None, error
                got.append(value(result))
        return got

    @on_loop
    async def main() -> None:
        async with serving(MODELS) as served:
            expected = ["0", "1", "2", *["end*"] * enable_final]
            assert await asyncio.to_thread(with_threads, served.url) == expected
            assert await with_aio(served.url) == ["0", "1", "2"]  # it cannot ask for the end

    main()
