"""The one configuration object: a YAML file, read and validated once, passed down from there.

Every key with its meaning and default stands in configs/gateway.yaml. How faults are told: `gateway.documents`. What can only
be seen beside the file, such as whether a model's file is there: `gateway.check`.
"""

import contextlib
import ipaddress
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from backends.not_known import NOT_KNOWN, NotKnown
from backends.source import is_source
from gateway.documents.faults import ConfigFaults, Location, Unfit, did_you_mean
from gateway.documents.lenient import Seen, as_far_as_valid, validated
from gateway.documents.reader import Document, read
from gateway.other_names import DATATYPES, KEYS, plain

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
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def called_here(cls, key: str) -> tuple[str, str] | None:
        """Of a key that others have: what it is here, and what to write; None, for any other, and for one of ours without its
        unit.
        """
        ours = any(plain(name).startswith(plain(key)) for name in cls.model_fields)
        return None if ours else KEYS.get(plain(key))


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

    def together(self) -> Iterable[Iterator[Unfit]]:
        """For `gateway.documents.lenient`, as all of this name."""
        return (self._same_port(),)

    def _same_port(self) -> Iterator[Unfit]:
        if self.http_port and self.http_port == self.grpc_port:
            yield Unfit("http_port has it too", expected="another port", remedy="0 is any free one", at=("grpc_port",))


class Autoscaling(_Strict):
    """Replicas of one backend follow queue depth and busy workers."""

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    target_utilisation: float = Field(default=0.7, gt=0, le=1)
    upscale_delay_s: float = Field(default=3.0, ge=0)
    downscale_delay_s: float = Field(default=60.0, ge=0)

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (self._out_of_order(),)

    def _out_of_order(self) -> Iterator[Unfit]:
        if self.min_replicas > self.max_replicas:
            yield Unfit(f"above max_replicas, {self.max_replicas}", remedy="raise that, or lower this", at=("min_replicas",))


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
            meant = DATATYPES.get(value.lower().removeprefix("type_"), value)
            raise Unfit("unknown datatype", expected=f"one of {', '.join(NUMPY)}", remedy=did_you_mean(meant, NUMPY))
        return value


def tensor_specs(tensors: tuple[Tensor, ...] | None) -> tuple[TensorSpec, ...]:
    """What the operator states, for backends; what is NOT_KNOWN stays so."""
    listed: tuple[Any, ...] = tensors or ()
    return tuple(
        each if each is NOT_KNOWN else TensorSpec(each.name, each.datatype, each.shape, each.optional, each.labels)
        for each in listed
    )


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

    @classmethod
    def called_here(cls, key: str) -> tuple[str, str] | None:
        if re.fullmatch(r"p(?!99_?ms)\d+_?ms|mean_?ms", key):
            return "p99_ms", "write `p99_ms`, the one promise there is: 99 of 100 answers within so many milliseconds"
        return super().called_here(key)

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


_IN_REPLICAS: Final = "`placement: replicas` beside it"
_REPLICAS_REMEDY: Final = "set that, or remove this; `sessions` run at once in one process"
_RESOURCES: Final = {"cpu": "num_cpus", "gpu": "num_gpus", "neuron_core": "neuron_cores"}


class Backend(_Strict):
    """What all kinds share."""

    name: BackendName | None = None  # None: the kind
    placement: Literal["embedded", "replicas"] = "embedded"
    sessions: int = Field(default=1, ge=1, le=256)
    isolation: Literal["thread", "process"] = "thread"  # of each session; process: for code that holds the GIL or may crash
    replicas: int = Field(default=1, ge=1)
    autoscaling: Autoscaling | None = None
    resources: dict[str, Annotated[float, Field(ge=0)]] = {}  # of one replica, as Ray counts them
    surge: bool = True  # an upgrade starts the new replica beside the old, so needs its resources once more; false: after it
    usd_per_hour: float | None = Field(default=None, gt=0)  # of one instance: this machine's part, or one replica
    canary_share: float | None = Field(default=None, gt=0, le=1)  # gets this share of the requests, and no others
    shadow_share: float | None = Field(default=None, gt=0, le=1)  # gets copies of this share; its answers are only compared
    cold_start_s: float | None = Field(default=None, gt=0)  # until a first session answers; None: learned, at first 10 s
    hang_timeout_s: float = Field(default=60.0, gt=0)  # a run longer than this counts as lost

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (self._canary_and_shadow(), self._no_resources(), self._no_replicas(), self._no_scaling())

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

        return ModelSpec("", tensor_specs(self.inputs), tensor_specs(self.outputs), self.max_rows)

    @field_validator("name")
    @classmethod
    def _unlike_a_path(cls, value: str) -> str:
        if value in (".", "..", "stats"):  # /v2/models/stats; clients shorten dots away
            raise Unfit("means something else in a path", expected="another name")
        return value

    def together(self) -> Iterable[Iterator[Unfit]]:
        tensors = (("inputs", self.inputs), ("outputs", self.outputs))
        return (
            self._same_labels(),
            self._only_canaries(),
            self._too_many_canaries(),
            self._unknown_equivalents(),
            *(self._same_tensors(key, listed) for key, listed in tensors),
            self._padding_without_batches(),
            self._unknown_tensors(("ragged", "pad"), "an input of the model", self.inputs),
            self._unknown_tensors(("ragged", "crop"), "an output of the model", self.outputs),
        )

    def _same_labels(self) -> Iterator[Unfit]:
        seen = set()
        for index, backend in enumerate(self.backends):
            with contextlib.suppress(NotKnown):
                if backend.label in seen:
                    remedy = "give each a `name` of its own" if backend.name is None else "choose another"
                    found = f"{backend.label!r} is the name of another backend too"
                    yield Unfit(found, remedy=remedy, at=("backends", index, "name"))
                seen.add(backend.label)

    def _only_canaries(self) -> Iterator[Unfit]:
        if all(backend.canary_share or backend.shadow_share for backend in self.backends):
            found = "every backend is a canary or a shadow"
            yield Unfit(found, expected="at least one for the rest of the requests", remedy="add one", at=("backends",))

    def _too_many_canaries(self) -> Iterator[Unfit]:
        shares = {}
        for index, backend in enumerate(self.backends):
            with contextlib.suppress(NotKnown):
                shares[index] = backend.canary_share or 0.0
        if (whole := sum(shares.values())) > 1:
            last = max(index for index, share in shares.items() if share)
            found = f"with it all canary shares sum to {whole:g}"
            yield Unfit(found, expected="at most 1", remedy="lower them", at=("backends", last, "canary_share"))

    def _unknown_equivalents(self) -> Iterator[Unfit]:
        labels = list(dict.fromkeys(backend.label for backend in self.backends))
        for number, group in enumerate(self.routing.equivalent):
            for index, label in enumerate(group):
                if label not in labels:
                    expected = f"a backend of this model, one of {', '.join(labels)}"
                    at = ("routing", "equivalent", number, index)
                    yield Unfit(expected=expected, remedy=did_you_mean(label, labels), at=at)

    def _same_tensors(self, key: str, tensors: tuple[Tensor, ...] | None) -> Iterator[Unfit]:
        first: dict[str, int] = {}
        told = set()
        for index, tensor in enumerate(tensors or ()):
            with contextlib.suppress(NotKnown):
                before = first.setdefault(tensor.name, index)
                if before != index and before not in told:
                    told.add(before)
                    yield Unfit("listed twice", remedy="each tensor has a name of its own", at=(key, before, "name"))

    def _padding_without_batches(self) -> Iterator[Unfit]:
        if self.max_rows == 0 and self.ragged is not None:
            found = "requests are padded to share a batch, but max_rows 0 says that there is none"
            yield Unfit(found, remedy="remove `ragged`, or set max_rows", at=("ragged",))

    def _unknown_tensors(self, at: Location, expected: str, tensors: tuple[Tensor, ...] | None) -> Iterator[Unfit]:
        """at: of names of tensors, which must be among these, if there are any."""
        known = list(dict.fromkeys(tensor.name for tensor in tensors or ()))
        if not known or self.ragged is None:
            return
        for key in self.ragged.pad if at[-1] == "pad" else range(len(self.ragged.crop)):
            name = key if isinstance(key, str) else self.ragged.crop[key]
            if name not in known:
                yield Unfit(expected=f"{expected}, one of {', '.join(known)}", remedy=did_you_mean(name, known), at=(*at, key))


class Ray(_Strict):
    """Ray, when `gateway serve` starts or joins it."""

    address: str | None = None  # None: join a running cluster of this node if there is one, else start one
    dashboard: bool = False
    application: str = "gateway"
    channel_host: str | None = None  # where replicas take batches of other nodes; None: at the node's address in the cluster


class Config(_Strict):
    """A whole configuration file."""

    server: Server = Server()
    ray: Ray = Ray()
    models: tuple[Model, ...] = Field(min_length=1)

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (self._same_models(),)

    def _same_models(self) -> Iterator[Unfit]:
        seen = set()
        for index, model in enumerate(self.models):
            with contextlib.suppress(NotKnown):
                if (model.name, model.version) in seen:
                    remedy = "choose another, or give each a `version` of its own"
                    found = f"version {model.version} of it is listed twice"
                    yield Unfit(found, remedy=remedy, at=("models", index, "name"))
                seen.add((model.name, model.version))


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
    seen = config_as_far_as_valid(document)
    if seen.faults:
        raise ConfigFaults(seen.faults)
    return seen.found


def config_as_far_as_valid(document: Document) -> Seen[Config]:
    """The configuration, with NOT_KNOWN for what is at fault in it; and every fault."""
    folder = document.folder
    return as_far_as_valid(Config, document, (lambda value: value) if folder is None else partial(located, folder=folder))
