"""What recorders give, how it is added up, and how it reads as text.

A block is what one recorder counts: a kind, its label values, and a value for each field of the kind: a number; a tuple, which
is a histogram (the count of each bucket, of what lies beyond the last edge, and the sum); a mapping from inner label values,
joined by SEP, to numbers; or None, where there is nothing to tell. Times of counters and histograms are integer nanoseconds.
Blocks of equal kind and labels are merged, be they of one process or of several: so a sum is exact.

Histograms are tuples, and mappings plain dicts of numbers: Python's garbage collector does not keep an eye on them. Of lists,
or copies of a defaultdict, it would go through thousands again and again.

A `BlockText` is that of one block, by family; what has not changed since the last scrape is not written again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

from gateway.engine.metric_table import BY_NAME, Metric

SEP: Final = "\x1f"

State = tuple[Any, ...]


class Key(NamedTuple):
    """Which block."""

    kind: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a block. name: of its family; "": told to nobody. inner: labels of a mapping. fixed: labels it always has."""

    name: str
    inner: tuple[str, ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()

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


def merge(kind: str, one: State, other: State) -> State:
    """Two states of one block as one. Histograms of other edges than `one` has are left out."""
    return tuple(_merge(field, a, b) for field, a, b in zip(FIELDS[kind], one, other, strict=True))


def _merge(field: Field, one: Any, other: Any) -> Any:
    if one is None:
        return other
    if other is None:
        return one
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip(one, other, strict=True)) if len(one) == len(other) else one
    if isinstance(one, dict):
        found = dict(one)
        for key, value in other.items():
            found[key] = _merge(field, found.get(key), value)
        return found
    merged = field.metric.merged if field.metric is not None else "sum"
    return one + other if merged == "sum" else max(one, other) if merged == "max" else min(one, other)


Edges = Callable[[Key, Field, int], tuple[float, ...] | None]
"""The upper bounds of a histogram of so many values, in its family's unit; None: unknown, and the histogram is left out."""


class BlockText:
    """The text of one block, by place of the field. Kept from scrape to scrape."""

    __slots__ = ("_forms", "_labels", "_state", "key", "texts")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.texts: list[bytes] = [b""] * len(FIELDS[key.kind])
        self._labels = dict(zip(LABELS[key.kind], key.labels, strict=True))
        self._state: State = (None,) * len(self.texts)
        self._forms: dict[Any, str] = {}  # what stands before a value, or all of a histogram with gaps for its values

    def update(self, state: State, edges: Edges) -> None:
        for index, (field, value, before) in enumerate(zip(FIELDS[self.key.kind], state, self._state, strict=True)):
            if value != before and field.name:
                self.texts[index] = self._text(index, field, value, edges).encode()
        self._state = state

    def with_exemplars(self, index: int, exemplars: Mapping[int, str]) -> bytes:
        """The text of a histogram with these behind the lines of their buckets."""
        lines = self.texts[index].splitlines(keepends=True)
        for bucket, exemplar in exemplars.items():
            if bucket < len(lines):
                lines[bucket] = b"%b # %b\n" % (lines[bucket][:-1], exemplar.encode())
        return b"".join(lines)

    def _text(self, index: int, field: Field, value: Any, edges: Edges) -> str:
        metric = field.metric
        assert metric is not None
        if value is None:
            return ""
        time = metric.unit == "seconds" and metric.kind != "gauge"
        if isinstance(value, dict):
            return "".join(
                f"{self._form(index, field, metric, inner)}{number / 1e9 if time else number}\n"
                for inner, number in value.items()
            )
        if not isinstance(value, tuple):
            return f"{self._form(index, field, metric, '')}{value / 1e9 if time else value}\n"
        form = self._forms.get((index, len(value)))
        if form is None:
            bounds = edges(self.key, field, len(value))
            if bounds is None:
                return ""
            form = self._forms[index, len(value)] = self._histogram(field, metric, bounds)
        counts = value[:-1]
        if not any(counts):  # nobody reads it
            return ""
        cumulated = list(accumulate(counts))
        return form % (*cumulated, value[-1] / 1e9 if time else value[-1], cumulated[-1])

    def _form(self, index: int, field: Field, metric: Metric, inner: str) -> str:
        form = self._forms.get((index, inner))
        if form is None:
            named = zip(field.inner, inner.split(SEP), strict=True) if field.inner else ()
            labels = self._labels | dict(field.fixed) | dict(named)
            form = self._forms[index, inner] = f"{metric.name}{_written(labels)} "
        return form

    def _histogram(self, field: Field, metric: Metric, bounds: Sequence[float]) -> str:
        labels = self._labels | dict(field.fixed)
        les = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        lines = [f"{metric.name}_bucket{_written(labels | {'le': le})}" for le in les]
        lines += [f"{metric.name}_sum{_written(labels)}", f"{metric.name}_count{_written(labels)}"]
        return "".join(f"{line.replace('%', '%%')} %s\n" for line in lines)


def _written(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escaped(labels[name])}"' for name in sorted(labels)) + "}"


def escaped(value: str) -> str:
    """A label's value as both text formats have it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def heads(metrics: Iterable[Metric], *, openmetrics: bool) -> Iterator[tuple[str, str]]:
    """The name of each family, and the lines before its samples."""
    for metric in metrics:
        name = metric.name.removesuffix("_total") if openmetrics else metric.name
        head = f"# HELP {name} {metric.meaning}\n# TYPE {name} {metric.kind}\n"
        if openmetrics and metric.unit and name.endswith(f"_{metric.unit}"):
            head += f"# UNIT {name} {metric.unit}\n"
        yield metric.name, head
