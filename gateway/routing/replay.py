"""Does again what a `RecordedRouter` has recorded: the same decisions, from what was seen of the lanes."""

from dataclasses import dataclass, field
from typing import Any, Final

from gateway.batching.checkpoint import ROUTING, request_like, thaw
from gateway.batching.forecast import Forecast
from gateway.batching.recording import as_read
from gateway.routing.policies import Candidate
from gateway.routing.recording import RecordedRouter, RoutingEvent, SaidLane
from gateway.routing.router import Copy

_INPUTS: Final = (RoutingEvent.SENT, RoutingEvent.RETURNED, RoutingEvent.WOKEN, RoutingEvent.LIVES)


@dataclass(frozen=True, slots=True)
class Unserved:
    """A request that no backend was to have. reason: late or down. forecasts: of the backends that were asked."""

    own_id: str
    now_ns: int
    arrival_ns: int
    own_deadline_ns: int | None
    rows: int
    reason: str
    forecasts: tuple[Forecast, ...]


@dataclass(slots=True)
class RoutingHistory:
    """What a replay gives. decisions: that were compared. difference: the first that came out otherwise; empty: none did."""

    decisions: int = 0
    difference: str = ""
    routed: int = 0
    unserved: list[Unserved] = field(default_factory=list)


def replay_routing(recorded: dict[str, Any]) -> RoutingHistory:
    """recorded: what `Ring.dump` gave, packed and read again. Raises: ValueError, if it is something else."""
    history = RoutingHistory()
    for index, segment in enumerate(recorded["segments"]):
        router, _ = thaw(segment["state"], ROUTING)
        if not isinstance(router, RecordedRouter):
            raise ValueError(f"segment {index}: expected the state of a router")
        said, told = SaidLane(), list[tuple[Any, ...]]()
        router.replayed(said, told)
        by_label = {candidate.label: candidate for candidate in router.candidates}
        events = [event for chunk in segment["chunks"] for event in chunk]
        for at, event in enumerate(events):
            try:
                _replay(router, said, by_label, event)
                replayed: Any = as_read(told.pop())
            except (ValueError, IndexError) as exc:
                replayed = str(exc)
            history.decisions += event[0] not in _INPUTS
            if replayed != event:
                name = RoutingEvent(event[0]).name.lower()
                history.difference = f"segment {index}, event {at} ({name}): recorded {event}, replayed {replayed}"
                return history
            if event[0] == RoutingEvent.ROUTED:
                _note(history, event)
    return history


def _note(history: RoutingHistory, event: list[Any]) -> None:
    _, now_ns, arrival_ns, deadline_ns, rows, own_id, failed, seen, label, reason, _ = event
    if failed is not None:
        return  # it is with a lane, which answers it
    history.routed += 1
    if label is None:
        forecasts = tuple(Forecast(*value) for value in seen if isinstance(value, list))
        history.unserved.append(Unserved(own_id, now_ns, arrival_ns, deadline_ns, rows, reason, forecasts))


def _replay(router: RecordedRouter, said: SaidLane, by_label: dict[str, Candidate], event: list[Any]) -> None:
    kind = event[0]
    if kind == RoutingEvent.ROUTED:
        _, now_ns, arrival_ns, deadline_ns, rows, own, failed, seen, *_ = event
        said.say(seen)
        request = request_like(arrival_ns, rows, deadline_ns, 0, None, own, None)
        out = [by_label[label] for label in failed or ()]
        router.route(request, now_ns, failed=out[0] if out else None, full=out[1:])
    elif kind == RoutingEvent.COPIED:
        _, now_ns, arrival_ns, deadline_ns, rows, seen, _ = event
        said.say(seen)
        router.copies(request_like(arrival_ns, rows, deadline_ns, 0, None, "", None), now_ns)
    elif kind == RoutingEvent.TAUGHT:
        router.lessons()
    elif kind == RoutingEvent.SENT:
        _, label, why, expected_ns, now_ns = event
        router.sent(Copy(by_label[label], why, expected_ns), now_ns)
    elif kind == RoutingEvent.RETURNED:
        _, label, why, expected_ns, now_ns, took_ns, ok = event
        router.returned(Copy(by_label[label], why, expected_ns), now_ns, took_ns, ok=ok)
    elif kind == RoutingEvent.EXECUTED:
        _, label, rows, busy_ns, expected_ns, now_ns, streamed_ns, copied, seen, _ = event
        said.say(seen)
        router.executed(by_label[label], rows, busy_ns, expected_ns, now_ns, streamed_ns=streamed_ns, copied=copied)
    elif kind == RoutingEvent.FAILED:
        _, label, now_ns, hung, seen, _ = event
        said.say(seen)
        router.failed(by_label[label], now_ns, hung=hung)
    elif kind == RoutingEvent.WOKEN:
        router.woken(by_label[event[1]], event[2])
    elif kind == RoutingEvent.LIVES:
        router.lives(by_label[event[1]], event[2])
    elif kind == RoutingEvent.EXPLAINED:
        _, now_ns, rows, seen = event
        said.say(seen)
        router.explain(request_like(now_ns, rows, None, 0, None, "", None), now_ns)
    else:
        raise ValueError(f"an event of an unknown kind: {event}")
