"""One gateway as a user starts it, for clients in other languages."""

from collections.abc import Iterator

import pytest

from tests.served.gateway_process import Served, served

MODELS = """
models:
  - name: echo
    max_rows: 8
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, -1]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, -1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0, faults: {fail: 666}}]
  - name: slow
    max_rows: 1
    batching: {max_queue_rows: 4}
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, -1]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, -1]}]
    backends: [{kind: synthetic, fixed_ms: 300, row_ms: 0}]
"""


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = tmp_path_factory.mktemp("clients") / "gateway.yaml"
    config.write_text(MODELS)
    with served(config, "--no-ray") as gateway:
        yield gateway
