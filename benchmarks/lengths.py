"""Mixed lengths on the real minilm: the shipped example, what one could set instead, and a real Triton (`make triton`).

    python -m benchmarks.lengths                                  three rounds, some two minutes
    python -m benchmarks.lengths --before ../before               beside another checkout, as `git worktree add` makes
    python -m benchmarks.lengths --triton --rates 80 110 140      beside Triton, also with the SLO, at these requests/s
    python -m benchmarks.lengths --model minilm-text --rates 40 50 60 80    texts, with a tokeniser in front of the model

Each run starts `gateway serve --no-ray` with the model of configs/examples/minilm.yaml, without its SLO, and asks it over REST
in a closed loop: sixteen lengths of 6 to 120 tokens, drawn at random, the same for all; `minilm-text` as many texts, of 5 to 95
words. With --rates it asks again with the example's SLO, of a server started anew, at random times that do not wait for answers
(Poisson, the same for all): what is answered in time counts. Variants take turns within each round, so that the machine's mood
is shared; the round's order is turned each time.

Triton has its dynamic batcher, which joins requests of one shape, and its python backend with onnxruntime: as many instances of
one thread as the example has sessions, of the model as torch.onnx exports it. `triton-our-file` has the gateway's file, as
`gateway compile` makes it. With the SLO also as `triton-timeout`, whose queue refuses what has waited for so long.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import yaml

from backends import onnx_export
from gateway.config import load_config
from tests.triton_server import triton_server, write_model

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = tuple(round(length) for length in np.linspace(6, 120, 16))
FINE = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]
WORDS = tuple(round(words) for words in np.linspace(5, 95, 16))
SLO_MS = 250  # of the example

TRITON_CONFIG = """
max_batch_size: 32
input [{ name: "input_ids" data_type: TYPE_INT64 dims: [-1] }, { name: "attention_mask" data_type: TYPE_INT64 dims: [-1] }]
output [{ name: "embedding" data_type: TYPE_FP32 dims: [384] }]
instance_group [{ count: 2 kind: KIND_CPU }]
dynamic_batching { %s }
"""
QUEUE_TIMEOUT = "default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 250000 }"
TRITON_CODE = """
import json
import os
import sys

import numpy as np
import triton_python_backend_utils as pb

with open(os.path.join(os.path.dirname(os.path.dirname(__file__)), "paths.json")) as found:
    PATHS = json.load(found)
sys.path.append(PATHS["packages"])  # onnxruntime's, behind those of Triton
import onnxruntime


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(PATHS["model"], options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        names = ("input_ids", "attention_mask")
        tensors = {name: [pb.get_input_tensor_by_name(one, name).as_numpy() for one in requests] for name in names}
        (result,) = self.session.run(["embedding"], {name: np.concatenate(each) for name, each in tensors.items()})
        responses, at = [], 0
        for one in tensors["input_ids"]:
            responses.append(pb.InferenceResponse([pb.Tensor("embedding", result[at : at + len(one)])]))
            at += len(one)
        return responses
"""

Server = Callable[[bool], AbstractContextManager[str]]  # given whether the SLO is promised: where it listens


def as_shipped(model: dict[str, Any]) -> None: ...


def without_ragged(model: dict[str, Any]) -> None:
    model.pop("ragged", None)  # another checkout's may have none


def fine_buckets(model: dict[str, Any]) -> None:
    model["ragged"]["buckets"] = FINE


def no_buckets(model: dict[str, Any]) -> None:
    model["ragged"].pop("buckets", None)


def coarse_buckets(model: dict[str, Any]) -> None:
    model["ragged"]["buckets"] = [16, 32, 64, 128, 256]


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "shipped": as_shipped,
    "without-ragged": without_ragged,
    "fine-buckets": fine_buckets,
    "coarse-buckets": coarse_buckets,
    "no-buckets": no_buckets,
}


@contextmanager
def gateway(checkout: Path, name: str, change: Callable[[dict[str, Any]], None], promise: bool) -> Iterator[str]:
    """Where a gateway of that checkout listens. name: of the example's model. promise: with the example's SLO."""
    example = checkout / "configs" / "examples" / "minilm.yaml"
    (model,) = [model for model in yaml.safe_load(example.read_text())["models"] if model["name"] == name]
    if not promise:
        del model["slo"]
    change(model)
    for backend in model["backends"]:
        backend["model"] = str((example.parent / backend["model"]).resolve())
        backend.pop("build", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lengths.yaml")
        path.write_text(yaml.safe_dump({"models": [model]}))
        command = [sys.executable, "-m", "gateway", "serve", str(path), "--no-ray", "--quiet"]
        command += ["--http-port", "0", "--grpc-port", "0"]
        with subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": str(checkout)}, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().split("http=")[1].split()[0]
            finally:
                process.terminate()


@contextmanager
def triton(model: Path, queue_policy: str, promise: bool) -> Iterator[str]:
    """Where a Triton listens. model: an .onnx file."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "models"), "minilm", TRITON_CONFIG % (queue_policy if promise else ""), TRITON_CODE)
        paths = {"model": str(model), "packages": str(Path(onnxruntime.__file__).parent.parent)}
        Path(folder, "models", "minilm", "paths.json").write_text(json.dumps(paths))
        with triton_server(Path(folder)) as server:
            yield server.http_url


def exported() -> Path:
    """The example's model as torch.onnx exports it; made once."""
    path = ROOT / "models" / "minilm-exported.onnx"
    if not path.exists():
        model = load_config(str(ROOT / "configs" / "examples" / "minilm.yaml")).models[0]
        onnx_export.build(path, model.declared(), source=str(ROOT / "configs" / "examples" / "minilm.py:embedder"), options={})
    return path


def requests(address: str, name: str) -> list[bytes]:
    """The shorter first."""
    if name == "minilm-text":
        words = iter((ROOT / "configs" / "loadtests" / "sentences.txt").read_text().split())
        texts = [" ".join(islice(words, count)) for count in WORDS]
        asked = [[{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [text]}] for text in texts]
    else:
        asked = []
        for length in LENGTHS:
            tokens = {"input_ids": [101, *range(2000, 1998 + length), 102], "attention_mask": [1] * length}
            asked.append(
                [{"name": each, "datatype": "INT64", "shape": [1, length], "data": data} for each, data in tokens.items()]
            )
    found = []
    for tensors in asked:
        body = json.dumps({"inputs": tensors}).encode()
        head = f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n\r\n"
        found.append(head.encode() + body)
    return found


async def load(asked: Sequence[bytes], address: str, connections: int, seconds: float, warm_up_s: float) -> "Served":
    """A closed loop: what was answered after the warm-up."""
    drawn = iter(np.random.default_rng(17).choice(len(asked), 100_000).tolist())
    begin = time.monotonic() + warm_up_s
    end = begin + seconds
    found: list[float] = []

    async def taken() -> tuple[float, float]:
        await asyncio.sleep(warm_up_s)
        before = cpu_of_children_s(os.getpid()), time.process_time(), busy_s()
        await asyncio.sleep(end - time.monotonic())
        server_s = cpu_of_children_s(os.getpid()) - before[0]
        return server_s, busy_s() - before[2] - server_s - (time.process_time() - before[1])

    async def connection() -> None:
        streams = await opened(address)
        while (sent := time.monotonic()) < end:
            assert await answered(streams, asked[next(drawn)])
            now = time.monotonic()
            if begin <= now < end:
                found.append((now - sent) * 1e3)
        streams[1].close()

    times = asyncio.create_task(taken())
    await asyncio.gather(*[connection() for _ in range(connections)])
    server_s, others_s = await times
    return Served.of(found, len(found) / seconds, server_s * 1e3 / len(found), max(0.0, others_s) / seconds)


async def offer(asked: Sequence[bytes], address: str, rate: float, seconds: float, warm_up_s: float) -> "Served":
    """Requests at random times, each due whatever became of those before; those due after the warm-up count."""
    lots = np.random.default_rng(17)
    due = np.cumsum(lots.exponential(1 / rate, round(2 * rate * (seconds + warm_up_s))))
    due = due[due < seconds + warm_up_s]
    drawn = lots.choice(len(asked), len(due)).tolist()
    idle: list[Streams] = []
    found: list[float] = []
    begin = time.monotonic()

    async def one(due_s: float, which: int) -> None:
        streams = idle.pop() if idle else await opened(address)
        good = await answered(streams, asked[which])
        idle.append(streams)
        if good and due_s >= warm_up_s:
            found.append((time.monotonic() - begin - due_s) * 1e3)

    running = []
    for due_s, which in zip(due.tolist(), drawn, strict=True):
        await asyncio.sleep(begin + due_s - time.monotonic())
        running.append(asyncio.create_task(one(due_s, which)))
    await asyncio.gather(*running)
    for _, writer in idle:
        writer.close()
    return Served.of(found, sum(each <= SLO_MS for each in found) / seconds)


def cpu_of_children_s(pid: int) -> float:
    """CPU time that the processes below this one have taken."""
    taken_s = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            taken_s += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + cpu_of_children_s(int(child))
    return taken_s


def busy_s() -> float:
    """CPU time that all of this machine have taken."""
    user, nice, system, _, _, hard, soft = Path("/proc/stat").read_text().split()[1:8]
    return sum(map(int, (user, nice, system, hard, soft))) / os.sysconf("SC_CLK_TCK")


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(address: str) -> Streams:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def answered(streams: Streams, request: bytes) -> bool:
    """Whether it was, with a result."""
    reader, writer = streams
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(size.split(b":")[1]))
    return head.startswith(b"HTTP/1.1 200")


class Served(NamedTuple):
    """rps: of a closed loop all that were answered, else those in time. Latencies of all that were answered, in ms.

    Of a closed loop also cpu_ms: of the server for each request; and others: cores that other work on the machine took.
    """

    rps: float
    p50: float
    p99: float
    most: float
    cpu_ms: float
    others: float

    @classmethod
    def of(cls, latencies_ms: list[float], rps: float, cpu_ms: float = math.nan, others: float = math.nan) -> "Served":
        p50, p99, most = np.percentile(latencies_ms or [math.nan], (50, 99, 100))
        return cls(rps, float(p50), float(p99), float(most), cpu_ms, others)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", choices=["minilm", "minilm-text"])
    parser.add_argument("--variants", nargs="+", default=["shipped", "without-ragged"], choices=CHANGES)
    parser.add_argument("--triton", action="store_true", help="Triton takes part")
    parser.add_argument("--before", type=Path, help="another checkout, whose gateway takes part")
    parser.add_argument("--before-variants", nargs="+", default=["shipped", "without-ragged", "fine-buckets"], choices=CHANGES)
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="requests/s to ask with the SLO")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32, help="of the closed loop; 0: none")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run, after the warm-up")
    parser.add_argument("--warm-up", type=float, default=3.0)
    arguments = parser.parse_args()
    servers: dict[str, Server] = {name: partial(gateway, ROOT, arguments.model, CHANGES[name]) for name in arguments.variants}
    if arguments.before:
        for name in arguments.before_variants:
            servers[f"before-{name}"] = partial(gateway, arguments.before.resolve(), arguments.model, CHANGES[name])
    if arguments.triton and arguments.model != "minilm":
        parser.error("--triton: it is asked tokens, with --model minilm")
    if arguments.triton:
        servers["triton"] = partial(triton, exported(), "")
        servers["triton-our-file"] = partial(triton, ROOT / "models" / "minilm.onnx", "")
        servers["triton-timeout"] = partial(triton, exported(), QUEUE_TIMEOUT)
    loads = [0.0] * (arguments.connections > 0) + arguments.rates
    figures: dict[tuple[float, str], list[Served]] = {}
    for number in range(arguments.rounds):
        for rate in loads:
            names = [name for name in servers if rate or name != "triton-timeout"]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                with servers[name](rate > 0) as address:
                    asked = requests(address, arguments.model)
                    run = (
                        offer(asked, address, rate, arguments.seconds, arguments.warm_up)
                        if rate
                        else load(asked, address, arguments.connections, arguments.seconds, arguments.warm_up)
                    )
                    served = asyncio.run(run)
                figures.setdefault((rate, name), []).append(served)
                print(f"  {number + 1} {told(rate, name, served)}", flush=True)
    print("medians                           rps   p50_ms  p99_ms  max_ms  cpu_ms  others")
    for (rate, name), rounds in figures.items():
        print(f"    {told(rate, name, [statistics.median(column) for column in zip(*rounds, strict=True)])}")
    return 0


def told(rate: float, name: str, figures: Sequence[float]) -> str:
    return f"{f'{rate:g}/s, in time' if rate else 'closed loop':16} {name:16}" + " ".join(
        f"{figure:7.2f}" for figure in figures
    )


if __name__ == "__main__":
    sys.exit(main())
