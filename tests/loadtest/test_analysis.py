"""From a log to a result: each figure of it, on logs made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.process.machine import cores
from loadtest.load.patterns import Schedule
from loadtest.load.request_log import CUT, GRPC, MALFORMED, OK, PENDING, RESET, TIMEOUT, UNSENT, RequestLog
from loadtest.load.target import ServerStatistics
from loadtest.load.worker import SenderReport
from loadtest.results import LoadSpec, RunResult, SloSpec
from loadtest.verdict.analysis import Ended, decided, summarise
from loadtest.verdict.blocks import Grid, suffice
from loadtest.verdict.comparison import compare
from loadtest.verdict.stalls import Recording, Side

MS = 1_000_000
S = 1000 * MS
SPEC = LoadSpec("http://elsewhere", rate_rps=100, duration_s=25, slo=SloSpec.parse("p99<100ms"), warmup_s=0.0)
QUIET = SenderReport(0, 1.0, 25.0, 0.1, 2, {}, busy=0.1)


# The grid.


def grid(duration_s: float, rate_rps: float = 200, slo: str = "p99<100ms") -> tuple[float, float, int]:
    """Seconds of a block as it is and as it should be, and how many there are."""
    found = Grid.of(replace(SPEC, slo=SloSpec.parse(slo) if slo else None), round(duration_s * S), rate_rps)
    return found.block_ns / S, found.wanted_ns / S, found.blocks


def test_blocks_are_ten_limits_and_200_requests_long_where_the_run_allows_25_of_them() -> None:
    assert grid(60) == (1, 1, 60)
    assert grid(60, slo="p99<150ms") == (1.5, 1.5, 40)
    assert grid(60, slo="p99<150ms,p50<20ms") == (1.5, 1.5, 40)  # the longest limit counts
    assert grid(60, 100) == (2, 2, 30)
    assert grid(60, 100, "") == (2, 2, 30)
    assert grid(60, 100, "errors<1%") == (2, 2, 30)
    assert grid(10) == (0.4, 1, 25)
    assert grid(25.9) == (1.036, 1, 25)
    assert grid(1000) == (5, 1, 200)
    assert grid(60, 0.5)[:2] == (2.4, 400)
    assert grid(25, 0)[2] == 25  # nothing was sent


def test_a_block_that_does_not_divide_the_run_is_rounded_up() -> None:
    found = Grid.of(SPEC, 10 * S + 1, 200)
    assert (found.block_ns, found.blocks) == (400_000_001, 25)


@pytest.mark.parametrize(("elapsed_ns", "blocks"), [(0, 1), (1, 1), (S, 1), (S + 1, 2), (7 * S, 7), (60 * S, 60), (90 * S, 60)])
def test_a_run_that_ended_early_has_the_blocks_it_began(elapsed_ns: int, blocks: int) -> None:
    assert Grid(S, 2 * S, 60).until(elapsed_ns) == Grid(S, 2 * S, blocks)


# A run of 100/s for 25 s from 1 ms on, in blocks of one second, each request answered in 10 ms.


def log_of(
    intended: np.ndarray,
    *,
    lag_ms: dict[int, float] | None = None,
    wait_ms: dict[int, float] | None = None,
    took_ms: dict[int, float] | None = None,
    status: dict[int, int] | None = None,
) -> RequestLog:
    """lag, wait: before it was dispatched, and before it got a connection. took: from the intended time on."""
    log = RequestLog(len(intended))
    lag, wait, took = (np.zeros(len(intended)), np.zeros(len(intended)), np.full(len(intended), 10.0))
    for values, known in ((lag, lag_ms), (wait, wait_ms), (took, took_ms)):
        for row, ms in (known or {}).items():
            values[row] = ms
    np.asarray(log.intended)[:] = intended
    np.asarray(log.dispatched)[:] = intended + (lag * MS).astype(np.int64)
    np.asarray(log.sent)[:] = np.asarray(log.dispatched) + (wait * MS).astype(np.int64)
    np.asarray(log.done)[:] = intended + (took * MS).astype(np.int64)
    np.asarray(log.status)[:] = OK
    for row, kind in (status or {}).items():
        log.status[row] = kind
    return log


def run(
    *,
    spec: LoadSpec = SPEC,
    reports: Sequence[SenderReport] = (QUIET,),
    statistics: tuple[ServerStatistics, ServerStatistics] | None = None,
    recording: Recording | None = None,
    until_s: float = 25.0,
    users: int = 0,
    never_sent: Sequence[int] = (),
    **log: Any,
) -> RunResult:
    """never_sent: rows without a first byte."""
    intended = ((np.arange(2500) * 10 + 1) * MS).astype(np.int64)
    plan = Schedule(intended if not users else intended[:0], 25 * S, ((0.0, 25.0, "constant"),), True, users=users)
    filled = log_of(intended, **log)
    for row in never_sent:
        filled.sent[row] = 0
    ended = Ended("from", "until", round(until_s * S), until_s < 25)
    rows = np.flatnonzero(intended < until_s * S)
    before, after = statistics or (None, None)
    return summarise(spec, plan, filled, rows, reports, ended, before, after, recording)


def test_requests_are_counted_by_what_became_of_them() -> None:
    kinds = {100: TIMEOUT, 200: 503, 201: 503, 300: RESET, 400: MALFORMED, 500: GRPC + 14, 600: CUT, 700: PENDING, 800: UNSENT}
    found = run(status=kinds)
    assert (found.requests, found.succeeded, found.failed, found.excluded) == (2497, 2491, 6, 3)
    assert found.errors == {"timeout": 1, "reset": 1, "malformed": 1, "http 503": 2, "grpc UNAVAILABLE": 1}
    assert (found.window_s, found.sent_rps, found.succeeded_rps) == (25, 100, pytest.approx(2491 / 25))
    assert found.goodput_rps == pytest.approx(2491 / 25)
    assert (found.started_at, found.ended_at, found.partial, found.server) == ("from", "until", False, None)


def test_what_was_cut_off_after_a_limit_is_a_miss_of_it_and_no_failure() -> None:
    slo = SloSpec.parse("p99<1s,service.p50<200ms,errors<1%")
    waited = {row: 1010.0 if row < 2450 else 190.0 for row in range(2400, 2500)} | {2499: 700.0}
    found = run(spec=replace(SPEC, slo=slo), took_ms=waited, wait_ms={2499: 550.0}, status=dict.fromkeys(waited, CUT))
    assert (found.requests, found.succeeded, found.overdue, found.failed, found.excluded) == (2450, 2400, 50, 0, 50)
    assert (found.error_rate, found.errors, found.latency.max) == (0, {}, 10)
    assert found.attainment is not None
    assert found.attainment.estimate == pytest.approx(2400 / 2450)
    assert [(one.attainment.estimate, one.verdict) for one in found.objectives][1:] == [
        (pytest.approx(2400 / 2450), "pass"),
        (1.0, "pass"),
    ]
    assert found.objectives[0].attainment.estimate == pytest.approx(2400 / 2450)
    last = found.blocks[-1]
    assert (last.requests, last.succeeded, last.failed, last.met, last.overdue, last.errors) == (50, 0, 0, 0, 50, {})
    without = run(spec=replace(SPEC, slo=None), took_ms=waited, status=dict.fromkeys(waited, CUT))
    assert (without.requests, without.overdue, without.excluded) == (2400, 0, 100)


def test_latency_and_service_are_of_those_that_succeeded() -> None:
    found = run(
        took_ms={1: 60.0, 2: 90.0, 3: 400.0}, lag_ms={2: 20.0}, wait_ms={1: 10.0, 2: 30.0}, status={3: TIMEOUT}, never_sent=(4,)
    )
    assert (found.latency.max, found.latency.p50) == (90, 10)
    assert found.latency.mean == pytest.approx((2497 * 10 + 150) / 2499)
    assert (found.service.max, found.service.p50) == (50, 10)  # 60 less 10; 90 less 50 is 40
    assert found.service.mean == pytest.approx((2496 * 10 + 0 + 50 + 40) / 2499)
    assert sum(count for _, count in found.latency_histogram) == 2499


def test_what_meets_the_slo_is_the_goodput() -> None:
    late = dict.fromkeys(range(0, 2500, 100), 101.0)
    found = run(took_ms=late, status={1: 503})
    assert found.goodput_rps == pytest.approx((2500 - 25 - 1) / 25)
    assert found.attainment is not None
    assert found.attainment.estimate == pytest.approx(2474 / 2500)
    assert [block.met for block in found.blocks] == [98] + [99] * 24
    assert [block.failed for block in found.blocks] == [1] + [0] * 24
    assert run(took_ms=late, spec=replace(SPEC, slo=None)).goodput_rps == 100


def test_a_block_tells_of_its_own_requests() -> None:
    middle = {row: float(row - 500) for row in range(500, 600)}  # 0 to 99 ms
    found = run(took_ms=middle, status=dict.fromkeys(range(700, 800), 503))
    assert len(found.blocks) == 25
    fifth = found.blocks[5]
    assert (fifth.index, fifth.start_s, fifth.duration_s, fifth.requests) == (5, 5, 1, 100)
    assert (fifth.p50_ms, fifth.p99_ms, fifth.mean_ms) == (49, 98, 49.5)
    dead = found.blocks[7]
    assert (dead.requests, dead.failed, dead.met, dead.p50_ms, dead.p99_ms, dead.mean_ms) == (100, 100, 0, None, None, None)
    assert found.blocks[6].mean_ms == found.blocks[8].mean_ms == 10


def test_a_warm_up_ends_with_a_block_and_counts_for_nothing() -> None:
    found = run(spec=replace(SPEC, warmup_s=2.1), took_ms=dict.fromkeys(range(250), 90.0), status={0: 503, 1: CUT})
    assert (found.warmup_s, found.window_s, found.warmup_requests) == (3, 22, 299)
    assert (found.requests, found.excluded, found.failed, found.latency.max) == (2200, 0, 0, 10)
    assert [block.warmup for block in found.blocks] == [True] * 3 + [False] * 22
    assert (found.sent_rps, found.asked_rps) == (100, 100)
    assert run(spec=replace(SPEC, warmup_s=2.0)).warmup_s == 2
    assert run(spec=replace(SPEC, warmup_s=90.0)).warmup_s == 24  # one block is left


def test_a_drift_at_the_start_is_cut_off_where_nothing_else_is_said() -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.1, 2500)
    spec = replace(SPEC, warmup_s=None)
    level = dict(enumerate((10 * noise).tolist()))
    assert (run(spec=spec, took_ms=level).warmup_s, run(spec=spec, took_ms=level).steady) == (0, True)
    slow = level | {row: 50 * noise[row] for row in range(220)}
    assert run(spec=spec, took_ms=slow).warmup_s == 3
    much = level | {row: 50 * noise[row] for row in range(900)}
    assert run(spec=spec, took_ms=much).warmup_s <= 5  # a fifth
    # Of few that ended in the first ten seconds, and many slow ones behind them: still a fifth.
    sparse = dict.fromkeys((row for row in range(1000) if row % 10), PENDING)
    late = run(spec=spec, took_ms=level | {row: 50 * noise[row] for row in range(1250)}, status=sparse)
    assert late.warmup_s == 5
    assert run(spec=spec, status=dict.fromkeys(range(2500), PENDING)).steady


def test_the_generator_is_described_by_all_its_processes() -> None:
    reports = [
        SenderReport(0, 5.0, 25.0, 0.3, 2, {"http 503": "one"}, busy=0.2),
        SenderReport(0, 7.5, 15.0, 0.2, 5, {"timeout": "two"}, busy=0.4),
        SenderReport(0, 1.0, 0.0, 0.0, 0, {}),  # it never began
    ]
    lag, wait = dict.fromkeys(range(30), 0.9), dict.fromkeys(range(100, 140), 4.0)
    found = run(reports=reports, lag_ms=lag, wait_ms=wait | {5: 99.0}, never_sent=(5,))
    own = found.generator
    assert (own.cpu_cores, own.connections, own.processes, own.loop_lag_p99_ms) == (pytest.approx(0.7), 7, 3, 0.3)
    assert (own.send_lag_p50_ms, own.send_lag_p99_ms, own.send_lag_limit_ms) == (0, pytest.approx(0.9), 1)
    assert own.connection_wait_p99_ms == pytest.approx(4)
    assert own.cores == cores()  # not those of the machine that this process may not use
    rising = run(lag_ms={row: 0.9 * row / 2499 for row in range(2500)}).generator
    assert (rising.send_lag_p50_ms, rising.send_lag_p99_ms) == (pytest.approx(0.45, abs=1e-4), pytest.approx(0.891, abs=1e-4))
    assert found.error_samples == {"http 503": "one", "timeout": "two"}
    assert found.valid


def test_a_run_that_ended_early_counts_until_then() -> None:
    found = run(until_s=10.0, status={999: PENDING})
    assert (found.partial, found.window_s, len(found.blocks)) == (True, 10, 10)
    assert (found.requests, found.excluded, found.sent_rps, found.asked_rps) == (999, 1, 100, 100)


@pytest.mark.parametrize("users", [0, 4])
def test_the_last_block_of_a_run_that_ended_early_ends_with_it(users: int) -> None:
    spec = replace(SPEC, pattern="users:count=4" if users else "poisson")
    whole, early = run(spec=spec, users=users), run(spec=spec, until_s=22.25, users=users)
    *before, last = early.blocks
    assert {block.duration_s for block in (*before, *whole.blocks)} == {1}
    assert (last.start_s, last.duration_s, last.requests, last.asked) == (22, 0.25, 25, 0 if users else 25)
    assert suffice(early.blocks, replace(SPEC, rate_rps=200))
    if users:
        (answered,) = (metric for metric in compare(whole, early).metrics if metric.name == "answered (1/s)")
        assert (answered.change, answered.verdict) == (pytest.approx(0), "same")


def test_a_run_that_ended_before_its_first_request_was_due_says_so() -> None:
    found = run(until_s=0.0005)
    assert (found.requests, found.excluded, found.sent_rps, len(found.blocks)) == (0, 0, 0, 1)
    assert (found.generator.send_lag_p99_ms, found.generator.connection_wait_p99_ms) == (0, 0)
    assert (found.verdict, found.attainment, found.latency.count, found.p99_interval_ms) == ("undecided", None, 0, (None, None))
    assert "nothing can be said" in found.warnings[0]


def test_a_closed_loop_asks_for_what_it_sent_and_has_no_fault_of_lag() -> None:
    found = run(users=4, lag_ms=dict.fromkeys(range(2500), 5.0))
    assert (found.asked_rps, found.sent_rps, found.valid) == (100, 100, True)
    assert len(found.blocks) == 25


def test_a_sender_without_time_to_spare_asks_for_less_than_the_target_might_answer() -> None:
    def busy(share: float, users: int) -> list[str]:
        warnings = run(users=users, reports=[replace(QUIET, busy=share), QUIET]).warnings
        return [line for line in warnings if line.startswith("the process that sends was busy")]

    assert busy(0.86, 4) == ["the process that sends was busy 86% of the time: the target may answer more than it can ask"]
    assert busy(1.2, 4)[0].startswith("the process that sends was busy 100% of the time")
    assert busy(0.85, 4) == busy(0.86, 0) == []


def test_more_requests_are_needed_only_if_they_would_decide_every_objective() -> None:
    # 1.6 % of the requests take over 50 ms, in a few bursts.
    bursts = {row: 60.0 for start in range(0, 2500, 250) for row in range(start, start + 2)}
    near = run(spec=replace(SPEC, slo=SloSpec.parse("p99<50ms,p98<70ms")), took_ms=bursts)
    assert near.verdict == "undecided"
    assert near.requests_needed is not None
    assert near.requests_needed == max(o.requests_needed or 0 for o in near.objectives) > 0
    share = dict.fromkeys(range(0, 2500, 100), 60.0)  # just what may miss: no number decides
    never = run(spec=replace(SPEC, slo=SloSpec.parse("p99<50ms,p98<70ms")), took_ms=share)
    assert (never.verdict, never.requests_needed) == ("undecided", None)
    assert run(spec=replace(SPEC, slo=None)).requests_needed is None


def test_what_the_server_counted_is_a_mean_per_request() -> None:
    before, after = ServerStatistics(100, 1 * S, 2 * S, 300, 60), ServerStatistics(2600, 3 * S + S // 2, 12 * S, 10_300, 2560)
    server = run(statistics=(before, after), wait_ms={0: 5.0}, status={7: 503}).server
    assert server is not None
    assert (server.requests, server.queue_ms, server.compute_ms, server.rows_per_execution) == (2500, 1.0, 4.0, 4.0)
    assert server.overhead_ms == pytest.approx(10 - 5 / 2499 - 5)
    assert run(statistics=(after, after)).server is None
    idle = run(statistics=(before, replace(after, executions=60))).server
    assert idle is not None
    assert idle.rows_per_execution == 0
    shared = run(statistics=(before, replace(after, requests=5100))).server
    assert shared is not None
    assert (shared.requests, shared.queue_ms) == (5000, 0.5)


@pytest.mark.parametrize("fewer", ["requests", "queue_ns", "compute_ns", "rows", "executions"])
def test_totals_that_fell_in_the_run_are_of_no_use(fewer: str) -> None:
    before, after = ServerStatistics(100, 1 * S, 2 * S, 300, 60), ServerStatistics(2600, 3 * S, 12 * S, 10_300, 2560)
    found = run(statistics=(before, replace(after, **{fewer: getattr(before, fewer) - 1})))
    assert found.server is None
    assert [warning for warning in found.warnings if "totals do not cover the run" in warning]


def test_a_server_that_counted_fewer_requests_than_it_answered_was_started_anew() -> None:
    before = ServerStatistics(100, 1 * S, 2 * S, 300, 60)

    def counted(requests: int) -> RunResult:
        return run(statistics=(before, ServerStatistics(100 + requests, 9 * S, 9 * S, 9000, 9000)))

    assert counted(2200).server is not None  # those of 3 s may be counted behind their answers
    assert counted(2200).warnings == counted(2500).warnings == counted(0).warnings
    assert counted(2199).server is None
    assert len(counted(2199).warnings) == len(counted(2200).warnings) + 1


def test_the_p99_has_an_interval_where_requests_can_tell() -> None:
    noise = dict(enumerate(np.random.default_rng(0).lognormal(2, 0.5, 2500).tolist()))
    found = run(took_ms=noise)
    low, high = found.p99_interval_ms
    assert low is not None
    assert high is not None
    assert low < found.latency.p99 < high < 1.5 * found.latency.p99
    assert run(status=dict.fromkeys(range(2500), 503)).p99_interval_ms == (None, None)
    assert run(status=dict.fromkeys(range(20, 2500), 503)).p99_interval_ms[1] is None  # 20 requests have no p99


# Other work on the machine.


def recording(
    *, others_ms: float = 0.0, steal_ms: float = 0.0, generator_ms: float = 0.0, server: tuple[int, ...] = (0,)
) -> Recording:
    """In periods of 100 ms: others have the server's core, and the generator's, for so long at the start of each second."""
    hits = np.zeros(250, np.int64)
    hits[::10] = 1
    none = np.zeros(250, np.int64)
    taken, stolen, kept = (hits * round(ms * MS) for ms in (others_ms, steal_ms, generator_ms))
    late = np.array([(0, at * 100 * MS, at * 100 * MS + round(steal_ms * MS)) for at in range(0, 250, 10)], np.int64)
    return Recording(
        np.arange(251) * 100 * MS,
        Side(server, none, taken, taken, stolen),
        Side((1,), none, kept, kept, none),
        np.full(250, MS, np.int64),
        late if steal_ms else late[:0],
        (("backup", 5 * S), ("editor", S), ("cron", S // 4), ("idle", 1)),
    )


def test_what_other_work_did_is_told_in_shares_of_the_measured_time() -> None:
    found = run(recording=recording(others_ms=20, generator_ms=10), spec=replace(SPEC, warmup_s=5.0)).machine
    assert found is not None
    assert (found.candidate_cores, found.generator_cores) == ((0,), (1,))
    assert (found.taken_share, found.generator_taken_share) == (pytest.approx(0.02), pytest.approx(0.01))
    assert found.others == (("backup", 0.2), ("editor", 0.04), ("cron", 0.01))
    assert (found.steal_share, found.longest_hiccup_ms, found.meter_cores) == (0, 0, pytest.approx(0.01))
    assert (found.marked, found.marked_share, found.without_marked, found.disturbed) == (0, 0, "pass", False)


def test_what_other_work_did_in_the_warm_up_is_not_told_of_the_measured_time() -> None:
    hit = recording(others_ms=20)
    early = np.where(np.arange(250) < 50, hit.candidate.others, 0)
    found = run(
        recording=replace(hit, candidate=replace(hit.candidate, others=early)), spec=replace(SPEC, warmup_s=5.0), until_s=24.0
    ).machine
    assert found is not None
    assert found.taken_share == 0


def test_steal_is_a_share_of_the_cores_that_are_watched() -> None:
    two = recording(steal_ms=30)
    found = run(recording=replace(two, candidate=replace(two.candidate, cores=(0, 5)))).machine
    assert found is not None
    assert (found.steal_share, found.longest_hiccup_ms) == (pytest.approx(0.015), 30)
    unseen = recording(steal_ms=30, server=())
    found = run(recording=replace(unseen, generator=replace(unseen.generator, steal=unseen.candidate.steal // 3))).machine
    assert found is not None
    assert found.steal_share == pytest.approx(0.01)  # of the generator's
    assert found.longest_hiccup_ms == 0  # of the cores that are watched


def test_much_that_was_taken_is_a_warning_with_who_took_it() -> None:
    def busy(**hits: float) -> list[str]:
        return [line for line in run(recording=recording(**hits)).warnings if line.startswith("the machine was busy")]  # type: ignore[arg-type]

    (warning,) = busy(others_ms=60)
    assert warning.startswith(
        "the machine was busy with other work (backup 0.20 cores, editor 0.04 cores, cron 0.01 cores), which had a core that "
        "the server was ready to use for 6% of the time"
    )
    assert busy(others_ms=50) == []
    assert "other virtual machines 6.0%)" in busy(steal_ms=60)[0]


def late_rows(count: int, ms: float = 130.0) -> dict[int, float]:
    """So many requests at the start of each second, while others have the core, take so long."""
    return {second * 100 + row: ms for second in range(25) for row in range(count)}


@pytest.mark.parametrize(("ms", "marked"), [(130, 75), (159, 75), (161, 0), (100, 0)])
def test_who_would_have_met_the_limit_without_what_was_taken_is_marked(ms: float, marked: int) -> None:
    # 60 ms are taken at the start of each second.
    found = run(recording=recording(others_ms=60), took_ms=late_rows(3, ms))
    assert found.machine is not None
    assert found.machine.marked == marked
    assert sum(block.marked for block in found.blocks) == marked
    assert found.machine.marked_share == pytest.approx(marked / 2500)


def test_a_verdict_that_hangs_on_other_work_is_none() -> None:
    found = run(recording=recording(others_ms=60), took_ms=late_rows(3))
    assert (found.valid, found.verdict) == (False, None)
    assert found.reasons == (
        "the machine was busy with other work (backup 0.20 cores, editor 0.04 cores, cron 0.01 cores), and the verdict hangs "
        "on it: fail with the 75 requests (3.0%) that this may have made late, pass without them: end that work, or measure "
        "again when it has ended",
    )
    assert found.machine is not None
    assert (found.machine.without_marked, found.machine.disturbed) == ("pass", True)


def also_late(count: int) -> dict[int, float]:
    """So many requests of each second take long by themselves."""
    return {second * 100 + row: 200.0 for second in range(25) for row in range(50, 50 + count)}


def test_one_in_twenty_that_is_marked_is_borne_and_more_are_not() -> None:
    spec = replace(SPEC, slo=SloSpec.parse("p50<100ms"))
    borne = run(spec=spec, recording=recording(others_ms=60), took_ms=late_rows(5) | also_late(50))
    assert (borne.valid, borne.verdict) == (True, "fail")
    more = run(spec=spec, recording=recording(others_ms=60), took_ms=late_rows(6) | also_late(50))
    assert more.machine is not None
    assert (more.verdict, more.machine.without_marked, more.machine.disturbed) == (None, "fail", True)
    assert more.reasons == (
        "the machine was busy with other work (backup 0.20 cores, editor 0.04 cores, cron 0.01 cores): it may have made 6.0% "
        "of the requests miss the SLO, 5 % are borne: end that work, or measure again when it has ended",
    )


def other_work(found: RunResult) -> str:
    (told,) = [line for line in found.warnings if line.startswith("the machine was busy with other work")]
    return told


@pytest.mark.parametrize("users", [0, 1])
@pytest.mark.parametrize("status", [503, GRPC + 14])
@pytest.mark.parametrize("slo", ["p99<100ms", "p99<100ms,errors<0%"])
def test_an_outage_is_a_fail_whatever_else_the_machine_does(users: int, status: int, slo: str) -> None:
    outage = run(
        spec=replace(SPEC, slo=SloSpec.parse(slo)),
        users=users,
        recording=recording(others_ms=60),
        took_ms=dict.fromkeys(range(2500), 20.0),
        status=dict.fromkeys(range(2500), status),
    )
    assert outage.machine is not None
    assert (outage.machine.marked, outage.machine.disturbed) == (548, False)
    assert (outage.valid, outage.reasons, outage.verdict) == (True, (), "fail")
    assert other_work(outage) == (
        "the machine was busy with other work (backup 0.20 cores, editor 0.04 cores, cron 0.01 cores): it may have made 21.9% "
        "of the requests miss the SLO, but the others miss it even if those had met it"
    )


def test_an_outage_is_a_fail_where_others_also_kept_the_generator_from_its_core() -> None:
    kept = recording(others_ms=60, generator_ms=30)
    late = {second * 100 + row: 5.0 for second in range(25) for row in range(6)}
    down = run(recording=kept, lag_ms=late, status=dict.fromkeys(range(2500), 500))
    assert (down.valid, down.verdict) == (True, "fail")
    shaky = run(recording=kept, lag_ms=late, status=dict.fromkeys(late, 500))  # those who were sent late, and nobody else
    assert (shaky.valid, shaky.verdict) == (False, None)


def test_an_slo_that_is_met_with_what_others_delayed_is_met() -> None:
    spec = replace(SPEC, slo=SloSpec.parse("p80<100ms"))
    found = run(spec=spec, recording=recording(others_ms=60), took_ms=late_rows(6))
    assert (found.valid, found.verdict) == (True, "pass")
    assert other_work(found).endswith(": it may have made 6.0% of the requests miss the SLO, which is met all the same")


@pytest.mark.parametrize(("status", "marked"), [(TIMEOUT, 75), (503, 75), (504, 75), (GRPC + 4, 75), (GRPC + 14, 75), (500, 0)])
def test_a_failure_is_marked_where_it_is_one_of_being_late(status: int, marked: int) -> None:
    failed = dict.fromkeys(late_rows(3), status)
    found = run(recording=recording(others_ms=60), took_ms=late_rows(3, 90.0), status=failed).machine
    assert found is not None
    assert found.marked == marked


def test_a_small_debt_explains_no_failure_and_next_to_none_no_delay() -> None:
    failed = dict.fromkeys(late_rows(3), 503)
    for others_ms, marked in ((11, 75), (9, 0)):  # a tenth of the limit; a period's 5 ms are no stall at all
        machine = run(recording=recording(others_ms=others_ms), took_ms=late_rows(3, 90.0), status=failed).machine
        assert machine is not None
        assert machine.marked == marked
    wide = replace(SPEC, slo=SloSpec.parse("p99<1000ms"))
    for others_ms, marked in ((11, 75), (9, 0)):  # a hundredth of the limit
        machine = run(spec=wide, recording=recording(others_ms=others_ms), took_ms=late_rows(3, 1005.0)).machine
        assert machine is not None
        assert machine.marked == marked


def test_lag_that_others_caused_is_borne_up_to_one_in_twenty_and_without_an_slo_not_at_all() -> None:
    def sent_late(count: int, spec: LoadSpec = SPEC, kept_ms: float = 30.0, lag_ms: float = 5.0) -> RunResult:
        return run(spec=spec, recording=recording(generator_ms=kept_ms), lag_ms=dict.fromkeys(late_rows(count), lag_ms))

    borne = sent_late(5)
    assert borne.generator.send_lag_p99_ms == 5
    assert (borne.valid, borne.verdict) == (True, "pass")
    often = sent_late(6)
    assert often.reasons == (
        "the machine was busy with other work (backup 0.20 cores, editor 0.04 cores, cron 0.01 cores) and kept the load "
        "generator from its core: 6.0% of the requests were sent over 1 ms late: end that work, or measure again when it has "
        "ended",
    )
    assert often.machine is not None
    assert often.machine.disturbed
    assert "6.0% of the requests were sent over 1 ms late" in sent_late(6, lag_ms=30.9).reasons[0]  # 0.9 ms are its own
    assert sent_late(6, lag_ms=31.1).reasons[0].startswith("send lag p99 31.1 ms is above 1 ms")
    assert not sent_late(2, replace(SPEC, slo=None)).valid
    for spec in (SPEC, replace(SPEC, slo=None)):
        alone = sent_late(2, spec, kept_ms=0.0)
        assert alone.reasons[0].startswith("send lag p99 5 ms is above 1 ms")
        assert alone.machine is not None
        assert (len(alone.reasons), alone.machine.disturbed) == (1, False)


def test_a_sequential_test_is_not_decided_by_what_other_work_did() -> None:
    intended = (np.arange(2500) * 10 * MS).astype(np.int64)
    log = log_of(intended, took_ms=late_rows(3))
    blocks = Grid.of(SPEC, 25 * S, 200)
    assert decided(SPEC, log, blocks, 25, 0.95)
    assert not decided(SPEC, log, blocks, 25, 0.95, recording(others_ms=60))
    assert decided(SPEC, log, blocks, 25, 0.95, recording(others_ms=20))  # which changes nothing
    down = log_of(intended, took_ms=dict.fromkeys(range(2500), 20.0), status=dict.fromkeys(range(2500), 503))
    assert decided(SPEC, down, blocks, 25, 0.95, recording(others_ms=60))  # a tenth is marked, the others decide
    many = replace(SPEC, slo=SloSpec.parse("p50<100ms"))
    hangs = log_of(intended, took_ms=late_rows(6) | also_late(50))
    assert not decided(many, hangs, blocks, 25, 0.95, recording(others_ms=60))  # it would be INVALID
    near = log_of(intended, took_ms=dict.fromkeys(range(0, 2500, 100), 130.0))
    assert not decided(SPEC, near, blocks, 25, 0.95)  # just what may miss
    fine = log_of((np.arange(3500) * 10 * MS).astype(np.int64))
    assert decided(SPEC, fine, Grid.of(SPEC, 35 * S, 200), 35, 0.95, recording(others_ms=60))


def test_a_pass_takes_half_a_minute_behind_the_warm_up_and_a_fail_does_not() -> None:
    intended, whole = (np.arange(6000) * 10 * MS).astype(np.int64), Grid(S, S, 60)
    fine, late = log_of(intended), log_of(intended, took_ms=dict.fromkeys(range(6000), 130.0))
    for spec, blocks in ((SPEC, 30), (replace(SPEC, warmup_s=4.0), 34)):
        assert not decided(spec, fine, whole, blocks - 1, 0.95)
        assert decided(spec, fine, whole, blocks, 0.95)
        assert decided(spec, late, whole, blocks - 10, 0.95)


def test_a_sequential_test_without_a_warm_up_finds_it() -> None:
    intended = (np.arange(3000) * 15 * MS).astype(np.int64)
    noise = np.random.default_rng(0).lognormal(0, 0.1, 3000)
    slow = {row: (300 if row < 350 else 10) * noise[row] for row in range(3000)}
    spec, blocks = replace(SPEC, warmup_s=None), Grid(3 * S // 2, S, 30)
    assert not decided(spec, log_of(intended, took_ms=slow), blocks, 23, 0.95)  # of which four are warm-up, the last in part
    assert decided(spec, log_of(intended, took_ms=slow), blocks, 24, 0.95)


def test_a_sequential_test_counts_the_blocks_that_the_result_does() -> None:
    spec, log = replace(SPEC, warmup_s=3.75), log_of((np.arange(3000) * 15 * MS).astype(np.int64))
    whole = Grid(3 * S // 2, S, 30)
    assert not decided(spec, log, whole, 22, 0.95)  # the third is warm-up in part
    assert decided(spec, log, whole, 23, 0.95)


def test_a_run_that_will_hardly_pass_may_end_undecided() -> None:
    log = log_of((np.arange(2500) * 10 * MS).astype(np.int64), took_ms=dict.fromkeys(range(1000, 1008), 130.0))
    whole = Grid(S, S, 29)
    assert not decided(SPEC, log, whole, 22, 0.95)  # one stall, from which nothing follows for the others
    assert decided(SPEC, log, whole, 22, 0.95, or_lost=True)
    assert not decided(SPEC, log, whole, 22, 0.95, recording(others_ms=60), or_lost=True)  # that may have been others' work


def test_how_much_of_a_run_is_left_is_reckoned_behind_the_warm_up_and_marked_requests_count() -> None:
    intended = (np.arange(2500) * 10 * MS).astype(np.int64)
    own = log_of(intended, took_ms=dict.fromkeys(range(410, 2400, 125), 200.0))
    warm = replace(SPEC, warmup_s=4.0)
    # 16 of 2000: of twice 3400 that is too many to pass, of twice 3500 not.
    assert decided(warm, own, Grid(S, S, 38), 24, 0.95, or_lost=True)
    assert not decided(warm, own, Grid(S, S, 39), 24, 0.95, or_lost=True)
    both = log_of(intended, took_ms=late_rows(6) | dict.fromkeys(range(55, 2400, 126), 200.0))
    assert decided(SPEC, both, Grid(S, S, 40), 22, 0.95, recording(others_ms=60), or_lost=True)  # 18 of 2200
    assert not decided(SPEC, both, Grid(S, S, 44), 22, 0.95, recording(others_ms=60), or_lost=True)
