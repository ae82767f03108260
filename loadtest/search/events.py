"""What a search asks and what it is answered: experiments and events, as plain values that go to the journal and back."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from loadtest.prices.costs import cost_per_million, fleet_usd_per_hour, replicas_for
from loadtest.prices.fleet import HEADROOM, Fleet, FleetOption, NoFleet, cheapest_fleet
from loadtest.results import Verdict
from loadtest.wording import counted, failures

Purpose = Literal["round", "peak", "overload", "recovery", "floor"]

SEARCHING: Final = ("round", "peak")  # runs that seek the peak; what comes after it cannot take it back
_TOO_FEW: Final = 1e6  # times its price a fleet costs that cannot be had: dearer than any other, and still in order
EXPECTED: Final = "the expected answers"  # the reference, where the requests bring them along
NOT_STARTED: Final = "did not start"  # how failures begin of what was never up
UNREACHED: Final = "the budget did not reach it"  # how it ends why nothing is known of who was left out for time or money
UNAFFORDABLE: Final = "its start could exceed --max-usd"  # how it begins why the money did not pay for a start
CUT_OFF: Final = "did not answer before the"  # how failures begin of what the end of time or money cut off
INCOMPARABLE: Final = "cannot be compared"  # how failures begin that are of the answers, and so of all that compute the same
NO_REFERENCE: Final = f"{INCOMPARABLE}: the reference"  # and those that tell of the reference alone


@dataclass(frozen=True, slots=True)
class Entrant:
    """What the search must know of a candidate.

    Entrants of one group share a profile; those of one numerics ("": none but itself) compute the same, and share an agreement.
    A pool is of one instance type.
    max_count: the most instances that can be had, of all entrants of one pool ("": none but itself) together; None: any number.
    """

    name: str
    group: str
    usd_per_hour: float
    sessions: int
    max_rows: int
    numerics: str = ""
    max_count: int | None = None
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """required: share of requests that must meet the SLO's strictest objective. limit_ms: its limit. longest_ms: the longest of
    all, where that is another: by it runs are cut into blocks. max_usd: None means no limit.

    reference: the entrant whose answers the others' must agree with, or EXPECTED; "" if nothing is compared.
    stand_ins: entrants that take its place, in this order, where it cannot be asked.
    min_agreement: what an entrant must reach to be measured any further; None: agreement is reported, but never required.
    parallel: how many entrants may be up at once. start_s: what a start of a paid one usually takes, until one was seen.
    beside_usd_per_hour: what is paid while any is up, such as a load generator.
    subject: a digest of what else a measured rate depends on: payload, model, configurations, all objectives.
    """

    entrants: tuple[Entrant, ...]
    required: float
    limit_ms: float
    seconds: float
    target_rps: float | None = None
    headroom: float = HEADROOM
    max_usd: float | None = None
    min_agreement: float | None = None
    reference: str = ""
    stand_ins: tuple[str, ...] = ()
    parallel: int = 1
    start_s: float = 0.0
    beside_usd_per_hour: float = 0.0
    longest_ms: float = 0.0
    subject: str = ""

    def usd(self, entrant: Entrant, max_rps: float) -> float:
        """What it costs: the fleet's USD per hour at the target rate, else USD per million. Infinite at no rate.

        A fleet that needs more instances than can be had costs _TOO_FEW times its price.
        """
        if max_rps <= 0:
            return math.inf
        if self.target_rps is None:
            return cost_per_million(entrant.usd_per_hour, max_rps)
        fleet = fleet_usd_per_hour(entrant.usd_per_hour, self.target_rps, max_rps, self.headroom)
        fleet = float(f"{fleet:.12g}")  # 3 of 0.1 cost as much as one of 0.3
        return fleet if self.suffices(entrant, max_rps) else _TOO_FEW * fleet

    def cost(self, entrant: Entrant, max_rps: float) -> float:
        """What is minimised. Fleets come in whole instances, so that many cost the same: the cost per million, a millionth as
        heavy, breaks the tie.
        """
        usd = self.usd(entrant, max_rps)
        if self.target_rps is None or max_rps <= 0:
            return usd
        return usd + 1e-6 * cost_per_million(entrant.usd_per_hour, max_rps)

    def suffices(self, entrant: Entrant, max_rps: float) -> bool:
        """Whether as many of it as can be had carry the target rate alone; so they do where none is set."""
        if self.target_rps is None or entrant.max_count is None or max_rps <= 0:
            return max_rps > 0
        return replicas_for(self.target_rps, max_rps, self.headroom) <= entrant.max_count

    def carries(self, rates: Iterable[tuple[Entrant, float]]) -> bool:
        """Whether all of these together do, each at its rate."""
        return self.carried_rps(rates) >= (self.target_rps or 0.0) * (1 - 1e-9)

    def carried_rps(self, rates: Iterable[tuple[Entrant, float]]) -> float:
        """What as many as can be had carry, with headroom, each pool as the fastest of it; infinite where any number can be."""
        pools: dict[str, float] = {}
        for entrant, rps in rates:
            if rps > 0:
                pool = entrant.pool or entrant.name
                pools[pool] = max(pools.get(pool, 0.0), rps * self.headroom * (entrant.max_count or math.inf))
        return sum(pools.values())

    def fleet(self, rates: Iterable[tuple[Entrant, float]]) -> Fleet | None:
        """The cheapest that carries the target rate, mixes included; None if there is none, or no such rate."""
        options = [FleetOption(each.name, each.usd_per_hour, rps, each.max_count, each.pool) for each, rps in rates if rps > 0]
        if self.target_rps is None or not options:
            return None
        try:
            return cheapest_fleet(options, self.target_rps, headroom=self.headroom)
        except NoFleet:
            return None


@dataclass(frozen=True, slots=True)
class Agree:
    """Compare the entrant's answers with the reference's (with its own second ones, if it is the reference itself)."""

    entrant: str
    reference: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Measure t(rows, concurrency) at these rows and concurrency 1 .. sessions, interleaved, on one entrant of the group."""

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
    purpose: Purpose
    until_decided: bool = True


Experiment = Agree | Profile | Predict | Load


@dataclass(frozen=True, slots=True)
class Volley:
    """Experiments on different entrants that may be done at the same time, the most wanted first.

    Answered by their events, in the order in which they ended.
    """

    experiments: tuple[Agree | Profile | Load, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Mean time the model took for `rows` while `concurrency` ran at once. spread: standard deviation of its logarithm."""

    rows: int
    concurrency: int
    ms: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Agreed:
    """How far an entrant's answers agree with the reference's. reference: who that was; "" in older journals.

    agreement: the 1st percentile over `inputs` requests, each judged by its worst row; None if they could not be compared.
    statistic: in words, which one. failure: why nothing was compared: it did not start, outputs differ in shape, …
    short_s: how long it had, where that was too short; else 0.
    overlap_s: of `seconds`, what another event's hold already. beside_usd: what was paid since the event before, beyond this
    entrant's own `seconds`: others that were up, or were removed; below 0, if less was paid than those cost.
    """

    entrant: str
    agreement: float | None = None
    inputs: int = 0
    statistic: str = ""
    seconds: float = 0.0
    failure: str = ""
    overlap_s: float = 0.0
    beside_usd: float = 0.0
    reference: str = ""
    short_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Profiled:
    """overhead_ms, saturated_rps: as in `loadtest.lab.profiling.Findings`. failure: why there is no profile: it did not start,
    …

    entrant: whom it was measured on; "" in older journals: the widest of the group.
    reference_ms: what the reference kernel took on the candidate's core, before and after; 0 if it was not timed.
    start_s: of `seconds`, what its start took; 0 if it was up. disturbed: other work had much of its cores.
    overlap_s, beside_usd: as in `Agreed`.
    """

    group: str
    timings: tuple[Timing, ...] = ()
    overhead_ms: float = 0.0
    seconds: float = 0.0
    failure: str = ""
    saturated_rps: float | None = None
    reference_ms: float = 0.0
    start_s: float = 0.0
    disturbed: bool = False
    overlap_s: float = 0.0
    beside_usd: float = 0.0
    entrant: str = ""

    def beside(self, before: "Profiled | None") -> "Profiled":
        """With what the one before told of their group: it may be of more rows, or of more sessions."""
        if before is None:
            return self
        timings = {(timing.rows, timing.concurrency): timing for timing in (*before.timings, *self.timings)}
        saturated_rps = max(before.saturated_rps or 0.0, self.saturated_rps or 0.0) or None
        both = replace(self, timings=tuple(timings[size] for size in sorted(timings)), saturated_rps=saturated_rps)
        return replace(both, disturbed=self.disturbed or before.disturbed)


@dataclass(frozen=True, slots=True)
class Predicted:
    """rps: the largest rate at which the simulated batcher meets the SLO; 0 if it does at none. why: of a 0, in words.

    ceiling_rps: more than this the load generator cannot offer; None: it is far away. disturbed: a 0 says nothing, as other
    work had much of the cores in the profile.
    """

    entrant: str
    rps: float
    seconds: float = 0.0
    why: str = ""
    ceiling_rps: float | None = None
    disturbed: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """One load run.

    blocks: (requests, requests that met the SLO) of each stretch of time, warm-up excluded.
    valid: False if the load generator could not keep up, or other work on the machine decided; then nothing else counts.
    disturbed: it was other work. failure: the target died or did not start.
    seconds: of the budget, start of the candidate included. batch_rows: rows of a batch -> how many were executed.
    slowdown: how much longer batches took than by the group's profile. p99_low_ms, p99_high_ms: 95 % interval; 0: not known.
    reference_ms, start_s: as in `Profiled`. overlap_s, beside_usd: as in `Agreed`.
    endpoint, began_at: what the platform calls the candidate, and when it was loaded (ISO 8601), to ask it for its figures:
    model_latency_ms, overhead_latency_ms are its means; None: it has none.
    overrun: of several objectives, the one that was kept worst: its misses over those that it allows; None: there is but one.
    errors, error_samples: of requests that failed, as in a run's result. Latencies are of those that succeeded; 0: none did.
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
    p99_low_ms: float = 0.0
    p99_high_ms: float = 0.0
    disturbed: bool = False
    reference_ms: float = 0.0
    start_s: float = 0.0
    overlap_s: float = 0.0
    beside_usd: float = 0.0
    endpoint: str = ""
    began_at: str = ""
    model_latency_ms: float | None = None
    overhead_latency_ms: float | None = None
    overrun: float | None = None
    errors: dict[str, int] = field(default_factory=dict)
    error_samples: dict[str, str] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(requests for requests, _ in self.blocks)

    @property
    def attainment(self) -> float | None:
        """Share that met the SLO; None if nothing was measured."""
        return sum(met for _, met in self.blocks) / self.requests if self.requests else None

    @property
    def unanswered(self) -> str:
        """What became of the requests, in words, where none succeeded; else ""."""
        if self.p99_ms or not self.requests:
            return ""
        failed = sum(self.errors.values())
        if failed:
            return f"{failed:,} of {self.requests:,} failed: {failures(self.errors, self.error_samples)}"
        # Older journals have the rate alone.
        return f"none of {counted(self.requests, 'request')} {'succeeded' if self.error_rate else 'was answered'}"

    def share(self, required: float) -> float:
        """What to compare with `required`: the share that met the SLO, or would, were its worst kept objective such a one.

        0 if nothing was measured.
        """
        return (self.attainment or 0.0) if self.overrun is None else max(0.0, 1 - self.overrun * (1 - required))


@dataclass(frozen=True, slots=True)
class TakenBack:
    """An experiment that came to nothing, as the entrant's machine was taken back meanwhile: it is no evidence, and may be
    asked for again. why: in words. seconds, overlap_s, beside_usd: as in `Measured`.
    """

    entrant: str
    why: str
    seconds: float = 0.0
    overlap_s: float = 0.0
    beside_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Paid:
    """What was paid when no event followed that could say so: for what was removed at the end, or when the search was ended."""

    usd: float


def cut_off(event: "Event") -> bool:
    """Whether time or money ended before it did: it costs what it took, and is no evidence."""
    if isinstance(event, Predicted | TakenBack):
        return False
    failure = event.failure  # older journals have an unpaid start, or a short comparison, without UNREACHED at its end
    older = f"{NOT_STARTED}: {UNAFFORDABLE}" in failure or "requests in the time there was" in failure
    return older or failure.startswith(CUT_OFF) or failure.endswith(UNREACHED)


def of_one(event: Agreed) -> bool:
    """Whether it tells of its entrant alone: the server failed, and another of the same numerics may not."""
    return bool(event.failure) and not (cut_off(event) or event.failure.startswith(INCOMPARABLE))


Event = Agreed | Profiled | Predicted | Measured | TakenBack
Entry = Event | Paid
"""What a journal holds."""


class Spent:
    """What measuring has cost so far: seconds, and USD if the candidates were paid for."""

    def __init__(self, question: Question) -> None:
        self.seconds = 0.0
        self.usd = 0.0
        self._prices = {entrant.name: entrant.usd_per_hour for entrant in question.entrants}
        by_sessions = sorted(question.entrants, key=lambda entrant: entrant.sessions)
        self._widest = {entrant.group: entrant.name for entrant in by_sessions}

    def add(self, event: Entry) -> None:
        if isinstance(event, Paid):
            self.usd += event.usd
            return
        self.seconds += event.seconds
        if not isinstance(event, Predicted):  # then nothing runs that would cost money
            self.seconds -= event.overlap_s
            self.usd += self.own_usd(event) + event.beside_usd

    def own_usd(self, event: Agreed | Profiled | Measured | TakenBack) -> float:
        """What the event's entrant costs in its seconds."""
        name = self._widest[event.group] if isinstance(event, Profiled) and not event.entrant else event.entrant
        return event.seconds / 3600 * self._prices[name]
