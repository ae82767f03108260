"""What others took, what that delayed, and whose a stall was: each rule of `loadtest.verdict.stalls` on figures made by
hand.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from loadtest.results import Stall
from loadtest.verdict.stalls import Delays, Recording, RecordingReader, Side, longest_hiccup_ms, others_share, stalls, taken
from tests.loadtest.simulated_core import MS, PERIOD_NS

Figures = Sequence[float]
NOTHING: Figures = (0, 0, 0, 0)


def side(
    cores: tuple[int, ...] = (0,),
    *,
    cpu: Figures = NOTHING,
    wait: Figures = NOTHING,
    others: Figures = NOTHING,
    steal: Figures = NOTHING,
) -> Side:
    """In ms of each period; those that are left out are as short as `others`."""
    count = max(map(len, (cpu, wait, others, steal)))
    wide = [tuple(values) + (0,) * (count - len(values)) for values in (cpu, wait, others, steal)]
    return Side(cores, *((np.array(values) * MS).astype(np.int64) for values in wide))


def recorded(candidate: Side, generator: Side | None = None, late: Sequence[tuple[int, float, float]] = ()) -> Recording:
    """In periods of 10 ms. late: core, from and until in ms."""
    count = len(candidate.cpu)
    return Recording(
        np.arange(count + 1) * PERIOD_NS,
        candidate,
        generator or side((1,), cpu=(0,) * count),
        np.zeros(count, np.int64),
        np.array([(core, due * MS, woke * MS) for core, due, woke in late], np.int64).reshape(-1, 3),
        (),
    )


def taken_ms(recording: Recording) -> list[float]:
    return [float(value) / MS for value in taken(recording, recording.candidate)]


def test_the_share_of_others_is_of_all_the_candidates_cores_over_all_the_time() -> None:
    one = recorded(side(others=(10, 0, 0, 0), steal=(0, 0, 6, 0)))
    assert others_share(one) == pytest.approx(16 / 40)
    assert others_share(replace(one, candidate=replace(one.candidate, cores=(0, 2)))) == pytest.approx(16 / 80)
    assert others_share(replace(one, candidate=replace(one.candidate, cores=()))) == 0
    assert others_share(recorded(side(cpu=(), wait=(), others=(), steal=()))) == 0


def test_a_twentieth_of_a_period_is_a_stall_and_less_is_not() -> None:
    assert taken_ms(recorded(side(wait=(10, 10, 10, 10), others=(0.5, 0.49, 0.51, 0)))) == [0.5, 0, 0.51, 0]


def test_others_and_steal_together_take_what_the_server_was_not_using() -> None:
    told = side(wait=(4, 4, 4, 4), others=(4, 0, 4, 4), steal=(0, 0, 0, 20))
    assert taken_ms(recorded(told, late=[(0, 30, 40)])) == [4, 0, 4, 10]
    working = replace(told, cpu=(np.array([0, 0, 7, 7]) * MS))
    assert taken_ms(recorded(working, late=[(0, 30, 40)])) == [4, 0, 3, 3]


def test_steal_is_told_up_to_five_periods_late_or_early() -> None:
    def taken_by_steal(*late_periods: int, steal_ms: float = 20.0) -> list[int]:
        steal = [0.0] * 6 + [steal_ms] + [0.0] * 6
        recording = recorded(side(steal=steal), late=[(0, 10 * number, 10 * number + 10) for number in late_periods])
        return [number for number, ms in enumerate(taken_ms(recording)) if ms]

    assert taken_by_steal(1) == [1]
    assert taken_by_steal(11) == [11]
    assert taken_by_steal(0) == taken_by_steal(12) == []
    assert taken_by_steal(1, 5, 8, steal_ms=10) == [5]  # the nearest
    assert taken_by_steal(5, 7, steal_ms=10) == [5]  # it is rather told late than early
    assert taken_by_steal(1, 11) == [1, 11]


def test_steal_at_the_edges_of_a_recording_is_shared_out_within_it() -> None:
    first = recorded(side(steal=(20, 0, 0, 0)), late=[(0, 0, 15)])
    assert taken_ms(first) == [10, 5, 0, 0]
    last = recorded(side(steal=(0, 0, 0, 20)), late=[(0, 25, 40)])
    assert taken_ms(last) == [0, 0, 5, 10]
    twice = recorded(side(steal=(10, 10, 0, 0)), late=[(0, 0, 15)])
    assert taken_ms(twice) == [10, 5, 0, 0]  # what one told is not told again


def test_what_was_taken_from_the_candidate_on_a_shared_core_was_not_taken_from_the_generator() -> None:
    times = np.array([1, 2], np.int64) * MS
    waiting = (10, 10, 10, 10)

    def generators(cores: tuple[int, ...], candidate_wait: Figures) -> list[float]:
        recording = recorded(
            side((0,), wait=candidate_wait, others=(10, 10, 10, 10)), side(cores, wait=waiting, others=(8, 10, 10, 10))
        )
        return [float(value) / MS for value in Delays.of(recording, times, times + MS).generator_taken]

    assert generators((1,), (10, 6, 0, 10)) == [8, 10, 10, 10]
    assert generators((0,), (10, 6, 0, 10)) == [0, 4, 10, 0]
    assert generators((0, 1), (10, 6, 0, 10)) == [0, 4, 10, 0]
    assert generators((0,), (1, 6, 0, 10)) == [8, 4, 10, 0]


def test_nothing_less_than_nothing_is_taken_from_the_generator() -> None:
    times = np.array([1, 2], np.int64) * MS
    stolen = recorded(side((0,), steal=(10, 0, 0, 0)), side((0,), wait=(10, 0, 0, 0)), late=[(0, 0, 10)])
    delays = Delays.of(stolen, times, times + MS)
    assert (delays.candidate_taken[0], delays.generator_taken.tolist()) == (10 * MS, [0, 0, 0, 0])


def made(*, candidate_debt: Figures = NOTHING, generator_debt: Figures = NOTHING) -> Delays:
    none = np.zeros(len(candidate_debt))
    return Delays(recorded(side()), none, none, np.array(candidate_debt) * MS, np.array(generator_debt) * MS)


@pytest.mark.parametrize(
    ("from_ms", "until_ms", "excuse_ms", "lag_ms"),
    [
        (1, 9, 6, 0),  # within the first period
        (5, 15, 6, 0),  # the most of two
        (12, 28, 7, 3),  # of both sides together
        (20, 30, 5, 3),  # up to the end of a period
        (30, 39, 9, 1),  # from its beginning
        (12, 13, 1, 0),  # no more than it took
        (25, 26, 1, 1),
        (-5, 1, 6, 0),
        (39, 60, 9, 1),
        (-5, 60, 11, 3),
        (-9, -2, 0, 0),  # before the recording
        (-5, 0, 0, 0),
        (40, 50, 0, 0),  # behind it
        (45, 50, 0, 0),
        (28, 12, 0, 0),  # it took no time
    ],
)  # fmt: skip
def test_a_request_is_excused_the_most_debt_of_either_side_while_it_waited(
    from_ms: float, until_ms: float, excuse_ms: float, lag_ms: float
) -> None:
    delays = made(candidate_debt=(6, 4, 2, 8), generator_debt=(0, 0, 3, 1))
    start, end = (np.array([at * MS], np.int64) for at in (from_ms, until_ms))
    assert delays.excuse(start, end).tolist() == [excuse_ms * MS]
    assert delays.lag_excuse(start, end).tolist() == [lag_ms * MS]


def test_no_requests_are_excused_nothing() -> None:
    nobody = np.zeros(0, np.int64)
    assert made().excuse(nobody, nobody).tolist() == []
    assert Delays.of(recorded(side()), nobody, nobody).candidate_debt.tolist() == [0, 0, 0, 0]


def test_what_was_taken_in_a_stretch_is_the_sum_over_the_periods_that_it_touches() -> None:
    delays = made()
    values = np.array([1.0, 20.0, 300.0, 4000.0])
    touched = [((5, 15), 21), ((10, 20), 20), ((0, 40), 4321), ((12, 13), 20), ((9, 21), 321), ((35, 90), 4000)]
    assert [delays.within(values, start * MS, end * MS) for (start, end), _ in touched] == [total for _, total in touched]
    assert delays.within(np.zeros(0), 0, MS) == 0


@pytest.mark.parametrize(
    ("cores", "used", "debt"),
    [
        ((0, 1, 2), 13.0, [10, 10, 3, 0]),  # more than a core and a quarter: two cores, of which 7 ms are idle in each period
        ((0, 1, 2), 12.0, [10, 10, 10, 10]),  # one core, never idle
        ((0,), 10.0, [10, 10, 10, 10]),
        ((0, 1), 2.0, [10, 10, 2, 0]),  # one core is the least, also of who hardly works
        ((0, 1), 40.0, [0, 0, 0, 0]),  # both are used: nothing was free to be taken
    ],
)
def test_a_debt_is_paid_with_the_idle_time_of_the_cores_that_are_ever_busy(
    cores: tuple[int, ...], used: float, debt: list[float]
) -> None:
    hit = [10.0 if number == 5 else 0.0 for number in range(12)]
    cpu = [0.0 if number == 5 and used == 10 else used for number in range(12)]
    times = np.arange(12) * PERIOD_NS + MS
    never_caught_up = np.full(12, 13 * PERIOD_NS)
    delays = Delays.of(recorded(side(cores, cpu=cpu, wait=hit, others=hit)), times, never_caught_up)
    assert (delays.candidate_debt[5:9] / MS).tolist() == debt
    assert not np.any(delays.candidate_debt[:5])


def test_debts_add_up_and_idle_time_comes_before_what_is_taken() -> None:
    hit = [10.0 if number in (5, 6, 8) else 0.0 for number in range(12)]
    cpu = [10.0 if not ms else 0.0 for ms in hit]
    cpu[7] = 4.0
    times = np.arange(12) * PERIOD_NS + MS
    delays = Delays.of(recorded(side(cpu=cpu, wait=hit, others=hit)), times, np.full(12, 13 * PERIOD_NS))
    assert (delays.candidate_debt[5:11] / MS).tolist() == [10, 20, 20, 24, 24, 24]


def test_a_debt_ends_where_as_few_wait_as_in_the_best_tenth() -> None:
    # One request in every period, and one that waits from the fifth to the eighth.
    hit = [10.0 if number == 4 else 0.0 for number in range(20)]
    cpu = [10.0 if not ms else 0.0 for ms in hit]
    starts, ends = np.arange(20) * 10.0 + 1, np.arange(20) * 10.0 + 2
    starts, ends = np.append(starts, 41.5), np.append(ends, 75.0)
    order = np.argsort(starts)
    delays = Delays.of(
        recorded(side(cpu=cpu, wait=hit, others=hit)),
        (starts[order] * MS).astype(np.int64),
        (ends[order] * MS).astype(np.int64),
    )
    assert (delays.candidate_debt[3:10] / MS).tolist() == [0, 10, 10, 10, 10, 0, 0]


def test_a_recording_of_one_period_has_its_debt() -> None:
    one = recorded(side(cpu=(0,), wait=(10,), others=(10,), steal=(0,)))
    times = np.array([1, 2], np.int64) * MS
    assert (Delays.of(one, times, times + MS).candidate_debt / MS).tolist() == [10]


def steps(count: int, every_ms: float, took_ms: float) -> tuple[np.ndarray, np.ndarray]:
    intended = (np.arange(count) * every_ms * MS).astype(np.int64)
    return intended, intended + int(took_ms * MS)


@pytest.mark.parametrize(("usual_ms", "longest_ms", "count"), [(1, 5, 0), (1, 5.1, 1), (4, 12, 0), (4, 12.1, 1)])
def test_a_stall_is_three_times_the_usual_and_5_ms_at_least(usual_ms: float, longest_ms: float, count: int) -> None:
    intended, done = steps(20, 20, usual_ms)
    done[7] = intended[7] + int(longest_ms * MS)
    found = stalls(None, intended, intended, done)
    assert len(found) == count
    if count:
        assert found == (Stall(0.14, longest_ms, 0.0, 0.0, "server"),)


def test_of_three_requests_there_may_be_a_stall_and_of_one_or_of_none_that_took_time_there_is_none() -> None:
    intended, done = steps(3, 20, 1)
    done[2] = intended[2] + 60 * MS
    (stall,) = stalls(None, intended, intended, done)
    assert stall.duration_ms == 60
    assert stalls(None, intended[:1], intended[:1], done[:1]) == ()
    assert stalls(None, intended, intended, intended) == ()


def test_a_stall_begins_when_somebody_waits_or_with_the_last_answer() -> None:
    intended, done = steps(20, 20, 1)
    done[5:8] = 150 * MS, 151 * MS, 152 * MS  # asked at 100, 120 and 140 ms
    (stall,) = stalls(None, intended, intended, done)
    assert (stall.start_s, stall.duration_ms) == (0.1, 50)
    busy, answered = steps(20, 20, 30)
    answered[9:] += 100 * MS  # asked at 180; the one before it was answered at 190
    (stall,) = stalls(None, busy, busy, answered)
    assert (stall.start_s, stall.duration_ms) == (0.19, 120)


def late_by_20_ms(
    generator_taken: Figures = NOTHING, generator_wait: Figures = NOTHING, candidate_taken: Figures = NOTHING
) -> Stall:
    """Whose a stall is from 30 to 52 ms: asked at 30 ms, sent at 50. Figures: in ms, of four periods from 20 ms on."""
    intended, done = steps(20, 10, 1)
    sent = intended.copy()
    sent[3], done[3] = 50 * MS, 52 * MS
    sent[4], done[4] = 50 * MS, 53 * MS
    done[5] = 54 * MS
    count = 20
    wide = [np.pad(np.array(values) * MS, (2, count - 6)) for values in (generator_taken, generator_wait, candidate_taken)]
    recording = recorded(side((0,), cpu=(0,) * count), replace(side((1,), cpu=(0,) * count), wait=wide[1]))
    none = np.zeros(count)
    (stall,) = stalls(Delays(recording, wide[2], wide[0], none, none), intended, sent, done)
    assert (stall.start_s, stall.duration_ms) == (0.03, 22)
    return stall


def test_a_stall_is_the_generators_as_far_as_it_did_not_send_and_was_not_kept_from_it() -> None:
    assert late_by_20_ms() == Stall(0.03, 22, 0, 20, "generator")
    # Periods from 30 to 60 ms count, which the stall touches.
    kept = late_by_20_ms(generator_taken=(9, 8, 7, 3))
    assert kept == Stall(0.03, 22, 18, 2, "machine")
    waited = late_by_20_ms(generator_taken=(9, 8, 0, 0), generator_wait=(9, 10, 10, 0))
    assert waited == Stall(0.03, 22, 8, 0, "server")  # on the same core
    assert late_by_20_ms(generator_wait=(0, 10, 10, 10)) == Stall(0.03, 22, 0, 0, "server")
    unknown = late_by_20_ms(generator_taken=(9, 8, 4, 0), generator_wait=(-1, -1, -1, -1))
    assert unknown == Stall(0.03, 22, 12, 8, "machine")
    both = late_by_20_ms(generator_taken=(0, 5, 0, 0), candidate_taken=(9, 4, 3, 0))
    assert both == Stall(0.03, 22, 7, 15, "generator")
    assert late_by_20_ms(candidate_taken=(0, 10, 10, 10)) == Stall(0.03, 22, 2, 20, "generator")


def test_the_longest_hiccup_is_of_those_cores_within_that_time() -> None:
    recording = recorded(side(), late=[(0, 5, 9), (0, 12, 19), (1, 10, 30), (0, 30, 39)])
    assert longest_hiccup_ms(recording, (0,), 0, 40 * MS) == 9
    assert longest_hiccup_ms(recording, (0,), 0, 30 * MS) == 7
    assert longest_hiccup_ms(recording, (0,), 19 * MS, 30 * MS) == 0
    assert longest_hiccup_ms(recording, (0,), 9 * MS - 1, 12 * MS) == 4
    assert longest_hiccup_ms(recording, (0, 1), 9 * MS, 12 * MS) == 20
    assert longest_hiccup_ms(recorded(side()), (0,), 0, 40 * MS) == 0


def test_steal_belongs_to_the_period_that_ends_when_it_is_told() -> None:
    reader = RecordingReader((0,), (1, 2))
    reader.feed(["T 500 0:1 1:1", *(f"S {moment} 0 0 0 0 0 0 0" for moment in (1000, 2000, 3000))])
    reader.feed(["T 2000 0:2 1:0", "T 2001 0:0 1:3 2:4 3:9", "T 9000 0:5"])
    found = reader.recording()
    assert (found.candidate.cores, found.generator.cores) == ((0,), (1, 2))
    assert found.candidate.steal.tolist() == [30_000_000, 50_000_000]
    assert found.generator.steal.tolist() == [10_000_000, 70_000_000]


def test_the_cpu_time_of_others_counts_where_they_last_ran_or_everywhere_if_that_is_not_known() -> None:
    reader = RecordingReader((0, 1), ())
    reader.feed(["N 7 a b", "N 8 a b", "S 1000 0 0 0 0 0 0 0 7:9:0", "S 2000 0 0 0 0 0 0 0 7:100:1 8:30:2 9:5:-1"])
    found = reader.recording()
    assert found.candidate.others.tolist() == [105]
    assert found.generator.others.tolist() == [0]  # it has no cores
    assert found.names == (("a b", 130), ("9", 5))
