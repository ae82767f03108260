"""What a batcher tells of arrivals and first parts while it is not recorded: nothing."""

from typing import Any, Final, Self

from gateway.batching.batch import Batch
from gateway.errors import GatewayError
from gateway.types import InferRequest


class _Nowhere(list[Any]):
    """Takes events, and keeps none."""

    def append(self, _: Any, /) -> None: ...

    def __iadd__(self, _: Any, /) -> Self:  # type: ignore[misc]  # nobody adds to it otherwise
        return self


NOWHERE: Final[list[Any]] = _Nowhere()


class Untold:
    """`RecordedBatcher` has the same, and keeps them."""

    def _added(self, request: InferRequest, now_ns: int, reserved_ns: int) -> None: ...

    def _refused(self, request: InferRequest, now_ns: int, reserved_ns: int, error: GatewayError) -> GatewayError:
        """The error, to be raised."""
        return error

    def _reserves(self, reserved_ns: int) -> None: ...

    def begun(self, batch: Batch, now_ns: int) -> None:
        """The first part of the answer to a batch's one request is there. Decides nothing."""
