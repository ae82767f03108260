"""A process of our own, asked over a private socket pair: one message there, one back.

The child is `python -m MODULE FD FD`. It ends when its socket does. What it prints goes to the gateway's standard error.

The child leads a process group, so that what it starts ends with it. The group cannot outlive the gateway either, not even
while its code holds the GIL: the kernel itself kills it when the gateway's end of a pipe closes (`lifeline`). So it does with
commands that are waited for (`run`).
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import numpy as np

from backends.model_folders import with_path
from gateway.process import lifeline as lifelines
from gateway.process.forks import keep_from_forks
from gateway.wire.tensors import Buffer

_SIZE_BYTES: Final = 8
_STOP_TIMEOUT_S: Final = 5.0
# How long a child whose socket has ended may take to end as well.
_EXIT_S: Final = 1.0
# By which somebody else ends a process: an operator, the kernel that needs its memory.
_FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM)


_children: Final["weakref.WeakSet[Child]"] = weakref.WeakSet()


def living_pids() -> Iterable[int]:
    """Of the children of this process."""
    return [child.pid for child in list(_children) if not child.ended]


class ChildLost(Exception):
    """The child answers no more: how that came. self_inflicted: by what it ran itself. begun: False: it has not got all."""

    def __init__(self, how: str, *, self_inflicted: bool = False, begun: bool = True) -> None:
        super().__init__(how)
        self.self_inflicted = self_inflicted
        self.begun = begun


class _Lifeline:
    """Of a group of processes: what is killed when this is cut, or ends with this process."""

    def __init__(self) -> None:
        """theirs: for the group, to be closed here."""
        self.theirs, self._ours = os.pipe()
        keep_from_forks(self)

    def descriptors(self) -> Iterable[int]:
        return (self._ours,)

    def cut(self) -> None:
        ours, self._ours = self._ours, -1
        os.close(ours)


class Child:
    """One child process. Life: made -> ask … -> close; kill at any time, from any thread."""

    def __init__(self, module: str) -> None:
        """Start it: `python -m module`, which calls `serve`. Raises: OSError."""
        self._socket, theirs = socket.socketpair()
        keep_from_forks(self)
        self._lifeline = lifeline = _Lifeline()
        try:
            # The path is handed on, so that a model file beside the gateway's start directory is found in the child as well.
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(lifeline.theirs)],
                pass_fds=[theirs.fileno(), lifeline.theirs],
                env=with_path(),
                stdin=subprocess.DEVNULL,
                stdout=2,  # on its standard output the gateway speaks to programs
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            lifeline.cut()
            raise
        finally:
            theirs.close()
            os.close(lifeline.theirs)
        self._reaping = threading.Lock()
        self._status: Future[int] = Future()
        _children.add(self)
        threading.Thread(target=self._reap, name=f"reap-{self.pid}", daemon=True).start()

    def descriptors(self) -> Iterable[int]:
        return (self._socket.fileno(),)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._status.done()

    @property
    def hung_up(self) -> bool:
        """Whether it answers no more: its end of the socket is closed a moment before its status is known."""
        try:
            return self.ended or not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # this end is closed, too
            return True

    def ask(self, pieces: Sequence[Buffer]) -> memoryview:
        """Send one message, in pieces, and wait for the one that answers it. Raises: ChildLost."""
        if self._status.done():
            raise ChildLost(f"ended with status {self._status.result()}", begun=False)
        sent = False
        try:
            send(self._socket, pieces)
            sent = True
            return receive(self._socket)
        except (OSError, EOFError) as exc:
            status = self._ended_within(_EXIT_S)
            how = "has left its connection" if status is None else f"ended with status {status}"
            raise ChildLost(how, self_inflicted=status not in _FROM_OUTSIDE, begun=sent) from exc

    def watch(self, ended: Callable[[int], None]) -> None:
        """ended: gets the child's status when it has ended, on any thread."""
        self._status.add_done_callback(lambda status: ended(status.result()))

    def kill(self) -> None:
        with self._reaping:  # or its pid could be another's by now
            if not self._status.done():
                self._kill_group()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # also where another process has a copy
        self._socket.close()
        if self._ended_within(_STOP_TIMEOUT_S) is None:
            self.kill()
            self._ended_within(_STOP_TIMEOUT_S)

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
            self._kill_group()  # what the child started
            status = self._process.wait()
            self._lifeline.cut()
            # What has left the group may hold the other end: who asks must not wait for that.
            with contextlib.suppress(OSError):  # closed before
                self._socket.shutdown(socket.SHUT_RDWR)
            self._status.set_result(status)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: nobody is left
            os.killpg(self.pid, signal.SIGKILL)


def run(command: Sequence[str], *, cwd: Path, longest_s: float) -> tuple[int, bytes]:
    """Run a command to its end. Returns: its exit status, and what it wrote to standard error.

    Raises: TimeoutError, after which nothing of it is left; OSError.
    """
    lifeline = _Lifeline()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", lifelines.__file__, str(lifeline.theirs), *command],
            pass_fds=[lifeline.theirs],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except BaseException:
        lifeline.cut()
        raise
    finally:
        os.close(lifeline.theirs)
    with process:
        try:
            _, said = process.communicate(timeout=longest_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not ended within {longest_s:g} s") from None
        finally:
            lifeline.cut()  # which kills what is left
    return process.returncode, said


def send(channel: socket.socket, pieces: Sequence[Buffer]) -> None:
    size = sum(len(piece) for piece in pieces)
    channel.sendall(size.to_bytes(_SIZE_BYTES, "little") + bytes(pieces[0]))
    for piece in pieces[1:]:
        channel.sendall(piece)


def receive(channel: socket.socket) -> memoryview:
    """One message. Raises: EOFError at the end of the stream."""
    size = int.from_bytes(_receive_exactly(channel, _SIZE_BYTES), "little")
    return _receive_exactly(channel, size)


def _receive_exactly(channel: socket.socket, size: int) -> memoryview:
    # numpy, since bytearray would write the zeros first, and hold the interpreter meanwhile.
    buffer = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]  # an ndarray is a buffer
    view = buffer
    while view:
        count = channel.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return buffer


def serve(serve_channel: Callable[[socket.socket], None]) -> None:
    """In the child, whose arguments are the two descriptors: end with the gateway, and have its messages answered."""
    lifelines.end_with(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        serve_channel(channel)


def give_way(nice: int) -> None:
    """In a child: have the gateway go first where processors are scarce. nice: added to the nice value."""
    with contextlib.suppress(OSError):
        os.nice(nice)
    # Linux may share processors among sessions first: this one is a session, in which it would give way to nobody.
    with contextlib.suppress(OSError):
        for _ in range(3):
            with contextlib.suppress(BlockingIOError):
                Path("/proc/self/autogroup").write_text(str(nice))
                return
            time.sleep(0.1)  # the kernel takes ten a second, of whoever may not administer it
