"""Who supervises Ray: signals reach it and not its child, and whatever the child started has ended before it has."""

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from gateway.process import supervisor
from gateway.process.run_dir import private_directory, shared_run_dir

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SUPERVISE = """
import sys
from gateway.process.console import Speech, set_up
from gateway.process.supervisor import supervise
set_up(Speech())
sys.exit(supervise([sys.executable, "-c", {child!r}], b"work", drain_timeout_s={drain_s}, unanswered_s=0.5))
"""
# Starts a process that is deaf and in a session of its own, as its own child's child; then does as `act` says.
CHILD = """
import os, signal, subprocess, sys, time
from gateway.process.supervisor import *
work = sys.stdin.buffer.read()
tell = Tell(int(sys.argv[1]), os.getppid())
deaf = [sys.executable, "-c", "import signal, time; print('deaf', flush=True); time.sleep(60)"]
shell = subprocess.Popen(["sh", "-c", 'setsid "$@" & wait', "sh", *deaf], stdout=subprocess.PIPE)
shell.stdout.readline()
def stop(number, frame):
    os.write(1, b"asked\\n")  # no print: the signal may come within the one below, and a print within a print fails
    {stop}
{act}
print("begun", work.decode(), flush=True)
while True:
    time.sleep(1)
"""
HEARS = "hear_signals(stop)"


@contextmanager
def supervised(act: str, *, stop: str = "os._exit(0)", drain_s: float = 0.1) -> "Iterator[subprocess.Popen[str]]":
    """In a session of its own; the child has begun. At the end none of them is left."""
    code = SUPERVISE.format(child=CHILD.format(act=act, stop=stop), drain_s=drain_s)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begun work\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 3
        yield process
        process.wait(20)
        assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_before_it_serves_a_signal_ends_all_at_once(number: signal.Signals) -> None:
    with supervised("", drain_s=60.0) as process:
        os.killpg(process.pid, number)
        out, told = process.communicate(timeout=20)
        assert (process.returncode, out, told) == (0, "", "stopping\n")


def test_what_serves_is_asked_to_stop_also_by_a_signal_to_each_process() -> None:
    with supervised(f"tell(SERVING); {HEARS}", drain_s=60.0) as process:
        _, *rest = psutil.Process(process.pid).children(recursive=True)
        for descendant in rest:
            descendant.terminate()
        time.sleep(0.2)  # else the signals may be still to come
        assert psutil.STATUS_ZOMBIE not in [other.status() for other in rest]
        process.terminate()
        out, told = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "asked\n")
        assert told == "stopping: requests in flight have up to 60 s; Ctrl-C again ends at once\n"


def test_what_does_not_stop_in_time_is_killed_and_told() -> None:
    with supervised(f"tell(SERVING); {HEARS}", stop="pass") as process:
        process.terminate()
        _, told = process.communicate(timeout=20)
        told_last = ["ended by force: Ray still ran 2.5 s after drain_timeout_s 0.1"]
        assert (process.returncode, told.splitlines()[1:]) == (0, told_last)


def test_what_takes_nothing_back_from_a_cluster_is_killed_after_the_time_that_a_cluster_has_to_answer_and_fails() -> None:
    act = f"tell(LEFT + 'something is left'); tell(SERVING); tell(ENDING); {HEARS}"
    with supervised(act, stop="pass") as process:
        process.terminate()
        _, told = process.communicate(timeout=20)
        told_last = ["ended by force: Ray still ran 3.1 s after drain_timeout_s 0.1; something is left"]  # 2.5 + 0.1 + 0.5
        assert (process.returncode, told.splitlines()[1:]) == (1, told_last)


def test_a_second_ctrl_c_ends_all_at_once_and_says_what_is_left() -> None:
    with supervised(f"tell(LEFT + 'something is left'); {HEARS}", stop="pass", drain_s=60.0) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        time.sleep(0.6)  # else it counts as the same press
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
        assert process.returncode == 130
        assert told == "stopping\nended at once: requests in flight are lost; something is left\n"


@pytest.mark.parametrize(
    ("ends", "code", "told"),
    [
        ("os._exit(2)", 2, ""),
        ("os._exit(LOST)", 1, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "gateway: the process that runs Ray was ended by SIGKILL\n"),
        (
            "(tell(LEFT + 'something is left'), os.kill(os.getpid(), signal.SIGKILL))",
            1,
            "gateway: the process that runs Ray was ended by SIGKILL; something is left\n",
        ),
    ],
)
def test_a_child_that_ends_by_itself_says_the_exit_code(ends: str, code: int, told: str) -> None:
    act = f"import threading; threading.Timer(0.5, lambda: {ends}).start()"
    with supervised(act) as process:
        _, said = process.communicate(timeout=20)
        assert (process.returncode, said) == (code, told)


def test_what_the_shell_before_it_started_is_not_ended() -> None:
    code = SUPERVISE.format(child="", drain_s=0.1)
    shell = 'sleep 60 >/dev/null 2>&1 & echo $!; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    other = psutil.Process(int(done.stdout))
    assert other.status() != psutil.STATUS_ZOMBIE
    other.kill()


def test_what_its_child_has_left_does_not_stay_a_zombie() -> None:
    with supervised("") as process:
        _, shell, orphan = psutil.Process(process.pid).children(recursive=True)
        shell.kill()
        orphan.kill()
        assert psutil.wait_procs([orphan], timeout=10)[0] == [orphan]  # not while it is a zombie
        process.terminate()


def test_a_supervisor_that_is_killed_takes_its_child_along() -> None:
    with supervised("") as process:
        child, *rest = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert psutil.wait_procs([child], timeout=10)[0] == [child]
        for other in rest:  # Ray's own processes end with it, or look for it
            other.kill()
        psutil.wait_procs(rest, timeout=10)


def test_what_a_replica_starts_hears_the_signals_that_it_outlives_itself() -> None:
    replica = """
import os, signal, subprocess, threading
from gateway.process.supervisor import outlive_signals
def work():
    outlive_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    started = subprocess.Popen(["sleep", "60"])
    started.terminate()
    print(started.wait(20))
    fork = os.fork()
    if not fork:
        signal.pause()
    os.kill(fork, signal.SIGTERM)
    print(os.waitpid(fork, 0)[1])
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    start = f"""
import subprocess, sys
from gateway.process.supervisor import blocked
with blocked():
    sys.exit(subprocess.call([sys.executable, "-c", {replica!r}]))
"""
    done = subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{-signal.SIGTERM}\n{signal.SIGTERM}\n", "")


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "pass"])
def test_the_run_dir_that_the_child_names_is_removed_however_that_ends(end: str) -> None:
    name = f"test-{uuid.uuid4().hex}"
    kept = private_directory(shared_run_dir(f"{name}-of-another"))
    named = private_directory(shared_run_dir(name) / "metrics").parent
    (named / "metrics" / "file").write_text("")
    try:
        with supervised(f"tell(RUN_DIR + {name!r}); tell(SERVING); {HEARS}", stop=end) as process:
            process.terminate()
            process.communicate(timeout=20)
            assert (named.exists(), kept.exists()) == (False, True)
    finally:
        kept.rmdir()


def test_what_the_child_tells_just_before_it_is_killed_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, tell = os.pipe()
    woken, wake = os.pipe()
    line = f"{supervisor.LEFT}something is left\n"
    code = f"import os, sys, time; sys.stdin.read(1); os.write({tell}, {line.encode()!r}); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=[tell], stdin=subprocess.PIPE) as child:
        os.close(tell)

        def meanwhile(*_: object) -> None:
            assert child.stdin is not None
            child.stdin.write(b"x")
            child.stdin.flush()
            assert select.select([told], [], [], 20)[0]

        monkeypatch.setattr(supervisor, "say_stopping", meanwhile)
        os.write(wake, bytes([signal.SIGTERM]))
        watch = supervisor._Watch(child, 60.0, 0.5, frozenset())
        assert watch.until_ended(woken, told) == 1
    assert caplog.messages == ["something is left"]
    for descriptor in (told, woken, wake):
        os.close(descriptor)


def test_what_the_child_tells_just_before_others_kill_it_counts(caplog: pytest.LogCaptureFixture) -> None:
    told, tell = os.pipe()
    child = SimpleNamespace(poll=lambda: -signal.SIGKILL)
    os.write(tell, f"{supervisor.LEFT}something is left\n{supervisor.RUN_DIR}some\n".encode())
    watch = supervisor._Watch(cast("subprocess.Popen[bytes]", child), 60.0, 0.5, frozenset())
    assert watch.until_ended(told, told) == 1
    assert caplog.messages == ["gateway: the process that runs Ray was ended by SIGKILL; something is left"]
    assert watch._run_dir == "some"
    for descriptor in (told, tell):
        os.close(descriptor)
