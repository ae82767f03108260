"""Answers as files: JSON Lines, CSV and Parquet, in parts that are joined in the end.

A row has its number first (`_row`), then what is kept of the input, then the model's outputs.
"""

import base64
import csv
import datetime
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import IO, Any, Final, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from backends.base import ModelSpec, TensorSpec
from gateway.transform.asking import Answer
from gateway.transform.rows import Bare, Row, Unread, plain, values_of
from gateway.transform.storage import Store

NUMBER: Final = "_row"
_COPIED_BYTES: Final = 1 << 20
_JSON: Final = {b"gateway": b"json"}
"""Marks a column of a part that is JSON, for Parquet has no type for all of its values."""


class Done(NamedTuple):
    """A row with its answer. kept: of its columns."""

    number: int
    kept: Row
    answer: Answer


def write_part(store: Store, form: str, done: Sequence[Done], spec: ModelSpec) -> None:
    """Raises: OSError."""
    with store.written() as file:
        _WRITE[form](file, done, spec)


def join(target: Store, form: str, parts: Sequence[Store]) -> None:
    """All parts as one file. Raises: ConfigError, where another file is there; OSError."""
    with target.written(replace=False) as file:
        _JOIN[form](file, parts)


def write_bad(store: Store, bad: Iterable[tuple[int, str, Row | Bare | Unread]]) -> None:
    """Rows that have no answer: their numbers, why, and what they are."""
    with store.written() as file:
        for number, why, row in bad:
            file.write(_json({NUMBER: number, "error": why, "found": _found(row)}))


def _found(row: Row | Bare | Unread) -> Any:
    if isinstance(row, Unread):
        return row.found
    return _shown(row.value) if isinstance(row, Bare) else {name: _shown(value) for name, value in row.items()}


def _json(row: Row) -> bytes:
    try:
        return orjson.dumps(row, default=_default, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # an integer beyond 64 bits, which a kept column may have
        return json.dumps(_finite(row), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    """Of Python's own values, with None for NaN and infinity, as orjson writes them."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return _finite(value.isoformat() if isinstance(value, datetime.date | datetime.time) else _default(value))


def _shown(value: Any) -> Any:
    """Short enough for a line that people read."""
    text = value if isinstance(value, str) else _json(value).decode().strip()
    return value if len(text) <= 1000 else f"{text[:1000]}…"


def _default(value: Any) -> Any:
    """What orjson cannot write."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"b64": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):  # of objects, or not contiguous
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return _time(value) if isinstance(value, pa.Scalar) else str(value)


def _time(value: pa.Scalar) -> str:
    """Of nanoseconds, as Python tells one of microseconds."""
    us, ns = divmod(value.value, 1000)
    if pa.types.is_duration(value.type):
        text = str(datetime.timedelta(microseconds=us))
        if ns and "." not in text:
            text += ".000000"
    else:
        kind = pa.timestamp("us", value.type.tz) if pa.types.is_timestamp(value.type) else pa.time64("us")
        text = pa.scalar(us, kind).as_py().isoformat(timespec="microseconds" if ns else "auto")
    whole, _, more = text.partition(".")
    return f"{whole}.{more[:6]}{ns:03}{more[6:]}" if ns else text


def _number(value: Any) -> Any:
    """BF16 is no number to others."""
    return (
        np.asarray(value, np.float32) if getattr(value, "dtype", None) is not None and value.dtype.name == "bfloat16" else value
    )


def _row_of(done: Done) -> Row:
    return {NUMBER: done.number, **done.kept, **{name: _number(value) for name, value in done.answer.items()}}


def _write_jsonl(file: IO[bytes], done: Sequence[Done], spec: ModelSpec) -> None:
    file.write(b"".join(_json(_row_of(each)) for each in done))


def _write_csv(file: IO[bytes], done: Sequence[Done], spec: ModelSpec) -> None:
    """With its head, which is read again when parts are joined. What is no number or text is JSON."""
    rows = [_row_of(each) for each in done]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows([_cell(row[name]) if name in row else "" for name in names] for row in rows)
    text.detach()


def _cell(value: Any) -> Any:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return value
    if getattr(value, "shape", None) == () and value.dtype.kind == "f" and not np.isfinite(value):  # of whatever width
        return float(value)
    text = _json(value).decode().strip()
    return json.loads(text) if text.startswith('"') else text  # what JSON has as text: bytes, a time, a decimal


def _write_parquet(file: IO[bytes], done: Sequence[Done], spec: ModelSpec) -> None:
    kept = list(dict.fromkeys(name for each in done for name in each.kept))
    columns: dict[str, pa.Array] = {NUMBER: pa.array([each.number for each in done], pa.int64())}
    as_json = set()
    for name in kept:
        values = [plain(each.kept.get(name)) for each in done]
        if (column := _typed(values)) is None:
            as_json.add(name)
            column = _texts(values)
        columns[name] = column
    outputs = {name for each in done for name in each.answer}
    for tensor in spec.outputs:
        if tensor.name in outputs:
            columns[tensor.name] = _arrow([_number(each.answer.get(tensor.name)) for each in done], tensor, bool(spec.max_rows))
    fields = [pa.field(name, column.type, metadata=_JSON if name in as_json else None) for name, column in columns.items()]
    pq.write_table(pa.table(columns, pa.schema(fields)), file)


def _typed(values: list[Any]) -> pa.Array | None:
    """None, where Parquet has no type for all of them."""
    try:
        column = _inferred(values)
        pq.write_table(pa.table({"": column[:0]}), io.BytesIO())  # objects without a member, for one, have no type there
    except (pa.ArrowException, OverflowError):  # of several types; integers beyond 64 bits
        return None
    return None if _holds_truth(column.type, values) else column


def _holds_truth(kind: pa.DataType, values: Iterable[Any]) -> bool:
    """Whether true or false is among fractions, of which Arrow makes 1.0 or 0.0."""
    if pa.types.is_floating(kind):
        return bool in set(map(type, values))
    if pa.types.is_list(kind):
        return _holds_truth(kind.value_type, chain.from_iterable(value for value in values if value is not None))
    if pa.types.is_struct(kind):
        held = [value for value in values if value is not None]
        return any(_holds_truth(field.type, [value.get(field.name) for value in held]) for field in kind)
    return False


def _inferred(values: list[Any]) -> pa.Array:
    """Raises: pa.ArrowException, OverflowError."""
    try:
        return pa.array(values)
    except OverflowError:  # Arrow takes integers for those with a sign
        return pa.array(values, pa.uint64())


def _texts(values: Iterable[Any]) -> pa.Array:
    return pa.array([None if value is None else _json(plain(value)).decode().strip() for value in values], pa.string())


def _arrow(values: list[Any], tensor: TensorSpec, batched: bool) -> pa.Array:
    """Of one type, whatever the shapes of these values are."""
    item = pa.string() if tensor.datatype == "BYTES" else pa.float32() if tensor.datatype in ("FP16", "BF16") else _type(tensor)
    rank = len(tensor.shape) - batched
    if rank == 1 and tensor.datatype != "BYTES" and all(value is not None for value in values):
        offsets = np.cumsum([0, *(len(value) for value in values)], dtype=np.int32)
        flat = np.concatenate([*values, np.empty(0, item.to_pandas_dtype())]).astype(item.to_pandas_dtype())
        return pa.ListArray.from_arrays(offsets, flat)
    whole = item
    for _ in range(rank):
        whole = pa.list_(whole)
    return pa.array([None if value is None else _text(plain(value)) for value in values], whole)


def _type(tensor: TensorSpec) -> pa.DataType:
    return {
        "BOOL": pa.bool_(), "UINT8": pa.uint8(), "UINT16": pa.uint16(), "UINT32": pa.uint32(), "UINT64": pa.uint64(),
        "INT8": pa.int8(), "INT16": pa.int16(), "INT32": pa.int32(), "INT64": pa.int64(), "FP32": pa.float32(),
        "FP64": pa.float64(),
    }[tensor.datatype]  # fmt: skip


def _text(value: Any) -> Any:
    """What is no UTF-8 as JSON has it."""
    if isinstance(value, list):
        return [_text(each) for each in value]
    if isinstance(value, bytes):
        found = _default(value)
        return found if isinstance(found, str) else json.dumps(found)
    return value.item() if isinstance(value, np.generic) else value


def _join_lines(file: IO[bytes], parts: Sequence[Store]) -> None:
    for part in parts:
        with part.stream() as opened:
            while data := opened.read(_COPIED_BYTES):
                file.write(data)


def _join_csv(file: IO[bytes], parts: Sequence[Store]) -> None:
    """Each part has the columns that its rows have."""
    heads = []
    for part in parts:
        with part.stream() as opened:
            heads.append(next(csv.reader(io.TextIOWrapper(opened, "utf-8", newline="")), []))
    kept = list(dict.fromkeys(name for head in heads for name in head))
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, kept)
    writer.writeheader()
    for part in parts:
        with part.stream() as opened:
            writer.writerows(csv.DictReader(io.TextIOWrapper(opened, "utf-8", newline="")))
    text.detach()


def _join_parquet(file: IO[bytes], parts: Sequence[Store]) -> None:
    schemas = []
    for part in parts:
        with part.open() as opened:
            schemas.append(pq.read_schema(opened))
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    kinds = {name: _kind_of_all(name, parts, schemas) for name in names}
    whole = pa.schema([(name, kind or pa.string()) for name, kind in kinds.items()] or [(NUMBER, pa.int64())])
    _write_as(whole, file, parts, {name for name, kind in kinds.items() if kind is None})


def _kind_of_all(name: str, parts: Sequence[Store], schemas: Sequence[pa.Schema]) -> pa.DataType | None:
    """None, where a column is JSON in a part, or no type holds all of its values as they are."""
    fields = [schema.field(name) for schema in schemas if name in schema.names]
    if any(field.metadata == _JSON for field in fields):
        return None
    try:
        kind = pa.unify_schemas([pa.schema([field]) for field in fields], promote_options="permissive").field(0).type
        if kind == pa.int64() and any(field.type == pa.uint64() for field in fields):  # one of them needs its last bit
            kind = pa.uint64()
        for part, schema in zip(parts, schemas, strict=True):
            if name in schema.names and schema.field(name).type != kind:
                with part.open() as opened:
                    column = pq.ParquetFile(opened).read([name])[name]
                if _rounds(column.type, kind):
                    return None
                column.cast(kind)
    except pa.ArrowException:  # of several kinds; a large integer among fractions
        return None
    return kind


def _rounds(kind: pa.DataType, whole: pa.DataType) -> bool:
    """Whether decimals become floats, which Arrow makes of them with the digits that fit."""
    if pa.types.is_list(kind):
        return _rounds(kind.value_type, whole.value_type)
    if pa.types.is_struct(kind):
        return any(_rounds(field.type, whole.field(field.name).type) for field in kind)
    return bool(pa.types.is_decimal(kind) and pa.types.is_floating(whole))


def _write_as(whole: pa.Schema, file: IO[bytes], parts: Sequence[Store], as_json: Collection[str]) -> None:
    with pq.ParquetWriter(file, whole) as writer:
        for part in parts:
            with part.open() as opened:
                table = pq.read_table(opened)
            for at, field in enumerate(table.schema):
                if field.name in as_json and field.metadata != _JSON:
                    table = table.set_column(at, field.name, _texts(values_of(table[at].combine_chunks())))
            missing = [field for field in whole if field.name not in table.schema.names]
            for field in missing:
                table = table.append_column(field, pa.nulls(len(table), field.type))
            writer.write_table(table.select(whole.names).cast(whole))


_WRITE: Final[dict[str, Callable[[IO[bytes], Sequence[Done], ModelSpec], None]]] = {
    "jsonl": _write_jsonl, "csv": _write_csv, "parquet": _write_parquet,
}  # fmt: skip
_JOIN: Final[dict[str, Callable[[IO[bytes], Sequence[Store]], None]]] = {
    "jsonl": _join_lines, "csv": _join_csv, "parquet": _join_parquet,
}  # fmt: skip
