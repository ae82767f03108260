"""The requests a run sends: made from the model's metadata or read from files, encoded once, before the run.

A file is a v2 request (.json), or one in each line (.jsonl); `{"inputs": […], "expected": {"outputs": […]}}` says what its
answer should be. What else stands in it (id, parameters, outputs) is sent along in every protocol, or refused. With rows,
requests are joined: with others that ask the same and have equal shapes, or, padded, nearly the same length.

Synthetic values: floats are standard normal; integers are 1 to 99 (valid token numbers in every vocabulary), but 1 where the
input's name has "mask" and 0 where it has "type"; BYTES are short words. `--values NAME=LOW:HIGH` overrides.
"""

import codecs
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import orjson

from backends.base import Tensors
from backends.datatypes import NUMPY
from gateway.wire.tensors import tensor_to_bytes
from loadtest.errors import UsageError
from loadtest.load.payload_limits import check_bytes, check_size, range_of, shape_of, values_of
from loadtest.load.target import Address
from loadtest.load.v2_json import OF_TENSORS, brief, checked, listed, named, parameters_of, parsed, tensors_of, text_of
from loadtest.results import LoadSpec

_VARIETY: Final = 64  # different synthetic requests
_POOL_BYTES: Final = 64 << 20
_MAX_FILES: Final = 10_000  # and requests in them
_MAX_FILE_BYTES: Final = 256 << 20
_PAYLOAD_STREAM: Final = 3  # of randomness, beside those of loadtest.load.patterns


@dataclass(frozen=True, slots=True)
class Extras:
    """What a v2 request says beside its tensors, as its JSON has it.

    fields: of the request, such as id, parameters and outputs. of_inputs: input -> its other fields, such as parameters.
    key: equal where the same is asked, whatever the id.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    of_inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    key: bytes = b""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """From a request's JSON, whose tensors have been read. Raises: ValueError."""
        if document.get("id") is not None:
            text_of(document["id"], "id")
        fields = _beside(document, ("inputs", "expected"))
        if "outputs" in fields:
            outputs = [checked(output, "outputs", ("name",)) for output in listed(document, "outputs")]
            fields["outputs"] = [_beside(output, (), f"{named(output, 'outputs')}: ") for output in outputs]
        of_inputs = {
            tensor["name"]: _beside(tensor, OF_TENSORS, f"{named(tensor, 'inputs')}: ") for tensor in document["inputs"]
        }
        if any("binary_data_size" in own.get("parameters", {}) for own in of_inputs.values()):
            raise ValueError("an input has both its data and a binary_data_size")
        key = orjson.dumps([{**fields, "id": None}, of_inputs], option=orjson.OPT_SORT_KEYS)
        return cls(fields, of_inputs, key)


def _beside(holder: Mapping[str, Any], own: Collection[str], where: str = "") -> dict[str, Any]:
    """What a request or a tensor says beside its own fields; a known one that is null is none. Raises: ValueError."""
    parameters_of(holder, where)
    told = {name: value for name, value in holder.items() if name not in own and not (value is None and name in _MAY_BE_NULL)}
    for name, value in told.items():
        try:
            orjson.dumps({name: value})
            json.dumps(value, allow_nan=False)  # of which orjson makes null
        except (orjson.JSONEncodeError, ValueError) as exc:
            raise ValueError(f"{where}{name} {brief(value)}: expected what JSON can say: {exc}") from exc
    return told


_MAY_BE_NULL: Final = ("id", "parameters", "outputs")
_NO_EXTRAS: Final = Extras()


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A v2 request's inputs by name, their datatypes, and the outputs it should get, if that is known.

    source: where it was read, for messages.
    """

    inputs: Tensors
    datatypes: dict[str, str]
    expected: Tensors | None = None
    source: str = ""
    extras: Extras = _NO_EXTRAS

    @property
    def rows(self) -> int | None:
        """The first dimension that all inputs share; None if they do not."""
        sizes = {array.shape[:1] for array in self.inputs.values()}
        return int(next(iter(sizes))[0]) if len(sizes) == 1 and () not in sizes else None


def synthetic(spec: LoadSpec, inputs: Sequence[dict[str, Any]]) -> list[tuple[Tensors, dict[str, str]]]:
    """Make a variety of inputs from v2 metadata: arrays and datatypes by name. The seed decides them.

    -1 in the first place becomes rows, elsewhere length (the same for all inputs of a request). Raises: UsageError.
    """
    if not inputs:
        raise UsageError(f"model {spec.model!r} states no inputs in its metadata: give requests with --payload")
    rows, length = range_of("--rows", spec.rows), range_of("--length", spec.length)
    values = values_of("--values", spec.values, inputs)
    check_size("--rows", rows[1], length[1], inputs)
    rng = np.random.default_rng([spec.seed, _PAYLOAD_STREAM])
    made: list[tuple[Tensors, dict[str, str]]] = []
    used_bytes = 0
    for _ in range(_VARIETY):
        row_count, long = int(rng.integers(rows[0], rows[1] + 1)), int(rng.integers(length[0], length[1] + 1))
        arrays: Tensors = {}
        for tensor in inputs:
            name, shape = str(tensor["name"]), shape_of(tensor, row_count, long)
            arrays[name] = _fill(name, str(tensor["datatype"]), shape, values.get(name), rng)
        made.append((arrays, {str(tensor["name"]): str(tensor["datatype"]) for tensor in inputs}))
        used_bytes += sum(array.nbytes for array in arrays.values())
        if used_bytes > _POOL_BYTES:
            break
    return made


def check_joined(option: str, rows: int, requests: Iterable[Request]) -> None:
    """Raises: UsageError, if one of these is too large once it is joined to so many rows. option: as messages name it."""
    of_row = (sum(array.nbytes for array in each.inputs.values()) // each.rows for each in requests if each.rows)
    check_bytes(f"{option} {rows}: joined", rows * max(of_row, default=0))


def _fill(
    name: str, datatype: str, shape: Sequence[int], limits: tuple[Decimal, Decimal] | None, rng: np.random.Generator
) -> np.ndarray:
    """limits: as of `values_of`."""
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
        drawn = np.uint64 if high > np.iinfo(np.int64).max else np.int64
        return rng.integers(low, high + 1, shape, dtype=drawn).astype(dtype)
    if limits:
        return rng.uniform(float(limits[0]), float(limits[1]), shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def http_requests(spec: LoadSpec, address: Address, model: str, made: Iterable[tuple[Tensors, dict[str, str]]]) -> list[bytes]:
    """Whole HTTP requests for these inputs. Raises: UsageError."""
    return [_http(spec, address, model, *encode_body(spec, arrays, datatypes)) for arrays, datatypes in made]


def grpc_requests(spec: LoadSpec, model: str, made: Iterable[tuple[Tensors, dict[str, str]]]) -> list[bytes]:
    """Serialised ModelInferRequest messages with raw contents."""
    return [grpc_request(spec, model, arrays, datatypes) for arrays, datatypes in made]


def grpc_request(
    spec: LoadSpec, model: str, arrays: Tensors, datatypes: Mapping[str, str], extras: Extras = _NO_EXTRAS
) -> bytes:
    """The same of one. Raises: UsageError, for what a message has no place for."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name=model, model_version=spec.version)
    for name, array in arrays.items():
        tensor = message.inputs.add(name=name, datatype=datatypes[name], shape=array.shape)
        message.raw_input_contents.append(bytes(tensor_to_bytes(array)))
        _tell(tensor, extras.of_inputs.get(name, {}), ("parameters",))
    _tell(message, extras.fields, ("id", "parameters", "outputs"))
    serialised: bytes = message.SerializeToString()
    return serialised


def _tell(message: Any, fields: Mapping[str, Any], known: Sequence[str]) -> None:
    """Fill in what its JSON says. message: of the protocol's. Raises: UsageError, for what has no place in it."""
    try:
        for name, value in fields.items():
            if name not in known:
                raise ValueError(f"{name!r} is none of {', '.join(known)}")
            if name == "parameters":
                for key, given in value.items():
                    setattr(message.parameters[key], _kind_of_parameter(key, given), given)
            elif name == "outputs":
                for output in value:
                    _tell(message.outputs.add(), output, ("name", "parameters"))
            else:
                setattr(message, name, value)
    except ValueError as exc:
        raise UsageError(f"cannot be said over gRPC: {exc}") from exc


def _kind_of_parameter(name: str, value: object) -> str:
    """The field of an InferParameter. Raises: ValueError."""
    if name.startswith("binary_data"):
        raise ValueError(f"parameter {name!r} is of REST's binary form")
    if isinstance(value, int) and not isinstance(value, bool):
        return "int64_param" if value < 1 << 63 else "uint64_param"
    kinds = {bool: "bool_param", str: "string_param", float: "double_param"}
    if type(value) not in kinds:
        raise ValueError(f"parameter {name!r}: {value!r} is no true or false, number or text")
    return kinds[type(value)]


def from_files(spec: LoadSpec, address: Address, model: str) -> list[bytes]:
    """Read the spec's payload files, a folder's in order of name. JSON files are v2 requests (for invocations, a .json file is
    the body as it is); others are raw bodies (for rest-binary, the raw request of one input).

    `spec.rows` above 1 joins requests to so many rows; `spec.lengths` leaves others out. Raises: UsageError.
    """
    least, most = range_of("--rows", spec.rows)
    if most > 1 or spec.lengths:
        pad, requests = _paddings(spec.pad), read_requests(spec.payloads)
        if spec.lengths:
            shortest, longest = range_of("lengths", spec.lengths)
            requests = [request for request in requests if shortest <= length_of(request, pad) <= longest]
        check_joined("--rows", most, requests)
        return _encoded(spec, address, model, joined(requests, least, most, pad, seed=spec.seed))
    made: list[bytes] = []
    for path in paths_of(spec.payloads):
        if path.suffix == ".jsonl":
            made += _encoded(spec, address, model, _read(path))
            continue
        body = _contents(path)
        is_json = path.suffix == ".json"
        if spec.protocol == "invocations":
            kind = spec.content_type or ("application/json" if is_json else "application/octet-stream")
            made.append(_http(spec, address, model, body, {"Content-Type": kind}))
        elif is_json:
            (request,) = _read(path)
            if spec.protocol == "rest-json":
                body = _as_written(body, request.extras)
                made.append(_http(spec, address, model, body, {"Content-Type": "application/json"}))
            else:
                made += _encoded(spec, address, model, [request])
        elif spec.protocol == "rest-binary":
            raw = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0"}
            made.append(_http(spec, address, model, body, raw))
        else:
            raise UsageError(f"payload {path}: protocol {spec.protocol} takes v2 requests in .json and .jsonl files")
    if not made:
        raise UsageError(f"payload {', '.join(spec.payloads)}: no request in it")
    return made


def _as_written(body: bytes, extras: Extras) -> bytes:
    """A v2 request as its file has it, but for what is not sent: the answer that is expected, fields that are null, and a byte
    order mark, which JSON must not have (RFC 8259, 8.1).
    """
    document = parsed(body)
    inputs = [{**{name: each[name] for name in OF_TENSORS}, **extras.of_inputs[each["name"]]} for each in document["inputs"]]
    told = {**extras.fields, "inputs": inputs}
    return body.removeprefix(codecs.BOM_UTF8) if told == document else json.dumps(told).encode()


def read_requests(names: Iterable[str]) -> list[Request]:
    """The v2 requests of .json and .jsonl files, and of those in folders. Raises: UsageError, for any other file too."""
    found: list[Request] = []
    for path in paths_of(names):
        if path.suffix not in (".json", ".jsonl"):
            raise UsageError(f"payload {path}: expected v2 requests in .json and .jsonl files")
        found += _read(path)
        if len(found) > _MAX_FILES:
            raise UsageError(f"payload {path}: over {_MAX_FILES} requests")
    if not found:
        raise UsageError(f"payload {', '.join(names)}: no request in it")
    return found


def distinct(requests: Iterable[Request]) -> list[Request]:
    """Each once, in their order."""
    known: dict[tuple[object, ...], Request] = {}
    for request in requests:
        tensors = ((name, array.shape, bytes(tensor_to_bytes(array))) for name, array in request.inputs.items())
        known.setdefault((request.extras.key, *tensors), request)
    return list(known.values())


def joined(requests: Sequence[Request], least: int, most: int, pad: Mapping[str, float], *, seed: int = 0) -> list[Request]:
    """Some requests of `least` to `most` rows, each one of these and its neighbours in length, as a batch would be formed.

    pad: input -> what fills the shorter ones along axis 1; other inputs are joined only where their rows have one shape.
    Raises: UsageError, if a request has no rows.
    """
    groups: dict[object, list[Request]] = {}
    for request in requests:
        if not request.rows:
            raise UsageError(
                f"payload {request.source}: its inputs have no common first dimension: it cannot be joined to rows"
            )
        shapes = ((name, array.shape[2 if name in pad else 1 :]) for name, array in sorted(request.inputs.items()))
        groups.setdefault((request.extras.key, *shapes), []).append(request)
    ordered = [sorted(group, key=lambda request: length_of(request, pad)) for group in groups.values()]
    places = [(group, at) for group in ordered for at in range(len(group))]
    rng = np.random.default_rng([seed, _PAYLOAD_STREAM])
    made: list[Request] = []
    used_bytes = 0
    for number in rng.permutation(len(places))[:_VARIETY]:
        group, at = places[number]
        rows = int(rng.integers(least, most + 1))
        # A group too small for so many rows is gone through again.
        chosen, size, at = [], 0, max(0, min(at, len(group) - rows))
        while size < rows:
            chosen.append(group[at % len(group)])
            size, at = size + (chosen[-1].rows or 0), at + 1
        made.append(_join(chosen, rows, pad))
        used_bytes += sum(array.nbytes for array in made[-1].inputs.values())
        if used_bytes > _POOL_BYTES:
            break
    return made


def _join(requests: Sequence[Request], rows: int, pad: Mapping[str, float]) -> Request:
    inputs: Tensors = {}
    for name, first in requests[0].inputs.items():
        arrays = [request.inputs[name] for request in requests]
        if name in pad:
            longest = max(array.shape[1] for array in arrays)
            filled = np.full((sum(map(len, arrays)), longest, *first.shape[2:]), pad[name], first.dtype)
            at = 0
            for array in arrays:
                filled[at : at + len(array), : array.shape[1]] = array
                at += len(array)
            arrays = [filled]
        inputs[name] = np.concatenate(arrays)[:rows]
    return Request(inputs, requests[0].datatypes, source=requests[0].source, extras=requests[0].extras)


def length_of(request: Request, pad: Iterable[str]) -> int:
    """The longest axis 1 among the inputs that are padded; 0 if it has none."""
    return max((array.shape[1] for name, array in request.inputs.items() if name in pad and array.ndim > 1), default=0)


def _encoded(spec: LoadSpec, address: Address, model: str, requests: Iterable[Request]) -> list[bytes]:
    made: list[bytes] = []
    for request in requests:
        said = request.inputs, request.datatypes, request.extras
        try:
            if spec.protocol == "grpc":
                made.append(grpc_request(spec, model, *said))
            else:
                made.append(_http(spec, address, model, *encode_body(spec, *said)))
        except UsageError as exc:
            raise UsageError(f"payload {request.source}: {exc}") from exc
    return made


def paths_of(names: Iterable[str]) -> list[Path]:
    """The files of payloads, a folder's in order of name. Raises: UsageError."""
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        paths += sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
        if len(paths) > _MAX_FILES:
            raise UsageError(f"payload {name}: over {_MAX_FILES} files")
    if not paths:
        raise UsageError("payload: the folder has no files")
    return paths


def _contents(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            body = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: no path may have a null byte
        raise UsageError(f"payload {path}: cannot be read: {exc}") from exc
    if len(body) > _MAX_FILE_BYTES:
        raise UsageError(f"payload {path}: over {_MAX_FILE_BYTES >> 20} MiB")
    return body


def _read(path: Path) -> Iterator[Request]:
    body = _contents(path)
    if path.suffix == ".json":
        yield _request(body, str(path))
        return
    for number, line in enumerate(body.splitlines(), start=1):
        if line.strip():
            yield _request(line, f"{path}: line {number}")


def _request(text: bytes, source: str) -> Request:
    try:
        document = _json(text)
        inputs, datatypes = tensors_of(document, "inputs")
        expected = tensors_of(document["expected"], "outputs")[0] if document.get("expected") is not None else None
        extras = Extras.of(document)
    except ValueError as exc:
        raise UsageError(f"payload {source}: not a v2 inference request: {exc}") from exc
    return Request(inputs, datatypes, expected, source, extras)


def _json(text: bytes) -> Any:
    """Raises: ValueError, also for what has no inputs."""
    document = parsed(text)
    try:
        listed(document, "inputs")
    except ValueError as exc:
        raise ValueError(f"{exc}; --protocol invocations sends a .json file of any form as it is") from exc
    return document


def _paddings(texts: Iterable[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise UsageError(f"pad {text!r}: expected NAME=VALUE") from None
    return found


def encode_body(
    spec: LoadSpec, arrays: Tensors, datatypes: dict[str, str], extras: Extras = _NO_EXTRAS
) -> tuple[bytes, dict[str, str]]:
    """The body and its headers, in the spec's protocol."""
    of = extras.of_inputs
    if spec.protocol == "rest-binary":
        raw = {name: bytes(tensor_to_bytes(array)) for name, array in arrays.items()}
        described = [
            {
                **of.get(name, {}),
                "name": name,
                "datatype": datatypes[name],
                "shape": list(array.shape),
                "parameters": {**of.get(name, {}).get("parameters", {}), "binary_data_size": len(raw[name])},
            }
            for name, array in arrays.items()
        ]
        parameters = {"binary_data_output": True, **extras.fields.get("parameters", {})}
        head = orjson.dumps({**extras.fields, "inputs": described, "parameters": parameters})
        kind = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
        return head + b"".join(raw.values()), kind
    tensors: list[dict[str, Any]] = []
    for name, array in arrays.items():
        if datatypes[name] in ("FP16", "BF16"):
            raise UsageError(f"input {name!r}: {datatypes[name]} has no JSON form: use --protocol rest-binary or grpc")
        flat: Any = array.reshape(-1)
        data = [item.decode() for item in flat] if array.dtype == object else np.ascontiguousarray(flat)
        own = {"name": name, "datatype": datatypes[name], "shape": list(array.shape), "data": data}
        tensors.append({**of.get(name, {}), **own})
    document = {**extras.fields, "inputs": tensors}
    if not all(np.isfinite(array).all() for array in arrays.values() if array.dtype.kind == "f"):
        # As words, which JSON lacks and v2 servers know; orjson would make null of them.
        return json.dumps(document, default=np.ndarray.tolist).encode(), {"Content-Type": "application/json"}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), {"Content-Type": "application/json"}


def infer_path(spec: LoadSpec, address: Address, model: str) -> str:
    """What a REST request asks for."""
    return address.path if spec.protocol == "invocations" else address.model_path(model, spec.version) + "/infer"


def _http(spec: LoadSpec, address: Address, model: str, body: bytes, headers: dict[str, str]) -> bytes:
    path = infer_path(spec, address, model)
    fields = address.headers(spec, {"Host": address.authority, **headers})
    lines = [
        f"POST {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items()),
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
