"""What the machine has, as far as this process may use it."""

import contextlib
import os
from pathlib import Path


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory: of the machine, or what a cgroup leaves this process, if that is less. root: of the file system."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(root)])


def _limits(root: Path) -> list[int]:
    """Of the cgroups (version 1 or 2) that this process is in."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                base, name = root / "sys/fs/cgroup", "memory.max"
            elif "memory" in controllers.split(","):
                base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            else:
                continue
            inner = base / path.lstrip("/")
            for folder in (inner, *inner.parents):
                with contextlib.suppress(OSError, ValueError):  # there is none, or it says `max`
                    found.append(int((folder / name).read_text()))
                if folder == base:
                    break
    return found
