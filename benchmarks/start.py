"""How long from the command to the first answer of plain `linear`, and how much memory; and what of that is Ray's, on Ray.

    python -m benchmarks.start --rounds 7                     from a checkout: as Python first finds it, and with bytecode kept
    python -m benchmarks.start --rounds 7 --environment ENV   and of an environment in which the wheel is installed
    python -m benchmarks.start --rounds 3 --ray               on Ray: beside `ray start` alone, on it, and on one of its own

Python compiles what it imports, and keeps that beside the files for the next start. pip does so when it installs a wheel, and
all packages here were installed by it. A checkout is compiled by its first start; where files cannot be written, or
PYTHONDONTWRITEBYTECODE is set, by each. `first` and `kept` are those two: both start from the same copy of the packages.

The starts take turns, after one of each that does not count. The answer is asked for every 2 ms, and must be 200. Memory is
resident, a second later: by then the gateway has given back what only its start needs. On Ray it is the proportional share
(PSS) of all processes, as they share much. Only the loopback is used. Needs models/linear.onnx.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from benchmarks.many_models import ask, configuration
from benchmarks.ports import free_port, ray_port

ROOT: Final = Path(__file__).parent.parent
GIVE_UP_S: Final = 120.0
_POLL_S: Final = 0.002
_WRITES_NONE: Final = "PYTHONDONTWRITEBYTECODE"


class Case(NamedTuple):
    """Where the command runs, and with what of the environment."""

    name: str
    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]


class Started(NamedTuple):
    """first_s: until the answer. cpu_s: of the process by then. resident_mb: a second later."""

    first_s: float
    cpu_s: float
    resident_mb: float


def plain_cases(folder: Path, installed: Path | None) -> list[Case]:
    for package in ("gateway", "backends"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    usual = {key: value for key, value in os.environ.items() if key not in (_WRITES_NONE, "PYTHONPATH")}
    checkout = (sys.executable, "-m", "gateway", "serve")
    cases = [
        Case("checkout, first", checkout, folder, usual | {_WRITES_NONE: "1"}),
        Case("checkout, kept", checkout, folder, usual | {"PYTHONPYCACHEPREFIX": str(folder / "kept")}),
    ]
    if installed is not None:
        cases.append(Case("installed wheel", (str(installed.absolute() / "bin" / "gateway"), "serve"), Path("/"), usual))
    return cases


def start(case: Case, config: Path, port: int) -> Started:
    began = time.perf_counter()
    process = subprocess.Popen(
        [*case.command, str(config), "--no-ray", "--quiet"], cwd=case.folder, env=case.environment, stdout=subprocess.DEVNULL
    )
    try:
        first_s = answered(process, port, began)
        times = psutil.Process(process.pid).cpu_times()
        time.sleep(1)
        return Started(first_s, times.user + times.system, psutil.Process(process.pid).memory_info().rss / 1e6)
    finally:
        process.terminate()
        process.wait(60)


def answered(process: "subprocess.Popen[bytes]", port: int, began: float) -> float:
    """Seconds until the model answers."""
    while ask(port, 1) != 200:
        if process.poll() is not None or time.perf_counter() - began > GIVE_UP_S:
            raise SystemExit("the gateway did not start")
        time.sleep(_POLL_S)
    return time.perf_counter() - began


def plain(rounds: int, installed: Path | None) -> None:
    found: dict[str, list[Started]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        folder, port = Path(temporary), free_port()
        config = folder / "linear.yaml"
        config.write_text(configuration(1, port, 64))
        cases = plain_cases(folder, installed)
        for number in range(rounds + 1):
            for case in cases:
                started = start(case, config, port)
                if number:
                    found[case.name].append(started)
    print("| | first answer s | of CPU s | resident MB |\n|---|---|---|---|")
    for name, own in found.items():
        cells = [
            spread([getattr(each, key) for each in own], digits) for key, digits in zip(Started._fields, (2, 2, 0), strict=True)
        ]
        print(f"| {' | '.join((name, *cells))} |")


def spread(numbers: Sequence[float], digits: int) -> str:
    return f"{statistics.median(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


# on Ray


@contextlib.contextmanager
def ray_alone(folder: str) -> Iterator[tuple[str, float, psutil.Process]]:
    """`ray start`, its address, and how long it took."""
    port = ray_port()
    command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--port", str(port)]
    command += ["--node-ip-address", "127.0.0.1", "--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", folder]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "Ray runtime started" in line:
                break
        else:
            raise SystemExit("Ray did not start")
        yield f"127.0.0.1:{port}", time.perf_counter() - began, psutil.Process(process.pid)
    finally:
        end(process)


def end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """It and all that it has started."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(family, 30)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def share_mb(*roots: psutil.Process) -> dict[str, float]:
    """Of these processes and all that they have started, by what they are called."""
    found: dict[str, float] = defaultdict(float)
    for root in roots:
        for each in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(each.cmdline())
                name = re.search(r"ray::[\w:]+|raylet/raylet|gcs_server|gateway|\w+\.py\b", line)
                found[name[0] if name else each.name()] += each.memory_full_info().pss / 1e6
    return found


def on_ray(rounds: int) -> None:
    """Each round: Ray alone, then a gateway on it; and one that starts a Ray of its own."""
    seconds: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="ray-") as folder:
            with ray_alone(folder) as (address, took_s, ray):
                time.sleep(1)
                seconds["`ray start` alone"].append(took_s)
                memory["`ray start` alone"].append(sum(share_mb(ray).values()))
                with gateway_on(address, folder) as (took_s, gateway):
                    time.sleep(1)
                    seconds["the gateway on that"].append(took_s)
                    shares = share_mb(ray, gateway)
                    memory["the gateway on that"].append(sum(shares.values()))
                    print({name: round(each) for name, each in shares.items()}, flush=True)
            with gateway_on("local", folder) as (took_s, gateway):
                time.sleep(1)
                seconds["the gateway, with a Ray of its own"].append(took_s)
                memory["the gateway, with a Ray of its own"].append(sum(share_mb(gateway).values()))
    print("| | seconds | MB, with all of Ray's |\n|---|---|---|")
    for name in seconds:
        cells = spread(seconds[name], 1), spread(memory[name], 0)
        print(f"| {' | '.join((name, *cells))} |")


@contextlib.contextmanager
def gateway_on(address: str, folder: str) -> Iterator[tuple[float, psutil.Process]]:
    port = free_port()
    config = Path(folder, "linear.yaml")
    config.write_text(configuration(1, port, 64))
    command = [sys.executable, "-m", "gateway", "serve", str(config), "--ray", "--ray-address", address, "--quiet"]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield answered(process, port, began), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--environment", type=Path, metavar="ENV", help="in which the wheel is installed")
    parser.add_argument("--ray", action="store_true", help="on Ray, and nothing else")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through the blocks that end what was started
    if arguments.ray:
        on_ray(arguments.rounds)
    else:
        plain(arguments.rounds, arguments.environment)


if __name__ == "__main__":
    main()
