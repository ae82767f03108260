"""Rehearse what each stance would serve, by what was learned of the backend and of the arrivals.

Theory of operation. A `_Trial` is a lane in simulated time: a batcher, its policy in one stance, that serves arrivals like the
last 128, of all lengths. Its batches take what was learned, times the luck that batches had; a request counts by how likely it
is in time. All trials of a rehearsal have the same arrivals and, batch by batch, the same luck. They go on by a few arrivals
at every real one, so none of those waits for long.

What a rehearsal told is remembered by rate, speed and scatter, and counts where these are about the same. There it is done
again after 64 more arrivals, after 256, 1024 and so on, with other draws, and all together decide: another stance than the
planned one must be better by half the error of the mean, and by a hundredth of what comes. Until then the stance is followed
that was told where things were least unlike. Before any was, one worker begins "at once" where that is rehearsed, if the SLO
leaves no time to collect a batch while another runs, or hardly any where lengths differ.

A rehearsal begins with nothing that waits. The planned one may serve all from there, and hardly half once it has fallen behind,
for as long as the load lasts. So what is answered is counted, and where it is too little, another that serves about as much is
followed.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from heapq import heappop, heappush, merge
from itertools import islice, pairwise
from math import inf, log, sqrt
from operator import itemgetter
from typing import Final

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.inflow import ARRIVALS, Inflow
from gateway.batching.queue import NEVER
from gateway.batching.stances import AT_ONCE, LAST, LATE, PLANNED, Stance
from gateway.errors import GatewayError
from gateway.types import InferRequest

TIGHT: Final = 6.0  # lone requests that fit into the SLO, at most: with more time, hardly anything depends on the stance
_TIGHT_OF_LENGTHS: Final = 12.0  # the same, where lengths differ
_TIGHTEST: Final = 3.0  # the same, where one worker begins at once until a rehearsal has told
_NEVER_LOOK: Final = 1 << 62
_LOOK: Final = 16  # arrivals, until it is seen whether things are still as they were
_BLOCK: Final = 64  # arrivals whose answers are one figure
_BLOCKS: Final = 16  # of them: so chance decides little
_BLOCK_AT_MOST: Final = 512  # of lengths a block is what comes in half an SLO, if that is more
_BEFORE: Final = 128  # arrivals that do not count: the lane begins empty
_IN_A_ROW: Final = 16  # gaps that are drawn together, so that bursts stay bursts
_FOR_ONE: Final = 8  # arrivals of a rehearsal for one real one: some 0.3 ms
_FOR_ONE_OF_LENGTHS: Final = 6  # the same, times the stances that are rehearsed, where lengths are to be told apart
_SEEN: Final = 64  # arrivals to draw from, at least
_BATCHES: Final = 12  # whose luck must be known
_KEPT: Final = 0.7  # of what a memory tells, when it is rehearsed again
_WORTH: Final = 0.01  # of what comes, by which another stance must be better, or chance decides where all is in time
_DOUBT: Final = 0.5  # errors of the mean by which another stance must be better
_ENOUGH: Final = 4  # blocks, from which on a rehearsal ends where the best is plain
_PLAIN: Final = 3.0  # errors of the mean by which it must be better then
_CHECKED: Final = 256  # arrivals, after which it is seen how many of them were answered
_ANSWERED: Final = 0.75  # of them: with fewer the planned rule has fallen behind, where it would serve
_NEARLY_ALL: Final = 0.95  # of what comes, in a rehearsal
_LITTLE: Final = 0.05  # of what comes, that another stance may serve less to be followed until that is made up for
_LEAST_RATE: Final = 1e-12  # per nanosecond
_MEMORIES: Final = 16
_SELDOM: Final = 1 << 17  # arrivals between rehearsals of one memory, at most
_SCATTERS: Final = 1.15  # spread from which to rely on Q leaves too little time
_RELIABLE: Final = 1.05  # spread up to which T and Q are about the same
_MASK: Final = (1 << 32) - 1


Streams = Mapping[Hashable, Inflow]
"""What comes, by group."""
_Arrival = tuple[int, int, Hashable]  # when, or how long after another; rows; group


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
        """begins_ns: of the blocks that count, in order; those that begin later are added to it."""
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
        self.served = [0.0] * (_BLOCKS + 1)

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
    as a share of what came. often: rehearsed. wait: arrivals until it is again. spare: to follow while the planned
    one, which does best, is behind.
    """

    __slots__ = ("_rate", "_spread", "_time_ns", "gains", "lengths", "often", "spare", "stance", "wait", "workers")

    def __init__(self, streams: Streams, time_ns: float, workers: int, now_ns: int) -> None:
        """time_ns: of a lone request, in the mean."""
        self.lengths = len(streams) > 1
        self._rate = max(_LEAST_RATE, sum([stream.rate(now_ns) for stream in streams.values()]))
        self._time_ns = time_ns
        self._spread = max([stream.curve.spread for stream in streams.values()])
        self.workers = workers
        self.gains: dict[Stance, tuple[float, float, float]] = {}
        self.often = 0
        self.wait = 0
        self.stance: Stance = PLANNED
        self.spare: Stance | None = None

    def like(self, other: "_Memory") -> bool:
        return (
            self.workers == other.workers
            and self.lengths == other.lengths
            and abs(other._rate - self._rate) < 0.3 * self._rate
            and abs(other._time_ns - self._time_ns) < 0.2 * self._time_ns
            and abs(other._spread - self._spread) < 0.25
        )

    def unlike(self, other: "_Memory") -> float:
        """How far from it, in work that comes; infinity: nothing of one is told by the other."""
        if self.workers != other.workers or self.lengths != other.lengths:
            return inf
        return abs(log(self._rate * self._time_ns / (other._rate * other._time_ns)))

    def stances(self) -> list[Stance]:
        """What to rehearse beside the planned one, as good as any for one worker without luck."""
        found: list[Stance] = []
        if self._spread > _RELIABLE or self.lengths:
            found.append(AT_ONCE)
        if self.workers > 1:  # a single one that is idle never waits
            if self._spread < _SCATTERS:
                found.append(LATE)
            if self._spread > (_SCATTERS if self.lengths else _RELIABLE):
                found.append(LAST)
        return found

    def learn(self, gains: dict[Stance, list[float]], served: float) -> None:
        """gains: of the blocks of one rehearsal. served: of what came, by the planned one."""
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
        self.spare = None
        if self.stance == PLANNED and served > _NEARLY_ALL:
            spare = max(gains, key=lambda stance: sum(gains[stance]))
            if sum(gains[spare]) > -_LITTLE * len(gains[spare]):
                self.spare = spare


class _Arrivals:
    """Like those that came, in runs of gaps, so that bursts stay bursts; without end."""

    __slots__ = ("_at_ns", "_draws", "_gaps", "_run")

    def __init__(self, latest: Sequence[_Arrival], now_ns: int, draws: _Draws) -> None:
        """latest: in order."""
        self._gaps = [(max(1, at_ns - before_ns), rows, group) for (before_ns, _, _), (at_ns, rows, group) in pairwise(latest)]
        self._run: list[_Arrival] = []
        self._at_ns = now_ns
        self._draws = draws

    def drawn(self) -> _Arrival:
        """The next."""
        gaps = self._gaps
        if not self._run:
            first = self._draws.below(len(gaps))
            self._run = [gaps[place % len(gaps)] for place in range(first + _IN_A_ROW - 1, first - 1, -1)]
        gap_ns, rows, group = self._run.pop()
        self._at_ns += gap_ns
        return self._at_ns, rows, group


class _Comparison:
    """One rehearsal under way: a trial of each stance, with the same arrivals."""

    __slots__ = ("_arrivals", "_before", "_begins_ns", "_block", "_came", "_early", "_rows", "_trials")

    def __init__(self, lanes: Mapping[Stance, Batcher], streams: Streams, seed: int, now_ns: int) -> None:
        several = len(streams) > 1
        slo_ns = next(iter(lanes.values())).slo_ns
        assert slo_ns is not None
        latest = _latest(streams)
        self._block, self._before = _BLOCK, _BEFORE
        if several:
            rate = len(latest) / max(1, latest[-1][0] - latest[0][0])
            self._block = max(_BLOCK, min(_BLOCK_AT_MOST, round(rate * slo_ns / 2)))
            self._before = 2 * self._block
        self._early = several
        self._arrivals = _Arrivals(latest, now_ns, _Draws(seed))
        self._begins_ns: list[int] = []
        self._rows: list[int] = []
        self._came = 0
        luck = _Luck(next(iter(streams.values())).curve.ratios)
        self._trials = {stance: _Trial(lane, streams, luck, self._begins_ns, _Draws(seed)) for stance, lane in lanes.items()}

    def go_on(self) -> tuple[dict[Stance, list[float]], float] | None:
        """Let some more arrive. What is learned by it, once it ends: what `_Memory.learn` takes."""
        block, rows = self._block, self._rows
        for _ in range(_FOR_ONE_OF_LENGTHS // len(self._trials) if self._early else _FOR_ONE):
            arrival = self._arrivals.drawn()
            into = self._came - self._before
            if into >= 0:
                if not into % block:
                    self._begins_ns.append(arrival[0])
                    rows.append(0)
                rows[-1] += arrival[1]
            self._came += 1
            for trial in self._trials.values():
                trial.come(*arrival)
            if into == block * _BLOCKS - 1:
                for trial in self._trials.values():
                    trial.until(NEVER)
                return self._told(_BLOCKS)
            if self._early and into >= block * (_ENOUGH + 1) and not into % block:
                gains, served = self._told(into // block - 1)  # of the last block something may still wait
                if any(_plain(each) for each in gains.values()):
                    return gains, served
        return None

    def _told(self, blocks: int) -> tuple[dict[Stance, list[float]], float]:
        served = {
            stance: [each / rows for each, rows in zip(trial.served[1 : blocks + 1], self._rows, strict=False)]
            for stance, trial in self._trials.items()
        }
        planned = served.pop(PLANNED)
        gains = {stance: [each - ours for each, ours in zip(theirs, planned, strict=True)] for stance, theirs in served.items()}
        return gains, sum(planned) / blocks


class Rehearsal:
    """See the module.

    stance: what did best where things were as they are now. until_look: arrivals until `look` is due; who asks counts them.
    under_way: to `go_on` with at each; None: nothing is rehearsed. spare: to be followed if too little is answered, of which
    who asks counts the requests: answered.
    """

    __slots__ = ("_behind", "_came", "_memories", "_of", "answered", "spare", "stance", "under_way", "until_look")

    def __init__(self, stance: Stance | None = None) -> None:
        """stance: always this one."""
        self.stance: Stance = stance or PLANNED
        self.until_look = _NEVER_LOOK if stance else _LOOK
        self._memories: list[_Memory] = []
        self._of: _Memory | None = None
        self.spare: Stance | None = None
        self.answered = self._came = 0
        self._behind = False
        self.under_way: _Comparison | None = None

    def go_on(self) -> None:
        """Let some more arrive in what is rehearsed, for a real arrival."""
        assert self.under_way is not None
        told = self.under_way.go_on()
        if told is not None:
            assert self._of is not None
            self._of.learn(*told)
            self.stance = self._of.stance
            self.under_way = None

    def look(self, streams: Streams, workers: int, slo_ns: int, now_ns: int, lane: Callable[[Stance], Batcher]) -> None:
        """Choose the stance, and begin a rehearsal if one is due. lane: a batcher that knows the last arrivals."""
        seen = _LOOK - self.until_look
        self.until_look = _LOOK
        time_ns = _lone_ns(streams, workers, now_ns)
        if slo_ns > (_TIGHT_OF_LENGTHS if len(streams) > 1 else TIGHT) * time_ns:
            self.keep()
            return
        if self.under_way is not None:
            assert self._of is not None
            self._doubt(self._of, seen)
            return
        now = _Memory(streams, time_ns, workers, now_ns)
        came = sum([len(stream.arrivals) for stream in streams.values()])
        if came < _SEEN or len(next(iter(streams.values())).curve.ratios) < _BATCHES:
            self.stance = self._nearest(now, slo_ns)
            return
        found = next((memory for memory in self._memories if memory.like(now)), None)
        if found is None:
            found = now
            found.stance = self._nearest(now, slo_ns)
            self._memories = [found, *self._memories[: _MEMORIES - 1]]
        self.stance = found.stance
        self._doubt(found, seen)
        found.wait -= seen
        if found.wait <= 0 and (stances := found.stances()):
            lanes = {stance: lane(stance) for stance in (PLANNED, *stances)}
            self._of, self.under_way = found, _Comparison(lanes, streams, found.often, now_ns)

    def _doubt(self, memory: _Memory, seen: int) -> None:
        """Leave the planned rule for a while where it serves less than it would, had it not fallen behind. seen: arrivals."""
        self.spare = memory.spare
        if self.spare is None:
            self._came = self.answered = 0
            self._behind = False
            return
        self._came += seen
        if self._came >= _CHECKED:
            self._behind = self.answered < _ANSWERED * self._came
            self._came = self.answered = 0
        self.stance = self.spare if self._behind else PLANNED

    def keep(self) -> None:
        """Follow the planned rule, until the next look."""
        self.until_look = _LOOK
        self.stance, self.spare = PLANNED, None

    def settle(self) -> None:
        """Break off what is rehearsed: lanes are too much for a recording to begin with."""
        self.under_way = None

    def _nearest(self, now: _Memory, slo_ns: int) -> Stance:
        """What to do until it is rehearsed."""
        told = [memory for memory in self._memories if memory.often and memory.unlike(now) < inf]
        if told:
            return min(told, key=now.unlike).stance
        at_once = (
            now.workers == 1 and AT_ONCE in now.stances() and slo_ns <= (TIGHT if now.lengths else _TIGHTEST) * now._time_ns
        )
        return AT_ONCE if at_once else PLANNED


def _plain(gains: Sequence[float]) -> bool:
    """Whether these are of a stance that is better beyond doubt."""
    count = len(gains)
    mean = sum(gains) / count
    error = sqrt(sum([(each - mean) ** 2 for each in gains]) / (count * (count - 1)))
    return mean - _PLAIN * error > _WORTH


def _lone_ns(streams: Streams, workers: int, now_ns: int) -> float:
    """What a request takes alone: the mean of all that come."""
    if len(streams) == 1:
        return next(iter(streams.values())).curve.expected_ns(1, workers)
    rates = [(stream.rate(now_ns), stream.curve.expected_ns(1, workers)) for stream in streams.values()]
    rate = sum([each for each, _ in rates])
    return sum([each * time_ns for each, time_ns in rates]) / rate if rate > 0 else max([time_ns for _, time_ns in rates])


def _latest(streams: Streams) -> list[_Arrival]:
    """The last arrivals of all, in order: when, rows and group."""
    backwards = merge(*[_backwards(*each) for each in streams.items()], key=itemgetter(0), reverse=True)
    return list(islice(backwards, ARRIVALS))[::-1]


def _backwards(group: Hashable, stream: Inflow) -> Iterator[_Arrival]:
    behind = stream.came_rows
    for at_ns, before in reversed(stream.arrivals):
        yield at_ns, behind - before, group
        behind = before
