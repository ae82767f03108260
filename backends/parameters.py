"""What a class or function of the user's is told of a request beside its tensors."""

from collections.abc import Mapping
from typing import Any

from backends.base import DEADLINE_NS, NO_OPTIONS, TRACEPARENT, TRACESTATE


class Parameters(dict[str, Any]):
    """The parameters that the client gave, by name; and, as attributes, what the gateway knows of the request.

    deadline_ns: `time.monotonic_ns` after which nobody waits for the answer. traceparent, tracestate: the span within which
    the model runs, as W3C Trace Context writes it. Each is None where there is none.
    """

    __slots__ = ("deadline_ns", "traceparent", "tracestate")

    def __init__(
        self,
        given: Mapping[str, Any] = NO_OPTIONS,
        *,
        deadline_ns: int | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> None:
        super().__init__(given)
        self.deadline_ns = deadline_ns
        self.traceparent = traceparent
        self.tracestate = tracestate


def parameters_of(told: Mapping[str, Any]) -> Parameters:
    """Of what a session is told."""
    own = dict(told)
    deadline_ns, traceparent, tracestate = (own.pop(name, None) for name in (DEADLINE_NS, TRACEPARENT, TRACESTATE))
    return Parameters(own, deadline_ns=deadline_ns, traceparent=traceparent, tracestate=tracestate)
