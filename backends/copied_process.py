"""Work on a copy of this process: whatever it does to what is in memory, is left open or unfinished, none of it is so here.

So it can be ended at any moment. To raise something within it could leave a module half imported, or a model half loaded.
"""

import contextlib
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable


class CopyFailed(Exception):
    """What was to be done has raised, or has ended its process."""


def in_copy(work: Callable[[], str], limit_s: float) -> str | None:
    """What it gives, a line; None: it has not ended in time. By the main thread, as others are not copied, and locks they hold
    stay held. Raises: CopyFailed."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # else both might write what waits there
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of other threads: at worst it does not end
        child = os.fork()
    if not child:
        _work(work, writing, 2 * limit_s)
    try:
        os.close(writing)
        return _line(reading, limit_s)
    finally:
        for kill in (os.kill, os.killpg):  # with what it has started
            with contextlib.suppress(OSError):
                kill(child, signal.SIGKILL)
        os.close(reading)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _work(work: Callable[[], str], writing: int, limit_s: float) -> None:
    """In the copy, which this ends. limit_s: then it ends by itself, if who has made it is gone."""
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        line = work()
        with open(writing, "w", encoding="utf-8") as file:
            file.write(f"{line}\n")
    finally:
        signal.raise_signal(signal.SIGKILL)  # without what this process is to do at its end


def _line(reading: int, limit_s: float) -> str | None:
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    end_s = time.monotonic() + limit_s
    told = b""
    while (left_s := end_s - time.monotonic()) > 0 and poll.poll(1e3 * left_s):
        part = os.read(reading, 1 << 16)
        told += part
        if told.endswith(b"\n"):
            return told.decode()
        if not part:
            raise CopyFailed
    return None
