"""Paths, methods, statuses and bodies of the REST edge, over the wire."""

import http.client
import json
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rest_routes.serving import Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("rest")) as running:
        yield running


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        (message,) = self.json().values()
        return str(message)


def ask(served: Served, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    connection = http.client.HTTPConnection(served.url, timeout=30)  # a long body has to share the processors
    try:
        if isinstance(body, dict | list):
            body = json.dumps(body)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def row(*values: float, **fields: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": values or (1, 2, 3, 4)}], **fields}


# metadata and health


def test_the_server_describes_itself(served: Served) -> None:
    for path in ("/v2", "/v2/", "/v2?x=1"):
        answer = ask(served, "GET", path)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert set(answer.json()) == {"name", "version", "extensions"}


def test_health(served: Served) -> None:
    assert ask(served, "GET", "/v2/health/live").json() == {"live": True}
    assert ask(served, "GET", "/v2/health/ready").json() == {"ready": True}
    assert ask(served, "GET", "/ping").status == 200


def test_a_model_describes_itself(served: Served) -> None:
    for path in ("/v2/models/pair", "/v2/models/p%61ir"):
        assert ask(served, "GET", path).json()["versions"] == ["1", "2"]
    assert ask(served, "GET", "/v2/models/pair/versions/2").json()["versions"] == ["2"]
    metadata = ask(served, "GET", "/v2/models/pair/versions/1").json()
    assert metadata["inputs"][1] == {"name": "B", "datatype": "INT32", "shape": [-1, 2]}
    assert ask(served, "GET", "/v2/models/pair/versions/1/config").json()["input"][1]["data_type"] == "TYPE_INT32"


def test_readiness_of_models(served: Served) -> None:
    assert ask(served, "GET", "/v2/models/echo/ready").json() == {"name": "echo", "ready": True}
    assert ask(served, "GET", "/v2/models/pair/versions/2/ready").status == 200
    assert "fail_opens" in ask(served, "GET", "/v2/models/half/ready").json()["missing"]["absent"]
    for path in ("/v2/models/nope/ready", "/v2/models/later/ready", "/v2/models/pair/versions/7/ready"):
        answer = ask(served, "GET", path)
        assert (answer.status, answer.error) == (400, "Model version not ready")


def test_statistics(served: Served) -> None:
    ask(served, "POST", "/v2/models/echo/infer", row())
    (echo,) = ask(served, "GET", "/v2/models/echo/stats").json()["model_stats"]
    assert echo["inference_stats"]["success"]["count"] >= 1
    everything = ask(served, "GET", "/v2/models/stats").json()["model_stats"]
    assert {(model["name"], model["version"]) for model in everything} >= {("echo", "1"), ("pair", "1"), ("pair", "2")}


def test_metrics_are_exposed(served: Served) -> None:
    body = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "BYTES", "data": ["é"]}]}
    ask(served, "POST", "/v2/models/a+b%20c%C3%A9/infer", body)
    answer = ask(served, "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"gateway_requests_total" in answer.body


def test_names_are_percent_quoted(served: Served) -> None:
    body = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "BYTES", "data": ["é"]}]}
    answer = ask(served, "POST", "/v2/models/a+b%20c%C3%A9/infer", body)
    assert answer.json()["model_name"] == "a+b cé"
    assert answer.json()["outputs"][0]["data"] == ["é"]


def test_head_is_get_without_the_body(served: Served) -> None:
    answer = ask(served, "HEAD", "/v2/health/live")
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "13")


# what is not there


@pytest.mark.parametrize(
    "path",
    ["/foo", "/v2/foo", "/v2/models/echo/", "/v2/models/echo/foo", "/v2/models//ready",
     "/v2/models/echo/versions/", "/v2/health/live/", "/v2/health", "//v2", "/V2",
     "/v2/systemsharedmemory/region//status", "/v2/models/echo/versions/1/2"],
)  # fmt: skip
def test_unknown_paths_are_404(served: Served, path: str) -> None:
    answer = ask(served, "GET", path)
    assert (answer.status, answer.error) == (404, "Not Found: no such path; GET / says what is here")


def test_a_path_that_is_no_text_is_refused(served: Served) -> None:
    assert ask(served, "GET", "/v2/models/%ff").status == 400


def test_unknown_models_are_404(served: Served) -> None:
    for method, path in (("GET", "/v2/models/nope"), ("GET", "/v2/models/nope/config"), ("POST", "/v2/models/nope/infer")):
        answer = ask(served, method, path, b"{}" if method == "POST" else None)
        assert answer.status == 404
        assert answer.error.startswith(
            "Request for unknown model: 'nope' is not found; models here: 'echo', 'pair', 'a+b cé', "
        )
    for version in ("3", "x"):
        answer = ask(served, "POST", f"/v2/models/pair/versions/{version}/infer", row())
        words = f"Request for unknown model: 'pair' version {version} is not found; versions here: '1', '2'"
        assert (answer.status, answer.error) == (404, words)


def test_an_unknown_model_is_told_the_near_one_and_never_more_than_fits(served: Served) -> None:
    assert "; did you mean 'echo'? models here: " in ask(served, "GET", "/v2/models/ecko").error
    answer = ask(served, "GET", f"/v2/models/{'n' * 5000}")
    assert answer.status == 404
    assert len(answer.error) < 1000
    assert "models here: 'echo'" in answer.error


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v2/models/echo/infer", "POST"),
        ("DELETE", "/v2/models/echo/infer", "POST"),
        ("OPTIONS", "/v2/models/echo/infer", "POST"),
        ("POST", "/v2/models/echo", "GET, HEAD"),
        ("POST", "/v2/health/live", "GET, HEAD"),
        ("GET", "/v2/repository/index", "POST"),
        ("PUT", "/v2/logging", "GET, HEAD, POST"),
    ],
)
def test_another_method_is_told_which_is_allowed(served: Served, method: str, path: str, allowed: str) -> None:
    answer = ask(served, method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


def test_options_of_the_server_are_told(served: Served) -> None:
    answer = ask(served, "OPTIONS", "*")
    assert (answer.status, answer.headers["allow"]) == (200, "GET, HEAD, POST, OPTIONS")
    assert ask(served, "GET", "*").status == 405


def test_what_is_not_offered_says_so(served: Served) -> None:
    for method, path in (("GET", "/v2/logging"), ("POST", "/v2/trace/setting"), ("GET", "/v2/models/echo/trace/setting")):
        assert ask(served, method, path, b"{}" if method == "POST" else None).status == 501


def test_long_paths_are_not_kept(served: Served) -> None:
    ask(served, "GET", "/v2")
    tracemalloc.start()
    try:
        connection = http.client.HTTPConnection(served.url, timeout=10)
        for number in range(100):
            connection.request("GET", f"/v2/models/{number:030000}/ready")
            assert connection.getresponse().read()
        connection.close()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20  # each is 30 kB, and so is the name in it
    finally:
        tracemalloc.stop()


# inference


def test_inference(served: Served) -> None:
    answer = ask(served, "POST", "/v2/models/echo/infer", row(id="7"))
    assert answer.body == (
        b'{"id":"7","model_name":"echo","model_version":"1","outputs":[{"name":"OUTPUT0","datatype":"FP32","shape":[1,4],'
        b'"data":[1.0,2.0,3.0,4.0]}]}'
    )


def test_the_version_is_the_one_asked_for_or_the_highest(served: Served) -> None:
    pair = {"inputs": [
        {"name": "A", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]},
        {"name": "B", "shape": [1, 2], "datatype": "INT32", "data": [3, 4]},
    ]}  # fmt: skip
    assert ask(served, "POST", "/v2/models/pair/versions/1/infer", pair).json()["model_version"] == "1"
    plain = {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": list(range(16))}]}
    assert ask(served, "POST", "/v2/models/pair/infer", plain).json()["model_version"] == "2"


def test_binary_in_and_out(served: Served) -> None:
    raw = struct.pack("<4f", 1, 2, 3, 4)
    head = json.dumps(
        {
            "inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    answer = ask(served, "POST", "/v2/models/echo/infer", head + raw, Inference_Header_Content_Length=str(len(head)))
    at = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert json.loads(answer.body[:at])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert answer.body[at:] == raw


def test_a_raw_body_is_answered_with_raw_outputs(served: Served) -> None:
    raw = struct.pack("<4f", 1, 2, 3, 4)
    answer = ask(served, "POST", "/v2/models/echo/infer", raw, Inference_Header_Content_Length="0")
    assert answer.body.endswith(raw)


@pytest.mark.parametrize("length", ["9999", "-1", "abc"])
def test_a_wrong_header_length_is_refused(served: Served, length: str) -> None:
    answer = ask(served, "POST", "/v2/models/echo/infer", b"{}", Inference_Header_Content_Length=length)
    assert answer.status == 400
    assert answer.error == f"inference header size should be in range (0, 2), got: {length}"


def test_a_bad_request_is_refused_and_counted(served: Served) -> None:
    answer = ask(served, "POST", "/v2/models/echo/infer", b"{bad")
    assert answer.status == 400
    assert b'gateway_requests_total{code="invalid_argument",model="echo"' in ask(served, "GET", "/metrics").body


def test_a_failing_model_is_our_fault_not_the_clients(served: Served) -> None:
    answer = ask(served, "POST", "/v2/models/echo/infer", row(666, 2, 3, 4))
    assert answer.status == 500
    assert ask(served, "POST", "/v2/models/echo/infer", row()).status == 200


def test_a_model_that_is_not_loaded_is_503(served: Served) -> None:
    answer = ask(served, "POST", "/v2/models/later/infer", row())
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


def test_a_passed_deadline_is_504(served: Served) -> None:
    with ThreadPoolExecutor(1) as others:
        running = others.submit(ask, served, "POST", "/v2/models/slow/infer", row())
        time.sleep(0.05)
        answer = ask(served, "POST", "/v2/models/slow/infer", row(parameters={"timeout": 20_000}))
        assert answer.status in (503, 504)
        assert running.result(10).status == 200


def test_a_deadline_that_passes_while_the_model_runs_is_504(served: Served) -> None:
    answer = ask(served, "POST", "/v2/models/slow/infer", row(parameters={"timeout": 50_000}))
    assert answer.status == 504
    assert "still running at the deadline" in answer.error


def test_true_and_1_and_1_0_are_three_parameters_and_share_no_batch(served: Served) -> None:
    with ThreadPoolExecutor(8) as others:
        busy = others.submit(ask, served, "POST", "/v2/models/says/infer", row(parameters={"sleep_s": 1.0}))
        time.sleep(0.2)
        values = [True, 1, 1.0, True, 1, 1.0, 0.0]
        bodies = [row(parameters={"a": value}) for value in values]
        asked = [others.submit(ask, served, "POST", "/v2/models/says/infer", body) for body in bodies]
        answers = [one.result(10).json()["outputs"] for one in asked]
        assert busy.result(10).status == 200
    assert [answer[0]["data"] for answer in answers] == [[repr(value)] for value in values]
    assert [answer[1]["data"] for answer in answers] == [[2]] * 6 + [[1]]  # equal ones do


def test_rows_of_nothing_do_not_fill_the_queue(served: Served) -> None:
    tensor = {"name": "INPUT0", "shape": [10**12, 0], "datatype": "FP32", "data": []}
    answer = ask(served, "POST", "/v2/models/wide/infer", {"inputs": [tensor]})
    assert answer.status == 413
    assert "1000000000000 rows in one request, expected at most 2048" in answer.error
    tensor = {"name": "INPUT0", "shape": [2**62, 0], "datatype": "FP32", "data": []}
    assert ask(served, "POST", "/v2/models/wide/infer", {"inputs": [tensor]}).status == 400


def test_half_a_character_beside_a_nan_is_bad_input_and_costs_nobody_else(served: Served) -> None:
    body = b'{"id": "\\ud800", "inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [NaN, 1, 1, 1]}]}'
    assert ask(served, "POST", "/v2/models/echo/infer", body).status == 400
    region = b'{"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "parameters": {"x": NaN,'
    region += b' "shared_memory_region": "\\ud800", "shared_memory_byte_size": 16}}]}'
    assert ask(served, "POST", "/v2/models/echo/infer", region).status == 400
    assert ask(served, "POST", "/v2/models/echo/infer", row()).status == 200
    assert served.repository.pending == 0


@pytest.mark.parametrize("value", [10**30, 2**64])
def test_a_parameter_beyond_64_bits_is_bad_input(served: Served, value: int) -> None:
    answer = ask(served, "POST", "/v2/models/says/infer", row(parameters={"a": value}))
    assert answer.status == 400
    assert "expected an integer of 64 bits" in answer.error


def test_an_overfull_queue_is_503_with_retry_after(served: Served) -> None:
    with ThreadPoolExecutor(8) as others:
        asked = [others.submit(ask, served, "POST", "/v2/models/slow/infer", row()) for _ in range(8)]
        answers = [future.result(10) for future in asked]
    statuses = [answer.status for answer in answers]
    assert statuses.count(200) >= 3
    assert set(statuses) == {200, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status == 503)


def test_a_client_that_leaves_takes_its_request_out_of_the_queue(served: Served) -> None:
    lane = served.repository.model("slow").lanes[0]
    body = json.dumps(row()).encode()
    request = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    clients = []
    for count in range(1, 4):
        client = socket.create_connection(("127.0.0.1", served.port), timeout=10)
        client.sendall(request)
        clients.append(client)
        assert eventually(lambda count=count: lane.pending == count)
    executed = executions(served)
    clients[1].close()
    clients[2].close()
    assert eventually(lambda: lane.pending == 1)
    assert clients[0].recv(100).startswith(b"HTTP/1.1 200 OK")
    clients[0].close()
    time.sleep(0.2)
    assert executions(served) - executed <= 1


def executions(served: Served) -> int:
    return int(ask(served, "GET", "/v2/models/slow/stats").json()["model_stats"][0]["execution_count"])


def eventually(condition: Any) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


PARTS = [
    "v2", "models", "echo", "pair", "versions", "1", "infer", "ready", "stats", "config", "repository", "index", "region", "r",
    "systemsharedmemory", "status", "register", "unregister", "health", "live", "%2F", "%ff", "metrics", "trace", "setting",
]  # fmt: skip


@settings(max_examples=150, derandomize=True)
@given(
    st.sampled_from(["GET", "POST", "PUT", "HEAD"]),
    st.lists(st.sampled_from(PARTS) | st.text("%/?#a0é", max_size=4).map(quote), max_size=7),
    st.sampled_from([b"", b"{}", b"[]", b'{"inputs":[]}', b'{"key":1}', b'{"parameters":{"a":[]}}', b"\xff"]),
)
def test_no_request_fails_the_server(served: Served, method: str, parts: list[str], body: bytes) -> None:
    answer = ask(served, method, "/" + "/".join(parts), body)
    assert answer.status in (200, 400, 404, 405, 501, 503)
    assert answer.status == 200 or method == "HEAD" or answer.error


# the repository


def test_the_index(served: Served) -> None:
    everything = ask(served, "POST", "/v2/repository/index").json()
    assert {"name": "echo", "version": "1", "state": "READY"} in everything
    assert any(model["name"] == "later" and model["state"] == "UNAVAILABLE" for model in everything)
    ready = ask(served, "POST", "/v2/repository/index", {"ready": True}).json()
    assert all(model["state"] == "READY" for model in ready)
    assert ask(served, "POST", "/v2/repository/index", b"{bad").status == 400


def test_a_model_is_loaded_and_unloaded(served: Served) -> None:
    request = {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [0.5] * 16}]}
    assert ask(served, "POST", "/v2/models/later/infer", request).status == 503
    loaded = ask(served, "POST", "/v2/repository/models/later/load")
    assert (loaded.status, loaded.body) == (200, b"")
    assert ask(served, "POST", "/v2/models/later/infer", request).status == 200
    assert ask(served, "POST", "/v2/repository/models/later/load", {"parameters": {}}).status == 200  # loaded anew
    assert ask(served, "POST", "/v2/models/later/infer", request).status == 200
    assert ask(served, "POST", "/v2/repository/models/later/unload", {"parameters": {"unload_dependents": True}}).status == 200
    assert ask(served, "POST", "/v2/models/later/infer", request).status == 503


def test_a_model_that_fails_to_load_says_why(served: Served) -> None:
    answer = ask(served, "POST", "/v2/repository/models/broken/load")
    assert answer.status == 500
    assert "failed to load 'broken'" in answer.error
    assert "failed to load 'nope'" in ask(served, "POST", "/v2/repository/models/nope/load").error
    answer = ask(served, "POST", "/v2/repository/models/echo/unload", {"parameters": {"unload_dependents": "x"}})
    assert answer.status == 400


# shared memory over plain JSON


def test_cuda_shared_memory_is_not_offered(served: Served) -> None:
    assert ask(served, "GET", "/v2/cudasharedmemory/status").json() == []
    answer = ask(served, "GET", "/v2/cudasharedmemory/region/r/status")
    assert (answer.status, answer.error) == (404, "Unable to find cuda shared memory region: 'r'")
    body = {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 1}
    assert ask(served, "POST", "/v2/cudasharedmemory/region/r/register", body).status == 501
    assert ask(served, "POST", "/v2/cudasharedmemory/unregister").status == 200


@pytest.mark.parametrize(
    ("body", "word"),
    [({"key": "/x"}, "byte_size"), ({"byte_size": 1}, "key"), ({"key": "/x", "byte_size": "1"}, "byte_size"),
     ({"key": "/x", "byte_size": -1}, "byte_size -1"), ({"key": "/not-there", "byte_size": 8}, "/not-there")],
)  # fmt: skip
def test_a_bad_registration_is_explained(served: Served, body: dict[str, Any], word: str) -> None:
    answer = ask(served, "POST", "/v2/systemsharedmemory/region/r/register", body)
    assert answer.status == 400
    assert word in answer.error


def test_a_byte_order_mark_before_the_json_is_passed_over(served: Served) -> None:
    answer = ask(served, "POST", "/v2/repository/index", "\ufeff".encode() + b'{"ready": true}')
    assert answer.status == 200
    answer = ask(served, "POST", "/v2/models/echo/generate", "\ufeff".encode() + b'{"INPUT0": [1, 2, 3, 4]}')
    assert (answer.status, answer.json()["OUTPUT0"]) == (200, [1, 2, 3, 4])


def test_an_unknown_region_is_404(served: Served) -> None:
    answer = ask(served, "GET", "/v2/systemsharedmemory/region/r/status")
    assert (answer.status, answer.error) == (404, "Unable to find system shared memory region: 'r'")
    assert ask(served, "POST", "/v2/systemsharedmemory/region/r/unregister").status == 200
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "parameters": parameters}]}
    answer = ask(served, "POST", "/v2/models/echo/infer", body)
    assert (answer.status, answer.error) == (404, "Unable to find shared memory region: 'r'")
