"""Ask what only a blocking call can tell, without ever having to wait for it.

`asyncio.to_thread` would not do: its threads are waited for when the event loop ends, so that a target which never answers
keeps a load test from ending.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class NotAnswered(Exception):
    """It took longer than it may."""


async def in_thread(call: Callable[..., T], *args: Any, timeout_s: float, **options: Any) -> T:
    """Run a blocking function in a thread of its own. Cancelled, or late, the thread is left behind; it ends with the process.

    Raises: NotAnswered after timeout_s, and what the function raises.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if answer.done():
            return  # nobody waits for it any more
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]  # T may be None itself

    def work() -> None:
        value, error = None, None
        try:
            value = call(*args, **options)
        except BaseException as exc:  # to be raised where it was asked
            error = exc
        with suppress(RuntimeError):  # the event loop has ended meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name=f"in_thread {getattr(call, '__name__', '')}", daemon=True).start()
    try:
        await asyncio.wait((answer,), timeout=timeout_s)
        if not answer.done():
            raise NotAnswered(f"no answer within {timeout_s:g} s")
        return answer.result()
    finally:
        answer.cancel()
