"""What a scrape of many models takes, and what it costs everybody else meanwhile.

    python -m benchmarks.scrape                   200 models, 20 scrapes
    python -m benchmarks.scrape --checkout DIR    the gateway of another checkout

Starts `gateway serve --no-ray` with so many synthetic models, asks each of them, and scrapes it: after every
model was asked once more, so that nothing stands as it was, and at once again. Meanwhile one client asks a model as fast as it
is answered, and another /v2/health/live every millisecond: what they wait beside a scrape, and at other times.
"""

import argparse
import asyncio
import contextlib
import gzip
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import NamedTuple

import uvloop

_BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}]}).encode()


class Connection:
    """Asks one thing after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 26))

    async def get(self, path: str, headers: str = "") -> bytes:
        return await self._ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())

    async def infer(self, model: str) -> bytes:
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(_BODY)}\r\n\r\n"
        return await self._ask(head.encode() + _BODY)

    async def _ask(self, request: bytes) -> bytes:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert head.startswith(b"HTTP/1.1 200 "), head
        assert length is not None, head
        return await self._reader.readexactly(int(length[1]))


@contextlib.contextmanager
def gateway(models: int, checkout: Path) -> Iterator[int]:
    """Its HTTP port."""
    listed = [
        {
            "name": f"model-{number}",
            "slo": {"p99_ms": 10_000 + number},
            "batching": {"probe_s": 0},
            "backends": [{"kind": "synthetic", "fixed_ms": 0, "row_ms": 0, "usd_per_hour": 0.17}],
        }
        for number in range(models)
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "gateway.yaml"
        path.write_text(json.dumps({"models": listed}))
        command = [sys.executable, "-m", "gateway.cli", "serve", "--no-ray", "--http-port", "0", "--grpc-port", "0", str(path)]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            assert server.stdout is not None
            try:
                ready = re.search(r"http=[\d.]+:(\d+)", server.stdout.readline())
                if ready is None:
                    raise SystemExit("the gateway did not start")
                yield int(ready[1])
            finally:
                server.terminate()
                server.stdout.read()


class Asked(NamedTuple):
    """One request, by `time.perf_counter`."""

    begun: float
    ended: float

    @property
    def took_ms(self) -> float:
        return (self.ended - self.begun) * 1e3


def scraped(port: int) -> tuple[Asked, bytes]:
    """On a thread of its own, which mostly waits: the client must not hold itself up."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begun = time.perf_counter()
    connection.request("GET", "/metrics")
    body = connection.getresponse().read()
    asked = Asked(begun, time.perf_counter())
    connection.close()
    return asked, body


async def measure(port: int, models: int, scrapes: int) -> None:
    connection = await Connection.to(port)

    async def ask_all() -> None:
        for number in range(models):
            await connection.infer(f"model-{number}")

    await ask_all()
    _, body = scraped(port)
    print(f"{models} models, each asked: {len(body)} bytes, {len(gzip.compress(body, 6))} by gzip")
    fresh: list[Asked] = []
    again: list[Asked] = []

    async def scrape() -> None:
        for _ in range(scrapes):
            await ask_all()
            for found in (fresh, again):
                await asyncio.sleep(0.1)
                found.append((await asyncio.to_thread(scraped, port))[0])

    asked = await _asked(port, scrape())
    for what, found in (("after all models were asked", fresh), ("and at once again", again)):
        times = [one.took_ms for one in found]
        print(f"scrape {what:28} median {statistics.median(times):6.1f} ms  most {max(times):6.1f} ms")
    for name, found in asked.items():
        beside = [
            one for one in found if any(one.begun < scrape.ended and scrape.begun < one.ended for scrape in fresh + again)
        ]
        for what, some in (("beside a scrape", beside), ("at other times", list(set(found) - set(beside)))):
            times = sorted(one.took_ms for one in some)
            p50, p99, most = (times[int(share * (len(times) - 1))] for share in (0.5, 0.99, 1.0))
            print(f"{name:6} {what:28} p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  most {most:6.2f} ms  of {len(times)}")


async def _asked(port: int, meanwhile: Coroutine[None, None, None]) -> dict[str, list[Asked]]:
    """Inferences, one after the other, and health checks every millisecond, until that has ended."""
    one, two = await Connection.to(port), await Connection.to(port)
    until = asyncio.create_task(meanwhile)
    found: dict[str, list[Asked]] = {"infer": [], "live": []}

    async def ask(name: str, what: Callable[[], Awaitable[bytes]], pause_s: float) -> None:
        while not until.done():
            begun = time.perf_counter()
            await what()
            found[name].append(Asked(begun, time.perf_counter()))
            await asyncio.sleep(pause_s)

    await asyncio.gather(
        until, ask("infer", lambda: one.infer("model-0"), 0), ask("live", lambda: two.get("/v2/health/live"), 0.001)
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--scrapes", type=int, default=20)
    parser.add_argument("--checkout", type=Path, default=Path())
    arguments = parser.parse_args()
    sys.setswitchinterval(1e-4)  # or the thread that scrapes holds up the one that measures
    with gateway(arguments.models, arguments.checkout) as port:
        uvloop.run(measure(port, arguments.models, arguments.scrapes))


if __name__ == "__main__":
    main()
