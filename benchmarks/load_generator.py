"""The load generator judged: against wrk and Locust, and against a stall. Its intervals: `benchmarks.coverage`.

    python -m benchmarks.load_generator tools --seconds 10 --locust PATH   latency and CPU at the same rate, null server
    python -m benchmarks.load_generator stall                              a server that stops for 1 s: open and closed loop

wrk (Debian: wrk) is a closed loop; a Lua delay per connection holds it to about the rate. Locust is no dependency of this
project: install it in an environment of its own (`pip install locust`) and name its executable. Generator and server share
the machine. CPU per request leaves out the start of the Python tools (imports).
"""

import argparse
import asyncio
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from loadtest.measuring.generator import measure
from loadtest.measuring.generator_limit import null_server
from loadtest.results import LoadSpec, RunResult, read_run
from tests.loadtest.scripted_server import scripted_server

CONNECTIONS = 32
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}]})
PATH = "/v2/models/null/infer"


@dataclass(frozen=True)
class Figure:
    """What one tool reported of one run, and what it cost.

    cpu_s: user and system time of all its processes. start_s: how much of it went before the run, where known.
    """

    tool: str
    rate_rps: float
    p50_ms: float
    p99_ms: float
    cpu_s: float
    requests: int
    start_s: float = 0.0


def tools(seconds: float, rates: list[int], locust: str | None) -> None:
    print(f"{'tool':<10}{'asked/s':>9}{'done/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'CPU s':>8}{'start s':>9}{'µs/request':>12}")
    with null_server() as server, tempfile.TemporaryDirectory() as directory:
        url = server.target("rest-json")
        for rate in rates:
            runs: list[Callable[[], Figure]] = [
                lambda rate=rate: run_loadtest(url, rate, seconds, Path(directory)),  # type: ignore[misc]
                lambda rate=rate: run_wrk(url, rate, seconds, Path(directory)),  # type: ignore[misc]
            ]
            if locust:
                runs.append(lambda rate=rate: run_locust(locust, url, rate, seconds, Path(directory)))  # type: ignore[misc]
            for run in runs:
                figure = run()
                each_us = (figure.cpu_s - figure.start_s) / max(figure.requests, 1) * 1e6
                print(
                    f"{figure.tool:<10}{rate:>9}{figure.rate_rps:>10.0f}{figure.p50_ms:>9.3f}{figure.p99_ms:>9.3f}"
                    f"{figure.cpu_s:>8.2f}{figure.start_s:>9.2f}{each_us:>12.0f}",
                    flush=True,
                )


def timed(command: list[str], directory: Path) -> tuple[str, float]:
    """Run a command: its output and the CPU seconds of it and its children."""
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=directory, check=False)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return done.stdout + done.stderr, cpu_s


def run_loadtest(url: str, rate: int, seconds: float, directory: Path) -> Figure:
    path = directory / "run.json"
    command = [
        sys.executable,
        "-m",
        "loadtest.cli",
        "run",
        url,
        "--model",
        "null",
        "--rate",
        str(rate),
        "--duration",
        str(seconds),
    ]
    _, cpu_s = timed([*command, "--connections", str(CONNECTIONS), "--warmup", "0", "--quiet", "--json", str(path)], Path.cwd())
    result = read_run(path)
    start_s = cpu_s - result.generator.cpu_cores * result.window_s
    return Figure("loadtest", result.succeeded_rps, result.latency.p50, result.latency.p99, cpu_s, result.succeeded, start_s)


def run_wrk(url: str, rate: int, seconds: float, directory: Path) -> Figure:
    script = directory / "post.lua"
    script.write_text(
        f"wrk.method='POST'\nwrk.body='{BODY}'\nwrk.headers['Content-Type']='application/json'\n"
        f"function delay() return {round(CONNECTIONS * 1000 / rate)} end\n"
    )
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "--latency", "-s", str(script), url + PATH]
    text, cpu_s = timed(command, directory)
    found = {name: _ms(text, rf"{name}%\s+([\d.]+)(us|ms|s)") for name in ("50", "99")}
    requests = int(re.search(r"(\d+) requests in", text)[1])  # type: ignore[index]
    return Figure("wrk", requests / seconds, found["50"], found["99"], cpu_s, requests)


def _ms(text: str, pattern: str) -> float:
    match = re.search(pattern, text)
    assert match, text
    return float(match[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[match[2]]


def run_locust(locust: str, url: str, rate: int, seconds: float, directory: Path) -> Figure:
    (directory / "locustfile.py").write_text(
        "from locust import FastHttpUser, constant_throughput, task\n"
        "class User(FastHttpUser):\n"
        f"    wait_time = constant_throughput({rate / CONNECTIONS})\n"
        "    @task\n"
        "    def infer(self):\n"
        f"        self.client.post({PATH!r}, data={BODY!r}, headers={{'Content-Type': 'application/json'}})\n"
    )
    command = [locust, "--headless", "-f", "locustfile.py", "-H", url, "-u", str(CONNECTIONS), "-r", str(CONNECTIONS)]
    text, cpu_s = timed([*command, "-t", f"{seconds:g}s", "--csv", "out", "--only-summary"], directory)
    with (directory / "out_stats.csv").open() as file:
        total = list(csv.DictReader(file))[-1]
    requests = int(total["Request Count"])
    assert requests, text
    _, start_s = timed([locust, "--version"], directory)
    return Figure("locust", float(total["Requests/s"]), float(total["50%"]), float(total["99%"]), cpu_s, requests, start_s)


def stall() -> None:
    """A server that answers at once but stops for 1 s of 10: what each way of counting says."""
    for name, pattern, rate in (("open loop", "constant", 200.0), ("closed loop, 1 user", "users:count=1", 0.0)):
        result = uvloop.run(_stalled(pattern, rate))
        print(
            f"{name:<20} {result.requests:>7} requests   latency p99 {result.latency.p99:8.2f} ms   "
            f"service p99 {result.service.p99:8.2f} ms   max {result.latency.max:8.2f} ms"
        )


async def _stalled(pattern: str, rate: float) -> RunResult:
    async with scripted_server() as server:
        loop = asyncio.get_running_loop()

        def begin() -> None:
            server.stalled_until = loop.time() + 1.0

        server.at_inference[200] = begin
        return await measure(
            LoadSpec(server.url, model="m", pattern=pattern, rate_rps=rate, duration_s=10, connections=1, warmup_s=0.0)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tools", "stall"))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rates", default="1000,4000")
    parser.add_argument("--locust", default=shutil.which("locust"), help="its executable; left out if there is none")
    args = parser.parse_args()
    started = time.monotonic()
    if args.what == "tools":
        tools(args.seconds, [int(rate) for rate in args.rates.split(",")], args.locust)
    else:
        stall()
    print(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
