"""When sessions that run streams are taken to be free."""

import random
import timeit
from bisect import bisect_right
from itertools import accumulate

import pytest

from gateway.batching.streams import Streams

S = 1_000_000_000


def that_took(*seconds: float) -> Streams:
    streams = Streams()
    for each in seconds:
        streams.ended(round(each * S))
    return streams


def first_s(streams: Streams, *ages_s: float, others_s: tuple[float, ...] = ()) -> float:
    return streams.free_ns([round(age * S) for age in ages_s], [each * S for each in others_s], 0)[0] / S


def test_what_is_left_of_a_stream_is_what_is_usual_less_its_age() -> None:
    assert first_s(that_took(3), 1) == 2
    assert that_took(3, 1, 2).usual_ns == 2 * S


def test_of_one_that_has_gone_on_for_long_only_those_tell_that_went_on_for_longer() -> None:
    streams = that_took(1, 1, 1, 1, 1, 1, 8, 9, 10)
    assert first_s(streams, 0.5) == 0.5
    assert first_s(streams, 1.5) == 7.5


def test_one_that_went_on_for_longer_than_any_is_taken_to_need_as_long_again() -> None:
    assert first_s(that_took(1, 3), 3.5) == 0.5
    assert first_s(that_took(1, 3), 10) == 7


def test_of_several_sessions_the_first_is_free_the_sooner_the_more_there_are() -> None:
    streams = that_took(*range(1, 11))
    assert [first_s(streams, *[0.0] * sessions) for sessions in (1, 2, 5)] == [5, 3, 1]
    assert first_s(streams, 0.0, 0.0, 9.5) == 0.5


def test_those_ahead_each_take_a_session() -> None:
    ages_ns = [0, S, 2 * S]
    assert [streams_ns / S for streams_ns in (that_took(5).free_ns(ages_ns, [], ahead)[1] for ahead in range(3))] == [3, 4, 5]
    assert that_took(5).free_ns(ages_ns, [], 2)[0] == 3 * S


def test_other_sessions_count_with_what_they_have_left() -> None:
    assert first_s(that_took(5), 1, others_s=(2.0,)) == 2
    assert that_took(5).free_ns([S], [0.0, 0.0], 2) == (0.0, 4 * S)


def test_a_client_that_reads_for_minutes_does_not_make_all_others_seem_long() -> None:
    assert first_s(that_took(2, 2, 2, 600), 0) == 2


def test_what_is_long_ago_is_forgotten() -> None:
    streams = that_took(*[9] * 32, *[1] * 20)
    assert first_s(streams, 0) == 1
    for _ in range(12):
        streams.ended(S)
    assert first_s(streams, 5) == 4  # overdue: none of nine seconds is known any more


@pytest.mark.parametrize("sessions", [1, 3, 7, 32])
def test_the_last_of_all_sessions_is_found_though_shares_are_not_exact(sessions: int) -> None:
    streams = that_took(*[1 + each / 32 for each in range(31)])
    first_ns, last_ns = streams.free_ns([round(at * 0.03 * S) for at in range(sessions)], [], sessions - 1)
    assert first_ns <= last_ns <= 2 * S


@pytest.mark.parametrize("seed", range(20))
def test_a_session_is_free_once_the_shares_of_what_each_may_have_left_add_up_to_it(seed: int) -> None:
    draw = random.Random(seed)
    took_ns = [round(S * 10 ** draw.uniform(-2, 2)) for _ in range(draw.randint(1, 32))]
    ages_ns = [draw.choice((0, max(took_ns), round(S * 10 ** draw.uniform(-3, 2)))) for _ in range(draw.randint(1, 60))]
    others_ns = [draw.choice((0.0, draw.uniform(0, 9) * S)) for _ in range(draw.randint(0, 5))]
    nexts = [(left_ns, 1.0) for left_ns in others_ns]
    for age_ns in ages_ns:
        longer_ns = [each for each in took_ns if each > age_ns]
        nexts += [(each - age_ns, 1 / len(longer_ns)) for each in longer_ns] or [(age_ns - max(took_ns), 1.0)]
    nexts.sort()
    free = list(accumulate(share for _, share in nexts))
    streams = that_took(*[each / S for each in took_ns])
    for ahead in range(len(ages_ns) + len(others_ns)):
        expected = [nexts[bisect_right(free, before + 0.499)][0] for before in (0, ahead)]
        assert streams.free_ns(ages_ns, others_ns, ahead) == pytest.approx(expected, abs=1)


def test_the_last_of_many_is_told_as_soon_as_the_first() -> None:
    streams = that_took(*[10 + each / 32 for each in range(32)])
    ages_ns = [round(at * S / 32) for at in range(256)]

    def took_s(ahead: int) -> float:
        return min(timeit.repeat(lambda: streams.free_ns(ages_ns, [], ahead), number=1, repeat=9))

    assert took_s(255) < 5 * took_s(0)  # one after the other, 46 times
