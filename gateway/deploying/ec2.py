"""The calls that make one machine on EC2 a gateway, and the user data by which it makes itself one. Pure: nobody is asked.

Everything is called gateway-NAME, and has the tags of `tags`: a second one of a name is refused by EC2 and IAM themselves.
Nobody logs in by ssh, and no port is open unless --allow opens the gateway's own: AWS Systems Manager's sessions reach the
machine. It gets what it runs from the bucket, with a role that may read just that. Sources: the service models of botocore
1.44.5; docs/deploy-ec2.md tells what is made.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any, Final, Literal
from urllib.parse import urlencode

from gateway import __version__
from gateway.config import Config
from gateway.deploying.calls import Answered, Call, FromFile, Until
from gateway.deploying.machine_data import HOME, SECRETS, Sent, Setup, told
from gateway.deploying.preflight import Device
from gateway.deploying.sagemaker import TAG_BY, TAG_NAME
from gateway.deploying.systemd_unit import UNIT, unit

Architecture = Literal["amd64", "arm64"]

PROGRAM: Final = f"{HOME}/environment/bin/gateway"
PACKAGE: Final = "model.tar.gz"
READY: Final = "gateway-setup: ready"
FAILED: Final = "gateway-setup: failed"
TAG_BUCKET: Final = "serving-gateway:bucket"
TAG_REGION: Final = "serving-gateway:region"  # of the machine: roles and instance profiles have none of their own
PREFIX: Final = "serving-gateway-ec2"  # of keys in the bucket
AGENT_POLICY: Final = "AmazonSSMManagedInstanceCore"  # of AWS's own, for sessions
NEURON_LIBRARIES: Final = "/opt/aws_neuronx_venv_pytorch_2_9/lib/python3.12/site-packages"  # as docker/Dockerfile's base has it
ROOT_DEVICE: Final = "/dev/sda1"  # of all of these images, which are Ubuntu 24.04
_DIGEST_CHARS: Final = 12

_STATE: Final = "Reservations.0.Instances.0.State.Name"
_REASON: Final = "Reservations.0.Instances.0.StateReason.Message"
_NO_INSTANCE, _NO_GROUP, _NO_ENTITY = "InvalidInstanceID.NotFound", "InvalidGroup.NotFound", "NoSuchEntity"
"""What EC2 and IAM may answer for some seconds of what they have just made."""
_RUNNING: Final = Until(_STATE, ("running",), ("shutting-down", "terminated", "stopping", "stopped"), _REASON, most_s=600)
_ENDED: Final = Until(_STATE, ("terminated",), most_s=600)
_ANSWERING: Final = Until("Output", (READY,), (FAILED,), "Output", within=True, most_s=1800)

METADATA_OPTIONS: Final = {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1}  # IMDSv2
IMAGES: Final[Mapping[tuple[Device, Architecture], str]] = {
    ("cpu", "amd64"): "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
    ("cpu", "arm64"): "/aws/service/canonical/ubuntu/server/24.04/stable/current/arm64/hvm/ebs-gp3/ami-id",
    ("cuda", "amd64"): "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
    ("cuda", "arm64"): "/aws/service/deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
    ("neuron", "amd64"): "/aws/service/neuron/dlami/pytorch-2.9/ubuntu-24.04/latest/image_id",
}
"""Public parameters of AWS Systems Manager, which name the newest image.

Neuron's is the last with PyTorch 2.9, of SDK 2.31: from 2.32 on AWS publishes none (Neuron's release notes, 2.32.0).
"""
_PARTITIONS: Final = {  # as botocore's partitions.json has them
    "cn": "aws-cn",
    "eu-isoe": "aws-iso-e",
    "eusc-de": "aws-eusc",
    "us-gov": "aws-us-gov",
    "us-iso": "aws-iso",
    "us-isob": "aws-iso-b",
    "us-isof": "aws-iso-f",
}
VOLUME_GIB: Final[Mapping[Device, int]] = {"cpu": 30, "cuda": 150, "neuron": 150}  # of the others, the image has 100 by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is to run, and where.

    config: as it was read. package, wheel, lock: what it is made of. allow: who may reach the listeners; (): nobody but itself.
    secrets: names -> secretsmanager:NAME or ssm:NAME. profile: an instance profile that is there already; "": one is made.
    """

    name: str
    region: str
    subnet: str
    bucket: str
    instance_type: str
    architecture: Architecture
    device: Device
    config: Config
    package: Sent
    wheel: Sent
    lock: Sent
    on_ray: bool = False
    volume_gib: int
    allow: tuple[IPv4Network, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""
    spot: bool = False

    @property
    def called(self) -> str:
        return called(self.name)

    @property
    def sent(self) -> tuple[Sent, ...]:
        return self.package, self.wheel, self.lock

    @property
    def ports(self) -> tuple[int, ...]:
        server = self.config.server
        return tuple(port for port in (server.http_port, server.grpc_port) if port is not None)

    def key(self, file: Sent) -> str:
        """Of a file in the bucket: another for another content."""
        return f"{PREFIX}/{self.name}/{file.sha256[:_DIGEST_CHARS]}/{file.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """One machine, as EC2 is asked for it. image: a public parameter, of `IMAGES`. group: of security.

    ends: once it shuts itself down, it is terminated. token: asked for twice with the same one, it is started once.
    """

    instance_type: str
    image: str
    subnet: str
    group: str | Answered
    profile: str
    volume_gib: int
    spot: bool
    tags: Mapping[str, str]
    user_data: str
    ends: bool = False
    token: str = ""

    def parameters(self) -> dict[str, Any]:
        """Of run_instances."""
        volume = {"Encrypted": True, "VolumeType": "gp3", "VolumeSize": self.volume_gib, "DeleteOnTermination": True}
        tagged = ("instance", "volume", "network-interface", *(("spot-instances-request",) if self.spot else ()))
        return {
            "ImageId": f"resolve:ssm:{self.image}",
            "InstanceType": self.instance_type,
            "MinCount": 1,
            "MaxCount": 1,
            "SubnetId": self.subnet,
            "SecurityGroupIds": [self.group],
            "IamInstanceProfile": {"Name": self.profile},
            "MetadataOptions": dict(METADATA_OPTIONS),
            "BlockDeviceMappings": [{"DeviceName": ROOT_DEVICE, "Ebs": volume}],
            **({"InstanceMarketOptions": {"MarketType": "spot"}} if self.spot else {}),
            **({"InstanceInitiatedShutdownBehavior": "terminate"} if self.ends else {}),
            **({"ClientToken": self.token} if self.token else {}),
            "TagSpecifications": [{"ResourceType": kind, "Tags": listed(self.tags)} for kind in tagged],
            "UserData": self.user_data,
        }


def called(name: str) -> str:
    """What all that is made of a deployment is called."""
    return f"gateway-{name}"


def tags(machine: Machine) -> dict[str, str]:
    told = {TAG_BY: f"gateway {__version__}", TAG_BUCKET: machine.bucket, TAG_REGION: machine.region}
    return {"Name": machine.called, TAG_NAME: machine.name, **told}


def user_data(machine: Machine) -> str:
    """What cloud-init does on the machine, once. Raises: ConfigError, if it is too long."""
    host = "0.0.0.0" if machine.allow else "127.0.0.1"
    secrets = {name: f"{SECRETS}/{name}" for name in machine.secrets}
    return told(
        Setup(
            region=machine.region,
            bucket=machine.bucket,
            files={machine.key(file): file for file in machine.sent},
            package=machine.package.name,
            wheel=machine.wheel.name,
            locks=(machine.lock.name,),
            beside=beside_of(machine.device),
            secrets=machine.secrets,
            unit=UNIT,
            service=unit(
                machine.config,
                serving(host),
                secrets=secrets,
                devices=machine.device != "cpu",
                on_ray=machine.on_ray,
            ),
        )
    )


def serving(host: str) -> list[str]:
    """The command of a machine's gateway. host: where it listens."""
    return [PROGRAM, "serve", f"{HOME}/model", "--host", host]


def beside_of(device: Device) -> str:
    """Libraries that the image of a device brings."""
    return NEURON_LIBRARIES if device == "neuron" else ""


def creation(machine: Machine) -> list[Call]:
    """What makes it, where there is nothing of this name: else the first call fails that makes something.

    Raises: ConfigError.
    """
    return [*_security_group(machine), *_role(machine), *_uploads(machine), *_instance(machine)]


def _uploads(machine: Machine) -> Iterator[Call]:
    for what, file in (
        ("model's package", machine.package),
        ("gateway's wheel", machine.wheel),
        ("wheel's lock", machine.lock),
    ):
        place = {"Bucket": machine.bucket, "Key": machine.key(file)}
        put = {
            **place,
            "Body": FromFile(file.path, file.bytes),
            "ChecksumSHA256": base64.b64encode(bytes.fromhex(file.sha256)).decode(),
            "Tagging": urlencode({TAG_NAME: machine.name}),
        }
        undo = Call("s3", "delete_object", place, f"Remove the {what}")
        yield Call("s3", "put_object", put, f"Put the {what} into the bucket", undo=(undo,))


def _role(machine: Machine) -> Iterator[Call]:
    """A role that may read what it needs, and no more."""
    if machine.profile:
        return
    role, profile = {"RoleName": machine.called}, {"InstanceProfileName": machine.called}
    who = {"Effect": "Allow", "Principal": {"Service": f"ec2.{domain(machine.region)}"}, "Action": "sts:AssumeRole"}
    made = {**role, "AssumeRolePolicyDocument": policy([who]), "Tags": listed(tags(machine))}
    undo = Call("iam", "delete_role", role, "Remove the role")
    yield Call("iam", "create_role", made, "Make a role for the machine", undo=(undo,))
    read = {**role, "PolicyName": machine.called}
    undo = Call("iam", "delete_role_policy", read, "Take from the role what it may read")
    may_read = {**read, "PolicyDocument": readable(machine)}
    why = "Let it read what it runs, and nothing else"
    yield Call("iam", "put_role_policy", may_read, why, undo=(undo,), again=(_NO_ENTITY,))
    agent = {**role, "PolicyArn": f"arn:{partition(machine.region)}:iam::aws:policy/{AGENT_POLICY}"}
    undo = Call("iam", "detach_role_policy", agent, "Take sessions from the role")
    why = "Let AWS Systems Manager open sessions, in place of ssh"
    yield Call("iam", "attach_role_policy", agent, why, undo=(undo,), again=(_NO_ENTITY,))
    undo = Call("iam", "delete_instance_profile", profile, "Remove the instance profile")
    instance_profile = {**profile, "Tags": listed(tags(machine))}
    yield Call("iam", "create_instance_profile", instance_profile, "Make what hands the role to a machine", undo=(undo,))
    undo = Call("iam", "remove_role_from_instance_profile", {**profile, **role}, "Take the role out of the instance profile")
    both = {**profile, **role}
    yield Call("iam", "add_role_to_instance_profile", both, "Put the role into it", undo=(undo,), again=(_NO_ENTITY,))


def readable(machine: Machine) -> str:
    """A policy: what the machine's role must be allowed to read."""
    of, region = partition(machine.region), machine.region
    keys = [f"arn:{of}:s3:::{machine.bucket}/{machine.key(file)}" for file in machine.sent]
    found = [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": keys}]
    for kind, action, arn in (
        ("secretsmanager:", "secretsmanager:GetSecretValue", f"arn:{of}:secretsmanager:{region}:*:secret:{{}}-??????"),
        ("ssm:", "ssm:GetParameter", f"arn:{of}:ssm:{region}:*:parameter{{}}"),
    ):
        names = [source.removeprefix(kind) for source in machine.secrets.values() if source.startswith(kind)]
        if kind == "ssm:":  # whose ARNs have one slash before a name, whether it begins with one or not
            names = [name if name.startswith(("arn:", "/")) else f"/{name}" for name in names]
        if names:
            arns = [name if name.startswith("arn:") else arn.format(name) for name in names]
            found.append({"Effect": "Allow", "Action": action, "Resource": arns})
    return policy(found)


def _security_group(machine: Machine) -> Iterator[Call]:
    there = Until("Subnets.0.State", ("available",), most_s=60)
    yield Call("ec2", "describe_subnets", {"SubnetIds": [machine.subnet]}, "Learn which VPC the subnet is in", until=there)
    group = Answered("ec2.create_security_group", ("GroupId",))
    made = {
        "GroupName": machine.called,
        "Description": f"Of the gateway {machine.name}",
        "VpcId": Answered("ec2.describe_subnets", ("Subnets", 0, "VpcId")),
        "TagSpecifications": [{"ResourceType": "security-group", "Tags": listed(tags(machine))}],
    }
    why = "Remove the security group"
    undo = Call("ec2", "delete_security_group", {"GroupId": group}, why, again=("DependencyViolation", _NO_GROUP))
    why = "Make a security group: nobody reaches the machine"
    sought = Call("ec2", "describe_security_groups", {"Filters": _of_name(machine)}, "Look whether there is a security group")
    found = ("SecurityGroups", 0)
    yield Call("ec2", "create_security_group", made, why, undo=(undo,), sought=(sought, found))
    if machine.allow:
        ranges = [{"CidrIp": str(network)} for network in machine.allow]
        rules = [{"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": ranges} for port in machine.ports]
        why = f"Let {', '.join(map(str, machine.allow))} reach the gateway's ports, and no others"
        asked = {"GroupId": group, "IpPermissions": rules}
        undo = Call("ec2", "revoke_security_group_ingress", asked, "Let nobody reach it")
        yield Call("ec2", "authorize_security_group_ingress", asked, why, undo=(undo,), again=(_NO_GROUP,))


def _instance(machine: Machine) -> Iterator[Call]:
    rented = Rented(
        instance_type=machine.instance_type,
        image=IMAGES[machine.device, machine.architecture],
        subnet=machine.subnet,
        group=Answered("ec2.create_security_group", ("GroupId",)),
        profile=machine.profile or machine.called,
        volume_gib=machine.volume_gib,
        spot=machine.spot,
        tags=tags(machine),
        user_data=user_data(machine),
    )
    started = rented.parameters()
    number = Answered("ec2.run_instances", ("Instances", 0, "InstanceId"))
    asked = {"InstanceIds": [number]}
    undo = ended(number, "End the machine")
    # EC2 learns of an instance profile some seconds after IAM has it.
    again = (_NO_GROUP,) if machine.profile else (_NO_GROUP, "InvalidParameterValue")
    living = {"Filters": [*_of_name(machine), {"Name": "instance-state-name", "Values": ["pending", "running"]}]}
    sought = Call("ec2", "describe_instances", living, "Look whether there is a machine"), ("Reservations", 0)
    why = "Start the machine: from here on it costs"
    yield Call("ec2", "run_instances", started, why, undo=undo, again=again, sought=sought)
    yield Call("ec2", "describe_instances", asked, "Wait for the machine", until=_RUNNING, again=(_NO_INSTANCE,))
    why, console = "Wait until the gateway answers, which its console says", {"InstanceId": number, "Latest": True}
    yield Call("ec2", "get_console_output", console, why, until=_ANSWERING, again=(_NO_INSTANCE,))


def _of_name(machine: Machine) -> list[dict[str, Any]]:
    """What has its tag, as EC2 filters: there was nothing of this name before."""
    return [{"Name": f"tag:{TAG_NAME}", "Values": [machine.name]}]


def ended(number: str | Answered, why: str) -> tuple[Call, Call]:
    """The calls that end a machine. One that is not known yet is asked for again: it would run on, and cost."""
    asked = {"InstanceIds": [number]}
    return (
        Call("ec2", "terminate_instances", asked, why, again=(_NO_INSTANCE,)),
        Call("ec2", "describe_instances", asked, "Wait until it has ended", until=_ENDED, again=(_NO_INSTANCE,)),
    )


def listed(tagged: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tagged.items()]


def policy(statements: list[dict[str, Any]]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def partition(region: str) -> str:
    return _PARTITIONS.get(region.rsplit("-", 2)[0], "aws")


def domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
