"""Which requests of web pages are refused."""

import pytest

from gateway.config import Limits
from gateway.errors import Forbidden, GatewayError
from gateway.wire.http1 import Http1Connection
from gateway.wire.known_heads import KnownHeads
from gateway.wire.origins import Origins
from tests.http_server.serving import echo
from tests.wire.talking import Kept, send

OWN = Origins(("proxy.example", "App.Example."), "Gateway.local")
OTHER = Origins(("app.example",))


def asked(origins: Origins, method: str, *fields: str, version: str = "1.1", target: str = "/x") -> int:
    """The status, which is the same for a head that is known by then."""
    heads, told = KnownHeads(), list[GatewayError]()
    request = "\r\n".join([f"{method} {target} HTTP/{version}", *fields, "Content-Length: 1", "", "1"]).encode()
    statuses = []
    for _ in range(2):
        outlet = Kept()
        connection = Http1Connection(
            echo, Limits(), outlet, heads=heads, origins=origins, on_fault=lambda exchange, error: told.append(error)
        )
        send(connection, outlet, request)
        statuses.append(int(outlet.written.split()[1]))
    assert len(set(statuses)) == 1
    assert [type(error) for error in told] == ([] if statuses[0] == 200 else [Forbidden, Forbidden])
    return statuses[0]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LocalHost:8000", 200), ("localhost.:8000", 200), ("a.localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200), ("192.168.0.7", 200), ("gateway.local:8000", 200), ("PROXY.example", 200), ("", 200),
        ("app.example:1", 200), ("evil.example", 421), ("evil.example:8000", 421), ("a.proxy.example", 421),
        ("localhost.evil.example", 421),
        ("notlocalhost", 421), ("127.0.0.1.evil.example", 421), ("[evil.example]", 421), ("localhost:8000:evil", 421),
    ],
)  # fmt: skip
def test_a_server_of_this_machine_answers_to_no_other_name(host: str, status: int) -> None:
    assert asked(OWN, "GET", f"Host: {host}") == status
    assert asked(OTHER, "GET", f"Host: {host}") == 200
    assert asked(Origins("*", "127.0.0.1"), "GET", f"Host: {host}") == 200
    if host:
        assert asked(OWN, "GET", "Host: localhost", target=f"http://{host}/x") == status
        assert asked(OWN, "GET", f"Host: {host}", target="http://localhost/x") == 200


def test_a_client_of_http_1_0_names_no_host() -> None:
    assert asked(OWN, "POST", version="1.0") == 200


@pytest.mark.parametrize(
    ("fields", "own", "other"),
    [
        ((), 200, 200),
        (("Sec-Fetch-Site: same-origin", "Origin: http://localhost:1"), 200, 200),
        (("Sec-Fetch-Site: none",), 200, 200),
        (("Sec-Fetch-Site: cross-site",), 403, 403),
        (("Sec-Fetch-Site: same-site", "Origin: http://localhost:3000"), 403, 403),
        (("Sec-Fetch-Site: same-site, none",), 403, 403),
        (("Sec-Fetch-Site: cross-site", "Origin: https://app.example:4"), 200, 200),
        (("Sec-Fetch-Site: cross-site", "Origin: https://evil.example"), 403, 403),
        (("Sec-Fetch-Site: cross-site", "Origin: null"), 403, 403),
        (("Origin: http://LOCALHOST:8000",), 200, 200),
        (("Origin: http://localhost:3000",), 403, 200),
        (("Origin: http://localhost",), 403, 200),
        (("Origin: http://proxy.example",), 200, 200),
        (("Origin: null",), 403, 200),
        (("Origin: http://[::1",), 403, 200),
    ],
)
def test_a_page_of_another_origin_may_change_nothing(fields: tuple[str, ...], own: int, other: int) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert asked(OWN, method, "Host: localhost:8000", *fields) == own
        assert asked(OTHER, method, "Host: localhost:8000", *fields) == other
    for method in ("GET", "OPTIONS"):
        assert asked(OWN, method, "Host: localhost:8000", *fields) == 200


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        (b"https://evil.example:4", "to let its pages ask, add evil.example to server.allowed_hosts"),
        (b"null", "have it come from a host that is named in server.allowed_hosts"),
    ],
)
def test_what_is_told_of_a_page_can_be_done(origin: bytes, told: str) -> None:
    assert OWN.foreign(b"POST", {b"origin": origin, b"host": b"localhost"}).endswith(told)
