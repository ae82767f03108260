"""How large a request may be, and what may be in it: of those that are made, before they are."""

from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from math import isfinite, prod
from typing import Any, Final

import numpy as np
from ml_dtypes import finfo

from backends.datatypes import NUMPY
from loadtest.errors import UsageError

_MOST_BYTES: Final = 256 << 20  # of a request
MOST_SIZE: Final = _MOST_BYTES  # of a dimension: no value has less than a byte
_WORD_BYTES: Final = 64  # of memory, of one of BYTES


def range_of(option: str, text: str) -> tuple[int, int]:
    """How few and how many, of rows or of a length. option: as messages name it. Raises: UsageError."""
    low, _, high = text.partition("-")
    try:
        limits = int(low), int(high or low)
    except ValueError:
        raise UsageError(f'{option} {text!r}: expected a number or a range such as "1-8"') from None
    if not 1 <= limits[0] <= limits[1]:
        raise UsageError(f"{option} {text!r}: expected at least 1, and the smaller number first")
    if limits[1] > MOST_SIZE:
        raise UsageError(f"{option} {text!r}: expected at most {MOST_SIZE}")
    return limits


def values_of(option: str, texts: Iterable[str], inputs: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Decimal, Decimal]]:
    """Input -> least and most of its values, exactly. inputs: v2 metadata; empty: not known yet. Raises: UsageError."""
    datatypes = {str(tensor["name"]): str(tensor["datatype"]) for tensor in inputs}
    limits: dict[str, tuple[Decimal, Decimal]] = {}
    for text in texts:
        name, _, span = text.partition("=")
        low, _, high = span.partition(":")
        try:
            apart = float(high) - float(low)
        except ValueError:
            raise UsageError(f"{option} {text!r}: expected NAME=LOW:HIGH") from None
        if datatypes and name not in datatypes:
            raise UsageError(f"{option} {text!r}: the model has no input {name!r}, only {', '.join(sorted(datatypes))}")
        if not isfinite(apart):
            raise UsageError(f"{option} {text!r}: expected finite numbers, and a finite one between them")
        try:
            limits[name] = least, most = Decimal(low), Decimal(high)
        except InvalidOperation:  # a float takes it for 0
            raise UsageError(f"{option} {text!r}: expected exponents of at most 18 digits") from None
        if least > most:
            raise UsageError(f"{option} {text!r}: LOW is above HIGH")
        if wanted := _unlike(datatypes.get(name, ""), least, most):
            raise UsageError(f"{option} {text!r}: {wanted}, as it is of {datatypes[name]}")
    return limits


def _unlike(datatype: str, low: Decimal, high: Decimal) -> str:
    """What is expected of values of that datatype, if these are none."""
    dtype = NUMPY.get(datatype)
    if dtype is None:
        return ""  # what makes them refuses it
    if dtype.kind == "O":
        return "expected no range"
    if dtype.kind not in "iub":
        largest = float(finfo(dtype).max)  # type: ignore[no-untyped-call]  # it has none
        with np.errstate(over="ignore"):
            ends = np.array([float(low), float(high)]).astype(dtype)  # rounded: 3.4028235e38 is the largest of FP32
        return "" if np.isfinite(ends).all() else f"expected {-largest:g} to {largest:g}"
    if low != low.to_integral_value() or high != high.to_integral_value():
        return "expected whole numbers"
    held = np.iinfo(dtype) if dtype.kind != "b" else None
    least, most = (int(held.min), int(held.max)) if held else (0, 1)
    return "" if least <= low <= high <= most else f"expected {least} to {most}"


def check_size(option: str, rows: int, length: int, inputs: Iterable[Mapping[str, Any]]) -> None:
    """Raises: UsageError, if a request of so many rows of that length is too large to be made. inputs: v2 metadata. option: of
    rows, as messages name it.
    """
    made_bytes = 0
    for tensor in inputs:
        dtype = NUMPY.get(str(tensor["datatype"]))
        each = _WORD_BYTES if dtype is None or dtype.kind == "O" else dtype.itemsize
        made_bytes += each * prod(shape_of(tensor, rows, length))
    check_bytes(f"{option} {rows}: with a length of {length}", made_bytes)


def check_bytes(what: str, made_bytes: int) -> None:
    """Raises: UsageError, if a request has too many. what: was asked."""
    if made_bytes > _MOST_BYTES:
        raise UsageError(f"{what}, a request has {made_bytes >> 20} MiB, expected at most {_MOST_BYTES >> 20}")


def shape_of(tensor: Mapping[str, Any], rows: int, length: int) -> list[int]:
    """tensor: of v2 metadata. -1 in the first place becomes rows, elsewhere length."""
    sizes = [int(size) for size in tensor["shape"]]
    return [size if size >= 0 else rows if axis == 0 else length for axis, size in enumerate(sizes)]
