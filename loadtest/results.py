"""What is asked of a load test and what it found: plain values that go to JSON and back.

`LoadSpec` (with its `SloSpec`) asks, `RunResult` answers; both are frozen. `to_json` writes them, `read_load_spec` and
`run_from_json` read them. Milliseconds and requests per second everywhere; a share is between 0 and 1.
"""

import re
import sys
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import cleandoc
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args, get_type_hints

import msgspec

from gateway.errors import instead
from loadtest.errors import UsageError

Protocol = Literal["rest-json", "rest-binary", "grpc", "invocations"]
Verdict = Literal["pass", "fail", "undecided"]
Metric = Literal["latency", "service"]

SCHEMA: Final = "loadtest.run/1"

_OBJECTIVE: Final = re.compile(r"(?:(latency|service)\.)?p(\d+(?:\.\d+)?)\s*(?:<=?)\s*(\d+(?:\.\d+)?)\s*(us|ms|s)")
_ERRORS: Final = re.compile(r"errors\s*(?:<=?)\s*(\d+(?:\.\d+)?)\s*(%?)")
_OBJECTIVE_KEY: Final = re.compile(r"(?:(latency|service)_)?p(\d+(?:\.\d+)?)_ms")
_TO_MS: Final = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True, slots=True)
class Objective:
    """`percentile` of `metric` is at most `limit_ms`: at least percentile % of the requests were that fast.

    metric: `latency` counts from the intended send time (what a user waits), `service` from the real one.
    """

    metric: Metric
    percentile: float
    limit_ms: float

    def __post_init__(self) -> None:
        if not 0 < self.percentile < 100:
            raise UsageError(f"SLO: p{self.percentile:g}: the percentile must lie between 0 and 100, without them")
        if not 0 < self.limit_ms <= sys.float_info.max:
            raise UsageError(f"SLO: p{self.percentile:g}: limit {self.limit_ms:g} ms: expected a number above 0")

    def __str__(self) -> str:
        prefix = "" if self.metric == "latency" else f"{self.metric}."
        return f"{prefix}p{self.percentile:g}<{self.limit_ms:g}ms"


@dataclass(frozen=True, slots=True)
class SloSpec:
    """What must hold. A request that failed (error, shed, timeout) misses every objective.

    max_error_rate: share of failed requests that is still fine; None: failures count as misses only.
    """

    objectives: tuple[Objective, ...] = ()
    max_error_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.objectives and self.max_error_rate is None:
            raise UsageError('an SLO needs at least one objective, such as "p99<50ms"')
        if self.max_error_rate is not None and not 0 <= self.max_error_rate < 1:
            raise UsageError(f"SLO: the error rate must be at least 0 and below 1 (100 %), got {self.max_error_rate:g}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `p99<50ms,errors<0.1%`: comma-separated, percentile < number with us, ms or s; `service.` for the metric.

        Raises: UsageError, naming the part that cannot be read.
        """
        objectives: list[Objective] = []
        max_error_rate: float | None = None
        for part in filter(None, (part.strip() for part in text.split(","))):
            if match := _OBJECTIVE.fullmatch(part):
                metric, percentile, number, unit = match.groups()
                objectives.append(Objective(_metric(metric), float(percentile), float(number) * _TO_MS[unit]))
            elif match := _ERRORS.fullmatch(part):
                max_error_rate = float(match[1]) / (100 if match[2] else 1)
            else:
                raise UsageError(f'SLO: cannot read "{part}", expected such as "p99<50ms" or "errors<0.1%"')
        return cls(tuple(objectives), max_error_rate)

    @classmethod
    def from_yaml(cls, value: object) -> Self:
        """Read a YAML node: the text of `parse`, or a mapping {p99_ms: 50, service_p50_ms: 5, max_error_rate: 0.001}.

        Raises: UsageError, naming the key.
        """
        if isinstance(value, str):
            return cls.parse(value)
        if not isinstance(value, dict):
            raise UsageError(f'SLO: expected a text such as "p99<50ms" or a mapping such as {{p99_ms: 50}}, got {value!r}')
        objectives: list[Objective] = []
        max_error_rate: float | None = None
        for key, number in value.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or abs(number) > sys.float_info.max:
                raise UsageError(f"SLO: {key}: expected a number, got {number!r}")
            if key == "max_error_rate":
                max_error_rate = float(number)
            elif match := _OBJECTIVE_KEY.fullmatch(str(key)):
                objectives.append(Objective(_metric(match[1]), float(match[2]), float(number)))
            else:
                raise UsageError(f"SLO: unknown key {key!r}, expected such as p99_ms or max_error_rate")
        return cls(tuple(objectives), max_error_rate)

    def __str__(self) -> str:
        parts = [str(objective) for objective in self.objectives]
        if self.max_error_rate is not None:
            parts.append(f"errors<{self.max_error_rate * 100:g}%")
        return ",".join(parts)

    @property
    def tightest_ms(self) -> float | None:
        """The smallest limit; None if only the error rate is limited."""
        return min((objective.limit_ms for objective in self.objectives), default=None)

    @property
    def longest_ms(self) -> float | None:
        """The largest limit; None if only the error rate is limited."""
        return max((objective.limit_ms for objective in self.objectives), default=None)

    @property
    def strictest(self) -> Objective | None:
        """Of the highest percentile, of equals the tightest: what is later is late by whatever is asked."""
        return max(self.objectives, key=lambda objective: (objective.percentile, -objective.limit_ms), default=None)


def _metric(text: str | None) -> Metric:
    return "service" if text == "service" else "latency"


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """One run, completely: the same spec sends the same requests at the same times.

    target: `http://host:port` (REST), `grpc://host:port` (gRPC), `host:port` (either), the whole URL (invocations).
    model: empty only for `invocations`, or if the server has exactly one model.
    pattern: phases joined by ";", each `kind` or `kind:key=value,...`: constant, poisson, burst, ramp,
        stairs, diurnal, trace, users. A phase's own `rate` and `duration` win over the ones here.
    rate_rps: mean offered rate; 0 for a closed loop, and for a trace replayed as it is.
    seed: of every random choice; each dimension (arrivals, payload, think time) draws from its own stream.
    connections: the most that may be open (per process). A request that finds none free waits, and the wait counts. None: 256,
        or one for each user, if they are more; 4 over gRPC, of which each carries many requests. A result has the number.
    timeout_s: from the intended send time.
    warmup_s: dropped from the start; None: found by MSER-5, at most a fifth of the run.
    rows, length: "4" or "1-8" (uniform): what -1 in the model's shapes becomes; the first dimension, and every other.
        Requests of payload files are as they are, unless rows is above 1: then they are joined.
    payloads: files or folders of requests instead of synthetic ones.
    pad: "NAME=VALUE": what joined requests of different lengths are padded with, along axis 1 of that input.
    lengths: "17-32": only requests of files whose longest input among those of `pad` is so long; "": all.
    values: "NAME=LOW:HIGH" ranges for synthetic integer or float inputs.
    label: what tables and reports call this run.
    sigv4: the AWS region for which requests to a SageMaker endpoint are signed; "": they are not.
    """

    target: str
    protocol: Protocol = "rest-json"
    model: str = ""
    version: str = ""
    pattern: str = "poisson"
    rate_rps: float = 0.0
    duration_s: float = 30.0
    seed: int = 0
    slo: SloSpec | None = None
    connections: int | None = None
    processes: int = 1
    timeout_s: float = 10.0
    warmup_s: float | None = None
    rows: str = "1"
    length: str = "16"
    payloads: tuple[str, ...] = ()
    content_type: str = ""
    values: tuple[str, ...] = ()
    pad: tuple[str, ...] = ()
    lengths: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    label: str = ""
    sigv4: str = ""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the successful requests, in milliseconds. 0 everywhere if there are none (count tells)."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A share with its two-sided interval at `confidence`."""

    estimate: float
    lower: float
    upper: float
    confidence: float


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """One line of the verdict. objective: as the user would write it, `p99<50ms` or `errors<0.1%`.

    attainment: share that met it, by batch means over blocks (for errors: share that did not fail).
    binomial: the same as if requests were independent: too narrow near the knee, shown to be compared.
    design_effect: how many dependent requests weigh as one independent.
    requests_needed: how many more would decide it if the share stays as it is; 0: decided; None: cannot be told.
    """

    objective: str
    required: float
    attainment: Interval
    binomial: Interval
    design_effect: float
    verdict: Verdict
    requests_needed: int | None

    @property
    def overrun(self) -> float:
        """Misses over those that it allows: above 1 it did not hold in the sample."""
        return (1 - self.attainment.estimate) / max(1 - self.required, 1e-9)


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the run on a grid that starts with the run; requests belong to it by their intended send time.

    duration_s: the last ends with the run, all others are equally long.
    requests: evaluable ones. met: those that met every objective (all successes if there is no SLO). overdue: as of a run.
    p50_ms, p99_ms, mean_ms: latency of the successes, None if there are none. warmup: not counted in the result.
    marked: requests that missed the SLO, but would have met it without what other work on the machine took.
    asked: requests that the schedule wants in it; 0 in a closed loop. errors: failed requests by kind.
    latency_counts: of the successes, how many lie within each of the result's `latency_edges_ms`, and above the last.
    """

    index: int
    start_s: float
    duration_s: float
    requests: int
    met: int
    failed: int
    p50_ms: float | None
    p99_ms: float | None
    mean_ms: float | None
    warmup: bool
    marked: int = 0
    asked: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    latency_counts: tuple[int, ...] = ()
    overdue: int = 0

    @property
    def succeeded(self) -> int:
        return self.requests - self.failed - self.overdue


@dataclass(frozen=True, slots=True)
class GeneratorReport:
    """What the generator measured of itself. lag: real less intended moment of sending, the wait for a connection left out.

    connection_wait_p99_ms: that wait. cpu_cores: of all its processes, 1.0 is one core kept busy. processes: how many.
    cores: of its machine, as far as they were its to use; 0 in results that do not tell.
    """

    send_lag_p50_ms: float
    send_lag_p99_ms: float
    send_lag_limit_ms: float
    loop_lag_p99_ms: float
    connection_wait_p99_ms: float
    connections: int
    cpu_cores: float
    processes: int
    cores: int = 0


Culprit = Literal["server", "machine", "generator"]


@dataclass(frozen=True, slots=True)
class Stall:
    """A stretch in which somebody waited (from his intended send time) and nobody was answered, far longer than usual.

    machine_ms: as far as the CPU time of other work, or steal, explains it. generator_ms: as far as the generator sent late by
    its own doing. The rest is the server's. whose: the largest of the three.
    """

    start_s: float
    duration_ms: float
    machine_ms: float
    generator_ms: float
    whose: Culprit


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What other work on this machine did to the run, as far as can be seen from here.

    candidate_cores: that the server under test may use; empty if its processes cannot be seen: then nothing excuses it.
    generator_cores: the generator's. meter_cores: what measuring this cost; 1.0 is one core kept busy.
    taken_share: of the measured time, in which others had a core that the server was ready to use; generator_taken_share: the
        generator.
    others: (name, cores) of the other processes of the machine that used most CPU time. steal_share: of the candidate's cores,
        or of the generator's, what the hypervisor gave to other machines.
    longest_hiccup_ms: that somebody who asked for one of those cores had to wait, whoever had it.
    marked, marked_share: requests that missed the SLO but would have met it without what was taken.
    without_marked: the verdict on the others; None without an SLO.
    disturbed: this run says more about the machine than about the server, and should be measured again: the verdict hangs on
        what is marked, or the generator was kept from sending in time.
    """

    candidate_cores: tuple[int, ...]
    generator_cores: tuple[int, ...]
    taken_share: float
    generator_taken_share: float
    others: tuple[tuple[str, float], ...]
    steal_share: float
    longest_hiccup_ms: float
    marked: int
    marked_share: float
    without_marked: Verdict | None
    meter_cores: float
    disturbed: bool


@dataclass(frozen=True, slots=True)
class ServerSplit:
    """Means per request over the whole run, warm-up included, from the server's statistics (v2 statistics extension).

    overhead_ms: the client's mean service time less queue and compute: network, parsing, the server's edges.
    rows_per_execution: mean batch the server formed.
    """

    requests: int
    queue_ms: float
    compute_ms: float
    overhead_ms: float
    rows_per_execution: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run found. Everything but `server`, `blocks` marked warm-up, and `warmup_*` excludes the warm-up.

    started_at, ended_at: ISO 8601, UTC; blocks count from the first. window_s: the measured time, warm-up excluded.
    asked_rps: the mean rate of the pattern, or, where it changes by design, of what it wants sent in the window; closed loops
        ask what they send. sent_rps: really sent in the window, which chance gives a little more or less than is asked.
    requests: evaluable ones (succeeded + failed + overdue). overdue: cut off by the end of the run when they had waited longer
        than a limit of the SLO: they missed that one, and tell nothing of longer ones and of errors. excluded: cut off sooner.
    succeeded_rps: answered well per second. goodput_rps: those of them that met every objective, per second of offered time.
    errors: failed requests by kind (`timeout`, `refused`, `reset`, `malformed`, `http 503`, `grpc UNAVAILABLE`,
        `error event`).
    error_samples: one message of the server (or system) per kind.
    attainment: share that met every objective, by batch means; None without an SLO, or without requests.
    verdict: all objectives pass / one fails / undecided; None without an SLO, and for an invalid run.
    requests_needed: the largest of the objectives'.
    valid: False if the generator was not able to do what was asked, or other work on the machine may have changed the verdict:
        then the figures say nothing of the target, no objective is decided, and `reasons` says why, in facts; what to do is up
        to who shows them. warnings: what to keep in mind.
    steady: False if no warm-up of at most a fifth makes the rest look stationary (overload, drift).
    partial: ended early, by the user or a fault (a verdict reached early is not partial).
    latency_histogram: (upper edge in ns, count) of the successes, log-linear with 2048 cells per octave: exact to 0.05 %.
    latency_edges_ms: of the blocks' `latency_counts`: those of the gateway's own latency metric, and the SLO's limits.
    machine: what other work did to the run; None where this system does not tell (it takes Linux's /proc).
    stalls: the longest, in order of time, warm-up included.
    p99_interval_ms: two-sided 95 % interval of the p99 latency, dependence allowed for; None at an end that is not known.
    digests: of what was sent (`loadtest.load.digests`): `requests`, the payload files, or the inputs that the model takes;
        `headers`, secrets left out; `traces`, and their `arrivals`. What this result does not tell is not there.
    """

    spec: LoadSpec
    started_at: str
    ended_at: str
    window_s: float
    warmup_s: float
    warmup_requests: int
    steady: bool
    asked_rps: float
    sent_rps: float
    requests: int
    succeeded: int
    excluded: int
    succeeded_rps: float
    goodput_rps: float
    latency: Percentiles
    service: Percentiles
    latency_histogram: tuple[tuple[int, int], ...]
    errors: dict[str, int]
    error_samples: dict[str, str]
    attainment: Interval | None
    objectives: tuple[ObjectiveResult, ...]
    verdict: Verdict | None
    requests_needed: int | None
    blocks: tuple[Block, ...]
    generator: GeneratorReport
    server: ServerSplit | None
    valid: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    partial: bool
    schema: str = SCHEMA
    machine: MachineReport | None = None
    stalls: tuple[Stall, ...] = ()
    p99_interval_ms: tuple[float | None, float | None] = (None, None)
    latency_edges_ms: tuple[float, ...] = ()
    overdue: int = 0
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return self.requests - self.overdue - self.succeeded

    @property
    def error_rate(self) -> float:
        ended = self.requests - self.overdue
        return self.failed / ended if ended else 0.0

    @property
    def disturbed(self) -> bool:
        """Whether it was other work on this machine that made it INVALID."""
        return self.machine is not None and self.machine.disturbed


def to_json(value: LoadSpec | RunResult) -> str:
    """Indented JSON, UTF-8. Values of request headers are left out: they may be secrets."""
    spec = value.spec if isinstance(value, RunResult) else value
    hidden = replace(spec, headers=tuple((name, "***") for name, _ in spec.headers))
    shown = replace(value, spec=hidden) if isinstance(value, RunResult) else hidden
    return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()


def run_from_json(text: str | bytes, *, source: str) -> RunResult:
    """Read what `to_json` wrote. source: what messages call it. Raises: UsageError, with the path of the first fault."""
    try:
        result = msgspec.json.decode(text, type=RunResult)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise UsageError(f"{source}: not a result of `loadtest run`: {exc}") from exc
    if result.schema != SCHEMA:
        raise UsageError(f"{source}: schema {result.schema!r}, expected {SCHEMA!r}")
    return result


def read_load_spec(path: str | Path) -> tuple[LoadSpec, frozenset[str]]:
    """Read a spec as JSON, and tell which fields it has.

    Raises: UsageError, with the path of the first fault; a field that nobody knows is one.
    """
    try:
        document = msgspec.json.decode(Path(path).read_bytes())
        _know_fields(document, LoadSpec, f"{path}: ")
        return msgspec.convert(document, LoadSpec), frozenset(document)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}: no load spec: {exc}") from exc


def _know_fields(value: object, kind: Any, where: str) -> None:
    """kind: the annotation of what the value is read as. Raises: UsageError."""
    if isinstance(value, dict) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        for name, inner in value.items():
            if name not in kinds:
                raise UsageError(f"{where}{name}: unknown{instead(name, kinds, 'Fields')}")
            _know_fields(inner, kinds[name], f"{where}{name}.")
    for inner_kind in get_args(kind):
        for item in value if isinstance(value, list) else [value]:
            _know_fields(item, inner_kind, where)


def read_run(path: str | Path) -> RunResult:
    """Raises: UsageError, if the file cannot be read or is no result."""
    try:
        return run_from_json(Path(path).read_bytes(), source=str(path))
    except OSError as exc:
        raise UsageError(f"{path}: cannot be read: {exc}") from exc


def json_schema() -> dict[str, Any]:
    """The published JSON schema of a result file."""
    return schema_of(RunResult)


def schema_of(document: type) -> dict[str, Any]:
    """A JSON schema, alike for every version of msgspec: 0.22 leaves descriptions indented, and out the default of a dict."""
    found = msgspec.json.schema(document)
    for definition in found["$defs"].values():
        if "description" in definition:
            definition["description"] = cleandoc(definition["description"])
        for field_schema in definition.get("properties", {}).values():
            if field_schema.get("default") == {}:
                del field_schema["default"]
    return found
