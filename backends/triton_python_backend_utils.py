"""What a model.py of Triton's Python backend imports as `triton_python_backend_utils`, as far as it has a meaning here.

The names are Triton's. Source: README of triton-inference-server/python_backend, and its src/resources/*.py.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from backends.datatypes import NUMPY, config_datatype, datatype_of

log = logging.getLogger("triton_python_backend")


class TritonModelException(Exception):
    """What Triton's own module raises."""


class TritonError:
    def __init__(self, message: str = "", code: int = 0) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array = np.asarray(array)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def triton_dtype(self) -> str:
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self._array.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """tensor: on the CPU, and of a type with `__dlpack__`, such as torch.Tensor."""
        return Tensor(name, np.from_dlpack(tensor))


class InferenceRequest:
    """model_name, exec: calls of other models are Triton's own, and refused here."""

    def __init__(
        self,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        parameters: Mapping[str, object] | None = None,
        request_id: str = "",
        correlation_id: int = 0,
        **others: Any,
    ) -> None:
        self._inputs = list(inputs)
        self._names = list(requested_output_names)
        self._model_name = model_name
        self._parameters = dict(parameters or {})
        self._request_id = request_id
        self._correlation_id = correlation_id

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._names

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int:
        return self._correlation_id

    def is_cancelled(self) -> bool:
        return False

    def exec(self, *arguments: Any, **options: Any) -> Any:
        raise TritonModelException(
            f"a call of the model {self._model_name!r} from within a model is Triton's own (BLS): the gateway has none; load "
            "that model in this one, or call it from the client"
        )

    async_exec = exec

    def get_response_sender(self) -> Any:
        raise TritonModelException("decoupled models, with a response sender, are not supported by this gateway")


class InferenceResponse:
    def __init__(self, output_tensors: Iterable[Tensor] = (), error: "TritonError | str | None" = None) -> None:
        self._outputs = list(output_tensors)
        self._error = TritonError(error) if isinstance(error, str) else error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Logger:
    @staticmethod
    def log(message: str, level: int | None = None) -> None:
        log.info("%s", message)

    log_info = staticmethod(lambda message: log.info("%s", message))
    log_warn = staticmethod(lambda message: log.warning("%s", message))
    log_error = staticmethod(lambda message: log.error("%s", message))
    log_verbose = staticmethod(lambda message: log.debug("%s", message))


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((entry for entry in model_config.get("input", ()) if entry["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((entry for entry in model_config.get("output", ()) if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int | str) -> Any:
    """data_type: TYPE_FP32 or FP32, or its number in Triton's model_config.proto."""
    if isinstance(data_type, int):
        from tritonclient.grpc import model_config_pb2

        data_type = str(model_config_pb2.DataType.Name(data_type))
    return triton_string_to_numpy(data_type)


def triton_string_to_numpy(name: str) -> Any:
    datatype = name.removeprefix("TYPE_")
    return NUMPY["BYTES" if datatype == "STRING" else datatype].type


def numpy_to_triton_type(dtype: Any) -> str:
    return config_datatype(datatype_of(np.empty(0, dtype)))
