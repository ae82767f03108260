"""The text of metrics, from the states of blocks.

A page is some blocks of one kind. What stands before its numbers is kept from scrape to scrape, and each family's text until a
number of it changes. The numbers of a family are made into text by one call and put between what is kept by another: 110 us for
50 histograms, where formatting them one by one takes 430.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Final

import orjson

from gateway.engine.metric_blocks import FIELDS, LABELS, SEP, Edges, Exemplar, Field, Key, State
from gateway.engine.metric_table import Metric

BLOCKS: Final = 32
"""Of a page, at most. A family that has changed is written anew for all of them."""

_Shape = tuple[Any, ...]
"""What a value's lines are: the edges of a histogram, the inner label values of others; empty: it has none."""


class MetricPage:
    """The text of some blocks, by place of the field. Each line begins with its line break."""

    __slots__ = ("_columns", "_edges", "_kind", "_parts", "_shapes", "keys", "texts")

    def __init__(self, kind: str, edges: Edges) -> None:
        self.keys: list[Key] = []
        self._kind = kind
        self._edges = edges
        self.clear()

    def clear(self) -> None:
        """Write all of it anew, as other keys make it necessary."""
        fields = len(FIELDS[self._kind])
        self.texts: list[bytes] = [b""] * fields
        self._columns: list[tuple[Any, ...] | None] = [None] * fields  # the values that a text was made of
        self._shapes: list[list[_Shape]] = [[] for _ in range(fields)]
        self._parts: list[list[bytes]] = [[] for _ in range(fields)]  # what stands before a number, and the number, by turns

    def update(self, states: Sequence[State]) -> Generator[None, None, None]:
        """states: of its keys."""
        for index, (field, column) in enumerate(zip(FIELDS[self._kind], zip(*states, strict=True), strict=True)):
            if field.metric is not None and column != self._columns[index]:
                yield from self._write(index, field, field.metric, column)
                self._columns[index] = column
                yield

    def with_exemplars(self, index: int, exemplars: Callable[[Key], Mapping[int, Exemplar] | None]) -> bytes:
        """The text of a histogram with those behind the lines of their buckets."""
        lines = self.texts[index].split(b"\n")
        at = 1
        for key, edges in zip(self.keys, self._shapes[index], strict=True):
            if edges:
                for bucket, (trace_id, took_ns, at_s) in (exemplars(key) or {}).items():
                    lines[at + bucket] += f' # {{trace_id="{trace_id}"}} {took_ns / 1e9} {at_s:.3f}'.encode()
                at += len(edges) + 3
        return b"\n".join(lines)

    def _write(self, index: int, field: Field, metric: Metric, column: tuple[Any, ...]) -> Generator[None, None, None]:
        time = metric.unit == "seconds" and metric.kind != "gauge"
        numbers: list[float] = []
        shapes: list[_Shape] = []
        for key, value in zip(self.keys, column, strict=True):
            shape: _Shape = ()
            if isinstance(value, tuple):
                cumulated = list(accumulate(value[:-1]))
                if cumulated[-1]:  # or nobody reads it
                    shape = self._edges(key, field, len(value)) or ()
                if shape:
                    numbers += cumulated
                    numbers += (value[-1] / 1e9 if time else value[-1], cumulated[-1])
            elif isinstance(value, dict):
                shape = tuple(value)
                numbers += [number / 1e9 for number in value.values()] if time else value.values()
            elif value is not None:
                shape = ("",)
                numbers.append(value / 1e9 if time else value)
            shapes.append(shape)
        parts = self._parts[index]
        if shapes != self._shapes[index]:
            parts = []
            for key, shape in zip(self.keys, shapes, strict=True):
                labels = dict(zip(LABELS[self._kind], key.labels, strict=True)) | dict(field.fixed)
                histogram = metric.kind == "histogram"
                lines = _histogram(metric, labels, shape) if histogram else _lines(field, metric, labels, shape)
                parts += chain.from_iterable((f"\n{line} ".encode(), b"") for line in lines)
                yield
            self._shapes[index], self._parts[index] = shapes, parts
        if parts:
            parts[1::2] = orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].replace(b"null", b"NaN").split(b",")
        self.texts[index] = b"".join(parts)


def _histogram(metric: Metric, labels: Mapping[str, str], edges: _Shape) -> Iterator[str]:
    if edges:
        # Within a value a quotation mark stands behind a backslash.
        before, after = _written({**labels, "le": ""}).split('le=""', 1)
        for le in (*(repr(float(edge)) for edge in edges), "+Inf"):
            yield f'{metric.name}_bucket{before}le="{le}"{after}'
        for suffix in ("_sum", "_count"):
            yield f"{metric.name}{suffix}{_written(labels)}"


def _lines(field: Field, metric: Metric, labels: Mapping[str, str], inner: _Shape) -> Iterator[str]:
    for values in inner:
        named = zip(field.inner, values.split(SEP), strict=True) if field.inner else ()
        yield f"{metric.name}{_written({**labels, **dict(named)})}"


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
        head = f"\n# HELP {name} {metric.meaning}\n# TYPE {name} {metric.kind}"
        if openmetrics and metric.unit and name.endswith(f"_{metric.unit}"):
            head += f"\n# UNIT {name} {metric.unit}"
        yield metric.name, head
