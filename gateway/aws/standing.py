"""What stands on SageMaker of one deployment, asked for by name, and held to its tag: what has not the tag is somebody else's.

Lists are asked, not the tagging API, which hears of what was made a moment ago only later.
"""

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from gateway.aws.client import UNSAID, Platform, absent
from gateway.aws.questions import Questions
from gateway.deploying.sagemaker import PREFIX, TAG_BY, TAG_NAME, alarms_of, scalable
from gateway.deploying.sagemaker_standing import Deployed, StandingAlarm, StandingEndpoint, StandingScale
from gateway.deploying.scheduled import to_come
from gateway.errors import ConfigError, PlatformRefused

_STATE: Final = r"-[0-9a-f]{12}"
_OF_POLICY: Final = (
    "PolicyName",
    "ServiceNamespace",
    "ResourceId",
    "ScalableDimension",
    "PolicyType",
    "TargetTrackingScalingPolicyConfiguration",
    "StepScalingPolicyConfiguration",
)
_OF_ACTION: Final = (
    "ScheduledActionName",
    "ServiceNamespace",
    "ResourceId",
    "ScalableDimension",
    "Schedule",
    "Timezone",
    "StartTime",
    "EndTime",
    "ScalableTargetAction",
)
_OF_ALARM: Final = (
    "AlarmName",
    "AlarmDescription",
    "ActionsEnabled",
    "OKActions",
    "AlarmActions",
    "InsufficientDataActions",
    "MetricName",
    "Namespace",
    "Statistic",
    "ExtendedStatistic",
    "Dimensions",
    "Period",
    "Unit",
    "EvaluationPeriods",
    "DatapointsToAlarm",
    "Threshold",
    "ComparisonOperator",
    "TreatMissingData",
    "EvaluateLowSampleCountPercentile",
    "Metrics",
    "ThresholdMetricId",
)
_RUNNING: Final = ("InProgress", "Stopping")


def standing(platform: Platform, name: str, bucket: str | None = None) -> Deployed:
    """bucket: looked at too, beside those that its models name. What may not be looked at is left out, and named.

    Raises: PlatformRefused, ConfigError.
    """
    return _Looking(platform, name).found(bucket)


def check_bucket(platform: Platform, bucket: str) -> None:
    """The first call of all, so it tells of credentials as well.

    Raises: ConfigError, if there is none, or it is in another region, whose objects nothing reads; PlatformRefused.
    """
    try:
        found = platform.call("s3", "head_bucket", {"Bucket": bucket})
    except PlatformRefused as exc:
        if absent(exc.reason, exc.message):
            made = f"`aws s3 mb s3://{bucket} --region {platform.region}` makes it"
            raise ConfigError(f"--bucket: {bucket}: there is no such bucket: {made}") from exc
        if exc.reason in UNSAID:
            raise ConfigError(f"--bucket: {bucket}: S3 answered {exc.reason}: {UNSAID[exc.reason]}") from exc
        raise
    there = found.get("BucketRegion", platform.region)
    if there != platform.region:
        raise ConfigError(f"--bucket: {bucket}: is in {there}: expected one in {platform.region}, where it is to be read")


class _Looking:
    def __init__(self, platform: Platform, name: str) -> None:
        self._platform = platform
        self._asking = Questions(platform)
        self._asking_how = Questions(platform)  # it is scaled, which goes with the scaling
        self._name = name
        self._untagged: list[str] = []

    def found(self, bucket: str | None) -> Deployed:
        endpoint = self._endpoint()
        if endpoint is None and self._asking.unseen:  # it may stand, and need all but the jobs
            return Deployed(
                name=self._name,
                region=self._platform.region,
                jobs=tuple(self._jobs()),
                untagged=tuple(self._untagged),
                unseen=self._asking.unseen,
            )
        models = tuple(self._states("list_models", "Models", "ModelName", "ModelArn"))
        buckets = dict.fromkeys((*(self._bucket(model) for model in models), bucket))
        return Deployed(
            name=self._name,
            region=self._platform.region,
            endpoint=endpoint,
            scale=self._scale(),
            alarms=tuple(self._alarms()),
            configurations=tuple(
                self._states("list_endpoint_configs", "EndpointConfigs", "EndpointConfigName", "EndpointConfigArn")
            ),
            models=models,
            jobs=tuple(self._jobs()),
            objects=tuple((each, key) for each in buckets if each for key in self._objects(each)),
            untagged=tuple(self._untagged),
            elsewhere=tuple(self._asking.elsewhere),
            unseen=self._asking.unseen,
            unseen_scaling=self._asking_how.unseen,
        )

    def _call(self, operation: str, **parameters: Any) -> dict[str, Any] | None:
        return self._asking.call("sagemaker", operation, parameters)

    def _listed(self, operation: str, key: str) -> list[dict[str, Any]]:
        return self._asking.items("sagemaker", operation, {"NameContains": self._name, "MaxResults": 100}, key) or []

    def _tags(self, arn: str) -> dict[str, str] | None:
        return _by_key(self._asking.items("sagemaker", "list_tags", {"ResourceArn": arn}, "Tags"))

    def _ours(self, what: str, tags: Mapping[str, str] | None) -> bool:
        """tags: None: they are not known."""
        if tags is None:
            return False
        if tags.get(TAG_NAME) == self._name:
            return True
        self._untagged.append(what)
        return False

    def _states(self, operation: str, key: str, named: str, arn: str) -> Iterator[str]:
        for each in self._listed(operation, key):
            if re.fullmatch(re.escape(self._name) + _STATE, each[named]) and self._ours(each[named], self._tags(each[arn])):
                yield each[named]

    def _jobs(self) -> Iterator[str]:
        for each in self._listed("list_transform_jobs", "TransformJobSummaries"):
            job = each["TransformJobName"]
            ours = re.fullmatch(re.escape(self._name) + _STATE, job)
            if ours and each["TransformJobStatus"] in _RUNNING and self._ours(job, self._tags(each["TransformJobArn"])):
                yield job

    def _endpoint(self) -> StandingEndpoint | None:
        listed = [each for each in self._listed("list_endpoints", "Endpoints") if each["EndpointName"] == self._name]
        if not listed:
            return None
        tags = self._tags(listed[0]["EndpointArn"])
        if tags is None or not self._ours(f"the endpoint {self._name}", tags):
            return None
        answer = self._call("describe_endpoint", EndpointName=self._name)
        if answer is None:
            if not self._asking.unseen:  # it is gone meanwhile
                return None
            answer = listed[0]  # which has less
        configuration = answer.get("EndpointConfigName", "")
        variant: dict[str, Any] = next(iter(answer.get("ProductionVariants", ())), {})
        running = {pool["InstanceType"]: pool["CurrentInstanceCount"] for pool in variant.get("InstancePools", ())}
        types = self._types(configuration) if configuration else None
        return StandingEndpoint(
            status=answer["EndpointStatus"],
            configuration=configuration,
            created=_utc(answer["CreationTime"]),
            changed=_utc(answer["LastModifiedTime"]),
            types=types,
            running=running or {types[0] if types and len(types) == 1 else "": variant.get("CurrentInstanceCount", 0)},
            wanted=variant.get("DesiredInstanceCount", 0),
            by=tags.get(TAG_BY, "nobody who says so"),
            reason=answer.get("FailureReason", ""),
        )

    def _types(self, configuration: str) -> tuple[str, ...] | None:
        """(): of a configuration that was removed, or is serverless."""
        answer = self._call("describe_endpoint_config", EndpointConfigName=configuration)
        if answer is None:
            return None if self._asking.unseen else ()
        variant: dict[str, Any] = next(iter(answer["ProductionVariants"]), {})
        pools = sorted(variant.get("InstancePools", ()), key=lambda pool: int(pool["Priority"]))
        return tuple(pool["InstanceType"] for pool in pools) or tuple(filter(None, [variant.get("InstanceType")]))

    def _scale(self) -> StandingScale | None:
        """What the service scales of an endpoint of this name, which it forgets with it."""
        target = scalable(self._name)
        asked = {"ServiceNamespace": target["ServiceNamespace"], "ResourceIds": [target["ResourceId"]]}
        asking = "application-autoscaling"
        for each in self._asking.items(asking, "describe_scalable_targets", asked, "ScalableTargets") or ():
            found = self._asking.call(asking, "list_tags_for_resource", {"ResourceARN": each["ScalableTargetARN"]})
            if self._ours(f"what scales {self._name}", None if found is None else found["Tags"]):
                found_policies = list(self._policies(target))
                policies = tuple(_only(_OF_POLICY, policy) for policy in found_policies)
                suspended: dict[str, bool] = each.get("SuspendedState", {})
                return StandingScale(
                    each["MinCapacity"],
                    each["MaxCapacity"],
                    _per_minute(policies),
                    policies,
                    tuple(self._scheduled(target)),
                    suspended if any(suspended.values()) else {},
                    arns={policy["PolicyName"]: policy["PolicyARN"] for policy in found_policies},
                    alarms=tuple(self._setting_off(found_policies)),
                )
        return None

    def _policies(self, target: dict[str, str]) -> Iterator[dict[str, Any]]:
        asking = "application-autoscaling"
        yield from self._asking_how.items(asking, "describe_scaling_policies", target, "ScalingPolicies") or ()

    def _setting_off(self, policies: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The alarms of policies, each once, unless they are made with them."""
        stepped = (policy for policy in policies if policy["PolicyType"] == "StepScaling")
        names = [*dict.fromkeys(alarm["AlarmName"] for policy in stepped for alarm in policy.get("Alarms", ()))]
        if names:
            for alarm in self._asking_how.items("cloudwatch", "describe_alarms", {"AlarmNames": names}, "MetricAlarms") or ():
                yield _only(_OF_ALARM, alarm)

    def _scheduled(self, target: dict[str, str]) -> Iterator[dict[str, Any]]:
        asking, now = "application-autoscaling", datetime.datetime.now(tz=datetime.UTC)
        for action in self._asking_how.items(asking, "describe_scheduled_actions", target, "ScheduledActions") or ():
            if to_come(action, now) is not None:
                yield _only(_OF_ACTION, action)

    def _alarms(self) -> Iterator[StandingAlarm]:
        asked = {"AlarmNames": [*alarms_of(self._name)]}
        for each in self._asking.items("cloudwatch", "describe_alarms", asked, "MetricAlarms") or ():
            found = self._asking.call("cloudwatch", "list_tags_for_resource", {"ResourceARN": each["AlarmArn"]})
            tags = None if found is None else found["Tags"]
            if self._ours(f"the alarm {each['AlarmName']}", _by_key(tags)):
                yield StandingAlarm(
                    each["AlarmName"], {**_only(_OF_ALARM, each), "Tags": tags}, each.get("StateValue") == "ALARM"
                )

    def _bucket(self, model: str) -> str | None:
        """That it has its package from, if that was put there by us."""
        answer = self._call("describe_model", ModelName=model) or {}
        url = str(answer.get("PrimaryContainer", {}).get("ModelDataUrl", ""))
        found = re.fullmatch(rf"s3://([^/]+)/{re.escape(f'{PREFIX}/{self._name}/')}.+", url)
        return found[1] if found is not None else None

    def _objects(self, bucket: str) -> Iterator[str]:
        for key, tags in self._asking.objects(bucket, f"{PREFIX}/{self._name}/"):
            if self._ours(f"s3://{bucket}/{key}", _by_key(tags)):
                yield key


def _only(keys: Iterable[str], answer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: answer[key] for key in keys if key in answer}


def _by_key(listed: list[dict[str, str]] | None) -> dict[str, str] | None:
    return None if listed is None else {tag["Key"]: tag["Value"] for tag in listed}


def _per_minute(policies: Iterable[dict[str, Any]]) -> float | None:
    tracking = (policy.get("TargetTrackingScalingPolicyConfiguration", {}) for policy in policies)
    return next((float(each["TargetValue"]) for each in tracking if "PredefinedMetricSpecification" in each), None)


def _utc(time: datetime.datetime) -> datetime.datetime:
    return time.astimezone(datetime.UTC)
