"""What the gateway takes of prometheus_client beyond its interface; nobody else does. docs/decisions/prometheus-client.md.

Its multiprocess mode makes room in its files by truncating them to a greater length and maps them: where the disk has no block
left for a page, a write there is SIGBUS and the end of the process. So the blocks are allocated first (`AllocatedFile`). And a
histogram takes one observation at a time; `Observations` adds many at once.
"""

import logging
import mmap
import os
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any, ClassVar, Final

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

_FILE_BYTES: Final = 64 << 10  # at first, as prometheus_client's
_ENTRY_BYTES: Final = 32  # at most, beside the key
_RETRY_NS: Final = 1_000_000_000

log = logging.getLogger(__name__)


class AllocatedFile(MmapedDict):
    """The values of one kind of this process: as prometheus_client's, with the disk's blocks allocated before they are mapped.

    Values for which the disk has no room are kept here, out of the exposition, until there is some.
    """

    incomplete: ClassVar["set[AllocatedFile]"] = set()
    _told: ClassVar[bool] = False  # in the log, once in a process

    def __init__(self, filename: str) -> None:
        self._path = Path(filename)
        self._f: Any = None
        self._positions: dict[str, int] = {}
        self._kept: dict[str, tuple[float, float]] = {}
        self._retry_ns = 0
        self._try_open()

    def read_value(self, key: str) -> tuple[float, float]:
        """Value and timestamp, which are 0 at first."""
        if key in self._kept or (key not in self._positions and not self._try_reserve(key)):
            return self._kept.setdefault(key, (0.0, 0.0))
        found: tuple[float, float] = super().read_value(key)  # type: ignore[no-untyped-call]  # prometheus_client's
        return found

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if key in self._positions or self._try_reserve(key):
            super().write_value(key, value, timestamp)  # type: ignore[no-untyped-call]  # prometheus_client's
            if self._kept:
                self._kept.pop(key, None)  # older
        else:
            self._kept[key] = (value, timestamp)

    def catch_up(self) -> None:
        """Write what was kept, as far as there is room now."""
        kept, self._kept = self._kept, {}
        for key, (value, timestamp) in kept.items():
            self.write_value(key, value, timestamp)
        if not self._kept:
            self.incomplete.discard(self)

    def _try_open(self) -> bool:
        """Also after it failed, if that is some time ago."""
        now_ns = time.monotonic_ns()
        if now_ns < self._retry_ns:
            return False
        try:
            _allocate_file(self._path)
            super().__init__(str(self._path))  # type: ignore[no-untyped-call]  # prometheus_client's
        except OSError as exc:
            if self._f is not None:
                self._f.close()
                self._f = None
            self._failed(exc, now_ns)
            return False
        return True

    def _try_reserve(self, key: str) -> bool:
        """Whether there is room for one more key."""
        if self._f is None and not self._try_open():
            return False
        needed = self._used + len(key.encode()) + _ENTRY_BYTES
        capacity = self._capacity
        if needed <= capacity:
            return True
        now_ns = time.monotonic_ns()
        if now_ns < self._retry_ns:
            return False
        while capacity < needed:
            capacity *= 2
        try:
            os.posix_fallocate(self._f.fileno(), 0, capacity)
            self._m = mmap.mmap(self._f.fileno(), capacity)
        except OSError as exc:
            self._failed(exc, now_ns)
            return False
        self._capacity = capacity
        return True

    def _failed(self, exc: OSError, now_ns: int) -> None:
        self._retry_ns = now_ns + _RETRY_NS
        self.incomplete.add(self)
        if not AllocatedFile._told:
            AllocatedFile._told = True
            log.warning("metrics are incomplete, as %s cannot grow (server.run_dir): %s", self._path, exc.strerror)


def _allocate_file(path: Path) -> None:
    """Make a file of values with all of its blocks, or give one of an earlier process of this number those it lacks."""
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size or _FILE_BYTES)
    except FileNotFoundError:
        draft = path.with_suffix(".draft")  # who collects takes a file of no length for a broken one
        try:
            with draft.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _FILE_BYTES)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


# Where prometheus_client makes its files; there is no other place to tell it.
values.MmapedDict = AllocatedFile  # type: ignore[attr-defined,assignment]  # neither exported nor meant to change


class Observations:
    """A histogram's additions since the last flush."""

    __slots__ = ("_bounds", "_counts", "_sum", "_target")

    def __init__(self, target: Any, bounds: tuple[float, ...]) -> None:
        self._target = target
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def flush(self) -> None:
        # prometheus_client offers no bulk observation; these two fields are what its own `observe` adds to.
        for index, count in enumerate(self._counts):
            if count:
                self._target._buckets[index].inc(count)
                self._counts[index] = 0
        if self._sum:
            self._target._sum.inc(self._sum)
            self._sum = 0.0
