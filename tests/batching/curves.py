"""What a lane has learned, as a test states it: T(n) = (fixed + row · n) · level(busy), and Q = T · spread."""

from collections.abc import Mapping
from typing import Any

MS = 1_000_000


def kept_curve(
    fixed_ms: float, row_ms: float, max_rows: int, levels: Mapping[int, float] | None = None, spread: float = 1.0
) -> dict[str, Any]:
    """One bucket, as `ServiceCurve.restore` takes it: seen at one row and at max_rows."""
    points = [(rows, (fixed_ms + row_ms * rows) * MS) for rows in (1, max_rows)]
    sums = [
        len(points),
        sum(rows for rows, _ in points),
        sum(time_ns for _, time_ns in points),
        sum(rows * rows for rows, _ in points),
        sum(rows * time_ns for rows, time_ns in points),
    ]
    return {
        "format": 1,
        "means": [[rows, time_ns, 100] for rows, time_ns in points],
        "sums": sums,
        "levels": [[busy, level] for busy, level in (levels or {1: 1.0}).items()],
        "ratios": [spread],
    }


def kept_model(buckets: Mapping[object, dict[str, Any]]) -> dict[str, Any]:
    """What a lane keeps, as `ServiceModel.restore` takes it, by what its queues are keyed by."""
    return {"buckets": {repr(bucket): curve for bucket, curve in buckets.items()}}
