"""`gateway predict`: one request to a running server, or to a model loaded for it, and the answer as JSON.

Of a model that answers in parts, a line for each, when it is there.
"""

import argparse
import base64
import codecs
import json
import re
import sys
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO
from urllib.parse import quote

import numpy as np

from backends.base import TensorSpec
from backends.datatypes import NUMPY
from gateway.documents.reader import standard_input
from gateway.errors import BackendUnreachable, ConfigError, GatewayError, InvalidArgument
from gateway.process.command_line import add_command, not_empty, url_of
from gateway.process.credentials import NOTHING_SHOWN, Credentials, add_credentials, credentials, reason, unanswered
from gateway.process.prints import apart, is_text_file
from gateway.protocols.json_data import any_value
from gateway.protocols.smallest import WITHOUT_JSON
from gateway.protocols.values import request_body
from gateway.wire.tensors import tensor_from_bytes

if TYPE_CHECKING:
    from gateway.testing import TestClient


class CallAnswer(NamedTuple):
    """json_bytes: of the body; the rest are binary tensors. None: all of it is JSON."""

    body: bytes
    json_bytes: str | None = None


Call = Callable[[str, bytes | None, dict[str, str]], CallAnswer]
"""A path, a body (None: GET) and headers to the answer. Raises: GatewayError."""
Lines = Callable[[str, bytes], Iterable[bytes]]
"""A path and a body to the lines of the answer's body, as they come. Raises: GatewayError."""

_TIMEOUT_S: Final = 60.0
_JSON_BYTES: Final = "Inference-Header-Content-Length"
_WORDS_CHARS: Final = 200  # of a body that is no JSON
_ADDRESS: Final = re.compile(r"localhost|\d+(\.\d+){3}")
_STRANGE: Final = "no answer of the Open Inference Protocol v2"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `predict` to the command line."""
    predict = add_command(
        commands,
        "predict",
        "one request to a model, and its answer",
        "gateway predict configs/examples/linear.yaml linear --input request.json",
    )
    predict.add_argument("where", metavar="TARGET|CONFIG", help="host:port of a server; or what `gateway serve` takes, to load")
    predict.add_argument("model", metavar="MODEL")
    predict.add_argument("--version", default="", help="of the model; without it the highest")
    predict.add_argument(
        "--input",
        required=True,
        type=not_empty,
        metavar="FILE|-",
        help='a request as REST takes it, or the elements by input name: {"x": [[1, 2]]}; -: standard input',
    )
    add_credentials(predict)
    predict.set_defaults(run=_predict)


def _predict(arguments: argparse.Namespace) -> int:
    given = read_input(arguments.input)
    where = arguments.where
    if url := url_of(where):
        shown = credentials(arguments)
        call, lines = partial(over_the_wire, url, shown=shown), partial(lines_over_the_wire, url, shown=shown)
        _tell(ask(call, lines, arguments.model, arguments.version, given), sys.stdout)
    else:
        if _ADDRESS.fullmatch(where) and not Path(where).exists():
            raise ConfigError(f"{where}: no port: write {where}:8000, if that is the server's HTTP port")
        from gateway.from_python.hosted import (  # what they import takes a while, and the wire needs none of it
            configuration,
            only,
        )
        from gateway.testing import TestClient

        with (
            apart() as results,
            TestClient(only(configuration(where, whole=False), arguments.model, arguments.version)) as client,
        ):
            _tell(ask(partial(here, client), partial(lines_here, client), arguments.model, arguments.version, given), results)
    return 0


def _tell(answers: Iterable[bytes], results: TextIO | None) -> None:
    for answer in answers:
        if is_text_file(results):  # past its encoding, which may lack some character
            results.flush()
            results.buffer.write(answer + b"\n")
            results.buffer.flush()
        else:  # of who calls a command from Python; None: it is closed
            print(answer.decode(), file=results)


def read_input(place: str) -> dict[str, Any]:
    """A JSON object from a file or standard input. Raises: ConfigError."""
    try:
        text = standard_input() if place == "-" else Path(place).read_bytes()
        given = any_value(text.removeprefix(codecs.BOM_UTF8))
    except OSError as exc:
        raise ConfigError(f"--input: {place}: {exc.strerror}: expected a file with a request, or - for standard input") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--input: {place}: not JSON: {exc}") from exc
    if not isinstance(given, dict):
        raise ConfigError(f'--input: {place}: got a {type(given).__name__}, expected an object such as {{"x": [[1, 2]]}}')
    return given


def ask(call: Call, lines: Lines, model: str, version: str, given: dict[str, Any]) -> Iterator[bytes]:
    """Have a server answer: a request as it stands, or made of the elements of the inputs that its values are named after.

    Gives the answer, or each part of one, as JSON. Raises: GatewayError, with the server's own words; BackendUnreachable.
    """
    at = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    if isinstance(given.get("inputs"), list):
        yield _as_json(call(f"{at}/infer", json.dumps(given).encode(), {}), at)
        return
    metadata = call(at, None, {}).body
    try:
        about = json.loads(metadata)
        inputs = {each["name"]: TensorSpec(each["name"], each["datatype"], tuple(each["shape"])) for each in about["inputs"]}
        outputs = {each["name"]: each["datatype"] for each in about.get("outputs", ())}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise GatewayError(f"{at}: an answer that is {_STRANGE}") from exc
    if _in_parts(call, at):
        yield from _parts(lines(f"{at}/generate_stream", json.dumps(given).encode()))
        return
    binary = [name for name, datatype in outputs.items() if datatype in WITHOUT_JSON]
    body, json_bytes = request_body(given, inputs, outputs=outputs if binary else (), binary=binary)
    yield _as_json(call(f"{at}/infer", body, {} if json_bytes == len(body) else {_JSON_BYTES: str(json_bytes)}), at)


def _as_json(answer: CallAnswer, at: str) -> bytes:
    """An answer with its binary tensors among the JSON. Raises: GatewayError, if it is none."""
    if answer.json_bytes is None:
        return answer.body
    try:
        end = int(answer.json_bytes)
        whole = json.loads(answer.body[:end])
        for output in whole["outputs"]:
            size_bytes = output.get("parameters", {}).pop("binary_data_size", None)
            if size_bytes is not None:
                raw, end = answer.body[end : end + size_bytes], end + size_bytes
                output["data"] = _elements(tensor_from_bytes(output["name"], output["datatype"], output["shape"], raw))
                if not output["parameters"]:
                    del output["parameters"]
    except (ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as exc:
        raise GatewayError(f"{at}: an answer that is {_STRANGE}") from exc
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()


def _elements(array: np.ndarray) -> list[Any]:
    """Floats have the fewest digits of their datatype, as a server writes them; of BF16, for which numpy has no text, of FP32.

    Bytes that are no text are as `gateway batch` writes them.
    """
    if array.dtype == object:
        return [_text(element) for element in array.flat]
    if array.dtype.kind in "biu":
        return array.ravel().tolist()
    floats = array.astype(np.float32) if array.dtype == NUMPY["BF16"] else array
    return [float(str(element)) for element in floats.flat]


def _text(element: bytes) -> str | dict[str, str]:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(element).decode()}


def _in_parts(call: Call, at: str) -> bool:
    """Whether a model is decoupled; a server that does not tell has none."""
    try:
        return bool(json.loads(call(f"{at}/config", None, {}).body)["model_transaction_policy"]["decoupled"])
    except (GatewayError, ValueError, KeyError, TypeError):
        return False


def _parts(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The objects of server-sent events. Raises: GatewayError, if one is an error."""
    for line in lines:
        if line.startswith(b"data: "):
            part = line.removeprefix(b"data: ").rstrip()
            told = json.loads(part)
            if told.keys() == {"error"}:
                raise GatewayError(str(told["error"]))
            yield part


def over_the_wire(
    url: str, path: str, body: bytes | None, headers: dict[str, str], *, shown: Credentials = NOTHING_SHOWN
) -> CallAnswer:
    """A `Call` of a running server, whose address has no slash at its end."""
    with _opened(f"{url}{path}", url, body, headers, shown) as response:
        return CallAnswer(response.read(), response.headers[_JSON_BYTES])


def lines_over_the_wire(url: str, path: str, body: bytes, *, shown: Credentials = NOTHING_SHOWN) -> Iterator[bytes]:
    """`Lines` of a running server."""
    rest = b""
    with _opened(f"{url}{path}", url, body, {}, shown) as response:
        while piece := response.read1():  # `readline` takes chunks that are cut off for a whole answer
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines


@contextmanager
def _opened(address: str, url: str, body: bytes | None, headers: dict[str, str], shown: Credentials) -> Iterator[Any]:
    """An answer of a server. Raises: GatewayError; BackendUnreachable, also where the answer ends before its end."""
    if body is not None:  # which urllib calls a form otherwise
        headers = {"Content-Type": "application/octet-stream" if _JSON_BYTES in headers else "application/json"} | headers
    with ExitStack() as opened:
        try:
            response = opened.enter_context(shown.opened(address, body=body, headers=headers, timeout_s=_TIMEOUT_S))
        except urllib.error.HTTPError as exc:
            with exc:
                raise GatewayError(_words(exc.read(), address, exc.code)) from exc
        except (OSError, ValueError, HTTPException) as exc:  # the latter two of what is no URL, or no HTTP
            raise unanswered(exc, url, _TIMEOUT_S) from exc
        try:
            yield response
        except (OSError, HTTPException) as exc:
            raise BackendUnreachable(f"{address}: the answer broke off ({reason(exc)})") from exc


def here(client: "TestClient", path: str, body: bytes | None, headers: dict[str, str]) -> CallAnswer:
    """A `Call` of a model that was loaded for it."""
    response = client.request("GET" if body is None else "POST", path, content=body, headers=headers)
    if response.status_code != 200:
        raise GatewayError(_words(response.content, path, response.status_code))
    return CallAnswer(response.content, response.headers[_JSON_BYTES])


def lines_here(client: "TestClient", path: str, body: bytes) -> Iterator[bytes]:
    """`Lines` of a model that was loaded for it; they come together."""
    yield from here(client, path, body, {}).body.splitlines()


def _words(answer: bytes, address: str, status: int) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        line = answer.strip().partition(b"\n")[0].decode(errors="replace")[:_WORDS_CHARS]
        return f"{address}: status {status}, which is {_STRANGE}" + (f": {line!r}" if line else "")
