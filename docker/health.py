#!/usr/bin/env python3
"""Whether the gateway of this container is ready: its HTTP listeners answer 200 to GET /ping. The image's HEALTHCHECK.

    health.py [HOST:PORT...]

Without an address: all that gateways listen on in this network namespace. Each has claimed its ports there, by a name that the
kernel shows (`gateway.process.ports`), so that no port needs to be told twice. Exit code 1: one is not ready, or there is none.
"""

import http.client
import re
import socket
import ssl
import sys
from pathlib import Path

TIMEOUT_S = 2.0
CLAIM = re.compile(r" @serving-gateway:(\d+):([0-9a-f]+):http:", re.MULTILINE)


def claimed(table: str) -> list[str]:
    """The addresses in a /proc/net/unix; of a listener on all addresses the loopback's."""
    found = []
    for port, address in CLAIM.findall(table):
        plain = bytes.fromhex(address)
        family = socket.AF_INET if len(plain) == 4 else socket.AF_INET6
        anywhere = not any(plain)
        host = ("127.0.0.1" if family == socket.AF_INET else "::1") if anywhere else socket.inet_ntop(family, plain)
        found.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return sorted(set(found))


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


def main(addresses: list[str]) -> int:
    addresses = addresses or claimed(Path("/proc/net/unix").read_text())
    states = {address: state(address) for address in addresses}
    print("\n".join(f"{address}: {said}" for address, said in states.items()) or "no gateway listens here")
    return 0 if states and set(states.values()) == {"200"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
