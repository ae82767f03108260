"""Metrics: counted in plain integers, put into text when they are asked for, and one answer for all processes of a node.

Recorders count (`gateway.engine.recorders`). A scrape asks each for its state (`gateway.engine.metric_blocks`), adds what the
other processes of the node have published (`gateway.engine.metric_files`), and has the text written
(`gateway.engine.exposition`). It does so in slices, so that no request waits for it.

What is counted on stands in `gateway.engine.metric_table`. The statistics extension and Triton's names are read from the same
states, so they cannot disagree.

Several ingress processes share one port, so a scrape reaches any of them. Each publishes its own states every
`FLUSH_INTERVAL_S`, and when it is scraped; what another process shows of it is up to so old, and never goes back.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast

from gateway.config import ModelSection
from gateway.engine.exposition import Exposition, prefers_openmetrics, statistics_of
from gateway.engine.metric_blocks import FIELDS, SEP, Exemplar, Key, State, counters_only, merge, place
from gateway.engine.metric_buckets import ROWS, SLO_EDGE, edges, with_slo_edge
from gateway.engine.metric_files import Block, NodeFiles
from gateway.engine.model_statistics import ModelStatistics
from gateway.engine.no_recorders import NoEndpointMetrics, NoLaneMetrics, NoRoutingMetrics
from gateway.engine.recorders import (
    Cost,
    EndpointMetrics,
    LaneMetrics,
    ProcessMetrics,
    RoutingMetrics,
)

FLUSH_INTERVAL_S: Final = 1.0
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_SLICE_NS: Final = 250_000  # of the event loop, at a time: an inference passes it several times

T = TypeVar("T")

log = logging.getLogger(__name__)


class Told(Protocol):
    """What processes of other nodes have this one count for them."""

    def states(self) -> Iterable[tuple[Key, State]]:
        """All of it."""

    def taken(self) -> Callable[[], None]:
        """What `states` gives now is about to be published. Gives what to call when it is."""


class _NothingTold:
    def states(self) -> Iterable[tuple[Key, State]]:
        return ()

    def taken(self) -> Callable[[], None]:
        return lambda: None


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
        self._slo_ns: dict[tuple[str, str], int] = {}
        self.add(models)
        self._files: NodeFiles | None = None
        self._endpoints: dict[tuple[str, str, str], EndpointMetrics] = {}
        self._lanes: list[LaneMetrics] = []
        self._routings: list[RoutingMetrics] = []
        self._costs: dict[tuple[str, str, str], Cost] = {}
        self._ended: dict[Key, State] = {}  # of lanes and models that have been closed here
        self._process = ProcessMetrics(role, instance_type, session_pids)
        self._readiness: Callable[[], Iterable[tuple[str, str, bool]]] = tuple
        self._told: Told = _NothingTold()
        self._kept: Callable[[list[Block]], list[Block]] = lambda blocks: blocks
        self._starting = True
        self._edges = partial(edges, self._slo_ns)
        self._text = Exposition(self._edges, self._exemplars, triton_names=triton_names)
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._last: tuple[int, bool, bytes] | None = None  # when the last scrape began, its form, and what it gave
        if directory is not None and enabled:
            self._share(directory, role)

    # models

    def add(self, models: Iterable[ModelSection]) -> None:
        """More models, whose objectives become bucket edges."""
        self._slo_ns |= {(model.name, model.version): round(model.slo.p99_ms * 1e6) for model in models if model.slo}

    def forget(self, model: str) -> None:
        """A model is gone for good, and its series with it. None of its lanes is open."""
        self._endpoints = {labels: each for labels, each in self._endpoints.items() if labels[0] != model}
        self._costs = {labels: each for labels, each in self._costs.items() if labels[0] != model}
        self._ended = {key: each for key, each in self._ended.items() if key.labels[:1] != (model,)}
        for labels in [labels for labels in self._slo_ns if labels[0] == model]:
            del self._slo_ns[labels]  # which the edges are read from

    # recorders

    def lane(
        self,
        model: str,
        version: str,
        backend: str,
        *,
        max_rows: int = ROWS[-1],
    ) -> LaneMetrics:
        """What one lane counts on. max_rows: of a batch."""
        made = (LaneMetrics if self.enabled else NoLaneMetrics)((model, version, backend), max_rows, self._lane_ended)
        cost = self._costs.get((model, version, backend))
        if cost is not None:
            cost.lanes.append(made)
        self._lanes.append(made)
        return made

    def routing(self, model: str, version: str) -> RoutingMetrics:
        """What the dispatcher of one model counts on."""
        made = (RoutingMetrics if self.enabled else NoRoutingMetrics)(
            (model, version), self._slo_ns.get((model, version)), self._routing_ended
        )
        self._routings.append(made)
        return made

    def endpoint(self, model: str, version: str, protocol: str) -> EndpointMetrics:
        """What one protocol counts the requests of one model on. model: empty for requests that named none that exists."""
        labels = (model, version, protocol)
        if labels not in self._endpoints:
            kind = EndpointMetrics if self.enabled else NoEndpointMetrics
            self._endpoints[labels] = kind(labels, self._slo_ns.get((model, version)))
        return self._endpoints[labels]

    def cost(self, model: str, version: str, backend: str, usd_per_hour: float | None, sessions: int) -> Cost:
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

    def watch_certificates(self, expiry_s: Callable[[], Mapping[str, float]]) -> None:
        """expiry_s: gives when certificates expire, since 1970, by what they are of; asked at each scrape."""
        self._process.certificates = expiry_s

    def watch_told(self, told: Told) -> None:
        """told: counted here as well; asked whenever this is published or scraped."""
        self._told = told

    def divide(self, kept: Callable[[list[Block]], list[Block]]) -> None:
        """kept: gives what of the blocks is published on this node: the rest is counted elsewhere."""
        self._kept = kept

    # telling

    @property
    def ingress_lives(self) -> bool:
        """Whether an ingress process, other than this one, lives on this node and counts what is published here."""
        with contextlib.suppress(OSError):
            return self._files is not None and self._files.live("ingress")
        return False

    def flush(self) -> None:
        """Publish what was counted, at once."""
        _at_once(self._publish())

    def expose(self, *, openmetrics: bool = False) -> tuple[str, bytes]:
        """Content type and body of /metrics, for all processes of the node, at once: of many models it takes milliseconds."""
        return OPENMETRICS if openmetrics else TEXT, _at_once(self._exposition(openmetrics))

    async def scrape(self, accept: bytes) -> tuple[str, bytes]:
        """As `expose`, in slices. accept: the client's header. Those who come meanwhile share the next."""
        openmetrics = prefers_openmetrics(accept)
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
        return _at_once(statistics_of(_at_once(self._blocks(wanted))))

    async def counted(self) -> dict[Key, State]:
        """What all processes of the node have counted, by block. In slices."""
        return await in_slices(self._blocks())

    def bounds(self, key: Key, name: str, values: Sequence[int]) -> tuple[float, ...]:
        """Upper bounds of a histogram in a block, in its family's unit; none, if its edges are not those of this process."""
        return self._edges(key, FIELDS[key.kind][place(key.kind, name)], len(values)) or ()

    # states

    def _own(self, wanted: Collection[tuple[str, str]] | None = None) -> Iterator[tuple[Key, State]]:
        """A block may come several times: they are to be merged. wanted: models and versions; None: all there is."""
        readiness = tuple(self._readiness())
        self._stand_at_0(readiness)
        # Taken now: in between slices lanes are opened, and closed into `_ended`.
        recorders: tuple[EndpointMetrics | LaneMetrics | RoutingMetrics, ...]
        recorders = (*self._endpoints.values(), *self._lanes, *self._routings)
        costs, ended = tuple(self._costs.values()), tuple(self._ended.items())
        told = tuple(self._told.states())  # neither more nor less than `taken` says
        now_ns = time.monotonic_ns()
        for recorder in recorders:
            if wanted is None or recorder.key.labels[:2] in wanted:
                yield recorder.key, recorder.state()
        for cost in costs:
            yield cost.key, cost.state(now_ns)
        yield from self._process.states(now_ns)
        yield from told
        ready = {SEP.join(one[:2]): int(one[2]) for one in readiness}
        yield Key("node", ()), (self._process.info or None, ready or None)
        yield from ended

    def _stand_at_0(self, readiness: Iterable[tuple[str, str, bool]]) -> None:
        """Show what is ready before it is asked, by all protocols: of a counter that begins with a number no rate is seen."""
        protocols = [protocol for model, _, protocol in self._endpoints if not model]
        for protocol in protocols:  # one after the other, and a page of one that is not asked need not be written again
            for model, version, ready in readiness:
                if ready:
                    self.endpoint(model, version, protocol)

    def _publish(self) -> Generator[None, None, None]:
        say = self._told.taken()
        if self._files is not None:
            yield from self._files.publish(self._kept((yield from self._collected())))
        say()

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
        say = self._told.taken()
        own = yield from self._collected(wanted)
        if self._files is not None and wanted is None:
            yield from self._files.publish(own)  # or who is scraped next, and cannot see this, would show less
            say()
        own.reverse()
        while own:  # one by one, as to free thousands at once takes a millisecond
            self._add(found, own.pop())
            yield
        if self._files is not None:
            for published in (yield from self._files.others()):
                for block in published.blocks:
                    if wanted is not None and block[1][:2] not in wanted:
                        continue
                    self._add(found, block, lives=published.lives)
                    yield
        return found

    def _share(self, directory: Path, role: str) -> None:
        try:
            files = NodeFiles(directory, role)
            self._fold(files)
        except OSError as exc:
            log.warning("the processes of this node do not see each other's metrics: %s: %s", directory, exc.strerror)
        else:
            self._files = files

    def _fold(self, files: NodeFiles) -> None:
        """Make one file of those of processes that have ended. Raises: OSError."""
        with files.folding():
            ended = _at_once(files.ended())
            if len(ended) > 1:
                found: dict[Key, State] = {}
                for _, blocks in ended:
                    for block in blocks:
                        self._add(found, block, lives=False, fold=True)
                files.fold([name for name, _ in ended], [(key.kind, key.labels, state) for key, state in found.items()])

    def _lane_ended(self, lane: LaneMetrics, state: State) -> None:
        cost = self._costs.get(lane.labels)
        if cost is not None and lane in cost.lanes:
            cost.lanes.remove(lane)
            cost.ended_busy_ns += lane.busy_ns()
            cost.release()
        if lane in self._lanes:
            self._lanes.remove(lane)
            self._keep(lane.key, state)

    def _routing_ended(self, routing: RoutingMetrics, state: State) -> None:
        if routing in self._routings:
            self._routings.remove(routing)
            self._keep(routing.key, state)

    def _keep(self, key: Key, state: State) -> None:
        kept = counters_only(key.kind, state)
        self._ended[key] = merge(key.kind, self._ended[key], kept) if key in self._ended else kept

    def _add(self, found: dict[Key, State], block: Block, *, lives: bool = True, fold: bool = False) -> None:
        """Merge a block, which may be of a process of another version of the gateway, or of a model with another objective.

        fold: not to be shown here: of what is not known here the objective stays.
        """
        kind, labels, state = block
        if len(state) != len(FIELDS.get(kind, ())):
            return
        key = Key(kind, tuple(labels))
        if not lives:
            state = counters_only(kind, state)
        before = found.get(key)
        if kind == "edge":
            slo_ns = self._slo_ns.get((labels[0], labels[1]), state[SLO_EDGE] if fold else None)
            state = with_slo_edge(state, slo_ns if before is None else before[SLO_EDGE])
        found[key] = state if before is None else merge(kind, before, state)

    # text

    def _exposition(self, openmetrics: bool) -> Generator[None, None, bytes]:
        blocks = yield from self._blocks()
        return (yield from self._text.written(blocks, openmetrics=openmetrics))

    def _exemplars(self, model: str, version: str, protocol: str) -> Mapping[int, Exemplar] | None:
        endpoint = self._endpoints.get((model, version, protocol))
        return endpoint.exemplars() if endpoint is not None else None


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
