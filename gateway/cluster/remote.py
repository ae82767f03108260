"""Batches to the replicas of a deployment, each to a slot known to be free.

They go by a channel of our own to each replica (`channel`); where none can be opened, by one call each to the gRPC server that
Serve runs in every replica, except those of a decoupled model, whose answers in parts only a channel can carry. Serve tells
which replicas there are (its long poll to the controller), and its gRPC server answers the calls that are not batches. Not a
`DeploymentHandle`: it costs twice the CPU of the bare call (1250 against 540 µs per call in the caller, 20 Nov 2026) and picks
the replica itself.

A replica tells by the channel how many slots it leases this ingress, as sessions come and go and other ingresses have more to
do, and is told there when one is wanted. To every replica one call `attend` is always open. It does the same where there is no
channel, and it fails the moment the replica's process ends: long before Serve
notices (about 3.5 s).

A deployment that scales to zero has no replica while it is idle. `wake` reports to Serve's controller, as a handle would, that
a request waits, until there is one; from then on the replica's own numbers tell whether it is needed. An ingress lets go of
the last one, when Serve means to stop it, once nothing has run there for a second.
"""

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    DeploymentTargetInfo,
    HandleMetricReport,
    TimeStampedValue,
)
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

from backends.base import LastPart, ModelSpec, Tensors, trace_of, words_of
from backends.early_failure import EarlyFailure
from gateway.batching.batch import Batch
from gateway.clock import Clock
from gateway.cluster.channel_connection import check_size
from gateway.cluster.link import CALL_MARGIN_S, BatchCall, KeepAccount, Link, LinkLost, NotSent, Outcome
from gateway.config import Backend
from gateway.engine.runner import Execution, OnBatchDone, OnBatchPart
from gateway.errors import (
    AlreadyExists,
    BackendFailed,
    BackendUnreachable,
    Cancelled,
    GatewayError,
    InternalError,
    InvalidArgument,
    NotFound,
    Unsupported,
    UnsupportedMediaType,
)
from gateway.tracing.batches import handed_on
from gateway.wire.frames import decode_frame, encode_frame
from gateway.wire.tensors import Buffer

# Without a replica for longer than this, what waits is refused. Serve replaces a dead one in 4 to 8 s if the model loads fast.
_EXPECT_REPLICA_S: Final = 15.0
# One that scales from zero gets as many times its usual start, if that is more.
_EXPECT_STARTS: Final = 3.0
# One that is listed sooner was there before the wish: no process starts so fast.
_THERE_S: Final = 0.3
# How often a wish for a replica is repeated: the controller forgets it after 10 s, or when it is restarted.
_WISH_S: Final = 1.0
# Nothing has run on a replica for so long: whatever still waits in an ingress would have been sent there.
_IDLE_S: Final = 1.0

_ERRORS: Final[dict[str, type[GatewayError]]] = {
    error.__name__: error
    for error in (
        BackendFailed, BackendUnreachable, Cancelled, InternalError,
        InvalidArgument, UnsupportedMediaType, NotFound, AlreadyExists, Unsupported,
    )
}  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Run:
    """A batch that a replica has. call: None, if its inputs could not be sent."""

    batch: Batch
    on_done: OnBatchDone
    on_part: OnBatchPart | None
    link: Link
    sent_ns: int
    call: BatchCall | None = None
    first_part_ns: int | None = None

    def part(self, outputs: Tensors, now_ns: int) -> None:
        """Hand on what comes before the answer."""
        if isinstance(outputs, EarlyFailure):
            outputs.first_part_ns = self.first_part_ns
        else:
            self.first_part_ns = self.first_part_ns or now_ns
        assert self.on_part is not None
        self.on_part(self.batch, outputs)


class RemoteRunner:
    """A `BatchRunner` over the replicas of one deployment. See the module."""

    def __init__(
        self,
        backend: Backend,
        deployment: str,
        application: str,
        *,
        content: str,
        name: str,
        clock: Clock,
        load: int = 0,
        ending: Callable[[], bool] = lambda: False,
        keep_account: KeepAccount = lambda token, host, port: None,
        leaving: Callable[[str], None] = lambda replica: None,
    ) -> None:
        """deployment, application: Serve's names. content: as `Replica` has it. name: "model:version/backend", for messages.

        load: the number of the client's load that this is for; 0: of none. Replicas read the model anew for it, each once.
        ending: whether this process ends when close is called; if not, the model is unloaded, and its replicas are told.
        leaving: gets the name of the actor of a replica that Serve does not list any more, or that this process ends before.
        """
        self.on_change: Callable[[], None] = lambda: None
        self.cold_start_ns: int | None = None
        self._backend = backend
        self._deployment = DeploymentID(deployment, application)
        self._content = content
        self._name = name
        self._clock = clock
        self._ending = ending
        self._keep_account = keep_account
        self._leaving = leaving
        self._load = load
        self._to_zero = backend.autoscaling is not None and backend.autoscaling.min_replicas == 0
        self._ingress = uuid.uuid4().hex  # whom the replicas count
        # from open on
        self._loop: asyncio.AbstractEventLoop
        self._opened: asyncio.Future[None]
        self._spec: ModelSpec | None = None
        self._controller: Any  # an actor handle
        self._poll: LongPollClient
        self._links: dict[str, Link] = {}
        self._usable: list[Link] = []
        self._given_up = False
        self._aborted = False
        self._closing = False
        self._giving_up: asyncio.TimerHandle | None = None
        self._wishing: asyncio.Task[None] | None = None
        self._idle_check: asyncio.TimerHandle | None = None
        self._running: dict[Batch, _Run] = {}
        self._drained = asyncio.Event()
        self._retired: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<RemoteRunner {self._name}: {[*self._links.values()]}>"

    @property
    def free_slots(self) -> int:
        return sum(link.free for link in self._usable)

    @property
    def sessions(self) -> int:
        return sum(link.sessions for link in self._links.values())

    @property
    def slots(self) -> int:
        return sum(link.slots for link in self._usable)

    @property
    def available(self) -> bool:
        return not (self._given_up or self._aborted)

    @property
    def lives(self) -> bool:
        return any(link.up and link.standing.lives for link in self._usable)

    @property
    def cold(self) -> bool:
        return self._to_zero and not self._usable

    def want(self) -> None:
        for link in self._usable:
            link.want()

    def try_await_begin(self, begun: Callable[[], None]) -> bool:
        return False  # a replica's interpreter is not ours

    def wake(self) -> None:
        if self._to_zero and self._wishing is None:
            self._wishing = self._loop.create_task(self._wish())
        if not self._usable:
            self._expect_replica()

    async def open(self) -> ModelSpec:
        """Wait for a replica, which tells the spec; for a client's load, until all have tried.

        Raises: BackendUnreachable, if Serve has given the deployment up; BackendFailed, if no replica can load the model again.
        """
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.create_future()
        self._controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        self._poll = LongPollClient(
            self._controller,
            {(LongPollNamespace.DEPLOYMENT_TARGETS, self._deployment): self._targets_changed},  # type: ignore[dict-item]  # its str is narrower than what ray passes
            call_in_event_loop=self._loop,
            client_id=f"gateway:{self._ingress}",
        )
        self.wake()
        try:
            await self._opened
        except BaseException:
            await self.close()
            raise
        assert self._spec is not None
        return self._spec

    def start(self, batch: Batch, on_done: OnBatchDone, on_part: OnBatchPart | None = None) -> None:
        link = max(self._usable, key=lambda link: link.free / link.slots if link.free else 0.0)
        link.fill(batch.left_rows)
        if not link.listed:
            self.wake()  # a successor: Serve no longer counts what runs there
        run = self._running[batch] = _Run(batch, on_done, on_part, link, self._clock.now_ns())
        timeout_s = self._backend.hang_timeout_s + CALL_MARGIN_S
        parts = functools.partial(self._part, run) if on_part is not None else None
        try:
            run.call = link.start(self._frame_of(run), timeout_s, functools.partial(self._ended, run), parts)
        except Exception as exc:  # inputs that cannot be sent
            self._loop.call_soon(self._ended, run, exc)

    def taken(self, batch: Batch) -> None:
        run = self._running.get(batch)
        if run is not None and run.call is not None:
            run.call.taken()

    def cancel(self, batch: Batch) -> None:
        run = self._running.get(batch)
        if run is not None and run.call is not None:
            run.call.cancel()

    def abort(self) -> None:
        """Wait no longer for the replicas, which end what they have early where they can."""
        self._aborted = True
        for run in self._running.values():
            if run.call is not None:
                run.link.give_up(run.call, "was given up before it has answered")

    async def close(self) -> None:
        self._poll.stop()
        for timer in (self._giving_up, self._idle_check):
            if timer is not None:
                timer.cancel()
        if self._wishing is not None:
            self._wishing.cancel()
        if self._ending():
            for link in self._links.values():
                self._leaving(link.replica.actor_name)
        try:
            if self._running:
                self._closing = True
                await self._drained.wait()
            links, self._links = self._links, {}
            unloaded = not self._ending()
            await asyncio.gather(*self._retired, *(link.close(release=unloaded) for link in links.values()))
        except asyncio.CancelledError:
            self.abort()
            raise

    # a batch

    def _frame_of(self, run: "_Run") -> list[Buffer]:
        """Raises: BackendFailed, if it is too large, and what joining the inputs does. Its requests are run one by one then."""
        batch = run.batch
        about: dict[str, Any] = {
            "rows": batch.padded_rows,
            "batched": batch.batched,  # for replicas of an older version
            "left_rows": batch.left_rows,
            "ingress": self._ingress,
            "parameters": batch.asked(),
            "in_parts": run.on_part is not None,
        }
        if batch.trace is not None:
            about["trace"] = handed_on(batch.trace)
        frame = encode_frame(batch.concat(kept=False), about)
        check_size(frame)
        return frame

    def _part(self, run: "_Run", frame: Buffer) -> None:
        """Raises: GatewayError or msgspec.DecodeError, if it is no frame."""
        run.part(_part_of(frame), self._clock.now_ns())

    def _ended(self, run: "_Run", outcome: Outcome) -> None:
        """Give the slot back and tell how the call ended, whatever it was that ended it."""
        del self._running[run.batch]
        run.call = None  # or the two would hold each other, and the answer, until the cyclic collector comes
        run.link.vacate()
        if self._closing and not self._running:
            self._drained.set()
        run.on_done(run.batch, self._execution_of(run, outcome))

    def _execution_of(self, run: "_Run", outcome: Outcome) -> Execution:
        received_ns = self._clock.now_ns()
        if isinstance(outcome, Exception):
            return self._failure(run, outcome, received_ns)
        try:
            return _execution(run, outcome, received_ns)
        except Exception as exc:  # a frame that is none
            return self._failure(run, exc, received_ns)

    def _failure(self, run: "_Run", outcome: Exception, received_ns: int) -> Execution:
        error: GatewayError
        lost = isinstance(outcome, LinkLost)
        if lost:
            error = BackendUnreachable(f"{self._name}: replica {run.link.replica_id}: {outcome}")
        elif isinstance(outcome, GatewayError):
            error = outcome
        else:
            error = BackendFailed(f"{self._name}: {words_of(outcome, traced=True)}")
        trace = "" if lost else trace_of(outcome)
        first_ns = run.first_part_ns
        begun = not isinstance(outcome, NotSent)
        return Execution(
            run.sent_ns, received_ns, error=error, session_lost=lost, begun=begun, trace=trace, first_part_ns=first_ns
        )

    # who is there

    def _targets_changed(self, targets: DeploymentTargetInfo) -> None:
        present = {replica.replica_id.unique_id: replica for replica in targets.running_replicas}
        for replica_id, link in self._links.items():
            if link.listed and replica_id not in present:
                self._leaving(link.replica.actor_name)
            link.listed = replica_id in present
        for replica_id, replica in present.items():
            if replica_id not in self._links:
                self._links[replica_id] = Link(
                    replica, self._ingress, self._link_changed, load=self._load, keep_account=self._keep_account
                )
        if not targets.is_available and not present:
            self._give_up()
        self._link_changed()

    def _link_changed(self) -> None:
        # A replica that Serve no longer lists is about to end, but only after the last call there, and `attend` is one. Unless
        # its successor waits for its resources it is kept in use until there is another: a rollout, or an application that is
        # being deleted while its ingresses drain, leaves no gap.
        successor = any(link.listed and self._is_ours(link) for link in self._links.values())
        for replica_id, link in list(self._links.items()):
            if not link.listed and (successor or not link.up or not self._backend.surge or self._is_idle(link)):
                task = self._loop.create_task(self._links.pop(replica_id).retire())
                self._retired.add(task)
                task.add_done_callback(self._retired.discard)
        # In a rollout each ingress keeps to the replicas of its own configuration; those of the other, if their inputs and
        # outputs are the same, are better than none.
        ours = [link for link in self._links.values() if self._is_ours(link)]
        if ours:
            self._spec = ours[0].spec
        usable = ours or [link for link in self._links.values() if link.up and link.spec == self._spec]
        self._usable = [link for link in usable if not link.no_channel] or usable
        if self._usable:
            self._given_up = False
            if self._giving_up is not None:
                self._giving_up.cancel()
                self._giving_up = None
            if self._wishing is not None and any(link.listed for link in self._usable):
                self._wishing.cancel()
                self._wishing = None
            if not self._opened.done() and (not self._load or self._all_tried()):
                self._opened.set_result(None)
        elif not self._opened.done():
            faults = [link.fault for link in self._links.values()]
            if faults and all(faults):
                self._opened.set_exception(BackendFailed(faults[0]))
        elif not self._to_zero:
            self._expect_replica()
        elif self._links:
            self.wake()  # the last one was lost, and not let go: what waits for it still does
        self._loop.call_soon(self.on_change)  # not from here: what it raises must not end an attendance

    def _all_tried(self) -> bool:
        """Whether each replica that is to stay has the model, or could not load it: else the first would get all requests."""
        return all(link.up or link.fault for link in self._links.values() if link.listed)

    def _is_idle(self, link: "Link") -> bool:
        """Whether a replica that Serve means to stop without a successor is no longer used; looks again later if it is."""
        if not self._to_zero:
            return False
        if not link.busy and self._loop.time() - link.used_s >= _IDLE_S:
            return True
        if self._idle_check is not None:
            self._idle_check.cancel()
        self._idle_check = self._loop.call_later(_IDLE_S, self._link_changed)
        return False

    async def _wish(self) -> None:
        """Have Serve start a first replica: to be cancelled when there is one."""
        woken_s = self._loop.time()
        try:
            while True:
                self._report(1.0)
                await asyncio.sleep(_WISH_S)
        finally:
            self._report(0.0)
            came_s = min((link.made_s for link in self._usable), default=woken_s)
            if came_s - woken_s > _THERE_S:
                self.cold_start_ns = round((self._loop.time() - woken_s) * 1e9)

    def _report(self, waiting: float) -> None:
        """What the handles of a deployment tell its autoscaler."""
        now_s = time.time()
        report = HandleMetricReport(
            deployment_id=self._deployment,
            handle_id=self._ingress,
            actor_id=ray.get_runtime_context().get_actor_id() or "",
            handle_source=DeploymentHandleSource.REPLICA,  # forgotten at once when this process dies
            queued_requests=[TimeStampedValue(now_s, waiting)],
            metrics={},
            timestamp=now_s,
        )
        self._controller.record_autoscaling_metrics_from_handle.remote(report)

    def _expect_replica(self) -> None:
        if self._opened.done() and self._giving_up is None and not self._given_up:
            start_s = max(self._backend.cold_start_s or 0.0, (self.cold_start_ns or 0) / 1e9) if self._to_zero else 0.0
            expected_s = max(_EXPECT_REPLICA_S, _EXPECT_STARTS * start_s)
            self._giving_up = self._loop.call_later(expected_s, self._give_up)

    def _is_ours(self, link: "Link") -> bool:
        return link.up and link.content == self._content

    def _give_up(self) -> None:
        self._given_up = True
        self._giving_up = None
        if not self._opened.done():
            self._opened.set_exception(
                BackendUnreachable(f"{self._name}: no replica of deployment {self._deployment.name} starts")
            )
        self.on_change()


def _part_of(frame: Buffer) -> Tensors:
    """What comes before an answer, as its replica tells it. Raises: GatewayError or msgspec.DecodeError, if it is no frame."""
    outputs, about = decode_frame(frame)
    if "error" in about:
        return EarlyFailure(_ERRORS.get(about["error"], InternalError)(about["message"]))
    return LastPart(outputs) if about["last"] else outputs


def _execution(run: _Run, answer: Buffer, received_ns: int) -> Execution:
    """How a run went, by what its replica answers. Raises: GatewayError or msgspec.DecodeError, if it is no frame."""
    outputs, extra = decode_frame(answer)
    # Clocks of two machines do not compare: the way is what the replica did not account for, half of it each way.
    way_ns = max(0, received_ns - run.sent_ns - extra["waited_ns"] - extra["computed_ns"])
    started_ns = received_ns - way_ns // 2 - extra["computed_ns"]
    first_part_ns = None
    if "first_part_ns" in extra:
        if run.first_part_ns is not None:  # halves are a guess; by then the first part was here
            started_ns = min(started_ns, run.first_part_ns - extra["first_part_ns"])
        first_part_ns = started_ns + extra["first_part_ns"]
    finished_ns = started_ns + extra["computed_ns"]
    if "error" in extra:
        error_class = _ERRORS.get(extra["error"], InternalError)
        return Execution(
            started_ns,
            finished_ns,
            error=error_class(extra["message"]),
            session_lost=extra["session_lost"],
            # A replica of an older version does not say:
            self_inflicted=extra.get("self_inflicted", False),
            begun=extra.get("begun", True),
            refused=extra.get("refused", False),
            trace=extra.get("trace", ""),
            first_part_ns=first_part_ns,
        )
    if run.on_part is not None:
        return Execution(started_ns, finished_ns, first_part_ns=first_part_ns)
    return Execution(started_ns, finished_ns, outputs=outputs)
