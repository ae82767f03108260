"""A run is struck at a random moment: it ends, and what was measured is kept.

Fifty moments, drawn from a seed, side by side: the target closes, resets, stalls or dies, or the run gets Ctrl-C, SIGTERM or
kill -9, over REST and gRPC, from one process and from two. Whose process is struck runs as a command in one of its own.

What had been measured by then, the target knows, however busy the machine is: an answer has been *taken* once the run sends
something that it sends only after having read it. All runs are judged when the last has ended: while this process reads
results, its targets do not answer.
"""

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
import uvloop

from gateway.wire.http2_frames import (
    ACK,
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_TABLE_SIZE,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    reset,
    settings,
)
from gateway.wire.http2_headers import header_block
from loadtest.cli import main
from loadtest.errors import ExitCode
from loadtest.measuring.generator import measure
from loadtest.results import LoadSpec, RunResult, read_run

pytestmark = pytest.mark.slow

MOMENTS = 50
AT_ONCE = 8
DURATION_S = 1.0
TIMEOUT_S = 1.0
END_S = 90.0  # for all of it, imports of two processes on a busy machine included
AT_THE_TARGET = ("close", "reset", "stall", "die")
PAYLOAD = str(Path(__file__).parent / "payload.json")
KINDS = (*AT_THE_TARGET, "SIGINT", "SIGTERM", "SIGKILL", "kill a sender")
BODY = b'{"outputs":[]}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
OK_TAIL = header_block((b"grpc-status", b"0"))
COMMANDS = multiprocessing.get_context("forkserver")


class Target:
    """Answers what is measured, of both protocols. asked: how many requests came. taken: how many answers the run has read for
    sure; first: one of them."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.asked = self.taken = 0
        self.stalled = False
        self.connections: set[asyncio.Transport] = set()
        self._server: asyncio.Server
        self.port = 0

    async def start(self, *, grpc: bool) -> None:
        kind = _Grpc if grpc else _Http
        self._server = await asyncio.get_running_loop().create_server(lambda: kind(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def took(self) -> None:
        self.taken += 1
        self.first.set()

    def strike(self, how: str) -> None:
        self.stalled = how == "stall"
        if how in ("reset", "die"):
            self.end()
        if how == "close":
            for transport in list(self.connections):
                transport.close()
        if how == "die":
            self._server.close()

    def end(self) -> None:
        for transport in list(self.connections):
            transport.abort()

    def close(self) -> None:
        self._server.close()
        self.end()


class _Http(asyncio.Protocol):
    """A connection that is used again has had its answer."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.answered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.target.connections.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.target.connections.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        if not data.startswith(b"POST /v2/models/m/infer"):
            self.transport.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")  # no statistics
            return
        self.target.asked += 1
        if self.answered:
            self.target.took()
        self.answered = not self.target.stalled
        if self.answered:
            self.transport.write(ANSWER)


class _Grpc(_Http):
    """Behind each answer goes a PING: what is said to that comes after it was read. A call that was given up ends before."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.rest = b""
        self.preface = len(PREFACE)
        self.unknown: set[int] = set()  # streams that ask for statistics
        self.waiting: set[int] = set()  # answered, and not given up

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.write(settings({HEADER_TABLE_SIZE: 0}))

    def frames(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        self.rest += data
        while len(self.rest) >= 9 and len(self.rest) >= (end := 9 + int.from_bytes(self.rest[:3])):
            head, payload, self.rest = self.rest[:9], self.rest[9:end], self.rest[end:]
            yield head[3], head[4], int.from_bytes(head[5:]), payload

    def data_received(self, data: bytes) -> None:
        skip = min(self.preface, len(data))
        self.preface -= skip
        for kind, flags, stream, payload in self.frames(data[skip:]):
            if kind == HEADERS and b"ModelStatistics" in payload:
                self.unknown.add(stream)
                self.transport.write(reset(stream, CANCEL))
            elif kind == DATA and stream not in self.unknown:
                self.target.asked += 1
                if self.target.stalled:
                    continue
                self.waiting.add(stream)
                ping = frame(PING, 0, 0, stream.to_bytes(8, "big"))
                self.transport.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, OK_TAIL) + ping)
            elif kind == RST_STREAM:
                self.waiting.discard(stream)
            elif kind == PING and flags & ACK and int.from_bytes(payload, "big") in self.waiting:
                self.waiting.remove(int.from_bytes(payload, "big"))
                self.target.took()
            elif kind == SETTINGS and not flags & ACK:
                self.transport.write(frame(SETTINGS, ACK, 0))


@dataclass(frozen=True)
class Moment:
    """What strikes, whom, and how long after the first answer."""

    number: int
    kind: str
    grpc: bool
    processes: int
    after_s: float

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} {'grpc' if self.grpc else 'rest'} x{self.processes} after {self.after_s:.3f} s"


def moments() -> list[Moment]:
    rng = random.Random(11)
    found = []
    for number in range(MOMENTS):
        kind = KINDS[number % len(KINDS)]
        processes = 2 if kind == "kill a sender" else 1 + number // len(KINDS) % 2
        found.append(Moment(number, kind, rng.random() < 0.5, processes, rng.uniform(0, DURATION_S)))
    return found


@dataclass(frozen=True)
class Ended:
    """A run. taken: answers when it was struck, 0 if it was not. wrong: says what is wrong, nothing if nothing is."""

    taken: int
    wrong: Callable[[], str]


async def strike_target(moment: Moment, folder: Path) -> Ended:
    """Run here, and strike the target."""
    target = Target()
    await target.start(grpc=moment.grpc)
    spec = LoadSpec(
        f"127.0.0.1:{target.port}", protocol="grpc" if moment.grpc else "rest-json", model="m", payloads=(PAYLOAD,),
        rate_rps=200, duration_s=DURATION_S, timeout_s=TIMEOUT_S, warmup_s=0.0, processes=moment.processes, connections=8,
    )  # fmt: skip
    running = asyncio.create_task(measure(spec))
    first = asyncio.create_task(target.first.wait())
    struck = 0
    try:
        async with asyncio.timeout(END_S):
            await asyncio.wait((first, running), return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                await asyncio.sleep(moment.after_s)
                struck = target.taken
                target.strike(moment.kind)
            result = await running
    except TimeoutError:
        if running.done():
            raise  # its own
        running.cancel()
        await asyncio.wait((running,))
        return Ended(struck, lambda: "did not end")
    finally:
        first.cancel()
        target.close()
    return Ended(struck, partial(_wrong_here, moment, target.asked, target.taken, result))


def _wrong_here(moment: Moment, asked: int, taken: int, result: RunResult) -> str:
    # On a busy machine some are late, all if it is struck early, or not sent at all, or find no connection in time; none may be
    # anything else. All that came are told, and where none did, that.
    wanted = {"timeout", "refused"} | ({"reset"} if moment.kind != "stall" else set())
    told = asked <= result.requests <= 200 and (result.requests > 0 or not result.valid)
    if result.partial or not told or set(result.errors) - wanted:
        return f"{result.partial}, {result.succeeded} of {result.requests}, {asked} came, {result.errors}, {result.reasons}"
    return _lost(result, taken)


def _lost(result: RunResult, taken: int) -> str:
    return f"{taken} answers were taken, {result.succeeded} kept, {result.errors}" * (result.succeeded < taken)


def _command(arguments: Sequence[str], said: Path) -> None:
    """What a process of its own does: `loadtest` with all that it says in a file."""
    with said.open("w") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    sys.exit(main(arguments))


async def strike_run(moment: Moment, folder: Path) -> Ended:
    """Run as a command, and strike it, or one of the processes that send for it."""
    target = Target()
    await target.start(grpc=moment.grpc)
    result, said = folder / f"{moment.number}.json", folder / f"{moment.number}.txt"
    arguments = (
        "run", f"127.0.0.1:{target.port}", "--model", "m", "--protocol", "grpc" if moment.grpc else "rest-json",
        "--payload", PAYLOAD, "--rate", "200", "--connections", "8", "--duration", str(DURATION_S), "--timeout", str(TIMEOUT_S),
        "--warmup", "0", "--processes", str(moment.processes), "--json", str(result),
    )  # fmt: skip
    process = COMMANDS.Process(target=_command, args=(arguments, said))
    await asyncio.to_thread(process.start)
    ended = asyncio.create_task(asyncio.to_thread(process.join))
    first = asyncio.create_task(target.first.wait())
    family: list[psutil.Process] = []
    struck = 0
    try:
        async with asyncio.timeout(END_S):
            await asyncio.wait((first, ended), return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                await asyncio.sleep(moment.after_s)
                family = _family(process.pid)
                struck = target.taken * _strike(moment, family)
            await asyncio.shield(ended)
    except TimeoutError:
        process.kill()
        await ended
        return Ended(struck, lambda: "did not end")
    finally:
        first.cancel()
        target.close()
    _, left = await asyncio.to_thread(psutil.wait_procs, family, timeout=5)
    return Ended(struck, partial(_wrong_there, moment, struck, result, process.exitcode, said, left))


def _strike(moment: Moment, family: list[psutil.Process]) -> bool:
    """Gives whether there was still somebody to strike."""
    number = signal.SIGKILL if moment.kind == "kill a sender" else signal.Signals[moment.kind]
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in family[1:2] if moment.kind == "kill a sender" else family[:1]:
            process.send_signal(number)
            return True
    return False


def _family(pid: int | None) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _wrong_there(moment: Moment, taken: int, path: Path, code: int | None, told: Path, left: Sequence[psutil.Process]) -> str:
    said, live = told.read_text(), Path(f"{path}.live")
    if left:
        return f"left {left}"
    if "Traceback" in said:
        return said
    killed = moment.kind == "SIGKILL" and live.exists()  # before its result was written
    try:
        if killed:
            assert main(["recover", str(live), "--json", str(path)]) != ExitCode.USAGE
        result = read_run(path)
    except Exception as exc:
        return f"no result: {exc!r}, exit code {code}, {said}"
    if live.exists() != killed:
        return "the live log was left"
    if killed and not result.partial:
        return "killed, and not PARTIAL"
    if result.partial and not killed and "PARTIAL" not in said:
        return "PARTIAL, and not said"
    if moment.kind == "kill a sender" and result.partial and (result.valid or "SIGKILL" not in result.reasons[0]):
        return f"{result.valid}, {result.reasons}"
    if set(result.errors) - {"timeout", "refused"}:  # that is a busy machine
        return f"{result.errors}"
    return _lost(result, taken)


@pytest.fixture
def forked() -> Iterator[None]:
    """Commands are forked from a process that has imported what they need, which takes longer than they do."""
    forkserver._forkserver._stop()  # private; the process that other tests' preloads are in, which would stay
    COMMANDS.set_forkserver_preload([__name__, "loadtest.commands.run", "loadtest.reports.terminal"])
    yield
    forkserver._forkserver._stop()


@pytest.mark.usefixtures("forked")
def test_at_fifty_random_moments_a_run_ends_and_keeps_what_it_measured(tmp_path: Path) -> None:
    async def scenario() -> list[Ended]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(moment: Moment) -> Ended:
            async with room:
                return await (strike_target if moment.kind in AT_THE_TARGET else strike_run)(moment, tmp_path)

        return await asyncio.gather(*(one(moment) for moment in moments()))

    ends = dict(zip(moments(), uvloop.run(scenario()), strict=True))
    faults = {str(moment): wrong for moment, ended in ends.items() if (wrong := ended.wrong())}
    assert faults == {}
    for grpc in (False, True):  # a run that finds no connection is none that was struck
        struck = [ended.taken > 0 for moment, ended in ends.items() if moment.grpc == grpc]
        assert sum(struck) > len(struck) // 2, "most had ended before they were struck"
