"""The one configuration object: a YAML file, read and validated once, passed down from there.

Every key with its meaning and default stands in configs/gateway.yaml. An error names the file, the key path, the value, what
was expected, and for an unknown key the nearest one that exists.
"""

import difflib
import re
import unicodedata
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from gateway.errors import ConfigError

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
        raise ValueError(f"expected 1 to {most} characters, none of them '/' or a control character")
    return value


def _version(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch("[0-9]{1,18}", value):
        raise ValueError("expected a number of 1 to 18 digits, in quotes")
    return value


ModelName = Annotated[str, BeforeValidator(partial(_name, most=128))]
BackendName = Annotated[str, BeforeValidator(partial(_name, most=48))]
Version = Annotated[str, BeforeValidator(_version)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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

    host: str = "127.0.0.1"
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
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self


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
            raise ValueError(f"unknown datatype, expected one of {', '.join(NUMPY)}")
        return value


class Ragged(_Strict):
    """Inputs whose axis 1 differs between requests, and how they are padded to share a batch.

    pad: input name -> the value that fills. buckets: lengths a batch is padded to, ascending; empty: to its longest.
    crop: outputs whose axis 1 is the padded one and is cut back to each request's own length.
    """

    pad: dict[str, float] = Field(min_length=1)
    buckets: tuple[Rows, ...] = ()
    crop: tuple[str, ...] = ()

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError("expected ascending lengths without repetition")
        return value


class Slo(_Strict):
    """What is promised to callers."""

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


class Backend(_Strict):
    """What all kinds share."""

    name: BackendName | None = None  # None: the kind
    placement: Literal["embedded", "replicas"] = "embedded"
    sessions: int = Field(default=1, ge=1, le=256)
    isolation: Literal["thread", "process"] = "thread"  # of each session; process: for code that holds the GIL or may crash
    replicas: int = Field(default=1, ge=1)
    autoscaling: Autoscaling | None = None
    resources: dict[str, float] = {}  # of one replica, as Ray counts them
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


class Torch(Backend):
    """TorchScript (.pt), torch.export (.pt2), an AOTInductor package (.pt2), or a factory `module:callable`."""

    kind: Literal["torch"]
    model: str
    build: Build | None = None  # of a .pt2 file by AOTInductor
    factory_options: dict[str, Any] = {}
    precision: Literal["fp32", "bf16", "int8"] = "fp32"
    compile: bool = False
    threads: int = Field(default=1, ge=1)
    device: str = "cpu"  # or cuda, cuda:1
    cuda_graphs: bool = False  # on cuda: one recorded launch per batch shape; the module must not branch on values


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
    engines: str = "models/engines"  # where built engines are kept, by model, profile, GPU and TensorRT version
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
            raise ValueError("means something else in a path: expected another name")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        labels = [backend.label for backend in self.backends]
        if len(set(labels)) != len(labels):
            raise ValueError(f"backends of one model need different names, got {labels}: set `name`")
        if all(backend.canary_share or backend.shadow_share for backend in self.backends):
            raise ValueError("every backend is a canary or a shadow: at least one must serve the rest of the requests")
        for backend in self.backends:
            if backend.canary_share and backend.shadow_share:
                raise ValueError(f"backend {backend.label}: canary_share and shadow_share exclude each other")
        if sum(backend.canary_share or 0.0 for backend in self.backends) > 1:
            raise ValueError("the canary_share of all backends exceeds 1")
        unknown = {label for group in self.routing.equivalent for label in group} - set(labels)
        if unknown:
            raise ValueError(f"routing.equivalent names {sorted(unknown)}, which are no backends of the model: {labels}")
        if self.ragged is not None and self.max_rows == 0:
            raise ValueError("ragged needs a batch dimension, but max_rows is 0")
        if self.ragged is not None and self.inputs is not None:
            padded = set(self.ragged.pad) - {tensor.name for tensor in self.inputs}
            if padded:
                raise ValueError(f"ragged.pad names {sorted(padded)}, which are no inputs of the model")
        return self


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
        seen: set[tuple[str, str]] = set()
        for model in self.models:
            if (model.name, model.version) in seen:
                raise ValueError(f"model {model.name!r} version {model.version!r} is listed twice")
            seen.add((model.name, model.version))
        return self


def load_config(path: str | Path) -> Config:
    """Read and validate a YAML file; relative model paths in it stay relative to the working directory.

    Raises: ConfigError, with one line per fault.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: not YAML: {exc}") from exc
    return parse_config(document, source=str(path))


def parse_config(document: object, *, source: str) -> Config:
    """Validate a parsed document. source: what messages call it. Raises: ConfigError."""
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: expected a mapping with the key `models`, got {type(document).__name__}")
    try:
        return Config.model_validate(document)
    except ValidationError as exc:
        # A faulty element makes pydantic also call its list too short: that says nothing new.
        errors = exc.errors()
        faults = [_describe(error, document, source) for error in errors if error["type"] != "too_short" or not error["input"]]
        raise ConfigError("\n".join(faults)) from exc


def _describe(error: Any, document: Any, source: str) -> str:
    # The discriminator's value stands in pydantic's path, but not in the user's file: walk the file to leave it out.
    node, path = document, ""
    for part in error["loc"]:
        if isinstance(node, dict) and (part in node or error["type"] in ("missing", "extra_forbidden")):
            if part not in node and node.get("kind") == part:
                continue
            path += f".{part}" if path else str(part)
            node = node.get(part)
        elif isinstance(node, (list, tuple)) and isinstance(part, int) and part < len(node):
            path += f"[{part}]"
            node = node[part]
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{source}: {path}: missing, expected a value"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), _keys_beside(error["loc"]), n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return f"{source}: {path}: unknown key{hint}"
    value = "" if isinstance(node, (dict, list)) else f"{node!r}: "
    return f"{source}: {path or '(top level)'}: {value}{message}"


def _keys_beside(location: tuple[Any, ...]) -> list[str]:
    """The valid keys at the place of an unknown one, found by walking the model classes along the location."""
    current: list[type[BaseModel]] = [Config]
    for part in location[:-1]:
        tagged = [
            model
            for model in current
            if "kind" in model.model_fields and part in get_args(model.model_fields["kind"].annotation)
        ]
        if tagged:
            current = tagged
        elif isinstance(part, str) and part in current[0].model_fields:
            current = _models_in(current[0].model_fields[part].annotation) or current
    return list(current[0].model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
