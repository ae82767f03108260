"""Connections of both protocols that share one memory: who is refused, and how it is told."""

import gzip
import struct

from gateway.config import Limits
from gateway.wire.exchange import Exchange
from gateway.wire.http1 import Http1Connection
from gateway.wire.http2_frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame
from gateway.wire.http2_headers import header_block
from gateway.wire.http2_sending import Stream
from gateway.wire.http2_server import ServerConnection
from gateway.wire.memory import Memory
from tests.http_server.serving import echo
from tests.wire.talking import Kept, connect, give

MIB = 1 << 20
LIMITS = Limits(body_bytes=4 * MIB)


def head(size: int) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % size


def send(connection: Http1Connection, outlet: Kept, data: bytes) -> None:
    """As a socket's reads give it."""
    for at in range(0, len(data), 1 << 18):
        give(connection, data[at : at + (1 << 18)])
        outlet.give_turns(connection)


def silent(exchange: Exchange) -> None:
    """Does not answer."""


def refused(outlet: Kept) -> bool:
    said = bytes(outlet.written)
    assert said.startswith(b"HTTP/1.1 503 ") == (b"server.limits.memory_bytes" in said)
    assert said.startswith(b"HTTP/1.1 503 ") == (b"\r\nRetry-After: 1\r\n" in said)
    return said.startswith(b"HTTP/1.1 503 ")


def test_a_half_sent_body_gives_way_to_one_that_is_smaller() -> None:
    memory = Memory(4 * MIB)
    (hog, held_back), (other, answered) = (connect(echo, LIMITS, memory=memory) for _ in range(2))
    send(hog, held_back, head(4 * MIB) + bytes(3 * MIB))
    assert not refused(held_back)
    send(other, answered, head(2 * MIB) + bytes(2 * MIB))
    assert bytes(answered.written[:15]) == b"HTTP/1.1 200 OK"
    assert refused(held_back)
    assert held_back.ended
    assert hog.held() == 0


def test_a_body_that_is_larger_than_what_others_have_left_is_refused() -> None:
    memory = Memory(4 * MIB)
    (one, first), (two, second) = (connect(silent, LIMITS, memory=memory) for _ in range(2))
    send(one, first, head(3 * MIB) + bytes(3 * MIB))
    send(two, second, head(2 * MIB) + bytes(2 * MIB))
    assert (refused(first), refused(second)) == (False, True)
    assert one.held() == 3 * MIB


def test_a_claim_alone_takes_nothing_from_others() -> None:
    memory = Memory(4 * MIB)
    for _ in range(100):
        send(*connect(echo, LIMITS, memory=memory), head(4 * MIB) + b"x")
    assert memory.granted_bytes == 0


def test_a_chunked_body_is_counted_as_it_comes() -> None:
    memory = Memory(2 * MIB)
    connection, outlet = connect(echo, LIMITS, memory=memory)
    send(connection, outlet, b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    for _ in range(30):
        send(connection, outlet, chunk)
    assert not refused(outlet)
    assert memory.granted_bytes == 2 * MIB
    for _ in range(10):
        send(connection, outlet, chunk)
    assert refused(outlet)
    assert connection.held() == 0


def test_what_a_body_inflates_to_is_counted() -> None:
    memory = Memory(2 * MIB)
    packed = gzip.compress(bytes(3 * MIB))
    coded = b"POST / HTTP/1.1\r\nHost: t\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    connection, outlet = connect(echo, LIMITS, memory=memory)
    send(connection, outlet, coded + packed)
    assert refused(outlet)
    send(connection, outlet, head(1) + b"x")
    assert b"HTTP/1.1 200 OK" in outlet.written, "the connection goes on"


def test_pipelined_requests_wait_where_memory_is_short() -> None:
    memory = Memory(2 * MIB)
    (hog, _), (asking, outlet) = (connect(silent, LIMITS, memory=memory) for _ in range(2))
    send(hog, Kept(), head(2 * MIB) + bytes(2 * MIB))
    send(asking, outlet, (head(30_000) + bytes(30_000)) * 20)
    assert 256 << 10 <= asking.held_bytes <= 300 << 10
    assert not outlet.reading
    assert not refused(outlet)


def test_a_client_that_does_not_take_its_answer_is_cut_off_for_others() -> None:
    memory = Memory(4 * MIB)
    (one, first), (two, second) = (connect(echo, LIMITS, memory=memory) for _ in range(2))
    for connection, outlet in ((one, first), (two, second)):
        outlet.unsent = 3 * MIB
        connection.pause_writing()
    assert (first.closed, second.closed) == (True, False)


class Http2:
    """A client of a connection that answers nothing. told: streams that were told that there is no memory."""

    def __init__(self, memory: Memory) -> None:
        self.told: list[int] = []
        self.connection = ServerConnection(LIMITS, self._begin, lambda: None, lambda: 0.0, memory)
        self.connection.receive(PREFACE + frame(SETTINGS, 0, 0))

    def _begin(self, stream: Stream) -> None:
        stream.receiver = _Silent(stream, self.told)

    def call(self, number: int, size: int, *, end: bool = False, fields: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        block = header_block((b":method", b"POST"), *fields)
        self.connection.receive(frame(HEADERS, END_HEADERS, number, block))
        for at in range(0, size, 1 << 15):
            self.connection.receive(frame(DATA, END_STREAM if end and at + (1 << 15) >= size else 0, number, bytes(1 << 15)))


class _Silent:
    def __init__(self, stream: Stream, told: list[int]) -> None:
        self._stream = stream
        self._told = told

    def take(self, data: bytes, ended: bool) -> None: ...

    def reset(self) -> None: ...

    def drained(self) -> None: ...

    def late(self) -> None: ...

    def cut_off(self) -> None: ...

    def crowded(self) -> None:
        self._told.append(self._stream.number)
        self._stream.send_headers(header_block(status=200), end=True)


def test_a_call_gives_way_to_another_connection() -> None:
    memory = Memory(6 * MIB)  # messages count three times
    hog, other = Http2(memory), Http2(memory)
    hog.call(1, MIB)
    hog.call(3, MIB // 2)
    assert not hog.told
    other.call(1, MIB, end=True)
    assert hog.told == [1], "the longest of those that are not whole"
    assert not other.told
    assert hog.connection.held() == 3 * MIB // 2


def test_a_call_that_is_whole_does_not_give_way() -> None:
    memory = Memory(6 * MIB)
    hog, other = Http2(memory), Http2(memory)
    hog.call(1, 2 * MIB, end=True)
    other.call(1, MIB)
    assert not hog.told
    assert other.told == [1]


def test_rest_and_grpc_share_it() -> None:
    memory = Memory(6 * MIB)
    hog = Http2(memory)
    hog.call(1, 2 * MIB)
    connection, outlet = connect(echo, LIMITS, memory=memory)
    send(connection, outlet, head(MIB) + bytes(MIB))
    assert hog.told == [1]
    assert not refused(outlet)


def test_long_headers_are_counted_until_their_calls_are_over() -> None:
    memory = Memory(64 * MIB)
    client = Http2(memory)
    for number in range(1, 101, 2):
        client.call(number, 0, fields=((b"x", b"%d" % number + b"y" * 20_000),))
    assert client.connection.held() >= 3 * 50 * 20_000
    assert memory.granted_bytes >= 3 * 50 * 20_000
    for number in range(1, 101, 2):
        client.connection.receive(frame(3, 0, number, struct.pack(">I", 8)))
    assert client.connection.held() == 0


def test_what_a_long_answer_is_made_of_is_counted_while_it_is_written() -> None:
    memory = Memory(8 * MIB)

    def begin(exchange: Exchange) -> None:
        exchange.begin(200, b"text/plain", held_behind=3 * MIB)
        exchange.write(b"a slice")

    connection, outlet = connect(begin, LIMITS, memory=memory)
    send(connection, outlet, head(1) + b"x")
    outlet.unsent = 7
    connection.pause_writing()
    assert memory.granted_bytes > 3 * MIB
