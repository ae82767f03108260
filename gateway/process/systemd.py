"""What systemd is told by a service of `Type=notify`. Source: sd_notify(3)."""

import os
import socket
from typing import Final

from gateway.process.console import words

READY: Final = "READY=1"
_SOCKET: Final = "NOTIFY_SOCKET"


def tell_systemd(state: str) -> None:
    """Nothing, where it does not ask to be told."""
    address = os.environ.get(_SOCKET, "")
    if not address:
        return
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.connect(name)
            to.send(state.encode())
    except OSError as exc:
        words.warning("%s: %s: systemd was not told %s: %s", _SOCKET, address, state, exc.strerror)
