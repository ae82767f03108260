"""Every RPC through tritonclient, unchanged: grpc.aio on the test's loop, and the blocking client on a thread."""

import asyncio
import queue
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as triton
from google.protobuf.json_format import ParseDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer
from tritonclient.utils import InferenceServerException

from gateway.edges.grpc_services import InferenceServicer
from tests.file_limit import no_file_longer_than
from tests.grpc_server.serving import CONTROLLED, MODELS, SLOW, Served, on_loop, serving
from tests.shared_memory.anew import registered_anew_meanwhile

pytestmark = pytest.mark.slow

ROW = np.array([[1, 4, 2, 3]], dtype=np.float32)


def echo_input(value: np.ndarray = ROW) -> triton.InferInput:
    tensor = triton.InferInput("INPUT0", list(value.shape), "FP32")
    tensor.set_data_from_numpy(value)
    return tensor


async def refusal(call: object) -> tuple[str, str]:
    """Status and message."""
    with pytest.raises(InferenceServerException) as caught:
        await call  # type: ignore[misc]
    return str(caught.value.status()), str(caught.value.message())


@pytest.fixture
def segment() -> Iterator[tuple[str, Path]]:
    """Key and path of a shared memory object of 64 bytes: ROW, then zeros."""
    key = f"/gateway-test-{uuid.uuid4().hex}"
    path = Path(f"/dev/shm{key}")
    path.write_bytes(ROW.tobytes() + bytes(48))
    yield key, path
    path.unlink()


@pytest.fixture
def other_segment() -> Iterator[tuple[str, Path]]:
    """Key and path of a shared memory object of 64 zeros."""
    key = f"/gateway-test-{uuid.uuid4().hex}"
    path = Path(f"/dev/shm{key}")
    path.write_bytes(bytes(64))
    yield key, path
    path.unlink()


@on_loop
async def test_the_state_of_server_and_models() -> None:
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("echo")
        assert await client.is_model_ready("echo", "1")
        assert not await client.is_model_ready("echo", "9")
        assert not await client.is_model_ready("later")
        assert not await client.is_model_ready("nobody")


@on_loop
async def test_metadata() -> None:
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        server = await client.get_server_metadata(as_json=True)
        assert server["name"] == "serving-gateway"
        assert "system_shared_memory" in server["extensions"]
        model = await client.get_model_metadata("echo", as_json=True)
        assert model["versions"] == ["1"]
        assert model["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": ["-1", "4"]}]
        assert await refusal(client.get_model_metadata("nobody")) == (
            "StatusCode.NOT_FOUND",
            "Request for unknown model: 'nobody' is not found; models here: 'echo', 'later'",
        )


@on_loop
async def test_the_configuration_is_a_model_config() -> None:
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        config = (await client.get_model_config("echo")).config
        assert config.name == "echo"
        assert config.max_batch_size == 8
        assert list(config.input[0].dims) == [4]
        assert config.instance_group[0].count == 1


@on_loop
async def test_statistics_count_inferences() -> None:
    async with serving(SLOW) as served, triton.InferenceServerClient(served.url) as client:
        await client.infer("echo", [echo_input(np.zeros((3, 4), np.float32))])
        found = (await client.get_inference_statistics("echo")).model_stats[0]
        assert (found.name, found.version, found.inference_count, found.execution_count) == ("echo", "1", 3, 1)
        assert found.inference_stats.success.count == 1
        assert found.batch_stats[0].batch_size == 3
        assert found.batch_stats[0].compute_input.count == found.batch_stats[0].compute_output.count == 1
        assert found.response_stats["0"].success.count == 1
        over_rest = served.repository.statistics("echo")["model_stats"][0]
        assert found == ParseDict(over_rest, pb.ModelStatistics())
        assert {model.name for model in (await client.get_inference_statistics()).model_stats} == {"echo", "slow", "hangs"}


@on_loop
async def test_models_are_loaded_and_unloaded() -> None:
    async with serving(CONTROLLED + SLOW) as served, triton.InferenceServerClient(served.url) as client:
        states = {model.name: model.state for model in (await client.get_model_repository_index()).models}
        assert states == {"echo": "READY", "slow": "READY", "hangs": "READY", "later": "UNAVAILABLE"}
        await client.load_model("later")
        assert await client.is_model_ready("later")
        await client.unload_model("later", unload_dependents=True)
        assert not await client.is_model_ready("later")
        status, _ = await refusal(client.load_model("later", config="{}"))
        assert status == "StatusCode.UNIMPLEMENTED"
        status, _ = await refusal(client.load_model("later", config="{}", files={"file:1/model.py": b""}))
        assert status == "StatusCode.UNIMPLEMENTED"
        status, message = await refusal(client.load_model("nobody"))
        assert "failed to load 'nobody'" in message


@on_loop
async def test_a_repository_name_is_unimplemented() -> None:
    async with serving() as served:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="x"))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@on_loop
async def test_models_are_not_loaded_or_unloaded_unless_the_operator_says_so() -> None:
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        for call in (client.load_model("later"), client.unload_model("echo")):
            status, message = await refusal(call)
            assert status == "StatusCode.UNIMPLEMENTED"
            assert "set server.model_control: true" in message
        assert await client.is_model_ready("echo")


@on_loop
async def test_infer_with_id_outputs_and_classes() -> None:
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        result = await client.infer(
            "echo",
            [echo_input()],
            request_id="7",
            outputs=[triton.InferRequestedOutput("OUTPUT0")],
            priority=1,
            timeout=5_000_000,
            client_timeout=10,
        )
        assert result.get_response().id == "7"
        assert result.as_numpy("OUTPUT0").tolist() == ROW.tolist()
        best = await client.infer("echo", [echo_input()], outputs=[triton.InferRequestedOutput("OUTPUT0", class_count=2)])
        assert best.as_numpy("OUTPUT0").tolist() == [[b"4.000000:1:one", b"3.000000:3:three"]]


@on_loop
async def test_compressed_infer() -> None:
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        for algorithm in ("gzip", "deflate"):
            result = await client.infer("echo", [echo_input()], compression_algorithm=algorithm)
            assert result.as_numpy("OUTPUT0").tolist() == ROW.tolist()


@on_loop
async def test_shared_memory_in_and_out(segment: tuple[str, Path]) -> None:
    key, path = segment
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        await client.register_system_shared_memory("r", key, 64)
        assert (await client.get_system_shared_memory_status()).regions["r"].byte_size == 64
        tensor = triton.InferInput("INPUT0", [1, 4], "FP32")
        tensor.set_shared_memory("r", 16)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("r", 16, 32)
        result = await client.infer("echo", [tensor], outputs=[output])
        assert list(result.get_output("OUTPUT0").shape) == [1, 4]
        assert path.read_bytes() == ROW.tobytes() + bytes(16) + ROW.tobytes() + bytes(16)
        output.set_shared_memory("r", 8, 32)
        status, message = await refusal(client.infer("echo", [tensor], outputs=[output]))
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert "at least 16 bytes" in message
        assert (await refusal(client.register_system_shared_memory("r", key, 64)))[0] == "StatusCode.ALREADY_EXISTS"
        await client.unregister_system_shared_memory("r")
        assert not (await client.get_system_shared_memory_status()).regions
        assert (await refusal(client.infer("echo", [tensor])))[0] == "StatusCode.NOT_FOUND"


@on_loop
async def test_a_region_registered_anew_meanwhile_gets_no_answer(
    segment: tuple[str, Path], other_segment: tuple[str, Path]
) -> None:
    (key, path), (other_key, other_path) = segment, other_segment
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        await client.register_system_shared_memory("r", key, 64)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("r", 16, 32)
        with registered_anew_meanwhile(served.repository, "r", other_key, 64):
            status, message = await refusal(client.infer("echo", [echo_input()], outputs=[output]))
            assert status == "StatusCode.NOT_FOUND"
            assert "'r' was registered after the request came" in message
        assert other_path.read_bytes() == bytes(64)
        assert path.read_bytes() == ROW.tobytes() + bytes(48)
        await client.infer("echo", [echo_input()], outputs=[output])
        assert other_path.read_bytes()[32:48] == ROW.tobytes()


@on_loop
async def test_a_region_that_cannot_be_written_is_an_error_of_that_request(segment: tuple[str, Path]) -> None:
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        await client.register_system_shared_memory("r", segment[0], 64)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("r", 16, 32)
        with no_file_longer_than(32):
            whole = asyncio.ensure_future(client.infer("echo", [echo_input()]))
            status, message = await refusal(client.infer("echo", [echo_input()], outputs=[output]))
            assert (await whole).as_numpy("OUTPUT0").tolist() == ROW.tolist()
        assert status == "StatusCode.INTERNAL"
        assert "cannot be written: File too large" in message
        await client.infer("echo", [echo_input()], outputs=[output])


@on_loop
async def test_shared_memory_can_be_switched_off(segment: tuple[str, Path]) -> None:
    text = f"server: {{system_shared_memory: false}}\n{MODELS}"
    async with serving(text) as served, triton.InferenceServerClient(served.url) as client:
        assert (await refusal(client.register_system_shared_memory("r", segment[0], 64)))[0] == "StatusCode.UNIMPLEMENTED"


@on_loop
async def test_there_are_no_cuda_regions_which_is_no_error() -> None:
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        assert not (await client.get_cuda_shared_memory_status()).regions
        await client.unregister_cuda_shared_memory()  # as clients do before they register their own
        await client.unregister_cuda_shared_memory("r")
        assert await refusal(client.get_cuda_shared_memory_status("r")) == (
            "StatusCode.NOT_FOUND",
            "Unable to find cuda shared memory region: 'r'",
        )


@on_loop
async def test_what_is_not_offered_is_unimplemented_with_a_text() -> None:
    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        for call in (
            client.register_cuda_shared_memory("r", b"AAAA", 0, 64),
            client.get_trace_settings(),
            client.update_trace_settings(settings={"trace_level": "OFF"}),
            client.get_log_settings(),
            client.update_log_settings(settings={"log_info": True}),
        ):
            status, message = await refusal(call)
            assert status == "StatusCode.UNIMPLEMENTED"
            assert message


def test_no_rpc_is_left_to_the_servicers_base() -> None:
    rpcs = [method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
    assert len(rpcs) == 20
    for rpc in set(rpcs) - {"ModelInfer", "ModelStreamInfer"}:  # these take no task, see grpc_server
        assert getattr(InferenceServicer, rpc) is not getattr(GRPCInferenceServiceServicer, rpc)


@on_loop
async def test_a_stream_of_the_aio_client() -> None:
    async def requests() -> object:
        for value in range(3):
            yield {"model_name": "echo", "inputs": [echo_input(ROW + value)], "request_id": str(value)}
        yield {"model_name": "nobody", "inputs": [echo_input()], "request_id": "x", "enable_empty_final_response": True}

    async with serving() as served, triton.InferenceServerClient(served.url) as client:
        answers = [answer async for answer in client.stream_infer(requests())]
        assert [result.as_numpy("OUTPUT0")[0, 0] for result, _ in answers[:3]] == [1, 2, 3]
        assert [result.get_response().id for result, _ in answers[:3]] == ["0", "1", "2"]
        assert "unknown model" in str(answers[3][1])


def use_blocking_client(served: Served) -> None:
    answers: queue.Queue[tuple[blocking.InferResult | None, Exception | None]] = queue.Queue()
    with blocking.InferenceServerClient(served.url) as client:
        assert client.is_server_ready()
        tensor = blocking.InferInput("INPUT0", [1, 4], "FP32")
        tensor.set_data_from_numpy(ROW)
        assert client.infer("echo", [tensor]).as_numpy("OUTPUT0").tolist() == ROW.tolist()
        client.async_infer("echo", [tensor], lambda result, error: answers.put((result, error)), request_id="async")
        result, error = answers.get(timeout=10)
        assert error is None
        assert result is not None
        assert result.get_response().id == "async"
        client.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(3):
            client.async_stream_infer("echo", [tensor], request_id=str(i), enable_empty_final_response=True)
        for i in range(3):
            result, error = answers.get(timeout=10)
            assert error is None
            assert result is not None
            assert result.get_response().id == str(i)
            assert result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()


@on_loop
async def test_the_blocking_client() -> None:
    async with serving() as served:
        await asyncio.to_thread(use_blocking_client, served)


@on_loop
async def test_health_follows_readiness() -> None:
    async with serving() as served:
        health = health_pb2_grpc.HealthStub(served.channel)
        for service in ("", "inference.GRPCInferenceService"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        await served.repository.close()
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.slow
@on_loop
async def test_a_watcher_is_told_the_health_at_once_and_each_change_until_the_server_ends() -> None:
    states = health_pb2.HealthCheckResponse
    async with serving(CONTROLLED + MODELS) as served:
        health = health_pb2_grpc.HealthStub(served.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService"))
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await watch.read()).status == states.SERVING
        assert (await unknown.read()).status == states.SERVICE_UNKNOWN
        assert not unknown.done()
        await served.repository.unload("echo")
        served.repository._models["echo"]["1"].wanted = True  # as if it were lost, and not unloaded by a client
        assert (await watch.read()).status == states.NOT_SERVING
        await served.repository.load("echo", {})
        assert (await watch.read()).status == states.SERVING
        draining = asyncio.ensure_future(served.server.drain(5))
        assert (await watch.read()).status == states.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await watch.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await draining


@pytest.mark.slow
@on_loop
async def test_a_watcher_that_leaves_is_forgotten() -> None:
    async with serving() as served:
        health = health_pb2_grpc.HealthStub(served.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        assert len(served.server._watches) == 1
        watch.cancel()
        while served.server._watches:  # noqa: ASYNC110  # a timer of the server's sees it
            await asyncio.sleep(0.01)


@on_loop
async def test_reflection_names_the_services() -> None:
    async with serving() as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for reply in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in reply.list_services_response.service}
            assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
        symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
        async for reply in stub.ServerReflectionInfo(iter([symbol])):
            assert reply.file_descriptor_response.file_descriptor_proto
