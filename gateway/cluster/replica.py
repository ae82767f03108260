"""One replica of a backend's deployment: a worker pool that runs batches of ingresses, and what Serve asks about it.

When a client unloads the model, every ingress calls `release`: after the last one the replica frees the model, and loads it
again when an ingress attends.
"""

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import ray

from backends.base import LastPart, ModelSpec, Tensors, trace_of, words_of
from gateway.batching.leases import Demand, share
from gateway.clock import LoopClock
from gateway.cluster.channel import Answer, ChannelServer, Running, check_size
from gateway.cluster.link import ATTEND_S, attend_answer, channel_answer
from gateway.config import Backend, Model
from gateway.console import Speech, set_up
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, GatewayError, InternalError
from gateway.frames import decode_frame, encode_frame
from gateway.garbage import leave_out, take_in
from gateway.protocols.tensors import Buffer
from gateway.runner import Execution
from gateway.supervisor import outlive_signals
from gateway.workers import WorkerPool

# An ingress that does not come back to `attend` no longer has a share after this; what it said of its queue is as old at most.
_FORGET_S: Final = 3.0
# How often slots are dealt anew between several ingresses, by what each had run and has waiting.
_DEAL_S: Final = 0.25
_HORIZON_WITHOUT_SLO_MS: Final = 50.0

_question = msgspec.msgpack.Decoder(tuple[str, int | None])


def _node_address() -> str:
    worker: Any = ray._private.worker.global_worker
    return str(worker.node_ip_address)


@dataclass(slots=True, eq=False)
class _Asked:
    """A batch that an ingress waits for: what a pool runs.

    part: where the parts of its answer go; None: it has none. pool: that runs it; None: it waits. counted_s: up to when its run
    is counted as the ingress's. fault: why a part could not be sent, and the run was cancelled.
    """

    inputs: Tensors
    told: Mapping[str, object]
    ingress: str
    on_end: Callable[[Execution], None]
    part: Answer | None
    pool: WorkerPool | None = None
    counted_s: float = 0.0
    fault: BackendFailed | None = None

    def concat(self) -> Tensors:
        return self.inputs

    def parameters(self) -> Mapping[str, object]:
        return self.told


class Replica:
    """The class Serve runs. Everything on the replica's one event loop; `run` and `attend` are called by `RemoteRunner`."""

    _closed = False  # also where __init__ did not get to the end

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: Model,
        backend: Backend,
        declared: ModelSpec,
        content: str,
        speech: Speech | None = None,
        channel_host: str = "",
    ) -> None:
        """content: digest of what this replica serves, which tells ingresses of one configuration from those of another.

        speech: how this process logs; None: that is left as it is. channel_host: where batches come in from other nodes; empty
        means the address that the node has in the cluster.
        """
        outlive_signals()
        if speech is not None:
            set_up(speech, guest=True)
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(self._loop)
        self._model = model
        self._content = content
        self._name = f"{model.name}:{model.version}/{backend.label}"
        self._waiting: deque[_Asked] = deque()
        self._running: set[_Asked] = set()
        self._channel = ChannelServer(self._begin)
        self._channel_host = channel_host
        # who sends
        self._attending: dict[str, int] = {}  # ingress -> its open calls
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._queues: dict[str, tuple[float, float]] = {}  # ingress -> batches that wait there, when it said so
        # slots leased to each; since they were dealt
        self._slots: dict[str, int] = {}
        self._spent_s: dict[str, float] = {}
        self._dealt_s = time.monotonic()
        self._batch_s = 0.0  # the last one took
        # since the last report to the autoscaler
        self._busy_s = 0.0
        self._counted_s = self._reported_s = time.monotonic()
        # the model
        self._new_pool = functools.partial(WorkerPool, backend, declared, name=self._name, clock=self._clock)
        self._pool = self._new_pool()
        self._spec = ModelSpec("", (), (), 0)  # until it is loaded
        self._loaded = False
        self._changing = asyncio.Lock()  # one load or release at a time
        self._loading: asyncio.Task[str] | None = None
        if model.load_at_start:
            await self._open()
            leave_out()

    # called by ingresses

    async def run(self, frame: bytes) -> bytes:
        """Run one batch that came by a call of Serve's. Never raises: see `_begin`."""
        answered: asyncio.Future[bytes] = self._loop.create_future()

        def answer(pieces: Sequence[Buffer]) -> None:
            if not answered.done():
                answered.set_result(b"".join(pieces))

        running = self._begin(frame, answer)
        try:
            return await answered
        except asyncio.CancelledError:  # its ingress has gone
            running.cancel()
            raise

    async def channel(self, node: bytes) -> bytes:
        """Where batches come in without Serve: what `channel_answer` writes.

        node: the ingress's; one that is not the replica's own is told a TCP port.
        """
        own = ray.get_runtime_context().get_node_id()
        host = "" if node.decode() == own else self._channel_host or _node_address()
        endpoints = await self._channel.start(host)
        return channel_answer(self._channel.token, endpoints if host else endpoints._replace(host="", port=0))

    async def attend(self, question: bytes) -> bytes:
        """Tell the caller's slots and the model's spec, once the slots are not those it knows or a while has passed."""
        ingress, known = _question.decode(question)
        self._enter(ingress)
        fault = ""
        try:
            if not self._loaded:
                fault = await self._load()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ATTEND_S):
                    while not fault and ingress in self._attending and known == self._slots[ingress]:
                        await self._changed.wait()
        except asyncio.CancelledError:  # the connection has ended
            self._leave(ingress)
            raise
        if ingress in self._attending:
            self._attending[ingress] -= 1
            if not self._attending[ingress]:
                self._leaving[ingress] = self._loop.call_later(_FORGET_S, self._forget, ingress)
        return attend_answer(self._slots.get(ingress, 0), self._content, self._spec, fault)

    async def release(self, ingress: bytes) -> bytes:
        """An ingress has unloaded the model: if no other attends, return when its memory is free."""
        self._forget(ingress.decode())
        async with self._changing:
            if self._loaded and not self._attending:
                self._loaded = False
                pool, self._pool = self._pool, self._new_pool()
                await pool.close()
                take_in()
        return b""

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
        queued = sum(self._queue_of(ingress, now_s) for ingress in self._queues)
        return {"busy": busy_s / max(elapsed_s, 1e-6), "queued": queued + len(self._waiting)}

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        # Serve awaits what this returns, after the last call has been answered; then the interpreter calls it as well.
        if self._closed:
            return None
        return self._end()

    async def _end(self) -> None:
        """Serve counts its own calls, and has waited for them: wait for what came by channels, then close."""
        await self._channel.drained()
        await self.close()

    async def close(self) -> None:
        """End the sessions; nobody waits any more for what they may run. A second call does nothing."""
        if not self._closed:
            self._closed = True
            await self._channel.close()
            if self._loading is not None:
                self._loading.cancel()
            self._pool.abort()
            await self._pool.close()

    # the model

    async def _open(self) -> None:
        self._pool.on_change = self._sessions_changed
        self._spec = await self._pool.open()
        self._loaded = True

    async def _load(self) -> str:
        """Load the model again, once for all who wait for it. Gives what went wrong; empty: nothing."""
        if self._loading is None:
            self._loading = self._loop.create_task(self._reopen())
        return await asyncio.shield(self._loading)

    async def _reopen(self) -> str:
        fault = ""
        try:
            async with self._changing:
                try:
                    if not self._loaded:
                        await self._open()
                        take_in()
                except GatewayError as exc:
                    fault = exc.message
                    self._pool = self._new_pool()
        finally:
            self._loading = None
        self._sessions_changed()
        return fault

    # batches

    def _begin(self, frame: Buffer, answer: Answer, part: Answer | None = None) -> Running:
        """Run one batch. `answer` is called once, also for an error: that is data, so that no class has to cross.

        part: gets the parts of the answer before; None: they cannot be sent.
        """
        received_ns = self._clock.now_ns()

        def ended(execution: Execution) -> None:
            answer(self._answer_of(execution, received_ns))

        try:
            return self._submit(frame, received_ns, ended, part)
        except GatewayError as exc:
            ended(Execution(received_ns, received_ns, error=exc))
        except Exception as exc:  # whatever a bad frame brings about must end in an answer
            error = InternalError(f"{self._name}: {words_of(exc, traced=True)}")
            ended(Execution(received_ns, received_ns, error=error, trace=trace_of(exc)))
        return Running()

    def _answer_of(self, execution: Execution, received_ns: int) -> Sequence[Buffer]:
        times = {
            "waited_ns": execution.started_ns - received_ns,
            "computed_ns": execution.finished_ns - execution.started_ns,
        }
        if execution.first_part_ns is not None:
            times["first_part_ns"] = execution.first_part_ns - execution.started_ns
        fault, trace = execution.error, execution.trace
        if fault is None:
            try:
                pieces = encode_frame(execution.outputs or {}, times)
                check_size(pieces)
                return pieces
            except Exception as exc:
                fault, trace = self._unsent(exc), trace_of(exc)
        verdict = {
            "session_lost": execution.session_lost,
            "self_inflicted": execution.self_inflicted,
            "refused": execution.refused,
            "trace": trace,
        }
        return encode_frame({}, {**times, "error": type(fault).__name__, "message": fault.message, **verdict})

    def _unsent(self, exc: Exception) -> BackendFailed:
        return BackendFailed(f"{self._name}: outputs that cannot be sent: {words_of(exc, traced=True)}")

    def _submit(self, frame: Buffer, received_ns: int, on_end: Callable[[Execution], None], part: Answer | None) -> Running:
        inputs, extra = decode_frame(frame)
        self._check_parts(extra.get("in_parts", False), part)  # an ingress of an older version does not say
        rows = extra["rows"]
        ingress = extra["ingress"]
        self._queues[ingress] = (extra["left_rows"] / max(1, rows), time.monotonic())
        asked = _Asked(inputs, extra["parameters"], ingress, on_end, part if self._spec.decoupled else None)
        # Ingresses know their slots, so a batch only waits while their shares are being dealt anew or a session is rebuilt.
        self._waiting.append(asked)
        self._start_waiting()
        return Running(functools.partial(self._cancel, asked), functools.partial(self._taken, asked))

    def _check_parts(self, expected: bool, part: Answer | None) -> None:
        """Raises: InternalError, if its ingress cannot get the answer as the model gives it."""
        if self._spec.decoupled and part is None:
            raise InternalError(
                f"{self._name}: the model answers in parts, which a call of Serve's cannot carry, only a channel"
            )
        if expected != self._spec.decoupled:
            here, there = ("in parts", "at once") if self._spec.decoupled else ("at once", "in parts")
            raise InternalError(
                f"{self._name}: the model answers {here}, its ingress expects that it does {there}: load it again"
            )

    def _start_waiting(self) -> None:
        while self._waiting and self._pool.free_slots:
            asked = self._waiting.popleft()
            self._count_busy()
            asked.pool = self._pool
            asked.counted_s = time.monotonic()
            self._running.add(asked)
            self._pool.start(asked, self._ended, None if asked.part is None else self._part_made)

    def _part_made(self, asked: "_Asked", outputs: Tensors) -> None:
        if asked.fault is not None:
            return
        assert asked.part is not None
        try:
            pieces = encode_frame(outputs, {"last": isinstance(outputs, LastPart)})
            check_size(pieces)
            asked.part(pieces)
        except Exception as exc:
            asked.fault = self._unsent(exc)
            self._cancel(asked)

    def _cancel(self, asked: "_Asked") -> None:
        """Do not start it, or end it early where its session can."""
        if asked.pool is not None:
            asked.pool.cancel(asked)
        elif asked in self._waiting:
            self._waiting.remove(asked)
            now_ns = self._clock.now_ns()
            asked.on_end(Execution(now_ns, now_ns, error=Cancelled("nobody waits for the batch any more")))

    def _taken(self, asked: "_Asked") -> None:
        if asked.pool is not None:
            asked.pool.taken(asked)

    def _ended(self, asked: "_Asked", execution: Execution) -> None:
        self._count_busy(ended=1)
        self._batch_s = (execution.finished_ns - execution.started_ns) / 1e9
        self._running.discard(asked)
        self._count_spent(asked, time.monotonic())
        asked.on_end(execution if asked.fault is None else replace(execution, error=asked.fault))
        if time.monotonic() - self._dealt_s > _DEAL_S:
            self._deal()
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
                self._waiting.popleft().on_end(Execution(now_ns, now_ns, error=error, session_lost=True))
        self._deal()

    def _count_busy(self, *, ended: int = 0) -> None:
        """Add the time since the last call, in which nothing changed. ended: batches that the pool has just ceased to count."""
        now_s = time.monotonic()
        self._busy_s += (self._pool.busy + ended) * (now_s - self._counted_s)
        self._counted_s = now_s

    def _count_spent(self, asked: "_Asked", now_s: float) -> None:
        """Add what a batch took since it was counted last to what its ingress did: it may run for longer than leases stand."""
        self._spent_s[asked.ingress] = self._spent_s.get(asked.ingress, 0.0) + now_s - asked.counted_s
        asked.counted_s = now_s

    # attendance

    def _deal(self) -> None:
        """Lease the live sessions to the ingresses. One that has nothing to do keeps one slot, to say so when that changes."""
        now_s = time.monotonic()
        window_s, self._dealt_s = max(_DEAL_S, now_s - self._dealt_s), now_s
        for asked in self._running:
            self._count_spent(asked, now_s)
        spent_s, self._spent_s = self._spent_s, {}
        if not self._attending:
            self._slots = {}
            return
        sessions = self._pool.free_slots + self._pool.busy
        slo_ms = self._model.slo.p99_ms if self._model.slo else _HORIZON_WITHOUT_SLO_MS
        demands = [
            Demand(
                arriving=spent_s.get(ingress, 0.0) / window_s,
                waiting_ns=self._queue_of(ingress, now_s) * self._batch_s * 1e9,
                held=self._slots.get(ingress, 0),
            )
            for ingress in self._attending
        ]
        dealt = share(sessions, demands, round(slo_ms / 2 * 1e6))
        slots = {ingress: max(1, part) if sessions else 0 for ingress, part in zip(self._attending, dealt, strict=True)}
        if slots != self._slots:
            self._slots = slots
            self._changed.set()
            self._changed = asyncio.Event()

    def _queue_of(self, ingress: str, now_s: float) -> float:
        batches, at_s = self._queues.get(ingress, (0.0, 0.0))
        return batches if now_s - at_s < _FORGET_S else 0.0

    def _enter(self, ingress: str) -> None:
        if ingress in self._leaving:
            self._leaving.pop(ingress).cancel()
        self._attending[ingress] = self._attending.get(ingress, 0) + 1
        if ingress not in self._slots:
            self._deal()

    def _leave(self, ingress: str) -> None:
        if ingress in self._attending:
            self._attending[ingress] -= 1
            if not self._attending[ingress]:
                self._forget(ingress)

    def _forget(self, ingress: str) -> None:
        timer = self._leaving.pop(ingress, None)
        if timer is not None:
            timer.cancel()
        self._attending.pop(ingress, None)
        self._queues.pop(ingress, None)
        self._deal()
