"""A backend is judged by how its executions end, and tried again with copies."""

from gateway.config import Ejection
from gateway.routing.health import Health

S = 1_000_000_000


def test_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    health = Health(Ejection(consecutive_failures=3))
    assert [health.failed(), health.failed()] == [False, False]
    health.succeeded()
    assert [health.failed(), health.failed(), health.failed()] == [False, False, True]


def test_half_of_the_last_twenty_failing_ejects() -> None:
    health = Health(Ejection(consecutive_failures=100, failed_share=0.5))
    verdicts = []
    for _ in range(10):
        health.succeeded()
        verdicts.append(health.failed())
    assert verdicts == [False] * 9 + [True]


def test_one_failure_among_many_executions_ejects_nobody() -> None:
    health = Health(Ejection())
    for _ in range(40):
        health.succeeded()
        assert not health.ejected
    assert not health.failed()


def test_a_share_of_few_executions_ejects_nobody() -> None:
    health = Health(Ejection(consecutive_failures=100, failed_share=0.5))
    assert [health.failed() for _ in range(19)] == [False] * 19
    assert health.failed()  # twenty of twenty


def test_one_failure_too_slow_to_be_saved_ejects() -> None:
    assert Health(Ejection()).failed(slow=True)


def test_two_good_probes_after_the_pause_bring_it_back() -> None:
    health = Health(Ejection(pause_s=1.0))
    health.eject(0)
    assert not health.may_probe(S - 1)
    assert health.may_probe(S)
    health.probed(True, S)
    assert health.ejected
    health.probed(True, S)
    assert not health.ejected


def test_a_bad_probe_doubles_the_pause_up_to_its_most() -> None:
    health = Health(Ejection(pause_s=1.0, max_pause_s=3.0))
    health.eject(0)
    health.probed(False, 1 * S)
    assert not health.may_probe(3 * S - 1)  # 1 + 2
    assert health.may_probe(3 * S)
    health.probed(False, 3 * S)
    assert health.may_probe(6 * S)  # 3 + 3, not 4


def test_an_ejection_soon_after_the_last_is_longer_and_a_late_one_is_not() -> None:
    health = Health(Ejection(pause_s=1.0))
    health.eject(100 * S)
    for _ in range(2):
        health.probed(True, 101 * S)
    health.eject(110 * S)
    assert not health.may_probe(112 * S - 1)
    for _ in range(2):
        health.probed(True, 112 * S)
    health.eject(143 * S)  # over 30 s later
    assert health.may_probe(144 * S)


def test_what_fails_while_ejected_changes_nothing() -> None:
    health = Health(Ejection())
    health.eject(0)
    assert not health.failed(slow=True)


def test_after_exactly_half_a_minute_live_an_ejection_is_still_a_repeated_one() -> None:
    health = Health(Ejection(pause_s=1.0))
    health.eject(100 * S)
    for _ in range(2):
        health.probed(True, 101 * S)
    health.eject(131 * S)
    assert not health.may_probe(133 * S - 1)
    assert health.may_probe(133 * S)


def test_a_backend_that_is_back_begins_anew() -> None:
    health = Health(Ejection(consecutive_failures=3, failed_share=0.5, pause_s=1.0))
    for _ in range(15):
        health.failed()
    health.eject(0)
    for _ in range(2):
        health.probed(True, 1 * S)
    assert str(health) == "live, 0 failures in a row, 0 of the last 0"
    assert [health.failed(), health.failed(), health.failed()] == [False, False, True]


def test_good_probes_must_follow_each_other() -> None:
    health = Health(Ejection(pause_s=1.0))
    health.eject(0)
    health.probed(True, 1 * S)
    health.probed(False, 1 * S)
    health.probed(True, 3 * S)
    assert health.ejected
    health.probed(True, 3 * S)
    assert not health.ejected
    assert not health.may_probe(100 * S)
    health.probed(False, 4 * S)  # a copy that was on its way
    assert not health.ejected


def test_it_says_how_it_stands() -> None:
    health = Health(Ejection(pause_s=1.5))
    health.succeeded()
    health.failed()
    health.failed()
    assert str(health) == "live, 2 failures in a row, 2 of the last 3"
    health.eject(0)
    health.probed(True, 2 * S)
    assert str(health) == "ejected for 1.5 s after 2 failures in a row, 2 of the last 3; 1 of 2 probes"


def test_only_the_last_twenty_count() -> None:
    health = Health(Ejection(consecutive_failures=100, failed_share=0.5))
    for _ in range(10):
        health.failed()
    for _ in range(11):
        health.succeeded()
    assert not health.failed()  # eight of those before are left, and this one
    health.succeeded()
    assert str(health) == "live, 0 failures in a row, 8 of the last 20"
