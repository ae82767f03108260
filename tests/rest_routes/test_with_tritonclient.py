"""Every REST feature through the reference client, unchanged."""

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, shared_memory

from backends.datatypes import NUMPY
from tests.file_limit import no_file_longer_than
from tests.rest_routes.serving import Served, serving
from tests.shared_memory.anew import registered_anew_meanwhile

EVERY_DATATYPE = "models:\n" + "".join(
    f"""
  - name: {datatype}
    inputs: [{{name: IN, datatype: {datatype}, shape: [-1, -1]}}]
    outputs: [{{name: OUT, datatype: {datatype}, shape: [-1, -1]}}]
    backends: [{{kind: synthetic, fixed_ms: 0, row_ms: 0}}]
"""
    for datatype in NUMPY
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("rest")) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(served.url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    with serving(tmp_path_factory.mktemp("types"), EVERY_DATATYPE) as running:
        client = triton.InferenceServerClient(running.url)
        yield client
        client.close()


ROWS = np.array([[1, 4, 2, 3], [8, 7, 6, 5]], np.float32)


def rows_input(rows: np.ndarray = ROWS, *, binary: bool = True) -> Any:
    tensor = triton.InferInput("INPUT0", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows, binary_data=binary)
    return tensor


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert not client.is_model_ready("nope")
    assert client.get_server_metadata()["name"]
    assert client.get_model_metadata("echo")["outputs"][0]["shape"] == [-1, 4]
    assert client.get_model_config("echo")["max_batch_size"] == 8
    assert client.get_inference_statistics("echo")["model_stats"][0]["name"] == "echo"


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_inference(client: triton.InferenceServerClient, binary_in: bool, binary_out: bool) -> None:
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary_out)]
    result = client.infer("echo", [rows_input(binary=binary_in)], outputs=outputs, request_id="r 1")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROWS, strict=True)
    assert result.get_response()["id"] == "r 1"


def test_without_outputs_all_come_in_binary(client: triton.InferenceServerClient) -> None:
    result = client.infer("echo", [rows_input()])
    assert result.get_output("OUTPUT0")["parameters"] == {"binary_data_size": 32}


@pytest.mark.parametrize("requested", ["gzip", "deflate", None])
@pytest.mark.parametrize("answered", ["gzip", "deflate", None])
def test_compression(client: triton.InferenceServerClient, requested: str | None, answered: str | None) -> None:
    rows = np.tile(ROWS, (200, 1))
    result = client.infer(
        "echo", [rows_input(rows)], request_compression_algorithm=requested, response_compression_algorithm=answered
    )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), rows, strict=True)


def test_classification(client: triton.InferenceServerClient) -> None:
    for binary in (True, False):
        outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary, class_count=2)]
        found = client.infer("echo", [rows_input()], outputs=outputs).as_numpy("OUTPUT0")
        best = [[str(item, "utf-8") if isinstance(item, bytes) else item for item in row] for row in found]
        assert best == [["4.000000:1:one", "3.000000:3:three"], ["8.000000:0:zero", "7.000000:1:one"]]


@pytest.mark.parametrize("datatype", list(NUMPY))
def test_every_datatype_in_binary(typed: triton.InferenceServerClient, datatype: str) -> None:
    if datatype == "BYTES":
        array = np.array([[b"a", b"\xff\x00", b""]], object)
    else:
        array = np.array([[0, 1, 100]]).astype(NUMPY[datatype])
    tensor = triton.InferInput("IN", [1, 3], datatype)
    tensor.set_data_from_numpy(array)
    result = typed.infer(datatype, [tensor])
    assert result.get_output("OUT")["datatype"] == datatype
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


@pytest.mark.parametrize("datatype", [name for name in NUMPY if name not in ("FP16", "BF16")])
def test_every_datatype_in_json(typed: triton.InferenceServerClient, datatype: str) -> None:
    array = np.array([["a", "é"]], object) if datatype == "BYTES" else np.array([[0, 1]]).astype(NUMPY[datatype])
    tensor = triton.InferInput("IN", [1, 2], datatype)
    tensor.set_data_from_numpy(array, binary_data=False)
    result = typed.infer(datatype, [tensor], outputs=[triton.InferRequestedOutput("OUT", binary_data=False)])
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


def test_what_is_not_finite(typed: triton.InferenceServerClient) -> None:
    array = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    tensor = triton.InferInput("IN", [1, 3], "FP32")
    tensor.set_data_from_numpy(array, binary_data=False)
    result = typed.infer("FP32", [tensor], outputs=[triton.InferRequestedOutput("OUT", binary_data=False)])
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


def test_errors_carry_status_and_message(client: triton.InferenceServerClient) -> None:
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("nope", {}, "404", "Request for unknown model: 'nope' is not found; models here: 'echo'"),
        ("echo", {"model_version": "9"}, "404", "version 9"),
        ("echo", {"outputs": [triton.InferRequestedOutput("X")]}, "400", "unexpected inference output 'X'"),
        ("pair", {}, "400", "INPUT0"),
    ]
    for model, options, status, message in cases:
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, [rows_input()], **options)
        assert caught.value.status() == status
        assert message in caught.value.message()


def test_repository_control(client: triton.InferenceServerClient) -> None:
    client.load_model("later")
    assert client.is_model_ready("later")
    assert {"name": "later", "version": "1", "state": "READY"} in client.get_model_repository_index()
    client.unload_model("later")
    assert not client.is_model_ready("later")
    with pytest.raises(InferenceServerException, match="failed to load 'nope'"):
        client.load_model("nope")


def test_system_shared_memory(client: triton.InferenceServerClient) -> None:
    key = f"/gateway-rest-{uuid.uuid4().hex}"
    handle = shared_memory.create_shared_memory_region("r", key, 64)
    try:
        shared_memory.set_shared_memory_region(handle, [ROWS])
        client.register_system_shared_memory("r", key, 64)
        with pytest.raises(InferenceServerException, match="already in manager"):
            client.register_system_shared_memory("r", key, 64)
        assert client.get_system_shared_memory_status() == [{"name": "r", "key": key, "offset": 0, "byte_size": 64}]
        tensor = triton.InferInput("INPUT0", [2, 4], "FP32")
        tensor.set_shared_memory("r", 32)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("r", 32, offset=32)
        response = client.infer("echo", [tensor], outputs=[output]).get_response()
        assert response["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [2, 4]}]
        np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(handle, np.float32, [4, 4])[2:], ROWS)
        output.set_shared_memory("r", 8)
        with pytest.raises(InferenceServerException, match="at least 32 bytes"):
            client.infer("echo", [tensor], outputs=[output])
        output.set_shared_memory("r", 32, offset=32)
        with no_file_longer_than(32), pytest.raises(InferenceServerException, match="cannot be written: File too large"):
            client.infer("echo", [tensor], outputs=[output])
        client.infer("echo", [tensor], outputs=[output])
        client.unregister_system_shared_memory("r")
        assert client.get_system_shared_memory_status() == []
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def test_a_region_registered_anew_meanwhile_gets_no_answer(served: Served, client: triton.InferenceServerClient) -> None:
    keys = [f"/gateway-rest-{uuid.uuid4().hex}" for _ in range(2)]
    handles = [shared_memory.create_shared_memory_region("r", key, 32) for key in keys]
    try:
        for handle in handles:
            shared_memory.set_shared_memory_region(handle, [np.zeros_like(ROWS)])
        client.register_system_shared_memory("r", keys[0], 32)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("r", 32)
        with registered_anew_meanwhile(served.repository, "r", keys[1], 32):
            for _ in range(2):  # the second is known again
                with pytest.raises(InferenceServerException, match="'r' was registered after the request came") as caught:
                    client.infer("echo", [rows_input()], outputs=[output])
                assert caught.value.status() == "404"
        for handle in handles:
            assert not shared_memory.get_contents_as_numpy(handle, np.float32, [8]).any()
        client.infer("echo", [rows_input()], outputs=[output])
        np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(handles[1], np.float32, [2, 4]), ROWS)
    finally:
        client.unregister_system_shared_memory("r")
        for handle in handles:
            shared_memory.destroy_shared_memory_region(handle)


def test_requests_side_by_side(served: Served) -> None:
    client = triton.InferenceServerClient(served.url, concurrency=8)
    try:
        waiting = [client.async_infer("echo", [rows_input(ROWS + n)]) for n in range(40)]
        for n, each in enumerate(waiting):
            np.testing.assert_array_equal(each.get_result(timeout=10).as_numpy("OUTPUT0"), ROWS + n)
    finally:
        client.close()


def test_the_asyncio_client(served: Served) -> None:
    async def main() -> None:
        async with triton_aio.InferenceServerClient(served.url) as client:
            assert await client.is_server_ready()
            rows = np.tile(ROWS, (60, 1))
            # aiohttp accepts compressed answers by itself.
            results = await asyncio.gather(*(client.infer("echo", [rows_input(rows + n)]) for n in range(20)))
            for n, result in enumerate(results):
                np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), rows + n)

    asyncio.run(main())
