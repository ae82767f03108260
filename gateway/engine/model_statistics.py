"""The numbers of the statistics extension, and of Triton's metrics: read from the states of the recorders.

So they cannot disagree with what /metrics says.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Final

from gateway.engine.metric_blocks import SEP
from gateway.errors import Code

STAGES: Final = ("decode", "queue", "batch_wait", "compute", "encode")
OK: Final = "ok"

# As Triton tells why requests failed.
_TRITON_REASONS: Final = {
    Code.OVERLOADED.value: "REJECTED",
    Code.DEADLINE_EXCEEDED.value: "REJECTED",
    Code.CANCELLED.value: "CANCELED",
    Code.BACKEND_FAILED.value: "BACKEND",
    Code.BACKEND_UNREACHABLE.value: "BACKEND",
}


@dataclass(slots=True)
class Total:
    """How often, and the time of all together."""

    count: int = 0
    ns: int = 0


@dataclass(slots=True)
class Executions:
    """How many, and the time of all together on the way to a worker, on it and on the way back."""

    count: int = 0
    to_worker_ns: int = 0
    compute_ns: int = 0
    from_worker_ns: int = 0

    def add(self, of: str, number: int) -> None:
        setattr(self, of, getattr(self, of) + number)


@cache
def execution_keys(rows: int) -> tuple[str, ...]:
    """Of batches of so many rows in a block: the rows, and what of their `Executions`."""
    return tuple(SEP.join((str(rows), one.name)) for one in fields(Executions))


class ModelStatistics:
    """The numbers of the statistics extension for one model version, over all its backends and protocols."""

    def __init__(self) -> None:
        self.last_inference_s = 0.0
        self.rows = 0
        self.pending = 0  # requests that wait
        self.success = Total()
        self.failed = Total()
        self.failed_by_code: dict[str, int] = defaultdict(int)
        self.stages = {stage: Total() for stage in STAGES}
        self.executions_by_rows: dict[int, Executions] = defaultdict(Executions)

    @property
    def cancelled(self) -> int:
        """Of the failed."""
        return self.failed_by_code[Code.CANCELLED.value]

    def add_requests(self, codes: Mapping[str, int], success_ns: int, failed_ns: int, last_s: float | None) -> None:
        """Take in what one protocol has answered."""
        for code, count in codes.items():
            if code == OK:
                self.success.count += count
            else:
                self.failed.count += count
                self.failed_by_code[code] += count
        self.success.ns += success_ns
        self.failed.ns += failed_ns
        self.last_inference_s = max(self.last_inference_s, last_s or 0.0)

    def add_stage(self, stage: str, histogram: Sequence[int]) -> None:
        """Take in a histogram's buckets and, behind them, its sum in nanoseconds."""
        total = self.stages[stage]
        total.count += sum(histogram[:-1])
        total.ns += histogram[-1]

    def as_triton(self) -> dict[str, int]:
        """Triton's metrics, by name; of failures `name:reason`."""
        stages = self.stages
        failures: dict[str, int] = {}
        for code, count in self.failed_by_code.items():
            name = f"nv_inference_request_failure:{_TRITON_REASONS.get(code, 'OTHER')}"
            failures[name] = failures.get(name, 0) + count
        return {
            "nv_inference_request_success": self.success.count,
            **failures,
            "nv_inference_count": self.rows,
            "nv_inference_exec_count": sum(executions.count for executions in self.executions_by_rows.values()),
            "nv_inference_request_duration_us": self.success.ns // 1000,
            "nv_inference_queue_duration_us": stages["queue"].ns // 1000,
            "nv_inference_compute_input_duration_us": stages["batch_wait"].ns // 1000,
            "nv_inference_compute_infer_duration_us": stages["compute"].ns // 1000,
            "nv_inference_compute_output_duration_us": stages["encode"].ns // 1000,
            "nv_inference_pending_request_count": self.pending,
        }
