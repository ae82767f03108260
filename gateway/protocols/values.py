"""Python's values as a v2 request, so that what reads it and refuses it is what reads the wire.

Arrays become bytes behind the JSON, with the datatype and shape that they have. Nested lists become `data`, of the datatype
that the model declares; those that JSON cannot hold (bytes, FP16, BF16) go behind it as well.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from backends.base import TensorSpec, words_of
from backends.datatypes import NUMPY, datatype_of
from gateway.errors import InvalidArgument, shortened
from gateway.protocols.json_data import lists_from_json
from gateway.protocols.smallest import WITHOUT_JSON
from gateway.protocols.tensors import check_count
from gateway.types import ParameterValue
from gateway.wire.tensors import Buffer, tensor_to_bytes

_LEAVES: Final = (bool, int, float, str, bytes, type(None))
_MOST_BITS: Final = 1024  # of an integer: no number is longer, and Python writes none of some thousand digits


def request_body(
    given: Mapping[str, object],
    inputs: Mapping[str, TensorSpec],
    *,
    outputs: Iterable[str] = (),
    binary: Collection[str] = (),
    parameters: Mapping[str, ParameterValue] | None = None,
) -> tuple[bytes, int]:
    """Write a request; gives the body, and how much of it is JSON.

    given: by input name, arrays, what can be made one (`__array__`), or nested lists. inputs: the model's. outputs: asked for;
    none: all. binary: those of them that are asked for behind the answer's JSON.
    What the codec refuses is left to it. Raises: InvalidArgument, for a value that no request can hold.
    """
    if not isinstance(given, Mapping):
        name = next(iter(inputs), "x")
        raise InvalidArgument(
            f"inputs: got {type(given).__name__}, expected a dict of arrays by input name, such as {{{name!r}: [[…]]}}"
        )
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
        raise InvalidArgument(f"outputs: got {type(outputs).__name__}, expected a list of names")
    entries: list[dict[str, Any]] = []
    tail: list[Buffer] = []
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"inputs: got a name of {type(name).__name__}, expected text")
        expected = inputs.get(name)
        if hasattr(value, "__array__"):
            entry, raw = _of_array(name, _array(name, value), expected)
        else:
            entry, raw = _of_lists(name, value, expected)
        entries.append(entry)
        tail.append(raw)
    head: dict[str, Any] = {"inputs": entries}
    asked: list[dict[str, Any]] = []
    for name in outputs:
        if not isinstance(name, str):
            raise InvalidArgument(f"outputs: got {type(name).__name__} in the list, expected names")
        asked.append({"name": name, "parameters": {"binary_data": True}} if name in binary else {"name": name})
    if asked:
        head["outputs"] = asked
    if parameters:
        head["parameters"] = {_parameter_name(key): _parameter(key, value) for key, value in parameters.items()}
    try:
        text = json.dumps(head).encode()
    except (TypeError, ValueError):
        for entry in entries:
            _check_leaves(entry)
        raise
    return b"".join([text, *tail]), len(text)


def has_plain(dtype: np.dtype) -> bool:
    """Whether Python's own values hold the same: of times in nanoseconds they are integers."""
    return dtype.kind in "SU" or dtype.newbyteorder("=") in NUMPY.values()


def type_shown(value: object) -> str:
    """The type of a value, or the dtype of one of numpy's."""
    return str(value.dtype) if isinstance(value, np.ndarray | np.generic) else type(value).__name__


def _parameter_name(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidArgument(f"parameters: got a name of {type(key).__name__}, expected text")
    return key


def _parameter(key: str, value: object) -> ParameterValue:
    if isinstance(value, np.generic) and has_plain(value.dtype):
        value = _item(value)
    if not isinstance(value, int | float | str):
        got = type(value).__name__
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        got = f"an integer of {value.bit_length()} bits"
    else:
        return value
    raise InvalidArgument(f"parameter '{shortened(key)}': got {got}, expected true or false, a number or text")


def _check_leaves(entry: dict[str, Any]) -> None:
    """Name the element that JSON cannot hold. Raises: InvalidArgument, if there is one."""
    for index, leaf in enumerate(_leaves(entry.get("data", []))):
        got = "bytes" if isinstance(leaf, bytes) else ""
        if isinstance(leaf, int) and leaf.bit_length() > _MOST_BITS:
            got = f"an integer of {leaf.bit_length()} bits"
        if got:
            raise InvalidArgument(f"input '{entry['name']}': element {index} is {got}, expected {entry['datatype']}")


def _array(name: str, value: object) -> np.ndarray:
    if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray) and value.mask.any():
        raise InvalidArgument(f"input '{name}': elements are masked, expected values in their place, as by `.filled(0)`")
    try:
        return np.asarray(value)
    except Exception as exc:  # whatever another library's `__array__` raises, as of a tensor that needs a gradient
        raise InvalidArgument(f"input '{name}': got {type(value).__name__}, which gives no array: {words_of(exc)}") from exc


def _of_array(name: str, array: np.ndarray, expected: TensorSpec | None) -> tuple[dict[str, Any], Buffer]:
    try:
        datatype = datatype_of(array)
    except KeyError:
        datatype = str(array.dtype)
    raw: Buffer = b""
    if expected is not None and datatype == expected.datatype:  # else it is refused before its bytes are looked at
        if array.dtype == object:
            _check_text(name, array.ravel().tolist())
        raw = tensor_to_bytes(array)
    return _binary(name, datatype, array.shape, raw), raw


def _of_lists(name: str, value: object, expected: TensorSpec | None) -> tuple[dict[str, Any], Buffer]:
    try:
        plain = _plain(name, value)
    except RecursionError:
        raise InvalidArgument(f"input '{name}': data: lists nested too deep") from None
    shape = _shape(plain)
    if expected is None:  # of a name that is none, nothing more is looked at
        return {"name": name, "datatype": "", "shape": shape, "data": []}, b""
    datatype = expected.datatype
    data = plain if isinstance(plain, list) else [plain]
    first = next(_leaves(plain), b"")
    odd = first is None or (isinstance(first, str) != (datatype == "BYTES") and not isinstance(first, bytes))
    odd = odd or (len(shape) != len(expected.shape) and not isinstance(first, bytes))  # the first's depth may be no other's
    if odd or datatype in WITHOUT_JSON:  # what is odd is told before the shape is
        lists_from_json(name, datatype, data, max(1, len(shape)), halves=True)  # as what reads the JSON of the others
    if datatype in WITHOUT_JSON or (datatype == "BYTES" and any(isinstance(leaf, bytes) for leaf in _leaves(plain))):
        flat = list(_leaves(plain))
        check_count(name, datatype, shape, len(flat))
        raw = tensor_to_bytes(_packed(name, datatype, flat))
        return _binary(name, datatype, shape, raw), raw
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}, b""


def _binary(name: str, datatype: str, shape: Iterable[int], raw: Buffer) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "parameters": {"binary_data_size": len(raw)}}


def _packed(name: str, datatype: str, flat: list[Any]) -> np.ndarray:
    """Elements that JSON cannot hold, as a flat array."""
    if datatype == "BYTES":
        _check_text(name, flat)
        elements = np.empty(len(flat), object)
        elements[:] = flat
        return elements
    exact = np.asarray(flat, np.float64)
    with np.errstate(over="ignore"):
        array = exact.astype(NUMPY[datatype])
    lost = np.flatnonzero(np.isfinite(exact) & ~np.isfinite(array))
    if lost.size:
        raise InvalidArgument(f"input '{name}': element {lost[0]} is {flat[lost[0]]}, which {datatype} cannot hold")
    return array


def _check_text(name: str, elements: Iterable[object]) -> None:
    for index, element in enumerate(elements):
        if not isinstance(element, bytes | str):
            raise InvalidArgument(
                f"input '{name}': element {index} is of {type(element).__name__}, expected bytes or str in BYTES"
            )


def _plain(name: str, value: object) -> Any:
    """Lists and Python's own values, of tuples, numpy's values and arrays among them."""
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype == object:
            return _plain(name, value.tolist())
        if has_plain(value.dtype):
            return _item(value) if isinstance(value, np.generic) else value.tolist()
    if not isinstance(value, _LEAVES):
        raise InvalidArgument(
            f"input '{name}': got {type_shown(value)}, expected an array, or lists of numbers, true or false, text or bytes"
        )
    return value


def _item(value: np.generic) -> Any:
    """As a value of Python's own; numpy's `item` drops the NULs at the end of a text."""
    if isinstance(value, bytes):
        return bytes(value)
    return str.__str__(value) if isinstance(value, str) else value.item()


def _leaves(plain: Any) -> Iterator[Any]:
    if isinstance(plain, list):
        for item in plain:
            yield from _leaves(item)
    else:
        yield plain


def _shape(plain: Any) -> list[int]:
    """Of the first of each list: that the others are alike is seen when they are counted."""
    shape = []
    while isinstance(plain, list):
        shape.append(len(plain))
        plain = plain[0] if plain else None
    return shape
