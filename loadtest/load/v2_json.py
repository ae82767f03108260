"""The JSON of the Open Inference Protocol v2, as others wrote it: a request's inputs, or an answer's outputs.

All that is wrong in it is a ValueError that names the field, its value and what was expected.
"""

import contextlib
import reprlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from backends.base import Tensors
from backends.datatypes import NUMPY
from gateway.documents.faults import cut
from loadtest.wording import counted

OF_TENSORS: Final = ("name", "datatype", "shape", "data")


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
        array = array_of(tensor, field)
        arrays[str(tensor["name"])], datatypes[str(tensor["name"])] = array, tensor["datatype"]
    return arrays, datatypes


def array_of(tensor: object, field: str) -> np.ndarray:
    """One of `listed`, with its data in it. Raises: ValueError."""
    tensor = checked(tensor, field)
    datatype, shape, data = tensor["datatype"], tensor["shape"], tensor["data"]
    try:
        values = _encoded(data) if datatype == "BYTES" else data
        array = np.array(values, dtype=NUMPY[datatype])
    except (ValueError, TypeError, OverflowError) as exc:
        raise ValueError(f"{named(tensor, field)}: data {brief(data)}: expected {datatype}: {exc}") from exc
    try:
        return array.reshape(shape)
    except (ValueError, TypeError, OverflowError) as exc:
        fit = f"a shape of {counted(array.size, 'value')}, as many as data has"
        raise ValueError(f"{named(tensor, field)}: shape {brief(shape)}: expected {fit}") from exc


def _encoded(data: object) -> list[bytes]:
    made: list[bytes] = []
    for text in np.asarray(data, dtype=object).reshape(-1):
        if not isinstance(text, str):
            raise ValueError(f"{brief(text)} is no text")
        made.append(text.encode())
    return made


def brief(value: object) -> str:
    """A value for a message, however long or deep it is."""
    return cut(reprlib.repr(value))
