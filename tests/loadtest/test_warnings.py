"""What a run says of itself: blocks, send lag, and what makes it INVALID. Made from a log, without a server."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from gateway.process.machine import cores
from loadtest.load.patterns import schedule
from loadtest.load.request_log import OK, TIMEOUT, RequestLog
from loadtest.load.worker import SenderReport
from loadtest.results import LoadSpec, RunResult, SloSpec
from loadtest.verdict.analysis import Ended, decided, summarise
from loadtest.verdict.blocks import Grid
from loadtest.wording import counted

CORES = cores()
SLO = SloSpec.parse("p99<100ms")


def report(**known: Any) -> SenderReport:
    usual = {"error_samples": {}, "wall_s": 25.0, "connections": 1}
    return SenderReport(**{field.name: known.get(field.name, usual.get(field.name, 0)) for field in fields(SenderReport)})


def filled(
    intended_ns: np.ndarray, *, lag_ms: np.ndarray | float = 0.0, latency_ms: np.ndarray | float = 10.0, status: int = OK
) -> RequestLog:
    log = RequestLog(len(intended_ns))
    np.asarray(log.intended)[:] = intended_ns
    np.asarray(log.dispatched)[:] = intended_ns + np.asarray(np.broadcast_to(lag_ms, intended_ns.shape) * 1e6, np.int64)
    np.asarray(log.sent)[:] = np.asarray(log.dispatched)
    np.asarray(log.done)[:] = intended_ns + np.asarray(np.broadcast_to(latency_ms, intended_ns.shape) * 1e6, np.int64)
    np.asarray(log.status)[:] = status
    return log


def run(
    slo: SloSpec | None = SLO,
    *,
    rate_rps: float = 200,
    duration_s: float = 25,
    warmup_s: float | None = 0.0,
    pattern: str = "constant",
    target: str = "http://elsewhere",
    cpu_s: float = 0.0,
    until_s: float | None = None,
    **log: Any,
) -> RunResult:
    spec = LoadSpec(target, pattern=pattern, rate_rps=rate_rps, duration_s=duration_s, slo=slo, warmup_s=warmup_s)
    plan = schedule(pattern, rate_rps=rate_rps, duration_s=duration_s, seed=0)
    elapsed_ns = int(duration_s * 1e9) if until_s is None else int(until_s * 1e9)
    rows = np.arange(np.count_nonzero(plan.intended_ns < elapsed_ns))
    ended = Ended("", "", elapsed_ns, partial=until_s is not None)
    return summarise(spec, plan, filled(plan.intended_ns, **log), rows, [report(cpu_s=cpu_s)], ended, None, None)


def test_twenty_blocks_behind_the_warm_up_are_enough_and_nineteen_are_not() -> None:
    assert run(warmup_s=5.0).warnings == ()
    assert run(warmup_s=5.1).warnings == ("only 19 blocks behind the warm-up, 20 are wanted: intervals may be too narrow",)
    assert run(None, warmup_s=5.1).warnings == ()  # nothing is judged


@pytest.mark.parametrize(("blocks", "enough"), [(19, False), (20, True), (21, True)])
def test_a_sequential_test_decides_on_twenty_blocks_and_not_on_fewer(blocks: int, enough: bool) -> None:
    spec = LoadSpec("http://x", rate_rps=100, duration_s=60, slo=SLO, warmup_s=0.0)
    plan = schedule("constant", rate_rps=100, duration_s=60, seed=0)
    grid = Grid.of(spec, plan.duration_ns, plan.rate_rps)
    assert grid.block_ns == 2e9  # 200 requests
    assert decided(spec, filled(plan.intended_ns), grid, blocks, 0.95) == enough


def test_blocks_behind_the_warm_up_count_for_a_sequential_test() -> None:
    spec = LoadSpec("http://x", rate_rps=100, duration_s=60, slo=SLO, warmup_s=4.0)
    plan = schedule("constant", rate_rps=100, duration_s=60, seed=0)
    grid = Grid.of(spec, plan.duration_ns, plan.rate_rps)
    assert not decided(spec, filled(plan.intended_ns), grid, 21, 0.95)
    assert decided(spec, filled(plan.intended_ns), grid, 22, 0.95)


def test_short_blocks_are_told_with_how_long_a_run_would_do() -> None:
    (warning,) = run(duration_s=24).warnings
    assert warning.startswith("blocks of 0.96 s are shorter than 10 limits or 200 requests")
    assert "a run of 25 s would do" in warning
    assert run(duration_s=25).warnings == ()
    (warning,) = run(rate_rps=100, duration_s=25).warnings  # 200 requests take 2 s
    assert "a run of 50 s would do" in warning
    assert run(None, duration_s=24).warnings == ()


@pytest.mark.parametrize(
    ("slo", "latency_ms", "limit_ms"),
    [
        (SLO, 10, 1.0),  # 1 % of 100 ms
        (SloSpec.parse("p99<100ms,p50<20ms"), 10, 0.2),  # of the tightest
        (None, 10, 1.0),  # without an SLO 1 ms, or …
        (None, 500, 5.0),  # … 1 % of the p99
        (SloSpec.parse("errors<1%"), 500, 5.0),
    ],
)
def test_the_send_lag_has_a_limit_also_without_an_slo(slo: SloSpec | None, latency_ms: float, limit_ms: float) -> None:
    late, in_time = (run(slo, latency_ms=latency_ms, lag_ms=limit_ms * times) for times in (1.01, 0.99))
    assert in_time.generator.send_lag_limit_ms == pytest.approx(limit_ms)
    assert (late.valid, in_time.valid) == (False, True)
    assert "send lag" in late.reasons[0]


def test_a_hundredth_of_the_requests_may_be_late_and_no_more() -> None:
    some = np.arange(5000) % 100 == 0
    assert run(lag_ms=np.where(some, 5.0, 0.0)).valid
    assert not run(lag_ms=np.where(some | (np.arange(5000) % 100 == 50), 5.0, 0.0)).valid


def test_requests_that_were_not_sent_in_time_make_a_run_invalid() -> None:
    # The last ones begin after the run's end, as a generator's that fell behind do.
    behind = np.zeros(5000)
    behind[-60:] = 1000.0
    fallen = run(lag_ms=behind)
    assert not fallen.valid
    assert any("sent in time, 99 % are needed" in reason for reason in fallen.reasons)
    behind[:-40] = 0.0
    assert run(lag_ms=behind).valid


@pytest.mark.parametrize(
    ("target", "warns"), [("http://localhost:1", True), ("http://127.0.0.1:1", True), ("http://elsewhere", False)]
)
def test_a_generator_that_takes_much_of_the_targets_own_machine_says_so(target: str, warns: bool) -> None:
    much, less = (run(target=target, cpu_s=25 * share * CORES) for share in (0.21, 0.19))
    assert bool(much.warnings) == warns
    assert not warns or f"the generator took {0.21 * CORES:.2f} of this machine's {counted(CORES, 'core')}," in much.warnings[0]
    assert less.warnings == ()
    assert much.generator.cpu_cores == pytest.approx(0.21 * CORES)


def test_a_rate_that_changes_by_design_is_about_a_mixture() -> None:
    pattern = "ramp:from=150,to=250"
    assert [warning for warning in run(pattern=pattern).warnings if "changes by design" in warning]
    assert not [warning for warning in run(None, pattern=pattern).warnings if "changes by design" in warning]


def test_a_drift_is_told_and_a_level_is_not() -> None:
    growing = 10 * np.exp(np.linspace(0, 2, 5000))
    assert not run(warmup_s=None, latency_ms=growing).steady
    assert [warning for warning in run(warmup_s=None, latency_ms=growing).warnings if "still drifts" in warning]
    assert run(warmup_s=None, latency_ms=10.0).warnings == ()


def test_a_warm_up_is_dropped_in_whole_blocks() -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.1, 5000)
    result = run(warmup_s=None, latency_ms=np.where(np.arange(5000) < 500, 300.0, 10.0) * noise)  # 2.5 s
    assert (result.warmup_s, result.warmup_requests) == (3.0, 600)
    assert [block.warmup for block in result.blocks[:4]] == [True, True, True, False]
    assert result.latency.max < 100
    assert (result.requests, result.window_s) == (4400, 22.0)


def test_a_run_without_a_success_has_no_latencies() -> None:
    assert [text for text in run(status=TIMEOUT).warnings if text.startswith("no request succeeded")]
    assert run(status=TIMEOUT).errors == {"timeout": 5000}
    nothing = run(status=0)
    assert [text for text in nothing.warnings if text.startswith("no request was answered or failed")]
    assert not [text for text in nothing.warnings if "succeeded" in text]


def test_a_run_that_ended_early_has_the_blocks_it_reached() -> None:
    result = run(until_s=10.5)
    assert (len(result.blocks), result.partial, result.requests) == (11, True, 2100)
    assert result.asked_rps == pytest.approx(200)
    assert result.goodput_rps == pytest.approx(200)
