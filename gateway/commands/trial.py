"""`gateway check --load`: each backend is loaded and run, in this process, before anybody relies on it.

It is probed as `gateway serve` probes it, whatever `probe_s` is: with the smallest batch and with the largest.
"""

import asyncio
from functools import partial
from typing import Final, NamedTuple

from backends.base import ModelSpec
from gateway.clock import LoopClock
from gateway.commands.serve import take_neuron_cores
from gateway.config import Backend, Config, ModelSection, Routing
from gateway.documents.faults import Fault
from gateway.documents.reader import Document
from gateway.engine.lane_opener import LaneOpener, check_alike, close_all
from gateway.engine.metrics import Metrics
from gateway.engine.workers import WorkerPool
from gateway.errors import GatewayError

_REMEDY: Final = "correct the model, or what is said of it here"
_PROBE_S: Final = 600.0  # that a slow model is run with its largest batch as well


class Tried(NamedTuple):
    """faults: one for each backend that cannot serve. failing: models that raise on the made-up input, and may do so on any."""

    faults: tuple[Fault, ...]
    failing: tuple[str, ...]


async def tried(document: Document, config: Config) -> Tried:
    """Load each backend by itself, in this process, and run it. Those of one model are to have the same inputs and outputs."""
    clock = LoopClock(asyncio.get_running_loop())
    metrics = Metrics()

    def pool(model: ModelSection, backend: Backend, declared: ModelSpec) -> WorkerPool:
        return WorkerPool(backend, declared, name=f"{model.name}:{model.version}/{backend.label}", clock=clock)

    faults = []
    failing: list[str] = []
    for index, model in enumerate(config.models):
        first: tuple[ModelSpec, str] | None = None  # of its backends that is loaded, and its name
        for number, backend in enumerate(model.backends):
            alone = backend.model_copy(update={"placement": "embedded", "sessions": 1, "resources": {}, "shadow_share": None})
            take_neuron_cores([alone])
            whole = model.batching.model_copy(update={"probe_s": _PROBE_S})
            only = model.model_copy(update={"backends": (alone,), "routing": Routing(), "batching": whole})
            opener = LaneOpener(pool, metrics=metrics, clock=clock, probe_failed=partial(failing.append, model.name))
            try:
                opened = await opener.open(only)
                lane = opened.lanes[0]
                await close_all(opened.lanes)
                if first is not None:
                    check_alike(lane.spec, backend.label, *first)
                first = first or (lane.spec, lane.name)
            except GatewayError as exc:
                words = exc.message.removeprefix(f"{model.name}:{model.version}/{backend.label}: ")
                faults.append(document.fault(("models", index, "backends", number), words, remedy=_REMEDY))
    return Tried(tuple(faults), tuple(dict.fromkeys(failing)))
