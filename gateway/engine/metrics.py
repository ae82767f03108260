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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from gateway.batching.batch import Batch
from gateway.engine.model_statistics import OK, ModelStatistics
from gateway.engine.prometheus_internals import AllocatedFile, Observations
from gateway.engine.runner import Execution
from gateway.errors import Cancelled, Code

FLUSH_INTERVAL_S: Final = 1.0

_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_MICROSECONDS: Final = (0.000005, 0.00001, 0.000025, 0.00005)  # where decode and encode lie
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_NEVER: Final = (0, 0, 0, 0)  # executed


class Families:
    """All metrics of this process, as prometheus_client has them. flushes: add to them what was counted since the last time."""

    def __init__(self, registry: CollectorRegistry, slo_s: Iterable[float]) -> None:
        latency = tuple(sorted({*_SECONDS, *slo_s}))
        stage = (*_MICROSECONDS, *_SECONDS)
        model = ("model", "version")
        lane = (*model, "backend")
        self.latency_bounds, self.stage_bounds = latency, stage
        own: dict[str, Any] = {"registry": registry}
        live: dict[str, Any] = {**own, "multiprocess_mode": "livesum"}
        self.requests = Counter(
            "gateway_requests", "Requests answered, by the code of the answer", (*model, "protocol", "code"), **own
        )
        self.latency = Histogram(
            "gateway_request_duration_seconds",
            "Successful requests, from whole request read to answer encoded",
            (*model, "protocol"),
            buckets=latency,
            **own,
        )
        self.part_gap = Histogram(
            "gateway_part_gap_seconds",
            "From one part of a decoupled model's answer to the next",
            (*model, "protocol"),
            buckets=stage,
            **own,
        )
        self.failed_seconds = Counter(
            "gateway_failed_request_seconds", "Time of requests that ended in an error", (*model, "protocol"), **own
        )
        self.stage = Histogram(
            "gateway_stage_duration_seconds", "Time of a request in each stage", (*model, "stage"), buckets=stage, **own
        )
        self.rows_done = Counter("gateway_rows", "Rows inferred with success", model, **own)
        self.batch_rows = Histogram("gateway_batch_rows", "Rows of a batch, without padding", lane, buckets=_ROWS, **own)
        self.batches = Counter("gateway_batches", "Batches closed, by the reason why", (*lane, "reason"), **own)
        self.padding = Counter("gateway_padding_rows", "Rows executed that belong to no request", lane, **own)
        self.executions = Counter("gateway_executions", "Batches executed, by rows", (*lane, "rows"), **own)
        self.compute = Counter("gateway_compute_seconds", "Time of executions, by rows", (*lane, "rows"), **own)
        self.to_worker = Counter(
            "gateway_to_worker_seconds", "Time from a batch's close to its execution, by rows", (*lane, "rows"), **own
        )
        self.from_worker = Counter(
            "gateway_from_worker_seconds",
            "Time from an execution's end until its outputs are here, by rows",
            (*lane, "rows"),
            **own,
        )
        self.failed = Counter("gateway_failed_executions", "Batches that ended in an error", lane, **own)
        self.retries = Counter("gateway_retries", "Requests run a second time, alone", lane, **own)
        self.dropped = Counter(
            "gateway_dropped_outputs",
            "Outputs of requests that were over before: cancelled, or past their deadline",
            lane,
            **own,
        )
        self.queue_rows = Gauge("gateway_queue_rows", "Rows that wait", lane, **live)
        self.queue_requests = Gauge("gateway_queue_requests", "Requests that wait", lane, **live)
        self.workers = Gauge("gateway_workers", "Sessions that can run batches", lane, **live)
        self.busy = Gauge("gateway_busy_workers", "Sessions that run a batch", lane, **live)
        self.service = Gauge(
            "gateway_service_time_seconds", "What was learned a batch takes: expected, and 9 in 10 at most",
            (*lane, "bucket", "rows", "estimate"), multiprocess_mode="mostrecent", **own,
        )  # fmt: skip
        self.last_inference = Gauge(
            "gateway_last_inference_timestamp_seconds",
            "When the last request was answered",
            model,
            multiprocess_mode="max",
            **own,
        )
        self.routed = Counter(
            "gateway_routed", "Requests of models with several backends, by where they went and why", (*lane, "reason"), **own
        )
        self.copies = Counter(
            "gateway_copies",
            "Copies of requests sent besides, by why, and what became of them",
            (*lane, "why", "result"),
            **own,
        )
        self.ejections = Counter("gateway_ejections", "Times a backend was ejected for failing", lane, **own)
        self.ejected = Gauge("gateway_ejected", "Ingress processes that have ejected the backend", lane, **live)
        self.spans = Counter("gateway_trace_spans", "Spans of traces, by what became of them", ("role", "result"), **own)
        self.busy_usd = Counter("gateway_busy_usd", "Price of the sessions while they ran batches", lane, **own)
        self.flushes: list[Callable[[], None]] = []


class Metrics:
    """All metrics of this process. Its users get a `LaneMetrics` or `EndpointMetrics` once and count on that."""

    def __init__(self, slo_s: Iterable[float] = ()) -> None:
        """slo_s: the models' objectives; each becomes a bucket edge of the latency histogram, to read attainment exactly."""
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self._directory = Path(directory) if directory else None
        self._registry = CollectorRegistry()
        self._families = Families(self._registry, slo_s)
        self._endpoints: dict[tuple[str, str, str], EndpointMetrics] = {}
        if self._directory is not None:
            _forget_dead_processes(self._directory)

    def lane(self, model: str, version: str, backend: str) -> "LaneMetrics":
        """What one lane counts on."""
        return LaneMetrics(self._families, model, version, backend)

    def routing(self, model: str, version: str) -> "RoutingMetrics":
        """What the dispatcher of one model counts on."""
        return RoutingMetrics(self._families, model, version)

    def endpoint(self, model: str, version: str, protocol: str) -> "EndpointMetrics":
        """What one protocol counts the requests of one model on. model: empty for requests that named none that exists."""
        labels = (model, version, protocol)
        if labels not in self._endpoints:
            self._endpoints[labels] = EndpointMetrics(self._families, *labels)
        return self._endpoints[labels]

    def watch_spans(self, spans: Callable[[], Mapping[str, int]]) -> None:
        """spans: gives how many there were, by result; asked at each flush."""
        told: dict[str, int] = defaultdict(int)

        def flush() -> None:
            for result, count in spans().items():
                self._families.spans.labels("ingress", result).inc(count - told[result])
                told[result] = count

        self._families.flushes.append(flush)

    def flush(self) -> None:
        """Add what was counted since the last call to prometheus_client."""
        for flush in self._families.flushes:
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

    def __init__(self, families: Families, model: str, version: str, backend: str) -> None:
        labels = (model, version, backend)
        self._rows = Observations(families.batch_rows.labels(*labels), _ROWS)
        stages = {
            stage: Observations(families.stage.labels(model, version, stage), families.stage_bounds)
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
        self._families = families
        self._labels = labels
        families.flushes.append(self._flush)

    def watch(self, gauges: Callable[[], LaneGauges] | None) -> None:
        """gauges: asked at each flush; None: the lane is gone."""
        self._gauges = gauges or (lambda: LaneGauges(0, 0, 0, 0))
        if gauges is None:
            self._flush()
            self._families.flushes.remove(self._flush)

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
        families, labels = self._families, self._labels
        for observations in (self._rows, self._queue, self._wait, self._run):
            observations.flush()
        for reason, count in self._reasons.items():
            families.batches.labels(*labels, reason).inc(count)
        for rows, (count, to_ns, compute_ns, from_ns) in self._executed.items():
            families.executions.labels(*labels, rows).inc(count)
            families.to_worker.labels(*labels, rows).inc(to_ns * 1e-9)
            families.compute.labels(*labels, rows).inc(compute_ns * 1e-9)
            families.from_worker.labels(*labels, rows).inc(from_ns * 1e-9)
        self._reasons.clear()
        self._executed.clear()
        if self._rows_done:
            families.rows_done.labels(*labels[:2]).inc(self._rows_done)
        for counter, count in (
            (families.padding, self._padding),
            (families.retries, self._retries),
            (families.failed, self._failed),
            (families.dropped, self._dropped),
        ):
            counter.labels(*labels).inc(count)
        self._padding = self._rows_done = self._retries = self._failed = self._dropped = 0
        if self._gauges is not None:
            state = self._gauges()
            families.queue_rows.labels(*labels).set(state.queue_rows)
            families.queue_requests.labels(*labels).set(state.queue_requests)
            families.workers.labels(*labels).set(state.workers)
            families.busy.labels(*labels).set(state.busy_workers)
            for bucket, rows, expected_s, pessimistic_s in state.service_s:
                families.service.labels(*labels, bucket, rows, "expected").set(expected_s)
                families.service.labels(*labels, bucket, rows, "p90").set(pessimistic_s)


class RoutingMetrics:
    """Counted by the dispatcher of one model, by backend."""

    def __init__(self, families: Families, model: str, version: str) -> None:
        self._families = families
        self._labels = (model, version)
        self._routed: dict[tuple[str, str], int] = defaultdict(int)
        self._copies: dict[tuple[str, str, str], int] = defaultdict(int)
        self._busy_usd: dict[str, float] = defaultdict(float)
        families.flushes.append(self._flush)

    def routed(self, backend: str, reason: str) -> None:
        self._routed[backend, reason] += 1

    def copied(self, backend: str, why: str, result: str) -> None:
        self._copies[backend, why, result] += 1

    def busy(self, backend: str, usd: float) -> None:
        self._busy_usd[backend] += usd

    def ejected(self, backend: str) -> None:
        self._families.ejections.labels(*self._labels, backend).inc()
        self._families.ejected.labels(*self._labels, backend).set(1)

    def back(self, backend: str) -> None:
        self._families.ejected.labels(*self._labels, backend).set(0)

    def close(self) -> None:
        self._flush()
        self._families.flushes.remove(self._flush)

    def _flush(self) -> None:
        for (backend, reason), count in self._routed.items():
            self._families.routed.labels(*self._labels, backend, reason).inc(count)
        for (backend, why, result), count in self._copies.items():
            self._families.copies.labels(*self._labels, backend, why, result).inc(count)
        for backend, usd in self._busy_usd.items():
            self._families.busy_usd.labels(*self._labels, backend).inc(usd)
        self._routed.clear()
        self._copies.clear()
        self._busy_usd.clear()


class EndpointMetrics:
    """Counted by one protocol's edge for one model."""

    def __init__(self, families: Families, model: str, version: str, protocol: str) -> None:
        self._families = families
        self._labels = (model, version, protocol)
        self._latency = Observations(families.latency.labels(model, version, protocol), families.latency_bounds)
        self._decode = Observations(families.stage.labels(model, version, "decode"), families.stage_bounds)
        self._encode = Observations(families.stage.labels(model, version, "encode"), families.stage_bounds)
        self._gaps: Observations | None = None  # of a decoupled model only
        self._codes: dict[str, int] = defaultdict(int)
        self._failed_ns = 0
        families.flushes.append(self._flush)

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
            self._gaps = Observations(self._families.part_gap.labels(*self._labels), self._families.stage_bounds)
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
            self._families.last_inference.labels(*self._labels[:2]).set(time.time())
        for observations in (self._latency, self._decode, self._encode, self._gaps):
            if observations is not None:
                observations.flush()
        for code, count in self._codes.items():
            self._families.requests.labels(*self._labels, code).inc(count)
        self._codes.clear()
        if self._failed_ns:
            self._families.failed_seconds.labels(*self._labels).inc(self._failed_ns * 1e-9)
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
