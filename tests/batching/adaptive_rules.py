"""The rules of the adaptive policy as its docstring and docs/batching.md state them: by search instead of tables, and slowly.

What a decision is held against. Times are T(n) = shape(n) · level(busy), Q = T · spread; sizes are all from 1 to max_rows.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import ceil, exp, inf, log, sqrt

from gateway.batching.queue import NEVER, Entry

ALMOST_FOREVER_NS = 10**30


@dataclass(slots=True)
class Known:
    """What is known of one queue's speed. shape: rows -> ns at level 1, for all sizes. line: (a, b) of a + b·rows."""

    sizes: tuple[int, ...]
    shape: Callable[[int], float]
    level: Callable[[int], float]
    spread: float
    line: tuple[float, float]
    luck: tuple[float, ...]

    def size(self, rows: float) -> int:
        """The smallest size that holds so many rows; the largest if none does."""
        return next((size for size in self.sizes if size >= rows), self.sizes[-1])

    def best_rate(self, size: int) -> float:
        """The most rows per nanosecond of any size up to this."""
        return max(each / self.shape(each) for each in self.sizes if each <= size)


@dataclass(slots=True)
class Decided:
    """As `policies.Decision`, without fill."""

    rows: int
    reason: str = ""
    wake_at_ns: int | None = None
    shed: list[Entry] = field(default_factory=list)
    expected_ns: int = 0


@dataclass(slots=True)
class Rules:
    """One lane's memory: arrivals (when, rows) by queue, and what is held. slo_ns: None: none."""

    known: dict[Hashable, Known]
    slo_ns: int | None
    row_sizes: bool = False
    arrivals: dict[Hashable, list[tuple[int, int]]] = field(default_factory=dict)
    held: dict[Hashable, tuple[Entry, int, int, int, tuple[float, float, int, float] | None]] = field(default_factory=dict)
    margins: dict[Hashable, float] = field(default_factory=dict)  # under overload
    usual: dict[Hashable, int] = field(
        default_factory=dict
    )  # rows of the batch that is collected, where there are other queues
    try_ns: int = 0  # not before: another request that seems hopeless, where others need the worker

    def rate(self, group: Hashable, now_ns: int) -> float:
        """Of the last 128 arrivals; less if the last eight came at half that rate or below."""
        latest = self.arrivals.get(group, [])[-128:]
        span: float = now_ns - latest[0][0] if latest else 0
        if span <= 0:
            return 0.0
        if len(latest) > 8:
            span = max(span, (now_ns - latest[-8][0]) * len(latest) / 16)
        return sum(rows for _, rows in latest) / span

    def decide(
        self,
        group: Hashable,
        queues: dict[Hashable, list[Entry]],
        running: list[tuple[int, int]],
        now_ns: int,
        free_slots: int,
        own_runs: bool = False,
        others_refused: bool = False,
    ) -> Decided:
        """queues: entries in order, by group. running: (closed_ns, expected_ns) of what runs; own_runs: some of group.

        others_refused: requests of other groups are, on arrival.
        """
        known = self.known[group]
        sizes, shape = known.sizes, known.shape
        entries, busy = queues[group], len(running)
        waiting, first, workers = sum(entry[3] for entry in entries), entries[0], len(running) + free_slots
        rate = self.rate(group, now_ns)
        level = known.level(busy + 1)
        margin = self.margins.get(group, known.spread)
        alone_ns = shape(sizes[0]) * level
        if self.slo_ns is not None and alone_ns * margin > 0.85 * self.slo_ns:
            margin = min(margin, max(1.0, 0.85 * self.slo_ns / alone_ns))  # or who has just come would be late by it

        def expected(rows: float) -> float:
            return shape(known.size(rows)) * level

        def pessimistic(rows: float) -> float:
            return expected(rows) * margin

        def fits(time_ns: float) -> int:
            """The largest size with Q <= time; 0: none."""
            return max([size for size in sizes if shape(size) <= time_ns / (level * margin)], default=0)

        def hold(waiting: int, deadline_ns: int, rate: float, level: float, margin: float) -> int:
            """Rule H: until when, 0: not."""

            def at(rows: float) -> float:
                return shape(known.size(rows)) * level

            gap_ns = 1.0 / rate
            frees_ns = max(0, min(closed + takes for closed, takes in running) - now_ns)
            together = waiting * (gap_ns + at(waiting + 1) - at(waiting)) + at(waiting + 1) + gap_ns
            apart = frees_ns + at(max(1.0, rate * frees_ns))
            until = now_ns + apart - together
            if deadline_ns != NEVER:
                until = min(until, deadline_ns - at(waiting + 1) * margin)
            return int(until) if until > now_ns + 1 else 0

        held = self.held.get(group)
        if held and held[0] is first and now_ns < held[2] and waiting < held[1] and busy == held[3]:
            if held[4] is None:
                return Decided(0, "hold", held[2])
            until = hold(waiting, first[2], rate, held[4][0], held[4][3])
            if until:
                return Decided(0, "hold", until)
        # A request alone, when little else comes.
        if (
            waiting == first[3] <= sizes[0]
            and waiting == sum(entry[3] for each in queues.values() for entry in each)
            and (free_slots > 1 or not busy)
            and now_ns + alone_ns * known.spread <= first[2]
            and not (workers > 1 and sum(self.rate(each, now_ns) for each in queues) * alone_ns > 0.9 * workers)
        ):
            self.margins.pop(group, None)
            return Decided(first[3], "idle", None, [], round(alone_ns))

        shed: list[Entry] = []
        deadline_ns = first[2]
        if self.slo_ns is not None and first[2] < now_ns + pessimistic(first[3]):
            work = sum(self._alone(each, now_ns) for each in queues)
            work *= level / workers
            hope = min(margin, known.luck[int(8 * work)]) if work < 0.9 else margin
            for entry in entries:  # 1: what is late even alone
                if entry[2] >= now_ns + expected(entry[3]) * hope:
                    break
                shed.append(entry)
            waiting -= sum(entry[3] for entry in shed)
            if not waiting:
                others = others_refused or sum(entry[3] for other, each in queues.items() if other != group for entry in each)
                if own_runs or ((busy or others) and now_ns < self.try_ns):  # nothing has ended for a second
                    return Decided(0, shed=shed)
                self.try_ns = now_ns + round(10 * expected(shed[-1][3]))
                return Decided(shed[-1][3], "probe", None, shed[:-1])
            first = entries[len(shed)]
            left = entries[len(shed) :]
            deadline_ns = next((entry[2] for entry in left if entry[2] >= now_ns + pessimistic(entry[3])), first[2])

        share = 1.0
        if len(queues) > 1:
            work = {each: self._work(each, now_ns) for each in queues}
            total = sum(work.values())
            share = max(work[group] / total, 0.01) if total > 0 else 1.0

        used = 0.9
        if self.slo_ns is not None and workers > 1:
            least = min(0.7, 0.35 + 2.5 * (known.spread - 1))
            used = min(0.9, max(least, self.slo_ns / (6 * shape(sizes[0]) * level)))
        needed = rate * known.level(workers) / (used * workers * share)
        if self.slo_ns is None:
            needed = min(needed, 0.95 * known.best_rate(sizes[-1]))
        n_s = next((size for size in sizes if known.best_rate(size) >= needed), ALMOST_FOREVER_NS)
        if self.slo_ns is None:
            fixed, slope = known.line
            wanted = sqrt(waiting * fixed / (slope * workers)) if slope > 0 else sizes[-1]
            soonest = max(round(wanted), ceil(waiting / workers))
            n_c = min(max(n_s, known.size(soonest) if soonest <= sizes[-1] else sizes[-1]), sizes[-1])
        else:
            n_c = max(fits(0.55 * self.slo_ns), min(n_s, fits(0.85 * self.slo_ns)), sizes[0])
        n_e = sizes[-1] if deadline_ns == NEVER else max(fits(deadline_ns - now_ns), sizes[0])
        take, reason = min(n_e, n_c), "idle"

        if take < waiting:
            reason = "deadline" if n_e < n_c else "cap" if n_c < sizes[-1] else "full"
            if self.slo_ns is not None:
                n_o = self._fresh(group, queues, now_ns, level, workers)
                margin = self.margins.get(group, known.spread)
                n_e = max(fits(deadline_ns - now_ns), sizes[0])
                take = min(n_e, n_c)
                if n_e < min(n_o, waiting) and not self._all_in_time(
                    known, entries[len(shed) :], take, n_c, running, now_ns, free_slots, level, margin
                ):
                    allowed = 0
                    for entry in entries[len(shed) :]:  # 3
                        allowed = fits(entry[2] - now_ns)
                        if allowed >= min(n_o, waiting) and allowed:
                            break
                        shed.append(entry)
                        waiting -= entry[3]
                    if not waiting:
                        return Decided(0, shed=shed)
                    first = entries[len(shed)]
                    as_long = max(size for size in sizes if shape(size) <= 1.02 * shape(n_o))
                    take, reason = min(allowed, as_long), "overload"
                if reason == "cap" and group not in self.margins:
                    together = known.size(waiting)
                    late = rate * ((shape(together) + shape(sizes[0])) * level * margin - self.slo_ns)
                    if (
                        waiting <= n_e
                        and late < 1
                        and not self._all_in_time(
                            known, entries[len(shed) :], take, n_c, running, now_ns, free_slots, level, margin
                        )
                    ):
                        take, reason = together, "idle"
        elif self.slo_ns is not None and (group in self.margins or any(queues[other] for other in queues if other != group)):
            self._fresh(group, queues, now_ns, level, workers)
            margin = self.margins.get(group, known.spread)
        if reason == "idle" and workers > 1 and waiting < n_c and rate > 0:  # 4
            target = min(known.size(min(n_c, n_s)), 1 + int(rate * known.line[0] * level))
            until: float = 0
            if waiting < target:
                until = min(entry[4].arrival_ns for entry in entries) + 1.5 * target / rate
                if deadline_ns != NEVER:
                    until = min(until, deadline_ns - pessimistic(target))
                until = int(until) if until > now_ns + 1 else 0
            if until:
                self.held[group] = (first, target, int(until), busy, None)
                return Decided(0, "hold", int(until), shed)
            if free_slots == 1 and busy:
                until = hold(waiting, deadline_ns, rate, level, margin)
                if until:
                    self.held[group] = (first, n_c, int(until), busy, (level, rate, now_ns, margin))
                    return Decided(0, "hold", int(until), shed)
            if held and first is held[0]:
                reason = "hold"
        self.held.pop(group, None)

        rows = max(min(take, waiting), first[3])
        if self.row_sizes:  # 5
            up = known.size(rows)
            smaller = [size for size in sizes if size < up]
            if smaller and up > rows and smaller[-1] / shape(smaller[-1]) > rows / shape(up):
                rows = smaller[-1]
        elif (
            self.slo_ns is not None
            and (best := known.best_rate(known.size(rows))) * shape(known.size(rows)) > 1.1 * known.spread * rows
        ):
            full = next(size for size in sizes if known.best_rate(size) >= best)
            rows = full if rows - full <= max(full, 4) else rows
        if self.slo_ns is not None and any(entry[0] > entry[2] for entry in entries):
            end_ns, seen, late = now_ns + pessimistic(rows), 0, []
            for entry in entries[len(shed) :]:
                seen += entry[3]
                if seen > rows:
                    break
                if entry is not first and entry[2] < end_ns and entry[0] > entry[2]:
                    late.append(entry)
            shed += late
            rows -= sum(entry[3] for entry in late)
            if not rows:
                return Decided(0, shed=shed)
        if self.slo_ns is None and any(each for other, each in queues.items() if other != group):  # 7
            waited_ns = max(1, now_ns - first[4].arrival_ns)
            parts: list[int] = []
            going, value, worth, best_value = 0, 0.0, 0.0, 0.0
            least = -inf
            until_ns = NEVER
            for entry in entries:
                part = min(entry[3], rows - sum(parts))
                if part <= 0:
                    break
                parts.append(part)
                until_ns = min(until_ns, entry[2])
                if len(parts) > 1 and until_ns != NEVER and now_ns + expected(sum(parts)) * known.spread > until_ns:
                    break
                # Below zero, to be added up as they are there: of two that are equal it matters which is a bit more.
                least = max(least, -(expected(part) / part) * exp(min(0.0, (first[0] - entry[0]) / (4.0 * waited_ns))))
                worth += least * part
                before, value = value, worth / expected(sum(parts))
                if len(parts) > 1 and value > before and not self.row_sizes:
                    break
                if value <= best_value:
                    going, best_value = sum(parts), value
            if going < rows:
                rows, reason = going, "cap"
        return Decided(rows, reason, None, shed, round(expected(rows)))

    def crowd(self, group: Hashable, now_ns: int, workers: int) -> None:
        """Overload is told of while all workers are busy."""
        self._fresh(group, {group: []}, now_ns, self.known[group].level(workers), workers)

    def _alone(self, group: Hashable, now_ns: int) -> float:
        """Workers that a queue would keep busy if its requests ran one by one, in full batches if they are larger."""
        latest, known = self.arrivals.get(group, [])[-128:], self.known[group]
        if not latest:
            return 0.0
        rows = min(sum(rows for _, rows in latest) / len(latest), known.sizes[-1])
        return self.rate(group, now_ns) * known.shape(known.size(rows)) / rows

    def _work(self, group: Hashable, now_ns: int) -> float:
        """Workers that a queue keeps busy in its usual batches; in full ones, as long as none is usual."""
        known = self.known[group]
        return self.rate(group, now_ns) / known.best_rate(self.usual.get(group, known.sizes[-1]))

    def _fresh(self, group: Hashable, queues: dict[Hashable, list[Entry]], now_ns: int, level: float, workers: int) -> int:
        """n_o, and the margin by which it is so under overload."""
        assert self.slo_ns is not None
        known, rate = self.known[group], self.rate(group, now_ns)

        def collected(quantile: float) -> int:
            return max(
                [n for n in known.sizes if n <= rate * (self.slo_ns - known.shape(n) * quantile)], default=known.sizes[0]
            )

        self.margins.pop(group, None)
        n_o = collected(known.spread * level)
        if len(queues) > 1:
            self.usual[group] = n_o
            work = sum(self._work(each, now_ns) for each in queues)
        else:
            work = rate / known.best_rate(n_o)
        if work * known.level(workers) <= (1 + 2 / sqrt(128)) * workers:
            return next(size for size in known.sizes if known.best_rate(size) >= 0.95 * known.best_rate(n_o))
        best = -1.0
        for margin in sorted(set(known.luck)):
            full = collected(margin * level)
            for n in sorted({full, known.size(full + 1)}):
                time_ns = known.shape(n) * level
                mean = rate * (self.slo_ns - margin * time_ns)
                sharp = log(2) / -log(1 - 0.4 / sqrt(n))
                rows = n * mean / (n**sharp + mean**sharp) ** (1 / sharp) if mean > 0 else 0.0
                lost = [rate * time_ns * (luck - margin) for luck in known.luck[:8]]  # rows that come too late, by luck
                in_time = sum(min(rows, max(0.0, rows - each)) for each in lost) / 8 / time_ns
                if in_time >= 0.99 * best:
                    best, n_o, self.margins[group] = max(best, in_time), n, margin
        return n_o

    def _all_in_time(
        self,
        known: Known,
        entries: list[Entry],
        take: int,
        cap: int,
        running: list[tuple[int, int]],
        now_ns: int,
        free_slots: int,
        level: float,
        margin: float,
    ) -> bool:
        """Whether the rest would be, in batches of the cap on the workers as they free."""
        batches: list[list[Entry]] = [[]]
        for entry in entries:
            limit = take if len(batches) == 1 else cap
            if batches[-1] and sum(one[3] for one in batches[-1]) + entry[3] > limit:
                batches.append([])
            batches[-1].append(entry)
        free: list[float] = [max(now_ns, closed + takes) for closed, takes in running] + [now_ns] * (free_slots - 1)
        free.append(now_ns + round(known.shape(take) * level))
        for batch in batches[1:65]:
            time_ns = known.shape(known.size(sum(entry[3] for entry in batch)))
            soonest = min(free)
            if soonest + time_ns * (level * margin) > batch[0][2]:
                return False
            free.remove(soonest)
            free.append(soonest + round(time_ns * level))
        return True
