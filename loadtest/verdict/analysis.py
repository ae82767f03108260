"""From the log of a run to its result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gateway.process.machine import cores
from loadtest.load.patterns import Schedule
from loadtest.load.request_log import GRPC, RequestLog, status_name
from loadtest.load.target import Address, ServerStatistics
from loadtest.load.worker import SenderReport
from loadtest.results import Block, GeneratorReport, LoadSpec, MachineReport, RunResult, ServerSplit
from loadtest.verdict import decision, disturbance, stalls
from loadtest.verdict.blocks import (
    BLOCK_LIMITS,
    BLOCK_REQUESTS,
    MIN_BLOCKS,
    MOST_WARMUP,
    Grid,
    LoggedRequests,
    latency_edges_ms,
)
from loadtest.verdict.stalls import Delays, Recording
from loadtest.verdict.statistics import histogram, latency_interval, mser5, percentiles
from loadtest.wording import counted

LAG_SHARE: Final = 0.01  # of the tightest limit (docs/loadtest.md: when a run is INVALID)
_LAG_WITHOUT_SLO_MS: Final = 1.0
_MIN_RATE_SHARE: Final = 0.99
_MUCH_CPU: Final = 0.2  # of the machine
_MOST_CPU: Final = 0.75  # of the machine, where the target is on it too
_SATURATED: Final = 0.85  # of a core; the kernel leaves 5 % to others, and connecting anew costs some
_LIMITED: Final = (429, GRPC + 8)
_COUNTED_LATE_S: Final = 3.0  # several processes, or Ray's replicas, tell their counts once a second, one after the other
_UNCOUNTED: Final = (
    "the server's own totals do not cover the run: it was started or loaded anew, or several servers answer in turn; its queue "
    "and compute times are not known"
)
_CORES: Final = cores()  # before a search keeps this process to those that its candidate leaves


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. elapsed_ns: when sending stopped, from the start; partial: before it should.

    faults: what went wrong in the generator itself; any makes the run INVALID.
    """

    started_at: str
    ended_at: str
    elapsed_ns: int
    partial: bool
    faults: tuple[str, ...] = ()


def summarise(
    spec: LoadSpec,
    schedule: Schedule,
    log: RequestLog,
    indices: np.ndarray,
    reports: Sequence[SenderReport],
    ended: Ended,
    before: ServerStatistics | None,
    after: ServerStatistics | None,
    recording: Recording | None = None,
) -> RunResult:
    """Judge a run. indices: of what was dispatched in the log, ascending by intended time.

    recording: of the hiccup meter, its times from the start of the run; None where there is none.
    """
    closed = schedule.users > 0
    rate_rps = len(indices) / ended.elapsed_ns * 1e9 if closed else schedule.rate_rps
    grid = Grid.of(spec, schedule.duration_ns, rate_rps).until(ended.elapsed_ns)
    everything = LoggedRequests.read(log, indices, grid)
    evaluable = everything.where(everything.evaluable(spec.slo))
    warmup_block, steady = _warmup(spec, grid, everything.where(everything.ended), stationary=schedule.stationary)
    start_ns = warmup_block * grid.block_ns
    window_s = max(ended.elapsed_ns - start_ns, 1) / 1e9

    inside = everything.where(everything.block >= warmup_block)
    counted = inside.where(inside.evaluable(spec.slo))
    succeeded = counted.where(counted.ok)
    latency = percentiles(succeeded.latency)
    requests = counted.requests()
    judged = decision.judge(spec.slo, requests) if spec.slo and len(requests.failed) else ()

    due = len(inside.block)
    if not closed:
        due = int(np.count_nonzero((schedule.intended_ns >= start_ns) & (schedule.intended_ns < ended.elapsed_ns)))
    generator = _generator(spec, inside, reports, latency.p99)
    in_time = int(np.count_nonzero(inside.dispatched < ended.elapsed_ns + generator.send_lag_limit_ms * 1e6))
    busy = max((report.busy for report in reports), default=0.0)
    found = decision.overall(judged) if judged else "undecided" if spec.slo else None
    delays = Delays.of(recording, evaluable.intended, evaluable.done) if recording is not None else None
    marked = disturbance.marked(spec.slo, evaluable, delays)
    machine: MachineReport | None = None
    disturbed: tuple[str, ...] = ()
    bent: tuple[str, ...] = ()
    if delays is not None:
        own, counted_marks = found if judged else None, marked[evaluable.block >= warmup_block]
        machine, disturbed, bent = disturbance.assess(
            spec, delays, own, counted, counted_marks, inside, generator, start_ns, ended.elapsed_ns
        )
    reasons = ended.faults
    if not closed:
        own_lag_ms = _percentile(disturbance.own_lag_ns(inside, delays) / 1e6, 99)
        reasons += faults(spec, generator, own_lag_p99_ms=own_lag_ms, busy=busy, due=due, in_time=in_time, met=found == "pass")
    reasons += disturbed
    service = evaluable.service[evaluable.ok]
    spent = after.since(before) if before is not None and after is not None else None
    uncounted: tuple[str, ...] = ()
    counted_least = len(service) * (1 - _COUNTED_LATE_S * 1e9 / ended.elapsed_ns)
    if spent is not None and (spent.began_anew or 0 < spent.requests < counted_least):
        spent, uncounted = None, (_UNCOUNTED,)
    if reasons:
        judged = tuple(replace(objective, verdict="undecided", requests_needed=None) for objective in judged)
    return RunResult(
        spec=spec,
        started_at=ended.started_at,
        ended_at=ended.ended_at,
        window_s=window_s,
        warmup_s=start_ns / 1e9,
        warmup_requests=len(evaluable.block) - len(counted.block),
        steady=steady,
        asked_rps=schedule.rate_rps if schedule.stationary and not closed else due / window_s,
        sent_rps=in_time / window_s,
        requests=len(counted.block),
        succeeded=latency.count,
        overdue=int(np.count_nonzero(~counted.ended)),
        excluded=len(inside.block) - len(counted.block),
        succeeded_rps=latency.count / window_s,
        goodput_rps=int(np.count_nonzero(decision.met(spec.slo, requests))) / window_s,
        latency=latency,
        service=percentiles(succeeded.service),
        latency_histogram=histogram(succeeded.latency),
        errors=_errors(counted.status[counted.failed]),
        error_samples={kind: text for report in reports for kind, text in report.error_samples.items()},
        attainment=decision.attainment(spec.slo, requests) if judged and spec.slo else None,
        objectives=judged,
        verdict=None if reasons else found,
        requests_needed=_most_needed([objective.requests_needed for objective in judged]) if judged else None,
        blocks=_blocks(spec, schedule, grid, ended.elapsed_ns, evaluable, warmup_block, marked),
        generator=generator,
        server=_split(spent, _mean_ms(service)),
        valid=not reasons,
        reasons=reasons,
        warnings=_warnings(
            spec,
            schedule,
            grid,
            warmup_block,
            steady,
            generator,
            requests=len(counted.block),
            succeeded=latency.count,
            limited=int(np.count_nonzero(np.isin(counted.status, _LIMITED))),
            busy=busy,
        )
        + uncounted
        + (() if reasons else bent),
        partial=ended.partial,
        machine=machine,
        p99_interval_ms=_p99_interval_ms(succeeded),
        stalls=stalls.stalls(delays, evaluable.intended, evaluable.dispatched, evaluable.done),
        latency_edges_ms=latency_edges_ms(spec.slo),
    )


def decided(
    spec: LoadSpec,
    log: RequestLog,
    grid: Grid,
    blocks: int,
    confidence: float,
    recording: Recording | None = None,
    *,
    or_lost: bool = False,
) -> bool:
    """Whether the first `blocks` blocks of an open, stationary run decide the SLO, whatever other work may have delayed.

    All their requests are done. recording: as for `summarise`, up to now. or_lost: or whether the run is (`decision.lost`).
    A pass takes `decision.EARLY_PASS_S` as well.
    """
    assert spec.slo is not None
    end = int(np.searchsorted(np.asarray(log.intended), blocks * grid.block_ns))
    logged = LoggedRequests.read(log, slice(0, end), grid)
    logged = logged.where(logged.ended)
    marked = disturbance.marked(
        spec.slo, logged, Delays.of(recording, logged.intended, logged.done) if recording is not None else None
    )
    warmup_block, _ = _warmup(spec, replace(grid, blocks=blocks), logged, stationary=True)
    counts = logged.block >= warmup_block
    logged, marked = logged.where(counts), marked[counts]
    if len(np.unique(logged.block)) < MIN_BLOCKS:
        return False
    if or_lost:
        warmup_ns = int(logged.intended[0])
        share = (blocks * grid.block_ns - warmup_ns) / (grid.blocks * grid.block_ns - warmup_ns)
        if decision.lost(spec.slo, disturbance.had_met(logged, marked), share):
            return True
    found = decision.overall(decision.judge(spec.slo, logged.requests(), confidence=confidence))
    if found == "pass" and (blocks - warmup_block) * grid.block_ns < decision.EARLY_PASS_S * 1e9:
        return False
    return found != "undecided" and disturbance.bears(spec.slo, logged, marked, found, confidence)


def _mser5(logged: LoggedRequests) -> tuple[int, bool]:
    # On the logarithm: a change of level counts, whatever the level, and single long waits do not look like one.
    return mser5(np.log(np.maximum(logged.latency, 1)), MOST_WARMUP)


def _warmup(spec: LoadSpec, grid: Grid, ended: LoggedRequests, *, stationary: bool) -> tuple[int, bool]:
    """The first block that counts, and whether the rest looks steady."""
    if spec.warmup_s is not None:
        return min(int(np.ceil(spec.warmup_s * 1e9 / grid.block_ns)), grid.blocks - 1), True
    if not stationary or len(ended.block) == 0:
        return 0, True
    cut, steady = _mser5(ended)
    if cut == 0:
        return 0, steady
    return min(int(ended.block[cut - 1]) + 1, int(grid.blocks * MOST_WARMUP)), steady


def _p99_interval_ms(succeeded: LoggedRequests) -> tuple[float | None, float | None]:
    if not len(succeeded.block):
        return None, None
    low_ms, high_ms = latency_interval(succeeded.latency, succeeded.block, 99, decision.CONFIDENCE)
    return low_ms or None, high_ms if math.isfinite(high_ms) else None


def _generator(spec: LoadSpec, inside: LoggedRequests, reports: Sequence[SenderReport], p99_ms: float) -> GeneratorReport:
    lag_ms = (inside.dispatched - inside.intended) / 1e6
    connected = inside.where(inside.sent > 0)
    return GeneratorReport(
        send_lag_p50_ms=_percentile(lag_ms, 50),
        send_lag_p99_ms=_percentile(lag_ms, 99),
        send_lag_limit_ms=_lag_limit_ms(spec, p99_ms),
        loop_lag_p99_ms=max((report.loop_lag_p99_ms for report in reports), default=0.0),
        connection_wait_p99_ms=_percentile((connected.sent - connected.dispatched) / 1e6, 99),
        connections=sum(report.connections for report in reports),
        cpu_cores=sum(report.cpu_s / report.wall_s for report in reports if report.wall_s),
        processes=len(reports),
        cores=_CORES,
    )


def _blocks(
    spec: LoadSpec,
    schedule: Schedule,
    grid: Grid,
    elapsed_ns: int,
    evaluable: LoggedRequests,
    warmup_block: int,
    marked: np.ndarray,
) -> tuple[Block, ...]:
    edges = np.searchsorted(evaluable.block, np.arange(grid.blocks + 1))
    bounds_ns = np.minimum(np.arange(grid.blocks + 1) * grid.block_ns, max(elapsed_ns, 1))
    durations_s = (np.diff(bounds_ns) / 1e9).tolist()
    asked = np.diff(np.searchsorted(schedule.intended_ns, bounds_ns)).tolist()
    latency_edges_ns = np.array(latency_edges_ms(spec.slo)) * 1e6
    met, ok, latency = decision.met(spec.slo, evaluable.requests()), evaluable.ok, evaluable.latency
    failed, ended = evaluable.failed, evaluable.ended
    blocks: list[Block] = []
    for index in range(grid.blocks):
        part = slice(edges[index], edges[index + 1])
        successes = latency[part][ok[part]]
        summary = percentiles(successes) if len(successes) else None
        blocks.append(
            Block(
                index=index,
                start_s=index * grid.block_ns / 1e9,
                duration_s=durations_s[index],
                requests=len(ok[part]),
                met=int(np.count_nonzero(met[part])),
                failed=int(np.count_nonzero(failed[part])),
                overdue=int(np.count_nonzero(~ended[part])),
                p50_ms=summary.p50 if summary else None,
                p99_ms=summary.p99 if summary else None,
                mean_ms=summary.mean if summary else None,
                warmup=index < warmup_block,
                marked=int(np.count_nonzero(marked[part])),
                asked=asked[index],
                errors=_errors(evaluable.status[part][failed[part]]),
                latency_counts=_counts(successes, latency_edges_ns),
            )
        )
    return tuple(blocks)


def _errors(status: np.ndarray) -> dict[str, int]:
    """Failures by kind. status: (n,), of requests that failed."""
    kinds, counts = np.unique(status, return_counts=True)
    return {status_name(kind): count for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)}


def _counts(values: np.ndarray, edges: np.ndarray) -> tuple[int, ...]:
    """How many of (n,) values are at most each of (k,) edges and above the one before; last, how many are above all."""
    return tuple(np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1).tolist())


def _percentile(values: np.ndarray, percentile: float) -> float:
    return float(np.percentile(values, percentile)) if len(values) else 0.0


def _mean_ms(values_ns: np.ndarray) -> float:
    return float(values_ns.mean()) / 1e6 if len(values_ns) else 0.0


def _lag_limit_ms(spec: LoadSpec, p99_ms: float) -> float:
    if spec.slo and spec.slo.tightest_ms is not None:
        return spec.slo.tightest_ms * LAG_SHARE
    return max(_LAG_WITHOUT_SLO_MS, p99_ms * LAG_SHARE)


def faults(
    spec: LoadSpec, generator: GeneratorReport, *, own_lag_p99_ms: float, busy: float, due: int, in_time: int, met: bool
) -> tuple[str, ...]:
    """Why an open-loop run is INVALID: facts. What to do depends on who shows them.

    own_lag_p99_ms: send lag less what other work took from the generator. busy: share of the time, of the process that had
    least left. due, in_time: requests of the measured time. met: whether the SLO was met all the same, which what the generator
    took of the target can only have made harder.
    """
    found: list[str] = []
    if own_lag_p99_ms > generator.send_lag_limit_ms:
        of = "the SLO's tightest limit" if spec.slo and spec.slo.tightest_ms is not None else "the p99, and at least 1 ms"
        found.append(
            f"send lag p99 {generator.send_lag_p99_ms:.3g} ms is above {generator.send_lag_limit_ms:.3g} ms, 1 % of {of}"
        )
    if in_time < _MIN_RATE_SHARE * due:
        found.append(f"only {in_time / due:.1%} of the asked requests were sent in time, 99 % are needed")
    if met:
        return tuple(found)
    if busy > _SATURATED and generator.connection_wait_p99_ms > generator.send_lag_limit_ms:
        found.append(
            f"requests waited for a connection (p99 {generator.connection_wait_p99_ms:.3g} ms) while the process that sends "
            f"them was busy {min(busy, 1):.0%} of the time: its limit was measured, or the target's, and nobody can tell which"
        )
    if generator.cpu_cores > _MOST_CPU * generator.cores and Address.of(spec).is_here():
        found.append(f"the generator took {_of_cores(generator)}, on which the target runs as well")
    return tuple(found)


def _warnings(
    spec: LoadSpec,
    schedule: Schedule,
    grid: Grid,
    warmup_block: int,
    steady: bool,
    generator: GeneratorReport,
    *,
    requests: int,
    succeeded: int,
    limited: int,
    busy: float,
) -> tuple[str, ...]:
    blocks = grid.blocks - warmup_block
    warnings: list[str] = []
    if requests == 0:
        warnings.append("no request was answered or failed in the measured time: nothing can be said")
    elif succeeded == 0:
        warnings.append("no request succeeded: there are no latencies")
    if limited:
        warnings.append(
            f"{limited} requests were refused as more than may be asked (429, RESOURCE_EXHAUSTED): they tell of a limit, "
            "such as that of a key, and not of what the server can do"
        )
    if not steady:
        warnings.append(
            "latency still drifts after a fifth of the run: overload, or a warm-up longer than that; run longer or offer less"
        )
    if spec.slo and grid.block_ns < grid.wanted_ns:
        needed_s = grid.wanted_ns * MIN_BLOCKS / (1 - MOST_WARMUP) / 1e9
        warnings.append(
            f"blocks of {grid.block_ns / 1e9:.3g} s are shorter than {BLOCK_LIMITS} limits or {BLOCK_REQUESTS} requests: "
            f"intervals may be too narrow; a run of {needed_s:.0f} s would do"
        )
    if spec.slo and blocks < MIN_BLOCKS:
        warnings.append(f"only {blocks} blocks behind the warm-up, {MIN_BLOCKS} are wanted: intervals may be too narrow")
    if generator.cpu_cores > _MUCH_CPU * generator.cores and Address.of(spec).is_here():
        warnings.append(
            f"the generator took {_of_cores(generator)}, before the target: a target on the same machine had only the rest"
        )
    if schedule.users and busy > _SATURATED:
        warnings.append(
            f"the process that sends was busy {min(busy, 1):.0%} of the time: the target may answer more than it can ask"
        )
    if spec.slo and not schedule.stationary:
        warnings.append("the offered rate changes by design: the verdict is about this mixture, not about one load")
    return tuple(warnings)


def _of_cores(generator: GeneratorReport) -> str:
    return f"{generator.cpu_cores:.2f} of this machine's {counted(generator.cores, 'core')}"


def _most_needed(needed: Sequence[int | None]) -> int | None:
    known = [count for count in needed if count is not None]
    return max(known) if len(known) == len(needed) else None


def _split(spent: ServerStatistics | None, service_ms: float) -> ServerSplit | None:
    if spent is None or spent.requests == 0:
        return None
    queue_ms, compute_ms = spent.queue_ns / spent.requests / 1e6, spent.compute_ns / spent.requests / 1e6
    return ServerSplit(
        requests=spent.requests,
        queue_ms=queue_ms,
        compute_ms=compute_ms,
        overhead_ms=service_ms - queue_ms - compute_ms,
        rows_per_execution=spent.rows / spent.executions if spent.executions > 0 else 0.0,
    )
