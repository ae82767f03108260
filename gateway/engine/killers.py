"""What ended a session when it ran alone: the same content would end the next one as well.

A model that dies of an input takes its session with it, and all that others had in line there waits for a new one. So such an
input costs one session; sent again within a minute it is refused before it runs. Not for ever: the fault may have been the
moment's (memory, a device), and a model is mended and loaded anew.
"""

from collections import OrderedDict
from collections.abc import Hashable
from hashlib import blake2b
from typing import Final

from gateway.types import InferRequest
from gateway.wire.tensors import tensor_to_bytes

_MOST: Final = 64
_REMEMBERED_NS: Final = 60_000_000_000


class Killers:
    """The latest of them. Only requests that look like one are hashed, so others pay next to nothing.

    any: there may be some.
    """

    def __init__(self) -> None:
        self.any = False
        self._until_ns: OrderedDict[tuple[Hashable, bytes], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_ns)

    def add(self, request: InferRequest, now_ns: int) -> None:
        content = _outline(request), _digest(request)
        self.any = True
        self._until_ns[content] = now_ns + _REMEMBERED_NS
        self._until_ns.move_to_end(content)  # it may have stood in line already when it killed for the first time
        if len(self._until_ns) > _MOST:
            self._until_ns.popitem(last=False)

    def has(self, request: InferRequest, now_ns: int) -> bool:
        """Whether this content is one of them."""
        while self._until_ns and next(iter(self._until_ns.values())) <= now_ns:
            self._until_ns.popitem(last=False)
        self.any = bool(self._until_ns)
        outline = _outline(request)
        return any(outline == known for known, _ in self._until_ns) and (outline, _digest(request)) in self._until_ns


def _outline(request: InferRequest) -> Hashable:
    return tuple((name, array.dtype.str, array.shape) for name, array in sorted(request.inputs.items()))


def _digest(request: InferRequest) -> bytes:
    digest = blake2b(repr(sorted(request.parameters.items())).encode(errors="replace"), digest_size=16)
    for _, array in sorted(request.inputs.items()):
        digest.update(tensor_to_bytes(array))
    return digest.digest()
