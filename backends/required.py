"""Inputs that a file of a compiled or exported model takes in every request."""

from collections.abc import Iterable
from typing import Final

from backends.base import LoadFailed, TensorSpec

REMEDY: Final = "remove `optional: true`, or serve the module itself with kind: torch"


def check_required(model: str, inputs: Iterable[TensorSpec]) -> None:
    """Raises: LoadFailed, if one is declared as optional."""
    for tensor in inputs:
        if tensor.optional:
            raise LoadFailed(f"{model}: input {tensor.name!r} is optional, but the file takes it in every request: {REMEDY}")
