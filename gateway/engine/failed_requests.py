"""What the log tells of requests that were answered with an error: one line each at most, and not of all, where there are many.

What a model failed, and faults of ours, are told where they come up, with their traceback.
"""

import logging
from typing import Any, Final

from gateway.engine.failure_log import FailureLog
from gateway.errors import Code, GatewayError, shortened
from gateway.tracing.context import span_id_of, trace_id_of
from gateway.types import Caller, InferRequest, RequestTrace

_TOLD_BEFORE: Final = frozenset((Code.BACKEND_FAILED, Code.INTERNAL))
# The server refuses, or is late; any other code is about what a client asks.
_OURS: Final = frozenset((Code.OVERLOADED, Code.DEADLINE_EXCEEDED, Code.NOT_READY, Code.BACKEND_UNREACHABLE))
_KEPT: Final = 4096  # models, by the codes that each had
_LONGEST: Final = 500  # of a message, which may hold what a client has sent

log = logging.getLogger(__name__)


class FailedRequests:
    """Tells of them. Of each model, and of each code, by itself: one must not silence the other."""

    def __init__(self) -> None:
        self._logs: dict[tuple[str, str, Code], FailureLog] = {}

    def tell(
        self,
        error: GatewayError,
        *,
        model: str,
        version: str,
        protocol: str,
        caller: Caller,
        trace: RequestTrace | None,
        took_ns: int,
        now_ns: int,
    ) -> None:
        """model: empty for a request that named none there is. took_ns: until its answer."""
        code = error.code
        level = logging.WARNING if code in _OURS else logging.DEBUG if code is Code.CANCELLED else logging.INFO
        if code in _TOLD_BEFORE or not log.isEnabledFor(level):
            return
        failures = self._logs.get((model, version, code))
        if failures is None:
            if len(self._logs) >= _KEPT:  # models have come and gone
                self._logs.clear()
            failures = self._logs[model, version, code] = FailureLog()
        left_out = failures.take(now_ns)
        if left_out is None:
            return
        took_ms = took_ns / 1e6
        fields = {
            **_ids(caller, trace),
            "model": model,
            "version": version,
            "protocol": protocol,
            "code": code.value,
            "took_ms": round(took_ms, 3),
            "left_out": left_out,
        }
        said = " ".join(error.message[:_LONGEST].split())
        of = f" of model {model} version {version}" if model else ""
        others = f" ({left_out} like it before are left out)" if left_out else ""
        log.log(
            level, "request %s%s over %s: %s after %.1f ms%s: %s",
            fields["request_id"], of, protocol, code.value, took_ms, others, said, extra={"fields": fields},
        )  # fmt: skip


def fields_of(request: InferRequest, code: Code) -> dict[str, Any]:
    """What a line about a request that has failed says of it, as JSON."""
    fields: dict[str, Any] = {"model": request.model, "version": request.version, "code": code.value}
    if request.id:
        fields["id"] = shortened(request.id)
    return {**_ids(request.caller, request.trace), **fields} if request.caller is not None else fields


def _ids(caller: Caller, trace: RequestTrace | None) -> dict[str, str]:
    ids = {"request_id": caller.request_id.decode("ascii")}
    return ids if trace is None else ids | {"trace_id": trace_id_of(trace.own), "span_id": span_id_of(trace.own)}
