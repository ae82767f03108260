"""The options of `gateway deploy ec2`: what they ask for, and all that is missing or does not do, told at once."""

import argparse
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final
from zipfile import is_zipfile

from gateway.commands.deploy_options import REGION, SUBNET, Options, named
from gateway.config import Config
from gateway.configuring.ingresses import decided
from gateway.configuring.need_of_ray import need_of_ray
from gateway.deploying.contents import artifact_sizes
from gateway.deploying.ec2 import IMAGES, VOLUME_GIB, Architecture, Machine
from gateway.deploying.machine_data import Sent, sent
from gateway.deploying.needs import Needs, of_all
from gateway.deploying.on_machine import lacking, required_by, secrets_of
from gateway.deploying.preflight import Device, device_of, of_machine
from gateway.documents.reader import Document
from gateway.instances.facts import SAGEMAKER, bundled

PAGE: Final = "docs/deploy-ec2.md"
_PROFILE: Final = re.compile(r"[\w+=,.@-]{1,128}", re.ASCII)
_WHEEL: Final = re.compile(r"serving_gateway-[\w.]+-py3-none-any\.whl", re.ASCII)
_SOURCE: Final = re.compile(r"(secretsmanager|ssm):[\w/+=.@:-]{1,512}", re.ASCII)
_LEAST_PREFIX: Final = 8  # of a network that may reach the machine: nobody has a larger one


def add_options(command: argparse.ArgumentParser) -> None:
    """None is required here: `wanted` says where to get what is missing."""
    command.add_argument("--name", help="of the deployment; as the first model is called")
    what = command.add_argument_group("what runs")
    what.add_argument(
        "--wheel", type=Path, metavar="FILE", help="of the gateway: `pip wheel --no-deps .` in its source makes it"
    )
    what.add_argument("--lock", type=Path, metavar="FILE", help="of the libraries beside it: docker/requirements-*.lock")
    what.add_argument("--bucket", help="of S3, where these and the models' package are put")
    what.add_argument("--memory", help="that all of it takes, such as 4Gi (as the files of its models need)")
    what.add_argument(
        "--secret",
        dest="secrets",
        metavar="NAME=SOURCE",
        action="append",
        default=[],
        help="tls.crt, tls.key, client-ca.crt or keys.yaml, from secretsmanager:NAME or ssm:NAME; the machine asks for it",
    )
    where = command.add_argument_group("where it runs")
    where.add_argument("--region", help="of AWS, such as us-east-1")
    where.add_argument("--instance-type", metavar="TYPE", help="such as c7i.xlarge")
    where.add_argument(
        "--subnet",
        dest="subnets",
        metavar="ID",
        action="append",
        default=[],
        help="of your VPC; it needs a way to the internet. With --cluster several: the next, where one has no capacity",
    )
    where.add_argument("--instance-profile", default="", metavar="NAME", help="one that is there already (one is made)")
    where.add_argument("--volume-gib", type=int, metavar="N", help="size of the disk (30; 150 with accelerators)")
    cluster = command.add_argument_group("a Ray cluster of unlike machines, in place of one machine")
    cluster.add_argument("--cluster", type=Path, metavar="DIR", help="write what `ray up` needs for one into this folder")
    cluster.add_argument("--security-group", metavar="ID", help="of all its machines, which must reach each other")
    cluster.add_argument(
        "--node",
        dest="nodes",
        metavar="GROUP=TYPE",
        action="append",
        default=[],
        help="the instance type of a group, such as ingress=c7i.xlarge (the cheapest that does)",
    )
    where.add_argument("--spot", action="store_true", help="spare capacity: cheaper, and taken back at two minutes' notice")
    where.add_argument(
        "--allow",
        metavar="CIDR",
        action="append",
        default=[],
        help="a network that may reach the gateway's ports, such as 10.0.0.0/16 (nobody: sessions forward them)",
    )


@dataclass(frozen=True, slots=True)
class WantedMachine:
    """machine: its package is still to be made. notes: what is to be known of it."""

    machine: Machine
    notes: tuple[str, ...]


def wanted(arguments: argparse.Namespace, document: Document, config: Config) -> WantedMachine:
    """Raises: ConfigError, with one line for each option that is missing or does not do; OSError."""
    looked = MachineOptions(arguments)
    machine = looked.machine(document, config)
    looked.check()
    return WantedMachine(machine, tuple(looked.notes))


class MachineOptions(Options):
    __slots__ = ()

    def machine(self, document: Document, config: Config) -> Machine:
        region = self.fits("--region", self.given.region, *REGION)
        needs = self._needs(document, config)
        device = device_of(needs)
        profile: str = self.given.instance_profile
        if profile:
            self.fits("--instance-profile", profile, _PROFILE, "the name of an instance profile")
        for flag, given in (("--security-group", self.given.security_group), ("--node", " ".join(self.given.nodes))):
            if given:
                self.faults.append(f"{flag}: {given}: expected none without --cluster: leave it out")
        name, architecture = self._type(needs, device)
        lock = self.lock((backend.kind for model in config.models for backend in model.backends), device)
        return Machine(
            name=named(self.given.name, config),
            region=region,
            subnet=self.subnets(1)[0],
            bucket=self.bucket(region),
            instance_type=name,
            architecture=architecture,
            device=device,
            config=config,
            package=Sent(Path(), "", 0, ""),
            wheel=self.wheel(),
            lock=lock,
            on_ray=bool(need_of_ray(config)[0]) or config.ray.address is not None,
            volume_gib=self._volume(device),
            allow=self._allowed(config),
            secrets=self._secrets(config),
            profile=profile,
            spot=self.given.spot,
        )

    def subnets(self, most: int) -> tuple[str, ...]:
        """At least one."""
        found: list[str | None] = self.given.subnets or [None]
        if len(found) > most:
            self.faults.append(f"--subnet: {len(found)} of them: expected {most}, for one machine: leave out the others")
        return tuple(self.fits("--subnet", each, *SUBNET) for each in found)

    def _needs(self, document: Document, config: Config) -> Needs:
        """Of all of it; memory_bytes is 0 where it cannot be told."""
        memory_bytes = self.memory_bytes()
        sizes = artifact_sizes(document)
        known = all(size is not None for each in sizes for size in each)
        if memory_bytes is None and not known:
            self.notes.append(
                "what code loads cannot be told: whether the machine has memory for it was not looked at (--memory)"
            )
        if (there := bundled().instances.get(self._bare_type())) is not None:
            config = decided(config, there.vcpu)
        return of_all(config, sizes, memory_bytes if memory_bytes is not None or known else 0)

    def _bare_type(self) -> str:
        return (self.given.instance_type or "").removeprefix(SAGEMAKER)

    def _type(self, needs: Needs, device: Device) -> tuple[str, Architecture]:
        types, name = bundled(), self._bare_type()
        if name not in types.instances:
            near = difflib.get_close_matches(name, types.instances, n=3, cutoff=0.5)
            expected = f"a type of the catalogue, such as {', '.join(near) or 'c7i.large'}"
            self.refuse("--instance-type", self.given.instance_type, expected, "`loadtest prices list` shows them")
            return name, "amd64"
        there = types.instances[name]
        self.faults += map(str, of_machine(name, there, needs, memory_given=self.given.memory is not None))
        if (device, there.architecture) not in IMAGES:
            self.faults.append(f"--instance-type: {name} is {there.architecture}: expected amd64, of which there is an image")
        if needs.cores > there.vcpu:
            self.notes.append(f"{name} has {there.vcpu} cores, and the sessions keep up to {needs.cores} busy")
        return name, there.architecture

    def wheel(self) -> Sent:
        path: Path | None = self.given.wheel
        if path is None or not _WHEEL.fullmatch(path.name) or not is_zipfile(path):
            self.refuse("--wheel", path, "the gateway's wheel", "`pip wheel --no-deps .` in its source makes it")
            return Sent(Path(), "", 0, "")
        return sent(path, path.name)

    def lock(self, kinds: Iterable[str], device: Device) -> Sent:
        """For machines of this device. kinds: of the backends that run there."""
        path: Path | None = self.given.lock
        if by_name := path is not None and path.is_dir():
            path /= f"requirements-{device}.lock"
        if path is None or not path.is_file():
            where = f"docker/requirements-{device}.lock in the gateway's source"
            self.refuse("--lock", path, "a file of libraries with their hashes", where)
            return Sent(Path(), "", 0, "")
        wheel: Path | None = self.given.wheel
        required = required_by(wheel) if wheel is not None and is_zipfile(wheel) else []
        for each in lacking(kinds, path.read_text(encoding="utf-8"), neuron=device == "neuron", required=required):
            of_it = replace(each, value=f"{path}: {each.value}", remedy="docker/locks.sh makes one of your own")
            self.faults.append(str(of_it if by_name else each))  # by its name, none of another device would do
        return sent(path, "requirements.lock")

    def _volume(self, device: Device) -> int:
        given: int | None = self.given.volume_gib
        least = VOLUME_GIB[device]
        if given is not None and given < least:
            self.faults.append(f"--volume-gib: {given}: expected {least} or more: the image, and what is installed")
        return least if given is None else given

    def _allowed(self, config: Config) -> tuple[IPv4Network, ...]:
        found = []
        for text in self.given.allow:
            try:
                network = IPv4Network(text)
            except ValueError as exc:
                self.faults.append(f"--allow: {text!r}: {exc}: expected a network of IPv4, such as 10.0.0.0/16")
                continue
            if network.prefixlen < _LEAST_PREFIX:
                expected = f"/{_LEAST_PREFIX} or narrower: for the world, put a load balancer in front of it"
                self.faults.append(f"--allow: {text}: open to the world: expected {expected}")
            found.append(network)
        if found and config.server.access is None:
            self.notes.append("whoever is in that network may ask anything: server.access asks for keys")
        if found and config.server.tls is None:
            self.notes.append("what is sent over that network is not encrypted: server.tls would")
        return tuple(dict.fromkeys(found))

    def _secrets(self, config: Config) -> dict[str, str]:
        found: dict[str, str] = {}
        needed = secrets_of(config)
        for text in self.given.secrets:
            name, _, source = text.partition("=")
            if name not in needed:
                expected = f"one of {', '.join(needed)}" if needed else "none: the configuration names no such file"
                self.faults.append(f"--secret: {name}: expected {expected}")
            elif not _SOURCE.fullmatch(source):
                self.faults.append(f"--secret: {text}: expected NAME=secretsmanager:NAME or NAME=ssm:NAME")
            found[name] = source
        for name, key in needed.items():
            if name not in found:
                keep = f"`aws secretsmanager create-secret --name {name} --secret-string file://{name}` keeps it"
                expected = f"{name}=secretsmanager:NAME or {name}=ssm:NAME, as {key} names a file"
                self.faults.append(f"--secret: {name}: not given: expected {expected}: {keep}")
        return found
