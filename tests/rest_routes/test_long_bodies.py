"""Long JSON bodies, decoded in a process of its own, through the REST edge."""

import asyncio
import contextlib
import errno
import http.client
import json
import os
import resource
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from backends.base import ModelSpec, TensorSpec
from gateway.engine.long_bodies import LongBodies
from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.errors import InternalError, NotReady
from gateway.protocols.rest import RestCodec
from gateway.protocols.tensors import LONG_BYTES, LONG_JSON_BYTES
from gateway.types import InferRequest
from tests.rest_routes.serving import TIMEOUT_S, Served, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("regions")) as served:
        yield served


def asked(served: Served, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def infer_body(values: np.ndarray, **more: Any) -> bytes:
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": list(values.shape), "data": values.tolist()}
    return json.dumps({**more, "inputs": [entry]}).encode()


def values(columns: int = 8192) -> np.ndarray:
    return np.random.default_rng(columns).standard_normal((8, columns)).astype(np.float32)


def nested(declared: int, count: int) -> bytes:
    """So many lists of one element."""
    data = b",".join([b"[1]"] * count)
    return b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,%d],"data":[%b]}]}' % (declared, data)


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        if child.status() != psutil.STATUS_ZOMBIE and "gateway.engine.long_bodies" in child.cmdline():
            found.append(child)
    return found


def end_children() -> None:
    had = children()
    for child in had:
        child.kill()
    psutil.wait_procs(had, TIMEOUT_S)


def test_a_long_body_is_answered_as_a_short_one_is(served: Served) -> None:
    sent = values()
    body = infer_body(sent, id="seven", outputs=[{"name": "OUTPUT0"}])
    assert len(body) > LONG_JSON_BYTES
    status, answer = asked(served, "/v2/models/wide/infer", body)
    assert status == 200
    assert answer["id"] == "seven"
    (output,) = answer["outputs"]
    assert output["shape"] == [8, 8192]
    np.testing.assert_array_equal(np.array(output["data"], np.float32).reshape(8, 8192), sent)


def test_text_and_bytes_behind_the_json_come_through_as_well(served: Served) -> None:
    words = [f"wörd {index}" + "!" * 10_000 for index in range(120)]
    entry = {"name": "IN", "datatype": "BYTES", "shape": [120, 1], "data": words}
    status, answer = asked(served, "/v2/models/a+b%20c%C3%A9/infer", json.dumps({"inputs": [entry]}).encode())
    assert (status, answer["outputs"][0]["data"]) == (200, words)

    numbers = np.arange(4, dtype=np.float32).reshape(2, 2)
    raw = np.arange(4, dtype=np.int32).tobytes()
    entries = [
        {"name": "A", "datatype": "FP32", "shape": [2, 2], "data": numbers.tolist()},
        {"name": "B", "datatype": "INT32", "shape": [2, 2], "parameters": {"binary_data_size": len(raw)}},
    ]
    head = json.dumps({"inputs": entries}).encode() + b" " * LONG_JSON_BYTES
    status, answer = asked(
        served, "/v2/models/pair/versions/1/infer", head + raw, Inference_Header_Content_Length=str(len(head))
    )
    assert status == 200, answer
    assert answer["outputs"][1]["data"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (infer_body(values(), parameters={"triton_x": 1}), "reserved"),
        (
            infer_body(values(), parameters=dict.fromkeys(map(str, range(4097)), 1)),
            "parameters: got 4097, expected at most 4096",
        ),
        (infer_body(values(), parameters={"p": "é" * (256 << 10)}), "262145 of them in 'p', expected at most 262144"),
        (infer_body(values(), outputs=[{"name": "OUTPUT0"}] * 4097), "outputs: got 4097, expected at most 4096"),
        (infer_body(values()).replace(b'"FP32"', b'"INT8"'), "expected FP32"),
        (infer_body(values()).replace(b"[8, 8192]", b"[8, 8191]"), "got 65536 elements, expected 65528"),
        (infer_body(values())[:-1], "failed to parse"),
        (b"[" * 1_200_000, "malformed"),
        (b'{"id": "' + b"a" * 1_200_000, "failed to parse"),
        (infer_body(np.full((1, 1 << 17), np.nan), id="?").replace(b"?", b"\xed\xa0\x80"), "failed to parse"),
    ],
)
def test_a_long_body_is_refused_in_the_words_of_a_short_one(served: Served, body: bytes, said: str) -> None:
    status, answer = asked(served, "/v2/models/wide/infer", body)
    assert status == 400
    assert said in answer["error"]


def test_parameters_of_a_long_request_come_through_up_to_their_limit(served: Served) -> None:
    parameters = dict.fromkeys(map(str, range(4096)), 1)
    assert asked(served, "/v2/models/wide/infer", infer_body(values(), parameters=parameters))[0] == 200
    fields = {"INPUT0": values().tolist(), **parameters}
    assert asked(served, "/v2/models/wide/generate", json.dumps(fields).encode())[0] == 200
    status, answer = asked(served, "/v2/models/wide/generate", json.dumps({**fields, "one": "more"}).encode())
    assert (status, answer["error"]) == (400, "parameters: got 4097, expected at most 4096 in one request")


def test_what_pythons_reader_must_read_is_long_from_less_on(served: Served) -> None:
    end_children()
    sent = np.full((1, 20_000), np.nan, np.float32)
    status, answer = asked(served, "/v2/models/wide/infer", infer_body(sent))
    assert status == 200
    np.testing.assert_array_equal(np.array(answer["outputs"][0]["data"], np.float32), sent[0])
    status, answer = asked(served, "/v2/models/wide/generate", json.dumps({"INPUT0": sent.tolist()}).encode())
    assert status == 200
    np.testing.assert_array_equal(np.array(answer["OUTPUT0"], np.float32), sent[0])
    assert len(children()) == 1


def test_a_long_request_to_generate_is_answered(served: Served) -> None:
    sent = values()
    body = json.dumps({"INPUT0": sent.tolist()}).encode()
    status, answer = asked(served, "/v2/models/wide/generate", body)
    assert status == 200
    np.testing.assert_array_equal(np.array(answer["OUTPUT0"], np.float32).reshape(8, 8192), sent)


def test_many_elements_of_text_behind_the_json_are_answered_up_to_a_limit(tmp_path: Path) -> None:
    models = """
    models:
      - name: words
        max_rows: 0
        inputs: [{name: IN, datatype: BYTES, shape: [-1]}]
        outputs: [{name: OUT, datatype: BYTES, shape: [-1]}]
        backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
    """

    def request(count: int) -> tuple[bytes, str]:
        raw = b"\1\0\0\0x" * count
        parameters = {"binary_data_size": len(raw)}
        entry = {"name": "IN", "datatype": "BYTES", "shape": [count], "parameters": parameters}
        head = json.dumps({"inputs": [entry]}).encode()
        return head + raw, str(len(head))

    with serving(tmp_path, models) as own:
        body, size = request(100_000)
        status, answer = asked(own, "/v2/models/words/infer", body, Inference_Header_Content_Length=size)
        assert (status, answer["outputs"][0]["data"]) == (200, ["x"] * 100_000)
        body, size = request((1 << 18) + 1)
        status, answer = asked(own, "/v2/models/words/infer", body, Inference_Header_Content_Length=size)
        assert status == 400
        assert answer["error"] == "input 'IN': 262145 BYTES elements, expected at most 262144 in one tensor"


@contextlib.contextmanager
def registered(served: Served, name: str, sent: np.ndarray) -> Iterator[Path]:
    """A region of this name that holds these; gives its file."""
    key = f"/gateway-test-{uuid.uuid4().hex}"
    segment = Path(f"/dev/shm{key}")
    segment.write_bytes(sent.tobytes())
    try:
        region = json.dumps({"key": key, "byte_size": sent.nbytes}).encode()
        assert ask_raw(served, f"/v2/systemsharedmemory/region/{name}/register", region) == 200
        yield segment
    finally:
        segment.unlink()


def test_a_long_region_is_read_elsewhere(served: Served) -> None:
    sent = np.arange(10 << 20, dtype=np.float32)
    with registered(served, "long", sent) as segment:
        where = {"shared_memory_region": "long", "shared_memory_byte_size": sent.nbytes}
        entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1, sent.size], "parameters": where}
        outputs = [{"name": "OUTPUT0", "parameters": where}]
        body = json.dumps({"inputs": [entry], "outputs": outputs}).encode()
        status, answer = asked(served, "/v2/models/wide/infer", body)
        assert status == 200, answer
        np.testing.assert_array_equal(np.fromfile(segment, np.float32), sent)


def test_no_region_stays_open_where_a_long_body_was_read(served: Served) -> None:
    sent = values()
    with registered(served, "closed", sent) as segment:
        where = {"shared_memory_region": "closed", "shared_memory_byte_size": sent.nbytes}
        entry = {"name": "INPUT0", "datatype": "FP32", "shape": list(sent.shape), "parameters": where}
        body = json.dumps({"inputs": [entry], "id": "i" * LONG_JSON_BYTES}).encode()
        status, answer = asked(served, "/v2/models/wide/infer", body)
        assert status == 200, answer
        assert children()
        assert str(segment) not in [file.path for child in children() for file in child.open_files()]


def ask_raw(served: Served, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=TIMEOUT_S)
    connection.request("POST", path, body)
    status = connection.getresponse().status
    connection.close()
    return status


def test_what_is_no_inference_is_refused_when_it_is_long(served: Served) -> None:
    status, answer = asked(served, "/v2/repository/index", b'{"x": "' + b"a" * LONG_BYTES + b'"}')
    assert status == 413
    assert str(LONG_BYTES) in answer["error"]


def test_a_process_that_dies_costs_the_request_that_it_had(served: Served) -> None:
    end_children()
    assert asked(served, "/v2/models/wide/infer", nested(3, 1 << 20))[0] == 400
    had = children()
    for child in had:
        resource.prlimit(child.pid, resource.RLIMIT_AS, (1, 1))  # no memory for the next
    status, answer = asked(served, "/v2/models/wide/infer", nested(3, 8 << 20))
    assert status == 500
    assert "lost" in answer["error"]
    assert asked(served, "/v2/models/wide/infer", nested(3, 8 << 20))[0] == 400
    assert children() != had


def test_a_process_that_ended_while_it_had_nothing_costs_nothing(served: Served) -> None:
    assert asked(served, "/v2/models/wide/infer", infer_body(values()))[0] == 200
    end_children()
    assert asked(served, "/v2/models/wide/infer", infer_body(values()))[0] == 200


def test_where_no_process_can_be_started_a_long_body_may_be_sent_again(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*about: object, **more: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    end_children()
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", refuse)
        status, answer = asked(served, "/v2/models/wide/infer", infer_body(values()))
    assert (status, answer["error"]) == (
        503, "what decodes long requests could not be started: OSError: [Errno 24] Too many open files"
    )  # fmt: skip
    assert asked(served, "/v2/models/wide/infer", infer_body(values()))[0] == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


def test_what_is_long_does_not_wait_for_what_is_much_longer(served: Served) -> None:
    end_children()
    assert asked(served, "/v2/models/wide/infer", infer_body(values()))[0] == 200
    had = children()
    longer = threading.Thread(target=asked, args=(served, "/v2/models/wide/infer", nested(3, 1 << 20)))
    longer.start()
    while not (others := [child for child in children() if child not in had]):
        pass
    for child in others:
        child.suspend()
    try:
        assert asked(served, "/v2/models/wide/infer", infer_body(values()))[0] == 200
        assert longer.is_alive()
    finally:
        for child in others:
            child.resume()
        longer.join(TIMEOUT_S)


def test_a_client_that_leaves_while_its_body_is_decoded_is_counted_as_cancelled(served: Served) -> None:
    assert asked(served, "/v2/models/wide/infer", infer_body(values()))[0] == 200
    for child in children():
        child.suspend()
    try:
        body = infer_body(values())
        with socket.create_connection(("127.0.0.1", served.port)) as leaving:
            leaving.sendall(b"POST /v2/models/wide/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while not asked_cancelled(served):
            pass
    finally:
        for child in children():
            child.resume()
    assert asked(served, "/v2/models/wide/infer", infer_body(values()))[0] == 200


def asked_cancelled(served: Served) -> int:
    """How many requests were cancelled."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=TIMEOUT_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    lines = (line for line in text.splitlines() if 'code="cancelled"' in line and 'model="wide"' in line)
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


def test_a_body_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    spec = ModelSpec("x", (TensorSpec("INPUT0", "FP32", (-1, -1)),), (TensorSpec("OUTPUT0", "FP32", (-1, -1)),), 1 << 30)
    codec = RestCodec("echo", "1", spec, None, 32)

    async def outcomes() -> list[Any]:
        bodies = LongBodies(SharedMemoryRegions(tmp_path / "regions"), timeout_s=0.2)
        found: list[Any] = []
        try:
            for body in (nested(4 << 20, 4 << 20), infer_body(values())):
                done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                bodies.infer(codec, body, None, 0, done.set_result)
                found.append(await done)
        finally:
            bodies.close()
        with pytest.raises(NotReady):
            bodies.infer(codec, b"", None, 0, found.append)
        return found

    late, next_one = asyncio.run(outcomes())
    assert isinstance(late, InternalError)
    assert isinstance(next_one, InferRequest)
    assert next_one.rows == 8


def test_a_process_that_is_stopped_costs_the_request_that_it_had(tmp_path: Path) -> None:
    spec = ModelSpec("x", (TensorSpec("INPUT0", "FP32", (-1, -1)),), (TensorSpec("OUTPUT0", "FP32", (-1, -1)),), 1 << 30)
    codec = RestCodec("echo", "1", spec, None, 32)

    async def outcomes() -> list[Any]:
        bodies = LongBodies(SharedMemoryRegions(tmp_path / "regions"), late_s=10)
        others = {child.pid for child in children()}
        found: list[Any] = []
        try:
            for turn in range(3):
                done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                if turn == 1:
                    (own,) = (child for child in children() if child.pid not in others)
                    own.suspend()
                bodies.infer(codec, infer_body(values()), None, 0, done.set_result)
                found.append(await done)
        finally:
            bodies.close()
        return found

    first, stopped, next_one = asyncio.run(outcomes())
    assert isinstance(stopped, InternalError)
    assert all(isinstance(each, InferRequest) for each in (first, next_one))


def test_a_fault_of_ours_costs_its_request_and_not_the_process(tmp_path: Path) -> None:
    spec = ModelSpec("x", (TensorSpec("INPUT0", "FP32", (-1, -1)),), (TensorSpec("OUTPUT0", "FP32", (-1, -1)),), 1 << 30)
    no_depth: Any = None  # no codec has it

    async def outcomes() -> list[Any]:
        bodies = LongBodies(SharedMemoryRegions(tmp_path / "regions"))
        before = {child.pid for child in children()}
        found: list[Any] = []
        try:
            for json_depth in (no_depth, 32):
                done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                bodies.infer(RestCodec("echo", "1", spec, None, json_depth), infer_body(values()), None, 0, done.set_result)
                found += [await done, {child.pid for child in children()} - before]
        finally:
            bodies.close()
        return found

    fault, had, next_one, have = asyncio.run(outcomes())
    assert isinstance(fault, InternalError)
    assert "TypeError" in fault.message
    assert isinstance(next_one, InferRequest)
    assert have == had


def test_others_are_answered_while_a_long_body_is_decoded(served: Served) -> None:
    """In a small part of the time that decoding takes."""
    bomb = nested(4, 4 << 20)
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(asked(served, "/v2/models/wide/infer", bomb)))
    asking.start()
    slowest, began = 0.0, time.monotonic()
    while not answers:
        begun = time.monotonic()
        assert asked(served, "/v2/models/wide/infer", infer_body(values(1)))[0] == 200
        slowest = max(slowest, time.monotonic() - begun)
    took = time.monotonic() - began
    asking.join()
    ((status, answer),) = answers
    assert status == 400
    assert "expected 4" in answer["error"]
    assert slowest < max(0.5, took / 4)  # a busy machine slows down both


def test_the_process_ends_with_its_server(tmp_path: Path) -> None:
    with serving(tmp_path) as own:
        before = {child.pid for child in children()}
        assert asked(own, "/v2/models/wide/infer", infer_body(values()))[0] == 200
        (child,) = [child for child in children() if child.pid not in before]
    assert not child.is_running()


def test_the_process_gives_way_to_its_server(served: Served) -> None:
    assert asked(served, "/v2/models/wide/infer", infer_body(values()))[0] == 200
    (child, *_) = children()
    assert child.nice() == os.nice(0) + 5
    with contextlib.suppress(FileNotFoundError):  # not a Linux that shares processors among sessions
        assert Path(f"/proc/{child.pid}/autogroup").read_text().endswith(" nice 5\n")


def test_the_process_takes_no_more_memory_than_is_said(served: Served) -> None:
    body = nested(2 << 20, 2 << 20)
    assert asked(served, "/v2/models/wide/infer", body)[0] == 200
    for child in children():
        status = Path(f"/proc/{child.pid}/status").read_text()
        peak_bytes = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
        assert peak_bytes < 64 * len(body) + (256 << 20)
