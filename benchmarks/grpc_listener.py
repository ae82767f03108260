"""What a gRPC call costs before anything is done: grpc.aio beside the gateway's own listener, each answering prepared bytes.

    python -m benchmarks.grpc_listener [--seconds 3] [--rounds 3] [--connections 64]

Alternates the two, so that what else runs on the machine meets both. Load: h2load, closed loop, one call at a time and
connection. The processor time per call is the figure that other processes disturb least. Needs `h2load` (Debian:
nghttp2-client).
"""

import argparse
import asyncio
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import uvloop
from tritonclient.grpc import service_pb2 as pb

from benchmarks.processor_time import cpu_between, cpu_s
from gateway.config import Limits
from gateway.edges.grpc_call import GrpcCall, OneMessage
from gateway.edges.http2 import Http2Connection
from gateway.wire.http2_sending import Stream

METHOD = "/inference.GRPCInferenceService/ModelInfer"
ANSWER = pb.ModelInferResponse(
    model_name="linear",
    model_version="1",
    outputs=[pb.ModelInferResponse.InferOutputTensor(name="OUTPUT0", datatype="FP32", shape=[1, 4])],
    raw_output_contents=[bytes(16)],
)


async def serve_grpc_aio() -> None:
    prepared = ANSWER.SerializeToString()

    async def answer(data: bytes, context: Any) -> bytes:
        return prepared

    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


class Prepared(OneMessage):
    def start(self, data: bytes) -> None:
        self._call.reply(ANSWER)


async def serve_own() -> None:
    limits = Limits()

    def answer(stream: Stream) -> None:
        call = GrpcCall(stream, limits.body_bytes)
        call.listen(Prepared(call))

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Http2Connection(limits, answer, lambda connection: None), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


SERVERS = {"grpc.aio": serve_grpc_aio, "own": serve_own}


def measure(name: str, connections: int, seconds: int, directory: Path) -> tuple[float, float, float, float]:
    """Calls/s, p50 and p99 in ms, processor time of the server per call in µs."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.grpc_listener", "--serve", name], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        _load(port, connections, 1, directory)
        processes = [psutil.Process(server.pid)]
        before = cpu_s(processes)
        micros = _load(port, connections, seconds, directory)
        used = cpu_between(before, cpu_s(processes))
        p50, p99 = np.percentile(micros, (50, 99)) / 1e3
        return len(micros) / seconds, float(p50), float(p99), used / len(micros) * 1e6
    finally:
        server.terminate()
        server.wait(timeout=10)


def _load(port: int, connections: int, seconds: int, directory: Path) -> np.ndarray:
    """The duration of each call in µs."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 16])
    message = pb.ModelInferRequest(model_name="linear", inputs=[tensor], raw_input_contents=[bytes(64)]).SerializeToString()
    body, log = directory / "body", directory / "log"
    body.write_bytes(b"\0" + len(message).to_bytes(4) + message)
    log.unlink(missing_ok=True)
    command = ["h2load", "-t1", f"-c{connections}", "-m1", f"-D{seconds}", "-d", str(body), f"--log-file={log}"]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"http://127.0.0.1:{port}{METHOD}"]
    subprocess.run(command, check=True, capture_output=True, timeout=seconds + 60)
    return np.array([int(duration) for duration in re.findall(r"\t200\t(\d+)\n", log.read_text())])


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare gRPC listeners.")
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(SERVERS[arguments.serve]())
        return 0
    if shutil.which("h2load") is None:
        parser.error("h2load is not installed (Debian: nghttp2-client)")
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in SERVERS}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(arguments.rounds):
            for name, runs in found.items():
                runs.append(measure(name, arguments.connections, arguments.seconds, Path(directory)))
    print(f"{'median of ' + str(arguments.rounds):16} calls/s   p50 ms   p99 ms   µs of CPU per call")
    for name, runs in found.items():
        rate, p50, p99, cpu = (statistics.median(run[i] for run in runs) for i in range(4))
        print(f"{name:16} {rate:7.0f} {p50:8.2f} {p99:8.2f} {cpu:8.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
