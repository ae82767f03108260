"""Time, behind one small interface, so that everything that decides can be run in simulated time."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call in the future that can be taken back."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic integer nanoseconds and calls at an absolute time."""

    def now_ns(self) -> int: ...

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        """Call back on the event loop once `now_ns() >= when_ns`; a time in the past means soon."""
        ...


class LoopClock:
    """The real clock, on a running asyncio loop.

    uvloop's `loop.time()` has whole milliseconds, so stamps come from `time.monotonic_ns`, and a timer that fires early by
    its rounding is armed again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    now_ns = staticmethod(time.monotonic_ns)

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        return _LoopTimer(self._loop, when_ns, callback)


class _LoopTimer:
    __slots__ = ("_callback", "_handle", "_loop", "_when_ns")

    def __init__(self, loop: asyncio.AbstractEventLoop, when_ns: int, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._when_ns = when_ns
        self._callback = callback
        self._arm()

    def _arm(self) -> None:
        delay_s = max(0.0, (self._when_ns - time.monotonic_ns()) / 1e9)
        self._handle = self._loop.call_later(delay_s, self._fire)

    def _fire(self) -> None:
        if time.monotonic_ns() < self._when_ns:
            self._arm()
        else:
            self._callback()

    def cancel(self) -> None:
        self._handle.cancel()
