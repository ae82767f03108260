"""What a batcher has decided can be done again, bit for bit, from what it kept of it in bounded memory."""

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.batching import checkpoint
from gateway.batching.adaptive import Adaptive
from gateway.batching.alone import close_alone
from gateway.batching.batch import Batch
from gateway.batching.checkpoint import freeze, thaw
from gateway.batching.policies import Greedy
from gateway.batching.policy import Decision
from gateway.batching.recorded_file import packed, unpacked
from gateway.batching.recording import FORMAT, Event, LaneSettings, RecordedBatcher, Ring
from gateway.batching.replay import EventReader, History, replay
from gateway.errors import GatewayError, InvalidArgument, Overloaded
from gateway.types import ALONE, BatchTrace, InferRequest

MS = 1_000_000
MIB = 1 << 20


def recorder(most_bytes: int = 64 * MIB, **settings: Any) -> RecordedBatcher:
    made = LaneSettings(**({"slo_ns": 60 * MS, "max_rows": 8, "model_rows": 8, "sessions": 2} | settings))
    batcher = made.batcher(Ring(most_bytes, made))
    assert isinstance(batcher, RecordedBatcher)
    return batcher


def read(batcher: RecordedBatcher) -> dict[str, Any]:
    """What somebody else gets of a recording."""
    assert batcher.ring is not None
    data = packed("m", "1", [batcher.ring], process="p", processes=1, now_ns=0, unix_s=0.0)
    return unpacked(data, "here")[0].lanes[0].recorded()


@dataclass
class Driver:
    """A lane that does at random what lanes do."""

    batcher: RecordedBatcher
    random: random.Random
    lengths: bool = False
    slots: int = 2
    now_ns: int = 1_000_000_000
    shapes: tuple[Any, ...] = (None, (("x", (3,)),))
    asked: list[InferRequest] = field(default_factory=list)
    running: list[Batch] = field(default_factory=list)

    def drive(self, moves: int) -> None:
        for _ in range(moves):
            self.now_ns += int(self.random.expovariate(1 / (3 * MS)))
            move = self.random.random()
            if move < 0.62:
                self.add()
            elif move < 0.90 and self.running:
                batch = self.running.pop(self.random.randrange(len(self.running)))
                ok = self.random.random() > 0.1
                self.batcher.finished(batch, self.now_ns, self.now_ns - batch.closed_ns, ok)
                for part in batch.parts if not ok and batch.reason != "retry" else ():
                    self.batcher.retry(part, self.now_ns)
            elif move < 0.95 and self.asked:
                self.batcher.cancel(self.random.choice(self.asked[-20:]), 500_000)
            self.step()

    def add(self) -> None:
        rows = self.random.choice((1, 1, 1, 1, 2, 5, 19))
        deadline_ns = self.now_ns + self.random.randrange(80 * MS) if self.random.random() < 0.2 else None
        length = self.random.randrange(60)
        request = InferRequest(
            "m",
            "1",
            f"r{len(self.asked)}" if self.random.random() < 0.5 else "",
            {
                "x": np.zeros((rows, length if self.lengths else 3), np.float32),
                "t": np.array([[b"t" * length]] * rows, object),
            },
            rows,
            self.now_ns - self.random.randrange(MS),
            deadline_ns=deadline_ns,
            priority=self.random.choice((0, 0, 0, 1, 3, 4)),
            shape_key=self.random.choice(self.shapes),
        )
        if request.unmarked and not self.lengths and self.random.random() < 0.7:
            request.arrival_ns, request.plain = self.now_ns, True
        try:
            self.batcher.add(request, self.now_ns, 500_000)
            self.asked.append(request)
        except GatewayError:
            pass

    def step(self) -> None:
        free = max(0, self.slots - len(self.running))
        self.batcher.workers = self.slots
        self.running += self.batcher.step(self.now_ns, free).batches


def same(history: History) -> None:
    assert history.difference is None, str(history.difference)


CASES: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "adaptive without an SLO": {"slo_ns": None},
    "compiled sizes": {"row_sizes": (1, 4, 8)},
    "greedy": {"policy": "greedy"},
    "fixed": {"policy": "fixed", "max_delay_ms": 4.0},
    "a short queue": {"max_queue_rows": 24},
    "no batches": {"max_rows": 0, "model_rows": 0},
    "lengths": {"ragged": {"pad": {"x": 0.0}, "buckets": (8, 32, 64)}},
    "lengths without buckets, greedy": {"ragged": {"pad": {"x": 0.0}}, "policy": "greedy"},
    "lengths of texts": {"ragged": {"text": ("t",)}},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_a_replay_decides_the_same(case: str, seed: int) -> None:
    batcher = recorder(**CASES[case])
    if not seed:
        for rows in batcher.service.probe_rows:
            batcher.service.probe(None, rows, [(4 + rows) * MS] * 2)
    batcher.record()
    driver = Driver(batcher, random.Random(seed), lengths="lengths" in case)
    driver.drive(800)
    history = replay(read(batcher))
    same(history)
    assert history.decisions > 500
    assert any(request.plain for request in driver.asked) == ("lengths" not in case)
    assert {"answered"} <= {request.fate for request in history.requests}


def test_what_is_told_of_new_sequences_is_replayed_too() -> None:
    batcher = recorder(sessions=1)
    for rows in batcher.service.probe_rows:
        batcher.service.probe(None, rows, [(4 + rows) * MS] * 2)
    batcher.record()
    driver = Driver(batcher, random.Random(0), slots=1, shapes=tuple([(number, ALONE) for number in range(1000)]))
    refused = 0
    for _ in range(3000):
        driver.now_ns += int(driver.random.expovariate(1 / (2 * MS)))
        asked = InferRequest("m", "1", "", {}, 1, driver.now_ns, shape_key=driver.random.choice(driver.shapes))
        try:
            batcher.add(asked, driver.now_ns)
        except Overloaded:
            refused += 1
        driver.step()
        while driver.running and driver.running[0].closed_ns + 5 * MS < driver.now_ns:
            batcher.finished(driver.running.pop(0), driver.now_ns, 5 * MS, True)
            driver.step()
    assert refused > 1000
    assert batcher._state.new_alone is not None
    batcher.record()  # amid the overload, a segment begins with it
    driver.now_ns += MS
    for number in range(1000, 1020):
        with contextlib.suppress(Overloaded):
            batcher.add(InferRequest("m", "1", "", {}, 1, driver.now_ns, shape_key=(number, ALONE)), driver.now_ns)
    same(replay(read(batcher)))


@pytest.mark.parametrize("case", ["adaptive", "adaptive without an SLO", "compiled sizes", "greedy", "no batches", "lengths"])
def test_a_request_alone_is_closed_as_it_would_be_the_long_way(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[Batch] = []

    def noted(*decided: Any) -> Batch | None:
        batch = close_alone(*decided)
        if batch is not None:
            alone.append(batch)
        return batch

    monkeypatch.setattr("gateway.batching.batcher.close_alone", noted)
    batcher = recorder(**CASES[case])
    batcher.record()
    driver = Driver(batcher, random.Random(11), lengths=case == "lengths", shapes=(None,))
    for _ in range(600):
        driver.now_ns += int(driver.random.expovariate(1 / (3 * MS)))
        driver.add()
        driver.step()
        while driver.running and driver.random.random() < 0.7:
            ended = driver.running.pop(0)
            batcher.finished(ended, driver.now_ns, driver.now_ns - ended.closed_ns, True)
            driver.step()
    assert (len(alone) > 100) == (case != "lengths"), "what is padded goes the long way"
    decide, lone, within = Adaptive._decide, Adaptive._lone, [False]

    def long_way(self: Adaptive, *asked: Any) -> Decision:
        within.append(True)
        try:
            return decide(self, *asked)
        finally:
            within.pop()

    monkeypatch.setattr("gateway.batching.batcher.close_alone", lambda *_: None)
    monkeypatch.setattr(Adaptive, "_decide", long_way)
    monkeypatch.setattr(Adaptive, "_lone", lambda self, *asked: lone(self, *asked) if within[-1] else None)
    same(replay(read(batcher)))


class Alike(Driver):
    """Requests come several at a moment, alike in all that decides: arrivals that are kept without a number."""

    def add(self) -> None:
        for _ in range(self.random.randrange(1, 5)):
            request = InferRequest("m", "1", "", {}, 1, self.now_ns)
            with contextlib.suppress(GatewayError):
                self.batcher.add(request, self.now_ns, 500_000)
                self.asked.append(request)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_cannot_be_told_apart_are_replayed_too(seed: int) -> None:
    batcher = recorder(100_000)
    batcher.record()
    driver = Alike(batcher, random.Random(seed))
    driver.drive(2000)
    recorded = read(batcher)
    assert len(recorded["segments"]) > 2
    history = replay(recorded)
    same(history)
    fates = Counter(request.fate for request in history.requests)
    assert {"answered", "cancelled", "failed"} <= set(fates)
    if not recorded["dropped"]:
        assert len(history.requests) == len(driver.asked)
    assert sum(len(batch.requests) for batch in history.batches) == sum(len(request.batches) for request in history.requests)


def test_refusals_on_arrival_are_replayed_too() -> None:
    batcher = recorder()
    for rows in batcher.service.probe_rows:
        batcher.service.probe(None, rows, [(4 + rows) * MS] * 2)
    batcher.record()
    driver = Driver(batcher, random.Random(0))
    for _ in range(3000):  # 4000/s against 1333/s
        driver.now_ns += MS // 4
        while driver.running and driver.running[0].closed_ns + driver.running[0].expected_ns <= driver.now_ns:
            batch = driver.running.pop(0)
            batcher.finished(batch, driver.now_ns, driver.now_ns - batch.closed_ns, ok=True)
        with contextlib.suppress(GatewayError):
            batcher.add(InferRequest("m", "1", "", {}, 1, driver.now_ns), driver.now_ns)
        driver.step()
    recorded = read(batcher)
    events = [event for segment in recorded["segments"] for event in EventReader(0).events(chain(*segment["chunks"]))]
    refused = [event for event in events if event[0] == Event.REFUSED]
    assert len(refused) > 1000
    same(replay(recorded))


@pytest.mark.parametrize("waits", [True, False])
def test_a_session_that_is_lost_while_the_others_are_busy_is_replayed_too(waits: bool) -> None:
    batcher = recorder(slo_ns=100 * MS)
    for rows in batcher.service.probe_rows:
        batcher.service.probe(None, rows, [(10 + rows) * MS] * 2)
    batcher.record()
    batcher.add(InferRequest("m", "1", "", {}, 1, MS), MS)
    batcher.step(MS, 2)
    refused = 0
    for now_ns in range(2 * MS, 5 * MS, 10_000):
        if now_ns > 2 * MS or waits:
            try:
                batcher.add(InferRequest("m", "1", "", {}, 1, now_ns), now_ns)
            except Overloaded:
                refused += 1
        batcher.workers = 1
        if now_ns == 2 * MS:
            batcher.step(now_ns, 0)
    assert refused
    same(replay(read(batcher)))


def test_a_recording_that_has_dropped_its_beginning_is_replayed_from_a_state() -> None:
    batcher = recorder(200_000)
    batcher.record()
    Driver(batcher, random.Random(3)).drive(12_000)
    recorded = read(batcher)
    assert recorded["dropped"] > 0
    assert len(recorded["segments"]) > 2
    history = replay(recorded)
    same(history)
    assert not history.from_start
    assert history.decisions > 1000


def test_a_recording_goes_on_while_batches_are_traced() -> None:
    class Traced(Driver):
        def step(self) -> None:
            super().step()
            for batch in self.running:
                batch.trace = BatchTrace(b"", "", lambda trace: None, "", 0)

    batcher = recorder(200_000)
    batcher.record()
    Traced(batcher, random.Random(8)).drive(6000)
    recorded = read(batcher)
    assert recorded["dropped"] > 0
    same(replay(recorded))


def test_a_ring_keeps_within_its_memory() -> None:
    batcher = recorder(200_000)
    batcher.record()
    driver = Driver(batcher, random.Random(4))
    for _ in range(30):
        driver.drive(300)
        assert batcher.ring is not None
        assert len(msgspec.msgpack.encode(batcher.ring.dump())) < 210_000  # with the names of its parts


def test_a_ring_keeps_within_its_memory_while_everything_is_refused() -> None:
    batcher = recorder(200_000, max_queue_rows=4, slo_ns=None, policy="greedy")
    batcher.record()
    for at in range(20_000):
        request = InferRequest("m", "1", "x" * 1000, {}, 1, at)
        with contextlib.suppress(GatewayError):
            batcher.add(request, at)
    assert batcher.ring is not None
    assert len(batcher.ring.events) < 1000
    assert len(msgspec.msgpack.encode(batcher.ring.dump())) < 210_000
    same(replay(read(batcher)))


def test_a_ring_keeps_within_its_memory_while_clients_come_and_go_behind_a_long_batch() -> None:
    batcher = recorder(200_000, max_queue_rows=8, slo_ns=None, policy="greedy", sessions=1)
    batcher.record()
    batcher.workers = 1
    batcher.add(InferRequest("m", "1", "first", {}, 1, 0), 0)
    (batch,) = batcher.step(0, 1).batches
    batcher.begun(batch, 1)
    assert batcher.ring is not None
    for at in range(2, 20_000):
        request = InferRequest("m", "1", "x" * 60, {}, 1, at)
        batcher.add(request, at)
        batcher.step(at, 0)
        batcher.cancel(request)
        assert len(batcher.ring.events) < 1000
    assert len(msgspec.msgpack.encode(batcher.ring.dump())) < 210_000
    history = replay(read(batcher))
    same(history)
    assert not history.from_start
    assert [batch.begun_ns for batch in history.batches] == [1]  # which the state has


@pytest.mark.parametrize("first_stay", ["refused", "given up"])
def test_a_request_that_comes_again_is_told_from_its_first_stay(first_stay: str) -> None:
    batcher = recorder(max_queue_rows=1, slo_ns=None, policy="greedy", sessions=1)
    batcher.record()
    moved = InferRequest("m", "1", "", {}, 1, 3, plain=True)
    for at in (1, 2) if first_stay == "refused" else (1,):
        batcher.add(InferRequest("m", "1", "", {}, 1, at), at)
        batcher.step(at, 2 - at)
    if first_stay == "refused":
        with pytest.raises(Overloaded):
            batcher.add(moved, 3)
        assert len(batcher.step(4, 1).batches) == 1
    else:
        batcher.add(moved, 3)
        batcher.cancel(moved)
    moved.plain = False
    batcher.add(moved, 5)
    batcher.cancel(moved)
    history = replay(read(batcher))
    same(history)
    assert [request.fate for request in history.requests if request.arrival_ns == 3][1:] == ["cancelled"]


class FullRing(Ring):
    """There is no memory for more."""

    def pack(self) -> None:
        if self.events:
            raise MemoryError


def test_a_ring_that_takes_no_more_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    settings = LaneSettings(slo_ns=60 * MS, max_rows=8, model_rows=8, sessions=2)
    batcher = settings.batcher(FullRing(64 * MIB, settings))
    assert isinstance(batcher, RecordedBatcher)
    batcher.record()
    driver = Driver(batcher, random.Random(7))
    driver.drive(1000)
    assert batcher.ring is None
    assert "decisions are no longer recorded: MemoryError" in caplog.text
    assert len(driver.asked) > 100


@pytest.mark.parametrize("kind", [Event.STEPPED, Event.CLOSED])
def test_what_another_decision_would_have_been_is_found(kind: Event) -> None:
    batcher = recorder()
    batcher.record()
    Driver(batcher, random.Random(5)).drive(2000)
    recorded = read(batcher)
    if kind == Event.STEPPED:
        events = EventReader(0).events(chain(*recorded["segments"][0]["chunks"]))
        event = next(event for event in events if event[0] == kind and event[4])
        event[4][0][3] += 1  # its expected time, by a nanosecond
    else:
        chunk = next(chunk for chunk in recorded["segments"][0]["chunks"] if any(isinstance(value, str) for value in chunk))
        chunk[next(at for at, value in enumerate(chunk) if isinstance(value, str)) + 7] += 1
    difference = replay(recorded).difference
    assert difference is not None
    assert difference.recorded[0] == kind
    assert kind.name.lower() in str(difference)


class Stranger(Greedy):
    """A policy that is not of gateway.batching."""


def test_a_state_that_cannot_be_kept_ends_the_recording_and_nothing_else() -> None:
    settings = LaneSettings(policy="greedy", max_rows=8)
    batcher = RecordedBatcher(Stranger(), ring=Ring(MIB, settings), max_rows=8)
    batcher.record()
    driver = Driver(batcher, random.Random(6))
    driver.drive(200)
    assert batcher.ring is None
    assert driver.asked


@pytest.mark.parametrize("case", CASES)
def test_keeping_a_state_asks_no_object_for_its_dict(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = recorder(**CASES[case])
    batcher.record()
    asked: list[type] = []
    monkeypatch.setattr(checkpoint, "vars", lambda value: asked.append(type(value)) or value.__dict__, raising=False)
    driver = Driver(batcher, random.Random(0), lengths="lengths" in case)
    for _ in range(4):
        driver.drive(300)
        batcher._frozen()
    assert not asked  # it would be slower to use from then on


def test_a_state_that_takes_too_much_room_ends_it_likewise(caplog: pytest.LogCaptureFixture) -> None:
    batcher = recorder(8000)
    for rows in batcher.service.probe_rows:
        batcher.service.probe(None, rows, [(4 + rows) * MS] * 2)
    batcher.record()
    Driver(batcher, random.Random(6)).drive(50)
    assert batcher.ring is None
    assert "raise batching.record_mib" in caplog.text


def test_a_state_makes_no_objects_of_others() -> None:
    for name in (
        "os:system",
        "gateway.batching.recording:msgspec",
        "gateway.batching.recording:freeze",
        "gateway.batching.batcher:deque",
        "gateway.routing.router:Router",
    ):
        with pytest.raises(ValueError, match="not a state"):
            thaw(["k", 1, name, [], []])
    with pytest.raises(ValueError, match="not a state"):
        thaw(["k", 1, "gateway.batching.queue:State", ["__class__"], [1]])
    with pytest.raises(TypeError, match="no part of a state"):
        freeze(object())


def test_a_file_that_is_no_recording_says_so() -> None:
    with pytest.raises(InvalidArgument, match="no recording of a gateway"):
        unpacked(b"hello", "x")
    old = msgspec.msgpack.encode({"format": 99, "gateway": "9.9"})
    with pytest.raises(InvalidArgument, match=r"format 99 by gateway 9\.9, expected format 22"):
        unpacked(old, "x")
    broken = msgspec.msgpack.encode({"format": FORMAT, "gateway": "9.9", "recordings": 3})
    with pytest.raises(InvalidArgument, match="broken"):
        unpacked(broken, "x")


def test_how_long_streams_went_on_is_no_part_of_a_state() -> None:
    batcher = recorder(policy="greedy")
    batcher.record()
    before = str(batcher._frozen())
    batcher.streams.ended(3)
    assert str(batcher._frozen()) == before


def test_a_recording_holds_no_tensors() -> None:
    batcher = recorder()
    batcher.record()
    for at in range(10):
        batcher.add(InferRequest("m", "1", "", {"x": np.zeros((1, 100_000), np.float32)}, 1, at), at)
    assert batcher.ring is not None
    assert len(msgspec.msgpack.encode(batcher.ring.dump())) < 10_000
