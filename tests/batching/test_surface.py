"""t(rows, length) over all lengths of a model: what it is fitted to, and what it tells of lengths that never ran."""

import json
import random
from collections.abc import Callable, Sequence

import pytest

from gateway.batching.groups import FURTHER_LENGTH, further_rows
from gateway.batching.queue import LengthGroup
from gateway.batching.service_model import ServiceModel
from gateway.batching.steps import Steps
from gateway.batching.surface import Surface
from gateway.config import Ragged
from tests.batching.curves import MS, kept_curve, kept_model


def taught(fixed: float, row: float, cell: float, points: list[tuple[int, int]], noise: float = 0.0) -> Surface:
    surface, lots = Surface(), random.Random(7)
    for rows, length in points:
        time_ns = (fixed + row * rows + cell * rows * length) * MS
        surface.learn(rows, length, time_ns * lots.lognormvariate(-(noise**2) / 2, noise), time_ns)
    return surface


GRID = [(rows, length) for rows in (1, 2, 5, 9) for length in (8, 20, 100)]


@pytest.mark.parametrize("terms", [(2, 0, 0.15), (20, 0, 0.005), (2, 1, 0.1), (3, 2, 0), (0, 0, 0.5), (0, 4, 0)])
def test_a_surface_without_noise_is_found(terms: tuple[float, float, float]) -> None:
    fixed, slope = taught(*terms, GRID).line_ns(60)
    assert (fixed / MS, slope / MS) == pytest.approx((terms[0], terms[1] + 60 * terms[2]), abs=0.02)


def test_cells_that_cost_more_the_more_they_are_are_told_from_dear_ones() -> None:
    surface = Surface()
    for rows, length in GRID:
        cells = rows * length
        time_ns = (3 + 0.14 * cells + 0.004 * cells**1.5) * MS
        surface.learn(rows, length, time_ns, time_ns)
    assert surface.time_ns(4, 60) / MS == pytest.approx(3 + 0.14 * 240 + 0.004 * 240**1.5)
    assert 2 * surface.time_ns(1, 60) > surface.time_ns(2, 60)  # two short ones go well together
    assert 2 * surface.time_ns(1, 250) < surface.time_ns(2, 250)  # and two long ones do not


def test_of_batches_that_scatter_it_finds_the_mean() -> None:
    fixed, slope = taught(2, 0, 0.15, GRID * 40, noise=0.3).line_ns(60)
    assert (fixed / MS, slope / MS) == pytest.approx((2, 9), rel=0.15)


def test_one_length_alone_tells_the_others_in_proportion() -> None:
    fixed, slope = taught(2, 0, 0.1, [(1, 10), (4, 10), (8, 10)]).line_ns(40)
    assert (fixed / MS, slope / MS) == pytest.approx((2, 4))
    fixed, slope = taught(0, 0, 0.5, [(1, 10)]).line_ns(20)  # and one batch alone, all that is known
    assert (fixed, slope / MS) == pytest.approx((0, 10))


def test_a_batch_that_was_thought_to_take_far_longer_counts_like_any_other() -> None:
    surface = Surface()
    for rows, length, time_ms, about_ms in [(1, 8, 5.0, 5.0), (16, 8, 5.1, 80.0), (1, 32, 5.4, 5.0), (1, 48, 7.0, 5.0)]:
        surface.learn(rows, length, time_ms * MS, about_ms * MS)
    assert surface.time_ns(16, 128) < 12 * MS  # as the second tells, whatever luck the last two had


def test_nothing_is_told_before_anything_was_seen() -> None:
    assert not Surface().ready
    assert not ServiceModel(8).curve(LengthGroup("k", 16)).ready


def test_a_length_that_never_ran_is_predicted_by_those_that_did_and_follows_them() -> None:
    model = ServiceModel(8)
    for rows, length in [(1, 10), (1, 100), (4, 10), (4, 100)] * 10:
        model.curve(LengthGroup("k", length)).observe(rows, 1, round((2 + 0.1 * rows * length) * MS))
    between = model.curve(LengthGroup("k", 40))
    assert between.ready
    assert [between.expected_ns(rows) / MS for rows in (1, 3, 8)] == pytest.approx([6, 14, 34], rel=0.05)
    for rows, length in [(1, 10), (1, 100), (4, 10), (4, 100)] * 40:  # twice as slow: told by these
        model.curve(LengthGroup("k", length)).observe(rows, 1, round(2 * (2 + 0.1 * rows * length) * MS))
    assert between.current().expected_ns(3) / MS == pytest.approx(28, rel=0.1)


def test_what_a_length_shows_itself_counts_more_than_the_surface_from_the_ninth_batch_of_a_size_on_alone() -> None:
    model = ServiceModel(8)
    model.restore(kept_model({LengthGroup("k", length): kept_curve(2, 0.1 * length, 8) for length in (10, 100)}))
    for length in (10, 100):
        model.curve(LengthGroup("k", length))
    odd = model.curve(LengthGroup("k", 50))
    before = odd.expected_ns(2)
    odd.observe(2, 1, 24 * MS)
    assert before / MS == pytest.approx(12, rel=0.01)
    assert odd.expected_ns(2) / MS == pytest.approx(12 + 12 / 5, rel=0.02)
    for _ in range(40):
        odd.observe(2, 1, 24 * MS)
        model.curve(LengthGroup("k", 10)).observe(1, 1, 3 * MS)
        model.curve(LengthGroup("k", 100)).observe(1, 1, 12 * MS)
    assert odd.expected_ns(2) / MS == pytest.approx(24, rel=0.05)
    assert odd.expected_ns(8) / MS == pytest.approx(84, rel=0.2)  # its own size tells the others
    assert model.curve(LengthGroup("k", 10)).expected_ns(1) / MS == pytest.approx(3, rel=0.05)


def padded_ms(rows: int, length: int) -> float:
    """Of a model that pads all but a lone row to a multiple of eight."""
    return 4 + 0.02 * (1 if rows == 1 else -(-rows // 8) * 8) * length


def probed(time_ms: Callable[[int, int], float]) -> ServiceModel:
    """As a lane is before traffic."""
    model = ServiceModel(32)
    for rows in (1, 32):
        model.probe(LengthGroup("k", 8), rows, [round(time_ms(rows, 1) * MS)] * 2)
    rows_to_run: Sequence[int] = further_rows(Ragged(pad={"ids": 0}), model.sizes, 50 * MS)
    curve = model.curve(LengthGroup("k", FURTHER_LENGTH))
    while rows_to_run:
        for rows in rows_to_run:
            curve.probe(rows, [round(time_ms(rows, FURTHER_LENGTH) * MS)] * 2)
        rows_to_run = curve.telling_rows
    return model


def test_steps_in_which_rows_are_padded_are_told_by_one_length_for_all_before_traffic() -> None:
    other = probed(padded_ms).curve(LengthGroup("k", 128))
    assert other.steps == Steps(8, lone=True)
    assert [other.expected_ns(rows) / MS for rows in (1, 2, 8, 9, 16)] == pytest.approx(
        [padded_ms(rows, 128) for rows in (1, 2, 8, 9, 16)], rel=0.05
    )


def test_a_model_that_is_smooth_runs_no_more_sizes_and_has_no_steps() -> None:
    model = probed(lambda rows, length: 4 + 0.02 * rows * length)
    assert model.curve(LengthGroup("k", 64)).steps is None
    other = model.curve(LengthGroup("k", 128))
    assert [other.expected_ns(rows) / MS for rows in (1, 2, 16)] == pytest.approx([6.56, 9.12, 44.96], rel=0.1)


def test_steps_that_traffic_contradicts_are_given_up() -> None:
    model = probed(padded_ms)
    lots = random.Random(1)
    curve = model.curve(LengthGroup("k", 64))
    for _ in range(400):
        rows = lots.randint(1, 32)
        curve.observe(rows, 1, round((4 + 0.02 * rows * 64) * MS))
    other = model.curve(LengthGroup("k", 128)).current()
    assert other.steps is None
    assert other.expected_ns(2) / MS == pytest.approx(9.12, rel=0.15)


def test_other_lengths_follow_steps_even_where_all_else_that_was_learned_stays() -> None:
    model = ServiceModel(32)
    for rows in (8, 16, 24, 32):  # multiples, of which steps of eight tell the same
        for length in (8, 64):
            model.probe(LengthGroup("k", length), rows, [round(0.02 * rows * length * MS)] * 2)
    other = model.curve(LengthGroup("k", 128))
    assert other.expected_ns(2) / MS == pytest.approx(5.12, rel=0.05)
    (surface,) = model._surfaces.values()
    surface.begin(Steps(8, lone=False), [(rows, 0.02 * rows * 64 * MS, 33) for rows in (8, 16, 24, 32)], 64)
    assert other.current().expected_ns(2) / MS == pytest.approx(20.48, rel=0.05)


def test_steps_are_kept() -> None:
    again = ServiceModel(32)
    again.restore(json.loads(json.dumps(probed(padded_ms).to_dict())))
    other = again.curve(LengthGroup("k", 128))
    assert other.steps == Steps(8, lone=True)
    assert other.expected_ns(2) / MS == pytest.approx(padded_ms(2, 128), rel=0.05)


def test_all_that_is_kept_comes_back() -> None:
    surface = taught(2, 1, 0.1, GRID * 3, noise=0.2)
    again = Surface()
    again.restore(surface.to_dict())
    assert again.to_dict() == surface.to_dict()
    assert again.line_ns(30) == surface.line_ns(30)


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"count": 1, "sums": [1], "terms": [1, 1, 1]},
        {"count": 1, "sums": [1] * 10, "terms": [-1, 2, 2]},
        {"count": 1, "sums": [1] * 15, "terms": [1, 2, 2, 0], "steps": [3, True]},
        {"count": 1, "sums": [1] * 15, "terms": [1, 2, 2, 0], "steps": [8]},
    ],
)
def test_what_is_no_surface_is_refused(kept: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a service surface"):
        Surface().restore(kept)
    model = ServiceModel(8)
    with pytest.raises(ValueError, match="not a service"):
        model.restore({"buckets": {}, "surfaces": {"'k'": kept}})


def test_speeds_of_lengths_that_were_kept_apart_stay_what_they_were() -> None:
    model = ServiceModel(8)
    curves = {
        LengthGroup("k", 10): kept_curve(2, 1, 8, {1: 1.0, 2: 1.5}),
        LengthGroup("k", 20): kept_curve(1, 1, 8, {1: 2.0, 2: 3.0}),
    }
    model.restore(kept_model(curves))
    one, other = (model.curve(group) for group in curves)
    assert [curve.expected_ns(8, busy) / MS for curve in (one, other) for busy in (1, 2)] == pytest.approx([10, 15, 18, 27])
