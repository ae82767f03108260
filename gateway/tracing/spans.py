"""From what was noted of a request or a batch to its spans; pure.

A request's span has a child for each station: `decode`, `queue`, `batch_wait`, `compute`, `encode`, at the times that
`gateway_stage_duration_seconds` counts. A batch has a span of its own in the trace of the first traced request that was part of
it, linked to all of them; within it is what its session did, which is that request's `compute`.
"""

from typing import Final, Literal

import msgspec

from gateway.errors import Code
from gateway.types import Attributes, BatchTrace, RequestTrace, SpanContext

Kind = Literal["internal", "server", "client"]

# What is not the client's fault: of these, a server's span is an error (semantic conventions of HTTP and RPC).
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


def span_count(trace: RequestTrace | BatchTrace) -> int:
    """How many spans are made of it, at most."""
    return 2 if isinstance(trace, BatchTrace) else 3 + (5 * len(trace.batches) or 1)


def spans_of(trace: RequestTrace | BatchTrace) -> list[Spans]:
    """Of it, and of the batches that it has with it. Whoever calls must have seen it end."""
    if isinstance(trace, BatchTrace):
        return [_of_batch(trace)]
    return [*[_of_batch(batch) for batch in trace.batches if batch.ended is None], _of_request(trace)]


def _of_request(trace: RequestTrace) -> Spans:
    context, error = trace.context, trace.error
    own = Span(
        trace.operation,
        context,
        trace.parent_id,
        trace.arrival_ns,
        trace.ended_ns,
        kind="server",
        attributes=_attributes(trace),
        ids=_ids(trace),
        failed=error in _FAULTS,
        remote=bool(trace.parent_id),
    )
    if not trace.decoded_ns:
        return Spans(own, [("decode", trace.arrival_ns, trace.encoding_ns, ())])
    stations: list[Station] = [("decode", trace.arrival_ns, trace.decoded_ns, ())]
    waits_from_ns = trace.decoded_ns
    for batch in trace.batches:
        if waits_from_ns:
            stations.append(("queue", waits_from_ns, batch.closed_ns, ()))
        if batch.returned_ns:
            stations.append(("batch_wait", batch.closed_ns, batch.started_ns, ()))
            if batch.parent_id != context.span_id:  # it stands in another trace
                stations.append(("compute", batch.started_ns, batch.finished_ns, (batch.context,)))
        # After a failure it waits again; else it was in several at once.
        waits_from_ns = batch.returned_ns if batch.error else 0
    if not trace.batches:
        stations.append(("queue", trace.decoded_ns, trace.encoding_ns, ()))
    if not error:
        stations.append(("encode", trace.encoding_ns, trace.ended_ns, ()))
    return Spans(own, stations)


def _attributes(trace: RequestTrace) -> Attributes:
    told = (trace.status, *trace.model)
    if trace.rows:
        told += (("gateway.rows", trace.rows),)
    return (*told, ("error.type", trace.error)) if trace.error else told


def _ids(trace: RequestTrace) -> tuple[tuple[str, str], ...]:
    own = ("gateway.request_id", trace.request_id.decode("ascii"))
    return (own, ("gateway.id", trace.id.encode(errors="replace").decode())) if trace.id else (own,)


def _of_batch(trace: BatchTrace) -> Spans:
    error = trace.error
    told = tuple(zip(_ABOUT_BATCH, trace.about, strict=False))
    own = Span(
        trace.name,
        trace.context,
        trace.parent_id,
        trace.closed_ns,
        trace.returned_ns,
        trace.links,
        kind=trace.kind,
        attributes=(*told, ("error.type", error)) if error else told,
        failed=bool(error),
        remote=trace.kind == "server",
    )
    if trace.kind == "client" or not trace.started_ns:
        return Spans(own, [])
    return Spans(own, [("compute", trace.started_ns, trace.finished_ns, ())], trace.session.span_id, bool(error))
