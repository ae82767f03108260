"""The one place where a load test waits: it sends what the schedule says and counts what comes back."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadtest.results import LoadSpec, RunResult


@dataclass(frozen=True, slots=True)
class Progress:
    """The last second or so, for a live display. elapsed_s: since the first intended send."""

    elapsed_s: float
    sent: int
    succeeded: int
    failed: int
    rate_rps: float
    p50_ms: float
    p99_ms: float


async def measure(
    spec: LoadSpec,
    *,
    until_decided: bool = False,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    log: Path | None = None,
) -> RunResult:
    """Run one load test, from first to last answer, and judge it.

    until_decided: end as soon as a sequential test on the blocks decides the SLO; `spec.duration_s` is the bound.
    stop: set it to end now; the result is then marked partial.
    log: where to write every request (CSV: intended, sent, done, status).
    A target that is down or fails gives a result full of errors, not an exception.
    Raises: UsageError (the spec), TargetError (metadata needed for synthetic payloads cannot be had).
    """
    raise NotImplementedError
