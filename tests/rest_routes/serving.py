"""The REST edge over a real repository of synthetic models, on a loop in a thread of its own."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gateway.access.doors import Doors
from gateway.config import parse_config
from gateway.edges.http_server import HttpServer
from gateway.edges.rest_routes import RestRoutes
from gateway.engine.repository import Repository, RepositoryControl
from tests.engine.repositories import new_repository
from tests.running_loop import running_loop

TIMEOUT_S = 20.0
FAST = "backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]"
MODELS = f"""
server: {{model_control: true}}
models:
  - name: echo
    max_rows: 8
    inputs: [{{name: INPUT0, datatype: FP32, shape: [-1, 4]}}]
    outputs: [{{name: OUTPUT0, datatype: FP32, shape: [-1, 4], labels: [zero, one, two, three]}}]
    backends: [{{kind: synthetic, fixed_ms: 0, row_ms: 0, faults: {{fail: 666}}}}]
  - name: pair
    version: "1"
    inputs: [{{name: A, datatype: FP32, shape: [-1, 2]}}, {{name: B, datatype: INT32, shape: [-1, 2]}}]
    outputs: [{{name: C, datatype: FP32, shape: [-1, 2]}}, {{name: D, datatype: INT32, shape: [-1, 2]}}]
    {FAST}
  - {{name: pair, version: "2", {FAST}}}
  - name: "a+b cé"
    inputs: [{{name: IN, datatype: BYTES, shape: [-1, 1]}}]
    outputs: [{{name: OUT, datatype: BYTES, shape: [-1, 1]}}]
    {FAST}
  - name: slow
    max_rows: 1
    batching: {{max_queue_rows: 3, probe_s: 0}}
    inputs: [{{name: INPUT0, datatype: FP32, shape: [-1, 4]}}]
    outputs: [{{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}}]
    backends: [{{kind: synthetic, fixed_ms: 150, row_ms: 0}}]
  - name: wide
    inputs: [{{name: INPUT0, datatype: FP32, shape: [-1, -1]}}]
    outputs: [{{name: OUTPUT0, datatype: FP32, shape: [-1, -1]}}]
    {FAST}
  - {{name: says, max_rows: 8, backends: [{{kind: python, model: "tests/rest_routes/serving.py:Says"}}]}}
  - name: half
    backends:
      - {{kind: synthetic, fixed_ms: 0, row_ms: 0}}
      - {{kind: synthetic, name: absent, fail_opens: 1000}}
  - {{name: later, load_at_start: false, {FAST}}}
  - {{name: broken, load_at_start: false, backends: [{{kind: synthetic, fail_opens: 1000}}]}}
"""


class Says:
    """Answers each row with the parameter `a` and the rows of its batch, as text; after `sleep_s`, if that is given."""

    inputs = (("INPUT0", "FP32", (-1, 4)),)
    outputs = (("A", "BYTES", (-1, 1)), ("ROWS", "INT64", (-1, 1)))

    def predict(self, inputs: dict[str, np.ndarray], parameters: dict[str, Any]) -> dict[str, np.ndarray]:
        rows = len(inputs["INPUT0"])
        time.sleep(parameters.get("sleep_s", 0.0))
        said = np.full((rows, 1), repr(parameters.get("a")), dtype=object)
        return {"A": said, "ROWS": np.full((rows, 1), rows)}


@dataclass(frozen=True)
class Served:
    repository: Repository
    server: HttpServer
    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT_S)


@contextmanager
def serving(
    directory: Path, text: str = MODELS, *, control: RepositoryControl | None = None, port: int = 0
) -> Iterator[Served]:
    async def start(loop: asyncio.AbstractEventLoop) -> Served:
        config = parse_config(yaml.safe_load(text), source="models.yaml")
        repository = new_repository(config, directory, control=control)
        await repository.start()
        limits, access, scrape = config.server.limits, config.server.access, repository.metrics.scrape
        doors = Doors(access, {}) if access is not None else None
        routes = RestRoutes(repository, limits, scrape=scrape, status_page=config.server.shows_page, doors=doors)
        server = HttpServer(routes, limits)
        return Served(repository, server, await server.start("127.0.0.1", port), loop)

    async def stop(served: Served) -> None:
        await served.server.drain(2.0)
        await served.repository.close()

    with running_loop() as loop:
        served = asyncio.run_coroutine_threadsafe(start(loop), loop).result(TIMEOUT_S)
        try:
            yield served
        finally:
            served.run(stop(served))
