"""How near a server that is asked by many comes to sessions of ONNX Runtime without any server, on `minilm` and the same cores.

    python -m benchmarks.saturation --rounds 3 --seconds 4 --peers plain triton

Sessions alone have the whole machine, a server shares it with the client that asks it. So sessions are measured twice: alone,
and beside the same client. It then sends the same requests, at the rate that the server has answered in the same round, to a
server that does nothing: it reads each, and writes an answer of the same length. What sessions do meanwhile is what is left for
a server that costs no more than that.

Each round has slices in turn: 64 users of the server, then the sessions, two of one thread, in batches of 1, 2 and 4 rows of
one length: beside the client, and alone. The server is stopped (SIGSTOP) meanwhile. Of the sessions that batch counts
which costs least by the medians of the rounds. Processor time is that of the server's processes by request, and that of the
sessions' by row: it says the same without rates, which the machine's moods change.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop

from benchmarks.lengths import LENGTHS
from benchmarks.minilm_servers import NAMES, Setting, reference, serving
from benchmarks.overhead import Server
from benchmarks.peers import absent
from benchmarks.peers_minilm import Sessions, go_on, payload_of, spec_of, stop, warm
from benchmarks.processor_time import cpu_between, cpu_s
from loadtest.measuring.generator import measure
from loadtest.results import LoadSpec

USERS: Final = 64
BATCHES: Final = (1, 2, 4)
_LONGER_S: Final = 1.0  # that the client goes on, as the sessions end with a whole turn of all lengths
_SESSIONS: Final = "from benchmarks.saturation import sessions; sessions()"
_NOTHING: Final = "from benchmarks.saturation import nothing; nothing()"


def sessions() -> None:
    """As a process: for each line `rows wait_s seconds` waits, runs them for so long, and prints rows/s and CPU s per row."""
    opened = {rows: Sessions(2, 1, rows) for rows in BATCHES}
    print(flush=True)
    for line in sys.stdin:
        rows, wait_s, seconds = line.split()
        time.sleep(float(wait_s))
        spent_s, began_s = time.process_time(), time.perf_counter()
        rate = opened[int(rows)].speed(float(seconds))
        done = rate * (time.perf_counter() - began_s)
        print(json.dumps([rate, (time.process_time() - spent_s) / done]), flush=True)


class _Nothing(asyncio.Protocol):
    """Answers each request, which come one at a time, once it is whole."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            head, _, _ = data.partition(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self._missing = len(head) + 4 + int(length.partition(b":")[2])
        self._missing -= len(data)
        if not self._missing:
            self._transport.write(self._answer)


def nothing() -> None:
    """As a process: prints its port, and serves until standard input ends."""
    (embedding,) = (reference(LENGTHS[0]),)
    output = {"name": "embedding", "datatype": "FP32", "shape": [1, len(embedding)], "data": embedding.tolist()}
    body = json.dumps({"model_name": "minilm", "model_version": "1", "outputs": [output]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Nothing(answer), "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    uvloop.run(serve())


@contextlib.contextmanager
def beside(program: str) -> Iterator["subprocess.Popen[str]"]:
    """A process of this module, once it has printed a line."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


class Round:
    """What one found. served: requests/s, CPU ms of one. beside, alone: of sessions, by batch: rows/s, CPU ms of one."""

    def __init__(self, served: tuple[float, float]) -> None:
        self.served = served
        self.beside: dict[int, tuple[float, float]] = {}
        self.alone: dict[int, tuple[float, float]] = {}


def measured(server: Server, spec: LoadSpec, null: LoadSpec, bare: "subprocess.Popen[str]", seconds: float) -> Round:
    assert bare.stdin is not None
    assert bare.stdout is not None
    go_on(server)
    before = cpu_s(server.processes)
    result = uvloop.run(measure(replace(spec, pattern=f"users:count={USERS}", timeout_s=20.0)))
    spent_s = cpu_between(before, cpu_s(server.processes))
    stop(server)
    rate = result.succeeded_rps
    found = Round((rate, 1e3 * spent_s / (result.succeeded + result.warmup_requests)))
    for rows in BATCHES:
        print(rows, 1.0, seconds - 0.5, file=bare.stdin, flush=True)
        sent = uvloop.run(measure(replace(null, pattern="constant", rate_rps=rate, duration_s=null.duration_s + _LONGER_S)))
        told_rate, told_cpu_s = json.loads(bare.stdout.readline())
        if sent.errors or not sent.valid:
            raise SystemExit(f"the server that does nothing was not asked as it was meant to: {sent.errors}")
        found.beside[rows] = told_rate, 1e3 * told_cpu_s
        print(rows, 0.0, seconds / 2, file=bare.stdin, flush=True)
        told_rate, told_cpu_s = json.loads(bare.stdout.readline())
        found.alone[rows] = told_rate, 1e3 * told_cpu_s
    return found


def table(rounds: dict[str, list[Round]]) -> str:
    """In Markdown: medians of the rounds, and of each ratio its least and most."""
    lines = [
        "| server | requests/s | sessions beside the client, rows/s | ratio | alone, rows/s | ms CPU, request | row | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in rounds.items():
        best = min(BATCHES, key=lambda rows: statistics.median(each.beside[rows][1] for each in found))
        rates = [each.served[0] / each.beside[best][0] for each in found]
        costs = [each.served[1] / each.beside[best][1] for each in found]
        middle = statistics.median
        cells = [
            name,
            f"{middle(each.served[0] for each in found):.1f}",
            f"{middle(each.beside[best][0] for each in found):.1f} ({best} a batch)",
            f"{middle(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})",
            f"{middle(each.alone[best][0] for each in found):.1f}",
            f"{middle(each.served[1] for each in found):.2f}",
            f"{middle(each.beside[best][1] for each in found):.2f}",
            f"{middle(costs):.2f} ({min(costs):.2f} to {max(costs):.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir(), "gateway-peers"))
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=["plain"])
    parser.add_argument("--rows", type=int, default=1, help="the largest batch of a peer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--until", type=float, default=float("inf"), help="start no round after so many seconds")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through the blocks that end what was started
    for name in arguments.peers:
        if reason := absent(name, arguments.environments):
            parser.error(f"--peers: {name}: {reason}")
    ends = time.monotonic() + arguments.until
    rounds: dict[str, list[Round]] = {name: [] for name in arguments.peers}
    with contextlib.ExitStack() as opened:
        bare, idle = (opened.enter_context(beside(program)) for program in (_SESSIONS, _NOTHING))
        assert bare.stdout is not None
        assert idle.stdout is not None
        bare.stdout.readline()
        nowhere = Server("nothing", int(idle.stdout.readline()), 0, [psutil.Process(idle.pid)])
        up: dict[str, tuple[Server, Path]] = {}
        for name in arguments.peers:
            places = [Path(opened.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
            setting = Setting(arguments.rows, promise=False)
            server = opened.enter_context(serving(name, setting, arguments.environments, places[0]))
            up[name] = server, payload_of(name, places[1])
            warm(spec_of(*up[name], 0, arguments.seconds))
            stop(server)
            opened.callback(go_on, server)
        for number in range(arguments.rounds):
            for name, (server, payload) in up.items():
                if time.monotonic() > ends:
                    continue
                spec, null = (spec_of(each, payload, number, arguments.seconds) for each in (server, nowhere))
                rounds[name].append(found := measured(server, spec, null, bare, arguments.seconds))
                print(f"{number + 1} {name}: {found.served}, beside {found.beside}, alone {found.alone}", flush=True)
    print(f"\n{table({name: found for name, found in rounds.items() if found})}")


if __name__ == "__main__":
    main()
