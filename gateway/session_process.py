"""A model in processes of its own: one process per session, spoken to in frames over a private socket pair.

For code that holds the GIL or may crash. The child is `python -m gateway.session_process FD`; it gets one frame with what to
load, answers with the model's spec, then runs one batch per frame. It ends when its socket does, so it cannot outlive the
gateway. A child that dies, is killed or breaks the framing is a lost session.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

import backends
from backends.base import BackendError, Device, ExecutionFailed, LoadFailed, ModelSpec, SessionLost, Tensors, TensorSpec
from gateway.frames import decode_frame, encode_frame
from gateway.protocols.tensors import Buffer

_SIZE_BYTES: Final = 8
_STOP_TIMEOUT_S: Final = 5.0


class ProcessModel:
    """A `Model` whose sessions are processes. Loading starts the first of them, since only it can tell the spec."""

    def __init__(self, kind: str, options: Mapping[str, Any], declared: ModelSpec) -> None:
        """Raises: LoadFailed."""
        self._load = {"kind": kind, "options": dict(options), "declared": _spec_to_plain(declared)}
        self._lock = threading.Lock()
        self._spare: ProcessSession | None = ProcessSession(self._load)
        self.spec = self._spare.spec
        self.device = Device("cpu")
        self.memory_bytes = 0  # the children's, which this process does not see

    def open_session(self, index: int) -> "ProcessSession":
        with self._lock:
            spare, self._spare = self._spare, None
        return spare or ProcessSession(self._load)

    def close(self) -> None:
        if self._spare is not None:
            self._spare.close()


class ProcessSession:
    """One child process."""

    def __init__(self, load: Mapping[str, Any]) -> None:
        """Raises: LoadFailed, with the child's own message."""
        ours, theirs = socket.socketpair()
        with theirs:
            # The path is handed on, so that a model file beside the gateway's start directory is found in the child as well.
            env = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            command = [sys.executable, "-m", "gateway.session_process", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._socket = ours
        try:
            _, answer = self._exchange({}, load)
        except SessionLost as exc:
            self.close()
            raise LoadFailed(str(exc)) from exc
        if "error" in answer:
            self.close()
            raise LoadFailed(answer["error"])
        self.spec = _spec_from_plain(answer["spec"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        outputs, answer = self._exchange(inputs, {"parameters": dict(parameters)})
        if "error" in answer:
            raise (SessionLost if answer["lost"] else ExecutionFailed)(answer["error"])
        return outputs

    def kill(self) -> None:
        """End the child at once; a run in progress on another thread raises SessionLost. Safe from any thread."""
        self._process.kill()

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exchange(self, tensors: Tensors, extra: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        try:
            _send(self._socket, encode_frame(tensors, extra))
            return decode_frame(_receive(self._socket))
        except (OSError, EOFError) as exc:
            try:
                status = self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                status = None
            raise SessionLost(f"process {self._process.pid} of the session ended with status {status}") from exc


def _send(channel: socket.socket, pieces: list[Buffer]) -> None:
    size = sum(len(piece) for piece in pieces)
    channel.sendall(size.to_bytes(_SIZE_BYTES, "little") + bytes(pieces[0]))
    for piece in pieces[1:]:
        channel.sendall(piece)


def _receive(channel: socket.socket) -> bytearray:
    """One frame. Raises: EOFError at the end of the stream."""
    size = int.from_bytes(_receive_exactly(channel, _SIZE_BYTES), "little")
    return _receive_exactly(channel, size)


def _receive_exactly(channel: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = channel.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return buffer


def _spec_to_plain(spec: ModelSpec) -> dict[str, Any]:
    def plain(tensor: TensorSpec) -> list[Any]:
        return [tensor.name, tensor.datatype, tensor.shape, tensor.optional, tensor.labels]

    return {
        "platform": spec.platform,
        "inputs": [plain(tensor) for tensor in spec.inputs],
        "outputs": [plain(tensor) for tensor in spec.outputs],
        "max_rows": spec.max_rows,
        "row_sizes": spec.row_sizes,
    }


def _spec_from_plain(plain: dict[str, Any]) -> ModelSpec:
    def tensor(fields: list[Any]) -> TensorSpec:
        name, datatype, shape, optional, labels = fields
        return TensorSpec(name, datatype, tuple(shape), optional, tuple(labels))

    return ModelSpec(
        platform=plain["platform"],
        inputs=tuple(tensor(fields) for fields in plain["inputs"]),
        outputs=tuple(tensor(fields) for fields in plain["outputs"]),
        max_rows=plain["max_rows"],
        row_sizes=tuple(plain["row_sizes"]),
    )


def _serve(channel: socket.socket) -> None:
    """The child: load what the first frame says, then run frames until the socket ends."""
    _, load = decode_frame(_receive(channel))
    try:
        model = backends.load(load["kind"], load["options"], _spec_from_plain(load["declared"]))
        session = model.open_session(0)
    except Exception as exc:  # whatever it is, the parent must be told in words
        message = str(exc) if isinstance(exc, BackendError) else f"{type(exc).__name__}: {exc}"
        _send(channel, encode_frame({}, {"error": message}))
        return
    _send(channel, encode_frame({}, {"spec": _spec_to_plain(model.spec)}))
    while True:
        try:
            frame = _receive(channel)
        except EOFError:
            break
        tensors, extra = decode_frame(frame)
        try:
            answer = encode_frame(session.run(tensors, extra["parameters"]), {})
        except Exception as exc:  # as above
            message = str(exc) if isinstance(exc, BackendError) else f"{type(exc).__name__}: {exc}"
            answer = encode_frame({}, {"error": message, "lost": isinstance(exc, SessionLost | MemoryError)})
        _send(channel, answer)
    session.close()
    model.close()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        _serve(inherited)
