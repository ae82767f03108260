"""One replica of a backend's deployment: a worker pool that runs batches of ingresses, and what Serve asks about it."""

import asyncio
import contextlib
import functools
import time
from collections import deque
from typing import Final

import msgspec

from backends.base import ModelSpec
from gateway.batching.batch import Batch, Part
from gateway.clock import LoopClock
from gateway.cluster.remote import ATTEND_S, Attendance, attend_answer, pack
from gateway.config import Backend, Model
from gateway.errors import BackendFailed, BackendUnreachable, GatewayError, InternalError
from gateway.frames import decode_frame
from gateway.runner import Execution
from gateway.types import InferRequest
from gateway.workers import WorkerPool

# An ingress that does not come back to `attend` no longer has a share after this; what it said of its queue is as old at most.
_FORGET_S: Final = 3.0

_question = msgspec.msgpack.Decoder(tuple[str, Attendance | None])


class Replica:
    """The class Serve runs. Everything on the replica's one event loop; `run` and `attend` are called by `RemoteRunner`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: Model, backend: Backend, declared: ModelSpec, content: str
    ) -> None:
        """content: digest of what this replica serves, which tells ingresses of one configuration from those of another."""
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(self._loop)
        self._model = model
        self._content = content
        self._name = f"{model.name}:{model.version}/{backend.label}"
        self._waiting: deque[tuple[Batch, asyncio.Future[Execution]]] = deque()
        # who sends
        self._attending: dict[str, int] = {}  # ingress -> its open calls
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        # since the last report to the autoscaler
        self._queues: dict[str, tuple[float, float]] = {}  # ingress -> batches that wait there, when it said so
        self._busy_s = 0.0
        self._counted_s = self._reported_s = time.monotonic()
        self._pool = WorkerPool(backend, declared, name=self._name, clock=self._clock)
        self._pool.on_change = self._sessions_changed
        self._spec = await self._pool.open()

    # called by ingresses

    async def run(self, frame: bytes) -> bytes:
        """Run one batch. Never raises: an error is data of the answer, so that no class has to cross."""
        received_ns = self._clock.now_ns()
        try:
            execution = await self._execute(frame, received_ns)
        except GatewayError as exc:
            execution = Execution(received_ns, received_ns, error=exc)
        except Exception as exc:  # whatever a bad frame brings about must end in an answer
            execution = Execution(received_ns, received_ns, error=InternalError(f"{self._name}: {type(exc).__name__}: {exc}"))
        times = {
            "waited_ns": execution.started_ns - received_ns,
            "computed_ns": execution.finished_ns - execution.started_ns,
        }
        error = execution.error
        if error is None:
            try:
                return pack(execution.outputs or {}, **times)
            except (GatewayError, TypeError, ValueError, KeyError) as exc:
                error = BackendFailed(f"{self._name}: outputs that cannot be sent: {exc}")
        return pack({}, **times, error=type(error).__name__, message=error.message, session_lost=execution.session_lost)

    async def attend(self, question: bytes) -> bytes:
        """Tell sessions, ingresses and the model's spec, once they differ from what the caller knows or a while has passed."""
        ingress, known = _question.decode(question)
        self._enter(ingress)
        try:
            if known == self._attendance():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), ATTEND_S)
        except asyncio.CancelledError:  # the connection has ended
            self._leave(ingress)
            raise
        self._attending[ingress] -= 1
        if not self._attending[ingress]:
            self._leaving[ingress] = self._loop.call_later(_FORGET_S, self._forget, ingress)
        return attend_answer(self._attendance(), self._content, self._spec)

    # called by Serve

    async def check_health(self) -> None:
        """Serve replaces a replica whose check fails, or does not answer because the loop is stuck."""
        if not self._pool.available:
            raise BackendUnreachable(f"{self._name}: all sessions are lost and cannot be rebuilt")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Batches that ran at once on average since the last report, and batches that wait here and at the ingresses."""
        self._count_busy()
        now_s = time.monotonic()
        elapsed_s, self._reported_s = now_s - self._reported_s, now_s
        busy_s, self._busy_s = self._busy_s, 0.0
        queued = sum(batches for batches, at_s in self._queues.values() if now_s - at_s < _FORGET_S)
        return {"busy": busy_s / max(elapsed_s, 1e-6), "queued": queued + len(self._waiting)}

    async def __del__(self) -> None:
        # Serve awaits it, after the last call has been answered.
        await self._pool.close()

    # batches

    async def _execute(self, frame: bytes, received_ns: int) -> Execution:
        inputs, extra = decode_frame(frame)
        rows = extra["rows"]
        self._queues[extra["ingress"]] = (extra["left_rows"] / max(1, rows), time.monotonic())
        request = InferRequest(
            self._model.name, self._model.version, "", inputs, rows, received_ns, parameters=extra["parameters"]
        )
        batch = Batch(
            [Part(request, 0, rows)],
            rows=rows,
            padded_rows=rows,
            reason="remote",
            closed_ns=received_ns,
            oldest_ns=received_ns,
            batched=extra["batched"],
        )
        ended: asyncio.Future[Execution] = self._loop.create_future()
        # Ingresses know their slots, so a batch only waits while their shares are being dealt anew or a session is rebuilt.
        self._waiting.append((batch, ended))
        self._start_waiting()
        return await ended

    def _start_waiting(self) -> None:
        while self._waiting and self._pool.free_slots:
            batch, ended = self._waiting.popleft()
            if not ended.done():  # else its ingress has gone
                self._count_busy()
                self._pool.start(batch, functools.partial(self._ended, ended))

    def _ended(self, ended: "asyncio.Future[Execution]", _: Batch, execution: Execution) -> None:
        self._count_busy(ended=1)
        if not ended.done():
            ended.set_result(execution)
        if execution.session_lost:
            self._sessions_changed()
        else:
            self._start_waiting()

    def _sessions_changed(self) -> None:
        self._start_waiting()
        if not self._pool.available:
            now_ns = self._clock.now_ns()
            error = BackendUnreachable(f"{self._name}: all sessions are lost")
            while self._waiting:
                _, ended = self._waiting.popleft()
                if not ended.done():
                    ended.set_result(Execution(now_ns, now_ns, error=error, session_lost=True))
        self._tell()

    def _count_busy(self, *, ended: int = 0) -> None:
        """Add the time since the last call, in which nothing changed. ended: batches that the pool has just ceased to count."""
        now_s = time.monotonic()
        self._busy_s += (self._pool.busy + ended) * (now_s - self._counted_s)
        self._counted_s = now_s

    # attendance

    def _attendance(self) -> Attendance:
        return Attendance(self._pool.free_slots + self._pool.busy, max(1, len(self._attending)))

    def _enter(self, ingress: str) -> None:
        if ingress in self._leaving:
            self._leaving.pop(ingress).cancel()
        if ingress in self._attending:
            self._attending[ingress] += 1
        else:
            self._attending[ingress] = 1
            self._tell()

    def _leave(self, ingress: str) -> None:
        self._attending[ingress] -= 1
        if not self._attending[ingress]:
            self._forget(ingress)

    def _forget(self, ingress: str) -> None:
        self._leaving.pop(ingress, None)
        del self._attending[ingress]
        self._queues.pop(ingress, None)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
