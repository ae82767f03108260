"""Work on a thread beside a loop pauses; the same work elsewhere does not."""

import threading
import time

from gateway.turns import beside_a_loop, pause


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
