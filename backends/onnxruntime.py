"""ONNX Runtime: an .onnx file, int8 models included, on CPU or CUDA.

With one intra-op thread `run` computes on the calling thread, so k sessions share one InferenceSession and its weights. With
more, an InferenceSession has a thread pool of its own and k sessions would queue for it: then each session loads its own.
The pool's threads do not spin between runs, since sessions share the cores with the listeners and with each other.
"""

import contextlib
import mmap
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.artifacts import UNKNOWN, identify
from backends.base import Device, ExecutionFailed, LoadFailed, ModelSpec, SessionLost, Tensors, TensorSpec, narrowed
from backends.cuda_graphs import recorded_rows, running
from backends.datatypes import NUMPY
from backends.onnx_file import has_fp16, of_unknown_rank, way_without, with_rows
from backends.regular_file import absent
from backends.required import check_required

if TYPE_CHECKING:
    from backends.discovery import Found
    from backends.onnxruntime_cuda import GraphRuns, PlainRuns

_DATATYPES: Final = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}  # fmt: skip  # bfloat16 is missing: ONNX Runtime's Python API has no numpy type for it
# On the CPU its kernel takes 3.5 to 6 times what Add and LayerNormalization take, which it stands for, and minilm a tenth
# longer with it (onnxruntime 1.32, widths of 64 to 4096, 2026-11-23). Answers differ by 1e-7 of 0.2.
_SLOWER_FUSED: Final = ["SkipLayerNormFusion"]
# On the CPU it ends the process (SIGSEGV) where a MatMul of fp16 takes a Transpose and weights (onnxruntime 1.32).
_FATAL_TO_FP16: Final = ["MatmulTransposeFusion"]
# Of operators that take their scale from all that they are given: DynamicQuantizeLinear, ...LSTM.
_DYNAMIC: Final = b"DynamicQuantize"
_DEVICE_FAULTS: Final = ("CUDA failure", "CUDA error", "CUBLAS", "CUDNN")
# Of a message: its code, the file's name again, and a source's line with the function there, whose words begin in capitals.
_OF_ITSELF: Final = re.compile(
    r"^\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from .*? failed:|\S+\.(?:cc|h):\d+ (?:\w+ (?=[A-Z])|[^()]*\([^()]*\) )"
)
_NEWER: Final = re.compile("IR version|[Oo]pset")
_MEMORY_FAULTS: Final = ("Failed to allocate memory", "bad allocation")


def load(
    declared: ModelSpec, *, model: str, threads: int = 1, device: str = "cpu", cuda_graphs: bool = False
) -> "OnnxRuntimeModel":
    """model: the path of an .onnx file. Tensors are read from it; declared ones must agree with them.

    cuda_graphs: on cuda, record and replay one launch per batch shape; all of the model must run there.
    """
    _import()
    if not Path(model).is_file():
        raise LoadFailed(f"{model}: {absent(model)}; `gateway compile` builds the examples' and exports your own")
    if device == "cuda" and (lacks := without_cuda()):
        from backends.onnxruntime_libraries import WITH_CUDA

        raise LoadFailed(f"device 'cuda': {lacks}: {WITH_CUDA}")
    if cuda_graphs and device != "cuda":
        raise LoadFailed(f"cuda_graphs: expected false where device is {device!r}")
    session = _open(model, threads, device, cuda_graphs)
    inputs, outputs, given = _declared(model, session, declared)
    row_sizes = declared.row_sizes or (recorded_rows(declared.max_rows) if cuda_graphs else ())
    if declared.max_rows:
        firsts = {tensor.shape[0] if tensor.shape else 0 for tensor in (*inputs, *given)}
        if firsts == {declared.max_rows}:
            row_sizes = (declared.max_rows,)  # exported with fixed rows: every batch is padded to them
        elif firsts != {-1}:
            shapes = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in (*inputs, *given))
            raise LoadFailed(
                f"{model}: max_rows {declared.max_rows} needs a first dimension that is open (or is {declared.max_rows}) in "
                f"every tensor, got {shapes}: export it so, or set max_rows to 0"
            )
        inputs = _open_rows(inputs)
        outputs = _open_rows(outputs)
    check_required(model, declared.inputs)
    inputs = narrowed(inputs, declared.inputs, f"{model}: input")
    outputs = narrowed(outputs, declared.outputs, f"{model}: output")
    spec = ModelSpec(
        "onnxruntime_onnx",
        inputs,
        outputs,
        declared.max_rows,
        row_sizes,
        reads_parameters=False,
        only_computes=device == "cpu",
    )
    if cuda_graphs and any(tensor.datatype == "BYTES" for tensor in (*inputs, *outputs)):
        raise LoadFailed(f"{model}: has strings, which stay on the CPU: set cuda_graphs to false")
    return OnnxRuntimeModel(spec, session, model, threads, device, cuda_graphs)


def _declared(
    model: str, session: Any, declared: ModelSpec
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs, outputs and those of them that are asked for, as the file has them, with what only a declaration can tell."""
    inputs, outputs = _tensors(session.get_inputs()), _tensors(session.get_outputs())
    listed = {tensor.name for tensor in declared.outputs} or {tensor.name for tensor in outputs}
    _check_types(model, inputs, tuple(tensor for tensor in outputs if tensor.name in listed))
    inputs, outputs = _ranked(model, inputs, outputs, declared)
    outputs = with_rows(inputs, outputs, declared.outputs)
    return inputs, outputs, tuple(tensor for tensor in outputs if tensor.name in listed)


def without_cuda() -> str:
    """Why this build of ONNX Runtime cannot run on CUDA; empty if it can."""
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return ""
    return f"onnxruntime {onnxruntime.__version__} has no CUDA provider"


def read(*, model: str, example: Mapping[str, object] | None = None) -> "Found":
    """The tensors of an .onnx file, which tells all of them. Raises: LoadFailed."""
    from backends.discovery import from_shapes

    _import()
    opened = _open(model, 1, "cpu", False, optimised=False)
    inputs, outputs = _tensors(opened.get_inputs()), _tensors(opened.get_outputs())
    _check_types(model, inputs, outputs)
    inputs, outputs = _ranked(model, inputs, outputs, ModelSpec("", (), (), 0))
    session = OnnxRuntimeSession(ModelSpec("", inputs, outputs, 0), opened, only_cpu=True)
    found = from_shapes(inputs, outputs, lambda arrays: session.run(arrays, {}), quantises=lambda: _quantises(model))
    given = [node.name for node in opened.get_outputs()]
    if not (again := sorted({name for name in given if given.count(name) > 1})):
        return found
    note = f"the file gives {', '.join(map(repr, again))} more than once, which is listed once"
    return replace(found, notes=(*found.notes, note))


def tried(*, model: str, stated: ModelSpec) -> "Found":
    """As of `backends.tried`, on the CPU. Of a file without open rows in every tensor, what is stated, which its load tells."""
    from backends.discovery import Found, from_shapes

    _import()
    opened = _open(model, 1, "cpu", False, optimised=False)
    inputs, _, outputs = _declared(model, opened, stated)
    if any(tensor.shape[:1] != (-1,) for tensor in (*inputs, *outputs)):
        return Found(inputs, outputs, stated.max_rows)
    inputs = narrowed(inputs, stated.inputs, f"{model}: input")
    session = OnnxRuntimeSession(ModelSpec("", inputs, outputs, 0), opened, only_cpu=True)
    return from_shapes(
        inputs,
        outputs,
        lambda arrays: session.run(arrays, {}),
        stated_rows=stated.max_rows,
        quantises=lambda: _quantises(model),
    )


def _quantises(model: str) -> bool:
    with Path(model).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_DYNAMIC) >= 0


def _import() -> None:
    """Raises: LoadFailed, where the library is missing."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError as exc:
        raise LoadFailed(f"ONNX Runtime cannot be imported ({exc}): pip install 'serving-gateway[onnx]'") from exc


def _open(model: str, threads: int, device: str, cuda_graphs: bool, *, optimised: bool = True) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # What it would warn of either raises or is no concern of an operator; nor is a drawn row that a file does not take.
    options.log_severity_level = 3 if optimised else 4
    providers: list[Any] = ["CPUExecutionProvider"]
    if device == "cuda":
        from backends.onnxruntime_libraries import preload, why_not_cuda

        # Its own stream per InferenceSession comes by default; heuristic search keeps the first run of a new shape short.
        # Products in TF32, its default, have ten bits: what is exported in fp32 would differ from the CPU's by up to 1e-3.
        cuda = {
            "cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0", "enable_cuda_graph": "1" if cuda_graphs else "0",
        }  # fmt: skip
        providers.insert(0, ("CUDAExecutionProvider", cuda))
        preload(onnxruntime)
    try:
        disabled = []
        if device == "cpu":
            disabled = _SLOWER_FUSED + _FATAL_TO_FP16 if has_fp16(Path(model)) else _SLOWER_FUSED
        with running() if device == "cuda" else contextlib.nullcontext():
            session = onnxruntime.InferenceSession(model, options, providers=providers, disabled_optimizers=disabled)
    except Exception as exc:
        raise LoadFailed(f"{Path(model).absolute()}: {_why_not(Path(model), str(exc))}") from exc
    if device == "cuda" and session.get_providers()[0] != "CUDAExecutionProvider":
        raise LoadFailed(f"{model}: ONNX Runtime fell back to the CPU: {why_not_cuda(onnxruntime)}")
    return session


def _why_not(path: Path, said: str) -> str:
    """Why a file cannot be loaded: what it is or lacks, else what ONNX Runtime said, without places in its own sources."""
    import onnxruntime

    artifact = identify(path)
    if not artifact.kind and artifact != UNKNOWN:
        return f"{artifact.what}: {artifact.way}"
    reason = _OF_ITSELF.sub("", said).strip().rstrip(".")
    way = "; install a newer onnxruntime, or export for an older opset" if _NEWER.search(reason) else ""
    return f"ONNX Runtime {onnxruntime.__version__} cannot load it: {reason}{way}"


def _tensors(nodes: Any) -> tuple[TensorSpec, ...]:
    """Each once, by its name. datatype: ONNX's own words for a type that cannot pass, as of `_check_types`."""
    return tuple(
        TensorSpec(
            node.name,
            _DATATYPES.get(node.type, node.type),
            tuple(size if isinstance(size, int) else -1 for size in node.shape or ()),
        )
        for node in {node.name: node for node in nodes}.values()
    )


def _check_types(model: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Raises: LoadFailed."""
    for what, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors:
            if tensor.datatype not in NUMPY:
                way = way_without(tensor.datatype, of_input=what == "input")
                raise LoadFailed(f"{model}: {what} {tensor.name!r} is {tensor.datatype}, which the gateway cannot pass: {way}")


def _ranked(
    model: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], declared: ModelSpec
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The tensors with a shape where ONNX Runtime says `[]` of those whose rank it does not know, as of scalars.

    It is what is declared, else, of outputs, what they are seen to have. Raises: LoadFailed, where that does not tell.
    """
    if all(tensor.shape for tensor in (*inputs, *outputs)):
        return inputs, outputs
    try:
        unknown = of_unknown_rank(Path(model))
    except (OSError, ValueError):  # of ONNX Runtime's own format, which has scalars, or what is declared
        unknown = frozenset(tensor.name for tensor in (*declared.inputs, *declared.outputs))
    unknown &= {tensor.name for tensor in (*inputs, *outputs) if not tensor.shape}

    def stated(tensors: tuple[TensorSpec, ...], shapes: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        by_name = {tensor.name: tensor.shape for tensor in shapes if tensor.name in unknown}
        return tuple(replace(tensor, shape=by_name.get(tensor.name, tensor.shape)) for tensor in tensors)

    if untold := sorted({tensor.name for tensor in inputs} & unknown - {tensor.name for tensor in declared.inputs}):
        raise LoadFailed(
            f"{model}: the file does not say the rank of input {', '.join(map(repr, untold))}: state `inputs` of the model "
            "in the configuration, with their shapes"
        )
    inputs = stated(inputs, declared.inputs)
    if declared.outputs or not (untold := [tensor.name for tensor in outputs if tensor.name in unknown]):
        return inputs, stated(outputs, declared.outputs)
    from backends.discovery import outputs_of_ones

    session = OnnxRuntimeSession(
        ModelSpec("", inputs, outputs, 0), _open(model, 1, "cpu", False, optimised=False), only_cpu=True
    )
    try:
        return inputs, stated(outputs, outputs_of_ones(lambda arrays: session.run(arrays, {}), inputs))
    except LoadFailed as exc:
        raise LoadFailed(
            f"{model}: the file does not say the rank of output {', '.join(map(repr, untold))}: state `outputs` of the model "
            "in the configuration, with their shapes (a run on ones, which would show it, fails)"
        ) from exc


def _open_rows(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(replace(tensor, shape=(-1, *tensor.shape[1:])) for tensor in tensors)


class OnnxRuntimeModel:
    def __init__(self, spec: ModelSpec, session: Any, model: str, threads: int, device: str, cuda_graphs: bool) -> None:
        self.spec = spec
        self.device = Device(device)
        self._model = model
        self._threads = threads
        self._cuda_graphs = cuda_graphs
        self._opened: Any = session  # shared by all sessions, or spare for the first
        self._shared = threads == 1 and device == "cpu"
        self._lock = threading.Lock()
        self._closed = False

    @property
    def memory_bytes(self) -> int:
        from backends.artifact_sizes import artifact_bytes  # for who asks

        return artifact_bytes(Path(self._model)) or 0

    def open_session(self, index: int) -> "OnnxRuntimeSession":
        if self._closed:
            raise LoadFailed("the model is closed")
        if self._shared:
            return OnnxRuntimeSession(self.spec, self._opened, only_cpu=True)
        with self._lock:
            spare, self._opened = self._opened, None
        session = spare or _open(self._model, self._threads, self.device.kind, self._cuda_graphs)
        return OnnxRuntimeSession(self.spec, session, only_cpu=self.device.kind == "cpu", cuda_graphs=self._cuda_graphs)

    def close(self) -> None:
        self._closed = True
        self._opened = None


class OnnxRuntimeSession:
    def __init__(self, spec: ModelSpec, session: Any, *, only_cpu: bool, cuda_graphs: bool = False) -> None:
        self._session = session
        # Its Python part looks at the inputs' names, which are checked before, and at CUDA's graphs: a fifth of a short run,
        # 1 % of a lone request of `linear`. Where a release has it otherwise, all of it is called.
        self._bare = getattr(session, "_sess", session)
        self._names = [tensor.name for tensor in spec.outputs]
        self._on_cuda: GraphRuns | PlainRuns | None = None
        if not only_cpu:
            from backends import onnxruntime_cuda

            runs = onnxruntime_cuda.GraphRuns if cuda_graphs else onnxruntime_cuda.PlainRuns
            self._on_cuda = runs(session, self._names)
        self._string_inputs = [tensor.name for tensor in spec.inputs if tensor.datatype == "BYTES"]
        self._string_outputs = [tensor.name for tensor in spec.outputs if tensor.datatype == "BYTES"]

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        if self._session is None:
            raise SessionLost("the session is closed")
        feeds = inputs
        if self._string_inputs:
            feeds = inputs | {name: _decoded(name, inputs[name]) for name in self._string_inputs if name in inputs}
        try:
            results = self._bare.run(self._names, feeds, None) if self._on_cuda is None else self._on_cuda.run(feeds)
        except Exception as exc:
            message = f"{type(exc).__name__}: {exc}"
            if isinstance(exc, MemoryError) or any(fault in message for fault in _MEMORY_FAULTS):
                raise SessionLost(message, self_inflicted=True) from exc
            lost = any(fault in message for fault in _DEVICE_FAULTS)
            raise (SessionLost if lost else ExecutionFailed)(message) from exc
        outputs: Tensors = dict(zip(self._names, results, strict=True))
        for name in self._string_outputs:
            outputs[name] = _encoded(outputs[name])
        return outputs

    def close(self) -> None:
        with running() if self._on_cuda is not None else contextlib.nullcontext():
            self._session = self._bare = self._on_cuda = None


def _decoded(name: str, array: np.ndarray) -> np.ndarray:
    try:
        return np.array([element.decode() for element in array.flat], NUMPY["BYTES"]).reshape(array.shape)
    except UnicodeDecodeError as exc:
        raise ExecutionFailed(f"input {name!r}: ONNX strings are UTF-8, but an element is not: {exc}") from exc


def _encoded(array: np.ndarray) -> np.ndarray:
    return np.array([element.encode() for element in array.flat], NUMPY["BYTES"]).reshape(array.shape)
