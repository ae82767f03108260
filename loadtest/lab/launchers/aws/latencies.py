"""What CloudWatch says of an endpoint's latency: ModelLatency and OverheadLatency, beside what the client saw.

Its figures come by the minute, a minute or two late, and stay when the endpoint is gone. A run's are those of all minutes that
it touched, so that short runs which follow each other share some.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from gateway.deploying.sagemaker import VARIANT
from gateway.process.console import words
from loadtest.lab.launchers.aws.door import Aws, AwsRefused

_METRICS: Final = ("ModelLatency", "OverheadLatency")  # microseconds
_STATISTICS: Final = ("Average", "SampleCount")
_PERIOD_S: Final = 60
_LATE_S: Final = 30.0  # between two looks
_LOOKS: Final = 5


@dataclass(frozen=True, slots=True)
class Window:
    """When an endpoint was loaded."""

    endpoint: str
    begin: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class PlatformLatency:
    """Means over `requests` of them."""

    model_ms: float
    overhead_ms: float
    requests: int


async def latencies(aws: Aws, windows: Sequence[Window]) -> list[PlatformLatency | None]:
    """Of each, in their order; None, where there are no figures, or this may not be asked. Waits for those that are late."""
    found: list[PlatformLatency | None] = [None] * len(windows)
    for look in range(_LOOKS if windows else 0):
        if look == 1:
            most_s = (_LOOKS - 1) * _LATE_S
            words.info(
                "SageMaker's own figures are late: waiting for %.0f s at most, which cost nothing; Ctrl-C skips them", most_s
            )
        if look:
            await aws.pause(_LATE_S)
        missing = [place for place, each in enumerate(found) if each is None]
        try:
            asked = await asyncio.gather(*(_asked(aws, windows[place]) for place in missing))
        except AwsRefused:
            return found
        for place, each in zip(missing, asked, strict=True):
            found[place] = each
        if None not in found:
            break
    return found


async def _asked(aws: Aws, window: Window) -> PlatformLatency | None:
    begin = window.begin.replace(second=0, microsecond=0)
    end = window.end.replace(second=0, microsecond=0) + timedelta(seconds=_PERIOD_S)
    told = await aws.call(
        "cloudwatch", "get_metric_data", MetricDataQueries=_queries(window.endpoint), StartTime=begin, EndTime=end
    )
    return latency_of({result["Id"]: result["Values"] for result in told["MetricDataResults"]})


def _queries(endpoint: str) -> list[dict[str, Any]]:
    dimensions = [{"Name": "EndpointName", "Value": endpoint}, {"Name": "VariantName", "Value": VARIANT}]
    return [
        {
            "Id": f"{metric.lower()}_{statistic.lower()}",
            "MetricStat": {
                "Metric": {"Namespace": "AWS/SageMaker", "MetricName": metric, "Dimensions": dimensions},
                "Period": _PERIOD_S,
                "Stat": statistic,
            },
        }
        for metric in _METRICS
        for statistic in _STATISTICS
    ]


def latency_of(series: Mapping[str, Sequence[float]]) -> PlatformLatency | None:
    """By the query's id, a value for each minute: means weighed by how many requests each is of."""
    means, counts = [], []
    for metric in _METRICS:
        averages, sizes = (series.get(f"{metric.lower()}_{statistic.lower()}", ()) for statistic in _STATISTICS)
        if not averages or len(averages) != len(sizes) or not sum(sizes):
            return None
        means.append(sum(each * size for each, size in zip(averages, sizes, strict=True)) / sum(sizes) / 1e3)
        counts.append(int(sum(sizes)))
    return PlatformLatency(means[0], means[1], counts[0])
