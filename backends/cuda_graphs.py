"""Recording what a session launches: which batches, few enough that all are recorded before traffic, and when.

ONNX Runtime records in CUDA's global mode: meanwhile no thread of the process may allocate, copy or wait on CUDA, or what is
recorded is spoiled and its session lost. So all that a backend does on CUDA is within `running`, and that within `recording`.
(Seen with ONNX Runtime 1.31 on an H200, 2026-11; PyTorch's sessions record in a mode that lets others go on.)
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

MOST_GRAPHS: Final = 128
"""A session's; batch shapes beyond run unrecorded."""

_PATIENCE_S: Final = 2.0  # of who would record
_PAUSE_S: Final = 30.0

capturing: Final = threading.Lock()
"""Around a recording by PyTorch, which waits for all of the device first: that would spoil another thread's."""

_thread: Final = threading.local()  # runs: whether it is within `running`
_changed: Final = threading.Condition()
_at_work = 0  # threads within `running`; -1: one is within `recording`
_to_record = 0  # threads that wait for that, and go first: else runs that follow each other would keep them out
_not_before_s = 0.0  # time.monotonic: when the next may try to record


def recorded_rows(max_rows: int) -> tuple[int, ...]:
    """The sizes that batches are padded to, ascending up to max_rows: powers of two, and from 16 on the middles between them.

    Empty where max_rows is 0. A row of padding costs what a row costs, and a batch that is not recorded a launch per kernel.
    """
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        if size >= 16 and size * 3 // 2 < max_rows:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, max_rows) if max_rows else ()


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Around work on CUDA. Within itself it does nothing."""
    global _at_work
    if getattr(_thread, "runs", False):
        yield
        return
    with _changed:
        _changed.wait_for(lambda: _at_work >= 0 and not _to_record)
        _at_work += 1
    _thread.runs = True
    try:
        yield
    finally:
        _thread.runs = False
        with _changed:
            _at_work -= 1
            if not _at_work:
                _changed.notify_all()


@contextlib.contextmanager
def recording() -> Iterator[bool]:
    """Around a recording in CUDA's global mode, not within `running`. Gives whether it is alone in the process.

    If not, some work on CUDA takes long, or hangs, and all else would wait for it: nothing is recorded for a while.
    """
    global _at_work, _to_record, _not_before_s
    with _changed:
        if alone := time.monotonic() >= _not_before_s:
            _to_record += 1
            alone = _changed.wait_for(lambda: not _at_work, _PATIENCE_S)
            _to_record -= 1
            if alone:
                _at_work = -1
            else:
                _not_before_s = time.monotonic() + _PAUSE_S
                _changed.notify_all()
    try:
        yield alone
    finally:
        if alone:
            with _changed:
                _at_work = 0
                _changed.notify_all()
