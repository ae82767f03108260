"""SIGTERM while a model hangs: the gateway ends within drain_timeout_s, and who it could not answer is told, not reset."""

import http.client
import json
import re
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
import yaml
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.served.gateway_process import Served, served
from tests.waiting import until

pytestmark = pytest.mark.slow

DRAIN_S = 3.0
MARGIN_S = 3.0  # for the end of an interpreter on a busy machine
HANGS = 77.0


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_hanging_model_delays_the_end_by_no_more_than_the_drain_time_and_each_gets_an_error(
    tmp_path: Path, isolation: str
) -> None:
    backend = {"kind": "synthetic", "isolation": isolation, "sessions": 3, "fixed_ms": 0, "faults": {"hang": HANGS}}
    model = {"name": "m", "batching": {"max_rows": 1}, "backends": [backend]}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"server": {"drain_timeout_s": DRAIN_S}, "models": [model]}))
    with served(path, "--no-ray") as gateway, ThreadPoolExecutor(6) as clients:
        children = psutil.Process(gateway.process.pid).children(recursive=True)
        running = [clients.submit(ask, gateway) for ask in (ask_rest, ask_grpc, ask_stream)]
        until(lambda: told(gateway, "gateway_busy_workers") == "3")
        waiting = [clients.submit(ask, gateway) for ask in (ask_rest, ask_grpc, ask_stream)]
        half = socket.create_connection(gateway.http.split(":"), timeout=20)
        half.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nxxx")
        until(lambda: told(gateway, "gateway_queue_requests") == "3")
        begun = time.monotonic()
        gateway.process.terminate()
        said = "the server is shutting down, and had no time left for this"
        rest, unary, stream = (one.result(20) for one in running)  # what may have run does not say when to try again
        assert rest == (504, f"{said}: it may have run", None)
        assert unary == ("DEADLINE_EXCEEDED", f"{said}: it may have run", None)
        assert stream == f"{said}: it may have run"
        rest, unary, stream = (one.result(20) for one in waiting)
        assert rest == (503, said, "1")
        assert unary == ("UNAVAILABLE", said, "1000")
        assert stream == said
        assert half.recv(1000).startswith(b"HTTP/1.1 503 ")
        half.close()
        gateway.process.wait(20)
        assert time.monotonic() - begun < DRAIN_S + MARGIN_S
    _, alive = psutil.wait_procs(children, 5)
    assert alive == []


@pytest.mark.parametrize("drain_s", [0, 0.2])
def test_a_drain_of_next_to_no_time_still_frees_the_models_and_keeps_what_was_learned(tmp_path: Path, drain_s: float) -> None:
    server = {"drain_timeout_s": drain_s, "state_dir": str(tmp_path / "state")}
    backend = {"kind": "synthetic", "isolation": "process"}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"server": server, "models": [{"name": "m", "backends": [backend]}]}))
    with served(path, "--no-ray") as gateway:
        children = psutil.Process(gateway.process.pid).children(recursive=True)
    assert len(list((tmp_path / "state").glob("*.json"))) == 1
    _, alive = psutil.wait_procs(children, 5)
    assert alive == []


def told(gateway: Served, metric: str) -> str:
    with urllib.request.urlopen(f"http://{gateway.http}/metrics", timeout=20) as answer:
        return "".join(re.findall(rf"^{metric}{{.*}} (\d+)$", answer.read().decode(), re.MULTILINE))


def ask_rest(gateway: Served) -> tuple[int, str, str | None]:
    """Status, error, and when to try again."""
    connection = http.client.HTTPConnection(gateway.http, timeout=20)
    data = {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [HANGS] * 16}]}
    connection.request("POST", "/v2/models/m/infer", json.dumps(data))
    response = connection.getresponse()
    return response.status, json.loads(response.read())["error"], response.headers["Retry-After"]


def request() -> pb.ModelInferRequest:
    asked = pb.ModelInferRequest(model_name="m")
    asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16]).contents.fp32_contents.extend([HANGS] * 16)
    return asked


def ask_grpc(gateway: Served) -> tuple[str, str, str | None]:
    with grpc.insecure_channel(gateway.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request(), timeout=20)
    error = caught.value
    return error.code().name, error.details(), dict(error.trailing_metadata()).get("grpc-retry-pushback-ms")


def ask_stream(gateway: Served) -> str:
    with grpc.insecure_channel(gateway.grpc) as channel:
        answers = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request()]), timeout=20)
        return str(next(answers).error_message)
