"""Connections that have long work to do, on one event loop: one after the other, for some milliseconds of each of its turns.

Each of them lets others in after a millisecond or so. Without this, a thousand of them would take a second of every turn, and
whoever asks for little would wait for them all.
"""

import asyncio
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_TURN_NS: Final = 1_000_000
_AT_ONCE: Final = 8  # what one of them brings about, such as a read, comes behind it
_CLOSED: Final = 7  # Linux' TCP_CLOSE


def is_gone(transport: asyncio.BaseTransport) -> bool:
    """Whether the client has reset the connection, which a transport that does not read learns much later. Linux knows."""
    if sys.platform != "linux" or (sock := transport.get_extra_info("socket")) is None:
        return False
    try:
        state: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:  # it has just been closed here
        return True
    return state[0] == _CLOSED


class LongTurns:
    """On the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._called = False  # `_go_on`, for the loop's next turn

    def may_begin(self) -> bool:
        """Whether long work may be done at once, as nobody else does any; if not, `wait`."""
        if self._called:
            return False
        self._call()
        return True

    def wait(self, go_on: Callable[[], None]) -> None:
        """Have it called when its turn has come: never within this call, and also when its connection is gone by then."""
        self._waiting.append(go_on)
        if not self._called:
            self._call()

    def _call(self) -> None:
        self._called = True
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._called = False
        waiting = self._waiting
        until_ns = time.monotonic_ns() + _TURN_NS
        try:
            for _ in range(min(_AT_ONCE, len(waiting))):
                waiting.popleft()()
                if time.monotonic_ns() >= until_ns:
                    break
        finally:  # what one of them raises is the loop's to tell, and ends no other's turn
            if waiting and not self._called:
                self._call()
