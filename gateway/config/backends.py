"""The entries of `backends`: what all kinds share, and the options of each."""

import math
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from backends import defaults
from gateway.config.fields import (
    BackendName,
    FilePath,
    Replicas,
    Resource,
    Rows,
    Seconds,
    SecondsOrZero,
    Strict,
    Threads,
    no_parts,
)
from gateway.documents.faults import Unfit


class Autoscaling(Strict):
    """Replicas of one backend follow queue depth and busy workers."""

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: Replicas = 1
    target_utilisation: float = Field(default=0.7, gt=0, le=1)
    upscale_delay_s: SecondsOrZero = 3.0
    downscale_delay_s: SecondsOrZero = 60.0

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (self._out_of_order(),)

    def _out_of_order(self) -> Iterator[Unfit]:
        if self.min_replicas > self.max_replicas:
            yield Unfit(f"above max_replicas, {self.max_replicas}", remedy="raise that, or lower this", at=("min_replicas",))


_IN_REPLICAS: Final = "`placement: replicas` beside it"
_REPLICAS_REMEDY: Final = "set that, or remove this; `sessions` run at once in one process"
_RESOURCES: Final = {"cpu": "num_cpus", "gpu": "num_gpus", "neuron_core": "neuron_cores"}

# An option's default stands in its backend's `load`, and its bounds here.
_SYNTHETIC, _TORCH, _ONNXRUNTIME, _PYTHON = map(defaults, ("synthetic", "torch", "onnxruntime", "python"))
_TRITON, _TENSORRT = map(defaults, ("triton", "tensorrt"))


class Backend(Strict):
    """What all kinds share."""

    name: BackendName | None = None  # None: the kind
    placement: Literal["embedded", "replicas"] = "embedded"
    sessions: int = Field(default=1, ge=1, le=256)
    isolation: Literal["thread", "process"] = "thread"  # of each session; process: for code that holds the GIL or may crash
    replicas: Replicas = 1
    autoscaling: Autoscaling | None = None
    resources: dict[str, Resource] = Field(default={})  # of one replica, as Ray counts them
    surge: bool = True  # an upgrade starts the new replica beside the old, so needs its resources once more; false: after it
    usd_per_hour: float | None = Field(default=None, gt=0)  # of one instance: this machine's part, or one replica
    canary_share: float | None = Field(default=None, gt=0, le=1)  # gets this share of the requests, and no others
    shadow_share: float | None = Field(default=None, gt=0, le=1)  # gets copies of this share; its answers are only compared
    cold_start_s: Seconds | None = None  # until a first session answers; None: learned, at first 10 s
    hang_timeout_s: Seconds = 60.0  # a run longer than this counts as lost
    on_loop: bool = True  # run batches shorter than their way to a thread where requests are read, if the kind only computes

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (
            self._canary_and_shadow(),
            self._no_resources(),
            no_parts(self.resources, "resources"),
            self._no_replicas(),
            self._no_scaling(),
            self._gpu_not_shown(),
        )

    def _canary_and_shadow(self) -> Iterator[Unfit]:
        if self.canary_share and self.shadow_share:
            yield Unfit("canary_share is set too", remedy="keep one of the two", at=("shadow_share",))

    def _no_resources(self) -> Iterator[Unfit]:
        """Ray takes any name for a resource, and waits for good for one that no node has."""
        for name in self.resources:
            meant = _RESOURCES.get(name.lower().removeprefix("num_").rstrip("s"), name)
            if name != meant:
                yield Unfit("no resource of Ray", remedy=f"did you mean `{meant}`?", at=("resources", name))

    def _no_replicas(self) -> Iterator[Unfit]:
        if self.placement == "embedded" and self.replicas != 1:
            yield Unfit("an embedded backend has no replicas", expected=_IN_REPLICAS, remedy=_REPLICAS_REMEDY, at=("replicas",))

    def _no_scaling(self) -> Iterator[Unfit]:
        scaling = self.autoscaling
        if scaling is not None and self.placement == "embedded" and (scaling.min_replicas != 1 or scaling.max_replicas != 1):
            found = "an embedded backend has no replicas"
            yield Unfit(found, expected=_IN_REPLICAS, remedy=_REPLICAS_REMEDY, at=("autoscaling",))

    def _gpu_not_shown(self) -> Iterator[Unfit]:
        given = math.ceil(self.resources.get("num_gpus", 0))
        if self.placement == "replicas" and given and self.gpu is not None and self.gpu >= given:
            found = f"Ray gives each replica {given} of `num_gpus`, which count from 0 in it"
            yield Unfit(found, remedy="name the first, or raise num_gpus", at=("device",))

    @property
    def gpu(self) -> int | None:
        """The number of the GPU that it computes on; None: on none."""
        device = getattr(self, "device", "cpu")
        if isinstance(device, int):
            return device
        return int(device.partition(":")[2] or 0) if device.startswith("cuda") else None

    @property
    def computes_here(self) -> bool:
        """Whether its sessions take cores or a device of the ingress process, rather than of a replica or another server."""
        return self.placement == "embedded"

    def share_usd_per_hour(self, processes: int) -> float | None:
        """What of its price one of so many ingress processes bears: another server is one instance, whoever asks it."""
        if self.usd_per_hour is None or self.computes_here or self.placement != "embedded":
            return self.usd_per_hour
        return self.usd_per_hour / processes

    @property
    def any_length(self) -> bool:
        """Whether it surely runs whatever length comes as well as any other, so that padding to buckets gains nothing."""
        return False

    @property
    def records(self) -> bool:
        """Whether it was asked to record a launch of each batch shape, so that there must be few."""
        return False

    @property
    def label(self) -> str:
        """The lane's name in metrics and messages."""
        return self.name or self.kind  # type: ignore[attr-defined]  # every kind adds its literal

    def options(self) -> dict[str, Any]:
        """The backend's own options: what its `load` takes."""
        shared = {*Backend.model_fields, "kind", "build"}  # `model_dump` would have to be built first
        return {name: deepcopy(getattr(self, name)) for name in type(self).model_fields if name not in shared}


class Build(Strict):
    """How `gateway compile` makes the artifact that a backend's `model` names."""

    source: str  # of an nn.Module: `module:factory` or `path/to/file.py:factory`
    options: dict[str, Any] = Field(default={})  # given to the factory
    precision: Literal["fp32", "fp16", "int8"] = "fp32"  # fp16: for GPUs; int8: dynamically quantised matrix products
    opset: int = Field(default=18, ge=11, le=30)
    integers_below: dict[str, Annotated[int, Field(ge=2, le=2**31)]] = Field(default={})  # by input, to verify with; else 2


def _ascending(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))


class NeuronBuild(Strict):
    """How `gateway compile` makes a directory of Neuron artifacts: one for each of row_sizes and each of ragged.buckets."""

    source: str
    options: dict[str, Any] = Field(default={})
    row_sizes: Annotated[tuple[Rows, ...], Field(min_length=1), AfterValidator(_ascending)] = (1, 4, 8)
    target: Literal["inf1", "inf2", "trn1"] = "inf2"  # compiles without the device, for it
    compiler_arguments: tuple[str, ...] = ()  # of neuronx-cc, such as --auto-cast=matmult


class Synthetic(Backend):
    """A cost model: sleeps (or spins) fixed_ms + row_ms · rows, echoes or sums its inputs."""

    kind: Literal["synthetic"]
    fixed_ms: float = Field(default=_SYNTHETIC["fixed_ms"], ge=0, le=3_600_000)
    row_ms: float = Field(default=_SYNTHETIC["row_ms"], ge=0, le=3_600_000)
    spin: bool = _SYNTHETIC["spin"]
    output: Literal["echo", "sum"] = _SYNTHETIC["output"]
    faults: dict[Literal["fail", "lose", "hang", "exit", "short"], float] = _SYNTHETIC["faults"]  # by a value in an input
    load_ms: float = Field(default=_SYNTHETIC["load_ms"], ge=0, le=3_600_000)
    fail_opens: int = Field(default=_SYNTHETIC["fail_opens"], ge=0)  # so many openings of a session fail before one succeeds


def _device(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
        remedy = "an NVIDIA GPU is `cuda`" if value.lower().startswith(("gpu", "nvidia")) else ""
        raise Unfit(expected="cpu, cuda, or one of several GPUs such as cuda:1", remedy=remedy)
    return value


Device = Annotated[str, BeforeValidator(_device)]


def _sha256(value: object) -> object:
    if value is not None and (not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value)):
        raise Unfit(expected="64 hexadecimal digits in quotes, as `sha256sum FILE` prints them")
    return value


Sha256 = Annotated[str | None, BeforeValidator(_sha256)]


OutputIndex = Annotated[int, Field(ge=0, lt=1 << 16)]


class Torch(Backend):
    """TorchScript (.pt), torch.export (.pt2), an AOTInductor package (.pt2), or a factory `module:callable`."""

    kind: Literal["torch"]
    model: str
    sha256: Sha256 = _TORCH["sha256"]  # of that file; another is not loaded
    build: Build | None = None  # of a .pt2 file by AOTInductor
    factory_options: dict[str, Any] = _TORCH["factory_options"]
    precision: Literal["fp32", "bf16", "int8"] = _TORCH["precision"]
    compile: bool = _TORCH["compile"]
    threads: Threads = _TORCH["threads"]
    device: Device = _TORCH["device"]  # or cuda, cuda:1
    cuda_graphs: bool = _TORCH["cuda_graphs"]  # on cuda: one launch per batch shape; the module must not branch on values
    output_indices: tuple[OutputIndex, ...] = _TORCH["output_indices"]  # of the module's results, for each output; empty: all
    cast_outputs: bool = _TORCH["cast_outputs"]  # float64, and integers that fit, to what is declared; False: they are errors

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (*Backend.together(self), self._indices_of_built())

    def _indices_of_built(self) -> Iterator[Unfit]:
        if self.output_indices and self.build is not None:
            found = "what is built has the outputs as they are listed"
            yield Unfit(
                found, remedy="list `outputs` in the order of the module's results, and remove this", at=("output_indices",)
            )

    @property
    def any_length(self) -> bool:
        return self.device == "cpu" and not self.compile

    @property
    def records(self) -> bool:
        return self.cuda_graphs


class OnnxRuntime(Backend):
    """An ONNX file."""

    kind: Literal["onnxruntime"]
    model: str
    sha256: Sha256 = _ONNXRUNTIME["sha256"]  # of that file; another is not loaded
    build: Build | None = None
    threads: Threads = _ONNXRUNTIME["threads"]
    device: Literal["cpu", "cuda"] = _ONNXRUNTIME["device"]
    cuda_graphs: bool = _ONNXRUNTIME["cuda_graphs"]  # on cuda: one launch per batch shape; all of the model must run there

    @property
    def any_length(self) -> bool:
        return self.device == "cpu"

    @property
    def records(self) -> bool:
        return self.cuda_graphs


class Python(Backend):
    """The user's own class, `module:Class` or `path/to/file.py:Class`, with load() and predict(inputs)."""

    kind: Literal["python"]
    model: str
    sha256: Sha256 = _PYTHON["sha256"]  # of that file; another is not run
    class_options: dict[str, Any] = _PYTHON["class_options"]
    cast_outputs: bool = _PYTHON["cast_outputs"]  # float64, and integers that fit, to what is declared; False: they are errors


class Triton(Backend):
    """A model on Triton Inference Server, called by gRPC, a whole batch at a time."""

    kind: Literal["triton"]
    url: str | tuple[str, ...]  # host:port of its gRPC; several: sessions spread over them, and move when one is down
    model: str  # its name there
    model_version: str = _TRITON["model_version"]  # empty: what the server would take
    timeout_s: Seconds = _TRITON["timeout_s"]  # of one call; longer means that the server hangs
    drain_s: SecondsOrZero | None = _TRITON["drain_s"]  # reads on a stream that was left, then cancels; None: timeout_s
    shared_memory: bool = _TRITON["shared_memory"]  # pass tensors through /dev/shm: the server must be on this host
    repair: bool = _TRITON["repair"]  # unload and load a model whose process died: needs --model-control-mode=explicit

    @property
    def computes_here(self) -> bool:
        return False


class TensorRt(Backend):
    """TensorRT in this process, built from an ONNX file for the GPU it runs on."""

    kind: Literal["tensorrt"]
    model: str  # the .onnx file
    sha256: Sha256 = _TENSORRT["sha256"]  # of it; another is not loaded
    build: Build | None = None
    engines: FilePath | None = _TENSORRT["engines"]  # where what is built is kept; None: beside it
    device: int = Field(default=_TENSORRT["device"], ge=0, le=999)
    cuda_graphs: bool = _TENSORRT["cuda_graphs"]  # one recorded launch per batch shape instead of one per kernel
    workspace_mb: int = Field(default=_TENSORRT["workspace_mb"], ge=1, le=1 << 24)  # the most that building may use
    longest: Rows = _TENSORRT["longest"]  # an engine is built for open lengths up to this


class Neuron(Backend):
    """AWS Inferentia and Trainium: compiled artifacts for each rows × length, on the cores Ray gave this process."""

    kind: Literal["neuron"]
    model: str  # a directory that `gateway compile` made
    build: NeuronBuild | None = None

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (*Backend.together(self), self._no_core(), self._no_processes())

    def _no_core(self) -> Iterator[Unfit]:
        if self.placement == "replicas" and self.resources.get("neuron_cores") == 0:
            yield Unfit("each replica computes on one", expected="1, or more", at=("resources", "neuron_cores"))

    def _no_processes(self) -> Iterator[Unfit]:
        if self.isolation == "process":
            found = "a NeuronCore has one owner, and each session's process would take those of all"
            yield Unfit(found, expected="thread", remedy="`placement: replicas` gives each its own", at=("isolation",))


AnyBackend = Annotated[
    Synthetic | Torch | OnnxRuntime | Python | Triton | TensorRt | Neuron,
    Field(discriminator="kind"),
]
