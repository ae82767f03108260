"""Standard output, which is for results: programs read it. An error of writing there names it."""

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STANDARD_OUTPUT: Final = "standard output"
_NUMBER, _STANDARD_ERROR = 1, 2  # of the files


@contextlib.contextmanager
def printed() -> Iterator[None]:
    """Around a command: what it prints is written at its end, however that came, or dropped where it cannot be.

    Raises: OSError, of the file STANDARD_OUTPUT; BrokenPipeError, where its reader has gone.
    """
    plain = sys.stdout
    try:
        out = alike(plain, _Named(plain.fileno()))
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
def apart() -> Iterator[TextIO]:
    """While code of models may run: what it, its libraries or what they start prints goes to standard error.

    Gives a stream for results, which are written at the end. Raises: as `printed`.
    """
    plain = sys.stdout
    if not _is(plain, _NUMBER):  # of who calls a command from Python; None: it is closed
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stderr):
            yield plain or nowhere
        return
    plain.flush()
    results = alike(plain, _Named(os.dup(_NUMBER), closefd=True))
    os.dup2(_STANDARD_ERROR, _NUMBER)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield results
    finally:
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
        os.dup2(results.fileno(), _NUMBER)
        results.close()


def _is(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (AttributeError, OSError):  # it is no file, or there is none
        return False


def alike(stream: TextIO, raw: io.FileIO) -> TextIO:
    """Over another file, what encodes and buffers as a standard stream does."""
    how = {option: getattr(stream, option) for option in ("encoding", "errors", "line_buffering", "write_through")}
    return io.TextIOWrapper(io.BufferedWriter(raw), **how)


class _Named(io.FileIO):
    def __init__(self, descriptor: int, *, closefd: bool = False) -> None:
        super().__init__(descriptor, "wb", closefd=closefd)

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            exc.filename = STANDARD_OUTPUT
            raise
