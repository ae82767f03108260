"""gRPC without sockets: a `grpc.Channel` whose calls go to the gRPC listener's own code, so that any stub works on it.

What lies beneath a call, HTTP/2's frames and windows, is left out: a call begins with its headers, as messages.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import unquote

import grpc
import hpack

from gateway.edges.grpc_server import GrpcServer
from gateway.wire.http2_headers import Headers
from gateway.wire.http2_receiver import NOBODY, Receiver
from gateway.wire.tensors import Buffer

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_OF_THE_CALL: Final = (b":status", b"content-type", b"grpc-status", b"grpc-message")
_LONGEST_MS: Final = 99_999_999  # eight digits
_UNREAD: Final = 8  # messages of a call that its caller has not taken, before what sends them waits

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


class InMemoryCall:
    """A call that has ended, with what grpc's own calls tell of it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[Any, ...] = ()) -> None:
        self._code = code
        self._details = details
        self._trailing_metadata = trailing_metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Pairs of name and value."""
        return self._trailing_metadata


class GrpcError(InMemoryCall, grpc.RpcError):
    """One that failed."""

    def __str__(self) -> str:
        return f"{self._code.name}: {self._details}"


class _StreamInMemory:
    """One call's stream: `grpc_call.CallStream`. What comes is handed on: messages, then the fields of the answer's end.

    Its window is of _UNREAD messages.
    """

    def __init__(self, headers: Headers, on_message: Callable[[bytes], None], on_end: Callable[[Headers], None]) -> None:
        self.headers = headers
        self.receiver: Receiver = NOBODY
        self._unread = 0
        self._on_message = on_message
        self._on_end = on_end

    @property
    def backlog(self) -> bool:
        return self._unread > _UNREAD

    def read(self) -> None:
        """The caller has taken a message."""
        held = self.backlog
        self._unread -= 1
        if held and not self.backlog:
            self.receiver.drained()

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        if end:
            self.finish(block)

    def send_data(self, data: bytes) -> None:
        self._unread += 1
        self._on_message(data[5:])  # always one whole message, uncompressed

    def try_send_whole(self, block: bytes, data: bytes, trailers: bytes) -> bool:
        return False

    def send_parts(self, parts: list[Buffer]) -> None:
        self.send_data(b"".join(parts))

    def finish(self, trailers: bytes) -> None:
        self._on_end(dict(hpack.Decoder().decode(trailers, raw=True)))

    def end(self) -> None:
        self._on_end({})

    def credit(self, size: int) -> None: ...

    def end_turn(self) -> None: ...

    def reserve(self, size: int, again: Callable[[], None]) -> bool:
        return True

    def settle(self, reserved: int, size: int) -> bool:
        return True

    def give_back(self, size: int) -> None: ...


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

    def future(self, request: Any, **options: Any) -> "Future[Any]":
        """Begins it; what comes of it is the future's result or exception. Cancelling the future cancels the call."""

        async def answer() -> Any:
            return (await self._answer(request, **options))[0]

        return self._host.submit(answer())

    async def _answer(
        self,
        request: Any,
        timeout: float | None = None,  # noqa: ASYNC109 (grpc's word)
        metadata: Metadata | None = None,
        **_: Any,
    ) -> tuple[Any, InMemoryCall]:
        messages, end = await _asked(self._server, self._headers(timeout, metadata), self._frame(request), timeout)
        call = _ended_well(end)
        return self._deserialize(messages[0]), call


async def _asked(server: GrpcServer, headers: Headers, frame: bytes, limit_s: float | None) -> tuple[list[bytes], Headers]:
    messages: list[bytes] = []
    ended: asyncio.Future[Headers] = asyncio.get_running_loop().create_future()

    def end(fields: Headers) -> None:
        if not ended.done():
            ended.set_result(fields)

    stream = _StreamInMemory(headers, messages.append, end)
    server.open(stream)
    stream.receiver.take(frame, True)
    try:
        async with asyncio.timeout(limit_s):
            return messages, await ended
    except TimeoutError:
        stream.receiver.reset()
        raise GrpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
    except asyncio.CancelledError:
        stream.receiver.reset()
        raise


class _StreamStream(_Calls):
    def __call__(
        self, requests: Iterable[Any], timeout: float | None = None, metadata: Metadata | None = None, **_: Any
    ) -> Iterator[Any]:
        """Requests are read in a thread, as grpc does, until the call is over.

        Raises: GrpcError, after the answers that came before it.
        """
        arrived: queue.SimpleQueue[bytes | Headers | BaseException] = queue.SimpleQueue()
        until_s = None if timeout is None else time.monotonic() + timeout
        stream = _StreamInMemory(self._headers(timeout, metadata), arrived.put, arrived.put)
        over = threading.Event()

        async def begin() -> None:
            self._server.open(stream)

        def feed() -> None:
            try:
                for request in requests:
                    if over.is_set():
                        return
                    self._soon(stream.receiver.take, self._frame(request), False)
            except BaseException as exc:  # the caller's own
                self._soon(stream.receiver.reset)
                arrived.put(exc)
            else:
                self._soon(stream.receiver.take, b"", True)

        self._host.run(begin())
        threading.Thread(target=feed, daemon=True).start()
        return self._answers(stream, arrived, until_s, over)

    def _answers(
        self,
        stream: _StreamInMemory,
        arrived: "queue.SimpleQueue[bytes | Headers | BaseException]",
        until_s: float | None,
        over: threading.Event,
    ) -> Iterator[Any]:
        ended = False
        try:
            while True:
                try:
                    item = arrived.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
                except queue.Empty:
                    raise GrpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
                if isinstance(item, bytes):
                    self._soon(stream.read)
                    yield self._deserialize(item)
                    continue
                ended = True
                if isinstance(item, BaseException):
                    raise item
                _ended_well(item)
                return
        finally:
            over.set()
            if not ended:  # the caller has seen enough
                self._soon(stream.receiver.reset)

    def _soon(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the call with it
            self._host.loop.call_soon_threadsafe(function, *arguments)


def _ended_well(end: Headers) -> InMemoryCall:
    """The call that ended so. Raises: GrpcError, if it failed."""
    code = _CODES.get(int(end.get(b"grpc-status", b"2")), grpc.StatusCode.UNKNOWN)
    others = tuple((name.decode(), value.decode()) for name, value in end.items() if name not in _OF_THE_CALL)
    kind = InMemoryCall if code is grpc.StatusCode.OK else GrpcError
    call = kind(code, unquote(end.get(b"grpc-message", b"").decode()), others)
    if isinstance(call, GrpcError):
        raise call
    return call
