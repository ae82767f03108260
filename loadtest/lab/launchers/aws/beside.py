"""A load generator elsewhere, as the lab sees it: jobs go into the bucket, and what they came to comes back by it."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from backends.base import Tensors
from gateway.deploying.calls import FromFile
from loadtest.lab.generating import AnswersJob, GeneratorLost, Loaded, LoadJob, ProfileFound, ProfileJob
from loadtest.lab.jobs import Job, LimitJob, Order, files_of, progress, value, written
from loadtest.lab.launchers.aws.door import Aws, AwsRefused, seen_through
from loadtest.lab.launchers.aws.post import DROP, STOP, Post
from loadtest.load.payloads import paths_of
from loadtest.measuring.generator_limit import LEAST_LIMIT_RPS
from loadtest.measuring.progress import Progress
from loadtest.results import Protocol

_POLL_S: Final = 1.0
_OVER_S: Final = 60.0  # beyond what was asked for: questions before it, what the end of a run takes
_PROFILE_TIMES: Final = 8  # what it was given: visits of slow servers are repeated
_POST_S: Final = 60.0  # until a job is begun, and its result is seen
_LOOK_POLLS: Final = 15  # between two looks whether the generator is there


class Beside:
    """tagging: of what is put into the bucket. up: whether the generator waits for jobs. look: raises GeneratorLost, if it does
    not any more.
    """

    def __init__(
        self, aws: Aws, post: Post, *, tagging: str, up: Callable[[], bool], look: Callable[[], Awaitable[None]]
    ) -> None:
        self._aws = aws
        self._post = post
        self._tagging = tagging
        self._up = up
        self._look = look
        self._number = 0
        self._sent: dict[str, tuple[str, ...]] = {}  # files and folders -> their keys
        self._limits: dict[Protocol, float] = {}

    def __repr__(self) -> str:
        return f"<Beside s3://{self._post.bucket}/{self._post.base}, {self._number} jobs so far>"

    async def load(self, job: LoadJob, *, stop: asyncio.Event, on_progress: Callable[[Progress], None] | None = None) -> Loaded:
        most_s = job.spec.duration_s + job.spec.timeout_s + _OVER_S
        found: Loaded = await self._done(job, most_s, stop=stop, on_progress=on_progress)
        return found

    async def profile(self, job: ProfileJob) -> ProfileFound:
        found: ProfileFound = await self._done(job, _PROFILE_TIMES * job.seconds + _OVER_S)
        return found

    async def answers(self, job: AnswersJob) -> list[Tensors | None]:
        found: list[Tensors | None] = await self._done(job, job.seconds + _OVER_S)
        return found

    async def limit_rps(self, protocol: Protocol) -> float:
        """The least that any machine can, while it is not there: a search that goes on from its journal asks before."""
        if protocol not in self._limits:
            if not self._up():
                return LEAST_LIMIT_RPS
            self._limits[protocol] = await self._done(LimitJob(protocol), _OVER_S)
        return self._limits[protocol]

    async def _done(
        self,
        job: Job,
        most_s: float,
        *,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Any:
        files = {name: await self._put_files(name) for name in files_of(job)}
        self._number += 1
        number = self._number
        await self._put(self._post.job(number), written(Order(job, most_s, files, self._tagging)))
        try:
            told = await self._awaited(number, most_s + _POST_S, stop, on_progress)
        except BaseException:
            with suppress(GeneratorLost):  # it ends by itself as well
                await seen_through(self._put(self._post.stops(number), DROP))
            raise
        return value(told, job)

    async def _awaited(
        self, number: int, most_s: float, stop: asyncio.Event | None, on_progress: Callable[[Progress], None] | None
    ) -> bytes:
        """What came back. Raises: GeneratorLost."""
        asked, shown = False, b""
        for poll in range(1, int(most_s / _POLL_S) + 1):
            if (told := await self._got(self._post.result(number))) is not None:
                return told
            if stop is not None and stop.is_set() and not asked:
                asked = True
                await self._put(self._post.stops(number), STOP)
            if on_progress is not None and (new := await self._got(self._post.progress(number))) and new != shown:
                shown = new
                if (how := progress(new)) is not None:
                    on_progress(how)
            if not poll % _LOOK_POLLS:
                await self._look()
            await self._aws.pause(_POLL_S)
        raise GeneratorLost(f"the load generator did not answer within {most_s:g} s")

    async def _put_files(self, name: str) -> tuple[str, ...]:
        """The keys of a file, or of those in a folder; each is put there once."""
        if name not in self._sent:
            keys = []
            for path in paths_of((name,)):
                body = await asyncio.to_thread(path.read_bytes)
                keys.append(self._post.file(hashlib.sha256(body).hexdigest(), path.name))
                await self._put(keys[-1], FromFile(path, len(body)))
            self._sent[name] = tuple(keys)
        return self._sent[name]

    async def _got(self, key: str) -> bytes | None:
        try:
            return await self._aws.read(self._post.bucket, key)
        except AwsRefused as exc:
            raise GeneratorLost(f"what the load generator tells cannot be read: {exc}") from exc

    async def _put(self, key: str, body: bytes | FromFile) -> None:
        try:
            await self._aws.change("s3", "put_object", Bucket=self._post.bucket, Key=key, Body=body, Tagging=self._tagging)
        except AwsRefused as exc:
            raise GeneratorLost(f"the load generator cannot be told what to do: {exc}") from exc
