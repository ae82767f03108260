"""The text of a scrape, from the blocks of all processes. Written anew is only what has changed, and all of it in slices."""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from typing import Final

from gateway.engine.metric_blocks import FIELDS, SEP, BlockText, Edges, Key, State, escaped, heads, place
from gateway.engine.metric_table import TABLE, TRITON_TABLE
from gateway.engine.model_statistics import ModelStatistics

_LATENCY: Final = place("edge", "gateway_request_duration_seconds")
_STAGES: Final = {
    stage: place("lane", "gateway_stage_duration_seconds", stage=stage) for stage in ("queue", "batch_wait", "compute")
}
_ROWS_DONE: Final = place("lane", "gateway_rows_total")
_WAITING: Final = place("lane", "gateway_queue_requests")


class Exposition:
    """What was written last, by block, in both formats."""

    def __init__(
        self, edges: Edges, exemplars: Callable[[str, str, str], Mapping[int, str] | None], *, triton_names: bool
    ) -> None:
        """exemplars: of a model, version and protocol, by bucket. triton_names: show Triton's names beside ours."""
        self._edges = edges
        self._exemplars = exemplars
        self._triton_names = triton_names
        self._texts: dict[Key, BlockText] = {}
        self._heads = {form: [(name, head.encode()) for name, head in heads(TABLE, openmetrics=form)] for form in (False, True)}
        self._order = _order()

    def written(self, blocks: Mapping[Key, State], *, openmetrics: bool) -> Generator[None, None, bytes]:
        """Of all blocks there are, in slices."""
        for key, state in blocks.items():
            block = self._texts.get(key)
            if block is None:
                block = self._texts[key] = BlockText(key)
            block.update(state, self._edges)
            yield
        for key in self._texts.keys() - blocks.keys():
            del self._texts[key]
        by_kind: dict[str, list[BlockText]] = defaultdict(list)
        for block in self._texts.values():
            by_kind[block.key.kind].append(block)
        parts: list[bytes] = []
        for name, head in self._heads[openmetrics]:
            bodies = []
            for kind, index in self._order[name]:
                bodies.append(b"".join([self._text_of(block, index, openmetrics) for block in by_kind[kind]]))
                yield
            if any(bodies):
                parts += (head, *bodies)
        if self._triton_names:
            parts.append((yield from self._triton(blocks, openmetrics)).encode())
        if openmetrics:
            parts.append(b"# EOF\n")
        return b"".join(parts)

    def _text_of(self, block: BlockText, index: int, openmetrics: bool) -> bytes:
        if openmetrics and index == _LATENCY and block.key.kind == "edge":
            model, version, protocol = block.key.labels
            exemplars = self._exemplars(model, version, protocol)
            if exemplars:
                return block.with_exemplars(index, exemplars)
        return block.texts[index]

    def _triton(self, blocks: Mapping[Key, State], openmetrics: bool) -> Generator[None, None, str]:
        found = yield from statistics_of(blocks)
        lines: dict[str, list[str]] = {metric.name: [] for metric in TRITON_TABLE}
        for (model, version), statistics in found.items():
            labels = f'model="{escaped(model)}",version="{escaped(version)}"'
            for name, value in statistics.as_triton().items():
                family, _, reason = name.partition(":")
                more = f',reason="{reason}"' if reason else ""
                lines[family].append(f"{family}{{{labels}{more}}} {value}\n")
            yield
        texts = []
        for metric in TRITON_TABLE:
            # OpenMetrics has no counter whose name does not end in _total.
            kind = "unknown" if openmetrics and metric.kind == "counter" else metric.kind
            if lines[metric.name]:
                texts.append(f"# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {kind}\n")
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
    codes, latency, failed_ns, _, last_s, decode, encode, _, _ = state
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
