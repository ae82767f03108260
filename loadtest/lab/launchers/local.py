"""Candidates on this machine: one gateway each, in processes of its own, pinned to cores, gone when it is stopped."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil
import yaml

from loadtest.errors import UsageError
from loadtest.lab.launchers.launcher import StartFailed, Unpaid, Usage
from loadtest.measuring import children
from loadtest.question.candidates import CandidateSetup
from loadtest.question.preflight import Refusals

_STOP_TIMEOUT_S: Final = 15.0
# Anywhere in what was printed: a model may have left a line open before it.
READY: Final = re.compile(rb"gateway ready((?: \w+=\S+)+)\n")
_READY_BYTES: Final = 512  # at most, its addresses included

# Run before the gateway in its own process: pin and be nice before any thread exists, and die with this process (prctl 1 is
# PR_SET_PDEATHSIG), so that nothing is left behind even if the load test is killed.
_ENTER: Final = """
import ctypes, os, sys
cpus, nice, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, 15)
if cpus:
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
os.nice(int(nice))
os.execv(command[0], command)
"""


class Local(Unpaid):
    """Starts `gateway serve --no-ray` per candidate.

    While one is pinned, this process, which generates the load, keeps to the cores that are left, if any are, and goes before
    everything else where that is allowed.
    gateway: another command to run instead, which prints the same ready line.
    """

    start_s = 8.0

    def __init__(self, *, start_timeout_s: float, nice: int = 0, gateway: Sequence[str] = ()) -> None:
        self._start_timeout_s = start_timeout_s
        self._nice = nice
        self._gateway = tuple(gateway) or (sys.executable, "-m", "gateway.cli", "serve", "--no-ray")

    def preflight(self, candidates: Sequence[CandidateSetup]) -> Refusals:
        here = os.sched_getaffinity(0)
        for candidate in candidates:
            if missing := sorted(set(candidate.cpus) - here):
                raise UsageError(f"{candidate.name}: cores {missing} are not there: this machine has {sorted(here)}")
        return {}

    async def start(self, candidate: CandidateSetup) -> "RunningLocal":
        folder = tempfile.TemporaryDirectory(prefix="loadtest-")
        config, errors = Path(folder.name) / "gateway.yaml", Path(folder.name) / "stderr"
        config.write_text(yaml.safe_dump(candidate.document, sort_keys=False))
        enter = (sys.executable, "-c", _ENTER, ",".join(map(str, candidate.cpus)), str(self._nice))
        command = (*self._gateway, str(config), "--http-port", "0", "--grpc-port", "0")
        try:
            with errors.open("wb") as stderr:
                process = await children.begin(*enter, *command, stdin=asyncio.subprocess.DEVNULL, stderr=stderr)
        except BaseException:
            folder.cleanup()
            raise
        running = RunningLocal(process, candidate, errors, folder)
        running.favour_generator()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await running.wait_ready()
        except BaseException as exc:
            last_words = running.last_words()
            await running.stop()
            if isinstance(exc, TimeoutError):
                raise StartFailed(f"not ready within {self._start_timeout_s:g} s{last_words}") from exc
            raise
        return running


class RunningLocal:
    """A gateway process and what it started."""

    rest = grpc = invocations = sigv4 = name = ""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        candidate: CandidateSetup,
        errors: Path,
        folder: "tempfile.TemporaryDirectory[str]",
    ) -> None:
        self._process = process
        self._tls = bool(candidate.document.get("server", {}).get("tls"))
        self._errors = errors
        self._folder = folder
        self._pinned = set(candidate.cpus)
        self._own_cores = os.sched_getaffinity(0)
        self._cores = len(self._pinned or self._own_cores)
        self._own_policy = os.sched_getscheduler(0), os.sched_getparam(0)
        self._stopped = False
        self._drained: asyncio.Task[None] | None = None
        self._cpu_s = 0.0
        self._looked_s = time.monotonic()

    def __repr__(self) -> str:
        return f"<RunningLocal pid {self._process.pid} at {self.rest or 'no address yet'}>"

    def favour_generator(self) -> None:
        """Move the calling thread off the candidate's cores, and before all others where allowed; `stop` undoes both."""
        if self._pinned and (rest := self._own_cores - self._pinned):
            os.sched_setaffinity(0, rest)
        with contextlib.suppress(PermissionError):  # only root may; the candidate's own niceness must do then
            # Real time: it stands for another machine, and must send when it is time whatever else runs here. Threads and
            # processes that it starts are ordinary ones again.
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))

    async def wait_ready(self) -> None:
        """Read as far as the ready line. Raises: StartFailed, if the process ends before it."""
        assert self._process.stdout is not None
        said = b""
        while piece := await self._process.stdout.read(1 << 16):
            said += piece
            if found := READY.search(said):
                addresses = dict(part.split("=", 1) for part in found[1].decode().split())
                self.rest = f"http{'s' * self._tls}://{addresses['http']}"
                self.grpc = addresses.get("grpc", "")
                if self._tls and self.grpc:
                    self.grpc = f"grpcs://{self.grpc}"
                self.usage()
                self._drained = asyncio.create_task(_drained(self._process.stdout))
                return
            said = said[-_READY_BYTES:]
        code = await self._process.wait()
        raise StartFailed(f"ended with code {code} before it was ready{self.last_words()}")

    def last_words(self) -> str:
        """The last lines it wrote to standard error, as the end of a message."""
        lines = self._errors.read_text(errors="replace").strip().splitlines() if self._errors.exists() else []
        return f": {' / '.join(lines[-3:])}" if lines else ""

    def failure(self) -> str:
        if self._process.returncode is None:
            return ""
        return f"ended with code {self._process.returncode} while it was measured{self.last_words()}"

    async def look(self) -> None:
        """What ends it shows without."""

    def usage(self) -> Usage:
        try:
            root = psutil.Process(self._process.pid)
            family = [root, *root.children(recursive=True)]
            cpu_s = sum(sum(process.cpu_times()[:2]) for process in family)
            memory = sum(process.memory_info().rss for process in family)
        except psutil.NoSuchProcess:
            return Usage()
        now_s = time.monotonic()
        busy = (cpu_s - self._cpu_s) / max(1e-9, now_s - self._looked_s) / self._cores
        self._cpu_s, self._looked_s = cpu_s, now_s
        return Usage(100 * busy, 100 * memory / psutil.virtual_memory().total)

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            if self._drained is not None:
                # `end` reads what is left. It is not waited for: an interrupt meanwhile would let the process run on.
                self._drained.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)  # all that it started; its session made its pid the group's id
            await children.end(self._process, within_s=_STOP_TIMEOUT_S)
        finally:
            os.sched_setaffinity(0, self._own_cores)
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(0, *self._own_policy)
            self._folder.cleanup()


async def _drained(output: asyncio.StreamReader) -> None:
    """Read what a model prints, and drop it: a pipe that nobody reads holds up whoever writes to it."""
    while await output.read(1 << 16):
        pass
