"""Where the processes on Ray log: to their standard error, which Ray keeps in its `worker-*.err`, and shows where
`gateway serve` runs.

Serve puts a stream in the place of sys.stderr that hands each line to a logger of its own, as INFO and so below the level that
is written. Without a handler of ours, Python prints warnings and errors there, and they are lost.
"""

import logging
import sys
from typing import Final

_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"  # as cli has it
_TRACE: Final = "gateway.trace"


def log_to_stderr() -> None:
    """Write warnings and errors of ours, and the trace of batches. A second call does nothing."""
    for name in ("gateway", "backends"):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
            logger.addHandler(_StderrHandler())
    logging.getLogger(_TRACE).setLevel(logging.INFO)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic for mypy alone
    def __init__(self) -> None:
        super().__init__(sys.__stderr__)
        self.setFormatter(logging.Formatter(_FORMAT))

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.name == _TRACE
