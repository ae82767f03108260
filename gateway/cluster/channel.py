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
once it has had the chance to use them, in order with its batches. An answer in parts is a frame for each of them, then the
answer. The replica's session waits once it is PARTS_AHEAD of the client, wherever on the way those parts are: the ingress says
what was taken.

An ingress of another node has a second connection, on which it is told what the replica counts (`accounts`): it says which
account it keeps (KEEP) and is told numbered totals (TOLD), until the replica's process ends. It says of which it has made sure
(PUBLISHED).
"""

import asyncio
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from gateway.cluster.channel_connection import (
    ANSWER,
    CANCEL,
    GREETING_S,
    KEEP,
    KNOWN,
    PART,
    PUBLISHED,
    RUN,
    SLOTS,
    TAKEN,
    TOKEN_BYTES,
    TOLD,
    WANT,
    ChannelConnection,
)
from gateway.wire.tensors import Buffer

_WANTED: Final = struct.Struct("<d")
_SLOTS_TOLD: Final = struct.Struct("<I?I")
_MOST_UNKNOWN: Final = 64  # connections

log = logging.getLogger(__name__)


class ChannelLost(Exception):
    """There is no channel: it could not be opened, or it has ended."""


class Addresses(NamedTuple):
    """Where a replica listens. unix: the name of an abstract socket. host, port: empty and 0 where it takes no TCP."""

    unix: str
    host: str
    port: int


def _nothing() -> None: ...


class Running(NamedTuple):
    """What an ingress says of a run. cancel: nobody needs it, have it answered early. taken: a part of the answer has left."""

    cancel: Callable[[], None] = _nothing
    taken: Callable[[], None] = _nothing


Answer = Callable[[Sequence[Buffer]], None]
"""Takes the pieces of a frame's answer, once; or those of a part of it, each before it."""
Run = Callable[[Buffer, Answer, Answer], Running]
"""Begins to answer a frame: gets where the answer goes, and where its parts do."""
OnFramePart = Callable[[Buffer], None]
"""Gets each part of a frame's answer, before that."""


class _SentFrame(msgspec.Struct, frozen=True):
    """A frame that waits for its answer. on_part: gets the parts of it before."""

    answer: "asyncio.Future[Buffer]"
    on_part: OnFramePart | None


class Standing(NamedTuple):
    """What an ingress is told beside its slots. lives: whether any session does. counted: how many of them it counts in its
    metrics: all, or none, as one ingress counts them for all. Leases move faster than metrics are published.
    """

    lives: bool = False
    counted: int = 0


Tell = Callable[[int, int, Standing], None]
"""Gets how many slots an ingress has, the number of this telling, and how things stand."""


class Tenant(NamedTuple):
    """What becomes of an ingress's channel at its replica. want: it has so many batches that wait. known: it knows what it was
    told, by number. gone: the channel has ended."""

    want: Callable[[float], None]
    known: Callable[[int], None]
    gone: Callable[[], None]


Enter = Callable[[str, Tell], Tenant]
"""An ingress has said its name: gets that, and where it is told its slots."""


class PendingAnswer(msgspec.Struct, frozen=True):
    """A frame that was sent. answer: its answer, or ChannelLost, or what on_part raised; cancelled, nobody waits any more."""

    answer: "asyncio.Future[Buffer]"
    cancel: Callable[[], None]
    """Ask the other side to end it early. It is answered all the same."""
    taken: Callable[[], None]
    """Tell the other side that a part has left for its client."""


class Keeper(NamedTuple):
    """What becomes of an account at its ingress. published: all up to this number. gone: its connection has ended."""

    published: Callable[[int], None]
    gone: Callable[[], None]


TellAccount = Callable[[int, Sequence[Buffer]], None]
Keep = Callable[[str, int, TellAccount], Keeper | None]
"""An ingress keeps an account: gets its name, the number that was told last, and where it is told. None: it is refused."""


class Channel(ChannelConnection):
    """An ingress's end. Life: `connect` -> ask … -> close. on_end: called when it ends, whoever ended it."""

    _role, _peers_role = b"ingress", b"replica"

    def __init__(self, token: bytes) -> None:
        super().__init__(token)
        self._numbers = 0
        self._asked: dict[int, _SentFrame] = {}
        self.on_end: Callable[[], None] = _nothing
        self.on_slots: Callable[[int, Standing], None] = lambda slots, standing: None
        self.on_told: Callable[[int, Buffer], None] = lambda number, blocks: None
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
        except OSError as exc:
            raise ChannelLost(str(exc) or "no answer in time") from exc
        return channel

    @property
    def kind(self) -> str:
        """ "unix" or "tcp"; empty once it has ended."""
        if not self.is_open:
            return ""
        return "unix" if self._transport.get_extra_info("socket").family == socket.AF_UNIX else "tcp"

    def ask(self, pieces: Sequence[Buffer], on_part: OnFramePart | None = None) -> "PendingAnswer":
        """Send a frame, whose pieces must not change any more. on_part: gets the parts of its answer, before that is done."""
        answer: asyncio.Future[Buffer] = self._loop.create_future()
        self._numbers = number = (self._numbers + 1) & 0xFFFFFFFF
        pending = PendingAnswer(answer, partial(self._tell, CANCEL, number), partial(self._tell, TAKEN, number))
        if not self.is_open:
            answer.set_exception(ChannelLost("the connection is closed"))
            return pending
        self._asked[number] = _SentFrame(answer, on_part)
        answer.add_done_callback(partial(self._done, number))
        self._send(RUN, number, pieces)
        return pending

    def close(self) -> None:
        self._transport.close()

    def want(self, ingress: str, batches: float) -> None:
        """Tell the replica who this is, and how many batches wait. It answers by `on_slots`, now and whenever that changes."""
        if self.is_open:
            self._send(WANT, 0, (_WANTED.pack(batches) + ingress.encode(),))

    def keep(self, account: str, held: int) -> None:
        """Be told what the replica counts, by `on_told`. held: the number that the account was told last; 0: nothing yet."""
        if self.is_open:
            self._send(KEEP, held, (account.encode(),))

    def published(self, number: int) -> None:
        """What was told up to this number stays counted if this process ends."""
        if self.is_open:
            self._send(PUBLISHED, number, ())

    def _knows(self, number: int) -> None:
        if self.is_open:
            self._send(KNOWN, number, ())

    def frame(self, kind: int, number: int, payload: Buffer) -> None:
        if kind == SLOTS:
            slots, lives, counted = _SLOTS_TOLD.unpack(payload)
            self.on_slots(slots, Standing(lives, counted))
            # Once whoever was told has had the chance to send a batch.
            self._loop.call_soon(self._loop.call_soon, self._knows, number)
            return
        if kind == TOLD:
            self.on_told(number, payload)
            return
        asked = self._asked.get(number)
        if asked is None or asked.answer.done():
            return  # nobody waits for it any more
        if kind == ANSWER:
            asked.answer.set_result(payload)
        elif kind == PART and asked.on_part is not None:
            try:
                asked.on_part(payload)
            except Exception as exc:  # the others of this connection go on
                if not asked.answer.done():
                    asked.answer.set_exception(exc)

    def ended(self, why: str) -> None:
        self.is_open = False
        asked, self._asked = self._asked, {}
        waiting: list[asyncio.Future[Any]] = [self.opened, *(each.answer for each in asked.values())]
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
            self._tell(CANCEL, number)
        self._asked.pop(number, None)

    def _tell(self, kind: int, number: int) -> None:
        if self.is_open and number in self._asked:
            self._send(kind, number, ())


class ChannelServer:
    """A replica's end: listens, and runs what trusted ingresses send. Life: start -> drained -> close."""

    def __init__(
        self,
        run: Run,
        enter: Enter,
        keep: Keep = lambda account, held, tell: None,
        *,
        greeting_s: float = GREETING_S,
        most_unknown: int = _MOST_UNKNOWN,
    ) -> None:
        """greeting_s: for a connection to prove that it knows the token. most_unknown: connections that have not yet."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.greeting_s = greeting_s
        self._most_unknown = most_unknown
        self._run = run
        self._enter = enter
        self._keep = keep
        self._unix = ""
        self._listeners: list[asyncio.Server] = []
        self._tcp: dict[str, int] = {}  # host -> port
        self._connections: set[_Incoming] = set()
        self._idle = asyncio.Event()
        self._ended = asyncio.Event()
        self.changed()
        self._starting = asyncio.Lock()

    async def start(self, host: str = "") -> Addresses:
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
        return Addresses(self._unix, host, self._tcp.get(host, 0))

    async def drained(self) -> None:
        """Wait until nothing runs for an ingress."""
        await self._idle.wait()

    async def close(self) -> None:
        """Those that keep an account stay, until the process ends."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            if connection.keeper is None:
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
            (self._ended, any(connection.keeper is None for connection in self._connections)),
        ):
            if open_:
                event.clear()
            else:
                event.set()


class _Incoming(ChannelConnection):
    """One ingress's connection."""

    _role, _peers_role = b"replica", b"ingress"

    def __init__(self, server: ChannelServer, *, refused: bool) -> None:
        super().__init__(server.token, server.greeting_s)
        self._server = server
        self._refused = refused
        self.running: dict[int, Running] = {}
        self._untaken: dict[int, int] = {}  # parts that were sent, by number
        self._tenant: Tenant | None = None
        self.keeper: Keeper | None = None

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
        if kind == TAKEN:
            if self._untaken.get(number):  # else the answer has left, or it speaks of what it was not sent
                self._untaken[number] -= 1
                _try(self.running[number].taken)
            return
        if kind == WANT and len(payload) > _WANTED.size:
            if self._tenant is None:
                self._tenant = self._server._enter(str(payload[_WANTED.size :], "utf-8"), self._tell_slots)
            self._tenant.want(_WANTED.unpack_from(payload)[0])
        elif kind == KNOWN and self._tenant is not None:
            self._tenant.known(number)
        elif kind == KEEP and self.keeper is None:
            self.keeper = self._server._keep(str(payload, "utf-8"), number, self._tell_account)
            if self.keeper is None:
                self.abort()
        elif kind == PUBLISHED and self.keeper is not None:
            self.keeper.published(number)
        elif kind == CANCEL:
            if number in self.running:  # else the answer has left
                _try(self.running[number].cancel)
        elif kind == RUN and number not in self.running:
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
        if self.keeper is not None:
            self.keeper.gone()
        for run in running.values():
            _try(run.cancel)
        self._server._connections.discard(self)
        self._server.changed()

    def _tell_slots(self, slots: int, number: int, standing: Standing) -> None:
        if not self._transport.is_closing():
            self._send(SLOTS, number, (_SLOTS_TOLD.pack(slots, *standing),))

    def _tell_account(self, number: int, pieces: Sequence[Buffer]) -> None:
        if not self._transport.is_closing():
            self._send(TOLD, number, pieces)

    def _part(self, number: int, pieces: Sequence[Buffer]) -> None:
        if number in self.running:
            self._untaken[number] = self._untaken.get(number, 0) + 1
            self._send(PART, number, pieces)

    def _answer(self, number: int, pieces: Sequence[Buffer]) -> None:
        self._untaken.pop(number, None)
        if self.running.pop(number, None) is not None:
            self._send(ANSWER, number, pieces)
            self._server.changed()


def _try(steer: Callable[[], None]) -> None:
    try:
        steer()
    except BaseException:  # the run goes on, and so do the others of its connection
        log.exception("a run could not be told what its ingress wants")
