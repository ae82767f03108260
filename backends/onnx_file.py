"""What an ONNX file lacks, seen without any library: it is walked through by its lengths, and its weights are not read.

Source: onnx/onnx.proto for the numbers of the fields, https://protobuf.dev/programming-guides/encoding for the rest.
"""

import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from backends.base import TensorSpec

LFS_POINTER: Final = b"version https://git-lfs"

_GRAPH: Final = 7  # of ModelProto
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12  # of GraphProto
_ATTRIBUTE: Final = 5  # of NodeProto
_ATTRIBUTE_NAME, _INT, _TENSOR, _SUBGRAPH = 1, 3, 5, 6  # of AttributeProto
_NAME, _TYPE = 1, 2  # of ValueInfoProto
_TENSOR_TYPE: Final = 1  # of TypeProto
_SHAPE: Final = 2  # of TypeProto.Tensor
_DATA_TYPE, _EXTERNAL_DATA = 2, 13  # of TensorProto
_FLOAT16: Final = 10  # of TensorProto.DataType
_KEY, _VALUE = 1, 2  # of StringStringEntryProto
_LENGTH_DELIMITED: Final = 2
_FIXED: Final = {1: 8, 5: 4}  # wire type -> bytes
_MOST_BYTES: Final = 2 << 30  # of a protobuf message
_NAMES: Final = 3  # so many files are named, the rest are counted

AGAIN: Final = "copy or download it again, whole"
ONE_NAME: Final = "an input has this name, and an ONNX file has each name once"
OTHER_NAME: Final = "give the output another name, in what `forward` returns as well if that is a dict"


class Damage(NamedTuple):
    """what: the file is, in words. way: on."""

    what: str
    way: str


class _Field(NamedTuple):
    """stop: where it should end, which may be behind the end of what it is in. A number's own bytes are not among these."""

    number: int
    wire_type: int
    start: int
    stop: int


def damage(path: Path) -> Damage | None:
    """What keeps an ONNX file from being loaded, as far as its outline shows it. Raises: OSError."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        needed: dict[str, int] = {}
        try:
            for field in _fields(data, 0, len(data)):
                if field.stop > len(data):
                    if field.stop > _MOST_BYTES:
                        raise ValueError(f"{field.stop} bytes")
                    return Damage(f"the beginning of an ONNX file: {len(data)} bytes of {field.stop} or more", AGAIN)
                if field.number == _GRAPH:
                    _add_external(data, field, needed)
        except (IndexError, ValueError, RecursionError):
            return Damage("no ONNX file, or a damaged one", AGAIN)
    return _of_weights(path, needed)


def weights_beside(path: Path) -> tuple[str, ...]:
    """The files of weights that an ONNX file which is not damaged names, by their paths from its folder. Raises: OSError."""
    needed: dict[str, int] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for field in _fields(data, 0, len(data)):
            if field.number == _GRAPH:
                _add_external(data, field, needed)
    return tuple(needed)


def of_unknown_rank(path: Path) -> frozenset[str]:
    """The inputs and outputs of which a file says no shape, as it says an empty one of scalars. Raises: OSError, ValueError."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            graphs = [field for field in _fields(data, 0, len(data)) if field.number == _GRAPH]
            values = [value for graph in graphs for key in (_INPUT, _OUTPUT) for value in _inside(data, graph, key)]
            return frozenset(
                data[name.start : name.stop].decode("utf-8", "replace")
                for value in values
                for name in _inside(data, value, _NAME)
                if not any(
                    True
                    for of in _inside(data, value, _TYPE)
                    for tensor in _inside(data, of, _TENSOR_TYPE)
                    for _ in _inside(data, tensor, _SHAPE)
                )
            )
        except IndexError as exc:
            raise ValueError(f"{path}: no ONNX file") from exc


def has_fp16(path: Path) -> bool:
    """Whether weights or casts are of half precision. False of what is no ONNX file. Raises: OSError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(_has_fp16(data, field) for field in _fields(data, 0, len(data)) if field.number == _GRAPH)
    except (IndexError, ValueError, RecursionError):
        return False


def _has_fp16(data: mmap.mmap, graph: _Field) -> bool:
    if any(_is_fp16(data, tensor, _DATA_TYPE) for tensor in _inside(data, graph, _INITIALIZER)):
        return True
    return any(
        any(_is_fp16(data, tensor, _DATA_TYPE) for tensor in _inside(data, attribute, _TENSOR))
        or any(_has_fp16(data, subgraph) for subgraph in _inside(data, attribute, _SUBGRAPH))
        or (_is_fp16(data, attribute, _INT) and _is_named(data, attribute, b"to"))  # of Cast
        for attribute in _attributes(data, graph)
    )


def _is_fp16(data: mmap.mmap, outer: _Field, number: int) -> bool:
    fields = _fields(data, outer.start, outer.stop)
    return any(field.number == number and _varint(data, field.start)[0] == _FLOAT16 for field in fields)


def _is_named(data: mmap.mmap, attribute: _Field, name: bytes) -> bool:
    return any(data[field.start : field.stop] == name for field in _inside(data, attribute, _ATTRIBUTE_NAME))


def _attributes(data: mmap.mmap, graph: _Field) -> Iterator[_Field]:
    """Of its nodes: tensors, as of Constant, and graphs, as of If and Loop, are among them."""
    for node in _inside(data, graph, _NODE):
        yield from _inside(data, node, _ATTRIBUTE)


def _add_external(data: mmap.mmap, graph: _Field, needed: dict[str, int]) -> None:
    """needed: gets how many bytes each file of weights must have at least, by its path from the model's folder."""
    for tensor in _inside(data, graph, _INITIALIZER):
        _add_weights(data, tensor, needed)
    for attribute in _attributes(data, graph):
        for tensor in _inside(data, attribute, _TENSOR):
            _add_weights(data, tensor, needed)
        for subgraph in _inside(data, attribute, _SUBGRAPH):
            _add_external(data, subgraph, needed)


def _add_weights(data: mmap.mmap, tensor: _Field, needed: dict[str, int]) -> None:
    entries: dict[bytes, bytes] = {}
    for entry in _inside(data, tensor, _EXTERNAL_DATA):
        texts = {field.number: data[field.start : field.stop] for field in _fields(data, entry.start, entry.stop)}
        entries[texts.get(_KEY, b"")] = texts.get(_VALUE, b"")
    if location := entries.get(b"location"):
        stop = int(entries.get(b"offset", b"0")) + int(entries.get(b"length", b"0"))
        name = location.decode("utf-8", "replace")
        needed[name] = max(needed.get(name, 0), stop)


def _inside(data: mmap.mmap, outer: _Field, number: int) -> Iterator[_Field]:
    for field in _fields(data, outer.start, outer.stop):
        if field.stop > outer.stop:
            raise ValueError(f"a field of {field.stop - field.start} bytes in {outer.stop - outer.start}")
        if field.number == number and field.wire_type == _LENGTH_DELIMITED:
            yield field


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[_Field]:
    """Raises: ValueError, IndexError, for what is no message."""
    while at < end:
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        start = at
        if wire_type == 0:
            _, at = _varint(data, at)
        elif wire_type == _LENGTH_DELIMITED:
            size, start = _varint(data, at)
            at = start + size
        elif wire_type in _FIXED:
            at += _FIXED[wire_type]
        else:
            raise ValueError(f"wire type {wire_type}")
        if number == 0:
            raise ValueError("field 0")
        yield _Field(number, wire_type, start, at)


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than ten bytes")


def with_rows(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], declared: tuple[TensorSpec, ...]
) -> tuple[TensorSpec, ...]:
    """Outputs of one row by their file, whose inputs have open rows: with open ones too where they are declared so.

    Some converters write 1 of however many (`discovery`).
    """
    if any(tensor.shape[:1] != (-1,) for tensor in inputs):
        return outputs
    one = {tensor.name for tensor in outputs if tensor.shape[:1] == (1,)}
    opened = {tensor.name for tensor in declared if one and tensor.name in one and tensor.shape[:1] == (-1,)}
    return tuple(replace(tensor, shape=(-1, *tensor.shape[1:])) if tensor.name in opened else tensor for tensor in outputs)


def way_without(datatype: str, *, of_input: bool = False) -> str:
    """What to do about a tensor that cannot pass. datatype: ONNX's word for its own, or ours."""
    if datatype in ("BF16", "tensor(bfloat16)"):
        exported = "export the model in FP32 or FP16, as of `model.float()` or `model.half()` in PyTorch"
    elif datatype.startswith(("seq(map(", "sequence of map")) and not of_input:
        exported = 'convert the model with options={"zipmap": False}'
    else:
        exported = "export the model with another datatype" if of_input else ""
    return ", or ".join(filter(None, (exported, "" if of_input else "list only the other outputs under `outputs`")))


def _of_weights(path: Path, needed: dict[str, int]) -> Damage | None:
    """needed: by file, as of `_add_external`."""
    missing = [name for name in needed if not (path.parent / name).is_file()]
    if missing:
        names = ", ".join(repr(name) for name in missing[:_NAMES])
        more = f" and {len(missing) - _NAMES} more" if len(missing) > _NAMES else ""
        them = "that file" if len(missing) == 1 else "these files"
        return Damage(
            f"an ONNX file without its weights, {names}{more}",
            f"put {them}, which the export wrote too, beside the model, in {path.absolute().parent}",
        )
    for name, stop in needed.items():
        file = path.parent / name
        if (size := file.stat().st_size) < stop:
            with file.open("rb") as opened:
                pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
            if pointer:
                return Damage(
                    f"an ONNX file whose weights, {name!r}, are a pointer of Git LFS", "`git lfs pull` brings the file"
                )
            return Damage(
                f"an ONNX file whose weights, {name!r}, are {size} bytes where it needs {stop}",
                f"copy or download {name!r} again, whole and of the same export",
            )
    return None
