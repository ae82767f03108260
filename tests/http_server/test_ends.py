"""A connection, or a request, that has ended leaves nothing."""

import asyncio
import contextlib
import gc
import gzip
import random

from gateway.config import Limits
from gateway.edges.http_server import HttpConnection, HttpServer
from gateway.edges.rest_in_memory import exchange
from gateway.wire import compression
from gateway.wire.exchange import Exchange
from gateway.wire.http1 import Http1Connection
from gateway.wire.requests import RequestReader
from tests.http_server.serving import echo, get, post


def test_a_closed_connection_is_freed_without_the_collector() -> None:
    async def talk() -> None:
        server = HttpServer(echo, Limits())
        for request in (get() + post(b"x" * 100, "Connection: close"), b"garbage"):
            assert b"HTTP/1.1" in await exchange(server, request)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(talk())
        assert not [each for each in gc.get_objects() if type(each) in (HttpConnection, Http1Connection, RequestReader)]
    finally:
        gc.enable()


def test_what_is_inflated_or_compressed_is_freed_without_the_collector() -> None:
    body = random.Random(1).randbytes(200_000)
    whole = gzip.compress(body)
    bodies = (whole, whole[:-1], gzip.compress(bytes(100_000)), gzip.compress(body * 2), b"\x1f\x8b" * 9, whole + b"rest")
    expected = (b"200", b"400", b"200", b"413", b"400", b"400")

    async def talk() -> None:
        server = HttpServer(lambda exchange: exchange.respond(200, body), Limits(body_bytes=300_000))
        coded = "Content-Encoding: gzip", "Accept-Encoding: gzip", "Connection: close"
        for request, status in zip(bodies, expected, strict=True):
            assert (await exchange(server, post(request, *coded))).startswith(b"HTTP/1.1 " + status)
        leaving = asyncio.ensure_future(exchange(server, post(whole, *coded)))
        await asyncio.sleep(0)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving

    gc.collect()
    gc.disable()
    try:
        asyncio.run(talk())
        assert not [each for each in gc.get_objects() if type(each) in (Exchange, compression._Collected)]
    finally:
        gc.enable()
