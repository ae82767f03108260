"""Conversations with slips in them, as benchmarks/fuzz_http2.py tells by the million."""

import random

import pytest

from benchmarks.fuzz_http2 import check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(4))
def test_slips_raise_nothing_hold_little_and_mean_the_same_however_they_are_cut(seed: int) -> None:
    for case in range(700):
        check(random.Random(f"test {seed}:{case}"))
