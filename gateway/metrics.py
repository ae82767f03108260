"""Prometheus metrics, cheap enough for every request, and one answer for all processes of a node.

Several ingress processes share one port, so a scrape reaches any of them: prometheus_client's multiprocess mode lets each
answer for all, by files in one directory. A write there costs 2 to 4 µs (lock, memory map), too much several times per
request, so each process counts in plain Python lists and adds these to prometheus_client once a second and before a scrape of
its own. What another process shows is therefore up to `FLUSH_INTERVAL_S` old.

The multiprocess mode is chosen by prometheus_client when it is imported, by the environment variable
PROMETHEUS_MULTIPROC_DIR; `cli` and `cluster` set it for the processes they start. Without it the metrics are those of this
process.

The statistics extension is read from the same numbers, so the two cannot disagree.

prometheus_client makes room in its files by truncating them to a greater length and maps them: where the disk has no block
left for a page, a write there is SIGBUS and the end of the process. So the blocks are allocated first (`_AllocatedFile`).
"""

import contextlib
import logging
import mmap
import os
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from gateway.batching.batch import Batch
from gateway.errors import Cancelled, Code
from gateway.runner import Execution

FLUSH_INTERVAL_S: Final = 1.0
STAGES: Final = ("decode", "queue", "batch_wait", "compute", "encode")

_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_MICROSECONDS: Final = (0.000005, 0.00001, 0.000025, 0.00005)  # where decode and encode lie
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_FILE_BYTES: Final = 64 << 10  # at first, as prometheus_client's
_ENTRY_BYTES: Final = 32  # at most, beside the key
_RETRY_NS: Final = 1_000_000_000
_OK: Final = "ok"
_NEVER: Final = (0, 0, 0, 0)  # executed


log = logging.getLogger(__name__)


class _AllocatedFile(MmapedDict):
    """The values of one kind of this process: as prometheus_client's, with the disk's blocks allocated before they are mapped.

    Values for which the disk has no room are kept here, out of the exposition, until there is some.
    """

    incomplete: ClassVar["set[_AllocatedFile]"] = set()
    _told: ClassVar[bool] = False  # in the log, once in a process

    def __init__(self, filename: str) -> None:
        self._path = Path(filename)
        self._f: Any = None
        self._positions: dict[str, int] = {}
        self._kept: dict[str, tuple[float, float]] = {}
        self._retry_ns = 0
        self._try_open()

    def read_value(self, key: str) -> tuple[float, float]:
        """Value and timestamp, which are 0 at first."""
        if key in self._kept or (key not in self._positions and not self._try_reserve(key)):
            return self._kept.setdefault(key, (0.0, 0.0))
        found: tuple[float, float] = super().read_value(key)  # type: ignore[no-untyped-call]  # prometheus_client's
        return found

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if key in self._positions or self._try_reserve(key):
            super().write_value(key, value, timestamp)  # type: ignore[no-untyped-call]  # prometheus_client's
            if self._kept:
                self._kept.pop(key, None)  # older
        else:
            self._kept[key] = (value, timestamp)

    def catch_up(self) -> None:
        """Write what was kept, as far as there is room now."""
        kept, self._kept = self._kept, {}
        for key, (value, timestamp) in kept.items():
            self.write_value(key, value, timestamp)
        if not self._kept:
            self.incomplete.discard(self)

    def _try_open(self) -> bool:
        """Also after it failed, if that is some time ago."""
        now_ns = time.monotonic_ns()
        if now_ns < self._retry_ns:
            return False
        try:
            _allocate_file(self._path)
            super().__init__(str(self._path))  # type: ignore[no-untyped-call]  # prometheus_client's
        except OSError as exc:
            if self._f is not None:
                self._f.close()
                self._f = None
            self._failed(exc, now_ns)
            return False
        return True

    def _try_reserve(self, key: str) -> bool:
        """Whether there is room for one more key."""
        if self._f is None and not self._try_open():
            return False
        needed = self._used + len(key.encode()) + _ENTRY_BYTES
        capacity = self._capacity
        if needed <= capacity:
            return True
        now_ns = time.monotonic_ns()
        if now_ns < self._retry_ns:
            return False
        while capacity < needed:
            capacity *= 2
        try:
            os.posix_fallocate(self._f.fileno(), 0, capacity)
            self._m = mmap.mmap(self._f.fileno(), capacity)
        except OSError as exc:
            self._failed(exc, now_ns)
            return False
        self._capacity = capacity
        return True

    def _failed(self, exc: OSError, now_ns: int) -> None:
        self._retry_ns = now_ns + _RETRY_NS
        self.incomplete.add(self)
        if not _AllocatedFile._told:
            _AllocatedFile._told = True
            log.warning("metrics are incomplete, as %s cannot grow (server.run_dir): %s", self._path, exc.strerror)


def _allocate_file(path: Path) -> None:
    """Make a file of values with all of its blocks, or give one of an earlier process of this number those it lacks."""
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size or _FILE_BYTES)
    except FileNotFoundError:
        draft = path.with_suffix(".draft")  # who collects takes a file of no length for a broken one
        try:
            with draft.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _FILE_BYTES)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


# Where prometheus_client makes its files; there is no other place to tell it.
values.MmapedDict = _AllocatedFile  # type: ignore[attr-defined,assignment]  # neither exported nor meant to change


class _Observations:
    """A histogram's additions since the last flush."""

    __slots__ = ("_bounds", "_counts", "_sum", "_target")

    def __init__(self, target: Any, bounds: tuple[float, ...]) -> None:
        self._target = target
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def flush(self) -> None:
        # prometheus_client offers no bulk observation; these two fields are what its own `observe` adds to.
        for index, count in enumerate(self._counts):
            if count:
                self._target._buckets[index].inc(count)
                self._counts[index] = 0
        if self._sum:
            self._target._sum.inc(self._sum)
            self._sum = 0.0


class Metrics:
    """All metrics of this process. Its users get a `LaneMetrics` or `EndpointMetrics` once and count on that."""

    def __init__(self, slo_s: Iterable[float] = ()) -> None:
        """slo_s: the models' objectives; each becomes a bucket edge of the latency histogram, to read attainment exactly."""
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self._directory = Path(directory) if directory else None
        self._registry = CollectorRegistry()
        latency = tuple(sorted({*_SECONDS, *slo_s}))
        stage = (*_MICROSECONDS, *_SECONDS)
        model = ("model", "version")
        lane = (*model, "backend")
        self._latency_bounds, self._stage_bounds = latency, stage
        own: dict[str, Any] = {"registry": self._registry}
        live: dict[str, Any] = {**own, "multiprocess_mode": "livesum"}
        self._requests = Counter(
            "gateway_requests", "Requests answered, by the code of the answer", (*model, "protocol", "code"), **own
        )
        self._latency = Histogram(
            "gateway_request_duration_seconds",
            "Successful requests, from whole request read to answer encoded",
            (*model, "protocol"),
            buckets=latency,
            **own,
        )
        self._part_gap = Histogram(
            "gateway_part_gap_seconds",
            "From one part of a decoupled model's answer to the next",
            (*model, "protocol"),
            buckets=stage,
            **own,
        )
        self._failed_seconds = Counter(
            "gateway_failed_request_seconds", "Time of requests that ended in an error", (*model, "protocol"), **own
        )
        self._stage = Histogram(
            "gateway_stage_duration_seconds", "Time of a request in each stage", (*model, "stage"), buckets=stage, **own
        )
        self._rows_done = Counter("gateway_rows", "Rows inferred with success", model, **own)
        self._batch_rows = Histogram("gateway_batch_rows", "Rows of a batch, without padding", lane, buckets=_ROWS, **own)
        self._batches = Counter("gateway_batches", "Batches closed, by the reason why", (*lane, "reason"), **own)
        self._padding = Counter("gateway_padding_rows", "Rows executed that belong to no request", lane, **own)
        self._executions = Counter("gateway_executions", "Batches executed, by rows", (*lane, "rows"), **own)
        self._compute = Counter("gateway_compute_seconds", "Time of executions, by rows", (*lane, "rows"), **own)
        self._to_worker = Counter(
            "gateway_to_worker_seconds", "Time from a batch's close to its execution, by rows", (*lane, "rows"), **own
        )
        self._from_worker = Counter(
            "gateway_from_worker_seconds",
            "Time from an execution's end until its outputs are here, by rows",
            (*lane, "rows"),
            **own,
        )
        self._failed = Counter("gateway_failed_executions", "Batches that ended in an error", lane, **own)
        self._retries = Counter("gateway_retries", "Requests run a second time, alone", lane, **own)
        self._dropped = Counter(
            "gateway_dropped_outputs",
            "Outputs of requests that were over before: cancelled, or past their deadline",
            lane,
            **own,
        )
        self._queue_rows = Gauge("gateway_queue_rows", "Rows that wait", lane, **live)
        self._queue_requests = Gauge("gateway_queue_requests", "Requests that wait", lane, **live)
        self._workers = Gauge("gateway_workers", "Sessions that can run batches", lane, **live)
        self._busy = Gauge("gateway_busy_workers", "Sessions that run a batch", lane, **live)
        self._service = Gauge(
            "gateway_service_time_seconds", "What was learned a batch takes: expected, and 9 in 10 at most",
            (*lane, "bucket", "rows", "estimate"), multiprocess_mode="mostrecent", **own,
        )  # fmt: skip
        self._last_inference = Gauge(
            "gateway_last_inference_timestamp_seconds",
            "When the last request was answered",
            model,
            multiprocess_mode="max",
            **own,
        )
        self._routed = Counter(
            "gateway_routed", "Requests of models with several backends, by where they went and why", (*lane, "reason"), **own
        )
        self._copies = Counter(
            "gateway_copies",
            "Copies of requests sent besides, by why, and what became of them",
            (*lane, "why", "result"),
            **own,
        )
        self._ejections = Counter("gateway_ejections", "Times a backend was ejected for failing", lane, **own)
        self._ejected = Gauge("gateway_ejected", "Ingress processes that have ejected the backend", lane, **live)
        self._busy_usd = Counter("gateway_busy_usd", "Price of the sessions while they ran batches", lane, **own)
        self._flushed: list[Callable[[], None]] = []
        self._endpoints: dict[tuple[str, str, str], EndpointMetrics] = {}
        if self._directory is not None:
            _forget_dead_processes(self._directory)

    def lane(self, model: str, version: str, backend: str) -> "LaneMetrics":
        """What one lane counts on."""
        return LaneMetrics(self, model, version, backend)

    def routing(self, model: str, version: str) -> "RoutingMetrics":
        """What the dispatcher of one model counts on."""
        return RoutingMetrics(self, model, version)

    def endpoint(self, model: str, version: str, protocol: str) -> "EndpointMetrics":
        """What one protocol counts the requests of one model on. model: empty for requests that named none that exists."""
        labels = (model, version, protocol)
        if labels not in self._endpoints:
            self._endpoints[labels] = EndpointMetrics(self, *labels)
        return self._endpoints[labels]

    def flush(self) -> None:
        """Add what was counted since the last call to prometheus_client."""
        for flush in self._flushed:
            flush()
        for file in tuple(_AllocatedFile.incomplete):
            file.catch_up()

    def expose(self) -> tuple[str, bytes]:
        """Content type and body of /metrics, for all processes of the node. Reads files: some milliseconds."""
        return CONTENT_TYPE_LATEST, generate_latest(self._node_registry())

    def statistics(self) -> "dict[tuple[str, str], ModelStatistics]":
        """Per (model, version), over all processes of the node."""
        found: dict[tuple[str, str], ModelStatistics] = defaultdict(ModelStatistics)
        for family in self._node_registry().collect():
            for sample in family.samples:
                labels = sample.labels
                if labels.get("model"):
                    found[labels["model"], labels["version"]].add(sample.name, labels, sample.value)
        return found

    def _node_registry(self) -> CollectorRegistry:
        self.flush()
        if self._directory is None:
            return self._registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self._directory))  # type: ignore[no-untyped-call]  # prometheus_client's
        return registry


class LaneGauges(NamedTuple):
    """The state of a lane."""

    queue_rows: int
    queue_requests: int
    workers: int  # that can run batches
    busy_workers: int
    service_s: tuple[tuple[str, int, float, float], ...] = ()  # bucket, rows, expected and pessimistic time of a batch


class LaneMetrics:
    """Counted by one lane."""

    def __init__(self, metrics: Metrics, model: str, version: str, backend: str) -> None:
        labels = (model, version, backend)
        self._rows = _Observations(metrics._batch_rows.labels(*labels), _ROWS)
        stages = {
            stage: _Observations(metrics._stage.labels(model, version, stage), metrics._stage_bounds)
            for stage in ("queue", "batch_wait", "compute")
        }
        self._queue, self._wait, self._run = stages["queue"], stages["batch_wait"], stages["compute"]
        self._reasons: dict[str, int] = defaultdict(int)
        self._executed: dict[int, tuple[int, int, int, int]] = {}  # rows -> executions, ns to, in and from the workers
        self._padding = 0
        self._rows_done = 0
        self._retries = 0
        self._failed = 0
        self._dropped = 0
        self._gauges: Callable[[], LaneGauges] | None = None
        self._metrics = metrics
        self._labels = labels
        metrics._flushed.append(self._flush)

    def watch(self, gauges: Callable[[], LaneGauges] | None) -> None:
        """gauges: asked at each flush; None: the lane is gone."""
        self._gauges = gauges or (lambda: LaneGauges(0, 0, 0, 0))
        if gauges is None:
            self._flush()
            self._metrics._flushed.remove(self._flush)

    def batch_closed(self, batch: Batch) -> None:
        self._reasons[batch.reason] += 1
        self._rows.add(batch.rows)
        self._padding += batch.padded_rows - batch.rows
        closed_ns = batch.closed_ns
        add = self._queue.add
        for part in batch.parts:
            add((closed_ns - part.request.arrival_ns) * 1e-9)

    def batch_done(self, batch: Batch, execution: Execution, now_ns: int, *, failed: bool) -> None:
        """now_ns: when what the execution gave was here."""
        to_ns = execution.started_ns - batch.closed_ns
        compute_ns = execution.finished_ns - execution.started_ns
        requests = len(batch.parts)
        self._wait.add(to_ns * 1e-9, requests)
        self._run.add(compute_ns * 1e-9, requests)
        count, all_to_ns, all_compute_ns, all_from_ns = self._executed.get(batch.rows, _NEVER)
        from_ns = now_ns - execution.finished_ns
        self._executed[batch.rows] = (count + 1, all_to_ns + to_ns, all_compute_ns + compute_ns, all_from_ns + from_ns)
        if failed:
            self._failed += not isinstance(execution.error, Cancelled)
        else:
            self._rows_done += batch.rows

    def retried(self) -> None:
        self._retries += 1

    def dropped(self) -> None:
        self._dropped += 1

    def _flush(self) -> None:
        metrics, labels = self._metrics, self._labels
        for observations in (self._rows, self._queue, self._wait, self._run):
            observations.flush()
        for reason, count in self._reasons.items():
            metrics._batches.labels(*labels, reason).inc(count)
        for rows, (count, to_ns, compute_ns, from_ns) in self._executed.items():
            metrics._executions.labels(*labels, rows).inc(count)
            metrics._to_worker.labels(*labels, rows).inc(to_ns * 1e-9)
            metrics._compute.labels(*labels, rows).inc(compute_ns * 1e-9)
            metrics._from_worker.labels(*labels, rows).inc(from_ns * 1e-9)
        self._reasons.clear()
        self._executed.clear()
        if self._rows_done:
            metrics._rows_done.labels(*labels[:2]).inc(self._rows_done)
        for counter, count in (
            (metrics._padding, self._padding),
            (metrics._retries, self._retries),
            (metrics._failed, self._failed),
            (metrics._dropped, self._dropped),
        ):
            counter.labels(*labels).inc(count)
        self._padding = self._rows_done = self._retries = self._failed = self._dropped = 0
        if self._gauges is not None:
            state = self._gauges()
            metrics._queue_rows.labels(*labels).set(state.queue_rows)
            metrics._queue_requests.labels(*labels).set(state.queue_requests)
            metrics._workers.labels(*labels).set(state.workers)
            metrics._busy.labels(*labels).set(state.busy_workers)
            for bucket, rows, expected_s, pessimistic_s in state.service_s:
                metrics._service.labels(*labels, bucket, rows, "expected").set(expected_s)
                metrics._service.labels(*labels, bucket, rows, "p90").set(pessimistic_s)


class RoutingMetrics:
    """Counted by the dispatcher of one model, by backend."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self._metrics = metrics
        self._labels = (model, version)
        self._routed: dict[tuple[str, str], int] = defaultdict(int)
        self._copies: dict[tuple[str, str, str], int] = defaultdict(int)
        self._busy_usd: dict[str, float] = defaultdict(float)
        metrics._flushed.append(self._flush)

    def routed(self, backend: str, reason: str) -> None:
        self._routed[backend, reason] += 1

    def copied(self, backend: str, why: str, result: str) -> None:
        self._copies[backend, why, result] += 1

    def busy(self, backend: str, usd: float) -> None:
        self._busy_usd[backend] += usd

    def ejected(self, backend: str) -> None:
        self._metrics._ejections.labels(*self._labels, backend).inc()
        self._metrics._ejected.labels(*self._labels, backend).set(1)

    def back(self, backend: str) -> None:
        self._metrics._ejected.labels(*self._labels, backend).set(0)

    def close(self) -> None:
        self._flush()
        self._metrics._flushed.remove(self._flush)

    def _flush(self) -> None:
        for (backend, reason), count in self._routed.items():
            self._metrics._routed.labels(*self._labels, backend, reason).inc(count)
        for (backend, why, result), count in self._copies.items():
            self._metrics._copies.labels(*self._labels, backend, why, result).inc(count)
        for backend, usd in self._busy_usd.items():
            self._metrics._busy_usd.labels(*self._labels, backend).inc(usd)
        self._routed.clear()
        self._copies.clear()
        self._busy_usd.clear()


class EndpointMetrics:
    """Counted by one protocol's edge for one model."""

    def __init__(self, metrics: Metrics, model: str, version: str, protocol: str) -> None:
        self._metrics = metrics
        self._labels = (model, version, protocol)
        self._latency = _Observations(metrics._latency.labels(model, version, protocol), metrics._latency_bounds)
        self._decode = _Observations(metrics._stage.labels(model, version, "decode"), metrics._stage_bounds)
        self._encode = _Observations(metrics._stage.labels(model, version, "encode"), metrics._stage_bounds)
        self._gaps: _Observations | None = None  # of a decoupled model only
        self._codes: dict[str, int] = defaultdict(int)
        self._failed_ns = 0
        metrics._flushed.append(self._flush)

    def done(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int) -> None:
        """Count a success. Stamps: whole request read, decoded, outcome known, answer encoded."""
        self._codes[_OK] += 1
        self._decode.add((decoded_ns - arrival_ns) * 1e-9)
        self._encode.add((encoded_ns - encoding_ns) * 1e-9)
        self._latency.add((encoded_ns - arrival_ns) * 1e-9)

    def first_part(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int) -> None:
        """Note the first part of a decoupled model's answer, which is what is promised. Stamps: as in `done`."""
        self._decode.add((decoded_ns - arrival_ns) * 1e-9)
        self._encode.add((encoded_ns - encoding_ns) * 1e-9)
        self._latency.add((encoded_ns - arrival_ns) * 1e-9)

    def part(self, gap_ns: int) -> None:
        """Note a further part, so long after the one before it."""
        if self._gaps is None:
            self._gaps = _Observations(self._metrics._part_gap.labels(*self._labels), self._metrics._stage_bounds)
        self._gaps.add(gap_ns * 1e-9)

    def finished(self) -> None:
        """Count a success that came in parts."""
        self._codes[_OK] += 1

    def failed(self, code: Code, arrival_ns: int, answered_ns: int) -> None:
        """Count an error."""
        self._codes[code.value] += 1
        self._failed_ns += answered_ns - arrival_ns

    def _flush(self) -> None:
        if self._codes.get(_OK):
            self._metrics._last_inference.labels(*self._labels[:2]).set(time.time())
        for observations in (self._latency, self._decode, self._encode, self._gaps):
            if observations is not None:
                observations.flush()
        for code, count in self._codes.items():
            self._metrics._requests.labels(*self._labels, code).inc(count)
        self._codes.clear()
        if self._failed_ns:
            self._metrics._failed_seconds.labels(*self._labels).inc(self._failed_ns * 1e-9)
            self._failed_ns = 0


@dataclass(slots=True)
class Total:
    """How often, and the time of all together."""

    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Executions:
    """How many, and the time of all together on the way to a worker, on it and on the way back."""

    count: int = 0
    to_worker_s: float = 0.0
    compute_s: float = 0.0
    from_worker_s: float = 0.0


class ModelStatistics:
    """The numbers of the statistics extension for one model version, over all its backends and protocols."""

    def __init__(self) -> None:
        self.last_inference_s = 0.0
        self.rows = 0
        self.success = Total()
        self.failed = Total()
        self.cancelled = 0  # of the failed
        self.stages = {stage: Total() for stage in STAGES}
        self.executions_by_rows: dict[int, Executions] = defaultdict(Executions)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Take in one sample of the exposition."""
        if name == "gateway_stage_duration_seconds_sum":
            self.stages[labels["stage"]].seconds += value
        elif name == "gateway_stage_duration_seconds_count":
            self.stages[labels["stage"]].count += int(value)
        elif name == "gateway_rows_total":
            self.rows += int(value)
        elif name == "gateway_executions_total":
            self.executions_by_rows[int(labels["rows"])].count += int(value)
        elif name == "gateway_compute_seconds_total":
            self.executions_by_rows[int(labels["rows"])].compute_s += value
        elif name == "gateway_to_worker_seconds_total":
            self.executions_by_rows[int(labels["rows"])].to_worker_s += value
        elif name == "gateway_from_worker_seconds_total":
            self.executions_by_rows[int(labels["rows"])].from_worker_s += value
        elif name == "gateway_last_inference_timestamp_seconds":
            self.last_inference_s = max(self.last_inference_s, value)
        elif name == "gateway_requests_total":
            (self.success if labels["code"] == _OK else self.failed).count += int(value)
            if labels["code"] == Code.CANCELLED.value:
                self.cancelled += int(value)
        elif name == "gateway_request_duration_seconds_sum":
            self.success.seconds += value
        elif name == "gateway_failed_request_seconds_total":
            self.failed.seconds += value


def _forget_dead_processes(directory: Path) -> None:
    """Drop the gauges of processes of this node that ended without saying so."""
    for pid in set(_pids(directory)):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            mark_process_dead(pid, path=str(directory))  # type: ignore[no-untyped-call]  # prometheus_client's
        except PermissionError:
            continue


def _pids(directory: Path) -> Iterator[int]:
    for path in directory.glob("gauge_live*_*.db"):
        with contextlib.suppress(ValueError):
            yield int(path.stem.rsplit("_", 1)[1])
