"""Commands that the gateway waits for: nothing of them outlives it, nor their time limit. And children that it asks."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gateway.process.child import Child, ChildLost, run
from tests.forks import a_fork
from tests.waiting import until

# Starts a process of its own, says who both are, and waits for ever.
COMMAND = """
import os, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("said-", "w") as file:
    file.write(f"{os.getpid()} {other.pid}")
os.rename("said-", "said")
time.sleep(600)
"""
WAITS = """
import sys
from pathlib import Path
from gateway.process.child import run
run([sys.executable, "-c", sys.argv[2]], cwd=Path(sys.argv[1]), longest_s=600)
"""
FORKS = """
import os, signal
from gateway.process.child import Child
child = Child("gateway.engine.long_bodies")
if not (fork := os.fork()):
    signal.pause()
print(child.pid, fork, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def none_lives(pids: list[int]) -> bool:
    living = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in living)


def pids_in(folder: Path) -> list[int]:
    until((folder / "said").exists)
    return [int(pid) for pid in (folder / "said").read_text().split()]


def test_a_command_ends_with_its_status_and_its_words(tmp_path: Path) -> None:
    code = "import os, sys; print('out'); print(os.getcwd(), sys.argv[1:], file=sys.stderr); sys.exit(3)"
    status, said = run([sys.executable, "-c", code, "a b"], cwd=tmp_path, longest_s=30)
    assert (status, said.decode()) == (3, f"{tmp_path} ['a b']\n")


def test_nothing_outlives_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"not ended within 5 s"):
        run([sys.executable, "-c", COMMAND], cwd=tmp_path, longest_s=5)
    until(lambda: none_lives(pids_in(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_gateway(tmp_path: Path, number: signal.Signals) -> None:
    gateway = subprocess.Popen([sys.executable, "-c", WAITS, str(tmp_path), COMMAND])
    try:
        pids = pids_in(tmp_path)
        gateway.send_signal(number)
        gateway.wait(30)
    finally:
        gateway.kill()
    until(lambda: none_lives(pids))


def test_a_child_does_not_outlive_the_gateway_though_a_fork_of_that_does() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout is not None
        child, fork = map(int, gateway.stdout.readline().split())
    try:
        until(lambda: none_lives([child]))
        assert not none_lives([fork])
    finally:
        psutil.Process(fork).kill()


def test_a_child_hears_that_it_is_to_end_though_a_fork_of_the_gateway_lives() -> None:
    statuses: list[int] = []
    child = Child("gateway.engine.long_bodies")
    child.watch(statuses.append)
    with a_fork():
        child.close()
    assert statuses == [0]


def test_a_child_that_was_killed_is_asked_nothing_though_its_status_is_not_known_yet() -> None:
    child = Child("gateway.engine.long_bodies")
    assert not child.hung_up
    with child._reaping:  # where the thread that learns its status stands
        psutil.Process(child.pid).kill()
        until(lambda: child.hung_up)
        assert not child.ended
    until(lambda: child.ended)
    with pytest.raises(ChildLost, match="ended with status -9") as lost:
        child.ask([b""])
    assert not lost.value.begun
    child.close()
    assert child.hung_up
