"""The answer of `loadtest recommend` as a document: plain values that go to JSON and back, with a published schema.

`schema()` is kept in docs/schemas/recommendation.json. AWS's own names (SageMaker Inference Recommender's
`InferenceRecommendations`) stand beside ours, so that what reads the one reads the other.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from loadtest.errors import ExitCode, UsageError
from loadtest.prices.fleet import Fleet
from loadtest.question.spec import RefusedCandidate
from loadtest.reports.states import SIGNALS, RecommendationState
from loadtest.results import schema_of
from loadtest.search.curves import Cliff, CurvePoint, FrontPoint
from loadtest.search.events import Measured, Timing

SCHEMA: Final = "loadtest.recommendation/1"

Status = Literal[
    "winner",
    "cheapest alone",
    "in the fleet",
    "runner-up",
    "finalist",
    "measured",
    "undecided",
    "not measurable",
    "predicted",
    "not reached",
    "rejected",
]


@dataclass(frozen=True, slots=True)
class PriceReport:
    """usd_per_hour of one instance. basis: ec2 (on demand), spot, sagemaker, or own. flags: estimated, undated, n days old."""

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

    status: where a mix is the answer, who is in it, and who is the cheapest alone; else who wins.
    letter: what it is called wherever the legend is near, in order of rank: A is the winner. differs: what tells it from the
    others: instance type, backend, settings.

    max_rps: the highest offered rate that passed; 0 if none did. held_rps: the highest at which the SLO held in the sample,
    proven or not; failing_rps: the lowest at which it did not. estimated_rps: the best guess of the peak, by which candidates
    are ranked: the middle of that bracket; what is predicted, if nothing failed. cost_per_million_usd: at max_rps (else
    held_rps), fully used; None if there is no such rate. out: why it was dropped. runs, timings: the evidence. agreement: None
    if nothing was compared. curve: its valid runs, rate ascending. cliff: where p99 jumps; None if it was not seen to.
    max_count: the most instances that can be had; None: any number.
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
    letter: str = ""
    differs: str = ""
    curve: tuple[CurvePoint, ...] = ()
    cliff: Cliff | None = None
    max_count: int | None = None

    @property
    def claimed_rps(self) -> float:
        """The one rate at which it is spoken of: what was proven, else what held in the sample; 0 if there is none."""
        return self.max_rps or self.held_rps


@dataclass(frozen=True, slots=True)
class EnvironmentParameter:
    Key: str
    ValueType: str
    Value: str


@dataclass(frozen=True, slots=True)
class RecommendationMetrics:
    """AWS's names and units: USD, invocations per minute, milliseconds, percent. None: not to be seen from here.

    ModelLatency: SageMaker's own mean at MaxInvocations; elsewhere the server's queue and compute, or the client's mean, if the
    server tells nothing.
    """

    CostPerHour: float
    CostPerInference: float
    MaxInvocations: int
    ModelLatency: float
    CpuUtilization: float | None
    MemoryUtilization: float | None


@dataclass(frozen=True, slots=True)
class EndpointConfiguration:
    """InitialInstanceCount: as in the recommended fleet; of what is not in it, as many as carry target_rps alone, at most
    max_count; 1 without target_rps.
    """

    InstanceType: str
    InitialInstanceCount: int


@dataclass(frozen=True, slots=True)
class ModelConfiguration:
    EnvironmentParameters: tuple[EnvironmentParameter, ...]


@dataclass(frozen=True, slots=True)
class InferenceRecommendation:
    """One entry of what `describe_inference_recommendations_job` answers."""

    RecommendationId: str
    Metrics: RecommendationMetrics
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
    """If nobody meets the SLO: the best there is, at hardly any load; None where no request succeeded."""

    candidate: str
    rps: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The whole document.

    state: what every output says, and the exit code. proven: the winner's rate passed at 95 % confidence. not proven: a rate
    only held in the sample, or time ended before anything was decided, or while lower rates were left to try. no candidate:
    every one was measured and misses the SLO or the agreement, or does not run; or as many as can be had do not carry
    target_rps. invalid: what would decide it could not be measured.
    needed: what a proof would take, in words, and the command for it; where no fleet carries target_rps, what keeps it from
    that. Empty if it is proven, or no amount of time brings it.
    winner, runner_up: the cheapest alone, and the next: names of candidates; None if there is none. proven: state, as a flag.
    verified: whether the winner recovered from an overload; None if there was no time to see.
    margin: how much more the runner-up costs than the winner, as a share, each at its claimed rate: a fleet for target_rps,
    else a million requests; None if too few can be had of one of them. margin_resolved: False if what was measured does not
    tell the two costs apart.
    probability_cheapest: that none is cheaper, each alone, by bootstrap over blocks.
    flip_usd_per_hour: the winner's hourly price from which the runner-up costs less, at the claimed rates.
    fleet: for target_rps; of several kinds, it is the answer, and not the winner. fleets: for other rates.
    autoscaling_invocations_per_minute: SageMaker's target per instance of configuration_of.
    hoped_fleet: would cost less than it, at rates that are partly only estimated; None if none is known.
    answer: the recommendation in words. configuration: the gateway configuration to deploy, of the candidate
    configuration_of; empty for a running server. configurations: candidate -> its own, of all of a fleet of several kinds.
    generator_limited: candidates that could not be offered what was needed, so that nothing is known of them.
    pareto_p99, pareto_agreement: where nothing measured is both cheaper and quicker, or cheaper and closer to the reference.
    warnings, notes: what to keep in mind; they name candidates by their letters.
    min_agreement: what a candidate's answers must reach to win; None: not asked. reference: whose answers they are compared
    with: a candidate's name, or "the expected answers"; "" if nothing was compared. refused: were not started, as they cannot
    work where they were to be launched.
    """

    created_at: str
    source: str
    model: str
    slo: str
    limit_ms: float
    required_share: float
    target_rps: float | None
    headroom: float
    state: RecommendationState
    needed: str
    command: str
    answer: str
    winner: str | None
    runner_up: str | None
    proven: bool
    verified: bool | None
    margin: float | None
    margin_resolved: bool
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
    pareto_p99: tuple[FrontPoint, ...] = ()
    pareto_agreement: tuple[FrontPoint, ...] = ()
    min_agreement: float | None = None
    reference: str = ""
    refused: tuple[RefusedCandidate, ...] = ()
    hoped_fleet: Fleet | None = None
    configuration_of: str | None = None
    configurations: dict[str, dict[str, Any]] = field(default_factory=dict)
    schema: str = SCHEMA

    @property
    def exit_code(self) -> ExitCode:
        return SIGNALS[self.state].exit_code

    @property
    def winner_report(self) -> CandidateReport | None:
        return self.candidate(self.winner) if self.winner is not None else None

    @property
    def mix(self) -> tuple[CandidateReport, ...]:
        """Who is in the fleet, where it is of several kinds; then it is the answer."""
        counts = self.fleet.counts if self.fleet is not None else {}
        return tuple(map(self.candidate, counts)) if len(counts) > 1 else ()

    @property
    def leaders(self) -> tuple[str, ...]:
        """Letters of those that the answer is of."""
        winner = self.winner_report
        return tuple(candidate.letter for candidate in self.mix or ((winner,) if winner else ()))

    def candidate(self, name: str) -> CandidateReport:
        return next(candidate for candidate in self.candidates if candidate.name == name)


def held_points(report: CandidateReport) -> tuple[CurvePoint, ...]:
    """The rates of its curve at which the SLO held."""
    return tuple(point for point in report.curve if point.verdict != "fail" and point.offered_rps <= report.claimed_rps)


def schema() -> dict[str, Any]:
    """The JSON schema of `to_json`."""
    return schema_of(Recommendation)


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
