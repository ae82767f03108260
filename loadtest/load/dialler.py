"""Open connections to one host whose name was looked up before the run."""

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from gateway.process.credentials import NOTHING_SHOWN, Credentials
from loadtest.load.blocking import NotAnswered, in_thread

_BROKEN: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
_NO_FILE: Final = (errno.EMFILE, errno.ENFILE)
_LOOK_UP_AGAIN_S: Final = 1.0

P = TypeVar("P", bound=asyncio.Protocol)


def host_and_port(host: str, port: int) -> str:
    """As a URL has them: an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Exhausted(Exception):
    """This machine, not the target, allows no further connection."""


class Dialler:
    """Where to connect to, and how. Life: look_up once, then dial any number of times.

    Names are looked up in a thread, and starting one waits for the scheduler: in the middle of a run that is send lag. So the
    event loop looks none up: one that does not resolve fails each `dial` at once, and is looked up again once a second.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: bool,
        protocols: Sequence[str] = (),
        timeout_s: float,
        shown: Credentials = NOTHING_SHOWN,
    ) -> None:
        """protocols: for TLS to agree on (ALPN). timeout_s: of one connection, and of the look-up. Raises: ConfigError."""
        self._host = host
        self._port = port
        self._shown = shown
        self._where = f"{'grpc' if 'h2' in protocols else 'http'}s://{host_and_port(host, port)}"
        self._tls = shown.context() if tls else None
        if self._tls is not None and protocols:
            self._tls.set_alpn_protocols(list(protocols))
        self._timeout_s = timeout_s
        self._addresses = [host]
        self._answered = ""  # the address that did last
        self._unknown = ""  # why the name did not resolve
        self._look_up_at_s = 0.0  # not before

    async def look_up(self) -> None:
        """A name that does not resolve is no error yet: `dial` will fail."""
        self._look_up_at_s = time.monotonic() + self._timeout_s + _LOOK_UP_AGAIN_S
        try:
            found = await in_thread(
                socket.getaddrinfo, self._host, self._port, type=socket.SOCK_STREAM, timeout_s=self._timeout_s
            )
        except (OSError, UnicodeError, NotAnswered) as exc:
            self._unknown = f"{self._host} does not resolve: {exc}"
        else:
            self._unknown = ""
            self._addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        self._look_up_at_s = time.monotonic() + _LOOK_UP_AGAIN_S

    def failed(self, exc: BaseException | None) -> str:
        """What TLS failed of, if that is why a connection ended, or was not made; empty too for one that broke."""
        return self._shown.failed(exc, self._where) if isinstance(exc, ssl.SSLError) and not isinstance(exc, _BROKEN) else ""

    async def dial(self, protocol: Callable[[], P]) -> P:
        """Connect to the first address that answers, and begin with that one the next time.

        One that says nothing takes its part of the time alone, so that each address has its turn.

        A connection counts from its return: one whose dialling fails or is cancelled late may have been made, and the event
        loop then closes it without a word to its protocol.
        Raises: OSError (TimeoutError is one), of the last address tried, or of a name without any; Exhausted.
        """
        if self._unknown and time.monotonic() >= self._look_up_at_s:
            await self.look_up()
        if self._unknown:
            raise OSError(self._unknown)
        loop = asyncio.get_running_loop()
        name = self._host if self._tls else None
        until_s = loop.time() + self._timeout_s
        addresses = self._addresses.copy()  # others may sort them meanwhile
        for index, address in enumerate(addresses):
            left = len(addresses) - index
            try:
                async with asyncio.timeout((until_s - loop.time()) / left):
                    _, made = await loop.create_connection(protocol, address, self._port, ssl=self._tls, server_hostname=name)
            except OSError as exc:
                # Of an address that has never answered it may mean that this machine has none of its kind, as of IPv6.
                no_port = exc.errno == errno.EADDRNOTAVAIL and address == self._answered
                if no_port or exc.errno in _NO_FILE:
                    raise Exhausted(f"no further connection can be opened from here: {exc}") from exc
                if left == 1:
                    raise
            else:
                self._answered = address
                self._addresses.sort(key=lambda each, first=address: each != first)  # type: ignore[misc]  # no type for it
                return made
        raise AssertionError("there is always an address")
