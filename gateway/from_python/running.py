"""`gateway.run`: a server in this process, on a loop of its own."""

from typing import Self

from backends.guest import be_guest
from gateway.config import Config, listening
from gateway.configuring.guess import Example
from gateway.configuring.need_of_ray import need_of_ray
from gateway.errors import ConfigError
from gateway.from_python.hosted import Hosted, Source, configuration


def run(
    what: Source,
    *,
    host: str = "127.0.0.1",
    http_port: int | None = 0,
    grpc_port: int | None = 0,
    example: Example | None = None,
) -> "Server":
    """Serve models from this process; blocks until they answer. Ends with `close`, or as a context manager.

    what, example: as `gateway.load` takes them. host and ports stand in place of the configuration's; 0: any free port, None:
    no such listener. Raises: ConfigError, also for what only Ray can do; GatewayError, if a model cannot be loaded; OSError, if
    a port is taken.
    """
    be_guest()
    given = {"host": host, "http_port": http_port, "grpc_port": grpc_port}
    config = configuration(what, example=example)
    server = listening(config.server, given)
    need, instead = need_of_ray(config)
    if need:
        raise ConfigError(f"{need}, which needs Ray: use `gateway serve`, or {instead}")
    if server.ingresses > 1:
        remedy = "use `gateway serve`, or set server.ingress_replicas: 1"
        raise ConfigError(f"server.ingress_replicas is {server.ingresses}, which needs as many processes: {remedy}")
    return Server(config.model_copy(update={"server": server}))


class Server:
    """A server in this process. Life: made by `run` -> close."""

    def __init__(self, config: Config) -> None:
        self._host = config.server.host
        self._scheme = "http" if config.server.tls is None else "https"
        self._hosted = Hosted(config)

    def __repr__(self) -> str:
        return f"<Server {', '.join(self.models)} at {self._hosted.ports}>"

    @property
    def rest_url(self) -> str:
        """Such as http://127.0.0.1:8000, without a slash at the end. Raises: ConfigError, if there is no such listener."""
        return f"{self._scheme}://{self._address(self._hosted.ports.http, 'http_port')}"

    @property
    def grpc_target(self) -> str:
        """Such as 127.0.0.1:8001, as gRPC clients take it. Raises: likewise."""
        return self._address(self._hosted.ports.grpc, "grpc_port")

    @property
    def models(self) -> tuple[str, ...]:
        """The names of those that are loaded."""
        return tuple(dict.fromkeys(model.name for model in self._hosted.ingress.ready_models()))

    def close(self) -> None:
        """Stop listening, answer what is in flight within server.drain_timeout_s, free the models.

        A second call does nothing.
        """
        self._hosted.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _address(self, port: int | None, key: str) -> str:
        if port is None:
            raise ConfigError(f"there is no such listener: {key} is None")
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
