"""Ctrl-C, SIGTERM and SIGHUP for the command `loadtest run`: the first one always works, a second one as well."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop

from loadtest.commands.interrupts import interruption
from loadtest.commands.recommend import unless_interrupted
from loadtest.errors import UsageError
from loadtest.load import live_log
from loadtest.measuring.generator_limit import null_server
from loadtest.results import read_run

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def command(target: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "loadtest.cli", "run", target, "--model", "null", *options]


def test_the_first_calls_back_on_the_loop_and_a_second_of_the_same_press_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.commands.interrupts.SAME_PRESS_S", 60)  # a second one that came later would end this process
    before = [signal.getsignal(number) for number in SIGNALS]

    async def scenario() -> None:
        called = asyncio.Event()
        with interruption() as found, found.calls(called.set):
            assert found.signum == 0
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)  # as by `timeout`, which signals its child and then the group
            async with asyncio.timeout(5):
                await called.wait()
            assert (found.signum, found.exit_code) == (signal.SIGTERM, 143)

    asyncio.run(scenario())
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_later_one_ends_the_process() -> None:
    code = (
        "import signal, time\n"
        "from loadtest.commands.interrupts import SAME_PRESS_S, interruption\n"
        "with interruption():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    time.sleep(SAME_PRESS_S)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('is still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_a_terminal_that_closes_ends_in_order_and_hurries_nothing() -> None:
    code = (
        "import signal, time\n"
        "from loadtest.commands.interrupts import SAME_PRESS_S, interruption\n"
        "with interruption() as found:\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "    time.sleep(SAME_PRESS_S)\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "    print(found.exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "129\n")
    by_nohup = code.replace("with", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nwith", 1).replace("exit_code", "signum")
    done = subprocess.run([sys.executable, "-c", by_nohup], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n")


def test_one_that_came_before_anyone_listened_is_told_at_once() -> None:
    async def scenario() -> None:
        called = asyncio.Event()
        with interruption() as found:
            signal.raise_signal(signal.SIGINT)
            with found.calls(called.set):
                async with asyncio.timeout(5):
                    await called.wait()

    uvloop.run(scenario())


def test_an_idle_uvloop_wakes_for_one() -> None:
    async def scenario() -> None:
        called = asyncio.Event()
        with interruption() as found, found.calls(called.set):
            threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            async with asyncio.timeout(5):
                await called.wait()

    uvloop.run(scenario())


def test_what_comes_after_a_search_is_skipped_and_its_result_kept() -> None:
    async def scenario() -> None:
        with interruption() as found:
            assert await unless_interrupted(asyncio.sleep(0, "found"), found, "otherwise") == "found"
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            assert await unless_interrupted(asyncio.sleep(60, "found"), found, "otherwise") == "otherwise"

    asyncio.run(scenario())


def test_in_another_thread_nothing_is_taken_over() -> None:
    def elsewhere() -> None:
        with interruption() as found:
            seen.append(found.signum)

    seen: list[int] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [0]


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_while_the_target_does_not_say_what_it_serves(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody answers
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(command(target, "--rate", "10"), stdout=-1, stderr=-1, text=True) as process:
            silent.settimeout(30)
            with silent.accept()[0]:  # the first question has come
                began_s = time.monotonic()
                process.send_signal(number)
                _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "interrupted before anything was sent" in err
    assert "Traceback" not in err
    assert time.monotonic() - began_s < 4  # a question alone may take 5 s


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["rest-json", "grpc"])
def test_while_the_generator_is_far_behind(tmp_path: Path, protocol: str) -> None:
    with null_server() as server:
        options = ["--protocol", protocol, "--rate", "400000", "--duration", "2", "--timeout", "60"]
        options += ["--json", str(tmp_path / "r.json")]
        target = server.target("grpc" if protocol == "grpc" else "rest-json")
        with subprocess.Popen(command(target, *options), stdout=-1, stderr=-1, text=True) as process:
            live = tmp_path / "r.json.live"
            deadline_s = time.monotonic() + 60
            while not _begun(live) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            time.sleep(0.5)  # by now it is far behind
            began_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert "PARTIAL" in out
    assert time.monotonic() - began_s < 30  # what there is, is judged: close to a million requests
    assert read_run(tmp_path / "r.json").partial
    assert not live.exists()


def _begun(live: Path) -> bool:
    """Whether a thousand requests have been dispatched."""
    try:
        return live_log.read(live)[1].dispatched[1000] > 0
    except UsageError:  # not laid out yet
        return False
