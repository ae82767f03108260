"""Loads and unloads over REST, whose clients go away or meet what nobody expected."""

import asyncio
import http.client
import socket
from pathlib import Path

import pytest

from tests.grpc_server.serving import Breaks
from tests.rest_routes.serving import Served, serving

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
        while served.repository.index()[0]["state"] != state:  # noqa: ASYNC110  # the repository tells nobody
            await asyncio.sleep(0.005)

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
