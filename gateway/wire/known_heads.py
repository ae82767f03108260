"""Heads of HTTP/1.1 requests that came before, by which all connections of a listener know them again.

Clients of many models, or with many connections, send few heads again and again, and a connection that knew its own last one
only would parse nearly each, or keep a copy of what all others have. A head may differ from one that is known in the length of
its body, and in the ids that proxies and clients that are traced give each request. They are looked up by hash, so that how
long it takes tells nobody how much of another's head he has guessed. When there are many they are forgotten.
"""

import re
from typing import Final

import msgspec

from gateway.wire.request_ids import OTHER_EACH_TIME

_MOST: Final = 1024
_MOST_BYTES: Final = 1 << 10  # of one
_PLACES: Final = 4  # of heads with one first line
_LONGEST_LENGTH: Final = 15  # digits
_CONTENT_LENGTH: Final = b"content-length"
_VALUE: Final = re.compile(rb"[!-~]+")
_OTHER_EACH_TIME: Final = re.compile(
    rb"\r\n(content-length|%b): ?([!-~]+)(?=\r\n)" % b"|".join(sorted(OTHER_EACH_TIME)), re.IGNORECASE
)
_Place = tuple[tuple[int, int], ...]
"""Of what is another each time: behind how many bytes, and its size, as `Varying` has it."""


class Varying(msgspec.Struct, frozen=True):
    """A field whose value may be another. before: the bytes from the one before it. size: of the value; 0: of a number, any."""

    before: bytes
    name: bytes
    size: int


class KnownHead(msgspec.Struct, eq=False):
    """What a head means. fields: those that may be others, and end: what is behind the last.

    head, headers, length: of the last one with that meaning, whose values may have been others; length with its body.
    """

    fields: tuple[Varying, ...]
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
        at = 0
        values: dict[bytes, bytes] = {}
        for field in self.fields:
            before, size = field.before, field.size
            if not data.startswith(before, at):
                return None
            at += len(before)
            end = at + size if size else data.find(b"\r", at, at + _LONGEST_LENGTH + 1)
            value = values[field.name] = data[at:end]
            if end < 0 or not (_VALUE.fullmatch(value) if size else value.isdigit()):
                return None
            at = end
        if not data.startswith(self.end, at):
            return None
        at += len(self.end)
        body = data[at:]
        if len(body) != int(values[_CONTENT_LENGTH]) or len(body) > most_bytes:
            return None
        self.head, self.length = data[:at], len(data)
        self.headers = {**self.headers, **values}
        return body


def fields_of(head: bytes, headers: dict[bytes, bytes]) -> tuple[tuple[Varying, ...], bytes] | None:
    """What may be another in a head, and what is behind it; None: it has no length. headers: as they were read."""
    fields: list[Varying] = []
    at = 0
    for found in _OTHER_EACH_TIME.finditer(head):
        name, value = found[1].lower(), found[2]
        if headers.get(name) == value:  # else it is there several times
            fields.append(Varying(head[at : found.start(2)], name, 0 if name == _CONTENT_LENGTH else len(value)))
            at = found.end()
    return (tuple(fields), head[at:]) if any(not field.size for field in fields) else None


class KnownHeads:
    """Those of a listener, whose limits they keep to. On the event loop's thread.

    by_head: each by the head that it was added with, which is its own while its values are.
    """

    def __init__(self) -> None:
        self.by_head: dict[bytes, KnownHead] = {}
        self._heads: dict[tuple[tuple[bytes, ...], _Place], KnownHead] = {}  # by what is always the same, and where
        self._places: dict[bytes, tuple[_Place, ...]] = {}  # by the first line

    def __repr__(self) -> str:
        return f"<KnownHeads: {len(self._heads)}>"

    def find(self, data: bytes) -> KnownHead | None:
        """What these bytes begin with, but for what is another each time, if that is known."""
        for place in self._places.get(data[: data.find(b"\r")], ()):
            at = 0
            same: list[bytes] = []
            for length, size in place:
                same.append(data[at : at + length])
                at += length
                at = at + size if size else data.find(b"\r", at, at + _LONGEST_LENGTH + 1)
            same.append(data[at : data.find(b"\r\n\r\n", at) + 4])
            known = self._heads.get((tuple(same), place))
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
        place = tuple([(len(field.before), field.size) for field in known.fields])
        same = (*[field.before for field in known.fields], known.end)
        self._heads[same, place] = self.by_head[known.head] = known
        line = known.head[: known.head.find(b"\r")]
        places = self._places.get(line, ())
        if place not in places:
            self._places[line] = (place, *places[: _PLACES - 1])
