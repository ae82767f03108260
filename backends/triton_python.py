"""A `model.py` of Triton's Python backend, as a class of the python backend: `path/to/model.py:TritonPythonModel`.

`execute(requests)` gets one request that holds the whole batch, as many rows as `max_rows` allows; requests of clients are
merged before, except those of a decoupled model, which come alone. `initialize` gets the `config.pbtxt` of the model's folder,
where there is one. What these models import, `triton_python_backend_utils`, is `backends.triton_python_backend_utils` here,
unless another is installed.

A decoupled model (`model_transaction_policy { decoupled: true }`) answers in parts. Its code runs on a thread of its own, so
that `send` can wait until a client takes what was sent before. Where nobody waits for the rest, `is_cancelled` says so, what is
still sent is dropped, and the session is free when `execute` returns. An error response ends the answer.

Not supported, and said so when it is asked for: calls of other models (BLS), tensors by DLPack on a GPU.
Source: README of triton-inference-server/python_backend.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from backends import triton_python_backend_utils as pb_utils
from backends.base import DEADLINE_NS, ExecutionFailed, InputRefused, LastPart, LoadFailed, RunCancelled, Tensors
from backends.datatypes import normalised
from backends.early_failure import EarlyFailure
from backends.refusals import Refusal
from backends.regular_file import file_bytes
from backends.source import load_object

CLASS: Final = ":TritonPythonModel"  # how what names one ends

_UTILS: Final = "triton_python_backend_utils"
_REFUSALS: Final[dict[pb_utils.ErrorCode, Refusal]] = {  # UNKNOWN and INTERNAL: the model has failed
    pb_utils.ErrorCode.NOT_FOUND: "not_found",
    pb_utils.ErrorCode.INVALID_ARG: "invalid_argument",
    pb_utils.ErrorCode.UNAVAILABLE: "backend_unreachable",
    pb_utils.ErrorCode.UNSUPPORTED: "unsupported",
    pb_utils.ErrorCode.ALREADY_EXISTS: "already_exists",
    pb_utils.ErrorCode.CANCELLED: "cancelled",
}
# Source: Triton's extension_sequence.md.
_FLAGS: Final = {
    "sequence_start": pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    "sequence_end": pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
}


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
    decoupled = pb_utils.using_decoupled_model_transaction_policy(model_config(_config_of(file)))

    class Adapter(DecoupledAdapter if decoupled else _Adapter):  # type: ignore[misc]  # it is one of two
        __module__ = theirs.__module__  # in whose file the lines are that messages point at

        def __init__(self) -> None:
            super().__init__(theirs, file)

    return Adapter


def _config_of(file: Path) -> Path:
    return file.parent.parent / "config.pbtxt"


class _Adapter:
    def __init__(self, theirs: Any, file: Path) -> None:
        """file: MODEL/VERSION/model.py."""
        self._model = theirs()
        self._runner = asyncio.Runner()  # of an `execute` that is async; has no event loop before the first
        config = model_config(_config_of(file))
        name = config.get("name", file.parent.parent.name)
        self._outputs = [output["name"] for output in config.get("output", ())]
        if hasattr(self._model, "initialize"):
            self._model.initialize(
                {
                    "model_config": json.dumps(config),
                    "model_instance_kind": "CPU",
                    "model_instance_name": f"{config['instance_group'][0]['name'] if config else name}_0",
                    "model_instance_device_id": "0",
                    "model_repository": str(file.parent.parent),
                    "model_version": file.parent.name,
                    "model_name": name,
                }
            )

    def predict(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        """Raises: InputRefused or ExecutionFailed, with the error of the model's response; what the model raises."""
        responses = self._executed(self._request(inputs, parameters))
        if not isinstance(responses, list | tuple) or len(responses) != 1 or responses[0] is None:
            raise ExecutionFailed(
                "execute: expected a list of one response for one request; only a model whose config.pbtxt says `decoupled` "
                "may answer otherwise"
            )
        return _outputs_of(responses[0])

    def _executed(self, request: pb_utils.InferenceRequest) -> Any:
        """What `execute` returns, in the end."""
        given = self._model.execute([request])
        return self._runner.run(given) if inspect.iscoroutine(given) else given

    def _request(
        self, inputs: Tensors, parameters: Mapping[str, object], sender: pb_utils.ResponseSender | None = None
    ) -> pb_utils.InferenceRequest:
        tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
        told = {name: value for name, value in parameters.items() if not name.startswith("gateway.")}
        correlation_id = _correlation_id(told.pop("sequence_id", 0))
        flags = sum(flag for name, flag in _FLAGS.items() if _is_set(name, told.pop(name, False)))
        timeout_us = 0
        if DEADLINE_NS in parameters:
            timeout_us = max(1, (int(str(parameters[DEADLINE_NS])) - time.monotonic_ns()) // 1000)
        return pb_utils.InferenceRequest(
            tensors,
            self._outputs,
            parameters=told,
            correlation_id=correlation_id,
            flags=flags,
            timeout=timeout_us,
            sender=sender,
        )

    def close(self) -> None:
        with contextlib.closing(self._runner):
            if hasattr(self._model, "finalize"):
                self._model.finalize()


class DecoupledAdapter(_Adapter):
    """Calls the model from one thread, for one request at a time."""

    def __init__(self, theirs: Any, file: Path) -> None:
        self._responses: pb_utils.Responses | None = None  # while they are taken
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._main, name=f"{file.parent.parent.name}-execute", daemon=True).start()
        try:
            self._begin(lambda: _Adapter.__init__(self, theirs, file)).result()
        except BaseException:
            self._calls.put(None)
            raise

    def predict(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:  # type: ignore[override]
        """Raises, once `execute` has returned: InputRefused or ExecutionFailed, with the error of a response, which is told
        before; what the model raises; RunCancelled.
        """
        responses = self._responses = pb_utils.Responses()
        ended = self._begin(self._execution(inputs, parameters, responses))
        try:
            for response, final in responses:
                try:
                    outputs = _outputs_of(response)
                except ExecutionFailed as exc:
                    yield EarlyFailure(exc)
                    raise
                yield LastPart(outputs) if final else outputs
            if responses.left:
                raise RunCancelled("the model was told that nobody waits for its answer")
        finally:
            self._responses = None
            responses.leave()
            ended.result()

    def cancel(self) -> None:
        """As of a `CancellableSession`."""
        responses = self._responses
        if responses is not None:
            responses.leave()

    def close(self) -> None:
        try:
            self._begin(super().close).result()
        finally:
            self._calls.put(None)

    def _execution(
        self, inputs: Tensors, parameters: Mapping[str, object], responses: pb_utils.Responses
    ) -> Callable[[], None]:
        def execute() -> None:
            # Held while `execute` runs: what that raises is told first. Behind it, a model that keeps no sender has let go.
            sender = pb_utils.ResponseSender(responses)
            try:
                if self._executed(self._request(inputs, parameters, sender)) is not None:
                    raise ExecutionFailed("execute: the model is decoupled: expected None, its responses go to the sender")
            except BaseException as exc:
                responses.fail(exc)

        return execute

    # the model's thread

    def _begin(self, call: Callable[[], None]) -> "Future[None]":
        future: Future[None] = Future()
        self._calls.put((call, future))
        return future

    def _main(self) -> None:
        while (task := self._calls.get()) is not None:
            call, future = task
            try:
                call()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(None)
            del task, call, future


def _correlation_id(sequence_id: object) -> int | str:
    """Raises: InputRefused."""
    if isinstance(sequence_id, str):
        return sequence_id
    if isinstance(sequence_id, bool) or not isinstance(sequence_id, int):
        raise InputRefused(f"parameter 'sequence_id': got {sequence_id!r}, expected an integer or a string")
    return sequence_id % 2**64  # it has no sign; gRPC's int64_param, in which clients send it, has one


def _is_set(name: str, value: object) -> bool:
    """Raises: InputRefused."""
    if not isinstance(value, bool):
        raise InputRefused(f"parameter '{name}': got {value!r}, expected true or false")
    return value


def _outputs_of(response: pb_utils.InferenceResponse) -> Tensors:
    """Raises: InputRefused or ExecutionFailed, with the error of the response."""
    error = response.error()
    if error is not None:
        code = _REFUSALS.get(error.code())
        raise InputRefused(str(error.message()), code=code) if code else ExecutionFailed(str(error.message()))
    return normalised({tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()})


def model_config(path: Path) -> dict[str, Any]:
    """A config.pbtxt in the JSON form that `initialize` gets; empty without the file. Raises: LoadFailed.

    Name and instance groups that it leaves out are as Triton fills them in on a machine without a GPU.
    """
    from google.protobuf.json_format import MessageToDict

    if not path.exists():
        return {}
    message = read_pbtxt(path)
    message.name = message.name or path.parent.name
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for number, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{number}"
        group.kind = group.kind or type(group).KIND_CPU
        group.count = max(group.count, 1)
    config: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for tensor in (*config.get("input", ()), *config.get("output", ())):
        tensor["dims"] = [int(size) for size in tensor["dims"]]  # protobuf writes int64 as text, Triton as numbers
    return config


def read_pbtxt(path: Path) -> Any:
    """A config.pbtxt as the message ModelConfig. Raises: LoadFailed."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(file_bytes(path).decode("utf-8"), model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as exc:
        raise LoadFailed(f"{path}: not a model configuration of Triton: {exc}") from exc
