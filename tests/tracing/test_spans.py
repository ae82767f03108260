"""From what was noted of requests and batches to spans: pure."""

from typing import Any

import msgspec
import pytest

from gateway.tracing.context import write
from gateway.tracing.spans import Spans, number_of, spans_of
from gateway.types import BatchEnd, BatchTrace, RequestEnd, RequestTrace, SpanContext

TRACE = "0af7651916cd43dd8448eb211c80319c"
OWN = SpanContext(TRACE, "1" * 16)
OTHER = SpanContext("f" * 32, "2" * 16)


def request(*batches: BatchTrace, **more: Any) -> RequestTrace:
    """Read at 100, decoded at 110, its outcome known at 900, answered at 950."""
    end = RequestEnd(
        operation="op", error="", status=("status", 200), model=(), rows=1, request_id=b"7", id="", arrival_ns=100,
        decoded_ns=110, encoding_ns=900, ended_ns=950,
    )  # fmt: skip
    end = msgspec.structs.replace(end, **more)
    return RequestTrace(write(OWN), lambda _: None, batches=list(batches), end=end)


def batch(at_ns: int, of: SpanContext = OTHER, **more: Any) -> BatchTrace:
    """Closed at a time, its session 10 later and for 100, back 5 after that. of: the first request in it."""
    end = BatchEnd(at_ns + 10, at_ns + 110, at_ns + 115, **more)
    ids = f"{at_ns:016x}" + "5" * 16
    return BatchTrace(write(of), "", lambda _: None, "batch", at_ns, links=(write(of), write(OWN)), ids=ids, end=end)


def stages(trace: RequestTrace) -> list[tuple[str, int, int]]:
    spans = made(trace)
    own = spans.own
    assert (own.name, own.kind) == ("op", "server")
    return [station[:3] for station in spans.stations]


def made(trace: RequestTrace | BatchTrace) -> Spans:
    *_, spans = spans_of(trace)
    return spans


def test_a_request_passes_its_stations() -> None:
    assert stages(request(batch(200))) == [
        ("decode", 100, 110),
        ("queue", 110, 200),
        ("batch_wait", 200, 210),
        ("compute", 210, 310),
        ("encode", 900, 950),
    ]


def test_one_that_ran_twice_waited_twice() -> None:
    assert stages(request(batch(200, error="backend_failed"), batch(400)))[1:-1] == [
        ("queue", 110, 200),
        ("batch_wait", 200, 210),
        ("compute", 210, 310),
        ("queue", 315, 400),
        ("batch_wait", 400, 410),
        ("compute", 410, 510),
    ]


def test_one_that_was_split_was_in_several_batches_at_once() -> None:
    names = [name for name, _, _ in stages(request(batch(200), batch(205)))]
    assert names == ["decode", "queue", "batch_wait", "compute", "batch_wait", "compute", "encode"]


def test_one_that_was_shed_waited_until_then() -> None:
    assert stages(request(error="overloaded")) == [("decode", 100, 110), ("queue", 110, 900)]


def test_one_that_could_not_be_read_has_no_other_station() -> None:
    assert stages(request(decoded_ns=0, error="invalid_argument")) == [("decode", 100, 900)]


def test_one_whose_deadline_passed_while_it_ran_shows_how_far_it_came() -> None:
    running = batch(200)
    running.end = None
    assert stages(request(running, error="deadline_exceeded")) == [("decode", 100, 110), ("queue", 110, 200)]


def test_what_is_the_clients_fault_is_no_fault_of_the_servers() -> None:
    theirs, ours = (made(request(error=code)).own for code in ("invalid_argument", "overloaded"))
    assert (theirs.failed, theirs.attributes[-1]) == (False, ("error.type", "invalid_argument"))
    assert (ours.failed, ours.attributes[-1]) == (True, ("error.type", "overloaded"))


def test_a_batch_stands_in_the_trace_of_its_first_request_and_holds_what_its_session_did() -> None:
    of_own = batch(200, of=OWN)
    assert [name for name, _, _ in stages(request(of_own))] == ["decode", "queue", "batch_wait", "encode"]
    spans = made(of_own)
    whole = spans.own
    assert (whole.parent_id, whole.start_ns, whole.end_ns, whole.links) == (OWN.span_id, 200, 315, (OWN, OWN))
    assert spans.stations == [("compute", 210, 310, ())]
    assert (spans.station_id, spans.failed) == ("5" * 16, False)
    assert made(batch(200, of=OWN, error="backend_failed")).failed
    left = made(batch(200, of=OWN, error="cancelled"))
    assert (left.failed, left.own.failed, left.own.attributes[-1]) == (False, False, ("error.type", "cancelled"))


def test_others_in_a_batch_are_linked_to_it() -> None:
    shared = batch(200)
    links = {name: links for name, _, _, links in made(request(shared)).stations}
    assert links.pop("compute") == (SpanContext(OTHER.trace_id, f"{200:016x}"),)
    assert set(links.values()) == {()}


def test_a_request_has_the_batch_with_it_in_which_no_other_is_traced() -> None:
    lone, shared = batch(200, of=OWN), batch(400)
    lone.ended, lone.links = None, ()
    spans = spans_of(request(lone, shared))
    assert [each.own.name for each in spans] == ["batch", "op"]
    assert spans[0] == spans_of(lone)[0]
    assert spans[0].own.links == (OWN,)


def of_its_own(at_ns: int, **more: Any) -> BatchTrace:
    """A batch in which no other request is traced."""
    lone = batch(at_ns, of=OWN, **more)
    lone.ended = None
    return lone


def still_running() -> BatchTrace:
    running = of_its_own(200)
    running.end = None
    return running


@pytest.mark.parametrize(
    "trace",
    [
        request(of_its_own(200)), request(batch(200)), request(batch(200, of=OWN)), request(batch(200), batch(205)),
        request(of_its_own(200, error="backend_failed"), batch(400)), request(still_running(), error="deadline_exceeded"),
        request(error="overloaded"), request(decoded_ns=0, error="invalid_argument"), request(), batch(200),
        msgspec.structs.replace(batch(200), kind="client"), msgspec.structs.replace(batch(200), end=BatchEnd(0, 0, 300)),
    ],
)  # fmt: skip
def test_what_finds_no_room_is_counted_as_the_spans_that_it_would_have_been(trace: RequestTrace | BatchTrace) -> None:
    assert number_of(trace) == sum(map(len, spans_of(trace)))


def test_what_another_process_tells_of_itself_is_not_told_twice() -> None:
    there = batch(200)
    there.kind = "client"
    spans = made(there)
    assert (spans.own.kind, spans.stations) == ("client", [])
