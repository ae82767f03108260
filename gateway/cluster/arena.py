"""Memory that two processes of a node share, for frames too large to be worth a socket: written by one, read by the other.

The writer's arena is a file without a name (memfd), so nothing is left over whoever is killed. The reader opens it by way of
/proc, which takes a process of the same user. A block is written again once its reader says that nothing refers to it any more.
"""

import mmap
import os
import secrets
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from gateway.wire.tensors import Buffer

SHARED_FROM_BYTES: Final = 512 << 10
"""Frames as long as this go through an arena, where there is one."""

_MOST_BYTES: Final = 256 << 20  # of one arena; what has no room goes by the socket
_LEAST_BLOCK: Final = 1 << 20
_NONCE_BYTES: Final = 32


class Offer(NamedTuple):
    """How a reader finds an arena. nonce: its first bytes, since another process may have the number of an ended one by now."""

    pid: int
    fd: int
    nonce: bytes


class Arena:
    """The writer's side. Raises from `__init__`: OSError, where there is no such memory."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._fd = os.memfd_create("gateway-arena", os.MFD_CLOEXEC)
        self._most_bytes = most_bytes
        self._bytes = mmap.PAGESIZE
        self._free: dict[int, list[int]] = defaultdict(list)  # block's size -> offsets
        self._taken: dict[int, int] = {}  # offset -> block's size
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            os.ftruncate(self._fd, self._bytes)
            self._map = mmap.mmap(self._fd, self._bytes)
            self._map[:_NONCE_BYTES] = nonce
        except BaseException:
            os.close(self._fd)
            raise
        self.offer = Offer(os.getpid(), self._fd, nonce)

    def put(self, pieces: Sequence[Buffer]) -> tuple[int, int] | None:
        """Write a frame: its offset and size; None: there is no room. The block is its own until `release`."""
        size = sum(map(len, pieces))
        block = max(_LEAST_BLOCK, 1 << (size - 1).bit_length())
        if self._free[block]:
            offset = self._free[block].pop()
        elif self._bytes + block <= self._most_bytes:
            try:
                os.ftruncate(self._fd, self._bytes + block)
                self._map = mmap.mmap(self._fd, self._bytes + block)  # views of the one before are gone with its frames
            except OSError:
                return None
            offset, self._bytes = self._bytes, self._bytes + block
        else:
            return None
        self._taken[offset] = block
        at = offset
        with memoryview(self._map) as view:
            for piece in pieces:
                view[at : at + len(piece)] = memoryview(piece).cast("B")
                at += len(piece)
        return offset, size

    def release(self, offset: int) -> None:
        """The reader has done with a block. Raises: KeyError, if it has none there."""
        block = self._taken.pop(offset)
        self._free[block].append(offset)

    def close(self) -> None:
        """What the reader still refers to stays, for as long as it does."""
        self._map.close()
        os.close(self._fd)


class Window:
    """The reader's side of an arena."""

    def __init__(self, offer: Offer) -> None:
        """Raises: OSError, ValueError, if the arena is not the one that was offered, or cannot be reached from here."""
        self._fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
            if self._map[:_NONCE_BYTES] != offer.nonce:
                raise ValueError("another's memory")
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, offset: int, size: int, released: Callable[[], None]) -> Buffer:
        """A frame, in place. released: called from any thread, once nothing refers to it.

        Raises: ValueError, if it is not there.
        """
        if offset + size > len(self._map):
            self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)  # it has grown
        frame = np.frombuffer(self._map, np.uint8, size, offset)
        weakref.finalize(frame, released).atexit = False
        return memoryview(frame)  # type: ignore[arg-type]  # an ndarray is a buffer

    def close(self) -> None:
        """Frames that were read stay."""
        os.close(self._fd)
