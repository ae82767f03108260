"""Mixed lengths on the real minilm without a promise: requests/s and latency of the shipped example and of what one could set.

    python -m benchmarks.lengths                                  three rounds, some two minutes
    python -m benchmarks.lengths --before ../before               beside another checkout, as `git worktree add` makes

Each run starts `gateway serve --no-ray` with the model of configs/examples/minilm.yaml, without its SLO, and asks it over REST
in a closed loop: sixteen lengths of 6 to 120 tokens, drawn at random, the same for all. Variants take turns within each round,
so that the machine's mood is shared; the round's order is turned each time.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parent.parent
LENGTHS = tuple(round(length) for length in np.linspace(6, 120, 16))
FINE = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]


def as_shipped(model: dict[str, Any]) -> None: ...


def without_ragged(model: dict[str, Any]) -> None:
    del model["ragged"]


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
def serving(checkout: Path, change: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    """Where a gateway of that checkout listens."""
    example = checkout / "configs" / "examples" / "minilm.yaml"
    model = yaml.safe_load(example.read_text())["models"][0]
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


def requests(address: str) -> dict[int, bytes]:
    """By length."""
    found = {}
    for length in LENGTHS:
        tokens = {"input_ids": [101, *range(2000, 1998 + length), 102], "attention_mask": [1] * length}
        tensors = [{"name": name, "datatype": "INT64", "shape": [1, length], "data": data} for name, data in tokens.items()]
        body = json.dumps({"inputs": tensors}).encode()
        head = f"POST /v2/models/minilm/infer HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n\r\n"
        found[length] = head.encode() + body
    return found


async def load(address: str, connections: int, seconds: float, warm_up_s: float) -> dict[int, list[float]]:
    """Latencies in ms by length, of what was answered after the warm-up."""
    host, _, port = address.rpartition(":")
    asked = requests(address)
    lengths = iter(np.random.default_rng(17).choice(LENGTHS, 100_000).tolist())
    begin = time.monotonic() + warm_up_s
    end = begin + seconds
    found: dict[int, list[float]] = {length: [] for length in LENGTHS}

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while (sent := time.monotonic()) < end:
            length = next(lengths)
            writer.write(asked[length])
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(size.split(b":")[1]))
            answered = time.monotonic()
            if begin <= answered < end:
                found[length].append((answered - sent) * 1e3)
        writer.close()

    await asyncio.gather(*[connection() for _ in range(connections)])
    return found


def told(found: dict[int, list[float]], seconds: float) -> tuple[float, float, float, float]:
    """Requests/s, p50, p99 and the longest in ms."""
    latencies = np.array([each for those in found.values() for each in those])
    p50, p99, most = np.percentile(latencies, (50, 99, 100))
    return len(latencies) / seconds, float(p50), float(p99), float(most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["shipped", "without-ragged"], choices=CHANGES)
    parser.add_argument("--before", type=Path, help="another checkout, whose gateway takes part")
    parser.add_argument("--before-variants", nargs="+", default=["shipped", "without-ragged", "fine-buckets"], choices=CHANGES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run, after the warm-up")
    parser.add_argument("--warm-up", type=float, default=3.0)
    arguments = parser.parse_args()
    runs = {name: (ROOT, CHANGES[name]) for name in arguments.variants}
    if arguments.before:
        runs |= {f"before-{name}": (arguments.before.resolve(), CHANGES[name]) for name in arguments.before_variants}
    names = list(runs)
    figures: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned:
            with serving(*runs[name]) as address:
                found = asyncio.run(load(address, arguments.connections, arguments.seconds, arguments.warm_up))
            figures[name].append(told(found, arguments.seconds))
            print(f"  {number + 1} {name:22}" + " ".join(f"{figure:7.1f}" for figure in figures[name][-1]), flush=True)
    print("medians                  rps   p50_ms  p99_ms  max_ms")
    for name in names:
        medians = [statistics.median(column) for column in zip(*figures[name], strict=True)]
        print(f"  {name:22}" + " ".join(f"{figure:7.1f}" for figure in medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
