"""The messages come without grpcio, and are those of tritonclient, whoever imports that first."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ASKED = "message = {pb}.ModelInferRequest(model_name='m'); assert type(message) is {other}.ModelInferRequest; "
INFER = "assert service.InferInput('x', [1], 'FP32').name() == 'x'"


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_a_gateway_without_a_triton_does_without_grpcio() -> None:
    run("import sys, gateway.ingress; assert not {'grpc', 'tritonclient.grpc'} & sys.modules.keys()")


@pytest.mark.parametrize(
    "imports",
    [
        "from gateway.protocols.messages import pb; import tritonclient.grpc as service",
        "import tritonclient.grpc as service; from gateway.protocols.messages import pb",
        "from gateway.protocols.messages import pb; import tritonclient.grpc.service_pb2_grpc; service = tritonclient.grpc",
    ],
)
def test_tritonclient_has_the_same_messages_whoever_comes_first(imports: str) -> None:
    run(f"{imports}; {ASKED.format(pb='pb', other='service.service_pb2')}{INFER}; assert service.model_config_pb2.ModelConfig")
