"""What came between two looks."""

from bisect import bisect_left
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.rates import Statuses, between, quantile


def backend(name: str = "one", **fields: Any) -> dict[str, Any]:
    return {
        "name": name, "batches": 0, "batch_rows": 0, "padding_rows": 0, "executions": 0, "compute_ms": 0.0,
        "batch_sizes": {"bounds": [1, 2], "counts": [0, 0, 0]}, **fields,
    }  # fmt: skip


def model(*, ok: int = 0, failed: int = 0, counts: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    return {
        "name": "m", "version": "1", "slo_ms": 50.0, "usd_per_hour": 3.6, "requests": {"ok": ok, "overloaded": failed},
        "slo_requests": {"met": 0, "missed": 0},
        "latency": {"bounds_ms": [10.0, 50.0, 100.0] if counts else [], "counts": list(counts)}, "backends": [backend()],
        **fields,
    }  # fmt: skip


def status(time_s: float, *models: dict[str, Any]) -> dict[str, Any]:
    return {"time_s": time_s, "models": list(models)}


def test_rates_and_percentiles_are_of_the_time_between() -> None:
    then = model(ok=100, failed=5, counts=(100, 0, 0, 0), slo_requests={"met": 100, "missed": 5})
    now = model(ok=300, failed=15, counts=(200, 98, 2, 0), slo_requests={"met": 290, "missed": 15})
    found = between(then, now, 10.0)
    assert (found.requests_per_s, found.failed_per_s) == (21.0, 1.0)
    assert found.p50_ms == 10.0
    assert found.p99_ms == pytest.approx(50.0)
    assert found.in_time == 0.95
    assert found.usd_per_million == pytest.approx(3.6 / 3600 * 10 / 200 * 1e6)


def test_what_no_request_came_for_is_unknown_and_not_zero() -> None:
    found = between(None, model(), 10.0)
    assert (found.requests_per_s, found.p50_ms, found.p99_ms, found.in_time, found.usd_per_million) == (
        0,
        None,
        None,
        None,
        None,
    )
    assert (found.rows_per_batch, found.padding, found.backends[0].share) == (None, None, None)


def test_a_model_that_was_not_asked_before_counts_from_its_first_request() -> None:
    assert between(model(), model(ok=4, counts=(0, 4, 0, 0)), 1.0).p50_ms == 30.0


def test_backends_share_the_rows() -> None:
    then = model(backends=[backend("one", batches=1, batch_rows=5)])
    now = model(
        backends=[
            backend("one", batches=3, batch_rows=11, executions=2, compute_ms=5.0),
            backend("two", batches=1, batch_rows=2, padding_rows=2),
        ]
    )
    found = between(then, now, 1.0)
    assert [(each.name, each.share, each.rows_per_batch, each.batch_ms) for each in found.backends] == [
        ("one", 0.75, 3.0, 2.5),
        ("two", 0.25, 2.0, None),
    ]
    assert (found.rows_per_batch, found.padding) == (8 / 3, 0.2)


def test_above_the_last_bound_is_infinity() -> None:
    assert quantile([10.0], [1, 9], 0.5) == inf


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_that_has_it(counts: list[int], q: float) -> None:
    bounds = [1.0, 2.0, 4.0]
    found = quantile(bounds, counts, q)
    if found is None:
        assert not sum(counts)
        return
    index = bisect_left(bounds, found)
    assert sum(counts[:index]) < q * sum(counts) <= sum(counts[: index + 1])


def test_a_window_goes_back_as_far_as_it_says_or_as_far_as_there_is() -> None:
    statuses = Statuses()
    for second in range(100):
        now = model(ok=second * second, counts=(second * second, 0, 0, 0))
        statuses.add(status(1000.0 + second, now))
        if second == 0:
            assert statuses.figures(now, 10) is None
        elif second == 4:
            figures = statuses.figures(now, 10)
            assert figures is not None
            assert (figures.span_s, figures.requests_per_s) == (4, 4)
    for span_s in (10, 60):
        figures = statuses.figures(now, span_s)
        assert figures is not None
        assert (figures.span_s, figures.answered) == (span_s, 99**2 - (99 - span_s) ** 2)


def test_a_status_that_was_there_before_is_nothing_new() -> None:
    statuses = Statuses()
    for time_s, ok in ((0.0, 1), (1.0, 3), (1.0, 3)):
        statuses.add(status(time_s, model(ok=ok)))
    figures = statuses.figures(statuses.last["models"][0], 10)
    assert figures is not None
    assert figures.requests_per_s == 2


def test_after_a_pause_in_which_nobody_looked_a_window_is_not_stretched_over_it() -> None:
    statuses = Statuses()
    statuses.add(status(0.0, model(ok=1)))
    statuses.add(status(300.0, model(ok=1000)))
    assert statuses.figures(statuses.last["models"][0], 10) is None


def test_counts_that_fall_are_those_of_a_gateway_that_was_started_again() -> None:
    statuses = Statuses()
    statuses.add(status(0.0, model(ok=100, counts=(100, 0, 0, 0))))
    statuses.add(status(1.0, model(ok=110, counts=(110, 0, 0, 0))))
    again = model(ok=3, counts=(3, 0, 0, 0))
    statuses.add(status(2.0, again))
    assert statuses.figures(again, 10) is None
    statuses.add(status(3.0, model(ok=5, counts=(5, 0, 0, 0))))
    figures = statuses.figures(statuses.last["models"][0], 10)
    assert figures is not None
    assert figures.answered == 2
