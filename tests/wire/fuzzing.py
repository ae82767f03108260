"""Streams of HTTP/1.1, well-formed, mutated and random, and what must hold whatever they are. Each case comes from its seed."""

import gzip
import re
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Final

from gateway.config import Limits
from gateway.wire.exchange import Exchange
from tests.wire.reading import Told, read
from tests.wire.talking import Kept, connect, give

LIMITS: Final = Limits(body_bytes=20_000, header_bytes=2000, header_count=20, pipelined_requests=4)
DECLARED: Final = {400, 413, 417, 431, 501, 505}  # what a stream may be refused with
_PARTS: Final = (
    b"\r\n", b"\r", b"\n", b"\0", b":", b" ", b"\t", b",", b"\xff", b"1.0", b"-1", b"99999999999999999999",
    b"ffffffffffffffffff\r\n", b"0\r\n\r\n", b"5\r\nabcde\r\n", b"GET /x HTTP/1.1\r\n", b"Host: x\r\n",
    b"Content-Length: 5\r\n", b"Content-Length:\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Content-Encoding: gzip\r\n",
    b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n", b"Connection: close\r\n", b"Connection: keep-alive\r\n",
    b"Expect: 100-continue\r\n",
)  # fmt: skip


def stream(random: Random) -> bytes:
    """Up to five requests behind each other; half of the time with changes of some bytes."""
    data = b"".join(_request(random) for _ in range(random.randint(1, 5)))
    if random.random() < 0.5:
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(data) + 1)
            data = data[:at] + _change(random, data) + data[at + random.choice((0, 0, 1, 2, 20)) :]
    return data


def cut(random: Random, data: bytes) -> list[bytes]:
    """The same bytes in pieces: few, many, or one for each."""
    if random.random() < 0.1:
        return [data[at : at + 1] for at in range(len(data))]
    edges = sorted({0, len(data), *(random.randrange(len(data) + 1) for _ in range(random.choice((1, 3, 30))))})
    return [data[start:end] for start, end in pairwise(edges)]


def check_reading(seed: int) -> None:
    """Bytes in any pieces give the same requests, and the same kind of fault, if any."""
    random = Random(seed)
    data = stream(random)
    whole, pieces = read(data, limits=LIMITS), read(*cut(random, data), limits=LIMITS)
    assert whole.requests == pieces.requests, seed
    assert _kind(whole) == _kind(pieces), (seed, whole.faults, pieces.faults)
    for told in (whole, pieces):
        assert len(told.faults) <= 1, seed
        assert {status for status, _ in told.faults} <= DECLARED, (seed, told.faults)
        assert all(len(request.body) <= LIMITS.body_bytes for request in told.requests), seed


def _kind(told: Told) -> int:
    """A head that is too large and malformed is the one or the other, by what comes first."""
    return min((400 if status == 431 else status for status, _ in told.faults), default=0)


def check_conversation(seed: int) -> None:
    """Whatever comes, and whenever it is answered: in order, once each, bounded; and then nothing is left waiting."""
    random = Random(seed)
    answerer = _Answerer(random)
    connection, outlet = connect(answerer, LIMITS, Kept(at_once=random.random() < 0.5))
    actions: list[Callable[[], None]] = [
        answerer.answer, answerer.answer, answerer.answer, outlet.work_once, lambda: outlet.give_turns(connection),
        connection.pause_writing, connection.resume_writing,
    ]  # fmt: skip
    for piece in cut(random, stream(random)):
        give(connection, piece)
        assert connection.held_bytes <= 2 * LIMITS.body_bytes, seed
        for _ in range(random.randrange(3)):
            random.choice(actions)()
    connection.resume_writing()
    while answerer.open or outlet.work or outlet.called:
        answerer.answer()
        outlet.work_once()
        outlet.give_turns(connection)
    found = [int(number) for number in re.findall(rb"\x01(\d+)\x02", outlet.written)]
    assert found == sorted(set(found)), seed
    assert set(found) <= answerer.answered, seed
    if not (outlet.ended or outlet.closed):
        assert set(found) == answerer.answered, seed
        assert outlet.reading, seed
    assert connection.held_bytes == 0, seed
    assert {int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", outlet.written)} <= {100, 200, *DECLARED}, seed
    connection.lost()


class _Answerer:
    """Answers at once, later, or in pieces. answered: the numbers of those whose answer has a body that is to be seen."""

    def __init__(self, random: Random) -> None:
        self.open: list[tuple[int, Exchange]] = []
        self.answered: set[int] = set()
        self._random = random
        self._asked = 0

    def __call__(self, exchange: Exchange) -> None:
        self._asked += 1
        if self._random.random() < 0.3:
            exchange.begin(200, b"text/plain")
        self.open.append((self._asked, exchange))
        if self._random.random() < 0.3:
            self.answer()

    def answer(self) -> None:
        """Answer one of those that wait, or go on with its answer."""
        if not self.open:
            return
        number, exchange = self.open[at := self._random.randrange(len(self.open))]
        if exchange.pieces is not None and self._random.random() < 0.5:
            exchange.write(b"piece")
            return
        del self.open[at]
        size = self._random.choice((0, 10, 3000))
        compressed = exchange.pieces is None and size == 3000 and exchange.encoding
        if exchange.connection is not None and exchange.method != b"HEAD" and not compressed:
            self.answered.add(number)
        if exchange.pieces is not None:
            exchange.write(b"\x01%d\x02" % number)
            exchange.finish()
        else:
            exchange.respond(200, (b"\x01%d\x02" % number, b"x" * size))


def _request(random: Random) -> bytes:
    body = random.randbytes(random.choice((0, 1, 10, 1000, 6000)))
    method = random.choice((b"GET", b"POST", b"HEAD", b"OPTIONS"))
    version = b"1.0" if random.random() < 0.1 else b"1.1"
    fields = [b"%b /p%%20q?r HTTP/%b" % (method, version), b"Host: t:1"]
    fields += random.choices((b"A: b", b"Accept-Encoding: gzip", b"X:  two  words ", b"Empty:"), k=random.randrange(3))
    fields += [b"Connection: " + random.choice((b"close", b"keep-alive", b"x"))] * (random.random() < 0.1)
    fields += [b"Expect: 100-continue"] * (random.random() < 0.1)
    fields += [b"Connection: Upgrade", b"Upgrade: h2c"] * (random.random() < 0.1)
    if random.random() < 0.2:
        body = gzip.compress(body, 1, mtime=0)
        fields.append(b"Content-Encoding: gzip")
    if random.random() < 0.05:
        fields.append(b"Long: " + b"y" * random.choice((1000, 1900, 2000, 5000)))
    if random.random() < 0.3:
        size = random.randint(1, 1500)
        chunks = (body[at : at + size] for at in range(0, len(body), size))
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        fields.append(b"Transfer-Encoding: chunked")
    elif body:
        fields.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*fields, b"", body])


def _change(random: Random, data: bytes) -> bytes:
    kind = random.randrange(4)
    if kind == 0:
        return random.randbytes(random.randint(1, 8))
    if kind == 1:
        at = random.randrange(len(data) + 1)
        return data[at : at + random.randint(0, 200)]
    return random.choice(_PARTS)
