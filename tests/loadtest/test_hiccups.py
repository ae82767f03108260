"""The hiccup meter on this machine: what it counts must agree with what processes say of themselves."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import uvloop

from loadtest.measuring import hiccups
from loadtest.measuring.looks import Looker
from loadtest.measuring.machine import Meter, watched_for
from loadtest.verdict.stalls import Recording

needs_proc = pytest.mark.skipif(not Path("/proc/loadavg").exists(), reason="needs Linux's /proc")

# Uses 0.2 s of CPU time, says so, and stays: what a process had since the last look at it goes with it.
_NEIGHBOUR = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\nsys.stdin.read()"
# Listens; at the first line of its standard input does as much, and its child too.
_SERVER = f"""
import socket, subprocess, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {_NEIGHBOUR!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
while time.process_time() < 0.2: pass
child.stdout.readline()
print("done", flush=True)
sys.stdin.readline()
"""

_GENERATOR = """
import asyncio
from loadtest.measuring.machine import Meter
async def main():
    async with Meter("127.0.0.1", 1) as meter:
        print(meter.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    # Behind a shell: a child of this process, which is the generator, is taken for a worker until it has a command of its own.
    command = ["sh", "-c", '"$@"; exit', "sh", sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


async def recorded(server: subprocess.Popen[str], port: int) -> tuple[Recording, int]:
    """While the server and a neighbour work; and the meter's process."""
    async with Meter("127.0.0.1", port) as meter:
        assert server.stdin is not None
        server.stdin.write("now\n")
        server.stdin.flush()
        with running(_NEIGHBOUR) as neighbour:
            await asyncio.to_thread(said, neighbour)
            await asyncio.to_thread(said, server)
            assert meter.pid is not None
            children = psutil.Process(meter.pid).children()
            assert children, "nobody asks for the cores"
            await meter.end()
        recording = meter.recording(0)
        assert recording is not None
        assert not any(child.is_running() for child in children)
        return recording, meter.pid


@needs_proc
@pytest.mark.slow
def test_cpu_time_is_counted_for_whom_it_was_used() -> None:
    with running(_SERVER) as server:
        port = int(said(server))
        recording, pid = uvloop.run(recorded(server, port))
    assert not psutil.pid_exists(pid)
    assert set(recording.candidate.cores) == os.sched_getaffinity(0)
    # Its own 0.2 s and the child's, but for what the server had used before.
    assert 0.25e9 < recording.candidate.cpu.sum() < 0.45e9
    assert max(recording.candidate.wait) >= 0
    assert sum(spent for name, spent in recording.names if name.startswith("python")) > 0.1e9
    assert recording.meter.sum() > 0
    assert (recording.periods > 0).all()


@needs_proc
@pytest.mark.slow
def test_who_looks_whether_a_run_is_decided_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It stops before it has done anything, so that all its work is done while the meter looks.
    stopped = tmp_path / "python"
    stopped.write_text(f'#!/bin/sh\nkill -STOP $$\nexec {sys.executable} "$@"\n')
    stopped.chmod(0o755)

    async def scenario() -> Recording | None:
        meter = Meter("127.0.0.1", 1)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(stopped))
            looker = await Looker(-1, meter.fileno()).__aenter__()
        async with AsyncExitStack() as stack:
            stack.push_async_exit(looker)
            assert looker.pid is not None
            process = psutil.Process(looker.pid)
            while process.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110  # it does so within a moment
                await asyncio.sleep(0.01)
            async with meter:
                process.resume()
                while sum(process.cpu_times()[:2]) < 0.3:  # noqa: ASYNC110  # it uses half a second to start
                    await asyncio.sleep(0.05)
                await meter.end()
                return meter.recording(0)

    recording = uvloop.run(scenario())
    assert recording is not None
    assert recording.meter.sum() > 0.1e9  # of which the meter itself takes a fifth; others may run Python as well


@needs_proc
@pytest.mark.slow
def test_a_meter_ends_with_the_generator_however_that_ends() -> None:
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", _GENERATOR], stdout=subprocess.PIPE, text=True, cwd=root) as generator:
        meter = psutil.Process(int(said(generator)))
        processes = [meter, *meter.children()]
        generator.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


@needs_proc
def test_a_server_that_cannot_be_told_from_the_generator_or_is_not_here_is_not_watched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert watched_for("127.0.0.1", own.getsockname()[1]).candidate == ()
    assert watched_for("127.0.0.1", 1).candidate == ()  # nobody listens
    assert watched_for("192.0.2.1", 80).candidate == ()  # not this machine (RFC 5737)
    found = watched_for("127.0.0.1", 1)
    assert (found.generator, found.candidate_cores) == ((os.getpid(),), ())
    assert set(found.generator_cores) == os.sched_getaffinity(0)


def test_counters_that_stand_still_are_looked_at_in_turn_and_all_when_asked() -> None:
    values = dict.fromkeys(range(100), 0)
    looked: list[int] = []

    def read(key: int) -> int:
        looked.append(key)
        if key not in values:
            raise ProcessLookupError
        return values[key]

    counters = hiccups._Counters(read)
    for key in values:
        counters.add(key, 0, new=False)
    assert counters.look(everywhere=False) == []
    assert len(looked) == 10
    for _ in range(9):
        counters.look(everywhere=False)
    assert sorted(looked) == list(range(100))
    values[50] = 30_000
    assert counters.look(everywhere=True) == [(50, 30_000)]
    looked.clear()
    values[50] = 70_000
    assert counters.look(everywhere=False) == [(50, 40_000)]  # it moves, so it is looked at each time
    values[50] = 5  # another's by now
    assert counters.look(everywhere=False) == [(50, 0)]
    for _ in range(120):
        counters.look(everywhere=False)
    looked.clear()
    counters.look(everywhere=False)
    assert len(looked) == 10
    del values[7]
    counters.look(everywhere=True)
    assert counters.gone() == [7]
    assert counters.gone() == []
    counters.add(7, 0, new=True)
    values[7] = 10
    assert (7, 10) in counters.look(everywhere=False)
