"""`gateway check --load`: each backend is loaded and run once, in this process, before anybody relies on it."""

import asyncio
from typing import Final

from backends.base import ModelSpec
from gateway.clock import LoopClock
from gateway.config import Backend, Config, Model, Routing
from gateway.documents.faults import Fault
from gateway.documents.reader import Document
from gateway.errors import GatewayError
from gateway.lane_opener import LaneOpener, close_all
from gateway.metrics import Metrics
from gateway.workers import WorkerPool

_REMEDY: Final = "correct the model, or what is said of it here"
_ONE_RUN_S: Final = 1e-3  # of probing, which begins no second run after it


async def tried(document: Document, config: Config) -> list[Fault]:
    """Load each backend by itself, in this process, and run it once. Gives a fault for each that cannot be."""
    clock = LoopClock(asyncio.get_running_loop())
    metrics = Metrics()

    def pool(model: Model, backend: Backend, declared: ModelSpec) -> WorkerPool:
        return WorkerPool(backend, declared, name=f"{model.name}:{model.version}/{backend.label}", clock=clock)

    faults = []
    for index, model in enumerate(config.models):
        for number, backend in enumerate(model.backends):
            alone = backend.model_copy(update={"placement": "embedded", "sessions": 1, "shadow_share": None})
            once = model.batching.model_copy(update={"probe_s": _ONE_RUN_S})
            only = model.model_copy(update={"backends": (alone,), "routing": Routing(), "batching": once})
            try:
                opened = await LaneOpener(pool, metrics=metrics, clock=clock).open(only)
            except GatewayError as exc:
                words = exc.message.removeprefix(f"{model.name}:{model.version}/{backend.label}: ")
                faults.append(document.fault(("models", index, "backends", number), words, remedy=_REMEDY))
            else:
                await close_all(opened.lanes)
    return faults
