"""A fault that is made on purpose is named as the cause of what was late by it."""

from functools import partial

import pytest

from gateway.why.causes import Cause
from gateway.why.whatif import as_it_was, what_ifs
from tests.why.recorded import MS, Scene, diagnosed, learned_of, slowed
from tests.why.scenes import SCENES


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


def test_a_batch_that_closes_some_time_after_its_requests_came_keeps_its_own_pace_and_stall() -> None:
    scene = Scene(rps=10.0, seconds=60.0, noise=0.2, lag_ms=0.1, takes=slowed([100, 200, 300], 400.0))
    diagnosis = diagnosed(scene, 1)
    (same,) = [case for case in what_ifs(diagnosis, partial(learned_of, scene.recorded(1))) if case.name.startswith("the same")]
    for request, ended_ns in zip(diagnosis.history.requests, same.ended_ns, strict=True):
        assert (ended_ns is not None) == (request.fate == "answered")
        assert ended_ns is None or ended_ns == pytest.approx(request.ended_ns, abs=2 * MS)


def test_clients_that_leave_count_for_nobody_and_take_no_more_time_than_they_took() -> None:
    scene = Scene(rps=200.0, seconds=6.0, noise=0.0, leave_ms=1.0, takes=slowed([40], 400.0))
    diagnosis = diagnosed(scene, 1)
    assert sum(request.fate == "cancelled" for request in diagnosis.history.requests) > 300
    assert set(diagnosis.by_cause) == {Cause.STALL}
    (same,) = [case for case in what_ifs(diagnosis, partial(learned_of, scene.recorded(1))) if case.name.startswith("the same")]
    was = as_it_was(diagnosis)
    assert was.in_time == pytest.approx(1 - len(diagnosis.misses) / 600, abs=0.01)
    assert same.in_time == pytest.approx(was.in_time, abs=0.01)


def test_who_left_may_be_refused_in_what_would_have_been() -> None:
    scene = Scene(rps=400.0, seconds=1.0, leave_ms=60.0, settings={"max_rows": 8})
    diagnosis = diagnosed(scene, 1)
    cases = what_ifs(diagnosis, partial(learned_of, scene.recorded(1)))
    gone = [at for at, request in enumerate(diagnosis.history.requests) if request.fate == "cancelled"]
    half = next(case for case in cases if case.name == "max_rows 4")
    assert 0 < len(half.left) < len([at for at in gone if half.ended_ns[at] is None])


@pytest.mark.parametrize(
    ("leave_ms", "timeout_share", "late"), [(20.0, 1.0, ["r21"]), (80.0, 1.0, ["r20", "r21"]), (150.0, 0.0, ["r20", "r21"])]
)
def test_who_leaves_before_it_is_late_is_no_miss(leave_ms: float, timeout_share: float, late: list[str]) -> None:
    takes = slowed([20], 400.0)  # r20 is alone in it, and r21 waits for it
    scene = Scene(rps=5.0, seconds=8.0, noise=0.0, leave_ms=leave_ms, timeout_ms=60.0, timeout_share=timeout_share, takes=takes)
    diagnosis = diagnosed(scene, 1)
    assert diagnosis.history.requests[20].fate == "cancelled"  # its run ended long after that
    assert [miss.request.own_id for miss in diagnosis.misses] == late
    assert set(diagnosis.by_cause) == {Cause.STALL}
    was, same = as_it_was(diagnosis), what_ifs(diagnosis, partial(learned_of, scene.recorded(1)))[0]
    assert same.in_time == was.in_time
    assert same.p99_ms == pytest.approx(was.p99_ms)  # of those that were answered


def test_a_stall_that_ends_in_an_error_stays_where_it_was() -> None:
    scene = Scene(noise=0.0, takes=slowed([200, 400], 700.0), fails=(200, 400))
    diagnosis = diagnosed(scene, 1)
    assert diagnosis.failed
    assert set(diagnosis.by_cause) == {Cause.STALL}
    same = what_ifs(diagnosis, partial(learned_of, scene.recorded(1)))[0]
    assert same.in_time == pytest.approx(as_it_was(diagnosis).in_time, abs=0.005)


@pytest.mark.parametrize("probed", [False, True])
def test_batches_of_any_size_take_the_same_where_all_that_is_known_says_so(probed: bool) -> None:
    takes = slowed([0], 1.0)  # of one row
    cap = {"max_rows": 4, "model_rows": 16, "slo_ns": 150 * MS}
    scene = Scene(fixed_ms=30.0, row_ms=0.0, rps=180.0, seconds=2.0, noise=0.0, probed=probed, takes=takes, settings=cap)
    diagnosis = diagnosed(scene, 1)
    assert diagnosis.typical.rows_ns(16) == pytest.approx(30 * MS, rel=0.05)
    assert set(diagnosis.by_cause) == {Cause.BATCH}


def test_of_few_batches_what_was_learned_before_tells_their_time() -> None:
    scene = Scene(rps=5.0, seconds=0.6, noise=0.0)
    diagnosis = diagnosed(scene, 1)
    assert len(diagnosis.history.batches) < 5
    (same,) = [case for case in what_ifs(diagnosis, partial(learned_of, scene.recorded(1))) if case.name.startswith("the same")]
    assert same.p99_ms == pytest.approx(10.0, abs=0.1)  # 4 + 6 · 1


def test_a_better_cap_is_found() -> None:
    _, scene = SCENES["wrong cap, too small"]
    diagnosis = diagnosed(scene, 1)
    cases = {case.name: case for case in what_ifs(diagnosis, partial(learned_of, scene.recorded(1)))}
    assert cases["the same, simulated"].in_time < 0.8
    assert cases["max_rows 4"].in_time > cases["the same, simulated"].in_time
    assert cases["policy adaptive, no cap"].in_time > 0.97
