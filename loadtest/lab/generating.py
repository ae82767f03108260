"""From where candidates are loaded: what a lab asks of a load generator, as plain values, and the protocol of those who do it.

`loadtest.lab.here` is this process. A launcher whose candidates this process does not reach has one of its own, beside them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol as Contract

from backends.base import Tensors
from loadtest.errors import ExitCode, LoadtestError
from loadtest.lab.profiling import BatchStatistics, Findings
from loadtest.measuring.progress import Progress
from loadtest.results import LoadSpec, Protocol, RunResult


class GeneratorLost(LoadtestError):
    """The load generator is gone, or does not answer: no candidate's fault, and nothing can be measured any more."""

    exit_code = ExitCode.INVALID


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One load run. statistics: of the server under test, its base address; "": it keeps none, or does not tell.

    until_decided, or_lost: as in `loadtest.measuring.generator.measure`.
    """

    spec: LoadSpec
    statistics: str = ""
    until_decided: bool = False
    or_lost: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """batches: what the server executed meanwhile."""

    result: RunResult
    batches: BatchStatistics


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """See `loadtest.lab.profiling.profile`. statistics: as in `LoadJob`. meter: whether other work here could disturb it."""

    spec: LoadSpec
    rows: tuple[int, ...]
    sessions: int
    seconds: float
    limit_ms: float
    lengths: str = ""
    statistics: str = ""
    meter: bool = True
    simulated: bool = True


@dataclass(frozen=True, slots=True)
class ProfileFound:
    """others: the share of the cores that other work had meanwhile; None: that was not looked at."""

    findings: Findings
    others: float | None


@dataclass(frozen=True, slots=True)
class AnswersJob:
    """Ask for the answer to each different request in the files, evenly spread over them, in `seconds` at most."""

    spec: LoadSpec
    files: tuple[str, ...]
    seconds: float


class Generating(Contract):
    """A load generator. Several may be asked at the same time; each ends when it is cancelled.

    Raises: LoadtestError, of the target; GeneratorLost.
    """

    async def load(self, job: LoadJob, *, stop: asyncio.Event, on_progress: Callable[[Progress], None] | None = None) -> Loaded:
        """stop: set it to end early; what was measured counts. on_progress: told about twice a second."""
        ...

    async def profile(self, job: ProfileJob) -> ProfileFound:
        """Raises: ProfileFailed."""
        ...

    async def answers(self, job: AnswersJob) -> list[Tensors | None]:
        """As `loadtest.lab.answers.answers_of`."""
        ...

    async def limit_rps(self, protocol: Protocol) -> float:
        """The rate that it can offer honestly."""
        ...
