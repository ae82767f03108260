"""What the signals mean that come to a gateway: the first asks it to stop, a later Ctrl-C to end at once."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Final, Literal, NoReturn

from gateway.process.console import words
from gateway.process.prints import flush

ENDED_AT_ONCE: Final = 130  # as a shell tells of what SIGINT ended

_STANDARD_ERROR: Final = 2

# Wrappers (make, uv, timeout) pass on what their children get from the terminal as well.
_SAME_PRESS_S: Final = 0.5


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks to stop: Ctrl-C, whoever ends processes, a terminal that closes, unless (nohup) that is to be outlived."""
    usual = (signal.SIGINT, signal.SIGTERM)
    return usual if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*usual, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """By another signal than Ctrl-C's, and as by that."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def ended_by(exc: KeyboardInterrupt) -> tuple[str, int]:
    """In words, and the exit code, as a shell reports it."""
    if not isinstance(exc, Ended):
        return "Ctrl-C", ENDED_AT_ONCE
    return signal.Signals(exc.number).name, 128 + exc.number


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """On the main thread, around what tells what it leaves when it is ended: by SIGTERM and SIGHUP as by Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in stop_signals() if number != signal.SIGINT]

    def end(number: int, _frame: object) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)  # what comes behind it hurries nothing
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Interrupts:
    """The signals of one run, in the order they come."""

    def __init__(self) -> None:
        self._asked_s: float | None = None

    def meaning(self, number: int, now_s: float) -> Literal["stop", "end", "nothing"]:
        """number: of `stop_signals`. now_s: monotonic. A second SIGTERM hurries nothing: draining is bounded in time."""
        if self._asked_s is None:
            self._asked_s = now_s
            return "stop"
        return "end" if number == signal.SIGINT and now_s - self._asked_s >= _SAME_PRESS_S else "nothing"


def say_stopping(pending: int | None, drain_timeout_s: float) -> None:
    """pending: requests in flight; None: unknown."""
    if pending == 0:
        words.info("stopping")
        return
    waiting = "requests in flight have" if pending is None else f"{pending} in flight, which {'have' if pending > 1 else 'has'}"
    words.info("stopping: %s up to %g s; Ctrl-C again ends at once", waiting, drain_timeout_s)


@contextlib.contextmanager
def ctrl_c_ends_at_once() -> Iterator[None]:
    """On the main thread, around what a KeyboardInterrupt may break instead of end: PyTorch, being imported, aborts on one."""

    def end(_number: int, _frame: object) -> None:
        # Past logs and streams: what the signal came into, or another thread, may hold their locks and wait for a reader.
        room = select.poll()
        with contextlib.suppress(OSError):  # it is closed
            room.register(_STANDARD_ERROR, select.POLLOUT)
            if room.poll(0):
                os.write(_STANDARD_ERROR, b"gateway: ended by Ctrl-C\n")
        os._exit(ENDED_AT_ONCE)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # whoever started this wants it otherwise: nohup
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def ctrl_c_is_kept() -> Iterator[None]:
    """Around what may make another error of a KeyboardInterrupt, or none, as imports do: it is raised again in the end."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # nohup
        yield
        return
    came: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as exc:
        if came:
            raise KeyboardInterrupt from exc
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def end_at_once(left: str = "") -> NoReturn:
    """End this process with what it runs, after a word. What it started ends with it. left: what does not."""
    words.warning("; ".join(filter(None, ("ended at once: requests in flight are lost", left))))
    flush()
    os._exit(ENDED_AT_ONCE)
