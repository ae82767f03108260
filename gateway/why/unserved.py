"""Why no backend of a model was to have a request: what routing refused, before it was in any queue."""

from collections.abc import Sequence

from gateway.routing.replay import Unserved
from gateway.why.causes import Cause, Diagnosis


def cause_of(refused: Unserved, lanes: Sequence[Diagnosis]) -> Cause:
    """By what was forecast of the backends. lanes: what was found of those that got requests."""
    if refused.reason == "down":
        return Cause.STALL
    limit_ns = limit_of(refused, lanes)
    alone_ns = [forecast.own_ns for forecast in refused.forecasts if forecast.known]
    if limit_ns is not None and alone_ns and limit_ns - refused.arrival_ns < min(alone_ns):
        return Cause.CUT_OFF
    if refused.forecasts and not any(forecast.workers for forecast in refused.forecasts):
        return Cause.COLD_START
    for lane in lanes:
        for batch in lane.stalled:
            if batch.closed_ns <= refused.now_ns <= (batch.answered_ns or refused.now_ns):
                return Cause.STALL
    return Cause.QUEUE


def limit_of(refused: Unserved, lanes: Sequence[Diagnosis]) -> int | None:
    """When it had to be answered: by the SLO, or by its own deadline, if that is earlier. None: whenever."""
    promised_ns = [lane.settings.slo_ns for lane in lanes if lane.settings.slo_ns is not None]
    limits_ns = [refused.arrival_ns + slo_ns for slo_ns in promised_ns[:1]]
    if refused.own_deadline_ns is not None:
        limits_ns.append(refused.own_deadline_ns)
    return min(limits_ns, default=None)
