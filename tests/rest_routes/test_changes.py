"""Loads and unloads over REST, whose clients go away or meet what nobody expected."""

import asyncio
import http.client
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.grpc_server.serving import Breaks
from tests.rest_routes.serving import Served, serving
from tests.waiting import until_async

pytestmark = pytest.mark.slow

SLOW = """
server: {model_control: true, state_dir: STATE}
models:
  - name: m
    load_at_start: false
    backends: [{kind: synthetic, load_ms: 300}]
    batching: {probe_s: 0}
"""


def change(served: Served, verb: str) -> int:
    connection = http.client.HTTPConnection(served.url, timeout=5)
    try:
        connection.request("POST", f"/v2/repository/models/m/{verb}")
        return connection.getresponse().status
    finally:
        connection.close()


def test_abandoned_loads_are_one_load_that_goes_on(tmp_path: Path) -> None:
    async def until(state: str) -> None:
        await until_async(lambda: served.repository.index()[0]["state"] == state)

    with serving(tmp_path, SLOW.replace(", state_dir: STATE", "")) as served:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                client.sendall(b"POST /v2/repository/models/m/load HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n")
                served.run(until("LOADING"))
        served.run(until("READY"))
        assert change(served, "unload") == 200
        assert served.repository.generation == 2


@pytest.mark.parametrize(("fault", "status"), [(RuntimeError, 500), (OSError, 500), (asyncio.CancelledError, 503)])
def test_whatever_a_change_raises_is_one_answer(tmp_path: Path, fault: type[BaseException], status: int) -> None:
    with serving(tmp_path, SLOW.replace(", state_dir: STATE", ""), control=Breaks(fault)) as served:
        assert change(served, "load") == status
        assert change(served, "unload") == status


def test_an_unload_that_cannot_keep_what_was_learned_succeeds(tmp_path: Path) -> None:
    with serving(tmp_path, SLOW.replace("STATE", str(tmp_path / "state"))) as served:
        assert change(served, "load") == 200
        (tmp_path / "state").rmdir()
        assert change(served, "unload") == 200
        assert served.repository.index()[0]["state"] == "UNAVAILABLE"


AWAY = """
server: {model_control: true}
models:
  - {name: m, version: "1", load_at_start: false, backends: [{kind: synthetic}]}
  - {name: m, version: "2", load_at_start: false, slo: {p99_ms: 50}, backends: [{kind: synthetic}]}
"""


def ask(served: Served, path: str) -> int:
    connection = http.client.HTTPConnection(served.url, timeout=5)
    try:
        connection.request("POST", f"/v2/models/{path}/infer", b'{"inputs": []}')
        return connection.getresponse().status
    finally:
        connection.close()


def counted(served: Served) -> dict[tuple[str, ...], tuple[Any, Any]]:
    """By model and version: requests by the codes that came, and those of the SLO."""
    edges = {key: state for key, state in served.run(served.repository.metrics.counted()).items() if key.kind == "edge"}
    return {key.labels[:2]: ({code: n for code, n in state[0].items() if n}, state[3]) for key, state in edges.items()}


def test_what_a_model_that_is_not_ready_refuses_is_counted_and_told_under_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, AWAY) as served, caplog.at_level(logging.WARNING, "gateway.engine.failed_requests"):
        statuses = [ask(served, path) for path in ("m", "m/versions/2", "m/versions/1", "m/versions/3", "n")]
        assert statuses == [503, 503, 503, 404, 404]
        assert counted(served) == {
            ("m", "2"): ({"not_ready": 2}, {"met": 0, "missed": 2}),
            ("m", "1"): ({"not_ready": 1}, None),
            ("", ""): ({"not_found": 2}, None),
        }
        assert {record.fields["model"] for record in caplog.records} == {"m"}  # type: ignore[attr-defined]
        assert change(served, "load") == change(served, "unload") == 200
        assert ask(served, "m") == 503
        assert counted(served)["m", "2"] == ({"not_ready": 3}, {"met": 0, "missed": 3})
