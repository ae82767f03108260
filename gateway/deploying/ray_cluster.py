"""A Ray cluster of unlike machines on EC2, as `ray up` reads it: a head that listens, and machines for each backend's replicas.

Spare capacity (spot) is asked for first: each backend has two kinds of node that differ in that alone, and Ray's autoscaler
takes the one of higher priority until EC2 could not give it. That is its second version, which the head is told to use.
Sources: ray-schema.json, autoscaler/v2/scheduler.py and autoscaler/_private/aws of Ray 2.60.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.deploying.contents import Contents, as_yaml
from gateway.deploying.ec2 import IMAGES, METADATA_OPTIONS, NEURON_LIBRARIES, ROOT_DEVICE, VOLUME_GIB
from gateway.deploying.machine_data import setup_program
from gateway.deploying.needs import GIB, Needs, needs_low_port
from gateway.deploying.preflight import NEURON, Device, device_of
from gateway.deploying.ray_groups import (
    GCS_PORT,
    HEAD,
    LISTENS,
    ReplicaGroup,
    application,
    ingress_needs,
    offered,
    offered_to_ingress,
    replica_groups,
    room_for_two,
)
from gateway.errors import ConfigError
from gateway.instances.facts import InstanceType, InstanceTypes

_SPOT, _ON_DEMAND = "-spot", "-on-demand"
USER: Final = "ubuntu"  # of all of these images
HOME: Final = f"/home/{USER}/gateway"
MODEL: Final = f"{HOME}/model"
_PROGRAMS: Final = f"{HOME}/environment/bin"
_TYPE_OF: Final = "accelerator_type:"  # how Ray calls a kind of GPU as a resource
_TOKEN: Final = ".ray/auth_token"
_BURSTS: Final = re.compile(r"t\d")  # families that are slower once their credits are used up
_IDLE_MINUTES: Final = 5
_ENVIRONMENT: Final = "export RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0"
_DEPLOYED_WITHIN_S: Final = 300


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Machines of one kind. replicas: whose it is; None: they listen. least, most: of them, beside the head."""

    name: str
    instance_type: str
    needs: Needs
    least: int
    most: int
    replicas: ReplicaGroup | None = None

    @property
    def device(self) -> Device:
        return device_of(self.needs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOnEc2:
    """What is to run, and where. folder: here, with the files that every machine gets. profile: of the head; "": Ray makes one.

    wheel: its name in the folder.
    """

    name: str
    region: str
    subnets: tuple[str, ...]
    security_group: str
    folder: str
    wheel: str
    groups: tuple[NodeGroup, ...]
    profile: str = ""


def groups(held: Contents, chosen: Mapping[str, str], types: InstanceTypes, memory_bytes: int | None) -> tuple[NodeGroup, ...]:
    """The head's first. chosen: group -> instance type; the others get the cheapest that does. Raises: ConfigError."""
    needs = ingress_needs(held, memory_bytes)
    needs = Needs(needs.cores + HEAD.cores, needs.memory_bytes + HEAD.memory_bytes, needs.gpus, needs.neuron_cores)
    beside = held.config.server.ingresses - 1
    replicas = replica_groups(held, memory_bytes)
    if unknown := [name for name in chosen if name not in {LISTENS, *(group.name for group in replicas)}]:
        known = ", ".join((LISTENS, *(group.name for group in replicas)))
        raise ConfigError(f"--node: {', '.join(unknown)}: expected one of {known}")
    note = room_for_two(held.config, memory_bytes)
    found = [NodeGroup(LISTENS, _type(LISTENS, needs, "", chosen, types, note), needs, beside, beside)]
    for group in replicas:
        kind = next((key.removeprefix(_TYPE_OF) for key in group.stated if key.startswith(_TYPE_OF)), "")
        name = _type(group.name, group.needs, kind, chosen, types)
        found.append(NodeGroup(group.name, name, group.needs, group.least, group.most, group))
    return tuple(found)


def kinds_on(device: Device, held: Contents, groups: Iterable[NodeGroup]) -> set[str]:
    """Kinds of the backends that run on machines of this device: what is embedded on those that listen, else a replica's."""
    found: set[str] = set()
    for group in groups:
        if group.device == device and group.replicas is not None:
            found.add(group.replicas.backend.kind)
        elif group.device == device:
            found |= {each.kind for model in held.config.models for each in model.backends if each.placement == "embedded"}
    return found


def _type(name: str, needs: Needs, kind: str, chosen: Mapping[str, str], types: InstanceTypes, note: str = "") -> str:
    """kind: of the accelerator; "": any. note: told of what is needed where that is not had."""
    if (given := chosen.get(name)) is not None:
        if given not in types.instances or not fits(types.instances[given], needs, kind):
            raise ConfigError(f"--node: {name}={given}: expected a type of the catalogue with {_told(needs, kind)}{note}")
        return given
    fitting = {
        other: there.prices["ec2"].usd_per_hour
        for other, there in types.instances.items()
        if "ec2" in there.prices and fits(there, needs, kind) and not _BURSTS.match(other)
    }
    if not fitting:
        raise ConfigError(f"--node: {name}: no type of the catalogue has {_told(needs, kind)}{note}: name one, {name}=TYPE")
    return min(fitting, key=lambda other: (fitting[other], other))


def fits(there: InstanceType, needs: Needs, kind: str) -> bool:
    """Whether it has just what is needed: no accelerator for nothing. All machines of a cluster are amd64, as the locks are."""
    found = there.accelerator
    if there.architecture != "amd64" or there.vcpu < needs.cores or there.memory_gib * GIB < needs.memory_bytes:
        return False
    if needs.neuron_cores:
        return found is not None and found.name in NEURON and (found.cores or 0) >= needs.neuron_cores
    if needs.gpus:
        return found is not None and found.vendor == "nvidia" and found.count >= needs.gpus and kind.lower() in ("", found.name)
    return found is None


def _told(needs: Needs, kind: str) -> str:
    devices = f", {needs.gpus} × {kind or 'NVIDIA'}" if needs.gpus else ""
    devices += f", {needs.neuron_cores} NeuronCores of Inferentia2 or Trainium" if needs.neuron_cores else ""
    return f"{needs.cores} cores of amd64, {needs.memory_bytes / GIB:.3g} GiB{devices}"


def cluster(held: Contents, asked: RayOnEc2) -> dict[str, Any]:
    """For `ray up`."""
    head, *rest = asked.groups
    kinds = {"head": _node(held, asked, head, 0, 0)}
    if asked.profile:
        kinds["head"]["node_config"]["IamInstanceProfile"] = {"Name": asked.profile}
    if head.least:
        kinds[LISTENS] = _node(held, asked, head, head.least, head.most)
    for group in rest:
        # Their replicas ask for them: what was asked for in advance would not be had elsewhere where EC2 cannot give it.
        spot = _node(held, asked, group, 0, group.most)
        spot["node_config"]["InstanceMarketOptions"] = {"MarketType": "spot"}
        kinds[f"{group.name}{_SPOT}"] = spot | {"priority": 1}
        kinds[f"{group.name}{_ON_DEMAND}"] = _node(held, asked, group, 0, group.most) | {"priority": 0}
    return {
        "cluster_name": asked.name,
        "max_workers": sum(group.most for group in asked.groups),
        "idle_timeout_minutes": _IDLE_MINUTES,
        "provider": {"type": "aws", "region": asked.region, "cache_stopped_nodes": False},
        "auth": {"ssh_user": USER},
        "head_node_type": "head",
        "available_node_types": kinds,
        "file_mounts": {HOME: asked.folder, f"/home/{USER}/{_TOKEN}": f"~/{_TOKEN}"},
        "initialization_commands": [
            "cloud-init status --wait >/dev/null || true",
            "dpkg --status python3-venv >/dev/null 2>&1"
            " || (sudo apt-get update -qq && sudo apt-get install --yes -qq python3-venv)",
            *(["sudo sysctl -q net.ipv4.ip_unprivileged_port_start=0"] if needs_low_port(held.config) else []),
        ],
        "setup_commands": [],
        "head_setup_commands": [_installed(head), f"{_PROGRAMS}/python -m pip install --quiet 'boto3>=1.40'"],
        "worker_setup_commands": [],
        "head_start_ray_commands": [
            f"{_PROGRAMS}/ray stop",
            f"ulimit -n 65536; {_ENVIRONMENT} RAY_enable_autoscaler_v2=1; {_PROGRAMS}/ray start --head --port={GCS_PORT}"
            " --dashboard-host=127.0.0.1 --autoscaling-config=~/ray_bootstrap_config.yaml",
            f"{_ENVIRONMENT}; timeout {_DEPLOYED_WITHIN_S} sh -c"
            f" 'until {_PROGRAMS}/serve deploy {HOME}/serve.yaml; do sleep 5; done'",
        ],
        "worker_start_ray_commands": [
            f"{_PROGRAMS}/ray stop",
            f"ulimit -n 65536; {_ENVIRONMENT}; {_PROGRAMS}/ray start --address=$RAY_HEAD_IP:{GCS_PORT}",
        ],
    }


def _node(held: Contents, asked: RayOnEc2, group: NodeGroup, least: int, most: int) -> dict[str, Any]:
    volume = {"Encrypted": True, "VolumeType": "gp3", "VolumeSize": VOLUME_GIB[group.device]}
    return {
        "resources": _resources(held, group),
        "min_workers": least,
        "max_workers": most,
        "node_config": {
            "InstanceType": group.instance_type,
            "ImageId": f"resolve:ssm:{IMAGES[group.device, 'amd64']}",
            "SubnetIds": [*asked.subnets],
            "SecurityGroupIds": [asked.security_group],
            "MetadataOptions": dict(METADATA_OPTIONS),
            "BlockDeviceMappings": [{"DeviceName": ROOT_DEVICE, "Ebs": volume}],
        },
        "worker_setup_commands": [_installed(group)],
    }


def _resources(held: Contents, group: NodeGroup) -> dict[str, int]:
    """What Ray has of it."""
    devices = {key: n for key, n in (("GPU", group.needs.gpus), ("neuron_cores", group.needs.neuron_cores)) if n}
    if group.replicas is not None:
        stated = group.replicas.stated
        return {"CPU": math.ceil(stated["num_cpus"]), **devices, **offered(stated)}
    return {"CPU": 0, **devices, **offered_to_ingress(held.config)}


def _installed(group: NodeGroup) -> str:
    return f"python3 {HOME}/machine_setup.py {HOME}/{settings_of(group.device)}"


def settings_of(device: Device) -> str:
    return f"settings-{device}.json"


def lock_of(device: Device) -> str:
    return f"requirements-{device}.lock"


def texts(held: Contents, asked: RayOnEc2) -> Iterator[tuple[str, str]]:
    """Files that are written beside the wheel, the locks and the package, by name."""
    yield "machine_setup.py", setup_program()
    yield "serve.yaml", as_yaml(application(held, held.config.server.ingresses))
    for device in sorted({group.device for group in asked.groups}):
        settings = {
            "home": HOME,
            "region": asked.region,
            "bucket": "",
            "files": [],
            "package": "model.tar.gz",
            "wheel": asked.wheel,
            "locks": [lock_of(device)],
            "python": "/usr/bin/python3",
            "beside": NEURON_LIBRARIES if device == "neuron" else "",
            "secrets": {},
            "secrets_in": f"{HOME}/secrets",
            "unit": "",
        }
        yield settings_of(device), json.dumps(settings, indent=1) + "\n"
