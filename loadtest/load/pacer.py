"""Wake the event loop at a moment, more finely than its own timers.

asyncio's timers on uvloop have whole milliseconds. A Linux timerfd is served by the kernel's high-resolution timers and wakes
the loop as a readable file, without burning a core: p99 0.07 to 0.15 ms late (see `loadtest.load.worker`). Where that is not
enough (a tight SLO asks for less lag), the pacer wakes `spin_ns` early and lets the loop run round, polling its sockets, until
the moment.
"""

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Final

_CLOCK_MONOTONIC: Final = 1
_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME


class _Timerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long), ("value_s", ctypes.c_long), ("value_ns", ctypes.c_long),
    )  # fmt: skip


class Pacer:
    """Calls back once per `wake_at`, on the loop's thread. A later `wake_at` replaces the earlier one.

    The callback must not raise: who else would ask to be woken again?
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None], *, spin_ns: int = 0) -> None:
        self._loop = loop
        self._callback = callback
        self._spin_ns = spin_ns
        self._when_ns = 0
        self._early_ns = 0  # since when it spins; 0: it does not
        self.spun_ns = 0  # all in all: time that was not needed for anything else
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._spec = _Timerspec()
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._expired)

    def wake_at(self, when_ns: int) -> None:
        """when_ns: `time.monotonic_ns`; the past means soon. After `close`: never."""
        if self._closed:
            return
        self._when_ns = when_ns
        early_ns = when_ns - self._spin_ns
        if self._fd < 0:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(max(0, early_ns - time.monotonic_ns()) / 1e9, self._arrive)
            return
        self._spec.value_s, self._spec.value_ns = divmod(max(early_ns, 1), 1_000_000_000)  # zero would disarm it
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._spec), None)

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # armed anew between the wake-up and here
            os.read(self._fd, 8)
            self._arrive()

    def _arrive(self) -> None:
        if self._closed:
            return  # it was under way
        now_ns = time.monotonic_ns()
        if now_ns < self._when_ns:
            self._early_ns = self._early_ns or now_ns
            self._loop.call_soon(self._arrive)
            return
        if self._early_ns:
            self.spun_ns += now_ns - self._early_ns
            self._early_ns = 0
        self._callback()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
