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
_STATE: Final = re.compile(rb"[ -~]{1,512}")
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16

_random: Final = random.Random()  # not the one that a model's code may seed


def read(parent: bytes, state: bytes = b"") -> tuple[SpanContext, bool] | None:
    """The span that a client names, and whether it is sampled; None, if that is malformed, as if there were none."""
    match = _PARENT.fullmatch(parent)
    if match is None or (match[1] == b"00" and match[5] is not None):
        return None
    trace_id, span_id = match[2].decode(), match[3].decode()
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    kept = state.decode() if _STATE.fullmatch(state) is not None else ""
    return SpanContext(trace_id, span_id, kept), bool(int(match[4], 16) & _SAMPLED)


def write(context: SpanContext) -> str:
    """A sampled span, as `traceparent` and `traceresponse` name it."""
    return f"00-{context.trace_id}-{context.span_id}-01"


def begun() -> SpanContext:
    """The first span of a new trace."""
    return SpanContext(f"{_random.getrandbits(128) or 1:032x}", span_id())


def within(parent: SpanContext) -> SpanContext:
    """A new span of the same trace."""
    return SpanContext(parent.trace_id, span_id(), parent.state)


def span_id() -> str:
    """A new one."""
    return f"{_random.getrandbits(64) or 1:016x}"
