"""The calls that make one machine on EC2 a gateway, and the user data by which it makes itself one. Pure: nobody is asked.

Everything is called gateway-NAME, and has the tags of `tags`: a second one of a name is refused by EC2 and IAM themselves.
Nobody logs in by ssh, and no port is open unless --allow opens the gateway's own: AWS Systems Manager's sessions reach the
machine. It gets what it runs from the bucket, with a role that may read just that. Sources: the service models of botocore
1.44.5; docs/deploy-ec2.md tells what is made.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlencode

from gateway import __version__
from gateway.config import Config
from gateway.deploying.calls import Answered, Call, FromFile, Until
from gateway.deploying.contents import as_yaml
from gateway.deploying.preflight import Device
from gateway.deploying.sagemaker import TAG_BY, TAG_NAME
from gateway.deploying.systemd_unit import UNIT, unit
from gateway.errors import ConfigError

Architecture = Literal["amd64", "arm64"]

HOME: Final = "/opt/gateway"
SECRETS: Final = "/etc/gateway/secrets"
PROGRAM: Final = f"{HOME}/environment/bin/gateway"
PACKAGE: Final = "model.tar.gz"
READY: Final = "gateway-setup: ready"
FAILED: Final = "gateway-setup: failed"
TAG_BUCKET: Final = "serving-gateway:bucket"
PREFIX: Final = "serving-gateway-ec2"  # of keys in the bucket
_SETUP: Final = "/usr/local/lib/gateway-setup"
_MOST_USER_DATA_BYTES: Final = 16384  # of EC2, before it is encoded
AGENT_POLICY: Final = "AmazonSSMManagedInstanceCore"  # of AWS's own, for sessions
NEURON_LIBRARIES: Final = "/opt/aws_neuronx_venv_pytorch_2_9/lib/python3.12/site-packages"  # as docker/Dockerfile's base has it
ROOT_DEVICE: Final = "/dev/sda1"  # of all of these images, which are Ubuntu 24.04
_DIGEST_CHARS: Final = 12

_STATE: Final = "Reservations.0.Instances.0.State.Name"
_REASON: Final = "Reservations.0.Instances.0.StateReason.Message"
_RUNNING: Final = Until(_STATE, ("running",), ("shutting-down", "terminated", "stopping", "stopped"), _REASON, most_s=600)
ENDED: Final = Until(_STATE, ("terminated",), most_s=600)
_ANSWERING: Final = Until("Output", (READY,), (FAILED,), "Output", within=True, most_s=1800)

METADATA_OPTIONS: Final = {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1}  # IMDSv2
IMAGES: Final[Mapping[tuple[Device, Architecture], str]] = {
    ("cpu", "amd64"): "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
    ("cpu", "arm64"): "/aws/service/canonical/ubuntu/server/24.04/stable/current/arm64/hvm/ebs-gp3/ami-id",
    ("cuda", "amd64"): "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
    ("cuda", "arm64"): "/aws/service/deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
    ("neuron", "amd64"): "/aws/service/neuron/dlami/pytorch-2.9/ubuntu-24.04/latest/image_id",
}
"""Public parameters of AWS Systems Manager, which always name the newest image."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A file that is put into the bucket, and from there onto the machine. name: there. sha256: in hexadecimal."""

    path: Path
    name: str
    bytes: int
    sha256: str


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


def called(name: str) -> str:
    """What all that is made of a deployment is called."""
    return f"gateway-{name}"


def tags(machine: Machine) -> dict[str, str]:
    told = {TAG_BY: f"gateway {__version__}", TAG_BUCKET: machine.bucket}
    return {"Name": machine.called, TAG_NAME: machine.name, **told}


def setup_program() -> str:
    return (files("gateway.deploying") / "machine_setup.py").read_text(encoding="utf-8")


def user_data(machine: Machine) -> str:
    """What cloud-init does on the machine, once: a document that holds no secret. Raises: ConfigError, if it is too long."""
    settings = {
        "home": HOME,
        "region": machine.region,
        "bucket": machine.bucket,
        "files": [{"name": file.name, "key": machine.key(file), "sha256": file.sha256} for file in machine.sent],
        "package": machine.package.name,
        "wheel": machine.wheel.name,
        "lock": machine.lock.name,
        "python": "/usr/bin/python3",
        "beside": NEURON_LIBRARIES if machine.device == "neuron" else "",
        "secrets": dict(machine.secrets),
        "secrets_in": SECRETS,
        "unit": UNIT,
    }
    host = "0.0.0.0" if machine.allow else "127.0.0.1"
    service = unit(
        machine.config,
        [PROGRAM, "serve", f"{HOME}/model", "--host", host],
        secrets={name: f"{SECRETS}/{name}" for name in machine.secrets},
        devices=machine.device != "cpu",
        on_ray=machine.on_ray,
    )
    document = {
        "package_update": True,
        "packages": ["python3-venv"],
        "write_files": [
            {"path": f"/etc/systemd/system/{UNIT}", "content": service, "permissions": "0644"},
            {"path": f"{_SETUP}/settings.json", "content": json.dumps(settings, indent=1), "permissions": "0644"},
            {"path": f"{_SETUP}/machine_setup.py", "content": setup_program(), "permissions": "0755"},
        ],
        "runcmd": [["/usr/bin/python3", f"{_SETUP}/machine_setup.py", f"{_SETUP}/settings.json"]],
    }
    text = f"#cloud-config\n{as_yaml(document)}"
    if (size := len(text.encode())) > _MOST_USER_DATA_BYTES:
        expected = f"{_MOST_USER_DATA_BYTES} at most, as EC2 takes it: give shorter names"
        raise ConfigError(f"user data: {size} bytes: expected {expected}")
    return text


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
    who = {"Effect": "Allow", "Principal": {"Service": f"ec2.{_domain(machine.region)}"}, "Action": "sts:AssumeRole"}
    made = {**role, "AssumeRolePolicyDocument": _policy([who]), "Tags": _listed(tags(machine))}
    undo = Call("iam", "delete_role", role, "Remove the role")
    yield Call("iam", "create_role", made, "Make a role for the machine", undo=(undo,))
    read = {**role, "PolicyName": machine.called}
    undo = Call("iam", "delete_role_policy", read, "Take from the role what it may read")
    readable = {**read, "PolicyDocument": _policy(_readable(machine))}
    yield Call("iam", "put_role_policy", readable, "Let it read what it runs, and nothing else", undo=(undo,))
    agent = {**role, "PolicyArn": f"arn:{partition(machine.region)}:iam::aws:policy/{AGENT_POLICY}"}
    undo = Call("iam", "detach_role_policy", agent, "Take sessions from the role")
    yield Call("iam", "attach_role_policy", agent, "Let AWS Systems Manager open sessions, in place of ssh", undo=(undo,))
    undo = Call("iam", "delete_instance_profile", profile, "Remove the instance profile")
    instance_profile = {**profile, "Tags": _listed(tags(machine))}
    yield Call("iam", "create_instance_profile", instance_profile, "Make what hands the role to a machine", undo=(undo,))
    undo = Call("iam", "remove_role_from_instance_profile", {**profile, **role}, "Take the role out of the instance profile")
    yield Call("iam", "add_role_to_instance_profile", {**profile, **role}, "Put the role into it", undo=(undo,))


def _readable(machine: Machine) -> list[dict[str, Any]]:
    of, region = partition(machine.region), machine.region
    keys = [f"arn:{of}:s3:::{machine.bucket}/{machine.key(file)}" for file in machine.sent]
    found = [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": keys}]
    for kind, action, arn in (
        ("secretsmanager:", "secretsmanager:GetSecretValue", f"arn:{of}:secretsmanager:{region}:*:secret:{{}}-??????"),
        ("ssm:", "ssm:GetParameter", f"arn:{of}:ssm:{region}:*:parameter/{{}}"),
    ):
        names = [source.removeprefix(kind) for source in machine.secrets.values() if source.startswith(kind)]
        if names:
            arns = [name if name.startswith("arn:") else arn.format(name.removeprefix("/")) for name in names]
            found.append({"Effect": "Allow", "Action": action, "Resource": arns})
    return found


def _security_group(machine: Machine) -> Iterator[Call]:
    there = Until("Subnets.0.State", ("available",), most_s=60)
    yield Call("ec2", "describe_subnets", {"SubnetIds": [machine.subnet]}, "Learn which VPC the subnet is in", until=there)
    group = Answered("ec2.create_security_group", ("GroupId",))
    made = {
        "GroupName": machine.called,
        "Description": f"Of the gateway {machine.name}",
        "VpcId": Answered("ec2.describe_subnets", ("Subnets", 0, "VpcId")),
        "TagSpecifications": [_tagged("security-group", machine)],
    }
    why = "Remove the security group"
    undo = Call("ec2", "delete_security_group", {"GroupId": group}, why, again=("DependencyViolation",))
    yield Call("ec2", "create_security_group", made, "Make a security group: nobody reaches the machine", undo=(undo,))
    if machine.allow:
        ranges = [{"CidrIp": str(network)} for network in machine.allow]
        rules = [{"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": ranges} for port in machine.ports]
        why = f"Let {', '.join(map(str, machine.allow))} reach the gateway's ports, and no others"
        asked = {"GroupId": group, "IpPermissions": rules}
        undo = Call("ec2", "revoke_security_group_ingress", asked, "Let nobody reach it")
        yield Call("ec2", "authorize_security_group_ingress", asked, why, undo=(undo,))


def _instance(machine: Machine) -> Iterator[Call]:
    volume = {"Encrypted": True, "VolumeType": "gp3", "VolumeSize": machine.volume_gib, "DeleteOnTermination": True}
    started = {
        "ImageId": f"resolve:ssm:{IMAGES[machine.device, machine.architecture]}",
        "InstanceType": machine.instance_type,
        "MinCount": 1,
        "MaxCount": 1,
        "SubnetId": machine.subnet,
        "SecurityGroupIds": [Answered("ec2.create_security_group", ("GroupId",))],
        "IamInstanceProfile": {"Name": machine.profile or machine.called},
        "MetadataOptions": dict(METADATA_OPTIONS),
        "BlockDeviceMappings": [{"DeviceName": ROOT_DEVICE, "Ebs": volume}],
        **({"InstanceMarketOptions": {"MarketType": "spot"}} if machine.spot else {}),
        "TagSpecifications": [_tagged(kind, machine) for kind in ("instance", "volume", "network-interface")],
        "UserData": user_data(machine),
    }
    number = Answered("ec2.run_instances", ("Instances", 0, "InstanceId"))
    asked = {"InstanceIds": [number]}
    undo = (
        Call("ec2", "terminate_instances", asked, "End the machine"),
        Call("ec2", "describe_instances", asked, "Wait until it has ended", until=ENDED),
    )
    # EC2 learns of an instance profile some seconds after IAM has it.
    again = () if machine.profile else ("InvalidParameterValue",)
    yield Call("ec2", "run_instances", started, "Start the machine: from here on it costs", undo=undo, again=again)
    yield Call("ec2", "describe_instances", asked, "Wait for the machine", until=_RUNNING)
    why = "Wait until the gateway answers, which its console says"
    yield Call("ec2", "get_console_output", {"InstanceId": number, "Latest": True}, why, until=_ANSWERING)


def _tagged(kind: str, machine: Machine) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": _listed(tags(machine))}


def _listed(tagged: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tagged.items()]


def _policy(statements: list[dict[str, Any]]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def partition(region: str) -> str:
    return {"cn": "aws-cn", "us-gov": "aws-us-gov"}.get(region.rsplit("-", 2)[0], "aws")


def _domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


def sent(path: Path, name: str) -> Sent:
    """Raises: OSError."""
    with path.open("rb") as file:
        return Sent(path, name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
