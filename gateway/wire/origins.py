"""Which requests of web pages are refused: a browser sends any page's requests also to a server of this machine alone.

Theory of operation
-------------------
A page of another origin may send a request, though not read its answer. Browsers say where a request comes from, in
Sec-Fetch-Site; older ones, and all where the server is asked in the clear by another name than localhost, only in Origin. What
may change something is refused where either tells of another origin, as by CrossOriginProtection of Go 1.25. That Origin is
compared with Host only where nothing but this machine's own clients and proxies ask: a proxy may pass another Host.

A page may read answers too where a name of its own host comes to mean 127.0.0.1 (DNS rebinding). The name then stands in Host,
so a server that only this machine reaches, and that asks for no key, or not for all, answers to no name but its own. An
address cannot be bent like that.

All this depends on the head of a request alone: one that is known from before (`known_heads`) is not looked at again.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

_SAFE: Final = frozenset((b"GET", b"HEAD", b"OPTIONS"))
_SAME: Final = (b"same-origin", b"none")  # none: a person has asked, by the address bar, say
_AUTHORITY: Final = re.compile(r"(?:\[(.*)\]|([^:]*))(?::[0-9]*)?")


class Origins:
    """What a listener refuses. See the module."""

    def __init__(self, allowed: Collection[str] = (), own: str | None = None) -> None:
        """allowed: names of hosts whose pages may ask, and under which the server may be asked; "*": under any.

        own: the name, or address, of a server that only this machine reaches, some of it without a key; None: it is another.
        """
        self._allowed = frozenset(name.lower().rstrip(".") for name in allowed)
        self._own = None if own is None else own.lower().rstrip(".")

    def misdirected(self, host: bytes) -> str:
        """Why the server does not answer to this Host; empty: it does."""
        if self._own is None or "*" in self._allowed:
            return ""
        name = _name(host.decode("latin-1"))
        if name in ("", "localhost", self._own) or name.endswith(".localhost") or name in self._allowed or _is_address(name):
            return ""
        return (
            f"Host {name!r} is no name of this server, which is for this machine alone: ask localhost or 127.0.0.1, or add the "
            "name to server.allowed_hosts"
        )

    def foreign(self, method: bytes, headers: Mapping[bytes, bytes]) -> str:
        """Why a request is refused for the page that sent it; empty: it is not."""
        if method in _SAFE:
            return ""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site is None:
            if origin is None or self._own is None or _authority(origin) == headers.get(b"host", b"").lower().decode("latin-1"):
                return ""
        elif site in _SAME:
            return ""
        host = "" if origin is None else _name(_authority(origin))
        if host in self._allowed:
            return ""
        remedy = f"to let its pages ask, add {host} to" if host else "have it come from a host that is named in"
        told = "" if origin is None else f" ({origin.decode('latin-1')})"
        return f"a web page of another origin{told} has sent this: {remedy} server.allowed_hosts"


def _authority(origin: bytes) -> str:
    """Host and port; empty for one that hides them (`null`)."""
    try:
        return urlsplit(origin.decode("latin-1").lower()).netloc
    except ValueError:
        return ""


def _name(authority: str) -> str:
    """Without the port, brackets and the root's dot."""
    found = _AUTHORITY.fullmatch(authority.lower())
    return authority if found is None else (found[1] or found[2] or "").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
