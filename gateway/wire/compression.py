"""gzip and deflate, as HTTP and gRPC use them."""

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from gateway.errors import Cancelled, GatewayError, InternalError, InvalidArgument, Overloaded, TooLarge
from gateway.turns import pause
from gateway.wire.tensors import Buffer

WINDOW_BITS: Final = {b"gzip": 31, b"deflate": 15}
_LEVEL: Final = 1
_LONGEST_ACCEPTED: Final = 1 << 10  # of an Accept-Encoding: to read one of 32 kB takes 2 ms
_MOST_MEMBERS: Final = 10_000  # of a gzip body: each takes its time, also an empty one of 20 bytes
_LOOK_BYTES: Final = 4 << 10
_PIECE_BYTES: Final = 1 << 20  # a shorter one would take the interpreter back as often
_MEMBERS_AT_ONCE: Final = 128

log = logging.getLogger(__name__)

Work = Callable[[], Buffer]
Outcome = Buffer | GatewayError


def choose_encoding(accepted: bytes) -> bytes:
    """The best of gzip and deflate by an Accept-Encoding header of a sane length; b"" for neither. gzip wins a tie."""
    if accepted == b"gzip" or accepted == b"deflate":
        return accepted
    if len(accepted) > _LONGEST_ACCEPTED:
        return b""
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


def outcome_of(work: Work) -> Outcome:
    """What work gives, or why it failed: without the frames that an exception holds, and they the body, perhaps in a circle."""
    try:
        return work()
    except GatewayError as exc:
        return exc.without_frames()
    except MemoryError:
        return Overloaded("there is no memory to inflate or compress this: try again", retry_after_s=1.0)
    except Exception:
        log.exception("a body could not be inflated or compressed")
        return InternalError("internal error")


def inflate(encoding: bytes, body: Buffer, most_bytes: int, wanted: Callable[[], bool] = lambda: True) -> Buffer:
    """Decompress at most most_bytes. deflate: with zlib's header, as the standard says, or without, as some clients do.

    On a thread it leaves the interpreter to others: zlib holds it while it puts its output together, so it is asked for little
    at a time. wanted: whether somebody waits for it yet. Raises: TooLarge, InvalidArgument; Cancelled, once nobody does.
    """
    name = encoding.decode()
    bits = WINDOW_BITS[encoding]
    if encoding == b"deflate" and not _has_zlib_header(body):
        bits = -15
    data = memoryview(body)
    out = _Collected(most_bytes, wanted)
    at = 0
    # zlib copies what it was given behind a member's end. So it is given much of the body for the first, which mostly is the
    # only one, then a little more than the one before has taken: time is linear in the body.
    look_bytes = _PIECE_BYTES
    try:
        for number in range(_MOST_MEMBERS):
            if not number % _MEMBERS_AT_ONCE:
                out.go_on()
            began = at
            member = zlib.decompressobj(bits)
            while not member.eof:
                look = data[at : at + look_bytes]
                _inflate(member, look, out)
                at += len(look) - len(member.unused_data)
                if not member.eof and at == len(data):
                    raise InvalidArgument(f"the request body ends within its {name} data")
                look_bytes = min(2 * look_bytes, _PIECE_BYTES)
            if at == len(data):
                return out.whole()
            if encoding != b"gzip":  # only gzip may have several members
                raise InvalidArgument(f"{len(data) - at} bytes follow the {name} data of the request body")
            look_bytes = min(max(_LOOK_BYTES, 2 * (at - began)), _PIECE_BYTES)
    except zlib.error as exc:
        raise InvalidArgument(f"the request body is no valid {name} data: {exc}") from exc
    raise InvalidArgument(f"the request body has more than {_MOST_MEMBERS} gzip members: expected so many at most")


def _inflate(member: "zlib._Decompress", look: Buffer, out: "_Collected") -> None:
    """Have all of what a part of the body inflates to collected."""
    while True:
        piece = member.decompress(look, _PIECE_BYTES)
        out.add(piece)
        if len(piece) == _PIECE_BYTES:
            out.go_on()
        look = member.unconsumed_tail
        if member.eof or (not look and len(piece) < _PIECE_BYTES):
            return


class _Collected:
    """Pieces of bytes, in one buffer at the end: to join them then would hold the interpreter for long."""

    def __init__(self, most_bytes: int, wanted: Callable[[], bool]) -> None:
        self._most_bytes = most_bytes
        self._wanted = wanted
        self._pieces: list[bytes] = []
        self._size = 0
        self._buffer: np.ndarray | None = None  # once there is much

    def add(self, piece: bytes) -> None:
        """Raises: TooLarge."""
        end = self._size + len(piece)
        if end > self._most_bytes:
            expected = f"expected at most {self._most_bytes} bytes (server.limits.body_bytes)"
            raise TooLarge(f"decompressed request body: {expected}")
        if self._buffer is None and end <= _PIECE_BYTES:
            self._pieces.append(piece)
        else:
            if self._buffer is None or end > len(self._buffer):
                self._grow(end)
            self._buffer[self._size : end] = np.frombuffer(piece, np.uint8)  # type: ignore[index]  # it is there now
        self._size = end

    def go_on(self) -> None:
        """Let others have their turn. Raises: Cancelled, once nobody waits for these."""
        pause()
        if not self._wanted():
            raise Cancelled("nobody waits for the request any more")

    def _grow(self, least_bytes: int) -> None:
        held = np.frombuffer(b"".join(self._pieces), np.uint8) if self._buffer is None else self._buffer
        larger = np.empty(min(4 * least_bytes, self._most_bytes), np.uint8)  # memory that is not written to costs nothing
        larger[: self._size] = held[: self._size]
        self._pieces.clear()
        self._buffer = larger

    def whole(self) -> Buffer:
        if self._buffer is None:
            return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        return memoryview(self._buffer).toreadonly()[: self._size]  # type: ignore[arg-type]  # an ndarray is a buffer


def _has_zlib_header(body: Buffer) -> bool:
    """RFC 1950, section 2.2: method 8, and the first two bytes are a multiple of 31."""
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def deflate(encoding: bytes, parts: Sequence[Buffer]) -> bytes:
    """Compress a body for the wire: speed over ratio."""
    compressor = zlib.compressobj(_LEVEL, wbits=WINDOW_BITS[encoding])
    out: list[bytes] = []
    for part in parts:
        for at in range(0, len(part), _PIECE_BYTES):
            out.append(compressor.compress(memoryview(part)[at : at + _PIECE_BYTES]))
            pause()
    return b"".join([*out, compressor.flush()])
