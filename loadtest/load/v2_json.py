"""The JSON of the Open Inference Protocol v2, as others wrote it: a request's inputs, or an answer's outputs.

All that is wrong in it is a ValueError that names the field, its value and what was expected.
"""

import contextlib
import json
import reprlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from backends.base import Tensors
from backends.datatypes import NUMPY
from gateway.documents.faults import cut
from loadtest.wording import counted

OF_TENSORS: Final = ("name", "datatype", "shape", "data")


def parsed(text: bytes) -> Any:
    """JSON, in which NaN and infinity may stand as these words: v2 servers and clients write them so. Raises: ValueError."""
    if not text.strip():
        raise ValueError("it is empty")
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise ValueError("its lists or objects lie too deep in each other") from exc
    except ValueError as exc:
        raise ValueError(f"it is no JSON: {exc}") from exc


def listed(document: object, field: str) -> list[Mapping[str, Any]]:
    """What a document has under `field`, inputs or outputs: the JSON of each tensor. Raises: ValueError."""
    if not isinstance(document, dict):
        raise ValueError(f'{brief(document)}: expected an object with "{field}"')
    if field not in document:
        fields = cut(", ".join(map(str, document))) or "none"
        raise ValueError(f'expected the field "{field}", got {fields}')
    tensors = document[field]
    if not isinstance(tensors, list):
        raise ValueError(f"{field}: {brief(tensors)}: expected a list of tensors")
    return tensors


def checked(tensor: object, field: str, keys: tuple[str, ...] = OF_TENSORS) -> Mapping[str, Any]:
    """One of `listed`, if it is an object that has these keys. Raises: ValueError."""
    if not isinstance(tensor, dict) or not set(keys) <= tensor.keys():
        raise ValueError(f"{field}: {brief(tensor)}: expected an object with {', '.join(keys)}")
    text_of(tensor["name"], f"{field}: name")
    if "datatype" in keys and tensor["datatype"] not in list(NUMPY):  # it may have no hash
        raise ValueError(f"{named(tensor, field)}: datatype {brief(tensor['datatype'])}: expected one of {', '.join(NUMPY)}")
    return tensor


def named(tensor: Mapping[str, Any], field: str) -> str:
    """What messages call it: `inputs 'x'`."""
    return f"{field} {str(tensor['name'])!r}"


def parameters_of(holder: Mapping[str, Any], where: str = "") -> Mapping[str, Any]:
    """Those of a request or a tensor; null is none. where: what messages begin with. Raises: ValueError."""
    parameters = holder.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ValueError(f"{where}parameters {brief(parameters)}: expected an object")
    return parameters or {}


def text_of(value: object, where: str) -> str:
    """where: the field, for messages. Raises: ValueError, also for half a character, which no protocol can carry."""
    if isinstance(value, str):
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
    raise ValueError(f"{where} {brief(value)}: expected text of whole characters")


def tensors_of(document: object, field: str) -> tuple[Tensors, dict[str, str]]:
    """The tensors under `field`, and their datatypes. Raises: ValueError."""
    arrays: Tensors = {}
    datatypes: dict[str, str] = {}
    for tensor in listed(document, field):
        array, name = array_of(tensor, field), tensor["name"]
        if name in arrays:
            raise ValueError(f"{named(tensor, field)}: expected one of each name, got two")
        arrays[name], datatypes[name] = array, tensor["datatype"]
    return arrays, datatypes


def array_of(tensor: object, field: str) -> np.ndarray:
    """One of `listed`, with its data in it. Raises: ValueError."""
    tensor = checked(tensor, field)
    datatype, shape, data = tensor["datatype"], tensor["shape"], tensor["data"]
    try:
        array = _elements(datatype, data, nan=type(None) if field == "outputs" else float)
    except (ValueError, ArithmeticError) as exc:
        raise ValueError(f"{named(tensor, field)}: data {brief(data)}: expected {datatype}: {exc}") from exc
    try:
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("a size is a whole number of at least 0")
        return array.reshape(shape)
    except (ValueError, TypeError, OverflowError) as exc:
        fit = f"a shape of {counted(array.size, 'value')}, as many as data has"
        raise ValueError(f"{named(tensor, field)}: shape {brief(shape)}: expected {fit}") from exc


def _elements(datatype: str, data: object, *, nan: type) -> np.ndarray:
    """As they are written: numpy would make numbers of text, and cut off their fractions.

    nan: a type that may stand for it among floats: servers that write JSON with orjson answer null. Raises: ValueError,
    ArithmeticError.
    """
    if not isinstance(data, list):
        raise ValueError("it is no list")
    dtype = NUMPY[datatype]
    kinds, word = _ELEMENTS.get(dtype.kind, ((int, float, nan), "number"))
    flat = np.asarray(data, dtype=object).reshape(-1)
    if not set(map(type, flat)).issubset(kinds):
        raise ValueError(f"{brief(next(each for each in flat if type(each) not in kinds))} is no {word}")
    if datatype == "BYTES":
        return np.array([text.encode() for text in flat], dtype)
    if float not in kinds:
        return np.array(data, dtype)
    with np.errstate(over="raise"):
        return np.array(data, np.float64).astype(dtype)


# kind of dtype -> the types of its elements, and the word for one; all others are floats
_ELEMENTS: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "b": ((bool,), "true or false"),
    "u": ((int,), "whole number"),
    "i": ((int,), "whole number"),
    "O": ((str,), "text"),
}


def brief(value: object) -> str:
    """A value for a message, however long or deep it is."""
    return cut(reprlib.repr(value))
