"""Prometheus metrics, cheap enough for every request, and one answer for all processes of a node.

Several ingress processes share one port, so a scrape reaches any of them: prometheus_client's multiprocess mode lets each
answer for all, by files in one directory. A write there costs 2 to 4 µs (lock, memory map), too much several times per
request, so each process counts in plain Python lists and adds these to prometheus_client once a second and before a scrape of
its own. What another process shows is therefore up to `FLUSH_INTERVAL_S` old.

The multiprocess mode is chosen by prometheus_client when it is imported, by the environment variable
PROMETHEUS_MULTIPROC_DIR; `serving` and `cluster` set it for the processes they start. Without it the metrics are those of this
process.

The statistics extension is read from the same numbers, so the two cannot disagree.
"""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from gateway.batching.batch import Batch
from gateway.errors import Cancelled, Code
from gateway.model_statistics import OK, ModelStatistics
from gateway.prometheus_internals import AllocatedFile, Observations
from gateway.runner import Execution

FLUSH_INTERVAL_S: Final = 1.0

_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_MICROSECONDS: Final = (0.000005, 0.00001, 0.000025, 0.00005)  # where decode and encode lie
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_NEVER: Final = (0, 0, 0, 0)  # executed


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
        for file in tuple(AllocatedFile.incomplete):
            file.catch_up()

    def expose(self) -> tuple[str, bytes]:
        """Content type and body of /metrics, for all processes of the node. Reads files: some milliseconds."""
        return CONTENT_TYPE_LATEST, generate_latest(self._node_registry())

    def statistics(self) -> dict[tuple[str, str], ModelStatistics]:
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
        self._rows = Observations(metrics._batch_rows.labels(*labels), _ROWS)
        stages = {
            stage: Observations(metrics._stage.labels(model, version, stage), metrics._stage_bounds)
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
        self._latency = Observations(metrics._latency.labels(model, version, protocol), metrics._latency_bounds)
        self._decode = Observations(metrics._stage.labels(model, version, "decode"), metrics._stage_bounds)
        self._encode = Observations(metrics._stage.labels(model, version, "encode"), metrics._stage_bounds)
        self._gaps: Observations | None = None  # of a decoupled model only
        self._codes: dict[str, int] = defaultdict(int)
        self._failed_ns = 0
        metrics._flushed.append(self._flush)

    def done(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int) -> None:
        """Count a success. Stamps: whole request read, decoded, outcome known, answer encoded."""
        self._codes[OK] += 1
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
            self._gaps = Observations(self._metrics._part_gap.labels(*self._labels), self._metrics._stage_bounds)
        self._gaps.add(gap_ns * 1e-9)

    def finished(self) -> None:
        """Count a success that came in parts."""
        self._codes[OK] += 1

    def failed(self, code: Code, arrival_ns: int, answered_ns: int) -> None:
        """Count an error."""
        self._codes[code.value] += 1
        self._failed_ns += answered_ns - arrival_ns

    def _flush(self) -> None:
        if self._codes.get(OK):
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
