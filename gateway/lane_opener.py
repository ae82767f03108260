"""From a model's configuration to its lanes: runners opened, probed, and given what was learned of them before."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from backends.base import ModelSpec
from gateway.batching.batcher import Batcher
from gateway.batching.fairness import SharedWorkers
from gateway.batching.policies import POLICIES
from gateway.clock import Clock
from gateway.config import Backend, Model
from gateway.errors import ConfigError, GatewayError
from gateway.lane import Lane
from gateway.metrics import Metrics
from gateway.probes import probe
from gateway.runner import BatchRunner

OpenRunner = Callable[[Model, Backend, ModelSpec], BatchRunner]

_BACKOFF_FIRST_S: Final = 0.1
_BACKOFF_MOST_S: Final = 5.0

log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """lanes: open and probed. missing: the other backends of the model, by label, and why."""

    lanes: tuple[Lane, ...]
    missing: dict[str, str]


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
    ) -> None:
        """open_runner: makes the runner of a lane, not yet open. state_dir: None keeps nothing.

        shared_workers: how many batches run at once over all lanes that compute in this process; None: as many as there are
        sessions.
        """
        self._open_runner = open_runner
        self._metrics = metrics
        self._clock = clock
        self._state_dir = Path(state_dir) if state_dir else None
        self._shared = SharedWorkers(shared_workers) if shared_workers else None

    async def open(self, model: Model) -> Opened:
        """Load a model's backends and probe them; gives one lane each, in order of price.

        Backends that cannot be loaded are left out if another serves the model without them.
        Raises: ConfigError, if one is not as declared or unlike another; else GatewayError, of the first that fails if too many
        do. Then none is left open.
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
                raise failed
        except GatewayError:
            for lane in lanes:
                await lane.close()
            raise
        return Opened(tuple(lanes), missing)

    async def open_missing(self, model: Model, label: str, beside: Lane, told: Callable[[str], None]) -> Lane:
        """Try a backend that `open` left out again, until it is there.

        beside: an open lane of the model. told: gets the reason whenever a try has failed. Raises: ConfigError.
        """
        backend = next(backend for backend in model.backends if backend.label == label)
        backoff_s = _BACKOFF_FIRST_S
        while True:
            await asyncio.sleep(backoff_s)
            try:
                return await self._open_lane(model, backend, beside)
            except ConfigError:
                raise
            except GatewayError as exc:
                backoff_s = min(2 * backoff_s, _BACKOFF_MOST_S)
                told(exc.message)

    async def _open_lane(self, model: Model, backend: Backend, beside: Lane | None) -> Lane:
        runner = self._open_runner(model, backend, model.declared())
        spec = await runner.open()
        if beside is not None and (spec.inputs, spec.outputs) != (beside.spec.inputs, beside.spec.outputs):
            await runner.close()
            raise ConfigError(
                f"backend {backend.label} has inputs {spec.inputs} and outputs {spec.outputs}, "
                f"but {beside.name} has {beside.spec.inputs} and {beside.spec.outputs}"
            )
        lane = self._lane(model, backend, runner, spec)
        self._restore(lane)
        budget_ns = round(model.batching.probe_s * 1e9)
        try:
            await probe(runner, lane.batcher, spec, model.ragged, name=lane.name, budget_ns=budget_ns, clock=self._clock)
        except (GatewayError, asyncio.CancelledError):
            await lane.close()
            raise
        return lane

    def save(self, lane: Lane) -> None:
        """Keep what was learned of a backend's speed for the next start, if there is a state_dir."""
        path = self._state_path(lane)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")  # several processes may save at once: the last one wins, whole
            temporary.write_text(json.dumps(lane.batcher.service.to_dict()), encoding="utf-8")
            temporary.replace(path)

    def _restore(self, lane: Lane) -> None:
        path = self._state_path(lane)
        if path is None or not path.exists():
            return
        try:
            lane.batcher.service.restore(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as exc:
            log.warning("%s: what was learned before is unusable and left aside: %s: %s", lane.name, path, exc)

    def _state_path(self, lane: Lane) -> Path | None:
        return self._state_dir / f"{quote(lane.name, safe='')}.json" if self._state_dir else None

    def _lane(self, model: Model, backend: Backend, runner: BatchRunner, spec: ModelSpec) -> Lane:
        batching = model.batching
        batcher = Batcher(
            POLICIES[batching.policy](batching),
            max_rows=min(spec.max_rows, batching.max_rows or spec.max_rows),
            row_sizes=spec.row_sizes,
            workers=runner.slots,
            max_queue_rows=batching.max_queue_rows,
            slo_ns=round(model.slo.p99_ms * 1e6) if model.slo else None,
            ragged=model.ragged,
        )
        return Lane(
            name=f"{model.name}:{model.version}/{backend.label}",
            spec=spec,
            batcher=batcher,
            runner=runner,
            metrics=self._metrics.lane(model.name, model.version, backend.label),
            clock=self._clock,
            call_soon=asyncio.get_running_loop().call_soon,
            trace=batching.trace,
            shared=self._shared if backend.computes_here else None,
            share_weight=model.share_weight,
        )
