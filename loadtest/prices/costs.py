"""What serving costs: the formulas of docs/loadtest.md, as pure functions. Rates are per second, money is USD.

max_rps is always the largest offered, sustained open-loop rate at which the SLO holds, of one instance.
"""

import math
from typing import Final

HOURS_PER_MONTH: Final = 730.0  # AWS's own convention (8760 / 12)


def cost_per_inference(usd_per_hour: float, invocations_per_minute: float) -> float:
    """AWS's CostPerInference at full load.

    Source: SageMaker Inference Recommender; its documented job has 0.736 / (1645 · 60) = 7.4569e-06.
    """
    return _positive("usd_per_hour", usd_per_hour) / (_positive("invocations_per_minute", invocations_per_minute) * 60)


def cost_per_million(usd_per_hour: float, max_rps: float) -> float:
    """USD for a million requests at full load."""
    return _positive("usd_per_hour", usd_per_hour) / (3600 * _positive("max_rps", max_rps)) * 1e6


def requests_per_dollar(usd_per_hour: float, max_rps: float) -> float:
    return 3600 * _positive("max_rps", max_rps) / _positive("usd_per_hour", usd_per_hour)


def replicas_for(target_rps: float, max_rps: float, headroom: float = 1.0) -> int:
    """Instances needed for target_rps, at least one. headroom: the share of max_rps that may be used, at most 1."""
    return max(1, math.ceil(round(target_rps / (_positive("max_rps", max_rps) * _positive("headroom", headroom)), 9)))


def fleet_usd_per_hour(usd_per_hour: float, target_rps: float, max_rps: float, headroom: float = 1.0) -> float:
    """A fleet of one kind for target_rps."""
    return _positive("usd_per_hour", usd_per_hour) * replicas_for(target_rps, max_rps, headroom)


def autoscaling_invocations_per_minute(max_rps: float) -> float:
    """The target of SageMakerVariantInvocationsPerInstance. Source: AWS's guide, which begins with a safety factor of 0.5."""
    return _positive("max_rps", max_rps) * 0.5 * 60


def break_even_rps(
    one_usd_per_hour: float, one_max_rps: float, other_usd_per_hour: float, other_max_rps: float, up_to_rps: float
) -> float | None:
    """The least rate up to `up_to_rps` from which the one that is cheaper at low volume stops being so; None if it stays so.

    Fleet costs are stairs: they can change places only where one of them takes a step, so only these rates are looked at.
    """

    def cheaper(rps: float) -> int:
        ours = fleet_usd_per_hour(one_usd_per_hour, rps, one_max_rps)
        theirs = fleet_usd_per_hour(other_usd_per_hour, rps, other_max_rps)
        return (ours < theirs) - (ours > theirs)

    first = cheaper(1e-9) or (1 if one_usd_per_hour / one_max_rps < other_usd_per_hour / other_max_rps else -1)
    steps = {n * rate for rate in (one_max_rps, other_max_rps) for n in range(1, math.floor(up_to_rps / rate) + 1)}
    return next((rps for rps in sorted(steps) if cheaper(rps * (1 + 1e-6)) == -first), None)


def _positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be above 0, got {value}")
    return value
