"""The end of replicas that do not answer any more.

Serve looks at the health of those that it lists as running. One that it has taken off its lists it waits for, without looking
(see `deployments._backend`): if a model holds the interpreter for ever, or the process is frozen, it would wait in vain. An
ingress looks after those that it has used, and after those whose ingresses may have died: all that Ray knows of and Serve's
controller does not list as staying.

And the end of ingresses in whose place another of their node answers. Serve ends an old one where more run than it was asked
for: while a node is missing there are none too many, and two versions would answer for ever.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

# As long as Serve takes to replace one that it lists.
SILENT_S: Final = 15.0
_LOOK_S: Final = 5.0
_ASK_S: Final = 30.0
_SUCCEED_S: Final = 5.0

log = logging.getLogger(__name__)


def replicas_of(application: str) -> set[str]:
    """The names of the actors of an application's replicas, as Ray knows them. Blocks. Raises: RayError.

    Serve's controller does not tell of those whose deployment an upgrade has removed.
    """
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = {actor["name"] for actor in actors if actor["namespace"] == SERVE_NAMESPACE}
    return {name for name in names if name.startswith(_prefix(application))}


def end_silent(replicas: Collection[str], within_s: float) -> set[str]:
    """Kill those whose event loop does not answer within a time; returns the others that there are, as soon as all answer.

    replicas: names of their actors. Blocks. Raises: RayError.
    """
    asked: dict[Any, str] = {}
    for replica in replicas:
        with contextlib.suppress(ValueError):  # it has ended
            actor = ray.get_actor(replica, namespace=SERVE_NAMESPACE)
            asked[actor.is_allocated.remote()] = replica
    if not asked:
        return set()
    answered, silent = ray.wait([*asked], num_returns=len(asked), timeout=within_s)
    for question in silent:
        log.warning("replica %s has not answered for %g s, and is to end: killing it", asked[question], within_s)
        _kill(asked[question])
    return {asked[question] for question in answered}


def end_unplaced(details: Mapping[str, Any]) -> None:
    """Kill the replicas that wait for a node: nothing that could end runs in them. Raises: RayError.

    details: of the application, as Serve's controller tells them.
    """
    for replica in _listed(details):
        if not replica.get("node_id") and replica["state"] != "RECOVERING":  # whose node a new controller does not know yet
            _kill(replica["actor_name"])


def end_closing(replicas: Collection[str], application: str, *, but: str) -> None:
    """Kill an application's replicas, whose models take long to close, unless one is of the deployment `but`.

    Raises: RayError.
    """
    if not any(replica.startswith(_prefix(application, but)) for replica in replicas):
        for replica in replicas:
            log.error("replica %s still closed its model after server.drain_timeout_s: killing it", replica)
            _kill(replica)


def _kill(replica: str) -> None:
    with contextlib.suppress(ValueError):  # it has ended
        ray.kill(ray.get_actor(replica, namespace=SERVE_NAMESPACE))


def _prefix(*names: str) -> str:
    """Of the names of the actors of replicas. names: of the application, and of a deployment."""
    return "".join((REPLICA_ID_FULL_ID_STR_PREFIX, *(f"{name}#" for name in names)))


def _listed(details: Mapping[str, Any], deployment: str | None = None) -> list[dict[str, Any]]:
    """The replicas that Serve's controller tells of. details: of an application, as it has them. deployment: None: of all."""
    told = details.get("deployments", {})
    return [replica for name, each in told.items() if deployment in (None, name) for replica in each["replicas"]]


def succeeded(details: Mapping[str, Any], deployment: str, me: str, asks: str) -> set[str]:
    """The other replicas of the deployment on my node, if I run and am of the version that is deployed; else none.

    Of a deployment of which a node has one of each version. details: of the application, as Serve's controller tells them. me:
    the name of my actor. asks: a resource that my version alone asks for.
    """
    told = details.get("deployments", {}).get(deployment, {"required_resources": {}, "replicas": []})
    running = {each["actor_name"]: each["node_id"] for each in told["replicas"] if each["state"] == "RUNNING"}
    if asks not in told["required_resources"] or me not in running:
        return set()
    return {name for name, node in running.items() if node == running[me] and name != me}


def elsewhere(details: Mapping[str, Any], deployment: str, me: str) -> set[str]:
    """The deployment's replicas on other nodes than mine: they stay there. The arguments are those of `succeeded`."""
    nodes = {each["actor_name"]: each.get("node_id") for each in _listed(details, deployment)}
    return {name for name, node in nodes.items() if node and nodes.get(me) and node != nodes[me]}


class Leaving:
    """The replicas that are to end, and those that an ingress uses and ends before. On its event loop. Life: add … -> close."""

    def __init__(self, application: str, *, but: str) -> None:
        """but: the deployment of the application whose replicas Serve kills by time."""
        self._application = application
        self._but = but
        self._replicas: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._asking = asyncio.get_running_loop().create_task(self._ask_on())
        self._succeeding: asyncio.Task[None] | None = None

    def add(self, replica: str) -> None:
        """Look after it until it has ended. replica: the name of its actor."""
        self._replicas.add(replica)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_on())

    def succeed(self, me: str, asks: str, within_s: float) -> None:
        """From now on, end those that I have `succeeded`: kill those that take longer than a time."""
        self._succeeding = asyncio.get_running_loop().create_task(self._succeed_on(me, asks, within_s))

    def succeed_no_more(self) -> None:
        """For one that stops answering: after a deploy of its version again, it would end the only one that answers."""
        if self._succeeding is not None:
            self._succeeding.cancel()

    async def close(self) -> None:
        """Return when each has ended or has just answered."""
        for task in filter(None, (self._asking, self._looking, self._succeeding)):
            task.cancel()
            await asyncio.wait((task,))
        await self._look()

    async def _ask_on(self) -> None:
        while True:
            try:
                for replica in await self._stopping():
                    self.add(replica)
            except (RayError, ValueError) as exc:  # the controller is away
                log.debug("which replicas are to end could not be asked: %s", exc)
            await asyncio.sleep(_ASK_S)

    async def _stopping(self) -> set[str]:
        """Raises: RayError; ValueError, if there is no controller."""
        # Before the controller is asked: so it knows of each that is to stay.
        there = await asyncio.to_thread(replicas_of, self._application)
        listed = _listed(await self._details())
        staying = {replica["actor_name"] for replica in listed if replica["state"] != "STOPPING"}
        but = _prefix(self._application, self._but)
        return {replica for replica in there - staying if not replica.startswith(but)}

    async def _details(self) -> dict[str, Any]:
        """Of the application; empty: there is none. Raises: RayError; ValueError, if there is no controller."""
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        details = await controller.get_serve_instance_details.remote()
        found: dict[str, Any] = details["applications"].get(self._application, {})
        return found

    async def _succeed_on(self, me: str, asks: str, within_s: float) -> None:
        apart = {me}
        while True:
            await asyncio.sleep(_SUCCEED_S)
            try:
                # First Ray, which tells it for less: Serve's controller would tell each ingress of all, every few seconds.
                there = await asyncio.to_thread(replicas_of, self._application)
                if {name for name in there if name.startswith(_prefix(self._application, self._but))} <= apart:
                    continue
                details = await self._details()
                apart = {me} | elsewhere(details, self._but, me)
                for replica in succeeded(details, self._but, me, asks):
                    log.info("%s answers in the place of %s, which is to end", me, replica)
                    await self._end(replica, within_s)
            except (RayError, ValueError) as exc:  # the controller is away, or the replica has ended
                log.debug("in whose place this one answers could not be asked: %s", exc)
            except Exception:  # whatever Serve tells: else this would end, unseen, and two versions answer for ever
                log.exception("in whose place this one answers could not be told")

    async def _end(self, replica: str, within_s: float) -> None:
        """Raises: RayError; ValueError, if it has ended."""
        actor = ray.get_actor(replica, namespace=SERVE_NAMESPACE)
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(within_s):
                # As Serve's controller asks it, which then kills it. That asks as well, of one whose health check tells that it
                # is closed, and waits for the same end: also where this one dies meanwhile.
                await actor.perform_graceful_shutdown.remote()
        _kill(replica)

    async def _look_on(self) -> None:
        while self._replicas:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        asked = frozenset(self._replicas)
        try:
            self._replicas -= asked - await asyncio.to_thread(end_silent, asked, SILENT_S)
        except RayError as exc:  # its head is away
            log.debug("whether replicas answer could not be looked at: %s", exc)
