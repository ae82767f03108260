"""A real Prometheus watches a real gateway: one of the scenarios of benchmarks/observability.py, which has them all."""

import pytest

from benchmarks.observability import faster, run


def test_durations_are_divided_and_numbers_are_not() -> None:
    assert faster("rate(x[5m]) > 14.4 * 0.01 and y[1d]", 60) == "rate(x[5000ms]) > 14.4 * 0.01 and y[1440000ms]"
    assert faster("  - name: a\n    interval: 30s\n    for: 15m\n") == "  - name: a\n    interval: 500ms\n    for: 15000ms\n"
    assert faster("model:gateway_slo_missed:ratio_rate5m > 1") == "model:gateway_slo_missed:ratio_rate5m > 1"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.debian("prometheus")
def test_alerts_are_silent_while_all_is_well_and_fire_and_clear_when_a_backend_fails() -> None:
    told = run(["ejected"], well_s=3, clear_s=60)
    assert not told.odd
