"""gzip and deflate, as HTTP and gRPC use them."""

import zlib
from collections.abc import Sequence
from typing import Final

from gateway.errors import InvalidArgument, TooLarge
from gateway.wire.tensors import Buffer

WINDOW_BITS: Final = {b"gzip": 31, b"deflate": 15}
_LEVEL: Final = 1
_MOST_MEMBERS: Final = 10_000  # of a gzip body: each takes its time, also an empty one of 20 bytes
_LOOK_BYTES: Final = 4 << 10


def choose_encoding(accepted: bytes) -> bytes:
    """The best of gzip and deflate by an Accept-Encoding header; b"" for neither. gzip wins a tie."""
    if accepted == b"gzip" or accepted == b"deflate":
        return accepted
    weights: dict[bytes, float] = {}
    for item in accepted.lower().split(b","):
        name, *parameters = item.split(b";")
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition(b"=")
            if key.strip() == b"q":
                try:
                    weight = float(value)
                except ValueError:
                    weight = 0.0
        weights[name.strip()] = weight
    anything = weights.get(b"*", 0.0)
    best, best_weight = b"", 0.0
    for encoding in (b"gzip", b"deflate"):
        weight = weights.get(encoding, anything)
        if weight > best_weight:
            best, best_weight = encoding, weight
    return best if best_weight >= weights.get(b"identity", 0.0) else b""


def inflate(encoding: bytes, body: Buffer, most_bytes: int) -> bytes:
    """Decompress at most most_bytes. deflate: with zlib's header, as the standard says, or without, as some clients do.

    Raises: TooLarge, InvalidArgument.
    """
    name = encoding.decode()
    bits = WINDOW_BITS[encoding]
    if encoding == b"deflate" and not _has_zlib_header(body):
        bits = -15
    data = memoryview(body)
    out: list[bytes] = []
    left = most_bytes + 1
    at = 0
    # zlib copies what it was given behind a member's end. So it is given all of the body for the first, which mostly is the
    # only one, then a little more than the one before has taken: time is linear in the body.
    look_bytes = len(data)
    try:
        for _ in range(_MOST_MEMBERS):
            began = at
            member = zlib.decompressobj(bits)
            while not member.eof:
                look = data[at : at + look_bytes]
                piece = member.decompress(look, left)
                out.append(piece)
                left -= len(piece)
                if left <= 0:
                    raise TooLarge(f"decompressed request body: expected at most {most_bytes} bytes (server.limits.body_bytes)")
                at += len(look) - len(member.unused_data)
                if not member.eof and at == len(data):
                    raise InvalidArgument(f"the request body ends within its {name} data")
                look_bytes *= 2
            if at == len(data):
                return out[0] if len(out) == 1 else b"".join(out)
            if encoding != b"gzip":  # only gzip may have several members
                raise InvalidArgument(f"{len(data) - at} bytes follow the {name} data of the request body")
            look_bytes = max(_LOOK_BYTES, 2 * (at - began))
    except zlib.error as exc:
        raise InvalidArgument(f"the request body is no valid {name} data: {exc}") from exc
    raise InvalidArgument(f"the request body has more than {_MOST_MEMBERS} gzip members: expected so many at most")


def _has_zlib_header(body: Buffer) -> bool:
    """RFC 1950, section 2.2: method 8, and the first two bytes are a multiple of 31."""
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def deflate(encoding: bytes, parts: Sequence[Buffer]) -> bytes:
    """Compress a body for the wire: speed over ratio."""
    compressor = zlib.compressobj(_LEVEL, wbits=WINDOW_BITS[encoding])
    return b"".join([*(compressor.compress(part) for part in parts), compressor.flush()])
