"""What the reader makes of a stream: requests, or one fault. Without sockets, threads or a loop."""

import random
import tracemalloc

import pytest

from gateway.config import Limits
from gateway.wire.known_heads import KnownHeads
from gateway.wire.requests import RequestReader
from tests.wire.reading import Request, Told, read


def refused(data: bytes) -> tuple[int, str]:
    """The fault that is found in a stream of no whole request."""
    told = read(data)
    assert not told.requests
    (fault,) = told.faults
    return fault


def request(data: bytes) -> Request:
    """The one request of a stream without fault."""
    told = read(data)
    assert not told.faults, told.faults
    (only,) = told.requests
    return only


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "no Host header"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "'a, b'"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "expected one host"),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", "expected one host"),
        (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", "expected one host, or host:port"),
    ],
)
def test_a_request_names_one_host(head: bytes, words: str) -> None:
    status, message = refused(head)
    assert status == 400
    assert words in message


@pytest.mark.parametrize("host", [b"localhost:8000", b"a_b.example", b"127.0.0.1", b"[::1]:8000", b"", b"%C3%A9:1"])
def test_a_host_may_be_a_name_or_an_address(host: bytes) -> None:
    assert request(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n").headers[b"host"] == host


@pytest.mark.parametrize(
    ("url", "host", "target"),
    [
        (b"http://a:80/p/q?r", b"a:80", b"/p/q?r"),
        (b"HTTPS://[::1]", b"[::1]", b"/"),
        (b"http://a?r=/p", b"a", b"/?r=/p"),
    ],
)
@pytest.mark.parametrize("head", [b"HTTP/1.1\r\nHost: b\r\n\r\n", b"HTTP/1.0\r\n\r\n"])
def test_of_a_url_the_host_counts_and_the_path_is_the_target(head: bytes, url: bytes, host: bytes, target: bytes) -> None:
    only = request(b"GET %b %b" % (url, head))
    assert (only.target, only.headers[b"host"]) == (target, host)


@pytest.mark.parametrize("url", [b"ftp://a/", b"http:///p", b"http://me@a/"])
def test_a_url_that_no_server_of_http_has_is_refused(url: bytes) -> None:
    status, message = refused(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % url)
    assert status == 400
    assert message.startswith(f"target {url.decode()!r}: expected a path, or ")


def test_a_url_takes_no_host_header_s_place() -> None:
    assert refused(b"GET http://a/ HTTP/1.1\r\n\r\n")[0] == 400
    assert refused(b"GET http://a/ HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n")[0] == 400


def test_an_old_client_need_not_name_a_host() -> None:
    assert request(b"GET / HTTP/1.0\r\n\r\n").target == b"/"


def test_a_body_is_not_handed_on_in_a_coding_that_is_not_undone() -> None:
    head = b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: %b\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    status, message = refused(head % b"gzip, chunked")
    assert status == 501
    assert "'gzip, chunked'" in message
    assert request(head % b"Chunked").body == b"abc"


def test_a_body_in_small_chunks_takes_little_more_than_its_bytes() -> None:
    stream = b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + b"2\r\nab\r\n" * 200_000
    tracemalloc.start()
    try:
        told = read(*(stream[at : at + 30_000] for at in range(0, len(stream), 30_000)), b"0\r\n\r\n")
        assert tracemalloc.get_traced_memory()[1] < 4_000_000  # 0.4 MB, and 1.4 MB of the stream; a list took 13
    finally:
        tracemalloc.stop()
    assert told.requests[0].body == b"ab" * 200_000


def test_an_old_client_sends_no_chunks() -> None:
    status, message = refused(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    assert status == 400
    assert "Content-Length" in message


@pytest.mark.parametrize(("connection", "kept"), [(b"Upgrade, close", False), (b"close, upgrade", False), (b"Upgrade", True)])
def test_an_offer_of_another_protocol_leaves_the_rest_of_connection_as_it_is(connection: bytes, kept: bool) -> None:
    head = b"POST / HTTP/1.1\r\nHost: t\r\nConnection: %b\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc"
    found = request(head % connection)
    assert (found.body, found.keep_alive) == (b"abc", kept)


def test_an_offer_of_another_protocol_by_an_old_client_leaves_it_old() -> None:
    told = read(b"GET / HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" * 2)
    assert [found.keep_alive for found in told.requests] == [False]


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize("stream", [PREFACE, PREFACE + b"\0\0\0\4\0\0\0\0\0", b"PRI / HTTP/1.1\r\nHost: t\r\n\r\n"])
def test_http_2_is_told_where_it_is_spoken(stream: bytes) -> None:
    for reads in ([stream], [stream[at : at + 1] for at in range(len(stream))]):
        (fault,) = read(*reads).faults
        assert fault == (505, "this port speaks HTTP/1.1; gRPC, over HTTP/2, is at server.grpc_port")


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
def test_another_version_of_http_is_not_taken_for_this_one(version: bytes, connection: bytes) -> None:
    status, message = refused(b"GET / HTTP/%b\r\nHost: t\r\n%b\r\n" % (version, connection))
    assert status == 505
    assert message.startswith(f"HTTP/{version.decode()}: this port speaks HTTP/1.1")


@pytest.mark.parametrize(("version", "told"), [(b"1.0", 0), (b"1.1", 1)])
@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
def test_an_old_client_is_not_told_to_continue(version: bytes, told: int, connection: bytes) -> None:
    head = b"POST / HTTP/%b\r\nHost: t\r\n%bContent-Length: 3\r\nExpect: 100-continue\r\n\r\n" % (version, connection)
    found = read(head, b"abc")
    assert [found.requests[0].body, found.continues] == [b"abc", told]


_HEADS = [
    b"POST /v2/models/m/infer?a=1 HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\nX: y\r\n\r\n",
    b"POST http://t/x HTTP/1.1\r\ncontent-length:%d\r\nHost: t\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: t\r\nX-Request-Id: ID\r\nContent-Length: %d\r\ntraceparent:ID\r\n\r\n",
]
_ODD = [
    b"\r\n", b"\n", b"\r", b"Content-Length: 3\r\n", b"\r\nContent-Length: 3",
    b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
    b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b" ", b"\t", b"0", b"+", b"\x00",
    b"\r\n\r\n", b"X: z\r\n", b"HTTP/1.0", b"", b"x-request-id: a b\r\n", b"Traceparent: ab\r\n",
]  # fmt: skip


def test_a_read_that_is_not_parsed_means_what_it_would_mean_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    streams = []
    for _ in range(1500):
        reads = []
        head = draw.choice(_HEADS)
        for _ in range(draw.randrange(2, 6)):
            body = draw.choice((b"", b"abc", b'{"inputs": []}' * draw.randrange(9), b"\r\n\r\n", b"\r\n\r\nabc" * 3))
            data = bytearray((head % len(body)).replace(b"ID", b"%x" % draw.randrange(16, 260)) + body)
            if not draw.randrange(3):
                at = draw.choice((draw.randrange(len(data)), data.index(b"\r\n") + 2, 0, len(data)))
                data[at : at + draw.choice((0, 0, 1))] = draw.choice(_ODD)
            reads.append(bytes(data))
            if not draw.randrange(6):  # in parts, or with what comes next
                reads[-1:] = [bytes(data[: len(data) // 2]), bytes(data[len(data) // 2 :])]
            if len(reads) > 1 and not draw.randrange(6):
                reads[-2:] = [reads[-2] + reads[-1]]
        streams.append(reads)
    limits = Limits(body_bytes=64)
    heads = KnownHeads()
    seldom_parsed = [read(*reads, limits=limits, heads=heads) for reads in streams]
    monkeypatch.setattr("gateway.wire.requests._TRIES", 0)
    parsed = [read(*reads, limits=limits) for reads in streams]
    for told, expected in zip(seldom_parsed, parsed, strict=True):
        assert told.requests == expected.requests
        assert told.faults == expected.faults


def test_a_head_that_came_before_is_not_parsed_again() -> None:
    told = Told()
    reader = RequestReader(told, Limits())
    for body in (b"abc", b"{}", b"a longer one"):
        data = _HEADS[0] % len(body) + body
        assert reader.feed(memoryview(data)) == len(data)
        told.requests[-1].headers[b"x-of-handler"] = b"1"
        reader._parser = None  # type: ignore[assignment]  # nobody asks it
    assert [request.body for request in told.requests] == [b"abc", b"{}", b"a longer one"]
    assert [request.headers[b"content-length"] for request in told.requests] == [b"3", b"2", b"12"]
    assert told.requests[0].headers.keys() - {b"x-of-handler"} == {b"host", b"content-type", b"content-length", b"x"}


@pytest.mark.parametrize("connections", [1, 3])
def test_a_head_with_other_ids_is_not_parsed_again(connections: int) -> None:
    """As where a proxy numbers requests, and clients are traced."""
    heads, told = KnownHeads(), Told()
    for connection in range(connections):
        reader = RequestReader(told, Limits(), heads)
        for number in range(3):
            if connection or number:
                reader._parser = None  # type: ignore[assignment]  # nobody asks it
            head = (
                b"POST / HTTP/1.1\r\nhost: t\r\nX-Request-ID: %032x\r\ncontent-length: %d\r\nTraceparent: 00-%032x-01\r\n\r\n"
            )
            at = 3 * connection + number
            data = head % (at, 1 + 9 * number, at + 100) + b"x" * (1 + 9 * number)
            assert reader.feed(memoryview(data)) == len(data)
    assert len(heads.by_head) == 1
    for at, request in enumerate(told.requests):
        number = at % 3
        assert request.body == b"x" * (1 + 9 * number)
        assert request.headers == {
            b"host": b"t", b"x-request-id": b"%032x" % at, b"content-length": b"%d" % (1 + 9 * number),
            b"traceparent": b"00-%032x-01" % (at + 100),
        }  # fmt: skip


def test_a_head_that_came_on_another_connection_is_not_parsed_again() -> None:
    heads, told = KnownHeads(), Told()
    paths = [b"/m%d" % number for number in range(8)]
    for connection in range(2):
        for body in (b"abc", b"{}"):
            reader = RequestReader(told, Limits(), heads)
            if connection:
                reader._parser = None  # type: ignore[assignment]  # nobody asks it
            for path in paths:
                data = b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % (path, len(body)) + body
                assert reader.feed(memoryview(data)) == len(data)
    assert [request.target for request in told.requests] == 4 * paths
    assert [request.body for request in told.requests[::8]] == 2 * [b"abc", b"{}"]
    assert [request.headers[b"content-length"] for request in told.requests[::8]] == 2 * [b"3", b"2"]


def test_heads_of_one_line_are_told_apart_wherever_their_length_stands() -> None:
    heads, told = KnownHeads(), Told()
    fields = [b"X: %b\r\nContent-Length: 1\r\nY: %d\r\n" % (b"x" * (number % 5), number) for number in range(6)]
    for _ in range(2):
        for field in fields:
            RequestReader(told, Limits(), heads).feed(memoryview(b"POST / HTTP/1.1\r\nHost: t\r\n" + field + b"\r\n1"))
    assert not told.faults
    assert [request.headers[b"y"] for request in told.requests] == 2 * [b"%d" % number for number in range(6)]


def test_heads_are_forgotten_when_there_are_many_and_long_ones_are_not_kept() -> None:
    heads = KnownHeads()
    most = 0
    for number in range(3000):
        long = b"x" * (2000 * (number % 2))
        data = b"POST /%d HTTP/1.1\r\nHost: t\r\nX: %b\r\nContent-Length: 1\r\n\r\n1" % (number, long)
        RequestReader(Told(), Limits(), heads).feed(memoryview(data))
        known = heads.find(data)
        assert (known is None) == bool(long)
        most = max(most, len(heads._heads))
    assert most == 1024


def test_heads_that_never_come_again_are_soon_not_remembered() -> None:
    reader = RequestReader(Told(), Limits())
    for number in range(20):
        reader.feed(memoryview(b"POST / HTTP/1.1\r\nHost: t\r\nX-Time: %d\r\nContent-Length: 1\r\n\r\nx" % number))
    assert reader._tries == 0


def test_heads_that_are_remembered_again_and_again_take_bounded_memory() -> None:
    """They differ in where their length stands, so that few are found, and in the length."""
    heads = KnownHeads()
    for number in range(2000):
        head = b"POST /a HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\n\r\n" % (b"h" * (1 + number % 6), number)
        read(head + b"x" * number, heads=heads)
    assert len(heads.by_head) <= 1024
