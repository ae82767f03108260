"""The server's side of HTTP/2, bytes in and bytes out: no sockets, no loop, and time passes when a test says so."""

import itertools
import struct
from typing import NamedTuple

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Limits
from gateway.wire.http2 import Stream
from gateway.wire.http2_frames import PREFACE, frame_head
from gateway.wire.http2_headers import header_block
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

    def __init__(self, stream: Stream, resets: list[Stream]) -> None:
        self.stream = stream
        self.resets = resets
        self.body = b""

    def take(self, data: bytes, ended: bool) -> None:
        self.body += data
        if ended:
            self.stream.send_headers(header_block((b"x-path", self.stream.headers[b":path"]), status=200))
            self.stream.send_data(self.body)
            self.stream.finish(header_block((b"grpc-status", b"0")))

    def reset(self) -> None:
        self.resets.append(self.stream)

    def drained(self) -> None: ...

    def cut_off(self) -> None: ...


class Peer:
    """A client of a connection whose handler answers each body with itself. now: the time; it passes where a test says so."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 0.0
        self.streams: list[Stream] = []
        self.resets: list[Stream] = []
        self.connection = ServerConnection(limits or Limits(), self._echo, lambda: None, lambda: self.now)
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()

    def _echo(self, stream: Stream) -> None:
        self.streams.append(stream)
        stream.receiver = Echo(stream, self.resets)

    @property
    def over(self) -> bool:
        return self.connection.closing or self.connection.aborted

    def send(self, *frames: bytes, preface: bytes = b"") -> None:
        self.connection.receive(preface + b"".join(frames))

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


def test_trailers_of_a_client_end_its_body() -> None:
    peer = open_peer()
    peer.send(peer.headers(1), data(1, b"abc"), peer.headers(1, end=True, fields=[("x", "y")]))
    assert body_of(peer.received()) == b"abc"


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
    assert peer.fields(frames[0]) == {":status": "431"}
    assert [each.stream for each in frames if each.kind == HEADERS] == [1, 3, 3]


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
    assert peer.received() == []
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


def test_another_protocol_is_cut_off_at_once() -> None:
    peer = Peer()
    peer.send(preface=b"GET / HTTP/1.1\r\n\r\n")
    assert peer.over


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
    "a push": ([frame(PUSH_PROMISE, 1, bytes(4))], 1),
    "a stream of an even number": ([frame(HEADERS, 2, b"\x83", END_HEADERS)], 1),
    "a continuation of nothing": ([frame(CONTINUATION, 1)], 1),
    "a header block that is interrupted": ([frame(HEADERS, 1, b"\x83"), frame(PING, 0, bytes(8))], 1),
    "a header block without end": ([frame(HEADERS, 1, b"")] + [frame(CONTINUATION, 1, bytes(60_000))] * 3, 11),
    "headers that cannot be decoded": ([frame(HEADERS, 1, b"\xff\xff\xff", END_HEADERS)], 9),
    "headers of no entry": ([frame(HEADERS, 1, b"\xfe", END_HEADERS)], 9),
    "more padding than frame": ([frame(HEADERS, 1, b"\x83", END_HEADERS), data(1, b"\x05ab", flags=PADDED)], 1),
    "a second header block": ([frame(HEADERS, 1, b"\x83", END_HEADERS), frame(HEADERS, 1, b"\x83", END_HEADERS)], 1),
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
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=12))
def test_how_bytes_are_cut_changes_nothing(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(CONVERSATION)]
    pieces = [CONVERSATION[a:b] for a, b in itertools.pairwise(edges)]
    assert answers_to(pieces) == answers_to([CONVERSATION])


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, len(CONVERSATION)), st.binary(max_size=40), st.binary(max_size=100))
def test_any_bytes_are_answered_or_end_the_connection(at: int, noise: bytes, more: bytes) -> None:
    answers_to([CONVERSATION[:at] + noise + CONVERSATION[at + len(noise) :], more])
    answers_to([PREFACE + noise + more])
