"""ModelInfer and ModelStreamInfer over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from gateway.config import Limits
from gateway.edges.grpc_server import GrpcServer
from tests.grpc_server.serving import LONG, MODELS, SLOW, Served, failure, infer_request, on_loop, serving
from tests.waiting import until_async

pytestmark = pytest.mark.slow


def first_value(response: pb.ModelInferResponse) -> float:
    return float(np.frombuffer(response.raw_output_contents[0], np.float32)[0])


async def is_unharmed(served: Served) -> bool:
    response = await served.stub.ModelInfer(infer_request(value=3), timeout=5)
    return first_value(response) == 3


async def until_pending(served: Served, count: int) -> None:
    await until_async(lambda: served.repository.pending == count, every_s=0.001)


@on_loop
async def test_a_request_is_answered_with_its_model_version_and_id() -> None:
    async with serving() as served:
        response = await served.stub.ModelInfer(infer_request(value=7, rows=2, request_id="abc"))
        assert (response.model_name, response.model_version, response.id) == ("echo", "1", "abc")
        assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [("OUTPUT0", "FP32", [2, 4])]
        assert first_value(response) == 7


@on_loop
async def test_errors_have_their_status_and_text() -> None:
    async with serving() as served:
        unknown = await failure(served.stub.ModelInfer(infer_request("nobody")))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND
        assert unknown.details() == "Request for unknown model: 'nobody' is not found; models here: 'echo', 'later'"
        missing = await failure(served.stub.ModelInfer(pb.ModelInferRequest(model_name="echo")))
        assert missing.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "expected 1 inputs but got 0 inputs for model 'echo'" in str(missing.details())
        unready = await failure(served.stub.ModelInfer(infer_request("later")))
        assert unready.code() is grpc.StatusCode.UNAVAILABLE
        broken = await failure(served.stub.ModelInfer(infer_request(value=666)))
        assert broken.code() is grpc.StatusCode.INTERNAL
        assert await is_unharmed(served)


@on_loop
async def test_a_full_queue_is_unavailable() -> None:
    async with serving(SLOW) as served:
        calls = [served.stub.ModelInfer(infer_request("slow")) for _ in range(12)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        codes = [outcome.code() for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
        assert codes
        assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
        assert len(codes) < 12


@on_loop
async def test_a_cancelled_call_leaves_the_queue() -> None:
    async with serving(SLOW) as served:
        running = served.stub.ModelInfer(infer_request("hangs", value=77))
        await until_pending(served, 1)
        waiting = served.stub.ModelInfer(infer_request("hangs"))
        await until_pending(served, 2)
        waiting.cancel()
        await until_pending(served, 1)
        running.cancel()
        await until_pending(served, 0)


@on_loop
async def test_a_client_that_disconnects_takes_its_requests_out_of_the_queue() -> None:
    async with serving(SLOW) as served:
        channel = grpc.aio.insecure_channel(served.url, options=[("grpc.use_local_subchannel_pool", 1)])
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        calls = [asyncio.ensure_future(infer(infer_request("hangs", value=77).SerializeToString())) for _ in range(2)]
        await stream.write(infer_request("hangs", value=77).SerializeToString())
        await until_pending(served, 3)
        await channel.close()
        await until_pending(served, 0)
        await asyncio.gather(*calls, return_exceptions=True)
        assert await is_unharmed(served)


@on_loop
async def test_the_deadline_of_the_call_reaches_the_queue() -> None:
    async with serving(SLOW) as served:
        busy = served.stub.ModelInfer(infer_request("hangs", value=77))
        await until_pending(served, 1)
        late = await failure(served.stub.ModelInfer(infer_request("hangs"), timeout=0.05))
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_pending(served, 1)
        busy.cancel()
        await until_pending(served, 0)


@on_loop
async def test_the_timeout_parameter_is_a_deadline() -> None:
    async with serving(SLOW.replace("fixed_ms: 200", "fixed_ms: 600")) as served:
        busy = served.stub.ModelInfer(infer_request("slow"))
        await until_pending(served, 1)
        late = await failure(served.stub.ModelInfer(infer_request("slow", timeout=20_000)))
        assert late.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        assert not busy.done()  # long before what is ahead of it is over
        await busy


@pytest.mark.parametrize("known", [True, False], ids=["of what is known", "before the first batch"])
@on_loop
async def test_an_overload_carries_a_retry_hint_in_its_trailers(known: bool) -> None:
    async with serving(SLOW.replace("fixed_ms: 200", "fixed_ms: 20")) as served:
        if known:  # what an execution takes
            for _ in range(3):
                await served.stub.ModelInfer(infer_request("slow"))
        calls = [served.stub.ModelInfer(infer_request("slow")) for _ in range(12)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        overloads = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
        hints = [dict(error.trailing_metadata()).get("grpc-retry-pushback-ms") for error in overloads]
        assert overloads
        assert all(hint is not None and int(hint) >= 1 for hint in hints)


@on_loop
async def test_compressed_requests_are_read() -> None:
    async with serving() as served:
        for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            response = await served.stub.ModelInfer(infer_request(value=7, rows=8), compression=algorithm)
            assert first_value(response) == 7


# streams


@on_loop
async def test_a_stream_answers_in_order_and_goes_on_after_errors() -> None:
    requests = [
        infer_request(value=1, request_id="1"),
        infer_request("nobody", request_id="2"),
        infer_request("slow", value=3, request_id="3"),
        infer_request(value=666, request_id="4"),
        infer_request(value=5, request_id="5"),
    ]
    async with serving(SLOW) as served:
        answers = [answer async for answer in served.stub.ModelStreamInfer(iter(requests))]
    assert [answer.infer_response.id for answer in answers] == ["1", "2", "3", "4", "5"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, False, True, False]
    assert answers[1].error_message.startswith("Request for unknown model: 'nobody' is not found; models here: 'echo', 'later'")
    assert [first_value(answers[i].infer_response) for i in (0, 2, 4)] == [1, 3, 5]
    assert all(answers[i].infer_response.parameters["triton_final_response"].bool_param for i in (0, 2, 4))


@on_loop
async def test_requests_of_one_stream_run_together() -> None:
    async with serving(SLOW.replace("max_rows: 1\n    batching: {max_queue_rows: 3, probe_s: 0}", "max_rows: 8")) as served:
        started = monotonic()
        answers = [answer async for answer in served.stub.ModelStreamInfer(iter([infer_request("slow")] * 8))]
        assert len(answers) == 8
        assert monotonic() - started < 0.9  # one after the other takes 8 × 0.2 s


@on_loop
async def test_a_stream_of_more_than_may_be_in_flight_is_answered_whole() -> None:
    async with serving() as served:
        requests = [infer_request(value=i, request_id=str(i)) for i in range(500)]
        answers = [answer async for answer in served.stub.ModelStreamInfer(iter(requests))]
        assert [first_value(answer.infer_response) for answer in answers] == list(range(500))


@on_loop
async def test_an_answer_comes_while_the_stream_is_open() -> None:
    async with serving() as served:
        stream = served.stub.ModelStreamInfer()
        for value in (1, 2):
            await stream.write(infer_request(value=value))
            assert first_value((await stream.read()).infer_response) == value
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


@on_loop
async def test_a_cancelled_stream_leaves_the_queue() -> None:
    async with serving(SLOW) as served:
        stream = served.stub.ModelStreamInfer()
        for _ in range(3):
            await stream.write(infer_request("hangs", value=77))
        await until_pending(served, 3)
        stream.cancel()
        await until_pending(served, 0)
        assert await is_unharmed(served)


@on_loop
async def test_an_empty_stream_ends() -> None:
    async def nothing() -> AsyncIterator[pb.ModelInferRequest]:
        return
        yield

    async with serving() as served:
        assert [answer async for answer in served.stub.ModelStreamInfer(nothing())] == []


# bad input on the wire


@on_loop
async def test_what_is_no_message_is_refused_and_does_no_harm() -> None:
    async with serving() as served:
        infer = served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        refused = await failure(infer(b"\xff" * 100))
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.details() == "the request is no inference.ModelInferRequest"
        stream = served.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([b"\xff" * 100]))
        answer = pb.ModelStreamInferResponse.FromString(await asyncio.wait_for(stream.read(), 5))
        assert answer.error_message == "the request is no inference.ModelInferRequest"
        assert await is_unharmed(served)


@on_loop
async def test_garbage_on_the_port_does_no_harm() -> None:
    async with serving() as served:
        host, port = served.url.split(":")
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000, preface + b"\xff" * 1000, preface[:10], b""):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 10)
            writer.close()
        assert await is_unharmed(served)


@on_loop
async def test_a_message_over_the_limit_is_refused() -> None:
    async with serving(f"server: {{limits: {{body_bytes: 1000}}}}\n{MODELS}") as served:
        large = await failure(served.stub.ModelInfer(infer_request(rows=1000)))
        assert large.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "expected at most 1000 (server.limits.body_bytes)" in str(large.details())
        assert await is_unharmed(served)


@on_loop
async def test_too_much_metadata_is_refused() -> None:
    async with serving() as served:
        refused = await failure(served.stub.ModelInfer(infer_request(), metadata=[("x-long", "x" * 100_000)]))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "server.limits.header_bytes" in str(refused.details())
        assert await is_unharmed(served)


@on_loop
async def test_idle_connections_do_not_stop_the_others() -> None:
    async with serving() as served:
        host, port = served.url.split(":")
        idle = []
        for _ in range(200):
            connection = socket.socket()
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
            idle.append(connection)
        assert await is_unharmed(served)
        for connection in idle:
            connection.close()


# coming and going


@on_loop
async def test_a_drain_answers_what_is_in_flight() -> None:
    async with serving(SLOW) as served:
        calls = [served.stub.ModelInfer(infer_request("slow", value=value)) for value in (1, 2)]
        await until_pending(served, 2)
        await served.server.drain(5)
        assert [first_value(await call) for call in calls] == [1, 2]


@on_loop
async def test_no_call_is_lost_to_a_drain_under_load() -> None:
    async with serving() as served, serving() as successor:
        answered = 0
        refusals = set()

        async def calls(client: Served) -> None:
            nonlocal answered
            stub = client.stub
            for _ in range(150):
                try:
                    await stub.ModelInfer(infer_request())
                except grpc.aio.AioRpcError as exc:
                    refusals.add(exc.code())
                    stub = successor.stub
                    await stub.ModelInfer(infer_request())
                answered += 1

        clients = [asyncio.ensure_future(calls(served)) for _ in range(8)]
        await until_async(lambda: answered >= 100, every_s=0.001)
        await served.server.drain(5)
        await asyncio.gather(*clients)
        assert answered == 8 * 150
        assert refusals <= {grpc.StatusCode.UNAVAILABLE}


@on_loop
async def test_a_drain_ends_open_streams_after_their_last_answer() -> None:
    async with serving(SLOW) as served:
        stream = served.stub.ModelStreamInfer()
        await stream.write(infer_request("slow", value=1))
        await until_pending(served, 1)
        draining = asyncio.ensure_future(served.server.drain(5))
        assert first_value((await stream.read()).infer_response) == 1
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await draining


@on_loop
async def test_a_stream_whose_client_has_asked_all_ends_well_in_a_drain() -> None:
    async with serving(SLOW) as served:
        stream = served.stub.ModelStreamInfer(iter([infer_request("slow", value=1)]))
        await until_pending(served, 1)
        draining = asyncio.ensure_future(served.server.drain(5))
        assert [first_value(message.infer_response) async for message in stream] == [1]
        assert await stream.code() is grpc.StatusCode.OK
        await draining


@on_loop
async def test_a_drain_ends_in_time_with_a_model_that_hangs() -> None:
    async with serving(SLOW) as served:
        call = served.stub.ModelInfer(infer_request("hangs", value=77))
        await until_pending(served, 1)
        started = monotonic()
        await served.server.drain(0.1)
        assert monotonic() - started < 3
        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "the server is shutting down"


@on_loop
async def test_a_port_that_is_taken_is_an_os_error() -> None:
    async with serving() as served:
        port = int(served.url.rsplit(":", 1)[1])
        with pytest.raises(OSError, match="Address already in use"):
            await GrpcServer(served.repository, Limits()).start("127.0.0.1", port)


@on_loop
async def test_requests_are_counted_by_code() -> None:
    async with serving() as served:
        await served.stub.ModelInfer(infer_request())
        await failure(served.stub.ModelInfer(infer_request("nobody")))
        await failure(served.stub.ModelInfer(pb.ModelInferRequest(model_name="echo")))
        [_ async for _ in served.stub.ModelStreamInfer(iter([infer_request(), infer_request(value=666)]))]
        text = served.repository.metrics.expose()[1].decode()
        counts = {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("gateway_requests_total")
        }
        labels = '{code="%s",model="%s",protocol="grpc",version="%s"}'
        assert counts["gateway_requests_total" + labels % ("ok", "echo", "1")] == 2
        assert counts["gateway_requests_total" + labels % ("not_found", "", "")] == 1
        assert counts["gateway_requests_total" + labels % ("invalid_argument", "echo", "1")] == 1
        assert counts["gateway_requests_total" + labels % ("backend_failed", "echo", "1")] == 1


@asynccontextmanager
async def eager_stream(served: Served) -> AsyncIterator[Any]:
    """A stream of a client that takes megabytes at once, so that no answer waits for its window."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 64 << 20), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(served.url, options=options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()


@on_loop
async def test_hundreds_of_answers_behind_a_slow_one_are_sent_one_by_one() -> None:
    """Each of over 16 KiB tells its stream that it has left: that must not send the next from within."""
    async with serving(LONG) as served, eager_stream(served) as call:
        await call.write(infer_request("long", value=1, request_id="slow", sleep_ms=300))
        for index in range(400):
            await call.write(infer_request("long", value=2, request_id=str(index)))
        await call.done_writing()
        answers = [answer async for answer in call]
        assert [answer.infer_response.id for answer in answers] == ["slow", *map(str, range(400))]
        assert all(len(answer.infer_response.raw_output_contents[0]) > 20_000 for answer in answers)
        assert served.repository.pending == 0


@on_loop
async def test_hundreds_of_errors_behind_a_slow_answer_are_sent_one_by_one() -> None:
    async with serving(LONG) as served, eager_stream(served) as call:
        others = served.stub.ModelInfer(infer_request("long", value=1, sleep_ms=300))
        await call.write(infer_request("long", value=1, request_id="slow", sleep_ms=300))
        for index in range(400):
            await call.write(infer_request("nobody" * 4000, request_id=str(index)))
        await call.done_writing()
        answers = [answer async for answer in call]
        assert [answer.infer_response.id for answer in answers] == ["slow", *map(str, range(400))]
        assert all("Request for unknown model: 'nobody" in answer.error_message for answer in answers[1:])
        assert first_value(await others) == 0


@on_loop
async def test_the_text_of_an_error_is_cut_whatever_a_model_says() -> None:
    async with serving(LONG) as served:
        error = await failure(served.stub.ModelInfer(infer_request("long", value=3)))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "ä" * 100 in str(error.details())
        call = served.stub.ModelStreamInfer()
        await call.write(infer_request("long", value=3))
        await call.write(infer_request("long", value=4))
        await call.done_writing()
        answers = [answer.error_message async for answer in call]
        assert all(0 < len(answer) < 3000 for answer in answers)


@on_loop
async def test_a_deadline_that_passes_while_the_model_runs_is_told_then() -> None:
    async with serving(SLOW) as served:
        late = await failure(served.stub.ModelInfer(infer_request("slow", timeout=50_000)))
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "still running at the deadline" in str(late.details())


@on_loop
async def test_in_a_stream_such_a_deadline_ends_its_own_request() -> None:
    async with serving(SLOW) as served:
        call = served.stub.ModelStreamInfer()
        await call.write(infer_request("slow", timeout=50_000))
        await call.write(infer_request("echo", value=5))
        await call.done_writing()
        late, answer = [answer async for answer in call]
        assert "still running at the deadline" in late.error_message
        assert first_value(answer.infer_response) == 5
