"""The same as `preflight`, of a machine of EC2. Pure: what is known comes as values, and what is not known refuses nobody."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gateway.config import Config, parse_config
from gateway.deploying.ec2 import IMAGES
from gateway.deploying.on_machine import lacking
from gateway.deploying.preflight import Device, bare
from gateway.instances.facts import InstanceType
from loadtest.prices.catalogue import Catalogue
from loadtest.question.candidates import CandidateSetup
from loadtest.question.preflight import Reason, device_of, of_accelerator, of_contract, of_memory, of_price, of_region
from loadtest.wording import counted

_BEFORE_TURING: Final = frozenset(("k80", "m60", "p100", "v100"))
"""What the open driver of NVIDIA does not run, which the image for GPUs brings.

Source: NVIDIA/open-gpu-kernel-modules, README: Turing and later.
"""
_ON_DEMAND: Final = re.compile(r"Running On-Demand (.+) instances")
_SPOT: Final = re.compile(r"All (.+) Spot Instance Requests")
_TYPE: Final = re.compile(r"([a-z]+)(\d*)")


@dataclass(frozen=True, slots=True)
class VcpuQuota:
    """How many vCPUs an account may have running, of some families. families: C, or P5: that generation alone."""

    name: str
    families: frozenset[str]
    vcpus: int
    used: int = 0

    def holds(self, instance_type: str) -> bool:
        letters, generation = _family(instance_type)
        return bool({letters, f"{letters}{generation}"} & self.families)


def vcpu_quotas(told: Mapping[str, float], *, spot: bool) -> list[VcpuQuota]:
    """Of EC2's quotas, by their names: those of machines on demand, or of spot requests."""
    found = []
    for name, value in told.items():
        if match := (_SPOT if spot else _ON_DEMAND).fullmatch(name):
            words = re.findall(r"[A-Za-z]+\d*", match[1])
            families = frozenset(word.upper() for word in words if word not in ("Standard", "and"))
            found.append(VcpuQuota(name, families, int(value)))
    return found


def _family(instance_type: str) -> tuple[str, str]:
    match = _TYPE.match(bare(instance_type))
    return (match[1].upper(), match[2]) if match else ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Where candidates are to run. zone: of their subnet; "": not known. offered: the types that are to be had there; quotas:
    of the account; None: could not be asked.

    locks: by device, what is installed. generator: the type beside them, which costs generator_usd_per_hour. least_s, max_usd:
    as in `preflight.Place`.
    """

    region: str
    zone: str = ""
    offered: frozenset[str] | None = None
    quotas: Sequence[VcpuQuota] | None = None
    locks: Mapping[str, str]
    spot: bool = False
    generator: str
    generator_usd_per_hour: float
    least_s: float = 0.0
    max_usd: float | None = None


class Share(NamedTuple):
    """Of a quota: the vCPUs that are left for candidates, and those that one of them takes."""

    quota: VcpuQuota
    left: int
    takes: int


def share_of(instance_type: str, catalogue: Catalogue, place: Machines) -> Share | None:
    """None: no quota is known. The generator is on demand, and takes its part of that one."""
    quota = next((each for each in place.quotas or () if each.holds(instance_type)), None)
    if quota is None:
        return None
    beside = 0 if place.spot or not quota.holds(place.generator) else catalogue.instance(place.generator).vcpu
    return Share(quota, quota.vcpus - quota.used - beside, catalogue.instance(instance_type).vcpu)


def machine_reasons(candidate: CandidateSetup, catalogue: Catalogue, place: Machines) -> tuple[Reason, ...]:
    """All that keeps a candidate from working on a machine of its own; none if nothing is known to."""
    config = parse_config(candidate.document, source=candidate.name)
    backend = config.models[0].backends[0]
    name = bare(candidate.instance_type)
    instance = catalogue.instance(name)
    device = device_of(backend)
    return (
        *of_region(catalogue, place.region),
        *of_contract(backend, "machine"),
        *of_accelerator(name, instance, config),
        *_image(name, instance, device),
        *_lock(config, device, place),
        *of_memory(name, instance, config, candidate.artifact_bytes),
        *_offer(name, place),
        *_quota(name, catalogue, place),
        *of_price(candidate, least_s=place.least_s, max_usd=place.max_usd, beside_usd_per_hour=place.generator_usd_per_hour),
    )


def _image(name: str, instance: InstanceType, device: Device) -> Iterable[Reason]:
    if (device, instance.architecture) not in IMAGES:
        there = ", ".join(f"{each} on {of}" for each, of in IMAGES)
        yield Reason("architecture", f"{device} on {instance.architecture}", f"one of {there}", "choose another type")
    accelerator = instance.accelerator
    if device == "cuda" and accelerator is not None and accelerator.name in _BEFORE_TURING:
        value = f"{name} has {accelerator.name}, which the open driver of the image does not run"
        yield Reason("driver", value, "Turing or later, such as g4dn, g5 or g6", "choose another type")


def _lock(config: Config, device: Device, place: Machines) -> Iterable[Reason]:
    name = f"requirements-{device}.lock"
    if device not in place.locks:
        yield Reason("launcher.locks", f"no {name}", f"it, of what is installed for {device}", "the gateway's source has it")
        return
    kinds = (backend.kind for model in config.models for backend in model.backends)
    for each in lacking(kinds, place.locks[device], neuron=device == "neuron"):
        yield Reason("launcher.locks", f"{name} {each.value}", each.expected, each.remedy)


def _offer(name: str, place: Machines) -> Iterable[Reason]:
    if place.offered is not None and name not in place.offered:
        where = f"in {place.zone}, where launcher.subnet is"
        yield Reason("instances", f"{name} is not offered {where}", "a type that is", "another subnet, or another type")


def _quota(name: str, catalogue: Catalogue, place: Machines) -> Iterable[Reason]:
    found = share_of(name, catalogue, place)
    if found is None or found.left >= found.takes:
        return
    quota = found.quota
    used = f", of which {quota.used} {'is' if quota.used == 1 else 'are'} used" if quota.used else ""
    beside = quota.vcpus - quota.used - found.left
    more = f", and {beside} of the load generator" if beside else ""
    expected = f"room for the {counted(found.takes, 'vCPU')} of {name}{more}"
    yield Reason("quota", f"{counted(quota.vcpus, 'vCPU')}{used}", expected, f"ask for more: Service Quotas, EC2, {quota.name}")
