from typing import Any

import pytest

from loadtest.search.curves import Cliff, CurvePoint, FrontPoint, cliff, curve, front
from loadtest.search.events import Measured


def run(rps: float, p99_ms: float, **changed: Any) -> Measured:
    known: dict[str, Any] = {"verdict": "pass", "purpose": "peak", "blocks": ((100, 99),) * 20, "seconds": 5.0}
    known |= {"p50_ms": p99_ms / 3, "p95_ms": p99_ms / 2, "p99_ms": p99_ms, "goodput_rps": rps}
    return Measured(entrant="one", rps=rps, **{**known, **changed})


def points(*pairs: tuple[float, float]) -> tuple[CurvePoint, ...]:
    return curve(run(rps, p99_ms) for rps, p99_ms in pairs)


def test_a_curve_has_the_valid_runs_rate_ascending() -> None:
    runs = [run(300, 30), run(100, 10), run(200, 20, valid=False), run(250, 0, blocks=(), failure="died"), run(400, 90)]
    assert [point.offered_rps for point in curve(runs)] == [100, 300, 400]


def test_a_run_without_a_p99_is_no_point_and_the_quickest_is() -> None:
    assert [point.p99_ms for point in curve([run(100, 0.0), run(200, 0.01)])] == [0.01]


def test_a_rate_measured_again_counts_by_its_last_run() -> None:
    assert [point.p99_ms for point in curve([run(100, 80), run(100, 10)])] == [10]


def test_a_recovery_run_is_no_point_of_the_curve() -> None:
    assert [point.offered_rps for point in curve([run(100, 10), run(80, 900, purpose="recovery")])] == [100]


def test_a_share_has_its_interval_from_the_blocks() -> None:
    (alike,) = curve([run(100, 10, blocks=((100, 99),) * 20)])
    (clustered,) = curve([run(100, 10, blocks=((100, 100),) * 19 + ((100, 80),))])
    for point in (alike, clustered):
        assert point.attainment == pytest.approx(0.99)
        assert point.attainment_low < 0.99 < point.attainment_high
    assert clustered.attainment_high - clustered.attainment_low > 2 * (alike.attainment_high - alike.attainment_low)


@pytest.mark.parametrize("blocks", [((50, 50),), ((50, 0),), ((0, 0), (10, 9))])
def test_a_share_of_few_or_like_requests_has_one_too(blocks: tuple[tuple[int, int], ...]) -> None:
    (point,) = curve([run(100, 10, blocks=blocks)])
    assert 0 <= point.attainment_low <= point.attainment <= point.attainment_high <= 1


def test_a_cliff_is_where_p99_jumps() -> None:
    found = cliff(points((100, 10), (200, 12), (220, 90), (250, 120)))
    assert found == Cliff(200, 220, pytest.approx(12), pytest.approx(90))


def test_a_queue_that_fills_is_no_cliff() -> None:
    assert cliff(points(*((1000 * busy, 10 / (1 - busy)) for busy in (0.1, 0.3, 0.5, 0.6)))) is None


@pytest.mark.parametrize(("power", "jumps"), [(1.0, False), (2.5, False), (2.95, False), (3.05, True), (5.0, True)])
def test_a_jump_is_steeper_than_the_third_power_of_the_rate(power: float, jumps: bool) -> None:
    assert bool(cliff(points((100, 10), (150, 10 * 1.5**power)))) == jumps


@pytest.mark.parametrize(("times", "jumps"), [(1.45, False), (1.55, True)])
def test_a_jump_is_to_one_and_a_half_times_the_p99_at_least(times: float, jumps: bool) -> None:
    assert bool(cliff(points((100, 10), (101, 10 * times)))) == jumps


def test_without_a_run_above_there_is_no_cliff() -> None:
    assert cliff(points((100, 10))) is None
    assert cliff(()) is None


def test_one_noisy_run_is_no_cliff() -> None:
    """Latency does not fall as the rate rises: a slow run between quick ones was a stall."""
    steady = [run(rps, 10) for rps in (100, 110, 130, 140)]
    stalled = run(120, 40, blocks=((10, 10),))
    assert cliff(curve([*steady, stalled])) is None


def test_a_front_keeps_what_nothing_beats_in_both() -> None:
    found = [FrontPoint("a", 1, usd, value) for value, usd in ((1, 9), (2, 5), (3, 6), (4, 1), (5, 1))]
    assert [(point.value, point.usd_per_million) for point in front(found)] == [(1, 9), (2, 5), (4, 1)]


def test_where_more_is_better_the_front_is_the_other_way_round() -> None:
    found = [FrontPoint("a", 1, usd, value) for value, usd in ((1.0, 9), (0.999, 5), (0.99, 6), (0.94, 1))]
    assert [point.value for point in front(found, rising=True)] == [1.0, 0.999, 0.94]
