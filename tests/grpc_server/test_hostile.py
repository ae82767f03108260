"""Clients that do harm: others wait for them no longer than for anybody. Bounds are wide; other processes do not count."""

import asyncio
import gzip
import socket
import threading
import time
from collections.abc import Callable

import pytest

from gateway.wire.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    SETTING,
    SETTINGS,
    frame,
    reset,
    settings,
    window_update,
)
from gateway.wire.http2_headers import header_block
from tests.grpc_server.serving import Served, infer_request, on_loop, serving

pytestmark = pytest.mark.slow

LONGEST_GAP_S = 0.4  # in which this process works, and its loop does nothing else
LONGEST_WAIT_S = 5.0  # likewise, whoever works
FIELDS = ((b":method", b"POST"), (b":scheme", b"http"), (b"content-type", b"application/grpc"))
LIVE = header_block(*FIELDS, (b":path", b"/inference.GRPCInferenceService/ServerLive"))
INFER = header_block(*FIELDS, (b":path", b"/inference.GRPCInferenceService/ModelInfer"), (b"grpc-encoding", b"gzip"))
OPENING = PREFACE + settings({INITIAL_WINDOW_SIZE: 0})
EMPTY = bytes(5)


def call(number: int, block: bytes = LIVE, message: bytes = EMPTY) -> bytes:
    return frame(HEADERS, END_HEADERS, number, block) + frame(DATA, END_STREAM, number, message)


def calls(count: int) -> bytes:
    return b"".join(call(number) for number in range(1, 2 * count, 2))


def bomb() -> bytes:
    message = gzip.compress(bytes(60_000_000))
    return b"\1" + len(message).to_bytes(4) + message


ATTACKS: dict[str, Callable[[], bytes]] = {
    "settings": lambda: calls(1024) + frame(SETTINGS, 0, 0, SETTING.pack(INITIAL_WINDOW_SIZE, 0) * 10_900) * 20,
    "small settings": lambda: calls(1024) + settings({INITIAL_WINDOW_SIZE: 0}) * 5000,
    "window updates": lambda: calls(1024) + window_update(0, 1) * 5000,
    "window updates of a stream": lambda: calls(1024) + window_update(1, 1) * 5000,
    "rapid resets": lambda: b"".join(call(number) + reset(number, 8) for number in range(1, 1800, 2)),
    "pings": lambda: frame(PING, 0, 0, bytes(8)) * 20_000,
    "empty data": lambda: frame(HEADERS, END_HEADERS, 1, LIVE) + frame(DATA, 0, 1) * 20_000,
    "headers": lambda: b"".join(
        frame(HEADERS, END_HEADERS, 1 + 2 * i, header_block((b"x", b"%d" % i * 6000))) for i in range(200)
    ),
    "bombs": lambda: b"".join(call(1 + 2 * i, INFER, bomb()) for i in range(4)),
}


async def gap_during(served: Served, data: bytes) -> tuple[float, float]:
    """The longest time in seconds in which the loop did nothing else: while this process worked, and in all.

    Ends when a call behind the attack has its answer.
    """
    host, port = served.url.split(":")
    longest, longest_wait, over = 0.0, 0.0, False

    async def beat() -> None:
        nonlocal longest, longest_wait
        while not over:
            before, worked_before = time.monotonic(), time.process_time()
            await asyncio.sleep(0.002)
            waited, worked = time.monotonic() - before, time.process_time() - worked_before
            longest, longest_wait = max(longest, min(waited, worked)), max(longest_wait, waited)

    with socket.create_connection((host, int(port))) as attacker:
        beating = asyncio.ensure_future(beat())
        sending = threading.Thread(target=lambda: attacker.sendall(OPENING + data), daemon=True)
        sending.start()
        for _ in range(20):
            await served.stub.ModelInfer(infer_request(value=1), timeout=10)
            await asyncio.sleep(0.01)
        over = True
        await beating
    return longest, longest_wait


@pytest.mark.parametrize("attack", ATTACKS)
def test_others_are_answered_while_one_client_floods(attack: str) -> None:
    @on_loop
    async def run() -> None:
        async with serving() as served:
            data = ATTACKS[attack]()
            await served.stub.ModelInfer(infer_request(value=1))
            longest, longest_wait = await gap_during(served, data)
            assert longest < LONGEST_GAP_S
            assert longest_wait < LONGEST_WAIT_S

    run()
