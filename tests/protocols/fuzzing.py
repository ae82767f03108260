"""Requests with tensors, well-formed, mutated and random, and what must hold of them. Each case comes from its seed."""

import json
from math import prod
from random import Random
from typing import Any, Final

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from gateway.errors import InvalidArgument, NotFound
from gateway.protocols import grpc, rest
from gateway.protocols.generate import GenerateCodec
from gateway.protocols.repeated_messages import RepeatedMessages
from gateway.protocols.tensors import TakesLong
from gateway.types import InferRequest, RegionRef
from gateway.wire.tensors import Buffer

DATATYPES: Final = tuple(name for name in NUMPY if name not in ("FP16", "BF16"))
DECLARED: Final = (InvalidArgument, NotFound, TakesLong)
_CONTENTS: Final = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
_PARTS: Final = (
    b"NaN", b"-Infinity", b"null", b"true", b"1e999", b"-1", b"1.5", b"18446744073709551616", b'"x"', b"[]", b"[[1]]", b"{}",
    b",", b"[", b"]", b"\xff", b'"\\ud800"', b'"shape":[-1]', b'"shape":[9223372036854775807,2]', b'"datatype":"FP16"',
    b'"parameters":{"binary_data_size":3}', b'"parameters":{"classification":"a"}',
    b'"parameters":{"shared_memory_region":"r","shared_memory_byte_size":4}', b'"id":7', b"\0\0\0\0", b"\x7f\xff\xff\xff",
)  # fmt: skip


def check(seed: int) -> None:
    """Read one request by each of the decoders: a request as the model takes it, or an error that is declared."""
    random = Random(seed)
    spec = _spec(random)
    arrays = {tensor.name: _array(random, tensor) for tensor in spec.inputs}
    kind = seed % 4
    if kind == 0:
        _check_repeated(random, spec, arrays)
    elif kind == 1:
        generate = GenerateCodec("m", "1", spec, None, 8)
        text = json.dumps({name: _plain(array) for name, array in arrays.items()} | {"p": 1}).encode()
        _decoded(spec, lambda: generate.decode(_changed(random, text), 0))
    else:
        data = _message(random, arrays).SerializeToString()
        changed = _changed(random, data)
        _check_message(changed, spec)
        _check_repeated_message(data, changed if random.random() < 0.5 else _other_bytes(random, data), spec)


def _check_repeated(random: Random, spec: ModelSpec, arrays: dict[str, np.ndarray]) -> None:
    """However many were read before it, a body is the same request, or the same error."""
    in_haste = random.random() < 0.5
    codec = rest.RestCodec("m", "1", spec, None, 8, in_haste=in_haste)
    body, header_bytes = _rest(random, arrays)
    others = [_rest(random, {tensor.name: _array(random, tensor) for tensor in spec.inputs}) for _ in range(2)]
    for before in (*others, (body, header_bytes)):
        _outcome(codec, *before)
    changed = _changed(random, body) if random.random() < 0.8 else _other_numbers(random, body)
    fresh = rest.RestCodec("m", "1", spec, None, 8, in_haste=in_haste)
    outcomes = [_outcome(each, changed, header_bytes) for each in (codec, fresh)]
    assert outcomes[0] == outcomes[1]
    _decoded(spec, lambda: codec.decode(changed, header_bytes, 0, _no_region))


def _check_repeated_message(before: bytes, data: bytes, spec: ModelSpec) -> None:
    """What is known to be like a message that was read is the request as which it would be read."""
    codec = grpc.GrpcCodec("m", "1", spec, None)
    request = _decoded(spec, lambda: codec.decode(grpc.parse(before), 0, None, _no_region))
    if request is None:
        return
    repeated = RepeatedMessages()
    repeated.remember(before, grpc.parse(before), codec, request)
    known = repeated.find(data)
    if known is not None:
        assert _fields(known.request(data, 5, 1.5)) == _fields(codec.decode(grpc.parse(data), 5, 1.5, _no_region))


def _other_bytes(random: Random, data: bytes) -> bytes:
    """As many, some of them others, mostly at the end."""
    other = bytearray(data)
    for _ in range(random.randint(1, 5)):
        at = len(other) - 1 - min(random.randrange(len(other)), random.randrange(len(other)))
        other[at] = random.randrange(256)
    return bytes(other)


def _outcome(codec: rest.RestCodec, body: bytes, header_bytes: int | None) -> Any:
    """All that a body is read as."""
    try:
        request = codec.decode(body, header_bytes, 5, _no_region)
    except DECLARED as exc:
        return type(exc), str(exc)
    return _fields(request)


def _fields(request: InferRequest) -> Any:
    assert request.unmarked or not request.plain
    fields = {name: getattr(request, name) for name in request.__struct_fields__ if name not in ("inputs", "plain")}
    return repr(fields), {name: (array.dtype, array.shape, repr(array.tolist())) for name, array in request.inputs.items()}


def _other_numbers(random: Random, body: bytes) -> bytes:
    """The same text with other digits, mostly."""
    return bytes(random.choice(b"0123456789") if chr(byte).isdigit() and random.random() < 0.3 else byte for byte in body)


def _check_message(data: bytes, spec: ModelSpec) -> None:
    """However it is read, whole or in parts, it is the same request; or none."""
    codec = grpc.GrpcCodec("m", "1", spec, None)
    whole = _decoded(spec, lambda: codec.decode(grpc.parse(data), 0, None, _no_region))
    try:
        parts = grpc.parts_of(data)
    except InvalidArgument:
        return  # more than one that a model could be asked with
    in_parts = _decoded(spec, lambda: codec.decode(grpc.parse(parts.head), 0, None, _no_region, parts.raw))
    if whole is not None and in_parts is not None:
        for name, array in whole.inputs.items():
            np.testing.assert_array_equal(array, in_parts.inputs[name])
    assert (whole is None) == (in_parts is None) or not _canonical(data)


def _canonical(data: bytes) -> bool:
    """Whether protobuf would write these bytes for what it reads of them: else unknown fields may lie between."""
    return bool(pb.ModelInferRequest.FromString(data).SerializeToString(deterministic=True) == data)


def _decoded(spec: ModelSpec, decode: Any) -> InferRequest | None:
    try:
        request: InferRequest = decode()
    except DECLARED:
        return None
    for name, array in request.inputs.items():
        expected = spec.input_by_name[name]
        assert array.dtype == NUMPY[expected.datatype]
        assert len(array.shape) == len(expected.shape)
        assert all(size in (-1, got) for size, got in zip(expected.shape[1:], array.shape[1:], strict=True))
        assert array.size <= 10_000
        if array.dtype.hasobject:
            assert all(type(element) is bytes for element in array.flat)
    return request


def _no_region(ref: RegionRef, asked_ns: int) -> Buffer:
    raise NotFound(f"Unable to find shared memory region: '{ref.region}'")


def _spec(random: Random) -> ModelSpec:
    inputs = tuple(
        TensorSpec(f"i{index}", random.choice(DATATYPES), (-1, random.choice((-1, 4)))) for index in range(random.randint(1, 2))
    )
    return ModelSpec("m", inputs, (TensorSpec("o", "FP32", (-1, 1)),), 8)


def _array(random: Random, spec: TensorSpec) -> np.ndarray:
    shape = (random.choice((1, 1, 2, 8)), spec.shape[1] if spec.shape[1] > 0 else random.choice((0, 1, 5, 30)))
    if spec.datatype == "BYTES":
        array = np.empty(shape, object)
        for index in np.ndindex(shape):
            array[index] = random.choice((b"", b"a", 'ä\n"'.encode(), b"x" * 40))
        return array
    raw = random.randbytes(prod(shape) * NUMPY[spec.datatype].itemsize)
    if spec.datatype == "BOOL":
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, NUMPY[spec.datatype]).reshape(shape)


def _plain(array: np.ndarray) -> Any:
    if array.dtype.hasobject:
        return [[element.decode() for element in row] for row in array]
    return array.tolist()


def _raw(array: np.ndarray) -> bytes:
    if array.dtype.hasobject:
        return b"".join(len(element).to_bytes(4, "little") + element for element in array.flat)
    return array.tobytes()


def _datatype(array: np.ndarray) -> str:
    return next(name for name, dtype in NUMPY.items() if dtype == array.dtype and name != "BF16")


def _rest(random: Random, arrays: dict[str, np.ndarray]) -> tuple[bytes, int | None]:
    entries: list[dict[str, Any]] = []
    tail = b""
    for name, array in arrays.items():
        entry: dict[str, Any] = {"name": name, "datatype": _datatype(array), "shape": list(array.shape)}
        if random.random() < 0.5:
            raw = _raw(array)
            tail += raw
            entry["parameters"] = {"binary_data_size": len(raw)}
        else:
            plain = _plain(array)
            entry["data"] = plain if random.random() < 0.5 else [element for row in plain for element in row]
        entries.append(entry)
    message: dict[str, Any] = {"inputs": entries}
    if random.random() < 0.2:
        message["outputs"] = [{"name": "o", "parameters": {"classification": random.choice((0, 1, -1))}}]
    if random.random() < 0.2:
        message["parameters"] = random.choice(({"timeout": 5}, {"priority": "a"}, {"a": 1.5}, {"binary_data_output": True}))
    head = json.dumps(message).encode()
    if not tail and random.random() < 0.5:
        return head, None
    return head + tail, random.choice((len(head), len(head), len(head), len(head) - 1, 0, None))


def _message(random: Random, arrays: dict[str, np.ndarray]) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m", id=random.choice(("", "a")))
    typed = random.random() < 0.5
    for name, array in arrays.items():
        datatype = _datatype(array)
        tensor = message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if typed and datatype in _CONTENTS:
            getattr(tensor.contents, _CONTENTS[datatype]).extend(array.reshape(-1).tolist())
        else:
            message.raw_input_contents.append(_raw(array))
    if random.random() < 0.2:
        message.parameters[random.choice(("timeout", "a", "gateway.x"))].int64_param = random.choice((1, -1, 1 << 62))
    if random.random() < 0.2:
        message.outputs.add(name=random.choice(("o", "x"))).parameters["classification"].int64_param = random.choice((0, 3))
    return message


def _changed(random: Random, data: bytes) -> bytes:
    """Half of the time some slips."""
    if random.random() < 0.5:
        return data
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(data) + 1)
        kind = random.randrange(4)
        if kind == 0:
            new = random.randbytes(random.randint(1, 6))
        elif kind == 1:
            begin = random.randrange(len(data) + 1)
            new = data[begin : begin + random.randint(0, 60)]
        else:
            new = random.choice(_PARTS)
        data = data[:at] + new + data[at + random.choice((0, 0, 1, 2, 10)) :]
    return data
