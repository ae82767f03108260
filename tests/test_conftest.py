"""What conftest.py does for all tests."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop


def test_a_loop_on_which_a_listener_was_left_open_is_closed_and_says_so() -> None:
    loop = uvloop.new_event_loop()
    loop.run_until_complete(loop.create_server(asyncio.Protocol, "127.0.0.1", 0))
    with pytest.raises(ResourceWarning, match="unclosed resource <TCPServer"):
        loop.close()
    assert loop.is_closed()


ENDS_ITS_PROCESS_ONCE = """
import os
import time
from pathlib import Path

def test_0():
    time.sleep(0.5)  # until the other process has run all it had
    try:
        Path(__file__).with_suffix(".ended").touch(exist_ok=False)
    except FileExistsError:
        return
    os._exit(3)
"""
PASSES = "def test_{}(): pass\n"


@pytest.mark.slow
def test_all_tests_are_run_after_one_of_the_processes_was_lost(tmp_path: Path) -> None:
    for name in "abcdefghij":
        (tmp_path / f"test_{name}.py").write_text(PASSES.format(1) + PASSES.format(2))
    (tmp_path / "test_e.py").write_text(ENDS_ITS_PROCESS_ONCE + PASSES.format(1))
    options = "-p tests.file_scheduling --numprocesses 2 --max-worker-restart 1 --dist loadfile --no-loadscope-reorder"
    root = Path(__file__).resolve().parent.parent
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), *options.split(), str(tmp_path)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert re.search(r"\b1 failed, 20 passed\b", ran.stdout), ran.stdout + ran.stderr  # it has failed, and is run again
