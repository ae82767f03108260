"""Why an endpoint of SageMaker could not work, told before anything is paid for: the instance type, the image, the processes.

Pure: what is known comes as values, and what is not known refuses nothing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from gateway.deploying.needs import GIB, Needs
from gateway.instances.facts import SAGEMAKER, Accelerator, InstanceType, InstanceTypes

Device = Literal["cpu", "cuda", "neuron"]

CUDA: Final = (13, 0)  # of the image `cuda`: docker/requirements-cuda.lock
NEURON: Final = ("inferentia2", "trainium", "trainium2")  # what PyTorch's Neuron SDK compiles for; inf1's has ended
_REGISTRY: Final = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/(?P<repository>[a-z0-9][a-z0-9._/-]*)"
    r"(:[\w.-]{1,128}|@sha256:[0-9a-f]{64})",
    re.ASCII,
)
# Lower case labels, 3 to 63 characters of them, and no address of IPv4. Source: Amazon S3's and CloudTrail's rules for names.
BUCKET: Final = r"(?=[a-z0-9.-]{3,63}(?![a-z0-9.-]))(?![0-9]+(?:\.[0-9]+){3}(?![a-z0-9.-]))[a-z0-9]+(?:(?:-+|\.)[a-z0-9]+)*"
AMIS: Final[Mapping[str, tuple[int, int]]] = {
    "al2-ami-sagemaker-inference-gpu-2": (12, 2),
    "al2-ami-sagemaker-inference-gpu-2-1": (12, 2),
    "al2-ami-sagemaker-inference-gpu-3-1": (12, 4),
    "al2023-ami-sagemaker-inference-gpu-4-1": (13, 0),
}
"""SageMaker's InferenceAmiVersion -> the CUDA that its driver runs. Source: botocore 1.44.5, ProductionVariant."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """field: the option or the fact that it is about. remedy: what to change."""

    field: str
    value: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.value}: expected {self.expected}: {self.remedy}"


def bare(instance_type: str) -> str:
    """As EC2 calls it."""
    return instance_type.removeprefix(SAGEMAKER)


def device_of(needs: Needs) -> Device:
    """What the processes compute on, and so which image they take."""
    if needs.neuron_cores:
        return "neuron"
    return "cuda" if needs.gpus else "cpu"


def registry(image: str) -> re.Match[str] | None:
    """Of an image in Amazon ECR, with its account, region and repository; None: it is elsewhere, or has no tag."""
    return _REGISTRY.fullmatch(image)


def ami_for(needs: Needs) -> str:
    """The InferenceAmiVersion whose driver runs the image `cuda`; "": the one that SageMaker takes by itself."""
    return next((name for name, runs in AMIS.items() if runs >= CUDA), "") if device_of(needs) == "cuda" else ""


def of_type(
    instance_type: str, types: InstanceTypes, needs: Needs, *, architecture: str, memory_given: bool
) -> Iterator[Obstacle]:
    """What keeps these processes from working there. architecture: of the image. memory_given: --memory said what they take."""
    name = bare(instance_type)
    flag = "--instance-type"
    if name not in types.instances:
        known = "a type of the catalogue"
        yield Obstacle(flag, instance_type, known, "`loadtest prices list` shows them")
        return
    there = types.instances[name]
    if not types.hosted(name):
        yield Obstacle(flag, f"{name}, which is on EC2 only", "a type that SageMaker hosts", "choose another")
    if there.architecture != architecture:
        remedy = f"choose another type, or build the image for {there.architecture} and say --architecture {there.architecture}"
        yield Obstacle(flag, f"{name} is {there.architecture}", f"{architecture}, as the image is", remedy)
    yield from of_machine(name, there, needs, memory_given=memory_given)


def of_machine(name: str, there: InstanceType, needs: Needs, *, memory_given: bool) -> Iterator[Obstacle]:
    """The same of its accelerator and its memory, whoever rents it out."""
    yield from _accelerator(name, there.accelerator, needs)
    if needs.memory_bytes > there.memory_gib * GIB:
        why = "as --memory says" if memory_given else "the processes, and twice its models' files for each session"
        expected = f"{needs.memory_bytes / GIB:.3g} GiB: {why}"
        remedy = "choose a larger type" if memory_given else "choose a larger type, fewer `sessions`, or say --memory"
        yield Obstacle("--instance-type", f"{name} has {there.memory_gib:g} GiB", expected, remedy)


def of_job(instance_type: str, types: InstanceTypes) -> Iterator[Obstacle]:
    """What keeps a batch transform job from running there, beside what `of_type` says."""
    name = bare(instance_type)
    if name in types.instances and types.hosted(name) and not types.transforms(name):
        value = f"{name}, which SageMaker has for endpoints only"
        yield Obstacle(
            "--instance-type", value, "a type of batch transform, such as m5, c6i, m7i, g5 or inf2", "choose another"
        )


def serverless(needs: Needs, architecture: str) -> Iterator[Obstacle]:
    """The same, where SageMaker chooses the machine."""
    if (device := device_of(needs)) != "cpu":
        yield Obstacle("--variant", f"serverless, and the configuration needs {device}", "a CPU model", "name another variant")
    if architecture != "amd64":
        yield Obstacle("--architecture", f"{architecture}, and serverless runs amd64", "amd64", "name another variant")


def of_ami(ami: str, needs: Needs) -> Iterable[Obstacle]:
    """Whether a driver that was named runs the image `cuda`."""
    runs = AMIS.get(ami)
    if runs is not None and device_of(needs) == "cuda" and runs < CUDA:
        expected = f"one that runs CUDA {_dotted(CUDA)}, which is in the image `cuda`"
        yield Obstacle("--ami", f"{ami} runs CUDA {_dotted(runs)}", expected, f"leave it out: {ami_for(needs)} is taken then")


def _accelerator(name: str, found: Accelerator | None, needs: Needs) -> Iterator[Obstacle]:
    device = device_of(needs)
    if device == "cpu":
        return
    told = f"{name} has {f'{found.count:g} × {found.name}' if found else 'no accelerator'}"
    field, remedy = "--instance-type", "choose another type, or another backend"
    if device == "cuda":
        if found is None or found.vendor != "nvidia":
            yield Obstacle(field, told, "an NVIDIA GPU, which the configuration needs", remedy)
        elif found.count < needs.gpus:
            yield Obstacle(field, told, f"{needs.gpus} GPUs", "choose a larger type, or another `device`")
    elif found is None or found.name not in NEURON:
        yield Obstacle(field, told, "Inferentia2 or Trainium, which the configuration needs", remedy)
    elif (found.cores or 0) < needs.neuron_cores:
        expected = f"{needs.neuron_cores}, one for each session"
        yield Obstacle(field, f"{told}, {found.cores} NeuronCores", expected, "choose a larger type, or fewer `sessions`")


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
