"""The models this process serves, their lanes, and what both protocol edges ask of them.

A model version is UNAVAILABLE -> LOADING -> READY -> UNLOADING -> UNAVAILABLE. A load of a READY one builds the new lanes
beside the old, swaps, then drains the old, so that no request is lost. With several ingress processes a load or unload by a
client is published through `control`, and every process applies it.

A load or unload is a task of its own: who asked for it only waits for its end, and may go away. It ends as READY or
UNAVAILABLE, whatever is raised meanwhile.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gateway.batching.recorded_file import packed
from gateway.batching.recording import ring_of
from gateway.clock import Clock
from gateway.config import Config, ModelSection
from gateway.engine.descriptions import (
    describe_config,
    describe_metadata,
    describe_models,
    describe_server,
    describe_statistics,
)
from gateway.engine.dispatcher import Dispatcher
from gateway.engine.lane import Lane
from gateway.engine.lane_opener import LaneOpener, Opened, close_all
from gateway.engine.long_bodies import LongBodies
from gateway.engine.metrics import Metrics
from gateway.engine.place import OnAnswer, OnAnswerPart, Place
from gateway.engine.served_model import ServedModel
from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.errors import (
    BackendFailed,
    ConfigError,
    GatewayError,
    InternalError,
    InvalidArgument,
    NotFound,
    NotReady,
    Unsupported,
    instead,
    shortened,
    without_folders,
)
from gateway.process.console import step
from gateway.tracing.tracer import Tracer
from gateway.types import InferRequest

log = logging.getLogger(__name__)


class RepositoryControl(Protocol):
    """How a load or unload reaches every ingress process."""

    async def publish(self, name: str, loaded: bool) -> None:
        """Return once every process has applied it. Raises: GatewayError, the first that a process met."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """A load or unload of a model under way. Its task ends with the error that it met, and raises none."""

    loaded: bool | None
    task: asyncio.Task[GatewayError | None]


class Repository:
    """See the module. On the event loop's thread. `generation` changes whenever what `model` answers may have changed."""

    def __init__(
        self,
        config: Config,
        *,
        opener: LaneOpener,
        metrics: Metrics,
        clock: Clock,
        regions: SharedMemoryRegions,
        control: RepositoryControl | None = None,
        on_leave: Callable[[], None] = lambda: None,
    ) -> None:
        """opener: makes the lanes of a model. control: None in a process that serves alone. on_leave: as for `Ingress`."""
        self.regions = regions
        self.long_bodies = LongBodies(regions)
        self.metrics = metrics
        self.generation = 0
        self.tracer: Tracer | None = None  # set before listeners are made, where requests are traced
        self._config = config
        self._opener = opener
        self._clock = clock
        self._control = control
        self._on_leave = on_leave
        self._process = secrets.token_hex(4)  # its name, unlike those of others that serve the same models
        self._closing = self._loads_ended = False
        self._turn = asyncio.Lock()  # one load or unload at a time, in the order they were asked for
        self._turns: dict[str, asyncio.Lock] = {}  # of models that were added: who adds many waits for none of them
        self._changes: dict[str, _Change] = {}  # model -> the last that was asked for, until it is done
        self._openings: set[asyncio.Task[Opened]] = set()
        self._models: dict[str, dict[str, ServedModel]] = {}
        for model in config.models:
            self._models.setdefault(model.name, {})[model.version] = ServedModel(model, wanted=model.load_at_start)

    async def start(self) -> None:
        """Load what is to be loaded at start. Raises: GatewayError, that names every model that fails."""
        failed: list[GatewayError] = []
        wanted = [served for served in self.all_models() if served.wanted]
        for served in wanted:
            try:
                with step(f"loading {served.name}"):
                    await self._load(served)
            except GatewayError as exc:
                failed.append(exc)
                if self._loads_ended or served is wanted[-1]:
                    break
                log.warning("%s; the other models are loaded, to name all that fail", exc.message)
        if failed:
            raise _together(failed)

    def end_loads(self) -> None:
        """Refuse loads from now on, and break off those under way: who waits for one is told, and what was opened is closed."""
        self._loads_ended = True
        for opening in self._openings:
            opening.cancel()

    async def close(self) -> None:
        """Refuse new requests, answer those that are here, free the models. Loads are ended first."""
        self._closing = True
        self.end_loads()
        await asyncio.gather(*(change.task for change in self._changes.values()), return_exceptions=True)
        for end in await asyncio.gather(*(self._unload(served) for served in self.all_models()), return_exceptions=True):
            if end is not None:
                log.error("at the end of the server: %s", end)
        self.long_bodies.close()

    def give_up(self) -> None:
        """Answer every request that is here with an error, as the server ends."""
        for served in self.all_models():
            for lane in served.all_lanes:
                lane.give_up()

    # requests

    def model(self, name: str, version: str = "") -> ServedModel:
        """The model version to serve; an empty version means the highest that is ready. Raises: NotFound, NotReady."""
        versions = self._models.get(name)
        if versions is None:
            others = instead(name, self._models, "models here")
            raise NotFound(f"Request for unknown model: '{shortened(name)}' is not found{others}")
        if version:
            served = versions.get(version)
            if served is None:
                others = instead("", sorted(versions, key=int), "versions here")
                raise NotFound(f"Request for unknown model: '{name}' version {shortened(version)} is not found{others}")
        else:
            served = max(versions.values(), key=lambda served: (served.state == "READY", int(served.version)))
        if served.state != "READY":
            raise _not_ready(served, [known.version for known in versions.values() if known.state == "READY"])
        return served

    def infer(
        self, served: ServedModel, request: InferRequest, on_answer: OnAnswer, on_answer_part: OnAnswerPart | None = None
    ) -> Place:
        """Hand a validated request to a lane of its model, which `model` has given in this `generation`.

        on_answer, on_answer_part: as in `Lane.submit`; if anything is raised (GatewayError), on_answer gets nothing.
        """
        if self._closing:
            raise NotReady("the server is shutting down", retry_after_s=1.0)
        assert served.dispatcher is not None  # READY
        return served.dispatcher.submit(request, on_answer, on_answer_part)

    def explain(self, name: str, version: str = "", rows: int = 1) -> dict[str, Any]:
        """Why a request would go to which backend now, as this process sees it. Raises: NotFound, NotReady."""
        served = self.model(name, version)
        assert served.dispatcher is not None  # READY
        return {**served.dispatcher.explain(rows), "missing": self.missing(name, version)}

    def why(self, name: str, version: str = "") -> bytes:
        """What this process has recorded of its last decisions, as `recorded_file` packs it.

        Raises: NotFound, NotReady; Unsupported, if nothing is recorded.
        """
        served = self.model(name, version)
        rings = [ring for lane in served.lanes if (ring := ring_of(lane.batcher)) is not None]
        if not rings:
            raise _unrecorded(served)
        return packed(
            served.name,
            served.version,
            rings,
            process=self._process,
            processes=self._config.server.ingresses,
            now_ns=self._clock.now_ns(),
            unix_s=time.time(),
            routing=served.dispatcher.ring if served.dispatcher is not None else None,
            unrecorded=served.unrecorded,
        )

    # state

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        """Whether every model that should be loaded can be served."""
        return not self._closing and all(served.serves for served in self.all_models() if served.wanted)

    def model_ready(self, name: str, version: str = "") -> bool:
        """Raises: NotFound, for a name that is in no configuration."""
        try:
            return not self._closing and self.model(name, version).serves
        except NotReady:
            return False

    def missing(self, name: str, version: str = "") -> dict[str, str]:
        """Backends of a ready model that could not be loaded yet, and why. Raises: NotFound, NotReady."""
        return {label: without_folders(reason) for label, reason in self.model(name, version).missing.items()}

    @property
    def pending(self) -> int:
        """Requests accepted and not answered."""
        return sum(lane.pending for served in self.all_models() for lane in served.all_lanes)

    def server_metadata(self) -> dict[str, Any]:
        return describe_server(self._config.server.instance_type)

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """Raises: NotFound, NotReady."""
        spec, of_name = self.model(name, version).spec, self._models[name]
        return describe_metadata(name, spec, [each for each in of_name if of_name[each].lanes and version in ("", each)])

    def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        """Triton's ModelConfig in its JSON form, as far as it has a meaning here. Raises: NotFound, NotReady."""
        served = self.model(name, version)
        return describe_config(served.config, served.spec, list(self._models[name]))

    def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """The statistics extension, over all processes of this node.

        Empty name: every ready model. Raises: NotFound, NotReady.
        """
        if name:
            wanted = [served for served in self._models.get(name, {}).values() if served.state == "READY"]
            if version or not wanted:
                wanted = [self.model(name, version)]
        else:
            wanted = [served for served in self.all_models() if served.state == "READY"]
        found = self.metrics.statistics({(served.name, served.version) for served in wanted})
        return {
            "model_stats": [
                describe_statistics(served.name, served.version, found[served.name, served.version]) for served in wanted
            ]
        }

    def all_models(self) -> list[ServedModel]:
        """Every version of the configuration, whatever its state."""
        return [served for versions in self._models.values() for served in versions.values()]

    def ready_models(self) -> list[ServedModel]:
        """Every version that is READY; of each model the one that a client gets who names none comes first."""
        return [
            served
            for versions in self._models.values()
            for served in sorted(versions.values(), key=lambda served: -int(served.version))
            if served.state == "READY"
        ]

    def models(self) -> list[dict[str, Any]]:
        """Every model of the configuration, by name, with the state of each version; a model's is that of its best one."""
        return describe_models(self.index())

    def index(self, ready_only: bool = False) -> list[dict[str, Any]]:
        """The repository index: name, version, state, and the reason of what is not ready."""
        rows = []
        for served in self.all_models():
            if served.serves:
                rows.append({"name": served.name, "version": served.version, "state": "READY"})
            elif not ready_only:
                state, reason = served.state, without_folders(served.reason)
                if state == "READY":
                    state, reason = "UNAVAILABLE", "no backend has a live session"
                rows.append({"name": served.name, "version": served.version, "state": state, "reason": reason})
        return rows

    # load and unload

    def add(self, models: Sequence[ModelSection]) -> None:
        """Know the versions of one model that is in no configuration. `apply` loads it, beside others."""
        self._turns[models[0].name] = asyncio.Lock()
        self._models[models[0].name] = {model.version: ServedModel(model) for model in models}

    def forget(self, name: str) -> None:
        """Know a model no more. It is not loaded, and no load of it is under way."""
        del self._models[name], self._turns[name]
        self.generation += 1

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Load or reload every version of a model, in every ingress process.

        Raises: InvalidArgument, for a name that is in no configuration; Unsupported, for parameters; BackendFailed.
        """
        if parameters:
            raise Unsupported(
                f"load of model '{name}': parameters {sorted(parameters)} are not supported; change the configuration"
            )
        await self._change(name, loaded=True)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload every version of a model, in every ingress process.

        Models here have no dependents. Raises: InvalidArgument.
        """
        await self._change(name, loaded=False)

    async def _change(self, name: str, *, loaded: bool) -> None:
        if not self._config.server.model_control:
            raise Unsupported("load and unload by clients are switched off here: to allow them, set server.model_control: true")
        if name not in self._models:
            verb = "load" if loaded else "unload"
            raise InvalidArgument(f"failed to {verb} '{name}', no such model in the configuration")
        if self._control is None:
            await self.apply(name, loaded)
        else:
            await self._control.publish(name, loaded)

    async def apply(self, name: str, loaded: bool | None) -> None:
        """Bring a model of this process to the published state; None: unload the versions that are not loaded at start.

        Joins the last change if that is to the same state and not done, else follows it. Cancelled, it only waits no longer.
        """
        change = self._changes.get(name)
        if change is None or change.loaded != loaded:
            change = _Change(loaded, asyncio.create_task(self._carry_out(name, loaded)))
            self._changes[name] = change
        error = await asyncio.shield(change.task)
        if error is not None:
            raise error.with_traceback(None)  # several may raise it

    async def _carry_out(self, name: str, loaded: bool | None) -> GatewayError | None:
        """Change every version, also where one fails; gives what they met."""
        failed: list[GatewayError] = []
        left: list[Lane] = []
        try:
            async with self._turns.get(name, self._turn):
                changed = [each for each in self._models[name].values() if loaded is not None or not each.config.load_at_start]
                for served in changed:  # at once: none is missed while another is unloaded
                    served.wanted = bool(loaded)
                for served in changed:
                    left += served.lanes
                    try:
                        await (self._load(served) if loaded else self._unload(served))
                    except GatewayError as exc:
                        log.error("model %s version %s: %s", name, served.version, exc.message)
                        failed.append(exc)
                    except Exception:  # a fault of ours must still be an answer, and leave the other versions alone
                        log.exception("model %s version %s", name, served.version)
                        failed.append(InternalError("internal error"))
        finally:
            if self._changes[name].task is asyncio.current_task():
                del self._changes[name]
            if failed or left:
                self._on_leave()
        return _together(failed) if failed else None

    async def _load(self, served: ServedModel) -> None:
        if self._loads_ended:
            raise NotReady("the server is shutting down", retry_after_s=1.0)
        served.state, served.reason = (served.state, served.reason) if served.lanes else ("LOADING", "")
        lanes: tuple[Lane, ...] = ()
        try:
            lanes, missing = await self._open(served.config)
            processes = self._config.server.ingresses
            dispatcher = Dispatcher(lanes, served.config, self.metrics, self._clock, seed=os.getpid(), processes=processes)
        except BaseException as exc:
            await close_all(lanes)
            served.state = "READY" if served.lanes else "UNAVAILABLE"
            if not isinstance(exc, GatewayError) or self._loads_ended:
                raise
            served.reason = f"failed to load '{served.name}' version {served.version}: {exc.message}"
            raise BackendFailed(served.reason) from exc
        # Without a wait until the new lanes have taken the place of the old: what breaks in later finds one or the other.
        joining, served.joining = served.joining, []
        for task in joining:
            task.cancel()
        old, old_dispatcher = served.lanes, served.dispatcher
        reads = bool(missing) or any(lane.spec.reads_parameters for lane in lanes)
        served.lanes, served.spec, served.dispatcher = lanes, replace(lanes[0].spec, reads_parameters=reads), dispatcher
        served.state, served.reason = "READY", ""
        served.missing = missing
        served.generation = self.generation = self.generation + 1
        for label, reason in missing.items():
            log.error("%s:%s/%s is missing, and will be tried again: %s", served.name, served.version, label, reason)
            served.joining.append(asyncio.create_task(self._join(served, label)))
        await asyncio.gather(*joining, return_exceptions=True)
        await self._close_lanes(served, old)
        if old_dispatcher is not None:
            old_dispatcher.close()
        log.info("model %s version %s is ready on %s", served.name, served.version, ", ".join(lane.name for lane in lanes))

    async def _open(self, model: ModelSection) -> Opened:
        """As `LaneOpener.open`; NotReady, if `end_loads` breaks it off."""
        opening = asyncio.create_task(self._opener.open(model))
        self._openings.add(opening)
        try:
            return await opening
        except asyncio.CancelledError:
            if self._loads_ended and opening.cancelled():
                raise NotReady("the server is shutting down", retry_after_s=1.0) from None
            raise
        finally:
            self._openings.discard(opening)

    async def _join(self, served: ServedModel, label: str) -> None:
        """Bring a backend in once it can be loaded."""
        dispatcher = served.dispatcher
        assert dispatcher is not None  # READY; and this task ends before it is another

        def told(reason: str) -> None:
            if reason != served.missing[label]:
                served.missing[label] = reason
                log.error("%s:%s/%s is still missing: %s", served.name, served.version, label, reason)

        try:
            lane = await self._opener.open_missing(served.config, label, served.lanes[0], told)
        except ConfigError as exc:
            served.missing[label] = exc.message
            log.error("%s:%s/%s stays missing: %s", served.name, served.version, label, exc.message)
            return
        del served.missing[label]
        served.lanes += (lane,)
        dispatcher.join(lane)
        self.generation += 1
        log.warning("%s is there", lane.name)

    async def _stop_joining(self, served: ServedModel) -> None:
        joining, served.joining = served.joining, []
        for task in joining:
            task.cancel()
        await asyncio.gather(*joining, return_exceptions=True)
        served.missing = {}

    async def _unload(self, served: ServedModel) -> None:
        await self._stop_joining(served)
        lanes, served.lanes = served.lanes, ()
        dispatcher, served.dispatcher = served.dispatcher, None
        self.generation += 1
        served.state, why = ("UNLOADING", "") if lanes else (served.state, served.reason)  # why it was not there
        fault = ""
        try:
            for lane in lanes:
                self._opener.save(lane)
            fault = await self._close_lanes(served, lanes)
        finally:
            if dispatcher is not None:
                dispatcher.close()
            served.state, served.reason = "UNAVAILABLE", fault or why or "unloaded"
        if fault:
            raise BackendFailed(f"failed to unload '{served.name}' version {served.version}: {fault}")

    async def _close_lanes(self, served: ServedModel, lanes: tuple[Lane, ...]) -> str:
        """As `close_all`."""
        served.leaving += lanes
        try:
            return await close_all(lanes)
        finally:
            served.leaving = tuple(lane for lane in served.leaving if lane not in lanes)


def _not_ready(served: ServedModel, ready: list[str]) -> NotReady:
    """ready: versions of the same model."""
    what = f"version {served.version} is not at ready state" if ready else "has no available versions"
    why = served.state.lower() + (f": {served.reason}" if served.reason else "")
    others = instead("", sorted(ready, key=int), "versions ready") if ready else ""
    said = f"Request for unknown model: '{served.name}' {what} ({why}){others}"
    return NotReady(said, model=(served.name, served.version))


def _unrecorded(served: ServedModel) -> Unsupported:
    reasons = served.unrecorded
    if reasons:
        reason = next(iter(reasons.values()))
        return Unsupported(f"model '{served.name}': its decisions are no longer recorded, until it is loaded anew: {reason}")
    return Unsupported(f"model '{served.name}': its decisions are not recorded: to have them, set batching.record_mib above 0")


def _together(failed: Sequence[GatewayError]) -> GatewayError:
    """One error that says what each says, a line each."""
    if len(failed) == 1:
        return failed[0]
    return BackendFailed("\n".join(dict.fromkeys(error.message for error in failed)))
