"""The one place where a load test waits: it sends what the schedule says and counts what comes back.

One process sends from the caller's own event loop; several are subprocesses (`loadtest.worker`) that share the log's memory,
so that everything is seen here while it happens, and nothing has to be merged afterwards.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

import msgspec
import numpy as np

from loadtest import payloads, target, verdict
from loadtest.analysis import LAG_SHARE, MIN_BLOCKS, Ended, Grid, decided, summarise
from loadtest.errors import LoadtestError, UsageError
from loadtest.patterns import MAX_REQUESTS, Schedule, payload_choice, schedule
from loadtest.recorder import CUT, OK, PENDING, RequestLog, write_csv
from loadtest.results import LoadSpec, RunResult
from loadtest.statistics import percentiles
from loadtest.worker import Job, Report, Sender

_LEAD_NS: Final = 50_000_000  # between "all are ready" and the first intended send
_CLOSED_LOOP_ROWS_PER_S: Final = 50_000  # more than one process can send
_SPIN_BELOW_MS: Final = 0.1  # a lag limit that the timer alone does not keep
_SPIN_NS: Final = 50_000
_WATCH_S: Final = 0.5
_FOLLOW_ROWS: Final = 200_000  # looked at in one go: more are not sent in between
_WORKER_READY_S: Final = 30.0
# A sequential test looks after 20 blocks and then after each 30 % more. Ten looks at most are paid for (Bonferroni).
_LOOK_GROWTH: Final = 1.3
_LOOKS: Final = 10


@dataclass(frozen=True, slots=True)
class Progress:
    """What has happened so far, for a live display; rate and percentiles are of about the last second."""

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
    on_progress: called about twice a second, on the event loop.
    log: where to write every request (CSV: intended, sent, done, status).
    A target that is down or fails gives a result full of errors, not an exception.
    Raises: UsageError (the spec), TargetError (metadata needed for synthetic payloads cannot be had).
    """
    check(spec)
    plan = schedule(spec.pattern, rate_rps=spec.rate_rps, duration_s=spec.duration_s, seed=spec.seed)
    address = target.Address.of(spec)
    model, requests = await asyncio.to_thread(_prepare, spec, address)
    before = await asyncio.to_thread(target.statistics, spec, address, model)
    stop = stop or asyncio.Event()
    run = _Run(spec, plan, address, requests, stop=stop, until_decided=until_decided, on_progress=on_progress)
    rows, reports, ended = await run.execute()
    after = await asyncio.to_thread(target.statistics, spec, address, model)
    result = summarise(spec, plan, run.log, rows, reports, ended, before, after)
    if log is not None:
        write_csv(log, run.log, used=rows)
    return result


def check(spec: LoadSpec) -> None:
    """Raises: UsageError, for a number that makes no sense. Asks nobody."""
    bounds = {
        "duration": (spec.duration_s, 0.1, 86_400),
        "connections": (spec.connections, 1, 60_000),
        "processes": (spec.processes, 1, 64),
        "timeout": (spec.timeout_s, 0.001, 3600),
        "rate": (spec.rate_rps, 0, 10_000_000),
        "seed": (spec.seed, 0, 1 << 62),
        "warmup": (spec.warmup_s or 0, 0, spec.duration_s),
    }
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise UsageError(f"--{name} {value:g}: expected {low:g} to {high:g}")
    for name, text in spec.headers:
        if not name.isprintable() or not text.isprintable() or not (name + text).isascii():
            raise UsageError(f"--header {name!r}: a header must be one line of ASCII")


def _prepare(spec: LoadSpec, address: target.Address) -> tuple[str, list[bytes]]:
    """The model's name and its encoded requests."""
    if spec.payloads:
        model = spec.model if spec.protocol == "invocations" else target.model_name(spec, address)
        return model, payloads.from_files(spec, address, model)
    if spec.protocol == "invocations":
        root = replace(address, path="")  # of the container, which may speak v2 beside SageMaker's contract
        model = target.model_name(spec, root)
        made = payloads.synthetic(spec, target.model_metadata(spec, root, model)["inputs"])
        return model, payloads.http_requests(spec, address, model, made)
    model = target.model_name(spec, address)
    made = payloads.synthetic(spec, target.model_metadata(spec, address, model).get("inputs", []))
    if spec.protocol == "grpc":
        return model, payloads.grpc_requests(spec, model, made)
    return model, payloads.http_requests(spec, address, model, made)


class _Run:
    """One execution: the log, the senders, and the watch over them."""

    def __init__(
        self,
        spec: LoadSpec,
        plan: Schedule,
        address: target.Address,
        requests: list[bytes],
        *,
        stop: asyncio.Event,
        until_decided: bool,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._spec = spec
        self._plan = plan
        self._address = address
        self._requests = requests
        self._on_progress = on_progress
        self._processes = min(spec.processes, plan.users or len(plan.intended_ns))
        self._until_decided = until_decided and spec.slo is not None and plan.stationary and not plan.users
        # per run, once started
        self.log: RequestLog
        self._start_ns = 0
        self._stop = stop
        self._halt = asyncio.Event()  # the user's stop, or a decision
        self._decided_ns = 0

    async def execute(self) -> tuple[np.ndarray, list[Report], Ended]:
        """Send everything. Gives the dispatched rows in order of their intended time."""
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        with tempfile.TemporaryFile() as file:
            jobs = self._lay_out(file)
            watch = asyncio.create_task(self._watch())
            stopped = asyncio.create_task(self._forward_stop())
            try:
                reports = await (self._send_here(jobs[0]) if len(jobs) == 1 else self._send_elsewhere(jobs, file.fileno()))
            finally:
                for task in (watch, stopped):
                    task.cancel()
                await asyncio.wait((watch, stopped))
        elapsed_ns = self._plan.duration_ns
        partial = False
        if self._decided_ns:
            elapsed_ns = self._decided_ns
        elif self._stop.is_set():
            stopped_ns = time.monotonic_ns() - self._start_ns
            partial = stopped_ns < elapsed_ns or bool(np.any(np.asarray(self.log.status) == CUT))
            elapsed_ns = max(1, min(elapsed_ns, stopped_ns))
        rows = np.flatnonzero(np.asarray(self.log.status) != PENDING)
        intended = np.asarray(self.log.intended)[rows]
        rows = rows[np.argsort(intended, kind="stable")] if self._plan.users else rows
        rows = rows[np.asarray(self.log.intended)[rows] < elapsed_ns]
        ended_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        return rows, reports, Ended(started_at, ended_at, elapsed_ns, partial)

    def _lay_out(self, file: IO[bytes]) -> list[Job]:
        """Make the log, fill in what is known before, and share the work out."""
        plan, spec, count = self._plan, self._spec, self._processes
        per_process = int(min(MAX_REQUESTS // count, plan.duration_ns / 1e9 * _CLOSED_LOOP_ROWS_PER_S))
        rows = per_process * count if plan.users else len(plan.intended_ns)
        self.log = RequestLog(rows) if count == 1 else RequestLog.shared(rows, file.fileno())
        if not plan.users:
            np.asarray(self.log.intended)[:] = plan.intended_ns
            np.asarray(self.log.payload)[:] = payload_choice(rows, len(self._requests), spec.seed)
        limit_ms = spec.slo.tightest_ms if spec.slo else None
        spin = limit_ms is not None and limit_ms * LAG_SHARE < _SPIN_BELOW_MS
        job = Job(
            grpc=spec.protocol == "grpc",
            host=self._address.host,
            port=self._address.port,
            tls=self._address.tls,
            requests=self._requests,
            metadata=[(name.lower(), value) for name, value in spec.headers],
            connections=spec.connections,
            timeout_ns=int(spec.timeout_s * 1e9),
            duration_ns=plan.duration_ns,
            spin_ns=_SPIN_NS if spin else 0,
            rate_rps=plan.rate_rps / count,
            rows=rows,
            first=0,
            step=count,
        )
        if not plan.users:
            return [replace(job, first=number) for number in range(count)]
        assert plan.think_ns is not None
        return [
            replace(
                job,
                first=per_process * number,
                rows=per_process * (number + 1),
                step=1,
                users=plan.users // count + (number < plan.users % count),
                think_ns=tuple(plan.think_ns[number::count].tolist()),
            )
            for number in range(count)
        ]

    async def _send_here(self, job: Job) -> list[Report]:
        sender = Sender(job, self.log)
        await sender.prepare()
        self._start_ns = time.monotonic_ns() + _LEAD_NS
        return [await sender.run(self._start_ns, self._halt)]

    async def _send_elsewhere(self, jobs: list[Job], fd: int) -> list[Report]:
        workers = [await self._spawn(fd) for _ in jobs]
        try:
            for worker, job in zip(workers, jobs, strict=True):
                packed = msgspec.msgpack.encode(job)
                _input(worker).write(len(packed).to_bytes(8, "little") + packed)
            async with asyncio.timeout(_WORKER_READY_S + self._spec.timeout_s):
                for worker in workers:
                    await _line(worker)
            self._start_ns = time.monotonic_ns() + _LEAD_NS
            for worker in workers:
                _input(worker).write(self._start_ns.to_bytes(8, "little"))
            closer = asyncio.create_task(self._close_inputs(workers))
            try:
                async with asyncio.timeout(self._plan.duration_ns / 1e9 + self._spec.timeout_s + _WORKER_READY_S):
                    lines = await asyncio.gather(*(_line(worker) for worker in workers))
            except TimeoutError as exc:
                raise LoadtestError("a sending process did not end after the last deadline") from exc
            finally:
                closer.cancel()
            return [msgspec.json.decode(line, type=Report) for line in lines]
        finally:
            for worker in workers:
                if worker.returncode is None:
                    worker.kill()  # its report is in, or it is of no use
                await worker.wait()

    async def _spawn(self, fd: int) -> asyncio.subprocess.Process:
        # A session of its own: the terminal's Ctrl-C is for us, who then end the worker in order.
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadtest.worker", str(fd),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=(fd,), start_new_session=True,
        )  # fmt: skip

    async def _close_inputs(self, workers: list[asyncio.subprocess.Process]) -> None:
        await self._halt.wait()
        for worker in workers:
            _input(worker).close()

    async def _forward_stop(self) -> None:
        await self._stop.wait()
        self._halt.set()

    # Watching.

    async def _watch(self) -> None:
        """Show progress and look whether the SLO is decided, twice a second."""
        grid = Grid.of(self._spec, self._plan.duration_ns, self._plan.rate_rps)
        next_look, looks = MIN_BLOCKS, 0
        follower = Follower(self.log, self._plan, self._processes)
        while True:
            await asyncio.sleep(_WATCH_S)
            elapsed_ns = time.monotonic_ns() - self._start_ns
            if not self._start_ns or elapsed_ns < 0:
                continue
            progress = follower.look(elapsed_ns)
            if self._on_progress is not None:
                self._on_progress(progress)
            if not self._until_decided or looks == _LOOKS:
                continue
            blocks = follower.settled_ns(elapsed_ns) // grid.block_ns
            if blocks < next_look:
                continue
            next_look, looks = int(blocks * _LOOK_GROWTH) + 1, looks + 1
            confidence = 1 - (1 - verdict.CONFIDENCE) / _LOOKS
            # Here and not in a thread: starting one waits for the scheduler, longer than this takes on a busy machine.
            if decided(self._spec, self.log, grid, blocks, confidence):
                self._decided_ns = blocks * grid.block_ns
                self._halt.set()
                return


class Follower:
    """Follows a log that is being written, looking at each row about once."""

    def __init__(self, log: RequestLog, plan: Schedule, processes: int) -> None:
        segments = processes if plan.users else 1
        size = log.rows // segments
        self._log = log
        self._closed = plan.users > 0
        self._settled = [size * number for number in range(segments)]  # every row below, in its segment, is done
        self._ends = [size * (number + 1) for number in range(segments)]
        self._succeeded = self._failed = 0
        self._last_ns = 0

    def settled_ns(self, elapsed_ns: int) -> int:
        """Up to when every intended request of an open loop is done."""
        row = self._settled[0]
        return min(elapsed_ns, self._log.intended[row] if row < self._log.rows else elapsed_ns)

    def look(self, elapsed_ns: int) -> Progress:
        succeeded = failed = sent = 0
        recent: list[np.ndarray] = []
        for number, (first, end) in enumerate(zip(self._settled, self._ends, strict=True)):
            part = slice(first, min(end, first + _FOLLOW_ROWS))
            status, dispatched = np.asarray(self._log.status)[part], np.asarray(self._log.dispatched)[part]
            done, intended = np.asarray(self._log.done)[part], np.asarray(self._log.intended)[part]
            pending = np.flatnonzero(status == PENDING)
            settled = int(pending[0]) if len(pending) else len(status)
            self._settled[number] += settled
            self._succeeded += int(np.count_nonzero(status[:settled] == OK))
            self._failed += int(np.count_nonzero(status[:settled] > OK))
            succeeded += int(np.count_nonzero(status[settled:] == OK))
            failed += int(np.count_nonzero(status[settled:] > OK))
            sent += int(np.count_nonzero(dispatched[settled:] > 0))
            recent.append((done - intended)[(status == OK) & (done > self._last_ns)])
        latencies = percentiles(np.concatenate(recent))
        passed_s = max(elapsed_ns - self._last_ns, 1) / 1e9
        self._last_ns = elapsed_ns
        return Progress(
            elapsed_s=elapsed_ns / 1e9,
            sent=self._succeeded + self._failed + sent,
            succeeded=self._succeeded + succeeded,
            failed=self._failed + failed,
            rate_rps=latencies.count / passed_s,
            p50_ms=latencies.p50,
            p99_ms=latencies.p99,
        )


def _input(worker: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    assert worker.stdin is not None
    return worker.stdin


async def _line(worker: asyncio.subprocess.Process) -> bytes:
    assert worker.stdout is not None
    line = await worker.stdout.readline()
    if not line:
        raise LoadtestError(f"a sending process ended with exit code {await worker.wait()}: see its message above")
    return line
