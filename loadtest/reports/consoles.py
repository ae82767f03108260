"""Where a command writes for people: its results to standard output, what goes on meanwhile to standard error.

Both are coloured in a terminal only, and not where NO_COLOR is set: rich sees to that.
"""

import argparse
import io
import os
import sys
from collections.abc import Iterator
from typing import Final, TextIO

import rich.console
from rich.segment import Segment

from gateway.process.console import printable_lines, words

WIDTH: Final = 100  # columns where there is no terminal
_UNBROKEN: Final = 10_000  # columns


class Console(rich.console.Console):
    """One whose user decides what to do where whoever reads has gone: rich exits with 1.

    Names of a file or a server do not move the cursor: what is written is printable.
    """

    def on_broken_pipe(self) -> None:
        """Raises: BrokenPipeError, while that is handled."""
        raise

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """As rich does it; its own control codes stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


def results(*, hidden: bool = False) -> Console:
    """Standard output at the terminal's width, or WIDTH columns where there is none."""
    return Console(width=_width(sys.stdout), highlight=False, quiet=hidden, force_terminal=False if hidden else None)


def meanwhile(arguments: argparse.Namespace) -> Console:
    """Standard error, as wide as `results`, as --quiet and --log-format say. It is a terminal only where a line of it can be
    redrawn.
    """
    if arguments.quiet:
        return Console(quiet=True, force_terminal=False)
    if arguments.log_format == "json":
        return Console(file=_Lines(), width=_UNBROKEN, highlight=False, force_terminal=False)
    width = _width(sys.stderr)
    console = Console(stderr=True, width=width, highlight=False)
    return Console(stderr=True, width=width, highlight=False, force_terminal=False) if console.is_dumb_terminal else console


def _width(stream: TextIO) -> int | None:
    """None: the terminal's, or what COLUMNS says."""
    return None if stream.isatty() or "COLUMNS" in os.environ else WIDTH


class _Lines(io.StringIO):
    """Makes each line that is written a log line."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            words.info("%s", line.rstrip())
        return len(text)
