"""How a signal ends waiting: what is waited for is left behind, and what the main thread itself does is not broken off."""

import signal
import threading
from collections.abc import Iterator

import pytest

from gateway.cluster.stopping import Stop, StopAsked


@pytest.fixture
def stop() -> Iterator[Stop]:
    """Asked for by SIGUSR1."""
    stop = Stop()
    before = signal.signal(signal.SIGUSR1, stop.hear)
    yield stop
    signal.signal(signal.SIGUSR1, before)


def test_what_is_waited_for_gives_its_result_or_raises(stop: Stop) -> None:
    def fail() -> None:
        raise ValueError("no")

    assert stop.wait_for(lambda: 7) == 7
    with pytest.raises(ValueError, match="no"):
        stop.wait_for(fail)
    assert stop.wait_for(lambda: threading.current_thread() is threading.main_thread()) is False


def test_a_signal_ends_the_waiting_and_leaves_behind_what_was_waited_for(stop: Stop) -> None:
    stays = threading.Event()

    def call() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        stays.wait()

    with pytest.raises(StopAsked):
        stop.wait_for(call)
    assert not stop.idle
    stays.set()


def test_a_signal_at_any_other_time_is_heeded_at_the_next_waiting_which_begins_nothing(stop: Stop) -> None:
    signal.raise_signal(signal.SIGUSR1)
    begun: list[int] = []
    with pytest.raises(StopAsked):
        stop.wait_for(lambda: begun.append(1))
    assert begun == []
    assert stop.idle
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(StopAsked):
        stop.wait()
