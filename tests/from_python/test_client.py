"""`gateway.TestClient`: REST and gRPC without ports. That its words are those of the wire: tests/served/test_same_words.py."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import gateway
from gateway.errors import NotReady
from tests.from_python.models import Gate, double
from tests.grpc_server.serving import infer_request

CONFIG: dict[str, Any] = {
    "server": {"limits": {"body_bytes": 100_000, "header_count": 8}, "model_control": True},
    "models": [
        {
            "name": "echo é",
            "max_rows": 8,
            "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}],
            "backends": [{"kind": "synthetic", "fixed_ms": 0, "row_ms": 0, "placement": "replicas"}],
        },
        {
            "name": "hangs",
            "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}],
            "backends": [{"kind": "synthetic", "fixed_ms": 0, "faults": {"hang": 77}, "hang_timeout_s": 0.5}],
        },
    ],
}
AT = "/v2/models/echo é"


@pytest.fixture(scope="module")
def client() -> Iterator[gateway.TestClient]:
    with gateway.TestClient(CONFIG) as made:
        yield made


@pytest.fixture
def stub(client: gateway.TestClient) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(client.channel)


def body(**more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}], **more}


def test_json_holds_nan_and_infinity_as_a_client_over_the_wire_writes_them(client: gateway.TestClient) -> None:
    (given, *_) = body()["inputs"]
    answer = client.post(f"{AT}/infer", json={"inputs": [given | {"data": np.array([1, 2, float("-inf"), float("inf")])}]})
    assert answer.json()["outputs"][0]["data"] == [1, 2, float("-inf"), float("inf")]
    answer = client.post(f"{AT}/infer", json={"inputs": [given | {"data": [float("nan"), 2, 3, 4]}]})
    assert np.isnan(answer.json()["outputs"][0]["data"][0])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"content": "{}"}, "content: got str, expected bytes"),
        ({"json": {1}}, "json: got set: expected what JSON can hold, and numpy arrays"),
        ({"json": np.array(["2020-01-01"], "M8[ns]")}, "json: got datetime64[ns]: expected what JSON can hold"),
        ({"json": [np.longdouble(1)]}, f"json: got {np.dtype(np.longdouble)}: expected what JSON can hold"),
        ({"headers": [("a", "b")]}, "headers: got list, expected a dict of text by name"),
        ({"headers": {"a": "b\r\nc: d"}}, "a header, or the method, holds the end of a line"),
        ({"path": None}, "path: got NoneType, expected text"),
        ({"method": 3}, "method: got int, expected text"),
    ],
    ids=["content", "json", "times", "long double", "headers", "line", "path", "method"],
)
def test_what_makes_no_request_is_refused_with_its_name(client: gateway.TestClient, fault: dict[str, Any], words: str) -> None:
    with pytest.raises(gateway.ConfigError, match=f"^{re.escape(words)}"):
        client.request(**{"method": "POST", "path": "/v2", **fault})


def test_a_json_request_is_answered(client: gateway.TestClient) -> None:
    answer = client.post(f"{AT}/infer", json=body(id="7"))
    assert (answer.status_code, answer.json()["id"], answer.json()["outputs"][0]["data"]) == (200, "7", [1, 2, 3, 4])
    assert answer.headers["content-type"] == "application/json"
    given = [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": np.ones((1, 4), np.float32)}]
    assert client.post(f"{AT}/infer", json={"inputs": given}).json()["outputs"][0]["data"] == [1, 1, 1, 1]
    infinite = json.dumps({"inputs": [given[0] | {"data": [1, 2, 3, float("inf")]}]}).encode()
    assert client.post(f"{AT}/infer", content=infinite).json()["outputs"][0]["data"] == [1, 2, 3, float("inf")]


def test_the_request_that_an_error_shows_has_the_content_that_the_model_was_tried_with(tmp_path: Path) -> None:
    (tmp_path / "number.py").write_text("def predict(text: str) -> float:\n    return float(text)\n")
    with gateway.TestClient(tmp_path / "number.py") as client:
        path = "/v2/models/number/infer"
        smallest = client.post(path, json={"inputs": []}).json()["error"].partition("the smallest request: ")[2]
        assert client.post(path, content=smallest.encode()).json()["outputs"][0]["data"] == [1.0]


def test_a_binary_request_is_answered(client: gateway.TestClient) -> None:
    tensor = np.arange(8, dtype=np.float32).reshape(2, 4)
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": tensor.nbytes}}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    answer = client.post(
        f"{AT}/infer", content=head + tensor.tobytes(), headers={"Inference-Header-Content-Length": str(len(head))}
    )
    length = int(answer.headers["Inference-Header-Content-Length"])
    assert np.frombuffer(answer.content[length:], np.float32).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/", 200, '"Open Inference Protocol v2"'),
        ("GET", "/v2/models", 200, '"echo é"'),
        ("GET", f"{AT}/ready", 200, '"ready":true'),
        ("GET", "/openapi.json", 200, '"openapi":"3.1.0"'),
        ("GET", "/metrics", 200, "gateway_requests_total"),
        ("GET", "/v2/models/echo%20%C3%A9/route?rows=4", 200, '"rows":4'),
        ("HEAD", "/v2", 200, ""),
        ("GET", "/v3", 404, "no such path"),
        ("PUT", "/v2", 405, "Method Not Allowed: expected GET or HEAD"),
        ("GET", "/v2/models/ecko/ready", 400, "not ready"),
    ],
)
def test_every_path_is_there_with_its_status(
    method: str, path: str, status: int, words: str, client: gateway.TestClient
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


def test_limits_hold_as_they_do_on_a_socket(client: gateway.TestClient) -> None:
    assert client.post(f"{AT}/infer", content=b"x" * 100_001).status_code == 413
    assert client.get("/v2", headers={f"x-{number}": "1" for number in range(9)}).status_code == 431
    assert client.post(f"{AT}/infer", content=b"x" * 100_000).status_code == 400
    large = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2000, 4], "data": [0] * 8000}]}
    assert client.post(f"{AT}/infer", json=large).status_code == 200  # of several reads


def test_a_host_may_be_given_in_any_case(client: gateway.TestClient) -> None:
    assert client.get("/v2", headers={"host": "example"}).status_code == 200


def test_a_header_cannot_hold_another(client: gateway.TestClient) -> None:
    with pytest.raises(gateway.ConfigError, match="holds the end of a line"):
        client.get("/v2", headers={"a": "b\r\nc: d"})
    with pytest.raises(gateway.ConfigError, match="json and content: expected one of them"):
        client.post("/v2", json={}, content=b"")


def test_models_can_be_unloaded_and_loaded(client: gateway.TestClient) -> None:
    assert client.post("/v2/repository/models/hangs/unload").status_code == 200
    assert client.get("/v2/models/hangs/ready").status_code == 400
    assert client.post("/v2/repository/models/hangs/load").status_code == 200


def test_a_stub_works_on_the_channel(stub: Any) -> None:
    answer = stub.ModelInfer(infer_request("echo é", 3.0, request_id="a"))
    assert (answer.id, np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()) == ("a", [3, 3, 3, 3])
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    assert [model.name for model in stub.RepositoryIndex(pb.RepositoryIndexRequest()).models] == ["echo é", "hangs"]


def test_a_stub_gives_the_call_with_the_answer_and_futures(stub: Any) -> None:
    answer, call = stub.ModelInfer.with_call(infer_request("echo é", 3.0, request_id="a"), timeout=20)
    assert (answer.id, call.code(), call.details()) == ("a", grpc.StatusCode.OK, "")
    ended = threading.Event()
    future = stub.ModelInfer.future(request=infer_request("echo é", 3.0, request_id="b"))
    future.add_done_callback(lambda _: ended.set())
    assert future.result(20).id == "b"
    assert ended.wait(20)
    failed = stub.ModelInfer.future(infer_request("ecko", 3.0)).exception(20)
    assert isinstance(failed, grpc.RpcError)
    assert failed.code() is grpc.StatusCode.NOT_FOUND
    assert str(failed) == f"NOT_FOUND: {failed.details()}"


def test_a_future_that_is_cancelled_says_so() -> None:
    Gate.opened.set()
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 1])
    with gateway.TestClient(Gate) as client:
        Gate.opened.clear()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        future = stub.ModelInfer.future(pb.ModelInferRequest(model_name="Gate", inputs=[tensor], raw_input_contents=[b"1234"]))
        with pytest.raises(grpc.FutureTimeoutError):
            future.result(0.01)
        assert future.is_active()
        assert future.cancel()
        assert (future.cancelled(), future.code()) == (True, grpc.StatusCode.CANCELLED)
        with pytest.raises(grpc.FutureCancelledError):
            future.result(20)
        Gate.opened.set()


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
def test_a_method_that_is_none_is_not_implemented(client: gateway.TestClient, kind: str) -> None:
    call = getattr(client.channel, kind)("/inference.GRPCInferenceService/Nothing", lambda _: b"", lambda _: None)
    with pytest.raises(grpc.RpcError) as raised:
        list(call(iter([None]) if kind.startswith("stream") else None, timeout=20))
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_deadline_of_a_stream_is_that_of_the_whole(stub: Any) -> None:
    asked = 0

    def requests() -> Iterator[Any]:
        nonlocal asked
        while True:
            asked += 1
            yield infer_request("echo é", 3.0)
            time.sleep(0.1)

    answers: list[Any] = []
    with pytest.raises(grpc.RpcError) as raised:
        answers.extend(stub.ModelStreamInfer(requests(), timeout=0.5))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(answers) < 10
    time.sleep(0.3)
    assert asked <= len(answers) + 3  # nobody reads them any more


def test_an_error_has_grpcs_status_and_words(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as told:
        stub.ModelMetadata(pb.ModelMetadataRequest(name="ecko é"))
    assert told.value.code() is grpc.StatusCode.NOT_FOUND
    assert told.value.details().startswith("Request for unknown model: 'ecko é' is not found; did you mean 'echo é'?")
    assert str(told.value).startswith("NOT_FOUND: Request for")
    with pytest.raises(grpc.RpcError) as told:
        stub.ModelInfer(pb.ModelInferRequest(raw_input_contents=[b"x" * 100_000]))
    assert told.value.details() == "a message of 100004 bytes, expected at most 100000 (server.limits.body_bytes)"


def test_a_deadline_passes_as_over_the_wire(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as told:
        stub.ModelInfer(infer_request("hangs", 77.0), timeout=0.05)
    assert told.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_stream_answers_in_order_and_tells_errors_within(stub: Any) -> None:
    sent = [
        infer_request("echo é", 1.0, request_id="1"),
        infer_request("no", request_id="2"),
        infer_request("echo é", request_id="3"),
    ]
    answers = list(stub.ModelStreamInfer(iter(sent)))
    assert [answer.infer_response.id for answer in answers] == ["1", "2", "3"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, False]


def test_a_stream_can_be_a_conversation(stub: Any) -> None:
    go_on = threading.Semaphore(1)

    def requests() -> Iterator[pb.ModelInferRequest]:
        for number in range(3):
            go_on.acquire()
            yield infer_request("echo é", float(number), request_id=str(number))

    found = []
    for answer in stub.ModelStreamInfer(requests(), timeout=20):
        found.append(answer.infer_response.id)
        go_on.release()
    assert found == ["0", "1", "2"]


def test_what_the_callers_own_requests_raise_ends_the_stream(stub: Any) -> None:
    def requests() -> Iterator[pb.ModelInferRequest]:
        yield infer_request("echo é")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(stub.ModelStreamInfer(requests()))


def test_health_is_watched_until_nobody_looks(client: gateway.TestClient) -> None:
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_no_port_is_opened(client: gateway.TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a socket was bound")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with gateway.TestClient(double) as other:
        assert other.get("/v2/health/ready").json() == {"ready": True}


def test_a_test_that_imports_it_does_not_collect_it() -> None:
    assert gateway.TestClient.__test__ is False


def test_after_close_nothing_can_be_asked() -> None:
    client = gateway.TestClient(double)
    client.close()
    with pytest.raises(NotReady, match="it has been closed"):
        client.get("/v2")
