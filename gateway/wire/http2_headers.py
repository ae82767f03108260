"""Header blocks of HTTP/2 (RFC 7541): those sent are literals that need no table, those read are hpack's to decode."""

from typing import Final

import hpack
from hpack.hpack import decode_integer
from hpack.table import HeaderTable

from gateway.wire.http2_frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, Broken
from gateway.wire.request_ids import OTHER_EACH_TIME

Headers = dict[bytes, bytes]

DEFAULT_TABLE_BYTES: Final = 4096  # RFC 9113 6.5.2
SIZE_UPDATE: Final = b"\x20"  # RFC 7541 6.3: from here on the table is empty, and stays so
_BLOCKS_REMEMBERED: Final = 256
_SHAPES_REMEMBERED: Final = 4
LONGEST_REMEMBERED: Final = 1024  # bytes of such a block
# What is longer than the limit is decoded, to keep the table, and refused; what is so much longer ends the connection.
TOLERANCE: Final = 4


def header_block(*headers: tuple[bytes, bytes], status: int | None = None) -> bytes:
    """RFC 7541 6.2.2: fields as literals that enter no table. status: the pseudo-header that begins a response."""
    parts = []
    if status == 200:
        parts.append(b"\x88")  # RFC 7541 appendix A, entry 8
    elif status is not None:
        parts.append(b"\x08\x03%d" % status)
    for name, value in headers:
        parts += (b"\x00", _string_length(len(name)), name, _string_length(len(value)), value)
    return b"".join(parts)


def _string_length(length: int) -> bytes:
    """RFC 7541 5.1, with a prefix of 7 bits and no Huffman coding."""
    if length < 127:
        return bytes((length,))
    out = bytearray((127,))
    length -= 127
    while length >= 128:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out)


class _Table(HeaderTable):
    """hpack's table, which also tells that it changed."""

    changed = False

    def add(self, name: bytes, value: bytes) -> None:
        self.changed = True
        super().add(name, value)


_Shape = tuple[tuple[int, int], ...]
"""Where the ids of a block are: begin and end of each, in their order."""


class HeaderReader:
    """Decodes the header blocks of one connection, in their order.

    known: blocks that the table as it is has decoded before. Most are among them, since the calls of a client differ in little.
    What only differs from one in the ids of requests and traces is found by `alike`.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of a decoded block, as 6.5.2 of RFC 9113 counts them."""
        self._most_bytes = most_bytes
        self._decoder = hpack.Decoder(max_header_list_size=most_bytes * TOLERANCE)
        self._table = self._decoder.header_table = _Table()
        self.known: dict[bytes, Headers] = {}
        self._alike: dict[tuple[tuple[bytes, ...], _Shape], tuple[list[bytes], Headers]] = {}  # by all but the ids; their names
        self._shapes: tuple[_Shape, ...] = ()

    def read(self, block: bytes) -> Headers | None:
        """None: more than the limit. Raises: Broken."""
        table = self._table
        table.changed = False
        size_before = table.maxsize
        try:
            fields = list(self._decoder.decode(block, raw=True))
        except hpack.OversizedHeaderListError as exc:
            raise Broken(ENHANCE_YOUR_CALM, "far too many headers (server.limits.header_bytes)") from exc
        except (hpack.HPACKError, IndexError, ValueError) as exc:
            raise Broken(COMPRESSION_ERROR, "a header block that cannot be decoded") from exc
        if table.changed or table.maxsize != size_before or len(self.known) + len(self._alike) >= _BLOCKS_REMEMBERED:
            self.known.clear()
            self._alike.clear()
            self._shapes = ()
        if sum(len(name) + len(value) + 32 for name, value in fields) > self._most_bytes:
            return None
        headers = dict(fields)
        if not table.changed and len(block) <= LONGEST_REMEMBERED:
            self._remember(block, headers, unique=len(headers) == len(fields))
        return headers

    def alike(self, block: bytes) -> Headers | None:
        """Those of a block that, but for its ids, was decoded before; None: there was none."""
        size = len(block)
        for shape in self._shapes:
            if shape[-1][1] <= size:
                found = self._alike.get((_without(block, shape), shape))
                if found is not None:
                    names, headers = found
                    return {**headers, **{name: block[begin:end] for name, (begin, end) in zip(names, shape, strict=True)}}
        return None

    def forget(self, block: bytes) -> None:
        """One that was read last: it will be read again when it comes again."""
        self.known.pop(block, None)
        for shape in self._shapes:
            self._alike.pop((_without(block, shape), shape), None)

    def _remember(self, block: bytes, headers: Headers, *, unique: bool) -> None:
        """unique: each of its headers is there once."""
        ids = _ids(block) if unique else []
        if not ids:
            self.known[block] = headers
            return
        names = [name for name, _, _ in ids]
        shape = tuple([(begin, end) for _, begin, end in ids])
        if shape not in self._shapes:
            self._shapes = (shape, *self._shapes[: _SHAPES_REMEMBERED - 1])
        self._alike[_without(block, shape), shape] = names, headers


def _without(block: bytes, shape: _Shape) -> tuple[bytes, ...]:
    at = 0
    pieces: list[bytes] = []
    for begin, end in shape:
        pieces.append(block[at:begin])
        at = end
    pieces.append(block[at:])
    return tuple(pieces)


def _ids(block: bytes) -> list[tuple[bytes, int, int]]:
    """The ids that stand in a block as they are, and enter no table: name, begin and end of each value. block: was decoded.

    Nothing else of the block changes what it means with their bytes: strings are told by their lengths.
    """
    at = 0
    found: list[tuple[bytes, int, int]] = []
    while at < len(block):
        first = block[at]
        prefix = 7 if first & 0x80 else 6 if first & 0x40 else 5 if first & 0x20 else 4  # RFC 7541, section 6
        index, taken = decode_integer(block[at:], prefix)
        at += taken
        if prefix in (7, 5):  # no literal
            continue
        name = b""
        if not index:
            plain, begin, at = _string(block, at)
            name = block[begin:at] if plain else b""
        plain, begin, at = _string(block, at)
        if plain and prefix == 4 and name in OTHER_EACH_TIME:
            found.append((name, begin, at))
    return found


def _string(block: bytes, at: int) -> tuple[bool, int, int]:
    """Whether one is there as it is, not in Huffman's code; its begin and end (5.2)."""
    length, taken = decode_integer(block[at:], 7)
    return not block[at] & 0x80, at + taken, at + taken + length
