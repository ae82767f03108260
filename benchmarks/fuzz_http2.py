"""Conversations with slips in them, told to an HTTP/2 connection: nothing is raised, nothing grows, cuts change nothing.

    python -m benchmarks.fuzz_http2 --cases 100000

Each case is a client's side of a connection: requests, bodies, windows and settings, some of them nonsense, some bytes of it
changed. It is handed in whole and in random pieces. What handlers were told and what was answered must be the same both times,
unless an answer had to wait: it leaves at the end of a read, and a client may have taken its window or request back by then.
Memory must stay flat: exit status 1 if it grows by more than 10 MB in the second half of the cases.
"""

import itertools
import random
import sys
from dataclasses import dataclass, field, replace

from benchmarks.fuzzing import fuzz
from gateway.config import Limits
from gateway.wire.http2 import FRAME_BYTES
from gateway.wire.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MOST_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    WORD,
    frame,
    window_update,
)
from gateway.wire.http2_headers import Headers, header_block
from gateway.wire.http2_sending import Stream
from gateway.wire.http2_server import MOST_STREAMS, ServerConnection

NARROW = Limits(header_bytes=512, body_bytes=2000)  # where bounds are met soon
_BLOCKS = (
    header_block((b":method", b"POST"), (b":path", b"/a")),
    b"\x83\x86\x44\x02/b\x40\x01x\x01y",  # enters the table
    b"\xbe\x83",  # its newest entry
    b"\x20\x83",  # a table of no size
    header_block((b"x", b"y" * 600)),
    b"\xff\xff\xff",  # is none
)
_HEAD = header_block(status=200)
_TAIL = header_block((b"grpc-status", b"0"))


@dataclass
class Told:
    """What the handler of one stream was told."""

    headers: Headers
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: bool = False


@dataclass
class Outcome:
    """told, bodies: by stream. end: the code of the GOAWAY, and how the connection stands. waited: some answer had to."""

    told: dict[int, Told] = field(default_factory=dict)
    bodies: dict[int, bytearray] = field(default_factory=dict)
    end: tuple[int | None, bool, bool] = (None, False, False)
    waited: bool = False


class _Echo:
    """Answers a body with itself, in two parts."""

    def __init__(self, stream: Stream, told: Told, found: Outcome) -> None:
        self._stream = stream
        self._told = told
        self._found = found

    def take(self, data: bytes, ended: bool) -> None:
        told, stream = self._told, self._stream
        assert not told.ended
        assert not told.reset
        told.body += data
        told.ended = ended
        if ended:
            stream.send_headers(_HEAD)
            stream.send_data(bytes(told.body))
            if not told.reset:
                stream.send_data(bytes(told.body[:10]))
            self._found.waited |= stream.unsent > 0 or told.reset
            if not told.reset:
                stream.finish(_TAIL)

    def reset(self) -> None:
        assert not self._told.reset
        self._told.reset = True

    def drained(self) -> None: ...

    def late(self) -> None: ...

    def cut_off(self) -> None: ...

    def crowded(self) -> None: ...


def conversation(rng: random.Random, *, wide: bool) -> bytes:
    """What one client sends. wide: with windows that all answers fit into."""
    window = SETTING.pack(INITIAL_WINDOW_SIZE, 1 << 30) if wide else b""
    out = bytearray(PREFACE + frame(SETTINGS, 0, 0, window) + window_update(0, 1 << 30 if wide else 10))
    opening = len(out)
    number = 1
    for _ in range(rng.randint(1, 15)):
        out += _frames(rng, number)
        number += rng.choice((0, 0, 2, 2, 2, 4))
    for _ in range(rng.choice((0, 0, 0, 1, 1, 5))):
        out[rng.randrange(opening if wide else len(PREFACE), len(out))] = rng.randrange(256)
    if rng.random() < 0.1:
        del out[rng.randrange(len(out)) :]
    return bytes(out)


def _frames(rng: random.Random, number: int) -> bytes:
    kind = rng.choice((DATA, DATA, HEADERS, HEADERS, HEADERS, HEADERS, WINDOW_UPDATE, SETTINGS, RST_STREAM, PING, -1))
    old = max(1, number - rng.choice((0, 0, 2, 4)))
    if kind == DATA:
        return frame(DATA, rng.choice((0, END_STREAM, END_STREAM, PADDED)), old, rng.randbytes(rng.choice((0, 1, 30, 500))))
    if kind == HEADERS:
        return _request(rng, number)
    if kind == WINDOW_UPDATE:
        return frame(WINDOW_UPDATE, 0, rng.choice((0, old)), WORD.pack(rng.choice((1, 7, 1000, 1000, MOST_WINDOW, 0))))
    if kind == SETTINGS:
        settings = ((1, rng.choice((0, 100, 4096))), (4, rng.choice((0, 1, 50, 70_000, 1 << 31))), (5, 20_000), (2, 0), (9, 9))
        chosen = rng.choices(settings, k=rng.randint(0, 3))
        return frame(SETTINGS, rng.choice((0, 0, 0, 1)), 0, b"".join(SETTING.pack(*each) for each in chosen))
    if kind == RST_STREAM:
        return frame(RST_STREAM, 0, old, WORD.pack(8))
    if kind == PING:
        return frame(PING, rng.choice((0, 1)), 0, bytes(8))
    noise = rng.choice((PRIORITY, GOAWAY, CONTINUATION, 77, rng.randrange(256)))
    return frame(noise, rng.randrange(256), rng.choice((0, old, number + 100)), rng.randbytes(rng.choice((0, 4, 5, 8, 100))))


def _request(rng: random.Random, number: int) -> bytes:
    block = rng.choice(_BLOCKS[: 1 + rng.randrange(len(_BLOCKS))])
    end = rng.choice((0, 0, END_STREAM))
    body = frame(DATA, END_STREAM, number, rng.randbytes(rng.choice((0, 5, 200)))) if not end and rng.random() < 0.7 else b""
    if rng.random() < 0.8:
        return frame(HEADERS, END_HEADERS | end, number, block) + body
    if rng.random() < 0.5:
        return frame(HEADERS, END_HEADERS | end | PADDED | WITH_PRIORITY, number, b"\x01" + bytes(5) + block + b"\0") + body
    at = rng.randrange(len(block) + 1)
    return frame(HEADERS, end, number, block[:at]) + frame(CONTINUATION, END_HEADERS, number, block[at:]) + body


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """The same bytes in pieces."""
    edges = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.choice((1, 3, 20))))})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def outcome(pieces: list[bytes], limits: Limits) -> Outcome:
    """What comes of a conversation. Raises: AssertionError, if more is held than may be."""
    found = Outcome()

    def begin(stream: Stream) -> None:
        told = found.told[stream.number] = Told(dict(stream.headers))
        stream.receiver = _Echo(stream, told, found)

    connection = ServerConnection(limits, begin, lambda: None, lambda: 0.0)
    sent = bytearray()
    for piece in pieces:
        connection.receive(piece)
        while connection.more:
            connection.receive(b"")
        sent += b"".join(connection.take())
        while connection.ready and connection.send_window > 0:
            connection.send_on()
            sent += b"".join(connection.take())
        check_held(connection, limits)
    code = None
    at = 0
    while at < len(sent):
        end = at + 9 + int.from_bytes(sent[at : at + 3])
        kind, number, payload = sent[at + 3], int.from_bytes(sent[at + 5 : at + 9]), sent[at + 9 : end]
        if kind == GOAWAY:
            code = int.from_bytes(payload[4:8])
        elif kind == DATA:
            found.bodies.setdefault(number, bytearray()).extend(payload)
        at = end
    found.end = (code, connection.closing, connection.aborted)
    found.told = {number: replace(told) for number, told in found.told.items()}  # as it is before the end
    connection.lost()
    return found


def check_held(connection: ServerConnection, limits: Limits) -> None:
    """Raises: AssertionError."""
    message = limits.body_bytes + FRAME_BYTES
    assert len(connection._streams) <= MOST_STREAMS
    assert connection.unsent == sum(stream.unsent for stream in connection._streams.values())
    assert connection.unsent <= connection.most_unsent
    assert len(connection._rest) <= 9 + FRAME_BYTES
    assert len(connection._block or b"") <= 4 * limits.header_bytes
    assert set(connection._blocked) | set(connection.ready) | set(connection._delayed) <= set(connection._streams.values())
    if connection.closing:
        return
    held = sum(connection._receive_window - stream.receive_window for stream in connection._streams.values())
    assert 0 <= held <= 2 * message
    assert held + connection._released + connection._receive_left == 2 * message


def check(rng: random.Random) -> None:
    """One case. Raises: AssertionError, or what the connection raised."""
    data = conversation(rng, wide=False)
    outcome([data], NARROW)
    outcome(cut(rng, data), NARROW)
    data = conversation(rng, wide=True)
    whole, pieces = outcome([data], Limits()), outcome(cut(rng, data), Limits())
    if whole.waited or pieces.waited:
        return
    assert whole.told == pieces.told
    assert whole.end == pieces.end
    assert whole.bodies == pieces.bodies


if __name__ == "__main__":
    sys.exit(fuzz(str(__doc__), lambda seed: check(random.Random(seed))))
