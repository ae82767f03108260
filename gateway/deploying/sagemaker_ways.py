"""How SageMaker runs a container: an endpoint that answers at once or later, one without instances of its own, or a job."""

from dataclasses import dataclass
from typing import Any, Final

_SCALE_OUT_S: Final = 60  # a new instance takes minutes: what it is to relieve is not asked for twice meanwhile
_SCALE_IN_S: Final = 300
_LINES: Final = ("text/csv", "text/plain")  # of which each line is a request of its own
INVOCATIONS: Final = "SageMakerVariantInvocationsPerInstance"  # what is scaled by where answers are given at once
BACKLOG: Final = "ApproximateBacklogSizePerInstance"  # and later
CONTENT_TYPES: Final = (*_LINES, "application/json", "application/x-npy", "application/octet-stream")
"""Of a batch transform's files: docs/sagemaker.md has what the container takes."""


@dataclass(frozen=True, slots=True)
class Instances:
    """types: as SageMaker names them; the first that can be had is taken, in this order. most: to scale to."""

    types: tuple[str, ...]
    least: int
    most: int
    ami: str = ""

    @property
    def scaled(self) -> bool:
        return self.most > self.least


@dataclass(frozen=True, slots=True)
class RealTime:
    """per_minute: requests of one instance, to scale at; None: it is not scaled."""

    instances: Instances
    per_minute: float | None = None


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """per_minute: as of RealTime; so many may wait for an instance. output: where in S3 the answers go.

    concurrent: requests that an instance is given at once.
    """

    instances: Instances
    output: str
    concurrent: int
    per_minute: float | None = None


@dataclass(frozen=True, slots=True)
class Serverless:
    """concurrent: requests that are answered at once, at most."""

    memory_mib: int
    concurrent: int


@dataclass(frozen=True, slots=True)
class BatchTransform:
    """input, output: prefixes in S3. content_type: of the files there, and of the answers. begun: when it was asked for,
    which makes each another."""

    instances: Instances
    input: str
    output: str
    content_type: str
    begun: str


Way = RealTime | Asynchronous | Serverless | BatchTransform


def instances_of(way: Way) -> Instances | None:
    """None: they are SageMaker's."""
    return None if isinstance(way, Serverless) else way.instances


def variant(way: Way) -> dict[str, Any]:
    """What a production variant says of it, beside its name and its model."""
    if isinstance(way, Serverless):
        return {"ServerlessConfig": {"MemorySizeInMB": way.memory_mib, "MaxConcurrency": way.concurrent}}
    instances = way.instances
    if len(instances.types) == 1:
        found: dict[str, Any] = {"InstanceType": instances.types[0]}
    else:
        found = {"InstancePools": [{"InstanceType": each, "Priority": n} for n, each in enumerate(instances.types, 1)]}
    found["InitialInstanceCount"] = instances.least
    if isinstance(way, RealTime):
        found["RoutingConfig"] = {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}
    return found | ({"InferenceAmiVersion": instances.ami} if instances.ami else {})


def configuration(way: Way, *, metrics: bool, scrape_s: int) -> dict[str, Any]:
    """What an endpoint's configuration says of it, beside its variant."""
    if isinstance(way, Serverless):
        return {}
    found: dict[str, Any] = {
        "MetricsConfig": {"EnableDetailedObservability": metrics, "MetricPublishFrequencyInSeconds": scrape_s}
    }
    if isinstance(way, Asynchronous):
        found["AsyncInferenceConfig"] = {
            "ClientConfig": {"MaxConcurrentInvocationsPerInstance": way.concurrent},
            "OutputConfig": {"S3OutputPath": f"{way.output}/answers", "S3FailurePath": f"{way.output}/failures"},
        }
    return found


def tracking(way: Way, endpoint: str) -> dict[str, Any] | None:
    """By what its instances are scaled, as a target-tracking policy; None: they are not."""
    if not isinstance(way, RealTime | Asynchronous) or way.per_minute is None or not way.instances.scaled:
        return None
    metric: dict[str, Any] = {"PredefinedMetricSpecification": {"PredefinedMetricType": INVOCATIONS}}
    if isinstance(way, Asynchronous):
        backlog = {"MetricName": BACKLOG, "Namespace": "AWS/SageMaker", "Statistic": "Average"}
        dimensions = [{"Name": "EndpointName", "Value": endpoint}]
        metric = {"CustomizedMetricSpecification": {**backlog, "Dimensions": dimensions}}
    cooldowns = {"ScaleOutCooldown": _SCALE_OUT_S, "ScaleInCooldown": _SCALE_IN_S}
    return {"TargetValue": float(f"{way.per_minute:.6g}"), **metric, **cooldowns}


def transform(way: BatchTransform) -> dict[str, Any]:
    """What a transform job says of it, beside its name and its model. How much at once, the container is asked."""
    lines = way.content_type in _LINES
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": way.input}}
    return {
        "TransformInput": {
            "DataSource": source,
            "ContentType": way.content_type,
            "SplitType": "Line" if lines else "None",
        },
        "TransformOutput": {
            "S3OutputPath": way.output,
            "Accept": way.content_type,
            "AssembleWith": "Line" if lines else "None",
        },
        "TransformResources": {"InstanceType": way.instances.types[0], "InstanceCount": way.instances.least},
    }
