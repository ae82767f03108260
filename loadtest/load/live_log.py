"""What a run has measured so far, in a file that outlives the process that measures: `loadtest recover` reads it.

The file is the table of requests (`loadtest.load.request_log`), shared memory of all that send, and behind it how to read it: a
document (JSON), its length and the number of requests (8 bytes each, little-endian). The kernel keeps what was written, however
the writers end; only a machine that crashes loses the last seconds.
"""

import errno
import fcntl
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import msgspec

from loadtest.errors import UsageError
from loadtest.load.request_log import REQUEST_BYTES, RequestLog
from loadtest.results import LoadSpec, to_json

SUFFIX: Final = ".live"
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # as of some network's


@dataclass(frozen=True, slots=True)
class Description:
    """What the table is of. Values of the spec's headers are left out. digests: as in RunResult."""

    spec: LoadSpec
    started_at: str
    digests: dict[str, str] = field(default_factory=dict)


def create(path: Path) -> IO[bytes]:
    """An empty file, instead of one that a killed run has left, for one run and the processes that share what is open.

    Whoever removes it does so before closing it: then it may be another run's. Raises: UsageError, also if another run has it.
    """
    with ExitStack() as refused:
        try:
            file = refused.enter_context(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b"))
            if not try_lock(file.fileno()):
                raise UsageError(f"{path}: another run writes here: wait for its end, or name another file")
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                file.truncate()  # not before: a map of another process would lose its memory
                refused.pop_all()
                return file
        except OSError as exc:
            raise UsageError(f"{path}: cannot be written: {exc}") from exc
    return create(path)  # a run that has ended meanwhile removed the one that was locked


def try_lock(fd: int) -> bool:
    """Gives whether nobody else has locked the file, which is held until it is closed. Raises: OSError.

    Where its file system has no locks, nobody has.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            raise
    return True


def describe(file: IO[bytes], spec: LoadSpec, *, requests: int, started_at: str, digests: Mapping[str, str]) -> None:
    """Write what is needed to read the table, which is laid out already, behind it."""
    told = {"spec": msgspec.Raw(to_json(spec).encode()), "started_at": started_at, "digests": dict(digests)}
    document = msgspec.json.encode(told)
    file.seek(max(1, requests) * REQUEST_BYTES)
    file.write(document + len(document).to_bytes(8, "little") + requests.to_bytes(8, "little"))
    file.flush()


def read(path: Path) -> tuple[Description, RequestLog]:
    """The table as it was when its run ended; a copy.

    Raises: UsageError, if the file is no such table or cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 16))
            tail = file.read(16)
            length, requests = int.from_bytes(tail[:8], "little"), int.from_bytes(tail[8:], "little")
            if len(tail) < 16 or max(1, requests) * REQUEST_BYTES + length + 16 != size:
                raise UsageError(
                    f"{path}: not what `loadtest run` keeps while it runs, or the run ended before it began to send"
                )
            file.seek(size - 16 - length)
            description = msgspec.json.decode(file.read(length), type=Description)
            return description, RequestLog(requests, file.fileno(), copied=True)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}: cannot be read: {exc}") from exc
