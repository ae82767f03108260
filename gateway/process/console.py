"""What a process says beside its result, on standard error: log lines, steps that take long, and its last words.

`set_up` once in each process says how. Steps and last words are plain lines; in the format `json` they are objects of one line
each, as every log line is then. Nothing here is coloured.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from gateway.process.prints import log_stream

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")

_SLOW_S: Final = 1.0
_STANDARD_ERROR: Final = 2

# Plain lines to who started the command: info for what goes on, which `quiet` leaves out, error for why it ends.
words: Final = logging.getLogger("gateway.process.console")


@dataclass(frozen=True, slots=True)
class Speech:
    """How much a process says, and in which format. quiet: no steps, only warnings and errors."""

    level: str = "info"
    format: Literal["text", "json"] = "text"
    quiet: bool = False


def set_up(speech: Speech, *, guest: bool = False) -> None:
    """Log to standard error as this says; a second call replaces the first. Whichever standard file is closed leads nowhere.

    guest: in a process of somebody else (Ray), where only what is ours is logged so. Otherwise everything is, unless the root
    has handlers already.
    """
    formatter = _JsonLine() if speech.format == "json" else _Printable(_LINE)
    if guest:
        for name in ("gateway", "backends"):
            _own(logging.getLogger(name), formatter, speech.level)
    else:
        hold_standard_files()
        logging.basicConfig(level=speech.level.upper(), handlers=[_Stderr(formatter)])
    plain = formatter if speech.format == "json" else _Printable("%(message)s")
    _own(words, plain, "warning" if speech.quiet else "info")


def hold_standard_files() -> None:
    """Have those that are closed lead nowhere.

    Or the event loop would get the number of one: whoever prints would write to it, and libuv aborts when it is closed. So
    would a pipe to a child process, which gets its own standard files in that place.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(opened, True)
    os.close(opened)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Say what is being done once it has taken a second: "loading minilm …"."""
    timer = threading.Timer(_SLOW_S, words.info, (f"{text} …",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def printable(text: object) -> str:
    """What may be written to a terminal: a control character, also of Unicode's, is a dot."""
    said = str(text)
    return said if said.isprintable() else "".join(char if char.isprintable() else "·" for char in said)


def printable_lines(text: str) -> str:
    """As `printable`, each line of it."""
    return "\n".join(map(printable, text.split("\n")))


_LINE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _own(logger: logging.Logger, formatter: logging.Formatter, level: str) -> None:
    logger.handlers[:] = [_Stderr(formatter)]
    logger.propagate = False
    logger.setLevel(level.upper())


class _Stderr(logging.Handler):
    """Raises nothing: who logs goes on."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if (stream := log_stream()) is not None:
                print(self.format(record), file=stream, flush=True)
        except Exception:
            with contextlib.suppress(Exception):  # it tells at what may have failed
                self.handleError(record)


class _Printable(logging.Formatter):
    """Whose words they are nobody knows here: a client's, a server's, or a model's, may move the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record).expandtabs())


class _JsonLine(logging.Formatter):
    """One object a line: time (UTC), level, logger, process, message, what the record has as `fields`, and the traceback as
    `exception` where there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        said |= getattr(record, "fields", {})
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)
