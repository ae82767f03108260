"""The answer of `loadtest recommend` as a document: plain values that go to JSON and back, with a published schema.

`schema()` is kept in docs/schemas/recommendation.json. AWS's own names (SageMaker Inference Recommender's
`InferenceRecommendations`) stand beside ours, so that what reads the one reads the other.
"""

import datetime
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from loadtest.costs import (
    HOURS_PER_MONTH,
    autoscaling_invocations_per_minute,
    cost_per_inference,
    cost_per_million,
    requests_per_dollar,
)
from loadtest.errors import ExitCode, UsageError
from loadtest.fleet import Fleet, NoFleet, Offer, cheapest_fleet
from loadtest.ranking import judge
from loadtest.search import Agreed, Measured, Outcome, Question, Standing, Timing, agreement_text, misses
from loadtest.spec import MIN_AGREEMENT, Candidate, Spec

SCHEMA: Final = "loadtest.recommendation/1"
CURVE_POINTS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # of the best peak: rates of the table of fleets

Status = Literal["winner", "runner-up", "finalist", "measured", "predicted", "rejected"]


@dataclass(frozen=True, slots=True)
class PriceReport:
    """usd_per_hour of one instance. basis: ec2 (on demand), spot, sagemaker, or own. flags: estimated, undated, stale (…)."""

    usd_per_hour: float
    basis: str
    source: str
    date: str | None
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgreementReport:
    """How far a candidate's answers agree with the reference's.

    value: the 1st percentile over `inputs` requests, each judged by its worst row; None if they could not be compared, and
    `failure` says why. measured_on: the candidate that was asked: those that compute the same share one figure.
    met: whether it reaches the recommendation's min_agreement; True if none is asked.
    """

    value: float | None
    inputs: int
    statistic: str
    reference: str
    measured_on: str
    met: bool
    failure: str


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """One candidate and everything known of it.

    max_rps: the highest offered rate that passed; 0 if none did. held_rps: the highest at which the SLO held in the sample,
    proven or not; failing_rps: the lowest at which it did not. estimated_rps: the best guess of the peak, by which candidates
    are ranked: the middle of that bracket; what is predicted, if nothing failed. cost_per_million_usd: at max_rps (else
    held_rps), fully used; None if there is no such rate. out: why it was dropped. runs, timings: the evidence. agreement: None
    if nothing was compared.
    """

    name: str
    status: Status
    instance_type: str
    backend: str
    settings: dict[str, Any]
    price: PriceReport
    predicted_rps: float
    max_rps: float
    failing_rps: float | None
    held_rps: float
    estimated_rps: float
    cost_per_million_usd: float | None
    requests_per_dollar: float | None
    p99_ms_at_max: float | None
    out: str
    runs: tuple[Measured, ...]
    timings: tuple[Timing, ...]
    overhead_ms: float
    agreement: AgreementReport | None = None


@dataclass(frozen=True, slots=True)
class EnvironmentParameter:
    Key: str
    ValueType: str
    Value: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """AWS's names and units: USD, invocations per minute, milliseconds, percent. None: not to be seen from here.

    ModelLatency: mean of the server's queue and compute at MaxInvocations; the client's mean, if the server tells nothing.
    """

    CostPerHour: float
    CostPerInference: float
    MaxInvocations: int
    ModelLatency: float
    CpuUtilization: float | None
    MemoryUtilization: float | None


@dataclass(frozen=True, slots=True)
class EndpointConfiguration:
    InstanceType: str
    InitialInstanceCount: int


@dataclass(frozen=True, slots=True)
class ModelConfiguration:
    EnvironmentParameters: tuple[EnvironmentParameter, ...]


@dataclass(frozen=True, slots=True)
class InferenceRecommendation:
    """One entry of what `describe_inference_recommendations_job` answers."""

    RecommendationId: str
    Metrics: Metrics
    EndpointConfiguration: EndpointConfiguration
    ModelConfiguration: ModelConfiguration


@dataclass(frozen=True, slots=True)
class FleetAtRate:
    """The cheapest fleet at one rate: candidate -> instances."""

    rps: float
    counts: dict[str, int]
    usd_per_month: float


@dataclass(frozen=True, slots=True)
class Floor:
    """If nobody meets the SLO: the best there is, at hardly any load."""

    candidate: str
    rps: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The whole document.

    winner, runner_up: names of candidates; None if there is none. proven: the winner's rate passed at 95 % confidence; else it
    only held in the sample. verified: whether it recovered from an overload; None if there was no time to see.
    margin: how much more the runner-up costs, as a share, at estimated peaks. probability_cheapest: that none is cheaper, by
    bootstrap over blocks. flip_usd_per_hour: the winner's price from which the runner-up wins.
    autoscaling_invocations_per_minute: SageMaker's target per instance. fleet: for target_rps. fleets: for other rates.
    answer: the recommendation in words. configuration: the gateway configuration to deploy; empty for a running server.
    generator_limited: candidates that the load generator was too slow to measure.
    min_agreement: what a candidate's answers must reach to win; None: not asked. reference: whose answers they are compared
    with: a candidate's name, or "the expected answers"; "" if nothing was compared.
    """

    created_at: str
    source: str
    model: str
    slo: str
    limit_ms: float
    required_share: float
    target_rps: float | None
    headroom: float
    answer: str
    winner: str | None
    runner_up: str | None
    proven: bool
    verified: bool | None
    margin: float | None
    probability_cheapest: float | None
    flip_usd_per_hour: float | None
    autoscaling_invocations_per_minute: float | None
    fleet: Fleet | None
    fleets: tuple[FleetAtRate, ...]
    candidates: tuple[CandidateReport, ...]
    InferenceRecommendations: tuple[InferenceRecommendation, ...]
    floor: Floor | None
    generator_limited: tuple[str, ...]
    configuration: dict[str, Any]
    launcher: str
    machine: str
    seconds_spent: float
    seconds_budget: float
    usd_spent: float
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    min_agreement: float | None = None
    reference: str = ""
    schema: str = SCHEMA

    @property
    def exit_code(self) -> ExitCode:
        if self.winner is not None and self.proven:
            return ExitCode.MET
        return ExitCode.INVALID if self.winner is None and self.generator_limited else ExitCode.MISSED

    def candidate(self, name: str) -> CandidateReport:
        return next(candidate for candidate in self.candidates if candidate.name == name)


def build(
    spec: Spec, question: Question, outcome: Outcome, *, now: datetime.datetime, machine: str, paid: bool
) -> Recommendation:
    """Put the outcome of a search into a document."""
    today = now.date()
    configured = {candidate.name: candidate for candidate in spec.candidates}
    standings = {standing.entrant.name: standing for standing in outcome.standings}
    reports = [_candidate(configured[name], standing, outcome, question, today) for name, standing in standings.items()]
    verdict = judge(question, outcome, seed=spec.seed)
    winner = standings[outcome.winner] if outcome.winner else None
    ranked = [standing for standing in standings.values() if standing.claimed_rps and not standing.broken]
    offered = [standing for standing in ranked if standing.peak_rps] or ranked  # no fleet is built on less than what is proven
    offers = [
        Offer(s.entrant.name, s.entrant.usd_per_hour, s.claimed_rps, configured[s.entrant.name].max_count) for s in offered
    ]
    notes = list(outcome.notes)
    if winner:
        decisive = next(run for run in reversed(winner.evidence) if run.rps == winner.claimed_rps)
        notes += [f"the run behind {winner.entrant.name}'s rate: {note}" for note in decisive.notes]
    fleet = _fleet(offers, spec.target_rps, question.headroom, notes) if spec.target_rps else None
    limited = tuple(s.entrant.name for s in outcome.standings if s.runs and not s.evidence and not s.runs[-1].valid)
    usd = outcome.usd if paid else 0.0
    floor = outcome.floor
    found = Recommendation(
        created_at=now.isoformat(timespec="seconds"),
        source=spec.source,
        model=spec.model,
        slo=str(spec.slo),
        limit_ms=question.limit_ms,
        required_share=question.required,
        target_rps=spec.target_rps,
        headroom=question.headroom,
        answer="",
        winner=outcome.winner,
        runner_up=outcome.runner_up,
        proven=bool(winner and winner.peak_rps),
        verified=outcome.verified,
        margin=verdict.margin if verdict else None,
        probability_cheapest=verdict.probability_cheapest if verdict else None,
        flip_usd_per_hour=verdict.flip_usd_per_hour if verdict else None,
        autoscaling_invocations_per_minute=autoscaling_invocations_per_minute(winner.claimed_rps) if winner else None,
        fleet=fleet,
        fleets=_fleets(offers, question.headroom),
        candidates=tuple(sorted(reports, key=_order)),
        InferenceRecommendations=tuple(_aws(configured[s.entrant.name], s, fleet) for s in sorted(ranked, key=_aws_order)),
        floor=Floor(floor.entrant, floor.rps, floor.p50_ms, floor.p95_ms, floor.p99_ms) if floor and floor.requests else None,
        generator_limited=limited,
        configuration=configured[outcome.winner].document if outcome.winner else {},
        launcher=spec.launcher.kind,
        machine=machine,
        seconds_spent=outcome.seconds,
        seconds_budget=question.seconds,
        usd_spent=usd,
        warnings=(*_loss(reports, outcome), *spec.warnings, *_price_warnings(reports)),
        notes=tuple(notes),
        min_agreement=question.min_agreement,
        reference=outcome.reference,
    )
    return replace(found, answer=answer(found))


def answer(found: Recommendation) -> str:
    """The recommendation in a few sentences, as the terminal, Markdown and HTML print it."""
    if found.winner is None:
        return _no_answer(found)
    winner = found.candidate(found.winner)
    rate = winner.max_rps or winner.held_rps
    proof = "sustained" if found.proven else "held in the sample, but not proven in the time there was,"
    least = "" if winner.failing_rps else " or more"  # no failing rate was reached
    sentences = [
        f"{winner.name}: {_usd(winner.cost_per_million_usd)} per million requests at {rate:.4g}/s{least} {proof} "
        f"within {found.slo}, at {_usd(winner.price.usd_per_hour)} per hour ({winner.price.basis})."
    ]
    if found.target_rps is not None and found.fleet is not None:
        fleet = " + ".join(f"{count} × {name}" for name, count in found.fleet.counts.items())
        usd_per_month = _usd(found.fleet.usd_per_hour * HOURS_PER_MONTH)
        sentences.append(f"For {found.target_rps:g}/s, loaded to {found.headroom:.0%}: {fleet}, {usd_per_month} a month.")
    if found.runner_up is None:
        sentences.append("No other candidate met the SLO.")
    else:
        margin = found.margin or 0.0
        compared = f"costs {margin:.1%} more" if margin > 0 else "costs the same"
        flip = f"it wins if the winner's hour costs more than {_usd(found.flip_usd_per_hour)}"
        sentences.append(f"Runner-up: {found.runner_up}, which {compared}; {flip}.")
    sentences.append(f"Probability that no candidate is cheaper: {found.probability_cheapest:.0%}.")
    if found.verified is False:
        sentences.append("NOT VERIFIED: after an overload it missed the SLO at 0.8 of this rate.")
    return " ".join(sentences)


def _no_answer(found: Recommendation) -> str:
    if found.generator_limited:
        limited = [candidate for candidate in found.candidates if candidate.name in found.generator_limited]
        why = next((run.notes[0] for candidate in limited for run in candidate.runs if run.notes), "")
        return f"INVALID: the load generator could not measure {', '.join(found.generator_limited)}: {why}."
    if found.floor is None:
        reasons = {candidate.out for candidate in found.candidates if candidate.out}
        return f"No candidate was shown to meet {found.slo}: {'; '.join(sorted(reasons)) or 'the budget ended before'}."
    floor = found.floor
    return (
        f"No candidate meets {found.slo}. The best is {floor.candidate}: p50 {floor.p50_ms:.3g} ms, p95 {floor.p95_ms:.3g} ms, "
        f"p99 {floor.p99_ms:.3g} ms at {floor.rps:.3g}/s, hardly loaded. Allow more than that, or add quicker candidates."
    )


def schema() -> dict[str, Any]:
    """The JSON schema of `to_json`."""
    return msgspec.json.schema(Recommendation)


def to_json(found: Recommendation) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def read(path: Path) -> Recommendation:
    """Raises: UsageError, if the file cannot be read or is no recommendation."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Recommendation)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}: is no result of `loadtest recommend`: {exc}") from exc
    if found.schema != SCHEMA:
        raise UsageError(f"{path}: schema {found.schema!r}, expected {SCHEMA!r}")
    return found


def _candidate(
    candidate: Candidate, standing: Standing, outcome: Outcome, question: Question, today: datetime.date
) -> CandidateReport:
    price = candidate.price
    assert price is not None  # as question_of saw
    rate = standing.claimed_rps
    profiled = outcome.profiles.get(candidate.group)
    at_max = [run for run in standing.evidence if run.rps == rate]
    return CandidateReport(
        name=candidate.name,
        status=_status(standing, outcome),
        instance_type=candidate.instance_type,
        backend=candidate.backend,
        settings=candidate.settings,
        price=PriceReport(
            price.usd_per_hour,
            candidate.basis,
            price.source,
            price.date.isoformat() if price.date else None,
            price.flags(today),
        ),
        predicted_rps=standing.predicted_rps,
        max_rps=standing.peak_rps,
        failing_rps=standing.missed_rps if math.isfinite(standing.missed_rps) else None,
        held_rps=standing.held_rps,
        estimated_rps=standing.estimated_rps,
        cost_per_million_usd=cost_per_million(price.usd_per_hour, rate) if rate else None,
        requests_per_dollar=requests_per_dollar(price.usd_per_hour, rate) if rate else None,
        p99_ms_at_max=at_max[-1].p99_ms if at_max else None,
        out=standing.out,
        runs=tuple(standing.runs),
        timings=profiled.timings if profiled else (),
        overhead_ms=profiled.overhead_ms if profiled else 0.0,
        agreement=_agreement(standing.agreement, outcome.reference, question.min_agreement),
    )


def _agreement(agreed: Agreed | None, reference: str, min_agreement: float | None) -> AgreementReport | None:
    if agreed is None:
        return None
    met = not misses(agreed, min_agreement)
    return AgreementReport(agreed.agreement, agreed.inputs, agreed.statistic, reference, agreed.entrant, met, agreed.failure)


def _loss(reports: list[CandidateReport], outcome: Outcome) -> list[str]:
    """At what loss the winner wins, where it is one that the default would not allow."""
    found = next((report.agreement for report in reports if report.name == outcome.winner), None)
    if found is None or (found.value is not None and found.value >= MIN_AGREEMENT):
        return []
    told = found.failure if found.value is None else f"agree only {agreement_text(found.value)} with those of {found.reference}"
    return [f"the winner's answers {told}; the spec allows it"]


def _status(standing: Standing, outcome: Outcome) -> Status:
    name = standing.entrant.name
    if name == outcome.winner:
        return "winner"
    if name == outcome.runner_up:
        return "runner-up"
    if standing.claimed_rps:
        return "measured" if standing.out else "finalist"
    return "predicted" if standing.predicted_rps and not standing.runs else "rejected"


_ORDER: Final[tuple[Status, ...]] = ("winner", "runner-up", "finalist", "measured", "predicted", "rejected")


def _order(report: CandidateReport) -> tuple[int, float]:
    predicted = report.price.usd_per_hour / report.predicted_rps if report.predicted_rps else math.inf
    return _ORDER.index(report.status), report.cost_per_million_usd or predicted


def _fleet(offers: list[Offer], target_rps: float, headroom: float, notes: list[str]) -> Fleet | None:
    try:
        return cheapest_fleet(offers, target_rps, headroom=headroom)
    except NoFleet as exc:
        notes.append(str(exc))
        return None


def _fleets(offers: list[Offer], headroom: float) -> tuple[FleetAtRate, ...]:
    found = []
    best = max((offer.max_rps for offer in offers), default=0.0)
    for times in CURVE_POINTS if offers else ():
        try:
            fleet = cheapest_fleet(offers, times * best, headroom=headroom)
        except NoFleet:
            break
        found.append(FleetAtRate(times * best, fleet.counts, fleet.usd_per_hour * HOURS_PER_MONTH))
    return tuple(found)


def _aws(candidate: Candidate, standing: Standing, fleet: Fleet | None) -> InferenceRecommendation:
    rate = standing.claimed_rps
    run = next(run for run in reversed(standing.runs) if run.rps == rate)
    settings = tuple(EnvironmentParameter(key, "String", str(value)) for key, value in candidate.settings.items())
    return InferenceRecommendation(
        RecommendationId=candidate.name,
        Metrics=Metrics(
            CostPerHour=candidate.usd_per_hour,
            CostPerInference=cost_per_inference(candidate.usd_per_hour, rate * 60),
            MaxInvocations=int(rate * 60),
            ModelLatency=run.mean_ms if run.queue_ms is None or run.compute_ms is None else run.queue_ms + run.compute_ms,
            CpuUtilization=run.cpu_percent,
            MemoryUtilization=run.memory_percent,
        ),
        EndpointConfiguration=EndpointConfiguration(
            InstanceType=f"ml.{candidate.instance_type.removeprefix('ml.')}" if candidate.instance_type else "",
            InitialInstanceCount=(fleet.counts.get(candidate.name, 1) if fleet else 1),
        ),
        ModelConfiguration=ModelConfiguration(settings),
    )


def _aws_order(standing: Standing) -> float:
    return cost_per_million(standing.entrant.usd_per_hour, standing.claimed_rps)


def _price_warnings(reports: list[CandidateReport]) -> list[str]:
    """One line per instance type and flag."""
    flagged = {(r.instance_type, r.price.basis, r.price.source, r.price.flags) for r in reports if r.price.flags}
    return [
        f"the {basis} price of {name or 'a candidate'} is {', '.join(flags)}: {source}"
        for name, basis, source, flags in sorted(flagged)
    ]


def _usd(amount: float | None) -> str:
    return "unknown" if amount is None else f"${amount:.4g}"
