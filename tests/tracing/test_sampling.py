"""Which requests are traced, and how W3C Trace Context is read: pure."""

import random
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from gateway.config import Tracing
from gateway.errors import ConfigError
from gateway.tracing.context import read, span_id_of, trace_id_of, within, write
from gateway.tracing.sampler import Sampler
from gateway.tracing.settings import settings
from gateway.types import SpanContext

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Asked:
    """A caller with such headers. told: with its answer."""

    request_id = b"7"

    def __init__(self, **headers: str) -> None:
        self.headers = {name.encode(): value.encode() for name, value in headers.items()}
        self.told: dict[bytes, bytes] = {}

    def tell(self, name: bytes, value: bytes) -> None:
        self.told[name] = value


@pytest.mark.parametrize(
    ("parent", "sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),  # other flags mean nothing here
        (f"01-{TRACE}-{PARENT}-01", True),  # of a later version
        (f"01-{TRACE}-{PARENT}-01-more", True),
    ],
)
def test_a_parent_is_read(parent: str, sampled: bool) -> None:
    assert read(parent.encode(), b"a=1,b=2") == (SpanContext(TRACE, PARENT, "a=1,b=2"), sampled)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"01-{TRACE}-{PARENT}-01more",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-1",
        f" 00-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01, 00-{TRACE}-{PARENT}-01",  # two headers
    ],
)
def test_a_malformed_parent_is_none(parent: str) -> None:
    assert read(parent.encode()) is None


@pytest.mark.parametrize("state", [b"a=1", b"a=1, b@c=2 ,,d=x y", b"0/-*_@b=!", b",".join(b"a%d=1" % n for n in range(32))])
def test_a_state_is_handed_on_as_it_came(state: bytes) -> None:
    found = read(f"00-{TRACE}-{PARENT}-01".encode(), state)
    assert found is not None
    assert found[0].state == state.decode()


@pytest.mark.parametrize(
    "state",
    [
        b"a=" + b"x" * 511,
        b"a=\xff",
        b"a=1\x00",
        b"",
        b"a",
        b"A=1",
        b"a=1=2",
        b"a=1,a=2",
        b"a=1\r\nx: y",
        b",".join(b"a%d=1" % n for n in range(33)),
    ],
)
def test_a_state_that_cannot_be_handed_on_is_dropped_alone(state: bytes) -> None:
    found = read(f"00-{TRACE}-{PARENT}-01".encode(), state)
    assert found is not None
    assert found[0].state == ""


def test_what_is_written_can_be_read_and_is_new() -> None:
    one = sampler(1.0)
    traces = [one.begin(Asked()) for _ in range(100)]
    written = [trace.own for trace in traces if trace is not None]
    assert len(set(map(trace_id_of, written))) == len(set(map(span_id_of, written))) == 100
    for each in written:
        context = SpanContext(trace_id_of(each), span_id_of(each))
        assert write(context) == each
        assert read(each) == (context, True)
    inner = within(SpanContext(TRACE, PARENT, "a=1"))
    assert trace_id_of(inner) == TRACE
    assert re.fullmatch("[0-9a-f]{16}", span_id_of(inner))
    assert span_id_of(inner) != PARENT


def sampler(ratio: float, **more: Any) -> Sampler:
    return Sampler(ratio, lambda _: None, **more)


def test_who_sends_a_parent_decides() -> None:
    assert sampler(1.0).begin(Asked(traceparent=f"00-{TRACE}-{PARENT}-00")) is None
    asked = Asked(traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=1")
    trace = sampler(0.0).begin(asked)
    assert trace is not None
    assert (trace_id_of(trace.own), trace.parent_id, trace.state) == (TRACE, PARENT, "a=1")
    assert asked.told == {b"traceresponse": trace.own}


def test_a_malformed_parent_leaves_it_to_the_ratio() -> None:
    trace = sampler(1.0).begin(Asked(traceparent="nonsense"))
    assert trace is not None
    assert trace.parent_id == ""
    assert sampler(0.0).begin(Asked(traceparent="nonsense")) is None


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 0.9])
def test_so_many_are_traced_and_the_gaps_are_those_of_chance(ratio: float) -> None:

    chosen = sampler(ratio, chance=random.Random(7).random)
    traced = [chosen.begin(Asked()) is not None for _ in range(40_000)]
    assert sum(traced) / len(traced) == pytest.approx(ratio, rel=0.1)
    # Each by itself: after one that is traced the next is as often as any.
    after = [following for one, following in pairwise(traced) if one]
    assert sum(after) / len(after) == pytest.approx(ratio, rel=0.3)


def test_all_and_none() -> None:
    assert all(map(sampler(1.0).begin, [Asked()] * 100))
    assert not any(map(sampler(0.0).begin, [Asked()] * 100))
    assert not any(map(sampler(1e-300).begin, [Asked()] * 100))


def test_without_parents_say_all_who_go_by_the_trace_decide_alike() -> None:
    low, high = (Asked(traceparent=f"00-{'a' * 16}{half:016x}-{PARENT}-00") for half in (1, 0xF << 60))
    chosen = sampler(0.5, parent_based=False)
    assert chosen.begin(low) is not None
    assert chosen.begin(high) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0.01, True)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, (1.0, True)),
        ({"OTEL_TRACES_SAMPLER": "always_off", "OTEL_TRACES_SAMPLER_ARG": "x"}, (0.0, False)),
        ({"OTEL_TRACES_SAMPLER": "ParentBased_TraceIdRatio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, (0.25, True)),
        ({"OTEL_TRACES_SAMPLER": "traceidratio"}, (1.0, False)),
    ],
)
def test_without_a_ratio_the_environment_says(environ: Mapping[str, str], expected: tuple[float, bool]) -> None:
    found = settings(Tracing(), environ)
    assert found is not None
    assert (found.ratio, found.parent_based) == expected
    given = settings(Tracing(sample_ratio=0.5), environ)
    assert given is not None
    assert (given.ratio, given.parent_based) == (0.5, True)


def test_the_queue_and_the_protocol_are_as_the_environment_says() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_MAX_QUEUE_SIZE": "100",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
    }
    found = settings(Tracing(), environ)
    assert found is not None
    assert (found.protocol, found.queued_spans, found.sent_spans, found.delay_s) == ("http", 100, 100, 0.25)
    given = settings(Tracing(protocol="grpc"), environ)
    assert given is not None
    assert given.protocol == "grpc"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER: got 'jaeger_remote', expected one of always_on, "),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            "OTEL_TRACES_SAMPLER_ARG: got '2', expected a number from 0 to 1",
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL: got 'http/json', expected one of grpc, "),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE: got 'many', expected a whole number from 1"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_told(environ: Mapping[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as fault:
        settings(Tracing(), environ)
    assert fault.value.message.startswith(told)


def test_it_is_off_unless_the_file_has_it_and_where_the_environment_says_so() -> None:
    assert settings(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}) is None
    assert settings(Tracing(), {"OTEL_SDK_DISABLED": "true"}) is None
