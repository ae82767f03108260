"""The user's own class: tokenisers, image decoding, whatever is no artifact of a library.

    class Model:
        inputs = [("text", "BYTES", (-1, 1))]              # optional: name, datatype, shape with the batch dimension
        outputs = [("length", "INT64", (-1, 1))]

        def __init__(self, **class_options): ...
        def load(self): ...                                # optional: on the thread that will predict
        def predict(self, inputs): ...                     # or predict(self, inputs, parameters); dict of arrays in and out
        def close(self): ...                               # optional

Each session is an instance of its own. What `predict` raises fails its batch; a MemoryError, and what is no Exception (as
SystemExit), its session.
"""

from collections.abc import Mapping
from typing import Any

from backends.base import (
    BackendError,
    Device,
    ExecutionFailed,
    LoadFailed,
    ModelSpec,
    OutputsRefused,
    SessionLost,
    Tensors,
    TensorSpec,
    words_of,
)
from backends.datatypes import NUMPY
from backends.source import check_options, line_of, load_object, make, place_of, takes


def load(declared: ModelSpec, *, model: str, class_options: Mapping[str, Any] | None = None) -> "PythonModel":
    """model: `module:Class` or `path/to/file.py:Class`."""
    cls = load_object(model)
    if not callable(getattr(cls, "predict", None)):
        raise LoadFailed(f"{model}: expected a class with a method `predict(inputs)`")
    options = dict(class_options or {})
    check_options(model, cls, options, key="class_options")
    inputs = declared.inputs or _tensors(model, cls, "inputs", declared.max_rows)
    outputs = declared.outputs or _tensors(model, cls, "outputs", declared.max_rows)
    spec = ModelSpec("python", inputs, outputs, declared.max_rows, declared.row_sizes)
    return PythonModel(model, spec, cls, options)


def _tensors(model: str, cls: Any, attribute: str, max_rows: int) -> tuple[TensorSpec, ...]:
    stated = getattr(cls, attribute, None)
    if not stated:
        raise LoadFailed(f"{model}: the class states no `{attribute}`: set `{attribute}` of the model in the configuration")
    tensors = []
    for entry in stated:
        try:
            name, datatype, shape, *rest = entry
            tensor = TensorSpec(name, datatype, tuple(int(size) for size in shape), *rest)
        except (TypeError, ValueError):
            raise LoadFailed(f"{model}: `{attribute}`: got {entry!r}, expected (name, datatype, shape)") from None
        if not isinstance(datatype, str) or datatype not in NUMPY:
            raise LoadFailed(f"{model}: `{attribute}`: {name!r} has datatype {datatype!r}, expected one of {', '.join(NUMPY)}")
        if max_rows and (not tensor.shape or (tensor.shape[0] > 1 and tensor.shape[0] != max_rows)):
            raise LoadFailed(
                f"{model}: `{attribute}`: {name!r} has shape {list(tensor.shape)}: the first dimension is that of a batch's "
                "rows, expected -1 there (or set max_rows: 0 where the model has no such dimension)"
            )
        tensors.append(tensor)
    return tuple(tensors)


class PythonModel:
    def __init__(self, model: str, spec: ModelSpec, cls: Any, options: dict[str, Any]) -> None:
        self.spec = spec
        self.device = Device("cpu")
        self.memory_bytes = 0
        self._model = model
        self._cls = cls
        self._options = options

    def open_session(self, index: int) -> "PythonSession":
        instance = make(self._model, self._cls, self._options, key="class_options")
        if hasattr(instance, "load"):
            try:
                instance.load()
            except BackendError:
                raise
            except Exception as exc:
                raise LoadFailed(f"{self._model}: load raised {words_of(exc)} ({line_of(exc, self._cls)})") from exc
        if not takes(instance.predict, 1) and not takes(instance.predict, 2):
            raise LoadFailed(
                f"{self._model}: predict cannot be called, expected predict(self, inputs) or "
                f"predict(self, inputs, parameters) ({place_of(instance.predict)})"
            )
        return PythonSession(instance)

    def close(self) -> None:
        pass


class PythonSession:
    def __init__(self, instance: Any) -> None:
        self._instance = instance
        self._takes_parameters = takes(instance.predict, 2)

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        try:
            if self._takes_parameters:
                outputs: Tensors = self._instance.predict(inputs, parameters)
            else:
                outputs = self._instance.predict(inputs)
        except BackendError:
            raise
        except MemoryError as exc:
            raise SessionLost(words_of(exc, traced=True), self_inflicted=True) from exc
        except Exception as exc:
            raise ExecutionFailed(words_of(exc, traced=True)) from exc
        if not isinstance(outputs, dict):
            raise OutputsRefused(f"predict: expected a dict of arrays by output name, got {type(outputs).__name__}")
        return outputs

    def close(self) -> None:
        instance, self._instance = self._instance, None
        if hasattr(instance, "close"):
            instance.close()
