"""What is printed: results to standard output, which programs read, and what models print to standard error.

Where there is no room for a result, or nobody reads it, its command fails, and says so. In a process that serves, what models
print is lost then, and no request: in Python a `print` raises what its write does, and a full disk behind a log would fail
every request of a model that says a word. So is what whoever reads it leaves lying, as a pager does: whoever prints, the
gateway's own log too, would wait for that.
"""

import contextlib
import ctypes
import io
import logging
import os
import select
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2
_PATIENCE_S: Final = 0.2  # with a reader that is late
_NAMES: Final = {"stdout": "standard output", "stderr": "standard error"}

log = logging.getLogger(__name__)


@contextlib.contextmanager
def printed(*, for_good: bool = False) -> Iterator[None]:
    """Around a command: what it prints is written at its end, however that came, or dropped where it cannot be.

    for_good: the process ends with it, and what `apart` sends to standard error goes there to the end: handlers and threads of
    models print on. False: who called it prints to standard output as before.
    Raises: OSError, of the file "standard output"; BrokenPipeError, where its reader has gone.
    """
    plain = sys.stdout
    try:
        out = _alike(plain, _Named(plain.fileno(), for_good=for_good))
    except (AttributeError, OSError):  # it is no file, or there is none
        yield
        return
    with contextlib.redirect_stdout(out):
        try:
            yield
        finally:
            try:
                out.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # else Python, at its end, would complain as well
                raise


@contextlib.contextmanager
def apart(*, more: bool = False) -> Iterator[TextIO]:
    """While code of models may run: what it, its libraries or what they start prints goes to standard error.

    Gives a stream for results, which are written at the end. more: results come after it. Raises: as `printed`.
    """
    plain = sys.stdout
    if not _is(plain, _STANDARD_OUTPUT):  # of who calls a command from Python; None: it is closed
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stderr):
            yield plain or nowhere
        return
    back = more or not _is_for_good(plain)
    plain.flush()
    _flush_original()
    results = _alike(plain, _Named(os.dup(_STANDARD_OUTPUT), closefd=True))
    os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield results
    finally:
        _flush_original()
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
        if back:
            os.dup2(results.fileno(), _STANDARD_OUTPUT)
        results.close()


def never_raise() -> None:
    """Have what is printed in this process from now on raise nothing and wait for nobody, and a line be written at once.

    What had standard output before writes as before.
    """
    for name, title in _NAMES.items():
        stream = getattr(sys, name)
        with contextlib.suppress(AttributeError, OSError):  # it is no file, or there is none
            raw = _Losing(stream.fileno(), title)
            with contextlib.suppress(OSError):
                stream.flush()
            setattr(sys, name, _alike(stream, raw, line_buffering=True))


def _is(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (AttributeError, OSError):  # it is no file, or there is none
        return False


def _flush_original() -> None:
    """What was printed at Python's own standard output, whatever has replaced it since."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, it is full, or closed
        sys.__stdout__.flush()  # type: ignore[union-attr]  # None


def _is_for_good(stream: TextIO) -> bool:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return isinstance(raw, _Named) and raw.for_good


def _alike(stream: TextIO, raw: io.FileIO, **otherwise: bool) -> TextIO:
    """Over another file, what encodes and buffers as a standard stream does. otherwise: where it differs."""
    how = {option: getattr(stream, option) for option in ("encoding", "errors", "line_buffering", "write_through")}
    return io.TextIOWrapper((_Unbuffered if how["write_through"] else io.BufferedWriter)(raw), **(how | otherwise))


class _Unbuffered(io.BufferedWriter):
    """As PYTHONUNBUFFERED wants it; over a plain file, what that takes in part would be cut off."""

    def write(self, data: "ReadableBuffer", /) -> int:
        written = super().write(data)
        self.flush()
        return written


class _Named(io.FileIO):
    def __init__(self, descriptor: int, *, closefd: bool = False, for_good: bool = False) -> None:
        """for_good: as `printed` has it."""
        super().__init__(descriptor, "wb", closefd=closefd)
        self.for_good = for_good

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            exc.filename = _NAMES["stdout"]
            raise


class _Losing(io.FileIO):
    """A descriptor of somebody else's."""

    def __init__(self, descriptor: int, title: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._title = title
        self._told = title == _NAMES["stderr"]  # which is where it would be told
        self._stuck = False

    def write(self, data: "ReadableBuffer", /) -> int:
        written = None
        why = "nobody reads it"
        with memoryview(data).cast("B") as whole, whole[: select.PIPE_BUF] as piece:  # which a pipe with room takes at once
            try:
                if self._has_room():
                    written = super().write(piece)
            except OSError as exc:
                why = str(exc.strerror)
        if written is not None:
            return written
        if not self._told:
            self._told = True
            log.warning("%s: %s: what models print there is lost, as long as that is so", self._title, why)
        return memoryview(data).nbytes

    def _has_room(self) -> bool:
        """Waits for it once, until there is some again."""
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        self._stuck = not poll.poll(0 if self._stuck else _PATIENCE_S * 1000)
        return not self._stuck
