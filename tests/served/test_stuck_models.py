"""A gateway whose model is stuck in native code ends all the same, and nothing outlives it."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.served.gateway_process import ROOT
from tests.waiting import until

pytestmark = pytest.mark.slow

PATIENCE_S = 20.0
STUCK = """
import ctypes
import os
import subprocess
import sys
from pathlib import Path


class Stuck:
    inputs = outputs = [("INPUT0", "FP32", (-1, 16))]

    def __init__(self, note, gil, at_load):
        self.note = Path(note)
        self.gil = gil
        self.at_load = at_load

    def load(self):
        if self.at_load:
            self.stick()

    def predict(self, inputs):
        if inputs["INPUT0"][0, 0] == 7:
            self.stick()
        return inputs

    def stick(self):
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.note.write_text(f"{os.getpid()} {started.pid}")
        library = ctypes.PyDLL if self.gil else ctypes.CDLL  # the first keeps the GIL
        library(None).sleep(600)
"""


def config(folder: Path, *, isolation: str, at_load: bool) -> Path:
    (folder / "stuck.py").write_text(STUCK)
    backend = {
        "kind": "python",
        "model": f"{folder / 'stuck.py'}:Stuck",
        "isolation": isolation,
        "class_options": {"note": str(folder / "note"), "gil": isolation == "process", "at_load": at_load},
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump({"models": [{"name": "m", "max_rows": 8, "backends": [backend]}]}))
    return path


def stuck_processes(folder: Path) -> list[psutil.Process]:
    """The one that is stuck, and the one it started; once it is."""
    note = folder / "note"
    until(lambda: note.exists() and note.read_text().count(" "))
    return [psutil.Process(int(pid)) for pid in note.read_text().split()]


def ended(process: psutil.Process) -> bool:
    """A zombie has ended as well: in a container nobody may be there to reap it."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@contextlib.contextmanager
def gateway(path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "gateway.cli", "serve", str(path), "--no-ray", "--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("isolation", "number"), [("thread", signal.SIGTERM), ("process", signal.SIGTERM), ("process", signal.SIGKILL)]
)
def test_a_gateway_whose_model_is_stuck_at_load_ends(tmp_path: Path, isolation: str, number: signal.Signals) -> None:
    with gateway(config(tmp_path, isolation=isolation, at_load=True)) as process:
        stuck, started = stuck_processes(tmp_path)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == (0 if number == signal.SIGTERM else -number)
        assert ended(stuck)
        if isolation == "process":
            assert ended(started)
        else:
            started.kill()


def test_nothing_outlives_a_gateway_that_is_killed_in_the_middle_of_a_run(tmp_path: Path) -> None:
    with gateway(config(tmp_path, isolation="process", at_load=False)) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[2].removeprefix("http=")
        with socket.create_connection(address.split(":")) as client:
            body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [7.0] * 16}]})
            client.sendall(
                f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            stuck = stuck_processes(tmp_path)
            process.kill()
            assert all(ended(one) for one in stuck)
