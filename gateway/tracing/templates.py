"""What waits to be sent, as bytes of OTLP; pure. Most traces differ in ids and times alone: these are put into one's bytes.

A template is made of what `spans_bytes` gives for a sample, whose ids and times are marks: values that nothing else has. So it
cannot differ from what that gives, and all else (errors, several batches, states) goes that way. It takes a fifth of the time.
"""

import re
from binascii import unhexlify
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from struct import Struct, pack
from typing import Any, Final

from gateway.tracing.context import write
from gateway.tracing.otlp import spans_bytes
from gateway.tracing.spans import Spans, spans_of
from gateway.types import Attributes, BatchEnd, BatchTrace, RequestEnd, RequestTrace, SpanContext

_SHORTEST: Final = 8  # bytes of a request's id: a shorter mark might stand in the sample by chance

Fill = Callable[[tuple[Any, ...]], bytes]


def trace_bytes(trace: RequestTrace | BatchTrace, unix_ns: int, random_bytes: Callable[[int], bytes]) -> tuple[int, bytes]:
    """How many spans are of it, and these as ScopeSpans has them. unix_ns, random_bytes: as for `spans_bytes`."""
    if isinstance(trace, RequestTrace) and len(trace.batches) == 1:
        batch, end = trace.batches[0], trace.end
        ran = batch.end
        if (
            ran is not None
            and end is not None
            and batch.ended is None
            and batch.kind == "internal"
            and not (end.error or ran.error or trace.state or end.id or batch.links)
            and len(end.request_id) >= _SHORTEST
        ):
            return 7, _plain(trace, end, batch, ran, unix_ns, random_bytes)
    found = spans_of(trace)
    return sum(map(len, found)), spans_bytes(found, unix_ns, random_bytes)


def _plain(
    trace: RequestTrace, end: RequestEnd, batch: BatchTrace, ran: BatchEnd, unix_ns: int, random_bytes: Callable[[int], bytes]
) -> bytes:
    """Of a request that went well, in one batch in which no other is traced."""
    own = trace.own
    trace_id, span_id = unhexlify(own[3:35]), unhexlify(own[36:52])
    ids = random_bytes(48)
    in_batch = unhexlify(batch.ids) if batch.ids else ids[32:]
    closed_ns, started_ns = batch.closed_ns + unix_ns, ran.started_ns + unix_ns
    fill_batch = _batch(batch.name, ran.about)
    fill_request = _request(end.operation, end.status, end.model, end.rows, len(end.request_id), bool(trace.parent_id))
    finished_ns, returned_ns = ran.finished_ns + unix_ns, ran.returned_ns + unix_ns
    return fill_batch(
        (trace_id, span_id, in_batch[:8], in_batch[8:], closed_ns, started_ns, finished_ns, returned_ns)
    ) + fill_request(
        (
            trace_id, span_id, unhexlify(trace.parent_id), ids[:8], ids[8:16], ids[16:24], ids[24:32], end.request_id,
            end.arrival_ns + unix_ns, end.decoded_ns + unix_ns, closed_ns, started_ns, end.encoding_ns + unix_ns,
            end.ended_ns + unix_ns,
        )
    )  # fmt: skip


@lru_cache(1024)
def _batch(name: str, about: tuple[str | int, ...]) -> Fill:
    trace_id, span_id, own, session = (_mark(number, size) for number, size in enumerate((16, 8, 8, 8)))
    closed_ns, started_ns, finished_ns, returned_ns = (_time(number) for number in range(4))
    noted = BatchTrace(
        _written(trace_id, span_id),
        "",
        None,
        name,
        closed_ns,
        ids=(own + session).hex(),
        end=BatchEnd(started_ns, finished_ns, returned_ns, "", about),
    )
    return _template(spans_of(noted), (trace_id, span_id, own, session), (closed_ns, started_ns, finished_ns, returned_ns))


@lru_cache(256)
def _request(operation: str, status: tuple[str, int], model: Attributes, rows: int, id_size: int, has_parent: bool) -> Fill:
    sizes = (16, 8, 8 * has_parent, 8, 8, 8, 8, id_size)
    ids = [_mark(number, size) for number, size in enumerate(sizes)]
    trace_id, span_id, parent_id, *stations, request_id = ids
    times = [_time(number) for number in range(6)]
    arrival_ns, decoded_ns, closed_ns, started_ns, encoding_ns, ended_ns = times
    own = _written(trace_id, span_id)
    batch = BatchTrace(own, "", lambda _: None, "batch", closed_ns, end=BatchEnd(started_ns, 0, 0))
    end = RequestEnd(
        operation=operation, error="", status=status, model=model, rows=rows, request_id=request_id, id="",
        arrival_ns=arrival_ns, decoded_ns=decoded_ns, encoding_ns=encoding_ns, ended_ns=ended_ns,
    )  # fmt: skip
    noted = RequestTrace(own, lambda _: None, parent_id.hex(), "", [batch], end)
    return _template(spans_of(noted), ids, times, b"".join(stations))


def _template(spans: list[Spans], ids: Sequence[bytes], times: Sequence[int], drawn: bytes = b"") -> Fill:
    """What puts ids and times, in their order, in the place of these marks. drawn: ids that are at random."""
    marks = [*ids, *[pack("<Q", time) for time in times]]
    sample = spans_bytes(spans, 0, lambda size: drawn[:size])
    pieces = re.split(b"(%b)" % b"|".join(map(re.escape, filter(None, marks))), sample)
    places = [marks.index(piece) for piece in pieces[1::2]]
    sizes = ["Q" if at % 2 and places[at // 2] >= len(ids) else f"{len(piece)}s" for at, piece in enumerate(pieces)]
    pack_all, chosen = Struct("<" + "".join(sizes)).pack, itemgetter(*places)

    def fill(values: tuple[Any, ...]) -> bytes:
        filled = pieces.copy()
        filled[1::2] = chosen(values)
        return pack_all(*filled)

    return fill


def _mark(number: int, size: int) -> bytes:
    """Bytes that are in no text; ASCII, as the id of a request is."""
    return (b"\x01\x02\x03" + bytes((number + 4,)) * size)[:size]


def _time(number: int) -> int:
    return 0x0101_0203_0101_0300 + number


def _written(trace_id: bytes, span_id: bytes) -> bytes:
    return write(SpanContext(trace_id.hex(), span_id.hex()))
