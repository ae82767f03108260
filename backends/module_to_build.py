"""A factory's nn.Module as artifacts are made of it and held against: called as `kind: torch` calls it.

Inputs go to the parameters of `forward` that have their names, and results come as a tuple in the order of the outputs.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from backends.base import BackendError, InputRefused, LoadFailed, ModelSpec, OutputsRefused, Session, Tensors, example_inputs
from backends.datatypes import of_floats
from backends.likeness import Likeness
from backends.required import check_required
from backends.source import made_from
from backends.torch import by_name, first_sentence
from backends.torch_tensors import ordered_outputs, to_array, to_tensor

# An export is made with inputs of one size, and unrolls a loop over one (torch.nn.GRU, 2.13) as it is with that.
_KEPT: Final = (
    "it seems to have kept an open size as it was when it was made, as that of a loop: state it in `inputs` and `outputs` "
    "instead of -1, or serve the module itself, with `kind: torch` and the factory as its `model`"
)
_BOUND: Final = (
    "PyTorch found this bound: set `max_rows` and `ragged.buckets` within it, or serve the module itself, with `kind: torch` "
    "and the factory as its `model`"
)
_LINE: Final = re.compile(r'following call raised this error:\s+File "([^"]+)", line (\d+)')
_BRANCH: Final = "data-dependent"
_TO_BRANCH: Final = "; where `forward` branches on numbers of a tensor, use torch.where or torch.cond"


class ModuleToBuild(torch.nn.Module):
    _call: Callable[..., Any]

    def __init__(self, artifact: Path, source: str, module: torch.nn.Module, declared: ModelSpec) -> None:
        super().__init__()
        self.module = module
        self._artifact, self._source = artifact, source
        self._what = f"{artifact}: the export of {source}"
        self._declared = declared
        # Not as an attribute of an nn.Module: what the module changes in `forward` would be in it twice, which no export takes.
        object.__setattr__(self, "_call", by_name(module, [tensor.name for tensor in declared.inputs]))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ordered_outputs(self._declared, self._call(*inputs)))

    def run(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            return self(*arguments(self._declared, inputs))  # type: ignore[no-any-return]  # what `forward` gives

    def check_outputs(self, inputs: Tensors) -> None:
        """Raises: LoadFailed, if it gives other outputs than declared; else what the module raises."""
        try:
            self.run(inputs)
        except OutputsRefused as exc:
            raise LoadFailed(f"{self._artifact}: {self._source}: {exc}") from exc

    def compare(self, session: Session, inputs: Tensors, like: Likeness) -> None:
        """Add what a session of the artifact gives to `like`. Raises: LoadFailed, if it fails, or gives other shapes."""
        expected = self.run(inputs)
        given = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        try:
            outputs = session.run(inputs, {})
        except BackendError as exc:
            why = _BOUND if isinstance(exc, InputRefused) and " == " not in str(exc) else _KEPT
            raise LoadFailed(f"{self._what} fails on {given}, where that does not: {first_sentence(exc)}; {why}") from exc
        for tensor, result in zip(self._declared.outputs, expected, strict=True):
            want, got = to_array(result), outputs[tensor.name]
            if want.shape != got.shape:
                shapes = f"{list(got.shape)} for {given}, where that gives {list(want.shape)}"
                raise LoadFailed(f"{self._what} gives {tensor.name!r} as {shapes}; {_KEPT}")
            like.add(tensor.name, want, got)


@contextlib.contextmanager
def exporting(artifact: Path, source: str) -> Iterator[None]:
    """Around an export, without the graphs that PyTorch prints. Raises: LoadFailed, with its first sentence and the line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except (BackendError, MemoryError):
        raise
    except Exception as exc:
        cause = exc.__cause__ or exc  # of torch.onnx, what torch.export raised
        at = _LINE.search(str(cause))
        where = f" ({Path(at[1]).name}:{at[2]})" if at else ""
        way = _TO_BRANCH if _BRANCH in str(cause) else ""
        raise LoadFailed(
            f"{artifact}: PyTorch {torch.__version__} cannot export {source}{where}: {type(cause).__name__}: "
            f"{first_sentence(cause)}{way}"
        ) from exc


def arguments(declared: ModelSpec, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """Copies, which `forward` may change."""
    return tuple(to_tensor(inputs[tensor.name].copy()) for tensor in declared.inputs)


def random_inputs(
    declared: ModelSpec, rows: int, length: int, integers_below: Mapping[str, int], generator: np.random.Generator
) -> Tensors:
    """Floats around 0; integers that begin with 1, as every sequence has a token that is attended to."""
    inputs = example_inputs(declared, rows, length)
    for name, array in inputs.items():
        if of_floats(array):
            array[...] = generator.standard_normal(array.shape)
        elif array.dtype.kind in "iub" and array.ndim:
            below = 2 if array.dtype.kind == "b" else min(integers_below.get(name, 2), np.iinfo(array.dtype).max)
            array[..., 1:] = generator.integers(0, below, array[..., 1:].shape)
    return inputs


def module_to_build(
    artifact: Path, declared: ModelSpec, source: str, options: Mapping[str, Any], *, rows: int, length: int
) -> ModuleToBuild:
    """Ready to be exported, once it has been run with so many rows of so great a length. Raises: LoadFailed."""
    made = loaded_module(artifact, declared, source, options)
    made.check_outputs(example_inputs(declared, rows, length))
    return made


def loaded_module(artifact: Path, declared: ModelSpec, source: str, options: Mapping[str, Any]) -> ModuleToBuild:
    """Not run yet. Raises: LoadFailed."""
    module = made_from(source, options, key="build.options")
    if not isinstance(module, torch.nn.Module):
        raise LoadFailed(f"{artifact}: {source}: expected an nn.Module from the factory, got {type(module).__name__}")
    return ModuleToBuild(artifact, source, module.eval().requires_grad_(False), declared)


def check_declared(artifact: Path, declared: ModelSpec) -> None:
    """Raises: LoadFailed, for tensors of which no artifact can be made."""
    if not declared.inputs or not declared.outputs:
        raise LoadFailed(f"{artifact}: an export needs the model's `inputs` and `outputs` stated")
    check_required(str(artifact), declared.inputs)
    for tensor in (*declared.inputs, *declared.outputs):
        if tensor.datatype == "BYTES":
            raise LoadFailed(f"{artifact}: PyTorch has no strings, but {tensor.name!r} is BYTES: put a python model before it")
