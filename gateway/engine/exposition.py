"""The text of a scrape, from the blocks of all processes. Written anew is only what has changed, and all of it in slices."""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from itertools import chain
from typing import Final

from gateway.engine.metric_blocks import FIELDS, SEP, Edges, Exemplar, Key, State, place
from gateway.engine.metric_pages import BLOCKS, MetricPage, escaped, heads
from gateway.engine.metric_table import TABLE, TRITON_TABLE
from gateway.engine.model_statistics import ModelStatistics
from gateway.protocols.media import ranges

_LATENCY: Final = place("edge", "gateway_request_duration_seconds")
_STAGES: Final = {
    stage: place("lane", "gateway_stage_duration_seconds", stage=stage) for stage in ("queue", "batch_wait", "compute")
}
_ROWS_DONE: Final = place("lane", "gateway_rows_total")
_WAITING: Final = place("lane", "gateway_queue_requests")
_OPENMETRICS: Final = "application/openmetrics-text"
_VERSIONS: Final = ("", "0.0.1", "1.0.0")  # of OpenMetrics: 1.0.0 is written, and who reads 0.0.1 reads that


def prefers_openmetrics(accept: bytes) -> bool:
    """Whether an Accept header names OpenMetrics, and likes no text better."""
    liked: dict[str, float] = {}
    for media, parameters, likes in ranges(accept):
        if media != _OPENMETRICS or parameters.get("version", "") in _VERSIONS:
            liked[media] = max(likes, liked.get(media, 0.0))
    text = next((liked[media] for media in ("text/plain", "text/*", "*/*") if media in liked), 0.0)
    return liked.get(_OPENMETRICS, 0.0) > 0 and liked[_OPENMETRICS] >= text


class Exposition:
    """What was written last, by page, for both formats."""

    def __init__(
        self, edges: Edges, exemplars: Callable[[str, str, str], Mapping[int, Exemplar] | None], *, triton_names: bool
    ) -> None:
        """exemplars: of a model, version and protocol, by bucket. triton_names: show Triton's names beside ours."""
        self._edges = edges
        self._exemplars = exemplars
        self._triton_names = triton_names
        self._pages: dict[str, list[MetricPage]] = {kind: [] for kind in FIELDS}
        self._paged: dict[Key, MetricPage] = {}
        self._heads = {form: [(name, head.encode()) for name, head in heads(TABLE, openmetrics=form)] for form in (False, True)}
        self._order = _order()

    def written(self, blocks: Mapping[Key, State], *, openmetrics: bool) -> Generator[None, None, bytes]:
        """Of all blocks there are, in slices."""
        yield from self._arrange(blocks)
        for page in chain.from_iterable(self._pages.values()):
            yield from page.update([blocks[key] for key in page.keys])
            yield
        parts: list[bytes] = []
        for name, head in self._heads[openmetrics]:
            texts = []
            for kind, index in self._order[name]:
                if openmetrics and kind == "edge" and index == _LATENCY:
                    texts += [page.with_exemplars(index, self._exemplars_of) for page in self._pages[kind]]
                else:
                    texts += [page.texts[index] for page in self._pages[kind]]
            if any(texts):
                parts += (head, *texts)
        if self._triton_names:
            parts.append((yield from self._triton(blocks, openmetrics)).encode())
        if openmetrics:
            parts.append(b"\n# EOF")
        if not parts:
            return b""
        parts[0] = parts[0].removeprefix(b"\n")
        parts.append(b"\n")
        yield
        return b"".join(parts)

    def _arrange(self, blocks: Mapping[Key, State]) -> Generator[None, None, None]:
        """Put new blocks onto pages that have room, and take those away that are gone."""
        for key in self._paged.keys() - blocks.keys():
            page = self._paged.pop(key)
            page.keys.remove(key)
            page.clear()
            if not page.keys:
                self._pages[key.kind].remove(page)
            yield
        for key in [key for key in blocks if key not in self._paged]:
            pages = self._pages[key.kind]
            if all(len(page.keys) == BLOCKS for page in pages):
                pages.append(MetricPage(key.kind, self._edges))
            page = next(page for page in pages if len(page.keys) < BLOCKS)
            page.keys.append(key)
            page.clear()
            self._paged[key] = page
            yield

    def _exemplars_of(self, key: Key) -> Mapping[int, Exemplar] | None:
        model, version, protocol = key.labels
        return self._exemplars(model, version, protocol)

    def _triton(self, blocks: Mapping[Key, State], openmetrics: bool) -> Generator[None, None, str]:
        found = yield from statistics_of(blocks)
        lines: dict[str, list[str]] = {metric.name: [] for metric in TRITON_TABLE}
        for (model, version), statistics in found.items():
            labels = f'model="{escaped(model)}",version="{escaped(version)}"'
            for name, value in statistics.as_triton().items():
                family, _, reason = name.partition(":")
                more = f',reason="{reason}"' if reason else ""
                lines[family].append(f"\n{family}{{{labels}{more}}} {value}")
            yield
        texts = []
        for metric in TRITON_TABLE:
            # OpenMetrics has no counter whose name does not end in _total.
            kind = "unknown" if openmetrics and metric.kind == "counter" else metric.kind
            if lines[metric.name]:
                texts.append(f"\n# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {kind}")
                texts += lines[metric.name]
        return "".join(texts)


def _order() -> dict[str, list[tuple[str, int]]]:
    """Of each family, in which kinds of block it stands, and where."""
    found: dict[str, list[tuple[str, int]]] = {metric.name: [] for metric in TABLE}
    for kind, fields in FIELDS.items():
        for index, field in enumerate(fields):
            if field.name:
                found[field.name].append((kind, index))
    return found


def statistics_of(blocks: Mapping[Key, State]) -> Generator[None, None, dict[tuple[str, str], ModelStatistics]]:
    """By model and version."""
    found: dict[tuple[str, str], ModelStatistics] = defaultdict(ModelStatistics)
    for key, state in blocks.items():
        if key.kind in ("edge", "lane") and key.labels[0]:
            (_add_edge if key.kind == "edge" else _add_lane)(found[key.labels[0], key.labels[1]], state)
            yield
    return found


def _add_edge(statistics: ModelStatistics, state: State) -> None:
    codes, latency, failed_ns, _, last_s, decode, encode, *_ = state
    statistics.add_requests(codes, latency[-1], failed_ns, last_s)
    statistics.add_stage("decode", decode)
    statistics.add_stage("encode", encode)


def _add_lane(statistics: ModelStatistics, state: State) -> None:
    statistics.rows += state[_ROWS_DONE]
    statistics.pending += state[_WAITING] or 0
    for stage, index in _STAGES.items():
        statistics.add_stage(stage, state[index])
    for key, number in state[-1].items():
        rows, _, of = key.partition(SEP)
        statistics.executions_by_rows[int(rows)].add(of, number)
