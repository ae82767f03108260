import copy
import datetime
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from gateway.instances.facts import BUNDLED, Price, Spot
from loadtest.errors import UsageError
from loadtest.prices.catalogue import Catalogue, load_catalogue

TODAY = datetime.date(2026, 8, 1)


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def test_the_bundled_file_would_pass_where_faults_are_told(catalogue: Catalogue, tmp_path: Path) -> None:
    copied = tmp_path / "instances.yaml"
    copied.write_text(BUNDLED.read_text(encoding="utf-8"))
    assert load_catalogue(copied) == catalogue


def test_every_bundled_type_has_an_on_demand_price_with_source_and_date(catalogue: Catalogue) -> None:
    assert len(catalogue.instances) >= 120
    for name in catalogue.instances:
        price = catalogue.price(name, "ec2")
        assert price.usd_per_hour > 0
        assert price.source
        assert price.date is not None


@pytest.mark.parametrize(("name", "one"), [("gateway", "instances/instances.yaml"), ("loadtest", "reports/report.css")])
def test_everything_that_a_package_reads_is_installed_with_it(name: str, one: str) -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = (path.relative_to(root / name) for path in (root / name).rglob("*.*") if path.suffix not in (".py", ".pyc"))
    data = [path for path in files if "configs" not in path.parts]  # a package of its own
    assert Path(one) in data
    assert [str(path) for path in data if not any(fnmatch(str(path), pattern) for pattern in patterns[name])] == []


def test_what_sagemaker_hosts_is_what_its_interface_takes_and_has_a_price(catalogue: Catalogue) -> None:
    model = pytest.importorskip("botocore.session").get_session().get_service_model("sagemaker")
    taken = set(model.shape_for("ProductionVariantInstanceType").enum)
    for_jobs = set(model.shape_for("TransformInstanceType").enum)
    for name, instance in catalogue.instances.items():
        assert (f"ml.{name}" in taken) == catalogue.hosted(name) == ("sagemaker" in instance.prices), name
        assert (f"ml.{name}" in for_jobs) == catalogue.transforms(name), name


def test_sagemaker_names_mean_the_same_type(catalogue: Catalogue) -> None:
    assert catalogue.instance("ml.inf2.xlarge") is catalogue.instance("inf2.xlarge")
    assert catalogue.price("ml.inf2.xlarge", "sagemaker").usd_per_hour == 0.99


def test_an_unknown_type_names_the_nearest(catalogue: Catalogue) -> None:
    with pytest.raises(UsageError, match=r"unknown instance type 'c7i\.xlrge'; the nearest are c7i\.xlarge"):
        catalogue.instance("c7i.xlrge")


def test_a_missing_price_is_an_error(catalogue: Catalogue) -> None:
    with pytest.raises(UsageError, match=r"SageMaker does not host t3\.medium, which is on EC2 only"):
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


INSTANCE = {
    "vcpu": 1,
    "memory_gib": 1,
    "architecture": "amd64",
    "cpu": "intel",
    "prices": {"ec2": {"usd_per_hour": 1, "source": "s", "date": None}},
    "spot": {"saving_percent": 50, "interruption": "<5%", "source": "s", "date": None},
    "accelerator": {"name": "a", "vendor": "aws", "count": 1, "memory_gib": 1},
}


def written(folder: Path, changes: dict[str, Any]) -> Path:
    """A file of one type, in which dotted keys are changed."""
    instance = copy.deepcopy(INSTANCE)
    for key, value in changes.items():
        *parents, last = key.split(".")
        inner: Any = instance
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    path = folder / "instances.yaml"
    path.write_text(yaml.safe_dump({"region": "r", "sources": {"s": "somewhere"}, "instances": {"x.large": instance}}))
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prices.ec2.usd_per_hour", 0),
        ("prices.ec2.usd_per_hour", float("inf")),
        ("prices.ec2.source", ""),
        ("prices.ec2.source", "unknown"),
        ("prices.ec2.more", 1),
        ("spot.saving_percent", 100),
        ("spot.saving_percent", -0.1),
        ("spot.source", ""),
        ("spot.source", "unknown"),
        ("accelerator.count", 0),
        ("accelerator.memory_gib", 0),
        ("memory_gib", 0),
        ("vcpu", 0),
        ("architecture", "mips"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=r"instances\.yaml:\d+: .*(x\.large)") as refused:
        load_catalogue(written(tmp_path, {key: value}))
    assert value != "unknown" or "source 'unknown' is not among `sources`" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spot.saving_percent", 99.5),
        ("spot.saving_percent", 0),
        ("accelerator.count", 0.1),
        ("memory_gib", 0.5),
        ("spot", None),
    ],
)
def test_what_may_be_is_taken(tmp_path: Path, key: str, value: Any) -> None:
    assert load_catalogue(written(tmp_path, {key: value})).price("x.large", "ec2").source == "somewhere"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"a: [", b"", b"[]"])
def test_a_file_that_is_no_catalogue_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "instances.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"instances\.yaml"):
        load_catalogue(path)


def test_every_fault_of_a_file_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        load_catalogue(written(tmp_path, {"vcpu": 0, "memory_gib": 0}))
    assert len(str(refused.value).splitlines()) == 2


def test_a_price_is_stale_after_ninety_days() -> None:
    price = Price(usd_per_hour=1, source="s", date=TODAY)
    assert price.flags(TODAY + datetime.timedelta(days=90)) == ()
    assert price.flags(TODAY + datetime.timedelta(days=91)) != ()
    assert price.flags(TODAY - datetime.timedelta(days=1)) == ()  # it may be tomorrow elsewhere
    assert price.flags(TODAY - datetime.timedelta(days=2)) == ("in the future",)


def test_what_was_read_nowhere_is_no_price() -> None:
    with pytest.raises(ValidationError, match="source"):
        Price(usd_per_hour=1, source="", date=TODAY)
    with pytest.raises(ValidationError, match="source"):
        Spot(saving_percent=1, interruption="<5%", source="", date=TODAY)


def test_a_price_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Price(usd_per_hour=1, source="s", date=TODAY).usd_per_hour = 0.5  # type: ignore[misc]


def test_what_has_no_near_name_is_refused_without_one(catalogue: Catalogue) -> None:
    with pytest.raises(UsageError) as refused:
        catalogue.instance("zzzzzzzz")
    every = len(catalogue.instances)
    assert str(refused.value) == f"unknown instance type 'zzzzzzzz': `loadtest prices list` shows all {every}"
    with pytest.raises(UsageError) as refused:
        catalogue.instance("c7i.large1")
    assert str(refused.value).count(", ") == 2  # three are enough


def test_a_live_price_of_an_unknown_type_is_left_out(catalogue: Catalogue) -> None:
    live = Price(usd_per_hour=0.5, source="AWS Price List API", date=TODAY)
    assert set(catalogue.with_prices({("none.large", "ec2"): live}).instances) == set(catalogue.instances)


def test_a_price_of_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    price = "{usd_per_hour: 0, source: s, date: null}"
    instance = f"{{vcpu: 1, memory_gib: 1, architecture: amd64, cpu: intel, prices: {{ec2: {price}}}}}"
    path.write_text(f"region: us-east-1\nsources: {{s: somewhere}}\ninstances:\n  x.large: {instance}\n")
    with pytest.raises(UsageError, match=r"instances\.x\.large\.prices\.ec2\.usd_per_hour: .*greater than 0"):
        load_catalogue(path)
