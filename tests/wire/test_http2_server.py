"""The server's side of HTTP/2, bytes in and bytes out: no sockets, no loop, and time passes when a test says so."""

import itertools
import struct
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Limits
from gateway.errors import GatewayError, Overloaded
from gateway.wire.http2_frames import PREFACE, frame_head
from gateway.wire.http2_headers import header_block
from gateway.wire.http2_sending import Stream
from gateway.wire.http2_server import ServerConnection

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/echo"),
    (":authority", "x"),
    ("content-type", "application/grpc"),
]


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class Echo:
    """Answers a body with itself."""

    def __init__(self, stream: Stream, resets: list[Stream], told_late: list[Stream]) -> None:
        self.stream = stream
        self.resets = resets
        self.told_late = told_late
        self.body = b""
        self.unfinished = 0

    def take(self, data: bytes, ended: bool) -> None:
        self.body += data
        if ended:
            self.stream.send_headers(header_block((b"x-path", self.stream.headers[b":path"]), status=200))
            self.stream.send_data(self.body)
            self.stream.finish(header_block((b"grpc-status", b"0")))

    def reset(self) -> None:
        self.resets.append(self.stream)

    def drained(self) -> None: ...

    def late(self) -> None:
        self.told_late.append(self.stream)

    def cut_off(self) -> None: ...

    def crowded(self) -> None: ...


class Keeping(Echo):
    """Answers nothing."""

    def take(self, data: bytes, ended: bool) -> None: ...


class Peer:
    """A client of a connection whose handler answers each body with itself. now: the time; it passes where a test says so."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 0.0
        self.streams: list[Stream] = []
        self.resets: list[Stream] = []
        self.late: list[Stream] = []
        self.refused: list[tuple[int, type[GatewayError]]] = []  # by the connection itself
        self.refused_ids: list[str] = []
        self.connection = ServerConnection(
            limits or Limits(), self._echo, lambda: None, lambda: self.now,
            on_fault=self._refused,
        )  # fmt: skip
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()

    def _echo(self, stream: Stream) -> None:
        self.streams.append(stream)
        stream.receiver = Echo(stream, self.resets, self.late)

    def _refused(self, stream: Stream, error: GatewayError) -> None:
        self.refused.append((stream.number, type(error)))
        self.refused_ids.append(stream.headers.get(b"x-request-id", b"").decode())

    @property
    def over(self) -> bool:
        return self.connection.closing or self.connection.aborted

    def send(self, *frames: bytes, preface: bytes = b"") -> None:
        self.connection.receive(preface + b"".join(frames))
        while self.connection.more:
            self.connection.receive(b"")

    def passes(self, seconds: float) -> None:
        """Time does; what becomes due is told."""
        until = self.now + seconds
        while self.connection.next_due <= until:
            self.now = max(self.now, self.connection.next_due)
            self.connection.expire()
        self.now = until

    def received(self) -> list[Frame]:
        """Every frame since the last call."""
        data = b"".join(self.connection.take())
        frames = []
        while data:
            length = int.from_bytes(data[:3])
            frames.append(Frame(data[3], data[4], int.from_bytes(data[5:9]), data[9 : 9 + length]))
            data = data[9 + length :]
        return frames

    def headers(self, stream: int, *, end: bool = False, fields: list[tuple[str, str]] = FIELDS) -> bytes:
        block = self.encoder.encode(fields)
        return frame_head(len(block), HEADERS, END_HEADERS | (END_STREAM if end else 0), stream) + block

    def fields(self, frame: Frame) -> dict[str, str]:
        return dict(self.decoder.decode(frame.payload))  # type: ignore[arg-type]


def data(stream: int, payload: bytes = b"", *, end: bool = False, flags: int = 0) -> bytes:
    return frame_head(len(payload), DATA, flags | (END_STREAM if end else 0), stream) + payload


def frame(kind: int, stream: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    return frame_head(len(payload), kind, flags, stream) + payload


def word(number: int) -> bytes:
    return struct.pack(">I", number)


def open_peer(limits: Limits | None = None) -> Peer:
    """Past the preface and the settings."""
    peer = Peer(limits)
    peer.send(frame(SETTINGS), preface=PREFACE)
    assert [each.kind for each in peer.received()] == [SETTINGS, WINDOW_UPDATE, SETTINGS]
    return peer


def body_of(frames: list[Frame], stream: int = 1) -> bytes:
    return b"".join(each.payload for each in frames if each.kind == DATA and each.stream == stream)


def windows(frames: list[Frame]) -> int:
    """What the client may send more, of the connection."""
    return sum(int.from_bytes(each.payload) for each in frames if each.kind == WINDOW_UPDATE and each.stream == 0)


def goaway_code(frames: list[Frame]) -> int:
    (last,) = [each for each in frames if each.kind == GOAWAY]
    return int.from_bytes(last.payload[4:8])


def test_a_request_is_answered() -> None:
    peer = open_peer()
    peer.send(peer.headers(1), data(1, b"hello", end=True))
    head, body, tail = peer.received()
    assert (head.kind, head.stream, head.flags) == (HEADERS, 1, END_HEADERS)
    assert peer.fields(head) == {":status": "200", "x-path": "/echo"}
    assert body == Frame(DATA, 0, 1, b"hello")
    assert tail.flags == END_HEADERS | END_STREAM
    assert peer.fields(tail) == {"grpc-status": "0"}


def test_equal_header_blocks_mean_what_the_table_says_at_the_time() -> None:
    peer = open_peer()
    seen = []
    for number, path in ((1, "/a"), (3, "/a"), (5, "/a"), (7, "/b"), (9, "/b"), (11, "/a")):
        peer.send(peer.headers(number, end=True, fields=[(":method", "POST"), (":path", path)]))
        seen.append(peer.streams[-1].headers[b":path"])
    assert seen == [b"/a", b"/a", b"/a", b"/b", b"/b", b"/a"]


def test_a_block_that_was_cached_is_decoded_again_after_the_table_changed() -> None:
    peer = open_peer()
    first = b"\x40\x01a\x01x"  # literal that enters the table as entry 62
    peer.send(frame(HEADERS, 1, first, END_HEADERS), frame(HEADERS, 3, b"\xbe", END_HEADERS))
    peer.send(frame(HEADERS, 5, b"\x40\x01b\x01y", END_HEADERS), frame(HEADERS, 7, b"\xbe", END_HEADERS))
    assert [stream.headers for stream in peer.streams[1:]] == [{b"a": b"x"}, {b"b": b"y"}, {b"b": b"y"}]


def test_a_header_block_in_pieces_is_put_together() -> None:
    peer = open_peer()
    block = peer.encoder.encode(FIELDS)
    peer.send(
        frame(HEADERS, 1, block[:3], END_STREAM),
        frame(CONTINUATION, 1, block[3:7]),
        frame(CONTINUATION, 1, block[7:], END_HEADERS),
    )
    assert peer.fields((peer.received())[0])["x-path"] == "/echo"


def test_padding_and_priority_are_left_out() -> None:
    peer = open_peer()
    block = peer.encoder.encode(FIELDS)
    padded = b"\x02" + word(0) + b"\x10" + block + b"\0\0"
    peer.send(
        frame(HEADERS, 1, padded, END_HEADERS | PADDED | WITH_PRIORITY), data(1, b"\x03abc\0\0\0", end=True, flags=PADDED)
    )
    assert body_of(peer.received()) == b"abc"


def test_padding_is_given_back_to_the_windows_at_once() -> None:
    """Nobody holds it: a stream that goes on for long would come to a stand by it."""
    peer = open_peer(Limits(body_bytes=1000))
    peer.send(peer.headers(1))
    padded = data(1, b"\xffa" + bytes(255), flags=PADDED)
    peer.send(*[padded] * 1000)
    assert not peer.over
    frames = peer.received()
    own = sum(int.from_bytes(each.payload) for each in frames if each.kind == WINDOW_UPDATE and each.stream == 1)
    assert own == 256 * 1000
    assert windows(frames) > 220_000
    peer.send(data(1, b"\x01b\0", end=True, flags=PADDED))
    frames = peer.received()
    assert body_of(frames) == b"a" * 1000 + b"b"
    assert not [each for each in frames if each.kind == WINDOW_UPDATE and each.stream == 1]  # nothing more may come


def test_trailers_of_a_client_end_its_body() -> None:
    peer = open_peer()
    peer.send(peer.headers(1), data(1, b"abc"), peer.headers(1, end=True, fields=[("x", "y")]))
    assert body_of(peer.received()) == b"abc"
    peer.send(peer.headers(3), peer.headers(1, end=True, fields=[("x", "y")]))  # of a stream that is answered
    assert not peer.over


def test_an_answer_waits_for_the_windows_of_stream_and_connection() -> None:
    peer = open_peer()
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 10)))
    peer.send(peer.headers(1), data(1, bytes(50_000)), data(1, bytes(50_000), end=True))
    assert len(body_of(peer.received())) == 10
    peer.send(frame(WINDOW_UPDATE, 1, word(1_000_000)))
    assert len(body_of(peer.received())) == 65_525  # 65 535 of the connection, less 10
    peer.send(frame(WINDOW_UPDATE, 0, word(1_000_000)))
    frames = peer.received()
    assert len(body_of(frames)) == 100_000 - 65_535
    assert frames[-1].kind == HEADERS
    assert frames[-1].flags & END_STREAM
    assert max(len(each.payload) for each in frames) <= 16_384


def test_a_smaller_initial_window_counts_for_open_streams() -> None:
    peer = open_peer()
    peer.send(peer.headers(1))
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 10)), data(1, bytes(50), end=True))
    assert len(body_of(peer.received())) == 10
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 60)))
    assert len(body_of(peer.received())) == 40


def test_a_stream_whose_client_takes_nothing_of_its_answer_is_reset_alone() -> None:
    peer = open_peer(Limits(body_timeout_s=60))
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 10)))
    peer.send(peer.headers(1), data(1, bytes(50), end=True), peer.headers(3), data(3, bytes(50), end=True))
    peer.passes(59)
    peer.send(frame(WINDOW_UPDATE, 3, word(100)))
    frames = peer.received()
    assert (len(body_of(frames, 1)), len(body_of(frames, 3))) == (10, 50)
    peer.send(peer.headers(5))  # a client that takes its time with a question is another matter
    peer.passes(2)
    assert peer.resets == [peer.streams[0]]
    assert peer.received() == [Frame(RST_STREAM, 0, 1, word(8))]
    peer.send(data(5, bytes(5), end=True), frame(WINDOW_UPDATE, 1, word(100)))
    assert len(body_of(peer.received(), 5)) == 5


def test_a_message_that_drips_in_is_late_and_several_messages_are_not() -> None:
    peer = open_peer(Limits(body_timeout_s=60, idle_timeout_s=600))
    peer.send(peer.headers(1), data(1, b"a"), peer.headers(3), data(3, b"a"))
    dripping, speaking = (stream.receiver for stream in peer.streams)
    assert isinstance(dripping, Echo)
    assert isinstance(speaking, Echo)
    dripping.unfinished = 1
    for second in range(119):
        speaking.unfinished = 1 + second // 50
        peer.passes(1)
        peer.send(data(1, b"a"), data(3, b"a"))
    assert peer.late == []
    peer.passes(2)
    assert peer.late == [peer.streams[0]]


def test_a_message_whose_connection_may_not_send_on_is_not_late() -> None:
    peer = open_peer(Limits(body_timeout_s=60, idle_timeout_s=600, body_bytes=1 << 20))
    peer.send(peer.headers(1), data(1, b"a"), peer.headers(3), peer.headers(5))
    dripping = peer.streams[0].receiver
    assert isinstance(dripping, Echo)
    dripping.unfinished = 1
    peer.passes(61)
    for stream, frames in zip(peer.streams[1:], (17, 16), strict=True):  # of 34 in the window of the connection
        stream.receiver = Keeping(stream, peer.resets, peer.late)
        peer.send(*[data(stream.number, bytes(65536))] * frames, data(stream.number, end=True))
    for stream in peer.streams[1:]:  # their model has taken them
        stream.credit(16 * 65536)
    peer.passes(60)
    assert peer.late == []
    peer.passes(60)
    assert peer.late == [peer.streams[0]]


def test_a_client_that_takes_its_answer_bit_by_bit_gets_it() -> None:
    peer = open_peer(Limits(body_timeout_s=60))
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 10)))
    peer.send(peer.headers(1), data(1, bytes(40), end=True))
    for _ in range(3):
        peer.passes(59)
        peer.send(frame(WINDOW_UPDATE, 1, word(10)))
    peer.passes(120)
    assert len(body_of(peer.received())) == 40
    assert not peer.resets


@pytest.mark.parametrize("size", [0, 1, 1024, 4095])
def test_the_first_block_after_a_smaller_header_table_says_that_it_fits(size: int) -> None:
    peer = open_peer()
    peer.send(peer.headers(1), data(1, b"a", end=True))
    assert not peer.received()[0].payload.startswith(b"\x20")
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x1, size) * 2), peer.headers(3), data(3, b"b", end=True))
    peer.decoder.max_allowed_table_size = size
    _, head, _, tail = peer.received()
    assert head.payload.startswith(b"\x20")
    assert not tail.payload.startswith(b"\x20")
    assert peer.fields(head)[":status"] == "200"  # a decoder that insists on it reads on
    assert peer.fields(tail) == {"grpc-status": "0"}


def test_a_header_table_of_the_usual_size_or_more_changes_nothing() -> None:
    peer = open_peer()
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x1, 4096) + struct.pack(">HI", 0x1, 65536)), peer.headers(1, end=True))
    assert peer.fields(peer.received()[1]) == {":status": "200", "x-path": "/echo"}


# What one client may hold, or have done


def test_bodies_of_open_requests_hold_as_much_as_the_window_of_the_connection() -> None:
    peer = Peer(Limits(body_bytes=1 << 20))
    peer.send(frame(SETTINGS), preface=PREFACE)
    window = 65_535 + windows(peer.received())
    assert window == 2 * ((1 << 20) + 65_536)
    peer.connection._on_stream = lambda stream: None  # nobody answers
    peer.send(*(peer.headers(1 + 2 * i) for i in range(4)), data(1, b"x", end=True))
    for number in range(32):
        peer.send(data(3 + 2 * (number % 3), bytes(65_536)))
    assert windows(peer.received()) == 0
    peer.send(*[data(3, bytes(30_000))] * 5)
    assert goaway_code(peer.received()) == 3


def test_the_window_of_the_connection_opens_when_requests_are_answered() -> None:
    peer = open_peer(Limits(body_bytes=100_000))
    left = most = 2 * (100_000 + 65_536)
    for number in range(1, 400, 2):
        peer.send(peer.headers(number), data(number, bytes(50_000)), data(number, bytes(50_000), end=True))
        peer.send(frame(WINDOW_UPDATE, 0, word(100_000)), frame(WINDOW_UPDATE, number, word(100_000)))
        frames = peer.received()
        left += windows(frames) - 100_000
        assert len(body_of(frames, number)) == 100_000
        assert 100_000 < left <= most


def test_requests_that_fill_the_window_and_do_not_end_make_room_for_each_other() -> None:
    peer = open_peer(Limits(body_bytes=100_000))
    for number in (1, 3, 5):
        peer.send(peer.headers(number), data(number, bytes(60_000)))
    peer.send(data(1, bytes(60_000)), data(3, bytes(60_000)))
    assert Frame(RST_STREAM, 0, 5, word(0xB)) in peer.received()
    assert peer.resets == [peer.streams[2]]
    assert peer.refused == [(5, Overloaded)]
    peer.send(data(1, b"", end=True), frame(WINDOW_UPDATE, 1, word(120_000)), frame(WINDOW_UPDATE, 0, word(120_000)))
    assert len(body_of(peer.received())) == 120_000


def test_what_waits_for_a_client_that_takes_nothing_is_bounded() -> None:
    peer = open_peer(Limits(body_bytes=1 << 20))
    most = 2 * ((1 << 20) + 65_536)
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 0)))
    peer.connection._on_stream = peer.streams.append
    peer.send(*(peer.headers(1 + 2 * i, end=True) for i in range(100)))
    for stream in peer.streams:
        stream.send_data(bytes(100_000))
    assert most - 100_000 < peer.connection.unsent <= most
    resets = [each for each in peer.received() if each.kind == RST_STREAM]
    assert len(resets) == 100 - most // 100_000
    assert {each.payload for each in resets} == {word(0xB)}


def test_a_connection_holds_what_is_said_and_no_more() -> None:
    """docs/protocol.md: two messages of bodies, two of answers, and the headers of its open requests."""
    limits = Limits(body_bytes=1 << 20, header_bytes=4096)
    said = 4 * (limits.body_bytes + 65_536) + 1024 * limits.header_bytes
    peer = open_peer(limits)
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 0)))
    tracemalloc.start()
    left = 2 * (limits.body_bytes + 65_536)
    for number in range(1, 2049, 2):
        block = header_block((b":method", b"POST"), (b":path", b"/echo"), (b"x", b"%d" % number * 800))
        peer.send(frame(HEADERS, number, block, END_HEADERS))
        for end in (False, True):
            if left > 4000:
                peer.send(data(number, bytes(4000), end=end))
                left += windows(peer.received()) - 4000
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not peer.over
    assert said / 3 < held < said * 1.3


def test_what_messages_inflate_to_is_reserved_and_who_asks_for_too_much_waits_for_its_turn() -> None:
    peer = open_peer(Limits(body_bytes=1_000_000))
    peer.send(*(peer.headers(1 + 2 * i) for i in range(5)))
    again: list[int] = []

    def reserve(i: int, size: int) -> bool:
        return peer.streams[i].reserve(size, lambda: again.append(i))

    assert reserve(0, 1_500_000)
    assert not reserve(1, 1_000_000)
    assert not reserve(2, 1_000_000)
    assert reserve(3, 10)
    peer.streams[0].give_back(100)
    assert again == []
    peer.send(frame(RST_STREAM, 3, word(8)), frame(RST_STREAM, 1, word(8)))
    assert again == [2]
    assert reserve(2, 1_000_000)
    peer.streams[2].give_back(2_000_000)
    assert reserve(4, 10_000_000) is False
    peer.streams[3].reset(8)
    assert again == [2, 4]
    assert reserve(4, 10_000_000)  # the only one


def test_one_answer_may_be_as_long_as_it_is() -> None:
    peer = open_peer(Limits(body_bytes=1000))
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 0)))
    peer.connection._on_stream = peer.streams.append
    peer.send(peer.headers(1, end=True))
    peer.streams[0].send_data(bytes(10_000_000))
    assert peer.connection.unsent == 10_000_000
    assert peer.received()[-1].kind == SETTINGS


def test_requests_wait_while_much_of_the_answers_before_does() -> None:
    peer = open_peer(Limits(body_bytes=1 << 20))
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 0)))
    for number in (1, 3, 5, 7):
        peer.send(peer.headers(number), *([data(number, bytes(50_000))] * 4), data(number, b"", end=True))
    peer.send(peer.headers(9), frame(RST_STREAM, 9, word(8)))
    assert [stream.number for stream in peer.streams] == [1, 3]
    answers = []
    for number in (1, 3, 5, 7):
        peer.send(frame(WINDOW_UPDATE, 0, word(1 << 20)), frame(WINDOW_UPDATE, number, word(200_000)))
        answers += peer.received()
    assert [stream.number for stream in peer.streams] == [1, 3, 5, 7]
    assert [len(body_of(answers, number)) for number in (1, 3, 5, 7)] == [200_000] * 4
    assert peer.connection.unsent == 0


def test_requests_that_wait_are_begun_when_the_server_ends() -> None:
    peer = open_peer(Limits(body_bytes=1000))
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 0)))
    peer.send(peer.headers(1), data(1, bytes(60_000)), data(1, b"", end=True), peer.headers(3))
    assert len(peer.streams) == 1
    peer.connection.cut_off()
    assert len(peer.streams) == 2


def test_answers_are_given_to_the_transport_bit_by_bit() -> None:
    peer = open_peer()
    peer.send(frame(WINDOW_UPDATE, 0, word(1 << 30)), frame(SETTINGS, 0, struct.pack(">HI", 0x4, 1 << 30)))
    peer.connection._on_stream = peer.streams.append
    peer.send(*(peer.headers(1 + 2 * i, end=True) for i in range(100)))
    for stream in peer.streams:
        stream.send_data(bytes(100_000))
    taken = len(body_of(peer.received(), 1))
    assert taken == 100_000
    peer.connection.pause()
    peer.connection.send_on()
    assert peer.received() == []
    peer.connection.resume()
    while peer.connection.unsent or peer.connection.out:
        size = sum(len(each.payload) for each in peer.received() if each.kind == DATA)
        assert size <= 4 << 20
        peer.connection.send_on()


@pytest.mark.parametrize("kind", ["ping", "data", "window", "settings", "priority"])
def test_much_that_comes_at_once_is_handled_in_turns(kind: str) -> None:
    peer = open_peer()
    peer.send(peer.headers(1))
    one = {
        "ping": frame(PING, 0, bytes(8)),
        "data": data(1),
        "window": frame(WINDOW_UPDATE, 0, word(1)),
        "settings": frame(SETTINGS),
        "priority": frame(PRIORITY, 1, bytes(5)),
    }[kind]
    peer.connection.receive(one * 1000)
    turns = 1
    while peer.connection.more:
        peer.connection.receive(b"")
        turns += 1
    assert turns == 8
    assert not peer.over


def test_long_settings_take_more_of_a_turn() -> None:
    peer = open_peer()
    peer.connection.receive(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 0) * 10_000) * 3)
    assert [each.kind for each in peer.received()] == [SETTINGS]
    assert peer.connection.more


def test_header_blocks_that_are_new_take_more_of_a_turn() -> None:
    peer = open_peer()
    peer.connection.receive(b"".join(peer.headers(1 + 2 * i, fields=[*FIELDS, ("x", str(i) * 3000)]) for i in range(20)))
    assert len(peer.streams) < 10
    while peer.connection.more:
        peer.connection.receive(b"")
    assert len(peer.streams) == 20


def test_a_request_that_takes_long_ends_the_turn() -> None:
    begun: list[Stream] = []

    def begin(stream: Stream) -> None:
        begun.append(stream)
        stream.end_turn()

    connection = ServerConnection(Limits(), begin, lambda: None, lambda: 0.0)
    encoder = hpack.Encoder()
    block = [encoder.encode(FIELDS) for _ in range(100)]
    connection.receive(PREFACE + frame(SETTINGS))
    connection.receive(b"".join(frame(HEADERS, 2 * at + 1, block[at], END_HEADERS | END_STREAM) for at in range(100)))
    for number in range(1, 101):
        assert len(begun) == number
        assert connection.more == (number < 100)
        connection.receive(b"")


def test_what_waits_for_windows_is_looked_at_once_a_read() -> None:
    """Counted, not timed."""
    peer = open_peer()
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 0)))
    peer.send(*(peer.headers(1 + 2 * i) + data(1 + 2 * i, b"xy", end=True) for i in range(1000)))
    looks = 0

    def counting(connection: ServerConnection) -> Callable[..., None]:
        blocked = connection.blocked

        def count(stream: Stream, *, moved: bool, by_itself: bool) -> None:
            nonlocal looks
            looks += 1
            blocked(stream, moved=moved, by_itself=by_itself)

        return count

    peer.connection.blocked = counting(peer.connection)  # type: ignore[method-assign]
    peer.send(frame(SETTINGS, 0, struct.pack(">HI", 0x4, 0) * 10_000))
    assert looks == 1000
    peer.send(*[frame(WINDOW_UPDATE, 0, word(1))] * 100)
    assert looks == 1000
    peer.send(*[frame(WINDOW_UPDATE, 1, word(1))] * 2)
    assert looks == 1000
    assert peer.connection.unsent == 1998


def test_requests_taken_back_as_they_come_end_the_connection_in_the_end() -> None:
    peer = open_peer()
    for number in range(1, 2000, 2):
        peer.send(peer.headers(number), frame(RST_STREAM, number, word(8)))
    assert not peer.over
    peer.send(peer.headers(2001), frame(RST_STREAM, 2001, word(8)))
    assert goaway_code(peer.received()) == 0xB


def test_requests_taken_back_later_or_among_others_do_not() -> None:
    peer = open_peer()
    for number in range(1, 5000, 2):
        peer.send(peer.headers(number))
        peer.send(frame(RST_STREAM, number, word(8)))
    for number in range(5001, 10_000, 4):
        peer.send(peer.headers(number), frame(RST_STREAM, number, word(8)), peer.headers(number + 2, end=True))
    assert not peer.over


def test_a_connection_without_requests_is_closed_after_a_word() -> None:
    peer = open_peer(Limits(idle_timeout_s=120, body_timeout_s=60))
    peer.passes(100)
    peer.send(peer.headers(1, end=True))
    peer.received()
    peer.passes(119)
    assert peer.received() == []
    peer.passes(100)
    first, last = peer.received()
    assert (goaway_code([first]), int.from_bytes(first.payload[:4])) == (0, (1 << 31) - 1)
    assert (goaway_code([last]), int.from_bytes(last.payload[:4])) == (0, 1)
    assert peer.over


def test_a_request_that_crosses_that_word_is_answered() -> None:
    peer = open_peer(Limits(idle_timeout_s=120, body_timeout_s=60))
    while not peer.received():
        peer.passes(0.5)
    peer.send(peer.headers(1))
    peer.passes(2)
    assert not peer.over
    peer.send(data(1, b"x", end=True))
    assert body_of(peer.received()) == b"x"
    assert peer.over


def test_a_connection_that_is_to_be_left_takes_what_crosses_that_word_and_ends_after_its_answers() -> None:
    peer = open_peer()
    peer.send(peer.headers(1))
    peer.connection.leave()
    peer.connection.leave()  # which says nothing new
    (first,) = peer.received()
    assert (goaway_code([first]), int.from_bytes(first.payload[:4])) == (0, (1 << 31) - 1)
    peer.send(peer.headers(3), data(3, b"crossed", end=True))
    assert body_of(peer.received(), 3) == b"crossed"
    peer.passes(1.1)
    (last,) = peer.received()
    assert (goaway_code([last]), int.from_bytes(last.payload[:4])) == (0, 3)
    assert not peer.over
    peer.send(data(1, b"x", end=True))
    assert body_of(peer.received()) == b"x"
    assert peer.over


def test_a_client_with_requests_that_says_nothing_is_asked_whether_it_is_there() -> None:
    peer = open_peer(Limits(idle_timeout_s=120, body_timeout_s=60))
    peer.send(peer.headers(1))
    peer.passes(200)
    assert peer.received() == [Frame(PING, 0, 0, bytes(8))]
    peer.send(frame(PING, 0, bytes(8), ACK))
    peer.passes(150)
    assert not peer.over
    peer.passes(200)
    assert peer.connection.aborted


def test_a_body_that_does_not_go_on_is_told_late_and_one_that_does_is_not() -> None:
    peer = open_peer(Limits(body_timeout_s=60))
    peer.send(peer.headers(1), data(1, b"a"), peer.headers(3), data(3, b"a"), peer.headers(5))
    for _ in range(4):
        peer.passes(50)
        peer.send(data(3, b"b"))
    assert set(peer.late) == {peer.streams[0], peer.streams[2]}


def test_a_long_upload_is_not_cut_off_while_it_goes_on() -> None:
    peer = open_peer(Limits(body_timeout_s=60))
    peer.send(peer.headers(1))
    whole = data(1, b"x" * 1000) * 10
    for at in range(0, len(whole), 300):  # a read never ends where a frame does
        peer.send(whole[at : at + 300])
        peer.passes(10)
    assert not peer.over


def test_pings_and_settings_are_acknowledged() -> None:
    peer = open_peer()
    peer.send(frame(PING, 0, b"12345678"), frame(SETTINGS), frame(PING, 0, b"12345678", ACK), frame(SETTINGS, 0, b"", ACK))
    assert peer.received() == [Frame(PING, ACK, 0, b"12345678"), Frame(SETTINGS, ACK, 0, b"")]


def test_unknown_kinds_and_priorities_are_ignored() -> None:
    peer = open_peer()
    peer.send(frame(99, 0, b"x"), frame(PRIORITY, 1, bytes(5)), frame(GOAWAY, 0, bytes(8)), peer.headers(1, end=True))
    assert (peer.received())[0].kind == HEADERS


def test_a_reset_is_told_once_and_late_data_is_dropped() -> None:
    peer = open_peer()
    peer.send(peer.headers(1), data(1, b"abc"), frame(RST_STREAM, 1, word(8)), data(1, b"def", end=True))
    assert peer.resets == peer.streams
    assert peer.received() == []
    assert not peer.over


def test_an_answer_before_the_end_of_the_body_asks_for_no_more() -> None:
    peer = open_peer()
    peer.send(peer.headers(1), data(1, b"abc"))
    peer.streams[0].send_headers(header_block(status=415), end=True)
    frames = peer.received()
    assert [each.kind for each in frames] == [HEADERS, RST_STREAM]
    peer.send(data(1, b"def"))
    assert not peer.over


def test_too_many_streams_are_refused() -> None:
    peer = open_peer()
    peer.send(*(peer.headers(1 + 2 * i) for i in range(1025)))
    (refused,) = peer.received()
    assert refused == Frame(RST_STREAM, 0, 2049, word(7))
    assert len(peer.streams) == 1024


def test_headers_over_the_limit_are_refused_and_the_connection_goes_on() -> None:
    peer = open_peer(Limits(header_bytes=1000))
    peer.send(peer.headers(1, fields=[*FIELDS, ("x", "y" * 2000)]), peer.headers(3, end=True))
    frames = peer.received()
    assert peer.fields(frames[0])["grpc-status"] == "8"
    assert "server.limits.header_bytes" in peer.fields(frames[0])["grpc-message"]
    assert peer.fields(frames[0])["x-request-id"] == peer.refused_ids[0], "which the log tells"
    assert [each.stream for each in frames if each.kind == HEADERS] == [1, 3, 3]


def test_a_call_with_a_header_that_grpc_forbids_is_refused_each_time_and_the_others_are_not() -> None:
    peer = open_peer()
    for number, more in (
        (1, [("X-Upper", "y")]),
        (3, []),
        (5, [("X-Upper", "y")]),
        (7, [("x-bin", "!")]),
        (9, [("te", "gzip")]),
    ):
        peer.send(peer.headers(number, end=True, fields=[*FIELDS, ("x-request-id", "own"), *more]))
        told = [peer.fields(each) for each in peer.received() if each.kind == HEADERS]
        assert told[-1]["grpc-status"] == ("13" if more else "0")
        assert told[-1].get("x-request-id") == ("own" if more else None)
    assert peer.refused_ids == ["own"] * 4
    assert [stream.number for stream in peer.streams] == [3]


def test_what_a_client_says_behind_its_body_is_no_matter() -> None:
    peer = open_peer()
    peer.send(peer.headers(1), data(1, b"abc"), peer.headers(1, end=True, fields=[("X-Upper", "y")]))
    assert body_of(peer.received()) == b"abc"


def test_a_window_that_overflows_ends_its_stream_alone() -> None:
    peer = open_peer()
    peer.send(peer.headers(1), peer.headers(3), frame(WINDOW_UPDATE, 1, word((1 << 31) - 1)))
    assert peer.received() == [Frame(RST_STREAM, 0, 1, word(3))]
    assert peer.resets == [peer.streams[0]]
    peer.send(data(3, b"abc", end=True))
    assert body_of(peer.received(), 3) == b"abc"


def test_the_first_frame_is_settings() -> None:
    for first in (frame(PING, 0, bytes(8)), frame(HEADERS, 1, b"\x83", END_HEADERS)):
        peer = Peer()
        peer.send(first, frame(SETTINGS), preface=PREFACE)
        frames = peer.received()
        assert [each.kind for each in frames] == [SETTINGS, WINDOW_UPDATE, GOAWAY]
        assert goaway_code(frames) == 1
        assert peer.over


def test_a_connection_lost_resets_its_streams() -> None:
    peer = open_peer()
    peer.send(peer.headers(1), peer.headers(3))
    peer.connection.lost()
    assert peer.resets == peer.streams


def test_a_drain_that_is_announced_still_takes_what_was_under_way() -> None:
    peer = open_peer()
    peer.connection.announce_drain()
    assert goaway_code(peer.received()) == 0
    peer.send(peer.headers(1), data(1, b"abc", end=True))
    assert body_of(peer.received()) == b"abc"
    assert not peer.over


def test_a_drain_finishes_what_is_open_and_takes_nothing_new() -> None:
    peer = open_peer()
    peer.send(peer.headers(1))
    peer.connection.drain()
    assert goaway_code(peer.received()) == 0
    peer.send(peer.headers(3, end=True))
    peer.send(
        peer.headers(5), data(5, b"x"), frame(WINDOW_UPDATE, 5, word(1)), data(5, end=True), frame(RST_STREAM, 5, word(8))
    )
    assert peer.received() == []  # what crosses the word is no fault, and the client tries it elsewhere
    assert not peer.over
    peer.send(data(1, b"abc", end=True))
    assert body_of(peer.received()) == b"abc"
    assert peer.over


def test_a_client_without_a_preface_is_cut_off() -> None:
    peer = Peer(Limits(header_timeout_s=0.01))
    peer.send(preface=PREFACE[:5])
    peer.passes(0.05)
    assert peer.over


def test_a_frame_that_does_not_end_is_cut_off() -> None:
    for pieces in ([data(1, b"x")[:5]], [frame(HEADERS, 1, b"\x83")]):
        peer = open_peer(Limits(body_timeout_s=0.01))
        peer.send(*pieces)
        peer.passes(0.05)
        assert peer.over


def test_a_frame_in_pieces_is_not_cut_off_after_its_end() -> None:
    peer = open_peer(Limits(body_timeout_s=0.01))
    ping = frame(PING, 0, bytes(8))
    peer.send(ping[:5])
    peer.send(ping[5:])
    peer.passes(0.05)
    assert not peer.over


@pytest.mark.parametrize("begin", [b"\x16\x03\x01\x02\x00", b"get / HTTP/1.1\r\n", b"SSH-2.0-x\r\n", bytes(30)])
def test_another_protocol_is_cut_off_at_once(begin: bytes) -> None:
    peer = Peer()
    peer.send(preface=begin)
    assert peer.connection.aborted
    assert peer.connection.take() == []


@pytest.mark.parametrize("pieces", [[b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], [b"G", b"ET"], [b"POST", b" /"], [b"P", b"O"]])
def test_a_client_of_http_1_is_told_whom_it_talks_to(pieces: list[bytes]) -> None:
    peer = Peer()
    for piece in pieces:
        peer.send(preface=piece)
    (answer,) = peer.connection.take()
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"\r\nDate: " in answer
    assert b"this port speaks gRPC" in answer
    assert peer.connection.closing


def test_a_server_that_drains_says_its_settings_first() -> None:
    peer = Peer()
    peer.connection.announce_drain()
    assert [each.kind for each in peer.received()] == [SETTINGS, WINDOW_UPDATE, GOAWAY]
    peer.send(frame(SETTINGS), peer.headers(1, end=True), preface=PREFACE)
    assert [each.kind for each in peer.received()] == [SETTINGS, HEADERS, DATA, HEADERS]


BROKEN: dict[str, tuple[list[bytes], int]] = {
    "data for a stream that is not open": ([data(1, b"x")], 1),
    "data for the connection": ([data(0, b"x")], 1),
    "reset of a stream that is not open": ([frame(RST_STREAM, 1, word(0))], 1),
    "a window update of nothing": ([frame(WINDOW_UPDATE, 0, word(0))], 1),
    "a window update for a stream that is not open": ([frame(WINDOW_UPDATE, 1, word(1))], 1),
    "a window that overflows": ([frame(WINDOW_UPDATE, 0, word((1 << 31) - 1))], 3),
    "an initial window that overflows": ([frame(SETTINGS, 0, struct.pack(">HI", 0x4, 1 << 31))], 3),
    "a frame size out of range": ([frame(SETTINGS, 0, struct.pack(">HI", 0x5, 1))], 1),
    "settings of a stream": ([frame(SETTINGS, 1)], 1),
    "an acknowledgement of settings that says more": ([frame(SETTINGS, 0, bytes(6), ACK)], 6),
    "a push that is neither on nor off": ([frame(SETTINGS, 0, struct.pack(">HI", 0x2, 2))], 1),
    "a ping of a stream": ([frame(PING, 1, bytes(8))], 1),
    "settings of a wrong size": ([frame(SETTINGS, 0, b"x")], 6),
    "a ping of a wrong size": ([frame(PING, 0, b"x")], 6),
    "a window update of a wrong size": ([frame(WINDOW_UPDATE, 0, b"x")], 6),
    "a frame that is too long": ([frame_head(1 << 20, DATA, 0, 1)], 6),
    "a GOAWAY of a stream": ([frame(GOAWAY, 1, bytes(8))], 1),
    "a GOAWAY of a wrong size": ([frame(GOAWAY, 0, bytes(7))], 6),
    "a push": ([frame(PUSH_PROMISE, 1, bytes(4))], 1),
    "a stream of an even number": ([frame(HEADERS, 2, b"\x83", END_HEADERS)], 1),
    "a continuation of nothing": ([frame(CONTINUATION, 1)], 1),
    "a header block that is interrupted": ([frame(HEADERS, 1, b"\x83"), frame(PING, 0, bytes(8))], 1),
    "continuations without end": ([frame(HEADERS, 1, b"")] + [frame(CONTINUATION, 1)] * 4097, 11),
    "a header block without end": ([frame(HEADERS, 1, b"")] + [frame(CONTINUATION, 1, bytes(60_000))] * 3, 11),
    "headers that cannot be decoded": ([frame(HEADERS, 1, b"\xff\xff\xff", END_HEADERS)], 9),
    "headers of no entry": ([frame(HEADERS, 1, b"\xfe", END_HEADERS)], 9),
    "more padding than frame": ([frame(HEADERS, 1, b"\x83", END_HEADERS), data(1, b"\x05ab", flags=PADDED)], 1),
    "a second header block": ([frame(HEADERS, 1, b"\x83", END_HEADERS), frame(HEADERS, 1, b"\x83", END_HEADERS)], 1),
    "a request in a stream below the last": (
        [frame(HEADERS, 3, b"\x83", END_HEADERS), frame(HEADERS, 1, b"\x83\x86", END_HEADERS)],
        1,
    ),
    "data after the end of a body": (
        [frame(HEADERS, 1, b"\x83\x44\x01a", END_HEADERS), data(1, bytes(60_000)), data(1, bytes(60_000), end=True), data(1)],
        1,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_protocol_ends_the_connection_with_its_reason(name: str) -> None:
    frames, code = BROKEN[name]
    peer = open_peer()
    peer.send(*frames)
    assert goaway_code(peer.received()) == code
    assert peer.over


def test_more_than_the_window_of_a_stream_ends_the_connection() -> None:
    peer = open_peer(Limits(body_bytes=1))
    peer.send(peer.headers(1), data(1, bytes(60_000)), data(1, bytes(60_000)))
    assert goaway_code(peer.received()) == 3


# Properties


def conversation() -> bytes:
    """Three requests, one of them in pieces and one reset."""
    encoder = hpack.Encoder()
    blocks = [encoder.encode(FIELDS) for _ in range(3)]
    frames = [
        frame(SETTINGS, 0, struct.pack(">HI", 0x4, 100)),
        frame(WINDOW_UPDATE, 0, word(1000)),
        frame(HEADERS, 1, blocks[0], END_HEADERS),
        data(1, b"a" * 50),
        data(1, b"b" * 30, end=True),
        frame(PING, 0, bytes(8)),
        frame(HEADERS, 3, blocks[1][:2]),
        frame(CONTINUATION, 3, blocks[1][2:], END_HEADERS),
        data(3, b"c" * 300, end=True),
        frame(WINDOW_UPDATE, 3, word(500)),
        frame(HEADERS, 5, blocks[2], END_HEADERS),
        frame(RST_STREAM, 5, word(8)),
    ]
    return PREFACE + b"".join(frames)


CONVERSATION = conversation()


def answers_to(pieces: list[bytes]) -> bytes:
    peer = Peer()
    for piece in pieces:
        peer.send(piece)
    return b"".join(peer.connection.take())


@pytest.mark.slow
@settings(max_examples=100, derandomize=True)
@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=12))
def test_how_bytes_are_cut_changes_nothing(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(CONVERSATION)]
    pieces = [CONVERSATION[a:b] for a, b in itertools.pairwise(edges)]
    assert answers_to(pieces) == answers_to([CONVERSATION])


@pytest.mark.slow
@settings(max_examples=300, derandomize=True)
@given(st.integers(0, len(CONVERSATION)), st.binary(max_size=40), st.binary(max_size=100))
def test_any_bytes_are_answered_or_end_the_connection(at: int, noise: bytes, more: bytes) -> None:
    answers_to([CONVERSATION[:at] + noise + CONVERSATION[at + len(noise) :], more])
    answers_to([PREFACE + noise + more])
