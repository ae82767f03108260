"""Weights for autocast: those that it would turn to bf16 in every run are turned once.

Autocast keeps what it has cast only of parameters that take gradients, which served ones do not: each run casts each weight and
bias anew, with a launch for each on a GPU. Rounded once they are the same numbers, so outputs stay the same to the bit.

What is turned is of layers of exactly the types below, in fp32, and held once: an Embedding tied with a Linear keeps its own.
A layer stays as it is below a module that may use its weights otherwise than by calling it, or with autocast off, or that asks
for a dtype of its own: its class is read for that. So torch.nn.MultiheadAttention and TransformerEncoderLayer stay whole.
What a function beside the classes does with a layer's weights, or around a call of it, is not seen.
"""

import inspect
import re
from collections import Counter
from typing import Final

import torch
from torch import nn

# Their operators are of lower precision for autocast on CPU and on CUDA, which Bilinear's is not.
# Source: "Autocast Op Reference" of PyTorch's documentation of torch.amp; aten/src/ATen/autocast_mode.h (2.13)
_LAYERS: Final = frozenset(
    (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
)
_READS: Final = re.compile(r"\.(?:weight|bias)\b(?!\.(?:dtype|device|shape)\b)|\bparameters\(|\bself\.dtype\b")


def cast_once(module: nn.Module) -> None:
    """Turn to bf16, in place, the weights and biases that autocast turns to it in every run."""
    held = Counter(id(tensor) for each in module.modules() for tensor in each.parameters(recurse=False))
    parents = [each for each in module.modules() if type(each) not in _LAYERS and any(True for _ in each.children())]
    readers = {kind for kind in {type(parent) for parent in parents} if _may_read(kind)}
    kept = {each for parent in parents if type(parent) in readers or "forward" in vars(parent) for each in parent.modules()}
    for layer in module.modules():
        if type(layer) not in _LAYERS or layer in kept or "forward" in vars(layer):
            continue
        for name, tensor in list(layer.named_parameters(recurse=False)):
            if type(tensor) is nn.Parameter and tensor.dtype == torch.float32 and held[id(tensor)] == 1:
                layer.register_parameter(name, nn.Parameter(tensor.detach().bfloat16(), requires_grad=False))


def _may_read(kind: type[nn.Module]) -> bool:
    """Whether a class may read its layers' weights, or turn autocast off; so taken of one without a text."""
    try:
        return "autocast" in inspect.getsource(kind) or _READS.search(inspect.getsource(kind.forward)) is not None
    except (OSError, TypeError):
        return True
