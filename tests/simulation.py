"""Simulated time for tests: an asyncio loop that never sleeps, and a `Clock` on it.

When nothing is ready, the loop's selector does not wait for the next timer: it sets the clock to it. A test of an hour of
traffic runs in the time its callbacks take, and to the nanosecond the same each time. Work on real threads does not take
part: while timers are pending, the clock jumps on without waiting for it.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gateway.clock import Timer

T = TypeVar("T")

START_NS = 1_000_000_000
_REAL_WAIT_S = 5.0


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in simulated time, starting at `START_NS`.

    With no timer pending it waits for sockets and threads in real time, and raises RuntimeError after five seconds: nothing
    can happen any more.
    """

    def __init__(self) -> None:
        self.now_ns = START_NS
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now_ns / 1e9

    def advance_to(self, when_ns: int) -> None:
        """Move the clock on; a time in the past changes nothing."""
        self.now_ns = max(self.now_ns, when_ns)


class SimulatedClock:
    """The `gateway.clock.Clock` of a `SimulatedLoop`."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        return self._loop.now_ns

    def advance_to(self, when_ns: int) -> None:
        """Let time pass within a callback, as work does."""
        self._loop.advance_to(when_ns)

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        def fire() -> None:
            self._loop.advance_to(when_ns)  # loop.time() is a float and may round down by a nanosecond
            callback()

        return self._loop.call_at(when_ns / 1e9, fire)


def run_simulated(main: Callable[[SimulatedClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main(clock)` to its end in simulated time."""
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(main(SimulatedClock(loop)))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            events = super().select(_REAL_WAIT_S)
            if not events:
                raise RuntimeError("simulated time stands still: no timer is pending and no socket or thread is ready")
            return events
        events = super().select(0)
        if not events and timeout > 0:
            self._loop.advance_to(self._loop.now_ns + max(1, round(timeout * 1e9)))
        return events
