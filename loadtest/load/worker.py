"""One sending process: dispatches the requests of the log that are its own, and fills in what became of them.

`LoadSender` is the mechanism; `main` runs it as a subprocess of the generator (`python -m loadtest.load.worker FD`). The
conversation:

    stdin   8 bytes length, the `SendingJob` (msgpack) · 8 bytes: when to start, `time.monotonic_ns` · end of file: end now
    stdout  "ready" · after the last answer the `SenderReport` (JSON), one line each

The log is the open file FD, shared with the parent, which therefore sees everything while it happens.
"""

import asyncio
import gc
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

import msgspec
import numpy as np
import uvloop

from gateway.process.credentials import NOTHING_SHOWN, Credentials, told
from loadtest.load import signing
from loadtest.load.aws_keys import FIRST_S, AwsKeys
from loadtest.load.blocking import in_thread
from loadtest.load.dialler import Dialler, host_and_port
from loadtest.load.grpc_client import GrpcClient
from loadtest.load.http_client import HttpClient
from loadtest.load.pacer import Pacer
from loadtest.load.request_log import CUT, PENDING, REFUSED, RESET, TIMEOUT, UNSENT, RequestLog
from loadtest.load.signing import SignedRequests

_EXPIRY_PERIOD_S: Final = 0.02
_HEARTBEAT_S: Final = 0.01
_FAILED_USER_PAUSE_S: Final = 0.01  # a closed-loop user whose connection failed: else a dead target makes him spin
_DISPATCH_AT_ONCE: Final = 64  # then answers are read first, even when behind: their time of arrival is what counts
_EXPIRED_AT_ONCE: Final = 5_000  # then everything else has its turn
_LATE_START_NS: Final = 500_000_000  # after the last intended moment: what is not sent by then never is
_LAST_SWEEP_NS: Final = 500_000_000  # after the last deadline: for a loop so busy that its sweeps are late
_FAR_BEHIND_NS: Final = 100_000_000  # the run is lost already: let others have the processor
_PREOPENED_S: Final = 0.02  # connections opened ahead: those that this much service time needs


@dataclass(frozen=True, slots=True)
class SendingJob:
    """What one sending process is to do.

    requests: prepared bytes (HTTP requests, or gRPC messages), which the log's payload column numbers.
    first, step, end: an open loop dispatches first, first + step, …; a closed one fills first, first + 1, …; both below end.
    log_size: of the whole log.
    users, think_ns: closed loop only; payloads of a closed loop are drawn in turn. sigv4: as in LoadSpec.
    v2: as of `HttpClient`.
    """

    grpc: bool
    host: str
    port: int
    tls: bool
    requests: list[bytes]
    metadata: list[tuple[str, str]]
    connections: int
    timeout_ns: int
    duration_ns: int
    spin_ns: int
    rate_rps: float
    end: int
    first: int
    step: int
    log_size: int
    users: int = 0
    think_ns: tuple[int, ...] = ()
    shown: Credentials = NOTHING_SHOWN
    sigv4: str = ""
    v2: bool = False


@dataclass(frozen=True, slots=True)
class SenderReport:
    """What one sending process measured of itself.

    used: indices filled (closed loop), or dispatched. cpu_s, wall_s: while it sent. busy: the share of wall_s in which it was
    neither idle nor awake only to meet the next moment. fault: what ended it early; locked: why the target
    let us in no more, which did; each empty, if it did not.
    """

    used: int
    cpu_s: float
    wall_s: float
    loop_lag_p99_ms: float
    connections: int
    error_samples: dict[str, str]
    busy: float = 0.0
    fault: str = ""
    locked: str = ""


class LoadSender:
    """Life: prepare, then either run or close."""

    def __init__(self, job: SendingJob, log: RequestLog) -> None:
        self._job = job
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._client: HttpClient | GrpcClient
        protocols = ("h2",) if job.grpc else ()
        self._dialler = Dialler(
            job.host, job.port, tls=job.tls, protocols=protocols, timeout_s=job.timeout_ns / 1e9, shown=job.shown
        )
        if job.grpc:
            self._client = GrpcClient(
                self._dialler,
                authority=host_and_port(job.host, job.port),
                tls=job.tls,
                requests=job.requests,
                metadata=job.metadata,
                connections=job.connections,
                log=log,
                on_done=self._finished,
                on_fault=self._break,
                on_locked=self._locked_out,
            )
        else:
            self._client = HttpClient(
                self._dialler,
                requests=job.requests,
                v2=job.v2,
                connections=job.connections,
                log=log,
                on_done=self._finished,
                on_fault=self._break,
                on_locked=self._locked_out,
            )
        self._start_ns = 0
        self._next = job.first  # open loop: what to dispatch next; closed loop: what to fill next
        self._end = job.end if not job.users else job.first
        self._expired = job.first  # all of its own below have been looked at after its deadline
        self._outstanding = 0
        self._thinking = 0  # users between two requests
        self._stopped = False
        self._think_at = 0
        self._over = asyncio.Event()  # nothing more will be dispatched, and nothing is outstanding; or a fault
        self._fault = ""
        self._locked = ""
        self._keys: AwsKeys | None = None
        self._priority = _Priority()
        self._lags_ms: list[float] = []
        self._began: _Clocks
        self._sent_all: _Clocks | None = None  # at the end of the schedule

    async def prepare(self) -> None:
        """Do ahead what would else be send lag: look up names, open connections, collect garbage."""
        await self._dialler.look_up()
        job = self._job
        if job.sigv4 and isinstance(self._client, HttpClient):
            self._keys = await in_thread(AwsKeys.find, timeout_s=FIRST_S)
            self._client.requests = SignedRequests(job.requests, job.sigv4, self._keys.current)
        # A handshake of TLS takes a millisecond of this loop, 17 times what a connection takes: none while it sends.
        wanted = job.users or (job.connections if job.tls else int(job.rate_rps * _PREOPENED_S) + 1)
        await self._client.open(wanted)
        gc.collect()
        gc.freeze()  # what exists now is not looked at again until the run is over

    async def run(self, start_ns: int, stop: asyncio.Event) -> SenderReport:
        """Send everything and wait for every answer. stop: give up what is open.

        Ends `most_ns` after start_ns, whatever the target and the machine do. Nothing that goes wrong in a callback is raised
        or lost: it ends the run, and the report has it.
        """
        self._start_ns = self._client.start_ns = start_ns
        loop = self._loop
        pacer = self._pacer = Pacer(loop, self._dispatch, spin_ns=self._job.spin_ns)
        sweep = loop.create_task(self._expire())
        heartbeat = loop.create_task(self._heartbeat())
        stopped = loop.create_task(stop.wait())
        over = loop.create_task(self._over.wait())
        kept = loop.create_task(self._keep_keys())
        if self._job.users:
            loop.call_later(max(0, start_ns - time.monotonic_ns()) / 1e9, self._admit_users)
        elif self._next < self._end:
            pacer.wake_at(start_ns + self._log.intended[self._next])
        else:
            self._over.set()
        try:
            self._began = _Clocks.now()
            with self._priority:
                left_s = (start_ns + most_ns(self._job) - time.monotonic_ns()) / 1e9
                await asyncio.wait((over, stopped), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gc.unfreeze()
            self._stopped = True
            self._sent_all = self._sent_all or _Clocks.now()
            pacer.close()
            tasks = (sweep, heartbeat, stopped, over, kept)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            try:
                self._expire_until(time.monotonic_ns() - start_ns - self._job.timeout_ns, self._job.end)
            except Exception as exc:
                self._break(exc)
            self._cut()
            await self._client.close()
        cpu_s = self._sent_all.cpu_s - self._began.cpu_s
        wall_s = self._sent_all.wall_s - self._began.wall_s
        return SenderReport(
            used=self._next,
            cpu_s=cpu_s,
            wall_s=wall_s,
            busy=(cpu_s - pacer.spun_ns / 1e9) / max(wall_s, 1e-9),
            loop_lag_p99_ms=float(np.percentile(self._lags_ms, 99)) if self._lags_ms else 0.0,
            connections=self._client.most_connections,
            error_samples=self._client.error_samples,
            fault=self._fault,
            locked=self._locked,
        )

    async def close(self) -> None:
        """Instead of `run`."""
        await self._client.close()

    async def _keep_keys(self) -> None:
        if self._keys is not None and self._keys.ends:
            await self._keys.keep()

    def _break(self, fault: BaseException) -> None:
        """Something that cannot happen has: end the run, and say so."""
        self._fault = self._fault or f"{type(fault).__name__}: {fault}"
        self._over.set()

    def _locked_out(self, status: int, words: str) -> None:
        """Nothing that comes would fare better: end the run."""
        if status:
            words = signing.refusal(status, words) if self._job.sigv4 else self._job.shown.refusal(status, told(words))
        self._locked = self._locked or words
        self._over.set()

    def _dispatch(self) -> None:
        """Send all requests that are due, then ask to be woken for the next."""
        try:
            self._dispatch_due()
        except Exception as exc:
            self._break(exc)

    def _dispatch_due(self) -> None:
        log, step, start_ns = self._log, self._job.step, self._start_ns
        intended, dispatched, send = log.intended, log.dispatched, self._client.send
        now_ns = time.monotonic_ns() - start_ns
        index = self._next
        if index < self._end and intended[index] <= now_ns - self._job.timeout_ns:
            index = self._skip_expired(index, now_ns - self._job.timeout_ns)
        if now_ns > self._job.duration_ns + _LATE_START_NS:
            self._end = index
        last = min(self._end, index + step * _DISPATCH_AT_ONCE)
        while index < last and intended[index] <= now_ns:
            dispatched[index] = now_ns
            self._outstanding += 1
            self._next = index + step
            send(index)
            index += step
            now_ns = time.monotonic_ns() - start_ns
        self._next = index
        if index < self._end:
            self._pacer.wake_at(start_ns + intended[index])
        elif not self._outstanding:
            self._over.set()

    def _skip_expired(self, index: int, before_ns: int) -> int:
        """The first index from this one on whose deadline has not passed: to send the others would waste what time there is."""
        step = self._job.step
        due = np.asarray(self._log.intended)[index : self._end : step]
        skipped = int(np.searchsorted(due, before_ns, side="right"))
        np.asarray(self._log.status)[index : index + skipped * step : step] = UNSENT
        return index + skipped * step

    def _finished(self, index: int, status: int) -> None:
        try:
            log = self._log
            if log.status[index] != PENDING:
                return  # it was given up, or has failed; what comes later changes nothing
            log.done[index] = time.monotonic_ns() - self._start_ns
            log.status[index] = status
            self._outstanding -= 1
            if self._job.users:
                self._think(status)
            elif not self._outstanding and self._next >= self._end:
                self._over.set()
        except Exception as exc:
            self._break(exc)

    # Closed loop.

    def _admit_users(self) -> None:
        try:
            for _ in range(self._job.users):
                self._issue()
        except Exception as exc:
            self._break(exc)

    def _issue(self) -> None:
        job, log, index = self._job, self._log, self._next
        now_ns = time.monotonic_ns() - self._start_ns
        if index >= job.end and now_ns < job.duration_ns:
            kept = job.end - job.first
            self._fault = f"no more than {kept:,} requests can be kept, and they were used up after {now_ns / 1e9:.3g} s"
            self._over.set()
        if now_ns >= job.duration_ns or index >= job.end:
            if not self._outstanding and not self._thinking:
                self._over.set()
            return
        self._next = self._end = index + 1
        log.intended[index] = log.dispatched[index] = now_ns
        log.payload[index] = index % len(job.requests)
        self._outstanding += 1
        self._client.send(index)

    def _think(self, status: int) -> None:
        pause_s = self._job.think_ns[self._think_at] / 1e9
        self._think_at = (self._think_at + 1) % len(self._job.think_ns)
        if status in (REFUSED, RESET):
            pause_s = max(pause_s, _FAILED_USER_PAUSE_S)
        if self._stopped:
            return
        if pause_s == 0:
            self._issue()
            return
        self._thinking += 1
        self._loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._thinking -= 1
        if self._stopped:
            return
        try:
            self._issue()
        except Exception as exc:
            self._break(exc)

    # Deadlines.

    async def _expire(self) -> None:
        try:
            while True:
                await asyncio.sleep(_EXPIRY_PERIOD_S)
                before_ns = time.monotonic_ns() - self._start_ns - self._job.timeout_ns
                while self._expire_until(before_ns, _EXPIRED_AT_ONCE):  # noqa: ASYNC110  # the others' turn, no wait
                    await asyncio.sleep(0)
        except Exception as exc:
            self._break(exc)

    def _expire_until(self, before_ns: int, most: int) -> bool:
        """Fail what was intended before and is not done, `most` at once. Gives whether there may be more.

        Intended times ascend, and so do deadlines: each is looked at once.
        """
        first, step = self._expired, self._job.step
        end = min(self._next, first + most * step)
        due = int(np.searchsorted(np.asarray(self._log.intended)[first:end:step], before_ns, side="right"))
        end = first + due * step
        late = set((first + step * np.flatnonzero(np.asarray(self._log.status)[first:end:step] == PENDING)).tolist())
        self._expired = end
        if late:
            self._client.expire(late)
            for index in sorted(late):
                self._finished(index, TIMEOUT)
        return due == most

    def _cut(self) -> None:
        own = slice(self._expired, self._next, self._job.step)
        status, done = np.asarray(self._log.status)[own], np.asarray(self._log.done)[own]
        waiting = status == PENDING
        done[waiting] = time.monotonic_ns() - self._start_ns
        status[waiting] = CUT

    async def _heartbeat(self) -> None:
        try:
            while True:
                due_ns = time.monotonic_ns() + int(_HEARTBEAT_S * 1e9)
                await asyncio.sleep(_HEARTBEAT_S)
                self._lags_ms.append(max(0, time.monotonic_ns() - due_ns) / 1e6)
                index, now_ns = self._next, time.monotonic_ns() - self._start_ns
                behind = index < self._end and not self._job.users and now_ns - self._log.intended[index] > _FAR_BEHIND_NS
                self._priority.first(not behind)
                if self._sent_all is None and now_ns >= self._job.duration_ns:
                    self._sent_all = _Clocks.now()
        except Exception as exc:
            self._break(exc)


def most_ns(job: SendingJob) -> int:
    """How long a run of this job takes at most, from its start: its last deadline, and what a busy loop needs to see that."""
    return job.duration_ns + job.timeout_ns + _LAST_SWEEP_NS


@dataclass(frozen=True, slots=True)
class _Clocks:
    """This process's processor time, and the time of day."""

    cpu_s: float
    wall_s: float

    @classmethod
    def now(cls) -> "_Clocks":
        return cls(time.process_time(), time.monotonic())


class _Priority:
    """Has this thread scheduled before everything that is not real-time, where the system permits it (CAP_SYS_NICE).

    The generator needs little, but at once: on cores that it shares with a busy server each wake-up else waits for others'
    time slices, which is send lag. Measured on 2 cores at a load average of 8, 500 to 15 000 requests/s (2026-11): lag p99
    0.07 to 0.15 ms instead of 3 to 6. Niceness would not do: Linux's autogroups weigh it within one session only. Processes
    and threads that start meanwhile do not inherit it.

    A generator that is far behind needs all there is: on one core, neither the target nor whoever wants to end the run would
    get their turn. It is an ordinary process until it has caught up.
    """

    def __init__(self) -> None:
        self._is_first = False

    def __enter__(self) -> Self:
        self._before = os.sched_getscheduler(0), os.sched_getparam(0)
        self.first(True)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_first or self._before[0] != os.SCHED_OTHER:
            self._set(*self._before)

    def first(self, wanted: bool) -> None:
        if wanted != self._is_first:
            self._is_first = wanted
            if wanted:
                self._set(os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
            else:
                self._set(os.SCHED_OTHER, os.sched_param(0))

    @staticmethod
    def _set(policy: int, parameters: os.sched_param) -> None:
        with suppress(OSError):  # not permitted: it stays what it is
            os.sched_setscheduler(0, policy, parameters)


async def _serve(fd: int) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    size = int.from_bytes(await reader.readexactly(8), "little")
    job = msgspec.msgpack.decode(await reader.readexactly(size), type=SendingJob)
    sender = LoadSender(job, RequestLog(job.log_size, fd))
    # The parent may end at any time, also while connections are being opened.
    begin = asyncio.create_task(reader.readexactly(8))
    ready = asyncio.create_task(sender.prepare())
    await asyncio.wait((begin, ready), return_when=asyncio.FIRST_COMPLETED)
    if begin.done():  # only by its end: nobody says when to start before we are ready
        return
    await ready
    print("ready", flush=True)
    start_ns = int.from_bytes(await begin, "little")
    stop = asyncio.Event()
    ended = asyncio.create_task(_until_eof(reader, stop))
    report = await sender.run(start_ns, stop)
    ended.cancel()
    print(msgspec.json.encode(report).decode(), flush=True)


async def _until_eof(reader: asyncio.StreamReader, stop: asyncio.Event) -> None:
    await reader.read()
    stop.set()


def main(argv: Sequence[str]) -> None:
    try:
        uvloop.run(_serve(int(argv[0])))
    except (asyncio.IncompleteReadError, BrokenPipeError):
        pass  # the parent has ended: nobody is left to be told
    finally:
        # A parent that ended leaves a standard output that cannot be flushed: Python would complain of it at exit.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
