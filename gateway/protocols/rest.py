"""The Open Inference Protocol v2 over HTTP, pure: bodies to `InferRequest`s, `InferResponse`s to bodies, codes to
statuses.

How a body is read: msgspec parses the envelope and only skims over each input's `data` (`msgspec.Raw`); once the
envelope has named the input, and the model's specification has accepted its datatype and shape, `data` is parsed
straight into a list of that datatype's kind, which is where a wrong element is found, and packed into an array. Behind
the JSON (binary extension) tensors are views on the body.

Where the protocol is silent this does what Triton 2.51 does, seen on a real one, with these differences, each a fault
there: malformed JSON and values of the wrong kind are 400, not 500; a number that overflows FP32 is refused, not made
infinite; bytes that are no text are refused as JSON output, not sent as broken JSON. NaN, Infinity and -Infinity are
read and written as these words, which JSON lacks and every v2 client has.
"""

import copy
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
import orjson

from backends.base import ModelSpec, Tensors, TensorSpec
from backends.datatypes import NUMPY
from gateway.errors import InvalidArgument
from gateway.protocols.json_data import (
    NUMBERS_AT_ONCE,
    parse,
    short_to_json,
    tensor_from_json,
    texts_to_json,
    to_json,
)
from gateway.protocols.long_answer import Slices, pieces_of
from gateway.protocols.repeated import LONGEST_BYTES, RepeatedBodies
from gateway.protocols.smallest import WITHOUT_JSON, smallest_request_text
from gateway.protocols.tensors import (
    OF_TENSORS,
    ReadRegion,
    TakesLong,
    WriteRegion,
    check_input,
    check_length,
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
    shape_key,
    want_once,
)
from gateway.types import InferRequest, InferResponse, OutputRequest, ParameterValue, RegionRef
from gateway.wire.tensors import Buffer, joined, tensor_from_bytes, tensor_to_bytes

if TYPE_CHECKING:
    from gateway.config import Ragged

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_ABSENT: Final = msgspec.Raw()
_OF_REGION: Final = frozenset(("shared_memory_region", "shared_memory_byte_size"))
_LONG: Final = 1 << 17  # numbers of an output: from about a MiB of text on, an answer is written slice by slice
_MANY: Final = 1 << 14  # elements of an output: below it, it is written in no time
_HEADS_KEPT: Final = 256
LONG_BODY_BYTES: Final = 16 << 10  # of a body: below it, reading elements in vain costs little, and parameters are not too many


class _Input(msgspec.Struct, gc=False):
    name: str
    datatype: str
    shape: list[_Size]
    parameters: dict[str, ParameterValue] | None = None
    data: msgspec.Raw = _ABSENT


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: dict[str, ParameterValue] | None = None


class _Body(msgspec.Struct, gc=False):
    inputs: list[_Input] = []
    id: str = ""
    outputs: list[_Output] | None = None
    parameters: dict[str, ParameterValue] | None = None


class _LooseInput(msgspec.Struct, gc=False):
    """As _Input, with data already parsed by a reader that knows NaN."""

    name: str
    datatype: str
    shape: list[_Size]
    parameters: dict[str, ParameterValue] | None = None
    data: Any = _ABSENT


class _LooseBody(msgspec.Struct, gc=False):
    inputs: list[_LooseInput] = []
    id: str = ""
    outputs: list[_Output] | None = None
    parameters: dict[str, ParameterValue] | None = None


_body_decoder: Final = msgspec.json.Decoder(_Body)


def header_length(value: bytes | None, body_bytes: int) -> int | None:
    """Read Inference-Header-Content-Length; None: there was none, the whole body is JSON. Raises: InvalidArgument."""
    if value is None:
        return None
    length = int(value) if value.isdigit() and len(value) < 19 else -1
    if not 0 <= length <= body_bytes:
        raise InvalidArgument(f"inference header size should be in range (0, {body_bytes}), got: {value.decode('latin-1')}")
    return length


class RestCodec:
    """Reads requests for one model version and writes its answers."""

    def __init__(
        self,
        model: str,
        version: str,
        spec: ModelSpec,
        ragged: "Ragged | None",
        json_depth: int,
        *,
        in_haste: bool = False,
    ) -> None:
        """json_depth: the deepest nesting of `data`. in_haste: what takes long is to be refused: `TakesLong`, `ParsesLong`."""
        self._in_haste = in_haste
        self._repeated = RepeatedBodies(ragged)
        self.model = model
        self.version = version
        self.spec = spec
        self.ragged = ragged
        self.json_depth = json_depth
        self._all_binary = tuple(OutputRequest(output.name, binary=True) for output in spec.outputs)
        self._without_json = next((output for output in spec.outputs if output.datatype in WITHOUT_JSON), None)
        self._order = {output.name: position for position, output in enumerate(spec.outputs)}
        self._head = f'"model_name":{_text(model)},"model_version":{_text(version)}'.encode()
        self._heads: dict[tuple[str, tuple[int, ...], bool], bytes] = {}  # see _like_others
        self._output_heads = {output.name: _output_head(output.name, output.datatype) for output in spec.outputs}

    def at_leisure(self) -> "RestCodec":
        """The same, not in haste."""
        other = copy.copy(self)
        other._in_haste = False
        return other

    # decode

    def decode(self, body: Buffer, header_bytes: int | None, arrival_ns: int, read_region: ReadRegion) -> InferRequest:
        """Read and validate one request.

        header_bytes: of the JSON before the tensors; None: all is JSON; 0: all is one raw tensor. Tensors that came as bytes
        are views on the body. Raises: InvalidArgument, NotFound (a region); TakesLong and ParsesLong, in haste.
        """
        if not isinstance(body, bytes) or len(body) > LONGEST_BYTES:
            return self._read(body, header_bytes, arrival_ns, read_region)
        again = self._repeated.request(body, header_bytes, arrival_ns)
        return self._read(body, header_bytes, arrival_ns, read_region, repeats=True) if again is None else again

    def _read(
        self, body: Buffer, header_bytes: int | None, arrival_ns: int, read_region: ReadRegion, *, repeats: bool = False
    ) -> InferRequest:
        """As `decode`. repeats: the next bodies may be like this one."""
        if not len(body) and header_bytes is None:
            raise InvalidArgument(
                f"failed to parse the request JSON: the body is empty; the smallest request: {smallest_request_text(self.spec)}"
            )
        if header_bytes is None:
            message, tail = parse(body, _body_decoder, _LooseBody, in_haste=self._in_haste), memoryview(b"")
        elif header_bytes == 0:
            return self._decode_raw(body, arrival_ns)
        else:
            view = memoryview(body)
            message = parse(view[:header_bytes], _body_decoder, _LooseBody, in_haste=self._in_haste)
            tail = view[header_bytes:]
        long = len(body) > LONG_BODY_BYTES
        inputs: Tensors = {}
        places: dict[str, int] = {}
        at = 0
        for entry in message.inputs:
            name = entry.name
            if name in inputs:
                raise InvalidArgument(f"input '{name}' already exists in request for model '{self.model}'")
            shape = entry.shape
            check_input(self.spec, self.model, name, entry.datatype, shape)
            if entry.datatype == "BYTES":
                check_texts(name, shape, in_haste=self._in_haste)
            if entry.parameters is None and entry.data is not _ABSENT:
                inputs[name] = tensor_from_json(name, entry.datatype, shape, entry.data, self.json_depth, long=long)
                continue
            if entry.parameters and not OF_TENSORS.issuperset(entry.parameters):
                check_parameters(entry.parameters, f"input '{name}'", of_tensor=True)
            source = _source(entry)
            if source == "data":
                inputs[name] = tensor_from_json(name, entry.datatype, shape, entry.data, self.json_depth, long=long)
            elif source == "binary_data_size":
                size = _parameter(entry.parameters, "binary_data_size", int, 0, f"input '{name}'")
                missing = at + size - len(tail)
                if missing > 0:
                    raise InvalidArgument(
                        f"unexpected size for input '{name}', expecting {missing} additional bytes for model '{self.model}'"
                    )
                if entry.datatype == "BYTES":
                    check_raw(size, in_haste=self._in_haste)
                inputs[name] = tensor_from_bytes(name, entry.datatype, shape, tail[at : at + size])
                places[name] = len(body) - len(tail) + at
                at += size
            else:
                ref = _region(entry.parameters, f"input '{name}'")
                check_region(name, entry.datatype, shape, ref.byte_size, in_haste=self._in_haste)
                inputs[name] = tensor_from_bytes(name, entry.datatype, shape, read_region(ref, arrival_ns))
        if at != len(tail):
            raise InvalidArgument(
                f"unexpected additional input data for model '{self.model}': {len(tail) - at} bytes after those of its inputs"
            )
        rows = count_rows(self.spec, self.model, inputs)
        binary, timeout_us, priority = False, 0, 0
        parameters = message.parameters or {}
        if parameters:
            binary, timeout_us, priority = take_ours(parameters, long=long)
            if parameters and not self.spec.reads_parameters:
                check_own(parameters, self.spec.own_arguments)
                check_parameters(parameters, "request")
        outputs: tuple[OutputRequest, ...] = ()
        if message.outputs:
            outputs = self._outputs(message.outputs, binary)
        elif binary:
            outputs = self._all_binary
        elif self._without_json is not None:
            raise no_json_output(self._without_json)
        request = InferRequest(
            self.model, self.version, message.id, inputs, rows, arrival_ns, outputs, parameters=parameters,
            deadline_ns=deadline_after(arrival_ns, timeout_us) if timeout_us else None, priority=priority,
            shape_key=shape_key(self.spec, self.ragged, inputs, parameters),
        )  # fmt: skip
        if repeats:
            assert isinstance(body, bytes)
            if header_bytes is not None and len(places) == len(inputs):
                self._repeated.remember_bytes(body, header_bytes, places, request)
            elif header_bytes is None and len(inputs) == 1 and type(entry.data) is msgspec.Raw:
                self._repeated.remember_json(body, entry.data, name, entry.datatype, request)
        return request

    def _decode_raw(self, body: Buffer, arrival_ns: int) -> InferRequest:
        """The body is the one input's bytes; its shape follows from the specification, with one row. All outputs are binary."""
        if len(self.spec.inputs) != 1:
            raise InvalidArgument(
                f"Raw request must only have 1 input to be deduced, but model '{self.model}' has {len(self.spec.inputs)} inputs"
            )
        (spec,) = self.spec.inputs
        shape = list(spec.shape)
        if self.spec.max_rows:
            shape[0] = 1
        variable = [axis for axis, dim in enumerate(shape) if dim < 0]
        if len(variable) > 1:
            raise InvalidArgument(
                f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one variable-sized "
                f"dimension: {list(spec.shape)}"
            )
        if spec.datatype == "BYTES":
            for axis in variable:
                shape[axis] = 1
            if prod(shape) != 1:
                raise InvalidArgument(
                    f"raw input '{spec.name}': the body is one BYTES element, expected shape {list(spec.shape)}"
                )
            check_raw(len(body), in_haste=self._in_haste)
            elements = np.empty(1, NUMPY["BYTES"])
            elements[0] = joined((body,))
            tensor = elements.reshape(shape)
        else:
            if variable:
                step = prod(dim for dim in shape if dim >= 0) * NUMPY[spec.datatype].itemsize
                shape[variable[0]] = len(body) // step if step else 0
            tensor = tensor_from_bytes(spec.name, spec.datatype, shape, body)
        inputs = {spec.name: tensor}
        return InferRequest(
            self.model, self.version, "", inputs, count_rows(self.spec, self.model, inputs), arrival_ns, self._all_binary,
            shape_key=shape_key(self.spec, self.ragged, inputs),
        )  # fmt: skip

    def _outputs(self, entries: list[_Output], binary: bool) -> tuple[OutputRequest, ...]:
        """What is asked of each output; in the model's order, and each once, as Triton answers."""
        check_outputs(self.spec, self.model, [entry.name for entry in entries])
        wanted: dict[str, OutputRequest] = {}
        for entry in entries:
            name, parameters = entry.name, entry.parameters
            if parameters:
                where = f"output '{name}'"
                if not OF_TENSORS.issuperset(parameters):
                    check_parameters(parameters, where, of_tensor=True)
                output = OutputRequest(
                    name,
                    classification=_parameter(parameters, "classification", int, 0, where),
                    binary=_parameter(parameters, "binary_data", bool, binary, where),
                    region=_region(parameters, where) if not _OF_REGION.isdisjoint(parameters) else None,
                )
            else:
                output = OutputRequest(name, binary=binary)
            if output.classification and output.region is not None:
                raise InvalidArgument(f"output '{name}': shared memory and classification exclude each other")
            if not (output.binary or output.classification or output.region):
                spec = self.spec.output_by_name[name]
                if spec.datatype in WITHOUT_JSON:
                    raise no_json_output(spec)
            want_once(wanted, output)
        asked = tuple(sorted(wanted.values(), key=lambda output: self._order[output.name]))
        return self._all_binary if asked == self._all_binary else asked

    # encode

    def encode(
        self, request: InferRequest, response: InferResponse, write_region: WriteRegion
    ) -> "tuple[list[Buffer] | Slices, int | None]":
        """Write an answer. Returns: the body's parts, and the length of its JSON if tensors follow it, else None.

        Parts are views on the response's tensors; those of long JSON are made as they are asked for. Raises: InvalidArgument
        (an output that has no JSON form, a region that is too small), NotFound (a region); TakesLong, in haste.
        """
        outputs = response.outputs
        whole = not request.outputs
        alike = len(outputs) == 1 and (whole or request.outputs is self._all_binary)
        if alike and not response.id and not response.parameters:
            ((name, array),) = outputs.items()
            head = self._heads.get((name, array.shape, whole)) or self._like_others(name, array, whole)
            if head and whole:
                return [b"%b%b}]}" % (head, short_to_json(array.ravel()))], None
            if head:
                return [head, tensor_to_bytes(array)], len(head)
        asked = {output.name: output for output in request.outputs} if request.outputs else None
        entries: list[bytes] = []
        tail: list[Buffer] = []
        long: dict[int, np.ndarray] = {}  # by entry, what is behind its `data`
        texts: dict[int, list[bytes]] = {}  # likewise, as JSON
        numbers = 0  # of outputs that are not short
        for name, array in response.outputs.items():
            output = asked[name] if asked is not None else None
            head = self._output_heads[name]
            datatype = ""
            if output is not None and output.classification:
                datatype = "BYTES"
                labels = self.spec.output_by_name[name].labels
                array = classify(array, output.classification, labels, batched=self.spec.max_rows > 0, in_haste=self._in_haste)
                head = _output_head(name, datatype)
            head += _shape_text(array.shape)
            if output is not None and output.region is not None:
                check_written(array, in_haste=self._in_haste, region=True)
                write_region(output.region, tensor_to_bytes(array), request.arrival_ns)
                entries.append(head + b"]}")
            elif output is not None and output.binary:
                if array.size > _MANY or array.dtype.hasobject:
                    check_written(array, in_haste=self._in_haste)
                raw = tensor_to_bytes(array)
                entries.append(b'%b],"parameters":{"binary_data_size":%d}}' % (head, len(raw)))
                tail.append(raw)
            elif array.size > _MANY and array.dtype != NUMPY["BYTES"] and (numbers := numbers + array.size) >= _LONG:
                long[len(entries)] = array
                entries.append(head + b'],"data":')
            else:
                datatype = datatype or self.spec.output_by_name[name].datatype
                if self._in_haste or datatype != "BYTES":
                    entries.append(b'%b],"data":%b}' % (head, to_json(name, datatype, array, in_haste=self._in_haste)))
                else:
                    texts[len(entries)] = texts_to_json(name, array)
                    entries.append(head + b'],"data":')
        head = b'{"id":%b,%b' % (orjson.dumps(response.id), self._head) if response.id else b"{" + self._head
        if response.parameters:
            head += b',"parameters":' + orjson.dumps(response.parameters)
        binary = tail or (asked is not None and any(output.binary and output.region is None for output in asked.values()))
        if long and not binary:
            return Slices(pieces_of(head, entries, long, texts), sum(array.nbytes for array in long.values())), None
        if long and self._in_haste:
            raise TakesLong
        parts: list[Buffer]
        if long or texts:
            parts = list(pieces_of(head, entries, long, texts))
        else:
            parts = [b'%b,"outputs":[%b]}' % (head, entries[0] if len(entries) == 1 else b",".join(entries))]
        return ([*parts, *tail], sum(map(len, parts))) if binary else (parts, None)

    def _like_others(self, name: str, array: np.ndarray, whole: bool) -> bytes:
        """What every answer begins with that has one output of such a shape, and nothing unusual; empty: it is not so short.

        whole: the output follows, and then the end of the JSON; else its bytes do.
        """
        datatype = self.spec.output_by_name[name].datatype
        if datatype == "BYTES" or array.dtype != NUMPY[datatype] or array.size > NUMBERS_AT_ONCE:
            return b""
        tail = b'],"data":' if whole else b'],"parameters":{"binary_data_size":%d}}]}' % array.nbytes
        head = b'{%b,"outputs":[%b%b%b' % (self._head, self._output_heads[name], _shape_text(array.shape), tail)
        if len(self._heads) >= _HEADS_KEPT:  # clients choose shapes, and could choose many
            self._heads.clear()
        self._heads[name, array.shape, whole] = head
        return head


def take_ours(parameters: dict[str, ParameterValue], *, long: bool) -> tuple[bool, int, int]:
    """Take the parameters that are ours, leave the model's.

    long: they may be too many, or too long. Returns: whether outputs are binary by default, the timeout in microseconds, and
    the priority, 0 where there is none. Raises: InvalidArgument.
    """
    if long:
        check_most("parameters", len(parameters))
        check_length(parameters)
    binary: bool = _parameter(parameters, "binary_data_output", bool, False, "request")
    parameters.pop("binary_data_output", None)
    timeout_us: int = _parameter(parameters, "timeout", int, 0, "request")
    parameters.pop("timeout", None)
    priority: int = _parameter(parameters, "priority", int, 0, "request")
    parameters.pop("priority", None)
    for key, value in parameters.items():
        check_parameter(key, value)
    return binary, timeout_us, priority


def _source(entry: _Input | _LooseInput) -> str:
    """Where an input's elements are: data, binary_data_size or shared_memory_region. Raises: InvalidArgument unless in one."""
    parameters = entry.parameters or {}
    found = ["data"] if entry.data is not _ABSENT else []
    found += (key for key in ("binary_data_size", "shared_memory_region") if key in parameters)
    if len(found) == 1:
        return found[0]
    but = "But set " + " ".join(f"'{key}'" for key in found) if found else "But no field is set"
    raise InvalidArgument(
        f"input '{entry.name}': Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. {but}"
    )


def _parameter(parameters: dict[str, ParameterValue] | None, key: str, kind: type[Any], default: Any, where: str) -> Any:
    """A parameter of ours: a boolean, text, or an integer from 0. Raises: InvalidArgument."""
    value = (parameters or {}).get(key, default)
    if kind is int:
        return natural(value, key, where)
    if type(value) is not kind:
        expected = "true or false" if kind is bool else "a string"
        raise InvalidArgument(f"{where}: parameter '{key}': got {value!r}, expected {expected}")
    return value


def _region(parameters: dict[str, ParameterValue] | None, where: str) -> RegionRef:
    for missing in _OF_REGION.difference(parameters or {}):
        (given,) = _OF_REGION - {missing}
        raise InvalidArgument(f"{where}: parameter '{missing}' is missing beside '{given}'")
    return RegionRef(
        _parameter(parameters, "shared_memory_region", str, "", where),
        _parameter(parameters, "shared_memory_offset", int, 0, where),
        _parameter(parameters, "shared_memory_byte_size", int, 0, where),
    )


def no_json_output(spec: TensorSpec) -> InvalidArgument:
    return InvalidArgument(
        f"sending {spec.datatype} data via JSON is not supported. Please use the binary data format for output '{spec.name}'"
    )


def _output_head(name: str, datatype: str) -> bytes:
    return f'{{"name":{_text(name)},"datatype":"{datatype}","shape":['.encode()


@lru_cache(maxsize=1024)  # answers have the same ones again and again
def _shape_text(shape: tuple[int, ...]) -> bytes:
    return ",".join(map(str, shape)).encode()


def _text(value: str) -> str:
    return orjson.dumps(value).decode()
