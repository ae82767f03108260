"""Several backends of one model in a whole gateway, without listeners: real sessions, real time."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gateway.config import parse_config
from gateway.engine.repository import Repository
from gateway.errors import GatewayError
from gateway.ingress import Ingress
from gateway.types import InferRequest, InferResponse

pytestmark = pytest.mark.slow

TWO = """
server: {http_port: 0, grpc_port: null, model_control: true}
models:
  - name: m
    slo: {p99_ms: 2000}
    backends:
      - {kind: synthetic, name: cheap, fixed_ms: 1, usd_per_hour: 0.1, faults: {lose: 13, fail: 14}}
      - {kind: synthetic, name: dear, fixed_ms: 1, usd_per_hour: 100.0}
      - {kind: synthetic, name: shadow, fixed_ms: 1, shadow_share: 0.5, faults: {fail: 1}}
"""


def with_repository(tmp_path: Path, main: Callable[[Repository], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        ingress = Ingress(parse_config(yaml.safe_load(TWO), source="x.yaml"), run_dir=tmp_path)
        await ingress.start()
        try:
            await main(ingress.repository)
        finally:
            await ingress.drain()

    asyncio.run(run())


def infer(repository: Repository, value: float) -> "asyncio.Future[InferResponse | GatewayError]":
    future: asyncio.Future[InferResponse | GatewayError] = asyncio.get_running_loop().create_future()
    inputs = {"INPUT0": np.full((1, 16), value, np.float32)}
    repository.infer(repository.model("m"), InferRequest("m", "1", "", inputs, 1, time.monotonic_ns()), future.set_result)
    return future


@pytest.mark.parametrize("value", [13.0, 14.0], ids=["lose", "fail"])
def test_what_the_cheap_backend_cannot_serve_the_dear_one_does(tmp_path: Path, value: float) -> None:
    async def main(repository: Repository) -> None:
        outcomes = [await infer(repository, sent) for sent in (2.0, value, 3.0)]
        assert [float(outcome.outputs["OUTPUT0"][0, 0]) for outcome in outcomes if isinstance(outcome, InferResponse)] == [
            2.0,
            value,
            3.0,
        ]

    with_repository(tmp_path, main)


def test_a_reload_under_traffic_loses_nothing_and_a_failing_shadow_costs_nothing(tmp_path: Path) -> None:
    async def main(repository: Repository) -> None:
        sent = []
        reloading = asyncio.ensure_future(repository.load("m", {}))
        while not reloading.done() or len(sent) < 50:
            sent.append(infer(repository, 1.0))
            await asyncio.sleep(0.002)
        await reloading
        outcomes = await asyncio.gather(*sent)
        assert all(isinstance(outcome, InferResponse) for outcome in outcomes)

    with_repository(tmp_path, main)
