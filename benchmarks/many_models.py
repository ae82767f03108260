"""What one model more costs: memory, threads, the time to the first answer, and the CPU of a request at many connections.

    python -m benchmarks.many_models                                        1, 50 and 200 models at 64 connections
    python -m benchmarks.many_models --models 1 200 --connections 64 4096 --max-rows 64 1 --rounds 3
    python -m benchmarks.many_models --checkouts ../before .                the gateways of two checkouts, in turns

Of 64 connections that ask 200 models in turn hardly two ask the same one at a time: batches have one row, where those of one
model have dozens. `--max-rows 1` holds them to one row for one model, too: then what is left is the cost of the number alone.
Rows of a batch are told by the server's own count, and each figure is compared with the first of the same largest batch.

Starts `gateway serve --no-ray` with so many times `linear` (ONNX Runtime, one session and one thread each), asks every model
once, and loads all of them in turn by wrk, which is a closed loop. The time to the first answer is from the command on, the
middle of so many starts. Memory is resident: a second after each was asked, and after the load; of it, what is this process's
alone. CPU is the server's, by its own account, of the requests of so many seconds, once all connections are open and a second
has passed.
Needs models/linear.onnx (`gateway compile configs/examples/linear.yaml`) and wrk.
"""

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.ports import free_port

ROOT = Path(__file__).parent.parent
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}]})
GIVE_UP_S = 120.0

WARM_S = 2.0
LUA = """
local ffi = require("ffi")
ffi.cdef[[ typedef struct {{ long s; long ns; }} moment; int clock_gettime(int clock, moment *now); ]]
local now = ffi.new("moment")
local told = io.open("{told}", "w")
local models, at, sent = {models}, 0, 0
wrk.method = "POST"
wrk.body = [[{body}]]
function request()
  at = at % models + 1
  sent = sent + 1
  if sent % 64 == 0 then
    ffi.C.clock_gettime(1, now)
    told:write(tonumber(now.s) + tonumber(now.ns) / 1e9, " ", sent, "\\n")
    told:flush()
  end
  return wrk.format(nil, "/v2/models/m" .. at .. "/infer")
end
"""


class Case(NamedTuple):
    checkout: Path
    max_rows: int
    models: int
    connections: int

    def __str__(self) -> str:
        return f"{self.checkout}: {self.models} models, {self.connections} connections, batches of at most {self.max_rows} rows"


class Loaded(NamedTuple):
    """What wrk saw of one load, and of a request while it lasted: the server's CPU, in the kernel too. rows: of a batch."""

    rps: float
    p50_ms: float
    p99_ms: float
    wrong: int
    cpu_us: float
    kernel_us: float
    rows: float


def configuration(models: int, port: int, max_rows: int) -> str:
    tensors = ", ".join(
        f"{kind}: [{{name: {name}, datatype: FP32, shape: [-1, {columns}]}}]"
        for kind, name, columns in (("inputs", "INPUT0", 16), ("outputs", "OUTPUT0", 4))
    )
    backend = f"backends: [{{kind: onnxruntime, model: {ROOT / 'models' / 'linear.onnx'}, threads: 1}}]"
    lines = [f"  - {{name: m{number + 1}, max_rows: {max_rows}, {tensors}, {backend}}}" for number in range(models)]
    return "\n".join([f"server: {{http_port: {port}, grpc_port: 0}}", "models:", *lines])


@contextmanager
def serving(models: int, max_rows: int, checkout: Path) -> Iterator[tuple[int, psutil.Process, float]]:
    """The port, the process, and the seconds from the command to the first answer."""
    port = free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(configuration(models, port, max_rows))
        file.flush()
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", file.name, "--no-ray", "--quiet"],
            cwd=checkout,
            stdout=subprocess.DEVNULL,
        )
        try:
            while ask(port, 1) != 200:
                if process.poll() is not None or time.perf_counter() - began > GIVE_UP_S:
                    raise SystemExit("the gateway did not start")
                time.sleep(0.005)
            yield port, psutil.Process(process.pid), time.perf_counter() - began
        finally:
            process.terminate()
            process.wait(60)


def ask(port: int, model: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", f"/v2/models/m{model}/infer", BODY)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def load(port: int, process: psutil.Process, *, models: int, connections: int, seconds: int) -> Loaded:
    batches, rows = counted(port)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script, tempfile.NamedTemporaryFile() as told:
        script.write(LUA.format(models=models, body=BODY, told=told.name))
        script.flush()
        lasts_s = round(WARM_S + seconds + 1)
        command = ["wrk", "-t1", f"-c{connections}", f"-d{lasts_s}s", "--timeout", "20s", "--latency", "-s", script.name]
        wrk = subprocess.Popen([*command, f"http://127.0.0.1:{port}/"], stdout=subprocess.PIPE, text=True)
        time.sleep(WARM_S)
        begin_s, before = time.monotonic(), process.cpu_times()
        time.sleep(seconds)
        end_s, after = time.monotonic(), process.cpu_times()
        out, _ = wrk.communicate()
        moments = np.loadtxt(told.name)
    requests = np.diff(np.interp([begin_s, end_s], moments[:, 0], moments[:, 1]))[0]
    more_batches, more_rows = counted(port)
    wrong = sum(int(number) for number in re.findall(r"(?:connect|read|write|timeout|responses:) (\d+)", out))
    kernel_s = after.system - before.system
    return Loaded(
        requests / (end_s - begin_s),
        _ms(out, "50%"),
        _ms(out, "99%"),
        wrong,
        (after.user - before.user + kernel_s) / requests * 1e6,
        kernel_s / requests * 1e6,
        (more_rows - rows) / (more_batches - batches),
    )


def counted(port: int) -> tuple[int, int]:
    """Batches and their rows so far, of all models."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    batches, rows = (re.findall(rf"^gateway_batch_rows_{what}\{{.*\}} (\S+)", text, re.M) for what in ("count", "sum"))
    return sum(map(int, map(float, batches))), sum(map(int, map(float, rows)))


def _ms(out: str, quantile: str) -> float:
    number, unit = re.findall(rf"{re.escape(quantile)} +([\d.]+)(us|ms|s)", out)[0]
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, nargs="+", default=[1, 50, 200])
    parser.add_argument("--connections", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument(
        "--max-rows", type=int, nargs="+", default=[64], help="of a batch; 1: what a batch costs, whoever shares"
    )
    parser.add_argument("--checkouts", type=Path, nargs="+", default=[ROOT])
    arguments = parser.parse_args()
    found: dict[Case, list[Loaded]] = {}
    for _ in range(arguments.rounds):
        for models, max_rows, checkout in product(arguments.models, arguments.max_rows, arguments.checkouts):
            firsts = []
            for _ in range(arguments.starts - 1):
                with serving(models, max_rows, checkout) as (_, _, first_s):
                    firsts.append(first_s)
            with serving(models, max_rows, checkout) as (port, process, first_s):
                firsts.append(first_s)
                for model in range(models):
                    ask(port, model + 1)
                time.sleep(1)  # what only its start needed is given back behind the first answer
                idle = process.memory_info().rss
                for connections in arguments.connections:
                    case = Case(checkout, max_rows, models, connections)
                    loaded = load(port, process, models=models, connections=connections, seconds=arguments.seconds)
                    found.setdefault(case, []).append(loaded)
                    memory = process.memory_full_info()
                    print(
                        f"{case}: first answer {statistics.median(firsts):.2f} s, "
                        f"resident {idle / 1e6:.1f} MB, after load {memory.rss / 1e6:.1f} MB (alone {memory.uss / 1e6:.1f}), "
                        f"{process.num_threads()} threads, {loaded.rps:.0f} requests/s, p50 {loaded.p50_ms:.1f} ms, "
                        f"p99 {loaded.p99_ms:.1f} ms, {loaded.wrong} wrong, {loaded.rows:.1f} rows a batch, "
                        f"{loaded.cpu_us:.1f} µs CPU ({loaded.kernel_us:.1f} in the kernel)",
                        flush=True,
                    )
    firsts_us: dict[tuple[Path, int], float] = {}
    for case, each in found.items():
        cpu_us, kernel_us, rows = (statistics.median(column) for column in list(zip(*each, strict=True))[4:])
        first_us = firsts_us.setdefault((case.checkout, case.max_rows), cpu_us)
        print(
            f"{case}: {rows:.1f} rows a batch, {cpu_us:.1f} µs CPU per request ({kernel_us:.1f} in the kernel), "
            f"{cpu_us / first_us:.2f} of the first's"
        )


if __name__ == "__main__":
    main()
