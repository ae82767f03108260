import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batching.fairness import WorkerShare

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


def test_who_was_idle_comes_back_with_the_debt_it_left_with() -> None:
    share: WorkerShare[str] = WorkerShare(10 * MS)
    share.join("idle")
    share.join("busy")
    assert share.first(["idle", "busy"]) == "idle"
    share.charge("idle", 50 * MS)  # forty more than its quantum
    for _ in range(100):
        assert share.first(["busy"]) == "busy"
        share.charge("busy", 5 * MS)
    turns = []
    for _ in range(20):
        member = share.first(["idle", "busy"])
        assert member is not None
        turns.append(member)
        share.charge(member, 5 * MS)
    assert turns.index("idle") >= 8  # the others have their forty first
    assert turns[-4:].count("idle") == 2


def test_who_was_idle_gets_one_quantum_when_it_comes_back_and_no_more() -> None:
    share: WorkerShare[str] = WorkerShare(10 * MS)
    share.join("idle")
    share.join("busy")
    assert share.first(["idle", "busy"]) == "idle"
    share.charge("idle", 1 * MS)  # nine are left, and are lost
    assert share.first(["busy"]) == "busy"
    share.charge("busy", 10 * MS)
    turns = []
    for _ in range(30):
        member = share.first(["idle", "busy"])
        assert member is not None
        turns.append(member)
        share.charge(member, 1 * MS)
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
    with pytest.raises(ValueError, match="weight of 'd': expected a positive number, got 0"):
        share.join("d", weight=0)


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
