"""Traces by templates are the bytes that the encoder gives, span by span."""

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.tracing.context import write
from gateway.tracing.otlp import request_bytes, spans_bytes
from gateway.tracing.spans import spans_of
from gateway.tracing.templates import trace_bytes
from gateway.types import BatchEnd, BatchTrace, RequestEnd, RequestTrace, SpanContext, TraceEnded

UNIX_NS = 1_800_000_000_000_000_000
ABOUT = ("linear:1/onnxruntime", 10, 10, 16, "idle")
END = RequestEnd(
    operation="POST /v2/models/{model}/infer", error="", status=("http.response.status_code", 200),
    model=(("gateway.model", "linear"),), rows=1, request_id=b"4f0c-000017", id="", arrival_ns=1, decoded_ns=20,
    encoding_ns=300, ended_ns=4000,
)  # fmt: skip
RAN = BatchEnd(70, 90, 110, "", ABOUT)


def drawn(size: int) -> bytes:
    return bytes(range(1, size + 1))


def batch(own: bytes, ended: TraceEnded | None = None, state: str = "") -> BatchTrace:
    return BatchTrace(own, state, ended, "batch", 50, ids="ab" * 8 + "cd" * 8, end=RAN)


def request(number: int, *, parent_id: str = "", state: str = "") -> RequestTrace:
    own = write(SpanContext(f"{number:032x}", f"{number + 1:016x}"))
    return RequestTrace(own, lambda _: None, parent_id, state, [batch(own, state=state)], END)


def same(trace: RequestTrace | BatchTrace) -> int:
    spans, made = trace_bytes(trace, UNIX_NS, drawn)
    found = spans_of(trace)
    assert made == spans_bytes(found, UNIX_NS, drawn)
    assert spans == sum(map(len, found))
    return spans


@pytest.mark.parametrize("parent_id", ["", "b7ad6b7169203331"])
@pytest.mark.parametrize("request_id", [b"12345678", b"4f0c-000017", b"x" * 128])
@pytest.mark.parametrize("rows", [1, 300])
def test_what_differs_is_in_its_place(parent_id: str, request_id: bytes, rows: int) -> None:
    for number in (1, 0xF << 124):
        trace = request(number, parent_id=parent_id)
        trace.end = msgspec.structs.replace(END, rows=rows, request_id=request_id, ended_ns=5000 + rows)
        assert same(trace) == 7


def test_what_is_not_plain_goes_another_way_and_is_the_same() -> None:
    failed, named, short, split, waits, shared, running, lone = (request(number) for number in range(1, 9))
    failed.end = msgspec.structs.replace(END, error="backend_failed")
    named.end = msgspec.structs.replace(END, id="order-17")
    short.end = msgspec.structs.replace(END, request_id=b"7")
    split.batches.append(batch(split.own))
    waits.batches.clear()
    shared.batches[0].ended, shared.batches[0].links = shared.ended, (lone.own, shared.own)
    shared.batches[0].parent = lone.own
    running.batches[0].end = None
    lone.batches[0].kind = "client"
    counted = [same(trace) for trace in (failed, named, short, split, waits, shared, running, lone)]
    assert counted == [6, 7, 7, 10, 4, 6, 4, 6]
    assert same(request(9, state="vendor=1")) == 7
    assert same(shared.batches[0]) == 2


def test_ids_that_nobody_was_told_are_drawn_and_joined() -> None:
    trace = request(5)
    trace.batches[0].ids = ""
    spans, made = trace_bytes(trace, UNIX_NS, drawn)
    message = ExportTraceServiceRequest.FromString(request_bytes(b"", b"", made))
    found = {span.name: span for span in message.resource_spans[0].scope_spans[0].spans}
    assert spans == len({span.span_id for span in found.values()}) == 7
    assert found["compute"].parent_span_id == found["batch"].span_id
    assert found["batch"].parent_span_id == found[END.operation].span_id == bytes.fromhex(f"{6:016x}")
