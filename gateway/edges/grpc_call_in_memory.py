"""One gRPC call without sockets: the stream that the listener answers on, and what its caller holds of it, as grpc's own."""

import asyncio
import contextlib
import queue
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import unquote

import grpc
import hpack

from gateway.edges.grpc_server import GrpcServer
from gateway.wire.http2_headers import Headers
from gateway.wire.http2_receiver import NOBODY, Receiver
from gateway.wire.tensors import Buffer

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_OF_THE_CALL: Final = (b":status", b"content-type", b"grpc-accept-encoding", b"grpc-status", b"grpc-message")
_UNREAD: Final = 8  # messages of a call that its caller has not taken, before what sends them waits

T = TypeVar("T")
Pairs = tuple[Any, ...]  # of name and value


class InMemoryCall(grpc.Call):
    """A call that has ended, with what grpc's own calls tell of it."""

    def __init__(self, code: grpc.StatusCode, details: str, initial: Pairs = (), trailing: Pairs = ()) -> None:
        """initial, trailing: metadata."""
        self._code = code
        self._details = details
        self._initial = initial
        self._trailing = trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def initial_metadata(self) -> Pairs:
        return self._initial

    def trailing_metadata(self) -> Pairs:
        return self._trailing

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None:  # type: ignore[override]  # grpc's own give it where there is no deadline
        return None

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


class GrpcError(InMemoryCall, grpc.RpcError):
    """One that failed."""

    def __str__(self) -> str:
        return f"{self._code.name}: {self._details}"


def deadline_exceeded() -> GrpcError:
    return GrpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def _cancelled(details: str = "Locally cancelled by application!") -> GrpcError:
    return GrpcError(grpc.StatusCode.CANCELLED, details)


class StreamInMemory:
    """One call's stream: `grpc_call.CallStream`. What comes is handed on: messages, then the call as it ended.

    Its window is of _UNREAD messages.
    """

    def __init__(self, headers: Headers, on_message: Callable[[bytes], None], on_end: Callable[[InMemoryCall], object]) -> None:
        self.headers = headers
        self.receiver: Receiver = NOBODY
        self.began: Future[Pairs] = Future()  # the answer's first headers; none: it has ended without
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
        else:
            _settled(self.began, _pairs(_fields(block)))

    def send_data(self, data: bytes) -> None:
        self._unread += 1
        self._on_message(data[5:])  # always one whole message, uncompressed

    def try_send_whole(self, block: bytes, data: bytes, trailers: bytes) -> bool:
        return False

    def send_parts(self, parts: list[Buffer]) -> None:
        self.send_data(b"".join(parts))

    def finish(self, trailers: bytes) -> None:
        self._finish(_fields(trailers))

    def end(self) -> None:
        self._finish({})

    def _finish(self, fields: Headers) -> None:
        _settled(self.began, ())
        self._on_end(_ended(fields, self.began.result()))

    def credit(self, size: int) -> None: ...

    def end_turn(self) -> None: ...

    def reserve(self, size: int, again: Callable[[], None]) -> bool:
        return True

    def settle(self, reserved: int, size: int) -> bool:
        return True

    def give_back(self, size: int) -> None: ...


class _Underway(grpc.Call):
    """A call that may still run. What it is asked of its end waits for that."""

    def __init__(self, work: "Future[Any]", timeout: float | None) -> None:
        self._work = work
        self._until_s = None if timeout is None else time.monotonic() + timeout

    @abstractmethod
    def _end(self) -> InMemoryCall: ...

    def code(self) -> grpc.StatusCode:
        return self._end().code()

    def details(self) -> str:
        return self._end().details()

    def initial_metadata(self) -> Pairs:
        return self._end().initial_metadata()

    def trailing_metadata(self) -> Pairs:
        return self._end().trailing_metadata()

    def is_active(self) -> bool:
        return not self._work.done()

    def time_remaining(self) -> float | None:  # type: ignore[override]  # likewise
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def add_callback(self, callback: Callable[[], None]) -> bool:
        if self._work.done():
            return False
        self._work.add_done_callback(lambda _: callback())
        return True


class InMemoryFuture(_Underway, grpc.Future):  # type: ignore[type-arg]  # is none, but to grpc-stubs
    """The answer to a unary call."""

    _work: "Future[tuple[Any, InMemoryCall]]"

    def _end(self) -> InMemoryCall:
        try:
            return self._work.result()[1]
        except GrpcError as exc:
            return exc
        except CancelledError:
            return _cancelled()

    def cancel(self) -> bool:
        return self._work.cancel()

    def cancelled(self) -> bool:
        return self._work.cancelled()

    def running(self) -> bool:
        return not self._work.done()

    def done(self) -> bool:
        return self._work.done()

    def result(self, timeout: float | None = None) -> Any:
        """Raises: GrpcError; grpc.FutureTimeoutError; grpc.FutureCancelledError."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._work.result()[0]

    def exception(self, timeout: float | None = None) -> Any:
        try:
            return self._work.exception(timeout)
        except TimeoutError:
            raise grpc.FutureTimeoutError from None
        except CancelledError:
            raise grpc.FutureCancelledError from None

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        error = self.exception(timeout)
        return None if error is None else error.__traceback__

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        self._work.add_done_callback(lambda _: fn(self))


class InMemoryStream(_Underway):
    """The answers of a call that streams, as an iterator; dropped, it is cancelled.

    Raises: GrpcError, after the answers that came before it.
    """

    def __init__(
        self, host: object, exchange: "StreamExchange", deserialize: Callable[[bytes], Any], timeout: float | None
    ) -> None:
        super().__init__(exchange.ended, timeout)
        self._host = host  # whoever has this may read on
        self._exchange = exchange
        self._deserialize = deserialize
        dropped = weakref.finalize(self, exchange.end, _cancelled("Cancelled upon garbage collection!"))
        # It would hold the error, and an error's traceback this.
        exchange.ended.add_done_callback(lambda _: dropped.detach())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        item = self._exchange.next()
        if self._work.done() and self.code() is grpc.StatusCode.CANCELLED:  # what came before is not read, either
            item = self._work.result()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            raise StopIteration
        return self._deserialize(item)

    def cancel(self) -> bool:
        return self._exchange.end(_cancelled())

    def initial_metadata(self) -> Pairs:
        return self._exchange.stream.began.result()

    def _end(self) -> InMemoryCall:
        return self._exchange.ended.result()


class StreamExchange:
    """What the loop, the thread that feeds it and the caller share of a streaming call.

    It does not hold the caller's object, so that this is collected once it is dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, server: GrpcServer, headers: Headers) -> None:
        self.ended: Future[InMemoryCall] = Future()
        self._arrived: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()  # the last is the end; None: well
        self.stream = StreamInMemory(headers, self._arrived.put, self.end)
        self._loop = loop
        self._server = server
        self._expiry: asyncio.TimerHandle | None = None

    async def begin(self, timeout: float | None) -> None:  # noqa: ASYNC109 (grpc's word)
        self._server.open_alone(self.stream)
        if timeout is not None:
            self._expiry = self._loop.call_later(timeout, self.end, deadline_exceeded())

    def feed(self, requests: Iterable[Any], frame: Callable[[Any], bytes]) -> None:
        try:
            for request in requests:
                if self.ended.done():
                    return
                self._soon(self.stream.receiver.take, frame(request), False)
        except BaseException as exc:  # the caller's own
            self.end(GrpcError(grpc.StatusCode.UNKNOWN, "Exception iterating requests!"), exc)
        else:
            self._soon(self.stream.receiver.take, b"", True)

    def next(self) -> bytes | BaseException | None:
        """Wait for a message, or how it ended, which comes again and again."""
        item = self._arrived.get()
        if isinstance(item, bytes):
            self._soon(self.stream.read)
        else:
            self._arrived.put(item)
        return item

    def end(self, call: InMemoryCall, raised: BaseException | None = None) -> bool:
        """From any thread. False: it has ended before. raised: what the caller gets to see in place of the call."""
        if not _settled(self.ended, call):
            return False
        _settled(self.stream.began, ())
        self._arrived.put(raised or (call if isinstance(call, GrpcError) else None))
        self._soon(self._leave)
        return True

    def _leave(self) -> None:
        self._server.left(self.stream)
        self.stream.receiver.reset()
        if self._expiry is not None:
            self._expiry.cancel()

    def _soon(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the call with it
            self._loop.call_soon_threadsafe(function, *arguments)


def _settled(future: "Future[T]", value: T) -> bool:
    """Settle it, and tell whether this was the first to do so."""
    try:
        future.set_result(value)
    except InvalidStateError:
        return False
    return True


def _fields(block: bytes) -> Headers:
    return dict(hpack.Decoder().decode(block, raw=True))


def _pairs(fields: Headers) -> Pairs:
    return tuple((name.decode(), value.decode()) for name, value in fields.items() if name not in _OF_THE_CALL)


def _ended(fields: Headers, initial: Pairs) -> InMemoryCall:
    """The call that ended so; a GrpcError, if it failed."""
    code = _CODES.get(int(fields.get(b"grpc-status", b"2")), grpc.StatusCode.UNKNOWN)
    kind = InMemoryCall if code is grpc.StatusCode.OK else GrpcError
    return kind(code, unquote(fields.get(b"grpc-message", b"").decode()), initial, _pairs(fields))
