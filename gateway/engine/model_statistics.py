"""The numbers of the statistics extension, read from the exposition: so the two cannot disagree."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.errors import Code

STAGES: Final = ("decode", "queue", "batch_wait", "compute", "encode")
OK: Final = "ok"


@dataclass(slots=True)
class Total:
    """How often, and the time of all together."""

    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Executions:
    """How many, and the time of all together on the way to a worker, on it and on the way back."""

    count: int = 0
    to_worker_s: float = 0.0
    compute_s: float = 0.0
    from_worker_s: float = 0.0


class ModelStatistics:
    """The numbers of the statistics extension for one model version, over all its backends and protocols."""

    def __init__(self) -> None:
        self.last_inference_s = 0.0
        self.rows = 0
        self.success = Total()
        self.failed = Total()
        self.cancelled = 0  # of the failed
        self.stages = {stage: Total() for stage in STAGES}
        self.executions_by_rows: dict[int, Executions] = defaultdict(Executions)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Take in one sample of the exposition."""
        if name == "gateway_stage_duration_seconds_sum":
            self.stages[labels["stage"]].seconds += value
        elif name == "gateway_stage_duration_seconds_count":
            self.stages[labels["stage"]].count += int(value)
        elif name == "gateway_rows_total":
            self.rows += int(value)
        elif name == "gateway_executions_total":
            self.executions_by_rows[int(labels["rows"])].count += int(value)
        elif name == "gateway_compute_seconds_total":
            self.executions_by_rows[int(labels["rows"])].compute_s += value
        elif name == "gateway_to_worker_seconds_total":
            self.executions_by_rows[int(labels["rows"])].to_worker_s += value
        elif name == "gateway_from_worker_seconds_total":
            self.executions_by_rows[int(labels["rows"])].from_worker_s += value
        elif name == "gateway_last_inference_timestamp_seconds":
            self.last_inference_s = max(self.last_inference_s, value)
        elif name == "gateway_requests_total":
            (self.success if labels["code"] == OK else self.failed).count += int(value)
            if labels["code"] == Code.CANCELLED.value:
                self.cancelled += int(value)
        elif name == "gateway_request_duration_seconds_sum":
            self.success.seconds += value
        elif name == "gateway_failed_request_seconds_total":
            self.failed.seconds += value
