"""`gateway serve` as a process: it starts Ray, answers, drains on a signal, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.cluster.conftest import config, request
from tests.cluster.load import infer_body

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_serve_starts_ray_answers_what_is_in_flight_on_a_signal_and_ends_what_it_started(tmp_path: Path) -> None:
    document = config(fixed_ms=1500.0).model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": "local"}
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "gateway.cli", "serve", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("gateway ready http=127.0.0.1:"), line
        port = int(line.split()[2].rpartition(":")[2])
        started = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in started)
        answers: list[tuple[int, Any]] = []
        body = infer_body([[1.0] * 16])
        asking = threading.Thread(target=lambda: answers.append(request(port, "POST", "/v2/models/m/infer", body)))
        asking.start()
        time.sleep(0.5)  # it now runs in the replica, for a second more
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        asking.join()
        assert [status for status, _ in answers] == [200]
        _, left = psutil.wait_procs(started, timeout=10)
        assert not left
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
