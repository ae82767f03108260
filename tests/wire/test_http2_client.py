"""Both sides of HTTP/2 told of each other: what one puts out, the other takes in."""

import random
from collections.abc import Callable

import pytest

from gateway.config import Limits
from gateway.wire.http2 import Connection
from gateway.wire.http2_client import ClientConnection
from gateway.wire.http2_frames import (
    CANCEL,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    PING,
    SETTINGS,
    WORD,
    frame,
    settings,
)
from gateway.wire.http2_headers import Headers, header_block
from gateway.wire.http2_sending import Stream
from gateway.wire.http2_server import ServerConnection

BLOCK = header_block((b":method", b"POST"), (b":path", b"/echo"))


class Told:
    """What a client connection tells, in words."""

    def __init__(self) -> None:
        self.words: list[tuple[object, ...]] = []

    def headers(self, number: int, headers: Headers, ended: bool) -> None:
        self.words.append(("headers", number, headers, ended))

    def data_ended(self, number: int) -> None:
        self.words.append(("data ended", number))

    def reset(self, number: int, code: int) -> None:
        self.words.append(("reset", number, code))

    def going_away(self, last: int) -> None:
        self.words.append(("going away", last))

    def room(self) -> None:
        self.words.append(("room",))


class Echo:
    """Says how long a body was."""

    def __init__(self, stream: Stream, resets: list[int]) -> None:
        self.stream = stream
        self.resets = resets
        self.size = 0

    def take(self, data: bytes, ended: bool) -> None:
        self.size += len(data)
        if ended:
            self.stream.send_headers(header_block(status=200))
            self.stream.send_data(bytes(self.size))
            self.stream.finish(header_block((b"size", b"%d" % self.size)))

    def reset(self) -> None:
        self.resets.append(self.stream.number)

    def drained(self) -> None: ...

    def late(self) -> None: ...

    def cut_off(self) -> None: ...

    def crowded(self) -> None: ...


def client_and_server(limits: Limits | None = None) -> tuple[ClientConnection, ServerConnection, Told, list[int]]:
    told, resets = Told(), list[int]()

    def begin(stream: Stream) -> None:
        stream.receiver = Echo(stream, resets)

    client = ClientConnection(told, lambda: None)
    return client, ServerConnection(limits or Limits(), begin, lambda: None, lambda: 0.0), told, resets


def talk(a: Connection, b: Connection, piece: Callable[[], int] = lambda: 1 << 20) -> None:
    """Until neither has anything to say."""
    silent = 0
    while silent < 2:
        said = b"".join(a.take())
        silent = 0 if said else silent + 1
        at = 0
        while at < len(said):
            size = piece()
            b.receive(said[at : at + size])
            while b.more:
                b.receive(b"")
            at += size
        if a.ready:
            a.send_on()
        a, b = b, a


@pytest.mark.parametrize("body_bytes", [1, 100_000])
def test_requests_of_any_size_are_answered_through_any_windows(body_bytes: int) -> None:
    rng = random.Random(body_bytes)
    client, server, told, _ = client_and_server(Limits(body_bytes=body_bytes))
    sizes = {}
    for _ in range(60):
        size = rng.choice((0, 1, 100, 16_384, 16_385, body_bytes + 65_536))
        sizes[client.ask(BLOCK, bytes(size))] = size
        if rng.random() < 0.2:
            talk(client, server, lambda: rng.randint(1, 100_000))
    talk(client, server)
    ends = {word[1]: int(word[2][b"size"]) for word in told.words if word[0] == "headers" and word[3]}  # type: ignore[index]
    given_up = {word[1] for word in told.words if word[0] == "reset"}  # whole messages that fill the window, at once
    assert ends == {number: size for number, size in sizes.items() if number not in given_up}
    assert len(given_up) < 30
    assert not client.fault
    assert not client._unsent
    assert not server.closing


def test_a_request_that_is_taken_back_is_sent_no_further() -> None:
    client, server, told, resets = client_and_server()
    talk(client, server)
    client.initial_window = 0
    number = client.ask(BLOCK, b"abc")
    talk(client, server)
    client.cancel(number, CANCEL)
    talk(client, server)
    client.receive(settings({INITIAL_WINDOW_SIZE: 100}))
    talk(client, server)
    assert resets == [number]
    assert not [word for word in told.words if word[0] == "headers"]


def test_the_servers_limits_and_its_end_are_told() -> None:
    client, _, told, _ = client_and_server()
    client.take()
    client.receive(settings({MAX_CONCURRENT_STREAMS: 7, MAX_FRAME_SIZE: 20_000}) + frame(GOAWAY, 0, 0, WORD.pack(5) + bytes(4)))
    assert client.most_streams == 7
    assert client.peer_frame_bytes == 20_000
    assert told.words == [("room",), ("going away", 5)]


def test_a_read_is_handled_to_its_end_however_much_it_is() -> None:
    client, _, told, _ = client_and_server()
    client.receive(b"".join(frame(HEADERS, END_HEADERS | 1, 1 + 2 * i, header_block((b"n", b"1"))) for i in range(5000)))
    assert len(told.words) == 5000
    assert not client.more


@pytest.mark.parametrize(
    "broken",
    [frame(SETTINGS, 0, 1), frame(PING, 0, 0, b"x"), frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff"), b"HTTP/1.1 400 "],
)
def test_a_server_that_breaks_the_protocol_ends_the_connection_with_the_reason(broken: bytes) -> None:
    client, _, _, _ = client_and_server()
    client.receive(broken + bytes(100))
    assert client.aborted
    assert client.fault
