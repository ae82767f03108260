"""A model in processes of its own: one process per session, spoken to in frames over a private socket pair.

For code that holds the GIL or may crash. The child is `python -m gateway.session_process FD FD`; it gets one frame with what to
load, answers with the model's spec, then runs one batch per frame. It ends when its socket does. What it prints goes to the
gateway's standard error. A child that dies, is killed or breaks the framing is a lost session.

The child leads a process group, so that what the model starts ends with it. The group cannot outlive the gateway either, not
even while a run holds the GIL: the kernel itself kills it when the gateway's end of a pipe, the lifeline, closes.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import Any, Final, cast

import backends
from backends.base import (
    BackendError,
    Device,
    ExecutionFailed,
    LastPart,
    LoadFailed,
    ModelSpec,
    OutputsRefused,
    SessionLost,
    StreamingSession,
    Tensors,
    TensorSpec,
    trace_of,
    words_of,
)
from gateway.frames import decode_frame, encode_frame
from gateway.garbage import leave_out
from gateway.protocols.tensors import Buffer

_SIZE_BYTES: Final = 8
_STOP_TIMEOUT_S: Final = 5.0
# How long a child whose socket has ended may take to end as well.
_EXIT_S: Final = 1.0
# By which somebody else ends a process: an operator, the kernel that needs its memory.
_FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM)


class ProcessModel:
    """A `Model` whose sessions are processes. The first of them is started by `load`, since only it can tell the spec."""

    def __init__(self, kind: str, options: Mapping[str, Any], declared: ModelSpec) -> None:
        self.spec = declared
        self.device = Device("cpu")
        self.memory_bytes = 0  # the children's, which this process does not see
        self._load = {"kind": kind, "options": dict(options), "declared": _spec_to_plain(declared)}
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[ProcessSession] = weakref.WeakSet()
        self._spare: ProcessSession | None = None
        self._closed = False

    def load(self) -> "ProcessModel":
        """Raises: LoadFailed."""
        self._spare = self._start()
        self.spec = self._spare.spec
        return self

    def open_session(self, index: int) -> "ProcessSession":
        with self._lock:
            spare, self._spare = self._spare, None
        return spare or self._start()

    def close(self) -> None:
        """End all children at once, those that are still loading too. From any thread."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.kill()

    def _start(self) -> "ProcessSession":
        session = ProcessSession()
        with self._lock:
            self._sessions.add(session)
            closed = self._closed
        if closed:
            session.kill()
        try:
            session.load(self._load)
        except BaseException:
            session.close()
            raise
        return session


class ProcessSession:
    """One child process. Life: made -> load -> run … -> close; kill at any time, from any thread."""

    spec: ModelSpec  # from load on

    def __init__(self) -> None:
        """Start the child. Raises: OSError."""
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        try:
            # The path is handed on, so that a model file beside the gateway's start directory is found in the child as well.
            env = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway.session_process", str(theirs.fileno()), str(lifeline)],
                pass_fds=[theirs.fileno(), lifeline],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=2,  # on its standard output the gateway speaks to programs
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._socket = ours
        self._reaping = threading.Lock()
        self._status: Future[int] = Future()
        threading.Thread(target=self._reap, name=f"reap-{self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, load: Mapping[str, Any]) -> None:
        """Raises: LoadFailed, with the child's own message."""
        try:
            _, answer = self._exchange({}, load)
        except SessionLost as exc:
            raise LoadFailed(f"{exc} while it loaded the model") from exc
        if "error" in answer:
            raise LoadFailed(answer["error"])
        self.spec = _spec_from_plain(answer["spec"])

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        outputs, answer = self._exchange(inputs, {"parameters": dict(parameters)})
        _check(answer)
        return outputs

    def stream(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:
        """The child makes a part when it is asked for the next."""
        outputs, answer = self._exchange(inputs, {"parameters": dict(parameters), "stream": True})
        while True:
            _check(answer)
            if not answer["part"]:
                return
            try:
                yield LastPart(outputs) if answer["last"] else outputs
            except GeneratorExit:
                _, answer = self._exchange({}, {"next": False})
                _check(answer)
                raise
            outputs, answer = self._exchange({}, {"next": True})

    def watch(self, died: Callable[[str], None]) -> None:
        self._status.add_done_callback(lambda status: died(f"process {self.pid} ended with status {status.result()}"))

    def kill(self) -> None:
        with self._reaping:  # or its pid could be another's by now
            if not self._status.done():
                self._kill_group()

    def close(self) -> None:
        self._socket.close()
        if self._ended_within(_STOP_TIMEOUT_S) is None:
            self.kill()
            self._ended_within(_STOP_TIMEOUT_S)

    def _exchange(self, tensors: Tensors, extra: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        frame = encode_frame(tensors, extra)
        if self._status.done():
            raise SessionLost(f"process {self.pid} of the session ended with status {self._status.result()}")
        try:
            _send(self._socket, frame)
            return decode_frame(_receive(self._socket))
        except (OSError, EOFError) as exc:
            status = self._ended_within(_EXIT_S)
            how = "has left its connection" if status is None else f"ended with status {status}"
            own = status not in _FROM_OUTSIDE
            raise SessionLost(f"process {self.pid} of the session {how}", self_inflicted=own) from exc
        except Exception as exc:
            raise SessionLost(
                f"process {self.pid} of the session answered no frame: {words_of(exc)}", self_inflicted=True
            ) from exc

    def _ended_within(self, timeout_s: float) -> int | None:
        """The status of the child, if it has ended by then."""
        try:
            return self._status.result(timeout_s)
        except TimeoutError:
            return None

    def _reap(self) -> None:
        """On a thread of its own, until the child has ended."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):  # code of a model's waits for any child
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet: its number stays its group's
        else:  # macOS
            self._process.wait()
        with self._reaping:
            self._kill_group()  # what the model started
            status = self._process.wait()
            os.close(self._lifeline)
            # What has left the group may hold the other end: a run must not wait for that.
            with contextlib.suppress(OSError):  # closed before
                self._socket.shutdown(socket.SHUT_RDWR)
            self._status.set_result(status)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: nobody is left
            os.killpg(self.pid, signal.SIGKILL)


def _check(answer: Mapping[str, Any]) -> None:
    """Raises: BackendError, if a child's answer is one."""
    if "error" not in answer:
        return
    error: BackendError
    if answer["lost"]:
        error = SessionLost(answer["error"], self_inflicted=answer["self_inflicted"])
    else:
        error = (OutputsRefused if answer["refused"] else ExecutionFailed)(answer["error"])
    error.trace = answer["trace"]
    raise error


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
        "reads_parameters": spec.reads_parameters,
        "decoupled": spec.decoupled,
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
        reads_parameters=plain["reads_parameters"],
        decoupled=plain["decoupled"],
    )


def _serve(channel: socket.socket) -> None:
    """The child: load what the first frame says, then run frames until the socket ends."""
    pid = os.getpid()

    def answer(frame: list[Buffer]) -> None:
        if os.getpid() != pid:
            os._exit(1)  # the model forked, and this is the copy: only the original answers
        _send(channel, frame)

    _, load = decode_frame(_receive(channel))
    try:
        model = backends.load(load["kind"], load["options"], _spec_from_plain(load["declared"]))
        session = model.open_session(0)
    except BaseException as exc:  # whatever it is, the parent must be told in words
        answer(encode_frame({}, {"error": words_of(exc)}))
        return
    leave_out()
    answer(encode_frame({}, {"spec": _spec_to_plain(model.spec)}))
    while True:
        try:
            frame = _receive(channel)
        except EOFError:
            break
        tensors, extra = decode_frame(frame)
        try:
            if "stream" in extra:
                with contextlib.closing(cast(StreamingSession, session).stream(tensors, extra["parameters"])) as parts:
                    wanted = True
                    while wanted and (outputs := next(parts, None)) is not None:
                        answer(encode_frame(outputs, {"part": True, "last": isinstance(outputs, LastPart)}))
                        wanted = decode_frame(_receive(channel))[1]["next"]
                outcome = encode_frame({}, {"part": False})
            else:
                outcome = encode_frame(session.run(tensors, extra["parameters"]), {})
        except BaseException as exc:  # as above
            outcome = encode_frame({}, {"error": words_of(exc, traced=True), "trace": trace_of(exc), **_verdict(exc)})
        answer(outcome)
    for close in (session.close, model.close):
        try:
            close()
        except BaseException:  # nobody is left to be told
            traceback.print_exc()


def _verdict(exc: BaseException) -> dict[str, bool]:
    """Whether what a run raised has ended the session, and by the run's own doing; or was about outputs not as declared."""
    if isinstance(exc, SessionLost):
        return {"lost": True, "self_inflicted": exc.self_inflicted, "refused": False}
    ended = isinstance(exc, MemoryError) or not isinstance(exc, Exception)
    return {"lost": ended, "self_inflicted": ended, "refused": isinstance(exc, OutputsRefused)}


def _end_with(lifeline: int) -> None:
    """Have this process group killed when the other end of the pipe closes, which only the gateway holds.

    By the kernel where it can: a thread would wait for a run that holds the GIL. PR_SET_PDEATHSIG would spare what the model
    started, and strike when the gateway's thread that forked ends.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # it closed before
            os._exit(1)
    else:
        threading.Thread(target=_end_after, args=(lifeline,), daemon=True).start()


def _end_after(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        _serve(inherited)
