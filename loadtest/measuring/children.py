"""Processes beside a measurement: each begun and ended with all that asyncio keeps of it, also where that is cancelled.

asyncio closes that once it has heard of the end of the process and of that of its output. `wait` returns at the first: an event
loop that closes then leaves the rest open, and so does one whose caller is cancelled while a process begins.
"""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any


async def begin(*command: str, **options: Any) -> Process:
    """As `create_subprocess_exec`, by pipes if nothing else is said; `end` is to be called. Cancelled: there is no process.

    In a session of its own: the terminal's Ctrl-C is for us, who then end it in order, with what it started. Raises: OSError.
    """
    options = {"stdin": PIPE, "stdout": PIPE, "start_new_session": True} | options
    beginning = asyncio.create_task(asyncio.create_subprocess_exec(*command, **options))
    try:
        await _until_done(beginning)
    except asyncio.CancelledError:
        if beginning.exception() is None:
            await end(beginning.result())
        raise
    return beginning.result()


async def end(process: Process, *, within_s: float = 0.0) -> None:
    """Close its input, and return when it has ended, also if cancelled meanwhile. What has not within within_s is killed.

    So is what it started and left, unless it had ended before and nothing holds its output. A second call does nothing.
    """
    await _until_done(asyncio.create_task(_end(process, within_s)))


async def _end(process: Process, within_s: float) -> None:
    outputs = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    gone = process.returncode is not None and all(stream.at_eof() for stream in outputs)
    if process.stdin is not None:
        process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await process.communicate()
    if not gone:  # else its pid may be another's
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session made its pid the group's id
    await process.communicate()


async def _until_done(task: "asyncio.Task[Any]") -> None:
    """Raises: CancelledError, once it is done; what it raised is left to be asked of it."""
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
