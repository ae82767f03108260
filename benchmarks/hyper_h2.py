"""What HTTP/2 costs a server by itself: the gateway's connection beside hyper-h2, µs of CPU per unary call, without sockets.

    python benchmarks/hyper_h2.py [--calls 20000] [--rounds 5]

Both get the same bytes, a header block and a body of 105 bytes for each call, as gRPC clients send them, and answer with
headers, as long a body and trailers. Needs `h2` (pip install h2); nothing else here does.
"""

import argparse
import importlib.util
import sys
import time
from typing import Any

import hpack

from gateway.config import Limits
from gateway.wire.http2_frames import (
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MOST_WINDOW,
    PREFACE,
    SETTINGS,
    frame,
    window_update,
)
from gateway.wire.http2_headers import header_block
from gateway.wire.http2_sending import Stream
from gateway.wire.http2_server import ServerConnection

MESSAGE = b"\0" + (100).to_bytes(4) + bytes(100)
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "localhost:8001"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
    ("user-agent", "grpc-python/1.80.0 grpc-c/54.0.0 (linux; chttp2)"),
]
OPENING = PREFACE + frame(SETTINGS, 0, 0) + window_update(0, MOST_WINDOW - DEFAULT_WINDOW)


def requests(calls: int) -> list[bytes]:
    """One read's bytes for each call."""
    encoder = hpack.Encoder()
    found = []
    for number in range(1, 2 * calls, 2):
        block = encoder.encode(FIELDS)
        found.append(frame(HEADERS, END_HEADERS, number, block) + frame(DATA, END_STREAM, number, MESSAGE))
    return found


class _Answer:
    HEAD = header_block((b"content-type", b"application/grpc"), status=200)
    TAIL = header_block((b"grpc-status", b"0"))

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def take(self, data: bytes, ended: bool) -> None:
        self._stream.send_headers(self.HEAD)
        self._stream.send_data(MESSAGE)
        self._stream.finish(self.TAIL)

    def reset(self) -> None: ...

    def drained(self) -> None: ...

    def late(self) -> None: ...

    def cut_off(self) -> None: ...

    def crowded(self) -> None: ...


def own(reads: list[bytes]) -> int:
    """Answer every call; returns how many bytes that took."""

    def begin(stream: Stream) -> None:
        stream.receiver = _Answer(stream)

    connection = ServerConnection(Limits(), begin, lambda: None, time.monotonic)
    connection.receive(OPENING)
    sent = 0
    for read in reads:
        connection.receive(read)
        sent += len(b"".join(connection.take()))
    return sent


def hyper_h2(reads: list[bytes]) -> int:
    """The same, by h2 as its documentation has it."""
    import h2.config
    import h2.connection
    import h2.events

    connection: Any = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    connection.initiate_connection()
    connection.receive_data(OPENING)
    sent = 0
    for read in reads:
        for event in connection.receive_data(read):
            if isinstance(event, h2.events.DataReceived):
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                number = event.stream_id
                connection.send_headers(number, [(":status", "200"), ("content-type", "application/grpc")])
                connection.send_data(number, MESSAGE)
                connection.send_headers(number, [("grpc-status", "0")], end_stream=True)
        sent += len(connection.data_to_send())
    return sent


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare HTTP/2 connections.")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if importlib.util.find_spec("h2") is None:
        parser.error("h2 is not installed (pip install h2)")
    reads = requests(arguments.calls)
    best = dict.fromkeys(("own", "hyper-h2"), float("inf"))
    for _ in range(arguments.rounds):
        for name, serve in (("own", own), ("hyper-h2", hyper_h2)):
            started = time.process_time()
            assert serve(reads) > arguments.calls * len(MESSAGE)
            best[name] = min(best[name], (time.process_time() - started) / arguments.calls * 1e6)
    for name, micros in best.items():
        print(f"{name:10} {micros:6.1f} µs per call")
    return 0


if __name__ == "__main__":
    sys.exit(main())
