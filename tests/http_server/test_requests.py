"""What the listener makes of well-formed requests."""

import asyncio
import gzip
import json
import random
import re
import socket
import zlib
from collections.abc import Iterator

import pytest

from gateway.wire.compression import choose_encoding, inflate
from gateway.wire.exchange import Exchange
from tests.http_server.serving import Holder, Served, digest, echo, get, post, serving

DATE = re.compile(r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT")


@pytest.fixture(scope="module")
def echoing() -> Iterator[Served]:
    with serving(echo, body_bytes=8 << 20) as served:
        yield served


def test_a_request_is_understood(echoing: Served) -> None:
    with echoing.connect() as client:
        seen = client.ask(post(b"abc", "X-Odd-Name:  two words  ", "x-odd-name: more", path="/a%20b?c=d&e")).json()
    assert seen["method"] == "POST"
    assert (seen["path"], seen["query"]) == ("/a%20b", "c=d&e")
    assert seen["digest"] == digest(b"abc")
    assert seen["headers"]["x-odd-name"] == "two words, more"


def test_a_connection_serves_many_requests(echoing: Served) -> None:
    with echoing.connect() as client:
        for n in range(50):
            assert client.ask(post(b"x" * n)).json()["length"] == n


@pytest.mark.parametrize("size", [1, 1000, 200_000, 300_000, 3_000_000])
def test_a_body_of_any_size_arrives_whole(echoing: Served, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"z" * (size % 256)
    with echoing.connect() as client:
        assert client.ask(post(body)).json()["digest"] == digest(body)
        assert client.ask(get()).json()["length"] == 0  # the connection goes on


def test_a_body_may_come_in_pieces(echoing: Served) -> None:
    request = post(b"0123456789" * 10) + post(b"second")
    with echoing.connect() as client:
        for at in range(0, len(request), 7):
            client.send(request[at : at + 7])
        assert client.receive().json()["digest"] == digest(b"0123456789" * 10)
        assert client.receive().json()["digest"] == digest(b"second")


def test_chunked_bodies_are_joined(echoing: Served) -> None:
    head = b"POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
    with echoing.connect() as client:
        client.send(head + b"3\r\nabc\r\n")
        client.send(b"A;ext=1\r\n0123456789\r\n0\r\nX-Trailer: 1\r\n\r\n")
        seen = client.receive().json()
        assert seen["digest"] == digest(b"abc0123456789")
        assert "x-trailer" not in seen["headers"]
        assert client.ask(get()).status == 200


def test_pipelined_requests_are_answered_in_order() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(b"".join(get(f"/{n}") for n in range(5)))
        served.wait_for(lambda: len(holder.held) == 5)
        for n in (3, 1, 0, 4, 2):
            served.call(lambda n=n: holder.held[n].respond(200, b"%d" % n))
        assert [client.receive().body for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


def test_the_handler_gets_a_bounded_number_of_pipelined_requests() -> None:
    holder = Holder()
    with serving(holder, pipelined_requests=3) as served, served.connect() as client:
        client.send(b"".join(get(f"/{n}") for n in range(10)))
        served.wait_for(lambda: len(holder.held) == 3)
        for n in range(10):
            assert len(holder.held) == min(10, n + 3)
            served.call(lambda n=n: holder.held[n].respond(200, b"%d" % n))
        assert [client.receive().body for _ in range(10)] == [b"%d" % n for n in range(10)]


def test_thousands_of_pipelined_requests_do_not_recurse() -> None:
    with serving(echo, pipelined_requests=2) as served, served.connect() as client:
        client.send(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n" * 5000)
        assert all(client.receive().status == 200 for _ in range(5000))


def test_100_continue_is_sent_before_the_body(echoing: Served) -> None:
    with echoing.connect() as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert client.receive().status == 100
        assert client.ask(b"abc").json()["digest"] == digest(b"abc")


def test_100_continue_waits_for_earlier_answers() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(get("/first") + b"POST /second HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        served.wait_for(lambda: len(holder.held) == 1)
        served.call(lambda: holder.held[0].respond(200, b"first"))
        assert client.receive().body == b"first"
        assert client.receive().status == 100


def test_another_expectation_is_refused(echoing: Served) -> None:
    with echoing.connect() as client:
        assert client.ask(post(b"abc", "Expect: magic")).status == 417


def test_http_1_0_closes_unless_asked_not_to(echoing: Served) -> None:
    with echoing.connect() as client:
        answer = client.ask(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert answer.headers["connection"] == "keep-alive"
        assert client.ask(b"GET /x HTTP/1.0\r\n\r\n").headers["connection"] == "close"
        assert client.at_end()


def test_connection_close_is_kept(echoing: Served) -> None:
    with echoing.connect() as client:
        answer = client.ask(get("/x", "Connection: close") + get("/never"))
        assert answer.headers["connection"] == "close"
        assert client.at_end()


def test_head_has_the_length_and_no_body(echoing: Served) -> None:
    with echoing.connect() as client:
        client.send(b"HEAD /x HTTP/1.1\r\nHost: t\r\n\r\n")
        answer = client.receive(head=True)
        assert int(answer.headers["content-length"]) > 0
        assert DATE.fullmatch(answer.headers["date"])
        assert client.ask(get()).status == 200


@pytest.mark.parametrize("request_", [get(), post(b"x"), b"nonsense\r\n\r\n", get("/x", "Content-Length: x")], ids=repr)
def test_every_answer_tells_its_date(echoing: Served, request_: bytes) -> None:
    with echoing.connect() as client:
        answer = client.ask(request_)
    assert DATE.fullmatch(answer.headers["date"]), answer


@pytest.mark.parametrize("body", [b"", b"hello"])
def test_an_offer_of_another_protocol_is_passed_over(echoing: Served, body: bytes) -> None:
    # As Java's HttpClient sends with the first request of each connection.
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    with echoing.connect() as client:
        client.send(post(body, *offer) + post(b"next"))
        assert client.receive().json()["digest"] == digest(body)
        assert client.receive().json()["digest"] == digest(b"next")
        request = post(body * 1000, *offer)
        client.send(request[:150])
        client.send(request[150:])
        assert client.receive().json()["digest"] == digest(body * 1000)


def test_the_answer_is_written_without_delay(echoing: Served) -> None:
    with echoing.connect() as client:
        client.ask(get())
        (connection,) = list(echoing.server.connections)
        transport_socket = connection._transport.get_extra_info("socket")
        assert transport_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


# compression


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate"])
def test_compressed_bodies_are_read(echoing: Served, encoding: str, size: int) -> None:
    body = bytes(range(250)) * (size // 10)
    raw = zlib.compressobj(wbits=-15)
    packed = {
        "gzip": gzip.compress(body),
        "deflate": zlib.compress(body),
        "raw deflate": raw.compress(body) + raw.flush(),
    }[encoding]
    with echoing.connect() as client:
        seen = client.ask(post(packed, f"Content-Encoding: {encoding.split()[-1]}")).json()
        assert seen["digest"] == digest(body)
        assert "content-encoding" not in seen["headers"]


@pytest.mark.parametrize("named", ["identity", "Identity", "IDENTITY ", ""])
def test_a_body_that_is_not_coded_is_taken_as_it_is(echoing: Served, named: str) -> None:
    with echoing.connect() as client:
        assert client.ask(post(b"abc", f"Content-Encoding: {named}")).json()["digest"] == digest(b"abc")


@pytest.mark.parametrize("named", ["GZIP", "X-Gzip", "Gzip "])
def test_encodings_are_named_in_any_case(echoing: Served, named: str) -> None:
    with echoing.connect() as client:
        assert client.ask(post(gzip.compress(b"abc"), f"Content-Encoding: {named}")).json()["digest"] == digest(b"abc")


def test_an_unknown_encoding_says_which_are_known(echoing: Served) -> None:
    with echoing.connect() as client:
        answer = client.ask(post(b"abc", "Content-Encoding: br"))
        assert (answer.status, answer.headers["accept-encoding"]) == (501, "gzip, deflate")
        assert client.ask(get()).status == 200


@pytest.mark.parametrize(
    "packed",
    [b"no gzip", gzip.compress(b"a" * 100)[:-9], b"", gzip.compress(b"abc")[:-1] + b"\1"],
    ids=["not gzip", "cut off", "empty", "wrong length"],
)
def test_broken_compression_is_refused(echoing: Served, packed: bytes) -> None:
    with echoing.connect() as client:
        answer = client.ask(post(packed, "Content-Encoding: gzip"))
        assert answer.status == 400
        assert "gzip" in answer.json()["error"]
        assert client.ask(get()).status == 200


def test_the_limit_counts_decompressed_bytes() -> None:
    bomb = gzip.compress(b"\0" * 5_000_000)  # 4.9 kB
    with serving(echo, body_bytes=1_000_000) as served, served.connect() as client:
        answer = client.ask(post(bomb, "Content-Encoding: gzip"))
        assert answer.status == 413
        assert "1000000 bytes" in answer.json()["error"]
        assert client.ask(post(gzip.compress(b"\0" * 1_000_000), "Content-Encoding: gzip")).json()["length"] == 1_000_000


def test_members_of_a_gzip_body_are_joined_and_bounded_together() -> None:
    packed = gzip.compress(b"a" * 10) + gzip.compress(b"b" * 10)
    assert inflate(b"gzip", packed, 20) == b"a" * 10 + b"b" * 10


@pytest.mark.parametrize("size", [100, 5000, 500_000])
@pytest.mark.parametrize(("accepted", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_large_answers_are_compressed_for_who_accepts_it(accepted: str, unpack: object, size: int) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.respond(200, [b"x" * (size // 2), memoryview(b"y" * (size // 2))])

    with serving(answer) as served, served.connect() as client:
        got = client.ask(get("/x", f"Accept-Encoding: {accepted}"))
        if size >= 1024:
            assert got.headers["content-encoding"] == accepted
            assert len(got.body) < size
            got.body = unpack(got.body)  # type: ignore[operator]
        assert got.body == b"x" * (size // 2) + b"y" * (size // 2)
        assert "content-encoding" not in client.ask(get()).headers


def test_compressed_answers_keep_their_order() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.respond(200, exchange.path * (40_000 if exchange.path == b"/big" else 1))

    with serving(answer) as served, served.connect() as client:
        client.send(get("/big", "Accept-Encoding: gzip") + get("/small"))
        assert gzip.decompress(client.receive().body) == b"/big" * 40_000
        assert client.receive().body == b"/small"


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("gzip", b"gzip"), ("deflate", b"deflate"), ("deflate, gzip", b"gzip"), ("deflate, gzip;q=0.5", b"deflate"),
        ("br", b""), ("gzip, " + "x, " * 400, b""),
        ("gzip;q=0", b""), ("*", b"gzip"), ("*;q=0", b""), ("identity, gzip;q=0.1", b""), ("gzip;q=x", b""), ("", b""),
    ],
)  # fmt: skip
def test_the_encoding_is_negotiated(accepted: str, chosen: bytes) -> None:
    assert choose_encoding(accepted.encode()) == chosen


def test_compressed_bodies_are_read_and_written_also_where_no_thread_can_be_had() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.respond(200, bytes(exchange.body))

    body = random.Random(1).randbytes(100_000)
    with serving(answer) as served, served.connect() as client:
        asyncio.run_coroutine_threadsafe(served.loop.shutdown_default_executor(), served.loop).result(5)
        for _ in range(2):
            got = client.ask(post(gzip.compress(body), "Content-Encoding: gzip", "Accept-Encoding: gzip"))
            assert (got.status, gzip.decompress(got.body)) == (200, body)


# faults of the handler


def test_a_handler_that_fails_costs_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    def handler(exchange: Exchange) -> None:
        if exchange.path == b"/fail":
            raise ValueError("a bug")
        echo(exchange)

    with serving(handler) as served, served.connect() as client:
        answer = client.ask(get("/fail"))
        assert (answer.status, json.loads(answer.body)) == (500, {"error": "internal error"})
        assert client.ask(get("/fine")).status == 200
    assert "a bug" in caplog.text


def test_a_request_is_answered_once() -> None:
    failures = []

    def handler(exchange: Exchange) -> None:
        exchange.respond(200, b"first")
        try:
            exchange.respond(200, b"second")
        except RuntimeError as exc:
            failures.append(exc)

    with serving(handler) as served, served.connect() as client:
        client.send(get() + get())
        assert [client.receive().body for _ in range(2)] == [b"first", b"first"]
    assert len(failures) == 2
