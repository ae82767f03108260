import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.errors import TargetError, UsageError
from loadtest.lab.launchers import launcher_of
from loadtest.lab.launchers.launcher import StartFailed
from loadtest.lab.launchers.local import Local
from loadtest.lab.launchers.url import Url, get_json, instance_type_of
from loadtest.prices.catalogue import load_catalogue
from loadtest.question.candidates import CandidateSetup
from loadtest.question.spec_file import UrlLauncher
from tests.loadtest.examples import example_spec

CORE = min(os.sched_getaffinity(0))
READY = "print('gateway ready http=127.0.0.1:1234 grpc=127.0.0.1:1235', flush=True);"
WAIT = "import signal; signal.pause()"


@pytest.fixture(scope="module")
def candidate() -> CandidateSetup:
    spec = example_spec(load_catalogue(), launcher={"kind": "local", "stands_for": {"c7i.large": [CORE], "c8g.large": [CORE]}})
    return spec.candidates[0]


def local(program: str, *, timeout_s: float = 20.0) -> Local:
    """A launcher whose gateway is a few lines of Python."""
    return Local(start_timeout_s=timeout_s, nice=3, gateway=(sys.executable, "-c", program))


def run(launcher: Local, candidate: CandidateSetup, check: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        running = await launcher.start(candidate)
        try:
            await check(running)
        finally:
            await running.stop()

    asyncio.run(main())


def alive() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE]


OTHERS: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Helpers that the libraries of other tests keep are none of these tests' processes."""
    OTHERS.clear()
    OTHERS.update(alive())


def children() -> list[psutil.Process]:
    return [process for process in alive() if process not in OTHERS]


def test_a_candidate_runs_pinned_and_nice_until_it_is_stopped(candidate: CandidateSetup) -> None:
    here, own_nice = os.sched_getaffinity(0), psutil.Process().nice()

    async def check(running: Any) -> None:
        assert (running.rest, running.grpc) == ("http://127.0.0.1:1234", "127.0.0.1:1235")
        (process,) = children()
        assert process.cpu_affinity() == [CORE]
        assert process.nice() == own_nice + 3
        rest = here - {CORE}
        assert os.sched_getaffinity(0) == (rest or here)  # the load generator leaves the candidate its core
        assert running.failure() == ""
        assert running.usage().memory_percent > 0

    run(local(READY + WAIT), candidate, check)
    assert children() == []
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == (here, os.SCHED_OTHER)


def test_the_candidates_configuration_is_what_it_is_started_with(candidate: CandidateSetup) -> None:
    program = "import sys; print(open(sys.argv[1]).read(), file=sys.stderr); print(sys.argv[2:], file=sys.stderr); sys.exit(3)"
    with pytest.raises(StartFailed, match=r"ended with code 3 before it was ready: .*'--http-port', '0', '--grpc-port', '0'"):
        asyncio.run(local(program).start(candidate))


def test_what_it_started_ends_with_it(candidate: CandidateSetup) -> None:
    stubborn = "import signal,subprocess,sys,time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"

    async def check(running: Any) -> None:
        assert len(children()) == 2

    run(local(stubborn + READY + WAIT), candidate, check)
    assert children() == []


def test_one_that_is_not_pinned_may_use_the_cores_that_this_process_may(
    candidate: CandidateSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)  # of the machine
    turn = tmp_path / "turn"
    os.mkfifo(turn)
    program = f"""{READY}
import time
open({str(turn)!r}).read()
before = time.process_time()
while time.process_time() < before + 0.1: pass
open({str(turn)!r}, "w").close()
{WAIT}"""

    async def check(running: Any) -> None:
        began_s = time.monotonic()
        running.usage()
        await asyncio.to_thread(turn.write_bytes, b"")
        await asyncio.to_thread(turn.read_bytes)
        most = len(os.sched_getaffinity(0)) * (time.monotonic() - began_s)
        assert running.usage().cpu_percent > 100 * 0.05 / most  # a tick is 0.01 s

    run(local(program), dataclasses.replace(candidate, cpus=()), check)


def test_one_that_prints_a_lot_is_not_held_up(candidate: CandidateSetup) -> None:
    async def check(running: Any) -> None:
        await asyncio.wait_for(running._process.wait(), 10)

    run(local(READY + "print('x' * 2_000_000, flush=True)"), candidate, check)


@pytest.mark.parametrize("before", ["loading weights: 100%", "." * 70_000, "gateway ready in a moment: ", "a\ngateway ready"])
def test_one_that_leaves_a_line_open_is_heard_when_it_is_ready(candidate: CandidateSetup, before: str) -> None:
    async def check(running: Any) -> None:
        assert (running.rest, running.grpc) == ("http://127.0.0.1:1234", "127.0.0.1:1235")

    halves = (
        "for half in ('gateway rea', 'dy http=127.0.0.1:12', '34 grpc=127.0.0.1:1235\\n'):\n print(half, end='', flush=True)\n"
    )
    for ready in (READY, halves):
        run(local(f"print({before!r}, end='', flush=True)\n{ready}\n{WAIT}"), candidate, check)


def test_one_that_is_never_ready_is_ended_in_time(candidate: CandidateSetup) -> None:
    program = "import sys; print('loading', file=sys.stderr, flush=True);" + WAIT
    with pytest.raises(StartFailed, match=r"not ready within 1 s: loading"):
        asyncio.run(local(program, timeout_s=1.0).start(candidate))
    assert children() == []


def test_one_that_dies_later_says_how(candidate: CandidateSetup) -> None:
    async def check(running: Any) -> None:
        await asyncio.wait_for(running._process.wait(), 10)
        assert running.failure() == "ended with code 9 while it was measured: out of luck"

    run(local("import sys;" + READY + "print('out of luck', file=sys.stderr); sys.exit(9)"), candidate, check)


async def answering(body: bytes, status: str = "200 OK") -> asyncio.Server:
    """%s in body: what was asked for."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
        answer = body.replace(b"%s", target)
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n".encode() + answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def asked(body: bytes, ask: Callable[[str], Coroutine[Any, Any, Any]], status: str = "200 OK") -> Any:
    async def main() -> Any:
        async with await answering(body, status) as server:
            port = server.sockets[0].getsockname()[1]
            return await ask(f"http://127.0.0.1:{port}")

    return asyncio.run(main())


def test_a_running_server_is_taken_as_it_is(candidate: CandidateSetup) -> None:
    async def start(url: str) -> Any:
        running = await Url().start(dataclasses.replace(candidate, url=url))
        await running.stop()
        return running

    running = asked(b"", start)
    assert running.usage().cpu_percent is None
    assert running.failure() == ""
    with pytest.raises(StartFailed, match=r"503$"):
        asked(b"", start, "503 Service Unavailable")


def test_the_instance_type_is_asked_from_the_servers_metadata() -> None:
    assert asked(b'{"name": "serving-gateway", "instance_type": "c7i.large"}', instance_type_of) == "c7i.large"
    with pytest.raises(TargetError, match="does not say which instance type it runs on: set `instances`"):
        asked(b'{"name": "triton"}', instance_type_of)


@pytest.mark.parametrize("body", [b"no JSON", b"[]"])
def test_an_answer_that_is_no_object_is_an_error(body: bytes) -> None:
    with pytest.raises(TargetError, match=r"http://127\.0\.0\.1"):
        asked(body, lambda url: asyncio.to_thread(get_json, url))


def test_a_url_is_asked_for_as_by_run() -> None:
    found = asked(b'{"asked": "%s"}', lambda url: asyncio.to_thread(get_json, f"{url}/a b/ü%20"))
    assert found == {"asked": "/a%20b/%C3%BC%20"}


def test_only_http_is_asked(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="expected an address that begins with http://"):
        get_json(f"file://{tmp_path}/x")


def test_cores_that_are_not_there_are_refused_before_the_start(candidate: CandidateSetup) -> None:
    local(WAIT).preflight([candidate])
    with pytest.raises(UsageError, match=r"cores \[9999\] are not there: this machine has \["):
        local(WAIT).preflight([dataclasses.replace(candidate, cpus=(CORE, 9999))])


def test_the_spec_chooses_the_launcher() -> None:
    catalogue = load_catalogue()
    spec = example_spec(catalogue)
    assert isinstance(launcher_of(spec, catalogue), Local)
    assert isinstance(launcher_of(dataclasses.replace(spec, launcher=UrlLauncher(kind="url")), catalogue), Url)
    assert not launcher_of(spec, catalogue).paid
