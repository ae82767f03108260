"""Asking a server for its answers, over real sockets, and comparing them."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from backends.base import Tensors
from loadtest.errors import TargetError
from loadtest.lab.answers import MOST_INPUTS, answers_of, compared, decode_answer, spread
from loadtest.load.payloads import Request
from loadtest.load.target import Address
from loadtest.results import LoadSpec
from loadtest.search.events import UNREACHED

REQUESTS = [
    Request({"x": np.array([[number, 1.0]], np.float32)}, {"x": "FP32"}, source=f"line {number}") for number in range(1, 301)
]
ANSWERS: list[Tensors] = [{"y": 2 * request.inputs["x"]} for request in REQUESTS]


class Script:
    """What the server does next: statuses before it answers well, and how it answers."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.hang_up = 0
        self.binary = False
        self.garbage = False
        self.asked = 0
        self.lock = threading.Lock()


@contextlib.contextmanager
def rest_server(script: Script) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with script.lock:
                script.asked += 1
                status = script.statuses.pop(0) if script.statuses else 200
                if script.hang_up:
                    script.hang_up -= 1
                    self.close_connection = True
                    return
            x = self._input(body)
            head: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": list(x.shape)}
            raw = b""
            if script.binary:
                raw = (2 * x).tobytes()
                head["parameters"] = {"binary_data_size": len(raw)}
            else:
                head["data"] = (2 * x).reshape(-1).tolist()
            text = b"{" if script.garbage else json.dumps({"outputs": [head]}).encode()
            self.send_response(status)
            if script.binary:
                self.send_header("Inference-Header-Content-Length", str(len(text)))
            self.send_header("Content-Length", str(len(text) + len(raw)))
            self.end_headers()
            self.wfile.write(text + raw)

        def _input(self, body: bytes) -> np.ndarray:
            head = int(self.headers.get("Inference-Header-Content-Length", len(body)))
            (tensor,) = json.loads(body[:head])["inputs"]
            if "data" in tensor:
                return np.array(tensor["data"], np.float32).reshape(tensor["shape"])
            return np.frombuffer(body[head:], np.float32).reshape(tensor["shape"])

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def asked(target: str, protocol: Any = "rest-json", requests: list[Request] = REQUESTS, seconds: float = 30.0) -> Any:
    spec = LoadSpec(target, protocol=protocol, model="m")
    return answers_of(spec, Address.of(spec), "m", requests, seconds=seconds, stop=threading.Event())


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "binary"), [("rest-json", False), ("rest-binary", True), ("invocations", False)])
def test_every_request_gets_its_own_answer_over_rest(protocol: str, binary: bool) -> None:
    script = Script()
    script.binary = binary
    with rest_server(script) as url:
        found = asked(url, protocol)
    assert all(np.array_equal(answer["y"], expected["y"]) for answer, expected in zip(found, ANSWERS, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("raw", [True, False])
def test_every_request_gets_its_own_answer_over_grpc(raw: bool) -> None:
    class Servicer(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated without types
        def ModelInfer(self, request: Any, context: Any) -> Any:
            x = np.frombuffer(request.raw_input_contents[0], np.float32)
            response = pb.ModelInferResponse(model_name="m")
            output = response.outputs.add(name="y", datatype="FP32", shape=request.inputs[0].shape)
            if raw:
                response.raw_output_contents.append((2 * x).tobytes())
            else:
                output.contents.fp32_contents.extend((2 * x).tolist())
            return response

    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            found = asked(f"127.0.0.1:{port}", "grpc")
        finally:
            server.stop(None).wait()
    assert all(np.array_equal(answer["y"], expected["y"]) for answer, expected in zip(found, ANSWERS, strict=True))


@pytest.mark.slow
def test_a_busy_server_and_a_lost_connection_are_asked_again() -> None:
    script = Script()
    script.statuses = [503, 429, 504]
    script.hang_up = 2
    with rest_server(script) as url:
        found = asked(url, requests=REQUESTS[:8])
    assert [answer["y"][0, 0] for answer in found] == [2.0 * number for number in range(1, 9)]
    assert script.asked == 8 + 3  # two that hang up, and the refusal that they leave


@pytest.mark.slow
@pytest.mark.parametrize(("answered", "more"), [(0, ""), (1, f": {UNREACHED}")], ids=["always", "at last"])
def test_a_server_that_stays_busy_is_told_with_its_words(answered: int, more: str) -> None:
    """One that answered some of the requests may answer enough of them with more time."""
    script = Script()
    script.statuses = [200] * answered + [503] * 10_000
    told = rf"answered only {answered} of 300 .* in 0 s, 300 are needed: 503: {{.*}}{more}$"
    with rest_server(script) as url, pytest.raises(TargetError, match=told):
        asked(url, seconds=0.4)


@pytest.mark.slow
def test_a_server_that_was_busy_for_a_while_is_waited_for() -> None:
    script = Script()
    script.statuses = [503] * 8
    with rest_server(script) as url:
        assert None not in asked(url)


@pytest.mark.slow
def test_a_refusal_ends_it_at_once_with_the_servers_words() -> None:
    script = Script()
    script.statuses = [400]
    with rest_server(script) as url, pytest.raises(TargetError, match="answered 400: "):
        asked(url)
    assert script.asked < len(REQUESTS)


@pytest.mark.slow
def test_what_is_no_answer_of_the_protocol_says_so() -> None:
    script = Script()
    script.garbage = True
    with rest_server(script) as url, pytest.raises(TargetError, match="no v2 response"):
        asked(url)


def test_nothing_is_asked_when_time_is_up() -> None:
    assert asked("http://127.0.0.1:9", seconds=0.0) == [None] * len(REQUESTS)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(TargetError, match="did not answer"):
        asked("http://127.0.0.1:9")


@pytest.mark.parametrize("body", [b"{}", b"[]", b"\xff", b'{"outputs": [{"name": "y"}]}', b'{"outputs": 5}', b"[" * 100_000])
@pytest.mark.parametrize("header", [None, "2", "x", "99999"])
def test_any_answer_is_read_or_refused(body: bytes, header: str | None) -> None:
    with contextlib.suppress(TargetError):
        decode_answer(body, header)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"y": 1}, r"outputs: {'y': 1}: expected a list of tensors"),
        ([{"name": "y"}], "outputs: {'name': 'y'}: expected an object with name, datatype, shape"),
        (
            [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1]}],
            r"outputs 'y': shape \[2\]: expected a shape of 1 value",
        ),
        (
            [{"name": "y", "datatype": "FP32", "shape": 2, "parameters": {"binary_data_size": 8}}],
            "outputs 'y': shape 2, binary",
        ),
        (
            [{"name": "y", "datatype": "FP32", "shape": [2], "parameters": []}],
            r"outputs 'y': parameters \[\]: expected an object",
        ),
    ],
)
def test_what_is_wrong_in_an_answer_is_named(outputs: object, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        decode_answer(json.dumps({"outputs": outputs}).encode(), None)


def test_null_among_floats_of_an_answer_is_nan() -> None:
    output = {"name": "y", "datatype": "FP32", "shape": [2], "data": [None, 1]}
    assert np.array_equal(decode_answer(json.dumps({"outputs": [output]}).encode(), None)["y"], [np.nan, 1], equal_nan=True)


def test_nan_and_infinity_of_an_answer_are_read_as_the_gateway_writes_them() -> None:
    body = b'{"outputs":[{"name":"y","datatype":"FP32","shape":[4],"data":[NaN,Infinity,-Infinity,1]}]}'
    assert np.array_equal(decode_answer(body, None)["y"], [np.nan, np.inf, -np.inf, 1], equal_nan=True)


def test_binary_data_shorter_than_its_shape_is_refused() -> None:
    head = json.dumps(
        {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]}
    ).encode()
    assert decode_answer(head + np.ones(2, np.float32).tobytes(), str(len(head)))["y"].tolist() == [[1.0, 1.0]]
    with pytest.raises(TargetError, match="unexpected total byte size"):
        decode_answer(head + b"1234", str(len(head)))


def judged(change: Callable[[Tensors], Tensors], *, answered: int = len(REQUESTS), **options: Any) -> Any:
    theirs = [change(answer) if at < answered else None for at, answer in enumerate(ANSWERS)]
    return compared(REQUESTS, ANSWERS, theirs, **{"statistics": {}, "batched": True, **options})


def test_the_first_percentile_of_all_that_was_answered_counts() -> None:
    found = judged(lambda answer: {"y": answer["y"] * 3})
    assert (found.inputs, found.statistic, found.failure) == (300, "cosine", "")
    assert found.agreement == pytest.approx(1.0)
    turned = judged(lambda answer: {"y": answer["y"][:, ::-1]}, statistics={"": "equality"})
    assert turned.agreement == 0.0
    assert turned.statistic == "equality"


def test_too_few_answers_are_no_evidence() -> None:
    found = judged(lambda answer: answer, answered=299)
    assert found.agreement is None
    assert found.failure == f"answered only 299 of 300 requests in the time there was, 300 are needed: {UNREACHED}"


def test_outputs_of_another_form_are_told_and_not_judged() -> None:
    found = judged(lambda answer: {"z": answer["y"]})
    assert found.agreement is None
    assert found.failure == "cannot be compared: in answer 1 its outputs are z, the reference's y"


def test_a_statistic_of_an_output_that_there_is_not_is_told() -> None:
    found = judged(lambda answer: answer, statistics={"z": "cosine", "": "equality"})
    assert found.failure == "cannot be compared: agreement.statistic names z, the outputs are y"


def test_a_large_payload_is_asked_evenly() -> None:
    many = [replace(REQUESTS[0], source=str(number)) for number in range(1250)]
    chosen = [int(request.source) for request in spread(many)]
    assert len(chosen) == MOST_INPUTS
    assert chosen[:3] == [0, 2, 5]
    assert spread(REQUESTS) == REQUESTS
