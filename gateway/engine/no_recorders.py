"""With `metrics: off`: nothing is counted, and nothing costs more than the call."""

from gateway.batching.batch import Batch
from gateway.engine.recorders import EndpointMetrics, LaneMetrics, RoutingMetrics
from gateway.engine.runner import Execution
from gateway.errors import Code


class NoLaneMetrics(LaneMetrics):
    __slots__ = ()

    def batch_done(self, batch: Batch, execution: Execution, now_ns: int, *, failed: bool) -> None: ...

    def retried(self) -> None: ...

    def dropped(self) -> None: ...


class NoRoutingMetrics(RoutingMetrics):
    def routed(self, backend: str, reason: str) -> None: ...

    def copied(self, backend: str, why: str, result: str) -> None: ...

    def busy(self, backend: str, usd: float) -> None: ...


class NoEndpointMetrics(EndpointMetrics):
    __slots__ = ()

    def done(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int, traced: bytes = b"") -> None: ...

    def part(self, gap_ns: int | None) -> None: ...

    def streamed(self, arrival_ns: int, decoded_ns: int, encoding_ns: int, encoded_ns: int, traced: bytes = b"") -> None: ...

    def failed(self, code: Code, arrival_ns: int, answered_ns: int) -> None: ...
