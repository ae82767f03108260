"""The entry point, as SageMaker and KServe run it: what it may touch, where it listens, and how it ends."""

import contextlib
import gzip
import http.client
import io
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import yaml
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.containers.image import KILLED_S, KSERVE, LOOPBACK, SAGEMAKER, Container, lacking, started

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(lacking()), reason=lacking())]

MODEL: dict[str, Any] = {
    "name": "echo",
    "batching": {"probe_s": 0},
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
}
ROWS = json.dumps({"instances": [[1, 2]]})
V2 = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]})
ANSWER_S = 40.0
LONG_BYTES = 25 << 20
NPY = "application/x-npy"
LOADS = """
import os


class Loads:
    inputs = (("x", "FP32", (-1, 2)),)
    outputs = (("y", "FP32", (-1, 2)),)

    def __init__(self):
        with open(os.path.join(os.path.dirname(__file__), "begun")) as waits:
            waits.read()

    def predict(self, inputs):
        return {"y": inputs["x"]}
"""


def folder(tmp_path: Path, **backend: object) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    backend = {"kind": "synthetic", "fixed_ms": 5, **backend}
    (model / "gateway.yaml").write_text(yaml.safe_dump({"models": [{**MODEL, "backends": [backend]}]}))
    return model


@contextlib.contextmanager
def of_sagemaker(tmp_path: Path, model: Path, **variables: str) -> Iterator[Container]:
    with started(tmp_path, model, ["serve", *LOOPBACK], place=SAGEMAKER, variables=variables) as container:
        yield container


def ask(address: tuple[str, int], method: str, path: str, body: str = "", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def ended(container: Container, signalled_s: float) -> int:
    """Its exit code, which is there before it is killed."""
    code = container.process.wait(KILLED_S)
    assert time.monotonic() - signalled_s < KILLED_S
    return code


def test_sagemakers_container_has_one_port_writes_nowhere_and_ends_in_order(tmp_path: Path) -> None:
    with of_sagemaker(tmp_path, folder(tmp_path)) as container:
        address = container.addresses()["http"]
        assert ask(address, "GET", "/ping") == ask(address, "POST", "/ping") == (200, b"")
        assert ask(address, "POST", "/invocations", ROWS) == (200, b'{"predictions":[[1.0,2.0]]}')
        assert ask(address, "POST", "/v2/models/echo/infer", V2)[0] == 200
        assert ask(address, "GET", "/metrics")[0] == 200
        process = psutil.Process(container.process.pid)
        assert process.cmdline()[1:3] == ["-m", "gateway.cli"], "the shell is gone: signals reach the gateway"
        every = [process, *process.children(recursive=True)]
        ports = [each.laddr[1] for one in every for each in one.net_connections() if each.status == psutil.CONN_LISTEN]
        assert ports == [address[1]]
        proc = Path(f"/proc/{process.pid}")
        status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
        assert {status[name].strip() for name in ("CapInh", "CapPrm", "CapEff")} == {"0" * 16}
        mounts = [line.split()[1:4] for line in (proc / "mounts").read_text().splitlines()]
        options = {path: given.split(",") for path, _, given in mounts}
        assert all("ro" in options[path] for path in ("/", "/opt", SAGEMAKER))
        left = [path.name for path in (proc / "root/tmp").iterdir()]
        signalled_s = time.monotonic()
        container.process.terminate()
        assert ended(container, signalled_s) == 0
        assert len(left) <= 1, f"in /tmp: {left}"
        assert "Traceback" not in container.said


class Load:
    """Clients that ask again and again, each over one connection, until this is closed to them."""

    def __init__(self) -> None:
        self.answers: list[int | grpc.StatusCode] = []
        self.faults: list[BaseException] = []
        self.begun = threading.Semaphore(0)

    def _answered(self, status: int | grpc.StatusCode) -> None:
        self.answers.append(status)
        self.begun.release()

    def rest(self, address: tuple[str, int], path: str, body: str) -> None:
        connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
        try:
            while True:
                connection.request("POST", path, body)
                answer = connection.getresponse()
                answer.read()
                self._answered(answer.status)
                if answer.getheader("Connection") == "close":
                    return
        except Exception as exc:
            self.faults.append(exc)
        finally:
            connection.close()

    def grpc(self, address: tuple[str, int]) -> None:
        message = pb.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(8)])
        message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        with grpc.insecure_channel(f"{address[0]}:{address[1]}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            connected = 0
            while True:
                try:
                    stub.ModelInfer(message, timeout=ANSWER_S)
                    self._answered(200)
                    connected += 1
                except grpc.RpcError as exc:
                    if exc.code() is grpc.StatusCode.UNAVAILABLE and "onnect" in exc.details() and connected:
                        return  # no new connection is accepted: the request never was
                    self.faults.append(exc)
                    return


def under_load(container: Container, addresses: dict[str, tuple[str, int]], signals: int) -> None:
    load = Load()
    at = addresses["http"]
    asked = [(load.rest, (at, "/invocations", ROWS)), (load.rest, (at, "/v2/models/echo/infer", V2))]
    if "grpc" in addresses:
        asked.append((load.grpc, (addresses["grpc"],)))
    senders = [threading.Thread(target=send, args=given) for send, given in asked for _ in range(8)]
    for sender in senders:
        sender.start()
    for _ in range(300):
        assert load.begun.acquire(timeout=ANSWER_S)
    signalled_s = time.monotonic()
    for _ in range(signals):
        container.process.terminate()
    assert ended(container, signalled_s) == 0, container.said
    for sender in senders:
        sender.join(ANSWER_S)
    assert load.faults == []
    assert set(load.answers) == {200}
    assert len(load.answers) >= 300


@pytest.mark.parametrize("signals", [1, 2])
def test_what_sagemakers_container_accepted_is_answered_when_sigterm_comes_under_load(tmp_path: Path, signals: int) -> None:
    with of_sagemaker(tmp_path, folder(tmp_path)) as container:
        under_load(container, container.addresses(), signals)


@pytest.mark.parametrize("signals", [1, 2])
def test_what_kserves_container_accepted_is_answered_when_sigterm_comes_under_load(tmp_path: Path, signals: int) -> None:
    """With gRPC."""
    options = ["serve", "--http-port", "0", "--grpc-port", "0", *LOOPBACK]
    with started(tmp_path, folder(tmp_path), options, place=KSERVE) as container:
        under_load(container, container.addresses(), signals)


def test_bodies_of_25_mb_are_answered_however_they_come_and_ping_within_two_seconds(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    wide = {
        **MODEL,
        "inputs": [{**MODEL["inputs"][0], "shape": [-1, -1]}],
        "outputs": [{**MODEL["outputs"][0], "shape": [-1, -1]}],
    }
    backend = {"kind": "synthetic", "fixed_ms": 0, "row_ms": 0, "output": "echo"}
    (model / "gateway.yaml").write_text(yaml.safe_dump({"models": [{**wide, "backends": [backend]}]}))
    file = io.BytesIO()
    np.save(file, np.arange(LONG_BYTES // 4, dtype=np.float32).reshape(16, -1))
    npy = file.getvalue()
    number = b"0.12345,"
    csv = number * (LONG_BYTES // 8) + b"0"
    rows = b'{"instances":[[' + csv + b"]]}"
    v2 = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],"data":[%b]}]}' % (LONG_BYTES // 8 + 1, csv)
    json_bytes, binary = binary_v2(LONG_BYTES // 4)
    asked: list[tuple[str, str, bytes, dict[str, str]]] = [
        ("/invocations", NPY, npy, {}),
        ("/invocations", NPY, npy, {"Expect": "100-continue"}),
        ("/invocations", NPY, npy, {"Transfer-Encoding": "chunked"}),
        ("/invocations", NPY, gzip.compress(npy, 1), {"Content-Encoding": "gzip"}),
        ("/invocations", NPY, zlib.compress(npy, 1), {"Content-Encoding": "deflate"}),
        ("/invocations", "application/octet-stream", npy[-LONG_BYTES:], {}),
        ("/invocations", "text/csv", csv, {}),
        ("/invocations", "application/json", rows, {}),
        ("/invocations", "application/json", v2, {}),
        ("/invocations", f"application/vnd.sagemaker-triton.binary+json;json-header-size={json_bytes}", binary, {}),
    ]
    with of_sagemaker(tmp_path, model) as container, ThreadPoolExecutor(1) as pinging:
        address = container.addresses()["http"]
        pings = pinging.submit(ping_until_refused, address)
        for path, media, body, headers in asked:
            accept = "application/json" if body is binary or body is v2 else NPY
            status, answer = sent(address, path, body, {"Content-Type": media, "Accept": accept, **headers})
            assert status == 200, (media, answer[:500])
            assert len(answer) >= LONG_BYTES // 2
            if accept == NPY and media == NPY:
                assert answer == npy
        assert sent(address, "/invocations", bytes((64 << 20) + 1), {"Content-Type": NPY})[0] == 413
        container.process.terminate()
        slowest_s = pings.result(KILLED_S)
        assert slowest_s < 2.0
        assert container.process.wait(KILLED_S) == 0


def binary_v2(count: int) -> tuple[int, bytes]:
    """How much of it is JSON, and a body with so many numbers behind it."""
    tensor = b'{"name":"x","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}' % (count, 4 * count)
    head = b'{"inputs":[%b],"parameters":{"binary_data_output":true}}' % tensor
    return len(head), head + bytes(4 * count)


def sent(address: tuple[str, int], path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """chunked: in pieces of 64 kB. Of an Expect the word to continue is awaited."""
    with socket.create_connection(address, timeout=ANSWER_S) as connection, connection.makefile("rb") as answer:
        if "Transfer-Encoding" not in headers:
            headers = {**headers, "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
        if "Expect" in headers:
            assert answer.readline().startswith(b"HTTP/1.1 100 ")
            assert answer.readline() == b"\r\n"
        if "Transfer-Encoding" in headers:
            for at in range(0, len(body), 1 << 16):
                piece = body[at : at + (1 << 16)]
                connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            connection.sendall(b"0\r\n\r\n")
        else:
            with contextlib.suppress(ConnectionError):  # what is too long is not read
                connection.sendall(body)
        status = int(answer.readline().split()[1])
        told = dict(line.decode().lower().strip().split(": ", 1) for line in iter(answer.readline, b"\r\n"))
        if "content-length" in told:
            return status, answer.read(int(told["content-length"]))
        pieces = []
        while size := int(answer.readline(), 16):
            pieces.append(answer.read(size))
            answer.readline()
        return status, b"".join(pieces)


def ping_until_refused(address: tuple[str, int]) -> float:
    """The slowest answer, in seconds."""
    slowest_s = 0.0
    while True:
        begun_s = time.monotonic()
        try:
            assert ask(address, "GET", "/ping")[0] == 200
        except OSError:
            return slowest_s
        slowest_s = max(slowest_s, time.monotonic() - begun_s)
        time.sleep(0.02)


def test_requests_of_five_seconds_are_answered_though_sigterm_comes_twice(tmp_path: Path) -> None:
    model = folder(tmp_path, fixed_ms=5000, row_ms=0, sessions=2)
    sent = threading.Semaphore(0)

    def slow(address: tuple[str, int], path: str, body: str) -> int:
        with contextlib.closing(http.client.HTTPConnection(*address, timeout=ANSWER_S)) as connection:
            connection.request("GET", "/ping")
            connection.getresponse().read()  # so the connection is accepted
            connection.request("POST", path, body)
            sent.release()
            return connection.getresponse().status

    with of_sagemaker(tmp_path, model) as container, ThreadPoolExecutor(8) as clients:
        address = container.addresses()["http"]
        kinds = (("/invocations", ROWS), ("/v2/models/echo/infer", V2)) * 4
        asked = [clients.submit(slow, address, *kind) for kind in kinds]
        for _ in asked:
            assert sent.acquire(timeout=ANSWER_S)
        signalled_s = time.monotonic()
        container.process.terminate()
        until_refused(address)
        container.process.terminate()
        assert [future.result(ANSWER_S) for future in asked] == [200] * len(asked)
        assert ended(container, signalled_s) == 0


def test_sigterm_while_a_model_is_loaded_ends_it_at_once_and_in_order(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "loads.py").write_text(LOADS)
    os.mkfifo(model / "begun")
    with of_sagemaker(tmp_path, model) as container, (model / "begun").open("w"):  # which opens once the model is read
        signalled_s = time.monotonic()
        container.process.terminate()
        assert ended(container, signalled_s) == 0
        assert "Traceback" not in container.said


def until_refused(address: tuple[str, int]) -> None:
    end_s = time.monotonic() + KILLED_S
    while time.monotonic() < end_s:
        try:
            socket.create_connection(address).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    raise AssertionError("it still listens")
