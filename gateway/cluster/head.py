"""Whether those processes of Ray live without which nothing can be placed, restarted or ended.

Ray itself waits for its head, by default for a minute, then ends this process; of a raylet that is gone it says nothing. Here
their end is heard of at once: a connection to each is held open for nothing else.
"""

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable
from typing import Final

from gateway.process.supervisor import ENDING

CONNECT_S: Final = 3.0
_RETRY_S: Final = 1.0
_MEANWHILE: Final = "still serving, for as long as Ray waits for it"

log = logging.getLogger(__name__)


class Head:
    """What is known of them.

    left: what this process has put on a cluster may be left there, as Ray does not answer: nothing more is to be asked of it.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """tell: as in `run_on_ray`."""
        self.left = False
        self._tell = tell
        self._gone: dict[str, str] = {}  # where, by name
        self._ending = False
        self._over = threading.Event()

    @property
    def lost(self) -> bool:
        return bool(self._gone) or self.left

    @property
    def may_return(self) -> bool:
        """One is gone, in whose place another may come."""
        return bool(self._gone) and not self._ending

    @property
    def fault(self) -> str:
        gone = [f"Ray's {name} at {address} is gone" for name, address in list(self._gone.items())]
        return " and ".join(gone) or "Ray does not answer"

    def watch(self, name: str, address: str, *, instead: str = "") -> None:
        """Log when it is gone. instead: what is done where no other comes in its place: then end, as by a signal."""
        watching = threading.Thread(target=self._hold_connections, args=(name, address, instead), name=f"watch {name}")
        watching.daemon = True
        watching.start()

    def forget(self) -> None:
        """What ends from now on is meant to."""
        self._over.set()

    def _hold_connections(self, name: str, address: str, instead: str) -> None:
        while not self._over.is_set() and not (instead and self._ending):  # as another watch has told
            connection = _connected(address)
            if connection is not None:
                if self._gone.pop(name, None):
                    log.warning("Ray's %s at %s is back", name, address)
                _wait_closed(connection)  # also by the other side, if it tires of silence
            elif name in self._gone:
                self._over.wait(_RETRY_S)
            elif not self._over.is_set():
                if instead:
                    self._ending = True
                self._gone[name] = address
                log.error("Ray's %s at %s is gone: %s", name, address, instead or _MEANWHILE)
                if instead:
                    self._tell(ENDING)
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _connected(address: str) -> socket.socket | None:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    except OSError:
        return None


def _wait_closed(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may go without a word
        while connection.recv(4096):
            pass
