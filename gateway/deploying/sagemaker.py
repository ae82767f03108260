"""The calls that make an endpoint of SageMaker, or a batch transform job, of a package and an image. Pure: nobody is asked.

Everything is called after the deployment: the endpoint NAME, what belongs to one state of it NAME-DIGEST, where the digest is
of all that was asked for, but for scaling. The same options make the same names, others never take those of what runs.
Everything has the tags of `tags`. Sources: the service models of botocore 1.44.5; docs/deploy-sagemaker.md tells what is made.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from gateway import __version__
from gateway.deploying.calls import Call, FromFile, Until
from gateway.deploying.sagemaker_ways import (
    BatchTransform,
    Serverless,
    Way,
    configuration,
    instances_of,
    tracking,
    transform,
    variant,
)

VARIANT: Final = "AllTraffic"
TAG_NAME: Final = "serving-gateway:name"
TAG_DIGEST: Final = "serving-gateway:config"
TAG_BY: Final = "serving-gateway:deployed-by"
PREFIX: Final = "serving-gateway"  # of keys in the bucket
METRICS: Final = "/metrics"
_SCRAPE_S: Final = 60
_DIGEST_CHARS: Final = 12
DIMENSION: Final = "sagemaker:variant:DesiredInstanceCount"
_GONE: Final = Until("EndpointStatus")
READY: Final = Until("EndpointStatus", ("InService",), ("Failed", "OutOfService", "UpdateRollbackFailed"))
STOPPED: Final = Until("TransformJobStatus", ("Completed",), ("Failed", "Stopped"), most_s=5 * 24 * 3600.0)
STOPPED_ANYHOW: Final = Until("TransformJobStatus", ("Completed", "Failed", "Stopped"))
_JOB_LOGS: Final = "/aws/sagemaker/TransformJobs"  # a group of CloudWatch


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model.tar.gz that is to be put into a bucket. sha256: in hexadecimal."""

    path: Path
    bytes: int
    sha256: str
    bucket: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """What is to run, and where.

    package: an archive, or where in S3 one is already. metrics: whether the container has any. limit_ms: of the models' SLO,
    within which 99 of 100 are to be answered; None: there is none. count_asked: somebody asked for the fewest of its instances.
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
    count_asked: bool = False

    @property
    def digest(self) -> str:
        """Of all that makes it what it is: neither where the package was packed, nor how it is scaled, is part of that."""
        content = self.package if isinstance(self.package, str) else [self.package.bucket, self.package.sha256]
        run = asdict(self.way)
        run.pop("per_minute", None)
        run.get("instances", {}).pop("most", None)
        way = {type(self.way).__name__: run}
        asked = [self.image, self.role_arn, content, way, self.subnets, self.security_groups, self.metrics]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:_DIGEST_CHARS]

    @property
    def key(self) -> str:
        """Of an archive in its bucket: no other state has it."""
        return f"{PREFIX}/{self.name}/{self.digest}/model.tar.gz"

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
    if isinstance(hosting.way, BatchTransform):
        return [*model(hosting), *_job(hosting, hosting.way)]
    return [*model(hosting), endpoint_configuration(hosting), *_endpoint(hosting), *scaling(hosting)]


def model(hosting: Hosting) -> list[Call]:
    """The package in its bucket, and the model of it."""
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
        why = "Put the package into the bucket, unless it is there"
        calls.append(Call("s3", "put_object", put, why, undo=(undo,), already="PreconditionFailed"))
    container: dict[str, Any] = {"Image": hosting.image, "ModelDataUrl": hosting.model_data}
    if hosting.metrics and not isinstance(hosting.way, Serverless):
        endpoint = {"MetricsEndpointPath": METRICS, "MetricPublishFrequencyInSeconds": _SCRAPE_S}
        container["ContainerMetricsConfig"] = {"MetricsEndpoints": [endpoint]}
    named: dict[str, Any] = {
        "ModelName": hosting.state,
        "PrimaryContainer": container,
        "ExecutionRoleArn": hosting.role_arn,
        **_network(hosting),
        "Tags": listed(tags(hosting)),
    }
    undo = Call("sagemaker", "delete_model", {"ModelName": hosting.state}, "Remove the model")
    return [*calls, Call("sagemaker", "create_model", named, "Name the image and the package as a model", undo=(undo,))]


def _network(hosting: Hosting) -> dict[str, Any]:
    if not hosting.subnets:
        return {}
    return {"VpcConfig": {"SecurityGroupIds": [*hosting.security_groups], "Subnets": [*hosting.subnets]}}


def endpoint_configuration(hosting: Hosting) -> Call:
    section = {
        "EndpointConfigName": hosting.state,
        "ProductionVariants": [{"VariantName": VARIANT, "ModelName": hosting.state, **variant(hosting.way)}],
        **configuration(hosting.way, metrics=hosting.metrics, scrape_s=_SCRAPE_S),
        "Tags": listed(tags(hosting)),
    }
    undo = Call(
        "sagemaker", "delete_endpoint_config", {"EndpointConfigName": hosting.state}, "Remove the endpoint's configuration"
    )
    return Call("sagemaker", "create_endpoint_config", section, "Say what the endpoint runs on", undo=(undo,))


def _endpoint(hosting: Hosting) -> list[Call]:
    named = {"EndpointName": hosting.name}
    undo = (Call("sagemaker", "delete_endpoint", named, "Remove the endpoint"), until_gone(hosting.name))
    made = {**named, "EndpointConfigName": hosting.state, "Tags": listed(tags(hosting))}
    return [
        Call("sagemaker", "create_endpoint", made, "Start the endpoint: from here on it costs", undo=undo),
        _until_in_service(hosting.name),
    ]


def logs_of(name: str) -> str:
    """The group of CloudWatch that has what an endpoint's container says."""
    return f"/aws/sagemaker/Endpoints/{name}"


def until_gone(name: str) -> Call:
    return Call("sagemaker", "describe_endpoint", {"EndpointName": name}, "Wait until it is gone", until=_GONE)


def _until_in_service(name: str) -> Call:
    until = replace(READY, look=logs_of(name))
    return Call("sagemaker", "describe_endpoint", {"EndpointName": name}, "Wait for it", until=until)


def scaling(hosting: Hosting) -> list[Call]:
    """What has the endpoint's instances scaled, once it is in service."""
    instances, policy = instances_of(hosting.way), tracking(hosting.way, hosting.name)
    if instances is None or policy is None:
        return []
    target = scalable(hosting.name)
    bounds = {"MinCapacity": instances.least, "MaxCapacity": instances.most, "Tags": tags(hosting)}
    named = {"PolicyName": hosting.name, **target}
    forget = Call("application-autoscaling", "delete_scaling_policy", named, "Forget how it was scaled")
    undo = Call("application-autoscaling", "deregister_scalable_target", target, "Scale it no more")
    return [
        Call(
            "application-autoscaling",
            "register_scalable_target",
            {**target, **bounds},
            f"Let it have {instances.least} to {instances.most} instances",
            undo=(undo,),
        ),
        Call(
            "application-autoscaling",
            "put_scaling_policy",
            {**named, "PolicyType": "TargetTrackingScaling", "TargetTrackingScalingPolicyConfiguration": policy},
            "Add instances where each has more than this, and take them away again",
            undo=(forget,),
        ),
    ]


def _job(hosting: Hosting, way: BatchTransform) -> list[Call]:
    """The job, and the removal of what only it needed."""
    named = {"TransformJobName": hosting.state}
    made = {**named, "ModelName": hosting.state, **transform(way), "Tags": listed(tags(hosting))}
    ended = replace(STOPPED, look=_JOB_LOGS)
    question = Call("sagemaker", "describe_transform_job", named, "Wait until it is done", until=ended)
    # Of one that has ended already nothing is stopped.
    stop = Call("sagemaker", "stop_transform_job", named, "Stop the job", already="ValidationException")
    stopped = Call("sagemaker", "describe_transform_job", named, "Wait until it has stopped", until=STOPPED_ANYHOW)
    job = Call("sagemaker", "create_transform_job", made, "Start the job: from here on it costs", undo=(stop, stopped))
    return [job, question, *(back for call in reversed(model(hosting)) for back in call.undo)]


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


def listed(tagged: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tagged.items()]
