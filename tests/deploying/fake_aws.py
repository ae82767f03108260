"""An AWS in memory, behind real clients of boto3: it takes calls where botocore would send them, and answers them.

What botocore's validator refuses never comes here; answers are held to the service models as well. moto was not taken: it has
no `update_endpoint`, and knows neither instance pools nor how an endpoint fails.
"""

import copy
import datetime
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zoneinfo import ZoneInfo

import boto3
import botocore.session
from botocore import xform_name
from botocore.exceptions import EndpointConnectionError
from botocore.loaders import create_loader
from botocore.model import OperationModel
from botocore.validate import ParamValidator

NOW = datetime.datetime(2026, 11, 24, 4, tzinfo=datetime.UTC)
ARN = "arn:aws:sagemaker:us-east-1:123456789012:"
_LOADER = create_loader()  # keeps what it has read of the service models
RUNNING = dict.fromkeys(("DynamicScalingInSuspended", "DynamicScalingOutSuspended", "ScheduledScalingSuspended"), False)
LOST = "lost"
"""Instead of a refusal: the call is done, and its answer does not come back."""
REPEATED = "repeated"
"""The same, and the client makes the call again, by itself."""


class Refused(Exception):
    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


class FakeAws:
    """What stands, by kind and name, and the calls that were made. asked: services and operations, as IAM calls them.

    refuse: operation -> what is answered instead of doing it; `LOST`; `REPEATED`; or nothing. patience: how often an endpoint
    says Creating or Updating before it is done. becomes: what it is then. busy: it cannot be removed meanwhile. now: its clock.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.asked: set[tuple[str, str]] = set()
        self.refuse: dict[str, Refused | str] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(tz=datetime.UTC)
        self.patience = 0
        self.becomes = "InService"
        self.busy = False
        self.reason = ""
        self.models: dict[str, dict[str, Any]] = {}
        self.configurations: dict[str, dict[str, Any]] = {}
        self.endpoints: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.targets: dict[str, dict[str, Any]] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.arns: dict[str, str] = {}  # of these: of one that is made anew it is another
        self.scheduled: dict[str, dict[str, Any]] = {}
        self.alarms: dict[str, dict[str, Any]] = {}
        self.ringing: list[str] = []  # of these
        self.buckets = {"my-models": "us-east-1"}
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._asked: Counter[str] = Counter()

    @contextmanager
    def serving(self, region: str = "us-east-1") -> Iterator["FakeAws"]:
        """As the default session of boto3."""
        session = botocore.session.Session()
        session.register_component("data_loader", _LOADER)
        session.set_credentials("key", "secret")
        session.set_config_variable("region", region)
        session.register("before-parameter-build", self._note)
        session.register("before-call", self._answer)
        before = boto3.DEFAULT_SESSION
        boto3.setup_default_session(botocore_session=session)
        try:
            yield self
        finally:
            boto3.DEFAULT_SESSION = before

    @property
    def standing(self) -> list[str]:
        """All that is there, and could cost or be in the way."""
        kinds = (self.models, self.configurations, self.endpoints, self.targets, self.policies, self.scheduled)
        kinds = (*kinds, self.alarms, self.objects)
        return [str(name) for kind in kinds for name in kind]

    @property
    def changed(self) -> list[str]:
        """The operations that were made and were no questions."""
        return [name for name, _ in self.calls if not name.startswith(("list", "describe", "get", "head"))]

    def _note(self, params: dict[str, Any], model: OperationModel, context: dict[str, Any], **_: Any) -> None:
        context["asked"] = params

    def _answer(self, model: OperationModel, context: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
        name, asked = xform_name(model.name), context["asked"]
        self.calls.append((name, copy.copy(asked)))
        self.asked.add((model.service_model.signing_name.replace("monitoring", "cloudwatch"), model.name))
        self.before.pop(name, lambda: None)()
        try:
            refusal = self.refuse.get(name)
            if isinstance(refusal, Refused):
                raise refusal
            if model.service_model.service_name == "s3":
                name = f"s3_{name}"
            elif name == "list_tags_for_resource":
                name = f"{model.service_model.service_name.replace('-', '_')}_tags"
            if refusal == REPEATED:
                getattr(self, f"_{name}")(**asked)
            found: dict[str, Any] = getattr(self, f"_{name}")(**asked) or {}
            if refusal == LOST:
                raise EndpointConnectionError(endpoint_url="https://sagemaker")
        except Refused as exc:
            error = {"Error": {"Code": exc.code, "Message": exc.message}}
            return _Status(exc.status), error | {"ResponseMetadata": {"HTTPStatusCode": exc.status}}
        if model.output_shape is not None:
            report = ParamValidator().validate(found, model.output_shape)
            assert not report.has_errors(), f"{name}: {report.generate_report()}"
        return _Status(200), found

    # Nothing is on EC2

    def _describe_instances(self, **_: Any) -> dict[str, Any]:
        return {"Reservations": []}

    def _describe_security_groups(self, **_: Any) -> dict[str, Any]:
        return {"SecurityGroups": []}

    def _get_role(self, RoleName: str) -> None:
        raise Refused("NoSuchEntity", f"The role with name {RoleName} cannot be found.", 404)

    def _get_instance_profile(self, InstanceProfileName: str) -> None:
        raise Refused("NoSuchEntity", f"Instance Profile {InstanceProfileName} cannot be found.", 404)

    # SageMaker

    def _create_model(self, **asked: Any) -> dict[str, Any]:
        _new(self.models, asked["ModelName"], "Cannot create already existing model", asked)
        return {"ModelArn": f"{ARN}model/{asked['ModelName']}"}

    def _describe_model(self, ModelName: str) -> dict[str, Any]:
        kept = {key: value for key, value in _there(self.models, ModelName, "model").items() if key != "Tags"}
        return kept | {"CreationTime": NOW, "ModelArn": f"{ARN}model/{ModelName}"}

    def _delete_model(self, ModelName: str) -> None:
        _there(self.models, ModelName, "model")
        del self.models[ModelName]

    def _create_endpoint_config(self, **asked: Any) -> dict[str, Any]:
        for variant in asked["ProductionVariants"]:
            _there(self.models, variant["ModelName"], "model")
        _new(self.configurations, asked["EndpointConfigName"], "Cannot create already existing endpoint configuration", asked)
        return {"EndpointConfigArn": f"{ARN}endpoint-config/{asked['EndpointConfigName']}"}

    def _describe_endpoint_config(self, EndpointConfigName: str) -> dict[str, Any]:
        found = _there(self.configurations, EndpointConfigName, "endpoint configuration")
        kept = {key: value for key, value in found.items() if key != "Tags"}
        return kept | {"CreationTime": NOW, "EndpointConfigArn": f"{ARN}endpoint-config/{EndpointConfigName}"}

    def _delete_endpoint_config(self, EndpointConfigName: str) -> None:
        _there(self.configurations, EndpointConfigName, "endpoint configuration")
        used = [
            name
            for name, endpoint in self.endpoints.items()
            if EndpointConfigName in (endpoint["EndpointConfigName"], endpoint.get("next", endpoint)["EndpointConfigName"])
        ]
        assert not used, f"{EndpointConfigName} is in use by {used}: one must not delete it"
        del self.configurations[EndpointConfigName]

    def _create_endpoint(self, **asked: Any) -> dict[str, Any]:
        _there(self.configurations, asked["EndpointConfigName"], "endpoint configuration")
        _new(self.endpoints, asked["EndpointName"], "Cannot create already existing endpoint", asked | {"status": "Creating"})
        return {"EndpointArn": f"{ARN}endpoint/{asked['EndpointName']}"}

    def _update_endpoint(self, **asked: Any) -> dict[str, Any]:
        endpoint = _there(self.endpoints, asked["EndpointName"], "endpoint")
        _there(self.configurations, asked["EndpointConfigName"], "endpoint configuration")
        if endpoint["status"] != "InService":
            raise Refused("ValidationException", "Cannot update in-progress endpoint")
        watched = asked.get("DeploymentConfig", {}).get("AutoRollbackConfiguration", {}).get("Alarms", ())
        alarms = [alarm["AlarmName"] for alarm in watched]
        for name in alarms:
            _there(self.alarms, name, "alarm")
        types = [
            [variant.get("InstanceType"), variant.get("InstancePools")]
            for name in (endpoint["EndpointConfigName"], asked["EndpointConfigName"])
            for variant in self.configurations[name]["ProductionVariants"]
        ]
        scaled = any(each.split("/")[1] == asked["EndpointName"] for each in self.targets)
        if scaled and types[0] != types[1]:
            raise Refused("ValidationException", "The instance type of a variant that is scaled cannot be changed")
        count = self._count(endpoint) if asked.get("RetainAllVariantProperties") else None
        new = {"EndpointConfigName": asked["EndpointConfigName"], "count": count}
        routing = asked.get("DeploymentConfig", {}).get("BlueGreenUpdatePolicy", {}).get("TrafficRoutingConfiguration", {})
        if 2 * routing.get("CanarySize", {}).get("Value", 0) > (self._count(new) or 0):
            raise Refused("ValidationException", "CanarySize must be less than or equal to 50% of the variant's instances")
        self._asked.clear()
        endpoint |= {"status": "Updating", "next": new, "alarms": alarms}
        return {"EndpointArn": f"{ARN}endpoint/{asked['EndpointName']}"}

    def _count(self, endpoint: dict[str, Any]) -> int | None:
        """Of its instances: those that it has kept, or that its configuration says."""
        variant = self.configurations[endpoint["EndpointConfigName"]]["ProductionVariants"][0]
        count: int | None = endpoint.get("count") or variant.get("InitialInstanceCount")
        return count

    def _describe_endpoint(self, EndpointName: str) -> dict[str, Any]:
        endpoint = _there(self.endpoints, EndpointName, "endpoint")
        self._asked[EndpointName] += 1
        if endpoint["status"] in ("Creating", "Updating") and self._asked[EndpointName] > self.patience:
            after = endpoint.pop("next", None)
            endpoint["status"] = self.becomes
            if after is not None and self.becomes == "InService" and not self.reason:
                endpoint |= after
        configuration = self.configurations[endpoint["EndpointConfigName"]]
        variant = configuration["ProductionVariants"][0]
        count = self._count(endpoint)
        summary: dict[str, Any] = {"VariantName": variant["VariantName"]}
        if count is not None:
            summary |= {"CurrentInstanceCount": count, "DesiredInstanceCount": count}
        if "InstancePools" in variant:
            pool = {"InstanceType": variant["InstancePools"][0]["InstanceType"], "CurrentInstanceCount": count}
            summary["InstancePools"] = [pool]
        found = {
            "EndpointName": EndpointName,
            "EndpointArn": f"{ARN}endpoint/{EndpointName}",
            "EndpointConfigName": endpoint["EndpointConfigName"],
            "ProductionVariants": [summary],
            "EndpointStatus": endpoint["status"],
            "CreationTime": NOW,
            "LastModifiedTime": NOW,
        }
        return found | ({"FailureReason": self.reason} if self.reason else {})

    def _delete_endpoint(self, EndpointName: str) -> None:
        endpoint = _there(self.endpoints, EndpointName, "endpoint")
        if self.busy and endpoint["status"] in ("Creating", "Updating"):
            self._describe_endpoint(EndpointName)  # it goes on meanwhile
            raise Refused("ValidationException", "Cannot update in-progress endpoint")
        del self.endpoints[EndpointName]

    def _list_endpoints(self, **asked: Any) -> dict[str, Any]:
        times = {"CreationTime": NOW, "LastModifiedTime": NOW}
        listed = [
            {"EndpointName": name, "EndpointArn": f"{ARN}endpoint/{name}", "EndpointStatus": each["status"], **times}
            for name, each in self.endpoints.items()
        ]
        return _paged("Endpoints", listed, "EndpointName", asked)

    def _list_endpoint_configs(self, **asked: Any) -> dict[str, Any]:
        listed = [
            {"EndpointConfigName": name, "EndpointConfigArn": f"{ARN}endpoint-config/{name}", "CreationTime": NOW}
            for name in self.configurations
        ]
        return _paged("EndpointConfigs", listed, "EndpointConfigName", asked)

    def _list_models(self, **asked: Any) -> dict[str, Any]:
        listed = [{"ModelName": name, "ModelArn": f"{ARN}model/{name}", "CreationTime": NOW} for name in self.models]
        return _paged("Models", listed, "ModelName", asked)

    def _list_tags(self, ResourceArn: str, **_: Any) -> dict[str, Any]:
        kind, _, name = ResourceArn.removeprefix(ARN).partition("/")
        kinds = {"model": self.models, "endpoint-config": self.configurations, "endpoint": self.endpoints,
                 "transform-job": self.jobs}  # fmt: skip
        return {"Tags": kinds[kind][name].get("Tags", [])}

    def _create_transform_job(self, **asked: Any) -> dict[str, Any]:
        _there(self.models, asked["ModelName"], "model")
        _new(self.jobs, asked["TransformJobName"], "Job name must be unique", asked | {"status": "InProgress"})
        return {"TransformJobArn": f"{ARN}transform-job/{asked['TransformJobName']}"}

    def _describe_transform_job(self, TransformJobName: str) -> dict[str, Any]:
        job = _there(self.jobs, TransformJobName, "job")
        self._asked[TransformJobName] += 1
        if self._asked[TransformJobName] > self.patience and job["status"] in ("InProgress", "Stopping"):
            job["status"] = "Stopped" if job["status"] == "Stopping" else {"InService": "Completed"}.get(self.becomes, "Failed")
        kept = {key: value for key, value in job.items() if key not in ("status", "Tags")}
        found = kept | {"TransformJobStatus": job["status"], "CreationTime": NOW}
        found["TransformJobArn"] = f"{ARN}transform-job/{TransformJobName}"
        return found | ({"FailureReason": self.reason} if self.reason else {})

    def _stop_transform_job(self, TransformJobName: str) -> None:
        job = _there(self.jobs, TransformJobName, "job")
        if job["status"] != "InProgress":
            raise Refused("ValidationException", f"The request was rejected because the job is {job['status']}")
        job["status"] = "Stopping"

    def _list_transform_jobs(self, **asked: Any) -> dict[str, Any]:
        listed = [
            {
                "TransformJobName": name,
                "TransformJobArn": f"{ARN}transform-job/{name}",
                "TransformJobStatus": each["status"],
                "CreationTime": NOW,
            }
            for name, each in self.jobs.items()
        ]
        return _paged("TransformJobSummaries", listed, "TransformJobName", asked)

    # Application Auto Scaling

    def _register_scalable_target(self, **asked: Any) -> dict[str, Any]:
        _, name, *_ = asked["ResourceId"].split("/")
        if self.endpoints.get(name, {}).get("status") != "InService":
            raise Refused("ValidationException", f"ECS or SageMaker resource doesn't exist: {asked['ResourceId']}")
        self.targets[asked["ResourceId"]] = self.targets.get(asked["ResourceId"], {}) | asked
        return {"ScalableTargetARN": _target(asked["ResourceId"])}

    def _describe_scalable_targets(self, **asked: Any) -> dict[str, Any]:
        keys = ("ServiceNamespace", "ResourceId", "ScalableDimension", "MinCapacity", "MaxCapacity")
        found = [
            {key: self.targets[each][key] for key in keys}
            | {"SuspendedState": self.targets[each].get("SuspendedState", RUNNING)}
            | {"RoleARN": "arn:aws:iam::123456789012:role/x", "CreationTime": NOW, "ScalableTargetARN": _target(each)}
            for each in asked["ResourceIds"]
            if each in self.targets
        ]
        return {"ScalableTargets": found}

    def _application_autoscaling_tags(self, ResourceARN: str) -> dict[str, Any]:
        return {"Tags": next(each["Tags"] for name, each in self.targets.items() if _target(name) == ResourceARN)}

    def _put_scaling_policy(self, **asked: Any) -> dict[str, Any]:
        if asked["ResourceId"] not in self.targets:
            raise Refused("ObjectNotFoundException", "No scalable target registered")
        if asked["PolicyName"] not in self.policies:
            self.arns[asked["PolicyName"]] = f"arn:aws:autoscaling:us-east-1:123456789012:scalingPolicy:{uuid.uuid4()}"
        self.policies[asked["PolicyName"]] = asked
        return {"PolicyARN": self.arns[asked["PolicyName"]], "Alarms": []}

    def _describe_scaling_policies(self, **asked: Any) -> dict[str, Any]:
        listed = [
            {**each, "PolicyARN": self.arns[name], "Alarms": self._set_off(self.arns[name]), "CreationTime": NOW}
            for name, each in self.policies.items()
            if each["ResourceId"] == asked["ResourceId"]
        ]
        return {"ScalingPolicies": listed}

    def _set_off(self, arn: str) -> list[dict[str, str]]:
        actions = ("OKActions", "AlarmActions", "InsufficientDataActions")
        found = [name for name, each in self.alarms.items() if any(arn in each.get(key, ()) for key in actions)]
        return [{"AlarmName": name, "AlarmARN": f"arn:{name}"} for name in found]

    def _delete_scaling_policy(self, PolicyName: str, **_: Any) -> None:
        if PolicyName not in self.policies:
            raise Refused("ObjectNotFoundException", "No scaling policy found")
        del self.policies[PolicyName]

    def _deregister_scalable_target(self, ResourceId: str, **_: Any) -> None:
        if ResourceId not in self.targets:
            raise Refused("ObjectNotFoundException", "No scalable target found")
        del self.targets[ResourceId]
        for kind in (self.policies, self.scheduled):  # which it forgets with it
            for name in [name for name, each in kind.items() if each["ResourceId"] == ResourceId]:
                del kind[name]

    def _put_scheduled_action(self, **asked: Any) -> None:
        times = [asked[key] for key in ("StartTime", "EndTime") if key in asked]
        if once := re.fullmatch(r"at\((.+)\)", asked["Schedule"]):
            zone = ZoneInfo(asked.get("Timezone", "UTC"))
            times.append(datetime.datetime.strptime(once[1], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=zone))
        for time in times:
            if time <= self.now():
                raise Refused("ValidationException", "A scheduled action cannot be in the past")
        self.scheduled[asked["ScheduledActionName"]] = asked

    def _describe_scheduled_actions(self, **asked: Any) -> dict[str, Any]:
        listed = [
            {**each, "ScheduledActionARN": "arn:aws:autoscaling:us-east-1:123456789012:scheduledAction:x", "CreationTime": NOW}
            for each in self.scheduled.values()
            if each["ResourceId"] == asked["ResourceId"]
        ]
        return {"ScheduledActions": listed}

    # CloudWatch

    def _put_metric_alarm(self, **asked: Any) -> None:
        tags = self.alarms.get(asked["AlarmName"], asked).get("Tags", [])  # of one that is there they stay
        self.alarms[asked["AlarmName"]] = asked | {"Tags": tags}

    def _describe_alarms(self, AlarmNames: list[str], **_: Any) -> dict[str, Any]:
        found = [
            {key: value for key, value in self.alarms[name].items() if key != "Tags"}
            | {"AlarmArn": f"arn:{name}", "StateValue": "ALARM" if name in self.ringing else "OK"}
            for name in AlarmNames
            if name in self.alarms
        ]
        return {"MetricAlarms": found}

    def _cloudwatch_tags(self, ResourceARN: str) -> dict[str, Any]:
        return {"Tags": self.alarms[ResourceARN.removeprefix("arn:")].get("Tags", [])}

    def _delete_alarms(self, AlarmNames: list[str]) -> None:
        watching = [name for each in self.endpoints.values() if "next" in each for name in each["alarms"]]
        for name in AlarmNames:
            _there(self.alarms, name, "alarm")
            assert name not in watching, f"{name} watches a shift: one must not delete it"
            del self.alarms[name]

    # S3

    def _s3_head_bucket(self, Bucket: str) -> dict[str, Any]:
        if Bucket not in self.buckets:
            raise Refused("404", "Not Found", 404)
        return {"BucketRegion": self.buckets[Bucket]}

    def _s3_put_object(self, **asked: Any) -> dict[str, Any]:
        place = asked["Bucket"], asked["Key"]
        if asked.get("IfNoneMatch") == "*" and place in self.objects:
            raise Refused("PreconditionFailed", "At least one of the pre-conditions you specified did not hold", 412)
        self.objects[place] = {"body": asked["Body"].read(), "tags": asked["Tagging"]}
        return {"ETag": "x"}

    def _s3_list_objects_v2(self, Bucket: str, Prefix: str, **_: Any) -> dict[str, Any]:
        if Bucket not in self.buckets:
            raise Refused("NoSuchBucket", "The specified bucket does not exist", 404)
        keys = [key for bucket, key in self.objects if bucket == Bucket and key.startswith(Prefix)]
        return {"Contents": [{"Key": key} for key in keys], "IsTruncated": False}

    def _s3_get_object_tagging(self, Bucket: str, Key: str) -> dict[str, Any]:
        pairs = (pair.split("=") for pair in self.objects[Bucket, Key]["tags"].replace("%3A", ":").split("&") if pair)
        return {"TagSet": [{"Key": key, "Value": value} for key, value in pairs]}

    def _s3_delete_object(self, Bucket: str, Key: str) -> None:
        self.objects.pop((Bucket, Key), None)


class _Status:
    """Of an answer: all that botocore looks at."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


def _new(kind: dict[str, Any], name: str, told: str, value: dict[str, Any]) -> None:
    if name in kind:
        raise Refused("ValidationException", f'{told} "{ARN}{name}".')
    kind[name] = value


def _there(kind: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    if name not in kind:
        raise Refused("ValidationException", f'Could not find {what} "{ARN}{name}".')
    found: dict[str, Any] = kind[name]
    return found


def _paged(key: str, listed: list[dict[str, Any]], named: str, asked: dict[str, Any]) -> dict[str, Any]:
    """One at a time, as a list could be."""
    found = [each for each in listed if re.search(re.escape(asked["NameContains"]), each[named])]
    first = int(asked.get("NextToken", 0))
    more = {"NextToken": str(first + 1)} if first + 1 < len(found) else {}
    return {key: found[first : first + 1], **more}


def _target(resource: str) -> str:
    return f"arn:aws:application-autoscaling:us-east-1:123456789012:scalable-target/{resource.replace('/', '-')}"
