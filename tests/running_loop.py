"""A loop on a thread of its own, for servers that tests ask as clients do."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvloop

_TIMEOUT_S = 30.0


@contextmanager
def running_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> Iterator[asyncio.AbstractEventLoop]:
    """At its end what it has given to threads is waited for."""
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_TIMEOUT_S)
        loop.close()
