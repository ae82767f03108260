"""Files as rows: JSON Lines, CSV, lines of text and Parquet.

A row is what its columns hold, by name. What cannot be read of a row is told with it, and the rows after it are read.
"""

import codecs
import csv
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import IO, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gateway.errors import ConfigError
from gateway.protocols.json_data import any_value
from gateway.transform.storage import PACKED, FoundFile, Store, without_query

csv.field_size_limit(1 << 28)  # bytes of a cell; Python's own limit is less than an image

Row = dict[str, Any]
"""What columns hold: numbers, text, bytes, times, nested lists, or 1-D numpy arrays; a column that a row lacks is left out.

Times in nanoseconds, which Python's types cannot hold, are Arrow's scalars.
"""


class Bare(NamedTuple):
    """A row that is a value without a name: a line of text, or a line of JSON that is no object."""

    value: Any


class Unread(NamedTuple):
    """A row that could not be read. why: in our words. found: what is there, as far as it can be shown."""

    why: str
    found: str


class Chunk(NamedTuple):
    """Rows that are worked on together.

    first: the number of its first row, counted from 0 over all files. read_bytes: of the files, with it and all before it.
    """

    number: int
    first: int
    rows: list[Row | Bare | Unread]
    read_bytes: int


class _Place:
    """How far the files are read. A reader tells by `read_bytes` how far it is in its own."""

    def __init__(self) -> None:
        self._before_bytes = 0
        self.read_bytes: Callable[[], int] = int

    @property
    def bytes(self) -> int:
        return self._before_bytes + self.read_bytes()

    def ended(self, file: FoundFile) -> None:
        self._before_bytes += file.size_bytes
        self.read_bytes = int


def format_of(path: str) -> str:
    """jsonl, csv, txt or parquet, by a name's ending. Raises: ConfigError."""
    name = without_query(path).rpartition("/")[2].lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    ending = {"ndjson": "jsonl"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    if ending not in _READ:
        raise ConfigError(f"{path}: expected a name that ends in .jsonl, .csv, .txt or .parquet")
    return ending


def columns_of(store: Store) -> list[str] | None:
    """What a file says its columns are called; None: it does not say. Raises: ConfigError, OSError."""
    match format_of(store.path):
        case "csv":
            with store.unpacked() as (file, _):
                return _names(store, csv.reader(_text_of(file)))
        case "parquet":
            with store.open() as opened, _parquet_file(opened, store.path) as file:
                return _once(store, file.schema_arrow.names)
    return None


def chunks(
    store: Store,
    files: Sequence[FoundFile],
    most_rows: int,
    skip: Callable[[int], bool],
    wanted: Collection[str] | None = None,
) -> Iterator[Chunk]:
    """The rows of all files, one after the other. Each chunk but the last has `most_rows`.

    skip: told a chunk's number; whether its rows are not wanted: it is left out then. wanted: of Parquet, the columns to read;
    None: all. Raises: ConfigError, for a file that is not as its name says; OSError.
    """
    place = _Place()
    rows = _rows(store, files, place, wanted)
    number = 0
    while True:
        taken = islice(rows, most_rows)
        if skip(number):
            more = sum(1 for _ in taken)
        else:
            found = list(taken)
            more = len(found)
            if found:
                yield Chunk(number, number * most_rows, found, place.bytes)
        if more < most_rows:
            return
        number += 1


def _rows(
    store: Store, files: Sequence[FoundFile], place: _Place, wanted: Collection[str] | None
) -> Iterator[Row | Bare | Unread]:
    for file in files:
        form = format_of(file.path)
        read = partial(_parquet, wanted=wanted) if form == "parquet" else _READ[form]
        yield from read(store.beside(file.path), place)
        place.ended(file)


def _lines(store: Store, place: _Place) -> Iterator[bytes]:
    lines = _as_they_are(store, place)
    yield from (line.removeprefix(codecs.BOM_UTF8) for line in islice(lines, 1))
    yield from lines


def _as_they_are(store: Store, place: _Place) -> Iterator[bytes]:
    with store.unpacked() as (file, place.read_bytes):
        begun: list[bytes] = []  # of a line, which may be long
        while data := file.read(1 << 20):
            first, *lines = data.split(b"\n")
            begun.append(first)
            if lines:
                yield b"".join(begun)
                begun = [lines.pop()]
                yield from lines
        if rest := b"".join(begun):
            yield rest


def _json_lines(store: Store, place: _Place) -> Iterator[Row | Bare | Unread]:
    for line in _lines(store, place):
        if not line.strip():
            continue
        try:
            value = any_value(line)
        except (ValueError, RecursionError) as exc:
            yield Unread(f"no JSON: {exc}", _shown(line))
        else:
            yield value if isinstance(value, dict) else Bare(value)


def _text(store: Store, place: _Place) -> Iterator[Row | Bare | Unread]:
    for line in _lines(store, place):
        try:
            yield Bare(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as exc:
            yield Unread(f"no UTF-8: {exc}", _shown(line))


def _csv(store: Store, place: _Place) -> Iterator[Row | Unread]:
    """Its first line has the names. All cells are text; an empty one is left out."""
    with store.unpacked() as (file, place.read_bytes):
        reader = csv.reader(_text_of(file))
        names = _names(store, reader)
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as exc:
                yield Unread(f"no CSV: {exc}", "")
                continue
            if cells is None:
                return
            if len(cells) != len(names):
                if cells:
                    yield Unread(f"{len(cells)} cells, and the first line has {len(names)}", ",".join(cells))
                continue
            row = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
            try:
                "".join(row.values()).encode()
            except UnicodeEncodeError as exc:
                yield Unread(f"no UTF-8: {exc.reason}", ",".join(cells).encode(errors="replace").decode())
            else:
                yield row


def _text_of(file: IO[bytes]) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")


def _names(store: Store, reader: Iterator[list[str]]) -> list[str]:
    try:
        names = next(reader, [])
        ",".join(names).encode()
    except csv.Error as exc:
        raise ConfigError(f"{store.path}: its first line: no CSV: {exc}") from exc
    except UnicodeEncodeError as exc:
        shown = ",".join(names).encode(errors="replace").decode()
        raise ConfigError(f"{store.path}: its first line: no UTF-8: {_shortened(shown)}") from exc
    return _once(store, names)


def _once(store: Store, names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ConfigError(f"{store.path}: two columns have one name: {', '.join(names)}")
    return names


def _parquet(store: Store, place: _Place, wanted: Collection[str] | None = None) -> Iterator[Row | Unread]:
    with store.open() as opened, _parquet_file(opened, store.path) as file:
        size, of_rows, read_rows = opened.size(), max(1, file.metadata.num_rows), 0  # type: ignore[attr-defined]  # Arrow's file
        place.read_bytes = lambda: size * read_rows // of_rows
        names = [name for name in _once(store, file.schema_arrow.names) if wanted is None or name in wanted]
        for batch in file.iter_batches(512, columns=names):
            read_rows += len(batch)
            rows: list[Row] = [{} for _ in range(len(batch))]
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                for row, value in zip(rows, values_of(column), strict=True):
                    if value is not None:
                        row[name] = value
            yield from rows


def _parquet_file(opened: IO[bytes], path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(opened)
    except pa.ArrowInvalid as exc:
        raise ConfigError(f"{path}: no Parquet file: {exc}") from exc


def values_of(column: pa.Array) -> Iterable[Any]:
    """Lists of numbers as arrays, which are views; all else as Python has it."""
    kind = column.type
    fixed = pa.types.is_fixed_size_list(kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensors(column)
    numbers = (fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)) and (
        pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)
    )
    if _holds_ns(kind):
        return [_with_ns(each) for each in column]
    if not numbers or column.null_count or column.flatten().null_count:
        return column.to_pylist()  # type: ignore[no-any-return]
    values = column.flatten().to_numpy()
    if fixed:
        return list(values.reshape(len(column), kind.list_size))
    ends = column.value_lengths().to_numpy().cumsum()
    return np.split(values, ends[:-1]) if len(column) else []


def _tensors(column: pa.FixedShapeTensorArray) -> Iterable[Any]:
    if not column.null_count and not column.storage.flatten().null_count:
        return list(column.to_numpy_ndarray())
    return [_tensor(each.values, column.type) if each.is_valid else None for each in column.storage]


def _tensor(elements: pa.Array, kind: pa.FixedShapeTensorType) -> Any:
    """Nested lists, where elements are null: arrays of numbers hold none."""
    flat = np.array(elements.to_pylist(), object) if elements.null_count else elements.to_numpy()
    shaped = flat.reshape(kind.shape).transpose(kind.permutation or range(len(kind.shape)))
    return shaped.tolist() if elements.null_count else shaped


def _in_ns(kind: pa.DataType) -> bool:
    times = pa.types.is_timestamp(kind) or pa.types.is_time64(kind) or pa.types.is_duration(kind)
    return bool(times and kind.unit == "ns")


def _holds_ns(kind: pa.DataType) -> bool:
    return _in_ns(kind) or any(_holds_ns(kind.field(number).type) for number in range(kind.num_fields))


def _with_ns(value: pa.Scalar) -> Any:
    if not value.is_valid:
        return None
    if isinstance(value, pa.MapScalar):
        return [[_with_ns(inner) for inner in entry.values()] for entry in value.values]
    if isinstance(value, pa.ListScalar):  # as the others of lists are
        return [_with_ns(each) for each in value.values]
    if isinstance(value, pa.StructScalar):
        return {name: _with_ns(inner) for name, inner in value.items()}
    return value if _in_ns(value.type) else value.as_py()


def _shown(line: bytes) -> str:
    return _shortened(line[:1000].decode(errors="replace"))


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


_READ: Final[dict[str, Callable[[Store, _Place], Iterator[Row | Bare | Unread]]]] = {
    "jsonl": _json_lines, "csv": _csv, "txt": _text, "parquet": _parquet,
}  # fmt: skip


def plain(value: Any) -> Any:
    """As JSON can hold it."""
    return value.tolist() if isinstance(value, np.ndarray) else value
