"""Load from this process: what `loadtest recommend` does on its own machine, and a generator on EC2 on its."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from backends.base import Tensors
from gateway.process.credentials import NOTHING_SHOWN, Credentials
from loadtest.errors import LoadtestError
from loadtest.lab.answers import answers_of, spread
from loadtest.lab.generating import AnswersJob, Loaded, LoadJob, ProfileFound, ProfileJob
from loadtest.lab.launchers.url import get_json
from loadtest.lab.profiling import BatchStatistics, batch_statistics, profile
from loadtest.load.payloads import distinct, read_requests
from loadtest.load.target import Address
from loadtest.measuring.generator_limit import generator_limit_rps
from loadtest.measuring.machine import Meter
from loadtest.measuring.progress import Progress
from loadtest.results import Protocol, RunResult
from loadtest.verdict.stalls import others_share

Measure = Callable[..., Awaitable[RunResult]]
_NO_STATISTICS: Final = BatchStatistics({})


class Here:
    """measure: `loadtest.measuring.generator.measure`. shown: to candidates whose doors are locked, besides by measure."""

    def __init__(self, measure: Measure, shown: Credentials = NOTHING_SHOWN) -> None:
        self._measure = measure
        self._shown = shown

    async def load(self, job: LoadJob, *, stop: asyncio.Event, on_progress: Callable[[Progress], None] | None = None) -> Loaded:
        before = await self._executed(job.statistics, job.spec.model)
        shown = {} if on_progress is None else {"on_progress": on_progress}
        result = await self._measure(job.spec, until_decided=job.until_decided, or_lost=job.or_lost, stop=stop, **shown)
        after = await self._executed(job.statistics, job.spec.model)
        return Loaded(result, after.since(before))

    async def profile(self, job: ProfileJob) -> ProfileFound:
        address = Address.of(job.spec, self._shown)
        async with Meter(address.host, address.port, wanted=job.meter) as meter:
            began_ns = time.monotonic_ns()
            found = await profile(
                job.spec,
                rows=job.rows,
                sessions=job.sessions,
                seconds=job.seconds,
                limit_ms=job.limit_ms,
                measure=self._measure,
                look=partial(self._executed, job.statistics, job.spec.model),
                lengths=job.lengths,
                simulated=job.simulated,
            )
            recording = meter.recording(began_ns)
        return ProfileFound(found, None if recording is None else others_share(recording))

    async def answers(self, job: AnswersJob) -> list[Tensors | None]:
        requests = spread(distinct(await asyncio.to_thread(read_requests, job.files)))
        address = Address.of(job.spec, self._shown)
        stop = threading.Event()
        try:
            return await asyncio.to_thread(
                answers_of, job.spec, address, job.spec.model, requests, seconds=job.seconds, stop=stop
            )
        finally:
            stop.set()  # who is cancelled does not wait for the rest

    async def limit_rps(self, protocol: Protocol) -> float:
        return await generator_limit_rps(protocol)

    async def _executed(self, statistics: str, model: str) -> BatchStatistics:
        """What the server's batches took so far."""
        if not statistics:
            return _NO_STATISTICS
        try:
            return batch_statistics(await asyncio.to_thread(get_json, f"{statistics}/v2/models/{model}/stats", self._shown))
        except LoadtestError:
            return _NO_STATISTICS
