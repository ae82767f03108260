"""`gateway sagemaker`: serves as SageMaker runs a container. Where it listens and what it serves is SageMaker's to say."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.commands.serve import serve
from gateway.config import Config, ModelSection, listening
from gateway.config.multi_model import multi_model_of
from gateway.configuring.need_of_ray import need_of_ray
from gateway.configuring.package import packaged
from gateway.documents.reader import Document, configuration_in, read
from gateway.errors import ConfigError
from gateway.garbage import collecting_seldom
from gateway.process.command_line import add_command, speech
from gateway.process.prints import apart

if TYPE_CHECKING:
    from gateway.engine.multi_model import MultiModel
    from gateway.engine.repository import Repository

MODEL: Final = "/opt/ml/model"
BIND_TO_PORT: Final = "SAGEMAKER_BIND_TO_PORT"
MAX_PAYLOAD: Final = "SAGEMAKER_MAX_PAYLOAD_IN_MB"  # of a batch transform job; 0 sets no bound: limits.body_bytes holds
MULTI_MODEL: Final = "SAGEMAKER_MULTI_MODEL"

_HOST: Final = "0.0.0.0"  # as the platform reaches a container from outside of it
_PORT: Final = 8080
_DRAIN_S: Final = 25.0  # what is left is killed 30 s behind SIGTERM


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `sagemaker` to the command line."""
    command = add_command(
        commands,
        "sagemaker",
        "serve as a container of SageMaker does",
        "gateway sagemaker",
        "gateway sagemaker serve --model models",
        more=f"Listens on all addresses, at port {_PORT} or {BIND_TO_PORT}, and opens no other port. Serves a folder: by its "
        f"gateway.yaml, or else the models in it, as `gateway serve FOLDER` does; with {MULTI_MODEL}=true what the platform "
        "loads by POST /models. SIGTERM drains within 30 s.",
    )
    command.add_argument("verb", nargs="?", choices=("serve",), default="serve", help="as SageMaker starts a container")
    command.add_argument("--host", default=_HOST, help=f"address to listen on, instead of {_HOST}")
    command.add_argument("--model", type=Path, metavar="FOLDER", default=Path(MODEL), help=f"instead of {MODEL}")
    return command


def sagemaker(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Serve until a signal ends it. Returns the exit code. Raises: GatewayError, OSError."""
    if environment.get(MULTI_MODEL, "").strip().lower() == "true":
        return _multi_model(arguments, environment)
    with collecting_seldom(), apart(more=True):
        config = contained(packaged(arguments.model, environment), environment, host=arguments.host)
    return serve(config, on_ray=False, speech=speech(arguments))


def _multi_model(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """The same with no model, until the platform loads some. Raises: GatewayError, OSError."""
    file = configuration_in(arguments.model)
    config, section = multi_model_of(read(file) if file is not None else Document("", {}))

    def models_of(folder: Path) -> tuple[ModelSection, ...]:
        return _on_one_process(packaged(folder, environment)).models

    def opened(repository: "Repository") -> "MultiModel":
        from gateway.engine.multi_model import MultiModel

        return MultiModel(repository, section, models_of)

    config = contained(config, environment, host=arguments.host)
    return serve(config, on_ray=False, speech=speech(arguments), multi_model=opened)


def contained(config: Config, environment: Mapping[str, str], *, host: str = _HOST) -> Config:
    """A configuration as the environment wants it: one listener, in one process. Raises: ConfigError."""
    config = _on_one_process(config)
    limits = config.server.limits
    given = {
        "host": host,
        "http_port": _whole(environment, BIND_TO_PORT, _PORT, 65535, "a port, 0 (any free one) to 65535"),
        "grpc_port": None,  # nobody could reach it
        "drain_timeout_s": min(config.server.drain_timeout_s, _DRAIN_S),
        "limits": limits.model_dump() | {"body_bytes": max(limits.body_bytes, _payload_bytes(environment))},
    }
    return config.model_copy(update={"server": listening(config.server, given)})


def _on_one_process(config: Config) -> Config:
    """Raises: ConfigError, if it cannot be."""
    need, instead = need_of_ray(config)
    if need:
        raise ConfigError(f"{need}, which needs Ray, but a container of SageMaker is one process: {instead}")
    return config


def _payload_bytes(environment: Mapping[str, str]) -> int:
    return _whole(environment, MAX_PAYLOAD, 0, 100, "0 to 100, in MB") << 20


def _whole(environment: Mapping[str, str], name: str, default: int, most: int, expected: str) -> int:
    """Raises: ConfigError."""
    text = environment.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdigit() and int(text) <= most):
        raise ConfigError(f"{name}: got {text!r}, expected {expected}")
    return int(text)
