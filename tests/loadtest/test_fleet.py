import itertools
import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from loadtest.prices.fleet import FleetOption, NoFleet, cheapest_fleet


def test_a_mix_is_cheaper_than_more_of_the_same() -> None:
    options = [FleetOption("large", 1.0, 100), FleetOption("small", 0.3, 20)]
    fleet = cheapest_fleet(options, 120, headroom=1.0)
    assert fleet.counts == {"large": 1, "small": 1}  # 1.3 USD; two large ones cost 2.0, six small ones 1.8
    assert fleet.usd_per_hour == pytest.approx(1.3)
    assert fleet.capacity_rps == 120


def test_headroom_is_kept_free() -> None:
    assert cheapest_fleet([FleetOption("one", 1.0, 100)], 100, headroom=0.7).counts == {"one": 2}  # 100 / 70


def test_what_cannot_be_had_is_not_planned_with() -> None:
    options = [FleetOption("scarce", 0.1, 100, max_count=2), FleetOption("plenty", 1.0, 100)]
    assert cheapest_fleet(options, 400, headroom=1.0).counts == {"scarce": 2, "plenty": 2}
    with pytest.raises(NoFleet, match="the options end at 200/s; raise `max_count`"):
        cheapest_fleet(options[:1], 400, headroom=1.0)


def test_settings_of_one_pool_share_what_can_be_had() -> None:
    fast = FleetOption("fast", 1.0, 100, max_count=4, pool="large")
    slow = FleetOption("slow", 0.9, 95, max_count=4, pool="large")
    other = FleetOption("other", 5.0, 100, max_count=4, pool="xlarge")
    assert cheapest_fleet([fast, slow], 400, headroom=1.0).counts == {"fast": 4}
    assert cheapest_fleet([fast, slow], 390, headroom=1.0).counts == {"fast": 2, "slow": 2}
    assert cheapest_fleet([fast, slow, other], 500, headroom=1.0).counts == {"fast": 4, "other": 1}
    with pytest.raises(NoFleet, match="the options end at 400/s"):
        cheapest_fleet([fast, slow], 500, headroom=1.0)


def test_the_autoscaling_target_is_half_of_the_peak_per_minute() -> None:
    assert cheapest_fleet([FleetOption("one", 1.0, 100)], 50).autoscaling_per_minute == {"one": 3000}


def test_no_enumerated_fleet_is_cheaper() -> None:
    random_ = random.Random(7)
    for _ in range(20):
        options = [FleetOption(name, random_.uniform(0.1, 2), random_.uniform(20, 300)) for name in "abc"]
        target = random_.uniform(50, 900)
        fleet = cheapest_fleet(options, target, headroom=1.0)
        counts = [range(1 + int(target / option.max_rps) + 1) for option in options]
        best = min(
            sum(n * option.usd_per_hour for n, option in zip(mix, options, strict=True))
            for mix in itertools.product(*counts)
            if sum(n * option.max_rps for n, option in zip(mix, options, strict=True)) >= target
        )
        assert fleet.usd_per_hour == pytest.approx(best)
        assert fleet.capacity_rps >= target * (1 - 1e-6)


def offered(seed: int) -> tuple[list[FleetOption], float]:
    """Options of all sorts: few or many, limited or not, some of one pool, alike in price per rate or not."""
    random_ = random.Random(seed)
    pools = {"": None, "few": 3, "some": 10, "any": None}
    options = []
    for place in range(random_.choice([2, 4, 8, 20])):
        usd, pool = random_.choice([0.1, 0.4, 1.6]) * random_.uniform(0.8, 1.2), random_.choice(["", *pools])
        most = pools[pool] if pool else random_.choice([None, 1, 3, 8])
        options.append(FleetOption(f"c{place}", usd, 1000 * usd * random_.uniform(0.7, 1.2), most, pool))
    return options, random_.choice([200.0, 700.0, 2000.0, 5000.0])


@pytest.mark.slow
def test_an_integer_program_finds_none_that_is_cheaper() -> None:
    for seed in range(60):
        options, target = offered(seed)
        most = np.array([np.inf if option.max_count is None else option.max_count for option in options])
        pools = [[option.pool == pool for option in options] for pool in ("few", "some")]
        shared = [LinearConstraint(np.array(pool, float), ub=n) for pool, n in zip(pools, (3, 10), strict=True)]
        found = milp(
            [option.usd_per_hour for option in options],
            integrality=np.ones(len(options)),
            bounds=Bounds(0, most),
            constraints=[LinearConstraint(np.array([option.max_rps * 0.7 / target for option in options]), lb=1), *shared],
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            with pytest.raises(NoFleet):
                cheapest_fleet(options, target)
            continue
        fleet = cheapest_fleet(options, target)
        assert fleet.usd_per_hour == pytest.approx(found.fun, rel=1e-6), seed
        assert fleet.capacity_rps * 0.7 >= target * (1 - 1e-6)
        assert all(fleet.counts.get(option.name, 0) <= (option.max_count or np.inf) for option in options)
        for pool, n in zip(pools, (3, 10), strict=True):
            assert sum(fleet.counts.get(option.name, 0) for option, of in zip(options, pool, strict=True) if of) <= n


def test_a_question_of_many_kinds_and_instances_ends_near_what_fractions_would_cost() -> None:
    random_ = random.Random(0)
    options = []
    for kind in range(40):
        rps = random_.uniform(100, 5000)
        options.append(FleetOption(f"c{kind}", rps * random_.uniform(0.9, 1.1), rps, random_.randint(1, 500)))
    target = 1_000_000.0
    left, fractions = target / 0.7, 0.0
    for option in sorted(options, key=lambda option: option.usd_per_hour / option.max_rps):
        count = min(option.max_count or 0, left / option.max_rps)
        left, fractions = left - count * option.max_rps, fractions + count * option.usd_per_hour
    assert cheapest_fleet(options, target).usd_per_hour < 1.001 * fractions


def test_nothing_is_written_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in (263, 746, 1822):  # of which HiGHS has a line to say
        cheapest_fleet(*offered(seed))
    assert capfd.readouterr().out == ""


def test_without_an_offer_there_is_no_fleet() -> None:
    with pytest.raises(NoFleet, match="no candidate meets the SLO"):
        cheapest_fleet([], 100)


def test_three_tenths_are_kept_free_unless_told_otherwise() -> None:
    fleet = cheapest_fleet([FleetOption("one", 1.0, 100)], 140)
    assert (fleet.counts, fleet.headroom, fleet.target_rps, fleet.capacity_rps) == ({"one": 2}, 0.7, 140, 200)
    assert cheapest_fleet([FleetOption("one", 1.0, 100)], 141).counts == {"one": 3}


def test_the_rate_that_cannot_be_carried_is_told_with_what_can_at_that_headroom() -> None:
    options = [FleetOption("a", 1.0, 100, max_count=1), FleetOption("b", 1.0, 50, max_count=2)]
    with pytest.raises(NoFleet, match=r"1000 requests/s cannot be carried: the options end at 140/s"):
        cheapest_fleet(options, 1000)


def test_a_tiny_rate_is_carried_like_a_large_one() -> None:
    options = [FleetOption("large", 1.0, 1e-3), FleetOption("small", 0.3, 2e-4)]
    assert cheapest_fleet(options, 1.2e-3, headroom=1.0).counts == {"large": 1, "small": 1}
