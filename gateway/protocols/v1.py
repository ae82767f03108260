"""The prediction protocol of TF Serving and KServe v1, pure: JSON to tensors, and tensors to JSON.

Rows: `instances` is a list of rows, each the one input's value, or an object of values by input; the answer is `predictions`,
likewise. Columns: `inputs` is the one input's tensor, or an object of tensors by input; the answer is `outputs`, likewise.
Bytes are text, or `{"b64": "…"}`; outputs whose names end in `_bytes` are written so. Source: TF Serving's RESTful API.

Shapes are not given: they follow from the lists. Where these have fewer dimensions than the model's shape, ones are put behind
the batch dimension.
"""

import base64
import re
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from backends.base import ModelSpec, Tensors, TensorSpec
from backends.datatypes import NUMPY
from gateway.errors import InvalidArgument
from gateway.protocols.json_data import (
    depth_of,
    even_sizes,
    gathered,
    lists_from_json,
    lists_of,
    nested_to_json,
    parse,
    tensor_of_elements,
)
from gateway.protocols.smallest import WITHOUT_JSON, smallest_columns_text, smallest_rows_text
from gateway.protocols.tensors import TakesLong, cast, check_input, check_own, check_texts
from gateway.turns import SLICE, pause
from gateway.wire.tensors import Buffer, shaped

SMALLEST: Final = {"rows": smallest_rows_text, "columns": smallest_columns_text}  # requests, by how they are written
_ABSENT: Final = msgspec.Raw()
_B64: Final = "b64"
_OBJECTS: Final = re.compile(rb"\s*\[\s*\{")
_ENCODED: Final = re.compile(rb'\s*\[\s*\{\s*"b64"\s*:')
_OF_V2: Final = frozenset(("name", "datatype", "shape"))
_BEGINNING_BYTES: Final = 512
_EMPTY: Final = re.compile(rb"\s*\[\s*\]\s*")
_MANY_ROWS: Final = 1 << 10  # of several outputs, an object each
_MUCH_WORK: Final = 1 << 16  # numbers, or bytes of text, of these
_Field = msgspec.Raw | Any  # as it came, or parsed, where the request holds NaN


class V1Body(msgspec.Struct, gc=False):
    """What tells how a body is written. What else is in it means nothing here, parameters neither."""

    instances: msgspec.Raw = _ABSENT
    inputs: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT


class _LooseV1Body(msgspec.Struct, gc=False):
    instances: Any = _ABSENT
    inputs: Any = _ABSENT
    parameters: Any = _ABSENT


_body_decoder: Final = msgspec.json.Decoder(V1Body)
_rows_decoder: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_object_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def peek(body: Buffer, *, in_haste: bool) -> V1Body | _LooseV1Body:
    """Look at a body; its tensors are only skimmed over. Raises: InvalidArgument; ParsesLong, in haste."""
    return parse(body if len(body) else b"{}", _body_decoder, _LooseV1Body, in_haste=in_haste)


def is_v2(message: V1Body | _LooseV1Body) -> bool:
    """Whether it is a body of v2, whose `inputs` are a list of objects; or has neither field, which v2 refuses in its words."""
    inputs = message.inputs
    if message.instances is not _ABSENT:
        return False
    if type(inputs) is msgspec.Raw:
        if inputs is _ABSENT:
            return True
        text = memoryview(inputs)
        return _EMPTY.fullmatch(text) is not None or (_OBJECTS.match(text) is not None and _ENCODED.match(text) is None)
    return isinstance(inputs, list) and (not inputs or (isinstance(inputs[0], dict) and _B64 not in inputs[0]))


def read(
    message: V1Body | _LooseV1Body, spec: ModelSpec, model: str, json_depth: int, *, in_haste: bool
) -> tuple[Tensors, str]:
    """Returns: the inputs, and "rows" or "columns". Raises: InvalidArgument; TakesLong, in haste."""
    rows, columns = message.instances, message.inputs
    if (rows is _ABSENT) == (columns is _ABSENT):
        found = "neither" if rows is _ABSENT else "both"
        raise InvalidArgument(
            f"malformed request: expected 'instances' (rows) or 'inputs' (columns), got {found}; the smallest request: "
            + smallest_rows_text(spec)
        )
    if spec.own_arguments and message.parameters is not _ABSENT:
        check_own(_names(message.parameters), spec.own_arguments)
    by_row = rows is not _ABSENT
    fields = _of_rows(rows, spec, model) if by_row else _of_columns(columns, spec, model)
    inputs = {
        name: _tensor(spec, model, name, field, json_depth, by_row=by_row, in_haste=in_haste) for name, field in fields.items()
    }
    return inputs, "rows" if by_row else "columns"


def _names(field: _Field) -> Collection[str]:
    """Of an object; none, where it is something else."""
    if type(field) is msgspec.Raw:
        try:
            return _object_decoder.decode(field)
        except (ValueError, RecursionError):
            return ()
    return field if isinstance(field, dict) else ()


class RowsReader:
    """Reads the body that most send, in one go: `instances` of a model's one input, nested as deep as its shape."""

    def __init__(self, spec: ModelSpec, model: str, json_depth: int, *, in_haste: bool) -> None:
        self._spec = spec
        self._model = model
        self._in_haste = in_haste
        needed = [tensor for tensor in spec.inputs if not tensor.optional] or list(spec.inputs)
        self._input = tensor = needed[0] if len(needed) == 1 and spec.max_rows else None
        self._depth = depth = len(tensor.shape) if tensor is not None else 0
        lists = lists_of(tensor.datatype, depth) if tensor is not None and 0 < depth <= json_depth else None
        self._opening: re.Pattern[bytes] | None = None  # of such a body; None: there is none
        if lists is not None:
            self._opening = re.compile(rb'\s*\{\s*"instances"\s*:' + rb"\s*\[" * depth + rb"\s*[^\s\[{]")
            fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [("instances", lists), ("inputs", msgspec.Raw, _ABSENT)]
            alone = bool(spec.own_arguments)  # what else is in the body may name one
            message = msgspec.defstruct("_Rows", fields, gc=False, forbid_unknown_fields=alone)
            self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(message)

    def try_read(self, body: Buffer) -> Tensors | None:
        """None: it is another body, or is at fault, which is for `read` to tell. Raises: as that does."""
        expected = self._input
        if expected is None or self._opening is None or self._opening.match(body) is None:
            return None
        try:
            message = self._decoder.decode(body)
        except (ValueError, RecursionError):
            return None
        if message.inputs is not _ABSENT:
            return None
        name, datatype = expected.name, expected.datatype
        shape, flat = even_sizes(name, message.instances, self._depth)
        check_input(self._spec, self._model, name, datatype, shape)
        if datatype == "BYTES":
            check_texts(name, shape, in_haste=self._in_haste)
        return {name: tensor_of_elements(name, datatype, shape, flat)}


def written(spec: ModelSpec, outputs: Tensors, *, by_row: bool, in_haste: bool) -> list[Buffer]:
    """The pieces of an answer. Raises: InvalidArgument, for an output that has no JSON form; TakesLong, in haste."""
    begin, end = (b'{"predictions":', b"}") if by_row else (b'{"outputs":', b"}")
    if by_row and not spec.max_rows:
        begin, end = begin + b"[", b"]" + end
    if len(outputs) == 1:
        ((name, array),) = outputs.items()
        pieces = nested_to_json(name, spec.output_by_name[name].datatype, array, in_haste=in_haste)
        return [begin + pieces[0] + end] if len(pieces) == 1 else [begin, *pieces, end]
    datatypes = {name: spec.output_by_name[name].datatype for name in outputs}
    if by_row and spec.max_rows:
        rows = len(next(iter(outputs.values())))
        if in_haste and (rows > _MANY_ROWS or sum(map(_work, outputs.values())) > _MUCH_WORK):
            raise TakesLong
        return [*gathered(_rows_of_objects(outputs, datatypes, rows, begin + b"[", b"]" + end))]
    return [*gathered(chain((begin,), _object(outputs, datatypes, in_haste=in_haste), (end,)))]


def _work(array: np.ndarray) -> int:
    return sum(map(len, array.flat)) if array.dtype.hasobject else array.size


def _rows_of_objects(outputs: Tensors, datatypes: dict[str, str], rows: int, begin: bytes, end: bytes) -> Iterator[bytes]:
    yield begin
    for row in range(rows):
        if row:
            yield b","
        yield from _object({name: array[row, ...] for name, array in outputs.items()}, datatypes)
        if not row % SLICE:
            pause()
    yield end


def _object(tensors: Tensors, datatypes: dict[str, str], *, in_haste: bool = False) -> Iterator[bytes]:
    for index, (name, array) in enumerate(tensors.items()):
        yield b"%b%b:" % (b"," if index else b"{", orjson.dumps(name))
        yield from nested_to_json(name, datatypes[name], array, in_haste=in_haste)
    yield b"}"


def _of_rows(rows: _Field, spec: ModelSpec, model: str) -> dict[str, _Field]:
    """Each input's field, which is a list of its values in all rows."""
    if isinstance(rows, msgspec.Raw):
        view = memoryview(rows)
        objects = _OBJECTS.match(view) is not None
        encoded = objects and _ENCODED.match(view) is not None
    else:
        first = rows[0] if isinstance(rows, list) and rows else None
        objects = isinstance(first, dict)
        encoded = isinstance(first, dict) and first.keys() == {_B64}
    if not objects or (encoded and _B64 not in spec.input_by_name):
        return {_the_only(spec, model).name: rows}
    instances: list[dict[str, _Field]]
    if isinstance(rows, msgspec.Raw):
        try:
            instances = _rows_decoder.decode(rows)
        except (ValueError, RecursionError) as exc:
            raise InvalidArgument(f"malformed request: 'instances': expected objects, as the first is one: {exc}") from exc
    else:
        instances = rows
    names = instances[0].keys()
    columns: dict[str, list[_Field]] = {name: [] for name in names}
    for index, instance in enumerate(instances):
        if not isinstance(instance, dict) or instance.keys() != names:
            listed = ", ".join(f"'{name}'" for name in names)
            raise InvalidArgument(f"malformed request: 'instances': number {index}: expected {listed}, as in the first")
        for name, value in instance.items():
            columns[name].append(value)
    if not isinstance(rows, msgspec.Raw):
        return dict(columns)
    return {name: msgspec.Raw(b"[%b]" % b",".join(map(bytes, values))) for name, values in columns.items()}


def _of_columns(columns: _Field, spec: ModelSpec, model: str) -> dict[str, _Field]:
    if _is_plainly_v2(columns):
        raise InvalidArgument(f"malformed request: 'inputs': this is a body of v2: send it to /v2/models/{model}/infer")
    if type(columns) is not msgspec.Raw:
        named = isinstance(columns, dict) and (set(columns) != {_B64} or _B64 in spec.input_by_name)
        return dict(columns) if named else {_the_only(spec, model).name: columns}
    if not bytes(memoryview(columns)[:64]).lstrip().startswith(b"{"):
        return {_the_only(spec, model).name: columns}
    try:
        found: dict[str, _Field] = _object_decoder.decode(columns)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"malformed request: 'inputs': {exc}") from exc
    if set(found) == {_B64} and _B64 not in spec.input_by_name:
        return {_the_only(spec, model).name: columns}
    return found


def _is_plainly_v2(inputs: _Field) -> bool:
    """Whether they say of themselves what tensors of v2 say: of a text, in its first bytes."""
    if type(inputs) is msgspec.Raw:
        begins = bytes(memoryview(inputs)[:_BEGINNING_BYTES])
        return _OBJECTS.match(begins) is not None and all(b'"%b"' % key.encode() in begins for key in _OF_V2)
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], dict) and inputs[0].keys() >= _OF_V2


def _the_only(spec: ModelSpec, model: str) -> TensorSpec:
    """The one input. Raises: InvalidArgument, if there are more."""
    if len(spec.inputs) == 1:
        return spec.inputs[0]
    needed = [tensor for tensor in spec.inputs if not tensor.optional] or list(spec.inputs)
    if len(needed) == 1:
        return needed[0]
    names = ", ".join(f"'{tensor.name}'" for tensor in needed)
    raise InvalidArgument(f"model '{model}' has {len(needed)} inputs: expected objects with values of {names}")


def _tensor(
    spec: ModelSpec, model: str, name: str, field: _Field, json_depth: int, *, by_row: bool, in_haste: bool
) -> np.ndarray:
    expected = spec.input_by_name.get(name)
    if expected is None:
        check_input(spec, model, name, "", ())  # which refuses it, with those that there are
        raise AssertionError("it was refused")
    datatype = expected.datatype
    sizes, flat = _elements(name, datatype, field, json_depth)
    if by_row and not spec.max_rows:
        if sizes[:1] != [1]:
            got = sizes[0] if sizes else "no list"
            raise InvalidArgument(f"model '{model}' has no batch dimension: expected a list with 1 instance, got {got}")
        sizes = sizes[1:]
    ones = [1] * (len(expected.shape) - len(sizes))
    shape = [*sizes[:1], *ones, *sizes[1:]] if spec.max_rows and sizes else [*ones, *sizes]
    check_input(spec, model, name, datatype, shape)
    if datatype == "BYTES":
        check_texts(name, shape, in_haste=in_haste)
        if flat and not all(isinstance(element, str) for element in flat):
            return shaped(name, _packed([_bytes(name, element) for element in flat]), shape)
    if datatype in WITHOUT_JSON:
        return cast(name, datatype, tensor_of_elements(name, "FP64", shape, flat))
    return tensor_of_elements(name, datatype, shape, flat)


def _elements(name: str, datatype: str, field: _Field, json_depth: int) -> tuple[list[int], list[Any]]:
    """The sizes of the lists, and their elements; of BYTES, where any is encoded, text and objects."""
    if datatype == "BYTES" and (type(field) is not msgspec.Raw or b'"b64"' in bytes(field)):
        return _texts(name, field, json_depth)
    scalar = not depth_of(field)
    if scalar:
        field = msgspec.Raw(b"[%b]" % bytes(field)) if type(field) is msgspec.Raw else [field]
    lists, depth = lists_from_json(name, datatype, field, json_depth, halves=True)
    sizes, flat = even_sizes(name, lists, depth)
    return sizes[1:] if scalar else sizes, flat


def _texts(name: str, field: _Field, json_depth: int) -> tuple[list[int], list[Any]]:
    try:
        lists = msgspec.json.decode(field) if type(field) is msgspec.Raw else field
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"input '{name}': {exc}") from exc
    depth = depth_of(lists)
    if depth > json_depth:
        raise InvalidArgument(f"input '{name}': got lists nested {depth} deep, expected at most {json_depth}")
    if not depth:
        return [], [lists]
    level = lists
    for _ in range(depth - 1):
        if not all(isinstance(each, list) for each in level):
            raise InvalidArgument(f"input '{name}': lists and elements side by side, expected equal lists")
        level = [element for each in level for element in each]
    return even_sizes(name, lists, depth)


def _bytes(name: str, element: Any) -> bytes:
    if isinstance(element, str):
        return element.encode()
    if isinstance(element, dict) and element.keys() == {_B64} and isinstance(element[_B64], str):
        try:
            return base64.b64decode(element[_B64], validate=True)
        except ValueError as exc:
            raise InvalidArgument(f"input '{name}': b64: {exc}") from exc
    raise InvalidArgument(f'input \'{name}\': expected text, or {{"b64": "…"}}, got {type(element).__name__}')


def _packed(elements: list[bytes]) -> np.ndarray:
    made = np.empty(len(elements), NUMPY["BYTES"])
    made[:] = elements
    return made
