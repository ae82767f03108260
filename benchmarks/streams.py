"""How long a part of an answer takes from a session's `yield` to the client, over many streams at once.

    python -m benchmarks.streams embedded|process|replicas [--streams 64] [--parts-per-second 20] [--seconds 10] [--replicas 1]
                                 [--unary 0]

A Python model yields the time, over and over; each stream is a ModelStreamInfer of grpc.aio's with one request, begun at a time
of its own, on one of eight connections. The client is this process, the gateway another; what is measured is from before the
`yield` to grpc.aio's delivery. `embedded`: the sessions are threads of the gateway's; `process`: processes of its own;
`replicas`: threads of replicas on a Ray that is started for this. The first second is left out. A part that is lost or out of
order is an error. Milliseconds, and the load average before. --unary: so many requests a second of another model of the same
kind, which has two sessions of its own and is not decoupled: their p99 alone, and beside the streams.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import grpc
import numpy as np
import uvloop
import yaml
from tritonclient.grpc import service_pb2 as pb

from benchmarks.distinct import gateway_of

CONNECTIONS: Final = 8
WARM_UP_S: Final = 1.0
MODEL: Final = """
import time
import numpy as np

class Ticks:
    def predict(self, inputs, parameters):
        pause_s = 1 / parameters["per_second"]
        due_s = time.monotonic()
        index = 0
        while True:
            yield {"INDEX_AND_NS": np.array([[index, time.time_ns()]])}
            index += 1
            due_s += pause_s
            time.sleep(max(0.0, due_s - time.monotonic()))

class Plain:
    def predict(self, inputs):
        return {"Y": inputs["X"]}
"""


def configuration(folder: Path, way: str, streams: int, replicas: int) -> dict[str, Any]:
    (folder / "ticks.py").write_text(MODEL)
    backend: dict[str, Any] = {"kind": "python", "model": f"{folder}/ticks.py:Ticks", "sessions": streams}
    if way == "process":
        backend["isolation"] = "process"
    elif way == "replicas":
        backend |= {"placement": "replicas", "replicas": replicas, "sessions": -(-streams // replicas)}
    plain = backend | {"model": f"{folder}/ticks.py:Plain", "sessions": 2}
    return {
        "models": [
            {
                "name": "plain",
                "max_rows": 8,
                "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 1]}],
                "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 1]}],
                "backends": [plain],
            },
            {
                "name": "ticks",
                "max_rows": 1,
                "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 1]}],
                "outputs": [{"name": "INDEX_AND_NS", "datatype": "INT64", "shape": [-1, 2]}],
                "batching": {"probe_s": 0.0},
                "backends": [backend],
            },
        ]
    }


@contextlib.contextmanager
def serving(way: str, streams: int, replicas: int) -> Iterator[int]:
    """A gateway; gives its gRPC port."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        options: list[str] = []
        if way == "replicas":
            options += ["--ray-address", stack.enter_context(node())]
        path = Path(temporary) / "streams.yaml"
        path.write_text(yaml.safe_dump(configuration(Path(temporary), way, streams, replicas)))
        yield stack.enter_context(gateway_of(path, *options))[1]


@contextlib.contextmanager
def node() -> Iterator[str]:
    """A Ray of this machine's own; gives its address."""
    from ray.cluster_utils import Cluster

    # Not 127.0.0.1: Ray would take that for the address of the machine's network card.
    own = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args=own)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def request_for(model: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[np.zeros(1, np.float32).tobytes()])
    request.inputs.add(name="X", datatype="FP32", shape=[1, 1])
    return request


async def unary(port: int, per_second: float, seconds: float) -> list[float]:
    """How long each request took, in ms, from when it was due."""
    message = request_for("plain").SerializeToString()
    pick = random.Random(1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        async def one(due_s: float) -> float:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await infer(message)
            return (time.monotonic() - due_s) * 1e3

        due_s = time.monotonic() + WARM_UP_S
        dues = [due_s := due_s + pick.expovariate(per_second) for _ in range(round(per_second * seconds))]
        return await asyncio.gather(*map(one, dues))


async def stream(channel: grpc.aio.Channel, per_second: float, begin_s: float, seconds: float) -> list[tuple[int, bytes]]:
    """When each part was here, in ns since the epoch, and what it was. begin_s: to wait before."""
    request = request_for("ticks")
    request.parameters["per_second"].double_param = per_second
    infer = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer", request_serializer=pb.ModelInferRequest.SerializeToString
    )
    await asyncio.sleep(begin_s)
    call = infer(iter([request]))
    came: list[tuple[int, bytes]] = []
    ends_s = time.monotonic() + WARM_UP_S + seconds
    while time.monotonic() < ends_s and (data := await call.read()) is not grpc.aio.EOF:
        came.append((time.time_ns(), data))
    call.cancel()
    return came


async def measure(port: int, given: argparse.Namespace) -> tuple[list[list[tuple[int, bytes]]], list[list[float]]]:
    """What came of each stream; and the times of unary requests alone and beside the streams, if there are to be any."""
    alone = await unary(port, given.unary, given.seconds) if given.unary else []
    streaming = asyncio.ensure_future(streams(port, given.streams, given.parts_per_second, given.seconds))
    beside = await unary(port, given.unary, given.seconds) if given.unary else []
    return await streaming, [alone, beside] if given.unary else []


async def streams(port: int, streams: int, per_second: float, seconds: float) -> list[list[tuple[int, bytes]]]:
    pick = random.Random(0)
    channels = [
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(CONNECTIONS)
    ]
    found = await asyncio.gather(
        *(stream(channels[number % CONNECTIONS], per_second, pick.random(), seconds) for number in range(streams))
    )
    await asyncio.gather(*(channel.close() for channel in channels))
    return found


def tell(way: str, found: list[list[tuple[int, bytes]]], load: float) -> int:
    """Print the figures. Gives the exit code."""
    ways_ms: list[float] = []
    gaps_ms: list[float] = []
    wrong = 0
    for came in found:
        before_ns = 0
        begun_ns = came[0][0] if came else 0
        for number, (at_ns, data) in enumerate(came):
            reply = pb.ModelStreamInferResponse.FromString(data)
            if reply.error_message:
                print(reply.error_message)
                wrong += 1
                break
            index, made_ns = np.frombuffer(reply.infer_response.raw_output_contents[0], np.int64)
            wrong += int(index) != number
            if before_ns and at_ns - begun_ns > WARM_UP_S * 1e9:
                ways_ms.append((at_ns - int(made_ns)) / 1e6)
                gaps_ms.append((at_ns - before_ns) / 1e6)
            before_ns = at_ns
    wrong += sum(not came for came in found)
    if not ways_ms:
        print("no parts came")
        return 1
    for what, taken in (("yield to client", ways_ms), ("gap", gaps_ms)):
        p50, p99 = np.percentile(taken, [50, 99])
        print(f"{way}: {what}: median {p50:.2f} ms, p99 {p99:.2f} ms")
    print(f"{way}: {len(ways_ms)} parts of {len(found)} streams, {wrong} errors, load average {load:.2f} before")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("way", choices=("embedded", "process", "replicas"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--parts-per-second", type=float, default=20.0, help="of each stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--unary", type=float, default=0.0, help="requests a second of another model")
    parser.add_argument("--replicas", type=int, default=1, help="on this node, that share the streams")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with serving(given.way, given.streams, given.replicas) as port:
        found, unary_ms = uvloop.run(measure(port, given))
    if unary_ms:
        alone, beside = (float(np.percentile(taken, 99)) for taken in unary_ms)
        print(f"{given.way}: unary p99 {alone:.2f} ms alone, {beside:.2f} ms beside the streams, {beside / alone:.2f} times")
    return tell(given.way, found, load)


if __name__ == "__main__":
    sys.exit(main())
