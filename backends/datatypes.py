"""The fourteen datatypes of the Open Inference Protocol v2 and how numpy holds them.

BYTES is a numpy object array of `bytes`; BF16 is `ml_dtypes.bfloat16` (numpy has none of its own).
Source: KServe Open Inference Protocol, "Tensor Data Types"; Triton `model_config.proto` for `TYPE_*`.
"""

from collections.abc import Mapping
from typing import Final

import ml_dtypes
import numpy as np

NUMPY: Final[dict[str, np.dtype]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(object),
}

_SHOWN_BITS: Final = 128
_NAMES: Final[dict[np.dtype, str]] = {dtype: name for name, dtype in NUMPY.items()}


def datatype_of(array: np.ndarray) -> str:
    """Name the v2 datatype of an array. Raises: KeyError, if the protocol has none for its dtype."""
    if array.dtype.kind in "SU":
        return "BYTES"
    return _NAMES[array.dtype]


def of_floats(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or array.dtype == NUMPY["BF16"]


def config_datatype(datatype: str) -> str:
    """The name Triton's model configuration uses: FP32 -> TYPE_FP32, BYTES -> TYPE_STRING."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def normalised(arrays: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Arrays as the protocol has them, by name."""
    return {str(name): as_array(value) for name, value in arrays.items()}


def as_array(value: object) -> np.ndarray:
    """What numpy makes of it; of texts, also beside numbers, an object array."""
    try:
        array = np.asarray(value)
    except UnicodeDecodeError:  # of bytes beside str
        return as_objects(value)
    # In its own text numpy drops zeros at the end of an element, and makes texts of numbers beside them.
    if array.dtype.kind in "SU":
        return as_objects(value)
    if array.dtype == np.float64 and not isinstance(value, np.ndarray) and array.max(initial=0.0) >= 1 << 63:
        whole = np.asarray(value, object)  # numpy makes floats of whole numbers of which only some are below that
        if all(isinstance(each, int) and 0 <= each < 1 << 64 for each in whole.ravel().tolist()):
            return whole.astype(np.uint64)
    return array


def as_requested(example: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Its arrays with texts in UTF-8, as requests bring them, and numbers beside texts as such."""
    arrays = normalised(example)
    for name, array in arrays.items():
        if array.dtype.hasobject:
            arrays[name] = array.copy()
            of_texts = any(isinstance(each, str | bytes) for each in array.flat)
            for index, each in np.ndenumerate(array):
                if isinstance(each, str):
                    arrays[name][index] = each.encode()
                elif of_texts and np.isscalar(each) and not isinstance(each, bytes):
                    arrays[name][index] = str(each).encode()
    return arrays


def as_objects(value: object) -> np.ndarray:
    """An object array of lists, in which an array without dimensions, as `np.char.upper` makes of one text, is its element."""
    array = np.asarray(value, object)
    if np.ndarray in set(map(type, array.ravel().tolist())):
        for index, each in np.ndenumerate(array):
            if isinstance(each, np.ndarray) and not each.ndim:
                array[index] = each.item()
    return array


def remedy(array: np.ndarray, expected: np.dtype) -> str:
    """What the author of a model can do about an array of another dtype than expected."""
    if array.dtype.kind == "c":
        return "return `.real` and `.imag` as two outputs"
    if array.dtype.kind == "S":
        return "it has lost the zeros at the end of its elements: make it with dtype=object"
    way = f'return it with .astype("{expected.name}")'
    of_others = array.dtype.hasobject and not all(isinstance(each, bytes | str) for each in array.flat)
    return way if of_others or array.dtype not in _NAMES else f"{way}, or declare {_NAMES[array.dtype]}"


def integer_shown(value: int) -> str:
    """An integer in a message: Python writes none of more than 4300 digits, and nobody reads hundreds."""
    return str(value) if value.bit_length() <= _SHOWN_BITS else f"an integer of {value.bit_length()} bits"


def fields_of(results: object) -> tuple[str, ...]:
    """The names in a named tuple, whose values are outputs of these names; none of anything else."""
    return getattr(results, "_fields", ()) if isinstance(results, tuple) else ()
