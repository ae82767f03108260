"""A long message of a gRPC call, while it comes."""

import numpy as np

from gateway.wire.tensors import Buffer


class LongMessage:
    """A message that comes in pieces, each of which goes to its place: memory that grew would be copied again and again."""

    __slots__ = ("_memory", "bytes_here", "flag")

    def __init__(self, flag: int, size: int) -> None:
        self.flag = flag
        self.bytes_here = 0
        self._memory = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]  # an ndarray is a buffer

    @property
    def whole(self) -> bool:
        return self.bytes_here == len(self._memory)

    @property
    def data(self) -> Buffer:
        return self._memory.toreadonly()

    def fill(self, data: bytes) -> bytes:
        """Returns: what is behind the message."""
        begin = self.bytes_here
        self.bytes_here = min(begin + len(data), len(self._memory))
        taken = self.bytes_here - begin
        self._memory[begin : self.bytes_here] = memoryview(data)[:taken]
        return data[taken:]
