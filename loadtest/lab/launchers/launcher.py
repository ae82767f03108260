"""What it takes that a candidate runs and can be measured: the protocol of every launcher."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from loadtest.errors import LoadtestError
from loadtest.lab.generating import Generating
from loadtest.lab.launchers.aws.latencies import PlatformLatency, Window
from loadtest.prices.purse import Purse
from loadtest.question.candidates import CandidateSetup
from loadtest.question.preflight import Refusals

GENERATOR: Final = "generator"  # of a start's names, and in the purse: what costs beside_usd_per_hour


class StartFailed(LoadtestError):
    """The candidate did not come up; the message says what it last wrote. The search goes on without it."""


class Unaffordable(StartFailed):
    """What is left of the money does not pay for its start."""


class TakenAway(LoadtestError):
    """The platform took the candidate's machine back, as it may with spare capacity: what was measured on it meanwhile is
    spoilt, and another may be had."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the last look, of what the candidate may use: 100 is all of it. None: cannot be seen from here."""

    cpu_percent: float | None = None
    memory_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Quota:
    """What all candidates together may take of something. takes: of it, one candidate."""

    name: str
    most: float
    takes: float


class RunningCandidate(Protocol):
    """A candidate that answers requests.

    rest: base address (`http://host:port`). grpc: `host:port`, or `grpcs://host:port`; "" if it has none.
    invocations: the URL of one that takes nothing else; "" of all others. sigv4: for which region of AWS its requests are
    signed; "" if they are not. name: what AWS calls it.
    """

    rest: str
    grpc: str
    invocations: str
    sigv4: str
    name: str

    def failure(self) -> str:
        """Why it no longer runs; "" while it does."""
        ...

    async def look(self) -> None:
        """See whether it still runs, as far as its platform tells: `failure` says what was found. Raises: TakenAway."""
        ...

    def usage(self) -> Usage: ...

    async def stop(self) -> None:
        """End everything that was started for it, and wait for that. A second call does nothing."""
        ...


class Launcher(Protocol):
    """Starts candidates.

    paid: each started candidate costs its price per hour, so that nothing is started without a limit in dollars.
    start_s: how long a start usually takes, for the plan. parallel: how many may be up at once. purse: what those that are paid
    for cost. left_behind: what could not be removed. run_id, reaped_by: what all that is paid for is tagged with, and the
    command that removes it; "", where nothing is.
    generating: from where candidates are loaded; None: from this process. beside_usd_per_hour: what costs so much beside those
    that are up, whoever they are.
    """

    paid: bool
    start_s: float
    parallel: int
    purse: Purse
    left_behind: list[str]
    beside_usd_per_hour: float

    @property
    def generating(self) -> Generating | None: ...

    @property
    def run_id(self) -> str: ...

    @property
    def reaped_by(self) -> str: ...

    def preflight(self, candidates: Sequence[CandidateSetup]) -> Refusals:
        """What cannot work, by the candidate's name, before anything is started. Raises: UsageError, if it is the spec."""
        ...

    def admit(self) -> None:
        """See that what is paid for can be begun. Raises: LoadtestError, with what lacks; nothing was made."""
        ...

    def quota(self, candidate: CandidateSetup) -> Quota | None:
        """Of the account, as far as `preflight` has seen it; None: nothing is known to hold it back."""
        ...

    async def latencies(self, windows: Sequence[Window]) -> list[PlatformLatency | None]:
        """What the platform measured itself, of each; None, where it has no figures."""
        ...

    async def start(self, candidate: CandidateSetup) -> RunningCandidate:
        """Start and wait until it is ready, within a bounded time.

        Raises: StartFailed, TakenAway; nothing of it is then left running.
        """
        ...

    async def close(self) -> None:
        """End what its candidates share, once none is up. A second call does nothing."""
        ...


class Unpaid:
    """What launchers have in common where nobody pays for a candidate: one is up at a time, and nothing is shared or left."""

    paid = False
    parallel = 1
    purse = Purse()
    left_behind: list[str] = []  # noqa: RUF012  # nothing ever is
    run_id = reaped_by = ""
    generating = None
    beside_usd_per_hour = 0.0

    def admit(self) -> None:
        return

    def quota(self, candidate: CandidateSetup) -> Quota | None:
        return None

    async def close(self) -> None:
        """Its candidates share nothing."""

    async def latencies(self, windows: Sequence[Window]) -> list[PlatformLatency | None]:
        return [None] * len(windows)
