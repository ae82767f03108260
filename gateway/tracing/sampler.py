"""Which requests are traced: decided when they come, by who sent them or by chance (head sampling)."""

import math
import random
import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Final

from gateway.tracing.context import TRACEPARENT, TRACERESPONSE, TRACESTATE, random_digits, read, within, write
from gateway.types import BatchTrace, Caller, RequestTrace, SpanContext

_READY: Final = 32  # traces that are made at once
_chance: Final = random.Random().random  # not of the one that a model may seed


class Sampler:
    """Begins the traces of one process. On the event loop's thread.

    others: one for each request that comes before the next that is traced, not counting those whose callers decide.
    """

    def __init__(
        self,
        ratio: float,
        ended: Callable[[RequestTrace | BatchTrace], None],
        *,
        parent_based: bool = True,
        chance: Callable[[], float] = _chance,
    ) -> None:
        """ratio: of the requests of which no caller has decided, that are traced. ended: takes what is to be sent.

        parent_based: whether a caller may decide; if not, of its traces as many are gone on with. chance: from 0 to below 1.
        """
        self._ratio = ratio
        self._ended = ended
        self._parent_based = parent_based
        self._chance = chance
        self._log_of_others = math.log1p(-ratio) if 0 < ratio < 1 else 0.0
        # One number is drawn for each request that is traced, not for each that comes.
        self.others: Iterator[None] = repeat(None, self._gap())  # a number, counted down here, would take longer
        # Few requests are traced, so what does it is in no cache: that costs seven times what it takes when called again and
        # again. So names are made for many of them at once, and little else before it is sent.
        self._ready: list[tuple[bytes, int]] = []  # a trace's first span, and how many requests come before the next

    def begin(self, caller: Caller) -> RequestTrace | None:
        """The trace of a request that has come; None: it has none."""
        headers = caller.headers
        if TRACEPARENT in headers:
            found = read(headers[TRACEPARENT], headers.get(TRACESTATE, b""))
            if found is not None:
                parent, sampled = found
                if not (sampled if self._parent_based else self._takes(parent)):
                    return None
                own = within(parent)
                caller.tell(TRACERESPONSE, own)
                return RequestTrace(own, self._ended, parent.span_id, parent.state)
        for _ in self.others:
            return None
        if not self._ready:
            ids = random_digits(24 * _READY)
            self._ready = [
                (write(SpanContext(ids[at : at + 32], ids[at + 32 : at + 48])), self._gap()) for at in range(0, len(ids), 48)
            ]
        own, others = self._ready.pop()
        self.others = repeat(None, others)
        caller.tell(TRACERESPONSE, own)
        return RequestTrace(own, self._ended)

    def _takes(self, parent: SpanContext) -> bool:
        """By the trace's id, as all do who sample by ratio: of one trace they decide the same."""
        return int(parent.trace_id[16:], 16) < self._ratio * (1 << 64)

    def _gap(self) -> int:
        """How many requests are left out before the next: geometrically distributed, as if each were decided by itself."""
        if self._log_of_others:
            return min(sys.maxsize, int(math.log(1.0 - self._chance()) / self._log_of_others))
        return 0 if self._ratio >= 1 else sys.maxsize
