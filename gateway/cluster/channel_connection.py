"""One connection of a batch channel, from either end: who is there, frames, and large ones by memory that both sides share.

See `channel` for the wire, and for what the two ends make of it.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

from gateway.cluster.arena import SHARED_FROM_BYTES, Arena, Offer, Window
from gateway.errors import BackendFailed
from gateway.wire.tensors import Buffer

VERSION: Final = 4
TOKEN_BYTES: Final = 32

_HEAD: Final = struct.Struct("<QIB")
_GREETING: Final = struct.Struct("<4sH32s")
_MAGIC: Final = b"GWCH"
GREET, PROVE, RUN, CANCEL, ANSWER, PART, TAKEN, OFFER, ACCEPT, RELEASE, WANT, SLOTS, KNOWN, KEEP, TOLD, PUBLISHED = range(16)
_SHARED: Final = 0x80  # added to the kind of a frame whose payload lies in the sender's arena
_LIES: Final = struct.Struct("<QQ")  # offset and size there
_OFFERED: Final = struct.Struct("<Ii32s")

_MOST_BYTES: Final = (1 << 31) - 1  # of a frame, as Serve's gRPC server takes
_MOST_UNKNOWN_BYTES: Final = 64  # of a frame from somebody who has not proved anything
_SCRATCH_BYTES: Final = 256 << 10
GREETING_S: Final = 5.0
_SOCKET_BUFFER_BYTES: Final = 4 << 20
# A node may go without a word: by themselves, systems wait for a quarter of an hour, and for ever where nothing is sent.
# Options of sockets, as far as a system has them.
_VANISHED: Final = {"TCP_USER_TIMEOUT": 20_000, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

log = logging.getLogger(__name__)


def check_size(pieces: Sequence[Buffer], most_bytes: int = _MOST_BYTES) -> None:
    """Raises: BackendFailed, for a frame that the other side would refuse, with the connection and all that is on it."""
    size = sum(map(len, pieces))
    if size > most_bytes:
        raise BackendFailed(f"tensors of {size} bytes, expected at most {most_bytes} between an ingress and a replica")


class ChannelConnection(asyncio.BufferedProtocol):
    """One end: greetings, and frames cut from what comes, told by `_greeted`, `_proved`, `frame` and `ended`."""

    _role = b""
    _peers_role = b""

    def __init__(self, token: bytes, greeting_s: float = GREETING_S) -> None:
        self._token = token
        self._greeting_s = greeting_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._held = 0  # bytes of the scratch that are no whole frame yet
        self._large: bytearray | None = None  # the payload that is being read, where it is longer than the scratch
        self._large_at = 0
        self._large_head = (0, 0)
        self._greeting = _GREETING.pack(_MAGIC, VERSION, secrets.token_bytes(32))
        self._peers_greeting = b""
        self._is_trusted = False
        self._arena: Arena | None = None  # of what is sent
        self._may_offer = False  # an arena
        self._is_accepted = False  # the other side has opened it
        self._window: Window | None = None  # on the other side's
        self._patience: asyncio.TimerHandle | None = None  # until the other side is trusted

    # what the two ends make of it

    def frame(self, kind: int, number: int, payload: Buffer) -> None:
        """The next frame of a side that is trusted."""

    def ended(self, why: str) -> None:
        """Nothing more comes, nor goes."""

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._patience = self._loop.call_later(self._greeting_s, self._give_up)
        # TCP_NODELAY is set by both loops.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _VANISHED.items():
                if hasattr(socket, option):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._send(GREET, 0, (self._greeting,))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return memoryview(self._large)[self._large_at :]
        return self._scratch[self._held :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._large is None:
                self._held += nbytes
                self._cut()
                return
            self._large_at += nbytes
            if self._large_at == len(self._large):
                payload, self._large = self._large, None
                self._take(*self._large_head, payload)
        except BaseException:
            log.exception("a batch channel is given up")
            self.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        for memory in (self._arena, self._window):
            if memory is not None:
                memory.close()
        self._arena, self._window, self._may_offer = None, None, False
        self.ended(str(exc) if exc else "the connection was closed")

    def abort(self) -> None:
        self._transport.abort()

    # frames

    def _send(self, kind: int, number: int, pieces: Sequence[Buffer]) -> None:
        size = sum(map(len, pieces))
        if size >= SHARED_FROM_BYTES and (self._is_accepted or self._may_offer):
            lies = self._share(pieces)
            if lies is not None:
                self._transport.write(_HEAD.pack(_LIES.size, number, kind | _SHARED) + _LIES.pack(*lies))
                return
        head = _HEAD.pack(size, number, kind)
        if len(pieces) == 1 and len(pieces[0]) < 1 << 14:
            self._transport.write(head + bytes(pieces[0]))
        else:
            self._transport.writelines([head, *pieces])

    def _share(self, pieces: Sequence[Buffer]) -> tuple[int, int] | None:
        """Write a frame to the arena; None: there is no room, or none that the other side has opened yet."""
        if self._may_offer:
            self._may_offer = False
            try:
                self._arena = Arena()
            except OSError as exc:
                log.debug("large frames go by the socket: %s", exc)
            else:
                self._send(OFFER, 0, (_OFFERED.pack(*self._arena.offer),))
        return self._arena.put(pieces) if self._is_accepted and self._arena is not None else None

    def _trust(self) -> None:
        self._is_trusted = True
        if self._patience is not None:
            self._patience.cancel()
        self._may_offer = self._transport.get_extra_info("socket").family == socket.AF_UNIX

    def _trusted_frame(self, kind: int, number: int, payload: Buffer) -> None:
        """Raises: ValueError, KeyError, struct.error, for memory that is not there."""
        if kind & _SHARED:
            if self._window is None:
                raise ValueError("no arena was offered")
            offset, size = _LIES.unpack(payload)
            payload = self._window.read(offset, size, partial(self._let_go, offset))
            self.frame(kind & ~_SHARED, number, payload)
        elif kind == OFFER and self._window is None:
            try:
                self._window = Window(Offer(*_OFFERED.unpack(payload)))
            except (OSError, ValueError) as exc:
                log.debug("large frames come by the socket: %s", exc)
            else:
                self._send(ACCEPT, 0, ())
        elif kind == ACCEPT:
            self._is_accepted = self._arena is not None
        elif kind == RELEASE and self._arena is not None:
            self._arena.release(int.from_bytes(payload, "little"))
        else:
            self.frame(kind, number, payload)

    def _let_go(self, offset: int) -> None:
        """Nothing refers to a frame any more. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so has the connection
            self._loop.call_soon_threadsafe(self._release, offset)

    def _release(self, offset: int) -> None:
        if not self._transport.is_closing():
            self._send(RELEASE, 0, (offset.to_bytes(8, "little"),))

    def _cut(self) -> None:
        scratch, at = self._scratch, 0
        while self._held - at >= _HEAD.size and not self._transport.is_closing():
            size, number, kind = _HEAD.unpack_from(scratch, at)
            if size > (_MOST_BYTES if self._is_trusted else _MOST_UNKNOWN_BYTES):
                self._refuse(f"a frame of {size} bytes")
                return
            begin = at + _HEAD.size
            end = begin + size
            if end <= self._held:
                at = end
                self._take(kind, number, bytes(scratch[begin:end]))
            elif end - at <= len(scratch):
                break
            else:
                large = bytearray(size)
                self._large_at = self._held - begin
                large[: self._large_at] = scratch[begin : self._held]
                self._large, self._large_head = large, (kind, number)
                at = self._held
        if at:
            left = self._held - at
            scratch[:left] = bytes(scratch[at : self._held])
            self._held = left

    def _take(self, kind: int, number: int, payload: Buffer) -> None:
        if self._is_trusted:
            self._trusted_frame(kind, number, payload)
        elif kind == GREET and not self._peers_greeting and len(payload) == _GREETING.size:
            magic, version, _ = _GREETING.unpack(payload)
            if magic != _MAGIC or version != VERSION:
                self._refuse(f"version {version} of the channel, expected {VERSION}")
                return
            self._peers_greeting = bytes(payload)
            self._greeted()
        elif kind == PROVE and self._peers_greeting and hmac.compare_digest(self._proof(self._peers_role), bytes(payload)):
            self._trust()
            self._proved()
        else:
            self._refuse("a side that does not know the token")

    def _greeted(self) -> None: ...

    def _proved(self) -> None: ...

    def _prove(self) -> None:
        self._send(PROVE, 0, (self._proof(self._role),))

    def _proof(self, role: bytes) -> bytes:
        mine, other = self._greeting, self._peers_greeting
        said = mine + other if role == self._role else other + mine
        return hmac.digest(self._token, role + said, "sha256")

    def _refuse(self, what: str) -> None:
        log.warning("a batch channel is refused: %s", what)
        self.abort()

    def _give_up(self) -> None:
        self._refuse(f"no greeting in {self._greeting_s:g} s")
