"""Long work on a thread beside an event loop: one thread at a time, and most of the time none, so that the loop has its turns.

A thread that works in Python is asked to give the interpreter up only every 5 ms, and the loop must ask for each of its
events: 200 a second would be left, for as long as the work lasts. So such work is done in slices of a millisecond or so, and
behind each nobody works for twice as long, in which the loop does all that it has to. Work that leaves the interpreter to
others in between, as zlib does, takes it back each time, and some threads of it do so thousands of times a second. Several
works take turns, slice by slice: a short one does not wait for the end of a long one.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

SLICE: Final = 1 << 10  # elements, of what takes about a microsecond each
_PAUSE_S: Final = 0.001  # at least
_PAUSE_PER_WORK: Final = 2.0

Result = TypeVar("Result")

_here = threading.local()


class _OneAtATime:
    """Who may work: the threads that ask, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def take(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()  # until it is given

    def give(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


_turn: Final = _OneAtATime()


@contextlib.contextmanager
def beside_a_loop() -> Iterator[None]:
    """Within it, `pause` is one: on a thread whose process has an event loop on another."""
    _turn.take()
    _here.resumed_s = time.thread_time()
    try:
        yield
    finally:
        _here.resumed_s = None
        _turn.give()


def beside(work: Callable[[], Result]) -> Result:
    """Do work that pauses."""
    with beside_a_loop():
        return work()


def pause() -> None:
    """Called behind each slice of long work, wherever that is done."""
    resumed_s = getattr(_here, "resumed_s", None)
    if resumed_s is not None:
        time.sleep(max(_PAUSE_S, _PAUSE_PER_WORK * (time.thread_time() - resumed_s)))
        _turn.give()
        _turn.take()
        _here.resumed_s = time.thread_time()
