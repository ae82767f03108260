"""Images of mixed sizes, compiled sizes and models that share workers, in simulated time: `benchmarks.mixed` in small."""

import pytest

from benchmarks.cases import JUDGING
from benchmarks.mixed import CASES, DEFAULT, IN_TURN, served, settings


@pytest.mark.parametrize(
    ("name", "seconds", "longer"), [("images-cpu", 20.0, 1.4), ("images-gpu", 4.0, 1.0), ("compiled", 1.0, 1.0)]
)
@pytest.mark.slow
def test_without_an_slo_no_setting_is_faster_and_none_waits_much_longer_than_in_turn(
    name: str, seconds: float, longer: float
) -> None:
    case = CASES[name]
    found = {each: served(case, setting, JUDGING, 0, seconds) for each, setting in settings(case).items()}
    assert found[DEFAULT].rps >= 0.95 * max(each.rps for each in found.values())
    assert found[DEFAULT].p99_ms <= longer * found[IN_TURN].p99_ms


@pytest.mark.parametrize("rate", [400, 800])
@pytest.mark.slow
def test_with_an_slo_images_that_may_share_batches_are_not_refused_as_if_each_size_had_its_own(rate: int) -> None:
    case = CASES["images-gpu"]
    variants = settings(case)
    ours, greedy = (served(case, variants[name], JUDGING, 0, 2.0, rate=rate) for name in (DEFAULT, "greedy"))
    assert ours.good_rps >= 0.97 * greedy.good_rps
    assert ours.good_rps >= 370


@pytest.mark.slow
def test_models_of_mixed_lengths_have_equal_parts_of_shared_workers_and_none_is_starved() -> None:
    case = CASES["shared"]
    found = served(case, settings(case)[DEFAULT], JUDGING, 0, 20.0)
    assert found.shares == pytest.approx((1 / 3, 1 / 3, 1 / 3), abs=0.04)
    assert found.quiet_ms < 1500
