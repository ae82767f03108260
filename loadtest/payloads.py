"""The requests a run sends: made from the model's metadata or read from files, encoded once, before the run.

Synthetic values: floats are standard normal; integers are 1 to 99 (valid token numbers in every vocabulary), but 1 where the
input's name has "mask" and 0 where it has "type"; BYTES are short words. `--values NAME=LOW:HIGH` overrides.
"""

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from backends.base import Tensors
from backends.datatypes import NUMPY
from gateway.protocols.tensors import tensor_to_bytes
from loadtest.errors import UsageError
from loadtest.results import LoadSpec
from loadtest.target import Address

_VARIETY: Final = 64  # different synthetic requests
_POOL_BYTES: Final = 64 << 20
_MAX_FILES: Final = 10_000
_PAYLOAD_STREAM: Final = 3  # of randomness, beside those of loadtest.patterns


def synthetic(spec: LoadSpec, inputs: Sequence[dict[str, Any]]) -> list[tuple[Tensors, dict[str, str]]]:
    """Make a variety of inputs from v2 metadata: arrays and datatypes by name. The seed decides them.

    -1 in the first place becomes rows, elsewhere length (the same for all inputs of a request). Raises: UsageError.
    """
    if not inputs:
        raise UsageError(f"model {spec.model!r} states no inputs in its metadata: give requests with --payload")
    rows, length = _range("--rows", spec.rows), _range("--length", spec.length)
    values = _values(spec.values, {str(tensor["name"]) for tensor in inputs})
    rng = np.random.default_rng([spec.seed, _PAYLOAD_STREAM])
    made: list[tuple[Tensors, dict[str, str]]] = []
    used_bytes = 0
    for _ in range(_VARIETY):
        row_count, long = int(rng.integers(rows[0], rows[1] + 1)), int(rng.integers(length[0], length[1] + 1))
        arrays: Tensors = {}
        for tensor in inputs:
            sizes = [int(size) for size in tensor["shape"]]
            shape = [size if size >= 0 else row_count if axis == 0 else long for axis, size in enumerate(sizes)]
            name = str(tensor["name"])
            arrays[name] = _fill(name, str(tensor["datatype"]), shape, values.get(name), rng)
        made.append((arrays, {str(tensor["name"]): str(tensor["datatype"]) for tensor in inputs}))
        used_bytes += sum(array.nbytes for array in arrays.values())
        if used_bytes > _POOL_BYTES:
            break
    return made


def _fill(
    name: str, datatype: str, shape: Sequence[int], limits: tuple[float, float] | None, rng: np.random.Generator
) -> np.ndarray:
    dtype = NUMPY.get(datatype)
    if dtype is None:
        raise UsageError(f"input {name!r}: the server's metadata has the unknown datatype {datatype!r}")
    if dtype.kind == "O":
        words = [b"word%d" % number for number in rng.integers(0, 1000, prod(shape)).tolist()]
        array = np.empty(len(words), dtype=object)
        array[:] = words
        return array.reshape(shape)
    if dtype.kind in "iub":
        low, high = (0, 1) if dtype.kind == "b" else (1, 1) if "mask" in name else (0, 0) if "type" in name else (1, 99)
        low, high = (int(limits[0]), int(limits[1])) if limits else (low, high)
        return rng.integers(low, high + 1, shape).astype(dtype)
    if limits:
        return rng.uniform(*limits, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def http_requests(spec: LoadSpec, address: Address, model: str, made: Iterable[tuple[Tensors, dict[str, str]]]) -> list[bytes]:
    """Whole HTTP requests for these inputs. Raises: UsageError."""
    return [_http(spec, address, model, *_body(spec, arrays, datatypes)) for arrays, datatypes in made]


def grpc_requests(spec: LoadSpec, model: str, made: Iterable[tuple[Tensors, dict[str, str]]]) -> list[bytes]:
    """Serialised ModelInferRequest messages with raw contents."""
    from tritonclient.grpc import service_pb2

    messages: list[bytes] = []
    for arrays, datatypes in made:
        message = service_pb2.ModelInferRequest(model_name=model, model_version=spec.version)
        for name, array in arrays.items():
            message.inputs.add(name=name, datatype=datatypes[name], shape=array.shape)
            message.raw_input_contents.append(bytes(tensor_to_bytes(array)))
        messages.append(message.SerializeToString())
    return messages


def from_files(spec: LoadSpec, address: Address, model: str) -> list[bytes]:
    """Read the spec's payload files, a folder's in order of name. JSON files are v2 requests (or the body as it is, for
    invocations); others are raw bodies (for rest-binary, the raw request of one input). Raises: UsageError.
    """
    made: list[bytes] = []
    for path in _paths(spec.payloads):
        try:
            body = path.read_bytes()
        except OSError as exc:
            raise UsageError(f"payload {path}: cannot be read: {exc}") from exc
        is_json = path.suffix == ".json"
        if spec.protocol == "invocations":
            kind = spec.content_type or ("application/json" if is_json else "application/octet-stream")
            made.append(_http(spec, address, model, body, {"Content-Type": kind}))
        elif is_json and spec.protocol == "rest-json":
            _tensors(path, body)
            made.append(_http(spec, address, model, body, {"Content-Type": "application/json"}))
        elif is_json and spec.protocol == "rest-binary":
            made += http_requests(spec, address, model, [_tensors(path, body)])
        elif is_json:
            made += grpc_requests(spec, model, [_tensors(path, body)])
        elif spec.protocol == "rest-binary":
            raw = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0"}
            made.append(_http(spec, address, model, body, raw))
        else:
            raise UsageError(f"payload {path}: protocol {spec.protocol} takes v2 requests in .json files")
    return made


def _paths(names: Iterable[str]) -> list[Path]:
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        paths += sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
        if len(paths) > _MAX_FILES:
            raise UsageError(f"payload {name}: over {_MAX_FILES} files")
    if not paths:
        raise UsageError("payload: the folder has no files")
    return paths


def _tensors(path: Path, body: bytes) -> tuple[Tensors, dict[str, str]]:
    """The inputs of a v2 JSON request."""
    try:
        document = json.loads(body)
        arrays: Tensors = {}
        datatypes: dict[str, str] = {}
        for tensor in document["inputs"]:
            name, datatype = str(tensor["name"]), str(tensor["datatype"])
            data = tensor["data"]
            if datatype == "BYTES":
                data = [item.encode() for item in np.asarray(data, dtype=object).reshape(-1)]
            arrays[name] = np.array(data, dtype=NUMPY[datatype]).reshape(tensor["shape"])
            datatypes[name] = datatype
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(f"payload {path}: not a v2 inference request: {type(exc).__name__}: {exc}") from exc
    return arrays, datatypes


def _body(spec: LoadSpec, arrays: Tensors, datatypes: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    """The body and its headers, in the spec's protocol."""
    if spec.protocol == "rest-binary":
        raw = {name: bytes(tensor_to_bytes(array)) for name, array in arrays.items()}
        described = [
            {
                "name": name,
                "datatype": datatypes[name],
                "shape": list(array.shape),
                "parameters": {"binary_data_size": len(raw[name])},
            }
            for name, array in arrays.items()
        ]
        head = orjson.dumps({"inputs": described, "parameters": {"binary_data_output": True}})
        kind = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
        return head + b"".join(raw.values()), kind
    tensors: list[dict[str, Any]] = []
    for name, array in arrays.items():
        if datatypes[name] in ("FP16", "BF16"):
            raise UsageError(f"input {name!r}: {datatypes[name]} has no JSON form: use --protocol rest-binary or grpc")
        flat: Any = array.reshape(-1)
        data = [item.decode() for item in flat] if array.dtype == object else np.ascontiguousarray(flat)
        tensors.append({"name": name, "datatype": datatypes[name], "shape": list(array.shape), "data": data})
    return orjson.dumps({"inputs": tensors}, option=orjson.OPT_SERIALIZE_NUMPY), {"Content-Type": "application/json"}


def _http(spec: LoadSpec, address: Address, model: str, body: bytes, headers: dict[str, str]) -> bytes:
    path = address.path if spec.protocol == "invocations" else address.model_path(model, spec.version) + "/infer"
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}:{address.port}",
        *(f"{name}: {value}" for name, value in (headers | dict(spec.headers)).items()),
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _range(option: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        limits = int(low), int(high or low)
    except ValueError:
        raise UsageError(f'{option} {text!r}: expected a number or a range such as "1-8"') from None
    if not 1 <= limits[0] <= limits[1]:
        raise UsageError(f"{option} {text!r}: expected at least 1, and the smaller number first")
    return limits


def _values(texts: Iterable[str], names: set[str]) -> dict[str, tuple[float, float]]:
    limits: dict[str, tuple[float, float]] = {}
    for text in texts:
        name, _, span = text.partition("=")
        low, _, high = span.partition(":")
        try:
            limits[name] = float(low), float(high)
        except ValueError:
            raise UsageError(f"--values {text!r}: expected NAME=LOW:HIGH") from None
        if name not in names:
            raise UsageError(f"--values {text!r}: the model has no input {name!r}, only {', '.join(sorted(names))}")
        if limits[name][0] > limits[name][1]:
            raise UsageError(f"--values {text!r}: LOW is above HIGH")
    return limits
