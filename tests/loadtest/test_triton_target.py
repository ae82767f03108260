"""The load generator against a real Triton server, unchanged."""

from collections.abc import Iterator
from typing import Literal

import pytest
import uvloop

from loadtest.measuring.generator import measure
from loadtest.results import LoadSpec
from tests.triton_server import TritonServer, require_triton, triton_server, write_model

pytestmark = [pytest.mark.triton, pytest.mark.slow]

CONFIG = """
max_batch_size: 16
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
dynamic_batching { }
"""
CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())])
            for request in requests
        ]
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    require_triton()
    directory = tmp_path_factory.mktemp("triton")
    write_model(directory / "models", "echo", CONFIG, CODE)
    with triton_server(directory) as server:
        yield server


@pytest.mark.parametrize("protocol", ["rest-json", "rest-binary", "grpc"])
def test_triton_answers_every_request_and_tells_queue_from_compute(
    triton: TritonServer, protocol: Literal["rest-json", "rest-binary", "grpc"]
) -> None:
    target = triton.grpc_url if protocol == "grpc" else triton.http_url
    spec = LoadSpec(target, protocol=protocol, pattern="poisson", rate_rps=100, duration_s=1, rows="1-3", timeout_s=10)
    result = uvloop.run(measure(spec))
    assert result.errors == {}
    assert result.succeeded > 50
    assert result.server is not None
    assert result.server.compute_ms > 0
    assert result.server.rows_per_execution >= 1
