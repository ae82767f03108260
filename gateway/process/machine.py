"""What the machine has, as far as this process may use it."""

import contextlib
import os
from pathlib import Path


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory: of the machine, or what a cgroup leaves this process, if that is less. root: of the file system."""
    return min([_machine_bytes(), *(limit for limit, _ in _limits(root))])


def memory_left_bytes(root: Path = Path("/")) -> int:
    """What of it nobody has: of the machine, and of each cgroup, pages of files that the kernel would drop not counted."""
    return min([_available_bytes(root), *(limit - used for limit, used in _limits(root))])


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_bytes(root: Path) -> int:
    with contextlib.suppress(OSError):
        return _listed(root / "proc/meminfo", "MemAvailable:") * 1024 or _machine_bytes()
    return _machine_bytes()


def _limits(root: Path) -> list[tuple[int, int]]:
    """Of the cgroups (version 1 or 2) that this process is in: the limit, and what is used of it."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                base, limit, usage, cached = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                base, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
                usage, cached = "memory.usage_in_bytes", "total_inactive_file"
            else:
                continue
            inner = base / path.lstrip("/")
            for folder in (inner, *inner.parents):
                with contextlib.suppress(OSError, ValueError):  # there is none, or it says `max`
                    found.append((int((folder / limit).read_text()), _used(folder, usage, cached)))
                if folder == base:
                    break
    return found


def _used(folder: Path, usage: str, cached: str) -> int:
    """0, if it is not told."""
    used = dropped = 0
    with contextlib.suppress(OSError, ValueError):
        used = int((folder / usage).read_text())
        dropped = _listed(folder / "memory.stat", cached)
    return max(0, used - dropped)


def _listed(path: Path, name: str) -> int:
    """A number of a file that has a line for each; 0, if it is not there. Raises: OSError, ValueError."""
    lines = map(str.split, path.read_text().splitlines())
    return next((int(line[1]) for line in lines if line[:1] == [name]), 0)
