"""h2load (nghttp2) at both ports, with header tables, windows and concurrency of every size."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.served.gateway_process import Served

pytestmark = [pytest.mark.slow, pytest.mark.debian("nghttp2-client")]

QUESTION = '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is sent: `message` over gRPC, `question` over REST."""
    folder = tmp_path_factory.mktemp("h2load")
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 100])
    raw = np.full((1, 100), 7, np.float32).tobytes()
    data = pb.ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=[raw]).SerializeToString()
    (folder / "message").write_bytes(b"\0" + len(data).to_bytes(4) + data)
    (folder / "question").write_text(QUESTION)
    return folder


def load(url: str, body: Path, count: int, *options: str) -> None:
    """Every request must be answered."""
    command = ["h2load", f"--requests={count}", f"--data={body}", "--connection-inactivity-timeout=15", *options, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert f"{count} succeeded, 0 failed, 0 errored, 0 timeout" in done.stdout, done.stdout
    assert re.search(rf"status codes: {count} 2xx", done.stdout), done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--header-table-size=0",),
        ("--header-table-size=1024",),
        ("--header-table-size=65536",),
        ("--encoder-header-table-size=0",),
        ("--encoder-header-table-size=65536",),
        ("--header-table-size=0", "--encoder-header-table-size=0", "--max-concurrent-streams=100"),
        ("--max-concurrent-streams=100", "--clients=4"),
        ("--max-concurrent-streams=1000",),
        *[
            (f"--window-bits={bits}", f"--connection-window-bits={max(bits, 16)}", "--max-concurrent-streams=10")
            for bits in (4, 9, 16, 24, 30)
        ],
    ],
    ids=" ".join,
)
def test_every_call_of_grpc_is_answered(gateway: Served, folder: Path, options: tuple[str, ...]) -> None:
    url = f"http://{gateway.grpc}/inference.GRPCInferenceService/ModelInfer"
    headers = ("--header=content-type: application/grpc", "--header=te: trailers")
    load(url, folder / "message", 400, *headers, *options)


def test_a_window_of_one_byte_is_enough(gateway: Served, folder: Path) -> None:
    url = f"http://{gateway.grpc}/inference.GRPCInferenceService/ModelInfer"
    headers = ("--header=content-type: application/grpc", "--header=te: trailers")
    load(url, folder / "message", 5, *headers, "--window-bits=1")


@pytest.mark.parametrize("options", [(), ("--clients=20",), ("--header=connection: close",)], ids=" ".join)
def test_every_request_of_rest_is_answered(gateway: Served, folder: Path, options: tuple[str, ...]) -> None:
    load(f"http://{gateway.http}/v2/models/echo/infer", folder / "question", 400, "--h1", *options)
