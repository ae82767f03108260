"""Whose stall was it? On a simulated core, where that is known."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from loadtest.load.patterns import Schedule
from loadtest.load.request_log import OK, RequestLog
from loadtest.load.worker import SenderReport
from loadtest.results import LoadSpec, RunResult, SloSpec
from loadtest.verdict.analysis import Ended, decided, summarise
from loadtest.verdict.blocks import Grid
from loadtest.verdict.stalls import Delays, Recording, RecordingReader, Side, longest_hiccup_ms, stalls, taken
from tests.loadtest.simulated_core import MS, PERIOD_NS, Run, core, each_second, poisson

SECONDS = 12.0
WORK_MS = 2.0  # so the core carries 500/s
SLO = SloSpec.parse("p99<50ms")
SPEC = LoadSpec("http://127.0.0.1:1", model="m", rate_rps=1.0, duration_s=SECONDS, slo=SLO, warmup_s=0.0)


def recorded(
    *,
    cpu_ms: Sequence[float] = (0, 0, 0, 0),
    wait_ms: Sequence[float] = (0, 0, 0, 0),
    others_ms: Sequence[float] = (0, 0, 0, 0),
    steal_ms: Sequence[float] = (0, 0, 0, 0),
    late: Sequence[tuple[int, float, float]] = (),
    cores: tuple[int, ...] = (0,),
) -> Recording:
    """Of the candidate on its cores, in periods of 10 ms. late: core, from and until in ms."""
    ns = [(np.array(values) * MS).astype(np.int64) for values in (cpu_ms, wait_ms, others_ms, steal_ms)]
    none = np.zeros(len(cpu_ms), np.int64)
    return Recording(
        np.arange(len(cpu_ms) + 1) * PERIOD_NS,
        Side(cores, *ns),
        Side((1,), none, none, none, none),
        none,
        np.array([(core, due * MS, woke * MS) for core, due, woke in late], np.int64).reshape(-1, 3),
        (),
    )


def taken_ms(recording: Recording) -> list[float]:
    return [float(value) / MS for value in taken(recording, recording.candidate)]


def test_what_others_used_while_the_server_waited_was_taken() -> None:
    assert taken_ms(recorded(cpu_ms=[4, 0, 9, 0], wait_ms=[6, 10, 1, 0], others_ms=[6, 10, 1, 10])) == [6, 10, 1, 0]


def test_a_server_that_uses_its_core_itself_is_excused_nothing() -> None:
    # Its threads wait for one another, and the meter for them; others are busy, on whichever core.
    starved = recorded(cpu_ms=[10, 10, 10, 10], wait_ms=[30, 30, 30, 30], others_ms=[10, 10, 10, 10], late=[(0, 1, 39)])
    assert taken_ms(starved) == [0, 0, 0, 0]


def test_a_server_that_sleeps_is_excused_nothing() -> None:
    assert taken_ms(recorded(others_ms=[10, 10, 10, 10], late=[(0, 1, 39)])) == [0, 0, 0, 0]


def test_what_nobodys_cpu_time_explains_is_the_servers() -> None:
    assert taken_ms(recorded(wait_ms=[10, 10, 0, 0], late=[(0, 1, 19)])) == [0, 0, 0, 0]


def test_what_a_steady_background_uses_is_no_stall() -> None:
    assert taken_ms(recorded(wait_ms=[0.1] * 4, others_ms=[0.1, 0.4, 0.49, 3])) == [0, 0, 0, 0]


def test_no_more_is_taken_in_a_period_than_it_has_time() -> None:
    assert taken_ms(recorded(wait_ms=[80] * 4, others_ms=[30] * 4, cores=(0, 1, 2))) == [10] * 4


def test_a_system_that_does_not_tell_waits_has_them_from_the_meter() -> None:
    late = [(0, 2.0, 12.0), (5, 20.0, 40.0)]  # of core 5, which is not the server's
    assert taken_ms(recorded(wait_ms=[-1e-6] * 4, others_ms=[10] * 4, late=late)) == [8, 2, 0, 0]


def test_steal_is_taken_as_far_as_the_meter_was_late() -> None:
    steal = [0.0] * 6 + [20.0] + [0.0] * 6  # told in one go, after the fact
    idle = [0.0] * 13
    told = recorded(cpu_ms=idle, wait_ms=idle, others_ms=idle, steal_ms=steal, late=[(0, 42.0, 60.0)])
    assert taken_ms(told) == [0] * 4 + [8, 10] + [0] * 7  # 18 of 20
    assert taken_ms(recorded(cpu_ms=idle, wait_ms=idle, others_ms=idle, steal_ms=steal)) == [0] * 13
    more = recorded(cpu_ms=idle, wait_ms=idle, others_ms=idle, steal_ms=steal, late=[(0, 30.0, 90.0)])
    assert sum(taken_ms(more)) == 20


def test_a_server_whose_processes_cannot_be_seen_is_excused_nothing() -> None:
    assert taken_ms(recorded(wait_ms=[10] * 4, others_ms=[10] * 4, cores=())) == [0] * 4


@pytest.mark.parametrize("rate", [100, 300, 450])
def test_a_request_is_excused_what_others_delayed_it_and_no_more(rate: float) -> None:
    intended = poisson(rate, SECONDS)
    stolen = each_second(0.3, 0.03, SECONDS)
    disturbed = core(intended, work_ms=WORK_MS, seconds=SECONDS, taken=stolen)
    quiet = core(intended, work_ms=WORK_MS, seconds=SECONDS)
    excuse_ms = Delays.of(disturbed.recording, disturbed.intended, disturbed.done).excuse(intended, disturbed.done) / MS
    delay_ms = disturbed.latency_ms - quiet.latency_ms
    assert np.all(excuse_ms >= delay_ms - 1)  # a tick each way
    assert np.all(excuse_ms <= 31)
    # Beside what hit them, requests are excused what is left of it within their period.
    assert excuse_ms.sum() <= 1.5 * delay_ms.sum()


def test_what_others_took_is_forgotten_when_the_server_has_caught_up() -> None:
    intended = poisson(250, SECONDS)
    disturbed = core(intended, work_ms=WORK_MS, seconds=SECONDS, taken=[(2.0, 2.1)])
    excuse = Delays.of(disturbed.recording, intended, disturbed.done).excuse(intended, disturbed.done)
    assert not np.any(excuse[(intended < 1.9e9) | (intended > 2.6e9)])


def test_a_server_that_never_idles_has_caught_up_when_as_few_wait_as_ever() -> None:
    # It polls: its core is never free. Others have it in the sixth period; in the four after it there are always two that wait.
    periods = 40
    cpu = [10.0] * periods
    cpu[5] = 0
    hit = [10.0 - used for used in cpu]
    starts_ms, ends_ms = [], []
    for number in range(periods):
        behind = 5 <= number < 10
        starts_ms += [10.0 * number] * 2 if behind else [10.0 * number + 1] * 3
        ends_ms += [10.0 * number + 12] * 2 if behind else [10.0 * number + 4] * 3
    intended, done = (np.array(values) * MS for values in (starts_ms, ends_ms))
    delays = Delays.of(recorded(cpu_ms=cpu, wait_ms=hit, others_ms=hit, steal_ms=[0] * periods), intended, done)
    excuse_ms = dict(zip(starts_ms, delays.excuse(intended, done) / MS, strict=True))
    assert [excuse_ms[at] for at in (41.0, 50.0, 80.0, 121.0, 301.0)] == [0, 10, 10, 0, 0]


def test_a_server_of_one_thread_catches_up_at_the_speed_of_one_core() -> None:
    used = [10.0] * 30  # of two cores: one is always free, and of no use
    used[5] = 0
    used[15:20] = [6.0] * 5
    hit = [10.0 if number == 5 else 0.0 for number in range(30)]
    times = np.arange(30) * PERIOD_NS + MS
    recording = recorded(cpu_ms=used, wait_ms=hit, others_ms=hit, steal_ms=[0] * 30, cores=(0, 1))
    # Somebody always waits, more and more, so that only idle time says that it has caught up.
    done = np.full(30, 31 * PERIOD_NS)
    delays = Delays.of(recording, times, done)
    assert (delays.candidate_debt[[4, 5, 14, 15, 16, 17, 18, 19]] / MS).tolist() == [0, 10, 10, 10, 6, 2, 0, 0]


def judged(run: Run, *, sent_late_ms: np.ndarray | None = None, slo: SloSpec | None = SLO) -> RunResult:
    """sent_late_ms: send lag of each request."""
    rows, duration_ns = len(run.intended), int(SECONDS * 1e9)
    log = RequestLog(rows)
    sent = run.intended + (0 if sent_late_ms is None else (sent_late_ms * MS).astype(np.int64))
    for column, values in ((log.intended, run.intended), (log.dispatched, sent), (log.sent, sent), (log.done, run.done)):
        np.asarray(column)[:] = values
    np.asarray(log.status)[:] = OK
    plan = Schedule(run.intended, duration_ns, rows / SECONDS, True)
    report = SenderReport(rows, 0.1, SECONDS, 0.0, 1, {})
    spec = replace(SPEC, rate_rps=rows / SECONDS, slo=slo)
    ended = Ended("2026-11-01T12:00:00+00:00", "2026-11-01T12:00:12+00:00", duration_ns, False)
    return summarise(spec, plan, log, np.arange(rows), [report], ended, None, None, run.recording)


def test_where_the_verdict_hangs_on_other_work_the_run_is_invalid() -> None:
    result = judged(core(poisson(250, SECONDS), work_ms=WORK_MS, seconds=SECONDS, taken=each_second(0.3, 0.06, SECONDS)))
    assert (result.verdict, result.valid) == (None, False)
    assert result.machine is not None
    assert (result.machine.without_marked, result.machine.disturbed) == ("pass", True)
    assert result.machine.marked == sum(block.marked for block in result.blocks) > 0
    (reason,) = result.reasons
    assert "neighbour 0.06 cores" in reason
    assert "fail with" in reason
    assert "pass without" in reason


@pytest.mark.parametrize(("rate", "verdict"), [(250, "pass"), (200, "pass"), (560, "fail")])
def test_a_neighbour_of_20_ms_each_second_leaves_most_runs_their_verdict(rate: float, verdict: str) -> None:
    run = core(poisson(rate, SECONDS), work_ms=WORK_MS, seconds=SECONDS, taken=each_second(0.3, 0.02, SECONDS))
    result = judged(run)
    assert (result.verdict, result.valid, result.reasons) == (verdict, True, ())


@pytest.mark.parametrize("stall", ["burns", "sleeps"])
@pytest.mark.parametrize("background", [0.0, 0.01, 0.04])
def test_a_server_that_stalls_itself_is_never_excused(stall: str, background: float) -> None:
    stretches = each_second(0.3, 0.06, SECONDS)
    run = core(
        poisson(400, SECONDS),
        work_ms=WORK_MS,
        seconds=SECONDS,
        background=background,
        elsewhere=each_second(0.25, 0.2, SECONDS),
        burns=stretches if stall == "burns" else (),
        sleeps=stretches if stall == "sleeps" else (),
    )
    result = judged(run)
    assert result.machine is not None
    assert (result.verdict, result.valid, result.machine.marked) == ("fail", True, 0)


def test_a_neighbour_who_takes_a_tenth_of_the_core_hides_a_peak_only_in_an_invalid_run() -> None:
    noise = [(start, start + 0.005) for start in np.arange(0, SECONDS, 0.05)]
    found = {}
    for rate in (350, 450, 560):
        run = core(poisson(rate, SECONDS), work_ms=WORK_MS, seconds=SECONDS, taken=noise)
        result = judged(run)
        found[rate] = result.verdict if result.valid else "invalid"
    assert found == {350: "pass", 450: "invalid", 560: "fail"}


def test_a_share_of_other_work_that_changes_no_verdict_is_a_warning() -> None:
    noise = [(start, start + 0.02) for start in np.arange(0, SECONDS, 0.1)]
    result = judged(core(poisson(100, SECONDS), work_ms=WORK_MS, seconds=SECONDS, taken=noise))
    assert (result.verdict, result.valid) == ("pass", True)
    assert any("neighbour 0.20 cores" in warning for warning in result.warnings)


def test_a_server_that_misses_on_its_own_fails_beside_others_who_make_as_many_requests_miss() -> None:
    run = core(
        poisson(200, SECONDS),
        work_ms=WORK_MS,
        seconds=SECONDS,
        sleeps=each_second(0.6, 0.12, SECONDS),
        taken=each_second(0.1, 0.12, SECONDS),
    )
    result = judged(run)
    assert result.machine is not None
    assert result.machine.without_marked == "fail"
    assert result.machine.marked_share > 0.05
    assert (result.verdict, result.valid, result.machine.disturbed) == ("fail", True, False)
    assert any("but the others miss it even if those had met it" in warning for warning in result.warnings)


def with_generator(run: Run, taken_from: Sequence[tuple[float, float]]) -> Run:
    """The same run with others on the generator's core."""
    edges = run.recording.moments
    others = np.zeros(len(edges) - 1, np.int64)
    for start, end in taken_from:
        overlap = np.minimum(edges[1:], end * 1e9) - np.maximum(edges[:-1], start * 1e9)
        others += np.maximum(overlap, 0).astype(np.int64)
    side = replace(run.recording.generator, wait=others, others=others)
    return replace(run, recording=replace(run.recording, generator=side))


def late_in(intended: np.ndarray, stretches: Sequence[tuple[float, float]]) -> np.ndarray:
    """Send lag in ms of whoever was to be sent in one of those stretches, and is sent at its end."""
    found = np.zeros(len(intended))
    for start, end in stretches:
        inside = (intended >= start * 1e9) & (intended < end * 1e9)
        found[inside] = (end * 1e9 - intended[inside]) / MS
    return found


def sent_late(run: Run, stretches: Sequence[tuple[float, float]]) -> tuple[Run, np.ndarray]:
    """The same run, and lags: nothing is sent in those stretches."""
    late = late_in(run.intended, stretches)
    return replace(run, done=np.maximum(run.done, run.intended + ((late + WORK_MS) * MS).astype(np.int64))), late


def test_a_generator_that_others_kept_from_sending_now_and_then_leaves_the_verdict() -> None:
    stretches = each_second(0.5, 0.02, SECONDS)
    run = core(poisson(200, SECONDS), work_ms=WORK_MS, seconds=SECONDS)
    run, late = sent_late(run, stretches)
    by_others = judged(with_generator(run, stretches), sent_late_ms=late)
    assert by_others.generator.send_lag_p99_ms > by_others.generator.send_lag_limit_ms
    assert (by_others.verdict, by_others.valid) == ("pass", True)
    without_slo = judged(with_generator(run, stretches), sent_late_ms=late, slo=None)  # no verdict to compare
    assert without_slo.machine is not None
    assert (without_slo.valid, without_slo.machine.disturbed) == (False, True)
    by_itself = judged(run, sent_late_ms=late)
    assert by_itself.machine is not None
    assert (by_itself.valid, by_itself.machine.disturbed) == (False, False)
    assert "send lag" in by_itself.reasons[0]


def test_a_generator_that_others_kept_from_sending_often_blames_the_machine() -> None:
    stretches = each_second(0.5, 0.2, SECONDS)
    run, late = sent_late(core(poisson(200, SECONDS), work_ms=WORK_MS, seconds=SECONDS), stretches)
    result = judged(with_generator(run, stretches), sent_late_ms=late)
    assert result.machine is not None
    assert (result.valid, result.machine.disturbed) == (False, True)
    assert any("kept the load generator from its core" in reason for reason in result.reasons)
    assert not any("lower --rate" in reason for reason in result.reasons)


def test_a_run_is_not_decided_early_by_what_other_work_did() -> None:
    intended = poisson(400, SECONDS)
    run = core(intended, work_ms=WORK_MS, seconds=SECONDS, taken=each_second(0.3, 0.06, SECONDS))
    log = RequestLog(len(intended))
    for column, values in ((log.intended, intended), (log.done, run.done), (log.status, np.full(len(intended), OK))):
        np.asarray(column)[:] = values
    np.asarray(log.sent)[:] = np.asarray(log.dispatched)[:] = intended
    grid = Grid.of(SPEC, int(SECONDS * 1e9), 400)
    assert decided(SPEC, log, grid, 22, 0.95)
    assert not decided(SPEC, log, grid, 22, 0.95, run.recording)


def whose(run: Run, sent: np.ndarray | None = None) -> list[str]:
    delays = Delays.of(run.recording, run.intended, run.done)
    return [stall.whose for stall in stalls(delays, run.intended, run.intended if sent is None else sent, run.done)]


def test_each_stall_is_its_culprits() -> None:
    steady = (np.arange(0, (SECONDS - 0.5) * 1e9, 1e7)).astype(np.int64)
    stretches = each_second(0.5, 0.05, SECONDS - 1)
    assert whose(core(steady, work_ms=WORK_MS, seconds=SECONDS, burns=stretches)) == ["server"] * 11
    assert whose(core(steady, work_ms=WORK_MS, seconds=SECONDS, sleeps=stretches)) == ["server"] * 11
    assert whose(core(steady, work_ms=WORK_MS, seconds=SECONDS, taken=stretches)) == ["machine"] * 11
    late = (late_in(steady, stretches) * MS).astype(np.int64)
    run = core(steady + late, work_ms=WORK_MS, seconds=SECONDS)
    assert whose(replace(run, intended=steady), steady + late) == ["generator"] * 11
    told = stalls(None, steady, steady + late, run.done)
    assert [stall.generator_ms for stall in told] == pytest.approx([50] * 11, abs=3)
    both = with_generator(replace(run, intended=steady), stretches)
    assert whose(both, steady + late) == ["machine"] * 11


def test_a_stall_is_shared_out_as_far_as_cpu_time_explains_it() -> None:
    steady = (np.arange(0, (SECONDS - 0.5) * 1e9, 1e7)).astype(np.int64)
    # Others have the core for 30 ms of the 100 that the server does not answer.
    run = core(steady, work_ms=WORK_MS, seconds=SECONDS, taken=[(3.0, 3.03)], sleeps=[(3.03, 3.1)])
    (stall,) = stalls(Delays.of(run.recording, run.intended, run.done), steady, steady, run.done)
    assert (stall.whose, stall.duration_ms) == ("server", pytest.approx(102, abs=1))
    assert stall.machine_ms == pytest.approx(30, abs=1)


def test_what_a_server_usually_takes_is_no_stall() -> None:
    steady = np.arange(0, (SECONDS - 0.5) * 1e9, 5e7).astype(np.int64)
    run = core(steady, work_ms=30, seconds=SECONDS, sleeps=[(3.0, 3.05), (6.0, 6.1)])
    delays = Delays.of(run.recording, steady, run.done)
    assert [round(stall.start_s) for stall in stalls(delays, steady, steady, run.done)] == [6]  # over three times 30 ms


def test_of_many_stalls_the_longest_are_told_in_order() -> None:
    steady = np.arange(0, (SECONDS - 0.5) * 1e9, 1e7).astype(np.int64)
    sleeps = [(0.105 + number * 0.15, 0.125 + number * 0.15) for number in range(70)]
    sleeps[40] = (sleeps[40][0], sleeps[40][0] + 0.06)
    run = core(steady, work_ms=WORK_MS, seconds=SECONDS, sleeps=sleeps)
    found = stalls(None, steady, steady, run.done)
    assert len(found) == 50
    assert [stall.start_s for stall in found] == sorted(stall.start_s for stall in found)
    assert max(stall.duration_ms for stall in found) == pytest.approx(57, abs=1)


def test_a_run_without_a_recording_has_stalls_that_are_nobody_elses() -> None:
    steady = (np.arange(0, (SECONDS - 0.5) * 1e9, 1e7)).astype(np.int64)
    run = core(steady, work_ms=WORK_MS, seconds=SECONDS, taken=[(3.0, 3.1)])
    (stall,) = stalls(None, steady, steady, run.done)
    assert (stall.whose, stall.machine_ms) == ("server", 0)
    assert stalls(None, steady[:0], steady[:0], steady[:0]) == ()


def test_a_recording_is_read_while_it_grows() -> None:
    reader = RecordingReader((0,), (1,))
    assert len(reader.recording().moments) == 0
    reader.feed(["S 1000 5 6 6 7 8 8 9 40:99:0", "N 40 a name", "S 2000 10 20 15 30 40 40 50 40:100:0 41:7:1 42:3:-1"])
    reader.feed(["H 0 1500 1800", "T 2100 0:2 1:0", "S 3000 1 2 2 3 4 1 5 40:900:7"])
    found = reader.recording().since(1000)
    assert found.moments.tolist() == [0, 1000, 2000]
    one, other = found.candidate, found.generator
    assert (one.cpu.tolist(), one.wait.tolist(), one.others.tolist()) == ([10, 1], [20, 2], [103, 0])
    assert (other.cpu.tolist(), other.wait.tolist(), other.others.tolist()) == ([30, 3], [40, 4], [10, 0])
    assert (one.steal.tolist(), other.steal.tolist(), found.meter.tolist()) == ([0, 20_000_000], [0, 0], [50, 5])
    assert found.late.tolist() == [[0, 500, 800]]
    assert found.names == (("a name", 1000), ("41", 7), ("42", 3))
    assert longest_hiccup_ms(found, (0,), 0, 600) == 300 / 1e6
    assert longest_hiccup_ms(found, (1,), 0, 600) == longest_hiccup_ms(found, (0,), 900, 1000) == 0


def test_a_wait_that_is_told_when_it_is_over_is_when_it_was() -> None:
    reader = RecordingReader((0,), (1,))
    reader.feed(f"S {moment} 0 0 0 0 0 0 0" for moment in (0, 100, 200))
    reader.feed(["S 300 0 260 250 0 5000 5000 0", "S 400 0 350 90 0 0 0 0", "S 500 0 -1 -1 0 0 0 0"])
    found = reader.recording()
    assert found.candidate.wait.tolist() == [50, 100, 110, 350, -1]  # three threads may wait at once
    assert found.generator.wait.tolist() == [100, 100, 100, 0, 0]  # the rest was before


def test_a_recording_that_begins_late_or_is_empty_excuses_nothing() -> None:
    empty = RecordingReader((0,), (1,)).recording()
    times = np.array([1, 2], np.int64) * MS
    assert not np.any(Delays.of(empty, times, times + MS).excuse(times, times + MS))
    late = recorded(wait_ms=[10] * 4, others_ms=[10] * 4)
    before = times - 10 * MS
    assert not np.any(Delays.of(late, before, before + MS).excuse(before, before + MS))
