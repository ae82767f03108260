"""Long work on a thread beside an event loop: it pauses often, so that the loop has its turns.

A thread that works in Python is asked to give the interpreter up only every 5 ms, and the loop must ask for each of its events:
200 a second would be left, for as long as the work lasts. So such work is done in slices of a millisecond, with a pause behind
each in which the loop does all that it has to.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

SLICE: Final = 1 << 10  # elements, of what takes about a microsecond each
_PAUSE_S: Final = 0.001

Result = TypeVar("Result")

_here = threading.local()


@contextlib.contextmanager
def beside_a_loop() -> Iterator[None]:
    """Within it, `pause` is one: on a thread whose process has an event loop on another."""
    _here.paused = True
    try:
        yield
    finally:
        _here.paused = False


def beside(work: Callable[[], Result]) -> Result:
    """Do work that pauses."""
    with beside_a_loop():
        return work()


def pause() -> None:
    """Called behind each slice of long work, wherever that is done."""
    if getattr(_here, "paused", False):
        time.sleep(_PAUSE_S)
