"""A model on Triton Inference Server: one gRPC call per batch, of a decoupled model one per request.

The server's metadata and configuration are read at load and held against what was declared. Triton's own dynamic batching
adds its delay to ours: it should have none, and a warning says so when it has.

Health is passive. A python model whose process died stays "ready" for Triton, while every call takes a second and fails
(seen on 2.51): so its error is known by its words, the session is lost, and opening the next one first unloads and loads the
model. A server that cannot be reached loses the session too; it is reopened on the next url that has the model ready.

With several urls, session i begins with url i modulo their number. Each session has a connection of its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from math import inf, prod
from typing import Any, Final

import numpy as np

from backends.base import (
    DEADLINE_NS,
    TRACEPARENT,
    TRACESTATE,
    BackendError,
    Device,
    ExecutionFailed,
    InputRefused,
    LastPart,
    LoadFailed,
    ModelSpec,
    OutputsRefused,
    RunCancelled,
    SessionLost,
    SpecMismatch,
    Tensors,
    TensorSpec,
    shapes_agree,
)
from backends.datatypes import NUMPY
from backends.early_failure import EarlyFailure
from backends.refusals import Refusal
from backends.triton_changes import changes
from backends.triton_connection import PROBE_TIMEOUT_S, AnswerInParts, Metadata, TritonConnection
from backends.triton_shared_memory import WORTH_BYTES, AbandonedRegions, SessionRegion
from gateway.errors import InvalidArgument
from gateway.wire.tensors import numpy_dtype, tensor_from_bytes, tensor_to_bytes

# What Triton answers, as INTERNAL, when a model's process or device is gone; another batch would meet the same.
_DEAD: Final = ("is not healthy", "CUDA error", "CUDA failure", "device-side assert")
# What it answers of a model that was unloaded, and when it ends; in a stream, without a code.
_GONE: Final = ("Request for unknown model: '{}'", "Server is stopping", "has stopped accepting")
# As a model may say of a request, by its own `TritonError`; UNKNOWN and INTERNAL: it has failed.
_REFUSALS: Final[dict[str, Refusal]] = {
    "INVALID_ARGUMENT": "invalid_argument",
    "NOT_FOUND": "not_found",
    "ALREADY_EXISTS": "already_exists",
    "UNIMPLEMENTED": "unsupported",
    "CANCELLED": "cancelled",
    "UNAVAILABLE": "backend_unreachable",
}
# Of the model, or of the server, which is asked then whether it has the model.
_OF_EITHER: Final = ("NOT_FOUND", "CANCELLED", "UNAVAILABLE", "UNKNOWN")
# What it answers to calls that do not fit the model, and a model of its own; in a stream without a code.
_OF_CHANGED: Final = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "")
_LOOKED_FOR_S: Final = 2.0  # so long is believed what was read of the model
# What it answers, as INTERNAL, where an output needs more than its part of the region.
_TOO_LARGE: Final = "shared memory size specified with the request for output '{}'"
# What only an answer of its own says: other codes may also be gRPC's, of a call that goes on there.
_THROUGH: Final = ("INVALID_ARGUMENT", "INTERNAL", "NOT_FOUND", "ALREADY_EXISTS", "UNIMPLEMENTED")
_LEAST_PROBE_S: Final = 0.05  # where the call has taken all of its time
# What gRPC itself says of a call for which there was no connection.
_NOT_SENT: Final = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")
_NOT_LET_IN: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED")
# Parameters that Triton would heed in addition to us. Source: Triton extension_parameters.md; its sequence_... are the model's.
_RESERVED: Final = {"priority", "timeout", DEADLINE_NS, TRACEPARENT, TRACESTATE}
# W3C Trace Context: Triton's own spans join the trace (--trace-config mode=opentelemetry).
_TRACE: Final = {TRACEPARENT: "traceparent", TRACESTATE: "tracestate"}
_FINAL: Final = "triton_final_response"
_WANTS_FINAL: Final = "triton_enable_empty_final_response"

log = logging.getLogger(__name__)


def load(
    declared: ModelSpec,
    *,
    url: str | Sequence[str],
    model: str,
    model_version: str = "",
    timeout_s: float = 30.0,
    drain_s: float | None = None,
    shared_memory: bool = False,
    repair: bool = True,
) -> "TritonModel":
    """url: host:port of the gRPC endpoint, or several. timeout_s: a call that takes longer loses its session; of a decoupled
    model, a part that does.

    drain_s: how long what nobody wants of a decoupled model's answer is read on, from the next part, before the call is
    cancelled; None: timeout_s. shared_memory: pass tensors through a system shared memory region; the server must be on this
    host. Not those of a decoupled model, whose parts have any number of rows.
    """
    urls = (url,) if isinstance(url, str) else tuple(url)
    loaded = TritonModel(
        declared,
        urls,
        model=model,
        model_version=model_version,
        timeout_s=timeout_s,
        drain_s=drain_s,
        shared_memory=shared_memory,
        repair=repair,
    )
    loaded.read_spec()
    return loaded


class TritonModel:
    """What the sessions of one model share: its spec, and which servers are known to need a repair."""

    def __init__(
        self,
        declared: ModelSpec,
        urls: tuple[str, ...],
        *,
        model: str,
        model_version: str,
        timeout_s: float,
        drain_s: float | None,
        shared_memory: bool,
        repair: bool,
    ) -> None:
        self.spec = declared
        self.device = Device("remote")
        self.memory_bytes = 0
        self.model = model
        self.model_version = model_version
        self.timeout_s = timeout_s
        self.drain_s = timeout_s if drain_s is None else drain_s
        self._declared = declared
        self._urls = urls
        self._shared_memory = shared_memory
        self._abandoned = {url: AbandonedRegions() for url in urls}
        self._repair = repair
        self._repairs = threading.Lock()
        self._dead: set[str] = set()
        self._looks = threading.Lock()
        self._looked_s: dict[str, float] = {}  # by url, when calls that failed had it looked at
        self._changes: dict[str, str] = {}  # by url, as of the last look
        self._several = len(urls) > 1  # or sessions
        self._warned_of_order = False

    def read_spec(self) -> None:
        """Raises: LoadFailed, if no server has the model ready, or it is not as declared."""
        connection = self._connect(0)
        try:
            self.spec = connection.spec(self._declared)
        finally:
            connection.close()

    def open_session(self, index: int) -> "TritonSession":
        """Raises: LoadFailed, also where the model is not any more what it was when it was loaded."""
        self._several |= index > 0
        connection = self._connect(index, self._check_unchanged)
        region = None
        if self._shared_memory and not self.spec.decoupled:
            region = SessionRegion(connection, self._abandoned[connection.url])
        return TritonSession(self, connection, region)

    def close(self) -> None:
        for url, abandoned in self._abandoned.items():
            if not abandoned.names:
                continue
            with closing(TritonConnection(url, self.model, self.model_version)) as connection:
                names = abandoned.leave(connection)
            if names:
                log.warning(
                    "triton %s: regions %s of shared memory stay registered there until it ends, or a client or gateway "
                    "unregisters them: calls that were given up may still write to them",
                    url,
                    ", ".join(names),
                )

    def is_dead(self, url: str) -> None:
        """Note that the model's process on this server is gone."""
        self._dead.add(url)

    def warn_of_order(self) -> None:
        """Once, where requests of one sequence may overtake each other."""
        if self._several and not self._warned_of_order:
            self._warned_of_order = True
            log.warning(
                "triton model %s gets requests of sequences, which overtake each other as there are several sessions or urls: "
                "if it keeps state by them, set `sessions: 1` and one `url`",
                self.model,
            )

    def change(self, connection: TritonConnection, due_s: float) -> str:
        """How the model on this server is not what was loaded here; empty: it is, as far as the server says by due_s."""
        url = connection.url
        with self._looks:
            if time.monotonic() - self._looked_s.get(url, -inf) > _LOOKED_FOR_S:
                with suppress(LoadFailed, ValueError):  # ValueError: `cancel` has closed the channel
                    self._look(connection, min(max(_LEAST_PROBE_S, due_s - time.monotonic()), PROBE_TIMEOUT_S))
                self._looked_s[url] = time.monotonic()
            return self._changes.get(url, "")

    def _check_unchanged(self, connection: TritonConnection) -> None:
        with self._looks:
            self._look(connection, PROBE_TIMEOUT_S)
            if change := self._changes[connection.url]:
                raise LoadFailed(change)

    def _look(self, connection: TritonConnection, within_s: float) -> None:
        url = connection.url
        try:
            change = "; ".join(changes(self.spec, connection.spec(self._declared, within_s, told=False)))
        except SpecMismatch as exc:
            change = str(exc)
        if change:
            change = f"triton {url}: {self.model} is not what was loaded here, load it again: {change}"
            if change != self._changes.get(url):
                log.warning("%s", change)
        self._changes[url] = change

    def _connect(self, index: int, check: Callable[[TritonConnection], None] = lambda connection: None) -> TritonConnection:
        """To the first url, counted from the session's own, that has the model ready. Raises: LoadFailed, with every reason.

        check: whether it may be that one; raises LoadFailed.
        """
        faults = []
        for step in range(len(self._urls)):
            url = self._urls[(index + step) % len(self._urls)]
            connection = TritonConnection(url, self.model, self.model_version)
            try:
                if self._repair:
                    with self._repairs:
                        if url in self._dead:
                            log.warning("triton %s: unloading and loading %s, whose process is gone", url, self.model)
                            connection.reload()
                            self._dead.discard(url)
                connection.check_ready()
                check(connection)
                return connection
            except LoadFailed as exc:
                connection.close()
                faults.append(str(exc))
        raise LoadFailed("; ".join(faults))


class TritonSession:
    """region: where large tensors pass; None: everything passes in the messages."""

    def __init__(self, model: TritonModel, connection: TritonConnection, region: SessionRegion | None = None) -> None:
        self._model = model
        self._connection = connection
        self._region = region
        self._closed = False

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        timeout_s = self._within_s(parameters)
        due_s = time.monotonic() + timeout_s
        try:
            try:
                return self._infer(inputs, parameters, due_s)
            except self._connection.grpc.RpcError as exc:
                if self._region is None or not self._region.try_renew(exc):
                    raise
                return self._infer(inputs, parameters, due_s)  # the server has run nothing
        except (RunCancelled, self._connection.grpc.RpcError) as exc:
            if self._region is not None and not self._is_through(exc):
                self._region.abandon()
            if isinstance(exc, RunCancelled):
                raise
            raise self._mapped(exc, due_s, handed_on=timeout_s < self._model.timeout_s) from exc

    def _infer(self, inputs: Tensors, parameters: Mapping[str, object], due_s: float) -> Tensors:
        """Raises: grpc.RpcError; else as `run`."""
        request = self._request(parameters)
        shared = self._fill(request, inputs)
        response = self._connection.infer(request, due_s - time.monotonic(), _metadata(parameters))
        return self._taken(response, shared, due_s)

    def _taken(self, response: Any, shared: Mapping[str, memoryview], due_s: float) -> Tensors:
        """The outputs of a response. Raises: SessionLost, if they are others as the model was changed; ExecutionFailed."""
        for tensor in response.outputs:
            was = self._model.spec.output_by_name.get(tensor.name)
            as_it_was = was is not None and tensor.datatype == was.datatype and shapes_agree(was.shape, tuple(tensor.shape))
            if not as_it_was and (change := self._model.change(self._connection, due_s)):
                raise SessionLost(change)
        return _outputs(response, shared)

    def stream(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:
        within_s = self._within_s(parameters)  # beyond that whoever asked waits no more, and what comes is dropped
        request = self._request(parameters)
        request.parameters[_WANTS_FINAL].bool_param = True
        self._fill(request, inputs)
        call = self._connection.stream_infer(request, metadata=_metadata(parameters))
        with closing(AnswerInParts(call)) as answer:
            try:
                while (message := self._read(answer, within_s)) is not None:
                    within_s = self._model.timeout_s
                    if message.error_message:
                        raise self._error("", message.error_message, time.monotonic() + within_s)
                    response = message.infer_response
                    final = response.parameters[_FINAL].bool_param
                    if response.outputs or not final:
                        part = self._taken(response, {}, time.monotonic() + within_s)
                        yield LastPart(part) if final else part
                    # Behind the final one its end is read: a call that was cancelled would be a failed one.
            except ExecutionFailed as exc:
                yield EarlyFailure(exc)
                raise
            finally:
                with suppress(self._connection.grpc.RpcError):
                    answer.drop(self._model.drain_s)

    def _read(self, answer: AnswerInParts, within_s: float) -> Any:
        """The next message of an answer; None: there are no more. Raises: what `stream` does."""
        due_s = time.monotonic() + within_s
        try:
            return answer.read(self._model.timeout_s)
        except self._connection.grpc.RpcError as exc:
            if answer.late:
                raise SessionLost(
                    f"triton {self._connection.url}: no part of the answer within timeout_s {self._model.timeout_s:g}"
                ) from exc
            raise self._mapped(exc, due_s, handed_on=False) from exc

    def _within_s(self, parameters: Mapping[str, object]) -> float:
        """How long a call may take. Raises: SessionLost; ExecutionFailed, if no time."""
        if self._closed:
            raise SessionLost("the session is closed")
        timeout_s = self._model.timeout_s
        if DEADLINE_NS in parameters:
            timeout_s = min(timeout_s, (int(str(parameters[DEADLINE_NS])) - time.monotonic_ns()) / 1e9)
            if timeout_s <= 0:
                raise ExecutionFailed("the deadline passed before the call")
        return timeout_s

    def _request(self, parameters: Mapping[str, object]) -> Any:
        model = self._model
        if parameters.get("sequence_id"):  # 0 and "" are none
            model.warn_of_order()
        request = self._connection.pb.ModelInferRequest(model_name=model.model, model_version=model.model_version)
        for name, value in parameters.items():
            if name not in _RESERVED and not name.startswith("triton_"):
                _set_parameter(request.parameters[name], value)
        if DEADLINE_NS in parameters:  # a model's `timeout()`, in µs; Triton's queue heeds it where the model's policy says so
            left_ns = int(str(parameters[DEADLINE_NS])) - time.monotonic_ns()
            request.parameters["timeout"].int64_param = max(1, left_ns // 1000)
        return request

    def _fill(self, request: Any, inputs: Tensors) -> dict[str, memoryview]:
        """Put the tensors into the message or the region; gives the region's bytes that outputs will be written to."""
        spec = self._model.spec
        rows = next(iter(inputs.values())).shape[0] if spec.max_rows else 0
        large_in = {t.name for t in spec.inputs if t.name in inputs and self._is_large(t, inputs[t.name].shape)}
        shapes_out = {t.name: (rows, *t.shape[1:]) if spec.max_rows else t.shape for t in spec.outputs}
        sizes_out = {
            t.name: prod(shapes_out[t.name]) * NUMPY[t.datatype].itemsize
            for t in spec.outputs
            if self._is_large(t, shapes_out[t.name])
        }
        if self._region is not None and (large_in or sizes_out):
            try:
                self._region.reserve([*(inputs[name].nbytes for name in large_in), *sizes_out.values()])
            except (LoadFailed, OSError) as exc:
                raise SessionLost(f"triton {self._connection.url}: no shared memory region: {exc}", begun=False) from exc
        for tensor in spec.inputs:
            array = inputs.get(tensor.name)
            if array is None:
                continue
            message = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
            if self._region is not None and tensor.name in large_in:
                self._region.take(message, array.shape, array.dtype)[...] = array
            else:
                request.raw_input_contents.append(bytes(tensor_to_bytes(array)))
        shared: dict[str, memoryview] = {}
        for tensor in spec.outputs:
            message = request.outputs.add(name=tensor.name)
            if self._region is not None and tensor.name in sizes_out:
                shared[tensor.name] = self._region.take(message, (sizes_out[tensor.name],), np.dtype(np.uint8)).data
        return shared

    def _is_large(self, tensor: TensorSpec, shape: tuple[int, ...]) -> bool:
        if self._region is None or tensor.datatype == "BYTES" or -1 in shape:
            return False
        return prod(shape) * NUMPY[tensor.datatype].itemsize >= WORTH_BYTES

    def _is_through(self, exc: Any) -> bool:
        """Whether the server has ended a call that failed, and touches the region no more."""
        if isinstance(exc, RunCancelled) or exc.code().name not in _THROUGH:
            return False
        return "RST_STREAM" not in (exc.details() or "")  # as which gRPC tells a call that broke off, INTERNAL too

    def _mapped(self, exc: Any, due_s: float, *, handed_on: bool) -> BackendError:
        code = exc.code().name
        if code == "DEADLINE_EXCEEDED" and not handed_on:
            return SessionLost(f"triton {self._connection.url}: no answer within timeout_s {self._model.timeout_s:g}")
        return self._error(code, exc.details() or "", due_s)

    def _error(self, code: str, details: str, due_s: float) -> BackendError:
        """code: empty, where it is told without one. due_s: `time.monotonic` by which the call is to end."""
        message = f"triton {self._connection.url}: {f'{code}: ' if code else ''}{details}"
        if code in ("INTERNAL", "") and any(words in details for words in _DEAD):
            self._model.is_dead(self._connection.url)
            return SessionLost(message)
        for tensor in self._model.spec.outputs:
            if _TOO_LARGE.format(tensor.name) in details:
                if change := self._model.change(self._connection, due_s):
                    return SessionLost(change)
                declared = f"{tensor.datatype} {list(tensor.shape)}"
                remedy = f"the model gives more than {declared}: have it give that, or set shared_memory: false"
                return OutputsRefused(f"{message}: {remedy}")
        if "shared memory region" in details:  # a client unregisters all regions, again and again
            return SessionLost(message)
        gone = any(words.format(self._model.model) in details for words in _GONE)
        if gone or code in _NOT_LET_IN or (code in _OF_EITHER and not self._is_ready(due_s)):
            return SessionLost(message, begun=not details.startswith(_NOT_SENT))
        if code in _OF_CHANGED and (change := self._model.change(self._connection, due_s)):
            return SessionLost(change)
        refusal = _REFUSALS.get(code)
        return InputRefused(message, code=refusal) if refusal else ExecutionFailed(message)

    def _is_ready(self, due_s: float) -> bool:
        """As far as the server says so by then."""
        try:
            self._connection.check_ready(max(_LEAST_PROBE_S, due_s - time.monotonic()))
        except (LoadFailed, ValueError):  # ValueError: `cancel` has closed the channel
            return False
        return True

    def cancel(self) -> None:
        """Of a decoupled model the run is left to go on: its caller wants no more once it has the next part."""
        if not self._model.spec.decoupled and (self._region is None or self._region.may_abandon):
            self._connection.cancel()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._region is not None:
                self._region.close()
            self._connection.close()


def _metadata(parameters: Mapping[str, object]) -> Metadata:
    """What a call carries beside its message."""
    if TRACEPARENT not in parameters:
        return ()
    return tuple((name, str(parameters[key])) for key, name in _TRACE.items() if key in parameters)


def _set_parameter(parameter: Any, value: object) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = str(value)


def _outputs(response: Any, shared: Mapping[str, memoryview]) -> Tensors:
    """Views on the response's bytes, and copies from the region. shared: by output, what it has of the region.

    Raises: ExecutionFailed, if bytes and shape disagree.
    """
    outputs: Tensors = {}
    contents = list(response.raw_output_contents)
    if len(contents) != len(response.outputs):  # Triton 2.51 has an empty entry for each output in the region
        in_message = iter(contents)
        contents = [b"" if tensor.name in shared else next(in_message, b"") for tensor in response.outputs]
    for tensor, raw in zip(response.outputs, contents, strict=True):
        in_region = tensor.name in shared and not raw
        if in_region and tensor.datatype == "BYTES":  # of an unknown size, and refused for its dtype: none there is declared so
            outputs[tensor.name] = np.empty(0, object)
            continue
        try:
            if in_region:  # of which only so much is of this answer: the model may give less than it declares
                size = prod(tensor.shape) * numpy_dtype(tensor.name, tensor.datatype).itemsize
                raw = shared[tensor.name][:size]
            array = tensor_from_bytes(tensor.name, tensor.datatype, tuple(tensor.shape), raw)
        except (InvalidArgument, ValueError) as exc:  # the latter: a size below 0
            words = f"the {len(raw)} bytes that came are no {tensor.datatype} {list(tensor.shape)}"
            raise ExecutionFailed(f"output {tensor.name!r}: {words}") from exc
        outputs[tensor.name] = array.copy() if in_region else array
    return outputs
