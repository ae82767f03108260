"""A double of torch-neuronx for tests, on the CPU. It claims nothing of Neuron's numerics, speed or operator support.

As the real one documents it: `trace` gives a ScriptModule that saves and loads, keeps the shapes and datatypes it was traced
with and refuses others, and cannot be loaded unless this package is imported. A process owns its visible cores from the first
load on (here: by file locks in $NEURON_DOUBLE_DIR), executions on a core go one after the other, and a core's memory has a
budget.
"""

import fcntl
import io
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import torch

PLATFORM = "neuron-double"
HOST_CORES = 4
MEMORY_BYTES = 512 << 20  # of one core

__all__ = ["PLATFORM", "DataParallel", "async_load", "lazy_load", "set_neuron_cores", "trace"]


class Cores:
    """The cores of this process: taken together at the first load, each runs one program at a time."""

    def __init__(self) -> None:
        self._locks: list[Any] = []
        self._running: dict[int, threading.Lock] = {}
        self._used_bytes: dict[int, int] = {}
        self._taking = threading.Lock()

    def take(self) -> None:
        with self._taking:
            if self._locks:
                return
            folder = Path(os.environ["NEURON_DOUBLE_DIR"])
            visible = os.environ.get("NEURON_RT_VISIBLE_CORES", "")
            cores = _numbers(visible) if visible else list(range(HOST_CORES))
            if cores != list(range(cores[0], cores[-1] + 1)):
                raise RuntimeError(f"NRT:nrt_init NEURON_RT_VISIBLE_CORES={visible}: cores must be contiguous and increasing")
            taken: list[Any] = []
            for core in cores:
                file = open(folder / f"core-{core}.lock", "a")  # noqa: SIM115  # held for the life of the process
                taken.append(file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    for held in taken:
                        held.close()
                    requested = f"NeuronCore(s) not available - Requested:nc{core}-nc{core} Available:0"
                    raise RuntimeError(f"NRT:nrt_allocate_neuron_cores {requested}: another process owns it") from None
            self._locks = taken
            for index in range(len(cores)):
                self._running[index] = threading.Lock()
                self._used_bytes[index] = 0

    def place(self, core: int, size: int) -> None:
        self.take()
        if core not in self._running:
            raise ValueError(f"NeuronCore {core} is not one of the {len(self._running)} of this process")
        if self._used_bytes[core] + size > MEMORY_BYTES:
            raise RuntimeError("Could not load the model status=4 message=Allocation Failure")
        self._used_bytes[core] += size

    def free(self, core: int, size: int) -> None:
        self._used_bytes[core] -= size

    def running(self, core: int) -> threading.Lock:
        return self._running[core]


def _numbers(visible: str) -> list[int]:
    """Of `m,n,p-q`."""
    parts = [part.split("-") for part in visible.split(",")]
    return [core for ends in parts for core in range(int(ends[0]), int(ends[-1]) + 1)]


CORES = Cores()

# An artifact's program begins with an identity; with its address that tells two loads of one artifact apart.
_ID_BYTES = 16
_Key = tuple[bytes, int]
_placed: dict[_Key, int] = {}
_loaded: dict[_Key, Any] = {}


def _key(program: torch.Tensor) -> _Key:
    return program[:_ID_BYTES].numpy().tobytes(), program.data_ptr()


def place(trace: torch.jit.ScriptModule, core: int) -> None:
    """Load an artifact's program onto a core of this process, until the artifact is collected."""
    key, size = _key(trace.program), trace.program.numel()
    CORES.place(core, size)
    _placed[key] = core
    _loaded[key] = torch.jit.load(io.BytesIO(trace.program[_ID_BYTES:].numpy().tobytes()))
    weakref.finalize(trace, _unload, key, size)


def set_neuron_cores(trace: torch.jit.ScriptModule, start_nc: int = -1, nc_count: int = -1) -> None:
    if nc_count != 1:
        raise NotImplementedError("the double places a program on one core")
    place(trace, start_nc)


def _unload(key: _Key, size: int) -> None:
    del _loaded[key]
    CORES.free(_placed.pop(key), size)


def _execute(inputs: list[torch.Tensor], program: torch.Tensor) -> list[torch.Tensor]:
    if _tracing:  # where there need not be a core
        return _as_list(_tracing[-1](*inputs))
    key = _key(program)
    if key not in _loaded:
        raise RuntimeError("the double runs only what set_neuron_cores has placed")
    source = _loaded[key]
    for i, (given, (shape, dtype)) in enumerate(zip(inputs, source.shapes, strict=True)):
        if list(given.shape) != list(shape):
            raise RuntimeError(f"Incorrect tensor shape at input tensor #{i}: received {list(given.shape)}, expected {shape}.")
        if str(given.dtype) != dtype:
            raise RuntimeError(f"Incorrect tensor data type at input tensor #{i}: received {given.dtype}, expected {dtype}.")
    with CORES.running(_placed[key]):
        outputs = _as_list(source.network(*inputs))
    if any(output.isnan().any() for output in outputs):
        raise RuntimeError("Failed to execute the model status=1003 message=Numerical Error")
    return outputs


def _as_list(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


class _Source(torch.nn.Module):
    """What a program holds: the traced network, and the shapes and datatypes it takes."""

    shapes: list[tuple[list[int], str]]

    def __init__(self, network: torch.jit.ScriptModule, shapes: list[tuple[list[int], str]]) -> None:
        super().__init__()
        self.network = network
        self.shapes = shapes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Artifact(torch.nn.Module):
    def __init__(self, program: torch.Tensor, single: bool) -> None:
        super().__init__()
        self.register_buffer("program", program)
        self._single = single

    def forward(self, *inputs: torch.Tensor) -> Any:
        outputs = torch.ops.neuron_double.execute(list(inputs), self.program)
        return outputs[0] if self._single else tuple(outputs)


def trace(
    func: Any,
    example_inputs: Any,
    *_: Any,
    input_output_aliases: Any = {},  # noqa: B006  # as documented
    compiler_workdir: Any = None,
    compiler_args: Any = None,
    partitioner_config: Any = None,
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> torch.jit.ScriptModule:
    if cpu_backend and "--target" not in (compiler_args or []):
        raise RuntimeError("cpu_backend=True requires --target in compiler_args")
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    network = torch.jit.trace(func, example_inputs)
    shapes = [(list(tensor.shape), str(tensor.dtype)) for tensor in example_inputs]
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(_Source(network, shapes)), buffer)
    program = torch.frombuffer(bytearray(os.urandom(_ID_BYTES) + buffer.getvalue()), dtype=torch.uint8)
    single = isinstance(func(*example_inputs), torch.Tensor)
    _tracing.append(network)
    try:
        return torch.jit.trace(_Artifact(program, single), example_inputs, check_trace=False)
    finally:
        _tracing.pop()


_tracing: list[Any] = []  # the network that is being traced

_library = torch.library.Library("neuron_double", "DEF")
_library.define("execute(Tensor[] inputs, Tensor program) -> Tensor[]")
_library.impl("execute", _execute, "CompositeExplicitAutograd")


def lazy_load(trace: torch.jit.ScriptModule, enable_lazy_load: bool = True) -> None:
    pass


def async_load(trace: torch.jit.ScriptModule, enable_async_load: bool = True) -> None:
    pass


class DataParallel:
    """Only its documented signature."""

    def __init__(self, model: Any, device_ids: Any = None, dim: int = 0, set_dynamic_batching: bool = True) -> None:
        raise NotImplementedError("the gateway gives each session a core of its own")
