"""`gateway route explain`, asked of a running gateway and of a configuration."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.commands.explain import ask, render
from gateway.errors import BackendUnreachable, GatewayError, NotFound
from tests.served.gateway_process import served

TWO = """
models:
  - name: m
    slo: {p99_ms: 200}
    backends:
      - {kind: synthetic, name: dear, fixed_ms: 1, usd_per_hour: 2.0}
      - {kind: synthetic, name: cheap, fixed_ms: 2, usd_per_hour: 0.5, sessions: 2}
      - {kind: synthetic, name: next, usd_per_hour: 1.0, shadow_share: 0.5}
"""


def written(tmp_path: Path, text: str = TWO) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.slow
def test_a_running_gateway_tells_the_parts_of_every_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(written(tmp_path), "--no-ray") as gateway:
        assert main(["route", "explain", f"http://{gateway.http}", "m", "--rows", "4"]) == 0
        told = ask(f"http://{gateway.http}", "m", "", 4)
        assert main(["route", "explain", f"http://{gateway.http}", "other"]) == 1
        assert main(["route", "explain", f"http://{gateway.http}", "m", "--rows", "0"]) == 2
    assert [lane["role"] for lane in told["lanes"]] == ["regular", "shadow", "regular"]
    assert told["backend"] == "cheap"
    said = capsys.readouterr()
    assert "m version 1, 4 rows, policy cheapest, SLO 200 ms, spill at 100 ms" in said.out
    assert "route?rows=1: 404: Request for unknown model: 'other' is not found; models here: 'm'\n" in said.err


def test_without_one_the_configuration_says_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "server: {http_port: 1}\n" + TWO
    assert main(["route", "explain", written(tmp_path, text), "m"]) == 0
    said = capsys.readouterr().out
    assert "http://127.0.0.1:1: no gateway answers (Connection refused): start one, `gateway serve CONFIG`, or " in said
    lines = said.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["cheap", "next", "dear"]
    assert "shadow 50%" in lines[-2]


def test_an_unknown_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "explain", written(tmp_path), "other"]) == 2
    assert "model 'other'" in capsys.readouterr().err


class Answers:
    """A server that gives one answer to all, and notes what was asked."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body
        self.asked: list[str] = []
        self.port = 0


@contextmanager
def answering(status: int, body: bytes) -> Iterator[Answers]:
    answers = Answers(status, body)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.asked.append(self.path)
            self.send_response(answers.status)
            self.send_header("Content-Length", str(len(answers.body)))
            self.end_headers()
            self.wfile.write(answers.body)

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        answers.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield answers
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering_grpc() -> Iterator[int]:
    """A port that answers one connection as gRPC does, with HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def settings() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
                connection.recv(10_000)

        thread = threading.Thread(target=settings)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def lane(backend: str, **fields: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "backend": backend, "role": "regular", "usd_per_million_rows": 0.123456, "usual_batch_rows": 4.0, "eta_ms": 12.34,
        "cold_start_ms": 0.0, "wait_ms": 1.0, "ahead_ms": 2.0, "own_ms": 9.3, "in_time": True, "sessions": 2, "pending": 5,
        "available": True, "health": "live",
    }  # fmt: skip
    return {**told, **fields}


def told(**fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "model": "m", "version": "3", "rows": 4, "slo_ms": 60.0, "policy": "cheapest", "spill_share": 0.25, "backend": "one",
        "reason": "spill", "lanes": [lane("one")], "missing": {},
    }  # fmt: skip
    return {**answer, **fields}


def test_no_name_that_a_server_tells_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, json.dumps(told(model="\x1b[2Jm", lanes=[lane("\x9bone")])).encode()) as answers:
        assert main(["route", "explain", f"127.0.0.1:{answers.port}", "m"]) == 0
    said = capsys.readouterr().out
    assert all(map(str.isprintable, said.split("\n")))
    assert said.startswith("·[2Jm version 3")


def test_what_a_gateway_tells_is_shown_as_a_table() -> None:
    unknown = lane(
        "another", usd_per_million_rows=None, usual_batch_rows=None, eta_ms=None, own_ms=None, available=False, pending=0
    )  # fmt: skip
    assert render(told(lanes=[lane("one"), unknown], missing={"gpu": "no device"})).splitlines() == [
        "m version 3, 4 rows, policy cheapest, SLO 60 ms, spill at 15 ms",
        "-> one (spill)",
        "backend  role     $/1M rows  batch    eta ms   cold  wait  ahead  own      sessions  pending  health",
        "one      regular  0.1235     4        12.3     0.0   1.0   2.0    9.3      2         5        live",
        "another  regular  unknown    unknown  unknown  0.0   1.0   2.0    unknown  2         0        unavailable",
        "gpu is missing: no device",
    ]
    lines = render(told(slo_ms=None, backend=None, reason="down", lanes=[])).splitlines()
    assert lines[:2] == ["m version 3, 4 rows, policy cheapest, no SLO", "-> nowhere (down)"]


def test_a_gateway_is_asked_for_the_model_the_version_and_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, json.dumps(told()).encode()) as answers:
        url = f"http://127.0.0.1:{answers.port}"
        assert ask(f"{url}/", "a/b", "", 1)["backend"] == "one"
        assert ask(url, "m", "1/2", 7)["backend"] == "one"
        assert main(["route", "explain", url, "m", "--version", "3", "--rows", "2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == told()
        for where in (url, url.removeprefix("http://")):
            assert main(["route", "explain", where, "m"]) == 0
            assert capsys.readouterr().out == render(told()) + "\n"
    assert answers.asked == [
        "/v2/models/a%2Fb/route?rows=1",
        "/v2/models/m/versions/1%2F2/route?rows=7",
        "/v2/models/m/versions/3/route?rows=2",
        "/v2/models/m/route?rows=1",
        "/v2/models/m/route?rows=1",
    ]


def test_what_is_no_answer_is_told_with_where_it_came_from() -> None:
    for status, kind in ((404, NotFound), (500, GatewayError)):
        with answering(status, b"why not") as answers:
            url = f"http://127.0.0.1:{answers.port}"
            with pytest.raises(GatewayError, match=f"{url}/v2/models/m/route\\?rows=1: {status}: why not") as refused:
                ask(url, "m", "", 1)
            assert type(refused.value) is kind
    with answering(404, b"<html>") as answers, pytest.raises(NotFound, match=r"route\?rows=1: 404$"):
        ask(f"http://127.0.0.1:{answers.port}", "m", "", 1)
    for body in (b"<html>", b"[]", b"{}"):
        with answering(200, body) as answers, pytest.raises(BackendUnreachable, match="is no gateway of this kind"):
            ask(f"http://127.0.0.1:{answers.port}", "m", "", 1)
    with pytest.raises(BackendUnreachable, match=r"^http://127\.0\.0\.1:abc: no gateway answers"):
        ask("http://127.0.0.1:abc", "m", "", 1)


def test_the_port_of_grpc_is_told_to_be_none_of_http() -> None:
    with answering_grpc() as port, pytest.raises(BackendUnreachable, match=f":{port}: no answer in HTTP: name the HTTP port"):
        ask(f"http://127.0.0.1:{port}", "m", "", 1)


def test_the_gateway_of_a_configuration_is_asked_at_its_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, json.dumps(told()).encode()) as answers:
        for host in ("127.0.0.1", "0.0.0.0"):
            text = f"server: {{http_port: {answers.port}, host: {host}}}\n" + TWO
            assert main(["route", "explain", written(tmp_path, text), "m"]) == 0
            assert capsys.readouterr().out == render(told()) + "\n"
    assert len(answers.asked) == 2
    assert main(["route", "explain", written(tmp_path, "server: {http_port: 1, host: '::'}\n" + TWO), "m"]) == 0
    assert "http://[::1]:1: no gateway answers (" in capsys.readouterr().out
    assert main(["route", "explain", written(tmp_path, "server: {http_port: null}\n" + TWO), "m"]) == 0
    assert "server.http_port names no port to ask; this is what the configuration says" in capsys.readouterr().out


def test_a_configuration_says_prices_roles_and_who_stands_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
server: {http_port: 1}
models:
  - {name: another, version: "99", backends: [{kind: synthetic}]}
  - {name: zebra, version: "99", backends: [{kind: synthetic}]}
  - {name: m, version: "2", backends: [{kind: synthetic}]}
  - name: m
    version: "10"
    slo: {p99_ms: 200}
    routing: {spill_share: 0.25, equivalent: [[a, b]]}
    backends:
      - {kind: synthetic, name: a, usd_per_hour: 2.0}
      - {kind: synthetic, name: b, usd_per_hour: 1.5, sessions: 2, canary_share: 0.1}
      - {kind: synthetic, name: c}
      - {kind: synthetic, name: d, usd_per_hour: 2.4, sessions: 3}
"""
    assert main(["route", "explain", written(tmp_path, text), "m"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "m version 10, policy cheapest, SLO 200 ms, spill at 50 ms",
        "prices per row depend on the speed that each backend shows while it serves",
        "backend  role        $/hour and session  sessions  stands in for",
        "c        regular     0                   1         none",
        "b        canary 10%  0.75                2         a",
        "d        regular     0.8                 3         none",
        "a        regular     2                   1         b",
    ]
    assert main(["route", "explain", written(tmp_path, text), "m", "--version", "2"]) == 0
    assert "m version 2, policy cheapest, no SLO" in capsys.readouterr().out
    assert main(["route", "explain", written(tmp_path, text), "m", "--version", "3"]) == 2
    assert "model 'm' version 3 is not in the configuration" in capsys.readouterr().err
    assert main(["route", "explain", written(tmp_path, text), "x"]) == 2
    assert "model 'x' version any is not in the configuration" in capsys.readouterr().err
    for rows in ("0", "10000000"):
        assert main(["route", "explain", written(tmp_path, text), "m", "--rows", rows]) == 2
        assert f"--rows: {rows}: expected 1 to 9999999" in capsys.readouterr().err
