"""What a scrape of many models takes, and what it costs everybody else meanwhile.

    python -m benchmarks.scrape                   200 models, 300 scrapes: some four minutes
    python -m benchmarks.scrape --processes 2     beside a second ingress process, whose counts each scrape reads and adds
    python -m benchmarks.scrape --gzip            as Prometheus asks
    python -m benchmarks.scrape --checkout DIR    the gateway of another checkout

Starts `gateway serve --no-ray` with so many synthetic models, and scrapes it again and again, each time after every model was
asked, so that nothing stands as it was. All the while one client asks a model as fast as it is answered, and another
/v2/health/live every millisecond. What they waited is told of two kinds of windows, which take turns and are equally long: with
a scrape, and without. A window goes on for 20 ms behind its scrape, as what that has left to do belongs to it.

A machine that does other things holds clients up in both. What a scrape does by itself the gateway tells: how long it has the
loop until others have their turns (a slice), by the clock and by the thread's processor time, which nobody else's work adds to;
the same of all slices of a scrape; and each look for garbage, which holds everybody, in a scrape and at other times.
"""

import argparse
import asyncio
import contextlib
import functools
import gc
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import uvloop

_AFTER_S = 0.02  # that belong to a scrape
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
        return await self._ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())

    async def infer(self, model: str) -> bytes:
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(_BODY)}\r\n\r\n"
        return await self._ask(head.encode() + _BODY)

    async def _ask(self, request: bytes) -> bytes:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert head.startswith(b"HTTP/1.1 200 "), head
        assert length is not None, head
        return await self._reader.readexactly(int(length[1]))


@contextlib.contextmanager
def gateway(models: int, checkout: Path, directory: Path, told: Path, shared: bool) -> Iterator[int]:
    """Its HTTP port. directory: of all its processes. told: gets what it tells of its scrapes, when it has ended."""
    listed = [
        {
            "name": f"model-{number}",
            "slo": {"p99_ms": 10_000 + number},
            "batching": {"probe_s": 0},
            "backends": [{"kind": "synthetic", "fixed_ms": 0, "row_ms": 0, "usd_per_hour": 0.17}],
        }
        for number in range(models)
    ]
    path = directory / "gateway.yaml"
    path.write_text(json.dumps({"models": listed, "server": {"run_dir": str(directory / "run")}}))
    ports = ("--http-port", "0", "--grpc-port", "0")
    command = [sys.executable, __file__, "--serve", str(told), str(int(shared)), "serve", "--no-ray", *ports, str(path)]
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


class Work(NamedTuple):
    """Of the gateway's loop: what it was, and what it took by the clock and by the thread's processor time."""

    what: str
    took_ns: int
    cpu_ns: int


def serve(told: str, shared: bool, arguments: list[str]) -> None:
    """The gateway's command line, in a process that notes what its scrapes do on the loop, and tells it in the end.

    shared: it is one of several ingress processes, as on Ray.
    """
    from gateway import cli, ingress
    from gateway.edges.http_server import HttpConnection
    from gateway.engine import metrics

    noted: list[Work] = []
    scraping, asked = 0, False  # asked: for the first time, before which it starts
    began = turn = (0, 0)

    def now() -> tuple[int, int]:
        return time.perf_counter_ns(), time.thread_time_ns()

    def note(what: str, since: tuple[int, int]) -> None:
        ended = now()
        if asked:
            noted.append(Work(what, ended[0] - since[0], ended[1] - since[1]))

    def timed(work: Generator[None, None, Any]) -> Generator[None, None, Any]:
        nonlocal scraping, asked, turn
        scraping, asked, turn = scraping + 1, True, now()
        before = len(noted)
        try:
            return (yield from work)
        finally:
            scraping -= 1
            note("slice", turn)
            slices = [one for one in noted[before:] if one.what == "slice"]
            if len(slices) > 1:
                together = Work("all slices of one", sum(one.took_ns for one in slices), sum(one.cpu_ns for one in slices))
                noted.append(together)

    async def sleep(delay: float) -> None:
        nonlocal turn
        if not delay:
            note("slice", turn)
        await asyncio.sleep(delay)
        if not delay:
            turn = now()

    def collected(phase: str, info: Mapping[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = now()
        else:
            note(f"garbage {info['generation']}, {'in a scrape' if scraping else 'at other times'}", began)

    def write(connection: HttpConnection, parts: list[Any]) -> None:
        since = now()
        usual_write(connection, parts)
        if sum(map(len, parts)) > 1 << 16:
            note("write", since)

    usual_slices, usual_write = metrics.in_slices, HttpConnection.write
    metrics.in_slices = lambda work: usual_slices(timed(work))
    metrics.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": sleep})  # type: ignore[assignment]  # it is timed
    HttpConnection.write = write  # type: ignore[method-assign]  # it is timed
    if shared:
        ingress.Ingress = functools.partial(ingress.Ingress, owner="benchmarks.scrape")  # type: ignore[misc]  # shares its run_dir
    gc.callbacks.append(collected)
    status = cli.main(arguments)
    Path(told).write_text(json.dumps(noted))
    sys.exit(status)


class Asked(NamedTuple):
    """One request, by `time.perf_counter`, which all processes share."""

    begun: float
    ended: float

    @property
    def took_ms(self) -> float:
        return (self.ended - self.begun) * 1e3


def scraped(port: int, compressed: bool) -> tuple[Asked, int]:
    """In a process of its own: to read so much must not hold up the clients. Gives the bytes that came as well."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begun = time.perf_counter()
    connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"} if compressed else {})
    body = connection.getresponse().read()
    asked = Asked(begun, time.perf_counter())
    connection.close()
    return asked, len(body)


async def measure(ports: Sequence[int], models: int, scrapes: int, compressed: bool) -> None:
    connections = [await Connection.to(port) for port in ports]

    async def ask_all() -> None:
        for connection in connections:
            for number in range(models):
                await connection.infer(f"model-{number}")

    loop = asyncio.get_running_loop()
    with_one: list[Asked] = []
    without: list[Asked] = []
    with ProcessPoolExecutor(1) as scraper:

        async def scrape() -> Asked:
            found, _ = await loop.run_in_executor(scraper, scraped, ports[0], compressed)
            await asyncio.sleep(_AFTER_S)
            return found

        async def take_turns() -> None:
            usual_s = (await scrape()).took_ms / 1e3
            for _ in range(scrapes):
                await ask_all()
                await asyncio.sleep(_AFTER_S)
                scrape_first = random.random() < 0.5
                if scrape_first:
                    with_one.append(await scrape())
                    usual_s = with_one[-1].took_ms / 1e3
                begun = time.perf_counter()
                await asyncio.sleep(usual_s + _AFTER_S)
                without.append(Asked(begun, time.perf_counter() - _AFTER_S))
                if not scrape_first:
                    with_one.append(await scrape())
                    usual_s = with_one[-1].took_ms / 1e3

        await ask_all()
        _, size = await loop.run_in_executor(scraper, scraped, ports[0], compressed)
        asked = await _asked(ports[0], take_turns())
    times = sorted(one.took_ms for one in with_one)
    print(f"{models} models, each asked since the last scrape; {len(ports)} processes; {size} bytes{', by gzip' * compressed}")
    print(f"{'scrape':24} median {statistics.median(times):6.1f} ms  most {times[-1]:6.1f} ms  of {len(times)}")
    for name, found in asked.items():
        for what, windows in (("beside a scrape", with_one), ("beside none", without)):
            _tell(f"{name}, {what}", [one.took_ms for one in _within(windows, found)])


def _within(windows: Sequence[Asked], found: Sequence[Asked]) -> list[Asked]:
    """Those that overlap with a window. Both are in the order of time."""
    kept, at = [], 0
    for one in found:
        while at < len(windows) and windows[at].ended + _AFTER_S < one.begun:
            at += 1
        if at < len(windows) and windows[at].begun < one.ended:
            kept.append(one)
    return kept


def _tell(what: str, times_ms: Sequence[float]) -> None:
    times = sorted(times_ms) or [0.0]
    p50, p99, p999, most = (times[int(share * (len(times) - 1))] for share in (0.5, 0.99, 0.999, 1.0))
    print(f"{what:40} p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  p99.9 {p999:6.2f} ms  most {most:6.2f} ms  of {len(times)}")


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


def tell_work(told: Path) -> None:
    noted = [Work(*one) for one in json.loads(told.read_text())]
    for what in sorted({one.what for one in noted}):
        _tell(f"gateway, {what}", [one.took_ns / 1e6 for one in noted if one.what == what])
        _tell("    processor time", [one.cpu_ns / 1e6 for one in noted if one.what == what])


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3] == "1", sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--scrapes", type=int, default=300)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--checkout", type=Path, default=Path())
    arguments = parser.parse_args()
    gc.disable()  # it would hold the clients up
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        told = [Path(directory) / f"{number}.json" for number in range(arguments.processes)]
        starting = functools.partial(gateway, arguments.models, arguments.checkout, Path(directory), shared=len(told) > 1)
        with stack:
            ports = [stack.enter_context(starting(one)) for one in told]
            uvloop.run(measure(ports, arguments.models, arguments.scrapes, arguments.gzip))
        tell_work(told[0])


if __name__ == "__main__":
    main()
