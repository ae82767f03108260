"""The cheapest fleet for a rate: how many instances of which kinds, as a small integer program."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from loadtest.prices.costs import autoscaling_invocations_per_minute
from loadtest.wording import rate

HEADROOM = 0.7  # of max_rps: what the loss of an instance or a burst may take before the SLO breaks


@dataclass(frozen=True, slots=True)
class FleetOption:
    """One kind of instance that may be in the fleet.

    max_count: of all options of one pool ("": none but itself) together; None means any number can be had.
    """

    name: str
    usd_per_hour: float
    max_rps: float
    max_count: int | None = None
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """counts: options that are in it -> how many. capacity_rps: what it serves within the SLO, headroom not taken off.

    autoscaling_per_minute: option -> invocations per instance and minute to scale at.
    """

    counts: dict[str, int]
    usd_per_hour: float
    capacity_rps: float
    target_rps: float
    headroom: float
    autoscaling_per_minute: dict[str, float]


class NoFleet(Exception):
    """The options cannot carry the target rate."""


def cheapest_fleet(
    options: Sequence[FleetOption], target_rps: float, *, headroom: float = HEADROOM, min_instances: int = 1
) -> Fleet:
    """Minimise the hourly price of whole instances that carry target_rps at `headroom` of their measured capacity.

    Mixes are considered: a large and a small instance may together be cheaper than two large ones.
    Raises: NoFleet, if the options (their max_count) cannot carry the rate.
    """
    if not options:
        raise NoFleet("no candidate meets the SLO: there is nothing to build a fleet of")
    price = np.array([option.usd_per_hour for option in options])
    carried = np.array([option.max_rps * headroom for option in options])
    # No optimal fleet has more of one kind than would carry everything alone; this bound also keeps the search small.
    alone = np.maximum(np.ceil(target_rps / carried), min_instances)
    upper = np.array(
        [alone[i] if option.max_count is None else min(alone[i], option.max_count) for i, option in enumerate(options)]
    )
    pools: dict[str, list[int]] = {}
    for i, option in enumerate(options):
        pools.setdefault(option.pool or option.name, []).append(i)
    found = milp(
        price,
        integrality=np.ones(len(options)),
        bounds=Bounds(0, upper),
        constraints=[
            # Scaled to 1, so that the solver's absolute tolerance means the same at every rate.
            LinearConstraint(carried / target_rps, lb=1),
            LinearConstraint(np.ones(len(options)), lb=min_instances),
            *(
                LinearConstraint(np.isin(np.arange(len(options)), members).astype(float), ub=options[members[0]].max_count)
                for members in pools.values()
                if options[members[0]].max_count is not None
            ),
        ],
        options={"time_limit": 10.0},
    )
    if found.x is None:
        most = sum(max(carried[members] * upper[members]) for members in pools.values())
        raise NoFleet(f"{target_rps:g} requests/s cannot be carried: the options end at {rate(most)}; raise `max_count`")
    counts = {option.name: round(n) for option, n in zip(options, found.x, strict=True) if round(n)}
    by_name = {option.name: option for option in options}
    return Fleet(
        counts=counts,
        usd_per_hour=sum(by_name[name].usd_per_hour * n for name, n in counts.items()),
        capacity_rps=sum(by_name[name].max_rps * n for name, n in counts.items()),
        target_rps=target_rps,
        headroom=headroom,
        autoscaling_per_minute={name: autoscaling_invocations_per_minute(by_name[name].max_rps) for name in counts},
    )
