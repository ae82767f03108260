"""The gateway beside SageMaker's old PyTorch container, serving the same packages, in one run of some four minutes.

    python -m benchmarks.sagemaker_pytorch
    python -m benchmarks.sagemaker_pytorch --old ENV                       with its environment at hand
    python -m benchmarks.sagemaker_pytorch --packages own --rounds 1       shorter

    gateway       `gateway sagemaker --model FOLDER`
    torchserve    what the container's entry runs: `sagemaker_pytorch_serving_container.serving.main`, which writes TorchServe's
                  settings and starts it with AWS's handler: a worker for each core, one request at a time. Only the place of
                  those settings and of the package, and the ports, are others than there

The environment, if ENV is not there, is made with the last releases of AWS's and TorchServe's on PyPI and this PyTorch. First
both get every request of tests/backends/sagemaker_cases.py: what one answers with 200 the other answers with the same bytes and
type, and what one fails on the other fails on, or the run ends. Then those to `own`, whose handlers read JSON, CSV and images,
are measured, in turns of both; a round in front is not counted, as Java's compiler needs it. Load: h2load as in
benchmarks/sagemaker.py. Client and servers share the machine, so only ratios of this run mean something. Nothing is run on AWS.
Needs `h2load` (Debian: nghttp2-client), `java` (default-jre-headless), root.
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.ports import free_port
from benchmarks.sagemaker import INVOCATIONS, Case, Figure, Server, contained, gateway_command, load, medians, ratio
from tests.backends.sagemaker_cases import PACKAGES, REQUESTS, Request, write_package

# PyYAML, which TorchServe imports, and pkg_resources, which AWS's code imports, are in neither's requirements.
NEEDED: Final = (
    "sagemaker-pytorch-inference==2.0.25", "sagemaker-inference==1.10.1", "torchserve==0.12.0", "pyyaml==6.0.3", "setuptools<81"
)  # fmt: skip
SERVERS: Final = ("gateway", "torchserve")
MEASURED: Final = "own"
FORMS: Final = {
    "JSON": ("application/json", "application/json"),
    "CSV": ("text/csv", "text/csv"),
    "image": ("image/x-portable-pixmap", "application/json"),
}

ENTRY: Final = """
from sagemaker_pytorch_serving_container import serving, torchserve

torchserve.TS_CONFIG_FILE = {settings!r}  # of the container: in /etc
serving.main()
"""


def make_environment(environment: Path) -> None:
    import torch

    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"torch=={torch.__version__.partition('+')[0]}", *NEEDED], check=True)


def answer(port: int, request: Request) -> tuple[int, str, bytes]:
    """Status, content type and body. Raises: OSError, HTTPException, if there is none."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        headers = {"Content-Type": request.content_type} | ({"Accept": request.accept} if request.accept else {})
        connection.request("POST", INVOCATIONS, request.body, headers)
        told = connection.getresponse()
        return told.status, told.getheader("Content-Type", ""), told.read()


def answers(port: int, request: Request) -> bool:
    try:
        return answer(port, request)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def running(name: str, package: str, folder: Path, environment: Path) -> contextlib.AbstractContextManager[Server]:
    """A server of a package from its start to its end, ready."""
    port, place = free_port(), Path(tempfile.mkdtemp(dir=folder))
    model = write_package(place / "model", package)
    if name == "gateway":
        command, variables = gateway_command(model)
    else:
        entry = ENTRY.format(settings=str(place / "ts.properties"))
        command = ["env", "-C", str(place), str(environment.absolute() / "bin/python"), "-c", entry]
        variables = {"SAGEMAKER_BASE_DIR": str(place), "TEMP": str(place), "TMPDIR": str(place)}
        variables["PATH"] = f"{environment.absolute() / 'bin'}:{os.environ['PATH']}"
        # as its own settings allow; what AWS's code writes is 0.0.0.0, and ports that are the same in all containers
        variables["TS_INFERENCE_ADDRESS"] = variables["TS_MANAGEMENT_ADDRESS"] = f"http://127.0.0.1:{port}"
        variables["TS_METRICS_ADDRESS"] = f"http://127.0.0.1:{free_port()}"
        variables |= {f"TS_GRPC_{which}_PORT": str(free_port()) for which in ("INFERENCE", "MANAGEMENT")}
    first = next(each for each in REQUESTS if each.package == package)
    return contained(name, command, variables, port, place / "log", lambda: answers(port, first))


def compare(package: str, gateway: Server, torchserve: Server) -> tuple[int, int]:
    """How many requests both answer with the same, and how many both fail on. Raises: SystemExit, if one is answered unlike."""
    same = failed = 0
    for request in REQUESTS:
        if request.package != package:
            continue
        ours, theirs = answer(gateway.port, request), answer(torchserve.port, request)
        if ours[0] != 200 and theirs[0] != 200:
            failed += 1
        elif ours == theirs:
            same += 1
        else:
            raise SystemExit(f"{request.name}: the gateway answers {ours}, TorchServe {theirs}")
    return same, failed


def measured(server: Server, form: str, connections: int, seconds: float, folder: Path) -> Figure:
    kind, accept = FORMS[form]
    asked = next(each for each in REQUESTS if (each.package, each.content_type, each.accept) == (MEASURED, kind, accept))
    return load(
        server, Case(MEASURED, None, 0), connections, seconds, folder, form=form, body=asked.body,
        headers={"Content-Type": kind, "Accept": accept}, answer_bytes=len(answer(server.port, asked)[2]),
    )  # fmt: skip


def report(figures: list[Figure]) -> None:
    print(f"\n{os.cpu_count()} cores, client included; {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC. Not run on AWS.\n")
    print("| body | connections | server | requests | errors | requests/s | p50 ms | p99 ms | µs CPU per request |")
    print("|---|---|---|---|---|---|---|---|---|")
    found = medians(figures)
    for one in found.values():
        print(
            f"| {one.form} | {one.connections} | {one.server} | {one.requests} | {one.errors} | {one.rps:.0f} "
            f"| {one.p50_ms:.2f} | {one.p99_ms:.2f} | {one.cpu_us:.0f} |"
        )
    print()
    for ours in (key for key in found if key[1] == "gateway"):
        theirs = (ours[0], "torchserve", *ours[2:])
        rate, p50, p99, cpu = (ratio(figures, ours, theirs, number) for number in ("rps", "p50_ms", "p99_ms", "cpu_us"))
        print(
            f"{ours[2]}, {ours[3]} connections: {rate:.1f} times the requests/s of torchserve, 1/{1 / p50:.1f} of its p50, "
            f"1/{1 / p99:.1f} of its p99, 1/{1 / cpu:.1f} of its CPU"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, metavar="ENV", help="made if it is not there; left out: for this run")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="to compare, of %(default)s; own is measured too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    parser.add_argument("--connections", default="1,16")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    for tool in ("h2load", "java", "unshare"):
        if shutil.which(tool) is None:
            parser.error(f"{tool} is not installed (Debian: nghttp2-client, default-jre-headless, util-linux)")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="sm-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        environment = arguments.old or folder / "env"
        if not environment.exists():
            make_environment(environment)
        for package in arguments.packages.split(","):
            with contextlib.ExitStack() as stack:
                servers = [stack.enter_context(running(name, package, folder, environment)) for name in SERVERS]
                same, failed = compare(package, *servers)
                firsts = ", ".join(f"{server.name} {server.first_s:.1f} s" for server in servers)
                print(f"{package}: {same} answers the same, {failed} refused by both; first answer: {firsts}", flush=True)
                for number in range(arguments.rounds + 1) if package == MEASURED else ():
                    for form in FORMS:
                        for connections in map(int, arguments.connections.split(",")):
                            for server in servers:
                                figure = measured(server, form, connections, arguments.seconds, folder)
                                print(
                                    f"{number} {form:5} {connections:3} conns {server.name:10} {figure.rps:7.0f}/s "
                                    f"p50 {figure.p50_ms:7.2f} p99 {figure.p99_ms:7.2f} ms {figure.errors} errors",
                                    flush=True,
                                )
                                figures += [figure] if number else []
    if figures:
        report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in figures], indent=1))


if __name__ == "__main__":
    main()
