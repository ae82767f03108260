import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest

from loadtest.errors import UsageError
from loadtest.prices.live_prices import (
    CACHE,
    NoPrice,
    current_catalogue,
    ec2_price,
    read_cache,
    sagemaker_price,
    spot_price,
    write_cache,
)

NOW = datetime.datetime(2026, 8, 1, 12, tzinfo=datetime.UTC)

boto3 = pytest.importorskip("boto3")
Stubber = pytest.importorskip("botocore.stub").Stubber
NO_ACCOUNT = {"region_name": "us-east-1", "aws_access_key_id": "none", "aws_secret_access_key": "none"}


@pytest.fixture(scope="module")
def session() -> Any:
    return boto3.session.Session()


def product(usd: str, unit: str = "Hrs") -> str:
    dimension = {"unit": unit, "pricePerUnit": {"USD": usd}}
    term = {"effectiveDate": "2026-07-01T00:00:00Z", "priceDimensions": {"D": dimension}}
    return json.dumps({"product": {"sku": "S"}, "terms": {"OnDemand": {"S.T": term}}})


def stubbed_pricing(session: Any, service: str, filters: dict[str, str], products: list[str]) -> Any:
    client = session.client("pricing", **NO_ACCOUNT)
    stubber = Stubber(client)
    terms = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in filters.items()]
    stubber.add_response("get_products", {"PriceList": products}, {"ServiceCode": service, "Filters": terms})
    stubber.activate()
    return client


EC2_FILTERS = {
    "instanceType": "c7i.large",
    "regionCode": "us-east-1",
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}
SAGEMAKER_FILTERS = {
    "productFamily": "ML Instance",
    "instanceName": "ml.c7i.large",
    "platoinstancetype": "Hosting",
    "regionCode": "us-east-1",
}


def test_the_on_demand_price_is_the_one_hourly_linux_price(session: Any) -> None:
    pricing = stubbed_pricing(session, "AmazonEC2", EC2_FILTERS, [product("0.0893000000")])
    live = ec2_price(pricing, "c7i.large", "us-east-1", NOW)
    assert live.price.usd_per_hour == 0.0893
    assert live.price.date == NOW.date()
    assert live.price.source == "AWS Price List API, AmazonEC2, us-east-1, effective 2026-07-01"


def test_the_sagemaker_price_is_that_of_hosting(session: Any) -> None:
    pricing = stubbed_pricing(session, "AmazonSageMaker", SAGEMAKER_FILTERS, [product("0.107"), product("0.02", unit="GB")])
    assert sagemaker_price(pricing, "c7i.large", "us-east-1", NOW).price.usd_per_hour == 0.107


@pytest.mark.parametrize("products", [[], [product("0.1"), product("0.2")], [product("0.0")]])
def test_no_or_several_or_free_prices_are_an_error(session: Any, products: list[str]) -> None:
    pricing = stubbed_pricing(session, "AmazonEC2", EC2_FILTERS, products)
    with pytest.raises(NoPrice, match=r"expected one hourly ec2 price of c7i\.large in us-east-1"):
        ec2_price(pricing, "c7i.large", "us-east-1", NOW)


def spot_history(session: Any, entries: list[tuple[str, str, int]]) -> Any:
    client = session.client("ec2", **NO_ACCOUNT)
    stubber = Stubber(client)
    history = [
        {"AvailabilityZone": zone, "SpotPrice": usd, "Timestamp": NOW - datetime.timedelta(minutes=age)}
        for zone, usd, age in entries
    ]
    asked = {"InstanceTypes": ["c7i.large"], "ProductDescriptions": ["Linux/UNIX"], "StartTime": NOW}
    stubber.add_response("describe_spot_price_history", {"SpotPriceHistory": history}, asked)
    stubber.activate()
    return client


def test_the_spot_price_is_the_least_of_the_zones_latest(session: Any) -> None:
    entries = [("us-east-1a", "0.030", 5), ("us-east-1a", "0.010", 50), ("us-east-1b", "0.025", 10)]
    live = spot_price(spot_history(session, entries), "c7i.large", "us-east-1", NOW)
    assert live.price.usd_per_hour == 0.025  # the 0.010 of zone a is an old one
    assert "us-east-1b" in live.price.source


def test_no_spot_price_is_an_error(session: Any) -> None:
    with pytest.raises(NoPrice, match=r"no spot price of c7i\.large"):
        spot_price(spot_history(session, []), "c7i.large", "us-east-1", NOW)


def test_fetched_prices_are_used_for_a_day_and_spot_for_five_minutes(session: Any, tmp_path: Path) -> None:
    cache = tmp_path / "prices.json"
    on_demand = ec2_price(stubbed_pricing(session, "AmazonEC2", EC2_FILTERS, [product("0.09")]), "c7i.large", "us-east-1", NOW)
    spot = spot_price(spot_history(session, [("us-east-1a", "0.03", 1)]), "c7i.large", "us-east-1", NOW)
    write_cache(cache, [on_demand, spot], NOW)
    soon, later, tomorrow = (NOW + datetime.timedelta(minutes=minutes) for minutes in (4.9, 5.1, 24 * 60 + 1))
    assert read_cache(cache, soon) == [on_demand, spot]
    assert read_cache(cache, later) == [on_demand]
    assert current_catalogue(later, cache=cache).price("c7i.large", "ec2").usd_per_hour == 0.09
    fallback = current_catalogue(tomorrow, cache=cache).price("c7i.large", "ec2")
    assert fallback.usd_per_hour == 0.08925
    assert "karpenter" in fallback.source


def test_fetched_prices_are_kept_where_this_user_keeps_caches() -> None:
    assert Path(os.environ["XDG_CACHE_HOME"], "serving-gateway", "prices.json") == CACHE


def test_a_damaged_cache_says_so(tmp_path: Path) -> None:
    cache = tmp_path / "prices.json"
    cache.write_text("{")
    with pytest.raises(UsageError, match="cannot be read as a price cache: delete it"):
        read_cache(cache, NOW)
