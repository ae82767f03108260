"""What whoever sends a request gets for it, and gives: its place, and where its answer goes."""

from collections.abc import Callable
from typing import Protocol

from gateway.errors import GatewayError
from gateway.types import InferResponse

OnAnswer = Callable[[InferResponse | GatewayError | None], None]
"""Gets a request's one answer or error; None, if its answer was given in parts, and that was the last of them."""
OnAnswerPart = Callable[[InferResponse], None]
"""Gets each part of the answer of a decoupled model, in order, before OnAnswer is called."""


class Place(Protocol):
    """An accepted request's own place, wherever it is now."""

    def cancel(self) -> None:
        """Nobody waits for the request any more: out of the queue now, or its result is dropped. on_answer gets Cancelled.

        Does nothing once it is answered.
        """
        ...

    def taken(self) -> None:
        """A part of the answer has left for its client: the model may make one more. Does nothing once it is answered."""
        ...


class LanePlace(Place, Protocol):
    """Its place in one lane."""

    @property
    def ran(self) -> bool:
        """Whether any of it has run there, or runs."""
        ...
