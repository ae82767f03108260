"""Threads on which a model's code runs, and their way back to the event loop.

They are daemons: the loop's own executor would keep the process from ending while one of them hangs.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from backends.base import BackendError, LoadFailed, words_of

T = TypeVar("T")


class WayBack:
    """From a thread on which a model's code has run, to the loop. Made on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Have the loop call back."""
        if os.getpid() != self._pid:
            os._exit(1)  # the model forked, and this is the copy, cut off here: only the original answers
        try:  # noqa: SIM105  # `suppress` takes 0.3 µs of every batch
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    def settle(self, future: "asyncio.Future[T]", result: T) -> None:
        self.post(_settle, future, result)

    def fail(self, future: "asyncio.Future[T]", exc: BaseException) -> None:
        """With a BackendError, whatever was raised.

        Of all else, a future does not take StopIteration, and an await hands on as its own what is no Exception.
        """
        self.post(_fail, future, exc if isinstance(exc, BackendError) else LoadFailed(words_of(exc)))


def call(back: WayBack, name: str, function: Callable[[], T]) -> "asyncio.Future[T]":
    """Call a model's function on a thread of this name. The future raises: BackendError, whatever the function raises."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def main() -> None:
        try:
            result = function()
        except BaseException as exc:
            back.fail(future, exc)
        else:
            back.settle(future, result)

    start(name, main, future)
    return future


def start(name: str, main: Callable[[], None], awaited: "asyncio.Future[T]") -> None:
    """On the loop. awaited: raises LoadFailed if there are too many threads for one more."""
    try:
        threading.Thread(target=main, name=name, daemon=True).start()
    except RuntimeError as exc:
        awaited.set_exception(LoadFailed(words_of(exc)))


def _settle(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", exc: Exception) -> None:
    if not future.done():
        future.set_exception(exc)
