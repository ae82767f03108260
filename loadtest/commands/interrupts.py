"""Ctrl-C, SIGTERM and a terminal that closes (SIGHUP): the first ends what is under way in order, a later one the process.

The handler is Python's own, which runs between any two instructions, not the event loop's: a loop that is behind would come to
it late. A later one is left to the kernel's default. What comes right behind the first is the same press: wrappers (make,
timeout, uv) pass on what their children get from the terminal as well, and it must not end a removal of what is paid for. Nor
must a later SIGHUP, which nobody presses.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from gateway.process.interrupts import stop_signals

SAME_PRESS_S: Final = 0.5


class Interruption:
    """Whether one has come. signum: 0 before."""

    def __init__(self) -> None:
        self.signum = 0
        self._came_s = 0.0
        self._tell: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Interruption {self.signum or 'has not come'}>"

    @property
    def exit_code(self) -> int:
        """As a shell reports it; only after one has come."""
        return 128 + self.signum

    @contextmanager
    def calls(self, callback: Callable[[], None]) -> Iterator[None]:
        """While this lasts, have `callback` called once, on the running event loop; at once, if a signal has come before."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(callback)

        self._tell = tell
        try:
            if self.signum:
                self._tell()
            yield
        finally:
            self._tell = None

    def _arrive(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.signum:
            self.signum, self._came_s = signum, now_s
            if self._tell is not None:
                self._tell()
        elif signum != signal.SIGHUP and now_s - self._came_s >= SAME_PRESS_S:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Take over the signals; put back what was there before, at its end. Elsewhere than in the main thread: nothing."""
    found = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = {number: signal.signal(number, found._arrive) for number in stop_signals()}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
