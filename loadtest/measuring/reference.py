"""How fast is this core right now? A small piece of work that never changes, timed where the candidate runs.

A machine whose neighbours change gives the same server 10 to 30 % more or less from one minute to the next. The time of this
kernel before and after a measurement tells how much of a difference is the machine's. It is a matrix product, as most of a
model is. It runs on one thread of a process of its own: that can be pinned, and no library's threads are in it.

    python -m loadtest.measuring.reference        one line of core numbers in (such as "0,1"), one line of milliseconds out
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Final

from loadtest.measuring import children

_SIZE: Final = 256
_ROUNDS: Final = 32  # of one timing: about 10 ms
_TIMINGS: Final = 9
_ANSWER_S: Final = 10.0


class ReferenceKernel:
    """Life: any number of `time_ms`, then close. Its process starts with the first."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def time_ms(self, cpus: Sequence[int]) -> float:
        """The median time of the kernel, on the first of these cores (none: on any); 0 if it cannot be had."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._ask(",".join(map(str, cpus[:1])))
        except (OSError, ValueError):
            await self.close()
            return 0.0

    async def _ask(self, cpus: str) -> float:
        if self._process is None:
            one_thread = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            self._process = await children.begin(
                sys.executable, "-m", "loadtest.measuring.reference", env=os.environ | one_thread
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(cpus.encode() + b"\n")
        return float(await self._process.stdout.readline())

    async def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await children.end(process)


def main() -> None:
    import numpy as np

    everywhere = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    matrix = np.random.default_rng(0).standard_normal((_SIZE, _SIZE)).astype(np.float32)
    for line in sys.stdin:
        if everywhere:
            os.sched_setaffinity(0, {int(cpu) for cpu in line.strip().split(",")} if line.strip() else everywhere)
        took_ms = []
        for _ in range(_TIMINGS):
            began_ns = time.perf_counter_ns()
            for _ in range(_ROUNDS):
                matrix @ matrix
            took_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
        print(statistics.median(took_ms), flush=True)


if __name__ == "__main__":
    main()
