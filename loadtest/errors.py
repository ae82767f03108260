"""What stops a load test before there is a result, and the exit codes of the command line.

    LoadtestError
    ├── UsageError          the user's arguments or files; nothing was started
    ├── TargetError         the target cannot be asked what the test needs to know (metadata, contract)
    └── Interrupted         the user ended it before anything was measured

A target that fails *under load* is no exception: its failures are counted in the result.
"""

import enum
from typing import Final


class ExitCode(enum.IntEnum):
    """What CI sees. The first that applies, from INVALID down."""

    MET = 0  # also: nothing was asked to be met
    MISSED = 1  # the SLO is missed or undecided; no candidate meets it
    USAGE = 2
    INVALID = 3  # the generator could not do what was asked: the figures say nothing of the target
    REGRESSION = 4


EXIT_CODES: Final = {
    ExitCode.MET: "the SLO is met, or none was asked for and something succeeded; no regression; done",
    ExitCode.MISSED: "the SLO is missed, or undecided; no candidate meets it; the target could not be asked",
    ExitCode.USAGE: "the command or a file of it is faulty, or cannot be read or written",
    ExitCode.INVALID: "INVALID: the load could not be offered as asked, so the figures say nothing of the target",
    ExitCode.REGRESSION: "a regression",
    129: "ended by a terminal that was closed (SIGHUP), before there was a result",
    130: "ended by Ctrl-C before there was a result",
    141: "whoever read its output has gone",
    143: "ended by SIGTERM before there was a result",
}
"""Each with what it means, as --help and docs/loadtest.md tell it."""


class LoadtestError(Exception):
    """message: what was wrong, with the value, what was expected, and the option or key to change."""

    exit_code = ExitCode.USAGE


class UsageError(LoadtestError):
    """The arguments or a file are wrong."""


class TargetError(LoadtestError):
    """The target did not answer a question that the test depends on."""

    exit_code = ExitCode.MISSED


class Interrupted(LoadtestError):
    """Ended by the user before anything was sent: there is nothing to keep."""
