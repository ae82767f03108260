"""Whose stall was it? Stalls made on purpose, and what a run says of them.

    python -m benchmarks.stalls attribution --each 20   stalls of the server, the machine, the generator: whose, says the run?
    python -m benchmarks.stalls knee --runs 20          a server that stalls itself near its limit must never be excused
    python -m benchmarks.stalls bursts --runs 10        beside a neighbour that works for 20 ms each second: runs with a verdict
    python -m benchmarks.stalls neighbour               the peak beside a noisy neighbour, and in quiet: within 5 %, or INVALID
    python -m benchmarks.stalls cost                    what the meter costs, in cores

The server is one process pinned to core 0 that takes a set CPU time for each request, one after the other. Neighbours are
processes of their own on its core. Nothing else should run: what else does is work of others, too.
"""

import argparse
import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from loadtest.measuring.generator import measure
from loadtest.measuring.progress import Progress
from loadtest.results import LoadSpec, RunResult, SloSpec, Stall

CORE = 0
WORK_MS = 2.0  # of each request
LIMIT = SloSpec.parse("p99<50ms")
BURST_LOADS = (0.4, 0.5, 0.6, 0.7, 1.2)  # of what the core carries: the peak is at about 0.9
shielded = False
PAYLOAD = Path(__file__).parent.parent / "tests" / "loadtest" / "payload.json"

# A server on one core. Arguments: core, CPU ms per request, how it stalls itself (or "no"), each so many s, ms of each stall.
_SERVER = """
import os, sys, time, socket, selectors, threading, subprocess
core, work_ms, kind, every_s, stall_ms = int(sys.argv[1]), *[float(x) if x[0].isdigit() else x for x in sys.argv[2:6]]
os.sched_setaffinity(0, {core})
def burn(ms):
    end = time.thread_time() + ms / 1e3
    while time.thread_time() < end: pass
def burn_forever():
    while True: pass
def stall():
    if kind == "burn": burn(stall_ms)
    elif kind == "sleep": time.sleep(stall_ms / 1e3)
    elif kind == "thread":
        t = threading.Thread(target=burn, args=(stall_ms,)); t.start(); t.join()
    elif kind == "child":
        code = "import time\\ne=time.process_time()+%f\\nwhile time.process_time()<e: pass" % (stall_ms / 1e3)
        subprocess.run([sys.executable, "-I", "-S", "-c", code])
    elif kind == "stop":
        if os.fork() == 0:
            time.sleep(stall_ms / 1e3); os.kill(os.getppid(), 18); os._exit(0)
        os.kill(os.getpid(), 19); os.wait()
answer = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: 2\\r\\n\\r\\n{}"
listener = socket.create_server(("127.0.0.1", 0)); listener.setblocking(False)
poll = selectors.DefaultSelector(); poll.register(listener, selectors.EVENT_READ)
print(listener.getsockname()[1], flush=True)
served, next_stall = 0, None
while True:
    for key, _ in poll.select(0.05):
        if key.fileobj is listener:
            peer, _ = listener.accept(); peer.setblocking(False); poll.register(peer, selectors.EVENT_READ, [b""])
            continue
        peer, held = key.fileobj, key.data
        try: text = peer.recv(1 << 20)
        except ConnectionError: text = b""
        if not text:
            poll.unregister(peer); peer.close(); continue
        held[0] += text
        head, ended, body = held[0].partition(b"\\r\\n\\r\\n")
        if not ended: continue
        lengths = [int(line.split(b":")[1]) for line in head.lower().split(b"\\r\\n") if line.startswith(b"content-length")]
        if len(body) < (lengths or [0])[0]: continue
        held[0] = b""
        if next_stall is None: next_stall = time.monotonic() + every_s
        if kind != "no" and time.monotonic() >= next_stall:
            next_stall += every_s; began = time.monotonic(); stall(); print(began, time.monotonic(), flush=True)
        burn(work_ms)
        peer.sendall(answer)
"""

# A neighbour: works for so many ms (of wall time) at each multiple of so many seconds, on one core.
_NEIGHBOUR = """
import os, sys, time
core, every_s, work_ms = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {core})
while True:
    time.sleep(every_s - time.monotonic() % every_s)
    began = time.monotonic()
    while time.monotonic() < began + work_ms / 1e3: pass
    print(began, time.monotonic(), flush=True)
"""


class Process:
    """A process of its own; what it prints, by lines."""

    def __init__(self, code: str, *arguments: object, realtime: int = 0) -> None:
        """realtime: priority before everything else on its core (needs root); 0: an ordinary one."""
        command = [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]
        self._running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        if shielded:
            Path(f"/proc/{self._running.pid}/autogroup").write_text("-20")
        if realtime:
            os.sched_setscheduler(self._running.pid, os.SCHED_RR, os.sched_param(realtime))

    def line(self) -> str:
        assert self._running.stdout is not None
        return self._running.stdout.readline()

    def end(self) -> list[tuple[float, float]]:
        """End it; the stretches (s of the monotonic clock) that it printed and nobody has read."""
        assert self._running.stdout is not None
        os.killpg(self._running.pid, signal.SIGKILL)
        lines = self._running.stdout.read().splitlines()
        self._running.stdout.close()
        self._running.wait()
        return [(float(start), float(end)) for start, end in (line.split() for line in lines)]


@contextmanager
def server(kind: str = "no", *, every_s: float = 1.0, stall_ms: float = 50.0, work_ms: float = WORK_MS) -> Iterator["Server"]:
    running = Process(_SERVER, CORE, work_ms, kind, every_s, stall_ms)
    found = Server(f"http://127.0.0.1:{int(running.line())}")
    try:
        yield found
    finally:
        found.stalls = running.end()


@dataclass
class Server:
    """stalls: its own, once it has ended."""

    url: str
    stalls: list[tuple[float, float]] = field(default_factory=list)


@contextmanager
def neighbours(
    every_s: float, work_ms: float, *, count: int = 1, realtime: bool = False
) -> Iterator[list[tuple[float, float]]]:
    """Processes that work on the server's core. Gives when, once they have ended."""
    when: list[tuple[float, float]] = []
    priority = 1 if realtime or shielded else 0
    running = [Process(_NEIGHBOUR, CORE, every_s, work_ms, realtime=priority) for _ in range(count)]
    try:
        yield when
    finally:
        when += sorted(stretch for each in running for stretch in each.end())[::count]


@contextmanager
def generator_elsewhere() -> Iterator[None]:
    """Keep this process off the server's core, as `loadtest recommend` does."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores - {CORE} or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def spec(target: str, rate: float, seconds: float, seed: int = 0) -> LoadSpec:
    return LoadSpec(
        target, model="m", rate_rps=rate, duration_s=seconds, slo=LIMIT, warmup_s=0.0, payloads=(str(PAYLOAD),), seed=seed
    )


def run(wanted: LoadSpec, **options: Any) -> RunResult:
    return uvloop.run(measure(wanted, **options))


WAYS = {
    "server": ("burn", "sleep", "thread", "child", "stop"),
    "machine": ("crowd", "realtime neighbour"),
    "generator": ("burn", "sleep", "stop", "collect"),
}
_CROWD = 10  # neighbours of ordinary priority: one alone only halves the server's speed


def attribution(each: int, stall_ms: float, only: str | None) -> None:
    """Stalls of about stall_ms, one a second, by each kind of culprit in several ways: whose does the run say that each was?"""
    print(f"{'whose':<11}{'how':<20}{'made':>6}{'rightly':>9}   otherwise (ms: machine, generator of all)")
    sums: dict[str, list[int]] = {}
    for whose, ways in WAYS.items():
        for how in ways if only in (whose, None) else ():
            number = -(-each // len(ways))
            told = injected(whose, how, number, stall_ms)
            wrong = [
                f"{stall.whose} {stall.machine_ms:.0f}, {stall.generator_ms:.0f} of {stall.duration_ms:.0f}"
                if stall
                else "nobody"
                for stall in told
                if stall is None or stall.whose != whose
            ]
            counts = sums.setdefault(whose, [0, 0])
            counts[0] += len(told)
            counts[1] += len(told) - len(wrong)
            print(f"{whose:<11}{how:<20}{len(told):>6}{len(told) - len(wrong):>9}   {'; '.join(wrong)}", flush=True)
    for whose, (made, right) in sums.items():
        print(f"{whose}: {right} of {made} ({right / max(made, 1):.0%})")


def injected(whose: str, how: str, number: int, stall_ms: float) -> list[Stall | None]:
    """Make stalls; what the run says of each: of the stall that it tells in most of that time, if in any."""
    origin_s: list[float] = []
    made: list[tuple[float, float]] = []

    def started(progress: Progress) -> None:
        origin_s[:] = origin_s or [time.monotonic() - progress.elapsed_s]

    with generator_elsewhere(), server(how if whose == "server" else "no", stall_ms=stall_ms) as target:
        wanted = spec(target.url, 100, number + 1.0)
        if whose == "machine":
            crowd = how == "crowd" and not shielded
            with neighbours(1.0, stall_ms, count=_CROWD if crowd else 1, realtime=not crowd) as made:
                result = run(wanted, on_progress=started)
        elif whose == "generator":
            result = uvloop.run(_stalling(wanted, how, stall_ms, made, on_progress=started))
        else:
            result = run(wanted, on_progress=started)
    found: list[Stall | None] = []
    for start_s, end_s in made or target.stalls:
        start_s, end_s = start_s - origin_s[0], end_s - origin_s[0]
        if start_s > 0 and end_s < wanted.duration_s and len(found) < number:
            shared = [
                (min(end_s, stall.start_s + stall.duration_ms / 1e3) - max(start_s, stall.start_s), number, stall)
                for number, stall in enumerate(result.stalls)
            ]
            overlap, _, stall = max(shared, default=(0.0, 0, None))
            found.append(stall if overlap > 0 else None)
    return found


async def _stalling(wanted: LoadSpec, how: str, stall_ms: float, made: list[tuple[float, float]], **options: Any) -> RunResult:
    """A run whose own event loop stops for stall_ms once a second."""
    loop = asyncio.get_running_loop()
    ring: list[object] = []

    def stall() -> None:
        loop.call_later(1.0, stall)
        began = time.monotonic()
        if how == "sleep":
            time.sleep(stall_ms / 1e3)
        elif how == "stop":
            if os.fork() == 0:
                time.sleep(stall_ms / 1e3)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.wait()
        else:
            while time.monotonic() < began + stall_ms / 1e3:
                if how == "collect":
                    ring[:] = [[ring] for _ in range(1000)]
                    gc.collect()
        made.append((began, time.monotonic()))

    loop.call_later(1.0, stall)
    return await measure(wanted, **options)


def knee(runs: int, seconds: float) -> None:
    """Servers whose own stalls make them miss: never INVALID for the machine's sake, never a pass."""
    excused = 0
    for number in range(runs):
        how = ("burn", "sleep", "thread", "child", "stop")[number % 5]
        with generator_elsewhere(), server(how, every_s=0.5, stall_ms=60) as target:
            result = run(spec(target.url, 0.8 * 1000 / WORK_MS, seconds, seed=number))
        assert result.machine is not None
        bad = result.machine.disturbed or result.verdict == "pass"
        excused += bad
        print(_line(f"{how:<8}", result) + ("   EXCUSED" if bad else ""), flush=True)
    print(f"excused: {excused} of {runs}")


def bursts(runs: int, seconds: float) -> None:
    """A neighbour that works for 20 ms each second on the server's core, at several loads."""
    verdicts = 0
    for number in range(runs):
        rate = BURST_LOADS[number % len(BURST_LOADS)] * 1000 / WORK_MS
        with generator_elsewhere(), server() as target, neighbours(1.0, 20):
            result = run(spec(target.url, rate, seconds, seed=number))
        verdicts += result.valid and result.verdict != "undecided"
        print(_line(f"{rate:>5.0f}/s", result), flush=True)
    print(f"runs that end in a verdict: {verdicts} of {runs}")


def neighbour(seconds: float, share: float) -> None:
    """How far up a server passes, in steps of 4 %, in quiet and beside a neighbour that works for a share of each 50 ms."""
    peak: dict[str, tuple[float, str]] = {}
    for name in ("quiet", "noisy"):
        rate, best = 0.6 * 1000 / WORK_MS, 0.0
        while True:
            with generator_elsewhere(), server() as target, ExitStack() as stack:
                if name == "noisy":
                    stack.enter_context(neighbours(0.05, 50 * share))
                result = run(spec(target.url, rate, seconds), until_decided=True)
            print(_line(f"{name} {rate:>5.0f}/s", result), flush=True)
            if not result.valid or result.verdict != "pass":
                peak[name] = best, (result.verdict or "-") if result.valid else "INVALID"
                break
            best, rate = rate, rate * 1.04
    for name, (best, then) in peak.items():
        print(f"{name}: passes up to {best:.0f}/s, then {then}")
    (quiet, _), (noisy, then) = peak["quiet"], peak["noisy"]
    kept = "yes" if noisy >= 0.95 * quiet or then == "INVALID" else "no"
    print("within 5 %, or INVALID: " + (kept if quiet else "not measured, as no quiet run passed"))


def cost(seconds: float) -> None:
    """CPU of the meter beside a server at half its limit."""
    with generator_elsewhere(), server() as target:
        result = run(spec(target.url, 0.5 * 1000 / WORK_MS, seconds))
    assert result.machine is not None
    print(f"{result.machine.meter_cores:.4f} cores beside {_line('', result)}")


def _line(name: str, result: RunResult) -> str:
    machine = result.machine
    assert machine is not None
    invalid = "" if result.valid else "INVALID (machine) " if machine.disturbed else "INVALID (generator) "
    return (
        f"{name}  {result.verdict or '-':<10}{invalid}p99 {result.latency.p99:6.1f} ms   "
        f"without marked: {machine.without_marked or '-':<10} marked {machine.marked_share:.2%}   "
        f"taken {machine.taken_share:.2%}   hiccup {machine.longest_hiccup_ms:.0f} ms   "
        f"lag p99 {result.generator.send_lag_p99_ms:.2f}   "
        f"others {', '.join(f'{who} {cores:.2f}' for who, cores in machine.others)}"
    )


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attribution", "knee", "bursts", "neighbour", "cost"))
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--only", choices=tuple(WAYS), help="this kind of culprit")
    parser.add_argument("--stall-ms", type=float, default=50.0)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--share", type=float, default=0.2, help="of a core that the noisy neighbour takes")
    parser.add_argument(
        "--shield",
        action="store_true",
        help="the server before other work, which cannot be stopped; neighbours before it (root)",
    )
    args = parser.parse_args(argv)
    global shielded
    shielded = args.shield
    match args.what:
        case "attribution":
            attribution(args.each, args.stall_ms, args.only)
        case "knee":
            knee(args.runs, args.seconds)
        case "bursts":
            bursts(args.runs, args.seconds)
        case "neighbour":
            neighbour(args.seconds, args.share)
        case "cost":
            cost(args.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
