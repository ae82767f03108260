"""Results of runs that nobody made: what a fake `measure` answers."""

from loadtest.results import Block, GeneratorReport, LoadSpec, Percentiles, RunResult, ServerSplit, Verdict


def run_result(
    spec: LoadSpec | None = None,
    *,
    succeeded: int = 0,
    service_ms: float = 1.0,
    errors: dict[str, int] | None = None,
    verdict: Verdict | None = None,
    blocks: int = 20,
    met_share: float = 1.0,
    valid: bool = True,
) -> RunResult:
    """errors: failed requests by kind; they come on top of the succeeded ones. service_ms: every percentile and the mean."""
    wanted = spec or LoadSpec(target="http://nowhere", model="m")
    requests = succeeded + sum((errors or {}).values())
    times = Percentiles(succeeded, *[service_ms if succeeded else 0.0] * 7)
    each, long_s = requests // blocks, wanted.duration_s / blocks
    return RunResult(
        spec=wanted,
        started_at="2026-08-01T12:00:00+00:00",
        ended_at="2026-08-01T12:00:30+00:00",
        window_s=wanted.duration_s,
        warmup_s=0.0,
        warmup_requests=0,
        steady=True,
        asked_rps=wanted.rate_rps,
        sent_rps=wanted.rate_rps,
        requests=requests,
        succeeded=succeeded,
        excluded=0,
        succeeded_rps=succeeded / wanted.duration_s,
        goodput_rps=succeeded * met_share / wanted.duration_s,
        latency=times,
        service=times,
        latency_histogram=(),
        errors=errors or {},
        error_samples={},
        attainment=None,
        objectives=(),
        verdict=verdict,
        requests_needed=None,
        blocks=tuple(
            Block(n, n * long_s, long_s, each, round(each * met_share), 0, service_ms, service_ms, service_ms, False)
            for n in range(blocks)
        ),
        generator=GeneratorReport(0.01, 0.02, 0.5, 0.1, 0.0, 8, 0.1, 1),
        server=ServerSplit(succeeded, 0.3 * service_ms, 0.6 * service_ms, 0.1 * service_ms, 2.0) if succeeded else None,
        valid=valid,
        reasons=() if valid else ("send lag p99 9 ms is above 0.5 ms",),
        warnings=(),
        partial=False,
    )
