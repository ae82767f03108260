"""Batches between an ingress and a backend's replica, on a socket of their own: a frame there, a frame or several back.

A call through Serve's own gRPC server costs about a millisecond, whatever it carries. Here a batch is one frame on a connection
that stays open: a Unix socket on the same node, TCP between nodes. Tensors travel as raw bytes and are not copied on the way
out, nor, where they are large, on the way in. On the same node, large frames are written to memory that both sides share
(`arena`), and only where they lie goes by the socket. Nothing in a frame can name code.

The wire: frames of a length (8 bytes), a number (4), a kind (1), little-endian, and so many bytes. Both sides greet with the
version and a nonce; then each proves with HMAC-SHA256 over both greetings that it knows the token, the one that connects first.
The token is the replica's, and told through Ray, to whoever may call its actors. TCP is authenticated so, but not encrypted.

What is in flight is bounded by whoever asks: an ingress has no more batches here than the replica leases it slots. It says who
it is and that it wants some (WANT), is told how many it has (SLOTS, in order with its answers), and says that it knows (KNOWN)
once it has had the chance to use them, in order with its batches. An answer in
parts is a frame for each of them, then the answer. The replica's session waits once it is PARTS_AHEAD of the client, wherever
on the way those parts are: the ingress says what was taken.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

from gateway.cluster.arena import SHARED_FROM_BYTES, Arena, Offer, Window
from gateway.errors import BackendFailed
from gateway.wire.tensors import Buffer

VERSION: Final = 3
TOKEN_BYTES: Final = 32

_HEAD: Final = struct.Struct("<QIB")
_GREETING: Final = struct.Struct("<4sH32s")
_MAGIC: Final = b"GWCH"
_GREET, _PROVE, _RUN, _CANCEL, _ANSWER, _PART, _TAKEN, _OFFER, _ACCEPT, _RELEASE, _WANT, _SLOTS, _KNOWN = range(13)
_SHARED: Final = 0x80  # added to the kind of a frame whose payload lies in the sender's arena
_LIES: Final = struct.Struct("<QQ")  # offset and size there
_OFFERED: Final = struct.Struct("<Ii32s")
_WANTED: Final = struct.Struct("<d")
_SLOTS_TOLD: Final = struct.Struct("<I?")

_MOST_BYTES: Final = (1 << 31) - 1  # of a frame, as Serve's gRPC server takes
_MOST_UNKNOWN_BYTES: Final = 64  # of a frame from somebody who has not proved anything
_SCRATCH_BYTES: Final = 256 << 10
GREETING_S: Final = 5.0
_MOST_UNKNOWN: Final = 64  # connections
_SOCKET_BUFFER_BYTES: Final = 4 << 20

log = logging.getLogger(__name__)


class ChannelLost(Exception):
    """There is no channel: it could not be opened, or it has ended."""


class Endpoints(NamedTuple):
    """Where a replica listens. unix: the name of an abstract socket. host, port: empty and 0 where it takes no TCP."""

    unix: str
    host: str
    port: int


def check_size(pieces: Sequence[Buffer], most_bytes: int = _MOST_BYTES) -> None:
    """Raises: BackendFailed, for a frame that the other side would refuse, with the connection and all that is on it."""
    size = sum(map(len, pieces))
    if size > most_bytes:
        raise BackendFailed(f"tensors of {size} bytes, expected at most {most_bytes} between an ingress and a replica")


def _nothing() -> None: ...


class Running(NamedTuple):
    """What an ingress says of a run. cancel: nobody needs it, have it answered early. taken: a part of the answer has left."""

    cancel: Callable[[], None] = _nothing
    taken: Callable[[], None] = _nothing


Answer = Callable[[Sequence[Buffer]], None]
"""Takes the pieces of a frame's answer, once; or those of a part of it, each before it."""
Run = Callable[[Buffer, Answer, Answer], Running]
"""Begins to answer a frame: gets where the answer goes, and where its parts do."""
OnPart = Callable[[Buffer], None]


class Tenant(NamedTuple):
    """What becomes of an ingress's channel at its replica. want: it has so many batches that wait. known: it knows what it was
    told, by number. gone: the channel has ended."""

    want: Callable[[float], None]
    known: Callable[[int], None]
    gone: Callable[[], None]


Enter = Callable[[str, Callable[[int, int, bool], None]], Tenant]
"""An ingress has said its name: gets that, and where it is told its slots, a number, and whether any session lives."""


class _Connection(asyncio.BufferedProtocol):
    """One end: greetings, and frames cut from what comes. What comes of either is told by `trusted`, `frame`, `ended`."""

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
        self._patience = self._loop.call_later(greeting_s, self._give_up)

    # what the two ends make of it

    def trusted(self) -> None:
        """The other side has proved that it knows the token."""

    def frame(self, kind: int, number: int, payload: Buffer) -> None:
        """The next frame of a side that is trusted."""

    def ended(self, why: str) -> None:
        """Nothing more comes, nor goes."""

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # TCP_NODELAY is set by both loops.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self._send(_GREET, 0, (self._greeting,))

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
                self._send(_OFFER, 0, (_OFFERED.pack(*self._arena.offer),))
        return self._arena.put(pieces) if self._is_accepted and self._arena is not None else None

    def _trust(self) -> None:
        self._is_trusted = True
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
        elif kind == _OFFER and self._window is None:
            try:
                self._window = Window(Offer(*_OFFERED.unpack(payload)))
            except (OSError, ValueError) as exc:
                log.debug("large frames come by the socket: %s", exc)
            else:
                self._send(_ACCEPT, 0, ())
        elif kind == _ACCEPT:
            self._is_accepted = self._arena is not None
        elif kind == _RELEASE and self._arena is not None:
            self._arena.release(int.from_bytes(payload, "little"))
        else:
            self.frame(kind, number, payload)

    def _let_go(self, offset: int) -> None:
        """Nothing refers to a frame any more. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so has the connection
            self._loop.call_soon_threadsafe(self._release, offset)

    def _release(self, offset: int) -> None:
        if not self._transport.is_closing():
            self._send(_RELEASE, 0, (offset.to_bytes(8, "little"),))

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
        elif kind == _GREET and not self._peers_greeting and len(payload) == _GREETING.size:
            magic, version, _ = _GREETING.unpack(payload)
            if magic != _MAGIC or version != VERSION:
                self._refuse(f"version {version} of the channel, expected {VERSION}")
                return
            self._peers_greeting = bytes(payload)
            self._greeted()
        elif kind == _PROVE and self._peers_greeting and hmac.compare_digest(self._proof(self._peers_role), bytes(payload)):
            self._trust()
            self._proved()
        else:
            self._refuse("a side that does not know the token")

    def _greeted(self) -> None: ...

    def _proved(self) -> None: ...

    def _prove(self) -> None:
        self._send(_PROVE, 0, (self._proof(self._role),))

    def _proof(self, role: bytes) -> bytes:
        mine, other = self._greeting, self._peers_greeting
        said = mine + other if role == self._role else other + mine
        return hmac.digest(self._token, role + said, "sha256")

    def _refuse(self, what: str) -> None:
        log.warning("a batch channel is refused: %s", what)
        self.abort()

    def _give_up(self) -> None:
        self._refuse(f"no greeting in {self._greeting_s:g} s")


class Question(NamedTuple):
    """A frame that was sent. answer: its answer, or ChannelLost, or what on_part raised; cancelled, nobody waits any more."""

    answer: "asyncio.Future[Buffer]"
    cancel: Callable[[], None]
    """Ask the other side to end it early. It is answered all the same."""
    taken: Callable[[], None]
    """Tell the other side that a part has left for its client."""


class Channel(_Connection):
    """An ingress's end. Life: `connect` -> ask … -> close. on_end: called when it ends, whoever ended it."""

    _role, _peers_role = b"ingress", b"replica"

    def __init__(self, token: bytes) -> None:
        super().__init__(token)
        self._numbers = 0
        self._asked: dict[int, tuple[asyncio.Future[Buffer], OnPart | None]] = {}
        self.on_end: Callable[[], None] = _nothing
        self.on_slots: Callable[[int, bool], None] = lambda slots, lives: None
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.is_open = False

    @classmethod
    async def connect(cls, token: bytes, *, unix: str = "", host: str = "", port: int = 0) -> "Channel":
        """unix: an abstract socket's name, or else host and port. Raises: ChannelLost."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(GREETING_S):
                if unix:
                    connection = socket.socket(socket.AF_UNIX)
                    connection.setblocking(False)
                    try:
                        connection.connect(f"\0{unix}")  # at once, or not at all
                    except BaseException:
                        connection.close()
                        raise
                    _, channel = await loop.create_unix_connection(partial(cls, token), sock=connection)
                else:
                    _, channel = await loop.create_connection(partial(cls, token), host, port)
                try:
                    await channel.opened
                except BaseException:
                    channel.abort()
                    raise
        except (OSError, TimeoutError) as exc:
            raise ChannelLost(str(exc) or "no answer in time") from exc
        return channel

    @property
    def kind(self) -> str:
        """ "unix" or "tcp"; empty once it has ended."""
        if not self.is_open:
            return ""
        return "unix" if self._transport.get_extra_info("socket").family == socket.AF_UNIX else "tcp"

    def ask(self, pieces: Sequence[Buffer], on_part: OnPart | None = None) -> "Question":
        """Send a frame, whose pieces must not change any more. on_part: gets the parts of its answer, before that is done."""
        answer: asyncio.Future[Buffer] = self._loop.create_future()
        self._numbers = number = (self._numbers + 1) & 0xFFFFFFFF
        question = Question(answer, partial(self._tell, _CANCEL, number), partial(self._tell, _TAKEN, number))
        if not self.is_open:
            answer.set_exception(ChannelLost("the connection is closed"))
            return question
        self._asked[number] = answer, on_part
        answer.add_done_callback(partial(self._done, number))
        self._send(_RUN, number, pieces)
        return question

    def close(self) -> None:
        self._transport.close()

    def want(self, ingress: str, batches: float) -> None:
        """Tell the replica who this is, and how many batches wait. It answers by `on_slots`, now and whenever that changes."""
        if self.is_open:
            self._send(_WANT, 0, (_WANTED.pack(batches) + ingress.encode(),))

    def _knows(self, number: int) -> None:
        if self.is_open:
            self._send(_KNOWN, number, ())

    def frame(self, kind: int, number: int, payload: Buffer) -> None:
        if kind == _SLOTS:
            self.on_slots(*_SLOTS_TOLD.unpack(payload))
            # Once whoever was told has had the chance to send a batch.
            self._loop.call_soon(self._loop.call_soon, self._knows, number)
            return
        answer, on_part = self._asked.get(number, (None, None))
        if answer is None or answer.done():
            return  # nobody waits for it any more
        if kind == _ANSWER:
            answer.set_result(payload)
        elif kind == _PART and on_part is not None:
            try:
                on_part(payload)
            except Exception as exc:  # the others of this connection go on
                if not answer.done():
                    answer.set_exception(exc)

    def ended(self, why: str) -> None:
        self.is_open = False
        asked, self._asked = self._asked, {}
        waiting: list[asyncio.Future[Any]] = [self.opened, *(answer for answer, _ in asked.values())]
        for future in waiting:
            if not future.done():
                future.set_exception(ChannelLost(why))
        self.on_end()

    def _greeted(self) -> None:
        self._prove()

    def _proved(self) -> None:
        self.is_open = True
        if not self.opened.done():
            self.opened.set_result(None)

    def _done(self, number: int, answer: "asyncio.Future[Buffer]") -> None:
        if answer.cancelled() or answer.exception() is not None:
            self._tell(_CANCEL, number)
        self._asked.pop(number, None)

    def _tell(self, kind: int, number: int) -> None:
        if self.is_open and number in self._asked:
            self._send(kind, number, ())


class ChannelServer:
    """A replica's end: listens, and runs what trusted ingresses send. Life: start -> drained -> close."""

    def __init__(self, run: Run, enter: Enter, *, greeting_s: float = GREETING_S, most_unknown: int = _MOST_UNKNOWN) -> None:
        """greeting_s: for a connection to prove that it knows the token. most_unknown: connections that have not yet."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.greeting_s = greeting_s
        self._most_unknown = most_unknown
        self._run = run
        self._enter = enter
        self._unix = ""
        self._listeners: list[asyncio.Server] = []
        self._tcp: dict[str, int] = {}  # host -> port
        self._connections: set[_Incoming] = set()
        self._idle = asyncio.Event()
        self._ended = asyncio.Event()
        self.changed()
        self._starting = asyncio.Lock()

    async def start(self, host: str = "") -> Endpoints:
        """Listen for ingresses of this node; host: and there, at a free port, for those of others. Raises: OSError."""
        loop = asyncio.get_running_loop()
        async with self._starting:
            if not self._unix:
                # No file: nobody has to remove it after a kill. Whoever may connect has to know the token.
                name = f"gateway-{secrets.token_hex(16)}"
                listener = await loop.create_unix_server(self._connect, f"\0{name}", backlog=self._most_unknown)
                self._listeners.append(listener)
                self._unix = name
            if host and host not in self._tcp:
                listener = await loop.create_server(self._connect, host, 0, backlog=self._most_unknown)
                self._listeners.append(listener)
                self._tcp[host] = int(listener.sockets[0].getsockname()[1])
        return Endpoints(self._unix, host, self._tcp.get(host, 0))

    async def drained(self) -> None:
        """Wait until nothing runs for an ingress."""
        await self._idle.wait()

    async def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.abort()
        self.changed()
        await self._ended.wait()

    def _connect(self) -> "_Incoming":
        unknown = sum(not connection.is_trusted for connection in self._connections)
        connection = _Incoming(self, refused=unknown >= self._most_unknown)
        self._connections.add(connection)
        return connection

    def changed(self) -> None:
        """A run began or ended, or a connection has (called by connections)."""
        for event, open_ in (
            (self._idle, any(connection.running for connection in self._connections)),
            (self._ended, bool(self._connections)),
        ):
            if open_:
                event.clear()
            else:
                event.set()


class _Incoming(_Connection):
    """One ingress's connection."""

    _role, _peers_role = b"replica", b"ingress"

    def __init__(self, server: ChannelServer, *, refused: bool) -> None:
        super().__init__(server.token, server.greeting_s)
        self._server = server
        self._refused = refused
        self.running: dict[int, Running] = {}
        self._untaken: dict[int, int] = {}  # parts that were sent, by number
        self._tenant: Tenant | None = None

    @property
    def is_trusted(self) -> bool:
        return self._is_trusted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._refused:
            self._refuse("too many connections that prove nothing")

    def _proved(self) -> None:
        self._prove()

    def frame(self, kind: int, number: int, payload: Buffer) -> None:
        if kind == _TAKEN:
            if self._untaken.get(number):  # else the answer has left, or it speaks of what it was not sent
                self._untaken[number] -= 1
                _try(self.running[number].taken)
            return
        if kind == _WANT and len(payload) > _WANTED.size:
            if self._tenant is None:
                self._tenant = self._server._enter(str(payload[_WANTED.size :], "utf-8"), self._tell_slots)
            self._tenant.want(_WANTED.unpack_from(payload)[0])
        elif kind == _KNOWN and self._tenant is not None:
            self._tenant.known(number)
        elif kind == _CANCEL:
            if number in self.running:  # else the answer has left
                _try(self.running[number].cancel)
        elif kind == _RUN and number not in self.running:
            self.running[number] = Running()
            running = self._server._run(payload, partial(self._answer, number), partial(self._part, number))
            if number in self.running:
                self.running[number] = running
        else:
            self._refuse(f"a frame of kind {kind}, number {number}")
        self._server.changed()

    def ended(self, why: str) -> None:
        running, self.running = self.running, {}
        self._untaken.clear()
        if self._tenant is not None:
            self._tenant.gone()
        for run in running.values():
            _try(run.cancel)
        self._server._connections.discard(self)
        self._server.changed()

    def _tell_slots(self, slots: int, number: int, lives: bool) -> None:
        if not self._transport.is_closing():
            self._send(_SLOTS, number, (_SLOTS_TOLD.pack(slots, lives),))

    def _part(self, number: int, pieces: Sequence[Buffer]) -> None:
        if number in self.running:
            self._untaken[number] = self._untaken.get(number, 0) + 1
            self._send(_PART, number, pieces)

    def _answer(self, number: int, pieces: Sequence[Buffer]) -> None:
        self._untaken.pop(number, None)
        if self.running.pop(number, None) is not None:
            self._send(_ANSWER, number, pieces)
            self._server.changed()


def _try(steer: Callable[[], None]) -> None:
    try:
        steer()
    except BaseException:  # the run goes on, and so do the others of its connection
        log.exception("a run could not be told what its ingress wants")
