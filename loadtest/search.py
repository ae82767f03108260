"""Which measurement next: the search of docs/loadtest.md, as a generator that waits for nothing.

It yields one `Command`, is sent the `Event` that answers it, and returns the `Outcome`. It reads no clock and no file and draws
no random number: the same events give the same commands. So a search is tested against a simulated laboratory in no time, and
an interrupted one resumes by being sent its journal.

Stages: profile t(n, k) per group -> predict each candidate -> shortlist -> successive halving on real load -> the peak of two
finalists by bisection on log(rate) -> overload and recovery of the winner. Each spends a share of what is left of the budget,
so that a short budget gives a coarser answer and not none.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadtest.costs import cost_per_million, fleet_usd_per_hour
from loadtest.fleet import HEADROOM
from loadtest.results import Verdict
from loadtest.statistics import falling

SHORTLIST = 5  # candidates that see real load
KEEP_ABOVE = 0.85  # of the best per dollar, as predicted: the prediction is good to 15 %
FINALISTS = 2
ROUND_SECONDS = (20.0, 60.0, 180.0)
ROUND_LEAST_SECONDS = 5.0  # a shorter round costs more in starts than it tells
ROUND_SHARE = 0.35  # of what is left of the budget, for one round, starts included
LOAD_FACTOR = 0.9  # of the estimated capacity, in the rounds
STEP = 1.15  # from a rate that passes (fails) to the next to try above (below), while the other side of the bracket is open
PRECISION = 1.05  # highest failing over highest passing rate at which a peak is known well enough
MOST_PROBES = 10  # per peak
SURE = 0.75  # of an estimated capacity: what should pass in one decisive probe, for where time is short
SHORT = 3  # decisive probes: less time than for so many is short
OVERLOAD, SAFE = 1.5, 0.8  # of the claimed peak
SEARCHING = ("round", "peak")  # runs that seek the peak; what comes after it cannot take it back
LEAST_SECONDS = 4.0  # a shorter run tells nothing
BLOCKS, BLOCK_SLOS, BLOCK_REQUESTS = 20, 10, 200  # a decisive probe: 20 blocks of at least 10 SLOs and 200 requests


@dataclass(frozen=True, slots=True)
class Entrant:
    """What the search must know of a candidate. Entrants of one group share a profile."""

    name: str
    group: str
    usd_per_hour: float
    sessions: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Question:
    """required: share of requests that must meet the SLO. limit_ms: its tightest limit. max_usd: None means no limit."""

    entrants: tuple[Entrant, ...]
    required: float
    limit_ms: float
    seconds: float
    target_rps: float | None = None
    headroom: float = HEADROOM
    max_usd: float | None = None

    def cost(self, entrant: Entrant, max_rps: float) -> float:
        """What is minimised: the fleet's USD per hour at the target rate, else USD per million. Infinite at no rate.

        Fleets come in whole instances, so that many cost the same: the cost per million, a millionth as heavy, breaks the tie.
        """
        if max_rps <= 0:
            return math.inf
        per_million = cost_per_million(entrant.usd_per_hour, max_rps)
        if self.target_rps is None:
            return per_million
        return fleet_usd_per_hour(entrant.usd_per_hour, self.target_rps, max_rps, self.headroom) + 1e-6 * per_million


@dataclass(frozen=True, slots=True)
class Profile:
    """Measure t(rows, concurrency) at these rows and concurrency 1 .. sessions, interleaved, on the group's widest entrant."""

    entrant: str
    group: str
    rows: tuple[int, ...]
    sessions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Predict:
    """Simulate the batcher on the group's profile, slowed down as the entrant's last run was, if it had one."""

    entrant: str


@dataclass(frozen=True, slots=True)
class Load:
    """Offer rps, open loop, for at most `seconds`. until_decided: end as soon as the SLO is decided."""

    entrant: str
    rps: float
    seconds: float
    purpose: Literal["round", "peak", "overload", "recovery", "floor"]
    until_decided: bool = True


Command = Profile | Predict | Load


@dataclass(frozen=True, slots=True)
class Timing:
    """Mean time the model took for `rows` while `concurrency` ran at once. spread: standard deviation of its logarithm."""

    rows: int
    concurrency: int
    ms: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Profiled:
    """overhead_ms: as in `loadtest.profiling.Findings`. failure: why there is no profile: it did not start, …"""

    group: str
    timings: tuple[Timing, ...] = ()
    overhead_ms: float = 0.0
    seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Predicted:
    """rps: the largest rate at which the simulated batcher meets the SLO; 0 if it does at none."""

    entrant: str
    rps: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One load run.

    blocks: (requests, requests that met the SLO) of each stretch of time, warm-up excluded.
    valid: False if the load generator could not keep up; then nothing else counts. failure: the target died or did not start.
    seconds: of the budget, start of the candidate included. batch_rows: rows of a batch -> how many were executed.
    slowdown: how much longer batches took than by the group's profile.
    """

    entrant: str
    purpose: str
    rps: float
    verdict: Verdict
    blocks: tuple[tuple[int, int], ...]
    seconds: float
    valid: bool = True
    failure: str = ""
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    mean_ms: float = 0.0
    goodput_rps: float = 0.0
    error_rate: float = 0.0
    queue_ms: float | None = None
    compute_ms: float | None = None
    overhead_ms: float | None = None
    batch_rows: dict[int, int] = field(default_factory=dict)
    cpu_percent: float | None = None
    memory_percent: float | None = None
    notes: tuple[str, ...] = ()
    slowdown: float = 1.0

    @property
    def requests(self) -> int:
        return sum(requests for requests, _ in self.blocks)

    @property
    def attainment(self) -> float | None:
        """Share that met the SLO; None if nothing was measured."""
        return sum(met for _, met in self.blocks) / self.requests if self.requests else None


Event = Profiled | Predicted | Measured


@dataclass(slots=True, eq=False)
class Standing:
    """What is known of one entrant so far.

    required: share of requests that must meet the SLO. out: why it was dropped, "" while it is in.
    bias: nearest rate in the bracket of the finalist before it, over what was predicted: what one prediction leaves out of
        account, all do.
    """

    entrant: Entrant
    required: float
    predicted_rps: float = 0.0
    bias: float = 1.0
    runs: list[Measured] = field(default_factory=list)
    out: str = ""

    @property
    def evidence(self) -> list[Measured]:
        """Valid runs that say something about the peak. A rate measured again is judged by its last run."""
        telling = (run for run in self.runs if run.purpose in SEARCHING and run.valid and not run.failure and run.requests)
        return list({run.rps: run for run in telling}.values())

    @property
    def broken(self) -> bool:
        """It did not start, or died while its peak was sought."""
        return any(run.failure for run in self.runs if run.purpose in SEARCHING)

    @property
    def failing_rps(self) -> float | None:
        """The lowest rate that fails, or that a full-length probe could not show to pass; None if there is none."""
        stuck = (run.rps for run in self.evidence if run.verdict == "fail" or (run.verdict != "pass" and run.purpose == "peak"))
        return min(stuck, default=None)

    @property
    def peak_rps(self) -> float:
        """The highest rate that passes below the lowest that does not; 0 if there is none."""
        ceiling = self.failing_rps or math.inf
        return max((run.rps for run in self.evidence if run.verdict == "pass" and run.rps < ceiling), default=0.0)

    @property
    def held_rps(self) -> float:
        """The highest rate at which the SLO held in the sample, proven or not; 0 if there is none."""
        return max(self.peak_rps, *(rps for rps in self._shares if rps < self.missed_rps), 0.0)

    @property
    def missed_rps(self) -> float:
        """The lowest rate at which it did not; infinite if there is none."""
        failed = (run.rps for run in self.evidence if run.verdict == "fail")
        return min((*failed, *(rps for rps, share in self._shares.items() if share < self.required)), default=math.inf)

    @property
    def _shares(self) -> dict[float, float]:
        """Rate -> share that met the SLO, made to fall with the rate, as it must: a stall in one short run is not the peak."""
        runs = sorted(self.evidence, key=lambda run: run.rps)
        if not runs:
            return {}
        shares = falling([run.attainment or 0.0 for run in runs], [run.requests for run in runs])
        return {run.rps: float(share) for run, share in zip(runs, shares, strict=True)}

    @property
    def estimated_rps(self) -> float:
        """The best guess of the peak: the middle of its bracket, else what load says, else the prediction."""
        held, missed = self.held_rps, self.missed_rps
        if missed == math.inf:
            return max(self.predicted_rps * self.bias, held)
        if held:
            return math.sqrt(held * missed)
        # A server that sheds serves about its capacity in time; one that collapses says only that the rate was too high.
        return missed * min(0.95, max(0.5, self._shares[missed]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """standings: in the order of the entrants. winner, runner_up: entrants' names. verified: None if there was no time to.

    floor: if nobody meets the SLO, the best that could be had, at hardly any load.
    """

    standings: tuple[Standing, ...]
    profiles: dict[str, Profiled]
    winner: str | None
    runner_up: str | None
    verified: bool | None
    floor: Measured | None
    seconds: float
    usd: float
    notes: tuple[str, ...]


Steps = Generator[Command, Event, None]


def search(question: Question) -> Generator[Command, Event, Outcome]:
    """Run the whole search. Send each event in answer to the command before it."""
    return (yield from _Search(question).run())


def decisive_seconds(limit_ms: float, rps: float) -> float:
    """How long a probe must last before it can pass."""
    return BLOCKS * max(BLOCK_SLOS * limit_ms / 1e3, BLOCK_REQUESTS / rps)


def profile_seconds(question: Question, groups: int) -> float:
    """Of each group's profile: together a seventh of the budget. Beyond 30 s a profile gets no better."""
    return min(30.0, max(2.0, question.seconds / 7 / groups))


def powers_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, … and `most` itself."""
    return tuple(sorted({*(2**n for n in range(most.bit_length())), most}))


class _Search:
    def __init__(self, question: Question) -> None:
        self._question = question
        self._standings = {entrant.name: Standing(entrant, question.required) for entrant in question.entrants}
        self._profiles: dict[str, Profiled] = {}
        self._seconds = 0.0
        self._usd = 0.0
        self._start_s = 0.0  # what the last start took, as far as it is known
        self._up = ""  # the entrant that runs
        self._verified: bool | None = None
        self._floor: Measured | None = None
        self._notes: list[str] = []

    def run(self) -> Generator[Command, Event, Outcome]:
        yield from self._profile()
        for standing in self._in():
            yield from self._predict(standing)
        shortlist = self._shortlist()
        yield from self._halve(shortlist)
        yield from self._peaks(shortlist)
        if ranked := self._ranked():
            yield from self._prove(ranked[0])
            yield from self._verify(self._ranked()[0])
        else:
            yield from self._seek_floor()
        ranked = self._ranked()
        return Outcome(
            standings=tuple(self._standings.values()),
            profiles=self._profiles,
            winner=ranked[0].entrant.name if ranked else None,
            runner_up=ranked[1].entrant.name if len(ranked) > 1 else None,
            verified=self._verified,
            floor=self._floor,
            seconds=self._seconds,
            usd=self._usd,
            notes=tuple(self._notes),
        )

    def _profile(self) -> Steps:
        groups: dict[str, list[Entrant]] = {}
        for entrant in self._question.entrants:
            groups.setdefault(entrant.group, []).append(entrant)
        seconds = profile_seconds(self._question, len(groups))
        for group, entrants in groups.items():
            widest = max(entrants, key=lambda entrant: entrant.sessions)
            rows = powers_up_to(max(entrant.max_rows for entrant in entrants))
            if self._affords(seconds, widest):
                event = yield Profile(widest.name, group, rows, widest.sessions, seconds)
                assert isinstance(event, Profiled)
            else:
                event = Profiled(group, failure="the budget did not reach it")
            self._spend(event.seconds, widest)
            if not event.failure:
                self._start_s, self._up = max(0.0, event.seconds - seconds), widest.name
            self._profiles[group] = event
            for entrant in entrants:
                self._standings[entrant.name].out = event.failure

    def _predict(self, standing: Standing) -> Steps:
        event = yield Predict(standing.entrant.name)
        assert isinstance(event, Predicted)
        self._seconds += event.seconds  # nothing runs meanwhile that would cost money
        standing.predicted_rps = event.rps
        if event.rps <= 0:
            standing.out = "by its profile it misses the SLO even alone"

    def _shortlist(self) -> list[Standing]:
        ranked = sorted(self._in(), key=self._cost)
        for place, standing in enumerate(ranked):
            worth = self._cost(ranked[0]) / self._cost(standing)
            if place < FINALISTS:
                continue  # the runner-up is measured too: else the margin is a guess
            if worth < KEEP_ABOVE:
                standing.out = f"predicted at {worth:.0%} of the best per dollar"
            elif place >= SHORTLIST:
                standing.out = f"predicted as number {place + 1}, of which {SHORTLIST} are tried"
        return [standing for standing in ranked if not standing.out]

    def _halve(self, shortlist: list[Standing]) -> Steps:
        alive = list(shortlist)
        for number, wanted in enumerate(ROUND_SECONDS):
            if len(alive) <= FINALISTS:
                return
            seconds = min(wanted, ROUND_SHARE * self._left_seconds() / len(alive) - self._start_s)
            if seconds < ROUND_LEAST_SECONDS:
                self._notes.append(f"no time for round {number + 1}: finalists were chosen by what was known before it")
                break
            for standing in alive:
                yield from self._load(standing, LOAD_FACTOR * standing.estimated_rps, seconds, "round")
                if not standing.out:
                    yield from self._predict(standing)
            alive = sorted((standing for standing in alive if not standing.out), key=self._cost)
            keep = max(FINALISTS, math.ceil(len(alive) / 2))
            for standing in alive[keep:]:
                standing.out = f"number {alive.index(standing) + 1} of {len(alive)} in round {number + 1}"
            alive = alive[:keep]
        for standing in alive[FINALISTS:]:
            standing.out = "not among the finalists"

    def _peaks(self, shortlist: list[Standing]) -> Steps:
        """Find the peaks of the finalists; where one has none, the next of the shortlist takes its place."""
        untried = sorted(shortlist, key=lambda standing: (bool(standing.out), self._cost(standing)))
        places = FINALISTS
        while untried and places and self._affords(LEAST_SECONDS, untried[0].entrant):
            standing = untried.pop(0)
            if standing.broken:
                continue
            standing.out = ""
            share = 0.85 * self._left_seconds() / min(places, 1 + len(untried))
            yield from self._bisect(standing, until=self._seconds + max(share, LEAST_SECONDS))
            if standing.held_rps:
                places -= 1
                for other in untried:
                    nearest_rps = min(max(standing.predicted_rps, standing.held_rps), standing.missed_rps)
                    other.bias = nearest_rps / standing.predicted_rps
                untried.sort(key=lambda other: (bool(other.out), self._cost(other)))
            elif not standing.out:
                tried = "misses the SLO at every rate that was tried"
                standing.out = tried if standing.evidence else "the budget ended before it was tried"

    def _bisect(self, standing: Standing, until: float) -> Steps:
        # From below: a rate that passes is an answer, even if time ends there; one that fails is none.
        rps = standing.estimated_rps * (1.0 if standing.evidence else LOAD_FACTOR)
        for _ in range(MOST_PROBES):
            if self._left_behind(standing):
                return
            passing, failing = standing.peak_rps, standing.failing_rps
            if passing and failing:
                if failing / passing <= PRECISION:
                    return
                rps = math.sqrt(passing * failing)
            elif passing:
                rps = standing.estimated_rps if passing < standing.estimated_rps / PRECISION else passing * STEP
            elif failing:
                rps = min(standing.estimated_rps, failing / STEP)
            left_s = until - self._seconds
            sure_rps = standing.estimated_rps * SURE
            if not passing and left_s < SHORT * self._decisive_s(rps):
                rps = min(rps, sure_rps)
            elif not passing:
                left_s -= self._decisive_s(sure_rps)  # a rate that is sure to pass must still have its time
            seconds = min(left_s, max(self._decisive_s(rps), min(3 * self._decisive_s(rps), left_s / SHORT)))
            if seconds < LEAST_SECONDS or not self._affords(seconds, standing.entrant):
                return
            yield from self._load(standing, rps, seconds, "peak")
            if standing.out:
                return

    def _left_behind(self, standing: Standing) -> bool:
        """It is measured and clearly dearer than one that is not proven yet, which needs the time."""
        leader = next(iter(self._ranked()), standing)
        return bool(standing.held_rps and not leader.peak_rps and self._cost(leader) < KEEP_ABOVE * self._cost(standing))

    def _prove(self, leader: Standing) -> Steps:
        """One more probe, at a rate that should pass, if none has."""
        if not leader.peak_rps:
            rps = min(SURE * leader.estimated_rps, leader.failing_rps / STEP if leader.failing_rps else leader.held_rps)
            yield from self._load(leader, rps, 3 * self._decisive_s(rps), "peak")

    def _decisive_s(self, rps: float) -> float:
        return decisive_seconds(self._question.limit_ms, rps)

    def _verify(self, winner: Standing) -> Steps:
        peak = winner.peak_rps or winner.held_rps
        seconds = min(60.0, max(LEAST_SECONDS, 0.4 * self._left_seconds()))
        yield from self._load(winner, OVERLOAD * peak, seconds, "overload", until_decided=False)
        yield from self._load(winner, SAFE * peak, seconds, "recovery")
        after = [run for run in winner.runs if run.purpose in ("overload", "recovery")]
        if died := next((run.failure for run in after if run.failure), ""):
            self._verified = False
            self._notes.append(f"under overload {winner.entrant.name} failed: {died}")
        elif after and after[-1].purpose == "recovery" and after[-1].valid:
            self._verified = after[-1].verdict != "fail"
            if not self._verified:
                self._notes.append(f"after an overload {winner.entrant.name} misses the SLO at {SAFE:g} of its claimed peak")

    def _seek_floor(self) -> Steps:
        """Nobody meets the SLO: measure what the quickest can do with hardly any load.

        Unless it was the load generator that failed: then nothing is known of the SLO.
        """
        if any(not run.valid for standing in self._standings.values() for run in standing.runs):
            return
        best: tuple[float, Standing] | None = None
        for standing in self._standings.values():
            profile = self._profiles.get(standing.entrant.group)
            alone = [timing.ms for timing in profile.timings if timing.rows == 1] if profile else []
            if profile and alone and (best is None or min(alone) + profile.overhead_ms < best[0]):
                best = min(alone) + profile.overhead_ms, standing
        if best is None:
            return
        alone_ms, standing = best
        yield from self._load(standing, 100 / alone_ms, 20.0, "floor", until_decided=False)  # a tenth of one session
        self._floor = standing.runs[-1] if standing.runs and standing.runs[-1].purpose == "floor" else None

    def _load(
        self,
        standing: Standing,
        rps: float,
        seconds: float,
        purpose: Literal["round", "peak", "overload", "recovery", "floor"],
        *,
        until_decided: bool = True,
    ) -> Steps:
        """One run; one that was not valid is tried once more. Nothing, if the budget does not allow it."""
        for attempt in range(2):
            start_s = 0.0 if self._up == standing.entrant.name else self._start_s
            seconds = min(seconds, self._left_seconds() - start_s)
            if seconds < LEAST_SECONDS or not self._affords(seconds + start_s, standing.entrant):
                return
            event = yield Load(standing.entrant.name, rps, seconds, purpose, until_decided)
            assert isinstance(event, Measured)
            standing.runs.append(event)
            self._spend(event.seconds, standing.entrant)
            self._up = standing.entrant.name
            searching = purpose in SEARCHING
            if event.failure and searching:
                standing.out = event.failure
            if event.valid or event.failure:
                return
            if attempt and searching:
                standing.out = f"the load generator could not offer {rps:.4g}/s: {'; '.join(event.notes)}"

    def _cost(self, standing: Standing) -> float:
        return self._question.cost(standing.entrant, standing.estimated_rps)

    def _ranked(self) -> list[Standing]:
        """Finalists whose SLO held at some rate, cheapest first at their estimated peaks.

        Not at the rates that passed: those depend on which happened to be tried.
        """
        held = [standing for standing in self._standings.values() if not standing.out and standing.held_rps]
        return sorted(held, key=self._cost)

    def _in(self) -> Sequence[Standing]:
        return [standing for standing in self._standings.values() if not standing.out]

    def _left_seconds(self) -> float:
        return max(0.0, self._question.seconds - self._seconds)

    def _affords(self, seconds: float, entrant: Entrant) -> bool:
        usd = self._usd + seconds / 3600 * entrant.usd_per_hour
        return self._left_seconds() >= seconds and (self._question.max_usd is None or usd <= self._question.max_usd)

    def _spend(self, seconds: float, entrant: Entrant) -> None:
        self._seconds += seconds
        self._usd += seconds / 3600 * entrant.usd_per_hour
