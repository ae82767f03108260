"""Gateways with one `server.run_dir`: what clients have registered with one that lives is not the next one's to forget."""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.served.gateway_process import ROOT, served

pytestmark = pytest.mark.slow


def regions(address: str) -> list[str]:
    with urllib.request.urlopen(f"http://{address}/v2/systemsharedmemory/status", timeout=10) as answer:
        return [region["name"] for region in json.load(answer)]


def register(address: str, name: str, key: str) -> None:
    body = json.dumps({"key": key, "byte_size": 64}).encode()
    urllib.request.urlopen(f"http://{address}/v2/systemsharedmemory/region/{name}/register", body, timeout=10).close()


def test_regions_stay_until_no_gateway_of_their_run_dir_lives(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"server: {{run_dir: {tmp_path}/run}}\nmodels: [{{name: m, backends: [{{kind: synthetic}}]}}]")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as segment:
        segment.truncate(64)
        with served(path, "--no-ray") as first:
            register(first.http, "r", segment.name.removeprefix("/dev/shm"))
            command = [sys.executable, "-m", "gateway.cli", "serve", "--no-ray", str(path), "--grpc-port", "0", "--http-port"]
            taken = first.http.rpartition(":")[2]
            done = subprocess.run([*command, taken], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
            assert "taken by another process" in done.stderr
            assert regions(first.http) == ["r"]
            with served(path, "--no-ray"):
                assert regions(first.http) == ["r"]
        with served(path, "--no-ray") as next_one:
            assert regions(next_one.http) == []
