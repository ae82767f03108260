"""What the log tells of requests that were answered with an error."""

import logging
from typing import Any

import pytest

from gateway.engine.failed_requests import FailedRequests
from gateway.errors import BackendFailed, Cancelled, GatewayError, InternalError, InvalidArgument, Overloaded
from gateway.tracing.context import write
from gateway.types import RequestTrace, SpanContext

S = 1_000_000_000


class Asked:
    """A caller with the id 7."""

    headers: dict[bytes, bytes] = {}  # noqa: RUF012  # nobody changes it
    request_id = b"7"

    def tell(self, name: bytes, value: bytes) -> None: ...


def tell(failed: FailedRequests, error: GatewayError, now_ns: int = S, **more: Any) -> None:
    given = {"model": "m", "version": "1", "protocol": "rest", "trace": None} | more
    failed.tell(error, caller=Asked(), took_ns=12_345_678, now_ns=now_ns, **given)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_a_line_says_whose_it_was_how_long_it_took_and_why(log: pytest.LogCaptureFixture) -> None:
    tell(FailedRequests(), Overloaded("full\nof it"))
    (line,) = log.records
    assert line.getMessage() == "request 7 of model m version 1 over rest: overloaded after 12.3 ms: full of it"
    assert line.levelno == logging.WARNING


def test_one_that_is_traced_names_its_trace(log: pytest.LogCaptureFixture) -> None:
    trace = RequestTrace(write(SpanContext("a" * 32, "b" * 16)), lambda _: None)
    tell(FailedRequests(), Overloaded("full"), trace=trace)
    assert log.records[0].__dict__["fields"] | {"trace_id": "a" * 32, "span_id": "b" * 16} == log.records[0].__dict__["fields"]


@pytest.mark.parametrize("error", [BackendFailed("x"), InternalError("x"), Cancelled("x")])
def test_what_is_told_elsewhere_or_is_of_no_interest_is_not(error: GatewayError, log: pytest.LogCaptureFixture) -> None:
    tell(FailedRequests(), error)
    assert log.records == []


def test_the_next_line_tells_how_many_were_left_out(log: pytest.LogCaptureFixture) -> None:
    failed = FailedRequests()
    for _ in range(25):
        tell(failed, Overloaded("full"))
    tell(failed, Overloaded("full"), now_ns=100 * S)
    assert len(log.records) == 11
    assert log.records[-1].getMessage().endswith("after 12.3 ms (15 like it before are left out): full")
    assert log.records[-1].__dict__["fields"]["left_out"] == 15


def test_what_a_client_does_wrong_hides_nothing_of_the_server(log: pytest.LogCaptureFixture) -> None:
    failed = FailedRequests()
    for _ in range(25):
        tell(failed, InvalidArgument("no"))
    for model in ("m", "other"):
        tell(failed, Overloaded("full"), model=model)
    assert [line.levelno for line in log.records] == [logging.INFO] * 10 + [logging.WARNING] * 2
