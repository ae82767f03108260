"""A `model.py` of Triton's Python backend, as a class of the python backend: `path/to/model.py:TritonPythonModel`.

`execute(requests)` gets one request that holds the whole batch, as many rows as `max_rows` allows; requests of clients are
merged before. `initialize` gets the `config.pbtxt` of the model's folder, where there is one. What these models import,
`triton_python_backend_utils`, is `backends.triton_python_backend_utils` here, unless another is installed.

Not supported, and said so when it is asked for: decoupled responses, calls of other models (BLS), tensors by DLPack on a GPU.
Source: README of triton-inference-server/python_backend.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from backends import triton_python_backend_utils as pb_utils
from backends.base import ExecutionFailed, LoadFailed, Tensors
from backends.discovery import normalised
from backends.source import load_object

CLASS: Final = ":TritonPythonModel"  # how what names one ends

_UTILS: Final = "triton_python_backend_utils"


def lend_utils() -> None:
    """Let a model import its utilities, unless they are installed."""
    if _UTILS not in sys.modules and importlib.util.find_spec(_UTILS) is None:
        sys.modules[_UTILS] = pb_utils


def adapted(model: str) -> type:
    """A class with `predict` around the one that `model` names. Raises: LoadFailed."""
    lend_utils()
    theirs = load_object(model)
    if not callable(getattr(theirs, "execute", None)):
        raise LoadFailed(f"{model}: expected a class with a method `execute(requests)`, as Triton's Python backend has it")
    file = Path(model.rpartition(":")[0]).absolute()

    class Adapter(_Adapter):
        __module__ = theirs.__module__  # in whose file the lines are that messages point at

        def __init__(self) -> None:
            super().__init__(theirs, file)

    return Adapter


class _Adapter:
    def __init__(self, theirs: Any, file: Path) -> None:
        """file: MODEL/VERSION/model.py."""
        self._model = theirs()
        config = model_config(file.parent.parent / "config.pbtxt")
        self._outputs = [output["name"] for output in config.get("output", ())]
        if hasattr(self._model, "initialize"):
            self._model.initialize(
                {
                    "model_config": json.dumps(config),
                    "model_instance_kind": "CPU",
                    "model_instance_name": config.get("name", file.parent.parent.name),
                    "model_instance_device_id": "0",
                    "model_repository": str(file.parent.parent),
                    "model_version": file.parent.name,
                    "model_name": config.get("name", file.parent.parent.name),
                }
            )

    def predict(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        """Raises: ExecutionFailed, with the error of the model's response; what the model raises."""
        tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
        told = {name: value for name, value in parameters.items() if not name.startswith("gateway.")}
        request = pb_utils.InferenceRequest(inputs=tensors, requested_output_names=self._outputs, parameters=told)
        responses = self._model.execute([request])
        if not isinstance(responses, list | tuple) or len(responses) != 1 or responses[0] is None:
            raise ExecutionFailed(
                "execute: expected a list of one response for one request; decoupled models are not supported"
            )
        response = responses[0]
        if response.has_error():
            raise ExecutionFailed(str(response.error().message()))
        return normalised({tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()})

    def close(self) -> None:
        if hasattr(self._model, "finalize"):
            self._model.finalize()


def model_config(path: Path) -> dict[str, Any]:
    """A config.pbtxt in the JSON form that `initialize` gets; empty without the file. Raises: LoadFailed."""
    from google.protobuf.json_format import MessageToDict

    if not path.is_file():
        return {}
    config: dict[str, Any] = MessageToDict(
        read_pbtxt(path), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for tensor in (*config.get("input", ()), *config.get("output", ())):
        tensor["dims"] = [int(size) for size in tensor["dims"]]  # protobuf writes int64 as text, Triton as numbers
    return config


def read_pbtxt(path: Path) -> Any:
    """A config.pbtxt as the message ModelConfig. Raises: LoadFailed."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as exc:
        raise LoadFailed(f"{path}: not a model configuration of Triton: {exc}") from exc
