"""node's http2 (nghttp2) as a gRPC client, with the settings of other clients and of proxies."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.served.gateway_process import Served

pytestmark = [pytest.mark.slow, pytest.mark.debian("nodejs")]

SCRIPT = Path(__file__).parent / "node_http2.js"
CASES = (
    "header table of 0",
    "header table of 1024",
    "header table of 65536",
    "frames of 16384",
    "frames of 2^24-1",
    "windows of 2^31-1",
    "push",
    "no push",
    "one concurrent stream",
    "no concurrent stream",
    "a header list of 64 kB",
    "CONNECT protocol",
    "unknown settings",
    "padding",
    "aligned padding",
    "a window of 1",
    "a window of 0 that opens",
    "settings that change while calls are open",
    "GOAWAY while calls are open",
    "close while calls are open",
    "pings",
    "streams given up",
    "very many calls at once",
    "a call on each of many connections",
    "a message in small pieces",
    "trailers of a client",
    "a stream that ends by halves",
    "what is no call",
    "an answer to who does not read yet",
)


def infer_request(model: str, count: int) -> str:
    """As protobuf, in hex."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, count])
    raw = np.full((1, count), 7, np.float32).tobytes()
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw]).SerializeToString().hex()


def run(address: str, case: str) -> None:
    messages = {"infer": infer_request("echo", 4), "slow": infer_request("slow", 4), "big": infer_request("echo", 300_000)}
    done = subprocess.run(
        ["node", SCRIPT, address, case], input=json.dumps(messages), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_a_client_is_answered(gateway: Served, case: str) -> None:
    run(gateway.grpc, case)


def test_the_port_of_rest_is_told_apart(gateway: Served) -> None:
    run(gateway.http, "REST")
