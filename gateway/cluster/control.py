"""How a client's load or unload of a model reaches every ingress replica.

A small actor holds the wanted state and a version that grows with every change, and over restarts. Each ingress replica keeps
one call `follow` open to it, applies what that returns and reports. `publish` returns when all that follow have reported. A
backend's replica asks it as it starts. The actor is detached and named after the application, since it must outlive any one
ingress, and an upgrade; it ends by itself when nobody has followed for a while. One that was lost and made anew is reminded by
those that follow.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_NAMESPACE

from gateway.errors import BackendFailed, BackendUnreachable, GatewayError

# A call to follow returns at least this often, so that an ingress that was killed is noticed.
_FOLLOW_S: Final = 5.0
_GONE_AFTER_S: Final = 2.0
_END_AFTER_S: Final = 60.0
# An ingress asks as it starts, and follows once it has loaded its models.
_LOADED_AFTER_S: Final = 600.0
_ASKED_S: Final = 5.0
_RETRY_S: Final = 0.5
_REPORTS_KEPT: Final = 64

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Follower:
    """One ingress replica. following: open calls of `follow`. reports: version -> error by model, of those that failed."""

    following: int = 0
    seen_s: float = 0.0
    reports: dict[int, dict[str, str]] = field(default_factory=dict)

    def report_on(self, model: str, version: int) -> str | None:
        """None: there is none yet; empty: it went well. A report may be on several versions up to its own."""
        return next((self.reports[reported].get(model, "") for reported in sorted(self.reports) if reported >= version), None)

    def gone(self, now_s: float) -> bool:
        return not self.following and now_s - self.seen_s > _GONE_AFTER_S


@dataclass(slots=True, eq=False)
class _Wish:
    """What a model is to be. version: of the change. failed: None, while it is under way. before: what clients wished then."""

    version: int
    loaded: bool
    failed: bool | None = None
    before: "_Wish | None" = None

    @property
    def load(self) -> int:
        """The number of the load that clients want; 0: they want the model unloaded."""
        return self.version if self.loaded else 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class ControlState:
    """The actor's class. Its calls run on one event loop."""

    def __init__(self, now_ms: Callable[[], int] = _now_ms) -> None:
        """now_ms: of a clock that the processes before this one had: replicas know their versions."""
        self._now_ms = now_ms
        self._version = 0
        self._wanted: dict[str, _Wish] = {}  # by model
        self._followers: dict[str, _Follower] = {}
        self._needed_until_s = 0.0
        self._ends = False
        self._changed = asyncio.Event()

    async def asked(self) -> tuple[int, dict[str, int]]:
        """The version there is, and what clients have asked for up to it, as `_Wish.load`."""
        self._needed_until_s = time.monotonic() + _LOADED_AFTER_S
        return self._version, {model: wish.load for model, wish in self._wanted.items()}

    async def join(self, ingress: str, seen: int = 0, models: Collection[str] | None = None) -> None:
        """Count an ingress replica among those that follow, as it will at once.

        seen: the version that it has begun with. models: that it has; what was asked for others is forgotten. None: any.
        """
        if models is not None:
            self._wanted = {model: wish for model, wish in self._wanted.items() if model in models}
        now_s = time.monotonic()
        # One that has only stood still comes back with all that it has reported.
        self._followers = {each: at for each, at in self._followers.items() if not at.gone(now_s - _LOADED_AFTER_S)}
        self._seen(ingress)
        if 0 < seen <= self._version:  # else this actor was restarted
            await self.report(ingress, seen, {})

    async def follow(self, ingress: str, seen: int) -> tuple[int, dict[str, int]]:
        """Wait for a version past `seen`, or a while; then that version, and of the models that changed since `_Wish.load`."""
        follower = self._followers.setdefault(ingress, _Follower())
        follower.following += 1
        if seen > self._version:
            seen = 0  # this actor was restarted and has forgotten
        try:
            if seen == self._version:
                await self._change(_FOLLOW_S)
        finally:
            follower.following -= 1
            self._needed_until_s = max(self._needed_until_s, self._seen(ingress).seen_s + _END_AFTER_S)
        return self._version, {model: wish.load for model, wish in self._wanted.items() if wish.version > seen}

    async def report(self, ingress: str, version: int, errors: dict[str, str]) -> None:
        """Say that everything up to `version` is applied. errors: by model, of those where it went wrong."""
        reports = self._seen(ingress).reports
        reports[version] = errors
        for old in sorted(reports)[:-_REPORTS_KEPT]:
            del reports[old]
        self._tell()

    async def remind(self, ingress: str, seen: int, asked: dict[str, int]) -> tuple[int, dict[str, int]]:
        """Know again, as this actor was made anew, what clients have asked for, as far as one that follows has it.

        seen, asked: as `follow` gave it. Returns the version there is then, and what it has otherwise: as `follow`.
        """
        self._seen(ingress).reports.setdefault(seen, {})
        if seen > self._version:  # of a clock that was ahead of this one: replicas know that number
            self._version = seen + 1
            for wish in self._wanted.values():
                if wish.failed is None:
                    wish.version = self._version
        missing = asked.keys() - self._wanted.keys()
        self._wanted |= {model: _Wish(asked[model] or self._version, asked[model] > 0, failed=False) for model in missing}
        self._tell()
        return self._version, {model: wish.load for model, wish in self._wanted.items() if asked.get(model) != wish.load}

    async def publish(self, ingress: str, model: str, loaded: bool) -> list[str]:
        """Change the wanted state, wait until every follower has reported on it, and return their errors.

        Joins the last change of the model if that is to the same state and not reported on by all. Who starts later begins with
        the last change that did not fail.
        """
        known = ingress in self._followers
        others_s = 0.0 if known else time.monotonic() + _FOLLOW_S  # this actor was made anew, and the others will come as well
        wish = self._wanted.get(model)
        if not known or wish is None or wish.loaded != loaded or self._errors(model, wish) is not None:
            self._count_on()
            wish = self._wanted[model] = _Wish(self._version, loaded, before=wish)
            self._tell()
        asks = self._seen(ingress)
        self._needed_until_s = max(self._needed_until_s, asks.seen_s + _END_AFTER_S)
        asks.seen_s = max(asks.seen_s, others_s)  # it is there, though it may not have found this actor yet
        while (errors := self._errors(model, wish)) is None or time.monotonic() < others_s:
            await self._change(_GONE_AFTER_S)
            if await self.unfollowed():  # who asked was killed, and none has come in its place
                break
        self._end(model, wish, failed=loaded and bool(errors))
        return errors or []

    def _errors(self, model: str, wish: _Wish) -> list[str] | None:
        """What went wrong where it was applied; None while a follower has not reported, or there is none."""
        now_s = time.monotonic()
        reports = [each.report_on(model, wish.version) for each in self._followers.values() if not each.gone(now_s)]
        return None if None in reports or not reports else [error for error in reports if error]

    def _end(self, model: str, wish: _Wish, *, failed: bool) -> None:
        wish.failed = failed
        if not failed:
            wish.before = None
        elif self._wanted.get(model) is wish:
            before = wish.before
            while before is not None and before.failed:
                before = before.before
            if before is None:
                del self._wanted[model]
            else:
                self._wanted[model] = before

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

    def _count_on(self) -> None:
        self._version = max(self._version + 1, self._now_ms())

    async def _change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

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
    """What clients have asked for. version: of the last change of any model. unloaded: they want this one unloaded."""

    version: int = 0
    unloaded: bool = False


async def asked_for(application: str, model: str) -> ClientsWish:
    """As far as it is known."""
    try:
        async with asyncio.timeout(_ASKED_S):
            version, wanted = await ray.get_actor(control_name(application), namespace=SERVE_NAMESPACE).asked.remote()
    except (ValueError, RayError, TimeoutError):  # there is none, or it is lost, or frozen
        return ClientsWish()
    return ClientsWish(version, not wanted.get(model, True))


class SharedControl:
    """A `RepositoryControl` over the actor, in one ingress replica. Life: asked -> follow -> publish … -> close."""

    def __init__(self, name: str, *, runtime_env: dict[str, Any]) -> None:
        """name: of the actor, the same in every ingress replica of an application, whatever configuration it has."""
        self._name = name
        self._runtime_env = runtime_env
        self._ingress = uuid.uuid4().hex
        self._seen = 0  # the version that it has begun with
        self._asked: dict[str, int] = {}  # by clients, as far as is known here: as `follow` of the actor gives it
        self._applied: dict[str, int] = {}  # of that, the last for each model that did not fail
        self._models: frozenset[str] = frozenset()
        self._following: asyncio.Task[None] | None = None
        self._applying: asyncio.Task[None] | None = None

    async def asked(self) -> dict[str, bool]:
        """Whether models are to be loaded, as clients have asked before: begin with that, it is not applied by `follow`."""
        with contextlib.suppress(RayError):  # the actor is lost, and will be looked for
            self._seen, self._asked = await self._actor().asked.remote()
        return {model: load > 0 for model, load in self._asked.items()}

    async def follow(self, apply: Callable[[str, bool], Awaitable[None]], models: Collection[str]) -> None:
        """Apply what clients ask for since `asked`; whoever publishes once this has returned waits for it.

        apply: `Repository.apply`. models: that this ingress has; during an upgrade, clients may ask others for more.
        """
        self._models = frozenset(models)
        self._asked = {model: load for model, load in self._asked.items() if model in self._models}
        self._applied = dict(self._asked)
        with contextlib.suppress(RayError):  # as in `asked`
            await self._actor().join.remote(self._ingress, self._seen, self._models)
        self._following = asyncio.get_running_loop().create_task(self._follow(apply))

    def load_of(self, model: str) -> int:
        """The number of the last load by a client, the same in all ingresses; 0: there was none."""
        return self._asked.get(model, 0)

    async def publish(self, name: str, loaded: bool) -> None:
        try:
            errors = await self._actor().publish.remote(self._ingress, name, loaded)
        except RayError as exc:
            raise BackendUnreachable(f"repository control {self._name}: {exc}", retry_after_s=1.0) from exc
        if errors:
            raise BackendFailed(errors[0])

    async def close(self) -> None:
        for task in (self._following, self._applying):
            if task is not None:
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

    async def _follow(self, apply: Callable[[str, bool], Awaitable[None]]) -> None:
        seen = self._seen
        actor = None
        lost = False
        while True:
            try:
                if actor is None:
                    actor = self._actor()
                    actor.end_when_unfollowed.remote()
                if lost:
                    version, changes = await actor.remind.remote(self._ingress, seen, self._asked)
                else:
                    version, changes = await actor.follow.remote(self._ingress, seen)
            except RayError as exc:
                log.warning("repository control %s is lost, looking for it again: %s", self._name, exc)
                actor = None
                lost = True
                await asyncio.sleep(_RETRY_S)
                continue
            if lost or version != seen:
                lost = False
                seen = version
                changes = {model: load for model, load in changes.items() if model in self._models}
                self._asked |= changes
                # Beside following: whoever does not follow while it loads a large model would count as gone.
                self._applying = asyncio.create_task(self._apply(self._applying, actor, version, changes, apply))

    async def _apply(
        self,
        before: "asyncio.Task[None] | None",
        actor: Any,  # as _actor
        version: int,
        changes: dict[str, int],
        apply: Callable[[str, bool], Awaitable[None]],
    ) -> None:
        if before is not None:
            await before
        errors: dict[str, str] = {}
        for model, load in changes.items():
            try:
                await apply(model, load > 0)
            except GatewayError as exc:
                errors[model] = exc.message
            except Exception:  # a fault of ours: without a report, whoever published would wait for good
                log.exception("model %s could not be brought to the published state", model)
                errors[model] = "internal error"
            if not load or model not in errors:
                self._applied[model] = load
            elif self._asked.get(model) == load:  # as the actor does, which may be lost
                if model in self._applied:
                    self._asked[model] = self._applied[model]
                else:
                    del self._asked[model]
        with contextlib.suppress(RayError):  # nobody waits for the report any more
            await actor.report.remote(self._ingress, version, errors)
