"""The calls that make an endpoint of SageMaker, or a batch transform job, of a package and an image. Pure: nobody is asked.

Everything is called after the deployment: the endpoint NAME, what belongs to one state of it NAME-DIGEST, where the digest is
of all that was asked for. The same options make the same names, others never take those of what runs. Everything has the tags
of `tags`. Sources: the service models of botocore 1.44.5; docs/deploy-sagemaker.md tells what is made.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from gateway import __version__
from gateway.deploying.calls import Call, FromFile, Until

VARIANT: Final = "AllTraffic"
TAG_NAME: Final = "serving-gateway:name"
TAG_DIGEST: Final = "serving-gateway:config"
TAG_BY: Final = "serving-gateway:deployed-by"
PREFIX: Final = "serving-gateway"  # of keys in the bucket
METRICS: Final = "/metrics"
_SCRAPE_S: Final = 60
_DIGEST_CHARS: Final = 12
_SCALE_OUT_S: Final = 60  # a new instance takes minutes: what it is to relieve is not asked for twice meanwhile
_SCALE_IN_S: Final = 300
DIMENSION: Final = "sagemaker:variant:DesiredInstanceCount"
_GONE: Final = Until("EndpointStatus")
_READY: Final = Until("EndpointStatus", ("InService",), ("Failed", "OutOfService", "UpdateRollbackFailed"))
_LOGS: Final = "/aws/sagemaker/Endpoints"  # groups of CloudWatch


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model.tar.gz that is to be put into a bucket. sha256: in hexadecimal."""

    path: Path
    bytes: int
    sha256: str
    bucket: str


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
    """invocations_per_minute: of one instance, to scale at; None: it is not scaled."""

    instances: Instances
    invocations_per_minute: float | None = None


Way = RealTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """What is to run, and where.

    package: an archive, or where in S3 one is already. metrics: whether the container has any.
    """

    name: str
    region: str
    image: str
    role_arn: str
    package: PackedModel | str
    way: Way
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    metrics: bool = True
    limit_ms: float | None = None

    @property
    def digest(self) -> str:
        """Of all that makes it what it is; where the package was packed is not part of that."""
        way = {type(self.way).__name__: _values(self.way)}
        asked = [self.image, self.role_arn, self.model_data, way, self.subnets, self.security_groups, self.metrics]
        return hashlib.sha256(json.dumps(asked, default=_values).encode()).hexdigest()[:_DIGEST_CHARS]

    @property
    def key(self) -> str:
        """Of an archive in its bucket: another for another content."""
        assert isinstance(self.package, PackedModel)
        return f"{PREFIX}/{self.name}/{self.package.sha256[:_DIGEST_CHARS]}/model.tar.gz"

    @property
    def model_data(self) -> str:
        return self.package if isinstance(self.package, str) else f"s3://{self.package.bucket}/{self.key}"

    @property
    def state(self) -> str:
        """What belongs to this state of the deployment is called so."""
        return f"{self.name}-{self.digest}"


def tags(hosting: Hosting) -> dict[str, str]:
    return {TAG_NAME: hosting.name, TAG_BY: f"gateway {__version__}", TAG_DIGEST: hosting.digest}


def creation(hosting: Hosting) -> list[Call]:
    """What makes it where there is nothing of this name."""
    return [*_model(hosting), _endpoint_configuration(hosting), *_endpoint(hosting), *_scaling(hosting)]


def _model(hosting: Hosting) -> list[Call]:
    calls = []
    if isinstance(package := hosting.package, PackedModel):
        place = {"Bucket": package.bucket, "Key": hosting.key}
        put = {
            **place,
            "Body": FromFile(package.path, package.bytes),
            "IfNoneMatch": "*",
            "ChecksumSHA256": base64.b64encode(bytes.fromhex(package.sha256)).decode(),
            "Tagging": urlencode(tags(hosting)),
        }
        undo = Call("s3", "delete_object", place, "Remove the package")
        why = "Put the package into the bucket, unless it is there: its key has its digest"
        calls.append(Call("s3", "put_object", put, why, undo=(undo,), already="PreconditionFailed"))
    container: dict[str, Any] = {"Image": hosting.image, "ModelDataUrl": hosting.model_data}
    if hosting.metrics:
        endpoint = {"MetricsEndpointPath": METRICS, "MetricPublishFrequencyInSeconds": _SCRAPE_S}
        container["ContainerMetricsConfig"] = {"MetricsEndpoints": [endpoint]}
    model: dict[str, Any] = {
        "ModelName": hosting.state,
        "PrimaryContainer": container,
        "ExecutionRoleArn": hosting.role_arn,
        **_network(hosting),
        "Tags": _listed(tags(hosting)),
    }
    undo = Call("sagemaker", "delete_model", {"ModelName": hosting.state}, "Remove the model")
    return [*calls, Call("sagemaker", "create_model", model, "Name the image and the package as a model", undo=(undo,))]


def _network(hosting: Hosting) -> dict[str, Any]:
    if not hosting.subnets:
        return {}
    return {"VpcConfig": {"SecurityGroupIds": [*hosting.security_groups], "Subnets": [*hosting.subnets]}}


def _endpoint_configuration(hosting: Hosting) -> Call:
    section = {
        "EndpointConfigName": hosting.state,
        "ProductionVariants": [{"VariantName": VARIANT, "ModelName": hosting.state, **_variant(hosting.way)}],
        "MetricsConfig": {"EnableDetailedObservability": hosting.metrics, "MetricPublishFrequencyInSeconds": _SCRAPE_S},
        "Tags": _listed(tags(hosting)),
    }
    undo = Call(
        "sagemaker", "delete_endpoint_config", {"EndpointConfigName": hosting.state}, "Remove the endpoint's configuration"
    )
    return Call("sagemaker", "create_endpoint_config", section, "Say what the endpoint runs on", undo=(undo,))


def _variant(way: Way) -> dict[str, Any]:
    instances = way.instances
    if len(instances.types) == 1:
        found: dict[str, Any] = {"InstanceType": instances.types[0]}
    else:
        found = {"InstancePools": [{"InstanceType": each, "Priority": n} for n, each in enumerate(instances.types, 1)]}
    found["InitialInstanceCount"] = instances.least
    found["RoutingConfig"] = {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}
    return found | ({"InferenceAmiVersion": instances.ami} if instances.ami else {})


def _endpoint(hosting: Hosting) -> list[Call]:
    named = {"EndpointName": hosting.name}
    undo = (Call("sagemaker", "delete_endpoint", named, "Remove the endpoint"), until_gone(hosting.name))
    made = {**named, "EndpointConfigName": hosting.state, "Tags": _listed(tags(hosting))}
    return [
        Call("sagemaker", "create_endpoint", made, "Start the endpoint: from here on it costs", undo=undo),
        _until_in_service(hosting.name),
    ]


def until_gone(name: str) -> Call:
    return Call("sagemaker", "describe_endpoint", {"EndpointName": name}, "Wait until it is gone", until=_GONE)


def _until_in_service(name: str) -> Call:
    until = replace(_READY, look=f"{_LOGS}/{name}")
    return Call("sagemaker", "describe_endpoint", {"EndpointName": name}, "Wait for it", until=until)


def _scaling(hosting: Hosting) -> list[Call]:
    way = hosting.way
    if way.invocations_per_minute is None or not way.instances.scaled:
        return []
    target = scalable(hosting.name)
    bounds = {"MinCapacity": way.instances.least, "MaxCapacity": way.instances.most}
    undo = Call("application-autoscaling", "deregister_scalable_target", target, "Scale it no more")
    tracking = {
        "TargetValue": round(way.invocations_per_minute, 1),
        "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"},
        "ScaleOutCooldown": _SCALE_OUT_S,
        "ScaleInCooldown": _SCALE_IN_S,
    }
    policy = {"PolicyName": hosting.name, **target}
    forget = Call("application-autoscaling", "delete_scaling_policy", policy, "Forget how it was scaled")
    return [
        Call(
            "application-autoscaling",
            "register_scalable_target",
            {**target, **bounds, "Tags": tags(hosting)},
            f"Let it have {way.instances.least} to {way.instances.most} instances",
            undo=(undo,),
        ),
        Call(
            "application-autoscaling",
            "put_scaling_policy",
            {**policy, "PolicyType": "TargetTrackingScaling", "TargetTrackingScalingPolicyConfiguration": tracking},
            "Add instances where each gets more requests a minute than this, and take them away again",
            undo=(forget,),
        ),
    ]


def scalable(name: str) -> dict[str, str]:
    """What application-autoscaling calls an endpoint's instances."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{VARIANT}",
        "ScalableDimension": DIMENSION,
    }


def alarms_of(name: str) -> tuple[str, str]:
    """What its alarms are called: of errors, and of late answers."""
    return f"{name}-errors", f"{name}-late"


def _listed(tagged: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tagged.items()]


def _values(value: Any) -> Any:
    return {key: getattr(value, key) for key in value.__dataclass_fields__}
