"""What the machine has, as far as this process may use it."""

import contextlib
import os
import resource
from pathlib import Path
from typing import Final

UNLIMITED_FILES: Final = 1 << 30


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory: of the machine, or what a cgroup leaves this process, if that is less. root: of the file system."""
    return min([_machine_bytes(), *(limit for limit, _ in _limits(root))])


def memory_left_bytes(root: Path = Path("/")) -> int:
    """What of it nobody has: of the machine, and of each cgroup, pages of files that the kernel would drop not counted."""
    return min([_available_bytes(root), *(limit - used for limit, used in _limits(root))])


def cores(root: Path = Path("/")) -> int:
    """Processor cores for this process: those it may run on, or what a cgroup grants it, if that is less; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *_quotas(root)]))


def files() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_FILES if soft == resource.RLIM_INFINITY else soft


def allow_files(wanted: int) -> int:
    """Raise the soft limit of open files to so many, as far as the hard one lets us. Returns: how many there may be."""
    if files() < wanted:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit beneath
            raised = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return files()


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_bytes(root: Path) -> int:
    with contextlib.suppress(OSError):
        return _listed(root / "proc/meminfo", "MemAvailable:") * 1024 or _machine_bytes()
    return _machine_bytes()


def _limits(root: Path) -> list[tuple[int, int]]:
    """Of the cgroups (version 1 or 2) that this process is in: the limit, and what is used of it."""
    found: list[tuple[int, int]] = []
    for folder, version in _cgroups(root, "memory"):
        if version == 2:
            limit, usage, cached = "memory.max", "memory.current", "inactive_file"
        else:
            limit, usage, cached = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says `max`
            found.append((int((folder / limit).read_text()), _used(folder, usage, cached)))
    return found


def _quotas(root: Path) -> list[int]:
    """Of the same: whole cores that each may use at most."""
    found: list[int] = []
    for folder, version in _cgroups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            if version == 2:
                most, period = (folder / "cpu.max").read_text().split()
            else:
                most, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(most) > 0:  # -1: no limit
                found.append(int(most) // int(period))
    return found


def _cgroups(root: Path, controller: str) -> list[tuple[Path, int]]:
    """Folders of the cgroups that this process is in, each with those above it, and the version of each."""
    found: list[tuple[Path, int]] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                base, version = root / "sys/fs/cgroup", 2
            elif controller in controllers.split(","):
                base, version = root / "sys/fs/cgroup" / controller, 1
            else:
                continue
            inner = base / path.lstrip("/")
            for folder in (inner, *inner.parents):
                found.append((folder, version))
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
