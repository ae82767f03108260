"""Rehearse what each stance would serve, by what was learned of the backend and of the arrivals.

Theory of operation. A `_Trial` is a lane in simulated time: a batcher, its policy in one stance, that serves arrivals like the
last 128, of all lengths. Its batches take what was learned, times the luck that batches had; a request counts by how likely it
is in time. All trials of a rehearsal have the same arrivals and, batch by batch, the same luck. They go on by a few arrivals
at every real one, so none of those waits for long.

What a rehearsal told is remembered by rate, speed and scatter, and counts where these are about the same. There it is done
again after 64 more arrivals, after 256, 1024 and so on, with other draws, and all together decide: another stance than the
planned one must be better by half the error of the mean, and by a hundredth of what comes.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from heapq import heappop, heappush, merge
from itertools import islice, pairwise
from math import sqrt
from operator import itemgetter
from typing import Final

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.inflow import ARRIVALS, Inflow
from gateway.batching.queue import NEVER
from gateway.batching.stances import AT_ONCE, LAST, LATE, PLANNED, Stance
from gateway.errors import GatewayError
from gateway.types import InferRequest

_TIGHT: Final = 6.0  # lone requests that fit into the SLO, at most: with more time, hardly anything depends on the stance
_LOOK: Final = 16  # arrivals, until it is seen whether things are still as they were
_BLOCK: Final = 64  # arrivals whose answers are one figure
_BLOCKS: Final = 16  # of them: so chance decides little
_BEFORE: Final = 128  # arrivals that do not count: the lane begins empty
_IN_A_ROW: Final = 16  # gaps that are drawn together, so that bursts stay bursts
_FOR_ONE: Final = 8  # arrivals of a rehearsal for one real one: some 0.3 ms
_FOR_ONE_OF_LENGTHS: Final = 3  # the same, where lengths are to be told apart
_SEEN: Final = 64  # arrivals to draw from, at least
_BATCHES: Final = 12  # whose luck must be known
_KEPT: Final = 0.7  # of what a memory tells, when it is rehearsed again
_WORTH: Final = 0.01  # of what comes, by which another stance must be better, or chance decides where all is in time
_DOUBT: Final = 0.5  # errors of the mean by which another stance must be better
_MEMORIES: Final = 16
_SELDOM: Final = 1 << 17  # arrivals between rehearsals of one memory, at most
_SCATTERS: Final = 1.15  # spread from which to rely on Q leaves too little time
_RELIABLE: Final = 1.05  # spread up to which T and Q are about the same
_MASK: Final = (1 << 32) - 1


Streams = Mapping[Hashable, Inflow]
"""What comes, by group."""


class _Draws:
    """The same numbers for all that begin alike (the generator of Numerical Recipes)."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed * 2654435761 & _MASK

    def below(self, count: int) -> int:
        self._state = state = (self._state * 1664525 + 1013904223) & _MASK
        return (state >> 8) * count >> 24


class _Luck:
    """What batches take, as shares of what is expected: continuous between those that were seen.

    Else a rule that leaves just as long as one of them took would look better than it is.
    """

    __slots__ = ("_seen",)

    def __init__(self, ratios: Sequence[float]) -> None:
        self._seen = sorted(ratios)

    def drawn(self, draws: _Draws) -> float:
        seen = self._seen
        at, part = divmod(draws.below((len(seen) - 1) * 256), 256)
        return seen[at] + (seen[at + 1] - seen[at]) * part / 256

    def chance(self, ratio: float) -> float:
        """Of one no longer than this."""
        seen = self._seen
        at = bisect_right(seen, ratio)
        if not at or at == len(seen):
            return 1.0 if at else 0.0
        before = seen[at - 1]
        return (at - 1 + (ratio - before) / (seen[at] - before)) / (len(seen) - 1)


class _Trial:
    """One stance's lane. served: rows that are likely in time, by block of the arrivals."""

    __slots__ = ("_at", "_batcher", "_begins_ns", "_draws", "_free", "_luck", "_running", "_slo_ns", "_streams", "_wake_ns",
                 "served")  # fmt: skip

    def __init__(self, batcher: Batcher, streams: Streams, luck: _Luck, begins_ns: Sequence[int], draws: _Draws) -> None:
        """begins_ns: of the blocks that count, in order."""
        assert batcher.slo_ns is not None
        self._batcher = batcher
        self._streams = streams
        self._luck = luck
        self._begins_ns = begins_ns
        self._draws = draws
        self._slo_ns = batcher.slo_ns
        self._free = batcher.workers
        self._running: list[tuple[int, int, Batch, int]] = []
        self._wake_ns = NEVER
        self._at = 0
        self.served = [0.0] * (len(begins_ns) + 1)

    def come(self, now_ns: int, rows: int, group: Hashable) -> None:
        """Let a request arrive, once all before has happened. group: by which it is known for what may share its batch."""
        self.until(now_ns)
        try:
            self._batcher.add(InferRequest("", "", "", {}, rows, now_ns, shape_key=group), now_ns)
        except GatewayError:
            return
        self._step(now_ns)

    def until(self, until_ns: int) -> None:
        """Let time pass."""
        running = self._running
        while True:
            now_ns = min(running[0][0], self._wake_ns) if running else self._wake_ns
            if now_ns >= until_ns:
                return
            while running and running[0][0] <= now_ns:
                _, _, batch, time_ns = heappop(running)
                self._free += 1
                self._batcher.finished(batch, now_ns, time_ns, False)  # which teaches nothing
            self._step(now_ns)

    def _step(self, now_ns: int) -> None:
        self._wake_ns = NEVER
        if not self._free:
            return
        step = self._batcher.step(now_ns, self._free)
        if step.wake_at_ns is not None:
            self._wake_ns = max(step.wake_at_ns, now_ns + 1)
        luck = self._luck
        for batch in step.batches:
            self._free -= 1
            expected_ns = self._streams[batch.group].curve.expected_ns(batch.padded_rows, batch.busy)
            for part in batch.parts:
                came_ns = part.request.arrival_ns
                chance = luck.chance((came_ns + self._slo_ns - now_ns) / expected_ns)
                self.served[bisect_right(self._begins_ns, came_ns)] += chance * part.rows
            self._at += 1
            time_ns = max(1, round(expected_ns * luck.drawn(self._draws)))
            heappush(self._running, (now_ns + time_ns, self._at, batch, time_ns))


class _Memory:
    """How stances did where things were like this.

    gains: by stance, of the blocks: how many, and their sum and squares; each is what was served more than by the planned one,
    as a share of what came. often: rehearsed. wait: arrivals until it is again.
    """

    __slots__ = ("_lengths", "_rate", "_spread", "_time_ns", "_workers", "gains", "often", "stance", "wait")

    def __init__(self, streams: Streams, time_ns: float, workers: int, now_ns: int) -> None:
        """time_ns: of a lone request, in the mean."""
        self._lengths = len(streams) > 1
        self._rate = sum([stream.rate(now_ns) for stream in streams.values()])
        self._time_ns = time_ns
        self._spread = max([stream.curve.spread for stream in streams.values()])
        self._workers = workers
        self.gains: dict[Stance, tuple[float, float, float]] = {}
        self.often = 0
        self.wait = 0
        self.stance: Stance = PLANNED

    def like(self, other: "_Memory") -> bool:
        return (
            self._workers == other._workers
            and self._lengths == other._lengths
            and abs(other._rate - self._rate) < 0.3 * self._rate
            and abs(other._time_ns - self._time_ns) < 0.2 * self._time_ns
            and abs(other._spread - self._spread) < 0.25
        )

    def stances(self) -> list[Stance]:
        """What to rehearse beside the planned one, as good as any for one worker without luck."""
        found: list[Stance] = []
        if self._spread > _RELIABLE or self._lengths:
            found.append(AT_ONCE)
        if self._workers > 1:  # a single one that is idle never waits
            if self._spread < _SCATTERS:
                found.append(LATE)
            if self._spread > _RELIABLE:
                found.append(LAST)
        return found

    def learn(self, gains: dict[Stance, list[float]]) -> None:
        """gains: of the blocks of one rehearsal."""
        self.often += 1
        self.wait = min(_SELDOM, _BLOCK << 2 * (self.often - 1))
        best = _WORTH
        self.stance = PLANNED
        for stance, more in gains.items():
            count, total, squares = [_KEPT * each for each in self.gains.get(stance, (0.0, 0.0, 0.0))]
            count, total, squares = count + len(more), total + sum(more), squares + sum([each**2 for each in more])
            self.gains[stance] = count, total, squares
            mean = total / count
            error = sqrt(max(0.0, squares / count - mean**2) / (count - 1))
            if mean - _DOUBT * error > best:
                best, self.stance = mean - _DOUBT * error, stance


class Rehearsal:
    """See the module. stance: what did best where things were as they are now. until_look: arrivals until `look` is due."""

    def __init__(self) -> None:
        self.stance: Stance = PLANNED
        self.until_look = _SEEN
        self._memories: list[_Memory] = []
        self._of: _Memory | None = None
        self._trials: dict[Stance, _Trial] = {}
        self._arrivals: list[tuple[int, int, Hashable]] = []
        self._for_one = _FOR_ONE
        self._rows: list[int] = []

    def arrived(self) -> None:
        """Go on by some arrivals for a real one."""
        self.until_look -= 1
        if not self._trials:
            return
        for _ in range(self._for_one):
            arrival = self._arrivals.pop()
            for trial in self._trials.values():
                trial.come(*arrival)
            if not self._arrivals:
                self._end()
                return

    def look(self, streams: Streams, workers: int, slo_ns: int, now_ns: int, lane: Callable[[Stance], Batcher]) -> None:
        """Choose the stance, and begin a rehearsal if one is due. lane: a batcher that knows the last arrivals."""
        seen = _LOOK - self.until_look
        self.until_look = _LOOK
        time_ns = _lone_ns(streams, workers, now_ns)
        if slo_ns > _TIGHT * time_ns:
            self.stance = PLANNED
            return
        came = sum([len(stream.arrivals) for stream in streams.values()])
        if came < _SEEN or len(next(iter(streams.values())).curve.ratios) < _BATCHES or self._trials:
            return
        now = _Memory(streams, time_ns, workers, now_ns)
        found = next((memory for memory in self._memories if memory.like(now)), None)
        if found is None:
            found = now
            self._memories = [found, *self._memories[: _MEMORIES - 1]]
        self.stance = found.stance
        found.wait -= seen
        if found.wait <= 0 and found.stances():
            self._begin(found, streams, now_ns, lane)

    def keep(self) -> None:
        """Follow the planned rule, until the next look."""
        self.until_look = _LOOK
        self.stance = PLANNED

    def settle(self) -> None:
        """Break off what is rehearsed: lanes are too much for a recording to begin with."""
        self._trials, self._arrivals = {}, []

    def _begin(self, memory: _Memory, streams: Streams, now_ns: int, lane: Callable[[Stance], Batcher]) -> None:
        gaps = [
            (max(1, at_ns - before_ns), rows, group) for (before_ns, _, _), (at_ns, rows, group) in pairwise(_latest(streams))
        ]
        draws = _Draws(memory.often)
        at_ns = now_ns
        arrivals: list[tuple[int, int, Hashable]] = []
        for _ in range((_BEFORE + _BLOCK * _BLOCKS) // _IN_A_ROW):
            first = draws.below(len(gaps))
            for place in range(first, first + _IN_A_ROW):
                gap_ns, rows, group = gaps[place % len(gaps)]
                at_ns += gap_ns
                arrivals.append((at_ns, rows, group))
        begins_ns = [at_ns for at_ns, _, _ in arrivals[_BEFORE::_BLOCK]]
        self._rows = [sum([each[1] for each in arrivals[at : at + _BLOCK]]) for at in range(_BEFORE, len(arrivals), _BLOCK)]
        self._arrivals = arrivals[::-1]
        self._for_one = _FOR_ONE if len(streams) == 1 else _FOR_ONE_OF_LENGTHS
        self._of = memory
        luck = _Luck(next(iter(streams.values())).curve.ratios)
        self._trials = {
            stance: _Trial(lane(stance), streams, luck, begins_ns, _Draws(memory.often))
            for stance in (PLANNED, *memory.stances())
        }

    def _end(self) -> None:
        served = {}
        for stance, trial in self._trials.items():
            trial.until(NEVER)
            served[stance] = [each / rows for each, rows in zip(trial.served[1:], self._rows, strict=True)]
        planned = served.pop(PLANNED)
        assert self._of is not None
        self._of.learn(
            {stance: [each - ours for each, ours in zip(theirs, planned, strict=True)] for stance, theirs in served.items()}
        )
        self.stance = self._of.stance
        self._trials = {}


def _lone_ns(streams: Streams, workers: int, now_ns: int) -> float:
    """What a request takes alone: the mean of all that come."""
    if len(streams) == 1:
        return next(iter(streams.values())).curve.expected_ns(1, workers)
    rates = [(stream.rate(now_ns), stream.curve.expected_ns(1, workers)) for stream in streams.values()]
    rate = sum([each for each, _ in rates])
    return sum([each * time_ns for each, time_ns in rates]) / rate if rate > 0 else max([time_ns for _, time_ns in rates])


def _latest(streams: Streams) -> list[tuple[int, int, Hashable]]:
    """The last arrivals of all, in order: when, rows and group."""
    backwards = merge(*[_backwards(*each) for each in streams.items()], key=itemgetter(0), reverse=True)
    return list(islice(backwards, ARRIVALS))[::-1]


def _backwards(group: Hashable, stream: Inflow) -> Iterator[tuple[int, int, Hashable]]:
    for at_ns, rows in reversed(stream.arrivals):
        yield at_ns, rows, group
