"""Batches that run on the event loop itself, since they are shorter than their way to a thread and back (`nearness`).

The loop has its turn for all else after each millisecond of them, whatever their models are.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.clock import Clock

TURN_NS: Final = 1_000_000


class LoopRuns:
    """The runs of one event loop, in the order of their starts. One for all pools of the loop; on its thread.

    Lanes look at what has come through this as well: so what they start runs in the same turn of the loop, without a look at
    its sockets in between, and lanes to which requests came in one turn take one of its calls together.

    beside: batches that run on threads of this process now.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._soon: deque[Callable[[], None]] = deque()
        self._waiting: deque[Callable[[], None]] = deque()
        self.beside = 0
        self._due = False

    def __repr__(self) -> str:
        return f"<LoopRuns: {len(self._waiting)} waiting>"

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call it in the next turn, as the loop's own does: before the runs, which it may start."""
        self._soon.append(callback)
        if not self._due:
            self._expect_turn()

    def put(self, run: Callable[[], None]) -> None:
        """Call it soon, never from within this. What it puts in turn comes behind what waits."""
        self._waiting.append(run)
        if not self._due:
            self._expect_turn()

    def _expect_turn(self) -> None:
        self._loop.call_soon(self._turn)
        self._due = True

    def _turn(self) -> None:
        soon, waiting = self._soon, self._waiting
        try:
            # What is put meanwhile waits for the next turn: short batches that follow each other would hold this one for ever.
            for _ in range(len(soon)):
                soon.popleft()()
            until_ns = self._clock.now_ns() + TURN_NS
            for _ in range(len(waiting)):
                waiting.popleft()()
                if waiting and self._clock.now_ns() >= until_ns:
                    break
        finally:
            self._due = False
            if soon or waiting:
                self._expect_turn()
