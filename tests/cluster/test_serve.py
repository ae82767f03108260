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
from ray import serve
from ray.cluster_utils import Cluster

from tests.cluster.conftest import config, free_port, request
from tests.cluster.load import infer_body

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .metrics_interval_s. field"),  # deployments._scale
]


def start(path: Path, document: dict[str, Any]) -> tuple["subprocess.Popen[str]", int]:
    """The process, and its HTTP port once it answers."""
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "gateway.cli", "serve", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # Ray may have something to say as well, of a cluster that was there before.
    ready = next((line for line in process.stdout if line.startswith("gateway ready")), None)
    if ready is None:
        pytest.fail(process.communicate(timeout=10)[1])
    return process, int(ready.split()[2].rpartition(":")[2])


def end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)


def test_serve_joins_a_cluster_and_takes_back_only_its_application(cluster: Cluster, tmp_path: Path) -> None:
    document = config().model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": cluster.address, "application": "joined"}
    process, port = start(tmp_path / "gateway.yaml", document)
    try:
        assert request(port, "POST", "/v2/models/m/infer", infer_body([[1.0] * 16]))[0] == 200
        assert serve.status().applications["joined"].status == "RUNNING"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "joined" not in serve.status().applications  # and Serve still answers
    finally:
        end(process)


def test_serve_starts_ray_answers_what_is_in_flight_on_a_signal_and_ends_what_it_started(tmp_path: Path) -> None:
    document = config(fixed_ms=1500.0).model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": "local"}
    process, port = start(tmp_path / "gateway.yaml", document)
    try:
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
        end(process)


def test_serve_does_not_wait_for_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    document = config().model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": f"127.0.0.1:{free_port()}"}
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "gateway.cli", "serve", str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 1
    assert "no Ray cluster answers there" in finished.stderr
