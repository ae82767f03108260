"""`gateway sagemaker` as SageMaker starts a container: its environment, its folder, its port, its signals."""

import base64
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import yaml

from gateway.commands.sagemaker import contained
from gateway.config import parse_config
from gateway.errors import ConfigError
from tests.backends.sagemaker_cases import ANSWERS, REQUESTS, write_package

ROOT = Path(__file__).parent.parent.parent
MODEL = {
    "name": "echo",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    "backends": [{"kind": "synthetic", "fixed_ms": 5}],
}
CODE = """
class Double:
    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1, 2)),)

    def predict(self, inputs):
        return {"y": inputs["x"] * 2}
"""
BODY = json.dumps({"instances": [[1, 2]]})
KILLED_S = 30.0  # behind SIGTERM


class Container(NamedTuple):
    port: int
    process: "subprocess.Popen[str]"

    def ask(self, method: str, path: str, body: str | bytes = "", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextlib.contextmanager
def container(folder: Path, *options: str, **environment: str) -> Iterator[Container]:
    """Started as SageMaker does, but for the address; ended by SIGTERM, and it must end well and in time."""
    command = [sys.executable, "-m", "gateway.cli", "sagemaker", "serve", "--host", "127.0.0.1", "--model", str(folder)]
    variables = os.environ | {"SAGEMAKER_BIND_TO_PORT": "0", "SAGEMAKER_SAFE_PORT_RANGE": "21000-21999"} | environment
    process = subprocess.Popen([*command, *options], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("gateway ready http=127.0.0.1:"), line
        yield Container(int(line.rsplit(":", 1)[1]), process)
    finally:
        process.terminate()
        try:
            process.wait(KILLED_S)
        finally:
            process.kill()
            process.stdout.close()
    assert process.returncode == 0


def package(folder: Path, **server: object) -> Path:
    """A read-only folder with a gateway.yaml."""
    folder.mkdir()
    (folder / "gateway.yaml").write_text(yaml.safe_dump({"server": server, "models": [MODEL]}))
    folder.chmod(0o555)
    return folder


@pytest.mark.slow
def test_a_folder_is_served_on_one_port_with_all_that_the_contract_has(tmp_path: Path) -> None:
    with container(package(tmp_path / "model", grpc_port=9001, host="127.0.0.2")) as running:
        assert running.ask("GET", "/ping") == running.ask("POST", "/ping") == (200, b"")
        asked = running.ask("POST", "/invocations", BODY, Content_Type="application/json")
        assert asked == (200, b'{"predictions":[[1.0,2.0]]}')
        assert running.ask("POST", "/v1/models/echo:predict", BODY)[0] == 200
        assert running.ask("GET", "/v2/models/echo/ready")[0] == 200
        status, metrics = running.ask("GET", "/metrics")
        assert (status, b'gateway_requests_total{code="ok",model="echo"' in metrics) == (200, True)
        listening = [
            (each.laddr.ip, each.laddr.port)
            for each in psutil.Process(running.process.pid).net_connections()
            if each.status == psutil.CONN_LISTEN
        ]
        assert listening == [("127.0.0.1", running.port)]


@pytest.mark.slow
def test_a_folder_without_a_configuration_is_served_by_convention(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(CODE)
    with container(tmp_path) as running:
        assert running.ask("POST", "/invocations", BODY) == (200, b'{"predictions":[[2.0,4.0]]}')


@pytest.mark.slow
def test_what_was_accepted_is_answered_when_sigterm_comes_under_load(tmp_path: Path) -> None:
    answers: list[int] = []
    faults: list[Exception] = []

    def send(running: Container, begun: threading.Semaphore) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        try:
            while True:
                connection.request("POST", "/invocations", BODY, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                answers.append(answer.status)
                begun.release()
                if answer.getheader("Connection") == "close":
                    return
        except Exception as exc:
            faults.append(exc)
        finally:
            connection.close()

    with container(package(tmp_path / "model")) as running:
        begun = threading.Semaphore(0)
        senders = [threading.Thread(target=send, args=(running, begun)) for _ in range(16)]
        for sender in senders:
            sender.start()
        for _ in range(200):
            assert begun.acquire(timeout=20)
        asked_s = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        for sender in senders:
            sender.join(KILLED_S)
        running.process.wait(KILLED_S)
        assert time.monotonic() - asked_s < KILLED_S
    assert faults == []
    assert set(answers) == {200}
    assert len(answers) >= 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "environment", "said"),
    [
        ("serve", {"SAGEMAKER_BIND_TO_PORT": "http"}, "SAGEMAKER_BIND_TO_PORT: got 'http'"),
        ("serve", {}, "no model in this folder"),
        ("train", {}, "invalid choice: 'train'"),
    ],
)
def test_what_cannot_be_served_is_said(tmp_path: Path, verb: str, environment: dict[str, str], said: str) -> None:
    if environment:
        package(tmp_path / "model")
    command = [sys.executable, "-m", "gateway.cli", "sagemaker", verb, "--host", "127.0.0.1"]
    command += ["--model", str(tmp_path / "model" if environment else tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_the_environment_decides_where_it_listens() -> None:
    config = parse_config({"server": {"drain_timeout_s": 90, "limits": {"body_bytes": 1000}}, "models": [MODEL]}, source="x")
    server = contained(config, {}).server
    assert (server.host, server.http_port, server.grpc_port, server.drain_timeout_s) == ("0.0.0.0", 8080, None, 25.0)
    assert server.limits.body_bytes == 1000
    assert contained(config, {"SAGEMAKER_BIND_TO_PORT": " 21000"}).server.http_port == 21000
    for odd in ("0x1F90", "65536", "-1"):
        with pytest.raises(ConfigError, match=r"SAGEMAKER_BIND_TO_PORT: got .* expected a port"):
            contained(config, {"SAGEMAKER_BIND_TO_PORT": odd})


def test_a_batch_transform_job_may_send_what_it_says() -> None:
    config = parse_config({"models": [MODEL]}, source="x")
    for told, body_bytes in (("", 64 << 20), ("0", 64 << 20), ("6", 64 << 20), ("100", 100 << 20)):
        assert contained(config, {"SAGEMAKER_MAX_PAYLOAD_IN_MB": told}).server.limits.body_bytes == body_bytes
    with pytest.raises(ConfigError, match="SAGEMAKER_MAX_PAYLOAD_IN_MB: got '6 MB', expected 0 to 100, in MB"):
        contained(config, {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6 MB"})


def test_what_needs_ray_is_refused() -> None:
    backend = {"kind": "synthetic", "placement": "replicas", "resources": {"num_cpus": 1}}
    config = parse_config({"models": [{**MODEL, "backends": [backend]}]}, source="x")
    with pytest.raises(ConfigError, match="one process: set placement: embedded"):
        contained(config, {})


@pytest.mark.slow
def test_a_package_of_the_pytorch_container_answers_as_its_toolkit_did(tmp_path: Path) -> None:
    recorded = {answer["request"]: answer for answer in json.loads(ANSWERS.read_text())}
    asked = [request for request in REQUESTS if request.package == "own"]
    with container(write_package(tmp_path / "own", "own")) as serving:
        for request in asked:
            told = recorded[request.name]
            headers = {"Content_Type": request.content_type, "Accept": request.accept}
            status, body = serving.ask("POST", "/invocations", request.body, **headers)
            if told["status"] == 200:
                assert (status, body) == (200, base64.b64decode(told["body"])), request.name
            else:
                assert status in (400, 415, 500), request.name
        status, body = serving.ask("POST", "/invocations", b"what", Content_Type="audio/none")
        assert status == 415, body
