"""What is said where a door stays shut, and that the key is in none of it."""

import argparse
import contextlib
import http.server
import ssl
import threading
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.cli import main as gateway_main
from gateway.errors import BackendUnreachable, ConfigError, Forbidden, Limited, Unauthenticated
from gateway.process.credentials import NOTHING_SHOWN, VARIABLE, Credentials, add_credentials, credentials, told
from loadtest.cli import main as loadtest_main
from tests.certificates import Authority

SECRET = "s3cret-of-mine"


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers a path that is a status with that, and any other with the key that was shown, or a redirection."""

    def do_GET(self) -> None:
        name = self.path.strip("/")
        status = int(name) if name.isdigit() else 200
        if name.startswith("to-"):
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{name[3:]}/")
        else:
            self.send_response(status)
        body = self.headers.get("Authorization", "none").encode() if status == 200 else b'{"error": "its\\nown words"}'
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextlib.contextmanager
def server(context: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Iterator[str]:
    """Gives "HOST:PORT"."""
    with http.server.ThreadingHTTPServer((host, 0), Answering) as listening:
        listening.handle_error = lambda *of: None  # type: ignore[method-assign]  # clients that break off are what it is for
        if context is not None:
            listening.socket = context.wrap_socket(listening.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"{host}:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def context_of(files: tuple[Path, Path], client_ca: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    return context


def get(shown: Credentials, url: str) -> bytes:
    with shown.opened(url, timeout_s=10) as answer:
        body: bytes = answer.read()
        return body


def refusal(shown: Credentials, url: str) -> str:
    with pytest.raises(BackendUnreachable) as refused:
        get(shown, url)
    return refused.value.message


def options(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_credentials(parser)
    return parser.parse_args(typed)


def test_each_fault_of_a_certificate_has_its_sentence(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    shown = Credentials(ca=str(authority.path))
    with server(context_of(authority.issue("server"))) as address:
        assert get(shown, f"https://{address}/x") == b"none"
        url = f"https://{address}"
        assert refusal(NOTHING_SHOWN, f"{url}/x").startswith(
            f"{url}: its certificate needs an authority that vouches for it, and this machine knows none: name one with --ca ("
        )
        assert f"and --ca {other.path} has none (" in refusal(Credentials(ca=str(other.path)), f"{url}/x")
    with server(context_of(authority.issue("server")), host="127.0.0.2") as address:
        assert "its certificate is of another name: ask by one that it has" in refusal(shown, f"https://{address}/x")
    with server(context_of(authority.issue("old", expired=True))) as address:
        assert refusal(shown, f"https://{address}/x").endswith(
            "its certificate has expired: whoever runs it must renew it (server.tls.certificate)"
        )
    with server() as address:
        assert refusal(shown, f"https://{address}/x") == f"https://{address}: it speaks no TLS: write http://{address}"


def test_a_server_that_wants_a_certificate_gets_one_or_says_so(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    mine, foreign = authority.issue("client", client=True), other.issue("foreign", client=True)
    with server(context_of(authority.issue("server"), authority.path)) as address:
        url, ca = f"https://{address}/x", str(authority.path)
        assert get(Credentials(ca, *map(str, mine)), url) == b"none"
        assert "client's certificate" in refusal(Credentials(ca), url)
        assert f"accept the certificate of --cert {foreign[0]}" in refusal(Credentials(ca, *map(str, foreign)), url)


def test_a_server_that_ends_the_handshake_without_a_word_is_told_in_ours() -> None:
    ended = ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed (EOF) (_ssl.c:992)")
    for failed in (ended, urllib.error.URLError(ended)):
        told = NOTHING_SHOWN.failed(failed, "https://127.0.0.1:8001")
        assert told.startswith("https://127.0.0.1:8001: it ended the connection: it may speak no TLS; ")


def test_a_key_is_shown_to_the_server_that_is_asked_and_to_no_other() -> None:
    shown = Credentials(api_key=SECRET)
    with server() as here, server() as there:
        assert get(shown, f"http://{here}/x") == f"Bearer {SECRET}".encode()
        assert get(shown, f"http://{here}/to-{there.rpartition(':')[2]}") == b"none"


@pytest.mark.parametrize(
    ("status", "kind", "with_key", "without"),
    [
        (401, Unauthenticated, "401: it does not take the key of here (its own words)", "401: it asks for a key: put it into "),
        (403, Forbidden, "403: the key of here is not for this (its own words)", "403: it asks for a key: put it into "),
        (429, Limited, "429: the key of here has asked as much as it may (its own words)", "429: who asks has asked as much"),
    ],
)
def test_a_refusal_says_which_key_and_what_to_do(status: int, kind: type[Exception], with_key: str, without: str) -> None:
    with server() as address:
        for shown, words in ((Credentials(api_key=SECRET, api_key_from="here"), with_key), (NOTHING_SHOWN, without)):
            with pytest.raises(kind, match=r"^http://.*/\d{3}: ") as refused:
                get(shown, f"http://{address}/{status}")
            assert words in str(refused.value)
            assert SECRET not in repr(shown) + str(refused.value)
        with pytest.raises(urllib.error.HTTPError) as other:
            get(NOTHING_SHOWN, f"http://{address}/500")
        other.value.close()


@pytest.mark.parametrize("option", ["--ca", "--cert"])
@pytest.mark.parametrize(
    ("main", "typed", "asked", "secure"),
    [
        (gateway_main, "top --once 127.0.0.1:9", "http://127.0.0.1:9", "https://127.0.0.1:9"),
        (gateway_main, "route explain http://127.0.0.1:9/in m", "http://127.0.0.1:9", "https://127.0.0.1:9"),
        (loadtest_main, "run 127.0.0.1:9", "http://127.0.0.1:9", "https://127.0.0.1:9"),
        (loadtest_main, "run --protocol grpc 127.0.0.1:9", "grpc://127.0.0.1:9", "grpcs://127.0.0.1:9"),
    ],
)
def test_files_for_tls_are_not_left_aside_where_there_is_none(
    capsys: pytest.CaptureFixture[str],
    option: str,
    main: Callable[[list[str]], int],
    typed: str,
    asked: str,
    secure: str,
) -> None:
    assert main([*typed.split(), option, "some.pem"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{option}: some.pem: {asked} is asked without TLS, for which it is: write {secure}" in said


def test_the_key_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    assert credentials(options(), {}).headers == {}
    assert credentials(options(), {VARIABLE: SECRET}).headers == {"Authorization": f"Bearer {SECRET}"}
    found = credentials(options("--api-key-file", str(file)), {VARIABLE: "another"})
    assert (found.api_key, found.api_key_from) == (SECRET, f"--api-key-file {file}")


def test_files_that_cannot_be_used_are_told_by_their_option(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.issue("client", client=True))
    empty = tmp_path / "empty"
    empty.write_text("\n")
    lines = tmp_path / "lines"
    lines.write_text(f"{SECRET}\nmore of it")
    for typed, words in (
        (["--api-key-file", f"{tmp_path}/{SECRET}"], "--api-key-file: No such file or directory: expected a file that holds"),
        (["--api-key-file", str(empty)], f"--api-key-file {empty}: expected a key, in one line"),
        (["--api-key-file", str(lines)], f"--api-key-file {lines}: expected a key, in one line"),
        (["--key", key], f"--key: {key}: it is the key of a certificate: name that with --cert"),
    ):
        with pytest.raises(ConfigError) as fault:
            credentials(options(*typed), {})
        assert words in fault.value.message
        assert SECRET not in fault.value.message
    with pytest.raises(ConfigError, match=f"^{VARIABLE}: expected a key, in one line"):
        credentials(options(), {VARIABLE: "two words"})
    for shown, words in (
        (Credentials(ca="/nowhere"), "--ca: /nowhere: expected certificates in PEM: No such file"),
        (Credentials(ca=str(empty)), f"--ca: {empty}: expected certificates in PEM: no certificate or crl found"),
        (
            Credentials(certificate=certificate),
            f"--cert: {certificate}: it does not hold the private key too: name that with --key",
        ),
        (Credentials(certificate=key), f"--cert: {key}: expected a certificate, in PEM: it holds none"),
        (
            Credentials(certificate=certificate, certificate_key=str(empty)),
            f"--key: {empty}: expected a private key, in PEM: it holds none",
        ),
        (
            Credentials(certificate=certificate, certificate_key="/nowhere"),
            f"--cert: {certificate} and --key: /nowhere: expected a certificate and its key, in PEM: No such file",
        ),
        (Credentials(certificate="/nowhere"), "--cert: /nowhere: expected a certificate and its key"),
        (Credentials(certificate=certificate, certificate_key=str(authority.issue("b")[1])), "key values mismatch"),
    ):
        with pytest.raises(ConfigError) as fault:
            shown.context()
        assert words in fault.value.message


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"error": "a\\n b"}', "a b"),
        ("plain\ntext", "plain text"),
        (" <html>", ""),
        ("[1]", "[1]"),
        ("x" * 1999, "x" * 1000),
        ('{"error": "\\u001b[31mred"}', "·[31mred"),
        ("a\x1b]0;b\x07\x9b", "a·]0;b··"),
    ],
)
def test_a_servers_words_are_one_line(answer: str, words: str) -> None:
    assert told(answer) == words
