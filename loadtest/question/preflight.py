"""Why a candidate cannot work where it is to be launched, told before it is paid for. Pure: what is known comes as values.

What is not known (a quota that nobody may ask, a model whose size shows when it is loaded) refuses nobody. A fault that every
candidate shares, such as a role that is missing, is the spec's, and no candidate's.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.config import Backend, Config, parse_config
from gateway.deploying import needs
from gateway.deploying.needs import GIB
from gateway.deploying.preflight import AMIS, NEURON, Device, bare, registry
from gateway.instances.facts import InstanceType
from loadtest.errors import UsageError
from loadtest.prices.catalogue import Catalogue
from loadtest.question.candidates import CandidateSetup
from loadtest.wording import counted, usd

_DRIVERS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("p3", "p4d", "p4de", "g4dn", "g5"), (11, 4)),
    **dict.fromkeys(("p5", "g6"), (12, 2)),
    **dict.fromkeys(("p5e", "p5en"), (12, 4)),
}
"""The CUDA that a family runs without an InferenceAmiVersion; others' is not stated.

Source: SageMaker's guide, inference-gpu-drivers.
"""


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that keeps a candidate from working. field: what it is about. remedy: what to change; "" if nothing helps."""

    field: str
    value: str
    expected: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.field}: {self.value}, expected {self.expected}" + (f": {self.remedy}" if self.remedy else "")


Refusals = Mapping[str, Sequence[Reason]]
"""Why not, by the candidate's name."""


@dataclass(frozen=True, slots=True)
class Image:
    """A container image of the gateway. cuda: of the libraries in it, such as 13.0; "" where it has none."""

    uri: str
    architecture: str = "amd64"
    device: Device = "cpu"
    cuda: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of an account in its region.

    quotas: SageMaker's type, such as ml.c7i.xlarge -> how many instances of it endpoints may have; a type that is not in it is
    not offered there; None: it could not be asked. used: how many they have. hosted: the types that SageMaker's API knows;
    None: as the catalogue says.
    """

    region: str
    quotas: Mapping[str, int] | None = None
    used: Mapping[str, int] | None = None
    hosted: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where candidates are to be launched.

    ami: the InferenceAmiVersion that is asked for; "": the family's own. least_s: a candidate is paid for so long at least, its
    start and one short run. max_usd: None: nothing is paid for, so nobody is refused for it.
    """

    account: Account
    images: Sequence[Image]
    ami: str = ""
    least_s: float = 0.0
    max_usd: float | None = None


def check_time(minutes: float, least_s: float) -> None:
    """least_s: of a start and one short run. Raises: UsageError."""
    if minutes * 60 < least_s:
        raise UsageError(
            f"budget.minutes: {minutes:g}: expected at least {math.ceil(least_s / 60)}, here or as --budget-minutes: "
            f"a start and one short run take about {least_s / 60:.0f}"
        )


def reasons(candidate: CandidateSetup, catalogue: Catalogue, place: Place) -> tuple[Reason, ...]:
    """All that keeps a candidate from working as an endpoint of SageMaker; none if nothing is known to.

    candidate: of a type in the catalogue; its price may be unknown.
    """
    config = parse_config(candidate.document, source=candidate.name)
    backend = config.models[0].backends[0]
    name = bare(candidate.instance_type)
    instance = catalogue.instance(name)
    image, of_image = image_for(instance, backend, place.images)
    return (
        *of_region(catalogue, place.account.region),
        *of_contract(backend),
        *_hosting(name, catalogue, place.account),
        *of_accelerator(name, instance, config),
        *of_image,
        *_registry(image, place.account.region),
        *_driver(name, image, place.ami),
        *of_memory(name, instance, config, candidate.artifact_bytes),
        *_quota(name, place.account),
        *of_price(candidate, least_s=place.least_s, max_usd=place.max_usd),
    )


def image_for(instance: InstanceType, backend: Backend, images: Sequence[Image]) -> tuple[Image | None, tuple[Reason, ...]]:
    """The image that this backend runs in on this instance type; None, and why, if no image fits."""
    device = device_of(backend)
    fits = [image for image in images if image.device == device]
    for image in fits:
        if image.architecture == instance.architecture:
            return image, ()
    asked = f"an image for {device} on {instance.architecture}"
    remedy = "build it (docs/deploy.md) and name it under launcher.images"
    if fits:
        there = _named(image.architecture for image in fits)
        told = f"{instance.architecture}, and {there} is all there is of images for {device}"
        return None, (Reason("architecture", told, asked, remedy),)
    known = _named(f"{image.device} on {image.architecture}" for image in images) or "none"
    return None, (Reason("launcher.images", known, asked, remedy),)


def device_of(backend: Backend) -> Device:
    """What a backend computes on."""
    if needs.neuron_cores_of(backend):
        return "neuron"
    return "cuda" if needs.gpus_of(backend) else "cpu"


def of_region(catalogue: Catalogue, region: str) -> Iterable[Reason]:
    if region != catalogue.region:
        remedy = "name another region under launcher.region, or prices of this one with --instances"
        yield Reason("region", region, f"{catalogue.region}, of which the prices are", remedy)


def of_contract(backend: Backend, where: str = "container") -> Iterable[Reason]:
    """A candidate that is launched is one process on one instance. where: what that runs in."""
    of_it = f"a backend in the {where}'s own process"
    if backend.placement == "replicas":
        yield Reason("placement", "replicas, which needs Ray", f"embedded, as a {where} is one process", "remove it")
    if backend.kind == "triton":  # type: ignore[attr-defined]  # every kind adds its literal
        yield Reason(
            "kind",
            "triton, a server beside it",
            of_it,
            "choose another backend",
        )


def _hosting(instance_type: str, catalogue: Catalogue, account: Account) -> Iterable[Reason]:
    hosted = catalogue.hosted(instance_type) if account.hosted is None else f"ml.{instance_type}" in account.hosted
    if not hosted:
        yield Reason(
            "instances", f"{instance_type}, which is on EC2 only", "a type that SageMaker hosts", "choose another type"
        )


def of_accelerator(instance_type: str, instance: InstanceType, config: Config) -> Iterable[Reason]:
    backend, found = config.models[0].backends[0], instance.accelerator
    device = device_of(backend)
    if device == "cpu":
        return
    told = f"{instance_type} has {f'{found.count:g} × {found.name}' if found else 'none'}"
    if found is None or (device == "cuda") != (found.vendor == "nvidia"):
        expected = "an NVIDIA GPU, for CUDA" if device == "cuda" else "Inferentia2 or Trainium, for Neuron"
        yield Reason("accelerator", told, expected, "choose another type or backend")
    elif device == "cuda" and found.count < needs.gpus_of(backend):
        yield Reason("accelerator", told, f"{needs.gpus_of(backend)} GPUs", "choose another `device`, or a larger type")
    elif device == "neuron" and found.name not in NEURON:
        yield Reason("accelerator", told, "Inferentia2 or Trainium, which PyTorch Neuron compiles for", "choose inf2 or trn1")
    elif device == "neuron" and (found.cores or 0) < needs.neuron_cores_of(backend):
        expected = f"{needs.neuron_cores_of(backend)} NeuronCores, one for each session"
        yield Reason("accelerator", f"{told} with {found.cores} NeuronCores", expected, "fewer `sessions`, or a larger type")


def _registry(image: Image | None, region: str) -> Iterable[Reason]:
    if image is None:
        return
    named = registry(image.uri)
    if named is None:
        expected = "an image in Amazon ECR, such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/gateway:cpu"
        yield Reason("image", image.uri, expected, "push it there (docs/deploy.md)")
    elif named["region"] != region:
        yield Reason(
            "image", f"{image.uri} is in {named['region']}", f"one in {region}, where the endpoint is", "push it there too"
        )


def _driver(name: str, image: Image | None, ami: str) -> Iterable[Reason]:
    if image is None or not image.cuda:
        return
    runs = AMIS.get(ami) if ami else _DRIVERS.get(name.partition(".")[0])
    if runs is not None and runs < _release(image.cuda):
        enough = next((each for each, newer in AMIS.items() if newer >= _release(image.cuda)), "")
        value = f"{ami or name} runs CUDA {runs[0]}.{runs[1]}" + ("" if ami else " by itself")
        remedy = f"launcher.ami: {enough}" if enough else "build the image with an older CUDA"
        yield Reason("driver", value, f"one for CUDA {image.cuda}, which is in {image.uri}", remedy)


def of_memory(instance_type: str, instance: InstanceType, config: Config, artifact_bytes: int | None) -> Iterable[Reason]:
    if artifact_bytes is None:
        return
    backend = config.models[0].backends[0]
    wanted = needs.of_ingress(config, [[artifact_bytes]], None).memory_bytes
    what = f"{backend.sessions} × the model's {artifact_bytes / GIB:.2g} GiB"
    if wanted > instance.memory_gib * GIB:
        expected = f"{wanted / GIB:.3g} GiB: the processes, and twice {what}"
        yield Reason(
            "memory", f"{instance_type} has {instance.memory_gib:g} GiB", expected, "fewer `sessions`, or a larger type"
        )
    found = instance.accelerator
    if found is not None and device_of(backend) == "cuda":
        each_gib = found.memory_gib / max(1.0, found.count)
        if artifact_bytes * backend.sessions > each_gib * GIB:
            value = f"a GPU of {instance_type} has {each_gib:.3g} GiB"
            yield Reason("memory", value, f"{artifact_bytes * backend.sessions / GIB:.3g} GiB: {what}", "fewer `sessions`")


def _quota(instance_type: str, account: Account) -> Iterable[Reason]:
    if account.quotas is None:
        return
    name = f"ml.{instance_type}"
    where = f"Service Quotas, SageMaker, {name} for endpoint usage"
    if name not in account.quotas:
        yield Reason(
            "region", f"{account.region} has no quota for {name}", "a type that is offered there", "choose another type"
        )
        return
    quota, used = account.quotas[name], (account.used or {}).get(name, 0)
    if quota - used < 1:
        value = f"{counted(quota, 'instance')} of {name}" + (
            f", of which {used} {'is' if used == 1 else 'are'} used" if used else ""
        )
        yield Reason("quota", value, "room for 1", f"ask for more: {where}")


def of_price(
    candidate: CandidateSetup, *, least_s: float, max_usd: float | None, beside_usd_per_hour: float = 0.0
) -> Iterable[Reason]:
    """beside: what costs so much while it runs."""
    if candidate.price is None:
        expected = f"a price of {candidate.instance_type or 'it'}"
        yield Reason("price", f"none is known ({candidate.basis})", expected, "set `usd_per_hour` and `price_source`")
        return
    per_hour = candidate.usd_per_hour + beside_usd_per_hour
    least = per_hour * least_s / 3600
    if max_usd is not None and least > max_usd:
        value = f"{usd(least)} for a start and one short run ({least_s / 60:.0f} min at {usd(per_hour)}/h)"
        yield Reason("price", value, f"at most --max-usd {max_usd:g}", "raise it, or choose a cheaper type")


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _named(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))
