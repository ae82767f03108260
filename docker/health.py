#!/usr/bin/env python3
"""Whether the gateway of this container is ready: its HTTP listeners answer 200 to GET /ping. The image's HEALTHCHECK.

A gateway that has none listens for gRPC, which it does once its models are loaded.

    health.py [HOST:PORT...]

Without an address: all that gateways listen on in this network namespace. Each has claimed its ports there, by a name that the
kernel shows (`gateway.process.ports`), so that no port needs to be told twice. Exit code 1: one is not ready, or there is none.
"""

import http.client
import re
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 2.0
CLAIM = re.compile(r" @serving-gateway:(\d+):([0-9a-f]+):(http|grpc):(\w+):", re.MULTILINE)


def claimed(table: str) -> dict[str, Callable[[str], str]]:
    """The addresses in a /proc/net/unix, each with how it is asked; of a listener on all addresses the loopback's."""
    found = {}
    claims = CLAIM.findall(table)
    with_http = {owner for _, _, protocol, owner in claims if protocol == "http"}
    for port, address, protocol, owner in sorted(claims):
        if protocol == "grpc" and owner in with_http:
            continue
        plain = bytes.fromhex(address)
        family = socket.AF_INET if len(plain) == 4 else socket.AF_INET6
        anywhere = not any(plain)
        host = ("127.0.0.1" if family == socket.AF_INET else "::1") if anywhere else socket.inet_ntop(family, plain)
        found[f"[{host}]:{port}" if ":" in host else f"{host}:{port}"] = state if protocol == "http" else listening
    return found


def state(address: str) -> str:
    """What it answers: "200", or what else. By TLS where that is not so without; nobody's certificate is judged."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    said = ""
    for connection in (
        http.client.HTTPConnection(address, timeout=TIMEOUT_S),
        http.client.HTTPSConnection(address, timeout=TIMEOUT_S, context=context),
    ):
        try:
            connection.request("GET", "/ping")
            response = connection.getresponse()
            response.read()
            if response.status == 200:
                return "200"
            said = said or str(response.status)
        except (OSError, http.client.HTTPException) as exc:
            said = said or f"{type(exc).__name__}: {exc}"
        finally:
            connection.close()
    return said


def listening(address: str) -> str:
    """200, or why nobody could connect."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S).close()
    except OSError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "200"


def main(addresses: list[str]) -> int:
    asked = dict.fromkeys(addresses, state) or claimed(Path("/proc/net/unix").read_text())
    states = {address: ask(address) for address, ask in asked.items()}
    print("\n".join(f"{address}: {said}" for address, said in states.items()) or "no gateway listens here")
    return 0 if states and set(states.values()) == {"200"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
