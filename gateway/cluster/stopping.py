"""How a signal ends waiting for Ray.

Where Ray waits on the main thread, what a signal's handler raises is lost: ray.get makes a SystemError of it, which Ray's code
takes for any other. So handlers only note here that they were called, and what may wait long for Ray does so on other threads.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T")


class StopAsked(BaseException):
    """A signal asked to stop. No error: nothing but `run_on_ray` may catch it."""


class Stop:
    """Whether it is asked for: heeded where the main thread waits by this, and nowhere else."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()  # None: a signal
        self._calling: threading.Thread | None = None

    def hear(self, _number: int, _frame: object) -> None:
        """Handle a signal."""
        self._heard.put(None)

    def wait(self) -> NoReturn:
        """Raises: StopAsked, once it is asked for."""
        self._heard.get()
        raise StopAsked

    def wait_for(self, call: Callable[[], _T]) -> _T:
        """Call it on a thread of its own, which a stop leaves behind. Raises: StopAsked; what it raises."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as exc:
                done.set_exception(exc)
            self._heard.put(done)

        if self._heard.empty():  # else it has been asked for
            self._calling = threading.Thread(target=run, name="wait for Ray", daemon=True)
            self._calling.start()
        if self._heard.get() is None:
            raise StopAsked
        return done.result()

    @property
    def idle(self) -> bool:
        """Whether nothing that was left behind is still waiting."""
        return self._calling is None or not self._calling.is_alive()
