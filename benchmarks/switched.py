"""What the ring of `gateway why` and traces cost: server CPU per request of `linear`, switched on and off within one process.

    python -m benchmarks.switched --with neither ring traces both --rounds 20 [--protocol grpc] [--processes 3]
    python -m benchmarks.switched --with neither again slowed     that the measurement is right

Two processes of one configuration differ by more than these cost: where their memory lies, how strings hash, what else the
machine does meanwhile. So here one process serves, over sockets, and between two blocks of requests, while nothing is asked, the
lane gets a batcher that records, or one that does not, and the edges get a sampler, or none: what the gateway itself gives them
when it is made. A round asks one block of each, in an order that is drawn; figures are ratios to the first within a round.

Counted is the process's own CPU time, all its threads and the kernel's work for it, from a block's first request until all of
its spans are with the collector. So nothing that a block causes is left out or falls on another, but for at most 255 events
that the next block of a kind packs. `REQUESTS` requests make as many spans as leave at once; blocks of other lengths send some
that are not full, which is charged to traces. Some requests before each block are not counted: the interpreter learns the types
that it meets anew.

What both have, as the exporter is there in either, is told as well: the CPU time of the process while nobody asks, beside that
of one without.

again: a second batcher that does not record, so its ratio must be 1. slowed: one that spends `SPENT_NS` more on each request.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import uvloop

from benchmarks.before_after import ASKING, Client, Locks, interval
from benchmarks.stations import WITH, all_sent, collecting, ingress_of
from gateway.batching.batcher import Batcher
from gateway.types import InferRequest

KINDS: Final = (*WITH, "again", "slowed")
REQUESTS: Final = 25_600
SPENT_NS: Final = 2_000
_EVERY: Final = 10  # requests that are slowed at once: to read a thread's clock takes long, too
_IDLE_S: Final = 10.0


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


class Switch:
    """Between what one process serves with."""

    def __init__(self, ingress: Any) -> None:
        self._lane = ingress.repository.model("linear", "").lanes[0]
        self._edges = [ingress._http.handler._endpoints, ingress._grpc._endpoints]
        self._sampler = self._edges[0].sampler
        recorded = self._lane.batcher
        settings = recorded.ring.settings
        policy, told = type(recorded.policy), recorded.service.to_dict()
        plain, again = settings.batcher(), settings.batcher()
        slowed = Slowed(
            settings.batcher().policy, max_rows=settings.max_rows, row_sizes=settings.row_sizes, workers=settings.sessions,
            max_queue_rows=settings.max_queue_rows, slo_ns=settings.slo_ns,
        )  # fmt: skip
        for batcher in (plain, again, slowed):
            assert type(batcher.policy) is policy
            batcher.service.restore(told)
        self._batchers = {"again": again, "slowed": slowed, "ring": recorded, "both": recorded}
        self._plain = plain

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
        if line != "used":
            assert switch is not None
            switch.to(line)
        await all_sent(ingress)
        print(time.process_time_ns(), flush=True)
    await ingress.drain()


class Server:
    """A process that serves. Life: made -> ask … -> stop."""

    def __init__(self, which: str, collector: str, protocol: str, connections: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.switched", "--serve", which, "--collector", collector],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        http, grpc = self._read().split()
        port = int((grpc if protocol == "grpc" else http).rpartition(":")[2])
        self.ask = Client(protocol, "127.0.0.1", port, Locks(), connections).ask

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def told(self, line: str) -> int:
        """Say it, and get the CPU time so far, in ns, once all spans are sent."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return int(self._read())

    def block(self, kind: str, requests: int) -> float:
        """CPU time of each request, in us."""
        self.told(kind)
        self.ask(requests // 20)
        before_ns = self.told("used")
        self.ask(requests)
        return (self.told("used") - before_ns) / requests / 1e3

    def idle(self) -> float:
        """CPU time of each second in which nobody asks, in us."""
        before_ns = self.told("used")
        time.sleep(_IDLE_S)
        return (self.told("used") - before_ns) / _IDLE_S / 1e3

    def stop(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="kinds", nargs="+", choices=KINDS, default=["neither", "both"])
    parser.add_argument("--rounds", type=int, default=20, help="of each process")
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
    draw = random.Random(arguments.seed)
    costs: dict[str, list[float]] = {kind: [] for kind in arguments.kinds}
    with ExitStack() as running:
        collector = running.enter_context(collecting())

        def started(which: str) -> Server:
            server = Server(which, collector, arguments.protocol, arguments.connections)
            running.callback(server.stop)
            return server

        for number in range(arguments.processes):
            server = started("both")
            for kind in arguments.kinds:  # until the ring is full, and what is learned of times is
                server.block(kind, arguments.requests // 2)
            for _ in range(arguments.rounds):
                for kind in draw.sample(arguments.kinds, len(arguments.kinds)):
                    costs[kind].append(server.block(kind, arguments.requests))
            own = {kind: cost[-arguments.rounds :] for kind, cost in costs.items()}
            _print(f"process {number + 1}", own)
        _print("all", costs)
        if arguments.idle:
            both, neither = started("both").idle(), started("neither").idle()
            print(f"while nobody asks: both {both:.0f} us a second, neither {neither:.0f}")


def _print(what: str, costs: dict[str, list[float]]) -> None:
    (first, base), *others = costs.items()
    print(f"{what}: {len(base)} blocks of each; {first} {statistics.mean(base):.2f} us a request", flush=True)
    for kind, cost in others:
        print(f"  {kind:8} ratio {_compared(base, cost, _ratio, 4)}; more by {_compared(base, cost, _more, 2)} us", flush=True)


def _compared(base: Sequence[float], cost: Sequence[float], how: Callable[[float, float], float], digits: int) -> str:
    return interval([how(each, one) for one, each in zip(base, cost, strict=True)], digits)


def _ratio(cost: float, base: float) -> float:
    return cost / base


def _more(cost: float, base: float) -> float:
    return cost - base


if __name__ == "__main__":
    main()
