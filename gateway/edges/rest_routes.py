"""Paths to calls on the repository to answers: what the HTTP listener serves. A path is parsed once and remembered."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qs, quote, unquote

import msgspec
import orjson

from gateway.config import Limits
from gateway.engine.descriptions import describe_welcome
from gateway.engine.inference import Endpoint, Endpoints, Inference, StreamedInference
from gateway.engine.repository import Repository
from gateway.errors import GatewayError, InternalError, InvalidArgument, NotFound, NotReady, TooLarge, Unavailable, Unsupported
from gateway.protocols.generate import GenerateCodec
from gateway.protocols.openapi import describe_api
from gateway.protocols.rest import ModelCodec, ReadRegion, header_length
from gateway.protocols.tensors import LONG_BYTES, LONG_JSON_BYTES, TakesLong
from gateway.types import InferRequest
from gateway.wire.exchange import JSON, Exchange
from gateway.wire.http_errors import STATUS, error_body
from gateway.wire.tensors import Buffer

_BINARY: Final = b"application/octet-stream"
_EVENTS: Final = b"text/event-stream; charset=utf-8"
_NOT_KEPT: Final = b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"  # nor by proxies: nginx would gather the events
_PATHS_REMEMBERED: Final = 4096  # a client that invents paths must not fill the memory
_LONGEST_REMEMBERED: Final = 512  # bytes; 4096 of 30 kB held 254 MB

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
Action = Callable[[Exchange, "MatchedPath"], None]

log = logging.getLogger(__name__)


class MatchedPath(NamedTuple):
    """What a path means. name: of the model or region, unquoted; empty where the path has none."""

    methods: dict[bytes, Action]
    name: str = ""
    version: str = ""


class _ModelControl(msgspec.Struct):
    parameters: dict[str, Any] = {}


class _Index(msgspec.Struct):
    ready: bool = False


class _Register(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


class RestRoutes:
    """The handler of an `HttpServer`."""

    def __init__(
        self, repository: Repository, limits: Limits, *, expose_metrics: Callable[[], tuple[str, bytes]] | None = None
    ) -> None:
        """expose_metrics: content type and body of /metrics; None: there is no such path."""
        self._repository = repository
        self._expose_metrics = expose_metrics
        self._routes: dict[bytes, MatchedPath] = {}
        self._endpoints = Endpoints(
            repository,
            "rest",
            lambda served: ModelCodec(
                served.name, served.version, served.spec, served.ragged, limits.json_depth, in_haste=True
            ),
        )
        self._generate_endpoints = Endpoints(
            repository,
            "rest",
            lambda served: GenerateCodec(served.name, served.version, served.spec, served.ragged, limits.json_depth),
        )
        self._api_generation = -1
        self._api_json = b""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server_actions: dict[str, dict[bytes, Action]] = {
            "": _get(self._server_metadata),
            "models": _get(self._models),
            "health/live": _get(self._live),
            "health/ready": _get(self._ready),
            "models/stats": _get(self._statistics),
            "repository/index": _post(self._index),
            "systemsharedmemory/status": _get(self._region_status),
            "systemsharedmemory/unregister": _post(self._unregister),
            "cudasharedmemory/status": _get(self._cuda_status),
            "cudasharedmemory/unregister": _post(self._cuda_unregister),
            "logging": _get(self._unsupported) | _post(self._unsupported),
            "trace/setting": _get(self._unsupported) | _post(self._unsupported),
        }
        self._model_actions: dict[str, dict[bytes, Action]] = {
            "": _get(self._model_metadata),
            "ready": _get(self._model_ready),
            "config": _get(self._model_config),
            "stats": _get(self._statistics),
            "route": _get(self._explain),
            "infer": _post(self._infer),
            "generate": _post(self._generate),
            "generate_stream": _post(self._generate_stream),
            "trace/setting": _get(self._unsupported) | _post(self._unsupported),
        }
        self._control_actions: dict[str, dict[bytes, Action]] = {"load": _post(self._load), "unload": _post(self._unload)}
        self._region_actions: dict[str, dict[str, dict[bytes, Action]]] = {
            "systemsharedmemory": {
                "status": _get(self._region_status),
                "register": _post(self._register),
                "unregister": _post(self._unregister),
            },
            "cudasharedmemory": {
                "status": _get(self._cuda_region_status),
                "register": _post(self._cuda_register),
                "unregister": _post(self._cuda_unregister),
            },
        }

    def __call__(self, exchange: Exchange) -> None:
        """Answer an exchange, now or later."""
        route = self._routes.get(exchange.path)
        try:
            if route is None:
                route = self._remember(exchange.path)
            action = route.methods.get(exchange.method)
            if action is None:
                allowed = b"Allow: " + b", ".join(route.methods) + b"\r\n"
                methods = " or ".join(method.decode() for method in route.methods)
                exchange.respond(405, error_body(f"Method Not Allowed: expected {methods}"), headers=allowed)
            else:
                action(exchange, route)
        except GatewayError as exc:
            respond_error(exchange, exc)

    # paths

    def _remember(self, path: bytes) -> MatchedPath:
        route = self._parse(path)
        if len(path) <= _LONGEST_REMEMBERED:
            if len(self._routes) >= _PATHS_REMEMBERED:
                self._routes.clear()
            self._routes[path] = route
        return route

    def _parse(self, path: bytes) -> MatchedPath:
        """Raises: NotFound."""
        if path == b"*":
            return MatchedPath({b"OPTIONS": self._options})
        # Split before unquoting: a quoted slash belongs to a name.
        try:
            parts = [unquote(part, errors="strict") for part in path.decode("ascii").split("/")[1:]]
        except UnicodeDecodeError:
            raise InvalidArgument("the path is not percent-quoted UTF-8") from None
        match parts:
            case [""]:
                return MatchedPath(_get(self._welcome))
            case ["openapi.json"]:
                return MatchedPath(_get(self._api))
            case ["ping"]:
                return MatchedPath(_get(self._ping))
            case ["metrics"] if self._expose_metrics is not None:
                return MatchedPath(_get(self._metrics))
            case ["v2"] | ["v2", ""]:
                return MatchedPath(self._server_actions[""])
            case ["v2", "models", ""]:
                return MatchedPath(self._server_actions["models"])
            case ["v2", "models", name, "versions", version, *rest] if name and version:
                if not _is_version(version):
                    self._repository.model(name, version)  # which is not found
                actions, key = self._model_actions, "/".join(rest)
                if key in actions and (key or not rest):
                    return MatchedPath(actions[key], name, version)
            case ["v2", "models", name, *rest] if name and (name != "stats" or rest):
                actions, key = self._model_actions, "/".join(rest)
                if key in actions and (key or not rest):
                    return MatchedPath(actions[key], name)
            case ["v2", "repository", "models", name, verb] if name and verb in self._control_actions:
                return MatchedPath(self._control_actions[verb], name)
            case ["v2", kind, "region", name, verb] if name and verb in self._region_actions.get(kind, ()):
                return MatchedPath(self._region_actions[kind][verb], name)
            case ["v2", *rest] if (key := "/".join(rest)) in self._server_actions:
                return MatchedPath(self._server_actions[key])
        raise NotFound("Not Found: no such path; GET / says what is here")

    # the server

    def _server_metadata(self, exchange: Exchange, route: MatchedPath) -> None:
        _respond_json(exchange, self._repository.server_metadata())

    def _options(self, exchange: Exchange, route: MatchedPath) -> None:
        exchange.respond(200, headers=b"Allow: GET, HEAD, POST, OPTIONS\r\n")

    def _welcome(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol: for whoever looks at the address in a browser."""
        metrics = self._expose_metrics is not None
        _respond_json(exchange, describe_welcome(self._repository.models(), metrics=metrics), indent=True)

    def _models(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol."""
        _respond_json(exchange, {"models": self._repository.models()}, indent=True)

    def _api(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol: all of the paths, and what each model takes and gives."""
        repository = self._repository
        if repository.generation != self._api_generation:
            self._api_generation = repository.generation
            models = [(served.name, served.version, served.spec) for served in repository.ready_models()]
            self._api_json = orjson.dumps(describe_api(models, metrics=self._expose_metrics is not None))
        exchange.respond(200, self._api_json)

    def _live(self, exchange: Exchange, route: MatchedPath) -> None:
        live = self._repository.live()
        _respond_json(exchange, {"live": live}, 200 if live else 503)

    def _ready(self, exchange: Exchange, route: MatchedPath) -> None:
        ready = self._repository.ready()
        _respond_json(exchange, {"ready": ready}, 200 if ready else 503)

    def _ping(self, exchange: Exchange, route: MatchedPath) -> None:
        exchange.respond(200 if self._repository.ready() else 503)

    def _metrics(self, exchange: Exchange, route: MatchedPath) -> None:
        assert self._expose_metrics is not None
        content_type, body = self._expose_metrics()
        exchange.respond(200, body, content_type.encode())

    def _unsupported(self, exchange: Exchange, route: MatchedPath) -> None:
        raise Unsupported(f"{exchange.path.decode()} is not offered by this server")

    # models

    def _model_metadata(self, exchange: Exchange, route: MatchedPath) -> None:
        _respond_json(exchange, self._repository.model_metadata(route.name, route.version))

    def _model_config(self, exchange: Exchange, route: MatchedPath) -> None:
        _respond_json(exchange, self._repository.model_config(route.name, route.version))

    def _model_ready(self, exchange: Exchange, route: MatchedPath) -> None:
        try:
            ready = self._repository.model_ready(route.name, route.version)
        except NotFound:
            ready = False
        if ready:
            missing = self._repository.missing(route.name, route.version)
            _respond_json(exchange, {"name": route.name, "ready": True, **({"missing": missing} if missing else {})})
        else:
            exchange.respond(400, error_body("Model version not ready"))

    def _statistics(self, exchange: Exchange, route: MatchedPath) -> None:
        _respond_json(exchange, self._repository.statistics(route.name, route.version))

    def _explain(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol: where a request of ?rows= rows would go now, and why."""
        rows = parse_qs(exchange.query.decode("latin-1")).get("rows", ["1"])[-1]
        if not _is_version(rows) or len(rows) > 7 or int(rows) < 1:
            raise InvalidArgument(f"rows: got {rows!r}, expected a number from 1")
        _respond_json(exchange, self._repository.explain(route.name, route.version, int(rows)))

    def _index(self, exchange: Exchange, route: MatchedPath) -> None:
        _respond_json(exchange, self._repository.index(_read_json(exchange.body, _Index).ready))

    def _load(self, exchange: Exchange, route: MatchedPath) -> None:
        control = _read_json(exchange.body, _ModelControl)
        self._run(exchange, self._repository.load(route.name, control.parameters))

    def _unload(self, exchange: Exchange, route: MatchedPath) -> None:
        dependents = _read_json(exchange.body, _ModelControl).parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument(f"parameter 'unload_dependents': got {dependents!r}, expected true or false")
        self._run(exchange, self._repository.unload(route.name, dependents))

    def _run(self, exchange: Exchange, change: Awaitable[None]) -> None:
        """Answer once a change of the repository is done. It goes on if the client goes away."""

        async def change_and_answer() -> None:
            try:
                await change
            except GatewayError as exc:
                respond_error(exchange, exc)
            except asyncio.CancelledError:  # the change was: nobody cancels this
                respond_error(exchange, NotReady("the server is shutting down", retry_after_s=1.0))
            except Exception:  # a fault of ours must still be an answer
                log.exception("%s failed", exchange.path.decode())
                respond_error(exchange, InternalError("internal error"))
            else:
                exchange.respond(200)

        task = asyncio.get_running_loop().create_task(change_and_answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # shared memory

    def _region_status(self, exchange: Exchange, route: MatchedPath) -> None:
        _respond_json(exchange, self._repository.regions.status(route.name))

    def _register(self, exchange: Exchange, route: MatchedPath) -> None:
        region = _read_json(exchange.body, _Register)
        if region.byte_size < 0 or region.offset < 0:
            raise InvalidArgument(
                f"shared memory region '{route.name}': got offset {region.offset} and byte_size {region.byte_size}, expected "
                "numbers from 0"
            )
        self._repository.regions.register(route.name, region.key, region.offset, region.byte_size)
        exchange.respond(200)

    def _unregister(self, exchange: Exchange, route: MatchedPath) -> None:
        self._repository.regions.unregister(route.name)
        exchange.respond(200)

    def _cuda_status(self, exchange: Exchange, route: MatchedPath) -> None:
        _respond_json(exchange, [])

    def _cuda_region_status(self, exchange: Exchange, route: MatchedPath) -> None:
        raise NotFound(f"Unable to find cuda shared memory region: '{route.name}'")

    def _cuda_register(self, exchange: Exchange, route: MatchedPath) -> None:
        raise Unsupported(f"cuda shared memory region '{route.name}': only system shared memory is offered by this server")

    def _cuda_unregister(self, exchange: Exchange, route: MatchedPath) -> None:
        exchange.respond(200)  # there can be none

    # inference

    def _infer(self, exchange: Exchange, route: MatchedPath) -> None:
        inference = _RestInference(self._endpoints, exchange, route)
        exchange.on_disconnect = inference.cancel
        inference.start()

    def _generate(self, exchange: Exchange, route: MatchedPath) -> None:
        inference = _Generate(self._generate_endpoints, exchange, route)
        exchange.on_disconnect = inference.cancel
        inference.start()

    def _generate_stream(self, exchange: Exchange, route: MatchedPath) -> None:
        inference = _GenerateStream(self._generate_endpoints, exchange, route)
        exchange.on_disconnect = inference.cancel
        exchange.on_drained = inference.drained
        inference.start()


class _RestInference(Inference[ModelCodec, tuple[list[Buffer] | Iterator[bytes], int | None]]):
    """An inference that an exchange asks for."""

    __slots__ = ("_exchange", "_route")

    def __init__(self, endpoints: Endpoints[ModelCodec], exchange: Exchange, route: MatchedPath) -> None:
        super().__init__(endpoints, exchange.arrival_ns)
        self._exchange = exchange
        self._route = route

    def find(self, endpoints: Endpoints[ModelCodec]) -> Endpoint[ModelCodec]:
        return endpoints.find(self._route.name, self._route.version)

    def decode(self, codec: ModelCodec, read_region: ReadRegion) -> InferRequest | Callable[[], None]:
        exchange = self._exchange
        body = exchange.body
        header_bytes = header_length(exchange.headers.get(b"inference-header-content-length"), len(body))
        if len(body) > LONG_JSON_BYTES and (header_bytes is None or header_bytes > LONG_JSON_BYTES):
            return self._endpoints.repository.long_bodies.infer(codec, body, header_bytes, exchange.arrival_ns, self.decoded)
        try:
            return codec.decode(body, header_bytes, exchange.arrival_ns, read_region)
        except TakesLong:
            decode = partial(codec.at_leisure().decode, body, header_bytes, exchange.arrival_ns)
            return self._endpoints.repository.long_bodies.on_thread(decode, self.decoded)

    def answer(self, reply: tuple[list[Buffer] | Iterator[bytes], int | None]) -> None:
        parts, json_bytes = reply
        exchange = self._exchange
        exchange.on_disconnect = None
        if not isinstance(parts, list):
            if exchange.encoding:
                _respond_whole(exchange, parts)
            else:
                _Slices(exchange, parts).write()
            return
        if json_bytes is None:
            exchange.respond(200, parts)
        else:
            exchange.respond(200, parts, _BINARY, b"Inference-Header-Content-Length: %d\r\n" % json_bytes)

    def refuse(self, error: GatewayError) -> None:
        self._exchange.on_disconnect = None
        respond_error(self._exchange, error)


class _Slices:
    """Writes a long answer slice by slice, each when the one before has left: it holds neither the loop nor memory for all."""

    def __init__(self, exchange: Exchange, slices: Iterator[bytes]) -> None:
        self._exchange = exchange
        self._slices = slices
        exchange.begin(200, JSON)
        exchange.on_drained = self.write
        exchange.on_disconnect = self._leave

    def write(self) -> None:
        exchange = self._exchange
        try:
            piece = next(self._slices, None)
        except BaseException:
            exchange.failed()
            return
        if piece is None:
            exchange.on_drained = exchange.on_disconnect = None
            exchange.finish()
            return
        exchange.write(piece)
        if not exchange.backlog:
            asyncio.get_running_loop().call_soon(self.write)  # others first

    def _leave(self) -> None:
        self._slices = iter(())


def _respond_whole(exchange: Exchange, slices: Iterator[bytes]) -> None:
    """Answer with all slices at once, as they are to be compressed: made on a thread, which others take turns with."""

    def made(done: "asyncio.Future[list[bytes]]") -> None:
        try:
            exchange.respond(200, done.result())
        except BaseException:
            exchange.failed()

    asyncio.get_running_loop().run_in_executor(None, list, slices).add_done_callback(made)


class _Generating(StreamedInference[GenerateCodec, bytes]):
    """An inference by the generate extension that an exchange asks for."""

    __slots__ = ("_exchange", "_route")

    def __init__(self, endpoints: Endpoints[GenerateCodec], exchange: Exchange, route: MatchedPath) -> None:
        super().__init__(endpoints, exchange.arrival_ns)
        self._exchange = exchange
        self._route = route

    def find(self, endpoints: Endpoints[GenerateCodec]) -> Endpoint[GenerateCodec]:
        return endpoints.find(self._route.name, self._route.version)

    def decode(self, codec: GenerateCodec, read_region: ReadRegion) -> InferRequest | Callable[[], None]:
        exchange = self._exchange
        if len(exchange.body) > LONG_JSON_BYTES:
            return self._endpoints.repository.long_bodies.generate(codec, exchange.body, exchange.arrival_ns, self.decoded)
        return codec.decode(exchange.body, exchange.arrival_ns)

    def refuse(self, error: GatewayError) -> None:
        respond_error(self._ended(), error)

    def _ended(self) -> Exchange:
        """The exchange, which need not tell this any more."""
        self._exchange.on_disconnect = self._exchange.on_drained = None
        return self._exchange


class _Generate(_Generating):
    """One JSON object; of a decoupled model that of its one part."""

    __slots__ = ("_reply",)

    def __init__(self, endpoints: Endpoints[GenerateCodec], exchange: Exchange, route: MatchedPath) -> None:
        super().__init__(endpoints, exchange, route)
        self._reply: bytes | None = None

    def answer(self, reply: bytes) -> None:
        self._ended().respond(200, reply)

    def part(self, reply: bytes) -> bool:
        if self._reply is not None:
            raise self._not_one("more than one")
        self._reply = reply
        return True

    def finish(self) -> None:
        if self._reply is None:
            raise self._not_one("none")
        self.answer(self._reply)

    def _not_one(self, parts: str) -> InvalidArgument:
        return InvalidArgument(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
            f"of responses: model '{self._route.name}' gave {parts}; ask by POST "
            f"/v2/models/{quote(self._route.name, safe='')}/generate_stream"
        )


class _GenerateStream(_Generating):
    """A server-sent event for each part, and for an error behind them; one for the answer of a model that gives it whole."""

    __slots__ = ("_begun",)

    def __init__(self, endpoints: Endpoints[GenerateCodec], exchange: Exchange, route: MatchedPath) -> None:
        super().__init__(endpoints, exchange, route)
        self._begun = False

    def answer(self, reply: bytes) -> None:
        exchange = self._ended()
        exchange.compress = False  # as where there are more of them
        exchange.respond(200, _event(reply), _EVENTS, _NOT_KEPT)

    def part(self, reply: bytes) -> bool:
        self._begin()
        self._exchange.write(_event(reply))
        return not self._exchange.backlog

    def finish(self) -> None:
        self._begin()
        self._ended().finish()

    def refuse(self, error: GatewayError) -> None:
        if not self._begun:
            super().refuse(error)
            return
        exchange = self._ended()
        exchange.write(_event(error_body(error.words)))
        exchange.finish()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._exchange.begin(200, _EVENTS, _NOT_KEPT)


def _event(data: bytes) -> bytes:
    """A server-sent event. data: JSON without line ends."""
    return b"data: %b\n\n" % data


def respond_error(exchange: Exchange, error: GatewayError) -> None:
    """Answer with an error; one that is safe to retry says when."""
    headers = b""
    if isinstance(error, Unavailable):
        headers = b"Retry-After: %d\r\n" % max(1, math.ceil(error.retry_after_s or 1.0))
    exchange.respond(STATUS[error.code], error_body(error.words), JSON, headers)


def _respond_json(exchange: Exchange, value: object, status: int = 200, *, indent: bool = False) -> None:
    # As in Triton: tritonclient's asyncio client accepts gzip in every call, but decompresses only inference answers.
    exchange.compress = False
    exchange.respond(status, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE if indent else None))


def _get(action: Action) -> dict[bytes, Action]:
    return {b"GET": action, b"HEAD": action}


def _post(action: Action) -> dict[bytes, Action]:
    return {b"POST": action}


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _read_json(body: Buffer, kind: type[_Struct]) -> _Struct:
    """Read a small JSON object; an empty body is an empty one. Raises: InvalidArgument, TooLarge."""
    if len(body) > LONG_BYTES:
        raise TooLarge(f"request body of {len(body)} bytes: expected at most {LONG_BYTES} bytes of what is no inference")
    try:
        return msgspec.json.decode(bytes(body) or b"{}", type=kind)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"failed to parse the request JSON: {exc}") from exc
