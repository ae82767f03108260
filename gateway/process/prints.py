"""What models print, in a process that serves: where there is no room for it, or nobody reads it, it is lost, and no request.

In Python a `print` raises what its write does: a full disk behind a log would fail every request of a model that says a word.
"""

import contextlib
import io
import logging
import sys
from typing import TYPE_CHECKING, Final

from gateway.process.results import STANDARD_OUTPUT, alike

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES: Final = {"stdout": STANDARD_OUTPUT, "stderr": "standard error"}

log = logging.getLogger(__name__)


def never_raise() -> None:
    """Have what is printed in this process from now on raise nothing. What had standard output before writes as before."""
    for name, title in _NAMES.items():
        stream = getattr(sys, name)
        with contextlib.suppress(AttributeError, OSError):  # it is no file, or there is none
            raw = _Losing(stream.fileno(), title)
            with contextlib.suppress(OSError):
                stream.flush()
            setattr(sys, name, alike(stream, raw))


class _Losing(io.FileIO):
    """A descriptor of somebody else's."""

    def __init__(self, descriptor: int, title: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._title = title
        self._told = title == _NAMES["stderr"]  # which is where it would be told

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            written = super().write(data)
            why = "nobody reads it"
        except OSError as exc:
            written, why = None, str(exc.strerror)
        if written is not None:
            return written
        if not self._told:
            self._told = True
            log.warning("%s: %s: what models print there is lost, as long as that is so", self._title, why)
        return memoryview(data).nbytes
