"""The time that the connections of a listener have for TLS, and what else they share.

What comes costs more than its bytes tell: a first message of 300 asks for a signature, which takes a millisecond, and 27 ask
for new keys, which takes 26 microseconds (2026-11-23, 2 cores). So handshakes and decrypting, of all connections of a listener,
have a part of each of the loop's turns. Who comes when that is used up waits for the next, in the order of coming, and is read
no further until then.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Final, Protocol

from gateway.engine.failure_log import FailureLog
from gateway.process.certificates import Certificates

# OpenSSL keeps buffers as large as what they once held: 64 KiB of each way, for as long as a connection lasts.
READ_BYTES: Final = 64 << 10
_TURN_NS: Final = 1_000_000  # of handshakes and decrypting

log = logging.getLogger(__name__)


class Waiter(Protocol):
    """A connection that waits for its turn."""

    def go_on(self) -> None:
        """It is its turn."""

    def abort(self) -> None:
        """Cut it off."""


class Tls:
    """What the connections of one listener share."""

    def __init__(self, certificates: Certificates, protocol: str, handshake_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """protocol: of `certificates`. handshake_s: how long a handshake may take."""
        self.certificates = certificates
        self.protocol = protocol
        self.handshake_s = handshake_s
        # Reads of all connections land here, one at a time; so does what they mean, for connections without a buffer.
        self.encrypted = memoryview(bytearray(READ_BYTES))
        self.plain = memoryview(bytearray(READ_BYTES))
        self._loop = loop
        self._waiting: deque[Waiter] = deque()
        self._spent_ns = 0  # of this turn
        self._since_ns = 0  # when what is being decrypted was begun; 0: nothing is
        self._turns = False  # the next turn is asked for
        self._failures = FailureLog()

    def wait(self, connection: Waiter) -> None:
        """Have a connection go on when it is its turn."""
        self._waiting.append(connection)
        self._ask_for_turn()

    def begin(self) -> None:
        """A connection begins to shake hands or to decrypt; between this and `end` nothing else is done."""
        self._since_ns = time.monotonic_ns()

    def end(self) -> None:
        self._spent_ns += time.monotonic_ns() - self._since_ns
        self._since_ns = 0
        if self._spent_ns >= _TURN_NS // 2:
            self._ask_for_turn()

    @property
    def spent(self) -> bool:
        """Whether this turn's time is used up."""
        now_ns = time.monotonic_ns() if self._since_ns else 0
        return self._spent_ns + now_ns - self._since_ns >= _TURN_NS

    def _ask_for_turn(self) -> None:
        if not self._turns:
            self._turns = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turns, self._spent_ns = False, 0
        waiting = self._waiting
        for _ in range(len(waiting)):
            connection = waiting.popleft()
            try:
                connection.go_on()
            except BaseException:
                log.exception("%r failed", connection)
                connection.abort()
            if self.spent:
                break
        if waiting:
            self._ask_for_turn()

    def tell(self, peer: object, reason: str, verification: str = "") -> None:
        """Log that a handshake has failed, if there were not too many. reason, verification: OpenSSL's words."""
        left_out = self._failures.take(time.monotonic_ns())
        if left_out is not None:
            others = f" ({left_out} like it before are left out)" if left_out else ""
            said = verification or reason.lower().replace("_", " ")
            address = peer[0] if isinstance(peer, tuple) else peer
            log.info("TLS handshake with %s failed%s: %s", address, others, said)
