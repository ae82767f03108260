"""The generate extension over the wire: objects, server-sent events, and clients that do not take them."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.engine.model_statistics import ModelStatistics
from gateway.engine.runner import PARTS_AHEAD
from gateway.errors import NotReady
from tests.rest_routes.serving import Served, serving
from tests.waiting import until

TIMEOUT_S = 10.0
MODELS = """
server: {limits: {json_depth: 4}}
models:
  - {name: counts, max_rows: 0, backends: [{kind: python, model: "tests/rest_routes/test_generate.py:Counts"}]}
  - {name: large, max_rows: 0, backends: [{kind: python, model: "tests/rest_routes/test_generate.py:Large"}]}
  - name: echo
    max_rows: 8
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, -1]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, -1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
"""
PART_BYTES = 300_000


class Counts:
    """Gives the numbers below `n`, each behind `text`; fails instead of the number `fails_at`; waits `gap_s` between them."""

    inputs = (("text", "BYTES", (1,)), ("n", "INT32", (1,)))
    outputs = (("said", "BYTES", (1,)), ("index", "INT32", (1,)))

    def predict(self, inputs: dict[str, np.ndarray], parameters: dict[str, Any]) -> Iterator[dict[str, np.ndarray]]:
        for index in range(int(inputs["n"][0])):
            if index == parameters.get("fails_at"):
                raise ValueError("it cannot count so far")
            said = np.array([inputs["text"][0] + b" %d" % index], object)
            yield {"said": said, "index": np.array([index], np.int32)}
            time.sleep(parameters.get("gap_s", 0.0))


class Large:
    """Gives `x` parts, each of PART_BYTES of text."""

    inputs = (("x", "INT32", (1,)),)
    outputs = (("text", "BYTES", (1,)),)
    made = 0
    closed = threading.Event()

    def predict(self, inputs: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        _of_served().made = 0
        _of_served().closed.clear()
        try:
            for _ in range(int(inputs["x"][0])):
                _of_served().made += 1
                yield {"text": np.array(["x" * PART_BYTES], object)}
        finally:
            _of_served().closed.set()


def _of_served() -> type[Large]:
    """The one that both sides see: the gateway loads this file once more, under a name of its own."""
    from tests.rest_routes import test_generate

    return test_generate.Large


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("generate"), MODELS) as running:
        yield running


def ask(served: Served, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(served.url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers or {})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def events(body: bytes) -> list[Any]:
    assert body.endswith(b"\n\n") or not body
    return [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n")[:-1]]


def part(text: str, index: int, **more: Any) -> dict[str, Any]:
    return {**more, "model_name": "counts", "model_version": "1", "said": f"{text} {index}", "index": index}


def test_a_decoupled_model_gives_an_event_for_each_part(served: Served) -> None:
    path = "/v2/models/counts/generate_stream"
    response, body = ask(served, path, {"text": "é", "n": 3, "id": "7"}, {"Accept-Encoding": "gzip"})
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    assert response.getheader("Transfer-Encoding") == "chunked"
    assert response.getheader("Content-Encoding") is None
    assert events(body) == [part("é", index, id="7") for index in range(3)]
    response, body = ask(served, "/v2/models/counts/versions/1/generate_stream", {"text": ["a"], "parameters": {"n": [0]}})
    assert (response.status, body) == (200, b"")


def test_an_event_comes_when_its_part_is_there(served: Served) -> None:
    connection = http.client.HTTPConnection(served.url, timeout=TIMEOUT_S)
    connection.request("POST", "/v2/models/counts/generate_stream", json.dumps({"text": "a", "n": 1000, "gap_s": 0.05}))
    response = connection.getresponse()
    assert json.loads(response.readline().removeprefix(b"data: ")) == part("a", 0)  # not after the fifty seconds of all
    connection.close()


def test_a_model_that_gives_it_whole_gives_one_event(served: Served) -> None:
    response, body = ask(served, "/v2/models/echo/generate_stream", {"INPUT0": [1, 2]})
    assert response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    assert events(body) == [{"model_name": "echo", "model_version": "1", "OUTPUT0": [1.0, 2.0]}]


def test_generate_gives_one_object(served: Served) -> None:
    response, body = ask(served, "/v2/models/echo/generate", {"INPUT0": 1.5, "id": "x"})
    assert (response.status, response.getheader("Content-Type")) == (200, "application/json")
    assert json.loads(body) == {"id": "x", "model_name": "echo", "model_version": "1", "OUTPUT0": 1.5}
    response, body = ask(served, "/v2/models/counts/generate", {"text": "a", "n": 1})
    assert (response.status, json.loads(body)) == (200, part("a", 0))


def went_well(served: Served) -> tuple[int, int, float]:
    """Requests of `counts` that are counted so: how many, the time of all, and when the last was answered."""

    async def counted() -> ModelStatistics:
        return served.repository.metrics.statistics({("counts", "1")})["counts", "1"]

    found = served.run(counted())
    return found.success.count, found.success.ns, found.last_inference_s


@pytest.mark.parametrize("parts", [0, 2, 50])
def test_generate_refuses_any_number_of_parts_but_one(served: Served, parts: int) -> None:
    before = went_well(served)
    response, body = ask(served, "/v2/models/counts/generate", {"text": "a", "n": parts})
    message = json.loads(body)["error"]
    assert response.status == 400
    assert "expects model to produce exactly 1 response, use generate stream" in message  # Triton's words
    assert message.endswith(f"gave {'more than one' if parts else 'none'}; ask by POST /v2/models/counts/generate_stream")
    assert went_well(served) == before


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "body", "status", "words"),
    [
        ("absent", {"text": "a"}, 404, "absent"),
        ("counts", {"text": "a"}, 400, 'the smallest request: {"text":"1","n":1}'),
        ("counts", {"text": "a", "n": "many"}, 400, "expected INT32 elements, got text"),
        ("counts", b"{", 400, "failed to parse the request JSON"),
        ("counts", {"text": [[[[["a"]]]]], "n": 1}, 400, "at most 4 deep"),
        ("counts", {"text": "a", "n": 1, "fails_at": 0}, 500, "it cannot count so far"),
    ],
)
def test_an_error_before_the_first_part_is_a_status(
    served: Served, verb: str, model: str, body: Any, status: int, words: str
) -> None:
    response, answer = ask(served, f"/v2/models/{model}/{verb}", body)
    assert (response.status, response.getheader("Content-Type")) == (status, "application/json")
    assert words in json.loads(answer)["error"]


def test_an_error_behind_parts_is_one_event_and_the_end(served: Served) -> None:
    before = went_well(served)
    response, body = ask(served, "/v2/models/counts/generate_stream", {"text": "a", "n": 9, "fails_at": 2})
    assert response.status == 200
    assert went_well(served) == before
    first, second, last = events(body)
    assert [first, second] == [part("a", 0), part("a", 1)]
    assert list(last) == ["error"]
    assert "it cannot count so far" in last["error"]


def test_the_other_paths_say_where_a_decoupled_model_is_asked(served: Served) -> None:
    response, body = ask(served, "/v2/models/counts/infer", {"inputs": []})
    assert response.status == 501  # as Triton's
    assert "POST /v2/models/counts/generate_stream" in json.loads(body)["error"]


def test_only_post_asks_for_it(served: Served) -> None:
    connection = http.client.HTTPConnection(served.url, timeout=TIMEOUT_S)
    connection.request("GET", "/v2/models/counts/generate_stream")
    response = connection.getresponse()
    assert (response.status, response.getheader("Allow")) == (405, "POST")
    connection.close()


def unread(served: Served) -> socket.socket:
    """A client that has asked for more parts than it could ever be sent, and reads none."""
    client = socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S)
    head = b"POST /v2/models/large/generate_stream HTTP/1.1\r\nHost: t\r\nContent-Length: 13\r\n\r\n"
    client.sendall(head + b'{"x":1000000}')
    return client


def settled() -> int:
    """How many parts were made when no more are."""
    seen = -1
    while seen != Large.made or not seen:
        seen = Large.made
        time.sleep(0.15)
    return seen


def test_a_client_that_reads_nothing_holds_a_bounded_number_of_parts(served: Served) -> None:
    with unread(served) as client:
        until(lambda: Large.made > 0)
        made = settled()
        (connection,) = served.run(_connections(served))
        held_here = connection.unsent
        in_kernel = made * PART_BYTES - held_here
        # One that is being written, PARTS_AHEAD that wait for it, and one that the model holds at its yield.
        assert held_here <= (PARTS_AHEAD + 1) * (PART_BYTES + 1000)
        assert in_kernel < 12 << 20  # nearly all of it in the client's own buffer
        while Large.made == made:  # it reads: more are made
            assert client.recv(1 << 20)
    assert Large.closed.wait(TIMEOUT_S)


async def _connections(served: Served) -> list[Any]:
    return list(served.server.connections)


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_leaves_frees_the_session(served: Served, reads: bool) -> None:
    client = unread(served)
    until(lambda: Large.made > 0)
    if reads:
        client.recv(1000)
    else:
        settled()
    client.close()
    assert Large.closed.wait(TIMEOUT_S)
    with unread(served):  # the one session of the model is free again
        until(lambda: Large.made > 0)
    assert Large.closed.wait(TIMEOUT_S)


@pytest.mark.slow
def test_events_end_with_an_error_where_a_drain_has_no_time_left_for_the_rest(tmp_path: Path) -> None:
    with serving(tmp_path, MODELS) as served:
        connection = http.client.HTTPConnection(served.url, timeout=TIMEOUT_S)
        connection.request("POST", "/v2/models/counts/generate_stream", json.dumps({"text": "a", "n": 1000, "gap_s": 0.02}))
        response = connection.getresponse()
        response.readline()
        served.run(served.server.drain(0.4, lambda: served.repository.give_up(NotReady("the server is shutting down"))))
        *_, before, last = events(b"data: {}\n" + response.read())  # read to its last chunk, else this raises
        assert before["model_name"] == "counts"
        assert last == {"error": "the server is shutting down"}
        connection.close()
