"""Waiting for what another thread or process does, where no event tells."""

import asyncio
import time
from collections.abc import Callable


def until(
    condition: Callable[[], object], *, within_s: float = 30.0, every_s: float = 0.005, told: Callable[[], object] = str
) -> None:
    """told: what a failure shows."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {told()}"
        time.sleep(every_s)


async def until_async(
    condition: Callable[[], object], *, within_s: float = 20.0, every_s: float = 0.005, told: Callable[[], object] = str
) -> None:
    """The same on a loop; by itself sooner than `on_loop` gives up."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {told()}"
        await asyncio.sleep(every_s)
