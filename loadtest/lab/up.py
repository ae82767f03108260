"""The candidates that are up: each is started when it is first asked for, at most so many at once as the launcher and the
account's quotas allow.

Who is idle for longer than a start takes is stopped: to start it again costs no more than to let it wait. Who is cheapest is
asked first, where several are ready; one at a time is asked, as the load generator is one.
"""

import asyncio
import heapq
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from loadtest.lab.launchers.launcher import GENERATOR, Launcher, Quota, RunningCandidate, Unaffordable
from loadtest.question.candidates import CandidateSetup
from loadtest.search.events import UNAFFORDABLE
from loadtest.wording import usd

_LEAST_PAID_S: Final = 60.0  # the rest of the money must pay for so long beyond a usual start


class UpCandidates:
    """Life: any number of `held`, then close."""

    def __init__(self, launcher: Launcher, *, spent_usd: float = 0.0) -> None:
        """spent_usd: by an earlier search, of the same money."""
        self._launcher = launcher
        self._spent_usd = spent_usd
        self._up: dict[str, RunningCandidate] = {}  # the one that was asked last behind
        self._held: set[str] = set()
        self._taking: dict[str, Quota | None] = {}  # whoever starts, is up, or is being stopped: of the quotas
        self._changed = asyncio.Event()  # one was stopped, or is held no longer
        self._idle_since_s: dict[str, float] = {}
        self._turns = _Turns()

    def __repr__(self) -> str:
        return f"<UpCandidates {', '.join(self._up) or 'none'}>"

    def __contains__(self, candidate: CandidateSetup) -> bool:
        return candidate.name in self._up

    @asynccontextmanager
    async def held(self, candidate: CandidateSetup) -> AsyncIterator[RunningCandidate]:
        """While this lasts it is up, and none is asked besides it. Raises: StartFailed."""
        name = candidate.name
        self._held.add(name)
        try:
            running = await self._ensured(candidate)
            async with self._turns.taken(candidate.price.usd_per_hour if candidate.price is not None else 0.0):
                yield running
        finally:
            self._held.discard(name)
            self._idle_since_s[name] = time.monotonic()
            self._changed.set()

    async def close(self) -> None:
        """Stop all of them, at the same time."""
        await asyncio.gather(*(self._stop(name) for name in list(self._up)))

    async def _ensured(self, candidate: CandidateSetup) -> RunningCandidate:
        name = candidate.name
        running = self._up.get(name)
        if running is not None and not running.failure():
            self._up[name] = self._up.pop(name)
            await self._stop_idle()
            return running
        if running is not None:
            await self._stop(name)
        await self._stop_idle()
        quota = self._launcher.quota(candidate)
        while (crowd := self._crowd(name, quota)) is not None:
            idle = next((other for other in self._up if other in crowd and other not in self._held), None)
            if idle is not None:
                await self._stop(idle)
            else:
                self._changed.clear()
                await self._changed.wait()
        self._check_money(candidate)
        self._taking[name] = quota
        try:
            self._up[name] = await self._launcher.start(candidate)
        except BaseException:
            del self._taking[name]
            self._changed.set()
            raise
        return self._up[name]

    def _crowd(self, name: str, quota: Quota | None) -> set[str] | None:
        """Of whom one has to go before another can start; None, if there is room."""
        others = self._taking.keys() - {name}
        if len(others) >= self._launcher.parallel:
            return others
        if quota is None:
            return None
        shared = {other: of.takes for other in others if (of := self._taking[other]) and of.name == quota.name}
        return set(shared) if shared and sum(shared.values()) + quota.takes > quota.most else None

    def _check_money(self, candidate: CandidateSetup) -> None:
        if not self._launcher.paid:
            return
        purse = self._launcher.purse
        wanted_s = self._launcher.start_s + _LEAST_PAID_S
        per_hour = candidate.usd_per_hour + self._launcher.beside_usd_per_hour
        also = candidate.usd_per_hour if purse.runs(GENERATOR) else per_hour  # the purse counts what runs
        if purse.left_s(besides_usd=self._spent_usd, also_usd_per_hour=also) < wanted_s:
            left = usd(max(0.0, (purse.max_usd or 0.0) - self._spent_usd - purse.usd))
            raise Unaffordable(f"{UNAFFORDABLE}: {left} is left, at {usd(per_hour)}/h")

    async def _stop_idle(self) -> None:
        if not self._launcher.paid:
            return
        since_s = time.monotonic() - self._launcher.start_s
        idle = [name for name in self._up if name not in self._held and self._idle_since_s.get(name, 0.0) < since_s]
        await asyncio.gather(*map(self._stop, idle))

    async def _stop(self, name: str) -> None:
        running = self._up.pop(name)
        try:
            await running.stop()
        finally:
            del self._taking[name]
            self._changed.set()


class _Turns:
    """One at a time; of those who wait, the least first."""

    def __init__(self) -> None:
        self._taken = False
        self._count = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def taken(self, rank: float) -> AsyncIterator[None]:
        if self._taken:
            turn = asyncio.get_running_loop().create_future()
            self._count += 1
            heapq.heappush(self._waiting, (rank, self._count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._taken = False
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._taken = True  # handed over, so that nobody comes between
                turn.set_result(None)
                return
