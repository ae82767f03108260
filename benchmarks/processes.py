"""What several ingress processes bring: the CPU of a request in each part, and from it the rate by cores.

    python -m benchmarks.processes                                    one process and two, in turns
    python -m benchmarks.processes --model                            only the model, of the figures below

Starts a server that speaks Triton's protocol, which is another gateway with a synthetic model of no cost; in front of it
`gateway serve` with one ingress process, and with two; and loads each by wrk at --connections. What is told: requests per
second, latency, and the CPU of a request in the ingresses, in what is behind them, and in wrk.

On a machine with few cores all of these share them, so two processes can win little there. What more cores would bring is
computed, not measured: an ingress process is one thread and does at most 1 / CPU of a request; what the machine has is shared
by all parts; the fullest process of the kernel's spread, by chance or evened out by recycling, is the first to be full.
"""

import argparse
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil

from benchmarks.many_models import BODY, GIVE_UP_S, ROOT, ask
from benchmarks.ports import free_port
from benchmarks.processor_time import cpu_between, cpu_s
from gateway.edges.recycling import surplus

TENSORS = """inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 16]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 16]}]"""
SCRIPT = f'wrk.method = "POST"\nwrk.body = [[{BODY}]]\n'


class Round(NamedTuple):
    """CPU in µs of a request, of all processes of a part."""

    rps: float
    p99_ms: float
    ingress_us: float
    behind_us: float
    client_us: float


@contextmanager
def served(document: str, port: int) -> Iterator[list[psutil.Process]]:
    """The processes, once all of them listen."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(document)
        file.flush()
        command = [sys.executable, "-m", "gateway", "serve", file.name, "--no-ray", "--quiet"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            until = time.monotonic() + GIVE_UP_S
            while ask(port, 1) != 200:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the gateway did not start")
                time.sleep(0.02)
            time.sleep(2)  # the others listen as well
            whole = psutil.Process(process.pid)
            yield [whole, *whole.children()]
        finally:
            process.terminate()
            process.wait(60)


def behind(port: int, grpc_port: int) -> str:
    backend = "{kind: synthetic, fixed_ms: 0, row_ms: 0}"
    server = f"server: {{http_port: {port}, grpc_port: {grpc_port}}}"
    return f"{server}\nmodels:\n  - name: m1\n    max_rows: 64\n    {TENSORS}\n    backends: [{backend}]\n"


def before(port: int, grpc_port: int, processes: int) -> str:
    backend = f'{{kind: triton, url: "127.0.0.1:{grpc_port}", model: m1, sessions: 2}}'
    server = f"server: {{http_port: {port}, grpc_port: null, ingress_replicas: {processes}}}"
    return f"{server}\nmodels:\n  - name: m1\n    max_rows: 64\n    backends: [{backend}]\n"


def measured(
    port: int, ingresses: list[psutil.Process], elsewhere: list[psutil.Process], *, connections: int, seconds: int
) -> Round:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(SCRIPT)
        script.flush()
        url = f"http://127.0.0.1:{port}/v2/models/m1/infer"
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", script.name, url]
        counted = cpu_s(ingresses), cpu_s(elsewhere)
        client = psutil.Process().cpu_times()
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        spent = cpu_between(counted[0], cpu_s(ingresses)), cpu_between(counted[1], cpu_s(elsewhere))
        mine = psutil.Process().cpu_times()
    requests = int(re.findall(r"(\d+) requests in", out)[0])
    of_client = mine.children_user + mine.children_system - client.children_user - client.children_system
    number, unit = re.findall(r"99% +([\d.]+)(us|ms|s)", out)[0]
    return Round(
        float(re.findall(r"Requests/sec: +([\d.]+)", out)[0]),
        float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit],
        *(each / requests * 1e6 for each in (*spent, of_client)),
    )


def fullest(connections: int, processes: int, *, recycled: bool) -> float:
    """The share of connections that the fullest process has, on average: by chance, or after ten looks of recycling."""
    drawn = random.Random(connections * processes)
    found = []
    for _ in range(400):
        counts = [0] * processes
        for _ in range(connections):
            counts[drawn.randrange(processes)] += 1
        for _ in range(10 if recycled else 0):
            seen = list(counts)
            for own in range(processes):
                ends = surplus(counts[own], [*seen[:own], *seen[own + 1 :]])
                counts[own] -= ends
                for _ in range(ends):
                    counts[drawn.randrange(processes)] += 1
        found.append(max(counts) / connections)
    return statistics.fmean(found)


def model(ingress_us: float, behind_us: float, connections: int) -> None:
    """Of a machine with so many cores that does not run the client."""
    print("\ncomputed: cores, ingress processes, requests/s by chance, and evened out; and what the cores would allow")
    for cores in (2, 4, 8, 16, 32):
        processes = max(1, cores // 2)
        most = cores / (ingress_us + behind_us) * 1e6
        rates = [min(most, 1e6 / ingress_us / fullest(connections, processes, recycled=recycled)) for recycled in (False, True)]
        print(f"{cores:3} cores, {processes:2} processes: {rates[0]:8.0f} {rates[1]:8.0f} {most:8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--ingress-us", type=float, help="of a request, for --model")
    parser.add_argument("--behind-us", type=float, help="likewise")
    parser.add_argument("--model", action="store_true")
    arguments = parser.parse_args()
    if arguments.model:
        if arguments.ingress_us is None or arguments.behind_us is None:
            parser.error("--model needs --ingress-us and --behind-us, as a run without it prints them")
        model(arguments.ingress_us, arguments.behind_us, arguments.connections)
        return
    found: dict[int, list[Round]] = {1: [], 2: []}
    ports = [free_port() for _ in range(3)]
    with served(behind(ports[0], ports[1]), ports[0]) as elsewhere:
        for _ in range(arguments.rounds):
            for processes, rounds in found.items():
                with served(before(ports[2], ports[1], processes), ports[2]) as ingresses:
                    measured(ports[2], ingresses, elsewhere, connections=arguments.connections, seconds=1)
                    one = measured(ports[2], ingresses, elsewhere, connections=arguments.connections, seconds=arguments.seconds)
                    rounds.append(one)
                    print(
                        processes,
                        "processes:",
                        " ".join(f"{key} {value:.1f}" for key, value in one._asdict().items()),
                        flush=True,
                    )
    for processes, rounds in found.items():
        middle = Round(*(statistics.median(each) for each in zip(*rounds, strict=True)))
        print(f"{processes} processes, median:", " ".join(f"{key} {value:.1f}" for key, value in middle._asdict().items()))
    single = found[1]
    model(
        statistics.median(each.ingress_us for each in single),
        statistics.median(each.behind_us for each in single),
        arguments.connections,
    )


if __name__ == "__main__":
    main()
