"""What servers have cost, of benchmarks."""

import contextlib
from collections.abc import Iterable

import psutil


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """User and system time so far of those that are still there."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total
