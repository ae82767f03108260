"""Heads of HTTP/1.1 requests that came before, by which all connections of a listener know them again.

Clients of many models, or with many connections, send few heads again and again, and a connection that knew its own last one
only would parse nearly each, or keep a copy of what all others have. They are looked up by hash, so that how long it takes
tells nobody how much of another's head he has guessed. When there are many they are forgotten.
"""

from typing import Final

import msgspec

_MOST: Final = 1024
_MOST_BYTES: Final = 1 << 10  # of one
_PLACES: Final = 4  # of heads with one first line
_LONGEST_LENGTH: Final = 15  # digits


class KnownHead(msgspec.Struct, eq=False):
    """What a head means. begin, end: what is before and behind the number in its Content-Length.

    head, headers, length: of the last one with that meaning, whose number may have been another; length with its body.
    """

    begin: bytes
    end: bytes
    method: bytes
    target: bytes
    head: bytes
    length: int
    headers: dict[bytes, bytes]

    def body(self, data: bytes, most_bytes: int) -> bytes | None:
        """That of the request that these bytes are, if it is one with such a head; then `headers` are its own, too."""
        if data.startswith(self.head) and len(data) == self.length:
            return data[len(self.head) :]
        begin = len(self.begin)
        if data[:begin] != self.begin:
            return None
        end = data.find(b"\r", begin, begin + _LONGEST_LENGTH + 1)
        length = data[begin:end]
        if end < 0 or not length.isdigit() or not data.startswith(self.end, end):
            return None
        at = end + len(self.end)
        body = data[at:]
        if len(body) != int(length) or len(body) > most_bytes:
            return None
        self.head, self.length = data[:at], len(data)
        self.headers = {**self.headers, b"content-length": length}
        return body


class KnownHeads:
    """Those of a listener, whose limits they keep to. On the event loop's thread.

    by_head: each by the head that it was added with, which is its own while the same length is.
    """

    def __init__(self) -> None:
        self.by_head: dict[bytes, KnownHead] = {}
        self._heads: dict[tuple[bytes, bytes], KnownHead] = {}  # by begin and end
        self._places: dict[bytes, tuple[int, ...]] = {}  # of the number, by the first line

    def __repr__(self) -> str:
        return f"<KnownHeads: {len(self._heads)}>"

    def find(self, data: bytes) -> KnownHead | None:
        """What these bytes begin with, but for the number, if that is known."""
        for at in self._places.get(data[: data.find(b"\r")], ()):
            end = data.find(b"\r", at, at + _LONGEST_LENGTH + 1)
            known = self._heads.get((data[:at], data[end : data.find(b"\r\n\r\n", end) + 4]))
            if known is not None:
                return known
        return None

    def add(self, known: KnownHead) -> None:
        if len(known.head) > _MOST_BYTES:
            return
        if len(self.by_head) >= _MOST:  # of `_heads` there are no more: one may be added with several lengths
            self._heads.clear()
            self.by_head.clear()
            self._places.clear()
        self._heads[known.begin, known.end] = self.by_head[known.head] = known
        line, at = known.begin[: known.begin.find(b"\r")], len(known.begin)
        places = self._places.get(line, ())
        if at not in places:
            self._places[line] = (at, *places[: _PLACES - 1])
