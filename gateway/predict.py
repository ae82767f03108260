"""`gateway predict`: one request to a running server, or to a model loaded for it, and the answer as JSON."""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import orjson

from backends.base import ModelSpec, TensorSpec
from gateway.config import Config, load_config
from gateway.errors import BackendUnreachable, ConfigError, GatewayError, InvalidArgument, instead, shortened

_TIMEOUT_S: Final = 60.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `predict` to the command line."""
    predict = commands.add_parser("predict", help="one request to a model, and its answer")
    predict.add_argument("where", metavar="TARGET|CONFIG", help="host:port of a server, or a configuration to load")
    predict.add_argument("model", metavar="MODEL")
    predict.add_argument("--version", default="", help="of the model; without it the highest")
    predict.add_argument(
        "--input",
        required=True,
        metavar="FILE|-",
        help='a request as REST takes it, or the elements by input name: {"x": [[1, 2]]}; -: standard input',
    )
    predict.set_defaults(run=_predict)
    return predict


def _predict(arguments: argparse.Namespace) -> int:
    given = read_input(arguments.input)
    where = arguments.where
    if re.fullmatch(r"[\w.-]+:\d+", where):
        where = f"http://{where}"
    if where.startswith(("http://", "https://")):
        answer = ask(where.rstrip("/"), arguments.model, arguments.version, given)
    else:
        answer = asyncio.run(run_here(load_config(where), arguments.model, arguments.version, given))
    sys.stdout.buffer.write(answer + b"\n")
    return 0


def read_input(place: str) -> dict[str, Any]:
    """A JSON object from a file or standard input. Raises: ConfigError."""
    try:
        text = sys.stdin.buffer.read() if place == "-" else Path(place).read_bytes()
        given = json.loads(text)
    except OSError as exc:
        raise ConfigError(f"--input: {place}: {exc.strerror}: expected a file with a request, or - for standard input") from exc
    except ValueError as exc:
        raise ConfigError(f"--input: {place}: not JSON: {exc}") from exc
    if not isinstance(given, dict):
        raise ConfigError(f'--input: {place}: got a {type(given).__name__}, expected an object such as {{"x": [[1, 2]]}}')
    return given


def request_of(given: dict[str, Any], inputs: list[TensorSpec]) -> dict[str, Any]:
    """A REST request: what was given, if it is one, else its values as the elements of the inputs they are named after.

    The shape of such an input is that of its nested lists. Raises: InvalidArgument, for a name that the model does not have.
    """
    if isinstance(given.get("inputs"), list):
        return given
    known = {tensor.name: tensor for tensor in inputs}
    entries = []
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(f"no input '{shortened(name)}'{instead(name, known, 'its inputs')}")
        entries.append({"name": name, "datatype": known[name].datatype, "shape": _shape(value), "data": _listed(value)})
    return {"inputs": entries}


def _shape(value: Any) -> list[int]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def ask(url: str, model: str, version: str, given: dict[str, Any]) -> bytes:
    """Have a running server answer. Raises: BackendUnreachable; GatewayError, with the server's own words."""
    at = f"{url}/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    metadata = json.loads(_call(at, None))
    inputs = [TensorSpec(tensor["name"], tensor["datatype"], tuple(tensor["shape"])) for tensor in metadata["inputs"]]
    return _call(f"{at}/infer", orjson.dumps(request_of(given, inputs)))


def _call(address: str, body: bytes | None) -> bytes:
    try:
        with urllib.request.urlopen(address, body, _TIMEOUT_S) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as exc:
        with exc:
            text = exc.read()
        try:
            words = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            words = f"{address}: status {exc.code}, which is no answer of the Open Inference Protocol v2"
        raise GatewayError(words) from exc
    except OSError as exc:
        raise BackendUnreachable(f"nothing answers at {address} ({exc})") from exc


async def run_here(config: Config, name: str, version: str, given: dict[str, Any]) -> bytes:
    """Load one model of a configuration in this process, and have it answer. Raises: GatewayError."""
    from gateway.ingress import Ingress  # what it imports takes a while, and `ask` needs none of it
    from gateway.protocols.rest import ModelCodec
    from gateway.types import InferResponse

    models = [model for model in config.models if model.name == name and version in ("", model.version)]
    if not models:
        names = list(dict.fromkeys(model.name for model in config.models))
        raise ConfigError(f"no model '{shortened(name)}'{instead(name, names, 'models here')}")
    one = max(models, key=lambda model: int(model.version))
    # It is asked once: nothing is to be learned of its speed.
    one = one.model_copy(update={"load_at_start": True, "batching": one.batching.model_copy(update={"probe_s": 0.0})})
    server = config.server.model_copy(update={"http_port": None, "grpc_port": None, "state_dir": None})
    with tempfile.TemporaryDirectory() as directory:
        ingress = Ingress(config.model_copy(update={"server": server, "models": (one,)}), run_dir=Path(directory))
        try:
            await ingress.start()
            repository = ingress.repository
            spec: ModelSpec = repository.model(one.name).spec
            codec = ModelCodec(one.name, one.version, spec, one.ragged, server.limits.json_depth)
            body = orjson.dumps(request_of(given, list(spec.inputs)))
            request = codec.decode(body, None, time.monotonic_ns(), repository.regions.read)
            answered: asyncio.Future[InferResponse | GatewayError] = asyncio.get_running_loop().create_future()
            repository.infer(request, answered.set_result)
            outcome = await answered
            if isinstance(outcome, GatewayError):
                raise outcome
            parts, _ = codec.encode(request, outcome, repository.regions.write)
            return b"".join(bytes(part) for part in parts)
        finally:
            await ingress.drain()
