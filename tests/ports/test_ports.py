"""Who may listen on a port: siblings of one application together, nobody else, and nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gateway.config import ServerSection
from gateway.errors import ConfigError
from gateway.process.ports import PortClaims

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="claims are abstract sockets of Linux")


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        number: int = found.getsockname()[1]
        return number


@pytest.fixture
def held() -> Iterator[list[PortClaims]]:
    """What a test claims, released at its end."""
    claims: list[PortClaims] = []
    yield claims
    for claim in claims:
        claim.release()


def claims(held: list[PortClaims], owner: str | None, **server: object) -> PortClaims:
    # As the command line does it, whose ports the configuration has not seen.
    made = PortClaims(ServerSection(http_port=None, grpc_port=None).model_copy(update=server), owner=owner)
    made.claim()
    held.append(made)
    return made


def test_siblings_share_and_others_do_not(held: list[PortClaims], port: int) -> None:
    claims(held, "cluster/a", http_port=port)
    claims(held, "cluster/a", http_port=port)
    for other in ("cluster/b", "another/a", None):
        with pytest.raises(OSError, match=rf"server.http_port: {port}: taken by another gateway, process {os.getpid()}"):
            claims(held, other, http_port=port)


def test_siblings_share_a_port_that_one_of_them_listens_on(held: list[PortClaims], port: int) -> None:
    claims(held, "cluster/a", http_port=port)
    with socket.create_server(("127.0.0.1", port), reuse_port=True):
        claims(held, "cluster/a", http_port=port)


def test_another_protocol_is_no_sibling(held: list[PortClaims], port: int) -> None:
    claims(held, "cluster/a", http_port=port)
    with pytest.raises(OSError, match=f"server.grpc_port: {port}: taken by another gateway"):
        claims(held, "cluster/a", grpc_port=port)


def test_both_protocols_on_one_port_are_refused(held: list[PortClaims], port: int) -> None:
    with pytest.raises(ConfigError, match=f"server.grpc_port: {port}: server.http_port is the same"):
        claims(held, None, http_port=port, grpc_port=port)


@pytest.mark.parametrize("hosts", [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1")])
def test_addresses_that_overlap_clash(held: list[PortClaims], port: int, hosts: tuple[str, str]) -> None:
    claims(held, "cluster/a", host=hosts[0], http_port=port)
    with pytest.raises(OSError, match="taken by another gateway"):
        claims(held, "cluster/b", host=hosts[1], http_port=port)


def test_addresses_apart_do_not_clash(held: list[PortClaims], port: int) -> None:
    claims(held, "cluster/a", host="127.0.0.1", http_port=port)
    claims(held, "cluster/b", host="127.0.0.2", http_port=port)


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_port_that_a_foreign_process_listens_on_is_refused(held: list[PortClaims], reuse_port: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=reuse_port) as foreign:
        port = foreign.getsockname()[1]
        for owner in (None, "cluster/a"):
            with pytest.raises(OSError, match=rf"server.grpc_port: {port}: taken by another process \(0.0.0.0:{port}\)"):
                claims(held, owner, host="0.0.0.0", grpc_port=port)


def test_an_address_of_another_machine_names_the_host(held: list[PortClaims], port: int) -> None:
    with pytest.raises(OSError, match=r"server.host: '192.0.2.77': cannot listen there"):
        claims(held, None, host="192.0.2.77", http_port=port)
    with pytest.raises(OSError, match=r"^server.host: 'no.such.host.invalid': [^\n]*$"):
        claims(held, None, host="no.such.host.invalid", http_port=port, grpc_port=0)


def test_a_refused_claim_leaves_nothing(held: list[PortClaims], port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign, pytest.raises(OSError, match="grpc_port"):
        claims(held, "cluster/a", http_port=port, grpc_port=foreign.getsockname()[1])
    claims(held, "cluster/b", http_port=port)


def test_two_ports_that_are_taken_are_told_at_once(held: list[PortClaims]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
        with pytest.raises(OSError, match="taken") as refused:
            claims(held, None, http_port=ports[0], grpc_port=ports[1])
    assert [line.partition(": taken")[0] for line in str(refused.value).splitlines()] == [
        f"server.http_port: {ports[0]}",
        f"server.grpc_port: {ports[1]}",
    ]


def test_any_port_that_is_free_is_claimed_by_nobody(held: list[PortClaims]) -> None:
    claims(held, "cluster/a", http_port=0, grpc_port=0)
    claims(held, "cluster/b", http_port=0, grpc_port=0)


@pytest.mark.slow
def test_a_killed_process_leaves_no_claim(held: list[PortClaims], port: int) -> None:
    program = (
        "import signal; from gateway.config import ServerSection; from gateway.process.ports import PortClaims;"
        f"claims = PortClaims(ServerSection(http_port={port}, grpc_port=None), owner='cluster/a'); claims.claim();"
        "print('claimed', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        with pytest.raises(OSError, match=f"process {process.pid}"):
            claims(held, "cluster/b", http_port=port)
        process.send_signal(signal.SIGKILL)
    claims(held, "cluster/b", http_port=port)
