"""Traffic patterns: when each request is meant to be sent, computed before the run.

A pattern is text: phases joined by ";", each `kind` or `kind:key=value,...`. Keys that every kind takes: `rate` (mean
requests/s) and `duration` (seconds); the run's own are used where a phase has none.

    constant                          evenly spaced
    poisson                           independent users
    burst:factor=5,on=1,off=4         on-off Markov-modulated Poisson: in bursts `factor` times the quiet rate
    ramp:from=10,to=200               Poisson whose rate grows linearly
    stairs:from=50,to=200,steps=4     Poisson whose rate rises in equal steps
    diurnal:low=0.2,period=60         Poisson whose rate is a cosine between low · peak and the peak
    trace:file=arrivals.csv           replayed; column=timestamp unless told
    users:count=8,think=0.1           closed loop: each user waits for his answer, then thinks (exponential, mean s)

All Poisson kinds are one mechanism: a Poisson process given its count, mapped through the inverse of the integrated rate
function (Çinlar, Introduction to Stochastic Processes, 1975, theorem 4.7.1). A run sends rate · duration requests; only when is
left to chance: given their count, the arrivals of a Poisson process are independent and uniform. In a part of the run, such as
a block or what a warm-up leaves, counts vary as ever, but for sqrt(1 - part) of it.

A trace with a rate is scaled through its rate function, not compressed in time, so that its rhythm against timeouts and batch
delays stays: each arrival gives floor(f) or ceil(f) copies, f on average over the run; the first keeps its moment, the others
fall uniformly into the gap to the next arrival. With f < 1 that is thinning.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np

from loadtest.errors import UsageError

MAX_REQUESTS: Final = 20_000_000  # of one run: 38 bytes each are kept (`request_log.REQUEST_BYTES`)

_MOST: Final = 1e12  # of each number, so that what they come to is finite
_LEAST_S: Final = 0.1  # of a run
_MOST_S: Final = 86_400.0  # of a phase, as of a run
_MOST_PIECES: Final = 2_000_000  # of a rate over time: computed in about two seconds
_PIECES_A_PERIOD: Final = 200

# Streams of randomness: one per dimension, so that changing one leaves the others as they were.
_ARRIVALS, _PAYLOADS, _THINKING = range(3)

_STATIONARY: Final = frozenset({"constant", "poisson", "burst", "users"})


@dataclass(frozen=True, slots=True)
class Phase:
    """One parsed phase. options: its keys, still text."""

    kind: str
    rate_rps: float
    duration_s: float
    options: Mapping[str, str]

    @property
    def stationary_open(self) -> bool:
        """Whether it is an open loop whose statistics do not change by design."""
        return self.kind in _STATIONARY - {"users"}

    @property
    def has_rate(self) -> bool:
        """Whether `rate` would change nothing: without it, it says when to send."""
        return self.kind == "users" or (self.kind in ("ramp", "stairs") and "to" in self.options)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A whole run, ready to be sent.

    intended_ns: (n,) int64, ascending, from the start of the run; empty for a closed loop.
    users, think_ns: closed loop only (users 0: open). think_ns: (m,) int64, drawn in turn, starting over at the end.
    phases: (start_s, end_s, kind) in order. stationary: its statistics do not change by design.
    """

    intended_ns: np.ndarray
    duration_ns: int
    phases: tuple[tuple[float, float, str], ...]
    stationary: bool
    users: int = 0
    think_ns: np.ndarray | None = None

    @property
    def rate_rps(self) -> float:
        """The mean offered rate; 0 for a closed loop."""
        return len(self.intended_ns) / self.duration_ns * 1e9


def schedule(pattern: str, *, rate_rps: float, duration_s: float, seed: int) -> Schedule:
    """Compute the intended send times. The same arguments give the same schedule.

    Raises: UsageError, naming the phase and the key.
    """
    phases = parse(pattern, rate_rps=rate_rps, duration_s=duration_s)
    if any(phase.kind == "users" for phase in phases):
        if len(phases) > 1:
            raise UsageError('pattern: "users" is a closed loop and cannot stand in sequence with other phases')
        return _closed_loop(phases[0], seed)
    expected = sum(phase.rate_rps * phase.duration_s for phase in phases)
    if expected > MAX_REQUESTS:
        raise UsageError(f"the run would send {expected:,.0f} requests, at most {MAX_REQUESTS:,} are kept: shorten --duration")
    times: list[np.ndarray] = []
    start_s = 0.0
    for number, phase in enumerate(phases):
        rng = np.random.default_rng([seed, _ARRIVALS, number])
        arrivals = PATTERNS[phase.kind](phase, rng)
        times.append(start_s + arrivals[(arrivals >= 0) & (arrivals < phase.duration_s)])
        start_s += phase.duration_s
    intended_ns = (np.concatenate(times) * 1e9).astype(np.int64)
    if len(intended_ns) == 0:
        raise UsageError(
            f"pattern {pattern!r} at {rate_rps:g} requests/s sends nothing in {start_s:g} s: raise the rate or duration"
        )
    return _open_loop(phases, intended_ns)


def was_scheduled(pattern: str, intended_ns: np.ndarray, *, rate_rps: float, duration_s: float, seed: int) -> Schedule:
    """As `schedule` of a run that was. intended_ns: its open loop's; a trace may be another by now. Raises: UsageError."""
    phases = parse(pattern, rate_rps=rate_rps, duration_s=duration_s)
    return _closed_loop(phases[0], seed) if phases[0].kind == "users" else _open_loop(phases, intended_ns)


def _open_loop(phases: Sequence[Phase], intended_ns: np.ndarray) -> Schedule:
    ends_s = list(accumulate(phase.duration_s for phase in phases))
    return Schedule(
        intended_ns,
        int(ends_s[-1] * 1e9),
        tuple((start_s, end_s, phase.kind) for start_s, end_s, phase in zip([0.0, *ends_s], ends_s, phases, strict=False)),
        stationary=len(phases) == 1 and phases[0].kind in _STATIONARY,
    )


def payload_choice(count: int, choices: int, seed: int) -> np.ndarray:
    """Which payload each request carries: (count,) int32, uniform."""
    return np.random.default_rng([seed, _PAYLOADS]).integers(0, choices, count, dtype=np.int32)


def parse(pattern: str, *, rate_rps: float, duration_s: float) -> tuple[Phase, ...]:
    """Read a pattern's text. Raises: UsageError."""
    phases: list[Phase] = []
    for text in filter(None, (part.strip() for part in pattern.split(";"))):
        kind, _, rest = text.partition(":")
        if kind not in _OPTIONS:
            raise UsageError(f"pattern: unknown kind {kind!r}, expected one of {', '.join(_OPTIONS)}")
        options: dict[str, str] = {}
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            if not equals or key not in ("rate", "duration", *_OPTIONS[kind]):
                raise UsageError(
                    f"pattern {kind}: cannot read {pair!r}, expected key=value of rate, duration, {', '.join(_OPTIONS[kind])}"
                )
            if key in options:
                raise UsageError(f"pattern {kind}: {key} is given twice: leave one of them out")
            options[key] = value
        if "rate" in options and Phase(kind, 0, 0, options).has_rate:
            raise UsageError(f"pattern {kind}: rate={options['rate']} changes nothing here: leave it out")
        rate = _number(kind, options, "rate", rate_rps)
        duration = _number(kind, options, "duration", duration_s)
        if not 0 < duration <= _MOST_S:
            raise UsageError(f"pattern {kind}: duration={duration:g}, expected above 0 s, and {_MOST_S:g} at most")
        if rate <= 0 and kind in _NEED_RATE:
            raise UsageError(f"pattern {kind}: needs a rate above 0 requests/s (--rate), got {rate:g}")
        phases.append(Phase(kind, rate, duration, options))
    if not phases:
        raise UsageError("pattern: empty, expected such as poisson")
    return tuple(phases)


def is_closed(pattern: str) -> bool:
    """Whether it is a closed loop. Raises: UsageError."""
    return parse(pattern, rate_rps=1.0, duration_s=1.0)[0].kind == "users"


def uses_rate(phases: Iterable[Phase]) -> bool:
    """Whether the run's own rate changes what is sent."""
    return any("rate" not in phase.options and not phase.has_rate for phase in phases)


def _number(kind: str, options: Mapping[str, str], key: str, default: float) -> float:
    try:
        value = float(options.get(key, default))
    except ValueError:
        raise UsageError(f"pattern {kind}: {key}={options[key]} is not a number") from None
    if not 0 <= value <= _MOST:
        raise UsageError(f"pattern {kind}: {key}={value:g}, expected a number of at least 0, and {_MOST:g} at most")
    return value


def _whole(kind: str, options: Mapping[str, str], key: str, default: int) -> int:
    value = _number(kind, options, key, default)
    if not value.is_integer():
        raise UsageError(f"pattern {kind}: {key}={options[key]}, expected a whole number")
    return int(value)


def _constant(phase: Phase, rng: np.random.Generator) -> np.ndarray:
    return np.arange(round(phase.rate_rps * phase.duration_s)) / phase.rate_rps


def _poisson(phase: Phase, rng: np.random.Generator) -> np.ndarray:
    return _by_rate(np.array([0.0, phase.duration_s]), np.full(2, phase.rate_rps), rng)


def _burst(phase: Phase, rng: np.random.Generator) -> np.ndarray:
    factor = _number("burst", phase.options, "factor", 5)
    on_s = _number("burst", phase.options, "on", 1)
    off_s = _number("burst", phase.options, "off", 4)
    if factor < 1 or on_s < 1e-3 or off_s < 1e-3:
        raise UsageError("pattern burst: factor must be at least 1, on and off at least 0.001 s")
    if on_s + off_s < (least_s := 2 * phase.duration_s / _MOST_PIECES):
        raise UsageError(
            f"pattern burst: on={on_s:g} and off={off_s:g}, expected {least_s:g} s together at least in {phase.duration_s:g} s"
        )
    quiet_rps = phase.rate_rps * (on_s + off_s) / (factor * on_s + off_s)  # so that the long-run mean is the asked rate
    edges, rates = [0.0], []
    bursting = bool(rng.random() < on_s / (on_s + off_s))
    while edges[-1] < phase.duration_s:
        edges.append(edges[-1] + rng.exponential(on_s if bursting else off_s))
        rates.append(quiet_rps * factor if bursting else quiet_rps)
        bursting = not bursting
    edges[-1] = phase.duration_s
    # Some runs have more of their time in bursts than others; the mean rate is the asked one in each, the factor as well.
    count = round(phase.rate_rps * phase.duration_s)
    return _by_rate(np.repeat(edges, 2)[1:-1], np.repeat(rates, 2), rng, count=count)


def _ramp(phase: Phase, rng: np.random.Generator) -> np.ndarray:
    first = _number("ramp", phase.options, "from", 0)
    last = _number("ramp", phase.options, "to", phase.rate_rps)
    return _by_rate(np.array([0.0, phase.duration_s]), np.array([first, last]), rng)


def _stairs(phase: Phase, rng: np.random.Generator) -> np.ndarray:
    steps = _whole("stairs", phase.options, "steps", 5)
    if not 1 <= steps <= _MOST_PIECES:
        raise UsageError(f"pattern stairs: steps={steps:g}, expected 1 to {_MOST_PIECES:,}")
    last = _number("stairs", phase.options, "to", phase.rate_rps)
    first = _number("stairs", phase.options, "from", last / steps)
    edges = np.linspace(0, phase.duration_s, steps + 1)
    return _by_rate(np.repeat(edges, 2)[1:-1], np.repeat(np.linspace(first, last, steps), 2), rng)


def _diurnal(phase: Phase, rng: np.random.Generator) -> np.ndarray:
    low = _number("diurnal", phase.options, "low", 0.2)
    period_s = _number("diurnal", phase.options, "period", phase.duration_s)
    if low > 1 or period_s <= 0:
        raise UsageError("pattern diurnal: low is a share of the peak (0 to 1), and period must be above 0 s")
    if period_s < (least_s := phase.duration_s * _PIECES_A_PERIOD / _MOST_PIECES):
        raise UsageError(f"pattern diurnal: period={period_s:g}, expected {least_s:g} s at least in {phase.duration_s:g} s")
    peak = 2 * phase.rate_rps / (1 + low)  # the mean over a period is the asked rate
    at = np.linspace(0, phase.duration_s, max(2, int(phase.duration_s / period_s * _PIECES_A_PERIOD)))
    return _by_rate(at, peak * (low + (1 - low) * (1 - np.cos(2 * np.pi * at / period_s)) / 2), rng)


def _by_rate(at_s: np.ndarray, rate_rps: np.ndarray, rng: np.random.Generator, *, count: int | None = None) -> np.ndarray:
    """A Poisson process given its count, whose rate is piecewise linear.

    at_s, rate_rps: (k,); equal neighbours in at_s are jumps. count: None for what the rate amounts to; else the rate's shape
    alone matters.
    """
    steps = np.diff(at_s) * (rate_rps[1:] + rate_rps[:-1]) / 2
    integral = np.concatenate([[0.0], np.cumsum(steps)])
    total = float(integral[-1])
    if total > MAX_REQUESTS:
        raise UsageError(f"pattern: would send {total:,.0f} requests, at most {MAX_REQUESTS:,} are kept: lower the rate")
    unit = np.sort(rng.random(round(total) if count is None else count)) * total
    piece = np.clip(np.searchsorted(integral, unit, side="right") - 1, 0, len(steps) - 1)
    left, width = rate_rps[piece], at_s[piece + 1] - at_s[piece]
    slope = (rate_rps[piece + 1] - left) / np.where(width > 0, width, 1)
    rest = unit - integral[piece]
    # Solve left·x + slope·x²/2 = rest in the form that is stable for slope 0.
    root = left + np.sqrt(np.maximum(left * left + 2 * slope * rest, 0))
    times: np.ndarray = at_s[piece] + 2 * rest / np.where(root > 0, root, 1)
    within: np.ndarray = np.minimum(times, np.nextafter(at_s[-1], 0))  # rounding must not lose the last
    return within


def _trace(phase: Phase, rng: np.random.Generator) -> np.ndarray:
    if "file" not in phase.options:
        raise UsageError("pattern trace: needs file=PATH, a CSV with one arrival per line")
    times = _arrivals(phase)
    if phase.rate_rps == 0:
        return times
    span_s = min(phase.duration_s, float(times[-1])) or phase.duration_s
    natural_rps = np.count_nonzero(times < phase.duration_s) / span_s
    factor = phase.rate_rps / natural_rps
    if factor * len(times) > MAX_REQUESTS:
        raise UsageError(
            f"pattern trace: {factor:g} times the trace's rate is too much, at most {MAX_REQUESTS:,} requests are kept"
        )
    times = times[times < phase.duration_s]
    # floor(factor) copies of all, and one more of so many, drawn by lot, that as many are sent as was asked.
    copies = np.full(len(times), int(factor))
    copies[rng.choice(len(times), round(factor * len(times)) - int(factor) * len(times), replace=False)] += 1
    gaps = np.diff(times, append=min(times[-1] + 1 / natural_rps, phase.duration_s))
    index = np.repeat(np.arange(len(times)), copies)
    first = np.concatenate([[True], index[1:] != index[:-1]]) if len(index) else np.zeros(0, bool)
    return np.sort(times[index] + np.where(first, 0.0, rng.random(len(index)) * gaps[index]))


def _arrivals(phase: Phase) -> np.ndarray:
    return read_trace(phase.options["file"], phase.options.get("column"))


def trace_length_s(pattern: str) -> float | None:
    """How long a trace lasts, the mean gap behind its last arrival included. None: the pattern is not just one, or says it."""
    phase, *others = parse(pattern, rate_rps=1.0, duration_s=1.0)
    if others or phase.kind != "trace" or "duration" in phase.options or "file" not in phase.options:
        return None
    return _length_s(_arrivals(phase))


def traces(pattern: str) -> list[Mapping[str, str]]:
    """What it says of each trace. Raises: UsageError."""
    return [phase.options for phase in parse(pattern, rate_rps=1.0, duration_s=1.0) if phase.kind == "trace"]


def _length_s(times: np.ndarray) -> float:
    return max(_LEAST_S, float(times[-1]) * len(times) / max(1, len(times) - 1))


def left_out(pattern: str, duration_s: float) -> tuple[str, ...]:
    """Of each trace that does not fill its phase, or is longer, what is not sent."""
    found: list[str] = []
    for phase in parse(pattern, rate_rps=1.0, duration_s=duration_s):
        if phase.kind == "trace":
            times = _arrivals(phase)
            late = int(np.count_nonzero(times >= phase.duration_s))
            if late:
                found.append(
                    f"the trace {phase.options['file']} lasts {times[-1]:.6g} s: {late:,} of its {len(times):,} arrivals, "
                    f"those from {phase.duration_s:g} s on, were left out"
                )
            elif phase.duration_s > (length_s := _length_s(times)):
                found.append(
                    f"the trace {phase.options['file']} lasts {length_s:.6g} s: nothing was sent in the "
                    f"{phase.duration_s - length_s:.6g} s behind it, whatever rate was asked"
                )
    return tuple(found)


def read_trace(path: str | Path, column: str | None = None) -> np.ndarray:
    """Read arrival times as seconds from the first: (n,) float64, ascending.

    A CSV with a header that names `column`; None: `timestamp`, or without a header the first column. Times are numbers in
    seconds or ISO 8601. Raises: UsageError, naming the line.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise UsageError(f"trace {path}: cannot be read: {exc}") from exc
    if not rows:
        raise UsageError(f"trace {path}: empty")
    named = "timestamp" if column is None else column
    if column is not None and named not in rows[0]:
        raise UsageError(f"trace {path}: its first line names no column {named!r}: {','.join(rows[0])!r}")
    at, skipped = (rows[0].index(named), 1) if named in rows[0] else (0, 0)
    times = np.empty(len(rows) - skipped)
    for i, row in enumerate(rows[skipped:]):
        try:
            times[i] = _timestamp(row[at])
        except (ValueError, IndexError):
            raise UsageError(
                f"trace {path}, line {i + skipped + 1}: {','.join(row)!r}: expected a time in seconds or ISO 8601 as {named!r}"
            ) from None
    if len(times) == 0:
        raise UsageError(f"trace {path}: no arrivals below the header")
    times.sort()
    times -= times[0]
    return times


def _timestamp(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        time = datetime.fromisoformat(text)
        # Not local time, which leaves out an hour or has it twice.
        value = (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    if not np.isfinite(value):
        raise ValueError(text)
    return value


def _closed_loop(phase: Phase, seed: int) -> Schedule:
    users = _whole("users", phase.options, "count", 1)
    if users < 1:
        raise UsageError(f"pattern users: count must be at least 1, got {users}")
    think_s = _number("users", phase.options, "think", 0)
    if think_s > _MOST_S:
        raise UsageError(f"pattern users: think={think_s:g}, expected {_MOST_S:g} s at most")
    rng = np.random.default_rng([seed, _THINKING])
    think_ns = (rng.exponential(think_s, 65_536) * 1e9).astype(np.int64)
    return Schedule(
        np.empty(0, np.int64),
        int(phase.duration_s * 1e9),
        ((0.0, phase.duration_s, "users"),),
        stationary=True,
        users=users,
        think_ns=think_ns,
    )


PATTERNS: Final[dict[str, Callable[[Phase, np.random.Generator], np.ndarray]]] = {
    "constant": _constant,
    "poisson": _poisson,
    "burst": _burst,
    "ramp": _ramp,
    "stairs": _stairs,
    "diurnal": _diurnal,
    "trace": _trace,
}
_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "constant": (),
    "poisson": (),
    "burst": ("factor", "on", "off"),
    "ramp": ("from", "to"),
    "stairs": ("from", "to", "steps"),
    "diurnal": ("low", "period"),
    "trace": ("file", "column"),
    "users": ("count", "think"),
}
_NEED_RATE: Final = frozenset({"constant", "poisson", "burst", "diurnal"})
