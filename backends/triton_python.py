"""A `model.py` of Triton's Python backend, as a class of the python backend: `path/to/model.py:TritonPythonModel`.

`execute(requests)` gets one request for each of a client in the batch (its part, where that has more rows than a batch may).
A model whose `config.pbtxt` has no `dynamic_batching` gets one request at a time, as on Triton: it may take the first of
`requests` only. `initialize` gets the `config.pbtxt` of the model's folder, where there is one. What these models import,
`triton_python_backend_utils`, is `backends.triton_python_backend_utils` here, unless another is installed.

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
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from backends import triton_python_backend_utils as pb_utils
from backends.base import (
    DEADLINE_NS,
    REQUEST_ROWS,
    ExecutionFailed,
    InputRefused,
    LastPart,
    LoadFailed,
    RunCancelled,
    Tensors,
    TensorSpec,
    words_of,
)
from backends.datatypes import normalised
from backends.early_failure import EarlyFailure
from backends.refusals import Refusal
from backends.regular_file import file_bytes
from backends.source import line_of, load_object

CLASS: Final = ":TritonPythonModel"  # how what names one ends

_LEFT: Final = "the model was told that nobody waits for its answer"
_BEYOND_S: Final = 0.1  # after a deadline: the client is told of it first
_COMPLETES: Final = "auto_complete_config"
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

log = logging.getLogger(__name__)


def lend_utils() -> None:
    """Let a model import its utilities, unless they are installed."""
    if _UTILS not in sys.modules and importlib.util.find_spec(_UTILS) is None:
        sys.modules[_UTILS] = pb_utils


def adapted(model: str) -> type:
    """A class with `predict` around the one that `model` names. Raises: LoadFailed."""
    theirs = _class_of(model)
    if not callable(getattr(theirs, "execute", None)):
        raise LoadFailed(f"{model}: expected a class with a method `execute(requests)`, as Triton's Python backend has it")
    file = Path(model.rpartition(":")[0]).absolute()
    config = _config_of(model, theirs, file.parent.parent)
    decoupled = pb_utils.using_decoupled_model_transaction_policy(config)

    class Adapter(DecoupledAdapter if decoupled else ExecuteAdapter):  # type: ignore[misc]  # it is one of two
        __module__ = theirs.__module__  # in whose file the lines are that messages point at

        def __init__(self) -> None:
            super().__init__(theirs, file, config)

    return Adapter


def _class_of(model: str) -> Any:
    lend_utils()
    return load_object(model, Path(model.rpartition(":")[0]).absolute().parent.parent)  # which Triton has on the path, too


def completed(config: Any, file: Path) -> Any:
    """A message ModelConfig with what the `auto_complete_config` of a model.py adds; the same where there is none.

    file: MODEL/VERSION/model.py; it is imported only where it or a file beside it has that word, or the message no input or
    output.
    Raises: LoadFailed.
    """
    files = (file, *(each for each in file.parent.rglob("*.py") if each.is_file()))
    if config.input and config.output and not any(_COMPLETES.encode() in file_bytes(each) for each in files):
        return config
    from google.protobuf import json_format

    model = f"{file}{CLASS}"
    theirs = _class_of(model)
    if not hasattr(theirs, _COMPLETES):
        return config
    said = _completed(model, theirs, _in_json(config, file.parent.parent.name))
    try:
        return json_format.ParseDict(said, type(config)())
    except json_format.ParseError as exc:
        raise LoadFailed(f"{model}: {_COMPLETES}: not a model configuration of Triton: {exc}") from exc


def _config_of(model: str, theirs: Any, folder: Path) -> dict[str, Any]:
    """The config.pbtxt of a folder, completed by the class, as `initialize` gets it; empty where there is neither."""
    path = folder / "config.pbtxt"
    if not hasattr(theirs, _COMPLETES):
        return model_config(path)
    return _completed(model, theirs, _in_json(read_pbtxt(path), folder.name))


def _completed(model: str, theirs: Any, config: dict[str, Any]) -> dict[str, Any]:
    """What `auto_complete_config` makes of a configuration. Raises: LoadFailed."""
    try:
        given = getattr(theirs, _COMPLETES)(pb_utils.ModelConfig(json.dumps(config)))
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # it may end with sys.exit()
        raise LoadFailed(f"{model}: {_COMPLETES} raised {words_of(exc)} ({line_of(exc, theirs)})") from exc
    if not isinstance(given, pb_utils.ModelConfig):
        raise LoadFailed(f"{model}: {_COMPLETES}: expected the ModelConfig that it was given, got {type(given).__name__}")
    return given.as_dict()


class ExecuteAdapter:
    number = 0  # of the session that has it

    @classmethod
    def numbered(cls, number: int) -> type:
        """The class for one session."""
        return type(cls.__name__, (cls,), {"number": number, "__module__": cls.__module__})

    def __init__(self, theirs: Any, file: Path, config: Mapping[str, Any]) -> None:
        """file: MODEL/VERSION/model.py. config: its config.pbtxt, completed; empty: there is none."""
        self._model = theirs()
        self._runner = asyncio.Runner()  # of an `execute` that is async; has no event loop before the first
        self._responses: Sequence[pb_utils.Responses] = ()  # to the requests that run
        self._together = not config or "dynamic_batching" in config  # else Triton gives `execute` one at a time
        self._dropped: set[str] = set()  # outputs, of which the log was told
        name = self._name = config.get("name", file.parent.parent.name)
        self._outputs = [output["name"] for output in config.get("output", ())]
        if hasattr(self._model, "initialize"):
            self._model.initialize(
                {
                    "model_config": json.dumps(config),
                    "model_instance_kind": "CPU",
                    "model_instance_name": self._instance_name(config, name),
                    "model_instance_device_id": "0",
                    "model_repository": str(file.parent.parent),
                    "model_version": file.parent.name,
                    "model_name": name,
                }
            )

    def _instance_name(self, config: Mapping[str, Any], name: str) -> str:
        """As Triton calls them, group by group; sessions beyond the groups are counted on in the first."""
        groups = config.get("instance_group") or [{"name": name, "count": 1}]
        names = [f"{group['name']}_{each}" for group in groups if not group.get("passive") for each in range(group["count"])]
        return names[self.number] if self.number < len(names) else f"{groups[0]['name']}_{self.number}"

    def predict(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        """Raises: InputRefused or ExecutionFailed, with the error of the model's response; what the model raises;
        RunCancelled, once `execute` has returned without a response and nobody waits for one any more.
        """
        own = _apart(inputs, parameters)
        self._responses = [pb_utils.Responses(most=1) for _ in own]
        try:
            if self._together:
                answers = self._answers(own, self._responses, parameters)
            else:
                answers = [
                    answer
                    for one, to in zip(own, self._responses, strict=True)
                    for answer in self._answers([one], [to], parameters)
                ]
        finally:
            self._responses = ()
        return answers[0] if len(answers) == 1 else _joined(answers, own)

    def cancel(self) -> None:
        """As of a `CancellableSession`."""
        for responses in self._responses:
            responses.leave()

    def declared(self, outputs: Tensors, declared: Mapping[str, TensorSpec]) -> Tensors:
        """As Triton sends them: objects as texts, and without what is not declared, which the log is told once."""
        for name, array in outputs.items():
            if array.dtype.hasobject and name in declared and declared[name].datatype == "BYTES":
                outputs[name] = _as_texts(array)
        undeclared = outputs.keys() - declared
        if not undeclared:
            return outputs
        if new := sorted(undeclared - self._dropped):
            self._dropped.update(new)
            log.warning("%s: the outputs %s are dropped: no output of the model has that name", self._name, new)
        kept = {name: array for name, array in outputs.items() if name in declared}
        return LastPart(kept) if isinstance(outputs, LastPart) else kept

    def _answers(
        self, own: list[Tensors], responses: Sequence[pb_utils.Responses], parameters: Mapping[str, object]
    ) -> list[Tensors]:
        """What one call of `execute` answers to each of its requests. own, responses: of each. Raises: as `predict`."""
        if all(to.left for to in responses):
            raise RunCancelled(_LEFT)
        requests = [
            self._request(inputs, parameters, pb_utils.ResponseSender(to)) for inputs, to in zip(own, responses, strict=True)
        ]
        returned = self._executed(requests)
        given = [None] * len(own) if returned is None else returned
        by_sender = [request.sender_is_asked_for for request in requests]
        del requests  # what the model keeps of them may answer yet
        if (
            not isinstance(given, list | tuple)
            or len(given) != len(own)
            or any(response is None and not sends for response, sends in zip(given, by_sender, strict=True))
        ):
            raise ExecutionFailed(
                "execute: expected a list of one response for each request, or None and one by its response sender; only a "
                "model whose config.pbtxt says `decoupled` may answer otherwise"
            )
        due_s = _due_s(parameters)
        return [
            _outputs_of(_sent(to, due_s) if response is None else response)
            for response, to in zip(given, responses, strict=True)
        ]

    def _executed(self, requests: list[pb_utils.InferenceRequest]) -> Any:
        """What `execute` returns, in the end."""
        given = self._model.execute(requests)
        return self._runner.run(given) if inspect.iscoroutine(given) else given

    def _request(
        self, inputs: Tensors, parameters: Mapping[str, object], sender: pb_utils.ResponseSender
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


class DecoupledAdapter(ExecuteAdapter):
    """Calls the model from one thread, for one request at a time."""

    def __init__(self, theirs: Any, file: Path, config: Mapping[str, Any]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._main, name=f"{file.parent.parent.name}-execute", daemon=True).start()
        try:
            self._begin(lambda: ExecuteAdapter.__init__(self, theirs, file, config)).result()
        except BaseException:
            self._calls.put(None)
            raise

    def predict(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:  # type: ignore[override]
        """Raises, once `execute` has returned: InputRefused or ExecutionFailed, with the error of a response, which is told
        before; what the model raises; RunCancelled.
        """
        responses = pb_utils.Responses()
        self._responses = (responses,)
        ended = self._begin(self._execution(inputs, parameters, responses))
        try:
            for response, final in responses.taken():
                try:
                    outputs = _outputs_of(response)
                except ExecutionFailed as exc:
                    yield EarlyFailure(exc)
                    raise
                yield LastPart(outputs) if final else outputs
            if responses.left:
                raise RunCancelled(_LEFT)
        finally:
            self._responses = ()
            responses.leave()
            ended.result()

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
                if self._executed([self._request(inputs, parameters, sender)]) is not None:
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


def _apart(inputs: Tensors, parameters: Mapping[str, object]) -> list[Tensors]:
    """The inputs of each request of a batch: views."""
    rows = [int(each) for each in str(parameters.get(REQUEST_ROWS, 0)).split(",")]
    if len(rows) == 1:
        return [inputs]
    ends = accumulate(rows)
    return [{name: array[end - of_one : end] for name, array in inputs.items()} for of_one, end in zip(rows, ends, strict=True)]


def _joined(answers: list[Tensors], own: list[Tensors]) -> Tensors:
    """The outputs of a batch. own: the inputs of each answer's request.

    An output that has not a row for each of its request, or is of another size or datatype for another, is left out: if it is
    declared, the batch fails by that, and each request runs alone.
    """
    rows = [len(next(iter(inputs.values()))) for inputs in own]

    def fits(name: str, like: np.ndarray) -> bool:
        return all(
            name in answer and (answer[name].shape, answer[name].dtype) == ((of_one, *like.shape[1:]), like.dtype)
            for answer, of_one in zip(answers, rows, strict=True)
        )

    return {name: np.concatenate([each[name] for each in answers]) for name, like in answers[0].items() if fits(name, like)}


def _sent(responses: pb_utils.Responses, due_s: float | None) -> pb_utils.InferenceResponse:
    """Raises: RunCancelled, where none comes any more."""
    for response, _ in responses.taken(due_s):
        return response
    raise RunCancelled(_LEFT)


def _due_s(parameters: Mapping[str, object]) -> float | None:
    """Until when, by `time.monotonic`, somebody waits for a response; None: not known."""
    return int(str(parameters[DEADLINE_NS])) / 1e9 + _BEYOND_S if DEADLINE_NS in parameters else None


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


def _as_texts(array: np.ndarray) -> np.ndarray:
    """Elements that are no bytes as `str` has them."""
    elements = array.ravel().tolist()
    if {*map(type, elements)} <= {bytes, str}:
        return array
    return np.array([each if isinstance(each, bytes) else str(each) for each in elements], object).reshape(array.shape)


def model_config(path: Path) -> dict[str, Any]:
    """A config.pbtxt in the JSON form that `initialize` gets; empty without the file. Raises: LoadFailed."""
    return _in_json(read_pbtxt(path), path.parent.name) if path.exists() else {}


def _in_json(config: Any, name: str) -> dict[str, Any]:
    """config: a message ModelConfig. name: that of its folder.

    What it leaves out is as Triton fills it in on a machine without a GPU.
    """
    from google.protobuf.json_format import MessageToDict

    message = type(config)()
    message.CopyFrom(config)
    message.name = message.name or name
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for number, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{number}"
        group.kind = group.kind or type(group).KIND_CPU
        group.count = max(group.count, 1)
    message.default_model_filename = message.default_model_filename or "model.py"
    if not message.HasField("version_policy"):
        message.version_policy.latest.num_versions = 1
    for key in ("input_pinned_memory", "output_pinned_memory"):
        if not message.optimization.HasField(key):
            getattr(message.optimization, key).enable = True
    if message.HasField("dynamic_batching") and not message.dynamic_batching.preferred_batch_size and message.max_batch_size:
        message.dynamic_batching.preferred_batch_size.append(message.max_batch_size)
    said: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _in_numbers(said, message.DESCRIPTOR)
    return said


def _in_numbers(config: dict[str, Any], descriptor: Any) -> None:
    """Integers of 64 bits: protobuf writes them as text in JSON, Triton as numbers. The keys of a map are text in both."""
    for field in descriptor.fields:
        value = config.get(field.name)
        if value is None:
            continue
        if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            config[field.name] = [int(each) for each in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_values = field.message_type.fields_by_name["value"].message_type
            for each in value.values() if of_values is not None else ():
                _in_numbers(each, of_values)
        elif field.message_type is not None:
            for each in value if isinstance(value, list) else [value]:
                _in_numbers(each, field.message_type)


def read_pbtxt(path: Path) -> Any:
    """A config.pbtxt as the message ModelConfig; an empty one without the file. Raises: LoadFailed."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        text = file_bytes(path).decode("utf-8") if path.exists() else ""
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as exc:
        raise LoadFailed(f"{path}: not a model configuration of Triton: {exc}") from exc
