"""Clients choose shapes and parameters, and with them groups, as many as they like: what a lane does of them is bounded."""

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher, Step
from gateway.batching.policies import POLICIES
from gateway.batching.queue import LengthGroup
from gateway.batching.replay import replay
from gateway.batching.service_model import ServiceModel
from gateway.config import Batching, Ragged
from gateway.errors import Overloaded
from gateway.types import InferRequest
from tests.batching.curves import MS, kept_curve, kept_model
from tests.batching.test_recording import Driver, read, recorder, same

RAGGED = Ragged(pad={"x": 0.0})
CALLS = 8000  # of Python functions, at most: some 25 for each of 256 groups, and one for each that waits


def lane(*, slo_ms: float | None = 3000, workers: int = 1, policy: str = "adaptive", lengths: bool = False) -> Batcher:
    """Of a model that takes 3 + 0.1 n ms."""
    slo_ns = None if slo_ms is None else round(slo_ms * MS)
    batcher = Batcher(
        POLICIES[policy](Batching()), max_rows=8, workers=workers, slo_ns=slo_ns, ragged=RAGGED if lengths else None
    )
    known = LengthGroup(0, 8) if lengths else None
    batcher.service.restore(kept_model({known: kept_curve(3, 0.1, 8)}))
    batcher.service.curve(known)
    return batcher


def asked(group: object, now_ns: int = 0, rows: int = 1, length: int = 1) -> InferRequest:
    return InferRequest("m", "1", "", {"x": np.zeros((rows, length))}, rows, now_ns, shape_key=group)


def calls(do: Callable[[], object]) -> int:
    """Of Python functions."""
    count = 0

    def counts(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(counts)
    try:
        do()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("slo_ms", [None, 3000, 40])
def test_what_is_done_at_once_is_bounded_however_many_groups_wait(slo_ms: float | None) -> None:
    batcher = lane(slo_ms=slo_ms)
    for group in range(700):
        batcher.add(asked(group, group * 1000), group * 1000)
    steps: list[Step] = []
    assert calls(lambda: steps.append(batcher.step(MS, 1))) <= CALLS
    assert calls(lambda: batcher.forecast(asked("new"), 2 * MS, 0)) <= CALLS
    waiting = batcher.queue_requests

    def comes() -> None:
        with suppress(Overloaded):
            batcher.add(asked(699, 2 * MS), 2 * MS)

    assert calls(comes) <= CALLS
    assert batcher.queue_requests == waiting + (slo_ms != 40)  # 700 · 3 ms wait
    (batch,) = steps[0].batches
    assert calls(lambda: batcher.finished(batch, 4 * MS, 3 * MS, True)) <= CALLS
    assert calls(lambda: steps.append(batcher.step(4 * MS, 1))) <= CALLS
    now_ns = 4 * MS
    while batcher.queue_requests:  # those that are told apart, and the others
        for batch in steps[-1].batches:
            batcher.finished(batch, now_ns, 3 * MS, True)
        steps.append(batcher.step(now_ns, 1))
        now_ns += 3 * MS if steps[-1].batches else 1
    answered = sum(len(batch.parts) for step in steps for batch in step.batches)
    assert answered == 701 if slo_ms != 40 else 10 < answered <= 14


@pytest.mark.parametrize(
    ("slo_ms", "late_ms", "workers", "lengths"),
    [(None, 1, 4, True), (3000, 1, 4, True), (40, 1, 4, True), (40, 30, 1, False), (3000, 2985, 1, True)],
)
def test_a_step_looks_at_few_groups_where_many_are_late_or_several_workers_are_free(
    slo_ms: float | None, late_ms: int, workers: int, lengths: bool
) -> None:
    batcher = lane(slo_ms=slo_ms, workers=workers, lengths=lengths)
    for group in range(700):
        length = (5, 30, 200)[group % 3]
        batcher.add(asked(group // 3 if lengths else group, group * 1000, length=length), group * 1000)
    running: list[Batch] = []
    steps: list[Step] = []
    now_ns, ended = late_ms * MS, 0

    def step() -> None:
        steps.append(batcher.step(now_ns, workers - len(running)))

    def foresees() -> None:
        batcher.forecast(asked("new", now_ns), now_ns, 0)

    for _ in range(8):
        assert calls(step) <= 6 * CALLS  # of few decisions
        assert calls(foresees) <= CALLS
        running += steps[-1].batches
        ended += sum(len(batch.parts) for batch in steps[-1].batches) + len(steps[-1].shed)
        if steps[-1].wake_at_ns == now_ns + 1:  # there are more to decide on
            assert steps[-1].shed
            now_ns += 1
            continue
        now_ns += 3 * MS
        for batch in running:
            batcher.finished(batch, now_ns, 3 * MS, True)
        running = []
    assert 8 <= ended == 700 - batcher.queue_requests


def test_what_waits_in_many_groups_is_forecast_by_some_of_them() -> None:
    batcher = lane()
    for group in range(700):
        batcher.add(asked(group), 0)
    # each row as a part of 8, which take 3 + 0.1 · 8 ms
    assert batcher.forecast(asked("new"), 0, 1).ahead_ns == pytest.approx(700 * 3.8 * MS / 8)


@pytest.mark.parametrize("policy", ["adaptive", "greedy"])
def test_a_group_that_runs_often_is_not_forgotten_for_many_that_ran_once(policy: str) -> None:
    batcher = lane(policy=policy)
    now_ns = 0
    for group in [*["often"] * 20, *range(300)]:
        batcher.add(asked(group, now_ns), now_ns)
        (batch,) = batcher.step(now_ns, 1).batches
        batcher.finished(batch, now_ns + 7 * MS, 7 * MS, True)
        now_ns += 20 * MS
    curves = batcher.service.curves
    assert ("often" in curves, 0 in curves, 299 in curves, len(curves)) == (True, False, True, 256)


def test_groups_that_ran_often_give_way_to_others_in_the_order_in_which_they_ran() -> None:
    model = ServiceModel(8)
    for group in [*range(256), *range(256), *range(256), 0]:
        model.observe(group, 1, 1, MS)
    model.observe("new", 1, 1, MS)
    assert (0 in model.curves, 1 in model.curves, 2 in model.curves, len(model.curves)) == (True, False, True, 256)


def test_the_lengths_of_a_shape_share_what_they_learned_as_long_as_one_of_them_is_known() -> None:
    model = ServiceModel(8)
    for _ in range(3):
        for length in (16, 64):
            model.observe(LengthGroup("often", length), 1, 1, length * MS)
    for shape in range(600):
        model.observe(LengthGroup(shape, 16), 1, 1, MS)
    assert model.curve(LengthGroup("often", 32)).expected_ns(1) == pytest.approx(32 * MS)
    assert len(model.to_dict()["surfaces"]) == 254  # three of the 256 are of one shape


def test_what_runs_once_tells_those_that_wait_and_those_that_come_how_long_they_take() -> None:
    """Nothing ran before traffic; the first batch, of one row, takes 22 ms, all others of up to eight 9 ms, but the last."""
    batcher = Batcher(POLICIES["adaptive"](Batching()), max_rows=8, slo_ns=3000 * MS)
    for group in range(4):  # whatever ends, there is always one that came after it began
        batcher.add(asked(group, 0, rows=1 if group == 0 else 8), 0)
    now_ns, refused = 0, 0
    for group in range(4, 100):
        step = batcher.step(now_ns, 1)
        (batch,) = step.batches
        refused += len(step.shed)
        time_ns = 22 * MS if not now_ns else 300 * MS if group == 99 else 9 * MS
        batcher.add(asked(group, now_ns, rows=(1, 8)[group % 2]), now_ns)
        now_ns += time_ns
        batcher.finished(batch, now_ns, time_ns, True)
    assert not refused
    for rows in (1, 8):
        assert batcher.forecast(asked("new", now_ns, rows), now_ns, 1).own_ns <= 12 * MS
    assert batcher.forecast(asked("new", now_ns), now_ns, 1).ahead_ns <= 4 * 12 * MS


@pytest.mark.parametrize("case", [{}, {"slo_ns": None}, {"ragged": {"pad": {"x": 0.0}}}])
def test_a_replay_of_more_groups_than_are_told_apart_decides_the_same(case: dict[str, Any]) -> None:
    batcher = recorder(**{"slo_ns": 9000 * MS} | case)
    batcher.service.probe(None, 1, [4 * MS] * 2)
    batcher.record()
    driver = Driver(batcher, random.Random(5), lengths="ragged" in case, shapes=tuple(range(5000)), slots=0)
    driver.drive(1000)
    assert batcher.queue_requests > 256
    batcher._begin()  # with all that waits
    driver.slots = 2
    driver.drive(120)
    same(replay(read(batcher)))
