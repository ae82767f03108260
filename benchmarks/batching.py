"""Compare batching rules in simulation: ours and the peers', on fixed and random cases.

    python -m benchmarks.batching                 all tables, quick (one to two minutes on two cores)
    python -m benchmarks.batching --full          more requests and seeds (about half an hour on one core)
    python -m benchmarks.batching --only table    table, heldout, optimum, overload, arrivals, leases or cost
    python -m benchmarks.batching --trace FILE    replay: a CSV whose first column are timestamps
    python -m benchmarks.batching --csv DIR       also write the numbers
    python -m benchmarks.batching --plot FILE     draw goodput by load, as one HTML file; alone or after tables chosen by --only

Each number is the mean over seeds with its 95 % interval; every rule sees the same arrivals (paired seeds). Efficiencies are
shares of limits that no rule can pass: see docs/batching-figures.md.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks import batching_charts, leases
from benchmarks.arrivals import arrivals_ns
from benchmarks.peer_rules import Bento, Nexus, RayServe
from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch
from gateway.batching.batcher import NOTHING, Batcher
from gateway.batching.policies import Fixed, Greedy
from gateway.batching.policy import Policy
from gateway.errors import Overloaded
from gateway.types import InferRequest
from loadtest.search.simulator import Affine, Simulated, simulate

MS = 1_000_000
UNBOUNDED = 1 << 40
DRIFT = 1.4
PLOTTED_LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)


@dataclass(frozen=True)
class Case:
    """A backend and its SLO. row_sizes: compiled sizes, empty for any. noise: standard deviation of log t(n)."""

    name: str
    fixed_ms: float
    row_ms: float
    workers: int
    slo_ms: float
    max_rows: int
    row_sizes: tuple[int, ...] = ()
    noise: float = 0.0
    arrivals: str = "poisson"

    @property
    def slo_ns(self) -> int:
        return round(self.slo_ms * MS)

    @property
    def profile(self) -> Affine:
        return Affine(self.fixed_ms * MS, self.row_ms * MS)

    def zero_loss_rps(self) -> float:
        """z = max{k·n/t(n) : (1 + 1/k)·t(n) <= D}: fluid capacity without a miss."""
        return self._most((1 + 1 / self.workers), 1.0)

    def ceiling_rps(self, factor: float = 1.0) -> float:
        """c = max{k·n/t(n) : t(n) <= D}: no goodput is above it. factor: how much slower the backend has become."""
        return self._most(1.0, factor)

    def _most(self, share: float, factor: float) -> float:
        sizes = self.row_sizes or range(1, self.max_rows + 1)
        times = ((size, self.profile.rows_ns(size) * factor) for size in sizes)
        return max(
            (self.workers * size / time_ns * 1e9 for size, time_ns in times if share * time_ns <= self.slo_ns), default=0
        )


CASES = (
    Case("BERT on CPU, 4+6n ms, k=1, 100 ms", 4, 6, 1, 100, 32),
    Case("BERT on CPU, 4+6n ms, k=4, 100 ms", 4, 6, 4, 100, 32),
    Case("ResNet on GPU, 2+.15n ms, k=1, 20 ms", 2, 0.15, 1, 20, 64),
    Case("ResNet on GPU, 2+.15n ms, k=4, 12 ms", 2, 0.15, 4, 12, 64),
    Case("Inf2 sizes 1, 4, 8, 2.5+.8n ms, k=2, 30 ms", 2.5, 0.8, 2, 30, 8, (1, 4, 8)),
)


@dataclass(frozen=True)
class Noisy:
    """A backend whose batches take t(n)·factor, log-normally spread. The same seed gives the same luck to every rule."""

    profile: Affine
    factor: float
    noise: float
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __call__(self, batch: Batch, busy: int, now_ns: int) -> int:
        time_ns = self.profile.rows_ns(batch.padded_rows) * self.factor
        return round(time_ns * float(np.exp(self.rng.normal(0, self.noise)))) if self.noise else round(time_ns)


@dataclass(frozen=True)
class Rule:
    """One batching rule. batcher: makes it for a case. per_worker: each worker has a queue of its own."""

    name: str
    batcher: Callable[[Case], Batcher]
    per_worker: bool = False


def _batcher(case: Case, policy: Policy, *, max_rows: int | None = None, slo_ns: int | None = None) -> Batcher:
    return Batcher(
        policy,
        max_rows=max_rows or case.max_rows,
        row_sizes=case.row_sizes,
        workers=case.workers,
        max_queue_rows=UNBOUNDED,
        slo_ns=slo_ns,
    )


def _adaptive(case: Case) -> Batcher:
    policy = Adaptive()
    batcher = _batcher(case, policy, slo_ns=case.slo_ns)
    for rows in batcher.probe_rows:
        policy.service.probe(None, rows, [case.profile.rows_ns(rows)] * 2)
    return batcher


OURS = Rule("adaptive", _adaptive)
PEERS = (
    Rule("Ray Serve, 10 rows, 10 ms (default)", lambda case: _batcher(case, RayServe(10, 10 * MS))),
    Rule("Ray Serve, 10 rows, 0 ms", lambda case: _batcher(case, RayServe(10, 0))),
    Rule("Triton, no delay (default)", lambda case: _batcher(case, Greedy())),
    Rule("TorchServe, TF Serving, 8 rows, 10 ms", lambda case: _batcher(case, Fixed(10 * MS), max_rows=min(8, case.max_rows))),
    Rule("BentoML, max_latency = SLO", lambda case: _batcher(case, Bento(case.slo_ns, case.profile)), per_worker=True),
    Rule("Nexus, perfect profile", lambda case: _batcher(case, Nexus(case.slo_ns, case.profile))),
)


def tuned_triton(case: Case, requests: int) -> Rule:
    """Triton with the maximum rows, delay and queue timeout that do best on this very case, found by a sweep."""
    target = max(rows for rows in (case.row_sizes or range(1, case.max_rows + 1)))
    fitting = [rows for rows in _powers(target) if case.profile.rows_ns(rows) <= case.slo_ns] or [1]
    best = (-1.0, 1, 0.0, 0.0)
    for max_rows in fitting[-4:]:
        for delay in (0.0, 0.1, 0.3):
            for timeout in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
                rule = _triton("", max_rows, delay, timeout)
                score = sum(
                    run(case, rule, load, requests, seed=99).goodput_rps(case.slo_ns) / load for load in (0.85, 0.95, 1.5)
                )
                best = max(best, (score, max_rows, delay, timeout))
    _, max_rows, delay, timeout = best
    return _triton("Triton, tuned by an oracle, queue timeout", max_rows, delay, timeout)


def _triton(name: str, max_rows: int, delay: float, timeout: float) -> Rule:
    def make(case: Case) -> Batcher:
        return _batcher(case, Fixed(round(delay * case.slo_ns)), max_rows=max_rows, slo_ns=round(timeout * case.slo_ns))

    return Rule(name, make)


def _powers(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, sizes[-1] // 2)))
    return sizes


# measuring


def run(case: Case, rule: Rule, load: float, requests: int, seed: int, factor: float = 1.0) -> Simulated:
    """One run at a share of z. factor: the backend is that much slower than every profile says."""
    arrivals = arrivals_ns(case.arrivals, load * case.zero_loss_rps(), requests, 10 * case.slo_ns, seed)
    service = Noisy(case.profile, factor, case.noise, np.random.default_rng(seed + 1))
    if not rule.per_worker or case.workers == 1:
        return simulate(rule.batcher(case), arrivals, service, workers=case.workers).after(0.05)
    worker = np.random.default_rng(seed + 2).integers(0, case.workers, len(arrivals))
    latencies, refused = np.empty((2, len(arrivals)), dtype=np.int64)
    alone = replace(case, workers=1)
    for k in range(case.workers):
        outcome = simulate(rule.batcher(alone), arrivals[worker == k], service, workers=1)
        latencies[worker == k], refused[worker == k] = outcome.latencies_ns, outcome.refused_ns
    return replace(outcome, arrivals_ns=arrivals, latencies_ns=latencies, refused_ns=refused, workers=case.workers).after(0.05)


def capacity(case: Case, rule: Rule, requests: int, seed: int) -> float:
    """The largest load, as a share of z, at which 99 % of all requests are answered within the SLO."""
    low, high = 0.0, 1.3
    for _ in range(8):
        middle = (low + high) / 2
        if run(case, rule, middle, requests, seed).attainment(case.slo_ns) >= 0.99:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Row:
    """Per seed: capacity (% of z), goodput at 1.5z (% of c), the same on the slower backend, p99 at 0.2z in ms."""

    capacity: tuple[float, ...]
    goodput: tuple[float, ...]
    drifted: tuple[float, ...]
    p99_ms: tuple[float, ...]


def measure(case: Case, rule: Rule, requests: int, seeds: Sequence[int]) -> Row:
    slo_ns = case.slo_ns
    ceiling, slow_ceiling = case.ceiling_rps(), case.ceiling_rps(DRIFT)
    return Row(
        tuple(100 * capacity(case, rule, requests, seed) for seed in seeds),
        tuple(100 * run(case, rule, 1.5, requests, seed).goodput_rps(slo_ns) / ceiling for seed in seeds),
        tuple(100 * run(case, rule, 1.5, requests, seed, DRIFT).goodput_rps(slo_ns) / slow_ceiling for seed in seeds),
        tuple(run(case, rule, 0.2, requests, seed).percentile_ms(99) for seed in seeds),
    )


def measure_all(cases: Sequence[Case], requests: int, seeds: Sequence[int], jobs: int) -> Iterator[dict[str, Row]]:
    """Per case, as they come: rule name -> row."""
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_measure_case, cases, [requests] * len(cases), [tuple(seeds)] * len(cases))


def _measure_case(case: Case, requests: int, seeds: Sequence[int]) -> dict[str, Row]:
    rules = (*PEERS, tuned_triton(case, min(requests // 3, 4000)), OURS)
    return {rule.name: measure(case, rule, requests, seeds) for rule in rules}


def interval(values: Sequence[float]) -> str:
    """Mean and half of its 95 % interval (Student's t)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.1f}"
    quantiles = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
    t = quantiles.get(len(values), 2.1)
    return f"{mean:.1f}±{t * statistics.stdev(values) / len(values) ** 0.5:.1f}"


# the tables


def table(options: argparse.Namespace) -> list[list[str]]:
    print(
        "\n## All rules: capacity at 99 % in SLO (% of z) / goodput at 1.5z (% of c) / the same 1.4x slower / p99 at 0.2z, ms\n"
    )
    measured = list(measure_all(CASES, options.requests, options.seeds, options.jobs))
    print("| rule | " + " | ".join(case.name for case in CASES) + " |")
    print("|---|" + "---|" * len(CASES))
    rows = []
    for name in measured[0]:
        cells = [by_rule[name] for by_rule in measured]
        print(f"| {name} | " + " | ".join(" / ".join(interval(value) for value in _columns(cell)) for cell in cells) + " |")
        for case, cell in zip(CASES, cells, strict=True):
            rows.append([case.name, name, *(f"{statistics.fmean(value):.2f}" for value in _columns(cell))])
    return [["case", "rule", "capacity", "goodput", "goodput_slow", "p99_ms"], *rows]


def _columns(row: Row) -> tuple[Sequence[float], ...]:
    return row.capacity, row.goodput, row.drifted, row.p99_ms


def random_cases(count: int, seed: int) -> list[Case]:
    """Backends, SLOs, noise and burstiness drawn at random; at least two rows fit twice in the SLO."""
    rng = np.random.default_rng(seed)
    cases: list[Case] = []
    while len(cases) < count:
        fixed, row = float(np.round(rng.uniform(0.5, 10), 2)), float(np.round(10 ** rng.uniform(-1.5, 1), 3))
        workers = int(rng.choice([1, 1, 2, 3, 4, 8]))
        compiled = rng.random() < 0.25
        sizes = (1, 4, 16) if compiled else ()
        max_rows = 16 if compiled else int(rng.choice([8, 16, 32, 64]))
        slo = float(np.round((fixed + 2 * row) * rng.uniform(3, 12), 1))
        noise = float(rng.choice([0.0, 0.05, 0.15]))
        arrivals = str(rng.choice(["poisson", "poisson", "mmpp"]))
        name = f"{fixed}+{row}n ms, k={workers}, {slo} ms" + (f", sizes {sizes}" if sizes else f", max {max_rows}")
        name += (f", noise {noise}" if noise else "") + (", bursty" if arrivals == "mmpp" else "")
        case = Case(name, fixed, row, workers, slo, max_rows, sizes, noise, arrivals)
        if case.zero_loss_rps() > 0:
            cases.append(case)
    return cases


def heldout(options: argparse.Namespace) -> list[list[str]]:
    print(
        "\n## Random held-out cases: adaptive against the best peer of each column (capacity / goodput / goodput 1.4x slower)\n"
    )
    cases = random_cases(12, options.cases_seed)
    measured = measure_all(cases, options.requests, options.seeds, options.jobs)
    print("| case | adaptive | best peer | which | behind |")
    print("|---|---|---|---|---|")
    rows = []
    for case, by_rule in zip(cases, measured, strict=True):
        ours = [statistics.fmean(column) for column in _columns(by_rule[OURS.name])[:3]]
        best: list[tuple[float, str]] = [
            max((statistics.fmean(_columns(row)[i]), name) for name, row in by_rule.items() if name != OURS.name)
            for i in range(3)
        ]
        behind = [f"{other - own:.1f}" for own, (other, _) in zip(ours, best, strict=True) if other - own > 2.0]
        figures = (
            (f"{value:.1f}" for value in ours),
            (f"{value:.1f}" for value, _ in best),
            (name.split(",")[0] for _, name in best),
        )
        print(
            "| " + " | ".join([case.name, *(" / ".join(cell) for cell in figures), " ".join(behind) or "-"]) + " |", flush=True
        )
        for name, row in by_rule.items():
            rows.append([case.name, name, *(f"{statistics.fmean(value):.2f}" for value in _columns(row))])
    return [["case", "rule", "capacity", "goodput", "goodput_slow", "p99_ms"], *rows]


def optimum(options: argparse.Namespace) -> list[list[str]]:
    print("\n## One worker: requests in SLO, % of the clairvoyant optimum of the same arrivals\n")
    loads = (0.8, 0.9, 1.0, 1.2, 1.5)
    cases = [case for case in CASES if case.workers == 1]
    cases += [
        replace(CASES[4], name="Inf2 sizes 1, 4, 8, k=1, 30 ms", workers=1),
        replace(CASES[0], name="BERT, k=1, 50 ms", slo_ms=50),
    ]
    requests = min(options.requests, 3000)
    print("| case | " + " | ".join(f"{load}z" for load in loads) + " |")
    print("|---|" + "---|" * len(loads))
    rows = []
    for case in cases:
        cells = []
        for load in loads:
            shares = []
            for seed in options.seeds:
                arrivals = arrivals_ns(case.arrivals, load * case.zero_loss_rps(), requests, 10 * case.slo_ns, seed)
                served = simulate(OURS.batcher(case), arrivals, case.profile, workers=1).attainment(case.slo_ns) * requests
                shares.append(100 * served / clairvoyant(case, arrivals))
            cells.append(interval(shares))
        print(f"| {case.name} | " + " | ".join(cells) + " |", flush=True)
        rows.append([case.name, *cells])
    return [["case", *(f"{load}z" for load in loads)], *rows]


def overload(options: argparse.Namespace) -> list[list[str]]:
    print("\n## Overload: % of refusals within a tenth of the SLO / of the answered late / goodput in % of c\n")
    print("| case | twice the load | five times |\n|---|---|---|")
    rows = []
    for case in CASES:
        cells = []
        for load in (2, 5):
            rps = load * case.zero_loss_rps()
            shares = []
            for seed in options.seeds:
                arrivals = arrivals_ns(case.arrivals, rps, options.requests, 10 * case.slo_ns, seed)
                outcome = simulate(OURS.batcher(case), arrivals, case.profile, workers=case.workers)
                refused, answered = outcome.refused_ns[outcome.refused_ns >= 0], outcome.latencies_ns[outcome.latencies_ns >= 0]
                goodput = outcome.goodput_rps(case.slo_ns) / case.ceiling_rps()
                shares.append((np.mean(refused <= case.slo_ns / 10), np.mean(answered > case.slo_ns), goodput))
            cells.append(" / ".join(interval([100 * share for share in each]) for each in zip(*shares, strict=True)))
        print(f"| {case.name} | " + " | ".join(cells) + " |", flush=True)
        rows.append([case.name, *cells])
    return [["case", "2", "5"], *rows]


def clairvoyant(case: Case, arrivals: np.ndarray) -> int:
    """The most requests one worker can answer within the SLO, knowing all arrivals and t(n).

    Exact: with one SLO some optimum serves in order of arrival, and drops only between batches. earliest[i][d] is the earliest
    time at which the first i requests are settled, d of them dropped.
    """
    count = len(arrivals)
    never = np.int64(1 << 60)
    sizes = range(1, case.max_rows + 1)
    padded = [next((size for size in case.row_sizes if size >= rows), rows) for rows in sizes]
    times = [case.profile.rows_ns(rows) for rows in padded]
    earliest: list[np.ndarray | None] = [None] * (count + 1)
    earliest[0] = np.zeros(1, dtype=np.int64)
    for i in range(count):
        now = earliest[i]
        if now is None:
            continue
        earliest[i] = None
        earliest[i + 1] = _least(earliest[i + 1], np.concatenate(([never], now)))
        due = arrivals[i] + case.slo_ns
        for rows, time_ns in zip(sizes, times, strict=True):
            if i + rows > count or arrivals[i + rows - 1] + time_ns > due:
                break
            end = np.maximum(now, arrivals[i + rows - 1]) + time_ns
            end[end > due] = never
            if end.min() < never:
                earliest[i + rows] = _least(earliest[i + rows], end)
    final = earliest[count]
    assert final is not None
    return count - int(np.argmax(final < never))


def _least(known: np.ndarray | None, other: np.ndarray) -> np.ndarray:
    if known is None:
        return other
    longer, shorter = (known, other) if len(known) >= len(other) else (other, known)
    least = longer.copy()
    np.minimum(least[: len(shorter)], shorter, out=least[: len(shorter)])
    return least


def other_arrivals(options: argparse.Namespace) -> list[list[str]]:
    print("\n## Other arrivals: attainment at 0.8z and goodput at 1.5z (% of c), BERT k=4 and ResNet k=1\n")
    shapes = ["mmpp", "diurnal", *([options.trace] if options.trace else [])]
    rules = (*PEERS[2:], OURS)
    print("| case | arrivals | " + " | ".join(rule.name for rule in rules) + " |")
    print("|---|---|" + "---|" * len(rules))
    rows = []
    for base in (CASES[1], CASES[2]):
        for shape in shapes:
            case = replace(base, arrivals=shape)
            cells = []
            for rule in rules:
                inside = [100 * run(case, rule, 0.8, options.requests, seed).attainment(case.slo_ns) for seed in options.seeds]
                good = [
                    100 * run(case, rule, 1.5, options.requests, seed).goodput_rps(case.slo_ns) / case.ceiling_rps()
                    for seed in options.seeds
                ]
                cells.append(f"{interval(inside)} / {interval(good)}")
            print(f"| {base.name} | {Path(shape).stem} | " + " | ".join(cells) + " |", flush=True)
            rows.append([base.name, Path(shape).stem, *cells])
    return [["case", "arrivals", *(rule.name for rule in rules)], *rows]


def leased(options: argparse.Namespace) -> list[list[str]]:
    print("\n## Leased slots against one shared queue: % in SLO / rows per batch / p99 ms, 8 workers, t = 2 + .15n ms, 20 ms\n")
    case = Case("", 2, 0.15, 8, 20, 64)
    splits = {"2 even": (0.5, 0.5), "4 even": (0.25,) * 4, "4, one has 70 %": (0.7, 0.1, 0.1, 0.1), "8 even": (0.125,) * 8}
    print("| processes | load | shared | leased | static |")
    print("|---|---|---|---|---|")
    rows = []
    for name, parts in splits.items():
        for load in (0.3, 0.8, 1.5):
            cells = []
            for split, moving in (((1.0,), False), (parts, True), (parts, False)):
                inside, size, p99 = [], [], []
                for seed in options.seeds:
                    arrivals = arrivals_ns(
                        case.arrivals, load * case.zero_loss_rps(), options.requests * 2, 10 * case.slo_ns, seed
                    )
                    outcome = leases.run(
                        lambda: _adaptive(case),
                        arrivals,
                        split,
                        case.profile,
                        workers=case.workers,
                        slo_ns=case.slo_ns,
                        leased=moving,
                        seed=seed,
                    )
                    answered = outcome.latencies_ns[outcome.latencies_ns >= 0]
                    inside.append(100 * float(np.mean((outcome.latencies_ns >= 0) & (outcome.latencies_ns <= case.slo_ns))))
                    size.append(outcome.mean_rows)
                    p99.append(float(np.percentile(answered, 99)) / MS)
                cells.append(" / ".join(f"{statistics.fmean(values):.1f}" for values in (inside, size, p99)))
            print(f"| {name} | {load}z | " + " | ".join(cells) + " |", flush=True)
            rows.append([name, str(load), *cells])
    return [["processes", "load", "shared", "leased", "static"], *rows]


def cost(options: argparse.Namespace) -> list[list[str]]:
    """CPU time of add, step and finished on this thread, at 10 000 requests per second of simulated time.

    One step per arrival and per end of a batch, as if each came in a loop tick of its own. Only these calls count: not the
    simulation around them, and not reading the clock twice, which is measured and taken off.
    """
    print("\n## Cost of a decision: CPU µs per request, median and p90 over blocks of 1000 requests, at 10 000 requests/s\n")
    print("| policy | backend | rows per batch | median | p90 |")
    print("|---|---|---|---|---|")
    rows = []
    for name, make in (("greedy", Greedy), ("adaptive", Adaptive)):
        for backend, case in (
            ("0.02+.005n ms, k=1", Case("", 0.02, 0.005, 1, 50, 64)),
            ("1+.05n ms, k=2", Case("", 1, 0.05, 2, 50, 64)),
            ("4+.6n ms, k=1, at 8 times its capacity", Case("", 4, 0.6, 1, 20, 64)),
        ):
            policy: Policy = make()
            batcher = _batcher(case, policy, slo_ns=case.slo_ns)
            median, p90, mean_rows = _decision_cost(batcher, case)
            cells = [name, backend, f"{mean_rows:.1f}", f"{median:.1f}", f"{p90:.1f}"]
            print("| " + " | ".join(cells) + " |", flush=True)
            rows.append(cells)
    return [["policy", "backend", "rows", "median_us", "p90_us"], *rows]


def _decision_cost(batcher: Batcher, case: Case) -> tuple[float, float, float]:
    requests, block = 60_000, 1000
    arrivals = [int(at) for at in np.cumsum(np.random.default_rng(0).exponential(1e5, requests))]
    asked = [InferRequest("m", "1", "", {}, 1, at) for at in arrivals]
    running: list[tuple[int, Batch]] = []
    costs: list[float] = []
    batches = upcoming = 0
    spent = 0.0
    clock = time.thread_time_ns
    reading_ns = statistics.median([-(clock() - clock()) for _ in range(1001)])
    while upcoming < requests:
        now_ns = arrivals[upcoming]
        if running and running[0][0] <= now_ns:
            now_ns, batch = running.pop(0)
            began = clock()
            batcher.finished(batch, now_ns, now_ns - batch.closed_ns, True)
            step = batcher.step(now_ns, case.workers - len(running))
            spent += clock() - began - reading_ns
        else:
            began = clock()
            try:
                batcher.add(asked[upcoming], now_ns)
            except Overloaded:
                step = NOTHING
            else:
                step = batcher.step(now_ns, case.workers - len(running))
            spent += clock() - began - reading_ns
            upcoming += 1
            if upcoming % block == 0:
                costs.append(spent / block / 1000)
                spent = 0.0
        for batch in step.batches:
            batches += 1
            running.append((now_ns + case.profile.rows_ns(batch.rows), batch))
        running.sort(key=lambda item: item[0])
    return statistics.median(costs), float(np.percentile(costs, 90)), requests / max(1, batches)


def curves(options: argparse.Namespace) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By case and rule: offered load (% of z) and goodput (% of c), mean over seeds."""
    with ProcessPoolExecutor(options.jobs) as pool:
        found = pool.map(_curves_of, CASES, [options.requests] * len(CASES), [tuple(options.seeds)] * len(CASES))
        return dict(zip([case.name for case in CASES], found, strict=True))


def _curves_of(case: Case, requests: int, seeds: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    def goodput(rule: Rule, load: float) -> float:
        found = [run(case, rule, load, requests, seed).goodput_rps(case.slo_ns) for seed in seeds]
        return 100 * statistics.fmean(found) / case.ceiling_rps()

    rules = (*PEERS, tuned_triton(case, min(requests // 3, 4000)), OURS)
    return {rule.name: [(100 * load, goodput(rule, load)) for load in PLOTTED_LOADS] for rule in rules}


TABLES: dict[str, Callable[[argparse.Namespace], list[list[str]]]] = {
    "table": table,
    "heldout": heldout,
    "optimum": optimum,
    "overload": overload,
    "arrivals": other_arrivals,
    "leases": leased,
    "cost": cost,
}


def main(arguments: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", choices=TABLES, action="append")
    parser.add_argument("--cost", action="store_const", const=["cost"], dest="only")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--repeat", type=int, help="seeds per number")
    parser.add_argument("--cases-seed", type=int, default=2026, help="draws the held-out cases")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trace")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(list(arguments))
    options.requests = options.requests or (40_000 if options.full else 1_500)
    options.seeds = range(options.repeat or (5 if options.full else 2))
    for name in options.only or ([] if options.plot else TABLES):
        rows = TABLES[name](options)
        if options.csv:
            options.csv.mkdir(parents=True, exist_ok=True)
            with (options.csv / f"{name}.csv").open("w", newline="") as file:
                csv.writer(file).writerows(rows)
    if options.plot:
        foot = f"benchmarks.batching: {options.requests} requests and {len(options.seeds)} seeds a mark"
        options.plot.write_text(batching_charts.page(curves(options), foot), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
