"""Connections that are ended in order, so that their clients open new ones, which may come to another process.

A connection stays with the process that accepted it. The kernel spreads new ones over all that share a port, by chance and not
by load, and one that starts later gets none of those that are open. So a process that has more than its share of the node's
connections ends what is above the share: an answer says `Connection: close`, or a GOAWAY goes out; whatever is in flight is
answered. Those that come back are spread by chance again, and after some looks no process has a tenth more than its share.

Counted are connections that ask something: idle ones cost nothing where they are. Each process tells the others its number in a
file. Apart from that, a connection is ended once it has the age that it drew, where the configuration bounds the age: behind a
load balancer, that spreads clients over nodes.
"""

import asyncio
import logging
import random
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol

from gateway.engine.metric_files import NodeFiles
from gateway.engine.metrics import in_slices

LOOK_S: Final = 2.0
_KIND: Final = "connections"
_UNEVEN: Final = 0.1  # of the share
_YOUNGEST: Final = 0.5  # of the greatest age

log = logging.getLogger(__name__)


class Recycled(Protocol):
    """As a listener has it."""

    def asked(self, since_s: float) -> bool:
        """Whether anything was asked since then, by the monotonic clock, or is being answered."""

    def leave(self) -> None:
        """Ask the client to open another; what is in flight is answered. Called once."""


class Listener(Protocol):
    """What has connections."""

    @property
    def open_connections(self) -> Collection[Recycled]: ...


def surplus(own: int, others: Sequence[int]) -> int:
    """How many connections a process is to end. own, others: how many there are, here and in each of the other processes.

    None that is a tenth of its share, or less than one.
    """
    share = (own + sum(others)) / (1 + len(others))
    over = own - share
    return int(over) if over > _UNEVEN * share else 0


class Recycler:
    """Of one process. On the event loop."""

    def __init__(
        self, listeners: Mapping[str, Listener], *, age_s: float, files: NodeFiles | None, drawn: random.Random | None = None
    ) -> None:
        """listeners: by protocol. age_s: 0: they may grow old. files: of the processes that share the ports; None: there are
        none."""
        self._listeners = listeners
        self._age_s = age_s
        self._files = files
        self._drawn = drawn or random.Random()
        self._left: dict[str, set[Recycled]] = {name: set() for name in listeners}
        self._due_s: dict[str, dict[Recycled, float]] = {name: {} for name in listeners}
        self._looked_s = time.monotonic()

    async def keep_looking(self, every_s: float = LOOK_S) -> None:
        """Until it is cancelled."""
        try:
            while True:
                await asyncio.sleep(every_s)
                try:
                    await self._look()
                except Exception:
                    log.exception("connections stay where they are")
        finally:
            if self._files is not None:
                self._files.close()

    async def _look(self) -> None:
        now_s, since_s = time.monotonic(), self._looked_s
        self._looked_s = now_s
        busy: dict[str, list[Recycled]] = {}
        for name, listener in self._listeners.items():
            there = listener.open_connections
            left = self._left[name]
            left &= set(there) if left else left
            if self._age_s:
                self._end_old(name, there, now_s)
            if self._files is not None:
                busy[name] = [each for each in there if each not in left and each.asked(since_s)]
        if self._files is not None:
            await in_slices(self._files.publish([(_KIND, (name,), (len(each),)) for name, each in busy.items()]))
            told = [published.blocks for published in await in_slices(self._files.others()) if published.lives]
            for name, here in busy.items():
                others = [
                    int(state[0]) for blocks in told for kind, labels, state in blocks if (kind, labels) == (_KIND, (name,))
                ]
                self._end(name, self._drawn.sample(here, surplus(len(here), others)))

    def _end_old(self, name: str, there: Iterable[Recycled], now_s: float) -> None:
        known = self._due_s[name]
        draw, age_s = self._drawn.uniform, self._age_s
        found = {each: known.get(each) or now_s + draw(_YOUNGEST, 1.0) * age_s - LOOK_S for each in there}
        self._due_s[name] = found
        self._end(name, [each for each, due_s in found.items() if due_s <= now_s])

    def _end(self, name: str, wanted: Iterable[Recycled]) -> None:
        left = self._left[name]
        for each in wanted:
            if each not in left:
                left.add(each)
                each.leave()
