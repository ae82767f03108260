"""A factory's nn.Module as artifacts are made of it and held against: called as `kind: torch` calls it.

Inputs go to the parameters of `forward` that have their names, and results come as a tuple in the order of the outputs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from backends.base import LoadFailed, ModelSpec, OutputsRefused, Tensors, example_inputs
from backends.required import check_required
from backends.source import made_from
from backends.torch import by_name
from backends.torch_tensors import ordered_outputs, to_tensor


class ModuleToBuild(torch.nn.Module):
    _call: Callable[..., Any]

    def __init__(self, module: torch.nn.Module, declared: ModelSpec) -> None:
        super().__init__()
        self.module = module
        self._declared = declared
        # Not as an attribute of an nn.Module: what the module changes in `forward` would be in it twice, which no export takes.
        object.__setattr__(self, "_call", by_name(module, [tensor.name for tensor in declared.inputs]))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ordered_outputs(self._declared, self._call(*inputs)))

    def run(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            return self(*arguments(self._declared, inputs))  # type: ignore[no-any-return]  # what `forward` gives


def arguments(declared: ModelSpec, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """Copies, which `forward` may change."""
    return tuple(to_tensor(inputs[tensor.name].copy()) for tensor in declared.inputs)


def module_to_build(
    artifact: Path, declared: ModelSpec, source: str, options: Mapping[str, Any], *, rows: int, length: int
) -> ModuleToBuild:
    """Ready to be exported, once it has been run with so many rows of so great a length. Raises: LoadFailed."""
    module = made_from(source, options, key="build.options")
    if not isinstance(module, torch.nn.Module):
        raise LoadFailed(f"{artifact}: {source}: expected an nn.Module from the factory, got {type(module).__name__}")
    made = ModuleToBuild(module.eval().requires_grad_(False), declared)
    try:
        made.run(example_inputs(declared, rows, length))
    except OutputsRefused as exc:
        raise LoadFailed(f"{artifact}: {source}: {exc}") from exc
    return made


def check_declared(artifact: Path, declared: ModelSpec) -> None:
    """Raises: LoadFailed, for tensors of which no artifact can be made."""
    if not declared.inputs or not declared.outputs:
        raise LoadFailed(f"{artifact}: an export needs the model's `inputs` and `outputs` stated")
    check_required(str(artifact), declared.inputs)
    for tensor in (*declared.inputs, *declared.outputs):
        if tensor.datatype == "BYTES":
            raise LoadFailed(f"{artifact}: PyTorch has no strings, but {tensor.name!r} is BYTES: put a python model before it")
