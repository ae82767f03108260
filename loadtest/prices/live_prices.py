"""Live prices from AWS, cached with the time they were fetched; the bundled snapshot of catalogue.py is the flagged fallback.

The only file that imports boto3 for prices, and only when prices are refreshed.
"""

import datetime
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from gateway.instances.facts import BUNDLED, Price, PriceBasis
from loadtest.errors import LoadtestError, UsageError
from loadtest.prices.catalogue import Catalogue, load_catalogue

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "serving-gateway" / "prices.json"
_LIFETIME: dict[PriceBasis, datetime.timedelta] = {
    "ec2": datetime.timedelta(hours=24),
    "sagemaker": datetime.timedelta(hours=24),
    "spot": datetime.timedelta(minutes=5),
}
_PRICING_REGIONS: Final = ("us-east-1", "eu-central-1", "ap-south-1")  # the only ones the pricing API answers in


class NoPrice(LoadtestError):
    """AWS answered, but with no usable price."""


class PricesUnavailable(LoadtestError):
    """AWS cannot be asked."""


@dataclass(frozen=True, slots=True)
class LivePrice:
    """One price as it was fetched."""

    instance_type: str
    region: str
    basis: PriceBasis
    price: Price
    fetched: datetime.datetime

    def fresh(self, now: datetime.datetime) -> bool:
        return now - self.fetched < _LIFETIME[self.basis]


_CACHED: Final = TypeAdapter(list[LivePrice])


def read_cache(path: Path, now: datetime.datetime) -> list[LivePrice]:
    """The prices that are still fresh; none if there is no cache. Raises: UsageError, if the file is damaged."""
    if not path.exists():
        return []
    try:
        cached = _CACHED.validate_json(path.read_bytes())
    except (OSError, ValidationError) as exc:
        raise UsageError(f"{path}: cannot be read as a price cache: delete it") from exc
    return [live for live in cached if live.fresh(now)]


def write_cache(path: Path, prices: Iterable[LivePrice], now: datetime.datetime) -> None:
    """Add to the cache; a newer price replaces an older of the same type, region and basis."""
    merged = {(live.instance_type, live.region, live.basis): live for live in (*read_cache(path, now), *prices)}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(_CACHED.dump_json(list(merged.values()), indent=1))
    fresh.replace(path)


def current_catalogue(now: datetime.datetime, *, cache: Path = CACHE, region: str = "") -> Catalogue:
    """The bundled snapshot with fresh live prices of its region put over it; of another region, those alone."""
    catalogue = load_catalogue(BUNDLED)
    if region not in ("", catalogue.region):
        catalogue = catalogue.elsewhere(region)
    live = {(p.instance_type, p.basis): p.price for p in read_cache(cache, now) if p.region == catalogue.region}
    return catalogue.with_prices(live)


def ec2_price(pricing: Any, instance_type: str, region: str, now: datetime.datetime) -> LivePrice:
    """On demand, Linux, shared tenancy. pricing: a boto3 client. Raises: NoPrice, if AWS lists no single hourly price."""
    filters = {
        "instanceType": instance_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    return _product_price(pricing, "AmazonEC2", filters, instance_type, region, "ec2", now)


def sagemaker_price(pricing: Any, instance_type: str, region: str, now: datetime.datetime) -> LivePrice:
    """Real-time hosting. pricing: a boto3 client. Raises: NoPrice, if AWS lists no single hourly price."""
    filters = {
        "productFamily": "ML Instance",
        "instanceName": f"ml.{instance_type}",
        "platoinstancetype": "Hosting",
        "regionCode": region,
    }
    return _product_price(pricing, "AmazonSageMaker", filters, instance_type, region, "sagemaker", now)


def spot_price(ec2: Any, instance_type: str, region: str, now: datetime.datetime) -> LivePrice:
    """The least of the availability zones' latest prices. ec2: a boto3 client. Raises: NoPrice, if there is none."""
    history = ec2.describe_spot_price_history(InstanceTypes=[instance_type], ProductDescriptions=["Linux/UNIX"], StartTime=now)[
        "SpotPriceHistory"
    ]
    latest: dict[str, Any] = {}
    for entry in sorted(history, key=lambda entry: entry["Timestamp"]):
        latest[entry["AvailabilityZone"]] = entry
    if not latest:
        raise NoPrice(f"AWS has no spot price of {instance_type} in {region}")
    least = min(latest.values(), key=lambda entry: float(entry["SpotPrice"]))
    source = f"EC2 spot price history, {least['AvailabilityZone']}"
    price = Price(usd_per_hour=float(least["SpotPrice"]), source=source, date=least["Timestamp"].date())
    return LivePrice(instance_type, region, "spot", price, now)


def _product_price(
    pricing: Any,
    service: str,
    filters: dict[str, str],
    instance_type: str,
    region: str,
    basis: PriceBasis,
    now: datetime.datetime,
) -> LivePrice:
    terms = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()]
    hourly: list[tuple[float, str]] = []
    for page in pricing.get_paginator("get_products").paginate(ServiceCode=service, Filters=terms):
        for product in map(json.loads, page["PriceList"]):
            for term in product["terms"].get("OnDemand", {}).values():
                hourly += [
                    (float(dimension["pricePerUnit"]["USD"]), term["effectiveDate"][:10])
                    for dimension in term["priceDimensions"].values()
                    if dimension["unit"] == "Hrs"
                ]
    if len(hourly) != 1 or hourly[0][0] <= 0:
        raise NoPrice(f"expected one hourly {basis} price of {instance_type} in {region}, AWS lists {len(hourly)}: {hourly}")
    usd_per_hour, effective = hourly[0]
    source = f"AWS Price List API, {service}, {region}, effective {effective}"
    # Dated when fetched: a price that has been in effect for years is not an old price.
    return LivePrice(instance_type, region, basis, Price(usd_per_hour=usd_per_hour, source=source, date=now.date()), now)


def fetch(instance_types: Iterable[str], region: str, now: datetime.datetime) -> tuple[list[LivePrice], list[str]]:
    """Ask AWS for every basis of each type. The second list says what could not be had.

    Raises: PricesUnavailable, if boto3 is missing or AWS cannot be asked at all (no credentials, no network).
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as exc:
        raise PricesUnavailable("live prices need boto3: pip install 'serving-gateway[aws]'") from exc
    logging.getLogger("botocore").setLevel(logging.WARNING)  # it tells where it found credentials
    bounded = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 3})
    found: list[LivePrice] = []
    missing: list[str] = []
    try:
        pricing = boto3.client(
            "pricing", region_name=region if region in _PRICING_REGIONS else _PRICING_REGIONS[0], config=bounded
        )
        ec2 = boto3.client("ec2", region_name=region, config=bounded)
        for name in instance_types:
            for ask, client in ((ec2_price, pricing), (sagemaker_price, pricing), (spot_price, ec2)):
                try:
                    found.append(ask(client, name, region, now))
                except NoPrice as exc:
                    missing.append(str(exc))
    except (BotoCoreError, ClientError) as exc:
        raise PricesUnavailable(f"AWS cannot be asked for prices: {exc}; the bundled snapshot remains in use") from exc
    return found, missing
