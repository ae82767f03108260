"""What is said where the target cannot be asked, or is not what it is taken for."""

import socket
import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import psutil
import pytest

from loadtest.errors import TargetError, UsageError
from loadtest.load.dialler import Dialler
from loadtest.load.target import Address, model_name
from loadtest.results import LoadSpec, Protocol


class _Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        if self.path.startswith("/closes"):
            return
        if self.path.startswith("/frames"):
            self.wfile.write(b"\x00\x00\x18\x04\x00\r\n")
            return
        page = self.path.startswith("/page")
        body = b"<!DOCTYPE html>\n<html>many lines" if page else b'{"error":\n "not found"}'
        self.send_response(404)
        self.send_header("Content-Type", "text/html; charset=utf-8" if page else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answer) as found:
        thread = Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


def asked(target: str) -> str:
    spec = LoadSpec(target)
    with pytest.raises(TargetError) as raised:
        model_name(spec, Address.of(spec))
    return str(raised.value)


@pytest.mark.parametrize("protocol", ["rest-json", "grpc"])
def test_an_address_of_ipv6_is_told_in_brackets(protocol: Protocol) -> None:
    spec = LoadSpec("[::1]:1", protocol=protocol)
    with pytest.raises(TargetError, match=r"^\[::1\]:1[ /]"):
        model_name(spec, Address.of(spec))


def test_the_url_of_an_address_of_ipv6_has_brackets() -> None:
    assert Address.of(LoadSpec("https://[::1]:8443/a")).url == "https://[::1]:8443"
    assert Address.of(LoadSpec("https://[::1]/a")).authority == "[::1]"
    failure = ssl.SSLError(1, "no")
    failure.reason = "HTTP_REQUEST"
    assert Dialler("::1", 8443, tls=True, protocols=("h2",), timeout_s=1).failed(failure).startswith("grpcs://[::1]:8443: ")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://h", "/invocations"), ("http://h/", "/invocations"), ("http://h?a=1", "/invocations?a=1"),
        ("http://h/?a=1", "/invocations?a=1"), ("http://h/predict/", "/predict/"), ("h/predict/?a=1", "/predict/?a=1"),
        ("http://h/a b/%20/ü?q=x y", "/a%20b/%20/%C3%BC?q=x%20y"), ("http://h/a+b/@:~?x=[1],2", "/a+b/@:~?x=[1],2"),
    ],
)  # fmt: skip
def test_the_url_of_invocations_is_sent_as_it_is_but_percent_encoded(target: str, path: str) -> None:
    assert Address.of(LoadSpec(target, protocol="invocations")).path == path


def test_a_path_before_that_of_the_protocol_is_percent_encoded_and_ends_without_a_slash() -> None:
    assert Address.of(LoadSpec("http://h/a b/")).model_path("m", "") == "/a%20b/v2/models/m"
    assert Address.of(LoadSpec("http://h/")).model_path("m", "") == "/v2/models/m"
    assert Address.of(LoadSpec("http://bücher.example/")).authority == "xn--bcher-kva.example"


@pytest.mark.parametrize(
    ("target", "protocol"), [("http://h/?a=1", "rest-json"), ("h?a", "rest-binary"), ("h:1/a", "grpc"), ("h:1?a", "grpc")]
)
def test_what_would_not_be_sent_of_a_url_is_refused(target: str, protocol: Protocol) -> None:
    with pytest.raises(UsageError, match=f"expected (http|grpc)://HOST:PORT for protocol {protocol}"):
        Address.of(LoadSpec(target, protocol=protocol))


@pytest.mark.parametrize("target", ["http://me:secret@h", "https://me:secret@h:99999/", "me:secret@h?a", "ftp://me:secret@[h"])
def test_a_password_in_a_url_is_refused_and_not_shown(target: str) -> None:
    with pytest.raises(UsageError, match=r"a user and password in a URL are not sent: .* --header") as raised:
        Address.of(LoadSpec(target))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.11", True), ("[::1]", True), ("localhost", True), (socket.gethostname(), True), ("192.0.2.7", True),
        ("app.localhost", True), ("localhost.", True), ("0.0.0.0", True), ("[::ffff:127.0.0.1]", True),
        ("localhost.example", False), ("127.0.0.1.example", False), ("192.0.2.77", False), ("x/127.0.0.1", False),
    ],
)  # fmt: skip
def test_a_target_is_here_by_its_address_or_name(host: str, is_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [SimpleNamespace(address="192.0.2.7")]})
    assert Address.of(LoadSpec(f"http://{host}")).is_here() == is_here


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2", "/v2/health/ready"])
def test_a_whole_url_is_told_to_be_given_as_the_address_alone(server: str, path: str) -> None:
    assert asked(server + path).endswith(f"answered 404: not found; give the address alone: {server}")
    assert asked(f"{server}/behind{path}").endswith(f"; give the address alone: {server}/behind")


def test_an_address_that_is_one_is_not_doubted(server: str) -> None:
    assert asked(server).endswith("/v2/repository/index answered 404: not found")


def test_a_page_of_html_is_not_shown(server: str) -> None:
    told = asked(f"{server}/page")
    assert told.endswith("answered 404 with a page of HTML: is it a server of the Open Inference Protocol v2?")


def test_a_server_that_hangs_up_may_be_one_of_grpc(server: str) -> None:
    assert asked(f"{server}/closes").endswith("; if it is a port of gRPC, add --protocol grpc")
    frames = asked(f"{server}/frames")
    assert frames.endswith("cannot be asked: it does not answer in HTTP/1.1; if it is a port of gRPC, add --protocol grpc")
