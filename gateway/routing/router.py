"""Decides for each request of one model: which backend runs it, which get a copy, and which are out.

Pure: no clock, no I/O. Whoever drives it sends requests where `route` says, and tells how executions end.

Three kinds of candidates. Regular ones share the requests by the policy. A canary gets its share of the requests, if it can
serve them in time (without any deadline: if no more than a usual batch is ahead), and no others. A shadow gets copies only.
Besides, a candidate gets one copy at a time while something is to be learned that no caller should pay for: whether an ejected
one works again ("probe"), how fast one is that has not run yet, that was found idle but too slow, or that is unused for its
price ("learn"); and one without a live session, while requests find no room elsewhere, so that whoever starts sessions sees
that they are wanted ("wake").
"""

from collections.abc import Sequence
from math import inf
from typing import Any, Final, NamedTuple

import msgspec

from gateway.batching.queue import NEVER, deadline_of
from gateway.config import Ejection
from gateway.routing.policies import Candidate, Route, RoutingPolicy
from gateway.types import InferRequest

_LOOK_NS: Final = 100_000_000  # how often prices are compared and copies considered
_DOUBT_NS: Final = 2_000_000_000  # between copies to one that was found too slow
_UNUSED_NS: Final = 2_000_000_000  # after which a price is taken from what is known of the speed now
_LEARN_SHARE: Final = 0.01  # of what executions cost: for copies to one that is unused for its price
_OUTLIER: Final = 10.0  # times the prediction; less is the service model's to learn
_LATE_NS: Final = 1_000_000_000  # for a model without an SLO
_HUNG: Final = 3.0  # times the prediction
_HUNG_NS: Final = 500_000_000  # Triton takes a second to find that the process of a model is gone
_FASTER: Final = 0.5  # of the forecast: no scatter any more; the next copy follows at once


class Copy(NamedTuple):
    """why: shadow, probe, learn, wake. expected_ns: what was forecast; 0: unknown."""

    candidate: Candidate
    why: str
    expected_ns: float = 0.0


class Router:
    """See the module. candidates: in the order of the configuration."""

    __slots__ = (
        "_canaries", "_due", "_ejection", "_late_ns", "_look_at_ns", "_order", "_policy", "_regular", "_serving", "_shadows",
        "_slo_ns", "_spent", "_unmet", "candidates",
    )  # fmt: skip

    def __init__(self, candidates: Sequence[Candidate], policy: RoutingPolicy, ejection: Ejection, slo_ns: int | None) -> None:
        self._policy = policy
        self._ejection = ejection
        self._slo_ns = slo_ns
        self._late_ns = slo_ns or _LATE_NS
        # per look
        self._look_at_ns = 0
        self._due: list[Copy] = []
        self._unmet = False
        self._spent = 0.0  # by all executions, in USD/h times ns
        self._admit(candidates)

    def __repr__(self) -> str:
        return f"<Router {[f'{candidate.label}: {candidate.health}' for candidate in self.candidates]}>"

    def join(self, candidate: Candidate) -> None:
        """Take in a further candidate."""
        self._admit((*self.candidates, candidate))

    def _admit(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = tuple(candidates)
        self._serving = [candidate for candidate in candidates if not candidate.shadow_share]
        self._regular = [candidate for candidate in self._serving if not candidate.canary_share]
        self._canaries = [candidate for candidate in candidates if candidate.canary_share]
        self._shadows = [candidate for candidate in candidates if candidate.shadow_share]
        self._order = self._by_price(self._regular)

    def route(
        self, request: InferRequest, now_ns: int, *, failed: Candidate | None = None, full: Sequence[Candidate] = ()
    ) -> Route:
        """Where the request goes. failed: who could not serve it; only its equivalents are asked then.

        full: who has no room for it, and is passed over; with `failed`, if that had too much to do. While a regular one is up
        that could serve the request, a full one too, it is no canary's.
        """
        if now_ns >= self._look_at_ns:
            self._find_copies_due(request, now_ns)
        deadline_ns = deadline_of(request, self._slo_ns)
        if failed is None and self._canaries:
            route = self._canary(request, now_ns, deadline_ns)
            if route is not None:
                return route
        usable = [candidate for candidate in self._order if candidate.lane.available and not candidate.health.ejected]
        if failed is not None:
            fit = [candidate for candidate in usable if candidate.label in failed.equivalents or candidate in full]
            usable = [candidate for candidate in fit if candidate not in full]
            if fit and not usable:
                return Route(None, "down")
        if usable:
            route = self._chosen(usable, request, now_ns, deadline_ns, moves=failed is not None)
            if route.reason in ("fastest", "idle", "late", "unknown"):
                self._unmet = True
            return route
        left = [candidate for candidate in self._serving if candidate.lane.available]
        if failed is not None:
            stand_ins = failed.equivalents
            left = [each for each in left if each.label in stand_ins and each not in full and not each.health.ejected]
        if not left:
            return Route(None, "down")
        route = self._chosen(left, request, now_ns, deadline_ns, moves=failed is not None)
        return msgspec.structs.replace(route, reason="panic")

    def copies(self, request: InferRequest, now_ns: int) -> Sequence[Copy]:
        """Who gets a copy of a request that `route` has sent somewhere. To be followed by `sent` for each that was made."""
        if not self._due and not self._shadows:
            return ()
        due = self._taken_due()
        for candidate in self._shadows:
            if candidate.due(candidate.shadow_share or 0.0):
                candidate.credit -= 1.0
                if not candidate.health.ejected and candidate.lane.available and self._has_room(candidate, request, now_ns):
                    due.append(Copy(candidate, "shadow"))
        return due

    def lessons(self) -> list[Copy]:
        """Who gets a copy of a request that `route` has refused: else nobody would find out that what was learned is over."""
        return self._taken_due()

    def sent(self, copy: Copy, now_ns: int) -> None:
        """A copy waits in the candidate's lane."""
        if copy.why != "shadow":
            copy.candidate.copy_out = True
        if copy.why == "wake":
            copy.candidate.woken(now_ns)
        elif copy.why == "learn":
            cost = copy.candidate.worker_usd_per_hour * copy.expected_ns
            copy.candidate.next_copy_cost = self._spent + cost / _LEARN_SHARE

    def returned(self, copy: Copy, now_ns: int, took_ns: int, *, ok: bool) -> None:
        """A copy that was sent has ended."""
        candidate = copy.candidate
        if copy.why == "shadow":
            return
        candidate.copy_out = False
        if copy.why == "probe":
            candidate.health.probed(ok and (self._slo_ns is None or took_ns <= self._slo_ns), now_ns)
        elif copy.why == "learn":
            candidate.doubted = False
            if ok and took_ns < _FASTER * copy.expected_ns:
                candidate.doubted = True  # it has become faster: the next tells how much
            else:
                candidate.next_copy_ns = now_ns + _DOUBT_NS

    def woken(self, candidate: Candidate, now_ns: int) -> None:
        """Something waits for a candidate's first session."""
        candidate.woken(now_ns)

    def lives(self, candidate: Candidate, now_ns: int) -> None:
        """A session of a candidate lives."""
        candidate.lives(now_ns)

    def executed(
        self,
        candidate: Candidate,
        rows: int,
        busy_ns: int,
        expected_ns: int,
        now_ns: int,
        *,
        streamed_ns: int = 0,
        copied: bool = False,
    ) -> bool:
        """A batch ran well. busy_ns: how long it kept a session. expected_ns: as was predicted; 0: it was not.

        streamed_ns: of busy_ns, how long after the first part of an answer in parts, until which is what was predicted.
        copied: it was of copies alone, from which the usual batch is not learned, unless nothing else runs there.

        True: the candidate is ejected now, for being far too slow again and again.
        """
        if not copied:
            candidate.used_ns = now_ns
        if not copied or not candidate.rows or candidate.shadow_share:
            candidate.executed(rows, busy_ns, streamed_ns)
        if candidate.worker_usd_per_hour:
            self._spent += candidate.worker_usd_per_hour * busy_ns
        if expected_ns and busy_ns - streamed_ns > max(_OUTLIER * expected_ns, self._late_ns):
            return self._eject_if(candidate, candidate.health.failed(), now_ns)
        if not candidate.health.ejected:
            candidate.health.succeeded()
        return False

    def failed(self, candidate: Candidate, now_ns: int, *, hung: bool) -> bool:
        """An execution failed, and not for what was asked. True: the candidate is ejected now."""
        return self._eject_if(candidate, candidate.health.failed(slow=hung), now_ns)

    def hung(self, busy_ns: int, expected_ns: int) -> bool:
        """Whether an execution that failed after so long was no longer working: its requests can hardly be saved."""
        return busy_ns > max(_HUNG * expected_ns, min(self._slo_ns or _HUNG_NS, _HUNG_NS))

    def explain(self, request: InferRequest, now_ns: int) -> dict[str, Any]:
        """What `route` would decide of regular requests, and what it would see of each candidate. No request is sent."""
        deadline_ns = deadline_of(request, self._slo_ns)
        lanes = []
        for candidate in self._by_price(self.candidates):
            forecast = candidate.lane.forecast(request, now_ns)
            start_ns = candidate.start_ns(forecast.workers, now_ns)
            known = forecast.known or not forecast.workers
            eta_ns = forecast.total_ns + start_ns
            lanes.append(
                {
                    "backend": candidate.label,
                    "role": "shadow" if candidate.shadow_share else "canary" if candidate.canary_share else "regular",
                    "usd_per_million_rows": candidate.usd_per_row * 1e6 if candidate.usd_per_row < inf else None,
                    "usual_batch_rows": round(candidate.rows, 1) if candidate.rows else None,
                    "eta_ms": eta_ns / 1e6 if known else None,
                    "cold_start_ms": start_ns / 1e6,
                    "wait_ms": forecast.wait_ns / 1e6,
                    "ahead_ms": forecast.ahead_ns / 1e6,
                    "own_ms": forecast.own_ns / 1e6 if forecast.known else None,
                    "in_time": now_ns + eta_ns <= deadline_ns if known else None,
                    "sessions": forecast.workers,
                    "pending": candidate.lane.pending,
                    "available": candidate.lane.available,
                    "health": str(candidate.health),
                }
            )
        usable = [c for c in self._by_price(self._regular) if c.lane.available and not c.health.ejected]
        route = self._chosen(usable, request, now_ns, deadline_ns) if usable else Route(None, "down")
        return {
            "backend": route.candidate.label if route.candidate is not None else None,
            "reason": route.reason,
            "lanes": lanes,
        }

    def _chosen(
        self, usable: Sequence[Candidate], request: InferRequest, now_ns: int, deadline_ns: int, *, moves: bool = False
    ) -> Route:
        """By the policy; where none is in time and all are idle, one of them: its lane decides whether it is tried.

        Else all would be refused for as long as what was learned counts, though nothing runs that could tell that it is over.
        That one with many rows or little time would be late puts none of it in doubt, if others would be in time.
        moves: from a lane that was to serve it, which it leaves only for one that is predicted to be in time.
        """
        route = self._policy.choose(usable, request, now_ns, deadline_ns)
        if route.candidate is not None or moves or any(candidate.lane.pending for candidate in usable):
            return route
        if not self._are_slow(usable, request, now_ns):
            return route
        told = [(candidate, candidate.lane.forecast(request, now_ns)) for candidate in usable]
        tries = [Route(candidate, "idle", each.total_ns) for candidate, each in told if each.workers and not each.wait_ns]
        return min(tries, key=_eta_ns, default=route)

    def _are_slow(self, usable: Sequence[Candidate], request: InferRequest, now_ns: int) -> bool:
        """Whether by what was learned even one row of its kind, with all of the SLO's time, would be late everywhere."""
        if self._slo_ns is None:
            return False
        one = msgspec.structs.replace(request, rows=1)
        return self._policy.choose(usable, one, now_ns, now_ns + self._slo_ns).candidate is None

    def _taken_due(self) -> list[Copy]:
        due, self._due = self._due, []
        return due

    def _by_price(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda candidate: (candidate.usd_per_row, candidate.worker_usd_per_hour))

    def _eject_if(self, candidate: Candidate, unfit: bool, now_ns: int) -> bool:
        if not unfit or not self._may_eject(candidate):
            return False
        candidate.health.eject(now_ns)
        return True

    def _may_eject(self, candidate: Candidate) -> bool:
        if candidate.shadow_share:
            return True
        others = [other for other in self._serving if other is not candidate]
        fit = [other for other in others if other.lane.available and not other.health.ejected]
        ejected = sum(other.health.ejected for other in others)
        most = self._ejection.max_share
        return bool(fit and most) and ejected + 1 <= max(1.0, most * len(self._serving))

    def _canary(self, request: InferRequest, now_ns: int, deadline_ns: int) -> Route | None:
        # Each counts each request, also one that another takes: shares are of all requests.
        for candidate in [one for one in self._canaries if one.due(one.canary_share or 0.0)]:
            if candidate.health.ejected or not candidate.lane.available:
                continue
            forecast = candidate.lane.forecast(request, now_ns)
            total_ns = forecast.total_ns + candidate.start_ns(forecast.workers, now_ns)
            if deadline_ns == NEVER:
                # Else one that hangs would get its share until it fails. What starts a session is its first request.
                takes = not forecast.workers or self._is_next(candidate, request, now_ns)
            else:
                takes = now_ns + total_ns <= deadline_ns
            if takes:
                candidate.credit -= 1.0
                return Route(candidate, "canary", total_ns)
        return None

    def _is_next(self, candidate: Candidate, request: InferRequest, now_ns: int) -> bool:
        """Whether no more than a usual batch is ahead of a request's first row; of its last, its own rows are too."""
        first = candidate.lane.forecast(msgspec.structs.replace(request, rows=1), now_ns)
        return first.wait_ns + first.ahead_ns <= first.batch_ns

    def _has_room(self, candidate: Candidate, request: InferRequest, now_ns: int) -> bool:
        """Copies are the first to be given up: a shadow only gets what its idle sessions can take."""
        forecast = candidate.lane.forecast(request, now_ns)
        return forecast.workers > 0 and forecast.wait_ns == 0

    def _find_copies_due(self, request: InferRequest, now_ns: int) -> None:
        self._look_at_ns = now_ns + _LOOK_NS
        self._due = []
        for candidate in self.candidates:
            if candidate.copy_out or not candidate.lane.available:
                continue
            forecast = candidate.lane.forecast(request, now_ns)
            candidate.start_ns(forecast.workers, now_ns)  # notes that it lives
            if candidate.used_ns is None:
                candidate.used_ns = now_ns
            unused = False
            if forecast.known and not candidate.lane.pending:
                unused = now_ns - candidate.used_ns >= _UNUSED_NS
                if unused or not candidate.rows:
                    self._reprice(candidate, request, now_ns)
            why = ""
            if candidate.health.ejected:
                why = "probe" if candidate.health.may_probe(now_ns) else ""
            elif not forecast.workers:
                why = "wake" if self._unmet and not candidate.shadow_share else ""
            elif not forecast.known:
                why = "learn" if not candidate.lane.pending else ""
            elif now_ns >= candidate.next_copy_ns and (
                candidate.doubted or (unused and self._may_have_become_cheaper(candidate))
            ):
                why = "learn"
            if why and len(self.candidates) > 1:
                self._due.append(Copy(candidate, why, forecast.total_ns if forecast.known else 0.0))
        self._unmet = False
        self._order = self._by_price(self._regular)

    def _reprice(self, candidate: Candidate, request: InferRequest, now_ns: int) -> None:
        """From the mean, as the price of one that is used: by what nine in ten take it would stay dearer than it is."""
        rows = max(1, round(candidate.rows or request.rows))
        usual = candidate.lane.forecast(msgspec.structs.replace(request, rows=rows), now_ns, mean=True)
        if candidate.rows:
            candidate.repriced((usual.ahead_ns + usual.own_ns) * candidate.rows / rows)
        else:
            candidate.alone_row_ns = usual.own_ns / rows

    def _may_have_become_cheaper(self, candidate: Candidate) -> bool:
        """Whether it is unused for its price, and a copy is affordable that tells whether that still holds."""
        behind = bool(self._order) and 0.0 < self._order[0].usd_per_row < candidate.usd_per_row and candidate in self._regular
        return behind and not candidate.to_zero and self._spent >= candidate.next_copy_cost


def _eta_ns(route: Route) -> float:
    return route.eta_ns
