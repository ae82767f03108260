"""Answers in pieces, as they come over the wire."""

import asyncio
import re
import socket
import time
from collections.abc import Callable

import pytest
import uvloop

from gateway.wire.exchange import Exchange
from tests.http_server.serving import Client, Holder, Served, get, post, serving

EVENTS = b"text/event-stream"
CHUNKED_HEAD = re.compile(
    rb"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nDate: [^\r]+ GMT\r\nX-Request-Id: 7\r\nX-A: b\r\n"
    rb"Transfer-Encoding: chunked\r\n\r\n"
)
LOOPS = pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
MORE = 200_000  # bytes; a socket that nobody reads, its buffer small, does not take so many


def begun(served: Served, holder: Holder, at: int = 0) -> Exchange:
    """The exchange, with an answer in pieces that has begun."""
    served.wait_for(lambda: len(holder.held) > at)
    exchange = holder.held[at]
    served.call(lambda: exchange.begin(200, EVENTS))
    return exchange


def unread(served: Served) -> Client:
    """A client that takes little before it reads."""
    client = served.connect()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return client


def fill(served: Served, exchange: Exchange) -> int:
    """Write until something waits for the client; how many bytes were written."""
    written = 0
    while not served.call(lambda: exchange.backlog):
        served.call(lambda: exchange.write(b"x" * MORE))
        written += MORE
    return written


def test_each_piece_leaves_as_a_chunk_when_it_is_there() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(get("/x", "X-Request-Id: 7"))
        served.wait_for(lambda: len(holder.held) == 1)
        exchange = holder.held[0]
        served.call(lambda: exchange.begin(200, EVENTS, b"X-A: b\r\n"))
        served.call(lambda: exchange.write(b"first"))
        assert CHUNKED_HEAD.fullmatch(client.receive_head())
        assert client.receive_chunk() == b"first"
        served.call(lambda: exchange.write(b""))  # would be the last chunk: is none
        served.call(lambda: exchange.write(memoryview(b"y" * 70_000)))
        assert client.receive_chunk() == b"y" * 70_000
        served.call(exchange.finish)
        assert client.receive_chunk() == b""
        client.send(get())
        served.wait_for(lambda: len(holder.held) == 2)  # the connection goes on
        served.call(lambda: holder.held[1].respond(200, b"next"))
        assert client.receive().body == b"next"
    assert holder.gone == []


def test_what_is_finished_before_a_piece_has_left_has_a_length() -> None:
    def empty(exchange: Exchange) -> None:
        exchange.begin(200, EVENTS)
        exchange.finish()

    with serving(empty) as served, served.connect() as client:
        answer = client.ask(get())
    assert (answer.status, answer.headers["content-length"], answer.headers["content-type"]) == (200, "0", EVENTS.decode())


def test_an_answer_begun_within_the_handler_leaves_too() -> None:
    def at_once(exchange: Exchange) -> None:
        exchange.begin(200, EVENTS)
        exchange.write(b"one")
        exchange.write(b"two")
        assert exchange.backlog  # nothing leaves before what came in one read is handled

    with serving(at_once) as served, served.connect() as client:
        client.send(get())
        client.receive_head()
        assert (client.receive_chunk(), client.receive_chunk()) == (b"one", b"two")


def test_an_old_client_gets_the_pieces_as_they_are_and_the_end_of_the_connection() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        exchange = begun(served, holder)
        served.call(lambda: exchange.write(b"one,"))
        head = client.receive_head()
        assert b"chunked" not in head
        assert b"Connection: close\r\n" in head
        served.call(lambda: exchange.write(b"two"))
        served.call(exchange.finish)
        assert client.read(100) == b"one,two"


def test_what_an_old_client_asks_for_behind_pieces_is_given_up() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2)
        exchange = begun(served, holder)
        served.call(lambda: exchange.write(b"one"))
        served.call(exchange.finish)
        assert holder.gone == [holder.held[1]]
        served.call(lambda: holder.held[1].respond(200, b"nobody waits for it"))
        client.receive_head()
        assert client.read(100) == b"one"


def test_a_head_request_gets_the_head_alone() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(b"HEAD /x HTTP/1.1\r\nHost: t\r\n\r\n")
        exchange = begun(served, holder)
        served.call(lambda: exchange.write(b"one"))
        served.call(exchange.finish)
        assert b"chunked" in client.receive_head()
        client.send(get())
        served.wait_for(lambda: len(holder.held) == 2)
        served.call(lambda: holder.held[1].respond(200, b"next"))
        assert client.receive().body == b"next"


def test_a_client_that_closes_after_it_is_told_the_end() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(get("/x", "Connection: close"))
        exchange = begun(served, holder)
        served.call(lambda: exchange.write(b"one"))
        served.call(exchange.finish)
        head = client.receive_head()
        assert b"Connection: close\r\n" in head
        assert b"chunked" in head
        assert (client.receive_chunk(), client.receive_chunk()) == (b"one", b"")
        assert client.at_end()


def test_pieces_are_never_compressed() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(get("/x", "Accept-Encoding: gzip"))
        exchange = begun(served, holder)
        served.call(lambda: exchange.write(b"x" * 5000))
        assert b"gzip" not in client.receive_head()
        assert client.receive_chunk() == b"x" * 5000
        served.call(exchange.finish)


def test_pieces_wait_for_the_answers_before_them() -> None:
    holder, drained = Holder(), []
    with serving(holder) as served, served.connect() as client:
        client.send(get("/1") + get("/2") + get("/3"))
        served.wait_for(lambda: len(holder.held) == 3)
        first, second, third = holder.held
        second.on_drained = lambda: drained.append(second.backlog)
        served.call(lambda: second.begin(200, EVENTS))
        served.call(lambda: second.write(b"one"))
        served.call(lambda: second.write(b"two"))
        assert served.call(lambda: second.backlog)  # its writer waits: what is held has a bound
        served.call(lambda: third.begin(200, EVENTS))
        served.call(lambda: third.write(b"whole"))
        served.call(third.finish)
        assert drained == []
        served.call(lambda: first.respond(200, b"first"))
        assert client.receive().body == b"first"
        client.receive_head()
        assert (client.receive_chunk(), client.receive_chunk()) == (b"one", b"two")
        assert drained == [False]
        served.call(lambda: second.write(b"three"))
        assert not served.call(lambda: second.backlog)
        served.call(second.finish)
        assert (client.receive_chunk(), client.receive_chunk()) == (b"three", b"")
        assert client.receive().body == b"whole"


@LOOPS
def test_backlog_is_every_byte_that_the_client_has_not_taken(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    holder, drained = Holder(), []
    with serving(holder, new_loop=new_loop) as served, served.connect() as client:
        client.send(get())
        exchange = begun(served, holder)
        exchange.on_drained = lambda: drained.append(exchange.backlog)
        served.call(lambda: exchange.write(b"x"))
        assert not served.call(lambda: exchange.backlog)
        written = fill(served, exchange)
        assert written < 8 << 20  # what the kernels take of a socket that nobody reads
        assert drained == []
        client.receive_head()
        taken = len(client.receive_chunk() or b"")
        while taken < written:
            taken += len(client.receive_chunk() or b"")
        served.wait_for(lambda: drained == [False])
        served.call(exchange.finish)
        assert client.receive_chunk() == b""
        # Behind it, an answer may be as large as ever before the reading stops.
        client.send(get() * 2)
        served.wait_for(lambda: len(holder.held) == 3)
        limits = served.call(lambda: next(iter(served.server.connections))._transport.get_write_buffer_limits())  # type: ignore[attr-defined]
        assert limits[1] == 1 << 20


@LOOPS
def test_a_client_that_takes_nothing_of_its_pieces_is_cut_off(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    holder = Holder()
    with serving(holder, new_loop=new_loop, body_timeout_s=0.1) as served, unread(served) as client:
        client.send(get())
        exchange = begun(served, holder)
        fill(served, exchange)
        served.wait_for(lambda: not served.server.connections)
        assert holder.gone == [exchange]
        assert not exchange.backlog
        served.call(lambda: exchange.write(b"nobody is there"))
        served.call(exchange.finish)


@pytest.mark.slow
def test_a_client_that_takes_pieces_slower_than_they_are_written_is_not_cut_off() -> None:
    holder = Holder()
    with serving(holder, body_timeout_s=0.5) as served, served.connect() as client:
        client.send(get())
        exchange = begun(served, holder)
        fill(served, exchange)
        for _ in range(20):  # that it takes some is not seen by how much waits
            taken = 0
            while taken < 100_000:  # less than the kernel would take at a time of other answers
                taken += len(client.socket.recv(100_000 - taken))
            served.call(lambda: exchange.write(b"y" * 150_000))
            time.sleep(0.04)
        assert served.connections() == 1


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_leaves_amid_pieces_is_reported(reads: bool) -> None:
    holder = Holder()
    with serving(holder) as served, unread(served) as client:
        client.send(get())
        exchange = begun(served, holder)
        if reads:
            served.call(lambda: exchange.write(b"one"))
            client.receive_head()
            assert client.receive_chunk() == b"one"
        else:
            fill(served, exchange)
        client.close()
        served.wait_for(lambda: holder.gone == [exchange])


def test_an_answer_in_pieces_cannot_be_given_twice() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(get())
        exchange = begun(served, holder)
        for again in (lambda: exchange.begin(200, EVENTS), lambda: exchange.respond(200)):
            with pytest.raises(RuntimeError, match="answered before"):
                served.call(again)
        served.call(lambda: exchange.write(b"one"))
        served.call(exchange.finish)
        for late in (lambda: exchange.write(b"two"), exchange.finish):
            with pytest.raises(RuntimeError, match="no answer in pieces that goes on"):
                served.call(late)
        with pytest.raises(RuntimeError, match="answered before"):
            served.call(lambda: exchange.respond(200))


@pytest.mark.parametrize("written", [True, False])
def test_a_writer_that_fails_amid_pieces_says_so_as_far_as_it_can(written: bool, caplog: pytest.LogCaptureFixture) -> None:
    def fails(exchange: Exchange) -> None:
        exchange.begin(200, EVENTS)
        exchange.write(b"one")
        if not written:
            raise ValueError("the writer's fault")
        exchange.on_drained = lambda: 1 // 0  # type: ignore[assignment,return-value]

    with serving(fails) as served, served.connect() as client:
        if written:
            client.send(get())
            client.receive_head()
            assert client.receive_chunk() == b"one"
            assert client.receive_chunk() is None  # no last chunk: the answer is not whole
        else:
            assert client.ask(get()).status == 500
    assert "failed" in caplog.text


def test_a_connection_is_recycled_behind_pieces() -> None:
    holder = Holder()
    with serving(holder, requests_per_connection=1) as served, served.connect() as client:
        client.send(get())
        exchange = begun(served, holder)
        served.call(lambda: exchange.write(b"one"))
        served.call(exchange.finish)
        assert b"Connection: close\r\n" in client.receive_head()
        assert (client.receive_chunk(), client.receive_chunk()) == (b"one", b"")
        assert client.at_end()


def test_garbage_behind_pieces_is_refused_after_them() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(get())
        exchange = begun(served, holder)
        served.call(lambda: exchange.write(b"one"))
        client.receive_head()
        assert client.receive_chunk() == b"one"
        client.send(b"\0\r\n\r\n")
        served.wait_for(lambda: len(next(iter(served.server.connections)).http._exchanges) == 2)
        served.call(exchange.finish)
        assert client.receive_chunk() == b""
        assert client.receive().status == 400
        assert client.at_end()


def test_draining_waits_for_pieces_and_closes_behind_them() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client:
        client.send(get())
        exchange = begun(served, holder)
        served.call(lambda: exchange.write(b"one"))
        client.receive_head()
        assert client.receive_chunk() == b"one"
        ended = asyncio.run_coroutine_threadsafe(served.server.drain(5.0), served.loop)
        served.wait_for(lambda: served.server.draining)
        served.call(lambda: exchange.write(b"two"))
        served.call(exchange.finish)
        assert (client.receive_chunk(), client.receive_chunk()) == (b"two", b"")
        assert client.at_end()
        client.close()
        ended.result(5)


@pytest.mark.slow
def test_pieces_that_go_on_when_a_drain_gives_up_end_without_the_last_chunk() -> None:
    holder = Holder()
    with serving(holder) as served, served.connect() as client, served.connect() as other:
        client.send(get() + post(b"behind"))
        exchange = begun(served, holder)
        served.call(lambda: exchange.write(b"one"))
        other.send(get() + get())
        served.wait_for(lambda: len(holder.held) == 4)
        served.call(lambda: holder.held[3].begin(200, EVENTS))
        served.call(lambda: holder.held[3].write(b"its turn has not come"))
        served.drain(0.4)
        client.receive_head()
        assert client.receive_chunk() == b"one"
        assert client.receive_chunk() is None
        assert [other.receive().status, other.receive().status] == [503, 503]
    assert set(holder.gone) == set(holder.held)
    assert len(holder.gone) == 4
