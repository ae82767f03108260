"""A connection that is sent much lets others have their turn."""

import asyncio
import socket
import sys
import time
from collections import Counter
from typing import Any

import pytest

from gateway.config import Limits
from gateway.edges.http_server import HttpConnection, HttpServer
from gateway.wire.exchange import Exchange
from tests.http_server.serving import get, post
from tests.simulation import SimulatedClock, run_simulated
from tests.sockets import reset

MIB = 1 << 20


class Wire(asyncio.Transport):
    """Keeps whether it is read, and whether it was cut. sock: what it says its socket is."""

    reading = True
    aborted = False

    def __init__(self, sock: socket.socket | None = None) -> None:
        super().__init__({"socket": sock})

    def abort(self) -> None:
        self.aborted = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: Any) -> None: ...


def come(connection: HttpConnection, data: bytes) -> None:
    """Fill what the connection offers, as a transport does."""
    buffer = connection.get_buffer(-1)
    buffer[: len(data)] = data
    connection.buffer_updated(len(data))


def test_behind_a_read_that_fills_its_buffer_nothing_is_read_in_this_turn() -> None:
    asked: list[Exchange] = []

    async def main(clock: SimulatedClock) -> None:
        connection, wire = HttpConnection(HttpServer(asked.append, Limits()), asyncio.get_running_loop()), Wire()
        connection.connection_made(wire)
        come(connection, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2 * MIB))
        assert wire.reading
        left = 2 * MIB
        while left:
            offered = len(connection.get_buffer(-1))
            assert 0 < offered <= MIB
            come(connection, bytes(min(offered, left)))
            left -= min(offered, left)
            assert not wire.reading
            await asyncio.sleep(0)
            assert wire.reading
        assert [len(exchange.body) for exchange in asked] == [2 * MIB]
        connection.connection_lost(None)

    run_simulated(main)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells")
def test_who_rests_and_has_gone_is_read_no_further() -> None:
    async def main(clock: SimulatedClock) -> None:
        with reset() as sock:
            connection, wire = HttpConnection(HttpServer(refuse, Limits()), asyncio.get_running_loop()), Wire(sock)
            connection.connection_made(wire)
            come(connection, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2 * MIB))
            come(connection, bytes(len(connection.get_buffer(-1))))
            await asyncio.sleep(0)
            assert (wire.reading, wire.aborted) == (False, True)
            connection.connection_lost(None)

    run_simulated(main)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells")
def test_a_long_request_that_waits_for_its_turn_is_not_handled_once_its_client_has_gone() -> None:
    async def main(clock: SimulatedClock) -> None:
        with reset() as sock:
            server = HttpServer(refuse, Limits())
            connection, wire = HttpConnection(server, asyncio.get_running_loop()), Wire(sock)
            connection.connection_made(wire)
            server.turns.wait(int)  # somebody else's
            come(connection, post(bytes(17_000)))
            await asyncio.sleep(0)
            assert wire.aborted
            connection.connection_lost(None)

    run_simulated(main)


def refuse(exchange: Exchange) -> None:
    raise AssertionError(f"{exchange!r} was handled")


def connected(server: HttpServer) -> HttpConnection:
    connection = HttpConnection(server, asyncio.get_running_loop())
    connection.connection_made(Wire())
    return connection


def test_of_many_long_requests_a_turn_has_one_and_short_ones_do_not_wait_for_them() -> None:
    handled: list[tuple[int, int]] = []
    turn = 0

    def handle(exchange: Exchange) -> None:
        handled.append((turn, len(exchange.body)))
        if exchange.body:
            time.sleep(0.002)  # a turn's worth
        exchange.respond(200)

    async def main(clock: SimulatedClock) -> None:
        nonlocal turn
        server = HttpServer(handle, Limits())
        connections = [connected(server) for _ in range(4)]
        for number, connection in enumerate(connections):
            come(connection, post(bytes(20_001 + number)))
        assert handled == [(0, 20_001)], "alone, the first does not wait"
        connections[3].connection_lost(None)
        for turn in range(1, 5):  # noqa: B007  # it is what `handle` sees
            await asyncio.sleep(0)
            come(connections[0], get())
        assert handled == [(0, 20_001), (1, 20_002), (1, 0), (2, 20_003), (2, 0), (3, 0), (4, 0)]
        for connection in connections[:3]:
            connection.connection_lost(None)

    run_simulated(main)


def test_of_many_clients_that_send_many_requests_at_once_a_turn_has_the_first_of_each() -> None:
    handled: list[tuple[int, int]] = []
    turn = 0

    def handle(exchange: Exchange) -> None:
        handled.append((turn, len(exchange.body)))
        time.sleep(0.0006)
        exchange.respond(200)

    async def main(clock: SimulatedClock) -> None:
        nonlocal turn
        server = HttpServer(handle, Limits())
        connections = [connected(server) for _ in range(6)]
        for number, connection in enumerate(connections):
            come(connection, post(bytes(number)) * 30)
        assert [number for _, number in handled if number > 1] == [2, 3, 4, 5], "the turn is used up"
        for turn in range(1, 400):  # noqa: B007  # it is what `handle` sees
            await asyncio.sleep(0)
        assert len(handled) == 6 * 30
        assert max(Counter(turn for turn, _ in handled if turn).values()) <= 3
        for connection in connections:
            connection.connection_lost(None)

    run_simulated(main)
