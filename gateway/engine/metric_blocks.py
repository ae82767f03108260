"""What recorders give, and how it is added up.

A block is what one recorder counts: a kind, its label values, and a value for each field of the kind: a number; a tuple, which
is a histogram (the count of each bucket, of what lies beyond the last edge, and the sum); a mapping from inner label values,
joined by SEP, to numbers; or None, where there is nothing to tell. Times of counters and histograms are integer nanoseconds.
Blocks of equal kind and labels are merged, be they of one process or of several: so a sum is exact.

Histograms are tuples, and mappings plain dicts of numbers: Python's garbage collector does not keep an eye on them. Of lists,
or copies of a defaultdict, it would go through thousands again and again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add
from typing import Any, Final, NamedTuple

from gateway.engine.metric_table import BY_NAME, Metric

SEP: Final = "\x1f"

State = tuple[Any, ...]
Exemplar = tuple[str, int, float]
"""Of a bucket: the trace's id, how long its request took in ns, and when it ended, in seconds of the Unix epoch."""


class Key(NamedTuple):
    """Which block."""

    kind: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a block. name: of its family; "": told to nobody. inner: labels of a mapping. fixed: labels it always has.

    same: all blocks that are merged have it alike.
    """

    name: str
    inner: tuple[str, ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()
    same: bool = False

    @property
    def metric(self) -> Metric | None:
        return BY_NAME.get(self.name)


def _stage(name: str) -> Field:
    return Field("gateway_stage_duration_seconds", fixed=(("stage", name),))


LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "edge": ("model", "version", "protocol"),
    "lane": ("model", "version", "backend"),
    "model": ("model", "version"),
    "cost": ("model", "version", "backend"),
    "process": ("role",),
    "node": (),
}

FIELDS: Final[Mapping[str, tuple[Field, ...]]] = {
    "edge": (
        Field("gateway_requests_total", ("code",)),
        Field("gateway_request_duration_seconds"),
        Field("gateway_failed_request_seconds_total"),
        Field("gateway_slo_requests_total", ("result",)),
        Field("gateway_last_inference_timestamp_seconds"),
        _stage("decode"),
        _stage("encode"),
        Field("gateway_parts_total"),
        Field("gateway_part_gap_seconds"),
        Field("", same=True),  # the objective that is an edge of the latency's buckets, in ns
    ),
    "lane": (
        Field("gateway_queue_rows"),
        Field("gateway_queue_requests"),
        Field("gateway_queue_age_seconds"),
        Field("gateway_workers"),
        Field("gateway_busy_workers"),
        Field("gateway_service_time_seconds", ("bucket", "rows", "estimate")),
        Field("gateway_cold_start_seconds"),
        Field("gateway_batches_total", ("reason",)),
        Field("gateway_batch_rows"),
        Field("gateway_padding_rows_total"),
        Field("gateway_worker_busy_seconds_total"),
        Field("gateway_to_worker_seconds_total"),
        Field("gateway_compute_seconds_total"),
        Field("gateway_from_worker_seconds_total"),
        Field("gateway_retries_total"),
        Field("gateway_executions_total"),
        Field("gateway_failed_executions_total"),
        Field("gateway_service_seconds_total", ("time",)),
        Field("gateway_service_shifts_total"),
        Field("gateway_rows_total"),
        Field("gateway_dropped_outputs_total"),
        _stage("queue"),
        _stage("batch_wait"),
        _stage("compute"),
        Field("", ("rows", "of")),  # batches and their times by rows, for the statistics extension
    ),
    "model": (
        Field("gateway_slo_seconds"),
        Field("gateway_routed_total", ("backend", "reason")),
        Field("gateway_copies_total", ("backend", "why", "result")),
        Field("gateway_ejections_total", ("backend",)),
        Field("gateway_ejected", ("backend",)),
        Field("gateway_busy_usd_total", ("backend",)),
    ),
    "cost": (
        Field("gateway_cost_usd_total", ("state",)),
        Field("gateway_cost_usd_per_hour"),
        Field("gateway_replicas"),
    ),
    "process": (
        Field("gateway_processes"),
        Field("gateway_process_cpu_seconds_total"),
        Field("gateway_process_resident_memory_bytes"),
        Field("gateway_process_start_time_seconds"),
        Field("gateway_loop_lag_seconds"),
        Field("gateway_trace_spans_total", ("result",)),
        Field("gateway_certificate_expiry_timestamp_seconds", ("file",)),
    ),
    "node": (
        Field("gateway_info", ("version", "python", "ray", "instance_type")),
        Field("gateway_model_ready", ("model", "version")),
    ),
}


def place(kind: str, name: str, **fixed: str) -> int:
    """Where a field stands in the state of a kind."""
    wanted = tuple(fixed.items())
    return next(index for index, field in enumerate(FIELDS[kind]) if field.name == name and field.fixed == wanted)


def counters_only(kind: str, state: State) -> State:
    """What still counts when its process, or its lane, has ended."""
    return tuple(
        None if field.metric is not None and field.metric.kind == "gauge" else value
        for field, value in zip(FIELDS[kind], state, strict=True)
    )


def less(kind: str, one: State, other: State) -> State:
    """What one counts beyond the other; its own gauges."""
    return tuple(map(_less, _COUNTERS[kind], one, other))


def most(kind: str, one: State, other: State) -> State:
    """The larger of two counts, number by number; the gauges of the first."""
    return tuple(
        _merge(max, mine, others) if counter else mine
        for counter, mine, others in zip(_COUNTERS[kind], one, other, strict=True)
    )


def merge(kind: str, one: State, other: State) -> State:
    """Two states of one block as one, of equal `same`. Histograms of another length than `one` has are left out."""
    return tuple(map(_merge, _MERGED[kind], one, other))


def _merge(merged: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    if one is None:
        return other
    if other is None:
        return one
    if isinstance(one, tuple):
        return tuple(map(merged, one, other)) if len(one) == len(other) else one
    if isinstance(one, dict):
        found = dict(one)
        for key, value in other.items():
            found[key] = merged(found[key], value) if key in found else value
        return found
    return merged(one, other)


def _less(counter: bool, one: Any, other: Any) -> Any:
    if not counter or one is None or other is None:
        return one
    if isinstance(one, tuple):
        return tuple(_less(True, *pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return {key: _less(True, value, other.get(key, 0)) for key, value in one.items()}
    return max(0, one - other)


_COUNTERS: Final = {
    kind: tuple(field.metric is None or field.metric.kind != "gauge" for field in fields) for kind, fields in FIELDS.items()
}
_MERGES: Final[Mapping[str, Callable[[Any, Any], Any]]] = {"sum": add, "max": max, "min": min}
_MERGED: Final = {
    kind: tuple(_MERGES["sum" if field.metric is None else field.metric.merged] if not field.same else max for field in fields)
    for kind, fields in FIELDS.items()
}


Edges = Callable[[Key, Field, int], tuple[float, ...] | None]
"""The upper bounds of a histogram of so many values, in its family's unit; None: unknown, and the histogram is left out."""
