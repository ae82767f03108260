"""A model in processes of its own: one process per session, spoken to in frames over a private socket pair.

For code that holds the GIL or may crash. The child is `python -m gateway.engine.session_process FD FD`; it gets one frame with
what to load, answers with the model's spec, then runs one batch per frame. It ends when its socket does. What it prints goes to
the gateway's standard error. A child that dies, is killed or breaks the framing is a lost session.
"""

import contextlib
import os
import socket
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, Final, cast, get_args

import numpy as np

import backends
from backends.base import (
    BackendError,
    Device,
    ExecutionFailed,
    InputRefused,
    LastPart,
    LoadFailed,
    ModelSpec,
    OutputsRefused,
    SessionLost,
    StreamingSession,
    Tensors,
    trace_of,
    words_of,
)
from backends.early_failure import EarlyFailure
from backends.refusals import Refusal
from gateway.garbage import leave_out
from gateway.process.child import Child, ChildLost, receive, send, serve
from gateway.process.prints import never_raise
from gateway.wire.frames import decode_frame, encode_frame, spec_from_plain, spec_to_plain
from gateway.wire.tensors import Buffer

# What a run raised after which its session is still good, in the frame that tells it.
_FAULTS: Final[dict[str, Callable[[str], ExecutionFailed]]] = {
    "": ExecutionFailed,
    "outputs": OutputsRefused,
    **{code: partial(InputRefused, code=code) for code in get_args(Refusal)},
}


class ProcessModel:
    """A `Model` whose sessions are processes. Number 0 of them is started by `load`, since only one can tell the spec."""

    def __init__(self, kind: str, options: Mapping[str, Any], declared: ModelSpec) -> None:
        self.spec = declared
        self.device = Device("cpu")
        self.memory_bytes = 0  # the children's, which this process does not see
        self._load: dict[str, Any] = {"kind": kind, "options": dict(options), "declared": spec_to_plain(declared)}
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[ProcessSession] = weakref.WeakSet()
        self._spare: ProcessSession | None = None
        self._closed = False

    def load(self) -> "ProcessModel":
        """Raises: LoadFailed."""
        model = str(self._load["options"].get("model", ""))
        if model.startswith("__main__:"):  # which in the child is this module
            raise LoadFailed(
                f"model: {model!r} is defined in the script or notebook that runs, which a process of its own cannot import: "
                "put it into a file, as FILE.py:name, or leave `isolation: process` out"
            )
        self._spare = self._start(0)
        self.spec = self._spare.spec
        return self

    def open_session(self, index: int) -> "ProcessSession":
        spare = None
        if not index:
            with self._lock:
                spare, self._spare = self._spare, None
        return spare or self._start(index)

    def close(self) -> None:
        """End all children at once, those that are still loading too. From any thread."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.kill()

    def _start(self, index: int) -> "ProcessSession":
        session = ProcessSession()
        with self._lock:
            self._sessions.add(session)
            closed = self._closed
        if closed:
            session.kill()
        try:
            session.load({**self._load, "index": index})
        except BaseException:
            session.close()
            raise
        return session


class ProcessSession:
    """One child process. Life: made -> load -> run … -> close; kill at any time, from any thread."""

    spec: ModelSpec  # from load on

    def __init__(self) -> None:
        """Start the child. Raises: OSError."""
        self._child = Child("gateway.engine.session_process")

    @property
    def pid(self) -> int:
        return self._child.pid

    def load(self, load: Mapping[str, Any]) -> None:
        """Raises: LoadFailed, with the child's own message."""
        try:
            _, answer = self._exchange({}, load)
        except SessionLost as exc:
            raise LoadFailed(f"{exc} while it loaded the model") from exc
        if "error" in answer:
            raise LoadFailed(answer["error"])
        self.spec = spec_from_plain(answer["spec"])

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
                if "failed" in answer:
                    yield EarlyFailure(_error_of(answer["failed"]))
                else:
                    yield LastPart(outputs) if answer["last"] else outputs
            except GeneratorExit:
                _, answer = self._exchange({}, {"next": False})
                _check(answer)
                raise
            outputs, answer = self._exchange({}, {"next": True})

    def watch(self, died: Callable[[str], None]) -> None:
        self._child.watch(lambda status: died(f"process {self.pid} ended with status {status}"))

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        self._child.close()

    def _exchange(self, tensors: Tensors, extra: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        frame = encode_frame(tensors, extra)
        try:
            outputs, answer = decode_frame(self._child.ask(frame))
            for name in answer.get("texts", ()):
                outputs[name] = np.vectorize(bytes.decode, otypes=[object])(outputs[name])
            return outputs, answer
        except ChildLost as exc:
            how = f"process {self.pid} of the session {exc}"
            raise SessionLost(how, self_inflicted=exc.self_inflicted, begun=exc.begun) from exc
        except Exception as exc:
            raise SessionLost(
                f"process {self.pid} of the session answered no frame: {words_of(exc)}", self_inflicted=True
            ) from exc


def _check(answer: Mapping[str, Any]) -> None:
    """Raises: BackendError, if a child's answer is one."""
    if "error" in answer:
        raise _error_of(answer)


def _error_of(answer: Mapping[str, Any]) -> BackendError:
    """What `_told` was told."""
    error: BackendError
    if answer["lost"]:
        error = SessionLost(answer["error"], self_inflicted=answer["self_inflicted"], begun=answer["begun"])
    else:
        error = _FAULTS[answer["fault"]](answer["error"])
    error.trace = answer["trace"]
    return error


def _serve(channel: socket.socket) -> None:
    """The child: load what the first frame says, then run frames until the socket ends."""
    never_raise()
    pid = os.getpid()

    def answer(frame: list[Buffer]) -> None:
        if os.getpid() != pid:
            os._exit(1)  # the model forked, and this is the copy: only the original answers
        send(channel, frame)

    _, load = decode_frame(receive(channel))
    try:
        model = backends.load(load["kind"], load["options"], spec_from_plain(load["declared"]))
        session = model.open_session(load["index"])
    except BaseException as exc:  # whatever it is, the parent must be told in words
        answer(encode_frame({}, {"error": words_of(exc)}))
        return
    leave_out()
    answer(encode_frame({}, {"spec": spec_to_plain(model.spec)}))
    while True:
        try:
            frame = receive(channel)
        except EOFError:
            break
        tensors, extra = decode_frame(frame)
        try:
            if "stream" in extra:
                with contextlib.closing(cast(StreamingSession, session).stream(tensors, extra["parameters"])) as parts:
                    wanted = True
                    while wanted and (outputs := next(parts, None)) is not None:
                        failed = {"failed": _told(outputs.error)} if isinstance(outputs, EarlyFailure) else {}
                        last = isinstance(outputs, LastPart)
                        answer(_frame(outputs, {"part": True, "last": last, **failed}))
                        wanted = decode_frame(receive(channel))[1]["next"]
                outcome = encode_frame({}, {"part": False})
            else:
                outcome = _frame(session.run(tensors, extra["parameters"]), {})
        except BaseException as exc:  # as above
            outcome = encode_frame({}, _told(exc))
        answer(outcome)
    for close in (session.close, model.close):
        try:
            close()
        except BaseException:  # nobody is left to be told
            traceback.print_exc()


def _frame(outputs: Tensors, extra: dict[str, Any]) -> list[Buffer]:
    """In it all texts are bytes; who asks from Python gets `str` where the model gave that."""
    arrays = outputs.items()
    texts = [name for name, array in arrays if array.dtype.kind in "OU" and all(isinstance(each, str) for each in array.flat)]
    return encode_frame(outputs, {**extra, "texts": texts})


def _told(exc: BaseException) -> dict[str, bool | str]:
    return {"error": words_of(exc, traced=True), "trace": trace_of(exc), **_verdict(exc)}


def _verdict(exc: BaseException) -> dict[str, bool | str]:
    """Whether what a run raised has ended the session, and by the run's own doing; else which of _FAULTS it is."""
    if isinstance(exc, SessionLost):
        return {"lost": True, "self_inflicted": exc.self_inflicted, "begun": exc.begun, "fault": ""}
    ended = isinstance(exc, MemoryError) or not isinstance(exc, Exception)
    fault = "outputs" if isinstance(exc, OutputsRefused) else ""
    if isinstance(exc, InputRefused):
        fault = exc.code
    return {"lost": ended, "self_inflicted": ended, "begun": True, "fault": fault}


if __name__ == "__main__":
    serve(_serve)
