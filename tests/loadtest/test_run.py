"""The command line: arguments in, exit code and files out."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from loadtest.cli import main
from loadtest.errors import ExitCode, UsageError
from loadtest.load import live_log
from loadtest.load.patterns import schedule
from loadtest.load.request_log import OK, RequestLog
from loadtest.measuring.generator_limit import LEAST_LIMIT_RPS, NullServer, generator_limit_rps, null_server
from loadtest.results import LoadSpec, Protocol, SloSpec, read_run
from tests.file_limit import no_file_longer_than

pytestmark = pytest.mark.slow

EASY = ["--pattern", "constant", "--rate", "800", "--duration", "1", "--warmup", "0", "--quiet"]


@pytest.fixture(scope="module")
def server() -> Iterator[NullServer]:
    with null_server() as running:
        yield running


@pytest.mark.parametrize("protocol", ["rest-json", "rest-binary", "grpc"])
def test_an_slo_that_is_met_exits_0(server: NullServer, tmp_path: Path, protocol: str) -> None:
    target = f"127.0.0.1:{server.grpc_port if protocol == 'grpc' else server.http_port}"
    # A limit of minutes: its 1 % is more lag than this machine can have, however busy it is.
    options = [
        "--protocol",
        protocol,
        "--model",
        "null",
        "--slo",
        "p99<600s",
        "--timeout",
        "900",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main(["run", target, *EASY, *options]) == ExitCode.MET
    result = read_run(tmp_path / "r.json")
    assert (result.verdict, result.succeeded, result.spec.protocol) == ("pass", 800, protocol)


@pytest.mark.parametrize("where", ["option", "file"])
def test_a_target_of_grpc_needs_no_protocol(server: NullServer, tmp_path: Path, where: str) -> None:
    target, path = f"grpc://127.0.0.1:{server.grpc_port}", tmp_path / "spec.json"
    path.write_text(json.dumps({"target": target, "model": "null"}))
    asked = [target, "--model", "null"] if where == "option" else ["--spec", str(path)]
    main(["run", *asked, *EASY, "--duration", "0.2", "--json", str(tmp_path / "run.json")])
    result = read_run(tmp_path / "run.json")
    assert (result.spec.protocol, result.succeeded) == ("grpc", 160)


def test_a_protocol_that_is_named_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "grpcs://127.0.0.1:1", "--protocol", "rest-json", "--model", "m"]) == ExitCode.USAGE
    assert "expected http://HOST:PORT for protocol rest-json" in capsys.readouterr().err


def test_an_slo_that_is_missed_exits_1_and_one_that_cannot_be_kept_by_the_generator_3(server: NullServer) -> None:
    target = f"127.0.0.1:{server.http_port}"
    missed = ["--model", "absent", "--payload", str(Path(__file__).parent / "payload.json"), "--slo", "p99<600s"]
    assert main(["run", "127.0.0.1:1", *EASY, *missed]) == ExitCode.MISSED
    assert main(["run", target, *EASY, "--model", "null", "--slo", "p99<100us"]) == ExitCode.INVALID  # 1 µs of lag


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x:1", "--slo", "p99"],
        ["x:1", "--pattern", "sine"],
        ["x:1", "--header", "nocolon"],
        ["--spec", "/nowhere.json"],
        ["http://"],
    ],
)
def test_wrong_arguments_exit_2_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("loadtest: ")


def test_the_summary_the_blocks_and_the_log_are_written(
    server: NullServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {
        "target": f"127.0.0.1:{server.http_port}",
        "model": "null",
        "pattern": "constant",
        "rate_rps": 100,
        "duration_s": 0.5,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    files = ["--csv", str(tmp_path / "blocks.csv"), "--log", str(tmp_path / "log.csv")]
    main(["run", "--spec", str(tmp_path / "spec.json"), "--rate", "200", "--slo", "p99<10s", *files])
    out = capsys.readouterr().out
    for word in ("latency", "goodput", "send lag", "SLO"):
        assert word in out
    assert (tmp_path / "blocks.csv").read_text().startswith("index,start_s,")
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + 100  # 200/s from the option · 0.5 s


@pytest.mark.parametrize("option", ["json", "csv", "openmetrics", "log"])
def test_a_file_that_cannot_be_written_is_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    kept = {name: str(tmp_path / name) for name in ("json", "csv", "openmetrics", "log") if name != option}
    files = [word for name, path in kept.items() for word in (f"--{name}", path)]
    for bad, why in ((tmp_path / "absent" / "x", "No such file"), (tmp_path, "Is a directory")):
        # A run would say that nobody answers there.
        assert main(["run", "127.0.0.1:1", *EASY, "--model", "m", f"--{option}", str(bad), *files]) == ExitCode.USAGE
        assert capsys.readouterr().err.startswith(f"loadtest: --{option} {bad}: cannot be written: {why}")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_at_the_end_costs_nothing_else(
    server: NullServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("json", "csv", "log")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    target = f"127.0.0.1:{server.http_port}"
    load = ["--model", "null", "--pattern", "constant", "--rate", "200", "--duration", "0.5", "--warmup", "0"]
    with no_file_longer_than(8_000):  # the result as JSON is, the others and what is kept meanwhile are not
        assert main(["run", target, *load, *options]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert "100 requests" in out
    assert f"{files['json']}: cannot be written: " in err
    assert f"loadtest recover {files['json']}.live" in err
    assert len(files["csv"].read_text().splitlines()) == 1 + 25
    assert len(files["log"].read_text().splitlines()) == 1 + 100
    assert not files["json"].exists()
    assert main(["recover", f"{files['json']}.live", "--json", str(files["json"])]) != ExitCode.USAGE
    assert read_run(files["json"]).requests == 100


def test_what_another_run_measures_is_left_to_it(
    server: NullServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = tmp_path / "r.json.live"
    asked = ["run", f"127.0.0.1:{server.http_port}", *EASY, "--duration", "0.1", "--model", "null", "--json", str(live)[:-5]]
    with live_log.create(live) as file:
        file.write(b"its table")
        file.flush()
        assert main(asked) == ExitCode.USAGE
        assert f"{live}: another run writes here: wait for its end, or name another file" in capsys.readouterr().err
        assert live.read_bytes() == b"its table"
    # As it was killed, what it has left stays until a run begins that writes the file.
    assert main(["run", "127.0.0.1:1", *asked[2:]]) == ExitCode.MISSED
    assert live.read_bytes() == b"its table"
    main(asked)
    assert not live.exists()


def test_what_another_run_has_removed_as_it_was_opened_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, lock = tmp_path / "r.json.live", fcntl.flock

    def late(*asked: Any) -> None:
        monkeypatch.undo()
        live.unlink()
        lock(*asked)

    monkeypatch.setattr(fcntl, "flock", late)
    with live_log.create(live) as file:
        assert live.stat().st_ino == os.stat(file.fileno()).st_ino


@pytest.mark.parametrize(("number", "kept"), [(errno.ENOLCK, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_without_locks_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kept: bool) -> None:
    def flock(*asked: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with nullcontext() if kept else pytest.raises(UsageError, match="cannot be written"):
        live_log.create(tmp_path / "x.live").close()


def test_recover_tells_of_a_file_that_cannot_be_written_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = tmp_path / "x.live"
    live.write_bytes(b"nothing of a run")
    for option in ("--json", "--log"):
        assert main(["recover", str(live), option, str(tmp_path / "absent" / "x")]) == ExitCode.USAGE
        assert f"{option} {tmp_path}/absent/x: cannot be written" in capsys.readouterr().err


class _Announces(BaseHTTPRequestHandler):
    """Answers everything and says when the first inference has come."""

    protocol_version = "HTTP/1.1"
    inferred = threading.Event()

    def do_GET(self) -> None:
        self._answer(b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.inferred.set()
        self._answer(b"{}")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, processes: str) -> None:
    _Announces.inferred.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Announces) as listener:
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        command = [
            sys.executable,
            "-m",
            "loadtest.cli",
            "run",
            f"127.0.0.1:{listener.server_port}",
            "--model",
            "m",
            "--rate",
            "50",
        ]
        command += ["--duration", "60", "--processes", processes, "--json", str(tmp_path / "r.json"), "--connections", "4"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert _Announces.inferred.wait(30)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        listener.shutdown()
    assert "Traceback" not in err
    assert "PARTIAL" in out
    result = read_run(tmp_path / "r.json")
    assert result.partial
    assert result.window_s < 30


def test_selfcheck_reports_both_protocols(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", "--seconds", "0.2", "--rates", "200,400"]) == ExitCode.MET
    out = capsys.readouterr().out
    assert "rest-json" in out
    assert "grpc" in out
    assert "can offer" in out


def test_without_a_rate_a_few_users_send_and_it_is_said(server: NullServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "null", "--duration", "0.3", "--warmup", "0"]
    assert main(["run", f"127.0.0.1:{server.http_port}", *options]) == ExitCode.MET
    out, err = capsys.readouterr()
    assert "no --rate: 10 users" in err
    assert "users:count=10" in out
    assert main(["run", f"127.0.0.1:{server.http_port}", *options, "--pattern", "poisson"]) == ExitCode.USAGE
    assert "--rate" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 1000])
def test_a_file_that_no_run_has_left_is_refused(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.live").write_bytes(content)
    assert main(["recover", str(tmp_path / "x.live")]) == ExitCode.USAGE
    assert "x.live" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "code", "overdue"), [("1s", ExitCode.MISSED, 400), ("10s", ExitCode.MET, 0)])
def test_a_server_that_hung_when_its_run_was_killed_is_not_excused(
    tmp_path: Path, limit: str, code: ExitCode, overdue: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.live"
    slo = SloSpec.parse(f"p99<{limit},errors<1%")
    spec = LoadSpec("127.0.0.1:1", model="m", pattern="constant", rate_rps=100, duration_s=60, warmup_s=0, slo=slo)
    intended = schedule(spec.pattern, rate_rps=100, duration_s=60, seed=0).intended_ns
    with live_log.create(path) as file:
        log = RequestLog.shared(len(intended), file.fileno())
        np.asarray(log.intended)[:] = intended
        for row in range(1500):  # 10 s in which each was answered in 5 ms, then 5 s in which nobody was
            log.dispatched[row] = log.sent[row] = intended[row] + 1
            if row < 1000:
                log.done[row], log.status[row] = intended[row] + 5_000_000, OK
        live_log.describe(file, spec, requests=len(intended), started_at="2026-11-28T12:00:00", digests={"traces": "t"})
    kept = path.read_bytes()
    assert main(["recover", str(path), "--json", str(tmp_path / "x.json"), "--log", str(tmp_path / "x.csv")]) == code
    result = read_run(tmp_path / "x.json")
    # The last sign of life came when the last was dispatched.
    assert (result.started_at, result.ended_at) == ("2026-11-28T12:00:00", "2026-11-28T12:00:14.990")
    assert (result.succeeded, result.overdue, result.failed) == (1000, pytest.approx(overdue, abs=1), 0)
    assert result.excluded == pytest.approx(500 - overdue, abs=2)
    assert (tmp_path / "x.csv").read_text().count(",cut\n") == pytest.approx(500, abs=1)
    assert path.read_bytes() == kept
    capsys.readouterr()
    assert main(["recover", str(path), "--log", "-"]) == code
    assert capsys.readouterr().out.encode() == (tmp_path / "x.csv").read_bytes()
    path.write_bytes(kept.replace(b"2026-11-28", b"2026\xce11-28"))
    assert main(["recover", str(path)]) == ExitCode.USAGE
    assert "x.live: cannot be read: " in capsys.readouterr().err


def test_what_a_run_of_a_trace_had_measured_needs_no_trace(tmp_path: Path) -> None:
    trace, path = tmp_path / "a.csv", tmp_path / "x.live"
    trace.write_text("".join(f"{0.01 * row:.2f}\n" for row in range(6000)))
    spec = LoadSpec("127.0.0.1:1", model="m", pattern=f"trace:file={trace}", duration_s=60, warmup_s=0)
    intended = schedule(spec.pattern, rate_rps=0, duration_s=60, seed=0).intended_ns
    with live_log.create(path) as file:
        log = RequestLog.shared(len(intended), file.fileno())
        np.asarray(log.intended)[:] = intended
        for row in range(1500):
            log.dispatched[row] = log.sent[row] = intended[row] + 1
            log.done[row], log.status[row] = intended[row] + 5_000_000, OK
        live_log.describe(file, spec, requests=len(intended), started_at="2026-11-28T12:00:00", digests={"traces": "t"})
    for change in (lambda: trace.write_text("0\n1\n"), trace.unlink):
        change()
        assert main(["recover", str(path), "--json", str(tmp_path / "x.json")]) == ExitCode.MET
        result = read_run(tmp_path / "x.json")
        assert (result.succeeded, result.asked_rps, result.valid) == (1500, pytest.approx(100, rel=0.01), True)
        assert result.digests == {"traces": "t"}
        assert [block.asked for block in result.blocks] == [200] * 7 + [100]  # of 2 s; it ended in the middle of the last


@pytest.mark.parametrize("protocol", ["rest-json", "grpc"])
def test_what_one_process_can_offer_is_measured_once(protocol: Protocol) -> None:
    async def scenario() -> tuple[float, float]:
        return await generator_limit_rps(protocol), await generator_limit_rps(protocol)

    first, again = uvloop.run(scenario())
    assert first == again
    assert LEAST_LIMIT_RPS <= first < 1_000_000
