"""Spans to an OTLP collector, by OpenTelemetry's own SDK and exporters; nobody else imports them.

What has ended is put into a queue, which takes a microsecond and waits for nobody. A thread makes spans of it and sends them,
when there are many or a while has passed. The queue is bounded: what finds no room, because the collector is slow, hangs or is
gone, is dropped and counted. So is what the collector did not take within the exporter's timeout.
"""

import importlib.util
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from gateway import __version__
from gateway.errors import ConfigError
from gateway.tracing.context import span_id
from gateway.tracing.settings import Settings
from gateway.tracing.spans import Span, span_count, spans_of
from gateway.types import BatchTrace, RequestTrace, SpanContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext as TheirContext

REMEDY: Final = "pip install 'serving-gateway[otel]'"

_EXPORTERS: Final = {"grpc": "opentelemetry.exporter.otlp.proto.grpc", "http": "opentelemetry.exporter.otlp.proto.http"}
_THEIR_LOGS: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
_TRACES_PATH: Final = "/v1/traces"
_TOLD_EVERY_S: Final = 60.0
_AT_ONCE: Final = 64  # spans: 0.8 ms
_PAUSE_S: Final = 0.0005

T = TypeVar("T")

log = logging.getLogger(__name__)


def installed(protocol: str) -> bool:
    """Whether what sends spans by a protocol can be imported; looks, and imports nothing but the packages above it."""
    try:
        return importlib.util.find_spec(_EXPORTERS[protocol]) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


class Exporter:
    """Life: made -> put … -> close. exported, dropped, failed: spans that were taken, found no room, or were not taken."""

    def __init__(self, settings: Settings) -> None:
        """Imports the SDK: some 0.3 s. Raises: ConfigError."""
        self.exported = self.dropped = self.failed = 0
        self._settings = settings
        self._made = _Spans()
        self._exporter = _exporter(settings)
        self._queue: deque[RequestTrace | BatchTrace] = deque()
        self._put = self._taken = 0  # spans; each is counted by one thread alone
        self._sending = 0
        self._due = threading.Event()
        self._ending = False
        self._given_up = False
        self._told_s = -_TOLD_EVERY_S
        self._untold = 0
        self._reason = _Reason()
        self._thread = threading.Thread(target=self._main, name="traces", daemon=True)
        self._thread.start()

    def put(self, trace: RequestTrace | BatchTrace) -> None:
        """Send what is noted in it, some time. Never waits, and never raises. From one thread."""
        size = span_count(trace)
        waiting = self._put - self._taken + size
        if waiting > self._settings.queued_spans or self._ending:
            self.dropped += size
            return
        self._put += size
        self._queue.append(trace)
        if waiting >= self._settings.sent_spans and not self._due.is_set():
            self._due.set()

    def spans(self) -> dict[str, int]:
        """How many there were, by what became of them."""
        return {"exported": self.exported, "dropped": self.dropped, "failed": self.failed}

    def close(self, timeout_s: float) -> None:
        """Send what waits, but give it up when the time is over. Blocks as long. A second call does nothing."""
        if self._ending:
            return
        self._ending = True
        self._due.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._given_up = True
            waiting = self._put - self._taken
            self.dropped += waiting
            if waiting + self._sending:
                log.warning("%d spans are given up at the end: the collector has not taken them", waiting + self._sending)
        self._exporter.shutdown()  # ends a call by gRPC; one by HTTP is left to its daemon thread

    def _main(self) -> None:
        self._reason.thread = threading.get_ident()
        for name in _THEIR_LOGS:
            logging.getLogger(name).filters.insert(0, self._reason)  # before one of theirs that drops what is said again
        try:
            ending = False
            while not ending:
                self._due.wait(self._settings.delay_s)
                self._due.clear()
                ending = self._ending
                self._send_what_waits()
        finally:
            for name in _THEIR_LOGS:
                logging.getLogger(name).removeFilter(self._reason)

    def _send_what_waits(self) -> None:
        queue = self._queue
        while queue and not self._given_up:
            spans: list[Span] = []
            while queue and len(spans) < self._settings.sent_spans:
                trace = queue.popleft()
                self._taken += span_count(trace)
                spans += spans_of(trace, span_id)
            self._sending = len(spans)
            try:
                taken = self._made.send(self._exporter, spans)
            except Exception as exc:  # whatever it is, the next ones may go well
                self._reason.text = f"{type(exc).__name__}: {exc}"
                taken = False
            self._sending = 0
            if taken:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
                self._tell(len(spans))

    def _tell(self, spans: int) -> None:
        """Say that a collector does not take spans: at once, then once in a while."""
        self._untold += spans
        now_s = time.monotonic()
        if now_s - self._told_s < _TOLD_EVERY_S or self._given_up:
            return
        self._told_s = now_s
        untold, self._untold = self._untold, 0
        where = self._settings.endpoint or "OTEL_EXPORTER_OTLP_ENDPOINT, or this machine"
        log.warning(
            "%d spans are lost: the collector (tracing.endpoint: %s) has not taken them: %s; %d more found no room",
            untold, where, self._reason.text or "no reason given", self.dropped,
        )  # fmt: skip


class _Reason(logging.Filter):
    """Keeps to itself what the exporter logs on a thread of ours, which would be some lines for each batch. text: the last."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.thread: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread:
            return True
        self.text = record.getMessage()
        return False


class _WithPauses(list[T]):
    """A list whose reader lets others run in between: a thread that computes holds the event loop up for 5 ms at a time."""

    def __iter__(self) -> Iterator[T]:
        for index, item in enumerate(super().__iter__()):
            if index % _AT_ONCE == 0:
                time.sleep(_PAUSE_S)
            yield item


class _Spans:
    """Makes the SDK's spans of ours."""

    def __init__(self) -> None:
        """Raises: ConfigError."""
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.sdk.trace.export import SpanExportResult
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as exc:
            raise ConfigError(f"tracing: OpenTelemetry cannot be imported ({exc}): {REMEDY}") from exc
        self._span = ReadableSpan
        self._context = trace.SpanContext
        self._state = trace.TraceState.from_header
        self._sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        self._link = trace.Link
        self._kinds = {kind.name.lower(): kind for kind in trace.SpanKind}
        self._unset, self._failed = trace.Status(trace.StatusCode.UNSET), trace.Status(trace.StatusCode.ERROR)
        self._taken = SpanExportResult.SUCCESS
        self._scope = InstrumentationScope("gateway", __version__)
        own = {"service.name": "gateway", "service.version": __version__, "host.name": socket.gethostname()}
        told = {
            key: value for key, value in Resource.create().attributes.items() if not str(value).startswith("unknown_service")
        }

        class One(Resource):
            """Equal to itself alone: the exporter looks for it for each span, by its content for 7 of 20 µs."""

            __hash__ = object.__hash__
            __eq__ = object.__eq__

        self._resource = One({**own, **told, "process.pid": os.getpid()})

    def send(self, exporter: "SpanExporter", spans: Sequence[Span]) -> bool:
        """Whether the collector has taken them. Takes as long as the exporter's timeout."""
        # Once for all: what ends together must not drift apart with the wall clock.
        unix_ns = time.time_ns() - time.monotonic_ns()
        contexts = {span.context: self._their(span.context) for span in spans}
        made = _WithPauses(self._made(span, unix_ns, contexts) for span in _WithPauses(spans))
        return exporter.export(made) is self._taken

    def _made(self, span: Span, unix_ns: int, contexts: "dict[SpanContext, TheirContext]") -> "ReadableSpan":
        """contexts: those made before, by the span's."""
        context = span.context
        parent = None
        if span.parent_id:
            outer = SpanContext(context.trace_id, span.parent_id, context.state)
            parent = contexts.get(outer) or self._their(outer, remote=span.remote)
        return self._span(
            span.name,
            contexts[context],
            parent,
            self._resource,
            span.attributes,
            links=[self._link(contexts.get(link) or self._their(link)) for link in span.links],
            kind=self._kinds[span.kind],
            status=self._failed if span.failed else self._unset,
            start_time=span.start_ns + unix_ns,
            end_time=span.end_ns + unix_ns,
            instrumentation_scope=self._scope,
        )

    def _their(self, context: SpanContext, *, remote: bool = False) -> "TheirContext":
        state = self._state([context.state]) if context.state else None
        return self._context(int(context.trace_id, 16), int(context.span_id, 16), remote, self._sampled, state)


def _exporter(settings: Settings) -> "SpanExporter":
    """Headers, certificates, timeouts and compression it reads from OTEL_EXPORTER_OTLP_*. Raises: ConfigError."""
    endpoint = settings.endpoint
    try:
        if settings.protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

            return ByGrpc(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

        if endpoint is not None and not endpoint.rstrip("/").endswith(_TRACES_PATH):
            endpoint = endpoint.rstrip("/") + _TRACES_PATH
        return ByHttp(endpoint)
    except ImportError as exc:
        raise ConfigError(f"tracing: the exporter by {settings.protocol} cannot be imported ({exc}): {REMEDY}") from exc
    except Exception as exc:  # an OTEL_EXPORTER_OTLP_* variable that it cannot read
        raise ConfigError(f"tracing: the exporter by {settings.protocol} cannot be made: {type(exc).__name__}: {exc}") from exc
