"""Faulty, slow and vanishing clients: one clear error or a close for each, and an unharmed server."""

import asyncio
import gzip
import os
import socket
import time
from typing import Any

import pytest

from gateway.config import Limits
from gateway.edges import http_server
from gateway.edges.http_server import HttpConnection, HttpServer
from gateway.wire.exchange import Exchange
from tests.http_server.serving import Client, Holder, Served, digest, echo, get, post, serving
from tests.simulation import SimulatedClock, run_simulated


def assert_unharmed(served: Served) -> None:
    with served.connect() as client:
        assert client.ask(post(b"still here")).status == 200


def assert_refused(client: Client, status: int, *words: str) -> None:
    """The next answer is this error, and the last."""
    answer = client.receive()
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    for word in words:
        assert word in answer.json()["error"]
    assert client.at_end()


# limits


def test_a_large_body_is_refused_before_it_is_read() -> None:
    with serving(echo, body_bytes=1000) as served:
        with served.connect() as client:
            client.send(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 1001\r\n\r\n")
            assert_refused(client, 413, "1001", "1000", "server.limits.body_bytes")
        with served.connect() as client:
            client.send(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n")
            assert_refused(client, 413)
        with served.connect() as client:
            assert client.ask(post(b"x" * 1000)).status == 200
        assert_unharmed(served)


def test_a_client_that_sends_a_refused_body_all_the_same_reads_the_refusal() -> None:
    with serving(echo, body_bytes=1000) as served, served.connect() as client:
        client.send(post(b"x" * 5_000_000))
        assert_refused(client, 413)


def test_a_large_chunked_body_is_refused() -> None:
    with serving(echo, body_bytes=1000) as served, served.connect() as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1F4\r\n" + b"x" * 500 + b"\r\n")
        client.send(b"1F5\r\n" + b"x" * 501 + b"\r\n")
        assert_refused(client, 413, "1000")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b"GET /x HTTP/1.1\r\nHost: t\r\nA: " + b"b" * 5000 + b"\r\n\r\n", "header_bytes"),
        (b"GET /x HTTP/1.1\r\nHost: t\r\n" + b"A: b\r\n" * 101 + b"\r\n", "header_count"),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: t\r\n\r\n", "header_bytes"),
        (b"G" + b"E" * 5000, ""),
    ],
)
def test_a_large_head_is_refused(head: bytes, word: str, at_once: bool) -> None:
    with serving(echo, header_bytes=4096, header_count=100) as served:
        with served.connect() as client:
            if at_once:
                client.send(head)
            else:
                for at in range(0, len(head), 500):
                    client.send(head[at : at + 500])
                    time.sleep(0.001)
            answer = client.receive()
            assert answer.status in ((431,) if word else (400, 431))
            assert word in answer.json()["error"]
            assert client.at_end()
        assert_unharmed(served)


def test_a_head_that_never_ends_is_refused() -> None:
    with serving(echo, header_bytes=4096) as served, served.connect() as client:
        client.send(b"GET /x HTTP/1.1\r\nHost: t\r\nA: ")
        for _ in range(9):
            time.sleep(0.002)
            client.send(b"b" * 500)
        assert_refused(client, 431, "server.limits.header_bytes")


def test_large_trailers_are_refused() -> None:
    with serving(echo, header_bytes=4096) as served, served.connect() as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: bcdefghijk\r\n" * 1000)
        assert_refused(client, 431)


def test_the_body_of_one_request_does_not_count_as_the_head_of_the_next() -> None:
    with serving(echo, header_bytes=1000) as served, served.connect() as client:
        client.send(post(b"x" * 100_000) + get()[:10])
        assert client.receive().status == 200
        time.sleep(0.02)
        client.send(get()[10:])
        assert client.receive().status == 200


def test_a_connection_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(echo, connections=2) as served:
        with served.connect() as one, served.connect() as two:
            assert one.ask(get()).status == two.ask(get()).status == 200
            with served.connect() as three:
                assert_refused(three, 503, "2 connections")
            assert one.ask(get()).status == 200
        served.wait_for(lambda: not served.server.connections)
        assert_unharmed(served)
        with monkeypatch.context() as patch:
            patch.setattr(http_server, "_kept", lambda most: most)  # none is left
            with served.connect() as client:
                assert_refused(client, 503, "as many files open as it may", "ulimit -n")
        assert_unharmed(served)


# slow clients


@pytest.mark.parametrize("part", [b"GE", b"GET /x HTTP/1.1\r\nHost:"])
def test_a_slow_head_is_given_up(part: bytes) -> None:
    with serving(echo, header_timeout_s=0.05) as served, served.connect() as client:
        client.send(part)
        assert_refused(client, 408, "head", "0.05 s")


@pytest.mark.parametrize("framing", [b"Content-Length: 10", b"Transfer-Encoding: chunked"])
def test_a_slow_body_is_given_up(framing: bytes) -> None:
    with serving(echo, body_timeout_s=0.05, header_timeout_s=5) as served, served.connect() as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: t\r\n" + framing + b"\r\n\r\n3\r\nabc")
        assert_refused(client, 408, "body", "0.05 s")


def test_a_client_that_drips_cannot_stretch_its_time() -> None:
    with serving(echo, header_timeout_s=0.1) as served, served.connect() as client:
        began = time.monotonic()
        try:
            for byte in get("/" + "x" * 1000):
                client.send(bytes([byte]))
                time.sleep(0.005)
        except OSError:
            pass  # closed on us while we dripped
        assert time.monotonic() - began < 4


def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    with serving(echo, idle_timeout_s=0.5) as served, served.connect() as idle, served.connect() as busy:
        for _ in range(8):
            assert busy.ask(get()).status == 200
            time.sleep(0.1)
        assert idle.at_end()
        assert busy.ask(get()).status == 200
        assert busy.at_end()


def test_a_waiting_request_is_not_idle() -> None:
    holder = Holder()
    with serving(holder, idle_timeout_s=0.05) as served, served.connect() as client:
        client.send(get())
        served.wait_for(lambda: len(holder.held) == 1)
        time.sleep(0.2)
        served.call(lambda: holder.held[0].respond(200, b"late"))
        assert client.receive().body == b"late"


def test_a_client_that_does_not_read_is_cut_off() -> None:
    def flood(exchange: Exchange) -> None:
        exchange.respond(200, b"x" * 8_000_000)

    with serving(flood, body_timeout_s=0.1) as served, served.connect() as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.send(get() * 3)
        served.wait_for(lambda: len(served.server.connections) == 1)
        served.wait_for(lambda: not served.server.connections)


@pytest.mark.parametrize("last", [False, True])
def test_a_client_that_leaves_a_little_of_its_answers_is_cut_off(last: bool) -> None:
    holder = Holder()
    with serving(holder, body_timeout_s=0.2) as served, served.connect() as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.send(get() * 63 + get("/x", *["Connection: close"] * last))
        served.wait_for(lambda: len(holder.held) == 64)
        (connection,) = served.server.connections
        for exchange in holder.held:
            if served.call(lambda: connection.unsent):
                break
            served.call(lambda exchange=exchange: exchange.respond(200, b"x" * 200_000))
        assert 0 < served.call(lambda: connection.unsent) <= 200_200  # far from where writing pauses
        if last:
            served.call(lambda: [exchange.respond(200) for exchange in holder.held if exchange.head is None])
        served.wait_for(lambda: not served.server.connections)


class Unread(asyncio.Transport):
    """unread: bytes that were written and not taken."""

    unread = 0
    aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.aborted

    def write(self, data: Any) -> None:
        self.unread += len(data)

    def abort(self) -> None:
        self.aborted = True


def test_a_client_that_stops_reading_is_cut_off_in_time_from_then_on() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.respond(200, b"x" * 10_000)

    async def main(clock: SimulatedClock) -> None:
        server, wire = HttpServer(answer, Limits(body_timeout_s=60)), Unread()
        connection = HttpConnection(server, asyncio.get_running_loop())
        connection.connection_made(wire)
        connection.get_buffer(-1)[: len(get())] = get()
        connection.buffer_updated(len(get()))
        for _ in range(151):
            await asyncio.sleep(1)
            wire.unread -= 10
        await asyncio.sleep(59)
        assert not wire.aborted
        await asyncio.sleep(17)  # it is looked at four times in 60 s
        assert wire.aborted
        connection.connection_lost(None)

    run_simulated(main)


@pytest.mark.slow
def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    def flood(exchange: Exchange) -> None:
        exchange.respond(200, b"x" * 20_000_000)

    with serving(flood, body_timeout_s=0.25) as served, served.connect() as client:
        client.send(get())
        received = 0
        while received < 20_000_000:
            received += len(client.socket.recv(1_000_000))
            time.sleep(0.03)


def test_requests_wait_while_a_client_does_not_read() -> None:
    handled = []

    def flood(exchange: Exchange) -> None:
        handled.append(exchange)
        exchange.respond(200, b"x" * 4_000_000)

    with serving(flood) as served, served.connect() as client:
        client.send(get() * 100)
        served.wait_for(lambda: len(handled) > 0)
        time.sleep(0.05)
        assert len(handled) < 10  # of about 4 MB each; the rest waits
        assert all(len(client.receive().body) == 4_000_000 for _ in range(100))


def test_a_client_that_sends_thousands_of_requests_lets_others_in_between() -> None:
    handled: list[bytes] = []

    def slow(exchange: Exchange) -> None:
        time.sleep(0.002)
        handled.append(exchange.path)
        exchange.respond(200)

    with serving(slow) as served, served.connect() as client, served.connect() as other:
        client.send(get("/many") * 500)
        served.wait_for(lambda: len(handled) > 0)
        other.ask(get("/other"))
        assert handled.index(b"/other") < 200
        assert all(client.receive().status == 200 for _ in range(500))


# garbage


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 100,
        b"HELLO\r\n\r\n",
        b"GET /x HTTP/9.9\r\n\r\n",
        b"GET /x\x00y HTTP/1.1\r\nHost: t\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: t\r\nno colon\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: t\r\nA\x00: b\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        b"POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_garbage_is_refused(garbage: bytes) -> None:
    with serving(echo) as served:
        with served.connect() as client:
            client.send(garbage)
            assert_refused(client, 400, "malformed HTTP request")
        assert_unharmed(served)


def test_a_client_that_speaks_tls_is_told() -> None:
    with serving(echo) as served:
        with served.connect() as client:
            client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(100))
            assert_refused(client, 400, "this port speaks no TLS")
        with served.connect() as client:
            client.send(b"\x16\x03")
            assert_refused(client, 400, "this port speaks no TLS")
        assert_unharmed(served)


def test_a_client_of_http_2_is_told_what_the_port_speaks() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    with serving(echo) as served:
        for pieces in ([preface], [preface + bytes(9)], [preface[:3], preface[3:20], preface[20:]]):
            with served.connect() as client:
                for piece in pieces:
                    client.send(piece)
                assert_refused(client, 505, "this port speaks HTTP/1.1; gRPC, over HTTP/2, is at server.grpc_port")
        assert_unharmed(served)


def test_requests_before_garbage_are_answered() -> None:
    with serving(echo) as served, served.connect() as client:
        client.send(get() + post(b"abc") + b"garbage\r\n\r\n")
        assert client.receive().status == 200
        assert client.receive().json()["digest"] == digest(b"abc")
        assert_refused(client, 400)


def test_garbage_behind_waiting_requests_is_answered_after_them() -> None:
    holder = Holder()
    with serving(holder, pipelined_requests=2) as served, served.connect() as client:
        client.send(get("/0") + get("/1") + get("/2") + b"garbage\r\n\r\n")
        served.wait_for(lambda: len(holder.held) == 2)
        for n in range(3):
            served.call(lambda n=n: holder.held[n].respond(200, b"%d" % n))
            assert client.receive().body == b"%d" % n
        assert_refused(client, 400)


def test_connect_is_no_request_for_us() -> None:
    with serving(echo) as served, served.connect() as client:
        client.send(b"CONNECT host:443 HTTP/1.1\r\nHost: t\r\n\r\n")
        assert_refused(client, 501)


# clients that go away


def test_a_client_that_leaves_in_mid_body_leaves_nothing() -> None:
    with serving(echo) as served:
        for part in (
            b"GET",
            post(b"x" * 1000)[:-1],
            post(b"x" * 1_000_000)[:500_000],
            b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n",
        ):
            client = served.connect()
            client.send(part)
            served.wait_for(lambda: len(served.server.connections) == 1)
            client.close()
            served.wait_for(lambda: not served.server.connections)
        assert_unharmed(served)


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_while_it_waits_is_reported(reset: bool) -> None:
    holder = Holder()
    with serving(holder) as served:
        client = served.connect()
        client.send(get("/0") + get("/1"))
        served.wait_for(lambda: len(holder.held) == 2)
        if reset:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        served.wait_for(lambda: len(holder.gone) == 2)
        served.call(lambda: holder.held[0].respond(200, b"for nobody"))
        served.wait_for(lambda: not served.server.connections)


def test_an_answered_exchange_is_not_reported_as_gone() -> None:
    holder = Holder()
    with serving(holder) as served:
        client = served.connect()
        client.send(get("/0") + get("/1"))
        served.wait_for(lambda: len(holder.held) == 2)
        served.call(lambda: holder.held[1].respond(200, b"waits for the first"))
        client.close()
        served.wait_for(lambda: len(holder.gone) == 1)
        assert holder.gone[0] is holder.held[0]


def test_a_client_that_leaves_while_its_body_is_decompressed() -> None:
    handled = []
    with serving(handled.append) as served:
        for _ in range(20):
            client = served.connect()
            client.send(post(gzip.compress(os.urandom(200_000)), "Content-Encoding: gzip"))
            client.close()
        served.wait_for(lambda: not served.server.connections)


@pytest.mark.slow
def test_two_thousand_idle_connections_do_no_harm() -> None:
    async def main(served: Served) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2000)]
        served.wait_for(lambda: len(served.server.connections) == 2000)
        assert_unharmed(served)
        for number, (reader, writer) in enumerate(opened):
            if number % 100 == 0:
                writer.write(get())
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.transport.abort()

    with serving(echo) as served:
        asyncio.run(main(served))
        served.wait_for(lambda: not served.server.connections)
        assert_unharmed(served)


# ending


def test_a_connection_is_recycled_after_its_requests() -> None:
    with serving(echo, requests_per_connection=3) as served, served.connect() as client:
        for _ in range(2):
            assert "connection" not in client.ask(get()).headers
        assert client.ask(get()).headers["connection"] == "close"
        assert client.at_end()


def test_a_connection_that_is_to_be_left_ends_with_its_next_answer_and_others_go_on() -> None:
    with serving(echo) as served, served.connect() as client, served.connect() as other:
        assert "connection" not in client.ask(get()).headers
        began_s = time.monotonic()
        other.ask(get())
        asked = {each: each.asked(began_s) for each in served.server.open_connections}
        (left,) = [each for each, lately in asked.items() if not lately]
        left.leave()
        assert "connection" not in other.ask(get()).headers
        assert client.ask(get()).headers["connection"] == "close"
        assert client.at_end()


def test_no_pipelined_request_is_lost_to_recycling() -> None:
    with serving(echo, requests_per_connection=3) as served, served.connect() as client:
        client.send(get() * 8)
        answers = [client.receive() for _ in range(8)]
        assert [answer.headers.get("connection") for answer in answers] == [None] * 7 + ["close"]


def test_draining_answers_what_is_in_flight_and_what_is_on_its_way() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as waiting, served.connect() as sending, served.connect() as idle:
        waiting.send(get("/waiting"))
        request = post(b"x" * 1000, path="/sending")
        sending.send(request[:500])
        served.wait_for(lambda: len(holder.held) == 1 and len(served.server.connections) == 3)
        draining = asyncio.run_coroutine_threadsafe(served.server.drain(5.0), served.loop)
        served.wait_for(lambda: served.server.draining)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port), timeout=1)
        sending.send(request[500:])
        idle.send(get("/idle"))
        served.wait_for(lambda: len(holder.held) == 3)
        assert not draining.done()
        served.call(lambda: [exchange.respond(200, exchange.path) for exchange in holder.held])
        for client, path in ((waiting, b"/waiting"), (sending, b"/sending"), (idle, b"/idle")):
            answer = client.receive()
            assert (answer.body, answer.headers["connection"]) == (path, "close")
            assert client.at_end()
            client.close()
        draining.result(5)


@pytest.mark.slow
def test_draining_closes_idle_connections_within_seconds() -> None:
    with serving(echo) as served, served.connect() as client:
        client.ask(get())
        began = time.monotonic()
        served.drain(30.0)
        assert time.monotonic() - began < 5
        assert client.at_end()


@pytest.mark.slow
def test_draining_waits_for_what_is_in_flight_longer_than_for_the_idle() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as waiting, served.connect() as idle:
        waiting.send(get())
        served.wait_for(lambda: len(holder.held) == 1 and len(served.server.connections) == 2)
        draining = asyncio.run_coroutine_threadsafe(served.server.drain(10.0), served.loop)
        assert idle.at_end()  # after a second
        assert not draining.done()
        served.call(lambda: holder.held[0].respond(200, b"late"))
        assert waiting.receive().body == b"late"
        assert waiting.at_end()
        draining.result(5)
        assert holder.gone == []


def test_a_drain_that_takes_too_long_ends_with_an_error_for_each() -> None:
    holder = Holder()
    with serving(holder, pipelined_requests=2) as served, served.connect() as waiting, served.connect() as sending:
        waiting.send(get("/1") + get("/2") + get("/3"))  # the third is not with the handler
        sending.send(post(b"x" * 1000)[:500])
        served.wait_for(lambda: len(holder.held) == 2 and len(served.server.connections) == 2)
        holder.held[0].ran = True
        served.drain(0.4)
        answers = [waiting.receive() for _ in range(3)]
        assert waiting.at_end()
        answers.append(sending.receive())
        again = [(answer.status, answer.headers.get("retry-after")) for answer in answers]
        assert again == [(504, None), (503, "1"), (503, "1"), (503, "1")]
        assert answers[-1].headers["connection"] == "close"
        assert sending.at_end()
        assert len(holder.gone) == 2
        served.call(lambda: [exchange.respond(200, b"late") for exchange in holder.held])  # finds nobody


def test_what_the_handler_still_answers_when_a_drain_gives_up_is_the_answer() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(get())
        served.wait_for(lambda: len(holder.held) == 1)
        give_up = lambda: holder.held[0].respond(504, b"given up")  # noqa: E731
        asyncio.run_coroutine_threadsafe(served.server.drain(0.2, give_up), served.loop).result(5)
        answer = client.receive()
        assert (answer.status, answer.body, answer.headers["connection"]) == (504, b"given up", "close")
        assert client.at_end()


def test_a_request_that_cannot_be_given_up_keeps_no_other_from_being_told(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[bytes] = []
    told: list[bytes] = []

    def handler(exchange: Exchange) -> None:
        asked.append(exchange.path)

        def gone() -> None:
            told.append(exchange.path)
            if exchange.path == b"/1":
                raise KeyboardInterrupt

        exchange.on_disconnect = gone

    with serving(handler) as served, served.connect() as one, served.connect() as other:
        one.send(get("/1") + get("/2"))
        other.send(get("/3"))
        served.wait_for(lambda: len(asked) == 3)
        served.drain(0.4)
        assert [one.receive().status, one.receive().status, other.receive().status] == [503] * 3
    assert sorted(told) == [b"/1", b"/2", b"/3"]
    assert "could not be given up" in caplog.text
