import itertools
import random

import pytest

from loadtest.fleet import NoFleet, Offer, cheapest_fleet


def test_a_mix_is_cheaper_than_more_of_the_same() -> None:
    offers = [Offer("large", 1.0, 100), Offer("small", 0.3, 20)]
    fleet = cheapest_fleet(offers, 120, headroom=1.0)
    assert fleet.counts == {"large": 1, "small": 1}  # 1.3 USD; two large ones cost 2.0, six small ones 1.8
    assert fleet.usd_per_hour == pytest.approx(1.3)
    assert fleet.capacity_rps == 120


def test_headroom_is_kept_free() -> None:
    assert cheapest_fleet([Offer("one", 1.0, 100)], 100, headroom=0.7).counts == {"one": 2}  # 100 / 70


def test_a_fleet_has_at_least_the_asked_instances() -> None:
    assert cheapest_fleet([Offer("one", 1.0, 100)], 1, min_instances=3).counts == {"one": 3}


def test_what_cannot_be_had_is_not_planned_with() -> None:
    offers = [Offer("scarce", 0.1, 100, max_count=2), Offer("plenty", 1.0, 100)]
    assert cheapest_fleet(offers, 400, headroom=1.0).counts == {"scarce": 2, "plenty": 2}
    with pytest.raises(NoFleet, match="the offers end at 200/s; raise `max_count`"):
        cheapest_fleet(offers[:1], 400, headroom=1.0)


def test_the_autoscaling_target_is_half_of_the_peak_per_minute() -> None:
    assert cheapest_fleet([Offer("one", 1.0, 100)], 50).autoscaling_per_minute == {"one": 3000}


def test_no_enumerated_fleet_is_cheaper() -> None:
    random_ = random.Random(7)
    for _ in range(20):
        offers = [Offer(name, random_.uniform(0.1, 2), random_.uniform(20, 300)) for name in "abc"]
        target = random_.uniform(50, 900)
        fleet = cheapest_fleet(offers, target, headroom=1.0)
        counts = [range(1 + int(target / offer.max_rps) + 1) for offer in offers]
        best = min(
            sum(n * offer.usd_per_hour for n, offer in zip(mix, offers, strict=True))
            for mix in itertools.product(*counts)
            if sum(n * offer.max_rps for n, offer in zip(mix, offers, strict=True)) >= target
        )
        assert fleet.usd_per_hour == pytest.approx(best)
        assert fleet.capacity_rps >= target * (1 - 1e-6)
