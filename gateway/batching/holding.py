"""How long a batch waits for more although a worker is idle: step 4 of the adaptive policy."""

from bisect import bisect_left
from typing import Final

from gateway.batching.inflow import CAP_AT_MOST, UTILISATION_AT_LEAST, Inflows, View
from gateway.batching.overload import collected
from gateway.batching.queue import NEVER, Queue, State

THINNED: Final = 1.5  # times what a batch should take to gather: then the arrivals have thinned out


def pace(view: View, queue: Queue, waiting: int, deadline_ns: int, sustains: int, slo_ns: int | None) -> tuple[int, int]:
    """Step 4, pace. The rows to gather, and when to go at the latest; 0: now. sustains: index of n_s, n_c at most."""
    rate, curve = view.rate, view.curve
    target, gathered = view.sizes[sustains], 1 + int(rate * curve.line_ns[0] * view.level)
    if gathered < target:
        target = gathered
    if curve.steps is not None:
        step = min(sustains, view.as_long(curve.at(target)))
        gathered_ns = view.sizes[step] / rate + view.shape[step] * view.quantile
        if slo_ns is None or gathered_ns <= CAP_AT_MOST * slo_ns:
            target = view.sizes[step]
    if waiting >= target:
        return target, 0
    wake_at_ns = queue.oldest_ns + THINNED * target / rate
    if deadline_ns != NEVER and (latest_ns := deadline_ns - view.expected_ns(target) * view.margin) < wake_at_ns:
        wake_at_ns = latest_ns
    return target, int(wake_at_ns) if wake_at_ns > view.now_ns + 1 else 0


def gather(view: View, queue: Queue, deadline_ns: int, state: State, slo_ns: int, streams: Inflows) -> int:
    """Step 4, pace, where the lengths keep fewer workers busy together: when to go at the latest; 0: now."""
    groups = streams.apart(state.queues)
    longest = streams.longest(groups)
    assert longest is not None  # else they could not be together
    rate = streams.rate(groups, view.now_ns)
    sustains = bisect_left(longest.rates, rate * longest.level(view.workers) / (UTILISATION_AT_LEAST * view.workers))
    at = min(sustains, collected(longest, rate, slo_ns, view.quantile), len(longest.sizes) - 1)
    target = longest.sizes[at]
    if state.rows >= target:
        return 0
    wake_at_ns = queue.oldest_ns + THINNED * target / rate
    if deadline_ns != NEVER:
        wake_at_ns = min(wake_at_ns, deadline_ns - longest.shape[at] * view.quantile)
    return int(wake_at_ns) if wake_at_ns > view.now_ns + 1 else 0


def hold(view: View, waiting: int, deadline_ns: int, state: State) -> int:
    """Step 4, rule H. When to go at the latest; 0: now. waiting: fewer rows than the largest size.

    With τ = 1/λ and G until the next worker frees, hold iff n(τ+ΔT) + T(n+1) + τ < G + T(λG): what the waiting and
    the next arrival lose if they go together after it has come, against what the next arrival loses if they go without it.
    """
    now_ns, rate, level, sizes, shape = view.now_ns, view.rate, view.level, view.sizes, view.shape
    gap_ns = 1.0 / rate
    at = bisect_left(sizes, waiting)
    own_ns, next_ns = shape[at] * level, shape[at + 1 if sizes[at] == waiting else at] * level
    free_at_ns = min([batch.closed_ns + batch.expected_ns for batch in state.in_flight])
    free_ns = free_at_ns - now_ns if free_at_ns > now_ns else 0
    come = rate * free_ns
    together = waiting * (gap_ns + next_ns - own_ns) + next_ns + gap_ns
    apart = free_ns + (view.expected_ns(come) if come > 1.0 else view.lone_ns)
    wake_at_ns = now_ns + apart - together
    if deadline_ns != NEVER and (latest_ns := deadline_ns - next_ns * view.margin) < wake_at_ns:
        wake_at_ns = latest_ns
    return int(wake_at_ns) if wake_at_ns > now_ns + 1 else 0
