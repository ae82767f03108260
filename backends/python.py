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

import inspect
import traceback
from collections.abc import Mapping
from typing import Any

from backends.base import (
    BackendError,
    Device,
    ExecutionFailed,
    LoadFailed,
    ModelSpec,
    SessionLost,
    Tensors,
    TensorSpec,
    words_of,
)
from backends.source import load_object


def load(declared: ModelSpec, *, model: str, class_options: Mapping[str, Any] | None = None) -> "PythonModel":
    """model: `module:Class` or `path/to/file.py:Class`."""
    cls = load_object(model)
    if not callable(getattr(cls, "predict", None)):
        raise LoadFailed(f"{model}: expected a class with a method `predict(inputs)`")
    inputs = declared.inputs or _tensors(model, cls, "inputs")
    outputs = declared.outputs or _tensors(model, cls, "outputs")
    spec = ModelSpec("python", inputs, outputs, declared.max_rows, declared.row_sizes)
    return PythonModel(spec, cls, dict(class_options or {}))


def _tensors(model: str, cls: Any, attribute: str) -> tuple[TensorSpec, ...]:
    stated = getattr(cls, attribute, None)
    if not stated:
        raise LoadFailed(f"{model}: the class states no `{attribute}`: set `{attribute}` of the model in the configuration")
    return tuple(TensorSpec(*entry) for entry in stated)


class PythonModel:
    def __init__(self, spec: ModelSpec, cls: Any, options: dict[str, Any]) -> None:
        self.spec = spec
        self.device = Device("cpu")
        self.memory_bytes = 0
        self._cls = cls
        self._options = options

    def open_session(self, index: int) -> "PythonSession":
        try:
            instance = self._cls(**self._options)
            if hasattr(instance, "load"):
                instance.load()
        except BackendError:
            raise
        except Exception as exc:
            raise LoadFailed(_described(exc)) from exc
        return PythonSession(instance)

    def close(self) -> None:
        pass


class PythonSession:
    def __init__(self, instance: Any) -> None:
        self._instance = instance
        self._takes_parameters = len(inspect.signature(instance.predict).parameters) > 1

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        try:
            if self._takes_parameters:
                outputs: Tensors = self._instance.predict(inputs, parameters)
            else:
                outputs = self._instance.predict(inputs)
        except BackendError:
            raise
        except MemoryError as exc:
            raise SessionLost(_described(exc), self_inflicted=True) from exc
        except Exception as exc:
            raise ExecutionFailed(_described(exc)) from exc
        if not isinstance(outputs, dict):
            raise ExecutionFailed(f"predict: expected a dict of arrays by output name, got {type(outputs).__name__}")
        return outputs

    def close(self) -> None:
        instance, self._instance = self._instance, None
        if hasattr(instance, "close"):
            instance.close()


def _described(exc: BaseException) -> str:
    """What the model's author needs to find the fault: the exception and the line of his that raised it."""
    frames = traceback.extract_tb(exc.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{words_of(exc)}{where}"
