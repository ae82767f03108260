"""What a call to Triton costs this process: as sessions make it, as a future that can be cancelled, and by grpc.aio.

    python -m benchmarks.triton_calls

A real tritonserver on this machine with a small python model. `thread` is the gateway's own `WorkerPool` over the triton
backend, each session calling from its thread; `future` the same with ModelInfer.future(), which has a cancel(); `aio` calls
from the event loop, without threads of ours. As many calls as sessions are always under way, the ways in turn. CPU
microseconds of this process per call (all threads; Triton's own are not in it), and milliseconds from start to answer.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from backends.base import ModelSpec, TensorSpec
from backends.triton import TritonModel, TritonSession
from backends.triton_connection import Metadata, TritonConnection
from gateway.batching.batch import Batch, Part
from gateway.clock import LoopClock
from gateway.config import Triton
from gateway.engine.runner import Execution
from gateway.engine.workers import WorkerPool
from gateway.types import InferRequest
from tests.triton_server import triton_server, write_model

CONFIG = """
max_batch_size: 64
input [{ name: "X" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
"""
CODE = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        x = [pb.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("Y", array[:, :1])]) for array in x]
"""
DECLARED = ModelSpec("", (TensorSpec("X", "FP32", (-1, -1)),), (TensorSpec("Y", "FP32", (-1, 1)),), 64)

Call = Callable[[np.ndarray], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--width", nargs="*", type=int, default=[16, 8192], help="numbers per row, of 8 rows")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "models", "echo", CONFIG, CODE)
        with triton_server(Path(folder)) as server:
            for sessions in arguments.sessions:
                for width in arguments.width:
                    uvloop.run(compare(server.grpc_url, sessions, width, arguments.seconds, arguments.rounds))


async def compare(url: str, sessions: int, width: int, seconds: float, rounds: int) -> None:
    array = np.ones((8, width), np.float32)
    pools = {name: await open_pool(url, sessions) for name in ("thread", "future")}
    ways: dict[str, list[Call]] = {name: [by_pool(pool)] * sessions for name, pool in pools.items()}
    ways["aio"] = [by_aio(url) for _ in range(sessions)]
    cpu_us: dict[str, list[float]] = {name: [] for name in ways}
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    infer = TritonConnection.infer
    for _ in range(rounds):
        for name, calls in ways.items():
            if name == "future":
                TritonConnection.infer = infer_by_future  # type: ignore[method-assign]  # the way that is compared
            spent_us, took_ms = await measure(calls, array, seconds)
            TritonConnection.infer = infer  # type: ignore[method-assign]
            cpu_us[name].append(spent_us)
            times_ms[name] += took_ms
    for name in ways:
        p50, p99 = np.percentile(times_ms[name], (50, 99))
        print(
            f"{sessions} sessions, {array.nbytes >> 10:4} KiB, {name:7} CPU {statistics.median(cpu_us[name]):6.0f} µs "
            f"({min(cpu_us[name]):.0f} to {max(cpu_us[name]):.0f}), p50 {p50:.2f} ms, p99 {p99:.2f} ms",
            flush=True,
        )
    for pool in pools.values():
        await pool.close()


async def open_pool(url: str, sessions: int) -> WorkerPool:
    backend = Triton(kind="triton", url=url, model="echo", sessions=sessions)
    pool = WorkerPool(backend, DECLARED, name="echo", clock=LoopClock(asyncio.get_running_loop()))
    await pool.open()
    return pool


def by_pool(pool: WorkerPool) -> Call:
    loop = asyncio.get_running_loop()

    async def call(array: np.ndarray) -> None:
        now_ns = time.monotonic_ns()
        request = InferRequest("echo", "1", "", {"X": array}, 8, now_ns)
        batch = Batch(parts=[Part(request, 0, 8)], rows=8, padded_rows=8, reason="", closed_ns=now_ns)
        ended: asyncio.Future[Execution] = loop.create_future()
        pool.start(batch, lambda _, execution: ended.set_result(execution))
        if (error := (await ended).error) is not None:
            raise error

    return call


def by_aio(url: str) -> Call:
    import grpc.aio
    from tritonclient.grpc import service_pb2_grpc

    channel = grpc.aio.insecure_channel(url, options=[("grpc.use_local_subchannel_pool", 1)])
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    model = TritonModel(
        DECLARED, (url,), model="echo", model_version="", timeout_s=30.0, drain_s=None, shared_memory=False, repair=False
    )
    message = TritonSession(model, TritonConnection(url, "echo", ""))  # only to build requests as the backend does

    async def call(array: np.ndarray) -> None:
        request = message._connection.pb.ModelInferRequest(model_name="echo")
        message._fill(request, {"X": array})
        response = await stub.ModelInfer(request, timeout=30.0)
        assert np.frombuffer(response.raw_output_contents[0], np.float32).shape == (8,)

    return call


def infer_by_future(connection: TritonConnection, request: Any, timeout_s: float, metadata: Metadata = ()) -> Any:
    return connection.stub.ModelInfer.future(request, timeout=timeout_s, metadata=metadata).result()


async def measure(calls: list[Call], array: np.ndarray, seconds: float) -> tuple[float, list[float]]:
    """CPU microseconds per call, and how long each took."""
    took_ms: list[float] = []
    end = time.perf_counter() + seconds

    async def repeat(call: Call) -> None:
        while (started := time.perf_counter()) < end:
            await call(array)
            took_ms.append((time.perf_counter() - started) * 1e3)

    await asyncio.gather(*(call(array) for call in calls))
    cpu = time.process_time()
    await asyncio.gather(*(repeat(call) for call in calls))
    return (time.process_time() - cpu) * 1e6 / len(took_ms), took_ms


if __name__ == "__main__":
    main()
