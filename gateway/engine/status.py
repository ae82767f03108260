"""What goes on in a gateway now, as JSON has it: counts since the start, and the state of each model and its backends.

Counts only rise. Who asks twice has the rates and percentiles of the time between; nothing is kept here for that, and requests
are not counted a second time: the numbers are those of the exposition, over all processes of the node. States and health are as
this process sees them.
"""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from gateway import __version__
from gateway.config import Backend
from gateway.engine.lane import Lane
from gateway.engine.repository import Repository, ServedModel
from gateway.errors import without_folders
from gateway.routing.policies import Candidate

_KEPT_S: Final = 0.5  # however many look


@dataclass(slots=True)
class Histogram:
    """How many were at most so large, by upper bound; the last is infinity."""

    up_to: dict[float, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, bound: str, count: float) -> None:
        self.up_to[float(bound)] += count

    def told(self, unit: str, scale: float = 1.0) -> dict[str, list[float] | list[int]]:
        """Bounds without the last, and how many lie in each bucket, with one more for what is above all bounds."""
        bounds = sorted(self.up_to)
        cumulative = [round(self.up_to[bound]) for bound in bounds]
        counts = [above - below for above, below in zip(cumulative, [0, *cumulative], strict=False)]
        return {unit: [round(bound * scale, 9) for bound in bounds[:-1]], "counts": counts}


@dataclass(slots=True)
class LaneCounts:
    """Of one backend of one model version. What is no count is the sum over processes now."""

    batch_rows: Histogram = field(default_factory=Histogram)
    numbers: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(slots=True)
class ModelCounts:
    """Of one model version. requests: by the code of their answer."""

    requests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    latency_s: Histogram = field(default_factory=Histogram)
    lanes: dict[str, LaneCounts] = field(default_factory=lambda: defaultdict(LaneCounts))


# Sample of the exposition -> what a lane's number is called here, and what one of it is.
_LANE_NUMBERS: Final = {
    "gateway_batch_rows_count": ("batches", 1.0),
    "gateway_batch_rows_sum": ("batch_rows", 1.0),
    "gateway_padding_rows_total": ("padding_rows", 1.0),
    "gateway_executions_total": ("executions", 1.0),
    "gateway_compute_seconds_total": ("compute_ms", 1e3),
    "gateway_queue_rows": ("queue_rows", 1.0),
    "gateway_queue_requests": ("queue_requests", 1.0),
    "gateway_workers": ("sessions", 1.0),
    "gateway_busy_workers": ("busy", 1.0),
    "gateway_busy_usd_total": ("busy_usd", 1.0),
}
_WHOLE: Final = ("batches", "batch_rows", "padding_rows", "executions", "queue_rows", "queue_requests", "sessions", "busy")


class Counts:
    """The samples of an exposition that a status tells, by model and version."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, str], ModelCounts] = defaultdict(ModelCounts)
        self.processes = 0  # of the node, that take requests

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Take in one sample."""
        if name == "gateway_processes" and labels["role"] == "ingress":
            self.processes = int(value)
        if "model" not in labels:
            return
        key = labels["model"], labels["version"]
        if name == "gateway_requests_total":
            self.models[key].requests[labels["code"]] += int(value)
        elif name == "gateway_request_duration_seconds_bucket":
            self.models[key].latency_s.add(labels["le"], value)
        elif name == "gateway_batch_rows_bucket":
            self.models[key].lanes[labels["backend"]].batch_rows.add(labels["le"], value)
        elif name in _LANE_NUMBERS:
            number, scale = _LANE_NUMBERS[name]
            self.models[key].lanes[labels["backend"]].numbers[number] += value * scale


class Status:
    """What `GET /v2/status` answers. On the event loop's thread."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._json = b""
        self._until_s = 0.0

    def json(self) -> bytes:
        """The status, at most half a second old."""
        now_s = time.monotonic()
        if now_s >= self._until_s:
            counts = Counts()
            for name, labels, value in self._repository.metrics.samples():
                counts.add(name, labels, value)
            self._json = orjson.dumps(describe_status(self._repository, counts, time.time()))
            self._until_s = now_s + _KEPT_S
        return self._json


def describe_status(repository: Repository, counts: Counts, now_s: float) -> dict[str, Any]:
    """now_s: Unix time."""
    server = repository.server_metadata()
    return {
        "name": server["name"],
        "version": __version__,
        "instance_type": server.get("instance_type"),
        "time_s": round(now_s, 3),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "processes": max(1, counts.processes),
        "ready": repository.ready(),
        "models": [_model(served, counts.models[served.name, served.version]) for served in repository.all_models()],
    }


def _model(served: ServedModel, counts: ModelCounts) -> dict[str, Any]:
    slo = served.config.slo
    backends = [_backend(served, backend, counts.lanes[backend.label]) for backend in served.config.backends]
    prices = [backend["usd_per_hour"] for backend in backends if backend["usd_per_hour"] is not None]
    return {
        "name": served.name,
        "version": served.version,
        "state": served.state,
        "wanted": served.wanted,
        "reason": "" if served.state == "READY" else without_folders(served.reason),
        "slo_ms": slo.p99_ms if slo else None,
        "decoupled": served.spec.decoupled,
        "requests": counts.requests,
        "latency": counts.latency_s.told("bounds_ms", 1e3),
        "usd_per_hour": sum(prices) if prices else None,
        "backends": backends,
    }


def _backend(served: ServedModel, backend: Backend, counts: LaneCounts) -> dict[str, Any]:
    label = backend.label
    state, detail = _state(served, label)
    numbers = {number: counts.numbers[number] for number, _ in _LANE_NUMBERS.values()}
    numbers |= {number: round(numbers[number]) for number in _WHOLE}
    per_session = (backend.usd_per_hour or 0.0) / backend.sessions
    return {
        "name": label,
        "kind": backend.kind,  # type: ignore[attr-defined]  # every kind adds its literal
        "placement": backend.placement,
        "role": "shadow" if backend.shadow_share else "canary" if backend.canary_share else "regular",
        "state": state,
        "detail": detail,
        "usd_per_hour": numbers["sessions"] * per_session if backend.usd_per_hour else None,
        "batch_sizes": counts.batch_rows.told("bounds"),
        **numbers,
    }


def _state(served: ServedModel, label: str) -> tuple[str, str]:
    """One word for a backend as this process sees it, and what is to be said beside."""
    if label in served.missing:
        return "missing", without_folders(served.missing[label])
    candidates: tuple[Candidate, ...] = served.dispatcher.router.candidates if served.dispatcher is not None else ()
    found = next((candidate for candidate in candidates if candidate.label == label), None)
    lane = next((lane for lane in served.lanes if lane.name.rsplit("/", 1)[1] == label), None)
    if found is None or lane is None:
        return "not loaded", ""
    return state_of(lane, found)


def state_of(lane: Lane, candidate: Candidate) -> tuple[str, str]:
    """Of a backend that is loaded."""
    if candidate.health.ejected:
        return "ejected", str(candidate.health).removeprefix("ejected ")
    if lane.runner.cold:
        return "asleep", "scaled to zero; a request starts it"
    if not lane.available:
        return "down", "no live session"
    return "live", ""
