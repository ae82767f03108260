"""Do the intervals hold? Ours and the peers' on the same simulated runs near the knee, whose truth is known.

    python -m benchmarks.coverage                       # the cells of docs/loadtest.md: minutes of one core
    python -m benchmarks.coverage --cells others        # queues, loads and percentiles that the method was not made on
    python -m benchmarks.coverage --cells sequential    # `run --until-decided`: how often it passes what it should not

A cell is a server, how busy it is, and how many blocks a run has (of 10 limits and 200 requests at least, as in `loadtest
run`). Its limit is the true percentile, so the true attainment is the percentile. Each cell's figure is the share of runs whose
interval holds it, with its own exact 95 % interval. Exit code 1: that interval lies wholly outside 93 to 99 % (sequential:
above 5 %).

The peers: Wilson's score interval (GuideLLM); the percentile bootstrap over requests, and over blocks as if each were a
replicate (AIPerf); MLPerf LoadGen's bound, one-sided at 99 %, so that it should hold in 99 %.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from scipy import special, stats

from benchmarks.queues import (
    BATCHER,
    BIMODAL,
    CONSTANT,
    EXPONENTIAL,
    HYPEREXPONENTIAL,
    LARGE_BATCHER,
    RARE_STALLS,
    Server,
)
from loadtest.results import Objective, SloSpec
from loadtest.verdict.decision import CONFIDENCE, EARLY_PASS_S, JudgedRequests, judge
from loadtest.verdict.statistics import batch_means, binomial_interval, slowest

BLOCKS: Final = (20, 40, 100)
LEAST, MOST = 0.93, 0.99
METHODS: Final = ("ours", "Wilson", "bootstrap, requests", "bootstrap, blocks", "LoadGen")
LOOKS: Final = (20, 27, 36, 47, 62, 81, 106, 138, 180, 235)  # of `--until-decided`: 20 blocks, then 30 % more each time
KNEE: Final = tuple((server, busy, 99.0) for server in (CONSTANT, EXPONENTIAL, BATCHER) for busy in (0.7, 0.8, 0.9, 0.95))
OTHERS: Final = (
    *((server, busy, 99.0) for server in (BIMODAL, HYPEREXPONENTIAL, LARGE_BATCHER) for busy in (0.8, 0.9)),
    *((server, 0.85, 99.0) for server in (CONSTANT, EXPONENTIAL, BATCHER)),
    (CONSTANT, 0.9, 95.0),
    (EXPONENTIAL, 0.8, 95.0),
    (EXPONENTIAL, 0.95, 95.0),
    (BATCHER, 0.9, 95.0),
    (EXPONENTIAL, 0.8, 99.9),
)
SEQUENTIAL: Final = (
    *((CONSTANT, 0.9, 99.0), (EXPONENTIAL, 0.8, 99.0), (BATCHER, 0.8, 99.0), (BATCHER, 0.9, 99.0)),
    (RARE_STALLS, 0.8, 99.0),
)
RESAMPLES: Final = 1000


@dataclass(frozen=True, slots=True)
class Cell:
    """held: runs whose interval holds the truth, by METHODS. width: median of ours. effect: median design effect."""

    server: str
    busy: float
    percentile: float
    blocks: int
    runs: int
    held: tuple[int, ...]
    width: float
    effect: float

    @property
    def name(self) -> str:
        return f"{self.server} | {self.busy:g} | {self.percentile:g} | {self.blocks}"

    def interval(self) -> tuple[float, float]:
        """Clopper and Pearson's, of ours."""
        found = binomial_interval(self.runs - self.held[0], self.runs, 0.95)
        return found.lower, found.upper

    @property
    def outside(self) -> bool:
        lower, upper = self.interval()
        return lower > MOST or upper < LEAST


def cells(server: Server, busy: float, percentile: float, runs: int, seed: int) -> Iterator[Cell]:
    """One for each number of blocks; shorter runs are the beginnings of the longest."""
    limit_s = server.percentile(percentile, busy, seed)
    per_block = max(200, int(10 * limit_s * busy * server.rate_rps))
    rng = np.random.default_rng([3, seed])
    weights = {blocks: rng.multinomial(blocks, np.full(blocks, 1 / blocks), RESAMPLES) / blocks for blocks in BLOCKS}
    held = {blocks: np.zeros(len(METHODS), np.int64) for blocks in BLOCKS}
    widths: dict[int, list[float]] = {blocks: [] for blocks in BLOCKS}
    effects: dict[int, list[float]] = {blocks: [] for blocks in BLOCKS}
    for latency in server.runs(seed, runs, per_block * max(BLOCKS), busy):
        for blocks in BLOCKS:
            some = latency[: per_block * blocks]
            missed = some > limit_s
            means = batch_means(np.arange(len(some)) // per_block, missed, slowest(some, percentile))
            ours = means.interval(0.95)
            bounds = [
                (ours.lower, ours.upper),
                *peers(missed.reshape(blocks, per_block).mean(axis=1), len(some), weights[blocks]),
            ]
            held[blocks] += [lower <= percentile / 100 <= upper for lower, upper in bounds]
            widths[blocks].append(ours.upper - ours.lower)
            effects[blocks].append(means.design_effect)
    for blocks in BLOCKS:
        counts = tuple(int(count) for count in held[blocks])
        width, effect = float(np.median(widths[blocks])), float(np.median(effects[blocks]))
        yield Cell(server.name, busy, percentile, blocks, runs, counts, width, effect)


def peers(shares: np.ndarray, requests: int, weights: np.ndarray) -> list[tuple[float, float]]:
    """Their bounds of the attainment. shares: (blocks,) of misses. weights: (resamples, blocks)."""
    seen, z = float(shares.mean()), float(special.ndtri(0.975))
    centre, reach = seen + z * z / 2 / requests, z * np.sqrt(seen * (1 - seen) / requests + z * z / 4 / requests**2)
    wilson = (centre - reach) / (1 + z * z / requests), (centre + reach) / (1 + z * z / requests)
    of_requests = tuple(stats.binom.ppf((0.025, 0.975), requests, seen) / requests)
    of_blocks = tuple(np.quantile(weights @ shares, (0.025, 0.975)))
    loadgen = 0.0, float(special.betaincinv(round(seen * requests) + 1, requests - round(seen * requests), 0.99))
    return [(1 - most, 1 - least) for least, most in (wilson, of_requests, of_blocks, loadgen)]


def false_passes(server: Server, busy: float, percentile: float, runs: int, seed: int) -> tuple[int, int]:
    """How many runs pass a limit that is kept a tenth too seldom: at some look of the sequential test, and at all.

    A run that no look decides is judged once more at its end, as any run is.
    """
    true = 100 - 1.1 * (100 - percentile)
    limit_s = server.percentile(true, busy, seed)
    per_block = max(200, int(10 * limit_s * busy * server.rate_rps))
    slo = SloSpec((Objective("latency", percentile, limit_s * 1e3),))
    looks = [(blocks, 1 - (1 - CONFIDENCE) / len(LOOKS)) for blocks in LOOKS]
    early = passed = 0
    for latency in server.runs(seed, runs, per_block * LOOKS[-1], busy):
        for blocks, confidence in (*looks, (LOOKS[-1], CONFIDENCE)):
            ns = (latency[: per_block * blocks] * 1e9).astype(np.int64)
            requests = JudgedRequests(ns, ns, np.zeros(len(ns), bool), np.arange(len(ns)) // per_block)
            verdict = judge(slo, requests, confidence=confidence)[0].verdict
            if verdict == "pass" and confidence > CONFIDENCE and len(ns) < EARLY_PASS_S * busy * server.rate_rps:
                continue
            if verdict != "undecided":
                passed += verdict == "pass"
                early += verdict == "pass" and confidence > CONFIDENCE
                break
    return early, passed


def table(found: Sequence[Cell]) -> str:
    """As markdown."""
    lines = [
        f"| server | busy | p | blocks | ours | its 95 % interval | {' | '.join(METHODS[1:])} | width |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in found:
        ours, *others = (f"{held / cell.runs:.1%}" for held in cell.held)
        lower, upper = cell.interval()
        lines.append(
            f"| {cell.name} | {ours} | {lower:.1%} to {upper:.1%}{' OUT' * cell.outside} "
            f"| {' | '.join(others)} | {cell.width:.2%} |"
        )
    return "\n".join(lines)


_COLOURS: Final = ("#0b6bcb", "#c4421a", "#b8860b", "#2e8b57", "#8a4fbf")
_STEP, _LEFT, _TOP, _HEIGHT = 17, 46, 64, 260


def plot(found: Sequence[Cell]) -> str:
    """An SVG of its own: how often each method held, cell by cell. The band is 93 to 99 %."""
    names = list(dict.fromkeys(cell.server for cell in found))
    right = _LEFT + _STEP * (len(found) + len(names))

    def y(share: float) -> float:
        return round(_TOP + _HEIGHT * (1 - share), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 10} {_TOP + _HEIGHT + 84}" font-family="sans-serif" '
        'font-size="11" role="img" aria-label="Coverage of 95 % intervals near the knee">',
        "<style>text{fill:#222}.a{stroke:#999}@media(prefers-color-scheme:dark){text{fill:#ddd}svg{background:#161616}}</style>",
        f'<rect x="{_LEFT}" y="{y(MOST)}" width="{right - _LEFT}" height="{y(LEAST) - y(MOST)}" fill="#0b6bcb" opacity=".2"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">How often a 95 % interval holds the true attainment '
        f"({found[0].runs} runs a cell; band: {LEAST:.0%} to {MOST:.0%})</text>",
    ]
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1):
        parts.append(f'<line class="a" x1="{_LEFT}" x2="{right}" y1="{y(share)}" y2="{y(share)}" stroke-width="0.4"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(share) + 4}" text-anchor="end">{share:.0%}</text>')
    for number, (method, colour) in enumerate(zip(METHODS, _COLOURS, strict=True)):
        x = _LEFT + 6 + 130 * number
        parts.append(f'<circle cx="{x}" cy="36" r="4" fill="{colour}"/><text x="{x + 9}" y="40">{method}</text>')
    for place, cell in enumerate(found):
        x = _LEFT + _STEP * (place + names.index(cell.server) + 1)
        for held, colour in zip(cell.held[:0:-1], _COLOURS[:0:-1], strict=True):
            parts.append(f'<circle cx="{x}" cy="{y(held / cell.runs)}" r="3" fill="{colour}"/>')
        lower, upper = (y(end) for end in cell.interval())
        parts.append(f'<line x1="{x}" x2="{x}" y1="{lower}" y2="{upper}" stroke="{_COLOURS[0]}" stroke-width="2"/>')
        parts.append(f'<circle cx="{x}" cy="{y(cell.held[0] / cell.runs)}" r="4" fill="{_COLOURS[0]}"/>')
        below = _TOP + _HEIGHT + 12
        parts.append(f'<text x="{x}" y="{below}" font-size="8" text-anchor="middle">{cell.blocks}</text>')
        if cell.blocks == BLOCKS[1]:
            parts.append(f'<text x="{x}" y="{below + 16}" text-anchor="middle">{cell.busy:g}</text>')
    for name in names:
        places = [place for place, cell in enumerate(found) if cell.server == name]
        x = _LEFT + _STEP * (places[len(places) // 2] + names.index(name) + 1)
        parts.append(f'<text x="{x}" y="{_TOP + _HEIGHT + 48}" font-size="12" text-anchor="middle">{name}</text>')
    parts.append(
        f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 70}">Below: blocks of a run, how busy the server is, the server.</text></svg>'
    )
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", choices=("knee", "others", "sequential"), default="knee")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="where the plot goes")
    args = parser.parse_args()
    began = time.monotonic()
    bad = 0
    if args.cells == "sequential":
        print("| server | busy | p | runs | passed at a look | or at the end |\n|---|---|---|---|---|---|")
        for server, busy, percentile in SEQUENTIAL:
            early, passed = false_passes(server, busy, percentile, args.runs, args.seed)
            above = binomial_interval(args.runs - passed, args.runs, 0.95).lower > 0.05
            bad += above
            share = f"{early / args.runs:.1%} | {passed / args.runs:.1%}{' OUT' * above}"
            print(f"| {server.name} | {busy:g} | {percentile:g} | {args.runs} | {share} |", flush=True)
    else:
        found: list[Cell] = []
        for server, busy, percentile in KNEE if args.cells == "knee" else OTHERS:
            found += cells(server, busy, percentile, args.runs, args.seed)
            print(table(found[-len(BLOCKS) :]).split("\n", 0 if len(found) == len(BLOCKS) else 2)[-1], flush=True)
        bad = sum(cell.outside for cell in found)
        if args.svg:
            args.svg.parent.mkdir(parents=True, exist_ok=True)
            args.svg.write_text(plot(found), encoding="utf-8")
    print(f"\n{bad} outside; took {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
