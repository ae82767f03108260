"""Events that take long to encode: they come in their order, and hold up nobody but those behind them."""

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gateway.engine.runner import PARTS_AHEAD
from gateway.protocols.generate import GenerateCodec
from tests.long_parts import LONG, HeldEncoder, made
from tests.rest_routes.serving import TIMEOUT_S, Served, serving
from tests.waiting import until

pytestmark = pytest.mark.slow

MODELS = """
models:
  - {name: mixed, max_rows: 0, backends: [{kind: python, model: "tests.long_parts:Mixed", sessions: 1}]}
  - name: echo
    max_rows: 8
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, -1]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, -1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("long_parts"), MODELS) as running:
        yield running


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldEncoder]:
    encoder = HeldEncoder(monkeypatch, GenerateCodec)
    yield encoder
    encoder.goes_on.set()


def ask(served: Served, counts: list[int], **more: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(served.url, timeout=TIMEOUT_S)
    connection.request("POST", "/v2/models/mixed/generate_stream", json.dumps({"counts": counts, **more}))
    return connection


def parts_of(events: bytes) -> list[Any]:
    """Number and texts of each part; the text of an error."""
    found: list[Any] = []
    for event in events.split(b"\n\n")[:-1]:
        told = json.loads(event.removeprefix(b"data: "))
        texts = np.atleast_1d(told["texts"]) if "texts" in told else []
        found.append((int(texts[0]), len(texts)) if len(texts) else told["error"])
    return found


def echoes(served: Served) -> int:
    connection = http.client.HTTPConnection(served.url, timeout=TIMEOUT_S)
    connection.request("POST", "/v2/models/echo/generate", json.dumps({"INPUT0": 1.5}))
    status = connection.getresponse().status
    connection.close()
    return status


def counted(served: Served, code: str) -> float:
    async def exposed() -> str:
        served.repository.metrics.flush()
        return served.repository.metrics.expose()[1].decode()

    found = re.findall(r"^gateway_requests_total{(.*)} (\S+)$", served.run(exposed()), re.MULTILINE)
    return sum(float(count) for labels, count in found if f'code="{code}"' in labels and 'model="mixed"' in labels)


def free(served: Served) -> bool:
    (lane,) = served.repository.model("mixed").lanes
    return lane.runner.free_slots == 1


def test_long_and_short_parts_come_in_their_order_and_an_error_behind_them(served: Served) -> None:
    counts = [1, LONG, 2, LONG, LONG, 1]
    connection = ask(served, counts, fails=1)
    *parts, error = parts_of(connection.getresponse().read())
    assert parts == list(enumerate(counts))
    assert "a bad part" in error
    connection.close()


def test_a_part_that_takes_long_holds_up_no_other_client(served: Served, held: HeldEncoder) -> None:
    before = counted(served, "ok")
    connection = ask(served, [1, LONG, 1])
    response = connection.getresponse()
    assert parts_of(response.readline() + b"\n") == [(0, 1)]
    assert held.begun.wait(TIMEOUT_S)
    until(lambda: free(served))  # its end is known, too
    assert echoes(served) == 200
    assert not held.waited
    assert counted(served, "ok") == before
    held.goes_on.set()
    assert parts_of(response.read().lstrip()) == [(1, LONG), (2, 1)]
    assert held.waited == [True]
    assert counted(served, "ok") == before + 1
    connection.close()


def test_a_model_waits_for_parts_that_are_not_encoded(served: Served, held: HeldEncoder) -> None:
    connection = ask(served, [LONG] * 15, key=1)
    assert held.begun.wait(TIMEOUT_S)
    until(lambda: made[1] >= PARTS_AHEAD)
    for _ in range(20):
        assert echoes(served) == 200
    assert made[1] == PARTS_AHEAD
    held.goes_on.set()
    assert parts_of(connection.getresponse().read()) == [(number, LONG) for number in range(15)]
    connection.close()


@pytest.mark.parametrize("parts", [1, 2, 100])
def test_a_client_that_leaves_while_a_part_is_encoded_is_counted_and_frees_the_session(
    served: Served, held: HeldEncoder, parts: int
) -> None:
    before = counted(served, "cancelled")
    connection = ask(served, [LONG] * parts)
    assert held.begun.wait(TIMEOUT_S)
    if parts == 1:
        until(lambda: free(served))  # the model has ended before
    connection.close()
    until(lambda: counted(served, "cancelled") == before + 1)
    until(lambda: free(served))
    held.goes_on.set()
    connection = ask(served, [1, LONG])
    assert parts_of(connection.getresponse().read()) == [(0, 1), (1, LONG)]
    connection.close()
