"""What no gRPC client sends, as bytes, and what a server makes of it: ours, and beside it that of grpcio.

    python -m tests.grpc_server.odd_bytes        # prints what both answer

`OTHERWISE` is what ours is to make of them; `test_odd_bytes` holds it.
"""

import asyncio
import gzip
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc
import hpack

from gateway.wire.http2_frames import PREFACE, frame, frame_head, window_update
from gateway.wire.http2_headers import header_block
from tests.grpc_server.serving import infer_request, serving

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
PATH: Final = b"/inference.GRPCInferenceService/ModelInfer"
STATUS: Final = {code.value[0]: code.name for code in grpc.StatusCode}
FAULTS: Final = [  # of RFC 9113, section 7
    "NO_ERROR",
    "PROTOCOL_ERROR",
    "INTERNAL_ERROR",
    "FLOW_CONTROL_ERROR",
    "SETTINGS_TIMEOUT",
    "STREAM_CLOSED",
    "FRAME_SIZE_ERROR",
    "REFUSED_STREAM",
    "CANCEL",
    "COMPRESSION_ERROR",
    "CONNECT_ERROR",
    "ENHANCE_YOUR_CALM",
]
QUIET_S: Final = 1.0  # without an answer, and there is none
AFTER_S: Final = 0.1  # behind one

Fields = Sequence[tuple[bytes, bytes]]
FIELDS: Final[Fields] = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", PATH),
    (b":authority", b"x"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(data).to_bytes(4) + data


GOOD: Final = message(infer_request(value=7).SerializeToString())
BODY: Final = frame(DATA, END_STREAM, 1, GOOD)


def head(fields: Fields = FIELDS, stream: int = 1, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, stream, header_block(*fields))


def call(fields: Fields = FIELDS, stream: int = 1) -> bytes:
    return head(fields, stream) + frame(DATA, END_STREAM, stream, GOOD)


def having(**values: bytes) -> Fields:
    """FIELDS with other values, and more fields behind them. `pseudo_x` is `:x`."""
    named = {name.replace("pseudo_", ":").replace("_", "-").encode(): value for name, value in values.items()}
    return [(name, named.pop(name, value)) for name, value in FIELDS] + list(named.items())


def lacking(*names: bytes) -> Fields:
    return [field for field in FIELDS if field[0] not in names]


def more(name: bytes, value: bytes = b"x") -> Fields:
    return [*FIELDS, (name, value)]


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", key, value))


def word(number: int) -> bytes:
    return struct.pack(">I", number)


def block(data: bytes) -> bytes:
    """A call with these bytes of HPACK before its fields."""
    return frame(HEADERS, END_HEADERS, 1, data + header_block(*FIELDS)) + BODY


def pieces(data: bytes, count: int, stream: int = 1) -> bytes:
    size = -(-len(data) // count)
    first, *parts = [data[at : at + size] for at in range(0, len(data), size)]
    ends = [0] * (len(parts) - 1) + [END_HEADERS]
    others = map(frame, [CONTINUATION] * len(parts), ends, [stream] * len(parts), parts)
    return frame(HEADERS, 0, stream, first) + b"".join(others)


def cases() -> Iterable[tuple[str, bytes]]:
    """Name, and bytes behind the preface and empty settings."""
    plain = header_block(*FIELDS)
    # headers: of the call
    yield "a call", call()
    yield "no te", call(lacking(b"te"))
    yield "te: gzip", call(having(te=b"gzip"))
    yield "te: trailers, deflate", call(having(te=b"trailers, deflate"))
    yield "te twice", call(more(b"te", b"trailers"))
    for name, value in (
        (b"connection", b"keep-alive"),
        (b"keep-alive", b"x"),
        (b"proxy-connection", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
    ):
        yield name.decode(), call(more(name, value))
    for name in (b":method", b":scheme", b":path", b":authority", b"content-type"):
        yield f"no {name.decode()}", call(lacking(name))
    yield "host for :authority", call([*lacking(b":authority"), (b"host", b"x")])
    yield "host beside :authority", call(more(b"host", b"y"))
    yield "an unknown pseudo header", call([(b":foo", b"x"), *FIELDS])
    yield "a pseudo header of answers", call([(b":status", b"200"), *FIELDS])
    yield "a pseudo header behind others", call([*lacking(b":path"), (b":path", PATH)])
    for name, value in FIELDS[:4]:
        yield f"{name.decode()} twice", call([(name, value), *FIELDS])
    yield "content-type twice", call(more(b"content-type", b"application/grpc"))
    for kind in (
        b"application/grpc+proto",
        b"application/grpc+json",
        b"application/grpc;charset=utf-8",
        b"application/grpc-web",
        b"application/grpc-web+proto",
        b"application/grpcx",
        b"application/json",
        b"APPLICATION/GRPC",
        b"",
    ):
        yield f"content-type: {kind.decode()}", call(having(content_type=kind))
    for method in (b"GET", b"PUT", b"HEAD", b"post", b""):
        yield f":method: {method.decode()}", call(having(pseudo_method=method))
    for scheme in (b"https", b"grpc", b"ftp", b""):
        yield f":scheme: {scheme.decode()}", call(having(pseudo_scheme=scheme))
    for path in (PATH[1:], b"", b"*", b"/", PATH + b"/", PATH + b"?x=1", b"http://x" + PATH, b"/\xff", b"/a b"):
        yield f":path: {path.decode('latin-1')}", call(having(pseudo_path=path))
    for authority in (b"", b"a b", b"\xff"):
        yield f":authority: {authority.decode('latin-1')}", call(having(pseudo_authority=authority))
    # headers: names and values
    for name in b'X-Upper|x y|x:y||x\0y|x\ny|\xe9|x"y|x/y|x@y|x{y|x!y|x.y_z-1'.split(b"|"):
        yield f"name {name.decode('latin-1')!r}", call(more(name))
    for value in (b"", b"a\0b", b"a\nb", b"a\rb", b"a\tb", b"a\x7fb", b"a\x01b", b" a", b"a ", b"a\x80b", b"\xc3\xa4"):
        yield f"value {value.decode('latin-1')!r}", call(more(b"x-value", value))
    for value in (b"AAAA", b"AA==", b"AA", b"A", b"!!!!", b"AAAA,AAAA", b"AA==AA", b"", b"AA A", b"A-_A"):
        yield f"-bin {value.decode()!r}", call(more(b"x-bin", value))
    yield "a field a hundred times", call([*FIELDS, *[(b"x", b"y")] * 100])
    for size in (5_000, 10_000, 20_000, 40_000, 140_000):
        long = header_block(*more(b"x", b"y" * size))
        count = 2 + len(long) // 16_000
        yield f"headers of {size} bytes", pieces(long, count) + BODY
    # headers: of gRPC
    for encoding in (b"snappy", b"gzip, deflate", b"", b"GZIP", b"identity"):
        yield f"grpc-encoding: {encoding.decode()}", call(having(grpc_encoding=encoding))
    timeouts = "|1|S|1s|1x|-1S|+1S|99999999H|123456789S|1 S| 1S|1S |1.5S|0S|0n|1e3S"
    for timeout in timeouts.split("|"):
        yield f"grpc-timeout: {timeout!r}", call(having(grpc_timeout=timeout.encode()))
    yield "grpc-timeout twice", call([*FIELDS, (b"grpc-timeout", b"9S"), (b"grpc-timeout", b"8S")])
    yield "grpc-accept-encoding: nonsense", call(having(grpc_accept_encoding=b"\x80, ,gzip;q=1"))
    yield "grpc-status of a client", call(having(grpc_status=b"5"))
    yield "content-length, right", call(having(content_length=b"%d" % len(GOOD)))
    yield "content-length, wrong", call(having(content_length=b"1"))
    yield "content-length, no number", call(having(content_length=b"x"))
    # the body
    yield "no message", head(flags=END_HEADERS | END_STREAM)
    yield "no message, empty DATA", head() + frame(DATA, END_STREAM, 1)
    yield "half a prefix", head() + frame(DATA, END_STREAM, 1, b"\0\0")
    yield "half a message", head() + frame(DATA, END_STREAM, 1, GOOD[:-1])
    yield "two messages", head() + frame(DATA, END_STREAM, 1, GOOD * 2)
    yield "a message and a bit", head() + frame(DATA, END_STREAM, 1, GOOD + b"\0\0")
    yield "a message of flag 2", head() + frame(DATA, END_STREAM, 1, message(GOOD[5:], 2))
    yield "a message of flag 255", head() + frame(DATA, END_STREAM, 1, message(GOOD[5:], 255))
    yield "compressed without encoding", head() + frame(DATA, END_STREAM, 1, message(gzip.compress(GOOD[5:]), 1))
    zipped = having(grpc_encoding=b"gzip")
    yield "compressed, no gzip", head(zipped) + frame(DATA, END_STREAM, 1, message(GOOD[5:], 1))
    yield "compressed, nothing", head(zipped) + frame(DATA, END_STREAM, 1, message(b"", 1))
    yield "compressed, cut", head(zipped) + frame(DATA, END_STREAM, 1, message(gzip.compress(GOOD[5:])[:-4], 1))
    yield "an encoding and no compression", call(zipped)
    yield "no protobuf", head() + frame(DATA, END_STREAM, 1, message(b"\xff" * 9))
    yield "a message too long", head() + frame(DATA, 0, 1, b"\0\xff\xff\xff\xff")
    yield "padding", head() + frame(DATA, END_STREAM | PADDED, 1, b"\x08" + GOOD + bytes(8))
    yield "padding of no bytes", head() + frame(DATA, END_STREAM | PADDED, 1, b"\0" + GOOD)
    yield "padding that is not 0", head() + frame(DATA, END_STREAM | PADDED, 1, b"\x01" + GOOD + b"x")
    yield "padding of headers", frame(HEADERS, END_HEADERS | PADDED, 1, b"\x04" + plain + bytes(4)) + BODY
    yield "padding longer than its frame", head() + frame(DATA, END_STREAM | PADDED, 1, b"\xff" + GOOD)
    yield "padding without its length", head() + frame(DATA, END_STREAM | PADDED, 1)
    yield "a thousand empty DATA", head() + frame(DATA, 0, 1) * 1000 + BODY
    yield (
        "DATA of a byte each",
        head() + b"".join(frame(DATA, 0, 1, GOOD[i : i + 1]) for i in range(len(GOOD))) + frame(DATA, 1, 1),
    )
    yield "DATA with unknown flags", head() + frame(DATA, END_STREAM | 0x40, 1, GOOD)
    yield "trailers", head() + frame(DATA, 0, 1, GOOD) + head([(b"x", b"y")], 1, END_HEADERS | END_STREAM)
    yield (
        "trailers with a pseudo header",
        head() + frame(DATA, 0, 1, GOOD) + head([(b":path", b"y")], 1, END_HEADERS | END_STREAM),
    )
    yield "trailers that do not end it", head() + frame(DATA, 0, 1, GOOD) + head([(b"x", b"y")], 1, END_HEADERS)
    # frames
    yield "PRIORITY", frame(PRIORITY, 0, 1, bytes(5)) + call()
    yield "PRIORITY of 4 bytes", frame(PRIORITY, 0, 1, bytes(4)) + call()
    yield "PRIORITY of the connection", frame(PRIORITY, 0, 0, bytes(5)) + call()
    yield "PRIORITY on itself", frame(PRIORITY, 0, 1, word(1) + b"\0") + call()
    yield "HEADERS with a priority", frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, bytes(5) + plain) + BODY
    yield "HEADERS with a priority cut", frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, bytes(3))
    yield "an unknown frame", frame(77, 0xFF, 0, b"x") + frame(77, 0, 9, b"x") + call()
    yield "an unknown frame within a call", head() + frame(77, 0, 1, b"x") + BODY
    yield (
        "an unknown frame within a header block",
        frame(HEADERS, 0, 1, plain) + frame(77, 0, 1) + frame(CONTINUATION, 4, 1) + BODY,
    )
    yield "a reserved bit", frame(HEADERS, END_HEADERS, 1 | 1 << 31, plain) + BODY
    yield "an unknown setting", setting(0x99, 7) + call()
    yield "ENABLE_PUSH 1", setting(2, 1) + call()
    yield "ENABLE_PUSH 2", setting(2, 2) + call()
    yield "INITIAL_WINDOW_SIZE 2^31", setting(4, 1 << 31) + call()
    yield "MAX_FRAME_SIZE 100", setting(5, 100) + call()
    yield "MAX_FRAME_SIZE 2^24", setting(5, 1 << 24) + call()
    yield "HEADER_TABLE_SIZE 2^32-1", setting(1, (1 << 32) - 1) + call()
    yield "MAX_HEADER_LIST_SIZE 0", setting(6, 0) + call()
    yield "MAX_CONCURRENT_STREAMS 0", setting(3, 0) + call()
    yield "SETTINGS of a stream", frame(SETTINGS, 0, 1) + call()
    yield "SETTINGS of 5 bytes", frame(SETTINGS, 0, 0, bytes(5)) + call()
    yield "SETTINGS acknowledged with more", frame(SETTINGS, ACK, 0, bytes(6)) + call()
    yield "SETTINGS acknowledged often", frame(SETTINGS, ACK, 0) * 9 + call()
    yield "WINDOW_UPDATE of 0", window_update(0, 0) + call()
    yield "WINDOW_UPDATE of 0 of a call", head() + window_update(1, 0) + BODY
    yield "WINDOW_UPDATE of an idle stream", window_update(9, 9) + call()
    yield "WINDOW_UPDATE of 3 bytes", frame(WINDOW_UPDATE, 0, 0, bytes(3)) + call()
    yield "WINDOW_UPDATE over the most", window_update(0, (1 << 31) - 1) + call()
    yield "WINDOW_UPDATE over the most of a call", head() + window_update(1, (1 << 31) - 1) + BODY
    yield "RST_STREAM of an idle stream", frame(RST_STREAM, 0, 9, word(8)) + call()
    yield "RST_STREAM of the connection", frame(RST_STREAM, 0, 0, word(8)) + call()
    yield "RST_STREAM of 3 bytes", head() + frame(RST_STREAM, 0, 1, bytes(3))
    yield (
        "RST_STREAM, then more",
        head() + frame(RST_STREAM, 0, 1, word(8)) + frame(DATA, 0, 1, b"x") + call(stream=3),
    )
    yield "PING of a stream", frame(PING, 0, 1, bytes(8)) + call()
    yield "PING of 7 bytes", frame(PING, 0, 0, bytes(7)) + call()
    yield "PING acknowledged that was not sent", frame(PING, ACK, 0, bytes(8)) + call()
    yield "a hundred PINGs", frame(PING, 0, 0, bytes(8)) * 100 + call()
    yield "GOAWAY, then a call", frame(GOAWAY, 0, 0, bytes(8)) + call()
    yield "GOAWAY during a call", head() + frame(GOAWAY, 0, 0, bytes(8)) + BODY
    yield "GOAWAY of 7 bytes", frame(GOAWAY, 0, 0, bytes(7)) + call()
    yield "GOAWAY of a stream", frame(GOAWAY, 0, 1, bytes(8)) + call()
    yield "PUSH_PROMISE", head() + frame(PUSH_PROMISE, END_HEADERS, 1, word(2) + plain)
    yield "DATA of an idle stream", frame(DATA, 0, 9, b"x") + call()
    yield "DATA of the connection", frame(DATA, 0, 0, b"x") + call()
    yield "DATA behind the end", head() + frame(DATA, END_STREAM, 1, GOOD) + frame(DATA, 0, 1, b"x")
    yield "DATA behind a call that waits", head() + frame(DATA, 0, 1, GOOD) + frame(DATA, END_STREAM, 1)
    yield "a stream of an even number", call(stream=2)
    yield "a stream of number 0", call(stream=0)
    yield "stream numbers that go down", call(stream=5) + call(stream=3)
    yield "a large one in a stream below", call(stream=5) + pieces(header_block(*more(b"x", b"y" * 80_000)), 8, stream=3)
    yield "a stream number twice", call() + call()
    yield "HEADERS twice", head() + head() + BODY
    yield "CONTINUATION of nothing", frame(CONTINUATION, END_HEADERS, 1, plain)
    yield "CONTINUATION of another stream", frame(HEADERS, 0, 1, plain) + frame(CONTINUATION, END_HEADERS, 3)
    yield "CONTINUATION of a byte each", pieces(plain, len(plain)) + BODY
    yield (
        "a thousand empty CONTINUATION",
        frame(HEADERS, 0, 1, plain) + frame(CONTINUATION, 0, 1) * 1000 + frame(CONTINUATION, END_HEADERS, 1) + BODY,
    )
    yield (
        "CONTINUATION without end",
        frame(HEADERS, 0, 1, plain) + frame(CONTINUATION, 0, 1, header_block((b"x", b"y" * 16_000))) * 9,
    )
    yield "a frame of 20 kB", head() + frame(DATA, 0, 1, bytes(20_000))
    yield "a frame of 2 MB", head() + frame_head(2_000_000, DATA, 0, 1) + b"x"
    # header blocks
    yield "HPACK: an index of 0", block(b"\x80")
    yield "HPACK: an index beyond the table", block(b"\xff\x00")
    yield "HPACK: a huge integer", block(b"\xff" + b"\xff" * 20 + b"\x7f")
    yield "HPACK: an integer with zeros", block(b"\xff" + b"\x80" * 20 + b"\x00")
    yield "HPACK: a huge string", block(b"\x00\x7f\xff\xff\xff\xff\x07")
    yield "HPACK: bad Huffman", block(b"\x00\x84\xff\xff\xff\xff\x01x")
    yield "HPACK: an empty table", block(b"\x20")
    yield "HPACK: a table of 4096", block(b"\x3f\xe1\x1f")
    yield "HPACK: a table of 65536", block(b"\x3f\xe1\xff\x03")
    yield "HPACK: three table sizes", block(b"\x20\x3f\x01\x3f\xe1\x1f")
    yield "HPACK: a table size behind a field", frame(HEADERS, END_HEADERS, 1, plain + b"\x20") + BODY
    yield "HPACK: a block cut", frame(HEADERS, END_HEADERS, 1, plain[:-1]) + BODY
    yield "HPACK: nothing", frame(HEADERS, END_HEADERS, 1) + BODY


CASES: Final = dict(cases())
FIRST: Final[dict[str, bytes]] = {
    "no SETTINGS first": PREFACE + call(),
    "PING before SETTINGS": PREFACE + frame(PING, 0, 0, bytes(8)) + setting(4, 65535) + call(),
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.1, upgrade": b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "nothing known": b"\0" * 30,
    "half a preface": PREFACE[:10],
}  # fmt: skip


# What ours answers, of those that are not answered as any call is. Texts are left out.
OTHERWISE: Final = {
    "INTERNAL": (
        "te: gzip",
        "te: trailers, deflate",
        "an unknown pseudo header",
        "name 'X-Upper'",
        "name 'x y'",
        "name 'x:y'",
        "name ''",
        "name 'x\\x00y'",
        "name 'x\\ny'",
        "name 'é'",
        "name 'x\"y'",
        "name 'x/y'",
        "name 'x@y'",
        "name 'x{y'",
        "name 'x!y'",
        "-bin 'A'",
        "-bin '!!!!'",
        "-bin 'AA==AA'",
        "-bin 'AA A'",
        "-bin 'A-_A'",
        "compressed without encoding",
    ),
    "HTTP 415": (
        "no :method",
        "no content-type",
        "content-type: application/grpc-web",
        "content-type: application/grpc-web+proto",
        "content-type: application/grpcx",
        "content-type: application/json",
        "content-type: ",
        ":method: GET",
        ":method: PUT",
        ":method: HEAD",
        ":method: post",
        ":method: ",
        "HPACK: nothing",
    ),
    "UNIMPLEMENTED": (
        "no :path",
        ":path: inference.GRPCInferenceService/ModelInfer",
        ":path: ",
        ":path: *",
        ":path: /",
        ":path: /inference.GRPCInferenceService/ModelInfer/",
        ":path: /inference.GRPCInferenceService/ModelInfer?x=1",
        ":path: http://x/inference.GRPCInferenceService/ModelInfer",
        ":path: /ÿ",
        ":path: /a b",
        "grpc-encoding: snappy",
        "grpc-encoding: gzip, deflate",
        "grpc-encoding: ",
        "grpc-encoding: GZIP",
    ),
    "RESOURCE_EXHAUSTED": ("headers of 40000 bytes",),
    "GOAWAY ENHANCE_YOUR_CALM, closed": (
        "headers of 140000 bytes",
        "CONTINUATION without end",
    ),
    "INVALID_ARGUMENT": (
        "grpc-timeout: ''",
        "grpc-timeout: '1'",
        "grpc-timeout: 'S'",
        "grpc-timeout: '1s'",
        "grpc-timeout: '1x'",
        "grpc-timeout: '-1S'",
        "grpc-timeout: '+1S'",
        "grpc-timeout: '123456789S'",
        "grpc-timeout: '1 S'",
        "grpc-timeout: ' 1S'",
        "grpc-timeout: '1S '",
        "grpc-timeout: '1.5S'",
        "grpc-timeout: '1e3S'",
        "no message",
        "no message, empty DATA",
        "half a prefix",
        "half a message",
        "two messages",
        "a message and a bit",
        "a message of flag 2",
        "a message of flag 255",
        "compressed, no gzip",
        "compressed, nothing",
        "compressed, cut",
        "no protobuf",
        "a message too long",
        "a frame of 20 kB",
    ),
    "DEADLINE_EXCEEDED": (
        "grpc-timeout: '0S'",
        "grpc-timeout: '0n'",
    ),
    "GOAWAY PROTOCOL_ERROR, closed": (
        "padding longer than its frame",
        "padding without its length",
        "trailers that do not end it",
        "an unknown frame within a header block",
        "ENABLE_PUSH 2",
        "MAX_FRAME_SIZE 100",
        "MAX_FRAME_SIZE 2^24",
        "SETTINGS of a stream",
        "WINDOW_UPDATE of 0",
        "WINDOW_UPDATE of 0 of a call",
        "WINDOW_UPDATE of an idle stream",
        "RST_STREAM of an idle stream",
        "RST_STREAM of the connection",
        "PING of a stream",
        "GOAWAY of a stream",
        "PUSH_PROMISE",
        "DATA of an idle stream",
        "DATA of the connection",
        "DATA behind the end",
        "a stream of an even number",
        "a stream of number 0",
        "stream numbers that go down",
        "a large one in a stream below",
        "a stream number twice",
        "HEADERS twice",
        "CONTINUATION of nothing",
        "CONTINUATION of another stream",
        "no SETTINGS first",
        "PING before SETTINGS",
    ),
    "GOAWAY FRAME_SIZE_ERROR, closed": (
        "HEADERS with a priority cut",
        "SETTINGS of 5 bytes",
        "SETTINGS acknowledged with more",
        "WINDOW_UPDATE of 3 bytes",
        "RST_STREAM of 3 bytes",
        "PING of 7 bytes",
        "GOAWAY of 7 bytes",
        "a frame of 2 MB",
    ),
    "GOAWAY FLOW_CONTROL_ERROR, closed": (
        "INITIAL_WINDOW_SIZE 2^31",
        "WINDOW_UPDATE over the most",
    ),
    "reset FLOW_CONTROL_ERROR": ("WINDOW_UPDATE over the most of a call",),
    "GOAWAY COMPRESSION_ERROR, closed": (
        "HPACK: an index of 0",
        "HPACK: an index beyond the table",
        "HPACK: a huge integer",
        "HPACK: an integer with zeros",
        "HPACK: a huge string",
        "HPACK: bad Huffman",
        "HPACK: a table of 65536",
        "HPACK: a table size behind a field",
        "HPACK: a block cut",
    ),
    "HTTP/1.1 400 Bad Request": (
        "HTTP/1.1",
        "HTTP/1.1, upgrade",
    ),
    "closed": (
        "TLS",
        "nothing known",
    ),
    "nothing": ("half a preface",),
}


async def outcome(address: str, data: bytes) -> str:
    """What a server makes of these bytes: how its last stream ends, or else the connection."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    decoder = hpack.Decoder()
    told: list[str] = []
    began = b""
    fields: dict[str, str] = {}
    try:
        async with asyncio.timeout(10):
            while True:
                begin = await asyncio.wait_for(reader.readexactly(9), AFTER_S if told else QUIET_S)
                if begin.startswith(b"HTTP/1"):
                    began = begin + await asyncio.wait_for(reader.read(), QUIET_S)
                    return began.split(b"\r\n")[0].decode()
                payload = await reader.readexactly(int.from_bytes(begin[:3]))
                kind, flags = begin[3], begin[4]
                if kind == HEADERS:
                    fields |= {str(n, "latin-1"): str(v, "latin-1") for n, v in decoder.decode(payload, raw=True)}
                if kind in (HEADERS, DATA) and flags & END_STREAM:
                    status = fields.get("grpc-status")
                    if status is None:
                        told.append(f"HTTP {fields[':status']}")
                    else:
                        http = "" if fields[":status"] == "200" else f" (HTTP {fields[':status']})"
                        text = fields.get("grpc-message", "")
                        told.append(STATUS[int(status)] + http + (f": {text}" if text else ""))
                    fields = {}
                elif kind == RST_STREAM and any(payload):
                    told.append(f"reset {FAULTS[int.from_bytes(payload)]}")
                elif kind == GOAWAY:
                    told.append(f"GOAWAY {FAULTS[int.from_bytes(payload[4:8])]}")
    except TimeoutError:
        return ", ".join(told) or "nothing"
    except (asyncio.IncompleteReadError, ConnectionError):
        return ", ".join([*told, "closed"])
    finally:
        writer.close()


async def outcomes(address: str) -> dict[str, str]:
    """Of all cases."""
    told = {}
    opening = PREFACE + frame(SETTINGS, 0, 0)
    everything = {name: opening + data for name, data in CASES.items()} | FIRST

    limit = asyncio.Semaphore(16)

    async def one(name: str, data: bytes) -> None:
        async with limit:
            told[name] = await outcome(address, data)

    async with asyncio.TaskGroup() as group:
        for name, data in everything.items():
            group.create_task(one(name, data))
    return {name: told[name] for name in everything}


class _Infer(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != PATH.decode():
            return None
        return grpc.unary_unary_rpc_method_handler(lambda data, context: data)


async def _compare() -> None:
    pool = ThreadPoolExecutor(4)
    server = grpc.server(pool, [_Infer()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    theirs = await outcomes(f"127.0.0.1:{port}")
    server.stop(None)
    async with serving() as served:
        ours = await outcomes(served.url)
    for name, answer in ours.items():
        print(f"{' ' if answer.split(':')[0] == theirs[name].split(':')[0] else '*'} {name:42} {theirs[name]:60} {answer}")


if __name__ == "__main__":
    asyncio.run(_compare())
