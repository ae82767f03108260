"""What the ring of `gateway why` and traces cost: server CPU per request of `linear`, switched on and off within one process.

    python -m benchmarks.switched --with neither both --rounds 300 [--protocol grpc] [--processes 2]
    python -m benchmarks.switched --with neither again slowed     that the measurement is right

Two processes of one configuration differ by more than these cost: where their memory lies, how strings hash, what else the
machine does meanwhile; and one process is a fifth slower for seconds at a time. So here one process serves, over sockets, and
again and again, while nothing is asked, the lane gets a batcher that records, or one that does not, and the edges get a
sampler, or none: what the gateway itself gives them when it is made. A round asks one block of each, in an order that is drawn.

Counted is the process's own CPU time, all its threads and the kernel's work for it. Told is by how much a block takes more than
that of the first kind in its round. Of the event loop's thread it is the mean of the middle three fifths of the rounds, as the
machine is a fifth slower within some; what comes once in tens of thousands of requests (the state that a segment of the ring
begins with, 0.02 us a request) is left out with them. Of other threads, which send spans, it is the mean of all. Intervals of
95 % are from rounds drawn anew (bootstrap). What sends spans begins when there are as many as leave at once, so it begins in a
block with traces, and that block lasts until the message has been taken. The ring packs in blocks that fill it: up to 255
events wait for the next block of the kind.

Before each block some requests are served by a batcher of a type that no kind has, then many by its own, and they are not
counted: the interpreter learns the types that it meets anew, and where a kind shared its type with the one before, it would
have less to learn than others. What is switched on is in no cache at first: right after the switch the ring costs nearly twice
what it costs 3000 requests later.

--idle: what both have, as the exporter is there in either: the CPU time of the process while nobody asks, beside that of one
without.

again: a second batcher that does not record, so its ratio must be 1. slowed: one that spends `SPENT_NS` more on each request.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.before_after import ASKING, Client, Locks
from benchmarks.stations import WITH, collecting, ingress_of
from gateway.batching.batcher import Batcher
from gateway.types import InferRequest

KINDS: Final = (*WITH, "again", "slowed")
REQUESTS: Final = 2_000
_AWAY: Final = "away"  # the kind that is between all others
_SETTLING: Final = ((_AWAY, 800), (None, 3_000))  # requests; the interpreter needs 53 batches of some 14 to learn types anew
_CUT: Final = 0.2  # of the rounds, at either end
SPENT_NS: Final = 2_000
_EVERY: Final = 10  # requests that are slowed at once: to read a thread's clock takes long, too
_IDLE_S: Final = 10.0
_DRAWN: Final = 2000
# Spans leave when they are many, as they do where all requests are served so; a twentieth of the time would be the timer's.
_ENVIRONMENT: Final = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}


class Slowed(Batcher):
    """Spends CPU time that is known."""

    _left = 0

    def add(self, request: InferRequest, now_ns: int, reserved_ns: int = 0) -> None:
        if not self._left:
            self._left = _EVERY
            until_ns = time.thread_time_ns() + _EVERY * SPENT_NS
            while time.thread_time_ns() < until_ns:
                pass
        self._left -= 1
        super().add(request, now_ns, reserved_ns)


class Away(Batcher):
    """Like any, but of another type."""


class Switch:
    """Between what one process serves with."""

    def __init__(self, ingress: Any) -> None:
        self._lane = ingress.repository.model("linear", "").lanes[0]
        self._edges = [ingress._http.handler.__self__._endpoints, ingress._grpc._endpoints]
        self._sampler = self._edges[0].sampler
        self._exporter = ingress._tracer.close.__self__
        recorded = self._lane.batcher
        settings = recorded.ring.settings
        policy, told = type(recorded.policy), recorded.service.to_dict()
        plain, again = settings.batcher(), settings.batcher()
        slowed, away = (
            kind(
                settings.batcher().policy, max_rows=settings.max_rows, row_sizes=settings.row_sizes, workers=settings.sessions,
                max_queue_rows=settings.max_queue_rows, slo_ns=settings.slo_ns,
            )
            for kind in (Slowed, Away)
        )  # fmt: skip
        for batcher in (plain, again, slowed, away):
            assert type(batcher.policy) is policy
            batcher.service.restore(told)
        self._batchers = {"again": again, "slowed": slowed, "ring": recorded, "both": recorded, _AWAY: away}
        self._plain = plain

    async def sent(self) -> None:
        """Wait while spans are being sent."""
        exporter = self._exporter
        most = exporter._settings.sent_spans
        while exporter._due.is_set() or exporter._put - exporter._taken >= most or exporter._sending:  # noqa: ASYNC110  # a thread
            await asyncio.sleep(0.0005)
        assert not exporter.failed, exporter.spans()
        assert not exporter.dropped, exporter.spans()

    def to(self, kind: str) -> None:
        """While nothing is asked."""
        assert not self._lane.pending
        self._lane.batcher = self._lane.runs._batcher = self._batchers.get(kind, self._plain)
        for edge in self._edges:
            edge.sampler = self._sampler if WITH.get(kind, (False, False))[1] else None


async def _serve(which: str, collector: str) -> None:
    """Answer, and do what comes on standard input: a kind to switch to, or to say what was used. Until it ends."""
    ingress, ports = await ingress_of(which, collector, port=0)
    switch = Switch(ingress) if which == "both" else None
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(ports.http, ports.grpc, flush=True)
    while line := (await lines.readline()).decode().strip():
        if switch is not None:
            await switch.sent()
            if line != "used":
                switch.to(line)
        print(time.process_time_ns(), time.thread_time_ns(), flush=True)
    await ingress.drain()


class Server:
    """A process that serves. Life: made -> ask … -> stop."""

    def __init__(self, which: str, collector: str, protocol: str, connections: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.switched", "--serve", which, "--collector", collector],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ENVIRONMENT,
            text=True,
        )
        http, grpc = self._read().split()
        port = int((grpc if protocol == "grpc" else http).rpartition(":")[2])
        self.ask = Client(protocol, "127.0.0.1", port, Locks(), connections).ask

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def told(self, line: str) -> np.ndarray:
        """Say it, and get the CPU time so far, in us: (all of it, the event loop's thread)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return np.array(self._read().split(), float) / 1e3

    def block(self, kind: str, requests: int) -> np.ndarray:
        """CPU time of each request, likewise."""
        for before, asked in _SETTLING:
            self.told(before or kind)
            self.ask(asked)
        before = self.told("used")
        self.ask(requests)
        return (self.told("used") - before) / requests

    def idle(self) -> float:
        """CPU time of each second in which nobody asks, in us."""
        before = self.told("used")
        time.sleep(_IDLE_S)
        return float((self.told("used") - before)[0] / _IDLE_S)

    def stop(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="kinds", nargs="+", choices=KINDS, default=["neither", "both"])
    parser.add_argument("--rounds", type=int, default=300, help="of each process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a block")
    parser.add_argument("--protocol", choices=sorted(ASKING), default="rest-json")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the order within a round")
    parser.add_argument("--idle", action="store_true", help="measure also what is used while nobody asks")
    parser.add_argument("--serve", choices=WITH, help=argparse.SUPPRESS)
    parser.add_argument("--collector", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(_serve(arguments.serve, arguments.collector))
        return
    kinds = arguments.kinds
    draw = random.Random(arguments.seed)
    processes = []
    with ExitStack() as running:
        collector = running.enter_context(collecting())

        def started(which: str) -> Server:
            server = Server(which, collector, arguments.protocol, arguments.connections)
            running.callback(server.stop)
            return server

        for number in range(arguments.processes):
            server = started("both")
            costs = np.empty((arguments.rounds, len(kinds), 2))
            for kind in kinds:  # until what is learned of times is
                server.block(kind, 5 * arguments.requests)
            for cost in costs:
                for index in draw.sample(range(len(kinds)), len(kinds)):
                    cost[index] = server.block(kinds[index], arguments.requests)
            processes.append(costs)
            _print(f"process {number + 1}", kinds, costs)
        if len(processes) > 1:
            _print("all", kinds, np.concatenate(processes))
        if arguments.idle:
            both, neither = started("both").idle(), started("neither").idle()
            print(f"while nobody asks: both {both:.0f} us a second, neither {neither:.0f}")


def _print(what: str, kinds: list[str], costs: np.ndarray) -> None:
    """costs: (rounds, kinds, all of it and the loop's)."""
    rounds = len(costs)
    drawn = np.random.default_rng(0).integers(rounds, size=(_DRAWN, rounds))
    base = _middle(costs[:, 0])
    print(f"{what}: {rounds} blocks of each; {kinds[0]} {base:.2f} us a request", flush=True)
    for index, kind in enumerate(kinds[1:], 1):
        more = costs[:, index] - costs[:, 0]
        middle = _middle(more)
        least, most = np.percentile([_middle(more[one]) for one in drawn], (2.5, 97.5))
        print(
            f"  {kind:8} more by {middle:.2f} us, 95 % interval {least:.2f} to {most:.2f}: {middle / base:.1%} "
            f"({least / base:.1%} to {most / base:.1%}); of it on other threads {_others(more):.2f} us",
            flush=True,
        )


def _middle(costs: np.ndarray) -> float:
    """Of (rounds, all of it and the loop's), as the module says."""
    cut = int(len(costs) * _CUT)
    return float(np.sort(costs[:, 1])[cut : len(costs) - cut].mean()) + _others(costs)


def _others(costs: np.ndarray) -> float:
    return float((costs[:, 0] - costs[:, 1]).mean())


if __name__ == "__main__":
    main()
