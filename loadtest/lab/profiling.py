"""t(rows, concurrency) of a running candidate, in seconds rather than minutes.

k users in a closed loop keep k sessions busy, each with batches of exactly the rows of one request. The model's own time comes
from the server's statistics; where it has none, from the client's, overhead included. Sizes are visited up, then down again: so
a drift of the machine (clock, neighbours) spreads over all of them. Where the two visits differ much, a third tells which was
disturbed.

Then come as many users as keep all sessions in full batches: what they are answered in a second is the most that the server can
do, whatever a request costs it beside the model. Last comes open traffic. Its requests arrive while a batch runs, are decoded
on the same cores, and make it slower than users do who wait for it. All times are raised by that.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from loadtest.results import LoadSpec, RunResult
from loadtest.search.events import Timing
from loadtest.search.prediction import ProfiledService
from loadtest.search.strategy import powers_up_to
from loadtest.wording import failures

_LEAST_VISIT_S: Final = 0.3  # of one visit
_PATIENCE_LIMITS: Final = 5  # a visit without an answer is repeated once, for so many limits
_TIMEOUT: Final = "timeout"  # the error of a request that got no answer
# Errors of requests that took too long, or may have, as the server or we see it.
_TOO_LATE: Final = {"http 503", "http 504", "grpc UNAVAILABLE", "grpc DEADLINE_EXCEEDED", _TIMEOUT}
_TRAFFIC_VISITS: Final = 4  # as long as so many visits, with open traffic
_TRAFFIC_SHARE: Final = 0.8  # of what full batches on all sessions would carry, and of what saturation did
_SATURATION_VISITS: Final = 4  # as long as so many visits, with users for full batches on all sessions
_MOST_SHED: Final = 0.05  # of those users' requests: refused users try again at once, and that keeps the server busy
_MUCH_SLOWER: Final = 1.5  # one visit than the other: it was disturbed
_P90_SIGMAS: Final = 1.2816  # of a normal distribution, above its median


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """What the server counted: rows of a batch -> (executions, their total ns), and in its queue (requests, their total ns)."""

    by_rows: dict[int, tuple[int, int]]
    queue: tuple[int, int] = (0, 0)

    def since(self, before: "BatchStatistics") -> "BatchStatistics":
        """What was added after `before`."""
        added = {}
        for rows, (count, ns) in self.by_rows.items():
            old_count, old_ns = before.by_rows.get(rows, (0, 0))
            if count > old_count:
                added[rows] = count - old_count, ns - old_ns
        count, ns = self.queue
        return BatchStatistics(added, (count - before.queue[0], ns - before.queue[1]))

    @property
    def queue_ms(self) -> float:
        """What a request waited there on average; 0 if that is not known."""
        count, ns = self.queue
        return ns / count / 1e6 if count > 0 else 0.0

    def mean_ms(self, rows: int) -> float | None:
        count, ns = self.by_rows.get(rows, (0, 0))
        return ns / count / 1e6 if count else None


def batch_statistics(statistics: dict[str, object]) -> BatchStatistics:
    """Read the v2 statistics extension's answer for one model. Source: Triton `extension_statistics.md`."""
    by_rows: dict[int, tuple[int, int]] = {}
    waited_count = waited_ns = 0
    models = statistics.get("model_stats")
    for model in models if isinstance(models, list) else ():
        waited = model.get("inference_stats", {}).get("queue", {})
        waited_count, waited_ns = waited_count + waited.get("count", 0), waited_ns + waited.get("ns", 0)
        for entry in model.get("batch_stats", ()):
            infer = entry["compute_infer"]
            count, ns = by_rows.get(entry["batch_size"], (0, 0))
            by_rows[entry["batch_size"]] = count + infer["count"], ns + infer["ns"]
    return BatchStatistics(by_rows, (waited_count, waited_ns))


@dataclass(frozen=True, slots=True)
class Findings:
    """overhead_ms: the client's time less the model's, and less the wait for a batch that is simulated, one request alone.

    saturated_rps: requests of the payload's size answered per second when all sessions have full batches; None if none was.
    """

    timings: tuple[Timing, ...]
    overhead_ms: float
    saturated_rps: float | None


class ProfileFailed(Exception):
    """Requests failed, or one alone took far too long; the message says which."""


async def profile(
    base: LoadSpec,
    *,
    rows: tuple[int, ...],
    sessions: int,
    seconds: float,
    limit_ms: float,
    measure: Callable[[LoadSpec], Awaitable[RunResult]],
    look: Callable[[], Awaitable[BatchStatistics]],
    lengths: str = "",
    simulated: bool = True,
) -> Findings:
    """Sizes that alone take longer than the SLO's limit are left out, once one of them was seen.

    lengths: as in LoadSpec, of all requests but the crowd's, so that times differ by rows alone. simulated: whether predictions
    wait for batches as the server does; else that wait is overhead. Raises: ProfileFailed.
    """
    concurrencies = powers_up_to(sessions)
    slice_s = max(_LEAST_VISIT_S, seconds / (len(rows) * len(concurrencies) * 2 + 1 + _SATURATION_VISITS + _TRAFFIC_VISITS))
    samples: dict[tuple[int, int], list[tuple[int, float, float, float]]] = {}
    refused = ""  # what the last visit without a success was answered; "": nothing

    async def visit(n: int, k: int) -> float:
        """The model's time; infinite, if no request ended within several limits, or the server shed all of them as late.

        A server that ran no batch of n, as it joined requests of several users, has told nothing of n.
        """
        nonlocal refused
        for duration_s in (slice_s, max(3 * slice_s, _PATIENCE_LIMITS * limit_ms / 1e3)):
            before = await look()
            wanted = replace(
                base, lengths=lengths, rows=str(n), pattern=f"users:count={k}", duration_s=duration_s, warmup_s=0.0, slo=None
            )
            result = await measure(wanted)
            if result.succeeded:
                break
            refused = failures(result.errors, result.error_samples) if set(result.errors) - {_TIMEOUT} else ""
            if set(result.errors) - _TOO_LATE:
                raise ProfileFailed(refused)
        else:
            return math.inf
        executed = (await look()).since(before)
        # Others of the group wait otherwise for a batch: each as it is simulated.
        client_ms = result.service.mean - (executed.queue_ms if simulated else 0.0)
        model_ms = executed.mean_ms(n)
        if executed.by_rows and model_ms is None:
            return client_ms
        spread = math.log(max(1.0, result.service.p90 / result.service.p50)) / _P90_SIGMAS if result.service.p50 else 0.0
        samples.setdefault((n, k), []).append((result.succeeded, model_ms or client_ms, spread, client_ms))
        return model_ms or client_ms

    if await visit(rows[0], 1) == math.inf:
        late = f"one request alone is not answered within {_PATIENCE_LIMITS} times the limit of {limit_ms:g} ms"
        raise ProfileFailed(refused or late)
    samples.clear()  # that was the warm-up
    slower = dict.fromkeys(concurrencies, 1.0)  # than one alone, as far as it is known
    for n in rows:
        alone_ms = await visit(n, 1)
        if alone_ms > limit_ms:
            break
        for k in concurrencies[1:]:
            if alone_ms * slower[k] > limit_ms:
                break  # the server would shed them, and users who try again at once would disturb what is measured next
            slower[k] = await visit(n, k) / alone_ms
    for n, k in list(reversed(samples)):
        await visit(n, k)
    for (n, k), points in list(samples.items()):
        if max(point[1] for point in points) > _MUCH_SLOWER * min(point[1] for point in points):
            await visit(n, k)
    if (rows[0], 1) not in samples:
        raise ProfileFailed("requests that were answered at first were so no longer" + f": {refused}" * bool(refused))
    timings = tuple(Timing(n, k, *_mean(points)[:2]) for (n, k), points in sorted(samples.items()))
    model_ms, _, client_ms = _mean(samples[rows[0], 1])
    saturated_rps = 0.0
    users = max(1, sessions * rows[-1] // int(base.rows))
    while users:
        crowd = await measure(replace(base, pattern=f"users:count={users}", duration_s=_SATURATION_VISITS * slice_s, slo=None))
        saturated_rps = max(saturated_rps, crowd.succeeded_rps)
        users = users // 2 if crowd.error_rate > _MOST_SHED else 0
    traffic_s = _TRAFFIC_VISITS * slice_s
    widest = max(timing.concurrency for timing in timings)
    rows_per_ms = max(sessions * timing.rows / timing.ms for timing in timings if timing.concurrency == widest)
    rate_rps = _TRAFFIC_SHARE * min(rows_per_ms * 1e3 / int(base.rows), saturated_rps or math.inf)
    before = await look()
    await measure(replace(base, lengths=lengths, rate_rps=rate_rps, duration_s=traffic_s, warmup_s=0.0, slo=None))
    slower_now = slowdown(timings, (await look()).since(before), sessions, traffic_s)
    timings = tuple(replace(timing, ms=timing.ms * slower_now) for timing in timings)
    return Findings(timings, max(0.0, client_ms - model_ms), saturated_rps or None)


def slowdown(timings: Sequence[Timing], executed: BatchStatistics, sessions: int, seconds: float) -> float:
    """How much longer batches took in `seconds` of traffic than by their profile; 1 if one of the two is not known."""
    if not executed.by_rows or not timings:
        return 1.0
    service = ProfiledService(timings, max(executed.by_rows))
    spent_ms = sum(ns for _, ns in executed.by_rows.values()) / 1e6
    # A batch finds each other session busy as often as the sessions are.
    busy = 1 + (sessions - 1) * min(1.0, spent_ms / (sessions * seconds * 1e3))
    below, share = int(busy), busy % 1
    profiled_ms = sum(
        count * ((1 - share) * service.ms(n, below) + share * service.ms(n, below + 1))
        for n, (count, _) in executed.by_rows.items()
    )
    return spent_ms / profiled_ms


def _mean(points: list[tuple[int, float, float, float]]) -> tuple[float, float, float]:
    """Model, spread and client over the visits, each weighed by its requests; of three, the two that are most alike."""
    if len(points) > 2:
        ordered = sorted(points, key=lambda point: point[1])
        points = min((list(pair) for pair in pairwise(ordered)), key=lambda pair: pair[1][1] / pair[0][1])
    weight = sum(point[0] for point in points)
    model, spread, client = (sum(point[0] * point[column] for point in points) / weight for column in (1, 2, 3))
    return model, spread, client
