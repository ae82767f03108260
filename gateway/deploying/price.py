"""What a deployment costs, from the known prices of instance types, and where they were read."""

import datetime
from collections.abc import Iterator, Sequence
from typing import Final

from gateway.deploying.preflight import bare
from gateway.instances.facts import InstanceTypes, Price, PriceBasis

HOURS_A_MONTH: Final = 730  # AWS's own convention: 8760 / 12
_PAGES: Final = {
    "sagemaker": "https://aws.amazon.com/sagemaker/ai/pricing/",
    "ec2": "https://aws.amazon.com/ec2/pricing/on-demand/",
    "spot": "https://aws.amazon.com/ec2/spot/pricing/",
}


def usd(amount: float) -> str:
    return f"{amount:,.2f} USD" if amount >= 1 else f"{amount:.4g} USD"


def hourly(instance_type: str, types: InstanceTypes, basis: PriceBasis = "sagemaker") -> Price | None:
    """Of SageMaker's hosting, or of another basis; None: it is not known."""
    return types.quoted(instance_type, basis) if bare(instance_type) in types.instances else None


def monthly(
    asked: Sequence[str],
    least: int,
    most: int,
    types: InstanceTypes,
    *,
    region: str,
    today: datetime.date,
    for_ever: bool = True,
    basis: PriceBasis = "sagemaker",
) -> Iterator[str]:
    """Lines for people: a price for each type that may run, with its source and its date. for_ever: it runs until removed."""
    for instance_type in asked:
        price = hourly(instance_type, types, basis)
        if price is None:
            yield f"Price of {instance_type}: not known here; {_PAGES[basis]} has it."
            continue
        counts = dict.fromkeys((least, most))
        hours = HOURS_A_MONTH if for_ever else 1
        figures = ", ".join(f"{usd(price.usd_per_hour * n * hours)} with {_instances(n)}" for n in counts)
        when = "A month" if for_ever else "An hour, while it runs"
        yield f"Price of {instance_type}: {usd(price.usd_per_hour)} an hour each. {when}: {figures}."
        yield f"  Source: {price.source}, {dated(price, today)}."
    if line := of_elsewhere(region, types):
        yield f"{line}."


def of_elsewhere(region: str, types: InstanceTypes) -> str:
    """What is to be said where the known prices are of another region; "": nothing."""
    return "" if region == types.region else f"These are prices of {types.region}; {region} has its own"


def _instances(n: int) -> str:
    return "1 instance" if n == 1 else f"{n} instances"


def dated(price: Price, today: datetime.date) -> str:
    flags = [flag for flag in price.flags(today) if flag != "undated"]
    return "; ".join([str(price.date) if price.date is not None else "of no known date", *flags])
