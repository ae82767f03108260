import asyncio
import time

import pytest
import uvloop

from loadtest.load.pacer import Pacer


@pytest.mark.parametrize("spin_ns", [0, 500_000])
def test_the_callback_comes_once_and_never_early(spin_ns: int) -> None:
    async def scenario() -> list[int]:
        woken: list[int] = []
        done = asyncio.Event()

        def wake() -> None:
            woken.append(time.monotonic_ns())
            done.set()

        pacer = Pacer(asyncio.get_running_loop(), wake, spin_ns=spin_ns)
        due_ns = time.monotonic_ns() + 5_000_000
        pacer.wake_at(due_ns + 10**12)  # replaced by the next
        pacer.wake_at(due_ns)
        await asyncio.wait_for(done.wait(), 10)
        pacer.close()
        return [at - due_ns for at in woken]

    (late_ns,) = uvloop.run(scenario())
    assert late_ns >= 0


def test_a_moment_in_the_past_means_soon() -> None:
    async def scenario() -> None:
        done = asyncio.Event()
        pacer = Pacer(asyncio.get_running_loop(), done.set)
        pacer.wake_at(1)
        await asyncio.wait_for(done.wait(), 10)
        pacer.close()

    uvloop.run(scenario())
