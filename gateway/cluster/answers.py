"""What a replica answers when an ingress attends, and when it asks where the channel is."""

import msgspec

from backends.base import ModelSpec, TensorSpec
from gateway.cluster.channel import Addresses, Standing


def attend_answer(slots: int, content: str, spec: ModelSpec, fault: str, standing: Standing) -> bytes:
    """What `attend` of a replica returns. slots: leased to the ingress that asks. fault: why there is no model; else empty."""
    return msgspec.msgpack.encode((slots, content, msgspec.convert(spec, _Spec, from_attributes=True), fault, *standing))


def channel_answer(token: bytes, endpoints: Addresses) -> bytes:
    """What `channel` of a replica returns."""
    return msgspec.msgpack.encode((token, endpoints))


channel_decoder = msgspec.msgpack.Decoder(tuple[bytes, Addresses])


class _Spec(msgspec.Struct, array_like=True, kw_only=True):
    """A `ModelSpec`, also from a replica of an older version, which says less, or of a newer one, which says more."""

    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int
    row_sizes: tuple[int, ...]
    reads_parameters: bool = True
    decoupled: bool = False
    own_arguments: tuple[str, ...] = ()
    requests_apart: bool = False


class _Attended(msgspec.Struct, array_like=True):
    """What `attend_answer` has written, also by another version."""

    slots: int
    content: str
    spec: _Spec
    fault: str
    lives: bool
    counted: int = 0


attendance_decoder = msgspec.msgpack.Decoder(_Attended)
