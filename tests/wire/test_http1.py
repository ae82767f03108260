"""Properties of a connection over any bytes, in any pieces: without sockets, threads or a loop."""

import gzip
import json
import random
import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Limits
from gateway.errors import GatewayError, NotReady, Overloaded
from gateway.wire import coding
from gateway.wire.exchange import Exchange
from gateway.wire.http1 import Http1Connection
from tests.http_server.serving import echo, get, post
from tests.wire.talking import Kept, connect, give, send, split

LIMITS = Limits(body_bytes=20_000, header_bytes=2000, header_count=20, pipelined_requests=2)


def run(pieces: list[bytes]) -> bytes:
    """What a new connection answers to these reads."""
    connection, outlet = connect(echo, LIMITS)
    for piece in pieces:
        send(connection, outlet, piece)
    assert connection.idle
    connection.lost()
    return bytes(outlet.written)


def chunked(body: bytes, sizes: list[int]) -> bytes:
    out, at = b"POST /chunked HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n", 0
    for size in sizes:
        if piece := body[at : at + size]:
            out += b"%x\r\n%b\r\n" % (len(piece), piece)
        at += size
    return out + b"0\r\n\r\n"


requests = st.one_of(
    st.binary(max_size=3000).map(post),
    st.builds(lambda body: post(gzip.compress(body), "Content-Encoding: gzip"), st.binary(max_size=2000)),
    st.builds(lambda body: post(body, "Connection: Upgrade", "Upgrade: h2c"), st.binary(max_size=2000)),
    st.builds(lambda body: post(body, "Expect: 100-continue"), st.binary(max_size=200)),
    st.builds(chunked, st.binary(max_size=3000), st.lists(st.integers(1, 2000), max_size=5)),
    st.just(get("/plain")),
    st.just(b"HEAD / HTTP/1.1\r\nHost: t\r\n\r\n"),
)


ANY = settings(max_examples=200, derandomize=True)
MADE = re.compile(rb"HTTP/1.1 100 Continue\r\n\r\n|X-Request-Id: \S+\r\n|Date: [^\r]+\r\n")


@ANY
@given(st.lists(requests, min_size=1, max_size=6), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_the_way_a_stream_is_cut_does_not_matter(stream: list[bytes], cuts: list[int]) -> None:
    data = b"".join(stream)
    # Whether `100 Continue` is sent depends on how much has come already, and an id is made anew; the rest is the same.
    whole, pieces = (re.sub(MADE, b"", run(reads)) for reads in ([data], split(data, cuts)))
    assert whole == pieces
    assert whole.count(b"HTTP/1.1 200 OK\r\n") == len(stream)


@ANY
@given(st.lists(st.one_of(requests, st.binary(max_size=300)), max_size=6), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_no_bytes_break_the_reader(stream: list[bytes], cuts: list[int]) -> None:
    answers = run(split(b"".join(stream), cuts))
    assert statuses(answers) <= {100, 200, 400, 413, 417, 431, 501, 505}


@ANY
@given(requests, st.integers(0, 1 << 20), st.binary(max_size=8), st.integers(0, 8))
def test_a_mutated_request_never_fails_the_server(request_bytes: bytes, at: int, insert: bytes, drop: int) -> None:
    at %= len(request_bytes) + 1
    answers = run([request_bytes[:at] + insert + request_bytes[at + drop :] + get("/next")])
    assert statuses(answers) <= {100, 200, 400, 413, 417, 431, 501, 505}


def statuses(answers: bytes) -> set[int]:
    for error in re.findall(rb'\{"error".*?\}', answers):
        json.loads(error)
    return {int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answers)}


@pytest.mark.parametrize(("size", "off_the_loop"), [(1000, False), (60_000, False), (70_000, True), (1_000_000, True)])
def test_a_body_that_inflates_to_much_is_not_inflated_where_others_wait(size: int, off_the_loop: bool) -> None:
    connection, outlet = connect(echo, outlet=Kept(at_once=False))
    send(connection, outlet, post(gzip.compress(bytes(size)), "Content-Encoding: gzip"))  # of 1 kB at most
    assert bool(outlet.work) is off_the_loop
    for work in outlet.work:
        work()
    assert f'"length": {size}'.encode() in outlet.written


def test_a_body_that_is_being_inflated_at_the_end_is_refused_and_counted() -> None:
    told: list[GatewayError] = []
    outlet = Kept(at_once=False)
    connection = Http1Connection(echo, Limits(), outlet, on_fault=lambda exchange, error: told.append(error))
    send(connection, outlet, post(gzip.compress(bytes(1_000_000)), "Content-Encoding: gzip"))
    connection.cut_off()
    outlet.work_once()
    assert outlet.written.startswith(b"HTTP/1.1 503 ")
    assert outlet.written.count(b"Retry-After: 1\r\n") == outlet.written.count(b"HTTP/1.1 ") == 1
    assert [type(error) for error in told] == [NotReady]


@pytest.mark.parametrize("size", [1000, 70_000])
def test_a_body_for_which_there_is_no_memory_once_inflated_may_be_sent_again(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def inflate(*about: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(coding, "inflate", inflate)
    told: list[GatewayError] = []
    outlet = Kept()
    connection = Http1Connection(echo, Limits(), outlet, on_fault=lambda exchange, error: told.append(error))
    send(connection, outlet, post(gzip.compress(random.Random(1).randbytes(size)), "Content-Encoding: gzip"))
    assert outlet.written.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: 1\r\n" in outlet.written
    assert [type(error) for error in told] == [Overloaded]
    assert not caplog.records
    assert not connection.held_bytes


def test_an_answer_that_cannot_be_compressed_goes_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def deflate(*about: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr("gateway.wire.exchange.deflate", deflate)
    connection, outlet = connect(lambda exchange: exchange.respond(200, b"a" * 100_000))
    send(connection, outlet, get("/x", "Accept-Encoding: gzip"))
    assert b"Content-Encoding" not in outlet.written
    assert outlet.written.endswith(b"a" * 100_000)


def test_an_answered_request_that_waits_for_its_turn_holds_its_answer_alone() -> None:
    exchanges: list[Exchange] = []
    connection, outlet = connect(exchanges.append)
    send(connection, outlet, get() + post(gzip.compress(bytes(60_000)), "Content-Encoding: gzip") * 20)
    assert [len(exchange.body) for exchange in exchanges] == [0] + [60_000] * 20
    for exchange in exchanges[1:]:
        exchange.respond(200, b"answered")
    assert [len(exchange.body) for exchange in exchanges] == [0] * 21
    assert connection.held_bytes == 20 * len(b"answered")
    exchanges[0].respond(200)
    assert connection.held_bytes == 0


@pytest.mark.parametrize("coding", [(), ("Content-Encoding: gzip",)])
def test_what_a_connection_makes_us_hold_is_bounded(coding: tuple[str, ...]) -> None:
    exchanges: list[Exchange] = []
    limits = Limits(body_bytes=1_000_000)
    connection, outlet = connect(exchanges.append, limits)
    body = random.Random(1).randbytes(300_000)
    for _ in range(40):
        send(connection, outlet, post(gzip.compress(body) if coding else body, *coding))
        if not outlet.reading:
            break
    assert len(exchanges) == 4
    assert connection.held_bytes == 1_200_000
    for number in range(12):
        while not outlet.reading:
            exchanges.pop(0).respond(200, b"%d" % number)
            outlet.give_turns(connection)
        send(connection, outlet, post(body))
        assert connection.held_bytes <= 1_300_000


def test_one_body_of_a_connection_is_inflated_at_a_time() -> None:
    exchanges: list[Exchange] = []
    connection, outlet = connect(exchanges.append, outlet=Kept(at_once=False))
    send(connection, outlet, post(gzip.compress(bytes(10_000_000)), "Content-Encoding: gzip") * 3)
    for number in range(3):
        assert (len(exchanges), len(outlet.work)) == (number, 1)
        outlet.work.pop()()
        outlet.give_turns(connection)


def test_what_came_in_one_read_is_handled_in_turns() -> None:
    now_ns = 0
    handled: list[bytes] = []

    def slow(exchange: Exchange) -> None:
        nonlocal now_ns
        now_ns += 2_000_000
        handled.append(exchange.path)
        exchange.respond(200, b"made")

    outlet = Kept()
    connection = Http1Connection(slow, Limits(), outlet, clock=lambda: now_ns)
    give(connection, b"".join(get(f"/{number}") for number in range(5000)))  # 150 kB
    turns = 1
    while outlet.called:
        assert len(handled) <= 6 * turns
        assert not outlet.reading
        outlet.called = False
        connection.go_on()
        turns += 1
    assert handled == [b"/%d" % number for number in range(5000)]
    assert outlet.written.count(b"HTTP/1.1 200 OK") == 5000
    assert outlet.reading
    assert connection.idle


def test_of_one_read_few_requests_are_made_before_they_are_wanted() -> None:
    exchanges: list[Exchange] = []
    connection, outlet = connect(exchanges.append)
    read = b"GET / HTTP/1.1\r\nHost:\r\n\r\n" * 10_000
    tracemalloc.start()
    try:
        send(connection, outlet, read)
        assert tracemalloc.get_traced_memory()[0] < len(read) + 4_000_000  # 10 000 exchanges take 17 MB
    finally:
        tracemalloc.stop()
    assert len(exchanges) == 64
    for number in range(10_000):
        exchanges[number].respond(200)
        outlet.give_turns(connection)
    assert outlet.written.count(b"HTTP/1.1 200 OK") == 10_000


@pytest.mark.parametrize("kind", ["bombs", "bodies", "short"])
def test_the_memory_of_a_connection_has_the_bound_that_the_docs_state(kind: str) -> None:
    most = 4 << 20
    request = {
        "bombs": post(gzip.compress(bytes(most)), "Content-Encoding: gzip"),
        "bodies": post(bytes(most - 1)),
        "short": b"GET / HTTP/1.1\r\nHost:\r\n\r\n" * 10_000,
    }[kind]
    reads = split(request, list(range(0, len(request), 256 << 10)))
    held: list[Exchange] = []
    connection, outlet = connect(held.append, Limits(body_bytes=most), Kept(at_once=False))
    tracemalloc.start()
    try:
        for _ in range(100):
            if outlet.reading:
                for data in reads:
                    give(connection, data)
            outlet.work_once()
            outlet.give_turns(connection)
        assert tracemalloc.get_traced_memory()[1] < (4 if kind == "bombs" else 2) * most + 4_000_000
    finally:
        tracemalloc.stop()
    assert held
    assert not outlet.reading


def answered_later(*requests: bytes, limits: Limits = LIMITS) -> tuple[list[Exchange], bytes]:
    """What a handler gets that answers once it has read all of them, and what it answers."""
    asked: list[Exchange] = []
    connection, outlet = connect(asked.append, limits)
    for request in requests:
        send(connection, outlet, request)
    for exchange in asked:
        exchange.respond(200, exchange.body)
    assert connection.idle
    assert connection.held_bytes == 0
    connection.lost()
    return asked, bytes(outlet.written)


def test_an_answer_bears_the_id_by_which_it_is_known() -> None:
    for fields, known in (((), None), (("X-Request-Id: mine",), b"mine")):
        (exchange,), written = answered_later(post(b"x", *fields))
        assert b"X-Request-Id: %b\r\n" % exchange.request_id in written
        assert known in (None, exchange.request_id)


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 99999999\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{",
        b"Expect: x\r\nContent-Length: 1\r\n\r\n{",
        b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n{",
        b"A: %b\r\n\r\n" % (b"x" * 40_000),
        b"Content-Length: 5\r\n\r\nhalf",  # until the end cuts it off
    ],
)
def test_the_refusal_of_a_request_bears_the_id_that_its_head_has_told(rest: bytes) -> None:
    faults: list[Exchange] = []
    outlet = Kept()
    connection = Http1Connection(echo, Limits(), outlet, on_fault=lambda exchange, error: faults.append(exchange))
    for id_ in (b"first", b"own-7"):
        send(connection, outlet, b"POST /x HTTP/1.1\r\nHost: t\r\nX-Request-Id: %b\r\n" % id_)
        send(connection, outlet, b"Content-Length: 0\r\n\r\n" if id_ == b"first" else rest)
    connection.cut_off()
    assert re.findall(rb"X-Request-Id: (\S+)", outlet.written) == [b"first", b"own-7"]
    assert [exchange.request_id for exchange in faults] == [b"own-7"]


def test_what_is_no_request_has_not_the_id_of_the_one_before() -> None:
    _, written = answered_later(post(b"x", "X-Request-Id: mine"), b"\0\0")
    assert written.count(b"mine") == 1


def test_requests_with_the_same_head_have_the_same_headers_and_their_own_bodies() -> None:
    bodies = [b"abc", b"def", b"ghij", b"klmn", b"o" * 100, b"", b"pqr"]
    asked, written = answered_later(*map(post, bodies), limits=Limits())
    assert [exchange.headers[b"content-length"] for exchange in asked] == [b"%d" % len(body) for body in bodies]
    assert [part.partition(b"\r\n\r\n")[2] for part in re.split(rb"(?=HTTP/1\.1 200)", written)[1:]] == bodies


@pytest.mark.parametrize("limits", [Limits(pipelined_requests=1), Limits(body_bytes=8), Limits(requests_per_connection=2)])
def test_what_a_connection_may_hold_is_asked_where_little_is(limits: Limits) -> None:
    asked: list[Exchange] = []
    connection, outlet = connect(asked.append, limits)
    send(connection, outlet, post(b"12345678"))
    assert connection.reading is (limits.requests_per_connection > 0)
    asked[0].respond(200, b"1")
    assert connection.reading
    send(connection, outlet, post(b"12345678"))
    asked[1].respond(200, b"2")
    assert (b"Connection: close" in outlet.written) is (limits.requests_per_connection > 0)
