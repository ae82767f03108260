"""The batch of one request: of one that waits alone, as nearly all do where few ask the same model, or that shares none."""

from gateway.batching.batch import Batch, Part
from gateway.batching.policy import Decision
from gateway.batching.queue import BatchLimits, Queue, State


def close_alone(
    queue: Queue, state: State, limits: BatchLimits, decision: Decision, now_ns: int, batched: bool
) -> Batch | None:
    """Close it, if the decision is that the one request of all queues goes now, and whole. None: it is not so simple.

    The batcher comes to the same by itself, at twice the price. Not for ragged inputs. batched: as `Batcher` has it.
    """
    queue.outlook = decision.outlook
    _, _, _, rows, request = queue.entries[0]
    if decision.rows < rows or rows > limits.max_rows or decision.shed or decision.fill:
        return None
    queue.entries.clear()
    queue.rows = state.rows = state.requests = 0
    in_flight = state.in_flight
    batch = Batch(
        parts=[Part(request, request.rows - rows if batched else 0, rows)],
        rows=rows,
        padded_rows=limits.padded(rows) if limits.row_sizes else rows,
        reason="full" if rows == limits.max_rows and decision.reason == "idle" else decision.reason,
        closed_ns=now_ns,
        group=queue.group,
        expected_ns=decision.expected_ns,
        batched=batched,
        busy=len(in_flight) + 1,
    )
    in_flight[batch] = None
    return batch
