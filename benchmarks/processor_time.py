"""What servers have cost, of benchmarks."""

import contextlib
from collections.abc import Iterable, Mapping

import psutil


def cpu_s(processes: Iterable[psutil.Process]) -> dict[psutil.Process, float]:
    """User and system time so far of each that is still there."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found[process] = sum(process.cpu_times()[:2])
    return found


def cpu_between(before: Mapping[psutil.Process, float], after: Mapping[psutil.Process, float]) -> float:
    """Of all of them, between two readings. Raises: RuntimeError, if one has ended meanwhile: nobody knows its time."""
    if gone := before.keys() - after.keys():
        raise RuntimeError(f"{', '.join(map(str, gone))} ended while its processor time was measured")
    return sum(after.values()) - sum(before.values())
