"""How a client's load or unload of a model reaches every ingress replica.

A small actor numbers the changes that clients ask for, and keeps for each model the last that was settled and those that are
under way. Each ingress replica keeps one call `follow` open to it, applies each change that this returns, in order, and reports
on it. A change is settled when all that follow have reported: then `ended` tells who asked. A load that failed is dropped, and
undone in all: by an unload where one was settled before it; where nothing was, by what each ingress loads at start itself.
An ingress begins with what is settled, and a backend's replica asks the actor as it starts. The actor is detached and named
after the application, since it must outlive any one ingress, and an upgrade; it ends by itself when nobody has followed for a
while. One that was lost and made anew is reminded by those that follow.
"""

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, NamedTuple

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_NAMESPACE

from gateway.cluster.control_state import MOST_UNDER_WAY, ControlState, ModelChange
from gateway.errors import BackendFailed, BackendUnreachable, GatewayError, NotReady

_ASKED_S: Final = 5.0
_RETRY_S: Final = 0.5

_LOST: Final = (RayError, ValueError)  # the latter where it ends just as it is looked for

log = logging.getLogger(__name__)


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
        return {model: change.loaded for model, change in self._settled.items() if change.loaded is not None}

    async def follow(self, apply: Callable[[str, bool | None], Awaitable[None]], models: Collection[str]) -> None:
        """Apply what clients ask for since `asked`; whoever publishes once this has returned waits for it.

        apply: `Repository.apply`. models: that this ingress has; during an upgrade, clients may ask others for more.
        """
        self._models = frozenset(models)
        self._settled = {model: change for model, change in self._settled.items() if model in self._models}
        with contextlib.suppress(*_LOST, TimeoutError):  # as in `asked`
            async with asyncio.timeout(_ASKED_S):
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
            told = f"model '{name}': {MOST_UNDER_WAY} loads and unloads of it are under way, which is the most"
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

    async def _apply(self, apply: Callable[[str, bool | None], Awaitable[None]]) -> None:
        while True:
            await self._comes.wait()
            self._comes.clear()
            while self._applying:
                change = self._applying[0]
                known = change.model in self._models and change not in self._settled.values()  # it has begun with some
                error = await self._error(change, apply) if known else ""
                if known and not (change.loaded and error):
                    self._settled[change.model] = change
                await self._report(change.number, error)
                del self._applying[0]  # only now: an actor made anew is to be reminded of it, to know how it ended

    async def _error(self, change: ModelChange, apply: Callable[[str, bool | None], Awaitable[None]]) -> str:
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
