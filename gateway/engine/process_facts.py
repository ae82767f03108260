"""What the operating system knows of this process and its children: age, processor time, memory. From Linux's /proc."""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Used(NamedTuple):
    """By one process."""

    cpu_ns: int
    memory_bytes: int


def age_s() -> float:
    """How long ago the operating system started this process; 0.0, if it does not say."""
    try:
        started_s = int(_stat("self")[19]) * _TICK_S  # since the machine's start
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError):
        return 0.0


def own_memory_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def used_by(pids: Iterable[int]) -> list[Used]:
    """What other processes have used; those that have ended are left out."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat(str(pid))
            cpu_ns = round((int(fields[11]) + int(fields[12])) * _TICK_S * 1e9)
            found.append(Used(cpu_ns, int(fields[21]) * _PAGE_BYTES))
    return found


def ended_children_cpu_ns() -> int:
    times = os.times()
    return round((times.children_user + times.children_system) * 1e9)


def _stat(pid: str) -> list[str]:
    """From the third field of /proc/PID/stat on: behind the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
