"""`gateway why`, asked of a running gateway and of what it wrote."""

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from gateway import __version__
from gateway.cli import main
from tests.served.gateway_process import Served, served
from tests.why.recorded import Scene

CONFIG = """
models:
  - name: m
    slo: {p99_ms: 150}
    max_rows: 4
    backends: [{kind: synthetic, fixed_ms: 30, row_ms: 10, usd_per_hour: 0.5}]
  - {name: m, version: "3", backends: [{kind: synthetic}]}
  - {name: m, version: "4", load_at_start: false, backends: [{kind: synthetic}]}
  - name: unrecorded
    batching: {record_mib: 0}
    backends: [{kind: synthetic}]
  - name: crowded
    slo: {p99_ms: 40}
    max_rows: 8
    batching: {record_mib: 0.002}
    backends: [{kind: synthetic, fixed_ms: 1}]
"""

_AT_ONCE: Final = 20

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def overloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway that has just been asked for several times what it can do, by 16 clients at once."""
    config = tmp_path_factory.mktemp("why") / "gateway.yaml"
    config.write_text(CONFIG)
    with served(config, "--no-ray") as gateway:
        clients = [threading.Thread(target=ask, args=(gateway.http, client)) for client in range(16)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        yield gateway


def ask(address: str, client: int) -> None:
    """Many requests in one go, which is more than can be served on any machine."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}
    asked = b""
    for count in range(_AT_ONCE):
        body = json.dumps({"id": f"{client}-{count}", "inputs": [tensor]}).encode()
        asked += b"POST /v2/models/m/versions/1/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
            len(body),
            body,
        )
    host, port = address.split(":")
    answers = b""
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(asked)
        while answers.count(b"HTTP/1.1 ") < _AT_ONCE:
            answers += connection.recv(1 << 16)


@slow
def test_a_running_gateway_tells_what_made_its_requests_late(overloaded: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", overloaded.http]) == 0  # without http:// it is an address as well
    said = capsys.readouterr().out
    assert "m version 1 on synthetic" in said
    assert "m version 3: no request has come" in said
    assert "decisions, all the same" in said
    assert "one more session" in said
    assert "add sessions or replicas" in said
    assert "unrecorded" not in said


@slow
def test_what_was_saved_tells_the_same_to_programs(
    overloaded: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "late.msgpack")
    assert main(["why", f"http://{overloaded.http}", "--save", file]) == 0
    assert f"gateway why {file}" in capsys.readouterr().out
    assert main(["why", file, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)  # the other version got no requests
    assert told["same"]
    assert told["missed"] > 50
    assert told["causes"]["queue"] >= 0.9 * told["missed"]  # it was an overload, and nothing else
    assert {case["name"] for case in told["cases"]} >= {"as it was", "one more session"}
    late = next(miss["id"] for miss in told["misses"] if miss["cause"] == "queue")  # the first may be a stall of the machine
    assert main(["why", file, "--request", late]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{late}: m version 1 on synthetic")
    assert "cause: queue" in said
    assert main(["why", file, "--request", "nobody's"]) == 1
    assert "no request 'nobody's' is among the" in capsys.readouterr().err


@slow
def test_a_model_that_is_not_recorded_says_how_to_have_it(overloaded: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", f"http://{overloaded.http}", "--model", "unrecorded"]) == 1
    assert "set batching.record_mib above 0" in capsys.readouterr().err
    assert main(["why", f"http://{overloaded.http}", "--model", "crowded"]) == 1
    said = capsys.readouterr().err
    assert "'crowded': its decisions are no longer recorded" in said
    assert "is too much for 2097: raise batching.record_mib" in said
    assert main(["why", f"http://{overloaded.http}", "--model", "other"]) == 1
    assert "'other' is not found" in capsys.readouterr().err
    assert main(["why", f"http://{overloaded.grpc}"]) == 1  # the other port
    said = capsys.readouterr().err
    assert "this port speaks gRPC" in said
    assert said.count("\n") == 1


def test_where_no_gateway_is_the_command_says_what_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1: no gateway answers (Connection refused): start one, " in capsys.readouterr().err


def test_files_that_are_no_recording_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(tmp_path / "nothing")]) == 2
    assert "expected a file that --save wrote" in capsys.readouterr().err
    (tmp_path / "old").write_bytes(msgspec.msgpack.encode({"format": 6, "gateway": "9.9"}))
    assert main(["why", str(tmp_path / "old")]) == 1
    assert "recorded in format 6 by gateway 9.9" in capsys.readouterr().err
    data = bytearray(Scene(seconds=1.0).packed(1))
    (tmp_path / "cut").write_bytes(data[:-10])
    assert main(["why", str(tmp_path / "cut")]) == 1
    assert "no recording of a gateway" in capsys.readouterr().err
    broken = (
        data.replace(b"adaptive", b"adapt\xcee!", 1),  # no UTF-8, as a byte of a file that is damaged may be
        data.replace(__version__.encode(), b"\xce" * len(__version__), 1),
        data[: data.index(b"recordings") + 10] + b"\x91" * 100_000,
    )
    for content, said in zip(broken, ("is broken", "no recording", "no recording"), strict=True):
        (tmp_path / "broken").write_bytes(content)
        assert main(["why", str(tmp_path / "broken")]) == 1
        assert said in capsys.readouterr().err
    (tmp_path / "whole").write_bytes(data)
    assert main(["why", str(tmp_path / "whole"), "--model", "x"]) == 1
    assert "nothing is recorded of model 'x'; models there: m" in capsys.readouterr().err


Lane = dict[str, Any]


def of_no_rows(lane: Lane) -> None:
    _, _, _, names, values = lane["segments"][0]["state"]
    values[names.index("max_rows")] = 0


def of_speed_unknown(lane: Lane) -> None:
    _, _, _, names, values = lane["segments"][0]["state"][4][0]
    values[names.index("service")][4][2] = 1e300


def delayed_backwards(lane: Lane) -> None:
    lane["settings"]["max_delay_ms"] = -1


def of_no_policy(lane: Lane) -> None:
    lane["settings"]["policy"] = "adaptife"


def called_by_a_number(lane: Lane) -> None:
    lane["segments"][0]["chunks"][0][0][9] = 0


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (of_no_rows, "a recording that is broken (StopIteration): save it again"),
        (of_speed_unknown, "not understood (AttributeError: 'float' object has no attribute 'items'): save it again; if that"),
        (delayed_backwards, "not understood (1 validation error for Batching): save it again; if that changes nothing"),
        (of_no_policy, "not understood (KeyError: 'adaptife'): save it again; if that changes nothing, it is a fault of ours"),
        (called_by_a_number, "a recording that is broken (a request whose own id is 0, expected text): save it again"),
    ],
)
def test_a_recording_that_is_damaged_inside_says_so_in_a_line(
    damage: Callable[[Lane], None], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = msgspec.msgpack.decode(Scene(seconds=1.0).packed(1))
    damage(told["recordings"][0]["lanes"][0])
    (tmp_path / "damaged").write_bytes(msgspec.msgpack.encode(told))
    assert main(["why", str(tmp_path / "damaged"), "--request", "r1"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


def test_a_recording_with_a_time_that_is_years_off_is_damaged_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = msgspec.msgpack.decode(Scene(seconds=1.0, rps=20.0, settings={"slo_ns": None}).packed(1))
    told["recordings"][0]["lanes"][0]["segments"][0]["chunks"][0][0][2] = 1 << 62  # when the first came
    (tmp_path / "damaged").write_bytes(msgspec.msgpack.encode(told))
    assert main(["why", str(tmp_path / "damaged")]) == 1
    assert "m: replayed, but not understood (nothing comes to pass at 46116860" in capsys.readouterr().err


def test_no_name_in_a_recording_moves_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = msgspec.msgpack.decode(Scene(seconds=1.0).packed(1))
    (recording,) = told["recordings"]
    recording |= {"model": "\x1b[2Jm", "unrecorded": {"\x9bgpu": "\x07"}}
    recording["lanes"][0]["segments"][0]["chunks"][0][0][9] = "\x1b]0;title\n"
    (tmp_path / "evil").write_bytes(msgspec.msgpack.encode(told))
    assert main(["why", str(tmp_path / "evil")]) == 0
    assert main(["why", str(tmp_path / "evil"), "--request", "\x1b]0;title\n"]) == 0
    said = capsys.readouterr().out
    assert all(map(str.isprintable, said.split("\n")))
    assert "·[2Jm version 1 on ·gpu: its decisions are no longer recorded, until the model is loaded anew: ·\n" in said
    assert "·]0;title·: ·[2Jm version 1 on " in said


def test_of_one_model_what_was_saved_is_saved_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recordings = []
    for model in ("m", "other"):
        (recording,) = msgspec.msgpack.decode(Scene(seconds=1.0).packed(1))["recordings"]
        recordings.append(recording | {"model": model})
    both, one = str(tmp_path / "both"), str(tmp_path / "one")
    head = msgspec.msgpack.decode(Scene(seconds=1.0).packed(1))
    Path(both).write_bytes(msgspec.msgpack.encode(head | {"recordings": recordings}))
    assert main(["why", both, "--model", "other", "--save", one]) == 0
    capsys.readouterr()
    assert main(["why", one, "--json"]) == 0
    assert [told["model"] for told in json.loads(capsys.readouterr().out)] == ["other"]
    assert main(["why", both, "--model", "nobody", "--save", one]) == 1
    assert "models there: m, other" in capsys.readouterr().err


LISTED = b'{"models": [{"name": "m", "version": "1", "state": "READY"}]}'


@contextmanager
def answering(bodies: Sequence[bytes], status: bytes = LISTED) -> Iterator[str]:
    """A server that answers each request but for its status with the next of these, and then from the first again."""
    rest = itertools.cycle(bodies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = status if self.path == "/v2/status" else next(rest)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def one_of_two(process: str, seed: int) -> bytes:
    told = msgspec.msgpack.decode(Scene(seconds=1.0).packed(seed))
    told["recordings"][0] |= {"process": process, "processes": 2}
    return msgspec.msgpack.encode(told)


def test_every_process_behind_an_address_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = one_of_two("one", 1), one_of_two("other", 2)
    with answering([one, one, one, other]) as url:
        assert main(["why", url, "--model", "m"]) == 0
    said = capsys.readouterr().out
    assert "process one: 75 requests" in said
    assert "process other: 75 requests" in said


def test_one_process_that_is_never_met_holds_nothing_up(capsys: pytest.CaptureFixture[str]) -> None:
    with answering([one_of_two("one", 1)]) as url:
        assert main(["why", url, "--model", "m"]) == 0
    said = capsys.readouterr().out
    assert said.count("process one") == 1
    assert "this is of 1 of 2 processes" in said


def test_another_server_is_no_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    for status, said in ((b"{}", "is no gateway of this kind"), (LISTED, "no recording of a gateway")):
        with answering([b"{}"], status) as url:
            assert main(["why", url]) == 1
            assert said in capsys.readouterr().err
            assert main(["why", url, "--model", "m"]) == 1
            assert said in capsys.readouterr().err
