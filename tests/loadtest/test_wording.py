from dataclasses import dataclass
from typing import Any

import pytest

from loadtest import wording


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (wording.rate(12345.6), "12,346/s"),
        (wording.rate(467.4), "467/s"),
        (wording.rate(0.5), "0.500/s"),
        (wording.rate(0), "0/s"),
        (wording.usd(0.00001234), "$0.0000123"),
        (wording.usd(0.05348), "$0.0535"),
        (wording.usd(1890), "$1,890"),
        (wording.ms(48.04), "48.0 ms"),
        (wording.ms(1.5), "1.50 ms"),
        (wording.ms(1.0), "1.00 ms"),
        (wording.ms(0.02), "0.020 ms"),
        (wording.percent(0.0789), "7.9 %"),
        (wording.percent(0.19), "19 %"),
        (wording.attained(0.99996), "99.99 %"),
        (wording.attained(1.0), "100.00 %"),
        (wording.clock(133), "02:13"),
        (wording.clock(6000), "100:00"),
        (wording.counted(1, "row"), "1 row"),
        (wording.counted(0, "row"), "0 rows"),
        (wording.counted(2000, "session"), "2,000 sessions"),
        (wording.minutes(60), "1 minute"),
        (wording.minutes(61), "2 minutes"),
        (wording.minutes(5, "more "), "1 more minute"),
        (wording.slo_in_words("p99<50ms,errors<0.1%"), "p99 under 50 ms and errors under 0.1 %"),
        (wording.slo_in_words("service p95<7.5ms"), "service p95 under 7.5 ms"),
    ],
)
def test_a_figure_is_told_without_an_exponent_and_with_the_digits_that_were_measured(told: str, text: str) -> None:
    assert told == text


@pytest.mark.parametrize(
    ("probability", "text"),
    [(1.0, "over 99 %"), (0.995, "over 99 %"), (0.99, "99 %"), (0.87, "87 %"), (0.004, "under 1 %"), (0.0, "under 1 %")],
)
def test_an_estimated_probability_is_never_certain(probability: float, text: str) -> None:
    assert wording.chance(probability) == text


def test_letters_go_on_after_z() -> None:
    assert [wording.letters(place) for place in (0, 1, 25, 26, 27, 701, 702)] == ["A", "B", "Z", "AA", "AB", "ZZ", "AAA"]


@dataclass(frozen=True)
class One:
    name: str
    instance_type: str
    backend: str
    settings: dict[str, Any]


@pytest.mark.parametrize(
    ("candidates", "told"),
    [
        ([("c7i", "torch", {"threads": 1}), ("c8g", "torch", {"threads": 1})], ["c7i", "c8g"]),
        ([("c7i", "torch", {"threads": 1}), ("c7i", "onnx", {"threads": 2})], ["torch, threads 1", "onnx, threads 2"]),
        ([("c7i", "torch", {"threads": 1}), ("c7i", "torch", {"threads": 1, "precision": "bf16"})], ["0", "1"]),  # one of none
        ([("c7i", "torch", {}), ("c7i", "torch", {})], ["0", "1"]),  # what is told does not tell
        ([("c7i", "a", {"n": 1}), ("c7i", "a", {"n": 1}), ("c8g", "a", {"n": 2})], ["0", "1", "2"]),
    ],
)
def test_candidates_are_told_by_what_differs_and_by_name_where_that_does_not_tell(
    candidates: list[tuple[str, str, dict[str, Any]]], told: list[str]
) -> None:
    assert wording.differences([One(str(n), *parts) for n, parts in enumerate(candidates)]) == told
