"""Runs as OpenMetrics text with timestamps, which Prometheus takes in afterwards: client and server stand on one dashboard.

Counters begin at 0 with the run; every series has a value at the end of each block, warm-up included. A request counts in the
block in which it was meant to be sent. The histogram has the edges of the gateway's `gateway_request_duration_seconds`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest

from loadtest.lab.runs_folder import file_of
from loadtest.reports.recommendation import Recommendation
from loadtest.results import Block, RunResult, read_run

OK: Final = "ok"  # the outcome of what succeeded


@dataclass(frozen=True, slots=True)
class NamedRun:
    """name: the label `run`, which tells it from others in one Prometheus. candidate: of `loadtest recommend`; "" else."""

    name: str
    result: RunResult
    candidate: str = ""


def named(result: RunResult) -> NamedRun:
    """A run of `loadtest run`, by its label, else by when it began."""
    return NamedRun(result.spec.label or result.started_at, result)


def kept(folder: Path, found: Recommendation) -> list[NamedRun]:
    """The runs that a search has kept in its folder, by their numbers; none, if nothing was loaded. Raises: UsageError."""
    count = sum(len(candidate.runs) for candidate in found.candidates)  # files of a higher number are of an earlier search
    paths = [path for number in range(count) if (path := file_of(folder / "runs", number)).exists()]
    results = {path: read_run(path) for path in paths}
    return [NamedRun(f"{folder.name} {path.stem}", result, result.spec.label) for path, result in results.items()]


def render(runs: Sequence[NamedRun]) -> str:
    """All of them as one file. runs: in order of time, each with another name."""
    text: bytes = generate_latest(_Families(runs))  # type: ignore[no-untyped-call]  # prometheus_client's
    return text.decode()


class _Families:
    """What prometheus_client's exposition takes for a registry."""

    def __init__(self, runs: Sequence[NamedRun]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        yield self._of("loadtest_run", "info", "What was measured, and its verdict", _info)
        yield self._of("loadtest_requests", "counter", "Requests by outcome: ok, or the kind of failure", _outcomes)
        yield self._of("loadtest_slo_requests", "counter", "Requests that met every objective, and that missed one", _attained)
        yield self._of(
            "loadtest_marked_requests", "counter", "Requests that missed the SLO because of other work on the machine", _marked
        )
        yield self._of(
            "loadtest_request_duration_seconds",
            "histogram",
            "Successful requests, from the intended moment of sending to the whole answer",
            _durations,
        )
        yield self._of(
            "loadtest_request_duration_percentile_seconds",
            "gauge",
            "The same by percentile, exact in each block",
            _percentiles,
        )
        yield self._of("loadtest_slo_seconds", "gauge", "The limit of each latency objective", _limits)
        yield self._of("loadtest_target_requests_per_second", "gauge", "The rate that the schedule wants sent", _target)

    def _of(self, name: str, kind: str, meaning: str, values: "_Values") -> Metric:
        family = Metric(name, meaning, kind)
        for run in self._runs:
            spec = run.result.spec
            labels = {"run": run.name, "model": spec.model, "protocol": spec.protocol}
            labels |= {"candidate": run.candidate} if run.candidate else {}
            for each in values(run.result):
                family.add_sample(name + each.suffix, labels | each.labels, each.value, each.at_s)
        return family


@dataclass(frozen=True, slots=True)
class _Value:
    """One line. at_s: since 1970. suffix: behind the family's name. labels: beside those of the run."""

    value: float
    at_s: float
    suffix: str = ""
    labels: dict[str, str] = field(default_factory=dict)


_Values = Callable[[RunResult], Iterator[_Value]]


def _moments(result: RunResult) -> list[float]:
    """Since 1970: when the run began, and when each of its blocks ended."""
    began_s = datetime.fromisoformat(result.started_at).timestamp()
    ends_s = (min(block.start_s + block.duration_s, result.warmup_s + result.window_s) for block in result.blocks)
    return [round(began_s + after_s, 3) for after_s in (0.0, *ends_s)]


def _counted(result: RunResult, label: str, value: str, count: Callable[[Block], int]) -> Iterator[_Value]:
    """A counter, from what each block adds to it. label: "" for none."""
    for total, at_s in zip(accumulate(map(count, result.blocks), initial=0), _moments(result), strict=True):
        yield _Value(total, at_s, "_total", {label: value} if label else {})


def _info(result: RunResult) -> Iterator[_Value]:
    told = {"target": result.spec.target, "verdict": result.verdict or "none", "valid": str(result.valid).lower()}
    told["slo"] = str(result.spec.slo or "")
    return (_Value(1, at_s, "_info", told) for at_s in _moments(result))


def _outcomes(result: RunResult) -> Iterator[_Value]:
    yield from _counted(result, "outcome", OK, lambda block: block.succeeded)
    for kind in sorted({kind for block in result.blocks for kind in block.errors}):
        yield from _counted(result, "outcome", kind, lambda block, kind=kind: block.errors.get(kind, 0))  # type: ignore[misc]


def _attained(result: RunResult) -> Iterator[_Value]:
    if result.spec.slo is not None:
        yield from _counted(result, "result", "met", lambda block: block.met)
        yield from _counted(result, "result", "missed", lambda block: block.requests - block.met)


def _marked(result: RunResult) -> Iterator[_Value]:
    return _counted(result, "", "", lambda block: block.marked)


def _durations(result: RunResult) -> Iterator[_Value]:
    if not result.latency_edges_ms:
        return  # written before blocks had them
    edges = [*(str(edge_ms / 1e3) for edge_ms in result.latency_edges_ms), "+Inf"]
    counts, sum_s = [0] * len(edges), 0.0
    began_s, *ends_s = _moments(result)
    for block, at_s in zip((None, *result.blocks), (began_s, *ends_s), strict=True):
        if block is not None:
            counts = [count + more for count, more in zip(counts, block.latency_counts, strict=True)]
            sum_s += (block.mean_ms or 0.0) * block.succeeded / 1e3
        for edge, below in zip(edges, accumulate(counts), strict=True):
            yield _Value(below, at_s, "_bucket", {"le": edge})
        yield _Value(sum(counts), at_s, "_count")
        yield _Value(sum_s, at_s, "_sum")


def _percentiles(result: RunResult) -> Iterator[_Value]:
    series = {"50": [block.p50_ms for block in result.blocks], "99": [block.p99_ms for block in result.blocks]}
    for percentile, values_ms in series.items():
        for value_ms, at_s in zip(values_ms, _moments(result)[1:], strict=True):
            if value_ms is not None:
                yield _Value(value_ms / 1e3, at_s, labels={"percentile": percentile})


def _limits(result: RunResult) -> Iterator[_Value]:
    for objective in result.spec.slo.objectives if result.spec.slo else ():
        for at_s in _moments(result):
            yield _Value(objective.limit_ms / 1e3, at_s, labels={"objective": str(objective)})


def _target(result: RunResult) -> Iterator[_Value]:
    steady = result.spec.pattern.partition(":")[0] in ("constant", "poisson", "burst") and ";" not in result.spec.pattern
    for block, at_s in zip(result.blocks, _moments(result)[1:], strict=True):
        if block.asked:
            yield _Value(result.asked_rps if steady else block.asked / block.duration_s, at_s)
