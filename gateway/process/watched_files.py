"""What is made of files, and made anew when they change.

Nobody waits for a change: who asks looks at the files, at most once a second. Files that cannot be used change nothing. A file
whose neighbour is still to come is no fault yet: so the log tells of a fault only when a later look finds the same.

What takes long to make is made beside the event loop, and counts once it is there.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from gateway.errors import ConfigError
from gateway.turns import beside

_LOOK_NS: Final = 1_000_000_000
_State = tuple[tuple[int, ...] | None, ...]
Made = TypeVar("Made")

log = logging.getLogger(__name__)


class WatchedFiles(Generic[Made]):
    """See the module. On one thread."""

    def __init__(
        self,
        paths: Sequence[str],
        make: Callable[[], Made],
        *,
        name: str,
        long: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """make: reads the files; raises ConfigError, as this does then. long: it may take long. name: of them, for the log."""
        self._paths = paths
        self._make = make
        self._name = name
        self._clock = clock
        self._seen = self._state()
        self._made = make()
        self._next_look_ns = clock() + _LOOK_NS
        self._faulty: _State | None = None
        self._told = False  # of these faulty files
        self._long = long
        self._making: asyncio.Future[Made] | None = None

    def current(self) -> Made:
        """What the files say now, or said before they could not be used."""
        now_ns = self._clock()
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + _LOOK_NS
            self._look()
        return self._made

    def _look(self) -> None:
        if self._making is not None:
            return
        state = self._state()
        if state == self._seen:
            self._faulty = None
            return
        known = state == self._faulty
        if known and self._told:
            return
        if self._long:
            try:
                self._making = asyncio.get_running_loop().run_in_executor(None, beside, self._make)
            except RuntimeError:  # no thread can be started: it is looked at again
                return
        self._faulty, self._told = state, known
        if self._making is not None:
            self._making.add_done_callback(lambda making: self._take(making.result, state, known))
        else:
            self._take(self._make, state, known)

    def _take(self, make: Callable[[], Made], state: _State, known: bool) -> None:
        """known: these files were found faulty before."""
        self._making = None
        try:
            self._made = make()
        except (ConfigError, OSError) as exc:  # a file that has just gone
            if known:
                said = exc.message if isinstance(exc, ConfigError) else str(exc)
                log.warning("%s; until that is mended, the %s of before count", said, self._name)
        else:
            self._seen, self._faulty = state, None
            log.info("the %s have changed, and were read again", self._name)

    def _state(self) -> _State:
        """What tells these files from others."""
        return tuple(map(_state_of, self._paths))


def _state_of(path: str) -> tuple[int, ...] | None:
    """None: there is no such file. ctime: a copy can be given another file's mtime."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mode, status.st_mtime_ns, status.st_size, status.st_ctime_ns
