"""Every metric there is: name, type, unit, labels, station and meaning. The exposition, docs/metrics.md and the tests read it.

A new metric is one entry here, and a value of the same name in what the recorder gives (`gateway.engine.recorders`). Names end
in their unit, counters in `_total`; label values come from the configuration or from fixed lists, never from a client.
"""

from dataclasses import dataclass
from typing import Final, Literal

STATIONS: Final = {
    "1": "listener",
    "2": "decode",
    "3": "routing",
    "4": "queue",
    "5": "workers",
    "6": "session",
    "7": "split",
    "8": "encode",
    "cost": "cost",
    "process": "process",
}
"""Those of docs/architecture.md by their numbers, and what belongs to none of them."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family.

    name: of its samples; a histogram's end in _bucket, _sum and _count. unit: "" for numbers of things. merged: how the values
    of several processes become one; counters and histograms are summed.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: Literal["", "seconds", "rows", "usd", "usd_per_hour", "bytes"]
    labels: tuple[str, ...]
    station: str
    meaning: str
    merged: Literal["sum", "max", "min"] = "sum"


_MODEL: Final = ("model", "version")
_EDGE: Final = (*_MODEL, "protocol")
_LANE: Final = (*_MODEL, "backend")
_ROLE: Final = ("role",)

TABLE: Final = (
    # requests
    Metric("gateway_requests_total", "counter", "", (*_EDGE, "code"), "1",
           "Requests answered, by the code of the answer: ok; overloaded: shed, or no memory; deadline_exceeded: "
           "expired, or a part ran and the rest was shed; cancelled; …"),
    Metric("gateway_request_duration_seconds", "histogram", "seconds", _EDGE, "1",
           "Successful requests, from whole request read to answer encoded; of a decoupled model to its first part. The "
           "model's SLO is a bucket edge"),
    Metric("gateway_failed_request_seconds_total", "counter", "seconds", _EDGE, "1",
           "Time of requests that ended in an error"),
    Metric("gateway_slo_requests_total", "counter", "", (*_EDGE, "result"), "1",
           "Requests of a model with an SLO: met; missed: late, shed, expired or failed. What the client got wrong or "
           "cancelled is in neither"),
    Metric("gateway_slo_seconds", "gauge", "seconds", _MODEL, "1", "The SLO: 99 of 100 answers within this", "max"),
    Metric("gateway_last_inference_timestamp_seconds", "gauge", "seconds", _EDGE, "1",
           "When the last request was answered with success, since 1970", "max"),
    Metric("gateway_model_ready", "gauge", "", _MODEL, "1",
           "1: every process serves the model; 0: one does not, or it is not loaded", "min"),
    Metric("gateway_stage_duration_seconds", "histogram", "seconds", (*_MODEL, "stage", "protocol", "backend"), "2",
           "Time of a request in each stage: decode and encode, by protocol; queue, batch_wait (to a worker) and compute, by "
           "backend"),
    # routing
    Metric("gateway_routed_total", "counter", "", (*_LANE, "reason"), "3",
           "Requests of models with several backends, by where they went and why"),
    Metric("gateway_copies_total", "counter", "", (*_LANE, "why", "result"), "3",
           "Copies of requests sent besides, by why, and what became of them"),
    Metric("gateway_ejections_total", "counter", "", _LANE, "3", "Times a backend was ejected for failing"),
    Metric("gateway_ejected", "gauge", "", _LANE, "3", "Ingress processes that have the backend ejected"),
    # queue and batches
    Metric("gateway_queue_rows", "gauge", "rows", _LANE, "4", "Rows that wait"),
    Metric("gateway_queue_requests", "gauge", "", _LANE, "4", "Requests that wait"),
    Metric("gateway_queue_age_seconds", "gauge", "seconds", _LANE, "4", "How long the oldest has waited; 0: none waits", "max"),
    Metric("gateway_batches_total", "counter", "", (*_LANE, "reason"), "4", "Batches closed, by the reason why"),
    Metric("gateway_batch_rows", "histogram", "rows", _LANE, "4", "Rows of a batch, without padding"),
    Metric("gateway_padding_rows_total", "counter", "rows", _LANE, "4", "Rows executed that belong to no request"),
    # workers
    Metric("gateway_workers", "gauge", "", _LANE, "5",
           "Sessions that can run batches, each counted by one process, whichever it is leased to"),
    Metric("gateway_busy_workers", "gauge", "", _LANE, "5", "Sessions that run a batch"),
    Metric("gateway_worker_busy_seconds_total", "counter", "seconds", _LANE, "5",
           "Time of sessions with a batch, from its close until its outputs are here; its rate by gateway_workers is the "
           "busy ratio"),
    Metric("gateway_to_worker_seconds_total", "counter", "seconds", _LANE, "5",
           "Time from a batch's close to its execution"),
    Metric("gateway_retries_total", "counter", "", _LANE, "5", "Requests run a second time, alone"),
    # sessions
    Metric("gateway_executions_total", "counter", "", _LANE, "6", "Batches executed"),
    Metric("gateway_failed_executions_total", "counter", "", _LANE, "6", "Batches that ended in an error"),
    Metric("gateway_compute_seconds_total", "counter", "seconds", _LANE, "6", "Time of executions"),
    Metric("gateway_service_time_seconds", "gauge", "seconds", (*_LANE, "bucket", "rows", "estimate"), "6",
           "What was learned a batch takes, of 1 row and of the most: expected, and p90 (9 in 10 at most)", "max"),
    Metric("gateway_service_seconds_total", "counter", "seconds", (*_LANE, "time"), "6",
           "Time of batches that had a prediction: expected, and actual; actual by expected is the drift"),
    Metric("gateway_service_shifts_total", "counter", "", _LANE, "6",
           "Sudden changes of a backend's speed that the service model has followed"),
    Metric("gateway_cold_start_seconds", "gauge", "seconds", _LANE, "6", "How long the last start from zero took", "max"),
    # answers
    Metric("gateway_rows_total", "counter", "rows", _LANE, "7", "Rows inferred with success"),
    Metric("gateway_from_worker_seconds_total", "counter", "seconds", _LANE, "7",
           "Time from an execution's end until its outputs are here"),
    Metric("gateway_dropped_outputs_total", "counter", "", _LANE, "7",
           "Outputs of requests that were over before: cancelled, or past their deadline"),
    Metric("gateway_parts_total", "counter", "", _EDGE, "8", "Parts of a decoupled model's answers"),
    Metric("gateway_part_gap_seconds", "histogram", "seconds", _EDGE, "8",
           "From one part of a decoupled model's answer to the next"),
    # cost
    Metric("gateway_cost_usd_total", "counter", "usd", (*_LANE, "state"), "cost",
           "Price of the backend, busy and idle: together usd_per_hour times the life of the process that holds its sessions"),
    Metric("gateway_cost_usd_per_hour", "gauge", "usd_per_hour", _LANE, "cost", "What the backend costs now"),
    Metric("gateway_busy_usd_total", "counter", "usd", _LANE, "cost",
           "Price of the sessions while they ran batches. Until the next release: gateway_cost_usd_total has it"),
    # processes
    Metric("gateway_info", "gauge", "", ("version", "python", "ray", "instance_type"), "process",
           "1; what this is. ray: its version; empty without", "max"),
    Metric("gateway_processes", "gauge", "", _ROLE, "process",
           "Processes that live: ingress, replica (of a backend), session (isolation: process)"),
    Metric("gateway_replicas", "gauge", "", _LANE, "process",
           "Replica processes of the backend that live on this node, or that tell it"),
    Metric("gateway_process_cpu_seconds_total", "counter", "seconds", _ROLE, "process", "Processor time, user and system"),
    Metric("gateway_process_resident_memory_bytes", "gauge", "bytes", _ROLE, "process", "Resident memory"),
    Metric("gateway_process_start_time_seconds", "gauge", "seconds", _ROLE, "process",
           "When the youngest of them started, since 1970", "max"),
    Metric("gateway_loop_lag_seconds", "histogram", "seconds", _ROLE, "process",
           "How much later than asked the event loop called back; asked each second, of a replica each tenth of one"),
    Metric("gateway_trace_spans_total", "counter", "", (*_ROLE, "result"), "process",
           "Spans of traces: exported; dropped: the queue had no room; failed: the collector did not take them"),
    Metric("gateway_certificate_expiry_timestamp_seconds", "gauge", "seconds", (*_ROLE, "file"), "process",
           "When the first certificate of server.tls' certificate or client_ca expires, since 1970", "min"),
)  # fmt: skip

BY_NAME: Final = {metric.name: metric for metric in TABLE}


@dataclass(frozen=True, slots=True)
class TritonMetric:
    """A name of Triton's, with what it has there. Source: its docs/user_guide/metrics.md."""

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    labels: tuple[str, ...] = _MODEL


TRITON_TABLE: Final = (
    TritonMetric("nv_inference_request_success", "counter", "Requests answered with success"),
    TritonMetric("nv_inference_request_failure", "counter", "Requests that failed: REJECTED, CANCELED, BACKEND or OTHER",
                 (*_MODEL, "reason")),
    TritonMetric("nv_inference_count", "counter", "Rows inferred with success"),
    TritonMetric("nv_inference_exec_count", "counter", "Batches executed"),
    TritonMetric("nv_inference_request_duration_us", "counter", "Time of successful requests, in microseconds"),
    TritonMetric("nv_inference_queue_duration_us", "counter", "Time of requests in the queue"),
    TritonMetric("nv_inference_compute_input_duration_us", "counter", "Time of requests from their batch's close to its run"),
    TritonMetric("nv_inference_compute_infer_duration_us", "counter", "Time of requests on the model"),
    TritonMetric("nv_inference_compute_output_duration_us", "counter", "Time of encoding answers"),
    TritonMetric("nv_inference_pending_request_count", "gauge", "Requests that wait"),
)  # fmt: skip
