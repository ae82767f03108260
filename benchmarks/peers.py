"""This gateway beside other servers on `linear`: what each adds to a model that costs next to nothing.

    python -m benchmarks.peers --setup                                         once: environments of those that need one
    python -m benchmarks.peers --rounds 3
    python -m benchmarks.peers --peers embedded triton litserve --rounds 3 --until 280

embedded, plain, serve and triton are those of benchmarks/overhead.py, the others those of benchmarks/peer_servers.py, each in
an environment of its own under --environments. Every server's answer is checked before it is measured. Loads: wrk (REST) and
h2load (gRPC), closed loop. The servers take turns in each round, started anew, and each round begins with another.

What was measured is kept in --results after every server, and a later command goes on from there: so a run can be made in
pieces. --until ends a piece in time. Ratios are of one round each: the middle one counts, and the least and the most stand
beside it. Client and server share the machine, so only ratios mean something. Needs `wrk` and `h2load`.
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.overhead import PATH, ROW, Figure, Server, bodies, check, drive, free_port, running
from benchmarks.peer_servers import INSTALLED, NOT_RUN
from tests.triton_server import VENV

OURS: Final = "embedded"
BUILT_IN: Final = {
    "plain": "as it comes, without Ray",
    "embedded": "as it comes, on Ray Serve",
    "serve": "`@serve.batch` of 64, wait 0, FastAPI ingress (Ray Serve: dynamic request batching)",
    "triton": "python backend, `dynamic_batching {}` to 32 (Triton: model configuration)",
}
PEERS: Final = ("plain", "embedded", "serve", "triton", *INSTALLED)
LOADS: Final = (("rest-json", 1), ("rest-json", 8), ("rest-json", 64), ("rest-binary", 64), ("grpc", 64))
SPEAKS: Final = {"serve": ("rest-json", "grpc"), **dict.fromkeys(INSTALLED, ("rest-json",))}
START_S: Final = 60.0


@dataclass(frozen=True)
class Measured:
    round: int
    figure: Figure


@dataclass(frozen=True)
class Ratio:
    """Of rounds: the middle one, the least and the most. With n rounds the latter enclose the true median in 1 - 2^(1-n)."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.2f}" + (f" ({self.least:.2f} to {self.most:.2f})" if self.least < self.most else "")


def ratio(ours: dict[int, float], theirs: dict[int, float]) -> Ratio | None:
    """Ours over theirs, in rounds that have both. None: there is no such round."""
    found = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]
    return Ratio(statistics.median(found), min(found), max(found)) if found else None


def table(measured: Sequence[Measured]) -> str:
    """In Markdown: medians of each server and load, and how many times its rate the gateway's on Ray is."""
    runs: dict[tuple[str, int], dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for each in measured:
        runs[each.figure.protocol, each.figure.connections][each.figure.server].append(each)
    lines = [
        "| protocol | connections | server | requests/s | p50 ms | p99 ms | µs CPU | errors "
        f"| rate of {OURS}, times | p50 of {OURS}, times |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (protocol, connections), servers in runs.items():
        for name, rounds in servers.items():
            figures = [each.figure for each in rounds]
            middle = {
                key: statistics.median(getattr(each, key) for each in figures) for key in ("rps", "p50_ms", "p99_ms", "cpu_us")
            }
            ratios = [
                "" if name == OURS else str(ratio(by_round(servers.get(OURS, []), key), by_round(rounds, key)) or "")
                for key in ("rps", "p50_ms")
            ]
            cells = [protocol, connections, name, f"{middle['rps']:.0f}", f"{middle['p50_ms']:.2f}", f"{middle['p99_ms']:.2f}"]
            cells += [f"{middle['cpu_us']:.0f}", sum(each.errors for each in figures), *ratios]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def by_round(measured: Sequence[Measured], key: str) -> dict[int, float]:
    return {each.round: float(getattr(each.figure, key)) for each in measured}


def settings(names: Sequence[str]) -> str:
    """In Markdown: how each server is set, with the page that describes it, and who is not among them, and why."""
    lines = ["| server | settings |", "|---|---|"]
    for name in names:
        told = BUILT_IN.get(name) or f"{INSTALLED[name].packages[0]}: {INSTALLED[name].settings} ({INSTALLED[name].source})"
        lines.append(f"| {name} | {told} |")
    return "\n".join([*lines, *(f"| {name} | not run: {reason} |" for name, reason in NOT_RUN.items())])


def set_up(folder: Path) -> None:
    """An environment of each peer that needs one; those that are whole are left as they are."""
    for name, peer in INSTALLED.items():
        place, whole = folder / name, folder / name / "whole"
        if whole.exists() and whole.read_text() == "\n".join(peer.packages):
            continue
        venv.create(place, clear=True, with_pip=True)
        done = subprocess.run([place / "bin" / "pip", "install", "--quiet", *peer.packages], timeout=900, check=False)
        if done.returncode:
            print(f"{name}: pip could not install {', '.join(peer.packages)}", file=sys.stderr)
        else:
            whole.write_text("\n".join(peer.packages))


def absent(name: str, environments: Path) -> str:
    """Why a server cannot be run here. Empty: it can."""
    if name == "triton" and not (VENV / "bin" / "python").exists():
        return "not installed: `make triton`"
    if name in INSTALLED and not (environments / name / "whole").exists():
        return "not installed: `python -m benchmarks.peers --setup`"
    return ""


@contextlib.contextmanager
def installed(name: str, environments: Path, directory: Path) -> Iterator[Server]:
    peer = INSTALLED[name]
    port = free_port()
    with tempfile.TemporaryDirectory(dir=directory) as fresh:
        ports = {"port": str(port), "grpc": str(free_port()), "metrics": str(free_port())}
        for file, text in peer.files.items():
            Path(fresh, file).write_text(text.format(**ports) if file == "settings.json" else text)
        command = [str(environments / name / "bin" / "python"), *(word.format(**ports) for word in peer.command)]
        environment = os.environ | {"PEER_MODEL": str(Path("models/linear.onnx").resolve()), "BENTOML_DO_NOT_TRACK": "True"}
        environment |= {"PATH": f"{environments / name / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": fresh}
        log = Path(fresh, "log")
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=fresh, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            until = time.monotonic() + START_S
            while not right(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{name} gave no right answer:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            root = psutil.Process(process.pid)
            yield Server(name, port, 0, [root, *root.children(recursive=True)])
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """It and all that it started."""
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        _, left = psutil.wait_procs([psutil.Process(process.pid), *family], 10)
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def right(port: int) -> bool:
    """Whether it answers, with the right numbers: v2 JSON, or its list of outputs alone. Wrong numbers end the run."""
    import onnxruntime

    body, headers = bodies()["rest-json"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", PATH, body, headers)
        response = connection.getresponse()
        text = response.read()
    except OSError:
        return False
    finally:
        connection.close()
    if response.status in (404, 502, 503):
        return False  # not ready yet
    if response.status != 200:
        raise SystemExit(f"expected status 200, got {response.status}: {text[:500]!r}")
    answer: Any = json.loads(text)
    (output,) = answer["outputs"] if isinstance(answer, dict) else answer
    expected = onnxruntime.InferenceSession("models/linear.onnx").run(None, {"INPUT0": ROW})[0]
    if not np.allclose(output["data"], expected.ravel(), atol=1e-5):
        raise SystemExit(f"wrong answer {output['data']}, expected {expected.ravel().tolist()}")
    return True


def measure(name: str, environments: Path, seconds: float) -> list[Figure]:
    """One round of one server."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with installed(name, environments, directory) if name in INSTALLED else running(name, directory) as server:
            protocols = SPEAKS.get(name, ("rest-json", "rest-binary", "grpc"))
            for protocol in protocols:
                if name not in INSTALLED:  # whose answer was checked as it started
                    check(server, protocol)
                drive(server, protocol, 8, 1.0, directory)  # warm
            for protocol, connections in LOADS:
                if protocol in protocols:
                    found.append(drive(server, protocol, connections, seconds, directory))
    return found


def stopped(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # through the blocks that end what was started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="make the environments, and measure nothing")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir(), "gateway-peers"))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--until", type=float, default=float("inf"), help="start nothing after so many seconds")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), "gateway-peers.json"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, stopped)
    if arguments.setup:
        set_up(arguments.environments)
        return 0
    for tool in ("wrk", "h2load"):
        if shutil.which(tool) is None:
            parser.error(f"{tool} is not installed (Debian: wrk, nghttp2-client)")
    measured: list[Measured] = []
    if arguments.results.exists():
        measured = [Measured(each["round"], Figure(**each["figure"])) for each in json.loads(arguments.results.read_text())]
    names = []
    for name in arguments.peers:
        if reason := absent(name, arguments.environments):
            print(f"{name}: {reason}", flush=True)
        else:
            names.append(name)
    begin = time.monotonic()
    for number in range(arguments.rounds):
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            done = any(each.round == number and each.figure.server == name for each in measured)
            if done or time.monotonic() - begin > arguments.until:
                continue
            figures = measure(name, arguments.environments, arguments.seconds)
            measured += [Measured(number, figure) for figure in figures]
            arguments.results.write_text(json.dumps([asdict(each) for each in measured], indent=1))
            for each in figures:
                print(f"{number + 1} {name:9} {each.protocol:12} {each.connections:3}: {each.rps:8.0f}/s", flush=True)
    print(f"\n{os.cpu_count()} cores, client included.\n\n{settings(names)}\n\n{table(measured)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
