"""Why a request is not run, in the words its client gets."""

from gateway.errors import DeadlineExceeded, InVain, Overloaded, TooLarge
from gateway.types import InferRequest


def too_late(request: InferRequest, deadline_ns: int, now_ns: int) -> DeadlineExceeded:
    """Its deadline has passed."""
    if deadline_ns <= request.arrival_ns:  # of a call that took as long to send it
        return DeadlineExceeded(f"model '{request.model}': the request came after its deadline")
    waited_ms = (now_ns - request.arrival_ns) / 1e6
    limit_ms = (deadline_ns - request.arrival_ns) / 1e6
    limit = f"{limit_ms:.1f} ms after arrival"
    if limit_ms < 1:  # as where milliseconds were meant
        limit = f"{limit_ms * 1e3:g} µs after arrival (`timeout` is in microseconds)"
    return DeadlineExceeded(f"model '{request.model}': the request waited {waited_ms:.1f} ms, its deadline was {limit}")


def too_large(request: InferRequest, rows: int, most: int, most_queued: int) -> TooLarge:
    """It has more rows than one request may have."""
    return TooLarge(
        f"model '{request.model}': {rows} rows in one request, expected at most {most} (half of batching.max_queue_rows "
        f"{most_queued}, but one batch at least)"
    )


def no_room(request: InferRequest, waiting: int, more: int, most: int, retry_after_s: float | None) -> Overloaded:
    """The queue is full. waiting, more, most: rows."""
    text = f"model '{request.model}': {waiting} rows are waiting, {more} more would exceed max_queue_rows {most}"
    return Overloaded(text, retry_after_s)


def hopeless(request: InferRequest, retry_after_s: float | None, *, begun: bool = False) -> Overloaded | InVain:
    """It would have been late. begun: a part of it has run, so it is not safe to send again."""
    if begun:
        return InVain(f"model '{request.model}': a part of the request has run, the rest would be after its deadline")
    text = f"model '{request.model}': overloaded, the request would have been answered after its deadline"
    return Overloaded(text, retry_after_s)


def displaced(request: InferRequest, retry_after_s: float | None) -> Overloaded:
    """It was in the queue, and is no more."""
    text = f"model '{request.model}': overloaded, the request made room in the queue for one of a higher class"
    return Overloaded(text, retry_after_s)
