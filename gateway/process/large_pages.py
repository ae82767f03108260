"""Large pages for the memory that loading a model took: its weights, and the buffers of its first runs.

A processor remembers where a few thousand pages are. With pages of 4 KiB that is less than the weights of a small model, so a
batch that reads them all waits for look-ups; with 2 MiB it is gigabytes. Where Linux is set to give them to who asks
(`transparent_hugepage/enabled` is `madvise`, as most distributions have it), this asks, and has what is there already moved,
which Linux does at once from 6.1 on and else in time.
"""

import ctypes
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

Ranges = tuple[tuple[int, int], ...]
"""Of addresses, ascending: each from its first to behind its last."""

_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS: Final = Path("/proc/self/maps")
_ANONYMOUS: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(?:\[heap\])?$", re.MULTILINE)
_PAGE: Final = 2 << 20
_PIECE: Final = 32 * _PAGE  # what one call moves, within 100 ms
# Of madvise(2), as in Linux's asm-generic/mman-common.h.
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25


def asked() -> bool:
    """Whether large pages are given to who asks, and to nobody else."""
    try:
        return sys.platform == "linux" and _MAPS.exists() and "[madvise]" in _ENABLED.read_text()
    except OSError:
        return False


def mapped() -> Ranges:
    """What this process may write to and shares with none, files aside."""
    return tuple([(int(begin, 16), int(end, 16)) for begin, end in _ANONYMOUS.findall(_MAPS.read_text())])


def enlarge(before: Ranges, within_s: float) -> int:
    """Ask for large pages for all that was mapped since, and move what is there. Gives the bytes that were moved.

    before: as `mapped` gave it. within_s: nothing more is moved after so long.
    """
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    until_s = time.monotonic() + within_s
    moved = 0
    for begin, end in added(before, mapped()):
        first, last = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
        if first >= last:
            continue
        advise(first, last - first, _MADV_HUGEPAGE)
        for at in range(first, last, _PIECE):
            size = min(_PIECE, last - at)
            if time.monotonic() < until_s and not advise(at, size, _MADV_COLLAPSE):
                moved += size
    return moved


def added(before: Iterable[tuple[int, int]], now: Ranges) -> Ranges:
    """What is in `now` only."""
    found = []
    for begin, end in now:
        at = begin
        for old_begin, old_end in before:
            if old_end <= at or old_begin >= end:
                continue
            if old_begin > at:
                found.append((at, old_begin))
            at = old_end
        if at < end:
            found.append((at, end))
    return tuple(found)
