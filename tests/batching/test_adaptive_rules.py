"""Whatever comes, the adaptive policy decides as its planned rule says; `adaptive_rules` works it out the slow way."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch
from gateway.batching.queue import BatchLimits, Queue, State, deadline_of, virtual_deadline
from gateway.batching.stances import PLANNED
from gateway.types import InferRequest
from tests.batching.adaptive_rules import Known, Rules
from tests.batching.curves import MS, kept_curve, kept_model


class Bench:
    """The policy beside its rules, over the same queues."""

    def __init__(
        self,
        *,
        max_rows: int,
        row_sizes: tuple[int, ...],
        slo_ms: float | None,
        curves: dict[Hashable, tuple[float, float]],
        levels: dict[int, float],
        spread: float,
        workers: int,
    ) -> None:
        """curves: fixed and row, in ms."""
        self.policy = Adaptive(PLANNED)
        self.slo_ns = None if slo_ms is None else round(slo_ms * MS)
        self.policy.bind(BatchLimits(max_rows, row_sizes, self.slo_ns))
        self.policy.service.restore(
            kept_model({group: kept_curve(*times, max_rows, levels, spread) for group, times in curves.items()})
        )
        self.state = State(workers)
        self.workers = workers
        self.now_ns = 1_000 * MS
        self.sequence = 0
        sizes = tuple(size for size in row_sizes if size <= max_rows) or tuple(range(1, max_rows + 1))
        known = {}
        for group in curves:
            curve = self.policy.service.curve(group)
            known[group] = Known(
                sizes,
                dict(zip(curve.sizes, curve.shape, strict=True)).__getitem__,
                curve.level,
                spread,
                curve.line_ns,
                curve.luck,
            )
        self.rules = Rules(known, self.slo_ns, bool(row_sizes))
        self.decided: Counter[str] = Counter()  # by reason

    def arrive(self, group: Hashable, rows: int, timeout_ms: float | None, priority: int) -> None:
        deadline_ns = None if timeout_ms is None else self.now_ns + round(timeout_ms * MS)
        asked = InferRequest("m", "1", "", {}, rows, self.now_ns, deadline_ns=deadline_ns, priority=priority)
        deadline_ns = deadline_of(asked, self.slo_ns)
        self.sequence += 1
        entry = (virtual_deadline(asked, deadline_ns), self.sequence, deadline_ns, rows, asked)
        queue = self.state.queues.setdefault(group, Queue(group))
        queue.push(*entry)
        self.state.rows += rows
        self.policy.arrived(queue, self.state, rows, self.now_ns)
        self.rules.arrivals.setdefault(group, []).append((self.now_ns, rows))
        if queue.outlook is not None:
            self.rules.crowd(group, self.now_ns, self.workers)
            queue.outlook = None  # that nobody is refused on arrival: the rules know nothing of it

    def end_first(self) -> None:
        if self.state.in_flight:
            del self.state.in_flight[next(iter(self.state.in_flight))]

    def decide(self) -> None:
        """For every queue that has something, as the batcher does: the most urgent first, until one starts."""
        queues = sorted((queue for queue in self.state.queues.values() if queue.entries), key=lambda one: one.entries[0][:2])
        for queue in queues:
            free_slots = self.workers - len(self.state.in_flight)
            if not free_slots or not queue.entries:
                return
            running = [(batch.closed_ns, batch.expected_ns) for batch in self.state.in_flight]
            entries = {group: list(each.entries) for group, each in self.state.queues.items()}
            own_runs = any(batch.group == queue.group for batch in self.state.in_flight)
            refused = any(other.outlook is not None for other in self.state.queues.values() if other is not queue)
            ours = self.rules.decide(queue.group, entries, running, self.now_ns, free_slots, own_runs, refused)
            theirs = self.policy.decide(queue, self.state, self.now_ns, free_slots)
            assert (theirs.rows, theirs.reason, theirs.wake_at_ns) == (ours.rows, ours.reason, ours.wake_at_ns)
            assert (list(theirs.shed), theirs.expected_ns, list(theirs.fill)) == (ours.shed, ours.expected_ns, [])
            self.decided[theirs.reason or "shed"] += 1
            for entry in theirs.shed:
                queue.remove_entry(entry)
                self.state.rows -= entry[3]
            if theirs.rows and queue.entries:
                self._start(queue, theirs.rows, theirs.expected_ns)
                return

    def _start(self, queue: Queue, limit: int, expected_ns: int) -> None:
        rows = 0
        while queue.entries and (not rows or rows + queue.entries[0][3] <= limit):
            rows += queue.pop()[3]
        self.state.rows -= rows
        batch = Batch(
            parts=[], rows=rows, padded_rows=rows, reason="", closed_ns=self.now_ns, group=queue.group, expected_ns=expected_ns
        )
        self.state.in_flight[batch] = None


moves = st.one_of(
    st.tuples(st.just("arrive"), st.integers(1, 12), st.sampled_from([0.0, 0.2, 1.0, 4.0])),
    st.tuples(st.just("arrive"), st.integers(1, 12), st.sampled_from([0.0, 0.2, 1.0, 4.0])),
    st.tuples(st.just("odd"), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 120)), st.integers(0, 4)),
    st.tuples(st.just("pass"), st.sampled_from([0.3, 2.0, 9.0, 35.0, 200.0])),
    st.tuples(st.just("end"), st.sampled_from([0.1, 5.0, 20.0])),
)


def play(bench: Bench, history: list[tuple[Any, ...]], groups: list[Hashable]) -> None:
    for number, move in enumerate(history):
        match move:
            case ("arrive", count, gap_ms):
                for _ in range(count):
                    bench.arrive(groups[number % len(groups)], 1, None, 0)
                    bench.now_ns += round(gap_ms * MS)
            case ("odd", rows, timeout_ms, priority):
                bench.arrive(groups[number % len(groups)], rows, timeout_ms, priority)
            case ("pass", ms):
                bench.now_ns += round(ms * MS)
            case ("end", ms):
                bench.now_ns += round(ms * MS)
                bench.end_first()
        bench.decide()


@settings(max_examples=800, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    history=st.lists(moves, min_size=5, max_size=30),
    slo_ms=st.sampled_from([100.0, 100.0, 37.0, None]),
    workers=st.integers(1, 3),
    sizes=st.sampled_from([(16, ()), (16, ()), (8, (1, 2, 4, 8))]),
    fixed_ms=st.sampled_from([0.5, 4.0, 20.0]),
    row_ms=st.sampled_from([0.0, 0.3, 2.0, 6.0]),
    spread=st.sampled_from([1.0, 1.25]),
    slower=st.sampled_from([1.0, 1.4]),
    two=st.booleans(),
)
@example(  # one of a lower class that costs nothing goes along
    history=[("arrive", 1, 0.0), ("odd", 1, None, 1), ("arrive", 1, 0.0), ("arrive", 1, 0.0), ("end", 0.1)],
    slo_ms=None,
    workers=1,
    sizes=(16, ()),
    fixed_ms=0.5,
    row_ms=0.0,
    spread=1.0,
    slower=1.0,
    two=True,
)
@example(  # one of several rows, but no more than a batch has, is late by Q as others are
    history=[("arrive", 1, 0.0), ("arrive", 1, 0.0), ("odd", 5, None, 0), ("pass", 0.3), ("pass", 0.3)],
    slo_ms=100.0,
    workers=3,
    sizes=(8, (1, 2, 4, 8)),
    fixed_ms=0.5,
    row_ms=6.0,
    spread=1.25,
    slower=1.4,
    two=False,
)
@pytest.mark.slow
def test_it_decides_as_its_rules_say(
    history: list[tuple[Any, ...]],
    slo_ms: float | None,
    workers: int,
    sizes: tuple[int, tuple[int, ...]],
    fixed_ms: float,
    row_ms: float,
    spread: float,
    slower: float,
    two: bool,
) -> None:
    curves: dict[Hashable, tuple[float, float]] = {"a": (fixed_ms, row_ms)}
    if two:
        curves["b"] = (2.0, 1.0)
    bench = Bench(
        max_rows=sizes[0],
        row_sizes=sizes[1],
        slo_ms=slo_ms,
        curves=curves,
        levels={1: 1.0, 2: slower, 3: slower * slower},
        spread=spread,
        workers=workers,
    )
    play(bench, history, list(curves))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("gap_ms", [20.0, 6.0, 5.0, 2.5, 1.0, 0.2])
@pytest.mark.parametrize("spread", [1.0, 1.3])
def test_it_decides_as_its_rules_say_under_lasting_load(workers: int, gap_ms: float, spread: float) -> None:
    bench = Bench(
        max_rows=64, row_sizes=(), slo_ms=100, curves={"a": (8, 2)}, levels={1: 1.0, 2: 1.5}, spread=spread, workers=workers
    )  # fmt: skip
    ends: list[int] = []
    for number in range(2000):
        bench.now_ns += round(gap_ms * (0.5 + (number * 7 % 11) / 10) * MS)  # uneven, and the same each time
        bench.arrive("a", 1, None, 0)
        for end_ns in [end_ns for end_ns in ends if end_ns <= bench.now_ns]:
            ends.remove(end_ns)
            bench.end_first()
        running = len(bench.state.in_flight)
        bench.decide()
        for batch in list(bench.state.in_flight)[running:]:
            ends.append(bench.now_ns + round(batch.expected_ns * (0.8 + (number % 5) / 10)))
    assert bench.decided.total() > 4
