"""The time that all connections together have, of each turn of an event loop, for what takes more of it than a short read.

What comes is handled at once while there is time. Who comes when it is used up waits, as does who has more to do than it lets
others wait for: one after the other, each for a millisecond or so. Without this, a thousand connections would take a second of
every turn, and whoever asks for little would wait for them all.
"""

import asyncio
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from gateway.turns import beside
from gateway.wire.compression import Outcome, Work, outcome_of

SHORT_READ_BYTES: Final = 1 << 10  # a read of no more, a small request or two, is handled as it comes, whoever else waits
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


def run_beside(work: Work, done: Callable[[Outcome], None]) -> None:
    """Work on a thread beside the running loop, then give done the outcome on it."""
    try:
        future = asyncio.get_running_loop().run_in_executor(None, beside, partial(outcome_of, work))
    except RuntimeError:  # no thread can be started: an answer that holds others up is better than none
        done(outcome_of(work))
    else:
        future.add_done_callback(lambda future: done(future.result()))


class LongTurns:
    """On the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._called = False  # `_go_on`, for the loop's next turn
        self._spent_ns = 0  # of this turn, on what did not wait
        self._since_ns = 0  # when what goes on was begun; 0: nothing does

    def begin(self) -> None:
        """Something begins that takes of this turn's time; between this and `end` nothing else does."""
        self._since_ns = time.monotonic_ns()

    def end(self) -> None:
        self._spent_ns += time.monotonic_ns() - self._since_ns
        self._since_ns = 0
        if self._spent_ns >= _TURN_NS // 2 and not self._called:
            self._call()

    @property
    def spent_ns(self) -> int:
        """Of this turn's time."""
        now_ns = time.monotonic_ns() if self._since_ns else 0
        return self._spent_ns + now_ns - self._since_ns

    @property
    def spent(self) -> bool:
        """Whether this turn's time is used up."""
        return self.spent_ns >= _TURN_NS

    def may_begin(self) -> bool:
        """Whether long work may be done at once: there is time, and nobody waits for it; if not, `wait`."""
        return not self._waiting and not self.spent

    def wait(self, go_on: Callable[[], None]) -> None:
        """Have it called when its turn has come: never within this call, and also when its connection is gone by then."""
        self._waiting.append(go_on)
        if not self._called:
            self._call()

    def _call(self) -> None:
        self._called = True
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._called, self._spent_ns = False, 0
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
