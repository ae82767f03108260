"""From a run to what the search is told of it; pure."""

from typing import Final

from loadtest.lab.launchers.launcher import Usage
from loadtest.results import LoadSpec, RunResult
from loadtest.search.events import Load, Measured
from loadtest.verdict.blocks import suffice

_LOST_TARGET: Final = ("refused", "reset")  # errors that mean that nobody is there


def finding(
    experiment: Load,
    wanted: LoadSpec,
    result: RunResult,
    *,
    usage: Usage,
    failure: str,
    batch_rows: dict[int, int],
    slowdown: float,
    endpoint: str,
    began_at: str,
) -> Measured:
    """wanted: of the generator. failure: of the server, "" if it ran to the end. The others: as of `Measured`."""
    verdict = result.verdict or "undecided"
    if verdict == "pass" and experiment.purpose == "peak" and not suffice(result.blocks, wanted):
        verdict = "undecided"  # so short a run only held its rate: its intervals may be too narrow
    server = result.server
    return Measured(
        entrant=experiment.entrant,
        purpose=experiment.purpose,
        rps=experiment.rps,
        verdict=verdict,
        blocks=tuple((block.requests, block.met) for block in result.blocks if not block.warmup and block.requests),
        seconds=0.0,
        valid=result.valid,
        disturbed=result.machine is not None and result.machine.disturbed,
        failure=failure or _lost(result),
        p50_ms=result.latency.p50,
        p95_ms=result.latency.p95,
        p99_ms=result.latency.p99,
        p99_low_ms=result.p99_interval_ms[0] or 0.0,
        p99_high_ms=result.p99_interval_ms[1] or 0.0,
        mean_ms=result.latency.mean,
        goodput_rps=result.goodput_rps,
        error_rate=result.error_rate,
        errors=result.errors,
        error_samples=result.error_samples,
        overrun=max(each.overrun for each in result.objectives) if len(result.objectives) > 1 else None,
        queue_ms=server.queue_ms if server else None,
        compute_ms=server.compute_ms if server else None,
        overhead_ms=server.overhead_ms if server else None,
        batch_rows=batch_rows,
        cpu_percent=usage.cpu_percent,
        memory_percent=usage.memory_percent,
        notes=result.reasons if not result.valid else result.warnings,
        endpoint=endpoint,
        began_at=began_at if endpoint else "",
        slowdown=slowdown,
    )


def _lost(result: RunResult) -> str:
    gone = sum(result.errors.get(kind, 0) for kind in _LOST_TARGET)
    if result.requests and gone > result.requests / 2:
        return f"the target went away: {gone} of {result.requests} requests found nobody"
    return ""
