"""Metrics: counted in plain integers, put into text when they are asked for, and one answer for all processes of a node.

Recorders (`LaneMetrics`, `RoutingMetrics`, `EndpointMetrics`, `Cost`) count on attributes and lists; what comes with every
request is logged as a tuple, and counted 64 at a time, or when somebody asks. A scrape asks each for its state
(`gateway.engine.metric_blocks`), adds what the other processes of the node have published (`gateway.engine.metric_files`), and
writes anew only the text of what has changed. It does so in slices, so that no request waits for it.

What is counted on stands in `gateway.engine.metric_table`. The statistics extension and Triton's names are read from the same
states, so they cannot disagree.

Several ingress processes share one port, so a scrape reaches any of them. Each publishes its own states every
`FLUSH_INTERVAL_S`, and when it is scraped; what another process shows of it is up to so old, and never goes back.
"""

import asyncio
import logging
import platform
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final, TypeVar, cast

from gateway import __version__
from gateway.batching.batch import Batch
from gateway.config import ModelSection
from gateway.engine.metric_blocks import (
    FIELDS,
    SEP,
    BlockText,
    Field,
    Key,
    State,
    counters_only,
    escaped,
    heads,
    merge,
    place,
)
from gateway.engine.metric_files import Block, NodeFiles
from gateway.engine.metric_table import TABLE, TRITON_TABLE
from gateway.engine.model_statistics import OK, ModelStatistics
from gateway.engine.process_facts import age_s, ended_children_cpu_ns, own_memory_bytes, used_by
from gateway.engine.runner import Execution
from gateway.errors import Cancelled, Code

FLUSH_INTERVAL_S: Final = 1.0
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_LOGGED: Final = 64  # events, until they are counted
_SLICE_NS: Final = 250_000  # of the event loop, at a time: an inference passes it several times

_LATENCY_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_CODEC_S: Final = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.001, 0.005, 0.025)
_STAGE_S: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_LAG_S: Final = (0.001, 0.005, 0.025, 0.1, 0.5)
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def _ns(bounds_s: Iterable[float]) -> tuple[int, ...]:
    return tuple(round(bound * 1e9) for bound in bounds_s)


_CODEC_NS: Final = _ns(_CODEC_S)
_STAGE_NS: Final = _ns(_STAGE_S)
_LAG_NS: Final = _ns(_LAG_S)

# An SLO is not missed by what the client got wrong, or did not wait for.
_CLIENTS: Final = frozenset(
    code.value
    for code in (
        Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS, Code.NOT_FOUND, Code.UNAUTHENTICATED, Code.FORBIDDEN, Code.TOO_LARGE,
        Code.CANCELLED, Code.UNSUPPORTED,
    )
)  # fmt: skip

T = TypeVar("T")

log = logging.getLogger(__name__)


class Metrics:
    """All metrics of this process. Its users get a recorder once and count on that. On the event loop's thread."""

    def __init__(
        self,
        models: Iterable[ModelSection] = (),
        *,
        directory: Path | None = None,
        enabled: bool = True,
        triton_names: bool = False,
        role: str = "ingress",
        instance_type: str = "",
        session_pids: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """models: whose objectives become bucket edges. directory: shared with the other processes of the node; None: there are
        none. If it cannot be used, they do not see each other, which the log says. enabled: False: nothing is counted.
        triton_names: show Triton's names beside ours. session_pids: of processes that hold a session for this one.
        """
        self.enabled = enabled
        self.triton_names = triton_names
        self._slo_ns = {(model.name, model.version): round(model.slo.p99_ms * 1e6) for model in models if model.slo}
        self._files: NodeFiles | None = None
        self._endpoints: dict[tuple[str, str, str], EndpointMetrics] = {}
        self._lanes: list[LaneMetrics] = []
        self._routings: list[RoutingMetrics] = []
        self._costs: dict[tuple[str, str, str], Cost] = {}
        self._ended: dict[Key, State] = {}  # of lanes and models that have been closed here
        self._process = _Process(role, instance_type, session_pids)
        self._readiness: Callable[[], Iterable[tuple[str, str, bool]]] = tuple
        self._starting = True
        self._pages: dict[Key, BlockText] = {}
        self._heads = {form: dict(heads(TABLE, openmetrics=form)) for form in (False, True)}
        self._order = _order()
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._last: tuple[int, bool, bytes] | None = None  # when the last scrape began, its form, and what it gave
        if directory is not None and enabled:
            self._share(directory)

    # recorders

    def lane(
        self,
        model: str,
        version: str,
        backend: str,
        *,
        max_rows: int = _ROWS[-1],
    ) -> "LaneMetrics":
        """What one lane counts on. max_rows: of a batch."""
        made = (LaneMetrics if self.enabled else _NoLaneMetrics)((model, version, backend), max_rows, self._lane_ended)
        cost = self._costs.get((model, version, backend))
        if cost is not None:
            cost.lanes.append(made)
        self._lanes.append(made)
        return made

    def routing(self, model: str, version: str) -> "RoutingMetrics":
        """What the dispatcher of one model counts on."""
        made = (RoutingMetrics if self.enabled else _NoRoutingMetrics)(
            (model, version), self._slo_ns.get((model, version)), self._routing_ended
        )
        self._routings.append(made)
        return made

    def endpoint(self, model: str, version: str, protocol: str) -> "EndpointMetrics":
        """What one protocol counts the requests of one model on. model: empty for requests that named none that exists."""
        labels = (model, version, protocol)
        if labels not in self._endpoints:
            kind = EndpointMetrics if self.enabled else _NoEndpointMetrics
            self._endpoints[labels] = kind(labels, self._slo_ns.get((model, version)))
        return self._endpoints[labels]

    def cost(self, model: str, version: str, backend: str, usd_per_hour: float | None, sessions: int) -> "Cost":
        """What the price of one backend is counted on whose sessions this process holds. usd_per_hour: None: it is unknown."""
        labels = (model, version, backend)
        if labels not in self._costs:
            self._costs[labels] = Cost(labels, usd_per_hour, sessions, self._process.born_ns if self._starting else None)
        return self._costs[labels]

    def started(self) -> None:
        """What is held from now on costs from then, and what is held already since the process began."""
        self._starting = False

    def watch_models(self, readiness: Callable[[], Iterable[tuple[str, str, bool]]]) -> None:
        """readiness: gives name, version, and whether it serves, of each model; asked at each scrape."""
        self._readiness = readiness

    def watch_spans(self, spans: Callable[[], Mapping[str, int]]) -> None:
        """spans: gives how many there were, by result; asked at each scrape."""
        self._process.spans = spans

    # telling

    def flush(self) -> None:
        """Publish what was counted, at once."""
        _at_once(self._publish())

    def expose(self, *, openmetrics: bool = False) -> tuple[str, bytes]:
        """Content type and body of /metrics, for all processes of the node, at once: of many models it takes milliseconds."""
        return OPENMETRICS if openmetrics else TEXT, _at_once(self._exposition(openmetrics))

    async def scrape(self, accept: bytes) -> tuple[str, bytes]:
        """As `expose`, in slices. accept: the client's header. Those who come meanwhile share the next."""
        openmetrics = b"application/openmetrics-text" in accept
        came_ns = time.monotonic_ns()
        self._waiting += 1
        try:
            async with self._turn:
                last = self._last
                if last is None or last[0] < came_ns or last[1] != openmetrics:
                    began_ns = time.monotonic_ns()
                    body = await in_slices(self._exposition(openmetrics))
                    self._last = last = (began_ns, openmetrics, body)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._last = None
        return OPENMETRICS if openmetrics else TEXT, last[2]

    async def keep_publishing(self, interval_s: float = FLUSH_INTERVAL_S) -> None:
        """Until it is cancelled. Measures the loop's lag as well."""
        while True:
            asked_ns = time.monotonic_ns()
            await asyncio.sleep(interval_s)
            self._process.lagged(time.monotonic_ns() - asked_ns - round(interval_s * 1e9))
            try:
                await in_slices(self._publish())
            except Exception:
                log.exception("metrics are behind")

    def statistics(self, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], ModelStatistics]:
        """Of these (model, version), over all processes of the node."""
        return _at_once(self._statistics(_at_once(self._blocks(wanted))))

    async def counted(self) -> dict[Key, State]:
        """What all processes of the node have counted, by block. In slices."""
        return await in_slices(self._blocks())

    def bounds(self, key: Key, name: str, values: Sequence[int]) -> tuple[float, ...]:
        """Upper bounds of a histogram in a block, in its family's unit; none, if its edges are not those of this process."""
        return self._edges(key, FIELDS[key.kind][place(key.kind, name)], len(values)) or ()

    # states

    def _own(self, wanted: Collection[tuple[str, str]] | None = None) -> Iterator[tuple[Key, State]]:
        """A block may come several times: they are to be merged. wanted: models and versions; None: all there is."""
        # Taken now: in between slices lanes are opened, and closed into `_ended`.
        recorders: tuple[EndpointMetrics | LaneMetrics | RoutingMetrics, ...]
        recorders = (*self._endpoints.values(), *self._lanes, *self._routings)
        costs, ended = tuple(self._costs.values()), tuple(self._ended.items())
        now_ns = time.monotonic_ns()
        for recorder in recorders:
            if wanted is None or recorder.key.labels[:2] in wanted:
                yield recorder.key, recorder.state()
        for cost in costs:
            yield cost.key, cost.state(now_ns)
        yield from self._process.states(now_ns)
        ready = {SEP.join(one[:2]): int(one[2]) for one in self._readiness()}
        yield Key("node", ()), [self._process.info, ready or None]
        yield from ended

    def _publish(self) -> Generator[None, None, None]:
        if self._files is not None:
            self._files.publish((yield from self._collected()))

    def _collected(self, wanted: Collection[tuple[str, str]] | None = None) -> Generator[None, None, list[Block]]:
        found: list[Block] = []
        if self.enabled:
            for key, state in self._own(wanted):
                found.append((key.kind, key.labels, state))
                yield
        return found

    def _blocks(self, wanted: Collection[tuple[str, str]] | None = None) -> Generator[None, None, dict[Key, State]]:
        """Of all processes. wanted: as for `_own`; others may be among them."""
        found: dict[Key, State] = {}
        own = yield from self._collected(wanted)
        for block in own:
            _add(found, block)
            yield
        if self._files is not None:
            if wanted is None:
                self._files.publish(own)  # or who is scraped next, and cannot see this, would show less
            for published in self._files.others():
                for block in published.blocks:
                    _add(found, block, lives=published.lives)
                    yield
        return found

    def _share(self, directory: Path) -> None:
        try:
            files = NodeFiles(directory)
            self._fold(files)
        except OSError as exc:
            log.warning("the processes of this node do not see each other's metrics: %s: %s", directory, exc.strerror)
        else:
            self._files = files

    def _fold(self, files: NodeFiles) -> None:
        """Make one file of those of processes that have ended. Raises: OSError."""
        with files.folding():
            ended = files.ended()
            if len(ended) > 1:
                found: dict[Key, State] = {}
                for _, blocks in ended:
                    for block in blocks:
                        _add(found, block, lives=False)
                files.fold([name for name, _ in ended], [(key.kind, key.labels, state) for key, state in found.items()])

    def _lane_ended(self, lane: "LaneMetrics", state: State) -> None:
        cost = self._costs.get(lane.labels)
        if cost is not None and lane in cost.lanes:
            cost.lanes.remove(lane)
            cost.ended_busy_ns += lane.busy_ns()
            cost.release()
        if lane in self._lanes:
            self._lanes.remove(lane)
            self._keep(lane.key, state)

    def _routing_ended(self, routing: "RoutingMetrics", state: State) -> None:
        if routing in self._routings:
            self._routings.remove(routing)
            self._keep(routing.key, state)

    def _keep(self, key: Key, state: State) -> None:
        kept = counters_only(key.kind, state)
        self._ended[key] = merge(key.kind, self._ended[key], kept) if key in self._ended else kept

    # text

    def _exposition(self, openmetrics: bool) -> Generator[None, None, bytes]:
        blocks = yield from self._blocks()
        for key, state in blocks.items():
            page = self._pages.get(key)
            if page is None:
                page = self._pages[key] = BlockText(key)
            page.update(state, self._edges)
            yield
        for key in self._pages.keys() - blocks.keys():
            del self._pages[key]
        by_kind: dict[str, list[BlockText]] = defaultdict(list)
        for page in self._pages.values():
            by_kind[page.key.kind].append(page)
        texts: list[str] = []
        for name, head in self._heads[openmetrics].items():
            own = [self._page_text(page, index, openmetrics) for kind, index in self._order[name] for page in by_kind[kind]]
            body = "".join(own)
            if body:
                texts += (head, body)
            yield
        if self.triton_names:
            texts.append((yield from self._triton(blocks, openmetrics)))
        if openmetrics:
            texts.append("# EOF\n")
        encoded = []
        for text in texts:
            encoded.append(text.encode())
            yield
        return b"".join(encoded)

    def _page_text(self, page: BlockText, index: int, openmetrics: bool) -> str:
        if openmetrics and index == _LATENCY and page.key.kind == "edge":
            model, version, protocol = page.key.labels
            endpoint = self._endpoints.get((model, version, protocol))
            if endpoint is not None and endpoint.exemplars:
                return page.with_exemplars(index, endpoint.exemplars)
        return page.texts[index]

    def _edges(self, key: Key, field: Field, length: int) -> tuple[float, ...] | None:
        found: tuple[float, ...]
        if field.name == "gateway_request_duration_seconds":
            slo_ns = self._slo_ns.get((key.labels[0], key.labels[1]))
            found = tuple(bound / 1e9 for bound in _latency_ns(slo_ns))
        elif field.name == "gateway_batch_rows":
            found = _ROWS[: length - 2]
        elif field.name == "gateway_loop_lag_seconds":
            found = _LAG_S
        else:
            found = _CODEC_S if field.fixed in _CODED else _STAGE_S
        return found if len(found) == length - 2 else None

    def _statistics(self, blocks: dict[Key, State]) -> Generator[None, None, dict[tuple[str, str], ModelStatistics]]:
        found: dict[tuple[str, str], ModelStatistics] = defaultdict(ModelStatistics)
        for key, state in blocks.items():
            if key.kind in ("edge", "lane") and key.labels[0]:
                (_add_edge if key.kind == "edge" else _add_lane)(found[key.labels[0], key.labels[1]], state)
                yield
        return found

    def _triton(self, blocks: dict[Key, State], openmetrics: bool) -> Generator[None, None, str]:
        found = yield from self._statistics(blocks)
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


class LaneMetrics:
    """Counted by one lane."""

    __slots__ = (
        "_busy_ns", "_dropped", "_ended", "_executed", "_expected_ns", "_failed", "_gauges", "_last_bucket", "_log", "_padding",
        "_predicted_ns", "_queue", "_queue_ns", "_reasons", "_retries", "_rows", "_rows_failed", "_rows_sum", "_run", "_run_ns",
        "_wait", "_wait_ns", "key", "labels",
    )  # fmt: skip

    def __init__(self, labels: tuple[str, str, str], max_rows: int, ended: Callable[["LaneMetrics", State], None]) -> None:
        """ended: told with the last state."""
        self.labels = labels
        self.key = Key("lane", labels)
        self._ended = ended
        self._gauges: Callable[[], LaneGauges] | None = None
        self._last_bucket = bisect_left(_ROWS, max(1, max_rows)) + 1
        self._rows = [0] * (self._last_bucket + 1)
        self._rows_sum = self._rows_failed = self._padding = 0
        self._log: list[tuple[str, int, int, Sequence[int], int, int, int, int, int, int | None]] = []
        self._queue, self._wait, self._run = ([0] * (len(_STAGE_NS) + 1) for _ in range(3))
        self._queue_ns = self._wait_ns = self._run_ns = 0
        self._reasons: dict[str, int] = defaultdict(int)
        self._executed: dict[int, list[int]] = {}  # rows -> executions, ns to, in and from the workers
        self._busy_ns = self._predicted_ns = self._expected_ns = 0
        self._retries = self._failed = self._dropped = 0

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
        arrivals_ns = (parts[0].request.arrival_ns,) if len(parts) == 1 else [part.request.arrival_ns for part in parts]
        log = self._log
        log.append(
            (
                batch.reason, batch.rows, batch.padded_rows, arrivals_ns, batch.closed_ns, execution.started_ns,
                execution.finished_ns, now_ns, 0 if failed else batch.expected_ns, execution.first_part_ns,
            )
        )  # fmt: skip
        if failed:
            self._failed += not isinstance(execution.error, Cancelled)
            self._rows_failed += batch.rows
        if len(log) >= _LOGGED:
            self._count()

    def _count(self) -> None:
        """Put what was logged where it belongs: together, which takes half of what it takes one by one."""
        reasons, all_executed, sizes, last = self._reasons, self._executed, self._rows, self._last_bucket
        queue, wait, run = self._queue, self._wait, self._run
        log, self._log = self._log, []
        bisect, stage = bisect_left, _STAGE_NS
        queue_ns = wait_ns = run_ns = busy_ns = 0
        for reason, rows, padded, arrivals_ns, closed_ns, started_ns, finished_ns, now_ns, expected_ns, first_ns in log:
            reasons[reason] += 1
            bucket = (rows - 1).bit_length()  # the edges are powers of 2
            sizes[bucket if bucket < last else last] += 1
            self._rows_sum += rows
            self._padding += padded - rows
            for arrival_ns in arrivals_ns:
                waited_ns = closed_ns - arrival_ns
                queue_ns += waited_ns
                queue[bisect(stage, waited_ns)] += 1
            to_ns = started_ns - closed_ns
            compute_ns = finished_ns - started_ns
            requests = len(arrivals_ns)
            wait_ns += to_ns * requests
            wait[bisect(stage, to_ns)] += requests
            run_ns += compute_ns * requests
            run[bisect(stage, compute_ns)] += requests
            executed = all_executed.get(rows)
            if executed is None:
                executed = all_executed[rows] = [0, 0, 0, 0]
            executed[0] += 1
            executed[1] += to_ns
            executed[2] += compute_ns
            executed[3] += now_ns - finished_ns
            busy_ns += now_ns - closed_ns
            if expected_ns:
                self._expected_ns += expected_ns
                # Of a decoupled model the first part is predicted.
                self._predicted_ns += now_ns - closed_ns - (0 if first_ns is None else finished_ns - first_ns)
        self._queue_ns += queue_ns
        self._wait_ns += wait_ns
        self._run_ns += run_ns
        self._busy_ns += busy_ns

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
        totals = [sum(column) for column in zip(*self._executed.values(), strict=True)] or [0, 0, 0, 0]
        return [
            gauges.queue_rows if here else None,
            gauges.queue_requests if here else None,
            gauges.oldest_ns / 1e9 if here else None,
            gauges.workers if here else None,
            gauges.busy_workers if here else None,
            service or None,
            gauges.cold_start_ns / 1e9 if gauges.cold_start_ns is not None else None,
            dict(self._reasons),
            [*self._rows, self._rows_sum],
            self._padding,
            self._busy_ns + gauges.running_ns,
            totals[1],
            totals[2],
            totals[3],
            self._retries,
            totals[0],
            self._failed,
            {"expected": self._expected_ns, "actual": self._predicted_ns} if self._expected_ns else None,
            gauges.shifts,
            self._rows_sum - self._rows_failed,
            self._dropped,
            [*self._queue, self._queue_ns],
            [*self._wait, self._wait_ns],
            [*self._run, self._run_ns],
            {str(rows): list(counts) for rows, counts in self._executed.items()},
        ]


class RoutingMetrics:
    """Counted by the dispatcher of one model, by backend."""

    def __init__(self, labels: tuple[str, str], slo_ns: int | None, ended: Callable[["RoutingMetrics", State], None]) -> None:
        self.key = Key("model", labels)
        self._slo_s = slo_ns / 1e9 if slo_ns is not None else None
        self._ended = ended
        self._routed: dict[tuple[str, str], int] = defaultdict(int)
        self._copies: dict[tuple[str, str, str], int] = defaultdict(int)
        self._busy_usd: dict[str, float] = defaultdict(float)
        self._ejections: dict[str, int] = defaultdict(int)
        self._ejected: dict[str, int] = {}

    def routed(self, backend: str, reason: str) -> None:
        self._routed[backend, reason] += 1

    def copied(self, backend: str, why: str, result: str) -> None:
        self._copies[backend, why, result] += 1

    def busy(self, backend: str, usd: float) -> None:
        self._busy_usd[backend] += usd

    def ejected(self, backend: str) -> None:
        self._ejections[backend] += 1
        self._ejected[backend] = 1

    def back(self, backend: str) -> None:
        self._ejected[backend] = 0

    def close(self) -> None:
        self._ended(self, self.state())

    def state(self) -> State:
        return [
            self._slo_s,
            {SEP.join(key): count for key, count in self._routed.items()},
            {SEP.join(key): count for key, count in self._copies.items()},
            dict(self._ejections),
            dict(self._ejected) or None,
            dict(self._busy_usd),
        ]


class EndpointMetrics:
    """Counted by one protocol's edge for one model. exemplars: by bucket of the latency, as OpenMetrics has them."""

    __slots__ = (
        "_bounds", "_decode", "_decode_ns", "_encode", "_encode_ns", "_failed", "_failed_ns", "_gaps", "_gaps_ns", "_last_s",
        "_latency", "_latency_ns", "_log", "_ok", "_parts", "_slo_bucket", "exemplars", "key",
    )  # fmt: skip

    def __init__(self, labels: tuple[str, str, str], slo_ns: int | None) -> None:
        self.key = Key("edge", labels)
        self.exemplars: dict[int, str] = {}
        self._bounds = _latency_ns(slo_ns)
        self._log: list[tuple[int, int, int, int]] = []
        self._slo_bucket = self._bounds.index(slo_ns) if slo_ns is not None else None
        self._latency = [0] * (len(self._bounds) + 1)
        self._decode, self._encode = ([0] * (len(_CODEC_NS) + 1) for _ in range(2))
        self._latency_ns = self._decode_ns = self._encode_ns = 0
        self._gaps: list[int] | None = None  # of a decoupled model only
        self._gaps_ns = self._parts = 0
        self._ok = 0
        self._failed: dict[str, int] = defaultdict(int)
        self._failed_ns = 0
        self._last_s: float | None = None

    def done(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int, trace_id: str = "") -> None:
        """Count a success. Stamps: whole request read, decoded, outcome known, answer encoded. trace_id: of a sampled trace."""
        log = self._log
        log.append((arrival_ns, decoded_ns, encoding_ns, encoded_ns))
        if trace_id:
            latency_ns = encoded_ns - arrival_ns
            bucket = bisect_left(self._bounds, latency_ns)
            self.exemplars[bucket] = f'{{trace_id="{trace_id}"}} {latency_ns / 1e9} {time.time():.3f}'
        if len(log) >= _LOGGED:
            self._count()

    def _count(self) -> None:
        """As that of a lane."""
        if not self._log:
            return
        log, self._log = self._log, []
        latency, decode, encode, bounds = self._latency, self._decode, self._encode, self._bounds
        bisect, codec = bisect_left, _CODEC_NS
        decode_ns = encode_ns = latency_ns = 0
        for arrival_ns, decoded_ns, encoding_ns, encoded_ns in log:
            took_ns = decoded_ns - arrival_ns
            decode_ns += took_ns
            decode[bisect(codec, took_ns)] += 1
            took_ns = encoded_ns - encoding_ns
            encode_ns += took_ns
            encode[bisect(codec, took_ns)] += 1
            took_ns = encoded_ns - arrival_ns
            latency_ns += took_ns
            latency[bisect(bounds, took_ns)] += 1
        self._ok += len(log)
        self._decode_ns += decode_ns
        self._encode_ns += encode_ns
        self._latency_ns += latency_ns
        self._last_s = time.time() - (time.monotonic_ns() - log[-1][3]) / 1e9

    def first_part(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int, trace_id: str = "") -> None:
        """Note the first part of a decoupled model's answer, which is what is promised. Stamps: as in `done`."""
        self.done(arrival_ns, decoded_ns, encoding_ns, encoded_ns, trace_id)
        self._ok -= 1  # that is for `finished` to say

    def part(self, gap_ns: int) -> None:
        """Note a further part, so long after the one before it."""
        if self._gaps is None:
            self._gaps = [0] * (len(_STAGE_NS) + 1)
        self._gaps[bisect_left(_STAGE_NS, gap_ns)] += 1
        self._gaps_ns += gap_ns
        self._parts += 1

    def finished(self) -> None:
        """Count a success that came in parts."""
        self._ok += 1
        if self._gaps is None:
            self._gaps = [0] * (len(_STAGE_NS) + 1)

    def failed(self, code: Code, arrival_ns: int, answered_ns: int) -> None:
        """Count an error."""
        self._failed[code.value] += 1
        self._failed_ns += answered_ns - arrival_ns

    def state(self) -> State:
        self._count()
        return [
            {OK: self._ok, **self._failed} if self._ok or self.key.labels[0] else dict(self._failed),
            [*self._latency, self._latency_ns],
            self._failed_ns,
            self._attained(),
            self._last_s,
            [*self._decode, self._decode_ns],
            [*self._encode, self._encode_ns],
            sum(self._latency) + self._parts if self._gaps is not None else None,
            [*self._gaps, self._gaps_ns] if self._gaps is not None else None,
        ]

    def _attained(self) -> dict[str, int] | None:
        if self._slo_bucket is None:
            return None
        met = sum(self._latency[: self._slo_bucket + 1])
        failed = sum(count for code, count in self._failed.items() if code not in _CLIENTS)
        return {"met": met, "missed": sum(self._latency) - met + failed}


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

    def state(self, now_ns: int) -> State:
        held_ns = self._held_ns + (now_ns - self._since_ns if self._holders else 0)
        busy_ns = self.ended_busy_ns + sum(lane.busy_ns() for lane in self.lanes)
        if self._measure is not None:
            busy_ns += self._measure()
        busy_usd = busy_ns * self._usd_per_ns / self._sessions
        self._idle_usd = max(self._idle_usd, held_ns * self._usd_per_ns - busy_usd)  # a counter never goes back
        priced = self._usd_per_hour is not None
        return [
            {"busy": busy_usd, "idle": self._idle_usd} if priced else None,
            (self._usd_per_hour if self._holders else 0.0) if priced else None,
            int(self._measure is not None) or None,
        ]


class _Process:
    """What the operating system says of this process, and of those that hold sessions for it."""

    def __init__(self, role: str, instance_type: str, session_pids: Callable[[], Iterable[int]]) -> None:
        age = age_s()
        self.born_ns = time.monotonic_ns() - round(age * 1e9)
        ray = sys.modules.get("ray")
        self.info = {
            SEP.join((__version__, platform.python_version(), getattr(ray, "__version__", "") if ray else "", instance_type)): 1
        }
        self._key = Key("process", (role,))
        self._started_s = time.time() - age
        self._session_pids = session_pids
        self._lag = [0] * (len(_LAG_NS) + 1)
        self._lag_ns = 0
        self.spans: Callable[[], Mapping[str, int]] = dict  # of traces

    def lagged(self, lag_ns: int) -> None:
        self._lag[bisect_left(_LAG_NS, lag_ns)] += 1
        self._lag_ns += max(0, lag_ns)

    def states(self, now_ns: int) -> Iterator[tuple[Key, State]]:
        lag = [*self._lag, self._lag_ns]
        spans = dict(self.spans()) or None
        yield self._key, [1, time.process_time_ns(), own_memory_bytes(), self._started_s, lag, spans]
        pids = list(self._session_pids())
        ended_ns = ended_children_cpu_ns()
        if pids or ended_ns:
            used = used_by(pids)
            cpu_ns = ended_ns + sum(one.cpu_ns for one in used)
            yield Key("process", ("session",)), [len(used), cpu_ns, sum(one.memory_bytes for one in used), None, None, None]


# With `metrics: off`: nothing is counted, and nothing costs more than the call.


class _NoLaneMetrics(LaneMetrics):
    __slots__ = ()

    def batch_done(self, batch: Batch, execution: Execution, now_ns: int, *, failed: bool) -> None: ...

    def retried(self) -> None: ...

    def dropped(self) -> None: ...


class _NoRoutingMetrics(RoutingMetrics):
    def routed(self, backend: str, reason: str) -> None: ...

    def copied(self, backend: str, why: str, result: str) -> None: ...

    def busy(self, backend: str, usd: float) -> None: ...


class _NoEndpointMetrics(EndpointMetrics):
    __slots__ = ()

    def done(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int, trace_id: str = "") -> None: ...

    def first_part(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int, trace_id: str = "") -> None: ...

    def part(self, gap_ns: int) -> None: ...

    def finished(self) -> None: ...

    def failed(self, code: Code, arrival_ns: int, answered_ns: int) -> None: ...


_CODED: Final = ((("stage", "decode"),), (("stage", "encode"),))
_LATENCY: Final = place("edge", "gateway_request_duration_seconds")


def _latency_ns(slo_ns: int | None) -> tuple[int, ...]:
    return tuple(sorted({*_ns(_LATENCY_S), *(() if slo_ns is None else (slo_ns,))}))


def _order() -> dict[str, list[tuple[str, int]]]:
    """Of each family, in which kinds of block it stands, and where."""
    found: dict[str, list[tuple[str, int]]] = {metric.name: [] for metric in TABLE}
    for kind, fields in FIELDS.items():
        for index, field in enumerate(fields):
            if field.name:
                found[field.name].append((kind, index))
    return found


def _add(found: dict[Key, State], block: Block, *, lives: bool = True) -> None:
    """Merge a block, which may be of a process of another version of the gateway."""
    kind, labels, state = block
    if len(state) != len(FIELDS.get(kind, ())):
        return
    key = Key(kind, tuple(labels))
    if not lives:
        state = counters_only(kind, state)
    found[key] = merge(kind, found[key], state) if key in found else state


def _add_edge(statistics: ModelStatistics, state: State) -> None:
    codes, latency, failed_ns, _, last_s, decode, encode, _, _ = state
    statistics.add_requests(codes, latency[-1], failed_ns, last_s)
    statistics.add_stage("decode", decode)
    statistics.add_stage("encode", encode)


_STAGES: Final = {
    stage: place("lane", "gateway_stage_duration_seconds", stage=stage) for stage in ("queue", "batch_wait", "compute")
}
_ROWS_DONE: Final = place("lane", "gateway_rows_total")
_WAITING: Final = place("lane", "gateway_queue_requests")


def _add_lane(statistics: ModelStatistics, state: State) -> None:
    statistics.rows += state[_ROWS_DONE]
    statistics.pending += state[_WAITING] or 0
    for stage, index in _STAGES.items():
        statistics.add_stage(stage, state[index])
    for rows, counts in state[-1].items():
        statistics.executions_by_rows[int(rows)].add(counts)


def _at_once(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast(T, end.value)


async def in_slices(work: Generator[None, None, T]) -> T:
    """Its result, with the loop free for others in between."""
    clock = time.monotonic_ns
    until_ns = clock() + _SLICE_NS
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast(T, end.value)
        if clock() >= until_ns:
            # Sessions' threads wait for Python's lock: given up for less than they need to wake, it would be taken again at
            # once, and they get it after 5 ms only.
            time.sleep(1e-6)  # noqa: ASYNC251
            await asyncio.sleep(0)
            until_ns = clock() + _SLICE_NS
