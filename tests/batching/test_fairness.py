import gc
import heapq
import weakref
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batching.batch import Batch
from gateway.batching.fairness import QUANTUM_NS, SharedWorkers, WorkerShare

MS = 1_000_000


def served(share: WorkerShare[str], batch_ns: dict[str, float], batches: int) -> dict[str, float]:
    """Worker time each gets when all always wait."""
    time_ns = dict.fromkeys(batch_ns, 0.0)
    for _ in range(batches):
        member = share.first(batch_ns)
        assert member is not None
        share.charge(member, batch_ns[member])
        time_ns[member] += batch_ns[member]
    return time_ns


def test_slow_and_fast_models_get_the_same_worker_time() -> None:
    share: WorkerShare[str] = WorkerShare(10 * MS)
    for name in ("fast", "slow"):
        share.join(name)
    time_ns = served(share, {"fast": 1.0 * MS, "slow": 50.0 * MS}, 5000)
    assert time_ns["fast"] == pytest.approx(time_ns["slow"], rel=0.05)


def test_weights_divide_the_workers() -> None:
    share: WorkerShare[str] = WorkerShare(10 * MS)
    share.join("big", weight=3)
    share.join("small")
    time_ns = served(share, {"big": 7.0 * MS, "small": 4.0 * MS}, 4000)
    assert time_ns["big"] == pytest.approx(3 * time_ns["small"], rel=0.05)


def test_a_wrong_prediction_is_settled() -> None:
    share: WorkerShare[str] = WorkerShare(10 * MS)
    share.join("honest")
    share.join("wrong")
    time_ns = {"honest": 0, "wrong": 0}
    for _ in range(2000):
        member = share.first(["honest", "wrong"])
        assert member is not None
        expected = 5 * MS if member == "honest" else 0
        share.charge(member, expected)
        share.settle(member, expected, 5 * MS)
        time_ns[member] += 5 * MS
    assert time_ns["honest"] == pytest.approx(time_ns["wrong"], rel=0.05)


def test_after_a_batch_that_took_its_whole_turn_it_is_the_next_ones() -> None:
    share: WorkerShare[str] = WorkerShare(10 * MS)
    share.join("unknown")
    share.join("other")
    assert share.first(["unknown", "other"]) == "unknown"
    share.charge("unknown", 0)
    share.settle("unknown", 0, 10 * MS)
    assert share.first(["unknown", "other"]) == "other"


def test_who_was_idle_has_no_credit_saved_up() -> None:
    share: WorkerShare[str] = WorkerShare(10 * MS)
    share.join("idle")
    share.join("busy")
    for _ in range(1000):
        assert share.first(["busy"]) == "busy"
        share.charge("busy", 5 * MS)
    time_ns = served(share, {"idle": 5.0 * MS, "busy": 5.0 * MS}, 40)
    assert time_ns["idle"] <= 26 * 5 * MS


@pytest.mark.parametrize(("meanwhile", "wait"), [(0, 8), (2, 6), (4, 4), (8, 0), (100, 0)])
def test_who_was_idle_comes_back_with_what_is_left_of_its_debt(meanwhile: int, wait: int) -> None:
    """The others have their forty first, some of it while it is idle."""
    share: WorkerShare[str] = WorkerShare(10 * MS)
    share.join("idle")
    share.join("busy")
    assert share.first(["idle", "busy"]) == "idle"
    share.charge("idle", 50 * MS)  # forty more than its quantum
    for _ in range(2 + meanwhile):
        assert share.first(["busy"]) == "busy"
        share.charge("busy", 5 * MS)
    turns = []
    for _ in range(20):
        member = share.first(["idle", "busy"])
        assert member is not None
        turns.append(member)
        share.charge(member, 5 * MS)
    assert wait <= turns.index("idle") <= wait + 2
    assert turns[-4:].count("idle") == 2


def test_who_was_idle_gets_one_quantum_when_it_comes_back_and_no_more() -> None:
    share: WorkerShare[str] = WorkerShare(10)
    share.join("idle")
    share.join("busy")
    assert share.first(["idle", "busy"]) == "idle"
    share.charge("idle", 1)  # nine are left, and are lost
    assert share.first(["busy"]) == "busy"
    share.charge("busy", 10)
    turns = []
    for _ in range(30):
        member = share.first(["idle", "busy"])
        assert member is not None
        turns.append(member)
        share.charge(member, 1)
    assert turns == ["idle"] * 10 + ["busy"] * 10 + ["idle"] * 10


def test_nobody_waits_and_nobody_is_first() -> None:
    share: WorkerShare[str] = WorkerShare()
    assert share.first([]) is None
    share.join("a")
    assert share.first([]) is None
    assert share.first(["a", "unknown"]) == "a"
    assert share.first(["a"]) == "a"


def test_who_leaves_is_forgotten() -> None:
    share: WorkerShare[str] = WorkerShare()
    for name in "abc":
        share.join(name)
    assert share.first("abc") == "a"
    share.charge("a", 50 * MS)
    share.leave("b")
    share.settle("b", 0, 5 * MS)
    assert share.first("ac") == "c"
    share.leave("c")
    share.leave("a")
    assert share.first("abc") is None
    for weight in (0, -1):
        with pytest.raises(ValueError, match=f"weight of 'd': expected a positive number, got {weight}"):
            share.join("d", weight=weight)


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("leaves", range(4))
def test_when_one_leaves_the_turn_stays_where_it_was_or_goes_to_the_next(turn: int, leaves: int) -> None:
    share: WorkerShare[str] = WorkerShare(10)
    ring = "abcd"
    for name in ring:
        share.join(name)
    for name in ring[:turn]:
        assert share.first(ring) == name
        share.charge(name, 10)
    assert share.first(ring) == ring[turn]
    share.leave(ring[leaves])
    rest = ring.replace(ring[leaves], "")
    assert share.first(rest) == (ring[turn] if turn != leaves else ring[(turn + 1) % 4])


def test_a_turn_lasts_until_its_quantum_is_used_though_others_come() -> None:
    share: WorkerShare[str] = WorkerShare(10)
    for name in "abc":
        share.join(name)
    assert share.first("bc") == "b"
    share.charge("b", 3)
    assert share.first("abc") == "b"
    share.charge("b", 6)
    assert share.first("abc") == "b"  # one is left
    share.charge("b", 1)
    assert share.first("abc") == "c"
    share.join("c", weight=0.5)  # again: only its weight changes
    share.charge("c", 4)
    share.settle("c", 4, 10)
    assert share.first("abc") == "a"
    share.charge("a", 10)
    turns = []
    for _ in range(50):
        member = share.first("abc")
        assert member is not None
        turns.append(member)
        share.charge(member, 1)
    assert turns == ["b"] * 10 + ["c"] * 5 + ["a"] * 10 + ["b"] * 10 + ["c"] * 5 + ["a"] * 10


def test_equal_debts_are_paid_off_together_before_anybody_gets_more() -> None:
    share: WorkerShare[str] = WorkerShare(10)
    for name in "ab":
        share.join(name)
    for name in "ab":
        assert share.first("ab") == name
        share.charge(name, 19)
    turns = []
    for _ in range(22):
        member = share.first("ab")
        assert member is not None
        turns.append(member)
        share.charge(member, 1)
    assert "".join(turns) == "ab" + "a" * 10 + "b" * 10


class Wanting:
    """A lane that wants to start so many batches, and what it was offered."""

    def __init__(self, shared: SharedWorkers, wants: int, *, declines: bool = False) -> None:
        self.wants = wants
        self.declines = declines
        self.undecided = False
        self.now_ns = self.frees_ns = 0
        self.offered: list[int] = []
        self.started: list[Batch] = []
        shared.join(self, 1.0)

    @property
    def wants_worker(self) -> bool:
        return self.wants > 0

    def free_ns(self, now_ns: int) -> float:
        return self.frees_ns - now_ns

    def start_batches(self, workers: int) -> list[Batch]:
        self.offered.append(workers)
        count = 0 if self.declines else min(workers, self.wants)
        self.wants -= count
        made = [
            Batch(parts=[], rows=1, padded_rows=1, reason="", closed_ns=self.now_ns, expected_ns=5 * MS) for _ in range(count)
        ]
        self.started += made
        return made


def test_a_worker_that_one_lane_leaves_another_that_still_wants_one_gets() -> None:
    shared = SharedWorkers(4)
    many, one = Wanting(shared, 5), Wanting(shared, 1)
    shared.ask(many, 0)
    assert (len(many.started), len(one.started), shared.free) == (3, 1, 0)
    assert (many.offered[0], one.offered) == (2, [1])


def test_free_workers_are_dealt_out_evenly() -> None:
    shared = SharedWorkers(6)
    lanes = [Wanting(shared, 9) for _ in range(3)]
    shared.ask(lanes[0], 0)
    assert [len(lane.started) for lane in lanes] == [2, 2, 2]


def test_who_asks_is_stepped_once_be_it_with_no_worker() -> None:
    shared = SharedWorkers(1)
    first, second = Wanting(shared, 2), Wanting(shared, 0)
    shared.ask(first, 0)
    assert (first.offered, second.offered) == ([1], [])
    shared.ask(first, 0)
    shared.ask(second, 0)
    assert (first.offered, second.offered) == ([1, 0], [0])


def test_what_one_declines_is_offered_to_the_next() -> None:
    shared = SharedWorkers(1)
    declining, following = Wanting(shared, 1, declines=True), Wanting(shared, 1)
    shared.ask(declining, 0)
    assert declining.offered == [1]
    assert len(following.started) == 1


def test_the_turn_of_one_that_will_ask_again_at_once_is_kept_for_it() -> None:
    shared = SharedWorkers(1)
    undecided, following = Wanting(shared, 1, declines=True), Wanting(shared, 1)
    undecided.undecided = True
    shared.ask(following, 0)
    assert (undecided.offered, following.offered) == ([1], [0])
    undecided.declines = False
    shared.ask(undecided, 1)
    assert len(undecided.started) == 1


def test_who_has_left_is_offered_nothing() -> None:
    shared = SharedWorkers(2)
    left, staying = Wanting(shared, 1), Wanting(shared, 1)
    shared.leave(left)
    shared.ask(staying, 0)
    assert (left.offered, len(staying.started)) == ([], 1)
    gone = weakref.ref(left)
    del left
    gc.collect()
    assert gone() is None  # its model's memory with it


def test_who_streams_for_long_pays_while_it_streams() -> None:
    shared = SharedWorkers(3)
    streaming, other = Wanting(shared, 2), Wanting(shared, 0)
    shared.ask(streaming, 0)
    other.wants = 50
    shared.ask(other, 0)
    for tick in range(1, 20):  # two workers have the streams; every 5 ms the third is free, which both want
        streaming.wants = 1
        streaming.now_ns = other.now_ns = tick * 5 * MS
        shared.ended(other.started[-1], other.now_ns)
        shared.ask(streaming, other.now_ns)
    assert (len(streaming.started), len(other.started)) == (2, 20)
    for batch in streaming.started:
        shared.ended(batch, 100 * MS)
    shared.ended(other.started[-1], 100 * MS)
    assert shared.free == 3


def test_a_batch_that_began_before_its_lane_failed_may_end() -> None:
    class Failing(Wanting):
        def start_batches(self, workers: int) -> list[Batch]:
            super().start_batches(workers)
            raise OSError("broken")

    shared = SharedWorkers(1)
    failing = Failing(shared, 1)
    with pytest.raises(OSError, match="broken"):
        shared.ask(failing, 0)
    shared.ended(failing.started[0], 5 * MS)
    assert shared.free == 1


def test_the_wait_for_a_worker_is_until_the_first_lane_that_has_one_predicts_it_free() -> None:
    shared = SharedWorkers(2)
    one, other, idle = Wanting(shared, 1), Wanting(shared, 1), Wanting(shared, 0)
    one.frees_ns, other.frees_ns, idle.frees_ns = 8 * MS, 5 * MS, 3 * MS
    assert shared.wait_ns(2 * MS) == 0
    shared.ask(one, 0)
    assert shared.free == 0
    assert shared.wait_ns(2 * MS) == 3 * MS
    shared.ended(other.started[0], 4 * MS)
    assert (shared.free, shared.wait_ns(4 * MS)) == (1, 0)
    one.wants = 1
    shared.ask(one, 4 * MS)
    assert shared.wait_ns(4 * MS) == 4 * MS


@given(
    times=st.lists(st.floats(0.1, 100), min_size=1, max_size=6),
    weights=st.lists(st.floats(0.2, 5), min_size=6, max_size=6),
)
def test_nobody_who_waits_starves(times: list[float], weights: list[float]) -> None:
    share: WorkerShare[int] = WorkerShare(10 * MS)
    for member in range(len(times)):
        share.join(member, weights[member])
    total_ns = 0.0
    seen: set[int] = set()
    # One round: each takes its quantum and one batch; a batch costs up to 100/(10·0.2) rounds of credit.
    bound_ns = 60 * sum(10 * MS * weights[i] + times[i] * MS for i in range(len(times)))
    while len(seen) < len(times):
        member = share.first(range(len(times)))
        assert member is not None
        seen.add(member)
        share.charge(member, times[member] * MS)
        total_ns += times[member] * MS
        assert total_ns < bound_ns


@dataclass
class Pool:
    """Models that share workers in simulated time.

    wrong: times what its batches take, each is predicted to take. taken_ns: worker time of the batches each has started.
    """

    workers: int
    weights: list[float]
    batch_ns: list[float]
    wrong: float
    share: WorkerShare[int] = field(default_factory=lambda: WorkerShare(QUANTUM_NS))
    now_ns: float = 0.0
    running: list[tuple[float, int, float]] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    taken_ns: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for member, weight in enumerate(self.weights):
            self.share.join(member, weight)
        self.taken_ns = [0.0] * len(self.weights)

    def start(self) -> list[int]:
        """Batches on all free workers: whose they are, in order."""
        started = []
        while len(self.running) < self.workers and (member := self.share.first(self.waiting)) is not None:
            expected_ns = self.batch_ns[member] * self.wrong
            self.share.charge(member, expected_ns)
            heapq.heappush(self.running, (self.now_ns + self.batch_ns[member], member, expected_ns))
            self.taken_ns[member] += self.batch_ns[member]
            started.append(member)
        return started

    def end(self) -> None:
        """The first batch that runs."""
        self.now_ns, member, expected_ns = heapq.heappop(self.running)
        self.share.settle(member, expected_ns, self.batch_ns[member])


pools = st.integers(2, 5).flatmap(
    lambda count: st.builds(
        Pool,
        workers=st.integers(1, 4),
        weights=st.lists(st.floats(0.25, 4), min_size=count, max_size=count),
        batch_ns=st.lists(st.floats(0.1 * MS, 200 * MS), min_size=count, max_size=count),
        wrong=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    )
)


@pytest.mark.slow
@settings(max_examples=80, derandomize=True)
@given(pool=pools, toggles=st.lists(st.integers(0, 4), min_size=20, max_size=60))
def test_models_that_wait_get_worker_time_by_weight_whoever_else_comes_and_goes(pool: Pool, toggles: list[int]) -> None:
    """The first two always wait: what they have taken by weight differs by some quanta and a batch per worker at most."""
    first, second = 0, 1
    pool.waiting = {first, second}
    bound_ns = sum(3 * QUANTUM_NS + (pool.workers + 1) * pool.batch_ns[each] / pool.weights[each] for each in (first, second))
    for toggle in toggles:
        if first != toggle % len(pool.weights) != second:
            pool.waiting ^= {toggle % len(pool.weights)}
        for _ in range(5):
            pool.start()
            by_weight = [pool.taken_ns[each] / pool.weights[each] for each in (first, second)]
            assert abs(by_weight[first] - by_weight[second]) <= bound_ns
            pool.end()


@pytest.mark.slow
@settings(max_examples=80, derandomize=True)
@given(pool=pools)
def test_between_two_batches_of_a_model_that_waits_no_other_takes_more_than_its_part(pool: Pool) -> None:
    pool.waiting = set(range(len(pool.weights)))
    at_start: list[list[float]] = [[0.0] * len(pool.weights) for _ in pool.weights]
    for _ in range(150):
        for member in pool.start():
            for other, weight in enumerate(pool.weights):
                if other != member:
                    part = weight / pool.weights[member]
                    owed_ns = part * (pool.workers * pool.batch_ns[member] + 2 * QUANTUM_NS * pool.weights[member])
                    most_ns = owed_ns + 2 * QUANTUM_NS * weight + (pool.workers + 1) * pool.batch_ns[other]
                    assert pool.taken_ns[other] - at_start[member][other] <= most_ns
            at_start[member] = list(pool.taken_ns)
        pool.end()


@pytest.mark.parametrize("workers", [1, 2])
def test_who_uses_less_than_its_part_waits_for_a_turn_of_each_other_and_no_longer(workers: int) -> None:
    """A batch of 100 ms now and then, beside two that always have one of 5 ms: it has a tenth, where a third is its part."""
    pool = Pool(workers, [1.0, 1.0, 1.0], [100 * MS, 5 * MS, 5 * MS], 1.0)
    pool.waiting = {1, 2}
    waits_ms = []
    for _ in range(20):
        for _ in range(200):
            pool.start()
            pool.end()
        asked_ns = pool.now_ns
        pool.waiting.add(0)
        while 0 not in pool.start():
            pool.end()
        pool.waiting.discard(0)
        waits_ms.append((pool.now_ns - asked_ns) / MS)
    assert max(waits_ms) <= 2 * (10 + 5)
