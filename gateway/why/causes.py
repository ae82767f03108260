"""Why each request was late: one cause for each miss, by a rule (docs/why.md).

A miss is a request that was refused or shed for the load, or not answered by its limit: arrival + SLO, or its own deadline.
First its own times are looked at: what it was given, the batch it was in. What remains waited for others. Misses that belong
together are then run again without the fault that is near them: without the stall, with the session there, without padding, or
with the batches that the adaptive policy would have made. What takes at least half of the misses away is their cause; if
nothing does, it is the queue.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from msgspec.structs import replace

from gateway.batching.batcher import Batcher
from gateway.batching.queue import NEVER
from gateway.batching.recording import LaneSettings
from gateway.batching.replay import History, PastBatch, PastRequest
from gateway.batching.service_model import ServiceModel
from gateway.errors import TooLarge
from gateway.why.simulation import has_stalled, left, pace_of, simulate
from gateway.why.typical import Typical

_CONVINCING: Final = 0.5
_NEARLY_ALL: Final = 0.9
_SECOND_NS: Final = 1_000_000_000
_OF_REQUESTS: Final = frozenset((TooLarge.__name__,))  # what a batcher refuses for the request itself, and not for the load


class Cause(Enum):
    """In the order in which they are looked for. The words say what to do."""

    CUT_OFF = "cut-off"
    COLD_START = "cold start"
    STALL = "stall"
    PADDING = "padding"
    BATCH = "batch"
    QUEUE = "queue"


REMEDIES: Final = {
    Cause.CUT_OFF: "it was given less time than one request takes alone: relax slo.p99_ms, or the client's timeout",
    Cause.COLD_START: "no session was there yet, or its first runs were slow: min_replicas above 0, a longer batching.probe_s",
    Cause.STALL: "a batch took far longer than usual: look for what else uses that machine then, and at the log",
    Cause.PADDING: "time went into padding: compile sizes between, or set ragged.buckets",
    Cause.BATCH: "batches were not as the deadline wants them: use batching.policy adaptive, and no batching.max_rows",
    Cause.QUEUE: "more came than could be served: add sessions or replicas, or relax the SLO",
}


@dataclass(frozen=True, slots=True)
class Miss:
    """A request that was refused or late. late_ns: after its limit; None: it was not answered."""

    request: PastRequest
    cause: Cause
    late_ns: int | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Of one backend of a model. misses: in order of arrival. stalled: batches that took far longer than usual."""

    settings: LaneSettings
    history: History
    typical: Typical
    misses: tuple[Miss, ...]
    stalled: tuple[PastBatch, ...] = ()

    @property
    def by_cause(self) -> Counter[Cause]:
        return Counter(miss.cause for miss in self.misses)

    @property
    def failed(self) -> int:
        """Requests whose last batch failed."""
        return sum(request.fate == "failed" for request in self.history.requests)


def missed(request: PastRequest, end_ns: int) -> bool:
    """Whether it was refused or late. end_ns: of the recording; what waits for its answer then may be late already."""
    if request.refused:
        return request.fate not in _OF_REQUESTS
    if request.fate == "answered":
        return request.ended_ns is not None and request.ended_ns > request.limit_ns
    if request.fate == "cancelled":
        return not left(request)
    begun_ns = request.batches[-1].begun_ns if request.batches else None
    return request.pending and request.limit_ns < (begun_ns or end_ns)


def diagnose(history: History, settings: LaneSettings, learned: Callable[[], ServiceModel]) -> Diagnosis:
    """Name the cause of every miss. learned: what was known when the recording began; a copy each time."""
    typical = Typical(history.batches, learned())
    late = [request for request in history.requests if missed(request, history.end_ns)]
    faults = _Faults(history, settings, typical, learned)
    causes: dict[int, Cause] = {}
    for at, request in enumerate(late):
        own = faults.own(request)
        if own is not None:
            causes[at] = own
    for episode in _episodes(late, 2 * (settings.slo_ns or _SECOND_NS)):
        open_ = [at for at in episode if at not in causes]
        if open_:
            causes.update(faults.of_episode([late[at] for at in episode], open_, late))
    misses = []
    for at, request in enumerate(late):
        answered = request.fate == "answered" and request.ended_ns is not None
        late_ns = request.ended_ns - request.limit_ns if answered and request.ended_ns is not None else None
        cause = causes.get(at) or (Cause.BATCH if faults.too_large(request) else Cause.QUEUE)
        misses.append(Miss(request, cause, late_ns))
    return Diagnosis(settings, history, typical, tuple(misses), tuple(faults.stalled))


def batcher_like(settings: LaneSettings, learned: ServiceModel) -> Batcher:
    """A batcher of these settings that knows what was learned."""
    batcher = settings.batcher()
    batcher.service.restore(learned.to_dict())
    for bucket in learned.curves:
        batcher.service.curve(bucket)
    return batcher


def without_starts(history: History) -> list[tuple[int, int]]:
    """The workers that were alive, as if those that came late had been there from the start, and none had been away."""
    most = max((alive for _, alive in history.workers), default=1)
    return [(0, max(1, most))]


class _Faults:
    """What went wrong in a recording, and what would have been without it."""

    def __init__(self, history: History, settings: LaneSettings, typical: Typical, learned: Callable[[], ServiceModel]) -> None:
        self._history = history
        self._requests = history.kept
        self._settings = settings
        self._typical = typical
        self._learned = learned
        stalled = [batch for batch in history.batches if has_stalled(batch, typical, history.end_ns)]
        self._absences, self._losses = _absences(history)
        first = _first_batches(history, self._absences)
        self._cold = [batch for batch in stalled if id(batch) in first]
        cold = set(map(id, self._cold))
        self.stalled = [batch for batch in stalled if id(batch) not in cold]
        self._slow = {id(batch): Cause.COLD_START if id(batch) in cold else Cause.STALL for batch in stalled}
        self._without: dict[Cause, set[int]] = {}
        self._padded_ns = [batch.closed_ns for batch in history.batches if batch.padded_rows > batch.rows]
        arrived = sorted((request.arrival_ns, at) for at, request in enumerate(self._requests))
        self._arrivals_ns = [arrival_ns for arrival_ns, _ in arrived]
        self._arrived = [at for _, at in arrived]  # places of the requests, in that order
        self._place = {id(request): at for at, request in enumerate(self._requests)}

    def own(self, request: PastRequest) -> Cause | None:
        """What its own times say; None: it waited for others."""
        typical = self._typical
        limit_ns = request.limit_ns
        batch = request.batches[-1] if request.batches else None
        alone_ns = typical.rows_ns(request.rows, batch.group if batch is not None else request.shape_key)
        if limit_ns != NEVER and limit_ns - request.arrival_ns < alone_ns:
            return Cause.CUT_OFF
        if batch is None:
            return None
        usual_ns = typical.batch_ns(batch)
        if id(batch) in self._slow:
            return self._slow[id(batch)] if batch.closed_ns + usual_ns <= limit_ns else None
        if batch.answered_ns is None or batch.padded_rows == batch.rows or request.refused:
            return None
        padding_ns = usual_ns - typical.rows_ns(batch.rows, batch.group)
        return Cause.PADDING if padding_ns and batch.answered_ns - padding_ns <= limit_ns else None

    def too_large(self, request: PastRequest) -> bool:
        """Whether its batch was made larger than its deadline allowed, which the adaptive policy does not."""
        batch = request.batches[-1] if request.batches else None
        if batch is None or len(batch.requests) < 2 or self._settings.policy == "adaptive":
            return False
        alone_ns = self._typical.rows_ns(request.rows, batch.group)
        usual_ns = self._typical.batch_ns(batch)
        return batch.closed_ns + alone_ns <= request.limit_ns < batch.closed_ns + usual_ns

    def of_episode(self, episode: list[PastRequest], open_: list[int], late: list[PastRequest]) -> dict[int, Cause]:
        """episode: misses that belong together. open_: the places in `late` of those among them that waited for others."""
        arrivals_ns = [request.arrival_ns for request in episode]
        begin_ns = min(arrivals_ns) - 2 * (self._settings.slo_ns or _SECOND_NS)
        end_ns = max(request.ended_ns or request.arrival_ns for request in episode)
        first = bisect_left(self._arrivals_ns, min(arrivals_ns))
        came = self._arrived[first : bisect_right(self._arrivals_ns, max(arrivals_ns))]
        best, cause, still_late = 0.0, None, set[int]()
        for fault in (Cause.COLD_START, Cause.STALL, Cause.PADDING, Cause.BATCH):
            if not self._near(fault, begin_ns, end_ns):
                continue
            still = self._misses(fault)
            taken_away = 1 - sum(at in still for at in came) / len(episode)
            if taken_away > best + 0.05:
                best, cause, still_late = taken_away, fault, still
        if cause is None or best < _CONVINCING:
            return {}
        return {at: cause for at in open_ if best >= _NEARLY_ALL or self._place[id(late[at])] not in still_late}

    def _near(self, fault: Cause, begin_ns: int, end_ns: int) -> bool:
        """Whether there is anything of this fault that these could have waited for."""

        def overlaps(batches: Sequence[PastBatch]) -> bool:
            return any(batch.closed_ns <= end_ns and (batch.ended_ns or end_ns) >= begin_ns for batch in batches)

        if fault is Cause.COLD_START:
            return overlaps(self._cold) or any(gone <= end_ns and back >= begin_ns for gone, back in self._absences)
        if fault is Cause.STALL:
            # Not a stream: how long its rest keeps the session is not recorded, so without any fault all would be in time.
            slow = not self._settings.decoupled and overlaps(self.stalled)
            return slow or any(gone <= end_ns and back >= begin_ns for gone, back in self._losses)
        if fault is Cause.PADDING:
            return bisect_left(self._padded_ns, begin_ns) < bisect_right(self._padded_ns, end_ns)
        settings = self._settings
        if settings.decoupled or not settings.model_rows:
            return False
        return settings.policy != "adaptive" or settings.max_rows < settings.model_rows

    def _misses(self, without: Cause) -> set[int]:
        """The places of the requests that would have been late all the same."""
        found = self._without.get(without)
        if found is not None:
            return found
        history, settings = self._history, self._settings
        delayed = [*self._cold, *self.stalled]
        workers: Sequence[tuple[int, int]] = history.workers
        if without is Cause.COLD_START:
            delayed = self.stalled
            workers = without_starts(history)
        elif without is Cause.STALL:
            delayed = self._cold
            if self._losses:
                workers = without_starts(history)
        elif without is Cause.BATCH:
            settings = replace(settings, policy="adaptive", max_rows=settings.model_rows)
        pace = pace_of(history.batches, self._typical, delayed, history.end_ns, without_padding=without is Cause.PADDING)
        batcher = batcher_like(settings, self._learned())
        outcome = simulate(batcher, self._requests, pace, workers, history.end_ns)
        found = {
            at
            for at, (request, ended_ns) in enumerate(zip(self._requests, outcome.ended_ns, strict=True))
            if (ended_ns is None or ended_ns > request.limit_ns) and not left(request)
        }
        self._without[without] = found
        return found


def _episodes(late: Sequence[PastRequest], gap_ns: int) -> list[list[int]]:
    """The places of misses that came soon after one another."""
    episodes: list[list[int]] = []
    last_ns = -NEVER
    for at, request in enumerate(late):
        if request.arrival_ns - last_ns > gap_ns:
            episodes.append([])
        episodes[-1].append(at)
        last_ns = request.arrival_ns
    return episodes


def _absences(history: History) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """When no worker was alive: because none had been started, and because the last had been lost in a run."""
    cold: list[tuple[int, int]] = []
    lost: list[tuple[int, int]] = []
    lost_ns = [batch.ended_ns for batch in history.batches if not batch.ok and batch.ended_ns is not None]
    gone_ns: int | None = None
    for when_ns, absent in [*history.absent, (history.end_ns, False)]:
        if absent and gone_ns is None:
            gone_ns = when_ns
        elif not absent and gone_ns is not None:
            before = [end_ns for end_ns in lost_ns if 0 <= gone_ns - end_ns <= _SECOND_NS]
            (lost if before else cold).append((gone_ns, when_ns))
            gone_ns = None
    return cold, lost


def _first_batches(history: History, absences: Sequence[tuple[int, int]]) -> set[int]:
    """The `id` of the first batches of each session after a load or a cold start.

    Two for each, as a run may be the first of its size.
    """
    starts = [back_ns for _, back_ns in absences]
    if history.from_start:
        starts.insert(0, 0)
    found: set[int] = set()
    for start_ns in starts:
        after = [batch for batch in history.batches if batch.closed_ns >= start_ns]
        if after:
            found.update(id(batch) for batch in after[: 2 * max(1, after[0].workers)])
    return found
