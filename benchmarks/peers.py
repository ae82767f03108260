"""This gateway beside other servers: on `linear`, what each adds to a model that costs next to nothing; on `minilm`, real work.

    python -m benchmarks.peers --setup --rounds 3 --write FOLDER      all of it, in two hours: environments, models, tables
    python -m benchmarks.peers --setup                                only environments of those that need one
    python -m benchmarks.peers --models linear --rounds 3
    python -m benchmarks.peers --models minilm --rounds 3 --until 280 --parts closed open
    python -m benchmarks.peers --models minilm --proof plain=150      loadtest's sequential test of that rate

linear: embedded, plain, serve and triton are those of benchmarks/overhead.py, as are embedded-2 and triton-2, and the others
those of benchmarks/peer_servers.py, each in an environment of its own under --environments. Every server's answer is checked
before it is measured. Loads: wrk (REST) and h2load (gRPC), closed loop. minilm: see benchmarks/peers_minilm.py. The servers
take turns in each round, started anew, and each round begins with another.

What was measured is kept in the folder --results after every server, and a later command of the same commit and seconds goes on
from there: so a run can be made in pieces. --until ends a piece in time. Ratios are of one round each: the middle one counts,
and the least and the most stand beside it. Client and server share the machine, so only ratios mean something. `linear` needs
`wrk` and `h2load`.
"""

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import psutil

from benchmarks import peer_processes, peer_tables
from benchmarks.minilm_servers import BATCHES, NAMES
from benchmarks.overhead import PATH, ROW, Figure, Server, bodies, check, drive, running
from benchmarks.peer_embedders import EMBEDDERS, INFINITY_MODEL
from benchmarks.peer_servers import INSTALLED, NOT_RUN
from benchmarks.peer_tables import ratio
from benchmarks.peers_minilm import FIRST, USERS, Measuring, Part, Run
from benchmarks.ports import free_port
from tests.triton_server import VENV

BUILT_IN: Final = {
    "plain": "as it comes, without Ray",
    "embedded": "as it comes, on Ray Serve",
    "embedded-2": "the same with `server.ingress_replicas: 2`, which is a process for each core, with the model in both",
    "serve": "`@serve.batch` of 64, wait 0, FastAPI ingress (Ray Serve: dynamic request batching)",
    "triton": "python backend, `dynamic_batching {}` to 32 (Triton: model configuration)",
    "triton-2": "the same with two instances of the model, one for each core (`instance_group`)",
}
OURS: Final = ("embedded", "embedded-2", "plain")
PEERS: Final = (*BUILT_IN, *INSTALLED)
LOADS: Final = (("rest-json", 1), ("rest-json", 8), ("rest-json", 64), ("rest-binary", 64), ("grpc", 64))
PARTS: Final[tuple[Part, ...]] = ("bare", "tune", "closed", "open", "turns")
SPEAKS: Final = {"serve": ("rest-json", "grpc"), **dict.fromkeys(INSTALLED, ("rest-json",))}
START_S: Final = 60.0


@dataclass(frozen=True)
class Measured:
    round: int
    figure: Figure


def table(measured: Sequence[Measured], ours: str) -> str:
    """In Markdown: medians of each server and load, and how many times its rate the server `ours` does."""
    runs: dict[tuple[str, int], dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for each in measured:
        runs[each.figure.protocol, each.figure.connections][each.figure.server].append(each)
    lines = [
        "| protocol | connections | server | requests/s | p50 ms | p99 ms | µs CPU | errors "
        f"| rate of {ours}, times | p50 of {ours}, times |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (protocol, connections), servers in runs.items():
        for name, rounds in servers.items():
            figures = [each.figure for each in rounds]
            middle = {
                key: statistics.median(getattr(each, key) for each in figures) for key in ("rps", "p50_ms", "p99_ms", "cpu_us")
            }
            ratios = [
                "" if name == ours else str(ratio(by_round(servers.get(ours, []), key), by_round(rounds, key)) or "")
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
    for name, peer in EMBEDDERS.items():  # those of `linear` are among them
        if peer_processes.set_up(name, peer, folder) and name == "infinity" and not (folder / name / "model").exists():
            subprocess.run([folder / name / "bin" / "python", "-c", INFINITY_MODEL, folder / name / "model"], check=True)


def absent(name: str, environments: Path) -> str:
    """Why a server cannot be run here. Empty: it can."""
    if name.startswith("triton") and not (VENV / "bin" / "python").exists():
        return "not installed: `make triton`"
    if name == "serve-haproxy" and any(interface != "lo" for _, interface in socket.if_nameindex()):
        return f"{NOT_RUN['serve, HAProxy mode']}: `unshare --net sh -c 'ip link set lo up; exec python -m benchmarks.peers'`"
    if name in EMBEDDERS and not peer_processes.whole(name, EMBEDDERS[name], environments):
        return "not installed: `python -m benchmarks.peers --setup`"
    return ""


@contextlib.contextmanager
def installed(name: str, environments: Path, directory: Path) -> Iterator[Server]:
    port = free_port()
    variables = {"PEER_MODEL": str(Path("models/linear.onnx").resolve()), "BENTOML_DO_NOT_TRACK": "True"}
    with peer_processes.launched(name, INSTALLED[name], environments, directory, port, variables) as (process, log):
        until = time.monotonic() + START_S
        while not right(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{name} gave no right answer:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        root = psutil.Process(process.pid)
        yield Server(name, port, 0, [root, *root.children(recursive=True)])


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


def measure(name: str, environments: Path, seconds: int) -> list[Figure]:
    """One round of one server."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with installed(name, environments, directory) if name in INSTALLED else running(name, directory) as server:
            protocols = SPEAKS.get(name, ("rest-json", "rest-binary", "grpc"))
            for protocol in protocols:
                if name not in INSTALLED:  # whose answer was checked as it started
                    check(server, protocol)
                drive(server, protocol, 8, 1, directory)  # warm
            for protocol, connections in LOADS:
                if protocol in protocols:
                    found.append(drive(server, protocol, connections, seconds, directory))
    return found


def stopped(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # through the blocks that end what was started


def linear(names: Sequence[str], rounds: int, seconds: int, environments: Path, ends: float, kept: Path, ours: str) -> str:
    """Measure what is not in `kept` yet, and give the tables. ends: by time.monotonic(), nothing is started after it.

    ours: whose figures are divided by the others'.
    """
    measured: list[Measured] = []
    if kept.exists():
        measured = [Measured(each["round"], Figure(**each["figure"])) for each in json.loads(kept.read_text())]
    for number in range(rounds):
        for name in turned(names, number):
            done = any(each.round == number and each.figure.server == name for each in measured)
            if done or time.monotonic() > ends:
                continue
            figures = measure(name, environments, seconds)
            measured += [Measured(number, figure) for figure in figures]
            kept.write_text(json.dumps([asdict(each) for each in measured], indent=1))
            for each in figures:
                print(f"{number + 1} {name:9} {each.protocol:12} {each.connections:3}: {each.rps:8.0f}/s", flush=True)
    return f"{settings(names)}\n\n{table(measured, ours)}"


def minilm(
    names: Sequence[str], parts: Sequence[Part], rounds: int, seconds: int, environments: Path, ends: float, kept: Path,
    asked: dict[str, float],
) -> tuple[str, str]:  # fmt: skip
    """As `linear`. asked: by server, the rate to prove. Gives the tables and the plot."""
    runs = [Run(**each) for each in json.loads(kept.read_text())] if kept.exists() else []
    for number in range(rounds):
        for part in parts:
            if part == "turns":
                continue
            servers = ["bare"] if part == "bare" else turned(names, number)
            for name in servers:
                done = any((each.part, each.round, each.server) == (part, number, name) for each in runs)
                useless = part == "tune" and (number or name not in BATCHES)
                if done or useless or time.monotonic() > ends:
                    continue
                try:
                    runs += measuring(runs, environments, seconds).part(number, part, name, first_share(runs, name, number))
                except SystemExit as exc:
                    if not isinstance(exc.code, str):
                        raise  # somebody ends this command
                    print(f"{name}: {exc.code}", flush=True)
                    continue
                kept.write_text(json.dumps([asdict(each) for each in runs], indent=1))
    if "turns" in parts and rounds:
        following = max((run.round + 1 for run in runs if run.part == "turns"), default=0)
        for found in measuring(runs, environments, seconds).turns(following, rounds, names, ends):
            runs += found
            kept.write_text(json.dumps([asdict(each) for each in runs], indent=1))
    for name, rate in asked.items():
        runs += measuring(runs, environments, seconds).part(len(runs), "proof", name, rate)
        kept.write_text(json.dumps([asdict(each) for each in runs], indent=1))
    tables = (
        peer_tables.settings(names),
        peer_tables.closed(runs),
        peer_tables.within_slo(runs),
        peer_tables.turns(runs),
        peer_tables.saturation(runs),
        peer_tables.proofs(runs),
    )
    return "\n\n".join(filter(None, tables)), peer_tables.plot(runs)


def measuring(runs: Sequence[Run], environments: Path, seconds: int) -> Measuring:
    """With the batches that did best so far."""
    best = {name: max(rates, key=lambda rows: rates[rows]) for name, rates in peer_tables.tuned(runs).items()}
    return Measuring(environments, seconds, best, told)


def told(run: Run) -> None:
    what = f"{run.round + 1} {run.part:6} {run.server:13} {run.load:5.4g} {run.rows or '':4}"
    in_time = f"  in time {100 * run.kept:6.2f} %" if run.part in ("open", "proof") else ""
    doubt = "" if run.valid else "  NOT VALID"
    print(
        f"{what}: {run.rps:7.1f}/s of {run.speed:5.1f}  p99 {run.p99_ms:7.1f} ms{in_time}  {run.errors} errors"
        f" {run.shape}{doubt}",
        flush=True,
    )


def first_share(runs: Sequence[Run], name: str, number: int) -> float:
    """Where a search begins: at three quarters of what the server answered with most users, in this round if that is known."""
    shares = {run.round: run.share for run in runs if (run.part, run.server, run.load) == ("closed", name, USERS[-1])}
    return 0.75 * shares.get(number, statistics.median(shares.values())) if shares else FIRST


def commit() -> str:
    """Of this working tree, whose gateway is measured."""
    command = ("git", "rev-parse", "--short", "HEAD")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "no-commit"


def turned(names: Sequence[str], number: int) -> list[str]:
    """Each round begins with another."""
    turn = number % max(1, len(names))
    return [*names[turn:], *names[:turn]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="make the environments first; without --rounds, nothing else")
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir(), "gateway-peers"))
    parser.add_argument("--models", nargs="+", choices=("linear", "minilm"), default=["linear", "minilm"])
    parser.add_argument("--peers", nargs="+", choices=sorted({*PEERS, *NAMES}), default=[*dict.fromkeys((*PEERS, *NAMES))])
    parser.add_argument("--ours", choices=OURS, default=OURS[0], help="of linear: whose figures are told as times the others'")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1], help="of minilm; turns: only if asked")
    parser.add_argument(
        "--proof", nargs="+", default=[], metavar="SERVER=RATE", help="rates of minilm to prove, after all else"
    )
    parser.add_argument("--rounds", type=int, help="3, if nothing else is asked for")
    parser.add_argument("--seconds", type=int, help="of each load: 3 on linear, 8 on minilm")
    parser.add_argument("--until", type=float, default=float("inf"), help="start nothing after so many seconds")
    parser.add_argument(
        "--results", type=Path, default=Path(tempfile.gettempdir(), "gateway-peers-results"),
        help="what is kept there, of this commit and as many seconds, is not measured again",
    )  # fmt: skip
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the tables and the plot there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, stopped)
    if arguments.setup:
        set_up(arguments.environments)
    rounds = arguments.rounds if arguments.rounds is not None else 0 if arguments.setup or arguments.proof else 3
    if not rounds and not arguments.proof and not arguments.write:
        return 0
    for tool in ("wrk", "h2load"):
        if "linear" in arguments.models and shutil.which(tool) is None:
            parser.error(f"{tool} is not installed (Debian: wrk, nghttp2-client)")
    present = []
    for name in arguments.peers:
        if reason := absent(name, arguments.environments):
            print(f"{name}: {reason}", flush=True)
        else:
            present.append(name)
    results = arguments.results / commit()
    results.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + arguments.until
    written: dict[str, str] = {}
    if "linear" in arguments.models:
        names = [name for name in PEERS if name in present]
        seconds = arguments.seconds or 3
        kept = results / f"linear-{seconds}s.json"
        written["linear.md"] = linear(names, rounds, seconds, arguments.environments, ends, kept, arguments.ours)
    if "minilm" in arguments.models:
        names = [name for name in NAMES if name in present]
        seconds = arguments.seconds or 8
        kept = results / f"minilm-{seconds}s.json"
        asked = {name: float(rate) for name, _, rate in (each.partition("=") for each in arguments.proof)}
        written["minilm.md"], written["peers-minilm.svg"] = minilm(
            names, arguments.parts, rounds, seconds, arguments.environments, ends, kept, asked
        )
    print(f"\n{os.cpu_count()} cores, client included.")
    for name, text in written.items():
        if name.endswith(".md"):
            print(f"\n{text}")
        if arguments.write:
            arguments.write.mkdir(parents=True, exist_ok=True)
            (arguments.write / name).write_text(text.rstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
