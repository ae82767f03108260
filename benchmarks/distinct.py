"""Whether anything is ever answered with another's answer: distinct requests on every path, each answer checked.

    python -m benchmarks.distinct [--requests 100000] [PLACE/WAY …]

A path is where the model runs (loop: by ONNX Runtime, on the event loop once it is known to be short; thread, process, triton:
all one process without Ray; embedded, replicas, nodes: on Ray, the last on another node than the ingress) and how it is asked
(json, binary, grpc, stream). Every request has numbers of its own in one to three rows. 64 are under way at once, on as many
connections by REST and on one by gRPC, and each answer must be its own, by id and by every number. Of every second thousand
none has an id, so that what is around their numbers repeats, which the gateway remembers. Printed for each path: requests,
answers per second, errors, wrong answers. Exit code 1 if there is one of the last two. `triton` needs `make triton`.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import grpc
import numpy as np
import uvloop
import yaml
from tritonclient.grpc import service_pb2 as pb

from tests.triton_server import triton_server, write_model

PLACES: Final = {"plain": ("loop", "thread", "process", "triton"), "ray": ("embedded", "replicas", "nodes")}
WAYS: Final = ("json", "binary", "grpc", "stream")
AT_ONCE: Final = 64
COLUMNS: Final = 3
CODE: Final = """
def predict(inputs):
    return {"Y": inputs["X"] * 2 + 1}
"""
TRITON_CONFIG: Final = """max_batch_size: 32
input { name: "X" data_type: TYPE_INT64 dims: [3] }
output { name: "Y" data_type: TYPE_INT64 dims: [3] }
"""
TRITON_CODE: Final = """
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("Y", array * 2 + 1)]) for array in inputs]
"""


def numbers(index: int) -> np.ndarray:
    """What request `index` carries. Shape: (1 to 3, COLUMNS)."""
    return np.arange(COLUMNS * (1 + index % 3), dtype=np.int64).reshape(-1, COLUMNS) + 1000 * index


def id_of(index: int) -> str:
    return "" if index // 1000 % 2 else str(index)


def is_right(index: int, own_id: str, raw: bytes) -> bool:
    return own_id == id_of(index) and raw == (numbers(index) * 2 + 1).tobytes()


class Count:
    def __init__(self) -> None:
        self.errors = 0
        self.wrong = 0
        self.first = ""  # of either, in words

    def error(self, what: str) -> None:
        self.errors += 1
        self.first = self.first or what

    def check(self, index: int, own_id: str, raw: bytes) -> None:
        if not is_right(index, own_id, raw):
            self.wrong += 1
            self.first = self.first or f"request {index} got the answer {own_id!r}, {np.frombuffer(raw, np.int64)[:6]}"


# how it is asked


def rest_request(model: str, index: int, *, binary: bool) -> bytes:
    array = numbers(index)
    tensor: dict[str, Any] = {"name": "X", "datatype": "INT64", "shape": list(array.shape)}
    body: dict[str, Any] = {"inputs": [tensor]}
    if own_id := id_of(index):
        body["id"] = own_id
    if binary:
        tensor["parameters"] = {"binary_data_size": array.nbytes}
        body["parameters"] = {"binary_data_output": True}
        header = json.dumps(body).encode()
        payload, extra = header + array.tobytes(), f"Inference-Header-Content-Length: {len(header)}\r\n"
    else:
        tensor["data"] = array.ravel().tolist()
        payload, extra = json.dumps(body).encode(), ""
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n{extra}Content-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


async def by_rest(port: int, model: str, requests: Iterator[int], count: Count, *, binary: bool) -> None:
    async def one_connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for index in requests:
            writer.write(rest_request(model, index, binary=binary))
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            body = await reader.readexactly(int(fields["content-length"]))
            if " 200 " not in head[:16]:
                count.error(body.decode())
                continue
            json_bytes = int(fields.get("inference-header-content-length", len(body)))
            answer = json.loads(body[:json_bytes])
            data = answer["outputs"][0].get("data")
            raw = body[json_bytes:] if data is None else np.array(data, np.int64).tobytes()
            count.check(index, answer.get("id", ""), raw)
        writer.close()

    await asyncio.gather(*(one_connection() for _ in range(AT_ONCE)))


def message(model: str, index: int) -> bytes:
    array = numbers(index)
    request = pb.ModelInferRequest(model_name=model, id=id_of(index), raw_input_contents=[array.tobytes()])
    request.inputs.add(name="X", datatype="INT64", shape=array.shape)
    return bytes(request.SerializeToString())


async def by_grpc(port: int, model: str, requests: Iterator[int], count: Count) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", response_deserializer=pb.ModelInferResponse.FromString
        )

        async def one_after_another() -> None:
            for index in requests:
                try:
                    answer = await infer(message(model, index))
                except grpc.aio.AioRpcError as exc:
                    count.error(f"{exc.code().name}: {exc.details()}")
                    continue
                count.check(index, answer.id, answer.raw_output_contents[0])

        await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))


async def by_stream(port: int, model: str, requests: Iterator[int], count: Count) -> None:
    """Answers of a stream come in the order of its requests."""
    room = asyncio.Semaphore(AT_ONCE)
    asked: list[int] = []

    async def messages() -> AsyncIterator[bytes]:
        for index in requests:
            await room.acquire()
            asked.append(index)
            yield message(model, index)

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        answered = 0
        async for answer in infer(messages()):
            room.release()
            if answer.error_message:
                count.error(answer.error_message)
            else:
                count.check(asked[answered], answer.infer_response.id, answer.infer_response.raw_output_contents[0])
            answered += 1
        for _ in range(len(asked) - answered):
            count.error("a request of the stream was not answered")


async def ask(ports: tuple[int, int], model: str, way: str, total: int) -> tuple[Count, float]:
    """Gives also the seconds it took."""
    count, requests, began = Count(), iter(range(total)), time.monotonic()
    if way in ("json", "binary"):
        await by_rest(ports[0], model, requests, count, binary=way == "binary")
    else:
        await (by_grpc if way == "grpc" else by_stream)(ports[1], model, requests, count)
    return count, time.monotonic() - began


# where it runs


def configuration(folder: Path, places: list[str], triton: str) -> dict[str, Any]:
    own = {"kind": "python", "model": f"{folder / 'model.py'}:predict", "sessions": 2}
    backends: dict[str, dict[str, Any]] = {
        "loop": {"kind": "onnxruntime", "model": str(folder / "model.onnx"), "sessions": 2},
        "thread": own,
        "process": own | {"isolation": "process"},
        "triton": {"kind": "triton", "url": triton, "model": "distinct", "sessions": 2},
        "embedded": own,
        "replicas": own | {"placement": "replicas", "replicas": 2},
        "nodes": own | {"placement": "replicas", "resources": {"far": 0.1}},
    }
    shape = [-1, COLUMNS]
    return {
        "models": [
            {
                "name": place,
                "max_rows": 32,
                "inputs": [{"name": "X", "datatype": "INT64", "shape": shape}],
                "outputs": [{"name": "Y", "datatype": "INT64", "shape": shape}],
                "backends": [backends[place]],
            }
            for place in places
        ]
    }


def write_onnx(path: Path) -> None:
    """The same as CODE."""
    from onnx import TensorProto, helper, save

    nodes = [helper.make_node("Mul", ["X", "two"], ["twice"]), helper.make_node("Add", ["twice", "one"], ["Y"])]
    tensors = [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", COLUMNS]) for name in "XY"]
    numbers = [helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in (("two", 2), ("one", 1))]
    graph = helper.make_graph(nodes, "double", tensors[:1], tensors[1:], numbers)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


@contextlib.contextmanager
def serving(host: str, places: list[str], folder: Path) -> Iterator[tuple[int, int]]:
    """A gateway with these models; gives its ports."""
    with contextlib.ExitStack() as stack:
        triton, options = "", list[str]()
        if "triton" in places:
            write_model(folder / "triton" / "models", "distinct", TRITON_CONFIG, TRITON_CODE)
            triton = stack.enter_context(triton_server(folder / "triton")).grpc_url
        if host == "ray":
            options += ["--ray-address", stack.enter_context(two_nodes())]
        (folder / "model.py").write_text(CODE)
        if "loop" in places:
            write_onnx(folder / "model.onnx")
        path = folder / f"{host}.yaml"
        path.write_text(yaml.safe_dump(configuration(folder, places, triton)))
        yield stack.enter_context(gateway_of(path, *options))


@contextlib.contextmanager
def gateway_of(path: Path, *options: str) -> Iterator[tuple[int, int]]:
    """`gateway serve` in a process of its own; gives its ports for REST and gRPC."""
    command = [sys.executable, "-m", "gateway.cli", "serve", str(path), "--http-port", "0", "--grpc-port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "ready" not in line:
            raise SystemExit(f"the gateway did not start: {line}")
        found = dict(word.split("=") for word in line.split() if "=" in word)
        yield int(found["http"].rpartition(":")[2]), int(found["grpc"].rpartition(":")[2])
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """A cluster of this machine's own; gives its address. What needs `far` is not on the first node."""
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"object_store_memory": 100 << 20, "include_dashboard": False}
    # Not 127.0.0.1: Ray would take that for the address of the machine's network card.
    cluster = Cluster(initialize_head=True, head_node_args=node | {"num_cpus": 4, "node_ip_address": "127.0.0.2"})
    try:
        cluster.add_node(object_store_memory=100 << 20, num_cpus=4, node_ip_address="127.0.0.3", resources={"far": 1.0})
        yield cluster.address
    finally:
        cluster.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{place}/{way}" for place, way in itertools.product(itertools.chain(*PLACES.values()), WAYS)]
    parser.add_argument("paths", nargs="*", metavar="PLACE/WAY", choices=[*every, []], help="default: all of them")
    parser.add_argument("--requests", type=int, default=100_000, help="on each path")
    arguments = parser.parse_args()
    paths = arguments.paths or every
    faults = 0
    for host, known in PLACES.items():
        places = [place for place in known if any(path.startswith(f"{place}/") for path in paths)]
        if not places:
            continue
        with tempfile.TemporaryDirectory() as temporary, serving(host, places, Path(temporary)) as ports:
            for path in paths:
                place, way = path.split("/")
                if place not in places:
                    continue
                count, seconds = uvloop.run(ask(ports, place, way, arguments.requests))
                faults += count.errors + count.wrong
                told = f"{count.errors} errors, {count.wrong} wrong answers {count.first}"
                print(f"{path:16} {arguments.requests} requests, {arguments.requests / seconds:6.0f}/s: {told}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
