"""What a model.py of Triton's Python backend imports as `triton_python_backend_utils`, as far as it has a meaning here.

The names are Triton's. Source: README of triton-inference-server/python_backend, and its src/resources/*.py.
"""

import enum
import json
import logging
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from backends.base import writeable
from backends.datatypes import NUMPY, as_array, config_datatype, datatype_of

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1
_AHEAD: Final = 1  # responses that wait to be taken; the next `send` waits with them

log = logging.getLogger("triton_python_backend")


class TritonModelException(Exception):
    """What Triton's own module raises."""


class ErrorCode(enum.IntEnum):
    """TRITONSERVER_Error_Code of Triton's tritonserver.h."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    UNKNOWN: Final = ErrorCode.UNKNOWN
    INTERNAL: Final = ErrorCode.INTERNAL
    NOT_FOUND: Final = ErrorCode.NOT_FOUND
    INVALID_ARG: Final = ErrorCode.INVALID_ARG
    UNAVAILABLE: Final = ErrorCode.UNAVAILABLE
    UNSUPPORTED: Final = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: Final = ErrorCode.ALREADY_EXISTS
    CANCELLED: Final = ErrorCode.CANCELLED

    def __init__(self, message: str = "", code: int = ErrorCode.INTERNAL) -> None:
        """Raises: ValueError, for a number that is no code."""
        self._message = message
        self._code = ErrorCode(code)

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array = np.asarray(array) if hasattr(array, "dtype") else as_array(array)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        if self._array.dtype == NUMPY["BF16"]:  # which numpy does not export
            from backends.torch_tensors import to_tensor

            return to_tensor(self._array).__dlpack__(**options)
        return writeable(self._array).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """tensor: on the CPU; a capsule, or of a type with `__dlpack__`, such as torch.Tensor."""
        if type(tensor).__name__ == "PyCapsule":
            tensor = _Capsule(tensor)
        try:
            return Tensor(name, np.from_dlpack(tensor))
        except RuntimeError:  # BF16, which numpy does not import; it leaves the capsule as it was
            if "torch" not in sys.modules:
                raise
            from torch.utils.dlpack import from_dlpack

            from backends.torch_tensors import to_array

            return Tensor(name, to_array(from_dlpack(tensor)))


class _Capsule:
    """A capsule of DLPack, as `torch.utils.dlpack.to_dlpack` makes it, in the form in which numpy takes one."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU; of a capsule that is elsewhere numpy tells so itself


class InferenceRequest:
    """model_name, exec: calls of other models are Triton's own, and refused here."""

    def __init__(
        self,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Iterable[str] = (),
        model_name: str = "",
        parameters: Mapping[str, object] | None = None,
        request_id: str = "",
        correlation_id: int | str = 0,
        *,
        flags: int = 0,
        timeout: int = 0,
        sender: "ResponseSender | None" = None,
        **others: Any,
    ) -> None:
        """timeout: µs that are left until nobody waits any more; 0: unknown. sender: of a request that was made here."""
        self._inputs = list(inputs)
        self._names = set(requested_output_names)
        self._model_name = model_name
        self._parameters = dict(parameters or {})
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._flags = flags
        self._timeout = timeout
        self._sender = sender
        self.sender_is_asked_for = False

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> set[str]:
        return self._names

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def timeout(self) -> int:
        return self._timeout

    def flags(self) -> int:
        return self._flags

    def is_cancelled(self) -> bool:
        return self._sender is not None and self._sender.is_cancelled()

    def exec(self, *arguments: Any, **options: Any) -> Any:
        raise TritonModelException(
            f"a call of the model {self._model_name!r} from within a model is Triton's own (BLS): the gateway has none; load "
            "that model in this one, or call it from the client"
        )

    async_exec = exec

    def get_response_sender(self) -> "ResponseSender":
        if self._sender is None:
            raise TritonModelException("a response sender: only of a request that `execute` was given")
        self.sender_is_asked_for = True
        return self._sender


class InferenceResponse:
    def __init__(self, output_tensors: Iterable[Tensor] = (), error: "TritonError | str | None" = None) -> None:
        self._outputs = list(output_tensors)
        self._error = TritonError(error) if isinstance(error, str) else error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def _copied(self) -> "InferenceResponse":
        return InferenceResponse([Tensor(tensor.name(), tensor.as_numpy().copy()) for tensor in self._outputs], self._error)

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class ModelConfig:
    """What `auto_complete_config` gets and returns: the config.pbtxt, to which it may add what is not said there."""

    def __init__(self, model_config: str) -> None:
        """model_config: in JSON."""
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises: ValueError, if the configuration says more."""
        if self._config["max_batch_size"] > max_batch_size:
            said = self._config["max_batch_size"]
            raise ValueError(f"set_max_batch_size: got {max_batch_size}, the configuration says {said}: expected as much")
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Raises: ValueError, if the configuration has another scheduler."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(f"set_dynamic_batching: the configuration has {other}: one of them has to go")
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Raises: ValueError, for what is no input, or another than the configuration has of that name."""
        self._add("input", input, ("optional",))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Raises: as `add_input`."""
        self._add("output", output, ())

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Raises: ValueError, if the configuration says otherwise."""
        policy = self._config.setdefault("model_transaction_policy", {})
        for key, value in transaction_policy_dict.items():
            if key != "decoupled":
                raise ValueError(f"set_model_transaction_policy: got {key!r}, expected 'decoupled'")
            if policy.setdefault(key, value) != value:
                raise ValueError(f"set_model_transaction_policy: {key}: got {value}, the configuration says {policy[key]}")

    def _add(self, kind: str, tensor: Mapping[str, Any], others: tuple[str, ...]) -> None:
        what = f"add_{kind}: {tensor.get('name')!r}"
        needed = ("name", "data_type", "dims")
        if any(key not in tensor for key in needed) or any(key not in (*needed, *others) for key in tensor):
            allowed = f", and {', '.join(others)} if need be" if others else ""
            raise ValueError(f"{what}: got {', '.join(tensor)}, expected {', '.join(needed)}{allowed}")
        for known in self._config[kind]:
            if known["name"] == tensor["name"]:
                for key, value in tensor.items():
                    if known.get(key) not in (value, "TYPE_INVALID", [], None):
                        raise ValueError(f"{what}: {key}: got {value}, the configuration says {known[key]}")
                known.update(tensor)
                return
        self._config[kind].append(dict(tensor))


class Responses:
    """What a model sends to one request, from any thread, taken by another.

    most: responses that it may send, and then has to; None: as many as it likes.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._count = 0
        self._sent: list[tuple[InferenceResponse, bool]] = []
        self._changed = threading.Condition()
        self._closed = False  # by the model
        self._failure: BaseException | None = None
        self._left = False  # nobody takes any more

    # the model's side

    @property
    def left(self) -> bool:
        return self._left

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Waits while `_AHEAD` wait as well; drops what nobody will take. Raises: TritonModelException, after the last."""
        with self._changed:
            count = self._count + (response is not None)
            if self._most is not None and count != self._most:
                did = "more than one response" if count else "complete final before sending a response"
                raise TritonModelException(f"Unable to send response. Non-decoupled model cannot send {did}.")
            if response is not None:
                self._changed.wait_for(lambda: self._closed or self._left or len(self._sent) < _AHEAD)
            if self._closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._count += response is not None
            if response is not None and not self._left:
                self._sent.append((response._copied(), final))  # the model may use its arrays again
            self._closed = final
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """There is no more, and this is why. Does nothing behind the final one."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._failure = failure
                self._changed.notify_all()

    # the taker's side

    def taken(self, due_s: float | None = None) -> Iterator[tuple[InferenceResponse, bool]]:
        """Each response, and whether it is the final one, as soon as it is sent, until then, `leave` or due_s.

        due_s: by `time.monotonic`; None: it waits as long as it takes. Raises: what `fail` was told.
        """
        while True:
            with self._changed:
                within_s = None if due_s is None else due_s - time.monotonic()
                if not self._changed.wait_for(lambda: self._sent or self._closed or self._left, within_s) or self._left:
                    self._left = True
                    return
                if not self._sent:
                    if self._failure is not None:
                        raise self._failure
                    return
                sent = self._sent.pop(0)
                self._changed.notify_all()
            yield sent

    def leave(self) -> None:
        """Take no more. From any thread."""
        with self._changed:
            self._left = True
            self._changed.notify_all()


class ResponseSender:
    """Of a request. `send` waits while nobody takes what was sent, and drops it when nobody will."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Raises: TritonModelException, after the final response, and for flags that are none."""
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"send(): expected an InferenceResponse, got {type(response).__name__}")
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException("Inference Response object must be provided when the response flags is set to zero.")
        self._responses.send(response, final=flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return self._responses.left

    def __del__(self) -> None:
        self._responses.fail(
            TritonModelException(
                "the model has let go of the request without TRITONSERVER_RESPONSE_COMPLETE_FINAL to its response sender"
            )
        )


class Logger:
    class LogLevel(enum.Enum):
        VERBOSE = logging.DEBUG
        INFO = logging.INFO
        WARNING = logging.WARNING
        ERROR = logging.ERROR

    VERBOSE, INFO, WARNING, ERROR = LogLevel

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        log.log(level.value, "%s", message)

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


TRITON_STRING_TO_NUMPY: Final = {
    name: triton_string_to_numpy(name) for name in map(config_datatype, NUMPY) if name != "TYPE_BF16"
}


def numpy_to_triton_type(dtype: Any) -> int:
    """Its number in Triton's model_config.proto."""
    from tritonclient.grpc import model_config_pb2

    return int(model_config_pb2.DataType.Value(config_datatype(datatype_of(np.empty(0, dtype)))))


def serialize_byte_tensor(tensor: np.ndarray) -> Any:
    """BYTES as Triton sends them: four bytes of length before each element; () for none, None for another type."""
    if not tensor.size:
        return ()
    if tensor.dtype.kind not in "OS":
        return None
    elements = [each if isinstance(each, bytes) else str(each).encode() for each in tensor.ravel().tolist()]
    return b"".join(struct.pack("<I", len(each)) + each for each in elements)


def deserialize_bytes_tensor(encoded: bytes) -> np.ndarray:
    """(n,) of bytes objects, from what `serialize_byte_tensor` gives."""
    elements, at = [], 0
    while at < len(encoded):
        (length,) = struct.unpack_from("<I", encoded, at)
        elements.append(bytes(encoded[at + 4 : at + 4 + length]))
        at += 4 + length
    return np.array(elements, object)
