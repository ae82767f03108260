"""From what was noted of a request or a batch to its spans; pure.

A request's span has a child for each station: `decode`, `queue`, `batch_wait`, `compute`, `encode`, at the times that
`gateway_stage_duration_seconds` counts. A batch has a span of its own in the trace of the first traced request that was part of
it, linked to all of them; within it is what its session did, which is that request's `compute`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from gateway.errors import Code
from gateway.types import BatchTrace, RequestTrace, SpanContext

Kind = Literal["internal", "server", "client"]

# What is not the client's fault: of these, a server's span is an error (semantic conventions of HTTP and RPC).
_FAULTS: Final = frozenset(
    code.value
    for code in (
        Code.BACKEND_FAILED, Code.BACKEND_UNREACHABLE, Code.CONFIG, Code.DEADLINE_EXCEEDED, Code.INTERNAL, Code.NOT_READY,
        Code.OVERLOADED, Code.UNSUPPORTED,
    )
)  # fmt: skip


class _Station(msgspec.Struct):
    name: str
    context: SpanContext
    parent_id: str
    start_ns: int
    end_ns: int


class Span(_Station, kw_only=True):
    """Times: `Clock.now_ns`. failed: as the span's status says it. remote: its parent is in another process."""

    kind: Kind = "internal"
    attributes: Mapping[str, str | int] = {}
    links: tuple[SpanContext, ...] = ()
    failed: bool = False
    remote: bool = False


def span_count(trace: RequestTrace | BatchTrace) -> int:
    """How many spans are made of it, at most."""
    return 2 if isinstance(trace, BatchTrace) else 3 + (3 * len(trace.batches) or 1)


def spans_of(trace: RequestTrace | BatchTrace, new_id: Callable[[], str]) -> list[Span]:
    """new_id: of a span. Whoever calls must have seen the trace end."""
    return [*(_of_batch(trace) if isinstance(trace, BatchTrace) else _of_request(trace, new_id))]


def _of_request(trace: RequestTrace, new_id: Callable[[], str]) -> Iterator[Span]:
    context, error = trace.context, trace.error
    attributes = {**trace.attributes, "error.type": error} if error else trace.attributes
    yield Span(
        trace.operation,
        context,
        trace.parent_id,
        trace.arrival_ns,
        trace.ended_ns,
        kind="server",
        attributes=attributes,
        failed=error in _FAULTS,
        remote=bool(trace.parent_id),
    )
    for name, start_ns, end_ns, batch in _stages(trace):
        links = (batch.context,) if batch is not None else ()
        own = SpanContext(context.trace_id, new_id(), context.state)
        yield Span(name, own, context.span_id, start_ns, end_ns, links=links)


def _stages(trace: RequestTrace) -> Iterator[tuple[str, int, int, BatchTrace | None]]:
    """Each with its begin and end, and the batch in which it passed, where that stands in another trace."""
    if not trace.decoded_ns:
        yield "decode", trace.arrival_ns, trace.encoding_ns, None
        return
    yield "decode", trace.arrival_ns, trace.decoded_ns, None
    waits_from_ns = trace.decoded_ns
    for batch in trace.batches:
        if waits_from_ns:
            yield "queue", waits_from_ns, batch.closed_ns, None
        if batch.returned_ns:
            yield "batch_wait", batch.closed_ns, batch.started_ns, None
            if batch.parent_id != trace.context.span_id:
                yield "compute", batch.started_ns, batch.finished_ns, batch
        waits_from_ns = (
            batch.returned_ns if batch.error else 0
        )  # after a failure it waits again; else it was in several at once
    if not trace.batches:
        yield "queue", trace.decoded_ns, trace.encoding_ns, None
    if not trace.error:
        yield "encode", trace.encoding_ns, trace.ended_ns, None


def _of_batch(trace: BatchTrace) -> Iterator[Span]:
    context, error = trace.context, trace.error
    attributes = {**trace.attributes, "error.type": error} if error else trace.attributes
    yield Span(
        trace.name,
        context,
        trace.parent_id,
        trace.closed_ns,
        trace.returned_ns,
        kind=trace.kind,
        attributes=attributes,
        links=trace.links,
        failed=bool(error),
        remote=trace.kind == "server",
    )
    if trace.kind != "client" and trace.started_ns:
        yield Span("compute", trace.session, context.span_id, trace.started_ns, trace.finished_ns, failed=bool(error))
