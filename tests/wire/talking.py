"""An `Http1Connection` without a socket or a loop: what it writes is kept, what it asks for is noted."""

from collections.abc import Callable
from itertools import pairwise

from gateway.config import Limits
from gateway.wire.compression import Outcome, Work, outcome_of
from gateway.wire.exchange import Handler
from gateway.wire.http1 import Http1Connection
from gateway.wire.memory import Memory
from gateway.wire.tensors import Buffer


class Kept:
    """An outlet. work: what was asked for, where it is not done at once. called: whether another turn is."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.written = bytearray()
        self.unsent = 0
        self.reading = True
        self.ended = False
        self.closed = False
        self.called = False
        self.work: list[Callable[[], None]] = []
        self._at_once = at_once

    def write(self, parts: list[Buffer]) -> None:
        assert not self.ended
        for part in parts:
            self.written += part

    def write_short(self, data: bytes) -> None:
        self.write([data])

    def tell_of_every_byte(self, wanted: bool) -> None: ...

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def may_take_long(self) -> bool:
        return True

    def call_again(self) -> None:
        assert not self.called
        self.called = True

    def give_turns(self, connection: Http1Connection) -> None:
        """All that it asks for."""
        while self.called:
            self.called = False
            connection.go_on()

    def end(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def run(self, work: Work, done: Callable[[Outcome], None]) -> None:
        if self._at_once:
            done(outcome_of(work))
        else:
            self.work.append(lambda: done(outcome_of(work)))

    def work_once(self) -> None:
        """Do the work that was asked for first."""
        if self.work:
            self.work.pop(0)()


def connect(
    handler: Handler, limits: Limits | None = None, outlet: Kept | None = None, memory: Memory | None = None
) -> tuple[Http1Connection, Kept]:
    outlet = outlet or Kept()
    return Http1Connection(handler, limits or Limits(), outlet, memory=memory), outlet


def send(connection: Http1Connection, outlet: Kept, data: bytes) -> None:
    """Give a connection bytes as a socket would: to where it wants them; and all the turns that it asks for."""
    give(connection, data)
    outlet.give_turns(connection)


def give(connection: Http1Connection, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        buffer = connection.reader.buffer
        if buffer is None:
            connection.receive(rest)
            return
        size = min(len(rest), len(buffer))
        buffer[:size] = rest[:size]
        connection.filled(size)
        rest = rest[size:]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]
