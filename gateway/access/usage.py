"""What the keys have asked: in one process, or of all ingress processes of a node, in a file that they share.

The file has a row for each key: its digest, when what it has asked is due, and, a column for each process, its requests in
flight; and behind the rows how many processes have come, so that the others see a new one at once. Whoever decides holds the
lock of the file meanwhile, for some microseconds. Each process holds the lock of its column's own file for as long as it lives,
which the kernel lets go however it ends: then its column counts nothing any more.

Processes on other nodes have other files. Each node grants the part of a limit that its processes are of all that are
configured, and never more than the whole. A row that nothing is in flight of, and nothing due, says what no row would say: it
is given to another key when there is no other room.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final, Protocol

from gateway.access.limits import KeyStanding, Limit, admit

_COLUMNS: Final = 128  # 64 ingresses, and as many that take their places
_ROWS: Final = 8192  # twice as many as a file may list
_DIGEST: Final = 4  # numbers of 64 bits
_ROW: Final = _DIGEST + 1 + _COLUMNS
_CAME: Final = -1  # behind all rows: how many processes have come so far
_NUMBER_BYTES: Final = 8
_NOBODY: Final = bytes(_DIGEST * _NUMBER_BYTES)
_LOCK: Final = "process-"
_LOOK_NS: Final = 1_000_000_000
_TOUCH_NS: Final = 3600 * 1_000_000_000  # what nobody has touched for days is removed from /tmp by some systems


class Usage(Protocol):
    """Where the standing of keys is kept."""

    def enter(self, digest: bytes, limit: Limit, now_ns: int) -> int:
        """Decide on one more request: as `limits.admit` tells it. now_ns: of the monotonic clock, which processes share."""

    def leave(self, digest: bytes) -> None:
        """One that has entered is over."""


class OwnUsage:
    """Of one process."""

    def __init__(self) -> None:
        self._standings: dict[bytes, KeyStanding] = {}

    def enter(self, digest: bytes, limit: Limit, now_ns: int) -> int:
        standing, verdict = admit(self._standings.get(digest, KeyStanding()), limit, now_ns)
        self._standings[digest] = standing
        return verdict

    def leave(self, digest: bytes) -> None:
        standing = self._standings[digest]
        self._standings[digest] = standing._replace(running=standing.running - 1)


class SharedUsage:
    """See the module. One per process; its end is that of the process, or `close`."""

    def __init__(self, directory: Path, processes: int) -> None:
        """directory: of this node's processes, this user's alone. processes: of all nodes. Raises: OSError."""
        self._directory = directory
        self._processes = processes
        self._file = os.open(directory / "limits", os.O_RDWR | os.O_CREAT, 0o600)
        self._rows: dict[bytes, int] = {}
        self._living = self._columns = 1
        self._next_look_ns = self._next_touch_ns = 0
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            size = (_ROWS * _ROW + 1) * _NUMBER_BYTES
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
                if hasattr(os, "posix_fallocate"):  # but on macOS
                    # All of it now: a page that there is no room for later would end the process that writes to it (SIGBUS).
                    os.posix_fallocate(self._file, 0, size)
            self._map = mmap.mmap(self._file, size)
            self._table = memoryview(self._map).cast("q")
            self._column, self._lock = self._free_column()
            self._table[_CAME] += 1  # the others are to look
            self._came = self._table[_CAME]
            self._look()
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def enter(self, digest: bytes, limit: Limit, now_ns: int) -> int:
        table = self._table
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if now_ns >= self._next_look_ns or table[_CAME] != self._came:
                self._next_look_ns, self._came = now_ns + _LOOK_NS, table[_CAME]
                self._look()
                if now_ns >= self._next_touch_ns:
                    self._next_touch_ns = now_ns + _TOUCH_NS
                    self._touch()
            at = self._row(digest, now_ns) + _DIGEST
            standing = KeyStanding(table[at], sum(table[at + 1 : at + 1 + self._columns]))
            standing, verdict = admit(standing, limit.part(self._living, self._processes), now_ns)
            table[at] = standing.due_ns
            if not verdict:
                table[at + 1 + self._column] += 1
            return verdict
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def leave(self, digest: bytes) -> None:
        self._table[self._rows[digest] + _DIGEST + 1 + self._column] -= 1  # which only this process writes

    def close(self) -> None:
        """As if the process had ended."""
        self._table.release()
        self._map.close()
        os.close(self._lock)
        os.close(self._file)

    # with the lock held

    def _row(self, digest: bytes, now_ns: int) -> int:
        """Where the row of a key begins; of one that has none, a new one, or in the place of one that says nothing."""
        known = self._rows.get(digest)
        if known is not None and self._digest(known) == digest:
            return known
        for at in range(0, _ROWS * _ROW, _ROW):  # they are filled in their order
            there = self._digest(at)
            if there in (digest, _NOBODY):
                break
        else:
            at = next(each for each in range(0, _ROWS * _ROW, _ROW) if self._says_nothing(each, now_ns))
            self._rows.pop(self._digest(at), None)
            self._table[at + _DIGEST] = 0
        self._table[at : at + _DIGEST] = memoryview(digest).cast("q")
        self._rows[digest] = at
        return at

    def _says_nothing(self, at: int, now_ns: int) -> bool:
        due_ns, *running = self._table[at + _DIGEST : at + _ROW]
        return due_ns <= now_ns and not any(running)

    def _digest(self, at: int) -> bytes:
        return self._table[at : at + _DIGEST].tobytes()

    def _free_column(self) -> tuple[int, int]:
        """A column that is nobody's, and the lock that makes it ours. Raises: OSError."""
        for column in range(_COLUMNS):
            lock = self._locked(column)
            if lock is not None:
                self._clear(column)
                return column, lock
        raise OSError(errno.EUSERS, f"more than {_COLUMNS} ingress processes use {self._directory}")

    def _look(self) -> None:
        """See which processes live; what the others had in flight is over."""
        living = {self._column}
        for entry in os.scandir(self._directory):
            column = entry.name.removeprefix(_LOCK)
            if column.isdigit() and int(column) != self._column:
                lock = self._locked(int(column))
                if lock is None:
                    living.add(int(column))
                else:
                    self._clear(int(column))
                    os.unlink(entry.path)
                    os.close(lock)
        self._living, self._columns = len(living), max(living) + 1

    def _touch(self) -> None:
        """The files of all who live: without its lock a process would not count, nor share with who comes later."""
        for entry in os.scandir(self._directory):
            with contextlib.suppress(OSError):
                os.utime(entry.path)

    def _locked(self, column: int) -> int | None:
        """The lock of a column, unless a process has it that lives."""
        lock = os.open(self._directory / f"{_LOCK}{column}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def _clear(self, column: int) -> None:
        for at in range(0, _ROWS * _ROW, _ROW):
            if self._digest(at) == _NOBODY:
                return
            self._table[at + _DIGEST + 1 + column] = 0
