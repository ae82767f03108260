"""What `make demo` shows: a real model served on Ray, asked over REST and gRPC, measured, and the cheapest settings found.

Starts `gateway serve --ray configs/examples/minilm.yaml` on free ports, ends it at the end. Every step is bounded in time.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.http.aio as aioclient
from tritonclient.utils import InferenceServerException

CONFIG = "configs/examples/minilm.yaml"
SPACE = "configs/loadtests/minilm-local.yaml"
RESULTS = "loadtest-results/demo"
REQUESTS = 400
CONCURRENT = 16

SENTENCES = [
    "The cat sat on the mat and watched the rain.",
    "Kubernetes restarted the pod after its liveness probe failed.",
    "The central bank raised interest rates by half a percent.",
    "Simmer the onions in butter until they are golden.",
    "The striker scored twice in the second half.",
    "A larger batch raises throughput, but each request waits longer.",
]
QUERIES = [
    "How do batching and latency trade off?",
    "a recipe with fried onions",
    "Who won the football match?",
    "monetary policy tightening",
]


@contextlib.contextmanager
def gateway(*options: str) -> Iterator[tuple[str, str]]:
    """Run a gateway; gives its HTTP and gRPC addresses."""
    command = [sys.executable, "-m", "gateway.cli", "serve", CONFIG, "--http-port", "0", "--grpc-port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()  # the gateway's own start-up is bounded; it ends, and so does this, if it fails
        if not line.startswith("gateway ready"):
            raise SystemExit(f"the gateway did not start: {line or 'see its messages above'}")
        addresses = dict(part.split("=") for part in line.split()[2:])
        yield addresses["http"], addresses["grpc"]
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def texts(client: object, sentences: list[str]) -> list[object]:
    """One input tensor TEXT BYTES (rows, 1), for either tritonclient."""
    tensor = client.InferInput("text", [len(sentences), 1], "BYTES")  # type: ignore[attr-defined]  # two modules of one shape
    tensor.set_data_from_numpy(np.array([[sentence.encode()] for sentence in sentences], dtype=object))
    return [tensor]


def nearest(http: str, grpc: str) -> None:
    """Embed the sentences over REST and the queries over gRPC, and show which belong together."""
    with httpclient.InferenceServerClient(http, network_timeout=60.0) as rest:
        known = rest.infer("minilm-text", texts(httpclient, SENTENCES)).as_numpy("embedding")
    with grpcclient.InferenceServerClient(grpc) as stub:
        asked = stub.infer("minilm-text", texts(grpcclient, QUERIES), client_timeout=60.0).as_numpy("embedding")
    for query, scores in zip(QUERIES, asked @ known.T, strict=True):
        best = int(scores.argmax())
        print(f"  {query!r}\n      -> {SENTENCES[best]!r}  (cosine {scores[best]:.2f})")


async def measure(http: str) -> tuple[np.ndarray, int]:
    """Latencies in ms of REQUESTS single-sentence requests, CONCURRENT at a time, and how many were refused.

    On a machine too slow for the SLO the gateway refuses (503) what would be late, rather than let all be late.
    """
    latencies: list[float] = []
    refused = 0
    todo = iter(range(REQUESTS))
    async with aioclient.InferenceServerClient(http, conn_limit=CONCURRENT) as client:

        async def user() -> None:
            nonlocal refused
            for index in todo:
                started = time.perf_counter()
                try:
                    await client.infer("minilm-text", texts(httpclient, [SENTENCES[index % len(SENTENCES)]]))
                except InferenceServerException as exc:
                    if exc.status() not in ("503", "504"):
                        raise
                    refused += 1
                else:
                    latencies.append((time.perf_counter() - started) * 1e3)

        await asyncio.wait_for(asyncio.gather(*(user() for _ in range(CONCURRENT))), 120)
    return np.array(latencies), refused


def show_metrics(http: str) -> None:
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            counts = line.startswith(("gateway_requests_total", "gateway_batches_total")) and "minilm-text" in line
            if counts and not line.endswith(" 0"):
                print(f"  {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-ray", action="store_true", help="one plain process instead of Ray")
    parser.add_argument("--no-recommend", action="store_true", help="without the search for the cheapest settings")
    arguments = parser.parse_args()
    print(f"Starting the gateway {'in one process' if arguments.no_ray else 'on Ray'}: {CONFIG}")
    with gateway(*(["--no-ray"] if arguments.no_ray else ["--ray-address", "local"])) as (http, grpc):
        print(f"Ready: REST on {http}, gRPC on {grpc}. Nearest sentence of each query:")
        nearest(http, grpc)
        started = time.perf_counter()
        latencies, refused = asyncio.run(measure(http))
        rate = REQUESTS / (time.perf_counter() - started)
        p50, p99 = np.percentile(latencies, (50, 99))
        print(
            f"{REQUESTS} requests, {CONCURRENT} at a time: p50 {p50:.1f} ms, p99 {p99:.1f} ms, {rate:.0f}/s, {refused} refused"
        )
        print("From /metrics:")
        show_metrics(http)
    print("The gateway has drained and ended.")
    if arguments.no_recommend:
        return 0
    print(f"Which way to serve it for the least money? loadtest recommend {SPACE}")
    recommend = [sys.executable, "-m", "loadtest.cli", "recommend", SPACE, "--out", RESULTS, "--fresh"]
    code = subprocess.run(recommend, check=False, timeout=600).returncode
    print(f"The report with its plots: {RESULTS}/report.html")
    if code == 3:  # too much noise to say anything, as the report says
        print("This machine was too busy, or too slow, for an answer in four minutes. What was served above is not in doubt.")
    # 1: no candidate met the SLO on this machine, which is an answer too.
    return 0 if code in (0, 1, 3) else code


if __name__ == "__main__":
    sys.exit(main())
