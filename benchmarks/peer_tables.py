"""What benchmarks/peers.py tells of `minilm`: ratios of rounds, tables in Markdown, and a plot as SVG."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from benchmarks.minilm_servers import SLO_MS
from benchmarks.peer_embedders import BUILT_IN, EMBEDDERS
from benchmarks.peers_minilm import USERS, Run, bracket, judged

OURS: Final = "plain"
OURS_WITH_TEXT: Final = "plain-text"
TAKE_TEXT: Final = ("infinity", OURS_WITH_TEXT)
OUR_OWN: Final = ("plain", "embedded", OURS_WITH_TEXT)


@dataclass(frozen=True)
class Ratio:
    """Of rounds: the middle one, the least and the most. With n rounds the latter enclose the true median in 1 - 2^(1-n)."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.2f}" + (f" ({self.least:.2f} to {self.most:.2f})" if self.least < self.most else "")


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio | None:
    """Ours over theirs, in rounds that have both. None: there is no such round."""
    found = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys() if theirs[number]]
    return Ratio(statistics.median(found), min(found), max(found)) if found else None


def counterpart(server: str) -> str:
    """Which of ours a server is compared with: who takes sentences, with the one that does."""
    return OURS_WITH_TEXT if server in TAKE_TEXT else OURS


def settings(names: Iterable[str]) -> str:
    lines = ["| server | settings |", "|---|---|"]
    for name in names:
        peer = EMBEDDERS.get(name)
        told = f"{peer.packages[0]}: {peer.settings} ({peer.source})" if peer else BUILT_IN[name]
        lines.append(f"| {name} | {told} |")
    return "\n".join(lines)


def closed(runs: Iterable[Run]) -> str:
    """Of the closed loops: medians of the rounds, and how many times a server's rate and p50 ours are."""
    found = [run for run in runs if run.part == "closed"]
    lines = [
        "| users | server | requests/s | of the speed | p50 ms | p99 ms | ms CPU | errors | our rate, times | our p50, times |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for users in USERS:
        for server in _servers(found):
            own = [run for run in found if run.server == server and run.load == users]
            if not own:
                continue
            ours = [run for run in found if run.server == counterpart(server) and run.load == users]
            compared = server not in (OURS, OURS_WITH_TEXT)
            ratios = [
                ratio(_by_round(ours, value), _by_round(own, value)) if compared else None
                for value in (lambda run: run.share, lambda run: run.p50_ms * run.speed)
            ]
            share = f"{statistics.median(run.share for run in own):.2f}"
            cells = [users, server, _middle(own, "rps", 1), share, _middle(own, "p50_ms", 1), _middle(own, "p99_ms", 0)]
            cells += [f"{statistics.median(run.cpu_us for run in own) / 1e3:.1f}", sum(run.errors for run in own)]
            lines.append(f"| {' | '.join(map(str, cells))} | {' | '.join(str(each or '') for each in ratios)} |")
    return "\n".join(lines)


def highest(runs: Iterable[Run]) -> dict[str, dict[int, float]]:
    """By server and round: the highest rate that was kept, as a share of the machine's speed; 0, where none was.

    A search that came to no rate that was missed has told nothing.
    """
    searches: dict[str, dict[int, list[Run]]] = {}
    for run in runs:
        if run.part == "open":
            searches.setdefault(run.server, {}).setdefault(run.round, []).append(run)
    found = {name: {number: bracket(judged(each)) for number, each in sorted(of.items())} for name, of in searches.items()}
    ended = {name: {number: low for number, (low, high) in of.items() if high < math.inf} for name, of in found.items()}
    return {name: of for name, of in ended.items() if of}


def within_slo(runs: Sequence[Run]) -> str:
    """Of the open loops: the highest rates, and how many times a server's ours is."""
    found = highest(runs)
    rows = {run.server: run.rows for run in runs if run.part == "open"}
    speeds = [run.speed for run in runs if run.part in ("closed", "open")]
    speed = statistics.median(speeds) if speeds else 0.0
    lines = [
        f"| server | largest batch | highest rate in time, of the speed | rounds | at a speed of {speed:.0f}/s | ours, times "
        "| ms CPU of a request |",
        "|---|---|---|---|---|---|---|",
    ]
    for server in sorted(found, key=lambda name: -statistics.median(found[name].values())):
        own = found[server]
        ours = found.get(counterpart(server), {})
        told = "" if server in (OURS, OURS_WITH_TEXT) else str(ratio(ours, own) or "")
        each, middle = ", ".join(f"{share:.2f}" for share in own.values()), statistics.median(own.values())
        cpu_ms = [run.cpu_us / 1e3 for run in runs if (run.part, run.server) == ("open", server)]
        cost = f"{statistics.median(cpu_ms):.1f} ({min(cpu_ms):.1f} to {max(cpu_ms):.1f})"
        lines.append(f"| {server} | {rows[server] or ''} | {middle:.2f} | {each} | {speed * middle:.0f}/s | {told} | {cost} |")
    return "\n".join(lines)


def turns(runs: Iterable[Run]) -> str:
    """Of slices in turn: what was answered, in time where arrivals were at random times, and how many times that ours is."""
    found = [run for run in runs if run.part == "turns"]
    if not found:
        return ""
    lines = [
        "| load | server | turns | answered/s, in time | in time, % | p50 ms | p99 ms | ms CPU | ours, times |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for load in dict.fromkeys(run.load for run in found):
        told = f"{load:.0f} users" if load >= 1 else f"{100 * load:.0f} % of the speed"
        slices = {name: [run for run in found if (run.server, run.load) == (name, load)] for name in _servers(found)}
        for name, own in slices.items():
            if not own:
                continue  # sessions alone, which no requests reach
            theirs, ours = _by_round(own, in_time), _by_round(slices.get(counterpart(name), []), in_time)
            share = "" if load >= 1 else f"{100 * statistics.mean(run.kept for run in own):.1f}"
            cells = [told, name, len(own), f"{statistics.mean(theirs.values()):.1f}", share, _middle(own, "p50_ms", 1)]
            cells += [_middle(own, "p99_ms", 0), f"{statistics.median(run.cpu_us for run in own) / 1e3:.1f}"]
            cells += ["" if name in (OURS, OURS_WITH_TEXT) else ratio(ours, theirs) or ""]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def in_time(run: Run) -> float:
    """Requests per second that count: with users all that were answered, else those within the SLO."""
    return run.rps if run.load >= 1 else run.goodput_rps


def tuned(runs: Iterable[Run]) -> dict[str, dict[int, float]]:
    """By peer: what it answered, as a share of the machine's speed, by its largest batch."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.part == "tune":
            found.setdefault(run.server, {})[run.rows] = run.share
    return found


def saturation(runs: Sequence[Run]) -> str:
    """Ours with most users beside sessions alone at the best of their sizes, threads and batches, in the same rounds."""
    bare = [run for run in runs if run.part == "bare"]
    by_shape: dict[tuple[str, int], list[float]] = {}
    for run in bare:
        by_shape.setdefault((run.shape, run.rows), []).append(run.share)
    if not by_shape:
        return ""
    (shape, rows), _ = max(by_shape.items(), key=lambda each: statistics.median(each[1]))
    best = {run.round: run.share for run in bare if (run.shape, run.rows) == (shape, rows)}
    lines = [
        f"Sessions alone: {statistics.median(best.values()):.2f} of the speed, best by {shape} (sessions × threads), batches"
        f" of {rows}.",
        "",
        f"| server, {USERS[-1]} users | of the speed | of the sessions' best |",
        "|---|---|---|",
    ]
    for server in _servers([run for run in runs if run.part == "closed"]):
        own = {run.round: run.share for run in runs if (run.part, run.server, run.load) == ("closed", server, USERS[-1])}
        if own:
            lines.append(f"| {server} | {statistics.median(own.values()):.2f} | {ratio(own, best) or ''} |")
    return "\n".join(lines)


def proofs(runs: Iterable[Run]) -> str:
    lines = ["| server | offered, /s | in time | verdict at 95 % |", "|---|---|---|---|"]
    for run in runs:
        if run.part == "proof":
            verdict = run.shape if run.valid else "not valid: the machine was disturbed"
            lines.append(f"| {run.server} | {run.load:.0f} | {100 * run.kept:.2f} % | {verdict} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _servers(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(run.server for run in runs))


def _by_round(runs: Iterable[Run], value: Callable[[Run], float]) -> dict[int, float]:
    return {run.round: value(run) for run in runs}


def _middle(runs: Sequence[Run], key: str, digits: int) -> str:
    return f"{statistics.median(getattr(run, key) for run in runs):.{digits}f}"


# the plot

_ROW, _LEFT, _WIDTH, _TOP = 26, 170, 340, 34
_CALLED: Final = {
    "plain": "this gateway", "embedded": "this gateway, on Ray", OURS_WITH_TEXT: "this gateway, sentences", "triton": "Triton",
    "triton-ragged": "Triton, ragged", "serve": "Ray Serve", "serve-haproxy": "Ray Serve, HAProxy", "litserve": "LitServe",
    "bentoml": "BentoML", "mlserver": "MLServer", "infinity": "infinity, sentences",
}  # fmt: skip


def plot(runs: Sequence[Run]) -> str:
    """The highest rates within the SLO as bars, each with its least and most of the rounds. Ours are of another colour."""
    found = highest(runs)
    servers = sorted(found, key=lambda name: -statistics.median(found[name].values()))
    most = max((rate for own in found.values() for rate in own.values()), default=1.0)
    height = _TOP + _ROW * len(servers) + 12
    title = f"minilm, highest rate within {SLO_MS} ms, in % of bare sessions; line: least and most"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 60} {height}" font-family="sans-serif"'
        f' font-size="12" role="img" aria-label="Highest rate within the SLO, by server">',
        "<style>text{fill:#222}.a{stroke:#222}@media(prefers-color-scheme:dark){text{fill:#ddd}.a{stroke:#ddd}"
        "svg{background:#161616}}</style>",
        f'<text x="8" y="18" font-size="13">{title}</text>',
    ]
    for place, name in enumerate(servers):
        own = found[name].values()
        middle, y = statistics.median(own), _TOP + _ROW * place
        colour = "#0b6bcb" if name in OUR_OWN else "#b8860b"
        low, wide, high = (_WIDTH * rate / most for rate in (min(own), middle, max(own)))
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(_CALLED[name])}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 2}" width="{wide:.1f}" height="16" fill="{colour}"/>')
        parts.append(f'<line class="a" x1="{_LEFT + low:.1f}" x2="{_LEFT + high:.1f}" y1="{y + 10}" y2="{y + 10}"/>')
        parts.append(f'<text x="{_LEFT + max(wide, high) + 6:.1f}" y="{y + 14}">{100 * middle:.0f} %</text>')
    return "\n".join((*parts, "</svg>")) + "\n"
