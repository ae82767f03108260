"""What is noted of a batch with traced requests, where it is closed and where it is run."""

from collections.abc import Mapping
from typing import Literal

from backends.base import TRACEPARENT, TRACESTATE
from gateway.batching.batch import Batch
from gateway.errors import GatewayError
from gateway.tracing.context import random_digits, read, write
from gateway.types import BatchTrace, SpanContext, TraceEnded


def batch_begun(batch: Batch) -> None:
    """A batch is closed: note it with its traced requests, if there are any."""
    traces = [part.request.trace for part in batch.parts if part.request.trace is not None]
    if not traces:
        return
    if len(traces) > 1:  # as parts of one request may be
        traces = list(dict.fromkeys(traces))
    first = traces[0]
    if len(traces) > 1:
        links = tuple([trace.context for trace in traces])
        noted = _noted(first.context, first.ended, "batch", batch.closed_ns, links)
    else:
        noted = first.lone or lone_batch(first.context)
        noted.closed_ns = batch.closed_ns
        first.lone = None
    batch.trace = noted
    for trace in traces:
        trace.batches.append(noted)


def lone_batch(context: SpanContext) -> BatchTrace:
    """What will be noted of a batch whose only traced request has this span. It says when the batch is closed once it is."""
    return _noted(context, None, "batch", 0, (context,))


def batch_ended(
    trace: BatchTrace, batch: Batch, lane: str, started_ns: int, finished_ns: int, returned_ns: int, error: GatewayError | None
) -> None:
    """lane: "model:version/backend". started_ns, finished_ns: of its session. returned_ns: when its outputs were here."""
    trace.about = (lane, len(batch.parts), batch.rows, batch.padded_rows, batch.reason)
    _end(trace, started_ns, finished_ns, returned_ns, error)


def handed_on(trace: BatchTrace) -> Mapping[str, str]:
    """What tells a replica of the batch that it is to run: it has spans of its own."""
    trace.kind = "client"
    return _told(trace.context)


def received(told: Mapping[str, str], ended: TraceEnded, now_ns: int) -> BatchTrace | None:
    """What a replica notes of a batch that came. told: as `handed_on` has made it; None: it is no trace."""
    found = read(told.get(TRACEPARENT, "").encode(), told.get(TRACESTATE, "").encode())
    return _noted(found[0], ended, "replica", now_ns) if found is not None else None


def run_ended(trace: BatchTrace, lane: str, started_ns: int, finished_ns: int, now_ns: int, error: GatewayError | None) -> None:
    """Of a batch that was `received`."""
    trace.about = (lane,)
    _end(trace, started_ns, finished_ns, now_ns, error)


def _noted(
    parent: SpanContext, ended: TraceEnded | None, name: str, closed_ns: int, links: tuple[SpanContext, ...] = ()
) -> BatchTrace:
    """links: none, where the parent is in another process."""
    ids = random_digits(16)
    context = SpanContext(parent.trace_id, ids[:16], parent.state)
    session = SpanContext(parent.trace_id, ids[16:], parent.state)
    kind: Literal["internal", "server"] = "internal" if links else "server"
    return BatchTrace(context, parent.span_id, session, _told(session), ended, name, closed_ns, links=links, kind=kind)


def _end(trace: BatchTrace, started_ns: int, finished_ns: int, returned_ns: int, error: GatewayError | None) -> None:
    trace.started_ns, trace.finished_ns, trace.returned_ns = started_ns, finished_ns, returned_ns
    if error is not None:
        trace.error = error.code.value
    if trace.ended is not None:
        trace.ended(trace)


def _told(context: SpanContext) -> dict[str, str]:
    """By the names under which sessions find it among their parameters."""
    told = {TRACEPARENT: write(context)}
    return told | {TRACESTATE: context.state} if context.state else told
