"""TLS between a socket and a connection of ours, which sees a transport like any other, with the bytes that are meant.

The event loops have their own, which would not do: it hides what the socket's transport holds, so that answers nobody reads
would not count as held; it cannot end one direction alone, which lets a client read an answer that came before it had sent all
(RFC 9112, section 9.6); and it encrypts an answer of any length at once.

Here a long answer is encrypted piece by piece, as the socket takes it, and the sizes that the connection is told are of all
that waits. What the connection writes before the handshake has ended waits for that end, so it can be told of the socket at
once: it counts, and is counted, from the first byte on.

What comes costs more than its bytes tell: a first message of 300 asks for a signature, which takes a millisecond, and 27 ask
for new keys, which takes 26 microseconds (2026-11-23, 2 cores). So handshakes, and decrypting, of all connections of a
listener, have each a part of the loop's turns. Who comes when that is used up waits for the next, in the order of coming, and
is read no further until then. Who has shaken hands waits for none that has not, of which 300 take a tenth of a second; nor does
a short record, which is a small request, wait for many.
"""

import asyncio
import contextlib
import logging
import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from gateway.edges.long_turns import SHORT_READ_BYTES, LongTurns, is_gone
from gateway.engine.failure_log import FailureLog
from gateway.process.certificates import Certificates
from gateway.wire.date import date_line
from gateway.wire.http_errors import error_body
from gateway.wire.tensors import Buffer

# OpenSSL keeps buffers as large as what they once held: 64 KiB of each way, for as long as a connection lasts.
_READ_BYTES: Final = 64 << 10
_READ_SHAKING_BYTES: Final = 8 << 10  # held until it is the connection's turn: of all who do not shake hands, little
_READS_AT_ONCE: Final = 4  # of _READ_BYTES; uvloop would go on 32 times before others have their turn
_HEAD_BYTES: Final = 5  # of a record, the last two of them its length (RFC 8446, section 5.1)
_SLICE_BYTES: Final = 1 << 10  # of short records, decrypted without a look at the time: as requests for new keys 1 ms
_PIECE_BYTES: Final = 64 << 10
_AHEAD_BYTES: Final = 256 << 10  # encrypted, and not taken by the socket; and the most that is encrypted in a turn
_PLAIN: Final = re.compile(rb"[A-Z]{3,8} ")  # HTTP's methods, and the preface of HTTP/2
_NOT_TLS: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%bConnection: close\r\n\r\n%b"
)
_USUAL_HIGH_BYTES: Final = 64 << 10  # asyncio's
_CLOSE: Final = "close"
_EOF: Final = "eof"

log = logging.getLogger(__name__)


class Tls:
    """What the connections of one listener share."""

    def __init__(self, certificates: Certificates, protocol: str, handshake_s: float) -> None:
        """protocol: of `certificates`. handshake_s: how long a handshake may take."""
        self.certificates = certificates
        self.protocol = protocol
        self.handshake_s = handshake_s
        self.handshakes = LongTurns()
        self.turns = LongTurns()  # of decrypting
        # Reads of all connections land here, one at a time; so does what they mean, for connections without a buffer.
        self.encrypted = memoryview(bytearray(_READ_BYTES))
        self.plain = memoryview(bytearray(_READ_BYTES))
        self._failures = FailureLog()

    def tell(self, peer: object, reason: str, verification: str = "") -> None:
        """Log that a handshake has failed, if there were not too many. reason, verification: OpenSSL's words."""
        left_out = self._failures.take(time.monotonic_ns())
        if left_out is not None:
            others = f" ({left_out} like it before are left out)" if left_out else ""
            said = verification or reason.lower().replace("_", " ")
            address = peer[0] if isinstance(peer, tuple) else peer
            log.info("TLS handshake with %s failed%s: %s", address, others, said)


def within(
    tls: Tls, connection: Callable[[], asyncio.BufferedProtocol | asyncio.Protocol], loop: asyncio.AbstractEventLoop
) -> "Callable[[], TlsConnection]":
    """What makes the protocol of each new socket."""
    return lambda: TlsConnection(connection(), tls, loop)


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of a socket, and the transport of the connection within."""

    __slots__ = (
        "_deadline", "_delivering", "_ended", "_ending", "_fed", "_full", "_full_reads", "_held", "_high", "_incoming",
        "_inner", "_left", "_loop", "_low", "_of_record", "_open", "_outgoing", "_paused", "_pending", "_pending_bytes",
        "_sends_later", "_session", "_socket", "_tls", "_waits",
    )  # fmt: skip

    def __init__(self, inner: asyncio.BufferedProtocol | asyncio.Protocol, tls: Tls, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._inner = inner
        self._tls = tls
        self._loop = loop
        self._socket: asyncio.Transport
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._session: ssl.SSLObject | None = None  # None: not a byte has come
        self._open = False  # the handshake is done
        self._deadline: asyncio.TimerHandle | None = None  # of the handshake
        self._left: memoryview | bytes = b""  # read, and not yet given to OpenSSL
        self._fed = False  # OpenSSL, in this turn
        self._full_reads = 0  # in a row
        self._of_record = 0  # bytes to come of the record that was last given to it
        self._waits = False  # for its turn, and reads nothing until then
        self._pending: deque[Buffer] = deque()  # written, and not yet encrypted
        self._pending_bytes = 0
        self._high, self._low = _USUAL_HIGH_BYTES, _USUAL_HIGH_BYTES // 4
        self._sends_later = False  # enough was encrypted in this turn
        self._full = False  # the socket takes no more for now, and tells when it does
        self._held = False  # the connection within was told to pause writing
        self._paused = False  # it wants no more bytes
        self._delivering = False
        self._ending = ""  # what is to follow what waits: _EOF or _CLOSE
        self._ended = False  # the client was told that nothing follows, or cannot be

    def __repr__(self) -> str:
        return f"<TlsConnection of {self._inner!r}{'' if self._open else ', in handshake'}>"

    # the socket's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._socket.set_write_buffer_limits(high=self._high)
        self._deadline = self._loop.call_later(self._tls.handshake_s, self.abort)
        self._inner.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._handshake_over()
        self._ended = True
        self._left = b""
        self._pending.clear()
        self._pending_bytes = 0
        # They hold each other: free both now, not when the collector comes by.
        inner, self._inner = self._inner, asyncio.Protocol()
        inner.connection_lost(exc)

    def eof_received(self) -> None:
        """Without a word of TLS before it: the client is gone. Returning None closes the socket."""

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._tls.encrypted if self._open else self._tls.encrypted[:_READ_SHAKING_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._ended or (self._ending and self._open):  # nobody wants it any more
            return
        read = self._tls.encrypted[:nbytes]
        self._left = memoryview(b"".join((self._left, read))) if self._left else read
        if self._open and (not self._tls.turns.spent or _is_short(self._left, self._of_record)):
            self._deliver()
            self._full_reads = self._full_reads + 1 if nbytes == _READ_BYTES else 0
            if self._full_reads == _READS_AT_ONCE or (self._more and not self._paused):
                self._wait()
        else:
            self._wait()
        if self._left:
            self._left = memoryview(bytes(self._left))  # the next read of any connection lands there

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._send()

    # turns

    def _wait(self) -> None:
        """Read nothing until it is its turn, which goes on with what is here."""
        if not self._waits:
            self._waits = True
            self._pause_socket()
            (self._tls.turns if self._open else self._tls.handshakes).wait(self._take_turn)

    def _take_turn(self) -> None:
        if not self._ended and is_gone(self._socket):
            self.abort()
            return
        try:
            self._go_on()
        except BaseException:
            log.exception("%r failed", self)
            self.abort()

    def _go_on(self) -> None:
        self._waits = False
        if self._open:
            self._full_reads = 0
            self._deliver()
        elif not self._ended:
            self._shake()
        if self._more and not self._paused:
            self._wait()
        elif not self._paused:
            self._resume_socket()

    def _pause_socket(self) -> None:
        if not self._socket.is_closing():
            self._socket.pause_reading()

    def _resume_socket(self) -> None:
        if not self._waits and not self._socket.is_closing():
            self._socket.resume_reading()

    # handshake

    def _shake(self) -> None:
        """Go on with the handshake, by what is there."""
        session = self._session
        if session is None:
            if _PLAIN.match(self._left):
                self._refuse_plain()
                return
            context = self._tls.certificates.context(self._tls.protocol)
            session = self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        while True:
            self._feed()
            try:
                session.do_handshake()
                self._tls.certificates.look_again(session)
            except ssl.SSLWantReadError:
                if self._more:
                    continue
                self._flush()
                return
            except ssl.SSLError as exc:
                self._tls.tell(self._socket.get_extra_info("peername"), exc.reason or "", getattr(exc, "verify_message", ""))
                self._fail()
                return
            break
        self._open = True
        self._handshake_over()
        self._flush()
        self._send()
        self._wait()

    def _refuse_plain(self) -> None:
        """Tell a client that speaks no TLS so, in HTTP, which is what it may speak."""
        self._tls.tell(self._socket.get_extra_info("peername"), "no TLS")
        self._ended = True
        body = error_body("this port speaks TLS: ask by https://")
        self._left = b""
        self._socket.write(_NOT_TLS % (len(body), date_line(), body))
        self._socket.close()

    def _handshake_over(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _fail(self) -> None:
        """Tell the client what is wrong with what it sent, as TLS says it, and close."""
        self._ended = True
        self._left = b""
        self._flush()
        self._socket.close()

    def _flush(self) -> None:
        if self._socket.get_write_buffer_size() > 2 * _AHEAD_BYTES:  # it makes TLS answer, and takes no answer
            self.abort()
        elif self._outgoing.pending:
            self._socket.write(self._outgoing.read())

    # what comes

    @property
    def _more(self) -> bool:
        """Whether there is more for OpenSSL than a part of a record's head, which is kept until the rest of it comes."""
        return bool(self._left) and (self._of_record > 0 or len(self._left) >= _HEAD_BYTES)

    def _feed(self) -> bool:
        """Give OpenSSL more of what was read: a long record, or some short ones. False: there is no more, or no time for it."""
        if not self._more or (self._fed and self._tls.turns.spent):
            return False
        self._fed = self._open
        left = self._left
        size = 0
        while size < _SLICE_BYTES and (self._of_record or len(left) - size >= _HEAD_BYTES):
            if not self._of_record:
                self._of_record = _HEAD_BYTES + int.from_bytes(left[size + 3 : size + _HEAD_BYTES])
            taken = min(self._of_record, len(left) - size)
            size += taken
            self._of_record -= taken
            if self._of_record:
                break
        self._incoming.write(left[:size])
        self._left = left[size:]
        return True

    def _deliver(self) -> None:
        """Give the connection what is there, for as long as a turn lasts."""
        session = self._session
        if self._delivering or session is None:
            return
        self._delivering = True
        self._fed = False
        try:
            while not (self._paused or self._ended or self._ending):
                inner = self._inner
                if isinstance(inner, asyncio.BufferedProtocol):
                    size = self._read_into(session, cast(memoryview, inner.get_buffer(-1)))
                    if size:
                        inner.buffer_updated(size)
                else:
                    size = self._read_into(session, self._tls.plain)
                    if size:
                        inner.data_received(bytes(self._tls.plain[:size]))
                if not size:
                    break
        finally:
            self._delivering = False
        if self._ended or self._ending:
            self._left = b""
        if self._outgoing.pending and not self._ended:  # an answer of TLS's own, such as to new keys
            self._flush()
        if self._pending:
            self._send()

    def _read_into(self, session: ssl.SSLObject, room: memoryview) -> int:
        """Decrypt what is there, as far as there is room. 0: not a byte, or the client ends."""
        size = 0
        self._tls.turns.begin()
        try:
            while size < len(room) and (self._incoming.pending or session.pending() or self._feed()):
                try:
                    count = cast(int, session.read(len(room) - size, room[size:]))
                except ssl.SSLWantReadError:
                    if self._feed():
                        continue
                    break
                if not count:
                    self._leave_after(size)
                    break
                size += count
        except ssl.SSLZeroReturnError:
            self._leave_after(size)
        except ssl.SSLError:  # a record that was changed on its way, or is none
            self._fail()
            return 0
        finally:
            self._tls.turns.end()
        return size

    def _leave_after(self, size: int) -> None:
        """The client has said that it sends no more. size: of what it said before, which is to be given first."""
        if size:
            self._loop.call_soon(self._client_ended)
        else:
            self._client_ended()

    def _client_ended(self) -> None:
        if not self._ended:
            self._inner.eof_received()
            self.close()

    # the connection's calls

    def write(self, data: Buffer) -> None:
        if not self._ending and not self._ended:
            self._add(data)
            self._send()

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        if not self._ending and not self._ended:
            for data in list_of_data:
                self._add(data)
            self._send()

    def write_eof(self) -> None:
        """Nothing is written any more; the client is told once all has left. What comes from it is dropped."""
        if not self._ending:
            self._ending = _EOF
            self._send()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        before, self._ending = self._ending, _CLOSE
        if self._ended or not self._open:
            self._ended = True
            self._socket.close()
        elif before != _CLOSE:
            self._send()

    def abort(self) -> None:
        self._ended = True
        self._socket.abort()

    def is_closing(self) -> bool:
        return self._ending == _CLOSE or self._socket.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._pending_bytes + self._socket.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _USUAL_HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low
        # The socket must tell in time of what lets the connection write again.
        self._socket.set_write_buffer_limits(high=min(self._high, _AHEAD_BYTES))
        self._control()

    def pause_reading(self) -> None:
        self._paused = True
        self._pause_socket()

    def resume_reading(self) -> None:
        self._paused = False
        if self._open:
            self._wait()

    # what leaves

    def _add(self, data: Buffer) -> None:
        if len(data):
            self._pending.append(data)
            self._pending_bytes += len(data)

    def _send(self) -> None:
        """Encrypt and send what waits, as far as the socket takes it; then do what is to follow."""
        session, pending, sock = self._session, self._pending, self._socket
        if self._ended or not self._open or session is None:
            return
        left_bytes = 0 if self._sends_later else _AHEAD_BYTES  # of this turn
        try:
            while pending and left_bytes > 0 and sock.get_write_buffer_size() < _AHEAD_BYTES:
                data = pending[0]
                count = session.write(data if len(data) <= _PIECE_BYTES else memoryview(data)[:_PIECE_BYTES])
                if count == len(data):
                    pending.popleft()
                else:
                    pending[0] = memoryview(data)[count:]
                self._pending_bytes -= count
                left_bytes -= count
                sock.write(self._outgoing.read())
        except ssl.SSLWantReadError:  # for new keys; `_deliver` goes on
            pass
        except ssl.SSLError:  # it has ended beneath us
            self._fail()
            return
        if self._ending and not pending:
            self._end(session)
        elif pending and not self._full and not self._sends_later:
            self._sends_later = True
            self._loop.call_soon(self._send_on)
        self._control()

    def _send_on(self) -> None:
        self._sends_later = False
        self._send()

    def _end(self, session: ssl.SSLObject) -> None:
        """Say that nothing follows. The client need not say so as well."""
        self._ended = True
        with contextlib.suppress(ssl.SSLError):  # it has not yet, or has sent more
            session.unwrap()
        self._flush()
        if self._ending == _CLOSE:
            self._socket.close()
        else:
            self._socket.write_eof()

    def _control(self) -> None:
        """Tell the connection whether it may write."""
        size = self.get_write_buffer_size()
        more = self._full or bool(self._pending)  # else nothing will tell of a size that falls
        if self._held:
            if size <= self._low or not more:
                self._held = False
                self._inner.resume_writing()
        elif size > self._high and more:
            self._held = True
            self._inner.pause_writing()


def _is_short(read: memoryview | bytes, of_record: int) -> bool:
    """Whether it is a short record or a part of one, which costs no more than a small request without TLS.

    of_record: bytes to come of the record before.
    """
    return len(read) <= min(SHORT_READ_BYTES, of_record or _HEAD_BYTES + int.from_bytes(read[3:_HEAD_BYTES]))
