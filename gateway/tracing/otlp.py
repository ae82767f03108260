"""Spans as bytes of OTLP, straight from ours; pure.

Why not by the SDK: docs/decisions/otlp-bytes.md. What is the same for all spans of a process, the resource and the scope, comes
encoded from there. Field numbers:
https://github.com/open-telemetry/opentelemetry-proto, trace.proto and common.proto.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from struct import Struct
from typing import Final

from gateway.tracing.spans import Kind, Span, Spans
from gateway.types import Attributes, SpanContext

_KIND: Final[dict[Kind, int]] = {"internal": 1, "server": 2, "client": 3}
_OK: Final = b"\x7a\x00"  # Span.status (15): unset
_FAILED: Final = b"\x7a\x02\x18\x02"  # its code (3): an error
_HERE: Final = b"\x85\x01\x00\x01\x00\x00"  # Span.flags (16): it is known that the parent is of this process
_REMOTE: Final = b"\x85\x01\x00\x03\x00\x00"  # that it is of another
_LINK_HERE: Final = b"\x35\x00\x01\x00\x00"  # Link.flags (6)

# Span: trace_id (1), span_id (2), start_time_unix_nano (7), end_time_unix_nano (8)
_PLACE: Final = Struct("<2s16s2s8ssQsQ").pack
_PARENT: Final = b"\x22\x08"  # parent_span_id (4)
# Span.links (13): trace_id (1), span_id (2), flags; 33 bytes
_LINK: Final = Struct("4s16s2s8s5s").pack
# All of these, but for the tag of the first, as they come in a station.
_STATION: Final = Struct("<18s8s11sQsQ")
_STATION_PACK: Final = _STATION.pack


def spans_bytes(traces: Iterable[Spans], unix_ns: int, random_bytes: Callable[[int], bytes]) -> bytes:
    """As ScopeSpans has them. unix_ns: of the Unix epoch's clock, when `Clock.now_ns` was 0. random_bytes: so many, for ids."""
    pieces: list[bytes] = []
    fixed = bytes.fromhex
    for spans in traces:
        own, stations = spans.own, spans.stations
        context = own.context
        own_ids = fixed(context.trace_id + context.span_id)
        trace_id, span_id = own_ids[:16], own_ids[16:]
        body = _span(own, trace_id, span_id, unix_ns)
        pieces += (b"\x12", _varint(len(body)), body)  # ScopeSpans.spans (2)
        before_id, behind_id = trace_id + b"\x12\x08", b"%b%b\x39" % (_PARENT, span_id)
        plain = not context.state and not spans.failed
        ids = fixed(spans.station_id) or random_bytes(8 * len(stations))
        at = 0
        for name, start_ns, end_ns, links in stations:
            until = at + 8
            pieces += (
                _HEADS[name] if plain and not links else _station(name, context.state, links, spans.failed),
                _STATION_PACK(before_id, ids[at:until], behind_id, start_ns + unix_ns, b"\x41", end_ns + unix_ns),
            )
            at = until
    return b"".join(pieces)


def _station(name: str, state: str, links: tuple[SpanContext, ...], failed: bool) -> bytes:
    """What comes before the ids and times of a station, its length first."""
    head = _alike(name, "internal", failed, False, ()) + b"".join(map(_link, links))
    if state:
        head += _field(b"\x1a", state.encode())
    head += b"\x0a\x10"
    return b"\x12" + _varint(len(head) + _STATION.size) + head


def request_bytes(resource: bytes, scope: bytes, spans: bytes) -> bytes:
    """An ExportTraceServiceRequest. resource, scope: ResourceSpans and ScopeSpans without spans. spans: as above."""
    return _field(b"\x0a", resource + _field(b"\x12", scope + spans))


def _span(span: Span, trace_id: bytes, span_id: bytes, unix_ns: int) -> bytes:
    pieces = [
        _PLACE(b"\x0a\x10", trace_id, b"\x12\x08", span_id, b"\x39", span.start_ns + unix_ns, b"\x41", span.end_ns + unix_ns),
        _alike(span.name, span.kind, span.failed, span.remote, span.attributes),
    ]
    if span.parent_id:
        pieces += (_PARENT, bytes.fromhex(span.parent_id))
    if span.context.state:
        pieces.append(_field(b"\x1a", span.context.state.encode()))
    if span.ids:
        pieces += [_id(key, value) for key, value in span.ids]
    if span.links:
        pieces += [_link(link) for link in span.links]
    return b"".join(pieces)


@lru_cache(1024)  # most are those of the models and lanes that there are
def _alike(name: str, kind: Kind, failed: bool, remote: bool, attributes: Attributes) -> bytes:
    """What many spans have in common."""
    told = b"".join([_attribute(key, value) for key, value in attributes])
    status, flags = _FAILED if failed else _OK, _REMOTE if remote else _HERE
    return _field(b"\x2a", name.encode()) + b"\x30%c" % _KIND[kind] + told + status + flags


def _attribute(key: str, value: str | int) -> bytes:
    any_value = b"\x18" + _varint(value) if isinstance(value, int) else _field(b"\x0a", value.encode())
    return _field(b"\x4a", _field(b"\x0a", key.encode()) + _field(b"\x12", any_value))


def _id(key: str, value: str) -> bytes:
    """An attribute whose value nothing else has: what comes before it is known by its length."""
    told = value.encode()
    return _before_id(key, len(told)) + told


@lru_cache(256)
def _before_id(key: str, size: int) -> bytes:
    head = _field(b"\x0a", key.encode())
    before = b"\x0a" + _varint(size)
    before = b"\x12" + _varint(len(before) + size) + before
    return b"\x4a" + _varint(len(head) + len(before) + size) + head + before


def _link(context: SpanContext) -> bytes:
    ids = bytes.fromhex(context.trace_id + context.span_id)
    return _LINK(b"\x6a\x21\x0a\x10", ids[:16], b"\x12\x08", ids[16:], _LINK_HERE)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """value: from 0."""
    return _SHORT[value] if value < len(_SHORT) else _long_varint(value)


def _long_varint(value: int) -> bytes:
    groups = []
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*groups, value))


_SHORT: Final = tuple(map(_long_varint, range(1024)))
_HEADS: Final = {name: _station(name, "", (), False) for name in ("decode", "queue", "batch_wait", "compute", "encode")}
