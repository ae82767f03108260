"""`loadtest prices`, without a network: what it asks of AWS goes to a double on the loopback, as boto3 sends it."""

import datetime
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from gateway.instances.facts import Price
from loadtest.cli import main
from loadtest.errors import ExitCode
from loadtest.prices.catalogue import load_catalogue
from loadtest.prices.live_prices import LivePrice, write_cache

pytestmark = pytest.mark.slow  # every command reads the whole catalogue

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> "Prices":
    return Prices(tmp_path / "not" / "yet" / "cache.json", capsys)


class Prices:
    def __init__(self, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._cache, self._capsys = cache, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["prices", *arguments, "--cache", str(self._cache)])
        told = self._capsys.readouterr()
        return code, told.out, told.err


def row(text: str, name: str) -> list[str]:
    """The cells of the line that begins so; two blanks or a rule part cells."""
    lines = [line.strip(" │") for line in text.splitlines()]
    return re.split(r"\s*│\s*", next(line for line in lines if line.startswith(name)))


def test_all_types_are_listed_with_what_they_are_and_what_they_cost(prices: Prices) -> None:
    code, told, _ = prices()
    assert code == ExitCode.MET
    assert "USD per hour, us-east-1" in told
    assert row(told, "inf2.xlarge ")[1:4] == ["4", "16", "1 × inferentia2"]
    assert row(told, "inf2.xlarge ")[4].startswith("0.7582")
    assert row(told, "c6i.large ")[3] == ""
    assert len(re.findall(r"^│ [\w-]+\.", told, re.MULTILINE)) == len(load_catalogue().instances)
    assert "* estimated, † stale or undated" in told


def test_a_prefix_lists_its_types_alone_by_either_name(prices: Prices) -> None:
    for prefix in ("inf2", "ml.inf2"):
        names = re.findall(r"^│ (\w+\.\w+)", prices("list", prefix)[1], re.MULTILINE)
        assert len(names) > 2
        assert all(name.startswith("inf2.") for name in names)
    names = re.findall(r"^│ (\w+\.\w+)", prices("list", "t3", "inf2")[1], re.MULTILINE)
    assert {name.split(".")[0] for name in names} == {"t3", "inf2"}


def test_numbers_stand_on_the_right(prices: Prices) -> None:
    lines = prices("list", "inf2")[1].splitlines()
    lone = next(line for line in lines if "inf2.xlarge" in line).split("│")
    assert lone[1].startswith(" inf2.xlarge")
    assert lone[2].endswith(" 4 ")
    assert lone[2].startswith("  ")
    assert lone[5].endswith((" ", "† "))


def test_each_price_stands_under_its_name(prices: Prices) -> None:
    head = next(line for line in prices("list", "inf2")[1].splitlines() if "accelerator" in line)
    assert re.split(r"\s*┃\s*", head.strip("┃ ")) == ["type", "vCPU", "GiB", "accelerator", "EC2", "spot", "SageMaker"]


def test_an_unknown_price_hides_none_of_the_others(prices: Prices) -> None:
    told = prices("show", "g7.2xlarge")[1]
    assert row(told, "spot ")[1] == "unknown"
    assert float(row(told, "sagemaker ")[1]) > 0


def test_prices_that_are_unknown_estimated_stale_or_undated_are_marked(prices: Prices) -> None:
    told = prices("list")[1]
    assert row(told, "t3.medium ")[6] == "EC2 only"
    assert row(told, "c6i.large ")[6].rstrip("†").endswith("*")
    assert "*" not in row(told, "g6.4xlarge ")[6]
    assert row(told, "g6.4xlarge ")[6].endswith("†")  # undated
    assert row(told, "inf2.xlarge ")[6] == "0.9900†"  # of January 2025


def test_one_type_is_shown_with_the_source_of_each_price(prices: Prices) -> None:
    code, told, _ = prices("show", "ml.inf2.xlarge", "t3.medium")
    assert code == ExitCode.MET
    assert "inf2.xlarge: 4 vCPU, 16 GiB, amd64" in told
    assert "ml.inf2.xlarge" not in told
    assert row(told, "ec2")[1] == "0.7582"
    assert row(told, "sagemaker")[1:3] == ["0.99", "2025-01-26"]
    assert "days old" in row(told, "sagemaker")[3]
    assert row(told, "sagemaker")[4]
    assert "estimated" in row(told, "spot")[3]
    assert "t3.medium: 2 vCPU" in told
    assert re.search(r"sagemaker\s*│ EC2 only", told)
    assert re.search(r"taken back in a month: .*% of instances", told)


def test_show_needs_a_type(prices: Prices) -> None:
    code, _, said = prices("show")
    assert code == ExitCode.USAGE
    assert "name at least one instance type" in said


def test_prices_of_another_region_are_those_that_were_fetched_there(tmp_path: Path, prices: Prices) -> None:
    price = Price(usd_per_hour=0.1234, source="the list", date=NOW.date())
    write_cache(tmp_path / "not" / "yet" / "cache.json", [LivePrice("c7i.large", "eu-central-1", "ec2", price, NOW)], NOW)
    _, told, _ = prices("list", "c7i.large", "c7i.xlarge", "--region", "eu-central-1")
    assert "USD per hour, eu-central-1" in told
    assert row(told, "c7i.large ")[4:] == ["0.1234", "unknown", "unknown"]
    assert row(told, "c7i.xlarge ")[4:] == ["unknown"] * 3
    _, told, _ = prices("list", "c7i.large")
    assert row(told, "c7i.large ")[4].startswith("0.089")


@pytest.mark.parametrize("action", ["show", "refresh"])
def test_an_unknown_type_is_refused_before_anything_is_asked(prices: Prices, action: str) -> None:
    code, _, said = prices(action, "c7i.xlrge")
    assert code == ExitCode.USAGE
    assert "unknown instance type 'c7i.xlrge'; the nearest are c7i." in said


@pytest.mark.parametrize("action", ["list", "refresh"])
@pytest.mark.parametrize("region", ["", "eu west"])
def test_what_is_no_region_is_told(prices: Prices, action: str, region: str) -> None:
    code, told, said = prices(action, "c7i.large", "--region", region)
    assert (code, told) == (ExitCode.USAGE, "")
    assert said == f"loadtest: --region {region!r}: expected a region of AWS, such as us-east-1\n"


def test_what_can_be_asked_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prices", "--help"])
    told = capsys.readouterr().out
    assert "{list,show,refresh}" in told
    assert "--region REGION" in told
    assert "default us-east-1" in told
    assert "--cache PATH" in told


def product(usd: str) -> str:
    """One of the Price List API, with what it lists beside the hourly price."""
    dimensions = {"H": {"unit": "Hrs", "pricePerUnit": {"USD": usd}}, "Q": {"unit": "Quantity", "pricePerUnit": {"USD": "7"}}}
    term = {"effectiveDate": "2026-07-01T00:00:00Z", "priceDimensions": dimensions}
    return json.dumps({"product": {"sku": "S"}, "terms": {"OnDemand": {"S.T": term}, "Reserved": {}}})


class Aws(ThreadingHTTPServer):
    """GetProducts of the Price List API (JSON 1.1) and DescribeSpotPriceHistory of EC2 (query in, XML out).

    on_demand, hosting: USD by instance type, found on the second page. spot: USD. refuses: what it answers instead once so
    many were answered as `patience` says. asked: (region it was signed for, action, instance type).
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.on_demand: dict[str, str] = {}
        self.hosting: dict[str, str] = {}
        self.spot: dict[str, str] = {}
        self.refuses, self.patience = "", 0
        self.asked: list[tuple[str, str, str]] = []


class Answering(BaseHTTPRequestHandler):
    server: Aws
    protocol_version = "HTTP/1.1"  # connections are kept

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        signed = re.search(r"Credential=[^/]+/\d+/([^/]+)/(\w+)/", self.headers["Authorization"])
        assert signed is not None
        region = signed[1]
        if self.server.refuses and len(self.server.asked) >= self.server.patience:
            self._answer(400, "application/x-amz-json-1.1", json.dumps({"__type": self.server.refuses, "message": "not you"}))
        elif self.headers["X-Amz-Target"] == "AWSPriceListService.GetProducts":
            self._answer(200, "application/x-amz-json-1.1", json.dumps(self._products(region, json.loads(body))))
        else:
            self._answer(200, "text/xml", self._history(region, parse_qs(body)))

    def _products(self, region: str, asked: dict[str, Any]) -> dict[str, Any]:
        wanted = {term["Field"]: term["Value"] for term in asked["Filters"]}
        name = wanted.get("instanceType") or wanted["instanceName"].removeprefix("ml.")
        prices = self.server.on_demand if asked["ServiceCode"] == "AmazonEC2" else self.server.hosting
        if "NextToken" not in asked:
            self.server.asked.append((region, f"{asked['ServiceCode']} in {wanted['regionCode']}", name))
            return {"FormatVersion": "aws_v1", "PriceList": []} | ({"NextToken": "second"} if name in prices else {})
        return {"FormatVersion": "aws_v1", "PriceList": [product(prices[name])]}

    def _history(self, region: str, asked: dict[str, list[str]]) -> str:
        (action,), (name,) = asked["Action"], asked["InstanceType.1"]
        self.server.asked.append((region, action, name))
        item = (
            f"<item><instanceType>{name}</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{self.server.spot.get(name)}</spotPrice><timestamp>{NOW:%Y-%m-%dT%H:%M:%S.000Z}</timestamp>"
            f"<availabilityZone>{region}c</availabilityZone></item>"
        )
        return (
            '<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>'
            f"<spotPriceHistorySet>{item if name in self.server.spot else ''}</spotPriceHistorySet><nextToken/>"
            "</DescribeSpotPriceHistoryResponse>"
        )

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: pytest shows what a test prints."""


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """What a user would set to ask another AWS than the real one, and no account of this machine's."""
    boto3 = pytest.importorskip("boto3")
    with Aws() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # which remembers the environment of its first use
        yield server
        server.shutdown()
        thread.join()


def test_what_aws_asks_today_is_fetched_and_shown_from_then_on(aws: Aws, prices: Prices, tmp_path: Path) -> None:
    aws.on_demand, aws.hosting, aws.spot = {"c7i.large": "0.1234"}, {"c7i.large": "0.2345"}, {"c7i.large": "0.0345"}
    code, told, _ = prices("refresh", "ml.c7i.large")
    days = (NOW.date(), datetime.datetime.now(datetime.UTC).date())  # it may be midnight
    assert (code, told.replace("\n", "")) == (
        ExitCode.MET,
        f"3 prices of us-east-1 fetched into {tmp_path / 'not' / 'yet' / 'cache.json'}",
    )
    assert aws.asked == [
        ("us-east-1", "AmazonEC2 in us-east-1", "c7i.large"),
        ("us-east-1", "AmazonSageMaker in us-east-1", "c7i.large"),
        ("us-east-1", "DescribeSpotPriceHistory", "c7i.large"),
    ]
    shown = prices("show", "c7i.large")[1]
    for basis, usd, source in (
        ("ec2", "0.1234", "AWS Price List API, AmazonEC2, us-east-1, effective 2026-07-01"),
        ("sagemaker", "0.2345", "AWS Price List API, AmazonSageMaker, us-east-1, effective 2026-07-01"),
        ("spot", "0.0345", "EC2 spot price history, us-east-1c"),
    ):
        assert row(shown, f"{basis} ") in [[basis, usd, str(day), "", source] for day in days]
    assert row(prices("list", "c7i.large")[1], "c7i.large ") == ["c7i.large", "2", "4", "", "0.1234", "0.0345", "0.2345"]


def test_what_aws_does_not_list_is_told_and_the_rest_is_kept(aws: Aws, prices: Prices) -> None:
    aws.on_demand = {"c7i.large": "0.1234"}
    code, told, said = prices("refresh", "c7i.large", "t3.medium")
    assert (code, said) == (ExitCode.MET, "")  # and nothing of where credentials were found
    assert "expected one hourly sagemaker price of c7i.large in us-east-1, AWS lists 0: []" in told
    assert "AWS has no spot price of c7i.large in us-east-1" in told
    assert "expected one hourly ec2 price of t3.medium in us-east-1" in told
    assert "1 prices of us-east-1 fetched into" in told
    assert "0.1234" in prices("show", "c7i.large")[1]


def test_no_price_at_all_is_a_failure(aws: Aws, prices: Prices) -> None:
    code, told, _ = prices("refresh", "c7i.large")
    assert code == 1
    assert "0 prices of us-east-1 fetched into" in told


@pytest.mark.parametrize(("region", "asked_in"), [("eu-west-1", "us-east-1"), ("eu-central-1", "eu-central-1")])
def test_another_region_is_asked_where_its_prices_are_told(aws: Aws, prices: Prices, region: str, asked_in: str) -> None:
    aws.on_demand, aws.spot = {"c7i.large": "0.5"}, {"c7i.large": "0.25"}
    code, told, _ = prices("refresh", "c7i.large", "--region", region)
    assert (code, f"2 prices of {region} fetched into" in told) == (ExitCode.MET, True)
    assert aws.asked == [
        (asked_in, f"AmazonEC2 in {region}", "c7i.large"),
        (asked_in, f"AmazonSageMaker in {region}", "c7i.large"),
        (region, "DescribeSpotPriceHistory", "c7i.large"),
    ]
    # The catalogue is of us-east-1: what another region asks is not put over it.
    assert "0.08925" in prices("show", "c7i.large")[1]


def test_without_names_all_types_of_the_catalogue_are_asked_for_in_turn(aws: Aws, prices: Prices) -> None:
    aws.refuses, aws.patience = "AccessDeniedException", 9  # 120 times three would take long
    assert prices("refresh")[0] == ExitCode.USAGE
    assert [name for _, _, name in aws.asked[::3]] == list(load_catalogue().instances)[:3]


def test_who_is_not_allowed_to_ask_keeps_the_bundled_prices(aws: Aws, prices: Prices) -> None:
    aws.refuses = "AccessDeniedException"
    code, _, said = prices("refresh", "c7i.large")
    assert code == ExitCode.USAGE
    assert "AWS cannot be asked for prices: An error occurred (AccessDeniedException)" in said
    assert "the bundled snapshot remains in use" in said
    assert "0.08925" in prices("show", "c7i.large")[1]


def test_without_an_account_aws_cannot_be_asked(aws: Aws, prices: Prices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    code, _, said = prices("refresh", "c7i.large")
    assert code == ExitCode.USAGE
    assert "AWS cannot be asked for prices: Unable to locate credentials" in said
    assert aws.asked == []
