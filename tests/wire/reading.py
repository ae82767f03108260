"""A `RequestReader` and what it tells of a stream."""

from typing import NamedTuple

from gateway.config import Limits
from gateway.wire.known_heads import KnownHeads
from gateway.wire.requests import RequestReader
from gateway.wire.tensors import Buffer


class Request(NamedTuple):
    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool


class Told:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[tuple[int, str]] = []
        self.continues = 0

    def arrived(
        self, method: bytes, target: bytes, headers: dict[bytes, bytes], body: Buffer, keep_alive: bool, http_1_0: bool
    ) -> None:
        assert not self.faults
        self.requests.append(Request(method, target, headers, bytes(body), keep_alive))

    def continue_expected(self) -> None:
        self.continues += 1

    def may_hold(self, body_bytes: int) -> bool:
        return True

    def refused(self, status: int, message: str, headers: dict[bytes, bytes]) -> None:
        self.faults.append((status, message))


def read(*reads: bytes, limits: Limits | None = None, heads: KnownHeads | None = None) -> Told:
    """Have a new reader read these, one after the other, as a socket would give them."""
    told = Told()
    reader = RequestReader(told, limits or Limits(), heads)
    for data in reads:
        rest = memoryview(data)
        while rest:
            if reader.buffer is None:
                rest = rest[reader.feed(rest) :]
                continue
            size = min(len(rest), len(reader.buffer))
            reader.buffer[:size] = rest[:size]
            reader.filled(size)
            rest = rest[size:]
    return told
