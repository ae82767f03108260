"""Recommendation regret: how much dearer is what `recommend` chooses than the best there is, and in what share of the time?

    python -m benchmarks.recommend simulated --spaces 4
    python -m benchmarks.recommend measured configs/loadtests/minilm-space.yaml --out DIR [--stop-after-minutes N]

`simulated`: random spaces of nine candidates whose true t(rows, concurrency) is known, of three kinds: `cliffs` (from some
batch size on, each row takes twice as long), `noise` (profiles are off by 10 % instead of 5 %, and the machine's speed by 2 %
from one run to the next) and `ties` (three candidates within 1 % of the best). Every run is the gateway's batcher in simulated
time, and time is what the runs would have taken. `recommend` gets a sixth of the exhaustive time. About half a minute of CPU
per space.

`measured`: first every candidate's peak, one after the other (the exhaustive search): bisection by runs of 45 s from the
predicted rate, each judged by whether the SLO held in it; what ends the bracket must miss it twice, as the machine itself may
be slow for a minute. Then `recommend` with a quarter of the time that took. Each candidate is measured once and kept in DIR, so
that the benchmark can be interrupted and called again until it is done; --stop-after-minutes does that by itself.

Regret is the cost of the chosen candidate over that of the best, both at the peaks the exhaustive search found (`simulated`: at
the true ones). Errors of predictions are of both divided by the time of the reference kernel on the candidate's core.
"""

import argparse
import asyncio
import contextlib
import datetime
import math
import sys
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES
from gateway.config import Batching
from loadtest.commands.recommend import machine
from loadtest.lab.driver import run_search
from loadtest.lab.journal import Journal
from loadtest.lab.launchers import launcher_of
from loadtest.lab.recommender import Lab, question_of
from loadtest.measuring.generator import measure
from loadtest.prices.catalogue import load_catalogue
from loadtest.question.candidates import CandidateSetup
from loadtest.question.spec import SearchSpec, read_search_spec
from loadtest.reports import forms
from loadtest.reports.conclusion import build
from loadtest.results import SloSpec
from loadtest.search.budget import BLOCK_REQUESTS, BLOCK_SLOS, BLOCKS
from loadtest.search.events import (
    Entrant,
    Event,
    Experiment,
    Load,
    Measured,
    Predict,
    Predicted,
    Profile,
    Profiled,
    Question,
    Timing,
)
from loadtest.search.next_load import PRECISION, STEP
from loadtest.search.prediction import REQUESTS, ProfiledService, predicted_rps
from loadtest.search.simulator import simulate
from loadtest.search.standing import SearchOutcome
from loadtest.search.strategy import powers_up_to, search
from loadtest.verdict.decision import EARLY_PASS_S, JudgedRequests, judge, lost, overall

START_S = 6.0  # a simulated candidate's start, each time another is wanted
PROFILE_NOISE = 0.05
PROFILE_S = 20.0  # of each candidate, in the exhaustive search
TRIAL_S = 45.0
TRUTH = 15_000  # simulated requests behind each rate of a true peak


@dataclass(frozen=True, slots=True)
class Machine:
    """A simulated candidate: t = fixed + row · rows, slower by `sharing` for each session that runs beside it.

    cliff_rows: from there on a row takes twice as long. wander: standard deviation of log(speed) from run to run.
    """

    fixed_ms: float
    row_ms: float
    sharing: float
    sessions: int
    spread: float
    cliff_rows: int = 64
    wander: float = 0.0

    def timings(self, slower: float = 1.0) -> tuple[Timing, ...]:
        return tuple(
            Timing(rows, busy, slower * self._ms(rows) * (1 + self.sharing * (busy - 1)), self.spread)
            for busy in range(1, self.sessions + 1)
            for rows in (1, 2, 4, 8, 16, 32)
        )

    def _ms(self, rows: int) -> float:
        return self.fixed_ms + self.row_ms * (rows + max(0, rows - self.cliff_rows))


class SimulatedServers:
    """Answers a search with the real batcher on machines whose times are known."""

    def __init__(self, question: Question, machines: dict[str, Machine], slo: SloSpec, seed: int) -> None:
        self._question = question
        self._machines = machines
        self._slo = slo
        self._random = np.random.default_rng(seed)
        self._running = ""
        self._profiles: dict[str, Profiled] = {}

    def answer(self, experiment: Experiment) -> Event:
        machine = self._machines[experiment.entrant]
        entrant = next(e for e in self._question.entrants if e.name == experiment.entrant)
        if isinstance(experiment, Predict):
            return Predicted(experiment.entrant, _capacity(self._profiles[entrant.group].timings, self._slo, machine.sessions))
        start_s = 0.0 if self._running == experiment.entrant else START_S
        self._running = experiment.entrant
        if isinstance(experiment, Load):
            return self._load(experiment, machine, start_s)
        exact = machine.timings(self._slower(machine))
        noise = np.exp(self._random.normal(0, 2 * PROFILE_NOISE if machine.wander else PROFILE_NOISE, len(exact)))
        noisy = tuple(replace(t, ms=t.ms * float(factor)) for t, factor in zip(exact, noise, strict=True))
        self._profiles[experiment.group] = Profiled(experiment.group, noisy, 0.0, start_s + experiment.seconds, start_s=start_s)
        return self._profiles[experiment.group]

    def _slower(self, machine: Machine) -> float:
        return math.exp(self._random.normal(0, machine.wander)) if machine.wander else 1.0

    def _load(self, load: Load, machine: Machine, start_s: float) -> Measured:
        limit_ms = self._question.limit_ms
        block_s = min(max(BLOCK_SLOS * limit_ms / 1e3, BLOCK_REQUESTS / load.rps), load.seconds / (BLOCKS + 1))
        arrivals = np.cumsum(self._random.exponential(1e9 / load.rps, max(2, int(load.rps * load.seconds)))).astype(np.int64)
        batcher = Batcher(POLICIES["adaptive"](Batching()), max_rows=32, workers=machine.sessions, max_queue_rows=4096,
                          slo_ns=round(limit_ms * 1e6))  # fmt: skip
        service = ProfiledService(machine.timings(self._slower(machine)), 32, seed=int(self._random.integers(1 << 30)))
        outcome = simulate(batcher, arrivals, service, workers=machine.sessions)
        failed = outcome.latencies_ns < 0
        elapsed_ns = np.where(failed, round(limit_ms * 1e6), outcome.latencies_ns)
        late = failed | (elapsed_ns > limit_ms * 1e6)
        block = (arrivals / (block_s * 1e9)).astype(int)
        blocks = int(load.seconds / block_s)
        look = min(blocks, BLOCKS)
        while True:  # as the generator does: a look after 20 blocks and after each 30 % more; the first block is warm-up
            some = (block >= 1) & (block <= look)
            requests = JudgedRequests(elapsed_ns[some], elapsed_ns[some], failed[some], block[some] - 1)
            final = look >= blocks  # early looks are paid for (Bonferroni)
            found = overall(judge(self._slo, requests, confidence=1 - 0.05 / (1 if final else 10)))
            given_up = load.purpose == "peak" and lost(self._slo, requests, look / blocks)
            early = found == "pass" and look * block_s < EARLY_PASS_S
            if final or (load.until_decided and (given_up or (found != "undecided" and not early))):
                break
            look = min(blocks, math.ceil(look * 1.3))
        seen = tuple(
            (int((block == n).sum()), int((~late[block == n]).sum())) for n in range(1, look + 1) if (block == n).any()
        )
        seconds = start_s + block_s * (1 + look)
        return Measured(load.entrant, load.purpose, load.rps, found, seen, seconds, p99_ms=outcome.percentile_ms(99),
                        start_s=start_s)  # fmt: skip


def _capacity(timings: tuple[Timing, ...], slo: SloSpec, sessions: int, requests: int = REQUESTS) -> float:
    return predicted_rps(
        timings, overhead_ms=0.0, slo=slo, batching=Batching(), sessions=sessions, max_rows=32, requests=requests
    )


def run_simulated(question: Question, servers: SimulatedServers) -> SearchOutcome:
    steps = search(question)
    experiment = next(steps)
    while True:
        try:
            experiment = steps.send(servers.answer(experiment))
        except StopIteration as stop:
            outcome: SearchOutcome = stop.value
            return outcome


KINDS = ("cliffs", "noise", "ties")


def space(kind: str, seed: int, slo: SloSpec) -> tuple[dict[str, Machine], list[Entrant], dict[str, float]]:
    """Nine candidates of one of KINDS: machines, entrants, and true peaks."""
    draw = np.random.default_rng([seed, KINDS.index(kind)])
    machines, entrants = {}, []
    scale = math.exp(draw.uniform(math.log(0.1), 0))  # from models of a millisecond to such as fill much of the SLO alone
    for group in range(3):
        fixed_ms, row_ms, sharing = scale * draw.uniform(4, 20), scale * draw.uniform(4, 15), draw.uniform(0.3, 1.0)
        cliff_rows = int(draw.choice([2, 3, 4, 6])) if kind == "cliffs" else 64
        for sessions in (1, 2, 4):
            name = f"g{group} k{sessions}"
            machines[name] = Machine(fixed_ms, row_ms, sharing, sessions, 0.1, cliff_rows, 0.02 if kind == "noise" else 0.0)
            entrants.append(Entrant(name, f"g{group}", float(draw.uniform(0.08, 0.3)), sessions, 32))
    peaks = {name: _capacity(machine.timings(), slo, machine.sessions, TRUTH) for name, machine in machines.items()}
    if kind == "ties":
        best = min(entrant.usd_per_hour / peaks[entrant.name] for entrant in entrants)
        for index, share in ((1, 1.0), (4, 1.005), (7, 1.01)):
            entrants[index] = replace(entrants[index], usd_per_hour=0.95 * best * share * peaks[entrants[index].name])
    return machines, entrants, peaks


def simulated(spaces: int) -> int:
    slo = SloSpec.parse("p99<100ms")
    regrets, shares, claims, proven = [], [], [], 0
    for kind, seed in ((kind, seed) for kind in KINDS for seed in range(spaces)):
        machines, entrants, peaks = space(kind, seed, slo)
        exhaustive_s = 0.0
        for entrant in entrants:
            alone = SimulatedServers(Question((entrant,), 0.99, 100, math.inf), machines, slo, seed)
            profile = Profile(entrant.name, entrant.group, powers_up_to(32), entrant.sessions, PROFILE_S)
            exhaustive_s += alone.answer(profile).seconds
            predicted = alone.answer(Predict(entrant.name))
            assert isinstance(predicted, Predicted)
            steps = bisection(predicted.rps, 0.99)
            rps = next(steps)
            with contextlib.suppress(StopIteration):
                while True:
                    run = alone.answer(Load(entrant.name, rps, TRIAL_S, "peak", until_decided=False))
                    assert isinstance(run, Measured)
                    exhaustive_s += run.seconds
                    rps = steps.send(run.attainment or 0.0)
        question = Question(tuple(entrants), 0.99, 100, exhaustive_s / 6)
        outcome = run_simulated(question, SimulatedServers(question, machines, slo, seed))
        costs = {entrant.name: question.cost(entrant, peaks[entrant.name]) for entrant in entrants}
        regrets.append(costs[outcome.winner] / min(costs.values()) - 1 if outcome.winner else math.inf)
        shares.append(outcome.seconds / exhaustive_s)
        winner = next((s for s in outcome.standings if s.entrant.name == outcome.winner), None)
        proven += bool(winner and winner.peak_rps)
        claims.append(winner.claimed_rps / peaks[winner.entrant.name] if winner else 0.0)
        print(f"{kind} {seed}: regret {regrets[-1]:.1%}, claims {claims[-1]:.0%} of the true peak"
              f"{'' if winner and winner.peak_rps else ', not proven'}; {outcome.seconds:.0f} s of {exhaustive_s:.0f} s",
              flush=True)  # fmt: skip
    good = sum(claim >= 0.85 for claim in claims)
    print(f"{len(regrets)} spaces of 9 candidates: worst regret {max(regrets):.1%}, median {np.median(regrets):.1%}; "
          f"proven {proven}, at 0.85 of the true peak or more {good}; "
          f"{np.mean(shares):.0%} of the exhaustive time on average")  # fmt: skip
    return 0 if max(regrets) <= 0.03 and min(proven, good) >= 0.9 * len(regrets) else 1


def bisection(rps: float, required: float) -> Generator[float, float, tuple[float, float]]:
    """Rates to try, from `rps` on; is sent the attainment at each; returns the highest that held and the lowest that missed."""
    held_rps, missed_rps = 0.0, math.inf
    misses: Counter[float] = Counter()
    while misses[missed_rps] < 2:
        attainment = yield rps
        if attainment >= required:
            held_rps, missed_rps = rps, math.inf if rps == missed_rps else missed_rps
        else:
            missed_rps = rps
            misses[rps] += 1
        if missed_rps == math.inf:
            rps = STEP * held_rps
        elif missed_rps > PRECISION * held_rps:
            rps = math.sqrt(max(held_rps, missed_rps / STEP**2) * missed_rps)
        else:
            rps = missed_rps  # once more: the machine itself may have been slow then
    return held_rps, missed_rps


@dataclass(frozen=True, slots=True)
class Peak:
    """Of one candidate, found by itself. held_rps, missed_rps: its bracket.

    speed: of its core while it was predicted, over that in the runs that ended the bracket, by the reference kernel.
    """

    predicted_rps: float
    held_rps: float
    missed_rps: float
    seconds: float
    speed: float

    @property
    def rps(self) -> float:
        return math.sqrt(self.held_rps * self.missed_rps)


async def _peak(spec: SearchSpec, candidate: CandidateSetup) -> Peak:
    """Raises: RuntimeError, if the candidate or the load generator fails."""
    began = time.monotonic()
    required = question_of(spec, paid=False).required
    lab = Lab(spec, launcher_of(spec, load_catalogue()), measure)

    async def asked(experiment: Experiment) -> Event:
        event = await lab.answer(experiment)
        if (isinstance(event, Profiled | Measured) and event.failure) or (isinstance(event, Measured) and not event.valid):
            raise RuntimeError(f"{candidate.name}: {event}")
        return event

    try:
        sizes = powers_up_to(candidate.max_rows)
        profiled = await asked(Profile(candidate.name, candidate.group, sizes, candidate.sessions, PROFILE_S))
        predicted = await asked(Predict(candidate.name))
        assert isinstance(profiled, Profiled)
        assert isinstance(predicted, Predicted)
        steps = bisection(predicted.rps, required)
        rps, took_ms = next(steps), {}
        while True:
            run = await asked(Load(candidate.name, rps, TRIAL_S, "peak", until_decided=False))
            assert isinstance(run, Measured)
            took_ms[rps] = run.reference_ms
            print(f"  {rps:.4g}/s: {run.attainment:.2%} within the SLO, p99 {run.p99_ms:.0f} ms", flush=True)
            try:
                rps = steps.send(run.share(required))
            except StopIteration as stop:
                held_rps, missed_rps = stop.value
                speed = (took_ms[held_rps] + took_ms[missed_rps]) / 2 / profiled.reference_ms
                return Peak(predicted.rps, held_rps, missed_rps, time.monotonic() - began, speed)
    finally:
        await lab.close()


async def _recommended(spec: SearchSpec, folder: Path) -> SearchOutcome:
    question = question_of(spec, paid=False)
    lab = Lab(spec, launcher_of(spec, load_catalogue()), measure, runs=folder / "runs")
    journal = Journal(folder / "journal.jsonl", question)
    try:
        return await run_search(question, lab, journal)
    finally:
        journal.close()


def _keep(path: Path, peaks: dict[str, Peak]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(peaks))


async def measured(path: Path, folder: Path, stop_after_s: float) -> int:
    began = time.monotonic()
    spec = read_search_spec(path, load_catalogue())
    known = folder / "exhaustive.json"
    peaks = msgspec.json.decode(known.read_bytes(), type=dict[str, Peak]) if known.exists() else {}
    for candidate in spec.candidates:
        if candidate.name in peaks:
            continue
        if time.monotonic() - began > stop_after_s:
            print(f"stopped: {len(peaks)} of {len(spec.candidates)} candidates measured; call again")
            return 0
        peak = peaks[candidate.name] = await _peak(spec, candidate)
        _keep(known, peaks)
        error = peak.predicted_rps / peak.speed / peak.rps - 1
        print(f"{candidate.name}: {peak.rps:.4g}/s, predicted {peak.predicted_rps:.4g}/s ({error:+.0%})", flush=True)
    exhaustive_s = sum(peak.seconds for peak in peaks.values())
    if time.monotonic() - began > stop_after_s:
        print("stopped: the exhaustive search is done; call again for the recommendation")
        return 0
    quarter = replace(spec, budget=spec.budget.model_copy(update={"minutes": exhaustive_s / 4 / 60}))
    question = question_of(quarter, paid=False)
    outcome = await _recommended(quarter, folder / "recommend")
    now = datetime.datetime.now(datetime.UTC)
    found = build(quarter, question, outcome, now=now, machine=machine(), paid=False)
    forms.write_all(found, folder / "recommend")
    costs = {e.name: question.cost(e, peaks[e.name].rps) for e in question.entrants}
    best = min(costs, key=lambda name: costs[name])
    regret = costs[outcome.winner] / costs[best] - 1 if outcome.winner else math.inf
    print(f"best {best}; recommended {outcome.winner}: regret {regret:.1%}")
    print(f"{outcome.seconds:.0f} s of {exhaustive_s:.0f} s: {outcome.seconds / exhaustive_s:.0%} of the exhaustive time")
    for standing in outcome.standings:
        name = standing.entrant.name
        error = standing.predicted_rps / peaks[name].rps - 1
        rates = f"passed {standing.peak_rps:.4g}, held {standing.held_rps:.4g}, missed {standing.missed_rps:.4g}"
        print(f"{name}: predicted {standing.predicted_rps:.4g}/s ({error:+.0%}), {rates} {standing.out}")
    return 0 if regret <= 0.03 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("simulated").add_argument("--spaces", type=int, default=4, help="of each kind")
    real = modes.add_parser("measured")
    real.add_argument("spec", type=Path)
    real.add_argument("--out", type=Path, required=True)
    real.add_argument("--stop-after-minutes", type=float, default=math.inf)
    arguments = parser.parse_args()
    if arguments.mode == "simulated":
        return simulated(arguments.spaces)
    return asyncio.run(measured(arguments.spec, arguments.out, arguments.stop_after_minutes * 60))


if __name__ == "__main__":
    sys.exit(main())
