"""Recording what a session launches: which batches, few enough that all are recorded before traffic, and when.

ONNX Runtime records in CUDA's global mode: meanwhile no thread of the process may allocate, copy or wait on CUDA, or what is
recorded is spoiled and its session lost. So all that a backend does on CUDA is within `running`, and that within `recording`.
(Seen with ONNX Runtime 1.31 on an H200, 2026-11; PyTorch's sessions record in a mode that lets others go on.)
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

MOST_GRAPHS: Final = 128
"""A session's; batch shapes beyond run unrecorded."""

_changed: Final = threading.Condition()
_at_work = 0  # threads within `running`; -1: one is within `recording`
_to_record = 0  # threads that wait for that, and go first: else runs that follow each other would keep them out


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
    """Around work on CUDA. Not within itself or `recording`: that may wait for ever."""
    global _at_work
    with _changed:
        _changed.wait_for(lambda: _at_work >= 0 and not _to_record)
        _at_work += 1
    try:
        yield
    finally:
        with _changed:
            _at_work -= 1
            if not _at_work:
                _changed.notify_all()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Around a recording in CUDA's global mode: alone in the process."""
    global _at_work, _to_record
    with _changed:
        _to_record += 1
        _changed.wait_for(lambda: not _at_work)
        _to_record -= 1
        _at_work = -1
    try:
        yield
    finally:
        with _changed:
            _at_work = 0
            _changed.notify_all()
