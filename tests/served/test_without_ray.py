"""Where Ray is not installed: one plain process needs none of it, and what needs it says so."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# The first argument of `gateway` follows. As if its files were not there.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] == "ray" else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from gateway.cli import main
sys.exit(main(sys.argv[1:]))
"""
ROOT = Path(__file__).parent.parent.parent


def command(*typed: object) -> list[str]:
    return [sys.executable, "-c", WITHOUT, *map(str, typed)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "twice.py"
    path.write_text("def twice(x: float) -> float:\n    return 2 * x\n")
    return path


def test_one_plain_process_serves(model: Path) -> None:
    typed = command("serve", model, "--http-port", "0", "--grpc-port", "0")
    with subprocess.Popen(typed, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("gateway ready"), line
            address = dict(part.split("=") for part in line.split()[2:])["http"]
            body = b'{"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [21]}]}'
            with urllib.request.urlopen(f"http://{address}/v2/models/twice/infer", body, timeout=10) as answer:
                assert b"42.0" in answer.read()
        finally:
            process.terminate()
    assert process.returncode == 0


def test_what_needs_ray_says_that_it_is_not_there(model: Path) -> None:
    done = subprocess.run(command("serve", model, "--ray"), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "Ray is not installed: install `ray[serve]`, or have one plain process with --no-ray"
    )
    assert "Traceback" not in done.stderr
