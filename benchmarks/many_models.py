"""What one model more costs: memory, threads, the time to the first answer, and the CPU of a request at many connections.

    python -m benchmarks.many_models                                        1, 50 and 200 models at 64 connections
    python -m benchmarks.many_models --models 1 200 --connections 64 4096 --rounds 3
    python -m benchmarks.many_models --models 1 200 --max-rows 1            no batch is shared: what the number alone costs
    python -m benchmarks.many_models --checkout DIR                         the gateway of another checkout

Of 64 connections that ask 200 models in turn hardly two ask the same one at a time: batches have one row, where those of one
model have dozens. `--max-rows 1` holds them to one row for one model, too.

Starts `gateway serve --no-ray` with so many times `linear` (ONNX Runtime, one session and one thread each), asks every model
once, and loads all of them in turn by wrk, which is a closed loop. The time to the first answer is from the command on, the
middle of so many starts. Memory is resident: at the first answer, and after the load; of it, what is this process's alone. CPU
is the server's, by its own account. Needs models/linear.onnx (`gateway compile configs/examples/linear.yaml`) and wrk.
"""

import argparse
import http.client
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parent.parent
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}]})
GIVE_UP_S = 120.0

LUA = """
local models = {models}
local at = 0
wrk.method = "POST"
wrk.body = [[{body}]]
function request()
  at = at % models + 1
  return wrk.format(nil, "/v2/models/m" .. at .. "/infer")
end
"""


class Loaded(NamedTuple):
    """What wrk saw of one load, and the server's CPU of a request."""

    rps: float
    p50_ms: float
    p99_ms: float
    wrong: int
    cpu_us: float


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA.format(models=models, body=BODY))
        script.flush()
        before = sum(process.cpu_times()[:2])
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "20s", "--latency", "-s", script.name]
        out = subprocess.run([*command, f"http://127.0.0.1:{port}/"], capture_output=True, text=True, check=True).stdout
        cpu_s = sum(process.cpu_times()[:2]) - before
    requests = int(re.findall(r"(\d+) requests in", out)[0])
    wrong = sum(int(number) for number in re.findall(r"(?:connect|read|write|timeout|responses:) (\d+)", out))
    return Loaded(
        float(re.findall(r"Requests/sec: +([\d.]+)", out)[0]), _ms(out, "50%"), _ms(out, "99%"), wrong, cpu_s / requests * 1e6
    )


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
    parser.add_argument("--max-rows", type=int, default=64, help="of a batch; 1: what a batch costs, whoever shares it")
    parser.add_argument("--checkout", type=Path, default=ROOT)
    arguments = parser.parse_args()
    costs: dict[tuple[int, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for models in arguments.models:
            firsts = []
            for _ in range(arguments.starts - 1):
                with serving(models, arguments.max_rows, arguments.checkout) as (_, _, first_s):
                    firsts.append(first_s)
            with serving(models, arguments.max_rows, arguments.checkout) as (port, process, first_s):
                firsts.append(first_s)
                for model in range(models):
                    ask(port, model + 1)
                idle = process.memory_info().rss
                for connections in arguments.connections:
                    found = load(port, process, models=models, connections=connections, seconds=arguments.seconds)
                    costs.setdefault((models, connections), []).append(found.cpu_us)
                    memory = process.memory_full_info()
                    print(
                        f"{models} models, {connections} connections: first answer {statistics.median(firsts):.2f} s, "
                        f"resident {idle / 1e6:.1f} MB, after load {memory.rss / 1e6:.1f} MB (alone {memory.uss / 1e6:.1f}), "
                        f"{process.num_threads()} threads, {found.rps:.0f} requests/s, p50 {found.p50_ms:.1f} ms, "
                        f"p99 {found.p99_ms:.1f} ms, {found.wrong} wrong, {found.cpu_us:.1f} µs CPU",
                        flush=True,
                    )
    first = statistics.median(next(iter(costs.values())))
    for (models, connections), each in costs.items():
        middle = statistics.median(each)
        print(
            f"{models} models, {connections} connections: {middle:.1f} µs CPU per request, {middle / first:.2f} of the first's"
        )


if __name__ == "__main__":
    main()
