"""The parts of benchmarks/peers.py that judge: ratios of rounds, the table, and who is not measured."""

import re
from pathlib import Path

from benchmarks.overhead import Figure
from benchmarks.peer_servers import INSTALLED, NOT_RUN
from benchmarks.peer_tables import Ratio, ratio
from benchmarks.peers import PEERS, Measured, absent, settings, table


def measured(server: str, rates: dict[int, float], *, errors: int = 0) -> list[Measured]:
    """At one load, by round."""
    return [
        Measured(number, Figure(server, "rest-json", 64, rps, 64 / rps * 1e3, 9.0, errors, 1e6 / rps))
        for number, rps in rates.items()
    ]


def test_a_ratio_is_of_rounds_that_both_have() -> None:
    assert ratio({0: 100.0, 1: 300.0, 2: 200.0}, {0: 50.0, 1: 50.0, 2: 50.0}) == Ratio(4.0, 2.0, 6.0)
    assert ratio({0: 100.0, 1: 300.0}, {1: 100.0, 2: 1.0}) == Ratio(3.0, 3.0, 3.0)
    assert ratio({0: 100.0}, {1: 100.0}) is None
    assert ratio({}, {0: 1.0}) is None


def test_the_table_has_medians_and_what_the_gateway_does_beside_each() -> None:
    rows = table(
        measured("embedded", {0: 1000.0, 1: 3000.0, 2: 2000.0})
        + measured("triton", {0: 1000.0, 1: 1000.0, 2: 1000.0}, errors=2),
        "embedded",
    ).splitlines()
    assert rows[2] == "| rest-json | 64 | embedded | 2000 | 32.00 | 9.00 | 500 | 0 |  |  |"
    assert rows[3] == (
        "| rest-json | 64 | triton | 1000 | 64.00 | 9.00 | 1000 | 6 | 2.00 (1.00 to 3.00) | 0.50 (0.33 to 1.00) |"
    )


def test_a_peer_that_wins_is_shown_winning_and_one_round_has_no_interval() -> None:
    text = table(measured("embedded", {0: 1000.0}) + measured("triton", {0: 2000.0}), "embedded")
    assert text.endswith("| 0 | 0.50 | 2.00 |")


def test_a_table_is_of_the_gateway_that_is_named_and_without_it_has_no_ratios() -> None:
    several = measured("embedded", {0: 1000.0}) + measured("embedded-2", {0: 2000.0})
    assert table(several, "embedded-2").splitlines()[2].endswith("| 0 | 2.00 | 0.50 |")
    assert table(measured("triton", {0: 1000.0}), "embedded").endswith("| 0 |  |  |")


def test_each_server_has_its_settings_and_each_that_is_not_run_its_reason() -> None:
    text = settings(PEERS)
    assert len(text.splitlines()) == 2 + len(PEERS) + len(NOT_RUN)
    for name, reason in NOT_RUN.items():
        assert f"| {name} | not run: {reason} |" in text


def test_all_that_is_installed_is_pinned() -> None:
    for peer in INSTALLED.values():
        assert all(re.fullmatch(r"[a-z-]+==[\d.]+", package) for package in peer.packages)


def test_a_peer_without_its_whole_environment_is_not_run(tmp_path: Path) -> None:
    assert "--setup" in absent("litserve", tmp_path)
    (tmp_path / "litserve").mkdir()
    (tmp_path / "litserve" / "whole").write_text("\n".join(INSTALLED["litserve"].packages))
    assert not absent("litserve", tmp_path)
    assert not absent("embedded", tmp_path)
