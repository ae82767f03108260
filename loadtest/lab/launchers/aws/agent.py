"""The load generator on a machine of its own: does the jobs that it finds in a bucket, each once, and puts back what it found.

It is told nothing else, and nobody reaches it. A job runs in a process of its own, at most as long as it may, before everything
else while it sends; meanwhile this one passes its progress on and looks whether it is to end. A job that it finds begun is not
begun again: it may have loaded somebody. Life: `serve`, until `most_s` have passed.
"""

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.process.console import words
from loadtest.errors import LoadtestError, UsageError
from loadtest.lab.jobs import Order, moved, read, told_error, told_lost, written
from loadtest.lab.launchers.aws.door import Aws, AwsRefused
from loadtest.lab.launchers.aws.post import STOP, Post
from loadtest.measuring import children

_POLL_S: Final = 1.0
_END_S: Final = 5.0  # of a job's process that was told to end
_TAKEN: Final = "PreconditionFailed"


@dataclass(slots=True, eq=False)
class _Working:
    """A job's process, which is read from at once. outcome: what it told at last."""

    process: asyncio.subprocess.Process
    progress: bytes = b""
    outcome: bytes = b""
    stopped: bool = False
    reading: "asyncio.Task[None]" = field(init=False)

    def __post_init__(self) -> None:
        self.reading = asyncio.create_task(self.read())

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            told: dict[str, msgspec.Raw] = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            self.progress = bytes(told.get("progress", self.progress))
            self.outcome = bytes(told.get("outcome", self.outcome))


class Agent:
    """aws: the door to the bucket. tagging: of what it puts there, as S3 takes it. command: of a job's process."""

    def __init__(
        self,
        aws: Aws,
        post: Post,
        *,
        tagging: str = "",
        poll_s: float = _POLL_S,
        command: tuple[str, ...] = (sys.executable, "-m", "loadtest.lab.job_process"),
    ) -> None:
        self._aws = aws
        self._post = post
        self._tagging = tagging
        self._poll_s = poll_s
        self._command = command
        self._next = 1

    def __repr__(self) -> str:
        return f"<Agent at s3://{self._post.bucket}/{self._post.base}, next is job {self._next}>"

    async def serve(self, most_s: float) -> None:
        """Raises: AwsRefused, if the bucket cannot be asked."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._put(self._post.ready, b"")
                while True:
                    text = await self._got(self._post.job(self._next))
                    if text is None:
                        await self._aws.pause(self._poll_s)
                        continue
                    await self._answer(self._next, text)
                    self._next += 1

    async def _answer(self, number: int, text: bytes) -> None:
        if not await self._take(number):
            if await self._got(self._post.result(number)) is None:
                await self._put(self._post.result(number), told_lost("it ended while it was at this job"))
            return
        words.info("job %d", number)
        try:
            order = read(text)
            with tempfile.TemporaryDirectory(prefix="loadtest-job-") as folder:
                outcome = await self._done(number, await self._with_files(order, Path(folder)))
        except UsageError as exc:
            outcome = told_error(exc)
        await self._put(self._post.result(number), outcome)

    async def _take(self, number: int) -> bool:
        """Whether it is ours to begin."""
        try:
            await self._put(self._post.taken(number), b"", IfNoneMatch="*")
        except AwsRefused as exc:
            if exc.code == _TAKEN:
                return False
            raise
        return True

    async def _with_files(self, order: Order, folder: Path) -> Order:
        """The order with its files in a folder here, in the order in which they were."""
        places: dict[str, list[str]] = {}
        for name, keys in order.files.items():
            for key in keys:
                path = folder / f"{sum(map(len, places.values())):06}-{Path(key).name}"
                path.write_bytes(await self._got(key) or b"")
                places.setdefault(name, []).append(str(path))
        return replace(order, job=moved(order.job, places), files={})

    async def _done(self, number: int, order: Order) -> bytes:
        process = await children.begin(*self._command, limit=1 << 28)
        working = _Working(process)
        try:
            assert process.stdin is not None
            process.stdin.write(written(order) + b"\n")
            async with asyncio.timeout(order.most_s):
                while not working.reading.done():
                    await self._pass_on(number, working)
                    await asyncio.wait((working.reading,), timeout=self._poll_s)
                await working.reading
            code = await process.wait()
        except TimeoutError:
            return told_lost(f"the job did not end within {order.most_s:g} s")
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            return told_lost(f"the job's process told no JSON: {exc}")
        finally:
            await _ended(working)
        return working.outcome or told_lost(f"the job's process ended with code {code} before it told anything")

    async def _pass_on(self, number: int, working: _Working) -> None:
        """Its progress to the bucket, and a wish to end to it."""
        if working.progress:
            told, working.progress = working.progress, b""
            await self._put(self._post.progress(number), told)
        if not working.stopped and (wish := await self._got(self._post.stops(number))) is not None:
            working.stopped = True
            if wish == STOP:
                assert working.process.stdin is not None
                working.process.stdin.write(b"stop\n")
            else:
                working.process.kill()

    async def _got(self, key: str) -> bytes | None:
        return await self._aws.read(self._post.bucket, key)

    async def _put(self, key: str, body: bytes, **options: Any) -> None:
        tagged: Mapping[str, Any] = {"Tagging": self._tagging} if self._tagging else {}
        await self._aws.change("s3", "put_object", Bucket=self._post.bucket, Key=key, Body=body, **tagged, **options)


async def _ended(working: _Working) -> None:
    reading = working.reading
    reading.cancel()  # at once: two cannot read its output, and it ends once that is read
    with suppress(ProcessLookupError):
        working.process.terminate()
    await children.end(working.process, within_s=_END_S)
    with suppress(asyncio.CancelledError, LoadtestError, msgspec.MsgspecError, UnicodeDecodeError):
        await reading
