"""TLS on the HTTP/1.1 listener: the same connections, over an encrypted stream."""

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from gateway.config import TlsSection
from gateway.edges.tls import TlsConnection
from gateway.errors import ConfigError
from gateway.process.certificates import HTTP, HTTP2, Certificates
from gateway.wire.exchange import Exchange
from tests.certificates import Authority
from tests.forks import a_copy_of_the_other_end
from tests.http_server.serving import Holder, Served, digest, echo, get, post, serving

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="module", params=LOOPS)
def served(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Served]:
    with serving(answer, new_loop=LOOPS[request.param], certificates=certificates, body_bytes=32 << 20) as served:
        yield served


def answer(exchange: Exchange) -> None:
    """As `echo`; at /long/N with N MiB."""
    if exchange.path.startswith(b"/long/"):
        exchange.compress = False
        exchange.respond(200, [b"head", os.urandom(1) * (int(exchange.path[6:]) << 20)])
    else:
        echo(exchange)


def test_requests_are_answered_as_without(served: Served, authority: Authority) -> None:
    client = served.connect(authority.trusted())
    assert client.socket.selected_alpn_protocol() is None  # type: ignore[attr-defined]  # none was asked for
    body = os.urandom(5 << 20)
    client.send(get("/one") + post(b"two") + get("/three"))
    assert [client.receive().json()["path"] for _ in range(3)] == ["/one", "/x", "/three"]
    client.send(post(body))
    assert client.receive().json()["digest"] == digest(body)


def test_the_protocol_is_agreed_on(served: Served, authority: Authority) -> None:
    context = authority.trusted()
    context.set_alpn_protocols(["h2", "http/1.1"])
    assert served.connect(context).socket.selected_alpn_protocol() == "http/1.1"  # type: ignore[attr-defined]


def test_a_long_answer_comes_whole(served: Served, authority: Authority) -> None:
    client = served.connect(authority.trusted())
    client.send(get("/long/24") + get("/behind"))
    long = client.receive()
    assert len(long.body) == (24 << 20) + 4
    assert set(long.body[4:]) == {long.body[4]}
    assert client.receive().json()["path"] == "/behind"


def test_the_end_is_told_by_tls_itself(served: Served, authority: Authority) -> None:
    """So nobody can cut an answer short without its being seen."""
    client = served.connect(authority.trusted())
    assert client.ask(get("/x", "Connection: close")).status == 200
    assert client.at_end()


@pytest.mark.parametrize("loop", LOOPS)
def test_the_end_is_told_though_a_fork_has_a_copy_of_the_connection(
    loop: str, authority: Authority, certificates: Certificates
) -> None:
    with serving(answer, new_loop=LOOPS[loop], certificates=certificates) as served:
        client = served.connect(authority.trusted())
        with a_copy_of_the_other_end(client.socket):
            client.send(get("/long/8"))
            assert len(client.receive().body) == (8 << 20) + 4
            served.drain(0.1)
            assert client.at_end()
            assert select.select([client.socket], [], [], 10)[0]
            assert os.read(client.socket.fileno(), 1) == b""  # the end of the socket itself


def test_a_body_that_is_refused_while_it_comes_gets_its_answer(served: Served, authority: Authority) -> None:
    client = served.connect(authority.trusted())
    client.send(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999\r\n\r\n")
    client.send(bytes(1 << 20))
    refused = client.receive()
    assert refused.status == 413
    assert "server.limits.body_bytes" in refused.json()["error"]
    assert client.at_end()


def test_a_client_that_leaves_politely_is_gone(authority: Authority, certificates: Certificates) -> None:
    holder = Holder()
    with serving(holder, certificates=certificates) as served:
        client = served.connect(authority.trusted())
        client.send(get())
        served.wait_for(lambda: len(holder.held) == 1)
        client.socket.unwrap()  # type: ignore[attr-defined]  # which waits for the server's own word
        served.wait_for(lambda: len(holder.gone) == 1)
        served.wait_for(lambda: not served.server.connections)


def test_pieces_wait_for_a_client_that_reads_slowly(authority: Authority, certificates: Certificates) -> None:
    pieces = [bytes([number]) * (1 << 20) for number in range(16)]
    written: list[int] = []

    def stream(exchange: Exchange) -> None:
        left = iter(pieces)

        def go_on() -> None:
            for piece in left:
                exchange.write(piece)
                written.append(1)
                if exchange.backlog:
                    return
            exchange.finish()

        exchange.on_drained = go_on
        exchange.begin(200, b"application/octet-stream")
        go_on()

    with serving(stream, certificates=certificates) as served:
        client = served.connect(authority.trusted())
        client.send(get())
        client.receive_head()
        assert client.receive_chunk() == pieces[0]
        assert len(written) < len(pieces)  # the writer waits for the reader
        assert [client.receive_chunk() for _ in pieces[1:]] == pieces[1:]
        assert client.receive_chunk() == b""


def test_a_client_that_takes_nothing_is_cut_off(authority: Authority, certificates: Certificates) -> None:
    with serving(answer, certificates=certificates, body_timeout_s=0.2) as served:
        client = served.connect(authority.trusted())
        client.send(get("/long/24"))
        served.wait_for(lambda: bool(served.server.connections))
        served.wait_for(lambda: any(each.unsent > 16 << 20 for each in served.server.connections))  # all of it counts
        served.wait_for(lambda: not served.server.connections)


def test_who_does_not_shake_hands_is_cut_off_and_counted_meanwhile(authority: Authority, certificates: Certificates) -> None:
    with serving(echo, certificates=certificates, connections=1, header_timeout_s=0.5) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as silent:
            served.wait_for(lambda: len(served.server.connections) == 1)
            crowded = served.connect(authority.trusted()).receive()
            assert crowded.status == 503
            assert "server.limits.connections" in crowded.json()["error"]
            assert silent.recv(1) == b""
        served.wait_for(lambda: not served.server.connections)
        assert served.connect(authority.trusted()).ask(get()).status == 200


def test_who_speaks_no_tls_is_told_so(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
        client.sendall(get())
        said = b"".join(iter(lambda: client.recv(1000), b""))
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"this port speaks TLS: ask by https://" in said
    assert b"\r\nDate: " in said


@pytest.mark.parametrize("first", [b"\x16\x03\x01\x00\x05hello", b"\xff" * 1000], ids=["torn", "noise"])
def test_what_is_no_tls_ends_that_connection(
    served: Served, authority: Authority, caplog: pytest.LogCaptureFixture, first: bytes
) -> None:
    said = b""
    with caplog.at_level(logging.INFO), socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
        client.sendall(first + bytes(100))
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(100):
                said += data
    assert len(said) <= 7  # an alert
    assert served.connect(authority.trusted()).ask(get()).status == 200


@pytest.mark.parametrize(
    "weaken",
    [
        lambda context: (
            setattr(context, "maximum_version", ssl.TLSVersion.TLSv1_1),
            context.set_ciphers("@SECLEVEL=0:ALL"),
        ),
        lambda context: (
            setattr(context, "maximum_version", ssl.TLSVersion.TLSv1_2),
            context.set_ciphers("@SECLEVEL=0:AES128-SHA:ECDHE-ECDSA-AES128-SHA:ECDHE-ECDSA-AES128-SHA256"),
        ),
    ],
    ids=["TLS 1.1", "ciphers without forward secrecy, or CBC"],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_what_is_weak_is_refused(served: Served, authority: Authority, weaken: Callable[[ssl.SSLContext], object]) -> None:
    context = authority.trusted()
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    weaken(context)
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        served.connect(context)


def living() -> set[int]:
    return {id(each) for each in gc.get_objects() if type(each) is TlsConnection}


def test_a_closed_connection_is_freed_without_the_collector(authority: Authority, certificates: Certificates) -> None:
    with serving(echo, certificates=certificates) as served:
        gc.collect()
        gc.disable()
        before = living()
        try:
            client = served.connect(authority.trusted())
            assert client.ask(post(b"x" * 100, "Connection: close")).status == 200
            assert client.at_end()
            served.wait_for(lambda: not served.server.connections)
            served.wait_for(lambda: living() <= before)
        finally:
            gc.enable()


# mutual TLS


@pytest.fixture(scope="module")
def mutual(authority: Authority) -> Iterator[Served]:
    certificate, key = authority.issue("mutual")
    section = TlsSection(certificate=str(certificate), key=str(key), client_ca=str(authority.path))
    with serving(echo, certificates=Certificates(section)) as served:
        yield served


def test_a_client_of_the_authority_is_served(mutual: Served, authority: Authority) -> None:
    context = authority.trusted(authority.issue("client", client=True))
    assert mutual.connect(context).ask(get()).status == 200


def test_any_other_client_is_refused(mutual: Served, authority: Authority, tmp_path: Path) -> None:
    other, before = Authority(tmp_path, "other"), mutual.connections()
    for shown in (None, other.issue("stranger", client=True), authority.issue("a-server")):
        with pytest.raises((ssl.SSLError, ConnectionError)):  # TLS 1.3 tells it behind the client's handshake
            mutual.connect(authority.trusted(shown)).ask(get())
    mutual.wait_for(lambda: len(mutual.server.connections) == before)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_a_certificate_that_expires_ends_what_was_agreed_on_by_it(
    authority: Authority, version: ssl.TLSVersion, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenSSL looks at a certificate when it is shown, and a client that takes up a session again shows none."""
    certificate, key = authority.issue("mutual")
    section = TlsSection(certificate=str(certificate), key=str(key), client_ca=str(authority.path))
    now_s = time.time()
    with serving(echo, certificates=Certificates(section, wall_s=lambda: now_s)) as served:
        context = authority.trusted(authority.issue("short", client=True))
        context.maximum_version = version
        first = served.connect(context)
        assert first.ask(get()).status == 200  # behind which TLS 1.3 has its tickets
        session = first.socket.session  # type: ignore[attr-defined]
        again = served.connect(context, session)
        assert again.ask(get()).status == 200
        assert again.socket.session_reused  # type: ignore[attr-defined]
        before = served.connections()
        now_s += 2 * 86400
        with caplog.at_level(logging.INFO), pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
            served.connect(context, session).ask(get())
        assert "TLS handshake with 127.0.0.1 failed: certificate has expired" in caplog.text
        served.wait_for(lambda: len(served.server.connections) == before)


# files that change


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 2_000_000_000  # each who asks comes two seconds after the last
        return self.now_ns


def section(folder: Path) -> TlsSection:
    return TlsSection(certificate=str(folder / "server.pem"), key=str(folder / "server.key"))


def test_new_connections_get_new_certificates(tmp_path: Path) -> None:
    old = Authority(tmp_path)
    old.issue("server")
    holder = Holder()
    with serving(holder, certificates=Certificates(section(tmp_path), Clock())) as served:
        before = served.connect(old.trusted())
        new = Authority(tmp_path)
        new.issue("server")
        after = served.connect(new.trusted())
        for client in (before, after):
            client.send(get())
        served.wait_for(lambda: len(holder.held) == 2)
        for exchange in holder.held:
            served.call(lambda exchange=exchange: exchange.respond(200))
        assert before.receive().status == after.receive().status == 200  # nobody was cut off


def test_files_that_cannot_be_used_change_nothing_and_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    authority.issue("server")
    certificates = Certificates(section(tmp_path), Clock())
    before = certificates.context(HTTP), certificates.context(HTTP2)
    (tmp_path / "server.key").write_text("no key")
    assert certificates.context(HTTP) is before[0]
    assert not caplog.records  # the key may be on its way
    for _ in range(5):
        assert (certificates.context(HTTP), certificates.context(HTTP2)) == before
    (told,) = caplog.records
    assert "server.tls" in told.message
    assert "no key" not in told.message
    authority.issue("server")
    assert certificates.context(HTTP) is not before[0]
    assert certificates.context(HTTP2) is not before[1]
    assert len(caplog.records) == 1


def test_the_files_are_looked_at_once_a_second_at_most(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("server")
    now_ns = 0
    certificates = Certificates(section(tmp_path), lambda: now_ns)
    before = certificates.context(HTTP)
    authority.issue("server")
    now_ns = 999_999_999
    assert certificates.context(HTTP) is before
    now_ns = 1_000_000_000
    assert certificates.context(HTTP) is not before


def _gone(folder: Path) -> None:
    (folder / "server.pem").unlink()


def _pipe(folder: Path) -> None:
    _gone(folder)
    os.mkfifo(folder / "server.pem")


def _of_another(folder: Path) -> None:
    (folder / "server.key").write_bytes(Authority(folder).issue("another")[1].read_bytes())


def _noise(folder: Path) -> None:
    (folder / "server.pem").write_bytes(hashlib.sha256(b"").digest())


def _swapped(folder: Path) -> None:
    certificate, key = folder / "server.pem", folder / "server.key"
    before = certificate.read_bytes()
    certificate.write_bytes(key.read_bytes())
    key.write_bytes(before)


def _no_key(folder: Path) -> None:
    (folder / "server.key").write_bytes((folder / "server.pem").read_bytes())


def _torn(folder: Path) -> None:
    _tear(folder / "server.pem")


def _torn_key(folder: Path) -> None:
    _tear(folder / "server.key")


def _tear(path: Path) -> None:
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


def _encrypted(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    path = folder / "server.key"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    how = serialization.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_gone, r"server\.tls\.certificate: '.*server\.pem': cannot be read: No such file"),
        (_pipe, r"server\.tls\.certificate: '.*server\.pem': cannot be read: it is a named pipe, not a file"),
        (_of_another, r"server\.tls\.key: '.*server\.key': it is not the key of the certificate in '.*server\.pem'"),
        (_noise, r"server\.tls\.certificate: '.*server\.pem': it holds no certificate: expected one in PEM"),
        (_swapped, r"server\.tls\.certificate: '.*server\.pem': it holds no certificate: expected one in PEM"),
        (_no_key, r"server\.tls\.key: '.*server\.key': it holds no private key: expected one in PEM"),
        (_torn, r"server\.tls\.certificate: '.*server\.pem': OpenSSL cannot read it.*: expected PEM, as it was issued"),
        (_torn_key, r"server\.tls\.key: '.*server\.key': OpenSSL cannot read it.*: expected PEM, as it was issued"),
        (_encrypted, r"server\.tls\.key: '.*server\.key': it is encrypted"),
    ],
    ids=lambda given: given.__name__.strip("_") if callable(given) else "",
)
def test_a_gateway_does_not_start_with_files_that_cannot_be_used(
    tmp_path: Path, spoil: Callable[[Path], None], told: str
) -> None:
    Authority(tmp_path).issue("server")
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=told):
        Certificates(section(tmp_path))


def test_one_file_may_hold_the_certificate_and_the_key(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("server")
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    Certificates(TlsSection(certificate=str(both), key=str(both), client_ca=str(both)))
