"""gRPC messages of the v2 protocol to requests and back: pure functions of a message and a model's specs.

The messages are tritonclient's, so that no second copy of the `inference` protobuf package exists in the process (two that
register it clash). Input bytes become views on `raw_input_contents`; responses are always raw.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from backends.base import ModelSpec, Tensors
from backends.datatypes import NUMPY, datatype_of
from gateway.errors import Code, InvalidArgument, Unavailable
from gateway.protocols.messages import pb
from gateway.protocols.tensors import (
    LONG_BYTES,
    OF_TENSORS,
    ReadRegion,
    WriteRegion,
    check_count,
    check_input,
    check_most,
    check_outputs,
    check_own,
    check_parameter,
    check_parameters,
    check_raw,
    check_region,
    check_texts,
    check_written,
    classify,
    count_rows,
    deadline_after,
    natural,
    out_of_range,
    shape_key,
    want_once,
)
from gateway.types import InferRequest, InferResponse, OutputRequest, ParameterValue, RegionRef
from gateway.wire.grpc_headers import CallStatus
from gateway.wire.tensors import Buffer, shaped, tensor_from_bytes, tensor_to_bytes

if TYPE_CHECKING:
    from gateway.config import Ragged

STATUS: Final[dict[Code, CallStatus]] = {
    Code.INVALID_ARGUMENT: CallStatus.INVALID_ARGUMENT,
    Code.ALREADY_EXISTS: CallStatus.ALREADY_EXISTS,
    Code.NOT_FOUND: CallStatus.NOT_FOUND,
    Code.NOT_READY: CallStatus.UNAVAILABLE,
    Code.UNAUTHENTICATED: CallStatus.UNAUTHENTICATED,
    Code.FORBIDDEN: CallStatus.PERMISSION_DENIED,
    Code.TOO_LARGE: CallStatus.INVALID_ARGUMENT,
    Code.OVERLOADED: CallStatus.UNAVAILABLE,
    Code.LIMITED: CallStatus.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED: CallStatus.DEADLINE_EXCEEDED,
    Code.CANCELLED: CallStatus.CANCELLED,
    Code.BACKEND_FAILED: CallStatus.INTERNAL,
    Code.BACKEND_UNREACHABLE: CallStatus.UNAVAILABLE,
    Code.UNSUPPORTED: CallStatus.UNIMPLEMENTED,
    Code.UNSUPPORTED_MEDIA_TYPE: CallStatus.INVALID_ARGUMENT,
    Code.CONFIG: CallStatus.INTERNAL,
    Code.INTERNAL: CallStatus.INTERNAL,
}

# Source: KServe grpc_predict_v2.proto, InferTensorContents. FP16 and BF16 have no typed form.
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
# Of ModelInferRequest: inputs and outputs; raw_input_contents.
_TENSOR_FIELDS: Final = (5, 6)
_RAW_FIELD: Final = 7
# Kinds of fields: those of this message are delimited. Source: protobuf's encoding.md.
_VARINT: Final = 0
_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_GROUPS: Final = {3: 1, 4: -1}  # what begins and ends one
RAW_INPUT: Final = bytes([_RAW_FIELD << 3 | _DELIMITED])  # how each of them begins
_RAW_OUTPUT: Final = bytes([6 << 3 | _DELIMITED])  # of a ModelInferResponse
_INFER_RESPONSE: Final = bytes([2 << 3 | _DELIMITED])  # of a ModelStreamInferResponse
_LONG_RAW_BYTES: Final = 256 << 10
_SHORT_RAW_BYTES: Final = 16 << 10
_HEADS_KEPT: Final = 256
_MANY: Final = 1 << 14  # elements of an output: below it, it is written in no time
_LONGEST_VARINT: Final = 10
_MOST_FIELDS: Final = 4096
_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"


class Parts(NamedTuple):
    """Of a long message. head: what is to be parsed. raw: the raw contents. long: the head lacks the tensors, parsing which
    would take long."""

    head: bytes
    raw: Sequence[Buffer]
    long: bool


class GrpcCodec:
    """Reads requests for one model version and writes its answers."""

    def __init__(self, model: str, version: str, spec: ModelSpec, ragged: "Ragged | None", *, in_haste: bool = False) -> None:
        """in_haste: what takes long is to be refused with `TakesLong`."""
        self.model = model
        self.version = version
        self.spec = spec
        self.ragged = ragged
        self._in_haste = in_haste
        self._heads: dict[tuple[str, tuple[int, ...]], bytes] = {}  # see _like_others

    def at_leisure(self) -> "GrpcCodec":
        """The same, not in haste."""
        other = copy.copy(self)
        other._in_haste = False
        return other

    def decode(
        self,
        message: pb.ModelInferRequest,
        arrival_ns: int,
        remaining_s: float | None,
        read_region: ReadRegion,
        raw: Sequence[Buffer] | None = None,
    ) -> InferRequest:
        """Read and validate one request. raw: its raw contents, where they are not in the message.

        remaining_s: until the call's own deadline; None when it has none. Inputs are views on the message's bytes, or copies of
        shared memory. Raises: InvalidArgument, and what read_region raises; TakesLong, in haste.
        """
        model, spec = self.model, self.spec
        raw = message.raw_input_contents if raw is None else raw
        inputs = _inputs(message, raw, model, spec, read_region, arrival_ns, in_haste=self._in_haste)
        parameters: dict[str, ParameterValue] = {}
        priority = 0
        deadline_ns = None if remaining_s is None else deadline_after(arrival_ns, remaining_s * 1e6)
        if message.parameters:
            parameters = _parameters(message.parameters)
            priority = natural(parameters.pop("priority", 0), "priority", "request")
            timeout_us = parameters.pop("timeout", 0)
            if type(timeout_us) is not int:
                timeout_us = natural(timeout_us, "timeout", "request")
            given_ns = deadline_after(arrival_ns, timeout_us) if timeout_us > 0 else None
            if given_ns is not None:
                deadline_ns = given_ns if deadline_ns is None else min(deadline_ns, given_ns)
            if parameters and not spec.reads_parameters:
                check_own(parameters, spec.own_arguments)
                check_parameters(parameters, "request")
        return InferRequest(
            model, self.version, message.id, inputs, count_rows(spec, model, inputs), arrival_ns,
            _outputs(message.outputs, model, spec) if message.outputs else (), parameters=parameters,
            deadline_ns=deadline_ns, priority=priority, shape_key=shape_key(spec, self.ragged, inputs, parameters),
        )  # fmt: skip

    def encode(
        self, request: InferRequest, response: InferResponse, write_region: WriteRegion
    ) -> "pb.ModelInferResponse | ShortReply | LongReply":
        """Write an answer: raw contents in the order of outputs, empty for those that went to shared memory.

        Raises: InvalidArgument (an output cannot be classified, or its region is too small), and what write_region raises.
        """
        if len(response.outputs) == 1 and not (request.outputs or response.id or response.parameters):
            ((name, array),) = response.outputs.items()
            head = self._heads.get((name, array.shape)) or self._like_others(response, name, array)
            if head:
                return ShortReply(head + array.tobytes())
        spec = self.spec
        message = pb.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
        asked = {output.name: output for output in request.outputs if output.classification or output.region}
        long: LongReply | None = None
        for name, array in response.outputs.items():
            wish = asked.get(name)
            if wish is not None and wish.classification:
                labels = spec.output_by_name[name].labels
                array = classify(array, wish.classification, labels, batched=spec.max_rows > 0, in_haste=self._in_haste)
            if array.size > _MANY or array.dtype.hasobject:
                check_written(array, in_haste=self._in_haste, region=wish is not None and wish.region is not None)
            raw = tensor_to_bytes(array)
            if wish is not None and wish.region is not None:
                write_region(wish.region, raw, request.arrival_ns)
                raw = b""
            message.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
            if len(raw) > _LONG_RAW_BYTES and long is None:
                long = LongReply(message, list(message.raw_output_contents))
                message.ClearField("raw_output_contents")
            if long is None:
                message.raw_output_contents.append(bytes(raw))
            else:
                long.raw.append(raw)
        for key, value in response.parameters.items():
            _set_parameter(message.parameters[key], value)
        return message if long is None else long

    def _like_others(self, response: InferResponse, name: str, array: np.ndarray) -> bytes:
        """What every answer is before its raw contents that has one output of such a shape, and nothing unusual; empty: it is
        not so short."""
        datatype = self.spec.output_by_name[name].datatype
        if datatype == "BYTES" or array.dtype != NUMPY[datatype] or array.nbytes > _SHORT_RAW_BYTES:
            return b""
        message = pb.ModelInferResponse(model_name=response.model, model_version=response.version)
        message.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if len(self._heads) >= _HEADS_KEPT:  # clients choose shapes, and could choose many
            self._heads.clear()
        head: bytes = message.SerializeToString() + _RAW_OUTPUT + as_varint(array.nbytes)
        self._heads[name, array.shape] = head
        return head


class ShortReply(msgspec.Struct, frozen=True):
    """A short answer as it goes on the wire: most of it is the same each time, and protobuf would write all of it anew."""

    data: bytes

    def message(self) -> pb.ModelInferResponse:
        return pb.ModelInferResponse.FromString(self.data)


@dataclass(frozen=True, slots=True)
class LongReply:
    """An answer whose raw contents are sent from where they are: protobuf would copy each of them three times.

    message: without them.
    """

    message: pb.ModelInferResponse
    raw: list[Buffer]

    def parts(self) -> list[Buffer]:
        """The whole message, as it goes on the wire."""
        parts: list[Buffer] = [self.message.SerializeToString()]
        for raw in self.raw:
            parts += (_RAW_OUTPUT + as_varint(len(raw)), raw)
        return parts

    def streamed(self) -> list[Buffer]:
        """Likewise, as a ModelStreamInferResponse."""
        parts = self.parts()
        return [_INFER_RESPONSE + as_varint(sum(map(len, parts))), *parts]


def as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def trailers(error: Exception) -> tuple[tuple[str, str], ...]:
    """When a retry is worth it, of an error that can be retried.

    `retry-after` in seconds, as over HTTP, for people and proxies; `grpc-retry-pushback-ms` is what gRPC clients with a retry
    policy obey: neither is sooner. Source: gRFC A6, "Pushback".
    """
    if not isinstance(error, Unavailable):
        return ()
    after_ms = max(1, ceil(round(error.retry_s * 1000, 6)))  # of nanoseconds, not of what a float adds to them
    return (("retry-after", f"{after_ms / 1000:.3f}".rstrip("0").rstrip(".")), ("grpc-retry-pushback-ms", str(after_ms)))


def parse(data: Buffer) -> pb.ModelInferRequest:
    """Raises: InvalidArgument."""
    try:
        return pb.ModelInferRequest.FromString(data)
    except DecodeError:
        raise _no_message() from None


def parts_of(data: Buffer) -> Parts:
    """A long message in parts, of which only the head is left to parse: what is raw is neither looked at nor copied.

    Raises: InvalidArgument, for what is no message, or more than one that a model could be asked with.
    """
    view = memoryview(data).toreadonly()
    at = fields = tensor_bytes = head_bytes = depth = 0  # depth: within groups
    head: list[Buffer] = []
    tensors: list[Buffer] = []
    raw: list[memoryview] = []
    while at < len(view):
        begin = at
        key, at = _varint(view, at)
        field, kind = key >> 3, key & 7
        size, start = _varint(view, at) if kind in (_VARINT, _DELIMITED) else (0, at)
        at = start + (size if kind == _DELIMITED else _FIXED_BYTES.get(kind, 0))
        depth += _GROUPS.get(kind, 0)
        if at > len(view):
            raise _no_message()
        fields += 1
        if fields > _MOST_FIELDS:
            raise InvalidArgument(f"more than {_MOST_FIELDS} parameters, inputs, outputs and other fields in one request")
        if depth or kind != _DELIMITED:  # no field that we know: what it is, and whether it is whole, the parser sees
            head.append(view[begin:at])
            head_bytes += at - begin
        elif field == _RAW_FIELD:
            raw.append(view[start:at])
        elif field in _TENSOR_FIELDS:
            tensors.append(view[begin:at])
            tensor_bytes += size
        else:
            head.append(view[begin:at])
            head_bytes += at - begin
    if head_bytes > LONG_BYTES:
        raise InvalidArgument(f"{head_bytes} bytes beside the tensors, expected at most {LONG_BYTES}")
    long = tensor_bytes > LONG_BYTES
    return Parts(b"".join(head if long else [*head, *tensors]), raw, long)


def _no_message() -> InvalidArgument:
    return InvalidArgument(f"the request is no {pb.ModelInferRequest.DESCRIPTOR.full_name}")


def _varint(data: Buffer, at: int) -> tuple[int, int]:
    """A number and where it ends. Raises: InvalidArgument."""
    value = shift = 0
    for byte in data[at : at + _LONGEST_VARINT]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _no_message()


def _inputs(
    message: pb.ModelInferRequest,
    raw: Sequence[Buffer],
    model: str,
    spec: ModelSpec,
    read_region: ReadRegion,
    arrival_ns: int,
    *,
    in_haste: bool,
) -> Tensors:
    given, used = len(raw), 0
    inputs: Tensors = {}
    for tensor in message.inputs:
        name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
        check_input(spec, model, name, datatype, shape)
        if datatype == "BYTES":
            check_texts(name, shape, in_haste=in_haste)
        if name in inputs:
            raise InvalidArgument(f"input '{name}' already exists in request for model '{model}'")
        region = _region(tensor.parameters, f"input '{name}'") if tensor.parameters else None
        if region is not None:
            if tensor.HasField("contents"):
                raise InvalidArgument(
                    f"unexpected 'content' provided when using shared memory for input tensor '{name}' for model '{model}'"
                )
            check_region(name, datatype, shape, region.byte_size, in_haste=in_haste)
            inputs[name] = tensor_from_bytes(name, datatype, shape, read_region(region, arrival_ns))
        elif not given:
            inputs[name] = _typed(tensor, model, name, datatype, shape)
        elif tensor.HasField("contents"):
            raise InvalidArgument(
                f"contents field must not be specified when using raw_input_contents for '{name}' for model '{model}'"
            )
        elif used < given:
            if datatype == "BYTES":
                check_raw(len(raw[used]), in_haste=in_haste)
            inputs[name] = tensor_from_bytes(name, datatype, shape, raw[used])
            used += 1
        else:
            raise InvalidArgument(f"unable to find data for input tensor '{name}' for model '{model}' in request.")
    if used < given:
        raise InvalidArgument(f"raw_input_contents has {given} entries, but only {used} inputs for model '{model}' use one")
    return inputs


def _typed(tensor: Any, model: str, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    fields = tensor.contents.ListFields()
    count = prod(shape)
    if not fields and (count or not tensor.HasField("contents")):
        raise InvalidArgument(f"unable to find data for input tensor '{name}' for model '{model}' in request.")
    expected = _CONTENTS.get(datatype)
    if expected is None:
        raise InvalidArgument(f"input '{name}': {datatype} has no typed contents, use raw_input_contents")
    values: Any = ()
    if fields:
        field, values = fields[0]
        if len(fields) > 1 or field.name != expected:
            got = ", ".join(field.name for field, _ in fields)
            raise InvalidArgument(f"input '{name}' of model '{model}': expected {datatype} in {expected}, got {got}")
    array = np.empty(check_count(name, datatype, shape, len(values)), NUMPY[datatype])
    try:
        array[:] = values
    except OverflowError:
        raise out_of_range(name, datatype, values) from None
    return shaped(name, array, shape)


def _outputs(tensors: Any, model: str, spec: ModelSpec) -> tuple[OutputRequest, ...]:
    """What is asked of each output; in the model's order, and each once, as Triton answers."""
    check_outputs(spec, model, [tensor.name for tensor in tensors])
    if len(tensors) == 1:
        return (_output(tensors[0]),)
    wanted: dict[str, OutputRequest] = {}
    for tensor in tensors:
        want_once(wanted, _output(tensor))
    return tuple([wanted[name] for name in spec.output_by_name if name in wanted])


def _output(tensor: Any) -> OutputRequest:
    name = tensor.name
    if not tensor.parameters:
        return OutputRequest(name)
    where = f"output '{name}'"
    region = _region(tensor.parameters, where)
    if "classification" not in tensor.parameters:
        return OutputRequest(name, region=region)
    classes = _natural(tensor.parameters["classification"], "classification", where)
    if classes < 1:
        raise InvalidArgument(f"{where}: parameter 'classification': got {classes}, expected an integer from 1")
    if region is not None:
        raise InvalidArgument(f"{where}: shared memory and classification exclude each other")
    return OutputRequest(name, classification=classes)


def _region(parameters: Mapping[str, Any], where: str) -> RegionRef | None:
    """The shared memory a tensor's parameters name, if they do. Raises: InvalidArgument, also for a misspelt name."""
    if not OF_TENSORS.issuperset(parameters):
        check_parameters(parameters, where, of_tensor=True)
    if "shared_memory_region" not in parameters:
        if "shared_memory_byte_size" in parameters:
            raise InvalidArgument(f"{where}: parameter 'shared_memory_region' is missing beside 'shared_memory_byte_size'")
        return None
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgument(f"{where}: parameter 'shared_memory_byte_size' is missing beside 'shared_memory_region'")
    region = _value(parameters["shared_memory_region"])
    if not isinstance(region, str):
        raise InvalidArgument(f"{where}: parameter 'shared_memory_region': got {region!r}, expected a string")
    offset = 0
    if "shared_memory_offset" in parameters:
        offset = _natural(parameters["shared_memory_offset"], "shared_memory_offset", where)
    return RegionRef(region, offset, _natural(parameters["shared_memory_byte_size"], "shared_memory_byte_size", where))


def _parameters(choices: Mapping[str, Any]) -> dict[str, ParameterValue]:
    check_most("parameters", len(choices))
    parameters: dict[str, ParameterValue] = {}
    for key, choice in choices.items():
        kind = choice.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidArgument(
                f"invalid value type for '{key}' parameter, expected int64_param, uint64_param, double_param, bool_param, or "
                "string_param."
            )
        if key == _FINAL_RESPONSE:
            _boolean(choice, key)
            continue  # every model here gives one response, which is the final one: there is nothing to switch
        if key in ("sequence_start", "sequence_end"):
            _boolean(choice, key)
        parameters[key] = value = getattr(choice, kind)
        check_parameter(key, value)  # uint64_param holds larger ones
    return parameters


def _value(choice: Any) -> Any:
    kind = choice.WhichOneof("parameter_choice")
    return None if kind is None else getattr(choice, kind)


def _natural(choice: Any, key: str, where: str) -> int:
    return natural(_value(choice), key, where)


def _boolean(choice: Any, key: str) -> bool:
    if choice.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected bool_param.")
    value: bool = choice.bool_param
    return value


def _set_parameter(choice: Any, value: ParameterValue) -> None:
    if isinstance(value, bool):
        choice.bool_param = value
    elif isinstance(value, int):
        choice.int64_param = value
    elif isinstance(value, float):
        choice.double_param = value
    else:
        choice.string_param = value
