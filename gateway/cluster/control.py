"""How a client's load or unload of a model reaches every ingress replica.

A small actor numbers the changes that clients ask for, and keeps for each model the last that was settled and those that are
under way. Each ingress replica keeps one call `follow` open to it, applies each change that this returns, in order, and reports
on it. A change is settled when all that follow have reported: then `ended` tells who asked. A load that failed is dropped.
An ingress begins with what is settled, and a backend's replica asks the actor as it starts. The actor is detached and named
after the application, since it must outlive any one ingress, and an upgrade; it ends by itself when nobody has followed for a
while. One that was lost and made anew is reminded by those that follow.
"""

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_NAMESPACE

from gateway.errors import BackendFailed, BackendUnreachable, GatewayError, NotReady

# A call to follow returns at least this often, so that an ingress that was killed is noticed.
_FOLLOW_S: Final = 5.0
_GONE_AFTER_S: Final = 2.0
_END_AFTER_S: Final = 60.0
# An ingress asks as it starts, and follows once it has loaded its models.
_LOADED_AFTER_S: Final = 600.0
_ASKED_S: Final = 5.0
_RETRY_S: Final = 0.5
_MOST_UNDER_WAY: Final = 16  # changes of a model: clients that load and unload it in turn could ask for ever more

_LOST: Final = (RayError, ValueError)  # the latter where it ends just as it is looked for

log = logging.getLogger(__name__)


class ModelChange(NamedTuple):
    """A load or an unload that a client has asked for. number: it grows with every change, also over restarts."""

    number: int
    model: str
    loaded: bool


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
        return self._newest, bool(loaded) and not loaded[-1]

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
            if sum(each.errors is None for each in of_model) >= _MOST_UNDER_WAY:
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

    def _ask(self, model: str, loaded: bool) -> _Asked:
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
                before = [each.change.loaded for each in self._asked if each.change.model == model]
                if before and not before[-1] and "" in reports:
                    self._ask(model, False)  # where it went well
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


def control_name(application: str) -> str:
    """Of the actor of an application, in Serve's namespace."""
    return f"gateway:{application}"


def end_control(application: str) -> None:
    """End the actor of an application that is gone. Raises: RayError."""
    with contextlib.suppress(ValueError):  # there is none: it had one ingress
        ray.kill(ray.get_actor(control_name(application), namespace=SERVE_NAMESPACE))


class ClientsWish(NamedTuple):
    """What clients have asked for. number: of the last change of any model. unloaded: they want this one unloaded."""

    number: int = 0
    unloaded: bool = False


async def asked_for(application: str, model: str) -> ClientsWish:
    """As far as it is known."""
    try:
        async with asyncio.timeout(_ASKED_S):
            actor = ray.get_actor(control_name(application), namespace=SERVE_NAMESPACE)
            return ClientsWish(*await actor.newest.remote(model))
    except (ValueError, RayError, TimeoutError):  # there is none, or it is lost, or frozen
        return ClientsWish()


def _shutting_down() -> GatewayError:
    return NotReady("the server is shutting down", retry_after_s=1.0)


class SharedControl:
    """A `RepositoryControl` over the actor, in one ingress replica. Life: asked -> follow -> publish … -> close."""

    def __init__(self, name: str, *, runtime_env: dict[str, Any]) -> None:
        """name: of the actor, the same in every ingress replica of an application, whatever configuration it has."""
        self._name = name
        self._runtime_env = runtime_env
        self._ingress = uuid.uuid4().hex
        self._seen = 0  # the number of the last change that is known here
        self._settled: dict[str, ModelChange] = {}  # the last of each model that was applied, and did not fail if it was a load
        self._applying: list[ModelChange] = []  # in order
        self._comes = asyncio.Event()
        self._models: frozenset[str] = frozenset()
        self._tasks: list[asyncio.Task[None]] = []
        self._tokens = itertools.count()
        self._outcomes: dict[int, asyncio.Future[GatewayError | None]] = {}  # by token
        self._known: set[int] = set()  # tokens that the actor knows
        self._asks = asyncio.Event()
        self._closed = False

    async def asked(self) -> dict[str, bool]:
        """Whether models are to be loaded, as clients have asked before: begin with that, it is not applied by `follow`."""
        with contextlib.suppress(*_LOST, TimeoutError):  # the actor is lost or frozen, and will be looked for
            async with asyncio.timeout(_ASKED_S):
                self._seen, changes = await self._actor().asked.remote()
            self._settled = {change.model: change for change in changes}
        return {model: change.loaded for model, change in self._settled.items()}

    async def follow(self, apply: Callable[[str, bool], Awaitable[None]], models: Collection[str]) -> None:
        """Apply what clients ask for since `asked`; whoever publishes once this has returned waits for it.

        apply: `Repository.apply`. models: that this ingress has; during an upgrade, clients may ask others for more.
        """
        self._models = frozenset(models)
        self._settled = {model: change for model, change in self._settled.items() if model in self._models}
        with contextlib.suppress(*_LOST):  # as in `asked`
            await self._actor().join.remote(self._ingress, self._seen, self._models)
        loop = asyncio.get_running_loop()
        # Apart: whoever does not follow while it loads a large model would count as gone.
        self._tasks = [loop.create_task(each) for each in (self._follow(), self._apply(apply), self._tell_ends())]

    def load_of(self, model: str) -> int:
        """The number of the last load by a client, the same in all ingresses; 0: there was none."""
        change = next((change for change in self._applying[:1] if change.model == model), self._settled.get(model))
        return change.number if change is not None and change.loaded else 0

    async def publish(self, name: str, loaded: bool) -> None:
        if self._closed:
            raise _shutting_down()
        token = next(self._tokens)
        outcome = self._outcomes[token] = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(self._ask(token, name, loaded))
        try:
            await asyncio.wait((asking, outcome), return_when=asyncio.FIRST_COMPLETED)
            if not outcome.done():
                await asking
                self._known.add(token)
                self._asks.set()
            error = await outcome
        finally:
            asking.cancel()
            del self._outcomes[token]
        if error is not None:
            raise error

    async def _ask(self, token: int, name: str, loaded: bool) -> None:
        """At once, as changes are numbered in the order in which they are asked for, over all ingresses."""
        try:
            accepted = await self._actor().ask.remote(self._ingress, token, name, loaded)
        except _LOST as exc:
            raise self._lost(exc) from exc
        if not accepted:
            told = f"model '{name}': {_MOST_UNDER_WAY} loads and unloads of it are under way, which is the most"
            raise NotReady(told, retry_after_s=1.0)

    async def _tell_ends(self) -> None:
        """Tell clients what has become of what they asked for, by one open call: the actor runs a thousand at once at most."""
        while True:
            await self._asks.wait()
            self._asks.clear()
            while self._known:
                tokens = [*self._known]
                try:
                    ended = await self._actor().ended.remote(self._ingress, tokens)
                except Exception as exc:  # whatever it is, clients wait
                    for token in tokens:
                        self._tell(token, self._lost(exc))
                    continue
                for token, errors in ended.items():
                    known = BackendFailed(errors[0]) if errors else None
                    self._tell(token, known if errors is not None else self._lost("it was made anew"))

    def _tell(self, token: int, error: GatewayError | None) -> None:
        self._known.discard(token)
        if token in self._outcomes and not self._outcomes[token].done():
            self._outcomes[token].set_result(error)

    def _lost(self, why: object) -> GatewayError:
        return BackendUnreachable(f"repository control {self._name}: {why}", retry_after_s=1.0)

    async def close(self) -> None:
        """Tell who waits for a change that it was broken off."""
        self._closed = True
        for token in self._outcomes:
            self._tell(token, _shutting_down())
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _actor(self) -> Any:  # an actor handle has no static methods
        return (
            ray.remote(ControlState)
            .options(
                name=self._name,
                namespace=SERVE_NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                runtime_env=self._runtime_env,
            )
            .remote()
        )

    async def _follow(self) -> None:
        actor = None
        while True:
            try:
                if actor is None:
                    actor = self._actor()
                    actor.end_when_unfollowed.remote()
                told = await actor.follow.remote(self._ingress, self._seen)
                if told is None:
                    told = await actor.remind.remote(self._ingress, self._seen, [*self._settled.values()], [*self._applying])
            except _LOST as exc:
                log.warning("repository control %s is lost, looking for it again: %s", self._name, exc)
                actor = None
                await asyncio.sleep(_RETRY_S)
                continue
            self._seen, changes = told
            self._applying += changes
            self._comes.set()

    async def _apply(self, apply: Callable[[str, bool], Awaitable[None]]) -> None:
        while True:
            await self._comes.wait()
            self._comes.clear()
            while self._applying:
                change = self._applying[0]
                known = change.model in self._models and change not in self._settled.values()  # it has begun with some
                error = await self._error(change, apply) if known else ""
                if known and not (change.loaded and error):
                    self._settled[change.model] = change
                del self._applying[0]
                await self._report(change.number, error)

    async def _error(self, change: ModelChange, apply: Callable[[str, bool], Awaitable[None]]) -> str:
        try:
            await apply(change.model, change.loaded)
        except GatewayError as exc:
            return exc.message
        except Exception:  # a fault of ours: without a report, whoever published would wait for good
            log.exception("model %s could not be brought to the published state", change.model)
            return "internal error"
        return ""

    async def _report(self, number: int, error: str) -> None:
        while True:
            with contextlib.suppress(*_LOST):  # one made anew waits for it, if it was reminded of the change before
                if await self._actor().report.remote(self._ingress, number, error):
                    return
            await asyncio.sleep(_RETRY_S)
