"""Mixed lengths in simulated time: images, compiled sizes, models that share workers; the default beside hand-set settings.

    python -m benchmarks.mixed                          all cases, some minutes on one core
    python -m benchmarks.mixed --cases images --seeds 4

Without an SLO a closed loop: requests/s and p99. With it Poisson arrivals at shares of the capacity, which is what the best
setting serves in the closed loop: what is answered in time, and its work, the worker time that these requests would take one by
one. Of two settings that do as much work in time, the one that refuses more of the long requests answers more. The best setting
is chosen for each case and rate by the tuning seeds, and runs beside the default on the judging seeds, which are others. `in
turn` is one request after the other, first come, first served. Intervals are 95 % of the mean of paired differences.

Images have two axes of any size. The gateway pads the first; those that differ in the other never share a batch.
"""

import argparse
import heapq
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import mean, stdev
from typing import Final, NamedTuple

import numpy as np
from scipy import special

from benchmarks.cases import JUDGING, MS, TUNING, seed_of
from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch, bucket_of
from gateway.batching.batcher import Batcher
from gateway.batching.fairness import SharedWorkers
from gateway.batching.policies import Fixed, Greedy
from gateway.batching.policy import Policy
from gateway.config import Ragged
from gateway.errors import GatewayError
from gateway.types import InferRequest

_MIXED: Final = 17  # second word of a seed: what `cases` draws has smaller ones
_SHARES: Final = (0.6, 0.8, 1.0, 1.2, 1.5)
_WARM: Final = 0.25  # of the requests or the time, which count for nothing
Shape = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model: t = fixed + cell · cells + more · cells^1.5 in ms, with cells = rows · the largest sizes of the batch.

    shapes: of the requests, equally often: the axis that is padded, and the other. row_sizes, buckets: what is compiled.
    slo_ms: what it promises where a promise is asked for; 0: nothing.
    """

    name: str
    fixed_ms: float
    cell_ms: float
    shapes: tuple[Shape, ...]
    more_ms: float = 0.0
    noise: float = 0.15
    max_rows: int = 32
    row_sizes: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    slo_ms: float = 0.0

    def time_ns(self, batch: Batch) -> float:
        first = batch.parts[0].request.inputs["x"]
        longest = max(part.request.inputs["x"].shape[1] for part in batch.parts)
        rows = batch.padded_rows
        if self.row_sizes:  # a setting that knows nothing of them is padded to them nevertheless
            rows = bucket_of(rows, self.row_sizes)
        return self._time_ns(rows * bucket_of(longest, self.buckets) * first.shape[2])

    def lone_ns(self, request: InferRequest) -> float:
        """Of a request by itself, where nothing is compiled."""
        return self._time_ns(request.inputs["x"].size)

    def _time_ns(self, cells: int) -> float:
        return float(self.fixed_ms + self.cell_ms * cells + self.more_ms * cells**1.5) * MS


class Case(NamedTuple):
    """Models on so many workers, which they share. The first makes the promise, and is what rates and tails are told of."""

    name: str
    workers: int
    kinds: tuple[Kind, ...]


LENGTHS: Final = tuple((round(length), 1) for length in np.linspace(6, 120, 16))
_SIDES: Final = (160, 224, 320, 448)
_IMAGES: Final = tuple((high, wide) for high in _SIDES for wide in _SIDES)
_EMBEDDER: Final = Kind(name="embedder", fixed_ms=2.9, cell_ms=0.14, more_ms=0.004, shapes=LENGTHS, slo_ms=250)
CASES: Final = {
    case.name: case
    for case in (
        Case("images-cpu", 2, (Kind(name="images", fixed_ms=3, cell_ms=2e-4, shapes=_IMAGES, slo_ms=250),)),
        Case("images-gpu", 1, (Kind(name="images", fixed_ms=6, cell_ms=8e-6, shapes=_IMAGES, slo_ms=60),)),
        Case("compiled", 2, (Kind(
            name="compiled", fixed_ms=2.5, cell_ms=0.01, shapes=LENGTHS, row_sizes=(1, 4, 8), buckets=(32, 64, 128), max_rows=8,
            noise=0.02, slo_ms=40),)),
        Case("shared", 2, (
            _EMBEDDER,
            Kind(name="fast", fixed_ms=1, cell_ms=0.01, shapes=LENGTHS),
            Kind(name="slow", fixed_ms=40, cell_ms=0.1, shapes=LENGTHS))),
    )
}  # fmt: skip


class Setting(NamedTuple):
    """How all models of a case are batched. buckets: (): as the model has them. most: rows; 0: as many as the model takes."""

    policy: Callable[[], Policy]
    ragged: bool
    buckets: tuple[int, ...] = ()
    most: int = 0


DEFAULT, IN_TURN = "default", "in turn"


def settings(case: Case) -> dict[str, Setting]:
    """By name, the default first."""
    longest = max(high for kind in case.kinds for high, _ in kind.shapes)
    found = {
        DEFAULT: Setting(Adaptive, True),
        IN_TURN: Setting(Greedy, False, most=1),
        "without ragged": Setting(Adaptive, False),
        "greedy": Setting(Greedy, True),
        "greedy, without ragged": Setting(Greedy, False),
    }
    if not any(kind.buckets for kind in case.kinds):
        found["4 buckets"] = Setting(Adaptive, True, tuple(longest * part // 4 for part in (1, 2, 3, 4)))
        found["12 buckets"] = Setting(Adaptive, True, tuple(math.ceil(longest * part / 12) for part in range(1, 13)))
    for most in (4, 8, 16):
        if all(most <= kind.max_rows for kind in case.kinds):
            for delay_ms in (0, 5):
                for ragged in (True, False):
                    name = f"{most} rows, {delay_ms} ms{'' if ragged else ', without ragged'}"
                    found[name] = Setting(partial(Fixed, delay_ms * MS), ragged, most=most)
    return found


@dataclass(eq=False)
class Model:
    """One model of a run. ended: of each request that was answered, when, after how long, and what it takes alone."""

    kind: Kind
    setting: Setting
    workers: int
    promise: bool
    seed: tuple[int, ...]
    now_ns: int = 0
    running: int = 0
    ended: list[tuple[int, int, float]] = field(default_factory=list)
    worker_ns: list[tuple[int, int]] = field(default_factory=list)
    wake_ns: int | None = None
    due_ns: int = 0  # of the timer that is set

    def __post_init__(self) -> None:
        kind, setting = self.kind, self.setting
        buckets = setting.buckets or kind.buckets
        self.batcher = Batcher(
            setting.policy(),
            max_rows=setting.most or kind.max_rows,
            row_sizes=tuple(size for size in kind.row_sizes if size <= (setting.most or kind.max_rows)),
            workers=self.workers,
            slo_ns=round(kind.slo_ms * MS) if self.promise and kind.slo_ms else None,
            ragged=Ragged(pad={"x": 0}, buckets=buckets) if setting.ragged else None,
        )
        lots = np.random.default_rng((*self.seed, 0))
        self._drawn = (kind.shapes[at] for at in iter(partial(lots.integers, len(kind.shapes)), None))
        self._luck = np.random.default_rng((*self.seed, 1))
        self._arrays = {shape: np.broadcast_to(np.int8(0), (1, *shape)) for shape in kind.shapes}
        self.started: list[tuple[Batch, int]] = []

    @property
    def wants_worker(self) -> bool:
        return self.batcher.has_work and self.running < self.workers

    @property
    def undecided(self) -> bool:
        return self.wake_ns is not None and self.wake_ns <= self.now_ns + 1

    def ask(self, now_ns: int) -> None:
        """One more request."""
        shape = next(self._drawn)
        # Without `ragged`, clients pad to what is compiled: or nothing would ever share a batch.
        key = shape[1] if self.setting.ragged else (bucket_of(shape[0], self.kind.buckets), shape[1])
        try:
            self.batcher.add(InferRequest("m", "1", "", {"x": self._arrays[shape]}, 1, now_ns, shape_key=key), now_ns)
        except GatewayError:
            return  # with an error, which counts as an answer that is not in time

    def free_ns(self, now_ns: int) -> float:
        return self.batcher.wait_ns(now_ns, 0)

    def start_batches(self, workers: int) -> list[Batch]:
        step = self.batcher.step(self.now_ns, min(workers, self.workers - self.running))
        self.wake_ns = step.wake_at_ns
        for batch in step.batches:
            noise = self.kind.noise
            taken_ns = round(self.kind.time_ns(batch) * math.exp(self._luck.normal(-(noise**2) / 2, noise)))
            self.running += 1
            self.started.append((batch, taken_ns))
        return step.batches


def run(models: Sequence[Model], workers: int, until_ns: int, connections: int, rate: float) -> None:
    """Until that time. connections: of each model's closed loop. rate: of the first model's open loop, a second; 0: none."""
    shared, number = SharedWorkers(workers), count()
    events: list[tuple[int, int, Model, Batch | None, int]] = []  # when, which, whose, the batch that ends, its time
    lots = np.random.default_rng((*models[0].seed, 2))
    due_ns = round(lots.exponential(1 / rate) * 1e9) if rate else until_ns
    for at, model in enumerate(models):
        shared.join(model, 1.0)
        for _ in range(0 if rate and not at else connections):
            model.ask(0)
        heapq.heappush(events, (0, next(number), model, None, 0))
    while True:
        if rate and (not events or due_ns <= events[0][0]):
            now_ns, model = due_ns, models[0]
            model.ask(now_ns)
            due_ns += round(lots.exponential(1 / rate) * 1e9)
        else:
            now_ns, _, model, done, taken_ns = heapq.heappop(events)
            if done is not None:
                model.running -= 1
                model.worker_ns.append((now_ns, taken_ns))
                model.batcher.finished(done, now_ns, 1, ok=True)
                shared.ended(done, now_ns)
                for part in done.parts:
                    model.ended.append((now_ns, now_ns - part.request.arrival_ns, model.kind.lone_ns(part.request)))
                    if not rate or model is not models[0]:
                        model.ask(now_ns)
        if now_ns >= until_ns:
            return
        for each in models:
            each.now_ns = now_ns
        shared.ask(model, now_ns)
        for each in models:
            for batch, batch_ns in each.started:
                heapq.heappush(events, (now_ns + batch_ns, next(number), each, batch, batch_ns))
            each.started.clear()
            if each.wake_ns is not None and (each.due_ns <= now_ns or each.wake_ns < each.due_ns):
                each.due_ns = max(now_ns + 1, each.wake_ns)
                heapq.heappush(events, (each.due_ns, next(number), each, None, 0))


class Served(NamedTuple):
    """Of the first model. good_work: workers that what is answered in time would keep busy, if each request went alone.

    shares: each model's part of the workers. quiet_ms: the longest time in which one had no answer.
    """

    rps: float
    p99_ms: float
    good_rps: float
    good_work: float
    shares: tuple[float, ...]
    quiet_ms: float


def served(case: Case, setting: Setting, stream: int, seed: int, seconds: float, *, rate: float = 0.0) -> Served:
    """rate: of the first model's open loop, with its promise; 0: its closed loop, without."""
    until_ns = round(seconds * 1e9)
    seeds = [seed_of(stream, _MIXED, seed, at) for at in range(len(case.kinds))]
    models = [Model(kind, setting, case.workers, rate > 0, words) for kind, words in zip(case.kinds, seeds, strict=True)]
    run(models, case.workers, until_ns, 32, rate)
    warm_ns = round(_WARM * until_ns)
    slo_ns = case.kinds[0].slo_ms * MS
    first = [(taken_ns, lone_ns) for now_ns, taken_ns, lone_ns in models[0].ended if now_ns >= warm_ns]
    good = [lone_ns for taken_ns, lone_ns in first if taken_ns <= slo_ns]
    latencies: list[float] = [taken_ns for taken_ns, _ in first]
    span_s = (until_ns - warm_ns) / 1e9
    busy = [sum(taken_ns for now_ns, taken_ns in model.worker_ns if now_ns >= warm_ns) for model in models]
    quiet_ns = [
        max(np.diff([warm_ns, *(now_ns for now_ns, _, _ in model.ended if now_ns >= warm_ns), until_ns]).tolist())
        for model in models
    ]
    return Served(
        len(first) / span_s,
        float(np.percentile(latencies or [math.nan], 99)) / MS,
        len(good) / span_s,
        sum(good) / 1e9 / span_s,
        tuple(each / max(1, sum(busy)) for each in busy),
        float(max(quiet_ns)) / MS,
    )


def told(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Means of both, and ours as a share of theirs: the mean, and half the width of its 95 % interval (Student's t)."""
    ratios = [100 * one / other for one, other in zip(ours, theirs, strict=True) if other]
    seeds = len(ratios)
    half = float(special.stdtrit(seeds - 1, 0.975)) * stdev(ratios) / math.sqrt(seeds) if seeds > 1 else math.nan
    share = f"{mean(ratios):.1f}±{half:.1f} %" if ratios else "-"
    return f"{mean(ours):.1f} / {mean(theirs):.1f}, {share}"


def judge(case: Case, seeds: int, seconds: float) -> None:
    """Prints a row for the closed loop, and one for each rate."""
    variants = settings(case)
    tuning, judging = range(max(2, seeds // 4)), range(seeds)

    def tuned(value: Callable[[Served], float], rate: float) -> tuple[str, float]:
        means = {
            name: mean([value(served(case, setting, TUNING, seed, seconds, rate=rate)) for seed in tuning])
            for name, setting in variants.items()
            if name != DEFAULT
        }
        best = max(means, key=means.__getitem__)
        return best, means[best]

    def row(rate: float, best: str) -> list[list[Served]]:
        return [
            [served(case, variants[name], JUDGING, seed, seconds, rate=rate) for seed in judging]
            for name in (DEFAULT, best, IN_TURN)
        ]

    best, capacity = tuned(lambda each: each.rps, 0.0)
    capacity = max(capacity, mean([served(case, variants[DEFAULT], TUNING, seed, seconds).rps for seed in tuning]))
    ours, theirs, turn = row(0.0, best)
    print(
        f"| {case.name} | no SLO | {best} | {told([s.rps for s in ours], [s.rps for s in theirs])} | "
        f"p99 {told([s.p99_ms for s in ours], [s.p99_ms for s in turn])} in turn{_of_shares(ours)} |",
        flush=True,
    )
    for share in _SHARES:
        rate = share * capacity
        best, _ = tuned(lambda each: each.good_rps, rate)
        ours, theirs, _ = row(rate, best)
        print(
            f"| {case.name} | {share:.0%} | {best} | {told([s.good_rps for s in ours], [s.good_rps for s in theirs])} | "
            f"{rate:.1f}/s asked; work {told([s.good_work for s in ours], [s.good_work for s in theirs])}{_of_shares(ours)} |",
            flush=True,
        )


def _of_shares(runs: Sequence[Served]) -> str:
    """What each model has of the workers, and how long the one that waited longest had no answer."""
    if len(runs[0].shares) == 1:
        return ""
    parts = [mean(column) for column in zip(*(each.shares for each in runs), strict=True)]
    quiet_ms = max(each.quiet_ms for each in runs)
    return f"; shares {' '.join(f'{part:.0%}' for part in parts)}, at most {quiet_ms:.0f} ms without an answer"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--seeds", type=int, default=8, help="to judge by; a quarter as many to tune by, two at least")
    parser.add_argument("--requests", type=int, default=1200, help="of each run, about: of the first model, one by one")
    arguments = parser.parse_args()
    print("| case | load | best setting by hand | default and that one | |\n|---|---|---|---|---|")
    for name in arguments.cases:
        case = CASES[name]
        in_turn = served(case, settings(case)[IN_TURN], TUNING, 0, 8.0).rps
        judge(case, arguments.seeds, arguments.requests / in_turn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
