"""The ingresses that send batches to a replica, and which of its sessions are leased to each."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import Final

from gateway.batching.leases import Leases
from gateway.clock import LoopClock, Timer
from gateway.cluster.channel import Standing, Tell, Tenant
from gateway.cluster.link import ATTEND_S

# An ingress that does not come back to `attend` no longer has a share after this.
_FORGET_S: Final = 3.0


class Attendance:
    """On the replica's event loop. leases: who may send how much."""

    def __init__(
        self, horizon_ns: int, clock: LoopClock, *, sessions: Callable[[], tuple[int, int]], count: Callable[[int], None]
    ) -> None:
        """horizon_ns: as for `Leases`. sessions: how many are free, and how many run. count: what runs, up to a time."""
        self.leases = Leases(horizon_ns)
        self._clock = clock
        self._sessions = sessions
        self._count = count
        self._attending: dict[str, int] = {}  # ingress -> its open calls
        self._leaving: dict[str, Timer] = {}
        self._changed = asyncio.Event()
        self._tell: dict[str, Tell] = {}  # by the channel, where there is one
        self._answered: dict[str, Standing] = {}  # by a call
        self._live = 0  # sessions
        self._counts = ""  # the ingress that counts them: the first that attends
        self._dealing: Timer | None = None
        self._closed = False

    @property
    def empty(self) -> bool:
        """Whether no ingress attends."""
        return not self._attending

    def close(self) -> None:
        """Deal no more by itself."""
        self._closed = True
        if self._dealing is not None:
            self._dealing.cancel()

    # who attends

    def enter(self, ingress: str, known: int | None) -> None:
        """An ingress calls. known: how many slots one that has no channel knows of."""
        if ingress in self._leaving:
            self._leaving.pop(ingress).cancel()
        self._attending[ingress] = self._attending.get(ingress, 0) + 1
        lease = self.leases.of.get(ingress)
        if lease is None:
            lease = self.leases.enter(ingress, self._clock.now_ns())
            lease.ordered = ingress in self._tell
            self._tell_slots(ingress)
        elif known == lease.told and not lease.ordered:
            self.leases.know(ingress, lease.number)
        self.deal()

    async def news(self, ingress: str, known: int | None) -> None:
        """Return once an ingress that calls is to be told something new, has left, or a while has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTEND_S):
                while ingress in self._attending and self._knows(ingress, known):
                    await self._changed.wait()

    def answered(self, ingress: str) -> None:
        """Its call ends, and the next is to come soon."""
        if ingress in self._attending:
            self._answered[ingress] = self.standing(ingress)
            self._attending[ingress] -= 1
            if not self._attending[ingress]:
                soon_ns = self._clock.now_ns() + round(_FORGET_S * 1e9)
                self._leaving[ingress] = self._clock.call_at(soon_ns, functools.partial(self.forget, ingress))

    def leave(self, ingress: str) -> None:
        """Its call has broken off."""
        if ingress in self._attending:
            self._attending[ingress] -= 1
            if not self._attending[ingress]:
                self.forget(ingress)

    def forget(self, ingress: str) -> None:
        """It attends no more."""
        timer = self._leaving.pop(ingress, None)
        if timer is not None:
            timer.cancel()
        self._attending.pop(ingress, None)
        self._answered.pop(ingress, None)
        self.leases.leave(ingress)
        if ingress in self._tell:
            self._tell[ingress](0, 0, Standing(self._live > 0, 0))
        self.deal()

    def let_in(self, ingress: str, tell: Tell) -> Tenant:
        """An ingress has opened a channel: from now on it is told its slots there."""
        self._tell[ingress] = tell

        def known(number: int) -> None:
            self.leases.know(ingress, number)
            self.deal()

        def gone() -> None:
            if self._tell.get(ingress) is tell:
                del self._tell[ingress]
                if ingress in self.leases.of:
                    self.leases.of[ingress].ordered = False

        if ingress in self.leases.of:
            self.leases.of[ingress].ordered = True
            self._tell_slots(ingress)
        return Tenant(functools.partial(self.wanted, ingress), known, gone)

    # what they may send

    def slots(self, ingress: str) -> int:
        """That it was told."""
        lease = self.leases.of.get(ingress)
        return lease.told if lease else 0

    def standing(self, ingress: str) -> Standing:
        """What else it is to know."""
        return Standing(self._live > 0, self._live if ingress == self._counts else 0)

    def wanted(self, ingress: str, batches: float) -> None:
        """So many batches wait there; below 1: at least so many, as the last batch may have told of more."""
        lease = self.leases.of.get(ingress)
        if lease is not None:
            lease.wants = max(lease.wants, batches) if batches < 1 else batches
            self.deal()

    def deal(self) -> None:
        """Lease the live sessions to the ingresses, and tell those for whom that changes something."""
        now_ns = self._clock.now_ns()
        if self.leases.count_due(now_ns):
            self._count(now_ns)
            self.leases.count(now_ns)
        free, busy = self._sessions()
        changed, again_ns = self.leases.deal(free + busy, busy, now_ns)
        counts = next(iter(self.leases.of), "")
        if (free + busy, counts) != (self._live, self._counts):
            self._live, self._counts = free + busy, counts
            changed = list(self.leases.of)
        for ingress in changed:
            self._tell_slots(ingress)
        if changed:
            self._changed.set()
            self._changed = asyncio.Event()
        if self._dealing is not None:
            self._dealing.cancel()
        self._dealing = self._clock.call_at(again_ns, self.deal) if again_ns is not None and not self._closed else None

    def _tell_slots(self, ingress: str) -> None:
        if ingress in self._tell:
            lease = self.leases.of[ingress]
            self._tell[ingress](lease.told, lease.number, self.standing(ingress))

    def _knows(self, ingress: str, known: int | None) -> bool:
        """Whether it was told by its channel, or by a call, what there is to tell."""
        if known is None:
            return False
        answered = self._answered.get(ingress)
        return ingress in self._tell or (known, answered) == (self.leases.of[ingress].told, self.standing(ingress))
