"""`loadtest prices`, without a network."""

import re
from pathlib import Path

import pytest

from loadtest.cli import main
from loadtest.errors import ExitCode

pytestmark = pytest.mark.slow  # every command reads the whole catalogue


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> "Prices":
    return Prices(tmp_path / "cache.json", capsys)


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
    assert len(re.findall(r"^│ [\w-]+\.", told, re.MULTILINE)) == 120
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


def test_prices_that_are_unknown_estimated_stale_or_undated_are_marked(prices: Prices) -> None:
    told = prices("list")[1]
    assert row(told, "t3.medium ")[6] == "unknown"
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
    assert re.search(r"sagemaker\s*│ unknown", told)
    assert re.search(r"taken back in a month: .*% of instances", told)


def test_show_needs_a_type(prices: Prices) -> None:
    code, _, said = prices("show")
    assert code == ExitCode.USAGE
    assert "name at least one instance type" in said


@pytest.mark.parametrize("action", ["show", "refresh"])
def test_an_unknown_type_is_refused_before_anything_is_asked(prices: Prices, action: str) -> None:
    code, _, said = prices(action, "c7i.xlrge")
    assert code == ExitCode.USAGE
    assert "unknown instance type 'c7i.xlrge'; the nearest are c7i." in said


def test_what_can_be_asked_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prices", "--help"])
    told = capsys.readouterr().out
    assert "{list,show,refresh}" in told
    assert "--region REGION" in told
    assert "default us-east-1" in told
    assert "--cache PATH" in told
