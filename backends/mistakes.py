"""What is to be checked before a load, and what is found."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final

from backends.base import ModelSpec, TensorSpec
from backends.not_known import NOT_KNOWN, NotKnown

Place = tuple[str | int, ...]

_OF_TENSOR: Final = ("name", "datatype", "shape", "optional", "labels")


@dataclass(frozen=True, slots=True)
class Mistake:
    """at: keys below the backend; of_model: below its model instead. The rest as in `gateway.documents.faults.Fault`."""

    at: Place
    found: str = ""
    expected: str = ""
    remedy: str = ""
    of_model: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be checked; NOT_KNOWN for what is at fault in itself.

    options: as for `backends.load`. build: how the artifact is made, if that is said. inputs, outputs, max_rows: as declared.
    here: whether it will run on this machine. thorough: see the module.
    """

    kind: str
    options: Mapping[str, Any]
    _: KW_ONLY
    here: bool
    thorough: bool
    build: Mapping[str, Any] | None = None
    inputs: tuple[TensorSpec, ...] = NOT_KNOWN
    outputs: tuple[TensorSpec, ...] = NOT_KNOWN
    max_rows: int = NOT_KNOWN

    @property
    def model(self) -> str:
        return str(self.options["model"])

    @property
    def file(self) -> Path:
        return Path(self.model).absolute()

    @property
    def tensors(self) -> tuple[tuple[str, tuple[TensorSpec, ...]], ...]:
        return ("inputs", self.inputs), ("outputs", self.outputs)

    @property
    def declared(self) -> ModelSpec:
        """Raises: NotKnown, unless all of it is known."""
        values = [getattr(tensor, key) for _, tensors in self.tensors for tensor in tensors for key in _OF_TENSOR]
        if any(value is NOT_KNOWN for value in (*values, self.max_rows)):
            raise NotKnown
        return ModelSpec("", self.inputs, self.outputs, self.max_rows)
