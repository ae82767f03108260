"""Paths to calls on the repository to answers: what the HTTP listener serves. A path is parsed once and remembered."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote

import msgspec
import orjson

from gateway.access.rules import ADMIN, INFER, METRICS, MODELS, OPEN, STATUS
from gateway.config import Limits
from gateway.edges.container_routes import ContainerRoutes
from gateway.edges.control import LaterAnswers, read_json, respond_json
from gateway.edges.multi_model_routes import MultiModelRoutes
from gateway.edges.rest_inference import Generate, GenerateStream, RestInference, respond_error
from gateway.edges.status_page import HTML, page, prefers_html
from gateway.engine.descriptions import describe_welcome
from gateway.engine.inference import Endpoints
from gateway.engine.repository import Repository
from gateway.engine.status import Status
from gateway.errors import Code, GatewayError, InvalidArgument, NotFound, Unsupported
from gateway.protocols.generate import GenerateCodec
from gateway.protocols.rest import RestCodec
from gateway.wire.exchange import JSON, Exchange
from gateway.wire.http_errors import error_body

if TYPE_CHECKING:
    from gateway.access.doors import Doors
    from gateway.engine.multi_model import MultiModel

_MSGPACK: Final = b"application/msgpack"
_PATHS_REMEMBERED: Final = 4096  # a client that invents paths must not fill the memory
_LONGEST_REMEMBERED: Final = 512  # bytes; 4096 of 30 kB held 254 MB

Action = Callable[[Exchange, "MatchedPath"], None]


class MatchedPath(msgspec.Struct, frozen=True):
    """What a path means. name: of the model or region, unquoted; empty where the path has none. needs: of a key's scopes."""

    methods: Mapping[bytes, Action]
    name: str = ""
    version: str = ""
    needs: str = INFER


# Of keys, where they are asked for; what is not listed needs INFER.
_SERVER_NEEDS: Final = {
    "models": MODELS, "models/stats": MODELS, "repository/index": MODELS, "status": STATUS, "health/live": OPEN,
    "health/ready": OPEN, "systemsharedmemory/status": ADMIN, "systemsharedmemory/unregister": ADMIN,
    "cudasharedmemory/status": ADMIN, "cudasharedmemory/unregister": ADMIN, "logging": ADMIN, "trace/setting": ADMIN,
}  # fmt: skip
_INFERENCES: Final = frozenset(("infer", "generate", "generate_stream"))  # which count what they do not find
_MODEL_NEEDS: Final = {"route": STATUS, "why": STATUS, "trace/setting": ADMIN}


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
        self,
        repository: Repository,
        limits: Limits,
        *,
        scrape: Callable[[bytes], Awaitable[tuple[str, bytes]]] | None = None,
        status_page: bool = False,
        doors: "Doors | None" = None,
        multi_model: "MultiModel | None" = None,
    ) -> None:
        """scrape: gives content type and body of /metrics, by the client's Accept; None: there is no such path.

        status_page: for browsers, at /. doors: who asks for keys; None: nobody. multi_model: what SageMaker loads and unloads;
        None: it does not.
        """
        self._repository = repository
        self._doors = doors
        self._scrape = scrape
        self._page = page() if status_page else None
        self._status = Status(repository)
        self._routes: dict[bytes, MatchedPath] = {}
        self._endpoints = Endpoints(
            repository,
            "rest",
            lambda served: RestCodec(served.name, served.version, served.spec, served.ragged, limits.json_depth, in_haste=True),
            doors,
        )
        self._generate_endpoints = Endpoints(
            repository,
            "rest",
            lambda served: GenerateCodec(
                served.name, served.version, served.spec, served.ragged, limits.json_depth, in_haste=True
            ),
            doors,
        )
        self._later = LaterAnswers()
        self._multi_model = MultiModelRoutes(multi_model, self._later) if multi_model is not None else None
        self._container = ContainerRoutes(repository, self._endpoints, limits.json_depth, self._multi_model)
        self._api_generation = -1
        self._api_json = b""
        self._server_actions: dict[str, dict[bytes, Action]] = {
            "": _get(self._server_metadata),
            "models": _get(self._models),
            "status": _get(self._tell_status),
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
            "why": _get(self._why),
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
        doors = self._doors
        try:
            if doors is not None:
                doors.meet(exchange)
            if route is None:
                route = self._remember(exchange.path)
            if doors is not None:
                doors.check(exchange, route.needs, route.name)
            action = route.methods.get(exchange.method)
            if action is None:
                allowed = b"Allow: " + b", ".join(route.methods) + b"\r\n"
                methods = " or ".join(method.decode() for method in route.methods)
                exchange.respond(405, error_body(f"Method Not Allowed: expected {methods}"), headers=allowed)
            else:
                action(exchange, route)
        except GatewayError as exc:
            if route is None and exc.code is Code.INVALID_ARGUMENT:  # the path itself: of what, is not known
                self.on_fault(exchange, exc)
            respond_error(exchange, exc if doors is None else self._refused(exchange, exc, doors))

    def _refused(self, exchange: Exchange, error: GatewayError, doors: "Doors") -> GatewayError:
        """The error as the client may read it. Who was refused is counted, and the log tells of some."""
        error = doors.veiled(exchange, error)
        if error.code in (Code.UNAUTHENTICATED, Code.FORBIDDEN):
            self.on_fault(exchange, error)
        return error

    def on_fault(self, exchange: Exchange, error: GatewayError) -> None:
        """What its connection has refused is counted, and the log tells of some."""
        self._endpoints.refused(error, exchange, exchange.arrival_ns)

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
            return MatchedPath({b"OPTIONS": self._options}, needs=OPEN)
        # Split before unquoting: a quoted slash belongs to a name.
        try:
            parts = [unquote(part, errors="strict") for part in path.decode("ascii").split("/")[1:]]
        except UnicodeDecodeError:
            raise InvalidArgument("the path is not percent-quoted UTF-8") from None
        match parts:
            case [""]:
                return MatchedPath(_get(self._welcome), needs=OPEN)  # which asks itself
            case ["openapi.json"]:
                return MatchedPath(_get(self._api), needs=MODELS)
            case ["metrics"] if self._scrape is not None:
                return MatchedPath(_get(self._metrics), needs=METRICS)
            case ["v2"] | ["v2", ""]:
                return MatchedPath(self._server_actions[""])
            case ["v2", "models", ""]:
                return MatchedPath(self._server_actions["models"], needs=MODELS)
            case ["v2", "models", name, "versions", version, *rest] if name and version:
                actions, key = self._model_actions, "/".join(rest)
                if not _is_version(version) and key not in _INFERENCES:
                    self._repository.model(name, version)  # which is not found
                if key in actions and (key or not rest):
                    return MatchedPath(actions[key], name, version, _MODEL_NEEDS.get(key, INFER))
            case ["v2", "models", name, *rest] if name and (name != "stats" or rest):
                actions, key = self._model_actions, "/".join(rest)
                if key in actions and (key or not rest):
                    return MatchedPath(actions[key], name, needs=_MODEL_NEEDS.get(key, INFER))
            case ["v2", "repository", "models", name, verb] if name and verb in self._control_actions:
                return MatchedPath(self._control_actions[verb], name, needs=ADMIN)
            case ["v2", kind, "region", name, verb] if name and verb in self._region_actions.get(kind, ()):
                return MatchedPath(self._region_actions[kind][verb], name, needs=ADMIN)
            case ["v2", *rest] if (key := "/".join(rest)) in self._server_actions:
                return MatchedPath(self._server_actions[key], needs=_SERVER_NEEDS.get(key, INFER))
        if (found := self._container.match(parts)) is not None:
            return MatchedPath(*found)
        raise NotFound("Not Found: no such path; GET / says what is here")

    # the server

    def _server_metadata(self, exchange: Exchange, route: MatchedPath) -> None:
        respond_json(exchange, self._repository.server_metadata())

    def _options(self, exchange: Exchange, route: MatchedPath) -> None:
        exchange.respond(200, headers=b"Allow: GET, HEAD, POST, OPTIONS\r\n")

    def _welcome(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol: for whoever looks at the address; in a browser it is a page."""
        as_page = self._page is not None and prefers_html(exchange.headers.get(b"accept", b""))
        if self._doors is not None:
            self._doors.check(exchange, STATUS if as_page else MODELS)
        if as_page:
            assert self._page is not None
            exchange.respond(200, self._page.body, HTML, self._page.headers)
            return
        metrics = self._scrape is not None
        welcome = describe_welcome(self._repository.models(), metrics=metrics)
        respond_json(exchange, welcome, indent=True, headers=b"Vary: Accept\r\n")

    def _tell_status(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol: counts and states, for who shows what goes on."""

        def told(status: bytes) -> None:
            exchange.respond(200, status, JSON, b"Cache-Control: no-store\r\n")

        self._later.made(exchange, self._status.json(), told)

    def _models(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol."""
        respond_json(exchange, {"models": self._repository.models()}, indent=True)

    def _api(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol: all of the paths, and what each model takes and gives."""
        repository = self._repository
        if repository.generation != self._api_generation:
            from gateway.protocols.openapi import describe_api
            from gateway.protocols.openapi_keys import with_keys

            self._api_generation = repository.generation
            models = [(served.name, served.version, served.spec) for served in repository.ready_models()]
            document = describe_api(models, metrics=self._scrape is not None, multi_model=self._multi_model is not None)
            self._api_json = orjson.dumps(document if self._doors is None else with_keys(document, self._key_for))
        exchange.respond(200, self._api_json)

    def _key_for(self, template: str) -> str:
        """The scope that a path of the document needs; empty: no key is asked for."""
        assert self._doors is not None
        path = re.sub(r"\{.*?\}", "1", template).encode()
        return self._doors.needs(MODELS if path == b"/" else self._parse(path).needs)  # its page needs another

    def _live(self, exchange: Exchange, route: MatchedPath) -> None:
        live = self._repository.live()
        respond_json(exchange, {"live": live}, 200 if live else 503)

    def _ready(self, exchange: Exchange, route: MatchedPath) -> None:
        ready = self._repository.ready()
        respond_json(exchange, {"ready": ready}, 200 if ready else 503)

    def _metrics(self, exchange: Exchange, route: MatchedPath) -> None:
        assert self._scrape is not None

        def told(scraped: tuple[str, bytes]) -> None:
            content_type, body = scraped
            exchange.respond(200, body, content_type.encode(), b"Vary: Accept\r\n")

        self._later.made(exchange, self._scrape(exchange.headers.get(b"accept", b"")), told)

    def _unsupported(self, exchange: Exchange, route: MatchedPath) -> None:
        raise Unsupported(f"{exchange.path.decode()} is not offered by this server")

    # models

    def _model_metadata(self, exchange: Exchange, route: MatchedPath) -> None:
        respond_json(exchange, self._repository.model_metadata(route.name, route.version))

    def _model_config(self, exchange: Exchange, route: MatchedPath) -> None:
        respond_json(exchange, self._repository.model_config(route.name, route.version))

    def _model_ready(self, exchange: Exchange, route: MatchedPath) -> None:
        try:
            ready = self._repository.model_ready(route.name, route.version)
        except NotFound:
            ready = False
        if ready:
            missing = self._repository.missing(route.name, route.version)
            respond_json(exchange, {"name": route.name, "ready": True, **({"missing": missing} if missing else {})})
        else:
            exchange.respond(400, error_body("Model version not ready"))

    def _statistics(self, exchange: Exchange, route: MatchedPath) -> None:
        respond_json(exchange, self._repository.statistics(route.name, route.version))

    def _explain(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol: where a request of ?rows= rows would go now, and why."""
        rows = parse_qs(exchange.query.decode("latin-1")).get("rows", ["1"])[-1]
        if not _is_version(rows) or len(rows) > 7 or int(rows) < 1:
            raise InvalidArgument(f"rows: got {rows!r}, expected a number from 1 to 9999999")
        respond_json(exchange, self._repository.explain(route.name, route.version, int(rows)))

    def _why(self, exchange: Exchange, route: MatchedPath) -> None:
        """Not of the protocol: the last decisions, for `gateway why`."""
        exchange.compress = False  # several MiB would hold up what else is compressed
        exchange.respond(200, self._repository.why(route.name, route.version), _MSGPACK)

    def _index(self, exchange: Exchange, route: MatchedPath) -> None:
        respond_json(exchange, self._repository.index(read_json(exchange.body, _Index).ready))

    def _load(self, exchange: Exchange, route: MatchedPath) -> None:
        control = read_json(exchange.body, _ModelControl)
        self._later.changed(exchange, self._repository.load(route.name, control.parameters))

    def _unload(self, exchange: Exchange, route: MatchedPath) -> None:
        dependents = read_json(exchange.body, _ModelControl).parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument(f"parameter 'unload_dependents': got {dependents!r}, expected true or false")
        self._later.changed(exchange, self._repository.unload(route.name, dependents))

    # shared memory

    def _region_status(self, exchange: Exchange, route: MatchedPath) -> None:
        respond_json(exchange, self._repository.regions.status(route.name))

    def _register(self, exchange: Exchange, route: MatchedPath) -> None:
        region = read_json(exchange.body, _Register)
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
        respond_json(exchange, [])

    def _cuda_region_status(self, exchange: Exchange, route: MatchedPath) -> None:
        raise NotFound(f"Unable to find cuda shared memory region: '{route.name}'")

    def _cuda_register(self, exchange: Exchange, route: MatchedPath) -> None:
        raise Unsupported(f"cuda shared memory region '{route.name}': only system shared memory is offered by this server")

    def _cuda_unregister(self, exchange: Exchange, route: MatchedPath) -> None:
        exchange.respond(200)  # there can be none

    # inference

    def _infer(self, exchange: Exchange, route: MatchedPath) -> None:
        inference = RestInference(self._endpoints, exchange, route)
        exchange.on_disconnect = inference.cancel
        inference.start()

    def _generate(self, exchange: Exchange, route: MatchedPath) -> None:
        inference = Generate(self._generate_endpoints, exchange, route)
        exchange.on_disconnect = inference.cancel
        inference.start()

    def _generate_stream(self, exchange: Exchange, route: MatchedPath) -> None:
        inference = GenerateStream(self._generate_endpoints, exchange, route)
        exchange.on_disconnect = inference.cancel
        exchange.on_drained = inference.drained
        inference.start()


def _get(action: Action) -> dict[bytes, Action]:
    return {b"GET": action, b"HEAD": action}


def _post(action: Action) -> dict[bytes, Action]:
    return {b"POST": action}


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit()
