"""Tensors as CSV, npy, raw bytes and text, pure: what names neither inputs nor datatypes, which are the model's.

CSV: a row of the model is a line. The columns of several inputs stand side by side, in the model's order, as many as a row of
each has elements; those of several outputs likewise. npy: the array of the one input or output; never a pickle. Raw: its bytes,
row by row; of BYTES one element. Text: one element of BYTES; an answer has a line for each.
"""

import csv
import io
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from math import isinf, prod
from typing import Any, Final, NamedTuple

import numpy as np

from backends.base import ModelSpec, Tensors, TensorSpec
from backends.datatypes import NUMPY, datatype_of
from gateway.errors import InvalidArgument, shortened
from gateway.protocols.json_data import gathered, nested_to_json, read_float, tensor_of_elements
from gateway.protocols.smallest import needed_inputs
from gateway.protocols.tensors import TakesLong, cast, check_input, check_raw, check_texts, check_written, filled
from gateway.turns import SLICE, pause
from gateway.wire.tensors import Buffer, joined, shaped, tensor_from_bytes, tensor_to_bytes

_HEAD_BYTES: Final = 1 << 10  # of an npy, which has 128 as a rule; numpy would parse 10 000 for 65 ms (2026-11-23, 2 cores)
_LONG_BYTES: Final = 4 << 20  # copied or converted: a few milliseconds
_MANY_LINES: Final = 1 << 10
_WHOLE: Final = 1 << 53  # from there on not every whole number is a float
_LINES_AT_ONCE: Final = 64  # of a table that is read
_MANY_NUMBERS: Final = 1 << 16
_NUMBERS_AT_ONCE: Final = 1 << 13  # that are written: a millisecond or two
_BOOLS: Final = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


# from CSV


class _Columns(NamedTuple):
    """Those of one input. read: makes a value of a field. values: of all lines so far."""

    tensor: TensorSpec
    begin: int
    end: int
    read: Callable[[str], Any]
    values: "list[Any] | array[float]"

    def take(self, lines: list[list[str]], before: int) -> None:
        """before: so many lines. Raises: InvalidArgument."""
        begin, end = self.begin, self.end
        fields = [field for line in lines for field in line[begin:end]] if len(lines) > 1 else lines[0][begin:end]
        try:
            self.values.extend(map(self.read, fields))
            odd = self.read is not str and any("_" in field for field in fields)  # Python reads 1_0 as 10
        except ValueError:
            odd = True
        if odd:
            index = next(index for index, field in enumerate(fields) if not _readable(self.read, field))
            line, column = divmod(index, end - begin)
            raise InvalidArgument(
                f"text/csv: line {before + line + 1}, column {begin + column + 1}: got {fields[index][:40]!r}, "
                f"expected {self.tensor.datatype}"
            )


def from_csv(spec: ModelSpec, model: str, body: Buffer, *, titled: bool) -> Tensors:
    """titled: the first line has names, which are passed over. Raises: InvalidArgument."""
    csv.field_size_limit(sys.maxsize)  # here, for it is the process's: `gateway batch` has its own
    columns: list[_Columns] = []
    width = lines = 0
    try:
        text = bytes(body).decode("utf-8-sig")
        read = islice(filter(None, csv.reader(io.StringIO(text, newline=""), strict=True)), int(titled), None)
        while some := list(islice(read, _LINES_AT_ONCE)):
            if not columns:
                width = len(some[0])
                columns = _columns(spec, width)
            for number, line in enumerate(some, lines + 1):
                if len(line) != width:
                    raise InvalidArgument(
                        f"text/csv: line {number} has {len(line)} columns, the first has {width}: expected as many"
                    )
            for each in columns:
                each.take(some, lines)
            lines += len(some)
    except UnicodeDecodeError as exc:
        raise InvalidArgument(f"text/csv: no UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    except csv.Error as exc:
        raise InvalidArgument(f"text/csv: {exc}") from exc
    if not lines:
        raise InvalidArgument("text/csv: the body has no line of values: expected one for each row")
    inputs: Tensors = {}
    for tensor, begin, end, _, values in columns:
        name, datatype = tensor.name, tensor.datatype
        shape = _shape_of(spec, model, tensor, lines, end - begin)
        check_input(spec, model, name, datatype, shape)
        if datatype == "BYTES":
            check_texts(name, shape, in_haste=False)
        if isinstance(values, list):
            inputs[name] = tensor_of_elements(name, datatype, shape, values)
        else:
            made = shaped(name, np.array(values, np.float64), shape)
            inputs[name] = cast(name, datatype, made)
    return inputs


def _columns(spec: ModelSpec, width: int) -> list[_Columns]:
    """Which of so many are whose. Raises: InvalidArgument."""
    needed = needed_inputs(spec)
    widths = [width] if len(needed) == 1 else [prod(max(size, 1) for size in _per_row(spec, tensor)) for tensor in needed]
    if sum(widths) != width:
        columns = ", ".join(f"{count} of '{tensor.name}'" for tensor, count in zip(needed, widths, strict=True))
        raise InvalidArgument(f"text/csv: got {width} columns, expected {sum(widths)}: {columns}")
    ends = list(accumulate(widths))
    return [
        _Columns(tensor, end - count, end, *_reader(tensor.datatype))
        for tensor, count, end in zip(needed, widths, ends, strict=True)
    ]


def _reader(datatype: str) -> "tuple[Callable[[str], Any], list[Any] | array[float]]":
    """What reads a field, and holds the values: of floats in a fifth of the memory of a list."""
    if datatype == "BYTES":
        return str, []
    if datatype == "BOOL":
        return _bool, []
    return (_integer, []) if "INT" in datatype else (_number, array("d"))


def _per_row(spec: ModelSpec, tensor: TensorSpec) -> tuple[int, ...]:
    return tensor.shape[1:] if spec.max_rows else tensor.shape


def _shape_of(spec: ModelSpec, model: str, tensor: TensorSpec, lines: int, columns: int) -> list[int]:
    """Of so many lines and columns."""
    if spec.max_rows:
        per_row = filled(tensor.shape[1:], columns)
        found = None if per_row is None else [lines, *per_row]
    else:
        found = [lines, columns] if len(tensor.shape) == 2 else filled(tensor.shape, lines * columns)
    if found is None:
        raise InvalidArgument(
            f"text/csv: {lines} lines of {columns} columns cannot be made input '{tensor.name}' of model '{model}', "
            f"{tensor.datatype} {list(tensor.shape)}"
        )
    return found


def cell_of_table(datatype: str, cell: str) -> "bool | int | float":
    """A number as tables have it, which JSON may not: .5, +1, nan, inf, True. Raises: ValueError."""
    read, _ = _reader(datatype)
    if datatype == "BYTES" or not _readable(read, cell):
        raise ValueError
    return read(cell)  # type: ignore[no-any-return]


def _readable(read: Callable[[str], Any], field: str) -> bool:
    try:
        read(field)
    except ValueError:
        return False
    return "_" not in field


def _bool(field: str) -> bool:
    found = _BOOLS.get(field.strip().lower())
    if found is None:
        raise ValueError
    return found


def _number(field: str) -> float:
    try:
        return read_float(field)
    except ValueError:
        value = float(field)  # as tables also have it: .5, +1, nan
    if isinf(value) and any(map(str.isdigit, field)):  # `inf` is meant so, a number too large is not
        raise ValueError
    return value


def _integer(field: str) -> int:
    """Tables write whole numbers as `1.0`, too."""
    try:
        return int(field)
    except ValueError:
        value = float(field)
    if not value.is_integer() or abs(value) >= _WHOLE:
        raise ValueError
    return int(value)


# to CSV and text


def to_csv(spec: ModelSpec, outputs: Tensors, *, quoted: bool, in_haste: bool) -> list[bytes]:
    """The pieces of a table with a line for each row.

    quoted: text that would be read as something else. Raises: InvalidArgument; TakesLong, in haste.
    """
    tables = {name: _table(spec, array) for name, array in outputs.items()}
    counts = {len(table) for table in tables.values()}
    if len(counts) > 1:
        raise InvalidArgument(f"outputs of {min(counts)} and of {max(counts)} rows have no common lines: ask for JSON")
    rows = max(counts)
    width = sum(table.shape[1] for table in tables.values())
    if in_haste:
        if rows > _MANY_LINES or rows * width > _MANY_NUMBERS:
            raise TakesLong
        for table in tables.values():
            check_written(table, in_haste=True)
    most = SLICE if any(table.dtype.kind in "OSU" for table in tables.values()) else _NUMBERS_AT_ONCE
    lines = (
        _long_lines(tables, rows, quoted, most) if width > most else _short_lines(tables, rows, quoted, most // max(width, 1))
    )
    return gathered(lines)


def _table(spec: ModelSpec, array: np.ndarray) -> np.ndarray:
    if spec.max_rows:
        return array.reshape(len(array), prod(array.shape[1:]))
    return array if array.ndim == 2 else array.reshape(1, array.size)


def _short_lines(tables: Tensors, rows: int, quoted: bool, step: int) -> Iterator[bytes]:
    for at in range(0, rows, step):
        columns = [_lines(name, table[at : at + step], quoted) for name, table in tables.items()]
        yield b"".join([b",".join(line) + b"\n" for line in zip(*columns, strict=True)])
        pause()


def _long_lines(tables: Tensors, rows: int, quoted: bool, step: int) -> Iterator[bytes]:
    for row in range(rows):
        begun = False
        for name, table in tables.items():
            for at in range(0, table.shape[1], step):
                if begun:
                    yield b","
                yield from _lines(name, table[row : row + 1, at : at + step], quoted)
                begun = True
                pause()
        yield b"\n"


def _lines(name: str, table: np.ndarray, quoted: bool) -> list[bytes]:
    if not table.size:
        return [b""] * len(table)
    datatype = datatype_of(table)
    if datatype != "BYTES":
        (text,) = nested_to_json(name, datatype, table)
        return text[2:-2].split(b"],[")
    lines = []
    for row in table:
        texts = [element.encode() if isinstance(element, str) else bytes(element) for element in row]
        lines.append(b",".join([_quoted(text) for text in texts] if quoted else texts))
    return lines


def _quoted(text: bytes) -> bytes:
    odd = any(mark in text for mark in (b",", b'"', b"\r", b"\n")) or not text
    return b'"%b"' % text.replace(b'"', b'""') if odd else text


# npy


def from_npy(spec: ModelSpec, model: str, body: Buffer, *, in_haste: bool) -> Tensors:
    """Raises: InvalidArgument; TakesLong, in haste."""
    tensor = _one_input(spec, model, "application/x-npy")
    head = io.BytesIO(bytes(memoryview(body)[:_HEAD_BYTES]))
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        sizes, by_column, dtype = read(head)
    except Exception as exc:  # whatever numpy makes of what is none
        said = shortened(" ".join(str(exc).split()))
        if not isinstance(exc, ValueError) or said.startswith("malformed node"):  # Python's parser, of its own objects
            said = "expected a dict of descr, fortran_order and shape"
        raise InvalidArgument(f"application/x-npy: no npy file with a head of at most {_HEAD_BYTES} bytes: {said}") from exc
    shape = tuple(map(int, sizes))  # numpy takes true for 1
    if dtype.kind not in "biufSU" or not dtype.itemsize:
        raise InvalidArgument(f"application/x-npy: an array of {dtype}: expected numbers, bool, or text of fixed length")
    content = memoryview(body)[head.tell() :]
    expected = prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise InvalidArgument(f"application/x-npy: {len(content)} bytes behind the head, expected {expected} ({dtype} {shape})")
    want = NUMPY[tensor.datatype]
    texts = dtype.kind in "SU"
    if texts:
        check_texts(tensor.name, shape, in_haste=in_haste)
    if in_haste and len(content) > _LONG_BYTES and (by_column or dtype != want):
        raise TakesLong
    if texts:
        _check_characters(content, dtype)
    fitting = [1, *shape] if spec.max_rows and len(shape) == len(tensor.shape) - 1 else [*shape]
    check_input(spec, model, tensor.name, tensor.datatype, fitting)
    flat = np.frombuffer(content, dtype) if len(content) else np.empty(0, dtype)
    array = shaped(tensor.name, flat, shape[::-1]).T if by_column else shaped(tensor.name, flat, shape)
    return {tensor.name: cast(tensor.name, tensor.datatype, np.ascontiguousarray(array)).reshape(fitting)}


def _check_characters(content: memoryview, dtype: np.dtype[Any]) -> None:
    """Raises: InvalidArgument, if text holds what no character is, which Python and UTF-8 have no form for."""
    if dtype.kind == "U":
        points = np.frombuffer(content, dtype.byteorder + "u4")
        if ((points > 0x10FFFF) | ((points >= 0xD800) & (points <= 0xDFFF))).any():
            raise InvalidArgument("application/x-npy: text with a number that is no character of Unicode")


def to_npy(outputs: Tensors, *, in_haste: bool) -> list[Buffer]:
    """Raises: InvalidArgument; TakesLong, in haste."""
    name, array = _one_output(outputs, "application/x-npy")
    datatype = datatype_of(array)
    if datatype == "BYTES" or array.dtype.hasobject:
        raise InvalidArgument(f"output '{name}' is BYTES, which has no npy form: ask for JSON or text/csv")
    if datatype == "BF16":  # which numpy knows only where ml_dtypes is loaded
        if in_haste and array.nbytes > _LONG_BYTES:
            raise TakesLong
        array = array.astype(np.float32)
    head = io.BytesIO()
    array = np.ascontiguousarray(array).reshape(array.shape)
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    return [head.getvalue(), tensor_to_bytes(array)]


# raw bytes


def from_raw(spec: ModelSpec, model: str, body: Buffer, *, text: bool, in_haste: bool) -> Tensors:
    """text: it goes to BYTES only. Raises: InvalidArgument; TakesLong, in haste."""
    media = "text/plain" if text else "application/octet-stream"
    tensor = _one_input(spec, model, media)
    name, datatype = tensor.name, tensor.datatype
    shape = [1 if size < 0 else size for size in tensor.shape]
    if datatype == "BYTES":
        if prod(shape) != 1:
            raise InvalidArgument(f"{media}: the body is one element, but input '{name}' is BYTES {list(tensor.shape)}")
        check_raw(len(body), in_haste=in_haste)
        elements = np.empty(1, NUMPY["BYTES"])
        elements[0] = joined((body,))
        return {name: elements.reshape(shape)}
    if text:
        raise InvalidArgument(f"{media}: input '{name}' of model '{model}' is {datatype}: expected text/csv or JSON")
    variable = [axis for axis, size in enumerate(tensor.shape) if size < 0]
    if spec.max_rows and len(variable) > 1:
        variable = variable[1:]  # of one row
    if len(variable) > 1:
        raise InvalidArgument(
            f"{media}: {len(body)} bytes have no one shape for input '{name}', {datatype} {list(tensor.shape)}: send an npy"
        )
    step = prod(shape) * NUMPY[datatype].itemsize
    for axis in variable:
        shape[axis] = len(body) // step if step else 0
    return {name: tensor_from_bytes(name, datatype, shape, body)}


def to_raw(outputs: Tensors, *, in_haste: bool) -> list[Buffer]:
    """Of BYTES its one element. Raises: InvalidArgument; TakesLong, in haste."""
    name, array = _one_output(outputs, "application/octet-stream")
    if array.dtype.kind not in "OSU":
        check_written(array, in_haste=in_haste)
        return [tensor_to_bytes(array)]
    if array.size != 1:
        raise InvalidArgument(f"output '{name}' has {array.size} elements of BYTES, expected one, as no JSON is asked for")
    check_written(array, in_haste=in_haste)
    (element,) = array.flat
    return [element.encode() if isinstance(element, str) else bytes(element)]


def _one_input(spec: ModelSpec, model: str, media: str) -> TensorSpec:
    needed: Sequence[TensorSpec] = needed_inputs(spec)
    if len(needed) != 1:
        names = ", ".join(f"'{tensor.name}'" for tensor in needed)
        raise InvalidArgument(f"{media} holds one tensor, but model '{model}' has {len(needed)} inputs: {names}; send JSON")
    return needed[0]


def _one_output(outputs: Tensors, media: str) -> tuple[str, np.ndarray]:
    if len(outputs) != 1:
        names = ", ".join(f"'{name}'" for name in outputs)
        raise InvalidArgument(f"{media} holds one tensor, but there are {len(outputs)} outputs: {names}; ask for JSON")
    ((name, array),) = outputs.items()
    return name, array
