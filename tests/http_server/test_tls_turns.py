"""What one client of TLS makes the loop do is done in turns: decrypting, encrypting, and the handshakes of all."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from gateway.edges import long_turns
from gateway.edges.tls import Tls, TlsConnection
from gateway.process.certificates import HTTP, Certificates
from tests.certificates import Authority
from tests.tls_records import FFDHE8192, P256, client_hello, key_updates

SLICE = 1 << 10


class Socket(asyncio.Transport):
    """Of a client that takes what is written at once, or nothing of it."""

    def __init__(self, *, takes: bool = True) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = False
        self.holds = 0  # of what it has taken, if it takes anything
        self._takes = takes

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.holds if self._takes else len(self.written)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def close(self) -> None:
        self.closed = True

    abort = close

    def taken(self) -> bytes:
        written, self.written = self.written, b""
        return written


class Inner(asyncio.Protocol):
    """Keeps how many bytes came at a time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.held = False
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.sizes.append(len(data))

    def pause_writing(self) -> None:
        self.held = True

    def resume_writing(self) -> None:
        self.held = False


class Shaken:
    """A connection after its handshake, and the client's side of it."""

    def __init__(self, shared: Tls, authority: Authority, keylog: Path | None = None) -> None:
        self.inner = Inner()
        self.socket = Socket()
        self.connection = TlsConnection(self.inner, shared, asyncio.get_running_loop())
        self.connection.connection_made(self.socket)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = authority.trusted()
        if keylog is not None:
            context.keylog_filename = str(keylog)
        self._client = context.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def shake(self) -> None:
        while True:
            self._in.write(self.socket.taken())
            try:
                self._client.do_handshake()
            except ssl.SSLWantReadError:
                self.arrive(self._out.read())
                await asyncio.sleep(0)
            else:
                self.arrive(self._out.read())
                break
        await self.read_on()

    async def read_on(self) -> None:
        """Until it is read again, or closed."""
        while not (self.socket.reading or self.socket.closed):  # noqa: ASYNC110  # turns are what is looked at
            await asyncio.sleep(0)

    def encrypted(self, data: bytes) -> bytes:
        self._client.write(data)
        return self._out.read()

    def arrive(self, data: bytes) -> None:
        """As an event loop that was asked to read."""
        while data:
            assert self.socket.reading
            room = self.connection.get_buffer(-1)
            room[: len(data)], size, data = data[: len(room)], min(len(room), len(data)), data[len(room) :]
            self.connection.buffer_updated(size)


def shared(certificates: Certificates) -> Tls:
    return Tls(certificates, HTTP, 10.0)


def test_a_read_is_decrypted_in_turns(
    certificates: Certificates, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_turns, "_TURN_NS", 0)

    async def run() -> None:
        each = Shaken(shared(certificates), authority)
        await each.shake()
        sent = b"".join(each.encrypted(b"x") for _ in range(1000))
        each.arrive(sent)
        turns = 1
        while not each.socket.reading:
            assert sum(each.inner.sizes) * len(sent) // 1000 <= turns * (SLICE + 100)  # up to the end of a record
            await asyncio.sleep(0)
            turns += 1
        assert sum(each.inner.sizes) == 1000
        assert turns >= len(sent) // (SLICE + 100)

    asyncio.run(run())


def test_a_connection_that_pauses_gets_the_rest_of_a_read_when_it_goes_on(
    certificates: Certificates, authority: Authority
) -> None:
    async def run() -> None:
        each = Shaken(shared(certificates), authority)
        await each.shake()
        each.connection.pause_reading()
        each.socket.reading = True  # of a loop that was in the middle of it
        each.arrive(each.encrypted(b"a" * 20_000))
        assert each.inner.sizes == []
        each.connection.resume_reading()
        await each.read_on()
        assert sum(each.inner.sizes) == 20_000

    asyncio.run(run())


def test_a_long_answer_is_encrypted_in_turns(certificates: Certificates, authority: Authority) -> None:
    async def run() -> None:
        each = Shaken(shared(certificates), authority)
        await each.shake()
        each.socket.taken()
        each.inner.transport.write(bytes(4 << 20))
        before = 0
        while each.connection.get_write_buffer_size():
            assert len(each.socket.written) - before < 400 << 10
            before = len(each.socket.written)
            await asyncio.sleep(0)
        assert before > 3 << 20

    asyncio.run(run())


def test_who_writes_may_go_on_once_all_is_with_a_socket_that_takes_more(
    certificates: Certificates, authority: Authority
) -> None:
    """It never told that it was full, and so tells nothing when it is no longer."""

    async def run() -> None:
        each = Shaken(shared(certificates), authority)
        await each.shake()
        each.socket.holds = 40 << 10  # more than would let one go on that was full, less than what makes it full
        each.inner.transport.write(bytes(1 << 20))
        assert each.inner.held
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(each.socket.written) > 1 << 20
        assert not each.inner.held

    asyncio.run(run())


def greeted(together: Tls) -> Socket:
    """One whose client has sent its first message, and nothing else."""
    connection, socket = TlsConnection(Inner(), together, asyncio.get_running_loop()), Socket()
    connection.connection_made(socket)
    hello = client_hello(P256)
    connection.get_buffer(-1)[: len(hello)] = hello
    connection.buffer_updated(len(hello))
    return socket


def test_handshakes_take_turns(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_turns, "_TURN_NS", 0)

    async def run() -> None:
        together = shared(certificates)
        sockets = [greeted(together) for _ in range(5)]
        for answered in range(6):
            assert sum(bool(socket.written) for socket in sockets) == answered
            await asyncio.sleep(0)

    asyncio.run(run())


def test_who_has_shaken_hands_waits_for_nobody_who_has_not(
    certificates: Certificates, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_turns, "_TURN_NS", 0)

    async def run() -> None:
        together = shared(certificates)
        each = Shaken(together, authority)
        await each.shake()
        sockets = [greeted(together) for _ in range(20)]
        await asyncio.sleep(0)
        each.arrive(each.encrypted(b"x"))
        await each.read_on()
        assert each.inner.sizes == [1]
        assert sum(bool(socket.written) for socket in sockets) < 5

    asyncio.run(run())


def test_a_short_record_is_decrypted_whoever_waits(
    certificates: Certificates, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a small request waits for none of those that send much in many."""

    async def run() -> None:
        together = shared(certificates)
        each, many = Shaken(together, authority), [Shaken(together, authority) for _ in range(20)]
        for one in (each, *many):
            await one.shake()
        monkeypatch.setattr(long_turns, "_TURN_NS", 0)
        for one in many:
            one.arrive(b"".join(one.encrypted(b"x") for _ in range(1000)))
        await asyncio.sleep(0)
        each.arrive(each.encrypted(b"a" * 900))
        assert each.inner.sizes == [900]
        assert each.socket.reading
        each.arrive(b"".join(each.encrypted(b"x") for _ in range(20)))
        assert each.inner.sizes == [900]

    asyncio.run(run())


def test_who_makes_tls_answer_and_takes_nothing_is_cut_off(
    certificates: Certificates, authority: Authority, tmp_path: Path
) -> None:
    async def run() -> None:
        each = Shaken(shared(certificates), authority, tmp_path / "keys")
        await each.shake()
        each.socket._takes = False
        asked = key_updates(tmp_path / "keys", 30_000)
        for at in range(0, len(asked), 60_000):
            if each.socket.closed:
                break
            each.arrive(asked[at : at + 60_000])
            await each.read_on()
        assert each.socket.closed
        assert len(each.socket.written) < 1 << 20

    asyncio.run(run())


def test_no_group_that_costs_the_server_much_is_agreed_on(certificates: Certificates) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = certificates.context(HTTP).wrap_bio(incoming, outgoing, server_side=True)
    incoming.write(client_hello(FFDHE8192))
    with pytest.raises(ssl.SSLError) as refused:
        session.do_handshake()
    assert refused.value.reason in ("NO_SHARED_GROUP", "NO_SUITABLE_KEY_SHARE", "NO_SUITABLE_GROUPS")
