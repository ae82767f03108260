"""Pages of code that only the start has needed, given back to the kernel.

An extension module is mapped from its file, and the pages that were touched count as this process's, though most were needed
once: ONNX Runtime touches 20 MB while it registers its operators and loads a model. Given back, they stay in the kernel's cache
of files for as long as there is room, and one that is needed after all comes back in a microsecond.

Only what cannot lose anything: mappings that nobody may write to and nobody has written to, of files that stay mapped. These
are Python's extension modules, which it never unmaps, and the libraries that were there before a model was loaded: nothing but
such modules had asked for them.
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")
_SMAPS: Final = Path("/proc/self/smaps")
_SHARED: Final = re.compile(r"\.so(\.[0-9.]+)?$")
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-[-x]p \S+ \S+ \d+ +(/.*)")
_WRITTEN: Final = ("Private_Dirty:", "Shared_Dirty:", "Anonymous:")
_DONTNEED: Final = 4  # of madvise(2)


def libraries() -> frozenset[str]:
    """Files of shared libraries that are mapped now; none elsewhere than on Linux."""
    if not _MAPS.exists():
        return frozenset()
    paths = (line.split(maxsplit=5)[5].rstrip("\n") for line in _MAPS.read_text().splitlines() if "/" in line)
    return frozenset(path for path in paths if _SHARED.search(path))


def give_back(stay: Iterable[str]) -> None:
    """Costs 10 ms. Elsewhere than on Linux it does nothing. stay: what `libraries` gave before any model was loaded."""
    if sys.platform != "linux" or not _SMAPS.exists():
        return
    import ctypes

    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    modules = {path for module in list(sys.modules.values()) if (path := _file_of(module)).endswith(".so")}
    with contextlib.suppress(OSError), _SMAPS.open() as lines:  # without a free descriptor they stay, which costs memory only
        for start, end in list(unwritten(lines, modules.union(stay))):
            madvise(start, end - start, _DONTNEED)


def unwritten(lines: Iterable[str], files: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Where mappings of these files begin and end that nobody may write to, nor has. lines: as of /proc/PID/smaps."""
    known = frozenset(files)
    found: tuple[int, int] | None = None
    for line in lines:
        if line[0] in "0123456789abcdef":  # a mapping; of what it has, the names begin with a capital
            if found is not None:
                yield found
            mapping = _MAPPING.match(line)
            found = (int(mapping[1], 16), int(mapping[2], 16)) if mapping is not None and mapping[3] in known else None
        elif found is not None and line.startswith(_WRITTEN) and line.split()[1] != "0":
            found = None
    if found is not None:
        yield found


def _file_of(module: object) -> str:
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) else ""
