"""What goes on in a gateway now, as JSON has it: counts since the start, and the state of each model and its backends.

Counts only rise. Who asks twice has the rates and percentiles of the time between; nothing is kept here for that, and requests
are not counted a second time: the numbers are those of the exposition, over all processes of the node. States and health are as
this process sees them.
"""

import asyncio
import os
import socket
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from gateway import __version__
from gateway.config import Backend
from gateway.engine.lane import Lane
from gateway.engine.metric_blocks import Key, State, place
from gateway.engine.metrics import Metrics, in_slices
from gateway.engine.model_statistics import OK
from gateway.engine.repository import Repository
from gateway.engine.served_model import ServedModel
from gateway.errors import without_folders
from gateway.routing.policies import Candidate

_KEPT_S: Final = 0.5  # however many look

_REQUESTS: Final = place("edge", "gateway_requests_total")
_SLO: Final = place("edge", "gateway_slo_requests_total")
_LATENCY: Final = place("edge", "gateway_request_duration_seconds")
_ROWS: Final = place("lane", "gateway_batch_rows")
_EJECTED: Final = place("model", "gateway_ejected")
_USD_PER_HOUR: Final = place("cost", "gateway_cost_usd_per_hour")
_PROCESSES: Final = place("process", "gateway_processes")

# What a lane's number is called here -> where it stands, and what one of it is.
_LANE_NUMBERS: Final = {
    "padding_rows": (place("lane", "gateway_padding_rows_total"), 1.0),
    "executions": (place("lane", "gateway_executions_total"), 1.0),
    "compute_ms": (place("lane", "gateway_compute_seconds_total"), 1e-6),
    "queue_rows": (place("lane", "gateway_queue_rows"), 1.0),
    "queue_requests": (place("lane", "gateway_queue_requests"), 1.0),
    "sessions": (place("lane", "gateway_workers"), 1.0),
    "busy": (place("lane", "gateway_busy_workers"), 1.0),
}


@dataclass(slots=True)
class Histogram:
    """bounds: without infinity. counts: in each bucket, with one more for what is above all bounds; both empty: none yet."""

    bounds: tuple[float, ...] = ()
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def add(self, bounds: tuple[float, ...], values: Sequence[int]) -> None:
        """values: counts, and the sum behind them. What has other bounds than the first that was added is left out."""
        if not self.counts:
            self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        if bounds == self.bounds and len(values) == len(self.counts) + 1:
            self.counts = [one + other for one, other in zip(self.counts, values, strict=False)]
            self.sum += values[-1]


@dataclass(slots=True)
class BackendCounts:
    """Of one backend of one model version. usd_per_hour: of what is held now; None: no price is known, or nothing held."""

    batch_rows: Histogram = field(default_factory=Histogram)
    numbers: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_LANE_NUMBERS, 0.0))
    usd_per_hour: float | None = None


@dataclass(slots=True)
class ModelCounts:
    """Of one model version. requests: by the code of their answer. slo_requests: those that count for the SLO.

    ejected: by backend, how many processes have it so.
    """

    requests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    slo_requests: dict[str, int] = field(default_factory=lambda: {"met": 0, "missed": 0})
    latency_s: Histogram = field(default_factory=Histogram)
    backends: dict[str, BackendCounts] = field(default_factory=lambda: defaultdict(BackendCounts))
    ejected: Mapping[str, int] = field(default_factory=dict)


class Counts:
    """The counts that a status tells, by model and version. processes: ingress processes that have counted."""

    def __init__(self, metrics: Metrics) -> None:
        self.models: dict[tuple[str, str], ModelCounts] = defaultdict(ModelCounts)
        self.processes = 1
        self._bounds = metrics.bounds

    def add(self, key: Key, state: State) -> None:
        """Take in a block of `Metrics.counted`."""
        if key == ("process", ("ingress",)):
            self.processes = state[_PROCESSES] or 1
        if len(key.labels) < 2:
            return
        model = self.models[key.labels[0], key.labels[1]]
        if key.kind == "edge":
            for code, count in state[_REQUESTS].items():
                if count or code == OK:
                    model.requests[code] += count
            for result, count in (state[_SLO] or {}).items():
                model.slo_requests[result] += count
            latency = state[_LATENCY]
            model.latency_s.add(self._bounds(key, "gateway_request_duration_seconds", latency), latency)
        elif key.kind == "lane":
            backend = model.backends[key.labels[2]]
            backend.batch_rows.add(self._bounds(key, "gateway_batch_rows", state[_ROWS]), state[_ROWS])
            for name, (index, scale) in _LANE_NUMBERS.items():
                backend.numbers[name] += (state[index] or 0) * scale
        elif key.kind == "cost":
            model.backends[key.labels[2]].usd_per_hour = state[_USD_PER_HOUR]
        elif key.kind == "model":
            model.ejected = state[_EJECTED] or {}


class Status:
    """What `GET /v2/status` answers. On the event loop's thread."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._making: asyncio.Task[bytes] | None = None
        self._until_s = 0.0

    async def json(self) -> bytes:
        """The status, at most half a second old: all who look share one."""
        now_s = time.monotonic()
        if self._making is None or now_s >= self._until_s:
            self._making = asyncio.get_running_loop().create_task(self._make())
            self._until_s = now_s + _KEPT_S
        return await asyncio.shield(self._making)

    async def _make(self) -> bytes:
        return await in_slices(self._made(await self._repository.metrics.counted()))

    def _made(self, counted: Mapping[Key, State]) -> Generator[None, None, bytes]:
        repository = self._repository
        counts = Counts(repository.metrics)
        for key, state in counted.items():
            counts.add(key, state)
            yield
        models = []
        for served in repository.all_models():
            models.append(_model(served, counts.models[served.name, served.version]))
            yield
        return orjson.dumps(_describe(repository, counts.processes, models, time.time()))


def _describe(repository: Repository, processes: int, models: list[dict[str, Any]], now_s: float) -> dict[str, Any]:
    """now_s: Unix time."""
    server = repository.server_metadata()
    return {
        "name": server["name"],
        "version": __version__,
        "instance_type": server.get("instance_type"),
        "time_s": round(now_s, 3),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "processes": processes,
        "counted": repository.metrics.enabled,
        "ready": repository.ready(),
        "models": models,
    }


def _model(served: ServedModel, counts: ModelCounts) -> dict[str, Any]:
    slo = served.config.slo
    backends = [_backend(served, backend, counts) for backend in served.config.backends]
    prices = [backend["usd_per_hour"] for backend in backends if backend["usd_per_hour"] is not None]
    latency = counts.latency_s
    return {
        "name": served.name,
        "version": served.version,
        "state": served.state,
        "wanted": served.wanted,
        "generation": served.generation,
        "reason": "" if served.state == "READY" else without_folders(served.reason),
        "slo_ms": slo.p99_ms if slo else None,
        "decoupled": served.spec.decoupled,
        "requests": counts.requests,
        "slo_requests": counts.slo_requests,
        "latency": {"bounds_ms": [round(bound * 1e3, 9) for bound in latency.bounds], "counts": latency.counts},
        "usd_per_hour": sum(prices) if prices else None,
        "backends": backends,
    }


def _backend(served: ServedModel, backend: Backend, of_model: ModelCounts) -> dict[str, Any]:
    label = backend.label
    counts = of_model.backends[label]
    state, detail = _state(served, label, of_model.ejected.get(label, 0))
    sizes = counts.batch_rows
    return {
        "name": label,
        "kind": backend.kind,  # type: ignore[attr-defined]  # every kind adds its literal
        "placement": backend.placement,
        "role": "shadow" if backend.shadow_share else "canary" if backend.canary_share else "regular",
        "state": state,
        "detail": detail,
        "usd_per_hour": counts.usd_per_hour,
        "batches": sum(sizes.counts),
        "batch_rows": round(sizes.sum),
        "batch_sizes": {"bounds": sizes.bounds, "counts": sizes.counts},
        **{name: number if name == "compute_ms" else round(number) for name, number in counts.numbers.items()},
    }


def _state(served: ServedModel, label: str, ejected: int) -> tuple[str, str]:
    """One word for a backend as this process sees it, and what is to be said beside. ejected: in so many processes."""
    if label in served.missing:
        return "missing", without_folders(served.missing[label])
    candidates: tuple[Candidate, ...] = served.dispatcher.router.candidates if served.dispatcher is not None else ()
    found = next((candidate for candidate in candidates if candidate.label == label), None)
    lane = next((lane for lane in served.lanes if lane.name.rsplit("/", 1)[1] == label), None)
    if found is None or lane is None:
        return "not loaded", ""
    return state_of(lane, found, ejected)


def state_of(lane: Lane, candidate: Candidate, ejected: int) -> tuple[str, str]:
    """Of a backend that is loaded. ejected: in so many processes of the node."""
    if candidate.health.ejected:
        return "ejected", str(candidate.health).removeprefix("ejected ")
    if not lane.available:
        return "down", "scaled to zero, and no replica has come: one is awaited" if lane.runner.cold else "no live session"
    if lane.runner.cold:
        return "asleep", "scaled to zero; a request starts it"
    return "live", f"ejected in {ejected} other process{'es' * (ejected > 1)} of the node" if ejected else ""
