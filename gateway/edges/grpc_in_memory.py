"""gRPC without sockets: a `grpc.Channel` whose calls go to the gRPC listener's own code, so that any stub works on it.

What lies beneath a call, HTTP/2's frames and windows, is left out: a call begins with its headers, as messages.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol, TypeVar

import grpc

from gateway.edges.grpc_call_in_memory import (
    GrpcError,
    InMemoryCall,
    InMemoryFuture,
    InMemoryStream,
    StreamExchange,
    StreamInMemory,
    deadline_exceeded,
)
from gateway.edges.grpc_server import GrpcServer
from gateway.wire.http2_headers import Headers

_LONGEST_MS: Final = 99_999_999  # eight digits

T = TypeVar("T")
Metadata = Sequence[tuple[str, str | bytes]]


class Host(Protocol):
    """Whose loop the listener is on: `hosted.Hosted`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin a coroutine there."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, and wait for its end."""


class InMemoryChannel(grpc.Channel):
    """Calls one `GrpcServer`. From any thread but its own."""

    def __init__(self, host: Host, server: GrpcServer) -> None:
        self._host = host
        self._server = server

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        return _UnaryUnary(self._host, self._server, method, request_serializer, response_deserializer)

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        many = _StreamStream(self._host, self._server, method, request_serializer, response_deserializer)
        return lambda request, **options: many(iter([request]), **options)

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        many = _StreamStream(self._host, self._server, method, request_serializer, response_deserializer)
        return lambda requests, **options: next(many(requests, **options))

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        return _StreamStream(self._host, self._server, method, request_serializer, response_deserializer)

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        callback(grpc.ChannelConnectivity.READY)

    def unsubscribe(self, callback: Any) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> "InMemoryChannel":
        return self

    def __exit__(self, *_: object) -> None: ...


class _Calls:
    """What both kinds of calls share."""

    def __init__(self, host: Host, server: GrpcServer, method: str, serialize: Any, deserialize: Any) -> None:
        self._host = host
        self._server = server
        self._method = method
        self._serialize = serialize
        self._deserialize = deserialize

    def _headers(self, timeout: float | None, metadata: Metadata | None) -> Headers:
        given = metadata or ()
        headers = {name.lower().encode(): value if isinstance(value, bytes) else value.encode() for name, value in given}
        headers |= {b":method": b"POST", b":path": self._method.encode(), b"content-type": b"application/grpc"}
        if timeout is not None:
            headers[b"grpc-timeout"] = b"%dm" % min(_LONGEST_MS, max(1, round(timeout * 1000)))
        return headers

    def _frame(self, request: Any) -> bytes:
        data: bytes = self._serialize(request)
        return b"\0" + len(data).to_bytes(4) + data


class _UnaryUnary(_Calls):
    def __call__(self, request: Any, **options: Any) -> Any:
        """Options: timeout, metadata. Raises: GrpcError."""
        return self._host.run(self._answer(request, **options))[0]

    def with_call(self, request: Any, **options: Any) -> tuple[Any, InMemoryCall]:
        """The answer, and its call. Raises: likewise."""
        return self._host.run(self._answer(request, **options))

    def future(self, request: Any, timeout: float | None = None, **options: Any) -> InMemoryFuture:
        """Begins it; what comes of it is the future's result or exception. Cancelling the future cancels the call."""
        return InMemoryFuture(self._host.submit(self._answer(request, timeout, **options)), timeout)

    async def _answer(
        self,
        request: Any,
        timeout: float | None = None,  # noqa: ASYNC109 (grpc's word)
        metadata: Metadata | None = None,
        **_: Any,
    ) -> tuple[Any, InMemoryCall]:
        messages, call = await _asked(self._server, self._headers(timeout, metadata), self._frame(request), timeout)
        if isinstance(call, GrpcError):
            raise call
        return self._deserialize(messages[0]), call


async def _asked(server: GrpcServer, headers: Headers, frame: bytes, limit_s: float | None) -> tuple[list[bytes], InMemoryCall]:
    messages: list[bytes] = []
    ended: asyncio.Future[InMemoryCall] = asyncio.get_running_loop().create_future()

    def end(call: InMemoryCall) -> None:
        if not ended.done():
            ended.set_result(call)

    stream = StreamInMemory(headers, messages.append, end)
    server.open(stream)
    stream.receiver.take(frame, True)
    try:
        async with asyncio.timeout(limit_s):
            return messages, await ended
    except TimeoutError:
        stream.receiver.reset()
        raise deadline_exceeded() from None
    except asyncio.CancelledError:
        stream.receiver.reset()
        raise


class _StreamStream(_Calls):
    def __call__(
        self, requests: Iterable[Any], timeout: float | None = None, metadata: Metadata | None = None, **_: Any
    ) -> InMemoryStream:
        """Requests are read in a thread, as grpc does, until the call is over."""
        exchange = StreamExchange(self._host.loop, self._server, self._headers(timeout, metadata))
        call = InMemoryStream(self._host, exchange, self._deserialize, timeout)
        self._host.run(exchange.begin(timeout))
        threading.Thread(target=exchange.feed, args=(requests, self._frame), daemon=True).start()
        return call
