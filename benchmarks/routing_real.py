"""Routing over a real fleet on one machine: what `python -m benchmarks.routing --real` runs.

    cheap   minilm on onnxruntime in this process, one session of one thread
    triton  a real tritonserver (make triton) whose python backend takes some milliseconds of numpy per row: faster, but dearer
    slow    sleeps 60 + 4 n ms: a throttled instance

Prices are those of c7i.xlarge, g6.xlarge and p3.2xlarge. The load is stepped from 0.3 to 2 times what the cheap backend was
measured to do just before, and back, as a Poisson process that does not wait for answers; once per policy, in turn. Latency
counts from when a request was due. Requests go straight to the repository: without sockets and codecs, so that the client takes
as little as possible of the two cores it shares with the backends.

The three give different embeddings, which matters to nobody here; they are declared equivalent.
"""

import asyncio
import gc
import json
import os
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import Config, parse_config
from gateway.errors import GatewayError
from gateway.ingress import Ingress
from gateway.protocols.tensors import shape_key
from gateway.types import InferRequest, InferResponse
from tests.triton_server import triton_server, write_model

SLO_MS: Final = 250.0
LENGTH: Final = 32
LOADS: Final = (0.3, 0.6, 0.9, 1.2, 1.6, 2.0, 0.9, 0.3)
POLICIES: Final = ("round_robin", "power_of_two", "least_eta", "cheapest")

_TRITON_CONFIG: Final = """
max_batch_size: 32
input [{ name: "input_ids" data_type: TYPE_INT64 dims: [-1] }, { name: "attention_mask" data_type: TYPE_INT64 dims: [-1] }]
output [{ name: "embedding" data_type: TYPE_FP32 dims: [384] }]
"""
_TRITON_CODE: Final = """
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        rng = np.random.default_rng(0)
        self.table = rng.standard_normal((30522, 384)).astype(np.float32)
        self.layers = [rng.standard_normal((384, 384)).astype(np.float32) / 20 for _ in range(10)]

    def execute(self, requests):
        responses = []
        for request in requests:
            ids, mask = (pb.get_input_tensor_by_name(request, name).as_numpy() for name in ("input_ids", "attention_mask"))
            hidden = self.table[ids] * mask[:, :, None].astype(np.float32)
            for layer in self.layers:
                hidden = np.tanh(hidden @ layer)
            mean = hidden.mean(1)
            responses.append(pb.InferenceResponse([pb.Tensor("embedding", mean)]))
        return responses
"""


def measure(*, quick: bool) -> None:
    """Prints a table per policy, and all figures as one line of JSON at the end."""
    uvloop.run(_measure(2.0 if quick else 8.0))


async def _measure(step_s: float) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of Triton's numpy: as for the cheap backend, one core and no more
    with TemporaryDirectory(prefix="routing-") as temporary:
        folder = Path(temporary)
        write_model(folder / "models", "minilm", _TRITON_CONFIG, _TRITON_CODE)
        with triton_server(folder) as triton:
            cheap_rps = await _capacity(triton.grpc_url, folder)
            print(
                f"the cheap backend alone: {cheap_rps:.0f} requests/s, {LENGTH} tokens; SLO {SLO_MS:g} ms, steps {step_s:g} s"
            )
            print(f"{'in SLO at load':16}" + "".join(f"{load:8.1f}" for load in LOADS))
            figures = {}
            for policy in POLICIES:
                figures[policy] = await _run(policy, triton.grpc_url, folder, cheap_rps, step_s)
            print(json.dumps({"cheap_rps": cheap_rps, "slo_ms": SLO_MS, "step_s": step_s, "loads": LOADS, "policies": figures}))


def _config(policy: str, url: str, *, only: str = "") -> Config:
    backends: list[dict[str, Any]] = [
        {"kind": "onnxruntime", "name": "cheap", "model": "models/minilm.onnx", "usd_per_hour": 0.1785},
        {"kind": "triton", "url": url, "model": "minilm", "usd_per_hour": 0.8048},
        {"kind": "synthetic", "name": "slow", "output": "sum", "fixed_ms": 60.0, "row_ms": 4.0, "usd_per_hour": 3.06},
    ]
    tokens = ("input_ids", "attention_mask")
    model = {
        "name": "minilm",
        "slo": {"p99_ms": SLO_MS} if not only else None,
        "inputs": [{"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in tokens],
        "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, 384]}],
        "max_rows": 32,
        "ragged": {"pad": dict.fromkeys(tokens, 0), "buckets": [LENGTH]},
        "routing": {"policy": policy},
        "backends": [backend for backend in backends if only in ("", backend.get("name", backend["kind"]))],
    }
    return parse_config({"server": {"http_port": 0, "grpc_port": 0}, "models": [model]}, source="benchmark")


class _Client:
    """Sends requests to an ingress of this process and notes what becomes of them."""

    def __init__(self, ingress: Ingress) -> None:
        self._repository = ingress.repository
        self._served = served = ingress.repository.model("minilm")
        rng = np.random.default_rng(0)
        self._inputs = [
            {"input_ids": rng.integers(1000, 30000, (1, LENGTH)), "attention_mask": np.ones((1, LENGTH), np.int64)}
            for _ in range(64)
        ]
        self._key = shape_key(served.spec, served.ragged, self._inputs[0])

    async def send(self, due_ns: int, index: int) -> float:
        """Latency in ms; infinite without a result."""
        answer: asyncio.Future[InferResponse | GatewayError] = asyncio.get_running_loop().create_future()
        request = InferRequest("minilm", "1", "", self._inputs[index % 64], 1, due_ns, shape_key=self._key)
        try:
            self._repository.infer(self._served, request, answer.set_result)
        except GatewayError:
            return float("inf")
        outcome = await answer
        return (time.monotonic_ns() - due_ns) / 1e6 if isinstance(outcome, InferResponse) else float("inf")

    async def poisson(self, rps: float, seconds: float, seed: int) -> list[float]:
        """Latencies of requests at random times, whatever becomes of those before."""
        gaps = np.random.default_rng(seed).exponential(1e9 / rps, int(rps * seconds * 2) + 50)
        times = np.cumsum(gaps)
        start_ns = time.monotonic_ns()
        sent = []
        for index, offset_ns in enumerate(times[times < seconds * 1e9]):
            due_ns = start_ns + int(offset_ns)
            await asyncio.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
            sent.append(asyncio.ensure_future(self.send(due_ns, index)))
        return list(await asyncio.gather(*sent))

    async def closed(self, clients: int, seconds: float) -> float:
        """Answers per second that so many clients get, each waiting for its own."""
        until_ns = time.monotonic_ns() + round(seconds * 1e9)
        done = 0

        async def one() -> None:
            nonlocal done
            while time.monotonic_ns() < until_ns:
                latency_ms = await self.send(time.monotonic_ns(), done)
                done += latency_ms < float("inf")

        await asyncio.gather(*(one() for _ in range(clients)))
        return done / seconds


async def _capacity(url: str, folder: Path) -> float:
    ingress = Ingress(_config("cheapest", url, only="cheap"), run_dir=folder)
    await ingress.start()
    try:
        client = _Client(ingress)
        await client.closed(8, 1.0)
        return await client.closed(8, 3.0)
    finally:
        await ingress.drain()


async def _run(policy: str, url: str, folder: Path, cheap_rps: float, step_s: float) -> dict[str, Any]:
    ingress = Ingress(_config(policy, url), run_dir=folder)
    await ingress.start()
    try:
        client = _Client(ingress)
        await client.poisson(0.3 * cheap_rps, 2.0, seed=99)  # warm-up
        gc.collect()
        steps = []
        for number, load in enumerate(LOADS):
            before = _counted(ingress)
            latencies = np.array(await client.poisson(load * cheap_rps, step_s, seed=number))
            after = _counted(ingress)
            rows = {name: after[name, "rows"] - before[name, "rows"] for name in ("cheap", "triton", "slow")}
            usd = sum(after[name, "usd"] - before[name, "usd"] for name in rows)
            answered = int(np.sum(np.isfinite(latencies)))
            finite = latencies[np.isfinite(latencies)]
            steps.append(
                {
                    "load": load,
                    "requests": len(latencies),
                    "in_slo": float(np.mean(latencies <= SLO_MS)),
                    "p50_ms": float(np.percentile(finite, 50)) if answered else None,
                    "p99_ms": float(np.percentile(finite, 99)) if answered else None,
                    "usd_per_million": usd / max(1, answered) * 1e6,
                    "shares": {name: value / max(1.0, sum(rows.values())) for name, value in rows.items()},
                }
            )
    finally:
        await ingress.drain()
    print(f"{policy:16}" + "".join(f"{step['in_slo']:8.1%}" for step in steps))
    print(f"{'  USD/million':16}" + "".join(f"{step['usd_per_million']:8.2f}" for step in steps))
    for name in ("cheap", "triton", "slow"):
        print(f"{'  ' + name:16}" + "".join(f"{step['shares'][name]:8.0%}" for step in steps), flush=True)
    total = sum(step["requests"] for step in steps)
    in_slo = sum(step["in_slo"] * step["requests"] for step in steps) / total
    usd = sum(step["usd_per_million"] * step["requests"] for step in steps) / total
    print(f"  all: in SLO {in_slo:.2%}, busy {usd:.3f} USD per million", flush=True)
    return {"in_slo": in_slo, "usd_per_million": usd, "steps": steps}


def _counted(ingress: Ingress) -> Counter[tuple[str, str]]:
    """Rows executed and busy cost by backend."""
    counted: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(ingress.metrics.expose()[1].decode()):
        for sample in family.samples:
            backend = sample.labels.get("backend", "")
            if sample.name == "gateway_batch_rows_sum":
                counted[backend, "rows"] += sample.value  # type: ignore[assignment]  # a count, kept as a float
            elif sample.name == "gateway_cost_usd_total" and sample.labels["state"] == "busy":
                counted[backend, "usd"] += sample.value  # type: ignore[assignment]
    return counted
