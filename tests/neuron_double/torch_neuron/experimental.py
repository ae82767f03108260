"""The placement calls of the double, which torch-neuron never had elsewhere."""

from torch_neuronx import set_neuron_cores

__all__ = ["set_neuron_cores"]
