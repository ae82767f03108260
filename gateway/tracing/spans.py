"""From what was noted of a request or a batch to its spans; pure.

A request's span has a child for each station: `decode`, `queue`, `batch_wait`, `compute`, `encode`, at the times that
`gateway_stage_duration_seconds` counts. A batch has a span of its own in the trace of the first traced request that was part of
it, linked to all of them; within it is what its session did, which is that request's `compute`.
"""

from typing import Final, Literal

import msgspec

from gateway.errors import Code
from gateway.tracing.context import random_digits, span_id_of, trace_id_of
from gateway.types import Attributes, BatchEnd, BatchTrace, RequestEnd, RequestTrace, SpanContext

Kind = Literal["internal", "server", "client"]

# What is not the client's fault: of these, a server's span is an error (semantic conventions of HTTP and RPC), and a batch's.
_FAULTS: Final = frozenset(
    code.value
    for code in (
        Code.BACKEND_FAILED, Code.BACKEND_UNREACHABLE, Code.CONFIG, Code.DEADLINE_EXCEEDED, Code.INTERNAL, Code.NOT_READY,
        Code.OVERLOADED, Code.UNSUPPORTED,
    )
)  # fmt: skip


# What is noted of a batch by this process; by a replica, the first of it.
_ABOUT_BATCH: Final = (
    "gateway.lane", "gateway.batch.requests", "gateway.batch.rows", "gateway.batch.padded_rows", "gateway.batch.reason",
)  # fmt: skip


Station = tuple[str, int, int, tuple[SpanContext, ...]]
"""A span that says when: its name, from and until when (`Clock.now_ns`), and its links."""


class _Timed(msgspec.Struct):
    name: str
    context: SpanContext
    parent_id: str
    start_ns: int
    end_ns: int
    links: tuple[SpanContext, ...] = ()


class Span(_Timed, kw_only=True):
    """Times: `Clock.now_ns`. failed: as the span's status says it. remote: its parent is in another process.

    ids: attributes too, which no other span has.
    """

    kind: Kind = "internal"
    attributes: Attributes = ()
    ids: tuple[tuple[str, str], ...] = ()
    failed: bool = False
    remote: bool = False


class Spans(msgspec.Struct):
    """Of one request or batch. own: the span of all of it; stations: within it.

    station_id: of the only one, where others have been told of it; empty: they have no ids yet. failed: they all.
    """

    own: Span
    stations: list[Station]
    station_id: str = ""
    failed: bool = False

    def __len__(self) -> int:
        return 1 + len(self.stations)


def spans_of(trace: RequestTrace | BatchTrace) -> list[Spans]:
    """Of it, and of the batches that it has with it. Whoever calls must have seen it end."""
    if isinstance(trace, BatchTrace):
        assert trace.end is not None
        return [_of_batch(trace, trace.end)]
    assert trace.end is not None
    own = _of_request(trace, trace.end)
    return [*[_of_batch(batch, batch.end) for batch in trace.batches if batch.ended is None and batch.end is not None], own]


def number_of(trace: RequestTrace | BatchTrace) -> int:
    """How many spans `spans_of` makes of it."""
    assert trace.end is not None
    if isinstance(trace, BatchTrace):
        return 1 if trace.kind == "client" or not trace.end.started_ns else 2
    end = trace.end
    number = 2 if end.error else 3  # its own, decode and encode
    queued = 1 if end.decoded_ns else 0
    for batch in trace.batches:
        ran = batch.end
        number += queued
        if ran is not None:
            number += 1 if batch.parent == trace.own else 2
            if batch.ended is None:
                number += number_of(batch)
        queued = 1 if ran is not None and ran.error else 0
    return number if trace.batches else number + queued


def _of_request(trace: RequestTrace, end: RequestEnd) -> Spans:
    error = end.error
    own = Span(
        end.operation,
        SpanContext(trace_id_of(trace.own), span_id_of(trace.own), trace.state),
        trace.parent_id,
        end.arrival_ns,
        end.ended_ns,
        kind="server",
        attributes=_attributes(end),
        ids=_ids(end),
        failed=error in _FAULTS,
        remote=bool(trace.parent_id),
    )
    decoded_ns = end.decoded_ns
    if not decoded_ns:
        return Spans(own, [("decode", end.arrival_ns, end.encoding_ns, ())])
    stations: list[Station] = [("decode", end.arrival_ns, decoded_ns, ())]
    waits_from_ns = decoded_ns
    for batch in trace.batches:
        if waits_from_ns:
            stations.append(("queue", waits_from_ns, batch.closed_ns, ()))
        ran = batch.end
        if ran is not None:
            stations.append(("batch_wait", batch.closed_ns, ran.started_ns, ()))
            if batch.parent != trace.own:  # it stands in another trace
                links = (SpanContext(trace_id_of(batch.parent), batch.ids[:16], batch.state),)
                stations.append(("compute", ran.started_ns, ran.finished_ns, links))
        # After a failure it waits again; else it was in several at once.
        waits_from_ns = ran.returned_ns if ran is not None and ran.error else 0
    if not trace.batches:
        stations.append(("queue", decoded_ns, end.encoding_ns, ()))
    if not error:
        stations.append(("encode", end.encoding_ns, end.ended_ns, ()))
    return Spans(own, stations)


def _attributes(end: RequestEnd) -> Attributes:
    told = (end.status, *end.model)
    if end.rows:
        told += (("gateway.rows", end.rows),)
    return (*told, ("error.type", end.error)) if end.error else told


def _ids(end: RequestEnd) -> tuple[tuple[str, str], ...]:
    own = ("gateway.request_id", end.request_id.decode("ascii"))
    return (own, ("gateway.id", end.id.encode(errors="replace").decode())) if end.id else (own,)


def _of_batch(trace: BatchTrace, end: BatchEnd) -> Spans:
    error = end.error
    told = tuple(zip(_ABOUT_BATCH, end.about, strict=False))
    remote = trace.kind == "server"
    trace_id = trace_id_of(trace.parent)
    ids = trace.ids or random_digits(16)
    own = Span(
        trace.name,
        SpanContext(trace_id, ids[:16], trace.state),
        span_id_of(trace.parent),
        trace.closed_ns,
        end.returned_ns,
        () if remote else tuple([SpanContext(trace_id_of(each), span_id_of(each)) for each in trace.links or (trace.parent,)]),
        kind=trace.kind,
        attributes=(*told, ("error.type", error)) if error else told,
        failed=error in _FAULTS,
        remote=remote,
    )
    if trace.kind == "client" or not end.started_ns:
        return Spans(own, [])
    return Spans(own, [("compute", end.started_ns, end.finished_ns, ())], ids[16:], own.failed)
