"""The log of a run in blocks, as it is judged.

Blocks lie on a grid that starts with the run: at least 20 behind the warm-up, each of at least 10 SLO limits and 200 requests
where the run is long enough for that, at most 200. The warm-up ends on the grid, so that two runs of the same spec can be
compared block by block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loadtest.load.request_log import CUT, OK, PENDING, UNSENT, RequestLog
from loadtest.results import Block, LoadSpec, SloSpec
from loadtest.verdict import decision

MIN_BLOCKS: Final = 20
_MAX_BLOCKS: Final = 200
BLOCK_REQUESTS: Final = 200
BLOCK_LIMITS: Final = 10  # of the SLO's longest limit
MOST_WARMUP: Final = 0.2
# Of the gateway's own latency metric, so that what clients and the server saw can be laid over each other.
LATENCY_EDGES_MS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 1e4)


def latency_edges_ms(slo: SloSpec | None) -> tuple[float, ...]:
    """Of a histogram of latencies, ascending: the SLO's limits are among them, so that attainment can be read exactly."""
    limits = {objective.limit_ms for objective in slo.objectives if objective.metric == "latency"} if slo else set()
    return tuple(sorted({*LATENCY_EDGES_MS, *limits}))


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of a run. wanted_ns: how long a block should be; block_ns: how long it can be in this run."""

    block_ns: int
    wanted_ns: int
    blocks: int

    def until(self, elapsed_ns: int) -> "Grid":
        """The blocks of a run that ended early."""
        return Grid(self.block_ns, self.wanted_ns, max(1, min(self.blocks, -(-elapsed_ns // self.block_ns))))

    @classmethod
    def of(cls, spec: LoadSpec, duration_ns: int, rate_rps: float) -> "Grid":
        wanted_ns = _wanted_ns(spec, rate_rps)
        most = int(MIN_BLOCKS / (1 - MOST_WARMUP))
        blocks = min(_MAX_BLOCKS, max(most, duration_ns // wanted_ns))
        block_ns = -(-duration_ns // blocks)
        return cls(block_ns, wanted_ns, blocks)


def suffice(blocks: Sequence[Block], spec: LoadSpec) -> bool:
    """Whether a run's blocks are as many, and as long, as a proof takes. spec: of the run, with its rate."""
    counted = [block for block in blocks if not block.warmup]
    wanted_ns = _wanted_ns(spec, spec.rate_rps)
    # The first of them is as long as the grid has them; the last ends with the run.
    return len(counted) >= MIN_BLOCKS and round(counted[0].duration_s * 1e9) >= wanted_ns


def _wanted_ns(spec: LoadSpec, rate_rps: float) -> int:
    limit_ms = max((objective.limit_ms for objective in spec.slo.objectives), default=0.0) if spec.slo else 0.0
    return int(max(BLOCK_LIMITS * limit_ms * 1e6, BLOCK_REQUESTS / max(rate_rps, 1e-9) * 1e9))


@dataclass(frozen=True, slots=True)
class LoggedRequests:
    """Some requests of the log in order of their intended time: columns of (n,), and the block that each is in."""

    intended: np.ndarray
    dispatched: np.ndarray
    sent: np.ndarray
    done: np.ndarray
    status: np.ndarray
    block: np.ndarray

    @classmethod
    def read(cls, log: RequestLog, which: np.ndarray | slice, grid: Grid) -> "LoggedRequests":
        intended = np.asarray(log.intended)[which]
        return cls(
            intended=intended,
            dispatched=np.asarray(log.dispatched)[which],
            sent=np.asarray(log.sent)[which],
            done=np.asarray(log.done)[which],
            status=np.asarray(log.status)[which],
            block=np.minimum(intended // grid.block_ns, grid.blocks - 1),
        )

    def where(self, which: np.ndarray) -> "LoggedRequests":
        """Those requests; which: (n,) bool."""
        columns = (self.intended, self.dispatched, self.sent, self.done, self.status, self.block)
        return LoggedRequests(*(column[which] for column in columns))

    def evaluable(self, slo: SloSpec | None) -> np.ndarray:
        """Which ended, or are overdue."""
        found: np.ndarray = self.ended | self.overdue(slo)
        return found

    def overdue(self, slo: SloSpec | None) -> np.ndarray:
        """Which were cut off when they had waited longer than a limit of the SLO."""
        late = np.zeros(len(self.block), bool)
        for objective in slo.objectives if slo else ():
            late |= (self.latency if objective.metric == "latency" else self.service) > objective.limit_ms * 1e6
        found: np.ndarray = late & (self.status == CUT)
        return found

    @property
    def ended(self) -> np.ndarray:
        found: np.ndarray = (self.status != PENDING) & (self.status != CUT) & (self.status != UNSENT)
        return found

    @property
    def failed(self) -> np.ndarray:
        found: np.ndarray = self.ended & ~self.ok
        return found

    @property
    def ok(self) -> np.ndarray:
        found: np.ndarray = self.status == OK
        return found

    @property
    def latency(self) -> np.ndarray:
        """Of what was cut off, as long as it had waited."""
        found: np.ndarray = self.done - self.intended
        return found

    @property
    def service(self) -> np.ndarray:
        return np.where(self.sent > 0, self.done - self.sent, 0)  # 0: it failed before it got a connection

    def requests(self) -> decision.JudgedRequests:
        """What is judged. They must all be evaluable."""
        return decision.JudgedRequests(self.latency, self.service, self.failed, self.block, ~self.ended)
