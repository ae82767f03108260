"""What a batch to a replica on the same node costs: by the channel, by a call of Serve's, and without any way at all.

    python -m benchmarks.batch_channel [--rounds N]

An `echo` model in one replica of a Ray that is started for this; batches of 128 B, 150 kB and 5 MB there and back, one at a
time, from a runner in this process. `here` is the same model on a thread of this process. The ways take turns. Milliseconds,
and what the replica's process has grown by over the batches of a size.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import psutil
import ray
import uvloop
from ray import serve

from backends.base import ModelSpec
from gateway.batching.batch import Batch, Part
from gateway.clock import LoopClock
from gateway.cluster import application
from gateway.cluster.deployments import _content, _deployment_names, _key
from gateway.cluster.remote import RemoteRunner
from gateway.config import Config, parse_config
from gateway.engine.runner import BatchRunner, Execution
from gateway.engine.workers import WorkerPool
from gateway.types import InferRequest

SIZES = {128: 2000, 150_000: 1000, 5_000_000: 100}  # bytes -> batches in a round
ECHO = """
import os

class Echo:
    def predict(self, inputs):
        return {"Y": inputs["X"], "PID": __import__("numpy").full((len(inputs["X"]), 1), os.getpid())}
"""


def configuration(folder: Path) -> Config:
    (folder / "echo.py").write_text(ECHO)
    model = {
        "name": "echo",
        "max_rows": 8,
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, -1]}],
        "outputs": [
            {"name": "Y", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "PID", "datatype": "INT64", "shape": [-1, 1]},
        ],
        "backends": [{"kind": "python", "model": f"{folder}/echo.py:Echo", "placement": "replicas"}],
    }
    return parse_config({"server": {"http_port": 0, "grpc_port": None}, "models": [model]}, source="benchmark")


async def run(runner: BatchRunner, array: np.ndarray) -> Execution:
    now_ns = time.monotonic_ns()
    request = InferRequest("echo", "1", "", {"X": array}, 1, now_ns)
    batch = Batch(parts=[Part(request, 0, 1)], rows=1, padded_rows=1, reason="benchmark", closed_ns=now_ns)
    done: asyncio.Future[Execution] = asyncio.get_running_loop().create_future()
    runner.start(batch, lambda _, execution: done.set_result(execution))
    execution = await done
    assert execution.outputs is not None, execution.error
    assert execution.outputs["Y"].shape == array.shape
    return execution


async def times_ms(runner: BatchRunner, size: int, count: int) -> list[float]:
    array = np.random.default_rng(0).random((1, size // 4), np.float32)
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        await run(runner, array)
        taken.append((time.perf_counter() - begun) * 1e3)
    return taken


@contextlib.contextmanager
def without_channel(runner: RemoteRunner) -> Iterator[None]:
    """As where none can be opened."""
    (link,) = runner._links.values()
    channel, link._channel = link._channel, None
    try:
        yield
    finally:
        link._channel = channel


async def measure(config: Config, rounds: int) -> None:
    model = config.models[0]
    backend = model.backends[0]
    clock = LoopClock(asyncio.get_running_loop())
    names = {"name": "echo:1/python", "clock": clock}
    deployment = _deployment_names(config)[_key(model, backend)]
    remote = RemoteRunner(backend, deployment, "gateway", content=_content(model, backend), ending=lambda: True, **names)
    here = WorkerPool(backend, ModelSpec("", model.inputs or (), model.outputs or (), 8), **names)
    await asyncio.gather(remote.open(), here.open())
    while "by unix" not in repr(remote):  # noqa: ASYNC110  # nobody is told when a channel opens
        await asyncio.sleep(0.01)
    replica = psutil.Process(int((await run(remote, np.ones((1, 4), np.float32))).outputs["PID"][0, 0]))
    found: dict[tuple[str, int], list[float]] = {}
    grown: list[int] = []
    for size, count in SIZES.items():
        await times_ms(remote, size, 20)
        before = replica.memory_info().rss
        for _ in range(rounds):
            found.setdefault(("here", size), []).extend(await times_ms(here, size, count))
            found.setdefault(("channel", size), []).extend(await times_ms(remote, size, count))
            with without_channel(remote):
                found.setdefault(("call", size), []).extend(await times_ms(remote, size, count))
        grown.append(replica.memory_info().rss - before)
    print("| bytes there and back | way | p50 ms | p99 ms | batches/s | times the call's |\n|---|---|---|---|---|---|")
    for (way, size), taken in found.items():
        ratio = statistics.fmean(found["call", size]) / statistics.fmean(taken)
        p50, p99 = np.percentile(taken, [50, 99])
        print(f"| {size} | {way} | {p50:.3f} | {p99:.3f} | {1e3 / statistics.fmean(taken):.0f} | {ratio:.1f} |")
    print(f"the replica's memory has grown by {', '.join(f'{grow / 1e6:.1f} MB' for grow in grown)} over these sizes")
    await asyncio.gather(remote.close(), here.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(Path(folder))
        serve.run(application(config), name="gateway", route_prefix=None)
        uvloop.run(measure(config, rounds))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
