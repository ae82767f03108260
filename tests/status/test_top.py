"""`gateway top`, as a user types it: for scripts, and in a real terminal."""

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import psutil
import pytest

from gateway.cli import main
from gateway.commands.top_screen import Shown, ms, percent, screen, short, usd
from tests.rest_routes.serving import Served, serving
from tests.router.test_explain import answering, answering_grpc
from tests.status.test_rates import backend, model
from tests.status.watching import HOSTILE, MODELS, ask, body, fresh

slow = pytest.mark.slow
WITHIN_S = 30.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("top"), MODELS) as running:
        yield running


@contextlib.contextmanager
def asked_all_the_while(served: Served) -> Iterator[None]:
    done = threading.Event()

    def keep_asking() -> None:
        while not done.wait(0.02):
            ask(served, body())

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def top(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["top", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# for scripts


@slow
def test_once_prints_one_plain_table(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with asked_all_the_while(served):
        code, out, err = top(capsys, served.url, "--once", "--seconds", "0.6")
    assert (code, err) == (0, "")
    head, columns, quick, cheap, *_ = out.splitlines()
    assert head.startswith(f"http://{served.url}  serving  version ")
    assert columns.split()[:2] == ["MODEL,", "backend"]
    cells = quick.split()
    assert (cells[0], cells[1]) == ("quick", "ready")
    assert float(cells[2]) > 0
    assert cells[5].endswith("ms")
    assert cells[-1].startswith("$")
    assert cheap.split()[:2] == ["cheap", "live"]
    assert HOSTILE in out
    assert "\x1b" not in out


@slow
def test_json_has_the_figures_and_nulls_for_what_is_unknown(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with asked_all_the_while(served):
        code, out, _ = top(capsys, served.url, "--json", "--seconds", "0.6")
    (told,) = json.loads(out)["gateways"]
    assert (code, told["url"], told["error"], told["processes"]) == (0, f"http://{served.url}", None, 1)
    quick, hostile, *_ = told["models"]
    assert quick["requests_per_s"] > 0
    assert 0 < quick["p50_ms"] <= quick["p99_ms"]
    assert quick["usd_per_hour"] == 2.5
    assert quick["backends"][0]["share"] > 0
    assert (hostile["name"], hostile["p99_ms"], hostile["usd_per_hour"]) == (HOSTILE, None, None)


@slow
def test_a_short_look_lasts_until_the_gateway_has_new_figures(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    fresh(served)  # which is kept for longer than the look
    code, out, _ = top(capsys, served.url, "--json", "--seconds", "0.2")
    (told,) = json.loads(out)["gateways"]
    assert code == 0
    assert told["models"][0]["span_s"] >= 0.2
    assert told["models"][0]["requests_per_s"] is not None


@slow
def test_several_gateways_are_asked_and_one_that_is_not_there_is_told(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = top(capsys, served.url, "127.0.0.1:1", "--once", "--seconds", "0.6")
    assert code == 1
    assert out.startswith(f"http://{served.url}  serving")
    assert err == (
        "gateway: http://127.0.0.1:1: no gateway answers (Connection refused): start one, `gateway serve CONFIG`, or name the "
        "address of one that runs\n"
    )


@slow
@pytest.mark.parametrize("body", [b"{}", b"[]", b"hello"])
def test_another_server_is_told_apart(capsys: pytest.CaptureFixture[str], body: bytes) -> None:
    with answering(200, body) as answers:
        code, _, err = top(capsys, f"127.0.0.1:{answers.port}", "--once", "--seconds", "0.6")
    assert code == 1
    assert err.startswith(
        f"gateway: http://127.0.0.1:{answers.port}: answers 200 at /v2/status, and no status: expected the HTTP port of a"
    )


@slow
def test_the_port_of_grpc_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    from gateway.commands.top import StatusClient
    from gateway.errors import BackendUnreachable

    with answering_grpc() as port, pytest.raises(BackendUnreachable, match="no answer in HTTP: name the HTTP port"):
        StatusClient(f"127.0.0.1:{port}").look()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["localhost", "--once"], "localhost: no port: write localhost:8000, if that is the gateway's HTTP port"),
        (["ftp://a:1"], "ftp://a:1: expected the address of a gateway's HTTP port, such as http://127.0.0.1:8000"),
        (["a:b"], "a:b: expected the address of a gateway's HTTP port, such as http://127.0.0.1:8000"),
        (["--once", "--seconds", "0"], "--seconds: 0: expected 0.2 to 60"),
    ],
)
def test_what_is_no_address_is_told(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert top(capsys, *arguments) == (2, "", f"{said}\n")


# as it looks


def lines(width: int, height: int, *models: dict[str, object], error: str = "", status: bool = True) -> list[str]:
    told = {"version": "1", "host": "h", "process": 7, "processes": 1, "ready": True, "counted": True, "models": models}
    seen = Shown("http://g", told if status else None, [(each, None) for each in models], error, 3.0)
    return [line.plain for line in screen([seen], 10.0, width, height).renderables]  # type: ignore[union-attr]


def shown(**fields: object) -> dict[str, object]:
    lane = backend(state="live", detail="", role="regular", queue_requests=2, sessions=2, busy=1, usd_per_hour=0.5)
    return model(state="READY", reason="", backends=[lane], **fields)


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
@pytest.mark.parametrize("height", [1, 5, 24])
def test_it_is_never_wider_nor_higher_than_the_terminal(width: int, height: int) -> None:
    found = lines(width, height, *(shown(name=f"model {'x' * 60} {index}") for index in range(30)), error="no answer " * 30)
    assert len(found) <= max(2, height)
    assert all(len(line) <= width for line in found)


def test_where_there_is_little_room_what_matters_most_stays() -> None:
    wide, narrow = lines(200, 24, shown()), lines(60, 24, shown())
    assert wide[1].split()[-1] == "$/1M"
    assert "$/1M" not in narrow[1]
    assert {"REQ/S", "P99", "STATE"} <= set(narrow[1].split())


def test_names_are_cut_only_where_there_is_no_room_and_keep_what_tells_them_apart() -> None:
    name = "sentence-transformers-all-MiniLM-L6"
    models = [shown(name=name, version=version) for version in ("2", "12")]
    wide, narrow = lines(200, 24, *models), lines(30, 24, *models)
    assert [line[:38].rstrip() for line in (wide[2], wide[4])] == [f"{name} 2", f"{name} 12"]
    assert narrow[2].startswith("sentence-tran…ll-MiniLM-L6 2")
    assert narrow[4].startswith("sentence-tran…l-MiniLM-L6 12")
    assert "sentence-transfo…-all-MiniLM-L6 2  " in lines(60, 24, *models)[2]  # a column left out has left it some room
    assert "模…模模" in (wide_characters := lines(60, 24, shown(name="模" * 40, version="3"))[2])
    assert "模 3  ready" in wide_characters


def test_no_name_moves_the_cursor() -> None:
    found = lines(200, 24, shown(name="\x1b[2J\x07name\u202e\r"), error="\x1b]0;title\x07")
    assert "\x1b" not in "".join(found)
    assert "·[2J·name··" in "".join(found)


def test_what_is_to_be_said_of_a_backend_is_said() -> None:
    ill = backend(
        "ill", state="ejected", detail="for 1 s", role="regular", queue_requests=0, sessions=2, busy=0, usd_per_hour=None
    )
    found = lines(200, 24, shown() | {"backends": [ill]})
    assert "m/ill: ejected: for 1 s" in found


def test_a_gateway_that_never_answered_and_one_without_requests_say_so() -> None:
    assert lines(80, 10, status=False)[0] == "http://g  asking …"
    assert lines(80, 10, error="no gateway answers", status=False)[:2] == ["http://g", "no gateway answers"]
    assert "no requests yet" in lines(80, 10, shown())
    assert "the configuration has no models" in lines(80, 10)


def test_numbers_are_short_and_have_their_units() -> None:
    assert [short(value) for value in (0, 0.004, 0.44, 4.44, 44.4, 4444)] == ["0", "0.004", "0.4", "4.4", "44", "4,444"]
    assert [ms(value) for value in (None, 0.123, 4.44, 44.4, 4444)] == ["–", "0.12ms", "4.4ms", "44ms", "4.4s"]
    assert ms(float("inf"), 10_000.0) == ">10.0s"
    assert [percent(value) for value in (None, 0, 0.0001, 0.5, 0.99999, 1)] == ["–", "0%", "<0.1%", "50.0%", ">99.9%", "100%"]
    assert [usd(value) for value in (None, 0, 0.0012, 0.5, 1234)] == ["–", "$0", "$0.0012", "$0.50", "$1,234"]


# in a terminal


class Terminal:
    """`gateway top` on a terminal of its own. kind: its TERM. then: what a shell does after it was stopped; empty: no shell."""

    def __init__(self, *arguments: str, kind: str = "xterm-256color", then: str = "") -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment["TERM"] = kind
        command = [sys.executable, "-m", "gateway.cli", "top", *arguments]
        if then:  # -m: with job control
            command = ["/bin/sh", "-mc", f"{shlex.join(command)}; {then}"]
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.execve(command[0], command, environment)
        self.before = termios.tcgetattr(self._fd)
        self.written = ""
        self.status: int | None = None
        self.resize(120, 30)

    def resize(self, columns: int, rows: int) -> None:
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    @property
    def foreground(self) -> int:
        """The process group that the terminal listens to."""
        return os.tcgetpgrp(self._fd)

    def until(self, pattern: str) -> str:
        """What is written from now on, up to a match, without what moves the cursor or colours."""
        self.written = ""
        end_s = time.monotonic() + WITHIN_S
        while not (found := re.search(pattern, self.plain, re.DOTALL)):
            assert self._read(end_s), f"{pattern} was not shown: {self.plain}"
        return found[0]

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9])", "", self.written)

    def end(self) -> int:
        """Its exit code."""
        end_s = time.monotonic() + WITHIN_S
        while self._read(end_s):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self, end_s: float) -> bool:
        if not select.select([self._fd], [], [], max(0.0, end_s - time.monotonic()))[0]:
            return False
        try:
            text = os.read(self._fd, 65536).decode(errors="replace")
        except OSError:  # the other end has gone
            return False
        self.written += text
        return bool(text)


@contextlib.contextmanager
def terminal(*arguments: str, **options: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments, **options)
    try:
        yield opened
    finally:
        opened.close()


@slow
def test_it_shows_what_goes_on_and_follows_the_size_of_the_terminal(served: Served) -> None:
    with terminal(served.url) as shown, asked_all_the_while(served):
        shown.until(r"last 10 s, each second anew   q: end   w: last minute")
        assert shown.until(r"quick +ready +[1-9][\d.]* ")
        shown.resize(50, 12)
        narrow = shown.until(r"MODEL, backend[^\n]*")
        assert "P99" in narrow
        assert "$/1M" not in narrow
        shown.type("w")
        shown.until("last minute, each second anew")
        shown.type("q")
        assert shown.end() == 0
        assert shown.written.endswith("\x1b[?25h") or "\x1b[?25h" in shown.written  # the cursor is there again
        assert "\x1b[?1049l" in shown.written  # and what stood there before


@slow
def test_a_terminal_that_cannot_be_redrawn_gets_one_plain_table(served: Served) -> None:
    with terminal(served.url, "--seconds", "0.2", kind="dumb") as shown:
        shown.until(r"serving  version .*MODEL, backend.*quick")
        assert shown.end() == 0
        assert "\x1b" not in shown.written


@slow
def test_sigterm_leaves_the_terminal_as_it_was(served: Served) -> None:
    with terminal(served.url) as shown:
        shown.until("quick")
        os.kill(shown.pid, signal.SIGTERM)
        assert shown.end() == 143
        assert "\x1b[?1049l" in shown.written
        assert "\x1b[?25h" in shown.written
        assert "Traceback" not in shown.written


@slow
def test_ctrl_z_leaves_the_terminal_as_it_was_and_fg_takes_it_again(served: Served) -> None:
    with terminal(served.url, then="stty -a; echo stopped; read line; fg") as shown:
        shown.until("quick")
        shown.type("\x1a")
        shown.until(r"\sicanon\b.*stopped")
        assert "\x1b[?1049l" in shown.written
        assert "\x1b[?25h" in shown.written
        shown.type("\n")
        shown.until("quick.*last 10 s, each second anew")
        assert "\x1b[?1049h" in shown.written
        shown.type("w")
        shown.until("last minute, each second anew")
        shown.type("q")
        assert shown.end() == 0
        assert "\x1b[?1049l" in shown.written


@slow
def test_keys_are_heard_after_somebody_else_has_stopped_it(served: Served) -> None:
    with terminal(served.url, then="stty icanon echo; echo stopped; read line; fg") as shown:
        shown.until("quick")
        os.killpg(shown.foreground, signal.SIGSTOP)
        shown.until("stopped")
        shown.type("\n")
        shown.until("quick.*last 10 s, each second anew")
        shown.type("q")
        assert shown.end() == 0


@slow
def test_what_goes_on_in_the_background_waits_for_its_terminal(served: Served) -> None:
    with terminal(served.url, then="bg; echo behind; read line; fg") as shown:
        shown.until("quick")
        process = psutil.Process(shown.foreground)
        shown.type("\x1a")
        shown.until("behind")
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        shown.type("\n")
        shown.until("quick.*last 10 s, each second anew")
        shown.type("q")
        assert shown.end() == 0
        assert "Traceback" not in shown.written


@slow
def test_a_gateway_that_goes_is_told_and_its_last_figures_stay(tmp_path: Path) -> None:
    with contextlib.ExitStack() as gateway:
        running = gateway.enter_context(serving(tmp_path, MODELS))
        with terminal(running.url) as shown:
            shown.until("quick")
            gateway.close()
            shown.until(r"does not answer.*no answer for \d+ s; the figures are those from before.*quick")
            shown.type("\x03")  # Ctrl-C
            assert shown.end() == 0
            assert "\x1b[?1049l" in shown.written
            assert "Traceback" not in shown.written
