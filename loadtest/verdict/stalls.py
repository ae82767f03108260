"""Whose stall was it? From the hiccup meter's recording and the log of a run to what other work did to it. No I/O.

A stall is the machine's only as far as the CPU time of others (not the candidate, the generator, the meter), or steal,
explains it. In each period of the recording others have *taken* from somebody the least of

    what they, and steal, used on his cores,
    what his threads were ready to run and had to wait (of steal, which no thread sees: what the hiccup meter was late), and
    what his own CPU time left free on those cores.

So nothing excuses a server that starves everybody, itself and the meter included: nobody else used the time. Nor one that
sleeps or waits for a lock: it did not wait for a core. What stays below 5 % of a period is how the machine is, no stall.

What was taken delays whoever is served until the candidate has caught up. That *debt* is a queue of its own (Lindley). It grows
by what is taken. It shrinks by the time that the candidate leaves idle, of as many cores as it ever keeps busy. It is paid when
no more requests wait than in the best tenth of the run.

In a work-conserving queue a request is late by no more than the debt while it waits. So its latency less that debt is the best
that it could have had on a machine without others. A request that missed the SLO, but would have met it so, is *marked*.
Requests are marked, not blocks: a neighbour that works for 20 ms each second is in every block, and touches few requests.

The verdict is given on all requests and on those that are not marked. If they differ, or if more than 5 % are marked, the run
says more about the machine than about the candidate.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from loadtest.results import Stall

MOST_MARKED: Final = 0.05
SMALL_SHARE: Final = 0.01  # of the tightest limit: a delay below it is let pass, as is a send lag
_STEADY: Final = 0.05  # of a period
FAILED_SHARE: Final = 0.1  # of the tightest limit: a smaller debt explains no failure
_TICK_NS: Final = 10_000_000  # USER_HZ is 100 on every Linux
_STEAL_PERIODS: Final = 5  # steal is told late and in whole ticks: a hiccup may lie so far from it, before or after
_BUSIEST: Final = 99  # percentile of the candidate's CPU use: how many cores it keeps busy
_BESIDE: Final = 0.25  # of a core: what threads do beside those that carry the load is no core more
_BEST_TENTH: Final = 10  # percentile of the requests that wait
_SHORTEST_STALL_NS: Final = 5_000_000
_STALL_FACTOR: Final = 3  # times the usual time between answers
_STALLS: Final = 50


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are watched. cores: numbers. cpu, wait, others, steal: (n,) ns per period.

    wait: of its threads, ready to run; -1: unknown to this kernel. others: CPU time of others on those cores.
    """

    cores: tuple[int, ...]
    cpu: np.ndarray
    wait: np.ndarray
    others: np.ndarray
    steal: np.ndarray


@dataclass(frozen=True, slots=True)
class Recording:
    """What the meter saw, in n periods between n + 1 moments (ns; `since` sets the origin).

    late: (k, 3): core, when it was asked for, when it came. meter: (n,) ns. names: (name, ns) of all others.
    """

    moments: np.ndarray
    candidate: Side
    generator: Side
    meter: np.ndarray
    late: np.ndarray
    names: tuple[tuple[str, int], ...]

    @property
    def periods(self) -> np.ndarray:
        return np.diff(self.moments)

    def since(self, origin_ns: int) -> "Recording":
        """The same with times from another origin."""
        return replace(self, moments=self.moments - origin_ns, late=self.late - np.array([0, origin_ns, origin_ns]))


def others_share(recording: Recording) -> float:
    """Of the candidate's cores, over the whole recording: what other processes and other virtual machines used."""
    side = recording.candidate
    possible_ns = float(recording.periods.sum()) * len(side.cores)
    return float((side.others + side.steal).sum()) / possible_ns if possible_ns else 0.0


class RecordingReader:
    """Reads a recording (`loadtest.measuring.hiccups`) while it grows."""

    def __init__(self, candidate_cores: Sequence[int], generator_cores: Sequence[int]) -> None:
        self._cores = tuple(candidate_cores), tuple(generator_cores)
        self._samples: list[tuple[int, ...]] = []
        self._steal: list[tuple[int, int, int]] = []
        self._late: list[tuple[int, ...]] = []
        self._named: dict[int, str] = {}
        self._used: Counter[int] = Counter()

    def feed(self, lines: Iterable[str]) -> None:
        """Take in the next lines."""
        for line in lines:
            kind, *words = line.split()
            if kind == "N":
                self._named[int(words[0])] = " ".join(words[1:])
            elif kind == "H":
                self._late.append(tuple(map(int, words)))
            elif kind == "T":
                ticks = [(int(core), int(count)) for core, _, count in (word.partition(":") for word in words[1:])]
                one, other = (sum(count for core, count in ticks if core in its) * _TICK_NS for its in self._cores)
                self._steal.append((int(words[0]), one, other))
            elif kind == "S":
                # The first only says from when on the others count.
                self._samples.append((*map(int, words[:8]), *self._others(words[8:] if self._samples else [])))

    def _others(self, words: Sequence[str]) -> tuple[int, int]:
        """CPU time of others on the cores of either side."""
        sums = [0, 0]
        for word in words:
            pid, spent, core = (int(part) for part in word.split(":"))
            there = [core in its or (core < 0 and bool(its)) for its in self._cores]
            self._used[pid] += spent
            for side in (0, 1):
                sums[side] += spent * there[side]
        return sums[0], sums[1]

    def recording(self) -> Recording:
        """What has been read so far."""
        columns = np.array(self._samples, np.int64).reshape(-1, 10)
        moments, columns = columns[:, 0], columns[1:].T
        periods = np.diff(moments)
        stolen = np.zeros((2, len(periods)), np.int64)
        for when, *both in self._steal if len(periods) else ():
            stolen[:, min(int(np.searchsorted(moments[1:], when)), len(periods) - 1)] += both
        names: Counter[str] = Counter()
        for pid, spent in self._used.items():
            names[self._named.get(pid, str(pid))] += spent
        return Recording(
            moments,
            Side(self._cores[0], columns[1], _when(columns[2], columns[3], periods), columns[8], stolen[0]),
            Side(self._cores[1], columns[4], _when(columns[5], columns[6], periods), columns[9], stolen[1]),
            columns[7],
            np.array(self._late, np.int64).reshape(-1, 3),
            tuple(names.most_common()),
        )


def _when(waits: np.ndarray, longest: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Waits by the period in which they were: (n,) ns. The kernel tells one only when it is over."""
    found = waits.copy()
    for number in np.flatnonzero(longest > periods):
        earlier = longest[number] - periods[number]
        found[number] -= earlier
        which = int(number) - 1
        while earlier > 0 and which >= 0:
            part = min(earlier, periods[which])
            found[which] += part
            earlier -= part
            which -= 1
    return found


def taken(recording: Recording, side: Side) -> np.ndarray:
    """What others took from one side in each period: (n,) ns."""
    periods = recording.periods
    if not side.cores:
        return np.zeros(len(periods))
    late = _lateness(recording, side.cores)
    waited = np.where(side.wait < 0, late, side.wait)
    by_others = np.minimum(side.others, waited)
    by_steal = _shared_out(side.steal, np.maximum(late - by_others, 0))
    room = np.maximum(len(side.cores) * periods - side.cpu, 0)
    found: np.ndarray = np.minimum(np.minimum(by_others + by_steal, room), periods)
    found[found < _STEADY * periods] = 0.0
    return found


def _shared_out(steal: np.ndarray, late: np.ndarray) -> np.ndarray:
    """Steal of each period, told late and in whole ticks, to the delays around it: (n,) ns."""
    found = np.zeros(len(late))
    for number in np.flatnonzero(steal).tolist():
        left = float(steal[number])
        near = range(max(0, number - _STEAL_PERIODS), min(len(late), number + _STEAL_PERIODS + 1))
        for which in sorted(near, key=lambda other, number=number: abs(other - number)):  # type: ignore[misc]  # mypy cannot infer it
            part = min(left, late[which] - found[which])
            found[which] += part
            left -= part
    return found


def _lateness(recording: Recording, cores: Sequence[int]) -> np.ndarray:
    """For how long in each period the meter was kept waiting for those cores: (n,) ns."""
    late = recording.late[np.isin(recording.late[:, 0], cores)]
    starts, ends = np.sort(late[:, 1]), np.sort(late[:, 2])
    # How much of all those waits lies before each moment.
    moments = recording.moments.astype(np.float64)
    before: np.ndarray = _area(moments, starts) - _area(moments, ends)
    return np.diff(before)


def _area(moments: np.ndarray, points: np.ndarray) -> np.ndarray:
    """For each moment the sum of the distances to all points before it."""
    count = np.searchsorted(points, moments)
    sums = np.concatenate([[0.0], np.cumsum(points, dtype=np.float64)])
    found: np.ndarray = count * moments - sums[count]
    return found


@dataclass(frozen=True, slots=True)
class Delays:
    """What others did to a run. taken: (n,) ns per period, of each side. debt: (n,) ns, the most in each period."""

    recording: Recording
    candidate_taken: np.ndarray
    generator_taken: np.ndarray
    candidate_debt: np.ndarray
    generator_debt: np.ndarray

    @classmethod
    def of(cls, recording: Recording, intended: np.ndarray, done: np.ndarray) -> "Delays":
        """intended, done: (m,) ns of all requests, from the recording's origin; the first ascending."""
        candidate = taken(recording, recording.candidate)
        generator = taken(recording, recording.generator)
        shared = set(recording.candidate.cores) & set(recording.generator.cores)
        if shared:  # what was taken from one was not taken from the other
            others = np.maximum(recording.candidate.others, recording.generator.others)
            generator = np.minimum(generator, np.maximum(others - candidate, 0))
        best = _caught_up(recording.moments, intended, done)
        return cls(
            recording,
            candidate,
            generator,
            _debt(recording, recording.candidate, candidate, best),
            _debt(recording, recording.generator, generator, best),
        )

    def excuse(self, intended: np.ndarray, done: np.ndarray) -> np.ndarray:
        """How much earlier each request would at best have been done without others: (m,) ns."""
        ends = self._most(self.candidate_debt, intended, done) + self._most(self.generator_debt, intended, done)
        found: np.ndarray = np.minimum(ends, np.maximum(done - intended, 0))
        return found

    def lag_excuse(self, intended: np.ndarray, dispatched: np.ndarray) -> np.ndarray:
        """The same of its sending: (m,) ns."""
        lag = np.maximum(dispatched - intended, 0)
        found: np.ndarray = np.minimum(self._most(self.generator_debt, intended, dispatched), lag)
        return found

    def _most(self, values: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """The largest of (n,) values per period over each stretch: (m,)."""
        if not len(values) or not len(start):
            return np.zeros(len(start))
        first, last = self._overlapped(start, end)
        pairs = np.column_stack([first, last + 1]).ravel()
        found: np.ndarray = np.maximum.reduceat(np.append(values, 0.0), pairs)[::2]
        moments = self.recording.moments
        found[(end <= moments[0]) | (start >= moments[-1])] = 0.0
        return found

    def _overlapped(self, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last period that each stretch has a part of."""
        moments, most = self.recording.moments, len(self.recording.moments) - 2
        first = np.clip(np.searchsorted(moments, start, side="right") - 1, 0, most)
        last = np.clip(np.searchsorted(moments, end, side="left") - 1, first, most)
        return first, last

    def within(self, values: np.ndarray, start_ns: float, end_ns: float) -> float:
        """The sum of values per period over the periods that have a part in a stretch."""
        if not len(values):
            return 0.0
        first, last = self._overlapped(np.array([start_ns]), np.array([end_ns]))
        return float(values[first[0] : last[0] + 1].sum())


def _debt(recording: Recording, side: Side, stolen: np.ndarray, caught_up: np.ndarray) -> np.ndarray:
    """The most that the side was behind in each period because of others: (n,) ns."""
    periods = recording.periods
    found = np.zeros(len(periods))
    if not np.any(stolen):
        return found
    used = side.cpu / np.maximum(periods, 1)
    busy_cores = min(max(1.0, np.ceil(float(np.percentile(used, _BUSIEST)) - _BESIDE)), len(side.cores))
    idle = np.maximum(busy_cores * periods - side.cpu - stolen, 0)
    debt = 0.0
    for number in range(int(np.flatnonzero(stolen)[0]), len(periods)):
        found[number] = debt + stolen[number]
        # Within a period nobody knows the order: idle first, and then taken, leaves the most.
        debt = (0.0 if caught_up[number] else max(0.0, debt - idle[number])) + stolen[number]
    return found


def _caught_up(moments: np.ndarray, intended: np.ndarray, done: np.ndarray) -> np.ndarray:
    """In which periods as few requests waited, at some moment, as in the best tenth of them: (n,) bool."""
    if len(moments) < 2:
        return np.zeros(0, bool)
    times = np.concatenate([intended, done])
    order = np.argsort(times, kind="stable")
    steps = np.concatenate([np.ones(len(intended), np.int64), np.full(len(done), -1)])[order]
    waiting = np.concatenate([[0], np.cumsum(steps)])
    edges = np.searchsorted(times[order], moments)
    within = np.column_stack([edges[:-1], edges[1:] + 1]).ravel()  # from how many wait when it begins to when it ends
    fewest = np.minimum.reduceat(np.append(waiting, len(times)), within)[::2]
    found: np.ndarray = fewest <= np.percentile(fewest, _BEST_TENTH)
    return found


def stalls(delays: Delays | None, intended: np.ndarray, dispatched: np.ndarray, done: np.ndarray) -> tuple[Stall, ...]:
    """Stretches in which somebody waited and nobody was answered, far longer than usual: the longest, in order of time.

    intended, dispatched, done: (m,) ns. delays: None if nothing was recorded: then nothing is the machine's.
    """
    if len(done) < 2:
        return ()
    order = np.argsort(done, kind="stable")
    answered = done[order]
    oldest = np.minimum.accumulate(intended[order][::-1])[::-1]  # of those that are not answered before
    start = np.maximum(oldest, np.concatenate([[oldest[0]], answered[:-1]]))
    gaps = answered - start
    waited = gaps[gaps > 0]
    if not len(waited):
        return ()
    limit = max(_SHORTEST_STALL_NS, _STALL_FACTOR * float(np.median(waited)))
    long = np.flatnonzero(gaps > limit)
    long = np.sort(long[np.argsort(-gaps[long], kind="stable")[:_STALLS]])
    return tuple(_attribute(delays, int(start[n]), int(answered[n]), intended, dispatched) for n in long)


def _attribute(delays: Delays | None, start_ns: int, end_ns: int, intended: np.ndarray, dispatched: np.ndarray) -> Stall:
    length = end_ns - start_ns
    alive = (intended < end_ns) & (dispatched > start_ns)
    unsent = np.minimum(dispatched[alive], end_ns) - np.maximum(intended[alive], start_ns)
    lag = float(max(unsent.max(initial=0), 0))
    machine = waited = 0.0
    if delays is not None:
        by_generator = delays.within(delays.generator_taken, start_ns, end_ns)
        machine = delays.within(delays.candidate_taken, start_ns, end_ns) + by_generator
        # What the generator waited for a core is not its own doing: the machine's, or the server's on the same core.
        waited = max(by_generator, delays.within(np.maximum(delays.recording.generator.wait, 0), start_ns, end_ns))
    # While the generator does not look, nobody is answered, whatever happens to the server meanwhile.
    generator = min(max(0.0, lag - waited), length)
    machine = min(machine, length - generator)
    parts = {"machine": machine, "generator": generator, "server": length - machine - generator}
    return Stall(
        start_s=start_ns / 1e9,
        duration_ms=length / 1e6,
        machine_ms=machine / 1e6,
        generator_ms=generator / 1e6,
        whose=max(parts, key=lambda name: parts[name]),  # type: ignore[arg-type]  # the keys are its values
    )


def longest_hiccup_ms(recording: Recording, cores: Sequence[int], start_ns: int, end_ns: int) -> float:
    """The longest that the meter waited for one of those cores within a stretch."""
    core, due, woke = recording.late.T
    inside = np.isin(core, cores) & (due < end_ns) & (woke > start_ns)
    return float((woke - due)[inside].max(initial=0)) / 1e6
