"""The one place where a load test waits: it sends what the schedule says and counts what comes back.

One process sends from the caller's own event loop; several are subprocesses (`loadtest.load.worker`) that share the log's
memory, so that everything is seen here while it happens, and nothing has to be merged afterwards.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import IO, Any, Final, TypeVar

import msgspec
import numpy as np

from gateway.process.credentials import NOTHING_SHOWN, Credentials
from loadtest.errors import Interrupted, LoadtestError, TargetError
from loadtest.load import live_log, payloads, target
from loadtest.load.aws_keys import FIRST_S, AwsKeys
from loadtest.load.blocking import NotAnswered, in_thread
from loadtest.load.digests import digests_of
from loadtest.load.patterns import MAX_REQUESTS, Schedule, left_out, payload_choice, schedule
from loadtest.load.request_log import CUT, OK, PENDING, UNSENT, RequestLog
from loadtest.load.worker import LoadSender, SenderReport, SendingJob, most_ns
from loadtest.measuring import children, connections, looks
from loadtest.measuring.asked import check, check_shapes
from loadtest.measuring.looks import Looker
from loadtest.measuring.machine import Meter
from loadtest.measuring.progress import Follower, Progress
from loadtest.results import LoadSpec, RunResult
from loadtest.verdict import decision
from loadtest.verdict.analysis import LAG_SHARE, Ended, summarise
from loadtest.verdict.blocks import MIN_BLOCKS, Grid
from loadtest.verdict.stalls import Recording

_LEAD_NS: Final = 50_000_000  # between "all are ready" and the first intended send
_CLOSED_LOOP_RPS: Final = 200_000  # more than one process can send: 122 000 were seen
_SPIN_BELOW_MS: Final = 0.1  # a lag limit that the timer alone does not keep
_SPIN_NS: Final = 50_000
_WATCH_S: Final = 0.5
_WORKER_READY_S: Final = 30.0
_WORKER_END_S: Final = 5.0  # from the moment at which it should
_QUESTIONS_S: Final = 60.0  # before the run: several, and the reading of files
_STATISTICS_S: Final = 10.0  # before the run
_LAST_WORD_S: Final = 1.0  # after it: a target that has fallen silent does not keep it from ending

T = TypeVar("T")
# A sequential test looks after 20 blocks and then after each 30 % more. Ten looks at most are paid for (Bonferroni).
_LOOK_GROWTH: Final = 1.3
_LOOKS: Final = 10


async def measure(
    spec: LoadSpec,
    *,
    until_decided: bool = False,
    or_lost: bool = False,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_log: Callable[[RequestLog, np.ndarray], None] | None = None,
    keep: Callable[[], IO[bytes]] | None = None,
    shown: Credentials = NOTHING_SHOWN,
    strict: bool = False,
) -> RunResult:
    """Run one load test, from first to last answer, and judge it.

    until_decided: end as soon as a sequential test on the blocks decides the SLO (a pass takes `decision.EARLY_PASS_S`);
    `spec.duration_s` is the bound.
    or_lost: with that, end too as soon as a run of twice `spec.duration_s` would not pass, were all of it like what was seen.
    stop: set it to end now; the result is then marked partial.
    on_progress: called about twice a second, on the event loop.
    on_log: called with the log, and the indices of what is used of it, in order; the log outlives the run.
    keep: gives the file in which what is measured lives meanwhile (`live_log.create`); the caller removes and closes it.
    A target that is down or fails gives a result full of errors, not an exception; what fails in the generator itself
    gives an invalid one that says so. shown: to a target whose doors are locked. Where they stay so (401, 403, TLS), the run
    ends: an error, or an invalid result, if something was answered before. The run ends `spec.timeout_s` and about a second
    after its duration at the latest. Cancelled, it ends within about a second, with all that it opened and started.
    strict: refuse rows and lengths that the model has no place for.
    Raises: UsageError (the spec), ConfigError (shown), TargetError (metadata needed for synthetic payloads cannot be had, or
    the target lets nothing in), Interrupted (stop was set before anything was sent).
    """
    check(spec)
    stop = stop or asyncio.Event()
    plan = schedule(spec.pattern, rate_rps=spec.rate_rps, duration_s=spec.duration_s, seed=spec.seed)
    spec = connections.settled(spec, plan.users)
    address = target.Address.of(spec, shown)
    if address.tls:
        shown.context()  # what is wrong with its files is told here
    try:
        if spec.sigv4:
            await _unless(stop, in_thread(AwsKeys.find, timeout_s=FIRST_S))  # each sending process finds its own
        model, requests, digests = await _unless(stop, in_thread(_prepare, spec, address, strict, timeout_s=_QUESTIONS_S))
    except NotAnswered as exc:
        raise TargetError(f"{spec.target} did not say what it serves: {exc}") from exc
    before = await _statistics(spec, address, model, stop, within_s=_STATISTICS_S)
    if stop.is_set():
        raise Interrupted("interrupted before anything was sent")
    async with AsyncExitStack() as opened:
        looked_at = until_decided and spec.slo is not None and plan.stationary and not plan.users
        file = keep() if keep else opened.enter_context(_own_file(in_memory=looked_at))
        meter = Meter(address.host, address.port, wanted=spec.slo is not None)  # it speaks of a verdict
        looker: Looker | None = None
        if looked_at:
            looker = await opened.enter_async_context(Looker(file.fileno(), meter.fileno()))
        await opened.enter_async_context(meter)
        run = _LoadRun(
            spec,
            plan,
            address,
            requests,
            digests,
            stop=stop,
            looker=looker,
            or_lost=or_lost,
            on_progress=on_progress,
            meter=meter,
        )
        indices, reports, ended = await run.execute(file, keep=keep is not None)
        await meter.end()
        recording = run.recording()
    after = await _statistics(spec, address, model, stop, within_s=_LAST_WORD_S)
    result = summarise(spec, plan, run.log, indices, reports, ended, before, after, recording)
    noted = (*left_out(spec.pattern, spec.duration_s), *connections.waited(spec, result.generator))
    result = replace(result, warnings=result.warnings + noted, digests=digests)
    if on_log is not None:
        on_log(run.log, indices)
    return result


def _own_file(*, in_memory: bool) -> IO[bytes]:
    """For this run alone. in_memory: where that can be had; who writes to one on a disk has to wait for that now and then."""
    if in_memory and hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("requests"), "w+b")
    return tempfile.TemporaryFile()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Do the work. Raises: Interrupted, if stop comes first; the work is then cancelled."""
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Interrupted("interrupted before anything was sent")
        return await working
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.wait((working, stopped))


async def _statistics(
    spec: LoadSpec, address: target.Address, model: str, stop: asyncio.Event, *, within_s: float
) -> target.ServerStatistics | None:
    """The server's totals; None if it does not tell them in the time there is."""
    asked = in_thread(target.server_statistics, spec, address, model, timeout_s=within_s)
    with suppress(NotAnswered, Interrupted):
        return await (asked if stop.is_set() else _unless(stop, asked))
    return None


def _prepare(spec: LoadSpec, address: target.Address, strict: bool) -> tuple[str, list[bytes], dict[str, str]]:
    """The model's name, its encoded requests, and the digests of a result."""
    if spec.protocol == "grpc" and address.tls:
        target.shake_hands(address)
    if spec.payloads:
        model = spec.model if spec.protocol == "invocations" else target.model_name(spec, address)
        return model, payloads.from_files(spec, address, model), digests_of(spec, ())
    at = address
    if spec.protocol == "invocations":
        at = replace(address, path="")  # of the container, which may speak v2 beside SageMaker's contract
    model = target.model_name(spec, at)
    inputs = target.model_metadata(spec, at, model).get("inputs", [])
    if strict:
        check_shapes(spec, inputs)
    made = payloads.synthetic(spec, inputs)
    as_grpc = spec.protocol == "grpc"
    requests = payloads.grpc_requests(spec, model, made) if as_grpc else payloads.http_requests(spec, address, model, made)
    return model, requests, digests_of(spec, inputs)


class _LoadRun:
    """One execution: the log, the senders, and the watch over them."""

    def __init__(
        self,
        spec: LoadSpec,
        plan: Schedule,
        address: target.Address,
        requests: list[bytes],
        digests: dict[str, str],
        *,
        stop: asyncio.Event,
        looker: Looker | None,
        or_lost: bool,
        on_progress: Callable[[Progress], None] | None,
        meter: Meter,
    ) -> None:
        """digests: as in RunResult. looker: None, if the run lasts as long as it may."""
        self._spec = spec
        self._plan = plan
        self._address = address
        self._requests = requests
        self._digests = digests
        self._on_progress = on_progress
        self._meter = meter
        self._processes = min(spec.processes, plan.users or len(plan.intended_ns))
        self._or_lost = or_lost
        self._looker = looker
        self._grid = Grid.of(spec, plan.duration_ns, plan.rate_rps)
        # per run, once started
        self.log: RequestLog
        self._start_ns = 0
        self._stop = stop
        self._halt = asyncio.Event()  # the user's stop, a fault, or a decision
        self._halted_ns = 0  # when, by the clock; 0: not by a stop or a fault
        self._faults: list[str] = []
        self._decided_ns = 0
        self._locked = ""  # why the target does not let us in

    async def execute(self, file: IO[bytes], *, keep: bool) -> tuple[np.ndarray, list[SenderReport], Ended]:
        """Send everything. Gives the indices of what was dispatched, in order of intended time.

        file: an empty one, for the log. keep: whether it is to outlive this process. Raises: Interrupted, if it was stopped
        before anything was sent; LoadtestError, if it failed before; TargetError, if the target let nothing in.
        """
        jobs = self._lay_out(file, shared=keep or self._processes > 1 or self._looker is not None)
        if keep:
            began = _iso(datetime.now(UTC))
            live_log.describe(file, self._spec, requests=self.log.size, started_at=began, digests=self._digests)
        watch = asyncio.create_task(self._follow_to_the_end())
        stopped = asyncio.create_task(self._forward_stop())
        try:
            if self._looker is not None:
                asked = looks.LookingJob(self._spec, self._grid, self.log.size, self._meter.cores, self._or_lost)
                await _unless(self._halt, self._looker.prepare(asked))
            reports = await (self._send_here(jobs[0]) if len(jobs) == 1 else self._send_elsewhere(jobs, file.fileno()))
        finally:
            for task in (watch, stopped):
                task.cancel()
            await asyncio.wait((watch, stopped))
        if self._locked and not np.any(np.asarray(self.log.status) == OK):
            raise TargetError(self._locked)
        elapsed_ns = self._plan.duration_ns
        partial = False
        if self._decided_ns and not self._faults:
            elapsed_ns = self._decided_ns
        elif self._faults or self._stop.is_set():
            halted_ns = min(elapsed_ns, (self._halted_ns or time.monotonic_ns()) - self._start_ns)
            if halted_ns <= 0 and not self._faults:
                raise Interrupted("interrupted before anything was sent")
            if halted_ns <= 0:
                raise LoadtestError(f"nothing was sent: {self._faults[0]}")
            partial = halted_ns < elapsed_ns or bool(np.any(np.asarray(self.log.status) == CUT))
            elapsed_ns = halted_ns
        status, intended = np.asarray(self.log.status), np.asarray(self.log.intended)
        indices = np.flatnonzero((status != PENDING) & (status != UNSENT))
        indices = indices[np.argsort(intended[indices], kind="stable")] if self._plan.users else indices
        indices = indices[intended[indices] < elapsed_ns]
        ended_at = datetime.now(UTC)
        began_ns = self._start_ns or time.monotonic_ns()  # the log counts from there, which is later than what was asked for
        started_at = ended_at - timedelta(microseconds=(time.monotonic_ns() - began_ns) / 1e3)
        return indices, reports, Ended(_iso(started_at), _iso(ended_at), elapsed_ns, partial, tuple(self._faults))

    def _fail(self, fault: str) -> None:
        """Something went wrong in the generator: end the run, with what there is."""
        self._faults.append(fault)
        self._halted_ns = self._halted_ns or time.monotonic_ns()
        self._halt.set()

    def _lock_out(self, report: SenderReport) -> None:
        if report.locked and not self._locked:
            words = report.locked
            self._locked = words if self._spec.target in words else f"{self._spec.target}: {words}"
            self._fail(self._locked)

    def recording(self) -> Recording | None:
        """What the hiccup meter has seen so far, its times from the start of the run."""
        return self._meter.recording(self._start_ns)

    def _lay_out(self, file: IO[bytes], *, shared: bool) -> list[SendingJob]:
        """Make the log, fill in what is known before, and share the work out."""
        plan, spec, count = self._plan, self._spec, self._processes
        per_process = int(min(MAX_REQUESTS // count, plan.duration_ns / 1e9 * _CLOSED_LOOP_RPS))
        size = per_process * count if plan.users else len(plan.intended_ns)
        self.log = RequestLog.shared(size, file.fileno()) if shared else RequestLog(size)
        if not plan.users:
            np.asarray(self.log.intended)[:] = plan.intended_ns
            np.asarray(self.log.payload)[:] = payload_choice(size, len(self._requests), spec.seed)
        assert spec.connections is not None  # settled
        limit_ms = spec.slo.tightest_ms if spec.slo else None
        compressed = any(name.lower() == "accept-encoding" for name, _ in spec.headers)
        spin = limit_ms is not None and limit_ms * LAG_SHARE < _SPIN_BELOW_MS
        job = SendingJob(
            grpc=spec.protocol == "grpc",
            host=self._address.host,
            port=self._address.port,
            tls=self._address.tls,
            requests=self._requests,
            metadata=self._address.metadata(spec),
            connections=spec.connections,
            timeout_ns=int(spec.timeout_s * 1e9),
            duration_ns=plan.duration_ns,
            spin_ns=_SPIN_NS if spin else 0,
            rate_rps=plan.rate_rps / count,
            end=size,
            first=0,
            step=count,
            log_size=size,
            shown=self._address.shown,
            sigv4=spec.sigv4,
            v2=spec.protocol in ("rest-json", "rest-binary") and not compressed,
        )
        if not plan.users:
            return [replace(job, first=number) for number in range(count)]
        assert plan.think_ns is not None
        return [
            replace(
                job,
                first=per_process * number,
                end=per_process * (number + 1),
                step=1,
                users=plan.users // count + (number < plan.users % count),
                think_ns=tuple(plan.think_ns[number::count].tolist()),
            )
            for number in range(count)
        ]

    async def _send_here(self, job: SendingJob) -> list[SenderReport]:
        sender = LoadSender(job, self.log)
        try:
            await _unless(self._halt, sender.prepare())
        except BaseException:
            await sender.close()
            raise
        self._start_ns = time.monotonic_ns() + _LEAD_NS
        report = await sender.run(self._start_ns, self._halt)
        if report.fault:
            self._fail(f"the load generator failed: {report.fault}")
        self._lock_out(report)
        return [report]

    async def _send_elsewhere(self, jobs: list[SendingJob], fd: int) -> list[SenderReport]:
        workers: list[asyncio.subprocess.Process] = []
        try:
            await _unless(self._halt, self._start(workers, jobs, fd))
            self._start_ns = time.monotonic_ns() + _LEAD_NS
            for worker in workers:
                _input(worker).write(self._start_ns.to_bytes(8, "little"))
            closer = asyncio.create_task(self._close_inputs(workers))
            tasks = [asyncio.create_task(self._report_of(worker, number)) for number, worker in enumerate(workers, 1)]
            halted = asyncio.create_task(self._halt.wait())
            ended = asyncio.gather(*tasks)
            try:
                most_s = max(most_ns(job) for job in jobs) / 1e9
                await asyncio.wait((halted, ended), timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
                _, late = await asyncio.wait(tasks, timeout=_WORKER_END_S)
                if late:
                    self._fail(f"{len(late)} of {len(jobs)} sending processes did not end when they should")
            finally:
                for task in (closer, halted, *tasks):
                    task.cancel()
                await asyncio.wait((closer, halted, *tasks))
                await asyncio.gather(ended, return_exceptions=True)
            return [report for task in tasks if not task.cancelled() and (report := task.result())]
        finally:
            # Their reports are in, or they are of no use.
            await asyncio.gather(*(children.end(worker) for worker in workers))
            self._cut_orphans()

    async def _start(self, workers: list[asyncio.subprocess.Process], jobs: list[SendingJob], fd: int) -> None:
        """Start the sending processes, each added to `workers` at once, and wait until all are ready."""
        for job in jobs:
            worker = await children.begin(sys.executable, "-m", "loadtest.load.worker", str(fd), pass_fds=(fd,))
            workers.append(worker)
            packed = msgspec.msgpack.encode(job)
            _input(worker).write(len(packed).to_bytes(8, "little") + packed)
        try:
            async with asyncio.timeout(_WORKER_READY_S + self._spec.timeout_s):
                for worker in workers:
                    if not await _output(worker).readline():
                        raise LoadtestError(f"a sending process {_ending(await worker.wait())}: see its message above")
        except TimeoutError as exc:
            raise LoadtestError("a sending process was not ready in time: is the machine busy?") from exc

    async def _report_of(self, worker: asyncio.subprocess.Process, number: int) -> SenderReport | None:
        """What a sending process says at its end; None if it was lost, which ends the run."""
        line = await _output(worker).readline()
        try:
            report = msgspec.json.decode(line, type=SenderReport)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._fail(f"sending process {number} of {self._processes} {_ending(await worker.wait())}")
            return None
        if report.fault:
            self._fail(f"sending process {number} of {self._processes} failed: {report.fault}")
        self._lock_out(report)
        return report

    def _cut_orphans(self) -> None:
        """What a lost process has sent, and nobody waits for: nor does anybody know how long it has waited."""
        status = np.asarray(self.log.status)
        status[(status == PENDING) & (np.asarray(self.log.dispatched) > 0)] = CUT

    async def _close_inputs(self, workers: list[asyncio.subprocess.Process]) -> None:
        await self._halt.wait()
        for worker in workers:
            _input(worker).close()

    async def _forward_stop(self) -> None:
        await self._stop.wait()
        self._halted_ns = self._halted_ns or time.monotonic_ns()
        self._halt.set()

    # Watching.

    async def _follow_to_the_end(self) -> None:
        try:
            await self._follow()
        except Exception as exc:  # of a task nobody would see it
            self._fail(f"the watch over the run failed: {type(exc).__name__}: {exc}")

    async def _follow(self) -> None:
        """Show progress and have looked whether the SLO is decided, twice a second."""
        next_look, looked = MIN_BLOCKS, 0
        follower = Follower(self.log, self._plan, self._processes)
        look: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(_WATCH_S)
                elapsed_ns = time.monotonic_ns() - self._start_ns
                if not self._start_ns or elapsed_ns < 0:
                    continue
                progress = follower.look(elapsed_ns)
                if self._on_progress is not None:
                    self._on_progress(progress)
                self._meter.follow()
                blocks = follower.settled_ns(elapsed_ns) // self._grid.block_ns
                if self._looker is None or looked == _LOOKS or blocks < next_look or (look is not None and not look.done()):
                    continue
                next_look, looked = int(blocks * _LOOK_GROWTH) + 1, looked + 1
                look = asyncio.create_task(self._ask(self._looker, blocks))
        finally:
            if look is not None:
                look.cancel()
                await asyncio.wait((look,))

    async def _ask(self, looker: Looker, blocks: int) -> None:
        """End the run, if the first `blocks` blocks decide it."""
        if await looker.decided(looks.Look(blocks, 1 - (1 - decision.CONFIDENCE) / _LOOKS, self._start_ns)):
            self._decided_ns = blocks * self._grid.block_ns
            self._halt.set()


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")


def _input(worker: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    assert worker.stdin is not None
    return worker.stdin


def _output(worker: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert worker.stdout is not None
    return worker.stdout


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
