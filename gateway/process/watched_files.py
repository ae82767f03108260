"""What is made of files, and made anew when they change.

Either who asks looks at the files, at most once a second, and is given what they say now; or, as what takes long to make is
made beside the event loop and counts once it is there, they are looked at all the time. Files that cannot be used change
nothing. A file whose neighbour is still to come is no fault yet: so the log tells of a fault only when a later look finds the
same.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from gateway.errors import ConfigError
from gateway.turns import beside

LOOK_S: Final = 1.0
_State = tuple[tuple[int, ...] | None, ...]
Made = TypeVar("Made")

log = logging.getLogger(__name__)


class WatchedFiles(Generic[Made]):
    """See the module: `current`, or `keep_looking` and `made`. On one thread.

    made: of the files as they were when they were looked at last, or before they could not be used.
    """

    def __init__(
        self, paths: Sequence[str], make: Callable[[], Made], *, name: str, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """make: reads the files; raises ConfigError, as this does then. name: of them, for the log."""
        self._paths = paths
        self._make = make
        self._name = name
        self._clock = clock
        self._seen = self._state()
        self.made = make()
        self._next_look_ns = clock() + round(LOOK_S * 1e9)
        self._faulty: _State | None = None
        self._told = False  # of these faulty files

    def current(self) -> Made:
        """What the files say now, or said before they could not be used."""
        now_ns = self._clock()
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + round(LOOK_S * 1e9)
            state = self._changed()
            if state is not None:
                self._take(state, self._make)
        return self.made

    async def keep_looking(self, every_s: float = LOOK_S) -> None:
        """Until it is cancelled. Files that have changed are read on a thread."""
        while True:
            await asyncio.sleep(every_s)
            try:
                state = self._changed()
                if state is not None:
                    making = asyncio.get_running_loop().run_in_executor(None, beside, self._make)
                    await asyncio.wait((making,))
                    self._take(state, making.result)
            except Exception:  # no thread can be started, say: it is looked at again
                log.exception("the %s of before count", self._name)

    def _changed(self) -> _State | None:
        """What the files are now; None: as they were, or as the log has told of."""
        state = self._state()
        if state == self._seen:
            self._faulty = None
        elif state != self._faulty or not self._told:
            return state
        return None

    def _take(self, state: _State, make: Callable[[], Made]) -> None:
        known = state == self._faulty
        self._faulty, self._told = state, known
        try:
            self.made = make()
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
