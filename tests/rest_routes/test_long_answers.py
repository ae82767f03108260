"""JSON of a MiB and more, which is made and sent slice by slice: read as one, and held for nobody who does not read it."""

import gzip
import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.rest_routes.serving import Served, serving

TIMEOUT_S = 20.0
MODELS = """
models:
  - {name: numbers, max_rows: 0, backends: [{kind: python, model: "tests/rest_routes/test_long_answers.py:Numbers"}]}
"""
MANY = 3_000_000  # 20 MB of JSON


class Numbers:
    """As many as it is asked for, and two behind them."""

    inputs = (("n", "INT32", (1,)),)
    outputs = (("floats", "FP32", (-1,)), ("ends", "INT32", (2,)))

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        count = int(inputs["n"][0])
        floats = np.arange(count, dtype=np.float32) / 4
        floats[count // 2] = np.inf
        return {"floats": floats, "ends": np.array([0, count], np.int32)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), MODELS) as found:
        yield found


def asked(count: int) -> bytes:
    return json.dumps({"id": "a", "inputs": [{"name": "n", "datatype": "INT32", "shape": [1], "data": [count]}]}).encode()


def ask(served: Served, count: int, headers: dict[str, str] | None = None) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(served.url, timeout=TIMEOUT_S)
    connection.request("POST", "/v2/models/numbers/infer", asked(count), headers or {})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def check(body: bytes, count: int) -> None:
    answer = json.loads(body)
    floats: dict[str, Any]
    floats, ends = answer.pop("outputs")
    assert answer == {"id": "a", "model_name": "numbers", "model_version": "1"}
    expected = np.arange(count) / 4
    expected[count // 2] = np.inf
    assert floats.pop("data") == expected.tolist()
    assert floats == {"name": "floats", "datatype": "FP32", "shape": [count]}
    assert ends == {"name": "ends", "datatype": "INT32", "shape": [2], "data": [0, count]}


@pytest.mark.parametrize("count", [1000, 131_071, 131_072, 400_001])
def test_a_long_answer_comes_in_chunks_and_a_short_one_at_once(served: Served, count: int) -> None:
    response, body = ask(served, count)
    assert (response.status, response.getheader("Content-Type")) == (200, "application/json")
    assert response.getheader("Transfer-Encoding") == ("chunked" if count >= 131_072 else None)
    check(body, count)


def test_a_client_that_accepts_compression_gets_a_long_answer_compressed(served: Served) -> None:
    response, body = ask(served, 200_000, {"Accept-Encoding": "gzip"})
    assert response.getheader("Content-Encoding") == "gzip"
    assert response.getheader("Content-Length") == str(len(body))
    check(gzip.decompress(body), 200_000)


def test_a_client_of_http_1_0_gets_a_long_answer_until_the_connection_ends(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S) as client:
        body = asked(200_000)
        client.sendall(b"POST /v2/models/numbers/infer HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head, _, rest = b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    check(rest, 200_000)


def test_who_does_not_read_holds_a_slice_and_no_other_client(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        body = asked(MANY)
        request = b"POST /v2/models/numbers/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        client.sendall(2 * request)  # the second waits for the first
        until_s = time.monotonic() + TIMEOUT_S
        while not (unsent := _unsent(served)) and time.monotonic() < until_s:
            time.sleep(0.01)
        time.sleep(0.2)
        assert 0 < unsent <= _unsent(served) < 1 << 21  # what a millisecond makes, of 20 MB
        check(ask(served, 1000)[1], 1000)
        response = http.client.HTTPResponse(client)
        response.begin()
        check(response.read(), MANY)
    while served.server.connections and time.monotonic() < until_s:  # the second's client has left in mid-answer
        time.sleep(0.01)
    assert not served.server.connections


def _unsent(served: Served) -> int:
    async def found() -> int:
        return max((connection.unsent for connection in served.server.connections), default=0)

    most: int = served.run(found())
    return most
