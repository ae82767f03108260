"""One job of a load generator in a process of its own, so that nothing else of the generator's runs beside what is sent.

    python -m loadtest.lab.job_process

The job comes as the first line of standard input; a second line, or its end, stops it early. Standard output gets lines of
JSON: {"progress": …} about twice a second, and {"outcome": …} at last.
"""

import asyncio
import os
import sys
from typing import Final

import msgspec

from loadtest.errors import LoadtestError
from loadtest.lab.generating import LoadJob
from loadtest.lab.here import Here
from loadtest.lab.jobs import done, read, told_error, told_value
from loadtest.lab.profiling import ProfileFailed
from loadtest.measuring.generator import measure
from loadtest.measuring.progress import Progress

_OUTPUT: Final = 1


def _tell(kind: str, content: bytes) -> None:
    line = memoryview(msgspec.json.encode({kind: msgspec.Raw(content)}) + b"\n")
    while line:
        line = line[os.write(_OUTPUT, line) :]


async def _work() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    stop = asyncio.Event()

    async def listen() -> None:
        await reader.readline()
        stop.set()

    def on_progress(progress: Progress) -> None:
        _tell("progress", msgspec.json.encode(progress))

    try:
        job = read(await reader.readline()).job
        listening = asyncio.create_task(listen())
        options = {"stop": stop, "on_progress": on_progress} if isinstance(job, LoadJob) else {}
        try:
            outcome = told_value(await done(job, Here(measure), **options))
        finally:
            listening.cancel()
    except (LoadtestError, ProfileFailed) as exc:
        outcome = told_error(exc)
    _tell("outcome", outcome)


def main() -> None:
    import uvloop

    uvloop.run(_work())


if __name__ == "__main__":
    main()
