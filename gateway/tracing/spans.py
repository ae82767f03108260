"""From what was noted of a request or a batch to its spans; pure.

A request's span has a child for each station: `decode`, `queue`, `batch_wait`, `compute`, `encode`, at the times that
`gateway_stage_duration_seconds` counts. A batch has a span of its own in the trace of the first traced request that was part of
it, linked to all of them; within it is what its session did, which is that request's `compute`.
"""

from collections.abc import Callable, Mapping
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
    links: tuple[SpanContext, ...] = ()


class Span(_Station, kw_only=True):
    """Times: `Clock.now_ns`. failed: as the span's status says it. remote: its parent is in another process.

    ids: attributes too, by name, which no other span has.
    """

    kind: Kind = "internal"
    attributes: Mapping[str, str | int] | None = None
    ids: tuple[tuple[str, str], ...] = ()
    failed: bool = False
    remote: bool = False


def span_count(trace: RequestTrace | BatchTrace) -> int:
    """How many spans are made of it, at most."""
    return 2 if isinstance(trace, BatchTrace) else 3 + (3 * len(trace.batches) or 1)


def spans_of(trace: RequestTrace | BatchTrace, new_id: Callable[[], str]) -> list[Span]:
    """new_id: of a span. Whoever calls must have seen the trace end."""
    return _of_batch(trace) if isinstance(trace, BatchTrace) else _of_request(trace, new_id)


def _of_request(trace: RequestTrace, new_id: Callable[[], str]) -> list[Span]:
    context, error = trace.context, trace.error
    spans = [
        Span(
            trace.operation,
            context,
            trace.parent_id,
            trace.arrival_ns,
            trace.ended_ns,
            kind="server",
            attributes={**trace.attributes, "error.type": error} if error else trace.attributes,
            ids=trace.ids,
            failed=error in _FAULTS,
            remote=bool(trace.parent_id),
        )
    ]
    trace_id, parent_id, state = context.trace_id, context.span_id, context.state

    def add(name: str, start_ns: int, end_ns: int, *links: SpanContext) -> None:
        spans.append(Span(name, SpanContext(trace_id, new_id(), state), parent_id, start_ns, end_ns, links))

    if not trace.decoded_ns:
        add("decode", trace.arrival_ns, trace.encoding_ns)
        return spans
    add("decode", trace.arrival_ns, trace.decoded_ns)
    waits_from_ns = trace.decoded_ns
    for batch in trace.batches:
        if waits_from_ns:
            add("queue", waits_from_ns, batch.closed_ns)
        if batch.returned_ns:
            add("batch_wait", batch.closed_ns, batch.started_ns)
            if batch.parent_id != parent_id:  # it stands in another trace
                add("compute", batch.started_ns, batch.finished_ns, batch.context)
        # After a failure it waits again; else it was in several at once.
        waits_from_ns = batch.returned_ns if batch.error else 0
    if not trace.batches:
        add("queue", trace.decoded_ns, trace.encoding_ns)
    if not error:
        add("encode", trace.encoding_ns, trace.ended_ns)
    return spans


def _of_batch(trace: BatchTrace) -> list[Span]:
    context, error = trace.context, trace.error
    spans = [
        Span(
            trace.name,
            context,
            trace.parent_id,
            trace.closed_ns,
            trace.returned_ns,
            trace.links,
            kind=trace.kind,
            attributes={**trace.attributes, "error.type": error} if error else trace.attributes,
            failed=bool(error),
            remote=trace.kind == "server",
        )
    ]
    if trace.kind != "client" and trace.started_ns:
        spans.append(Span("compute", trace.session, context.span_id, trace.started_ns, trace.finished_ns, failed=bool(error)))
    return spans
