"""Work on a thread beside a loop pauses, and takes turns with other such work; the same work elsewhere does not."""

import contextlib
import threading
import time

from gateway.turns import beside, beside_a_loop, pause


def pauses(count: int) -> float:
    """Seconds of the wall that these take."""
    begun_s = time.monotonic()
    for _ in range(count):
        pause()
    return time.monotonic() - begun_s


def test_it_pauses_on_the_thread_that_works_beside_a_loop_and_nowhere_else() -> None:
    elsewhere: list[float] = []
    with beside_a_loop():
        assert pauses(50) >= 0.05
        other = threading.Thread(target=lambda: elsewhere.append(pauses(50)))
        other.start()
        other.join()
    assert elsewhere[0] < 0.05
    assert pauses(50) < 0.05


def test_it_pauses_for_longer_than_it_has_worked() -> None:
    with beside_a_loop():
        begun_s = time.thread_time()
        while time.thread_time() < begun_s + 0.01:
            pass
        assert pauses(1) >= 0.02


def test_one_works_at_a_time() -> None:
    working: list[int] = []

    def work() -> None:
        working.append(1)
        assert len(working) == 1
        time.sleep(0.005)
        working.pop()

    threads = [threading.Thread(target=beside, args=(work,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not working


def test_short_work_does_not_wait_for_the_end_of_long_work() -> None:
    done: list[str] = []
    begun = threading.Event()

    def long() -> None:
        begun.set()
        for _ in range(100):
            pause()
        done.append("long")

    working = threading.Thread(target=beside, args=(long,))
    working.start()
    begun.wait()
    beside(lambda: done.append("short"))
    working.join()
    assert done == ["short", "long"]


def test_work_that_fails_gives_its_turn_on() -> None:
    with contextlib.suppress(ValueError), beside_a_loop():
        raise ValueError
    assert beside(lambda: 1) == 1
