"""Tensors between numpy and PyTorch, and what PyTorch raises, as ours. For every backend with PyTorch in it."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from backends.base import BackendError, ExecutionFailed, InputRefused, ModelSpec, OutputsRefused, SessionLost
from backends.datatypes import fields_of

if TYPE_CHECKING:
    import torch

DATATYPES: Final = {  # by what PyTorch calls them
    "torch.bool": "BOOL", "torch.uint8": "UINT8", "torch.uint16": "UINT16", "torch.uint32": "UINT32", "torch.uint64": "UINT64",
    "torch.int8": "INT8", "torch.int16": "INT16", "torch.int32": "INT32", "torch.int64": "INT64", "torch.float16": "FP16",
    "torch.bfloat16": "BF16", "torch.float32": "FP32", "torch.float64": "FP64",
}  # fmt: skip
_GUARD: Final = "AssertionError: Guard failed: "  # of torch.export, as `x.size()[0] <= 8`
_FRAMES: Final = re.compile("\nException raised from |\n\nAt:\n")  # behind what C++ raises, or passes on from Python
_BF16: Final = np.dtype(ml_dtypes.bfloat16)


def mapped(exc: Exception) -> BackendError:
    """The seam: what PyTorch raised, as ours. A device out of memory or lost costs the session, all else the batch.

    Sizes that a program of torch.export was not exported for are the request's.
    """
    import torch

    lost = isinstance(exc, MemoryError | torch.OutOfMemoryError | torch.AcceleratorError)
    message = reason_of(exc)
    if isinstance(exc, AssertionError) and message.startswith(_GUARD):
        return exported_for(message.removeprefix(_GUARD))
    if lost:
        return SessionLost(message, self_inflicted=isinstance(exc, MemoryError | torch.OutOfMemoryError))
    return ExecutionFailed(message)


def reason_of(exc: Exception) -> str:
    """The type, and of what it says the last line before frames of C++: before it stands where in the program it was raised."""
    said, kind = _FRAMES.split(str(exc))[0].strip().splitlines()[-1:], type(exc).__name__
    # What comes from TorchScript has the type in front, and twice where it began in Python.
    return f"{kind}: {said[0].removeprefix(f'{kind}: ').removeprefix(f'{kind}: ') if said else ''}"


def exported_for(bound: str) -> InputRefused:
    return InputRefused(f"it was exported for inputs with {bound}")


def to_tensor(array: np.ndarray) -> "torch.Tensor":
    """View an array as a CPU tensor, a read-only one, too; copied only where it is not contiguous or not aligned."""
    import torch

    array = np.require(array, requirements=("C", "A"))  # DLPack of negative strides aborts the process (torch 2.13)
    if array.dtype == _BF16:
        return torch.utils.dlpack.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.utils.dlpack.from_dlpack(array)


def to_array(tensor: "torch.Tensor") -> np.ndarray:
    """View a CPU tensor as an array; copied where it is one that PyTorch is still to negate."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(_BF16)
    return tensor.resolve_conj().resolve_neg().numpy()


def check_tensor(name: str, result: Any) -> None:
    """Raises: OutputsRefused, if a result of a module is no tensor."""
    import torch

    if not isinstance(result, torch.Tensor):
        raise OutputsRefused(
            f"output {name!r}: expected a tensor, the module gave {type(result).__name__}: return a tensor for each output, "
            "or a dict of them, and declare only these"
        )


def ordered_outputs(spec: ModelSpec, results: Any, indices: Sequence[int] = ()) -> list["torch.Tensor"]:
    """A module's results in the spec's order, by name from a mapping, and from a named tuple with any field of these names.

    indices: which of a tuple or list the outputs are, counted from 0; empty: all of it. What autocast left in half precision
    comes in the FP32 that was declared. Raises: OutputsRefused, if there are more or fewer, one is missing, or is no tensor.
    """
    import torch

    if not {tensor.name for tensor in spec.outputs}.isdisjoint(fields_of(results)):
        results = results._asdict()
    if isinstance(results, Mapping):
        missing = [tensor.name for tensor in spec.outputs if tensor.name not in results]
        if missing:
            raise OutputsRefused(f"the module returned {sorted(results)}, without the outputs {missing}")
        results = [results[tensor.name] for tensor in spec.outputs]
    else:
        results = results if isinstance(results, tuple | list) else (results,)
        if indices and (most := max(indices)) >= len(results):
            raise OutputsRefused(
                f"output {spec.outputs[indices.index(most)].name!r}: expected result {most}, counted from 0 (`output_indices`; "
                f"of a Triton repository the number in its name), the module returned {len(results)}: correct that number"
            )
        results = [results[index] for index in indices] if indices else results
    if len(results) != len(spec.outputs):
        raise OutputsRefused(f"the module returned {len(results)} results, the spec has {len(spec.outputs)} outputs")
    for tensor, result in zip(spec.outputs, results, strict=True):
        check_tensor(tensor.name, result)
    return [
        result.float() if tensor.datatype == "FP32" and result.dtype == torch.bfloat16 else result
        for tensor, result in zip(spec.outputs, results, strict=True)
    ]
