"""The raw gRPC client against grpc's own server, and against the null server."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from loadtest.load import nullserver
from loadtest.measuring.generator import measure
from loadtest.measuring.progress import Progress
from loadtest.results import LoadSpec, RunResult, SloSpec

pytestmark = pytest.mark.slow

SPEC = LoadSpec(
    "",
    protocol="grpc",
    model="m",
    pattern="constant",
    rate_rps=100,
    duration_s=0.5,
    timeout_s=2,
    warmup_s=0.0,
    slo=SloSpec.parse("p99<200ms"),
)

Answer = Callable[[pb.ModelInferRequest, grpc.aio.ServicerContext], Awaitable[None]]


class Servicer(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated without types
    def __init__(self, answer: Answer | None, width: int) -> None:
        self._answer = answer
        self._width = width
        self.requests: list[pb.ModelInferRequest] = []
        self.metadata: list[list[tuple[str, str | bytes]]] = []

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        response = pb.ModelMetadataResponse(name="m")
        response.inputs.add(name="x", datatype="FP32", shape=[-1, self._width])
        return response

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        return pb.RepositoryIndexResponse(models=[{"name": "m", "state": "READY"}])

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        count = len(self.requests)
        response = pb.ModelStatisticsResponse()
        model = response.model_stats.add(name="m", inference_count=2 * count, execution_count=count)
        model.inference_stats.success.count = count
        model.inference_stats.queue.ns = 3_000_000 * count
        return response

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.metadata.append([tuple(each) for each in context.invocation_metadata()])
        if self._answer:
            await self._answer(request, context)
        response = pb.ModelInferResponse(model_name="m")
        response.raw_output_contents.append(bytes(4 * self._width))
        return response


@asynccontextmanager
async def serve(servicer: Servicer, host: str = "127.0.0.1") -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
    add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(None)


def run(spec: LoadSpec = SPEC, answer: Answer | None = None, *, width: int = 4) -> tuple[RunResult, Servicer]:
    async def scenario() -> tuple[RunResult, Servicer]:
        servicer = Servicer(answer, width)
        async with serve(servicer) as (_, port):
            return await measure(replace(spec, target=f"127.0.0.1:{port}")), servicer

    return uvloop.run(scenario())


def test_calls_are_answered_and_carry_what_was_asked() -> None:
    headers = (("X-Tenant", "a" * 200), ("X-A-Bin", "aGk=,aG8"), ("b-bin", "/+8"), ("User-Agent", "mine"))
    result, servicer = run(replace(SPEC, rows="3", headers=headers))
    assert (result.succeeded, result.errors) == (50, {})
    request = servicer.requests[0]
    assert (request.model_name, list(request.inputs[0].shape)) == ("m", [3, 4])
    assert len(request.raw_input_contents[0]) == 3 * 4 * 4
    sent = [("x-tenant", "a" * 200), ("x-a-bin", b"hi"), ("x-a-bin", b"ho"), ("b-bin", b"\xff\xef"), ("user-agent", "mine")]
    assert [sorted(each) for each in servicer.metadata] == [sorted(sent)] * 50
    assert result.server is not None
    assert result.server.queue_ms == pytest.approx(3)


def test_a_server_is_asked_by_its_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def scenario() -> RunResult:
        async with serve(Servicer(None, 4), "[::1]") as (_, port):
            return await measure(replace(SPEC, target=f"[::1]:{port}"))

    assert uvloop.run(scenario()).succeeded == 50


def test_messages_larger_than_the_windows_arrive_whole() -> None:
    result, servicer = run(replace(SPEC, rate_rps=40), width=250_000)  # 1 MB each way; the first windows have 64 KiB
    assert (result.succeeded, result.errors) == (20, {})
    assert {len(request.raw_input_contents[0]) for request in servicer.requests} == {1_000_000}


def test_an_error_is_counted_by_its_code_with_its_message() -> None:
    async def shed(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "queue full: 100 % ü")

    result, _ = run(answer=shed)
    assert result.errors == {"grpc UNAVAILABLE": 50}
    assert result.error_samples["grpc UNAVAILABLE"] == "queue full: 100 % ü"


def test_calls_that_are_never_answered_time_out_and_are_cancelled() -> None:
    cancelled: list[bool] = []

    async def hush(request: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    result, _ = run(replace(SPEC, timeout_s=0.3), hush)
    assert result.errors == {"timeout": 50}
    assert len(cancelled) >= 40


def test_a_server_that_stops_fails_what_is_open_and_refuses_the_rest() -> None:
    async def scenario() -> RunResult:
        servicer = Servicer(None, 4)
        async with serve(servicer) as (server, port):
            stopping: list[asyncio.Task[None]] = []

            async def stop_at_the_20th(request: Any, context: Any) -> None:
                if len(servicer.requests) == 20:
                    stopping.append(asyncio.create_task(server.stop(None)))
                await asyncio.sleep(0.01)

            servicer._answer = stop_at_the_20th
            result = await measure(replace(SPEC, target=f"127.0.0.1:{port}"))
            await asyncio.gather(*stopping)
            return result

    result = uvloop.run(scenario())
    assert result.requests == 50
    assert 10 <= result.succeeded <= 30
    assert result.verdict == ("fail" if result.valid else None)  # invalid where the machine was busy
    assert set(result.errors) <= {"reset", "refused", "grpc UNAVAILABLE", "grpc CANCELLED", "grpc UNKNOWN"}


def test_a_grpc_server_that_is_down_refuses_everything() -> None:
    payload = str(Path(__file__).parent / "payload.json")

    async def scenario() -> RunResult:
        return await measure(replace(SPEC, target="127.0.0.1:1", payloads=(payload,)))

    result = uvloop.run(scenario())
    assert result.errors == {"refused": 50}


def test_stopping_excuses_no_server_that_hangs() -> None:
    async def never(request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> None:
        await asyncio.Event().wait()

    async def scenario() -> RunResult:
        stop = asyncio.Event()

        def once_it_hangs(progress: Progress) -> None:
            if progress.elapsed_s > 1:
                stop.set()

        async with serve(Servicer(never, 4)) as (_, port):
            spec = replace(SPEC, target=f"127.0.0.1:{port}", duration_s=30, timeout_s=10)
            return await measure(spec, stop=stop, on_progress=once_it_hangs)

    result = uvloop.run(scenario())
    assert (result.partial, result.succeeded, result.failed) == (True, 0, 0)
    assert result.requests == result.overdue > 50  # of 100/s, for at least 0.8 s
    assert [objective.attainment.estimate for objective in result.objectives] == [0]


def test_a_server_that_speaks_http_1_gives_no_answers() -> None:
    payload = str(Path(__file__).parent / "payload.json")

    async def scenario() -> RunResult:
        async with await nullserver.start_http() as server:
            port = server.sockets[0].getsockname()[1]
            return await measure(replace(SPEC, target=f"127.0.0.1:{port}", payloads=(payload,), timeout_s=0.3))

    assert uvloop.run(scenario()).succeeded == 0


def test_the_null_server_answers_grpcs_own_client_and_ours() -> None:
    async def scenario() -> RunResult:
        async with await nullserver.start_grpc() as server:
            port = server.sockets[0].getsockname()[1]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.unary_unary(
                    "/inference.GRPCInferenceService/ModelInfer",
                    pb.ModelInferRequest.SerializeToString,
                    pb.ModelInferResponse.FromString,
                )
                for _ in range(3):
                    assert (await call(pb.ModelInferRequest(model_name="null"))).model_name == "null"
            return await measure(replace(SPEC, model="null", target=f"127.0.0.1:{port}"))

    assert uvloop.run(scenario()).succeeded == 50
