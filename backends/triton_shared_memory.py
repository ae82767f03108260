"""One session's system shared memory with a Triton server on the same host: tensors pass through it instead of the message.

Worth it for large tensors only (2 cores, Triton 2.51, python backend, loopback, p50 of a call, 2026-11): 32 KiB 0.9 ms either
way, 2 MiB 16 ms against 3.1 ms, 19 MB 120 ms against 14 ms.

Before 2.50 Triton crashes when it writes to a region that was unregistered; 2.50 and 2.51 refuse to unregister one in use, and
later ones wait for the calls' end (its issue 3207, its pull requests 7567 and 7743). So what a call that was given up may
write to is unregistered only when that has ended.

What a process that was killed has left there is unregistered by those that register regions (`backends.triton_region_locks`).
"""

import logging
import mmap
import os
import secrets
import threading
import time
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from backends import triton_region_locks as locks
from backends.base import ExecutionFailed, LoadFailed

WORTH_BYTES: Final = 256 << 10  # of a tensor
_ALIGNMENT: Final = 64
_IN_USE_S: Final = 60.0  # after which a call that timed out or was cancelled here has ended on the server
_ABANDONED_AT_MOST: Final = 4  # at once, by choice: each keeps its memory
_REFUSAL: Final = "currently in use"  # of Triton 2.50 and 2.51
# A call is answered some ms before it lets go of its region: of 400 regions unregistered at once, 30 were refused (2026-11-30).
_TRIES: Final = 10
_TRIED_AGAIN_S: Final = 0.01
_LOOKED_EVERY_S: Final = 60.0  # at most

log = logging.getLogger(__name__)


class _Abandoned(NamedTuple):
    """A region that the server may still use. until_s: by the monotonic clock. by: the session's; None: of a process gone."""

    until_s: float
    name: str
    by: "SessionRegion | None"


class AbandonedRegions:
    """Those of one server, of all sessions of a model: each unregisters what is due, also of those that are closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: list[_Abandoned] = []
        self._looked_s = -inf

    def look(self, connection: Any) -> None:
        """Add what processes that are gone have left. connection: by which a region was registered: this /dev/shm is shared."""
        with self._lock:
            if time.monotonic() - self._looked_s < _LOOKED_EVERY_S:
                return
            self._looked_s = time.monotonic()
        left = locks.left()  # before the server is asked: none of them is registered any more behind that
        try:
            registered = connection.regions() if left else ()
        except LoadFailed:
            return
        added = [name for name in left if name in registered and name not in self.names]
        for name in added:
            self.add(name, None)
        if added:
            log.info("triton %s: %d regions that a process has left there are unregistered soon", connection.url, len(added))
        for name, url in left.items():
            if name not in registered and url == connection.url:
                locks.remove(name)

    def leave(self, connection: Any) -> list[str]:
        """Those that the server has are left to who looks next, and given; none, if it does not say."""
        names = self.names
        try:
            registered = connection.regions()
        except LoadFailed:
            for name in names:
                locks.leave(name)
            return []
        for name in names:
            (locks.leave if name in registered else locks.remove)(name)
        return [name for name in names if name in registered]

    @property
    def names(self) -> list[str]:
        return [region.name for region in self._regions]

    def count(self, by: "SessionRegion") -> int:
        return sum(region.by is by for region in self._regions)

    def add(self, name: str, by: "SessionRegion | None") -> None:
        with self._lock:
            self._regions.append(_Abandoned(time.monotonic() + _IN_USE_S, name, by))

    def take_due(self) -> list[_Abandoned]:
        now = time.monotonic()
        with self._lock:
            due = [region for region in self._regions if now >= region.until_s]
            self._regions = [region for region in self._regions if now < region.until_s]
        return due


class SessionRegion:
    """Reserved anew for every run; grows by being replaced. Its file is unlinked as soon as the server has it mapped."""

    def __init__(self, connection: Any, abandoned: AbandonedRegions) -> None:
        """connection: `TritonConnection`, which registers the region. abandoned: of its server."""
        self._connection = connection
        self._name = ""
        self._map: mmap.mmap | None = None
        self._at = 0
        self._abandoned = abandoned
        self._unregister_abandoned()

    def reserve(self, sizes: list[int]) -> None:
        """Make room for tensors of these sizes, to be taken in any order.

        Raises: LoadFailed, SessionLost; ExecutionFailed, if /dev/shm has none.
        """
        self._unregister_abandoned()
        needed = sum(_aligned(size) for size in sizes)
        self._at = 0
        if self._map is not None and len(self._map) >= needed:
            return
        self.close()
        name = f"gateway-{os.getpid()}-{secrets.token_hex(6)}"
        descriptor = os.open(f"/dev/shm/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            try:
                locks.hold(name, self._connection.url)
                # Not ftruncate, which allocates nothing: with /dev/shm full, writing to the map would be SIGBUS.
                os.posix_fallocate(descriptor, 0, needed)
                self._map = mmap.mmap(descriptor, needed)
            except OSError as exc:
                raise ExecutionFailed(f"shared memory of {needed} bytes in /dev/shm: {exc.strerror}") from exc
            self._connection.register(name, needed)
            self._name = name
        finally:
            os.close(descriptor)
            os.unlink(f"/dev/shm/{name}")
            if not self._name:
                locks.remove(name)
        self._abandoned.look(self._connection)

    def take(self, tensor: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A view on the next free part, which `tensor` of the message is pointed at. Valid until the next `reserve`."""
        assert self._map is not None
        view: np.ndarray = np.ndarray(shape, dtype, self._map, self._at)
        tensor.parameters["shared_memory_region"].string_param = self._name
        tensor.parameters["shared_memory_offset"].int64_param = self._at
        tensor.parameters["shared_memory_byte_size"].int64_param = view.nbytes
        self._at += _aligned(view.nbytes)
        return view

    def close(self) -> None:
        if self._name:
            self._unregister(self._name, self, tries=_TRIES)
            self._name = ""
        self._unregister_abandoned()
        # Not closed: a view that somebody still holds would make that an error. It goes with the last of them.
        self._map = None

    @property
    def may_abandon(self) -> bool:
        """Whether a call that uses the region may be given up for another reason than that it must."""
        return self._abandoned.count(self) < _ABANDONED_AT_MOST

    def abandon(self) -> None:
        """Take a fresh region next time: a call that timed out or was cancelled may still read and write this one."""
        if self._name:
            self._abandoned.add(self._name, self)
            self._name = ""
        self._map = None

    def try_renew(self, error: Any) -> bool:
        """Take a fresh region next time if the server has this one no more: it was restarted, or a client unregistered all.

        error: of gRPC, from a call that named it.
        """
        gone = bool(self._name) and error.code().name == "NOT_FOUND" and f"'{self._name}'" in (error.details() or "")
        if gone:
            locks.remove(self._name)
            self._name, self._map = "", None
        return gone

    def _unregister_abandoned(self) -> None:
        for region in self._abandoned.take_due():
            self._unregister(region.name, region.by)

    def _unregister(self, name: str, by: "SessionRegion | None", *, tries: int = 1) -> None:
        try:
            self._connection.unregister(name)
        except LoadFailed as exc:
            if _REFUSAL in str(exc):  # otherwise the server is gone, and its mapping with it
                if tries > 1:
                    time.sleep(_TRIED_AGAIN_S)
                    self._unregister(name, by, tries=tries - 1)
                else:
                    self._abandoned.add(name, by)
                return
        locks.remove(name)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
