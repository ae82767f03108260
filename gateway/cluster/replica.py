"""One replica of a backend's deployment: it runs batches of ingresses, and answers what Serve asks about it.

When a client unloads the model, every ingress calls `release`: after the last one the replica frees the model, and loads it
again when an ingress attends. When a client loads it, each ingress attends anew with the number of that load: the first one
has the replica read the model beside what it has, which ends what it runs.
"""

import asyncio
import functools
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypedDict, cast

import msgspec
import ray

from backends.base import LastPart, ModelSpec, Tensors, trace_of, words_of
from backends.early_failure import EarlyFailure
from gateway.clock import LoopClock
from gateway.cluster.account_lines import AccountTeller
from gateway.cluster.answers import attend_answer, channel_answer
from gateway.cluster.asked import AskedBatch, EarlyBatch
from gateway.cluster.attendance import Attendance
from gateway.cluster.channel import Answer, ChannelServer, Running
from gateway.cluster.channel_connection import check_size
from gateway.cluster.control import ClientsWish
from gateway.cluster.hosted_model import HostedModel
from gateway.config import Backend, ModelSection, Tracing
from gateway.engine.metrics import Metrics
from gateway.engine.recorders import Cost
from gateway.engine.runner import Execution
from gateway.engine.workers import WorkerPool
from gateway.errors import BackendFailed, BackendUnreachable, Cancelled, ConfigError, GatewayError, InternalError
from gateway.process.child import living_pids
from gateway.process.console import Speech, set_up
from gateway.process.prints import never_raise
from gateway.process.supervisor import outlive_signals
from gateway.tracing.batches import received, run_ended
from gateway.tracing.tracer import open_tracer
from gateway.wire.frames import decode_frame, encode_frame
from gateway.wire.tensors import Buffer

_HORIZON_WITHOUT_SLO_MS: Final = 50.0
# How long the end waits for spans to be sent.
_TRACES_SENT_S: Final = 1.0
# What it costs is told so often: that much of its life is not counted, if it is killed.
_PUBLISH_S: Final = 0.1

log = logging.getLogger(__name__)

_wish = msgspec.msgpack.Decoder(tuple[str, float])


class _Question(msgspec.Struct, array_like=True):
    """What an ingress asks that attends. load: of a client, that it serves the model as of; 0: as it is. See `HostedModel`."""

    ingress: str
    known: int | None
    load: int = 0


_question = msgspec.msgpack.Decoder(_Question)


def _horizon_ns(slo_p99_ms: float | None) -> int:
    return round((_HORIZON_WITHOUT_SLO_MS if slo_p99_ms is None else slo_p99_ms) / 2 * 1e6)


async def _nothing() -> ClientsWish:
    return ClientsWish()


def _about(outputs: Tensors) -> dict[str, Any]:
    """What is told beside a part, or in its place."""
    if isinstance(outputs, EarlyFailure):
        error = cast(GatewayError, outputs.error)
        return {"error": type(error).__name__, "message": error.message}
    return {"last": isinstance(outputs, LastPart)}


def _node_address() -> str:
    worker: Any = ray._private.worker.global_worker
    return str(worker.node_ip_address)


class Terms(TypedDict):
    """What may change while a replica runs, as Serve's user_config.

    slo_p99_ms: of the model; None: it has none. drain_s: how long the end waits for batches, once nobody attends.
    """

    usd_per_hour: float | None
    slo_p99_ms: float | None
    drain_s: float


class Replica:
    """The class Serve runs. Everything on the replica's one event loop; `run` and `attend` are called by `RemoteRunner`."""

    _closed = False  # also where __init__ did not get to the end

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: ModelSection,
        backend: Backend,
        declared: ModelSpec,
        content: str,
        speech: Speech | None = None,
        channel_host: str = "",
        *,
        metrics_dir: Callable[[], Path] | None = None,
        tracing: Tracing | None = None,
        asked: Callable[[], Awaitable[ClientsWish]] = _nothing,
    ) -> None:
        """content: digest of what this replica serves, which tells ingresses of one configuration from those of another.

        speech: how this process logs; None: that is left as it is. channel_host: where batches come in from other nodes; empty
        means the address that the node has in the cluster. metrics_dir: makes where the processes of this node share what they
        count, and gives its path; None: nothing is counted. asked: tells what clients want.
        """
        outlive_signals()
        if speech is not None:
            set_up(speech, guest=True)
            never_raise()
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(self._loop)
        self._model = model
        self._content = content
        self._drain_s: float | None = None  # `reconfigure` tells it
        self._name = f"{model.name}:{model.version}/{backend.label}"
        self._tracer = open_tracer(tracing, os.environ)
        self._running: set[AskedBatch] = set()
        self._early: deque[EarlyBatch] = deque()
        horizon_ns = _horizon_ns(model.slo.p99_ms if model.slo else None)
        self._attendance = Attendance(
            horizon_ns, self._clock, sessions=lambda: self._hosted.sessions, count=self._count_all_spent
        )
        self._teller = AccountTeller()
        self._channel = ChannelServer(self._begin, self._attendance.let_in, self._teller.keep)
        self._channel_host = channel_host
        # since the last report to the autoscaler
        self._busy_s = 0.0
        self._all_busy_s = 0.0  # ever
        self._counted_s = self._reported_s = time.monotonic()
        new_pool = functools.partial(WorkerPool, backend, declared, name=self._name, clock=self._clock)
        self._hosted = HostedModel(new_pool, self._name, self._sessions_changed)
        self._cost: Cost | None = None
        self._publishing: asyncio.Task[None] | None = None
        if metrics_dir is not None:
            self._publish(model, backend, metrics_dir)
        wish = await asked()
        if model.load_at_start and not wish.unloaded:
            await self._hosted.open(wish.number)
            if (await asked()).unloaded:  # meanwhile: no ingress knew of this replica
                await self._hosted.free(lambda: self._attendance.empty)

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
        asked = _question.decode(question)
        ingress, attendance = asked.ingress, self._attendance
        attendance.enter(ingress, asked.known)
        try:
            fault = await self._hosted.load(asked.load)
            if not fault:
                await attendance.news(ingress, asked.known)
        except asyncio.CancelledError:  # the connection has ended
            attendance.leave(ingress)
            raise
        if fault:
            attendance.leave(ingress)  # it does not use what others may still do
        else:
            attendance.answered(ingress)
        slots, standing = attendance.slots(ingress), attendance.standing(ingress)
        return attend_answer(slots, self._content, self._hosted.spec, fault, standing)

    async def want(self, question: bytes) -> bytes:
        """An ingress that has no channel, and no slot, tells how many batches wait there."""
        ingress, batches = _wish.decode(question)
        self._attendance.wanted(ingress, batches)
        return b""

    async def release(self, ingress: bytes) -> bytes:
        """An ingress has unloaded the model: if no other attends, return when its memory is free."""
        self._attendance.forget(ingress.decode())
        await self._hosted.free(lambda: self._attendance.empty)
        return b""

    # called by Serve

    async def reconfigure(self, terms: Terms) -> None:
        """Once after the start, and when they change."""
        self._drain_s = terms["drain_s"]
        self._attendance.leases.horizon_ns = _horizon_ns(terms["slo_p99_ms"])
        if self._cost is not None:
            self._cost.reprice(terms["usd_per_hour"], time.monotonic_ns())

    async def check_health(self) -> None:
        """Serve replaces a replica whose check fails, or does not answer because the loop is stuck."""
        if not self._hosted.pool.available:
            raise BackendUnreachable(f"{self._name}: all sessions are lost and cannot be rebuilt")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Batches that ran at once on average since the last report, and batches that wait at the ingresses."""
        self._count_busy()
        now_s = time.monotonic()
        elapsed_s, self._reported_s = now_s - self._reported_s, now_s
        busy_s, self._busy_s = self._busy_s, 0.0
        self._attendance.deal()  # or what an ingress wanted, and does not need any more, would count
        queued = sum(lease.wants for lease in self._attendance.leases.of.values())
        return {"busy": busy_s / max(elapsed_s, 1e-6), "queued": queued}

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        # Serve awaits what this returns, after the last call has been answered; then the interpreter calls it as well.
        if self._closed:
            return None
        return self._end()

    async def _end(self) -> None:
        """Serve counts its own calls, and has waited for them: wait for what came by channels, then close."""
        try:
            await asyncio.wait_for(self._channel.drained(), self._drain_s)
        except TimeoutError:
            log.warning("%s: ends, although batches still run after %s s", self._name, self._drain_s)
        await self.close()

    async def close(self) -> None:
        """End the sessions; nobody waits any more for what they may run. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._attendance.close()
            self._begin_early()
            await self._hosted.close()  # for seconds: meanwhile ingresses come to be told what it costs
            await self._channel.close()
            if self._tracer is not None:
                await self._loop.run_in_executor(None, self._tracer.close, _TRACES_SENT_S)
            if self._publishing is not None:  # an application's files are removed as soon as its replicas have closed
                self._publishing.cancel()
                await asyncio.wait((self._publishing,))
                self._metrics.flush()

    # what it costs

    def _publish(self, model: ModelSection, backend: Backend, directory: Callable[[], Path]) -> None:
        """Tell the ingresses of this node, or one of another, what the replica costs, until it closes: so long it is paid."""
        try:
            self._metrics = Metrics((model,), directory=directory(), role="replica", session_pids=living_pids)
        except (ConfigError, OSError) as exc:  # batches run all the same
            log.warning("%s: what this replica costs is not counted: %s", self._name, exc)
            return
        if self._tracer is not None:
            self._metrics.watch_spans(self._tracer.spans)
        self._cost = cost = self._metrics.cost(model.name, model.version, backend.label, backend.usd_per_hour, backend.sessions)
        cost.measure(self._busy_ns)
        cost.hold()
        self._metrics.divide(functools.partial(self._teller.divide, lambda: self._metrics.ingress_lives))
        self._publishing = self._loop.create_task(self._metrics.keep_publishing(_PUBLISH_S))

    def _busy_ns(self) -> int:
        self._count_busy()
        return round(self._all_busy_s * 1e9)

    # batches

    def _begin(self, frame: Buffer, answer: Answer, part: Answer | None = None) -> Running:
        """Run one batch. `answer` is called once, also for an error: that is data, so that no class has to cross.

        part: gets the parts of the answer before; None: they cannot be sent.
        """
        received_ns = self._clock.now_ns()

        def ended(execution: Execution) -> None:
            answer(self._answer_of(execution, received_ns))

        return self._guarded(functools.partial(self._submit, frame, received_ns, ended, part), received_ns, ended)

    def _guarded(self, begin: Callable[[], Running], received_ns: int, ended: Callable[[Execution], None]) -> Running:
        try:
            return begin()
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
            "begun": execution.begun,
            "refused": execution.refused,
            "trace": trace,
        }
        return encode_frame({}, {**times, "error": type(fault).__name__, "message": fault.message, **verdict})

    def _unsent(self, exc: Exception) -> BackendFailed:
        return BackendFailed(f"{self._name}: outputs that cannot be sent: {words_of(exc, traced=True)}")

    def _submit(self, frame: Buffer, received_ns: int, on_end: Callable[[Execution], None], part: Answer | None) -> Running:
        inputs, extra = decode_frame(frame)
        self._check_parts(extra.get("in_parts", False), part)  # an ingress of an older version does not say
        if self._hosted.pool.free_slots:
            return self._start(inputs, extra, received_ns, on_end, part)
        begin = functools.partial(self._start, inputs, extra, received_ns, on_end, part)
        early = EarlyBatch(functools.partial(self._guarded, begin, received_ns, on_end), on_end)
        self._early.append(early)
        self._begin_early()
        return Running(functools.partial(self._cancel_early, early), early.taken)

    def _begin_early(self) -> None:
        """Begin what came early as sessions get free, before their slots are leased; give it back where none lives any more."""
        while self._early and (self._closed or self._hosted.pool.free_slots or not self._hosted.pool.busy):
            early = self._early.popleft()
            if self._hosted.pool.free_slots and not self._closed:
                early.running = early.begin()
            else:
                now_ns = self._clock.now_ns()
                error = BackendUnreachable(f"{self._name}: the session that the batch was for is lost")
                early.on_end(Execution(now_ns, now_ns, error=error, session_lost=True, begun=False))

    def _cancel_early(self, early: EarlyBatch) -> None:
        if early.running is not None:
            early.running.cancel()
        elif early in self._early:
            self._early.remove(early)
            now_ns = self._clock.now_ns()
            error = Cancelled(f"{self._name}: the batch was cancelled before it was begun")
            early.on_end(Execution(now_ns, now_ns, error=error))

    def _sessions_changed(self) -> None:
        self._begin_early()
        self._attendance.deal()

    def _start(
        self,
        inputs: Tensors,
        extra: Mapping[str, Any],
        received_ns: int,
        on_end: Callable[[Execution], None],
        part: Answer | None,
    ) -> Running:
        now_ns = self._clock.now_ns()
        wants = extra["left_rows"] / max(1, extra["rows"])
        lease = self._attendance.leases.begin(extra["ingress"], wants, now_ns, astray=part is None)
        asked = AskedBatch(
            inputs=inputs,
            told=extra["parameters"],
            on_end=on_end,
            part=part if self._hosted.spec.decoupled else None,
            pool=self._hosted.pool,
            lease=lease,
            counted_ns=now_ns,
            astray=part is None,
        )
        if self._tracer is not None and "trace" in extra:
            asked.trace = received(extra["trace"], self._tracer.ended, received_ns)
        self._count_busy()
        self._running.add(asked)
        self._hosted.pool.start(asked, self._ended, None if asked.part is None else self._part_made)
        self._attendance.deal()
        return Running(functools.partial(self._hosted.pool.cancel, asked), functools.partial(self._hosted.pool.taken, asked))

    def _check_parts(self, expected: bool, part: Answer | None) -> None:
        """Raises: InternalError, if its ingress cannot get the answer as the model gives it."""
        if self._hosted.spec.decoupled and part is None:
            raise InternalError(
                f"{self._name}: the model answers in parts, which a call of Serve's cannot carry, only a channel"
            )
        if expected != self._hosted.spec.decoupled:
            here, there = ("in parts", "at once") if self._hosted.spec.decoupled else ("at once", "in parts")
            raise InternalError(
                f"{self._name}: the model answers {here}, its ingress expects that it does {there}: load it again"
            )

    def _part_made(self, asked: AskedBatch, outputs: Tensors) -> None:
        if asked.fault is not None:
            return
        assert asked.part is not None
        try:
            pieces = encode_frame(outputs, _about(outputs))
            check_size(pieces)
            asked.part(pieces)
        except Exception as exc:
            asked.fault = self._unsent(exc)
            asked.pool.cancel(asked)

    def _ended(self, asked: AskedBatch, execution: Execution) -> None:
        self._count_busy(ended=1)
        self._running.discard(asked)
        now_ns = self._clock.now_ns()
        self._count_spent(asked, now_ns)
        took_ns = execution.finished_ns - execution.started_ns
        self._attendance.leases.end(asked.lease, took_ns, now_ns, astray=asked.astray)
        self._sessions_changed()
        if asked.fault is not None:
            execution = msgspec.structs.replace(execution, error=asked.fault)
        asked.on_end(execution)
        if asked.trace is not None:
            ended_ns = self._clock.now_ns()
            run_ended(asked.trace, self._name, execution.started_ns, execution.finished_ns, ended_ns, execution.error)

    def _count_busy(self, *, ended: int = 0) -> None:
        """Add the time since the last call, in which nothing changed. ended: batches that the pool has just ceased to count."""
        now_s = time.monotonic()
        busy_s = (self._hosted.sessions[1] + ended) * (now_s - self._counted_s)
        self._busy_s += busy_s
        self._all_busy_s += busy_s
        self._counted_s = now_s

    def _count_spent(self, asked: AskedBatch, now_ns: int) -> None:
        """Add what a batch took since it was counted last: it may run for longer than leases stand."""
        asked.lease.spent_ns += now_ns - asked.counted_ns
        asked.counted_ns = now_ns

    def _count_all_spent(self, now_ns: int) -> None:
        for asked in self._running:
            self._count_spent(asked, now_ns)
