"""`gateway.run`: a server in this process, reached over the wire."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import gateway
from tests.forks import a_copy_of_the_other_end, a_fork
from tests.from_python.models import double

ROOT = Path(__file__).parent.parent.parent
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


def ask(server: gateway.Server) -> list[float]:
    request = urllib.request.Request(f"{server.rest_url}/v2/models/double/infer", json.dumps(BODY).encode())
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: list[float] = json.load(answer)["outputs"][0]["data"]
        return found


@pytest.fixture(scope="module")
def server() -> Iterator[gateway.Server]:
    with gateway.run(double) as running:
        yield running


def test_both_protocols_answer_on_free_ports_of_the_loopback(server: gateway.Server) -> None:
    assert ask(server) == [2, 4]
    assert server.rest_url.startswith("http://127.0.0.1:")
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelReady(pb.ModelReadyRequest(name="double"), timeout=20).ready
    assert server.models == ("double",)


def test_several_run_side_by_side_and_end_by_themselves(server: gateway.Server) -> None:
    with gateway.run(double, grpc_port=None) as other:
        assert other.rest_url != server.rest_url
        assert ask(other) == [2, 4]
        with pytest.raises(gateway.ConfigError, match="there is no such listener: grpc_port is None"):
            _ = other.grpc_target
        address = other.rest_url
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address}/v2/health/live", timeout=5)
    assert ask(server) == [2, 4]


def test_it_runs_under_a_running_loop_as_in_a_notebook() -> None:
    async def cell() -> list[float]:
        server = gateway.run(double, grpc_port=None)
        try:
            return await asyncio.to_thread(ask, server)
        finally:
            server.close()

    assert asyncio.run(cell()) == [2, 4]


def test_all_that_is_wrong_with_a_file_is_told_before_anything_starts(tmp_path: Path) -> None:
    models = "".join(f"  - {{name: {name}, backends: [{{kind: onnxruntime, model: {name}.onnx}}]}}\n" for name in "ab")
    (tmp_path / "gateway.yaml").write_text(f"models:\n{models}")
    for make in (gateway.run, gateway.TestClient):
        with pytest.raises(gateway.ConfigError) as told:
            make(tmp_path / "gateway.yaml")
        assert f"{tmp_path}/a.onnx" in str(told.value)
        assert f"{tmp_path}/b.onnx" in str(told.value)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ({"placement": "replicas"}, "has placement replicas, which needs Ray: use `gateway serve`, or set placement: embedded"),
        ({"fail_opens": 99}, "m:1/synthetic: failed to load"),
    ],
)
def test_what_cannot_be_served_is_told(backend: dict[str, Any], words: str) -> None:
    config = {"models": [{"name": "m", "backends": [{"kind": "synthetic", **backend}]}]}
    with pytest.raises(gateway.GatewayError) as told:
        gateway.run(config)
    assert words in str(told.value)


def test_a_port_that_is_none_or_taken_is_told() -> None:
    before = set(threading.enumerate())
    with pytest.raises(gateway.ConfigError, match="http_port: 70000: expected a whole number from 0 to 65535"):
        gateway.run(double, http_port=70000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"server.http_port: {port}: taken by another process"):
            gateway.run(double, http_port=port)
    assert not [thread for thread in threading.enumerate() if thread.name == "gateway" and thread not in before]


@pytest.mark.slow
def test_nothing_of_it_stays_once_closed_though_a_fork_lives() -> None:
    server = gateway.run(double)
    rest, grpc_target = (("127.0.0.1", int(url.rsplit(":")[-1])) for url in (server.rest_url, server.grpc_target))
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(socket.create_connection(address, timeout=10)) for address in (rest, grpc_target)]
        kept[0].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        kept[1].sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")  # RFC 9113, section 3.4
        for connection in kept:
            assert connection.recv(1 << 16)
        with a_fork():
            server.close()
            for connection in kept:
                while connection.recv(1 << 16):
                    pass
            for address in (rest, grpc_target):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(address, timeout=10)
            with gateway.run(double, http_port=rest[1], grpc_port=grpc_target[1]) as again, a_fork():
                assert ask(again) == [2, 4]
                again.close()
                gateway.run(double, http_port=rest[1], grpc_port=grpc_target[1]).close()  # nor its claim on the ports


@pytest.mark.slow
def test_who_is_connected_hears_of_the_end_though_a_fork_has_a_copy_of_the_connection() -> None:
    server = gateway.run(double)
    with contextlib.ExitStack() as stack:
        kept = []
        for url in (server.rest_url, server.grpc_target):
            connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1])), timeout=10)
            kept.append(stack.enter_context(connection))
        kept[0].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        kept[1].sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")  # RFC 9113, section 3.4
        for connection in kept:
            assert connection.recv(1 << 16)
            stack.enter_context(a_copy_of_the_other_end(connection))
        server.close()
        for connection in kept:
            while connection.recv(1 << 16):
                pass


SCRIPT = """
import os, sys
import gateway

def triple(x: float) -> float:
    return 3 * x

server = gateway.run(triple)
model = gateway.load(triple)
if not (child := os.fork()):
    try:
        model.predict({"x": [1, 2]})
    except gateway.GatewayError as error:
        print(error, flush=True)
    sys.exit()
_, ended = os.waitpid(child, 0)
print(ended, model.predict({"x": [1, 2]})["output"].tolist(), server.models)
"""


@pytest.mark.slow
def test_a_script_that_closes_nothing_ends_in_order_and_so_does_its_fork(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    forked = "it was loaded by another process, of which this is a fork: load it here"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{forked}\n0 [3.0, 6.0] ('triple',)\n", "")
