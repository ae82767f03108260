"""The smallest request that a model takes, for those who ask it wrong, and for its description."""

from collections.abc import Callable
from math import prod
from typing import Any, Final

import orjson

from backends.base import ONE_AS_TEXT, ModelSpec, TensorSpec
from backends.datatypes import NUMPY

_SHOWN: Final = 32  # elements of one input
_INPUTS_SHOWN: Final = 16
WITHOUT_JSON: Final = frozenset(("FP16", "BF16"))  # they pass as bytes only


def smallest_request(spec: ModelSpec) -> dict[str, Any]:
    """The REST body with the fewest elements: one row, every other open dimension 1, no optional input that can be left out."""
    return {"inputs": [_entry(tensor) | {_key(tensor): _content(tensor)} for tensor in needed_inputs(spec)]}


def smallest_request_text(spec: ModelSpec) -> str:
    """The same as JSON, in which long `data` is only begun."""
    entries = []
    for tensor in needed_inputs(spec)[:_INPUTS_SHOWN]:
        content = _dumped(_content(tensor)) if _count(tensor) <= _SHOWN else _begun(tensor)
        entries.append(f'{_dumped(_entry(tensor))[:-1]},"{_key(tensor)}":{content}}}')
    more = len(needed_inputs(spec)) - len(entries)
    return f'{{"inputs":[{",".join(entries)}{f", … {more} more" if more else ""}]}}'


def smallest_generate(spec: ModelSpec) -> dict[str, Any]:
    """The same request for the generate extension: one element without its list."""
    return {tensor.name: _element(tensor) if _count(tensor) == 1 else _content(tensor) for tensor in needed_inputs(spec)}


def smallest_generate_text(spec: ModelSpec) -> str:
    """The same as JSON, in which long lists are only begun."""

    def flat(tensor: TensorSpec) -> str:
        if _count(tensor) > _SHOWN:
            return _begun(tensor)
        return _dumped(_element(tensor) if _count(tensor) == 1 else _content(tensor))

    return _object(spec, flat)


def smallest_rows_text(spec: ModelSpec) -> str:
    """The same request in the rows of KServe v1, as JSON, likewise."""
    behind = 1 if spec.max_rows else 0
    row = _object(spec, lambda tensor: _nested(_dumped(_element(tensor)), smallest_shape(tensor)[behind:]))
    return f'{{"instances":[{row}]}}'


def smallest_columns_text(spec: ModelSpec) -> str:
    """The same request in the columns of KServe v1, as JSON, likewise."""
    columns = _object(spec, lambda tensor: _nested(_dumped(_element(tensor)), smallest_shape(tensor)))
    return f'{{"inputs":{columns}}}'


def needed_inputs(spec: ModelSpec) -> list[TensorSpec]:
    """Those that no request can be without; the first, where that is none."""
    return [tensor for tensor in spec.inputs if not tensor.optional] or list(spec.inputs[:1])


def smallest_shape(tensor: TensorSpec) -> list[int]:
    return [size if size >= 0 else 1 for size in tensor.shape]


def _object(spec: ModelSpec, written: Callable[[TensorSpec], str]) -> str:
    """An object of inputs by name. written: the value of one."""
    needed = needed_inputs(spec)
    fields = [f"{_dumped(tensor.name)}:{written(tensor)}" for tensor in needed[:_INPUTS_SHOWN]]
    more = len(needed) - len(fields)
    return f"{{{','.join(fields)}{f', … {more} more' if more else ''}}}"


def _nested(element: str, shape: list[int]) -> str:
    if not shape:
        return element
    size, inner = shape[0], _nested(element, shape[1:])
    return f"[{inner}, … {size} of them]" if size > 1 and prod(shape) > _SHOWN else f"[{','.join([inner] * size)}]"


def _entry(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": smallest_shape(tensor)}


def _key(tensor: TensorSpec) -> str:
    return "parameters" if tensor.datatype in WITHOUT_JSON else "data"


def _count(tensor: TensorSpec) -> int:
    return prod(smallest_shape(tensor))


def _element(tensor: TensorSpec) -> Any:
    """As of `ones`, with which the model was tried."""
    return {"BOOL": True, "BYTES": ONE_AS_TEXT.decode(), "FP32": 1.0, "FP64": 1.0}.get(tensor.datatype, 1)


def _content(tensor: TensorSpec) -> Any:
    if tensor.datatype in WITHOUT_JSON:
        return {"binary_data_size": _count(tensor) * NUMPY[tensor.datatype].itemsize}
    return [_element(tensor)] * _count(tensor)


def _begun(tensor: TensorSpec) -> str:
    if tensor.datatype in WITHOUT_JSON:
        return _dumped(_content(tensor))
    return f"[{_dumped(_element(tensor))}, … {_count(tensor)} of them]"


def _dumped(value: Any) -> str:
    return orjson.dumps(value).decode()
