"""all-MiniLM-L6-v2 on one GPU: this gateway and a real Triton (python backend, CUDA), the same requests to both.

    python -m benchmarks.gpu --json gpu.json                 each server in turn, 1 to 256 users
    python -m benchmarks.gpu --open                          and the highest rate at which 99 % are in time
    python -m benchmarks.gpu --device cpu --variants ort triton-ort torch triton-torch --users 1 8 --seconds 2

Sixteen lengths of 6 to 120 tokens at random, one row each, REST with JSON, sent by `loadtest`. Each server starts once, unless
--open starts the gateway again, as it is told the SLO there; with several --rounds all stay up, stopped while it is not their
turn. A line is printed as soon as it is known: one that fails says why in one line, and the others go on. Before its loads
each is asked all lengths at once, and its answers are compared with those of ONNX Runtime on the CPU.

Triton has the same files in the same libraries, lengths mixed and padded by its model, dynamic batching with no delay, and as
many instances as the gateway has sessions, each in a process of its own. Its stub takes numpy 1 alone: with numpy 2 it passes
wrong values. Where .venv-triton is no whole environment, numpy 1.26 must lie in its site-packages, beside pytriton.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import uvloop

from benchmarks.gpu_servers import TRITON, Server, answer, body, cosine, gateway, last_words, triton
from benchmarks.lengths import LENGTHS
from benchmarks.processor_time import cpu_between, cpu_s
from loadtest.measuring.generator import measure
from loadtest.results import LoadSpec, RunResult, SloSpec

WARM_S: Final = 2.0
WARM_USERS: Final = 64
UNCOUNTED_S: Final = 0.5  # of each load, its start
DRAIN_S: Final = 20.0
SHARE: Final = 0.99
CLOSE: Final = 1.06  # the lowest rate that was missed by the highest that was kept: then the search ends
MOST_TRIES: Final = 6
NAMES: Final = (
    "ort", "triton-ort", "ort-fp16", "triton-ort-fp16", "torch", "triton-torch",
    "ort-fp16-graphs", "torch-bf16-graphs", "torch-bf16-compile",
)  # fmt: skip
"""In order of weight: a run may be cut off."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One load. load: users, or requests/s. rows: mean of a batch, as the server tells. cpu_us: of the server, per request.

    kept: of the open loop, the share in time. fault: why the generator says that it does not count.
    """

    server: str
    part: str
    round: int
    load: float
    rps: float
    p50_ms: float
    p99_ms: float
    errors: int
    cpu_us: float
    rows: float
    kept: float = math.nan
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    device: str
    sessions: int
    seconds: float
    processes: int
    slo_ms: float
    folder: Path  # of the requests


Figures = Generator[Figure, None, None]


# loads


def family(server: Server) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(server.pid)
        return [root, *root.children(recursive=True)]
    return []


def signalled(server: Server, number: signal.Signals) -> None:
    for process in family(server):
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def loaded(server: Server, setting: Setting, number: int, *, users: int = 0, rate: float = 0.0) -> Figure:
    """users: of a closed loop; rate: of an open one, in requests/s."""
    spec = LoadSpec(
        target=f"http://127.0.0.1:{server.port}", model="minilm", payloads=(str(setting.folder),), seed=number,
        duration_s=setting.seconds + UNCOUNTED_S, warmup_s=UNCOUNTED_S, processes=setting.processes, timeout_s=5.0,
    )  # fmt: skip
    closed = replace(spec, pattern=f"users:count={users}", connections=max(256, users))
    opened = replace(spec, rate_rps=rate, slo=SloSpec.parse(f"p99<{setting.slo_ms:g}ms"), timeout_s=2.0)
    before = cpu_s(family(server))
    result = uvloop.run(measure(closed if users else opened))
    return figure(server.name, number, users or rate, result, cpu_between(before, cpu_s(family(server))))


def figure(name: str, number: int, load: float, result: RunResult, spent_s: float) -> Figure:
    return Figure(
        name, "open" if result.spec.slo else "closed", number, load, result.succeeded_rps,
        result.latency.p50, result.latency.p99, sum(result.errors.values()),
        spent_s / max(1, result.succeeded + result.warmup_requests) * 1e6,
        result.server.rows_per_execution if result.server else math.nan,
        result.attainment.estimate if result.attainment else math.nan,
        "" if result.valid else "; ".join(result.reasons),
    )  # fmt: skip


def next_rate(tried: Sequence[tuple[float, bool]], first: float, most: float) -> float | None:
    """Which rate to try next, of those up to `most`, given those that were tried and whether they were kept. None: known."""
    if not tried:
        return first
    low, high = bracket(tried, most)
    return None if len(tried) == MOST_TRIES or (low and high / low <= CLOSE) else (low + high) / 2


def bracket(tried: Sequence[tuple[float, bool]], most: float) -> tuple[float, float]:
    """The highest rate that was kept below the lowest that was missed, 0 if there is none; and that, or `most`."""
    high = min((rate for rate, kept in tried if not kept), default=most)
    return max((rate for rate, kept in tried if kept and rate < high), default=0.0), high


def search(server: Server, setting: Setting, best: float) -> Figures:
    """For the highest rate of which enough are in time. best: the requests/s of the closed loop."""
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, best / 2, best * 1.1)) is not None:
        found = loaded(server, setting, len(tried) + 1, rate=rate)
        yield found
        tried.append((rate, found.kept >= SHARE))
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until:  # what clients gave up is out of the way
            began = time.monotonic()
            with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError):
                answer(server.port, LENGTHS[0], 5.0)
                if time.monotonic() - began < setting.slo_ms / 1e3:
                    break


@contextlib.contextmanager
def ready(name: str, setting: Setting, slo_ms: float = 0.0) -> Iterator[Server]:
    """The server, checked and warm. Raises: RuntimeError, with the end of its log."""
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
        began = time.monotonic()
        place = (setting.device, setting.sessions)
        try:
            serving = triton(name, *place, folder) if name in TRITON else gateway(name, *place, slo_ms, folder)
            server = opened.enter_context(serving)
            opened.callback(signalled, server, signal.SIGCONT)
            lowest, started_s = cosine(server), time.monotonic() - began
            said(f"{name:19}{f'SLO {slo_ms:g} ms, ' if slo_ms else ''}right: cosine {lowest:.6f}, after {started_s:.1f} s")
            loaded(server, replace(setting, seconds=WARM_S), 0, users=WARM_USERS)
            yield server
        except Exception as exc:
            raise RuntimeError(f"{type(exc).__name__}: {str(exc).partition(chr(10))[0][:200]} {last_words(folder)}") from exc


def measured(names: Sequence[str], setting: Setting, users: Sequence[int], rounds: int, *, searched: bool) -> Figures:
    """Whoever fails is not tried again."""
    left, best = list(names), dict.fromkeys(names, 0.0)
    up: dict[str, tuple[Server, contextlib.ExitStack]] = {}
    with contextlib.ExitStack() as everything:
        for number in range(1, rounds + 1):
            turn = (number - 1) % max(1, len(left))
            for name in [*left[turn:], *left[:turn]]:
                try:
                    if name not in up:
                        place = everything.enter_context(contextlib.ExitStack())
                        up[name] = place.enter_context(ready(name, setting)), place
                    server, place = up[name]
                    signalled(server, signal.SIGCONT)
                    for count in users:
                        found = loaded(server, setting, number, users=count)
                        best[name] = max(best[name], found.rps)
                        yield found
                    if number < rounds:
                        signalled(server, signal.SIGSTOP)
                        continue
                    if searched and name in TRITON:
                        yield from search(server, setting, best[name])
                    place.close()
                    if searched and name not in TRITON:
                        with ready(name, setting, setting.slo_ms) as promised:
                            yield from search(promised, setting, best[name])
                except Exception as exc:  # whatever it is, the others go on
                    said(f"{name:19}FAILED: {' '.join(str(exc).split())[:900]}")
                    left.remove(name)
                    if name in up:
                        with contextlib.suppress(Exception):  # it was told
                            up[name][1].close()


# what is told


def said(line: str) -> None:
    print(line, flush=True)


COLUMNS: Final = ("load", "round", "rps", "p50_ms", "p99_ms", "errors", "cpu_us", "rows")
WIDTHS: Final = (12, 5, 8, 8, 8, 6, 7, 6)


def line(one: Figure) -> str:
    load = f"{one.load:.0f} users" if one.part == "closed" else f"{one.load:.0f}/s"
    kept = "" if math.isnan(one.kept) else f"{one.kept:.2%}"
    return (
        f"{one.server:19}{load:>12} {one.round:5} {one.rps:8.0f} {one.p50_ms:8.2f} {one.p99_ms:8.2f} {one.errors:6}"
        f" {one.cpu_us:7.0f} {one.rows:6.1f}  {kept}{f' ({one.fault[:90]})' if one.fault else ''}"
    )


def table(figures: Sequence[Figure]) -> str:
    """In Markdown: of each server requests/s and p99 by users, medians of the rounds, and the highest rate that was kept."""
    users = sorted({one.load for one in figures if one.part == "closed"})
    lines = ["| |" + "".join(f" {count:.0f} users: rps, p99 ms |" for count in users) + " highest rate in time |"]
    lines.append("|---|" + "---|" * (len(users) + 1))
    for name in dict.fromkeys(one.server for one in figures):
        own = [one for one in figures if one.server == name]
        row = f"| {name} |"
        for count in users:
            there = [(one.rps, one.p99_ms) for one in own if one.part == "closed" and one.load == count]
            row += " {:.0f}, {:.1f} |".format(*np.median(there, axis=0)) if there else " |"
        low, _ = bracket([(one.load, one.kept >= SHARE) for one in own if one.part == "open"], math.inf)
        lines.append(row + (f" {low:.0f} |" if low else " |"))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--variants", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--users", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=2, help="of the gateway, and instances of Triton")
    parser.add_argument("--processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)), help="that send")
    parser.add_argument("--open", action="store_true", help="search the highest rate in time as well")
    parser.add_argument("--slo-ms", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="written after each load")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end too
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said(subprocess.run(smi, capture_output=True, text=True, timeout=20, check=True).stdout.strip())
    said(f"{arguments.device}, {os.cpu_count()} cores, {arguments.sessions} sessions, {arguments.processes} processes send")
    said(" " * 19 + " ".join(f"{each:>{width}}" for each, width in zip(COLUMNS, WIDTHS, strict=True)) + "  in time")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="gpu-requests-") as folder:
        for length in LENGTHS:
            Path(folder, f"{length:03d}.json").write_bytes(body(length))
        setting = Setting(
            arguments.device, arguments.sessions, arguments.seconds, arguments.processes, arguments.slo_ms, Path(folder)
        )
        found = measured(arguments.variants, setting, arguments.users, arguments.rounds, searched=arguments.open)
        with contextlib.closing(found):
            try:
                for one in found:
                    said(line(one))
                    figures.append(one)
                    if arguments.json:
                        arguments.json.write_text(json.dumps([asdict(each) for each in figures], indent=1))
            finally:  # cut off, too
                said(table(figures))


if __name__ == "__main__":
    main()
