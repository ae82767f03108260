"""OpenTelemetry's own SDK and exporters, which know who sends and how: the environment's variables, TLS, headers, retries.

They are given spans that are encoded already, for which there is no public way: docs/decisions/otlp-bytes.md.
"""

import importlib.util
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from gateway import __version__
from gateway.errors import ConfigError
from gateway.tracing.otlp import request_bytes
from gateway.tracing.settings import Settings

REMEDY: Final = "pip install 'serving-gateway[otel]'"
LOGS: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
"""Where the exporters say what went wrong."""

_EXPORTERS: Final = {"grpc": "opentelemetry.exporter.otlp.proto.grpc", "http": "opentelemetry.exporter.otlp.proto.http"}
_TRACES_PATH: Final = "/v1/traces"
_EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def installed(protocol: str) -> bool:
    """Whether what sends spans by a protocol can be imported; looks, and imports nothing but the packages above it."""
    try:
        return importlib.util.find_spec(_EXPORTERS[protocol]) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


class Collector:
    """Takes spans of this process by OTLP. close: ends a call by gRPC; one by HTTP goes on until its timeout."""

    def __init__(self, settings: Settings) -> None:
        """Imports the SDK: some 0.3 s. Raises: ConfigError."""
        self._resource, self._scope = _sender()
        self._export, self.close = _exporter(settings)

    def send(self, spans: bytes) -> bool:
        """Whether it has taken them. spans: as `spans_bytes` gives them. Takes as long as the exporter's timeout.

        Raises: what the exporter does.
        """
        return self._export(request_bytes(self._resource, self._scope, spans))


def _sender() -> tuple[bytes, bytes]:
    """ResourceSpans and ScopeSpans without spans, as the SDK encodes them. Raises: ConfigError."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    except ImportError as exc:
        raise ConfigError(f"tracing: OpenTelemetry cannot be imported ({exc}): {REMEDY}") from exc
    own = {"service.name": "gateway", "service.version": __version__, "host.name": socket.gethostname()}
    told = {key: value for key, value in Resource.create().attributes.items() if not str(value).startswith("unknown_service")}
    span = ReadableSpan(
        "any",
        trace.SpanContext(1, 1, is_remote=False),
        resource=Resource({**own, **told, "process.pid": os.getpid()}),
        instrumentation_scope=InstrumentationScope("gateway", __version__),
    )
    resource = encode_spans([span]).resource_spans[0]
    scope = resource.scope_spans[0]
    del scope.spans[:]
    scope_bytes = scope.SerializeToString()
    del resource.scope_spans[:]
    return resource.SerializeToString(), scope_bytes


def _exporter(settings: Settings) -> tuple[Callable[[bytes], bool], Callable[[], None]]:
    """What exports a message's bytes, and what shuts it down. Raises: ConfigError.

    Headers, certificates, timeouts and compression it reads from OTEL_EXPORTER_OTLP_*.
    """
    endpoint = settings.endpoint
    try:
        if settings.protocol == "grpc":
            return _by_grpc(endpoint)
        if endpoint is not None and not endpoint.rstrip("/").endswith(_TRACES_PATH):
            endpoint = endpoint.rstrip("/") + _TRACES_PATH
        return _by_http(endpoint)
    except ImportError as exc:
        raise ConfigError(f"tracing: the exporter by {settings.protocol} cannot be imported ({exc}): {REMEDY}") from exc
    except Exception as exc:  # an OTEL_EXPORTER_OTLP_* variable that it cannot read, or another release of it
        raise ConfigError(f"tracing: the exporter by {settings.protocol} cannot be made: {type(exc).__name__}: {exc}") from exc


def _by_grpc(endpoint: str | None) -> tuple[Callable[[bytes], bool], Callable[[], None]]:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter: Any = OTLPSpanExporter(endpoint)
    # Its own take no bytes: to read and write them again would be a tenth of what a trace costs.
    exporter._translate_data = lambda messages: messages[0]
    exporter._stub = _Stub  # for when it connects anew
    exporter._client = _Stub(exporter._channel)
    return lambda message: exporter.export([message]) is SpanExportResult.SUCCESS, exporter.shutdown


class _Stub:
    """Calls a collector by gRPC, in bytes."""

    def __init__(self, channel: Any) -> None:
        self.Export = channel.unary_unary(_EXPORT)


def _by_http(endpoint: str | None) -> tuple[Callable[[bytes], bool], Callable[[], None]]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint)
    export = exporter._client.export
    return lambda message: export(message).success, exporter.shutdown
