"""PyTorch: TorchScript (.pt), torch.export (.pt2), an AOTInductor package (.pt2), or a factory of an nn.Module.

Calling convention: the inputs are passed by position in the spec's order (None for an optional one left out), but by name
where they are called as parameters of `forward` that do not begin it in that order; a tensor, a tuple or list in the spec's
order (or with the outputs at `output_indices`), or a mapping or named tuple by name comes back. Sessions share one module,
which must not change in `forward`.

Threads: ATen keeps its number of intra-op threads per calling thread (an OpenMP setting), so each session sets its own when it
is opened on its thread: k sessions use k · threads cores. But a thread's first question for the number sets it to what was set
last by any thread of the process, so it is asked before it is set; and where the process is somebody else's (`guest`), another
thread sets it back for those to come. Inductor bakes the number in effect into its kernels when it compiles them. (Seen with
torch 2.13 on CPU, 2026-11.)

Arrays become tensors without a copy, if they can be written to, as `forward` may; BF16 passes as int16.
"""

import contextlib
import inspect
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from backends.artifacts import AOT_INDUCTOR, EXPORTED, TORCHSCRIPT, Artifact, identify, torn
from backends.base import (
    NO_OPTIONS,
    BackendError,
    Device,
    LoadFailed,
    ModelSpec,
    Session,
    SessionLost,
    SpecMismatch,
    Tensors,
    writeable,
)
from backends.cuda_graphs import recorded_rows, running
from backends.onnx_file import AGAIN
from backends.regular_file import absent
from backends.source import is_source, made_from
from backends.torch_tensors import mapped, ordered_outputs, to_array, to_tensor

if TYPE_CHECKING:
    import torch

_setting: Final = threading.Lock()
UNBOUNDED: Final = sys.maxsize - 1  # as torch.export writes it
_UNKNOWN_TYPE: Final = re.compile(r"Deserializing (\S+) in pytree is not registered")

log = logging.getLogger(__name__)


def load(
    declared: ModelSpec,
    *,
    model: str,
    factory_options: Mapping[str, Any] = NO_OPTIONS,
    precision: str = "fp32",
    compile: bool = False,
    threads: int = 1,
    device: str = "cpu",
    cuda_graphs: bool = False,
    output_indices: Sequence[int] = (),
) -> "TorchModel":
    """model: a path, or `module:factory` / `path/to/file.py:factory`, called with factory_options, which returns an nn.Module.

    precision: bf16 runs under autocast, with a factory's weights cast once; int8 quantises the Linear layers of a factory's
    module dynamically (CPU).
    compile: torch.compile with dynamic shapes; the first runs, at warm-up, take up to a minute.
    cuda_graphs: record and replay one launch per batch shape on a CUDA device.
    output_indices: which of the results of `forward` the outputs are, counted from 0; empty: all, in order.
    """
    try:
        import torch
    except ImportError as exc:
        raise LoadFailed(f"PyTorch cannot be imported ({exc}): pip install 'serving-gateway[torch]'") from exc
    if not declared.inputs or not declared.outputs:
        raise LoadFailed(
            f"{model}: PyTorch models do not tell their tensors: set `inputs` and `outputs` of the model "
            "(`gateway init` finds them)"
        )
    for tensor in (*declared.inputs, *declared.outputs):
        if tensor.datatype == "BYTES":
            raise LoadFailed(f"{model}: PyTorch has no strings, but {tensor.name!r} is BYTES: use a python model before it")
    if output_indices and len(output_indices) != len(declared.outputs):
        raise LoadFailed(
            f"{model}: output_indices: has {len(output_indices)}, of {len(declared.outputs)} outputs: write one for each, in "
            "their order"
        )
    if cuda_graphs and device == "cpu":
        raise LoadFailed("cuda_graphs: expected false where device is 'cpu'")
    if precision == "int8" and device != "cpu":
        raise LoadFailed(f"precision int8: PyTorch's dynamic quantisation is for the CPU, and device is {device!r}")
    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise LoadFailed(f"device {device!r}: PyTorch {torch.__version__} sees no CUDA device")
    _use_threads(torch, threads)  # for loading, and what Inductor compiles for
    with running() if target.type == "cuda" else contextlib.nullcontext():
        names = [tensor.name for tensor in declared.inputs]
        call, platform, memory_bytes, most = load_callable(torch, model, dict(factory_options), target, precision, names)
    from backends.aot_inductor import HeldPackage

    if isinstance(call, HeldPackage):
        call.check_declared(Path(model), declared)
        call.max_rows = declared.max_rows
        for warning in call.compiled.warnings(names, declared.max_rows > 0):
            log.warning("%s: %s", Path(model).absolute(), warning)
    max_rows = declared.max_rows
    if 0 < most < max_rows:
        exported = f"{Path(model).absolute()}: exported for {most} rows at most"
        if most < declared.rows_wanted:
            raise SpecMismatch(f"{exported}, and max_rows is {max_rows}: set max_rows: {most}, or export it for more")
        log.info("%s, which max_rows is then", exported)
        max_rows = most
    if platform in ("pytorch", "pytorch_torchscript"):
        call = by_name(call, names)
    if compile:
        call = torch.compile(call, dynamic=True)
    row_sizes = declared.row_sizes or (recorded_rows(max_rows) if cuda_graphs else ())
    spec = ModelSpec(platform, declared.inputs, declared.outputs, max_rows, row_sizes, reads_parameters=False)
    return TorchModel(
        spec, call, target, precision == "bf16", threads, cuda_graphs, memory_bytes, output_indices=output_indices
    )


def _use_threads(torch: Any, count: int) -> None:
    """Have this thread use so many. See Threads, above."""
    from backends.guest import is_guest

    torch.get_num_threads()
    if not is_guest():
        torch.set_num_threads(count)
        return
    with _setting, ThreadPoolExecutor(1) as other:
        before = other.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        other.submit(torch.set_num_threads, before).result()


def load_callable(
    torch: Any,  # the module, imported by the caller
    model: str,
    factory_options: dict[str, Any],
    device: "torch.device",
    precision: str,
    inputs: Iterable[str] = (),
) -> tuple[Callable[..., Any], str, int, int]:
    """What to call, its platform's name, the bytes of its weights, and the most rows that it takes (0: nothing says so).

    inputs: the names of those that it will be called with, as far as they are known.
    """
    if is_source(model):
        module = made_from(model, factory_options, key="factory_options")
        if not isinstance(module, torch.nn.Module):
            raise LoadFailed(f"{model}: expected an nn.Module from the factory, got {type(module).__name__}")
        module = module.eval().requires_grad_(False)
        if precision == "int8":
            module = _int8(torch, module)
        if precision == "bf16":
            from backends.torch_autocast import cast_once

            cast_once(module)
        return module.to(device), "pytorch", _weight_bytes(module), 0
    if precision == "int8":
        raise LoadFailed(
            f"precision int8 quantises a factory's module, but {model} is an artifact: quantise it when you export it"
        )
    path = Path(model)
    if not path.is_file():
        raise LoadFailed(f"{path.absolute()}: {absent(path)}")
    artifact = identify(path)
    with unloadable(path, artifact):
        if artifact == TORCHSCRIPT:
            module = torch.jit.load(str(path), map_location=device).eval()
            _check_inputs(path, module, inputs)
            return module, "pytorch_torchscript", _weight_bytes(module), 0
        if artifact == AOT_INDUCTOR:
            from backends.aot_inductor import HeldPackage

            index = -1 if device.index is None else device.index
            package = torch._inductor.aoti_load_package(str(path), device_index=index)
            held = HeldPackage(path, package, inputs, device.type)
            return held, "pytorch_aot_inductor", path.stat().st_size, held.rows()[1]
        if artifact == EXPORTED:
            program = torch.export.load(path)
            module = program.module().to(device)
            own = program.module_call_graph[0].signature
            spelled = own.forward_arg_names if own is not None and own.forward_arg_names else ()
            call = _in_order(module, (spelled, program.graph_signature.user_inputs), list(inputs))
            return call, "pytorch_export", _weight_bytes(module), rows_taken(program)[1]
    way = f": {artifact.way}" if artifact.way else ""
    raise LoadFailed(f"{path.absolute()}: {artifact.what}, where TorchScript, torch.export or AOTInductor was expected{way}")


def rows_taken(program: Any) -> tuple[int, int]:
    """The least and the most that open first dimensions of a program's inputs may be; 0: any."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    firsts = [getattr(values.get(name), "shape", ())[:1] for name in program.graph_signature.user_inputs]
    named = [size.node.expr for first in firsts for size in first if not isinstance(size, int)]
    ranges = [program.range_constraints[expr] for expr in named if expr in program.range_constraints]
    least = max((int(each.lower) for each in ranges), default=0)
    return least, min((int(each.upper) for each in ranges if each.upper < UNBOUNDED), default=0)


def _in_order(call: Callable[..., Any], known: Iterable[Sequence[str]], inputs: list[str]) -> Callable[..., Any]:
    """A program to be called with these inputs in order, if they are its own: it takes them by position.

    known: its own as `forward` spells them, and as the program does, in lower case.
    """
    for names in known:
        if list(names) != inputs and set(names) == set(inputs):
            places = [inputs.index(name) for name in names]
            return lambda *arguments: call(*(arguments[place] for place in places))
    return call


def _check_inputs(path: Path, module: Any, inputs: Iterable[str]) -> None:
    """Raises: LoadFailed, if a scripted module takes tensors within something else."""
    from backends.script_arguments import WAY, nested, script_arguments

    if refused := nested(script_arguments(module), inputs):
        raise LoadFailed(f"{path.absolute()}: input {refused.name!r} is {refused.type}, expected a tensor: {WAY}")


def parameters_of(call: Callable[..., Any]) -> list[str]:
    """The names of what `forward` of a module takes; empty where they are not known."""
    import torch

    from backends.script_arguments import script_arguments

    forward = getattr(call, "forward", None)
    if isinstance(call, torch.jit.ScriptModule):
        return [argument.name for argument in script_arguments(call)]
    if forward is None:
        return []
    parameters = inspect.signature(forward).parameters.values()
    return [] if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters) else [p.name for p in parameters]


def by_name(call: Callable[..., Any], inputs: Sequence[str]) -> Callable[..., Any]:
    """A module to be called with these inputs in order, which go where its parameters of their names are.

    One whose parameters have other names gets them by position. Optional ones may stand between those that are given.
    """
    names = parameters_of(call)
    if names[: len(inputs)] == list(inputs) or not set(inputs) <= set(names):
        return call
    return lambda *arguments: call(**dict(zip(inputs, arguments, strict=True)))


@contextlib.contextmanager
def unloadable(path: Path, artifact: Artifact) -> Iterator[None]:
    """Around the load of a file: what PyTorch raises of it, as what is wrong with it. Raises: LoadFailed."""
    import torch

    logged: list[BaseException] = []
    try:
        with _kept_from_the_log(logged):
            yield
    except LoadFailed:
        raise
    except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # no fault of the file
    except Exception as exc:
        if member := torn(path):
            raise LoadFailed(f"{path.absolute()}: {artifact.what} that is damaged, in {member}: {AGAIN}") from exc
        reason = logged[-1] if logged and "warnings above" in str(exc) else exc
        if unknown := _UNKNOWN_TYPE.match(str(reason)):
            raise LoadFailed(
                f"{path.absolute()}: {artifact.what} whose `forward` takes or returns a {unknown[1]}, which PyTorch does not "
                "know here: export it again within a module whose `forward` takes tensors and returns a tuple or dict of them"
            ) from reason
        raise LoadFailed(
            f"{path.absolute()}: {artifact.what} that PyTorch {torch.__version__} cannot load: copy it again, whole, or export "
            f"it with this version ({first_sentence(reason)})"
        ) from exc


@contextlib.contextmanager
def _kept_from_the_log(errors: list[BaseException]) -> Iterator[None]:
    """errors: gets what torch.export logs with its traceback, before it raises less (torch 2.13)."""
    thread = threading.get_ident()

    def kept(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info and record.thread == thread else None
        if error is not None:
            errors.append(error)
        return error is None

    log = logging.getLogger("torch.export")
    log.addFilter(kept)
    try:
        yield
    finally:
        log.removeFilter(kept)


def first_sentence(exc: BaseException) -> str:
    """Of what PyTorch says, which goes on with graphs and advice on itself."""
    said = str(exc).strip() or type(exc).__name__
    return said.splitlines()[0].partition(". ")[0][:200]


def _int8(torch: Any, module: Any) -> Any:
    # Deprecated in favour of torchao, a package that this one function does not need yet.
    return torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, dtype=torch.qint8)


def _weight_bytes(module: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


class TorchModel:
    def __init__(
        self,
        spec: ModelSpec,
        call: Callable[..., Any],
        device: "torch.device",
        autocast: bool,
        threads: int,
        cuda_graphs: bool,
        memory_bytes: int,
        *,
        output_indices: Sequence[int],
    ) -> None:
        self.spec = spec
        self.device = Device("cpu" if device.type == "cpu" else device.type, device.index or 0)
        self.memory_bytes = memory_bytes
        self._call: Callable[..., Any] | None = call
        self._device = device
        self._autocast = autocast
        self._threads = threads
        self._cuda_graphs = cuda_graphs
        self._output_indices = output_indices

    def open_session(self, index: int) -> Session:
        import torch

        if self._call is None:
            raise LoadFailed("the model is closed")
        if self._device.type == "cuda":
            from backends.torch_cuda import CudaSession

            with running():
                return CudaSession(
                    self.spec,
                    self._call,
                    self._device,
                    autocast=self._autocast,
                    graphs=self._cuda_graphs,
                    output_indices=self._output_indices,
                )
        _use_threads(torch, self._threads)
        return CpuSession(self.spec, self._call, self._autocast, self._output_indices)

    def close(self) -> None:
        self._call = None


class CpuSession:
    def __init__(self, spec: ModelSpec, call: Callable[..., Any], autocast: bool, output_indices: Sequence[int] = ()) -> None:
        import torch

        self._spec = spec
        self._output_indices = output_indices
        self._call: Callable[..., Any] | None = call
        self._torch = torch
        self._autocast = autocast

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        torch = self._torch
        if self._call is None:
            raise SessionLost("the session is closed")
        given = (inputs.get(tensor.name) for tensor in self._spec.inputs)
        arguments = [None if array is None else to_tensor(writeable(array)) for array in given]
        try:
            # Grad mode and autocast are per thread and must be entered for every run.
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16) if self._autocast else contextlib.nullcontext():
                results = ordered_outputs(self._spec, self._call(*arguments), self._output_indices)
                # Copied, as a module may write its next results into the same memory.
                arrays = [to_array(result).copy() for result in results]
                return {tensor.name: array for tensor, array in zip(self._spec.outputs, arrays, strict=True)}
        except BackendError:
            raise
        except Exception as exc:
            raise mapped(exc) from exc

    def close(self) -> None:
        self._call = None
