"""A double of torch-neuron (Inf1, archived): the same device as the double of torch-neuronx, by its own calling convention."""

from typing import Any

import torch
import torch_neuronx
from torch_neuronx import PLATFORM

from torch_neuron import experimental

__all__ = ["PLATFORM", "experimental", "trace"]

traced = 0


def trace(model: Any, example_inputs: Any, **kwargs: Any) -> torch.jit.ScriptModule:
    global traced
    unknown = set(kwargs) - {
        "compiler_args",
        "compiler_workdir",
        "compiler_timeout",
        "fallback",
        "dynamic_batch_size",
        "verbose",
    }
    if unknown:
        raise TypeError(f"torch_neuron.trace() got unexpected keyword arguments {sorted(unknown)}")
    traced += 1
    return torch_neuronx.trace(model, example_inputs)
