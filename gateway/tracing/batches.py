"""What is noted of a batch with traced requests, where it is closed and where it is run."""

from collections.abc import Mapping

from backends.base import TRACEPARENT, TRACESTATE
from gateway.batching.batch import Batch
from gateway.errors import GatewayError
from gateway.tracing.context import random_digits, read, trace_id_of, write
from gateway.types import BatchEnd, BatchTrace, SpanContext, TraceEnded


def batch_begun(batch: Batch, tells: bool) -> None:
    """A batch is closed: note it with its traced requests, if there are any. tells: whether its session is told of them."""
    traces = [part.request.trace for part in batch.parts if part.request.trace is not None]
    if not traces:
        return
    if len(traces) > 1:  # as parts of one request may be
        traces = list(dict.fromkeys(traces))
    first = traces[0]
    if len(traces) > 1:  # the spans of each name those of the batch
        links = tuple([trace.own for trace in traces])
        noted = BatchTrace(first.own, first.state, first.ended, "batch", batch.closed_ns, links, random_digits(16))
    else:
        noted = BatchTrace(first.own, first.state, None, "batch", batch.closed_ns)
    if tells:
        _tell(noted)
    batch.trace = noted
    for trace in traces:
        trace.batches.append(noted)


def batch_ended(
    trace: BatchTrace, batch: Batch, lane: str, started_ns: int, finished_ns: int, returned_ns: int, error: GatewayError | None
) -> None:
    """lane: "model:version/backend". started_ns, finished_ns: of its session. returned_ns: when its outputs were here."""
    about = lane, len(batch.parts), batch.rows, batch.padded_rows, batch.reason
    _end(trace, BatchEnd(started_ns, finished_ns, returned_ns, "" if error is None else error.code.value, about))


def handed_on(trace: BatchTrace) -> Mapping[str, str]:
    """What tells a replica of the batch that it is to run: it has spans of its own."""
    trace.kind = "client"
    trace.ids = trace.ids or random_digits(16)
    return _named(trace, trace.ids[:16])


def received(told: Mapping[str, str], ended: TraceEnded, now_ns: int) -> BatchTrace | None:
    """What a replica notes of a batch that came. told: as `handed_on` has made it; None: it is no trace."""
    parent = told.get(TRACEPARENT, "").encode()
    found = read(parent, told.get(TRACESTATE, "").encode())
    if found is None:
        return None
    trace = BatchTrace(parent, found[0].state, ended, "replica", now_ns, kind="server")
    _tell(trace)
    return trace


def run_ended(trace: BatchTrace, lane: str, started_ns: int, finished_ns: int, now_ns: int, error: GatewayError | None) -> None:
    """Of a batch that was `received`."""
    _end(trace, BatchEnd(started_ns, finished_ns, now_ns, "" if error is None else error.code.value, (lane,)))


def _end(trace: BatchTrace, end: BatchEnd) -> None:
    trace.end = end
    if trace.ended is not None:
        trace.ended(trace)


def _tell(trace: BatchTrace) -> None:
    trace.ids = trace.ids or random_digits(16)
    trace.told = _named(trace, trace.ids[16:])


def _named(trace: BatchTrace, span_id: str) -> dict[str, str]:
    """One of its spans, by the names under which sessions find it among their parameters."""
    told = {TRACEPARENT: write(SpanContext(trace_id_of(trace.parent), span_id)).decode()}
    return told | {TRACESTATE: trace.state} if trace.state else told
