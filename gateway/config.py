"""The one configuration object: a YAML file, read and validated once, passed down from there.

Every key with its meaning and default stands in configs/gateway.yaml. How faults are told: `gateway.documents`. What can only
be seen beside the file, such as whether a model's file is there: `gateway.check`.
"""

import ipaddress
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from backends.source import is_source
from gateway.documents.faults import ConfigFaults, Refused, Unfit, did_you_mean
from gateway.documents.reader import Document, read
from gateway.documents.validation import validated

Milliseconds = Annotated[float, Field(gt=0, le=3_600_000)]
Port = Annotated[int, Field(ge=0, le=65535)]
Rows = Annotated[int, Field(ge=1, le=1 << 20)]


# Names stand in paths, lane names (`model:version/backend`), metric labels, and in the names of threads, files and deployments.
# With the longest of each, a file that Ray names after a deployment still has a name of less than 255 bytes.
def _name(value: object, *, most: int) -> object:
    if not isinstance(value, str):
        return value  # which pydantic refuses
    unfit = any(char == "/" or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in value)
    if unfit or not 0 < len(value) <= most:
        remedy = f"for instance {value.replace('/', '-')}" if "/" in value.strip("/") else "choose another"
        raise Unfit(expected=f"1 to {most} characters, none of them '/' or a control character", remedy=remedy)
    return value


def _version(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch("[0-9]{1,18}", value):
        plain = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18
        raise Unfit(expected="a number of 1 to 18 digits, in quotes", remedy=f'write `version: "{value}"`' if plain else "")
    return value


def _host(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        ipaddress.ip_address(value)
    except ValueError:
        if not re.fullmatch(r"[\w.-]+", value):
            remedy = "the ports are http_port and grpc_port" if re.search(r":\d+$", value) else ""
            raise Unfit(expected="an address such as 127.0.0.1, or a name", remedy=remedy) from None
    return value


Host = Annotated[str, BeforeValidator(_host)]
ModelName = Annotated[str, BeforeValidator(partial(_name, most=128))]
BackendName = Annotated[str, BeforeValidator(partial(_name, most=48))]
Version = Annotated[str, BeforeValidator(_version)]


class _Strict(BaseModel):
    not_there: ClassVar[Mapping[str, str]] = {}  # keys that one may look for here, and what to do instead
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Limits(_Strict):
    """What one client may ask of the listeners."""

    header_bytes: int = Field(default=32 << 10, ge=256)
    header_count: int = Field(default=100, ge=1)
    body_bytes: int = Field(default=64 << 20, ge=1)
    header_timeout_s: float = Field(default=10.0, gt=0)
    body_timeout_s: float = Field(default=60.0, gt=0)
    idle_timeout_s: float = Field(default=120.0, gt=0)
    connections: int = Field(default=10_000, ge=1)
    pipelined_requests: int = Field(default=64, ge=1)
    requests_per_connection: int = Field(default=0, ge=0)  # 0: never recycled
    json_depth: int = Field(default=32, ge=1, le=256)


class Server(_Strict):
    """The listeners and the processes that own them."""

    host: Host = "127.0.0.1"
    http_port: Port | None = 8000  # None: no such listener; 0: any free port
    grpc_port: Port | None = 8001
    ingress_replicas: int = Field(default=1, ge=1, le=64)
    shared_workers: int | None = Field(default=None, ge=1)  # batches that run at once in a process, of all embedded backends
    drain_timeout_s: float = Field(default=20.0, ge=0)
    run_dir: str | None = None  # metrics and region files of this node; None: a fresh temporary directory
    state_dir: str | None = None  # what was learned of the backends' speed, kept between restarts; None: learned anew
    instance_type: str | None = None  # what this runs on, such as c7i.xlarge: told to loadtest, which prices it
    system_shared_memory: bool = True
    model_control: bool = False  # repository load and unload by clients
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.http_port and self.http_port == self.grpc_port:
            raise Unfit("http_port has it too", expected="another port", remedy="0 is any free one", at=("grpc_port",))
        return self


class Autoscaling(_Strict):
    """Replicas of one backend follow queue depth and busy workers."""

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    target_utilisation: float = Field(default=0.7, gt=0, le=1)
    upscale_delay_s: float = Field(default=3.0, ge=0)
    downscale_delay_s: float = Field(default=60.0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise Unfit(f"above max_replicas, {self.max_replicas}", remedy="raise that, or lower this", at=("min_replicas",))
        return self


# What numpy, PyTorch and others call the datatypes -> what the protocol does.
_NAMES_ELSEWHERE: Final = {
    **{dtype.name: name for name, dtype in NUMPY.items()},
    "float": "FP32", "half": "FP16", "double": "FP64", "long": "INT64", "int": "INT32", "short": "INT16",
    "str": "BYTES", "string": "BYTES", "text": "BYTES", "object": "BYTES", "bool_": "BOOL", "boolean": "BOOL",
}  # fmt: skip


class Tensor(_Strict):
    """One input or output as the operator states it. shape: with the batch dimension; -1 is any size."""

    name: str = Field(min_length=1)
    datatype: str
    shape: tuple[Annotated[int, Field(ge=-1)], ...]
    optional: bool = False
    labels: tuple[str, ...] = ()

    @field_validator("datatype")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in NUMPY:
            meant = _NAMES_ELSEWHERE.get(value.lower().removeprefix("type_"), value)
            raise Unfit("unknown datatype", expected=f"one of {', '.join(NUMPY)}", remedy=did_you_mean(meant, NUMPY))
        return value


class Ragged(_Strict):
    """Inputs whose axis 1 differs between requests, and how they are padded to share a batch.

    pad: input name -> the value that fills. buckets: lengths a batch is padded to, ascending; empty: to its longest.
    crop: outputs whose axis 1 is the padded one and is cut back to each request's own length.
    """

    pad: dict[str, Annotated[float, Field(allow_inf_nan=True)]] = Field(min_length=1)
    buckets: tuple[Rows, ...] = ()
    crop: tuple[str, ...] = ()

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise Unfit(expected="ascending lengths without repetition", remedy=f"write {sorted(set(value))}")
        return value


class Slo(_Strict):
    """What is promised to callers."""

    not_there = dict.fromkeys(
        ("p50_ms", "p90_ms", "p95_ms", "p999_ms", "p100_ms", "mean_ms"),
        "write `p99_ms`, the one promise there is: 99 of 100 answers within so many milliseconds",
    )
    p99_ms: Milliseconds


class Batching(_Strict):
    """How requests become batches. max_delay_ms is the `fixed` policy's only."""

    policy: Literal["adaptive", "greedy", "fixed"] = "adaptive"
    max_rows: Rows | None = None  # None: what the model takes
    max_delay_ms: float = Field(default=5.0, ge=0, le=60_000)
    max_queue_rows: Rows = 4096
    probe_s: float = Field(default=3.0, ge=0, le=600)  # at most so long, each backend is warmed up and timed when it loads
    trace: bool = False  # log one line per batch: its life and why it closed


class Ejection(_Strict):
    """When a backend that fails gets no more requests, and for how long before it is tried with copies."""

    consecutive_failures: int = Field(default=3, ge=1)
    failed_share: float = Field(default=0.5, gt=0, le=1)  # of the last 20 executions
    pause_s: float = Field(default=1.0, gt=0)  # doubles with every ejection in a row
    max_pause_s: float = Field(default=8.0, gt=0)
    max_share: float = Field(default=0.75, ge=0, le=1)  # of a model's backends; the last one is never ejected


class Routing(_Strict):
    """Which of a model's backends gets a request."""

    policy: Literal["cheapest", "least_eta", "shortest_queue", "power_of_two", "round_robin"] = "cheapest"
    spill_share: float = Field(
        default=0.5, gt=0, le=1
    )  # `cheapest`: of the SLO; a backend predicted to take longer is passed over
    equivalent: tuple[tuple[str, ...], ...] = ()  # groups that may stand in for each other after a failure; empty: all may
    shadow_tolerance: float = Field(default=1e-3, ge=0)  # relative; a copy's outputs that differ more are counted as different
    ejection: Ejection = Ejection()


def _resources(value: object) -> object:
    """Ray takes any name for a resource, and waits for good for one that no node has."""
    for name in value if isinstance(value, dict) else ():
        meant = _RESOURCES.get(str(name).lower().removeprefix("num_").rstrip("s"), name)
        if name != meant:
            raise Unfit("no resource of Ray", remedy=f"did you mean `{meant}`?", at=(name,))
    return value


_RESOURCES: Final = {"cpu": "num_cpus", "gpu": "num_gpus", "neuron_core": "neuron_cores"}
Resources = Annotated[dict[str, Annotated[float, Field(ge=0)]], BeforeValidator(_resources)]


class Backend(_Strict):
    """What all kinds share."""

    name: BackendName | None = None  # None: the kind
    placement: Literal["embedded", "replicas"] = "embedded"
    sessions: int = Field(default=1, ge=1, le=256)
    isolation: Literal["thread", "process"] = "thread"  # of each session; process: for code that holds the GIL or may crash
    replicas: int = Field(default=1, ge=1)
    autoscaling: Autoscaling | None = None
    resources: Resources = {}  # of one replica, as Ray counts them
    surge: bool = True  # an upgrade starts the new replica beside the old, so needs its resources once more; false: after it
    usd_per_hour: float | None = Field(default=None, gt=0)  # of one instance: this machine's part, or one replica
    canary_share: float | None = Field(default=None, gt=0, le=1)  # gets this share of the requests, and no others
    shadow_share: float | None = Field(default=None, gt=0, le=1)  # gets copies of this share; its answers are only compared
    cold_start_s: float | None = Field(default=None, gt=0)  # until a first session answers; None: learned, at first 10 s
    hang_timeout_s: float = Field(default=60.0, gt=0)  # a run longer than this counts as lost

    @property
    def computes_here(self) -> bool:
        """Whether its sessions take cores or a device of the ingress process, rather than of a replica or another server."""
        return self.placement == "embedded"

    @property
    def label(self) -> str:
        """The lane's name in metrics and messages."""
        return self.name or self.kind  # type: ignore[attr-defined]  # every kind adds its literal

    def options(self) -> dict[str, Any]:
        """The backend's own options: what its `load` takes."""
        return self.model_dump(exclude={*Backend.model_fields, "kind", "build"})


class Build(_Strict):
    """How `gateway compile` makes the artifact that a backend's `model` names."""

    source: str  # of an nn.Module: `module:factory` or `path/to/file.py:factory`
    options: dict[str, Any] = {}  # given to the factory
    precision: Literal["fp32", "fp16", "int8"] = "fp32"  # fp16: for GPUs; int8: dynamically quantised matrix products
    opset: int = Field(default=18, ge=11, le=30)


class NeuronBuild(_Strict):
    """How `gateway compile` makes a directory of Neuron artifacts: one for each of row_sizes and each of ragged.buckets."""

    source: str
    options: dict[str, Any] = {}
    row_sizes: tuple[Rows, ...] = (1, 4, 8)
    target: Literal["inf1", "inf2", "trn1"] = "inf2"  # compiles without the device, for it
    compiler_arguments: tuple[str, ...] = ()  # of neuronx-cc, such as --auto-cast=matmult


class Synthetic(Backend):
    """A cost model: sleeps (or spins) fixed_ms + row_ms · rows, echoes or sums its inputs."""

    kind: Literal["synthetic"]
    fixed_ms: float = Field(default=1.0, ge=0)
    row_ms: float = Field(default=0.1, ge=0)
    spin: bool = False
    output: Literal["echo", "sum"] = "echo"
    faults: dict[Literal["fail", "lose", "hang", "exit", "short"], float] = {}  # brought about by this value in an input
    load_ms: float = Field(default=0.0, ge=0)
    fail_opens: int = Field(default=0, ge=0)  # so many openings of a session fail before one succeeds


def _device(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
        remedy = "an NVIDIA GPU is `cuda`" if value.lower().startswith(("gpu", "nvidia")) else ""
        raise Unfit(expected="cpu, cuda, or one of several GPUs such as cuda:1", remedy=remedy)
    return value


Device = Annotated[str, BeforeValidator(_device)]


class Torch(Backend):
    """TorchScript (.pt), torch.export (.pt2), an AOTInductor package (.pt2), or a factory `module:callable`."""

    kind: Literal["torch"]
    model: str
    build: Build | None = None  # of a .pt2 file by AOTInductor
    factory_options: dict[str, Any] = {}
    precision: Literal["fp32", "bf16", "int8"] = "fp32"
    compile: bool = False
    threads: int = Field(default=1, ge=1)
    device: Device = "cpu"  # or cuda, cuda:1
    cuda_graphs: bool = False  # on cuda: one recorded launch per batch shape; the module must not branch on values
    cast_outputs: bool = True  # float64, and integers that fit, to the declared datatype; False: they are errors


class OnnxRuntime(Backend):
    """An ONNX file."""

    kind: Literal["onnxruntime"]
    model: str
    build: Build | None = None
    threads: int = Field(default=1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    cuda_graphs: bool = False  # on cuda: one recorded launch per batch shape; all of the model must run there


class Python(Backend):
    """The user's own class, `module:Class` or `path/to/file.py:Class`, with load() and predict(inputs)."""

    kind: Literal["python"]
    model: str
    class_options: dict[str, Any] = {}
    cast_outputs: bool = True  # float64, and integers that fit, to the declared datatype; False: they are errors


class Triton(Backend):
    """A model on Triton Inference Server, called by gRPC, a whole batch at a time."""

    kind: Literal["triton"]
    url: str | tuple[str, ...]  # host:port of its gRPC; several: sessions spread over them, and move when one is down
    model: str  # its name there
    model_version: str = ""  # empty: what the server would take
    timeout_s: float = Field(default=30.0, gt=0)  # of one call; longer means that the server hangs
    shared_memory: bool = False  # pass tensors through /dev/shm: the server must be on this host
    repair: bool = True  # unload and load a model whose process died: needs --model-control-mode=explicit

    @property
    def computes_here(self) -> bool:
        return False


class TensorRt(Backend):
    """TensorRT in this process, built from an ONNX file for the GPU it runs on."""

    kind: Literal["tensorrt"]
    model: str  # the .onnx file
    build: Build | None = None
    engines: str | None = None  # where built engines are kept, by model, profile, GPU and TensorRT version; None: beside it
    device: int = Field(default=0, ge=0)
    cuda_graphs: bool = True  # one recorded launch per batch shape instead of one per kernel
    workspace_mb: int = Field(default=2048, ge=1)  # the most that building may use
    longest: Rows = 512  # an engine is built for open lengths up to this


class Neuron(Backend):
    """AWS Inferentia and Trainium: compiled artifacts for each rows × length, on the cores Ray gave this process."""

    kind: Literal["neuron"]
    model: str  # a directory that `gateway compile` made
    build: NeuronBuild | None = None


AnyBackend = Annotated[
    Synthetic | Torch | OnnxRuntime | Python | Triton | TensorRt | Neuron,
    Field(discriminator="kind"),
]


class Model(_Strict):
    """One model name and version, and the backends that can serve it.

    inputs, outputs: may be left out where the backend can tell (ONNX); then they are read when it loads.
    max_rows: the most rows one execution takes; 0: the model has no batch dimension.
    """

    name: ModelName
    version: Version = "1"
    slo: Slo | None = None
    inputs: tuple[Tensor, ...] | None = None
    outputs: tuple[Tensor, ...] | None = None
    max_rows: int = Field(default=32, ge=0, le=1 << 20)
    ragged: Ragged | None = None
    batching: Batching = Batching()
    routing: Routing = Routing()
    share_weight: float = Field(default=1.0, gt=0)  # of server.shared_workers, beside other models'; each embedded backend's
    load_at_start: bool = True
    backends: tuple[AnyBackend, ...] = Field(min_length=1)

    def declared(self) -> ModelSpec:
        """What the operator states of the model's tensors; empty where it is left to the artifact."""

        def specs(tensors: tuple[Tensor, ...] | None) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(t.name, t.datatype, t.shape, t.optional, t.labels) for t in tensors or ())

        return ModelSpec("", specs(self.inputs), specs(self.outputs), self.max_rows)

    @field_validator("name")
    @classmethod
    def _unlike_a_path(cls, value: str) -> str:
        if value in (".", "..", "stats"):  # /v2/models/stats; clients shorten dots away
            raise Unfit("means something else in a path", expected="another name")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        unfit = [*self._unfit_backends(), *self._unfit_tensors()]
        if unfit:
            raise Refused(unfit)
        return self

    def _unfit_backends(self) -> Iterator[Unfit]:
        labels = [backend.label for backend in self.backends]
        for index, label in enumerate(labels):
            if label in labels[:index]:
                remedy = "give each a `name` of its own" if self.backends[index].name is None else "choose another"
                yield Unfit(f"{label!r} is the name of another backend too", remedy=remedy, at=("backends", index, "name"))
        if all(backend.canary_share or backend.shadow_share for backend in self.backends):
            found = "every backend is a canary or a shadow"
            yield Unfit(found, expected="at least one for the rest of the requests", remedy="add one", at=("backends",))
        for index, backend in enumerate(self.backends):
            if backend.canary_share and backend.shadow_share:
                remedy = "keep one of the two"
                yield Unfit("canary_share is set too", remedy=remedy, at=("backends", index, "shadow_share"))
        if (shares := sum(backend.canary_share or 0.0 for backend in self.backends)) > 1:
            last = max(index for index, backend in enumerate(self.backends) if backend.canary_share)
            found = f"with it all canary shares sum to {shares:g}"
            yield Unfit(found, expected="at most 1", remedy="lower them", at=("backends", last, "canary_share"))
        for number, group in enumerate(self.routing.equivalent):
            for index, label in enumerate(group):
                if label not in labels:
                    expected = f"a backend of this model, one of {', '.join(labels)}"
                    at = ("routing", "equivalent", number, index)
                    yield Unfit(expected=expected, remedy=did_you_mean(label, labels), at=at)

    def _unfit_tensors(self) -> Iterator[Unfit]:
        for key, tensors in (("inputs", self.inputs or ()), ("outputs", self.outputs or ())):
            count = Counter(tensor.name for tensor in tensors)
            for index, tensor in enumerate(tensors):
                if count[tensor.name] > 1:
                    yield Unfit("listed twice", remedy="each tensor has a name of its own", at=(key, index, "name"))
                    break
        if self.ragged is None:
            return
        if self.max_rows == 0:
            found = "requests are padded to share a batch, but max_rows 0 says that there is none"
            yield Unfit(found, remedy="remove `ragged`, or set max_rows", at=("ragged",))
        inputs, outputs = ([tensor.name for tensor in tensors or ()] for tensors in (self.inputs, self.outputs))
        for name in self.ragged.pad:
            if inputs and name not in inputs:
                expected = f"an input of the model, one of {', '.join(inputs)}"
                yield Unfit(expected=expected, remedy=did_you_mean(name, inputs), at=("ragged", "pad", name))
        for index, name in enumerate(self.ragged.crop):
            if outputs and name not in outputs:
                expected = f"an output of the model, one of {', '.join(outputs)}"
                yield Unfit(expected=expected, remedy=did_you_mean(name, outputs), at=("ragged", "crop", index))


class Ray(_Strict):
    """Ray, when `gateway serve` starts or joins it."""

    address: str | None = None  # None: join a running cluster of this node if there is one, else start one
    dashboard: bool = False
    application: str = "gateway"


class Config(_Strict):
    """A whole configuration file."""

    server: Server = Server()
    ray: Ray = Ray()
    models: tuple[Model, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        listed = [(model.name, model.version) for model in self.models]
        twice = [index for index, model in enumerate(listed) if model in listed[:index]]
        if twice:
            remedy = "choose another, or give each a `version` of its own"
            raise Refused(
                Unfit(f"version {listed[index][1]} of it is listed twice", remedy=remedy, at=("models", index, "name"))
                for index in twice
            )
        return self


def load_config(path: str | Path) -> Config:
    """Read and validate a YAML file, "-" being standard input; its relative paths count from its folder.

    Raises: ConfigFaults.
    """
    return config_of(read(path))


def listening(server: Server, given: Mapping[str, object], *, called: Callable[[str], str] = str) -> Server:
    """The server with another host or other ports. called: what messages call a key. Raises: ConfigFaults."""
    try:
        return validated(Server, Document("", {**server.model_dump(), **given}))
    except ConfigFaults as exc:  # a remedy speaks of files
        raise ConfigFaults(replace(fault, path=called(fault.path), remedy="") for fault in exc.faults) from None


def located(document: object, folder: Path) -> object:
    """A configuration as it was read, with its relative paths counted from `folder`, which is that of its file.

    A new document; what validation is going to refuse stays as it is. `class_options` and `factory_options` are the user's own.
    """
    if not isinstance(document, dict):
        return document
    found = dict(document)
    if "server" in found:
        found["server"] = _counted(found["server"], ("run_dir", "state_dir"), folder)
    if isinstance(models := found.get("models"), list):
        found["models"] = [
            {**model, "backends": [located_backend(backend, folder) for backend in model["backends"]]}
            if isinstance(model, dict) and isinstance(model.get("backends"), list)
            else model
            for model in models
        ]
    return found


def located_backend(backend: object, folder: Path) -> Any:
    """As `located`, for one entry of a model's backends."""
    if not isinstance(backend, dict) or backend.get("kind") == "triton":  # whose model is a name on another server
        return backend
    found = _counted(backend, ("model", "engines"), folder)
    return found | {"build": _counted(backend["build"], ("source",), folder)} if "build" in backend else found


def _counted(mapping: Any, keys: tuple[str, ...], folder: Path) -> Any:
    if not isinstance(mapping, dict):
        return mapping
    values = {key: mapping[key] for key in keys if isinstance(mapping.get(key), str) and mapping[key]}
    paths = {key: value for key, value in values.items() if not is_source(value) or ".py:" in value}  # not `module:name`
    return mapping | {key: os.path.normpath(folder / value) for key, value in paths.items()}


def parse_config(document: object, *, source: str) -> Config:
    """Validate a parsed document. source: what messages call it. Raises: ConfigFaults."""
    return config_of(Document(source, document))


def config_of(document: Document) -> Config:
    """Relative paths count from the document's folder, if it has one. Raises: ConfigFaults."""
    if document.folder is None:
        return validated(Config, document)
    return validated(Config, document, located(document.value, document.folder))
