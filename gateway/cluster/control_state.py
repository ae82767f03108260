"""The actor that numbers the loads and unloads that clients ask for: see `control`."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import ray

# A call to follow returns at least this often, so that an ingress that was killed is noticed.
_FOLLOW_S: Final = 5.0
_GONE_AFTER_S: Final = 2.0
_END_AFTER_S: Final = 60.0
# An ingress asks as it starts, and follows once it has loaded its models.
_LOADED_AFTER_S: Final = 600.0
MOST_UNDER_WAY: Final = 16  # changes of a model: clients that load and unload it in turn could ask for ever more


class ModelChange(NamedTuple):
    """A load or an unload. number: it grows with every change, also over restarts. loaded: as for `Repository.apply`."""

    number: int
    model: str
    loaded: bool | None


@dataclass(slots=True, eq=False)
class _Follower:
    """One ingress replica. following: open calls of `follow`. begun: the number up to which it has applied all changes but
    `applying`, or had no need to. reports: number -> error, empty for success.
    """

    following: int = 0
    seen_s: float = 0.0
    begun: int = 0
    applying: set[int] = field(default_factory=set)
    reports: dict[int, str] = field(default_factory=dict)

    def report_on(self, number: int) -> str | None:
        """None: there is none yet."""
        return self.reports.get(number, "" if number <= self.begun and number not in self.applying else None)

    def gone(self, now_s: float) -> bool:
        return not self.following and now_s - self.seen_s > _GONE_AFTER_S


@dataclass(slots=True, eq=False)
class _Asked:
    """A change, and the errors that it met where it was applied; None: it is under way."""

    change: ModelChange
    errors: list[str] | None = None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class ControlState:
    """The actor's class. Its calls run on one event loop."""

    def __init__(self, now_ms: Callable[[], int] = _now_ms) -> None:
        """now_ms: of a clock that the processes before this one had: replicas know their numbers."""
        self._now_ms = now_ms
        self._newest = 0  # the number of the last change
        self._asked: list[_Asked] = []  # in order: of each model the last that was settled, and all that are under way
        self._followers: dict[str, _Follower] = {}
        self._waited: dict[str, dict[int, _Asked]] = {}  # ingress -> its tokens
        self._reminded_s: float | None = None  # until when others may come that followed the actor before this one
        self._needed_until_s = 0.0
        self._ends = False
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()

    async def asked(self) -> tuple[int, list[ModelChange]]:
        """What an ingress replica begins with: a number, and what is settled. `follow` gives what is under way: it may fail."""
        self._needed_until_s = time.monotonic() + _LOADED_AFTER_S
        open_ = [asked.change.number for asked in self._asked if asked.errors is None]
        return min(open_, default=self._newest + 1) - 1, [asked.change for asked in self._asked if asked.errors is not None]

    async def newest(self, model: str) -> tuple[int, bool]:
        """The number of the last change of any model, and whether the last of this one is an unload: as `ClientsWish`."""
        self._needed_until_s = time.monotonic() + _LOADED_AFTER_S
        loaded = [asked.change.loaded for asked in self._asked if asked.change.model == model]
        return self._newest, loaded[-1:] == [False]

    async def join(self, ingress: str, begun: int = 0, models: Collection[str] | None = None) -> None:
        """Count an ingress replica among those that follow, as it will at once.

        begun: the number that it has begun with. models: that it has; what was settled of others is forgotten. None: any.
        """
        if models is not None:
            self._asked = [asked for asked in self._asked if asked.errors is None or asked.change.model in models]
        now_s = time.monotonic()
        # One that has only stood still comes back with all that it has reported.
        self._followers = {each: at for each, at in self._followers.items() if not at.gone(now_s - _LOADED_AFTER_S)}
        self._waited = {each: waited for each, waited in self._waited.items() if each in self._followers}
        if begun <= self._newest:  # else this actor was made anew, and will be reminded
            self._seen(ingress).begun = begun
            self._settle()

    async def follow(self, ingress: str, seen: int) -> tuple[int, list[ModelChange]] | None:
        """Wait for changes past `seen`, or a while; then the number of the last, and those. None: it is to remind first."""
        follower = self._followers.get(ingress)
        if follower is None:
            return None
        follower.following += 1
        try:
            if seen == self._newest:
                await self._change(_FOLLOW_S)
        finally:
            follower.following -= 1
            self._needed_until_s = max(self._needed_until_s, self._seen(ingress).seen_s + _END_AFTER_S)
            self._settle()
        return self._newest, [asked.change for asked in self._asked if asked.change.number > seen]

    async def report(self, ingress: str, number: int, error: str) -> bool:
        """Say that a change was applied. error: empty, or what went wrong. Gives False where it is to remind first."""
        if ingress not in self._followers:
            return False
        follower = self._seen(ingress)
        follower.reports[number] = error
        follower.applying.discard(number)
        self._settle()
        return True

    async def remind(
        self, ingress: str, seen: int, settled: Collection[ModelChange], applying: Collection[ModelChange]
    ) -> tuple[int, list[ModelChange]]:
        """Know again, as this actor was made anew, what clients have asked for, as far as one that follows has it.

        seen: as `follow` gave it. settled: the last change of each model that it has applied. Returns as `follow`, what it does
        not have.
        """
        self._expect_others()
        before, self._newest = self._newest, max(self._newest, seen)
        under_way = {change.number for change in applying}
        has = {change.number: change for change in (*settled, *applying)}
        known = {asked.change.number for asked in self._asked}
        past = {asked.change.model: asked.change.number for asked in self._asked if asked.errors is not None}
        missing = [has[number] for number in sorted(has.keys() - known) if number > past.get(has[number].model, 0)]
        begun = min((at.begun for name, at in self._followers.items() if name != ingress), default=before)
        late = [change for change in missing if change.number in under_way and begun < change.number < before]
        self._asked += [_Asked(change, None if change.number in under_way else []) for change in missing if change not in late]
        self._asked.sort(key=lambda asked: asked.change.number)
        # To others later ones were given, and these never would be.
        for number, model, loaded in {change.model: change for change in late}.values():
            if all(asked.change.model != model or asked.change.number < number for asked in self._asked):
                self._ask(model, loaded)
        self._keep_last()
        newest = {has[number].model: number for number in sorted(has)}
        lacks = [asked.change for asked in self._asked if asked.change.number > newest.get(asked.change.model, 0)]
        follower = self._seen(ingress)
        follower.begun, follower.applying = seen, under_way | {change.number for change in lacks}
        self._settle()
        return self._newest, lacks

    async def ask(self, ingress: str, token: int, model: str, loaded: bool) -> bool:
        """Ask for a change, or join the last of the model if that is to the same state and under way; `ended` tells its end by
        this token. False: too many of the model are under way.
        """
        if ingress in self._followers:
            self._seen(ingress)
        else:
            self._expect_others()
        self._needed_until_s = max(self._needed_until_s, time.monotonic() + _END_AFTER_S)
        async with self._turn:  # else those that wait would go on in any order
            while self._reminded_s is not None and (left_s := self._reminded_s - time.monotonic()) > 0:
                await self._change(left_s)
        self._settle()
        of_model = [asked for asked in self._asked if asked.change.model == model]
        asked = of_model[-1] if of_model else None
        if asked is None or asked.errors is not None or asked.change.loaded != loaded:
            if sum(each.errors is None for each in of_model) >= MOST_UNDER_WAY:
                return False
            asked = self._ask(model, loaded)
        self._waited.setdefault(ingress, {})[token] = asked
        return True

    async def ended(self, ingress: str, tokens: Collection[int]) -> dict[int, list[str] | None]:
        """Wait until something that an ingress has asked for has ended; then the errors of all that has, by token.

        tokens: those that were answered. None: the actor was made anew, and does not know it.
        """
        waited = self._waited.setdefault(ingress, {})
        while True:
            ended = {token: asked.errors for token, asked in waited.items() if asked.errors is not None}
            told: dict[int, list[str] | None] = {**ended, **dict.fromkeys(token for token in tokens if token not in waited)}
            if not told and await self.unfollowed():  # who asked was killed, and none has come in its place
                told = {token: ["there is no ingress"] for token in waited}
            if told:
                for token in told:
                    waited.pop(token, None)
                return told
            if not await self._change(_GONE_AFTER_S):  # else who told has settled
                self._settle()

    def _ask(self, model: str, loaded: bool | None) -> _Asked:
        self._newest = max(self._newest + 1, self._now_ms())
        asked = _Asked(ModelChange(self._newest, model, loaded))
        self._asked.append(asked)
        self._tell()
        return asked

    def _settle(self) -> None:
        """End the changes on which all that follow have reported."""
        now_s = time.monotonic()
        for asked in [asked for asked in self._asked if asked.errors is None]:
            _, model, loaded = asked.change
            reports = [
                report
                for follower in self._followers.values()
                if (report := follower.report_on(asked.change.number)) is not None or not follower.gone(now_s)
            ]
            if None in reports or not reports:
                continue
            asked.errors = [error for error in reports if error]
            self._tell()
            if loaded and asked.errors:
                self._asked.remove(asked)
                before = [None, *(each.change.loaded for each in self._asked if each.change.model == model)][-1]
                if not before:
                    self._ask(model, before)  # also where it failed: other versions may be loaded
        self._keep_last()
        under_way = {asked.change.number for asked in self._asked if asked.errors is None}
        for follower in self._followers.values():
            for number in [each for each in follower.reports if each not in under_way and each <= self._newest]:
                del follower.reports[number]

    def _keep_last(self) -> None:
        """Forget what was settled before another change of the same model was."""
        last = {asked.change.model: asked for asked in self._asked if asked.errors is not None}
        self._asked = [asked for asked in self._asked if asked.errors is None or asked is last[asked.change.model]]

    def _expect_others(self) -> None:
        """This actor was made anew, and the others that followed the one before will come as well."""
        if self._reminded_s is None:
            self._reminded_s = time.monotonic() + _FOLLOW_S

    def _seen(self, ingress: str) -> _Follower:
        follower = self._followers.setdefault(ingress, _Follower())
        follower.seen_s = max(follower.seen_s, time.monotonic())
        return follower

    async def unfollowed(self) -> bool:
        """Whether nobody follows any more, nor is about to."""
        now_s = time.monotonic()
        return now_s > self._needed_until_s and all(follower.gone(now_s) for follower in self._followers.values())

    async def end_when_unfollowed(self) -> None:
        """The actor ends then: it does not return, but to those that call while another one waits for that.

        Its end waits for all calls, and lets those that come meanwhile hang: a second that waits would make that a minute.
        """
        if self._ends:
            return
        self._ends = True
        while True:
            await asyncio.sleep(_END_AFTER_S)
            if await self.unfollowed():
                ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # ray's

    async def _change(self, timeout_s: float) -> bool:
        """Whether there was one."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._changed.wait(), timeout_s)
        return False

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
