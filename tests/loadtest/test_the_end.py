"""A run ends: in time, with what it measured, and with the reason, whatever goes wrong around it or in it."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue

import msgspec
import psutil
import pytest
import uvloop

from loadtest.errors import Interrupted, LoadtestError
from loadtest.load.dialler import Dialler, Exhausted
from loadtest.load.request_log import REQUEST_BYTES, RequestLog
from loadtest.load.target import server_statistics
from loadtest.load.worker import LoadSender, SenderReport, SendingJob, most_ns
from loadtest.measuring import generator, looks
from loadtest.measuring.generator import measure
from loadtest.measuring.generator_limit import NullServer, null_server
from loadtest.measuring.progress import Progress
from loadtest.results import LoadSpec, Protocol, RunResult, SloSpec
from loadtest.verdict.blocks import Grid
from tests.loadtest.scripted_server import ScriptedServer, scripted_server

pytestmark = pytest.mark.slow

SPEC = LoadSpec("", model="null", rate_rps=200, duration_s=0.5, timeout_s=1.0, warmup_s=0.0, slo=SloSpec.parse("p99<200ms"))
TOO_MUCH_RPS = 400_000
# Questions, set-up, processes: three times as long on a busy machine. What does not end takes a minute.
GRACE_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[NullServer]:
    with null_server() as running:
        yield running


@pytest.mark.parametrize("protocol", ["rest-json", "grpc"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_rate_that_nobody_can_send_ends_in_time(server: NullServer, protocol: Protocol, processes: int) -> None:
    spec = replace(SPEC, target=server.target(protocol), protocol=protocol, rate_rps=TOO_MUCH_RPS, processes=processes)
    result = uvloop.run(measure(spec))
    # Not of the whole: to sum 200 000 requests up takes a busy machine ten seconds.
    ran = datetime.fromisoformat(result.ended_at) - datetime.fromisoformat(result.started_at)
    assert ran.total_seconds() < spec.duration_s + spec.timeout_s + GRACE_S
    assert result.asked_rps == pytest.approx(TOO_MUCH_RPS)
    if processes == 1:
        assert not result.valid
        assert result.verdict is None


def test_requests_that_the_generator_came_to_after_their_deadline_were_not_sent() -> None:
    def stall(server: ScriptedServer) -> None:
        server.at_inference[20] = lambda: time.sleep(0.35)  # it shares the event loop with the generator

    result = scripted(stall, replace(SPEC, timeout_s=0.1))
    assert any("were sent in time" in reason for reason in result.reasons)
    assert result.requests <= 100 - 40  # 0.25 s of them
    assert (result.verdict, result.asked_rps) == (None, 200)
    assert result.sent_rps < 0.7 * result.asked_rps


@pytest.mark.parametrize("protocol", ["rest-json", "grpc"])
def test_a_stop_is_heard_while_the_generator_is_far_behind(server: NullServer, protocol: Protocol) -> None:
    async def scenario() -> float:
        stop = asyncio.Event()
        began_s = 0.0

        def end(progress: Progress) -> None:
            nonlocal began_s
            began_s = time.monotonic()
            stop.set()

        spec = replace(SPEC, target=server.target(protocol), protocol=protocol, rate_rps=TOO_MUCH_RPS, duration_s=5.0)
        result = await measure(replace(spec, timeout_s=60), stop=stop, on_progress=end)
        assert result.partial
        return time.monotonic() - began_s

    assert uvloop.run(scenario()) < GRACE_S


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.3, 1.2])
def test_a_cancelled_measurement_ends_at_once_and_leaves_nothing(server: NullServer, processes: int, after_s: float) -> None:
    async def scenario() -> None:
        spec = replace(SPEC, target=server.target("rest-json"), duration_s=60, timeout_s=60, processes=processes)
        task = asyncio.create_task(measure(spec))
        await asyncio.sleep(after_s)
        task.cancel()
        began_s = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began_s < GRACE_S

    before = _children()
    uvloop.run(scenario())
    psutil.wait_procs(_children() - before, timeout=10)
    assert _children() <= before


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def scripted(script: Callable[[ScriptedServer], None], spec: LoadSpec = SPEC, **options: object) -> RunResult:
    async def scenario() -> RunResult:
        async with scripted_server() as server:
            script(server)
            return await measure(replace(spec, target=server.url, model="m"), **options)  # type: ignore[arg-type]

    return uvloop.run(scenario())


def test_a_display_that_fails_ends_the_run_and_is_named() -> None:
    def fail(progress: Progress) -> None:
        raise OSError("no such terminal")

    result = scripted(lambda server: None, replace(SPEC, duration_s=30), on_progress=fail)
    assert not result.valid
    assert result.partial
    assert "no such terminal" in result.reasons[0]
    assert result.requests > 0
    assert result.window_s < 20


def job(port: int, **changes: object) -> SendingJob:
    made = SendingJob(
        grpc=False, host="127.0.0.1", port=port, tls=False, requests=[b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"],
        metadata=[], connections=4, timeout_ns=200_000_000, duration_ns=200_000_000, spin_ns=0, rate_rps=100, end=20, first=0,
        step=1, log_size=20,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def send(
    prepare: Callable[[LoadSender, RequestLog], None],
    script: Callable[[ScriptedServer], None] = lambda server: None,
    **changes: object,
) -> tuple[SenderReport, RequestLog, float]:
    """Run a sender that something was done to. Gives its report, its log, and how long it took in s."""

    async def scenario() -> tuple[SenderReport, RequestLog, float]:
        async with scripted_server() as server:
            script(server)
            wanted = job(server.port, **changes)
            log = RequestLog(20)
            for row in range(20):
                log.intended[row] = row * 10_000_000
            sender = LoadSender(wanted, log)
            prepare(sender, log)
            await sender.prepare()
            began_s = time.monotonic()
            async with asyncio.timeout(30):
                report = await sender.run(time.monotonic_ns(), asyncio.Event())
            return report, log, time.monotonic() - began_s

    return uvloop.run(scenario())


class Bug(Exception):
    pass


def _raise(*args: object) -> None:
    raise Bug("in here")


@pytest.mark.parametrize("where", ["send", "expire", "closed loop", "thinking"])
def test_an_exception_anywhere_in_the_sender_ends_the_run_and_is_reported(where: str) -> None:
    def silence(server: ScriptedServer) -> None:
        server.silent = where == "expire"

    def break_it(sender: LoadSender, log: RequestLog) -> None:
        if where in ("send", "closed loop"):
            sender._client.send = _raise  # type: ignore[method-assign]  # what cannot happen, happens
        elif where == "expire":
            sender._client.expire = _raise  # type: ignore[method-assign]
        else:
            sender._think = _raise  # type: ignore[method-assign]

    closed = {"users": 2, "think_ns": (0,)} if where in ("closed loop", "thinking") else {}
    report, _, seconds = send(break_it, silence, timeout_ns=1_000_000 if where == "expire" else 10_000_000_000, **closed)
    assert report.fault == "Bug: in here"
    assert seconds < 5


def test_a_generator_that_may_open_no_connection_says_so_and_blames_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_left(self: Dialler, protocol: object) -> None:
        raise Exhausted("no further connection: Too many open files")

    monkeypatch.setattr(Dialler, "dial", none_left)
    with pytest.raises(LoadtestError, match=r"nothing was sent: .*Too many open files"):
        scripted(lambda server: None)


def test_users_who_send_more_than_can_be_kept_end_the_run_and_it_is_said() -> None:
    report, log, seconds = send(lambda sender, log: None, users=2, think_ns=(0,), duration_ns=20_000_000_000)
    assert report.fault.startswith("no more than 20 requests can be kept, and they were used up after 0.")
    assert seconds < 5
    assert 0 not in log.status


def test_a_sender_whose_timer_never_comes_ends_at_the_last_deadline() -> None:
    report, log, seconds = send(lambda sender, log: setattr(sender, "_dispatch_due", lambda: None))
    assert report.fault == ""
    assert seconds == pytest.approx(most_ns(job(1)) / 1e9, abs=1)
    assert list(log.status) == [0] * 20


def test_what_is_reported_twice_counts_once() -> None:
    def doubled(sender: LoadSender, log: RequestLog) -> None:
        told = sender._client.on_done

        def tell(row: int, status: int) -> None:
            told(row, status)
            told(row, 500)

        sender._client.on_done = tell

    report, log, _ = send(doubled)
    assert report.fault == ""
    assert set(log.status) == {1}


def test_a_stop_while_the_target_is_still_being_asked_ends_at_once() -> None:
    async def scenario(url: str) -> float:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, stop.set)
        with pytest.raises(Interrupted):
            await measure(replace(SPEC, target=url), stop=stop)
        return time.monotonic()

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody answers
        began_s = time.monotonic()
        ended_s = uvloop.run(scenario(f"http://127.0.0.1:{silent.getsockname()[1]}"))
    assert ended_s - began_s < 3  # a question alone may take 5 s
    assert time.monotonic() - ended_s < 2  # and nothing waits for its thread


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_while_connections_are_being_opened_ends_at_once(tmp_path: Path, processes: int) -> None:
    async def scenario(url: str) -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        spec = replace(SPEC, target=url, protocol="invocations", model="", payloads=(str(tmp_path),), processes=processes)
        with pytest.raises(Interrupted):
            await measure(replace(spec, timeout_s=60, content_type="text/csv"), stop=stop)

    (tmp_path / "a.csv").write_bytes(b"1,2,3")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(4):  # nobody accepts: the kernel lets no more of them in
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        began_s = time.monotonic()
        uvloop.run(scenario(f"http://127.0.0.1:{full.getsockname()[1]}"))
    assert time.monotonic() - began_s < 1.0 + GRACE_S


def test_a_sending_process_that_hangs_does_not_keep_a_stop_from_ending_the_run() -> None:
    async def scenario() -> RunResult:
        async with scripted_server() as server:
            stop = asyncio.Event()
            senders: list[psutil.Process] = []

            def hang(progress: Progress) -> None:
                if not senders:
                    for child in _children():
                        with contextlib.suppress(psutil.Error):  # what asked the target may just have ended
                            senders.extend([child] if "loadtest.load.worker" in child.cmdline() else [])
                    senders[0].suspend()
                    stop.set()

            spec = replace(SPEC, target=server.url, model="m", processes=2, duration_s=60, timeout_s=60)
            return await measure(spec, stop=stop, on_progress=hang)

    began_s = time.monotonic()
    result = uvloop.run(scenario())
    assert time.monotonic() - began_s < 5 + 2 * GRACE_S
    assert (result.valid, result.partial) == (False, True)
    assert result.reasons[0] == "1 of 2 sending processes did not end when they should"
    assert result.succeeded > 0


@pytest.mark.parametrize("signal_of", [psutil.Process.suspend, psutil.Process.kill])
def test_who_looks_whether_a_run_is_decided_cannot_hold_it_up(signal_of: Callable[[psutil.Process], None]) -> None:
    lookers: list[psutil.Process] = []

    async def scenario() -> RunResult:
        async with scripted_server() as server:

            def strike(progress: Progress) -> None:
                if not lookers:
                    for child in _children():
                        with contextlib.suppress(psutil.Error):  # what asked the target may just have ended
                            lookers.extend([child] if "loadtest.measuring.looks" in child.cmdline() else [])
                    signal_of(lookers[0])

            spec = replace(SPEC, target=server.url, model="m", rate_rps=2000, duration_s=4, slo=SloSpec.parse("p90<10ms"))
            return await measure(spec, until_decided=True, on_progress=strike)

    result = uvloop.run(scenario())
    assert len(lookers) == 1
    assert result.requests == 8000  # nobody said that 2 s are enough
    assert not result.partial
    assert not any(child.is_running() for child in lookers)


def test_who_looks_ends_without_a_word_when_the_generator_is_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # nobody reads what it answers
    job = looks.LookingJob(SPEC, Grid(100, 100, 20), 1, None, or_lost=False)
    packed = msgspec.msgpack.encode(job)
    with tempfile.TemporaryFile() as log:
        log.truncate(REQUEST_BYTES)
        done = subprocess.run(
            [sys.executable, "-m", "loadtest.measuring.looks", str(log.fileno()), "-1"],
            input=len(packed).to_bytes(4, "little") + packed, stdout=writer, stderr=subprocess.PIPE,
            pass_fds=(log.fileno(),), check=True,
        )  # fmt: skip  # no timeout: it gives way to whatever else runs
    os.close(writer)
    assert done.stderr == b""


def test_a_target_that_has_fallen_silent_is_asked_for_its_statistics_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_s: list[float] = []
    ask = generator.in_thread

    async def noted(call: Callable[..., object], *args: object, timeout_s: float, **options: object) -> object:
        if call is server_statistics:
            asked_s.append(timeout_s)
        return await ask(call, *args, timeout_s=timeout_s, **options)

    def fall_silent(server: ScriptedServer) -> None:
        server.at_inference[10] = lambda: setattr(server, "answer", lambda *question: None)

    monkeypatch.setattr(generator, "in_thread", noted)
    result = scripted(fall_silent, replace(SPEC, timeout_s=0.1))
    assert result.server is None
    assert asked_s[-1] <= 1


def test_a_target_that_trickles_its_answer_for_ever_is_given_up() -> None:
    from loadtest.load import blocking

    async def scenario() -> None:
        with pytest.raises(blocking.NotAnswered, match=r"0\.1 s"):
            await blocking.in_thread(time.sleep, 2, timeout_s=0.1)
        with pytest.raises(ZeroDivisionError):
            await blocking.in_thread(lambda: 1 // 0, timeout_s=5)
        with pytest.raises(TimeoutError, match="its own"):
            await blocking.in_thread(_times_out, timeout_s=5)
        assert await blocking.in_thread(int, "7", base=8, timeout_s=5) == 7

    began_s = time.monotonic()
    uvloop.run(scenario())
    assert time.monotonic() - began_s < 1.5


def _times_out() -> None:
    raise TimeoutError("its own")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_answer_that_came_while_the_loop_was_busy_until_its_time_was_up_is_given(run: Callable[..., None]) -> None:
    from loadtest.load import blocking

    threads: SimpleQueue[threading.Thread] = SimpleQueue()

    def answer() -> int:
        threads.put(threading.current_thread())
        return 7

    async def scenario() -> None:
        asked = asyncio.create_task(blocking.in_thread(answer, timeout_s=0.01))
        await asyncio.sleep(0)
        threads.get().join()
        time.sleep(0.02)  # noqa: ASYNC251  # as other work of the loop does
        assert await asked == 7

    run(scenario())
