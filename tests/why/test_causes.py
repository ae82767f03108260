"""A fault that is made on purpose is named as the cause of what was late by it."""

from functools import partial

import pytest

from gateway.why.causes import Cause
from gateway.why.whatif import as_it_was, what_ifs
from tests.why.recorded import Scene, diagnosed, learned_of, slowed

COMPILED = {"row_sizes": (1, 16), "max_rows": 16, "slo_ns": 45_000_000, "policy": "greedy"}
GPU = {"slo_ns": 20_000_000, "max_rows": 64, "model_rows": 64}

SCENES: dict[str, tuple[Cause, Scene]] = {
    "overload": (Cause.QUEUE, Scene(rps=230.0)),
    "overload of two sessions": (Cause.QUEUE, Scene(rps=430.0, workers=2, seconds=6.0)),
    "overload with noise": (Cause.QUEUE, Scene(rps=230.0, noise=0.15)),
    "overload of a fast model": (
        Cause.QUEUE,
        Scene(fixed_ms=2, row_ms=0.15, rps=8000.0, seconds=0.6, noise=0.1, settings=GPU),
    ),
    "stall": (Cause.STALL, Scene(takes=slowed([200, 400], 700.0))),
    "stall of one of two sessions": (Cause.STALL, Scene(rps=190.0, workers=2, seconds=8.0, takes=slowed([300, 301], 600.0))),
    "a slow second": (Cause.STALL, Scene(takes=slowed(range(300, 306), 200.0))),
    "stall of a fast model": (
        Cause.STALL,
        Scene(fixed_ms=2, row_ms=0.15, rps=2000.0, seconds=1.0, takes=slowed([100], 120.0), settings=GPU),
    ),
    "cold start, first run slow": (Cause.COLD_START, Scene(probed=False, takes=slowed([0], 900.0))),
    "cold start, first run slow although probed": (Cause.COLD_START, Scene(takes=slowed([0], 900.0))),
    "cold start, no session yet": (Cause.COLD_START, Scene(away_s=(0.0, 1.5))),
    "cold start, scaled from zero": (Cause.COLD_START, Scene(away_s=(5.0, 6.0))),
    "wrong cap, too long a delay": (Cause.BATCH, Scene(rps=60.0, settings={"policy": "fixed", "max_delay_ms": 80.0})),
    "wrong cap, too small": (
        Cause.BATCH,
        Scene(fixed_ms=2, row_ms=0.15, rps=1500.0, seconds=1.5, settings=GPU | {"max_rows": 2}),
    ),
    "wrong cap, too large": (
        Cause.BATCH,
        Scene(rps=145.0, settings={"policy": "fixed", "max_delay_ms": 300.0, "max_rows": 24}),
    ),
    "cut-off by the client": (Cause.CUT_OFF, Scene(rps=40.0, timeout_ms=5.0, timeout_share=0.2)),
    "cut-off by the SLO": (Cause.CUT_OFF, Scene(rps=40.0, settings={"slo_ns": 8_000_000})),
    "padding": (Cause.PADDING, Scene(fixed_ms=1, row_ms=3, rps=70.0, settings=COMPILED)),
}


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("seed", range(2))
def test_a_fault_is_named(name: str, seed: int) -> None:
    cause, scene = SCENES[name]
    diagnosis = diagnosed(scene, seed)
    assert len(diagnosis.misses) >= 10
    named = diagnosis.by_cause
    assert named[cause] >= 0.95 * len(diagnosis.misses), named


def test_what_goes_well_has_no_misses() -> None:
    assert not diagnosed(Scene(rps=50.0), 1).misses


def test_several_faults_are_told_apart() -> None:
    """A stall early, and half of the clients in too great a hurry."""
    diagnosis = diagnosed(Scene(rps=50.0, takes=slowed([60], 700.0), timeout_ms=5.0, timeout_share=0.3), 3)
    named = diagnosis.by_cause
    assert named[Cause.STALL] > 10
    assert named[Cause.CUT_OFF] > 50
    assert named[Cause.QUEUE] + named[Cause.BATCH] <= 0.05 * len(diagnosis.misses)


def test_one_more_session_is_priced() -> None:
    scene = Scene(rps=230.0, seconds=6.0, settings={"session_usd_per_hour": 0.5})
    diagnosis = diagnosed(scene, 1)
    lane = scene.recorded(1)
    cases = {case.name: case for case in what_ifs(diagnosis, partial(learned_of, lane))}
    was, same, more = as_it_was(diagnosis), cases["the same, simulated"], cases["one more session"]
    assert same.in_time == pytest.approx(was.in_time, abs=0.05)
    assert was.in_time < 0.8
    assert more.in_time > 0.97
    assert more.usd_per_hour == 1.0
    assert was.usd_per_million is not None
    # 0.5 USD an hour for 6 s, by what was in time
    assert was.usd_per_million == pytest.approx(0.5 * 6 / 3600 / (was.in_time * 6 * 230) * 1e6, rel=0.1)


def test_a_better_cap_is_found() -> None:
    _, scene = SCENES["wrong cap, too small"]
    diagnosis = diagnosed(scene, 1)
    cases = {case.name: case for case in what_ifs(diagnosis, partial(learned_of, scene.recorded(1)))}
    assert cases["the same, simulated"].in_time < 0.8
    assert cases["max_rows 4"].in_time > cases["the same, simulated"].in_time
    assert cases["policy adaptive, no cap"].in_time > 0.97
