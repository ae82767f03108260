"""Triton's generate extension, pure: bodies to `InferRequest`s, `InferResponse`s to JSON objects.

A request is one flat object. A key that names an input of the model is that input's elements, any other is a parameter of
the request, and so is what stands in `parameters`; `id` is the request's. Shapes are not given: they follow from the model's
and from how many elements there are. An answer is a flat object, too: an output of one element is that element, any other
a flat list.

Source: Triton docs/protocol/extension_generate.md, and Triton 2.51 where that is silent. More is taken than there: nested
lists, which state their shape. Less is, as in `infer`: what was misspelt, or given twice, is refused.
"""

import copy
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import orjson

from backends.base import ModelSpec, Tensors, TensorSpec
from gateway.errors import InvalidArgument, instead, shortened
from gateway.protocols.json_data import (
    depth_of,
    even_sizes,
    gathered,
    lists_from_json,
    parse,
    slices_to_json,
    tensor_of_elements,
    texts_to_json,
    to_json,
)
from gateway.protocols.rest import LONG_BODY_BYTES, take_ours
from gateway.protocols.smallest import WITHOUT_JSON, smallest_generate_text
from gateway.protocols.tensors import (
    TakesLong,
    WriteRegion,
    check_input,
    check_most,
    check_own,
    check_parameters,
    check_texts,
    count_rows,
    deadline_after,
    filled,
    shape_key,
)
from gateway.types import InferRequest, InferResponse, ParameterValue
from gateway.wire.tensors import Buffer

if TYPE_CHECKING:
    from gateway.config import Ragged

_ID: Final = "id"
_PARAMETERS: Final = "parameters"
_NAMES_SHOWN: Final = 8
_MANY: Final = 1 << 17  # elements of an answer
_Field = msgspec.Raw | Any  # as it came, or parsed, where the request holds NaN

_object_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class GenerateCodec:
    """Reads generate requests for one model version and writes its answers, or the parts of one."""

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
        """json_depth: the deepest nesting of an input's lists. in_haste: what takes long is to be refused."""
        self._in_haste = in_haste
        self.model = model
        self.version = version
        self.spec = spec
        self.ragged = ragged
        self.json_depth = json_depth
        tensors = (*(tensor for tensor in spec.inputs if not tensor.optional), *spec.outputs)
        self._without_json = next((tensor for tensor in tensors if tensor.datatype in WITHOUT_JSON), None)
        self._model = {"model_name": orjson.dumps(model), "model_version": orjson.dumps(version)}
        self._elsewhere = "by ModelStreamInfer over gRPC" if spec.decoupled else "by infer with binary data, or over gRPC"

    def at_leisure(self) -> "GenerateCodec":
        """The same, not in haste."""
        other = copy.copy(self)
        other._in_haste = False
        return other

    def decode(self, body: Buffer, arrival_ns: int) -> InferRequest:
        """Read and validate one request. Raises: InvalidArgument; ParsesLong, in haste."""
        if self._without_json is not None:
            tensor = self._without_json
            raise InvalidArgument(
                f"model '{self.model}': '{tensor.name}' is {tensor.datatype}, which JSON lacks: ask {self._elsewhere}"
            )
        spec = self.spec
        message: dict[str, _Field] = parse(
            body if len(body) else b"{}", _object_decoder, dict[str, Any], in_haste=self._in_haste
        )
        request_id = "" if _ID in spec.input_by_name else _text(message.pop(_ID, ""))
        nested = _object(message.pop(_PARAMETERS, {}))
        if _PARAMETERS in spec.input_by_name:
            raise InvalidArgument(
                f"model '{self.model}' has an input 'parameters', which generate cannot give: ask {self._elsewhere}"
            )
        long = len(body) > LONG_BODY_BYTES
        if long:
            check_most("parameters", sum(name not in spec.input_by_name for name in chain(message, nested)))
        inputs: Tensors = {}
        parameters: dict[str, ParameterValue] = {}
        for name, field in chain(message.items(), nested.items()):
            if name in inputs or name in parameters:
                raise InvalidArgument(f"'{shortened(name)}' is given twice: in 'parameters', and beside it")
            tensor_spec = spec.input_by_name.get(name)
            if tensor_spec is not None:
                inputs[name] = self._tensor(tensor_spec, field)
            else:
                parameters[name] = self._parameter(name, field)
        missing = [tensor.name for tensor in spec.inputs if tensor.name not in inputs and not tensor.optional]
        if missing:
            taken = ", ".join(f"'{shortened(name)}'" for name in islice(parameters, _NAMES_SHOWN))
            others = f"; taken as parameters: {taken}" if taken else ""
            raise InvalidArgument(
                f"expected {len(spec.inputs)} inputs but got {len(inputs)} inputs for model '{self.model}': missing "
                + ", ".join(f"'{name}'" for name in missing)
                + f"{others}; the smallest request: {smallest_generate_text(spec)}"
            )
        rows = count_rows(spec, self.model, inputs)
        timeout_us, priority = 0, 0
        if parameters:
            binary, timeout_us, priority = take_ours(parameters, long=long)
            if binary:
                raise InvalidArgument(
                    f"request: parameter 'binary_data_output': generate answers with JSON only: ask {self._elsewhere}"
                )
            if parameters and not spec.reads_parameters:
                check_own(parameters, spec.own_arguments)
                check_parameters(parameters, "request")
        return InferRequest(
            self.model, self.version, request_id, inputs, rows, arrival_ns, parameters=parameters,
            deadline_ns=deadline_after(arrival_ns, timeout_us) if timeout_us else None, priority=priority,
            shape_key=shape_key(spec, self.ragged, inputs, parameters),
        )  # fmt: skip

    def _tensor(self, spec: TensorSpec, field: _Field) -> np.ndarray:
        """Shapes: one element, or a flat list, fills the model's shape; nested lists are its innermost dimensions."""
        name, datatype = spec.name, spec.datatype
        if not depth_of(field):
            field = msgspec.Raw(b"[%b]" % bytes(field)) if type(field) is msgspec.Raw else [field]
        lists, depth = lists_from_json(name, datatype, field, self.json_depth)
        if depth == 1:
            shape = filled(spec.shape, len(lists))
            flat = lists
            if shape is None:
                noun = "element" if len(flat) == 1 else "elements"
                raise InvalidArgument(
                    f"input '{name}' of model '{self.model}': {len(flat)} {noun} cannot be made {datatype} {list(spec.shape)}"
                )
        else:
            sizes, flat = even_sizes(name, lists, depth)
            shape = [1] * (len(spec.shape) - depth) + sizes
        check_input(self.spec, self.model, name, datatype, shape)
        if datatype == "BYTES":
            check_texts(name, shape, in_haste=False)
        return tensor_of_elements(name, datatype, shape, flat)

    def _parameter(self, name: str, field: _Field) -> ParameterValue:
        value = _parsed(field)
        if isinstance(value, ParameterValue):
            return value
        what = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "null"
        others = instead(name, self.spec.input_by_name, "its inputs")
        raise InvalidArgument(
            f"parameter '{shortened(name)}': got {what}, expected text, a number, true or false; and model '{self.model}' "
            f"has no input of this name{others}"
        )

    def encode(self, request: InferRequest, response: InferResponse, write_region: WriteRegion) -> list[bytes]:
        """Write an answer, or a part of one, as a JSON object: its pieces, none empty.

        Of equal names `id` and the model's go before parameters, and these before outputs. Raises: InvalidArgument, for an
        output that has no JSON form; TakesLong, in haste.
        """
        in_haste = self._in_haste
        if in_haste and sum(array.size for array in response.outputs.values()) > _MANY:
            raise TakesLong
        fields = {_ID: orjson.dumps(response.id)} | self._model if response.id else self._model.copy()
        for name, value in response.parameters.items():
            fields.setdefault(name, orjson.dumps(value))
        pieces = [b",%b:%b" % (orjson.dumps(name), text) for name, text in fields.items()]
        way = f"ask {self._elsewhere}"
        for name, array in response.outputs.items():
            if name in fields:
                continue
            datatype = self.spec.output_by_name[name].datatype
            if in_haste:
                made = [to_json(name, datatype, array, in_haste=True, way=way)]
            else:
                made = texts_to_json(name, array, way=way) if datatype == "BYTES" else list(slices_to_json(array))
            if array.size == 1:  # without the brackets
                made[0] = made[0][1:]
                made[-1] = made[-1][:-1]
            pieces += (b",%b:" % orjson.dumps(name), *made)
        pieces[0] = b"{" + pieces[0][1:]
        pieces.append(b"}")
        return [b"".join(pieces)] if in_haste else gathered(pieces)


def _parsed(field: _Field) -> Any:
    """Raises: InvalidArgument."""
    if type(field) is not msgspec.Raw:
        return field
    try:
        return msgspec.json.decode(field)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"failed to parse the request JSON: {exc}") from exc


def _text(field: _Field) -> str:
    value = _parsed(field)
    if isinstance(value, str):
        return value
    raise InvalidArgument(f"malformed request: 'id': got {value!r}, expected text")


def _object(field: _Field) -> dict[str, _Field]:
    if isinstance(field, dict):
        return field
    try:
        return _object_decoder.decode(field)
    except (ValueError, TypeError, RecursionError):
        raise InvalidArgument("malformed request: 'parameters': expected an object") from None
