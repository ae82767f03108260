"""From a model's configuration to its lanes: runners opened, probed, and given what was learned of them before."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from backends.base import ModelSpec, TensorSpec
from gateway.batching.fairness import SharedWorkers
from gateway.batching.recording import LaneSettings, RecordedBatcher, Ring
from gateway.clock import Clock
from gateway.config import Backend, ModelSection
from gateway.documents.faults import Fault, path_of, shown
from gateway.engine.lane import Lane
from gateway.engine.metrics import Metrics
from gateway.engine.probes import probe
from gateway.engine.recorders import Cost
from gateway.engine.runner import BatchRunner
from gateway.engine.workers import WorkerPool, longer_backoff
from gateway.errors import BackendFailed, ConfigError, GatewayError, shortened

OpenRunner = Callable[[ModelSection, Backend, ModelSpec], BatchRunner]
CallSoon = Callable[[Callable[[], None]], object]

_LONGEST_FILE: Final = 200  # of the 255 bytes a name may have; a quoted letter takes up to twelve
_STATE_BYTES: Final = 64 << 10  # a file of what was learned is shorter

log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """lanes: open and probed. missing: the other backends of the model, by label, and why."""

    lanes: tuple[Lane, ...]
    missing: dict[str, str]


def _made(state_dir: str) -> Path:
    path = Path(state_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            file.write(bytes(_STATE_BYTES))
    except OSError as exc:
        raise ConfigError(
            f"server.state_dir: {state_dir!r}: {exc.strerror}: expected a directory to write in, with free space"
        ) from exc
    return path


def _check_lengths(model: ModelSection, spec: ModelSpec) -> None:
    """Raises: ConfigError, if lengths are asked of what has none, or padding that cannot be."""
    for key, tensors in (("pad", spec.inputs), ("text", spec.inputs), ("crop", spec.outputs)):
        for unfit in model.unfit_lengths(key, tensors):
            value = shown(getattr(model.ragged, key)[unfit.at[-1]])
            raise ConfigError(str(Fault("", path_of(unfit.at), value, unfit.found, unfit.expected, unfit.remedy)))


def check_alike(spec: ModelSpec, label: str, other: ModelSpec, name: str) -> None:
    """Hold a backend against another of its model: the same tensors, in any order. name: of the other.

    Raises: ConfigError, naming what differs.
    """
    if spec.decoupled != other.decoupled:
        one, whole = (label, name) if spec.decoupled else (name, label)
        raise ConfigError(f"backend {one} is decoupled (it answers in parts), and {whole} is not")
    if bool(spec.max_rows) != bool(other.max_rows):
        one, batched = (label, name) if other.max_rows else (name, label)
        raise ConfigError(f"backend {one} has no batch dimension, and {batched} has one: set max_rows of the model, 0 for none")
    differing = [
        f"{what} {tensor} is {_shown(ours.get(tensor))} here, {_shown(theirs.get(tensor))} there"
        for what, ours, theirs in (
            ("input", spec.input_by_name, other.input_by_name),
            ("output", spec.output_by_name, other.output_by_name),
        )
        for tensor in {**ours, **theirs}
        if ours.get(tensor) != theirs.get(tensor)
    ]
    if differing:
        raise ConfigError(
            f"backend {label} is unlike {name}: {'; '.join(differing)}: all backends of a model have the same inputs and "
            "outputs: correct one, or make it a model of its own"
        )


def _shown(tensor: TensorSpec | None) -> str:
    if tensor is None:
        return "missing"
    labels = f" with labels {', '.join(tensor.labels)}" if tensor.labels else ""
    return f"{'optional ' if tensor.optional else ''}{tensor.datatype} {list(tensor.shape)}{shortened(labels)}"


def _without_use(model: ModelSection) -> str:
    """What is set of a model without batches that only these have a use for."""
    batching = model.batching
    keys = batching.model_fields_set & {"max_rows", "max_delay_ms"} | ({"policy"} if batching.policy == "fixed" else set())
    return ", ".join(f"batching.{key}" for key in sorted(keys))


async def close_all(lanes: Sequence[Lane]) -> str:
    """Close lanes one after the other: those behind take over what one loses. Gives what the first that cannot be closed said.

    Broken off, it gives up what those behind run, and closes them at once.
    """
    fault = ""
    for number, lane in enumerate(lanes, 1):
        try:
            await lane.close()
        except Exception as exc:
            log.exception("%s could not be closed", lane.name)
            fault = fault or f"{lane.name}: {exc}"
        except BaseException:
            for behind in lanes[number:]:
                behind.give_up()
                behind.runner.abort()
            await asyncio.gather(*(behind.close() for behind in lanes[number:]), return_exceptions=True)
            raise
    return fault


class LaneOpener:
    """Opens lanes, and keeps what they learned. On the event loop's thread."""

    def __init__(
        self,
        open_runner: OpenRunner,
        *,
        metrics: Metrics,
        clock: Clock,
        state_dir: str | None = None,
        shared_workers: int | None = None,
        probe_every_length: bool = True,
        probe_failed: Callable[[], None] | None = None,
        call_soon: CallSoon | None = None,
        processes: int = 1,
    ) -> None:
        """open_runner: makes the runner of a lane, not yet open. state_dir: made if it is not there; None keeps nothing.

        shared_workers: how many batches run at once over all lanes that compute in this process; None: as many as there are
        sessions. probe_every_length: see `probe`. probe_failed: called for each lane that is opened although it raised in a run
        before traffic. call_soon: as `Lane` has it; None: the loop's. processes: that open the same lanes.
        Raises: ConfigError, if nothing can be kept in the state_dir.
        """
        self._open_runner = open_runner
        self._metrics = metrics
        self._clock = clock
        self._state_dir = _made(state_dir) if state_dir else None
        self._probe_every_length = probe_every_length
        self._probe_failed = probe_failed
        self._call_soon = call_soon
        self._processes = processes
        self._shared = SharedWorkers(shared_workers) if shared_workers else None

    async def open(self, model: ModelSection) -> Opened:
        """Load a model's backends and probe them; gives one lane each, in order of price.

        Backends that cannot be loaded are left out if another serves the model without them.
        Raises: ConfigError, if one is not as declared or unlike another; else GatewayError, that names each that fails if too
        many do. Then none is left open.
        """
        lanes: list[Lane] = []
        missing: dict[str, str] = {}
        failed: GatewayError | None = None
        try:
            for backend in sorted(model.backends, key=lambda backend: backend.usd_per_hour or 0.0):
                try:
                    lanes.append(await self._open_lane(model, backend, lanes[0] if lanes else None))
                except ConfigError:
                    raise
                except GatewayError as exc:
                    failed = failed or exc
                    missing[backend.label] = exc.message
            if failed and all(backend.label in missing or backend.shadow_share for backend in model.backends):
                raise failed if len(missing) == 1 else BackendFailed("; ".join(dict.fromkeys(missing.values())))
        except BaseException:  # broken off, too
            await close_all(lanes)
            raise
        return Opened(tuple(lanes), missing)

    async def open_missing(self, model: ModelSection, label: str, beside: Lane, told: Callable[[str], None]) -> Lane:
        """Try a backend that `open` left out again, until it is there.

        beside: an open lane of the model. told: gets the reason whenever a try has failed. Raises: ConfigError.
        """
        backend = next(backend for backend in model.backends if backend.label == label)
        backoff_s = longer_backoff(0.0)
        while True:
            await asyncio.sleep(backoff_s)
            try:
                return await self._open_lane(model, backend, beside)
            except ConfigError:
                raise
            except GatewayError as exc:
                backoff_s = longer_backoff(backoff_s)
                told(exc.message)

    async def _open_lane(self, model: ModelSection, backend: Backend, beside: Lane | None) -> Lane:
        """Raises: GatewayError; BackendFailed, whatever else a backend raises. Then nothing is left open."""
        name = f"{model.name}:{model.version}/{backend.label}"
        opened: BatchRunner | Lane | None = None
        cost = self._held(model, backend)
        try:
            opened = runner = self._open_runner(model, backend, model.declared())
            try:
                spec = await runner.open()
            except (GatewayError, asyncio.CancelledError):
                opened = None  # it has closed what it had opened
                raise
            order: tuple[str, ...] = ()  # of the outputs, if it has them in another
            if beside is not None:
                check_alike(spec, backend.label, beside.spec, beside.name)
                if spec.outputs != beside.spec.outputs:
                    order = tuple(tensor.name for tensor in beside.spec.outputs)
                spec = replace(spec, inputs=beside.spec.inputs, outputs=beside.spec.outputs)
            _check_lengths(model, spec)
            idle = _without_use(model) if spec.decoupled or not spec.max_rows else ""
            if idle:
                why = "is decoupled" if spec.decoupled else "has no batch dimension"
                log.warning("%s: the model %s: it runs one request at a time, and %s says nothing to it", name, why, idle)
            opened = lane = self._lane(name, model, backend, runner, spec)
            if order:
                lane.runs.answer_in(order)
            self._restore(lane)
            well = await probe(
                runner,
                lane.batcher,
                spec,
                model.ragged,
                name=name,
                budget_ns=round(model.batching.probe_s * 1e9),
                every_length=self._probe_every_length,
                clock=self._clock,
            )
            if not well and self._probe_failed is not None:
                self._probe_failed()
            if isinstance(runner, WorkerPool):
                await runner.settle()
            if isinstance(lane.batcher, RecordedBatcher):
                lane.batcher.record(lambda: runner.lives)  # with what it has learned until here
        except BaseException as exc:
            if cost is not None and not isinstance(opened, Lane):  # which lets go of it when it is closed
                cost.release()
            if opened is not None:
                try:
                    runner.abort()  # a probe may hang
                    await opened.close()
                except Exception:  # the first fault is the one to tell
                    log.exception("%s could not be closed", name)
            if isinstance(exc, GatewayError) or not isinstance(exc, (Exception, asyncio.CancelledError)):
                raise
            task = asyncio.current_task()
            if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # this was broken off; without that, it is an error that the backend raised
            log.exception("%s: unexpected exception of the backend", name)
            raise BackendFailed(f"{name}: failed to load: {type(exc).__name__}: {exc}") from exc
        return lane

    def _held(self, model: ModelSection, backend: Backend) -> Cost | None:
        """What a backend in this process costs from now on; a replica counts its own."""
        usd_per_hour = backend.share_usd_per_hour(self._processes)
        if usd_per_hour is None or backend.placement != "embedded":
            return None
        cost = self._metrics.cost(model.name, model.version, backend.label, usd_per_hour, backend.sessions)
        cost.hold()
        return cost

    def save(self, lane: Lane) -> None:
        """Keep what was learned of a backend's speed for the next start, if there is a state_dir; if that fails, warn."""
        path = self._state_path(lane)
        if path is None:
            return
        temporary = path.with_suffix(f".{os.getpid()}")  # several processes may save at once: the last one wins, whole
        try:
            temporary.write_text(json.dumps(lane.batcher.service.to_dict()), encoding="utf-8")
            temporary.replace(path)
        except Exception as exc:  # whatever it is, the lane goes: nothing of that may stop its end
            log.warning("%s: what was learned of its speed is not kept (server.state_dir): %s", lane.name, exc)
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _restore(self, lane: Lane) -> None:
        path = self._state_path(lane)
        if path is None:
            return
        try:
            lane.batcher.service.restore(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except Exception as exc:  # the file may hold anything
            log.warning("%s: what was learned before is unusable and left aside: %s: %s", lane.name, path, exc)

    def _state_path(self, lane: Lane) -> Path | None:
        if self._state_dir is None:
            return None
        name = quote(lane.name, safe="")
        if len(name) > _LONGEST_FILE:
            name = f"{name[:_LONGEST_FILE]}-{hashlib.sha256(lane.name.encode()).hexdigest()[:16]}"
        return self._state_dir / f"{name}.json"

    def _lane(self, name: str, model: ModelSection, backend: Backend, runner: BatchRunner, spec: ModelSpec) -> Lane:
        batching = model.batching
        settings = LaneSettings(
            label=backend.label,
            # Answers in parts do not share a run: a client that reads slowly would hold up the others.
            policy="greedy" if spec.decoupled else batching.policy,
            max_delay_ms=batching.max_delay_ms,
            max_rows=0 if spec.decoupled else min(spec.max_rows, batching.max_rows or spec.max_rows),
            model_rows=0 if spec.decoupled else spec.max_rows,
            row_sizes=spec.row_sizes,
            sessions=runner.slots,
            max_queue_rows=batching.max_queue_rows,
            slo_ns=round(model.slo.p99_ms * 1e6) if model.slo else None,
            ragged=model.ragged.on(backend).model_dump() if model.ragged else None,
            session_usd_per_hour=(backend.share_usd_per_hour(self._processes) or 0.0) / backend.sessions,
            decoupled=spec.decoupled,
            lent=backend.placement == "replicas" and self._processes > 1,
        )
        ring_bytes = int(batching.record_mib * 2**20 / len(model.backends))
        batcher = settings.batcher(Ring(ring_bytes, settings) if ring_bytes else None)
        return Lane(
            name=name,
            spec=spec,
            batcher=batcher,
            runner=runner,
            metrics=self._metrics.lane(model.name, model.version, backend.label, max_rows=settings.max_rows),
            clock=self._clock,
            call_soon=self._call_soon or asyncio.get_running_loop().call_soon,
            trace=batching.trace,
            shared=self._shared if backend.computes_here else None,
            share_weight=model.share_weight,
        )
