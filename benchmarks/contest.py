"""Hold the adaptive policy beside other servers' rules on many drawn cases, in simulated time, and say where it is behind.

    python -m benchmarks.contest --cases 6 --seeds 5     a look: some minutes on one core
    python -m benchmarks.contest                         60 cases, 20 seeds: an hour on one core; goes on where it was ended
    python -m benchmarks.contest --table FILE            the tables of a result, or of as much of it as there is
    python -m benchmarks.contest --grid tuning           cases to develop on: never those that judge
    python -m benchmarks.contest --only 8 31             only the cases of these numbers
    python -m benchmarks.contest --rivals FILE           only ours anew; the rivals' figures are those of a result
    python -m benchmarks.contest --only 2 29 --ours      these two cases, without rivals
    python -m benchmarks.contest --quartiles             who is served at 1.5 times the load, by length
    python -m benchmarks.contest --trace FILE            lets some cases replay a CSV whose first column are timestamps

Per case, rule and seed: the capacity, the highest load at which 99 % are answered in time, and the goodput at 1.5 times the
load, both in % of the case's unit (z; see `cases.DrawnCase`). A rule is ahead where the lower 95 % bound of its paired
difference to ours is above 2 points. Rules with knobs are tuned for each case, on arrivals of the tuning stream.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy import special

from benchmarks.cases import GRIDS, JUDGING, MS, TUNING, Backend, DrawnCase, Luck, draw, kinds_of
from benchmarks.peer_rules import Bento, Clipper, Nexus, RayServe, Symphony
from gateway.batching.adaptive import Adaptive
from gateway.batching.batcher import Batcher
from gateway.batching.groups import FURTHER_LENGTH, further_rows
from gateway.batching.policies import Fixed, Greedy
from gateway.batching.policy import Policy
from gateway.types import InferRequest
from loadtest.search.simulator import Affine, Simulated, simulate

AHEAD: Final = 2.0  # points of the unit
OVER: Final = 1.5
OURS: Final = "adaptive"
_UNBOUNDED: Final = 1 << 40
_TUNED_AT: Final = (0.4, 0.8, OVER)
_HALVINGS: Final = 7
_LIMITS_OVERLOADED: Final = 5  # of a run, at least: a window for what is done, whatever the rate
_HIGHEST: Final = 1.4  # capacity is sought below
_IN_TIME: Final = 0.99  # at capacity


@dataclass(frozen=True)
class Contender:
    """A rule with its knobs set. batcher: makes it for a case. per_worker: each worker has a queue of its own.

    by_shape: requests of other lengths never share a batch; else the rule pads to the longest.
    """

    batcher: Callable[[DrawnCase], Batcher]
    per_worker: bool = False
    by_shape: bool = False


@dataclass(frozen=True)
class Margin:
    """A backend's profile, times what one adds for safety."""

    backend: Backend
    factor: float

    def rows_ns(self, rows: int) -> int:
        return round(self.backend.rows_ns(rows) * self.factor)


def _batcher(case: DrawnCase, policy: Policy, *, max_rows: int = 0, slo_ns: int | None = None, ragged: bool = False) -> Batcher:
    backend = case.backend
    return Batcher(
        policy,
        max_rows=min(max_rows or backend.max_rows, backend.max_rows),
        row_sizes=backend.row_sizes,
        workers=backend.workers,
        max_queue_rows=_UNBOUNDED,
        slo_ns=slo_ns,
        ragged=backend.ragged if ragged else None,
    )


def ours(case: DrawnCase) -> Batcher:
    """As the gateway makes it: told the SLO, and warmed up with the sizes of each bucket that it runs at load."""
    policy, backend = Adaptive(), case.backend
    batcher = _batcher(case, policy, slo_ns=case.slo_ns, ragged=True)
    lengths = (backend.buckets or (1,)) if backend.ragged else (backend.lengths[0],)
    sizes, further = batcher.probe_rows, further_rows(backend.ragged, policy.service.sizes, case.slo_ns)
    while sizes:
        for length, rows in product(lengths, sizes):
            request = InferRequest("m", "1", "", {"ids": np.zeros((rows, length), np.int8)}, rows, 0)
            time_ns = round(backend.time_ns(rows, length)) if backend.ragged else backend.rows_ns(rows)
            curve = policy.service.curve(batcher.probe(request, 0).group)
            curve.probe(rows, [time_ns, time_ns])
        sizes = curve.telling_rows
        if not sizes:
            sizes, lengths, further = further, (FURTHER_LENGTH,), ()
    return batcher


def _ray(rows: int, wait_ns: int) -> Contender:
    return Contender(lambda case: _batcher(case, RayServe(rows, wait_ns)))


def _triton(max_rows: int, delay: float, timeout: float | None) -> Contender:
    """delay, timeout: shares of the limit; a timeout counts in the queue alone."""

    def make(case: DrawnCase) -> Batcher:
        slo_ns = None if timeout is None or case.slo_ns is None else round(timeout * case.slo_ns)
        return _batcher(case, Fixed(round(delay * case.limit_ns)) if delay else Greedy(), max_rows=max_rows, slo_ns=slo_ns)

    return Contender(make, by_shape=True)


def _nexus(factor: float) -> Contender:
    return Contender(lambda case: _batcher(case, Nexus(case.limit_ns, Margin(case.backend, factor))))


def _symphony(factor: float) -> Contender:
    def make(case: DrawnCase) -> Batcher:
        return _batcher(case, Symphony(case.limit_ns, Margin(case.backend, factor), case.backend.workers))

    return Contender(make)


def _bento(case: DrawnCase) -> Batcher:
    return _batcher(case, Bento(case.limit_ns, Affine(case.backend.fixed_ns, case.backend.row_ns)))


def choices(case: DrawnCase) -> dict[str, list[Contender]]:
    """By name: every setting of the rules that take part. Without an SLO those that live by one do not."""
    most = case.backend.max_rows
    sizes = case.backend.row_sizes or sorted({1, 2, 4, *[most // part for part in (8, 4, 2, 1)]})
    timeouts = (None, 0.4, 0.6, 0.8) if case.slo_ns else (None,)
    rules = {
        "Ray Serve, default": [_ray(10, 10 * MS)],
        "Ray Serve, tuned": [_ray(rows, round(wait * case.limit_ns)) for rows, wait in product(sizes, (0.0, 0.1, 0.3))],
        "Triton, default": [_triton(most, 0.0, None)],
        "Triton, tuned": [_triton(*each) for each in product(sizes, (0.0, 0.1, 0.3), timeouts)],
    }
    if case.slo_ns:
        margins = (0.8, 1.0, 1.25, 1.6)
        rules["BentoML"] = [Contender(_bento, per_worker=True)]
        rules["Clipper"] = [Contender(lambda case: _batcher(case, Clipper(case.limit_ns)))]
        rules["Nexus, perfect profile"] = [_nexus(1.0)]
        rules["Nexus, tuned margin"] = [_nexus(factor) for factor in margins]
        rules["Symphony, perfect profile"] = [_symphony(1.0)]
        rules["Symphony, tuned margin"] = [_symphony(factor) for factor in margins]
    return rules


# measuring


def run(
    case: DrawnCase, rule: Contender, load: float, requests: int, seed: int, stream: int = JUDGING, *, bound: bool = False
) -> Simulated:
    """One run at a share of the unit. bound: it ends as soon as too many have missed the limit for the load to be kept."""
    arrivals = case.arrivals_ns(load, requests, seed, stream)
    request_of = case.requests_of(len(arrivals), seed, stream, by_shape=rule.by_shape)
    luck = Luck(case, int(arrivals[-1]), seed, stream)
    workers = case.backend.workers
    most_missed = math.ceil((1 - _IN_TIME) * len(arrivals)) if bound else len(arrivals)
    if not rule.per_worker or workers == 1:
        return simulate(
            rule.batcher(case),
            arrivals,
            luck,
            workers=workers,
            request_of=request_of,
            limit_ns=case.limit_ns,
            most_missed=most_missed,
        )
    alone = replace(case, backend=replace(case.backend, workers=1))
    latencies, refused = np.empty((2, len(arrivals)), dtype=np.int64)
    for worker in range(workers):
        mine = np.arange(worker, len(arrivals), workers)  # in turn

        def made(index: int, arrival_ns: int, mine: np.ndarray = mine) -> InferRequest:
            return request_of(int(mine[index]), arrival_ns)

        outcome = simulate(rule.batcher(alone), arrivals[mine], luck, workers=1, request_of=made)
        latencies[mine], refused[mine] = outcome.latencies_ns, outcome.refused_ns
    return replace(outcome, arrivals_ns=arrivals, latencies_ns=latencies, refused_ns=refused, workers=workers)


def goodput(case: DrawnCase, outcome: Simulated) -> float:
    """Answers per second while requests come, in % of the unit: those in time, or without an SLO all.

    The first limit is left out, in which little can be done yet.
    """
    ends_ns = outcome.arrivals_ns + outcome.latencies_ns
    start_ns, end_ns = outcome.arrivals_ns[0] + case.limit_ns, outcome.arrivals_ns[-1]
    counted = (outcome.latencies_ns >= 0) & (ends_ns >= start_ns) & (ends_ns < end_ns)
    if case.slo_ns:
        counted &= outcome.latencies_ns <= case.slo_ns
    return float(100 * np.sum(counted) / (end_ns - start_ns) * 1e9 / case.unit_rps)


def capacity(in_time: Callable[[float], float]) -> float:
    """The highest load at which 99 % are in time, in %, by bisection. in_time: the share of a load."""
    low, high = 0.0, _HIGHEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if in_time(middle) >= _IN_TIME:
            low = middle
        else:
            high = middle
    return 100 * low


def tuned(case: DrawnCase, settings: Sequence[Contender], requests: int) -> Contender:
    """The setting with most in time, over loads, on arrivals that judge nothing."""
    if len(settings) == 1:
        return settings[0]

    best, found = -1.0, settings[0]
    for rule in settings:
        score = 0.0
        for left, load in zip(range(len(_TUNED_AT), 0, -1), _TUNED_AT, strict=True):
            if score + left <= best:  # however well it does at the other loads
                break
            score += run(case, rule, load, requests, 0, TUNING).attainment(case.limit_ns)
        if score > best:
            best, found = score, rule
    return found


def _in_time(case: DrawnCase, rule: Contender, requests: int, seed: int, load: float) -> float:
    return run(case, rule, load, requests, seed, bound=True).attainment(case.limit_ns)


def measure(case: DrawnCase, requests: int, seeds: Sequence[int], rivals: dict[str, Any] | None = None) -> dict[str, Any]:
    """A case's part of the result, as JSON can hold it. rivals: their figures, if they are known."""
    found = (rivals or {}) | {
        name: {
            "capacity": [capacity(functools.partial(_in_time, case, rule, requests, seed)) for seed in seeds],
            "goodput": [goodput(case, run(case, rule, OVER, requests, seed)) for seed in seeds],
        }
        for name, rule in _rules(case, requests, tune=rivals is None).items()
    }
    unit = case.unit_rps
    overload = {f"{load}": overloaded(case, Contender(ours), load, requests, seeds) for load in (2, 5)} if case.slo_ns else {}
    return {"name": case.name, "kinds": list(kinds_of(case)), "unit_rps": unit, "rules": found, "overload": overload}


def _rules(case: DrawnCase, requests: int, *, tune: bool) -> dict[str, Contender]:
    """Ours, and if they are to be tuned the rivals."""
    rivals = {name: tuned(case, settings, requests // 2) for name, settings in choices(case).items()} if tune else {}
    return {OURS: Contender(ours)} | rivals


def measure_quartiles(
    case: DrawnCase, requests: int, seeds: Sequence[int], rivals: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The same of who is served at 1.5 times the load: of each rule its `fates`, over all seeds."""
    found = (rivals or {}) | {
        name: np.sum([fates(case, run(case, rule, OVER, requests, seed), seed) for seed in seeds], axis=0).tolist()
        for name, rule in _rules(case, requests, tune=rivals is None).items()
    }
    return {"name": case.name, "rules": found}


def fates(case: DrawnCase, outcome: Simulated, seed: int) -> np.ndarray:
    """How many were in time, refused on arrival, shed later, late; one row for each quarter of the lengths, shortest first."""
    assert case.slo_ns
    ordered, latency, refused = sorted(case.backend.lengths), outcome.latencies_ns, outcome.refused_ns
    quarter = np.searchsorted(ordered, case.lengths_of(len(latency), seed, JUDGING)) * 4 // len(ordered)
    late = latency > case.slo_ns
    ends = ((latency >= 0) & ~late, refused == 0, refused > 0, late)
    return np.array([np.bincount(quarter[each], minlength=4) for each in ends]).T


def overloaded(case: DrawnCase, rule: Contender, load: float, requests: int, seeds: Sequence[int]) -> dict[str, float]:
    """In %: refusals within a tenth of the SLO after arrival; of the answered, the late ones; goodput of what can be.

    That is the ceiling c, or what is offered, where that is less.
    """
    assert case.slo_ns
    offered_rps = load * case.unit_rps
    requests = max(requests, math.ceil(_LIMITS_OVERLOADED * case.slo_ns / 1e9 * offered_rps))
    runs = [run(case, rule, load, requests, seed) for seed in seeds]
    refused = np.concatenate([outcome.refused_ns[outcome.refused_ns >= 0] for outcome in runs])
    answered = np.concatenate([outcome.latencies_ns[outcome.latencies_ns >= 0] for outcome in runs])
    return {
        "refused_early": 100 * float(np.mean(refused <= case.slo_ns / 10)) if len(refused) else 100.0,
        "late": 100 * float(np.mean(answered > case.slo_ns)) if len(answered) else 0.0,
        "goodput": statistics.fmean(goodput(case, outcome) for outcome in runs)
        * case.unit_rps
        / min(case.ceiling_rps, offered_rps),
    }


# what it says


def lower_bound(differences: Sequence[float]) -> float:
    """Of the mean, one-sided, 95 %, by Student's t; of fewer than two: minus infinity."""
    count = len(differences)
    if count < 2:
        return -math.inf
    error = statistics.stdev(differences) / math.sqrt(count)
    return statistics.fmean(differences) - float(special.stdtrit(count - 1, 0.95)) * error


@dataclass(frozen=True)
class Lead:
    """By how much a rule leads ours in one case. figure: capacity or goodput. mean, bound: points of the unit."""

    case: str
    rule: str
    figure: str
    mean: float
    bound: float


def leads(result: dict[str, Any]) -> list[Lead]:
    """Of each case and figure the rule that leads by most, or is behind by least, by its bound; the worst first."""
    found = []
    for case in result["cases"]:
        mine = case["rules"][OURS]
        for figure in ("capacity", "goodput"):
            of_case = []
            for name, theirs in case["rules"].items():
                differences = [other - own for other, own in zip(theirs[figure], mine[figure], strict=True)]
                if name != OURS:
                    mean = statistics.fmean(differences)
                    of_case.append(Lead(case["name"], name, figure, mean, lower_bound(differences)))
            if of_case:
                found.append(max(of_case, key=lambda lead: (lead.bound, lead.mean)))
    return sorted(found, key=lambda lead: -lead.bound)


def tables(result: dict[str, Any]) -> str:
    """Markdown: what is lost, the closest, by kind of case, every case, and what overload did."""
    ranked, cases = leads(result), result["cases"]
    lost = [lead for lead in ranked if lead.bound > AHEAD]
    by_case: dict[str, dict[str, Lead]] = {}
    for lead in ranked:
        by_case.setdefault(lead.case, {})[lead.figure] = lead
    lines = [f"{len(cases)} cases, {result['seeds']} seeds of {result['requests']} requests, {result['date']}.", ""]
    if ranked:  # not where only ours was run
        lines += [
            f"{len(lost)} figures of {len({lead.case for lead in lost})} cases are lost by more than {AHEAD:g} points.",
            "",
        ]
        lines += ["| case | figure | rule ahead | by | at least |", "|---|---|---|---|---|"]
    closest = [lead for lead in ranked if lead not in lost][:5]
    for lead in lost + closest:
        mark = "" if lead in lost else " (close)"
        lines.append(f"| {lead.case} | {lead.figure}{mark} | {lead.rule} | {lead.mean:.1f} | {lead.bound:.1f} |")
    lines += ["", "| kind | cases | lost: capacity, goodput | mean of the lead where lost |", "|---|---|---|---|"]
    for kind in sorted({kind for case in cases for kind in case["kinds"]}):
        names = [case["name"] for case in cases if kind in case["kinds"]]
        behind = {figure: [lead for lead in lost if lead.case in names and lead.figure == figure] for figure in FIGURES}
        counts = ", ".join(str(len(each)) for each in behind.values())
        means = ", ".join(f"{statistics.fmean(lead.mean for lead in each):.1f}" if each else "-" for each in behind.values())
        lines.append(f"| {kind} | {len(names)} | {counts} | {means} |")
    lines += [
        "",
        "| case | ours: capacity / goodput | best rule of each | twice the load | five times |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        mine = case["rules"][OURS]
        figures = " / ".join(f"{statistics.fmean(mine[figure]):.1f}" for figure in FIGURES)
        best = " / ".join(_best(case, figure) for figure in FIGURES)
        over = [
            f"{each['refused_early']:.0f} / {each['late']:.1f} / {each['goodput']:.1f}" if each else "-"
            for each in (case["overload"].get(load) for load in ("2", "5"))
        ]
        lines.append(f"| {case['name']} | {figures} | {best} | {' | '.join(over)} |")
    lines += ["", "Overload: refused within a tenth of the SLO / late of the answered / goodput of what can be, in %."]
    return "\n".join(lines)


FIGURES: Final = ("capacity", "goodput")


def _best(case: dict[str, Any], figure: str) -> str:
    means = {name: statistics.fmean(each[figure]) for name, each in case["rules"].items() if name != OURS}
    if not means:
        return "-"
    name = max(means, key=lambda name: means[name])
    return f"{means[name]:.1f} {name}"


def quartile_table(result: dict[str, Any]) -> str:
    """Markdown: what became of each quarter of the lengths, in the mean of the cases; and of each case who served most."""
    cases = [{name: np.array(counts) for name, counts in case["rules"].items()} for case in result["cases"]]
    rows = {name: [rules[name] for rules in cases] for name in dict.fromkeys(name for rules in cases for name in rules)}
    told = []
    for case, rules in zip(result["cases"], cases, strict=True):
        mine = rules.pop(OURS)
        best = [max(rules, key=lambda name: rules[name][part, 0].sum(), default="") for part in (slice(None), 3)]
        cells = [_served([mine]), *(f"{_served([rules[name]])} {name}" if name else "-" for name in best)]
        told.append(f"| {case['name']} | {' | '.join(cells)} |")
        if best[0]:
            rows.setdefault("of each case the best rival", []).append(rules[best[0]])
    lines = [f"{len(cases)} cases, {result['seeds']} seeds of {result['requests']} requests, {result['date']}.", ""]
    lines += ["| rule | in time | refused on arrival | shed later | late |", "|---|---|---|---|---|"]
    for name, counts in rows.items():
        ends = " | ".join(_quarters(counts, end) for end in (1, 2, 3))
        lines.append(f"| {name} | {_served(counts)} | {ends} |")
    lines += [
        "",
        "| case | ours, in time | the rival with most in time | with most of the longest |",
        "|---|---|---|---|",
        *told,
    ]
    return "\n".join([*lines, "", "In % of the requests of all lengths: of each quarter of the lengths, shortest first."])


def _served(counts: Sequence[np.ndarray]) -> str:
    return f"{statistics.fmean(100 * each[:, 0].sum() / each.sum() for each in counts):.1f}: {_quarters(counts, 0)}"


def _quarters(counts: Sequence[np.ndarray], end: int) -> str:
    return " / ".join(f"{share:.0f}" for share in np.mean([100 * each[:, end] / each.sum(axis=1) for each in counts], axis=0))


def contest(options: argparse.Namespace) -> dict[str, Any]:
    """Measure case by case, and write the file after each; what a file of the same settings has already is not run again."""
    settings = {key: vars(options)[key] for key in ("grid", "seeds", "requests", "trace", "quartiles")}
    kept = {**settings, "ours": options.ours}
    result: dict[str, Any] = {**kept, "date": "", "cases": []}
    if options.out.exists():
        result = _read(options.out, kept)
    rivals = {case["name"]: case["rules"] for case in _read(options.rivals, settings)["cases"]} if options.rivals else {}
    cases = [draw(GRIDS[options.grid], number, options.trace) for number in options.only or range(options.cases)]
    place = {case.name: case.number for case in cases}
    known = {case["name"] for case in result["cases"]}
    cases = [case for case in cases if case.name not in known and options.kind in ("", *kinds_of(case))]
    if options.quartiles:
        cases = [case for case in cases if case.slo_ns and len(case.backend.lengths) > 1]
    if options.ours:
        rivals = {case.name: {} for case in cases}
    elif rivals:
        cases = [case for case in cases if case.name in rivals]
    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs) as pool:
        seeds = range(options.seeds)
        found = measure_quartiles if options.quartiles else measure
        running = [pool.submit(found, case, options.requests, seeds, rivals.get(case.name)) for case in cases]
        for done in as_completed(running):
            result["cases"].append(done.result())
            result["cases"].sort(key=lambda case: place.get(case["name"], len(place)))
            result["date"] = datetime.now(UTC).date().isoformat()
            options.out.write_text(json.dumps(result))
            print(f"{time.monotonic() - began:8.0f} s  {done.result()['name']}", file=sys.stderr, flush=True)
    return result


def _read(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(path.read_text())
    if any(kept.get(key, False) != value for key, value in settings.items()):
        raise SystemExit(f"{path}: is of other settings than {settings}; name another file")
    return kept


def main(arguments: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1500, help="of each run, at least")
    parser.add_argument("--grid", choices=GRIDS, default="judging")
    parser.add_argument("--kind", default="", help="only cases of this kind, as the table names it: 'SLO up to 3 t(1)'")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only the cases of these numbers")
    parser.add_argument("--trace")
    parser.add_argument("--out", type=Path, help="contest.json, or contest- and the settings that are not the defaults")
    parser.add_argument("--rivals", type=Path, help="a result of the same settings, whose rivals are not measured again")
    parser.add_argument("--ours", action="store_true", help="only ours: the table tells no leads then")
    parser.add_argument("--quartiles", action="store_true", help="who is served, by length, in the cases with an SLO")
    parser.add_argument("--jobs", type=int, default=1, help="cases that are measured at once")
    parser.add_argument("--table", type=Path, help="only print the tables of this file")
    options = parser.parse_args(list(arguments))
    if options.out is None:
        named = [name for name in ("grid", "seeds", "requests") if vars(options)[name] != parser.get_default(name)]
        other = [f"{name}-{vars(options)[name]}" for name in named]
        other += [name for name in ("ours", "quartiles", "rivals", "trace") if vars(options)[name]]
        options.out = Path("-".join(("contest", *other)) + ".json")
    result = json.loads(options.table.read_text()) if options.table else contest(options)
    print(quartile_table(result) if result.get("quartiles") else tables(result))


if __name__ == "__main__":
    main(sys.argv[1:])
