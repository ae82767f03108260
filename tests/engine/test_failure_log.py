"""How many failures the log tells."""

from gateway.engine.failure_log import FailureLog

S = 1_000_000_000


def test_a_burst_is_told_and_then_one_in_six_seconds() -> None:
    failures = FailureLog()
    assert [failures.take(100 * S) for _ in range(12)] == [0] * 10 + [None, None]
    assert failures.take(105 * S) is None
    assert [failures.take(106 * S) for _ in range(2)] == [3, None]
    assert [failures.take(118 * S) for _ in range(3)] == [1, 0, None]


def test_after_a_while_a_whole_burst_is_told_again() -> None:
    failures = FailureLog()
    for _ in range(20):
        failures.take(S)
    assert [failures.take(200 * S) for _ in range(11)] == [10] + [0] * 9 + [None]


def test_a_steady_rate_below_one_in_six_seconds_is_all_told() -> None:
    failures = FailureLog()
    assert all(failures.take(at_s * S) == 0 for at_s in range(0, 600, 6))
