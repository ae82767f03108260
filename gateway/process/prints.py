"""What is printed: results to standard output, which programs read, and all else to standard error.

Where there is no room for a result, or nobody reads it, its command fails, and says so. All else is lost then: in Python a
`print` raises what its write does, and a full disk behind a log would fail every request of a model that says a word. In a
process that serves, so is what whoever reads it leaves lying, as a pager does: whoever prints would wait for that.

While models may run, `sys.stdout` and `sys.stderr` are theirs, each over a descriptor of its own, 1 and 2, which both lead to
standard error: to wrap them anew or to detach, replace and close them is common. The gateway's results and its log have streams
and descriptors that are nobody else's.
"""

import contextlib
import ctypes
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeGuard

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2
_RESULTS: Final = "standard output"
_READER_S: Final = 0.2  # for one that is late

_log: TextIO | None = None  # of the gateway, while sys.stderr is the models'
_patience_s: float | None = None  # with a reader; None: without end


def log_stream() -> TextIO | None:
    """What the gateway's log is to be written to at the time; None: standard error is closed."""
    return _log or sys.stderr


@contextlib.contextmanager
def logged_to(stream: TextIO) -> Iterator[None]:
    """The gateway's log is to be written there meanwhile."""
    global _log
    before, _log = _log, stream
    try:
        yield
    finally:
        _log = before


@contextlib.contextmanager
def printed(*, for_good: bool = False) -> Iterator[None]:
    """Around a command: what it prints is written at its end, however that came, or dropped where it cannot be.

    for_good: the process ends with it, and what `apart` sends to standard error goes there to the end: handlers and threads of
    models print on. False: who called it prints to standard output as before.
    Raises: OSError, of the file "standard output"; BrokenPipeError, where its reader has gone.
    """
    plain = sys.stdout
    descriptor = _descriptor(plain)
    if descriptor is None:
        with contextlib.redirect_stdout(None if getattr(plain, "closed", False) else plain):
            yield
        return
    _flush(plain)  # what who called it has printed comes first
    with contextlib.redirect_stdout(_alike(plain, _Unbuffered(_Named(descriptor, for_good=for_good)))) as out:
        try:
            yield
        finally:
            out.flush()


@contextlib.contextmanager
def apart(*, more: bool = False) -> Iterator[TextIO]:
    """While code of models may run: what it, its libraries or what they start prints goes to standard error, or is lost.

    Gives a stream for results, which are written at the end. more: results come after it. Raises: as `printed`.
    """
    global _log
    plain, error = sys.stdout, sys.stderr
    if _descriptor(plain) != _STANDARD_OUTPUT:  # of who calls a command from Python; None: it is closed
        sys.stdout, sys.stderr, _log = _kept(error), _kept(error), _kept(error)
        try:
            with open(os.devnull, "w") as nowhere:
                yield plain or nowhere
        finally:
            sys.stdout, sys.stderr, _log = plain, error, None
        return
    back = more or not _is_for_good(plain)
    plain.flush()
    _flush(sys.__stdout__)
    results = _alike(plain, _Unbuffered(_Named(os.dup(_STANDARD_OUTPUT), closefd=True)))
    spoken = os.dup(_STANDARD_ERROR)
    os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)
    usual = error is None or _descriptor(error) == _STANDARD_ERROR  # else of who calls a command from Python
    sys.stdout = _kept(error or plain, _STANDARD_OUTPUT if usual else None)
    sys.stderr, _log = _kept(error), _kept(error, spoken if usual else None)
    try:
        yield results
    finally:
        _flush(sys.stdout)
        _flush(sys.__stdout__)
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
        sys.stdout, sys.stderr, _log = plain, error, None  # what models have put there may close its descriptor as it goes
        os.dup2(results.fileno() if back else spoken, _STANDARD_OUTPUT)
        os.dup2(spoken, _STANDARD_ERROR)
        os.close(spoken)
        results.close()


def never_raise(*, waits: bool = False) -> None:
    """Have what is printed in this process from now on raise nothing, and a line be written at once.

    What had standard output before writes as before. waits: for whoever reads it, as before; else what he leaves lying is lost.
    """
    global _log, _patience_s
    if not waits:
        _patience_s = _READER_S
    # Also what is no `is_text_file`: Ray has wrapped those of its workers.
    sys.stdout, sys.stderr, _log = _losing(sys.stdout), _losing(sys.stderr), _losing(_log or sys.stderr)


def flush() -> None:
    """What was printed, as far as it can be written."""
    _flush(sys.stdout)
    _flush(sys.stderr)


def is_text_file(stream: TextIO | None) -> TypeGuard[io.TextIOWrapper]:
    """As `open` makes one, whose file or bytes may be written to instead. What a wrapper does with text would be left out."""
    return getattr(type(stream), "write", None) is io.TextIOWrapper.write


def _descriptor(stream: TextIO | None) -> int | None:
    """None: it is no `is_text_file`, or not of an open file."""
    try:
        return stream.fileno() if is_text_file(stream) else None
    except (OSError, ValueError):
        return None


def _flush(stream: TextIO | None) -> None:
    with contextlib.suppress(Exception):  # there is none, it is full, closed, or what a model takes for one
        stream.flush()  # type: ignore[union-attr]  # None


def _is_for_good(stream: TextIO) -> bool:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return isinstance(raw, _Named) and raw.for_good


def _kept(stream: TextIO, descriptor: int | None = None) -> TextIO:
    """As `_losing`; what is no `is_text_file` is itself."""
    return _losing(stream, descriptor) if is_text_file(stream) else stream


def _losing(stream: TextIO, descriptor: int | None = None) -> TextIO:
    """Another over its descriptor, or that one, which stays open and raises nothing; itself, if it is no open file."""
    try:
        raw = _Losing(stream.fileno() if descriptor is None else descriptor, "wb", closefd=False)
        _flush(stream)
        errors = "backslashreplace" if stream.errors == "strict" else stream.errors
        return _alike(stream, _Lasting(raw), errors=errors, line_buffering=True)
    except (AttributeError, OSError, ValueError):
        return stream


def _alike(stream: TextIO, buffer: io.BufferedWriter, **otherwise: Any) -> TextIO:
    """Over another file, what encodes as a standard stream does. otherwise: where it differs."""
    how = {option: getattr(stream, option) for option in ("encoding", "errors", "line_buffering", "write_through")}
    return io.TextIOWrapper(buffer, **(how | otherwise))


class _Unbuffered(io.BufferedWriter):
    """As PYTHONUNBUFFERED wants it; text is buffered above. Over a plain file, what that takes in part would be cut off."""

    def write(self, data: "ReadableBuffer", /) -> int:
        written = super().write(data)
        self.flush()
        return written


class _Lasting(_Unbuffered):
    """Is not closed by what wraps it: each wrapper that is replaced would, as it is collected."""

    def close(self) -> None:
        self.flush()


class _Named(io.FileIO):
    def __init__(self, descriptor: int, *, closefd: bool = False, for_good: bool = False) -> None:
        """for_good: as `printed` has it."""
        super().__init__(descriptor, "wb", closefd=closefd)
        self.for_good = for_good

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            exc.filename = _RESULTS
            raise


class _Losing(io.FileIO):
    """A descriptor of somebody else's."""

    _stuck = False

    def write(self, data: "ReadableBuffer", /) -> int:
        with memoryview(data).cast("B") as whole, whole[: select.PIPE_BUF] as piece:  # which a pipe with room takes at once
            with contextlib.suppress(OSError):
                if self._has_room() and (written := super().write(piece)) is not None:
                    return written
            return whole.nbytes

    def _has_room(self) -> bool:
        """Waits for it once, until there is some again."""
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        self._stuck = not poll.poll(0 if self._stuck else None if _patience_s is None else _patience_s * 1000)
        return not self._stuck
