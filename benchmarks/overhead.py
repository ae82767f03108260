"""What the gateway adds to a model that costs next to nothing, beside a plain Ray Serve application, in one run.

    make bench                                          everything, about 12 minutes
    python -m benchmarks.overhead --seconds 3 --only plain,serve
    python -m benchmarks.overhead --only plain,replicas,triton --protocols rest-json --connections 1,64 --rounds 3

Servers, one after the other on this machine, each doing Linear(16, 4) by the v2 protocol, one row a request:

    bare        the HTTP listener alone with a null handler
    plain       gateway serve --no-ray: sessions in the listener's process
    embedded    gateway serve --ray: the same, as a Ray Serve deployment
    replicas    gateway serve, placement: replicas: one frame on a channel per batch
    serve       FastAPI ingress and @serve.batch on Serve's own proxies (benchmarks/serve_peer.py)
    triton      a real Triton (`make triton`) with its python backend and its dynamic batcher; not among the default
    embedded-2, triton-2    with two ingress processes, with two instances of the model: one a core; not among the default

The servers take turns in every round; of several rounds the ratios are medians. Loads: wrk (REST) and h2load (gRPC), closed
loop, the same for all. Client and server share the machine, so only ratios within a run mean something. Needs `wrk` and
`h2load` (Debian: wrk, nghttp2-client).
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import yaml
from tritonclient.grpc import service_pb2 as pb

from benchmarks.ports import free_port
from benchmarks.processor_time import cpu_between, cpu_s
from gateway.config import located
from tests.triton_server import triton_server, write_model

CONNECTIONS = (1, 32, 64)
PROTOCOLS = ("rest-json", "rest-binary", "grpc")
PATH = "/v2/models/linear/infer"
ROW = np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 16)
TRITON_CONFIG = """max_batch_size: 32
input { name: "INPUT0" data_type: TYPE_FP32 dims: [16] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }
dynamic_batching { }
"""
TRITON_MODEL = """
import os

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        weights = np.load(os.path.join(args["model_repository"], "weights.npz"))
        self.weight, self.bias = weights["weight"], weights["bias"]

    def execute(self, requests):
        rows = [pb.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        result = np.concatenate(rows) @ self.weight + self.bias
        responses, at = [], 0
        for one in rows:
            responses.append(pb.InferenceResponse([pb.Tensor("OUTPUT0", result[at : at + len(one)])]))
            at += len(one)
        return responses
"""
PY_SPY = Path(sys.executable).with_name("py-spy")


@dataclass(frozen=True)
class Server:
    """One running server. processes: those whose CPU counts as its own."""

    name: str
    http_port: int
    grpc_port: int
    processes: list[psutil.Process]


@dataclass(frozen=True)
class Figure:
    server: str
    protocol: str
    connections: int
    rps: float
    p50_ms: float
    p99_ms: float
    errors: int
    cpu_us: float  # of the server's processes, per request


@contextlib.contextmanager
def running(name: str, directory: Path) -> Iterator[Server]:
    """Start one of the servers, and end it and all it started."""
    if name in ("triton", "triton-2"):
        with triton(name, directory) as server:
            yield server
        return
    http, grpc = free_port(), free_port()
    ports = ["--http-port", str(http), "--grpc-port", str(grpc)]
    own_ray = ["--ray-address", "local"]
    gateway = [sys.executable, "-m", "gateway.cli", "serve"]
    match name:
        case "bare":
            command = [sys.executable, "-m", "benchmarks.overhead", "--serve-bare", str(http)]
        case "plain":
            command = [*gateway, "configs/examples/linear.yaml", "--no-ray", *ports]
        case "embedded":
            command = [*gateway, "configs/examples/linear.yaml", *ports, *own_ray]
        case "replicas" | "embedded-2":
            example = Path("configs/examples/linear.yaml").absolute()
            config = located(yaml.safe_load(example.read_text()), example.parent)
            if name == "replicas":
                config["models"][0]["backends"][0]["placement"] = "replicas"
            else:
                config["server"] = {"ingress_replicas": 2}
            path = directory / f"{name}.yaml"
            path.write_text(yaml.safe_dump(config))
            command = [*gateway, str(path), *ports, *own_ray]
        case "serve":
            command = [sys.executable, "benchmarks/serve_peer.py", *ports]
        case _:
            raise SystemExit(f"unknown server {name!r}")
    log = (directory / f"{name}.log").open("w")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        line = process.stdout.readline()
        if "ready" not in line:
            raise SystemExit(f"{name} did not start: {line}\n{(directory / f'{name}.log').read_text()[-3000:]}")
        root = psutil.Process(process.pid)
        ours = [root, *root.children(recursive=True)]
        yield Server(name, http, grpc, [found for found in ours if serves(found)])
    finally:
        process.stdin.close()
        if name != "serve":
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


@contextlib.contextmanager
def triton(name: str, directory: Path) -> Iterator[Server]:
    import onnxruntime

    session = onnxruntime.InferenceSession("models/linear.onnx")
    bias = session.run(None, {"INPUT0": np.zeros((1, 16), np.float32)})[0]
    weight = session.run(None, {"INPUT0": np.eye(16, dtype=np.float32)})[0] - bias
    with tempfile.TemporaryDirectory(dir=directory) as fresh:
        folder = Path(fresh)
        instances = "instance_group [{ count: 2 kind: KIND_CPU }]\n" if name == "triton-2" else ""
        write_model(folder / "models", "linear", TRITON_CONFIG + instances, TRITON_MODEL)
        np.savez(folder / "models" / "linear" / "weights.npz", weight=weight, bias=bias)
        with triton_server(folder) as found:
            root = psutil.Process(found.pid)
            ports = [int(url.rpartition(":")[2]) for url in (found.http_url, found.grpc_url)]
            yield Server(name, ports[0], ports[1], [root, *root.children(recursive=True)])


def serves(process: psutil.Process) -> bool:
    # Ray's own daemons (raylet, gcs, agents) idle along whatever the load; the drivers and workers are what serves.
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "ray::" in line or "gateway.cli" in line or "benchmarks" in line


def bodies() -> dict[str, tuple[bytes, dict[str, str]]]:
    """The request bytes and headers of each protocol, made by tritonclient."""
    tensor = httpclient.InferInput("INPUT0", [1, 16], "FP32")
    tensor.set_data_from_numpy(ROW, binary_data=False)
    output = httpclient.InferRequestedOutput("OUTPUT0", binary_data=False)
    text, _ = httpclient.InferenceServerClient.generate_request_body([tensor], outputs=[output])
    tensor.set_data_from_numpy(ROW, binary_data=True)
    output = httpclient.InferRequestedOutput("OUTPUT0", binary_data=True)
    binary, length = httpclient.InferenceServerClient.generate_request_body([tensor], outputs=[output])
    request = pb.ModelInferRequest(model_name="linear", raw_input_contents=[ROW.tobytes()])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    message = request.SerializeToString()
    return {
        "rest-json": (bytes(text), {"Content-Type": "application/json"}),
        "rest-binary": (
            bytes(binary),
            {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(length)},
        ),
        "grpc": (b"\x00" + len(message).to_bytes(4, "big") + message, {}),
    }


def check(server: Server, protocol: str) -> None:
    """The server answers this protocol with the right numbers, before it is measured."""
    if server.name == "bare":
        return
    import onnxruntime

    expected = onnxruntime.InferenceSession("models/linear.onnx").run(None, {"INPUT0": ROW})[0]
    if protocol == "grpc":
        with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as stub:
            tensor = grpcclient.InferInput("INPUT0", [1, 16], "FP32")
            tensor.set_data_from_numpy(ROW)
            headers = {"application": "grpc"}
            got = stub.infer("linear", [tensor], headers=headers).as_numpy("OUTPUT0")
    else:
        with httpclient.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
            tensor = httpclient.InferInput("INPUT0", [1, 16], "FP32")
            tensor.set_data_from_numpy(ROW, binary_data=protocol == "rest-binary")
            output = httpclient.InferRequestedOutput("OUTPUT0", binary_data=protocol == "rest-binary")
            headers = bodies()[protocol][1]
            got = client.infer("linear", [tensor], outputs=[output], headers=headers).as_numpy("OUTPUT0")
    if not np.allclose(got, expected, atol=1e-5):
        raise SystemExit(f"{server.name} {protocol}: wrong answer {got}, expected {expected}")


def drive(server: Server, protocol: str, connections: int, seconds: int, directory: Path) -> Figure:
    body, headers = bodies()[protocol]
    before = cpu_s(server.processes)
    rps, p50, p99, errors, requests = (_h2load if protocol == "grpc" else _wrk)(
        server, body, headers, connections, seconds, directory
    )
    used = cpu_between(before, cpu_s(server.processes))
    return Figure(server.name, protocol, connections, rps, p50, p99, errors, used / max(requests, 1) * 1e6)


def _wrk(
    server: Server, body: bytes, headers: dict[str, str], connections: int, seconds: int, directory: Path
) -> tuple[float, float, float, int, int]:
    script = directory / "post.lua"
    quoted = "".join(f"\\{byte:03d}" for byte in body)
    lines = [f'wrk.method = "POST"\nwrk.body = "{quoted}"']
    lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()]
    lines.append(
        "done = function(s, l, r) io.write(string.format('FIGURES %d %d %f %f %d\\n', s.requests, s.duration,"
        " l:percentile(50), l:percentile(99), s.errors.connect + s.errors.read + s.errors.write + s.errors.status"
        " + s.errors.timeout)) end"
    )
    script.write_text("\n".join(lines))
    url = f"http://127.0.0.1:{server.http_port}{PATH}"
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s", "-s", str(script), url]
    output = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True).stdout
    found = re.search(r"FIGURES (\d+) (\d+) ([\d.]+) ([\d.]+) (\d+)", output)
    if found is None:
        raise SystemExit(f"wrk said: {output}")
    requests, micros = int(found[1]), int(found[2])
    return requests / micros * 1e6, float(found[3]) / 1e3, float(found[4]) / 1e3, int(found[5]), requests


def _h2load(
    server: Server, body: bytes, headers: dict[str, str], connections: int, seconds: int, directory: Path
) -> tuple[float, float, float, int, int]:
    data, log = directory / "message.bin", directory / "h2load.log"
    data.write_bytes(body)
    log.unlink(missing_ok=True)
    command = [
        "h2load", "-t1", f"-c{connections}", "-m1", f"-D{seconds}", "-d", str(data), f"--log-file={log}",
        "-H", "content-type: application/grpc", "-H", "te: trailers", "-H", "application: grpc",
        f"http://127.0.0.1:{server.grpc_port}/inference.GRPCInferenceService/ModelInfer",
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True)
    # Each line: start in µs, HTTP status, duration in µs. A gRPC error is HTTP 200: `check` has seen right answers before.
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    micros = np.array([int(row[2]) for row in rows if row[1] == "200"])
    errors = sum(row[1] != "200" for row in rows)
    p50, p99 = np.percentile(micros, (50, 99)) / 1e3
    return len(micros) / seconds, float(p50), float(p99), errors, len(micros)


STATIONS = (
    ("1 listener", ("http_server.py", "wire/", "rest_routes.py", "rest_inference.py", "http2.py", "grpc_")),
    ("2+8 codec", ("protocols/",)),
    ("3-4 lane and batcher", ("lane.py", "batching/", "repository.py", "router.py", "clock.py")),
    ("5 workers", ("workers.py", "queue.py", "threading.py", "cluster", "frames.py")),
    ("6 session", ("backends/", "onnxruntime")),
    ("metrics", ("metrics.py", "metric_")),
)


def stations(server: Server, connections: int, seconds: int, directory: Path, cpu_us: float) -> dict[str, float]:
    """Microseconds of CPU per request by station, from py-spy's samples of the process under load.

    A sample belongs to the innermost frame of ours; what has none is the event loop, the kernel and the C libraries under it.
    """
    (busiest,) = sorted(server.processes, key=lambda process: sum(process.cpu_times()[:2]))[-1:]
    out = directory / "stacks.txt"
    command = [str(PY_SPY), "record", "--pid", str(busiest.pid), "--duration", str(seconds), "--rate", "200"]
    command += ["--format", "raw", "--output", str(out), "--nonblocking"]
    spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    drive(server, "rest-json", connections, seconds + 1, directory)
    spy.wait(60)
    counts: Counter[str] = Counter()
    for line in out.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        for frame in reversed(stack.split(";")):
            station = next((name for name, marks in STATIONS if any(mark in frame for mark in marks)), None)
            if station:
                break
        counts[station or "event loop and kernel"] += int(count)
    total = sum(counts.values()) or 1
    return {name: cpu_us * count / total for name, count in counts.most_common()}


def serve_bare(port: int) -> None:
    """The listener alone: every request is answered with the same bytes."""
    import uvloop

    from gateway.config import Limits
    from gateway.edges.http_server import HttpServer

    body = b'{"model_name":"linear","outputs":[{"name":"OUTPUT0","datatype":"FP32","shape":[1,4],"data":[0.5,0.5,0.5,0.5]}]}'

    async def serve() -> None:
        await HttpServer(lambda exchange: exchange.respond(200, body), Limits()).start("127.0.0.1", port)
        print("ready", flush=True)
        await asyncio.Event().wait()

    uvloop.run(serve())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=6, help="of each measurement: wrk and h2load take whole ones")
    parser.add_argument("--only", default="bare,plain,embedded,replicas,serve", help="servers, comma separated")
    parser.add_argument("--protocols", default=",".join(PROTOCOLS))
    parser.add_argument("--connections", default=",".join(map(str, CONNECTIONS)))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--serve-bare", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_bare is not None:
        serve_bare(arguments.serve_bare)
    for tool in ("wrk", "h2load"):
        if shutil.which(tool) is None:
            parser.error(f"{tool} is not installed (Debian: wrk, nghttp2-client)")
    figures: list[Figure] = []
    shares: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for number in range(arguments.rounds):
            for name in arguments.only.split(","):
                with running(name, directory) as server:
                    for protocol in arguments.protocols.split(",") if name != "bare" else ("rest-json",):
                        if name == "serve" and protocol == "rest-binary":
                            continue  # the plain application does not speak the binary extension
                        check(server, protocol)
                        drive(server, protocol, 32, 1, directory)  # warm
                        for connections in map(int, arguments.connections.split(",")):
                            figure = drive(server, protocol, connections, arguments.seconds, directory)
                            figures.append(figure)
                            print(
                                f"{name:9} {protocol:12} {connections:3} conns: {figure.rps:8.0f}/s p50 {figure.p50_ms:8.2f} ms"
                                f"  p99 {figure.p99_ms:8.2f} ms  {figure.cpu_us:7.0f} µs CPU  {figure.errors} errors",
                                flush=True,
                            )
                    if name == "plain" and not number and PY_SPY.exists() and "rest-json" in arguments.protocols:
                        cpu_us = next(f.cpu_us for f in reversed(figures) if f.protocol == "rest-json" and f.server == name)
                        shares = stations(server, 64, min(arguments.seconds, 6), directory, cpu_us)
    report(figures, shares)
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": [asdict(f) for f in figures], "stations_us": shares}, indent=1))
    return 0


def report(figures: list[Figure], shares: dict[str, float]) -> None:
    """Ratios to the peers of the same run, which is what the project promises."""
    print(f"\n{os.cpu_count()} cores, client included. {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC")
    runs: dict[tuple[str, str, int], list[Figure]] = defaultdict(list)
    for figure in figures:
        runs[figure.server, figure.protocol, figure.connections].append(figure)
    for (name, protocol, connections), ours in runs.items():
        for peer in ("serve", "triton"):
            told = "rest-json" if peer == "serve" and protocol == "rest-binary" else protocol
            theirs = runs.get((peer, told, connections), [])
            if name in ("serve", "triton", "bare") or len(theirs) != len(ours):
                continue
            pairs = list(zip(ours, theirs, strict=True))  # of one round each
            rate = statistics.median(one.rps / other.rps for one, other in pairs)
            p50, p99 = (statistics.median(getattr(o, key) / getattr(m, key) for m, o in pairs) for key in ("p50_ms", "p99_ms"))
            print(
                f"{name:9} {protocol:12} {connections:3} connections: {rate:6.2f} times the rate of {peer}, "
                f"p50 {p50:6.2f} and p99 {p99:6.2f} times lower"
            )
    if shares:
        print("\nCPU per REST JSON request of the plain process at 64 connections, by station:")
        for name, micros in shares.items():
            print(f"  {name:24} {micros:6.1f} µs")


if __name__ == "__main__":
    sys.exit(main())
