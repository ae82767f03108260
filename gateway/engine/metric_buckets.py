"""The histograms' buckets: where their edges are, for who counts into them and for who writes them."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from gateway.engine.metric_blocks import Field, Key, State, place

_LATENCY_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_CODEC_S: Final = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.001, 0.005, 0.025)
_STAGE_S: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_LAG_S: Final = (0.001, 0.005, 0.025, 0.1, 0.5)
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def _ns(bounds_s: Iterable[float]) -> tuple[int, ...]:
    return tuple(round(bound * 1e9) for bound in bounds_s)


CODEC_NS: Final = _ns(_CODEC_S)
STAGE_NS: Final = _ns(_STAGE_S)
LAG_NS: Final = _ns(_LAG_S)

SLO_EDGE: Final = place("edge", "")
_LATENCY: Final = place("edge", "gateway_request_duration_seconds")
_CODED: Final = ((("stage", "decode"),), (("stage", "encode"),))


def latency_edges_ns(slo_ns: int | None) -> tuple[int, ...]:
    """A model's objective is an edge."""
    return tuple(sorted({*_ns(_LATENCY_S), *(() if slo_ns is None else (slo_ns,))}))


@lru_cache(1024)  # as a scrape asks for those of every model
def _latency_edges_s(slo_ns: int | None) -> tuple[float, ...]:
    return tuple(bound / 1e9 for bound in latency_edges_ns(slo_ns))


def edges(slo_ns: Mapping[tuple[str, str], int], key: Key, field: Field, length: int) -> tuple[float, ...] | None:
    """Of a histogram whose value is so long. slo_ns: by model and version. None: it was counted by others."""
    found: tuple[float, ...]
    if field.name == "gateway_request_duration_seconds":
        found = _latency_edges_s(slo_ns.get((key.labels[0], key.labels[1])))
    elif field.name == "gateway_batch_rows":
        found = ROWS[: length - 2]
    elif field.name == "gateway_loop_lag_seconds":
        found = _LAG_S
    else:
        found = _CODEC_S if field.fixed in _CODED else _STAGE_S
    return found if len(found) == length - 2 else None


def with_slo_edge(state: State, slo_ns: int | None) -> State:
    """The state of an edge as if its latencies had been counted with this objective for an edge, not with the one it had.

    What lies between two edges, one of which is no more, counts for the next above. At the other edges all is exact.
    """
    counted_ns, latency = state[SLO_EDGE], state[_LATENCY]
    if counted_ns == slo_ns:
        return state
    edges_ns, wanted_ns = latency_edges_ns(counted_ns), latency_edges_ns(slo_ns)
    if latency is not None and len(latency) == len(edges_ns) + 2:
        *counts, beyond, total_ns = latency
        found = [0] * len(wanted_ns)
        for edge_ns, count in zip(edges_ns, counts, strict=True):
            at = bisect_left(wanted_ns, edge_ns)
            if at < len(found):
                found[at] += count
            else:
                beyond += count
        latency = (*found, beyond, total_ns)
    changed = list(state)
    changed[SLO_EDGE], changed[_LATENCY] = slo_ns, latency
    return tuple(changed)


class Buckets:
    """A histogram of durations. number: of all."""

    __slots__ = ("_counts", "_edges", "_sum", "number")

    def __init__(self, edges: Sequence[int]) -> None:
        """edges: of the buckets, each of which holds its own; what is above them has one more."""
        self._edges = np.array(edges, np.int64)
        self._counts = np.zeros(len(edges) + 1, np.int64)
        self._sum = self.number = 0

    def add(self, durations: np.ndarray) -> None:
        """Shapes: (n,), int64."""
        self._counts += np.bincount(self._edges.searchsorted(durations), minlength=len(self._counts))
        self._sum += int(np.add.reduce(durations))  # as `sum` does, by a call of Python's
        self.number += len(durations)

    def up_to(self, bucket: int) -> int:
        """How many are in it and in those below."""
        return int(self._counts[: bucket + 1].sum())

    def state(self) -> tuple[int, ...]:
        """As a recorder's: how many in each, and their sum."""
        return (*self._counts.tolist(), self._sum)
