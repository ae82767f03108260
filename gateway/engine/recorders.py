"""What counts: recorders of lanes, models, endpoints, prices and the process, on attributes and lists.

What comes with every request is logged as bytes, and counted 64 at a time, or when somebody asks for the state. With hundreds
of models as many logs fill at once: objects in them were new memory with each request, which is in no cache.
"""

import platform
import struct
import sys
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final

import numpy as np

from gateway import __version__
from gateway.batching.batch import Batch
from gateway.engine.metric_blocks import SEP, Exemplar, Key, State
from gateway.engine.metric_buckets import CODEC_NS, LAG_NS, ROWS, STAGE_NS, Buckets, latency_edges_ns
from gateway.engine.model_statistics import OK, execution_keys
from gateway.engine.process_facts import age_s, ended_children_cpu_ns, own_memory_bytes, used_by
from gateway.engine.runner import Execution
from gateway.errors import Cancelled, Code
from gateway.tracing.context import trace_id_of

_LOGGED: Final = 64  # events, until they are counted
_BATCH: Final = struct.Struct("=8q")  # rows, padded rows, requests, closed, started, finished and returned, expected time
_REQUEST: Final = struct.Struct("=4q")  # arrived, decoded, answer known and encoded
_log_batch: Final = _BATCH.pack_into
_log_request: Final = _REQUEST.pack_into

# An SLO is not missed by what the client got wrong, or did not wait for.
_CLIENTS: Final = frozenset(
    code.value
    for code in (
        Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS, Code.NOT_FOUND, Code.UNAUTHENTICATED, Code.FORBIDDEN, Code.TOO_LARGE,
        Code.CANCELLED, Code.UNSUPPORTED, Code.LIMITED, Code.UNSUPPORTED_MEDIA_TYPE,
    )
)  # fmt: skip

# Shown before they come, as alerts are about their rates: of what names no model, the first alone.
_AT_0: Final = tuple(code.value for code in (Code.OVERLOADED, Code.DEADLINE_EXCEEDED, Code.BACKEND_FAILED))


@dataclass(frozen=True, slots=True)
class LaneGauges:
    """The state of a lane.

    service_s: bucket, rows, expected and pessimistic time of a batch. oldest_ns: how long the oldest has waited. running_ns:
    since when batches have been running, all together. shifts: of the speed, that the service model has followed.
    cold_start_ns: how long the last start from zero took; None: there was none.
    """

    queue_rows: int
    queue_requests: int
    workers: int  # that can run batches
    busy_workers: int
    _: KW_ONLY
    service_s: tuple[tuple[str, int, float, float], ...] = ()
    oldest_ns: int = 0
    running_ns: int = 0
    shifts: int = 0
    cold_start_ns: int | None = None


_IDLE: Final = LaneGauges(0, 0, 0, 0)


@dataclass(slots=True)
class _Executed:
    """Batches of one size: how many, and their time to, in and from the workers."""

    batches: int = 0
    to_ns: int = 0
    compute_ns: int = 0
    from_ns: int = 0

    def by_key(self, rows: int) -> Iterator[tuple[str, int]]:
        return zip(execution_keys(rows), (self.batches, self.to_ns, self.compute_ns, self.from_ns), strict=True)


class LaneMetrics:
    """Counted by one lane."""

    __slots__ = (
        "_busy_ns", "_dropped", "_ended", "_executed", "_expected_ns", "_failed", "_gauges", "_last_bucket", "_log",
        "_log_arrivals_ns", "_log_reasons", "_logged", "_padding", "_predicted_ns", "_queue", "_reasons", "_retries", "_rows",
        "_rows_failed", "_rows_sum", "_run", "_shifts", "_wait", "key", "labels",
    )  # fmt: skip

    def __init__(self, labels: tuple[str, str, str], max_rows: int, ended: Callable[["LaneMetrics", State], None]) -> None:
        """ended: told with the last state."""
        self.labels = labels
        self.key = Key("lane", labels)
        self._ended = ended
        self._gauges: Callable[[], LaneGauges] | None = None
        self._last_bucket = bisect_left(ROWS, max(1, max_rows)) + 1
        self._rows = [0] * (self._last_bucket + 1)
        self._rows_sum = self._rows_failed = self._padding = 0
        self._log = bytearray(_LOGGED * _BATCH.size)
        self._logged = 0  # bytes
        self._log_reasons: list[str] = []
        self._log_arrivals_ns: list[int] = []
        self._queue, self._wait, self._run = (Buckets(STAGE_NS) for _ in range(3))
        self._reasons: dict[str, int] = {}
        self._executed: dict[int, _Executed] = {}  # by rows
        self._busy_ns = self._predicted_ns = self._expected_ns = 0
        self._retries = self._failed = self._dropped = self._shifts = 0

    def watch(self, gauges: Callable[[], LaneGauges] | None) -> None:
        """gauges: asked at each scrape; None: the lane is gone."""
        if gauges is None:
            state = self.state()
            self._gauges = None
            self._ended(self, state)
        self._gauges = gauges

    def batch_done(self, batch: Batch, execution: Execution, now_ns: int, *, failed: bool) -> None:
        """Count a batch that has ended, from its arrivals on. now_ns: when what the execution gave was here."""
        parts = batch.parts
        requests = len(parts)
        if requests == 1:
            self._log_arrivals_ns.append(parts[0].request.arrival_ns)
        else:
            self._log_arrivals_ns += [part.request.arrival_ns for part in parts]
        self._log_reasons.append(batch.reason)
        expected_ns = batch.expected_ns
        if failed:
            cancelled = isinstance(execution.error, Cancelled)
            if not cancelled or execution.first_part_ns is None:
                expected_ns = 0
            self._failed += not cancelled
            self._rows_failed += batch.rows
        started_ns, finished_ns = execution.started_ns, execution.finished_ns
        at = self._logged
        _log_batch(
            self._log,
            at,
            batch.rows,
            batch.padded_rows,
            requests,
            batch.closed_ns,
            started_ns,
            finished_ns,
            now_ns,
            expected_ns,
        )
        self._logged = at = at + _BATCH.size
        if expected_ns and execution.first_part_ns is not None:  # of a decoupled model the first part is predicted
            self._predicted_ns -= finished_ns - execution.first_part_ns
        if at == len(self._log):
            self._count()

    def _count(self) -> None:
        """Put what was logged where it belongs: together, which takes 0.6 of the time where batches are of 16 requests."""
        if not self._logged:
            return
        logged = np.frombuffer(self._log, np.int64, self._logged // 8).reshape(-1, _BATCH.size // 8)
        all_rows, all_padded, requests, closed_ns, started_ns, finished_ns, now_ns, expected_ns = logged.T.copy()
        reasons, all_arrivals_ns = self._log_reasons, self._log_arrivals_ns
        self._logged, self._log_reasons, self._log_arrivals_ns = 0, [], []
        arrivals_ns = np.fromiter(all_arrivals_ns, np.int64, len(all_arrivals_ns))
        to_ns, compute_ns, busy_ns = started_ns - closed_ns, finished_ns - started_ns, now_ns - closed_ns
        self._queue.add(closed_ns.repeat(requests) - arrivals_ns)
        self._wait.add(to_ns.repeat(requests))
        self._run.add(compute_ns.repeat(requests))
        self._busy_ns += int(busy_ns.sum())
        for reason, number in Counter(reasons).items():
            self._reasons[reason] = self._reasons.get(reason, 0) + number
        for rows, number in Counter(all_rows.tolist()).items():
            bucket = (rows - 1).bit_length()  # the edges are powers of 2
            self._rows[min(bucket, self._last_bucket)] += number
            executed = self._executed.get(rows)
            if executed is None:
                executed = self._executed[rows] = _Executed()
            these = all_rows == rows
            executed.batches += number
            executed.to_ns += int(to_ns[these].sum())
            executed.compute_ns += int(compute_ns[these].sum())
            executed.from_ns += int((now_ns - finished_ns)[these].sum())
        all_rows_sum = int(all_rows.sum())
        self._rows_sum += all_rows_sum
        self._padding += int(all_padded.sum()) - all_rows_sum
        if expected_ns.any():
            self._expected_ns += int(expected_ns.sum())
            self._predicted_ns += int(busy_ns[expected_ns > 0].sum())

    def retried(self) -> None:
        self._retries += 1

    def dropped(self) -> None:
        self._dropped += 1

    def busy_ns(self) -> int:
        """Time of sessions with a batch, of those that still run up to now."""
        self._count()
        return self._busy_ns + (self._gauges().running_ns if self._gauges is not None else 0)

    def state(self) -> State:
        self._count()
        gauges = self._gauges() if self._gauges is not None else _IDLE
        here = self._gauges is not None
        service = {
            SEP.join((bucket, str(rows), estimate)): value
            for bucket, rows, expected_s, pessimistic_s in gauges.service_s
            for estimate, value in (("expected", expected_s), ("p90", pessimistic_s))
        }
        self._shifts = max(self._shifts, gauges.shifts)  # what was learned of a shape is forgotten where there are many
        executed = self._executed.values()
        return (
            gauges.queue_rows if here else None,
            gauges.queue_requests if here else None,
            gauges.oldest_ns / 1e9 if here else None,
            gauges.workers if here else None,
            gauges.busy_workers if here else None,
            service or None,
            gauges.cold_start_ns / 1e9 if gauges.cold_start_ns is not None else None,
            dict(self._reasons),
            (*self._rows, self._rows_sum),
            self._padding,
            self._busy_ns + gauges.running_ns,
            sum(each.to_ns for each in executed),
            sum(each.compute_ns for each in executed),
            sum(each.from_ns for each in executed),
            self._retries,
            sum(each.batches for each in executed),
            self._failed,
            {"expected": self._expected_ns, "actual": self._predicted_ns} if self._expected_ns else None,
            self._shifts,
            self._rows_sum - self._rows_failed,
            self._dropped,
            self._queue.state(),
            self._wait.state(),
            self._run.state(),
            {key: number for rows, each in self._executed.items() for key, number in each.by_key(rows)},
        )


class RoutingMetrics:
    """Counted by the dispatcher of one model, by backend."""

    def __init__(self, labels: tuple[str, str], slo_ns: int | None, ended: Callable[["RoutingMetrics", State], None]) -> None:
        self.key = Key("model", labels)
        self._slo_s = slo_ns / 1e9 if slo_ns is not None else None
        self._ended = ended
        self._routed: dict[tuple[str, str], int] = defaultdict(int)
        self._copies: dict[tuple[str, str, str], int] = defaultdict(int)
        self._busy_usd: dict[str, float] = {}
        self._ejections: dict[str, int] = {}
        self._ejected: dict[str, int] = {}

    def routed(self, backend: str, reason: str) -> None:
        self._routed[backend, reason] += 1

    def copied(self, backend: str, why: str, result: str) -> None:
        self._copies[backend, why, result] += 1

    def busy(self, backend: str, usd: float) -> None:
        self._busy_usd[backend] = self._busy_usd.get(backend, 0.0) + usd

    def ejected(self, backend: str) -> None:
        self._ejections[backend] = self._ejections.get(backend, 0) + 1
        self._ejected[backend] = 1

    def back(self, backend: str) -> None:
        self._ejected[backend] = 0

    def close(self) -> None:
        self._ended(self, self.state())

    def state(self) -> State:
        return (
            self._slo_s,
            {SEP.join(key): count for key, count in self._routed.items()},
            {SEP.join(key): count for key, count in self._copies.items()},
            dict(self._ejections),
            dict(self._ejected) or None,
            dict(self._busy_usd),
        )


class EndpointMetrics:
    """Counted by one protocol's edge for one model."""

    __slots__ = (
        "_bounds", "_decode", "_encode", "_exemplars", "_failed", "_failed_ns", "_gaps", "_gaps_ns", "_last_s", "_latency",
        "_log", "_logged", "_parts", "_slo_bucket", "_traced", "key",
    )  # fmt: skip

    def __init__(self, labels: tuple[str, str, str], slo_ns: int | None) -> None:
        self.key = Key("edge", labels)
        self._exemplars: dict[int, Exemplar] = {}
        self._traced: list[tuple[bytes, int, int]] = []  # of those in the log: its span, latency, last stamp
        self._bounds = latency_edges_ns(slo_ns)
        self._log = bytearray(_LOGGED * _REQUEST.size)
        self._logged = 0  # bytes
        self._slo_bucket = self._bounds.index(slo_ns) if slo_ns is not None else None
        self._latency = Buckets(self._bounds)
        self._decode, self._encode = Buckets(CODEC_NS), Buckets(CODEC_NS)
        self._gaps: list[int] | None = None  # of a decoupled model only
        self._gaps_ns = self._parts = 0
        self._failed: dict[str, int] = dict.fromkeys(_AT_0 if labels[0] else _AT_0[:1], 0)
        self._failed_ns = 0
        self._last_s = 0.0  # since 1970; 0: none was

    def done(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int, traced: bytes = b"") -> None:
        """Count a success. Stamps: whole request read, decoded, outcome known, answer encoded. traced: its span, if it is."""
        at = self._logged
        _log_request(self._log, at, arrival_ns, decoded_ns, encoding_ns, encoded_ns)
        self._logged = at = at + _REQUEST.size
        if traced:
            self._traced.append((traced, encoded_ns - arrival_ns, encoded_ns))
        if at == len(self._log):
            self._count()

    def _count(self) -> None:
        """As that of a lane."""
        if not self._logged:
            return
        logged = np.frombuffer(self._log, np.int64, self._logged // 8).reshape(-1, _REQUEST.size // 8)
        arrival_ns, decoded_ns, encoding_ns, encoded_ns = logged.T.copy()
        self._logged = 0
        self._decode.add(decoded_ns - arrival_ns)
        self._encode.add(encoded_ns - encoding_ns)
        self._latency.add(encoded_ns - arrival_ns)
        at_0_s = time.time() - time.monotonic_ns() / 1e9
        self._last_s = max(self._last_s, at_0_s + int(encoded_ns[-1]) / 1e9)
        for traced, took_ns, ended_ns in self._traced:
            self._exemplars[bisect_left(self._bounds, took_ns)] = (trace_id_of(traced), took_ns, at_0_s + ended_ns / 1e9)
        self._traced.clear()

    def exemplars(self) -> dict[int, Exemplar]:
        """By bucket of the latency, as OpenMetrics has them."""
        self._count()
        return self._exemplars

    def part(self, gap_ns: int | None) -> None:
        """Note a part of a decoupled model's answer, so long after the one before it; None: it is the first."""
        if self._gaps is None:
            self._gaps = [0] * (len(STAGE_NS) + 1)
        self._parts += 1
        if gap_ns is not None:
            self._gaps[bisect_left(STAGE_NS, gap_ns)] += 1
            self._gaps_ns += gap_ns

    def streamed(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int, traced: bytes = b"") -> None:
        """Count a decoupled model's answer that has ended well. As `done`, with the stamps of the first part, which is what is
        promised; where there was none, of the end.
        """
        self.done(arrival_ns, decoded_ns, encoding_ns, encoded_ns, traced)
        self._last_s = time.time()

    def failed(self, code: Code, arrival_ns: int, answered_ns: int) -> None:
        """Count an error."""
        self._failed[code.value] = self._failed.get(code.value, 0) + 1
        self._failed_ns += answered_ns - arrival_ns

    def state(self) -> State:
        self._count()
        ok = self._latency.number
        return (
            {OK: ok, **self._failed} if ok or self.key.labels[0] else dict(self._failed),
            self._latency.state(),
            self._failed_ns,
            self._attained(),
            self._last_s or None,
            self._decode.state(),
            self._encode.state(),
            self._parts or None,
            (*self._gaps, self._gaps_ns) if self._gaps is not None else None,
            self._bounds[self._slo_bucket] if self._slo_bucket is not None else None,
        )

    def _attained(self) -> dict[str, int] | None:
        if self._slo_bucket is None:
            return None
        met = self._latency.up_to(self._slo_bucket)
        failed = sum(count for code, count in self._failed.items() if code not in _CLIENTS)
        return {"met": met, "missed": self._latency.number - met + failed}


class Cost:
    """What a backend costs whose sessions this process holds: its price, for as long as it is held; and how much of that ran.

    It is held from when its load begins until it is unloaded, and through a reload; what the process holds from its start is
    held since the operating system made the process. Who counts what ran: lanes, or `measure`.
    """

    def __init__(self, labels: tuple[str, str, str], usd_per_hour: float | None, sessions: int, born_ns: int | None) -> None:
        """born_ns: when the process began, if it holds the backend since; None: it is from the first `hold` on."""
        self.key = Key("cost", labels)
        self.lanes: list[LaneMetrics] = []
        self.ended_busy_ns = 0
        self._usd_per_ns = (usd_per_hour or 0.0) / 3600e9
        self._usd_per_hour = usd_per_hour
        self._sessions = sessions
        self._born_ns = born_ns
        self._holders = 0
        self._since_ns = self._held_ns = 0
        self._idle_usd = 0.0
        self._repriced = (0, 0, 0.0, 0.0)  # busy and held time until then, and what both came to
        self._measure: Callable[[], int] | None = None

    def hold(self) -> None:
        if not self._holders:
            self._since_ns = time.monotonic_ns() if self._born_ns is None else self._born_ns
            self._born_ns = None
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._held_ns += time.monotonic_ns() - self._since_ns

    def measure(self, busy_ns: Callable[[], int]) -> None:
        """busy_ns: all the time that sessions ran, of a process that is a replica of the backend."""
        self._measure = busy_ns

    def reprice(self, usd_per_hour: float | None, now_ns: int) -> None:
        """It costs this from now on."""
        self._repriced = self._counted(now_ns)
        self._usd_per_hour = usd_per_hour
        self._usd_per_ns = (usd_per_hour or 0.0) / 3600e9

    def _counted(self, now_ns: int) -> tuple[int, int, float, float]:
        """As `_repriced`."""
        held_ns = self._held_ns + (now_ns - self._since_ns if self._holders else 0)
        busy_ns = self.ended_busy_ns + sum(lane.busy_ns() for lane in self.lanes)
        if self._measure is not None:
            busy_ns += self._measure()
        busy_until_ns, held_until_ns, busy_usd, held_usd = self._repriced
        busy_usd += (busy_ns - busy_until_ns) * self._usd_per_ns / self._sessions
        return busy_ns, held_ns, busy_usd, held_usd + (held_ns - held_until_ns) * self._usd_per_ns

    def state(self, now_ns: int) -> State:
        _, _, busy_usd, held_usd = self._counted(now_ns)
        self._idle_usd = max(self._idle_usd, held_usd - busy_usd)  # a counter never goes back
        priced = self._usd_per_hour is not None
        return (
            {"busy": busy_usd, "idle": self._idle_usd} if priced else None,
            (self._usd_per_hour if self._holders else 0.0) if priced else None,
            int(self._measure is not None) or None,
        )


class ProcessMetrics:
    """What the operating system says of this process, and of those that hold sessions for it."""

    def __init__(self, role: str, instance_type: str, session_pids: Callable[[], Iterable[int]]) -> None:
        age = age_s()
        self.born_ns = time.monotonic_ns() - round(age * 1e9)
        ray = sys.modules.get("ray")
        own = SEP.join((__version__, platform.python_version(), getattr(ray, "__version__", "") if ray else "", instance_type))
        self.info = {own: 1} if role == "ingress" else {}  # a replica does not know the node's instance type
        self._key = Key("process", (role,))
        self._started_s = time.time() - age
        self._session_pids = session_pids
        self._lag = [0] * (len(LAG_NS) + 1)
        self._lag_ns = 0
        self._sessions_ns = 0
        self.spans: Callable[[], Mapping[str, int]] = dict  # of traces
        self.certificates: Callable[[], Mapping[str, float]] = dict  # when they expire

    def lagged(self, lag_ns: int) -> None:
        self._lag[bisect_left(LAG_NS, lag_ns)] += 1
        self._lag_ns += max(0, lag_ns)

    def states(self, now_ns: int) -> Iterator[tuple[Key, State]]:
        lag = (*self._lag, self._lag_ns)
        spans = dict(self.spans()) or None
        certificates = dict(self.certificates()) or None
        yield self._key, (1, time.process_time_ns(), own_memory_bytes(), self._started_s, lag, spans, certificates)
        pids = list(self._session_pids())
        ended_ns = ended_children_cpu_ns()
        if pids or ended_ns or self._sessions_ns:
            used = used_by(pids)
            # One that ends is in neither of them for a moment, and a counter never goes back.
            self._sessions_ns = max(self._sessions_ns, ended_ns + sum(one.cpu_ns for one in used))
            memory_bytes = sum(one.memory_bytes for one in used)
            yield Key("process", ("session",)), (len(used), self._sessions_ns, memory_bytes, None, None, None, None)
