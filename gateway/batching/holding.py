"""How long a batch waits for more although a worker is idle: step 4 of the adaptive policy."""

from typing import Final

from gateway.batching.inflow import CAP_AT_MOST, View
from gateway.batching.queue import NEVER, Queue, State

THINNED: Final = 1.5  # times what a batch should take to gather: then the arrivals have thinned out


def pace(view: View, queue: Queue, waiting: int, deadline_ns: int, sustains: int, slo_ns: int | None) -> tuple[int, int]:
    """Step 4, pace. The rows to gather, and when to go at the latest; 0: now. sustains: index of n_s, n_c at most."""
    fixed_ns, _ = view.curve.line_ns
    target = min(view.sizes[sustains], 1 + int(view.rate * fixed_ns * view.level))
    if view.curve.steps is not None:
        step = min(sustains, view.as_long(view.curve.at(target)))
        gathered_ns = view.sizes[step] / view.rate + view.shape[step] * view.quantile
        if slo_ns is None or gathered_ns <= CAP_AT_MOST * slo_ns:
            target = view.sizes[step]
    if waiting >= target:
        return target, 0
    wake_at_ns = queue.oldest_ns + THINNED * target / view.rate
    if deadline_ns != NEVER:
        wake_at_ns = min(wake_at_ns, deadline_ns - view.expected_ns(target) * view.margin)
    return target, int(wake_at_ns) if wake_at_ns > view.now_ns + 1 else 0


def hold(view: View, waiting: int, deadline_ns: int, state: State) -> int:
    """Step 4, rule H. When to go at the latest; 0: now.

    With τ = 1/λ and G until the next worker frees, hold iff n(τ+ΔT) + T(n+1) + τ < G + T(λG): what the waiting and
    the next arrival lose if they go together after it has come, against what the next arrival loses if they go without it.
    """
    now_ns = view.now_ns
    gap_ns = 1.0 / view.rate
    next_ns = view.expected_ns(waiting + 1)
    free_ns = max(0, min([batch.closed_ns + batch.expected_ns for batch in state.in_flight]) - now_ns)
    together = waiting * (gap_ns + next_ns - view.expected_ns(waiting)) + next_ns + gap_ns
    apart = free_ns + view.expected_ns(max(1.0, view.rate * free_ns))
    wake_at_ns = now_ns + apart - together
    if deadline_ns != NEVER:
        wake_at_ns = min(wake_at_ns, deadline_ns - next_ns * view.margin)
    return int(wake_at_ns) if wake_at_ns > now_ns + 1 else 0
