"""An OTLP collector over real sockets, by HTTP and by gRPC, which decodes what comes by OpenTelemetry's own protobuf."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message

TIMEOUT_S = 10.0
SERVER, CLIENT = Message.SPAN_KIND_SERVER, Message.SPAN_KIND_CLIENT


@dataclass(frozen=True)
class Seen:
    """A span that has come. Ids in hexadecimal; links: of span ids; process: its pid, by the resource."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    failed: bool
    links: tuple[str, ...]
    attributes: dict[str, Any]
    process: int
    service: str
    state: str


@dataclass
class Collector:
    """url: what an exporter is told. metadata: of each call or request, names in lower case. answer: called before each."""

    url: str = ""
    protocol: str = "grpc"
    spans: list[Seen] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    answer: Callable[[], int] = lambda: 200

    def take(self, request: pb.ExportTraceServiceRequest, metadata: dict[str, str]) -> int:
        """The status to answer with."""
        self.metadata.append(metadata)
        status = self.answer()
        if status == 200:
            self.spans += seen(request)
        return status

    def wait_for(self, condition: Callable[[list[Seen]], object]) -> list[Seen]:
        """All that has come, once a condition holds of it."""
        end_s = time.monotonic() + TIMEOUT_S
        while not condition(self.spans):
            assert time.monotonic() < end_s, [span.name for span in self.spans]
            time.sleep(0.005)
        return self.spans


def seen(request: pb.ExportTraceServiceRequest) -> Iterator[Seen]:
    for resource in request.resource_spans:
        own = {each.key: _value(each.value) for each in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.kind,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    tuple(link.span_id.hex() for link in span.links),
                    {each.key: _value(each.value) for each in span.attributes},
                    int(own.get("process.pid", 0)),
                    str(own.get("service.name")),
                    span.trace_state,
                )


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@contextmanager
def collecting(protocol: str) -> Iterator[Collector]:
    """protocol: grpc or http."""
    collector = Collector(protocol=protocol)
    with (_by_grpc if protocol == "grpc" else _by_http)(collector):
        yield collector


@contextmanager
def _by_http(collector: Collector) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = pb.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/traces"
            status = collector.take(request, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield
        finally:
            server.shutdown()
            thread.join(TIMEOUT_S)


@contextmanager
def _by_grpc(collector: Collector) -> Iterator[None]:
    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            status = collector.take(request, dict(context.invocation_metadata()))
            if status != 200:
                context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            return pb.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield
    finally:
        server.stop(None)
