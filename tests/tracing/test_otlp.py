"""Spans as bytes of OTLP: OpenTelemetry's own encoder makes the same messages of the same spans."""

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway.tracing.otlp import request_bytes, spans_bytes
from gateway.tracing.spans import Span, Spans, Station
from gateway.types import SpanContext

TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "00" * 15 + "01"
OWN, PARENT = SpanContext(TRACE, "b7ad6b7169203331"), "00f067aa0ba902b7"
UNIX_NS = 1_800_000_000_000_000_000
RESOURCE = Resource({"service.name": "gateway", "process.pid": 300, "process.command_args": ("a", "b")}, "https://schema")
SCOPE = InstrumentationScope("gateway", "1.2")
KINDS = {"internal": trace.SpanKind.INTERNAL, "server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT}

TEXTS = (("empty", ""), ("short", "é"), ("long", "ü" * 70), ("k" * 130, "v" * 20_000))
SPANS = {
    "a station": Span("decode", OWN, PARENT, 1, 2),
    "a request without a parent": Span("POST /v2/models/{model}/infer", OWN, "", 0, 5, kind="server"),
    "one of a client that is traced": Span("op", SpanContext(TRACE, "1" * 16, "a=1,b@c=2"), PARENT, 1, 2, remote=True),
    "another process's batch": Span("replica", OWN, PARENT, 1, 2, kind="server", remote=True),
    "a batch that another process runs": Span("batch", OWN, PARENT, 1, 2, kind="client"),
    "one that failed": Span("op", OWN, "", 1, 2, attributes=(("error.type", "internal"),), failed=True),
    "linked": Span("batch", OWN, PARENT, 1, 2, links=(SpanContext(OTHER, "0" * 15 + "1"), SpanContext(TRACE, "f" * 16, "a=1"))),
    "numbers": Span("op", OWN, "", 1, 2, attributes=tuple((f"n{n}", n) for n in (0, 1, 127, 128, 300, 1 << 14, (1 << 63) - 1))),
    "one with an id": Span(
        "op", OWN, "", 1, 2, attributes=(("n", 1),), ids=(("gateway.request_id", "a1"), ("gateway.id", "é"))
    ),
    "texts": Span("x" * 300, OWN, "", 1, 2, attributes=TEXTS),
}


def theirs(*spans: Span) -> ExportTraceServiceRequest:
    """As the SDK encodes them."""
    return encode_spans([_readable(span) for span in spans])


def _readable(span: Span) -> ReadableSpan:
    context = span.context
    return ReadableSpan(
        span.name,
        _context(context),
        _context(SpanContext(context.trace_id, span.parent_id), remote=span.remote) if span.parent_id else None,
        RESOURCE,
        dict(span.attributes + span.ids),
        links=[trace.Link(_context(link)) for link in span.links],
        kind=KINDS[span.kind],
        status=trace.Status(trace.StatusCode.ERROR if span.failed else trace.StatusCode.UNSET),
        start_time=span.start_ns + UNIX_NS,
        end_time=span.end_ns + UNIX_NS,
        instrumentation_scope=SCOPE,
    )


def _context(context: SpanContext, *, remote: bool = False) -> trace.SpanContext:
    state = trace.TraceState.from_header([context.state])
    return trace.SpanContext(int(context.trace_id, 16), int(context.span_id, 16), remote, trace.TraceFlags(1), state)


def ours(*spans: Span | Spans) -> ExportTraceServiceRequest:
    empty = theirs(SPANS["a station"]).resource_spans[0]
    scope = empty.scope_spans[0]
    del scope.spans[:]
    scope_bytes = scope.SerializeToString()
    del empty.scope_spans[:]
    traces = [span if isinstance(span, Spans) else Spans(span, []) for span in spans]
    made = spans_bytes(traces, UNIX_NS, lambda size: bytes(range(size)))
    return ExportTraceServiceRequest.FromString(request_bytes(empty.SerializeToString(), scope_bytes, made))


@pytest.mark.parametrize("name", SPANS)
def test_a_span_is_what_the_sdk_makes_of_it(name: str) -> None:
    assert ours(SPANS[name]) == theirs(SPANS[name])


@pytest.mark.parametrize("state", ["", "a=1,b@c=2"])
def test_stations_are_spans_within_their_request(state: str) -> None:
    context = SpanContext(TRACE, "1" * 16, state)
    own = Span("op", context, PARENT, 1, 9, kind="server", remote=True)
    linked = (SpanContext(OTHER, "0" * 15 + "1"),)
    stations: list[Station] = [("decode", 1, 2, ()), ("compute", 3, 4, linked), ("encode", 5, 6, ())]
    told = [
        Span(
            name,
            SpanContext(TRACE, bytes(range(8 * at, 8 * at + 8)).hex(), state),
            own.context.span_id,
            start_ns,
            end_ns,
            links,
        )
        for at, (name, start_ns, end_ns, links) in enumerate(stations)
    ]
    assert ours(Spans(own, stations)) == theirs(own, *told)


def test_a_message_is_what_the_sdk_makes_of_its_spans() -> None:
    spans = [*SPANS.values()] * 20
    assert ours(*spans) == theirs(*spans)
    assert len(ours(*spans).resource_spans[0].scope_spans[0].spans) == 20 * len(SPANS)


def test_nothing_is_there_that_protobuf_does_not_know() -> None:
    message = ours(*SPANS.values())
    known = ExportTraceServiceRequest()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    assert known.SerializeToString() == message.SerializeToString()
