"""Tensor bytes of the v2 protocol to numpy arrays and back: views where that can be."""

import io
import struct
from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from backends.datatypes import NUMPY
from gateway.errors import InvalidArgument
from gateway.turns import SLICE, pause

_LENGTH: Final = struct.Struct("<I")
_BYTES: Final = NUMPY["BYTES"]
_COPIED: Final = 4 << 10  # bytes: to copy them costs a tenth of what a view does
_AT_ONCE: Final = 1 << 20  # bytes: to copy more holds the interpreter for milliseconds, mostly for memory that is new
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
        element = view[at : at + length]
        elements[i] = bytes(element) if length <= _AT_ONCE else joined((element,))
        at += length
    if at != total:
        raise InvalidArgument(f"input '{name}': {total - at} bytes are left after the {count} BYTES elements of its shape")
    return elements


def tensor_to_bytes(array: np.ndarray) -> Buffer:
    """Raw v2 bytes of an array: a view where it is contiguous and not short, BYTES elements with their 4-byte lengths.

    str elements are encoded as UTF-8.
    """
    if array.dtype.kind not in "OSU":
        if array.nbytes <= _COPIED:
            return array.tobytes()
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    flat = array.reshape(-1)
    if flat.size <= SLICE:
        return _bytes_of(flat)
    parts: list[bytes] = []
    for at in range(0, flat.size, SLICE):
        parts.append(_bytes_of(flat[at : at + SLICE]))
        pause()
    return joined(parts)


def _bytes_of(elements: np.ndarray) -> bytes:
    parts: list[bytes] = []
    for element in elements:
        raw = element if type(element) is bytes else element.encode() if isinstance(element, str) else bytes(element)
        parts.append(_LENGTH.pack(len(raw)))
        parts.append(raw)
    return joined(parts)


def joined(pieces: Sequence[Buffer]) -> bytes:
    """All pieces as one. Beside a loop it is copied little by little."""
    if sum(map(len, pieces)) <= _AT_ONCE:
        return b"".join(pieces)
    whole = io.BytesIO()  # which grows where it is, and gives what it holds without a copy
    copied = 0
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, len(view), _AT_ONCE):
            copied += whole.write(view[at : at + _AT_ONCE])
            if copied >= _AT_ONCE:
                pause()
                copied = 0
    return whole.getvalue()
