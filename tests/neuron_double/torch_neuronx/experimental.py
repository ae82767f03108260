"""The placement calls of the double."""

import torch


def set_neuron_cores(trace: torch.jit.ScriptModule, start_nc: int = -1, nc_count: int = -1) -> None:
    from torch_neuronx import place

    if nc_count != 1:
        raise NotImplementedError("the double places a program on one core")
    place(trace, start_nc)
