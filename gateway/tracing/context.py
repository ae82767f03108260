"""W3C Trace Context (https://www.w3.org/TR/trace-context/): a span's name as it passes between processes."""

import random
import re
from typing import Final

from gateway.types import SpanContext

TRACEPARENT: Final = b"traceparent"
TRACESTATE: Final = b"tracestate"
TRACERESPONSE: Final = b"traceresponse"  # https://w3c.github.io/trace-context/#traceresponse-header

_SAMPLED: Final = 1
# Version ff is none; of later versions than 00 so much is known, and more may follow.
_PARENT: Final = re.compile(rb"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER: Final = re.compile(  # of tracestate: a key and its value
    rb"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_STATE_BYTES: Final = 512
_STATE_MEMBERS: Final = 32
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16

_random: Final = random.Random()  # not the one that a model's code may seed
_random_bits: Final = _random.getrandbits
random_bytes: Final = _random.randbytes
"""So many, for ids."""


def read(parent: bytes, state: bytes = b"") -> tuple[SpanContext, bool] | None:
    """The span that a client names, and whether it is sampled; None, if that is malformed, as if there were none."""
    match = _PARENT.fullmatch(parent)
    if match is None or (match[1] == b"00" and match[5] is not None):
        return None
    trace_id, span_id = match[2].decode(), match[3].decode()
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return SpanContext(trace_id, span_id, _kept(state)), bool(int(match[4], 16) & _SAMPLED)


def _kept(state: bytes) -> str:
    """What a client has sent as tracestate; empty, if that is malformed or too long: it is dropped whole then."""
    if not state or len(state) > _STATE_BYTES:
        return ""
    members = [_MEMBER.fullmatch(member) for member in map(bytes.strip, state.split(b",")) if member]
    keys = {member[1] for member in members if member is not None}
    return state.decode() if len(keys) == len(members) <= _STATE_MEMBERS else ""


def write(context: SpanContext) -> bytes:
    """A sampled span, as `traceparent` and `traceresponse` name it."""
    return f"00-{context.trace_id}-{context.span_id}-01".encode()


def random_digits(count: int) -> str:
    """Hexadecimal, two for each of so many bytes, for ids."""
    return f"{_random_bits(8 * count):0{2 * count}x}"


def within(parent: SpanContext) -> bytes:
    """A new span of the same trace, as `write` gives it."""
    return write(SpanContext(parent.trace_id, random_digits(8)))


def trace_id_of(written: bytes) -> str:
    """Of a span as `write` gives it."""
    return written[3:35].decode()


def span_id_of(written: bytes) -> str:
    return written[36:52].decode()
