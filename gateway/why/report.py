"""What `gateway why` says: of a model's recording, and of one request in it; for people and for programs."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gateway.batching.checkpoint import thaw
from gateway.batching.queue import NEVER
from gateway.batching.recorded_file import LaneRecording, ModelRecording
from gateway.batching.replay import FATES, History, PastRequest, replay
from gateway.batching.service_model import ServiceModel
from gateway.errors import InvalidArgument
from gateway.process.console import printable
from gateway.routing.replay import RoutingHistory, Unserved, replay_routing
from gateway.why.causes import REMEDIES, Cause, Diagnosis, Miss, diagnose
from gateway.why.unserved import cause_of, limit_of
from gateway.why.whatif import WhatIf, as_it_was, what_ifs

_BROKEN: Final = (  # what a file that is damaged may raise wherever it is looked into; and, after the replay, a fault of ours
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, StopIteration, TypeError, ValueError,
)  # fmt: skip
_SERVED: Final = ("answered", "waiting", "running")


@dataclass(frozen=True, slots=True)
class LaneAnswer:
    """Of one backend in one process."""

    diagnosis: Diagnosis
    cases: tuple[WhatIf, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one model in one process. lanes: of the backends that got requests. unserved: what routing refused, and why."""

    recording: ModelRecording
    lanes: tuple[LaneAnswer, ...]
    routing: RoutingHistory | None = None
    unserved: tuple[tuple[Unserved, Cause], ...] = ()


def answer(recording: ModelRecording, source: str) -> Answer:
    """Replay a recording and look into each miss, and what else would have served it. Raises: InvalidArgument."""
    begun = [lane for lane in recording.lanes if lane.segments]
    try:
        histories = [replay(lane.recorded(), recording.now_ns) for lane in begun]
        routing = replay_routing(recording.routing) if recording.routing else None
    except _BROKEN as exc:
        raise InvalidArgument(f"{source}: {recording.model}: a recording that is broken ({_said(exc)}): save it again") from exc
    try:
        return _answer(recording, begun, histories, routing)
    except _BROKEN as exc:
        raise InvalidArgument(
            f"{source}: {recording.model}: replayed, but not understood ({_said(exc)}): save it again; if that changes "
            "nothing, it is a fault of ours"
        ) from exc


def _said(exc: Exception) -> str:
    words, kind = str(exc).partition("\n")[0], type(exc).__name__
    return words if isinstance(exc, ValueError) else f"{kind}: {words}".removesuffix(": ")


def _answer(
    recording: ModelRecording,
    begun: Sequence[LaneRecording],
    histories: Sequence[History],
    routing: RoutingHistory | None,
) -> Answer:
    _follow(histories)
    learned = [partial(_learned, lane) for lane in begun]
    diagnosed = [
        (diagnose(history, lane.settings, knew), knew) for history, lane, knew in zip(histories, begun, learned, strict=True)
    ]
    lanes = []
    for diagnosis, knew in diagnosed:
        if not diagnosis.history.requests:
            continue
        others = [other for other, _ in diagnosed if other is not diagnosis]
        found = [as_it_was(diagnosis)]
        if diagnosis.history.difference is None and diagnosis.history.kept:
            found += what_ifs(diagnosis, knew, others)
        lanes.append(LaneAnswer(diagnosis, tuple(found)))
    unserved: tuple[tuple[Unserved, Cause], ...] = ()
    if routing is not None:
        found_out = [diagnosis for diagnosis, _ in diagnosed]
        unserved = tuple((refused, cause_of(refused, found_out)) for refused in routing.unserved)
    return Answer(recording, tuple(lanes), routing, unserved)


def _follow(histories: Sequence[History]) -> None:
    """Note which of the requests that one backend did not serve another has taken over: they are no misses of the first."""
    if len(histories) < 2:
        return
    stays: defaultdict[tuple[int, str, int], list[tuple[int, PastRequest]]] = defaultdict(list)
    for at, history in enumerate(histories):
        for request in history.requests:
            stays[_identity(request)].append((at, request))
    for met in stays.values():
        if len({at for at, _ in met}) == 1:  # several in one backend alone are several requests of one moment
            continue
        last = max([request for _, request in met], key=_lastness)
        for _, request in met:
            if request is not last and request.fate not in _SERVED:
                request.fate = "handed over"


def _lastness(request: PastRequest) -> tuple[bool, int]:
    """Of its stays in backends, the greatest is where it was answered or is now, else where it ended last."""
    return request.fate in _SERVED, request.ended_ns or 0


def _identity(request: PastRequest) -> tuple[int, str, int]:
    return request.arrival_ns, request.own_id, request.rows


def _learned(lane: LaneRecording) -> ServiceModel:
    batcher, _ = thaw(lane.segments[0]["state"])
    service: ServiceModel = batcher.service
    return service


# for people


def told(answers: Sequence[Answer]) -> str:
    """A block for each backend of each model and process."""
    blocks = []
    met = Counter((each.recording.model, each.recording.version) for each in answers)
    for each in answers:
        recording = each.recording
        process = f", process {recording.process}" if recording.processes > 1 else ""
        routed = each.routing.routed if each.routing is not None else 0
        if not each.lanes and not routed and not recording.unrecorded:
            blocks.append(f"{recording.model} version {recording.version}{process}: no request has come")
        if each.routing is not None and each.routing.routed:
            blocks.append(_routing_block(each, each.routing, process))
        blocks += [_block(recording, lane, process) for lane in each.lanes]
        blocks += [
            f"{recording.model} version {recording.version}{f' on {label}' if label else ', routing'}{process}: its decisions "
            f"are no longer recorded, until the model is loaded anew: {reason}"
            for label, reason in recording.unrecorded.items()
        ]
    for (model, version), count in met.items():
        processes = max(each.recording.processes for each in answers if each.recording.model == model)
        if count < processes:
            blocks.append(
                f"{model} version {version}: this is of {count} of {processes} processes. The others were not met: ask again, "
                "and each node by its own address"
            )
    return "\n\n".join(blocks)


def _block(recording: ModelRecording, lane: LaneAnswer, process: str) -> str:
    diagnosis = lane.diagnosis
    history, settings = diagnosis.history, diagnosis.settings
    seconds = (history.end_ns - history.begin_ns) / 1e9
    slo = f"SLO {settings.slo_ns / 1e6:g} ms" if settings.slo_ns else "no SLO"
    kept = len(history.kept)
    lines = [
        f"{recording.model} version {recording.version} on {settings.label}{process}: {kept} requests in {seconds:.1f} s, {slo}"
    ]
    if history.difference is None:
        lines.append(f"replayed: {history.decisions} decisions, all the same")
    else:
        lines.append(
            f"replayed: {history.decisions} decisions, the last one came out otherwise: this is another release, or a fault of "
            f"ours; {history.difference}"
        )
    if not history.from_start:
        lines.append("what came before had no room: batching.record_mib is for more")
    if kept < len(history.requests):
        lines.append(f"handed over to others: {len(history.requests) - kept}, which count for them alone")
    count = len(diagnosis.misses)
    if not count:
        lines.append("nothing was late or refused")
    else:
        lines.append(f"late or refused: {count} ({count / kept:.1%})")
        rows = [("cause", "requests", "share", "when", "what to do")]
        for cause, number in diagnosis.by_cause.most_common():
            of_it = [miss for miss in diagnosis.misses if miss.cause is cause]
            rows.append((cause.value, str(number), f"{number / count:.0%}", _when(of_it, recording), REMEDIES[cause]))
        lines += _table(rows)
        late = [miss for miss in diagnosis.misses if miss.late_ns is not None]
        if late:
            worst = max(late, key=lambda miss: miss.late_ns or 0)
            name = f" (request {worst.request.own_id!r})" if worst.request.own_id else ""
            lines.append(f"answered late: {len(late)}, by {(worst.late_ns or 0) / 1e6:.1f} ms at most{name}")
    if diagnosis.failed:
        lines.append(f"failed: {diagnosis.failed} ({diagnosis.failed / kept:.1%}): the server's log says why")
    if settings.decoupled:
        lines.append(
            "it answers in parts: times are to the first one. What would have been is not simulated, as it is not recorded how "
            "long the rest keeps a session"
        )
    if len(lane.cases) > 1:
        lines.append("what would have been (simulated: the same arrivals, times as they were seen)")
        head = ("case", "in time", "goodput/s", "p99 ms", "USD/h", "USD per million in time")
        lines += _table([head, *(_case(case) for case in lane.cases)])
        if settings.lent and settings.session_usd_per_hour:
            lines.append("USD: all processes use these sessions: `gateway top` has their price, and that of a million answers")
    return "\n".join(lines)


def _routing_block(answer: Answer, routing: RoutingHistory, process: str) -> str:
    recording = answer.recording
    lines = [f"{recording.model} version {recording.version}, routing{process}: {routing.routed} requests"]
    if routing.difference:
        lines.append(f"replayed: {routing.decisions} decisions, the last one came out otherwise: {routing.difference}")
    else:
        lines.append(f"replayed: {routing.decisions} decisions, all the same")
    if answer.unserved:
        count = len(answer.unserved)
        lines.append(f"refused, as no backend would have been in time: {count} ({count / routing.routed:.1%})")
        rows = [("cause", "requests", "share", "when", "what to do")]
        for cause, number in Counter(cause for _, cause in answer.unserved).most_common():
            arrivals_ns = [refused.arrival_ns for refused, why in answer.unserved if why is cause]
            rows.append((cause.value, str(number), f"{number / count:.0%}", _ago(arrivals_ns, recording), REMEDIES[cause]))
        lines += _table(rows)
    return "\n".join(lines)


def _when(misses: Sequence[Miss], recording: ModelRecording) -> str:
    return _ago([miss.request.arrival_ns for miss in misses], recording)


def _ago(arrivals_ns: Sequence[int], recording: ModelRecording) -> str:
    first, last = [(recording.now_ns - at_ns) / 1e9 for at_ns in (arrivals_ns[0], arrivals_ns[-1])]
    return f"{first:.1f} to {last:.1f} s ago" if len(arrivals_ns) > 1 else f"{first:.1f} s ago"


def _case(case: WhatIf) -> tuple[str, ...]:
    return (
        case.name,
        f"{case.in_time:.2%}",
        f"{case.goodput_rps:.4g}",
        "-" if case.p99_ms is None else f"{case.p99_ms:.1f}",
        "-" if case.usd_per_hour is None else f"{case.usd_per_hour:.4g}",
        "-" if case.usd_per_million is None else f"{case.usd_per_million:.4g}",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# one request


def of_request(answers: Iterable[Answer], own_id: str) -> list[dict[str, Any]]:
    """What became of each request that a client called so; empty, if none did. backend: None, where routing refused it."""
    found = []
    for each in answers:
        for lane in each.lanes:
            causes = {id(miss.request): miss for miss in lane.diagnosis.misses}
            history = lane.diagnosis.history
            kept = {id(request): at for at, request in enumerate(history.kept)}
            for request in history.requests:
                if _same(request.own_id, own_id):
                    found.append(_life(each.recording, lane, kept.get(id(request)), request, causes.get(id(request))))
        found += [_refused(each, refused, cause) for refused, cause in each.unserved if _same(refused.own_id, own_id)]
    return found


def _same(kept: str, asked: str) -> bool:
    return kept == asked or (len(kept) == 64 and asked.startswith(kept))


def _refused(answer: Answer, refused: Unserved, cause: Cause) -> dict[str, Any]:
    """As `_life`, of what was with no backend. fate: as `as_json` has it."""
    recording = answer.recording
    limit_ns = limit_of(refused, [lane.diagnosis for lane in answer.lanes])
    return {
        "model": recording.model,
        "version": recording.version,
        "backend": None,
        "process": recording.process,
        "id": refused.own_id,
        "ago_s": round((recording.now_ns - refused.arrival_ns) / 1e9, 3),
        "rows": refused.rows,
        "fate": refused.reason,
        "limit_ms": None if limit_ns is None else round((limit_ns - refused.arrival_ns) / 1e6, 3),
        "queued_ms": None,
        "rows_before_it": None,
        "closed_ms": None,
        "ended_ms": round((refused.now_ns - refused.arrival_ns) / 1e6, 3),
        "batch": None,
        "cause": cause.value,
        "remedy": REMEDIES[cause],
        "would_have": {},
    }


def _life(
    recording: ModelRecording, lane: LaneAnswer, at: int | None, request: PastRequest, miss: Miss | None
) -> dict[str, Any]:
    """at: its place among the requests that the backend kept; None: it did not."""

    def ms(when_ns: int | None) -> float | None:
        return None if when_ns is None else round((when_ns - request.arrival_ns) / 1e6, 3)

    batch = request.batches[-1] if request.batches else None
    limit_ns = None if request.limit_ns == NEVER else request.limit_ns
    served = {}
    for case in lane.cases:
        if case.ended_ns and at is not None and request.fate != "failed":
            ended_ns = case.ended_ns[at]
            served[case.name] = {
                "ended_ms": ms(ended_ns),
                "in_time": ended_ns is not None and ended_ns <= request.limit_ns,
                "left": at in case.left,
            }
    return {
        "model": recording.model,
        "version": recording.version,
        "backend": lane.diagnosis.settings.label,
        "process": recording.process,
        "id": request.own_id,
        "ago_s": round((recording.now_ns - request.arrival_ns) / 1e9, 3),
        "rows": request.rows,
        "fate": request.fate,
        "limit_ms": ms(limit_ns),
        "queued_ms": ms(request.added_ns),
        "rows_before_it": request.queued_rows,
        "closed_ms": ms(request.closed_ns),
        "ended_ms": ms(request.ended_ns),
        "batch": None
        if batch is None
        else {
            "reason": batch.reason,
            "rows": batch.rows,
            "padded_rows": batch.padded_rows,
            "took_ms": None if batch.ended_ns is None else round((batch.ended_ns - batch.closed_ns) / 1e6, 3),
            "expected_ms": round(batch.likely_ns / 1e6, 3) or None,
            "nine_in_ten_ms": round(batch.bound_ns / 1e6, 3) or None,
        },
        "cause": None if miss is None else miss.cause.value,
        "remedy": None if miss is None else REMEDIES[miss.cause],
        "would_have": served,
    }


def life_told(life: dict[str, Any]) -> str:
    """One of `of_request` for people. Times count from its arrival."""
    on = f"on {life['backend']}" if life["backend"] is not None else "with no backend"
    head = f"{printable(life['id'])}: {life['model']} version {life['version']} {on}, {life['ago_s']:.1f} s ago"
    lines = [head, f"  {_fate(life)}"]
    if life["queued_ms"] is not None:
        lines.append(f"  {life['queued_ms']:8.1f} ms  queued, behind {life['rows_before_it']} rows")
    batch = life["batch"]
    if batch is not None:
        padded = f", padded to {batch['padded_rows']}" if batch["padded_rows"] > batch["rows"] else ""
        lines.append(f"  {life['closed_ms']:8.1f} ms  its batch was closed ({batch['reason']}): {batch['rows']} rows{padded}")
        if batch["took_ms"] is not None:
            of = f", expected {batch['expected_ms']:.1f}" if batch["expected_ms"] else ""
            lines.append(f"  {life['closed_ms'] + batch['took_ms']:8.1f} ms  it ended, after {batch['took_ms']:.1f} ms{of}")
    if life["limit_ms"] is not None:
        lines.append(f"  {life['limit_ms']:8.1f} ms  its limit")
    if life["cause"]:
        lines.append(f"  cause: {life['cause']}; {life['remedy']}")
    for name, would in life["would_have"].items():
        when = "left" if would["left"] else "refused" if would["ended_ms"] is None else f"{would['ended_ms']:.1f} ms"
        lines.append(f"  {name}: {when}{', in time' if would['in_time'] else ''} (simulated)")
    return "\n".join(lines)


def _fate(life: dict[str, Any]) -> str:
    fate, limit_ms, ended_ms = life["fate"], life["limit_ms"], life["ended_ms"]
    if fate == "answered":
        if limit_ms is not None and ended_ms > limit_ms:
            return f"answered after {ended_ms:.1f} ms, {ended_ms - limit_ms:.1f} ms late"
        return f"answered after {ended_ms:.1f} ms, in time"
    if fate in FATES:
        return str(fate) if ended_ms is None else f"{fate} after {ended_ms:.1f} ms"
    return f"refused after {ended_ms:.1f} ms ({fate})"


# for programs


def as_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """All that is known, but the single requests that were in time. backend: None, of what routing refused.

    unrecorded: of the model's backends, as a `ModelRecording` has it.
    """
    return [
        {
            "model": each.recording.model,
            "version": each.recording.version,
            "process": each.recording.process,
            "unrecorded": each.recording.unrecorded,
            "backend": lane.diagnosis.settings.label,
            "slo_ms": lane.diagnosis.settings.slo_ns / 1e6 if lane.diagnosis.settings.slo_ns else None,
            "seconds": (lane.diagnosis.history.end_ns - lane.diagnosis.history.begin_ns) / 1e9,
            "requests": len(lane.diagnosis.history.kept),
            "handed_over": len(lane.diagnosis.history.requests) - len(lane.diagnosis.history.kept),
            "decisions": lane.diagnosis.history.decisions,
            "same": lane.diagnosis.history.difference is None,
            "difference": str(lane.diagnosis.history.difference) if lane.diagnosis.history.difference else None,
            "complete": lane.diagnosis.history.from_start,
            "missed": len(lane.diagnosis.misses),
            "failed": lane.diagnosis.failed,
            "causes": {cause.value: lane.diagnosis.by_cause.get(cause, 0) for cause in Cause},
            "misses": [
                {
                    "id": miss.request.own_id,
                    "ago_s": round((each.recording.now_ns - miss.request.arrival_ns) / 1e9, 6),
                    "cause": miss.cause.value,
                    "fate": miss.request.fate,
                    "late_ms": None if miss.late_ns is None else miss.late_ns / 1e6,
                }
                for miss in lane.diagnosis.misses
            ],
            "cases": [
                {
                    "name": case.name,
                    "simulated": bool(case.ended_ns),
                    "in_time": case.in_time,
                    "goodput_rps": case.goodput_rps,
                    "p99_ms": case.p99_ms,
                    "usd_per_hour": case.usd_per_hour,
                    "usd_per_million_in_time": case.usd_per_million,
                }
                for case in lane.cases
            ],
        }
        for each in answers
        for lane in each.lanes
    ] + [
        {
            "model": each.recording.model,
            "version": each.recording.version,
            "process": each.recording.process,
            "unrecorded": each.recording.unrecorded,
            "backend": None,
            "requests": each.routing.routed,
            "decisions": each.routing.decisions,
            "same": not each.routing.difference,
            "difference": each.routing.difference or None,
            "missed": len(each.unserved),
            "causes": {cause.value: sum(why is cause for _, why in each.unserved) for cause in Cause},
            "misses": [
                {
                    "id": refused.own_id,
                    "ago_s": round((each.recording.now_ns - refused.arrival_ns) / 1e9, 6),
                    "cause": cause.value,
                    "fate": refused.reason,
                    "late_ms": None,
                }
                for refused, cause in each.unserved
            ],
            "cases": [],
        }
        for each in answers
        if each.routing is not None and each.routing.routed
    ]
