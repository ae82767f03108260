"""SIGTERM while a model hangs: the gateway ends within drain_timeout_s, and who it could not answer is told, not reset."""

import http.client
import json
import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import yaml
from tritonclient.utils import InferenceServerException

from tests.served.gateway_process import served

pytestmark = pytest.mark.slow

DRAIN_S = 3.0
MARGIN_S = 3.0  # for the end of an interpreter on a busy machine
HANGS = 77.0


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_hanging_model_delays_the_end_by_no_more_than_the_drain_time_and_each_gets_an_error(
    tmp_path: Path, isolation: str
) -> None:
    backend = {"kind": "synthetic", "isolation": isolation, "sessions": 1, "fixed_ms": 0, "faults": {"hang": HANGS}}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"server": {"drain_timeout_s": DRAIN_S}, "models": [{"name": "m", "backends": [backend]}]}))
    with served(path, "--no-ray") as gateway, ThreadPoolExecutor(4) as clients:
        children = psutil.Process(gateway.process.pid).children(recursive=True)
        rest = [clients.submit(ask_rest, gateway.http) for _ in range(2)]
        unary = clients.submit(ask_grpc, gateway.grpc)
        stream = clients.submit(ask_stream, gateway.grpc)
        half = socket.create_connection(gateway.http.split(":"), timeout=20)
        half.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nxxx")
        time.sleep(1.0)  # until all are in flight
        begun = time.monotonic()
        gateway.process.terminate()
        for status, error in [one.result(20) for one in rest]:
            assert status == 503
            assert "shutting down" in error
        assert "shutting down" in unary.result(20)
        assert "shutting down" in stream.result(20)
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


def ask_rest(address: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=20)
    data = {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [HANGS] * 16}]}
    connection.request("POST", "/v2/models/m/infer", json.dumps(data))
    response = connection.getresponse()
    return response.status, response.read().decode()


def tensor() -> grpcclient.InferInput:
    given = grpcclient.InferInput("INPUT0", [1, 16], "FP32")
    given.set_data_from_numpy(np.full((1, 16), HANGS, np.float32))
    return given


def ask_grpc(address: str) -> str:
    with grpcclient.InferenceServerClient(address) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("m", [tensor()])
    assert "UNAVAILABLE" in str(caught.value.status())
    return str(caught.value)


def ask_stream(address: str) -> str:
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("m", [tensor()])
        return str(answers.get(timeout=20))
