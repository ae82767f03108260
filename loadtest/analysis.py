"""From the log of a run to its result.

Blocks lie on a grid that starts with the run: at least 20 behind the warm-up, each of at least 10 SLO limits and 200 requests
where the run is long enough for that, at most 200. The warm-up ends on the grid, so that two runs of the same spec can be
compared block by block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loadtest import verdict
from loadtest.patterns import Schedule
from loadtest.recorder import CUT, OK, PENDING, RequestLog, status_name
from loadtest.results import Block, Generator, LoadSpec, RunResult, ServerSplit
from loadtest.statistics import histogram, mser5, percentiles
from loadtest.target import Statistics
from loadtest.worker import Report

MIN_BLOCKS: Final = 20
MAX_BLOCKS: Final = 200
BLOCK_REQUESTS: Final = 200
BLOCK_LIMITS: Final = 10  # of the SLO's longest limit
MOST_WARMUP: Final = 0.2
LAG_SHARE: Final = 0.01  # of the tightest limit (LOADTEST: the INVALID rule)
_LAG_WITHOUT_SLO_MS: Final = 1.0
_MIN_RATE_SHARE: Final = 0.99


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of a run. wanted_ns: how long a block should be; block_ns: how long it can be in this run."""

    block_ns: int
    wanted_ns: int
    blocks: int

    def until(self, elapsed_ns: int) -> "Grid":
        """The blocks of a run that ended early."""
        return Grid(self.block_ns, self.wanted_ns, max(1, min(self.blocks, -(-elapsed_ns // self.block_ns))))

    @classmethod
    def of(cls, spec: LoadSpec, duration_ns: int, rate_rps: float) -> "Grid":
        limit_ms = max((objective.limit_ms for objective in spec.slo.objectives), default=0.0) if spec.slo else 0.0
        wanted_ns = int(max(BLOCK_LIMITS * limit_ms * 1e6, BLOCK_REQUESTS / max(rate_rps, 1e-9) * 1e9))
        most = int(MIN_BLOCKS / (1 - MOST_WARMUP))
        blocks = min(MAX_BLOCKS, max(most, duration_ns // wanted_ns))
        block_ns = -(-duration_ns // blocks)
        return cls(block_ns, wanted_ns, blocks)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. elapsed_ns: when sending stopped, from the start; partial: before it should."""

    started_at: str
    ended_at: str
    elapsed_ns: int
    partial: bool


def summarise(
    spec: LoadSpec,
    schedule: Schedule,
    log: RequestLog,
    rows: np.ndarray,
    reports: Sequence[Report],
    ended: Ended,
    before: Statistics | None,
    after: Statistics | None,
) -> RunResult:
    """Judge a run. rows: numbers of the dispatched rows, ascending by intended time."""
    intended, dispatched = np.asarray(log.intended)[rows], np.asarray(log.dispatched)[rows]
    sent, done, status = np.asarray(log.sent)[rows], np.asarray(log.done)[rows], np.asarray(log.status)[rows]
    closed = schedule.users > 0
    duration_ns = ended.elapsed_ns
    rate_rps = len(rows) / duration_ns * 1e9 if closed else schedule.rate_rps
    grid = Grid.of(spec, schedule.duration_ns, rate_rps).until(duration_ns)
    block = np.minimum(intended // grid.block_ns, grid.blocks - 1)
    evaluable = (status != PENDING) & (status != CUT)
    latency = done - intended
    service = np.where(sent > 0, done - sent, 0)  # 0: it failed before it got a connection

    warmup_block, steady = _warmup(spec, schedule, grid, block[evaluable], latency[evaluable])
    start_ns = warmup_block * grid.block_ns
    window_s = max(duration_ns - start_ns, 1) / 1e9
    inside = block >= warmup_block
    counted = evaluable & inside
    succeeded = counted & (status == OK)
    requests = verdict.Requests(latency[counted], service[counted], (status != OK)[counted], block[counted])
    judged = verdict.judge(spec.slo, requests) if spec.slo and len(requests.failed) else ()
    good = evaluable & verdict.met(spec.slo, verdict.Requests(latency, service, status != OK, block))

    lag_ms = (dispatched - intended)[inside] / 1e6
    asked = int(np.count_nonzero(inside))
    if not closed:
        planned = np.asarray(schedule.intended_ns)
        asked = int(np.count_nonzero((planned >= start_ns) & (planned < duration_ns)))
    latencies = percentiles(latency[succeeded])
    limit_ms = _lag_limit_ms(spec, latencies.p99)
    in_time = int(np.count_nonzero(inside & (dispatched < duration_ns + limit_ms * 1e6)))
    waited = sent > 0
    generator = Generator(
        send_lag_p50_ms=_percentile(lag_ms, 50),
        send_lag_p99_ms=_percentile(lag_ms, 99),
        send_lag_limit_ms=limit_ms,
        loop_lag_p99_ms=max((report.loop_lag_p99_ms for report in reports), default=0.0),
        connection_wait_p99_ms=_percentile((sent - dispatched)[inside & waited] / 1e6, 99),
        connections=sum(report.connections for report in reports),
        cpu_cores=sum(report.cpu_s / report.wall_s for report in reports if report.wall_s),
        processes=len(reports),
    )
    codes, counts = np.unique(status[counted & (status != OK)], return_counts=True)
    reasons = () if closed else _faults(generator, asked, in_time)
    return RunResult(
        spec=spec,
        started_at=ended.started_at,
        ended_at=ended.ended_at,
        window_s=window_s,
        warmup_s=start_ns / 1e9,
        warmup_requests=int(np.count_nonzero(evaluable & ~inside)),
        steady=steady,
        asked_rps=asked / window_s,
        sent_rps=in_time / window_s,
        requests=len(requests.failed),
        succeeded=latencies.count,
        excluded=int(np.count_nonzero(inside & ~evaluable)),
        succeeded_rps=latencies.count / window_s,
        goodput_rps=int(np.count_nonzero(good & inside)) / window_s,
        latency=latencies,
        service=percentiles(service[succeeded]),
        latency_histogram=histogram(latency[succeeded]),
        errors={status_name(code): count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)},
        error_samples={kind: text for report in reports for kind, text in report.error_samples.items()},
        attainment=verdict.attainment(spec.slo, requests) if judged and spec.slo else None,
        objectives=judged,
        verdict=verdict.overall(judged) if judged else "undecided" if spec.slo else None,
        requests_needed=_most_needed([objective.requests_needed for objective in judged]) if judged else None,
        blocks=_blocks(grid, block, evaluable, status == OK, good, latency, warmup_block),
        generator=generator,
        server=_split(before, after, _mean_ms(service[status == OK])),
        valid=not reasons,
        reasons=reasons,
        warnings=_warnings(spec, grid, grid.blocks - warmup_block, steady, schedule, len(requests.failed), latencies.count),
        partial=ended.partial,
    )


def decided(spec: LoadSpec, log: RequestLog, grid: Grid, blocks: int, confidence: float) -> bool:
    """Whether the first `blocks` blocks of an open, stationary run decide the SLO. All their requests are done."""
    assert spec.slo is not None
    intended = np.asarray(log.intended)
    end = int(np.searchsorted(intended, blocks * grid.block_ns))
    intended, status = intended[:end], np.asarray(log.status)[:end]
    sent, done = np.asarray(log.sent)[:end], np.asarray(log.done)[:end]
    block, latency = intended // grid.block_ns, done - intended
    begin = (
        mser5(np.log(np.maximum(latency, 1)), MOST_WARMUP)[0]
        if spec.warmup_s is None
        else int(np.searchsorted(intended, spec.warmup_s * 1e9))
    )
    requests = verdict.Requests(latency, np.where(sent > 0, done - sent, 0), status != OK, block).behind(begin)
    if len(np.unique(requests.block)) < MIN_BLOCKS:
        return False
    return verdict.overall(verdict.judge(spec.slo, requests, confidence=confidence)) != "undecided"


def _warmup(spec: LoadSpec, schedule: Schedule, grid: Grid, block: np.ndarray, latency: np.ndarray) -> tuple[int, bool]:
    """The first block that counts, and whether the rest looks steady."""
    if spec.warmup_s is not None:
        return min(int(np.ceil(spec.warmup_s * 1e9 / grid.block_ns)), grid.blocks - 1), True
    if not schedule.stationary or len(latency) == 0:
        return 0, True
    cut, steady = mser5(np.log(np.maximum(latency, 1)), MOST_WARMUP)
    if cut == 0:
        return 0, steady
    first = int(block[cut - 1]) + 1
    return min(first, int(grid.blocks * MOST_WARMUP)), steady


def _blocks(
    grid: Grid,
    block: np.ndarray,
    evaluable: np.ndarray,
    ok: np.ndarray,
    good: np.ndarray,
    latency: np.ndarray,
    warmup_block: int,
) -> tuple[Block, ...]:
    edges = np.searchsorted(block, np.arange(grid.blocks + 1))
    blocks: list[Block] = []
    for index in range(grid.blocks):
        part = slice(edges[index], edges[index + 1])
        requests, successes = evaluable[part], latency[part][ok[part]]
        summary = percentiles(successes) if len(successes) else None
        blocks.append(
            Block(
                index=index,
                start_s=index * grid.block_ns / 1e9,
                duration_s=grid.block_ns / 1e9,
                requests=int(np.count_nonzero(requests)),
                met=int(np.count_nonzero(good[part])),
                failed=int(np.count_nonzero(requests & ~ok[part])),
                p50_ms=summary.p50 if summary else None,
                p99_ms=summary.p99 if summary else None,
                mean_ms=summary.mean if summary else None,
                warmup=index < warmup_block,
            )
        )
    return tuple(blocks)


def _percentile(values: np.ndarray, percentile: float) -> float:
    return float(np.percentile(values, percentile)) if len(values) else 0.0


def _mean_ms(values_ns: np.ndarray) -> float:
    return float(values_ns.mean()) / 1e6 if len(values_ns) else 0.0


def _lag_limit_ms(spec: LoadSpec, p99_ms: float) -> float:
    if spec.slo and spec.slo.tightest_ms is not None:
        return spec.slo.tightest_ms * LAG_SHARE
    return max(_LAG_WITHOUT_SLO_MS, p99_ms * LAG_SHARE)


def _faults(generator: Generator, asked: int, in_time: int) -> tuple[str, ...]:
    """Why the run is INVALID: each with what to do."""
    faults: list[str] = []
    remedy = "lower --rate, raise --processes, or send from another machine (`loadtest selfcheck` finds this one's limit)"
    if generator.send_lag_p99_ms > generator.send_lag_limit_ms:
        faults.append(
            f"send lag p99 {generator.send_lag_p99_ms:.3g} ms is above {generator.send_lag_limit_ms:.3g} ms, "
            f"which is 1 % of the tightest limit (1 ms or 1 % of the p99 without one): {remedy}"
        )
    if in_time < _MIN_RATE_SHARE * asked:
        faults.append(f"only {in_time / max(asked, 1):.1%} of the asked requests were sent in time, 99 % are needed: {remedy}")
    return tuple(faults)


def _warnings(
    spec: LoadSpec, grid: Grid, blocks: int, steady: bool, schedule: Schedule, requests: int, succeeded: int
) -> tuple[str, ...]:
    warnings: list[str] = []
    if requests == 0:
        warnings.append("no request was answered or failed in the measured time: nothing can be said")
    elif succeeded == 0:
        warnings.append("no request succeeded: there are no latencies")
    if not steady:
        warnings.append(
            "latency still drifts after a fifth of the run: overload, or a warm-up longer than that; run longer or offer less"
        )
    if spec.slo and grid.block_ns < grid.wanted_ns:
        needed_s = grid.wanted_ns * MIN_BLOCKS / (1 - MOST_WARMUP) / 1e9
        warnings.append(
            f"blocks of {grid.block_ns / 1e9:.3g} s are shorter than {BLOCK_LIMITS} limits or {BLOCK_REQUESTS} requests: "
            f"intervals may be too narrow; --duration {needed_s:.0f} suffices"
        )
    if spec.slo and blocks < MIN_BLOCKS:
        warnings.append(f"only {blocks} blocks behind the warm-up, {MIN_BLOCKS} are wanted: intervals may be too narrow")
    if spec.slo and not schedule.stationary:
        warnings.append("the offered rate changes by design: the verdict is about this mixture, not about one load")
    return tuple(warnings)


def _most_needed(needed: Sequence[int | None]) -> int | None:
    known = [count for count in needed if count is not None]
    return max(known) if len(known) == len(needed) else None


def _split(before: Statistics | None, after: Statistics | None, service_ms: float) -> ServerSplit | None:
    if before is None or after is None:
        return None
    spent = after.since(before)
    if spent.requests <= 0:
        return None
    queue_ms, compute_ms = spent.queue_ns / spent.requests / 1e6, spent.compute_ns / spent.requests / 1e6
    return ServerSplit(
        requests=spent.requests,
        queue_ms=queue_ms,
        compute_ms=compute_ms,
        overhead_ms=service_ms - queue_ms - compute_ms,
        rows_per_execution=spent.rows / spent.executions if spent.executions > 0 else 0.0,
    )
