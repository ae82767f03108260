"""The process that `gateway serve` on Ray is: it runs Ray in a child, hears the signals, and ends whatever came of it.

Ray can neither be broken off while it starts nor be relied upon to stop: its driver hears no signal for seconds, and waits for
a process that is gone for a minute. So the driver is a child of this process, which asks it to stop, waits no longer than is
promised, and kills what is left. The child leads a session of its own and is born with the signals blocked that stop us, which
Ray's processes inherit: neither a signal to our process group, nor one to each process of our cgroup, ends Ray before it has
answered. As subreaper (Linux) this process becomes the parent of all that the child leaves behind, and so knows it.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import psutil

from gateway.process.console import words
from gateway.process.forks import keep_signals_from_forks
from gateway.process.interrupts import Interrupts, end_at_once, say_stopping, stop_signals
from gateway.process.run_dir import remove_shared_run_dir

LOST: Final = 3
"""The child's exit code if Ray was lost, which it has told."""

# What a child says, one a line.
SERVING: Final = "serving"
ENDING: Final = "ending"  # by itself
LEFT: Final = "left "  # and what is left behind if it is killed from now on
RUN_DIR: Final = "run_dir "  # and the name of a `shared_run_dir` that is to be removed at the end

UNANSWERED_S: Final = 120.0
"""After the drain: what a cluster that was joined gets for answering at all."""

_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)
_MARGIN_S: Final = 2.5  # beside the drain, of the 3 s that are promised
_KILLED_S: Final = 3.0
_LOOK_S: Final = 0.02


def supervise(
    command: Sequence[str],
    work: bytes,
    *,
    drain_timeout_s: float,
    env: dict[str, str] | None = None,
    unanswered_s: float = UNANSWERED_S,
) -> int:
    """Run a child until it ends or a signal ends it; then nothing that it started runs any more. On the main thread.

    command: gets one more argument, the descriptor for `Tell`. work: its standard input. Returns the exit code; does not return
    after a second Ctrl-C.
    """
    others = frozenset(psutil.Process().children())  # of the shell that has become this process
    _prctl(_SUBREAPER, 1)
    told, tell = os.pipe()
    with woken_by_signals() as woken:
        with blocked():
            child = subprocess.Popen(
                [*command, str(tell)], stdin=subprocess.PIPE, pass_fds=[tell], env=env, start_new_session=True
            )
        os.close(tell)
        watch = _Watch(child, drain_timeout_s, unanswered_s, others)
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
                stdin.write(work)
            return watch.until_ended(woken, told)
        finally:
            watch.end_all()
            os.close(told)


class _Watch:
    """What is known of the child, and what follows of it."""

    def __init__(
        self, child: "subprocess.Popen[bytes]", drain_timeout_s: float, unanswered_s: float, others: frozenset[psutil.Process]
    ) -> None:
        """others: our children that are not to end with it."""
        self._child = child
        self._drain_timeout_s = drain_timeout_s
        self._unanswered_s = unanswered_s
        self._others = others
        self._interrupts = Interrupts()
        self._serving = False
        self._left = ""
        self._run_dir = ""
        self._asked = False
        self._until_s: float | None = None
        self._margin_s = 0.0  # of that, what is beside the drain

    def until_ended(self, woken: int, told: int) -> int:
        """Returns the exit code, when the child has ended, or is to be killed."""
        sources = [woken, told]
        while (code := self._child.poll()) is None:
            left_s = None if self._until_s is None else self._until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                forced = f"ended by force: Ray still ran {self._margin_s:g} s after drain_timeout_s {self._drain_timeout_s:g}"
                words.error("; ".join(filter(None, (forced, self._left))))
                return 0 if self._asked and not self._left else 1
            ready, _, _ = select.select(sources, [], [], left_s)
            if told in ready:
                said = os.read(told, 4096).decode()
                self._hear(said)
                if not said:
                    sources.remove(told)
            if woken in ready and any(map(self._signalled, os.read(woken, 64))):
                return self._killed_early(told)
        self._hear_last(told)
        if code < 0:
            killed = f"gateway: the process that runs Ray was ended by {signal.Signals(-code).name}"
            words.error("; ".join(filter(None, (killed, self._left))))
            return 1
        return (0 if self._asked else 1) if code == LOST else code

    def _killed_early(self, told: int) -> int:
        """It had left nothing by what was heard: what it tells before it is killed counts as well."""
        self._child.kill()
        self._child.wait()
        self._hear_last(told)
        if self._left:
            words.error("%s", self._left)
        return 1 if self._left else 0

    def _hear_last(self, told: int) -> None:
        """What the child told before it ended."""
        os.set_blocking(told, False)
        with contextlib.suppress(BlockingIOError):  # a process of its holds the other end
            while said := os.read(told, 4096):
                self._hear(said.decode())

    def end_all(self) -> None:
        """Leave nothing of the child."""
        _end_all(but=self._others)
        if self._run_dir:
            remove_shared_run_dir(self._run_dir)

    def _hear(self, said: str) -> None:
        for line in said.splitlines():
            if line == SERVING:
                self._serving = True
            elif line == ENDING:
                self._wait_no_longer()
            elif line.startswith(LEFT):
                self._left = line.removeprefix(LEFT)
            elif line.startswith(RUN_DIR):
                self._run_dir = line.removeprefix(RUN_DIR)

    def _signalled(self, number: int) -> bool:
        """Returns whether the child is to be killed."""
        if number == signal.SIGCHLD:
            _reap(but=self._child.pid)
            return False
        meaning = self._interrupts.meaning(number, time.monotonic())
        if meaning == "end":
            self.end_all()
            end_at_once(self._left)
        if meaning == "stop":
            self._asked = True
            say_stopping(None if self._serving else 0, self._drain_timeout_s)
            if not self._serving and not self._left:
                return True
            self._child.terminate()
            self._wait_no_longer()
        return False

    def _wait_no_longer(self) -> None:
        """Than is promised, beginning now."""
        # It takes back what it put on a cluster that goes on, whose head may return only at the end of a drain's time.
        longer_s = self._drain_timeout_s + self._unanswered_s if self._left else 0.0
        until_s = time.monotonic() + self._drain_timeout_s + _MARGIN_S + longer_s
        if self._until_s is None or until_s < self._until_s:
            self._until_s = until_s
            self._margin_s = _MARGIN_S + longer_s


class Tell:
    """The child's side: made first of all in its `main`."""

    def __init__(self, descriptor: int, parent: int) -> None:
        """Binds its life to that of its parent."""
        _prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor

    def __call__(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, f"{line}\n".encode())


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Start processes that do not hear what stops us."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_signals(handle: Callable[[int, object], None]) -> None:
    """In the child: hear from now on what it was born deaf to. What is started after this hears it too."""
    for number in stop_signals():
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())


def outlive_signals() -> None:
    """In a process that inherited `blocked`, on any thread: ignore them, but let what is started from here hear them again.

    Elsewhere, as in a cluster of somebody else, nothing changes: whoever runs that may end its processes by a signal.
    """
    if signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return
    keep_signals_from_forks(stop_signals())
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    # A handler that does nothing: Python sets its own on the main thread only, and SIG_IGN would be inherited.
    nothing = ctypes.cast(libc.getpid, ctypes.c_void_p)
    for number in stop_signals():
        libc.signal(number, nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())


@contextlib.contextmanager
def woken_by_signals() -> Iterator[int]:
    """A descriptor from which the numbers of signals can be read, one a byte, as they come."""
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    usual = signal.set_wakeup_fd(wake)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (*stop_signals(), signal.SIGCHLD)}
    try:
        yield woken
    finally:
        for number in handlers:
            # What is still to come is the same press once more, and must not change how this ends.
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
        signal.set_wakeup_fd(usual)
        os.close(woken)
        os.close(wake)


def _end_all(*, but: frozenset[psutil.Process]) -> None:
    """Kill all that descends of this process, but for these children; those whose parents are gone are its own children."""
    until_s = time.monotonic() + _KILLED_S
    while time.monotonic() < until_s:
        left = [child for child in psutil.Process().children() if child not in but]
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                # Parents first, lest they tell of the loss of their children.
                for process in (child, *child.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(_LOOK_S)


def _reap(*, but: int) -> None:
    """Let those of our children vanish that have ended; as subreaper we may get any. but: whoever is waited for by others."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid != but and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
