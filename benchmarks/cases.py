"""Cases for batching rules, drawn by seed: backends from flat to steep and quiet to noisy, their SLO and their traffic.

Case i of a grid depends on nothing but the grid's stream and i, so the first six of sixty are the six of six. The two streams
are the first word of every seed, of cases and of arrivals: what is drawn for tuning is never drawn for judging.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from benchmarks.arrivals import arrivals_ns
from gateway.batching.batch import Batch, bucket_of
from gateway.config import Ragged
from gateway.types import InferRequest

MS: Final = 1_000_000
TUNING: Final = 0
JUDGING: Final = 1
GRIDS: Final = {"tuning": TUNING, "judging": JUDGING}
_LEAST_LIMITS: Final = 20  # of a run: what is empty at its start, and drained after its end, then weighs little
_ENOUGH: Final = 4000  # requests for that: else the fastest backends would take most of the time
_CASES, _TRAFFIC, _LUCK, _STALLS = range(4)  # second word of a seed: what is drawn

NO_PROMISE_SHARE: Final = 20
"""Of t(1): what answers are held to where no SLO is promised. No rule is told."""


def seed_of(stream: int, what: int, *numbers: int) -> tuple[int, ...]:
    """A seed that no other stream, and nothing else of this one, has."""
    return (stream, what, *numbers)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """t(rows, length) = fixed + row · rows · length/mean length, rows in steps of `tile`, rows and length in compiled sizes.

    row_sizes, buckets: compiled sizes of rows and lengths; empty: any. lengths: what requests have, equally often.
    noise: standard deviation of log t. tail: share of batches that take up to ten times as long (Pareto, exponent 1.5).
    stall_every_ns, stall_ns: mean time between stalls of all workers, and their length; 0: none.
    """

    fixed_ns: float
    row_ns: float
    workers: int
    max_rows: int
    tile: int = 1
    row_sizes: tuple[int, ...] = ()
    lengths: tuple[int, ...] = (1,)
    buckets: tuple[int, ...] = ()
    noise: float = 0.0
    tail: float = 0.0
    stall_every_ns: float = 0.0
    stall_ns: float = 0.0

    @cached_property
    def mean_length(self) -> float:
        return float(np.mean([bucket_of(length, self.buckets) for length in self.lengths]))

    @cached_property
    def ragged(self) -> Ragged | None:
        return Ragged(pad={"ids": 0}, buckets=self.buckets) if len(self.lengths) > 1 else None

    def time_ns(self, rows: int, length: float) -> float:
        """Of a batch without luck. rows: as padded to compiled sizes."""
        tiled = -(-rows // self.tile) * self.tile if rows > 1 else 1
        return self.fixed_ns + self.row_ns * tiled * length / self.mean_length

    def rows_ns(self, rows: int) -> int:
        """Of a batch of mean length: what a rule with a profile is told."""
        return round(self.time_ns(rows, self.mean_length))

    def most_rps(self, share: float, limit_ns: float) -> float:
        """max{k·n/t(n) : share·t(n) <= limit} at the mean length; 0 if nothing fits."""
        sizes = self.row_sizes or range(1, self.max_rows + 1)
        times = ((size, self.rows_ns(size)) for size in sizes)
        return max((self.workers * size / time * 1e9 for size, time in times if share * time <= limit_ns), default=0.0)


@dataclass(frozen=True)
class DrawnCase:
    """A backend, what is promised of it, and how requests come. slo_ns: None: nothing is promised."""

    name: str
    backend: Backend
    slo_ns: int | None
    arrivals: str
    stream: int
    number: int

    @property
    def limit_ns(self) -> int:
        """What an answer is held to."""
        return self.slo_ns or NO_PROMISE_SHARE * self.backend.rows_ns(1)

    @cached_property
    def unit_rps(self) -> float:
        """z, the zero-loss fluid capacity; without an SLO max k·n/t(n); where z is 0, as no batch fits, half the ceiling c."""
        if self.slo_ns is None:
            return self.backend.most_rps(0.0, 1.0)
        workers = self.backend.workers
        return self.backend.most_rps(1 + 1 / workers, self.slo_ns) or self.ceiling_rps / 2

    @cached_property
    def ceiling_rps(self) -> float:
        """c: no goodput of equal lengths is above it."""
        return self.backend.most_rps(1.0 if self.slo_ns else 0.0, self.slo_ns or 1.0)

    def arrivals_ns(self, load: float, requests: int, seed: int, stream: int) -> np.ndarray:
        """At a share of the unit, the same for every rule. requests: at least; more, up to 4000, until they come for 20 limits.

        Bursts last three limits in the mean.
        """
        rate = load * self.unit_rps
        drawn = seed_of(stream, _TRAFFIC, self.stream, self.number, seed)
        count = max(requests, min(_ENOUGH, math.ceil(_LEAST_LIMITS * self.limit_ns / 1e9 * rate)))
        return arrivals_ns(self.arrivals, rate, count, 3 * self.limit_ns, drawn)

    def lengths_of(self, count: int, seed: int, stream: int) -> np.ndarray:
        """Of each request, the same for every rule."""
        rng = np.random.default_rng(seed_of(stream, _TRAFFIC, self.stream, self.number, seed, 1))
        return rng.choice(self.backend.lengths, count)

    def requests_of(self, count: int, seed: int, stream: int, *, by_shape: bool) -> Callable[[int, int], InferRequest]:
        """Makes requests with their lengths. by_shape: requests of other lengths have another shape and never share a batch."""
        drawn = self.lengths_of(count, seed, stream).tolist()
        arrays = {length: {"ids": np.zeros((1, length), np.int8)} for length in self.backend.lengths}

        def make(index: int, arrival_ns: int) -> InferRequest:
            length = drawn[index]
            shape = length if by_shape else None
            return InferRequest("m", "1", "", arrays[length], 1, arrival_ns, shape_key=shape)

        return make


class Luck:
    """The service of one run: noise, tails and stalls of a seed. Stalls are of time, the same for every rule."""

    def __init__(self, case: DrawnCase, until_ns: int, seed: int, stream: int) -> None:
        self._backend = backend = case.backend
        self._many = len(backend.lengths) > 1
        drawn = seed_of(stream, _LUCK, case.stream, case.number, seed)
        self._rng = np.random.default_rng(drawn)
        self._stalls_ns = np.zeros(0)
        if backend.stall_every_ns:
            rng = np.random.default_rng(seed_of(stream, _STALLS, case.stream, case.number, seed))
            count = 10 + int(3 * until_ns / backend.stall_every_ns)
            self._stalls_ns = np.cumsum(rng.exponential(backend.stall_every_ns, count) + backend.stall_ns)

    def __call__(self, batch: Batch, busy: int, now_ns: int) -> int:
        backend = self._backend
        longest = max([part.request.inputs["ids"].shape[1] for part in batch.parts]) if self._many else backend.mean_length
        time_ns = backend.time_ns(batch.padded_rows, bucket_of(longest, backend.buckets) if self._many else longest)
        if backend.noise:
            time_ns *= float(np.exp(self._rng.normal(-(backend.noise**2) / 2, backend.noise)))
        if backend.tail and self._rng.random() < backend.tail:
            time_ns *= min(10.0, 1 + float(self._rng.pareto(1.5)))
        if len(self._stalls_ns):
            at = int(np.searchsorted(self._stalls_ns, now_ns + time_ns))
            if at and self._stalls_ns[at - 1] + backend.stall_ns > now_ns:
                time_ns += self._stalls_ns[at - 1] + backend.stall_ns - max(now_ns, self._stalls_ns[at - 1])
        return max(1, round(time_ns))


def draw(stream: int, number: int, trace: str | None = None) -> DrawnCase:
    """Case `number` of a grid. SLOs go round: tight, medium, tight, loose, and every eighth has none."""
    rng = np.random.default_rng(seed_of(stream, _CASES, number))
    first_ns = float(np.round(10 ** rng.uniform(0, 1.5), 1)) * MS
    steep = float(10 ** rng.uniform(-2.5, 0.5))  # row over fixed
    row_ns = first_ns * steep / (1 + steep)
    workers = int(rng.choice([1, 1, 2, 3, 4, 8]))
    sizes = str(rng.choice(["any", "any", "tiled", "compiled"]))
    noise = float(rng.choice([0.0, 0.05, 0.15, 0.3]))
    tail = float(rng.choice([0.0, 0.0, 0.005]))
    stalls = bool(rng.random() < 0.25)
    spread = str(rng.choice(["equal", "equal", "uniform", "heavy"]))
    lengths = {"equal": (1,), "uniform": tuple(range(8, 129, 8)), "heavy": _heavy(rng)}[spread]
    backend = Backend(
        fixed_ns=first_ns - row_ns,
        row_ns=row_ns,
        workers=workers,
        max_rows=16 if sizes == "compiled" else int(rng.choice([8, 16, 32, 64])),
        tile=8 if sizes == "tiled" else 1,
        row_sizes=(1, 4, 16) if sizes == "compiled" else (),
        lengths=lengths,
        buckets=(32, 64, 128, 512) if sizes == "compiled" and len(lengths) > 1 else (),
        noise=noise,
        tail=tail,
        stall_every_ns=first_ns * float(rng.uniform(500, 2000)) if stalls else 0.0,
        stall_ns=first_ns * float(rng.uniform(2, 5)) if stalls else 0.0,
    )
    band = "none" if number % 8 == 7 else ("tight", "medium", "tight", "loose")[number % 4]
    slo = float(rng.uniform(*{"tight": (1.5, 3), "medium": (3, 8), "loose": (8, 20), "none": (1, 1)}[band]))
    slo_ns = None if band == "none" else round(slo * backend.rows_ns(1))
    shapes = ["poisson", "poisson", "mmpp", "diurnal", *([trace] if trace else [])]
    arrivals = str(rng.choice(shapes))
    kinds = [
        f"{number}: {backend.fixed_ns / MS:.2f}+{row_ns / MS:.3f}n ms",
        f"k={workers}",
        "no SLO" if slo_ns is None else f"SLO {slo:.1f} t(1)",
        f"max {backend.max_rows}",
        sizes if sizes != "any" else "",
        f"noise {noise}" if noise else "",
        "tails" if tail else "",
        "stalls" if stalls else "",
        f"lengths {spread}" if spread != "equal" else "",
        {"poisson": "", "mmpp": "bursts", "diurnal": "diurnal"}.get(arrivals, "trace"),
    ]
    return DrawnCase(", ".join(filter(None, kinds)), backend, slo_ns, arrivals, stream, number)


def kinds_of(case: DrawnCase) -> Sequence[str]:
    """What tables group cases by."""
    backend = case.backend
    share = 0.0 if case.slo_ns is None else case.slo_ns / backend.rows_ns(1)
    steep = backend.row_ns / backend.fixed_ns
    return (
        "SLO none"
        if case.slo_ns is None
        else f"SLO {'up to 3' if share <= 3 else 'up to 8' if share <= 8 else 'beyond 8'} t(1)",
        "flat (row < 3 % of fixed)" if steep < 0.03 else "steep (row > 30 %)" if steep > 0.3 else "between flat and steep",
        "quiet (noise up to .05)" if backend.noise <= 0.05 else "noisy",
        "one worker" if backend.workers == 1 else "several workers",
        "lengths differ" if len(backend.lengths) > 1 else "lengths equal",
        "any rows" if not backend.row_sizes and backend.tile == 1 else "compiled or tiled rows",
        *(["tails"] if backend.tail else []),
        *(["stalls"] if backend.stall_ns else []),
        {"poisson": "Poisson", "mmpp": "bursts", "diurnal": "diurnal"}.get(case.arrivals, "trace"),
    )


def _heavy(rng: np.random.Generator) -> tuple[int, ...]:
    """Sixteen lengths as equally likely parts of a log-normal one: most short, few very long."""
    return tuple(sorted({int(np.clip(length, 4, 512)) for length in np.exp(rng.normal(3.2, 1.0, 16))}))
