"""What it takes that a candidate runs and can be measured: the protocol of every launcher."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from loadtest.errors import LoadtestError
from loadtest.question.candidates import CandidateSetup


class StartFailed(LoadtestError):
    """The candidate did not come up; the message says what it last wrote. The search goes on without it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the last look, of what the candidate may use: 100 is all of it. None: cannot be seen from here."""

    cpu_percent: float | None = None
    memory_percent: float | None = None


class RunningCandidate(Protocol):
    """A candidate that answers requests.

    rest: base address (`http://host:port`). grpc: `host:port`, or `grpcs://host:port`; "" if it has none.
    """

    rest: str
    grpc: str

    def failure(self) -> str:
        """Why it no longer runs; "" while it does."""
        ...

    def usage(self) -> Usage: ...

    async def stop(self) -> None:
        """End everything that was started for it, and wait for that. A second call does nothing."""
        ...


class Launcher(Protocol):
    """Starts candidates, one at a time.

    paid: each started candidate costs its price per hour, so that nothing is started without a limit in dollars.
    start_s: how long a start usually takes, for the plan.
    """

    paid: bool
    start_s: float

    def preflight(self, candidates: Sequence[CandidateSetup]) -> None:
        """Refuse what cannot work (quota, contract, missing cores) before anything is started. Raises: UsageError."""
        ...

    async def start(self, candidate: CandidateSetup) -> RunningCandidate:
        """Start and wait until it is ready, within a bounded time. Raises: StartFailed; nothing of it is then left running."""
        ...
