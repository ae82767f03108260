"""A connection that has ended leaves nothing."""

import asyncio
import gc

from gateway.config import Limits
from gateway.edges.http_server import HttpConnection, HttpServer
from gateway.edges.rest_in_memory import exchange
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
