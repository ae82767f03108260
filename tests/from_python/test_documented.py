"""docs/python.md in one folder: a block with a title is a file, another is run, and prints what stands there."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "python.md"
BLOCK = re.compile(r"^```python(?: title=\"(.+?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}

WRONG = """
import gateway

gateway.laod("area.py")
gateway.run("area.py", http_port="8000")
gateway.load("area.py").predict([1.0])
answer: int = gateway.load("area.py").predict({"x": [1.0]})


@gateway.model(max_rows=1)
def same(x: float) -> float:
    return x


text: str = same(1.0)
gateway.model(names="x")
"""

# What others have typed is not what is tested, and would take twenty seconds to read.
MYPY = """
[mypy]
strict = true
follow_imports = silent

[mypy-pydantic.*,prometheus_client.*,yaml.*,google.*,grpc.*,grpc_reflection.*,grpc_health.*,msgspec.*,hpack.*,httptools.*,\
ml_dtypes.*,orjson.*,tritonclient.*,uvloop.*]
follow_imports = skip
ignore_missing_imports = true
"""


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each block as a file; those that have no title as block_1.py …"""
    folder = tmp_path_factory.mktemp("documented")
    for number, (title, text) in enumerate(BLOCK.findall(PAGE.read_text())):
        (folder / (title or f"block_{number}.py")).write_text(text)
    return folder


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)


def test_each_block_prints_what_stands_behind_it(blocks: Path) -> None:
    for path in sorted(blocks.glob("block_*.py")):
        code = path.read_text()
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(blocks):
            exec(compile(code, path.name, "exec"), {"__name__": "__main__"})
        assert printed.getvalue().splitlines() == re.findall(r"^ *print\(.*\)  # (.+)$", code, re.MULTILINE)


@pytest.mark.slow
def test_the_tests_in_it_pass(blocks: Path) -> None:
    done = run(blocks, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_area.py")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_its_script_runs(blocks: Path) -> None:
    done = run(blocks, "-W", "error", "triple.py")
    assert (done.stdout, done.stderr) == ("{'output': array([[ 3.,  6.,  9., 12.]], dtype=float32)}\n", "")


@pytest.mark.slow
def test_mypy_strict_passes_what_is_right_and_tells_what_is_wrong(blocks: Path) -> None:
    (blocks / "wrong.py").write_text(WRONG)
    (blocks / "mypy.ini").write_text(MYPY)
    done = run(blocks, "-m", "mypy", *sorted(path.name for path in blocks.glob("*.py")))
    faults = re.findall(r"^(\S+?):(\d+): error: .*\[(.+)\]$", done.stdout, re.MULTILINE)
    assert faults == [
        ("wrong.py", "4", "attr-defined"),
        ("wrong.py", "5", "arg-type"),
        ("wrong.py", "6", "arg-type"),
        ("wrong.py", "7", "assignment"),
        ("wrong.py", "15", "assignment"),
        ("wrong.py", "16", "call-overload"),
    ], done.stdout
