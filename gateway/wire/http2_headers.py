"""Header blocks of HTTP/2 (RFC 7541): those sent are literals that need no table, those read are hpack's to decode."""

from typing import Final

import hpack
from hpack.table import HeaderTable

from gateway.wire.http2_frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, Broken

Headers = dict[bytes, bytes]

DEFAULT_TABLE_BYTES: Final = 4096  # RFC 9113 6.5.2
SIZE_UPDATE: Final = b"\x20"  # RFC 7541 6.3: from here on the table is empty, and stays so
_BLOCKS_REMEMBERED: Final = 256
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


class HeaderReader:
    """Decodes the header blocks of one connection, in their order.

    known: blocks that the table as it is has decoded before. Most are among them, since the calls of a client differ in little.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of a decoded block, as 6.5.2 of RFC 9113 counts them."""
        self._most_bytes = most_bytes
        self._decoder = hpack.Decoder(max_header_list_size=most_bytes * TOLERANCE)
        self._table = self._decoder.header_table = _Table()
        self.known: dict[bytes, Headers] = {}

    def read(self, block: bytes) -> Headers | None:
        """None: more than the limit. Raises: Broken."""
        table = self._table
        table.changed = False
        size_before = table.maxsize
        try:
            fields = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError as exc:
            raise Broken(ENHANCE_YOUR_CALM, "far too many headers (server.limits.header_bytes)") from exc
        except (hpack.HPACKError, UnicodeDecodeError, IndexError, ValueError) as exc:
            raise Broken(COMPRESSION_ERROR, "a header block that cannot be decoded") from exc
        if table.changed or table.maxsize != size_before or len(self.known) >= _BLOCKS_REMEMBERED:
            self.known.clear()
        if sum(len(name) + len(value) + 32 for name, value in fields) > self._most_bytes:
            return None
        headers = dict(fields)
        if not table.changed and len(block) <= LONGEST_REMEMBERED:
            self.known[block] = headers
        return headers
