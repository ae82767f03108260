"""What is noted of a batch with traced requests, where it is closed and where it is run."""

from collections.abc import Mapping

from backends.base import TRACEPARENT, TRACESTATE
from gateway.batching.batch import Batch
from gateway.errors import GatewayError
from gateway.tracing.context import random_digits, read, trace_id_of, write
from gateway.types import BatchEnd, BatchTrace, SpanContext, TraceEnded


def batch_begun(batch: Batch, tells: bool) -> None:
    """A batch is closed: note it with its traced requests, if there are any. tells: whether its session is told of them."""
    traced = [trace for part in batch.parts if (trace := part.request.trace) is not None]
    if not traced:
        return
    first, *others = dict.fromkeys(traced)  # parts of one request may share a batch
    batch.trace = noted = BatchTrace(first.own, first.state, None, "batch", batch.closed_ns)
    first.batches.append(noted)
    if others:  # their spans name those of the batch
        noted.ended, noted.ids = first.ended, random_digits(16)
        noted.links = (first.own, *[trace.own for trace in others])
        for trace in others:
            trace.batches.append(noted)
    if tells:
        _tell(noted)


def batch_ended(
    trace: BatchTrace, batch: Batch, lane: str, started_ns: int, finished_ns: int, returned_ns: int, error: GatewayError | None
) -> None:
    """lane: "model:version/backend". started_ns, finished_ns: of its session. returned_ns: when its outputs were here."""
    about = lane, len(batch.parts), batch.rows, batch.padded_rows, batch.reason
    trace.end = BatchEnd(started_ns, finished_ns, returned_ns, "" if error is None else error.code.value, about)
    if trace.ended is not None:
        trace.ended(trace)


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
    assert trace.ended is not None
    trace.end = BatchEnd(started_ns, finished_ns, now_ns, "" if error is None else error.code.value, (lane,))
    trace.ended(trace)


def _tell(trace: BatchTrace) -> None:
    trace.ids = trace.ids or random_digits(16)
    trace.told = _named(trace, trace.ids[16:])


def _named(trace: BatchTrace, span_id: str) -> dict[str, str]:
    """One of its spans, by the names under which sessions find it among their parameters."""
    told = {TRACEPARENT: write(SpanContext(trace_id_of(trace.parent), span_id)).decode()}
    return told | {TRACESTATE: trace.state} if trace.state else told
