"""A gateway serves and counts on when the disk under its run_dir is full.

A state_dir without room is told at start: nothing that is learned would be kept.
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.served.gateway_process import ROOT, Served, served
from tests.served.small_disk import fill, seen_by, small_disk

pytestmark = pytest.mark.slow

ROWS = 20


def written(tmp_path: Path, disk: Path) -> Path:
    disk.mkdir()
    server = {"run_dir": str(disk / "run"), "drain_timeout_s": 5}
    model = {"name": "m", "max_rows": ROWS, "backends": [{"kind": "synthetic", "fixed_ms": 0, "row_ms": 0}]}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"server": server, "models": [model | {"batching": {"probe_s": 0}}]}))
    return path


def infer(gateway: Served, library: Any, *rows: int) -> None:
    address = gateway.http if library is tritonclient.http else gateway.grpc
    with library.InferenceServerClient(address) as client:
        for count in rows:
            values = np.full((count, 16), count, np.float32)
            tensor = library.InferInput("INPUT0", [count, 16], "FP32")
            tensor.set_data_from_numpy(values)
            assert np.array_equal(client.infer("m", [tensor]).as_numpy("OUTPUT0"), values)


def executions(gateway: Served) -> float:
    """All that the exposition shows."""
    with urllib.request.urlopen(f"http://{gateway.http}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "gateway_executions_total"
    )


def statistics(gateway: Served) -> Any:
    with urllib.request.urlopen(f"http://{gateway.http}/v2/models/m/stats", timeout=10) as response:
        return json.load(response)["model_stats"][0]


def test_a_gateway_counts_on_when_the_disk_is_full_from_the_start_or_later(tmp_path: Path) -> None:
    disk, log = tmp_path / "disk", tmp_path / "log"
    with served(written(tmp_path, disk), "--no-ray", within=small_disk(disk), log=log) as gateway:
        infer(gateway, tritonclient.http, 1)
        fill(seen_by(gateway.process.pid, disk))
        infer(gateway, tritonclient.http, *range(2, ROWS // 2))
        infer(gateway, tritonclient.grpc, *range(ROWS // 2, ROWS + 1))
        assert executions(gateway) == ROWS
        assert statistics(gateway)["inference_count"] == sum(range(1, ROWS + 1))
    assert "WARNING" not in log.read_text()


def test_a_gateway_starts_on_a_full_disk(tmp_path: Path) -> None:
    disk, log = tmp_path / "disk", tmp_path / "log"
    with served(written(tmp_path, disk), "--no-ray", within=small_disk(disk, full=True), log=log) as gateway:
        infer(gateway, tritonclient.http, 1, 2)
        infer(gateway, tritonclient.grpc, 3, 4)
        assert executions(gateway) == 4


def test_a_full_state_dir_is_told_at_start(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    path = tmp_path / "x.yaml"
    path.write_text(f"server: {{state_dir: {disk}/state}}\nmodels: [{{name: m, backends: [{{kind: synthetic}}]}}]")
    command = [*small_disk(disk, full=True), sys.executable, "-m", "gateway.cli", "serve", "--no-ray", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"server.state_dir: '{disk}/state': No space left on device: expected a directory to write in" in done.stderr
    assert "Traceback" not in done.stderr
