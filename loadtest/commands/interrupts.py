"""Ctrl-C and SIGTERM: the first one ends what is under way in order, a second one the process.

The first is Python's own handler, which runs between any two instructions, not the event loop's: a loop that is behind would
come to it late. It hands over to the kernel's default, so that nothing this process does can keep a second one from ending it.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether one has come. signum: 0 before."""

    def __init__(self) -> None:
        self.signum = 0
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
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self.signum = signum
        if self._tell is not None:
            self._tell()


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Take over SIGINT and SIGTERM; put back what was there before, at its end. Elsewhere than in the main thread: nothing."""
    found = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = {number: signal.signal(number, found._arrive) for number in _SIGNALS}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
