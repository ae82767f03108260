"""What a model prints fails no request."""

import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import tritonclient.http

from backends.base import ModelSpec, SessionLost, TensorSpec
from gateway.commands.batch import _Progress
from gateway.commands.predict import _tell
from gateway.engine.session_process import ProcessModel
from gateway.process import prints
from tests.served.gateway_process import ROOT, served

SPEAKS = """
import sys
for stream in (sys.stdout, sys.stderr):
    print("x" * 100_000, file=stream, flush=True)
    print("a line", file=stream)
    stream.buffer.write(b"bytes" * 100_000)
"""


def speak(before: str, shell: str, *, unbuffered: str = "") -> "subprocess.CompletedProcess[str]":
    """In a process whose output goes where the shell says."""
    code = "import logging; logging.basicConfig(level='INFO')\nfrom gateway.process import prints\n" + before + SPEAKS
    command = ["sh", "-c", f'"$@" {shell}', "sh", sys.executable, "-c", code]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_without_them_a_print_raises() -> None:
    assert speak("", ">/dev/full 2>/dev/full").returncode != 0


UNBUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"])
"""As PYTHONUNBUFFERED, which docker/Dockerfile sets."""


@UNBUFFERED
@pytest.mark.parametrize("before", ["prints.never_raise()\n", "kept = prints.apart()\nkept.__enter__()\n"])
def test_what_cannot_be_printed_is_lost(before: str, unbuffered: str) -> None:
    assert speak(before, ">/dev/full 2>/dev/full", unbuffered=unbuffered).returncode == 0


MISUSES = """
import io, logging, sys
from gateway.process import prints
from gateway.process.console import Speech, set_up
set_up(Speech())
again = ["sys.{0} = io.TextIOWrapper(sys.{0}.buffer)", "sys.{0} = io.TextIOWrapper(sys.{0}.detach())", "sys.{0}.close()"] * 2
with prints.apart() as results:
    for misuse in [*again, "sys.{0} = open(sys.{0}.fileno(), 'w')"]:
        exec(misuse.format("stdout"))
        exec(misuse.format("stderr"))
        logging.warning("told")
        print("a line", flush=True)
        print("a line", file=sys.stderr, flush=True)
    print("a result", file=results)
print("after it")
print("after it", file=sys.stderr)
"""


def test_what_models_make_of_their_streams_is_no_matter_of_others() -> None:
    done = subprocess.run([sys.executable, "-c", MISUSES], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "a result\nafter it\n"), done.stderr
    assert [done.stderr.count(each) for each in ("told", "a line", "after it")] == [7, 14, 1]


def test_a_log_line_goes_above_the_bar_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with prints.apart(), _Progress(quiet=False):
            print("told", file=prints.log_stream(), flush=True)
            print("a line", file=sys.stderr, flush=True)
    shown = b""
    with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as screen:
        while more := screen.read(4096):
            shown += more
    assert re.search(rb"\x1b\[2Ktold\r\n.*\x1b\[2Ka line\r\n", shown, re.DOTALL)


@UNBUFFERED
def test_what_can_be_printed_is(unbuffered: str) -> None:
    said = speak("print('before', end=' ')\nprints.never_raise(waits=True)\n", "", unbuffered=unbuffered)
    assert said.stdout.startswith("before xxx")
    for stream in (said.stdout, said.stderr):
        assert (stream.count("x"), stream.count("a line"), stream.count("bytes")) == (100_000, 1, 100_000)


@UNBUFFERED
def test_who_prints_does_not_wait_for_a_reader_that_stands_still(unbuffered: str) -> None:
    code = (
        "import sys\nfrom gateway.process import prints\nprints.never_raise()\n"
        "for _ in range(10_000): print('x' * 99, file=sys.stderr)\n"
        "print('done')\ninput()\nprint('again', file=sys.stderr)\n"
    )
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        done, _, _ = select.select([process.stdout], [], [], 30)
        if not done:
            process.kill()
        read = len(os.read(process.stderr.fileno(), 1 << 20))
        out, err = process.communicate(b"\n", timeout=30)
    assert out == b"done\n"
    assert err.endswith(b"again\n")
    assert read + len(err) < 1_000_000  # 10 000 * 100


@UNBUFFERED
def test_a_line_is_written_at_once(unbuffered: str) -> None:
    killed = "prints.never_raise()\nimport os\nprint('out')\nprint('err', file=prints.sys.stderr)\nos.kill(os.getpid(), 9)\n"
    said = speak(killed, "", unbuffered=unbuffered)
    assert said.stdout == "out\n"
    assert said.stderr.startswith("err\n")


@UNBUFFERED
def test_what_a_model_prints_before_it_crashes_is_told(
    tmp_path: Path, unbuffered: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    (tmp_path / "m.py").write_text(
        "import os\n\nclass Model:\n    def predict(self, inputs):\n        if inputs['x'][0] == 7:\n"
        "            print('it is 7', chr(0x2603))\n            os.kill(os.getpid(), 11)\n        return {'y': inputs['x']}\n"
    )
    spec = ModelSpec("m", (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),), max_rows=1)
    with (
        closing(ProcessModel("python", {"model": f"{tmp_path}/m.py:Model"}, spec).load()) as model,
        closing(model.open_session(0)) as session,
        pytest.raises(SessionLost),
    ):
        session.run({"x": np.full(1, 7, np.float32)}, {})
    assert capfd.readouterr().err == "it is 7 \\u2603\n"


MODEL = """
import atexit, os, sys
print("imported")
atexit.register(print, "at the end")
class Model:
    def __init__(self):
        sys.stdout.write("loading weights...")
        os.write(1, b"at its descriptor\\n")
        os.system("echo what it starts")
        print("before", file=sys.__stdout__)
    def predict(self, x: float) -> float:
        print("run")
        return 2 * x
"""
CONFIG = """
models:
- name: m
  inputs: [{name: x, datatype: FP64, shape: [-1]}]
  outputs: [{name: y, datatype: FP64, shape: [-1]}]
  max_rows: 1
  backends: [{kind: python, model: 'model.py:Model'}]
"""
ONLY_IMPORTED = ("imported", "at the end")
LOADED = (*ONLY_IMPORTED, "loading weights...", "at its descriptor", "what it starts", "before", "run")


@pytest.fixture
def speaking(tmp_path: Path) -> Path:
    """A folder of a model that prints, its configuration, and a request."""
    for name, text in {"model.py": MODEL, "x.yaml": CONFIG, "in.json": '{"x": [1]}', "rows.jsonl": '{"x": 1}\n'}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "results", "said"),
    [
        ("init model.py:Model", r"models:\n  - name: model\n.*", ONLY_IMPORTED),
        ("check --json x.yaml", r"\{\n.*\}\n", ONLY_IMPORTED),
        ("check --load x.yaml", r"m version 1: .*\nx\.yaml: valid\n", LOADED),
        ("predict x.yaml m --input in.json", r"\{[^\n]*\[2\.0\]\}\]\}\n", LOADED),
        ("batch x.yaml m rows.jsonl out.jsonl", r"out\.jsonl: 1 rows, [^\n]*\n", LOADED),
    ],
    ids=str,
)
def test_what_a_model_prints_is_not_among_the_results(
    speaking: Path, command: str, results: str, said: tuple[str, ...]
) -> None:
    done = run_gateway(speaking, "-m", "gateway", *command.split())
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(results, done.stdout, re.DOTALL), done.stdout
    assert [each for each in said if each not in done.stderr] == []


def run_gateway(
    folder: Path, *arguments: str, stdout: "int | IO[str]" = subprocess.PIPE, stderr: "int | IO[str]" = subprocess.PIPE
) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=stdout, stderr=stderr, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_what_is_printed_after_results_that_had_no_room_is_no_traceback(speaking: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run_gateway(speaking, "-m", "gateway", "init", "model.py:Model", stdout=full)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line not in ONLY_IMPORTED] == [
        "gateway: [Errno 28] No space left on device: 'standard output'"
    ]


@pytest.mark.slow
def test_what_a_model_prints_costs_no_result_where_the_log_is_full(speaking: Path) -> None:
    (speaking / "model.py").write_text(MODEL.replace("os.write", "print"))  # it alone raises
    with open("/dev/full", "w") as full:
        done = run_gateway(speaking, "-m", "gateway", "predict", "x.yaml", "m", "--input", "in.json", stderr=full)
    assert (done.returncode, done.stdout[-9:]) == (0, "[2.0]}]}\n")


@pytest.mark.slow
def test_who_calls_a_command_from_python_prints_on(speaking: Path) -> None:
    called = "from gateway.cli import main; print('mine'); main(['check', 'x.yaml']); print('mine again')"
    done = run_gateway(speaking, "-c", called)
    assert re.fullmatch(r"mine\nm version 1: .*\nx\.yaml: valid\nmine again\nat the end\n", done.stdout), done.stdout


class Wrapper:
    """Stands before a file, as a host has it that keeps what is printed."""

    def __init__(self, file: IO[str]) -> None:
        self.kept = ""
        self._file = file

    def write(self, text: str) -> int:
        self.kept += text
        return self._file.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def speak_here() -> None:
    """As a command does that is called from Python."""
    with prints.printed(), prints.apart() as results:
        print("a line")
        print("a line", file=sys.stderr)
        print("told", file=prints.log_stream())
        _tell([b"a result"], results)


def test_what_a_host_has_wrapped_is_not_passed_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as file:
        out, error = Wrapper(file), Wrapper(file)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error)
        speak_here()
    assert (out.kept, error.kept) == ("a result\n", "a line\na line\ntold\n")


def test_results_come_after_what_a_host_has_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = io.BytesIO()
    with open(tmp_path / "out", "w") as file, io.TextIOWrapper(written) as text:
        for out in (file, text):
            monkeypatch.setattr(sys, "stdout", out)
            print("before")
            speak_here()
            out.flush()
        assert written.getvalue() == b"before\na result\n"
    assert (tmp_path / "out").read_text() == "before\na result\n"


def test_results_for_a_standard_output_that_a_host_has_closed_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
    speak_here()


@pytest.mark.slow
def test_the_ready_line_begins_a_line_whatever_a_model_prints(speaking: Path) -> None:
    log = speaking / "log"
    with served(speaking / "x.yaml", "--no-ray", log=log) as gateway:  # which reads that line first
        told = gateway.process.stdout
        assert told is not None
        assert told.readline() == "models: m\n"
    assert [each for each in LOADED if each not in log.read_text()] == []


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_that_prints_answers_while_the_disk_is_full(tmp_path: Path, isolation: str) -> None:
    wraps = ["import io", "sys.stdout = io.TextIOWrapper(sys.stdout.buffer)"]
    speaks = "".join(f"            {line}\n" for line in [*SPEAKS.strip().splitlines(), *wraps])
    speaks = f"        if inputs['INPUT0'][0, 0] == 7:  # not where it is warmed up\n{speaks}"
    (tmp_path / "own.py").write_text(
        f"class Own:\n    def predict(self, inputs):\n{speaks}        return {{'OUTPUT0': inputs['INPUT0']}}\n"
    )
    config = tmp_path / "x.yaml"
    config.write_text(
        "models:\n- name: m\n  inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]\n"
        "  outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}]\n"
        f"  backends: [{{kind: python, model: '{tmp_path}/own.py:Own', isolation: {isolation}}}]\n"
    )
    full = ["sh", "-c", 'exec "$@" 2>/dev/full', "sh"]
    with served(config, "--no-ray", within=full) as gateway:
        assert gateway.process.stdout is not None
        gateway.process.stdout.close()  # whoever started it has read enough
        with tritonclient.http.InferenceServerClient(gateway.http) as client:
            for _ in range(3):
                tensor = tritonclient.http.InferInput("INPUT0", [1, 4], "FP32")
                tensor.set_data_from_numpy(np.full((1, 4), 7, np.float32))
                assert client.infer("m", [tensor]).as_numpy("OUTPUT0").sum() == 28
