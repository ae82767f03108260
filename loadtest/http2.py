"""The frames of HTTP/2 that a unary gRPC call needs (RFC 9113), and the header block of a request (RFC 7541).

Both sides of this project's load tests announce SETTINGS_HEADER_TABLE_SIZE 0, so that header blocks have no state: equal bytes
mean equal headers, and each distinct block is decoded once.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import hpack

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20
CANCEL: Final = 8  # error code
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
DEFAULT_WINDOW: Final = 65_535
DEFAULT_FRAME_SIZE: Final = 16_384
LARGEST_WINDOW: Final = 2**31 - 1
_FRAME_HEAD: Final = 9


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, stream.to_bytes(4, "big"), payload)


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in values.items()))


def opening(values: dict[int, int]) -> bytes:
    """What a side sends first (after the client's preface): no table, all the window there is."""
    window = frame(WINDOW_UPDATE, 0, 0, (LARGEST_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big"))
    return settings({HEADER_TABLE_SIZE: 0, INITIAL_WINDOW_SIZE: LARGEST_WINDOW} | values) + window


class FrameReader:
    """Cuts a stream of bytes into frames."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Give the complete frames: (kind, flags, stream, payload). Must be read to its end before the next feed."""
        if self._rest:
            data = self._rest + data
        at, size = 0, len(data)
        while size - at >= _FRAME_HEAD:
            end = at + _FRAME_HEAD + int.from_bytes(data[at : at + 3], "big")
            if end > size:
                break
            stream = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF
            yield data[at + 3], data[at + 4], stream, data[at + _FRAME_HEAD : end]
            at = end
        self._rest = data[at:]


def unpadded(flags: int, payload: bytes) -> bytes:
    """The payload of a HEADERS frame without padding and priority."""
    if flags & PADDED:
        payload = payload[1 : len(payload) - payload[0]]
    return payload[5:] if flags & PRIORITY else payload


@lru_cache(maxsize=4096)
def decode_headers(block: bytes) -> dict[str, str]:
    """The headers of a block that uses no dynamic table. Raises: ValueError."""
    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = 4096
    try:
        return {str(name): str(value) for name, value in decoder.decode(block)}
    except (hpack.HPACKError, UnicodeDecodeError) as exc:
        raise ValueError(f"cannot read the header block: {exc}") from exc


def encode_headers(headers: list[tuple[str, str]]) -> bytes:
    """A block of literals that are never indexed: it stays valid for every request of every connection."""
    return b"".join(b"\x10" + _text(name) + _text(value) for name, value in headers)


def _text(text: str) -> bytes:
    raw = text.encode()
    length = len(raw)
    if length < 127:
        return bytes([length]) + raw
    # RFC 7541, 5.1: integers that do not fit into the prefix of 7 bits.
    head, length = bytearray([127]), length - 127
    while length >= 128:
        head.append(length % 128 + 128)
        length //= 128
    head.append(length)
    return bytes(head) + raw
