"""HTTP/2 as bytes: frames, settings and error codes. Section numbers are those of RFC 9113."""

import struct
from collections.abc import Mapping
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # 3.4

# 6, kinds of frames
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

# flags
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20

# 6.5.2
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = range(1, 7)

# 7, error codes
NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
FLOW_CONTROL_ERROR: Final = 0x3
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

MOST_WINDOW: Final = (1 << 31) - 1
DEFAULT_WINDOW: Final = 65_535
DEFAULT_FRAME_BYTES: Final = 16_384

FRAME_HEAD: Final = struct.Struct(">HBBBI")  # length in two parts, kind, flags, stream
SETTING: Final = struct.Struct(">HI")
WORD: Final = struct.Struct(">I")


class Broken(Exception):
    """5.4.1: the connection cannot go on. code, text: for the GOAWAY."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


def frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """4.1: the nine bytes before a frame's payload."""
    return FRAME_HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return frame_head(len(payload), kind, flags, stream) + payload


def settings(values: Mapping[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items()))


def window_update(stream: int, size: int) -> bytes:
    """6.9: the other side may send so many bytes more; stream 0: of the connection."""
    return frame_head(4, WINDOW_UPDATE, 0, stream) + WORD.pack(size)


def reset(stream: int, code: int) -> bytes:
    """6.4."""
    return frame_head(4, RST_STREAM, 0, stream) + WORD.pack(code)


def expect_size(payload: bytes, size: int) -> None:
    """Raises: Broken."""
    if len(payload) != size:
        raise Broken(FRAME_SIZE_ERROR, f"a frame of {len(payload)} bytes, expected {size}")


def unpadded(payload: bytes) -> bytes:
    """6.1: the payload of a PADDED frame without its padding. Raises: Broken."""
    if not payload or payload[0] >= len(payload):
        raise Broken(PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
