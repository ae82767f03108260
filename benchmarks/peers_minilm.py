"""The `minilm` part of benchmarks/peers.py: real work, sixteen lengths of 6 to 120 tokens at random, by REST.

All loads are `loadtest`'s: its generator sends, from the schedule that the round's seed decides, the same for all servers.

    bare      sessions alone, without a server: batches of one length each, the best of several sizes and of threads
    tune      once: with which largest batch each peer answers 16 users most, who wait about as long as the SLO
    closed    1, 8 and 64 users, each sends again when he is answered; nobody is told an SLO
    open      arrivals at random times: the highest rate at which 99 % are answered within the SLO, found by halving
    turns     slices of a few seconds in turn: 64 users, with sessions alone among them, then rates that are the same for all.
              All servers are up, but stopped (SIGSTOP) while others have their turn: idle ones may use a core and more

A machine that others share is faster in one minute than in the next. So two sessions of one thread run alone for half a second
before and after each load, a row at a time: the mean of both is the machine's speed then. Rates are searched for, and compared,
as shares of it. A load in which it changed by more than a fifth, or that other work disturbed, is measured once more, and does
not count if it is so again. Where it changes within seconds, `turns` tells most: there all servers share its moods.

A rate was kept if 99 % of a run's requests were answered in time; refused ones count as late. That is what was seen in one run
of some seconds, no proof: `proof` runs loadtest's sequential test, which is sure at 95 %. Servers start anew for each part of a
round, are checked before, and take turns.
"""

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import psutil
import uvloop

import backends
from benchmarks.lengths import LENGTHS
from benchmarks.minilm_servers import BATCHES, MODEL, SLO_MS, Setting, ask, body, path, serving, tokens
from benchmarks.overhead import Server
from benchmarks.processor_time import cpu_between, cpu_s
from loadtest.measuring.generator import measure
from loadtest.results import LoadSpec, RunResult, SloSpec

Part = Literal["bare", "tune", "closed", "open", "turns", "proof"]
USERS: Final = (1, 8, 64)
SLO: Final = SloSpec.parse(f"p99<{SLO_MS}ms")
SHARE: Final = 0.99
FIRST: Final = 0.6  # of the speed: where a search begins if nothing is known of a server
WANDERED: Final = 6 / 5
MOST_BARE: Final = 3  # times that sessions alone are measured, until the machine was steady
CLOSE: Final = 1.06  # the lowest rate that was missed by the highest that was kept: then the search ends
TUNING_USERS: Final = 16
MOST_TRIES: Final = 8  # disturbed ones included
BARE: Final = tuple((sessions, threads, rows) for sessions, threads in ((2, 1), (1, 2)) for rows in (1, 2, 4, 8, 16))
UNTUNED: Final = 8
ALONE: Final = (1, 2, 4)  # batches of sessions alone, which take turns with the servers
RATES: Final = (0.65, 0.8, 0.95)  # of `turns`, as shares of the speed
TOLD_OF_THE_SLO: Final = ("plain", "embedded", "plain-text", "triton", "triton-ragged", "bentoml")


@dataclass(frozen=True)
class Run:
    """One measurement. load: users; requests/s asked; of `bare` nothing. shape: of `bare`, its sessions and threads.

    speed: of the machine meanwhile, rows/s. goodput_rps: in time. kept: of `open`, the share in time. cpu_us: per request,
    of the server's processes.
    """

    round: int
    part: Part
    server: str
    load: float
    rows: int
    rps: float
    speed: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    errors: int = 0
    goodput_rps: float = 0.0
    cpu_us: float = 0.0
    kept: float = 0.0
    valid: bool = True
    shape: str = ""

    @property
    def share(self) -> float:
        """What was answered, in terms of the machine's speed."""
        return self.rps / self.speed


# the search for the highest rate


def next_share(tried: Sequence[tuple[float, bool]], first: float) -> float | None:
    """Which share of the speed to try next, given those that were tried and whether they were kept. None: it is known.

    Up in steps until one is missed, or down until one is kept; then the geometric middle of the highest kept below the lowest
    missed, and that.
    """
    low, high = bracket(tried)
    if not tried:
        return first
    if low and high < math.inf and high / low <= CLOSE:
        return None
    if not low:
        return high / 1.4
    return low * 1.25 if high == math.inf else math.sqrt(low * high)


def judged(runs: Iterable[Run]) -> list[tuple[float, bool]]:
    """The shares that were tried, and whether they were kept. What is not valid says nothing."""
    return [(run.load / run.speed, run.kept >= SHARE) for run in runs if run.valid]


def bracket(tried: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """The highest rate that was kept with none below it that was not, 0 if there is none; the lowest missed, or infinity.

    Rates that are as close as a search tells apart may be kept and missed in either order: then both are the lower one.
    """
    high = min((rate for rate, kept in tried if not kept), default=math.inf)
    return max((min(rate, high) for rate, kept in tried if kept and rate <= high * CLOSE), default=0.0), high


# measuring


class Measuring:
    """Measures parts of rounds. environments: of the peers. seconds: of each load. chosen: the largest batch of each peer."""

    def __init__(self, environments: Path, seconds: float, chosen: Mapping[str, int], told: Callable[[Run], None]) -> None:
        self._environments = environments
        self._seconds = seconds
        self._chosen = chosen
        self._told = told
        self._sessions = Sessions(2, 1)

    def part(self, number: int, part: Part, name: str, first: float) -> list[Run]:
        """All runs of one server. first: the share of the speed with which a search begins; of a proof, the requests/s."""
        if part == "bare":
            return self._bare(number)
        if part == "tune":
            return [run for rows in BATCHES.get(name, ()) for run in self._of_server(number, part, name, rows, first)]
        return self._of_server(number, part, name, self._rows(name), first)

    def turns(self, number: int, last: int, names: Sequence[str], ends: float) -> Iterator[list[Run]]:
        """Turns from `number` on and before `last`, until the time has come: in each, every load once for every server.

        Whoever can be told of the SLO runs twice, as only arrivals at random times are to be answered by it.
        """
        with contextlib.ExitStack() as opened:
            payload: dict[str, Path] = {}
            up: dict[tuple[str, bool], Server] = {}
            for name in names:
                payload[name] = payload_of(name, Path(opened.enter_context(tempfile.TemporaryDirectory())))
                for promise in (False, True):
                    place = Path(opened.enter_context(tempfile.TemporaryDirectory()))
                    if promise and name not in TOLD_OF_THE_SLO:
                        up[name, promise] = up[name, False]
                        continue
                    setting = Setting(self._rows(name), promise=promise)
                    server = up[name, promise] = opened.enter_context(serving(name, setting, self._environments, place))
                    warm(spec_of(server, payload[name], number, self._seconds))
                    stop(server)
                    opened.callback(go_on, server)
            alone = {f"sessions alone, {rows} a batch": Sessions(2, 1, rows) for rows in ALONE}
            while number < last and time.monotonic() < ends:
                found = []
                turn = number % len(names)
                for name, sessions in alone.items():
                    run = Run(number, "turns", name, USERS[-1], 0, sessions.speed(self._seconds), self._sessions.speed())
                    found.append(run)
                    self._told(run)
                for load in (USERS[-1], *RATES):
                    before = self._sessions.speed()
                    for name in (*names[turn:], *names[:turn]):
                        server = up[name, load < 1]
                        spec = spec_of(server, payload[name], number, self._seconds)
                        users = load >= 1
                        asked = (
                            replace(spec, pattern=f"users:count={load}", timeout_s=20.0)
                            if users
                            else replace(spec, rate_rps=load * before, slo=SLO)
                        )
                        go_on(server)
                        began = cpu_s(server.processes)
                        result = uvloop.run(measure(asked))
                        spent_s = cpu_between(began, cpu_s(server.processes))
                        self._drained(server)
                        stop(server)
                        found.append(filled(Run(number, "turns", name, load, self._rows(name), 0.0, before), result, spent_s))
                        self._told(found[-1])
                yield found
                number += 1

    def _rows(self, name: str) -> int:
        return self._chosen.get(name, UNTUNED if name in BATCHES else 0)

    def _of_server(self, number: int, part: Part, name: str, rows: int, first: float) -> list[Run]:
        found: list[Run] = []
        with tempfile.TemporaryDirectory() as temporary:
            directory, folder = Path(temporary), Path(temporary, "payload")
            folder.mkdir()
            setting = Setting(rows, promise=part in ("open", "proof"))
            with serving(name, setting, self._environments, directory) as server:
                spec = spec_of(server, payload_of(name, folder), number, self._seconds)
                warm(spec)
                run = Run(number, part, name, 0.0, rows, 0.0)
                if part in ("closed", "tune"):
                    for users in USERS if part == "closed" else (TUNING_USERS,):
                        asked = replace(spec, pattern=f"users:count={users}", timeout_s=20.0)
                        found.append(self._measured(replace(run, load=users), server, asked))
                elif part == "proof":
                    asked = replace(spec, rate_rps=first, slo=SLO, duration_s=120.0)
                    found.append(self._measured(replace(run, load=first), server, asked, until_decided=True))
                else:
                    found += self._searched(run, server, replace(spec, slo=SLO), first)
        return found

    def _searched(self, run: Run, server: Server, spec: LoadSpec, first: float) -> list[Run]:
        tried: list[Run] = []
        while (share := next_share(judged(tried), first)) is not None and len(tried) < MOST_TRIES:
            rate = share * self._speed_beside(server)
            tried.append(self._measured(replace(run, load=rate), server, replace(spec, rate_rps=rate)))
        return tried

    @staticmethod
    def _drained(server: Server) -> None:
        """Wait until what the client gave up is no longer in the server's way: the shortest request is quick again."""
        until = time.monotonic() + 20.0
        while time.monotonic() < until:
            began = time.monotonic()
            if ask(server.name, server.http_port, LENGTHS[0]) and time.monotonic() - began < SLO_MS / 2e3:
                return

    def _speed_beside(self, server: Server) -> float:
        """Of the machine, while a server is stopped: an idle one may use a core and more."""
        stop(server)
        try:
            return self._sessions.speed()
        finally:
            go_on(server)

    def _measured(self, run: Run, server: Server, spec: LoadSpec, *, until_decided: bool = False) -> Run:
        for _ in range(2):  # what was disturbed, once more
            first = self._speed_beside(server)
            before = cpu_s(server.processes)
            result = uvloop.run(measure(spec, until_decided=until_decided, or_lost=until_decided))
            spent_s = cpu_between(before, cpu_s(server.processes))
            self._drained(server)
            last = self._speed_beside(server)
            if result.valid and steady(first, last):
                break
        done = filled(replace(run, speed=(first + last) / 2), result, spent_s)
        done = replace(done, valid=done.valid and steady(first, last))
        self._told(done)
        return done

    def _bare(self, number: int) -> list[Run]:
        found = []
        for sessions, threads, rows in BARE:
            opened = Sessions(sessions, threads, rows)
            for _ in range(MOST_BARE):
                before, rps, after = self._sessions.speed(), opened.speed(self._seconds / 4), self._sessions.speed()
                if steady(before, after):
                    break
            speed = (before + after) / 2
            found.append(Run(number, "bare", "bare", 0.0, rows, rps, speed, shape=f"{sessions} × {threads}"))
            self._told(found[-1])
        return found


def steady(before: float, after: float) -> bool:
    """Whether the machine was as fast before as after."""
    return max(before, after) <= WANDERED * min(before, after)


def filled(run: Run, result: RunResult, spent_s: float) -> Run:
    """The run with what its result says."""
    return replace(
        run,
        rps=result.succeeded_rps,
        p50_ms=result.latency.p50,
        p99_ms=result.latency.p99,
        errors=sum(result.errors.values()),
        goodput_rps=result.goodput_rps,
        cpu_us=spent_s / max(1, result.succeeded + result.warmup_requests) * 1e6,
        kept=result.attainment.estimate if result.attainment else 0.0,
        valid=result.valid,
        shape=result.verdict or "",
    )


def payload_of(name: str, folder: Path) -> Path:
    """A folder with what it is asked, a file for each length."""
    for length in LENGTHS:
        (folder / f"{length:03d}.json").write_bytes(body(name, length))
    return folder


def spec_of(server: Server, payload: Path, number: int, seconds: float) -> LoadSpec:
    """Of a load whose first second does not count."""
    return LoadSpec(
        target=f"http://127.0.0.1:{server.http_port}{path(server.name)}", protocol="invocations", payloads=(str(payload),),
        seed=number + 1, duration_s=seconds + 1.0, warmup_s=1.0, timeout_s=2.0,
    )  # fmt: skip


def warm(spec: LoadSpec) -> None:
    uvloop.run(measure(replace(spec, pattern="users:count=8", duration_s=1.0, warmup_s=0.0, timeout_s=20.0)))


def stop(server: Server) -> None:
    for process in server.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()


def go_on(server: Server) -> None:
    for process in server.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


class Sessions:
    """Sessions without a server, as the gateway opens them. rows: of each batch, which are of one length each."""

    def __init__(self, sessions: int, threads: int, rows: int = 1) -> None:
        model = backends.load("onnxruntime", {"model": str(MODEL), "threads": threads})
        self._opened = [model.open_session(number) for number in range(sessions)]
        self._rows = rows
        self._feeds = []
        for length in LENGTHS:
            ids, mask = np.array([tokens(length)] * rows, np.int64), np.ones((rows, length), np.int64)
            self._feeds.append({"input_ids": ids, "attention_mask": mask})
            for session in self._opened:
                session.run(self._feeds[-1], {})  # warm

    def speed(self, seconds: float = 0.5) -> float:
        """Rows per second of all sessions at once, each of which runs whole turns of all lengths for so long at least."""
        with ThreadPoolExecutor(len(self._opened)) as pool:
            return sum(pool.map(lambda session: self._turns(session, seconds), self._opened))

    def _turns(self, session: Any, seconds: float) -> float:
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for feed in self._feeds:
                session.run(feed, {})
            done += self._rows * len(self._feeds)
        return done / (time.perf_counter() - began)
