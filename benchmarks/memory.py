"""Whether one ingress process keeps its memory flat: REST inference on a synthetic model, resident memory on the way.

    python benchmarks/memory.py --requests 200000

The server is one process, the client this one: keep-alive connections that send JSON, binary, compressed, malformed and
abandoned requests in turn. Growth is counted from the tenth part of the requests on, when caches and pools are filled. Exit
status 1 if it is above --most-mb.
"""

import argparse
import asyncio
import gzip
import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MODEL = """
server: {http_port: 0, grpc_port: null}
models:
  - name: linear
    max_rows: 64
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 16]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 16]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
"""


def serve(directory: Path) -> None:
    """Run one ingress process; write its port to a file, end when standard input does."""
    import uvloop
    import yaml

    from gateway.config import parse_config
    from gateway.ingress import Ingress

    async def main() -> None:
        ingress = Ingress(parse_config(yaml.safe_load(MODEL), source="memory.py"), run_dir=directory)
        ports = await ingress.start()
        (directory / "port").write_text(str(ports.http))
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await ingress.drain()

    uvloop.run(main())


def requests() -> list[tuple[bytes, bytes]]:
    """What is sent in turn: a request, and how its answer begins."""
    tensor = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32"}
    plain = json.dumps({"inputs": [{**tensor, "data": [n / 7 for n in range(16)]}]}).encode()
    head = json.dumps(
        {"inputs": [{**tensor, "parameters": {"binary_data_size": 64}}], "parameters": {"binary_data_output": True}}
    )
    binary = head.encode() + struct.pack("<16f", *range(16))
    large = json.dumps({"inputs": [{**tensor, "shape": [64, 16], "data": [n / 7 for n in range(1024)]}]}).encode()
    return [
        (post(plain), b"HTTP/1.1 200"),
        (post(binary, f"Inference-Header-Content-Length: {len(head)}"), b"HTTP/1.1 200"),
        (post(plain, "Accept-Encoding: gzip"), b"HTTP/1.1 200"),
        (post(gzip.compress(plain), "Content-Encoding: gzip"), b"HTTP/1.1 200"),
        (post(large), b"HTTP/1.1 200"),
        (post(plain[:-5]), b"HTTP/1.1 400"),
        (post(plain, path="/v2/models/nobody/infer"), b"HTTP/1.1 404"),
    ]


def post(body: bytes, *fields: str, path: str = "/v2/models/linear/infer") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


class Load:
    """Connections that share a number of requests."""

    def __init__(self, port: int, total: int) -> None:
        self.port = port
        self.total = total
        self.done = 0
        self.samples: list[tuple[int, float]] = []

    async def run(self, connections: int, server: psutil.Process) -> None:
        step = max(1, self.total // 20)

        async def watch() -> None:
            following = 0
            while True:
                if self.done >= following:
                    self.samples.append((self.done, server.memory_info().rss / 2**20))
                    following += step
                await asyncio.sleep(0.02)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(self._connection(number) for number in range(connections)))
        watching.cancel()
        self.samples.append((self.done, server.memory_info().rss / 2**20))

    async def _connection(self, number: int) -> None:
        kinds = requests()
        turn = number
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while self.done < self.total:
            request, expected = kinds[turn % len(kinds)]
            turn += 1
            self.done += 1
            writer.write(request)
            if turn % 97 == 0:  # go away without the answer
                writer.transport.abort()
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                continue
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(expected):
                raise RuntimeError(f"expected {expected!r}, got {head!r}")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--most-mb", type=float, default=8.0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        server = subprocess.Popen([sys.executable, __file__, "--serve", directory], stdin=subprocess.PIPE)
        try:
            port = Path(directory) / "port"
            end = time.monotonic() + 60
            while not (port.exists() and port.read_text()):
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the server did not come up")
                time.sleep(0.05)
            load = Load(int(port.read_text()), options.requests)
            began = time.monotonic()
            asyncio.run(load.run(options.connections, psutil.Process(server.pid)))
            took_s = time.monotonic() - began
        finally:
            server.communicate(timeout=30)
    for done, mb in load.samples:
        print(f"{done:8} requests  {mb:7.1f} MB")
    settled = next(mb for done, mb in load.samples if done >= options.requests // 10)
    growth = load.samples[-1][1] - settled
    print(f"growth after the first tenth: {growth:+.1f} MB over {options.requests} requests in {took_s:.0f} s")
    return int(growth > options.most_mb)


if __name__ == "__main__":
    sys.exit(main())
