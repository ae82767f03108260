"""TensorRT in this process: an engine built from an ONNX file for the GPU it runs on.

The engine is built at the first load and kept on disk, under a name made of the bytes of the ONNX file and of the weights that
it keeps beside it, the profile, the GPU and the TensorRT version; building can take minutes. Where nothing can be written, each
load builds it. Precision is the ONNX file's own (networks are strongly typed): export it as fp16.

Each session has a CUDA stream, device tensors, and memory for activations of its own. With `cuda_graphs` it records one launch
per batch shape and replays it. A recording belongs to the state of its execution context, which another shape changes: so each
has a context of its own, and all of a session share that memory, since they run one after the other. Source: NVIDIA's guide
"Working with Dynamic Shapes", NVIDIA/TensorRT#3798.

Written against TensorRT 10.1 and 11. Not yet run by this project: the library was not at hand (2026-11).
"""

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from backends.base import Device, ExecutionFailed, LoadFailed, ModelSpec, SessionLost, Tensors, TensorSpec, narrowed, words_of
from backends.cuda_graphs import MOST_GRAPHS, capturing, recorded_rows, running
from backends.regular_file import absent

_DATATYPES: Final = {
    "FLOAT": "FP32", "HALF": "FP16", "BF16": "BF16", "INT8": "INT8", "INT32": "INT32", "INT64": "INT64", "BOOL": "BOOL",
    "UINT8": "UINT8",
}  # fmt: skip

log = logging.getLogger(__name__)

_building = threading.Lock()
_opening = threading.Lock()  # of contexts: an engine is for one thread at a time, and sessions share it


def load(
    declared: ModelSpec,
    *,
    model: str,
    engines: str | None = None,
    device: int = 0,
    cuda_graphs: bool = True,
    workspace_mb: int = 2048,
    longest: int = 512,
) -> "TensorRtModel":
    """model: an .onnx file. engines: where built engines are kept; None: in `engines` beside it.

    longest: the greatest open length of the profile, the first dimension's too where max_rows is 0.
    """
    from backends.artifact_digests import artifact_digest

    if not Path(model).is_file():
        raise LoadFailed(f"{model}: {absent(model)}")
    try:
        import tensorrt
        import torch
    except ImportError as exc:
        raise LoadFailed(
            f"TensorRT cannot be imported ({exc}): install NVIDIA's tensorrt, and PyTorch built for CUDA to hold its tensors"
        ) from exc
    if not torch.cuda.is_available():
        raise LoadFailed(f"TensorRT {tensorrt.__version__}: PyTorch sees no CUDA device")
    logger = tensorrt.Logger(tensorrt.Logger.WARNING)
    runtime = tensorrt.Runtime(logger)
    kept = Path(engines) if engines else Path(model).parent / "engines"
    profile = _Profile(declared.max_rows, longest, workspace_mb)
    made_of = f"{artifact_digest(Path(model))} {profile}"  # of gigabytes of weights it takes seconds: not under the lock
    with running(), torch.cuda.device(device), _building:
        engine = _engine(tensorrt, runtime, Path(model), kept, profile, made_of)
    inputs, outputs = _tensors(tensorrt, engine)
    spec = ModelSpec(
        "tensorrt_plan",
        narrowed(inputs, declared.inputs, f"{model}: input"),
        narrowed(outputs, declared.outputs, f"{model}: output"),
        declared.max_rows,
        declared.row_sizes or (recorded_rows(declared.max_rows) if cuda_graphs else ()),
        reads_parameters=False,
    )
    return TensorRtModel(spec, engine, runtime, device, cuda_graphs)


@dataclass(frozen=True, slots=True)
class _Profile:
    """What an engine is built for: up to so many rows (0: it has none), and open lengths up to `longest`."""

    max_rows: int
    longest: int
    workspace_mb: int


def _engine(trt: Any, runtime: Any, onnx: Path, engines: Path, profile: _Profile, made_of: str) -> Any:
    """The engine from its file; built, and kept if it can be, where there is none."""
    import torch

    gpu = torch.cuda.get_device_name().replace(" ", "-")
    digest = hashlib.sha256(f"{made_of} {gpu} {trt.__version__}".encode()).hexdigest()[:16]
    path = engines / f"{onnx.stem}-{gpu}-trt{trt.__version__}-{digest}.plan"
    if path.is_file():
        plan: Any = path.read_bytes()
    else:
        plan = _built(trt, runtime.logger, onnx, profile)
        try:
            _keep(plan, path)
        except OSError as exc:
            told = "%s: the engine cannot be kept, and each load builds it: %s: name a folder in `engines` that can be written"
            log.warning(told, path, words_of(exc))
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise LoadFailed(f"{path}: TensorRT cannot load this engine: delete it, and it is built again")
    return engine


def _keep(plan: Any, path: Path) -> None:
    """Whole or not at all. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".engine-") as folder:  # another process may be building the same
        file = Path(folder) / path.name
        file.write_bytes(plan)
        os.replace(file, path)


def _built(trt: Any, logger: Any, onnx: Path, built_for: _Profile) -> Any:
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):
        faults = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise LoadFailed(f"{onnx}: TensorRT cannot parse it: {faults}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, built_for.workspace_mb << 20)
    profile = builder.create_optimization_profile()
    rows, length = built_for.max_rows, built_for.longest
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        sizes = tuple(tensor.shape)
        if -1 in sizes:
            # Tuned for half the rows at a quarter of the length: batches are seldom full, and lengths have a long tail.
            usual_length = max(length // 4, 1)
            usual = _sized(sizes, max(rows // 2, 1) if rows else usual_length, usual_length)
            profile.set_shape(tensor.name, _sized(sizes, 1, 1), usual, _sized(sizes, rows or length, length))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise LoadFailed(f"{onnx}: TensorRT could not build an engine; its log says why")
    return plan


def _sized(sizes: tuple[int, ...], rows: int, length: int) -> tuple[int, ...]:
    return tuple(size if size >= 0 else rows if axis == 0 else length for axis, size in enumerate(sizes))


def _tensors(trt: Any, engine: Any) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    found: dict[bool, list[TensorSpec]] = {True: [], False: []}
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        kind = engine.get_tensor_dtype(name).name
        if kind not in _DATATYPES:
            raise LoadFailed(f"tensor {name!r} is {kind}, which the gateway cannot pass")
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        found[is_input].append(TensorSpec(name, _DATATYPES[kind], tuple(engine.get_tensor_shape(name))))
    return tuple(found[True]), tuple(found[False])


class TensorRtModel:
    def __init__(self, spec: ModelSpec, engine: Any, runtime: Any, device: int, cuda_graphs: bool) -> None:
        self.spec = spec
        self.device = Device("cuda", device)
        self.memory_bytes = int(engine.device_memory_size_v2)
        self._engine = engine
        self._runtime = runtime  # must outlive its engines
        self._cuda_graphs = cuda_graphs

    def open_session(self, index: int) -> "TensorRtSession":
        import torch

        try:
            with running(), torch.cuda.device(self.device.index):
                return TensorRtSession(self.spec, self._engine, self.device.index, self._cuda_graphs)
        except (SessionLost, torch.OutOfMemoryError) as exc:
            raise LoadFailed(f"session {index}: no execution context, the GPU's memory is full") from exc

    def close(self) -> None:
        self._engine = None


@dataclass(frozen=True, slots=True)
class _Bound:
    """Device tensors for one set of input shapes, and the recorded launch on them, if there is one.

    context: set to these shapes and tensors for as long as it is recorded.
    """

    context: Any
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    graph: Any


class TensorRtSession:
    def __init__(self, spec: ModelSpec, engine: Any, device: int, cuda_graphs: bool) -> None:
        """Raises: SessionLost, torch.OutOfMemoryError."""
        import torch

        self._spec = spec
        self._engine = engine
        self._device = device
        self._cuda_graphs = cuda_graphs
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch 2.13
        self._bound: dict[tuple[Any, ...], _Bound] = {}
        memory_bytes = max(1, engine.device_memory_size_v2)  # what is empty has no address
        self._memory: Any = torch.empty(memory_bytes, dtype=torch.uint8, device=torch.device("cuda", device))
        self._context = self._new_context()  # of what is not recorded

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        import torch

        from backends.torch_tensors import mapped, to_array, to_tensor

        if self._context is None:
            raise SessionLost("the session is closed")
        try:
            with running(), torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode():
                sources = {tensor.name: to_tensor(inputs[tensor.name]) for tensor in self._spec.inputs}
                bound = self._bind(sources)
                for name, source in sources.items():
                    bound.inputs[name].copy_(source)
                if bound.graph is not None:
                    bound.graph.replay()
                else:
                    self._execute(bound)
                pinned = {name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for name, t in bound.outputs.items()}
                for name, target in pinned.items():
                    target.copy_(bound.outputs[name], non_blocking=True)
                self._stream.synchronize()
                return {name: to_array(tensor) for name, tensor in pinned.items()}
        except (ExecutionFailed, SessionLost):
            raise
        except Exception as exc:
            raise mapped(exc) from exc

    def close(self) -> None:
        with running():
            try:
                self._stream.synchronize()  # a run that failed may have left kernels, which use what is given back here
            finally:
                self._context = self._engine = None
                self._bound.clear()
                self._memory = None

    def _bind(self, sources: dict[str, Any]) -> _Bound:
        """The tensors for these shapes: those of the last time, or new ones."""
        import torch

        key = tuple(tuple(source.shape) for source in sources.values())
        bound = self._bound.get(key)
        if bound is not None:
            if bound.graph is None:
                self._point(bound)
            return bound
        device = torch.device("cuda", self._device)
        for name, source in sources.items():
            if not self._context.set_input_shape(name, tuple(source.shape)):
                raise ExecutionFailed(f"input {name!r}: shape {list(source.shape)} is outside the engine's profile")
        # Of this batch: what is not written yet may be no index that the model takes.
        given = {name: source.to(device, copy=True) for name, source in sources.items()}
        results = {}
        for tensor in self._spec.outputs:
            shape = tuple(self._context.get_tensor_shape(tensor.name))
            if -1 in shape:
                raise ExecutionFailed(f"output {tensor.name!r}: its shape {list(shape)} depends on values of the input")
            results[tensor.name] = torch.empty(shape, dtype=_torch_dtype(tensor.datatype), device=device)
        bound = _Bound(self._context, given, results, None)
        if len(self._bound) < MOST_GRAPHS:
            bound = self._bound[key] = (self._recorded(bound) if self._cuda_graphs else None) or bound
        if bound.graph is None:
            self._point(bound)
        return bound

    def _recorded(self, bound: _Bound) -> _Bound | None:
        """With a context of its own. None, and a warning, if that fails: a run without tells whether the device is lost."""
        import torch

        try:
            recorded = replace(bound, context=self._new_context(), graph=torch.cuda.CUDAGraph())
            self._point(recorded)
            with capturing:
                self._execute(recorded)  # TensorRT allocates at the first run of a shape, which cannot be recorded
                self._stream.synchronize()
                with torch.cuda.graph(recorded.graph, stream=self._stream, capture_error_mode="thread_local"):
                    self._execute(recorded)
            return recorded
        except Exception as exc:
            shapes = {name: list(tensor.shape) for name, tensor in bound.inputs.items()}
            log.warning("batches of %s stay unrecorded, and are slower: %s", shapes, words_of(exc))
            return None

    def _new_context(self) -> Any:
        """On the memory that all of this session share. Raises: SessionLost."""
        from tensorrt import ExecutionContextAllocationStrategy

        with _opening:
            context = self._engine.create_execution_context(ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise SessionLost("TensorRT gives no execution context; its log says why")
        context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        return context

    def _point(self, bound: _Bound) -> None:
        for name, tensor in bound.inputs.items():
            bound.context.set_input_shape(name, tuple(tensor.shape))
        for name, tensor in (bound.inputs | bound.outputs).items():
            bound.context.set_tensor_address(name, tensor.data_ptr())

    def _execute(self, bound: _Bound) -> None:
        if not bound.context.execute_async_v3(self._stream.cuda_stream):
            raise ExecutionFailed("TensorRT could not enqueue the batch; its log says why")


def _torch_dtype(datatype: str) -> Any:
    import torch

    return {
        "FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16, "INT8": torch.int8, "INT32": torch.int32,
        "INT64": torch.int64, "BOOL": torch.bool, "UINT8": torch.uint8,
    }[datatype]  # fmt: skip
