"""The policy that needs no setting but the SLO: `adaptive`.

Theory of operation (docs/batching.md; figures: docs/batching-figures.md). T(n) is the expected and Q(n) the pessimistic service
time of n rows, D the SLO, λ the arrival rate, k the workers, d_1 the deadline of the first in the queue. Q(1) is .85 D at most,
and all Q(n) by so much less, but no less than T.

    n_s   smallest n with 0.9·k·n/T(n) >= λ                                   sustains the rate
          with k > 1 and D < 5.4·T(1), D/(6·T(1)) in place of 0.9, no less than 0.7, or than .35 + 2.5·(Q/T - 1) if that is less
    n_c   max(largest n with Q(n) <= .55 D, min(n_s, largest with Q(n) <= .85 D))   cap: two batches fit in one SLO
          all that waits, if only so all is in time, and fewer than one will come that is late for it; not under overload
    n_o   of the n that can be collected fresh, the one with most rows in time  overload: see `overload`, which also sets Q
          and while λ is not above what the workers can do, the smallest that is 95 % as productive as the largest
    n_e   largest n with Q(n) <= d_1 - now                                    what the first can still wait for

Whenever a worker is idle and something waits:

 1. Shed every first that cannot be in time even alone, with the luck that the load leaves room for; of a request that has
    begun, by T at most, unless that would be at the expense of others. Who may be in time, but not by Q, goes along and bounds
    no batch.
 2. Take min(n_e, n_c, what waits).
 3. If the first in line forces a batch smaller than n_o although more waits, look ahead: walk the rest in batches of n_c over
    the workers' predicted free times. If a first would be late there, or the overload lasts, shed from the front until a batch
    of n_o fits: one decision instead of a dozen small batches.
 4. With several workers, hold what is less than n_s: spending a worker's fixed cost a on less does not sustain the rate. But
    never more than the arrivals of a itself are waited for: 1 + λ·a (pace); up to the end of that step, if it is gathered
    and run in .85 D. Lengths that keep more workers busy than there are,
    each with batches of its own, and fewer together are gathered together. And if this is the only idle worker, hold while
    waiting for the next arrival costs less than leaving it to the next worker that frees (rule H).
 5. Compiled sizes: rather run the next smaller size full than the larger one padded, if that serves more rows per second.
    Steps that are known: no row beyond one, if those up to it take a tenth less each. So, with an SLO, where times that were
    learned only look like it, if it is a tenth and the spread.
 6. With an SLO, and if no other worker is idle, room that is left is filled with requests of other lengths, padded to the
    longest, where that takes less worker time than batches of their own, and where more is gained by it than lost (`joining`).
 7. Without an SLO, of the batches with the first in line, of its length and of others, the one that is worth most for its time:
    so nobody is overtaken by much. See `joining.in_turn`.

What shares no batch goes one by one as it stands in line: only the first of these steps is for it, and n_o is one request.

Where D is tight, other rules are rehearsed, and in place of these steps the one is followed that serves most (`rehearsal`).

Lengths that share batches at little cost are decided on as one queue (`line`), whose cap is the largest n with
Q(n) <= D·k/(k + 1) if that is more.

Under overload `Decision.outlook` tells which of those that come next are to be refused at once. What begins while all workers
are busy is told of before one is free.

If even a fresh request would be late by what was learned, one request at a time still runs: or the policy would never learn
that the backend has become faster again. So it does where nothing has run for a second, as all who ask may want less than the
SLO. Where others need the worker, both must hold, and all such tries together take a tenth of one worker. Of a request larger
than a batch one batch is tried, and the rest decided on by what that took.

Without an SLO nothing is shed, and the cap is the batch that minimises the mean latency of what waits, but no less than one
turn of all workers would clear, nor than n_s, for which 95 % of the most productive size will do.
"""

from bisect import bisect_left
from collections.abc import Collection, Hashable
from math import inf, sqrt
from typing import Final

from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.choosing import decide_among
from gateway.batching.forecast import CAP
from gateway.batching.holding import gather, hold, pace
from gateway.batching.inflow import CAP_AT_MOST, NOT_HELD, UTILISATION, Held, Inflow, Inflows, View
from gateway.batching.joining import filled, in_turn
from gateway.batching.line import Line, dealt
from gateway.batching.overload import OVERLOADED, STALE_NS, Plan, collected, feasible, missing_ns, outlook, plan, usual_at
from gateway.batching.policy import Decision, Fill
from gateway.batching.queue import NEVER, BatchLimits, Entry, LengthGroup, Outlook, Queue, State
from gateway.batching.rehearsal import TIGHT, Rehearsal, Streams
from gateway.batching.service_model import ServiceModel
from gateway.batching.shedding import shed_front, shed_hopeless, shed_late, stepped, sure
from gateway.batching.stances import PLANNED, Stance, decide_in

_PRODUCTIVE: Final = 0.95
_FRESH: Final = 0.85  # of the SLO: what Q(1) takes at most, or nobody would be in time but who has just come
_MANY: Final = 16  # rows more that wait, until it is looked for overload again before a worker is free
_BETWEEN_TRIES: Final = 9  # times what the last took, while others need the worker


def _others_refused(queue: Queue, state: State) -> bool:
    """Whether requests of other queues are refused on arrival: so others need the workers, although they do not wait."""
    return any(other.outlook is not None for other in state.queues.values() if other is not queue)


class Adaptive:
    """See the module.

    Latency bound: what is executed is predicted to end before its deadline, at nine in ten unless there is overload, hardly
    any load or a stance that does better; what cannot be is answered with Overloaded on arrival or as soon as a worker asks
    for work, and with DeadlineExceeded at its deadline. Without an SLO: as `Greedy`, in batches that serve the queue soonest.
    """

    by_length = True

    def __init__(self, stance: Stance | None = None) -> None:
        """stance: always this one; None: the one that by rehearsal does best."""
        self._rehearsal = Rehearsal(stance)
        self._limits = BatchLimits(1)
        self._slo_ns: int | None = None
        self._try_ns = 0  # not before: the next request that seems hopeless, where others need the worker
        self.service = ServiceModel(1)
        self._streams = Inflows(self.service)
        self._line = Line(self.service.latest)

    @property
    def stance(self) -> Stance:
        """The one that is followed now."""
        return self._rehearsal.stance

    def bind(self, limits: BatchLimits) -> None:
        self._limits, self._slo_ns = limits, limits.slo_ns
        self.service = ServiceModel(limits.max_rows, limits.row_sizes)
        self._streams = Inflows(self.service)

    def arrived(self, queue: Queue, state: State, rows: int, now_ns: int) -> None:
        streams, group = self._streams.by_group, queue.group
        stream = streams.get(group) or self._streams.began(group, state.queues)
        came_rows = stream.came_rows  # as `Inflow.came`, without a call
        stream.arrivals.append((now_ns, came_rows))
        stream.came_rows = came_rows + rows
        if (slo_ns := self._slo_ns) is None:
            return
        if len(streams) > 1:
            self._line.came(rows, now_ns)
        rehearsal = self._rehearsal
        rehearsal.until_look -= 1
        if rehearsal.under_way is not None:
            rehearsal.go_on()
        if (waiting := queue.rows) >= _MANY and queue.outlook is None and waiting // _MANY > (waiting - rows) // _MANY:
            self._foresee(queue, stream, state, slo_ns, now_ns)

    def settle(self) -> None:
        """Let go what no recording can begin with."""
        self._rehearsal.settle()

    def finished(self, batch: Batch, now_ns: int, compute_ns: int, ok: bool) -> None:
        # The worker was taken from closing to now: hand-over and joining the inputs count, as they do for who waits.
        time_ns = now_ns - batch.closed_ns
        if time_ns < compute_ns:
            time_ns = compute_ns
        if batch.reason == "probe":
            self._try_ns = now_ns + _BETWEEN_TRIES * time_ns
        if ok:
            stream = self._streams.by_group.get(batch.group) or self._streams.rest
            if stream.own and stream.curve is self.service.latest:  # as mostly: without the calls
                stream.curve.observe(batch.padded_rows, batch.busy, time_ns)
            else:
                stream = self._streams.learn(batch.group, batch.padded_rows, batch.busy, time_ns)
            stream.learned_ns = self._line.stream.learned_ns = now_ns
            if (rehearsal := self._rehearsal).spare is not None:
                rehearsal.answered += len(batch.parts)

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        stream = self._streams.by_group.get(queue.group)
        if stream is None or not stream.own:
            stream = self._streams.decided(queue.group)
        if not (stream.curve.current() if stream.curve.shares else stream.curve).ready:
            return Decision(self._limits.max_rows, "idle")
        slo_ns = self._slo_ns
        if len(state.queues) == 1:
            rehearsal, busy, held = self._rehearsal, len(state.in_flight), stream.held
            asks = rehearsal.until_look <= 0 or rehearsal.stance != PLANNED
            if slo_ns is not None and asks and not (queue.has_lower_class or queue.alone):
                stance = self._stance_for(state, now_ns, slo_ns)
                if stance != PLANNED:
                    decision = decide_in(stance, queue, View(stream, busy, now_ns, free_slots), slo_ns)
                    if decision is not None:
                        return decision
            if held is not NOT_HELD:  # `_decide` would come to it as well
                if held.view is None and held.keeps(queue, busy, now_ns):
                    return Decision(0, "hold", held.until_ns)
            elif state.requests == 1 and (free_slots > 1 or not busy):
                lone = self._lone(queue.entries[0], stream, busy, free_slots, state, now_ns)
                if lone is not None:
                    state.new_alone = None
                    return lone
            return self._decide(queue, stream, state, now_ns, free_slots, True)
        if not self._streams.tells(state.queues):
            return self._decide(queue, stream, state, now_ns, free_slots, False)
        if slo_ns is not None and (stance := self._stance_for(state, now_ns, slo_ns)) != PLANNED:
            decision = decide_among(stance, queue, state, self._streams.of, now_ns, free_slots, slo_ns)
            if decision is not None:
                return decision
        if slo_ns is None or not self._line.is_one(state.queues, self._streams.of, state.workers, now_ns, slo_ns):
            return self._decide(queue, stream, state, now_ns, free_slots, False)
        return self._decide_in_line(queue, state, now_ns, free_slots)

    def _foresee(self, queue: Queue, stream: Inflow, state: State, slo_ns: int, now_ns: int) -> None:
        """Tell those that come next what becomes of them, although no worker is free: if the next would be refused by it."""
        workers, known = len(state.in_flight), stream.curve.current().ready
        if len(state.queues) > 1 or not 0 < workers >= state.workers or self.stance != PLANNED or not known:
            return
        view = View(stream, workers - 1, now_ns, 1, _FRESH * slo_ns)
        margin = stream.margin
        _, foreseen = self._fresh(queue, stream, view, slo_ns, state, True)
        if foreseen is None or not missing_ns(foreseen, queue, state, 1, NEVER, now_ns + slo_ns, now_ns):
            foreseen, stream.margin = None, margin
        queue.outlook = foreseen
        if queue.alone:
            state.new_alone = foreseen

    def _decide_in_line(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        """Of all that waits as of one queue. queue: which is asked for; only the first in line answers."""
        waiting = [each for each in state.queues.values() if each.entries]
        if any(each.entries[0] < queue.entries[0] for each in waiting):
            return Decision(0, outlook=queue.outlook)
        longest = max([each.group for each in waiting])  # type: ignore[type-var]  # all are LengthGroups of one shape key
        line = Queue.joined(longest, waiting) if len(waiting) > 1 else queue
        line.outlook = queue.outlook
        self._line.stream.curve = self._streams.curve(longest)
        decision = self._decide(line, self._line.stream, state, now_ns, free_slots, True)
        for each in state.queues.values():
            each.outlook = decision.outlook
        rows, shed = decision.rows, decision.shed
        if line is queue or not (rows or shed):
            return decision
        mine, *others = dealt(line, queue, waiting, rows, shed)
        expected_ns = 0
        if rows:
            longest = max([part.queue.group for part in (mine, *others) if part.rows])  # type: ignore[type-var]  # as above
            expected_ns = round(self._streams.curve(longest).expected_ns(rows, len(state.in_flight) + 1))
        return Decision(mine.rows, decision.reason, decision.wake_at_ns, mine.shed, expected_ns, others, decision.outlook)

    def _decide(self, queue: Queue, stream: Inflow, state: State, now_ns: int, free_slots: int, alone: bool) -> Decision:
        """alone: whether no other queue has a part in the workers."""
        entries, waiting, busy = queue.entries, queue.rows, len(state.in_flight)
        first, slo_ns, held = entries[0], self._slo_ns, stream.held
        if held is not NOT_HELD and held.keeps(queue, busy, now_ns):
            if held.view is None:
                return Decision(0, "hold", held.until_ns)
            held.view.now_ns, held.view.rate = now_ns, stream.rate(now_ns)
            wake_at_ns = hold(held.view, waiting, first[2], state)
            if wake_at_ns:
                return Decision(0, "hold", wake_at_ns)
        if waiting == first[3] and waiting == state.rows and (free_slots > 1 or not busy):
            lone = self._lone(first, stream, busy, free_slots, state, now_ns)
            if lone is not None:
                if queue.alone:
                    state.new_alone = None
                return lone
        view = View(stream, busy, now_ns, free_slots, None if slo_ns is None else _FRESH * slo_ns)
        last = len(view.sizes) - 1
        shed: list[Entry] = []
        deadline_ns = first[2]
        foreseen: Outlook | None = None
        if slo_ns is not None and first[2] < now_ns + view.alone_ns(first[3], view.margin):
            hope = self._hope(view, state, now_ns)
            waiting -= shed_hopeless(queue, view, hope, _FRESH * slo_ns, shed)
            if not waiting:
                return self._tried(queue, stream, view, hope, shed, state, slo_ns, alone)
            first = entries[len(shed)]
            deadline_ns = sure(queue, view, len(shed))
        if queue.alone:  # there is nothing to gather
            if slo_ns is not None and (stream.margin or state.rows > first[3]):
                _, foreseen = self._fresh(queue, stream, view, slo_ns, state, alone)
            if foreseen is not None or (state.new_alone is not None and now_ns >= state.new_alone.stale_ns):
                state.new_alone = foreseen  # a decision does not see what comes of queues that are gone
            rows, reason = first[3], "idle" if waiting == first[3] else "cap"
            return Decision(rows, reason, None, shed, round(view.expected_ns(rows)), (), foreseen)
        share, work = self._share(stream, state, now_ns) if not alone else (1.0, 0.0)
        sustains = view.sustains(share, slo_ns)
        cap = _cap(view, slo_ns, waiting, sustains, stream is self._line.stream)
        fits = last if deadline_ns == NEVER else view.fits(deadline_ns - now_ns)
        if fits < 0:
            fits = 0
        index = fits if fits < cap else cap
        reason = "idle"
        if view.sizes[index] < waiting:
            reason = "deadline" if fits < cap else "cap" if cap < last else "full"
            if slo_ns is not None:
                # The overload lasts, so what waits is by what was foreseen; other lengths may have come between.
                promised = queue.outlook if alone else None
                fresh, foreseen = self._fresh(queue, stream, view, slo_ns, state, alone)
                if promised is not None:  # by whose size they were let in
                    fresh = view.curve.at(promised.rows)
                fits = max(0, view.fits(deadline_ns - now_ns))
                index = fits if fits < cap else cap
                if view.sizes[fits] < min(view.sizes[fresh], waiting) and (
                    promised is not None or not feasible(queue, len(shed), index, cap, view, state, free_slots)
                ):
                    waiting, fits = shed_front(queue, view, fresh, waiting, shed)
                    if not waiting:
                        return Decision(0, shed=shed, outlook=foreseen)
                    first = entries[len(shed)]
                    index = min(fits, view.as_long(fresh))
                    reason = "overload"
        elif slo_ns is not None and (stream.margin or state.rows > queue.rows):
            _, foreseen = self._fresh(queue, stream, view, slo_ns, state, alone)
        if reason == "cap" and slo_ns is not None and not stream.margin:
            together = view.curve.at(waiting)
            late = view.rate * ((view.shape[together] + view.shape[0]) * view.quantile - slo_ns)  # of those that will come
            if together <= fits and late < 1 and not feasible(queue, len(shed), index, cap, view, state, free_slots):
                index, reason = together, "idle"
        if reason == "idle" and view.workers > 1 and waiting < view.sizes[cap] and view.rate > 0:
            groups = self._streams.apart(state.queues)
            if slo_ns is not None and work > UTILISATION * view.workers and self._together(groups, view, slo_ns) < work:
                wake_at_ns = gather(view, queue, deadline_ns, state, slo_ns, self._streams)
                if wake_at_ns:
                    return Decision(0, "hold", wake_at_ns, shed, outlook=foreseen)
                target = 0
            else:
                target, wake_at_ns = pace(view, queue, waiting, deadline_ns, min(cap, sustains), slo_ns)
            if wake_at_ns:
                stream.held = Held(first, target, wake_at_ns, busy)
                return Decision(0, "hold", wake_at_ns, shed, outlook=foreseen)
            if free_slots == 1 and busy:
                wake_at_ns = hold(view, waiting, deadline_ns, state)
                if wake_at_ns:
                    stream.held = Held(first, view.sizes[cap], wake_at_ns, busy, view)
                    return Decision(0, "hold", wake_at_ns, shed, outlook=foreseen)
            if first is held.first:
                reason = "hold"
        stream.held = NOT_HELD
        rows = stepped(view, max(min(view.sizes[index], waiting), first[3]), self._limits)
        if slo_ns is not None and (queue.has_lower_class or queue.rows - len(entries) >= view.sizes[-1]):
            rows = shed_late(queue, view, rows, shed)
            if not rows:
                return Decision(0, shed=shed, outlook=foreseen)
        if alone or state.rows == queue.rows:
            return Decision(rows, reason, None, shed, round(view.expected_ns(rows)), (), foreseen)
        pressed = work > UTILISATION * view.workers
        fills = rows == waiting and (free_slots == 1 or pressed)
        fill: list[Fill] = []
        if slo_ns is None:
            took, fill, expected_ns = in_turn(queue, view, rows, fills, state, self._limits, self._streams.curve)
            return Decision(took, reason if took == rows else "cap", None, shed, round(expected_ns), fill, foreseen)
        expected_ns = view.expected_ns(rows)
        if fills:
            fill, expected_ns = filled(queue, view, rows, deadline_ns, pressed, state, self._limits, self._streams.curve)
        return Decision(rows, reason, None, shed, round(expected_ns), fill, foreseen)

    def _tried(
        self, queue: Queue, stream: Inflow, view: View, hope: float, shed: list[Entry], state: State, slo_ns: int, alone: bool
    ) -> Decision:
        """Of a queue of which all is hopeless, and is to be shed: one that is tried nevertheless, if there is."""
        now_ns, rows = view.now_ns, shed[-1][3]
        expected_ns, stale = view.expected_ns(rows), now_ns - stream.learned_ns >= STALE_NS
        if view.busy or queue.rows < state.rows or (not alone and _others_refused(queue, state)):  # others need the worker
            tried = stale and now_ns >= self._try_ns and all(batch.group != queue.group for batch in state.in_flight)
        else:
            large = rows > view.sizes[-1] and now_ns >= self._try_ns  # all its batches may be in vain
            hoped_ns = view.alone_ns(rows, hope) if large else expected_ns * hope
            tried = stale or hoped_ns > slo_ns - state.reserved_ns
        if not tried:
            return Decision(0, shed=shed)
        if stale and stream.own:
            stream.curve.doubt()
        self._try_ns = now_ns + round(expected_ns * (1 + _BETWEEN_TRIES))
        return Decision(shed.pop()[3], "probe", None, shed)

    def _stance_for(self, state: State, now_ns: int, slo_ns: int) -> Stance:
        rehearsal = self._rehearsal
        if rehearsal.until_look <= 0:
            left_ns = slo_ns - state.reserved_ns
            if len(state.queues) == 1:
                curve = self._streams.of(next(iter(state.queues))).curve
                needless = left_ns > TIGHT * curve.shape[0] * curve.level(state.workers)  # as `look` would find, sooner
            else:
                needless = self._streams.longest(state.queues) is None  # who may not share a batch
            if needless:
                rehearsal.keep()
                return PLANNED
            streams = {group: self._streams.of(group) for group in state.queues}

            def lane(stance: Stance) -> Batcher:
                policy, limits = Adaptive(stance), self._limits
                found = Batcher(
                    policy, max_rows=limits.max_rows, row_sizes=limits.row_sizes, workers=state.workers, slo_ns=left_ns
                )
                policy._rehearse(streams, self._line.stream)
                return found

            rehearsal.look(streams, state.workers, left_ns, now_ns, lane)
        return rehearsal.stance

    def _rehearse(self, streams: Streams, of_line: Inflow) -> None:
        """Be as the policy that has these streams. of_line: of all lengths."""
        self._streams.by_group = {group: stream.like() for group, stream in streams.items()}
        self._line.stream = of_line.like()

    def _lone(self, first: Entry, stream: Inflow, busy: int, free_slots: int, state: State, now_ns: int) -> Decision | None:
        """What the steps come to for a request alone when little else comes, at a third of their cost; None: they might not."""
        curve = stream.curve
        rows = first[3]
        expected_ns = curve.shape[0] * curve.level(busy + 1)
        if rows > curve.sizes[0] or now_ns + expected_ns * curve.spread > first[2]:
            return None
        workers = busy + free_slots
        if workers > 1:
            streams = self._streams
            rate = stream.rate(now_ns) if len(state.queues) == 1 else streams.rate(streams.apart(state.queues), now_ns)
            if rate * expected_ns > UTILISATION * workers:
                return None
        stream.margin = 0.0
        if expected_ns != stream.lone_ns or rows != stream.lone.rows:
            stream.lone, stream.lone_ns = Decision(rows, "idle", None, (), round(expected_ns)), expected_ns
        return stream.lone

    def _hope(self, view: View, state: State, now_ns: int) -> float:
        """The share of its expected time within which a request must run for step 1 to let it try.

        The fewer lone requests would keep the workers busy, the less is lost if it is late nevertheless.
        """
        streams = [self._streams.of(group) for group in self._streams.apart(state.queues)]
        work = sum([one.alone(now_ns, view.busy + 1) for one in streams]) / view.workers
        luck = view.curve.luck
        return min(view.margin, luck[int(work * (len(luck) - 1))]) if work < UTILISATION else view.margin

    def _share(self, stream: Inflow, state: State, now_ns: int) -> tuple[float, float]:
        """Of several queues, this one's part of the work that arrives, which is its part of the workers; and all that work."""
        work = stream.work(now_ns)
        if len(state.queues) == 1:
            return 1.0, work
        total = sum([self._streams.of(group).work(now_ns) for group in self._streams.apart(state.queues)])
        return (max(work / total, 0.01) if total > 0 else 1.0), total

    def _fresh(
        self, queue: Queue, stream: Inflow, view: View, slo_ns: int, state: State, alone: bool
    ) -> tuple[int, Outlook | None]:
        """Index of n_o, and under overload what becomes of those that come. Sets the margin of stream and view.

        Of several queues it may be that all keep more workers busy than there are, although none does: those that have not
        been decided on since are told what comes, too.

        While no more arrives than the workers can do, what waits too long is a burst that will pass: then a batch that is
        nearly as productive will do, for which less must be shed.
        """
        curve = view.curve
        low = usual_at(queue, stream, view.rate, slo_ns, view.level * curve.spread)
        if not alone:
            stream.usual = low
            work = self._least_work(state, view, slo_ns)
        else:
            work = view.rate / curve.rates[low]
        crowd = work * curve.level(view.workers) / view.workers
        if crowd <= OVERLOADED:
            stream.margin, view.margin = 0.0, curve.spread
            view.quantile = view.level * curve.spread
            return bisect_left(curve.rates, _PRODUCTIVE * curve.rates[low]), None
        planned = Plan(low, curve.spread) if queue.alone else plan(curve, view.level, view.rate, slo_ns)
        stream.margin = view.margin = planned.margin
        view.quantile = view.level * planned.margin
        told: dict[Inflow, Outlook] = {}
        for other in () if alone else state.queues.values():
            if other.outlook is not None or other is queue:
                continue
            theirs = self._streams.of(other.group)
            if theirs not in told and theirs.curve.current().ready:
                level = theirs.curve.level(view.busy + 1)  # of shapes that learn apart it is another
                at = usual_at(other, theirs, theirs.rate(view.now_ns), slo_ns, level * planned.margin)
                told[theirs] = outlook(theirs.curve, level, Plan(at, planned.margin), view.workers, crowd, view.now_ns)
            other.outlook = told.get(theirs)
            if other.alone and other.outlook is not None:
                state.new_alone = other.outlook
        usual = planned if queue.alone else planned._replace(at=view.as_long(planned.at))
        together = stream is self._line.stream
        return planned.at, outlook(curve, view.level, usual, view.workers, crowd, view.now_ns, together=together)

    def _least_work(self, state: State, view: View, slo_ns: int) -> float:
        """Workers that all queues keep busy, the lengths of each shape apart or padded to the longest, whichever is less."""
        shapes: dict[Hashable, list[Hashable]] = {}
        for group in self._streams.apart(state.queues):
            shapes.setdefault(group.shape_key if isinstance(group, LengthGroup) else group, []).append(group)
        least = 0.0
        for groups in shapes.values():
            work = sum([self._streams.of(group).work(view.now_ns) for group in groups])
            least += min(work, self._together(groups, view, slo_ns)) if len(groups) > 1 else work
        return least

    def _together(self, groups: Collection[Hashable], view: View, slo_ns: int) -> float:
        """Workers that these queues keep busy, padded to the longest of them; infinity: they cannot be."""
        longest = self._streams.longest(groups)
        if longest is None or not longest.ready:
            return inf
        rate = self._streams.rate(groups, view.now_ns)
        return rate / longest.rates[collected(longest, rate, slo_ns, view.quantile)]


def _cap(view: View, slo_ns: int | None, waiting: int, sustains: int, of_line: bool) -> int:
    """Index of n_c. sustains: of n_s. of_line: no batches of other lengths are left room for."""
    if slo_ns is None:
        # (waiting/n + 1)·T(n)/2 is the mean end of what waits, served in batches of n; for T = a + b·n least at:
        fixed, slope = view.curve.line_ns
        soonest = sqrt(waiting * fixed / (slope * view.workers)) if slope > 0 else view.sizes[-1]
        # Never less than clears the queue in one turn of the workers: if the times learned are too short, as they are
        # while hand-overs take longer than before, small batches would let the queue grow, and nothing is late here.
        at_once = -(-waiting // view.workers)
        return min(max(sustains, bisect_left(view.sizes, max(round(soonest), at_once))), len(view.sizes) - 1)
    cap = view.fits((max(CAP, view.workers / (view.workers + 1)) if of_line else CAP) * slo_ns)
    if cap < sustains:
        cap = min(sustains, view.fits(CAP_AT_MOST * slo_ns))
    return cap if cap > 0 else 0
