"""Long work on a thread beside an event loop: one at a time, and most of the time it pauses, so that the loop has its turns.

A thread that works in Python is asked to give the interpreter up only every 5 ms, and the loop must ask for each of its events:
200 a second would be left, for as long as the work lasts. So such work is done in slices of a millisecond or so, and sleeps
behind each for twice as long, in which the loop does all that it has to. Work that leaves the interpreter to others in between,
as zlib does, takes it back each time, and some threads of it do so thousands of times a second.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

SLICE: Final = 1 << 10  # elements, of what takes about a microsecond each
_PAUSE_S: Final = 0.001  # at least
_PAUSE_PER_WORK: Final = 2.0

Result = TypeVar("Result")

_one = threading.RLock()
_here = threading.local()


@contextlib.contextmanager
def beside_a_loop() -> Iterator[None]:
    """Within it, `pause` is one: on a thread whose process has an event loop on another."""
    with _one:
        _here.resumed_s = time.thread_time()
        try:
            yield
        finally:
            _here.resumed_s = None


def beside(work: Callable[[], Result]) -> Result:
    """Do work that pauses."""
    with beside_a_loop():
        return work()


def pause() -> None:
    """Called behind each slice of long work, wherever that is done."""
    resumed_s = getattr(_here, "resumed_s", None)
    if resumed_s is not None:
        time.sleep(max(_PAUSE_S, _PAUSE_PER_WORK * (time.thread_time() - resumed_s)))
        _here.resumed_s = time.thread_time()
