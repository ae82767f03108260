"""`gateway.TestClient`: REST and gRPC without ports, for tests of one's own models and configurations."""

import json as encoding
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from backends.guest import be_guest
from gateway.configuring.guess import Example
from gateway.edges.grpc_in_memory import InMemoryChannel
from gateway.edges.grpc_server import GrpcServer
from gateway.edges.http_server import HttpServer
from gateway.edges.rest_in_memory import Response, exchange, request_bytes
from gateway.errors import ConfigError
from gateway.from_python.hosted import Hosted, Source, configuration, without_listeners
from gateway.ingress import Ingress
from gateway.protocols.values import has_plain, type_shown


class TestClient:
    """Asks models that are loaded for it, in this process, as a client asks a server over the wire.

    Requests pass through the server's own HTTP connection, routes and codecs, and the gRPC methods' own code; so statuses,
    headers and words are a server's. Life: made (models are loaded; blocks) -> requests -> close. From any thread.

        with gateway.TestClient("gateway.yaml") as client:
            assert client.get("/v2/models/iris").status_code == 200
    """

    __test__ = False  # its name is no reason for pytest to collect it

    def __init__(self, what: Source, *, example: Example | None = None) -> None:
        """what, example: as `gateway.load` takes them; of a configuration all models, in this process whatever their placement.

        Raises: GatewayError.
        """
        be_guest()
        self._hosted = Hosted(without_listeners(configuration(what, example=example)))
        self._rest, grpc = self._hosted.run(_listeners(self._hosted.ingress))
        self.channel = InMemoryChannel(self._hosted, grpc)
        """For stubs: `service_pb2_grpc.GRPCInferenceServiceStub(client.channel)`."""

    def get(self, path: str, *, headers: Mapping[str, str] | None = None) -> Response:
        return self.request("GET", path, headers=headers)

    def post(
        self, path: str, *, json: Any = None, content: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """json, content: as `request` takes them."""
        return self.request("POST", path, json=json, content=content, headers=headers)

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send one request and wait for its answer; of an error, too, which is an answer.

        path: with the query, such as /v2/models/iris/infer; what is not ASCII is quoted. json: becomes the body, numpy arrays
        in it as lists; NaN and infinity are written as `json.dumps` does. content: the body itself, instead.
        Raises: NotReady, once closed; ConfigError, for what makes no request.
        """
        if json is not None and content is not None:
            raise ConfigError("json and content: expected one of them, the body")
        for name, given in (("method", method), ("path", path)):
            if not isinstance(given, str):
                raise ConfigError(f"{name}: got {type(given).__name__}, expected text")
        if not isinstance(content, bytes | bytearray | memoryview | None):
            raise ConfigError(f"content: got {type(content).__name__}, expected bytes")
        if not isinstance(headers, Mapping | None):
            raise ConfigError(f"headers: got {type(headers).__name__}, expected a dict of text by name")
        body = bytes(content or b"")
        if json is not None:
            try:
                body = encoding.dumps(json, default=_plain).encode()
            except (TypeError, ValueError, RecursionError) as exc:
                raise ConfigError(f"json: {exc}: expected what JSON can hold, and numpy arrays") from exc
        try:
            sent = request_bytes(method, path, headers or {}, body)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        return Response(method, self._hosted.run(exchange(self._rest, sent)))

    def close(self) -> None:
        """Answer what is in flight, within server.drain_timeout_s, and free the models. A second call does nothing."""
        self._hosted.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


async def _listeners(ingress: Ingress) -> tuple[HttpServer, GrpcServer]:
    return ingress.rest_listener(), ingress.grpc_listener()


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic) and (value.dtype == object or has_plain(value.dtype)):
        return value.tolist()
    raise TypeError(f"got {type_shown(value)}")
