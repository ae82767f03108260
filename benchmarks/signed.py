"""What signing costs the load generator, and how many signed requests a second one process sends on time.

    python -m benchmarks.signed cost                      one signature: ours, and botocore's
    python -m benchmarks.signed rate --rates 500 2000     against an endpoint here that checks each signature, by TLS
    python -m benchmarks.signed profile                   where the time goes (cProfile), without a network

The endpoint is a process of its own; botocore's signer there judges what it has not seen before.
"""

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from gateway.process.credentials import Credentials
from loadtest.load.signing import Keys, SignedRequests
from loadtest.measuring.generator import measure
from loadtest.results import LoadSpec, SloSpec
from tests.certificates import Authority
from tests.loadtest.fake_endpoint import ACCESS_KEY, REGION, SECRET_KEY

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}]})
VARIETY = 64
COUNT = 50_000


def requests() -> list[bytes]:
    lines = (
        "POST /endpoints/e/invocations HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(BODY)}",
    )
    return [("\r\n".join((*lines, "", "")) + BODY).encode()] * VARIETY


def signed_requests() -> SignedRequests:
    keys = Keys(ACCESS_KEY, SECRET_KEY)
    return SignedRequests(requests(), REGION, lambda: keys)


def cost() -> None:
    """Microseconds of one signature."""
    ours = signed_requests()
    began = time.perf_counter()
    for number in range(COUNT):
        ours[number % VARIETY]
    print(f"ours      {(time.perf_counter() - began) / COUNT * 1e6:6.1f} µs")
    signer = SigV4Auth(BotoCredentials(ACCESS_KEY, SECRET_KEY), "sagemaker", REGION)
    began = time.perf_counter()
    for _ in range(COUNT // 10):
        signer.add_auth(
            AWSRequest("POST", "https://h/endpoints/e/invocations", {"Content-Type": "application/json"}, BODY.encode())
        )
    print(f"botocore  {(time.perf_counter() - began) / COUNT * 1e7:6.1f} µs")


def profile() -> None:
    ours = signed_requests()
    profiler = cProfile.Profile()
    profiler.enable()
    for number in range(COUNT):
        ours[number % VARIETY]
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


def rate(rates: list[float], seconds: float) -> None:
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    os.environ.pop("AWS_SESSION_TOKEN", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority(folder)
        certificate, key = authority.issue("server")
        payload = folder / "requests.jsonl"
        payload.write_text("".join(json.dumps(json.loads(BODY) | {"id": str(number)}) + "\n" for number in range(VARIETY)))
        print(
            f"{'asked/s':>9}{'sent/s':>10}{'lag p50 ms':>12}{'lag p99 ms':>12}{'limit ms':>10}{'cores':>7}{'right':>9}  judged"
        )
        for asked in rates:
            command = [sys.executable, "-m", "tests.loadtest.fake_endpoint", str(certificate), str(key)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stdin is not None
                url = f"https://127.0.0.1:{int(process.stdout.readline())}/endpoints/e/invocations"
                spec = LoadSpec(
                    url, protocol="invocations", payloads=(str(payload),), sigv4=REGION, rate_rps=asked, duration_s=seconds,
                    slo=SloSpec.parse("p99<50ms"), connections=32,
                )  # fmt: skip
                result = uvloop.run(measure(spec, shown=Credentials(ca=str(authority.path))))
                process.stdin.close()
                seen = json.loads(process.stdout.readline())["seen"]
            own = result.generator
            told = "valid" if result.valid else f"INVALID: {'; '.join(result.reasons)}"
            print(
                f"{asked:>9.0f}{result.sent_rps:>10.0f}{own.send_lag_p50_ms:>12.3f}{own.send_lag_p99_ms:>12.3f}"
                f"{own.send_lag_limit_ms:>10.2f}{own.cpu_cores:>7.2f}{seen.get('right', 0):>9}  {told}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "rate", "profile"))
    parser.add_argument("--rates", type=float, nargs="+", default=[500.0, 2000.0, 5000.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    if arguments.what == "rate":
        rate(arguments.rates, arguments.seconds)
    else:
        {"cost": cost, "profile": profile}[arguments.what]()


if __name__ == "__main__":
    main()
