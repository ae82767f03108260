"""What is counted arrives in the exposition, also that of another process of the node."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.engine.metrics import Metrics
from gateway.errors import Code


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_requests_are_counted_by_model_protocol_and_code() -> None:
    metrics = Metrics()
    endpoint = metrics.endpoint("m", "1", "rest")
    endpoint.done(0, 10_000, 2_000_000, 2_020_000)
    endpoint.failed(Code.OVERLOADED, 0, 1_000)
    found = samples(metrics.expose()[1].decode())
    assert found[key("gateway_requests_total", model="m", version="1", protocol="rest", code="ok")] == 1
    assert found[key("gateway_requests_total", model="m", version="1", protocol="rest", code="overloaded")] == 1
    assert found[key("gateway_request_duration_seconds_sum", model="m", version="1", protocol="rest")] == pytest.approx(0.00202)
    assert found[key("gateway_stage_duration_seconds_bucket", model="m", version="1", stage="decode", le="1e-05")] == 1


def test_an_slo_is_a_bucket_edge() -> None:
    metrics = Metrics(slo_s=[0.042])
    metrics.endpoint("m", "1", "rest").done(0, 0, 0, 42_000_000)
    found = samples(metrics.expose()[1].decode())
    labels = {"model": "m", "version": "1", "protocol": "rest"}
    assert found[key("gateway_request_duration_seconds_bucket", le="0.042", **labels)] == 1
    assert found[key("gateway_request_duration_seconds_bucket", le="0.025", **labels)] == 0


@pytest.mark.slow
def test_a_process_answers_for_all_of_its_node(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        from gateway.engine.metrics import Metrics
        metrics = Metrics()
        metrics.endpoint("m", "1", "rest").done(0, 0, 0, 1000)
        print(metrics.expose()[1].decode())
    """)
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for expected in (1, 2):
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        found = samples(done.stdout)
        assert found[key("gateway_requests_total", model="m", version="1", protocol="rest", code="ok")] == expected
