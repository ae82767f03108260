"""Sends the requests of one model to its lanes, as the router decides.

A request is in one lane at a time. If that lane fails it, or gives it up, it is submitted once more to another that may stand
in for it, has room and is predicted to be in time; whatever the second one that runs it answers is the answer. Who is to blame
for a failed request shows there: served elsewhere, it was the lane; failed elsewhere as well, it was the request. A lane that
refuses it, or gives it up before it has run, has not had it.

Copies are requests of their own: inputs copied (a client may reuse a shared memory region as soon as it is answered), lowest
priority, answers dropped. None of what becomes of them reaches a caller.

A backend that scales to zero is woken by what is sent to it, and by what is refused because nothing is in time. How long it
then took to start is its cold start from there on.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from gateway.batching.batch import Batch
from gateway.batching.queue import LOWEST_PRIORITY, deadline_of
from gateway.batching.recording import Ring
from gateway.clock import Clock
from gateway.config import Backend, ModelSection
from gateway.engine.lane import Lane
from gateway.engine.metrics import Metrics
from gateway.engine.pair import Pair
from gateway.engine.place import LanePlace, OnAnswer, OnAnswerPart, Place
from gateway.engine.runner import Execution
from gateway.errors import BackendFailed, BackendUnreachable, DeadlineExceeded, GatewayError, InVain, Overloaded, Unavailable
from gateway.routing.health import Health
from gateway.routing.policies import POLICIES, Candidate, Route
from gateway.routing.recording import RecordedRouter
from gateway.routing.router import Copy, Router
from gateway.types import InferRequest, InferResponse

_LOOK_LEAST_NS: Final = 1_000_000
_LOOK_MOST_NS: Final = 50_000_000

log = logging.getLogger(__name__)


class Dispatcher:
    """See the module. On the event loop's thread. Life: made with open lanes, closed before or after them."""

    def __init__(
        self, lanes: Sequence[Lane], model: ModelSection, metrics: Metrics, clock: Clock, *, seed: int = 0, processes: int = 1
    ) -> None:
        """lanes: one per backend of the model, in any order. seed: of this process, unlike others that serve the same model.

        processes: that do.
        """
        slo_ns = round(model.slo.p99_ms * 1e6) if model.slo else None
        self._slo_ns = slo_ns
        self._model = model
        self._processes = processes
        self._clock = clock
        self._metrics = metrics.routing(model.name, model.version)
        self._lanes: dict[Candidate, Lane] = {}
        for lane in lanes:
            self._observed(lane)
        policy = POLICIES[model.routing.policy](model.routing, slo_ns, seed)
        candidates = tuple(self._lanes)
        ring_bytes = int(model.batching.record_mib * 2**20 / (len(model.backends) + 1))
        chooses = len(model.backends) > 1 or any(candidate.to_zero for candidate in candidates)  # the only one refuses at zero
        self.router = (
            RecordedRouter(candidates, policy, model.routing.ejection, slo_ns, ring=Ring(ring_bytes))
            if ring_bytes and chooses
            else Router(candidates, policy, model.routing.ejection, slo_ns)
        )
        # Not where others are missing: what is sent to it now is to be moved once they have joined.
        self._only = lanes[0] if len(model.backends) == 1 else None
        self._rescue_due = False
        self._rescue_every_ns = min(max((slo_ns or _LOOK_MOST_NS) // 16, _LOOK_LEAST_NS), _LOOK_MOST_NS)
        self._starting: set[Candidate] = set()  # were woken
        self._hung: set[Candidate] = set()  # the last execution of one request alone failed there, after too long

    def __repr__(self) -> str:
        return f"<Dispatcher {self._model.name}:{self._model.version}: {self.router}>"

    def submit(self, request: InferRequest, on_answer: OnAnswer, on_answer_part: OnAnswerPart | None = None) -> Place:
        """Hand a request to a lane. on_answer gets its one answer or error, later. on_answer_part: as in `Lane.submit`.

        Raises: what `Lane.submit` does; then on_answer is not called.
        """
        if self._only is not None and not self._only.runner.cold:
            return self._only.submit(request, on_answer, on_answer_part)
        now_ns = self._clock.now_ns()
        route = self.router.route(request, now_ns)
        if route.candidate is None:
            error = self._shed(request, route, now_ns)
            try:
                for copy in self.router.lessons():
                    self._send_copy(copy, None, request, now_ns)
            except BaseException:
                log.exception("a refused request of model %s has no copies", request.model)
            try:
                raise error
            finally:
                del error  # or it and this frame would hold each other, and the request
        sent = _Sent(self, request, on_answer, on_answer_part, route.candidate)
        try:
            sent.place = self._lanes[route.candidate].submit(request, sent, sent.part)
        except (Unavailable, BackendFailed) as exc:
            if not self.fall_back(sent, now_ns, ran=isinstance(exc, BackendFailed), busy=isinstance(exc, Overloaded)):
                raise
        else:
            self._sent_to(route.candidate, route.reason, now_ns)
        try:
            if not self._rescue_due:
                self._rescue_later(now_ns)
            for copy in self.router.copies(request, now_ns):
                if copy.candidate is not sent.candidate:
                    self._send_copy(copy, sent, request, now_ns)
        except BaseException:
            log.exception("a request of model %s has no copies", request.model)
        return sent

    @property
    def ring(self) -> Ring | None:
        """What routing is recorded in; None: it is not."""
        return self.router.ring if isinstance(self.router, RecordedRouter) else None

    def join(self, lane: Lane) -> None:
        """Send requests to a further lane of the model as well."""
        self.router.join(self._observed(lane))

    def _observed(self, lane: Lane) -> Candidate:
        backend = next(backend for backend in self._model.backends if backend.label == _label(lane))
        candidate = _candidate(lane, backend, self._model, self._processes)
        self._lanes[candidate] = lane
        lane.observer = _Observer(self, candidate)
        return candidate

    def close(self) -> None:
        """Stop counting; what is in the lanes is still answered."""
        self._starting.clear()
        self._hung.clear()
        for candidate, lane in self._lanes.items():
            lane.observer = None
            if candidate.health.ejected:
                self._metrics.back(candidate.label)
        self._metrics.close()

    def explain(self, rows: int = 1) -> dict[str, Any]:
        """Why a request of so many rows, if ragged of the least length, would go where if it came now. As JSON can hold it."""
        now_ns = self._clock.now_ns()
        padded = self._model.ragged.pad if self._model.ragged else ()
        inputs = {name: np.broadcast_to(np.zeros(()), (rows, 1)) for name in padded}
        request = InferRequest(self._model.name, self._model.version, "", inputs, rows, now_ns)
        route = self.router.explain(request, now_ns)
        return {
            "model": self._model.name,
            "version": self._model.version,
            "rows": rows,
            "slo_ms": self._slo_ns / 1e6 if self._slo_ns else None,
            "policy": self._model.routing.policy,
            "spill_share": self._model.routing.spill_share,
            **route,
        }

    # what a request's life asks

    def fall_back(self, sent: "_Sent", now_ns: int, *, ran: bool, busy: bool) -> bool:
        """Submit a request that its lane did not serve to another, if there is one that can.

        ran: there, which it may do in one more, unless of a sequence; or its inputs have ended a session there. Else, in its
        second, it leaves that only if down, and for none it was in: under overload all would move. busy: it has too much to do.
        """
        request, left, was_in = sent.request, sent.candidate, sent.place is not None
        stays = (sent.failed is not None or (was_in and request.of_sequence)) if ran else bool(sent.left) and self._works(left)
        if stays or now_ns > deadline_of(request, self._slo_ns):
            return False
        request.plain = False  # it does not come there as it arrived
        full = [] if ran else [*sent.left]
        candidate = self._place_elsewhere(sent, now_ns, [*full, left] if busy else full)
        if candidate is None:
            return False
        sent.candidate = candidate
        if was_in:
            sent.left += (left,)
        if ran:
            sent.failed, request.ran = left, was_in
        self._sent_to(candidate, "fallback", now_ns)
        return True

    def _works(self, candidate: Candidate) -> bool:
        return self._lanes[candidate].runner.lives and not candidate.health.ejected

    def _place_elsewhere(self, sent: "_Sent", now_ns: int, full: list[Candidate]) -> Candidate | None:
        """Submit a request to the first that takes it of those that may stand in for its lane, as the router ranks them.

        full: who is known to have no room, or is not to be asked.
        """
        request, failed = sent.request, sent.candidate
        full += [
            candidate
            for candidate, lane in self._lanes.items()
            if candidate.label in failed.equivalents and not lane.batcher.has_room(request)
        ]
        while (candidate := self.router.route(request, now_ns, failed=failed, full=full).candidate) is not None:
            try:
                sent.place = self._lanes[candidate].submit(request, sent, sent.part)
            except Unavailable:
                full.append(candidate)
            except GatewayError:
                return None
            else:
                return candidate
        return None

    def _sent_to(self, candidate: Candidate, reason: str, now_ns: int) -> None:
        """Account for a request that is in a lane now: what fails here must not have it answered by us as well."""
        try:
            self._metrics.routed(candidate.label, reason)
            self._wake(candidate, now_ns)
        except BaseException:
            log.exception("a request sent to %s could not be accounted for", self._name(candidate))

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def _wake(self, candidate: Candidate, now_ns: int) -> None:
        """Something was sent to a candidate, or would have been: if it is cold, it is to start."""
        runner = self._lanes[candidate].runner
        if not runner.cold:
            return
        runner.wake()
        self.router.woken(candidate, now_ns)
        self._starting.add(candidate)
        if not self._rescue_due:
            self._rescue_later(now_ns)

    def _rescue_later(self, now_ns: int) -> None:
        self._rescue_due = True
        self._clock.call_at(now_ns + self._rescue_every_ns, self._rescue)

    def _rescue(self) -> None:
        """Free what waits behind a batch that takes longer than predicted, while it can still be in time elsewhere.

        And note which cold backends have started, which no request may be there to see.
        """
        self._rescue_due = False
        now_ns = self._clock.now_ns()
        for candidate in [candidate for candidate in self._starting if not self._lanes[candidate].runner.cold]:
            self._starting.discard(candidate)
            self.router.lives(candidate, now_ns)
        pending = [lane for lane in self._lanes.values() if lane.pending]
        for lane in pending:
            lane.hand_over(now_ns)
        if pending or self._starting:
            self._rescue_later(now_ns)

    def blame(self, candidate: Candidate) -> None:
        """A request failed, and for no fault of its own."""
        self.failed(candidate, self._clock.now_ns(), hung=candidate in self._hung)

    # what lanes tell

    def failed(self, candidate: Candidate, now_ns: int, *, hung: bool) -> None:
        if self.router.failed(candidate, now_ns, hung=hung):
            self._ejected(candidate, now_ns, hung=hung)

    def failed_alone(self, candidate: Candidate, *, hung: bool) -> None:
        """One request alone failed. Whether after too long is kept until `blame` asks, or the next one fails."""
        if hung:
            self._hung.add(candidate)
        else:
            self._hung.discard(candidate)

    def executed(self, candidate: Candidate, batch: Batch, busy_ns: int, now_ns: int, *, streamed_ns: int = 0) -> None:
        if candidate.worker_usd_per_hour:
            self._metrics.busy(candidate.label, candidate.worker_usd_per_hour * busy_ns / 3600e9)
        copied = batch.parts[0].request.copied and all(part.request.copied for part in batch.parts)
        if self.router.executed(
            candidate, batch.rows, busy_ns, batch.expected_ns, now_ns, streamed_ns=streamed_ns, copied=copied
        ):
            self._ejected(candidate, now_ns)

    def takes_over(self, request: InferRequest, on_answer: OnAnswer, now_ns: int) -> bool:
        return on_answer.moves(now_ns) if isinstance(on_answer, _Sent) else request.copied

    def _ejected(self, candidate: Candidate, now_ns: int, *, hung: bool = False) -> None:
        log.warning("%s %s %s", self._name(candidate), "hung, and is" if hung else "is", candidate.health)
        self._metrics.ejected(candidate.label)
        self._lanes[candidate].hand_over_all(now_ns)

    def _name(self, candidate: Candidate) -> str:
        return self._lanes[candidate].name

    def _shed(self, request: InferRequest, route: Route, now_ns: int) -> GatewayError:
        if route.reason == "down":
            self._metrics.routed("", route.reason)
            return BackendUnreachable(f"model '{request.model}': no backend has a live session", retry_after_s=1.0)
        deadline_ns = deadline_of(request, self._slo_ns)
        if deadline_ns < now_ns:
            return DeadlineExceeded(f"model '{request.model}': the request came after its deadline")
        self._metrics.routed("", route.reason)
        over_s = max(0.0, (now_ns + route.eta_ns - deadline_ns) / 1e9)
        for candidate in self._lanes:
            if not candidate.shadow_share:
                self._wake(candidate, now_ns)
        if all(lane.runner.cold for lane in self._lanes.values()):
            message = f"model '{request.model}': is starting, an answer would come {over_s:.1f} s after the deadline"
            return BackendUnreachable(message, over_s)
        message = f"model '{request.model}': overloaded, every backend would answer after the deadline"
        return Overloaded(f"{message}, the first {over_s * 1e3:.0f} ms late", over_s)

    # copies

    def _send_copy(self, copy: Copy, sent: "_Sent | None", request: InferRequest, now_ns: int) -> None:
        """sent: None: the request itself was refused."""
        inputs = {name: array.copy() for name, array in request.inputs.items()}
        copied = InferRequest(
            request.model,
            request.version,
            request.id,
            inputs,
            request.rows,
            now_ns,
            outputs=request.outputs,
            parameters=dict(request.parameters),
            priority=LOWEST_PRIORITY,
            shape_key=request.shape_key,
            copied=True,
        )
        pair = Pair(self._count_pair(copy), self._model.routing.shadow_tolerance) if copy.why == "shadow" else None

        def done(outcome: InferResponse | GatewayError | None) -> None:
            ended_ns = self._clock.now_ns()
            ok = not isinstance(outcome, GatewayError)
            was_ejected = copy.candidate.health.ejected
            if isinstance(outcome, BackendFailed):
                self.blame(copy.candidate)
            self.router.returned(copy, ended_ns, ended_ns - now_ns, ok=ok)
            if was_ejected and not copy.candidate.health.ejected:
                log.warning("%s is back", self._name(copy.candidate))
                self._metrics.back(copy.candidate.label)
            if pair is not None and isinstance(outcome, InferResponse):
                pair.of_copy(outcome)
            else:
                self._metrics.copied(copy.candidate.label, copy.why, "ok" if ok else "failed")

        try:
            self._lanes[copy.candidate].submit(copied, done)
        except GatewayError:
            self._metrics.copied(copy.candidate.label, copy.why, "refused")
            return
        self.router.sent(copy, now_ns)
        self._wake(copy.candidate, now_ns)
        if pair is not None and sent is not None:
            sent.pairs += (pair,)

    def _count_pair(self, copy: Copy) -> Callable[[str], None]:
        def count(result: str) -> None:
            self._metrics.copied(copy.candidate.label, copy.why, result)

        return count


class _Observer:
    """The observer of one lane."""

    def __init__(self, dispatcher: Dispatcher, candidate: Candidate) -> None:
        self._dispatcher = dispatcher
        self._candidate = candidate

    def executed(self, batch: Batch, execution: Execution, now_ns: int, failed: bool) -> None:
        busy_ns = now_ns - batch.closed_ns
        if not failed:
            streamed_ns = 0 if execution.first_part_ns is None else execution.streamed_ns
            self._dispatcher.executed(self._candidate, batch, busy_ns, now_ns, streamed_ns=streamed_ns)
            return
        hung = self._dispatcher.router.hung(busy_ns - execution.streamed_ns, batch.expected_ns)
        if execution.session_lost or (hung and len(batch.parts) > 1):
            self._dispatcher.failed(self._candidate, now_ns, hung=hung)
        elif len(batch.parts) == 1:  # the request may be to blame: what becomes of it elsewhere tells
            self._dispatcher.failed_alone(self._candidate, hung=hung)
        # Else one of several requests may be, which their retries tell.

    def cancelled(self, batch: Batch, now_ns: int) -> None:
        # That clients give up says nothing of a backend, unless it had stopped working: else it would look idle, and get more.
        if batch.expected_ns and self._dispatcher.router.hung(now_ns - batch.closed_ns, batch.expected_ns):
            self._dispatcher.failed(self._candidate, now_ns, hung=True)

    def takes_over(self, request: InferRequest, on_answer: OnAnswer, now_ns: int) -> bool:
        return self._dispatcher.takes_over(request, on_answer, now_ns)


class _Sent:
    """A caller's request that is in a lane, at `place`. left: where it was before. failed: where it has run before."""

    __slots__ = (
        "_begun", "_blamed", "_dispatcher", "_moved", "_on_answer", "_on_answer_part", "candidate", "failed", "left", "pairs",
        "place", "request",
    )  # fmt: skip

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: InferRequest,
        on_answer: OnAnswer,
        on_answer_part: OnAnswerPart | None,
        candidate: Candidate,
    ) -> None:
        self._dispatcher = dispatcher
        self._on_answer = on_answer
        self._on_answer_part = on_answer_part
        self._begun = False  # a part of its answer has left
        self._blamed: BackendFailed | None = None  # the first of them
        self._moved = False  # to another lane, and not ended in the first yet
        self.request = request
        self.candidate = candidate
        self.left: tuple[Candidate, ...] = ()
        self.failed: Candidate | None = None
        self.pairs: tuple[Pair, ...] = ()
        self.place: LanePlace | None = None

    def cancel(self) -> None:
        if self.place is not None:
            self.place.cancel()

    def taken(self) -> None:
        if self.place is not None:
            self.place.taken()

    def part(self, response: InferResponse) -> None:
        """A part of the lane's answer, which is the caller's from here on."""
        self._begun = True
        assert self._on_answer_part is not None
        self._on_answer_part(response)

    def moves(self, now_ns: int) -> bool:
        """Have another lane take it before its lane gives it up, whose end is the next to come."""
        if self._begun:
            return False
        self._moved = self._dispatcher.fall_back(self, now_ns, ran=self._ran, busy=True)
        return self._moved

    @property
    def _ran(self) -> bool:
        return self.place is not None and self.place.ran

    def __call__(self, outcome: InferResponse | GatewayError | None) -> None:
        """The lane's answer: the caller's, unless another lane will give one."""
        if self._moved:
            self._moved, self._blamed = False, self._blamed or (outcome if isinstance(outcome, BackendFailed) else None)
            return
        try:
            if isinstance(outcome, (BackendFailed, BackendUnreachable, InVain, Overloaded)):
                outcome = self._falls_back(outcome)
                if outcome is None:
                    return
            elif self._blamed and self.failed is not None and not isinstance(outcome, GatewayError):
                self._dispatcher.blame(self.failed)
            for pair in self.pairs:
                if outcome is not None:
                    pair.of_caller(outcome)
        except BaseException:
            log.exception("the end of a request of model %s could not be accounted for", self.request.model)
        self.place = None  # or this and its place would hold each other until the cyclic collector comes
        self._on_answer(outcome)

    def _falls_back(self, outcome: BackendFailed | BackendUnreachable | InVain | Overloaded) -> GatewayError | None:
        """None: the request is with another lane now. Else what its caller is told, and who alone has failed it is blamed."""
        dispatcher, failed = self._dispatcher, outcome if isinstance(outcome, BackendFailed) else None
        ran, busy = failed is not None or self._ran, isinstance(outcome, (InVain, Overloaded))
        if not self._begun and dispatcher.fall_back(self, dispatcher.now_ns(), ran=ran, busy=busy):
            self._blamed = self._blamed or failed
            return None
        if failed is not None and self.failed is None:
            dispatcher.blame(self.candidate)
        elif self.failed is not None and self.request.ran and not ran and isinstance(outcome, Unavailable):  # which denies it
            if self._blamed is not None:
                dispatcher.blame(self.failed)
            return self._blamed or outcome.after_run()
        return outcome


def _label(lane: Lane) -> str:
    return lane.name.rsplit("/", 1)[1]


def _candidate(lane: Lane, backend: Backend, model: ModelSection, processes: int) -> Candidate:
    groups = model.routing.equivalent or (tuple(other.label for other in model.backends),)
    equivalents = {label for group in groups if backend.label in group for label in group} - {backend.label}
    return Candidate(
        backend.label,
        lane,
        Health(model.routing.ejection),
        worker_usd_per_hour=(backend.share_usd_per_hour(processes) or 0.0) / backend.sessions,
        canary_share=backend.canary_share,
        shadow_share=backend.shadow_share,
        equivalents=frozenset(equivalents),
        cold_start_ns=round(backend.cold_start_s * 1e9) if backend.cold_start_s else None,
        to_zero=backend.autoscaling is not None and backend.autoscaling.min_replicas == 0,
        learned_cold_ns=lane.runner.cold_start_ns,
    )
