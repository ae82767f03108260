"""A model on Triton Inference Server: one gRPC call per batch, of a decoupled model one per request.

The server's metadata and configuration are read at load and held against what was declared. Triton's own dynamic batching
adds its delay to ours: it should have none, and a warning says so when it has.

Health is passive. A python model whose process died stays "ready" for Triton, while every call takes a second and fails
(seen on 2.51): so its error is known by its words, the session is lost, and opening the next one first unloads and loads the
model. A server that cannot be reached loses the session too; it is reopened on the next url that has the model ready.

With several urls, session i begins with url i modulo their number. Each session has a connection of its own.

Cancelling closes the session's channel, and the next call opens another. A blocking call, the cheapest that a thread can make
(docs/backends.md), cannot be ended in any other way.

A decoupled model's answer is a ModelStreamInfer of its own, read when a part is asked for. What Triton sends ahead of that
fills gRPC's window (64 KiB, widened to 4 MiB on a fast way), then waits in Triton, which does not hold its model back.
Such a call is cancelled by itself. p50 of an answer of ten parts (2 cores, Triton 2.51, python backend, loopback, 2026-11):
1.8 ms by a call without threads, 2.3 ms by gRPC's ordinary one, 2.7 ms by one that may send several requests.
"""

import logging
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from math import inf, prod
from typing import Any

import numpy as np

from backends.base import (
    DEADLINE_NS,
    BackendError,
    Device,
    ExecutionFailed,
    LastPart,
    LoadFailed,
    ModelSpec,
    RunCancelled,
    SessionLost,
    SpecMismatch,
    Tensors,
    TensorSpec,
    narrowed,
)
from backends.datatypes import NUMPY
from backends.triton_shared_memory import WORTH_BYTES, Region

_PROBE_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 120.0
# What Triton answers, as INTERNAL, when a model's process or device is gone; another batch would meet the same.
_DEAD = ("is not healthy", "CUDA error", "CUDA failure", "device-side assert")
# What it answers a stream, where no code goes with it, of a model that was unloaded, and when it ends.
_GONE = ("Request for unknown model", "Server is stopping", "has stopped accepting")
# Parameters that mean something else to Triton than to the model behind it. Source: Triton extension_parameters.md.
_RESERVED = {
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
    "headers",
    DEADLINE_NS,
}
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"
_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else sessions of one url would share a connection
    ("SingleThreadedUnaryStream", 1),
]

log = logging.getLogger(__name__)


def load(
    declared: ModelSpec,
    *,
    url: str | Sequence[str],
    model: str,
    model_version: str = "",
    timeout_s: float = 30.0,
    shared_memory: bool = False,
    repair: bool = True,
) -> "TritonModel":
    """url: host:port of the gRPC endpoint, or several. timeout_s: a call that takes longer loses its session; of a decoupled
    model, a part that does.

    shared_memory: pass tensors through a system shared memory region; the server must be on this host. Not those of a
    decoupled model, whose parts have any number of rows.
    """
    urls = (url,) if isinstance(url, str) else tuple(url)
    loaded = TritonModel(declared, urls, model, model_version, timeout_s, shared_memory, repair)
    loaded.read_spec()
    return loaded


class TritonModel:
    """What the sessions of one model share: its spec, and which servers are known to need a repair."""

    def __init__(
        self,
        declared: ModelSpec,
        urls: tuple[str, ...],
        model: str,
        model_version: str,
        timeout_s: float,
        shared_memory: bool,
        repair: bool,
    ) -> None:
        self.spec = declared
        self.device = Device("remote")
        self.memory_bytes = 0
        self.model = model
        self.model_version = model_version
        self.timeout_s = timeout_s
        self._declared = declared
        self._urls = urls
        self._shared_memory = shared_memory
        self._repair = repair
        self._repairs = threading.Lock()
        self._dead: set[str] = set()

    def read_spec(self) -> None:
        """Raises: LoadFailed, if no server has the model ready, or it is not as declared."""
        connection = self._connect(0)
        try:
            self.spec = connection.spec(self._declared)
        finally:
            connection.close()

    def open_session(self, index: int) -> "TritonSession":
        connection = self._connect(index)
        return TritonSession(self, connection, Region(connection) if self._shared_memory and not self.spec.decoupled else None)

    def close(self) -> None:
        pass

    def is_dead(self, url: str) -> None:
        """Note that the model's process on this server is gone."""
        self._dead.add(url)

    def _connect(self, index: int) -> "Connection":
        """To the first url, counted from the session's own, that has the model ready. Raises: LoadFailed, with every reason."""
        faults = []
        for step in range(len(self._urls)):
            url = self._urls[(index + step) % len(self._urls)]
            connection = Connection(url, self.model, self.model_version)
            try:
                if self._repair:
                    with self._repairs:
                        if url in self._dead:
                            log.warning("triton %s: unloading and loading %s, whose process is gone", url, self.model)
                            connection.reload()
                            self._dead.discard(url)
                connection.check_ready()
                return connection
            except LoadFailed as exc:
                connection.close()
                faults.append(str(exc))
        raise LoadFailed("; ".join(faults))


class Connection:
    """A channel to one server. The seam: every gRPC error becomes ours here."""

    def __init__(self, url: str, model: str, model_version: str) -> None:
        try:
            import grpc
            from tritonclient.grpc import service_pb2, service_pb2_grpc
        except ImportError as exc:
            raise LoadFailed(f"tritonclient cannot be imported ({exc}): pip install 'tritonclient[grpc]'") from exc
        self.url = url
        self.pb = service_pb2
        self.grpc = grpc
        self._model = model
        self._version = model_version
        self._new_stub = service_pb2_grpc.GRPCInferenceServiceStub
        self._open()

    def _open(self) -> None:
        self._channel = self.grpc.insecure_channel(self.url, options=_OPTIONS)
        self.stub = self._new_stub(self._channel)
        # One request and then the end of them, whatever the service says: that takes no thread.
        self.stream_infer = self._channel.unary_stream(
            _STREAM_INFER, self.pb.ModelInferRequest.SerializeToString, self.pb.ModelStreamInferResponse.FromString
        )

    def check_ready(self) -> None:
        request = self.pb.ModelReadyRequest(name=self._model, version=self._version)
        if not self._ask(self.stub.ModelReady, request).ready:
            raise LoadFailed(f"triton {self.url}: model {self._model!r} is not ready there")

    def spec(self, declared: ModelSpec) -> ModelSpec:
        metadata = self._ask(self.stub.ModelMetadata, self.pb.ModelMetadataRequest(name=self._model, version=self._version))
        config = self._ask(self.stub.ModelConfig, self.pb.ModelConfigRequest(name=self._model, version=self._version)).config
        optional = {tensor.name for tensor in config.input if tensor.optional}
        where = f"triton {self.url}: model {self._model!r}"

        def found(tensors: Any) -> tuple[TensorSpec, ...]:
            unknown = [tensor.name for tensor in tensors if tensor.datatype not in NUMPY]
            if unknown:
                raise SpecMismatch(f"{where}: {unknown} are of datatypes that the protocol does not have")
            return tuple(TensorSpec(t.name, t.datatype, tuple(t.shape), t.name in optional) for t in tensors)

        if config.HasField("sequence_batching"):
            raise SpecMismatch(f"{where} batches sequences, whose requests must not be batched here")
        delay_us = config.dynamic_batching.max_queue_delay_microseconds
        if delay_us:
            log.warning(
                "%s waits up to %d µs for batches of its own, after ours: set max_queue_delay_microseconds to 0",
                where,
                delay_us,
            )
        inputs, outputs = found(metadata.inputs), found(metadata.outputs)
        max_rows = declared.max_rows
        if config.max_batch_size and not max_rows:
            raise SpecMismatch(f"{where} takes batches of up to {config.max_batch_size} rows, but max_rows is 0: set it")
        if config.max_batch_size:
            max_rows = min(max_rows, config.max_batch_size)
        elif max_rows and any(not tensor.shape or tensor.shape[0] != -1 for tensor in (*inputs, *outputs)):
            raise SpecMismatch(f"{where} has max_batch_size 0 and a tensor without an open first dimension: set max_rows to 0")
        return ModelSpec(
            f"triton_{metadata.platform}",
            narrowed(inputs, declared.inputs, f"{where}: input"),
            narrowed(outputs, declared.outputs, f"{where}: output"),
            max_rows,
            declared.row_sizes,
            decoupled=config.model_transaction_policy.decoupled,
        )

    def reload(self) -> None:
        """Raises: LoadFailed, if the server does not let clients load models, or the model does not load again."""
        self._ask(self.stub.RepositoryModelUnload, self.pb.RepositoryModelUnloadRequest(model_name=self._model))
        self._ask(self.stub.RepositoryModelLoad, self.pb.RepositoryModelLoadRequest(model_name=self._model), _LOAD_TIMEOUT_S)

    def register(self, region: str, byte_size: int) -> None:
        request = self.pb.SystemSharedMemoryRegisterRequest(name=region, key=f"/{region}", offset=0, byte_size=byte_size)
        self._ask(self.stub.SystemSharedMemoryRegister, request)

    def unregister(self, region: str) -> None:
        self._ask(self.stub.SystemSharedMemoryUnregister, self.pb.SystemSharedMemoryUnregisterRequest(name=region))

    def infer(self, request: Any, timeout_s: float) -> Any:
        """Raises: grpc.RpcError, which the session maps: it knows what was asked; RunCancelled."""
        stub = self.stub
        try:
            return stub.ModelInfer(request, timeout=timeout_s)
        except (self.grpc.RpcError, ValueError) as exc:  # ValueError: the channel was closed before the call began
            if stub is not self.stub:
                raise RunCancelled(f"triton {self.url}: the call was cancelled") from exc
            raise

    def cancel(self) -> None:
        """From any thread: end the call that is under way."""
        channel = self._channel
        self._open()
        channel.close()

    def close(self) -> None:
        self._channel.close()

    def _ask(self, call: Any, request: Any, timeout_s: float = _PROBE_TIMEOUT_S) -> Any:
        try:
            return call(request, timeout=timeout_s)
        except self.grpc.RpcError as exc:
            raise LoadFailed(f"triton {self.url}: {exc.code().name}: {exc.details()}") from exc


class _Answer:
    """The parts of one answer, each read when it is asked for."""

    def __init__(self, call: Any) -> None:
        """call: of gRPC, just begun."""
        self.cancelled = False
        self.late = False
        self._call = call
        self._lock = threading.Lock()
        self._due_s = inf  # `time.monotonic` by which the part that is read must be there
        self._timer: threading.Timer | None = None

    def read(self, within_s: float) -> Any:
        """The next response; None: there are no more. within_s: no later than 0. Raises: grpc.RpcError."""
        with self._lock:
            self._due_s = time.monotonic() + within_s
            if self._timer is None:
                self._watch(within_s)
        try:
            return next(self._call, None)
        finally:
            self._due_s = inf

    def cancel(self) -> None:
        """From any thread."""
        self.cancelled = True
        self._call.cancel()

    def close(self) -> None:
        """End the call, if it has not ended."""
        with self._lock:
            self._due_s = inf
            if self._timer is not None:
                self._timer.cancel()
        self._call.cancel()

    def _watch(self, seconds: float) -> None:
        self._timer = threading.Timer(max(0.0, seconds), self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        """On the timer's thread. One for all parts: a part is due later than those before it."""
        with self._lock:
            self._timer = None
            left_s = self._due_s - time.monotonic()
            if 0 < left_s < inf:
                self._watch(left_s)
            self.late = left_s <= 0
        if self.late:
            self._call.cancel()


class TritonSession:
    """region: where large tensors pass; None: everything passes in the messages."""

    def __init__(self, model: TritonModel, connection: Connection, region: Region | None = None) -> None:
        self._model = model
        self._connection = connection
        self._region = region
        self._answer: _Answer | None = None  # of a decoupled model, while it is given
        self._closed = False

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        timeout_s = self._first_within_s(parameters)
        request = self._request(parameters)
        shared = self._fill(request, inputs)
        try:
            response = self._connection.infer(request, timeout_s)
        except (RunCancelled, self._connection.grpc.RpcError) as exc:
            if self._region is not None:
                self._region.abandon()
            if isinstance(exc, RunCancelled):
                raise
            raise self._mapped(exc, handed_on=timeout_s < self._model.timeout_s) from exc
        return _outputs(response, shared)

    def stream(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:
        within_s = self._first_within_s(parameters)
        request = self._request(parameters)
        request.parameters[_WANTS_FINAL].bool_param = True
        self._fill(request, inputs)
        with closing(_Answer(self._connection.stream_infer(request))) as answer:
            self._answer = answer
            try:
                while (message := self._read(answer, within_s)) is not None:
                    response = message.infer_response
                    final = response.parameters[_FINAL].bool_param
                    if response.outputs or not final:
                        yield LastPart(_outputs(response, {})) if final else _outputs(response, {})
                    if final:
                        self._read(answer, self._model.timeout_s)  # its end: a call that was cancelled would be a failed one
                        return
                    within_s = self._model.timeout_s
            finally:
                self._answer = None

    def _read(self, answer: _Answer, within_s: float) -> Any:
        """The next message of an answer; None: there are no more. Raises: what `stream` does."""
        try:
            message = answer.read(within_s)
        except self._connection.grpc.RpcError as exc:
            if answer.late and within_s < self._model.timeout_s:
                raise ExecutionFailed("the deadline passed before the first part of the answer") from exc
            if answer.late:
                raise SessionLost(
                    f"triton {self._connection.url}: no part of the answer within timeout_s {self._model.timeout_s:g}"
                ) from exc
            if answer.cancelled:
                raise RunCancelled(f"triton {self._connection.url}: the call was cancelled") from exc
            raise self._mapped(exc, handed_on=False) from exc
        if message is not None and message.error_message:
            raise self._error("", message.error_message)
        return message

    def _first_within_s(self, parameters: Mapping[str, object]) -> float:
        """How long a call, of a decoupled model its first part, may take. Raises: SessionLost; ExecutionFailed, if no time."""
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
        request = self._connection.pb.ModelInferRequest(model_name=model.model, model_version=model.model_version)
        for name, value in parameters.items():
            if name not in _RESERVED and not name.startswith("triton_"):
                _set_parameter(request.parameters[name], value)
        return request

    def _fill(self, request: Any, inputs: Tensors) -> Tensors:
        """Put the tensors into the message or the region; gives the region's views that outputs will be written to."""
        spec = self._model.spec
        rows = next(iter(inputs.values())).shape[0] if spec.max_rows else 0
        large_in = {t.name for t in spec.inputs if t.name in inputs and self._is_large(t, inputs[t.name].shape)}
        shapes_out = {t.name: (rows, *t.shape[1:]) if spec.max_rows else t.shape for t in spec.outputs}
        large_out = {t.name for t in spec.outputs if self._is_large(t, shapes_out[t.name])}
        if self._region is not None and (large_in or large_out):
            sizes_out = [prod(shapes_out[t.name]) * NUMPY[t.datatype].itemsize for t in spec.outputs if t.name in large_out]
            try:
                self._region.reserve([*(inputs[name].nbytes for name in large_in), *sizes_out])
            except (LoadFailed, OSError) as exc:
                raise SessionLost(f"triton {self._connection.url}: no shared memory region: {exc}") from exc
        for tensor in spec.inputs:
            array = inputs.get(tensor.name)
            if array is None:
                continue
            message = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
            if self._region is not None and tensor.name in large_in:
                self._region.take(message, array.shape, array.dtype)[...] = array
            else:
                request.raw_input_contents.append(_raw(array))
        shared: Tensors = {}
        for tensor in spec.outputs:
            message = request.outputs.add(name=tensor.name)
            if self._region is not None and tensor.name in large_out:
                shared[tensor.name] = self._region.take(message, shapes_out[tensor.name], NUMPY[tensor.datatype])
        return shared

    def _is_large(self, tensor: TensorSpec, shape: tuple[int, ...]) -> bool:
        if self._region is None or tensor.datatype == "BYTES" or -1 in shape:
            return False
        return prod(shape) * NUMPY[tensor.datatype].itemsize >= WORTH_BYTES

    def _mapped(self, exc: Any, *, handed_on: bool) -> BackendError:
        code = exc.code().name
        if code == "DEADLINE_EXCEEDED" and not handed_on:
            return SessionLost(f"triton {self._connection.url}: no answer within timeout_s {self._model.timeout_s:g}")
        return self._error(code, exc.details() or "")

    def _error(self, code: str, details: str) -> BackendError:
        """code: empty, where it is told without one."""
        message = f"triton {self._connection.url}: {f'{code}: ' if code else ''}{details}"
        if code in ("INTERNAL", "") and any(words in details for words in _DEAD):
            self._model.is_dead(self._connection.url)
            return SessionLost(message)
        if code == "UNAVAILABLE" and "queue" in details:  # its queue is full: the server is well
            return ExecutionFailed(message)
        if "shared memory region" in details:  # the server was restarted, or a client unregistered all regions
            return SessionLost(message)
        lost = code in ("UNAVAILABLE", "NOT_FOUND", "CANCELLED", "UNKNOWN", "UNAUTHENTICATED", "PERMISSION_DENIED")
        lost = lost or (not code and any(words in details for words in _GONE))
        return (SessionLost if lost else ExecutionFailed)(message)

    def cancel(self) -> None:
        answer = self._answer
        if answer is not None:
            answer.cancel()
        elif not self._model.spec.decoupled and (self._region is None or self._region.may_abandon):
            self._connection.cancel()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._region is not None:
                self._region.close()
            self._connection.close()


def _set_parameter(parameter: Any, value: object) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = str(value)


def _raw(array: np.ndarray) -> bytes:
    if array.dtype != NUMPY["BYTES"]:
        return array.tobytes()
    return b"".join(len(element).to_bytes(4, "little") + element for element in array.flat)


def _outputs(response: Any, shared: Tensors) -> Tensors:
    """Views on the response's bytes, and copies from the region. Raises: ExecutionFailed, if bytes and shape disagree."""
    outputs: Tensors = {}
    at = 0  # in raw_output_contents, which leaves out what is in the region
    for tensor in response.outputs:
        if tensor.name in shared:
            outputs[tensor.name] = shared[tensor.name].copy()
            continue
        raw = response.raw_output_contents[at]
        at += 1
        try:
            array = _bytes_elements(raw) if tensor.datatype == "BYTES" else np.frombuffer(raw, NUMPY[tensor.datatype])
            outputs[tensor.name] = array.reshape(tuple(tensor.shape))
        except (ValueError, KeyError) as exc:
            raise ExecutionFailed(
                f"output {tensor.name!r}: got {len(raw)} bytes for {tensor.datatype} {list(tensor.shape)}"
            ) from exc
    return outputs


def _bytes_elements(raw: bytes) -> np.ndarray:
    """Elements with their 4-byte lengths in front."""
    elements: list[bytes] = []
    at = 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        elements.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    array = np.empty(len(elements), NUMPY["BYTES"])
    array[:] = elements
    return array
