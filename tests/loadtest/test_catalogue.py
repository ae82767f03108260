import datetime
from pathlib import Path

import pytest

from loadtest.catalogue import Catalogue, Price, load_catalogue
from loadtest.errors import UsageError

TODAY = datetime.date(2026, 8, 1)


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def test_every_bundled_type_has_an_on_demand_price_with_source_and_date(catalogue: Catalogue) -> None:
    assert len(catalogue.instances) == 120
    for name in catalogue.instances:
        price = catalogue.price(name, "ec2")
        assert price.usd_per_hour > 0
        assert price.source
        assert price.date is not None


def test_sagemaker_names_mean_the_same_type(catalogue: Catalogue) -> None:
    assert catalogue.instance("ml.inf2.xlarge") is catalogue.instance("inf2.xlarge")
    assert catalogue.price("ml.inf2.xlarge", "sagemaker").usd_per_hour == 0.99


def test_an_unknown_type_names_the_nearest(catalogue: Catalogue) -> None:
    with pytest.raises(UsageError, match=r"unknown instance type 'c7i\.xlrge'; the nearest are c7i\.xlarge"):
        catalogue.instance("c7i.xlrge")


def test_a_missing_price_is_an_error(catalogue: Catalogue) -> None:
    with pytest.raises(UsageError, match=r"no sagemaker price is known for t3\.medium: set `usd_per_hour`"):
        catalogue.price("t3.medium", "sagemaker")
    with pytest.raises(UsageError, match=r"no spot price is known for g7\.2xlarge"):
        catalogue.price("g7.2xlarge", "spot")


def test_a_spot_price_is_the_advisors_saving_and_flagged_as_estimated(catalogue: Catalogue) -> None:
    price = catalogue.price("inf2.xlarge", "spot")
    assert price.usd_per_hour == pytest.approx(0.7582 * (1 - 0.78))
    assert "estimated" in price.flags(TODAY)


def test_estimated_undated_and_old_prices_are_flagged(catalogue: Catalogue) -> None:
    assert catalogue.price("c6i.large", "sagemaker").flags(TODAY) == ("estimated",)
    assert catalogue.price("g6.4xlarge", "sagemaker").flags(TODAY) == ("undated",)
    assert catalogue.price("inf2.xlarge", "sagemaker").flags(TODAY) == ("552 days old",)  # since 2025-01-26
    assert catalogue.price("inf2.xlarge", "ec2").flags(TODAY) == ()


def test_live_prices_replace_bundled_ones(catalogue: Catalogue) -> None:
    live = Price(usd_per_hour=0.5, source="AWS Price List API", date=TODAY)
    fresh = catalogue.with_prices({("inf2.xlarge", "ec2"): live, ("inf2.xlarge", "spot"): live})
    assert fresh.price("inf2.xlarge", "ec2") == live
    assert fresh.price("inf2.xlarge", "spot") == live
    assert catalogue.price("inf2.xlarge", "ec2").usd_per_hour == 0.7582


def test_a_price_of_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    price = "{usd_per_hour: 0, source: s, date: null}"
    instance = f"{{vcpu: 1, memory_gib: 1, architecture: amd64, cpu: intel, prices: {{ec2: {price}}}}}"
    path.write_text(f"region: us-east-1\nsources: {{s: somewhere}}\ninstances:\n  x.large: {instance}\n")
    with pytest.raises(UsageError, match=r"instances\.x\.large\.prices\.ec2\.usd_per_hour: .*greater than 0"):
        load_catalogue(path)
