"""Repositories whose models run in this process, on the running loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from backends.base import ModelSpec
from gateway.clock import LoopClock
from gateway.config import Backend, Config, ModelSection, parse_config
from gateway.engine.lane_opener import LaneOpener
from gateway.engine.metrics import Metrics
from gateway.engine.repository import Repository, RepositoryControl
from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.engine.workers import WorkerPool


def new_repository(config: Config, directory: Path, *, control: RepositoryControl | None = None) -> Repository:
    """Not started. directory: its regions of shared memory are told there."""
    clock = LoopClock(asyncio.get_running_loop())

    def open_runner(model: ModelSection, backend: Backend, declared: ModelSpec) -> WorkerPool:
        return WorkerPool(backend, declared, name=f"{model.name}:{model.version}/{backend.label}", clock=clock)

    metrics = Metrics(config.models, enabled=config.metrics.enabled)
    return Repository(
        config,
        opener=LaneOpener(open_runner, metrics=metrics, clock=clock, state_dir=config.server.state_dir),
        metrics=metrics,
        clock=clock,
        regions=SharedMemoryRegions(directory / "regions", enabled=config.server.system_shared_memory),
        control=control,
    )


@asynccontextmanager
async def repository_of(text: str, directory: Path) -> AsyncIterator[Repository]:
    """Started, and closed in the end. text: of the configuration."""
    repository = new_repository(parse_config(yaml.safe_load(text), source="x.yaml"), directory)
    await repository.start()
    try:
        yield repository
    finally:
        await repository.close()
