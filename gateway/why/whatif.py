"""What one more session, other batches or another backend would have served of a recording's requests, and at what price.

Simulated: the same arrivals, the gateway's own batching, and the times that batches were seen to take.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from msgspec.structs import replace

from gateway.batching.recording import LaneSettings
from gateway.batching.replay import History, PastRequest
from gateway.batching.service_model import ServiceModel
from gateway.why.causes import Diagnosis, batcher_like, missed
from gateway.why.simulation import SimulatedEnds, has_stalled, left, pace_of, simulate

_SECONDS_PER_HOUR: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What became, or would have become, of the requests.

    in_time: share of them. goodput_rps: answered in time, per second. p99_ms: of the answered; None: none was. usd_per_hour: of
    all sessions; usd_per_million: the same, for a million answers in time; None: no price is known, or other processes have the
    sessions too, or none was in time. ended_ns, left: as of `SimulatedEnds`; empty for what was not simulated. Of requests that
    another backend has taken over nothing counts.
    """

    name: str
    in_time: float
    goodput_rps: float
    p99_ms: float | None
    usd_per_hour: float | None
    usd_per_million: float | None
    ended_ns: tuple[int | None, ...] = ()
    left: frozenset[int] = frozenset()


def as_it_was(diagnosis: Diagnosis) -> WhatIf:
    """What was recorded; not simulated. What neither was late nor has ended counts as in time."""
    history = diagnosis.history
    kept = _stayed(history.kept)
    good = sum((request.fate == "answered" or request.pending) and not missed(request, history.end_ns) for request in kept)
    latencies_ns = [
        request.ended_ns - request.arrival_ns for request in kept if request.fate == "answered" and request.ended_ns is not None
    ]
    seconds = max(history.end_ns - history.begin_ns, 1) / 1e9
    return _told("as it was", good, len(kept), latencies_ns, seconds, _usd_per_hour(diagnosis))


def what_ifs(diagnosis: Diagnosis, learned: Callable[[], ServiceModel], others: Sequence[Diagnosis] = ()) -> list[WhatIf]:
    """Simulate the requests of a backend: as it is, with another cap, one more session, and on each other backend alone.

    learned: what was known when the recording began; a copy each time. others: the model's other backends. None of a model
    that answers in parts: of its batches the first part is recorded, and not how long the rest keeps the session.
    """
    settings, history = diagnosis.settings, diagnosis.history
    kept = history.kept
    if settings.decoupled:
        return []
    workers: Sequence[tuple[int, int]] = history.workers or [(0, max(1, settings.sessions))]
    more = [(when_ns, alive + 1 if alive else 0) for when_ns, alive in workers]
    usd = _usd_per_hour(diagnosis)
    cases: list[tuple[str, LaneSettings, Diagnosis, Sequence[tuple[int, int]], float]] = [
        ("the same, simulated", settings, diagnosis, workers, usd),
        ("one more session", settings, diagnosis, more, usd + _session_usd_per_hour(settings)),
    ]
    if settings.model_rows > 1:
        if settings.policy != "adaptive" or settings.max_rows < settings.model_rows:
            free = replace(settings, policy="adaptive", max_rows=settings.model_rows)
            cases.append(("policy adaptive, no cap", free, diagnosis, workers, usd))
        for rows in dict.fromkeys((max(1, settings.max_rows // 2), min(settings.model_rows, 2 * settings.max_rows))):
            if rows != settings.max_rows:
                capped = replace(settings, max_rows=rows)
                cases.append((f"max_rows {rows}", capped, diagnosis, workers, usd))
    for other in others:
        theirs = replace(other.settings, slo_ns=settings.slo_ns)
        alive = [(0, max([count for _, count in other.history.workers] or [other.settings.sessions]))]
        cases.append((f"all on {theirs.label}", theirs, other, alive, _session_usd_per_hour(theirs) * alive[0][1]))
    found = []
    for name, changed, source, live, usd_per_hour in cases:
        knows = learned() if source is diagnosis else _final(source.history)
        if knows is None:
            continue
        past, typical = source.history, source.typical
        slow = [batch for batch in past.batches if source is diagnosis and has_stalled(batch, typical, past.end_ns)]
        pace = pace_of(past.batches, typical, slow, past.end_ns)
        outcome = simulate(batcher_like(changed, knows), kept, pace, live, history.end_ns)
        found.append(_of(name, outcome, kept, usd_per_hour))
    return found


def _usd_per_hour(diagnosis: Diagnosis) -> float:
    """Of the sessions that could be used on average."""
    history = diagnosis.history
    changes = [*history.workers, (history.end_ns, 0)]
    used_ns = sum(alive * (end_ns - begin_ns) for (begin_ns, alive), (end_ns, _) in pairwise(changes))
    span_ns = history.end_ns - changes[0][0]
    alive = used_ns / span_ns if span_ns > 0 else diagnosis.settings.sessions
    return alive * _session_usd_per_hour(diagnosis.settings)


def _session_usd_per_hour(settings: LaneSettings) -> float:
    """0: unknown, also where this process's part of the price is."""
    return 0.0 if settings.lent else settings.session_usd_per_hour


def _final(history: History) -> ServiceModel | None:
    return history.batcher.service if history.batcher is not None else None


def _stayed(requests: Sequence[PastRequest]) -> list[PastRequest]:
    """Without those whose clients left: they count for nobody."""
    return [request for request in requests if not left(request)]


def _of(name: str, outcome: SimulatedEnds, requests: Sequence[PastRequest], usd_per_hour: float) -> WhatIf:
    latencies_ns = [
        ended_ns - request.arrival_ns
        for request, ended_ns in zip(requests, outcome.ended_ns, strict=True)
        if ended_ns is not None and request.fate != "failed" and not (request.pending or left(request))
    ]
    good = outcome.in_time(requests)
    found = _told(name, good, len(_stayed(requests)), latencies_ns, outcome.span_ns / 1e9, usd_per_hour)
    return dataclasses.replace(found, ended_ns=outcome.ended_ns, left=outcome.left)


def _told(
    name: str,
    good: int,
    count: int,
    latencies_ns: Sequence[int],
    seconds: float,
    usd_per_hour: float,
) -> WhatIf:
    usd = usd_per_hour * seconds / _SECONDS_PER_HOUR
    return WhatIf(
        name=name,
        in_time=good / max(1, count),
        goodput_rps=good / seconds,
        p99_ms=float(np.percentile(latencies_ns, 99)) / 1e6 if latencies_ns else None,
        usd_per_hour=usd_per_hour or None,
        usd_per_million=usd / good * 1e6 if usd_per_hour and good else None,
    )
