"""grpc-js, node's gRPC. Needs its packages: `npm install @grpc/grpc-js @grpc/proto-loader` in a folder that GRPC_JS names."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2

from tests.served.gateway_process import Served

MODULES = Path(os.environ.get("GRPC_JS", "")) / "node_modules"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.debian("nodejs"),
    pytest.mark.skipif(not (MODULES / "@grpc" / "grpc-js").is_dir(), reason="needs grpc-js: see docs/testing.md"),
]

SCRIPT = Path(__file__).parent / "grpc_js.js"
CASES = (
    "unary",
    "errors",
    "retries",
    "stream",
    "a stream cancelled in the middle",
    "a call cancelled",
    "deadlines",
    "deflate",
    "gzip",
    "metadata",
    "small messages only",
    "a message over the limit",
    "keepalive",
    "flow control windows",
    "a client that reads slowly",
    "health",
    "reflection",
)


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every .proto that the clients need."""
    files = FileDescriptorSet()

    def add(file: FileDescriptor) -> None:
        for needed in file.dependencies:
            add(needed)
        if file.name not in [each.name for each in files.file]:
            file.CopyToProto(files.file.add())

    for module in (service_pb2, health_pb2, reflection_pb2):
        add(module.DESCRIPTOR)
    later = text_format.MessageToString(files.file[-1]).replace("v1alpha", "v1")  # its messages are the same, field by field
    text_format.Parse(later, files.file.add())
    path = tmp_path_factory.mktemp("grpc-js") / "descriptors"
    path.write_bytes(files.SerializeToString())
    return path


def run(address: str, descriptors: Path, case: str) -> str:
    done = subprocess.run(
        ["node", SCRIPT, address, descriptors, case],
        env={**os.environ, "NODE_PATH": str(MODULES)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_a_client_is_answered(gateway: Served, descriptors: Path, case: str) -> None:
    run(gateway.grpc, descriptors, case)


def test_an_error_looks_as_that_of_any_grpc_server(gateway: Served, descriptors: Path) -> None:
    told = json.loads(run(gateway.grpc, descriptors, "seen of an error"))
    del told["trailers"]["grpc-accept-encoding"]  # which grpcio tells in answers without errors only

    def fail(data: bytes, context: Any) -> None:
        context.abort(grpc.StatusCode.NOT_FOUND, told["details"])

    handler = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelInfer": grpc.unary_unary_rpc_method_handler(fail)}
    )
    server = grpc.server(ThreadPoolExecutor(1), [handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert json.loads(run(f"127.0.0.1:{port}", descriptors, "seen of an error")) == told
    finally:
        server.stop(None)


def test_the_port_of_rest_is_told_apart(gateway: Served, descriptors: Path) -> None:
    run(gateway.http, descriptors, "REST")
