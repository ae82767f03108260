"""Tensor bytes of the v2 protocol to numpy arrays and back: views where that can be."""

import struct
from collections.abc import Sequence
from math import prod

import numpy as np

from backends.datatypes import NUMPY
from gateway.errors import InvalidArgument
from gateway.turns import SLICE, pause

_LENGTH = struct.Struct("<I")
_BYTES = NUMPY["BYTES"]
Buffer = bytes | bytearray | memoryview


def tensor_from_bytes(name: str, datatype: str, shape: Sequence[int], buffer: Buffer) -> np.ndarray:
    """View raw v2 bytes (row-major, little-endian) as an array of `shape`; BYTES elements are copied out.

    Raises: InvalidArgument, if the bytes are not exactly those of the shape, or the datatype is unknown.
    """
    dtype = check_bytes(name, datatype, shape, len(buffer))
    if dtype is _BYTES:
        return shaped(name, _bytes_elements(name, prod(shape), buffer), shape)
    return shaped(name, np.frombuffer(buffer, dtype), shape)


def check_bytes(name: str, datatype: str, shape: Sequence[int], got: int) -> np.dtype:
    """The type of the elements. Raises: InvalidArgument, if so many raw bytes cannot be those of the shape."""
    dtype = numpy_dtype(name, datatype)
    count = prod(shape)
    if dtype is _BYTES:
        # Each element takes at least its length: a shape that promises more cannot be allocated for.
        if count * 4 > got:
            raise InvalidArgument(f"input '{name}': {got} bytes cannot hold the {count} BYTES elements of its shape")
    elif got != (expected := count * dtype.itemsize):
        raise InvalidArgument(
            f"unexpected total byte size {got} for input '{name}', expecting {expected} ({datatype} {list(shape)})"
        )
    return dtype


def shaped(name: str, flat: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A view of so many elements as the shape says. Raises: InvalidArgument, for a size that no array can have, beside a 0."""
    try:
        return flat.reshape(shape)
    except ValueError:
        raise InvalidArgument(f"input '{name}': shape {list(shape)} is larger than a tensor can be") from None


def numpy_dtype(name: str, datatype: object) -> np.dtype:
    """Raises: InvalidArgument, if the protocol has no such datatype."""
    dtype = NUMPY.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise InvalidArgument(f"input '{name}': unknown datatype {datatype!r}, expected one of {', '.join(NUMPY)}")
    return dtype


def _bytes_elements(name: str, count: int, buffer: Buffer) -> np.ndarray:
    view = memoryview(buffer)
    total = len(view)
    elements = np.empty(count, dtype=object)
    at = 0
    for i in range(count):
        if not i % SLICE:
            pause()
        if at + 4 > total:
            raise InvalidArgument(f"input '{name}': BYTES data ends within the length of element {i} of {count}")
        (length,) = _LENGTH.unpack_from(view, at)
        at += 4
        if at + length > total:
            raise InvalidArgument(
                f"input '{name}': BYTES element {i} of {count} has length {length}, but only {total - at} bytes are left"
            )
        elements[i] = bytes(view[at : at + length])
        at += length
    if at != total:
        raise InvalidArgument(f"input '{name}': {total - at} bytes are left after the {count} BYTES elements of its shape")
    return elements


def tensor_to_bytes(array: np.ndarray) -> Buffer:
    """Raw v2 bytes of an array: a view where it is contiguous, BYTES elements with their 4-byte lengths.

    str elements are encoded as UTF-8.
    """
    if array.dtype.kind not in "OSU":
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    flat = array.reshape(-1)
    if flat.size <= SLICE:
        return _bytes_of(flat)
    parts: list[bytes] = []
    for at in range(0, flat.size, SLICE):
        parts.append(_bytes_of(flat[at : at + SLICE]))
        pause()
    return b"".join(parts)


def _bytes_of(elements: np.ndarray) -> bytes:
    parts: list[bytes] = []
    for element in elements:
        raw = element if type(element) is bytes else element.encode() if isinstance(element, str) else bytes(element)
        parts.append(_LENGTH.pack(len(raw)))
        parts.append(raw)
    return b"".join(parts)
