"""`gateway predict`: one request to a running server, or to a model loaded for it, and the answer as JSON."""

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from http.client import BadStatusLine, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import orjson

from backends.base import TensorSpec
from gateway.errors import BackendUnreachable, ConfigError, GatewayError
from gateway.protocols.values import request_body

if TYPE_CHECKING:
    from gateway.testing import TestClient

Call = Callable[[str, bytes | None, dict[str, str]], bytes]
"""A path, a body (None: GET) and headers to the answer's body. Raises: GatewayError."""

_TIMEOUT_S: Final = 60.0
_ADDRESS: Final = re.compile(r"localhost|\d+(\.\d+){3}")
_STRANGE: Final = "no answer of the Open Inference Protocol v2"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `predict` to the command line."""
    predict = commands.add_parser("predict", help="one request to a model, and its answer")
    predict.add_argument("where", metavar="TARGET|CONFIG", help="host:port of a server; or what `gateway serve` takes, to load")
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
        answer = ask(partial(over_the_wire, where.rstrip("/")), arguments.model, arguments.version, given)
    else:
        if _ADDRESS.fullmatch(where) and not Path(where).exists():
            raise ConfigError(f"{where}: no port: write {where}:8000, if that is the server's HTTP port")
        from gateway.hosted import configuration, only  # what they import takes a while, and the wire needs none of it
        from gateway.testing import TestClient

        with TestClient(only(configuration(where, whole=False), arguments.model, arguments.version)) as client:
            answer = ask(partial(here, client), arguments.model, arguments.version, given)
    sys.stdout.buffer.write(answer + b"\n")
    return 0


def read_input(place: str) -> dict[str, Any]:
    """A JSON object from a file or standard input. Raises: ConfigError."""
    try:
        text = sys.stdin.buffer.read() if place == "-" else Path(place).read_bytes()
        given = orjson.loads(text)
    except OSError as exc:
        raise ConfigError(f"--input: {place}: {exc.strerror}: expected a file with a request, or - for standard input") from exc
    except ValueError as exc:
        raise ConfigError(f"--input: {place}: not JSON: {exc}") from exc
    if not isinstance(given, dict):
        raise ConfigError(f'--input: {place}: got a {type(given).__name__}, expected an object such as {{"x": [[1, 2]]}}')
    return given


def ask(call: Call, model: str, version: str, given: dict[str, Any]) -> bytes:
    """Have a server answer: a request as it stands, or made of the elements of the inputs that its values are named after.

    Raises: GatewayError, with the server's own words; BackendUnreachable.
    """
    at = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    if isinstance(given.get("inputs"), list):
        return call(f"{at}/infer", orjson.dumps(given), {})
    metadata = call(at, None, {})
    try:
        tensors = [TensorSpec(each["name"], each["datatype"], tuple(each["shape"])) for each in json.loads(metadata)["inputs"]]
    except (ValueError, KeyError, TypeError) as exc:
        raise GatewayError(f"{at}: an answer that is {_STRANGE}") from exc
    inputs = {tensor.name: tensor for tensor in tensors}
    body, json_bytes = request_body(given, inputs)
    return call(f"{at}/infer", body, {} if json_bytes == len(body) else {"Inference-Header-Content-Length": str(json_bytes)})


def over_the_wire(url: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
    """A `Call` of a running server, whose address has no slash at its end."""
    address = f"{url}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=_TIMEOUT_S) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as exc:
        with exc:
            raise GatewayError(_words(exc.read(), address, exc.code)) from exc
    except (BadStatusLine, ConnectionResetError) as exc:
        raise BackendUnreachable(
            f"what listens at {url} speaks no HTTP ({exc}): name the server's HTTP port (8000 unless set; 8001 is gRPC)"
        ) from exc
    except (OSError, HTTPException) as exc:  # the latter of what is no URL
        raise BackendUnreachable(f"nothing answers at {address} ({exc})") from exc


def here(client: "TestClient", path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
    """A `Call` of a model that was loaded for it."""
    response = client.request("GET" if body is None else "POST", path, content=body, headers=headers)
    if response.status_code != 200:
        raise GatewayError(_words(response.content, path, response.status_code))
    return response.content


def _words(answer: bytes, address: str, status: int) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return f"{address}: status {status}, which is {_STRANGE}"
