"""Spans that are joined from a client to the session that served it, in a collector, over REST and gRPC."""

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

import gateway
from gateway.edges.grpc_call_in_memory import GrpcError
from tests.grpc_server.serving import infer_request
from tests.tracing.collector import SERVER, Collector, Seen, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
STAGES = ["decode", "queue", "batch_wait", "compute", "encode"]
TENSORS = {
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}],
}


class Context:
    """Answers with the trace that its session is told of, in bytes."""

    inputs = (("INPUT0", "FP32", (-1, 4)),)
    outputs = (("TOLD", "BYTES", (-1, 1)),)

    def predict(self, inputs: dict[str, np.ndarray], parameters: gateway.Parameters) -> dict[str, np.ndarray]:
        assert not parameters
        told = f"{parameters.traceparent} {parameters.tracestate}"
        return {"TOLD": np.full((len(inputs["INPUT0"]), 1), told, dtype=object)}


class Parts:
    """Three parts, a millisecond each; but for an input of 666, which fails behind the second."""

    inputs = (("INPUT0", "FP32", (-1, 4)),)
    outputs = (("OUTPUT0", "FP32", (-1, 4)),)

    def predict(self, inputs: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        for made in range(3):
            if made == 2 and (inputs["INPUT0"] == 666).any():
                raise ValueError("no more")
            time.sleep(0.001)
            yield {"OUTPUT0": inputs["INPUT0"]}


def config(collector: Collector, **tracing: Any) -> dict[str, Any]:
    own = {"max_rows": 8, "batching": {"policy": "greedy", "probe_s": 0}}
    context = {"kind": "python", "model": f"{Path(__file__)}:Context"}
    backend = {"kind": "synthetic", "fixed_ms": 2, "row_ms": 0, "faults": {"fail": 666}}
    return {
        "tracing": {"endpoint": collector.url, "protocol": collector.protocol, **tracing},
        "models": [
            {"name": "echo", **own, **TENSORS, "backends": [backend]},
            {"name": "long", **own, **TENSORS, "backends": [backend | {"fixed_ms": 200}]},
            {"name": "parts", "batching": {"probe_s": 0}, "backends": [{"kind": "python", "model": f"{Path(__file__)}:Parts"}]},
            {"name": "thread", **own, "backends": [context]},
            {"name": "process", **own, "backends": [context | {"isolation": "process"}]},
        ],
    }


@pytest.fixture(autouse=True, scope="module")
def promptly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20me")
        yield


@pytest.fixture(scope="module", params=["grpc", "http"])
def traced(request: pytest.FixtureRequest) -> Iterator[tuple[gateway.TestClient, Collector]]:
    """Traced by its callers only."""
    with collecting(request.param) as collector, gateway.TestClient(config(collector, sample_ratio=0)) as client:
        yield client, collector


def body(value: float = 1.0) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}], "id": "v2"}


def by_rest(client: gateway.TestClient, model: str, headers: dict[str, str], value: float = 1.0) -> Any:
    return client.post(f"/v2/models/{model}/infer", json=body(value), headers=headers)


def by_grpc(client: gateway.TestClient, model: str, headers: dict[str, str], value: float = 1.0) -> Any:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
    return stub.ModelInfer(infer_request(model, value, request_id="v2"), metadata=tuple(headers.items()))


ASK = {
    "POST /v2/models/{model}/infer": by_rest,
    "inference.GRPCInferenceService/ModelInfer": by_grpc,
}


def of_batch(spans: list[Seen]) -> list[Seen]:
    return [span for span in spans if span.name in ("batch", "compute")]


@pytest.mark.slow
@pytest.mark.parametrize("operation", ASK)
def test_a_trace_joins_its_client_to_the_session(traced: tuple[gateway.TestClient, Collector], operation: str) -> None:
    client, collector = traced
    collector.spans.clear()
    before_ns = time.time_ns()
    ASK[operation](client, "echo", SAMPLED | {"tracestate": "vendor=1", "x-request-id": "order-17"})
    spans = collector.wait_for(lambda spans: len(spans) >= 7)
    by_name = {span.name: span for span in spans}
    assert sorted(by_name) == sorted([operation, *STAGES, "batch"])
    assert {(span.trace_id, span.service, span.failed, span.state) for span in spans} == {(TRACE, "gateway", False, "vendor=1")}
    server, batch, session = by_name[operation], by_name["batch"], by_name["compute"]
    assert (server.parent_id, server.kind) == (PARENT, SERVER)
    assert {by_name[name].parent_id for name in STAGES if name != "compute"} == {server.span_id}
    assert (batch.parent_id, batch.links) == (server.span_id, (server.span_id,))
    assert session.parent_id == batch.span_id
    told = server.attributes
    assert told | {"gateway.model": "echo", "gateway.request_id": "order-17", "gateway.id": "v2", "gateway.rows": 1} == told
    assert batch.attributes | {"gateway.lane": "echo:1/synthetic", "gateway.batch.requests": 1} == batch.attributes
    # One after the other, within the request, on the wall clock.
    edges = [edge for name in STAGES for edge in (by_name[name].start_ns, by_name[name].end_ns)]
    assert [server.start_ns, *edges, server.end_ns] == sorted([server.start_ns, *edges, server.end_ns])
    assert before_ns <= server.start_ns
    assert server.end_ns <= time.time_ns()
    assert session.end_ns - session.start_ns >= 2_000_000
    assert collector.metadata[-1]["authorization"] == "Bearer me"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["thread", "process"])
def test_what_runs_in_a_session_is_told_of_the_trace(traced: tuple[gateway.TestClient, Collector], model: str) -> None:
    client, collector = traced
    collector.spans.clear()
    (told,) = by_rest(client, model, SAMPLED | {"tracestate": "vendor=1"}).json()["outputs"][0]["data"]
    spans = collector.wait_for(lambda spans: len(spans) >= 7)
    session = next(span for span in spans if span.name == "compute")
    assert told == f"00-{TRACE}-{session.span_id}-01 vendor=1"
    assert by_rest(client, model, {}).json()["outputs"][0]["data"] == ["None None"]


@pytest.mark.slow
def test_the_client_is_told_its_trace_and_none_is_noted_unasked(traced: tuple[gateway.TestClient, Collector]) -> None:
    client, collector = traced
    collector.spans.clear()
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    for headers in ({}, unsampled, {"traceparent": "malformed"}):
        assert "traceresponse" not in by_rest(client, "echo", headers).headers
    answer = by_rest(client, "echo", SAMPLED)
    spans = collector.wait_for(lambda spans: len(spans) >= 7)
    (server,) = (span for span in spans if span.kind == SERVER)
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{server.span_id}-01"
    assert len(spans) == 7


@pytest.mark.slow
@pytest.mark.parametrize("ask", ASK.values())
def test_a_failed_request_says_so_and_shows_what_was_tried(traced: tuple[gateway.TestClient, Collector], ask: Any) -> None:
    client, collector = traced
    collector.spans.clear()
    try:
        ask(client, "echo", SAMPLED, 666.0)
    except GrpcError as exc:
        assert exc.code().name == "INTERNAL"  # noqa: PT017  # over REST it is an answer
    spans = collector.wait_for(lambda spans: any(span.kind == SERVER for span in spans))
    (server,) = (span for span in spans if span.kind == SERVER)
    assert (server.failed, server.attributes["error.type"]) == (True, "backend_failed")
    assert server.attributes.get("http.response.status_code", 500) == 500
    assert server.attributes.get("rpc.grpc.status_code", 13) == 13
    assert all(span.failed for span in of_batch(spans))


@pytest.mark.slow
def test_a_batch_that_runs_on_without_its_request_is_told_of(traced: tuple[gateway.TestClient, Collector]) -> None:
    client, collector = traced
    collector.spans.clear()
    asked = body() | {"parameters": {"timeout": 20_000}}  # us, of a model that takes 200 ms
    assert client.post("/v2/models/long/infer", json=asked, headers=SAMPLED).status_code == 504
    spans = collector.wait_for(lambda spans: len(of_batch(spans)) == 2)
    (server,) = (span for span in spans if span.kind == SERVER)
    batch, session = sorted(of_batch(spans), key=lambda span: span.name)
    assert server.attributes["error.type"] == "deadline_exceeded"
    assert (batch.parent_id, session.parent_id, batch.failed) == (server.span_id, batch.span_id, False)
    assert batch.end_ns > server.end_ns


@pytest.mark.slow
def test_requests_of_one_batch_share_its_span(traced: tuple[gateway.TestClient, Collector]) -> None:
    client, collector = traced
    collector.spans.clear()
    stub = service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
    parents = [f"00-{number:032x}-{PARENT}-01" for number in range(1, 7)]
    calls = [stub.ModelInfer.future(infer_request("echo"), metadata=(("traceparent", each),)) for each in parents]
    for call in calls:
        call.result(10)
    spans = collector.wait_for(lambda spans: sum(span.kind == SERVER for span in spans) == 6)
    servers = {span.span_id: span for span in spans if span.kind == SERVER}
    batches = [span for span in spans if span.name == "batch"]
    assert sorted(link for batch in batches for link in batch.links) == sorted(servers)
    assert any(len(batch.links) > 1 for batch in batches)
    for batch in batches:
        assert batch.trace_id == servers[batch.parent_id].trace_id
        assert batch.attributes["gateway.batch.rows"] == len(batch.links)
        for link in batch.links:
            compute = next(span for span in spans if span.name == "compute" and span.trace_id == servers[link].trace_id)
            assert (batch.span_id,) in (compute.links, (compute.parent_id,))


@pytest.mark.slow
def test_who_shared_a_batch_with_one_that_failed_shows_the_run_alone_as_well(
    traced: tuple[gateway.TestClient, Collector],
) -> None:
    client, collector = traced
    collector.spans.clear()
    stub = service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
    parents = [f"00-{number:032x}-{PARENT}-01" for number in range(1, 7)]
    values = [1.0] * 5 + [666.0]
    calls = [
        stub.ModelInfer.future(infer_request("echo", value), metadata=(("traceparent", parent),))
        for value, parent in zip(values, parents, strict=True)
    ]
    for call in calls[:-1]:
        call.result(10)
    spans = collector.wait_for(lambda spans: sum(span.kind == SERVER for span in spans) == 6)
    batches = [span.links for span in spans if span.name == "batch"]
    shared = [links for links in batches if len(links) > 1]
    failed = [span.links for span in spans if span.name == "batch" and span.failed and len(span.links) > 1]
    assert failed, shared
    for link in failed[0]:
        assert (link,) in batches


@pytest.mark.slow
def test_each_request_of_a_stream_has_a_span_in_its_callers_trace(traced: tuple[gateway.TestClient, Collector]) -> None:
    client, collector = traced
    collector.spans.clear()
    stub = service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
    answers = stub.ModelStreamInfer(iter([infer_request("echo")] * 3), metadata=tuple(SAMPLED.items()))
    assert [answer.error_message for answer in answers] == [""] * 3
    spans = collector.wait_for(lambda spans: sum(span.kind == SERVER for span in spans) == 3)
    servers = [span for span in spans if span.kind == SERVER]
    assert {(span.name, span.parent_id) for span in servers} == {("inference.GRPCInferenceService/ModelStreamInfer", PARENT)}


@pytest.mark.slow
def test_an_answer_in_parts_is_one_trace(traced: tuple[gateway.TestClient, Collector]) -> None:
    client, collector = traced
    collector.spans.clear()
    answer = client.post("/v2/models/parts/generate_stream", json={"INPUT0": [1.0, 2.0, 3.0, 4.0]}, headers=SAMPLED)
    assert answer.text.count("data: ") == 3
    spans = collector.wait_for(lambda spans: any(span.kind == SERVER for span in spans))
    by_name = {span.name: span for span in spans}
    server = by_name["POST /v2/models/{model}/generate_stream"]
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{server.span_id}-01"
    assert by_name["compute"].end_ns - by_name["compute"].start_ns >= 3_000_000  # of all parts
    assert server.end_ns >= by_name["compute"].end_ns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v2/models/parts/generate_stream", {"INPUT0": [666.0] * 4}),
        ("/v1/models/parts:predict", {"instances": [[666.0] * 4]}),
    ],
)
def test_a_failure_behind_parts_is_an_error_under_the_status_that_was_sent(
    traced: tuple[gateway.TestClient, Collector], path: str, asked: Any
) -> None:
    client, collector = traced
    collector.spans.clear()
    answer = client.post(path, json=asked, headers=SAMPLED | {"accept": "text/event-stream"})
    assert (answer.status_code, answer.text.count("data: ")) == (200, 3)
    spans = collector.wait_for(lambda spans: any(span.kind == SERVER for span in spans))
    (server,) = (span for span in spans if span.kind == SERVER)
    assert (server.failed, server.attributes["error.type"]) == (True, "backend_failed")
    assert server.attributes["http.response.status_code"] == 200


def by_stream(client: gateway.TestClient, model: str, headers: dict[str, str]) -> Any:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
    return list(stub.ModelStreamInfer(iter([infer_request(model)]), metadata=tuple(headers.items())))


def by_generate_stream(client: gateway.TestClient, model: str, headers: dict[str, str]) -> Any:
    return client.post(f"/v2/models/{model}/generate_stream", json={"INPUT0": [1.0, 2.0, 3.0, 4.0]}, headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "model", "protocol"),
    [
        (by_rest, "echo", "rest"),
        (by_grpc, "echo", "grpc"),
        (by_stream, "echo", "grpc"),
        (by_stream, "parts", "grpc"),
        (by_generate_stream, "parts", "rest"),
        (by_rest, "process", "rest"),
    ],
)
def test_the_latency_of_a_traced_request_names_its_trace(
    traced: tuple[gateway.TestClient, Collector], ask: Any, model: str, protocol: str
) -> None:
    client, _ = traced
    trace = f"{secrets.randbits(128):032x}"
    ask(client, model, {"traceparent": f"00-{trace}-{PARENT}-01"})
    metrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text"}).text
    (named,) = (line for line in metrics.splitlines() if f'trace_id="{trace}"' in line)
    assert named.startswith("gateway_request_duration_seconds_bucket")
    assert f'model="{model}",protocol="{protocol}"' in named


@pytest.mark.slow
def test_nothing_of_opentelemetry_is_imported_unasked() -> None:

    code = "import sys, gateway.ingress; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
