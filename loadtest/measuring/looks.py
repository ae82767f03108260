"""Looks whether a run has decided its SLO, in a process of its own (`python -m loadtest.measuring.looks LOG RECORDING`).

A look goes through all requests so far: 10 to 120 ms of CPU time. The process that sends must not stop for so long, and it is
scheduled before all others: it would keep a core from the server as well. This one gives way to all. The conversation:

    stdin   4 bytes length, the `LookingJob` (msgpack) · then questions, a line each: `Look`, in JSON · end of file: end
    stdout  one line: "ready" · for each question a line: true or false

LOG and RECORDING are open files: the log's table, shared with whoever sends, and what the hiccup meter writes, or -1.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

import msgspec

from loadtest.load.request_log import RequestLog
from loadtest.measuring import children
from loadtest.measuring.machine import RecordingFile
from loadtest.results import LoadSpec
from loadtest.verdict.analysis import decided
from loadtest.verdict.blocks import Grid

_READY_S: Final = 5.0
_NICE: Final = 10
_SIZE_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class LookingJob:
    """size: of the log. cores: of candidate and generator, as recorded; None: nothing is. or_lost: as for `decided`."""

    spec: LoadSpec
    grid: Grid
    size: int
    cores: tuple[tuple[int, ...], tuple[int, ...]] | None
    or_lost: bool


@dataclass(frozen=True, slots=True)
class Look:
    """Of the first so many blocks, all of whose requests are done. start_ns: of the run, by the machine's monotonic clock."""

    blocks: int
    confidence: float
    start_ns: int


class Looker:
    """The process, as a context: it starts when that is entered, and `prepare` waits until it has. One question at a time.

    Where it cannot be had, or is lost, nothing is ever decided, and the run lasts as long as it may.
    """

    def __init__(self, log: int, recording: int) -> None:
        """File descriptors, as in the module's text."""
        self._files = log, recording
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def __repr__(self) -> str:
        return f"<Looker, pid {self.pid}>"

    async def __aenter__(self) -> Self:
        with contextlib.suppress(OSError):
            # As a session of its own it is scheduled as a group of its own.
            command = (sys.executable, "-m", "loadtest.measuring.looks", *map(str, self._files))
            self._process = await children.begin(*command, pass_fds=tuple(number for number in self._files if number >= 0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._process is not None:
            await children.end(self._process)  # it keeps nothing

    async def prepare(self, job: LookingJob) -> None:
        """Say what it will be asked about, and wait until it is ready, for a few seconds at most."""
        packed = msgspec.msgpack.encode(job)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                self._ready = await self._said(len(packed).to_bytes(_SIZE_BYTES, "little") + packed) == b"ready\n"

    async def decided(self, question: Look) -> bool:
        """Whether they decide the SLO; False, too, where nobody can tell. Takes as long as there is no time for it."""
        return self._ready and await self._said(msgspec.json.encode(question) + b"\n") == b"true\n"

    async def _said(self, asked: bytes) -> bytes:
        """Its next line; empty, if it has ended."""
        process = self._process
        if process is None:
            return b""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(asked)
        return await process.stdout.readline()


def _answer(job: LookingJob, log_fd: int, record_fd: int, questions: BinaryIO, answers: BinaryIO) -> None:
    log = RequestLog(job.size, log_fd)
    record = RecordingFile(record_fd, *job.cores) if job.cores is not None else None
    answers.write(b"ready\n")
    answers.flush()
    for line in questions:
        asked = msgspec.json.decode(line, type=Look)
        recording = record.recording(asked.start_ns) if record is not None else None
        found = decided(job.spec, log, job.grid, asked.blocks, asked.confidence, recording, or_lost=job.or_lost)
        answers.write(msgspec.json.encode(found) + b"\n")
        answers.flush()


def _give_way() -> None:
    """To whatever else runs here, as far as can be had."""
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # Linux, where each session is scheduled as a group: niceness counts within it only
        Path("/proc/self/autogroup").write_text(str(_NICE))


def main(argv: Sequence[str]) -> None:
    _give_way()
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    packed = questions.read(int.from_bytes(questions.read(_SIZE_BYTES), "little"))
    if not packed:
        return  # the generator has ended, or has no need of it
    try:
        _answer(msgspec.msgpack.decode(packed, type=LookingJob), int(argv[0]), int(argv[1]), questions, answers)
    except BrokenPipeError:  # the generator has ended meanwhile; at exit Python would complain of what it cannot flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
