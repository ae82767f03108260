"""Several backends of one model in a whole gateway, without listeners: real sessions, real time."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
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

TALKS = """
server: {http_port: 0, grpc_port: null}
models:
  - name: m
    slo: {p99_ms: 300}
    backends:
      - {kind: python, model: "tests.router.test_served:talk", name: cheap, usd_per_hour: 0.1}
      - {kind: python, model: "tests.router.test_served:talk", name: dear, usd_per_hour: 100000.0}
"""


def talk(ms: int) -> Iterator[int]:
    """Give a part, and another so many milliseconds later."""
    yield ms
    time.sleep(ms / 1000)
    yield ms


def with_repository(tmp_path: Path, main: Callable[[Repository], Coroutine[Any, Any, None]], config: str = TWO) -> None:
    async def run() -> None:
        ingress = Ingress(parse_config(yaml.safe_load(config), source="x.yaml"), run_dir=tmp_path)
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


def test_a_request_does_not_wait_for_a_stream_at_the_cheap_backend_while_the_dear_one_is_idle(tmp_path: Path) -> None:
    class Stream:
        def __init__(self, repository: Repository, ms: int) -> None:
            loop = asyncio.get_running_loop()
            self.first: asyncio.Future[None] = loop.create_future()
            self.end: asyncio.Future[InferResponse | GatewayError | None] = loop.create_future()
            request = InferRequest("m", "1", "", {"ms": np.array([ms])}, 1, time.monotonic_ns())
            self.place = repository.infer(repository.model("m"), request, self.end.set_result, self.part)

        def part(self, response: InferResponse) -> None:
            self.place.taken()
            if not self.first.done():
                self.first.set_result(None)

    async def main(repository: Repository) -> None:
        began_s = time.monotonic()
        assert await Stream(repository, 600).end is None
        took_ms = 1e3 * (time.monotonic() - began_s)
        long = Stream(repository, 600)
        await long.first
        told = repository.explain("m")
        waits = {lane["backend"]: lane["wait_ms"] for lane in told["lanes"]}
        assert (told["backend"], told["reason"]) == ("dear", "spill")
        assert 150 < waits["cheap"] < took_ms
        beside = Stream(repository, 1)
        await beside.first
        assert not long.end.done()
        assert await beside.end is None
        assert await long.end is None

    with_repository(tmp_path, main, TALKS)
