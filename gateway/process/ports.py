"""Who may listen on the configured ports of this machine, and telling at once who may not.

The ingress replicas of one application on one node share their ports (SO_REUSEPORT): several at a time, and the old beside the
new during an upgrade. But then the kernel lets every process of the same user join them, and spreads the connections over all.
So whoever listens keeps a claim on each port: an abstract Unix socket that is bound and never used, whose name says port,
address, protocol and owner. The kernel keeps these names per network namespace, as it does ports, and drops them with the
process, however that ends. A claim is bound first and then compared with all others: of two that come at once, at least one
sees the other.

Where there are no abstract sockets (not Linux), only the test of the port itself is left.
"""

import errno
import hashlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.config import ServerSection
from gateway.errors import ConfigError
from gateway.process.forks import keep_from_forks

_TABLE: Final = Path("/proc/net/unix")
_NAME: Final = re.compile(r" @serving-gateway:(\d+):([0-9a-f]+):(\w+):(\w+):(\d+):(\w+)$", re.MULTILINE)


class _Claim(NamedTuple):
    """One port of one address, in hexadecimal. owner: a digest of who may share it. pid: for messages. unique: this claim's."""

    port: int
    address: str
    protocol: str
    owner: str
    pid: int
    unique: str

    def name(self) -> str:
        return "\0" + ":".join(("serving-gateway", *map(str, self)))  # at most 107 characters

    def shares(self, other: "_Claim") -> bool:
        return (self.port, self.protocol, self.owner) == (other.port, other.protocol, other.owner)

    def clashes(self, other: "_Claim") -> bool:
        if self.port != other.port or len(self.address) != len(other.address) or self.shares(other):
            return False
        any_address = "0" * len(self.address)
        return self.address == other.address or any_address in (self.address, other.address)


class PortClaims:
    """The claims of one process on its ports. Life: claim -> release."""

    def __init__(self, server: ServerSection, *, owner: str | None) -> None:
        """owner: all who name the same one may listen on these ports together; None: nobody else may."""
        self._server = server
        self._shared = owner is not None
        self._owner = hashlib.sha256((owner or secrets.token_hex()).encode()).hexdigest()[:16]
        self._held: list[socket.socket] = []
        keep_from_forks(self)

    def descriptors(self) -> list[int]:
        return [held.fileno() for held in self._held]

    def claim(self) -> None:
        """Claim the ports, if they can be listened on now. The message of an error names the key and says what to do.

        Raises: OSError, if they cannot, or another gateway has claimed them, a line for each; ConfigError, if both are one.
        """
        http, grpc = self._server.http_port, self._server.grpc_port
        if http and http == grpc:
            raise ConfigError(f"server.grpc_port: {grpc}: server.http_port is the same; expected two ports")
        faults: list[OSError] = []
        for protocol, port in (("http", http), ("grpc", grpc)):
            if port is not None:
                try:
                    self._claim(protocol, port)
                except OSError as exc:
                    faults.append(exc)
        if faults:
            self.release()
            raise OSError("\n".join(dict.fromkeys(map(str, faults)))) from faults[0]

    def release(self) -> None:
        """A second call does nothing."""
        for held in self._held:
            held.close()
        self._held.clear()

    def cannot_listen(self, protocol: str, exc: OSError) -> OSError:
        """What to tell of a listener of "http" or "grpc" that could not be bound."""
        host, port = self._server.host, getattr(self._server, f"{protocol}_port")
        if exc.errno == errno.EADDRINUSE:
            return self._taken(protocol, "another process")
        if exc.errno == errno.EACCES:
            return OSError(f"server.{protocol}_port: {port}: this user may not listen there; choose one above 1023")
        return OSError(f"server.host: {host!r}: cannot listen there: {os.strerror(exc.errno) if exc.errno else exc}")

    def _taken(self, protocol: str, who: str) -> OSError:
        host, port = self._server.host, getattr(self._server, f"{protocol}_port")
        return OSError(
            f"server.{protocol}_port: {port}: taken by {who} ({host}:{port}); end it, or choose another (--{protocol}-port)"
        )

    def _claim(self, protocol: str, port: int) -> None:
        try:
            for probe, address in _opened(self._server.host, port):
                with probe:
                    if self._claimed_before(probe.family, str(address[0]), protocol, port):
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    try:
                        probe.bind(address)
                    except OSError as exc:
                        raise self.cannot_listen(protocol, exc) from exc
        except socket.gaierror as exc:
            raise OSError(f"server.host: {self._server.host!r}: {exc.strerror}") from exc

    def _claimed_before(self, family: int, address: str, protocol: str, port: int) -> bool:
        """Claim it, unless any port will do; and whether others with the same owner hold it."""
        if not port or sys.platform != "linux":
            return self._shared
        plain = socket.inet_pton(family, address.partition("%")[0]).hex()
        claim = _Claim(port, plain, protocol, self._owner, os.getpid(), secrets.token_hex(4))
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._held.append(held)
        held.bind(claim.name())
        others = [other for other in _claims() if other.unique != claim.unique]
        for other in others:
            if claim.clashes(other):
                raise self._taken(protocol, f"another gateway, process {other.pid}")
        return any(claim.shares(other) for other in others)


def check_ports(server: ServerSection, *, owner: str | None) -> None:
    """Tell, before anything is started, what an ingress would find. Raises: as PortClaims.claim."""
    claims = PortClaims(server, owner=owner)
    claims.claim()
    claims.release()


def bind(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """A socket at each address of this host, not listened on; of all of them the port is one, which is any for 0.

    shared: others of this user may bind there as well. Raises: OSError.
    """
    bound: list[socket.socket] = []
    try:
        for made, address in _opened(host, port):
            bound.append(made)
            if shared:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made.bind((address[0], bound[0].getsockname()[1] or port, *address[2:]))
    except OSError:
        for made in bound:
            made.close()
        raise
    return bound


def _opened(host: str, port: int) -> Iterator[tuple[socket.socket, tuple[Any, ...]]]:
    """A socket for each address of this host, as asyncio makes it, and where to bind it. Raises: OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a machine without IPv6
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        yield made, address


def _claims() -> list[_Claim]:
    """All of this network namespace."""
    return [
        _Claim(int(port), address, protocol, owner, int(pid), unique)
        for port, address, protocol, owner, pid, unique in _NAME.findall(_TABLE.read_text(errors="replace"))
    ]
