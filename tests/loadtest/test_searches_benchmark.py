"""What the benchmark of searches counts as a fault."""

import pytest

from benchmarks.searches import misled

PROVEN = {"state": "proven", "winner": "x"}
NONE = {"state": "no candidate", "winner": ""}


@pytest.mark.parametrize(
    ("name", "short", "long", "fault"),
    [
        ("mlp", PROVEN, PROVEN, False),
        ("mlp", PROVEN, NONE, True),
        ("slow", NONE, NONE, False),
        ("slow", PROVEN, PROVEN, True),
        ("slow", {"state": "not proven", "winner": "x"}, {"state": "not proven", "winner": ""}, True),
    ],
)
def test_a_search_is_at_fault_that_says_otherwise_than_a_longer_one_or_finds_a_winner_where_there_is_none(
    name: str, short: dict[str, str], long: dict[str, str], fault: bool
) -> None:
    assert misled(name, short, long) == fault
