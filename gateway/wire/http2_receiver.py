"""Whom an HTTP/2 stream tells what comes."""

from typing import Final, Protocol


class Receiver(Protocol):
    """What a stream tells its handler."""

    @property
    def unfinished(self) -> int:
        """The number of the message that is here in part and may go on, from 1; 0: none."""

    def take(self, data: bytes, ended: bool) -> None:
        """The body's next bytes, and whether these are its last."""

    def reset(self) -> None:
        """The client went away or took the request back. Nothing comes after it."""

    def drained(self) -> None:
        """More can be sent: what was sent before has left, after it had to wait for the client."""

    def late(self) -> None:
        """Nothing has come for long, or no more than of one message, and the body has not ended."""

    def cut_off(self) -> None:
        """The server ends: answer now."""

    def crowded(self) -> None:
        """There is no memory for more: end, once what is whole has been answered."""


class _Nobody:
    """Receives for streams that are over, so that these and their handlers are freed without the cyclic collector."""

    unfinished = 0

    def take(self, data: bytes, ended: bool) -> None: ...

    def reset(self) -> None: ...

    def drained(self) -> None: ...

    def late(self) -> None: ...

    def cut_off(self) -> None: ...

    def crowded(self) -> None: ...


NOBODY: Final[Receiver] = _Nobody()
