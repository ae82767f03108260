"""AWS Neuron: torch-neuronx on Inf2 and Trn1, and torch-neuron on Inf1, which AWS has ended before the Python that we need.

A model is a directory that `gateway compile` made: manifest.json, and one TorchScript artifact for each rows × length, since an
artifact has fixed shapes. All of them are loaded onto the session's core and run once when it opens. The batcher pads to them.

Cores: a NeuronCore has one owner, and a process that is told nothing takes all of them. So this backend refuses to load
unless NEURON_RT_VISIBLE_CORES names its cores, as Ray sets it for `resources: {neuron_cores: 1}`, and without Ray the command
line for each session. A session runs on the core that has the fewest of the process's open sessions, of whichever model.

PyPI's packages torch-neuronx, torch-neuron and neuronx-cc of version 1.0 are placeholders that raise ImportError; the real ones
come from AWS's Neuron repository. Written against torch-neuronx 2.9 (SDK 2.31) and checked against a double of it, not on a
device: scripts/neuron_hardware_check.py does that.
"""

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

from backends.base import (
    BackendError,
    Device,
    ExecutionFailed,
    LoadFailed,
    ModelSpec,
    SessionLost,
    Tensors,
    TensorSpec,
    example_inputs,
    narrowed,
    words_of,
)
from backends.regular_file import file_bytes
from backends.required import check_required

INF1_ENDED: Final = "AWS's last torch-neuron is for Python 3.10 and PyTorch 1.13, and the gateway needs Python 3.11"
VISIBLE_CORES: Final = "NEURON_RT_VISIBLE_CORES"
NUM_CORES: Final = "NEURON_RT_NUM_CORES"
MANIFEST: Final = "manifest.json"
OPEN_REMEDY: Final = "only the second is padded to what was compiled: state the sizes of the others"
# As in `Failed to execute the model status=1003 message=Numerical Error`. Source of the codes: Neuron's nrt_status.h.
_STATUS: Final = re.compile(r"\bstatus=(\d+)")
_OF_THE_INPUT: Final = {1002: "NRT_EXEC_BAD_INPUT", 1003: "NRT_EXEC_COMPLETED_WITH_NUM_ERR", 1006: "NRT_EXEC_OOB"}
_OF_THE_RUNTIME: Final = ("nrt_", "NRT_", "NRT:", "NEURON_RT", "NEURONDEVICE", "nrt status")  # where there is no code

_placing = threading.Lock()  # "placement is not thread-safe": Neuron core placement guide
_counting = threading.Lock()
_cores: Final[WeakKeyDictionary["NeuronSession", int]] = WeakKeyDictionary()  # of the open sessions, from 0 within the process


def library(target: str) -> ModuleType:
    """torch_neuronx, or torch_neuron for inf1. Raises: LoadFailed, if it is missing or PyPI's placeholder."""
    name = "torch_neuron" if target == "inf1" else "torch_neuronx"
    try:
        module = import_module(name)
    except ImportError as exc:
        remedy = INF1_ENDED if target == "inf1" else "install it from AWS's Neuron repository"
        raise LoadFailed(f"{name} cannot be imported ({exc}): {remedy}; PyPI's package of that name is a placeholder") from exc
    if not hasattr(module, "trace"):
        raise LoadFailed(f"{name} at {module.__file__} has no trace(): it is a placeholder, not AWS's package")
    return module


def platform(module: ModuleType) -> str:
    """`neuron`, or what a double of the library calls itself."""
    return str(getattr(module, "PLATFORM", "neuron"))


def visible_cores(value: str | None, counted: str | None = None) -> tuple[int, ...]:
    """The cores of NEURON_RT_VISIBLE_CORES: "3", "0,1", "0-3", or of both kinds, each the next of the one before.

    counted: NEURON_RT_NUM_CORES, of which the runtime takes any that are free; the other goes before it.
    Raises: LoadFailed, if there are none, or others, which the runtime refuses. Source: Neuron's nrt-developer-guide.
    """
    if not (value or "").strip():
        if counted is not None:
            raise LoadFailed(
                f"{NUM_CORES}={counted!r} does not say which cores are this process's: set {VISIBLE_CORES} in its place, such "
                "as 0,1 or 0-3"
            )
        raise LoadFailed(
            f"no NeuronCore was given to this process ({VISIBLE_CORES} is {'unset' if value is None else 'empty'}): set "
            "`placement: replicas` and `resources: {neuron_cores: 1}`, or the variable where there is no Ray"
        )
    cores: list[int] = []
    try:
        for part in str(value).split(","):
            first, _, last = part.strip().partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    except ValueError as exc:
        raise LoadFailed(f"{VISIBLE_CORES}={value!r}: expected core numbers such as 0,1 or 0-3") from exc
    if not cores or cores != list(range(cores[0], cores[-1] + 1)):
        raise LoadFailed(
            f"{VISIBLE_CORES}={value!r}: expected consecutive, increasing core numbers such as 0,1 or 0-3: the runtime takes "
            "no others; set `resources: {neuron_cores: 1}`, so that each replica gets one"
        )
    return tuple(cores)


def load(declared: ModelSpec, *, model: str) -> "NeuronModel":
    """model: a directory that `gateway compile` made."""
    folder = Path(model)
    made = _manifest(folder)
    module = library(made.target)
    if platform(module) != made.compiled.platform:
        raise LoadFailed(f"{model}: compiled for {made.compiled.platform}, but {module.__name__} is {platform(module)}")
    # The runtime reads them too: the first is how Ray hands cores out.
    cores = visible_cores(os.environ.get(VISIBLE_CORES), os.environ.get(NUM_CORES))
    check_required(model, declared.inputs)
    check_padded(model, declared.inputs)
    inputs = narrowed(made.compiled.inputs, declared.inputs, f"{model}: input")
    outputs = narrowed(made.compiled.outputs, declared.outputs, f"{model}: output")
    row_sizes = tuple(size for size in made.compiled.row_sizes if size <= declared.max_rows)
    if not row_sizes:
        raise LoadFailed(f"{model}: compiled for {list(made.compiled.row_sizes)} rows, but max_rows is {declared.max_rows}")
    spec = ModelSpec(made.compiled.platform, inputs, outputs, row_sizes[-1], row_sizes, reads_parameters=False)
    return NeuronModel(spec, made, module, folder, cores)


@dataclass(frozen=True, slots=True)
class _Manifest:
    """compiled: its tensors, as the programs take and give them by position, and its rows, ascending.

    programs: by rows and length (0 where no input has one).
    """

    target: str
    compiled: ModelSpec
    programs: Mapping[tuple[int, int], Path]


def _manifest(folder: Path) -> _Manifest:
    """Raises: LoadFailed."""
    try:
        plain = json.loads(file_bytes(folder / MANIFEST))
        rows, lengths = sorted(plain["row_sizes"]), plain["lengths"]
        inputs, outputs = _tensors(plain["inputs"]), _tensors(plain["outputs"])
        programs = {(r, n): folder / plain["artifacts"][f"{r}x{n}"] for r in rows for n in lengths}
        made = _Manifest(plain["target"], ModelSpec(plain["platform"], inputs, outputs, rows[-1], tuple(rows)), programs)
    except PermissionError as exc:
        raise LoadFailed(f"{exc.filename}: {exc.strerror}: let the user that serves read the folder and its files") from exc
    except (OSError, ValueError) as exc:
        raise LoadFailed(f"{folder}: no compiled model here, `gateway compile` makes one: {exc}") from exc
    except (KeyError, TypeError, IndexError, AttributeError) as exc:
        raise LoadFailed(f"{folder / MANIFEST}: damaged, `gateway compile` makes it anew: {words_of(exc)}") from exc
    if missing := [path.name for path in programs.values() if not path.is_file()]:
        raise LoadFailed(f"{folder}: {', '.join(missing)} is missing: copy the folder whole, or `gateway compile` it again")
    return made


def open_behind(tensor: TensorSpec) -> bool:
    """Whether a dimension is open that is not padded to a compiled length, as only the second is."""
    return -1 in tensor.shape[2:]


def check_padded(model: str, inputs: Iterable[TensorSpec]) -> None:
    """Raises: LoadFailed."""
    for tensor in inputs:
        if open_behind(tensor):
            raise LoadFailed(
                f"{model}: input {tensor.name!r} is open behind its second dimension, {list(tensor.shape)}: {OPEN_REMEDY}"
            )


def _tensors(plain: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(entry["name"], entry["datatype"], tuple(entry["shape"])) for entry in plain)


class NeuronModel:
    def __init__(self, spec: ModelSpec, made: _Manifest, module: ModuleType, folder: Path, cores: tuple[int, ...]) -> None:
        self.spec = spec
        self.device = Device("neuron", cores[0])
        self.memory_bytes = sum(path.stat().st_size for path in made.programs.values())
        self._made = made
        self._module = module
        self._folder = folder
        self._cores = cores

    def open_session(self, index: int) -> "NeuronSession":
        import torch

        from backends.torch_tensors import reason_of

        programs: dict[tuple[int, int], Any] = {}
        session = NeuronSession(self.spec, self._made.compiled, programs)
        core = _take_core(session, index, len(self._cores))
        try:
            for (rows, length), path in self._made.programs.items():
                if rows <= self.spec.max_rows:
                    with _placing:
                        program = torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # untyped in torch 2.13
                        set_neuron_cores(self._module)(program, start_nc=core, nc_count=1)
                    programs[rows, length] = program
            for rows, length in programs:
                session.run(example_inputs(self.spec, rows, length), {})
        except (ExecutionFailed, SessionLost, RuntimeError, OSError) as exc:
            session.close()
            reason = exc if isinstance(exc, BackendError) else reason_of(exc)
            raise LoadFailed(f"{self._folder}: core {self._cores[core]}: {reason}") from exc
        return session

    def close(self) -> None:
        pass


def _take_core(session: "NeuronSession", index: int, cores: int) -> int:
    """The one with the fewest open sessions; of several, the next from session `index`'s own on."""
    with _counting:
        open_on = Counter(_cores.values())
        _cores[session] = core = min(range(cores), key=lambda core: (open_on[core], (core - index) % cores))
        return core


def set_neuron_cores(module: ModuleType) -> Any:
    """The package's own; up to torch-neuronx of SDK 2.24, and in torch-neuron, `experimental` has it."""
    return getattr(module, "set_neuron_cores", None) or module.experimental.set_neuron_cores


class NeuronSession:
    """programs, compiled: as of `_Manifest`."""

    def __init__(self, spec: ModelSpec, compiled: ModelSpec, programs: dict[tuple[int, int], Any]) -> None:
        self._spec = spec
        self._compiled = compiled
        self._programs = programs
        self._ragged = next((tensor.name for tensor in spec.inputs if -1 in tensor.shape[1:]), None)

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        import torch

        from backends.torch_tensors import ordered_outputs, reason_of, to_array, to_tensor

        rows = next(iter(inputs.values())).shape[0]
        length = inputs[self._ragged].shape[1] if self._ragged else 0
        program = self._programs.get((rows, length))
        if program is None:
            if not self._programs:
                raise SessionLost("the session is closed")
            compiled = ", ".join(f"{r} × {n}" for r, n in self._programs)
            raise ExecutionFailed(f"no artifact for {rows} rows × length {length}, compiled: {compiled}; check ragged.buckets")
        try:
            with torch.inference_mode():
                given = program(*(to_tensor(inputs[t.name]) for t in self._compiled.inputs))
                by_name = dict(zip(self._compiled.output_by_name, ordered_outputs(self._compiled, given), strict=True))
        except BackendError:
            raise
        except Exception as exc:
            raise (SessionLost if _lost(str(exc)) else ExecutionFailed)(reason_of(exc)) from exc
        return {tensor.name: to_array(by_name[tensor.name]) for tensor in self._spec.outputs}

    def close(self) -> None:
        self._programs = {}  # the runtime unloads an artifact when its last reference goes
        with _counting:
            _cores.pop(self, None)


def _lost(message: str) -> bool:
    """Whether the runtime says that the device, not the input, is at fault."""
    if statuses := _STATUS.findall(message):
        return int(statuses[-1]) not in _OF_THE_INPUT  # before it, those of what was logged on the way
    if any(name in message for name in _OF_THE_INPUT.values()):
        return False
    return any(word in message for word in _OF_THE_RUNTIME)
