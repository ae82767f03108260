"""A session's connection to a Triton server: what it is asked by gRPC, and answers in parts.

Cancelling a call closes the channel, and the next call opens another. A blocking call, the cheapest that a thread can make
(docs/backends.md), cannot be ended in any other way.

A decoupled model's answer is a ModelStreamInfer of its own, read when a part is asked for. What Triton sends ahead of that
fills gRPC's window (64 KiB, widened to 4 MiB on a fast way), then waits in Triton, which does not hold its model back.
p50 of an answer of ten parts (2 cores, Triton 2.51, python backend, loopback, 2026-11): 1.8 ms by a call without threads,
2.3 ms by gRPC's ordinary one, 2.7 ms by one that may send several requests.
"""

import logging
import threading
import time
from math import inf
from typing import Any, Final

from backends.base import LoadFailed, ModelSpec, RunCancelled, SpecMismatch, TensorSpec, narrowed
from backends.datatypes import NUMPY

PROBE_TIMEOUT_S: Final = 5.0
_LOAD_TIMEOUT_S: Final = 120.0
_STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_OPTIONS: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else sessions of one url would share a connection
    ("SingleThreadedUnaryStream", 1),
]

Metadata = tuple[tuple[str, str | bytes], ...]

log = logging.getLogger(__name__)


class TritonConnection:
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
        # Never with the header `triton_grpc_error`, which would tell the codes of errors among the parts: Triton 2.51 dies
        # where the model ends an answer after such an error (mended by its pull request 7552).
        self.stream_infer = self._channel.unary_stream(
            _STREAM_INFER, self.pb.ModelInferRequest.SerializeToString, self.pb.ModelStreamInferResponse.FromString
        )

    def check_ready(self, within_s: float = PROBE_TIMEOUT_S) -> None:
        request = self.pb.ModelReadyRequest(name=self._model, version=self._version)
        if not self._ask(self.stub.ModelReady, request, min(within_s, PROBE_TIMEOUT_S)).ready:
            raise LoadFailed(f"triton {self.url}: model {self._model!r} is not ready there")

    def spec(self, declared: ModelSpec, within_s: float = PROBE_TIMEOUT_S, *, told: bool = True) -> ModelSpec:
        """What is declared of the model, held against what it is. within_s: for each answer of the server. told: to the log.

        Raises: SpecMismatch, LoadFailed.
        """
        request = self.pb.ModelMetadataRequest(name=self._model, version=self._version)
        metadata = self._ask(self.stub.ModelMetadata, request, within_s)
        config = self._config(self._model, self._version, within_s)
        optional = {tensor.name for tensor in config.input if tensor.optional}
        where = f"triton {self.url}: model {self._model!r}"

        def found(tensors: Any) -> tuple[TensorSpec, ...]:
            unknown = [tensor.name for tensor in tensors if tensor.datatype not in NUMPY]
            if unknown:
                raise SpecMismatch(f"{where}: {unknown} are of datatypes that the protocol does not have")
            return tuple(TensorSpec(t.name, t.datatype, tuple(t.shape), t.name in optional) for t in tensors)

        self._refuse_sequences(config, where, within_s)
        inputs, outputs = found(metadata.inputs), found(metadata.outputs)
        max_rows = declared.max_rows
        if config.max_batch_size:
            max_rows = min(max_rows, config.max_batch_size)
        elif not declared.rows_stated:
            max_rows = 0  # an open first dimension may be any
        elif max_rows and any(not tensor.shape or tensor.shape[0] != -1 for tensor in (*inputs, *outputs)):
            raise SpecMismatch(f"{where} has max_batch_size 0 and a tensor without an open first dimension: set max_rows to 0")
        if told:
            _tell(config, declared, max_rows, where)
        return ModelSpec(
            f"triton_{metadata.platform}",
            narrowed(inputs, declared.inputs, f"{where}: input"),
            narrowed(outputs, declared.outputs, f"{where}: output"),
            max_rows,
            declared.row_sizes,
            decoupled=config.model_transaction_policy.decoupled,
        )

    def _config(self, model: str, version: str, within_s: float) -> Any:
        return self._ask(self.stub.ModelConfig, self.pb.ModelConfigRequest(name=model, version=version), within_s).config

    def _refuse_sequences(self, config: Any, where: str, within_s: float) -> None:
        """Raises: SpecMismatch, if the model, or one that an ensemble calls, batches sequences; LoadFailed."""
        if config.HasField("sequence_batching"):
            raise SpecMismatch(
                f"{where} batches sequences, whose requests must not be batched here: let its clients call it directly"
            )
        for step in config.ensemble_scheduling.step:
            version = str(step.model_version) if step.model_version > 0 else ""
            called = self._config(step.model_name, version, within_s)
            self._refuse_sequences(called, f"{where} calls {step.model_name!r}, which", within_s)

    def reload(self) -> None:
        """Raises: LoadFailed, if the server does not let clients load models, or the model does not load again."""
        self._ask(self.stub.RepositoryModelUnload, self.pb.RepositoryModelUnloadRequest(model_name=self._model))
        self._ask(self.stub.RepositoryModelLoad, self.pb.RepositoryModelLoadRequest(model_name=self._model), _LOAD_TIMEOUT_S)

    def register(self, region: str, byte_size: int) -> None:
        request = self.pb.SystemSharedMemoryRegisterRequest(name=region, key=f"/{region}", offset=0, byte_size=byte_size)
        self._ask(self.stub.SystemSharedMemoryRegister, request)

    def unregister(self, region: str) -> None:
        self._ask(self.stub.SystemSharedMemoryUnregister, self.pb.SystemSharedMemoryUnregisterRequest(name=region))

    def regions(self) -> list[str]:
        """The names of those that are registered, whoever did it."""
        return list(self._ask(self.stub.SystemSharedMemoryStatus, self.pb.SystemSharedMemoryStatusRequest()).regions)

    def infer(self, request: Any, timeout_s: float, metadata: Metadata = ()) -> Any:
        """Raises: grpc.RpcError, which the session maps: it knows what was asked; RunCancelled."""
        stub = self.stub
        try:
            return stub.ModelInfer(request, timeout=timeout_s, metadata=metadata)
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

    def _ask(self, call: Any, request: Any, timeout_s: float = PROBE_TIMEOUT_S) -> Any:
        try:
            return call(request, timeout=timeout_s)
        except self.grpc.RpcError as exc:
            raise LoadFailed(f"triton {self.url}: {exc.code().name}: {exc.details()}") from exc


class AnswerInParts:
    """The parts of one answer, each read when it is asked for."""

    def __init__(self, call: Any) -> None:
        """call: of gRPC, just begun."""
        self.late = False
        self._call = call
        self._lock = threading.Lock()
        self._due_s = inf  # `time.monotonic` by which the part that is read must be there
        self._timer: threading.Timer | None = None
        self._looks_s = inf  # and when the timer looks whether it is

    def read(self, within_s: float) -> Any:
        """The next response; None: there are no more. within_s: no later than 0. Raises: grpc.RpcError."""
        return self._read_by(time.monotonic() + within_s)

    def _read_by(self, due_s: float) -> Any:
        with self._lock:
            self._due_s = due_s
            if due_s < self._looks_s:
                self._look_at(due_s)
        try:
            return next(self._call, None)
        finally:
            self._due_s = inf

    def drop(self, within_s: float) -> None:
        """Read on to the end, so long at most: Triton 2.51 died when a client hung up on a model that ended its answer.

        Of 40 to 300 such calls of a model that answers in 1 ms, one did (2026-11-30). Raises: grpc.RpcError.
        """
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and self._read_by(until_s) is not None:
            pass

    def close(self) -> None:
        """End the call, if it has not ended."""
        with self._lock:
            self._due_s = inf
            if self._timer is not None:
                self._timer.cancel()
        self._call.cancel()

    def _look_at(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_s = due_s
        self._timer = threading.Timer(max(0.0, due_s - time.monotonic()), self._cut_off_late)
        self._timer.daemon = True
        self._timer.start()

    def _cut_off_late(self) -> None:
        """On the timer's thread. One serves many parts: most are due later than those before them."""
        with self._lock:
            if self._timer is not threading.current_thread():
                return  # cancelled, too late to be stopped
            self._timer, self._looks_s = None, inf
            due_s = self._due_s
            self.late = due_s <= time.monotonic()
            if not self.late and due_s < inf:
                self._look_at(due_s)
        if self.late:
            self._call.cancel()


def _tell(config: Any, declared: ModelSpec, max_rows: int, where: str) -> None:
    """Tell the log what of a model's configuration is not heeded here, or not as somebody may think."""
    delay_us = config.dynamic_batching.max_queue_delay_microseconds
    if delay_us:
        log.warning(
            "%s waits up to %d µs for batches of its own, after ours: set max_queue_delay_microseconds to 0",
            where,
            delay_us,
        )
    stated = {tensor.name for tensor in declared.outputs if tensor.labels}
    if unlabelled := [tensor.name for tensor in config.output if tensor.label_filename and tensor.name not in stated]:
        log.warning(
            "%s has files of labels for %s, which are not read from there: classifications have none; state `labels` of "
            "these outputs in the configuration",
            where,
            unlabelled,
        )
    decoupled = config.model_transaction_policy.decoupled
    if not (config.max_batch_size or declared.rows_stated or decoupled):
        log.info(
            "%s has max_batch_size 0: each request is a call of its own, whole; if the first dimension of its tensors is that "
            "of a batch, set max_rows",
            where,
        )
    apart = config.backend == "python" or not config.HasField("dynamic_batching")
    if config.max_batch_size and max_rows > 1 and apart and not decoupled:
        log.info(
            "%s keeps the rows of several requests apart, which share a batch here: if they change each other's "
            "answers, set max_rows: 0",
            where,
        )
