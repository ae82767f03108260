"""What happened to every request: one row each, in memory that several sending processes may share.

Columns, all times in nanoseconds from the start of the run (one monotonic clock for the whole machine):

    intended    when the schedule wants it sent; latency counts from here
    dispatched  when the generator got to it; less intended is the send lag
    sent        when its first byte went out; the wait for a free connection is over. 0: never
    done        when its last byte came back, it failed, or it was given up
    status      `OK`, a failure that has no status, an HTTP status, or GRPC + the gRPC status code
    payload     which of the prepared requests it carries

A request's status is written last: a reader that sees it set may read the other columns.
"""

import csv
import mmap
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import numpy as np

from loadtest.errors import UsageError

PENDING: Final = 0
OK: Final = 1
TIMEOUT: Final = 2
REFUSED: Final = 3  # no connection
RESET: Final = 4  # the connection ended before the answer
MALFORMED: Final = 5  # the answer was none of the protocol
CUT: Final = 6  # given up at the end of the run: it would have taken longer than it had until then
UNSENT: Final = 7  # the generator came to it after its deadline: asked, and never sent
ERROR_EVENT: Final = 8  # the last of a stream of events, behind a status of success
GRPC: Final = 1000

_NAMES: Final = {
    TIMEOUT: "timeout", REFUSED: "refused", RESET: "reset", MALFORMED: "malformed", ERROR_EVENT: "error event",
}  # fmt: skip
_GRPC_CODES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip

_TIMES: Final = ("intended", "dispatched", "sent", "done")
REQUEST_BYTES: Final = len(_TIMES) * 8 + 4 + 2


def status_name(status: int) -> str:
    """A failure in words: `timeout`, `http 503`, `grpc UNAVAILABLE`."""
    if status >= GRPC:
        return f"grpc {_GRPC_CODES[status - GRPC]}"
    return _NAMES.get(status) or f"http {status}"


class RequestLog:
    """The table. Its owner creates it with `shared`; other processes open the same memory by its file descriptor.

    Columns are memoryviews: faster than numpy's arrays one item at a time; `np.asarray(log.done)` is a view for many.
    """

    def __init__(self, size: int, fd: int = -1, *, copied: bool = False) -> None:
        """fd: -1 for memory of this process only, else an open file of size · REQUEST_BYTES bytes (stays the caller's).

        copied: what is written here does not reach the file.
        """
        self.size = size
        access = mmap.ACCESS_COPY if copied else mmap.ACCESS_WRITE
        self._memory = mmap.mmap(fd, max(1, size) * REQUEST_BYTES, access=access)
        view = memoryview(self._memory)
        times = [view[i * size * 8 : (i + 1) * size * 8].cast("q") for i in range(len(_TIMES))]
        self.intended, self.dispatched, self.sent, self.done = times
        at = len(_TIMES) * size * 8
        self.payload = view[at : at + size * 4].cast("i")
        self.status = view[at + size * 4 : at + size * 6].cast("h")

    @classmethod
    def shared(cls, size: int, fd: int) -> "RequestLog":
        """Size an empty file and lay the table over it. Raises: UsageError, if the disk has no room for it."""
        try:
            # Not ftruncate, which allocates nothing: with the disk full, writing to the map would be SIGBUS.
            os.posix_fallocate(fd, 0, max(1, size) * REQUEST_BYTES)
        except OSError as exc:
            needed_mib = size * REQUEST_BYTES >> 20
            raise UsageError(f"the log of {size} requests needs {needed_mib} MiB of disk: {exc.strerror}") from exc
        return cls(size, fd)


def write_csv(path: Path, log: RequestLog, *, used: np.ndarray) -> None:
    """Write the raw log: one line per request that was dispatched, times in nanoseconds. used: indices, in order.

    path: "-" for standard output. Raises: UsageError; OSError, of standard output.
    """
    begun, printed = False, path == Path("-")
    try:
        opened = nullcontext(sys.stdout) if printed else path.open("w", newline="", encoding="utf-8")
        with opened as file:
            begun = path.is_file()
            writer = csv.writer(file)
            writer.writerow(["intended_ns", "sent_ns", "done_ns", "status"])
            for index in used.tolist():
                status = log.status[index]
                name = "ok" if status == OK else "cut" if status in (CUT, PENDING) else status_name(status)
                writer.writerow([log.intended[index], log.sent[index], log.done[index], name])
    except OSError as exc:
        if printed:
            raise
        if begun:  # half of a log reads as a whole one
            path.unlink()
        raise UsageError(f"{path}: the log cannot be written: {exc}") from exc
