"""What is no inference over HTTP: small JSON bodies, and answers that come once something is done."""

import asyncio
import codecs
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
import orjson

from gateway.edges.rest_inference import respond_error
from gateway.errors import Code, GatewayError, InternalError, InvalidArgument, NotReady, TooLarge
from gateway.protocols.tensors import LONG_BYTES
from gateway.wire.exchange import JSON, Exchange
from gateway.wire.tensors import Buffer

_NONE: Final[Mapping[Code, int]] = MappingProxyType({})

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Made = TypeVar("_Made")

log = logging.getLogger(__name__)


def read_json(body: Buffer, kind: type[_Struct]) -> _Struct:
    """Read a small JSON object; an empty body is an empty one. Raises: InvalidArgument, TooLarge."""
    if len(body) > LONG_BYTES:
        raise TooLarge(f"request body of {len(body)} bytes: expected at most {LONG_BYTES} bytes of what is no inference")
    try:
        return msgspec.json.decode(bytes(body).removeprefix(codecs.BOM_UTF8) or b"{}", type=kind)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"failed to parse the request JSON: {exc}") from exc


def respond_json(exchange: Exchange, value: object, status: int = 200, *, indent: bool = False, headers: bytes = b"") -> None:
    """Answer with what is no inference."""
    # As in Triton: tritonclient's asyncio client accepts gzip in every call, but decompresses only inference answers.
    exchange.compress = False
    body = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE if indent else None)
    exchange.respond(status, body, JSON, headers)


class LaterAnswers:
    """Of one listener. What is waited for goes on if the client goes away. On the event loop's thread."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def made(self, exchange: Exchange, making: Awaitable[_Made], told: Callable[[_Made], None]) -> None:
        """Answer once something is made. told: answers with it."""

        async def answer() -> None:
            try:
                value = await making
            except Exception:  # a fault of ours must still be an answer
                log.exception("%s could not be told", exchange.path.decode())
                respond_error(exchange, InternalError("internal error"))
            else:
                told(value)

        self._keep(answer())

    def changed(self, exchange: Exchange, change: Awaitable[None], statuses: Mapping[Code, int] = _NONE) -> None:
        """Answer once a change of the repository is done. statuses: of errors that are told by others than the usual ones."""

        async def answer() -> None:
            try:
                await change
            except GatewayError as exc:
                respond_error(exchange, exc, statuses.get(exc.code))
            except asyncio.CancelledError:  # the change was: nobody cancels this
                respond_error(exchange, NotReady("the server is shutting down", retry_after_s=1.0))
            except Exception:  # a fault of ours must still be an answer
                log.exception("%s failed", exchange.path.decode())
                respond_error(exchange, InternalError("internal error"))
            else:
                exchange.respond(200)

        self._keep(answer())

    def _keep(self, answer: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
