"""The two clients against connections that end when they should not: each request ends once, and closing always ends."""

import asyncio
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from loadtest.load import dialler as dialling
from loadtest.load import grpc_client
from loadtest.load.dialler import Dialler, Exhausted
from loadtest.load.grpc_client import GrpcClient
from loadtest.load.http_client import HttpClient
from loadtest.load.request_log import ERROR_EVENT, GRPC, MALFORMED, OK, RESET, RequestLog

REQUESTS = 100
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Sent:
    """What a client reports."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.faults: list[BaseException] = []
        self.locked: list[tuple[int, str]] = []
        self.came = asyncio.Event()

    def on_done(self, index: int, status: int) -> None:
        self.done.append((index, status))
        self.came.set()

    def on_fault(self, fault: BaseException) -> None:
        self.faults.append(fault)
        self.came.set()

    def on_locked(self, status: int, words: str) -> None:
        self.locked.append((status, words))

    async def until(self, count: int) -> list[tuple[int, int]]:
        async with asyncio.timeout(10):
            while len(self.done) < count:
                self.came.clear()
                await self.came.wait()
        return self.done


def client_of(kind: str, port: int, sent: Sent, *, timeout_s: float = 5, v2: bool = False) -> HttpClient | GrpcClient:
    dialler = Dialler("127.0.0.1", port, tls=False, timeout_s=timeout_s)
    log = RequestLog(REQUESTS)
    if kind == "grpc":
        return GrpcClient(dialler, authority="a", tls=False, requests=[b"x"], metadata=[], connections=4, log=log,
                          on_done=sent.on_done, on_fault=sent.on_fault,
                          on_locked=sent.on_locked)  # fmt: skip
    return HttpClient(dialler, requests=[b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], v2=v2, connections=4, log=log,
                      on_done=sent.on_done, on_fault=sent.on_fault, on_locked=sent.on_locked)  # fmt: skip


class Peer(asyncio.Protocol):
    """made, came: what to do with a connection, and with what comes over it."""

    made: Callable[[asyncio.Transport], None] = staticmethod(lambda transport: None)
    came: Callable[[asyncio.Transport], None] = staticmethod(lambda transport: None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        type(self).made(transport)

    def data_received(self, data: bytes) -> None:
        type(self).came(self.transport)


@asynccontextmanager
async def listening(peer: type[Peer]) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(peer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    uvloop.run(bounded())


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_request_on_a_connection_that_is_ending_fails_or_takes_another_and_nothing_is_raised(kind: str) -> None:
    class Silent(Peer):
        pass

    async def scenario() -> None:
        sent = Sent()
        async with listening(Silent) as port:
            client = client_of(kind, port, sent)
            await client.open(4)
            for connection in list(client.connections):
                connection.abort()  # its protocol is told a turn of the event loop later
            for index in range(4):
                client.send(index)
            await asyncio.sleep(0.05)
            assert sent.faults == []
            await client.close()

    run(scenario)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_target_that_closes_every_connection_at_once_resets_every_request(kind: str) -> None:
    class Shut(Peer):
        made = staticmethod(lambda transport: transport.abort())

    async def scenario() -> None:
        sent = Sent()
        async with listening(Shut) as port:
            client = client_of(kind, port, sent)
            await client.open(4)
            for index in range(20):
                client.send(index)
            done = await sent.until(20)
            assert sorted(index for index, _ in done) == list(range(20))
            assert {status for _, status in done} == {RESET}
            await client.close()

    run(scenario)


def test_connections_that_were_closed_at_once_leave_room_for_others() -> None:
    opened: list[asyncio.Transport] = []

    def shut_the_first_four(transport: asyncio.Transport) -> None:
        opened.append(transport)
        if len(opened) <= 4:
            transport.abort()

    class Recovers(Peer):
        made = staticmethod(shut_the_first_four)
        came = staticmethod(lambda transport: transport.write(ANSWER))

    async def scenario() -> None:
        sent = Sent()
        async with listening(Recovers) as port:
            client = client_of("http", port, sent)  # four at most
            await client.open(4)
            for index in range(8):
                client.send(index)
            done = await sent.until(8)
            assert {status for _, status in done} <= {OK, RESET}
            client.send(8)
            assert (await sent.until(9))[-1] == (8, OK)
            await client.close()

    run(scenario)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_closing_ends_although_dialling_was_given_up_the_moment_it_was_done(kind: str) -> None:
    """Then the event loop closes the transport without telling its protocol: to wait for that was to wait for ever."""

    class Silent(Peer):
        pass

    async def scenario() -> None:
        async with listening(Silent) as port:
            for turns in range(12):
                sent = Sent()
                client = client_of(kind, port, sent)
                for index in range(4):
                    client.send(index)
                for _ in range(turns):
                    await asyncio.sleep(0)
                async with asyncio.timeout(5):
                    await client.close()
                assert sent.faults == []

    run(scenario)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # of what no event tells
            await asyncio.sleep(0)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(stream: int, *fields: tuple[bytes, bytes]) -> bytes:
    """The only ones of an answer, as they are."""
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
    return frame(1, 5, stream, block)


SETTINGS = frame(4, 0, 0)
GO_AWAY = frame(7, 0, 0, struct.pack(">II", 2**31 - 1, 0))


def greeting(opened: list[asyncio.Transport], first: int = REQUESTS) -> type[Peer]:
    """Notes its connections, and begins to speak HTTP/2 over the first of them."""

    class Greets(Peer):
        @staticmethod
        def made(transport: asyncio.Transport) -> None:
            opened.append(transport)
            if len(opened) <= first:
                transport.write(SETTINGS)

    return Greets


def test_a_connection_that_goes_away_leaves_its_place_to_another() -> None:
    opened: list[asyncio.Transport] = []

    async def scenario() -> None:
        sent = Sent()
        async with listening(greeting(opened)) as port:  # which owes each its answer for ever
            client = client_of("grpc", port, sent)
            assert isinstance(client, GrpcClient)
            await client.open(4)
            old = list(client.connections)
            for index in range(4):
                client.send(index)
            await until(lambda: len(opened) == 4)
            for transport in opened:
                transport.write(GO_AWAY)
            await until(lambda: not any(connection.has_room for connection in old))
            client.send(4)
            await until(lambda: any(4 in connection.indices.values() for connection in client.connections))
            await until(lambda: client.send(5) or len(client.connections) == len(opened) == 8)  # a place each
            assert client.most_connections == 4
            client.expire(range(4))  # what they owe is given up: so they end
            await until(lambda: len(client.connections) == 4)
            assert (sent.done, sent.faults) == ([], [])
            await client.close()

    run(scenario)


def test_connections_that_ended_are_replaced_while_others_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_client, "_PAUSE_NS", 0)
    opened: list[asyncio.Transport] = []

    async def scenario() -> None:
        sent = Sent()
        async with listening(greeting(opened)) as port:
            client = client_of("grpc", port, sent)
            await client.open(4)
            await until(lambda: len(opened) == 4)
            for transport in opened[1:]:
                transport.abort()
            await until(lambda: len(client.connections) == 1)
            await until(lambda: client.send(0) or (len(client.connections) == 4 and len(opened) == 7))
            assert (sent.done, sent.faults) == ([], [])
            await client.close()

    run(scenario)


def test_a_connection_that_is_opened_beside_others_takes_requests_once_the_server_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_client, "_PAUSE_NS", 0)
    opened: list[asyncio.Transport] = []

    async def scenario() -> None:
        sent = Sent()
        async with listening(greeting(opened, first=4)) as port:  # it may close those beyond without a word
            client = client_of("grpc", port, sent)
            assert isinstance(client, GrpcClient)
            await client.open(4)
            await until(lambda: len(opened) == 4)
            for transport in opened[1:]:
                transport.abort()
            await until(lambda: len(client.connections) == 1)
            (first,) = client.connections
            await until(lambda: client.send(0) or len(client.connections) == 2)
            for index in range(1, REQUESTS):
                client.send(index)
                await asyncio.sleep(0)
            assert len(opened) == 5  # one at a time
            assert set(first.indices.values()) == set(range(REQUESTS))
            opened[4].abort()
            await until(lambda: client.send(1) or len(opened) == 6)
            opened[5].write(SETTINGS)
            await until(lambda: client.send(2) or any(each.indices for each in client.connections if each is not first))
            assert (sent.done, sent.faults) == ([], [])
            await client.close()

    run(scenario)


def test_a_target_that_lets_fewer_in_is_asked_less_and_less_often_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0
    monkeypatch.setattr(grpc_client, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    attempts: list[int] = []
    full = True

    class OnlyOne(Dialler):
        async def dial(self, protocol: Callable[[], Any]) -> Any:
            attempts.append(now_ns // 10**6)
            if len(attempts) > 1 and full:
                raise ConnectionRefusedError("one is enough")
            return await super().dial(protocol)

    class Answers(Peer):
        made = staticmethod(lambda transport: transport.write(SETTINGS))

        def data_received(self, data: bytes) -> None:
            if b"grpc" in data:  # the first request over it
                self.transport.write(headers(1, (b"grpc-status", b"0")))

    async def scenario() -> None:
        nonlocal now_ns, full
        sent = Sent()
        async with listening(Answers) as port:
            client = GrpcClient(OnlyOne("127.0.0.1", port, tls=False, timeout_s=5), authority="a", tls=False, requests=[b"x"],
                                metadata=[], connections=4, log=RequestLog(REQUESTS), on_done=sent.on_done,
                                on_fault=sent.on_fault, on_locked=sent.on_locked)  # fmt: skip
            await client.open(4)
            client.send(0)
            await sent.until(1)
            for _ in range(400):
                now_ns += 50_000_000
                client.send(1)
                for _ in range(4):
                    await asyncio.sleep(0)
            assert attempts == [0, 0, 0, 0, 50, 150, 350, 750, 1550, 3150, 6350, 12750, 19150]
            assert (len(client.connections), sent.faults) == (1, [])
            full = False
            now_ns += 6_400_000_000
            await until(lambda: client.send(2) or [each.answered for each in client.connections] == [True] * 4)
            (*_, newest) = client.connections
            newest.abort()
            await until(lambda: len(client.connections) == 3)
            await until(lambda: client.send(3) or len(client.connections) == 4)  # at once again
            assert sent.faults == []
            await client.close()

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([(b"grpc-status", b"abc")], GRPC + 2),
        ([(b"grpc-status", b"9" * 100)], GRPC + 2),
        ([(b"grpc-status", b"13"), (b"grpc-message", b"\xff\xfe caf\xe9")], GRPC + 13),
        ([(b":status", b"abc")], MALFORMED),
    ],
)
def test_an_answer_that_cannot_be_read_fails_its_request_alone(fields: list[tuple[bytes, bytes]], status: int) -> None:
    begun: list[asyncio.Transport] = []

    class Odd(Peer):
        made = staticmethod(lambda transport: (begun.append(transport), transport.write(SETTINGS)))  # type: ignore[func-returns-value]

    async def scenario() -> None:
        sent = Sent()
        async with listening(Odd) as port:
            client = client_of("grpc", port, sent)
            assert isinstance(client, GrpcClient)
            await client.open(4)
            for index in range(8):  # two on each
                client.send(index)
            await until(lambda: len(begun) == 4)
            for transport in begun:
                transport.write(headers(1, *fields) + headers(3, (b"grpc-status", b"0")))
            done = await sent.until(8)
            assert sorted(status for _, status in done) == sorted([OK] * 4 + [status] * 4)
            await client.close()

    run(scenario)


def test_an_interim_answer_is_followed_by_the_real_one() -> None:
    class Hints(Peer):
        made = staticmethod(lambda transport: transport.write(SETTINGS))

        def data_received(self, data: bytes) -> None:
            if b"grpc" in data:  # the request
                early = b"\0\7:status\x03103"
                self.transport.write(frame(1, 4, 1, early) + headers(1, (b"grpc-status", b"0")))

    async def scenario() -> None:
        sent = Sent()
        async with listening(Hints) as port:
            client = client_of("grpc", port, sent)
            await client.open(1)
            client.send(0)
            assert await sent.until(1) == [(0, OK)]
            await client.close()

    run(scenario)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x46"])
def test_a_port_of_tls_that_is_asked_without_is_told(answer: bytes) -> None:
    class Locked(Peer):
        came = staticmethod(lambda transport: transport.write(answer))

    async def scenario() -> None:
        sent = Sent()
        async with listening(Locked) as port:
            client = client_of("grpc", port, sent)
            client.send(0)
            assert await sent.until(1) == [(0, MALFORMED)]
            assert client.error_samples == {"malformed": "it speaks no HTTP/2; if it speaks TLS, write grpcs://"}
            await client.close()

    run(scenario)


def test_headers_that_never_end_are_no_answer() -> None:
    class Endless(Peer):
        came = staticmethod(lambda transport: transport.write(b"HTTP/1.1 200 OK\r\n" + b"X: %b\r\n" % (b"a" * 1000) * 2000))

    async def scenario() -> None:
        sent = Sent()
        async with listening(Endless) as port:
            client = client_of("http", port, sent)
            client.send(0)
            async with asyncio.timeout(5):
                assert await sent.until(1) == [(0, MALFORMED)]
            assert list(client.error_samples.values()) == ["its headers are longer than 1 MiB"]
            await client.close()

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_closing_does_not_wait_for_a_connection_whose_end_is_never_told(kind: str) -> None:
    class Silent(Peer):
        pass

    async def scenario() -> None:
        sent = Sent()
        async with listening(Silent) as port:
            client = client_of(kind, port, sent)
            await client.open(4)
            connections = list(client.connections)
            real = [connection._transport for connection in connections]
            for connection in connections:
                connection._transport = _NeverEnds()  # type: ignore[assignment]  # all that is asked of it
            async with asyncio.timeout(5):
                await client.close()
            for connection, transport in zip(connections, real, strict=True):
                connection._transport = transport
                connection.abort()

    run(scenario)


class _NeverEnds:
    def abort(self) -> None:
        pass


def test_what_is_raised_while_an_answer_is_taken_is_our_fault_and_no_malformed_answer() -> None:
    class Answers(Peer):
        came = staticmethod(lambda transport: transport.write(ANSWER))

    async def scenario() -> None:
        sent = Sent()
        async with listening(Answers) as port:
            client = client_of("http", port, sent)
            client.on_done = _raise
            client.send(0)
            async with asyncio.timeout(5):
                await sent.came.wait()
            assert [str(fault) for fault in sent.faults] == ["no such index"]
            assert client.error_samples == {}
            await client.close()

    run(scenario)


def _raise(index: int, status: int) -> None:
    raise RuntimeError("no such index")


def test_a_server_that_switches_protocols_gives_malformed_answers() -> None:
    class Upgrades(Peer):
        came = staticmethod(
            lambda transport: transport.write(b"HTTP/1.1 101 X\r\nUpgrade: ws\r\nConnection: Upgrade\r\n\r\nxx")
        )

    async def scenario() -> None:
        sent = Sent()
        async with listening(Upgrades) as port:
            client = client_of("http", port, sent)
            client.send(0)
            assert await sent.until(1) == [(0, MALFORMED)]
            assert sent.faults == []
            await client.close()

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\nok", OK),
        (b"HTTP/1.1 200 OK\r\n\r\nok", OK),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", OK),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok", OK),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok", OK),
        (b"HTTP/1.1 500 Boom\r\nConnection: close\r\n\r\nboom\n\x1b[31mred", 500),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", RESET),
        (b"HTTP/1.0 200 OK\r\nCONTENT-LENGTH: 9\r\n\r\nok", RESET),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n", RESET),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", RESET),
        (b"HTTP/1.1 100 Continue\r\n\r\n", RESET),
        (b"", RESET),
    ],
)
def test_an_answer_may_end_with_the_connection_where_it_says_no_other_end(answer: bytes, status: int) -> None:
    def write_and_close(transport: asyncio.Transport) -> None:
        transport.write(answer)
        transport.close()

    class Closes(Peer):
        came = staticmethod(write_and_close)

    async def scenario() -> None:
        sent = Sent()
        async with listening(Closes) as port:
            client = client_of("http", port, sent)
            for index in range(6):
                client.send(index)
            assert sorted(await sent.until(6)) == [(index, status) for index in range(6)]
            assert (sent.faults, client.error_samples.get("http 500")) == ([], "boom ·[31mred" if status == 500 else None)
            await client.close()

    run(scenario)


@pytest.mark.parametrize(
    ("kind", "pieces", "words"),
    [
        (b"text/event-stream; charset=utf-8", [b'data: {"y":1}\n\ndata: {"error":"it broke"}\n\n'], "it broke"),
        (b"text/event-stream", [b'data: {"y":1}\n\ndata: {"err', b'or":"it broke"}\n', b"\n"], "it broke"),
        (b"text/event-stream", [b'event: error\r\ndata:{"error":\r\ndata: {"code":7}}\r\n\r\n: the end\r\n\r\n'], '{"code":7}'),
        (b"text/event-stream", [b'data: {"y":1}\n\n' * 2000, b'data: {"error":""}\n\n'], ""),
        (b"text/event-stream", [b'data: {"error":"as an output"}\n\n', b'data: {"y":1}\n\n'], None),
        (b"Text/Event-Stream", [b'data: {"error":"it broke"}\n\n'], "it broke"),
        (b"text/event-stream", [b'data: {"error":{"code":7}}\n\n', b"data: [DONE]\n\n"], '{"code":7}'),
        (b"text/event-stream", [b'data: {"error":"it broke","error_type":"generation"}\n\n'], "it broke"),
        (b"text/event-stream", [b'data: {"model_name":"m","error":"it broke"}\r\n\r\n', b"data: [DONE]\r\n\r\n"], "it broke"),
        (b"text/event-stream", [b'data: {"error":"' + b"a" * 40_000 + b'"}\n\n'], "a" * 300),
        *(
            (b"text/event-stream", [b"data: " + b"1" * 900 + end, b'data: {"error":"' + b"a" * more + b'"}' + end], "a" * 300)
            for end in (b"\n\n", b"\r\n\r\n")
            for more in range(16_360, 16_366)  # about as long as the end that is kept
        ),
        (
            b"text/event-stream",
            [b'data: 1\r\n\r\ndata: {"error":{"a":"', b"b" * 20_000 + b'","c":{"d":"', b"b" * 20_000 + b'"}}}\r\n\r\n'],
            '{"error":{"a":"' + "b" * 240,
        ),
        (b"text/event-stream", [b'data: {"error":"a"}\n\ndata: {"y":"', b"b" * 40_000, b'"}\n\n'], None),
        (b"text/event-stream", [b'data: {"error":0.5,"y":1}\n\n'], None),
        (b"text/event-stream", [b'data: {"error":null}\n\n'], None),
        (b"text/event-stream", [b'data: {"error":"","y":1}\n\n'], None),
        (b"text/event-stream", [b'data: {"error":{},"y":1}\n\n'], None),
        (b"text/event-stream", [b'data: {"error":"","y":"' + b"a" * 40_000 + b'"}\n\n'], None),
        (b"text/event-stream", [b'data: {"error":{ },"y":"' + b"a" * 40_000 + b'"}\n\n'], None),
        (b"text/event-stream", [b'data: {"y":1}\n\n', b"data: [DONE]\n\n"], None),
        (b"text/event-stream", [b"data: [DONE]\n\n"], None),
        (b"text/event-stream", [b'data: "' + b"a" * 40_000 + b'"\n\n'], None),
        (b"text/plain", [b'data: {"error":"it broke"}\n\n'], None),
        (b"application/json", [b'{"error":"text/event-stream"}'], None),
    ],
)
def test_a_stream_of_events_has_failed_where_its_last_tells_of_an_error(
    kind: bytes, pieces: list[bytes], words: str | None
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % kind
    answers = iter([[head, *(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])], [ANSWER]])

    def answer(transport: asyncio.Transport) -> None:
        transport.writelines(next(answers))

    class Streams(Peer):
        came = staticmethod(answer)

    async def scenario() -> None:
        sent = Sent()
        async with listening(Streams) as port:
            client = client_of("http", port, sent)
            for index in range(2):  # over one connection
                client.send(index)
                await sent.until(index + 1)
            assert sent.done == [(0, OK if words is None else ERROR_EVENT), (1, OK)]
            assert client.error_samples == ({} if words is None else {"error event": words})
            await client.close()

    run(scenario)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b"<html>maintenance", b"</html>"], "<html>maintenance</html>"),
        ([], "an empty body"),
        ([b'{"error":"it broke"}'], '{"error":"it broke"}'),
        ([b" {", b'\n"err', b'or" : "it broke"}'], '{ "error" : "it broke"}'),
        ([b'[{"outputs":[]}]'], '[{"outputs":[]}]'),
        ([b'data: {"outputs":[]}\n\n'], 'data: {"outputs":[]}'),
        ([b'{"outputs":[]}'], None),
        ([b"{", b'"id":"error","outputs":[]}', b"\0" * 1000], None),
        ([b'\n{\n "error_rate":1, "outputs":[]}'], None),
        ([b'{"error":"", "outputs":[]}'], None),
        ([b'{"error":false, "outputs":[]}'], None),
        ([b'\xef\xbb\xbf{"outputs":[]}'], None),
        ([b'\xef\xbb\xbf{"error":"it broke"}'], '\u00b7{"error":"it broke"}'),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_success_of_the_v2_protocol_is_none_with_another_body(kind: str, pieces: list[bytes], words: str | None) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunked = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""]]

    class Others(Peer):
        came = staticmethod(lambda transport: transport.writelines([head, *chunked]))

    async def scenario() -> None:
        sent = Sent()
        async with listening(Others) as port:
            client = client_of("http", port, sent, v2=True)
            for index in range(2):  # over one connection
                client.send(index)
                await sent.until(index + 1)
            assert sent.done == [(0, status := OK if words is None else MALFORMED), (1, status)]
            assert client.error_samples == ({} if words is None else {"malformed": f"no v2 response: {words}"})
            await client.close()

    run(scenario)


def test_a_body_that_breaks_off_is_no_answer() -> None:
    def write_and_reset(transport: asyncio.Transport) -> None:
        transport.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhal")
        # Closed with this option, a socket sends a reset in place of an end.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asyncio.get_running_loop().call_later(0.02, transport.abort)

    class Breaks(Peer):
        came = staticmethod(write_and_reset)

    async def scenario() -> None:
        sent = Sent()
        async with listening(Breaks) as port:
            client = client_of("http", port, sent)
            client.send(0)
            assert await sent.until(1) == [(0, RESET)]
            await client.close()

    run(scenario)


def test_expired_requests_are_taken_back_from_the_queue_and_the_wire() -> None:
    class Answers(Peer):
        came = staticmethod(lambda transport: None)

    async def scenario() -> None:
        sent = Sent()
        async with listening(Answers) as port:
            client = client_of("http", port, sent)
            for index in range(10):
                client.send(index)
            await client.open(4)
            Answers.came = staticmethod(lambda transport: transport.write(ANSWER))
            client.expire(set(range(6)))  # four on the wire, two that wait
            done = await sent.until(4)
            assert sorted(done) == [(index, OK) for index in range(6, 10)]
            await client.close()

    run(scenario)


@pytest.mark.parametrize("kind", ["http", "grpc"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_no_file_left_for_a_connection_is_our_fault_and_fails_no_request(
    kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        sent = Sent()
        client = client_of(kind, 1, sent)
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refusing(number), raising=False)
        client.send(0)
        async with asyncio.timeout(10):
            await sent.came.wait()
        assert sent.done == []
        assert os.strerror(number) in str(sent.faults[0])
        await client.close()

    asyncio.run(scenario())  # uvloop's loops take no other method


def test_no_port_left_is_our_fault_where_the_address_has_answered_and_else_the_addresss() -> None:
    class Silent(Peer):
        pass

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        connect = loop.create_connection
        async with listening(Silent) as port:
            dialler = Dialler("127.0.0.1", port, tls=False, timeout_s=5)
            loop.create_connection = refusing(errno.EADDRNOTAVAIL)  # type: ignore[method-assign]
            with pytest.raises(OSError, match=os.strerror(errno.EADDRNOTAVAIL)):
                await dialler.dial(Peer)  # as ::1 where there is no IPv6
            loop.create_connection = connect  # type: ignore[method-assign]
            made = await dialler.dial(Peer)
            loop.create_connection = refusing(errno.EADDRNOTAVAIL)  # type: ignore[method-assign]
            with pytest.raises(Exhausted, match=os.strerror(errno.EADDRNOTAVAIL)):
                await dialler.dial(Peer)
            made.transport.abort()

    asyncio.run(scenario())


def test_an_address_that_says_nothing_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a machine that is gone, behind a name with two."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(dialling.socket, "getaddrinfo", lambda *_, **__: found)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        connect = loop.create_connection
        asked: list[str] = []

        async def create_connection(protocol: Any, host: str, port: int, **options: Any) -> Any:
            asked.append(host)
            if host == "192.0.2.1":
                await asyncio.Event().wait()
            return await connect(protocol, host, port, **options)

        loop.create_connection = create_connection  # type: ignore[method-assign, assignment]
        async with listening(Peer) as port:
            dialler = Dialler("two.test", port, tls=False, timeout_s=0.2)
            await dialler.look_up()
            for _ in range(2):
                (await dialler.dial(Peer)).transport.abort()
        assert asked == ["192.0.2.1", "127.0.0.1", "127.0.0.1"]

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", [socket.gaierror(socket.EAI_NONAME, "no such name"), UnicodeError("label too long")])
def test_a_name_that_does_not_resolve_is_looked_up_once_a_second(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(dialling, "time", SimpleNamespace(monotonic=lambda: now_s))
    asked: list[float] = []
    known = False

    def getaddrinfo(*args: object, **options: object) -> list[Any]:
        asked.append(now_s)
        if not known:
            raise failure
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(dialling.socket, "getaddrinfo", getaddrinfo)

    async def scenario() -> None:
        nonlocal now_s, known
        async with listening(Peer) as port:
            dialler = Dialler("nosuch.invalid", port, tls=False, timeout_s=5)
            await dialler.look_up()
            for moment_s in (0.0, 0.9, 1.0, 1.9, 2.0):
                now_s = moment_s
                dials = await asyncio.gather(*(dialler.dial(Peer) for _ in range(3)), return_exceptions=True)
                assert [type(each) for each in dials] == [OSError] * 3
                assert str(dials[-1]) == f"nosuch.invalid does not resolve: {failure}"
            assert asked == [0, 1, 2]
            known, now_s = True, 3.0
            (await dialler.dial(Peer)).transport.abort()

    run(scenario)


def refusing(number: int) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def create_connection(*args: object, **options: object) -> Any:
        raise OSError(number, os.strerror(number))

    return create_connection
