"""ModelInferRequests that repeat the last ones, but for their raw contents: what they mean is known, as of REST's `repeated`.

Where the raw contents are the last that a message has, its bytes before and between them say all else, their sizes included. So
a message of that length with those bytes is the same request with other elements. That it is so for the message at hand is
tried once: with all bits of its raw contents turned it must be read as the same with just that.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from gateway.errors import InvalidArgument
from gateway.protocols.grpc import RAW_INPUT, GrpcCodec, as_varint, parse
from gateway.protocols.messages import pb
from gateway.protocols.repeated import SELDOM, TRIES
from gateway.protocols.tensors import deadline_after
from gateway.types import InferRequest
from gateway.wire.tensors import Buffer

_LONGEST_BYTES: Final = 16 << 10  # of longer ones, copying is most of the work
_MOST: Final = 4
_TURNED: Final = bytes(range(255, -1, -1))


class KnownMessage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a message means. begin: what is before the first of its raw contents. between: what is before the others, and where.

    message: without its raw contents. codec: by which it was read, as `like`. tensors: with the places of their first bytes.
    """

    begin: bytes
    length: int
    between: tuple[tuple[int, bytes], ...]
    message: pb.ModelInferRequest
    codec: GrpcCodec
    like: InferRequest
    tensors: tuple[tuple[str, tuple[int, ...], np.dtype, int], ...]

    def request(self, data: Buffer, arrival_ns: int, remaining_s: float | None) -> InferRequest:
        """What a message is that was `found`. Its inputs are views on it. As `GrpcCodec.decode`."""
        like = self.like
        inputs = {name: np.ndarray(shape, dtype, data, at) for name, shape, dtype, at in self.tensors}
        return InferRequest(
            like.model, like.version, like.id, inputs, like.rows, arrival_ns, like.outputs,
            deadline_ns=None if remaining_s is None else deadline_after(arrival_ns, remaining_s * 1e6),
            shape_key=like.shape_key, plain=like.plain and remaining_s is None,
        )  # fmt: skip


class RepeatedMessages:
    """The last few of one listener."""

    def __init__(self) -> None:
        self._known: tuple[KnownMessage, ...] = ()
        self._tries = TRIES

    def find(self, data: Buffer) -> KnownMessage | None:
        """What a message is like; None: it is to be read."""
        if not isinstance(data, bytes):
            return None
        for known in self._known:
            if len(data) == known.length and data.startswith(known.begin):
                for at, text in known.between:
                    if not data.startswith(text, at):
                        break
                else:
                    self._tries = TRIES
                    return known
        return None

    def remember(self, data: Buffer, message: pb.ModelInferRequest, codec: GrpcCodec, request: InferRequest) -> None:
        """A message was read, and is this request."""
        raw: Sequence[bytes] = message.raw_input_contents
        arrays = request.inputs
        self._tries -= 1
        if self._tries < 0 and self._tries % SELDOM:
            return
        if (
            not isinstance(data, bytes)
            or len(data) > _LONGEST_BYTES
            or not raw
            or not len(raw) == len(message.inputs) == len(arrays)
            or message.parameters
            or any(array.dtype.hasobject or not array.size for array in arrays.values())
        ):
            return
        places: list[int] = []
        heads: list[tuple[int, bytes]] = []
        turned = bytearray(data)
        at = len(data)
        for content in reversed(raw):
            at -= len(content)
            places.append(at)
            turned[at : at + len(content)] = content.translate(_TURNED)
            head = RAW_INPUT + as_varint(len(content))
            at -= len(head)
            heads.append((at, data[at : at + len(head)]))
        begin = data[: places[-1]]
        if not _differ_in_raw_only(message, bytes(turned)):
            return
        head_alone = pb.ModelInferRequest()
        head_alone.CopyFrom(message)
        head_alone.ClearField("raw_input_contents")
        like = msgspec.structs.replace(request, inputs={}, caller=None, trace=None, deadline_ns=None)
        placed = zip(arrays.items(), reversed(places), strict=True)
        known = KnownMessage(
            begin=begin,
            length=len(data),
            between=tuple(heads[:-1]),
            message=head_alone,
            codec=codec,
            like=msgspec.structs.replace(like, plain=like.unmarked and codec.ragged is None),
            tensors=tuple((name, array.shape, array.dtype, at) for (name, array), at in placed),
        )
        # One like it is of a model that was loaded anew since.
        others = [each for each in self._known if each.begin != begin or each.length != len(data)]
        self._known = (known, *others[: _MOST - 1])


def _differ_in_raw_only(message: pb.ModelInferRequest, turned: bytes) -> bool:
    """Whether a message is read as the same, but with all bits of its raw contents turned."""
    try:
        other = parse(turned)
    except InvalidArgument:
        return False
    if list(other.raw_input_contents) != [content.translate(_TURNED) for content in message.raw_input_contents]:
        return False
    del other.raw_input_contents[:]
    other.raw_input_contents.extend(message.raw_input_contents)
    return bool(other == message)
