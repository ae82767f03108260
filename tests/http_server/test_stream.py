"""Properties of the reader over any bytes, in any pieces: driven without sockets."""

import asyncio
import gc
import gzip
import json
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config import Limits
from gateway.http_server import HttpConnection, HttpServer
from tests.http_server.serving import echo, get, post


class FakeTransport:
    """Takes what a connection writes."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def write_eof(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


LIMITS = Limits(body_bytes=20_000, header_bytes=2000, header_count=20, pipelined_requests=2)


def run(loop: asyncio.AbstractEventLoop, pieces: list[bytes]) -> bytes:
    """What a new connection answers to these reads."""
    server = HttpServer(echo, LIMITS)
    connection = HttpConnection(server, loop)
    transport = FakeTransport()
    connection.connection_made(transport)  # type: ignore[arg-type]  # what it uses of one
    for piece in pieces:
        while piece:
            buffer = connection.get_buffer(-1)
            count = min(len(piece), len(buffer))
            buffer[:count] = piece[:count]
            connection.buffer_updated(count)
            piece = piece[count:]
    assert not connection._exchanges
    assert not connection._backlog
    connection.connection_lost(None)
    assert not server.connections
    return bytes(transport.written)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


def chunked(body: bytes, sizes: list[int]) -> bytes:
    out, at = b"POST /chunked HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 0
    for size in sizes:
        if piece := body[at : at + size]:
            out += b"%x\r\n%b\r\n" % (len(piece), piece)
        at += size
    return out + b"0\r\n\r\n"


requests = st.one_of(
    st.binary(max_size=3000).map(post),
    st.builds(lambda body: post(gzip.compress(body), "Content-Encoding: gzip"), st.binary(max_size=2000)),
    st.builds(lambda body: post(body, "Connection: Upgrade", "Upgrade: h2c"), st.binary(max_size=2000)),
    st.builds(lambda body: post(body, "Expect: 100-continue"), st.binary(max_size=200)),
    st.builds(chunked, st.binary(max_size=3000), st.lists(st.integers(1, 2000), max_size=5)),
    st.just(get("/plain")),
    st.just(b"HEAD / HTTP/1.1\r\n\r\n"),
)


def test_a_closed_connection_is_freed_without_the_collector(loop: asyncio.AbstractEventLoop) -> None:
    gc.collect()
    gc.disable()
    try:
        run(loop, [get() + post(b"x" * 100)])
        run(loop, [b"garbage"])
        assert not [each for each in gc.get_objects() if type(each) is HttpConnection]
    finally:
        gc.enable()


ANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@ANY
@given(st.lists(requests, min_size=1, max_size=6), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_the_way_a_stream_is_cut_does_not_matter(loop: asyncio.AbstractEventLoop, stream: list[bytes], cuts: list[int]) -> None:
    data = b"".join(stream)
    # Whether `100 Continue` is sent depends on how much has come already, as it should; the rest does not.
    whole, pieces = (run(loop, reads).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") for reads in ([data], split(data, cuts)))
    assert whole == pieces
    assert whole.count(b"HTTP/1.1 200 OK\r\n") == len(stream)


@ANY
@given(st.lists(st.one_of(requests, st.binary(max_size=300)), max_size=6), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_no_bytes_break_the_reader(loop: asyncio.AbstractEventLoop, stream: list[bytes], cuts: list[int]) -> None:
    answers = run(loop, split(b"".join(stream), cuts))
    assert statuses(answers) <= {100, 200, 400, 413, 417, 431, 501}


@ANY
@given(requests, st.integers(0, 1 << 20), st.binary(max_size=8), st.integers(0, 8))
def test_a_mutated_request_never_fails_the_server(
    loop: asyncio.AbstractEventLoop, request_bytes: bytes, at: int, insert: bytes, drop: int
) -> None:
    at %= len(request_bytes) + 1
    answers = run(loop, [request_bytes[:at] + insert + request_bytes[at + drop :] + get("/next")])
    assert statuses(answers) <= {100, 200, 400, 413, 417, 431, 501}


def statuses(answers: bytes) -> set[int]:
    for error in re.findall(rb'\{"error".*?\}', answers):
        json.loads(error)
    return {int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answers)}
