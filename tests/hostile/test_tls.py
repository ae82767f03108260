"""What clients can do to others by TLS itself."""

import contextlib
import itertools
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.hostile.bench import Address, Bench, attacked
from tests.tls_records import FFDHE8192, P256, client_hello, key_updates

pytestmark = pytest.mark.slow

_numbers = itertools.count()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with attacked(tmp_path_factory.mktemp("hostile"), authority=authority) as bench:
        yield bench


class Shaken:
    """A connection after its handshake, whose records are made before they are sent. It trusts anybody."""

    def __init__(self, address: Address, keylog: Path | None = None) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if keylog is not None:
            context.keylog_filename = str(keylog)
        self.socket = socket.create_connection(address, timeout=30)
        self._came, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._came, self._out)
        while True:
            try:
                self._session.do_handshake()
            except ssl.SSLWantReadError:
                self.socket.sendall(self._out.read())
                self._came.write(self.socket.recv(1 << 16))
            else:
                self.socket.sendall(self._out.read())
                break

    def encrypted(self, data: bytes) -> bytes:
        self._session.write(data)
        return self._out.read()


def test_silent_connections(bench: Bench) -> None:
    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            for address in (http, rpc) * 500:
                closing.enter_context(socket.create_connection(address))

    bench.withstands(attack)


def test_torn_handshakes(bench: Bench) -> None:
    hello = client_hello(P256)

    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            for address in (http, rpc) * 200:
                closing.enter_context(socket.create_connection(address)).sendall(hello[:-1])

    bench.withstands(attack)


@pytest.mark.parametrize("group", [P256, FFDHE8192], ids=["P-256", "ffdhe8192"])
def test_a_flood_of_handshakes(bench: Bench, group: int) -> None:
    """All of the same bytes, which cost who sends them nothing."""
    hello = client_hello(group)

    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            opened = [closing.enter_context(socket.create_connection(address)) for address in (http, rpc) * 150]
            for each in opened:
                each.sendall(hello)
            for each in opened:
                with contextlib.suppress(ConnectionError):
                    each.recv(1)

    bench.withstands(attack)


def test_clients_that_shake_hands_and_leave(bench: Bench) -> None:
    def attack(http: Address, rpc: Address) -> None:
        for address in (http, rpc) * 50:
            Shaken(address).socket.close()

    bench.withstands(attack)


def test_requests_for_new_keys(bench: Bench) -> None:
    """Each of 27 bytes; the answers of half of them nobody takes."""

    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            asking = []
            for address in (http, rpc) * 4:
                keylog = bench.log.with_name(f"keys-{next(_numbers)}")
                each = closing.enter_context(contextlib.closing(Shaken(address, keylog).socket))
                asking.append((each, key_updates(keylog, 4000)))
            for number, (each, asked) in enumerate(asking):
                with contextlib.suppress(ConnectionError):
                    each.sendall(asked)
                    if number % 2:
                        each.settimeout(0.1)
                        with contextlib.suppress(TimeoutError):
                            while each.recv(1 << 16):
                                pass

    bench.withstands(attack)


@pytest.mark.parametrize("connections", [20, 400])
def test_records_of_one_byte(bench: Bench, connections: int) -> None:
    request = b"POST /v2/models/wide/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000\r\n\r\n"

    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            sending = []
            for _ in range(connections):
                each = Shaken(http)
                closing.enter_context(contextlib.closing(each.socket))
                begun = each.encrypted(request)
                sending.append(
                    (each.socket, begun + b"".join(each.encrypted(b"1") for _ in range(min(10_000, 1_200_000 // connections))))
                )
            for talking, sent in sending:
                talking.sendall(sent)

    bench.withstands(attack)
