"""What a search makes on EC2: a machine for each candidate, one that loads them all, and what these share. Pure.

The shared: a security group whose members reach each other at the gateway's ports, and whom nobody else reaches; a role that
reads and writes below one prefix of the bucket, unless an instance profile was named; wheel and locks in the bucket. Machines
are what `gateway deploy ec2` makes of a configuration: the same images, user data and service; each ends itself at the
search's expiry, whoever is left. Names begin with loadtest-RUN, and everything has the tags of `Run.tags_of`.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from gateway.config import Config
from gateway.deploying.calls import FromFile
from gateway.deploying.ec2 import (
    IMAGES,
    VOLUME_GIB,
    Architecture,
    Rented,
    beside_of,
    domain,
    listed,
    partition,
    policy,
    serving,
)
from gateway.deploying.machine_data import HOME, Sent, Setup, told
from gateway.deploying.preflight import Device
from gateway.deploying.sagemaker import PREFIX as KEYS
from gateway.deploying.systemd_unit import PROTECTED, STATE, UNIT, unit, word
from loadtest.lab.launchers.aws.endpoints import OURS, PATH, Run
from loadtest.lab.launchers.aws.post import Post
from loadtest.lab.launchers.launcher import GENERATOR

HTTP_PORT: Final = 8000
GRPC_PORT: Final = 8001
GENERATOR_UNIT: Final = "loadtest-generator.service"
_GENERATOR_VOLUME_GIB: Final = 20


@dataclass(frozen=True, slots=True)
class Kit:
    """What every machine installs. locks: by what they are for: a device, or `aws`."""

    wheel: Sent
    locks: Mapping[str, Sent]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a search makes its machines. profile: an instance profile that is there already; "": one is made."""

    run: Run
    region: str
    subnet: str
    bucket: str
    kit: Kit
    profile: str = ""

    @property
    def name(self) -> str:
        """Of what is shared."""
        return f"{OURS}{self.run.id}"

    @property
    def base(self) -> str:
        """Of all keys in the bucket."""
        return f"{KEYS}/{self.name}-ec2"

    @property
    def post(self) -> Post:
        return Post(self.bucket, self.base)

    @property
    def used_profile(self) -> str:
        return self.profile or self.name

    def key(self, file: Sent) -> str:
        return self.post.file(file.sha256, file.name)

    def tagging(self, candidate: str) -> str:
        """As S3 takes tags."""
        return urlencode(self.run.tags_of(candidate))


def upload(site: Site, file: Sent, candidate: str) -> dict[str, Any]:
    """Of put_object."""
    return {
        "Bucket": site.bucket,
        "Key": site.key(file),
        "Body": FromFile(file.path, file.bytes),
        "ChecksumSHA256": base64.b64encode(bytes.fromhex(file.sha256)).decode(),
        "Tagging": site.tagging(candidate),
    }


def group(site: Site, vpc: str) -> dict[str, Any]:
    """Of create_security_group."""
    tagged = [{"ResourceType": "security-group", "Tags": listed({"Name": site.name, **site.run.tags_of("")})}]
    told = f"Of the load test {site.run.id}: its machines reach each other"
    return {"GroupName": site.name, "Description": told, "VpcId": vpc, "TagSpecifications": tagged}


def opened(group_id: str) -> dict[str, Any]:
    """Of authorize_security_group_ingress: for who is in the group itself."""
    ports = {"IpProtocol": "tcp", "FromPort": HTTP_PORT, "ToPort": GRPC_PORT}
    return {"GroupId": group_id, "IpPermissions": [{**ports, "UserIdGroupPairs": [{"GroupId": group_id}]}]}


def role(site: Site) -> list[tuple[str, dict[str, Any]]]:
    """Operations of IAM, in their order."""
    named, profile = {"RoleName": site.name}, {"InstanceProfileName": site.name}
    tags = listed(site.run.tags_of(""))
    who = {"Effect": "Allow", "Principal": {"Service": f"ec2.{domain(site.region)}"}, "Action": "sts:AssumeRole"}
    bucket = f"arn:{partition(site.region)}:s3:::{site.bucket}"
    ours = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject", "s3:PutObjectTagging"]}
    # Without it S3 does not tell that there is no such object, and the generator looks for jobs that are not there yet.
    listing = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": bucket}
    allowed = policy([{**ours, "Resource": f"{bucket}/{site.base}/*"}, listing])
    return [
        ("create_role", {**named, "Path": PATH, "AssumeRolePolicyDocument": policy([who]), "Tags": tags}),
        ("put_role_policy", {**named, "PolicyName": site.name, "PolicyDocument": allowed}),
        ("create_instance_profile", {**profile, "Path": PATH, "Tags": tags}),
        ("add_role_to_instance_profile", {**profile, **named}),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A candidate's machine. package: of its configuration. config: as it stands on the machine."""

    name: str
    candidate: str
    instance_type: str
    architecture: Architecture
    device: Device
    config: Config
    package: Sent
    spot: bool


def candidate_machine(site: Site, wanted: Wanted, *, group_id: str, lasts_s: float) -> dict[str, Any]:
    """Of run_instances. lasts_s: it ends itself then. Raises: ConfigError."""
    service = unit(wanted.config, serving("0.0.0.0"), secrets={}, devices=wanted.device != "cpu", on_ray=False)
    lock = site.kit.locks[wanted.device]
    setup = _setup(site, (wanted.package, site.kit.wheel, lock), UNIT, service, lasts_s)
    return Rented(
        instance_type=wanted.instance_type,
        image=IMAGES[wanted.device, wanted.architecture],
        subnet=site.subnet,
        group=group_id,
        profile=site.used_profile,
        volume_gib=VOLUME_GIB[wanted.device],
        spot=wanted.spot,
        tags={"Name": wanted.name, **site.run.tags_of(wanted.candidate)},
        user_data=told(Setup(**setup, locks=(lock.name,), package=wanted.package.name, beside=beside_of(wanted.device))),
        ends=True,
        token=wanted.name,
    ).parameters()


def generator_machine(
    site: Site, instance_type: str, architecture: Architecture, *, group_id: str, lasts_s: float
) -> dict[str, Any]:
    """Of run_instances. On demand: what measures must not be taken back."""
    locks = (site.kit.locks["cpu"], site.kit.locks["aws"])
    name = f"{site.name}-{GENERATOR}"
    setup = _setup(site, (site.kit.wheel, *locks), GENERATOR_UNIT, generator_unit(site, lasts_s), lasts_s)
    return Rented(
        instance_type=instance_type,
        image=IMAGES["cpu", architecture],
        subnet=site.subnet,
        group=group_id,
        profile=site.used_profile,
        volume_gib=_GENERATOR_VOLUME_GIB,
        spot=False,
        tags={"Name": name, **site.run.tags_of(GENERATOR)},
        user_data=told(Setup(**setup, locks=tuple(lock.name for lock in locks))),
        ends=True,
        token=name,
    ).parameters()


def _setup(site: Site, files: tuple[Sent, ...], name: str, service: str, lasts_s: float) -> dict[str, Any]:
    return {
        "region": site.region,
        "bucket": site.bucket,
        "files": {site.key(file): file for file in files},
        "wheel": site.kit.wheel.name,
        "unit": name,
        "service": service,
        "lasts_s": lasts_s,
    }


def generator_unit(site: Site, lasts_s: float) -> str:
    """The service of the load generator: a user of its own, that may go before everything else while it sends."""
    command = [f"{HOME}/environment/bin/loadtest", "serve-jobs", "--region", site.region, "--bucket", site.bucket]
    command += ["--base", site.base, "--most-s", f"{lasts_s:.0f}", "--tagging", site.tagging(GENERATOR)]
    lines = [
        "[Unit]",
        "Description=Load generator of a search",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(map(word, command))}",
        f"Environment=HOME={STATE}",
        "Environment=PYTHONUNBUFFERED=1",
        "Restart=on-failure",
        "RestartSec=5",
        "LimitNOFILE=65536",
        "DynamicUser=yes",
        "StateDirectory=gateway",
        "CapabilityBoundingSet=CAP_SYS_NICE",
        "AmbientCapabilities=CAP_SYS_NICE",
        *PROTECTED,
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"
