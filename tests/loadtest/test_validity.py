"""When a run is INVALID, what that does to its verdict, and what the user is told to do."""

import os
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from loadtest.commands.run import exit_code
from loadtest.load.patterns import schedule
from loadtest.load.request_log import CUT, OK, UNSENT, RequestLog
from loadtest.load.worker import SenderReport
from loadtest.reports.run_page import render
from loadtest.reports.terminal import print_run, remedy
from loadtest.results import GeneratorReport, LoadSpec, MachineReport, RunResult, SloSpec
from loadtest.verdict.analysis import Ended, faults, summarise
from tests.loadtest.made_results import run_result

ELSEWHERE = LoadSpec(
    "http://elsewhere:8000", model="m", rate_rps=100, duration_s=10, warmup_s=0.0, slo=SloSpec.parse("p90<50ms")
)
HERE = replace(ELSEWHERE, target="http://127.0.0.1:8000")
CORES = 4  # of the machine that the run was on, whatever this one has
QUIET = GeneratorReport(0.01, 0.1, 0.5, 0.1, 0.0, 8, 0.1, 1, CORES)


def found(
    generator: GeneratorReport, spec: LoadSpec = ELSEWHERE, *, busy: float = 0.1, in_time: int = 100, met: bool = False
) -> str:
    return " ".join(
        faults(spec, generator, own_lag_p99_ms=generator.send_lag_p99_ms, busy=busy, due=100, in_time=in_time, met=met)
    )


def test_a_generator_that_keeps_its_moments_has_no_fault() -> None:
    assert found(QUIET) == ""
    assert found(replace(QUIET, send_lag_p99_ms=0.5)) == ""  # at the limit, not above
    assert found(QUIET, in_time=99) == ""


def test_lag_above_the_limit_is_a_fault() -> None:
    assert found(replace(QUIET, send_lag_p99_ms=0.51)) == (
        "send lag p99 0.51 ms is above 0.5 ms, 1 % of the SLO's tightest limit"
    )
    without = found(replace(QUIET, send_lag_p99_ms=0.51), replace(ELSEWHERE, slo=None))
    assert without.endswith("1 % of the p99, and at least 1 ms")


def test_fewer_than_99_percent_sent_in_time_are_a_fault() -> None:
    assert found(QUIET, in_time=98) == "only 98.0% of the asked requests were sent in time, 99 % are needed"


def test_requests_that_wait_for_a_busy_process_are_its_fault_as_well() -> None:
    waiting = replace(QUIET, connection_wait_p99_ms=0.51)
    assert "busy 86% of the time" in found(waiting, busy=0.86)
    assert found(waiting, busy=0.85) == ""
    assert found(replace(waiting, connection_wait_p99_ms=0.5), busy=0.99) == ""
    assert found(waiting, busy=0.99, met=True) == ""


def test_a_target_that_shares_the_machine_with_a_greedy_generator_is_not_blamed() -> None:
    greedy = replace(QUIET, cpu_cores=0.76 * CORES, processes=CORES)
    assert found(greedy, HERE) == "the generator took 3.04 of this machine's 4 cores, on which the target runs as well"
    alone = replace(QUIET, cpu_cores=0.8, cores=1)  # as under `taskset -c 0`
    assert found(alone, HERE) == "the generator took 0.80 of this machine's 1 core, on which the target runs as well"
    assert found(greedy) == ""
    assert found(replace(greedy, cpu_cores=0.75 * CORES), HERE) == ""
    assert found(greedy, HERE, met=True) == ""


def test_no_fault_says_what_to_do() -> None:
    everything = replace(QUIET, send_lag_p99_ms=9, connection_wait_p99_ms=9, cpu_cores=CORES)
    assert "--" not in found(everything, HERE, busy=1, in_time=0)


def result(
    *, lag_ms: float = 0.0, spec: LoadSpec = ELSEWHERE, statuses: dict[int, int] | None = None, ended: Ended | None = None
) -> RunResult:
    """A run whose requests all took 1 ms. statuses: of rows that did not succeed."""
    plan = schedule(spec.pattern, rate_rps=spec.rate_rps, duration_s=spec.duration_s, seed=0)
    log = RequestLog(len(plan.intended_ns))
    np.asarray(log.intended)[:] = plan.intended_ns
    np.asarray(log.dispatched)[:] = plan.intended_ns + int(lag_ms * 1e6)
    np.asarray(log.sent)[:] = np.asarray(log.dispatched)
    np.asarray(log.done)[:] = np.asarray(log.sent) + 1_000_000
    np.asarray(log.status)[:] = OK
    for row, status in (statuses or {}).items():
        log.status[row] = status
    rows = np.flatnonzero(np.asarray(log.status) != UNSENT)
    report = SenderReport(log.size, 1.0, 10.0, 0.1, 8, {}, busy=0.1)
    return summarise(spec, plan, log, rows, (report,), ended or Ended("", "", plan.duration_ns, False), None, None)


def test_a_valid_run_has_its_verdict() -> None:
    good = result()
    assert (good.valid, good.reasons, good.verdict) == (True, (), "pass")
    assert [objective.verdict for objective in good.objectives] == ["pass"]
    assert exit_code(good) == 0


def test_an_invalid_run_decides_nothing() -> None:
    bad = result(lag_ms=2)
    assert (bad.valid, bad.verdict, bad.requests_needed) == (False, None, None)
    assert [objective.verdict for objective in bad.objectives] == ["undecided"]
    assert exit_code(bad) == 3


def test_a_fault_of_the_generator_makes_a_run_invalid_and_comes_first() -> None:
    broken = result(lag_ms=2, ended=Ended("", "", 5_000_000_000, True, ("sending process 1 of 2 was ended by SIGKILL",)))
    assert broken.reasons[0] == "sending process 1 of 2 was ended by SIGKILL"
    assert len(broken.reasons) == 2
    assert (broken.valid, broken.partial, broken.verdict) == (False, True, None)


def test_what_was_never_sent_or_cut_off_is_no_failure_of_the_target() -> None:
    part = result(statuses=dict.fromkeys(range(100), UNSENT) | {100: CUT})
    assert (part.failed, part.errors, part.excluded) == (0, {}, 1)
    assert "only 90.0% of the asked requests were sent in time" in part.reasons[0]
    assert part.sent_rps == pytest.approx(90)


@pytest.mark.parametrize("rate", [10, 93, 100.4])
@pytest.mark.parametrize("warmup_s", [0.0, 2.0])
def test_what_was_asked_is_what_the_user_typed(rate: float, warmup_s: float) -> None:
    assert result(spec=replace(ELSEWHERE, rate_rps=rate, warmup_s=warmup_s)).asked_rps == pytest.approx(rate, abs=0.05)


def test_a_rate_that_changes_by_design_asks_what_falls_into_the_window() -> None:
    ramp = result(spec=replace(ELSEWHERE, pattern="ramp:from=0,to=200", warmup_s=5.0))
    assert ramp.asked_rps == pytest.approx(150, rel=0.1)


def shown(run: RunResult, width: int = 200) -> str:
    console = Console(record=True, width=width, file=open(os.devnull, "w"))  # noqa: SIM115  # recorded, not written
    with console.file:
        print_run(run, console)
    return console.export_text()


def test_one_screen_has_one_signal() -> None:
    bad, good = shown(result(lag_ms=2)), shown(result())
    assert "INVALID" in bad
    assert "95 %" not in bad
    assert "undecided" not in bad
    assert "what to do: " in bad
    assert "SLO PASS" in good
    assert "INVALID" not in good
    page = render(result(lag_ms=2))
    assert "INVALID" in page
    assert "What to do: " in page
    assert "undecided" not in page
    assert "within the SLO, " not in page


@pytest.mark.parametrize("width", [200, 80, 40, 24])
@pytest.mark.parametrize(("latency_ms", "told"), [(1.5, "1.500"), (20_003.408, "20003.4"), (600_000.4, "600000")])
def test_every_latency_is_told_whole_however_narrow_the_terminal_is(width: int, latency_ms: float, told: str) -> None:
    found = shown(run_result(succeeded=100, service_ms=latency_ms), width)
    assert "…" not in found
    assert found.split().count(told) == 14


def test_where_percentiles_do_not_fit_in_a_line_each_has_one() -> None:
    run = run_result(succeeded=100, service_ms=20_003.4)
    assert "p99    20003.4  20003.4" in [line.rstrip() for line in shown(run, 40).splitlines()]
    assert "latency  20003.4  20003.4  20003.4  20003.4  20003.4  20003.4  20003.4" in shown(run, 80)


def test_where_other_work_made_it_invalid_the_machine_is_blamed() -> None:
    busy = MachineReport((0,), (1,), 0.2, 0.0, (("backup", 0.4),), 0.0, 30.0, 12, 0.1, "pass", 0.01, disturbed=True)
    disturbed = replace(result(), valid=False, verdict=None, reasons=("busy",), machine=busy)
    told = shown(disturbed)
    assert "INVALID: the machine was busy with other work; the figures say nothing of the target" in told
    assert "what to do: end what else runs on this machine" in told
    assert "Other work on this machine may have decided it" in render(disturbed)
    late = replace(result(lag_ms=2), machine=replace(busy, disturbed=False))
    for run in (late, result(lag_ms=2)):
        assert "INVALID: the generator did not do what was asked" in shown(run)
        assert "What was asked was not offered" in render(run)


def test_the_summary_says_asked_once_and_what_the_window_got() -> None:
    assert "asked 100.0/s; in the 10.0 s measured: sent 100.0/s, answered 100.0/s" in shown(result())


@pytest.mark.parametrize(
    ("generator", "words"),
    [
        (replace(QUIET, cpu_cores=0.2), "stop what else runs on this machine"),
        (replace(QUIET, cpu_cores=0.7 * CORES, processes=CORES), "more machines"),
        (replace(QUIET, send_lag_limit_ms=0.001), "a limit of 0.1 ms wants a lag below 1 µs"),
    ],
)
def test_what_to_do_depends_on_what_was_short(generator: GeneratorReport, words: str) -> None:
    assert words in remedy(replace(result(lag_ms=2), generator=generator))


def test_a_process_near_its_limit_is_told_to_share() -> None:
    told = remedy(replace(result(lag_ms=2), generator=replace(QUIET, cpu_cores=0.7)))
    assert "--processes 2" in told
    assert "--rate" in told
