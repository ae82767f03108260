"""Who may pass whom without an SLO, whatever lengths, classes and workers, in simulated time: bounds of docs/batching.md."""

import heapq
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES
from gateway.batching.queue import NEVER, PATIENCE_NS, class_of, virtual_deadline
from gateway.config import Batching, Ragged
from gateway.types import InferRequest
from tests.batching.curves import MS

LENGTHS = (6, 14, 30, 60, 120)


@dataclass
class Fate:
    """older: that waited when it came. begun: batches while it waited; passed: of them, those without one before it in line.

    held_ns: from the first of these until it began itself.
    """

    older: int
    begun: int = 0
    passed: int = 0
    first_passed_ns: int = 0
    held_ns: int = 0


@dataclass
class Line:
    """Requests through a batcher, of random lengths and classes, at random times. load: of what goes alone."""

    policy: str
    workers: int
    fixed_ms: float
    cell_ms: float
    classes: tuple[int, ...]
    load: float
    longest_ns: int = 0
    waiting: dict[InferRequest, Fate] = field(default_factory=dict)
    served: list[Fate] = field(default_factory=list)

    def serve(self, requests: int) -> None:
        batcher = Batcher(
            POLICIES[self.policy](Batching()), max_rows=16, workers=self.workers, max_queue_rows=10_000,
            ragged=Ragged(pad={"ids": 0}),
        )  # fmt: skip
        lots = random.Random(17)
        arrays = {length: {"ids": np.zeros((1, length), np.int8)} for length in LENGTHS}
        lone_ms = self.fixed_ms + self.cell_ms * sum(LENGTHS) / len(LENGTHS)
        now_ns, next_ns, started = 0, 0, 0
        running: list[tuple[int, int, Batch]] = []
        while requests or self.waiting:
            while requests and next_ns <= now_ns:
                asked = InferRequest("m", "1", "", arrays[lots.choice(LENGTHS)], 1, next_ns, priority=lots.choice(self.classes))
                self.waiting[asked] = Fate(len(self.waiting))
                batcher.add(asked, now_ns)
                next_ns += round(lots.expovariate(self.load * self.workers / lone_ms) * MS)
                requests -= 1
            step = batcher.step(now_ns, self.workers - len(running))
            for batch in step.batches:
                self._begins([part.request for part in batch.parts], now_ns)
                longest = max(part.request.inputs["ids"].shape[1] for part in batch.parts)
                time_ms = (self.fixed_ms + self.cell_ms * batch.rows * longest) * lots.lognormvariate(0, 0.2)
                started += 1
                self.longest_ns = max(self.longest_ns, round(time_ms * MS))
                heapq.heappush(running, (now_ns + round(time_ms * MS), started, batch))
            events = [each for each in (next_ns if requests else None, step.wake_at_ns) if each is not None and each > now_ns]
            if running and running[0][0] <= min(events, default=running[0][0]):
                now_ns, _, done = heapq.heappop(running)
                batcher.finished(done, now_ns, 1, ok=True)
            else:
                now_ns = min(events)

    def _begins(self, together: list[InferRequest], now_ns: int) -> None:
        for request in together:
            fate = self.waiting.pop(request)
            if fate.passed:
                fate.held_ns = now_ns - fate.first_passed_ns
            self.served.append(fate)
        first = min(virtual_deadline(each, NEVER) for each in together)
        for request, fate in self.waiting.items():
            fate.begun += 1
            if first > virtual_deadline(request, NEVER):
                fate.passed += 1
                fate.first_passed_ns = fate.first_passed_ns or now_ns


@pytest.mark.parametrize("classes", [(0,), (1, 2, 3, 4)])
@pytest.mark.parametrize(("fixed_ms", "cell_ms"), [(2.0, 0.155), (20.0, 0.005)])
@pytest.mark.parametrize(("policy", "workers"), [("greedy", 2), ("adaptive", 1), ("adaptive", 2), ("adaptive", 3)])
@pytest.mark.slow
def test_the_first_in_line_is_in_the_next_batch_and_passed_only_while_it_is_held(
    policy: str, workers: int, fixed_ms: float, cell_ms: float, classes: tuple[int, ...]
) -> None:
    for load in (0.7, 1.1, 2.0):
        line = Line(policy, workers, fixed_ms, cell_ms, classes, load)
        line.serve(200)
        assert len(line.served) == 200
        holds = policy == "adaptive" and workers > 1
        assert max(fate.passed for fate in line.served) <= (workers + 1 if holds else 0)
        assert max(fate.held_ns for fate in line.served) <= 2 * line.longest_ns
        if classes == (0,):
            assert all(fate.begun - fate.passed <= fate.older for fate in line.served)


def test_without_a_deadline_the_classes_stand_in_line_as_if_they_had_half_one_two_and_four_seconds() -> None:
    patience_ns = []
    for priority in (1, 2, 3, 4):
        asked = InferRequest("m", "1", "", {}, 1, 7 * MS, priority=priority)
        assert class_of(asked) == priority
        patience_ns.append(virtual_deadline(asked, NEVER) - asked.arrival_ns)
    assert patience_ns == [PATIENCE_NS // 2, PATIENCE_NS, 2 * PATIENCE_NS, 4 * PATIENCE_NS]
