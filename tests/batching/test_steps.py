"""Steps of padding, told by what batches took."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from gateway.batching.service_curve import ServiceCurve, size_grid
from gateway.batching.steps import Steps, telling

MS = 1_000_000


def in_steps(tile: int, fixed_ms: float, row_ms: float) -> Callable[[int], float]:
    return lambda rows: fixed_ms + row_ms * (1 if rows == 1 else math.ceil(rows / tile) * tile)


def smooth(rows: int) -> float:
    return 4 + 1.5 * rows


def uneven(rows: int) -> float:
    return (4 + 1.5 * rows) * (1 + 0.05 * math.sin(7 * rows))


def bent(rows: int) -> float:
    return max(10.0, 1.25 * rows)


def learned(took_ms: Callable[[int], float], scatter: float, batches: int, seed: int, max_rows: int = 32) -> ServiceCurve:
    rng = np.random.default_rng(seed)
    curve = ServiceCurve(size_grid(max_rows))
    for rows in (1, max_rows, 2):
        curve.probe(rows, [round(took_ms(rows) * MS)] * 2)
    for _ in range(batches):
        rows = int(rng.integers(1, max_rows + 1))
        curve.observe(rows, 1, round(took_ms(rows) * float(rng.lognormal(0, scatter)) * MS))
    return curve


@pytest.mark.parametrize("tile", [4, 8, 16])
def test_runs_before_traffic_tell_steps(tile: int) -> None:
    took_ms = in_steps(tile, 1, 0.8)
    curve = learned(took_ms, 0, 0, 0, 64)
    assert curve.telling_rows == (2, tile, tile + 1, 2 * tile, tile, tile + 1)
    for rows in curve.telling_rows:
        curve.probe(rows, [round(took_ms(rows) * MS)] * 2)
    assert curve.steps == Steps(tile, True)
    assert [curve.expected_ns(rows) / MS for rows in range(1, 65)] == pytest.approx([took_ms(rows) for rows in range(1, 65)])


@pytest.mark.parametrize("took_ms", [smooth, uneven, bent])
def test_of_a_smooth_model_no_more_sizes_are_run(took_ms: Callable[[int], float]) -> None:
    assert telling([(rows, took_ms(rows), 1) for rows in (1, 2, 32)]) == ()


def test_only_what_runs_in_any_number_of_rows_is_asked_for_steps() -> None:
    curve = ServiceCurve((1, 2, 16))
    assert curve.telling_rows == ()
    for rows, ms in ((1, 1), (16, 16), (2, 15)):
        curve.probe(rows, [ms * MS] * 2)
    assert curve.telling_rows == ()


@pytest.mark.parametrize(("scatter", "batches"), [(0.05, 64), (0.15, 128), (0.3, 256)])
@pytest.mark.parametrize("seed", range(4))
def test_traffic_tells_steps_and_from_few_sizes_those_of_all(scatter: float, batches: int, seed: int) -> None:
    curve = learned(in_steps(8, 1, 0.8), scatter, batches, seed)
    assert curve.steps == Steps(8, True)
    assert len({curve.expected_ns(rows) for rows in range(9, 17)}) == 1


def test_rows_padded_to_powers_of_two_are_told() -> None:
    curve = learned(lambda rows: 1 + 0.8 * 2 ** math.ceil(math.log2(rows)), 0.05, 128, 0)
    assert curve.steps == Steps(0, True)


@pytest.mark.parametrize("took_ms", [smooth, uneven, bent])
@pytest.mark.parametrize("scatter", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_a_smooth_model_has_none(took_ms: Callable[[int], float], scatter: float, seed: int) -> None:
    assert learned(took_ms, scatter, 512, seed).steps is None


def test_steps_that_were_believed_wrongly_are_let_go() -> None:
    curve = learned(in_steps(8, 1, 0.8), 0.05, 128, 0)
    assert curve.steps is not None
    rng = np.random.default_rng(1)
    for _ in range(2000):
        rows = int(rng.integers(1, 33))
        curve.observe(rows, 1, round((1 + 0.8 * rows) * float(rng.lognormal(0, 0.05)) * MS))
    assert curve.steps is None


def test_steps_survive_a_restart() -> None:
    curve = learned(in_steps(8, 1, 0.8), 0.05, 128, 0)
    again = ServiceCurve(curve.sizes)
    again.restore(curve.to_dict())
    assert again.steps == curve.steps == Steps(8, True)
