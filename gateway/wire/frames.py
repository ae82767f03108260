"""Tensors as one byte string, for the private channels between our own processes.

Layout: 4-byte little-endian length of the head, the head (MessagePack: tensors as [name, datatype, shape, byte size], extra),
then the tensors' bytes in that order, each in the v2 raw form. Nothing in a frame can name code, unlike a pickle.
"""

import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backends.base import ModelSpec, Tensors, TensorSpec
from backends.datatypes import datatype_of
from gateway.wire.tensors import Buffer, tensor_from_bytes, tensor_to_bytes

_LENGTH: Final = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[list[tuple[str, str, list[int], int]], dict[str, Any]])


def encode_frame(tensors: Tensors, extra: Mapping[str, Any]) -> list[Buffer]:
    """The pieces of one frame, to be written in order. Large tensors are views: send them before the arrays change."""
    head = []
    pieces: list[Buffer] = []
    for name, array in tensors.items():
        raw = tensor_to_bytes(array)
        head.append((name, datatype_of(array), array.shape, len(raw)))
        pieces.append(raw)
    packed = _encoder.encode((head, extra))
    return [_LENGTH.pack(len(packed)) + packed, *pieces]


def decode_frame(frame: Buffer) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a frame as views on it, and its extra. Raises: GatewayError or msgspec.DecodeError, if it is none."""
    view = memoryview(frame)
    (length,) = _LENGTH.unpack_from(view)
    at = 4 + length
    head, extra = _decoder.decode(view[4:at])
    tensors: Tensors = {}
    for name, datatype, shape, size in head:
        tensors[name] = tensor_from_bytes(name, datatype, shape, view[at : at + size])
        at += size
    return tensors, extra


def spec_to_plain(spec: ModelSpec) -> dict[str, Any]:
    """What a model takes and gives, for the extra of a frame."""

    def plain(tensor: TensorSpec) -> list[Any]:
        return [tensor.name, tensor.datatype, tensor.shape, tensor.optional, tensor.labels]

    return {
        "platform": spec.platform,
        "inputs": [plain(tensor) for tensor in spec.inputs],
        "outputs": [plain(tensor) for tensor in spec.outputs],
        "max_rows": spec.max_rows,
        "row_sizes": spec.row_sizes,
        "reads_parameters": spec.reads_parameters,
        "decoupled": spec.decoupled,
        "own_arguments": spec.own_arguments,
        "requests_apart": spec.requests_apart,
        "rows_stated": spec.rows_stated,
        "rows_wanted": spec.rows_wanted,
    }


def spec_from_plain(plain: dict[str, Any]) -> ModelSpec:
    def tensor(fields: list[Any]) -> TensorSpec:
        name, datatype, shape, optional, labels = fields
        return TensorSpec(name, datatype, tuple(shape), optional, tuple(labels))

    return ModelSpec(
        platform=plain["platform"],
        inputs=tuple(tensor(fields) for fields in plain["inputs"]),
        outputs=tuple(tensor(fields) for fields in plain["outputs"]),
        max_rows=plain["max_rows"],
        row_sizes=tuple(plain["row_sizes"]),
        reads_parameters=plain["reads_parameters"],
        decoupled=plain["decoupled"],
        own_arguments=tuple(plain["own_arguments"]),
        requests_apart=plain["requests_apart"],
        rows_stated=plain["rows_stated"],
        rows_wanted=plain["rows_wanted"],
    )
