"""What must hold whatever the policy decides, on histories that nobody thought of."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.batching.batch import Batch, Part
from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES
from gateway.batching.queue import class_of, deadline_of, virtual_deadline
from gateway.config import Batching, Ragged
from gateway.errors import DeadlineExceeded, GatewayError, Overloaded
from gateway.types import InferRequest

MS = 1_000_000

adds = st.tuples(
    st.just("add"),
    st.integers(1, 11),  # rows
    st.one_of(st.none(), st.integers(1, 60)),  # the client's timeout in ms
    st.integers(0, 4),  # priority
    st.integers(0, 2),  # shape
)
moves = st.one_of(
    adds,
    adds,
    adds,
    st.tuples(st.just("pass"), st.integers(0, 30)),
    st.tuples(st.just("finish"), st.integers(0, 3), st.integers(1, 40)),
    st.tuples(st.just("fail"), st.integers(0, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)


def reserved_of(request: InferRequest) -> int:
    """Time that was kept for its answer, not the same for all."""
    return request.rows % 3 * MS


@dataclass
class Lane:
    """A model of the lane: it hands over what the batcher decides, and checks it."""

    batcher: Batcher
    max_rows: int
    row_sizes: tuple[int, ...]
    slo_ns: int | None
    ragged: bool = False
    workers: int = 2
    now_ns: int = 0
    asked: list[InferRequest] = field(default_factory=list)
    rows_done: dict[InferRequest, int] = field(default_factory=dict)
    ended: dict[InferRequest, str] = field(default_factory=dict)
    running: list[Batch] = field(default_factory=list)
    retried: set[tuple[InferRequest, int]] = field(default_factory=set)
    highest: int = 4  # class of those that came since the last step

    def end(self, request: InferRequest, how: str) -> None:
        assert request not in self.ended, f"answered twice: {self.ended.get(request)} and {how}"
        self.ended[request] = how

    def add(self, rows: int, timeout_ms: int | None, priority: int, shape: int) -> None:
        deadline_ns = None if timeout_ms is None else self.now_ns + timeout_ms * MS
        inputs = {"ids": np.zeros((rows, 1 + 30 * shape), dtype=np.int8)} if self.ragged else {}
        key = None if self.ragged else shape
        request = InferRequest(
            "m", "1", "", inputs, rows, self.now_ns, deadline_ns=deadline_ns, priority=priority, shape_key=key
        )
        try:
            self.batcher.add(request, self.now_ns, reserved_of(request))
        except Overloaded:
            return
        self.highest = min(self.highest, class_of(request))
        self.asked.append(request)
        self.rows_done[request] = 0

    def step(self) -> None:
        free = self.workers - len(self.running)
        step = self.batcher.step(self.now_ns, free)
        assert len(step.batches) <= free
        for request, error in step.shed:
            if isinstance(error, Overloaded):
                assert self.slo_ns or class_of(request) > self.highest, "without an SLO only a higher class may displace"
            else:
                assert isinstance(error, DeadlineExceeded)
            self.end(request, "shed")
        self.highest = 4
        for batch in step.batches:
            self.check(batch)
            self.running.append(batch)
        if self.batcher.queue_requests and not self.running:
            assert step.wake_at_ns is not None, "waits for nothing"

    def check(self, batch: Batch) -> None:
        assert batch.rows == sum(part.rows for part in batch.parts) <= self.max_rows
        assert batch.padded_rows >= batch.rows
        assert not self.row_sizes or batch.padded_rows in self.row_sizes
        assert len({part.request.shape_key for part in batch.parts}) == 1
        assert batch.reason
        if batch.reason == "retry":
            assert len(batch.parts) == 1
        for part in batch.parts:
            assert part.request not in self.ended, "executed after it was answered"
            assert part.request.deadline_ns is None or part.request.deadline_ns >= self.now_ns
            assert self.slo_ns is None or part.request.arrival_ns + self.slo_ns >= self.now_ns
            if part.request.rows <= self.max_rows:
                assert part.whole

    def finish(self, which: int, ok: bool) -> None:
        if not self.running:
            return
        batch = self.running.pop(which % len(self.running))
        self.batcher.finished(batch, self.now_ns, max(1, self.now_ns - batch.closed_ns), ok)
        for part in batch.parts:
            if part.request not in self.ended:
                self.part_ended(part, ok)

    def part_ended(self, part: Part, ok: bool) -> None:
        key = (part.request, part.start)
        if ok:
            self.rows_done[part.request] += part.rows
            if self.rows_done[part.request] == part.request.rows:
                self.end(part.request, "done")
        elif key in self.retried:
            self.batcher.cancel(part.request, reserved_of(part.request))
            self.end(part.request, "failed")
        else:
            self.retried.add(key)
            self.batcher.retry(part, self.now_ns)

    def cancel(self, which: int) -> None:
        if not self.asked:
            return
        request = self.asked[which % len(self.asked)]
        if request not in self.ended:
            self.batcher.cancel(request, reserved_of(request))
            self.end(request, "cancelled")

    def move(self, move: tuple[object, ...]) -> None:
        match move:
            case ("add", int(rows), timeout_ms, int(priority), int(shape)):
                self.add(rows, timeout_ms if isinstance(timeout_ms, int) else None, priority, shape)
            case ("pass", int(ms)):
                self.now_ns += ms * MS
            case ("finish", int(which), int(ms)):
                self.now_ns += ms * MS
                self.finish(which, ok=True)
            case ("fail", int(which)):
                self.finish(which, ok=False)
            case ("cancel", int(which)):
                self.cancel(which)

    def drain(self) -> None:
        """Let every batch end, and time pass for what a policy holds: nothing may be left."""
        for _ in range(10_000):
            if not self.batcher.queue_requests and not self.running and len(self.ended) == len(self.asked):
                return
            self.now_ns += MS
            self.finish(0, ok=True)
            self.step()
        raise AssertionError(f"starved: {[request for request in self.asked if request not in self.ended]}")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=120, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    history=st.lists(moves, max_size=60),
    slo_ms=st.one_of(st.none(), st.integers(5, 80)),
    row_sizes=st.sampled_from([(), (1, 4, 8), (2, 6)]),
    max_rows=st.sampled_from([1, 5, 8]),
    ragged=st.booleans(),
)
def test_every_request_ends_once_in_time_and_within_limits(
    policy: str,
    history: list[tuple[object, ...]],
    slo_ms: int | None,
    row_sizes: tuple[int, ...],
    max_rows: int,
    ragged: bool,
) -> None:
    slo_ns = None if slo_ms is None else slo_ms * MS
    if row_sizes:
        max_rows = row_sizes[-1]
    batcher = Batcher(
        POLICIES[policy](Batching()),
        max_rows=max_rows,
        row_sizes=row_sizes,
        workers=2,
        max_queue_rows=60,
        slo_ns=slo_ns,
        ragged=Ragged(pad={"ids": 0}) if ragged else None,
    )
    lane = Lane(batcher, max_rows, row_sizes, slo_ns, ragged)
    for move in history:
        lane.move(move)
        assert batcher.queue_rows <= 60
        lane.step()
        before = (batcher.queue_rows, batcher.queue_requests)
        again = batcher.step(lane.now_ns, 0)  # called early, it changes nothing
        assert (again.batches, again.shed) == ([], [])
        assert (batcher.queue_rows, batcher.queue_requests) == before
    lane.drain()
    assert len(lane.ended) == len(lane.asked)
    assert (batcher.queue_rows, batcher.queue_requests, batcher.oldest_ns) == (0, 0, None)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_class_and_no_shape_starves_under_lasting_load(policy: str) -> None:
    batcher = Batcher(POLICIES[policy](Batching()), max_rows=4, workers=1, max_queue_rows=10_000)
    low = InferRequest("m", "1", "", {}, 1, 0, priority=4, shape_key="rare")
    batcher.add(low, 0)
    served: list[InferRequest] = []
    for ms in range(10_000):
        now_ns = ms * MS
        for _ in range(5):  # one more than is served
            batcher.add(InferRequest("m", "1", "", {}, 1, now_ns, priority=1), now_ns) if batcher.queue_rows < 9_000 else None
        for batch in batcher.step(now_ns, 1).batches:
            served += [part.request for part in batch.parts]
            batcher.finished(batch, now_ns + MS, MS, ok=True)
        if low in served:
            return
    raise AssertionError("the request of the lower class was never served")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_of_the_batcher_is_one_of_ours(policy: str) -> None:
    batcher = Batcher(POLICIES[policy](Batching()), max_rows=4, max_queue_rows=1)
    batcher.add(InferRequest("m", "1", "", {}, 1, 0), 0)
    with pytest.raises(GatewayError):
        batcher.add(InferRequest("m", "1", "", {}, 1, 0), 0)


@settings(max_examples=200, derandomize=True)
@given(
    offered=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 1), st.one_of(st.none(), st.integers(50, 90))),
        max_size=40,
    ),
    max_queue_rows=st.integers(1, 12),
)
def test_at_the_limit_of_the_queue_only_lower_classes_make_room_and_the_last_in_line_first(
    offered: list[tuple[int, int, int, int | None]], max_queue_rows: int
) -> None:
    batcher = Batcher(POLICIES["greedy"](Batching()), max_rows=8, max_queue_rows=max_queue_rows)
    waiting: list[InferRequest] = []
    displaced: list[InferRequest] = []

    def place(request: InferRequest) -> tuple[int, int]:
        return virtual_deadline(request, deadline_of(request, None)), request.arrival_ns

    for number, (rows, priority, shape, timeout_ms) in enumerate(offered):
        now_ns = number * MS
        deadline_ns = None if timeout_ms is None else now_ns + timeout_ms * MS
        request = InferRequest("m", "1", "", {}, rows, now_ns, deadline_ns=deadline_ns, priority=priority, shape_key=shape)
        missing = sum(one.rows for one in waiting) + rows - max_queue_rows
        lower = sorted((one for one in waiting if class_of(one) > class_of(request)), key=place, reverse=True)
        makes_room: list[InferRequest] = []
        while waiting and lower and sum(one.rows for one in makes_room) < missing:
            makes_room.append(lower.pop(0))
        if waiting and sum(one.rows for one in makes_room) < missing:
            with pytest.raises(Overloaded):
                batcher.add(request, now_ns)
            continue
        batcher.add(request, now_ns)
        displaced += makes_room
        waiting = [one for one in waiting if one not in makes_room] + [request]
        assert (batcher.queue_rows, batcher.queue_requests) == (sum(one.rows for one in waiting), len(waiting))
    step = batcher.step(len(offered) * MS, 0)
    assert [request for request, _ in step.shed] == displaced
    assert all(isinstance(error, Overloaded) for _, error in step.shed)
    assert batcher.step(len(offered) * MS, 0).shed == []
