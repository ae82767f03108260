"""A run is struck at a random moment: it ends, and what was measured is kept.

Fifty moments, drawn from a seed, side by side: the target closes, resets, stalls or dies, or the run gets Ctrl-C, SIGTERM or
kill -9, over REST and gRPC, from one process and from two. Whose process is struck runs as a real command.
"""

import asyncio
import contextlib
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import uvloop

from loadtest import http2
from loadtest.cli import main
from loadtest.generator import measure
from loadtest.results import LoadSpec, read_run

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
OK_TAIL = http2.encode_headers([("grpc-status", "0")])


class Target:
    """Answers what is measured, of both protocols. first: set when the first request has come."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.stalled = False
        self.connections: set[asyncio.Transport] = set()
        self._server: asyncio.Server
        self.port = 0

    async def start(self, *, grpc: bool) -> None:
        kind = _Grpc if grpc else _Http
        self._server = await asyncio.get_running_loop().create_server(lambda: kind(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

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
    def __init__(self, target: Target) -> None:
        self.target = target

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.target.connections.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.target.connections.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        if not data.startswith(b"POST /v2/models/m/infer"):
            self.transport.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")  # no statistics
        elif not self.target.stalled:
            self.target.first.set()
            self.transport.write(ANSWER)


class _Grpc(_Http):
    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.reader = http2.FrameReader()
        self.preface = len(http2.PREFACE)
        self.unknown: set[int] = set()  # streams that ask for statistics

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.write(http2.opening({}))

    def data_received(self, data: bytes) -> None:
        skip = min(self.preface, len(data))
        self.preface -= skip
        ended = http2.END_HEADERS | http2.END_STREAM
        for kind, flags, stream, payload in self.reader.feed(data[skip:]):
            if kind == http2.HEADERS and b"ModelStatistics" in payload:
                self.unknown.add(stream)
                self.transport.write(http2.frame(http2.RST_STREAM, 0, stream, http2.CANCEL.to_bytes(4, "big")))
            elif kind == http2.DATA and stream not in self.unknown and not self.target.stalled:
                self.target.first.set()
                self.transport.write(http2.frame(http2.HEADERS, ended, stream, OK_TAIL))
            elif kind == http2.SETTINGS and not flags & http2.ACK:
                self.transport.write(http2.frame(http2.SETTINGS, http2.ACK, 0))
            elif kind == http2.PING and not flags & http2.ACK:
                self.transport.write(http2.frame(http2.PING, http2.ACK, 0, payload))


@dataclass(frozen=True)
class Moment:
    """What strikes, whom, and how long after the first request."""

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


async def strike_target(moment: Moment, folder: Path) -> str:
    """Run here, and strike the target. Gives what is wrong with how it ended; empty if nothing is."""
    target = Target()
    await target.start(grpc=moment.grpc)
    spec = LoadSpec(
        f"127.0.0.1:{target.port}", protocol="grpc" if moment.grpc else "rest-json", model="m", payloads=(PAYLOAD,),
        rate_rps=200, duration_s=DURATION_S, timeout_s=TIMEOUT_S, warmup_s=0.0, processes=moment.processes, connections=8,
    )  # fmt: skip
    running = asyncio.create_task(measure(spec))
    try:
        async with asyncio.timeout(END_S):
            await target.first.wait()
            await asyncio.sleep(moment.after_s)
            target.strike(moment.kind)
            result = await running
    except TimeoutError:
        running.cancel()
        await asyncio.wait((running,))
        return f"{moment}: did not end"
    finally:
        target.close()
    wanted = {"timeout"} if moment.kind == "stall" else {"reset", "refused"}
    # On a busy machine some are late, all if it is struck early, or not sent at all; none may be anything else.
    if result.partial or not result.requests or result.requests > 200 or set(result.errors) - wanted - {"timeout"}:
        return f"{moment}: {result.partial}, {result.succeeded} of {result.requests}, {result.errors}"
    return ""


async def strike_run(moment: Moment, folder: Path) -> str:
    """Run as a command, and strike it, or one of the processes that send for it. Gives what `strike_target` does."""
    target = Target()
    await target.start(grpc=moment.grpc)
    result = folder / f"{moment.number}.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest.cli", "run", f"127.0.0.1:{target.port}", "--model", "m",
        "--protocol", "grpc" if moment.grpc else "rest-json", "--payload", PAYLOAD, "--rate", "200", "--connections", "8",
        "--duration", str(DURATION_S), "--timeout", str(TIMEOUT_S), "--warmup", "0", "--processes", str(moment.processes),
        "--json", str(result), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said = asyncio.create_task(process.communicate())
    first = asyncio.create_task(target.first.wait())
    family: list[psutil.Process] = []
    try:
        async with asyncio.timeout(END_S):
            await asyncio.wait((first, said), return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                await asyncio.sleep(moment.after_s)
                family = _family(process.pid)
                _strike(moment, family)
            out, _ = await said
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await said
        return f"{moment}: did not end"
    finally:
        first.cancel()
        target.close()
    _, left = await asyncio.to_thread(psutil.wait_procs, family, timeout=5)
    if left:
        return f"{moment}: left {left}"
    return _judge(moment, result, process.returncode, out.decode())


def _strike(moment: Moment, family: list[psutil.Process]) -> None:
    number = signal.SIGKILL if moment.kind == "kill a sender" else signal.Signals[moment.kind]
    senders = family[1:] if moment.kind == "kill a sender" else []
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # it may have ended by itself
        (senders or family)[0].send_signal(number)


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _judge(moment: Moment, path: Path, code: int | None, said: str) -> str:
    if "Traceback" in said:
        return f"{moment}: {said}"
    if moment.kind == "SIGKILL" and code == -signal.SIGKILL:
        live = Path(f"{path}.live")
        try:
            main(["recover", str(live), "--json", str(path)])
            result = read_run(path)
        except Exception as exc:
            return f"{moment}: cannot be recovered: {exc!r}"
        return "" if result.partial and result.succeeded else f"{moment}: {result.partial}, {result.succeeded}"
    try:
        result = read_run(path)
    except Exception as exc:
        return f"{moment}: no result: {exc!r}, exit code {code}, {said}"
    if Path(f"{path}.live").exists():
        return f"{moment}: the live log was left"
    if not result.succeeded:
        return f"{moment}: nothing was kept: {result.requests}, {result.errors}, exit code {code}"
    if result.partial and "PARTIAL" not in said:
        return f"{moment}: PARTIAL, and not said"
    if moment.kind == "kill a sender" and result.partial and (result.valid or "SIGKILL" not in result.reasons[0]):
        return f"{moment}: {result.valid}, {result.reasons}"
    if set(result.errors) - {"timeout"}:  # that is a busy machine
        return f"{moment}: {result.errors}"
    return ""


def test_at_fifty_random_moments_a_run_ends_and_keeps_what_it_measured(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(moment: Moment) -> str:
            async with room:
                return await (strike_target if moment.kind in AT_THE_TARGET else strike_run)(moment, tmp_path)

        return await asyncio.gather(*(one(moment) for moment in moments()))

    assert "\n".join(filter(None, uvloop.run(scenario()))) == ""
