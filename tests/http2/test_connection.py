"""The shell of an HTTP/2 connection: its transport and its clock."""

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gateway.config import Limits
from gateway.edges.http2 import Http2Connection
from gateway.edges.long_turns import LongTurns
from gateway.wire.http2_frames import (
    DATA,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    settings,
    window_update,
)
from gateway.wire.http2_headers import header_block
from gateway.wire.http2_sending import Stream
from tests.simulation import SimulatedClock, run_simulated
from tests.sockets import reset


class Wire(asyncio.Transport):
    """Collects what is written. sock: what it says its socket is. unread: what the client has not taken."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        super().__init__({"socket": sock})
        self.sent = b""
        self.unread = 0
        self.closed = False
        self.reading = True

    def write(self, data: Any) -> None:
        assert not self.closed
        self.sent += bytes(data)

    def writelines(self, pieces: Any) -> None:
        assert not self.closed
        self.sent += b"".join(pieces)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def connected(
    limits: Limits | None = None, on_stream: Callable[[Stream], None] = lambda stream: None
) -> tuple[Http2Connection, Wire]:
    connection, wire = Http2Connection(limits or Limits(), on_stream, lambda connection: None), Wire()
    connection.connection_made(wire)
    connection.data_received(PREFACE + frame(SETTINGS, 0, 0))
    return connection, wire


def in_simulated_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main(clock: SimulatedClock) -> None:
        await test()

    return lambda: run_simulated(main)


@in_simulated_time
async def test_what_is_written_in_one_turn_of_the_loop_leaves_in_one_piece() -> None:
    streams: list[Stream] = []
    connection, wire = connected(on_stream=streams.append)
    for number in (1, 3):
        connection.data_received(frame(HEADERS, 4, number, header_block((b":method", b"POST"))))
    wire.sent = b""
    for stream in streams:
        stream.send_data(b"abc")
    assert wire.sent == b""
    await asyncio.sleep(0)
    assert wire.sent == frame(0, 0, 1, b"abc") + frame(0, 0, 3, b"abc")


@in_simulated_time
async def test_a_client_without_a_preface_is_cut_off() -> None:
    connection, wire = Http2Connection(Limits(header_timeout_s=10), lambda stream: None, lambda connection: None), Wire()
    connection.connection_made(wire)
    await asyncio.sleep(9)
    assert not wire.closed
    await asyncio.sleep(2)
    assert wire.closed


@in_simulated_time
async def test_a_frame_that_does_not_end_is_cut_off() -> None:
    connection, wire = connected(Limits(body_timeout_s=60))
    connection.data_received(frame(HEADERS, 4, 1, b"abc")[:5])
    await asyncio.sleep(59)
    assert not wire.closed
    await asyncio.sleep(2)
    assert wire.closed


@pytest.mark.parametrize("body_timeout_s", [0.5, 1.0, 60.0])  # it looks as often who is idle
def test_an_idle_connection_is_told_once_and_closed(body_timeout_s: float) -> None:
    async def main(clock: SimulatedClock) -> None:
        _, wire = connected(Limits(body_timeout_s=body_timeout_s, idle_timeout_s=2))
        await asyncio.sleep(2.5 + 2 * body_timeout_s)
        assert wire.sent.count(b"nothing was asked for long") == 1
        await asyncio.sleep(1.5)
        assert wire.closed

    run_simulated(main)


@in_simulated_time
async def test_a_peer_that_does_not_read_is_read_no_further() -> None:
    connection, wire = connected()
    connection.pause_writing()
    assert not wire.reading
    connection.resume_writing()
    assert wire.reading


@in_simulated_time
async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    connection, wire = connected(Limits(body_timeout_s=60))
    wire.unread = 100_000
    connection.pause_writing()
    await asyncio.sleep(59)
    assert not wire.closed
    await asyncio.sleep(2)
    assert wire.closed


@in_simulated_time
async def test_a_client_that_takes_its_answers_slowly_but_steadily_keeps_its_connection() -> None:
    connection, wire = connected(Limits(body_timeout_s=60))
    wire.unread = 100_000_000
    connection.pause_writing()
    for _ in range(151):
        await asyncio.sleep(1)
        wire.unread -= 640_000
    await asyncio.sleep(59)
    assert not wire.closed
    await asyncio.sleep(17)  # it is looked at four times in 60 s
    assert wire.closed


PINGS = frame(PING, 0, 0, bytes(8)) * 1000


@in_simulated_time
async def test_others_get_their_turn_while_one_client_is_read() -> None:
    connection, wire = connected()
    wire.sent = b""
    connection.data_received(PINGS)
    assert 0 < len(wire.sent) < len(PINGS) / 4
    assert not wire.reading
    turns = 0
    while not wire.reading:
        turns += 1
        await asyncio.sleep(0)
    assert len(wire.sent) == len(PINGS)
    assert turns > 4


@in_simulated_time
async def test_of_many_long_reads_a_turn_has_one_and_short_ones_do_not_wait_for_them() -> None:
    turns, turn = LongTurns(), 0
    begun: list[tuple[int, int]] = []
    made: list[tuple[Http2Connection, Wire]] = []

    def connect() -> None:
        number = len(made)

        def begin(stream: Stream) -> None:
            begun.append((turn, number))
            time.sleep(0.002)  # a turn's worth

        connection, wire = Http2Connection(Limits(), begin, lambda connection: None, turns=turns), Wire()
        connection.connection_made(wire)
        connection.data_received(PREFACE + frame(SETTINGS, 0, 0))
        made.append((connection, wire))

    for _ in range(5):
        connect()
    head = frame(HEADERS, 4, 1, header_block((b":method", b"POST")))
    for connection, _ in made[:4]:
        connection.data_received(head + frame(DATA, 0, 1, bytes(17_000)))
    made[4][0].data_received(head)
    assert begun == [(0, 0), (0, 4)], "alone, the first does not wait"
    made[3][0].connection_lost(None)
    for turn in range(1, 6):  # noqa: B007  # it is what `begin` sees
        await asyncio.sleep(0)
    assert begun == [(0, 0), (0, 4), (1, 1), (2, 2)]
    assert all(wire.reading for _, wire in made[:3])


@in_simulated_time
async def test_what_waits_for_its_turn_is_not_handled_once_its_client_has_gone() -> None:
    if sys.platform != "linux":
        pytest.skip("no other system tells")
    turns = LongTurns()
    begun: list[Stream] = []
    with reset() as sock:
        connection, wire = Http2Connection(Limits(), begun.append, lambda connection: None, turns=turns), Wire(sock)
        connection.connection_made(wire)
        connection.data_received(PREFACE + frame(SETTINGS, 0, 0))
        turns.wait(int)  # somebody else's
        head = frame(HEADERS, 4, 1, header_block((b":method", b"POST")))
        connection.data_received(head + frame(DATA, 0, 1, bytes(17_000)))
        await asyncio.sleep(0)
        assert (begun, wire.closed) == ([], True)
        connection.connection_lost(None)


@in_simulated_time
async def test_of_many_clients_that_send_many_calls_at_once_a_turn_has_those_of_one() -> None:
    turns = LongTurns()
    begun: list[int] = []
    made: list[Http2Connection] = []
    calls = b"".join(frame(HEADERS, 4, 2 * number + 1, header_block((b":method", b"POST"))) for number in range(100))

    for number in range(5):

        def begin(stream: Stream, number: int = number) -> None:
            begun.append(number)
            time.sleep(0.00002)

        connection = Http2Connection(Limits(), begin, lambda connection: None, turns=turns)
        connection.connection_made(Wire())
        connection.data_received(PREFACE + frame(SETTINGS, 0, 0))
        made.append(connection)
    for connection in made:
        connection.data_received(calls)
    assert begun == [0] * 100
    while len(begun) < 500:
        had = len(begun)
        await asyncio.sleep(0)
        assert len(begun) <= had + 100
    assert sorted(set(begun)) == [0, 1, 2, 3, 4]


@in_simulated_time
async def test_what_was_read_waits_while_the_client_takes_nothing() -> None:
    connection, wire = connected()
    connection.data_received(PINGS)
    connection.pause_writing()
    wire.sent = b""
    for _ in range(50):
        await asyncio.sleep(0)
    assert wire.sent == b""
    connection.resume_writing()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(wire.sent) > len(PINGS) / 2
    assert wire.reading


@in_simulated_time
async def test_an_answer_leaves_as_the_transport_takes_it() -> None:
    streams: list[Stream] = []
    connection, wire = connected(on_stream=streams.append)
    connection.data_received(settings({INITIAL_WINDOW_SIZE: 1 << 30}) + window_update(0, 1 << 30))
    connection.data_received(frame(HEADERS, 4, 1, header_block((b":method", b"POST"))))
    wire.sent = b""
    streams[0].send_data(bytes(20_000_000))
    await asyncio.sleep(0)
    assert len(wire.sent) < 5_000_000
    connection.pause_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(wire.sent) < 9_000_000
    connection.resume_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(wire.sent) > 20_000_000


@in_simulated_time
async def test_a_drain_lets_the_last_answer_leave_whole() -> None:
    streams: list[Stream] = []
    connection, wire = connected(on_stream=streams.append)
    connection.data_received(settings({INITIAL_WINDOW_SIZE: 1 << 30}) + window_update(0, 1 << 30))
    connection.data_received(frame(HEADERS, 5, 1, header_block((b":method", b"POST"))))
    end = header_block((b"grpc-status", b"0"))
    streams[0].send_data(bytes(9_000_000))
    streams[0].finish(end)
    connection.drain()
    for _ in range(20):
        await asyncio.sleep(0)
    assert wire.closed
    assert wire.sent.endswith(frame(HEADERS, 5, 1, end))
    assert len(wire.sent) > 9_000_000


@in_simulated_time
async def test_behind_a_full_read_others_have_their_turn() -> None:
    connection, wire = connected()
    connection.data_received(frame(PING, 0, 0, bytes(8)) * 3)
    assert wire.reading
    connection.data_received(frame(0xEE, 0, 0, bytes(16_000)) * 9)
    assert not wire.reading
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wire.reading
