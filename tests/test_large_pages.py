"""Large pages for what loading a model has mapped."""

import mmap
import re
from pathlib import Path

import pytest

from gateway.process import large_pages

MIB = 1 << 20
asked = pytest.mark.skipif(not large_pages.asked(), reason="this Linux gives large pages to all or to nobody")


def test_only_what_was_mapped_since_is_told() -> None:
    before = ((10, 20), (30, 40))
    assert large_pages.added(before, before) == ()
    assert large_pages.added(before, ((5, 25), (30, 35), (50, 60))) == ((5, 10), (20, 25), (50, 60))
    assert large_pages.added(before, ((0, 100),)) == ((0, 10), (20, 30), (40, 100))
    assert large_pages.added((), before) == before


@asked
def test_what_was_written_since_lies_in_large_pages_and_is_as_it_was() -> None:
    before = large_pages.mapped()
    with mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(range(256)) * (32 * MIB // 256)
        mapped = large_pages.added(before, large_pages.mapped())
        assert sum(end - begin for begin, end in mapped) >= 32 * MIB
        large_pages.enlarge(before, 60.0)
        sizes_kb = re.findall(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps").read_text())
        assert sum(map(int, sizes_kb)) << 10 >= 16 * MIB  # a machine short of memory may not have all
        assert memory[:] == bytes(range(256)) * (32 * MIB // 256)


@asked
def test_nothing_is_moved_once_the_time_is_over() -> None:
    before = large_pages.mapped()
    with mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(8 * MIB)
        assert large_pages.enlarge(before, 0.0) == 0
