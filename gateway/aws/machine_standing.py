"""What stands on EC2 of one deployment, asked for by name, and held to its tag: what has not the tag is somebody else's."""

import datetime
from collections.abc import Iterator
from typing import Any, Final

from gateway.aws.client import Platform
from gateway.aws.questions import Questions
from gateway.deploying.ec2 import FAILED, PREFIX, READY, TAG_BUCKET, TAG_REGION, called
from gateway.deploying.ec2_standing import StandingInstance, StandingMachine
from gateway.deploying.sagemaker import TAG_BY, TAG_NAME
from gateway.errors import PlatformRefused

_LIVING: Final = ("pending", "running", "shutting-down", "stopping", "stopped")


def machine_standing(platform: Platform, name: str, bucket: str | None = None, *, profile: str = "") -> StandingMachine:
    """bucket: looked at too, beside those that its tags name. What may not be looked at is left out, and named.

    profile: the instance profile that its machine is to have, where that is there already: who brings one need not see IAM.
    Raises: PlatformRefused, ConfigError.
    """
    return _LookingOnEc2(platform, name, profile).found(bucket)


class _LookingOnEc2:
    def __init__(self, platform: Platform, name: str, profile: str) -> None:
        self._platform = platform
        self._asking = Questions(platform)
        self._iam = Questions(platform)
        self._name = name
        self._profiles = {profile} - {""}
        self._buckets: dict[str, None] = {}
        self._untagged: list[str] = []

    def found(self, bucket: str | None) -> StandingMachine:
        instances = tuple(self._instances())
        if self._asking.unseen:  # a machine may stand, and need all the rest
            return StandingMachine(name=self._name, region=self._platform.region, unseen=self._asking.unseen)
        groups = tuple(self._groups())
        here = bool(instances or groups)
        role = self._named("get_role", "RoleName", "Role", "the role", here)
        profile = self._named("get_instance_profile", "InstanceProfileName", "InstanceProfile", "the instance profile", here)
        policies = self._of_role("list_role_policies", "PolicyNames") if role else []
        attached = self._of_role("list_attached_role_policies", "AttachedPolicies") if role else []
        if self._iam.unseen:  # none of these goes without the others
            role, profile = {}, {}
        buckets = [*self._buckets, bucket]
        objects = tuple((each, key) for each in dict.fromkeys(buckets) if each for key in self._objects(each))
        brought = self._profiles and called(self._name) not in self._profiles
        return StandingMachine(
            name=self._name,
            region=self._platform.region,
            instances=instances,
            groups=groups,
            role=role["RoleName"] if role else "",
            policies=tuple(policies),
            attached=tuple(each["PolicyArn"] for each in attached),
            profile=profile["InstanceProfileName"] if profile else "",
            roles_in_profile=tuple(each["RoleName"] for each in profile["Roles"]) if profile else (),
            objects=objects,
            untagged=tuple(self._untagged),
            elsewhere=tuple(self._asking.elsewhere),
            unseen=self._asking.unseen if brought else (*self._asking.unseen, *self._iam.unseen),
        )

    def _ours(self, what: str, listed: list[dict[str, str]]) -> bool:
        tags = _tags(listed)
        if tags.get(TAG_NAME) != self._name:
            self._untagged.append(what)
            return False
        if TAG_BUCKET in tags:
            self._buckets[tags[TAG_BUCKET]] = None
        return True

    def _instances(self) -> Iterator[StandingInstance]:
        named, living = (
            {"Name": f"tag:{TAG_NAME}", "Values": [self._name]},
            {"Name": "instance-state-name", "Values": [*_LIVING]},
        )
        asked = {"Filters": [named, living]}
        for reservation in self._asking.items("ec2", "describe_instances", asked, "Reservations") or ():
            for each in reservation["Instances"]:
                tags = each.get("Tags", [])
                if "Name" in _tags(tags) and self._ours(each["InstanceId"], tags):
                    self._profiles.add(each.get("IamInstanceProfile", {}).get("Arn", called(self._name)).rpartition("/")[2])
                    yield StandingInstance(
                        number=each["InstanceId"],
                        instance_type=each["InstanceType"],
                        state=each["State"]["Name"],
                        zone=each.get("Placement", {}).get("AvailabilityZone", self._platform.region),
                        started=each["LaunchTime"].astimezone(datetime.UTC),
                        spot=each.get("InstanceLifecycle") == "spot",
                        says=self._says(each["InstanceId"]),
                        by=_tags(tags).get(TAG_BY, "nobody who says so"),
                    )

    def _says(self, number: str) -> str:
        try:
            answer = self._platform.call("ec2", "get_console_output", {"InstanceId": number, "Latest": True})
        except PlatformRefused as exc:
            return f"its console cannot be read: {exc.reason or exc.message}"
        lines = str(answer.get("Output") or "").splitlines()
        said = [line[line.index("gateway-setup: ") :] for line in lines if READY in line or FAILED in line]
        return said[-1].strip().removeprefix("gateway-setup: ") if said else ""

    def _groups(self) -> Iterator[str]:
        asked = {"Filters": [{"Name": "group-name", "Values": [called(self._name)]}]}
        for each in self._asking.items("ec2", "describe_security_groups", asked, "SecurityGroups") or ():
            if self._ours(f"the security group {each['GroupId']}", each.get("Tags", [])):
                yield each["GroupId"]

    def _named(self, operation: str, key: str, answered: str, what: str, here: bool) -> dict[str, Any]:
        """here: something that is of this region was found, and so what does not say its region is of this one, too."""
        answer = self._iam.call("iam", operation, {key: called(self._name)})
        if answer is None:
            return {}
        found: dict[str, Any] = answer[answered]
        what, tags = f"{what} {called(self._name)}", _tags(found.get("Tags", []))
        region = tags.get(TAG_REGION, self._platform.region if here else "")
        if tags.get(TAG_NAME) == self._name and region != self._platform.region:
            self._asking.elsewhere.append(f"{what}, which {f'is of {region}' if region else 'may be of another region'}")
            return {}
        return found if self._ours(what, found.get("Tags", [])) else {}

    def _of_role(self, operation: str, answered: str) -> list[Any]:
        answer = self._iam.call("iam", operation, {"RoleName": called(self._name)})
        return list(answer[answered]) if answer else []

    def _objects(self, bucket: str) -> Iterator[str]:
        for key, tags in self._asking.objects(bucket, f"{PREFIX}/{self._name}/"):
            if tags is not None and self._ours(f"s3://{bucket}/{key}", tags):
                yield key


def _tags(listed: list[dict[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in listed}
