"""Collectors that hang, refuse, answer errors or are slow: bounded memory, nobody waits, and the end comes in time."""

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest

import gateway
from gateway.errors import ConfigError
from gateway.tracing.context import write
from gateway.tracing.exporter import Exporter
from gateway.tracing.settings import Settings
from gateway.types import RequestEnd, RequestTrace, SpanContext
from tests.tracing.collector import collecting
from tests.tracing.test_traces import body, config
from tests.waiting import until

pytestmark = pytest.mark.slow

Protocol = Literal["grpc", "http"]
TRACE = SpanContext("0af7651916cd43dd8448eb211c80319c", "1" * 16)
QUEUED, SENT = 80, 12
MANY = 2000


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return request.param  # type: ignore[no-any-return]  # one of these


@pytest.fixture(autouse=True)
def timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


def settings(protocol: Protocol, endpoint: str) -> Settings:
    return Settings(1.0, True, protocol, endpoint, QUEUED, SENT, 0.02)


def trace() -> RequestTrace:
    """Of four spans."""
    end = RequestEnd(
        operation="op", error="", status=("", 0), model=(), rows=0, request_id=b"", id="", arrival_ns=1, decoded_ns=2,
        encoding_ns=3, ended_ns=4,
    )  # fmt: skip
    return RequestTrace(write(TRACE), lambda _: None, end=end)


EACH = 4


@contextmanager
def exporting(protocol: Protocol, endpoint: str) -> Iterator[Exporter]:
    exporter = Exporter(settings(protocol, endpoint))
    try:
        yield exporter
    finally:
        exporter.close(0.0)


@contextmanager
def refusing() -> Iterator[str]:
    """The address of a port that nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def counts(exporter: Exporter) -> int:
    return exporter.exported + exporter.failed + exporter.dropped


def test_a_collector_that_hangs_costs_a_queue_and_holds_up_nobody(protocol: Protocol, caplog: pytest.LogCaptureFixture) -> None:
    hangs = threading.Event()
    with collecting(protocol) as collector, exporting(protocol, collector.url) as exporter:
        collector.answer = lambda: 503 if hangs.wait(10) else 200
        exporter.put(trace())
        until(lambda: collector.metadata)  # it has the first, and hangs
        began_s = time.monotonic()
        for _ in range(MANY):
            exporter.put(trace())
        took_s = time.monotonic() - began_s
        assert took_s < 5.0  # a microsecond each, where a call takes a second
        assert exporter.dropped >= MANY * EACH - QUEUED - SENT * int(took_s + 1)
        closing_s = time.monotonic()
        exporter.close(0.2)
        assert time.monotonic() - closing_s < 5.0
        hangs.set()
    assert counts(exporter) >= MANY * EACH - SENT
    assert "spans are given up at the end" in told(caplog)[-1]


def test_what_comes_while_a_message_is_sent_leaves_with_others(protocol: Protocol) -> None:
    goes_on = threading.Event()
    seldom = settings(protocol, "")._replace(delay_s=600.0)
    with collecting(protocol) as collector:
        collector.answer = lambda: 200 if goes_on.wait(10) else 503
        exporter = Exporter(seldom._replace(endpoint=collector.url))
        try:
            for _ in range(SENT // EACH):
                exporter.put(trace())
            until(lambda: collector.metadata)
            exporter.put(trace())
            goes_on.set()
            until(lambda: exporter.exported)
            for _ in range(SENT // EACH - 1):
                exporter.put(trace())
            until(lambda: exporter.exported == 2 * SENT)
        finally:
            exporter.close(0.0)


def test_a_collector_that_is_not_there_is_told_of_once(protocol: Protocol, caplog: pytest.LogCaptureFixture) -> None:
    with refusing() as url, exporting(protocol, url) as exporter:
        for _ in range(SENT):
            exporter.put(trace())
        until(lambda: exporter.failed)
        exporter.close(5.0)
    assert counts(exporter) == SENT * EACH
    assert exporter.exported == 0
    lost = [line for line in told(caplog) if "are lost" in line]
    assert len(lost) == 1
    assert url in lost[0]
    assert "no reason given" not in lost[0]


def test_what_a_collector_refuses_is_lost_and_the_next_is_tried(protocol: Protocol, caplog: pytest.LogCaptureFixture) -> None:
    with collecting(protocol) as collector, exporting(protocol, collector.url) as exporter:
        collector.answer = lambda: 503
        exporter.put(trace())
        until(lambda: exporter.failed)
        collector.answer = lambda: 200
        exporter.put(trace())
        until(lambda: exporter.exported)
        assert (exporter.exported, exporter.failed, exporter.dropped) == (EACH, EACH, 0)
    assert len(told(caplog)) == 1


def test_what_cannot_be_encoded_is_lost_and_the_next_is_sent(protocol: Protocol, caplog: pytest.LogCaptureFixture) -> None:
    with collecting(protocol) as collector, exporting(protocol, collector.url) as exporter:
        odd = trace()
        assert odd.end is not None
        odd.end.operation = "\ud800"  # no UTF-8 has it
        exporter.put(odd)
        until(lambda: exporter.failed)
        exporter.put(trace())
        until(lambda: exporter.exported)
        assert (exporter.exported, exporter.failed, exporter.dropped) == (EACH, EACH, 0)
    assert "UnicodeEncodeError" in told(caplog)[0]


def test_a_slow_collector_gets_what_waited_at_the_end(protocol: Protocol) -> None:
    with collecting(protocol) as collector, exporting(protocol, collector.url) as exporter:
        collector.answer = lambda: time.sleep(0.05) or 200
        for _ in range(QUEUED // EACH):
            exporter.put(trace())
        exporter.close(30.0)
        assert (len(collector.spans), exporter.exported, exporter.dropped) == (QUEUED, QUEUED, 0)
        exporter.put(trace())  # after the end
        assert exporter.dropped == EACH


def test_many_spans_leave_in_one_message(protocol: Protocol) -> None:
    traces = 350
    with collecting(protocol) as collector:
        exporter = Exporter(settings(protocol, collector.url)._replace(queued_spans=2000, sent_spans=1400, delay_s=60))
        for _ in range(traces):
            exporter.put(trace())
        until(lambda: exporter.exported == traces * EACH)
        exporter.close(5.0)
    assert len(collector.metadata) == 1
    assert len({span.span_id for span in collector.spans}) == 1 + (EACH - 1) * traces


def test_requests_are_answered_while_the_collector_hangs(protocol: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", str(QUEUED))
    hangs = threading.Event()
    with collecting(protocol) as collector:
        collector.answer = lambda: 503 if hangs.wait(10) else 200
        with gateway.TestClient(config(collector, sample_ratio=1)) as client:
            answers = [client.post("/v2/models/echo/infer", json=body()) for _ in range(100)]  # of 7 spans each
            assert {answer.status_code for answer in answers} == {200}
            until(lambda: collector.metadata)
            assert client.post("/v2/models/echo/infer", json=body()).status_code == 200
            assert re.search(r'gateway_trace_spans_total\{.*result="dropped".*\} [1-9]', client.get("/metrics").text)
            closing_s = time.monotonic()
        assert time.monotonic() - closing_s < 8.0  # two seconds for what waits, and the models
        hangs.set()


def test_what_the_exporter_cannot_read_of_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")
    with pytest.raises(ConfigError, match=r"tracing: the exporter by grpc cannot be made: .*zip"):
        Exporter(settings("grpc", "http://127.0.0.1:1"))


def test_the_service_is_as_the_environment_names_it(protocol: Protocol, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    with collecting(protocol) as collector, exporting(protocol, collector.url) as exporter:
        exporter.put(trace())
        assert collector.wait_for(lambda spans: spans)[0].service == "shop"
