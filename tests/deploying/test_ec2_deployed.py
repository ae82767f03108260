"""`gateway deploy ec2 --yes`, `status` and `undeploy`, with moto as AWS: what is made, what fails midway, and what is left.

moto's images are others than AWS's, and its consoles say nothing: these two are replaced.
"""

import base64
import datetime
import re
import signal
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.exceptions import ReadTimeoutError
from botocore.model import OperationModel
from moto import mock_aws

from gateway.aws.client import Aws
from gateway.aws.machine_standing import machine_standing
from gateway.cli import main
from gateway.deploying.ec2_standing import StandingInstance, StandingMachine, told_of_machine
from gateway.instances.facts import bundled
from tests.deploying.planned_ec2 import BUCKET, IRIS, TYPE, files

SAID = "[   21.0] cloud-init[999]: gateway-setup: ready\r\n"


class OnMoto:
    """calls: that were made, in order. refuse: operation -> code of an error, in place of it. status: of these errors.

    lost: an operation that is done, and whose answer does not come back. says: a console.

    new: operation -> codes of errors that it answers with once each, after the first of `after` was made.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuse: dict[str, str] = {}
        self.status = 400
        self.lost = ""
        self.new: dict[str, list[str]] = {}
        self.after = ""
        self.says = SAID
        session = botocore.session.Session()
        session.set_credentials("of", "nobody")
        session.set_config_variable("region", "us-east-1")
        session.register("before-parameter-build.ec2.RunInstances", self._image)
        session.register("before-call", self._call)
        session.register("after-call", self._answered)
        self.session = boto3.session.Session(botocore_session=session)

    def _image(self, params: dict[str, Any], **_: Any) -> None:
        assert params["ImageId"].startswith("resolve:ssm:/aws/service/")
        params["ImageId"] = "ami-03cf127a"  # moto's first

    def _call(self, model: OperationModel, **_: Any) -> tuple[Any, dict[str, Any]] | None:
        self.calls.append(model.name)
        code = self.refuse.get(model.name)
        if self.after in self.calls and (new := self.new.get(model.name)):
            code = new.pop(0)
        if code is not None:
            error = {"Error": {"Code": code, "Message": "as the test wants it"}}
            return Answer(self.status), error | {"ResponseMetadata": {"HTTPStatusCode": self.status}}
        return (
            (Answer(200), {"Output": base64.b64encode(self.says.encode()).decode()})
            if model.name == "GetConsoleOutput"
            else None
        )

    def _answered(self, model: OperationModel, **_: Any) -> None:
        if model.name == self.lost:
            raise ReadTimeoutError(endpoint_url="https://ec2")


class Answer:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


@pytest.fixture(scope="module")
def moto() -> Iterator[OnMoto]:
    """One for all tests, as its policies and botocore's models take a second to be read: each test leaves nothing in it."""
    with mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        found = OnMoto()
        found.session.client("s3").create_bucket(Bucket=BUCKET)
        yield found


@pytest.fixture
def aws(moto: OnMoto, monkeypatch: pytest.MonkeyPatch) -> OnMoto:
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", moto.session)
    monkeypatch.setattr("gateway.aws.deployment._ASK_AGAIN_S", 0)
    monkeypatch.setattr("gateway.aws.deployment._AGAIN_S", 0.0)
    moto.says = SAID
    moto.refuse.clear()
    moto.status, moto.lost = 400, ""
    moto.calls.clear()
    moto.new.clear()
    return moto


def typed(capsys: pytest.CaptureFixture[str], tmp_path: Any, *options: str, code: int = 0, region: str = "us-east-1") -> str:
    """`gateway deploy ec2 --yes`. Gives all that it says."""
    subnet = boto3.client("ec2", region_name=region).describe_subnets()["Subnets"][0]["SubnetId"]
    place = ("--region", region, "--subnet", subnet, "--bucket", BUCKET)
    return said(capsys, "deploy", "ec2", str(IRIS), *TYPE, *place, *files(tmp_path), "--yes", *options, code=code)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    found = main([*words])
    out, err = capsys.readouterr()
    assert found == code, out + err
    return out + err


def nothing_stands() -> bool:
    return machine_standing(Aws("us-east-1"), "iris", BUCKET).nothing


@pytest.mark.slow
def test_it_is_made_told_and_removed(aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    told = typed(capsys, tmp_path, "--allow", "10.0.0.0/16")
    assert "iris: i-" in told
    assert "  gateway: ready" in told
    assert "  cost: 0.08925 USD an hour, 65.15 USD a month" in told
    ec2 = boto3.client("ec2")
    (instance,) = ec2.describe_instances()["Reservations"][0]["Instances"]
    assert instance["MetadataOptions"]["HttpTokens"] == "required"
    assert instance["IamInstanceProfile"]["Arn"].endswith("/gateway-iris")
    (group,) = ec2.describe_security_groups(GroupNames=["gateway-iris"])["SecurityGroups"]
    assert {rule["FromPort"] for rule in group["IpPermissions"]} == {8000, 8001}
    again = typed(capsys, tmp_path, code=2)
    assert "--name: iris: stands already: `gateway undeploy iris --region us-east-1" in again
    assert "  files: s3://a.bucket/serving-gateway-ec2/iris/" in said(capsys, "status", "iris", "--region", "us-east-1")
    assert "Nothing was removed" in said(capsys, "undeploy", "iris", "--region", "us-east-1")
    assert not nothing_stands()
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes")
    assert nothing_stands()
    assert boto3.client("iam").list_roles()["Roles"] == []
    assert boto3.client("s3").list_objects_v2(Bucket=BUCKET).get("KeyCount") == 0
    (ended,) = ec2.describe_instances(InstanceIds=[instance["InstanceId"]])["Reservations"][0]["Instances"]
    assert ended["State"]["Name"] == "terminated"


@pytest.mark.slow
def test_who_is_ended_by_sigterm_says_what_goes_on_and_leaves_no_package(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def ended(**_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    (packages := tmp_path / "packages").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(packages))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("SIGTERM was not taken", pytrace=False))
    aws.session.events.register("before-call.ec2.RunInstances", ended)
    try:
        told = typed(capsys, tmp_path, code=143)
    finally:
        aws.session.events.unregister("before-call.ec2.RunInstances", ended)
        signal.signal(signal.SIGTERM, before)
    assert "Ended by SIGTERM: what was made goes on, and costs. `gateway undeploy iris" in told
    assert list(packages.iterdir()) == []
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--bucket", BUCKET, "--yes")
    assert nothing_stands()


@pytest.mark.slow
def test_nothing_of_a_machine_in_another_region_is_touched(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    typed(capsys, tmp_path)
    before = machine_standing(Aws("us-east-1"), "iris")
    there = "eu-west-1"
    s3 = boto3.client("s3", region_name=there)
    s3.create_bucket(Bucket="there", CreateBucketConfiguration={"LocationConstraint": there})
    told = typed(capsys, tmp_path, code=2, region=there)
    assert "--bucket: a.bucket: is in us-east-1: expected one in eu-west-1" in told
    told = typed(capsys, tmp_path, "--bucket", "there", code=2, region=there)
    assert "--name: iris: taken by the role gateway-iris, which is of us-east-1, the instance profile" in told
    told = said(capsys, "undeploy", "iris", "--region", there, "--bucket", BUCKET, "--yes")
    assert "Left alone: the role gateway-iris, which is of us-east-1." in told
    assert "Left alone: s3://a.bucket, which is in us-east-1." in told
    assert "iris: nothing stands of it in eu-west-1." in told
    assert "not in this region: the role gateway-iris, which is of us-east-1" in said(
        capsys, "status", "iris", "--region", there, code=1
    )
    assert machine_standing(Aws("us-east-1"), "iris") == before
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes")
    assert nothing_stands()
    s3.delete_bucket(Bucket="there")


@pytest.mark.slow
def test_a_role_that_does_not_say_its_region_is_of_the_machines(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    typed(capsys, tmp_path)
    iam = boto3.client("iam")
    iam.untag_role(RoleName="gateway-iris", TagKeys=["serving-gateway:region"])
    iam.untag_instance_profile(InstanceProfileName="gateway-iris", TagKeys=["serving-gateway:region"])
    told = said(capsys, "undeploy", "iris", "--region", "eu-west-1", "--yes")
    assert "Left alone: the role gateway-iris, which may be of another region." in told
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes")
    assert nothing_stands()
    assert iam.list_roles()["Roles"] == []


@pytest.mark.slow
def test_a_bucket_that_is_gone_keeps_no_machine(aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    typed(capsys, tmp_path)
    s3 = boto3.client("s3")
    for each in s3.list_objects_v2(Bucket=BUCKET)["Contents"]:
        s3.delete_object(Bucket=BUCKET, Key=each["Key"])
    s3.delete_bucket(Bucket=BUCKET)
    assert "iris: i-" in said(capsys, "status", "iris", "--region", "us-east-1")
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes")
    s3.create_bucket(Bucket=BUCKET)
    assert nothing_stands()


MAKING = (
    "CreateSecurityGroup", "CreateRole", "PutRolePolicy", "AttachRolePolicy", "CreateInstanceProfile",
    "AddRoleToInstanceProfile", "PutObject", "RunInstances",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("failing", MAKING)
def test_whichever_call_is_refused_nothing_is_left(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any, failing: str
) -> None:
    aws.refuse[failing] = "UnauthorizedOperation"
    told = typed(capsys, tmp_path, code=1)
    assert "UnauthorizedOperation" in told
    assert "nothing of it is left" in told or "Nothing was made" in told
    assert nothing_stands()


@pytest.mark.slow
def test_of_a_machine_that_ec2_has_no_room_for_nothing_is_left(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    aws.refuse["RunInstances"], aws.status = "InsufficientInstanceCapacity", 500
    told = typed(capsys, tmp_path, code=1)
    assert "InsufficientInstanceCapacity: as the test wants it: name another instance type" in told
    assert "nothing of it is left" in told
    assert nothing_stands()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["CreateSecurityGroup", "RunInstances"])
def test_what_was_made_and_not_answered_is_found_and_taken_back(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any, lost: str
) -> None:
    aws.lost = lost
    assert "nothing of it is left" in typed(capsys, tmp_path, code=1)
    assert nothing_stands()


@pytest.mark.slow
@pytest.mark.parametrize("away", ["DescribeInstances", "TerminateInstances"])
def test_a_network_that_is_away_for_a_while_leaves_no_machine(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    monkeypatch.setattr("gateway.aws.deployment._AGAIN_S", 60.0)
    aws.lost = aws.after = "RunInstances"
    aws.new, aws.status = {away: ["InternalError"] * 2}, 500  # as a call that is not answered
    assert "nothing of it is left" in typed(capsys, tmp_path, code=1)
    assert aws.new == {away: []}
    assert nothing_stands()


@pytest.mark.slow
def test_what_may_have_been_made_and_is_not_found_keeps_nothing_else(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    aws.refuse["RunInstances"], aws.status = "InternalError", 500
    told = typed(capsys, tmp_path, code=1)
    assert "Left are: ec2.run_instances: whether it did something is not known. `gateway undeploy iris" in told
    assert nothing_stands()


@pytest.mark.slow
def test_what_aws_does_not_know_yet_is_asked_for_again(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.aws.deployment._AGAIN_S", 60.0)
    aws.after = "CreateSecurityGroup"
    aws.new = {
        "DescribeInstances": ["InvalidInstanceID.NotFound"] * 2,
        "GetConsoleOutput": ["InvalidInstanceID.NotFound"],
        "AuthorizeSecurityGroupIngress": ["InvalidGroup.NotFound"],
        "RunInstances": ["InvalidGroup.NotFound", "InvalidParameterValue"],
        "PutRolePolicy": ["NoSuchEntity"],
        "AttachRolePolicy": ["NoSuchEntity"],
        "AddRoleToInstanceProfile": ["NoSuchEntity"],
    }
    assert "  gateway: ready" in typed(capsys, tmp_path, "--allow", "10.0.0.0/16")
    assert not any(aws.new.values())
    aws.new = {"TerminateInstances": ["InvalidInstanceID.NotFound"] * 2}
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes")
    assert not any(aws.new.values())
    assert nothing_stands()


@pytest.mark.slow
def test_a_machine_that_ec2_does_not_know_yet_is_ended_all_the_same(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.aws.deployment._AGAIN_S", 60.0)
    aws.after = "RunInstances"
    aws.new = {
        "DescribeInstances": ["UnauthorizedOperation", "InvalidInstanceID.NotFound"],
        "TerminateInstances": ["InvalidInstanceID.NotFound"],
    }
    assert "nothing of it is left" in typed(capsys, tmp_path, code=1)
    assert not any(aws.new.values())
    assert nothing_stands()


@pytest.mark.slow
def test_a_machine_whose_gateway_does_not_start_is_ended_and_says_why(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    aws.says = "[ 9.0] cloud-init[9]: gateway-setup: failed: s3://a.bucket/x: SHA-256 1: expected 2\r\n"
    told = typed(capsys, tmp_path, code=1)
    assert "gateway-setup: failed: s3://a.bucket/x: SHA-256 1: expected 2" in told
    assert nothing_stands()


@pytest.mark.slow
def test_what_cannot_be_taken_back_is_named_with_the_command_that_removes_it(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    aws.says = "gateway-setup: failed: x"
    aws.refuse["TerminateInstances"] = "UnauthorizedOperation"
    told = typed(capsys, tmp_path, code=1)
    assert "Left are: ec2.run_instances" in told
    assert "`gateway undeploy iris --region us-east-1 --on ec2 --bucket a.bucket --yes` removes" in told
    del aws.refuse["TerminateInstances"]
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes")
    assert nothing_stands()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refused", "left"),
    [
        ("TerminateInstances", ["instances", "groups", "role", "profile", "objects"]),
        ("DeleteInstanceProfile", ["profile"]),
    ],
)
def test_a_removal_that_is_refused_keeps_what_needs_it_alone(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any, refused: str, left: list[str]
) -> None:
    typed(capsys, tmp_path)
    aws.refuse[refused] = "UnauthorizedOperation"
    told = said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes", code=1)
    assert "Not done, as far as is known: " in told
    found = machine_standing(Aws("us-east-1"), "iris", BUCKET)
    assert [name for name in ("instances", "groups", "role", "profile", "objects") if getattr(found, name)] == left
    aws.refuse.clear()
    assert f"`gateway undeploy iris --region us-east-1 --bucket {BUCKET} --yes` removes what is left." in told
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--bucket", BUCKET, "--yes")
    assert nothing_stands()


@pytest.mark.slow
@pytest.mark.parametrize("on", ["--on ec2", ""])
def test_what_removes_a_machine_keeps_an_endpoint_of_its_name(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any, on: str
) -> None:
    sagemaker, tags = boto3.client("sagemaker"), [{"Key": "serving-gateway:name", "Value": "iris"}]
    state, role = "iris-aa06ebe2dcf5", "arn:aws:iam::123456789012:role/Gateway"
    sagemaker.create_model(ModelName=state, PrimaryContainer={"Image": "x"}, ExecutionRoleArn=role, Tags=tags)
    variant = {"VariantName": "AllTraffic", "ModelName": state, "InstanceType": "ml.m5.4xlarge", "InitialInstanceCount": 1}
    sagemaker.create_endpoint_config(EndpointConfigName=state, ProductionVariants=[variant], Tags=tags)
    sagemaker.create_endpoint(EndpointName="iris", EndpointConfigName=state, Tags=tags)
    told = typed(capsys, tmp_path)
    (remedy,) = re.findall("`gateway (undeploy .*)` removes it", told)
    assert "InService" not in said(capsys, "status", "iris", "--region", "us-east-1", "--on", "ec2")
    if on:
        said(capsys, *remedy.split())
    else:
        aws.refuse["DeleteEndpoint"] = "AccessDeniedException"
        told = said(capsys, "undeploy", "iris", "--region", "us-east-1", "--bucket", BUCKET, "--yes", code=1)
        whys = f"Remove the endpoint iris, which costs; Remove the endpoint's configuration {state}; Remove the model {state}"
        assert f"Not done, as far as is known: {whys}. `gateway undeploy iris" in told
        aws.refuse.clear()
    assert nothing_stands()
    assert [each["EndpointName"] for each in sagemaker.list_endpoints()["Endpoints"]] == ["iris"]
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes")
    assert sagemaker.list_endpoints()["Endpoints"] == []


@pytest.mark.slow
def test_what_somebody_else_has_called_so_is_left_alone(aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    ec2 = boto3.client("ec2")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = ec2.create_security_group(GroupName="gateway-iris", Description="of somebody", VpcId=vpc)["GroupId"]
    assert f"--name: iris: taken by the security group {group}, not of a gateway" in typed(capsys, tmp_path, code=2)
    assert "Left alone: the security group" in said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes")
    ec2.delete_security_group(GroupId=group)  # it is still there


@pytest.mark.slow
def test_who_may_not_look_at_ec2_hears_of_sagemaker_all_the_same(aws: OnMoto, capsys: pytest.CaptureFixture[str]) -> None:
    aws.refuse["DescribeInstances"] = "UnauthorizedOperation"
    told = said(capsys, "status", "iris", "--region", "us-east-1", code=1)
    assert "iris: no endpoint in us-east-1" in told
    assert "not looked at: AWS: ec2.describe_instances: UnauthorizedOperation" in told
    told = said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes", code=1)
    assert "iris: nothing was seen of it in us-east-1. What was not looked at may stand." in told


@pytest.mark.slow
def test_who_brings_an_instance_profile_needs_no_rights_on_roles(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    boto3.client("iam").create_instance_profile(InstanceProfileName="mine")
    aws.refuse |= dict.fromkeys(("GetRole", "GetInstanceProfile"), "AccessDenied")
    assert "iris: i-" in typed(capsys, tmp_path, "--instance-profile", "mine")
    assert "not looked at" not in said(capsys, "status", "iris", "--region", "us-east-1", "--on", "ec2")
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--on", "ec2", "--yes")
    told = said(capsys, "undeploy", "iris", "--region", "us-east-1", "--on", "ec2", "--yes", code=1)
    assert "iris: nothing was seen of it in us-east-1" in told
    aws.refuse.clear()
    assert nothing_stands()


def test_of_a_machine_that_does_not_run_no_price_and_no_gateway_is_told() -> None:
    started = datetime.datetime(2026, 11, 24, 4, tzinfo=datetime.UTC)
    machine = StandingInstance(
        number="i-1",
        instance_type="c7i.large",
        state="stopped",
        zone="us-east-1a",
        started=started,
        spot=False,
        says="ready",
        by="me",
    )
    told = [*told_of_machine(StandingMachine(name="iris", region="us-east-1", instances=(machine,)), bundled(), started)]
    assert told == [
        "iris: i-1 is stopped in us-east-1a, started 2026-11-24 04:00 UTC (0 min)",
        "  type: c7i.large, by me",
        "  cost: nothing but its disk while it is stopped; Cost Explorer has what was billed before",
    ]


@pytest.mark.parametrize(
    ("region", "told"), [("us-east-1", []), ("sa-east-1", ["  These are prices of us-east-1; sa-east-1 has its own"])]
)
def test_of_a_machine_in_another_region_it_is_told_whose_prices_these_are(region: str, told: list[str]) -> None:
    now = datetime.datetime(2026, 11, 25, tzinfo=datetime.UTC)
    machine = StandingInstance(
        number="i-1",
        instance_type="c7i.large",
        state="running",
        zone=f"{region}a",
        started=now - datetime.timedelta(hours=1),
        spot=False,
        says="ready",
        by="me",
    )
    lines = [*told_of_machine(StandingMachine(name="iris", region=region, instances=(machine,)), bundled(), now)]
    assert lines[3] == "  cost: 0.08925 USD an hour, 65.15 USD a month"
    assert lines[5:] == told


NEEDED = ("ListRolePolicies", "ListAttachedRolePolicies", "GetInstanceProfile", "DescribeSecurityGroups", "ListObjectsV2")


@pytest.mark.slow
def test_a_machine_is_removed_also_where_the_rest_cannot_be_seen(
    aws: OnMoto, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    typed(capsys, tmp_path)
    aws.refuse["DescribeInstances"] = "UnauthorizedOperation"
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes", code=1)
    del aws.refuse["DescribeInstances"]
    assert machine_standing(Aws("us-east-1"), "iris").role  # which the machine needs, that was not seen
    aws.refuse |= dict.fromkeys(NEEDED, "AccessDenied")
    assert "iris: i-" in said(capsys, "status", "iris", "--region", "us-east-1")
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes", code=1)
    aws.refuse.clear()
    left = machine_standing(Aws("us-east-1"), "iris")
    assert not left.instances
    assert left.role
    assert left.groups
    said(capsys, "undeploy", "iris", "--region", "us-east-1", "--yes")
    assert nothing_stands()
