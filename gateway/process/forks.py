"""Keeping what is for this process alone from its forks: what ends when it closes it, such as a listener, and its signals.

A fork holds a copy of each descriptor. What it copied would go on for as long as it lives: a port be taken, a client wait on a
connection that nobody reads, a child not learn that it is to end.

It has the handlers of signals, too, and the pipe by which they wake an event loop, which is ours: a signal to the fork would be
heard here, and there do nothing. One that comes before it has let go of these waits until then.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Final, Protocol, TypeAlias

_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class HoldsDescriptors(Protocol):
    def descriptors(self) -> Iterable[int]:
        """Those that it holds now; -1 for one that is closed."""


_holders: Final["weakref.WeakSet[HoldsDescriptors]"] = weakref.WeakSet()
_usual: Final[dict[int, _Handler]] = {}
_forking: Final = threading.local()  # mask: of this thread, as it was before


def keep_from_forks(holder: HoldsDescriptors) -> None:
    """Of what it holds a fork has nothing, as long as the holder lives."""
    _holders.add(holder)


def keep_signals_from_forks(numbers: Iterable[int]) -> None:
    """Before this process handles them in its own way, for good: to its forks they go on to mean what they mean now.

    But for Ctrl-C's. A terminal sends it to all of them, and what is in flight may need them to the end of the drain.
    """
    for number in numbers:
        _usual.setdefault(number, _nothing if number == signal.SIGINT else signal.getsignal(number))


def _nothing(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which programs that the fork starts would inherit."""


def descriptor_of(transport: asyncio.BaseTransport | None) -> int:
    sock = None if transport is None else transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def end_for_forks(transport: asyncio.BaseTransport) -> None:
    """As its connection is lost, but still open. A fork that came while it was accepted has a copy: no holder knew it yet."""
    number = descriptor_of(transport)
    if number >= 0:
        known = transport.get_extra_info("socket")
        ours = socket.socket(known.family, known.type, known.proto, number)
        try:
            ours.shutdown(socket.SHUT_RDWR)  # what was written goes before the end
        except OSError:  # it has ended
            pass
        finally:
            ours.detach()


def _hold_signals() -> None:
    if _usual:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _usual)


def _hear_signals() -> None:
    mask = vars(_forking).pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _let_go() -> None:
    """In a fork."""
    _let_go_of_descriptors()
    if _usual:
        signal.set_wakeup_fd(-1)
    for number, handler in _usual.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    _usual.clear()
    _hear_signals()


def _let_go_of_descriptors() -> None:
    """The numbers stay taken: whoever closes one there would close somebody else's by then."""
    with contextlib.suppress(OSError):  # no number is left, even for this
        nothing = os.open(os.devnull, os.O_RDWR)
        for holder in list(_holders):
            for number in holder.descriptors():
                if number >= 0:
                    os.dup2(nothing, number, inheritable=False)
        os.close(nothing)
    _holders.clear()


os.register_at_fork(before=_hold_signals, after_in_parent=_hear_signals, after_in_child=_let_go)
